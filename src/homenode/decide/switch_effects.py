"""SwitchEffects: the effect of each switch of a layout on each metric, machine by machine."""

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct, structs

from homenode.decide.alternative import Alternative, join_states
from homenode.decide.compare import compare_series, make_series_key
from homenode.decide.comparison import Effect, Outcome, is_large
from homenode.decide.summary import Series, SeriesKey
from homenode.measure.gpu_tests import TOPOLOGY_FILE
from homenode.metrics import METRICS


class StudySwitch(StrEnum):
    """The switches of the study, in the order in which layouts add them."""

    PINNING = "pinning"
    MEMORY = "bound memory"
    CELLS = "guest cells"
    PCIE = "guest PCIe"
    SIBLINGS = "siblings"


_STEPS: tuple[tuple[StudySwitch, tuple[tuple[str, str], ...]], ...] = (
    (StudySwitch.PINNING, (("default", "pin"),)),
    (StudySwitch.MEMORY, (("pin", "pin-bound"),)),
    (StudySwitch.CELLS, (("pin", "pin-numa"), ("default", "pin-numa"))),
    (StudySwitch.PCIE, (("pin-numa", "pin-numa-pci"), ("pin-numa-smt", "pin-numa-pci-smt"))),
    (
        StudySwitch.SIBLINGS,
        (
            ("pin-numa-pci", "pin-numa-pci-smt"),
            ("pin-numa", "pin-numa-smt"),
            ("pin", "pin-numa-smt"),
        ),
    ),
)
"""Pairs of layouts whose difference counts as a switch's, those that differ in the fewest switches
first; the first pair with results of a metric is used."""


class SwitchEffect(Struct, frozen=True, kw_only=True):
    switch: StudySwitch
    machine: str
    effect: Effect  # as compared

    @property
    def outcome(self) -> Outcome:
        """Better or worse by a relevant amount, no relevant difference, or unknown."""
        return judge_outcome(self.effect)


def switch_effects(machine: str, alternatives: Sequence[Alternative]) -> tuple[SwitchEffect, ...]:
    """The effects of every switch in which two of these layouts differ, on headline metrics."""
    by_label = {alternative.label: alternative for alternative in alternatives}
    changes: list[SwitchEffect] = []
    for switch, pairs in _STEPS:
        seen_names: set[str] = set()
        for first, second in pairs:
            if first not in by_label or second not in by_label:
                continue
            pair = join_states((by_label[first], by_label[second]))
            series_by_label = {layout.label: _select_totals(layout) for layout in pair}
            effects = compare_series(pair, series_by_label).effects
            for effect in sorted(filter(_is_headline, effects), key=lambda one: not one.primary):
                if effect.metric not in seen_names:
                    seen_names.add(effect.metric)
                    changes.append(SwitchEffect(switch=switch, machine=machine, effect=effect))
    return tuple(changes)


def _select_totals(alternative: Alternative) -> dict[SeriesKey, Series]:
    """Return the series without those of single sizes, nodes and pairs."""
    return {key: key_series for key, key_series in alternative.series.items() if _may_stand(key)}


def _may_stand(key: SeriesKey) -> bool:
    metric = METRICS.get(key.metric)
    return (
        metric is not None
        and key.size_bytes is None
        and key.node is None
        and (metric.control or metric.worst_device or key.variant in (None, metric.headline))
    )


def judge_outcome(effect: Effect) -> Outcome:
    """Return the effect's outcome by `compare`, if it is relevant."""
    is_stated = effect.outcome in (Outcome.BETTER, Outcome.WORSE)
    return Outcome.NO_DIFFERENCE if is_stated and not is_large(effect) else effect.outcome


def _is_headline(effect: Effect) -> bool:
    """Return whether the series represents its metric."""
    metric = METRICS.get(effect.metric)
    if metric is None or effect.state is not None:
        return False
    return make_series_key(effect).is_over_all and (
        effect.primary or effect.slowest_device or effect.variant in (None, metric.headline)
    )


def file_effects(alternatives: Sequence[Alternative]) -> tuple[Effect, ...]:
    """Compare all-reduce with and without NCCL's topology file, in layouts that have both."""
    effects: list[Effect] = []
    for alternative in alternatives:
        sides: dict[str | None, dict[SeriesKey, Series]] = {None: {}, TOPOLOGY_FILE: {}}
        for key, series in alternative.series.items():
            if key.metric.startswith("allreduce-busbw") and key.variant in sides:
                plain = structs.replace(key, variant=None)
                sides[key.variant][plain] = structs.replace(series, key=plain)
        other = structs.replace(alternative, label=f"{alternative.label}, {TOPOLOGY_FILE}")
        series_by_label = dict(zip((alternative.label, other.label), sides.values(), strict=True))
        if all(series_by_label.values()):
            effects += compare_series((alternative, other), series_by_label).effects
    return tuple(effects)
