"""Rounds: how the looks of a sequence share its error, and which rounds two alternatives share.

Whoever looks often finds something by chance. Each look has a part of the error, the parts add up
to the whole, and intervals of a look hold at its part: then all intervals of all looks hold at
once, however the rounds before were chosen. An alternative that was left out of later rounds is
compared on those that both had, at the error of their last look: whoever compares the stored runs
finds what was found then. docs/decisions/0023-sequential-trials.md.
"""

from collections.abc import Iterable, Mapping, Sequence

from homenode.measure.results.model import Run, RunHead, SequentialPlan

FIRST_LOOK = 2
"""Boots. Of one each nothing is known of how boots differ."""

FIRST_SHARE = 0.04
"""Of the error, for the first look: two boots show only what lies far beyond any boots that have
been seen, and that needs little."""

Reached = Mapping[str, int]
"""Rounds that there are runs of, by sequence."""


def first_look(plan: SequentialPlan) -> int:
    """After so many rounds each variant has boots enough."""
    return -(-FIRST_LOOK // plan.machines)


def error_at(plan: SequentialPlan, rounds: int) -> float:
    """What a look after so many rounds may be wrong by. Those of all looks add up to plan.error.

    >>> plan = SequentialPlan(0.05, 4, 8)
    >>> round(sum(error_at(plan, rounds) for rounds in range(2, 9)), 6), error_at(plan, 2)
    (0.05, 0.002)
    """
    first = first_look(plan)
    later = plan.rounds - first
    if later < 1:
        return plan.error
    share = FIRST_SHARE if rounds <= first else (1 - FIRST_SHARE) / later
    return plan.error * share


def reached(heads: Iterable[RunHead]) -> Reached:
    """Rounds of each sequence that these runs are of; none for runs of no sequence."""
    found: dict[str, int] = {}
    for head in heads:
        if head.sequence is not None and head.experiment is not None and head.block is not None:
            known = found.get(head.experiment, 0)
            found[head.experiment] = max(known, head.block // head.sequence.machines + 1)
    return found


def look_of(heads: Sequence[RunHead]) -> tuple[float, int] | None:
    """The error of the last look at these runs, and how many variants their first round had; None
    where they are of no sequence. Of several sequences the strictest."""
    rounds = reached(heads)
    plans = [(head.sequence, rounds.get(head.experiment or "", 0)) for head in heads]
    known = [(plan, count) for plan, count in plans if plan is not None]
    if not known:
        return None
    return min(error_at(*one) for one in known), max(plan.variants for plan, _ in known)


def shared(first: Reached, second: Reached) -> Reached:
    """Rounds that both have, of the sequences that both are of."""
    return {name: min(first[name], second[name]) for name in first.keys() & second.keys()}


def until(runs: Sequence[Run], rounds: Reached) -> tuple[Run, ...]:
    """The runs without those of later rounds of these sequences."""
    return tuple(run for run in runs if not _is_later(run.head, rounds))


def _is_later(head: RunHead, rounds: Reached) -> bool:
    own = reached([head])
    return any(count > rounds.get(name, count) for name, count in own.items())


def left_out(found: Mapping[str, Reached]) -> frozenset[str]:
    """Names of those that a sequence has left out of its last round, and that are in the last round
    of no other."""
    last: dict[str, int] = {}
    for rounds in found.values():
        for name, count in rounds.items():
            last[name] = max(count, last.get(name, 0))
    return frozenset(
        label
        for label, rounds in found.items()
        if rounds and all(count < last[name] for name, count in rounds.items())
    )
