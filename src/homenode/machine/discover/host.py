"""Discover: one Host from a snapshot. Reads and combines all parts, and keeps every gap.

A listing of one tool gives a partial host: numactl -H, lscpu -e, nvidia-smi topo -m, xl info -n.
Facts that the tool does not show are gaps. Two listings of one machine complement each other.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from lxml import etree
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CoreIndex, CpuSet, LlcIndex, NodeIndex, PackageIndex, PuIndex
from homenode.errors import HomenodeError, InputError, ParseError
from homenode.findings import NO_VMS, Gap, GapKind
from homenode.machine.discover.gpus import add_parts, read_device_links
from homenode.machine.discover.lspci import add_lspci
from homenode.machine.discover.nodes import (
    name_memory,
    read_distances,
    read_driver_gpus,
    read_nodes,
)
from homenode.machine.discover.pci_nodes import (
    Locality,
    ReportedNode,
    add_tool_nodes,
    list_root_complexes,
    nodes_of_root_complexes,
)
from homenode.machine.discover.pci_tree import PciTree, read_pci_tree
from homenode.machine.discover.processors import read_processors
from homenode.machine.discover.system import (
    parse_cpu_model,
    read_architecture,
    read_cpu_fields,
    read_settings,
    read_states,
    read_versions,
)
from homenode.machine.pci import UNASSIGNED_CLASS, DeviceKind, PciDevice
from homenode.machine.snapshot.protocol import BoundedSnapshot, Snapshot
from homenode.machine.tools import virsh_capabilities
from homenode.machine.tools.lscpu import LscpuCpu, LscpuTable
from homenode.machine.tools.numactl import NumactlHardware
from homenode.machine.tools.nvidia_smi import NvidiaGpu, TopoMatrix
from homenode.machine.tools.xl_info import TOOL, XlInfo
from homenode.machine.tools.xml_text import parse_xml
from homenode.machine.topology import (
    Core,
    CoreId,
    Host,
    Llc,
    NumaNode,
    Package,
    RunningDomain,
    assemble_pus,
    make_empty_host,
)


def check_against_libvirt(snapshot: Snapshot, host: Host) -> tuple[Gap, ...]:
    """Return gaps for nodes, CPUs of nodes, SMT siblings and distances that `virsh capabilities`
    gives otherwise. Our values are kept: libvirt reads the same /sys, but at an earlier time.
    Nothing is compared if virsh was not run. A host of one node is not checked: libvirtd may take
    seconds to answer, because it probes every emulator first."""
    if len(host.nodes) < 2:
        return ()
    text = snapshot.command_output("virsh-capabilities")
    if text is None:
        return ()
    try:
        cells = {cell.node: cell for cell in virsh_capabilities.parse(text)}
    except ParseError as error:
        return (Gap("libvirt's view of the host", str(error)),)
    gaps: list[Gap] = []
    node_at = host.node_at
    # libvirt may omit nodes without CPUs and memory, of which a GH200 has 28.
    expected = {n.index for n in host.nodes if n.pus or n.memory_bytes}
    if cells and (expected - set(cells) or set(cells) - set(node_at)):
        cell_list = ", ".join(map(str, sorted(cells)))
        gaps.append(Gap("NUMA nodes", f"libvirt has {cell_list}; used the cells of sysfs"))
    for index in sorted(set(cells) & set(node_at)):
        cell, node = cells[index], node_at[index]
        pus = CpuSet(cell.siblings_of_pu) & host.online_pus
        if pus != node.pus:
            gaps.append(_make_gap(f"CPUs of node {index}", pus, node.pus))
        for pu, siblings in cell.siblings_of_pu.items():
            core = host.core_at.get(pu)
            if siblings is None or core is None:
                continue
            if siblings & host.online_pus != core.pus:
                gaps.append(_make_gap(f"SMT siblings of CPU {pu}", siblings, core.pus))
                break  # the first of a node is sufficient; there may be hundreds
        for other, distance in cell.distances:
            own_distance = host.find_distance(index, other) if other in node_at else None
            if own_distance is not None and own_distance != distance:
                subject = f"distance from node {index} to node {other}"
                gaps.append(_make_gap(subject, distance, own_distance))
    return tuple(gaps)


def _make_gap(subject: str, libvirt_value: object, sysfs_value: object) -> Gap:
    return Gap(subject, f"libvirt has {libvirt_value}, sysfs has {sysfs_value}; used sysfs")


ReadDomain = Callable[[bytes, bool, str], RunningDomain]
"""Returns a domain's resources from its XML (`virsh dumpxml`), whether it runs, and its name in
messages: read_running_domain of vm/domain/read.py. May raise HomenodeError."""


def discover(snapshot: Snapshot, read_domain: ReadDomain | None = None) -> Host:
    """Return the host of a snapshot. read_domain: reads the XML of one libvirt domain; without it
    the host has no running domains, and a gap.

    Raises InputError if the snapshot holds no CPUs or is incomplete, ParseError if a file is
    malformed. Other unknown facts are None, with the reason in `gaps`.
    """
    # Long because it fills the record of a host, a field a line.
    snapshot = BoundedSnapshot(snapshot)
    states = read_states(snapshot)
    processors = read_processors(snapshot, states)
    nodes = read_nodes(snapshot, states.online, processors.packages)
    distances, distance_gaps = read_distances(snapshot, nodes.nodes, nodes.online)
    gpu_of_node, driver_gpus = read_driver_gpus(snapshot)
    locality = Locality.from_nodes(nodes.nodes, states.online, distances, gpu_of_node)
    tree = read_pci_tree(snapshot, locality, driver_gpus)
    devices, lspci_gaps = _add_names(snapshot, tree.devices)
    links = read_device_links(snapshot, devices, driver_gpus, locality)
    devices, tree = _set_nodes_from_tools(snapshot, devices, tree, links.node_of_gpu, locality)
    devices = _add_driver_values(devices, links.queried)
    devices, part_gaps = add_parts(snapshot, devices, links.queried)
    named_nodes, memory_gaps = name_memory(snapshot, nodes.nodes, gpu_of_node, links.gpu_of_node)
    libvirt, qemu, version_gaps = read_versions(snapshot)
    domains, domain_gaps = read_running_domains(snapshot, read_domain)
    cpu_fields = read_cpu_fields(snapshot)
    architecture = read_architecture(snapshot, cpu_fields)
    gaps = (
        *states.gaps,
        *processors.gaps,
        *nodes.gaps,
        *distance_gaps,
        *tree.gaps,
        *lspci_gaps,
        *links.gaps,
        *part_gaps,
        *memory_gaps,
        *version_gaps,
        *domain_gaps,
        *(() if architecture else (Gap("architecture", "neither uname nor /proc/cpuinfo"),)),
    )
    host = Host(
        name=snapshot.name,
        architecture=architecture,
        cpu=parse_cpu_model(cpu_fields),
        packages=processors.packages,
        nodes=named_nodes,
        distances=distances,
        llcs=processors.llcs,
        cores=processors.cores,
        pus=assemble_pus(
            CpuSet.from_bits(states.online.bits | states.offline.bits),
            states.online,
            cores=processors.cores,
            llcs=processors.llcs,
            nodes=nodes.nodes,
            packages=processors.packages,
            die_of_pu=processors.die_of_pu,
            disallowed_pus=states.online - states.allowed,
            isolated_pus=states.isolated,
            nohz_full=states.nohz_full,
        ),
        root_complexes=tree.root_complexes,
        pci_devices=devices,
        links=links.links,
        domains=domains,
        settings=read_settings(snapshot, states.online, libvirt, qemu),
        nodes_assumed=nodes.assumed,
    )
    return replace(host, gaps=(*gaps, *check_against_libvirt(snapshot, host)))


def _add_names(
    snapshot: Snapshot, devices: tuple[PciDevice, ...]
) -> tuple[tuple[PciDevice, ...], tuple[Gap, ...]]:
    """Add lspci's values to the functions, if it was run."""
    text = snapshot.command_output("lspci") if devices else None
    if text is None:
        return devices, ()
    return add_lspci(devices, text, f"{snapshot.name}: lspci")


