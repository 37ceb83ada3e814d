"""Verdict: what to run for an objective on one kind of machine, as far as its results reach."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from homenode.analyse.alternative import Alternative, alternatives
from homenode.analyse.comparison import Doubt, once
from homenode.analyse.doubts import doubts_of
from homenode.analyse.standing import (
    PRINTED_MATTERS,
    Field,
    Position,
    Standing,
    field_for,
    field_on,
)
from homenode.analyse.words import figure_text, percent_text, range_text
from homenode.metrics import METRICS, primaries
from homenode.objective import Objective
from homenode.plan.layout import PRESETS, GuestCells, GuestPcie, MemoryBinding, Pinning, Siblings
from homenode.results.model import UNKNOWN_SWITCHES, Run, Switches
from homenode.units import format_bytes


class Rung(StrEnum):
    """What a verdict rests on, the best first."""

    MEASURED_HERE = "measured-here"
    MEASURED_ON_KIND = "measured-on-this-kind"
    PUBLISHED = "published"
    REASONED = "reasoned"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer for one objective on one system.

    choice: the alternative to run, None where none can be named. layout: the simplest preset that
    agrees with it, None where the choice is no layout. also: others that are no worse. avoid: those
    that are worse; of one in neither nothing can be told. memory_mode, huge_pages: for people.
    measure_next: the layout that nobody has measured and that could change the answer. notes: what
    is wrong with published figures. advice: what their authors say. sources: where the figures are
    from.
    """

    objective: Objective
    system: str
    rung: Rung
    choice: str | None
    layout: str | None
    also: tuple[str, ...]
    avoid: tuple[str, ...]
    memory_mode: str
    huge_pages: str
    statement: str
    standings: tuple[Standing, ...]
    doubts: tuple[Doubt, ...]
    measure_next: str | None
    notes: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The `verdict` format. skipped: folders that were left out, with the reason."""

    verdicts: tuple[Verdict, ...]
    skipped: tuple[str, ...]


_SIMPLEST = (
    "default", "pin", "pin-bound", "pin-numa", "pin-numa-pci", "pin-numa-smt", "pin-numa-pci-smt",
)  # fmt: skip
"""Of equals, the one that changes least is named."""

_TIE_BREAK = {Objective.COLLECTIVE: "memory-latency"}
"""What decides among equals before simplicity does: a collective's proxies wait for memory."""

_UNTOLD = "not said"


def verdict(system: str, runs: Sequence[Run], objective: Objective, rung: Rung) -> Verdict:
    """The verdict of one system's runs; runs of several hosts of one kind are not mixed here."""
    chosen_from = [
        one
        for one in alternatives(runs)
        if one.switches != UNKNOWN_SWITCHES or one.arrangement is not None
    ]
    field, used = field_for(chosen_from, objective)
    own = once(doubt for one in alternatives(runs) for doubt in doubts_of(one))
    of_objective = tuple(doubt for doubt in own if _concerns(doubt, objective))
    doubts = once(
        doubt for doubt in (*field.doubts, *of_objective) if _fits(doubt, objective, used)
    )
    empty = Verdict(
        objective, system, rung, None, None, (), (), _UNTOLD, _UNTOLD, "", field.standings, doubts,
        None, sources=tuple(dict.fromkeys(run.head.source for run in runs if run.head.source)),
    )  # fmt: skip
    excluded = [doubt for doubt in own if doubt.id in ("unusable", "no-real-machine")]
    if excluded:
        detail = "; ".join(dict.fromkeys(doubt.detail for doubt in excluded))
        return replace(empty, statement=f"excluded: {detail}", doubts=tuple(excluded))
    if len(used) < 2:
        return replace(empty, statement=_nothing(used, objective, doubts))
    acceptable = field.acceptable()
    if not acceptable:
        return replace(
            empty,
            statement="cannot tell: " + _blocked(doubts),
            measure_next=_unmeasured(used, None, objective),
        )
    return _decided(empty, field, used, acceptable)


