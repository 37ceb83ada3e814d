"""Checks: what was expected of a guest next to what it reports, with a finding where they differ.

Cells and nodes are matched by their vCPUs: a guest's kernel numbers nodes by the order in which it
meets them, which is that of the vCPUs, whatever their cells are called.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from homenode.check.verify.guest.expectation import Expectation, ExpectedDevice
from homenode.cpuset import CpuSet
from homenode.findings import Finding, Severity, finding
from homenode.machine.pci import PciDevice
from homenode.machine.snapshot.protocol import Snapshot
from homenode.machine.tools.acpi_tables import ProximityDomain, parse_slit, parse_srat
from homenode.machine.topology import Host, NumaNode
from homenode.text import first_few
from homenode.units import MIB, format_bytes
from homenode.vm.facts import FactValues, VmComparison, VmFact, compare, of_cells, of_vm
from homenode.vm.guest_observation import Observation
from homenode.vm.model import Vm, VmCell

KERNEL_SHARE = 16
"""One part in so many of a node's memory may be the kernel's own tables."""


class Check(Struct, frozen=True):
    """One line of the comparison."""

    subject: str
    expected: str
    observed: str
    # None where expected and observed agree; its source is left to whoever knows the guest
    finding: Finding | None


def check(
    id: str,
    subject: str,
    expected: str,
    observed: str,
    *,
    agree: bool = False,
    severity: Severity | None = None,
    cost: str | UnsetType | None = UNSET,
    fix: str | UnsetType | None = UNSET,
) -> Check:
    """A line, with the finding `guest-ID` unless the two agree."""
    if agree:
        return Check(subject, expected, observed, None)
    wrong = finding(
        f"guest-{id}", subject, expected, observed, severity=severity, cost=cost, fix=fix
    )
    return Check(subject, expected, observed, wrong)


_NO_NODE = "no such node"
_NODES = VmFact(id="nodes", title="NUMA nodes", values=lambda vm: of_vm(len(vm.cells)))
_KERNEL_FACTS = (
    VmFact(
        id="vcpus",
        title="vCPUs",
        values=lambda vm: of_vm(CpuSet(range(vm.vcpus)) - vm.offline_vcpus),
    ),
    _NODES,
    VmFact(
        id="node-vcpus",
        values=lambda vm: of_cells(vm, lambda cell: f"vCPUs {cell.vcpus or 'none'}"),
        nothing=_NO_NODE,
    ),
    VmFact(id="distances", values=lambda vm: of_cells(vm, _row, "distances from ")),
)
"""What a guest's kernel says of its VM, but for memory: rows as those of vm/facts.py."""
_FIRMWARE_FACTS = (
    replace(_NODES, title="SRAT: nodes"),
    VmFact(
        id="vcpus",
        values=lambda vm: of_cells(vm, lambda cell: f"{len(cell.vcpus)} vCPUs", "SRAT: "),
        after=("nodes",),
    ),
    VmFact(
        id="distances",
        values=lambda vm: of_cells(vm, _row, "SLIT: distances from "),
        after=("nodes",),
    ),
)
"""What its ACPI tables say. Sizes are left to the kernel: every hypervisor keeps some memory."""


def _memory(kernel_bytes: int) -> VmFact:
    """The row of each node's memory, of which the kernel may keep so much for itself."""

    def room(vm: Vm) -> FactValues:
        more = vm.memory_devices
        return {
            f"memory of cell {cell.id}": (
                cell.memory_bytes,
                sum(one.size_bytes for one in more if one.cell == cell.id or not one.model),
                vm.ballooned_bytes,
            )
            for cell in vm.cells
        }

    def same(want: tuple[int, int, int], have: tuple[int, int, int]) -> bool:
        most, more, balloon = want
        return most - most // KERNEL_SHARE - kernel_bytes - balloon <= have[0] <= most + more + MIB

    def shown(want: tuple[int, int, int], have: Any) -> tuple[str, str, str]:
        most, more, balloon = want
        wanted = f"{format_bytes(most)} less the kernel's own"
        wanted += f", up to {format_bytes(more)} more in memory devices" if more else ""
        wanted += f", {format_bytes(balloon)} for the balloon" if balloon else ""
        return "", wanted, _NO_NODE if have is None else format_bytes(have[0])

    return VmFact(id="node-memory", values=room, agrees=same, show_both=shown)


