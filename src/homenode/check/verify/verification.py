"""Verification: reads definition or target's file, plan, host and guest; compares them. [I/O]"""

from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

from msgspec import Struct, field, structs
from msgspec.structs import replace

from homenode.check.domain.verification import check_schema, find_changed_settings, verify_document
from homenode.check.verify.boot.stand_in_boot import (
    BootOptions,
    BootOutcome,
    boot_command,
    boot_stand_in,
)
from homenode.check.verify.expectation import Expectation, build_expectation
from homenode.check.verify.guest_checks import (
    GuestView,
    compare_test_guest,
    find_untested_parts,
    view_of_guest,
)
from homenode.errors import InputError, UsageError
from homenode.findings import (
    Finding,
    Findings,
    Severity,
    add_gaps,
    find_texts,
    finding,
    format_plain,
    sort_findings,
)
from homenode.machine.topology import Host, reject_unshown
from homenode.plan.stored import read_plan, read_plan_for
from homenode.safe.input_files import read_file, read_input, read_subject
from homenode.text import command_line, printable
from homenode.vm.domain.document import Document
from homenode.vm.domain.read import build_vm, open_domain
from homenode.vm.domain.schema import parse_with_libvirt, validate
from homenode.vm.facts import diff
from homenode.vm.hypervisor.connection import DEFAULT
from homenode.vm.hypervisor.virsh import Virsh
from homenode.vm.model import Vm
from homenode.vm.plan import KEPT, Plan, vm_as_it_runs
from homenode.vm.sources import load_host
from homenode.vm.targets import libvirt
from homenode.vm.targets.registry import (
    TARGETS,
    VmFile,
    add_host_facts,
    find_target,
    recognize_kind,
)
from homenode.vm.targets.target import (
    Feature,
    Rendering,
    SupportLevel,
    Target,
    findings_for,
    is_vgpu,
    list_settings,
    lost_features,
    parse_pins,
    visible_vm,
)

_OF_DOCUMENTS = ("controller", "expander-cell", "bus-nr", "device-address", "memory-device")
"""Facts of libvirt's definitions: other targets have their own controllers and addresses."""


def verify_target(
    content: bytes,
    source: str,
    target: str,
    plan: Plan,
    *,
    host: Host | None = None,
    hook: bytes | None = None,
) -> Findings:
    """Return the differences of the file from the plan, worst first. host: without it, facts that
    depend on the host are not compared. hook: the pinning script next to the file. Facts that the
    target cannot express are named, not compared. Raises ParseError."""
    module = find_target(target)
    vm = module.read_vm(content, source)
    missing_features = lost_features(module, plan)
    skipped_facts = _list_unsaid_facts(plan, vm, module, missing_features)
    findings = [
        _make_finding(
            difference.title, difference.expected, difference.observed, source, difference.fact.id
        )
        for difference in diff(visible_vm(plan.vm, missing_features), vm, skipped_facts)
    ]
    rendering = _write_again(content, source, target, plan, host)
    if module.hook_suffix is not None:
        findings += _check_hook(hook, plan, source, rendering, module.hook_suffix)
    if not findings and rendering is not None:
        findings += _find_missing_lines(content, rendering.document, source)
    if not findings and plan.kept is not None and plan.kept_of == target:
        now = list_settings(module, content)
        findings += find_changed_settings(
            plan.kept, now, subject="lines that plans do not set", source=source
        )
    findings += check_lost_features(module, missing_features, source)
    return Findings(
        checked=(f"{source}: {module.title} against plan of layout {plan.layout.name}",),
        findings=sort_findings(findings),
    )


def check_lost_features(
    target: Target, missing_features: Collection[Feature], source: str
) -> Iterator[Finding]:
    """Find what the target lacks of some features, in the order of Feature."""
    for feature in Feature:
        if feature in missing_features:
            yield finding(
                "target-lost",
                feature.words,
                f"{target.title} to say it",
                target.support[feature].how,
                source,
                severity=Severity.INFO,
                cost=target.support[feature].loses,
                fix=None,
            )


def _write_again(
    content: bytes, source: str, target: str, plan: Plan, host: Host | None
) -> Rendering | None:
    """Return the file with the plan, or None if the plan has another definition's addresses."""
    module = find_target(target)
    vm = VmFile(target, module.read_vm(content, source), content, source)
    vm = vm if host is None else add_host_facts(vm, host)
    indices = {controller.index for controller in plan.vm.controllers}
    foreign_hostdevs = [
        d for d in plan.vm.hostdevs if d.address is not None and d.address.bus not in indices
    ]
    if foreign_hostdevs:
        return None
    return module.render(plan, vm.guest, host, content, source)


