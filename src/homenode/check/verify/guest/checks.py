"""Checks: what was expected of a guest next to what it reports, with a finding where they differ.

Cells and nodes are matched by their vCPUs: a guest's kernel numbers nodes by the order in which it
meets them, which is that of the vCPUs, whatever their cells are called.
"""

from collections import Counter
from collections.abc import Iterator

from msgspec import UNSET, Struct, UnsetType

from homenode.catalogue import finding
from homenode.check.verify.guest.expectation import Expectation, ExpectedDevice
from homenode.cpuset import CpuSet
from homenode.findings import Finding, Severity
from homenode.machine.pci import PciDevice, PciLink
from homenode.machine.snapshot.protocol import Snapshot
from homenode.machine.tools.acpi_tables import ProximityDomain, parse_slit, parse_srat
from homenode.machine.topology import Host, NumaNode
from homenode.units import MIB, format_bytes
from homenode.vm.guest_observation import Observation
from homenode.vm.model import VmCell

KERNEL_SHARE = 16
"""One part in so many of a node's memory may be the kernel's own tables."""


class Check(Struct, frozen=True):
    """One line of the comparison. finding: None where expected and observed agree."""

    subject: str
    expected: str
    observed: str
    finding: Finding | None


class Tolerance(Struct, frozen=True):
    """What the observer must forgive.

    cpu_substituted: why sockets, siblings and LLCs say nothing; None where they do.
    kernel_bytes: memory on any node that the guest's kernel may keep for itself.
    ballooned_bytes: what a balloon may have taken, of any node.
    """

    cpu_substituted: str | None = None
    kernel_bytes: int = 1024 * MIB
    ballooned_bytes: int = 0


def compare(
    expected: Expectation, observed: Observation, tolerance: Tolerance
) -> tuple[Check, ...]:
    """Every line of the comparison but devices, in the order of a reader's interest."""
    node_of_cell = match_nodes(expected, observed)
    return (
        *_vcpus(expected, observed),
        *_nodes(expected, observed, node_of_cell),
        *_distances(expected, observed, node_of_cell),
        *_memory(expected, observed, node_of_cell, tolerance),
        *_cpu_groups(expected, observed, tolerance),
    )


def match_nodes(expected: Expectation, observed: Observation) -> dict[int, NumaNode]:
    """Cell -> the guest's node that holds most of its vCPUs; the rest in order of their numbers."""
    left = list(observed.nodes)
    found: dict[int, NumaNode] = {}

    def shared(cell: VmCell, node: NumaNode) -> int:
        return len(cell.vcpus & node.pus)

    pairs = sorted(
        ((shared(cell, node), cell, node) for cell in expected.cells for node in left),
        key=lambda pair: (-pair[0], pair[1].id, pair[2].index),
    )
    for count, cell, node in pairs:
        if count and cell.id not in found and node in left:
            found[cell.id] = node
            left.remove(node)
    for cell in expected.cells:
        if cell.id not in found and left:
            found[cell.id] = left.pop(0)
    return found


def check(
    id: str,
    subject: str,
    expected: str,
    observed: str,
    agree: bool,
    source: str,
    *,
    severity: Severity | None = None,
    cost: str | UnsetType | None = UNSET,
    fix: str | UnsetType | None = UNSET,
) -> Check:
    """A line, with the finding `guest-ID` unless the two agree."""
    if agree:
        return Check(subject, expected, observed, None)
    wrong = finding(
        f"guest-{id}", subject, expected, observed, source, severity=severity, cost=cost, fix=fix
    )
    return Check(subject, expected, observed, wrong)


def _vcpus(expected: Expectation, observed: Observation) -> Iterator[Check]:
    wanted = CpuSet(range(expected.vm.vcpus))
    yield check(
        "vcpus",
        "vCPUs",
        str(wanted),
        str(observed.vcpus),
        wanted == observed.vcpus,
        observed.source,
    )


def _nodes(
    expected: Expectation, observed: Observation, node_of_cell: dict[int, NumaNode]
) -> Iterator[Check]:
    wanted, found = len(expected.cells), len(observed.nodes)
    yield check(
        "nodes",
        "NUMA nodes",
        str(wanted),
        str(found),
        wanted == found,
        observed.source,
    )
    for cell in expected.cells:
        node = node_of_cell.get(cell.id)
        yield check(
            "node-vcpus",
            f"cell {cell.id}",
            f"vCPUs {cell.vcpus or 'none'}",
            "no such node" if node is None else f"node {node.index}: vCPUs {node.pus or 'none'}",
            node is not None and node.pus == cell.vcpus,
            observed.source,
        )


