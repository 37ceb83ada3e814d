"""Document: a domain document against itself, the host that it is for, and its plan."""

from collections.abc import Sequence

from homenode.catalogue import finding
from homenode.domain.document import Document
from homenode.domain.read import vm_of
from homenode.domain.schema import SchemaError
from homenode.findings import Finding, Findings, Severity, in_order, merged
from homenode.hypervisor.parser import Parsed
from homenode.plan.fingerprint import host_fingerprint, is_made_for
from homenode.plan.model import Plan
from homenode.topology import Host
from homenode.verify.document.as_planned import as_planned
from homenode.verify.document.devices import devices_alone, devices_on_host
from homenode.verify.document.memory import memory_alone, memory_on_host
from homenode.verify.document.pins import pins_alone, pins_on_host
from homenode.verify.document.references import broken_references, schema_findings
from homenode.verify.document.versions import versions_on_host
from homenode.vm.model import Vm

_NOT_CHECKED = "the host's KVM and VFIO, and the files of disks, networks, emulator and firmware"
"""What else a start needs, and no capture of a host has."""


def verify_document(
    document: Document,
    *,
    plan: Plan | None = None,
    host: Host | None = None,
    schema_errors: Sequence[SchemaError] = (),
    parsed: Parsed | None = None,
) -> Findings:
    """Everything about a document that does not hold, the worst first.

    host, plan: None = not compared. schema_errors: what domain/schema.py found.
    parsed: what libvirt's parser made of it then.
    Raises ParseError or InputError where the document cannot be read at all.
    """
    facts = vm_of(document)
    found = [
        *schema_findings(schema_errors, parsed, document.source),
        *broken_references(document),
        *pins_alone(facts),
        *memory_alone(facts),
        *devices_alone(facts),
    ]
    checked = [f"{document.source}: schema, references, sums, PCI addresses and bus windows"]
    if host is not None:
        found += _record(facts, host)
        found += pins_on_host(facts, host)
        found += memory_on_host(facts, host)
        found += devices_on_host(facts, host)
        found += versions_on_host(document, facts, host)
        checked.append(
            f"host {host.name}: PUs, cores, nodes, memory and huge pages, devices, versions"
        )
    if plan is not None:
        acpi = any(one.id == "acpi-missing" for one in found)
        found += as_planned(document, facts, plan, frozenset(("has_acpi",) if acpi else ()))
        checked.append(f"plan of layout {plan.layout.name}: every element that it sets")
        if plan.layout.cells == "mirrored" and plan.layout.pcie == "as-it-was":
            found = [one for one in found if one.id != "device-without-cell"]
            found += _left_on_root(facts, plan)
    left = () if host is None else (_NOT_CHECKED,)
    return Findings(tuple(checked), in_order(merged(found)), left)


def _record(facts: Vm, host: Host) -> list[Finding]:
    """Whether homenode has tuned the document for this host."""
    record = facts.record
    if record is None or record.host is None:
        return []
    is_ours = is_made_for(host, record.host)
    if is_ours:
        return []
    unread = "" if is_ours is False else "; not all of this host's nodes and devices could be read"
    return [
        finding(
            "tuned-for-other-host",
            facts.name,
            expected=f"a document tuned for host {host.name} "
            f"(topology {host_fingerprint(host)[:12]})",
            observed=f"one tuned for another (topology {record.host[:12]}){unread}",
            severity=Severity.INCONCLUSIVE if unread else Severity.WARNING,
            source=facts.source,
        )
    ]


def _left_on_root(facts: Vm, plan: Plan) -> list[Finding]:
    """The layout leaves devices on the root bus: that is as planned, and worth knowing."""
    placed = [str(device.bdf) for device in plan.devices if device.cell is None]
    if not placed:
        return []
    return [
        finding(
            "devices-without-node",
            ", ".join(placed[:8]),
            expected=f"no NUMA node in the guest, as layout {plan.layout.name} has it",
            observed="no NUMA node",
            severity=Severity.INFO,
            source=facts.source,
        )
    ]
