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

from homenode.plan.search.cell_sizes import GroupRange
from homenode.plan.search.distances import members
from homenode.plan.search.first_terms import FirstTerms, HomeGpus

MOST_SPLITS = 70
"""Splits of one set of nodes that are asked one by one for their GPUs."""

MOST_BRANCHES = 6_000
"""Numbers of GPUs by home that one search tries, over all sets of nodes."""

MOST_EQUAL = 50
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


class _Asked(NamedTuple):
    """One set of nodes and one group of GPUs. row: distances of what the VM gets in any case to
    each node, in sum; certain: the GPUs of it. homes: of the `left` others."""

    ranges: Ranges
    groups: int
    row: tuple[int, ...]
    certain: int
    homes: tuple[_Home, ...]
    left: int


class NearestGpus:
    """Choices of GPUs for one search. exact: so far none that is as near was left out."""

    def __init__(self, terms: FirstTerms) -> None:
        self.exact = True
        self._terms = terms
        self._branches = MOST_BRANCHES

    def bound(self, nodes: int, ranges: Ranges) -> int:
        """What no choice for these nodes (bits) can undercut."""
        problem = self._terms.problem
        if "device_distance" not in problem.rest:
            return 0
        bounds = []
        for asked in self._asked(nodes, ranges):
            costs = sorted(_of_each(asked.homes, _alone(asked)))
            bounds.append(_distance(ranges, asked.row, asked.groups) + sum(costs[: asked.left]))
        return min(bounds)

    def choices(self, nodes: int, ranges: Ranges, most: int | None = None) -> list[Choice]:
        """The nearest for these nodes (bits), within these ranges; none where they are farther
        than `most`."""
        problem = self._terms.problem
        count = problem.options.count
        if "device_distance" not in problem.rest:
            # No GPU of those that may go together is nearer than another to this policy.
            groups = self._terms.home_groups(nodes)
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
        problem = self._terms.problem
        positions = tuple(members(nodes))
        named = tuple([self._terms.named_rows[node] for node in positions])
        count = problem.options.count
        if not count:
            yield _Asked(ranges, problem.groups, named, 0, (), 0)
            return
        for group in self._terms.home_groups(nodes):
            near, far = group.near(nodes)
            left = count - sum(one.count for one in near)
            if left < 0:
                homes = _merged(near, positions)
                yield _Asked(ranges, problem.groups, named, 0, homes, count)
                continue
            row, certain = named, 0
            for one in _merged(near, positions):
                sure, weight, _ = one.first(one.total)
                certain |= sure
                row = _plus(row, weight, one.row)
            homes = _merged(far, positions) if left else ()
            yield _Asked(ranges, problem.groups, row, certain, homes, left)

    def _of_group(self, asked: _Asked, most: int | None) -> list[Choice]:
        if not asked.left:
            only = _choice(asked.ranges, asked.groups, asked.row, asked.certain, ())
            return _within(most, [only])
        splits = list(_few_splits(asked.ranges, asked.groups))
        if splits:
            found: list[Choice] = []
            low, step = [one.least for one in asked.ranges], asked.ranges[0].step
            lowest = [sum(map(mul, home.row, low)) for home in asked.homes]
            rows = [home.row for home in asked.homes]
            for chosen in splits:
                split, distances = low.copy(), lowest
                for i in chosen:
                    split[i] += step
                    distances = [
                        one + step * row[i] for one, row in zip(distances, rows, strict=True)
                    ]
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
        alone = [_distance(asked.ranges, one.row, asked.groups) for one in asked.homes]
        order = sorted(range(len(alone)), key=lambda i: alone[i] * asked.homes[i].by_weight[0][0])
        homes = [asked.homes[i] for i in order]
        # Of the homes from each on: the least that so many of their GPUs come to, each by itself.
        least_of: list[list[int]] = [[0]]
        costs: list[int] = []
        for i in reversed(order):
            for weight, gpus in asked.homes[i].by_weight:
                costs += [weight * alone[i]] * gpus.bit_count()
            costs.sort()
            least_of.append([0, *accumulate(costs)])
        least_of.reverse()
        weights = [[one.first(n)[1] for n in range(one.total + 1)] for one in homes]
        found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

        def visit(numbers: tuple[int, ...], left: int, row: tuple[int, ...]) -> None:
            nonlocal limit
            i = len(numbers)
            if not left:
                distance = _distance(asked.ranges, row, asked.groups)
                if distance < limit:
                    found.clear()
                    limit = distance
                if distance == limit:
                    found.append((numbers, row))
                return
            rest = len(least_of[i + 1]) - 1
            for number in range(min(left, homes[i].total), max(0, left - rest) - 1, -1):
                if not self._branches:
                    self.exact = False
                    return
                self._branches -= 1
                more = _plus(row, weights[i][number], homes[i].row)
                bound = _distance(asked.ranges, more, asked.groups)
                bound += least_of[i + 1][left - number]
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
            result.append(_choice(asked.ranges, asked.groups, row, sure, tied))
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


