"""SlurmStudy: a study's report for a terminal and as a page: queues, maps, comparisons, jobs."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from homenode.cluster.slurm.study.evidence import CollectivePeaks
from homenode.cluster.slurm.study.experiments import NodeSharing
from homenode.cluster.slurm.study.locality import JobLocality
from homenode.cluster.slurm.study.maps import MIN_NODES, Outlier, StudyMatrix
from homenode.cluster.slurm.study.report import (
    CopySpread,
    RecommendedQueue,
    StudyReport,
    describe_copies,
)
from homenode.decide.comparison import Comparison, Effect, Outcome
from homenode.decide.sentences import MAX_LINE
from homenode.doc import Cell, Doc, Gallery, Items, Part, Picture, Section, Table, Text
from homenode.metrics import METRICS, format_bounds, format_multiple, format_value
from homenode.show.bars import Bar, BarGroup, build_bar_chart
from homenode.show.curves import Matrix as HeatMatrix
from homenode.show.curves import heat_map
from homenode.show.results_text import build_power_table
from homenode.text import format_duration, plural, shorten_list

_SHADES = 5
_MAX_NAMED = 2
"""Maximum number of nodes, jobs or unknowns that a line of the summary names."""
MAX_MAPS = 24
"""Maximum number of heat maps on a page: the first cluster nodes. Its tables have them all."""


def build_study_summary(report: StudyReport, next_command: str) -> Doc:
    """Return the recommended queues, the facts behind them and what is not known, in 25 lines."""
    parts: list[Part] = [*_format_warnings(report), _queue_table(report)] if report.jobs else []
    lines = tuple(_format_summary_lines(report))
    width = max((len(label) for label, _, _ in lines), default=len("next")) + 2
    parts += [Text(f"{label:<{width}}{text}", look, hang=width) for label, text, look in lines]
    parts.append(Text(f"{'next':<{width}}{next_command}", hang=width, command=next_command))
    return Doc(_first_line(report), tuple(parts))


def _format_summary_lines(report: StudyReport) -> Iterator[tuple[str, str, str]]:
    """Yield labels with their text and its look."""
    matrices = (m for m in report.matrices if m.metric == "h2d-bandwidth" and m.local is not None)
    yield from (("copies", describe_copies(matrix), "") for matrix in islice(matrices, 1))
    if report.jobs:
        yield "locality", _format_jobs_title(report), ""
    if report.outliers:
        texts = map(_describe_outlier, report.outliers)
        yield "slow", shorten_list(texts, _MAX_NAMED, "; "), "bad"
    if report.missing:
        yield "missing", shorten_list(report.missing, _MAX_NAMED, "; "), "bad"
    unknown = [str(gap) for gap in report.gaps]
    if report.jobs and not report.outliers and not _has_enough_nodes(report):
        unknown.append(_TOO_FEW_NODES)
    if unknown:
        yield "unknown", shorten_list(unknown, _MAX_NAMED, "; "), "warn"


def format_slurm_study(report: StudyReport) -> Doc:
    """Return the whole report: every recommendation with its evidence, map, job and unknown."""
    queues = (_queue_section(report),) if report.jobs else ()
    return Doc(_first_line(report), (*_format_warnings(report), *queues, *_format_results(report)))


def _first_line(report: StudyReport) -> str:
    """Return the queues that results decide: "study: exclusive for memory-bound GPU codes"."""
    uses: dict[str, list[str]] = {}
    for answer in report.recommendations:
        if answer.measured and answer.queue is not RecommendedQueue.UNKNOWN:
            uses.setdefault(answer.queue, []).append(answer.work.partition(" (")[0])
    if not uses:
        jobs, nodes = plural(len(report.jobs), "job"), plural(len(report.nodes), "node")
        return f"{report.source}: cannot tell which queue is best: {jobs} on {nodes}"
    parts = [f"{queue} for {' and '.join(works)}" for queue, works in uses.items()]
    lines = [f"{report.source}: {shorten_list(parts, n, '; ')}" for n in range(len(parts), 0, -1)]
    return next((line for line in lines if len(line) <= MAX_LINE), lines[-1])


def build_study_page(report: StudyReport, stamp: str) -> Doc:
    """Return the recommendations, drawn maps, bars and tables, then every map, job and unknown.
    stamp: time and program."""
    parts: list[Part] = list(_format_warnings(report))
    if report.jobs:
        parts.append(_queue_section(report))
    if maps := tuple(_draw_maps(report.matrices[:MAX_MAPS])):
        parts.append(Section("Copies by NUMA node and GPU", (Gallery(maps),), "maps", "Maps"))
    if bars := tuple(_draw_bars(report.spreads)):
        about = "Copies by copy engine (CE) and by the GPU's own processors (SM)."
        title = "Mean and deviation over GPUs, nodes and jobs"
        parts.append(Section(title, (Gallery(bars),), "spreads", "Spreads", about=about))
    if report.setup:
        table = Table(heads=("what", "which"), rows=report.setup)
        parts.append(Section("Hardware and tools", (table,), "setup", "Hardware and tools"))
    title = "Every result and job"
    parts.append(Section(title, tuple(_format_results(report)), "every", title))
    return Doc(f"Slurm study {report.source}", tuple(parts), footer=stamp)


def _format_warnings(report: StudyReport) -> Iterator[Part]:
    for notice in report.replayed:
        text = f"REPLAYED: {notice}. GPU results here do not describe any machine."
        yield Text(text, "critical")
    if len(report.systems) > 1:
        kinds = ", ".join(report.systems)
        yield Text(
            f"MIXED: GPUs of several kinds ({kinds}). Means over all nodes, slow nodes and queues "
            "below mix them: report studies of one kind alone (--nodelist).",
            "critical",
        )


def _format_results(report: StudyReport) -> Iterator[Section]:
    """Yield maps, comparisons, jobs, power, collectives, slow nodes, missing jobs and unknowns."""
    yield from map(_map, report.matrices)
    for comparison in report.comparisons:
        yield from _format_comparison(comparison)
    if report.jobs:
        yield _format_jobs(report)
    if table := build_power_table(report.power):
        yield Section("", table)
    if report.collective is not None:
        yield _format_collective(report.collective)
    if report.jobs:
        yield _format_outliers(report)
    if report.missing:
        yield Section("missing", tuple(Text(job, "bad") for job in report.missing))
    if report.gaps:
        yield Section("", (Items(tuple(f"unknown: {gap}" for gap in report.gaps)),))


def _map(matrix: StudyMatrix) -> Section:
    """Return a shaded map of GPUs by NUMA nodes, with [ ] at each GPU's home."""
    metric = METRICS[matrix.metric]
    values = [value for row in matrix.cells for value in row if value is not None]
    ends = min(values), max(values)
    rows = []
    for number, (column, home) in enumerate(zip(matrix.columns, matrix.homes, strict=True)):
        cells = zip((row[number] for row in matrix.cells), matrix.rows, strict=True)
        shades = (
            _format_cell(cell, ends, matrix.metric, is_home=home == row) for cell, row in cells
        )
        rows.append((_shorten_address(column), *shades))
    heads = tuple(f"node {index}" for index in matrix.rows)
    parts: list[Part] = [Table(heads=("GPU", *heads), rows=tuple(rows), numeric=heads)]
    if matrix.local is not None and matrix.remote is not None:
        local, remote = (_number(value, matrix.metric) for value in (matrix.local, matrix.remote))
        parts.append(Text(f"local {local}, remote {remote}: {matrix.ratio:.2f}x"))
    how = " ([ ] is local, derived from these results)" if matrix.homes_measured else ""
    how = how or (" ([ ] is local)" if any(h is not None for h in matrix.homes) else "")
    title = f"{matrix.node}: {metric.title}, {_format_unit(matrix.metric)}{how}"
    return Section(title, tuple(parts))


