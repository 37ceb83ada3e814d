"""homenode pool serve and the files of packaging/kubernetes against Kubernetes' own programs."""

import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from msgspec import json

from tests.command_line import homenode
from tests.scheduler.kube_cluster import (
    HOMENODE,
    PACKAGING,
    Cluster,
    StubKubelets,
    call,
    control_plane,
    extender,
    free_port,
    running,
    scheduler,
    until,
)
from tests.scheduler.kube_stream import CONFIG, nodes_of, pod, replay, stream

pytestmark = pytest.mark.kubernetes
HOST, COUNT = "hgx-h100", 8
SOURCE = f"{HOST}*{COUNT}"
PATHS = {
    "Namespace": "/api/v1/namespaces",
    "ServiceAccount": "/api/v1/namespaces/homenode/serviceaccounts",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "Deployment": "/apis/apps/v1/namespaces/homenode/deployments",
    "Service": "/api/v1/namespaces/homenode/services",
    "DeviceClass": "/apis/resource.k8s.io/v1/deviceclasses",
    "ResourceClaimTemplate": "/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates",
    "ResourceClaim": "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims",
    "ResourceSlice": "/apis/resource.k8s.io/v1/resourceslices",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """With all of packaging/kubernetes created: every field is known, every value allowed."""
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "configz.json").write_bytes(json.encode(CONFIG))
    with control_plane(folder) as found:
        for one in yaml.safe_load_all((PACKAGING / "homenode-extender.yaml").read_text()):
            found.create(PATHS[one["kind"]], one)
        yield found


@pytest.fixture(scope="module")
def kubelets(cluster: Cluster) -> StubKubelets:
    return StubKubelets(cluster, nodes_of(SOURCE))


def test_its_account_reads_what_it_needs_and_nothing_else(cluster: Cluster) -> None:
    for path in ("/api/v1/pods", PATHS["ResourceSlice"], "/apis/resource.k8s.io/v1/resourceclaims"):
        assert cluster.ask("GET", path, token=HOMENODE)[0] == 200
    for path in ("/api/v1/secrets", "/api/v1/nodes", "/api/v1/namespaces/homenode/configmaps"):
        assert cluster.ask("GET", path, token=HOMENODE)[0] == 403
    made = pod("made", 1)
    assert cluster.ask("POST", "/api/v1/namespaces/default/pods", made, token=HOMENODE)[0] == 403


def test_no_pod_is_refused_by_its_kubelet_while_a_node_could_hold_it(
    cluster: Cluster, kubelets: StubKubelets
) -> None:
    """Also after a restart in the middle, which loses nothing."""
    events = stream(3, 160, 8 * COUNT)
    with ExitStack() as stack:
        port = stack.enter_context(extender(cluster, SOURCE, cluster.folder / "configz.json"))
        stack.enter_context(scheduler(cluster, port))
        found = replay(cluster, kubelets, events, "first-")
    assert (found.rejected, found.avoidable) == (0, 0)
    assert found.unschedulable < 16


def test_a_restart_between_pods_loses_nothing(cluster: Cluster, kubelets: StubKubelets) -> None:
    kubelets.reset()
    path, configz = "/api/v1/namespaces/default/pods", cluster.folder / "configz.json"
    for number, gpus in enumerate((2, 1, 4, 1, 2, 4, 8)):
        name = f"again-{number}"
        with extender(cluster, SOURCE, configz) as port, scheduler(cluster, port):
            cluster.create(path, pod(name, gpus))
            until(name, lambda name=name: name in {one for one, _, _ in kubelets.names()})
    on = {node for _, node, _ in kubelets.names()}
    assert kubelets.refused == []
    assert len(on) == 3  # 14 GPUs on two, of which one has no node free, and 8 on the third
    for name, _, _ in kubelets.names():
        cluster.ask("DELETE", f"{path}/{name}?gracePeriodSeconds=0")


