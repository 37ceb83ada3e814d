"""Domain: every finding about one domain on its host, and what was looked at."""

from msgspec.structs import replace

from homenode.check.doctor.guest.core_isolation import isolation_findings
from homenode.check.doctor.guest.core_threads import thread_findings
from homenode.check.doctor.guest.interrupts import interrupt_findings
from homenode.check.doctor.guest.limits import describe_limits, limit_findings, limits
from homenode.check.doctor.guest.memory import memory_findings
from homenode.check.doctor.guest.passthrough import passthrough_findings
from homenode.check.doctor.guest.pins import is_flat_by_evidence, nodes_of, pin_findings
from homenode.check.doctor.guest.topology import topology_findings
from homenode.check.verify.document.devices import devices_alone, devices_on_host
from homenode.check.verify.document.memory import memory_alone, memory_on_host
from homenode.check.verify.document.pins import pins_alone, pins_on_host
from homenode.check.verify.document.verification import broken_references
from homenode.findings import Finding, Severity
from homenode.machine.topology import Host
from homenode.vm.domain.document import Document
from homenode.vm.model import Vm


def domain_findings(facts: Vm, document: Document, host: Host) -> list[Finding]:
    """What is wrong with one domain on its host."""
    found = [*broken_references(document), *pins_alone(facts), *memory_alone(facts)]
    found += [*devices_alone(facts), *limit_findings(facts, document, host)]
    if host.pus:
        found += [*pins_on_host(facts, host), *pin_findings(facts, host)]
        found += topology_findings(facts, document, host)
        found += [*thread_findings(facts, host), *isolation_findings(facts, host)]
        found += interrupt_findings(facts, host)
    if host.nodes:
        found += [*memory_on_host(facts, host), *memory_findings(facts, document, host)]
    found += devices_on_host(facts, host)
    found += passthrough_findings(facts, document, host)
    return [
        _weighed(finding, facts, host)
        for finding in found
        if finding.id != "emulator-on-vcpu" or not _fills(facts, host)
    ]


def _fills(facts: Vm, host: Host) -> bool:
    """Whether the vCPUs have a PU of every core: the emulator can be nowhere else."""
    pus = facts.pinned_pus
    return all(not core.pus.isdisjoint(pus) for core in host.cores)


def _weighed(finding: Finding, facts: Vm, host: Host) -> Finding:
    """Floating vCPUs are worth a warning where devices or several nodes give them a home."""
    if finding.id != "unpinned" or finding.severity is not Severity.INFO:
        return finding
    nodes = [node for node in host.nodes if node.pus]
    most = max((len(node.pus) for node in nodes), default=0)
    space = max((node.memory_bytes or 0 for node in nodes), default=0)
    too_large = facts.vcpus > most or facts.memory_bytes > space > 0
    if len(nodes) < 2 or not (facts.hostdevs or too_large):
        return finding
    why = "the VM has devices" if facts.hostdevs else "the VM is larger than a node"
    return replace(
        finding,
        severity=Severity.WARNING,
        expected=f"pins: {why}, and the host has {len(nodes)} nodes",
    )


def domain_checked(facts: Vm, host: Host) -> list[str]:
    """What domain_findings looked at, for people."""
    lines = [
        f"{facts.source}: references, pins, guest topology, memory, devices and limits of "
        f"{facts.name} on {host.name}"
        if host.pus
        else f"{facts.source}: references, devices and limits of {facts.name}; "
        f"{host.name} gives no PUs to hold its pins against"
    ]
    passed = {hostdev.bdf for hostdev in facts.hostdevs}
    devices = [device for device in host.pci_devices if device.bdf in passed]
    if devices:
        lines.append(describe_limits(limits(facts, devices), len(devices)))
    if is_flat_by_evidence(facts, host):
        nodes = nodes_of(facts.pinned_pus, host)
        objective = "" if facts.record is None else facts.record.objective
        lines.append(
            f"flat over nodes {nodes}, as the evidence chose for {objective}: homenode recommend"
        )
    return lines
