"""Checkpoints: what the pods that run on a node have, from the kubelet's own files.

Source: /var/lib/kubelet/cpu_manager_state, memory_manager_state and
device-plugins/kubelet_internal_checkpoint, as Kubernetes 1.26 to 1.36 write them.
"""

from collections import Counter
from collections.abc import Container, Iterator, Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from homenode.cluster.kubevirt.object import down, read_object
from homenode.cluster.pods.node import KubeletMemory, MemoryTable, Node
from homenode.cpuset import CpuSet
from homenode.errors import InputError

FILES = ("cpu_manager_state", "memory_manager_state", "kubelet_internal_checkpoint")


class Checkpoints(Struct, frozen=True, kw_only=True):
    """free_cpus, memory: None where the file is not given or its policy keeps none. devices:
    resource -> NUMA node -> devices in use; node -1 is none.
    """

    free_cpus: frozenset[int] | None = None
    memory: Mapping[int, KubeletMemory] | None = None
    devices: Mapping[str, Mapping[int, int]] = field(default_factory=dict)


def read_checkpoints(
    texts: Mapping[str, str], source: str, moved: Container[str] = ()
) -> Checkpoints:
    """texts: of FILES, by name; those that are not there are left out. moved: UIDs of pods that are
    taken for gone. Raises InputError."""
    documents = _documents(texts, source)
    return Checkpoints(
        free_cpus=_cpus(documents.get("cpu_manager_state"), source, moved),
        memory=_memory(documents.get("memory_manager_state"), source, moved),
        devices=_devices(documents.get("kubelet_internal_checkpoint"), moved),
    )


def _documents(texts: Mapping[str, str], source: str) -> dict[str, Mapping[str, Any]]:
    return {
        name: read_object(text, f"{source}/{name}", "a checkpoint of the kubelet")
        for name, text in texts.items()
    }


def running_pods(texts: Mapping[str, str], source: str) -> tuple[str, ...]:
    """UIDs of the pods that have CPUs or devices of their own, those with fewer CPUs first."""
    documents = _documents(texts, source)
    cpus = dict(_entries(documents.get("cpu_manager_state"), source))
    devices = down(documents.get("kubelet_internal_checkpoint"), "Data", "PodDeviceEntries")
    uids = [down(entry, "PodUID") for entry in (devices if isinstance(devices, list) else ())]
    found = {*cpus, *(uid for uid in uids if isinstance(uid, str) and uid)}
    return tuple(sorted(found, key=lambda uid: (len(cpus.get(uid, ())), uid)))


def _entries(document: Mapping[str, Any] | None, source: str) -> Iterator[tuple[str, CpuSet]]:
    entries = down(document, "entries")
    for uid, containers in entries.items() if isinstance(entries, dict) else ():
        sets = containers.values() if isinstance(containers, dict) else ()
        texts = [text for text in sets if isinstance(text, str)]
        yield str(uid), CpuSet.parse(",".join(texts), f"{source}/cpu_manager_state")


def with_running_pods(node: Node, checkpoints: Checkpoints) -> Node:
    """The node without what its pods use. Which of the devices of a NUMA node they have
    is not in the files; how many is what counts."""
    if checkpoints.free_cpus is not None:
        node = replace(node, free_cpus=checkpoints.free_cpus & frozenset(node.cpus.places))
    if checkpoints.memory is not None:
        node = replace(node, memory={**node.memory, **checkpoints.memory})
    used: dict[str, frozenset[str]] = {}
    for resource, count_of_node in checkpoints.devices.items():
        named = node.devices.get(resource, {})
        in_use: set[str] = set()
        for numa, count in count_of_node.items():
            here = [d for d, on in named.items() if (numa in on if numa >= 0 else not on)]
            in_use |= set(sorted(here)[:count])
        used[resource] = frozenset(in_use)
    return replace(node, used_devices=used)


def _cpus(
    document: Mapping[str, Any] | None, source: str, moved: Container[str]
) -> frozenset[int] | None:
    if document is None or document.get("policyName") != "static":
        return None
    text = document.get("defaultCpuSet")
    if not isinstance(text, str):
        raise InputError(f"{source}/cpu_manager_state: expected defaultCpuSet, found none")
    free = frozenset(map(int, CpuSet.parse(text, f"{source}/cpu_manager_state")))
    back = (cpus for uid, cpus in _entries(document, source) if uid in moved)
    return free.union(*(map(int, cpus) for cpus in back))


def _memory(
    document: Mapping[str, Any] | None, source: str, moved: Container[str]
) -> dict[int, KubeletMemory] | None:
    if document is None or document.get("policyName") != "Static":
        return None
    state = document.get("machineState")
    if not isinstance(state, dict):
        raise InputError(f"{source}/memory_manager_state: expected machineState, found none")
    back = Counter[tuple[int, str]]()
    entries = down(document, "entries")
    for uid, containers in entries.items() if isinstance(entries, dict) else ():
        blocks = (containers or {}).values() if uid in moved else ()
        for block in (one for listed in blocks for one in listed or ()):
            nodes = down(block, "numaAffinity")
            if isinstance(nodes, list) and len(nodes) == 1:  # of several the shares are not said
                back[nodes[0], down(block, "type")] += _count(block, "size")
    found: dict[int, KubeletMemory] = {}
    for number, of_node in state.items():
        tables = {
            name: MemoryTable(
                _count(table, "allocatable"), _count(table, "free") + back[int(number), name]
            )
            for name, table in (down(of_node, "memoryMap") or {}).items()
        }
        cells = down(of_node, "cells")
        if not str(number).isdecimal():
            raise InputError(f"{source}/memory_manager_state: expected a node, found {number!r}")
        listed = cells if isinstance(cells, list) else [int(number)]
        found[int(number)] = KubeletMemory(
            tables=tables, cells=tuple(listed), assignments=_count(of_node, "numberOfAssignments")
        )
    return found


def _count(value: Any, name: str) -> int:
    found = down(value, name)
    return found if isinstance(found, int) and found >= 0 else 0


def _devices(
    document: Mapping[str, Any] | None, moved: Container[str]
) -> dict[str, dict[int, int]]:
    found: dict[str, dict[int, int]] = {}
    entries = down(document, "Data", "PodDeviceEntries")
    for entry in entries if isinstance(entries, list) else ():
        resource, by_node = down(entry, "ResourceName"), down(entry, "DeviceIDs")
        gone = down(entry, "PodUID") in moved
        if gone or not isinstance(resource, str) or not isinstance(by_node, dict):
            continue
        count = found.setdefault(resource, {})
        for number, ids in by_node.items():
            if str(number).lstrip("-").isdecimal() and isinstance(ids, list):
                count[int(number)] = count.get(int(number), 0) + len(ids)
    return found
