"""Alternative: a choice, such as a layout or an arrangement, with its runs."""

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from msgspec import Struct, structs
from msgspec.structs import replace

from homenode.decide.health import LayoutLinks, collect_layout_links
from homenode.decide.summary import Series, SeriesKey, collect_series
from homenode.measure.results.model import (
    MOVING,
    UNKNOWN_SWITCHES,
    UNSETTLED,
    Origin,
    Run,
    RunHead,
    Sample,
    SampleKey,
    Switches,
)
from homenode.measure.results.placement_states import (
    classify_values,
    format_latency_name,
    parse_latency_ns,
)
from homenode.measure.results.vantage import Vantage
from homenode.units import format_bytes
from homenode.vm.layout import PRESETS, Pinning, Siblings

_Key = tuple[Switches, str | None, str | None, int | None]


class Alternative(Struct, frozen=True, kw_only=True, dict=True):
    """Runs that were made under the same choices."""

    label: str  # short, and distinct among its neighbours
    switches: Switches
    arrangement: str | None
    memory_mode: str | None
    page_bytes: int | None
    runs: tuple[Run, ...]

    @cached_property
    def series(self) -> dict[SeriesKey, Series]:
        """Every series of the runs. Cached: it is most of the work of a recommendation."""
        return collect_series(self.runs)

    @cached_property
    def links(self) -> LayoutLinks:
        """Links, read once: every pair of alternatives is compared."""
        return collect_layout_links(self.label, self.runs)

    @cached_property
    def copies(self) -> dict[SampleKey, float]:
        """Medians of copies between host and single GPUs, over all boots. Cached."""
        values: dict[SampleKey, list[float]] = {}
        for run in self.runs:
            for key, samples in run.groups.items():
                if (
                    key.metric.startswith(("h2d-", "d2h-"))
                    and key.size_bytes is None
                    and (key.device, key.position) != (None, None)
                ):
                    everywhere = structs.replace(key, boot=0, state=None)
                    values.setdefault(everywhere, []).extend(sample.value for sample in samples)
        return {key: statistics.median(copies) for key, copies in values.items()}


def group_runs(runs: Iterable[Run]) -> tuple[Alternative, ...]:
    """Group runs by choice, in input order; runs with the same samples count once. Placement states
    have the same names over all of them."""
    by_key: dict[_Key, list[Run]] = {}
    for run in runs:
        group = by_key.setdefault(_make_key(run.head), [])
        if not any(_are_copies(run, other) for other in group):
            group.append(run)
    several_modes = len({key[2] for key in by_key}) > 1
    several_pages = len({key[3] for key in by_key}) > 1
    joint = _join_states(list(by_key.values()))
    return tuple(
        Alternative(
            label=_label(key, modes=several_modes, pages=several_pages),
            switches=key[0],
            arrangement=key[1],
            memory_mode=key[2],
            page_bytes=key[3],
            runs=grouped,
        )
        for key, grouped in zip(by_key, joint, strict=True)
    )


def _are_copies(run: Run, other: Run) -> bool:
    """Return whether two runs are the same run, given or imported twice under any names. Runs of
    different known boots are two, whatever their values."""
    if len({run.head.boots, other.head.boots} - {()}) > 1:
        return False
    first, second = run.samples, other.samples
    if len(first) != len(second) or not first or first[0].value != second[0].value:
        return False
    return first == second


def join_states(alternatives: Sequence[Alternative]) -> tuple[Alternative, ...]:
    """Return the alternatives with uniform state names over all their runs."""
    joint = _join_states([alternative.runs for alternative in alternatives])
    return tuple(
        alternative if alternative.runs is runs else replace(alternative, runs=runs)
        for alternative, runs in zip(alternatives, joint, strict=True)
    )


def _make_key(head: RunHead) -> _Key:
    return head.switches, head.arrangement, head.memory_mode, head.page_bytes


