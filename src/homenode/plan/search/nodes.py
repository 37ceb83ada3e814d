"""Nodes: the search for the nodes of least cost, term by term in the order of the policy.

The first terms are tried value by value, least first: device class, number of nodes, distance
between nodes (inside the groups of nodes that are no farther apart, near.cliques), packages, device
distances. What remains are sums over nodes, for which the best choice is known outright
(choice.py). With hierarchical distances every step is polynomial; otherwise, and for uneven splits
over many packages, the budget of steps ends the search and the answer says so.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from homenode.plan.request import Policy
from homenode.plan.search.choice import Choice, Shares, pick
from homenode.plan.search.cost import Cost
from homenode.plan.search.near import UNREACHABLE, Steps, cliques, members
from homenode.plan.search.question import Question, within

BUDGET_STEPS = 100_000
"""A step is one node looked at in a branch: about a microsecond."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The nodes of least cost: split is (position, groups), ascending. optimal: None where the
    budget ran out first, or nodes kept room for memory devices: a better one may exist."""

    split: tuple[tuple[int, int], ...]
    cost: Cost
    optimal: bool | None


def feasible_counts(question: Question, allowed: int) -> tuple[int, ...]:
    """Numbers of nodes that can hold the VM, ascending; a count, without search.

    Exact but for nodes that cannot reach each other.
    """
    most = min(question.most_nodes, allowed.bit_count(), question.groups)
    if not question.equal:
        capacities = sorted((question.capacity(node) for node in members(allowed)), reverse=True)
        held, counts = 0, []
        for number, capacity in enumerate(capacities[:most], 1):
            held += capacity
            if capacity and held >= question.groups:
                counts.append(number)
        return tuple(counts)
    return tuple(
        number
        for number in range(1, most + 1)
        if question.groups % number == 0
        and _at_least(question, allowed, number, question.groups // number)
    )


def _at_least(question: Question, allowed: int, number: int, each: int) -> bool:
    found = 0
    for node in members(allowed):
        found += question.capacity(node, each) > 0
        if found == number:
            return True
    return False


def answer(question: Question, *, without: int = 0, budget: int = BUDGET_STEPS) -> Answer | None:
    """The answer of least cost, or None where none fits. without: nodes (bits) to leave out.

    Deterministic: equal questions have equal answers.
    """
    allowed = (1 << len(question.supplies)) - 1 & ~without
    counts = feasible_counts(question, allowed)
    steps = Steps(budget)
    for number, device_class in _orders(question, counts, allowed):
        tight, kept_free = question, dict[int, int]()
        while True:
            split = _least(tight, _shares(tight, number, allowed), device_class, steps)
            if split is None:
                break
            short = question.short_of_devices(split)
            if not short:
                certain = not steps.ran_out and not kept_free
                return Answer(split, question.cost(split), True if certain else None)
            # Which cell a node becomes depends on the others: a node that was too full for one
            # cell's memory devices keeps their room free from here on, as whichever cell.
            kept_free |= short
            tight = question.with_less_room(kept_free)
    return None


def _orders(
    question: Question, counts: tuple[int, ...], allowed: int
) -> Iterator[tuple[int, int | None]]:
    """(nodes spanned, worst device class) in the order of the policy. None: any class."""
    if question.policy is Policy.ANY or not question.pulls:
        numbers = reversed(counts) if question.policy is Policy.SPREAD else iter(counts)
        yield from ((number, None) for number in numbers)
        return
    nodes = tuple(members(allowed))
    least = [min((pull.by_package[n] for n in nodes), default=0) for pull in question.pulls]
    classes = sorted(
        {
            value
            for pull in question.pulls
            for value in (pull.by_package[node] for node in nodes)
            if value >= max(least)
        }
    )
    if question.policy is Policy.CORES_FIRST:
        yield from ((number, value) for value in classes for number in counts)
    else:
        numbers = reversed(counts) if question.policy is Policy.SPREAD else iter(counts)
        yield from ((number, value) for number in numbers for value in classes)


def _shares(question: Question, number: int, allowed: int) -> Shares:
    each = question.groups // number if question.equal else None
    capacities = {node: question.capacity(node, each) for node in members(allowed)}
    return Shares(question, number, {n: c for n, c in capacities.items() if c}, each)


def _least(
    question: Question, shares: Shares, device_class: int | None, steps: Steps
) -> tuple[tuple[int, int], ...] | None:
    """The least split over exactly shares.number nodes with the devices within the class."""
    eligible = shares.eligible
    hits: tuple[int, ...] = ()
    if device_class is not None:
        hits = within([pull.by_package for pull in question.pulls], device_class, eligible)
    if 0 in hits or _apart(hits) > shares.number:
        return None
    if question.policy is Policy.ANY:
        found = _satisfy(shares, eligible, None, hits, None, steps)
        return None if found is None else found.split
    best: tuple[tuple[int, int, int, Choice], ...] = ()
    for group in _groups(question, shares, hits, steps):
        candidate = _least_in(question, shares, group, hits, steps)
        if candidate is not None and (not best or _before(candidate, best[0])):
            best = (candidate,)
    return best[0][3].split if best else None


def _apart(hits: tuple[int, ...]) -> int:
    """A number of nodes that no choice for these hits can do without."""
    covered, number = 0, 0
    for hit in sorted(hits, key=int.bit_count):
        if not hit & covered:
            covered, number = covered | hit, number + 1
    return number


def _before(a: tuple[int, int, int, Choice], b: tuple[int, int, int, Choice]) -> bool:
    return (*a[:3], a[3].rank) < (*b[:3], b[3].rank)


def _groups(
    question: Question, shares: Shares, hits: tuple[int, ...], steps: Steps
) -> tuple[int, ...]:
    """The groups of nodes at the least distance at which some group can hold the VM."""
    nodes = tuple(members(shares.eligible))
    if shares.number == 1:
        return (shares.eligible,) if nodes else ()
    rows = [question.between[node] for node in nodes]
    distances = sorted({row[node] for row in rows for node in nodes} - {UNREACHABLE})

    def fitting(limit: int) -> Iterator[int]:
        linked = question.linked(limit)
        for group in cliques(linked, shares.eligible, shares.number, steps):
            if all(hit & group for hit in hits) and _fits(shares, group, None, hits, steps):
                yield group

    low, high = 0, len(distances)
    while low < high:
        middle = (low + high) // 2
        if next(fitting(distances[middle]), None) is None:
            low = middle + 1
        else:
            high = middle
    return tuple(fitting(distances[low])) if low < len(distances) else ()


def _least_in(
    question: Question, shares: Shares, group: int, hits: tuple[int, ...], steps: Steps
) -> tuple[int, int, int, Choice] | None:
    """(packages, device distance, other devices' distance, choice) of least cost in one group."""
    exact = [pull.exact for pull in question.pulls]
    others = [pull.exact for pull in question.others]
    for packages in shares.package_counts(group, hits):
        if (exact or others) and not _fits(shares, group, packages, hits, steps):
            continue
        near = _least_limit(shares, group, packages, exact, hits, steps)
        hits_near = (*hits, *within(exact, near, group)) if exact else hits
        far = _least_limit(shares, group, packages, others, hits_near, steps)
        hits_all = (*hits_near, *within(others, far, group)) if others else hits_near
        choice = _satisfy(shares, group, packages, hits_all, None, steps)
        if choice is not None:
            spanned = {question.packages[node] for node in members(choice.mask)}
            return len(spanned), near, far, choice
    return None


def _least_limit(
    shares: Shares,
    group: int,
    packages: int | None,
    rows: list[tuple[int, ...]],
    hits: tuple[int, ...],
    steps: Steps,
) -> int:
    """The least worst distance from the devices of `rows` that can be had beside `hits`."""
    if not rows:
        return 0
    nodes = tuple(members(group))
    floor = max(min(row[node] for node in nodes) for row in rows)
    limits = sorted({row[node] for row in rows for node in nodes if row[node] >= floor})
    for limit in limits[:-1]:
        wanted = (*hits, *within(rows, limit, group))
        if _fits(shares, group, packages, wanted, steps):
            return limit
    return limits[-1]


def _fits(
    shares: Shares, group: int, packages: int | None, hits: tuple[int, ...], steps: Steps
) -> bool:
    return _satisfy(shares, group, packages, hits, None, steps, any_will_do=True) is not None


def _satisfy(
    shares: Shares,
    group: int,
    packages: int | None,
    hits: tuple[int, ...],
    best: Choice | None,
    steps: Steps,
    *,
    any_will_do: bool = False,
) -> Choice | None:
    """The best choice in the group that holds a node of every hit.

    Hits that are disjoint, as those of hierarchical distances are once supersets are dropped, are
    part of the choice. Of an overlapping one that is missed, each node is tried in turn.
    """
    needs: list[int] = []
    covered = 0
    for hit in sorted({hit & group for hit in hits}, key=lambda mask: (mask.bit_count(), mask)):
        if not hit:
            return best
        if not hit & covered:
            needs.append(hit)
            covered |= hit
    if len(needs) > shares.number:
        return best
    choice = pick(shares, group, packages, tuple(needs), steps, any_will_do=any_will_do)
    if choice is None or (best is not None and choice.rank >= best.rank):
        return best
    missed = [hit & group for hit in hits if not hit & choice.mask]
    if not missed:
        return choice
    if not steps.take(group.bit_count() * (1 if packages is None else shares.number)):
        return best
    tried = 0
    for node in members(min(missed, key=lambda mask: (mask.bit_count(), mask))):
        bit = 1 << node
        best = _satisfy(
            shares, group & ~tried, packages, (*hits, bit), best, steps, any_will_do=any_will_do
        )
        if any_will_do and best is not None:
            return best
        tried |= bit
    return best