def _format_cell(
    value: float | None, ends: tuple[float, float], metric: str, *, is_home: bool
) -> str | Cell:
    if value is None:
        return "-"
    text = _number(value, metric)
    low, high = ends
    look = ""
    if high > low * 1.02:
        place = (value - low) / (high - low)
        place = 1 - place if METRICS[metric].lower_is_better else place
        look = f"heat{min(_SHADES - 1, int(place * _SHADES))}"
    return Cell((f"[{text}]" if is_home else f"{text} ",), look)


def _shorten_address(column: str) -> str:
    return column.removeprefix("0000:").removesuffix(":00.0").removesuffix(".0")


def _format_comparison(comparison: Comparison) -> Iterator[Section]:
    """Yield a table for each metric: alternatives in rows, compared with the first."""
    shown_effects = [effect for effect in comparison.effects if _is_headline_effect(effect)]
    effects = sorted(shown_effects, key=lambda effect: effect.slowest_device)
    for metric in dict.fromkeys(effect.metric for effect in shown_effects):
        of_name = {effect.alternative: effect for effect in effects if effect.metric == metric}
        first = next(iter(of_name.values()))
        title = METRICS[metric].title if metric in METRICS else metric
        slowest = ", slowest GPU" if first.slowest_device else ""
        baseline = format_value(first.baseline_value, first.unit)
        rows = [(comparison.baseline, baseline, "", str(first.boots[0]))]
        rows += [
            (name, *format_effect_cells(of_name[name]))
            for name in comparison.alternatives
            if name in of_name
        ]
        baseline_text = f"x {comparison.baseline} [{comparison.confidence:.0%} interval]"
        table = Table(heads=("jobs", "result", "x", "rounds"), rows=tuple(rows))
        yield Section(f"{title}{slowest}: {baseline_text}", (table,))


