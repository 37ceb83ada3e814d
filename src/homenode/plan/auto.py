"""Auto: the layout that `--layout auto` chooses, by a table of uses, machines and VMs."""

from collections.abc import Callable

from msgspec import Struct, structs

from homenode.bdf import Bdf
from homenode.errors import HomenodeError, UsageError
from homenode.machine.pci import DeviceKind, has_verbs
from homenode.machine.topology import Host
from homenode.objective import Objective
from homenode.plan.planner import plan
from homenode.plan.request import request_for
from homenode.plan.shape.guest_numa import is_grace
from homenode.vm.gpu_parts import resolve_device
from homenode.vm.layout import PRESETS, GuestCells, GuestPcie, MemoryBinding, Pinning, Siblings
from homenode.vm.model import Vm
from homenode.vm.plan import Plan, Relaxation, Unplannable
from homenode.vm.plan_options import AUTO, DefinitionSiblings, PciGranularity, PlanOptions

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
