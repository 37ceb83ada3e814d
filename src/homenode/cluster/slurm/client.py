"""Client: calls of Slurm's own programs, and reading of Slurm's files. [I/O]

Files are programs' output, records, and configuration. An Include line is followed to files in the
directory of the file that the user named, and below it: files in other directories of this machine
may not belong to the cluster.
"""

import os
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

from homenode.cluster.slurm import slurm_nodes
from homenode.cluster.slurm.config import MAX_TEXT_CHARS, ConfigFile, SlurmConfig, parse_config
from homenode.cluster.slurm.gres import DeviceOrder
from homenode.cluster.slurm.job_allocation import JobAllocation
from homenode.cluster.slurm.record import (
    TaskRecord,
    build_recorded_allocation,
    look_command,
    parse_look,
    parse_record,
)
from homenode.cluster.slurm.scontrol import (
    JOBS_COMMAND,
    Job,
    is_asked_for,
    parse_scontrol_jobs,
)
from homenode.cluster.slurm.slurm_nodes import (
    SHAPES_COMMAND,
    ClusterNode,
    NodeShape,
    parse_shapes,
)
from homenode.cluster.slurm.squeue import (
    NUMBERS_COMMAND,
    QueuedJob,
    build_json_command,
    parse_squeue_jobs,
    parse_states,
    states_command,
)
from homenode.errors import InputError, NoAnswerError, NotKnownError, ParseError, ToolError
from homenode.process import ProgramResult, ToolTimeoutError, run
from homenode.safe.input_files import read_below, read_file, read_input, read_plain

_TIMEOUT_S = 90.0
"""Longer than Slurm's own MessageTimeout of a busy controller."""

_PASSING = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection refused|timed out|"
    r"temporarily unable|Zero Bytes were transmitted|Connection reset|backup controller|"
    r"Slurm backup|Unexpected message received|Transport endpoint|send/recv",
    re.IGNORECASE,
)


def will_pass(error: str) -> bool:
    """Return whether Slurm did not answer and may do so later; False if it rejected the request."""
    return _PASSING.search(error) is not None


def ask(
    argv: Sequence[str],
    environment: dict[str, str] | None = None,
    kept_open: tuple[int, ...] = (),
) -> str:
    """The output of a Slurm program. Raises NoAnswerError, and ToolError with Slurm's reason."""
    variables = {"SLURM_CONF": os.environ["SLURM_CONF"]} if "SLURM_CONF" in os.environ else {}
    environment = {**variables, **(environment or {})}
    try:
        result = run(argv, _TIMEOUT_S, environment=environment, kept_open=kept_open)
    except ToolTimeoutError as error:
        raise NoAnswerError(error.message) from None
    if result.returncode != 0 and will_pass(result.stderr):
        raise NoAnswerError(_format_error(result))
    if result.returncode != 0:
        hint = None
        if "configuration" in result.stderr.lower():
            hint = "run it where Slurm's commands work: SLURM_CONF names another slurm.conf"
        raise ToolError(_format_error(result), hint=hint)
    return result.stdout


def _format_error(result: ProgramResult) -> str:
    """Return Slurm's errors: the last line names the failure, earlier lines the limit."""
    lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    errors = [line.partition("error: ")[2] for line in lines if "error: " in line]
    if errors:
        return f"{result.argv[0]}: error: {'; '.join(dict.fromkeys(errors[-3:]))[:300]}"
    if not lines:
        return str(result.failure())
    return f"{result.argv[0]}: {lines[-1].removeprefix(f'{result.argv[0]}: ')[:300]}"


MAX_RECORDS = 1_000_000

_MAX_RECORD_BYTES = 1 << 20


def ask_jobs(names: Sequence[str]) -> tuple[Job, ...]:
    """Return jobs that have not ended, or the requested jobs in any state. It reads squeue's JSON,
    in which a user's text cannot imitate a field. Without JSON (before 21.08, or built without it)
    it reads scontrol's text, and squeue's list of jobs shows which records are real. Raises
    InputError for a job that Slurm does not have, ToolError with Slurm's own reason."""
    for name in names:
        if not _JOB.fullmatch(name):
            raise InputError(f"job {name!r}: expected an id such as 4711, 4711_3 or 4711+1")
    try:
        jobs = parse_squeue_jobs(ask(build_json_command(names)))
    except NoAnswerError:
        raise
    except (ToolError, ParseError) as error:
        if isinstance(error, ToolError) and _UNKNOWN_JOB in error.message:
            raise _make_unknown_job(", ".join(names)) from None
        jobs = _query_scontrol(names)
    for name in names:
        if not any(is_asked_for(job, (name,)) for job in jobs):
            raise _make_unknown_job(name)
    return tuple(job for job in jobs if is_asked_for(job, tuple(names)))


