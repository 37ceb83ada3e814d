"""Verification of a domain definition against itself, its host and its plan; and limits that slow
the VM down with any placement: CPU time, scheduler, I/O. And every finding on one domain on its
host, with the lines of its definition.

Source: <cputune>, <iotune> and <bandwidth> of https://libvirt.org/formatdomain.html; sched(7).
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.check.domain.cores import (
    check_interrupts,
    check_isolation,
    check_threads,
    check_topology,
    check_windows,
)
from homenode.check.domain.devices import (
    check_devices_alone,
    check_devices_on_host,
    check_limits,
    check_passthrough,
    describe_limits,
    find_limits,
    list_passed_devices,
)
from homenode.check.domain.memory import check_memory, check_memory_alone, memory_on_host
from homenode.check.domain.pins import (
    check_pins,
    find_nodes,
    has_floating_vcpus,
    is_flat_by_evidence,
    pins_alone,
    pins_on_host,
)
from homenode.errors import InputError
from homenode.findings import Finding, Findings, Severity, add_source, finding, sort_findings
from homenode.machine.topology import Host
from homenode.text import format_cpus, format_nodes, plural, shorten_list
from homenode.units import parse_whole
from homenode.vm.domain.codec import ROWS, SINCE, STEPS, UNSAID, is_older
from homenode.vm.domain.controllers import edit_aperture, edit_controllers
from homenode.vm.domain.cpu import edit_cpu
from homenode.vm.domain.crosscheck import check_references
from homenode.vm.domain.document import Document, Element
from homenode.vm.domain.hostdevs import list_hostdev_elements
from homenode.vm.domain.iommu import edit_iommu
from homenode.vm.domain.memory import edit_metadata
from homenode.vm.domain.read import build_vm, read_kept
from homenode.vm.domain.schema import ParseResult, SchemaError
from homenode.vm.facts import diff
from homenode.vm.model import Vm
from homenode.vm.plan import LIBVIRT, Plan


def verify_document(
    document: Document,
    *,
    plan: Plan | None = None,
    host: Host | None = None,
    schema_errors: Sequence[SchemaError] = (),
    parse_result: ParseResult | None = None,
) -> Findings:
    """Return the findings on a definition, worst first. host, plan: None = not compared.
    schema_errors: of vm/domain/schema.py. parse_result: the definition after libvirt's parser.
    Raises ParseError or InputError if the document cannot be read."""
    facts = build_vm(document)
    findings = [
        *check_schema(schema_errors, parse_result),
        *check_references(document),
        *pins_alone(facts),
        *check_memory_alone(facts),
        *check_devices_alone(facts),
        *check_throttle(document),
    ]
    checks = ["schema, references, sums, PCI addresses, bus windows"]
    if host is not None:
        findings += _check_record(facts, host)
        findings += pins_on_host(facts, host)
        findings += memory_on_host(facts, host)
        findings += check_devices_on_host(facts, host)
        findings += check_versions(document, facts, host)
        parts = "CPUs, nodes, memory and " if host.pus else ""
        checks.append(f"{parts}devices of {host.name}")
    if plan is not None:
        acpi = any(finding.id == "acpi-missing" for finding in findings)
        findings += compare_with_plan(
            document, facts, plan, frozenset(("has_acpi",) if acpi else ())
        )
        checks.append("every element of the layout")
        if plan.layout.cells == "host" and plan.layout.pcie == "keep":
            findings = [finding for finding in findings if finding.id != "device-without-cell"]
            findings += _report_root_devices(plan)
    answer = sort_findings(add_source(findings, document.source))
    return Findings(checked=tuple(checks), findings=answer)


def _check_record(facts: Vm, host: Host) -> Iterator[Finding]:
    """Check whether homenode has tuned the definition for this host."""
    planned_for = None if facts.record is None else facts.record.host
    is_ours = planned_for is None or host.has_fingerprint(planned_for)
    if planned_for is None or is_ours:
        return
    unread = "" if is_ours is False else "; not all of this host's nodes and devices could be read"
    yield finding(
        "tuned-for-other-host",
        facts.name,
        expected=f"a definition tuned for host {host.name} (topology {host.fingerprint[:12]})",
        observed=f"one tuned for another (topology {planned_for[:12]}){unread}",
        severity=Severity.INCONCLUSIVE if unread else None,
    )


def _report_root_devices(plan: Plan) -> Iterator[Finding]:
    """Report devices that the layout leaves on the root bus, as planned."""
    root_devices = [str(device.bdf) for device in plan.vm.hostdevs if device.cell is None]
    if root_devices:
        yield finding(
            "devices-without-node",
            ", ".join(root_devices[:8]),
            expected=f"no NUMA node in the guest, as layout {plan.layout.name} has it",
            observed="no NUMA node",
            severity=Severity.INFO,
        )


def check_schema(errors: Sequence[SchemaError], result: ParseResult | None) -> Iterator[Finding]:
    """Yield findings on the first violations of libvirt's schema; a single finding if libvirt's
    parser, which is less strict, accepts the whole definition; and a finding on definitions that
    the parser rejects but the schema accepts, such as two disks with one name. result: the parser's
    result, None if it did not run."""

    def schema_finding(
        subject: str, observed: str, case: str | None, severity: Severity | None = None
    ) -> Finding:
        allowed = (
            "what libvirt's parser accepts"
            if case == "rejected"
            else "what libvirt's domain.rng allows"
        )
        return finding("schema", subject, allowed, observed, case=case, severity=severity)

    document_name = "the definition"
    if not errors:
        if result is not None and result.refusal is not None:
            yield schema_finding(document_name, result.refusal, "rejected")
    elif result is None:
        for error in errors[:8]:
            yield schema_finding(f"line {error.line}", error.message, None)
    elif result.refusal is not None:
        yield schema_finding(document_name, result.refusal, "rejected")
    elif result.dropped:
        for path in result.dropped[:8]:
            parent, _, name = path.rpartition("/")
            place = f"<{parent}> with {name[1:]}=" if name[0] == "@" else f"<{name}> in <{parent}>"
            yield schema_finding(place, "an element that libvirt does not accept there", "dropped")
    else:
        message = "; ".join(dict.fromkeys(error.message for error in errors[:3]))
        yield schema_finding(document_name, message, "accepted", Severity.INFO)


_ALSO_RUN = {"x86_64": ("i686",), "aarch64": ("armv7l", "armv6l"), "ppc64le": ("ppc64",)}
"""Guests that KVM runs besides those of the host's own architecture."""


