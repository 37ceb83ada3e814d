"""Collective causes: why all-reduces are slower in one layout than in another, or that the figures
do not say.

The experiment (measure.gpu.experiment) changes one setting at a time in each layout. Each question
here compares two of its cells; the causes follow from the answers, and from what NCCL's log said
of threads and channels. Two settings of one boot are compared boot by boot; two layouts by
their boots, as every comparison is. A boot whose NCCL opened other channels than most boots of the
same cell is no boot of that cell: it is left out by name.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from homenode.decide.alternative import Alternative
from homenode.decide.distributions import t_quantile
from homenode.decide.intervals import CONFIDENCE, interval
from homenode.decide.summary import Series, SeriesKey
from homenode.measure.model import CollectiveSettings, intended_channels
from homenode.measure.results.model import Run, SampleKey
from homenode.metrics import METRICS

METRIC, CHANNELS, BOUND = "allreduce-busbw-peak", "collective-channels", "collective-bound-gpus"
FLAT, CELLS, PLACES, BARE = "pin", "pin-numa", "pin-numa-pci", "bare"
STUDY = CollectiveSettings()
FILE = CollectiveSettings(file=True)
SEVERAL = CollectiveSettings(several=True)
FIRST_NODE = CollectiveSettings(first_node=True)


class Cause(StrEnum):
    """What the experiment shows."""

    NO_LOSS = "guest cells cost nothing here"
    PLACEMENT = "threads and buffers without a place: NCCL knows no node for the GPUs"
    PLACEMENT_IN_PART = "threads and buffers without a place, and something else"
    SCRIPT_BINDING = "the binding to the first node, and not the guest's cells"
    CHANNELS = "fewer channels: NCCL models the link between nodes"
    GUEST_CELLS = "the guest's cells, whatever NCCL knows of the GPUs' places"
    VIRTUAL_MACHINE = "the virtual machine itself"
    CANNOT_TELL = "cannot tell"


class BandwidthChange(StrEnum):
    """Of the second cell against the first."""

    LOWER = "lower"
    SAME = "the same"
    HIGHER = "higher"
    UNKNOWN = "cannot tell"


class SettingCell(Struct, frozen=True):
    """A layout, or BARE, under some settings."""

    layout: str
    settings: CollectiveSettings = STUDY

    def __str__(self) -> str:
        """The study's settings go without saying."""
        if self.settings == STUDY:
            return self.layout
        return f"{self.layout}, {self.settings.name}"


class Question(Struct, frozen=True, kw_only=True):
    """Two cells of the experiment. decides: what the answer is for."""

    id: str
    first: SettingCell
    second: SettingCell
    decides: str


QUESTIONS = tuple(
    Question(id=name, first=first, second=second, decides=decides)
    for name, first, second, decides in (
        ("cells", SettingCell(FLAT), SettingCell(CELLS), "whether guest cells cost bandwidth"),
        (
            "file",
            SettingCell(CELLS),
            SettingCell(CELLS, FILE),
            "whether the NCCL file alone repairs that guest",
        ),
        (
            "first-node",
            SettingCell(CELLS),
            SettingCell(CELLS, FIRST_NODE),
            "whether the study's binding to the first node is what costs",
        ),
        (
            "several",
            SettingCell(CELLS),
            SettingCell(CELLS, SEVERAL),
            "whether a process for each GPU puts all buffers in one node",
        ),
        ("places", SettingCell(CELLS), SettingCell(PLACES), "whether the GPUs' places repair it"),
        ("best", SettingCell(FLAT), SettingCell(PLACES), "whether cells with places are worth it"),
        ("bare", SettingCell(BARE), SettingCell(FLAT), "what the virtual machine costs by itself"),
        (
            "bare-first-node",
            SettingCell(BARE),
            SettingCell(BARE, FIRST_NODE),
            "what one node costs without a virtual machine",
        ),
        (
            "pins",
            SettingCell("default"),
            SettingCell(FLAT),
            "what pins alone are worth: flat guests",
        ),
    )
)


class CauseAnswer(Struct, frozen=True, kw_only=True):
    """ratio: the second over the first; None where a cell has no figure: reason says which."""

    question: Question
    change: BandwidthChange
    ratio: float | None
    boots: int
    reason: str | None = None


