"""References: what the schema and the cross-check say of a document, as findings."""

from collections.abc import Iterator, Sequence

from homenode.domain.crosscheck import crosscheck
from homenode.domain.document import Document
from homenode.domain.schema import SchemaError
from homenode.findings import Finding, Severity
from homenode.hypervisor.parser import Parsed

# What libvirt makes of each, as seen with libvirt 9.0 and QEMU 7.2. An id that is not here is
# refused when the domain is defined.
_SILENT = "libvirt accepts it without an error"
_AT_START = "libvirt defines it, and the start fails"
_FATE_OF = {
    "pin-of-no-vcpu": _SILENT,
    "pin-of-no-iothread": _SILENT,
    "pin-twice": "libvirt uses one of them",
    "bus-window": "libvirt accepts it without an error, and the guest's PCI enumeration breaks",
    "busnr-twice": _AT_START,
    "chassis-twice": _AT_START,
    "memory-sum": "libvirt uses the sum of the cells and ignores <memory>",
    "multifunction-off": _AT_START,
    "fw-cfg-broken": _AT_START,
    "iothread-of-none": _AT_START,
    "function-without-0": "the guest's kernel looks at function 0 first, and no further",
    "vcpu-in-no-cell": "the guest puts these vCPUs on the first cell",
}
_HARMLESS = ("pin-of-no-vcpu", "pin-of-no-iothread", "pin-twice")
_REFUSED = "libvirt refuses the definition"
_FIX_OF = {
    "bus-window": "move the expander buses' busNr apart, one bus for each controller below them",
    "busnr-twice": "give each expander bus a busNr of its own",
    "topology-product": "make sockets x dies x cores x threads the number of vCPUs",
    "pin-of-no-vcpu": "remove the pin, or raise <vcpu>",
    "memory-sum": "make <memory> the sum of the cells",
}
_REPLAN = "let homenode plan write the document"


def broken_references(document: Document) -> Iterator[Finding]:
    """A finding for everything that the cross-check finds."""
    for broken in crosscheck(document):
        fate = _FATE_OF.get(broken.id, _REFUSED)
        harmless = broken.id in _HARMLESS or (
            # libvirt itself so places a lone USB companion controller.
            broken.id == "function-without-0" and not broken.subject.startswith("<hostdev>")
        )
        yield Finding(
            id=broken.id,
            severity=Severity.WARNING if harmless else Severity.CRITICAL,
            subject=broken.subject,
            expected=broken.expected,
            observed=broken.observed,
            cost=fate,
            fix=_FIX_OF.get(broken.id, _REPLAN),
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
            yield _schema("the document", parsed.refusal, "libvirt refuses the definition", source)
    elif parsed is None:
        for error in errors[:8]:
            yield _schema(
                f"line {error.line}", error.message, "libvirt refuses or drops it", source
            )
    elif parsed.refusal is not None:
        yield _schema("the document", parsed.refusal, "libvirt refuses the definition", source)
    elif parsed.dropped:
        for path in parsed.dropped[:8]:
            parent, _, name = path.rpartition("/")
            where = f"<{parent}> with {name[1:]}=" if name[0] == "@" else f"<{name}> in <{parent}>"
            yield _schema(
                where, "one that libvirt does not know there", "libvirt drops it silently", source
            )
    else:
        message = "; ".join(dict.fromkeys(error.message for error in errors[:3]))
        yield Finding(
            id="schema",
            severity=Severity.INFO,
            subject="the document",
            expected=_ALLOWED,
            observed=message,
            cost="none: libvirt's parser takes it, and drops nothing of it",
            source=source,
        )


_ALLOWED = "what libvirt's domain.rng allows"


def _schema(subject: str, observed: str, cost: str, source: str) -> Finding:
    return Finding(
        id="schema",
        severity=Severity.CRITICAL,
        subject=subject,
        expected=_ALLOWED,
        observed=observed,
        cost=cost,
        fix="virt-xml-validate shows the place",
        source=source,
    )