def check_versions(document: Document, guest: Vm, host: Host) -> Iterator[Finding]:
    """Find elements newer than the host's programs, and machines that KVM cannot run there."""
    run = (host.architecture, *_ALSO_RUN.get(host.architecture or "", ()))
    is_known = host.architecture is not None and guest.domain_type == "kvm"
    if is_known and guest.architecture not in run:
        yield finding(
            "other-architecture",
            "<type arch>",
            expected=f"{host.architecture}, the host's",
            observed=guest.architecture,
            values={"architecture": host.architecture},
        )
    settings = host.settings
    for row in SINCE:
        if not row.is_in(document, guest):
            continue
        for program, have, want in is_older(row, settings.libvirt_version, settings.qemu_version):
            yield finding(
                "too-old",
                row.element,
                expected=f"{program} {want} or newer",
                observed=f"{program} {have}",
                values={"program": program, "element": row.element},
            )


_CASES: dict[Callable[[Document, Plan], Document], str] = {
    edit_aperture: "aperture",
    edit_cpu: "CPU",
    edit_iommu: "IOMMU",
}
_FIELD_OF_PATH = {f"/domain/{row.path}": row.field for row in ROWS if row.field is not None}
_SHOWN = 4

_Part = tuple[str, str, str]
"""(path of local names, name as written, text) of an element by itself."""


