"""FindingsText: findings on a terminal, and what was expected of a guest and what it says."""

from collections.abc import Iterator, Sequence

from homenode.check.verify.guest.checks import Check
from homenode.doc import Cell, Doc, Part, Span, Table, Text
from homenode.findings import Finding, Findings, Severity

_LOOKS = {
    Severity.CRITICAL: "critical",
    Severity.WARNING: "warn",
    Severity.INFO: "hint",
    Severity.INCONCLUSIVE: "open",
}


def findings_text(findings: Findings, *, with_sources: bool = False) -> Doc:
    """What was checked, each finding with its cost and its fix, and a line that sums them up.

    with_sources: also who says so, or where it was read.
    """
    parts: list[Part] = [Text(f"checked: {one}") for one in findings.checked]
    parts += [Text(f"not checked: {one}", "dim") for one in findings.not_checked]
    parts += [Text(f"not read: {line}", "warn") for line in findings.not_read]
    parts += [Text(f"unknown: {line}", "dim") for line in findings.unknown]
    for finding in findings.findings:
        parts += [Text(""), *_finding(finding, with_sources)]
    return Doc("", (*parts, Text(""), Text(_summary(findings), "bold")))


def checks_text(title: str, checks: Sequence[Check]) -> Doc:
    """Every line of a comparison: what was expected, what is there, and whether they agree."""
    rows = tuple(
        (
            Cell(("ok",), "good")
            if one.finding is None
            else Cell((str(one.finding.severity),), _LOOKS[one.finding.severity]),
            *(one.subject, one.expected, one.observed),
        )
        for one in checks
    )
    heads = ("", "subject", "expected", "observed")
    table = Table(heads=heads, rows=rows, folds=heads[1:])
    return Doc(f"Expected, and what {title} reports", (table,))


def _finding(finding: Finding, with_source: bool) -> Iterator[Text]:
    severity = Span(f"{finding.severity}: ", _LOOKS[finding.severity])
    yield Text((severity, Span(finding.subject, "bold"), f"  ({finding.id})"))
    if finding.expected:
        yield Text(f"expected {finding.expected}", indent=2)
    yield Text(f"found    {finding.observed}", indent=2)
    if finding.cost is not None:
        yield Text(f"cost     {finding.cost}", indent=2)
    if finding.fix is not None:
        yield Text(f"fix      {finding.fix}", indent=2)
    if with_source:
        yield Text(f"source   {finding.source}", indent=2)


def _summary(findings: Findings) -> str:
    counts = dict.fromkeys(Severity, 0)
    for finding in findings.findings:
        counts[finding.severity] += 1
    stated = ", ".join(f"{count} {severity}" for severity, count in counts.items() if count)
    if not findings.checked:
        return "nothing was checked" + (f"; findings: {stated}" if stated else "")
    unread = ", and not everything was read" if findings.not_read else ""
    return (f"findings: {stated}" if stated else "0 findings") + unread
