"""Every finding on one domain on its host, with the lines of its definition."""

from collections.abc import Iterable, Iterator

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
from homenode.findings import Finding, Severity, add_source
from homenode.machine.topology import Host
from homenode.text import format_cpus, format_nodes, plural
from homenode.units import parse_whole
from homenode.vm.domain.crosscheck import check_references
from homenode.vm.domain.document import Document
from homenode.vm.domain.hostdevs import list_hostdev_elements
from homenode.vm.model import Vm


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
    for finding in findings:
        name = finding.element[0] if finding.element else ""
        key = finding.element or (finding.devices or (finding.subject,))[0]
        line = lines.get(key, lines.get(_WITHOUT_PIN.get(name, f"<{name}>")))
        if line is not None and finding.source == document.source:
            finding = replace(finding, source=f"{finding.source}:{line}")
        yield finding