def compare_with_plan(
    document: Document, vm: Vm, plan: Plan, extra_ignored: frozenset[str] = frozenset()
) -> Iterator[Finding]:
    """Yield a finding for each different fact, each group of other elements that the plan would
    change, and each setting that the plan relies on. vm: of the document. extra_ignored: fields of
    Vm that other findings name."""
    ignored_fields = set(extra_ignored)
    for difference in diff(plan.vm, vm, plan.unsaid | UNSAID.keys()):
        ignored_fields.update(difference.fact.fields)
        yield finding(
            f"plan-{difference.fact.id}",
            difference.subject,
            difference.expected,
            difference.observed,
        )
    reported_paths = {path for path, field in _FIELD_OF_PATH.items() if field in ignored_fields}
    reported_tags = {path.rpartition("/")[2] for path in reported_paths}
    for step in STEPS:
        added, removed = _compare_elements(document, plan, step)
        parts = [*added, *removed]
        new = {path for path, _, _ in parts if not _is_named(path, ignored_fields)} - reported_paths
        if not new:
            continue
        reported_paths |= new
        tags = {tag for path, tag, _ in parts if path in new}
        reported_tags |= tags
        recorded = step is edit_metadata
        yield finding(
            "plan-record" if recorded else "plan-element",
            ", ".join(f"<{tag}>" for tag in sorted(tags)),
            _first_texts([text for *_, text in added]),
            _first_texts([text for *_, text in removed]),
            case=_CASES.get(step),
        )
    yield from _check_settings(document, plan, reported_tags)


def _is_named(path: str, names: set[str]) -> bool:
    """Return whether these fields name the element at a path or in it; never the whole domain."""
    if path == "/domain":
        return False
    if any(row.startswith(f"{path}/") and field in names for row, field in _FIELD_OF_PATH.items()):
        return True
    while path and path not in _FIELD_OF_PATH:
        path = path.rpartition("/")[0]
    return _FIELD_OF_PATH.get(path) in names


def _check_settings(document: Document, plan: Plan, reported_tags: set[str]) -> Iterator[Finding]:
    """Find settings that changed since the plan, though no layout sets them."""
    if plan.kept is None or plan.kept_of != LIBVIRT:
        return
    if plan.aperture is not None and plan.aperture.physical_address_bits is not None:
        reported_tags = reported_tags | {
            "maxphysaddr"
        }  # at least those of the plan, which its step checks
    yield from find_changed_settings(plan.kept, read_kept(document), reported_tags=reported_tags)


def find_changed_settings(
    planned_lines: Iterable[str],
    now: Iterable[str],
    *,
    reported_tags: Collection[str] = (),
    subject: str = "",
    source: str = "",
) -> Iterator[Finding]:
    """Compare lines with those of the plan. subject: "" = the elements that they begin with."""
    before, current = Counter(planned_lines), Counter(now)
    lost_lines, new = (
        sorted(line for line in lines.elements() if line.partition(" ")[0] not in reported_tags)
        for lines in (before - current, current - before)
    )
    if lost_lines or new:
        names = dict.fromkeys(line.partition(" ")[0] for line in (*lost_lines, *new))
        about = subject or ", ".join(f"<{name}>" for name in names)
        yield finding("plan-setting", about, _first_texts(lost_lines), _first_texts(new), source)


def _compare_elements(
    document: Document, plan: Plan, step: Callable[[Document, Plan], Document]
) -> tuple[list[_Part], list[_Part]]:
    """Return the elements that the step would add, and those that it would remove."""
    try:
        after = step(document, plan)
    except InputError as error:
        # The facts name every controller, this one only the first obstacle.
        path = "/domain/devices/controller" if step is edit_controllers else "/domain"
        tag = path.rpartition("/")[2]
        return [(path, tag, "a definition that accepts the plan")], [(path, tag, error.message)]
    if after.text == document.text:
        return [], []
    before, result = (
        Counter(_list_elements(document.root, "")),
        Counter(_list_elements(after.root, "")),
    )
    return list((result - before).elements()), list((before - result).elements())


