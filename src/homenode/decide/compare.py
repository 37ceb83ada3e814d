"""Compare: alternatives against a baseline, metric by metric."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import structs

from homenode.decide.alternative import Alternative, group_by_argument, join_states
from homenode.decide.caveats import Metrics, find_caveats, is_about
from homenode.decide.comparison import (
    FEW_BOOTS,
    NO_ORDER,
    PRINTED,
    STATES,
    Comparison,
    Effect,
    EvidenceLevel,
    Outcome,
    UnjudgedEffect,
    correct_by_holm,
    get_effect_metric,
    join_subjects,
    judge_effects,
    make_caveat,
)
from homenode.decide.health import check_results, fit_sweeps
from homenode.decide.intervals import CONFIDENCE, MIN_BOOTS, compute_interval
from homenode.decide.machine_facts import group_runs_by_machine
from homenode.decide.summary import Series, SeriesKey, choose_headline, format_places, power_by_test
from homenode.errors import InputError
from homenode.findings import Caveat, Gap
from homenode.measure.results.model import Run, SeriesId
from homenode.measure.results.vantage import Vantage
from homenode.metrics import (
    METRICS,
    POWER,
    TWO_STATES,
    UNCOMPARED,
    Metric,
    find_metric,
    list_primaries,
)
from homenode.objective import Objective
from homenode.text import plural

SeriesByLabel = Mapping[str, Mapping[SeriesKey, Series]]


def compare(
    alternatives: Sequence[Alternative],
    objective: Objective | None = None,
    *,
    bare: bool = False,
) -> Comparison:
    """Compare every alternative with the first.

    bare: the first alternative is a host run on the CPUs and nodes of the others' plan. Raises
    InputError for fewer than two alternatives and for a bare baseline that is not a host run.
    """
    if len(alternatives) < 2:
        single_label = alternatives[0].label if alternatives else "none"
        raise InputError(
            f"compare: expected two alternatives or more, found {single_label}",
            hint="name runs of another layout, or: homenode import DIR --layout NAME=PRESET",
        )
    baseline = alternatives[0]
    if bare and any(run.head.vantage is not Vantage.HOST for run in baseline.runs):
        raise InputError(f"--bare-metal: expected a run on the host itself, found {baseline.label}")
    joined_alternatives = join_states(alternatives)
    series_by_label = {alternative.label: alternative.series for alternative in joined_alternatives}
    comparison = compare_series(joined_alternatives, series_by_label, objective, bare=bare)
    by_test = {label: power_by_test(series) for label, series in series_by_label.items()}
    power = {label: watts for label, watts in by_test.items() if watts}
    caveats = join_subjects([*_link_caveats(alternatives), *comparison.caveats])
    sweeps = {layout.label: fits for layout in alternatives if (fits := fit_sweeps(layout.runs))}
    return structs.replace(comparison, caveats=caveats, power=power, sweeps=sweeps)


def group_alternatives(
    named_runs: Sequence[tuple[str, Sequence[Run]]],
) -> dict[str, tuple[Alternative, ...]]:
    """Return the alternatives of each machine. named_runs: runs by the argument that names them."""
    machines = {}
    all_runs = [run for _, group in named_runs for run in group]
    for name, runs in group_runs_by_machine(all_runs).items():
        run_ids = {id(run) for run in runs}
        parts = [(name, [run for run in group if id(run) in run_ids]) for name, group in named_runs]
        machines[name] = group_by_argument(
            [(argument, group) for argument, group in parts if group]
        )
    return machines


def compare_machines(
    machines: Mapping[str, Sequence[Alternative]],
    objective: Objective | None = None,
    *,
    is_brief: bool = False,
) -> Comparison:
    """Compare the layouts of each machine. is_brief: without effects, which take longest. Raises
    InputError if no machine has two layouts."""
    by_machine: dict[str, Comparison] = {}
    single = []
    for name, choices in machines.items():
        if len(choices) > 1 and is_brief:
            by_machine[name] = compare_series(choices, {c.label: {} for c in choices}, objective)
        elif len(choices) > 1 or len(machines) == 1:
            by_machine[name] = compare(choices, objective)
        else:
            single.append(Gap(name, "results of one layout only"))
    if not by_machine:
        raise InputError(
            f"compare: expected two layouts of one machine, found one of each of {len(machines)}",
            hint="homenode report shows several machines side by side",
        )
    first = next(iter(by_machine.values()))
    if len(machines) == 1:
        return first
    return structs.replace(
        first,
        effects=tuple(
            structs.replace(effect, system=name)
            for name, comparison in by_machine.items()
            for effect in comparison.effects
        ),
        caveats=tuple(
            structs.replace(caveat, system=name)
            for name, comparison in by_machine.items()
            for caveat in comparison.caveats
        ),
        skipped=tuple(single),
        power={
            f"{name}: {label}": watts
            for name, comparison in by_machine.items()
            for label, watts in comparison.power.items()
        },
        sweeps={
            f"{name}: {label}": fits
            for name, comparison in by_machine.items()
            for label, fits in comparison.sweeps.items()
        },
    )


def compare_series(
    choices: Sequence[Alternative],
    series_by_label: SeriesByLabel,
    objective: Objective | None = None,
    *,
    bare: bool = False,
    metrics: Metrics = None,
) -> Comparison:
    """Compare two or more alternatives on these series, whose state names are uniform already.
    metrics: whose caveats count."""
    baseline, *alternatives = choices
    candidates: list[UnjudgedEffect] = []
    caveats: list[Caveat] = []
    for other in alternatives:
        those, more_caveats = _compare(
            baseline, other, series_by_label, objective, metrics, bare=bare
        )
        candidates += those
        caveats += more_caveats
    return Comparison(
        objective=objective,
        bare=bare,
        confidence=CONFIDENCE,
        baseline=baseline.label,
        alternatives=tuple(other.label for other in alternatives),
        effects=tuple(judge_effects(candidates)),
        caveats=join_subjects(caveats),
    )


def _link_caveats(alternatives: Sequence[Alternative]) -> Iterator[Caveat]:
    """Yield caveats on the machine's links from the results themselves, which no layout fixes."""
    for finding in check_results([run for alternative in alternatives for run in alternative.runs]):
        yield make_caveat(
            finding.id,
            finding.subject,
            f"{finding.observed}; expected {finding.expected}",
            blocks=False,
            cause="a link that trained low, or shares its lanes: every layout is equally slow",
            fix=finding.fix or "homenode doctor",
        )


