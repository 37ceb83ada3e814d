"""VmFile: a VM as some hypervisor's file says it, or as options alone do; and as one pure step its
plan on a host with the target's files that follow from it.
"""

from dataclasses import dataclass, replace

from msgspec import structs

from homenode.errors import InputError, UsageError
from homenode.findings import Finding, Severity, finding
from homenode.machine.tools.versions import Version
from homenode.machine.topology import Host
from homenode.plan.planner import plan
from homenode.plan.request import request_for
from homenode.vm.domain.codec import refuse_older
from homenode.vm.domain.copy import DEFAULT_NAME
from homenode.vm.domain.limits import check_vcpus, refuse_unsafe
from homenode.vm.domain.read import read_vm as read_domain
from homenode.vm.model import GuestTopology, Vm
from homenode.vm.plan_model import LIBVIRT, Plan
from homenode.vm.plan_options import PlanOptions, size_of_cells
from homenode.vm.targets.registry import recognised, target_named
from homenode.vm.targets.target import (
    Feature,
    Level,
    Rendering,
    Target,
    default_machine,
    features_of,
    is_vgpu,
    refuse_older_target,
    settings_of,
    target_findings,
)


@dataclass(frozen=True, slots=True)
class VmFile:
    """kind: "libvirt" or the name of a target; None = options alone. content: None then."""

    kind: str | None
    guest: Vm
    content: bytes | None
    source: str


def target_of(content: bytes) -> str | None:
    """The target that a file is of, by its content; None for a domain document, and for others."""
    if _is_xml(content):
        return None
    return recognised(content)


def _is_xml(content: bytes) -> bool:
    start = content[:4096].lstrip(b"\xef\xbb\xbf \t\r\n")
    return start[:1] == b"<" or content[:2] in (b"\xff\xfe", b"\xfe\xff", b"<\0", b"\0<")


def kind_of(content: bytes, source: str, named: str | None = None) -> str:
    """Whose file this is, by its content. named: the target that was asked for, of which a file may
    be that its content alone does not tell. Raises InputError for none that is known."""
    target = target_of(content)
    if target is not None:
        return target
    if _is_xml(content):
        return LIBVIRT
    if named not in (None, LIBVIRT) and target_named(named).may_be(content):
        return named
    raise InputError(
        f"{source}: expected a VM: libvirt's XML, a configuration of qm or xl, or a script of "
        "homenode; found none of these"
    )


def read_vm(content: bytes, source: str, named: str | None = None) -> VmFile:
    """The VM of a file. named: as `kind_of`. Raises ParseError or InputError."""
    kind = kind_of(content, source, named)
    if kind == LIBVIRT:
        return VmFile(kind, read_domain(content, source), content, source)
    return VmFile(kind, target_named(kind).read_vm(content, source), content, source)


def size_of_options(options: PlanOptions) -> tuple[int, int]:
    """vCPUs and bytes of memory of a VM of which only options say something; those of --guest-node
    are summed. Raises UsageError where they say neither."""
    vcpus, memory_bytes = options.vcpus, options.memory_bytes
    if options.explicit_cells:
        vcpus, memory_bytes = size_of_cells(options.explicit_cells)
    if vcpus is None or memory_bytes is None:
        given = [
            name
            for name, one in (("--vcpus", vcpus), ("--memory", memory_bytes))
            if one is not None
        ]
        raise UsageError(
            f"expected a VM's file, or --vcpus and --memory, found {given[0] if given else 'none'}"
            f"{' alone' if given else ''}",
            hint="homenode plan --vcpus 16 --memory 64GiB --gpus 2 -o vm.xml",
        )
    if vcpus < 1 or memory_bytes < 1:
        raise UsageError("--vcpus, --memory: expected more than 0")
    return vcpus, memory_bytes


