"""Pods of 1, 2, 4 and 8 GPUs that arrive and leave: what becomes of them under a scheduler.

`python -m tests.scheduler.kube_stream FOLDER [PODS NODES SEED]` compares the stock scheduler, the
one that packs, and homenode on one stream. FOLDER: empty, for logs.
"""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from random import Random
from threading import Event, Thread
from typing import Any, NamedTuple

from msgspec import json

from homenode.cluster.pods.checkpoints import Checkpoints
from homenode.cluster.pods.kubelet import Kubelet, read_kubelet
from homenode.cluster.pods.machine import node_of_host
from homenode.cluster.pods.node import Node
from homenode.cluster.pool.sources import load_pool
from homenode.cluster.scheduler.api_server import api_server, follow
from tests.scheduler.kube_cluster import (
    ADMIN,
    GPU,
    Cluster,
    StubKubelets,
    control_plane,
    extender,
    scheduler,
    until,
)

CONFIG = {
    "kind": "KubeletConfiguration",
    "cpuManagerPolicy": "static",
    "cpuManagerPolicyOptions": {"full-pcpus-only": "true"},
    "topologyManagerPolicy": "restricted",
    "memoryManagerPolicy": "Static",
    "reservedSystemCPUs": "0,112",
}
CPUS, MEMORY_GIB = 24, 200
"""Of each GPU."""
BURST = 4


def kubelet() -> Kubelet:
    return read_kubelet(json.encode(CONFIG), "configz")


def nodes_of(source: str) -> dict[str, Node]:
    """The nodes as their kubelets see them."""
    pool = load_pool([source], reserved=False)
    node, _ = node_of_host(pool.host(pool.hosts[0]), kubelet(), [GPU], {}, Checkpoints())
    return {one.name: node for one in pool.hosts}


def pod(name: str, gpus: int) -> dict[str, Any]:
    size = {"cpu": str(CPUS * gpus), "memory": f"{MEMORY_GIB * gpus}Gi", GPU: str(gpus)}
    resources = {"limits": size, "requests": size}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"containers": [{"name": "c", "image": "pause", "resources": resources}]},
    }


def stream(seed: int, pods: int, gpus: int, load: float = 0.9) -> list[tuple[str, int]]:
    """(name, GPUs) of arrivals, (name, 0) of departures, so that about so much is asked for."""
    draw, events = Random(seed), list[tuple[str, int]]()
    live: dict[str, int] = {}
    for number in range(pods):
        size = draw.choices((1, 2, 4, 8), (4, 3, 2, 1))[0]
        while live and sum(live.values()) + size > load * gpus:
            gone = draw.choice(sorted(live))
            del live[gone]
            events.append((gone, 0))
        live[f"pod-{number}"] = size
        events.append((f"pod-{number}", size))
    return events


class Outcome(NamedTuple):
    """unschedulable: pods that no node took. rejected: by their kubelet, avoidable: while another
    node could hold them. stranded: free GPUs on NUMA nodes with fewer than 4, mean. seconds: from
    creation to binding, in order."""

    pods: int
    unschedulable: int
    rejected: int
    avoidable: int
    stranded: float
    seconds: list[float]

    def line(self) -> str:
        half, high = (sorted(self.seconds)[int(len(self.seconds) * at)] for at in (0.5, 0.99))
        return (
            f"{self.pods} pods: {self.unschedulable} unschedulable, {self.rejected} rejected "
            f"({self.avoidable} avoidable), {self.stranded:.1f} GPUs stranded, "
            f"{1e3 * half:.0f} ms a pod (p99 {1e3 * high:.0f})"
        )


class _Decisions:
    """What the API server says of each pod, when."""

    def __init__(self, cluster: Cluster) -> None:
        self.bound: dict[str, float] = {}
        self.refused: set[str] = set()
        self.news = Event()
        api = api_server(cluster.url, cluster.token_file(ADMIN), cluster.folder / "ca.crt")
        Thread(target=follow, args=(api, "/api/v1/pods", {}, self._change), daemon=True).start()

    def _change(self, event: str, item: Mapping[str, Any]) -> None:
        if event not in ("ADDED", "MODIFIED"):
            return
        name = item["metadata"]["name"]
        if item["spec"].get("nodeName"):
            self.bound.setdefault(name, time.monotonic())
        elif any(
            one["type"] == "PodScheduled" and one["status"] == "False"
            for one in item["status"].get("conditions", ())
        ):
            self.refused.add(name)
        self.news.set()

    def wait_for(self, names: list[str]) -> None:
        end = time.monotonic() + 60
        while not all(name in self.bound or name in self.refused for name in names):
            assert time.monotonic() < end, f"the scheduler says nothing of {names}"
            self.news.wait(1)
            self.news.clear()


