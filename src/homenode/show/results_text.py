"""ResultsText: a run's results, comparisons of layouts, and recommendations with caveats."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from homenode.decide.alternative import group_runs
from homenode.decide.compare import is_whole
from homenode.decide.comparison import (
    NO_ORDER,
    NODELESS,
    PRINTED,
    SLOW_IN_ONE,
    WEAKENING,
    Comparison,
    Effect,
    EvidenceLevel,
    Outcome,
    is_large,
    join_subjects,
)
from homenode.decide.machine_facts import NOT_OF_MACHINE
from homenode.decide.recommendation import (
    ANY_MACHINE,
    ReasonId,
    Recommendation,
    RecommendedComparison,
    rests_on_rule_alone,
)
from homenode.decide.sentences import (
    MAX_LINE,
    format_answer,
    format_basis,
    format_boots,
    format_layout_name,
    format_sentence,
)
from homenode.decide.summary import Series, SeriesKey, choose_headline
from homenode.doc import Cell, Doc, Part, Section, Table, Text
from homenode.findings import Caveat, Gap
from homenode.measure.derived_run import schedule_of
from homenode.measure.gpu_tests import TOPOLOGY_FILE
from homenode.measure.model import BenchOutcome
from homenode.measure.results.placement_states import parse_latency_ns
from homenode.measure.run_directory import RunRecord
from homenode.metrics import METRICS, find_metric, format_bounds, format_change, format_value
from homenode.text import command_line, format_duration, plural, shorten_list
from homenode.units import format_bytes
from homenode.vm.layout import PRESETS

_GAPS = 12


def format_bench(outcome: BenchOutcome) -> Doc:
    """Return medians of the main series of each metric, then missing results with reasons."""
    parts: list[Part] = []
    if outcome.run is not None:
        series_list = [alternative.series for alternative in group_runs((outcome.run,))]
        parts += [_build_table(series) for series in series_list if series]
        parts += [Text(f"marked: {reason}", "warn") for reason in outcome.run.head.unusable]
    parts += [Text(f"not measured: {gap}") for gap in outcome.gaps[:_GAPS]]
    if len(outcome.gaps) > _GAPS:
        parts.append(Text(f"not measured: {len(outcome.gaps) - _GAPS} more"))
    return Doc("", tuple(parts))


def format_steps(record: RunRecord) -> Doc:
    """Return the tests that would run, in order, with their durations."""
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
    gaps = (Text(f"not measured: {gap}") for gap in record.omitted)
    table = Table(heads=heads, rows=rows, folds=heads[-1:])
    return Doc(f"{plural(len(rows), 'step')}, about {format_duration(seconds)}", (table, *gaps))


def _build_table(series: dict[SeriesKey, Series]) -> Table:
    rows: list[tuple[str, ...]] = []
    of_user = {key.metric for key in series if find_metric(key.metric)} - METRICS.keys()
    for name in (*METRICS, *sorted(of_user)):
        metric = find_metric(name)
        assert metric is not None
        for key in choose_headline(series, metric) or _list_other_series(series, name):
            of_key = series[key]
            name = ", ".join(filter(None, (metric.title, format_place(key))))
            values = (of_key.value, of_key.low, of_key.high)
            texts = (format_value(value, key.unit) for value in values)
            rows.append((name, *texts, str(of_key.samples)))
    numeric = ("median", "lowest", "highest", "samples")
    return Table(heads=("result", *numeric), rows=tuple(rows), numeric=numeric)


def _list_other_series(series: dict[SeriesKey, Series], id: str) -> tuple[SeriesKey, ...]:
    """Return the first few series of a metric without a main series, such as pairs of CPUs."""
    return tuple(key for key in series if key.metric == id and key.size_bytes is None)[:8]


def format_place(key: SeriesKey) -> str:
    """Return the text that distinguishes a series from others of its metric."""
    state = key.state
    if state is not None and parse_latency_ns(state) is not None:
        state = f"CPUs {state} apart"
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


MAX_IN_FULL = 3
"""Maximum of machines with tables; with more, a line has each recommendation."""

_MAX_CAVEATS = 4


def format_comparison(comparison: RecommendedComparison, *, everything: bool = False) -> Doc:
    """Return the recommendation for each machine, a table of results by layout, and the reasons.
    everything: also effects with intervals, fixes of caveats, sources, and single series."""
    systems: dict[str, list[Recommendation]] = {}
    for answer in comparison.recommendations:
        systems.setdefault(answer.system, []).append(answer)
    if not everything and len(systems) > MAX_IN_FULL:
        lines = tuple(
            Text(format_answer(name, answers), "bold")
            for name, answers in systems.items()
            if name != ANY_MACHINE
        )
        hint = "next  name the results of one machine, or add --explain"
        return Doc("", (*lines, *_format_skipped(comparison), Text(hint, "dim")))
    parts: list[Part] = []
    is_shown = False
    for name, answers in systems.items():
        rows = _build_objective_rows(answers, everything)
        is_shown = is_shown or rows is not None or _is_passed(answers, comparison)
        is_shown = is_shown or any(answer.layout is not None for answer in answers)
        table = () if rows is None else (rows,)
        reasons = _format_reasons(answers, comparison, everything)
        parts.append(
            Section(format_answer(name, answers), (Text(""), *table, *reasons), look="bold")
        )
    if everything or not is_shown:
        parts += _build_effect_tables(comparison, everything)
        parts.append(Section("", tuple(_format_caveats(comparison.caveats))))
    parts += build_power_table(comparison.power)
    if everything:
        about = f"intervals: {comparison.confidence:.0%}, over boots (t, on logarithms of medians)"
        parts.append(Text(f"{about}; primary metrics are corrected for their number"))
    if everything or not systems:
        parts += _format_skipped(comparison)
    return Doc("", tuple(parts))


def _format_skipped(comparison: Comparison) -> Iterator[Text]:
    for line in _format_gaps(comparison.skipped):
        yield Text(f"not read  {line}", "warn", hang=10)


def _format_gaps(gaps: Iterable[Gap]) -> Iterator[str]:
    subjects: dict[str, list[str]] = {}
    for gap in gaps:
        subjects.setdefault(gap.reason, []).append(gap.subject)
    yield from (f"{shorten_list(names, 1)}: {reason}" for reason, names in subjects.items())


def _build_objective_rows(answers: Sequence[Recommendation], everything: bool) -> Table | None:
    """Return a row per objective, a column per layout; None without results of two layouts."""
    layouts = sorted(sorted(_list_labels(answers)), key=lambda name: [*PRESETS, name].index(name))
    pairs = list(_list_shown_results(answers, everything))
    units = {result.unit for answer, metric in pairs for result in answer.list_results(metric)}
    # Values of a pair have units, and their change has a column.
    is_pair = len(layouts) == 2 and all(len(format_value(1, unit)) < _WIDE for unit in units)
    rows: list[tuple[str | Cell, ...]] = []
    for answer, metric in pairs:
        results = {result.alternative: result for result in answer.list_results(metric)}
        texts = {name: format_value(result.value, result.unit) for name, result in results.items()}
        unit = next(iter(texts.values())).partition(" ")[2]
        cells = [texts.get(layout, "-") for layout in layouts]
        title = METRICS[metric].title.partition(",")[0].removeprefix("memory ")
        if is_pair:
            first, second = (results[layout].value for layout in layouts)
            lower = METRICS[metric].lower_is_better
            cells.append(format_change(second / first, lower_is_better=lower))
        else:
            cells = [cell.removesuffix(f" {unit}") for cell in cells]
        run = Cell((format_layout_name(answer),), "good")
        run = run if answer.tells else Cell(("cannot tell",), "warn")
        several = not is_pair and len(answer.metrics) > 1
        subject = f"{answer.objective}, {title}" if several else answer.objective
        rows.append((subject, title if is_pair else unit, *cells, run))
    change = ("change",) if is_pair else ()
    heads = ("objective", "result" if is_pair else "unit", *layouts, *change, "run")
    return Table(heads=heads, rows=tuple(rows), numeric=tuple(layouts)) if rows else None


_WIDE = 14  # characters of a value, such as "1 of the reference"


def _list_labels(answers: Sequence[Recommendation]) -> set[str]:
    return {result.alternative for answer in answers for result in answer.results}


def _list_shown_results(
    answers: Sequence[Recommendation], everything: bool
) -> Iterator[tuple[Recommendation, str]]:
    """Yield objectives with metrics that have two results, answered ones first; without everything
    no open objective whose metrics another objective has."""
    seen_texts: set[str] = set()
    for answer in sorted(answers, key=lambda answer: not answer.tells):
        metrics = [metric for metric in answer.metrics if len(answer.list_results(metric)) > 1]
        for metric in metrics:
            if everything or answer.tells or metric not in seen_texts:
                yield answer, metric
        seen_texts.update(metrics)


def _format_reasons(
    answers: Sequence[Recommendation], comparison: RecommendedComparison, everything: bool
) -> Iterator[Part]:
    """Yield the reason for each objective with results, the caveats, and what to measure next."""
    lines: list[tuple[str, str, str]] = []
    objectives_of_rule: dict[str, list[str]] = {}
    blocked_answers = [answer for answer in answers if answer.is_blocked]
    shown_objectives = {answer.objective for answer, _ in _list_shown_results(answers, everything)}
    for answer in sorted(answers, key=lambda answer: not answer.tells):
        is_listed = everything or answer.objective in shown_objectives or not answer.results
        if answer in blocked_answers[1:] or not is_listed or not (answer.results or answer.reasons):
            continue
        is_open = bool(answer.metrics) and not (everything or answer.tells or answer.is_blocked)
        if is_open and len(_list_labels(answers)) == 2:
            continue  # the table has it
        if not everything and rests_on_rule_alone(answer):
            objectives_of_rule.setdefault(format_layout_name(answer), []).append(answer.objective)
            continue
        label = "repair" if answer in blocked_answers else str(answer.objective)
        ground = f"  [{format_basis(answer)}]" if everything else ""
        sentence = format_sentence(answer, brief=not (everything or answer.tells))
        lines.append((label, sentence + ground, "" if answer.tells else "warn"))
        passed_reasons = (reason for reason in answer.reasons if reason.id is ReasonId.PASSED)
        lines += [("", reason.detail, "") for reason in passed_reasons]
    if objectives_of_rule:
        uses = (f"{layout} for {', '.join(of)}" for layout, of in objectives_of_rule.items())
        lines.append(("rule", f"without results auto chooses {'; '.join(uses)}", ""))
    lines += [
        (TOPOLOGY_FILE, text, "")
        for effect in comparison.effects
        if effect.system in ("", answers[0].system) and (text := file_text(effect))
    ]
    is_single = len({answer.system for answer in comparison.recommendations}) < 2
    lines += _sweep_lines(comparison, "" if is_single else f"{answers[0].system}: ", everything)
    if not everything and _is_passed(answers, comparison):
        blocking = (caveat for caveat in comparison.caveats if caveat.blocks)
        fixes = (d.fix for d in blocking if is_single or d.system == answers[0].system)
        lines += [("fix", fix, "") for fix in dict.fromkeys(fixes)]
        lines.append(("", "effects with intervals, and caveats in full: --explain", "dim"))
    caveats = (caveat for answer in answers for caveat in answer.caveats)
    links_first = sorted(caveats, key=lambda caveat: caveat.id != SLOW_IN_ONE)
    texts = list(dict.fromkeys(_select_caveats(links_first, answers, everything)))
    if not everything:
        texts = [shorten_list(texts, _MAX_CAVEATS, "; ")] if texts else []
    lines += [("caveat", text, "") for text in texts]
    if not everything and answers[0] is comparison.recommendations[0]:
        lines += [("not read", line, "warn") for line in _format_gaps(comparison.skipped)]
    sources = dict.fromkeys(s for answer in answers if everything for s in answer.sources)
    lines += [("source", source, "dim") for source in sources]
    command = _format_next_trial(answers)
    labels = [label for label, _, _ in lines] + (["next"] if command else [])
    width = max(map(len, labels), default=0) + 2
    for label, text, look in lines:
        yield Text(f"{label:<{width}}{text}", look, hang=width)
    if command and width + len(command) <= MAX_LINE:
        yield Text(f"{'next':<{width}}{command}")
    elif command:
        yield Text("next")
        yield Text(command, indent=2)


def _sweep_lines(
    comparison: Comparison, of_system: str, everything: bool
) -> Iterator[tuple[str, str, str]]:
    """Yield start-up time, rate and knee of each layout's sweeps."""
    for label, fits in comparison.sweeps.items():
        for metric, fit in fits.items() if label.startswith(of_system) else ():
            off = f"; points are off by {fit.spread:.0%}" if everything else ""
            name = label.removeprefix(of_system)
            name = name if metric == "allreduce-busbw" else f"{name}: {metric}"
            yield "sweep", f"{name}: {fit.text}{off}", ""