def _decided(
    empty: Verdict, field: Field, used: tuple[Alternative, ...], acceptable: tuple[str, ...]
) -> Verdict:
    objective = empty.objective
    by_label = {one.label: one for one in used}
    kept = [by_label[label] for label in acceptable]
    untold = field.untold()
    avoid = tuple(one.label for one in used if one.label not in (*acceptable, *untold))
    # Where nothing is worse, nothing needs to change: a second metric decides among the rest only.
    remaining, because = _tie_broken(kept, objective) if avoid else (kept, None)
    choice = min(remaining, key=lambda one: (*_rank(one, objective), acceptable.index(one.label)))
    regressed = _pin_regression(field, used)
    doubts = (*empty.doubts, *regressed)
    statement = _statement(field, choice.label, acceptable, avoid)
    if because and choice.label != acceptable[0]:
        statement += f"; {choice.label} over {acceptable[0]} rests on {because} only"
    elif because:
        statement += f"; among equals {because} decided"
    statement += _siblings(field, used, choice)
    statement += "".join(f"; the pins of {one.subject} are to be reviewed" for one in regressed)
    return replace(
        empty,
        choice=choice.label,
        layout=_preset(choice.switches),
        also=tuple(label for label in acceptable if label != choice.label),
        avoid=avoid,
        memory_mode=_memory_mode(choice),
        huge_pages=_UNTOLD if choice.page_bytes is None else format_bytes(choice.page_bytes),
        statement=statement,
        doubts=doubts,
        measure_next=_unmeasured(used, choice, objective),
    )


def _fits(doubt: Doubt, objective: Objective, used: Sequence[Alternative]) -> bool:
    """GPUs without a node are a doubt where GPUs talk, and nobody has tried to give them one."""
    if doubt.id != "gpus-without-node":
        return True
    tried = any(one.switches.pcie is GuestPcie.MIRRORED for one in used)
    return not tried and objective in (Objective.COLLECTIVE, Objective.DEVICE_TRANSFER)


def _concerns(doubt: Doubt, objective: Objective) -> bool:
    if doubt.id == "refused-figures":
        return any(metric.id in doubt.detail for metric in primaries(objective))
    return doubt.blocks


def _nothing(used: Sequence[Alternative], objective: Objective, doubts: Sequence[Doubt]) -> str:
    metrics = " or ".join(metric.title for metric in primaries(objective))
    if refused := [doubt for doubt in doubts if doubt.id == "refused-figures"]:
        return f"nothing to go by: {refused[0].detail} ({refused[0].cause})"
    if not used:
        return f"nothing to go by: no figure of {metrics} by layout"
    return f"nothing to compare: {metrics} is known of {used[0].label} only"


def _blocked(doubts: Sequence[Doubt]) -> str:
    blocking = list(dict.fromkeys(f"{d.detail}: {d.remedy}" for d in doubts if d.blocks))
    return "; ".join(blocking) or "the alternatives have no figures in common"


def _tie_broken(
    kept: list[Alternative], objective: Objective
) -> tuple[list[Alternative], str | None]:
    """Those of equals that the second metric leaves, and what it said; all, None without it."""
    metric = METRICS.get(_TIE_BREAK.get(objective, ""))
    if metric is None or len(kept) < 2:
        return kept, None
    field = field_on(kept, metric)
    standings = field.on(metric.id)
    worse = {one.alternative for one in standings if one.position is Position.WORSE}
    if len(standings) < len(kept) or not worse:
        return kept, None
    told = " against ".join(figure_text(one.value, one.unit) for one in standings)
    return [one for one in kept if one.label not in worse], f"{metric.title} ({told})"


def _rank(one: Alternative, objective: Objective) -> tuple[bool, int]:
    """Density wants siblings; apart from that, what changes least."""
    packed = objective is Objective.DENSITY and one.switches.siblings is not Siblings.EXPOSED
    preset = _preset(one.switches)
    place = _SIMPLEST.index(preset) if preset in _SIMPLEST else len(_SIMPLEST)
    return packed, place


def _preset(switches: Switches) -> str | None:
    """The simplest preset that agrees with every switch that is known; None where none is."""
    if switches == UNKNOWN_SWITCHES:
        return None
    for name in _SIMPLEST:
        preset = Switches.of(PRESETS[name])
        if all(
            known is None or known is value
            for known, value in (
                (switches.pinning, preset.pinning),
                (switches.siblings, preset.siblings),
                (switches.cells, preset.cells),
                (switches.pcie, preset.pcie),
                (switches.memory, preset.memory),
            )
        ):
            return name
    return None


