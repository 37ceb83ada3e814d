"""Placing: puts the devices of KubeVirt's domain definition on expander buses of their cells.

KubeVirt and the kubelet decided the definition's pins, cells and memory, which stay. Only missing
elements are added: an expander bus per cell, a root port per device, addresses, and the cells'
distances.
"""

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from itertools import pairwise
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cluster.arguments import HookVersion, OnError
from homenode.cluster.kubevirt.needed_host import read_needed_host
from homenode.cluster.kubevirt.object import find_value
from homenode.cluster.kubevirt.vmi import Vmi, read_vmi
from homenode.cpuset import CpuSet, NodeIndex
from homenode.errors import HomenodeError, UsageError
from homenode.findings import Gap
from homenode.formats import NotJsonError, decode_json
from homenode.machine.pci import DeviceKind, PciDevice
from homenode.machine.snapshot.protocol import Snapshot
from homenode.machine.topology import Host
from homenode.plan.request import GuestRequest
from homenode.plan.shape.guest_numa import add_initiator_cells, guest_distances, is_grace
from homenode.plan.shape.pcie import MirroredPcie, mirror_cells, reject_machine
from homenode.text import plural
from homenode.vm.domain.cells import (
    cell_elements,
    edit_cells,
    names_missing_cells,
    read_cells,
)
from homenode.vm.domain.codec import PCIE_STEPS
from homenode.vm.domain.cpu import read_pins
from homenode.vm.domain.document import Document
from homenode.vm.domain.hostdevs import edit_initiators, list_hostdev_elements
from homenode.vm.domain.memory import read_memnodes
from homenode.vm.domain.read import build_vm, open_domain
from homenode.vm.layout import GuestCells, GuestPcie, Layout, MemoryBinding, Pinning, Siblings
from homenode.vm.model import (
    EXPANDER,
    GuestAddress,
    GuestHostdev,
    LayoutRecord,
    Vm,
    VmCell,
)
from homenode.vm.plan import Plan
from homenode.vm.plan_options import PciGranularity, PlanOptions
from homenode.vm.targets.libvirt import rewrite_by

LAYOUT = Layout(
    "kubevirt",
    Pinning.NONE,
    Siblings.KEEP,
    GuestCells.HOST,
    GuestPcie.HOST,
    MemoryBinding.KEEP,
)
"""Layout of plans for KubeVirt: it sets the PCIe tree and the distances, not pins or memory."""

Place = tuple[int, int, int, int]


class PlacedDefinition(Struct, frozen=True):
    """A definition with its devices placed; the input's own bytes if nothing changed."""

    document: bytes
    notes: tuple[str, ...]  # notes, one sentence each; warnings begin with "warning: "


class CellNodes(Struct, frozen=True):
    """Guest cells and their host nodes."""

    # the cell that mirrors a host node; nodes without a cell are omitted
    cell_of_node: dict[NodeIndex, int]
    # the node that a cell mirrors, None if it mirrors several or is unknown
    node_of_cell: tuple[NodeIndex | None, ...]


