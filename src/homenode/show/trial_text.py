"""TrialText: how far an experiment is, and a trial before, while and after it runs."""

from collections.abc import Iterable, Iterator, Sequence

from homenode.decide.trial_conclusion import Conclusion
from homenode.doc import Cell, Doc, Part, Span, Table, Text
from homenode.measure.layouts.fitting import Fitted
from homenode.measure.layouts.journal import BOOT, COPY, LAYOUT, Head, Known, State, What
from homenode.measure.progress import Progress, TaskState, TaskStatus
from homenode.measure.schedule import ScheduledTask
from homenode.wording import command_line, number_list, plural, printable

_MOST_SHOWN = 30
_MOST_NAMED = 8
_ORDER = (
    TaskState.FAILED,
    TaskState.INCOMPLETE,
    TaskState.MISMATCHED,
    TaskState.REFUSED,
    TaskState.LOST,
    TaskState.CANCELLED,
    TaskState.RUNNING,
    TaskState.PENDING,
    TaskState.WAITING,
    TaskState.DONE,
)
_LOOKS = {
    TaskState.DONE: "good",
    TaskState.RUNNING: "hint",
    TaskState.PENDING: "",
    TaskState.WAITING: "dim",
}


def duration_text(seconds: float) -> str:
    """About how long.

    >>> duration_text(45), duration_text(600), duration_text(7800)
    ('45 s', '10 min', '2 h 10 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def progress_line(progress: Progress, what: str = "jobs") -> str:
    """How many are done, what runs now or why nothing does, and how long the rest takes.

    >>> one = TaskStatus("0", 0, TaskState.DONE)
    >>> progress_line(Progress((one,), "stream", 130.0), "steps")
    '1 of 1 steps done: stream, 2 min left'
    """
    done = progress.count(TaskState.DONE)
    others = [one for one in TaskState if one not in (TaskState.DONE, TaskState.WAITING)]
    counts = [f"{progress.count(state)} {state}" for state in others if progress.count(state)]
    waits = dict.fromkeys(
        printable(task.reason)
        for task in progress.tasks
        if task.state is TaskState.PENDING and task.reason
    )
    line = ", ".join((f"{done} of {progress.total} {what} done", *counts))
    if waits:
        line += f" (waiting for: {'; '.join(sorted(waits))})"
    if progress.now:
        line += f": {printable(progress.now)}"
    if progress.seconds_left:
        line += f", {duration_text(progress.seconds_left)} left"
    if progress.silent_s > 0:
        line += "; the controller does not answer"
    return line


def progress_view(progress: Progress, what: str = "jobs") -> Doc:
    """The line; where several tasks run at once, above it one for each, with its state, job and
    reason. Of many, what needs a look comes first, and what is done is only counted."""
    line = Text(progress_line(progress, what), "bold")
    if progress.now:
        return Doc("", (line,))
    shown = progress.tasks
    if len(shown) > _MOST_SHOWN:
        shown = tuple(sorted(shown, key=lambda task: _ORDER.index(task.state)))[:_MOST_SHOWN]
    rows = tuple(
        (
            task.job or "",
            task.name,
            Cell((str(task.state),), _LOOKS.get(task.state, "bad")),
            task.reason,
        )
        for task in shown
    )
    left_out = len(progress.tasks) - len(shown)
    more = (Text(f"{left_out} more"),) if left_out else ()
    heads = ("job", "experiment", "state", "why")
    table = Table(heads=heads, rows=rows, folds=("experiment", "why"))
    return Doc("", (table, *more, line))


def missing_lines(missing: Iterable[TaskStatus]) -> Iterator[str]:
    """Tasks without results by state and reason, a line for each.

    >>> from msgspec.structs import replace
    >>> one = TaskStatus("look-n1", 0, TaskState.PENDING, "7", "Priority")
    >>> list(missing_lines([one, replace(one, id="look-n2", job="8")]))
    ['2 pending: Priority: look-n1 (job 7), look-n2 (job 8)']
    """
    groups: dict[tuple[TaskState, str], list[TaskStatus]] = {}
    for task in missing:
        groups.setdefault((task.state, task.reason), []).append(task)
    for (state, reason), tasks in groups.items():
        names = [task.name + (f" (job {task.job})" if task.job else "") for task in tasks]
        shown = ", ".join(names[:_MOST_NAMED])
        if len(names) > _MOST_NAMED:
            shown += f" and {len(names) - _MOST_NAMED} more"
        why = f": {printable(reason)}" if reason else ""
        yield f"{len(tasks)} {state}{why}: {shown}"


_OUTCOMES = {
    What.MEASURED: Span("measured", "good"),
    What.INCOMPLETE: Span("not measured: tests failed", "warn"),
    What.MISMATCHED: Span("not as planned, not measured", "warn"),
    What.REFUSED: Span("refused", "bad"),
    What.FAILED: Span("failed", "bad"),
}
_LAST = 6


def schedule_text(
    head: Head, fitted: Sequence[Fitted], steps: Sequence[ScheduledTask], seconds: float
) -> Doc:
    """What would be booted, in which order, where, and how long that takes."""
    heads = ("layout", "vCPUs", "on nodes", "pinned to PUs", "fits")
    rows: list[tuple[str | Cell, ...]] = []
    for one in fitted:
        fits = Cell(("; ".join(one.against) or "yes",), "bad" if one.against else "good")
        if one.tuning is None:
            rows.append((one.layout, "", "", "", fits))
            continue
        plan = one.tuning.plan
        pins = number_list(pu for pins in plan.vcpu_pins for pu in pins) or "none"
        nodes = ",".join(map(str, plan.nodes))
        rows.append((one.layout, str(plan.vm.vcpus), nodes, pins, fits))
    what = "itself" if head.copy is None else f"by a copy, {head.domain}"
    order = ", ".join(step.variant for step in steps)
    each = f"{plural(len(steps), 'boot')}, about {duration_text(seconds)}"
    lines: tuple[str, ...] = (f"order: {order}", each)
    if head.sequence is not None:
        until = "" if head.within_s is None else f" or {duration_text(head.within_s)}"
        lines = (
            f"first round: {order}: {each}",
            f"then rounds of what is still in question for {head.objective}, until it is decided: "
            f"wrong by chance in at most {100 * head.sequence.error:.2g} % of trials; at most "
            f"{plural(head.sequence.rounds, 'round')}{until}",
        )
    return Doc(
        f"Trial {head.id} of {head.source} {what}",
        (Table(heads=heads, rows=tuple(rows), folds=heads[-2:]), *map(Text, lines)),
    )


def status_text(known: Known, steps: Sequence[ScheduledTask], *, is_running: bool = False) -> Doc:
    """How far a trial is, the last things that it did, and what is left to undo.

    is_running: a homenode is at work on it now.
    """
    head, state = known.head, known.state
    assert head is not None, "what cannot be read has no status"
    lines: list[Part] = [_outcomes(state, steps)]
    for entry in known.entries[-_LAST:]:
        detail = f": {entry.detail}" if entry.detail else ""
        place = "" if entry.number is None else f"boot {entry.number + 1}: "
        lines.append(Text(f"{entry.at}  {place}{entry.what}{detail}"))
    if is_running:
        lines.append(Text("running: a homenode is at work on it now", "good"))
    else:
        lines += _left(head, state, steps)
    return Doc(f"Trial {head.id} of {head.source}", tuple(lines))


def _left(head: Head, state: State, steps: Sequence[ScheduledTask]) -> Iterator[Text]:
    """What is left to undo or to measure, and the commands for it."""
    resume, undo = (command_line("homenode", "trial", what, head.id) for what in ("resume", "undo"))
    if state.to_undo:
        said = {
            LAYOUT: f"{head.domain} may have a layout's definition",
            BOOT: f"its guest may be running (boot {(state.running or 0) + 1})",
            COPY: f"the copy {head.domain} may be there",
        }
        left = [said[change.kind] for change in state.changes]
        yield Text(f"left to undo: {'; '.join(left)}", "warn")
        yield Text(f"{resume} continues, {undo} undoes it")
    elif head.sequence is not None and state.looks and state.looks[-1].ended is not None:
        last = state.looks[-1]
        kept = ", ".join(last.kept)
        yield Text(
            f"nothing left to undo; {last.ended} after {plural(last.rounds, 'round')}: {kept}"
        )
    elif state.measured < {step.number for step in steps}:
        boots = plural(len(steps) - len(state.measured), "boot")
        yield Text(f"nothing left to undo; {boots} not measured: {resume}")
    else:
        yield Text("done; nothing left to undo")


def outcomes_text(state: State, steps: Sequence[ScheduledTask]) -> Doc:
    """A line for each boot: what came of it."""
    return Doc("", (_outcomes(state, steps),))


def _outcomes(state: State, steps: Sequence[ScheduledTask]) -> Table:
    heads = ("boot", "layout", "came to", "detail")
    rows: list[tuple[str | Cell, ...]] = []
    for step in steps:
        boot, entry = str(step.number + 1), state.outcomes.get(step.number)
        if entry is None:
            rows.append((boot, step.variant, "to be done", ""))
            continue
        detail = "; ".join(entry.findings) or entry.detail
        if entry.samples is not None:
            detail = f"{entry.samples} samples" + (f"; {detail}" if detail else "")
        rows.append((boot, step.variant, Cell((_OUTCOMES[What(entry.what)],)), detail))
    return Table(heads=heads, rows=tuple(rows), folds=heads[-1:])


def advice_text(conclusion: Conclusion) -> Doc:
    """The commands that make the winners permanent, or why there are none."""
    if conclusion.emulated:
        said = (
            "emulated: this guest ran without the processor's help. Its figures mean nothing, and "
            "no verdict is drawn."
        )
        return Doc("", (Text(said, "warn"),))
    if not conclusion.advice:
        return Doc("", (Text("no layout to make permanent: the figures cannot tell"),))
    by_command: dict[str, list[str]] = {}
    for one in conclusion.advice:
        by_command.setdefault(one.command, []).append(str(one.objective))
    # Not indented by a part: it is printed without breaks, to be copied.
    lines = (f"  for {', '.join(those)}: {command}" for command, those in by_command.items())
    return Doc("To make a layout permanent", tuple(map(Text, lines)))
