"""Alternative: one thing that can be chosen, a layout or an arrangement, with its runs."""

import statistics
from collections.abc import Iterable, Sequence
from functools import cached_property

from msgspec import Struct, structs
from msgspec.structs import replace

from homenode.decide.health import LayoutLinks, layout_links
from homenode.decide.joint_states import joint_states
from homenode.decide.summary import Series, SeriesKey, series_of
from homenode.measure.results.model import (
    UNKNOWN_SWITCHES,
    Origin,
    Run,
    RunHead,
    SampleKey,
    Switches,
)
from homenode.units import format_bytes
from homenode.vm.layout import PRESETS, Siblings

_Key = tuple[Switches, str | None, str | None, int | None]


class Alternative(Struct, frozen=True, kw_only=True, dict=True):
    """Runs that were made under the same choices."""

    label: str  # short and unlike those of the others it stands next to
    switches: Switches
    arrangement: str | None
    memory_mode: str | None
    page_bytes: int | None
    runs: tuple[Run, ...]

    @cached_property
    def series(self) -> dict[SeriesKey, Series]:
        """Every series of the runs. Made once: it is most of the work of a recommendation."""
        return series_of(self.runs)

    @cached_property
    def links(self) -> LayoutLinks:
        """Links, read once: every pair of alternatives is compared."""
        return layout_links(self.label, self.runs)

    @cached_property
    def copies(self) -> dict[SampleKey, float]:
        """Medians of copies between host and single GPUs, over all boots. Made once."""
        values: dict[SampleKey, list[float]] = {}
        for run in self.runs:
            for key, samples in run.groups.items():
                is_copy = key.metric.startswith(("h2d-", "d2h-")) and key.peer is None
                if (
                    is_copy
                    and key.size_bytes is None
                    and (key.device, key.position) != (None, None)
                ):
                    everywhere = structs.replace(key, boot=0, state=None)
                    values.setdefault(everywhere, []).extend(sample.value for sample in samples)
        return {key: statistics.median(copies) for key, copies in values.items()}


def alternatives(runs: Iterable[Run]) -> tuple[Alternative, ...]:
    """Runs by what was chosen, in the order in which they come; runs with the same samples once.

    Placement states have the same names over all of them.
    """
    by_key: dict[_Key, list[Run]] = {}
    for run in runs:
        group = by_key.setdefault(_key(run.head), [])
        if not any(_are_copies(run, other) for other in group):
            group.append(run)
    several_modes = len({key[2] for key in by_key}) > 1
    several_pages = len({key[3] for key in by_key}) > 1
    joint = joint_states(list(by_key.values()))
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
    """Whether two runs are one that was given, or imported, twice, under whatever name."""
    first, second = run.samples, other.samples
    if len(first) != len(second) or not first or first[0].value != second[0].value:
        return False
    return first == second


def with_joint_states(chosen: Sequence[Alternative]) -> tuple[Alternative, ...]:
    """The alternatives with states named alike over all their runs."""
    joint = joint_states([alternative.runs for alternative in chosen])
    return tuple(
        alternative if alternative.runs is runs else replace(alternative, runs=runs)
        for alternative, runs in zip(chosen, joint, strict=True)
    )


def _key(head: RunHead) -> _Key:
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


def alternatives_of(
    arguments: Sequence[tuple[str, Sequence[Run]]], *, first_alone: bool = False
) -> tuple[Alternative, ...]:
    """Return the alternatives of runs by argument, in order; runs of one choice are combined.

    If all are of one choice, each argument is an alternative: the same layout on two days. Values
    printed for every layout are omitted. first_alone: the first argument is bare metal.
    """
    if first_alone and arguments:
        (argument, runs), *further = arguments
        alone = [replace(bare, label=f"{argument}: {bare.label}") for bare in alternatives(runs)]
        return with_joint_states((*alone, *alternatives_of(further)))
    combined = alternatives(
        run
        for _, runs in arguments
        for run in runs
        if run.head.origin is not Origin.PUBLISHED
        or run.head.switches != UNKNOWN_SWITCHES
        or run.head.arrangement is not None
    )
    if len(combined) > 1 or len(arguments) < 2:
        return combined
    return with_joint_states(
        [
            replace(each_day, label=name)
            for name, runs in arguments
            for each_day in alternatives(runs)
        ]
    )


_SIMPLEST = tuple(sorted(PRESETS, key=lambda name: PRESETS[name].siblings is Siblings.EXPOSED))
"""From what changes nothing to what changes most, which is to show siblings."""

CONSERVATIVE = tuple(dict.fromkeys(("pin-bound", "pin", *_SIMPLEST)))
"""After the layout of the rule: pins and bound memory keep results from changing with the load, and
whatever the guest is shown beyond that can mislead it. It is the study's advice."""


def preset_of(switches: Switches) -> str | None:
    """The simplest preset that agrees with every switch that is known; None where none is."""
    if switches == UNKNOWN_SWITCHES:
        return None
    for name in _SIMPLEST:
        preset = structs.astuple(Switches.of_layout(PRESETS[name]))
        pairs = zip(structs.astuple(switches), preset, strict=True)
        if all(switch is None or switch is value for switch, value in pairs):
            return name
    return None
