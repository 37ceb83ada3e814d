"""Collective causes: what costs all-reduces bandwidth, as all cells of the experiment together say.

A mechanism is named if it is in every set of mechanisms that explains all cells (decide.
collective_fit), also in those with one that has no name, and NCCL's log agrees. What else explains
them is a rival; the next cell is the one about which most explanations disagree.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from itertools import islice

from msgspec import Struct

from homenode.decide.alternative import Alternative
from homenode.decide.collective_cells import (
    BARE,
    MATTERS,
    METRIC,
    Contrast,
    ExcludedBoot,
    MeasuredCell,
    SettingCell,
    contrasts,
    is_setting,
    measured_cells,
)
from homenode.decide.collective_fit import CellsFit, Explanation
from homenode.decide.collective_mechanisms import (
    MECHANISMS,
    Cause,
    Mechanism,
    Prediction,
    unknown_mechanisms,
)
from homenode.decide.intervals import LEAST_BOOTS
from homenode.measure.gpu.collectives import ONE_BY_ONE, settings_of
from homenode.measure.model import CollectiveSettings, Depth
from homenode.measure.results.model import Switches
from homenode.vm.layout import PRESETS

FLAT, CELLS, PLACES = "pin", "pin-numa", "pin-numa-pci"
LAYOUTS = ("default", FLAT, CELLS, PLACES)
FIRST_NODE = CollectiveSettings(first_node=True)
PEERS = CollectiveSettings(peers=True)


class Standing(StrEnum):
    """What the cells say of a mechanism."""

    NAMED = "named"
    POSSIBLE = "possible"
    REFUTED = "refuted"
    RECORDED_OFF = "recorded as off"
    UNMEASURED = "not measured"


class MechanismResult(Struct, frozen=True, kw_only=True):
    """predicts: where it would be slower. ground: the contrast that shows or refutes it, None where
    there is none. because: the same in words, with figures."""

    cause: Cause
    standing: Standing
    predicts: str
    because: str
    ground: Contrast | None = None


class NextCell(Struct, frozen=True, kw_only=True):
    """What separates the explanations that are left best. cell: in words. trial: options of
    `homenode trial`. before: what to run first, None where nothing is. separates: those that
    disagree about it."""

    cell: str
    trial: tuple[str, ...]
    before: str | None
    separates: tuple[Cause, ...]


class Diagnosis(Struct, frozen=True, kw_only=True):
    """cause, because: the finding and its ground. also: what else is named, with its ground.

    mechanisms: each of the table. next_cell: None where nothing is left to separate. unrecorded:
    rivals that nothing was recorded of. provisional: fewer than three boots of a layout. of_bare:
    each layout's part of bare metal, in the study's settings. of_spread: the part that is left of
    it once everything is bound to the first node. excluded: boots that are none of their cell.
    """

    cause: Cause
    because: str
    also: tuple[tuple[Cause, str], ...]
    mechanisms: tuple[MechanismResult, ...]
    next_cell: NextCell | None
    unrecorded: tuple[str, ...]
    provisional: bool
    of_bare: tuple[tuple[str, float], ...]
    of_spread: tuple[tuple[str, float], ...]
    excluded: tuple[ExcludedBoot, ...]

    def controls(self) -> tuple[str, ...]:
        """What the controls separate: the virtual machine's part, and that of one node."""
        parts = (
            ("of bare metal, nothing bound", self.of_bare),
            ("bound to the first node, of nothing bound", self.of_spread),
        )
        return tuple(
            f"{what}: {', '.join(f'{layout} {ratio:.0%}' for layout, ratio in of)}"
            for what, of in parts
            if of
        )


