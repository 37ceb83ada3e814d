"""Distributions of t, F and the studentised range: tail probabilities and quantiles.

numpy and scipy would cost every command 100 to 500 ms. Source: NIST Digital Library of Mathematical
Functions, 8.17.22 (Lentz); the range as its double integral (Gauss, Legendre).
"""

import math
from functools import cache

_TINY = 1e-300


def compute_beta(x: float, a: float, b: float) -> float:
    """Return I_x(a, b), for a and b above 0; clipped to 0 and 1 outside 0 < x < 1."""
    if x <= 0.0:
        return 0.0
    if x >= 1.0:
        return 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(log_front + a * math.log(x) + b * math.log1p(-x))
    # The fraction converges fast on one side of the mean only; the other side is its complement.
    if x < (a + 1) / (a + b + 2):
        return front * _compute_fraction(x, a, b) / a
    return 1.0 - front * _compute_fraction(1.0 - x, b, a) / b


def _compute_fraction(x: float, a: float, b: float) -> float:
    c, d = 1.0, 1.0 / _avoid_zero(1.0 - (a + b) * x / (a + 1))
    product = d
    for m in range(1, 500):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / _avoid_zero(1.0 + term * d)
            c = _avoid_zero(1.0 + term / c)
            step = c * d
            product *= step
        if abs(step - 1.0) < 1e-15:
            break
    return product


def _avoid_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


def two_sided_p(t: float, freedom: float) -> float:
    """Return the probability of a t at least this far from 0, with these degrees of freedom.

    >>> round(two_sided_p(2.776445, 4), 6)
    0.05
    """
    return compute_beta(freedom / (freedom + t * t), freedom / 2, 0.5)


@cache
def compute_t_quantile(confidence: float, freedom: float) -> float:
    """Return the t of two-sided intervals with this confidence.

    >>> round(compute_t_quantile(0.95, 4), 4), round(compute_t_quantile(0.99, 10), 4)
    (2.7764, 3.1693)
    """
    low, high = 0.0, 1.0
    while two_sided_p(high, freedom) > 1 - confidence:
        low, high = high, high * 2
    t = high
    for _ in range(80):
        missing = two_sided_p(t, freedom) - (1 - confidence)
        low, high = (t, high) if missing > 0 else (low, t)
        # Newton's step while it stays between, as bisection alone takes ten times as long.
        following = t + missing / (2 * _compute_density(t, freedom))
        following = following if low < following < high else (low + high) / 2
        if abs(following - t) <= 1e-14 * t:
            return following
        t = following
    return t


def _compute_density(t: float, freedom: float) -> float:
    log_front = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    log_front -= math.log(freedom * math.pi) / 2
    return math.exp(log_front - (freedom + 1) / 2 * math.log1p(t * t / freedom))


def f_upper_p(f: float, freedom1: float, freedom2: float) -> float:
    """Return the probability of a ratio of variances of at least f.

    >>> round(f_upper_p(19.0, 2, 2), 6), round(f_upper_p(6.388233, 4, 4), 6)
    (0.05, 0.05)
    """
    return compute_beta(freedom2 / (freedom2 + freedom1 * f), freedom2 / 2, freedom1 / 2)


def range_upper_p(q: float, groups: int, freedom: float) -> float:
    """Return the probability that the range of `groups` equal means, in standard errors of one
    mean, is at least q.

    With two groups it is a t: two_sided_p(q / sqrt(2)).

    >>> round(range_upper_p(4.529, 4, 8), 3), round(range_upper_p(3.877, 3, 10), 3)
    (0.05, 0.05)
    """
    if groups <= 2:
        return two_sided_p(q / math.sqrt(2), freedom)
    if q <= 0.0:
        return 1.0
    spread = 6 / math.sqrt(2 * freedom)
    low = max(0.0, 1 - spread)
    # If the estimate exceeds all ranges, the remainder is integrated in small steps.
    high = min(math.sqrt(1 + (6 * math.sqrt(2 * freedom) + 30) / freedom), _MAX_RANGE / q)
    if low >= high:
        return _MIN_P
    log_front = freedom / 2 * math.log(freedom) - (freedom / 2 - 1) * math.log(2)
    log_front -= math.lgamma(freedom / 2)
    tail = 0.0
    for place, weight in _place_nodes(24):  # off by 1e-7 at most
        scale = low + (high - low) * place
        if scale > 0.0:
            exponent = log_front + (freedom - 1) * math.log(scale) - freedom * scale**2 / 2
            tail += weight * math.exp(exponent) * (1 - _compute_range_below(q * scale, groups))
    return min(1.0, max(_MIN_P, (high - low) * tail))


