"""RunFolder: where a run is kept while it is measured: whole files only, one writer. [I/O]

    results/<system>/<NAME>/
        journal.jsonl          what was ordered, then each look and each step
        host.tar.gz  plan.json  domain.xml
        raw/0007-stream.txt    what a step printed
        results.jsonl          a head alone until the run is finished

A step counts once its line is in the journal; its output is there before that.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from homenode.errors import HostError, InputError
from homenode.gap import Gap
from homenode.measure.experiment import ExperimentJournal
from homenode.measure.record import KIND, BenchEntry, LookRecord, RunRecord, StepRecord, digest
from homenode.measure.results.lines import head_line, run_text
from homenode.measure.results.model import Run, RunHead
from homenode.measure.results.store import FILE, run_folder
from homenode.wording import command_line

HOST = "host.tar.gz"
PLAN = "plan.json"
DOMAIN = "domain.xml"
RAW = "raw"
_OLD_ORDER = "order.json"
"""Of homenode.bench/1."""

_TOOL_LOCK = ".tool-lock"
TOOL_WAIT_S = 900.0
"""How long a test of a run that was killed may go on before we give up waiting for it."""


class RunFolder(ExperimentJournal[RunRecord, BenchEntry]):
    """One run's files. Made by `open_run`, which holds its locks."""

    __slots__ = ("tool_lock",)

    def __init__(self, path: Path, root: Path | None = None) -> None:
        super().__init__(
            path,
            KIND,
            RunRecord,
            BenchEntry,
            private=False,
            below=root,
            hint=lambda number: "free some space, then continue with --resume",
        )
        self.tool_lock = -1

    @property
    def is_begun(self) -> bool:
        return self.has_journal or (self.path / _OLD_ORDER).exists()

    def order(self) -> RunRecord | None:
        """What was ordered; None where nothing was yet. Raises InputError."""
        found = self.records()
        return None if found is None else found[0]

    def steps(self) -> tuple[tuple[StepRecord, str], ...]:
        """Steps that ended, in order, each with its output. Raises InputError.

        A record whose output is not what it was is refused: somebody changed the folder.
        """
        _, entries = self.records() or (None, ())
        records: dict[int, StepRecord] = {}
        for entry in entries:
            if entry.step is not None:
                if entry.step.number in records:
                    raise InputError(
                        f"{self.journal_path}: expected step {entry.step.number} once, found it "
                        "twice",
                        hint="start a new run under another name",
                    )
                records[entry.step.number] = entry.step
        return tuple((records[at], self._output(records[at])) for at in sorted(records))

    def looks(self) -> tuple[LookRecord, ...]:
        _, entries = self.records() or (None, ())
        return tuple(entry.look for entry in entries if entry.look is not None)

    def write_order(self, record: RunRecord) -> None:
        self.begin_with(record)

    def write_step(self, record: StepRecord, output: str) -> None:
        self.write(f"{RAW}/{record.output}", output.encode("utf-8", "surrogateescape"))
        self.add(BenchEntry(step=record))

    def write_look(self, record: LookRecord) -> None:
        self.add(BenchEntry(look=record))

    def write_head(self, head: RunHead) -> None:
        """A run without an end: whoever reads it sees that it is not finished."""
        self.write(FILE, head_line(head).encode())

    def write_run(self, run: Run) -> None:
        self.write(FILE, run_text(run).encode())

    def records(self) -> tuple[RunRecord, tuple[BenchEntry, ...]] | None:
        """What was ordered, and each look and step; None where nothing was ordered yet."""
        if not self.has_journal:
            if (self.path / _OLD_ORDER).exists():
                raise InputError(
                    f"{self.path}: expected a run of homenode.bench/2, found one of version 1",
                    hint="its results are read; to go on measuring, start a new run under another "
                    "name",
                )
            return None
        return self.contents()

    def _output(self, record: StepRecord) -> str:
        if "/" in record.output or record.output in ("", ".", ".."):
            raise InputError(
                f"{self.journal_path}: expected a file's name as output of step {record.number}, "
                "found another path"
            )
        path = self.path / RAW / record.output
        content = self.read(f"{RAW}/{record.output}")
        if content is None:
            raise InputError(
                f"{path}: expected a file of the run, found none",
                hint="start a new run under another name",
            )
        output = content.decode("utf-8", "surrogateescape")
        if digest(output) != record.sha256:
            raise InputError(
                f"{path}: expected the output as it was written, found it changed",
                hint="start a new run under another name",
            )
        return output


def gaps_of_run(path: Path) -> tuple[Gap, ...]:
    """Tests that a run did not get or that failed, as its journal says. Raises InputError."""
    found = RunFolder(path).records()
    if found is None:
        return ()
    record, entries = found
    steps = (entry.step for entry in entries if entry.step is not None)
    said = (Gap(step.test, reason) for step in steps for reason in step.said)
    return tuple(dict.fromkeys((*record.left_out, *said)))


@contextlib.contextmanager
def open_run(
    root: Path, system: str, name: str, *, resume: bool, notify: Callable[[str], None]
) -> Iterator[RunFolder]:
    """The folder of a run, for one writer at a time.

    resume: it must hold a run; else it must not. Waits for a test that a killed run left running:
    its figures are lost, and those of the next one would be too. Raises HostError.
    """
    path = run_folder(root, system, name)
    folder = RunFolder(path, root)
    if resume and not folder.is_begun:
        raise HostError(
            f"{path}: expected a run to continue, found none", hint="leave --resume out"
        )
    if not resume and (folder.is_begun or (path / FILE).exists()):
        raise HostError(
            f"{path}: expected no run of this name, found one",
            hint="--resume continues it; or choose another name, or remove the folder",
        )
    with (
        folder.locked("no one to measure there, found another homenode bench"),
        folder.locked(
            f"no test to run any more, found one after {TOOL_WAIT_S:g} s",
            f"{command_line('fuser', path / _TOOL_LOCK)} names it",
            lock=_TOOL_LOCK,
            wait_s=TOOL_WAIT_S,
            on_wait=lambda: notify(
                "waiting for a test that was running when the run was cut short"
            ),
        ) as tool_lock,
    ):
        folder.tool_lock = tool_lock
        yield folder
