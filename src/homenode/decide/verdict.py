"""Verdict: what to run for an objective on one machine, as far as one kind of evidence reaches."""

from collections.abc import Iterator, Sequence
from enum import StrEnum

from msgspec import Struct, structs
from msgspec.structs import replace

from homenode.decide.alternative import Alternative
from homenode.decide.comparison import Comparison, EvidenceLevel, once
from homenode.decide.doubts import doubts_of
from homenode.decide.ranking import Position, RankedResult, Ranking, ranking_for
from homenode.findings import Doubt, Finding
from homenode.measure.results.model import UNKNOWN_SWITCHES, Origin, Run, Switches
from homenode.metrics import METRICS, primaries
from homenode.objective import Objective
from homenode.units import format_bytes
from homenode.vm.layout import PRESETS, GuestCells, GuestPcie, MemoryBinding, Pinning, Siblings


class ReasonId(StrEnum):
    """Why a choice was made, or none was."""

    BEST = "best"  # the others are worse by as much as matters
    CONSERVATIVE = "conservative"  # of those that are no worse, the one that risks least
    LEAST_CHANGE = "least-change"  # none is worse: nothing needs to change
    DENSITY = "density"  # of those that are no worse, one that exposes siblings
    RULE = "rule"  # of the table of plan/auto
    NO_LAYOUT = "no-layout"  # the choice is no layout: the layout is reasoned
    BOUND = "bound"  # the guest is the choice's, and the layout binds its memory as well
    SIBLINGS = "siblings"  # what exposing them gained
    PIN_REGRESSION = "pin-regression"  # pinning lost throughput: the pins are wrong
    MAY_BE_BETTER = "may-be-better"  # by as much as matters, in figures that cannot tell
    UNDECIDED = "undecided"  # an alternative may be as good, or much worse
    HEALTH = "health"  # a critical finding about links or pins
    NOT_REAL = "not-real"  # emulated or synthesised figures
    UNUSABLE = "unusable"  # whoever measured marked the figures
    REFUSED = "refused"  # zeroes
    NO_FIGURES = "no-figures"  # of the objective, by layout
    ONE_ALTERNATIVE = "one-alternative"  # nothing to compare it with
    CANNOT_TELL = "cannot-tell"  # the doubts say why


STOPS = frozenset({ReasonId.HEALTH, ReasonId.NOT_REAL, ReasonId.UNUSABLE})
"""With these nothing is concluded from a machine's figures, whatever the objective."""


class Reason(Struct, frozen=True, kw_only=True):
    """alternative, metric, ratio: what it is about, None where it is about none. detail: in words,
    for people only."""

    id: ReasonId
    alternative: str | None = None
    metric: str | None = None
    ratio: float | None = None
    detail: str = ""


class Verdict(Struct, frozen=True, kw_only=True):
    """The answer for one objective on one machine.

    level: of the evidence; None where there is no answer. here: it is of this very machine; False:
    of others of its kind, or of none. choice: the alternative to run, None where none can be named.
    layout: the preset to run: the guest is the choice's, and memory is always bound; where the
    choice is no layout, the reasoned one; for Grace GPUs one that gives their memory its nodes.
    keep_vcpus: siblings take half the cores rather than double the vCPUs. floating: pins are worse,
    so the layout is default, with vCPUs that float over the nodes that memory is bound to. also:
    others that are no worse. avoid: those that are worse; of one in neither nothing is known.
    memory_mode, huge_pages: in words, None where nothing is known. results: by metric, best first.
    boots: fewest and most of an alternative, None for printed figures. findings: what stops any
    recommendation. measure_next: the layout that was not measured and that could change the answer.
    passed: what stronger evidence could not tell.
    """

    objective: Objective
    system: str
    level: EvidenceLevel | None = None
    here: bool = False
    choice: str | None = None
    layout: str | None = None
    keep_vcpus: bool = False
    floating: bool = False
    also: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()
    memory_mode: str | None = None
    huge_pages: str | None = None
    results: tuple[RankedResult, ...] = ()
    boots: tuple[int, int] | None = None
    reasons: tuple[Reason, ...] = ()
    findings: tuple[Finding, ...] = ()
    doubts: tuple[Doubt, ...] = ()
    measure_next: str | None = None
    passed: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    def why(self, id: ReasonId) -> Reason | None:
        """The reason of that id, or None."""
        return next((one for one in self.reasons if one.id is id), None)

    @property
    def words(self) -> tuple[str, ...]:
        """The options of a command that plans it; none where nothing is recommended."""
        if self.layout is None:
            return ()
        floating = ("--pinning", Pinning.NODE, "--memory-binding", MemoryBinding.BOUND)
        return (
            "--layout",
            self.layout,
            *(("--keep-vcpus",) if self.keep_vcpus else ()),
            *(map(str, floating) if self.floating else ()),
        )

    @property
    def stopped(self) -> bool:
        """Nothing may be concluded before something is repaired, or measured for real."""
        return any(one.id in STOPS for one in self.reasons)

    def on(self, metric: str) -> tuple[RankedResult, ...]:
        """Results on one metric, best first."""
        return tuple(one for one in self.results if one.metric == metric)


