"""NearestGpus: the GPUs and the splits of the vCPUs that are nearest to each other on some nodes.

Which GPUs are nearest depends on how many vCPUs each node gets, and the best split on the GPUs. One
split is given its nearest GPUs. Of several, all numbers of GPUs by home are tried, each with the
split that suits it; where these are too many, GPUs and split are fitted to each other in turn.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, product
from math import prod
from operator import itemgetter, mul
from typing import NamedTuple

from homenode.plan.bit_sets import members
from homenode.plan.search.cell_sizes import GroupRange
from homenode.plan.search.devices import HomeGpus
from homenode.plan.search.problem import SearchProblem

MOST_EQUAL = 100  # numbers of GPUs by home that are equally near and are kept
MOST_NUMBERS = 5_000  # of GPUs by home that are tried for one set of nodes

Ranges = tuple[GroupRange, ...]


class Choice(NamedTuple):
    """GPUs for a set of nodes, complete but for ties, and the splits that keep all devices
    nearest."""

    device_distance: int
    sure: int  # GPUs (bits)
    tied: tuple[tuple[int, int], ...]  # (GPUs that are equally near, how many of them)
    ranges: Ranges


class _Home(NamedTuple):
    """The GPUs that are as far from each of the nodes."""

    row: tuple[int, ...]  # these distances
    # (functions that each GPU brings, GPUs as bits), ascending
    by_weight: tuple[tuple[int, int], ...]
    total: int

    @classmethod
    def of(cls, row: tuple[int, ...], homes: Sequence[HomeGpus]) -> "_Home":
        if len(homes) == 1:
            return cls(row, homes[0].by_weight, homes[0].count)
        weights: dict[int, int] = {}
        for each, gpus in [one for home in homes for one in home.by_weight]:
            weights[each] = weights.get(each, 0) | gpus
        return cls(row, tuple(sorted(weights.items())), sum([home.count for home in homes]))

    def times(self, number: int) -> tuple[int, ...]:
        """The row of so many of its GPUs, the lightest first."""
        weight = self.first(number)[1]
        return self.row if weight == 1 else tuple([weight * far for far in self.row])

    def first(self, number: int) -> tuple[int, int, tuple[int, int] | None]:
        """(sure GPUs, their weight with the tied ones, (tied GPUs, how many of them))."""
        sure, weight = 0, 0
        for each, gpus in self.by_weight:
            here = gpus.bit_count()
            if here > number:
                return sure, weight + each * number, (gpus, number) if number else None
            sure |= gpus
            weight += each * here
            number -= here
        return sure, weight, None


class _Splits(NamedTuple):
    """The splits within these ranges."""

    ranges: Ranges
    low: tuple[int, ...]  # the least groups of each node, and how many more it may get
    room: tuple[int, ...]  # the least groups of each node, and how many more it may get
    left: int  # so many more than the least ones
    wide: tuple[int, ...]  # the nodes with room

    @classmethod
    def within(cls, ranges: Ranges, groups: int) -> "_Splits":
        low = tuple([one.least for one in ranges])
        room = tuple([one.most - one.least for one in ranges])
        wide = tuple([i for i, more in enumerate(room) if more])
        return cls(ranges, low, room, groups - sum(low), wide)

    def distance(self, weights: Sequence[int]) -> int:
        """The least sum of groups times the weight of their node."""
        total: int = sum(map(mul, self.low, weights))
        left = self.left
        for i in sorted(self.wide, key=weights.__getitem__) if left else ():
            total += self.room[i] * weights[i]
            left -= self.room[i]
            if left <= 0:
                return total + left * weights[i]
        return total

    def nearest(self, weights: Sequence[int]) -> list[int]:
        """The first split that comes to distance()."""
        split, left = list(self.low), self.left
        for _, i in sorted(zip(weights, range(len(split)), strict=True)) if left else ():
            more = min(self.room[i], left)
            split[i] += more
            left -= more
            if not left:
                break
        return split

    def all_nearest(self, weights: Sequence[int]) -> Ranges:
        """The ranges narrowed to the splits that come to distance()."""
        left = self.left
        if not left:
            return self.ranges
        narrowed = [GroupRange(low, low) for low in self.low]
        weight = weights.__getitem__
        for _, alike in groupby(sorted(self.wide, key=weight), key=weight):
            here = list(alike)
            space = sum([self.room[i] for i in here])
            for i in here:
                one = self.ranges[i]
                narrowed[i] = one._replace(least=one.most) if space <= left else one
            left -= min(space, left)
            if not left:
                break
        return tuple(narrowed)


class _Asked(NamedTuple):
    """One set of nodes and one group of GPUs."""

    splits: _Splits
    row: tuple[int, ...]  # distances of what the VM gets in any case to each node, in sum
    certain: int  # the GPUs of it
    homes: tuple[_Home, ...]  # of the `left` others
    left: int

    def choice(self, row: Sequence[int], sure: int, tied: tuple[tuple[int, int], ...]) -> Choice:
        """These GPUs, with all splits that are nearest to this row."""
        return Choice(self.splits.distance(row), sure, tied, self.splits.all_nearest(row))


class NearestGpus:
    """Choices of GPUs for one search. exact: so far none that is as near was omitted."""

    def __init__(self, problem: SearchProblem) -> None:
        self.exact = True
        self.problem = problem

    def bound(self, nodes: int, ranges: Ranges) -> int:
        """What no choice for these nodes (bits) can undercut."""
        if not self.problem.compares_devices:
            return 0
        bounds = []
        for asked in self._asked(nodes, ranges):
            distance = asked.splits.distance
            costs = [one for home in asked.homes for one in _of_each(home, distance(home.row))]
            bounds.append(distance(asked.row) + sum(sorted(costs)[: asked.left]))
        return min(bounds)

    def choices(self, nodes: int, ranges: Ranges) -> list[Choice]:
        """The nearest for these nodes (bits), within these ranges."""
        problem = self.problem
        count = problem.devices.options.count
        if not problem.compares_devices:
            # No GPU of those that may go together is nearer than another to this policy.
            groups = problem.devices.home_groups(nodes)
            every = (sum(gpus for one in g.homes for _, gpus in one.by_weight) for g in groups)
            tied = [((gpus, count),) for gpus in every] if count else [()]
            return [Choice(0, 0, one, ranges) for one in tied]
        found = [one for asked in self._asked(nodes, ranges) for one in self._of_group(asked)]
        least = min(one.device_distance for one in found)
        return [one for one in found if one.device_distance == least]

    def _homes(self, nodes: int) -> Iterator[tuple[list[HomeGpus], list[HomeGpus], int]]:
        """(homes of which the VM gets all GPUs, homes of which it gets some, and how many) for each
        group of GPUs of which all may be chosen. GPUs at home on the nodes come before all others:
        all of them where they are not too many."""
        devices = self.problem.devices
        count = devices.options.count
        if not count:
            yield [], [], 0
            return
        for group in devices.home_groups(nodes):
            near, far = group.near(nodes)
            left = count - sum([one.count for one in near])
            yield ([], near, count) if left < 0 else (near, far if left else [], left)

    def _asked(self, nodes: int, ranges: Ranges) -> Iterator[_Asked]:
        """What is asked of each group of GPUs of which all may be chosen."""
        positions, named = tuple(members(nodes)), self.problem.devices.named_rows
        splits = _Splits.within(ranges, self.problem.groups)
        for certain, others, left in self._homes(nodes):
            own = [(one.weight, one.home.to_node) for one in certain if one.home is not None]
            row = tuple(map(_plus(named, own).__getitem__, positions))
            sure = sum([gpus for one in certain for _, gpus in one.by_weight])
            yield _Asked(splits, row, sure, _merged(others, positions), left)

    def _of_group(self, asked: _Asked) -> list[Choice]:
        if not asked.left:
            return [asked.choice(asked.row, asked.certain, ())]
        if not asked.splits.left:
            low = asked.splits.low
            distances = [sum(map(mul, home.row, low)) for home in asked.homes]
            return [_of_split(asked, low, distances)]
        if prod([home.total + 1 for home in asked.homes]) > MOST_NUMBERS:
            self.exact = False
            return [_alternating(asked)]
        return self._of_numbers(asked)

    def _of_numbers(self, asked: _Asked) -> list[Choice]:
        """Those of least distance, of all numbers of GPUs by home."""
        homes, limit = asked.homes, None
        nearest: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for numbers in product(*[range(home.total, -1, -1) for home in homes]):
            if sum(numbers) != asked.left:
                continue
            more = [(1, home.times(n)) for home, n in zip(homes, numbers, strict=True) if n]
            row = _plus(asked.row, more)
            distance = asked.splits.distance(row)
            if limit is None or distance < limit:
                limit, nearest = distance, []
            if distance == limit:
                nearest.append((numbers, row))
        self.exact &= len(nearest) <= MOST_EQUAL
        result = []
        for numbers, row in nearest[:MOST_EQUAL]:
            firsts = [home.first(n) for home, n in zip(homes, numbers, strict=True)]
            sure = asked.certain | sum(some for some, _, _ in firsts)
            tied = tuple(one for _, _, one in firsts if one is not None)
            result.append(asked.choice(row, sure, tied))
        return result


def _merged(homes: Sequence[HomeGpus], positions: Sequence[int]) -> tuple[_Home, ...]:
    """The homes, as one those that are as far from each of these nodes."""
    nowhere = (0,) * len(positions)
    alike: dict[tuple[int, ...], list[HomeGpus]] = {}
    for one in homes:
        row = nowhere if one.home is None else tuple(map(one.home.to_node.__getitem__, positions))
        alike.setdefault(row, []).append(one)
    return tuple([_Home.of(row, its) for row, its in alike.items()])


def _by_cost(homes: Sequence[_Home], distances: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(what each GPU costs, GPUs as bits), where the homes are at these distances."""
    for home, distance in zip(homes, distances, strict=True):
        for weight, gpus in home.by_weight:
            yield weight * distance, gpus


