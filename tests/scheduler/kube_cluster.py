"""A cluster of one machine: etcd, kube-apiserver and kube-scheduler as released, and nodes that a
stub keeps alive. Its kubelets are the model of cluster/pods, which tests/kubelet compares with the
kubelet's own managers; they know exactly what each pod has, also after others have left."""

import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from msgspec.structs import replace

from homenode.cluster.pods.admission import admit
from homenode.cluster.pods.node import KubeletMemory, MemoryTable, Node
from homenode.cluster.pods.pod import read_pod
from homenode.cluster.scheduler.api_server import api_server, follow
from tests.doc_pages import ROOT

GPU = "nvidia.com/gpu"
PACKAGING = ROOT / "packaging" / "kubernetes"
TOKENS = {
    "admin-token-of-this-test": ("admin", "system:masters"),
    "scheduler-token-of-this-test": ("system:kube-scheduler", "system:authenticated"),
    "homenode-token-of-this-test": (
        "system:serviceaccount:homenode:homenode-extender",
        "system:serviceaccounts",
    ),
}
ADMIN, SCHEDULER, HOMENODE = TOKENS
Document = dict[str, Any]


def programs() -> Path:
    """The folder with Kubernetes' programs. Skips where there is none."""
    pytest.importorskip("tornado", reason="tornado is not installed")
    folder = os.environ.get("HOMENODE_KUBERNETES")
    if not folder:
        pytest.skip("HOMENODE_KUBERNETES names no folder: tests/scheduler/programs/build makes it")
    for name in ("kube-apiserver", "kube-scheduler"):
        if not (Path(folder) / name).is_file():
            pytest.skip(f"{folder} has no {name}: tests/scheduler/programs/build makes it")
    if not shutil.which("etcd"):
        pytest.skip("no etcd here: Debian's package etcd-server has it")
    return Path(folder)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)


def make_certificates(folder: Path) -> None:
    """ca, server (for 127.0.0.1), client: each .crt and .key."""
    ca, days = ("-CA", str(folder / "ca.crt"), "-CAkey", str(folder / "ca.key")), ("-days", "2")
    new = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    for name, extra in (
        ("ca", ("-addext", "basicConstraints=critical,CA:TRUE")),
        ("server", (*ca, "-addext", "subjectAltName=IP:127.0.0.1")),
        ("client", ca),
    ):
        out = ("-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.crt"))
        openssl(*new, *days, "-subj", f"/CN={name}", *extra, *out)


class Cluster:
    """Its API, as the admin sees it."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.url = f"https://127.0.0.1:{port}"
        self._context = ssl.create_default_context(cafile=str(folder / "ca.crt"))

    def ask(
        self,
        method: str,
        path: str,
        body: Document | None = None,
        kind: str = "application/json",
        token: str = ADMIN,
    ) -> tuple[int, Document]:
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self.port, timeout=60, context=self._context
        )
        try:
            headers = {"Authorization": f"Bearer {token}", "Content-Type": kind}
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, headers)
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, json.loads(text) if text[:1] == b"{" else {"text": text.decode()}
        finally:
            connection.close()

    def create(self, path: str, body: Document) -> Document:
        status, found = self.ask("POST", f"{path}?fieldValidation=Strict", body)
        assert status == 201, found
        return found

    def kubeconfig(self, token: str) -> Path:
        path = self.folder / f"{token}.conf"
        cluster = {
            "server": self.url,
            "certificate-authority": str(self.folder / "ca.crt"),
        }
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "c", "cluster": cluster}],
                    "users": [{"name": "u", "user": {"token": token}}],
                    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                    "current-context": "x",
                }
            )
        )
        return path

    def token_file(self, token: str) -> Path:
        path = self.folder / f"{token}.token"
        path.write_text(token)
        return path


@contextmanager
def running(folder: Path, name: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program until the block ends; its words are in NAME.log."""
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, cwd=folder)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def until(what: str, is_done: Any, timeout_s: float = 120) -> None:
    end = time.monotonic() + timeout_s
    while not is_done():
        assert time.monotonic() < end, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


