"""GpuChoice of a set of nodes: the GPUs and the splits of the vCPUs that are nearest to each other.

Which GPUs are nearest depends on how many vCPUs each node gets, and the best split on the GPUs. Of
few splits each is given its nearest GPUs. Of many, a branch and bound goes over the numbers of GPUs
by home; what is left of the GPUs costs at least what each would with the split that suits it best.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations
from math import comb
from operator import itemgetter, mul
from typing import NamedTuple

from homenode.plan.bit_sets import members
from homenode.plan.search.cell_sizes import GroupRange
from homenode.plan.search.devices import HomeGpus
from homenode.plan.search.problem import SearchProblem, Work

MOST_SPLITS = 70
"""Splits of one set of nodes that are asked one by one for their GPUs."""

STEPS_OF_BRANCH = 20
"""To try a number of GPUs of a home, next to those for each node."""

DISTANCES_OF_STEP = 8
"""Distances that are looked at in a step."""

MOST_EQUAL = 100
"""Numbers of GPUs by home that are equally near and are kept, for one set of nodes."""

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
    it may get; left: so many more than the least ones. wide: the nodes with room. step: that of
    each of these, where all are one step of the same size; else 0."""

    ranges: Ranges
    low: tuple[int, ...]
    room: tuple[int, ...]
    left: int
    wide: tuple[int, ...]
    step: int

    @classmethod
    def within(cls, ranges: Ranges, groups: int) -> "_Splits":
        low = tuple([one.least for one in ranges])
        room = tuple([one.most - one.least for one in ranges])
        wide = tuple([i for i, more in enumerate(room) if more])
        step = ranges[0].step if {room[i] for i in wide} == {ranges[0].step} else 0
        return cls(ranges, low, room, groups - sum(low), wide, step)

    def distance(self, weights: Sequence[int]) -> int:
        """The least sum of groups times the weight of their node."""
        total: int = sum(map(mul, self.low, weights))
        left = self.left
        if self.step:
            more = sorted([weights[i] for i in self.wide])
            return total + self.step * sum(more[: left // self.step])
        for weight, room in sorted([(weights[i], self.room[i]) for i in self.wide]) if left else ():
            if room >= left:
                return total + left * weight
            total, left = total + room * weight, left - room
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
        for weight in sorted(set(weights)):
            if not left:
                break
            here = [i for i, other in enumerate(weights) if other == weight]
            space = sum(self.room[i] for i in here)
            for i in here:
                one = self.ranges[i]
                narrowed[i] = one._replace(least=one.most) if space <= left else one
            left -= min(space, left)
        return tuple(narrowed)

    def few(self) -> Iterator[tuple[int, ...]]:
        """The splits where they are few, each as the nodes that get a step more than their least;
        none where they are many."""
        more = self.left // self.ranges[0].step
        if (self.step or not self.wide) and comb(len(self.wide), more) <= MOST_SPLITS:
            yield from combinations(self.wide, more)


class _Asked(NamedTuple):
    """One set of nodes and one group of GPUs. row: distances of what the VM gets in any case to
    each node, in sum; certain: the GPUs of it. homes: of the `left` others."""

    splits: _Splits
    row: tuple[int, ...]
    certain: int
    homes: tuple[_Home, ...]
    left: int

    def alone(self) -> list[int]:
        """The least distance that each home can have, if it were the only one."""
        return [self.splits.distance(home.row) for home in self.homes]

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
        problem = self.problem
        if "device_distance" not in problem.rest:
            return 0
        bounds = []
        for asked in self._asked(nodes, ranges):
            self.work.spend(steps_of_distances(len(ranges), len(asked.homes)))
            costs = sorted(_of_each(asked.homes, asked.alone()))
            bounds.append(asked.splits.distance(asked.row) + sum(costs[: asked.left]))
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

    def _asked(self, nodes: int, ranges: Ranges) -> Iterator[_Asked]:
        """What is asked of each group of GPUs of which all may be chosen. GPUs at home on the nodes
        come before all others: all of them where they are not too many."""
        problem = self.problem
        positions = tuple(members(nodes))
        named = tuple([problem.devices.named_rows[node] for node in positions])
        splits, count = _Splits.within(ranges, problem.groups), problem.devices.options.count
        if not count:
            yield _Asked(splits, named, 0, (), 0)
            return
        for group in problem.devices.home_groups(nodes):
            near, far = group.near(nodes)
            left = count - sum(one.count for one in near)
            if left < 0:
                homes = _merged(near, positions)
                yield _Asked(splits, named, 0, homes, count)
                continue
            row, certain = named, 0
            for one in _merged(near, positions):
                sure, weight, _ = one.first(one.total)
                certain |= sure
                row = _plus(row, weight, one.row)
            homes = _merged(far, positions) if left else ()
            yield _Asked(splits, row, certain, homes, left)

    def _of_group(self, asked: _Asked, most: int | None) -> list[Choice]:
        if not asked.left:
            return _within(most, [asked.choice(asked.row, asked.certain, ())])
        few = list(asked.splits.few())
        if few:
            found: list[Choice] = []
            low, step = asked.splits.low, asked.splits.ranges[0].step
            lowest = [sum(map(mul, home.row, low)) for home in asked.homes]
            more = [[step * home.row[i] for home in asked.homes] for i in range(len(low))]
            for chosen in few:
                if found and self.work.left <= 0:
                    self.exact = False
                    break
                self.work.spend(steps_of_distances(len(low), len(asked.homes)))
                split = list(low)
                for i in chosen:
                    split[i] += step
                distances = list(map(sum, zip(lowest, *[more[i] for i in chosen], strict=True)))
                one = _of_split(asked, split, distances)
                if (limit := _most(found, most)) is None or one.device_distance <= limit:
                    found = _least([*found, one])
            return found
        start = _alternating(asked)
        limit = start.device_distance if most is None else min(most, start.device_distance)
        return _within(most, _least([start, *self._branched(asked, limit)]))

    def _branched(self, asked: _Asked, limit: int) -> list[Choice]:
        """Those of least distance, at most the limit: a branch and bound, depth first, over how
        many GPUs each home gives, the nearest home first."""
        alone = asked.alone()
        order = sorted(range(len(alone)), key=lambda i: alone[i] * asked.homes[i].by_weight[0][0])
        homes = [asked.homes[i] for i in order]
        # Of the homes from each on: the least that so many of their GPUs come to, each by itself.
        least_of: list[list[int]] = [[0]]
        costs: list[int] = []
        for i in reversed(order):
            costs = sorted([*costs, *_of_each([asked.homes[i]], [alone[i]])])
            least_of.append([0, *accumulate(costs)])
        least_of.reverse()
        weights = [[one.first(n)[1] for n in range(one.total + 1)] for one in homes]
        found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        work = self.work.half().half()

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
                more = _plus(row, weights[i][number], homes[i].row)
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
    alike: dict[tuple[int, ...], dict[int, int]] = {}
    for one in homes:
        row = nowhere
        if one.home is not None:
            distance = one.home.to_node
            row = tuple([distance[node] for node in positions])
        weights = alike.setdefault(row, {})
        for weight, gpus in one.by_weight:
            weights[weight] = weights.get(weight, 0) | gpus
    return tuple(
        _Home(row, tuple(sorted(weights.items())), sum(weights.values()).bit_count())
        for row, weights in alike.items()
    )


def _by_cost(homes: Sequence[_Home], distances: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(what each GPU costs, GPUs as bits), where the homes are at these distances."""
    for home, distance in zip(homes, distances, strict=True):
        for weight, gpus in home.by_weight:
            yield weight * distance, gpus


def _of_each(homes: Sequence[_Home], distances: Sequence[int]) -> Iterator[int]:
    """The same, for each GPU."""
    for cost, gpus in _by_cost(homes, distances):
        yield from [cost] * gpus.bit_count()


def _plus(row: Sequence[int], weight: int, more: Sequence[int]) -> tuple[int, ...]:
    return tuple([a + weight * b for a, b in zip(row, more, strict=True)])


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
    """A choice to begin with: the GPUs nearest to a split, the split nearest to these, and so on
    until neither gets nearer."""
    row = tuple(map(sum, zip(asked.row, *(one.row for one in asked.homes), strict=True)))
    best: Choice | None = None
    while True:
        split = asked.splits.nearest(row)
        distances = [sum(map(mul, home.row, split)) for home in asked.homes]
        found = _of_split(asked, split, distances)
        if best is not None and found.device_distance >= best.device_distance:
            return best
        best, row, left = found, asked.row, asked.left
        chosen = found.sure | sum(gpus for gpus, _ in found.tied)
        for i in sorted(range(len(distances)), key=distances.__getitem__):
            home = asked.homes[i]
            number = min(left, sum(gpus for _, gpus in home.by_weight if gpus & chosen).bit_count())
            left -= number
            row = _plus(row, home.first(number)[1], home.row)


def _most(found: Sequence[Choice], most: int | None) -> int | None:
    return found[0].device_distance if found else most


def _within(most: int | None, choices: list[Choice]) -> list[Choice]:
    return [one for one in choices if most is None or one.device_distance <= most]


def _least(choices: Sequence[Choice]) -> list[Choice]:
    least = min((one.device_distance for one in choices), default=0)
    return [one for one in choices if one.device_distance == least]
