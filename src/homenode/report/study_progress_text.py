"""Study progress text: a Slurm study that is under way, for people."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from homenode.report.wording import printable
from homenode.slurm.study_progress import Progress, TaskState

_STYLES = {
    TaskState.DONE: "green",
    TaskState.RUNNING: "cyan",
    TaskState.PENDING: "",
    TaskState.WAITING: "dim",
}


def progress_line(progress: Progress) -> str:
    """Counts by state, and why jobs wait, in a line.

    >>> progress_line(Progress(()))
    'no jobs yet'
    """
    counts = [f"{progress.count(state)} {state}" for state in TaskState if progress.count(state)]
    waits = dict.fromkeys(
        printable(task.reason)
        for task in progress.tasks
        if task.state is TaskState.PENDING and task.reason
    )
    line = ", ".join(counts) or "no jobs yet"
    if waits:
        line += f" (waiting for: {'; '.join(sorted(waits))})"
    if progress.silent_s > 0:
        line += "; the controller does not answer"
    return line


def progress_view(progress: Progress) -> RenderableType:
    """A line for each experiment with its state, job and reason, and the counts below."""
    table = Table(box=None, pad_edge=False)
    for title in ("job", "experiment", "state", "why"):
        table.add_column(title, overflow="fold")
    for task in progress.tasks:
        state = Text(str(task.state), style=_STYLES.get(task.state, "red"))
        table.add_row(task.job or "", task.name, state, printable(task.reason))
    return Group(table, Text(progress_line(progress), style="bold"))
