"""Checks: compare the expected state of a guest with its report; each difference is a finding.

Cells and nodes are matched by their vCPUs: a guest's kernel numbers nodes in the order of their
vCPUs, independent of the cells' ids.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from homenode.check.verify.boot.stand_in import MinimalGuest
from homenode.check.verify.expectation import Expectation, ExpectedDevice, remove_vcpus
from homenode.cpuset import CpuSet
from homenode.findings import Finding, Severity, add_source, finding
from homenode.machine.pci import PciDevice
from homenode.machine.topology import Host, NumaNode
from homenode.text import shorten_list
from homenode.units import MIB, format_bytes
from homenode.vm.facts import FactValues, VmComparison, VmFact, compare, get_value, list_cell_values
from homenode.vm.guest_observation import (
    Observation,
    find_guest_path,
)
from homenode.vm.model import Vm, VmCell

KERNEL_SHARE = 16
"""The kernel's tables may take one part in this many of a node's memory."""


class Check(Struct, frozen=True):
    id: str  # id of the fact; its finding is guest-ID
    subject: str
    expected: str
    observed: str
    # None if expected and observed agree; the caller adds its source
    finding: Finding | None
    reason: str = ""  # why the guest does not show it, if that is unknown
    groups: int = 0  # number of planned vCPU groups, for a fact about groups


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
    """Return a line, with the finding `guest-ID` unless the two agree."""
    if agree:
        return Check(id, subject, expected, observed, None)
    wrong = finding(
        f"guest-{id}", subject, expected, observed, severity=severity, cost=cost, fix=fix
    )
    reason = observed if wrong.severity is Severity.INCONCLUSIVE else ""
    return Check(id, subject, expected, observed, wrong, reason)


_NO_NODE = "no such node"
_NODES = VmFact(id="nodes", title="NUMA nodes", values=lambda vm: get_value(len(vm.cells)))
_KERNEL_FACTS = (
    VmFact(
        id="vcpus",
        title="vCPUs",
        values=lambda vm: get_value(CpuSet(range(vm.vcpus)) - vm.offline_vcpus),
    ),
    _NODES,
    VmFact(
        id="node-vcpus",
        values=lambda vm: list_cell_values(vm, lambda cell: f"vCPUs {cell.vcpus or 'none'}"),
        nothing=_NO_NODE,
    ),
    VmFact(
        id="distances", values=lambda vm: list_cell_values(vm, _format_distances, "distances from ")
    ),
)
"""Facts that a guest's kernel reports, except memory: rows as in vm/facts.py."""


def _make_memory_row(kernel_bytes: int) -> VmFact:
    """Return the row of each node's memory, of which the kernel may reserve a part."""

    def room(vm: Vm) -> FactValues:
        devices = vm.memory_devices
        return {
            f"memory of cell {cell.id}": (
                cell.memory_bytes,
                sum(
                    device.size_bytes
                    for device in devices
                    if device.cell == cell.id or not device.model
                ),
                vm.ballooned_bytes,
            )
            for cell in vm.cells
        }

    def is_equal(want: tuple[int, int, int], have: tuple[int, int, int]) -> bool:
        cell_bytes, device_bytes, balloon = want
        return (
            cell_bytes - cell_bytes // KERNEL_SHARE - kernel_bytes - balloon
            <= have[0]
            <= cell_bytes + device_bytes + MIB
        )

    def show_both(want: tuple[int, int, int], have: Any) -> tuple[str, str, str]:
        cell_bytes, device_bytes, balloon = want
        expected = f"{format_bytes(cell_bytes)} less the kernel's own"
        expected += (
            f", up to {format_bytes(device_bytes)} more in memory devices" if device_bytes else ""
        )
        expected += f", {format_bytes(balloon)} for the balloon" if balloon else ""
        return "", expected, _NO_NODE if have is None else format_bytes(have[0])

    return VmFact(id="node-memory", values=room, agrees=is_equal, show_both=show_both)


def _build_promised_vm(expectation: Expectation) -> Vm:
    """The VM with the cells that are nodes of the guest, and the distances that the guest sees."""
    rows = expectation.distances or ((),) * len(expectation.cells)
    pairs = zip(expectation.cells, rows, strict=True)
    cells = tuple(replace(cell, distances=row) for cell, row in pairs)
    return replace(expectation.vm, cells=cells, offline_vcpus=CpuSet())


def _format_distances(cell: VmCell) -> str | None:
    return " ".join(map(str, cell.distances)) or None