class ExcludedBoot(Struct, frozen=True, kw_only=True):
    """A boot whose NCCL opened other channels than was intended in a cell: as many as in most of
    its boots; intended is None where as many boots have one number as have another."""

    run: str
    layout: str
    settings: str
    channels: int
    intended: int | None

    def __str__(self) -> str:
        most = "boots do not agree" if self.intended is None else f"{self.intended} in most boots"
        return (
            f"{self.run}, {self.settings}: {self.channels} channels, {most}: excluded; "
            f"look at its NCCL log, and boot {self.layout} again"
        )


class Diagnosis(Struct, frozen=True, kw_only=True):
    """cause, because: the finding and its ground. also: what else is shown, with its ground.
    answers: in the order of QUESTIONS. provisional: fewer than three boots of a layout. of_bare:
    each layout's part of bare metal, in the study's settings. of_spread: the part that is left of
    it once everything is bound to the first node. excluded: boots that are none of their cell.
    """

    cause: Cause
    because: str
    also: tuple[tuple[Cause, str], ...]
    answers: tuple[CauseAnswer, ...]
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


class _Cells(Struct, frozen=True, kw_only=True):
    """Series by layout, settings' name and metric. boots: (place, samples) of each."""

    series: Mapping[tuple[str, str, str], Series]
    boots: Mapping[tuple[str, str], tuple[tuple[int, tuple[float, ...]], ...]]
    layouts: tuple[str, ...]
    excluded: tuple[ExcludedBoot, ...]

    def of(self, cell: SettingCell, metric: str = METRIC) -> Series | None:
        return self.series.get((cell.layout, cell.settings.name, metric))

    def explained(self, cell: SettingCell, metric: str) -> float | None:
        series = self.of(cell, metric)
        return None if series is None else statistics.median(series.medians)


def diagnose(guests: Sequence[Alternative], bare: Sequence[Alternative] = ()) -> Diagnosis | None:
    """The cause that the experiment's runs show. None where they hold no such run.

    guests: by layout. bare: of the host itself.
    """
    runs = [run for one in (*guests, *bare) for run in one.runs]
    if not any(key.metric == METRIC and _is_setting(key) for run in runs for key in run.groups):
        return None  # before any series is made
    cells = _cells(guests, bare)
    if not any(metric == METRIC for _, _, metric in cells.series):
        return None
    answers = tuple(_answer(question, cells) for question in QUESTIONS)
    (cause, because), *also = _causes({one.question.id: one for one in answers}, cells)
    least = min(
        (len(one.medians) for key, one in cells.series.items() if key[2] == METRIC), default=0
    )
    return Diagnosis(
        cause=cause,
        because=because,
        also=tuple(also),
        answers=answers,
        provisional=least < _MEASURED_FROM,
        of_bare=tuple(
            _parts(cells, SettingCell(BARE), [SettingCell(layout) for layout in cells.layouts])
        ),
        of_spread=tuple(
            part
            for layout in cells.layouts
            for part in _parts(cells, SettingCell(layout), [SettingCell(layout, FIRST_NODE)])
        ),
        excluded=cells.excluded,
    )


def _parts(
    cells: _Cells, whole: SettingCell, of: Sequence[SettingCell]
) -> Iterator[tuple[str, float]]:
    base = cells.of(whole)
    for cell in of:
        series = cells.of(cell)
        if base is not None and series is not None and cell != whole:
            yield cell.layout, statistics.median(series.medians) / statistics.median(base.medians)


_MEASURED_FROM = 3
_CONFIDENCE = 1 - (1 - CONFIDENCE) / len(QUESTIONS)
"""Of each interval, so that all together have the usual one."""


