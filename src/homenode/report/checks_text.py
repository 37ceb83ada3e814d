"""ChecksText: what was expected of a guest beside what it reports, on a terminal."""

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from homenode.findings import Severity
from homenode.report.terminal_text import AsciiWhereNeeded
from homenode.report.wording import printable
from homenode.verify.checks import Check

_STYLES = {
    Severity.CRITICAL: "bold red",
    Severity.WARNING: "yellow",
    Severity.INFO: "cyan",
    Severity.INCONCLUSIVE: "magenta",
}


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
