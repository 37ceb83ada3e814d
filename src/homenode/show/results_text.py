"""ResultsText: what a run measured, how layouts compare, and what to run, with every doubt."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence

from homenode.decide.alternative import alternatives
from homenode.decide.comparison import (
    PRINTED,
    WEAKENING,
    Comparison,
    Effect,
    EvidenceLevel,
    Outcome,
)
from homenode.decide.outcomes import is_large
from homenode.decide.recommendation import ReasonId, Recommendation, RecommendedComparison
from homenode.decide.sentences import first_line, ground_of, layout_named, sentence_of
from homenode.decide.summary import Series, SeriesKey, headline
from homenode.decide.words import figure_text, multiple_text, range_text
from homenode.doc import Doc, Part, Section, Span, Table, Text
from homenode.findings import Doubt
from homenode.measure.derived_run import schedule_of
from homenode.measure.orders import BenchOutcome
from homenode.measure.run_folder import RunRecord
from homenode.metrics import METRICS, metric_of
from homenode.show.trial_text import duration_text
from homenode.units import format_bytes
from homenode.wording import plural

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


_HEADS = ("metric", "baseline", "value", "effect", "interval", "outcome")
_OUTCOMES = {
    Outcome.BETTER: "better",
    Outcome.WORSE: "worse",
    Outcome.NO_DIFFERENCE: "no difference that matters",
    Outcome.CANNOT_TELL: "cannot tell",
}


def comparison_text(comparison: RecommendedComparison, *, everything: bool = False) -> Doc:
    """What to run, a table for each alternative, primary metrics first, doubts, what was skipped.

    everything: also why of many machines, sources, and series of single devices, nodes, sizes and
    pairs of PUs.
    """
    parts = list(_verdicts(comparison, everything))
    pairs: dict[tuple[str, str, str], list[Effect]] = {}
    for one in comparison.effects:
        pairs.setdefault((one.system, one.alternative, one.baseline), []).append(one)
    for (system, label, baseline), effects in pairs.items():
        against = f"{label} against {'bare metal' if comparison.bare else baseline}"
        title = f"{system}: {against}" if system else against
        parts.append(Section(title, tuple(_tables(comparison, effects, everything))))
    for label in comparison.alternatives:
        if not comparison.effects:
            parts.append(Text(f"{label} and {comparison.baseline} have no series in common"))
    parts += power_table(comparison.power)
    parts += (Section("", tuple(_doubts(comparison.doubts))), Text(""))
    parts += [Text(f"skipped: {one}", "warn") for one in comparison.skipped]
    about = (
        f"intervals: {comparison.confidence:.0%}, over boots (t, on logarithms of medians); "
        "primary metrics are corrected for their number"
    )
    return Doc("", (*parts, Text(about)))


def power_table(power: Mapping[str, Mapping[str, float]]) -> tuple[Table, ...]:
    """Watts by alternative and test, a column for each alternative; none where none is known."""
    tests = dict.fromkeys(test for drawn in power.values() for test in drawn)
    rows = tuple(
        (test, *(f"{drawn[test]:.0f} W" if test in drawn else "-" for drawn in power.values()))
        for test in tests
    )
    heads = ("power of a GPU, median", *power)
    return (Table(heads=heads, rows=rows, numeric=tuple(power)),) if rows else ()


def _doubts(doubts: Iterable[Doubt]) -> Iterator[Text]:
    """Each doubt with its likely cause and its remedy."""
    for doubt in doubts:
        head = "cannot tell" if doubt.blocks and doubt.id not in WEAKENING else "doubt"
        yield Text(f"{head}: {doubt.subject}: {doubt.detail}  ({doubt.id})")
        yield Text(f"likely cause  {doubt.cause}", indent=2)
        yield Text(f"remedy        {doubt.remedy}", indent=2)


def _tables(comparison: Comparison, effects: Sequence[Effect], everything: bool) -> Iterator[Part]:
    primary = [one for one in effects if one.primary]
    rest = [one for one in effects if not one.primary]
    shown = [one for one in rest if everything or _is_whole(one)]
    for title, of in (("primary", primary), ("for information only", shown)):
        if of:
            counts = sorted({one.boots for one in of})
            boots = ", ".join(f"{first} and {second}" for first, second in counts)
            rows = tuple(_row(comparison, one) for one in of)
            yield Text(f"{title}; boots: {boots}")
            yield Table(heads=_HEADS, rows=rows, folds=_HEADS[-1:])
    if hidden := len(rest) - len(shown):
        yield Text(f"{plural(hidden, 'more series', 'more series')} with --all")


def _is_whole(effect: Effect) -> bool:
    if effect.metric == "core-to-core-latency":
        return False  # one pair of PUs: a large guest has thirty thousand
    return effect.slowest_device or (
        (effect.device, effect.peer, effect.node, effect.peer_node, effect.size_bytes)
        == (None,) * 5
    )


def _row(comparison: Comparison, effect: Effect) -> tuple[str, ...]:
    return (
        _name(effect),
        figure_text(effect.baseline_value, effect.unit),
        figure_text(effect.value, effect.unit),
        f"{effect.gain:.1%} of bare" if comparison.bare else multiple_text(effect.ratio),
        _interval(effect),
        _outcome(effect),
    )


def _interval(effect: Effect) -> str:
    if effect.low is None or effect.high is None:
        return "-"
    return range_text(effect.low, effect.high)


def _outcome(effect: Effect) -> str:
    stated = _OUTCOMES[effect.outcome]
    if effect.outcome in (Outcome.BETTER, Outcome.WORSE) and not is_large(effect):
        stated += ", less than matters"
    if effect.outcome is not Outcome.CANNOT_TELL and effect.level is not EvidenceLevel.MEASURED:
        counts = "one figure" if PRINTED in effect.doubts else _boots(effect)
        return f"{stated} ({effect.level}, {counts} each)"
    if effect.doubts:
        return f"{stated}: {', '.join(effect.doubts)}"
    if effect.p_adjusted is not None:
        return f"{stated} (p {effect.p_adjusted:.2g})"
    return stated


def _boots(effect: Effect) -> str:
    low, high = sorted(effect.boots)
    return plural(low, "boot") if low == high else f"{low} to {high} boots"


def _name(effect: Effect) -> str:
    metric = metric_of(effect.metric)
    parts = [effect.metric if metric is None else metric.title]
    if effect.slowest_device:
        parts.append("slowest GPU")
    parts += [
        text
        for text in (
            effect.variant,
            None if effect.size_bytes is None else format_bytes(effect.size_bytes),
            None if effect.node is None else f"node {effect.node}",
            None if effect.peer_node is None else f"from node {effect.peer_node}",
            None if effect.device is None else str(effect.device),
            None if effect.peer is None else f"to {effect.peer}",
            None if effect.state is None else f"state {effect.state}",
        )
        if text is not None
    ]
    return ", ".join(parts)


SAID_BY_LEVEL = frozenset({PRINTED, "unusable"})
"""Doubts that the level of the evidence, or the answer itself, says already."""


MOST_IN_FULL = 3
"""Machines; of more, a line says what to run on each."""


def _verdicts(comparison: RecommendedComparison, everything: bool) -> Iterator[Part]:
    """One section per machine."""
    systems: dict[str, list[Recommendation]] = {}
    for verdict in comparison.recommendations:
        systems.setdefault(verdict.system, []).append(verdict)
    in_full = everything or len(systems) <= MOST_IN_FULL
    for name, verdicts in systems.items():
        lines = _of_system(verdicts, comparison.doubts, everything) if in_full else ()
        yield Section(first_line(name, verdicts), tuple(lines))
    if not systems:
        yield Text("no figures for any objective")
    if not in_full:
        yield Text("Why: name the results of one machine, or give --all (all of it)", "dim")


def _of_system(
    answers: Sequence[Recommendation], listed: Sequence[Doubt], everything: bool
) -> Iterator[Text]:
    sick = [answer for answer in answers if answer.why(ReasonId.HEALTH) is not None]
    for answer in answers:
        if answer not in sick:
            yield from _block(answer, str(answer.objective), everything)
        elif answer is sick[0]:  # the same of every objective
            yield from _block(answer, ", ".join(str(one.objective) for one in sick), everything)
    for line in dict.fromkeys(line for answer in answers for line in doubts_of(answer, listed)):
        yield Text(f"caveat: {line}")


def doubts_of(verdict: Recommendation, listed: Sequence[Doubt] = ()) -> tuple[str, ...]:
    """The doubts that its level does not say already, with remedies. listed: elsewhere, in full."""
    stated = [one for one in verdict.doubts if one.id not in SAID_BY_LEVEL]
    known = {one.id for one in listed}
    return tuple(
        f"{one.id}: {one.detail}"
        if one.id in known
        else f"{one.detail}; {one.remedy}; likely cause: {one.cause}"
        for one in stated
    )


def _block(answer: Recommendation, objective: str, everything: bool) -> Iterator[Text]:
    layout = layout_named(answer) if answer.choice else "no answer"
    name = Span(layout, "good" if answer.tells else "warn")
    yield Text((Span(f"{objective}: ", "bold"), name, f"  [{ground_of(answer)}]"))
    lines = [sentence_of(answer)]
    if answer.measure_next is not None:
        lines.append(f"measure next: {answer.measure_next}")
    lines += [one.detail for one in answer.reasons if one.id is ReasonId.PASSED]
    if everything:
        lines += [f"source: {one}" for one in answer.sources]
    yield from (Text(line, indent=2) for line in lines)