def _cells(guests: Sequence[Alternative], bare: Sequence[Alternative]) -> _Cells:
    series: dict[tuple[str, str, str], Series] = {}
    boots: dict[tuple[str, str], tuple[tuple[int, tuple[float, ...]], ...]] = {}
    excluded: list[ExcludedBoot] = []
    named = [(one.switches.name, one) for one in guests] + [(BARE, one) for one in bare]
    for layout, alternative in named:
        runs = _of_one_graph(layout, alternative.runs, excluded)
        if runs is not alternative.runs:
            alternative = replace(alternative, runs=runs)
        for key, found in _of_experiment(alternative.series):
            assert key.variant is not None, "the experiment's series have variants"
            series.setdefault((layout, key.variant, key.metric), found)
        by_settings: dict[str, dict[int, list[float]]] = {}
        for place, run in enumerate(runs):
            for fields, samples in run.groups.items():
                if fields.metric == METRIC and _is_setting(fields):
                    assert fields.variant is not None, "settings have names"
                    of = by_settings.setdefault(fields.variant, {})
                    of.setdefault(place, []).extend(one.value for one in samples)
        for settings, values in by_settings.items():
            boots[layout, settings] = tuple((place, tuple(one)) for place, one in values.items())
    layouts = tuple(dict.fromkeys(layout for layout, _ in named))
    return _Cells(series=series, boots=boots, layouts=layouts, excluded=tuple(excluded))


def _of_one_graph(
    layout: str, runs: tuple[Run, ...], excluded: list[ExcludedBoot]
) -> tuple[Run, ...]:
    """The runs of a layout, less the settings of those with other channels than intended."""
    channels: dict[str, dict[int, int]] = {}
    for place, run in enumerate(runs):
        for key, samples in run.groups.items():
            if key.metric == CHANNELS and key.variant is not None:
                number = statistics.median(one.value for one in samples)
                channels.setdefault(key.variant, {})[place] = round(number)
    odd: dict[int, set[str]] = {}
    for settings, by_place in channels.items():
        intended = intended_channels(list(by_place.values()))
        for place, number in by_place.items():
            if number != intended:
                odd.setdefault(place, set()).add(settings)
                name = runs[place].head.name
                excluded.append(
                    ExcludedBoot(
                        run=name,
                        layout=layout,
                        settings=settings,
                        channels=number,
                        intended=intended,
                    )
                )

    if not odd:
        return runs
    return tuple(
        Run(run.head, tuple(one for one in run.samples if one.variant not in odd.get(place, ())))
        for place, run in enumerate(runs)
    )


def _of_experiment(found: Mapping[SeriesKey, Series]) -> Iterator[tuple[SeriesKey, Series]]:
    for key, series in found.items():
        if _is_setting(key) and not key.worst:
            yield key, series


def _is_setting(key: SampleKey | SeriesKey) -> bool:
    """Whether its figure may be that of one setting: of all sizes and devices together."""
    return key.variant is not None and key.size_bytes is None and key.device is None


def _answer(question: Question, cells: _Cells) -> CauseAnswer:
    first, second = cells.of(question.first), cells.of(question.second)
    if first is None or second is None:
        missing = question.first if first is None else question.second
        reason = f"no figure of {missing}"
        if (missing.layout, missing.settings.name) in (
            (one.layout, one.settings) for one in cells.excluded
        ):
            reason += " with the channels of most boots"
        return CauseAnswer(
            question=question, change=BandwidthChange.UNKNOWN, ratio=None, boots=0, reason=reason
        )
    boots = min(len(first.medians), len(second.medians))
    if question.first.layout == question.second.layout:
        return _within_boots(question, cells, boots)
    return _across_boots(question, cells, first, second)


def _within_boots(question: Question, cells: _Cells, boots: int) -> CauseAnswer:
    """The same boots under two settings: nothing of a boot is between them."""
    one, other = (
        dict(cells.boots[cell.layout, cell.settings.name])
        for cell in (question.first, question.second)
    )
    both = [(one[place], other[place]) for place in one if place in other]
    if not both:
        return CauseAnswer(
            question=question,
            change=BandwidthChange.UNKNOWN,
            ratio=None,
            boots=boots,
            reason="no boot has both",
        )
    medians = [(statistics.median(a), statistics.median(b)) for a, b in both]
    ratio = math.exp(statistics.fmean(math.log(b / a) for a, b in medians))
    if len(both) >= _MEASURED_FROM:
        logs = [math.log(b / a) for a, b in medians]
        error = statistics.stdev(logs) / math.sqrt(len(logs))
        reach = math.exp(t_quantile(_CONFIDENCE, len(logs) - 1) * error)
        return _of_interval(question, ratio, ratio / reach, ratio * reach, boots)
    sides = {_side(b / a) for a, b in medians}
    if len(sides) > 1:
        return CauseAnswer(
            question=question,
            change=BandwidthChange.UNKNOWN,
            ratio=ratio,
            boots=boots,
            reason="boots do not agree",
        )
    apart = max(_apart(of) for pair in both for of in pair)
    if apart > 1 + METRICS[METRIC].matters and any(_overlap(a, b) for a, b in both):
        reason = f"rounds of one boot differ up to {apart:.2f} times"
        return CauseAnswer(
            question=question,
            change=BandwidthChange.UNKNOWN,
            ratio=ratio,
            boots=boots,
            reason=reason,
        )
    return CauseAnswer(question=question, change=sides.pop(), ratio=ratio, boots=boots)