def _compare(
    baseline: Alternative,
    other: Alternative,
    series_by_label: SeriesByLabel,
    objective: Objective | None,
    metrics: Metrics,
    *,
    bare: bool,
) -> tuple[list[UnjudgedEffect], list[Caveat]]:
    caveats = list(find_caveats(baseline, other, metrics))
    if bare:
        caveats += _check_ground(baseline, other)
    series, other_series = series_by_label[baseline.label], series_by_label[other.label]
    if any(caveat.id == NO_ORDER for caveat in caveats):
        series, other_series = (
            {key: structs.replace(series, times=()) for key, series in by_key.items()}
            for by_key in (series, other_series)
        )
    caveats += _check_unpaired(series, other_series, other.label)
    decisive = _list_deciding_keys(series.keys() & other_series.keys(), objective)
    paired = _addresses_agree(baseline, other)
    candidates: list[UnjudgedEffect] = []
    of_series: list[Caveat] = []
    for key in sorted(series.keys() & other_series.keys(), key=_order):
        metric = find_metric(key.metric)
        if metric is None:
            continue
        names = f"{baseline.label}, {other.label}"
        pair_caveats = list(_check_replication(series[key], other_series[key], names))
        pair_caveats += _compare_devices(series[key], other_series[key])
        neighbours = [
            by_key[key]
            for label, by_key in series_by_label.items()
            if label not in (baseline.label, other.label) and key in by_key
        ]
        pair_caveats += _check_states(series[key], other_series[key], neighbours)
        if key.device is not None and not paired:
            pair_caveats.append(_GUEST_ADDRESSES)
        about = (*(caveat for caveat in caveats if is_about(caveat, key.metric)), *pair_caveats)
        blocking = dict.fromkeys(caveat.id for caveat in about if caveat.blocks)
        labels, pair = (baseline.label, other.label), (series[key], other_series[key])
        candidates.append(
            _compute_interval_between(
                metric, labels, pair, neighbours, key in decisive, tuple(blocking)
            )
        )
        of_series += pair_caveats
    caveats += of_series
    moved_controls = list(_check_controls([candidate.effect for candidate in candidates]))
    caveats += moved_controls
    if moved_controls:
        for n, candidate in enumerate(candidates):
            if not get_effect_metric(candidate.effect).control:
                more_caveats = (*candidate.effect.caveats, "control-moved")
                effect = structs.replace(candidate.effect, caveats=more_caveats)
                candidates[n] = candidate._replace(effect=effect)
    return candidates, caveats


