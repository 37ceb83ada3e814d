"""Ranking: alternatives by an objective's metrics, and those that are worse than the best."""

import math
from collections.abc import Iterator, Sequence
from enum import StrEnum

from msgspec import Struct

from homenode.decide.alternative import Alternative
from homenode.decide.caveats import is_about
from homenode.decide.compare import compare_series, make_series_key
from homenode.decide.comparison import (
    STATES,
    WEAKENING,
    Comparison,
    Effect,
    EvidenceLevel,
    Outcome,
    make_caveat,
)
from homenode.decide.summary import Series, SeriesKey, headline_series
from homenode.findings import Caveat
from homenode.metrics import METRICS, Metric, format_bounds, list_primaries
from homenode.objective import Objective

SHOWN_LOSS = 0.10
"""A loss that intervals must exclude for an alternative to be as good as the best."""

_CONTROLS = frozenset(metric.id for metric in METRICS.values() if metric.control)


class MetricRank(StrEnum):
    BEST = "best"
    NO_WORSE = "no-worse"  # it loses less than a relevant amount
    UNSHOWN = "unshown"  # no such loss is shown, nor excluded; one of SHOWN_LOSS is, or there is
    # no interval that could exclude one
    UNDECIDED = "undecided"  # its interval holds both no loss and a large one
    WORSE = "worse"
    UNKNOWN = "unknown"  # cannot tell, with the reason among the caveats


class RankedResult(Struct, frozen=True, kw_only=True):
    alternative: str
    metric: str
    unit: str
    value: float
    ratio: float  # value relative to the best alternative's
    # low, high: the interval of that ratio, or the range that was printed, over the best value;
    # None if there is neither
    low: float | None
    high: float | None
    position: MetricRank
    level: EvidenceLevel  # level of the evidence against the best alternative
    slowest_device: bool = False  # the value is of the slowest of several devices


class Ranking(Struct, frozen=True):
    """Basis of a recommendation: results by metric, best first, and caveats."""

    results: tuple[RankedResult, ...]
    caveats: tuple[Caveat, ...]

    def like(self) -> tuple[str, ...]:
        """Return the alternatives that are close to the best on every metric; empty if nothing can
        be compared. If none is, the smallest loss among the layouts not shown to be worse."""
        if self._list_names_at(MetricRank.UNKNOWN):
            return ()
        unlike = {result.alternative for result in self.results if not is_like_best(result)}
        names = tuple(dict.fromkeys(result.alternative for result in self.results))
        if like := tuple(name for name in names if name not in unlike):
            return like
        candidates = tuple(name for name in names if name not in self.worse()) or names
        return (min(candidates, key=self._greatest_loss),)

    def worse(self) -> tuple[str, ...]:
        """Return the alternatives shown to be worse than the best on some metric; if each is worse
        on some metric, without those that are best on one."""
        losers = self._list_names_at(MetricRank.WORSE)
        names = {result.alternative for result in self.results}
        best = self._list_names_at(MetricRank.BEST) if names == set(losers) else ()
        return tuple(name for name in losers if name not in best)

    def level(self) -> EvidenceLevel:
        """Return the weakest level at which an alternative is worse than the best; if none is,
        whether a relevant difference is excluded."""
        if levels := [
            result.level for result in self.results if result.position is MetricRank.WORSE
        ]:
            return max(levels, key=lambda level: level.rank)
        equal_positions = {MetricRank.BEST, MetricRank.NO_WORSE}
        excluded = all(result.position in equal_positions for result in self.results)
        return EvidenceLevel.NO_DIFFERENCE if excluded else EvidenceLevel.RULE

    def _greatest_loss(self, name: str) -> float:
        results = (result for result in self.results if result.alternative == name)
        return max(_compute_loss(result) / METRICS[result.metric].matters for result in results)

    def _list_names_at(self, position: MetricRank) -> tuple[str, ...]:
        names = (result.alternative for result in self.results if result.position is position)
        return tuple(dict.fromkeys(names))


def is_like_best(result: RankedResult) -> bool:
    """Return whether a result is so close to the best that another criterion may choose it: within
    the relevant difference, or most of it if the interval excludes equality. It uses values more
    than their confidence, so that another boot does not change the choice."""
    if result.position in (MetricRank.BEST, MetricRank.WORSE):
        return result.position is MetricRank.BEST
    is_sure = result.level is EvidenceLevel.MEASURED and result.low is not None
    differs = is_sure and not (result.low or 0.0) < 1 < (result.high or math.inf)
    limit = METRICS[result.metric].matters * (0.8 if differs else 1.0)
    return _compute_loss(result) < limit


def _compute_loss(result: RankedResult) -> float:
    return 1 - min(result.ratio, 1 / result.ratio)


OWN_NODE, OTHER_NODE = "the GPU's own node", "another GPU's node"
"""Names of the means over a matrix that a source prints."""


