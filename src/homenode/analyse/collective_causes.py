"""Collective causes: why all-reduces are slower in one layout than in another, or that no one can
tell.

The experiment (measure.gpu.experiment) changes one setting at a time in each layout. Each question
here compares two of its cells; the cause follows from the answers, and from what NCCL's log said
of threads and channels. Two settings of one boot are compared boot by boot; two layouts by
their boots, as every comparison is.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from homenode.analyse.alternative import Alternative
from homenode.analyse.intervals import interval
from homenode.analyse.summary import Series, SeriesKey
from homenode.measure.model import CollectiveSettings
from homenode.metrics import METRICS
from homenode.results.model import SampleKey

METRIC = "allreduce-busbw-peak"
FLAT, CELLS, PLACES, BARE = "pin", "pin-numa", "pin-numa-pci", "bare"
STUDY = CollectiveSettings()
FILE = CollectiveSettings(file=True)
SEVERAL = CollectiveSettings(several=True)
FIRST_NODE = CollectiveSettings(first_node=True)


class Cause(StrEnum):
    """What the experiment shows."""

    NO_LOSS = "guest cells cost nothing here"
    PLACEMENT = "threads and buffers without a place: NCCL knows no node for the GPUs"
    SCRIPT_BINDING = "the binding to the first node, and not the guest's cells"
    CHANNELS = "fewer channels: NCCL models the link between nodes"
    GUEST_CELLS = "the guest's cells, whatever NCCL knows of the GPUs' places"
    VIRTUAL_MACHINE = "the virtual machine, in every layout alike"
    CANNOT_TELL = "cannot tell"


class Change(StrEnum):
    """Of the second cell against the first."""

    LOWER = "lower"
    SAME = "the same"
    HIGHER = "higher"
    UNKNOWN = "cannot tell"


@dataclass(frozen=True, slots=True)
class Cell:
    """A layout, or BARE, under some settings."""

    layout: str
    settings: CollectiveSettings = STUDY

    def __str__(self) -> str:
        """The study's settings go without saying."""
        if self.settings == STUDY:
            return self.layout
        return f"{self.layout}, {self.settings.name}"


@dataclass(frozen=True, slots=True)
class Question:
    """Two cells of the experiment. decides: what the answer is for."""

    id: str
    first: Cell
    second: Cell
    decides: str


