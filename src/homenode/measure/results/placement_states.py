"""Placement states: the placement of the vCPUs during each sample of a run.

A hypervisor may move a vCPU to another LLC at any moment: the same CPU numbers, half or twice the
bandwidth. The probe times a hand-over between neighbouring CPUs right before and after a sample,
and numbers the states it sees from 0; state 0 of one run of the probe need not be that of the next
one. So all brackets of a run are classified together here, by the probe's own rule
(native/src/placement_state.cpp), and named by the measured latency: "27 ns".
"""

import math
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct

from homenode.measure.results.model import MOVING, UNSETTLED

MAX_SPAN = 1.6
"""Maximum ratio of the greatest to the least latency of a class."""

MANY_PAIRS = 8
"""Pairs of neighbours from which on there are more places than samples."""

LASTING_SHARE = 0.1
"""Least share of its team's samples that a place of many CPUs must have to be one."""

Latencies = tuple[float | None, ...]
_Signature = tuple[int, ...]


class Bracket(Struct, frozen=True):
    """Hand-over latencies around one sample. None: not measured."""

    team: str  # the CPUs; () of latencies: one CPU alone
    before_ns: Latencies  # latency of each pair of neighbours, in the team's order
    after_ns: Latencies  # latency of each pair of neighbours, in the team's order


class PlacementStates(Struct, frozen=True):
    """The state of the placement at each bracket."""

    # of each bracket, UNSETTLED if it was moved meanwhile or not measured
    labels: tuple[str, ...]
    # positions of brackets in which, or before which, their team moved
    transitions: tuple[int, ...]


def classify_brackets(brackets: Sequence[Bracket]) -> PlacementStates:
    """Return the labels of brackets in the order of time; each team has states of its own.

    >>> near, far = Bracket("0-1", (27.0,), (28.0,)), Bracket("0-1", (110.0,), (108.0,))
    >>> classify_brackets([near, near, far, far])
    PlacementStates(labels=('28 ns', '28 ns', '109 ns', '109 ns'), transitions=(2,))
    """
    places: dict[str, list[int]] = {}
    for place, bracket in enumerate(brackets):
        places.setdefault(bracket.team, []).append(place)
    labels = [UNSETTLED] * len(brackets)
    transitions: list[int] = []
    for of_team in places.values():
        states = _states_of_team([brackets[place] for place in of_team])
        for place, label in zip(of_team, states.labels, strict=True):
            labels[place] = label
        transitions += [of_team[position] for position in states.transitions]
    return PlacementStates(tuple(labels), tuple(sorted(transitions)))


def classify_values(values: Sequence[float]) -> tuple[int, ...]:
    """Class of each value, 0 for the least: cut at the widest gap until no class spans too much.

    >>> classify_values([27.0, 110.0, 28.5, 112.0])
    (0, 1, 0, 1)
    """
    order = sorted(range(len(values)), key=lambda place: (values[place], place))
    ascending = [values[place] for place in order]
    cuts: set[int] = set()
    open_ranges = [(0, len(ascending))]
    while open_ranges:
        first, last = open_ranges.pop()
        if last - first < 2 or ascending[last - 1] <= MAX_SPAN * ascending[first]:
            continue
        widest = max(
            range(first + 1, last), key=lambda at: (ascending[at] / ascending[at - 1], -at)
        )
        cuts.add(widest)
        open_ranges += [(first, widest), (widest, last)]
    classes = [0] * len(values)
    number = 0
    for rank, place in enumerate(order):
        number += rank in cuts
        classes[place] = number
    return tuple(classes)


def _states_of_team(brackets: Sequence[Bracket]) -> PlacementStates:
    pairs = max(max(len(bracket.before_ns), len(bracket.after_ns)) for bracket in brackets)
    ends = _classify_over_time(brackets, pairs)
    signatures: list[_Signature | None] = []
    transitions: list[int] = []
    previous: _Signature | None = None
    for position in range(len(brackets)):
        before, after = (_complete(end) for end in ends[2 * position : 2 * position + 2])
        if pairs == 0 or before is None or after is None:
            signatures.append(None)
            continue
        if before != after or (previous is not None and previous != before):
            transitions.append(position)
        previous = after
        signatures.append(after if before == after else None)
    names = _name_states(brackets, signatures)
    labels = tuple(UNSETTLED if signature is None else names[signature] for signature in signatures)
    if pairs >= MANY_PAIRS:
        labels = _join_moving(labels)
    return PlacementStates(labels, tuple(transitions))


