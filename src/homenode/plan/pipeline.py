"""Pipeline: read a VM's file, plan it on a host, and write the resulting file.

The main job as one pure step, for the command line and other callers that place VMs.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product

from msgspec import Struct, structs

from homenode.errors import InputError, UsageError, missing, requires
from homenode.findings import Finding, Severity, finding, same_command
from homenode.machine.tools.versions import Version
from homenode.machine.topology import Host
from homenode.plan.planner import build_manual_placement, plan
from homenode.plan.request import request_for, set_vcpus
from homenode.plan.shape.aperture import QEMU_VERSION, WINDOW, WINDOW_FINDINGS
from homenode.plan.shape.assemble import assemble, list_consequences
from homenode.plan.shape.guest_numa import LIBVIRT_WITH_INITIATORS
from homenode.plan.stored import domain_of_plan
from homenode.vm.domain.codec import reject_older
from homenode.vm.domain.copy import DEFAULT_NAME, check_shared, copy_domain
from homenode.vm.domain.crosscheck import check_vcpus, reject_unsafe
from homenode.vm.domain.read import build_vm, keep_parts, open_domain
from homenode.vm.model import GuestTopology, Vm
from homenode.vm.plan import LIBVIRT, Plan, Unplannable
from homenode.vm.plan_options import EmulatorPolicy, ManualRanges, PlanOptions, sum_cells
from homenode.vm.targets import libvirt
from homenode.vm.targets.registry import (
    VmFile,
    add_host_facts,
    find_target,
    list_other_parts,
    runs_qemu,
)
from homenode.vm.targets.target import (
    Feature,
    Rendering,
    SupportLevel,
    Target,
    check_target,
    findings_for,
    get_default_machine,
    is_vgpu,
    list_features,
    list_settings,
    lost_features,
    visible_vm,
    way_to_add,
)


class PlannedFile(Struct, frozen=True, kw_only=True):
    plan: Plan
    target: str  # LIBVIRT or the name of another target
    original: bytes  # the edited file, as given or copied; b"" = a new file
    rendering: Rendering
    findings: tuple[Finding, ...]  # on the file, settings that the target cannot express included
    faults: tuple[str, ...] = ()  # faults of the input file, a line each
    host: Host | None = None  # the host of the plan; None = CPU lists of the user

    @property
    def document(self) -> bytes:
        return self.rendering.document

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the faults of the input file, then warnings and errors, as lines."""
        return (*self.faults, *_format_findings(same_command(self.findings)))

    @property
    def plan_to_show(self) -> Plan:
        """Return the plan with the file's findings of severity info, which `notes` lacks."""
        infos = (f for f in self.findings if f.severity is Severity.INFO)
        findings = same_command((*self.plan.findings, *infos))
        shown_plan = structs.replace(self.plan, findings=findings)
        if runs_qemu(self.target):
            return shown_plan
        missing_features = lost_features(find_target(self.target), shown_plan)
        shown_plan = structs.replace(shown_plan, vm=visible_vm(shown_plan.vm, missing_features))
        return _remove_qemu_parts(shown_plan)

    @property
    def libvirt(self) -> Version | None:
        """The host's libvirt; None = unknown."""
        return None if self.host is None else self.host.settings.libvirt_version


def _remove_qemu_parts(plan: Plan) -> Plan:
    """The plan without QEMU's threads, PCI window and locked memory, and huge pages to reserve."""
    return structs.replace(
        plan,
        vm=structs.replace(plan.vm, emulator_pus=None, iothread_pins=()),
        page_reservations=(),
        aperture=None,
        findings=tuple(f for f in plan.findings if f.id not in WINDOW_FINDINGS),
        gaps=tuple(gap for gap in plan.gaps if gap.subject not in (QEMU_VERSION, WINDOW)),
    )


def plan_file(
    original: bytes, source: str, options: PlanOptions, host: Host, *, copy_name: str | None = None
) -> PlannedFile:
    """Plan a document's VM on a host and rewrite the document.

    source: the document's name in messages. copy_name: rewrite a copy with its own name, UUID,
    NVRAM and MACs. Raises InputError for a bad document, UsageError for contradicting options,
    Unplannable with every rejection, and as libvirt.render.
    """
    document, shared_findings = _read_source_document(original, source, copy_name)
    guest = build_vm(open_domain(document, source))
    vm_plan = plan(host, request_for(guest, options, host))
    return _build_file(vm_plan, guest, host, document, source, shared_findings)


def plan_manually(
    original: bytes,
    source: str,
    options: PlanOptions,
    ranges: ManualRanges,
    *,
    copy_name: str | None = None,
) -> PlannedFile:
    """Plan with CPU lists of the user and without a host, as in the study's listings. The vCPU
    count is that of the lists. Raises like plan_file."""
    document, shared_findings = _read_source_document(original, source, copy_name)
    guest = build_vm(open_domain(document, source))
    request = request_for(guest, options, None)
    placement = build_manual_placement(request, ranges)
    vm_plan = assemble(None, set_vcpus(request, len(placement.vcpu_pins)), placement)
    return _build_file(vm_plan, guest, None, document, source, shared_findings)


