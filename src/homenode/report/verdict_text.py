"""VerdictText: what to run, why, how sure that is, and what would make it surer."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from homenode.analyse.comparison import PRINTED, Doubt, EvidenceLevel
from homenode.analyse.statement import ground_of, memory_text, runs_as, sentence_of, source_sentence
from homenode.analyse.verdict import ReasonId, Verdict, Verdicts
from homenode.report.terminal_text import AsciiWhereNeeded
from homenode.wording import printable

SAID_BY_LEVEL = frozenset({PRINTED, "unusable"})
"""Doubts that the level of the evidence, or the answer itself, says already."""


def verdicts_text(verdicts: Verdicts, *, notes: bool = False) -> RenderableType:
    """One block per verdict. notes: also what is wrong with the figures that were published."""
    parts: list[RenderableType] = []
    system = None
    sick: set[str] = set()
    for one in verdicts.verdicts:
        if one.system != system:
            system = one.system
            parts += [Text(""), Text(printable(system), style="bold underline")]
        if one.why(ReasonId.HEALTH) is None:
            parts += _block(one, str(one.objective), notes)
        elif one.system not in sick:  # the same of every objective
            sick.add(one.system)
            those = (
                other.objective
                for other in verdicts.verdicts
                if other.system == one.system and other.why(ReasonId.HEALTH) is not None
            )
            parts += _block(one, ", ".join(those), notes)
    parts += [Text(printable(f"skipped: {one}"), style="yellow") for one in verdicts.skipped]
    if not verdicts.verdicts:
        parts.append(Text("no figures for any objective"))
    return AsciiWhereNeeded(Group(*parts))


def layout_text(verdict: Verdict) -> RenderableType:
    """Why a plan has its layout, where the evidence chose it."""
    title = Text("Why this layout", style="bold underline")
    block = _block(verdict, str(verdict.objective), notes=False)
    return AsciiWhereNeeded(Group(Text(""), title, *block))


def answer_of(verdict: Verdict) -> str:
    """What to run: the choice, and the layout where that is not its name."""
    layout = runs_as(verdict)
    return f"{verdict.choice or 'no answer'}{f' ({layout})' if layout else ''}"


def doubts_of(verdict: Verdict, listed: Sequence[Doubt] = ()) -> tuple[str, ...]:
    """The doubts that its level does not say already, with remedies. listed: elsewhere, in full."""
    stated = [one for one in verdict.doubts if one.id not in SAID_BY_LEVEL]
    known = {one.id for one in listed}
    return tuple(
        f"{one.id}: {one.detail}"
        if one.id in known
        else f"{one.detail}; {one.remedy}; likely cause: {one.cause}"
        for one in stated
    )


def _block(verdict: Verdict, objective: str, notes: bool) -> Sequence[RenderableType]:
    head = Text.assemble(
        (f"{objective}: ", "bold"),
        (printable(answer_of(verdict)), "green" if verdict.choice else "yellow"),
        f"  [{ground_of(verdict)}]",
    )
    lines = [sentence_of(verdict)]
    if verdict.choice is not None:
        pages = verdict.huge_pages or "not known"
        lines.append(f"memory: {memory_text(verdict)}; huge pages: {pages}")
    if verdict.level is EvidenceLevel.PROVISIONAL:
        lines.append("to be sure: boot each layout five times, in mixed order (homenode trial)")
    lines += [f"doubt: {one}" for one in doubts_of(verdict)]
    lines += [source_sentence(one, verdict) for one in verdict.published]
    if verdict.measure_next is not None:
        lines.append(f"measure next: {verdict.measure_next}")
    lines += [
        f"{EvidenceLevel.REASONED}: {one.detail}"
        for one in verdict.reasons
        if one.id is ReasonId.COMPUTED
    ]
    lines += [f"stronger evidence that cannot tell: {one}" for one in verdict.passed]
    if notes:
        lines += [f'{one.publication}: "{one.quote}"' for one in verdict.published]
        lines += verdict.notes
        lines += [f"source: {one}" for one in verdict.sources]
    return [
        head,
        *(Padding(Text(printable(line)), (0, 0, 0, 2), expand=False) for line in lines),
    ]