def make_series_key(effect: Effect) -> SeriesKey:
    names = (*SeriesId.__struct_fields__, "slowest_device")
    return SeriesKey(*(getattr(effect, name) for name in names))


def is_whole(effect: Effect) -> bool:
    """Return whether an effect is over all places: not of a single CPU or a pair."""
    if effect.metric == "core-to-core-latency" or (effect.variant or "").startswith("CPU "):
        return False
    return effect.slowest_device or make_series_key(effect).is_over_all


def _list_deciding_keys(keys: Iterable[SeriesKey], objective: Objective | None) -> set[SeriesKey]:
    metric_ids = set(keys)
    metrics: list[Metric] = []
    for candidate in Objective if objective is None else (objective,):
        with_figures = [
            metric for metric in list_primaries(candidate) if choose_headline(metric_ids, metric)
        ]
        metrics += with_figures or [m for m in METRICS.values() if candidate in m.stands_in]
    return {key for metric in metrics for key in choose_headline(metric_ids, metric)}


def _compute_interval_between(
    metric: Metric,
    labels: tuple[str, str],
    pair: tuple[Series, Series],
    neighbours: Sequence[Series],
    primary: bool,
    blocking: tuple[str, ...],
) -> UnjudgedEffect:
    first, second = pair
    key = first.key
    bounds = compute_interval(
        first, second, neighbours=neighbours, is_closed=primary or metric.control
    )
    effect = Effect(
        *(getattr(key, name) for name in SeriesId.__struct_fields__),
        slowest_device=key.worst,
        lower_is_better=metric.lower_is_better,
        primary=primary,
        baseline=labels[0],
        alternative=labels[1],
        baseline_value=first.value,
        value=second.value,
        ratio=second.value / first.value if bounds is None or not bounds.adjusted else bounds.ratio,
        low=None if bounds is None else bounds.low,
        high=None if bounds is None else bounds.high,
        p=None if bounds is None else bounds.p,
        p_adjusted=None,
        boots=(len(first.medians), len(second.medians)),
        samples=(first.samples, second.samples),
        level=EvidenceLevel.MEASURED,
        outcome=Outcome.CANNOT_TELL,
        caveats=blocking,
    )
    return UnjudgedEffect(
        effect, bounds, _boot_gap(first, second), _compute_imbalance(first, second, metric)
    )


TIMES_THE_SPREAD = 6.0
"""Multiple of the spread of the faster half's devices, which is about 0.6 times that of all: the
slowest of eight is 1.4 of the latter below their mean, and so far apart in 1 of 1,000 pairs of
boots."""


def _compute_imbalance(first: Series, second: Series, metric: Metric) -> float:
    """Return the distance of the slowest device from the others of its boot, as a ratio of both
    alternatives; 1.0 if it is chance or not relevant. For eight devices in two boots with 3 %
    variation see docs/developer/statistics.md."""
    if not (first.shares and second.shares):
        return 1.0
    spread = max(first.device_spread, second.device_spread)
    least = max(1 + metric.matters, math.exp(TIMES_THE_SPREAD * spread))
    gain = min(second.shares) / max(first.shares)
    loss = max(second.shares) / min(first.shares)
    if metric.lower_is_better:
        gain, loss = 1 / loss, 1 / gain
    return gain if gain >= least else loss if loss <= 1 / least else 1.0