def _find_missing_lines(content: bytes, written_text: bytes, source: str) -> Iterator[Finding]:
    """Lines that the plan would write and the file does not have. Other lines are the user's."""
    count_of = Counter(line.strip() for line in content.splitlines())
    planned_lines = [line.strip() for line in written_text.splitlines()]
    for line in planned_lines:
        if line and not line.startswith(b"#") and not count_of[line]:
            text = printable(line.decode("utf-8", "replace"))
            yield _make_finding("line of the plan", text, "no such line", source)
        count_of[line] -= 1


def _make_finding(
    subject: str, expected: object, observed: object, source: str, fact: str = "target"
) -> Finding:
    return finding(
        f"plan-{fact}",
        subject,
        str(expected),
        str(observed),
        source,
        fix=format_plain(find_texts("plan-target").fix, {}),
    )


def _list_unsaid_facts(
    plan: Plan, vm: Vm, target: Target, features: Collection[Feature]
) -> set[str]:
    """Return the facts that a target's file does not contain, or that the plan leaves to it."""
    facts = {*plan.unsaid, *KEPT, *_OF_DOCUMENTS, *target.unread}
    facts |= {fact for feature in features for fact in feature.facts}
    # Not compared if memory follows the vCPUs, or if another program pins the emulator.
    facts |= {"binding"} if vm.binding is None else set()
    facts |= {"emulator"} if vm.emulator_pus is None and not target.says_emulator else set()
    return facts


def _check_hook(
    hook: bytes | None, plan: Plan, source: str, rendering: Rendering | None, suffix: str
) -> Iterator[Finding]:
    """Yield the script next to the file: it has the pins of single vCPUs, and binds devices."""
    if not plan.vcpu_pins:
        return
    if hook is None:
        script = "hook script"
        yield finding(
            "target-hook-missing", script, "the pins of single vCPUs", f"no {script}", source
        )
        return
    vcpus, emulator, _ = parse_pins(hook.decode("utf-8", "replace"))
    if vcpus != plan.vcpu_pins:
        yield _make_finding("hook script: CPUs of vCPUs", "as in the plan", "others", source)
    if emulator != plan.vm.emulator_pus:
        yield _make_finding("hook script: emulator's CPUs", plan.vm.emulator_pus, emulator, source)
    planned_hook = None if rendering is None else dict(rendering.companions).get(suffix)
    if vcpus == plan.vcpu_pins and emulator == plan.vm.emulator_pus and planned_hook is not None:
        yield from _find_missing_lines(hook, planned_hook, f"{source}: hook script")


_SEEN = {
    *(Feature.TOPOLOGY, Feature.THREADS, Feature.DIES, Feature.CACHE),
    *(Feature.INITIATORS, Feature.DEVICE_CELLS, Feature.DEVICE_TREE),
}
"""Features of a plan that a guest can see; pins, host nodes and huge pages are invisible to it."""


def build_target_expectation(plan: Plan, target: str, host: Host | None = None) -> Expectation:
    """Return the expected state of a guest of that target, as far as the target can express it.
    host: for the devices' ids. Raises InputError for a plan that no file of the target can have."""
    module = find_target(target)
    features = lost_features(module, plan)
    _reject_plan_of_others(plan, module, target, features)
    shows_cells = module.support[Feature.DEVICE_CELLS].level is not SupportLevel.LOST
    hidden = features | ({Feature.TOPOLOGY} if Feature.THREADS in features else set())
    # A target that cannot express the cells of devices chooses the devices' slots itself.
    vm = visible_vm(plan.vm, hidden if shows_cells else hidden | {Feature.DEVICE_CELLS})
    return replace(build_expectation(vm, host=host), has_device_cells=shows_cells)


def list_guest_losses(plan: Plan, target: str, source: str) -> Iterator[Finding]:
    """Yield findings on facts of the plan that the target cannot express: they are not compared."""
    module = find_target(target)
    yield from check_lost_features(module, lost_features(module, plan) & _SEEN, source)


def _reject_plan_of_others(plan: Plan, target: Target, name: str, lost: frozenset[Feature]) -> None:
    title = target.title
    if Feature.VGPUS in lost:
        vgpus = filter(is_vgpu, plan.vm.hostdevs)
        feature = f"the vGPU {', '.join(hostdev.uuid or str(hostdev.bdf) for hostdev in vgpus)}"
    elif plan.vm.memory_device_bytes:
        feature = "memory devices"
    else:
        return
    raise InputError(
        f"--target {name}: expected a plan for {title}, found one with {feature}, which no plan "
        f"for {title} has",
        hint="omit --target for a plan of a domain XML",
    )