def _list_elements(element: Element, parent: str) -> Iterator[_Part]:
    """Yield each element of a tree without its children."""
    attributes = "".join(f" {name}='{value}'" for name, value in sorted(element.attributes))
    text, name = element.text.strip(), element.tag
    path = f"{parent}/{element.name.rpartition('}')[2]}"
    text_of_element = f"<{name}{attributes}>{text}</{name}>" if text else f"<{name}{attributes}/>"
    yield path, name, text_of_element
    for child in element.children:
        yield from _list_elements(child, path)


def _first_texts(texts: list[str]) -> str:
    return shorten_list(texts, _SHOWN) or "none"


_PERIOD_US = 100_000
"""libvirt's own, if none is given."""

_QUOTAS = (
    ("quota", "period", "each vCPU"),
    ("emulator_quota", "emulator_period", "the emulator"),
    ("iothread_quota", "iothread_period", "each IOThread"),
)
_SCHEDULERS = ("vcpusched", "iothreadsched", "emulatorsched")
_YIELDING = ("idle", "batch")
"""Schedulers that let other programs go first. fifo and rr go before them."""

_MAX_DIGITS = 18


def check_throttle(document: Document) -> Iterator[Finding]:
    """Yield a finding for each limit in a document."""
    tune = document.root.child("cputune")
    if tune is not None:
        yield from _check_quotas(document, tune)
    for element in document.root.all("cputune/*"):
        scheduler = element.get("scheduler")
        if element.name in _SCHEDULERS and scheduler in _YIELDING:
            yield finding(
                "scheduler-yields",
                f"<{element.name}>",
                expected="a scheduler that guarantees the VM's share",
                observed=f"{scheduler}, after every other program",
            )
    yield from check_transfers(document)


def _check_quotas(document: Document, tune: Element) -> Iterator[Finding]:
    for quota, period, subject in _QUOTAS:
        share = _compute_share(tune, quota, period)
        if share is not None and share < 1:
            yield _make_quota_finding(subject, share, f"<{quota}>")
    vcpus = _number(document.root.value("vcpu")) or 1
    share = _compute_share(tune, "global_quota", "global_period")
    if share is not None and share < vcpus:
        yield _make_quota_finding(f"all {vcpus} vCPUs together", share, "<global_quota>")


def _make_quota_finding(subject: str, share: float, element: str) -> Finding:
    return finding(
        "cpu-quota",
        subject,
        expected="no limit on CPU time",
        observed=f"{share:.0%} of a CPU, by {element}",
    )


def _compute_share(tune: Element, quota: str, period: str) -> float | None:
    """Return the share of a CPU that the quota allows; None if nothing limits it."""
    quota_us = _number(tune.value(quota))
    if not quota_us:
        return None
    return quota_us / (_number(tune.value(period)) or _PERIOD_US)


def _number(text: str | None) -> int | None:
    """Return a number; None for a negative number (no limit); libvirt rejects other texts."""
    return parse_whole(text, digits=_MAX_DIGITS)


def check_transfers(document: Document) -> Iterator[Finding]:
    """Find disks and network interfaces with a rate limit, which is often intended."""
    for path, element in (("disk", "iotune"), ("interface", "bandwidth")):
        for device in document.root.all(f"devices/{path}"):
            tune = device.child(element)
            if tune is None or not tune.children:
                continue
            text = ", ".join(_format_limit(child) for child in tune.children[:4])
            yield finding(
                "io-limit",
                f"{path} {device.value('target/@dev') or ''}".rstrip(),
                expected="the device's own rate",
                observed=f"<{element}>: {text}",
                severity=Severity.INFO,
            )


def _format_limit(element: Element) -> str:
    value = element.text.strip() or " ".join(f"{name} {text}" for name, text in element.attributes)
    return f"{element.name} {value}"[:80]