def _distances(
    expected: Expectation, observed: Observation, node_of_cell: dict[int, NumaNode]
) -> Iterator[Check]:
    if expected.distances is None:
        return
    position = {node.index: i for i, node in enumerate(observed.nodes)}
    nodes = [node_of_cell.get(cell.id) for cell in expected.cells]
    for cell, row in zip(expected.cells, expected.distances, strict=True):
        here = node_of_cell.get(cell.id)
        found = None
        if observed.guest.distances is not None and here is not None and None not in nodes:
            whole = observed.guest.distances[position[here.index]]
            found = tuple(whole[position[node.index]] for node in nodes if node is not None)
        yield check(
            "distances",
            f"distances from cell {cell.id}",
            " ".join(map(str, row)),
            "none" if found is None else " ".join(map(str, found)),
            found == row,
            observed.source,
        )


def _memory(
    expected: Expectation,
    observed: Observation,
    node_of_cell: dict[int, NumaNode],
    tolerance: Tolerance,
) -> Iterator[Check]:
    for cell in expected.cells:
        node = node_of_cell.get(cell.id)
        if node is None:
            continue
        found = node.memory_bytes
        least = cell.memory_bytes - cell.memory_bytes // KERNEL_SHARE - tolerance.kernel_bytes
        least -= tolerance.ballooned_bytes
        more = expected.memory_device_bytes(cell.id)
        wanted = f"{format_bytes(cell.memory_bytes)} less the kernel's own"
        if more:
            wanted += f", up to {format_bytes(more)} more in memory devices"
        if tolerance.ballooned_bytes:
            wanted += f", {format_bytes(tolerance.ballooned_bytes)} for the balloon"
        yield check(
            "node-memory",
            f"memory of cell {cell.id}",
            wanted,
            "not given" if found is None else format_bytes(found),
            found is not None and least <= found <= cell.memory_bytes + more + MIB,
            observed.source,
            severity=None if found is not None else Severity.INCONCLUSIVE,
        )


def _cpu_groups(
    expected: Expectation, observed: Observation, tolerance: Tolerance
) -> Iterator[Check]:
    topology = expected.vm.cpu_topology
    reason = tolerance.cpu_substituted
    if topology is not None:
        _, dies, per_die, threads = topology
        sockets = expected.runs_of(dies * per_die * threads)
        yield _groups(
            "sockets",
            "sockets",
            sockets,
            tuple(package.pus for package in observed.guest.packages) or None,
            observed.source,
            None,
        )
        cores = expected.runs_of(threads)
        yield _groups(
            "siblings",
            "cores, siblings",
            cores,
            tuple(core.pus for core in observed.guest.cores) or None,
            observed.source,
            reason,
        )
    if expected.l3 is not None:
        yield _groups(
            "llcs",
            "L3 caches",
            expected.l3,
            observed.l3,
            observed.source,
            reason,
        )


def _groups(
    id: str,
    subject: str,
    wanted: tuple[CpuSet, ...],
    found: tuple[CpuSet, ...] | None,
    source: str,
    reason: str | None,
) -> Check:
    expected, observed = _stated(wanted), "not given" if found is None else _stated(found)
    if reason is not None or found is None:
        why = observed if reason is None else f"{observed}; {reason}"
        doubt = check(
            id,
            subject,
            expected,
            why,
            False,
            source,
            severity=Severity.INCONCLUSIVE,
            cost=None,
            fix=None,
        )
        return Check(subject, expected, observed, doubt.finding)
    return check(
        id,
        subject,
        expected,
        observed,
        set(wanted) == set(found),
        source,
    )


def _stated(groups: tuple[CpuSet, ...]) -> str:
    if not groups:
        return "none"
    shown = " ".join(str(group) for group in groups[:8])
    more = f" and {len(groups) - 8} more" if len(groups) > 8 else ""
    return f"{len(groups)}: vCPUs {shown}{more}"


