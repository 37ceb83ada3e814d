"""Planner: make the plan of one VM from a host and a request, or from CPU lists of the user.

The lists, without a host to check them against, reproduce the study's listings. `--layout auto` is
chosen by a table of uses, machines and VMs.
"""

from collections.abc import Callable

from msgspec import Struct, structs
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, NodeIndex
from homenode.errors import HomenodeError, NotKnownError, UsageError
from homenode.findings import Finding, Gap, finding
from homenode.machine.pci import DeviceKind, has_verbs
from homenode.machine.topology import Host, complete_nodes, reject_unshown
from homenode.objective import Objective
from homenode.plan.allocations import own_is_unknown
from homenode.plan.placement import Placement
from homenode.plan.request import GuestRequest, request_for
from homenode.plan.search.place import place
from homenode.plan.shape.assemble import assemble
from homenode.plan.shape.guest_numa import is_grace
from homenode.text import format_cpus, plural
from homenode.vm.gpu_parts import resolve_device
from homenode.vm.layout import PRESETS, GuestCells, GuestPcie, MemoryBinding, Pinning, Siblings
from homenode.vm.model import Vm
from homenode.vm.plan import Plan, Relaxation, Unplannable
from homenode.vm.plan_options import (
    AUTO,
    DefinitionSiblings,
    ManualRanges,
    PciGranularity,
    PlanOptions,
)


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


FLAT, TREE = "pin-bound", "pin-numa-pci"

LAYOUTS = {  # a test compares the numbers with demo/published
    Objective.MULTI_GPU: (
        FLAT,
        "all-reduce with pin is 2.1x pin-numa on H200, 2.7x on RTX PRO 6000, 1.04x on MI350X "
        "(study)",
    ),
    Objective.THROUGHPUT: (
        FLAT,
        "a whole core for each vCPU: vCPUs that share a core are 40 to 75 % slower (XAPI)",
    ),
    Objective.MEMORY_BANDWIDTH: (
        "pin-numa",
        "STREAM with pin-numa is 1.9x to 7.3x default on 4 machines (study)",
    ),
    Objective.LATENCY: (
        "pin-numa",
        "latency with pin-numa is 7 to 10 % lower than with pin on 2 machines (study)",
    ),
    Objective.GPU_COPY: (
        TREE,
        "copies to GPUs of another node rise from 12.6 to 15.6 GB/s once the guest sees their "
        "nodes (IBM)",
    ),
    Objective.DENSITY: (
        "pin-numa-smt",
        "half the cores for as many vCPUs; both threads of a core do 1.02x to 1.03x the work of "
        "one on 2 machines (study)",
    ),
}


class LayoutInputs(Struct, frozen=True, kw_only=True):
    """The facts that decide besides the objective. None = unknown."""

    nodes: int | None  # number of host nodes with CPUs
    has_siblings: bool
    has_grace: bool  # Grace GPUs whose memory has NUMA nodes
    has_gpus: bool | None = None  # as the use suggests
    has_pairs: bool = False  # a GPU and an RDMA NIC of one switch
    expander_buses: bool = True  # the VM's machine type and its target take them
    private_memory: bool = False  # encrypted: its pages follow no cell's binding
    is_pv: bool = False  # Xen supports no guest NUMA nodes in it


class LayoutChoice(Struct, frozen=True, kw_only=True):
    """A layout and the reason for it."""

    layout: str
    reason: str
    keep_vcpus: bool = False  # siblings take half the cores rather than double the vCPUs
    floating: bool = False  # vCPUs float over the nodes of their memory, as pins were slower
    caveats: tuple[str, ...] = ()


class ResolvedLayout(Struct, frozen=True):
    """Options with the layout chosen."""

    options: PlanOptions
    reasons: tuple[str, ...] = ()  # lines for people; () if the user named the layout


Choose = Callable[[Host, Objective, LayoutInputs], LayoutChoice]


def choose_layout(objective: Objective, inputs: LayoutInputs) -> LayoutChoice:
    layout, reason = LAYOUTS[objective]
    if objective is Objective.DENSITY:
        if not inputs.has_siblings:
            layout, reason = FLAT, "the host's cores have one thread each"
    elif inputs.nodes == 1:
        layout, reason = FLAT, "the host has one NUMA node"
    if PRESETS[layout].pcie is GuestPcie.HOST and not inputs.expander_buses:
        layout, reason = FLAT, "the VM's machine type or target does not support expander buses"
    layout, reason = find_needed_layout(layout, objective, inputs) or (layout, reason)
    keeps = objective is Objective.DENSITY and PRESETS[layout].siblings is Siblings.EXPOSED
    return LayoutChoice(layout=layout, reason=reason, keep_vcpus=keeps)


