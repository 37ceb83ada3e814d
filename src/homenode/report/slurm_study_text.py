"""Slurm study text: a study's report for a terminal: heat maps, queues, jobs, verdicts."""

import re
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from homenode.analyse.comparison import Comparison, Effect, Outcome
from homenode.analyse.study_maps import Matrix
from homenode.analyse.study_outliers import LEAST_NODES, Outlier
from homenode.analyse.study_report import JobLine, StudyReport
from homenode.analyse.study_verdicts import Locality
from homenode.analyse.words import figure_text, multiple_text, range_text
from homenode.measure.bindings.experiments import Mode
from homenode.metrics import METRICS as KNOWN
from homenode.report.terminal_text import AsciiWhereNeeded, TableOrList
from homenode.wording import plural, printable

_SHADES = ("red", "dark_orange", "yellow", "green_yellow", "green")
_SHOWN = 12
_HIDDEN_LINES = 40


def slurm_study_text(report: StudyReport, *, everything: bool = False) -> RenderableType:
    """The whole report. everything: all jobs and all nodes' maps, else the first and the odd."""
    parts = [Text(line) for line in _head(report)]
    for part in _parts(report, everything=everything):
        parts += [Text(""), part]  # type: ignore[list-item]
    return AsciiWhereNeeded(Group(*parts))


def _head(report: StudyReport) -> Iterator[str]:
    nodes = plural(len(report.nodes), "node")
    yield printable(f"{report.source}: {plural(len(report.jobs), 'job')} on {nodes}")
    for said in report.replayed:
        yield printable(f"REPLAYED: {said}. GPU figures here say nothing about any machine.")
    if len(report.systems) > 1:
        kinds = ", ".join(report.systems)
        yield printable(
            f"MIXED: GPUs of several kinds ({kinds}). Means over all nodes, slow nodes and queues "
            "below mix them: report studies of one kind alone (--nodelist)."
        )


def _parts(report: StudyReport, *, everything: bool) -> Iterator[RenderableType]:
    shown = report.matrices if everything else _few(report)
    for matrix in shown:
        yield _map(matrix)
    if len(shown) < len(report.matrices):
        yield Text(f"{len(report.matrices) - len(shown)} more maps (--all)")
    for one in report.comparisons:
        yield from _comparison(one)
    if report.jobs:
        found = report.collective
        of_all = 0.0 if found is None else found.gpu_hours or 0.0
        yield _jobs(report.jobs, of_all, everything=everything)
    if report.nics:
        nics = [(n.node, n.gpu, n.nic, n.nearness) for n in report.nics]
        yield Group(
            Text("nearest NIC of each GPU"),
            TableOrList(("node", "GPU", "NIC", "where"), nics if everything else nics[:_SHOWN]),
        )
    if report.collective is not None:
        yield _collective(report)
    if report.jobs:
        yield _outliers(report.outliers, report)
        yield _verdicts(report)
    if report.missing:
        yield Group(
            Text("missing", style="bold red"), *(Text(printable(m)) for m in report.missing)
        )
    if report.gaps:
        lines = [Text(printable(f"open: {gap}")) for gap in report.gaps]
        more = [] if everything else [Text(f"{len(lines) - _SHOWN} more (--all)")]
        yield Group(*(lines if everything or len(lines) <= _SHOWN else [*lines[:_SHOWN], *more]))


def _few(report: StudyReport) -> tuple[Matrix, ...]:
    """All of one node; of several, the first node's and those in which something is slow."""
    first = report.matrices[0].node if report.matrices else ""
    odd = {(one.node, one.metric) for one in report.outliers}
    return tuple(m for m in report.matrices if m.node == first or (m.node, m.metric) in odd)


