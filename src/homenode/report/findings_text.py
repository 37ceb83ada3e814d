"""FindingsText: findings on a terminal, and what was expected of a guest and what it says."""

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from homenode.findings import Finding, Findings, Severity
from homenode.report.terminal_text import AsciiWhereNeeded
from homenode.verify.guest.checks import Check
from homenode.wording import printable

_STYLES = {
    Severity.CRITICAL: "bold red",
    Severity.WARNING: "yellow",
    Severity.INFO: "cyan",
    Severity.INCONCLUSIVE: "magenta",
}


def findings_text(findings: Findings, *, with_sources: bool = False) -> RenderableType:
    """What was checked, each finding with its cost and its fix, and a line that sums them up.

    with_sources: also who says so, or where it was read.
    """
    parts: list[RenderableType] = [Text(printable(f"checked: {c}")) for c in findings.checked]
    parts += [Text(printable(f"not checked: {c}"), style="dim") for c in findings.not_checked]
    for finding in findings.findings:
        parts += [Text(""), *_finding(finding, with_sources)]
    parts += [Text(""), Text(_summary(findings.findings), style="bold")]
    return AsciiWhereNeeded(Group(*parts))


def finding_text(finding: Finding) -> RenderableType:
    """One finding, as in the list of them."""
    return AsciiWhereNeeded(Group(*_finding(finding, False)))


def checks_text(title: str, checks: Sequence[Check]) -> RenderableType:
    """Every line of a comparison: what was expected, what is there, and whether they agree."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(Text(""), no_wrap=True)
    for heading in ("subject", "expected", "observed"):
        table.add_column(Text(heading), overflow="fold")
    for line in checks:
        verdict = Text("ok", "green")
        if line.finding is not None:
            verdict = Text(str(line.finding.severity), _STYLES[line.finding.severity])
        texts = (line.subject, line.expected, line.observed)
        table.add_row(verdict, *(Text(printable(text)) for text in texts))
    title_line = Text(printable(f"Expected, and what {title} reports"), style="bold underline")
    return AsciiWhereNeeded(Group(title_line, table))


def _finding(finding: Finding, with_source: bool) -> list[RenderableType]:
    head = Text.assemble(
        (f"{finding.severity}: ", _STYLES[finding.severity]),
        (printable(finding.subject), "bold"),
        f"  ({finding.id})",
    )
    lines = [f"expected {finding.expected}", f"found    {finding.observed}"]
    if finding.cost is not None:
        lines.append(f"cost     {finding.cost}")
    if finding.fix is not None:
        lines.append(f"fix      {finding.fix}")
    if with_source:
        lines.append(f"source   {finding.source}")
    indent = (0, 0, 0, 2)
    return [head, *(Padding(Text(printable(line)), indent, expand=False) for line in lines)]


def _summary(findings: Sequence[Finding]) -> str:
    counts = dict.fromkeys(Severity, 0)
    for finding in findings:
        counts[finding.severity] += 1
    stated = ", ".join(f"{count} {severity}" for severity, count in counts.items() if count)
    return f"findings: {stated}" if stated else "nothing is wrong"
