"""Collective fit: which sets of mechanisms explain all cells of the experiment.

Each mechanism leaves the same part of the bandwidth wherever it acts. Where several act, either
their costs multiply or the greatest alone counts, as a narrow place hides the next: both are tried.
Each contrast bounds what cells differ by: linear inequalities of the few costs, which have a
solution or not (Fourier and Motzkin: variables are eliminated one by one).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, permutations

from homenode.decide.collective_cells import MATTERS, Contrast, SettingCell
from homenode.decide.collective_mechanisms import MECHANISMS, Mechanism, Prediction

MOST = 3
"""Mechanisms of an explanation. With more everything is explained, and nothing is named."""

Pattern = tuple[tuple[int, int], ...]
"""Of each cell: whether something acts there for certain, and whether it may."""

_CODES = {Prediction.NOT: (0, 0), Prediction.EITHER: (0, 1), Prediction.SLOWER: (1, 1)}

Explanation = frozenset[Mechanism]


class CellsFit:
    """The contrasts of some cells. kept: explanations by their patterns, as they were found."""

    def __init__(self, cells: Sequence[SettingCell], found: Sequence[Contrast]) -> None:
        self.cells = tuple(cells)
        place = {cell: number for number, cell in enumerate(cells)}
        self._bounds = list(_bounds(found, place))
        self._kept: dict[tuple[Pattern, ...], bool] = {}

    def pattern(self, predicts: Callable[[SettingCell], Prediction]) -> Pattern:
        return tuple(_CODES[predicts(cell)] for cell in self.cells)

    def explains(self, patterns: Sequence[Pattern]) -> bool:
        """Whether mechanisms with these patterns, and nothing else, agree with every contrast."""
        key = tuple(sorted(patterns))
        if key not in self._kept:
            self._kept[key] = self._has_solution(key)
        return self._kept[key]

    def _has_solution(self, patterns: Sequence[Pattern]) -> bool:
        """With costs that multiply, or with the greatest alone in any order of them."""
        count = len(patterns)
        least = dict.fromkeys((_unit(count, place, -1) for place in range(count)), 0.0)
        orders: list[tuple[int, ...] | None] = [None]
        orders += permutations(range(count)) if count > 1 else []
        for order in orders:
            system = dict(least)
            for greater, smaller in zip(order or (), (order or ())[1:], strict=False):
                both = zip(_unit(count, smaller, 1), _unit(count, greater, -1), strict=True)
                system[tuple(map(sum, both))] = 0.0
            acting = [
                tuple(
                    _acting([pattern[cell][kind] for pattern in patterns], order) for kind in (0, 1)
                )
                for cell in range(len(self.cells))
            ]
            for terms, most in self._bounds:
                row = [0] * count
                for cell, sign, kind in terms:
                    for place in acting[cell][kind]:
                        row[place] += sign
                key = tuple(row)
                system[key] = min(most, system.get(key, most))
            if _is_feasible(system):
                return True
        return False

    def explanations(self) -> tuple[Explanation, ...]:
        """Sets of mechanisms that explain all cells, with as few as do."""
        patterns = {one: self.pattern(one.predicts) for one in MECHANISMS}
        acting = [one for one in MECHANISMS if any(may for _, may in patterns[one])]
        for count in range(MOST + 1):
            found = tuple(
                frozenset(those)
                for those in combinations(acting, count)
                if self.explains([patterns[one] for one in those])
            )
            if found:
                return found
        return ()

    def unnamed_rivals(
        self, one: Mechanism, count: int, unknown: Sequence[Callable[[SettingCell], bool]]
    ) -> Iterator[Callable[[SettingCell], bool]]:
        """What has no name and explains all cells without the mechanism, in sets of so many; by
        itself first."""
        patterns = {self.pattern(each.predicts) for each in MECHANISMS if each is not one}
        rest = sorted(each for each in patterns if any(may for _, may in each))
        unnamed: dict[Pattern, Callable[[SettingCell], bool]] = {}
        for acts in unknown:
            unnamed.setdefault(tuple((int(acts(cell)),) * 2 for cell in self.cells), acts)
        for fewer in range(count):
            for those in combinations(rest, fewer):
                for pattern, acts in unnamed.items():
                    if self.explains([pattern, *those]):
                        yield acts


_Term = tuple[int, int, int]
"""A cell, its sign, and what of it counts: what acts for certain (0), or what may (1)."""


def _bounds(
    found: Sequence[Contrast], place: Mapping[SettingCell, int]
) -> Iterator[tuple[tuple[_Term, ...], float]]:
    """Sums of losses, each with the most that it is."""
    for one in found:
        signed = [(place[one.second], 1), (place[one.first], -1)]
        if one.than is not None:
            signed += [(place[one.than.second], -1), (place[one.than.first], 1)]
        for direction, most in ((1, MATTERS - one.low), (-1, MATTERS + one.high)):
            yield (
                tuple((cell, sign * direction, int(sign * direction < 0)) for cell, sign in signed),
                most,
            )


def _acting(acts: Sequence[int], order: Sequence[int] | None) -> tuple[int, ...]:
    """The mechanisms whose costs count in a cell."""
    if order is None:
        return tuple(place for place, does in enumerate(acts) if does)
    return tuple(place for place in order if acts[place])[:1]


def _unit(count: int, place: int, value: int) -> tuple[int, ...]:
    return tuple(value if each == place else 0 for each in range(count))


_ROUNDING = 1e-9


def _is_feasible(system: Mapping[tuple[int, ...], float]) -> bool:
    """Whether values exist, of which each sum with these factors is at most its bound."""
    count = len(next(iter(system), ()))
    if count == 0:
        return all(most >= -_ROUNDING for most in system.values())
    fewer: dict[tuple[int, ...], float] = {}
    above = [(row, most) for row, most in system.items() if row[-1] > 0]
    below = [(row, most) for row, most in system.items() if row[-1] < 0]
    rest = [(row[:-1], most) for row, most in system.items() if not row[-1]]
    for up, most in above:
        for down, least in below:
            a, b = -down[-1], up[-1]
            joined = tuple(a * x + b * y for x, y in zip(up[:-1], down[:-1], strict=True))
            rest.append((joined, a * most + b * least))
    for row, most in rest:
        divisor = math.gcd(*row) or 1 if row else 1
        key = tuple(each // divisor for each in row)
        fewer[key] = min(most / divisor, fewer.get(key, math.inf))
        if not any(key) and fewer[key] < -_ROUNDING:
            return False
    return _is_feasible(fewer)