def diagnose(guests: Sequence[Alternative], bare: Sequence[Alternative] = ()) -> Diagnosis | None:
    """What the experiment's runs show. None where they hold no such run.

    guests: by layout. bare: of the host itself.
    """
    runs = [run for one in (*guests, *bare) for run in one.runs]
    if not any(key.metric == METRIC and is_setting(key) for run in runs for key in run.groups):
        return None
    excluded: list[ExcludedBoot] = []
    measured = measured_cells(guests, bare, excluded)
    if not measured:
        return None
    found = _Conclusion(measured)
    (cause, because), *also = found.causes()
    return Diagnosis(
        cause=cause,
        because=because,
        also=tuple(also),
        mechanisms=tuple(map(found.result, MECHANISMS)),
        next_cell=found.next_cell,
        unrecorded=tuple(_unrecorded([one.cell for one in measured])),
        provisional=min(len(one.boots) for one in measured) < LEAST_BOOTS,
        of_bare=tuple(_parts(measured, BARE, CollectiveSettings())),
        of_spread=tuple(_parts(measured, None, FIRST_NODE)),
        excluded=tuple(excluded),
    )


class _Conclusion:
    """What the cells come to. left: the explanations that agree with all of them."""

    def __init__(self, measured: Sequence[MeasuredCell]) -> None:
        self._measured = measured
        self._cells = tuple(one.cell for one in measured)
        self._contrasts = contrasts(measured)
        self._fit = CellsFit(self._cells, self._contrasts)
        self._left = self._fit.explanations()
        in_all = self._left[0].intersection(*self._left) if self._left else frozenset()
        is_simple = bool(self._left) and len(self._left[0]) <= _MOST_NAMED
        unknown = tuple(_unlike_those_with_a_name(self._cells)) if in_all and is_simple else ()
        self._unnamed = {
            one: tuple(
                islice(self._fit.unnamed_rivals(one, len(self._left[0]), unknown), _MOST_UNNAMED)
            )
            for one in MECHANISMS
            if one in in_all and is_simple and _log_agrees(one, self._cells)
        }
        self._named = tuple(one for one, rivals in self._unnamed.items() if not rivals)
        self.next_cell = self._next()

    def causes(self) -> Iterator[tuple[Cause, str]]:
        if self._named:
            for one in self._named:
                yield one.cause, self._ground(one)[1]
        elif not self._contrasts:
            yield Cause.CANNOT_TELL, f"no two cells can be compared{self._what_next()}"
        elif not self._left:
            yield Cause.CANNOT_TELL, "no known mechanisms, three at once, explain all cells"
        elif self._left == (frozenset(),):
            yield self._of_no_loss()
        else:
            yield Cause.CANNOT_TELL, f"{self._rivals()}{self._what_next()}"
        yield from _of_peers(self._measured)

    def result(self, one: Mechanism) -> MechanismResult:
        ground, because = self._ground(one)
        standing = Standing.REFUTED
        if one in self._named:
            standing = Standing.NAMED
        elif any(one in those for those in self._left):
            standing = Standing.POSSIBLE
        elif not any(may for _, may in self._fit.pattern(one.predicts)):
            planned = (  # as if nothing had been recorded of them
                SettingCell(layout=cell.layout, switches=cell.switches, settings=cell.settings)
                for cell in self._cells
            )
            recorded = any(one.predicts(cell) is not Prediction.NOT for cell in planned)
            standing = Standing.RECORDED_OFF if recorded else Standing.UNMEASURED
            because = "recorded as off in every cell" if recorded else "no cell of it was measured"
        elif ground is None:
            standing, because = Standing.UNMEASURED, "no two cells can show it"
        return MechanismResult(
            cause=one.cause, standing=standing, predicts=one.slower, because=because, ground=ground
        )

    def _ground(self, one: Mechanism) -> tuple[Contrast | None, str]:
        """The contrast that shows a mechanism that is left, or refutes one that is not."""
        expected = {cell: one.predicts(cell) for cell in self._cells}
        turned = [
            contrast if expected[contrast.second] is Prediction.SLOWER else contrast.turned()
            for contrast in self._contrasts
            if contrast.than is None
        ]
        telling = [
            each
            for each in turned
            if (expected[each.first], expected[each.second]) == (Prediction.NOT, Prediction.SLOWER)
        ]
        if any(one in those for those in self._left):
            shown = min(telling, key=lambda each: each.high, default=None)
            if shown is None:
                return None, "in all explanations that are left"
            return shown, f"{shown}; without it nothing explains all {len(self._cells)} cells"
        spared = max(telling, key=lambda each: each.low, default=None)
        if spared is not None and spared.low > -MATTERS:
            return spared, f"not slower where it predicts so: {spared}"
        alike = [
            each
            for each in self._contrasts
            if each.than is None
            and expected[each.first] is expected[each.second] is not Prediction.EITHER
        ]
        other = max(alike, key=lambda each: each.beyond, default=None)
        if other is not None and other.beyond > MATTERS:
            return other, f"predicts no difference: {other}"
        return spared, "" if spared is None else f"not needed, nor refuted by itself: {spared}"

    def _of_no_loss(self) -> tuple[Cause, str]:
        of_cells = [
            each
            for each in self._contrasts
            if each.than is None
            and {each.first.layout, each.second.layout} == {FLAT, CELLS}
            and each.first.settings == each.second.settings == CollectiveSettings()
        ]
        if of_cells and of_cells[0].is_same:
            return Cause.NO_LOSS, str(of_cells[0])
        ground = f": {of_cells[0]}" if of_cells else f"{self._what_next()}"
        return Cause.CANNOT_TELL, f"no loss is shown, and none is excluded{ground}"

    def _rivals(self) -> str:
        named = list(dict.fromkeys(one.cause for those in self._left for one in _ordered(those)))
        if any(self._unnamed.values()):
            return f"{named[0]}, or something that has no name here"
        if len(named) == 1:
            return f"{named[0]}: NCCL's log does not show it"
        return f"either {', or '.join(named)}"

    def _what_next(self) -> str:
        one = self.next_cell
        return "" if one is None else f". Next: {one.cell}"

    def _next(self) -> NextCell | None:
        """The cell, or the switch, about which most pairs of explanations disagree."""
        if not self._left or (len(self._left) == 1 and not any(self._unnamed.values())):
            return self._more_boots()
        rivals: list[tuple[_Predict, ...]] = [
            tuple(one.predicts for one in those) for those in self._left
        ]
        rivals += [(_said(one),) for those in self._unnamed.values() for one in those]
        here = {(cell.layout, cell.settings) for cell in self._cells}
        layouts = {cell.layout for cell in self._cells}
        scored = [
            (
                _disagreements(rivals, cell),
                cell.layout in layouts,
                cell.settings in ONE_BY_ONE,
                cell,
            )
            for cell in _RUNNABLE
            if (cell.layout, cell.settings) not in here
        ]
        off = [
            (sum(one in those for those in self._left), one)
            for one in MECHANISMS
            if one.off is not None and any(one in those for those in self._left)
        ]
        switches = [(with_it * (len(self._left) - with_it), one) for with_it, one in off]
        every = (0, False, False, None)  # where all that can be measured was
        score, _, _, cell = max(scored, key=lambda each: each[:3], default=every)
        most, switch = max(switches, key=lambda each: each[0], default=(0, None))
        causes = tuple(dict.fromkeys(one.cause for those in self._left for one in _ordered(those)))
        if switch is not None and most >= score and most > 0:
            layout = CELLS if switch.cause is not Cause.HOST_BALANCING else FLAT
            return NextCell(
                cell=f"{layout} after {switch.off}",
                trial=("--layouts", layout),
                before=switch.off,
                separates=causes,
            )
        if cell is None or score == 0:
            return self._more_boots()
        words = ["--layouts", FLAT, "--bare"] if cell.layout == BARE else ["--layouts", cell.layout]
        words += [] if cell.settings in ONE_BY_ONE else ["--full"]
        return NextCell(cell=str(cell), trial=tuple(words), before=None, separates=causes)

    def _more_boots(self) -> NextCell | None:
        if self._named or min(len(one.boots) for one in self._measured) >= LEAST_BOOTS:
            return None
        layouts = dict.fromkeys(cell.layout for cell in self._cells if cell.is_guest)
        return NextCell(
            cell="three boots or more of each layout: one boot says nothing of layouts",
            trial=("--layouts", ",".join(layouts), "--boots", "3"),
            before=None,
            separates=(),
        )


