"""Listings: partial hosts from one tool: numactl -H, lscpu -e, nvidia-smi topo -m, xl info -n.
Facts that the tool does not show are gaps. Two listings of one machine complement each other.
"""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from msgspec.structs import replace

from homenode.cpuset import CoreIndex, CpuSet, LlcIndex, NodeIndex, PackageIndex, PuIndex
from homenode.errors import InputError
from homenode.findings import NO_VMS, Gap
from homenode.machine.discover.pci_nodes import list_root_complexes
from homenode.machine.pci import UNASSIGNED_CLASS, DeviceKind, PciDevice
from homenode.machine.tools.lscpu import LscpuCpu, LscpuTable
from homenode.machine.tools.numactl import NumactlHardware
from homenode.machine.tools.nvidia_smi import TopoMatrix
from homenode.machine.tools.xl_info import TOOL, XlInfo
from homenode.machine.topology import (
    Core,
    CoreId,
    Host,
    Llc,
    NumaNode,
    Package,
    assemble_pus,
    make_empty_host,
)

Key = TypeVar("Key", int, tuple[int, int])


def host_from_numactl(read: NumactlHardware, name: str) -> Host:
    """Return the host that `numactl -H` shows: nodes with CPUs, memory and distances."""
    nodes = tuple(
        NumaNode(
            index=node.index,
            pus=node.pus,
            memory_bytes=node.size_bytes,
            memory_free_bytes=node.free_bytes,
        )
        for node in read.nodes
    )
    pus = CpuSet.union(node.pus for node in nodes)
    host = replace(
        make_empty_host(name, read.gaps),
        nodes=nodes,
        distances=read.distances,
        pus=assemble_pus(pus, pus, nodes=nodes),
    )
    return _add_missing(host, "numactl -H")


def host_from_lscpu(read: LscpuTable, name: str) -> Host:
    """Return the host that `lscpu -e` shows: CPUs with their cores, LLCs, packages and nodes.
    Without a NODE column the kernel has no NUMA, and the host counts as one node."""
    online = [cpu for cpu in read.cpus if cpu.is_online]
    pus = CpuSet(cpu.index for cpu in online)
    has_nodes = "NODE" in read.columns
    packages = tuple(
        Package(PackageIndex(number), pus)
        for number, pus in _group_cpus((cpu.socket, cpu) for cpu in online)
    )
    nodes = tuple(
        NumaNode(
            index=NodeIndex(number),
            pus=pus,
            memory_bytes=None,
            package=next((p.index for p in packages if pus <= p.pus), None),
        )
        for number, pus in (
            _group_cpus((cpu.node, cpu) for cpu in online) if has_nodes else [(0, pus)]
        )
    )
    # A number of a core or a cache may repeat from package to package.
    cores = tuple(
        Core(CoreIndex(position), CoreId(PackageIndex(package), number), pus)
        for position, ((package, number), pus) in enumerate(
            _group_cpus(
                (None if cpu.core is None else (cpu.socket or 0, cpu.core), cpu) for cpu in online
            )
        )
    )
    llcs = tuple(
        Llc(LlcIndex(position), pus, read.llc_level or 0, None)
        for position, (_, pus) in enumerate(
            _group_cpus(
                (None if cpu.llc is None else (cpu.socket or 0, cpu.llc), cpu) for cpu in online
            )
        )
    )
    host = replace(
        make_empty_host(name, read.gaps),
        packages=packages,
        nodes=nodes,
        nodes_assumed=not has_nodes,
        llcs=llcs,
        cores=cores,
        pus=assemble_pus(
            CpuSet(cpu.index for cpu in read.cpus),
            CpuSet(cpu.index for cpu in online),
            nodes=nodes,
            cores=cores,
            llcs=llcs,
            packages=packages,
        ),
    )
    return _add_missing(host, "lscpu -e")


def host_from_xl(read: XlInfo, name: str) -> Host:
    """Return the host that `xl info -n` shows: CPUs, nodes, and nodes of PCI functions."""
    nodes = host_from_numactl(read.nodes, name)
    host = combine(host_from_lscpu(read.cpus, name), nodes)
    devices = tuple(
        PciDevice(
            bdf=bdf,
            kind=DeviceKind.OTHER,
            class_code=UNASSIGNED_CLASS,
            vendor_id=None,
            device_id=None,
            root_complex=f"pci{bdf.domain:04x}:{bdf.bus:02x}",
            parent=None,
            node=node,
            local_pus=nodes.node_at[node].pus,
        )
        for bdf, node in read.node_of_function.items()
    )
    roots, _ = list_root_complexes(devices)
    gaps = (*_list_missing_facts(host, TOOL), *read.gaps)
    return replace(host, root_complexes=roots, pci_devices=devices, gaps=gaps)