def _promised(expected: Expectation) -> Vm:
    """The VM with the cells that are nodes of the guest, and the distances that it was shown."""
    rows = expected.distances or ((),) * len(expected.cells)
    pairs = zip(expected.cells, rows, strict=True)
    cells = tuple(replace(cell, distances=row) for cell, row in pairs)
    return replace(expected.vm, cells=cells, offline_vcpus=CpuSet())


def _row(cell: VmCell) -> str | None:
    return " ".join(map(str, cell.distances)) or None


class GuestComparison(Struct, frozen=True):
    """What was expected of a guest, and what it reports."""

    expected: Expectation
    observed: Observation
    kernel_bytes: int = 1024 * MIB  # memory on any node that the guest's kernel may keep for itself
    substituted: str | None = None  # why sockets, siblings and LLCs say nothing; None where they do

    @property
    def node_of_cell(self) -> Mapping[int, NumaNode]:
        return match_nodes(self.expected, self.observed)

    def lines(self) -> Iterator[Check]:
        """Every line but those of devices, in the order of a reader's interest."""
        nodes = self.node_of_cell.items()
        unknown = {f"memory of cell {cell}" for cell, n in nodes if n.memory_bytes is None}
        facts = (*_KERNEL_FACTS, _memory(self.kernel_bytes))
        for one in compare(_promised(self.expected), self._shown(), facts):
            if one.fact.id != "node-memory" or one.observed != _NO_NODE:
                severity = Severity.INCONCLUSIVE if one.title in unknown else None
                yield _line(one.fact.id, one, severity)
        yield from self._cpu_groups()

    def _shown(self) -> Vm:
        """The VM that the guest's kernel shows, its nodes as the cells that they are."""
        there, matrix = self.observed.vcpus, self.observed.guest.distances
        at = {node.index: i for i, node in enumerate(self.observed.nodes)}
        of_cell = {cell.id: self.node_of_cell.get(cell.id) for cell in self.expected.cells}
        columns = [at[node.index] for node in of_cell.values() if node is not None]
        rows = matrix if matrix and len(columns) == len(of_cell) else ((),) * len(at)
        cell_of = {node.index: cell for cell, node in self.node_of_cell.items()}
        cells = (
            VmCell(
                id=cell_of.get(node.index, -1 - i),
                vcpus=node.pus,
                memory_bytes=node.memory_bytes or 0,
                distances=tuple(rows[i][column] for column in columns if rows[i]),
            )
            for i, node in enumerate(self.observed.nodes)
        )
        end = max(there, default=-1) + 1
        return Vm(
            name=self.observed.source,
            vcpus=end,
            offline_vcpus=CpuSet(range(end)) - there,
            memory_bytes=0,
            cells=tuple(cells),
        )

    def _cpu_groups(self) -> Iterator[Check]:
        expected, guest = self.expected, self.observed.guest
        if expected.vm.cpu_topology is not None:
            _, dies, per_die, threads = expected.vm.cpu_topology
            sockets = expected.runs_of(dies * per_die * threads)
            packages = tuple(package.pus for package in guest.packages) or None
            yield _groups("sockets", "sockets", sockets, packages, None)
            cores = tuple(core.pus for core in guest.cores) or None
            wanted = expected.runs_of(threads)
            yield _groups("siblings", "siblings", wanted, cores, self.substituted)
        if expected.l3 is not None:
            yield _groups("llcs", "L3 caches", expected.l3, self.observed.l3, self.substituted)

    def devices(self, host: Host | None = None) -> Iterator[Check]:
        """A line for each device's node, and one for its link where the host of the devices is
        given.

        A device is found by its path in the guest's PCI tree, which is exact. Where the path is not
        known, all functions with the device's ids are looked at: whether they are as many as
        planned, and on the nodes that were planned for them.
        """
        for device in self.expected.devices:
            yield self._by_ids(device) if device.path is None else self._by_path(device)
            if host is not None:
                yield from self._link(device, host)

    def _by_path(self, device: ExpectedDevice) -> Check:
        subject, wanted = f"device {device.bdf}", self._wanted(device)
        found = self._found(device)
        if found is None:
            where = f"{wanted}, at {device.path}"
            return check("device-missing", subject, where, "no function there")
        if _is_other(device, found):
            ids = f"{device.vendor_id:04x}:{device.device_id:04x} at {device.path}"
            other = f"{found.vendor_id:04x}:{found.device_id:04x}"
            return check("device-other", subject, ids, other)
        there = f"{_node(found.reported_node)}, as {found.bdf}"
        agree = self._agrees(device, found.reported_node)
        return check("device-node", subject, wanted, there, agree=agree)

    def _found(self, device: ExpectedDevice) -> PciDevice | None:
        return None if device.path is None else self.observed.device_at(device.path)

    def _wanted(self, device: ExpectedDevice) -> str:
        if not self.expected.has_device_cells:
            return "there, on any node"
        if device.cell is None:
            return "no node"
        home = self.node_of_cell.get(device.cell)
        return f"the node of cell {device.cell}" + ("" if home is None else f" (node {home.index})")

    def _agrees(self, device: ExpectedDevice, node: int | None) -> bool:
        """Whether the guest's node of a device is its cell's. A cell that the guest lacks is no
        node's, which is not the "none" that a device without a cell is to have."""
        if device.cell is None:
            return node is None
        home = self.node_of_cell.get(device.cell)
        return home is not None and node == home.index

    def _by_ids(self, device: ExpectedDevice) -> Check:
        """Where the address is not known. Of several of a kind it is not known which is which."""
        subject, wanted = f"device {device.bdf}", self._wanted(device)
        ids = (device.vendor_id, device.device_id)
        if None in ids:
            return self._unknown(device, "its guest address is not known")
        kind = [one for one in self.expected.devices if (one.vendor_id, one.device_id) == ids]
        functions = self.observed.guest.pci_devices
        alike = [one for one in functions if (one.vendor_id, one.device_id) == ids]
        if kind.index(device) >= len(alike):
            stated = f"{len(alike)} of its kind, where {len(kind)} are planned"
            return check("device-missing", subject, wanted, stated)
        is_one_node = len({one.reported_node for one in alike}) == 1
        stated = f"{_node(alike[0].reported_node)}, as all {len(alike)} of its kind"
        if not self.expected.has_device_cells:
            stated = stated if is_one_node else f"one of {len(alike)} of its kind"
            return check("device-node", subject, wanted, stated, agree=True)
        if is_one_node:
            agree = self._agrees(device, alike[0].reported_node)
            return check("device-node", subject, wanted, stated, agree=agree)
        there = sum(self._agrees(device, one.reported_node) for one in alike)
        planned = sum(one.cell == device.cell for one in kind)
        if there < planned:
            stated = f"{there} of its kind there, where {planned} are planned"
            return check("device-node", subject, wanted, stated)
        why = f"its guest address is not known, and {len(alike)} of its kind differ"
        return self._unknown(device, why)

    def _unknown(self, device: ExpectedDevice, why: str) -> Check:
        fix = "name the running domain's document too: virsh dumpxml NAME > VM.xml"
        if not self.expected.has_device_cells:
            fix = "name the plan's host: --host"
        return check(
            "device-node",
            f"device {device.bdf}",
            self._wanted(device),
            why,
            severity=Severity.INCONCLUSIVE,
            cost=None,
            fix=fix,
        )

    def _link(self, device: ExpectedDevice, host: Host) -> Iterator[Check]:
        real, found = host.device(device.bdf), self._found(device)
        if real is None or real.link is None or found is None or _is_other(device, found):
            return
        wanted = _rate(real.link.max_gt_per_s, real.link.max_width)
        stated = [_rate(found.link.max_gt_per_s, found.link.max_width)] if found.link else []
        # NCCL and others take the slowest link on the way for the device's.
        ports = self.observed.port_links(found)
        stated += [_rate(port.current_gt_per_s, port.current_width) for port in ports]
        known = [rate for rate in stated if rate is not None]
        if wanted is not None and known:
            yield check(
                "device-link",
                f"link of {device.bdf}",
                f"{real.link.max_gt_per_s:g} GT/s x{real.link.max_width}, as on the host",
                f"{min(known):g} GT/s in all lanes on the slowest part of its path",
                agree=min(known) >= wanted,
            )


