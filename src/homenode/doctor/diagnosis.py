"""Diagnosis: every finding about a host and, where one is given, about a domain on it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from homenode.bdf import Bdf
from homenode.doctor.document_lines import DocumentLines
from homenode.doctor.guest.core_isolation import isolation_findings
from homenode.doctor.guest.core_threads import thread_findings
from homenode.doctor.guest.interrupts import interrupt_findings
from homenode.doctor.guest.limits import describe_limits, limit_findings, limits
from homenode.doctor.guest.memory import is_bound_by_numad, memory_findings
from homenode.doctor.guest.passthrough import passthrough_findings
from homenode.doctor.guest.pins import pin_findings, pinned_pus
from homenode.doctor.guest.settings import settings_findings
from homenode.doctor.guest.topology import topology_findings
from homenode.doctor.links.errors import error_findings
from homenode.doctor.links.measured_copy import copy_findings
from homenode.doctor.links.path_words import describe_paths
from homenode.doctor.links.peer_paths import peer_findings
from homenode.doctor.links.slow import Load, link_findings
from homenode.doctor.links.unknown import (
    cut_listing_findings,
    silent_device_findings,
    unknown_link_findings,
)
from homenode.doctor.node_layout import layout_findings
from homenode.domain.document import Document
from homenode.findings import Finding, Findings, Severity, in_order, merged
from homenode.topology import Host
from homenode.verify.document.devices import devices_alone, devices_on_host
from homenode.verify.document.memory import memory_alone, memory_on_host
from homenode.verify.document.pins import pins_alone, pins_on_host
from homenode.verify.document.references import broken_references
from homenode.verify.domain_facts import DomainFacts, domain_facts


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What the user knows beyond host and domain.

    known_widths: lanes of narrow slots, by device. h2d: measured bytes/s by GPU, h2d_all for any.
    reached: the GPUs that the load copied to; None where that is not known.
    """

    load: Load = Load.UNKNOWN
    reached: frozenset[Bdf] | None = None
    known_widths: Mapping[Bdf, int] = field(default_factory=dict)
    h2d: Mapping[Bdf, float] = field(default_factory=dict)
    h2d_all: float | None = None

    @property
    def slowest_h2d(self) -> float | None:
        """Of all that were measured, bytes/s."""
        return min(
            (*self.h2d.values(), *(() if self.h2d_all is None else (self.h2d_all,))), default=None
        )


def diagnose(
    host: Host,
    document: Document | None = None,
    circumstances: Circumstances | None = None,
) -> Findings:
    """Everything that is wrong, the worst first, and what was looked at.

    document: a domain of this host; its links are judged whether or not they are its own.
    Raises ParseError or InputError where the document cannot be read.
    """
    known = circumstances or Circumstances()
    found = [
        *link_findings(host, known.load, known.known_widths, known.reached),
        *unknown_link_findings(host),
        *cut_listing_findings(host),
        *silent_device_findings(host),
        *copy_findings(host, known.h2d, known.h2d_all, known.known_widths),
        *error_findings(host),
        *layout_findings(host, with_advice=document is None),
        *peer_findings(host),
    ]
    counted = any(d.errors is not None or d.link_replays is not None for d in host.pci_devices)
    looked = [
        *(("links",) if host.pci_devices else ()),
        *(("errors",) if counted else ()),
        *(("nodes",) if host.nodes else ()),
        *(("peer-to-peer",) if host.pci_devices else ()),
        *(("settings",) if host.pus else ()),
    ]
    checked = [f"host {host.name}: {', '.join(looked) or 'nothing that it reports'}"]
    checked += describe_paths(host)
    facts = None
    if document is not None:
        facts = domain_facts(document)
        found += domain_findings(facts, document, host)
        checked += _domain_checked(facts, host)
    by_numad = document is not None and is_bound_by_numad(document)
    found += settings_findings(host, facts, memory_is_bound=by_numad)
    checked += [f"not known: {gap.subject}: {gap.reason}" for gap in host.gaps]
    joined = merged(found)
    if document is not None:
        lines = DocumentLines(document)
        joined = tuple(lines.located(finding) for finding in joined)
    return Findings(tuple(checked), in_order(joined))


def domain_findings(facts: DomainFacts, document: Document, host: Host) -> list[Finding]:
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
    found += passthrough_findings(facts, host)
    return [
        _weighed(finding, facts, host)
        for finding in found
        if finding.id != "emulator-on-vcpu" or not _fills(facts, host)
    ]


def _fills(facts: DomainFacts, host: Host) -> bool:
    """Whether the vCPUs have a PU of every core: the emulator can be nowhere else."""
    pus = pinned_pus(facts)
    return all(not core.pus.isdisjoint(pus) for core in host.cores)


def _weighed(finding: Finding, facts: DomainFacts, host: Host) -> Finding:
    """Floating vCPUs are worth a warning where devices or several nodes give them a home."""
    if finding.id != "unpinned" or finding.severity is not Severity.INFO:
        return finding
    nodes = [node for node in host.nodes if node.pus]
    most = max((len(node.pus) for node in nodes), default=0)
    space = max((node.memory_bytes or 0 for node in nodes), default=0)
    too_large = facts.guest.vcpus > most or facts.guest.memory_bytes > space > 0
    if len(nodes) < 2 or not (facts.guest.hostdevs or too_large):
        return finding
    why = "the VM has devices" if facts.guest.hostdevs else "the VM is larger than a node"
    return replace(
        finding,
        severity=Severity.WARNING,
        expected=f"pins: {why}, and the host has {len(nodes)} nodes",
        cost="vCPUs and memory move away from the devices and from each other",
    )


def _domain_checked(facts: DomainFacts, host: Host) -> list[str]:
    lines = [
        f"{facts.source}: references, pins, guest topology, memory, devices and limits of "
        f"{facts.guest.name} on {host.name}"
        if host.pus
        else f"{facts.source}: references, devices and limits of {facts.guest.name}; "
        f"{host.name} gives no PUs to hold its pins against"
    ]
    passed = {hostdev.source for hostdev in facts.guest.hostdevs}
    devices = [device for device in host.pci_devices if device.bdf in passed]
    if devices:
        lines.append(describe_limits(limits(facts, devices), len(devices)))
    return lines
