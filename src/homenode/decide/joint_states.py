"""Joint states: one name for a placement state that several runs saw.

A run names its states by the hand-over latency that it measured: "27 ns", after the next boot
"28 ns". Names within the span of one class become one; two states of one run never do. If each
alternative has one place in every boot, that place is its `usual` state, and those are compared. If
boots of an alternative contradict each other, no state stands for it.
"""

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from homenode.measure.results.model import MOVING, UNSETTLED, Run, Sample
from homenode.measure.results.placement_states import classes_of, latency_name
from homenode.measure.results.vantage import Vantage
from homenode.vm.layout import Pinning

USUAL = "usual"
USUAL_SHARE = 2 / 3
"""Of a boot's samples, at least, that a place must have to be its usual one."""

_NAME = re.compile(r"(\d{1,9}(?:\.\d)?) ns", re.ASCII)


class _SeriesPlace(NamedTuple):
    """What samples of one place have in common, next to the state."""

    metric: str
    variant: str | None
    node: int | None
    peer_node: int | None


_Names = dict[tuple[int, _SeriesPlace, str], str | None]
"""(place of the run, where, its name) -> the name for all; None: it is no series of its own."""


def joint_states(groups: Sequence[Sequence[Run]]) -> tuple[tuple[Run, ...], ...]:
    """The runs of some alternatives, with states named alike over all of them."""
    runs = [run for group in groups for run in group]
    if not any(run.has_states for run in runs):
        return tuple(map(tuple, groups))
    named = apply_names(groups, _joint_names(runs))
    return apply_names(named, _usual_names(named))


def _joint_names(runs: Sequence[Run]) -> _Names:
    seen: dict[_SeriesPlace, dict[tuple[int, str], float]] = {}
    names: _Names = {}
    for place, run in enumerate(runs):
        for sample in _samples_with_state(run):
            assert sample.state is not None
            matched = _NAME.fullmatch(sample.state)
            if matched is not None:
                seen.setdefault(_series_place(sample), {})[place, sample.state] = float(matched[1])
            elif " ns, " in sample.state and " of " not in sample.state:
                # Like another one by its latency, and yet another place: of this run alone.
                key = (place, _series_place(sample), sample.state)
                names[key] = f"{sample.state} of {run.head.name}"
    for node_place, latencies in seen.items():
        keys = list(latencies)
        classes = classes_of([latencies[key] for key in keys])
        for number in set(classes):
            members = [key for key, at in zip(keys, classes, strict=True) if at == number]
            if len({place for place, _ in members}) < len(members):
                continue  # two states of one run: which of them another run saw is unknown
            name = latency_name(statistics.median(latencies[key] for key in members))
            names |= {(place, node_place, state): name for place, state in members}
    return names


def _usual_names(groups: Sequence[Sequence[Run]]) -> _Names:
    boots: dict[_SeriesPlace, dict[int, dict[tuple[int, int], Counter[str]]]] = {}
    place = 0
    for number, group in enumerate(groups):
        for run in group:
            for sample in _samples_with_state(run):
                assert sample.state is not None
                of_group = boots.setdefault(_series_place(sample), {}).setdefault(number, {})
                of_group.setdefault((place, sample.boot), Counter())[sample.state] += 1
            place += 1
    names: _Names = {}
    for node_place, by_group in boots.items():
        states = {number: _states_of_boots(counts.values()) for number, counts in by_group.items()}
        renamed = {
            number: {state for counter in counts.values() for state in counter}
            for number, counts in by_group.items()
        }
        if any(len(names) > 1 for names in states.values()):
            new: str | None = None
        else:
            usual = {
                number: _usual(names, is_fixed=all(map(_is_fixed, groups[number])))
                for number, names in states.items()
            }
            if None in usual.values() or len(set(usual.values())) < 2:
                continue
            new, renamed = USUAL, {number: {str(state)} for number, state in usual.items()}
        place = 0
        for number, group in enumerate(groups):
            for _ in group:
                names |= {(place, node_place, state): new for state in renamed.get(number, ())}
                place += 1
    return names


def _states_of_boots(boots: Iterable[Counter[str]]) -> frozenset[str | None]:
    """States that boots are wholly in; None among them for boots that are in several."""
    states = set()
    mixed = False
    for counter in boots:
        state, count = counter.most_common(1)[0]
        if count >= USUAL_SHARE * counter.total():
            states.add(state)
        else:
            mixed = True
    # Boots that move among states contradict none; with others they only have no usual one.
    return frozenset(states) if not mixed or len(states) > 1 else frozenset({None})


def _usual(states: frozenset[str | None], *, is_fixed: bool) -> str | None:
    (state,) = states
    return state if is_fixed or state == MOVING else None


def _is_fixed(run: Run) -> bool:
    """Whether its PUs stand where somebody put them. On a host the probe itself does."""
    pinned = run.head.switches.pinning not in (None, Pinning.NONE)
    return pinned or run.head.vantage is not Vantage.GUEST


def apply_names(groups: Sequence[Sequence[Run]], names: _Names) -> tuple[tuple[Run, ...], ...]:
    place = 0
    applied = []
    for group in groups:
        runs = []
        for run in group:
            runs.append(_rename_states(run, place, names) if names else run)
            place += 1
        applied.append(tuple(runs))
    return tuple(applied)


def _rename_states(run: Run, place: int, names: _Names) -> Run:
    samples = []
    for sample in run.samples:
        key = (place, _series_place(sample), sample.state or "")
        samples.append(
            msgspec.structs.replace(sample, state=names[key]) if key in names else sample
        )
    return replace(run, samples=tuple(samples))


def _samples_with_state(run: Run) -> Iterable[Sample]:
    return (
        sample for sample in run.samples if sample.state is not None and sample.state != UNSETTLED
    )


def _series_place(sample: Sample) -> _SeriesPlace:
    return _SeriesPlace(sample.metric, sample.variant, sample.node, sample.peer_node)