def compare_devices(
    expected: Expectation, observed: Observation, host: Host | None = None, *, links: bool
) -> tuple[Check, ...]:
    """A line for each device's node, and where `links` is set one for its link.

    A device is found by its path in the guest's PCI tree, which is exact. Where the path is not
    known, all functions with the device's ids are looked at: whether they are as many as planned,
    and on the nodes that were planned for them.
    """
    node_of_cell = match_nodes(expected, observed)
    lines: list[Check] = []
    for device in expected.devices:
        if device.path is None:
            lines.append(_by_ids(device, expected, observed, node_of_cell))
        else:
            lines += _device(device, expected, observed, node_of_cell)
        if links and host is not None:
            lines += _link(device, observed, host)
    return tuple(lines)


def _device(
    device: ExpectedDevice,
    expected: Expectation,
    observed: Observation,
    node_of_cell: dict[int, NumaNode],
) -> Iterator[Check]:
    subject, wanted = f"device {device.bdf}", _wanted(device, expected, node_of_cell)
    assert device.path is not None, "compare_devices finds the others by their ids"
    found = observed.device_at(device.path)
    if found is None:
        yield check(
            "device-missing",
            subject,
            f"{wanted}, at {device.path}",
            "no function there",
            False,
            observed.source,
        )
        return
    if _is_other(device, found):
        yield check(
            "device-other",
            subject,
            f"{device.vendor_id:04x}:{device.device_id:04x} at {device.path}",
            f"{found.vendor_id:04x}:{found.device_id:04x}",
            False,
            observed.source,
        )
        return
    yield check(
        "device-node",
        subject,
        wanted,
        f"{_node(found.reported_node)}, as {found.bdf}",
        not expected.has_device_cells or _agrees(device, node_of_cell, found.reported_node),
        observed.source,
    )


def _wanted(
    device: ExpectedDevice, expected: Expectation, node_of_cell: dict[int, NumaNode]
) -> str:
    if not expected.has_device_cells:
        return "there, on any node"
    if device.cell is None:
        return "no node"
    home = node_of_cell.get(device.cell)
    return f"the node of cell {device.cell}" + ("" if home is None else f" (node {home.index})")


def _is_other(device: ExpectedDevice, found: PciDevice) -> bool:
    known = None not in (device.vendor_id, device.device_id, found.vendor_id, found.device_id)
    return known and (device.vendor_id, device.device_id) != (found.vendor_id, found.device_id)


def _agrees(device: ExpectedDevice, node_of_cell: dict[int, NumaNode], node: int | None) -> bool:
    """Whether the guest's node of a device is its cell's. A cell that the guest lacks is no node's,
    which is not the "none" that a device without a cell is to have."""
    home = None if device.cell is None else node_of_cell.get(device.cell)
    return node is None if device.cell is None else home is not None and node == home.index


def _node(node: int | None) -> str:
    return "numa_node -1" if node is None else f"numa_node {node}"


def _by_ids(
    device: ExpectedDevice,
    expected: Expectation,
    observed: Observation,
    node_of_cell: dict[int, NumaNode],
) -> Check:
    """Where the address is not known. Of several of a kind it is not known which is which."""
    subject, wanted = f"device {device.bdf}", _wanted(device, expected, node_of_cell)
    ids = (device.vendor_id, device.device_id)
    kind = [one for one in expected.devices if (one.vendor_id, one.device_id) == ids]
    alike = [one for one in observed.guest.pci_devices if (one.vendor_id, one.device_id) == ids]
    if None in ids:
        return _unknown(device, expected, observed, wanted, "its guest address is not known")
    if kind.index(device) >= len(alike):
        stated = f"{len(alike)} of its kind, where {len(kind)} are planned"
        return check("device-missing", subject, wanted, stated, False, observed.source)
    nodes = Counter(one.reported_node for one in alike)
    stated = f"{_node(alike[0].reported_node)}, as all {len(alike)} of its kind"
    if not expected.has_device_cells:
        stated = stated if len(nodes) == 1 else f"one of {len(alike)} of its kind"
        return check("device-node", subject, wanted, stated, True, observed.source)
    if len(nodes) == 1:
        agree = _agrees(device, node_of_cell, alike[0].reported_node)
        return check("device-node", subject, wanted, stated, agree, observed.source)
    there = sum(_agrees(device, node_of_cell, one.reported_node) for one in alike)
    planned = sum(one.cell == device.cell for one in kind)
    if there < planned:
        stated = f"{there} of its kind there, where {planned} are planned"
        return check("device-node", subject, wanted, stated, False, observed.source)
    why = f"its guest address is not known, and {len(alike)} of its kind differ"
    return _unknown(device, expected, observed, wanted, why)


