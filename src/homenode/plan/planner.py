"""Planner: make the plan of one VM from a host and a request, or from CPU lists of the user.

The lists, without a host to check them against, reproduce the study's listings.
"""

from msgspec.structs import replace

from homenode.cpuset import CpuSet, NodeIndex
from homenode.errors import NotKnownError, UsageError
from homenode.findings import Finding, Gap, finding
from homenode.machine.topology import Host, complete_nodes, reject_unshown
from homenode.plan.allocations import own_is_unknown
from homenode.plan.placement import Placement
from homenode.plan.request import GuestRequest
from homenode.plan.search.place import place
from homenode.plan.shape.assemble import assemble
from homenode.text import format_cpus, plural
from homenode.vm.layout import GuestCells, MemoryBinding, Pinning, Siblings
from homenode.vm.plan import Plan, Unplannable
from homenode.vm.plan_options import ManualRanges


def plan(host: Host, request: GuestRequest, *, brief: bool = False) -> Plan:
    """Return the plan of least cost on the first fallback that fits. brief: without explanations.

    Raises Unplannable with every rejection, UsageError for options that contradict each other,
    InputError for what the host lacks, NotKnownError if its cores are unknown.
    """
    certain = complete_nodes(host)
    placement = find_placement(certain, request, brief=brief)
    return assemble(certain, apply_placement(request, placement), placement)


def find_placement(certain: Host, request: GuestRequest, *, brief: bool = False) -> Placement:
    """Return the placement on a host of certain nodes. Raises as plan does."""
    try:
        return place(certain, request, brief=brief)
    except Unplannable as error:
        reject_unshown(certain, "CPUs")
        if request.options.gpu_count:
            reject_unshown(certain, "PCI")
        if certain.pus and not certain.cores:
            raise NotKnownError(
                f"{certain.name}: the CPUs of each core are unknown, so no plan can be made",
                hint="use lscpu -e of the host, or homenode capture, as the source",
            ) from None
        unknown = own_is_unknown(certain, request)
        if unknown is None:
            raise
        hint = f"{unknown}" if error.hint is None else f"{error.hint}; {unknown}"
        raise Unplannable(
            error.message,
            error.rejections,
            hint=hint,
            nearest=error.nearest,
            quotes_nearest=error.quotes_nearest,
        ) from None


def apply_placement(request: GuestRequest, placement: Placement) -> GuestRequest:
    """Return the request with the layout that the VM gets, if vCPUs have to share cores."""
    if placement.layout is None:
        return request
    return replace(request, layout=placement.layout)


def build_manual_placement(request: GuestRequest, ranges: ManualRanges) -> Placement:
    """Place vCPU i on CPU i of the lists, siblings adjacent if the layout pins all CPUs.

    Cell i lies on host node i, as the study's listings have it. Other layouts ignore the sibling
    lists. Raises UsageError for lists that overlap or do not pair up, or if nothing is pinned.
    """
    layout = request.layout
    if layout.pinning is Pinning.NONE:
        raise UsageError(
            f"layout {layout.name!r} pins nothing, but CPU lists were set",
            hint="choose a layout that pins, such as pin-numa, or omit the lists",
        )
    pins_all = layout.pinning is Pinning.ALL_PUS
    _check_lists(ranges, pins_all)
    sizes = [len(pus) for pus in ranges.node_pus]
    mirrored = layout.cells is GuestCells.HOST
    if mirrored and len(set(sizes)) > 1 and not request.options.unequal_cells:
        raise UsageError(
            f"layout {layout.name!r}: expected as many CPUs on each node, found "
            f"{' and '.join(map(str, sizes))}",
            hint="use equal lists, or allow guest NUMA nodes of unequal size with "
            "--allow-unequal-nodes",
        )
    pins: list[CpuSet] = []
    vcpu_nodes: list[int] = []
    for cell, pus in enumerate(ranges.node_pus):
        rows = [tuple(pus), tuple(ranges.sibling_pus[cell])] if pins_all else [tuple(pus)]
        for core in zip(*rows, strict=True):
            pins += [CpuSet([pu]) for pu in core]
            vcpu_nodes += [cell] * len(core)
    nodes = tuple(NodeIndex(i) for i in range(len(ranges.node_pus)))
    emulator = request.options.emulator_pus
    return Placement(
        nodes=nodes,
        vcpu_pins=tuple(pins),
        vcpu_nodes=tuple(vcpu_nodes),
        memory_nodes=() if layout.memory is MemoryBinding.KEEP else nodes,
        threads_per_core=2 if pins_all and layout.siblings is Siblings.EXPOSED else 1,
        emulator_pus=emulator,
        iothread_pus=() if emulator is None else (emulator,) * len(request.guest.iothread_ids),
        devices=tuple(sorted(set(request.devices))),
        fallback="manual",
        findings=tuple(_check_overlap(emulator, pins)) if emulator is not None else (),
        gaps=(
            Gap(
                "host",
                "CPU lists were set manually: that guest NUMA node i is node i, and that the "
                "CPUs are there and free, was not checked",
            ),
        ),
    )


def _check_lists(ranges: ManualRanges, pins_all: bool) -> None:
    if not ranges.node_pus or not all(ranges.node_pus):
        raise UsageError(
            "CPU lists: missing CPUs of a node",
            hint="use --node-cpus once for each node, such as --node-cpus 0-27 --node-cpus 32-59",
        )
    if pins_all and len(ranges.sibling_pus) != len(ranges.node_pus):
        raise UsageError(
            f"sibling lists: expected {len(ranges.node_pus)}, one for each node, found "
            f"{len(ranges.sibling_pus)}",
            hint="use --sibling-cpus once for each --node-cpus, in the same order",
        )
    for number, (pus, siblings) in enumerate(
        zip(ranges.node_pus, ranges.sibling_pus, strict=False)
    ):
        if pins_all and len(pus) != len(siblings):
            raise UsageError(
                f"node {number}: expected {plural(len(pus), 'sibling')} for {format_cpus(pus)}, "
                f"found {len(siblings)} ({siblings})",
                hint="list the sibling of each CPU, in the same order",
            )
    seen_pus = CpuSet()
    for pus in (*ranges.node_pus, *(ranges.sibling_pus if pins_all else ())):
        duplicates = seen_pus & pus
        if duplicates:
            raise UsageError(
                f"CPU lists: expected each CPU once, found {duplicates} in two lists",
                hint="remove them from one list",
            )
        seen_pus |= pus


def _check_overlap(emulator: CpuSet, pins: list[CpuSet]) -> list[Finding]:
    shared_pus = emulator & CpuSet.from_bits(sum(pin.bits for pin in pins))
    if not shared_pus:
        return []
    return [
        finding(
            "emulator-shares-vcpus",
            f"CPUs {shared_pus}",
            observed="QEMU's own threads run on CPUs of vCPUs",
            case="of CPU lists",
        )
    ]