class DecidedComparison(Comparison, frozen=True, kw_only=True):
    """The `comparison` format with the answers. verdicts: one for each machine and objective."""

    verdicts: tuple[Verdict, ...]


CONSERVATIVE = (
    "pin-bound",
    "pin",
    "default",
    "pin-numa",
    "pin-numa-pci",
    "pin-numa-smt",
    "pin-numa-pci-smt",
)
"""Of equals, the first is named: pins and bound memory keep what was measured from changing with
the load, and whatever the guest is shown beyond that can mislead it. It is the study's advice."""


def verdict(system: str, every: Sequence[Alternative], objective: Objective) -> Verdict:
    """The verdict of one machine's runs alone; runs of several machines are not mixed here."""
    runs = [run for one in every for run in one.runs]
    candidates = [
        one for one in every if one.switches != UNKNOWN_SWITCHES or one.arrangement is not None
    ]
    ranking, used = ranking_for(candidates, objective)
    own = once(doubt for one in every for doubt in doubts_of(one))
    empty = Verdict(
        objective=objective,
        system=system,
        results=ranking.results,
        boots=_boots(used),
        sources=tuple(dict.fromkeys(run.head.source for run in runs if run.head.source)),
    )
    stops = tuple(_stops(runs))
    if stops:
        return replace(
            empty,
            reasons=stops,
            doubts=tuple(one for one in own if one.id in ("unusable", "no-real-machine")),
        )
    refused = [metric for metric in primaries(objective) if _is_refused(runs, metric.id)]
    of_objective = tuple(
        doubt for doubt in own if doubt.blocks or (doubt.id == "refused-figures" and refused)
    )
    doubts = once(
        doubt for doubt in (*ranking.doubts, *of_objective) if _fits(doubt, objective, used)
    )
    empty = replace(empty, doubts=doubts)
    if len(used) < 2:
        if refused and not used:
            reason = Reason(id=ReasonId.REFUSED, metric=refused[0].id)
        elif used:
            reason = Reason(id=ReasonId.ONE_ALTERNATIVE, alternative=used[0].label)
        else:
            reason = Reason(id=ReasonId.NO_FIGURES)
        return replace(empty, reasons=(reason,))
    acceptable = ranking.acceptable()
    if not acceptable:
        return replace(
            empty,
            reasons=(Reason(id=ReasonId.CANNOT_TELL),),
            measure_next=_unmeasured(used, None, objective),
        )
    return _decided(empty, ranking, used, acceptable)


def _stops(runs: Sequence[Run]) -> tuple[Reason, ...]:
    unreal = {run.head.origin for run in runs} & {Origin.EMULATED, Origin.SYNTHESISED}
    found = [Reason(id=ReasonId.NOT_REAL, detail=str(origin)) for origin in sorted(unreal)]
    stated = dict.fromkeys(text for run in runs for text in run.head.unusable)
    return (*found, *(Reason(id=ReasonId.UNUSABLE, detail=text) for text in stated))


def _is_refused(runs: Sequence[Run], metric: str) -> bool:
    """Whether every figure of a metric is one that no machine gives."""
    refused = any(one.metric == metric for run in runs for one in run.refused)
    return refused and not any(metric in run.metrics for run in runs)


def _boots(used: Sequence[Alternative]) -> tuple[int, int] | None:
    if not used or any(run.head.origin is Origin.PUBLISHED for one in used for run in one.runs):
        return None
    counts = [sum(len(run.boots) for run in one.runs) for one in used]
    return min(counts), max(counts)


