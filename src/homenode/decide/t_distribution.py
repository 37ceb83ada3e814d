"""Distributions of t and F: tail probabilities and quantiles, from the incomplete beta.

Own code, as numpy and scipy would cost every command 100 to 500 ms and 100 MB for three functions.
Source: NIST Digital Library of Mathematical Functions, 8.17.22 (continued fraction, evaluated by
Lentz's method); agreement with published tables is tested to six digits.
"""

import math
from functools import cache

_TINY = 1e-300


def regularised_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b), for a and b above 0; clipped to 0 and 1 outside 0 < x < 1."""
    if x <= 0.0:
        return 0.0
    if x >= 1.0:
        return 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(log_front + a * math.log(x) + b * math.log1p(-x))
    # The fraction converges fast on one side of the mean only; the other side is its complement.
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(x, a, b) / a
    return 1.0 - front * _fraction(1.0 - x, b, a) / b


def _fraction(x: float, a: float, b: float) -> float:
    c, d = 1.0, 1.0 / _nonzero(1.0 - (a + b) * x / (a + 1))
    product = d
    for m in range(1, 500):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / _nonzero(1.0 + term * d)
            c = _nonzero(1.0 + term / c)
            step = c * d
            product *= step
        if abs(step - 1.0) < 1e-15:
            break
    return product


def _nonzero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


def two_sided_p(t: float, freedom: float) -> float:
    """How likely a t at least this far from 0 is by chance, with these degrees of freedom.

    >>> round(two_sided_p(2.776445, 4), 6)
    0.05
    """
    return regularised_beta(freedom / (freedom + t * t), freedom / 2, 0.5)


@cache
def t_quantile(confidence: float, freedom: float) -> float:
    """The t that two-sided intervals of this confidence take.

    >>> round(t_quantile(0.95, 4), 4), round(t_quantile(0.99, 10), 4)
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
        following = t + missing / (2 * _density(t, freedom))
        following = following if low < following < high else (low + high) / 2
        if abs(following - t) <= 1e-14 * t:
            return following
        t = following
    return t


def _density(t: float, freedom: float) -> float:
    log_front = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    log_front -= math.log(freedom * math.pi) / 2
    return math.exp(log_front - (freedom + 1) / 2 * math.log1p(t * t / freedom))


def f_upper_p(f: float, freedom1: float, freedom2: float) -> float:
    """How likely a ratio of variances of at least f is by chance.

    >>> round(f_upper_p(19.0, 2, 2), 6), round(f_upper_p(6.388233, 4, 4), 6)
    (0.05, 0.05)
    """
    return regularised_beta(freedom2 / (freedom2 + freedom1 * f), freedom2 / 2, freedom1 / 2)
