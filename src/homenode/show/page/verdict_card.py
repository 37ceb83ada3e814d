"""VerdictCard: a machine's answers in a form that is read in seconds."""

from collections.abc import Sequence

from msgspec import Struct

from homenode.decide.comparison import EvidenceLevel
from homenode.decide.grade import Grade
from homenode.decide.recommendation import Recommendation, titles_of
from homenode.decide.sentences import (
    effect_text,
    ground_of,
    layout_named,
    sentence_of,
    stop_text,
)
from homenode.doc import Cell, Span, Table, Words
from homenode.machine.pci import DeviceKind
from homenode.measure.results.model import UNKNOWN_SWITCHES, Origin
from homenode.objective import Objective
from homenode.show.page.machine import ReportedMachine
from homenode.show.results_text import doubts_of

TONES = {
    Grade.GOOD: "good",
    Grade.DEPENDS: "good",
    Grade.REVIEW: "review",
    Grade.UNKNOWN: "unknown",
    Grade.NOT_READY: "stop",
}
"""Which look a grade has; its word says it too."""

GRADES = {
    Grade.GOOD: "one layout is best, or no worse, for every use that figures decide.",
    Grade.DEPENDS: "its uses want different layouts.",
    Grade.REVIEW: "check the pinning first.",
    Grade.NOT_READY: "repair what the finding says, then measure.",
    Grade.UNKNOWN: "no figure decides.",
}
"""What a grade means."""

SIGNS = {
    "measured": "\u25cf",
    "no-difference": "\u25cf",
    "provisional": "\u25d0",
    "rule": "\u25cb",
}
"""How sure, at a glance."""


class Answer(Struct, frozen=True, kw_only=True):
    """One objective. choice: what to run; "no answer" where nothing can be named. layout: of a VM,
    where the choice is none.

    applies: False where the machine has not the GPUs for it. effect: the figure with its multiple,
    in a few words. sure: the level of the evidence in a word. statement: the whole sentence.
    """

    objective: str
    choice: str
    has_choice: bool
    layout: str
    applies: bool
    effect: str
    sure: str
    statement: str
    evidence: str
    doubts: tuple[str, ...]


class VerdictCard(Struct, frozen=True, kw_only=True):
    """One machine. grade: the word; tone: its look; reason: in a sentence. stop: why no layout is
    named, in a few words.
    """

    name: str
    anchor: str
    about: str
    grade: str
    tone: str
    reason: str
    stop: str
    answers: tuple[Answer, ...]

    @property
    def is_stopped(self) -> bool:
        """No objective has an answer, all for the same reason."""
        telling = [one for one in self.answers if one.has_choice and one.sure != "rule"]
        is_blocked = self.tone == "stop" or not any(one.has_choice for one in self.answers)
        return bool(self.answers) and is_blocked and not telling


def verdict_card(machine: ReportedMachine, anchor: str) -> VerdictCard:
    """The card of a machine."""
    graded = machine.graded
    origins = {run.head.origin for run in machine.runs}
    evidence = ", ".join(sorted(origins - {Origin.MEASURED, Origin.PUBLISHED}))
    return VerdictCard(
        name=machine.name,
        anchor=anchor,
        about=machine_line(machine),
        grade=str(graded.grade),
        tone=TONES[graded.grade],
        reason=graded.reason,
        stop=_stop(machine) or graded.reason,
        answers=tuple(_answer(one, evidence, machine) for one in machine.recommendations),
    )


def decisions_table(cards: Sequence[VerdictCard]) -> Table:
    """A row for each machine, a column for each objective."""
    objectives = (
        Cell((str(one), Span(f"{one.use} ({titles_of(one)})", "dim small"))) for one in Objective
    )
    return Table(
        heads=(Cell(("machine",), "of-machine"), *objectives),
        rows=tuple(_decisions(card) for card in cards),
        name="Verdicts by machine and objective",
        look="decisions",
    )


