"""Counts: the nearest numbers of groups that nodes can hold, where the number asked for is none."""

from bisect import bisect_left

from homenode.plan.search.near import members
from homenode.plan.search.nodes import feasible_counts
from homenode.plan.search.question import Question


def changed(
    question: Question,
    *,
    equal: bool | None = None,
    most_nodes: int | None = None,
    groups: int | None = None,
    device_pages: tuple[tuple[int, int], ...] | None = None,
) -> Question:
    """The question with another number of groups or nodes, with free or equal shares, or with other
    memory devices."""
    return Question(
        question.policy, question.balance, question.supplies,
        question.groups if groups is None else groups, question.pages, question.huge,
        question.equal if equal is None else equal,
        question.most_nodes if most_nodes is None else most_nodes,
        question.between, question.packages, question.pulls, question.others,
        question.hosts_isolation,
        question.device_pages if device_pages is None else device_pages,
    )  # fmt: skip


def every_node(question: Question) -> int:
    """All nodes of the question, as bits."""
    return (1 << len(question.supplies)) - 1


def groups_below(question: Question) -> int:
    """The greatest number of groups below the one asked for that the nodes hold; 0 = none."""
    most = question.groups - 1
    if question.equal:
        return max((n * min(each, most // n) for n, each in _equal_shares(question)), default=0)
    total = sum(supply.groups for supply in question.supplies)
    # All that more groups need, fewer need too, but for the rounding of their memory.
    tries = range(min(most, total), 0, -1)
    place = bisect_left(
        tries, True,
        key=lambda n: bool(feasible_counts(changed(question, groups=n), every_node(question))),
    )  # fmt: skip
    return tries[place] if place < len(tries) else 0


def groups_above(question: Question) -> int | None:
    """The least number of groups above the one asked for that are equal shares; None = none."""
    fitting = [
        n * (question.groups // n + 1)
        for n, each in _equal_shares(question)
        if each > question.groups // n
    ]
    return min(fitting, default=None)


def _equal_shares(question: Question) -> list[tuple[int, int]]:
    """(number of nodes, the greatest share that so many can all hold), where that is above 0."""
    shares = []
    for number in range(1, min(question.most_nodes, len(question.supplies)) + 1):
        pages = -(-question.pages // number)
        fitting = sorted(
            (
                supply.groups
                for supply in (question.supplies[n] for n in members(every_node(question)))
                if not pages or supply.room.pages is None or supply.room.pages >= pages
            ),
            reverse=True,
        )
        if len(fitting) >= number and fitting[number - 1]:
            shares.append((number, fitting[number - 1]))
    return shares