class GuestComparison(Struct, frozen=True):
    """The expected state of a guest, and its report."""

    expected: Expectation
    observed: Observation
    kernel_bytes: int = 1024 * MIB  # memory on any node that the guest's kernel may keep for itself
    substituted: str | None = None  # why sockets, siblings, LLCs do not count; None if they do

    @property
    def node_of_cell(self) -> Mapping[int, NumaNode]:
        return match_nodes(self.expected, self.observed)

    def list_checks(self) -> Iterator[Check]:
        """Yield every line except those of devices, the most interesting first."""
        nodes = self.node_of_cell.items()
        unknown = {f"memory of cell {cell}" for cell, n in nodes if n.memory_bytes is None}
        facts = (*_KERNEL_FACTS, _make_memory_row(self.kernel_bytes))
        for comparison in compare(_build_promised_vm(self.expected), self._shown_vm(), facts):
            if comparison.title in unknown:
                comparison = replace(comparison, observed="not given", agree=False)
                yield _make_check(comparison, Severity.INCONCLUSIVE)
            elif comparison.fact.id != "node-memory" or comparison.found_value is not None:
                yield _make_check(comparison)
        yield from self._cpu_groups()

    def _shown_vm(self) -> Vm:
        """Return the VM that the guest's kernel shows, with its nodes as cells."""
        online, matrix = self.observed.vcpus, self.observed.guest.distances
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
        end = max(online, default=-1) + 1
        return Vm(
            name=self.observed.source,
            vcpus=end,
            offline_vcpus=CpuSet(range(end)) - online,
            memory_bytes=0,
            cells=tuple(cells),
        )

    def _cpu_groups(self) -> Iterator[Check]:
        expectation, guest = self.expected, self.observed.guest
        if expectation.vm.cpu_topology is not None:
            _, dies, per_die, threads = expectation.vm.cpu_topology
            sockets = expectation.group_vcpus(dies * per_die * threads)
            packages = tuple(package.pus for package in guest.packages) or None
            yield _groups("sockets", "sockets", sockets, packages, None)
            cores = tuple(core.pus for core in guest.cores) or None
            cores_planned = expectation.group_vcpus(threads)
            yield _groups("siblings", "siblings", cores_planned, cores, self.substituted)
        if expectation.l3 is not None:
            yield _groups("llcs", "L3 caches", expectation.l3, self.observed.l3, self.substituted)

    def check_devices(self, host: Host | None = None) -> Iterator[Check]:
        """Yield a line for each device's node, and for its link if the host of the devices is
        given.

        A device is found by its path in the guest's PCI tree, which is exact. If the path is
        unknown, all functions with the device's ids are checked: their number, and their planned
        nodes.
        """
        for device in self.expected.devices:
            yield self._check_by_ids(device) if device.path is None else self._check_by_path(device)
            if host is not None:
                yield from self._link(device, host)

    def _check_by_path(self, device: ExpectedDevice) -> Check:
        subject, home = f"device {device.bdf}", self._format_home(device)
        function = self._find_function(device)
        if function is None:
            place = f"{home}, at {device.path}"
            return check("device-missing", subject, place, "no function there")
        if _is_other(device, function):
            ids = f"{device.vendor_id:04x}:{device.device_id:04x} at {device.path}"
            other = f"{function.vendor_id:04x}:{function.device_id:04x}"
            return check("device-other", subject, ids, other)
        node_text = f"{_format_node(function.reported_node)}, as {function.bdf}"
        agree = self._is_on_cell_node(device, function.reported_node)
        return check("device-node", subject, home, node_text, agree=agree)

    def _find_function(self, device: ExpectedDevice) -> PciDevice | None:
        return None if device.path is None else self.observed.find_device(device.path)

    def _format_home(self, device: ExpectedDevice) -> str:
        if not self.expected.has_device_cells:
            return "there, on any node"
        if device.cell is None:
            return "no node"
        home = self.node_of_cell.get(device.cell)
        return f"the node of cell {device.cell}" + ("" if home is None else f" (node {home.index})")

    def _is_on_cell_node(self, device: ExpectedDevice, node: int | None) -> bool:
        """Return whether a device's node is that of its cell, which the guest may lack."""
        if device.cell is None:
            return node is None
        home = self.node_of_cell.get(device.cell)
        return home is not None and node == home.index

    def _check_by_ids(self, device: ExpectedDevice) -> Check:
        """Compare by ids if the address is unknown: several devices of a kind look the same."""
        subject, home = f"device {device.bdf}", self._format_home(device)
        ids = (device.vendor_id, device.device_id)
        if None in ids:
            return self._unknown_check(device, "its guest address is unknown")
        kind = [peer for peer in self.expected.devices if (peer.vendor_id, peer.device_id) == ids]
        functions = self.observed.guest.pci_devices
        peers = [peer for peer in functions if (peer.vendor_id, peer.device_id) == ids]
        if kind.index(device) >= len(peers):
            text = f"{len(peers)} of its kind, where {len(kind)} are planned"
            return check("device-missing", subject, home, text)
        is_one_node = len({peer.reported_node for peer in peers}) == 1
        text = f"{_format_node(peers[0].reported_node)}, as all {len(peers)} of its kind"
        if not self.expected.has_device_cells:
            text = text if is_one_node else f"one of {len(peers)} of its kind"
            return check("device-node", subject, home, text, agree=True)
        if is_one_node:
            agree = self._is_on_cell_node(device, peers[0].reported_node)
            return check("device-node", subject, home, text, agree=agree)
        at_home = sum(self._is_on_cell_node(device, peer.reported_node) for peer in peers)
        planned_count = sum(peer.cell == device.cell for peer in kind)
        if at_home < planned_count:
            text = f"{at_home} of its kind there, where {planned_count} are planned"
            return check("device-node", subject, home, text)
        reason = f"its guest address is unknown, and {len(peers)} of its kind differ"
        return self._unknown_check(device, reason)

    def _unknown_check(self, device: ExpectedDevice, reason: str) -> Check:
        fix = "name the running domain's definition too: virsh dumpxml NAME > VM.xml"
        if not self.expected.has_device_cells:
            fix = "name the plan's host: --host"
        return check(
            "device-node",
            f"device {device.bdf}",
            self._format_home(device),
            reason,
            severity=Severity.INCONCLUSIVE,
            cost=None,
            fix=fix,
        )

    def _link(self, device: ExpectedDevice, host: Host) -> Iterator[Check]:
        real, function = host.find_device(device.bdf), self._find_function(device)
        if real is None or real.link is None or function is None or _is_other(device, function):
            return
        host_rate = _compute_rate(real.link.max_gt_per_s, real.link.max_width)
        rates = (
            [_compute_rate(function.link.max_gt_per_s, function.link.max_width)]
            if function.link
            else []
        )
        # NCCL and others take the slowest link on the way for the device's.
        ports = self.observed.port_links(function)
        rates += [_compute_rate(port.current_gt_per_s, port.current_width) for port in ports]
        known_rates = [rate for rate in rates if rate is not None]
        if host_rate is not None and known_rates:
            yield check(
                "device-link",
                f"link of {device.bdf}",
                f"{real.link.max_gt_per_s:g} GT/s x{real.link.max_width}, as on the host",
                f"{min(known_rates):g} GT/s in all lanes on the slowest part of its path",
                agree=min(known_rates) >= host_rate,
            )


