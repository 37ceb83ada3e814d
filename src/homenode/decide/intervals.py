"""Intervals: the ratio of two alternatives, by the medians of their boots.

Medians are compared on the logarithmic scale: Welch's t with Satterthwaite's degrees of freedom;
with three or more alternatives each variance is shrunk towards the others'. Rounds of a trial that
differ are blocks. Error rates: docs/developer/statistics.md.
"""

import math
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from itertools import combinations
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from homenode.decide.distributions import f_upper_p, range_quantile, range_upper_p, two_sided_p
from homenode.decide.summary import Series

CONFIDENCE = 0.95
MIN_BOOTS = 3
"""Least of each side. Two boots each, in one of two states at random, are apart in 1 of 8 cases."""

VARIES_MORE, ONE_OF_SEVERAL_VARIES_MORE = 0.10, 0.05
"""Level of Cochran's test, of two alternatives and of several. Of two it misses at 5 % too many
that vary five times as much. Of several that vary alike the noisiest is set apart too often at
10 %: what is left seems to vary less than it does."""

BESIDE_TERMS_FROM = 4
"""Boots of each of several, from which on each has its own variance next to a drift or rounds as
well: these cost freedom, of which three boots have none to spare."""

OTHERS_COUNT, OTHERS_FREEDOM = 1 / 4, 1 / 16
"""Shares of the freedom of the others, one of them omitted as it shows how alike they are: for the
value that a variance is drawn to, half of its own freedom at most, and for the freedom gained."""

MAX_TIMES_THE_NOISE = 6
"""Multiple of the noise of the quietest other. A larger variation counts as this much."""

FREEDOM_OF_FEWER = 1.5
"""Satterthwaite's freedom is no more than so many times that of the side with fewer boots: where
that is the noisier one, and seems quiet by chance, many boots of the other lend it too much."""

MAX_CLOSED = 7
"""Alternatives, of which a pair is tested with each subset; of more it is with all of them."""

MIN_FREEDOM_OF_BLOCKS = 3
"""Three rounds of two leave fewer: where their differences seem alike by chance, rounds that differ
in any way make the two seem unlike."""

BLOCKS_DIFFER = 0.01
"""Level of the F test that a trial's rounds must pass to be blocks: blocks cost degrees of freedom,
and rounds that do not differ are worth none."""

_MAX_LOG_RATIO = 300.0
"""An interval beyond e^300 has no information: an interval, or a ratio that boots minutes
apart show for others a week later."""

RESOLUTION = 1e-4
"""No measurement of this kind is more repeatable; keeps equal medians from claiming certainty."""


class Interval(Struct, frozen=True, kw_only=True):
    """The ratio of two alternatives, the second over the first."""

    ratio: float
    # low, high: bounds of the ratio at CONFIDENCE, which all ratios between the alternatives keep
    # at once
    low: float
    high: float
    p: float  # how likely a ratio at least this far from 1 is by chance between any two of them
    error: float  # standard error of the ratio's logarithm
    freedom: float  # degrees of freedom that it rests on
    adjusted: bool = False  # the ratio is that of boots at one time, as a drift was seen


def compute_interval(
    first: Series,
    second: Series,
    *,
    neighbours: Sequence[Series] = (),
    is_closed: bool = True,
) -> Interval | None:
    """Return the ratio with its interval; None with too few boots.

    neighbours: the same series of other alternatives, which show how much boots vary. The interval
    is that of the studentised range over all of them (Tukey and Kramer; Games and Howell if they
    vary unlike). is_closed: also by the closed test, which takes longest; two alternatives that
    only it distinguishes have a bound of 1.
    """
    if not (_is_usable(first) and _is_usable(second)):
        return None
    usable = list(filter(_is_usable, neighbours))
    estimates = _list_estimates(first, second, usable)
    intervals = [_estimate_interval(estimate, 2 + len(usable)) for estimate in estimates]
    least_sure = max(intervals, key=lambda one: one.p)
    low, high, p = min(b.low for b in intervals), max(b.high for b in intervals), least_sure.p
    if is_closed and p >= 1 - CONFIDENCE and len(usable) <= MAX_CLOSED - 2:
        p = min(p, _compute_closed_p([first, second, *usable], 1 - CONFIDENCE))
        if p < 1 - CONFIDENCE:
            low, high = (max(low, 1.0), high) if least_sure.ratio > 1 else (low, min(high, 1.0))
    return replace(least_sure, low=low, high=high, p=p)