def place_devices(
    xml: bytes,
    snapshot: Snapshot,
    *,
    asked_for: frozenset[Place] = frozenset(),
    granularity: PciGranularity = PciGranularity.CELL,
    source: str = "domain",
) -> PlacedDefinition:
    """Return the definition with every passed-through function of a known node on its cell.
    asked_for: guest addresses that the user named; these devices stay, as do devices on pcie.0
    itself or on an expander bus. A second call changes nothing. Raises InputError for a document
    that cannot be read or has no expander buses, HostError for a device that /sys does not show,
    Unplannable if bus numbers run out."""
    # Long because each step needs the results of all steps before it.
    document = open_domain(xml, source)
    guest = build_vm(document)
    reason = _find_reason_to_leave(document, guest)
    if reason is not None:
        return PlacedDefinition(xml, (reason,))
    host = read_needed_host(snapshot, tuple(sorted(h.bdf for h in guest.hostdevs)))
    nodes = find_cell_nodes(document, host)
    is_bound = bool(read_memnodes(document))
    if len(guest.cell_vcpus) == 1 and len(nodes.cell_of_node) > 1 and not is_bound:
        nodes_text = ", ".join(map(str, sorted(nodes.cell_of_node)))
        reason = (
            f"warning: the guest's one cell mirrors host nodes {nodes_text}, so that a device on "
            "it would have a wrong node: KubeVirt adds such a cell for memory hotplug; set "
            "spec.domain.cpu.numa.guestMappingPassthrough and omit maxGuest"
        )
        return PlacedDefinition(xml, (reason,))
    by_bdf = host.device_at
    guest, regained_indices = _replace_lost_targets(guest, by_bdf, nodes.cell_of_node)
    staying = [h for h in guest.hostdevs if _is_chosen(guest, h, asked_for, regained_indices)]
    if guest.is_virt:
        staying = [h for h in staying if not _lacks_initiators(guest, by_bdf[h.bdf], h, nodes)]
    moving = [h.bdf for h in guest.hostdevs if h not in staying]
    notes = [
        note
        for h in staying
        if (note := _note_of_staying(guest, h, by_bdf[h.bdf], nodes)) is not None
    ]
    notes += [note for bdf in moving if (note := _explain_unplaced(by_bdf[bdf], nodes)) is not None]
    placeable = tuple(sorted(bdf for bdf in moving if by_bdf[bdf].node in nodes.cell_of_node))
    gaps: list[Gap] = []
    cells = plan_cells(guest, host, nodes, gaps)
    if not placeable:
        rewritten = xml
        if any(_find_stated_cell(guest, h.address) not in (None, -1) for h in staying):
            # KubeVirt keeps the devices of its first definition, and drops the cells' distances.
            plan = _plan(guest, host, cells, by_bdf, MirroredPcie((), {}, {}, {}, ()), {})
            rewritten = rewrite_by((edit_cells,), xml, plan, source)
        note = "no device to move: nothing to do"
        if rewritten != xml:
            note = "added the distances of the cells; no device moved"
        return PlacedDefinition(rewritten, (*notes, note))
    reject_machine(guest, source, "remove the hook from this VM")
    request = GuestRequest(
        guest=guest, layout=LAYOUT, options=PlanOptions(LAYOUT.name, pci_granularity=granularity)
    )
    mirror = mirror_cells(host, request, placeable, nodes.cell_of_node, len(guest.cell_vcpus))
    cells_of_gpu: dict[Bdf, CpuSet] = {}
    grace = tuple(by_bdf[bdf] for bdf in placeable if is_grace(by_bdf[bdf]))
    steps: tuple[Callable[[Document, Plan], Document], ...] = PCIE_STEPS
    if grace and guest.is_virt:
        from homenode.cluster.kubevirt.needed_host import find_initiators

        nodes_of_gpu, missing = find_initiators(snapshot, host, grace)
        notes += missing
        cells, cells_of_gpu = add_initiator_cells(
            cells, nodes.node_of_cell, nodes_of_gpu, host, gaps
        )
        steps = (*PCIE_STEPS, edit_initiators)
    plan = _plan(guest, host, cells, by_bdf, mirror, cells_of_gpu)
    notes += [f"{f.severity}: {f.subject}: {f.comparison}" for f in mirror.findings]
    notes += [f"warning: {gap}" for gap in gaps]
    if regained_indices:
        buses = plural(len(regained_indices), "expander bus", "expander buses")
        notes.append(f"added the cell and the bus number of {buses} again")
    notes.append(_format_summary(placeable, mirror))
    return PlacedDefinition(rewrite_by(steps, xml, plan, source), tuple(notes))


def _find_reason_to_leave(document: Document, guest: Vm) -> str | None:
    """Return why the definition stays unchanged on any host; None if devices may move."""
    if not guest.hostdevs:
        return "no passed-through PCI function: nothing to do"
    if _is_grace_done(document, len(guest.cell_vcpus)):
        return "GraceIOVirtualization has placed the GPUs already: nothing to do"
    if not guest.cell_vcpus:
        return (
            "warning: the guest is flat, so that its devices can have no NUMA node: set "
            "spec.domain.cpu.numa.guestMappingPassthrough and dedicatedCpuPlacement"
        )
    cells = cell_elements(document)
    if any(names_missing_cells(cell, len(cells)) for cell in cells):
        return "warning: a <sibling> names a cell that is missing: libvirt rejects the definition"
    return None