def _join_moving(labels: tuple[str, ...]) -> tuple[str, ...]:
    """Join all short-lived states into one, if the lasting states are the smaller part."""
    counts = Counter(label for label in labels if label != UNSETTLED)
    lasting = {label for label, count in counts.items() if count >= LASTING_SHARE * len(labels)}
    if 2 * sum(counts[label] for label in lasting) >= len(labels):
        return labels
    return tuple(label if label in lasting else MOVING for label in labels)


def _classify_over_time(brackets: Sequence[Bracket], pairs: int) -> list[list[int | None]]:
    """Class of each pair at each end, in the order of time: before, after, before, after, ..."""
    ends: list[list[int | None]] = [[None] * pairs for _ in range(2 * len(brackets))]
    sides = [side for bracket in brackets for side in (bracket.before_ns, bracket.after_ns)]
    for pair in range(pairs):
        latencies = [
            (place, value)
            for place, side in enumerate(sides)
            if pair < len(side) and (value := side[pair]) is not None and value > 0
        ]
        classes = classify_values([value for _, value in latencies])
        for (place, _), at, lone in zip(
            latencies, classes, _find_lone_classes(classes), strict=True
        ):
            ends[place][pair] = None if lone else at
    return ends


def mark_passing(values: Sequence[float]) -> tuple[tuple[float, bool], ...]:
    """Return values in the order of time, each with whether its state did not last. A latency that
    occurs only once may be a state, a disturbed hand-over, or the mean of two states.

    >>> mark_passing([27.0, 28.0, 60.0, 110.0, 112.0])
    ((27.0, False), (28.0, False), (60.0, True), (110.0, False), (112.0, False))
    """
    classes = classify_values(values)
    lasting = {a for a, b in pairwise(classes) if a == b}
    return tuple(
        (value, len(values) > 1 and at not in lasting)
        for value, at in zip(values, classes, strict=True)
    )


def _find_lone_classes(classes: Sequence[int]) -> tuple[bool, ...]:
    """Find classes that never occur twice in a row, between two equal neighbours: disturbed
    hand-overs."""
    lasting = {a for a, b in pairwise(classes) if a == b}
    return tuple(
        0 < at < len(classes) - 1 and label not in lasting and classes[at - 1] == classes[at + 1]
        for at, label in enumerate(classes)
    )


def _complete(end: Sequence[int | None]) -> _Signature | None:
    levels = tuple(level for level in end if level is not None)
    return levels if len(levels) == len(end) else None


def _name_states(
    brackets: Sequence[Bracket], signatures: Sequence[_Signature | None]
) -> dict[_Signature, str]:
    """Name each state by the median of its latencies, with a number if two are equal."""
    values: dict[_Signature, list[float]] = {}
    for bracket, signature in zip(brackets, signatures, strict=True):
        if signature is not None:
            sides = (*bracket.before_ns, *bracket.after_ns)
            values.setdefault(signature, []).extend(
                latency for latency in sides if latency is not None
            )
    names: dict[_Signature, str] = {}
    in_use: dict[str, int] = {}
    for signature, latencies in values.items():
        name = format_latency_name(statistics.median(latencies))
        count = in_use.get(name, 0)
        in_use[name] = count + 1
        names[signature] = name if not count else f"{name}, {count + 1}"
    return names


def format_latency_name(latency_ns: float) -> str:
    """Return a state's name, readable and exact enough to distinguish classes.

    >>> format_latency_name(27.4), format_latency_name(9.62), format_latency_name(109.7)
    ('27 ns', '9.6 ns', '110 ns')
    """
    digits = 1 if latency_ns < 10 else 0
    return f"{latency_ns:.{digits}f} ns" if math.isfinite(latency_ns) else UNSETTLED


_LATENCY_NAME = re.compile(r"(\d{1,9}(?:\.\d)?) ns", re.ASCII)


def parse_latency_ns(state: str) -> float | None:
    """Return the latency that a state has its name from; None for any other name.

    >>> parse_latency_ns("9.6 ns"), parse_latency_ns("27 ns, 2"), parse_latency_ns("moving")
    (9.6, None, None)
    """
    match = _LATENCY_NAME.fullmatch(state)
    return None if match is None else float(match[1])