def _compute_closed_p(all_series: Sequence[Series], error: float) -> float:
    """Return the probability of such a distance of the first two by chance, by closed tests: the
    largest p of the range over each subset that contains both (Games and Howell), with the share of
    the error that Ryan, Einot, Gabriel and Welsch assign to its size. Above `error` any p."""

    @cache
    def compute_p(first: int, second: int, groups: int) -> float:
        neighbours = [series for n, series in enumerate(all_series) if n not in (first, second)]
        estimates = _list_estimates(all_series[first], all_series[second], neighbours)
        return max(
            range_upper_p(abs(it.difference) / it.error * math.sqrt(2), groups, it.freedom)
            for it in estimates
        )

    largest, places = 0.0, range(len(all_series))
    for size in places[1:]:
        share = 1.0 if size >= len(all_series) - 2 else (size + 1) / len(all_series)
        for added_places in combinations(places[2:], size - 1):
            least = 1.0
            for pair in combinations((0, 1, *added_places), 2):
                least = min(least, compute_p(*pair, size + 1) / share)
                if least <= largest:
                    break
            largest = max(largest, least)
            if largest >= error:
                return largest
    return largest


class _Estimate(NamedTuple):
    """Standard error and degrees of freedom of the difference of two logarithms."""

    difference: float
    error: float
    freedom: float
    adjusted: bool = False  # for a drift over time


def _estimate_interval(estimate: _Estimate, groups: int) -> Interval:
    reach = range_quantile(CONFIDENCE, groups, estimate.freedom) / math.sqrt(2) * estimate.error
    distance = abs(estimate.difference) / estimate.error * math.sqrt(2)
    return Interval(
        ratio=_convert_to_ratio(estimate.difference),
        low=_convert_to_ratio(estimate.difference - reach),
        high=_convert_to_ratio(estimate.difference + reach),
        p=min(1.0, range_upper_p(distance, groups, estimate.freedom)),
        error=estimate.error,
        freedom=estimate.freedom,
        adjusted=estimate.adjusted,
    )


def _convert_to_ratio(log: float) -> float:
    return math.exp(max(-_MAX_LOG_RATIO, min(log, _MAX_LOG_RATIO)))


def _list_estimates(first: Series, second: Series, neighbours: Sequence[Series]) -> list[_Estimate]:
    """Return one estimate, or two of which the less certain counts: with an unbalanced order, an
    undetected drift can be the difference."""
    difference = _compute_mean_log(second) - _compute_mean_log(first)
    blocks = _estimate_by_blocks(first, second, neighbours)
    plain = _Estimate(difference, *(blocks or _estimate_by_boots(first, second, neighbours))[:2])
    trend = _fit_time_trend(first, second, neighbours)
    if trend is None:
        return [plain]
    if trend.p < DRIFTS:
        return [trend.estimate if blocks is None or trend.is_line(blocks) else plain]
    return [plain, trend.estimate] if abs(trend.lean) > LEANS else [plain]


DRIFTS = 0.015
"""Level of the test for a drift over time, beyond which every boot is adjusted for it. At 5 %, as
rounds were, equal alternatives that vary between boots alone differ in 6.2 of 100."""

LEANS = 0.6
"""Correlation between the alternative and the time: A A B A B B has 0.68, any order of A and B
within rounds 0.29 or less."""

NO_LINE = 0.05
"""Level of the F test that the rounds must pass to explain more than a line does."""


class _Trend(NamedTuple):
    """The error of an effect adjusted for a drift over time."""

    estimate: _Estimate  # adjusted for a drift that is a line over time, the same for all
    variance: float  # that it leaves, and its freedom
    freedom: float
    p: float  # how likely a drift like that is by chance
    lean: float  # correlation of the alternative with the time

    def is_line(self, blocks: "_Blocks") -> bool:
        ratio = self.variance / blocks.variance
        return f_upper_p(ratio, self.freedom, blocks.variance_freedom) >= NO_LINE


