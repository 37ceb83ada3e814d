"""Progress text: how far an experiment is, and how long the rest takes, for people."""

from collections.abc import Iterable, Iterator

from homenode.doc import Cell, Doc, Table, Text
from homenode.measure.progress import Progress, TaskState, TaskStatus
from homenode.wording import printable

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
    """The line; where tasks run beside each other, above it one for each, with its state, job and
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

    >>> from dataclasses import replace
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
