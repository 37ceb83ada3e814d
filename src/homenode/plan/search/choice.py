"""Choice: the best nodes of one group of nodes that are near enough to each other.

Within such a group the rest of the cost is: how even the split is, then sums over the nodes. Some
sets of nodes (`needs`, disjoint) must each give one. Then:

* equal shares: the lightest node of each need, and the lightest of all others; over few packages by
  dynamic programming;
* uneven shares: the level to which nodes fill up follows from the largest capacities (any even-most
  split is a permutation of theirs: Marshall, Olkin, Arnold, Inequalities, 1.D); then by dynamic
  programming the lightest nodes that reach it, some filled to the level and some one below.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from homenode.plan.search.near import Steps, members
from homenode.plan.search.question import Question


@dataclass(frozen=True, slots=True)
class Choice:
    """Nodes (bits) with their groups. rank: (unevenness, weight), which orders choices."""

    mask: int
    split: tuple[tuple[int, int], ...]
    rank: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Shares:
    """The nodes that are worth a look for one number of nodes.

    capacity: groups by node; only nodes that have some. each: the equal share, None = uneven.
    """

    question: Question
    number: int
    capacity: dict[int, int]
    each: int | None

    @property
    def eligible(self) -> int:
        return sum(1 << node for node in self.capacity)

    def by_package(self, group: int) -> tuple[int, ...]:
        """The group's nodes (bits) of each package."""
        held: dict[int, int] = {}
        for node in members(group):
            package = self.question.packages[node]
            held[package] = held.get(package, 0) | 1 << node
        return tuple(held.values())

    def package_counts(self, group: int, hits: tuple[int, ...]) -> tuple[int | None, ...]:
        """Numbers of packages to try, least first; None = all that the group has."""
        held = self.by_package(group)
        if len(held) in (1, group.bit_count()) or self.number == 1:
            return (None,)
        bound = sum(any(not hit & group & ~package for hit in hits) for package in held)
        enough = sorted(count for count, (most, _) in self.roomiest(held).items()
                        if most >= self.question.groups)  # fmt: skip
        return tuple(None if count == len(held) else count for count in enough if count >= bound)

    def roomiest(self, held: tuple[int, ...]) -> dict[int, tuple[int, int]]:
        """For each number of packages that has nodes enough: the most groups that shares.number of
        their nodes can hold, and the packages (bits of all their nodes) that do."""
        # packages in use -> nodes -> (groups, bits of the packages)
        best: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}] + [{} for _ in held]
        for package in held:
            top = sorted((self.capacity[node] for node in members(package)), reverse=True)
            sums = [sum(top[:count]) for count in range(1, len(top) + 1)]
            for used in range(len(held) - 1, -1, -1):
                following = best[used + 1]
                for nodes, (groups, mask) in best[used].items():
                    for more, added in enumerate(sums, nodes + 1):
                        if more > self.number:
                            break
                        if more not in following or groups + added > following[more][0]:
                            following[more] = (groups + added, mask | package)
        return {used: row[self.number] for used, row in enumerate(best) if self.number in row}


def pick(
    shares: Shares,
    group: int,
    packages: int | None,
    needs: tuple[int, ...],
    steps: Steps,
    *,
    any_will_do: bool = False,
) -> Choice | None:
    """The best choice of shares.number nodes of the group, one of each need among them, on at most
    so many packages (None = any number); None where there is none.

    With a limit on packages, needs that are not within one package are the caller's to check.
    """
    held = shares.by_package(group)
    if packages is None or packages >= len(held):
        if shares.each:
            return _same(shares, group, needs, shares.each, False)
        return _pick_uneven(shares, group, needs, steps, any_will_do=any_will_do)
    inner = tuple(need for need in needs if any(not need & ~mask for mask in held))
    if shares.each:
        return _pick_equal_on(shares, held, packages, inner)
    forced = [mask for mask in held if any(not need & ~mask for need in inner)]
    if len(forced) > packages:
        return None
    roomy = shares.roomiest(held)[packages][1]
    if all(not mask & ~roomy for mask in forced):
        best = _pick_uneven(shares, roomy, inner, steps, any_will_do=any_will_do)
        if any_will_do and best is not None:
            return best
    else:
        best = None
    others = [mask for mask in held if mask not in forced]
    # The roomiest packages first, so that what a spent budget leaves is a good choice.
    others.sort(key=lambda mask: (-sum(shares.capacity[n] for n in members(mask)), mask & -mask))
    for chosen in combinations(others, packages - len(forced)):
        nodes = sum(forced) + sum(chosen)
        if not steps.take(nodes.bit_count()):
            break
        choice = _pick_uneven(shares, nodes, inner, steps, any_will_do=any_will_do)
        if choice is not None and (best is None or choice.rank < best.rank):
            best = choice
            if any_will_do:
                break
    return best


