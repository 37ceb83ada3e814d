"""Client: Slurm's own programs with the user's configuration, or files with their output. [I/O]"""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from homenode.cluster.slurm.gres import DeviceOrder
from homenode.cluster.slurm.job_allocation import JobAllocation
from homenode.cluster.slurm.record import (
    TaskRecord,
    look_command,
    parse_look,
    parse_record,
    recorded_allocation,
)
from homenode.errors import InputError, NoAnswerError, ParseError, ToolError
from homenode.input_files import read_plain
from homenode.machine.tools.scontrol import JOBS_COMMAND, Job, is_asked_for, parse_scontrol_jobs
from homenode.machine.tools.slurm_nodes import SHAPES_COMMAND, NodeShape, parse_shapes
from homenode.machine.tools.squeue import NUMBERS_COMMAND, json_command, parse_squeue_jobs
from homenode.process import Completed, ToolTimeoutError, run

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
    """Jobs that have not ended, or those asked for in any state.

    squeue's JSON is read, in which no user's text is taken for a field. Where there is none (before
    21.08, or built without it), scontrol's text is, and squeue's list of jobs says whose records
    are real. Raises InputError for a job that Slurm does not know, ToolError with Slurm's own
    reason.
    """
    for name in asked:
        if not _JOB.fullmatch(name):
            raise InputError(f"job {name!r}: expected an id such as 4711, 4711_3 or 4711+1")
    try:
        jobs = parse_squeue_jobs(ask(json_command(asked)))
    except NoAnswerError:
        raise
    except (ToolError, ParseError) as error:
        if isinstance(error, ToolError) and _UNKNOWN_JOB in error.message:
            raise _unknown_job(", ".join(asked)) from None
        jobs = _scontrol_jobs(asked)
    for name in asked:
        if not any(is_asked_for(job, (name,)) for job in jobs):
            raise _unknown_job(name)
    return tuple(job for job in jobs if is_asked_for(job, tuple(asked)))


_JOB = re.compile(r"[0-9]{1,10}(?:[_+][0-9]{1,10})?", re.ASCII)
_UNKNOWN_JOB = "Invalid job id"


def _unknown_job(name: str) -> InputError:
    return InputError(
        f"job {name}: expected a job that Slurm knows, found none",
        hint="of jobs that ended only records remain: --records DIR",
    )


def _scontrol_jobs(asked: Sequence[str]) -> tuple[Job, ...]:
    try:
        texts = [ask((*JOBS_COMMAND, name)) for name in asked] or [ask(JOBS_COMMAND)]
    except ToolError as error:
        if _UNKNOWN_JOB in error.message:
            raise _unknown_job(", ".join(asked)) from None
        raise
    # Last, so that it has every job that the texts have.
    listed = frozenset(ask(NUMBERS_COMMAND).split())
    jobs = [job for text in texts for job in parse_scontrol_jobs(text, listed=listed)]
    return tuple({job.number: job for job in jobs}.values())


def ask_shapes() -> dict[str, NodeShape]:
    """What Slurm takes each of its nodes for. Raises ToolError with Slurm's own reason."""
    return parse_shapes(ask(SHAPES_COMMAND))


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
    parse = parse_squeue_jobs if is_json(text) else parse_scontrol_jobs
    jobs = parse(text, source)
    found = tuple(job for job in jobs if is_asked_for(job, tuple(asked)))
    if asked and not found:
        raise InputError(f"{source}: expected job {', '.join(asked)}, found none of them")
    return found


def is_json(text: str) -> bool:
    """Whether a stored answer is squeue's JSON, rather than scontrol's text."""
    return text.lstrip().startswith("{")


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
        content = read_plain(path, _MAX_RECORD_BYTES)
    except OSError as error:
        raise InputError(f"{path}: expected a record, found: {error.strerror}") from None
    return content.decode("utf-8", "replace")
