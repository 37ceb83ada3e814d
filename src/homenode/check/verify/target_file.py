"""TargetFile: compares a hypervisor's file, and its guest, with the plan."""

from collections import Counter
from collections.abc import Collection, Iterator

from msgspec.structs import replace

from homenode.check.domain.verification import find_changed_settings
from homenode.check.verify.expectation import Expectation, build_expectation
from homenode.errors import InputError
from homenode.findings import (
    Finding,
    Findings,
    Severity,
    find_texts,
    finding,
    format_plain,
    sort_findings,
)
from homenode.machine.topology import Host
from homenode.text import printable
from homenode.vm.facts import diff
from homenode.vm.model import Vm
from homenode.vm.plan import KEPT, Plan
from homenode.vm.targets.registry import VmFile, add_host_facts, find_target
from homenode.vm.targets.script import parse_pins
from homenode.vm.targets.target import (
    Feature,
    Rendering,
    SupportLevel,
    Target,
    is_vgpu,
    list_settings,
    lost_features,
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