_SSH = "ssh:"
_MAX_HOOK_BYTES = 16 << 20


class VerifyRequest(Struct, frozen=True):
    """The subject of a verification, and its options."""

    document: Path | None = None  # a domain XML, or a target's file
    domain: str | None = None  # domain of the libvirt at `connect`, instead of a document
    connect: str = DEFAULT
    plan: Path | None = None  # a saved plan
    host: str | None = None  # a host source; None = this machine
    lspci: Path | None = None
    boot: BootOptions | None = None  # None = no test guest is booted
    guest: str | None = None  # a host source, or "ssh:HOST"
    # whose guest it is and whose plan, by its name in vm/targets/registry.py; None = libvirt's
    target: str | None = None


class Verification(Struct, frozen=True):
    findings: Findings
    views: tuple[GuestView, ...]  # facts of guests compared with the expectation
    host: Host | None  # None if the document was not compared with one
    plan: Plan | None
    how: str = ""  # through what a test guest was booted, with which accelerator, and its seconds


def verify(request: VerifyRequest) -> Verification:
    """Run the requested checks. Raises UsageError for a file of another kind, InputError for an
    unreadable file, HostError and its subclasses if this machine cannot boot guests or the guest
    cannot be reached."""
    content, document = None, None
    if request.domain is not None:
        virsh = Virsh(request.connect)
        state = virsh.find_domain(request.domain)
        document = open_domain(virsh.read_definition(state.uuid), f"domain {state.name}")
    elif request.document is not None:
        content = read_subject(request.document, "a VM")
        if libvirt.recognizes(content):
            document = open_domain(content, str(request.document))
        elif request.guest is not None:
            raise UsageError(
                f"{request.document}: expected a domain XML with --guest, found a file of "
                "another kind",
                hint="homenode verify --plan P.json --guest SOURCE --target NAME",
            )
    try:
        facts = None if document is None else build_vm(document)
    except InputError as error:
        assert document is not None
        return _verify_unreadable(document, error)
    plan = None
    if request.plan is not None:
        plan = read_plan(read_input(request.plan, "a saved plan"), str(request.plan))
    host, skipped = _choose_host(request, plan, facts)
    answer = _Answer(request=request, plan=plan, host=host, not_checked=[*skipped])
    if document is not None:
        answer.add_document(document)
    elif content is not None:
        answer.add_target_file(content, str(request.document))
    if request.guest is not None:
        answer.add_guest(request.guest, facts)
    of_views = (finding for view in answer.views for finding in view.findings)
    findings = Findings(
        checked=tuple(answer.checked),
        findings=sort_findings((*answer.findings, *of_views)),
        not_checked=tuple(answer.not_checked),
    )
    findings = add_gaps(findings, () if host is None else host.gaps)
    return Verification(findings, tuple(answer.views), host, plan, answer.how)


def _verify_unreadable(document: Document, error: InputError) -> Verification:
    """Return libvirt's rejection of an unreadable definition; raise `error` otherwise."""
    result = parse_with_libvirt(document)
    if result is None or result.refusal is None:
        raise error
    outcome = structs.replace(result, refusal=f"{error.message}; libvirt: {result.refusal}")
    findings = tuple(check_schema((), outcome))
    checked, not_checked = (f"{document.source}: whether it can be read",), ("everything else",)
    answer = Findings(checked=checked, findings=findings, not_checked=not_checked)
    return Verification(answer, (), None, None)