def _is_headline_effect(effect: Effect) -> bool:
    metric = METRICS.get(effect.metric)
    variants = (None,) if metric is None else (None, metric.headline)
    restrictions = (effect.size_bytes, effect.node, effect.device, effect.state)
    return effect.variant in variants and restrictions == (None,) * 4


def format_effect_cells(effect: Effect) -> tuple[str, str, str]:
    text, is_clear = format_multiple(effect.ratio), False
    if effect.low is not None and effect.high is not None:
        lower = effect.lower_is_better
        text += f" [{format_bounds(effect.low, effect.high, lower_is_better=lower)}]"
        is_clear = not effect.low <= 1 <= effect.high
    if effect.outcome is Outcome.CANNOT_TELL:
        reason = ", ".join(effect.caveats) or "corrected for several comparisons"
        text += f", cannot tell: {reason}" if is_clear else ", cannot tell"
    return format_value(effect.value, effect.unit), text, str(effect.boots[1])


def _format_jobs(report: StudyReport) -> Section:
    rows = tuple(
        (
            _job_name(job.name),
            str(job.locality),
            "-" if job.queue_wait_s is None else format_duration(job.queue_wait_s),
            "-" if job.gpu_hours is None else f"{job.gpu_hours:.3f}",
            job.met or "-",
        )
        for job in report.jobs
    )
    parts: list[Part] = [Table(heads=("job", "locality", "waited", "GPU-h", "at once"), rows=rows)]
    for job in report.jobs:
        remark = [job.reason] if job.reason else []
        if job.mode is NodeSharing.ALONE and job.other_jobs:
            remark.append(f"not alone: {plural(job.other_jobs, 'job')} of others on the node")
        if remark:
            look = "bad" if job.locality is JobLocality.LOST else ""
            parts.append(Text(f"{_job_name(job.name)}: {'; '.join(remark)}", look))
    return Section(_format_jobs_title(report), tuple(parts))


def _format_jobs_title(report: StudyReport) -> str:
    """Return the number of jobs, their locality and their GPU-hours, with the job of all nodes."""
    jobs, collective = report.jobs, report.collective
    of_all = 0.0 if collective is None else collective.gpu_hours or 0.0
    gpu_hours = [job.gpu_hours for job in jobs if job.gpu_hours is not None]
    hours = "GPU-hours not recorded"
    if gpu_hours or of_all:
        hours = f"{sum(gpu_hours) + of_all:.2f} GPU-hours"
    lost_count = sum(job.locality is JobLocality.LOST for job in jobs)
    count = sum(job.locality is not JobLocality.BOUND for job in jobs)
    nodes = plural(len({job.node for job in jobs}), "node")
    title = f"{plural(len(jobs), 'job')} on {nodes}: {lost_count} of {count} that Slurm placed "
    return f"{title}lost locality; {hours}"


def _job_name(name: str) -> str:
    """Return a job's name without the attempt, and without the task if it is the first.

    >>> _job_name("exclusive-n1-numa0-task0-12.0"), _job_name("shared-1gpu-n1-alone-task2-7.1")
    ('exclusive-n1-numa0', 'shared-1gpu-n1-alone-task2')
    """
    return re.sub(r"(-task0)?-\d+\.\d+\Z", "", name, flags=re.ASCII)


def _format_collective(collective: CollectivePeaks) -> Section:
    values = [(f"{node} alone", value) for node, value in collective.nodes]
    values += [(f"{a} with {b}", value) for a, b, value in collective.pairs]
    values += [] if collective.all is None else [("all nodes", collective.all)]
    rows = [(name, format_value(value, "bytes_per_s")) for name, value in values]
    return Section("all-reduce", (Table(heads=("nodes", "peak bus bandwidth"), rows=tuple(rows)),))


_TOO_FEW_NODES = "slow nodes: fewer than three whole nodes measured the same copies"


