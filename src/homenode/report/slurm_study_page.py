"""Slurm study page: a study's report as one HTML page, to be sent and kept.

Verdicts, heat maps and bars first; then the same words and tables as for a terminal, each letter at
its place. Nothing is loaded from anywhere.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from html import escape

from rich.console import Console
from rich.segment import Segment
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.theme import Theme

from homenode.analyse.study_maps import Matrix
from homenode.analyse.study_report import StudyReport
from homenode.analyse.study_verdicts import Spread
from homenode.analyse.words import figure_text
from homenode.metrics import METRICS
from homenode.report.charts.bars import Bar, BarGroup, bar_chart
from homenode.report.charts.heat_map import Matrix as HeatMatrix
from homenode.report.charts.heat_map import heat_map
from homenode.report.palette import chart_style
from homenode.report.slurm_study_text import slurm_study_text
from homenode.wording import printable

MOST_MAPS = 24
"""Heat maps of one page; those of the first cluster nodes. The text has them all."""

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
:root { color-scheme: light dark; --line: #d3dae1; --dim: #4d5965; }
@media (prefers-color-scheme: dark) { :root { --line: #35414d; --dim: #b3bec9; } }
body { margin: 1.2em auto; max-width: 1600px; padding: 0 16px; color: #16202a; background: #fff;
  font: 16px/1.45 system-ui, "Noto Sans", "DejaVu Sans", Arial, sans-serif; }
h1 { font-size: 1.4em; overflow-wrap: anywhere; } h2 { font-size: 1.15em; margin: 1.6em 0 .5em; }
h3 { font-size: .95em; margin: 0 0 .3em; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9em; }
th, td { text-align: left; vertical-align: top; padding: .3em .7em;
  border-bottom: 1px solid var(--line); }
.charts { display: grid; gap: 18px 28px; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 360px), 1fr)); }
figure { margin: 0; min-width: 0; break-inside: avoid; }
figure svg { width: 100%; max-width: 520px; height: auto; display: block; }
figcaption { color: var(--dim); font-size: .85em; }
.warn { font-weight: 700; color: #b03a2e; }
pre { font: 14px/1.35 "DejaVu Sans Mono", Menlo, Consolas, monospace; overflow-x: auto; color: #222;
  background: #fff; padding: .5em; }
@media (prefers-color-scheme: dark) { body { color: #ecf1f6; background: #10151b; }
  .warn { color: #ffab7a; } }
@media (max-width: 600px) { thead { display: none; }
  td { display: block; border: 0; padding: .1em 0; }
  tr { display: block; border-bottom: 1px solid var(--line); padding: .4em 0; } }
@media print { pre { font-size: 7.5pt; } }
"""


def slurm_study_page(report: StudyReport, made: str) -> str:
    """Verdicts, maps, bars and tables, then every map, job and gap. made: when and by what."""
    console = Console(
        width=_COLUMNS,
        force_terminal=True,
        color_system="truecolor",
        theme=_COLOURS,
        highlight=False,
        emoji=False,
        markup=False,
        legacy_windows=False,
    )
    options = replace(console.options, encoding="utf-8")
    segments = console.render(slurm_study_text(report, everything=True), options)
    title = _text(f"Slurm study {report.source}")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="generator" content="homenode">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{_STYLE}{chart_style()}</style>\n</head>\n<body>\n"
        f"<h1>{title}</h1>\n{''.join(_parts(report))}"
        f"<h2>Every figure and job</h2>\n<pre>{''.join(_spans(segments))}</pre>\n"
        f"<p>{escape(made)}</p>\n</body>\n</html>\n"
    )


def _parts(report: StudyReport) -> Iterator[str]:
    for said in report.replayed:
        yield (
            f'<p class="warn">REPLAYED: {_text(said)}. GPU figures here say nothing about any '
            "machine.</p>\n"
        )
    if report.jobs:
        rows = [
            (
                one.work,
                str(one.queue) + ("" if one.measured else " (not measured)"),
                one.rationale,
                "; ".join(one.evidence),
            )
            for one in report.verdicts
        ]
        yield _table("Which queue for which work", ("work", "queue", "why", "evidence"), rows)
    maps = list(_maps(report.matrices[:MOST_MAPS]))
    if maps:
        yield _figures("Copies by NUMA node and GPU", maps)
        yield _gpu_names(report.matrices)
    bars = list(_bars(report.spreads))
    if bars:
        yield _figures("Mean and deviation over GPUs, nodes and jobs", bars)
        yield _table(
            "Copies by copy engine (CE) and by the GPU's own processors (SM)",
            ("copies", "method", "jobs", "mean", "deviation", "figures"),
            list(_spread_rows(report.spreads)),
        )
    if report.setup:
        yield _table("Hardware and tools", ("what", "which"), report.setup)