def find_needed_layout(
    layout: str, objective: Objective, inputs: LayoutInputs
) -> tuple[str, str] | None:
    """Return the layout that the VM's memory or devices require, with the reason; else None."""
    preset = PRESETS[layout]
    if inputs.is_pv or inputs.private_memory:
        if preset.cells is GuestCells.SINGLE:
            return None
        reason = "Xen has no guest NUMA nodes for PV guests"
        if inputs.private_memory:
            reason = "an encrypted guest's private memory does not follow a guest node's binding"
        return FLAT, reason
    if not inputs.expander_buses or preset.pcie is GuestPcie.HOST:
        return None
    has_gpus = inputs.has_gpus
    if has_gpus is None:
        has_gpus = objective in (Objective.MULTI_GPU, Objective.GPU_COPY)
    if inputs.has_grace and has_gpus:
        return TREE, "the memory of Grace GPUs needs NUMA nodes in the guest"
    if inputs.has_pairs:
        return TREE, (
            "GPUs and RDMA NICs of one switch stay pairs, of which NCCL uses GPUDirect RDMA; pass "
            "the guest the file of homenode nccl-topo as well"
        )
    return None


def build_host_inputs(host: Host) -> LayoutInputs:
    """Return the host's facts for the choice."""
    return LayoutInputs(
        nodes=sum(bool(node.pus) for node in host.nodes),
        has_siblings=any(len(core.pus) > 1 for core in host.cores),
        has_grace=any(map(is_grace, host.whole_gpus))
        and any(node.generic_initiator for node in host.nodes),
    )


UNMEASURED = "; a rule, not measured on this machine"
"""End of a reason that no result of this machine supports."""


def resolve_layout(
    guest: Vm,
    options: PlanOptions,
    host: Host,
    choose: Choose | None = None,
    *,
    expander_buses: bool = True,
) -> ResolvedLayout:
    """Replace `auto` in the options, for the objective given or suggested by the devices. choose:
    used instead of the table. expander_buses: whether the target has them."""
    if options.layout != AUTO:
        return ResolvedLayout(options)
    objective = options.objective or suggest_objective(guest, options, host)
    has_pairs = _has_pairs(guest, options, host)
    inputs = structs.replace(
        build_host_inputs(host),
        has_gpus=_count_gpus(guest, options, host) > 0,
        has_pairs=has_pairs,
        expander_buses=expander_buses and (guest.is_q35 or guest.is_virt),
        private_memory=guest.has_private_memory,
        is_pv=guest.is_pv,
    )
    choice = choose_layout(objective, inputs) if choose is None else choose(host, objective, inputs)
    chosen_options = _apply_choice(options, choice, objective, has_pairs=has_pairs)
    if chosen_options.cells is GuestCells.HOST and options.cells is None and options.pcie is None:
        for_flat = structs.replace(choice, layout=FLAT, keep_vcpus=False)
        flat = _apply_choice(options, for_flat, objective)
        reason = _find_reason_for_flat(guest, chosen_options, flat, host)
        if reason is not None:
            chosen_options, choice = flat, structs.replace(for_flat, reason=reason)
    layout = f"{choice.layout} with bound memory" if choice.floating else choice.layout
    rule = UNMEASURED if choose is None else ""
    others = "" if inputs.has_gpus or options.objective else "no GPU; the rule for one GPU: "
    others = others if objective is Objective.GPU_COPY else ""
    line = f"{layout} (auto, {objective}): {others}{choice.reason}{rule}"
    return ResolvedLayout(chosen_options, (line, *choice.caveats))


def suggest_objective(guest: Vm, options: PlanOptions, host: Host) -> Objective:
    """The purpose of a VM by its devices: several GPUs talk to each other, one to the host."""
    count = _count_gpus(guest, options, host)
    if count > 1:
        return Objective.MULTI_GPU
    has_devices = count or guest.hostdevs or options.devices
    return Objective.GPU_COPY if has_devices else Objective.MEMORY_BANDWIDTH