def _is_passed(answers: Sequence[Recommendation], comparison: Comparison) -> bool:
    """Return whether results decide nothing, and the reason is already with the objectives."""
    is_said = any(answer.find_reason(ReasonId.PASSED) for answer in answers)
    return is_said and not comparison.bare and not any(answer.results for answer in answers)


def file_text(effect: Effect) -> str:
    """Return the effect of NCCL's topology file in a layout; "" for other effects."""
    layout = effect.baseline
    is_peak = effect.metric == "allreduce-busbw-peak" and effect.state is None
    if effect.alternative != f"{layout}, {TOPOLOGY_FILE}" or not is_peak:
        return ""
    change = format_change(effect.ratio, "without it")
    if effect.outcome is Outcome.CANNOT_TELL:
        return f"cannot tell in {layout} ({change})"
    interval = "" if effect.low is None else f" ({_format_interval(effect)})"
    return f"{layout} is {change}{interval}"


def _select_caveats(
    caveats: Iterable[Caveat], answers: Sequence[Recommendation], everything: bool
) -> Iterator[str]:
    if any(caveat.id == PRINTED for answer in answers for caveat in answer.caveats):
        yield "one printed value for each, no samples"
    for caveat in caveats:
        if caveat.id == NODELESS and not everything:
            changes = {a.measure_next: a.objective for a in answers if caveat in a.caveats}
            change_texts = [
                f"{name} may change {goal}" for name, goal in changes.items() if name is not None
            ]
            yield ": ".join((caveat.detail, *change_texts[:1]))
        elif caveat.id in NOT_OF_MACHINE and not everything:
            if not any(answer.results for answer in answers):
                yield "runs that do not name this machine do not count (--explain)"
        elif caveat.id not in SAID_BY_LEVEL:
            fix = f": {caveat.fix}" if caveat.id == NO_ORDER else ""  # a call; no trial needed
            if everything:
                fix = f"; fix: {caveat.fix}; likely cause: {caveat.cause} ({caveat.id})"
            yield caveat.detail + fix