def _fit_time_trend(first: Series, second: Series, neighbours: Iterable[Series]) -> _Trend | None:
    """Return the analysis of covariance with the time of each boot; None if one is unknown, or if
    the alternatives have different variances."""
    all_series = [first, second, *(series for series in neighbours if None not in series.times)]
    times = [[time for time in series.times if time is not None] for series in all_series]
    if any(len(t) < len(series.medians) for t, series in zip(times, all_series, strict=True)):
        return None
    all_times = [time for instants in times for time in instants]
    if len(set(all_times)) < len(all_times) or (min(all_times) < _SECONDS <= max(all_times)):
        return None
    if max(map(abs, all_times)) > _LATEST:
        return None
    if not _is_one_variance(tuple(sorted(map(_estimate_variance, all_series)))):
        return None
    middle = [math.fsum(instants) / len(instants) for instants in times]
    level = list(map(_compute_mean_log, all_series))
    off = [
        [(t - middle[n], log - level[n]) for t, log in zip(times[n], series.logs, strict=True)]
        for n, series in enumerate(all_series)
    ]
    squares = math.fsum(time**2 for pairs in off for time, _ in pairs)
    slope = math.fsum(time * log for pairs in off for time, log in pairs) / squares
    rests = [math.fsum((log - slope * time) ** 2 for time, log in pairs) for pairs in off]
    freedom = len(all_times) - len(all_series) - 1.0
    variance = max(math.fsum(rests) / freedom, _compute_mean_variance(all_series), RESOLUTION**2)
    part = freedom / (freedom + 1)
    variances = _compute_residuals(rests, [part * (len(pairs) - 1.0) for pairs in off])
    wider, freedom_left = _compute_variance_factor(all_series, variances)
    delay = middle[1] - middle[0]
    counts = len(first.medians), len(second.medians)
    spread = 1 / counts[0] + 1 / counts[1]
    trend_variance = delay**2 / spread
    own_squares = math.fsum(
        (time - mean) ** 2
        for instants, mean in zip(times[:2], middle[:2], strict=True)
        for time in instants
    )
    return _Trend(
        _Estimate(
            level[1] - level[0] - slope * delay,
            math.sqrt(variance * (spread + delay**2 / squares)) * wider,
            freedom_left,
            adjusted=True,
        ),
        variance,
        freedom,
        two_sided_p(slope / math.sqrt(variance / squares), freedom),
        math.copysign(math.sqrt(trend_variance / (trend_variance + own_squares)), delay),
    )


_SECONDS = 1e6
"""Times below are places in an order."""

_LATEST = 1e12
"""Later times are invalid: 30,000 years from now."""


class _Variance(NamedTuple):
    """The variance of an alternative's boots."""

    value: float
    freedom: float  # degrees of freedom it rests on


def _is_usable(series: Series) -> bool:
    return series.replicated and len(series.medians) >= MIN_BOOTS


def _compute_mean_log(series: Series) -> float:
    return math.fsum(series.logs) / len(series.logs)


def _estimate_by_boots(
    first: Series, second: Series, neighbours: Iterable[Series]
) -> tuple[float, float]:
    """Return the standard error of the difference, and its degrees of freedom."""
    all_series = [first, second, *neighbours]
    return _compute_difference_error(
        all_series, _shrink_variances([_estimate_variance(series) for series in all_series])
    )


def _compute_difference_error(
    all_series: Sequence[Series], variances: Sequence[_Variance]
) -> tuple[float, float]:
    """Standard error of the difference of the first two, and Satterthwaite's freedom: with several
    alternatives they are rounded down, because quantiles of the range are slow and cached."""
    a, b = variances
    first, second = a.value / len(all_series[0].medians), b.value / len(all_series[1].medians)
    freedom = (first + second) ** 2 / (first**2 / a.freedom + second**2 / b.freedom)
    if len(all_series[0].medians) != len(all_series[1].medians):
        freedom = min(freedom, FREEDOM_OF_FEWER * min(a.freedom, b.freedom))
    freedom = freedom if len(all_series) == 2 else math.floor(16 * freedom) / 16
    return math.sqrt(first + second), freedom


def _shrink_variances(variances: Sequence[_Variance]) -> list[_Variance]:
    """Return the variances of the first two, each shrunk towards the geometric mean of all the
    others, because most layouts have similar variances and a noisy one changes the mean little.
    With two alternatives nothing is shrunk: three boots cannot show a fivefold variation."""
    estimates = []
    for n, variance in enumerate(variances[:2]):
        neighbours = [other for m, other in enumerate(variances) if m != n]
        total = math.fsum(other.freedom for other in neighbours)
        cap = MAX_TIMES_THE_NOISE**2 * min(other.value for other in neighbours)
        logs = (other.freedom * math.log(min(other.value, cap)) for other in neighbours)
        usual = math.fsum(logs) / total
        spare = total * (len(neighbours) - 1) / len(neighbours)
        weight = min(OTHERS_COUNT * spare, variance.freedom / 2)
        value = variance.value * variance.freedom + math.exp(usual) * weight
        value /= variance.freedom + weight
        estimates.append(_Variance(value, variance.freedom + OTHERS_FREEDOM * spare))
    return estimates