def _apart(rounds: Sequence[float]) -> float:
    return max(rounds) / min(rounds)


def _overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    return min(a) <= max(b) and min(b) <= max(a)


def _side(ratio: float) -> BandwidthChange:
    matters = 1 + METRICS[METRIC].matters
    if ratio > matters:
        return BandwidthChange.HIGHER
    return BandwidthChange.LOWER if ratio < 1 / matters else BandwidthChange.SAME


def _across_boots(question: Question, cells: _Cells, first: Series, second: Series) -> CauseAnswer:
    metric = METRICS[METRIC]
    boots = min(len(first.medians), len(second.medians))
    if boots >= _MEASURED_FROM:
        settings = question.first.settings.name
        others = [
            one
            for key, one in cells.series.items()
            if key[1:] == (settings, METRIC) and one.medians
        ]
        found = interval(
            first,
            second,
            _CONFIDENCE,
            neighbours=[one for one in others if one not in (first, second)],
        )
        if found is not None:
            return _of_interval(question, found.ratio, found.low, found.high, boots)
    ratio = statistics.median(second.medians) / statistics.median(first.medians)
    side = _side(ratio)
    rounds = [
        _apart(of)
        for cell in (question.first, question.second)
        for _, of in cells.boots[cell.layout, cell.settings.name]
    ]
    if side is BandwidthChange.SAME or max(ratio, 1 / ratio) >= metric.boot_variation * max(rounds):
        return CauseAnswer(question=question, change=side, ratio=ratio, boots=boots)
    reason = f"boots of one layout differ up to {metric.boot_variation:g} times"
    return CauseAnswer(
        question=question, change=BandwidthChange.UNKNOWN, ratio=ratio, boots=boots, reason=reason
    )


def _of_interval(
    question: Question, ratio: float, low: float, high: float, boots: int
) -> CauseAnswer:
    """A change that matters, and is not noise; or none that matters, with all of the interval."""
    side = _side(ratio)
    if side is BandwidthChange.SAME:
        is_sure = _side(low) is _side(high) is BandwidthChange.SAME
    else:
        is_sure = not low <= 1 <= high
    if is_sure:
        return CauseAnswer(question=question, change=side, ratio=ratio, boots=boots)
    return CauseAnswer(
        question=question,
        change=BandwidthChange.UNKNOWN,
        ratio=ratio,
        boots=boots,
        reason=f"{low:.2f} to {high:.2f} times",
    )


def _causes(answers: Mapping[str, CauseAnswer], cells: _Cells) -> Iterator[tuple[Cause, str]]:
    """What is shown, the answer to "do guest cells cost" first."""
    loss = answers["cells"].change
    others = tuple(_others(answers, cells))
    if loss is BandwidthChange.LOWER:
        yield _of_a_loss(answers, cells)
    elif answers["file"].change is BandwidthChange.HIGHER and _binds_by_file(cells):
        ratio = answers["file"].ratio or 1.0
        yield (
            Cause.PLACEMENT,
            f"in {CELLS} NCCL bound no thread; with the file, in the same boots, it did, and is "
            f"{ratio:.2f} times as fast. Whether {CELLS} is slower than {FLAT}: "
            f"{answers['cells'].reason or loss}",
        )
    elif loss is BandwidthChange.UNKNOWN:
        yield Cause.CANNOT_TELL, f"whether cells cost: {answers['cells'].reason}"
    elif not others:
        yield Cause.NO_LOSS, f"{CELLS} is as fast as {FLAT}"
    yield from others


