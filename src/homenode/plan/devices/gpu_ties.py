"""GpuTies: which of GPUs that are equally near are chosen, by the GPU sets that they break."""

from collections.abc import Iterator, Sequence
from heapq import nsmallest
from operator import itemgetter

from msgspec import Struct

from homenode.plan.bit_sets import members

MOST_COMPARED_STATES = 5_000
"""Ways to break GPU sets that are compared at a time; GPUs of a tree of sets have far fewer."""

KEPT_STATES = 200
"""The best of these, with which a choice among more goes on."""

_State = tuple[int, int, int]
"""(GPUs still to choose, sets begun (bits), sets of which a GPU is left (bits))."""

_Value = tuple[int, int, int]
"""(sets broken, rank, GPUs (bits)): of one state the least is kept."""


class _EqualGpus(Struct, frozen=True):
    """GPUs of the same sets (bits)."""

    sets: int
    firsts: tuple[tuple[int, int], ...]  # (rank, bits) of none, the first, the first two …


class GpuTies(Struct, frozen=True):
    """GPUs are bits."""

    sets: tuple[int, ...]  # of which a VM should take all or none
    ranks: tuple[int, ...]  # of each GPU; of equals the least sum counts

    def fewest_broken(self, sure: int, tied: Sequence[tuple[int, int]]) -> tuple[int, bool]:
        """(so many of each of the `tied` sets (GPUs, number), whether all choices were compared).

        Fewest sets broken, with the GPUs `sure`. A choice is made for some GPUs after the others;
        of choices that have begun and left the same of the sets that have GPUs to come, only the
        best goes on. So the work grows with the square of the GPUs where the sets are a tree, as
        those of switches and nodes are.
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
        """These GPUs by the sets that they belong to; GPUs of one set follow one another, those of
        a set within it too."""
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
    """The states with so many of these GPUs chosen as can be. rest: GPUs of the tied set after
    them. later: sets that GPUs after them belong to."""
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
