"""Collective cells: what the experiment on collectives measured, and how far two cells are apart.

A cell is a layout, or the host itself, under some settings of NCCL; what else was recorded of it
(automatic NUMA balancing, interrupts, reclaim, NCCL's log) are its levels of further factors. Two
settings of one layout are compared boot by boot; two layouts by their boots, three or more of each.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, groupby, product
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from homenode.decide.alternative import Alternative
from homenode.decide.compare import LEAST_STATES, chance_of_states
from homenode.decide.distributions import f_upper_p, t_quantile
from homenode.decide.intervals import CONFIDENCE, LEAST_BOOTS, RESOLUTION
from homenode.decide.summary import sample_variance
from homenode.measure.model import CollectiveSettings, intended_channels
from homenode.measure.results.model import Run, SampleKey, Switches
from homenode.metrics import METRICS, TWO_STATES
from homenode.vm.layout import GuestCells, GuestPcie, MemoryBinding, Pinning

METRIC, CHANNELS, BOUND = "allreduce-busbw-peak", "collective-channels", "collective-bound-gpus"
INTERRUPT_NODES = "collective-interrupt-nodes"
BALANCING, HOST_BALANCING = "numa balancing", "numa balancing on the host"
RECLAIMED, HOST_RECLAIMED = "nccl pages reclaimed", "nccl pages reclaimed on the host"
BARE = "bare"
STUDY = CollectiveSettings()

MATTERS = math.log(1 + METRICS[METRIC].matters)
SURE = 0.99
"""Of all intervals together: a cause is an answer to many comparisons at once."""

OF_ONE_BOOT = math.log(1.05)
"""Added to intervals of fewer than three boots: by how much a setting's effect may differ from boot
to boot where nothing has shown it."""

_OUTLYING = 0.05


class SettingCell(Struct, frozen=True, kw_only=True):
    """A layout under some settings. switches: None of the host itself. The rest: None where it was
    not recorded.

    balancing, host_balancing: automatic NUMA balancing is on where NCCL runs, on the guest's host.
    interrupt_nodes: on how many nodes the GPUs' interrupts were handled. reclaimed: the kernel
    XX"""

    layout: str
    switches: Switches | None
    settings: CollectiveSettings = STUDY
    balancing: bool | None = None
    host_balancing: bool | None = None
    one_interrupt_node: bool | None = None
    reclaimed: bool | None = None
    bound: bool | None = None
    channels: int | None = None
    fewer_channels: bool | None = None

    @property
    def is_guest(self) -> bool:
        return self.switches is not None

    @property
    def has_cells(self) -> bool:
        """Whether the machine that NCCL sees has several nodes."""
        return self.switches is None or self.switches.cells is GuestCells.MIRRORED

    @property
    def shows_places(self) -> bool:
        """Whether the GPUs have a node there."""
        return self.switches is None or self.switches.pcie is GuestPcie.MIRRORED

    @property
    def is_pinned(self) -> bool:
        return self.switches is None or self.switches.pinning is not Pinning.NONE

    @property
    def is_bound_per_cell(self) -> bool:
        return self.switches is not None and self.switches.memory is MemoryBinding.BOUND_PER_CELL

    def __str__(self) -> str:
        """The study's settings go without saying, and what is off or unknown."""
        parts = [self.layout]
        parts += [] if self.settings == STUDY else [self.settings.name]
        parts += ["NUMA balancing on"] if self.balancing else []
        parts += ["NUMA balancing on its host"] if self.host_balancing else []
        parts += ["memory reclaimed"] if self.reclaimed else []
        return ", ".join(parts)


class MeasuredCell(Struct, frozen=True, kw_only=True):
    """boots: the logarithms of each boot's rounds, by the boot's place among the layout's runs."""

    cell: SettingCell
    boots: Mapping[int, tuple[float, ...]]

    @property
    def means(self) -> dict[int, float]:
        return {place: math.fsum(rounds) / len(rounds) for place, rounds in self.boots.items()}

    @property
    def median(self) -> float:
        """Of the boots' medians."""
        return statistics.median(map(statistics.median, self.boots.values()))