def _compute_variance_factor(
    all_series: Sequence[Series], variances: Sequence[_Variance]
) -> tuple[float, float]:
    """Return the factor for the pooled error of the first two, because variances differ, and the
    remaining degrees of freedom."""
    pooled_variance = _pool_variances(variances)
    counts = [len(series.medians) for series in all_series[:2]]
    if len(all_series) < 3 or min(counts) < BESIDE_TERMS_FROM:
        return 1.0, pooled_variance.freedom
    error, freedom = _compute_difference_error(all_series, _shrink_variances(variances))
    return error / math.sqrt(pooled_variance.value * sum(1 / count for count in counts)), freedom


def _estimate_variance(series: Series) -> _Variance:
    """Variance of the boots' medians, at least the part that samples within boots explain."""
    value = max(series.variance, series.inner_variance, RESOLUTION**2)
    return _Variance(value, len(series.medians) - 1.0)


@lru_cache(maxsize=256)
def _is_one_variance(variances: tuple[_Variance, ...]) -> bool:
    """Return whether all can share one variance (Cochran's test of the largest). Otherwise a model
    term from few boots would make a difference of unequal variances seem certain. An unpinned guest
    can vary ten times as much between boots as a pinned one."""
    largest, *smaller = sorted(variances, reverse=True)
    neighbours = _pool_variances(smaller)
    f = largest.value / neighbours.value
    p = len(variances) * f_upper_p(f, largest.freedom, neighbours.freedom)
    return p >= (VARIES_MORE if len(variances) == 2 else ONE_OF_SEVERAL_VARIES_MORE)


def _pool_variances(variances: Sequence[_Variance]) -> _Variance:
    freedom = math.fsum(variance.freedom for variance in variances)
    value = math.fsum(variance.value * variance.freedom for variance in variances) / freedom
    return _Variance(value, freedom)


def _estimate_by_blocks(
    first: Series, second: Series, neighbours: Iterable[Series]
) -> "_Blocks | None":
    """Return the estimate with rounds as blocks (two-way analysis of variance); None without
    blocks. Every alternative with one boot in each round counts."""
    blocks = _find_blocks(first)
    if blocks is None or _find_blocks(second) != blocks:
        return None
    compared = [first, second, *(series for series in neighbours if _find_blocks(series) == blocks)]
    freedom = (len(compared) - 1.0) * (len(blocks) - 1)
    if freedom < MIN_FREEDOM_OF_BLOCKS or not _is_one_variance(
        tuple(sorted(map(_estimate_variance, compared)))
    ):
        return None
    order = sorted(blocks)
    by_block = [dict(zip(series.blocks, series.logs, strict=True)) for series in compared]
    rows = [[log_of[block] for block in order] for log_of in by_block]
    count, rounds = len(rows), len(order)
    overall_mean = math.fsum(map(math.fsum, rows)) / (count * rounds)
    of_row = [math.fsum(row) / rounds for row in rows]
    of_round = [math.fsum(column) / count for column in zip(*rows, strict=True)]
    rests = [
        math.fsum(
            (value - mean - level + overall_mean) ** 2
            for value, level in zip(row, of_round, strict=True)
        )
        for row, mean in zip(rows, of_row, strict=True)
    ]
    variance = max(math.fsum(rests) / freedom, _compute_mean_variance(compared), RESOLUTION**2)
    between = count * math.fsum((level - overall_mean) ** 2 for level in of_round) / (rounds - 1)
    if f_upper_p(between / variance, rounds - 1.0, freedom) >= BLOCKS_DIFFER:
        return None
    wider, freedom_left = _compute_variance_factor(
        compared, _compute_residuals(rests, [freedom / count] * count)
    )
    return _Blocks(math.sqrt(2 * variance / rounds) * wider, freedom_left, variance, freedom)


def _compute_mean_variance(all_series: Sequence[Series]) -> float:
    return math.fsum(series.inner_variance for series in all_series) / len(all_series)


def _compute_residuals(rests: Sequence[float], freedoms: Sequence[float]) -> list[_Variance]:
    """Return variances from the residual sums of squares of each alternative."""
    return [
        _Variance(max(residual / freedom, RESOLUTION**2), freedom)
        for residual, freedom in zip(rests, freedoms, strict=True)
    ]


class _Blocks(NamedTuple):
    """Standard error of a difference, its degrees of freedom; the residual variance of rounds, and
    its degrees of freedom."""

    error: float
    freedom: float
    variance: float
    variance_freedom: float


def _find_blocks(series: Series) -> frozenset[tuple[str, int]] | None:
    """Return the rounds of a series with one boot in each; None for other rounds, or no rounds."""
    blocks = [block for block in series.blocks if block is not None]
    complete = len(blocks) == len(series.medians) == len(set(blocks))
    return frozenset(blocks) if complete and blocks else None