def _label(key: _Key, *, modes: bool, pages: bool) -> str:
    switches, arrangement, mode, page_bytes = key
    name = switches.name
    if arrangement is not None:
        name = f"{name} ({arrangement})" if name in PRESETS else arrangement
    if modes and mode is not None:
        name += f", {mode}"
    if pages and page_bytes is not None:
        name += f", {format_bytes(page_bytes)} pages"
    return name


def group_by_argument(
    arguments: Sequence[tuple[str, Sequence[Run]]], *, first_alone: bool = False
) -> tuple[Alternative, ...]:
    """Return the alternatives of runs by argument, in order; runs of one choice are combined. If
    all have the same choice, each argument is an alternative: the same layout on two days. Values
    that a source prints for all layouts together are omitted. first_alone: the first argument is
    bare metal."""
    if first_alone:
        (argument, runs), *further = arguments
        alone = [replace(bare, label=f"{argument}: {bare.label}") for bare in group_runs(runs)]
        return join_states((*alone, *group_by_argument(further)))
    alternatives = group_runs(
        run
        for _, runs in arguments
        for run in runs
        if run.head.origin is not Origin.PUBLISHED
        or run.head.switches != UNKNOWN_SWITCHES
        or run.head.arrangement is not None
    )
    if len(alternatives) > 1 or len(arguments) < 2:
        return alternatives
    days = ((name, day) for name, runs in arguments for day in group_runs(runs))
    return join_states([replace(day, label=name) for name, day in days])


_SIMPLEST = tuple(sorted(PRESETS, key=lambda name: PRESETS[name].siblings is Siblings.EXPOSED))
"""Presets from the smallest change to the largest, which is to show siblings."""

CONSERVATIVE = tuple(dict.fromkeys(("pin-bound", "pin", *_SIMPLEST)))
"""Layouts to prefer after the rule's: with pins and bound memory, results do not change with the
load, and a topology beyond that can mislead the guest. The study advises the same."""


def find_preset(switches: Switches) -> str | None:
    """Return the simplest preset that agrees with every known switch; None if none is.

    >>> find_preset(structs.replace(Switches.from_layout(PRESETS["pin"]), memory=None))
    'pin'
    """
    if switches == UNKNOWN_SWITCHES:
        return None
    for name in _SIMPLEST:
        preset = structs.astuple(Switches.from_layout(PRESETS[name]))
        pairs = zip(structs.astuple(switches), preset, strict=True)
        if all(switch is None or switch is value for switch, value in pairs):
            return name
    return None


USUAL = "usual"
USUAL_SHARE = 2 / 3
"""Least share of a boot's samples that a place must have to be its usual one."""


class _SeriesPlace(NamedTuple):
    """Key of samples of one series without the state."""

    metric: str
    variant: str | None
    node: int | None
    peer_node: int | None


_Names = dict[tuple[int, _SeriesPlace, str], str | None]
"""(place of the run, where, its name) -> the name for all; None: it is no series of its own."""


def _join_states(groups: Sequence[Sequence[Run]]) -> tuple[tuple[Run, ...], ...]:
    """Return the runs of some alternatives with uniform state names.

    A run names its states by the hand-over latency that it measured: "27 ns", after the next boot
    "28 ns". Names within the span of one class become one; two states of one run never do. If each
    alternative has the same state in every boot, this is its `usual` state, and these are compared.
    If boots of an alternative contradict each other, it has no usual state.
    """
    runs = [run for group in groups for run in group]
    if not any(run.has_states for run in runs):
        return tuple(map(tuple, groups))
    named_groups = _apply_names(groups, _join_names(runs))
    return _apply_names(named_groups, _find_usual_names(named_groups))


