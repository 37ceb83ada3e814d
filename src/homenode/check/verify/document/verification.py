"""Document: a domain document against itself, the host that it is for, and its plan."""

from collections.abc import Iterator, Sequence

from homenode.catalogue import finding
from homenode.check.verify.document.as_planned import as_planned
from homenode.check.verify.document.devices import devices_alone, devices_on_host
from homenode.check.verify.document.memory import memory_alone, memory_on_host
from homenode.check.verify.document.pins import pins_alone, pins_on_host
from homenode.findings import Finding, Findings, Severity, in_order, merged
from homenode.machine.topology import Host
from homenode.vm.domain.codec import SINCE, older_than
from homenode.vm.domain.crosscheck import crosscheck
from homenode.vm.domain.document import Document
from homenode.vm.domain.read import vm_of
from homenode.vm.domain.schema import SchemaError
from homenode.vm.fingerprint import host_fingerprint, is_made_for
from homenode.vm.hypervisor.parser import Parsed
from homenode.vm.model import Vm
from homenode.vm.plan_model import Plan

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

    host, plan: None = not compared. schema_errors: what vm/domain/schema.py found.
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
    return Findings(checked=tuple(checked), findings=in_order(merged(found)), not_checked=left)


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


def broken_references(document: Document) -> Iterator[Finding]:
    """A finding for everything that the cross-check finds."""
    for broken in crosscheck(document):
        # libvirt itself so places a lone USB companion controller.
        is_lone = broken.id == "function-without-0" and not broken.subject.startswith("<hostdev>")
        yield finding(
            broken.id,
            broken.subject,
            expected=broken.expected,
            observed=broken.observed,
            severity=Severity.WARNING if is_lone else None,
            source=document.source,
        )


def schema_findings(
    errors: Sequence[SchemaError], parsed: Parsed | None, source: str
) -> Iterator[Finding]:
    """A finding for each departure from libvirt's own schema, the first few of them; one for all
    where libvirt's parser, which is less strict, takes the document whole; one for what the parser
    refuses though the schema has nothing against it, as two disks of one name.

    parsed: what the parser made of it, None where it was not asked.
    """
    if not errors:
        if parsed is not None and parsed.refusal is not None:
            yield _schema("the document", parsed.refusal, "refused", source)
    elif parsed is None:
        for error in errors[:8]:
            yield _schema(f"line {error.line}", error.message, None, source)
    elif parsed.refusal is not None:
        yield _schema("the document", parsed.refusal, "libvirt refuses the definition", source)
    elif parsed.dropped:
        for path in parsed.dropped[:8]:
            parent, _, name = path.rpartition("/")
            where = f"<{parent}> with {name[1:]}=" if name[0] == "@" else f"<{name}> in <{parent}>"
            yield _schema(where, "one that libvirt does not know there", "dropped", source)
    else:
        message = "; ".join(dict.fromkeys(error.message for error in errors[:3]))
        yield finding(
            "schema",
            "the document",
            expected=_ALLOWED,
            observed=message,
            severity=Severity.INFO,
            case="taken",
            source=source,
        )


_ALLOWED = "what libvirt's domain.rng allows"


def _schema(subject: str, observed: str, case: str | None, source: str) -> Finding:
    return finding(
        "schema", subject, expected=_ALLOWED, observed=observed, case=case, source=source
    )


_ALSO_RUN = {"x86_64": ("i686",), "aarch64": ("armv7l", "armv6l"), "ppc64le": ("ppc64",)}
"""Guests that KVM runs besides those of the host's own architecture."""


def versions_on_host(document: Document, guest: Vm, host: Host) -> Iterator[Finding]:
    """A finding for each element that is newer than the host's programs, and for a machine that
    KVM cannot run there; none where those are unknown."""
    run = (host.architecture, *_ALSO_RUN.get(host.architecture or "", ()))
    is_known = host.architecture is not None and guest.domain_type == "kvm"
    if is_known and guest.architecture not in run:
        yield finding(
            "other-architecture",
            "<type arch>",
            expected=f"{host.architecture}, the host's",
            observed=guest.architecture,
            values={"architecture": host.architecture},
            source=document.source,
        )
    settings = host.settings
    for row in SINCE:
        if not row.is_in(document, guest):
            continue
        for program, have, want in older_than(row, settings.libvirt_version, settings.qemu_version):
            yield finding(
                "too-old",
                row.element,
                expected=f"{program} {want} or newer",
                observed=f"{program} {have}",
                values={"program": program, "element": row.element},
                source=document.source,
            )