def _format_next_trial(answers: Sequence[Recommendation]) -> str:
    """Return the trial that would answer open questions: layouts compared, and layouts to add."""
    levels = (EvidenceLevel.MEASURED, EvidenceLevel.NO_DIFFERENCE)
    open_answers = [answer for answer in answers if answer.level not in levels and answer.results]
    if not open_answers or any(answer.findings for answer in answers):
        return ""
    names = {result.alternative for answer in open_answers for result in answer.results}
    losers = {name for answer in answers for name in answer.avoid}
    names -= losers - {"default", *(answer.choice for answer in answers if answer.tells)}
    names |= {answer.measure_next for answer in open_answers if answer.measure_next is not None}
    layouts = [name for name in PRESETS if name in names]
    words = ("homenode", "trial", "VM", "--layouts", ",".join(layouts))
    return command_line(*words) if len(layouts) > 1 else ""


def _build_effect_tables(comparison: RecommendedComparison, everything: bool) -> Iterator[Part]:
    pairs: dict[tuple[str, str, str], list[Effect]] = {}
    for effect in comparison.effects:
        pairs.setdefault((effect.system, effect.alternative, effect.baseline), []).append(effect)
    for (system, label, baseline), effects in pairs.items():
        text = f"{label} against {'bare metal' if comparison.bare else baseline}"
        title = f"{system}: {text}" if system else text
        yield Section(title, tuple(_build_tables(comparison, effects, everything)))
    for label in comparison.alternatives:
        if not comparison.effects:
            yield Text(f"{label} and {comparison.baseline} have no series in common")