@contextmanager
def control_plane(folder: Path, *flags: str) -> Iterator[Cluster]:
    """etcd and an API server with RBAC and the users of TOKENS."""
    binaries = programs()
    make_certificates(folder)
    etcd, peer, port = free_port(), free_port(), free_port()
    tokens = (f'{t},{user},{user},"{group}"' for t, (user, group) in TOKENS.items())
    (folder / "tokens.csv").write_text("\n".join(tokens) + "\n")
    openssl("genrsa", "-out", str(folder / "account.key"), "2048")
    with ExitStack() as stack:
        stack.enter_context(
            running(
                folder,
                "etcd",
                "etcd",
                f"--data-dir={folder / 'etcd'}",
                f"--listen-client-urls=http://127.0.0.1:{etcd}",
                f"--advertise-client-urls=http://127.0.0.1:{etcd}",
                f"--listen-peer-urls=http://127.0.0.1:{peer}",
                "--unsafe-no-fsync",
            )
        )
        api = stack.enter_context(
            running(
                folder,
                "kube-apiserver",
                str(binaries / "kube-apiserver"),
                f"--etcd-servers=http://127.0.0.1:{etcd}",
                "--bind-address=127.0.0.1",
                f"--secure-port={port}",
                f"--tls-cert-file={folder / 'server.crt'}",
                f"--tls-private-key-file={folder / 'server.key'}",
                f"--token-auth-file={folder / 'tokens.csv'}",
                "--authorization-mode=RBAC",
                "--service-account-issuer=https://homenode.test",
                f"--service-account-key-file={folder / 'account.key'}",
                f"--service-account-signing-key-file={folder / 'account.key'}",
                "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
                "--service-cluster-ip-range=10.96.0.0/16",
                *flags,
            )
        )
        cluster = Cluster(folder, port)

        def is_ready() -> bool:
            assert api.poll() is None, (folder / "kube-apiserver.log").read_text()[-2000:]
            try:
                return cluster.ask("GET", "/readyz")[0] == 200
            except OSError:
                return False

        until("kube-apiserver", is_ready)
        yield cluster


