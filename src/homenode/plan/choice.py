"""Choice: the best nodes of one group of nodes that are near enough to each other.

Within such a group the rest of the cost is: how even the split is, then sums over the nodes. Equal
shares: the lightest nodes, by sorting, or over few packages by dynamic programming. Uneven shares:
the level to which the nodes fill up follows from the largest capacities alone (any even-most split
is a permutation of theirs: Marshall, Olkin, Arnold, Inequalities, 1.D), then the lightest nodes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from homenode.plan.near import Steps, members
from homenode.plan.question import Question


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

    def package_counts(self, group: int) -> tuple[int | None, ...]:
        """Numbers of packages to try, least first; None = all that the group has."""
        held: dict[int, list[int]] = {}
        for node in members(group):
            held.setdefault(self.question.packages[node], []).append(self.capacity[node])
        if len(held) == 1 or self.number == 1:
            return (None,)
        # The most nodes and the most groups that so many packages can give: fewer cannot do.
        nodes = sorted(map(len, held.values()), reverse=True)
        tops = (sum(sorted(values, reverse=True)[: self.number]) for values in held.values())
        groups = sorted(tops, reverse=True)
        return tuple(
            count
            for count in range(1, min(len(held), self.number) + 1)
            if sum(nodes[:count]) >= self.number and sum(groups[:count]) >= self.question.groups
        )


def pick(
    shares: Shares, group: int, packages: int | None, must: int, steps: Steps
) -> Choice | None:
    """The best choice of shares.number nodes of the group that holds `must` and lies on at most so
    many packages (None = any number); None where there is none."""
    by_package: dict[int, int] = {}
    for node in members(group):
        package = shares.question.packages[node]
        by_package[package] = by_package.get(package, 0) | 1 << node
    if packages is None or packages >= len(by_package):
        return (
            _pick_equal(shares, group, must) if shares.each else _pick_uneven(shares, group, must)
        )
    if shares.each:
        return _pick_equal_on(shares, tuple(by_package.values()), packages, must)
    forced = [mask for mask in by_package.values() if mask & must]
    others = [mask for mask in by_package.values() if not mask & must]
    best: Choice | None = None
    # The roomiest packages first, so that what a spent budget leaves is a good choice.
    others.sort(key=lambda mask: (-sum(shares.capacity[n] for n in members(mask)), mask & -mask))
    for chosen in combinations(others, max(0, packages - len(forced))):
        if len(forced) > packages or (best is not None and not steps.take()):
            break
        choice = _pick_uneven(shares, sum(forced) + sum(chosen), must)
        if choice is not None and (best is None or choice.rank < best.rank):
            best = choice
    return best


def _choice(shares: Shares, split: Iterable[tuple[int, int]], weight: int) -> Choice:
    ordered = tuple(sorted(split))
    mask = sum(1 << node for node, _ in ordered)
    return Choice(mask, ordered, (sum(groups * groups for _, groups in ordered), weight))


def _pick_equal(shares: Shares, group: int, must: int) -> Choice | None:
    each, weigh = shares.each or 0, shares.question.weight
    forced = list(members(must))
    free = sorted((weigh(node, each, False), node) for node in members(group & ~must))
    wanted = shares.number - len(forced)
    if wanted < 0 or len(free) < wanted or must & ~group:
        return None
    weight = sum(weigh(node, each, False) for node in forced) + sum(w for w, _ in free[:wanted])
    return _choice(shares, [(n, each) for n in [*forced, *(n for _, n in free[:wanted])]], weight)


def _pick_equal_on(
    shares: Shares, packages: tuple[int, ...], limit: int, must: int
) -> Choice | None:
    """Equal shares on at most `limit` packages (bits of their nodes each)."""
    each, weigh = shares.each or 0, shares.question.weight
    # (packages in use, nodes chosen) -> (weight, nodes)
    best: dict[tuple[int, int], tuple[int, int]] = {(0, 0): (0, 0)}
    for package in packages:
        forced = list(members(package & must))
        free = sorted((weigh(node, each, False), node) for node in members(package & ~must))
        weight = sum(weigh(node, each, False) for node in forced)
        mask = package & must
        options = [(len(forced), weight, mask)]
        for more, node in free:
            weight, mask = weight + more, mask | 1 << node
            options.append((options[-1][0] + 1, weight, mask))
        following: dict[tuple[int, int], tuple[int, int]] = {}
        for (used, count), (held, nodes) in best.items():
            for number, more, mask in options:
                key = (used + (number > 0), count + number)
                if key[0] > limit or key[1] > shares.number:
                    break
                value = (held + more, nodes | mask)
                if key not in following or value < following[key]:
                    following[key] = value
        best = following
    ends = [best[used, shares.number] for used in range(limit + 1) if (used, shares.number) in best]
    if not ends:
        return None
    weight, mask = min(ends)
    return _choice(shares, [(node, each) for node in members(mask)], weight)


def _pick_uneven(shares: Shares, group: int, must: int) -> Choice | None:
    """The even-most split over shares.number nodes, then the lightest nodes that allow it."""
    capacity, wanted = shares.capacity, shares.question.groups
    forced = list(members(must))
    free = sorted(members(group & ~must), key=lambda node: -capacity[node])
    number = shares.number - len(forced)
    if number < 0 or len(free) < number or must & ~group:
        return None
    roomiest = free[:number]
    capacities = [capacity[node] for node in (*forced, *roomiest)]
    if sum(capacities) < wanted or wanted < shares.number:
        return None
    level = _level(capacities, wanted)
    extras = wanted - sum(min(c, level - 1) for c in capacities)
    if roomiest:
        smallest = capacity[roomiest[-1]]
        if smallest < level - 1:
            # Starved: all that have more are needed, and any of those that have as little.
            forced += [node for node in free if capacity[node] > smallest]
            free = [node for node in free if capacity[node] == smallest]
        else:
            free = [node for node in free if capacity[node] >= level - 1]
    else:
        free = []
    return _lightest(shares, forced, free, level, extras)


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
    shares: Shares, forced: list[int], free: list[int], level: int, extras: int
) -> Choice | None:
    """The lightest shares.number nodes, all of `forced` in; `extras` of them filled to the level,
    the others to one below it or to their capacity."""
    weigh, capacity = shares.question.weight, shares.capacity
    # (nodes, extras) -> (weight, nodes, those with an extra)
    best: dict[tuple[int, int], tuple[int, int, int]] = {(0, 0): (0, 0, 0)}
    for node in (*forced, *free):
        bit = 1 << node
        options: list[tuple[int, int, int, int, int]] = []
        plain = min(capacity[node], level - 1)
        if plain:
            options.append((1, 0, weigh(node, plain, False), bit, 0))
        if capacity[node] >= level:
            options.append((1, 1, weigh(node, level, True), bit, bit))
        following = dict(best) if node not in forced else {}
        for (count, more), (weight, mask, filled) in best.items():
            for one, extra, added, bits, filled_bits in options:
                key = (count + one, more + extra)
                if key[0] > shares.number or key[1] > extras:
                    continue
                value = (weight + added, mask | bits, filled | filled_bits)
                if key not in following or value < following[key]:
                    following[key] = value
        best = following
    end = best.get((shares.number, extras))
    if end is None:
        return None
    weight, mask, filled = end
    split = [
        (node, level if filled >> node & 1 else min(capacity[node], level - 1))
        for node in members(mask)
    ]
    return _choice(shares, split, weight)