class _Answer(Struct, kw_only=True):
    """The result, extended by each check."""

    request: VerifyRequest
    plan: Plan | None
    host: Host | None
    not_checked: list[str]
    findings: list[Finding] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    views: list[GuestView] = field(default_factory=list)
    how: str = ""  # as in Verification

    def add_document(self, document: Document) -> None:
        errors, gap = validate(document.to_bytes())
        parse_result = parse_with_libvirt(document)
        self.not_checked += [] if gap is None else [str(gap)]
        self._add(
            verify_document(
                document,
                plan=self.plan,
                host=self.host,
                schema_errors=errors,
                parse_result=parse_result,
            )
        )
        if self.request.boot is not None:
            facts = build_vm(document)
            booted = boot_stand_in(document, facts, self.request.boot, self.host)
            self._add_boot(booted, _build_expectation(self.plan, facts, self.host), document.source)

    def add_target_file(self, content: bytes, source: str) -> None:
        """A file of another hypervisor than libvirt. Raises UsageError without a plan, InputError
        for a target that no test guest boots for."""
        plan = self.plan
        target = recognize_kind(content, source, None if plan is None else plan.kept_of)
        if plan is None:
            raise UsageError(
                f"{source}: missing --plan",
                hint=command_line("homenode", "plan", source, *"-o FILE --save-plan P.json".split())
                + ", then homenode verify FILE --plan P.json",
            )
        module, script = find_target(target), None
        hook = None if module.hook_suffix is None else Path(source + module.hook_suffix)
        if hook is not None and hook.is_file():
            script = read_file(hook, "the hook that was written with it", max_bytes=_MAX_HOOK_BYTES)
        self._add(verify_target(content, source, target, plan, host=self.host, hook=script))
        if self.request.boot is None:
            return
        if module.words_of is None:
            can = (name for name in TARGETS if find_target(name).words_of is not None)
            raise InputError(
                f"{source}: expected a file for {' or '.join(can)} to boot, found a file for "
                f"{module.title}",
                hint="verify it without --boot",
            )
        words = tuple(module.words_of(content, source))
        outcome = boot_command(words, source, self.request.boot)
        self._add_boot(outcome, build_expectation(plan.vm, host=self.host), source)
        self.findings = [*findings_for(target, self.findings)]

    def add_guest(self, source: str, facts: Vm | None) -> None:
        plan, host, target = self.plan, self.host, self.request.target
        guest = load_guest(source)
        if plan is not None and target is not None:
            expectation = build_target_expectation(plan, target, host)
            self.findings += list_guest_losses(plan, target, guest.name)
            self.checked.append(f"the view of guest {guest.name} of {target}")
        else:
            expectation = _build_expectation(plan, facts, host)
            self.checked.append(f"the view of guest {guest.name}")
        reject_unshown(guest, "CPUs", "memory")
        if expectation.devices:
            reject_unshown(guest, "PCI")
        self.views.append(view_of_guest(expectation, guest, host))

    def _add(self, findings: Findings) -> None:
        self.findings += findings.findings
        self.checked += findings.checked
        self.not_checked += findings.not_checked

    def _add_boot(self, outcome: BootOutcome, expectation: Expectation, source: str) -> None:
        self.findings += [*outcome.findings, *find_untested_parts(outcome.stand_in, source)]
        self.how = f"{outcome.how}, {outcome.seconds:.1f} s"
        if outcome.guest is not None:
            self.views.append(compare_test_guest(expectation, outcome.stand_in, outcome.guest))


def load_guest(source: str) -> Host:
    """Return the guest of a source: "ssh:HOST", "ssh://HOST:22", or any host source, such as a
    capture made inside it. HOST is an argument of ssh, including a URL."""
    if not source.startswith(_SSH):
        return load_host(source)
    from homenode.machine.discover.host import discover
    from homenode.machine.snapshot.capture import collect_over_ssh

    host = source if source.startswith(f"{_SSH}//") else source.removeprefix(_SSH)
    return discover(collect_over_ssh(host))


def _choose_host(
    request: VerifyRequest, plan: Plan | None, facts: Vm | None
) -> tuple[Host | None, tuple[str, ...]]:
    """Return the host to compare with, and what is not checked if it is for another machine."""
    host = load_host(request.host, lspci=request.lspci)
    if request.host is not None or request.lspci is not None:
        if plan is not None and plan.host_fingerprint and request.plan is not None:
            read_plan_for(host, read_input(request.plan, "a saved plan"), str(request.plan))
        return host, ()
    fingerprint = host.fingerprint
    record = None if facts is None or facts.record is None else facts.record.host
    if plan is not None:
        other = plan.host_fingerprint != fingerprint
        name = plan.host_name
    else:
        other = record is not None and not fingerprint.startswith(record)
        name = "another host"
    if not other:
        return host, ()
    noun = "plan" if plan is not None else "definition"
    return None, (f"the host: the {noun} is for {name}: add --host SOURCE",)


def _build_expectation(plan: Plan | None, facts: Vm | None, host: Host | None) -> Expectation:
    vm = facts if plan is None else vm_as_it_runs(plan, facts)
    assert vm is not None, "it names a definition or a plan"
    return build_expectation(vm, host=host, document=facts)