def test_claims_are_allocated_and_counted(cluster: Cluster, kubelets: StubKubelets) -> None:
    """The real scheduler allocates what a template of `pool export` asks for, aligned."""
    kubelets.reset()
    cluster.create(PATHS["DeviceClass"], DEVICE_CLASS)
    for node in kubelets.now:
        cluster.create(PATHS["ResourceSlice"], slice_of(node))
    _, slices = cluster.ask("GET", PATHS["ResourceSlice"])
    written = cluster.folder / "slices.json"
    written.write_bytes(json.encode(slices))
    exported = json.decode(homenode("pool", "export", "--for", "dra", "--slices", written).stdout)
    for one in exported["items"]:
        cluster.create(PATHS[one["kind"]], one)
    configz = cluster.folder / "configz.json"
    with extender(cluster, SOURCE, configz) as port, scheduler(cluster, port, claims=True):
        for number in range(3):
            name = f"claims-{number}"
            cluster.create(PATHS["ResourceClaim"], claim_of(exported, "gpu4", name))
            cluster.create("/api/v1/namespaces/default/pods", pod_with_claim(name))
            until(name, lambda name=name: bound_to(cluster, name))
    by_node: dict[str, list[set[str]]] = {}
    for number in range(3):
        _, claim = cluster.ask("GET", f"{PATHS['ResourceClaim']}/claims-{number}")
        results = claim["status"]["allocation"]["devices"]["results"]
        own = {one["device"] for one in results}
        assert {int(name[4:]) // 4 for name in own} in ({0}, {1})
        by_node.setdefault(results[0]["pool"], []).append(own)
    assert sorted(map(len, by_node.values())) == [1, 2]  # the second fills the first's node


DEVICE_CLASS = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "DeviceClass",
    "metadata": {"name": "gpu.nvidia.com"},
    "spec": {"selectors": [{"cel": {"expression": 'device.driver == "gpu.nvidia.com"'}}]},
}


def slice_of(node: str) -> dict[str, Any]:
    from tests.scheduler.test_extender import BDFS

    devices = [
        {
            "name": f"gpu-{number}",
            "attributes": {
                "resource.kubernetes.io/pciBusID": {"string": bdf},
                "numaNode": {"int": number // 4},
            },
        }
        for number, bdf in enumerate(BDFS)
    ]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": node},
        "spec": {
            "driver": "gpu.nvidia.com",
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": devices,
        },
    }


def claim_of(exported: Any, flavour: str, name: str) -> dict[str, Any]:
    template = next(one for one in exported["items"] if one["metadata"]["name"].endswith(flavour))
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "default"},
        "spec": template["spec"]["spec"],
    }


def pod_with_claim(name: str) -> dict[str, Any]:
    document = pod(name, 4)
    size = {"cpu": "48", "memory": "200Gi"}
    container = document["spec"]["containers"][0]
    container["resources"] = {"limits": size, "requests": size, "claims": [{"name": "gpus"}]}
    document["spec"]["resourceClaims"] = [{"name": "gpus", "resourceClaimName": name}]
    return document


def bound_to(cluster: Cluster, name: str) -> str | None:
    _, found = cluster.ask("GET", f"/api/v1/namespaces/default/pods/{name}")
    return found["spec"].get("nodeName")  # type: ignore[no-any-return]


# What strangers send


@pytest.fixture(scope="module")
def port(cluster: Cluster) -> Iterator[int]:
    with extender(cluster, SOURCE, cluster.folder / "configz.json") as found:
        yield found


def test_strangers_learn_that_it_is_alive_and_no_more(cluster: Cluster, port: int) -> None:
    assert call(cluster, port, "GET", "/healthz", certificate=False) == (200, b"ok\n")
    for method, path in (("GET", "/metrics"), ("POST", "/filter"), ("GET", "/"), ("PUT", "/x")):
        assert call(cluster, port, method, path, b"{}", certificate=False)[0] == 401
    assert b"homenode_extender_nodes 8" in call(cluster, port, "GET", "/metrics")[1]


@pytest.mark.parametrize(
    ("path", "content", "status"),
    [
        ("/filter", b"", 400),
        ("/filter", b"[" * 100_000, 400),
        ("/prioritize", b'{"Pod": {}}', 400),
        ("/bind", b"{}", 404),
        ("/../../etc/passwd", b"{}", 404),
        ("/filter/%2e%2e/", b"{}", 404),
    ],
)
def test_odd_requests_are_refused(
    cluster: Cluster, port: int, path: str, content: bytes, status: int
) -> None:
    assert call(cluster, port, "POST", path, content)[0] == status


def test_large_and_slow_requests_end(cluster: Cluster, port: int) -> None:
    context = ssl.create_default_context(cafile=str(cluster.folder / "ca.crt"))
    for text in (
        b"POST /filter HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n",
        b"POST /filter HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 100_000,
        b"POST /filter HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\nslow",
    ):
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as stream,
        ):
            stream.settimeout(30)
            answer = b""
            with suppress(ConnectionError, ssl.SSLEOFError):
                stream.sendall(text)
                while part := stream.recv(4096):
                    answer += part
            assert b" 200 " not in answer


def test_it_ends_on_a_signal(cluster: Cluster, tmp_path: Path) -> None:
    words = (sys.executable, "-m", "homenode", "pool", "serve", "--pool", HOST)
    api = ("--api-server", cluster.url, "--api-ca", str(cluster.folder / "ca.crt"))
    token = ("--api-token", str(cluster.token_file(HOMENODE)))
    place = ("--listen", f"127.0.0.1:{free_port()}")
    with running(tmp_path, "own", *words, *api, *token, *place) as process:
        until("it listens", lambda: "listening" in (tmp_path / "own.log").read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
