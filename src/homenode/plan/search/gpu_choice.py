"""NearestGpus: the GPUs and splits of the vCPUs that are nearest to each other on given nodes.

The nearest GPUs depend on the split of the vCPUs over nodes, and the best split depends on the
GPUs. A single split gets its nearest GPUs. With several splits, all numbers of GPUs by home are
tried, each with its best split; beyond a limit only the split nearest to all GPUs is tried.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, product
from math import prod
from operator import itemgetter, mul
from typing import NamedTuple

from homenode.cpuset import list_members
from homenode.plan.search.devices import HomeGpus
from homenode.plan.search.problem import SearchProblem
from homenode.plan.search.supply import GroupRange

MAX_EQUAL = 100  # equally near combinations of GPU counts by home that are kept
MAX_NUMBERS = 5_000  # combinations of GPU counts by home tried for one set of nodes

Ranges = tuple[GroupRange, ...]


class NearestChoice(NamedTuple):
    """GPUs for a set of nodes, complete except for ties, and the splits nearest to all devices."""

    device_distance: int
    sure: int  # GPUs (bits)
    tied: tuple[tuple[int, int], ...]  # (equally near GPUs, number to choose)
    ranges: Ranges


class _Home(NamedTuple):
    """GPUs with the same distance to each node."""

    row: tuple[int, ...]  # these distances
    # (functions that come with each GPU, GPUs as bits), ascending
    by_weight: tuple[tuple[int, int], ...]
    total: int

    @classmethod
    def merge(cls, row: tuple[int, ...], homes: Sequence[HomeGpus]) -> "_Home":
        if len(homes) == 1:
            return cls(row, homes[0].by_weight, homes[0].count)
        weights: dict[int, int] = {}
        for weight, gpus in [weighted for home in homes for weighted in home.by_weight]:
            weights[weight] = weights.get(weight, 0) | gpus
        return cls(row, tuple(sorted(weights.items())), sum([home.count for home in homes]))

    def times(self, number: int) -> tuple[int, ...]:
        """Return the row of a number of its GPUs, the lightest first."""
        weight = self.first(number)[1]
        return self.row if weight == 1 else tuple([weight * term for term in self.row])

    def first(self, number: int) -> tuple[int, int, tuple[int, int] | None]:
        """Return (sure GPUs, their weight with the tied GPUs, (tied GPUs, number to choose))."""
        sure, weight = 0, 0
        for load, gpus in self.by_weight:
            count = gpus.bit_count()
            if count > number:
                return sure, weight + load * number, (gpus, number) if number else None
            sure |= gpus
            weight += load * count
            number -= count
        return sure, weight, None


class _Splits(NamedTuple):
    """All splits within these ranges."""

    ranges: Ranges
    low: tuple[int, ...]  # further groups that each node may get
    room: tuple[int, ...]  # the least groups of each node, and how many more it may get
    extra: int  # groups beyond the minimum
    wide: tuple[int, ...]  # nodes that may get more groups

    @classmethod
    def from_ranges(cls, ranges: Ranges, groups: int) -> "_Splits":
        low = tuple([bounds.lowest for bounds in ranges])
        room = tuple([bounds.highest - bounds.lowest for bounds in ranges])
        wide = tuple([i for i, space in enumerate(room) if space])
        return cls(ranges, low, room, groups - sum(low), wide)

    def distance(self, weights: Sequence[int]) -> int:
        """Return the least sum of groups times the weight of their node."""
        total: int = sum(map(mul, self.low, weights))
        extra = self.extra
        for i in sorted(self.wide, key=weights.__getitem__) if extra else ():
            total += self.room[i] * weights[i]
            extra -= self.room[i]
            if extra <= 0:
                return total + extra * weights[i]
        return total

    def nearest(self, weights: Sequence[int]) -> list[int]:
        """Return the first split whose sum is distance()."""
        split, extra = list(self.low), self.extra
        for _, i in sorted(zip(weights, range(len(split)), strict=True)) if extra else ():
            added_count = min(self.room[i], extra)
            split[i] += added_count
            extra -= added_count
            if not extra:
                break
        return split

    def all_nearest(self, weights: Sequence[int]) -> Ranges:
        """Return the ranges narrowed to the splits whose sum is distance()."""
        extra = self.extra
        if not extra:
            return self.ranges
        narrowed = [bounds._replace(highest=bounds.lowest) for bounds in self.ranges]
        weight = weights.__getitem__
        for _, same_weight in groupby(sorted(self.wide, key=weight), key=weight):
            positions = list(same_weight)
            space = sum([self.room[i] for i in positions])
            for i in positions:
                bounds = self.ranges[i]
                narrowed[i] = bounds._replace(lowest=bounds.highest) if space <= extra else bounds
            extra -= min(space, extra)
            if not extra:
                break
        return tuple(narrowed)


class _Case(NamedTuple):
    """One set of nodes and one group of GPUs."""

    splits: _Splits
    row: tuple[int, ...]  # sum of the distances from the named devices to each node
    certain: int  # GPUs of the group that are chosen in any case
    homes: tuple[_Home, ...]  # homes of which some GPUs are chosen
    missing: int  # number of GPUs to choose from `homes`

    def choice(
        self, row: Sequence[int], sure: int, tied: tuple[tuple[int, int], ...]
    ) -> NearestChoice:
        """Return these GPUs with all splits that are nearest to this row."""
        return NearestChoice(self.splits.distance(row), sure, tied, self.splits.all_nearest(row))


class NearestGpus:
    """Choices of GPUs for one search. exact: no equally near choice has been omitted so far."""

    def __init__(self, problem: SearchProblem) -> None:
        self.exact = True
        self.problem = problem

    def least_distance(self, nodes: int, ranges: Ranges) -> int:
        """Return a lower bound of all choices for these nodes (bits)."""
        if not self.problem.compares_devices:
            return 0
        bounds = []
        for case in self._list_cases(nodes, ranges):
            distance = case.splits.distance
            costs = [
                cost for home in case.homes for cost in _list_numbers(home, distance(home.row))
            ]
            bounds.append(distance(case.row) + sum(sorted(costs)[: case.missing]))
        return min(bounds)

    def choices(self, nodes: int, ranges: Ranges) -> list[NearestChoice]:
        """Return the nearest choices for these nodes (bits), within these ranges."""
        problem = self.problem
        count = problem.devices.options.count
        if not problem.compares_devices:
            if not count:
                return [NearestChoice(0, 0, (), ranges)]
            # This policy ignores distances, so the GPUs of a group are equal.
            groups = problem.devices.home_groups(nodes)
            all_gpus = (sum(gpus for h in g.homes for _, gpus in h.by_weight) for g in groups)
            return [NearestChoice(0, 0, ((gpus, count),), ranges) for gpus in all_gpus]
        choices = [
            choice
            for case in self._list_cases(nodes, ranges)
            for choice in self._choose_in_group(case)
        ]
        least = min(choice.device_distance for choice in choices)
        return [choice for choice in choices if choice.device_distance == least]

    def _split_homes(self, nodes: int) -> Iterator[tuple[list[HomeGpus], list[HomeGpus], int]]:
        """Yield (homes of which the VM gets all GPUs, homes of which it gets some, and how many)
        for each group of GPUs. GPUs at home on the nodes come first, all of them if they are not
        too many."""
        devices = self.problem.devices
        count = devices.options.count
        if not count:
            yield [], [], 0
            return
        for group in devices.home_groups(nodes):
            at_home, far = group.split_by_home(nodes)
            missing = count - sum([home.count for home in at_home])
            yield (
                ([], at_home, count) if missing < 0 else (at_home, far if missing else [], missing)
            )

    def _list_cases(self, nodes: int, ranges: Ranges) -> Iterator[_Case]:
        """Yield the case of each group of GPUs."""
        positions, named_rows = tuple(list_members(nodes)), self.problem.devices.named_rows
        splits = _Splits.from_ranges(ranges, self.problem.groups)
        for certain, open_homes, missing in self._split_homes(nodes):
            rows = [(home.weight, home.home.to_node) for home in certain if home.home is not None]
            row = tuple(map(_add_rows(named_rows, rows).__getitem__, positions))
            sure = sum([gpus for home in certain for _, gpus in home.by_weight])
            yield _Case(splits, row, sure, _merge_homes(open_homes, positions), missing)

    def _choose_in_group(self, case: _Case) -> list[NearestChoice]:
        if not case.missing:
            return [case.choice(case.row, case.certain, ())]
        if case.splits.extra and prod([home.total + 1 for home in case.homes]) <= MAX_NUMBERS:
            return self._choose_by_numbers(case)
        self.exact &= not case.splits.extra
        split = case.splits.nearest(_add_rows(case.row, [(1, home.row) for home in case.homes]))
        return [_choose_nearest(case, split)]

    def _choose_by_numbers(self, case: _Case) -> list[NearestChoice]:
        """Return the numbers of GPUs by home with the least distance."""
        homes, limit = case.homes, None
        nearest: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for numbers in product(*[range(home.total, -1, -1) for home in homes]):
            if sum(numbers) != case.missing:
                continue
            rows = [(1, home.times(n)) for home, n in zip(homes, numbers, strict=True) if n]
            row = _add_rows(case.row, rows)
            distance = case.splits.distance(row)
            if limit is None or distance < limit:
                limit, nearest = distance, []
            if distance == limit:
                nearest.append((numbers, row))
        self.exact &= len(nearest) <= MAX_EQUAL
        result = []
        for numbers, row in nearest[:MAX_EQUAL]:
            firsts = [home.first(n) for home, n in zip(homes, numbers, strict=True)]
            sure = case.certain | sum(some for some, _, _ in firsts)
            tied = tuple(tie for _, _, tie in firsts if tie is not None)
            result.append(case.choice(row, sure, tied))
        return result


def _merge_homes(homes: Sequence[HomeGpus], positions: Sequence[int]) -> tuple[_Home, ...]:
    """Merge homes that have the same distance to each of these nodes."""
    nowhere = (0,) * len(positions)
    homes_by_row: dict[tuple[int, ...], list[HomeGpus]] = {}
    for home in homes:
        row = nowhere if home.home is None else tuple(map(home.home.to_node.__getitem__, positions))
        homes_by_row.setdefault(row, []).append(home)
    return tuple([_Home.merge(row, same_row) for row, same_row in homes_by_row.items()])


def _list_numbers(home: _Home, distance: int) -> list[int]:
    by_weight = home.by_weight
    return [weight * distance for weight, gpus in by_weight for _ in range(gpus.bit_count())]


def _add_rows(row: tuple[int, ...], rows: Sequence[tuple[int, Sequence[int]]]) -> tuple[int, ...]:
    """Return the sum of a row and of further rows, each multiplied by its count."""
    added = [far_row if times == 1 else [times * n for n in far_row] for times, far_row in rows]
    return tuple(map(sum, zip(row, *added, strict=True))) if added else row


def _choose_nearest(case: _Case, split: Sequence[int]) -> NearestChoice:
    total, tied = sum(map(mul, case.row, split)), 0
    sure, missing = case.certain, case.missing
    level, tied_count = -1, 0
    costs = [
        (weight * sum(map(mul, home.row, split)), gpus)
        for home in case.homes
        for weight, gpus in home.by_weight
    ]
    for cost, gpus in sorted(costs, key=itemgetter(0)):
        if cost != level:
            if missing <= 0:
                break
            sure, tied, tied_count, level = sure | tied, 0, missing, cost
        total += cost * max(0, min(missing, gpus.bit_count()))
        missing -= gpus.bit_count()
        tied |= gpus
    ranges = tuple([GroupRange(groups, groups) for groups in split])
    if missing < 0:
        return NearestChoice(total, sure, ((tied, tied_count),), ranges)
    return NearestChoice(total, sure | tied, (), ranges)