def _read_source_document(
    original: bytes, source: str, copy_name: str | None
) -> tuple[bytes, tuple[Finding, ...]]:
    if copy_name is None:
        return original, ()
    shared_findings = tuple(check_shared(original, source))
    return copy_domain(original, copy_name, source), shared_findings


def _build_file(
    vm_plan: Plan,
    guest: Vm,
    host: Host | None,
    document: bytes,
    source: str,
    shared_findings: tuple[Finding, ...],
) -> PlannedFile:
    rendering = libvirt.render(vm_plan, guest, host, document, source)
    findings = (*shared_findings, *rendering.findings)
    return PlannedFile(
        plan=keep_parts(vm_plan, open_domain(rendering.document, source)),
        target=LIBVIRT,
        original=document,
        rendering=rendering,
        findings=findings,
        faults=tuple(libvirt.find_contradictions(document, source)),
        host=host,
    )


def _format_findings(findings: Sequence[Finding]) -> tuple[str, ...]:
    return tuple(_format_finding(f) for f in findings if f.severity is not Severity.INFO)


def _format_finding(finding: Finding) -> str:
    fix = "" if finding.fix is None else f"; {finding.fix}"
    return f"{finding.severity}: {finding.subject}: {finding.comparison}{fix} ({finding.id})"


class FileRequest(Struct, frozen=True, kw_only=True):
    """A VM that is planned together with other VMs."""

    name: str  # its document's name in messages
    original: bytes
    options: PlanOptions


def plan_several(requests: Sequence[FileRequest], host: Host) -> tuple[PlannedFile, ...]:
    """Plan VMs for one host without shared resources, in the order of `requests`.

    VMs are planned one after the other in several orders until all fit: as given, by memory, by
    vCPUs (largest first), each with emulators on their own cores, then on vCPU cores. Raises like
    plan_file; Unplannable of the order in which the most VMs fit.
    """

    if len(requests) == 1:
        (only,) = requests
        return (plan_file(only.original, only.name, only.options, host),)

    def size(request: FileRequest) -> tuple[int, int]:
        guest = build_vm(open_domain(request.original, request.name))
        return -(guest.memory_bytes or 0), -(guest.vcpus or 0)

    sizes = {request.name: size(request) for request in requests}
    orders = (
        list(requests),
        sorted(requests, key=lambda one: sizes[one.name]),
        sorted(requests, key=lambda one: sizes[one.name][1]),
    )
    best: tuple[int, Unplannable] | None = None
    for is_shared, order in product((False, True), orders):
        planned_files: dict[str, PlannedFile] = {}
        machine = host
        for request in order:
            options = request.options
            if is_shared and options.emulator_policy is EmulatorPolicy.AUTO:
                options = structs.replace(options, emulator_policy=EmulatorPolicy.SHARE)
            try:
                planned_files[request.name] = plan_file(
                    request.original, request.name, options, machine
                )
            except Unplannable as error:
                if best is None or best[0] < len(planned_files):
                    best = len(planned_files), error
                break
            domain = domain_of_plan(planned_files[request.name].plan)
            machine = structs.replace(machine, domains=(*machine.domains, domain))
        else:
            return tuple(planned_files[request.name] for request in requests)
    assert best is not None, "an order that fits was returned"
    raise best[1]


def compute_options_size(options: PlanOptions) -> tuple[int, int]:
    """Return the vCPUs and bytes of memory of a VM given by options only, summed over --guest-node.
    Raises UsageError without either."""
    vcpus, memory_bytes = options.vcpus, options.memory_bytes
    if options.explicit_cells:
        vcpus, memory_bytes = sum_cells(options.explicit_cells)
    if vcpus is None or memory_bytes is None:
        hint = "homenode plan --vcpus 16 --memory 64GiB --gpus 2 -o vm.xml"
        if vcpus is not None:
            raise requires("--vcpus", "--memory", hint)
        if memory_bytes is not None:
            raise requires("--memory", "--vcpus", hint)
        raise missing("VM, or --vcpus and --memory", hint)
    if vcpus < 1 or memory_bytes < 1:
        raise UsageError("--vcpus, --memory: expected more than 0")
    return vcpus, memory_bytes


def make_vm(options: PlanOptions, architecture: str | None, name: str = DEFAULT_NAME) -> VmFile:
    """Make a VM from options only. Raises UsageError without vCPUs and memory."""
    vcpus, memory_bytes = compute_options_size(options)
    architecture = architecture or "x86_64"
    vm = Vm(
        name=name,
        source="options",
        architecture=architecture,
        machine=get_default_machine(architecture),
        cpu_mode="host-passthrough",
        vcpus=vcpus,
        memory_bytes=memory_bytes,
        vcpu_pins=(None,) * vcpus,
    )
    return VmFile(None, vm, None, "options")