def _unknown(
    device: ExpectedDevice, expected: Expectation, observed: Observation, wanted: str, why: str
) -> Check:
    fix = "name the running domain's document too: virsh dumpxml NAME > VM.xml"
    if expected.addresses_by is not None:
        fix = f"{expected.addresses_by} chose it: compare serial numbers, as of nvidia-smi -q"
        fix = "name the plan's host: --host" if device.vendor_id is None else fix
    return check(
        "device-node",
        f"device {device.bdf}",
        wanted,
        why,
        False,
        observed.source,
        severity=Severity.INCONCLUSIVE,
        cost=None,
        fix=fix,
    )


def _link(device: ExpectedDevice, observed: Observation, host: Host) -> Iterator[Check]:
    real = host.device(device.bdf)
    found = None if device.path is None else observed.device_at(device.path)
    if real is None or real.link is None or found is None or _is_other(device, found):
        return
    wanted = _rate(real.link.max_gt_per_s, real.link.max_width)
    stated = [_rate(found.link.max_gt_per_s, found.link.max_width)] if found.link else []
    # NCCL and others take the slowest link on the way for the device's.
    stated += [
        _rate(port.current_gt_per_s, port.current_width) for port in observed.port_links(found)
    ]
    known = [rate for rate in stated if rate is not None]
    if wanted is None or not known:
        return
    slowest = min(known)
    yield check(
        "device-link",
        f"link of {device.bdf}",
        f"{_link_text(real.link)}, as on the host",
        f"{slowest:g} GT/s in all lanes on the slowest part of its path",
        slowest >= wanted,
        observed.source,
    )


def _rate(gt_per_s: float | None, width: int | None) -> float | None:
    return None if gt_per_s is None or width is None else gt_per_s * width


def _link_text(link: PciLink) -> str:
    return f"{link.max_gt_per_s:g} GT/s x{link.max_width}"


_TABLES = "/sys/firmware/acpi/tables"


class FirmwareNodes(Struct, frozen=True):
    """What a guest's ACPI tables say. distances: [from][to] by the domains' numbers, None = they
    say none."""

    domains: tuple[ProximityDomain, ...]
    distances: tuple[tuple[int, ...], ...] | None


def firmware_nodes(snapshot: Snapshot) -> FirmwareNodes | None:
    """None where the guest has no such tables, or its kernel showed them to root alone.

    Raises ParseError for tables that are none.
    """
    srat, slit = (snapshot.read_text(f"{_TABLES}/{name}") for name in ("SRAT", "SLIT"))
    if srat is None:
        return None
    domains = parse_srat(srat.encode("utf-8", "surrogateescape"), f"{snapshot.name}: SRAT")
    if slit is None:
        return FirmwareNodes(domains, None)
    table = slit.encode("utf-8", "surrogateescape")
    return FirmwareNodes(domains, parse_slit(table, f"{snapshot.name}: SLIT"))


def firmware_checks(expected: Expectation, found: FirmwareNodes, source: str) -> Iterator[Check]:
    """Cells in the order of their numbers are domains in the order of theirs. Sizes are left to the
    kernel's view: every hypervisor keeps some memory for itself."""
    cells, domains = expected.cells, found.domains
    agree = len(cells) == len(domains)
    wanted, there = str(len(cells)), str(len(domains))
    yield check("firmware-nodes", "SRAT: nodes", wanted, there, agree, source)
    if not agree:
        return
    for cell, domain in zip(cells, domains, strict=True):
        yield check(
            "firmware-nodes",
            f"SRAT: cell {cell.id}",
            f"{len(cell.vcpus)} vCPUs",
            f"{domain.cpus} vCPUs",
            len(cell.vcpus) == domain.cpus,
            source,
        )
    numbers = [domain.number for domain in domains]
    if expected.distances is None or found.distances is None:
        return
    for cell, row, number in zip(cells, expected.distances, numbers, strict=True):
        whole = found.distances[number] if number < len(found.distances) else ()
        given = tuple(whole[other] for other in numbers if other < len(whole))
        yield check(
            "firmware-nodes",
            f"SLIT: distances from cell {cell.id}",
            " ".join(map(str, row)),
            " ".join(map(str, given)) or "none",
            given == row,
            source,
        )