def _set_nodes_from_tools(
    snapshot: Snapshot,
    devices: tuple[PciDevice, ...],
    tree: PciTree,
    stated_nodes: Mapping[Bdf, ReportedNode],
    locality: Locality,
) -> tuple[tuple[PciDevice, ...], PciTree]:
    """Add nodes from tools to functions whose node the firmware does not report; return the tree
    with the changed gaps and the nodes of its root complexes."""
    if not stated_nodes:
        return devices, tree
    before = {*locality.find_gaps(snapshot, devices), *nodes_of_root_complexes(devices)[1]}
    devices, gaps = add_tool_nodes(devices, stated_nodes)
    node_of_root, root_gaps = nodes_of_root_complexes(devices)
    roots = tuple(replace(root, node=node_of_root[root.name]) for root in tree.root_complexes)
    other_gaps = (gap for gap in tree.gaps if gap not in before)
    all_gaps = (*other_gaps, *root_gaps, *locality.find_gaps(snapshot, devices), *gaps)
    return devices, replace(tree, root_complexes=roots, gaps=all_gaps)


def _add_driver_values(
    devices: tuple[PciDevice, ...], nvidia_gpus: Mapping[Bdf, NvidiaGpu]
) -> tuple[PciDevice, ...]:
    """Add the NVIDIA driver's values to its GPUs; its names override lspci's."""
    return tuple(
        replace(
            device,
            name=gpu.name or device.name,
            performance_state=gpu.performance_state,
            link_replays=gpu.replays,
            module_id=gpu.module_id,
        )
        if device.kind is DeviceKind.GPU and (gpu := nvidia_gpus.get(device.bdf)) is not None
        else device
        for device in devices
    )


def read_running_domains(
    snapshot: BoundedSnapshot, read_domain: ReadDomain | None
) -> tuple[tuple[RunningDomain, ...], tuple[Gap, ...]]:
    """Return the domains of a snapshot, running and defined, by name; none with a gap if they
    cannot be known. An unreadable domain is a gap: its resources are unknown."""
    output = snapshot.command_output("virsh-domains")
    if output is None:
        reason = snapshot.explain_failure("virsh-domains")
        return (), (Gap("VMs, pins and allocations", reason, GapKind.VMS),)
    if not output.strip():
        return (), ()
    if read_domain is None:
        return (), (Gap(NO_VMS, "their XML was not read"),)
    root = parse_xml(output, "domains", f"{snapshot.name}: virsh dumpxml")
    domains: list[RunningDomain] = []
    gaps: list[Gap] = []
    for number, child in enumerate(root, start=1):
        name = child.findtext("name") or f"number {number}"
        running = child.get("id") is not None  # libvirt gives only active domains an id
        xml = etree.tostring(child, encoding="utf-8", with_tail=False)
        try:
            domains.append(read_domain(xml, running, f"domain {name}"))
        except HomenodeError as error:
            state, kind = ("running", GapKind.VM) if running else ("shut-off", GapKind.OTHER)
            gaps.append(Gap(f"{state} VM {name}", error.message, kind))
    return tuple(sorted(domains, key=lambda domain: domain.name)), tuple(gaps)


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
