"""Client: Slurm's own programs with the user's configuration, or files with their output. [I/O]"""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from homenode.durable import open_plain
from homenode.errors import InputError, ToolError
from homenode.process import Completed, ToolTimeoutError, run
from homenode.slurm.gres import DeviceOrder
from homenode.slurm.job_allocation import JobAllocation
from homenode.slurm.record import (
    TaskRecord,
    look_command,
    parse_look,
    parse_record,
    recorded_allocation,
)
from homenode.tools.scontrol import (
    JOBS_COMMAND,
    NODES_COMMAND,
    NodeShape,
    parse_scontrol_jobs,
    shown_shapes,
)
from homenode.tools.slurm_job import Job, is_asked_for
from homenode.tools.squeue import parse_squeue_jobs

_TIMEOUT_S = 90.0
"""Longer than Slurm's own MessageTimeout of a busy controller."""

_PASSING = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection refused|timed out|"
    r"temporarily unable|Zero Bytes were transmitted|Connection reset|backup controller|"
    r"Slurm backup|Unexpected message received|Transport endpoint|send/recv",
    re.IGNORECASE,
)


def will_pass(error: str) -> bool:
    """True where Slurm did not answer, and may later; False where it said no."""
    return _PASSING.search(error) is not None


class NoAnswerError(ToolError):
    """The controller did not answer. It may, later: nothing is known of what was asked."""


def ask(
    argv: Sequence[str],
    environment: dict[str, str] | None = None,
    kept_open: tuple[int, ...] = (),
) -> str:
    """What a program of Slurm's prints. Raises NoAnswerError, and ToolError with Slurm's reason."""
    environment = {**_configuration(), **(environment or {})}
    try:
        done = run(argv, _TIMEOUT_S, environment=environment, kept_open=kept_open)
    except ToolTimeoutError as error:
        raise NoAnswerError(error.message) from None
    if done.returncode != 0 and will_pass(done.stderr):
        raise NoAnswerError(_said(done))
    if done.returncode != 0:
        hint = None
        if "configuration" in done.stderr.lower():
            hint = "run it where Slurm's commands work: SLURM_CONF names another slurm.conf"
        raise ToolError(_said(done), hint=hint)
    return done.stdout


def _said(done: Completed) -> str:
    """Slurm's errors: the last shows what failed, those before it which limit it was."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line.partition("error: ")[2] for line in lines if "error: " in line]
    if errors:
        return f"{done.argv[0]}: error: {'; '.join(dict.fromkeys(errors[-3:]))[:300]}"
    if not lines:
        return str(done.failure())
    return f"{done.argv[0]}: {lines[-1].removeprefix(f'{done.argv[0]}: ')[:300]}"


def _configuration() -> dict[str, str]:
    return {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}


MAX_RECORDS = 1_000_000

_MAX_RECORD_BYTES = 1 << 20


def ask_jobs(asked: Sequence[str]) -> tuple[Job, ...]:
    """Jobs that Slurm knows: those asked for, or all.

    Raises InputError for a job that it does not know, ToolError with Slurm's own reason.
    """
    if not asked:
        return parse_scontrol_jobs(ask(JOBS_COMMAND))
    return tuple(job for name in asked for job in _ask_job(name))


def _ask_job(name: str) -> tuple[Job, ...]:
    try:
        return parse_scontrol_jobs(ask((*JOBS_COMMAND, name)), f"job {name}")
    except ToolError as error:
        if "Invalid job id" not in error.message:
            raise
        raise InputError(
            f"job {name}: expected a job that Slurm knows, found none",
            hint="of jobs that ended only records remain: --records DIR",
        ) from None


def ask_shapes() -> dict[str, NodeShape]:
    """What Slurm takes each of its nodes for. Raises ToolError with Slurm's own reason."""
    return shown_shapes(ask(NODES_COMMAND), "scontrol show node")


def ask_tasks(job: Job, node: str) -> tuple[TaskRecord, ...]:
    """The job's processes on a node, by a step in the job. Raises ToolError with Slurm's reason."""
    return parse_look(ask(look_command(job.number, node)), f"job {job.id} on {node}")


def read_jobs(text: str, source: str, asked: Sequence[str]) -> tuple[Job, ...]:
    """Jobs of a stored answer: squeue's JSON or scontrol's text, distinguished by content."""
    if not text.strip():
        raise InputError(
            f"{source}: expected jobs as Slurm lists them, found nothing",
            hint="without jobs scontrol says so; the command before may have failed",
        )
    is_json = text.lstrip().startswith("{")
    jobs = parse_squeue_jobs(text, source) if is_json else parse_scontrol_jobs(text, source)
    found = tuple(job for job in jobs if is_asked_for(job, tuple(asked)))
    if asked and not found:
        raise InputError(f"{source}: expected job {', '.join(asked)}, found none of them")
    return found


def read_records(
    folder: Path, asked: Sequence[str], order: DeviceOrder | None = None
) -> Iterator[JobAllocation]:
    """What the records (*.rec) of a folder and of those below it tell, by name.

    A record that cannot be read is one that says nothing: a full disk, or a user's own lines,
    must not hide all others. order: as gres.conf gives it. Raises InputError for a folder that is
    none or holds no record, and where none is of a job asked for.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: expected a folder of records (*.rec), found none")
    paths = sorted(path for path in folder.rglob("*.rec") if path.is_file())
    if not paths:
        next(folder.iterdir(), None)  # a folder that cannot be read is not an empty one
        raise InputError(
            f"{folder}: expected records (*.rec), found none",
            hint="they are in done/ of the hooks' folder on each node: `homenode slurm audit "
            "--hooks DIR` writes the hooks",
        )
    if len(paths) > MAX_RECORDS:
        raise InputError(f"{folder}: expected at most {MAX_RECORDS} records, found {len(paths)}")
    if asked:
        paths = [path for path in paths if path.name.partition(".")[0] in asked]
    if not paths:
        raise InputError(
            f"{folder}: expected records of job {', '.join(asked)}, found none",
            hint="records are by the job's number: 4711 of 4711_3 is squeue's %A",
        )
    return (_recorded(path, order) for path in paths)


def _recorded(path: Path, order: DeviceOrder | None) -> JobAllocation:
    try:
        record = parse_record(_read(path), str(path))
        return recorded_allocation(record, None if order is None else order.numbers(record.node))
    except InputError as error:
        job, _, node = path.name.removesuffix(".rec").partition(".")
        remedy = error.hint or "it may be cut off, or changed by hand: leave it out"
        return JobAllocation(
            job, node, "", None, None, (), None, unknown=error.message, remedy=remedy
        )


def _read(path: Path) -> str:
    try:
        with open_plain(path) as file:
            content = file.read(_MAX_RECORD_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: expected a record, found: {error.strerror}") from None
    return content.decode("utf-8", "replace")
