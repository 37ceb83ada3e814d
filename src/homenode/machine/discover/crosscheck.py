"""Cross-check: where libvirt's own view of the host differs from ours, a gap says so."""

from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.machine.snapshot.protocol import Snapshot
from homenode.machine.tools import virsh_capabilities
from homenode.machine.topology import Host


def check_against_libvirt(snapshot: Snapshot, host: Host) -> tuple[Gap, ...]:
    """Gaps for nodes, PUs of nodes, SMT siblings and distances that `virsh capabilities` gives
    otherwise. Ours is kept: libvirt reads the same /sys, but when its daemon started or last
    looked. Nothing where virsh was not run. A host of one node is not checked: libvirtd may take
    seconds to answer, because it asks every emulator first, and could say little.
    """
    if len(host.nodes) < 2:
        return ()
    text = snapshot.command_output("virsh-capabilities")
    if text is None:
        return ()
    try:
        cells = {cell.node: cell for cell in virsh_capabilities.parse(text).cells}
    except ParseError as error:
        return (Gap("libvirt's view of the host", str(error)),)
    gaps: list[Gap] = []
    online = CpuSet(pu.index for pu in host.pus if pu.online)
    ours = {node.index: node for node in host.nodes}
    # libvirt may leave out nodes with neither PUs nor memory, of which a GH200 has 28.
    expected = {n.index for n in host.nodes if n.pus or n.memory_bytes}
    if cells and (expected - set(cells) or set(cells) - set(ours)):
        said = ", ".join(map(str, sorted(cells)))
        gaps.append(Gap("NUMA nodes", f"libvirt has {said}; used those of sysfs"))
    siblings_of = {pu: core.pus for core in host.cores for pu in core.pus}
    place = {node.index: i for i, node in enumerate(host.nodes)}
    for index in sorted(set(cells) & set(ours)):
        cell, node = cells[index], ours[index]
        pus = CpuSet(cpu.pu for cpu in cell.cpus) & online
        if pus != node.pus:
            gaps.append(_gap(f"PUs of node {index}", pus, node.pus))
        for cpu in cell.cpus:
            own = siblings_of.get(cpu.pu)
            if cpu.siblings is not None and own is not None and cpu.siblings & online != own:
                gaps.append(_gap(f"SMT siblings of PU {cpu.pu}", cpu.siblings, own))
                break  # the first of a node says it; there may be hundreds
        for other, distance in cell.distances:
            own_distance = (
                host.distances[place[index]][place[other]]
                if host.distances is not None and other in place
                else None
            )
            if own_distance is not None and own_distance != distance:
                subject = f"distance from node {index} to node {other}"
                gaps.append(_gap(subject, distance, own_distance))
    return tuple(gaps)


def _gap(subject: str, theirs: object, ours: object) -> Gap:
    return Gap(subject, f"libvirt says {theirs}, sysfs says {ours}; used sysfs")
