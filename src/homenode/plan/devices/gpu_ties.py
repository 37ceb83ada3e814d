"""GpuTies: the choice among equally near GPUs, by the GPU sets that it breaks."""

from collections.abc import Iterator, Sequence
from heapq import nsmallest
from operator import itemgetter

from msgspec import Struct

from homenode.plan.bit_sets import members

MOST_COMPARED_STATES = 5_000
"""Limit of states compared at a time; GPUs in a tree of sets have far fewer."""

KEPT_STATES = 200
"""Number of best states kept beyond that limit."""

_State = tuple[int, int, int]
"""(GPUs still to choose, sets begun (bits), sets with a GPU left over (bits))."""

_Value = tuple[int, int, int]
"""(sets broken, rank, GPUs (bits)); each state keeps its least value."""


class _EqualGpus(Struct, frozen=True):
    """GPUs that belong to the same sets (bits)."""

    sets: int
    firsts: tuple[tuple[int, int], ...]  # (rank, bits) of the first 0, 1, 2 … GPUs


class GpuTies(Struct, frozen=True):
    """The GPU sets of a search; GPUs are bits."""

    sets: tuple[int, ...]  # GPU sets that a VM should take as a whole or not at all
    ranks: tuple[int, ...]  # of each GPU; ties go to the least sum

    def fewest_broken(self, sure: int, tied: Sequence[tuple[int, int]]) -> tuple[int, bool]:
        """Return (GPUs chosen of the `tied` sets (GPUs, number), whether all choices were
        compared).

        The choice breaks the fewest sets together with the GPUs `sure`. Groups of GPUs are decided
        one after the other; of choices that lead to the same state only the best is kept. So the
        work is quadratic in the GPUs if the sets form a tree, as for switches and nodes.
        """
        reach = sum(gpus for gpus, _ in tied)
        if all(gpus.bit_count() == number for gpus, number in tied):
            return reach, True
        begun = left_out = 0
        counted: list[int] = []
        outside = ~(sure | reach)
        for gpu_set in self.sets:
            if gpu_set & reach and not (gpu_set & sure and gpu_set & outside):
                begun |= bool(gpu_set & sure) << len(counted)
                left_out |= bool(gpu_set & outside) << len(counted)
                counted.append(gpu_set)
        ordered = [list(self._group_by_sets(gpus, counted)) for gpus, _ in tied]
        later = [0]
        for group in (group for some in reversed(ordered) for group in reversed(some)):
            later.append(later[-1] | group.sets)
        states: dict[_State, _Value] = {(0, begun, left_out): (0, 0, 0)}
        is_complete = True
        for some, (gpus, number) in zip(ordered, tied, strict=True):
            states = {(number, *state[1:]): value for state, value in states.items()}
            remaining = gpus.bit_count()
            for group in some:
                remaining -= len(group.firsts) - 1
                later.pop()
                states = _extend_states(group, states, remaining, later[-1])
                if len(states) > (MOST_COMPARED_STATES if is_complete else KEPT_STATES):
                    is_complete = False
                    states = dict(nsmallest(KEPT_STATES, states.items(), key=itemgetter(1)))
        return min(states.values())[2], is_complete

    def _group_by_sets(self, gpus: int, counted: Sequence[int]) -> Iterator[_EqualGpus]:
        """Group these GPUs by their sets; GPUs of a set, and of a set within it, are adjacent."""
        sets_of_gpus = [(1 << i, gpu_set) for i, gpu_set in enumerate(counted) if gpu_set & gpus]
        of_sets: dict[int, list[int]] = {}
        for number in members(gpus):
            sets = sum([bit for bit, gpu_set in sets_of_gpus if gpu_set >> number & 1])
            of_sets.setdefault(sets, []).append(number)

        def largest_first(sets: int) -> list[tuple[int, int]]:
            return sorted((-counted[i].bit_count(), i) for i in members(sets))

        for sets in sorted(of_sets, key=largest_first):
            rank, bits = 0, 0
            firsts = [(rank, bits)]
            for number in sorted(of_sets[sets], key=self.ranks.__getitem__):
                rank, bits = rank + self.ranks[number], bits | 1 << number
                firsts.append((rank, bits))
            yield _EqualGpus(sets, tuple(firsts))


def _extend_states(
    group: _EqualGpus, states: dict[_State, _Value], remaining: int, later: int
) -> dict[_State, _Value]:
    """Extend the states by each possible number of these GPUs. rest: later GPUs of the tied set.
    later: sets of later GPUs."""
    result: dict[_State, _Value] = {}
    all_of_them = len(group.firsts) - 1
    for (missing, begun, left_out), (broken, rank, gpus) in states.items():
        for number in range(max(0, missing - remaining), min(all_of_them, missing) + 1):
            more_rank, bits = group.firsts[number]
            now_begun = begun | group.sets if number else begun
            now_left = left_out | group.sets if number < all_of_them else left_out
            value = (
                broken + (now_begun & now_left & ~(begun & left_out)).bit_count(),
                rank + more_rank,
                gpus | bits,
            )
            state = missing - number, now_begun & later, now_left & later
            best = result.get(state)
            if best is None or value < best:
                result[state] = value
    return result
