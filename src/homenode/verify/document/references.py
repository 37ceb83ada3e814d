"""References: what the schema and the cross-check say of a document, as findings."""

from collections.abc import Iterator, Sequence

from homenode.catalogue import finding
from homenode.domain.crosscheck import crosscheck
from homenode.domain.document import Document
from homenode.domain.schema import SchemaError
from homenode.findings import Finding, Severity
from homenode.hypervisor.parser import Parsed


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