def match_nodes(expectation: Expectation, observation: Observation) -> dict[int, NumaNode]:
    """Cell -> the guest's node that holds most of its vCPUs; the rest in order of their numbers."""
    free = list(observation.nodes)
    node_of: dict[int, NumaNode] = {}

    pairs = sorted(
        ((len(cell.vcpus & node.pus), cell, node) for cell in expectation.cells for node in free),
        key=lambda pair: (-pair[0], pair[1].id, pair[2].index),
    )
    for count, cell, node in pairs:
        if count and cell.id not in node_of and node in free:
            node_of[cell.id] = node
            free.remove(node)
    for cell in expectation.cells:
        if cell.id not in node_of and free:
            node_of[cell.id] = free.pop(0)
    return node_of


def _groups(
    id: str,
    subject: str,
    groups: tuple[CpuSet, ...],
    seen_groups: tuple[CpuSet, ...] | None,
    reason: str | None,
) -> Check:
    expected, observed = (
        _format_groups(groups),
        "not given" if seen_groups is None else _format_groups(seen_groups),
    )
    if reason is None and seen_groups is not None:
        return check(id, subject, expected, observed, agree=set(groups) == set(seen_groups))
    text = observed if reason is None else f"{observed}; {reason}"
    doubt = check(id, subject, expected, text, severity=Severity.INCONCLUSIVE, cost=None, fix=None)
    return Check(
        id, subject, expected, observed, doubt.finding, reason or observed, groups=len(groups)
    )


def _format_groups(groups: tuple[CpuSet, ...]) -> str:
    if not groups:
        return "none"
    return f"{len(groups)}: {shorten_list(map(str, groups), 8, '  ')}"