class Contrast(Struct, frozen=True, kw_only=True):
    """Two cells. The second over the first, as logarithms: the difference, and its interval, which
    all contrasts keep at once. than: the same of another layout, which is subtracted."""

    first: SettingCell
    second: SettingCell
    log: float
    low: float
    high: float
    boots: int
    than: "Contrast | None" = None

    @property
    def is_same(self) -> bool:
        """No difference that matters, with all of the interval."""
        return self.low > -MATTERS and self.high < MATTERS

    @property
    def beyond(self) -> float:
        """How far the interval is from no difference; negative where it holds that."""
        return max(self.low, -self.high)

    @property
    def ratio(self) -> float:
        return math.exp(self.log)

    def turned(self) -> "Contrast":
        """The first over the second."""
        return Contrast(
            first=self.second,
            second=self.first,
            log=-self.log,
            low=-self.high,
            high=-self.low,
            boots=self.boots,
            than=None if self.than is None else self.than.turned(),
        )

    def against(self, other: "Contrast") -> "Contrast":
        """How much more than in another layout; the layouts' errors are independent."""
        log = self.log - other.log
        reach = math.hypot(self.high - self.log, other.high - other.log)
        return replace(self, log=log, low=log - reach, high=log + reach, than=other)

    def __str__(self) -> str:
        low, high = math.exp(self.low), math.exp(self.high)
        if self.than is not None:
            gain = f"{self.second} over {self.first}"
            of_than = f"{self.than.second} over {self.than.first}"
            return f"{gain} is {self.ratio:.2f} x {of_than} ({low:.2f} to {high:.2f})"
        return f"{self.second} is {self.ratio:.2f} x {self.first} ({low:.2f} to {high:.2f})"


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


def measured_cells(
    guests: Sequence[Alternative], bare: Sequence[Alternative], excluded: list[ExcludedBoot]
) -> tuple[MeasuredCell, ...]:
    """Every cell with a figure; runs that are marked have none."""
    found: dict[str, list[MeasuredCell]] = {}
    named = [(one.switches.name, one.switches, one) for one in guests]
    for layout, switches, one in [*named, *((BARE, None, one) for one in bare)]:
        runs = [run for run in one.runs if not run.head.unusable]
        found.setdefault(layout, list(_of_layout(layout, switches, runs, excluded)))
    return tuple(_with_channels([cell for cells in found.values() for cell in cells]))


def _with_channels(cells: Sequence[MeasuredCell]) -> Iterator[MeasuredCell]:
    """Each with whether others of its kind have more channels; unknown unless all logs say."""

    def kind(one: MeasuredCell) -> tuple[bool, bool, bool]:
        settings = one.cell.settings
        return settings.several, settings.peers, settings.ring

    numbers: dict[tuple[bool, bool, bool], list[int | None]] = {}
    for one in cells:
        numbers.setdefault(kind(one), []).append(one.cell.channels)
    for one in cells:
        known = [number for number in numbers[kind(one)] if number is not None]
        own = one.cell.channels
        if own is None or len(known) < len(numbers[kind(one)]):
            yield one
        else:
            yield replace(one, cell=replace(one.cell, fewer_channels=own < max(known)))


def is_setting(key: SampleKey) -> bool:
    """Whether its figure may be that of one setting: of all sizes and devices together."""
    return key.variant is not None and key.size_bytes is None and key.device is None


def _of_layout(
    layout: str, switches: Switches | None, runs: Sequence[Run], excluded: list[ExcludedBoot]
) -> Iterator[MeasuredCell]:
    odd = set(_odd_channels(layout, runs, excluded))
    names = {one.name: one for one in _every_setting()}
    cells: dict[SettingCell, dict[int, tuple[float, ...]]] = {}
    for place, run in enumerate(runs):
        for key, samples in run.groups.items():
            variant = key.variant or ""
            if key.metric != METRIC or not is_setting(key) or variant not in names:
                continue
            if (place, variant) not in odd:
                recorded = _recorded(run, variant, is_guest=switches is not None)
                cell = replace(recorded, layout=layout, switches=switches, settings=names[variant])
                cells.setdefault(cell, {})[place] = tuple(math.log(one.value) for one in samples)
    yield from (MeasuredCell(cell=cell, boots=boots) for cell, boots in cells.items())


def _every_setting() -> Iterator[CollectiveSettings]:
    for number in range(32):
        yield CollectiveSettings(*(bool(number >> bit & 1) for bit in range(5)))


def _recorded(run: Run, variant: str, *, is_guest: bool) -> SettingCell:
    """What is known of one boot, of no layout yet."""
    channels = _counted(run, CHANNELS, variant)
    interrupts = _counted(run, INTERRUPT_NODES, variant)
    pressed = (RECLAIMED, HOST_RECLAIMED) if is_guest else (RECLAIMED,)
    reclaimed = {_switched_on(run, f"{name}, {variant}") for name in pressed}
    bound = _counted(run, BOUND, variant) or 0
    return SettingCell(
        layout="",
        switches=None,
        balancing=_switched_on(run, BALANCING),
        host_balancing=_switched_on(run, HOST_BALANCING),
        one_interrupt_node=None if interrupts is None else interrupts == 1,
        reclaimed=True if True in reclaimed else (None if None in reclaimed else False),
        # A figure of 0 is refused everywhere; none next to the channels is none bound.
        bound=None if channels is None else bound > 0,
        channels=channels,
    )