class _Map:
    """GPUs by NUMA nodes, [ ] at each GPU's home; shaded, or a list where it does not fit."""

    def __init__(self, matrix: Matrix) -> None:
        self._matrix = matrix

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self._shaded()
        if (
            Measurement.get(console, options.update(width=10_000), table).maximum
            > options.max_width
        ):
            yield TableOrList(("GPU", *self._heads()), [row for row, _ in self._rows()])
            return
        yield table

    def _shaded(self) -> Table:
        table = Table(box=None, pad_edge=False)
        table.add_column("GPU", no_wrap=True)
        for head in self._heads():
            table.add_column(head, justify="right", no_wrap=True)
        for (name, *texts), styles in self._rows():
            table.add_row(name, *map(Text, texts, styles))
        return table

    def _heads(self) -> list[str]:
        return [f"node {index} " for index in self._matrix.rows]

    def _rows(self) -> Iterator[tuple[tuple[str, ...], list[str]]]:
        """Texts of a GPU's row, and the styles of its cells."""
        matrix = self._matrix
        values = [value for row in matrix.cells for value in row if value is not None]
        low, high = min(values), max(values)
        for number, (column, home) in enumerate(zip(matrix.columns, matrix.homes, strict=True)):
            cells = [row[number] for row in matrix.cells]
            texts = [
                _cell(cell, matrix.metric, is_home=home == row)
                for cell, row in zip(cells, matrix.rows, strict=True)
            ]
            styles = [_shade(cell, low, high, matrix.metric) for cell in cells]
            yield (printable(_short(column)), *texts), styles


def _map(matrix: Matrix) -> RenderableType:
    how = " ([ ] is local, derived from these figures)" if matrix.homes_measured else ""
    how = how or (" ([ ] is local)" if any(h is not None for h in matrix.homes) else "")
    title = f"{matrix.node}: {KNOWN[matrix.metric].title}, {_unit(matrix.metric)}{how}"
    parts: list[RenderableType] = [Text(printable(title), style="bold"), _Map(matrix)]
    if matrix.local is not None and matrix.remote is not None:
        local, remote = (_number(value, matrix.metric) for value in (matrix.local, matrix.remote))
        parts.append(Text(f"local {local}, remote {remote}: {matrix.ratio:.2f}x"))
    return Group(*parts)


def _cell(value: float | None, metric: str, *, is_home: bool) -> str:
    if value is None:
        return "-"
    text = _number(value, metric)
    return f"[{text}]" if is_home else f"{text} "


def _shade(value: float | None, low: float, high: float, metric: str) -> str:
    if value is None or high <= low * 1.02:
        return ""
    place = (value - low) / (high - low)
    place = 1 - place if metric.endswith("latency") else place
    return _SHADES[min(len(_SHADES) - 1, int(place * len(_SHADES)))]


def _short(column: str) -> str:
    return column.removeprefix("0000:").removesuffix(":00.0").removesuffix(".0")


def _comparison(found: Comparison) -> Iterator[RenderableType]:
    """A table for each metric: ways to run in rows, against the first."""
    effects = sorted((one for one in found.effects if _speaks(one)), key=_by_devices)
    for metric in dict.fromkeys(one.metric for one in found.effects if _speaks(one)):
        of_name = {one.alternative: one for one in effects if one.metric == metric}
        first = next(iter(of_name.values()))
        title = KNOWN[metric].title if metric in KNOWN else metric
        slowest = ", slowest GPU" if first.slowest_device else ""
        own = figure_text(first.baseline_value, first.unit)
        rows = [(found.baseline, own, "", str(first.boots[0]))]
        rows += [(name, *_effect(of_name[name])) for name in found.alternatives if name in of_name]
        against = f"x {found.baseline} [{found.confidence:.0%} interval]"
        yield Group(
            Text(printable(f"{title}{slowest}: {against}"), style="bold"),
            TableOrList(("jobs", "figure", "x", "rounds"), rows),
        )


def _speaks(effect: Effect) -> bool:
    known = KNOWN.get(effect.metric)
    variants = (None,) if known is None else (None, known.headline)
    rest = (effect.size_bytes, effect.node, effect.device, effect.state)
    return effect.variant in variants and rest == (None,) * 4


def _by_devices(effect: Effect) -> bool:
    return effect.slowest_device


def _effect(effect: Effect) -> tuple[str, str, str]:
    text = multiple_text(effect.ratio)
    if effect.low is not None and effect.high is not None:
        text += f" [{range_text(effect.low, effect.high)}]"
    if effect.outcome is Outcome.CANNOT_TELL:
        text += ", cannot tell"
    return figure_text(effect.value, effect.unit), text, str(effect.boots[1])