def _decided(
    empty: Verdict, ranking: Ranking, used: tuple[Alternative, ...], acceptable: tuple[str, ...]
) -> Verdict:
    objective = empty.objective
    kept = [one for one in used if one.label in acceptable]
    undecided = ranking.undecided()
    avoid = tuple(one.label for one in used if one.label not in (*acceptable, *undecided))
    none_worse = not avoid and ranking.level() is EvidenceLevel.MEASURED
    order = _SIMPLEST if none_worse else CONSERVATIVE
    choice = min(kept, key=lambda one: (*_rank(one, objective, order), acceptable.index(one.label)))
    if len(kept) == 1:
        why = ReasonId.BEST
    elif objective is Objective.DENSITY and choice.switches.siblings is Siblings.EXPOSED:
        why = ReasonId.DENSITY
    else:
        why = ReasonId.LEAST_CHANGE if none_worse else ReasonId.CONSERVATIVE
    doubts, reasons = _pin_regression(ranking, used)
    return replace(
        empty,
        level=ranking.level(),
        choice=choice.label,
        layout=preset_of(choice.switches),
        floating=_pins_are_worse(choice, used, acceptable),
        also=tuple(label for label in acceptable if label != choice.label),
        avoid=avoid,
        memory_mode=_memory_mode(choice),
        huge_pages=None if choice.page_bytes is None else format_bytes(choice.page_bytes),
        reasons=(
            Reason(id=why, alternative=choice.label),
            *_may_be_better(ranking, choice.label),
            *(Reason(id=ReasonId.UNDECIDED, alternative=label) for label in undecided),
            *_siblings(ranking, used, choice),
            *reasons,
        ),
        doubts=(*empty.doubts, *doubts),
        measure_next=_unmeasured(used, choice, objective),
    )


def _pins_are_worse(
    choice: Alternative, used: Sequence[Alternative], acceptable: Sequence[str]
) -> bool:
    """Whether the choice is `default`, and pins of a flat guest were compared and not accepted."""
    if preset_of(choice.switches) != "default":
        return False
    pinned = [
        one.label in acceptable
        for one in used
        if one.switches.pinning is Pinning.ONE_PER_CORE and one.switches.cells is GuestCells.SINGLE
    ]
    return bool(pinned) and not any(pinned)


def with_memory_bound(found: Verdict) -> Verdict:
    """The verdict with a layout that binds memory: the guest does not see it, so that what was
    measured of the guest holds, and the evidence stays that of the choice."""
    if found.layout is None:
        return found
    if PRESETS[found.layout].memory is not MemoryBinding.KEEP:
        return replace(found, memory_mode=found.memory_mode or memory_mode_of(found.layout))
    layout = found.layout if found.floating else "pin-bound"
    return replace(
        found,
        layout=layout,
        memory_mode=_binding(MemoryBinding.BOUND, "strict"),
        reasons=(*found.reasons, Reason(id=ReasonId.BOUND, alternative=found.layout)),
    )


def _may_be_better(ranking: Ranking, choice: str) -> Iterator[Reason]:
    """An alternative that is ahead of the choice by as much as matters, though that is unknown."""
    for metric in dict.fromkeys(one.metric for one in ranking.results):
        best, *others = ranking.on(metric)
        own = next((one for one in others if one.alternative == choice), None)
        if own is None or own.position is not Position.UNSHOWN:
            continue
        loss = 1 - min(own.ratio, 1 / own.ratio)
        if loss >= METRICS[metric].matters:
            ratio = best.value / own.value
            yield Reason(
                id=ReasonId.MAY_BE_BETTER, alternative=best.alternative, metric=metric, ratio=ratio
            )


def _fits(doubt: Doubt, objective: Objective, used: Sequence[Alternative]) -> bool:
    """GPUs without a node are a doubt where GPUs talk, and no one has tried to give them one."""
    if doubt.id != "gpus-without-node":
        return True
    tried = any(one.switches.pcie is GuestPcie.HOST for one in used)
    return not tried and objective in (Objective.MULTI_GPU, Objective.GPU_COPY)


def _rank(one: Alternative, objective: Objective, order: Sequence[str]) -> tuple[bool, int]:
    """Density wants siblings; apart from that, the order of presets."""
    packed = objective is Objective.DENSITY and one.switches.siblings is not Siblings.EXPOSED
    preset = preset_of(one.switches)
    place = order.index(preset) if preset in order else len(order)
    return packed, place


