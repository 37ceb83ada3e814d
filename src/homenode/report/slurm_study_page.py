"""Slurm study page: a study's report as one HTML page, to be sent and kept.

The same words, maps and tables as for a terminal, each letter at its place; nothing is loaded from
anywhere.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from html import escape

from rich.console import Console
from rich.segment import Segment
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.theme import Theme

from homenode.analyse.study_report import StudyReport
from homenode.report.slurm_study_text import slurm_study_text
from homenode.wording import printable

_COLUMNS = 120
# Of a terminal's colours those that a white page shows too little of, and what stands for them.
_COLOURS = Theme(
    {
        "red": "#b03a2e",
        "dark_orange": "#b35900",
        "yellow": "#806600",
        "green_yellow": "#4f7300",
        "green": "#1d7a44",
        "bold red": "bold #b03a2e",
    }
)
_STYLE = """\
body { margin: 2em; color: #222; background: #fff; }
pre { font: 14px/1.35 "DejaVu Sans Mono", Menlo, Consolas, monospace; overflow-x: auto; }
@media print { pre { font-size: 7.5pt; } }
"""


def slurm_study_page(report: StudyReport, made: str) -> str:
    """Every map, job and gap. made: when and by what."""
    console = Console(
        width=_COLUMNS, force_terminal=True, color_system="truecolor", theme=_COLOURS,
        highlight=False, emoji=False, markup=False, legacy_windows=False,
    )  # fmt: skip
    options = replace(console.options, encoding="utf-8")
    segments = console.render(slurm_study_text(report, everything=True), options)
    title = escape(printable(f"Slurm study {report.source}"))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="generator" content="homenode">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{title}</h1>\n<pre>{''.join(_spans(segments))}</pre>\n"
        f"<p>{escape(made)}</p>\n</body>\n</html>\n"
    )


def _spans(segments: Iterable[Segment]) -> Iterator[str]:
    for text, style, control in Segment.simplify(segments):
        css = "" if style is None else style.get_html_style(DEFAULT_TERMINAL_THEME)
        if not control:
            yield f'<span style="{css}">{escape(text)}</span>' if css else escape(text)