_Predict = Callable[[SettingCell], Prediction]


def _said(acts: Callable[[SettingCell], bool]) -> _Predict:
    return lambda cell: Prediction.SLOWER if acts(cell) else Prediction.NOT


_RUNNABLE = tuple(
    one
    for layout, switches in (
        *((name, Switches.of(PRESETS[name])) for name in LAYOUTS),
        (BARE, None),
    )
    for settings in settings_of(Depth.FULL)
    if (one := SettingCell(layout=layout, switches=switches, settings=settings)).has_cells
    or not settings.first_node
)
"""What an experiment can measure: a flat guest has no first node."""


_MOST_NAMED = 2
"""Mechanisms that are named at once: with three, too much without a name explains the same."""

_MOST_FACTORS = 3
_MOST_UNNAMED = 20
"""One is enough to name nothing; a few more find the cell that separates them."""

_MOSTLY = 0.75
"""Of its cells a mechanism must predict to be the same as one without a name."""


def _unlike_those_with_a_name(
    cells: Sequence[SettingCell],
) -> Iterator[Callable[[SettingCell], bool]]:
    """What acts, in cells that were or could be measured, as nothing of the table does."""
    every = (*cells, *(cell for cell in _RUNNABLE if cell.settings in ONE_BY_ONE))
    named = [tuple(one.predicts(cell) for cell in every) for one in MECHANISMS]
    definite = [
        [(place, said) for place, said in enumerate(those) if said is not Prediction.EITHER]
        for those in named
    ]
    definite = [those for those in definite if len(those) >= _MOSTLY * len(every)]
    seen = set()
    for acts in unknown_mechanisms(_MOST_FACTORS):
        own = tuple(map(_said(acts), every))
        if len(set(own)) > 1 and own not in seen:
            seen.add(own)
            if not any(all(own[place] is said for place, said in those) for those in definite):
                yield acts


