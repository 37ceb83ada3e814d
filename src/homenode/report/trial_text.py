"""TrialText: a trial before, while and after it runs: schedule, steps, what is left to undo."""

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from homenode.analyse.collective_causes import QUESTIONS, Diagnosis
from homenode.analyse.trial_conclusion import Conclusion
from homenode.measure.gpu.collectives import settings_of
from homenode.measure.layouts.fitting import Fitted
from homenode.measure.layouts.journal import Entry, Head, State, What
from homenode.measure.layouts.trial_config import TrialStep
from homenode.measure.model import Depth
from homenode.report.progress_text import duration_text
from homenode.report.terminal_text import AsciiWhereNeeded
from homenode.wording import command_line, plural, printable

_STYLES = {
    What.MEASURED: "green",
    What.INCOMPLETE: "yellow",
    What.MISMATCHED: "yellow",
    What.REFUSED: "red",
    What.FAILED: "red",
}
_WORDS = {
    What.MEASURED: "measured",
    What.INCOMPLETE: "not measured: tests failed",
    What.MISMATCHED: "not as planned, not measured",
    What.REFUSED: "refused",
    What.FAILED: "failed",
}
_LAST = 6


def schedule_text(
    head: Head, fitted: Sequence[Fitted], steps: Sequence[TrialStep], seconds: float
) -> RenderableType:
    """What would be booted, in which order, where, and how long that takes."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("layout", "vCPUs", "on nodes", "pinned to PUs", "fits"):
        table.add_column(heading, overflow="fold")
    for one in fitted:
        against = "; ".join(one.against) or "yes"
        if one.tuning is None:
            table.add_row(one.layout, "", "", "", Text(printable(against), style="red"))
            continue
        plan = one.tuning.plan
        pins = [pu for pins in plan.vcpu_pins for pu in pins]
        table.add_row(
            one.layout,
            str(plan.vcpus),
            ",".join(map(str, plan.nodes)),
            _pus(pins),
            Text(printable(against), style="red" if one.against else "green"),
        )
    what = "itself" if head.copy is None else f"by a copy, {head.domain}"
    order = ", ".join(f"{step.layout}" for step in steps)
    return AsciiWhereNeeded(
        Group(
            Text(printable(f"Trial {head.id} of {head.source} {what}"), style="bold"),
            table,
            Text(printable(f"order: {order}")),
            Text(f"{plural(len(steps), 'boot')}, about {duration_text(seconds)}"),
        )
    )


def experiment_text(layouts: Sequence[str], depth: Depth) -> RenderableType:
    """The experiment on collectives: what runs in each boot, and what each comparison decides."""
    settings = settings_of(depth)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("compared", "decides", "part of it"):
        table.add_column(heading, overflow="fold")
    for one in QUESTIONS:
        missing = dict.fromkeys(
            str(cell) if cell.layout in layouts else cell.layout
            for cell in (one.first, one.second)
            if cell.layout not in layouts or cell.settings not in settings
        )
        table.add_row(
            Text(printable(f"{one.second} against {one.first}")),
            Text(printable(one.decides)),
            Text(printable(f"no: {', '.join(missing)}" if missing else "yes")),
        )
    runs = "; ".join(one.name for one in settings)
    return AsciiWhereNeeded(
        Group(
            Text(printable(f"in each boot, {len(settings)} settings of NCCL: {runs}")),
            Text(
                "what a guest cannot run is left out by name; NCCL's log excludes what was not run"
            ),
            table,
        )
    )


def causes_text(found: Diagnosis) -> RenderableType:
    """What the experiment on collectives shows, and how each comparison came out."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("compared", "is", "ratio", "boots", "why not known"):
        table.add_column(heading, overflow="fold")
    for one in found.answers:
        table.add_row(
            Text(printable(f"{one.question.second} against {one.question.first}")),
            str(one.change),
            "" if one.ratio is None else f"{one.ratio:.2f}",
            str(one.boots),
            Text(printable(one.reason or "")),
        )
    how = "provisional, fewer than three boots" if found.provisional else "measured"
    lines = [found.because, *(f"also: {cause}: {because}" for cause, because in found.also)]
    lines += found.controls()
    lines += map(str, found.excluded)
    return AsciiWhereNeeded(
        Group(
            Text(printable(f"collectives: {found.cause} ({how})"), style="bold"),
            *(Text(printable(line)) for line in lines),
            table,
        )
    )