def _has_enough_nodes(report: StudyReport) -> bool:
    counts = Counter((m.metric, gpu) for m in report.matrices for gpu in m.columns)
    return max(counts.values(), default=0) >= MIN_NODES


def _format_outliers(report: StudyReport) -> Section:
    if not report.outliers:
        is_known = _has_enough_nodes(report)
        text = "no node is slower than the others" if is_known else f"unknown: {_TOO_FEW_NODES}"
        return Section("", (Text(text),))
    lines = tuple(Text(_describe_outlier(outlier), "bad") for outlier in report.outliers)
    return Section("slower than the same place on other nodes", lines)


def _describe_outlier(outlier: Outlier) -> str:
    return (
        f"{outlier.node}: {outlier.part} is slow: {METRICS[outlier.metric].title} "
        f"{_number(outlier.value, outlier.metric)} {_format_unit(outlier.metric)}, "
        f"{_number(outlier.usual, outlier.metric)} elsewhere"
    )


def _queue_table(report: StudyReport) -> Table:
    rows = tuple(
        (
            answer.work,
            str(answer.queue)
            + (
                ""
                if answer.measured or answer.queue is RecommendedQueue.UNKNOWN
                else " (not measured)"
            ),
            answer.rationale,
        )
        for answer in report.recommendations
    )
    return Table(heads=("work", "queue", "why"), rows=rows, folds=("why",))


def _queue_section(report: StudyReport) -> Section:
    parts: list[Part] = [_queue_table(report)]
    evidence = tuple(
        f"{answer.work}: {'; '.join(answer.evidence)}"
        for answer in report.recommendations
        if answer.evidence
    )
    if evidence:
        parts.append(Section("Evidence", (Items(evidence),)))
    return Section("Which queue for which work", tuple(parts), "queues", "Queues")


def _format_unit(metric: str) -> str:
    return "ns" if metric.endswith("latency") else "GB/s"


def _number(value: float, metric: str) -> str:
    return f"{value:.0f}" if metric.endswith("latency") else f"{value / 1e9:.1f}"


def _draw_maps(matrices: Sequence[StudyMatrix]) -> Iterator[Picture]:
    """Yield the heat maps; those of one metric have the same colours."""
    ends: dict[str, tuple[float, float]] = {}
    for matrix in matrices:
        values = [value for row in matrix.cells for value in row if value is not None]
        low, high = ends.get(matrix.metric, (min(values), max(values)))
        ends[matrix.metric] = min(low, *values), max(high, *values)
    for matrix in matrices:
        metric = METRICS[matrix.metric]
        title = f"{matrix.node}: {metric.title}"
        # The seed's own sides: CPU NUMA package down, target GPU across.
        grid = HeatMatrix(
            "NUMA node of CPUs and memory",
            "GPU",
            tuple(f"NUMA {row}" for row in matrix.rows),
            tuple(map(_shorten_address, matrix.columns)),
            matrix.cells,
        )
        caption = metric.better
        if matrix.local is not None and matrix.remote is not None and matrix.ratio is not None:
            caption += (
                f"; local {format_value(matrix.local, metric.unit)}, remote "
                f"{format_value(matrix.remote, metric.unit)}: {matrix.ratio:.2f}x"
            )
        if matrix.homes_measured:
            caption += "; which node is local is derived from these results"
        yield Picture(title, heat_map(title, metric.unit, grid, ends[matrix.metric]), (caption,))


def _format_deviation(spread: CopySpread) -> str:
    count = f"n = {spread.count}"
    if spread.deviation is None:
        return count
    return f"\u00b1 {_number(spread.deviation, spread.metric)}, {count}"


def _draw_bars(spreads: Sequence[CopySpread]) -> Iterator[Picture]:
    for metric in dict.fromkeys(spread.metric for spread in spreads):
        groups = []
        for method in dict.fromkeys(spread.method for spread in spreads if spread.metric == metric):
            bars = [
                Bar(
                    spread.label,
                    spread.mean,
                    max(spread.mean - (spread.deviation or 0.0), 0.0),
                    spread.mean + (spread.deviation or 0.0),
                    number % 8,
                    note=_format_deviation(spread),
                )
                for number, spread in enumerate(
                    s for s in spreads if (s.metric, s.method) == (metric, method)
                )
            ]
            groups.append(BarGroup(f"by {method}", tuple(bars)))
        facts = METRICS[metric]
        title = f"{facts.title}, mean \u00b1 deviation"
        yield Picture(title, build_bar_chart(title, facts.unit, groups), (facts.better,))