def match_nodes(expected: Expectation, observed: Observation) -> dict[int, NumaNode]:
    """Cell -> the guest's node that holds most of its vCPUs; the rest in order of their numbers."""
    left = list(observed.nodes)
    found: dict[int, NumaNode] = {}

    pairs = sorted(
        ((len(cell.vcpus & node.pus), cell, node) for cell in expected.cells for node in left),
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


def _groups(
    id: str,
    subject: str,
    wanted: tuple[CpuSet, ...],
    found: tuple[CpuSet, ...] | None,
    reason: str | None,
) -> Check:
    expected, observed = _stated(wanted), "not given" if found is None else _stated(found)
    if reason is None and found is not None:
        return check(id, subject, expected, observed, agree=set(wanted) == set(found))
    why = observed if reason is None else f"{observed}; {reason}"
    doubt = check(id, subject, expected, why, severity=Severity.INCONCLUSIVE, cost=None, fix=None)
    return Check(subject, expected, observed, doubt.finding)


def _stated(groups: tuple[CpuSet, ...]) -> str:
    if not groups:
        return "none"
    return f"{len(groups)}: {first_few(map(str, groups), 8, '  ')}"


def _is_other(device: ExpectedDevice, found: PciDevice) -> bool:
    known = None not in (device.vendor_id, device.device_id, found.vendor_id, found.device_id)
    return known and (device.vendor_id, device.device_id) != (found.vendor_id, found.device_id)


def _node(node: int | None) -> str:
    return f"numa_node {-1 if node is None else node}"


def _rate(gt_per_s: float | None, width: int | None) -> float | None:
    return None if gt_per_s is None or width is None else gt_per_s * width


_TABLES = "/sys/firmware/acpi/tables"


class FirmwareNodes(Struct, frozen=True):
    """What a guest's ACPI tables say."""

    domains: tuple[ProximityDomain, ...]
    # [from][to] by the domains' numbers, None = they say none
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


def firmware_checks(expected: Expectation, found: FirmwareNodes) -> Iterator[Check]:
    """Cells in the order of their numbers are domains in the order of theirs."""
    planned, domains, rows = _promised(expected), found.domains, found.distances or ()
    numbers = [domain.number for domain in domains]
    cells = [
        VmCell(
            id=planned.cells[i].id if i < len(planned.cells) else -1 - i,
            vcpus=CpuSet(range(one.cpus)),
            distances=tuple(rows[one.number][n] for n in numbers if max(one.number, n) < len(rows)),
        )
        for i, one in enumerate(domains)
    ]
    facts = _FIRMWARE_FACTS if rows else _FIRMWARE_FACTS[:-1]
    for one in compare(planned, replace(planned, cells=tuple(cells)), facts):
        yield _line("firmware-nodes", one)


def _line(id: str, one: VmComparison, severity: Severity | None = None) -> Check:
    return check(id, one.title, one.expected, one.observed, agree=one.agree, severity=severity)