def _join_names(runs: Sequence[Run]) -> _Names:
    seen: dict[_SeriesPlace, dict[tuple[int, str], float]] = {}
    names: _Names = {}
    for place, run in enumerate(runs):
        for sample in _add_states(run):
            assert sample.state is not None
            latency_ns = parse_latency_ns(sample.state)
            if latency_ns is not None:
                seen.setdefault(_series_place(sample), {})[place, sample.state] = latency_ns
            elif " ns, " in sample.state and " of " not in sample.state:
                # A state whose latency equals another's but whose place differs: of this run alone.
                key = (place, _series_place(sample), sample.state)
                names[key] = f"{sample.state} of {run.head.name}"
    for node_place, latencies in seen.items():
        keys = list(latencies)
        classes = classify_values([latencies[key] for key in keys])
        for number in set(classes):
            members = [key for key, at in zip(keys, classes, strict=True) if at == number]
            if len({place for place, _ in members}) < len(members):
                continue  # two states of one run: the state in another run is unknown
            name = format_latency_name(statistics.median(latencies[key] for key in members))
            names |= {(place, node_place, state): name for place, state in members}
    return names


def _find_usual_names(groups: Sequence[Sequence[Run]]) -> _Names:
    boots: dict[_SeriesPlace, dict[int, dict[tuple[int, int], Counter[str]]]] = {}
    numbered_runs = [(number, run) for number, group in enumerate(groups) for run in group]
    for place, (number, run) in enumerate(numbered_runs):
        for sample in _add_states(run):
            assert sample.state is not None
            of_group = boots.setdefault(_series_place(sample), {}).setdefault(number, {})
            of_group.setdefault((place, sample.boot), Counter())[sample.state] += 1
    names: _Names = {}
    for node_place, by_group in boots.items():
        states = {number: _states_of_boots(counts.values()) for number, counts in by_group.items()}
        states_of_group = {
            number: {state for counter in counts.values() for state in counter}
            for number, counts in by_group.items()
        }
        if any(len(names) > 1 for names in states.values()):
            new: str | None = None
        else:
            usual = {
                number: _find_usual_state(names, is_fixed=all(map(_is_fixed, groups[number])))
                for number, names in states.items()
            }
            if None in usual.values() or len(set(usual.values())) < 2:
                continue
            new, states_of_group = USUAL, {number: {str(state)} for number, state in usual.items()}
        for place, (number, _) in enumerate(numbered_runs):
            names |= {(place, node_place, state): new for state in states_of_group.get(number, ())}
    return names


def _states_of_boots(boots: Iterable[Counter[str]]) -> frozenset[str | None]:
    """Return the state of each boot; None for boots with several states."""
    states = set()
    is_mixed = False
    for counter in boots:
        state, count = counter.most_common(1)[0]
        if count >= USUAL_SHARE * counter.total():
            states.add(state)
        else:
            is_mixed = True
    # Boots that move among states contradict none; with others they only have no usual one.
    return frozenset(states) if not is_mixed or len(states) > 1 else frozenset({None})


def _find_usual_state(states: frozenset[str | None], *, is_fixed: bool) -> str | None:
    (state,) = states
    return state if is_fixed or state == MOVING else None


def _is_fixed(run: Run) -> bool:
    """Return whether its CPUs are pinned. On a host the probe pins itself."""
    pinned = run.head.switches.pinning not in (None, Pinning.NONE)
    return pinned or run.head.vantage is not Vantage.GUEST


def _apply_names(groups: Sequence[Sequence[Run]], names: _Names) -> tuple[tuple[Run, ...], ...]:
    if not names:
        return tuple(map(tuple, groups))
    places = itertools.count()
    return tuple(
        tuple(_rename_states(run, next(places), names) for run in group) for group in groups
    )


def _rename_states(run: Run, place: int, names: _Names) -> Run:
    keys = ((place, _series_place(sample), sample.state or "") for sample in run.samples)
    samples = (
        replace(sample, state=names[key]) if key in names else sample
        for key, sample in zip(keys, run.samples, strict=True)
    )
    return replace(run, samples=tuple(samples))


def _add_states(run: Run) -> Iterable[Sample]:
    return (
        sample for sample in run.samples if sample.state is not None and sample.state != UNSETTLED
    )


def _series_place(sample: Sample) -> _SeriesPlace:
    return _SeriesPlace(sample.metric, sample.variant, sample.node, sample.peer_node)