def _of_each(home: _Home, distance: int) -> list[int]:
    """What each GPU of a home costs that is at this distance."""
    by_weight = home.by_weight
    return [weight * distance for weight, gpus in by_weight for _ in range(gpus.bit_count())]


def _plus(row: tuple[int, ...], more: Sequence[tuple[int, Sequence[int]]]) -> tuple[int, ...]:
    """The sum of a row and of others, each so many times."""
    others = [one if times == 1 else [times * far for far in one] for times, one in more]
    return tuple(map(sum, zip(row, *others, strict=True))) if others else row


def _of_split(asked: _Asked, split: Sequence[int], distances: Sequence[int]) -> Choice:
    """The GPUs that are nearest to a split. distances: of each home to it."""
    total, sure, left, tied = sum(map(mul, asked.row, split)), asked.certain, asked.left, 0
    level, wanted = -1, 0
    for cost, gpus in sorted(_by_cost(asked.homes, distances), key=itemgetter(0)):
        if cost != level:
            if left <= 0:
                break
            sure, tied, wanted, level = sure | tied, 0, left, cost
        total += cost * max(0, min(left, gpus.bit_count()))
        left -= gpus.bit_count()
        tied |= gpus
    ranges = tuple([GroupRange(groups, groups) for groups in split])
    if left < 0:
        return Choice(total, sure, ((tied, wanted),), ranges)
    return Choice(total, sure | tied, (), ranges)


def _alternating(asked: _Asked) -> Choice:
    """A choice among too many: the GPUs nearest to a split, the split nearest to these, and so on
    until neither gets nearer."""
    row = _plus(asked.row, [(1, one.row) for one in asked.homes])
    best: Choice | None = None
    while True:
        split = asked.splits.nearest(row)
        distances = [sum(map(mul, home.row, split)) for home in asked.homes]
        found = _of_split(asked, split, distances)
        if best is not None and found.device_distance >= best.device_distance:
            return best
        best, left = found, asked.left
        chosen, more = found.sure | sum(gpus for gpus, _ in found.tied), []
        for i in sorted(range(len(distances)), key=distances.__getitem__):
            home = asked.homes[i]
            number = min(left, sum([gpus & chosen for _, gpus in home.by_weight]).bit_count())
            left -= number
            more += [(1, home.times(number))] * (number > 0)
        row = _plus(asked.row, more)