_MAX_RANGE = 12.0
"""Widest range in standard deviations: ten normal values exceed it once in 10^15."""

_MIN_P = 1e-12
"""Smaller P values are not computed."""


@cache
def range_quantile(confidence: float, groups: int, freedom: float) -> float:
    """Return the range, in standard errors of one mean, that holds this share of equal means.

    >>> round(range_quantile(0.95, 4, 8), 2), round(range_quantile(0.95, 7, 14), 2)
    (4.53, 4.83)
    """
    if groups <= 2:
        return compute_t_quantile(confidence, freedom) * math.sqrt(2)
    low = compute_t_quantile(confidence, freedom) * math.sqrt(2)
    high = compute_t_quantile(1 - (1 - confidence) / math.comb(groups, 2), freedom) * math.sqrt(2)
    # Bonferroni's bound is above it, and the range of two below; between them p falls smoothly.
    missing = {
        q: math.log(range_upper_p(q, groups, freedom) / (1 - confidence)) for q in (low, high)
    }
    for _ in range(40):
        step = (
            missing[low] / (missing[low] - missing[high]) if missing[low] > missing[high] else 0.5
        )
        q = low + (high - low) * step
        missing[q] = math.log(range_upper_p(q, groups, freedom) / (1 - confidence))
        if abs(missing[q]) < 1e-7 or high - low <= 1e-9 * high:
            break
        low, high = (q, high) if missing[q] > 0 else (low, q)
    return q


def _compute_range_below(width: float, groups: int) -> float:
    """Return the probability that `groups` standard normal values are within a range of this width,
    by cubic interpolation in a table, with an error of at most 1e-8."""
    if width >= _MAX_RANGE:
        return 1.0
    values, slopes = _compute_range_table(groups)
    place = width / _STEP
    at = int(place)
    part = place - at
    remainder = 1 - part
    return remainder * remainder * (
        (1 + 2 * part) * values[at] + part * _STEP * slopes[at]
    ) + part * part * ((1 + 2 * remainder) * values[at + 1] - remainder * _STEP * slopes[at + 1])


_STEP = _MAX_RANGE / 240


@cache
def _compute_range_table(groups: int) -> tuple[list[float], list[float]]:
    """Return the probabilities and their derivatives at 241 widths."""
    values, slopes = [], []
    front = groups * 16 / math.sqrt(2 * math.pi)
    for number in range(242):
        width = number * _STEP
        value = slope = 0.0
        for z, weight, tail in _place_greatest():
            share = tail - _compute_normal_tail(z - width)
            power = weight * share ** (groups - 2)
            value += power * share
            slope += power * math.exp(-((z - width) ** 2) / 2)
        values.append(min(1.0, front * value))
        slopes.append(front * (groups - 1) / math.sqrt(2 * math.pi) * slope)
    return values, slopes


@cache
def _place_greatest() -> tuple[tuple[float, float, float], ...]:
    """Return places of the greatest value, with their weights and the probability below."""
    places = ((16 * place - 8, weight) for place, weight in _place_nodes())
    return tuple(
        (z, weight * math.exp(-z * z / 2), _compute_normal_tail(z)) for z, weight in places
    )


def _compute_normal_tail(z: float) -> float:
    return math.erfc(-z / math.sqrt(2)) / 2


@cache
def _place_nodes(count: int = 48) -> tuple[tuple[float, float], ...]:
    """Return the places from 0 to 1 and weights of the rule of Gauss and Legendre."""
    points = []
    for number in range(count):
        x = math.cos(math.pi * (number + 0.75) / (count + 0.5))
        for _ in range(8):
            before, value = 1.0, x
            for degree in range(2, count + 1):
                before, value = (
                    value,
                    ((2 * degree - 1) * x * value - (degree - 1) * before) / degree,
                )
            slope = count * (x * value - before) / (x * x - 1)
            x -= value / slope
        points.append(((1 + x) / 2, 1 / ((1 - x * x) * slope**2)))
    return tuple(points)
