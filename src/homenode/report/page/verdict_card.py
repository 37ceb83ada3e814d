"""VerdictCard: a machine's answers in a form that is read in seconds."""

from dataclasses import dataclass

from homenode.analyse.grade import Grade
from homenode.analyse.statement import ground_of, sentence_of, source_sentence
from homenode.analyse.verdict import Verdict
from homenode.report.page.machine import Machine
from homenode.report.verdict_text import answer_of, doubts_of
from homenode.results.model import Origin

TONES = {
    Grade.GOOD: "good",
    Grade.DEPENDS: "good",
    Grade.REVIEW: "review",
    Grade.UNKNOWN: "unknown",
    Grade.NOT_REAL: "unknown",
    Grade.NOT_READY: "stop",
}
"""Which look a grade has; its word says it too."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One objective. choice: what to run; "no answer" where nothing can be named."""

    objective: str
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
    said = [source_sentence(source, one) for source in one.published]
    if one.measure_next is not None:
        said.append(f"measure next: {one.measure_next}")
    ground = ground_of(one)
    if origins and one.boots is not None:
        ground += f" ({origins})"
    return Answer(
        str(one.objective),
        answer_of(one),
        one.choice is not None,
        sentence_of(one),
        ground,
        tuple(dict.fromkeys((*said, *doubts_of(one)))),
    )