_SIMPLEST = ("default", "pin", "pin-bound", *CONSERVATIVE[3:])
"""From what changes nothing to what changes most."""


def preset_of(switches: Switches) -> str | None:
    """The simplest preset that agrees with every switch that is known; None where none is."""
    if switches == UNKNOWN_SWITCHES:
        return None
    for name in _SIMPLEST:
        preset = structs.astuple(Switches.of(PRESETS[name]))
        pairs = zip(structs.astuple(switches), preset, strict=True)
        if all(known is None or known is value for known, value in pairs):
            return name
    return None


def _memory_mode(choice: Alternative) -> str | None:
    if choice.switches.memory is not None:
        return _binding(choice.switches.memory, choice.memory_mode or "strict")
    preset = preset_of(choice.switches)
    return None if preset is None else memory_mode_of(preset)


def memory_mode_of(preset: str) -> str:
    """Where a preset binds memory."""
    return _binding(PRESETS[preset].memory, "strict")


def _binding(memory: MemoryBinding, mode: str) -> str:
    match memory:
        case MemoryBinding.BOUND_PER_CELL:
            return f"{mode}, per cell"
        case MemoryBinding.BOUND:
            return f"{mode}, on the chosen nodes"
        case MemoryBinding.KEEP:
            return "as the document has it"


def _siblings(
    ranking: Ranking, used: Sequence[Alternative], choice: Alternative
) -> tuple[Reason, ...]:
    """What exposing siblings gained, where that is the question."""
    exposed = {one.label for one in used if one.switches.siblings is Siblings.EXPOSED}
    hidden = {one.label for one in used if one.switches.siblings is Siblings.HIDDEN}
    results = ranking.on("cpu-throughput")
    with_siblings = [one for one in results if one.alternative in exposed]
    without = [one for one in results if one.alternative in hidden]
    if not (with_siblings and without):
        return ()
    gain = with_siblings[0].value / without[0].value
    label = with_siblings[0].alternative
    return (Reason(id=ReasonId.SIBLINGS, alternative=label, metric="cpu-throughput", ratio=gain),)


def _pin_regression(
    ranking: Ranking, used: Sequence[Alternative]
) -> tuple[tuple[Doubt, ...], tuple[Reason, ...]]:
    """Pinning that costs processor throughput is a wrong pin, not a property of pinning."""
    pinned = {one.label for one in used if one.switches.pinning is Pinning.ONE_PER_CORE}
    free = {one.label for one in used if one.switches.pinning is Pinning.NONE}
    results = ranking.on("cpu-throughput")
    if not results or results[0].alternative not in free:
        return (), ()
    lost = [one for one in results if one.alternative in pinned and one.position is Position.WORSE]
    doubts = tuple(
        Doubt(
            id="pin-regression",
            subject=one.alternative,
            detail=f"{one.ratio:.2f} x the unpinned guest's throughput",
            blocks=False,
            cause="pins on slower cores, on siblings of one core, or on PUs that QEMU's own "
            "threads use; "
            "or fewer vCPUs",
            remedy="check the pinning: homenode doctor VM.xml, or let homenode plan choose them",
        )
        for one in lost
    )
    reasons = tuple(
        Reason(
            id=ReasonId.PIN_REGRESSION,
            alternative=one.alternative,
            metric=one.metric,
            ratio=one.ratio,
        )
        for one in lost
    )
    return doubts, reasons


def _unmeasured(
    used: Sequence[Alternative], choice: Alternative | None, objective: Objective
) -> str | None:
    """The layout that could change the answer: GPUs on their cells, where only cells were tried."""
    if objective not in (
        Objective.MULTI_GPU,
        Objective.GPU_COPY,
        Objective.MEMORY_BANDWIDTH,
    ):
        return None
    cells = [one for one in used if one.switches.cells is GuestCells.HOST]
    if any(one.switches.pcie is GuestPcie.HOST for one in cells):
        return None
    has_gpus = any(run.head.system != "cpu-only" for one in used for run in one.runs)
    if choice is not None and objective is Objective.MEMORY_BANDWIDTH and choice not in cells:
        return None
    return "pin-numa-pci" if cells and has_gpus else None


def titles_of(objective: Objective) -> str:
    """The metrics that decide for an objective, in words."""
    return " or ".join(METRICS[one.id].title for one in primaries(objective))
