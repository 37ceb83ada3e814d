"""VerdictCard: a machine's answers in a form that is read in seconds."""

from collections.abc import Sequence
from dataclasses import dataclass

from homenode.analyse.grade import Grade
from homenode.analyse.standing import Position, Standing
from homenode.analyse.verdict import Rung, Verdict
from homenode.analyse.words import figure_text, percent_text, range_text
from homenode.metrics import METRICS
from homenode.report.page.machine import Machine
from homenode.results.model import Origin

RUNGS = {
    Rung.MEASURED_HERE: "measured",
    Rung.MEASURED_ON_KIND: "measured on this kind of host",
    Rung.PUBLISHED: "published, no interval",
    Rung.REASONED: "reasoned from topology",
}
TONES = {
    Grade.GOOD: "good",
    Grade.DEPENDS: "good",
    Grade.REVIEW: "review",
    Grade.UNKNOWN: "unknown",
    Grade.NOT_READY: "stop",
}
"""Which look a grade has; its word says it too."""

_TITLES = {
    "collective": "GPU collectives",
    "host-bandwidth": "memory bandwidth",
    "latency": "memory latency",
    "device-transfer": "host to GPU copies",
    "throughput": "CPU throughput",
    "density": "many small VMs",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """One objective. choice: what to run; "no answer" where nothing can be named."""

    objective: str
    title: str
    choice: str
    has_choice: bool
    figures: str
    evidence: str
    doubts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VerdictCard:
    """One machine. grade: the word; tone: its look; reason: in a sentence."""

    name: str
    anchor: str
    about: str
    grade: str
    tone: str
    reason: str
    answers: tuple[Answer, ...]


def verdict_card(machine: Machine, anchor: str) -> VerdictCard:
    """The card of a machine."""
    graded = machine.graded
    origins = {run.head.origin for run in machine.runs}
    evidence = ", ".join(sorted(origins - {Origin.MEASURED, Origin.PUBLISHED}))
    return VerdictCard(
        machine.name,
        anchor,
        machine_line(machine),
        str(graded.grade),
        TONES[graded.grade],
        graded.reason,
        tuple(_answer(one, evidence) for one in machine.verdicts),
    )


def machine_line(machine: Machine) -> str:
    """What the machine is, as far as anybody said."""
    if machine.published is not None:
        system = machine.published
        gpu = f"{system.gpus} x {system.gpu}" if system.gpu and system.gpus else system.gpu
        return ", ".join(filter(None, (gpu, system.cpu)))
    kinds = dict.fromkeys(run.head.host_kind for run in machine.runs if run.head.host_kind)
    return "; ".join(kinds) or "machine not described by its results"


def _answer(one: Verdict, origins: str) -> Answer:
    title = _TITLES.get(one.objective, one.objective)
    told = [d for d in one.doubts if d.id not in ("published-figures", "unusable")]
    doubts = [f"{doubt.detail}: {doubt.remedy}" for doubt in told]
    if one.measure_next is not None:
        doubts.insert(0, f"measure next: {one.measure_next}")
    return Answer(
        one.objective, title, one.choice or "no answer", one.choice is not None,
        _figures(one) if one.choice is not None else one.statement,
        origins or RUNGS[one.rung], tuple(dict.fromkeys(doubts)),
    )  # fmt: skip


def _figures(one: Verdict) -> str:
    """The choice's figures, and what the others would lose against it."""
    parts = []
    metrics = list(dict.fromkeys(standing.metric for standing in one.standings))
    for metric in metrics:
        standings = [standing for standing in one.standings if standing.metric == metric]
        own = next((s for s in standings if s.alternative == one.choice), None)
        if own is None:
            continue
        part = figure_text(own.value, own.unit)
        if len(metrics) > 1:
            part = f"{METRICS[metric].title} {part}"
        if own.slowest_device:
            part += ", slowest GPU"
        avoided = [s for s in standings if s.alternative in one.avoid]
        if avoided:
            if one.also:
                part += f"; no worse: {', '.join(one.also)}"
            told = [f"{s.alternative} {percent_text(s.value / own.value)}" for s in avoided]
            part += f"; avoid {', '.join(told)}"
        elif len(standings) > 1:
            part += f"; {_spread(standings, own)}"
        if untold := [s.alternative for s in standings if s.position is Position.UNTOLD]:
            part += f"; cannot tell of {', '.join(untold)}"
        parts.append(part)
    return "; ".join(parts)


def _spread(standings: Sequence[Standing], own: Standing) -> str:
    told = [one for one in standings if one.position is not Position.UNTOLD and one is not own]
    ratios = [one.value / own.value for one in told]
    if not ratios:
        return "no other to compare with"
    low, high = percent_text(min(ratios)), percent_text(max(ratios))
    others = low if low == high else range_text(min(ratios), max(ratios))
    shown = any(one.position is Position.UNSHOWN for one in standings)
    return f"others {others}: {'none shown to matter' if shown else 'none matters'}"
