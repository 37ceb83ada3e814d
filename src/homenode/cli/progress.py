"""Progress: how far an experiment is, on standard error while it runs. [I/O]"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from homenode.cli.terminal import error_console, note

if TYPE_CHECKING:
    from homenode.measure.progress import Progress

_MOST_LINES = 10


@contextmanager
def shown_progress(what: str, *, quiet: bool = False) -> "Iterator[Callable[[Progress], None]]":
    """Shows each progress that it gets: on a terminal in place of the one before, elsewhere as a
    line where something changed, of many tasks for each tenth. what: the tasks, in the plural."""
    if quiet:
        yield lambda progress: None
        return
    from homenode.show.trial_text import progress_line, progress_view

    if not sys.stderr.isatty():
        said = ""

        def say_change(progress: "Progress") -> None:
            nonlocal said
            line = progress_line(progress, what)
            every = max(1, progress.total // _MOST_LINES)
            if line != said and (not progress.now or progress.done % every == 0):
                said = line
                note(line)

        yield say_change
        return
    from rich.live import Live

    from homenode.show.terminal_text import shown

    with Live(console=error_console(), refresh_per_second=4, transient=True) as live:
        yield lambda progress: live.update(shown(progress_view(progress, what)))
