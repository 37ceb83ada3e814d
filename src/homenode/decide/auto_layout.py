"""AutoLayout: what `--layout auto` means for a VM on a host: the evidence's answer."""

from msgspec import Struct, structs

from homenode.bdf import Bdf
from homenode.decide.decide import decide, without_cells
from homenode.decide.evidence.model import Evidence
from homenode.decide.machine_facts import facts_of_host, of_host
from homenode.decide.statement import sentence_of
from homenode.decide.verdict import ReasonId, Verdict
from homenode.errors import HomenodeError, UsageError
from homenode.machine.pci import DeviceKind, has_verbs
from homenode.machine.topology import Host
from homenode.objective import Objective
from homenode.plan.request import request_for
from homenode.plan.search.place import place
from homenode.vm.layout import PRESETS, GuestCells, GuestPcie, MemoryBinding, Pinning
from homenode.vm.model import Vm
from homenode.vm.plan_options import AUTO, DocumentSiblings, PciGranularity, PlanOptions


class Settled(Struct, frozen=True):
    """Options with a layout. verdict: why that one; None where the user named it."""

    options: PlanOptions
    verdict: Verdict | None


class NotRecommended(HomenodeError):
    """There is no answer: the machine is to be repaired first."""

    exit_code = 1


def suggested_objective(guest: Vm, options: PlanOptions, host: Host) -> Objective:
    """What a VM is for, by its devices: several GPUs talk to each other, one talks to the host."""
    count = _gpus(guest, options, host)
    if count > 1:
        return Objective.COLLECTIVE
    wanted = count or guest.hostdevs or options.devices
    return Objective.DEVICE_TRANSFER if wanted else Objective.HOST_BANDWIDTH


def _gpus(guest: Vm, options: PlanOptions, host: Host) -> int:
    """GPUs that the VM gets."""
    if options.gpu_count is not None:
        return options.gpu_count
    named = {one for one in options.devices if isinstance(one, Bdf)}
    wanted = {hostdev.bdf for hostdev in guest.hostdevs} | named
    return len(wanted & {gpu.bdf for gpu in host.devices_of_kind(DeviceKind.GPU)})


def _has_pairs(guest: Vm, options: PlanOptions, host: Host) -> bool:
    """Whether the VM gets, or may get, a GPU and an RDMA NIC that share a switch of the host."""
    named = {one for one in options.devices if isinstance(one, Bdf)}
    named |= {hostdev.bdf for hostdev in guest.hostdevs}

    def switches(kind: DeviceKind, brought: object) -> set[Bdf | None]:
        devices = (one for one in host.devices_of_kind(kind) if brought or one.bdf in named)
        return {
            host.switch_above(one.physical_function or one.bdf)
            for one in devices
            if kind is DeviceKind.GPU or has_verbs(one)
        }

    of_gpus = switches(DeviceKind.GPU, options.gpu_count)
    return not (of_gpus & switches(DeviceKind.NIC, options.with_nics)) <= {None}


def settled(guest: Vm, options: PlanOptions, host: Host, evidence: Evidence) -> Settled:
    """The options with `auto` replaced by the answer of the evidence, for the objective that was
    named or that the VM's devices suggest.

    Raises NotRecommended where nothing is recommended, with what to repair.
    """
    if options.layout != AUTO:
        return Settled(options, None)
    objective = options.objective or suggested_objective(guest, options, host)
    machine = facts_of_host(host, evidence.publications)
    buses = guest.is_q35 or guest.is_virt
    known = structs.replace(evidence, runs=of_host(evidence.runs, host))
    has_gpus = _gpus(guest, options, host) > 0
    has_pairs = _has_pairs(guest, options, host)
    verdict = decide(
        known,
        machine,
        objective,
        expander_buses=buses,
        has_gpus=has_gpus,
        has_pairs=has_pairs,
        private_memory=guest.has_private_memory,
    )
    if verdict.layout is None:
        raise NotRecommended(
            f"--layout auto: no layout is recommended on {host.name}: {sentence_of(verdict)}",
            hint=f"name one yourself: --layout {'|'.join(PRESETS)}",
        )
    chosen = _with_verdict(options, verdict, verdict.layout)
    given = options.cells or options.pcie
    if given is None and not _has_cells(guest, chosen, host):
        verdict = without_cells(verdict, ReasonId.FEW_VCPUS)
        chosen = _with_verdict(options, verdict, verdict.layout or "pin-bound")
    if has_pairs and chosen.pcie is GuestPcie.MIRRORED and chosen.pci_granularity is None:
        chosen = structs.replace(chosen, pci_granularity=PciGranularity.SWITCH)
    return Settled(chosen, verdict)


def _has_cells(guest: Vm, options: PlanOptions, host: Host) -> bool:
    """Whether the VM has a vCPU for each cell that its memory needs: one of fewer vCPUs than the
    host has nodes may not. It is flat then, with memory of nodes on which it has no vCPU."""
    vcpus = options.vcpus or guest.vcpus
    if options.cells is not GuestCells.MIRRORED or vcpus >= sum(bool(n.pus) for n in host.nodes):
        return True
    flat = structs.replace(
        options,
        layout="pin-bound",
        cells=GuestCells.FLAT,
        pcie=GuestPcie.AS_IT_WAS,
        memory_binding=MemoryBinding.BOUND,
    )
    return _holds(guest, options, host) or not _holds(guest, flat, host)


def _holds(guest: Vm, options: PlanOptions, host: Host) -> bool:
    try:
        place(host, request_for(guest, options, host), brief=True)
    except HomenodeError:
        return False
    return True


def _with_verdict(options: PlanOptions, verdict: Verdict, layout: str) -> PlanOptions:
    """The options with the verdict's layout.

    A switch that the user gives stays as given. The others follow: there are cells where PCIe is
    mirrored, no expander bus where the guest is flat, and memory is bound, per cell where there are
    cells.
    """
    preset = PRESETS[layout]
    mirrors = GuestCells.MIRRORED if options.pcie is GuestPcie.MIRRORED else preset.cells
    cells = options.cells or mirrors
    is_flat = cells is GuestCells.FLAT
    pcie = options.pcie or (GuestPcie.AS_IT_WAS if is_flat else preset.pcie)
    memory = MemoryBinding.BOUND if is_flat else MemoryBinding.BOUND_PER_CELL
    by_switch = options.pinning or options.siblings
    as_asked = bool(by_switch) or options.document_siblings is not DocumentSiblings.IGNORED
    return structs.replace(
        options,
        layout=layout,
        cells=cells,
        pcie=pcie,
        pinning=options.pinning or (Pinning.NODE if verdict.floating else None),
        memory_binding=options.memory_binding or memory,
        objective=verdict.objective if (cells, pcie) == (preset.cells, preset.pcie) else None,
        document_siblings=options.document_siblings if as_asked else DocumentSiblings.WHEN_SHORT,
        keep_vcpus=options.keep_vcpus or verdict.keep_vcpus,
    )


def refuse_auto(options: PlanOptions) -> None:
    """Without a host there is no answer. Raises UsageError."""
    if options.layout == AUTO:
        raise UsageError(
            "--node-pus: expected --layout, found none: without a host nothing can be decided",
            hint="the study's configurations are --layout A, B and C",
        )