def _jobs(jobs: tuple[JobLine, ...], of_all: float, *, everything: bool) -> RenderableType:
    """of_all: GPU-hours of the job of all nodes."""
    odd = [job for job in jobs if job.locality is Locality.LOST]
    shown = jobs if everything or len(jobs) <= _HIDDEN_LINES else tuple(odd)[:_HIDDEN_LINES]
    rows = [
        (
            _job_name(job.name),
            str(job.locality),
            _seconds(job.queue_wait_s),
            "-" if job.gpu_hours is None else f"{job.gpu_hours:.3f}",
            job.met or "-",
        )
        for job in shown
    ]
    titles = ("job", "locality", "waited", "GPU-h", "at once")
    stated = [job.gpu_hours for job in jobs if job.gpu_hours is not None]
    hours = (
        f"{sum(stated) + of_all:.2f} GPU-hours" if stated or of_all else "GPU-hours not recorded"
    )
    placed = sum(job.locality is not Locality.BOUND for job in jobs)
    head = f"jobs: {len(odd)} of {placed} that Slurm placed lost locality; {hours}"
    parts: list[RenderableType] = [Text(head, style="bold"), TableOrList(titles, rows)]
    for job in shown:
        if why := "; ".join(_remarks(job)):
            style = "red" if job.locality is Locality.LOST else ""
            parts.append(Text(printable(f"{_job_name(job.name)}: {why}"), style=style))
    if len(shown) < len(jobs):
        parts.append(Text(f"{len(jobs) - len(shown)} more jobs (--all)"))
    return Group(*parts)


def _job_name(name: str) -> str:
    """Without the attempt; the task only where it is not the first.

    >>> _job_name("exclusive-n1-numa0-task0-12.0"), _job_name("shared-1gpu-n1-alone-task2-7.1")
    ('exclusive-n1-numa0', 'shared-1gpu-n1-alone-task2')
    """
    return re.sub(r"(-task0)?-\d+\.\d+\Z", "", name, flags=re.ASCII)


def _remarks(job: JobLine) -> Iterator[str]:
    if job.why:
        yield job.why
    if job.mode is Mode.ALONE and job.others:
        yield f"not alone: {plural(job.others, 'job')} of others on the node"


def _collective(report: StudyReport) -> RenderableType:
    found = report.collective
    assert found is not None
    rows = [(f"{node} alone", f"{value / 1e9:.1f} GB/s") for node, value in found.nodes]
    rows += [(f"{a} with {b}", f"{value / 1e9:.1f} GB/s") for a, b, value in found.pairs]
    if found.all is not None:
        rows.append(("all nodes", f"{found.all / 1e9:.1f} GB/s"))
    return Group(
        Text("all-reduce", style="bold"), TableOrList(("nodes", "peak bus bandwidth"), rows)
    )


def _outliers(outliers: tuple[Outlier, ...], report: StudyReport) -> RenderableType:
    if not outliers:
        enough = len({matrix.node for matrix in report.matrices}) >= LEAST_NODES
        return Text(
            "no node and no link is slower than its like on the other nodes"
            if enough
            else "slow nodes and links: three nodes at least give them; fewer were measured whole"
        )
    lines = [
        Text(
            printable(
                f"{one.node}: {one.what} is slow: {KNOWN[one.metric].title} "
                f"{_number(one.value, one.metric)} {_unit(one.metric)}, "
                f"{_number(one.usual, one.metric)} elsewhere"
            ),
            style="red",
        )
        for one in outliers
    ]
    return Group(Text("slower than the same place on other nodes", style="bold"), *lines)


def _verdicts(report: StudyReport) -> RenderableType:
    rows = [
        (v.work, str(v.queue) + ("" if v.measured else " (not measured)"), v.rationale)
        for v in report.verdicts
    ]
    evidence = [
        Text(printable(f"  {v.work}: {'; '.join(v.evidence)}"))
        for v in report.verdicts
        if v.evidence
    ]
    return Group(
        Text("which queue", style="bold"),
        TableOrList(("work", "queue", "why"), rows, True),
        Text("evidence"),
        *evidence,
    )


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f} s" if value < 600 else f"{value / 60:.0f} min"


def _unit(metric: str) -> str:
    return "ns" if metric.endswith("latency") else "GB/s"


def _number(value: float, metric: str) -> str:
    return f"{value:.0f}" if metric.endswith("latency") else f"{value / 1e9:.1f}"