def _binds_by_file(cells: _Cells) -> bool:
    """Whether NCCL's log says that the file, and nothing before it, bound threads."""
    before, after = (
        _bound_gpus(cells, cell) for cell in (SettingCell(CELLS), SettingCell(CELLS, FILE))
    )
    return before == 0 and (after or 0) > 0


def _others(answers: Mapping[str, CauseAnswer], cells: _Cells) -> Iterator[tuple[Cause, str]]:
    """What costs apart from cells; each is shown by a comparison of its own."""
    is_loss = answers["cells"].change is BandwidthChange.LOWER
    if answers["first-node"].change is BandwidthChange.LOWER and not is_loss:
        yield (
            Cause.SCRIPT_BINDING,
            f"{CELLS} is not slower than {FLAT}, and slower once bound to the first node",
        )
    if answers["best"].change is BandwidthChange.LOWER and not is_loss:
        if _fewer_channels(cells, SettingCell(PLACES)):
            yield Cause.CHANNELS, f"{PLACES} is slower than {FLAT}, and has fewer channels"
        else:
            yield Cause.CANNOT_TELL, f"{PLACES} is slower than {FLAT}, with as many channels"
    if answers["bare"].change is BandwidthChange.LOWER:
        yield Cause.VIRTUAL_MACHINE, f"{FLAT}, a flat guest, is slower than the bare machine"


def _of_a_loss(answers: Mapping[str, CauseAnswer], cells: _Cells) -> tuple[Cause, str]:
    file, places = answers["file"], answers["places"]
    unknown = [one for one in (file, places) if one.change is BandwidthChange.UNKNOWN]
    if unknown:
        reasons = "; ".join(f"{one.question.decides}: {one.reason}" for one in unknown)
        return Cause.CANNOT_TELL, f"{CELLS} is slower than {FLAT}; {reasons}"
    before, after = (
        _bound_gpus(cells, cell) for cell in (SettingCell(CELLS), SettingCell(CELLS, FILE))
    )
    if before is None or after is None:
        return Cause.CANNOT_TELL, f"{CELLS} is slower, and no log says where threads were bound"
    if before > 0 or after == 0:
        return (
            Cause.CANNOT_TELL,
            f"the file is to make the difference, but threads were bound for {before:g} GPUs "
            f"without it and {after:g} with it",
        )
    repaired = {file.change, places.change}
    fewer = any(
        _fewer_channels(cells, cell) for cell in (SettingCell(CELLS, FILE), SettingCell(PLACES))
    )
    if repaired == {BandwidthChange.HIGHER}:
        return _of_a_repair(answers["best"], fewer=fewer)
    if repaired <= {BandwidthChange.SAME, BandwidthChange.LOWER}:
        if fewer:
            return (
                Cause.CANNOT_TELL,
                "neither the file nor the GPUs' places repair it, and both have fewer channels",
            )
        return Cause.GUEST_CELLS, "neither the NCCL file nor the GPUs' places repair it"
    return (
        Cause.CANNOT_TELL,
        f"the file and the GPUs' places do not agree: {file.change} and {places.change}",
    )


def _of_a_repair(best: CauseAnswer, *, fewer: bool) -> tuple[Cause, str]:
    because = (
        f"in {CELLS} NCCL bound no thread; with the file, and in {PLACES}, it did, and both repair "
        "it"
    )
    if best.change is not BandwidthChange.LOWER:
        return Cause.PLACEMENT, because
    rest = "with fewer channels" if fewer else "with as many channels"
    return Cause.PLACEMENT_IN_PART, f"{because} in part: {PLACES} is slower than {FLAT}, {rest}"


def _bound_gpus(cells: _Cells, cell: SettingCell) -> float | None:
    """GPUs whose threads NCCL bound; None where no log was read."""
    if cells.explained(cell, CHANNELS) is None:
        return None
    return cells.explained(cell, BOUND) or 0.0


def _fewer_channels(cells: _Cells, cell: SettingCell) -> bool:
    flat, here = (cells.explained(one, CHANNELS) for one in (SettingCell(FLAT), cell))
    return flat is not None and here is not None and here < flat