def _replace_lost_targets(
    guest: Vm, by_bdf: Mapping[Bdf, PciDevice], cell_of_node: Mapping[NodeIndex, int]
) -> tuple[Vm, frozenset[int]]:
    """Return the guest with a cell on each expander bus that lost its cell, and the indices of
    these buses.

    KubeVirt defines a VM again with the devices that libvirt printed, as its own types hold them.
    Before they knew PCINUMAAwareTopology (1.7 and older) they had no <target> for controllers:
    libvirt would give each bus two bus numbers, too few for its ports, and no node.

    It is the cell of the functions below. Buses without functions get the cells that have no bus
    yet, both in ascending order. A bus with a bus number does not come from the hook and stays.
    """
    expanders = [c for c in guest.controllers if c.model == EXPANDER]
    lost_indices = [c.index for c in expanders if c.bus_nr is None and c.cell is None]
    if not lost_indices:
        return guest, frozenset()
    cells_below: dict[int, set[int | None]] = {index: set() for index in lost_indices}
    for hostdev in guest.hostdevs:
        at = hostdev.address
        expander = None if at is None else guest.expander_above(at.bus)
        if expander is not None and expander.index in cells_below:
            node = by_bdf[hostdev.bdf].node
            cells_below[expander.index].add(None if node is None else cell_of_node.get(node))
    cell_of = {
        index: cell
        for index, cells in cells_below.items()
        if len(cells) == 1 and (cell := next(iter(cells))) is not None
    }
    named_cells = {*cell_of.values(), *(c.cell for c in guest.controllers)}
    cells_without_bus = [cell for cell in range(len(guest.cell_vcpus)) if cell not in named_cells]
    empty = [index for index in lost_indices if not cells_below[index]]
    cell_of |= dict(zip(empty, cells_without_bus, strict=False))
    controllers = tuple(
        replace(controller, cell=cell_of[controller.index])
        if controller.index in cell_of
        else controller
        for controller in guest.controllers
    )
    return replace(guest, controllers=controllers), frozenset(cell_of)


def _is_grace_done(document: Document, cells: int) -> bool:
    """Return whether KubeVirt placed the Grace GPUs: each has its own expander bus and SMMU.

    A nodeset of missing cells comes from the hook, at the first of KubeVirt's two definitions: the
    second has the devices of the first, and the cells from before the first.
    """
    for _, element in list_hostdev_elements(document):
        acpi = element.child("acpi")
        text = None if acpi is None else acpi.get("nodeset")
        if text is not None:
            named = CpuSet.parse(text, f"{document.source}: <acpi nodeset>")
            if max(named, default=0) < cells:
                return True
    return False


def _is_chosen(
    guest: Vm, hostdev: GuestHostdev, asked_for: frozenset[Place], regained_indices: frozenset[int]
) -> bool:
    """Return whether the address was chosen: by the user, or by a place other than behind a root
    port of pcie.0, libvirt's default. regained_indices: expander buses made by the hook."""
    at = hostdev.address
    if at is None:
        return False
    by_name = (at.domain, at.bus, at.device, at.function) in asked_for
    expander = guest.expander_above(at.bus)
    by_expander = expander is not None and expander.index not in regained_indices
    return by_name or at.bus == 0 or by_expander


def _lacks_initiators(
    guest: Vm, device: PciDevice, hostdev: GuestHostdev, nodes: CellNodes
) -> bool:
    """Whether a Grace GPU is on its cell but has no initiator cells yet: see _is_grace_done."""
    if hostdev.address is None or device.node is None or not is_grace(device):
        return False
    return _find_stated_cell(guest, hostdev.address) == nodes.cell_of_node.get(device.node)


def _find_stated_cell(guest: Vm, at: GuestAddress | None) -> int | None:
    """Return the cell of the expander bus above an address; -1 if the bus names no cell."""
    expander = None if at is None else guest.expander_above(at.bus)
    if expander is None:
        return None
    return -1 if expander.cell is None else expander.cell


def _note_of_staying(
    guest: Vm, hostdev: GuestHostdev, device: PciDevice, nodes: CellNodes
) -> str | None:
    assert hostdev.address is not None, "only a device with an address stays"
    cell = _find_stated_cell(guest, hostdev.address)
    right = None if device.node is None else nodes.cell_of_node.get(device.node)
    if right is None or cell == right:
        return None
    place_text = "on no cell" if cell in (None, -1) else f"on cell {cell}"
    bare = device.kind is DeviceKind.GPU and hostdev.address.bus == 0
    return (
        f"warning: {device.bdf}: expected on cell {right}, which is its host node {device.node}, "
        f"found at {hostdev.address}, {place_text}: it was put there explicitly and stays"
        + (
            "; CUDA does not initialise on some GPUs without a port above (HGX B200)"
            if bare
            else ""
        )
    )