def check_domain(facts: Vm, document: Document | None, host: Host) -> list[Finding]:
    """The findings on one VM on its host. document: None if another file describes the VM."""
    findings = []
    if document is not None:
        findings += [*check_references(document), *check_windows(facts, document)]
    findings += [*pins_alone(facts), *check_memory_alone(facts)]
    findings += [*check_devices_alone(facts), *check_limits(facts, document, host)]
    findings += check_topology(facts, document, host)
    if host.pus:
        findings += [*pins_on_host(facts, host), *check_pins(facts, host)]
        findings += [*check_threads(facts, host), *check_isolation(facts, host)]
        findings += check_interrupts(facts, host)
    if host.nodes:
        findings += [*memory_on_host(facts, host), *check_memory(facts, document, host)]
    findings += check_devices_on_host(facts, host)
    findings += check_passthrough(facts, document, host)
    return [
        _weigh(finding, facts, host)
        for finding in add_source(findings, facts.source)
        if finding.id != "emulator-on-vcpu" or not _fills_cores(facts, host)
    ]


def _fills_cores(facts: Vm, host: Host) -> bool:
    """Return whether the vCPUs use a CPU of every core, so that the emulator has no other place."""
    pus = facts.pinned_pus
    return bool(host.cores) and all(not core.pus.isdisjoint(pus) for core in host.cores)


def _weigh(finding: Finding, facts: Vm, host: Host) -> Finding:
    """Return the severity of floating vCPUs: a warning if there are devices or several nodes."""
    if finding.id != "unpinned" or finding.severity is not Severity.INFO:
        return finding
    nodes = [node for node in host.nodes if node.pus]
    node_pus = max((len(node.pus) for node in nodes), default=0)
    space = max((node.memory_bytes or 0 for node in nodes), default=0)
    too_large = facts.vcpus > node_pus or facts.memory_bytes > space > 0
    if len(nodes) < 2 or not (facts.hostdevs or too_large):
        return finding
    reason = "the VM has devices" if facts.hostdevs else "the VM is larger than a node"
    return replace(
        finding,
        severity=Severity.WARNING,
        expected=f"pins: {reason}, and the host has {plural(len(nodes), 'node')}",
    )


def list_domain_checks(facts: Vm, host: Host) -> list[str]:
    """Return the areas that check_domain checked, for people."""
    lines = [
        f"{facts.source}: references, pins, guest topology, memory, devices and limits of "
        f"{facts.name} on {host.name}"
        if host.pus
        else f"{facts.source}: references, devices and limits of {facts.name}; "
        f"{host.name} reports no CPUs to compare its pins with"
    ]
    pus = facts.pinned_pus
    if has_floating_vcpus(facts) and host.pus:
        lines[0] += (
            f"; its vCPUs float over {format_cpus(pus)}, {format_nodes(find_nodes(pus, host))}"
        )
    devices = list_passed_devices(facts, host)
    if devices:
        lines.append(describe_limits(find_limits(facts, devices), len(devices)))
    if is_flat_by_evidence(facts, host):
        nodes = format_nodes(find_nodes(facts.pinned_pus, host))
        objective = "" if facts.record is None else facts.record.objective
        lines.append(f"flat over {nodes}, as the table of layouts has it for {objective}")
    return lines


_NUMBER_OF = {"vcpupin": "vcpu", "cell": "id", "iothreadpin": "iothread"}
"""The attribute with the number of an element."""

_WITHOUT_PIN = {"vcpupin": "<vcpu>", "iothreadpin": "<iothreads>"}


def locate(findings: Iterable[Finding], document: Document) -> Iterator[Finding]:
    """Yield the findings; those about an element of the document with "file:line" as source."""
    lines: dict[str | tuple[str, int] | Bdf, int] = {
        bdf: element.line
        for bdf, element in reversed(list_hostdev_elements(document))
        if element.name == "hostdev"
    }
    cells = 0
    for element in document.root.walk():
        lines.setdefault(f"<{element.name}>", element.line)
        number = parse_whole(element.get(_NUMBER_OF.get(element.name, "")))
        if element.name == "cell":
            number, cells = cells if number is None else number, cells + 1
        if number is not None:
            lines.setdefault((element.name, number), element.line)
    for checked in findings:
        name = checked.element[0] if checked.element else ""
        key = checked.element or (checked.devices or (checked.subject,))[0]
        line = lines.get(key, lines.get(_WITHOUT_PIN.get(name, f"<{name}>")))
        if line is not None and checked.source == document.source:
            checked = replace(checked, source=f"{checked.source}:{line}")
        yield checked