def _disagreements(rivals: Sequence[Sequence[_Predict]], cell: SettingCell) -> int:
    """Pairs of explanations of which one makes the cell slower and the other does not."""
    slower = none = 0
    for those in rivals:
        found = {predicts(cell) for predicts in those}
        slower += Prediction.SLOWER in found
        none += found <= {Prediction.NOT}
    return slower * none


def _ordered(those: Explanation) -> list[Mechanism]:
    return [one for one in MECHANISMS if one in those]


def _log_agrees(one: Mechanism, cells: Sequence[SettingCell]) -> bool:
    return all(one.agrees(cell) for cell in cells)


def _of_peers(measured: Sequence[MeasuredCell]) -> Iterator[tuple[Cause, str]]:
    """P2P is switched by itself in each layout: where it is faster in all, being off is what costs,
    whatever else does."""
    found = contrasts(measured, (CollectiveSettings(), PEERS))
    flat = [one for one in found if not one.first.has_cells]
    if flat and len(found) > 1 and all(one.low > MATTERS for one in found):
        yield Cause.PEERS, str(min(found, key=lambda one: one.low))


def _unrecorded(cells: Sequence[SettingCell]) -> Iterator[str]:
    guests = [cell for cell in cells if cell.is_guest]
    several = [cell for cell in guests if cell.has_cells]
    if any(cell.balancing is None for cell in several):
        yield "automatic NUMA balancing in the guest"
    if any(cell.host_balancing is None for cell in guests):
        yield "automatic NUMA balancing on the host"
    if any(cell.one_interrupt_node is None for cell in several):
        yield "the nodes that handled the GPUs' interrupts"
    if any(cell.reclaimed is None for cell in guests):
        yield "reclaimed memory"
    if any(cell.channels is None for cell in cells):
        yield "NCCL's log"


def _parts(
    measured: Sequence[MeasuredCell], whole: str | None, settings: CollectiveSettings
) -> Iterator[tuple[str, float]]:
    """Each layout's part of another one's bandwidth, or of its own in the study's settings."""
    study = {one.cell.layout: one for one in measured if one.cell.settings == CollectiveSettings()}
    for one in measured:
        base = study.get(whole or one.cell.layout)
        if one.cell.settings == settings and base is not None and base is not one:
            yield one.cell.layout, math.exp(one.median - base.median)