def _explain_unplaced(device: PciDevice, nodes: CellNodes) -> str | None:
    if device.node is None:
        return (
            f"warning: {device.bdf}: no host NUMA node (numa_node is -1 or missing): it stays on "
            "pcie.0; enable NUMA in the host's firmware"
        )
    if device.node not in nodes.cell_of_node:
        have = ", ".join(map(str, sorted(nodes.cell_of_node))) or "none"
        return (
            f"warning: {device.bdf}: expected its host node {device.node} among the guest's "
            f"({have}): it stays on pcie.0; kubelet assigned CPUs and devices of different nodes, "
            "which Topology Manager prevents (homenode kubevirt check)"
        )
    return None


def _plan(
    guest: Vm,
    host: Host,
    cells: tuple[VmCell, ...],
    by_bdf: Mapping[Bdf, PciDevice],
    mirror: MirroredPcie,
    cells_of_gpu: Mapping[Bdf, CpuSet],
) -> Plan:
    """Return a plan with the pins, cells and memory of the definition."""
    devices: list[GuestHostdev] = []
    for hostdev in sorted(guest.hostdevs, key=lambda h: h.bdf):
        bdf = hostdev.bdf
        devices.append(
            GuestHostdev(
                bdf=bdf,
                host_node=by_bdf[bdf].node,
                cell=mirror.cell_of.get(bdf),
                address=mirror.address_of.get(bdf, hostdev.address),
                group=mirror.group_of.get(bdf, bdf),
                initiator_cells=cells_of_gpu.get(bdf, CpuSet()),
            )
        )
    return Plan(
        vm=Vm(
            name=guest.name,
            vcpus=guest.vcpus,
            memory_bytes=guest.memory_bytes,
            page_bytes=guest.page_bytes,
            cells=cells,
            hostdevs=tuple(devices),
            controllers=mirror.controllers,
            has_iommu=guest.has_iommu,
            record=LayoutRecord(layout=LAYOUT, host=None),
        ),
        host_name=host.name,
        host_fingerprint="",
        policy="kubelet",
        nodes=tuple(sorted({node for cell in cells for node in cell.host_nodes})),
        llcs=(),
        aperture=None,
        page_reservations=(),
        fallback="as-kubelet-chose",
        cost=(),
        optimal=True,
        runners_up=(),
        rejections=(),
        findings=mirror.findings,
        consequences=(),
        gaps=(),
    )


def _format_summary(placed_bdfs: tuple[Bdf, ...], mirror: MirroredPcie) -> str:
    count: dict[int, int] = {}
    for bdf in placed_bdfs:
        cell = mirror.cell_of[bdf]
        count[cell] = count.get(cell, 0) + 1
    cells_text = ", ".join(f"{count[cell]} on cell {cell}" for cell in sorted(count))
    return f"placed {len(placed_bdfs)} PCI functions: {cells_text}"


def find_cell_nodes(document: Document, host: Host) -> CellNodes:
    """Return the cells by node. A cell's <memnode> decides; if several cells or no cells name a
    node, the cell with the most vCPUs pinned to the node's CPUs, the lowest of equals."""
    cells = [vcpus for _, vcpus in read_cells(document)]
    bound = {
        cell: frozenset(int(node) for node in nodes)
        for cell, (_, nodes) in read_memnodes(document).items()
        if cell < len(cells)
    }
    pins = read_pins(document)
    cell_of_node: dict[NodeIndex, int] = {}
    for node in host.nodes:
        named = [cell for cell in sorted(bound) if node.index in bound[cell]]
        if len(named) == 1:
            cell_of_node[node.index] = named[0]
            continue
        # A cell that is bound to other nodes does not mirror this node, whatever its pins are.
        candidates = named or [cell for cell in range(len(cells)) if cell not in bound]
        count = {
            cell: sum(_is_within(pins.get(("vcpupin", vcpu)), node.pus) for vcpu in cells[cell])
            for cell in candidates
        }
        highest = max(count.values(), default=0)
        if highest or named:
            cell_of_node[node.index] = next(cell for cell in candidates if count[cell] == highest)
    node_of_cell: list[NodeIndex | None] = []
    for cell in range(len(cells)):
        host_nodes = bound.get(cell) or {
            node for node, home in cell_of_node.items() if home == cell
        }
        node_of_cell.append(NodeIndex(next(iter(host_nodes))) if len(host_nodes) == 1 else None)
    return CellNodes(cell_of_node, tuple(node_of_cell))


def _is_within(pins: CpuSet | None, pus: CpuSet) -> bool:
    return pins is not None and bool(pins) and pins <= pus