def _counted(run: Run, metric: str, variant: str) -> int | None:
    found = [
        one.value
        for key, samples in run.groups.items()
        if (key.metric, key.variant) == (metric, variant)
        for one in samples
    ]
    return round(statistics.median(found)) if found else None


def _switched_on(run: Run, name: str) -> bool | None:
    values = {one.value for one in run.head.conditions if one.name == name}
    return values != {"0"} if values else None


def _odd_channels(
    layout: str, runs: Sequence[Run], excluded: list[ExcludedBoot]
) -> Iterator[tuple[int, str]]:
    """Boots with other channels than most boots of the same cell."""
    channels: dict[str, dict[int, int]] = {}
    for place, run in enumerate(runs):
        for key, samples in run.groups.items():
            if key.metric == CHANNELS and key.variant is not None:
                number = statistics.median(one.value for one in samples)
                channels.setdefault(key.variant, {})[place] = round(number)
    for settings, by_place in channels.items():
        intended = intended_channels(list(by_place.values()))
        for place, number in by_place.items():
            if number != intended:
                yield place, settings
                excluded.append(
                    ExcludedBoot(
                        run=runs[place].head.name,
                        layout=layout,
                        settings=settings,
                        channels=number,
                        intended=intended,
                    )
                )


def contrasts(
    cells: Sequence[MeasuredCell],
    of: tuple[CollectiveSettings, CollectiveSettings] | None = None,
) -> tuple[Contrast, ...]:
    """Every two cells that may be compared by themselves: those of one layout that differ in what
    NCCL knows and where it is bound, and those of two layouts under the same settings.

    of: two settings, which are compared in each layout instead.
    """
    across: list[_Pair] = []
    if of is None:
        within = [pair for group in _groups(cells) for pair in combinations(group, 2)]
        within = [pair for pair in within if _shared(*pair)]
        across = [
            (one, other)
            for one, other in combinations(cells, 2)
            if one.cell.settings == other.cell.settings
            and (one.cell.layout != other.cell.layout or not _shared(one, other))
            and min(len(one.boots), len(other.boots)) >= LEAST_BOOTS
        ]
    else:
        within = _pairs_of(cells, *of)
    alike = [] if of else [pair for one in _ALIKE for pair in _pairs_of(cells, STUDY, one)]
    level = 1 - (1 - SURE) / max(1, len(within) + len(across) + math.comb(len(alike), 2))
    turned = list(_within(cells, alike, level))
    more = [
        other.against(one)
        for one, other in combinations(turned, 2)
        if one.second.settings == other.second.settings
    ]
    return (*_within(cells, within, level), *_across(cells, across, level), *more)


_ALIKE = (CollectiveSettings(ring=True), CollectiveSettings(several=True))
"""Settings whose own effect is the same in all layouts, whatever it is. Not P2P: whether GPUs reach
each other differs between layouts."""


def _pairs_of(
    cells: Sequence[MeasuredCell], first: CollectiveSettings, second: CollectiveSettings
) -> "list[_Pair]":
    """Both settings in each layout that has them."""
    return [
        (one, other)
        for one, other in product(cells, cells)
        if (one.cell.settings, other.cell.settings) == (first, second)
        and one.cell.layout == other.cell.layout
        and _shared(one, other)
    ]


def _shared(one: MeasuredCell, other: MeasuredCell) -> list[int]:
    return [place for place in one.boots if place in other.boots]


def _groups(cells: Iterable[MeasuredCell]) -> Iterator[list[MeasuredCell]]:
    """Cells of the same boots that share transport, algorithm and processes: those have effects of
    their own that no layout causes."""

    def key(one: MeasuredCell) -> tuple[str, bool, bool, bool]:
        settings = one.cell.settings
        return one.cell.layout, settings.several, settings.peers, settings.ring

    for _, group in groupby(sorted(cells, key=key), key):
        yield list(group)


_Pair = tuple[MeasuredCell, MeasuredCell]


class _Spread(NamedTuple):
    """A variance, and the degrees of freedom that it rests on."""

    variance: float
    freedom: float