_JOB = re.compile(r"[0-9]{1,10}(?:[_+][0-9]{1,10})?", re.ASCII)
_UNKNOWN_JOB = "Invalid job id"


def _make_unknown_job(name: str) -> InputError:
    return InputError(
        f"job {name}: unknown to Slurm",
        hint="only records of ended jobs remain: read them with --records DIR",
    )


def _query_scontrol(names: Sequence[str]) -> tuple[Job, ...]:
    try:
        texts = [ask((*JOBS_COMMAND, name)) for name in names] or [ask(JOBS_COMMAND)]
    except ToolError as error:
        if _UNKNOWN_JOB in error.message:
            raise _make_unknown_job(", ".join(names)) from None
        raise
    # Last, so that it has every job that the texts have.
    job_numbers = frozenset(ask(NUMBERS_COMMAND).split())
    jobs = [job for text in texts for job in parse_scontrol_jobs(text, listed_jobs=job_numbers)]
    return tuple({job.number: job for job in jobs}.values())


def ask_shapes() -> dict[str, NodeShape]:
    """The shape of each node according to Slurm. Raises ToolError with Slurm's own reason."""
    return parse_shapes(ask(SHAPES_COMMAND))


def ask_tasks(job: Job, node: str) -> tuple[TaskRecord, ...]:
    """The job's processes on a node, by a step in the job. Raises ToolError with Slurm's reason."""
    return parse_look(ask(look_command(job.number, node)), f"job {job.id} on {node}")


def read_jobs(text: str, source: str, names: Sequence[str]) -> tuple[Job, ...]:
    """Jobs of a stored answer: squeue's JSON or scontrol's text, distinguished by content."""
    if not text.strip():
        raise NotKnownError(
            f"nothing was checked: {source} is empty",
            hint="scontrol prints a line even without jobs; did the command fail?",
        )
    parse = parse_squeue_jobs if is_json(text) else parse_scontrol_jobs
    jobs = parse(text, source)
    matching = tuple(job for job in jobs if is_asked_for(job, tuple(names)))
    if names and not matching:
        raise InputError(f"{source}: no job {' or '.join(names)} in it")
    return matching


def is_json(text: str) -> bool:
    """Return whether a stored answer is squeue's JSON, rather than scontrol's text."""
    return text.lstrip().startswith("{")


def read_records(
    directory: Path, names: Sequence[str], order: DeviceOrder | None = None
) -> Iterator[JobAllocation]:
    """Return the records (*.rec) at and below a directory, by name. An unreadable record counts as
    empty: a full disk, or a user's own lines, must not hide other records. order: as in gres.conf.
    Raises InputError for a directory without records, or without records of a requested job."""
    if not directory.is_dir():
        kind = "not a directory" if directory.exists() else "no such directory"
        raise InputError(
            f"{directory}: {kind}", hint="homenode slurm audit --hooks DIR writes records"
        )
    paths = sorted(path for path in directory.rglob("*.rec") if path.is_file())
    if not paths:
        next(directory.iterdir(), None)  # a directory that cannot be read is not an empty one
        raise NotKnownError(
            f"nothing was checked: no records (*.rec) in {directory}",
            hint="the hooks (homenode slurm audit --hooks DIR) write them to done/ on each node",
        )
    if len(paths) > MAX_RECORDS:
        raise InputError(f"{directory}: expected at most {MAX_RECORDS} records, found {len(paths)}")
    if names:
        paths = [path for path in paths if path.name.partition(".")[0] in names]
    if not paths:
        raise InputError(
            f"{directory}: no records of job {' or '.join(names)}",
            hint="records are by the job's number: 4711 of 4711_3 is squeue's %A",
        )
    return (_record_allocation(path, order) for path in paths)


def _record_allocation(path: Path, order: DeviceOrder | None) -> JobAllocation:
    try:
        record = parse_record(_read(path), str(path))
        numbers = None if order is None else order.list_numbers(record.node)
        return build_recorded_allocation(record, numbers)
    except InputError as error:
        job, _, node = path.name.removesuffix(".rec").partition(".")
        fix = error.hint or "it may be cut off, or edited: omit it"
        return JobAllocation(job=job, node=node, unknown=error.message, fix=fix)


