"""Planned: a VM's plan on a host, and the target's files that follow from it, as one pure step."""

from dataclasses import dataclass, replace

from msgspec import structs

from homenode.domain.codec import refuse_older
from homenode.domain.limits import check_vcpus, refuse_unsafe
from homenode.errors import InputError
from homenode.plan.model import Plan, PlanFinding, plan_finding
from homenode.plan.options import PlanOptions
from homenode.plan.planner import plan
from homenode.plan.request import GuestRequest, request_for
from homenode.targets.registry import target_named
from homenode.targets.target import (
    Feature,
    Level,
    Rendering,
    Target,
    features_of,
    is_vgpu,
    target_findings,
)
from homenode.targets.vm_file import VmFile, on_host
from homenode.topology import Host
from homenode.vm.model import Vm


@dataclass(frozen=True, slots=True)
class TargetPlan:
    """A plan of a request, and its files. given: the file that was edited; None = a new one.
    findings: of the rendering, with what the target cannot express."""

    request: GuestRequest
    plan: Plan
    target: str
    given: bytes | None
    rendering: Rendering
    findings: tuple[PlanFinding, ...]


def plan_for_target(vm: VmFile, options: PlanOptions, host: Host, target: str) -> TargetPlan:
    """Plan a VM and write it for a target. The VM's file is edited where it is of that target.

    Raises as homenode.tuning.tune, and InputError where the target cannot take the plan.
    """
    module = target_named(target)
    vm = on_host(vm, host)
    if vm.kind != target:
        vm = replace(vm, guest=_moved(vm.guest, module, vm.source))
    request = request_for(vm.guest, options, host)
    says_nothing = vm.kind != target or vm.guest.cpu_topology is None
    if module.one_socket and request.options.objective is None and says_nothing:
        guest = structs.replace(vm.guest, cpu_topology=(1, 1, vm.guest.vcpus, 1))
        vm, request = replace(vm, guest=guest), replace(request, guest=guest)
    made = plan(host, request)
    _refuse_lost_vgpus(made, module)
    limits: tuple[PlanFinding, ...] = ()
    if module.runs_qemu:
        qemu = host.settings.qemu_version
        refuse_older(made, None, qemu, is_virt=vm.guest.is_virt)
        limits = check_vcpus(vm.guest, made.vcpus, qemu, vm.source)
    refuse_unsafe(vm.guest, made, vm.source)
    given = vm.content if vm.kind == target else None
    rendering = module.render(made, vm.guest, host, given, vm.source)
    findings = (*target_findings(module, made), *rendering.findings, *limits)
    if vm.kind != target and vm.guest.launch_security is not None:
        findings = (*findings, _not_encrypted(vm.guest, target))
    return TargetPlan(request, made, target, given, rendering, findings)


def _not_encrypted(guest: Vm, target: str) -> PlanFinding:
    """A file of another hypervisor says nothing of keys and measurements."""
    return plan_finding(
        "target-not-carried",
        f"launch security {guest.launch_security}",
        f"it is not in the file for {target}: the guest would not be encrypted",
        severity="warning",
        case="launch security",
    )


def _refuse_lost_vgpus(plan: Plan, target: Target) -> None:
    """A file that cannot say a vGPU would pass its GPU, which ends the vGPUs of other VMs."""
    support = target.support[Feature.VGPUS]
    if support.level is Level.LOST and Feature.VGPUS in features_of(plan):
        names = ", ".join(d.uuid or str(d.bdf) for d in plan.devices if is_vgpu(d))
        raise InputError(
            f"target {target.title}: expected whole devices, found the vGPU {names}: {support.how}",
            hint="plan it for libvirt, qemu or proxmox",
        )


def _moved(guest: Vm, target: Target, source: str) -> Vm:
    """A VM of another hypervisor: its vCPUs, memory and devices, without its PCI addresses.

    Raises InputError for memory devices, which have no like there.
    """
    if guest.has_dimms:
        raise InputError(
            f"{source}: expected a VM without memory devices for target {target.title}, found some",
            hint="count their memory in with --memory, in a copy of the document without them",
        )
    # A file of ours names the host's CPU, or all that TCG has, where the VM's names none.
    mode = guest.cpu_mode or ("host-passthrough" if guest.domain_type == "kvm" else "maximum")
    guest = structs.replace(guest, cpu_mode=mode)
    if target.keeps_addresses:
        return guest
    return structs.replace(
        guest,
        machine="virt" if guest.architecture == "aarch64" else "q35",
        controllers=(),
        addresses=target.own_slots,
        hostdevs=tuple(structs.replace(hostdev, address=None) for hostdev in guest.hostdevs),
        mediated=tuple(structs.replace(device, address=None) for device in guest.mediated),
        has_qemu_commandline=False,
    )