def _within(
    cells: Sequence[MeasuredCell], pairs: Sequence[_Pair], level: float
) -> Iterator[Contrast]:
    """Two settings of the same boots: nothing of a boot is between them."""
    of_rounds = _by_layout((one.cell, _spread(of)) for one in cells for of in one.boots.values())
    sizes = {one.cell: max(2, len(group)) for group in _groups(cells) for one in group}
    both = {
        (one.cell, other.cell): [
            other.means[place] - one.means[place] for place in _shared(one, other)
        ]
        for one, other in pairs
    }
    # Each cell is in several pairs of its group: together they have the freedom of its cells.
    of_boots = _by_layout(
        (pair[0], _spread(values, share=2 / sizes[pair[0]])) for pair, values in both.items()
    )
    for one, other in pairs:
        differences, boots = both[one.cell, other.cell], len(both[one.cell, other.cell])
        usual = of_rounds.get(one.cell.layout)
        rounds = [each.boots[place] for each in (one, other) for place in _shared(one, other)]
        known = [_larger(_spread(of), usual) for of in rounds]
        if usual is None:
            continue
        variances = [spread.variance for spread in known if spread is not None]
        error = _Spread(
            math.fsum(v / len(of) for v, of in zip(variances, rounds, strict=True)) / boots**2,
            min(spread.freedom for spread in known if spread is not None),
        )
        if boots >= LEAST_BOOTS:
            between = _larger(_spread(differences), of_boots[one.cell.layout])
            assert between is not None, "three boots have a variance"
            if between.variance / boots > error.variance:
                error = _Spread(between.variance / boots, between.freedom)
        slack = 0.0 if boots >= LEAST_BOOTS else OF_ONE_BOOT
        yield _contrast(one, other, math.fsum(differences) / boots, error, level, boots, slack)


def _across(
    cells: Sequence[MeasuredCell], pairs: Sequence[_Pair], level: float
) -> Iterator[Contrast]:
    """Two layouts by their boots; none where boots in two states can explain it."""
    several = [one for one in cells if len(one.boots) >= LEAST_BOOTS]
    by_settings: dict[str, list[_Spread | None]] = {}
    for one in several:
        spread = _spread(list(one.means.values()))
        by_settings.setdefault(one.cell.settings.name, []).append(spread)
    pooled = {name: _pooled(those) for name, those in by_settings.items()}
    for one, other in pairs:
        a, b = list(one.means.values()), list(other.means.values())
        both = pooled[one.cell.settings.name]
        spreads = [_larger(_spread(values), both) for values in (a, b)]
        first, second = spreads
        assert first is not None and second is not None, "three boots have a variance"
        log = math.fsum(b) / len(b) - math.fsum(a) / len(a)
        if abs(log) > math.log(LEAST_STATES):
            apart = max(min(b) - max(a), min(a) - max(b))
            can_be_states = chance_of_states(len(a), len(b)) > 1 - CONFIDENCE
            if apart < math.log(TWO_STATES) and can_be_states:
                continue
        error = _Spread(
            first.variance / len(a) + second.variance / len(b), min(first.freedom, second.freedom)
        )
        yield _contrast(one, other, log, error, level, min(len(a), len(b)), 0.0)


def _contrast(
    one: MeasuredCell,
    other: MeasuredCell,
    log: float,
    error: _Spread,
    level: float,
    boots: int,
    slack: float,
) -> Contrast:
    reach = t_quantile(level, max(1.0, error.freedom)) * math.sqrt(error.variance) + slack
    return Contrast(
        first=one.cell,
        second=other.cell,
        log=log,
        low=log - reach,
        high=log + reach,
        boots=boots,
    )


def _by_layout(
    spreads: Iterable[tuple[SettingCell, _Spread | None]],
) -> dict[str, _Spread]:
    """What the cells of each layout have in common; of all layouts, where it varies no more."""
    found: dict[str, list[_Spread | None]] = {}
    for cell, spread in spreads:
        found.setdefault(cell.layout, []).append(spread)
    together = _pooled(one for those in found.values() for one in those)
    of_each = {layout: _larger(_pooled(those), together) for layout, those in found.items()}
    return {layout: one for layout, one in of_each.items() if one is not None}


def _spread(values: Sequence[float], *, share: float = 1.0) -> _Spread | None:
    """None of a single value: nothing says how far the next one would be."""
    if len(values) < 2:
        return None
    variance = max(sample_variance(values), RESOLUTION**2)
    return _Spread(variance, (len(values) - 1.0) * share)


def _pooled(spreads: Iterable[_Spread | None]) -> _Spread | None:
    known = [one for one in spreads if one is not None]
    if not known:
        return None
    freedom = math.fsum(one.freedom for one in known)
    return _Spread(math.fsum(one.variance * one.freedom for one in known) / freedom, freedom)


def _larger(own: _Spread | None, pooled: _Spread | None) -> _Spread | None:
    """What is pooled, unless its own is greater than chance explains; None where none is known."""
    if own is None or pooled is None:
        return pooled
    if own.variance <= pooled.variance:
        return pooled
    p = f_upper_p(own.variance / pooled.variance, own.freedom, pooled.freedom)
    return own if p < _OUTLYING else pooled