def _choice(shares: Shares, split: Iterable[tuple[int, int]], weight: int) -> Choice:
    ordered = tuple(sorted(split))
    mask = sum(1 << node for node, _ in ordered)
    return Choice(mask, ordered, (sum(groups * groups for _, groups in ordered), weight))


def _same(
    shares: Shares, group: int, needs: tuple[int, ...], groups: int, is_extra: bool
) -> Choice | None:
    """The lightest nodes where each gets the same number of groups."""
    weight_of = {n: shares.question.weight(n, groups, is_extra) for n in members(group)}
    if any(not need & group for need in needs):
        return None
    chosen = [min(members(need & group), key=weight_of.__getitem__) for need in needs]
    rest = sorted(weight_of.keys() - chosen, key=weight_of.__getitem__)
    wanted = shares.number - len(chosen)
    if wanted < 0 or len(rest) < wanted:
        return None
    chosen += rest[:wanted]
    return _choice(shares, [(n, groups) for n in chosen], sum(weight_of[n] for n in chosen))


def _pick_equal_on(
    shares: Shares, held: tuple[int, ...], limit: int, needs: tuple[int, ...]
) -> Choice | None:
    """Equal shares on at most `limit` of the packages `held`; each need is within one of them."""
    each = shares.each or 0
    # (packages in use, nodes chosen) -> (weight, nodes)
    best: dict[tuple[int, int], tuple[int, int]] = {(0, 0): (0, 0)}
    for package in held:
        weight_of = {n: shares.question.weight(n, each, False) for n in members(package)}
        first = [min(members(n), key=weight_of.__getitem__) for n in needs if not n & ~package]
        weight = sum(weight_of[node] for node in first)
        mask = sum(1 << node for node in first)
        options = [(len(first), weight, mask)]
        for node in sorted(weight_of.keys() - first, key=weight_of.__getitem__):
            weight, mask = weight + weight_of[node], mask | 1 << node
            options.append((options[-1][0] + 1, weight, mask))
        following: dict[tuple[int, int], tuple[int, int]] = {}
        for (used, count), (total, nodes) in best.items():
            for number, more, added in options:
                key = (used + (number > 0), count + number)
                if key[0] > limit or key[1] > shares.number:
                    break
                value = (total + more, nodes | added)
                if key not in following or value < following[key]:
                    following[key] = value
        best = following
    ends = [best[used, shares.number] for used in range(limit + 1) if (used, shares.number) in best]
    if not ends:
        return None
    weight, mask = min(ends)
    return _choice(shares, [(node, each) for node in members(mask)], weight)