def _is_other(device: ExpectedDevice, function: PciDevice) -> bool:
    has_ids = None not in (
        device.vendor_id,
        device.device_id,
        function.vendor_id,
        function.device_id,
    )
    return has_ids and (device.vendor_id, device.device_id) != (
        function.vendor_id,
        function.device_id,
    )


def _format_node(node: int | None) -> str:
    return f"numa_node {-1 if node is None else node}"


def _compute_rate(gt_per_s: float | None, width: int | None) -> float | None:
    return None if gt_per_s is None or width is None else gt_per_s * width


def _make_check(comparison: VmComparison, severity: Severity | None = None) -> Check:
    return check(
        comparison.fact.id,
        comparison.title,
        comparison.expected,
        comparison.observed,
        agree=comparison.agree,
        severity=severity,
    )


STAND_IN_KERNEL_BYTES = 96 * MIB
"""Memory that the kernel and its files use on a test guest's first node, and on its last node."""


class GuestView(Struct, frozen=True):
    title: str
    checks: tuple[Check, ...]  # every line, with and without finding
    observation: Observation  # the guest's facts

    @property
    def findings(self) -> tuple[Finding, ...]:
        findings = (line.finding for line in self.checks if line.finding is not None)
        return add_source(findings, self.observation.source)


def compare_test_guest(expectation: Expectation, stand_in: MinimalGuest, guest: Host) -> GuestView:
    """Compare a booted test guest: memory is scaled, links are not compared."""
    observation = Observation(guest)
    if stand_in.vm.offline_vcpus:
        expectation = remove_vcpus(expectation, stand_in.vm.offline_vcpus)
    scaled = stand_in_expectation(expectation, stand_in)
    pair = GuestComparison(scaled, observation, STAND_IN_KERNEL_BYTES, stand_in.cpu.substituted)
    return GuestView("the test guest", (*pair.list_checks(), *pair.check_devices()), observation)


def view_of_guest(expectation: Expectation, guest: Host, host: Host | None) -> GuestView:
    """Return the real guest: its links and huge pages too. host: for the devices' own links. vCPUs
    that were offline and memory that was in the balloon may have come to the guest since."""
    observation = Observation(guest)
    offline = expectation.vm.offline_vcpus
    if offline and len(observation.vcpus) == expectation.vm.vcpus_online:
        expectation = remove_vcpus(expectation, offline)
    pair = GuestComparison(expectation, observation)
    lines = (*pair.list_checks(), *_check_huge_pages(observation), *pair.check_devices(host))
    return GuestView("the guest", lines, observation)


def find_untested_parts(stand_in: MinimalGuest, source: str) -> Iterator[Finding]:
    """Yield the parts of the definition that a test guest lacks, each by name."""
    for part in stand_in.left_out:
        yield finding("not-in-test-guest", part, "the test guest to have it", "omitted", source)


def stand_in_expectation(expectation: Expectation, stand_in: MinimalGuest) -> Expectation:
    """Return the expectation of a test guest: less memory, and substitutes for the devices."""
    address_of = {bdf: address for address, bdf in stand_in.devices if bdf is not None}
    cells = tuple(
        replace(cell, memory_bytes=stand_in.scale(cell.memory_bytes)) for cell in expectation.cells
    )
    return replace(
        expectation,
        vm=replace(expectation.vm, cells=cells, memory_devices=(), ballooned_bytes=0),
        devices=tuple(
            replace(
                device,
                path=find_guest_path(address_of[device.bdf], stand_in.vm.controllers)
                if device.bdf in address_of
                else None,
                vendor_id=None,
                device_id=None,
            )
            for device in expectation.devices
        ),
    )


def _check_huge_pages(observation: Observation) -> Iterator[Check]:
    """Check the guest's own huge pages: programs bound to a node without pages fail."""
    sizes = sorted({pool.page_bytes for node in observation.nodes for pool in node.page_pools})
    for size in sizes:
        counts = [
            sum(pool.total_pages for pool in node.page_pools if pool.page_bytes == size)
            for node in observation.nodes
        ]
        if any(counts) and len(counts) > 1:
            pairs = zip(observation.nodes, counts, strict=True)
            yield check(
                "huge-pages",
                f"the guest's huge pages of {format_bytes(size)}",
                "huge pages on every node, or on no node",
                ", ".join(f"node {node.index}: {count}" for node, count in pairs),
                agree=all(counts),
            )