def vm_of_options(
    options: PlanOptions, architecture: str | None, name: str = DEFAULT_NAME
) -> VmFile:
    """A VM of which only options say something. Raises UsageError without vCPUs and memory."""
    vcpus, memory_bytes = size_of_options(options)
    architecture = architecture or "x86_64"
    vm = Vm(
        name=name,
        source="options",
        architecture=architecture,
        machine=default_machine(architecture),
        cpu_mode="host-passthrough",
        vcpus=vcpus,
        memory_bytes=memory_bytes,
        vcpu_pins=(None,) * vcpus,
    )
    return VmFile(None, vm, None, "options")


def on_host(vm: VmFile, host: Host) -> VmFile:
    """The VM with what its file leaves to a host: architecture, functions of whole cards."""
    if vm.kind in (None, LIBVIRT) or vm.content is None:
        return vm
    target = target_named(vm.kind)
    guest = vm.guest
    arm = host.architecture == "aarch64"
    if arm and target.architecture_of_host and b"x86_64" not in vm.content:
        guest = structs.replace(guest, architecture="aarch64", machine="virt")
    return replace(vm, guest=target.on_host(guest, vm.content, vm.source, host))


@dataclass(frozen=True, slots=True)
class TargetPlan:
    """A plan and its files. given: the file that was edited; None = a new one.
    findings: of the rendering, with what the target cannot express."""

    plan: Plan
    target: str
    given: bytes | None
    rendering: Rendering
    findings: tuple[Finding, ...]


def plan_for_target(
    vm: VmFile, options: PlanOptions, host: Host, target: str, version: Version | None = None
) -> TargetPlan:
    """Plan a VM and write it for a target. The VM's file is edited where it is of that target.

    version: of the target, None = not said. Raises as homenode.plan.tuning.tune, InputError where
    the target cannot take the plan, and as refuse_older_target.
    """
    module = target_named(target)
    vm = on_host(vm, host)
    if vm.kind != target:
        vm = replace(vm, guest=_moved(vm.guest, module, vm.source))
    request = request_for(vm.guest, options, host)
    says_nothing = vm.kind != target or vm.guest.cpu_topology is None
    if module.one_socket and request.options.objective is None and says_nothing:
        guest = structs.replace(vm.guest, cpu_topology=GuestTopology(1, 1, vm.guest.vcpus, 1))
        vm, request = replace(vm, guest=guest), structs.replace(request, guest=guest)
    made = plan(host, request)
    _refuse_lost_vgpus(made, module)
    if version is not None:
        refuse_older_target(module, made, version)
    limits: tuple[Finding, ...] = ()
    if module.runs_qemu:
        qemu = host.settings.qemu_version
        refuse_older(made, None, qemu, is_virt=vm.guest.is_virt)
        limits = check_vcpus(vm.guest, made.vm.vcpus, qemu, vm.source)
    refuse_unsafe(vm.guest, made, vm.source)
    given = vm.content if vm.kind == target else None
    rendering = module.render(made, vm.guest, host, given, vm.source)
    findings = (*target_findings(module, made), *rendering.findings, *limits)
    if vm.kind != target and vm.guest.launch_security is not None:
        findings = (*findings, _not_encrypted(vm.guest, target))
    made = structs.replace(made, kept=settings_of(module, rendering.document), kept_of=target)
    return TargetPlan(made, target, given, rendering, findings)


def _not_encrypted(guest: Vm, target: str) -> Finding:
    """A file of another hypervisor says nothing of keys and measurements."""
    return finding(
        "target-not-carried",
        f"launch security {guest.launch_security}",
        observed=f"it is not in the file for {target}: the guest would not be encrypted",
        severity=Severity.WARNING,
        case="launch security",
    )


def _refuse_lost_vgpus(plan: Plan, target: Target) -> None:
    """A file that cannot say a vGPU would pass its GPU, which ends the vGPUs of other VMs."""
    support = target.support[Feature.VGPUS]
    if support.level is Level.LOST and Feature.VGPUS in features_of(plan):
        names = ", ".join(d.uuid or str(d.bdf) for d in plan.vm.hostdevs if is_vgpu(d))
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