def _boot_gap(first: Series, second: Series) -> float:
    (low_1, high_1), (low_2, high_2) = _find_range(first), _find_range(second)
    return max(low_1 / high_2, low_2 / high_1)


def _find_range(series: Series) -> tuple[float, float]:
    """Return the lowest and the highest boot, or the ends of a printed range."""
    if series.replicated or series.key.worst:
        return min(series.medians), max(series.medians)
    return series.low, series.high


STATE_GAP = 1.25
"""Boots of a layout further apart than this, while their samples agree, are in states."""

STATE_SPREADS = 5.0
"""Minimum distance in standard errors of a boot, computed from its samples."""


def measure_boot_gap(series: Series) -> float:
    """Return the ratio between two states of an alternative's boots; 1.0 if none shows. A spread of
    1 % inside boots and 68 % between them is not noise."""
    gap = max(series.medians) / min(series.medians)
    spread = math.sqrt(series.inner_variance)
    return gap if gap > STATE_GAP and math.log(gap) > STATE_SPREADS * spread else 1.0


def _check_states(first: Series, second: Series, neighbours: Sequence[Series]) -> Iterator[Caveat]:
    """Find differences that are no larger than those between boots of one alternative."""
    if not (first.replicated and second.replicated):
        return
    gap = max(map(measure_boot_gap, (first, second, *neighbours)))
    ratio = max(first.value / second.value, second.value / first.value)
    if gap > 1 and ratio < gap * (1 + STATE_MARGIN):
        yield make_caveat(
            STATES,
            first.key.metric,
            f"boots of one layout differ by {gap:.2f} x while their samples agree",
        )


STATE_MARGIN = 0.10
"""States repeat to a few per cent."""


def _check_replication(first: Series, second: Series, subject: str) -> Iterator[Caveat]:
    if not (first.replicated and second.replicated):
        yield make_caveat(
            PRINTED,
            subject,
            "results that were published without samples: one value each, n unknown or 1",
        )
        return
    counts = len(first.medians), len(second.medians)
    boots = f"{counts[0]} and {plural(counts[1], 'boot')}"
    if counts[0] == counts[1]:
        boots = f"{plural(counts[0], 'boot')} each"
    ratio = max(first.value / second.value, second.value / first.value)
    if min(counts) < MIN_BOOTS:
        yield make_caveat(FEW_BOOTS, subject, f"{boots}: expected three or more each")
    elif (
        ratio >= MIN_STATES
        and _boot_gap(first, second) < TWO_STATES
        and compute_chance(*counts) > 1 - CONFIDENCE
    ):
        yield make_caveat(
            FEW_BOOTS,
            subject,
            f"{boots}: expected five or more each for a difference of {ratio:.2f} x",
            cause="boots of one layout have been seen in two states, so far apart",
            fix="boot each layout five times or more, in mixed order",
        )


MIN_STATES = 1.5
"""States of boots that have been seen are 1.6 to 1.9 x apart: one cache domain's link, or two."""


def compute_chance(first: int, second: int) -> float:
    """Return the probability that this number of boots of each layout, in two random states,
    separate as the layouts do.

    The exact permutation test: of all assignments of the boots to two layouts, two separate the
    states. Doubled, because the difference was selected for its size.

    >>> [round(compute_chance(boots, boots), 3) for boots in (3, 4, 5)]
    [0.2, 0.057, 0.016]
    """
    return 4 / math.comb(first + second, first)


def _compare_devices(first: Series, second: Series) -> Iterator[Caveat]:
    if first.devices != second.devices:
        yield make_caveat(
            "other-devices",
            first.key.metric,
            f"{_format_addresses(first)} against {_format_addresses(second)}",
        )