def _memory_mode(choice: Alternative) -> str:
    match choice.switches.memory:
        case MemoryBinding.BOUND_PER_CELL:
            return f"{choice.memory_mode or 'strict'}, per cell"
        case MemoryBinding.BOUND:
            return f"{choice.memory_mode or 'strict'}, on the chosen nodes"
        case MemoryBinding.AS_IT_WAS:
            return "as the document has it"
    preset = _preset(choice.switches)
    if preset is not None and PRESETS[preset].memory is MemoryBinding.BOUND_PER_CELL:
        return "strict, per cell"
    return _UNTOLD


def _statement(field: Field, choice: str, acceptable: Sequence[str], avoid: Sequence[str]) -> str:
    parts = []
    for metric in dict.fromkeys(one.metric for one in field.standings):
        figures = [
            f"{one.alternative} {figure_text(one.value, one.unit)}"
            + ("" if one.position is Position.BEST else f" ({_change(one)})")
            for one in field.on(metric)
        ]
        slowest = ", slowest GPU" if field.on(metric)[0].slowest_device else ""
        parts.append(f"{METRICS[metric].title}{slowest}: {', '.join(figures)}")
    if untold := field.untold():
        parts.append(f"cannot tell of {', '.join(untold)}")
    told = "; ".join(parts)
    if not avoid:
        hidden = any(one.position is Position.UNSHOWN for one in field.standings)
        shown = (
            f"shown; one below {PRINTED_MATTERS:.0%} may be hidden" if hidden else "that matters"
        )
        return f"no difference {shown}: {told}"
    others = [label for label in acceptable if label != choice]
    equals = f" (or {', '.join(others)})" if others else ""
    return f"{choice}{equals} rather than {', '.join(avoid)}: {told}"


def _change(one: Standing) -> str:
    if one.low is None or one.high is None:
        return percent_text(one.ratio)
    return range_text(one.low, one.high)


def _siblings(field: Field, used: Sequence[Alternative], choice: Alternative) -> str:
    """What exposing siblings gained, where that is the question."""
    exposed = {one.label for one in used if one.switches.siblings is Siblings.EXPOSED}
    hidden = {one.label for one in used if one.switches.siblings is Siblings.HIDDEN}
    standings = field.on("cpu-throughput")
    with_siblings = [one for one in standings if one.alternative in exposed]
    without = [one for one in standings if one.alternative in hidden]
    if not (with_siblings and without):
        return ""
    gain = with_siblings[0].value / without[0].value
    if choice.label in exposed:
        return f"; siblings give {percent_text(gain)} in all, so each of twice the vCPUs has half"
    return f"; siblings give {percent_text(gain)} of throughput for twice the vCPUs, and no more"


def _pin_regression(field: Field, used: Sequence[Alternative]) -> tuple[Doubt, ...]:
    """Pinning that costs processor throughput is a wrong pin, not a property of pinning."""
    pinned = {one.label for one in used if one.switches.pinning is Pinning.ONE_PER_CORE}
    free = {one.label for one in used if one.switches.pinning is Pinning.NONE}
    standings = field.on("cpu-throughput")
    if not standings or standings[0].alternative not in free:
        return ()
    return tuple(
        Doubt(
            "pin-regression", one.alternative,
            f"{percent_text(one.ratio)} of the unpinned guest's throughput", False,
            "pins on slower cores, on siblings of one core, or on PUs that QEMU's own threads use; "
            "or fewer vCPUs",
            "review the pins: homenode doctor VM.xml, or let homenode plan choose them",
        )
        for one in standings
        if one.alternative in pinned and one.position is Position.WORSE
    )  # fmt: skip


def _unmeasured(
    used: Sequence[Alternative], choice: Alternative | None, objective: Objective
) -> str | None:
    """The layout that could change the answer: GPUs on their cells, where only cells were tried."""
    if objective not in (
        Objective.COLLECTIVE, Objective.DEVICE_TRANSFER, Objective.HOST_BANDWIDTH,
    ):  # fmt: skip
        return None
    cells = [one for one in used if one.switches.cells is GuestCells.MIRRORED]
    if any(one.switches.pcie is GuestPcie.MIRRORED for one in cells):
        return None
    has_gpus = any(run.head.system != "cpu-only" for one in used for run in one.runs)
    if choice is not None and objective is Objective.HOST_BANDWIDTH and choice not in cells:
        return None
    return "pin-numa-pci" if cells and has_gpus else None