def status_text(
    head: Head,
    entries: Sequence[Entry],
    state: State,
    steps: Sequence[TrialStep],
    *,
    is_running: bool = False,
) -> RenderableType:
    """How far a trial is, the last things that it did, and what is left to undo.

    is_running: a homenode is at work on it now.
    """
    lines: list[RenderableType] = [
        Text(printable(f"Trial {head.id} of {head.source}"), style="bold"),
        outcomes_text(state, steps),
    ]
    for entry in entries[-_LAST:]:
        detail = f": {entry.detail}" if entry.detail else ""
        lines.append(Text(printable(f"{entry.at}  {_place(entry)}{entry.what}{detail}")))
    if is_running:
        lines.append(Text("running: a homenode is at work on it now", style="green"))
        return AsciiWhereNeeded(Group(*lines))
    if state.to_undo:
        left = [
            *([f"{head.domain} may have a layout's definition"] if state.applied else []),
            *(
                [f"its guest may be running (boot {state.running + 1})"]
                if state.running is not None
                else []
            ),
            *([f"the copy {head.domain} may be there"] if state.copied else []),
        ]
        lines.append(Text(printable(f"left to undo: {'; '.join(left)}"), style="yellow"))
        lines.append(
            Text(
                f"{command_line('homenode', 'trial', 'resume', head.id)} continues, "
                f"{command_line('homenode', 'trial', 'undo', head.id)} undoes it"
            )
        )
    elif state.measured < {step.number for step in steps}:
        left_over = len(steps) - len(state.measured)
        lines.append(
            Text(
                f"nothing left to undo; {plural(left_over, 'boot')} not measured: "
                + command_line("homenode", "trial", "resume", head.id)
            )
        )
    else:
        lines.append(Text("done; nothing left to undo"))
    return AsciiWhereNeeded(Group(*lines))


def outcomes_text(state: State, steps: Sequence[TrialStep]) -> RenderableType:
    """A line for each boot: what came of it."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("boot", "layout", "came to", "detail"):
        table.add_column(heading, overflow="fold")
    for step in steps:
        entry = state.outcomes.get(step.number)
        if entry is None:
            table.add_row(str(step.number + 1), step.layout, "to be done", "")
            continue
        detail = "; ".join(entry.findings) or entry.detail
        if entry.samples is not None:
            detail = f"{entry.samples} samples" + (f"; {detail}" if detail else "")
        table.add_row(
            str(step.number + 1),
            step.layout,
            Text(_WORDS[entry.what], style=_STYLES[entry.what]),
            Text(printable(detail)),
        )
    return AsciiWhereNeeded(table)


def advice_text(conclusion: Conclusion) -> RenderableType:
    """The commands that make the winners permanent, or why there are none."""
    if conclusion.emulated:
        return Text(
            "emulated: this guest ran without the processor's help. Its figures mean nothing, and "
            "no verdict is drawn.",
            style="yellow",
        )
    if not conclusion.advice and conclusion.causes is not None:
        return Text(
            "no layout to make permanent: the experiment on collectives says what costs, and "
            "chooses no layout. A trial without --tests measures for that"
        )
    if not conclusion.advice:
        return Text("no layout to make permanent: the figures cannot tell")
    by_command: dict[str, list[str]] = {}
    for one in conclusion.advice:
        by_command.setdefault(one.command, []).append(str(one.objective))
    lines = [Text("To make a layout permanent", style="bold")]
    for command, objectives in by_command.items():
        lines.append(Text(printable(f"  for {', '.join(objectives)}: {command}")))
    return AsciiWhereNeeded(Group(*lines))


def _place(entry: Entry) -> str:
    return "" if entry.number is None else f"boot {entry.number + 1}: "


def _pus(pus: Sequence[int]) -> str:
    from homenode.cpuset import CpuSet

    return str(CpuSet(pus)) if pus else "none"
