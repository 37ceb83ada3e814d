"""GpuChoice of a set of nodes: the GPUs and the splits of the vCPUs that are nearest to each other.

Which GPUs are nearest depends on how many vCPUs each node gets, and the best split on the GPUs. One
split is given its nearest GPUs. Of several, a branch and bound goes over the numbers of GPUs by
home; what is left of the GPUs costs at least what each would with the split that suits it best.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from operator import add, itemgetter, mul
from typing import NamedTuple

from homenode.plan.bit_sets import members
from homenode.plan.search.cell_sizes import GroupRange
from homenode.plan.search.devices import HomeGpus
from homenode.plan.search.problem import SearchProblem, Work

MOST_EQUAL = 100  # numbers of GPUs by home that are equally near and are kept
STEPS_OF_BRANCH = 10  # to try a number of GPUs of a home, next to those for each node
DISTANCES_OF_STEP = 8  # that are looked at

Ranges = tuple[GroupRange, ...]


class Choice(NamedTuple):
    """GPUs for a set of nodes, complete but for ties, and the splits that keep all devices nearest.

    sure: GPUs (bits). tied: (GPUs that are equally near, how many of them).
    """

    device_distance: int
    sure: int
    tied: tuple[tuple[int, int], ...]
    ranges: Ranges


class _Home(NamedTuple):
    """The GPUs that are as far from each of the nodes. row: these distances. by_weight: (functions
    that each GPU brings, GPUs as bits), ascending."""

    row: tuple[int, ...]
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
    """The splits within these ranges. low, room: the least groups of each node, and how many more
    it may get; left: so many more than the least ones. wide: the nodes with room."""

    ranges: Ranges
    low: tuple[int, ...]
    room: tuple[int, ...]
    left: int
    wide: tuple[int, ...]

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
        narrowed = [
            GroupRange(low, low, one.step) for low, one in zip(self.low, self.ranges, strict=True)
        ]
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
    """One set of nodes and one group of GPUs. row: distances of what the VM gets in any case to
    each node, in sum; certain: the GPUs of it. homes: of the `left` others."""

    splits: _Splits
    row: tuple[int, ...]
    certain: int
    homes: tuple[_Home, ...]
    left: int

    def choice(self, row: Sequence[int], sure: int, tied: tuple[tuple[int, int], ...]) -> Choice:
        """These GPUs, with all splits that are nearest to this row."""
        return Choice(self.splits.distance(row), sure, tied, self.splits.all_nearest(row))


def steps_of_distances(nodes: int, homes: int) -> int:
    """To look at the distances from so many nodes to so many homes, once each."""
    return 20 + nodes * homes // DISTANCES_OF_STEP


class NearestGpus:
    """Choices of GPUs for one search. exact: so far none that is as near was left out."""

    def __init__(self, problem: SearchProblem, work: Work) -> None:
        self.exact = True
        self.problem, self.work = problem, work

    def bound(self, nodes: int, ranges: Ranges) -> int:
        """What no choice for these nodes (bits) can undercut."""
        bounds = [0] * ("device_distance" not in self.problem.rest)
        for asked in () if bounds else self._asked(nodes, ranges):
            self.work.spend(steps_of_distances(len(ranges), len(asked.homes)))
            distance = asked.splits.distance
            costs = [one for home in asked.homes for one in _of_each(home, distance(home.row))]
            bounds.append(distance(asked.row) + sum(sorted(costs)[: asked.left]))
        return min(bounds)

    def choices(self, nodes: int, ranges: Ranges, most: int | None = None) -> list[Choice]:
        """The nearest for these nodes (bits), within these ranges; none where they are farther
        than `most`."""
        problem = self.problem
        count = problem.devices.options.count
        if "device_distance" not in problem.rest:
            # No GPU of those that may go together is nearer than another to this policy.
            groups = problem.devices.home_groups(nodes)
            every = (sum(gpus for one in g.homes for _, gpus in one.by_weight) for g in groups)
            tied = [((gpus, count),) for gpus in every] if count else [()]
            return [Choice(0, 0, one, ranges) for one in tied]
        found: list[Choice] = []
        for asked in self._asked(nodes, ranges):
            found = _least([*found, *self._of_group(asked, _most(found, most))])
        return found

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
            self.work.spend(steps_of_distances(len(positions), 2 * (len(certain) + len(others))))
            own = [(one.weight, one.home.to_node) for one in certain if one.home is not None]
            row = tuple(map(_plus(named, own).__getitem__, positions))
            sure = sum([gpus for one in certain for _, gpus in one.by_weight])
            yield _Asked(splits, row, sure, _merged(others, positions), left)

    def _of_group(self, asked: _Asked, most: int | None) -> list[Choice]:
        if not asked.left:
            if most is not None and asked.splits.distance(asked.row) > most:
                return []
            return [asked.choice(asked.row, asked.certain, ())]
        if not asked.splits.left:
            self.work.spend(steps_of_distances(len(asked.row), len(asked.homes)))
            low = asked.splits.low
            distances = [sum(map(mul, home.row, low)) for home in asked.homes]
            return _within(most, [_of_split(asked, low, distances)])
        start = _alternating(asked, self.work)
        limit = start.device_distance if most is None else min(most, start.device_distance)
        return _within(most, _least([start, *self._branched(asked, limit)]))

    def _branched(self, asked: _Asked, limit: int) -> list[Choice]:
        """Those of least distance, at most the limit: a branch and bound, depth first, over how
        many GPUs each home gives, the nearest home first."""
        self.work.spend(steps_of_distances(len(asked.row), 2 * len(asked.homes)))
        alone = [asked.splits.distance(home.row) for home in asked.homes]
        order = sorted(range(len(alone)), key=lambda i: alone[i] * asked.homes[i].by_weight[0][0])
        homes = [asked.homes[i] for i in order]
        # Of the homes from each on: the least that so many of their GPUs come to, each by itself.
        least_of: list[list[int]] = [[0]]
        costs: list[int] = []
        for i in reversed(order):
            costs = sorted([*costs, *_of_each(asked.homes[i], alone[i])])
            least_of.append([0, *accumulate(costs)])
        least_of.reverse()
        rows = [[one.times(n) for n in range(one.total + 1)] for one in homes]
        found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        work = self.work.part(4)

        def visit(numbers: tuple[int, ...], left: int, row: tuple[int, ...]) -> None:
            nonlocal limit
            i = len(numbers)
            if not left:
                distance = asked.splits.distance(row)
                if distance < limit:
                    found.clear()
                    limit = distance
                if distance == limit:
                    found.append((numbers, row))
                return
            rest = len(least_of[i + 1]) - 1
            for number in range(min(left, homes[i].total), max(0, left - rest) - 1, -1):
                if work.left <= 0:
                    self.exact = False
                    return
                work.spend(STEPS_OF_BRANCH + len(row))
                more = tuple(map(add, row, rows[i][number])) if number else row
                bound = asked.splits.distance(more) + least_of[i + 1][left - number]
                if bound == limit and len(found) >= MOST_EQUAL:
                    self.exact = False
                elif bound <= limit:
                    visit((*numbers, number), left - number, more)

        visit((), asked.left, asked.row)
        result = []
        for numbers, row in found:
            firsts = [one.first(n) for one, n in zip(homes, numbers, strict=False)]
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


def _alternating(asked: _Asked, work: Work) -> Choice:
    """A choice to begin with: the GPUs nearest to a split, the split nearest to these, and so on
    until neither gets nearer."""
    row = _plus(asked.row, [(1, one.row) for one in asked.homes])
    best: Choice | None = None
    while True:
        work.spend(steps_of_distances(len(row), len(asked.homes)))
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


def _most(found: Sequence[Choice], most: int | None) -> int | None:
    return found[0].device_distance if found else most


def _within(most: int | None, choices: list[Choice]) -> list[Choice]:
    return [one for one in choices if most is None or one.device_distance <= most]


def _least(choices: Sequence[Choice]) -> list[Choice]:
    least = min((one.device_distance for one in choices), default=0)
    return [one for one in choices if one.device_distance == least]