def replay(
    cluster: Cluster, kubelets: StubKubelets, events: list[tuple[str, int]], prefix: str
) -> Outcome:
    """The stream against the scheduler that runs."""
    decided, created = _Decisions(cluster), {}
    stranded, unschedulable, failed = [], 0, 0
    path = "/api/v1/namespaces/default/pods"

    def delete(names: list[str]) -> None:
        for name in names:
            cluster.ask("DELETE", f"{path}/{name}?gracePeriodSeconds=0")
        until("pods are gone", lambda: not {n for n, _, _ in kubelets.names()} & {*names})

    for arrivals, departures in _bursts(events):
        delete([f"{prefix}{name}" for name in departures if f"{prefix}{name}" in created])
        names = []
        for name, gpus in arrivals:
            names.append(f"{prefix}{name}")
            created[names[-1]] = time.monotonic()
            cluster.create(path, pod(names[-1], gpus))
        decided.wait_for(names)
        until(
            "kubelets have answered",
            lambda names=names: kubelets.have_answered(names, decided.bound),
        )
        refused = [name for name in names if name not in decided.bound]
        rejected = [name for name in names if name in kubelets.refused]
        unschedulable, failed = unschedulable + len(refused), failed + len(rejected)
        delete([*refused, *rejected])
        for name in (*refused, *rejected):
            del created[name]
        stranded.append(sum(map(_stranded, kubelets.now.values())))
    seconds = [decided.bound[name] - at for name, at in created.items() if name in decided.bound]
    delete([name for name, _, _ in kubelets.names()])
    return Outcome(
        pods=sum(size > 0 for _, size in events),
        unschedulable=unschedulable,
        rejected=failed,
        avoidable=len(kubelets.avoidable),
        stranded=sum(stranded) / len(stranded),
        seconds=seconds,
    )


def _bursts(
    events: list[tuple[str, int]],
) -> Iterator[tuple[list[tuple[str, int]], list[str]]]:
    """Departures, then arrivals at once; a pod of a burst leaves only after it."""
    arrivals: list[tuple[str, int]] = []
    departures: list[str] = []
    for name, size in events:
        if size:
            arrivals.append((name, size))
        elif name in dict(arrivals):
            yield arrivals, departures
            arrivals, departures = [], [name]
        else:
            departures.append(name)
        if len(arrivals) == BURST:
            yield arrivals, departures
            arrivals, departures = [], []
    if arrivals or departures:
        yield arrivals, departures


def _stranded(node: Node) -> int:
    by_node: dict[int, int] = {}
    for device in node.available_devices(GPU):
        for on in node.devices[GPU][device]:
            by_node[on] = by_node.get(on, 0) + 1
    return sum(free for free in by_node.values() if free < 4)


def compare(folder: Path, pods: int, count: int, seed: int) -> dict[str, Outcome]:
    """The same stream under each scheduler."""
    source, found = f"hgx-h100*{count}", {}
    events = stream(seed, pods, 8 * count)
    configz = folder / "configz.json"
    configz.write_bytes(json.encode(CONFIG))
    with control_plane(folder) as cluster:
        cluster.create("/apis/rbac.authorization.k8s.io/v1/clusterroles", role())
        cluster.create("/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", binding())
        kubelets = StubKubelets(cluster, nodes_of(source))
        for name in ("stock", "packs", "homenode"):
            kubelets.reset()
            with ExitStack() as stack:
                port = None
                if name == "homenode":
                    port = stack.enter_context(extender(cluster, source, configz))
                stack.enter_context(scheduler(cluster, port, packs=name == "packs"))
                found[name] = replay(cluster, kubelets, events, f"{name}-")
                print(name, found[name].line(), flush=True)
    return found


def _packaged(kind: str) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped]

    from tests.scheduler.kube_cluster import PACKAGING

    text = (PACKAGING / "homenode-extender.yaml").read_text()
    return next(one for one in yaml.safe_load_all(text) if one["kind"] == kind)


def role() -> dict[str, Any]:
    return _packaged("ClusterRole")


def binding() -> dict[str, Any]:
    return _packaged("ClusterRoleBinding")


if __name__ == "__main__":
    words = sys.argv[2:]
    compare(Path(sys.argv[1]), *(int(word) for word in words or ("200", "10", "1")))