def _maps(matrices: Sequence[Matrix]) -> Iterator[tuple[str, str, str]]:
    """(title, svg, caption) of each matrix; those of one metric have the same colours."""
    ends: dict[str, tuple[float, float]] = {}
    for one in matrices:
        values = [value for row in one.cells for value in row if value is not None]
        low, high = ends.get(one.metric, (min(values), max(values)))
        ends[one.metric] = min(low, *values), max(high, *values)
    for one in matrices:
        metric = METRICS[one.metric]
        title = f"{one.node}: {metric.title}"
        # The seed's own sides: CPU NUMA package down, target GPU across.
        drawn = HeatMatrix(
            "NUMA node of CPUs and memory",
            "GPU",
            tuple(f"NUMA {row}" for row in one.rows),
            tuple(f"GPU {number}" for number in range(len(one.columns))),
            one.cells,
        )
        said = "less is better" if metric.lower_is_better else "more is better"
        if one.local is not None and one.remote is not None and one.ratio is not None:
            said += (
                f"; local {figure_text(one.local, metric.unit)}, remote "
                f"{figure_text(one.remote, metric.unit)}: {one.ratio:.2f}x"
            )
        if one.homes_measured:
            said += "; which node is local is derived from these figures"
        yield title, heat_map(title, metric.unit, drawn, ends[one.metric]), said


def _gpu_names(matrices: Sequence[Matrix]) -> str:
    """Which address each GPU's number stands for, and its home."""
    rows = []
    for node in dict.fromkeys(one.node for one in matrices):
        first = next(one for one in matrices if one.node == node)
        for number, (column, home) in enumerate(zip(first.columns, first.homes, strict=True)):
            rows.append(
                (node, f"GPU {number}", column, "unknown" if home is None else f"NUMA {home}")
            )
    return _table("GPUs", ("cluster node", "GPU", "address", "home"), rows[:MOST_MAPS])


def _bars(spreads: Sequence[Spread]) -> Iterator[tuple[str, str, str]]:
    for metric in dict.fromkeys(one.metric for one in spreads):
        groups = []
        for method in dict.fromkeys(one.method for one in spreads if one.metric == metric):
            bars = [
                Bar(
                    one.label,
                    one.mean,
                    max(one.mean - (one.deviation or 0.0), 0.0),
                    one.mean + (one.deviation or 0.0),
                    number % 8,
                    note="" if one.deviation is None else f"\u00b1 {_short(one.deviation, metric)}",
                )
                for number, one in enumerate(
                    s for s in spreads if (s.metric, s.method) == (metric, method)
                )
            ]
            groups.append(BarGroup(f"by {method}", tuple(bars)))
        known = METRICS[metric]
        said = "less is better" if known.lower_is_better else "more is better"
        title = f"{known.title}, mean \u00b1 deviation"
        yield title, bar_chart(title, known.unit, groups), said


def _short(value: float, metric: str) -> str:
    return f"{value / (1.0 if METRICS[metric].unit == 'ns' else 1e9):.1f}"


def _spread_rows(spreads: Sequence[Spread]) -> Iterator[tuple[str, ...]]:
    for one in spreads:
        metric = METRICS[one.metric]
        deviation = "" if one.deviation is None else figure_text(one.deviation, metric.unit)
        yield (
            metric.title,
            one.method,
            one.label,
            figure_text(one.mean, metric.unit),
            deviation,
            str(one.count),
        )


def _figures(title: str, figures: Sequence[tuple[str, str, str]]) -> str:
    # Drawings are built as elements: every text in them is escaped.
    drawn = "".join(
        f"<figure><h3>{_text(name)}</h3>{svg}<figcaption>{_text(said)}</figcaption></figure>\n"
        for name, svg, said in figures
    )
    return f'<h2>{escape(title)}</h2>\n<div class="charts">\n{drawn}</div>\n'


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>\n" for row in rows
    )
    return (
        f'<h2>{escape(title)}</h2>\n<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}</tbody></table></div>\n"
    )


def _text(text: str) -> str:
    return escape(printable(text))


def _spans(segments: Iterable[Segment]) -> Iterator[str]:
    for text, style, control in Segment.simplify(segments):
        css = "" if style is None else style.get_html_style(DEFAULT_TERMINAL_THEME)
        if not control:
            yield f'<span style="{css}">{escape(text)}</span>' if css else escape(text)