def plan_for_target(
    vm: VmFile, options: PlanOptions, host: Host, target: str, *, output: str | None = None
) -> PlannedFile:
    """Plan a VM and write it for a target. A file of that target is edited; output: the name of a
    new one, which may have the VM's number. Raises like plan_file, and InputError if the target
    cannot take the plan."""
    module = find_target(target)
    vm = add_host_facts(vm, host)
    if vm.kind != target:
        vm = structs.replace(vm, guest=_remove_addresses(vm.guest, module, vm.source))
    request = request_for(vm.guest, options, host)
    lacks_topology = vm.kind != target or vm.guest.cpu_topology is None
    if module.one_socket and request.options.objective is None and lacks_topology:
        guest = structs.replace(vm.guest, cpu_topology=GuestTopology(1, 1, vm.guest.vcpus, 1))
        vm, request = structs.replace(vm, guest=guest), structs.replace(request, guest=guest)
    if vm.kind != target and vm.guest.domain_type == "kvm":  # a new file has the host's CPU
        guest = structs.replace(request.guest, cpu_mode="host-passthrough")
        request = structs.replace(request, guest=guest)
    # The file has QEMU's own options: libvirt limits nothing.
    settings = structs.replace(host.settings, libvirt_version=LIBVIRT_WITH_INITIATORS)
    vm_plan = plan(structs.replace(host, settings=settings), request)
    _reject_lost_vgpus(vm_plan, module)
    limits: tuple[Finding, ...] = ()
    if module.runs_qemu:
        qemu = host.settings.qemu_version
        reject_older(vm_plan, None, qemu, is_virt=vm.guest.is_virt)
        limits = check_vcpus(vm.guest, vm_plan.vm.vcpus, qemu, vm.source)
    reject_unsafe(vm.guest, vm_plan, vm.source)
    document = vm.content if vm.kind == target else None
    name = vm.source if document is not None else output or vm.source
    rendering = module.render(vm_plan, vm.guest, host, document, name)
    findings = (*check_target(module, vm_plan), *rendering.findings, *limits)
    if vm.kind != target:
        findings = (*findings, *_find_losses(vm, module, target))
    vm_plan = structs.replace(
        vm_plan,
        findings=findings_for(target, vm_plan.findings),
        consequences=list_consequences(
            host, request, visible_vm(vm_plan.vm, lost_features(module, vm_plan)), vm_plan.cells
        ),
        kept=list_settings(module, rendering.document),
        kept_of=target,
    )
    return PlannedFile(
        plan=vm_plan,
        target=target,
        original=document or b"",
        rendering=rendering,
        findings=findings,
        host=host,
    )


_KINDS = {
    "disks": re.compile(r"<disk>|(ide|sata|scsi|virtio)\d+|disk"),
    "network": re.compile(r"<interface>|net\d+|vif"),
}
"""Elements and keys by what they describe; those of no kind are other settings."""


def _find_losses(vm: VmFile, target: Target, name: str) -> Iterator[Finding]:
    """Yield a finding for each kind of settings that another target's file does not get."""
    parts: dict[str, Counter[str]] = {}
    for part in list_other_parts(vm):
        kind = next((kind for kind, form in _KINDS.items() if form.fullmatch(part)), "")
        parts.setdefault(kind or "other settings", Counter())[part] += 1
    if vm.guest.firmware not in (None, "bios"):
        parts["firmware"] = Counter([vm.guest.firmware])
    for kind in (*_KINDS, "firmware", "other settings"):
        counts = parts.get(kind, Counter()).items()
        texts = [f"{count} {part}" if count > 1 else part for part, count in counts]
        if texts:
            yield finding(
                "target-not-carried",
                f"{target.title}: {kind}",
                observed=f"{', '.join(texts)} not in the file",
                values={"way": way_to_add(name, kind)},
            )
    if vm.guest.launch_security is not None:
        yield finding(
            "target-not-carried",
            f"launch security {vm.guest.launch_security}",
            observed=f"it is not in the file for {name}: the guest would not be encrypted",
            case="launch security",
        )


def _reject_lost_vgpus(plan: Plan, target: Target) -> None:
    """Reject vGPUs for a target without them: the file would pass the whole GPU."""
    support = target.support[Feature.VGPUS]
    if support.level is SupportLevel.LOST and Feature.VGPUS in list_features(plan):
        names = ", ".join(d.uuid or str(d.bdf) for d in plan.vm.hostdevs if is_vgpu(d))
        raise InputError(
            f"target {target.title}: expected whole devices, found the vGPU {names}: {support.how}",
            hint="plan it for libvirt, qemu or proxmox",
        )


def _remove_addresses(guest: Vm, target: Target, source: str) -> Vm:
    """Reduce a VM to vCPUs, memory and devices, without PCI addresses, for another hypervisor.
    Raises InputError for memory devices, which have no equivalent there."""
    if guest.has_dimms:
        raise InputError(
            f"{source}: expected a VM without memory devices for target {target.title}, found some",
            hint="add their memory to --memory, in a copy of the definition without them",
        )
    # A new file uses the host's CPU, or TCG's maximum, if the VM names no CPU model.
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
