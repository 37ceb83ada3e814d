"""Bench text: what a run measured, in a table of medians. The interval is compare's business."""

import shlex

from homenode.analyse.alternative import alternatives
from homenode.analyse.summary import Series, SeriesKey, headline
from homenode.analyse.words import figure_text
from homenode.doc import Doc, Part, Table, Text
from homenode.measure.derived_run import schedule_of
from homenode.measure.orders import BenchOutcome
from homenode.measure.record import RunRecord
from homenode.metrics import METRICS, metric_of
from homenode.report.progress_text import duration_text

_GAPS = 12


def bench_text(outcome: BenchOutcome) -> Doc:
    """Medians of what speaks for each metric, then what is not there and why."""
    parts: list[Part] = []
    if outcome.run is not None:
        found = [one.series for one in alternatives((outcome.run,))]
        parts += [_table(series) for series in found if series]
        parts += [Text(f"marked: {reason}", "warn") for reason in outcome.run.head.unusable]
    parts += [Text(f"not measured: {gap}") for gap in outcome.gaps[:_GAPS]]
    if len(outcome.gaps) > _GAPS:
        parts.append(Text(f"not measured: {len(outcome.gaps) - _GAPS} more"))
    return Doc("", tuple(parts))


def steps_text(record: RunRecord) -> Doc:
    """What would be run, in order, with what it takes."""
    tests = {test.id: test for test in record.tests}
    steps = schedule_of(record).tasks
    rows = tuple(
        (
            str(step.number + 1),
            "before" if step.round < 0 else str(step.round + 1),
            step.variant + (" (control)" if step.is_control else ""),
            f"{tests[step.variant].seconds:g} s",
            shlex.join(tests[step.variant].argv),
        )
        for step in steps
    )
    heads = ("step", "round", "test", "takes", "command")
    seconds = sum(tests[step.variant].seconds for step in steps)
    left = (Text(f"not measured: {gap}") for gap in record.left_out)
    table = Table(heads=heads, rows=rows, folds=heads[-1:])
    return Doc("", (table, Text(f"about {duration_text(seconds)}"), *left))


def _table(series: dict[SeriesKey, Series]) -> Table:
    rows: list[tuple[str, ...]] = []
    own = sorted(
        {key.metric for key in series if key.metric not in METRICS and metric_of(key.metric)}
    )
    for name in (*METRICS, *own):
        metric = metric_of(name)
        assert metric is not None
        for key in headline(series, metric) or _others(series, name):
            one = series[key]
            rows.append(
                (
                    ", ".join(filter(None, (metric.title, _of(key)))),
                    *(figure_text(value, key.unit) for value in (one.value, one.low, one.high)),
                    str(one.samples),
                )
            )
    figures = ("median", "lowest", "highest", "samples")
    return Table(heads=("figure", *figures), rows=tuple(rows), numeric=figures)


def _others(series: dict[SeriesKey, Series], id: str) -> tuple[SeriesKey, ...]:
    """Series of a metric without a headline: pairs of PUs, say; the first few."""
    return tuple(key for key in series if key.metric == id and key.size_bytes is None)[:8]


def _of(key: SeriesKey) -> str:
    state = key.state
    if state is not None and state.endswith(" ns"):
        state = f"PUs {state} apart"
    parts = [key.variant, state]
    parts += [None if key.device is None else str(key.device), "slowest GPU" if key.worst else None]
    if key.node is not None:
        parts.append(
            f"node {key.node} to {key.peer_node}"
            if key.peer_node is not None
            else f"node {key.node}"
        )
    return ", ".join(part for part in parts if part)