def _few_splits(ranges: Ranges, groups: int) -> Iterator[tuple[int, ...]]:
    """The splits where they are few, each as the nodes that get a step more than their least; none
    where they are many."""
    low = [one.least for one in ranges]
    wide = [i for i, one in enumerate(ranges) if one.most > one.least]
    more, step = (groups - sum(low)) // ranges[0].step, ranges[0].step
    if any(ranges[i].most - low[i] > step for i in wide) or comb(len(wide), more) > MOST_SPLITS:
        return
    yield from combinations(wide, more)


def _by_cost(homes: Sequence[_Home], distances: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(what each GPU costs, GPUs as bits), where the homes are at these distances."""
    for home, distance in zip(homes, distances, strict=True):
        for weight, gpus in home.by_weight:
            yield weight * distance, gpus


def _of_each(homes: Sequence[_Home], distances: Sequence[int]) -> Iterator[int]:
    """The same, for each GPU."""
    for cost, gpus in _by_cost(homes, distances):
        yield from [cost] * gpus.bit_count()


def _alone(asked: _Asked) -> list[int]:
    """The least distance that each home can have, if it were the only one."""
    return [_distance(asked.ranges, home.row, asked.groups) for home in asked.homes]


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
        split = _filled(asked.ranges, row, asked.groups)
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


def _choice(
    ranges: Ranges, groups: int, row: Sequence[int], sure: int, tied: tuple[tuple[int, int], ...]
) -> Choice:
    return Choice(_distance(ranges, row, groups), sure, tied, _nearest(ranges, row, groups))


def _most(found: Sequence[Choice], most: int | None) -> int | None:
    return found[0].device_distance if found else most


def _within(most: int | None, choices: list[Choice]) -> list[Choice]:
    return [one for one in choices if most is None or one.device_distance <= most]


def _least(choices: Sequence[Choice]) -> list[Choice]:
    least = min((one.device_distance for one in choices), default=0)
    return [one for one in choices if one.device_distance == least]


# Ranges of groups, and the distance of each node.


def _filled(ranges: Ranges, weights: Sequence[int], groups: int) -> list[int]:
    """The split of least sum of groups times weight."""
    split = [one.least for one in ranges]
    left = groups - sum(split)
    for _, i in sorted(zip(weights, range(len(split)), strict=True)) if left else ():
        more = min(ranges[i].most - split[i], left)
        split[i] += more
        left -= more
        if not left:
            break
    return split


def _distance(ranges: Ranges, weights: Sequence[int], groups: int) -> int:
    """The least sum of groups times weight."""
    return sum(map(mul, _filled(ranges, weights, groups), weights))


def _nearest(ranges: Ranges, weights: Sequence[int], groups: int) -> Ranges:
    """The ranges narrowed to the splits of least sum of groups times weight."""
    left = groups - sum(one.least for one in ranges)
    if not left:
        return ranges
    narrowed = [one._replace(most=one.least) for one in ranges]
    for weight in sorted(set(weights)):
        if not left:
            break
        here = [i for i, other in enumerate(weights) if other == weight]
        space = sum(ranges[i].most - ranges[i].least for i in here)
        for i in here:
            narrowed[i] = ranges[i]._replace(least=ranges[i].most) if space <= left else ranges[i]
        left -= min(space, left)
    return tuple(narrowed)