_GUEST_ADDRESSES = make_caveat(
    "guest-addresses",
    "single GPUs",
    "addresses are the guest's, and the layouts build different PCIe trees in the guest",
)


def _addresses_agree(first: Alternative, second: Alternative) -> bool:
    """Return whether addresses pair: guest addresses only with the same PCIe tree, host addresses
    always."""
    heads = [run.head for run in (*first.runs, *second.runs)]
    return all(head.host_addresses for head in heads) or (
        first.switches.pcie is second.switches.pcie
        and not any(head.host_addresses for head in heads)
    )


def _format_addresses(series: Series) -> str:
    return ", ".join(map(str, sorted(series.devices))) or "no addresses"


def _check_unpaired(
    first: Mapping[SeriesKey, Series], second: Mapping[SeriesKey, Series], label: str
) -> Iterator[Caveat]:
    """Yield caveats on states and devices of one side only, which are omitted."""
    unpaired_keys = first.keys() ^ second.keys()
    if states := sorted({key.state for key in unpaired_keys if key.state is not None}):
        yield make_caveat(
            "state-without-pair", label, f"placement states {', '.join(states)} on one side only"
        )
    on_both = {None, *({key.device for key in first} & {key.device for key in second})}
    if devices := sorted({str(key.device) for key in unpaired_keys if key.device not in on_both}):
        yield make_caveat("device-without-pair", label, f"{', '.join(devices)} on one side only")
    paired_metrics = {key.metric for key in first.keys() & second.keys()}
    for metric in METRICS.values():
        parts = format_places(first, metric), format_places(second, metric)
        if None not in parts and metric.id not in paired_metrics:
            yield make_caveat(
                "series-without-pair", label, f"{metric.title}: {parts[0]} against {parts[1]}"
            )
    unknown_metrics = {key.metric for key in (*first, *second) if find_metric(key.metric) is None}
    unknown = sorted(unknown_metrics - UNCOMPARED - {POWER})
    if unknown:
        yield make_caveat("unknown-metric", label, f"{', '.join(unknown)}: not compared")


def _check_ground(host: Alternative, guest: Alternative) -> Iterator[Caveat]:
    """Yield the caveat on a host run that was not confined to the guest's CPUs and nodes."""
    for field in ("pus", "nodes"):
        host_values = {getattr(run.head, field) for run in host.runs}
        guest_values = {getattr(run.head, field) for run in guest.runs}
        if host_values != guest_values or None in host_values:
            yield make_caveat(
                "other-ground",
                guest.label,
                f"{field}: {_join_values(host_values)} on the host "
                f"against {_join_values(guest_values)} of the plan",
            )


def _join_values(values: Iterable[object]) -> str:
    return " and ".join(sorted("unknown" if value is None else str(value) for value in values))


def _check_controls(effects: Sequence[Effect]) -> Iterator[Caveat]:
    """Yield caveats on controls that differ, corrected for their number: eight GPUs have dozens.
    Single GPUs are corrected separately, so that they do not hide a common change."""
    controls = [effect for effect in effects if get_effect_metric(effect).control]
    for family in (
        [effect for effect in controls if effect.device is None],
        [effect for effect in controls if effect.device is not None],
    ):
        tested_effects = [(effect, effect.p) for effect in family if effect.p is not None]
        adjusted_ps = correct_by_holm([p for _, p in tested_effects])
        for (effect, _), p in zip(tested_effects, adjusted_ps, strict=True):
            if p < 1 - CONFIDENCE and abs(effect.ratio - 1) > get_effect_metric(effect).matters:
                change = f"{effect.ratio - 1:+.1%} from {effect.baseline} to {effect.alternative}"
                yield make_caveat("control-moved", effect.metric, change)


def _order(key: SeriesKey) -> tuple[object, ...]:
    ids = list(METRICS)
    place = ids.index(key.metric) if key.metric in METRICS else len(ids)
    parts = structs.astuple(key)[1:]
    texts = (str(part) if not isinstance(part, int) else f"{part:020d}" for part in parts)
    return place, key.metric, not key.worst, *texts