def _pick_uneven(
    shares: Shares, group: int, needs: tuple[int, ...], steps: Steps, *, any_will_do: bool = False
) -> Choice | None:
    """The even-most split over shares.number nodes, then the lightest nodes that allow it.

    any_will_do: the roomiest nodes, however heavy.
    """
    capacity, wanted = shares.capacity, shares.question.groups
    if any(not need & group for need in needs) or wanted < shares.number:
        return None
    roomiest = [max(members(need & group), key=capacity.__getitem__) for need in needs]
    rest = sorted(
        members(group & ~sum(1 << node for node in roomiest)), key=lambda node: -capacity[node]
    )
    number = shares.number - len(roomiest)
    if number < 0 or len(rest) < number:
        return None
    capacities = [capacity[node] for node in (*roomiest, *rest[:number])]
    if sum(capacities) < wanted:
        return None
    if any_will_do:
        group = sum(1 << node for node in (*roomiest, *rest[:number]))
        return Choice(group, (), (0, 0))
    level = _level(capacities, wanted)
    extras = wanted - sum(min(c, level - 1) for c in capacities)
    if extras == shares.number:
        full = sum(1 << node for node in members(group) if capacity[node] >= level)
        return _same(shares, full, needs, level, True)
    # As full as the roomiest: what is smaller than the smallest of them can be of no use.
    least = min(level - 1, *capacities)
    useful = sum(1 << node for node in members(group) if capacity[node] >= least)
    steps.spend(useful.bit_count() * shares.number * extras // 8)
    return _lightest(shares, useful, needs, level, extras)


def _useful(shares: Shares, part: int, level: int) -> int:
    """The nodes of the part that a lightest choice can need: so many of the best for each use.

    Of two nodes with the same use the better one is as good; only shares.number are in use at all.
    """
    weigh, capacity = shares.question.weight, shares.capacity
    nodes = tuple(members(part))
    if len(nodes) <= shares.number:
        return part
    deep = [
        (-min(capacity[node], level - 1), weigh(node, min(capacity[node], level - 1), False), node)
        for node in nodes
    ]
    full = [(weigh(node, level, True), node) for node in nodes if capacity[node] >= level]
    kept = [node for *_, node in sorted(deep)[: shares.number]]
    return sum(1 << n for n in {*kept, *(node for _, node in sorted(full)[: shares.number])})


def _level(capacities: list[int], wanted: int) -> int:
    """The least level to which nodes must fill to hold `wanted`."""
    low, high = 1, max(capacities)
    while low < high:
        middle = (low + high) // 2
        if sum(min(c, middle) for c in capacities) >= wanted:
            high = middle
        else:
            low = middle + 1
    return low


def _lightest(
    shares: Shares, group: int, needs: tuple[int, ...], level: int, extras: int
) -> Choice | None:
    """The lightest choice of the fullest ones: `extras` nodes filled to the level, the others to
    one below it or to their capacity, so that all groups have a place."""
    weigh, capacity = shares.question.weight, shares.capacity
    free = group
    for need in needs:
        free &= ~need
    # (nodes, extras) -> (fill below the level, negated; weight; nodes; those with an extra)
    best: dict[tuple[int, int], tuple[int, int, int, int]] = {(0, 0): (0, 0, 0, 0)}
    for part in (*(need & group for need in needs), free):
        # Of a need, what has a node of it so far; of the rest, all.
        with_one = {} if part is not free else best
        without = best
        for node in members(_useful(shares, part, level)):
            bit, plain = 1 << node, min(capacity[node], level - 1)
            options: list[tuple[int, int, int, int]] = []
            if plain:
                options.append((0, -plain, weigh(node, plain, False), 0))
            if capacity[node] >= level:
                options.append((1, -plain, weigh(node, level, True), bit))
            following = dict(with_one)
            for states in (without, with_one) if part is not free else (with_one,):
                for (count, more), (fill, weight, mask, filled) in states.items():
                    for extra, deeper, added, filled_bit in options:
                        key = (count + 1, more + extra)
                        if key[0] > shares.number or key[1] > extras:
                            continue
                        value = (fill + deeper, weight + added, mask | bit, filled | filled_bit)
                        if key not in following or value < following[key]:
                            following[key] = value
            with_one = following
        best = with_one
    end = best.get((shares.number, extras))
    if end is None:
        return None
    _, weight, mask, filled = end
    split = [
        (node, level if filled >> node & 1 else min(capacity[node], level - 1))
        for node in members(mask)
    ]
    if sum(groups for _, groups in split) != shares.question.groups:
        return None
    return _choice(shares, split, weight)