def host_from_topology(read: TopoMatrix, name: str) -> Host:
    """Return the host that `nvidia-smi topo -m` shows: GPUs without addresses, as gaps. It shows
    neither nodes without GPUs nor CPUs outside the caller's cpuset, so no node counts as known."""
    tool = "nvidia-smi topo -m"
    names_at: dict[str, list[str]] = {}
    for device in read.devices:
        if device.name.startswith("GPU") and device.nodes:
            cpus = f"CPUs {device.cpus}" if device.cpus else "no CPU that this process may use"
            names_at.setdefault(f"node {device.nodes[0]}, {cpus}", []).append(device.name)
    gaps = (
        Gap(f"PCI addresses of {', '.join(names)}", f"{tool} shows only their place: {place}")
        for place, names in names_at.items()
    )
    unshown = Gap("CPUs and NUMA nodes", f"{tool} shows those of GPUs only")
    return make_empty_host(name, (unshown, *gaps, Gap(NO_VMS, f"{tool} does not show them")))


def combine(first: Host, second: Host) -> Host:
    """Combine two listings of one host. Raises InputError if they are of different machines."""
    if first.cores and second.cores:
        raise InputError(
            f"{first.name} and {second.name} both show cores: each would be a host of its own",
            hint="homenode doctor --pool DIR compares hosts",
        )
    is_first = bool(first.cores) or (bool(first.nodes) and not second.cores)
    base, other = (first, second) if is_first else (second, first)
    nodes = {node.index: node for node in base.nodes}
    pus_of = [{node.index: node.pus for node in host.nodes if node.pus} for host in (base, other)]
    for index in sorted(pus_of[0].keys() | pus_of[1].keys()) if all(pus_of) else ():
        base_pus, other_pus = (pus.get(index, "none") for pus in pus_of)
        if base_pus != other_pus:
            raise InputError(
                f"CPUs of node {index}: {base_pus} in {base.name}, {other_pus} in {other.name}",
                hint="use listings of one machine, made at the same time",
            )
    for node in other.nodes:  # lscpu shows no node without CPUs
        shown_node = nodes.get(node.index)
        if shown_node is None:
            nodes[node.index] = node
        elif shown_node.memory_bytes is None:
            nodes[node.index] = replace(
                shown_node, memory_bytes=node.memory_bytes, memory_free_bytes=node.memory_free_bytes
            )
    host = replace(
        base,
        nodes=tuple(nodes[index] for index in sorted(nodes)),
        distances=base.distances or other.distances,
        nodes_assumed=base.nodes_assumed and (other.nodes_assumed or not other.nodes),
    )
    missing = {gap.subject for gap in _list_missing_facts(host, "")}
    gaps = (
        gap
        for gap in (*base.gaps, *other.gaps)
        if gap.subject not in _PARTS or gap.subject in missing
    )
    return replace(host, gaps=tuple({gap.subject: gap for gap in gaps}.values()))


_CORES, _MEMORY, _DISTANCES = "cores, LLCs and packages", "memory of nodes", "distances of nodes"
_DEVICES = "PCI functions"
_PARTS = (_CORES, _MEMORY, _DISTANCES, _DEVICES, NO_VMS)


def _list_missing_facts(host: Host, tool: str) -> Iterator[Gap]:
    has_memory = any(node.memory_bytes is not None for node in host.nodes)
    is_there = (
        bool(host.cores),
        has_memory,
        host.distances is not None,
        bool(host.pci_devices),
        False,
    )
    for part, is_known in zip(_PARTS, is_there, strict=True):
        if not is_known:
            yield Gap(part, f"{tool} does not show them")


def _add_missing(host: Host, tool: str) -> Host:
    return replace(host, gaps=(*_list_missing_facts(host, tool), *host.gaps))


def _group_cpus(keyed_cpus: Iterable[tuple[Key | None, LscpuCpu]]) -> list[tuple[Key, CpuSet]]:
    """Return the CPUs of each number, ascending; CPUs without one are in no group."""
    pus_of: dict[Key, list[PuIndex]] = {}
    for number, cpu in keyed_cpus:
        if number is not None:
            pus_of.setdefault(number, []).append(cpu.index)
    return [(number, CpuSet(pus_of[number])) for number in sorted(pus_of)]
