"""VerdictText: what to run, why, how sure that is, and what would make it surer."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from homenode.analyse.verdict import Rung, Verdict, Verdicts
from homenode.report.terminal_text import AsciiWhereNeeded
from homenode.wording import printable

_RUNGS = {
    Rung.MEASURED_HERE: "measured here",
    Rung.MEASURED_ON_KIND: "measured on this kind of host",
    Rung.PUBLISHED: "published, no interval",
    Rung.REASONED: "reasoned from topology and others' figures",
}


def verdicts_text(verdicts: Verdicts, *, notes: bool = False) -> RenderableType:
    """One block per verdict. notes: also what is wrong with the figures that were published."""
    parts: list[RenderableType] = []
    system = None
    for one in verdicts.verdicts:
        if one.system != system:
            system = one.system
            parts += [Text(""), Text(printable(system), style="bold underline")]
        parts += _block(one, notes)
    parts += [Text(printable(f"skipped: {one}"), style="yellow") for one in verdicts.skipped]
    if not verdicts.verdicts:
        parts.append(Text("no figures for any objective"))
    return AsciiWhereNeeded(Group(*parts))


def _block(verdict: Verdict, notes: bool) -> Sequence[RenderableType]:
    answer = verdict.choice or "no answer"
    if verdict.layout is not None and verdict.layout != verdict.choice:
        answer += f" (layout {verdict.layout})"
    head = Text.assemble(
        (f"{verdict.objective}: ", "bold"),
        (printable(answer), "green" if verdict.choice else "yellow"),
        f"  [{_RUNGS[verdict.rung]}]",
    )
    lines = [verdict.statement]
    if verdict.choice is not None:
        lines.append(f"memory: {verdict.memory_mode}; huge pages: {verdict.huge_pages}")
    # That published figures come one each is said by the rung already.
    told = [one for one in verdict.doubts if one.id not in ("published-figures", "unusable")]
    for one in told:
        lines.append(f"doubt: {one.detail}; {one.remedy}")
        lines.append(f"  likely cause: {one.cause}")
    if verdict.measure_next is not None:
        lines.append(f"measure next: {verdict.measure_next}")
    lines += verdict.advice
    if notes:
        lines += verdict.notes
        lines += [f"source: {one}" for one in verdict.sources]
    return [
        head,
        *(Padding(Text(printable(line)), (0, 0, 0, 2), expand=False) for line in lines),
    ]
