"""VerdictText: what to run, why, how sure that is, and what would make it surer."""

from collections.abc import Iterator, Sequence

from homenode.analyse.comparison import PRINTED, Doubt, EvidenceLevel
from homenode.analyse.statement import ground_of, memory_text, runs_as, sentence_of, source_sentence
from homenode.analyse.verdict import ReasonId, Verdict, Verdicts
from homenode.doc import Doc, Part, Section, Span, Text

SAID_BY_LEVEL = frozenset({PRINTED, "unusable"})
"""Doubts that the level of the evidence, or the answer itself, says already."""


def verdicts_text(verdicts: Verdicts, *, notes: bool = False) -> Doc:
    """One block per verdict. notes: also what is wrong with the figures that were published."""
    systems: dict[str, list[Verdict]] = {}
    for one in verdicts.verdicts:
        systems.setdefault(one.system, []).append(one)
    parts: list[Part] = [
        Section(system, tuple(_of_system(own, notes))) for system, own in systems.items()
    ]
    parts += [Text(f"skipped: {one}", "warn") for one in verdicts.skipped]
    if not verdicts.verdicts:
        parts.append(Text("no figures for any objective"))
    return Doc("", tuple(parts))


def layout_text(verdict: Verdict) -> Doc:
    """Why a plan has its layout, where the evidence chose it."""
    block = tuple(_block(verdict, str(verdict.objective), notes=False))
    return Doc("", (Text(""), Section("Why this layout", block)))


def _of_system(verdicts: Sequence[Verdict], notes: bool) -> Iterator[Text]:
    sick = [one for one in verdicts if one.why(ReasonId.HEALTH) is not None]
    for one in verdicts:
        if one not in sick:
            yield from _block(one, str(one.objective), notes)
        elif one is sick[0]:  # the same of every objective
            yield from _block(one, ", ".join(str(other.objective) for other in sick), notes)


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


def _block(verdict: Verdict, objective: str, notes: bool) -> Iterator[Text]:
    answer = Span(answer_of(verdict), "good" if verdict.choice else "warn")
    yield Text((Span(f"{objective}: ", "bold"), answer, f"  [{ground_of(verdict)}]"))
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
    yield from (Text(line, indent=2) for line in lines)