def reject_auto(options: PlanOptions) -> None:
    """Reject layout `auto` without a host. Raises UsageError."""
    if options.layout == AUTO:
        raise UsageError(
            "--node-cpus requires --layout: without a host nothing can be decided",
            hint="the study's configurations are --layout A, B and C",
        )


def _list_named_devices(guest: Vm, options: PlanOptions, host: Host) -> set[Bdf]:
    devices = (resolve_device(host, name) for name in options.devices)
    named_devices = {device for device in devices if isinstance(device, Bdf)}
    return named_devices | {hostdev.bdf for hostdev in guest.hostdevs}


def _count_gpus(guest: Vm, options: PlanOptions, host: Host) -> int:
    if options.gpu_count is not None:
        return options.gpu_count
    gpus = {gpu.bdf for gpu in host.devices_of_kind(DeviceKind.GPU)}
    return len(_list_named_devices(guest, options, host) & gpus)


def _has_pairs(guest: Vm, options: PlanOptions, host: Host) -> bool:
    """Whether the VM gets, or may get, a GPU and an RDMA NIC that share a switch of the host."""
    devices = _list_named_devices(guest, options, host)

    def switches(kind: DeviceKind, brought: object) -> set[Bdf | None]:
        return {
            host.switch_above(device.bdf)
            for device in host.devices_of_kind(kind)
            if (brought or device.bdf in devices) and (kind is DeviceKind.GPU or has_verbs(device))
        }

    of_gpus = switches(DeviceKind.GPU, options.gpu_count)
    return not (of_gpus & switches(DeviceKind.NIC, options.with_nics)) <= {None}


def _find_reason_for_flat(
    guest: Vm, choice: PlanOptions, flat: PlanOptions, host: Host
) -> str | None:
    """Return the reason to stay flat: cells do not fit, or only without the host's reserve."""

    def try_plan(options: PlanOptions, *, brief: bool = True) -> Plan | HomenodeError:
        try:
            return plan(host, request_for(guest, options, host), brief=brief)
        except HomenodeError as error:
            return error

    shaped_plan = try_plan(choice)
    if isinstance(shaped_plan, Plan) and not _takes_host_memory(shaped_plan):
        return None
    plain = try_plan(flat)
    if isinstance(plain, HomenodeError):
        return None
    if isinstance(shaped_plan, Plan):
        reason = "the VM fits in guest NUMA nodes only with the memory that the host reserves"
        return None if _takes_host_memory(plain) else reason
    error = try_plan(choice, brief=False)
    nearest = error.nearest if isinstance(error, Unplannable) else None
    return f"the VM does not fit in guest NUMA nodes ({nearest.detail if nearest else error})"


def _takes_host_memory(plan: Plan) -> bool:
    return Relaxation.HOST_MEMORY in plan.relaxations


def _apply_choice(
    options: PlanOptions, choice: LayoutChoice, objective: Objective, *, has_pairs: bool = False
) -> PlanOptions:
    """Return the options with the layout. A switch that the user gives is kept, and the others
    follow: mirrored PCIe requires cells, and gets switches if a GPU and its NIC share one; a flat
    guest gets no expander bus; memory is bound, per cell if there are cells."""
    preset = PRESETS[choice.layout]
    mirrors = GuestCells.HOST if options.pcie is GuestPcie.HOST else preset.cells
    cells = options.cells or mirrors
    is_flat = cells is GuestCells.SINGLE
    pcie = options.pcie or (GuestPcie.KEEP if is_flat else preset.pcie)
    memory = MemoryBinding.BOUND if is_flat else MemoryBinding.BOUND_PER_CELL
    by_switch = options.pinning or options.siblings
    granularity = options.pci_granularity
    if granularity is None and has_pairs and pcie is GuestPcie.HOST:
        granularity = PciGranularity.SWITCH
    as_asked = bool(by_switch) or options.document_siblings is not DefinitionSiblings.IGNORED
    return structs.replace(
        options,
        layout=choice.layout,
        cells=cells,
        pcie=pcie,
        pci_granularity=granularity,
        pinning=options.pinning or (Pinning.NODE if choice.floating else None),
        memory_binding=options.memory_binding or memory,
        objective=objective if (cells, pcie) == (preset.cells, preset.pcie) else None,
        document_siblings=options.document_siblings if as_asked else DefinitionSiblings.WHEN_SHORT,
        keep_vcpus=options.keep_vcpus or choice.keep_vcpus,
    )