def make_ranking(
    candidates: Sequence[Alternative], objective: Objective
) -> tuple[Ranking, tuple[Alternative, ...]]:
    """Rank the alternatives that have results on the objective's metrics."""
    stand_ins = [metric for metric in METRICS.values() if objective in metric.stands_in]
    figures = {
        m.id: [(c, s) for c in candidates if (s := headline_series(c.series, m)) is not None]
        for m in (*list_primaries(objective), *stand_ins)
    }
    metrics = [metric for metric in list_primaries(objective) if figures[metric.id]] or stand_ins
    results: list[RankedResult] = []
    caveats: list[Caveat] = []
    used: dict[str, Alternative] = {}
    metric_ids = frozenset({*_CONTROLS, *(metric.id for metric in metrics)})
    for metric in metrics:
        with_figures = figures[metric.id]
        if not with_figures:
            continue
        used.update((alternative.label, alternative) for alternative, _ in with_figures)
        ordered_pairs = sorted(
            with_figures,
            key=lambda pair: (
                pair[1].value if metric.lower_is_better else -pair[1].value,
                pair[0].label != OWN_NODE,  # prefer local copies among equal copies
                pair[0].label,  # the same answer in whatever order the runs are read
            ),
        )
        metric_results, more_caveats = _list_results(ordered_pairs, metric, metric_ids, objective)
        results += metric_results
        caveats += more_caveats
    return Ranking(tuple(results), tuple(dict.fromkeys(caveats))), tuple(used.values())


def _list_results(
    ordered_pairs: Sequence[tuple[Alternative, Series]],
    metric: Metric,
    metric_ids: frozenset[str],
    objective: Objective,
) -> tuple[list[RankedResult], list[Caveat]]:
    (best, best_series), *slower = ordered_pairs

    def make_result(
        alternative: Alternative,
        series: Series,
        bounds: tuple[float | None, float | None],
        position: MetricRank,
        level: EvidenceLevel,
        ratio: float = 1.0,
    ) -> RankedResult:
        key = series.key
        return RankedResult(
            alternative=alternative.label,
            metric=metric.id,
            unit=key.unit,
            value=series.value,
            ratio=ratio,
            low=bounds[0],
            high=bounds[1],
            position=position,
            level=level,
            slowest_device=key.worst,
        )

    results = [
        make_result(best, best_series, (None, None), MetricRank.BEST, EvidenceLevel.MEASURED)
    ]
    if not slower:
        return results, []
    alternatives = [alternative for alternative, _ in ordered_pairs]
    series_by_label = {
        alternative.label: {k: s for k, s in alternative.series.items() if k.metric in metric_ids}
        for alternative in alternatives
    }
    comparison = compare_series(alternatives, series_by_label, objective, metrics=metric_ids)
    for alternative, series in slower:
        effect = _find_effect(comparison, alternative.label, series.key)
        bounds = _find_bounds(effect, series, best_series.value)
        position = _find_position(effect, metric)
        level = EvidenceLevel.MEASURED if effect is None else effect.level
        ratio = series.value / best_series.value if effect is None else effect.ratio
        results.append(make_result(alternative, series, bounds, position, level, ratio))
    return results, [*_select(comparison.caveats, metric), *_list_wide_caveats(results, metric)]


def _list_wide_caveats(results: Sequence[RankedResult], metric: Metric) -> Iterator[Caveat]:
    """Yield caveats on alternatives whose intervals are too wide for a conclusion."""
    ranges = [
        f"{result.alternative} {format_bounds(result.low, result.high)}"
        for result in results
        if result.position is MetricRank.UNDECIDED
        and result.low is not None
        and result.high is not None
    ]
    if ranges:
        yield make_caveat(
            "wide-interval",
            metric.id,
            f"{metric.title} against {results[0].alternative}: {', '.join(ranges)}",
        )


def _find_bounds(
    effect: Effect | None, series: Series, best: float
) -> tuple[float | None, float | None]:
    if effect is not None and effect.low is not None:
        return effect.low, effect.high
    if not series.replicated and not series.key.worst and series.low < series.high:
        return series.low / best, series.high / best
    return None, None


def _select(caveats: Sequence[Caveat], metric: Metric) -> Iterator[Caveat]:
    """Yield the caveats that concern the deciding metric: they name it, or no metric."""
    for caveat in caveats:
        is_own = caveat.subject not in METRICS or caveat.subject == metric.id or caveat.blocks
        if is_own and is_about(caveat, metric.id):
            yield caveat


def _find_effect(comparison: Comparison, label: str, key: SeriesKey) -> Effect | None:
    effects = (effect for effect in comparison.effects if effect.alternative == label)
    return next((effect for effect in effects if make_series_key(effect) == key), None)


def _find_position(effect: Effect | None, metric: Metric) -> MetricRank:
    caveats = frozenset(effect.caveats) - WEAKENING if effect is not None else frozenset()
    if effect is None or caveats - {STATES}:
        return MetricRank.UNKNOWN
    if caveats:
        return MetricRank.UNDECIDED
    loss = 1 - effect.gain
    if effect.outcome is Outcome.WORSE and loss >= metric.matters:
        return MetricRank.WORSE
    if effect.caveats:
        return MetricRank.UNSHOWN
    if effect.low is None or effect.high is None:
        return MetricRank.UNKNOWN
    largest_loss = 1 - (1 / effect.high if metric.lower_is_better else effect.low)
    if largest_loss >= max(metric.matters, SHOWN_LOSS):
        return MetricRank.UNDECIDED
    return MetricRank.NO_WORSE if largest_loss < metric.matters else MetricRank.UNSHOWN