def build_power_table(power: Mapping[str, Mapping[str, float]]) -> tuple[Table, ...]:
    """Return watts per GPU, and joules per GB or event, by test, a column per alternative."""
    tests = dict.fromkeys(test for values in power.values() for test in values)

    def text(watts_by_test: Mapping[str, float], test: str) -> str:
        unit = test.rpartition(", ")[2] if ", J/" in test else "W"
        return f"{watts_by_test[test]:.3g} {unit}" if test in watts_by_test else "-"

    rows = tuple(
        (test.partition(", J/")[0], *(text(values, test) for values in power.values()))
        for test in tests
    )
    heads = ("power of a GPU, median", *power)
    return (Table(heads=heads, rows=rows, numeric=tuple(power)),) if rows else ()


def _format_caveats(caveats: Iterable[Caveat]) -> Iterator[Text]:
    """Yield each caveat with its likely cause and its fix, once for all machines that have it."""
    for caveat in join_subjects(map(_add_system, caveats)):
        head = "cannot tell" if caveat.blocks and caveat.id not in WEAKENING else "caveat"
        yield Text(f"{head}: {caveat.subject}: {caveat.detail}  ({caveat.id})")
        yield Text(f"likely cause  {caveat.cause}", indent=2)
        yield Text(f"fix           {caveat.fix}", indent=2)


