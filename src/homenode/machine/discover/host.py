"""Discover: one Host from a snapshot. Reads and combines all parts, and keeps every gap."""

from collections.abc import Callable, Mapping

from lxml import etree
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import HomenodeError, ParseError
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
from homenode.machine.pci import DeviceKind, PciDevice
from homenode.machine.snapshot.protocol import BoundedSnapshot, Snapshot
from homenode.machine.tools import virsh_capabilities
from homenode.machine.tools.nvidia_smi import NvidiaGpu
from homenode.machine.tools.xml_text import parse_xml
from homenode.machine.topology import (
    Host,
    RunningDomain,
    assemble_pus,
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