def _read(path: Path) -> str:
    try:
        content = read_plain(path, _MAX_RECORD_BYTES)
    except OSError as error:
        raise InputError(f"{path}: expected a record, found: {error.strerror}") from None
    return content.decode("utf-8", "replace")


_MAX_BYTES = 4 * MAX_TEXT_CHARS


def read_config(path: Path) -> SlurmConfig:
    """Return a configuration file with its includes, or standard input for -, without. Raises
    InputError for an unreadable file, ParseError that names a line."""
    directory = path.parent

    def include(name: str, neighbours: str) -> tuple[ConfigFile, ...] | str:
        # As Slurm does: next to the file that has the line; an absolute name stays as it is.
        other = Path(neighbours).parent / name
        try:
            paths = sorted(other.parent.glob(other.name)) if "*" in name else [other]
            top = directory.resolve()
            if not all(target.resolve().is_relative_to(top) for target in [other, *paths]):
                return f"it is outside the directory of {path.name}"
            if not paths or not all(target.is_file() for target in paths):
                return "no such file"
            return tuple(ConfigFile(str(target), _read_included(top, target)) for target in paths)
        except OSError as error:
            return f"{error.strerror}"
        except (ValueError, RuntimeError) as error:  # a name with a NUL, links in a circle
            return str(error)

    if str(path) == "-":
        text = read_input(path, "a configuration file of Slurm").decode("utf-8", "replace")
        return parse_config(text, "-")
    content = read_file(path, "a configuration file of Slurm", max_bytes=_MAX_BYTES)
    return parse_config(content.decode("utf-8", "replace"), str(path), include)


def _read_included(top: Path, path: Path) -> str:
    relative_path = path.resolve().relative_to(top)
    return read_below(top, str(relative_path), _MAX_BYTES).decode("utf-8", "replace")


_SUBMITTED_ID = re.compile(r"(\d{1,10})(?:;\S+)?", re.ASCII)


def ask_nodes() -> tuple[ClusterNode, ...]:
    """Return every node of every partition. Raises NoAnswerError, ToolError."""
    return slurm_nodes.parse_nodes(ask(slurm_nodes.COMMAND))


def ask_queue() -> tuple[QueuedJob, ...]:
    """Return this user's jobs, also recently ended ones. Raises NoAnswerError, ToolError."""
    mark = secrets.token_hex(8)
    return parse_states(ask(states_command(os.getuid(), mark)), mark)


def submit(
    directory: Path, script: str, after: tuple[str, ...], kept_open: tuple[int, ...] = ()
) -> str:
    """Submit a study's script, to run in the study's directory, and return the job's id.

    after: ids of jobs that must have ended. kept_open: the study's lock: if homenode is killed
    sbatch continues, and a process that continues the study must see its job. Raises NoAnswerError
    if the job may nevertheless have been accepted, and ToolError if Slurm rejected it.
    """
    words = ["sbatch", "--parsable", f"--chdir={directory}"]
    if after:
        words.append(f"--dependency=afterany:{':'.join(after)}")
    text = ask((*words, f"{directory}/{script}"), _build_environment(), kept_open)
    match = _SUBMITTED_ID.fullmatch(text.strip().splitlines()[-1] if text.strip() else "")
    if match is None:
        raise ToolError(f"sbatch: expected a job's id, found {text.strip()[:80]!r}")
    return match[1]


def cancel(job: str) -> None:
    """Cancel a job, all tasks of an array. Raises NoAnswerError. A job that Slurm no longer has is
    not an error."""
    try:
        ask(("scancel", job))
    except NoAnswerError:
        raise
    except ToolError:
        return


def _build_environment() -> dict[str, str]:
    """Return the user's environment for sbatch, which passes it on: modules and libraries need it.
    Variables of an enclosing job are removed, because a study may be started from a job. sbatch's
    own variables are removed too, because they override the script: SBATCH_PARTITION would move
    every job."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "SLURMD_", "SBATCH_")) and name not in ("PATH", "LC_ALL")
    }


def account_name() -> str | None:
    """Return the account that the user's environment names for sbatch."""
    return os.environ.get("SBATCH_ACCOUNT") or os.environ.get("SLURM_ACCOUNT") or None


def is_full(error: str) -> bool:
    """Return whether sbatch accepts no more jobs of this user for now.

    >>> is_full("AssocMaxSubmitJobLimit; Batch job submission failed: Job violates accounting/QOS")
    True
    """
    return "SubmitJob" in error or "MaxJobCount" in error or "Slurm temporarily" in error