def _decisions(card: VerdictCard) -> tuple[Cell, ...]:
    name = Span(card.name, "name", card.anchor)
    grade = Span(card.grade, f"grade {card.tone}")
    first = Cell(((name, " ", grade), Span(card.about, "dim small")))
    if card.is_stopped or not card.answers:
        stop: Words = Span(card.stop, "small")
        lines = (Span("repair first", "bold"), stop) if card.is_stopped else (stop,)
        return (first, Cell(lines, across=len(Objective)))
    answers = {one.objective: one for one in card.answers}
    return (first, *(_decision(answers.get(str(one))) for one in Objective))


def _decision(one: Answer | None) -> Cell:
    if one is not None and not one.applies:
        return Cell((Span("\u2013", "dim"),), "none")
    if one is None or not one.has_choice:
        return Cell((Span("no figures" if one is None else "cannot tell", "dim"),), "none")
    lines: list[Words] = [
        (Span(SIGNS.get(one.sure, SIGNS["rule"]), f"sure {one.sure}"), " ", _chip(one))
    ]
    if one.layout:
        lines.append(Span(one.layout, "small dim"))
    said = f"{one.sure}: " if one.effect else one.sure
    lines.append((Span(said, "small dim"), Span(one.effect, "small")))
    return Cell(tuple(lines), f"answer {one.sure}")


def _chip(one: Answer) -> Span:
    return Span(one.choice, "chip" if one.has_choice else "chip none")


def verdicts_table(card: VerdictCard) -> Table:
    """A row for each objective: what to run, why, how sure that is, and what is open."""
    rows = tuple(
        (
            one.objective,
            Cell((_chip(one), *((Span(one.layout, "dim small"),) if one.layout else ())), "run"),
            one.statement,
            one.evidence,
            "; ".join(one.doubts),
        )
        for one in card.answers
        if one.applies
    )
    return Table(
        heads=("objective", "run", "why", "evidence", "doubts, and what to measure next"),
        rows=rows,
        name=f"Verdicts of {card.name}",
        look="verdicts",
    )


def _stop(machine: ReportedMachine) -> str:
    """The first of the findings that stop every recommendation, and how many are like it; of logs
    that no one said a layout of, what to do."""
    heads = [run.head for run in machine.runs]
    if not machine.recommendations and all(
        one.switches == UNKNOWN_SWITCHES and one.arrangement == one.name for one in heads
    ):
        return (
            "the logs do not say under which layout each run was made: "
            "homenode import --layout RUN=LAYOUT adds it; the figures are below"
        )
    first = next((one.findings[0] for one in machine.recommendations if one.findings), None)
    if first is None:
        return ""
    fix = f". Fix: {first.fix}" if first.fix else "."
    return stop_text(machine.recommendations) + fix


def machine_line(machine: ReportedMachine) -> str:
    """What the machine is, as far as anybody said."""
    kinds = dict.fromkeys(run.head.host_kind for run in machine.runs if run.head.host_kind)
    named = dict.fromkeys(name for run in machine.runs for name in run.head.hardware)
    return "; ".join(kinds or named) or "the results do not name its processor and GPUs"


_LEAST_GPUS = {Objective.MULTI_GPU: 2, Objective.GPU_COPY: 1}


def _has_gpus(machine: ReportedMachine, objective: Objective) -> bool:
    """False where the machine is known to have fewer GPUs than the objective is about."""
    least = _LEAST_GPUS.get(objective, 0)
    if machine.host is None:
        return True
    cards = machine.host.devices_of_kind(DeviceKind.GPU)
    return sum(one.physical_function is None for one in cards) >= least


def _answer(one: Recommendation, origins: str, machine: ReportedMachine) -> Answer:
    said = [f"measure next: {one.measure_next}"] if one.measure_next is not None else []
    ground = ground_of(one)
    if origins and one.boots is not None:
        ground += f" ({origins})"
    return Answer(
        objective=str(one.objective),
        choice=layout_named(one) if one.choice else "no answer",
        has_choice=one.choice is not None,
        layout="",
        applies=one.level is not EvidenceLevel.RULE or _has_gpus(machine, one.objective),
        effect=effect_text(one),
        sure="" if one.level is None else str(one.level),
        statement=sentence_of(one),
        evidence=ground,
        doubts=tuple(dict.fromkeys((*said, *doubts_of(one, machine.doubts)))),
    )