def _add_system(caveat: Caveat) -> Caveat:
    """Return the caveat with its machine added to its subject."""
    if not caveat.system:
        return caveat
    return replace(caveat, system="", subject=f"{caveat.system}: {caveat.subject}")


def _build_tables(
    comparison: Comparison, effects: Sequence[Effect], everything: bool
) -> Iterator[Part]:
    primary = [effect for effect in effects if effect.primary]
    secondary = [effect for effect in effects if not effect.primary]
    shown_effects = [effect for effect in secondary if everything or is_whole(effect)]
    for title, group in (("primary", primary), ("for information only", shown_effects)):
        if group:
            counts = sorted({effect.boots for effect in group})
            boots = ", ".join(f"{first} and {second}" for first, second in counts)
            rows = tuple(_format_row(comparison, effect) for effect in group)
            yield Text(f"{title}; boots: {boots}")
            yield Table(heads=_HEADS, rows=rows, folds=_HEADS[-1:])
    if hidden_count := len(secondary) - len(shown_effects):
        yield Text(f"{plural(hidden_count, 'more series', 'more series')} with --explain")


def _format_row(comparison: Comparison, effect: Effect) -> tuple[str, ...]:
    return (
        _name(effect),
        format_value(effect.baseline_value, effect.unit),
        format_value(effect.value, effect.unit),
        f"{effect.gain:.1%} of bare"
        if comparison.bare
        else format_change(effect.ratio, lower_is_better=effect.lower_is_better),
        _format_interval(effect),
        _format_outcome(effect),
    )


def _format_interval(effect: Effect) -> str:
    if effect.low is None or effect.high is None:
        return "-"
    return format_bounds(effect.low, effect.high, lower_is_better=effect.lower_is_better)


def _format_outcome(effect: Effect) -> str:
    text = _OUTCOMES[effect.outcome]
    if effect.outcome in (Outcome.BETTER, Outcome.WORSE) and not is_large(effect):
        text += ", less than matters"
    if effect.outcome is not Outcome.CANNOT_TELL and effect.level is not EvidenceLevel.MEASURED:
        is_printed = PRINTED in effect.caveats
        counts = "one result each" if is_printed else format_boots(*sorted(effect.boots))
        return f"{text} ({effect.level}, {counts})"
    if effect.caveats:
        return f"{text}: {', '.join(effect.caveats)}"
    if effect.p_adjusted is not None:
        return f"{text} (p {effect.p_adjusted:.2g})"
    return text


def _name(effect: Effect) -> str:
    metric = find_metric(effect.metric)
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


SAID_BY_LEVEL = frozenset({PRINTED})
"""Caveats that the level of the evidence, or the answer itself, implies."""


def list_caveats(recommendation: Recommendation, listed: Sequence[Caveat] = ()) -> tuple[str, ...]:
    """Return caveats that the level does not imply, with fixes. listed: shown elsewhere."""
    caveats = [caveat for caveat in recommendation.caveats if caveat.id not in SAID_BY_LEVEL]
    listed_ids = {caveat.id for caveat in listed}
    return tuple(
        f"{caveat.id}: {caveat.detail}"
        if caveat.id in listed_ids
        else f"{caveat.detail}; {caveat.fix}; likely cause: {caveat.cause}"
        for caveat in caveats
    )