QUESTIONS = (
    Question("cells", Cell(FLAT), Cell(CELLS), "whether guest cells cost bandwidth"),
    Question(
        "file", Cell(CELLS), Cell(CELLS, FILE), "whether the NCCL file alone repairs that guest"
    ),
    Question(
        "first-node",
        Cell(CELLS),
        Cell(CELLS, FIRST_NODE),
        "whether the study's binding to the first node is what costs",
    ),
    Question(
        "several",
        Cell(CELLS),
        Cell(CELLS, SEVERAL),
        "whether a process for each GPU puts all buffers in one node",
    ),
    Question("places", Cell(CELLS), Cell(PLACES), "whether the GPUs' places repair it"),
    Question("best", Cell(FLAT), Cell(PLACES), "whether cells with places are worth it"),
    Question("bare", Cell(BARE), Cell(FLAT), "what the virtual machine costs by itself"),
    Question("pins", Cell("default"), Cell(FLAT), "what pins alone are worth: flat guests"),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """ratio: the second over the first; None where a cell has no figure: reason says which."""

    question: Question
    change: Change
    ratio: float | None
    boots: int
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """cause, because: the finding and its ground. answers: in the order of QUESTIONS. provisional:
    fewer than three boots of a layout."""

    cause: Cause
    because: str
    answers: tuple[Answer, ...]
    provisional: bool


@dataclass(frozen=True, slots=True)
class _Cells:
    """Series by layout, settings' name and metric."""

    series: Mapping[tuple[str, str, str], Series]
    boots: Mapping[tuple[str, str], tuple[tuple[int, float], ...]]

    def of(self, cell: Cell, metric: str = METRIC) -> Series | None:
        return self.series.get((cell.layout, cell.settings.name, metric))

    def explained(self, cell: Cell, metric: str) -> float | None:
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
    cause, because = _cause({one.question.id: one for one in answers}, cells)
    least = min(
        (len(one.medians) for key, one in cells.series.items() if key[2] == METRIC), default=0
    )
    return Diagnosis(cause, because, answers, least < _MEASURED_FROM)


_MEASURED_FROM = 3


def _cells(guests: Sequence[Alternative], bare: Sequence[Alternative]) -> _Cells:
    series: dict[tuple[str, str, str], Series] = {}
    boots: dict[tuple[str, str], tuple[tuple[int, float], ...]] = {}
    named = [(one.switches.name, one) for one in guests] + [(BARE, one) for one in bare]
    for layout, alternative in named:
        for key, found in _of_experiment(alternative.series):
            assert key.variant is not None, "the experiment's series have variants"
            series.setdefault((layout, key.variant, key.metric), found)
        by_settings: dict[str, dict[int, list[float]]] = {}
        for place, run in enumerate(alternative.runs):
            for fields, samples in run.groups.items():
                if fields.metric == METRIC and fields.variant is not None:
                    of = by_settings.setdefault(fields.variant, {})
                    of.setdefault(place, []).extend(one.value for one in samples)
        for settings, values in by_settings.items():
            boots[layout, settings] = tuple(
                (place, statistics.median(one)) for place, one in values.items()
            )
    return _Cells(series, boots)


def _of_experiment(found: Mapping[SeriesKey, Series]) -> Iterator[tuple[SeriesKey, Series]]:
    for key, series in found.items():
        if _is_setting(key) and not key.worst:
            yield key, series


def _is_setting(key: SampleKey | SeriesKey) -> bool:
    """Whether its figure may be that of one setting: of all sizes and devices together."""
    return key.variant is not None and key.size_bytes is None and key.device is None


def _answer(question: Question, cells: _Cells) -> Answer:
    first, second = cells.of(question.first), cells.of(question.second)
    if first is None or second is None:
        missing = question.first if first is None else question.second
        return Answer(question, Change.UNKNOWN, None, 0, f"no figure of {missing}")
    boots = min(len(first.medians), len(second.medians))
    if question.first.layout == question.second.layout:
        return _within_boots(question, cells, boots)
    return _across_boots(question, first, second, boots)


def _within_boots(question: Question, cells: _Cells, boots: int) -> Answer:
    """The same boots under two settings: nothing of a boot is between them."""
    one, other = (
        dict(cells.boots[cell.layout, cell.settings.name])
        for cell in (question.first, question.second)
    )
    ratios = [other[place] / one[place] for place in one if place in other and one[place] > 0]
    if not ratios:
        return Answer(question, Change.UNKNOWN, None, boots, "no boot has both")
    ratio = math.exp(statistics.fmean(math.log(one) for one in ratios))
    sides = {_side(one) for one in ratios}
    if len(sides) > 1:
        return Answer(question, Change.UNKNOWN, ratio, boots, "boots do not agree")
    return Answer(question, sides.pop(), ratio, boots)


def _side(ratio: float) -> Change:
    matters = 1 + METRICS[METRIC].matters
    if ratio > matters:
        return Change.HIGHER
    return Change.LOWER if ratio < 1 / matters else Change.SAME


def _across_boots(question: Question, first: Series, second: Series, boots: int) -> Answer:
    metric = METRICS[METRIC]
    found = interval(first, second) if boots >= _MEASURED_FROM else None
    if found is None:
        ratio = statistics.median(second.medians) / statistics.median(first.medians)
        side = _side(ratio)
        far = max(ratio, 1 / ratio) >= metric.boot_variation
        if side is Change.SAME or far:
            return Answer(question, side, ratio, boots)
        reason = f"boots of one layout differ up to {metric.boot_variation:g} times"
        return Answer(question, Change.UNKNOWN, ratio, boots, reason)
    side = _side(found.ratio)
    if side is Change.SAME:
        is_sure = _side(found.low) is _side(found.high) is Change.SAME
        if is_sure:
            return Answer(question, side, found.ratio, boots)
    elif not found.low <= 1 <= found.high:
        return Answer(question, side, found.ratio, boots)
    between = f"{found.low:.2f} to {found.high:.2f} times"
    return Answer(question, Change.UNKNOWN, found.ratio, boots, between)


def _cause(answers: Mapping[str, Answer], cells: _Cells) -> tuple[Cause, str]:
    loss = answers["cells"].change
    if loss is Change.UNKNOWN:
        return Cause.CANNOT_TELL, f"whether cells cost: {answers['cells'].reason}"
    if loss is Change.LOWER:
        return _of_a_loss(answers, cells)
    if answers["first-node"].change is Change.LOWER:
        return (
            Cause.SCRIPT_BINDING,
            f"{CELLS} is as fast as {FLAT}, and slower once bound to the first node",
        )
    if answers["best"].change is Change.LOWER:
        if _fewer_channels(cells, Cell(PLACES)):
            return Cause.CHANNELS, f"{PLACES} is slower than {FLAT}, and has fewer channels"
        return Cause.CANNOT_TELL, f"{PLACES} is slower than {FLAT}, with as many channels"
    if answers["bare"].change is Change.LOWER:
        return Cause.VIRTUAL_MACHINE, f"{FLAT} is slower than the bare machine, and {CELLS} alike"
    return Cause.NO_LOSS, f"{CELLS} is as fast as {FLAT}"


def _of_a_loss(answers: Mapping[str, Answer], cells: _Cells) -> tuple[Cause, str]:
    file, places = answers["file"], answers["places"]
    unknown = [one for one in (file, places) if one.change is Change.UNKNOWN]
    if unknown:
        reasons = "; ".join(f"{one.question.decides}: {one.reason}" for one in unknown)
        return Cause.CANNOT_TELL, f"{CELLS} is slower than {FLAT}; {reasons}"
    repaired = {file.change, places.change}
    if repaired == {Change.HIGHER}:
        return _of_a_repair(cells)
    if repaired <= {Change.SAME, Change.LOWER}:
        if any(_fewer_channels(cells, cell) for cell in (Cell(CELLS, FILE), Cell(PLACES))):
            return (
                Cause.CANNOT_TELL,
                "neither the file nor the GPUs' places repair it, and both have fewer channels",
            )
        return Cause.GUEST_CELLS, "neither the NCCL file nor the GPUs' places repair it"
    return (
        Cause.CANNOT_TELL,
        f"the file and the GPUs' places do not agree: {file.change} and {places.change}",
    )


def _of_a_repair(cells: _Cells) -> tuple[Cause, str]:
    """Figures that fit the mechanism need a log that does."""
    before, after = (_bound_gpus(cells, cell) for cell in (Cell(CELLS), Cell(CELLS, FILE)))
    if before is None or after is None:
        return Cause.CANNOT_TELL, "the file repairs it, and no log says where threads were bound"
    if before > 0 or after == 0:
        return (
            Cause.CANNOT_TELL,
            f"the file repairs it, but threads were bound for {before:g} GPUs without it and "
            f"{after:g} with it",
        )
    return (
        Cause.PLACEMENT,
        f"in {CELLS} NCCL bound no thread; with the file, and in {PLACES}, it did, and both repair "
        "it",
    )


def _bound_gpus(cells: _Cells, cell: Cell) -> float | None:
    """GPUs whose threads NCCL bound; None where no log was read."""
    if cells.explained(cell, "collective-channels") is None:
        return None
    return cells.explained(cell, "collective-bound-gpus") or 0.0


def _fewer_channels(cells: _Cells, cell: Cell) -> bool:
    flat, here = (cells.explained(one, "collective-channels") for one in (Cell(FLAT), cell))
    return flat is not None and here is not None and here < flat