def plan_cells(guest: Vm, host: Host, nodes: CellNodes, gaps: list[Gap]) -> tuple[VmCell, ...]:
    """Return the definition's cells, with the host's distances if distances are missing."""
    distances = [cell.distances for cell in guest.cells]
    known_nodes = tuple(node for node in nodes.node_of_cell if node is not None)
    online = {node.index for node in host.nodes}
    if not any(distances) and len(known_nodes) == len(distances) and set(known_nodes) <= online:
        distances = list(guest_distances(host, known_nodes, gaps)) or distances
    homes = [
        tuple(node for node, cell in nodes.cell_of_node.items() if cell == i)
        for i in range(len(distances))
    ]
    rows = zip(guest.cells, homes, distances, strict=True)
    return tuple(replace(cell, host_nodes=home, distances=row) for cell, home, row in rows)


ON_ERROR_ANNOTATION = "homenode/on-error"
GRANULARITY_ANNOTATION = "homenode/pci-granularity"
CHOICES = {ON_ERROR_ANNOTATION: OnError, GRANULARITY_ANNOTATION: PciGranularity}
"""Valid values of the hook's annotations; with any other value the VM does not start."""

HOOKS = ("onDefineDomain", "preCloudInitIso")
"""The hooks of KubeVirt, the names of their files."""

Choice = TypeVar("Choice", bound=StrEnum)


class DomainAnswer(Struct, frozen=True):
    """Output of the hook."""

    document: bytes | None  # None if it fails
    exit_code: int
    notes: tuple[str, ...]  # lines for standard error


def answer(
    vmi: str,
    domain: bytes,
    open_host: Callable[[], Snapshot],
    *,
    on_error: OnError | None = None,
    granularity: PciGranularity | None = None,
) -> DomainAnswer:
    """Return the hook's answer to one call. on_error, granularity: None = from the VMI's
    annotations, else `fail` and `cell`."""
    policy = on_error or OnError.FAIL
    try:
        read = read_vmi(vmi, "--vmi")
        policy = on_error or _parse_choice(read, ON_ERROR_ANNOTATION, OnError, OnError.FAIL)
        chosen_granularity = granularity or _parse_choice(
            read, GRANULARITY_ANNOTATION, PciGranularity, PciGranularity.CELL
        )
        placement = place_devices(
            domain,
            open_host(),
            asked_for=read.guest_addresses,
            granularity=chosen_granularity,
            source="--domain",
        )
    except HomenodeError as error:
        return _answer_failure(domain, policy, str(error), error.exit_code)
    except (OSError, MemoryError, RecursionError) as error:
        return _answer_failure(domain, policy, f"{type(error).__name__}: {error}", 3)
    return DomainAnswer(placement.document, 0, placement.notes)


def _answer_failure(domain: bytes, policy: OnError, message: str, exit_code: int) -> DomainAnswer:
    if policy is OnError.FAIL:
        return DomainAnswer(None, exit_code, (f"error: {message}",))
    return DomainAnswer(
        domain, 0, (f"error: {message}", "the definition is passed on unchanged (on-error)")
    )


def _parse_choice(vmi: Vmi, annotation: str, choices: type[Choice], default: Choice) -> Choice:
    text = vmi.annotations.get(annotation)
    if text is None:
        return default
    if text not in list(choices):
        raise UsageError(
            f"annotation {annotation}: expected one of {', '.join(choices)}, found {text[:60]!r}"
        )
    return choices(text)


def hook_faults(text: str) -> Iterator[str]:
    """Yield why an annotation with sidecars starts no VM, or no hook."""
    try:
        sidecars = decode_json(text)
    except NotJsonError:
        yield "not JSON: the VM does not start"
        return
    if not isinstance(sidecars, list) or not all(isinstance(entry, dict) for entry in sidecars):
        yield "not a list of objects: the VM does not start"
        return
    if not sidecars:
        yield "an empty list: no hook runs"
    for sidecar in sidecars:
        words = sidecar.get("args")
        for flag, version in pairwise(words if isinstance(words, list) else []):
            if flag == "--version" and version not in tuple(HookVersion):
                yield f"--version {str(version)[:40]}: the VM does not start"
        path = find_value(sidecar, "configMap", "hookPath")
        directory, _, name = str(path).rpartition("/")
        if path is not None and (name not in HOOKS or not directory.endswith("/bin")):
            yield f"hookPath {str(path)[:40]}: KubeVirt's shim does not find the hook"
