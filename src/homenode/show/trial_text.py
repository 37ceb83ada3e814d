"""TrialText: the progress of an experiment, and the screens of a trial."""

from collections.abc import Iterable, Iterator, Sequence

from homenode.doc import Cell, Doc, Span, Table, Text
from homenode.findings import Finding
from homenode.measure.experiment import Progress, ScheduledTask, TaskState, TaskStatus
from homenode.measure.trial.journal import (
    BOOT,
    COPY,
    LAYOUT,
    EntryKind,
    StoredTrial,
    TrialState,
)
from homenode.measure.trial.prepare import Preflight
from homenode.text import command_line, format_duration, number_list, plural, printable

_MAX_SHOWN = 30
_MAX_NAMED = 8
_ORDER = (
    TaskState.FAILED,
    TaskState.INCOMPLETE,
    TaskState.MISMATCHED,
    TaskState.REJECTED,
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


def format_progress(progress: Progress, noun: str = "jobs") -> str:
    """Return one line: tasks done, the running task or the obstacle, and the time left.

    >>> one = TaskStatus("0", 0, TaskState.DONE)
    >>> format_progress(Progress((one,), "stream", 130.0), "steps")
    '1 of 1 steps done: stream, 2 min left'
    """
    done_count = progress.count(TaskState.DONE)
    states = [s for s in TaskState if s not in (TaskState.DONE, TaskState.WAITING)]
    counts = [f"{progress.count(state)} {state}" for state in states if progress.count(state)]
    waits = dict.fromkeys(
        printable(task.reason)
        for task in progress.tasks
        if task.state is TaskState.PENDING and task.reason
    )
    line = ", ".join((f"{done_count} of {progress.total} {noun} done", *counts))
    if waits:
        line += f" (waiting for: {'; '.join(sorted(waits))})"
    if progress.now:
        line += f": {printable(progress.now)}"
    if progress.seconds_left:
        line += f", {format_duration(progress.seconds_left)} left"
    if progress.silent_s > 0:
        line += "; the controller does not answer"
    return line


def build_progress_view(progress: Progress, noun: str = "jobs") -> Doc:
    """Return the progress line; if several tasks run at once, after a line for each with state, job
    and reason. If many, tasks with problems come first, and finished tasks are only counted."""
    line = Text(format_progress(progress, noun), "bold")
    if progress.now:
        return Doc("", (line,))
    tasks = progress.tasks
    if len(tasks) > _MAX_SHOWN:
        tasks = tuple(sorted(tasks, key=lambda task: _ORDER.index(task.state)))[:_MAX_SHOWN]
    rows = tuple(
        (
            task.job or "",
            task.name,
            Cell((str(task.state),), _LOOKS.get(task.state, "bad")),
            task.reason,
        )
        for task in tasks
    )
    omitted_count = len(progress.tasks) - len(tasks)
    more_lines = (Text(f"{omitted_count} more"),) if omitted_count else ()
    heads = ("job", "experiment", "state", "why")
    table = Table(heads=heads, rows=rows, folds=("experiment", "why"))
    return Doc("", (table, *more_lines, line))


def format_missing(missing: Iterable[TaskStatus]) -> Iterator[str]:
    """List tasks without results by state and reason, a line for each.

    >>> from msgspec.structs import replace
    >>> one = TaskStatus("look-n1", 0, TaskState.PENDING, "7", "Priority")
    >>> list(format_missing([one, replace(one, id="look-n2", job="8")]))
    ['2 pending: Priority: look-n1 (job 7), look-n2 (job 8)']
    """
    groups: dict[tuple[TaskState, str], list[TaskStatus]] = {}
    for task in missing:
        groups.setdefault((task.state, task.reason), []).append(task)
    for (state, reason), tasks in groups.items():
        names = [task.name + (f" (job {task.job})" if task.job else "") for task in tasks]
        shown_names = ", ".join(names[:_MAX_NAMED])
        if len(names) > _MAX_NAMED:
            shown_names += f" and {len(names) - _MAX_NAMED} more"
        reason_text = f": {printable(reason)}" if reason else ""
        yield f"{len(tasks)} {state}{reason_text}: {shown_names}"


_OUTCOMES = {
    EntryKind.MEASURED: Span("measured", "good"),
    EntryKind.INCOMPLETE: Span("not measured: tests failed", "warn"),
    EntryKind.MISMATCHED: Span("not as planned, not measured", "warn"),
    EntryKind.REJECTED: Span("rejected", "bad"),
    EntryKind.FAILED: Span("failed", "bad"),
}


def boot_line(boots: Progress, steps: Progress | None = None, waiting: str = "") -> str:
    """Return a trial's progress: its boot, the test, and the time left, or the awaited event.

    >>> boot, step = TaskStatus("0", 0, TaskState.WAITING), TaskStatus("0", 0, TaskState.DONE)
    >>> boot_line(Progress((boot,), "pin", 130.0), Progress((step, boot), "stream"))
    'boot 1 of 1: pin, stream, step 2 of 2; 2 min left'
    """
    number = min(boots.ended_count + 1, boots.total)
    words = [f"boot {number} of {boots.total}: {printable(boots.now) or 'done'}"]
    if steps is not None and steps.now:
        words += [printable(steps.now), f"step {steps.ended_count + 1} of {steps.total}"]
    if waiting:
        return ", ".join((*words, waiting))
    remaining = f"; {format_duration(boots.seconds_left)} left" if boots.seconds_left else ""
    return ", ".join(words) + remaining


def schedule_text(
    preflight: Preflight,
    steps: Sequence[ScheduledTask],
    seconds: float | None,
    findings: Sequence[Finding],
) -> Doc:
    """Return the planned boots: place, order and duration, and the faults found before."""
    head, fitted = preflight.head, preflight.fitted
    subject = "the VM itself" if head.copy is None else "a copy"
    about = "" if seconds is None else f", about {format_duration(seconds)}"
    fits = f"{sum(not layout.against for layout in fitted)} of {plural(len(fitted), 'layout')}"
    title = f"{head.source} fits in {fits}: {plural(len(steps), 'boot')} of {subject}{about}"
    rows: list[tuple[str | Cell, ...]] = []
    for layout in fitted:
        if layout.tuning is None or layout.against:
            rows.append((layout.layout, "-", "-", Cell(("does not fit",), "bad")))
            continue
        plan = layout.tuning.plan
        pins = number_list(pu for pins in plan.vcpu_pins for pu in pins) or "any"
        nodes = number_list(plan.nodes) if plan.vcpu_pins or plan.memory_nodes else "any"
        rows.append((layout.layout, str(plan.vm.vcpus), nodes, pins))
    heads = ("layout", "vCPUs", "nodes", "host CPUs")
    lines = [(str(f.severity), f"{f.subject}: {f.observed} ({f.id})") for f in findings]
    rounds: dict[int, list[str]] = {}
    for step in steps:
        rounds.setdefault(step.round + 1, []).append(step.variant)
    lines += [(f"round {number}", ", ".join(layouts)) for number, layouts in rounds.items()]
    if head.copy is None:
        lines.append(("restored", "the definition, after each boot; the guest's writes persist"))
    else:
        whose = f"with its own disks, NVRAM and UUID; {head.source} is not changed"
        lines.append(("copy", f"{head.copy.name}, {whose}"))
    if preflight.begun.emulated:
        lines.append(("caveat", "emulated (type='qemu'): its results are meaningless"))
    table = Table(heads=heads, rows=tuple(rows), folds=heads[-1:])
    return Doc(title, (table, *_format_labels(lines)))


def format_status(
    trial: StoredTrial, steps: Sequence[ScheduledTask], name: str, *, is_running: bool = False
) -> Doc:
    """Return the number of measured boots, the outcomes of the others, and the next step. name: the
    trial's name in commands. is_running: a homenode is running it now."""
    head, state = trial.head, trial.state
    assert head is not None, "what cannot be read has no status"
    measured_count = sum(step.number in state.measured_boots for step in steps)
    answer = f"{head.source}: {measured_count} of {plural(len(steps), 'boot')} measured"
    rows = {"trial": head.id}
    if trial.entries:
        entry = trial.entries[-1]
        place = "" if entry.number is None else f"boot {entry.number + 1}: "
        detail = f": {entry.detail}" if entry.detail else ""
        rows["last"] = f"{entry.at}  {place}{entry.what}{detail}"
    if is_running:
        answer += ", another homenode is running it now"
    elif state.to_undo:
        answer += ", some steps are not undone"
        remains = {
            LAYOUT: f"{head.domain} may have a layout's definition",
            BOOT: f"its guest may be running (boot {(state.running or 0) + 1})",
            COPY: f"the copy {head.domain} may exist",
        }
        rows["warning"] = "; ".join(remains[change.kind] for change in state.changes)
        rows["next"] = command_line("homenode", "trial", "resume", name)
        rows["undo"] = command_line("homenode", "trial", "undo", name)
    else:
        answer += ", no step to undo"
        if measured_count < len(steps):
            rows["next"] = command_line("homenode", "trial", "resume", name)
    return Doc(answer, (build_outcomes_table(state, steps), *_format_labels(rows.items())))


def _format_labels(rows: Iterable[tuple[str, str]]) -> Iterator[Text]:
    """Return a line for each label, with all texts in one column."""
    rows = tuple(rows)
    width = max(len(label) for label, _ in rows) + 2
    return (Text(f"{label:<{width}}{text}", hang=width) for label, text in rows)


def build_outcomes_table(state: TrialState, steps: Sequence[ScheduledTask]) -> Table:
    """Return the outcomes of these boots: one row for boots of a layout with the same outcome."""
    groups: dict[tuple[str, str, str], list[ScheduledTask]] = {}
    for step in steps:
        entry = state.outcomes.get(step.number)
        outcome = "" if entry is None else entry.what
        detail = "" if entry is None else "; ".join(entry.findings) or entry.detail
        groups.setdefault((step.variant, outcome, detail), []).append(step)
    rows: list[tuple[str | Cell, ...]] = []
    for (layout, outcome, detail), boots in groups.items():
        entries = [state.outcomes[step.number] for step in boots if outcome]
        samples = sum(entry.samples or 0 for entry in entries)
        numbers = number_list(step.number + 1 for step in boots)
        cell = Cell((_OUTCOMES[EntryKind(outcome)] if outcome else Span("to be done"),))
        count_text = f"{samples:,} samples" if samples else ""
        rows.append((layout, numbers, cell, "; ".join(filter(None, (count_text, detail)))))
    heads = ("layout", "boots", "came to", "detail")
    return Table(heads=heads, rows=tuple(rows), folds=heads[-1:])