@contextmanager
def scheduler(
    cluster: Cluster, extender: int | None = None, *, packs: bool = False, claims: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """kube-scheduler with the configuration of packaging/, as it is but for its paths. extender:
    the port of homenode; None = the stock scheduler, packs: which fills nodes with most GPUs in
    use first. claims: homenode is asked about all pods."""
    config = yaml.safe_load((PACKAGING / "scheduler.yaml").read_text())
    config["clientConnection"]["kubeconfig"] = str(cluster.kubeconfig(SCHEDULER))
    config["leaderElection"] = {"leaderElect": False}
    config |= {"podInitialBackoffSeconds": 1, "podMaxBackoffSeconds": 1}
    if packs:
        strategy = {"type": "MostAllocated", "resources": [{"name": GPU, "weight": 1}]}
        kind = {"apiVersion": config["apiVersion"], "kind": "NodeResourcesFitArgs"}
        fit = {"name": "NodeResourcesFit", "args": {**kind, "scoringStrategy": strategy}}
        names = {"schedulerName": "default-scheduler", "pluginConfig": [fit]}
        config["profiles"] = [names]
    if extender is None:
        del config["extenders"]
    else:
        if claims:
            del config["extenders"][0]["managedResources"]
        config["extenders"][0] |= {
            "urlPrefix": f"https://127.0.0.1:{extender}/",
            "tlsConfig": {
                "caFile": str(cluster.folder / "ca.crt"),
                "certFile": str(cluster.folder / "client.crt"),
                "keyFile": str(cluster.folder / "client.key"),
            },
        }
    path = cluster.folder / "scheduler.json"
    path.write_text(json.dumps(config))
    port = free_port()
    with running(
        cluster.folder,
        "kube-scheduler",
        str(programs() / "kube-scheduler"),
        f"--config={path}",
        f"--secure-port={port}",
        "--bind-address=127.0.0.1",
        "--authorization-always-allow-paths=/healthz,/readyz,/livez",
    ) as process:
        yield process


@contextmanager
def extender(cluster: Cluster, pool: str, kubelet: Path, *words: str) -> Iterator[int]:
    """homenode pool serve for the cluster; its port."""
    port = free_port()
    with running(
        cluster.folder,
        "homenode",
        *(sys.executable, "-m", "homenode", "pool", "serve", "--pool", pool),
        *("--kubelet", str(kubelet), "--listen", f"127.0.0.1:{port}"),
        *(
            "--cert",
            str(cluster.folder / "server.crt"),
            "--key",
            str(cluster.folder / "server.key"),
        ),
        *("--client-ca", str(cluster.folder / "ca.crt"), "--api-server", cluster.url),
        *("--api-token", str(cluster.token_file(HOMENODE))),
        *("--api-ca", str(cluster.folder / "ca.crt"), *words),
    ) as process:

        def is_healthy() -> bool:
            log = (cluster.folder / "homenode.log").read_text()
            assert process.poll() is None, log[-2000:]
            try:
                return call(cluster, port, "GET", "/healthz", certificate=False)[0] == 200
            except OSError:
                return False

        until("homenode pool serve", is_healthy)
        yield port


def call(
    cluster: Cluster,
    port: int,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: Mapping[str, str] = {},
    *,
    certificate: bool = True,
) -> tuple[int, bytes]:
    """One request to homenode, with the client's certificate or without."""
    context = ssl.create_default_context(cafile=str(cluster.folder / "ca.crt"))
    if certificate:
        context.load_cert_chain(cluster.folder / "client.crt", cluster.folder / "client.key")
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=context)
    try:
        connection.request(method, path, body, dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


class StubKubelets:
    """The nodes: registered, with a lease, and what the kubelet says of each pod."""

    def __init__(self, cluster: Cluster, nodes: Mapping[str, Node]) -> None:
        self.cluster, self.empty, self.now = cluster, dict(nodes), dict(nodes)
        self.has: dict[str, tuple[str, str, Node, Node]] = {}
        """By UID: the pod's name, its node, and what that was before and after it."""
        self.refused: list[str] = []
        self.avoidable: list[str] = []
        """Refused pods that another node could hold at that moment."""
        self._lock = Lock()
        for name, node in nodes.items():
            self._register(name, node)
        api = api_server(cluster.url, cluster.token_file(ADMIN), cluster.folder / "ca.crt")
        arguments = (api, "/api/v1/pods", {"fieldSelector": "spec.nodeName!="}, self._change)
        Thread(target=follow, args=arguments, daemon=True).start()

    def _register(self, name: str, node: Node) -> None:
        memory = sum(t.allocatable for m in node.memory.values() for t in m.tables.values())
        amount = {
            "cpu": str(len(node.available_cpus)),
            "memory": str(memory),
            "pods": "110",
            GPU: str(len(node.devices[GPU])),
        }
        self.cluster.create(
            "/api/v1/nodes",
            {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}},
        )
        lease = {
            "metadata": {"name": name},
            "spec": {"holderIdentity": name, "leaseDurationSeconds": 3600},
        }
        self.cluster.create("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases", lease)
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        status, found = self.cluster.ask(
            "PATCH",
            f"/api/v1/nodes/{name}/status",
            {"status": {"capacity": amount, "allocatable": amount, "conditions": [ready]}},
            "application/merge-patch+json",
        )
        assert status == 200, found

    def _change(self, event: str, item: Mapping[str, Any]) -> None:
        if event not in ("ADDED", "MODIFIED", "DELETED"):
            return
        meta, uid = item["metadata"], item["metadata"]["uid"]
        with self._lock:
            if event == "DELETED":
                self._release(uid)
            elif uid not in self.has and item["status"].get("phase") == "Pending":
                self._admit(uid, meta["namespace"], meta["name"], item)

    def _admit(self, uid: str, namespace: str, name: str, item: Mapping[str, Any]) -> None:
        on = item["spec"]["nodeName"]
        pod, before = read_pod({"kind": "Pod", **item}, "pod"), self.now[on]
        found = admit(pod, before)
        if found.refusal is not None:
            self.refused.append(name)
            if any(admit(pod, node).refusal is None for node in self.now.values()):
                self.avoidable.append(name)
            status: Document = {"phase": "Failed", "reason": found.refusal.reason}
        else:
            self.has[uid] = (name, on, before, found.node)
            self.now[on] = found.node
            status = {
                "phase": "Running",
                "containerStatuses": [
                    {
                        "name": given.name,
                        "image": "pause",
                        "imageID": "",
                        "ready": True,
                        "restartCount": 0,
                        "allocatedResourcesStatus": [
                            {
                                "name": resource,
                                "resources": [
                                    {"resourceID": one, "health": "Healthy"} for one in sorted(ids)
                                ],
                            }
                            for resource, ids in given.devices.items()
                        ],
                    }
                    for given in found.given
                ],
            }
        self.cluster.ask(
            "PATCH",
            f"/api/v1/namespaces/{namespace}/pods/{name}/status",
            {"status": status},
            "application/merge-patch+json",
        )

    def _release(self, uid: str) -> None:
        """Exactly what the pod was given is free again."""
        known = self.has.pop(uid, None)
        if known is None:
            return
        _, on, before, after = known
        now = self.now[on]
        memory = {}
        for number, own in now.memory.items():
            tables, changed = {}, after.memory[number] != before.memory[number]
            for kind, table in own.tables.items():
                given = (
                    before.memory[number].tables[kind].free - after.memory[number].tables[kind].free
                )
                tables[kind] = MemoryTable(table.allocatable, table.free + given)
            left = own.assignments - changed
            cells = own.cells if left else (number,)
            memory[number] = KubeletMemory(tables=tables, cells=cells, assignments=left)
        self.now[on] = replace(
            now,
            free_cpus=now.free_cpus | (before.free_cpus - after.free_cpus),
            memory=memory,
            used_devices={
                resource: used
                - (
                    after.used_devices.get(resource, frozenset())
                    - before.used_devices.get(resource, frozenset())
                )
                for resource, used in now.used_devices.items()
            },
        )

    def names(self) -> list[tuple[str, str, Node]]:
        """The pods that run: name, node, and the node with it."""
        with self._lock:
            return [(name, on, after) for name, on, _, after in self.has.values()]

    def have_answered(self, names: Iterable[str], bound: Iterable[str]) -> bool:
        """Whether each of the pods that is bound runs or was refused."""
        known = {name for name, _, _ in self.names()} | {*self.refused}
        return {*names} & {*bound} <= known

    def reset(self) -> None:
        with self._lock:
            self.now = dict(self.empty)
            self.has.clear()
            self.refused.clear()
            self.avoidable.clear()
