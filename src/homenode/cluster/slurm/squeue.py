"""Squeue: resources of jobs from `squeue --json`, and states of jobs from its columns.

Numbers are plain, or {"set", "infinite", "number"} since 23.02; job_state is a text, or a list
since 23.11; what a job holds is, up to data_parser v0.0.40 and from v0.0.41 on,

    {"allocated_nodes": [{"nodename": …, "sockets": {"1": {"cores": {"0": "allocated"}}}}]}
    {"nodes": {"allocation": [{"name": …, "sockets": [{"index": 1, "cores": [{"index": 0,
     "status": ["ALLOCATED"]}]}]}]}}

States come as columns; a column with free text ends with a random mark that users cannot guess.
Seen: 22.05.8; else Slurm's description of its parsers (v0.0.39 to v0.0.45).
"""

import re
from collections.abc import Collection, Iterator
from enum import StrEnum
from typing import Any

from msgspec import Struct

from homenode.cluster.slurm.scontrol import (
    RUNNING,
    Job,
    NodeShare,
    OwnedGpus,
    parse_owned_gpus,
)
from homenode.cluster.slurm.slurm_nodes import expand_hostlist, plain_number
from homenode.errors import ParseError
from homenode.machine.tools.lines import json_object
from homenode.units import parse_whole

NUMBERS_COMMAND = ("squeue", "--all", "--noheader", "--states=all", "--format=%A")
MAX_STATES = 1_000_000

_MORE_THAN_RUNNING = frozenset(
    "COMPLETING CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD STOPPED POWER_UP_NODE".split()
)
"""Flags of a job whose processes do not run; others, such as SIGNALING, change nothing."""

_NO_GPUS = OwnedGpus(0, ())


def build_json_command(names: Collection[str]) -> tuple[str, ...]:
    """Return the command that prints jobs that have not ended, or the requested jobs in any state.

    22.05 prints all jobs either way. Not --states=RUNNING, which omits jobs with another flag.
    """
    which = (f"--jobs={','.join(names)}", "--states=all") if names else ()
    return ("squeue", "--all", *which, "--json")


def parse_squeue_jobs(text: str, source: str = "squeue --json") -> tuple[Job, ...]:
    """Return the jobs of a document, in its order; unreadable if a value has another type. Raises
    ParseError."""
    document = json_object(text, source)
    jobs = document.get("jobs")
    if not isinstance(jobs, list):
        keys = ", ".join(map(str, list(document)[:8])) or "an empty object"
        raise ParseError(source, 'a list "jobs"', keys if jobs is None else type(jobs).__name__)
    return tuple(_build_job(job, f"jobs[{at}]") for at, job in enumerate(jobs))


def _build_job(job: Any, place: str) -> Job:
    try:
        return _parse_job(job, place)
    except ParseError as error:
        number = plain_number(job.get("job_id")) if isinstance(job, dict) else None
        label = place if number is None else str(number)
        return Job(label, label, "", None, "", (), unreadable=error.reason)


def _parse_job(job: Any, source: str) -> Job:
    if not isinstance(job, dict):
        raise ParseError(source, "an object", type(job).__name__)
    number = plain_number(job.get("job_id"))
    if number is None:
        raise ParseError(source, '"job_id"', f"{list(job)[:8]}")
    job_id = str(number)
    array, task = plain_number(job.get("array_job_id")), plain_number(job.get("array_task_id"))
    main, offset = plain_number(job.get("het_job_id")), plain_number(job.get("het_job_offset"))
    if array and task is not None:
        job_id = f"{array}_{task}"
    elif main and offset is not None:
        job_id = f"{main}+{offset}"
    times = [plain_number(job.get(f"{name}_time")) for name in ("eligible", "submit", "start")]
    begin, start = times[0] or times[1], times[2]
    user = job.get("user_name") or job.get("user_id")
    state = _parse_state(job.get("job_state"), source)
    shares = tuple(_list_shares(job, source)) if state in RUNNING else ()
    if state in RUNNING and not shares:
        raise ParseError(source, '"job_resources" of a job that runs')
    return Job(
        id=job_id,
        number=str(number),
        name=str(job.get("name") or ""),
        user=None if user is None else str(plain_number(user) if isinstance(user, dict) else user),
        state=state,
        shares=shares,
        queue_wait_s=float(max(0, start - begin)) if begin and start else None,
    )


def _parse_state(value: Any, source: str) -> str:
    """Return the state; of a list the later flag if it is more specific, such as COMPLETING."""
    if isinstance(value, list) and value:
        value = next((word for word in value[1:] if word in _MORE_THAN_RUNNING), value[0])
    if not isinstance(value, str):
        raise ParseError(source, '"job_state"', f"{value!r}")
    return value


def _list_shares(job: dict[str, Any], source: str) -> Iterator[NodeShare]:
    """Yield the job's resources on each node; its GPUs are listed in the order of its nodes."""
    resources = job.get("job_resources")
    if not isinstance(resources, dict):
        return
    details = job.get("gres_detail")
    details = details if isinstance(details, list) else []
    allocations = list(_list_allocations(resources, source))
    nodes = job.get("nodes") or resources.get("nodes")
    names = expand_hostlist(nodes, source) if isinstance(nodes, str) and nodes else ()
    gpus = dict(zip(names, details, strict=False)) if len(names) == len(details) else {}
    for name, sockets in allocations:
        text = gpus.get(name)
        held_gpus = _NO_GPUS if not details else OwnedGpus(0, None)
        if isinstance(text, str):
            held_gpus = parse_owned_gpus(text, source)
        yield NodeShare(name, None, tuple(_list_cores(sockets)) or None, held_gpus)


def _list_allocations(owned: dict[str, Any], source: str) -> Iterator[tuple[str, Any]]:
    """Yield (node, its sockets) of either layout."""
    nodes = owned.get("nodes")
    entries = nodes.get("allocation") if isinstance(nodes, dict) else owned.get("allocated_nodes")
    if entries is None:
        return
    if isinstance(entries, dict):
        entries = list(entries.values())
    if not isinstance(entries, list):
        raise ParseError(source, "a list of nodes", type(entries).__name__)
    for entry in entries:
        name = (entry.get("nodename") or entry.get("name")) if isinstance(entry, dict) else None
        if not isinstance(name, str):
            raise ParseError(source, "a node's name", f"{entry!r}"[:80])
        yield name, entry.get("sockets")


def _list_cores(sockets: Any) -> Iterator[tuple[int, int]]:
    """Yield (socket, core) of every core that is allocated."""
    for socket, entry in _index_entries(sockets):
        cores = entry.get("cores") if isinstance(entry, dict) else None
        for core, status in _index_entries(cores):
            state = status.get("status") if isinstance(status, dict) else status
            words = state if isinstance(state, list) else [state]
            if any(str(word).upper().startswith(("ALLOCATED", "IN_USE")) for word in words):
                yield socket, core


def _index_entries(entries: Any) -> Iterator[tuple[int, Any]]:
    """(index, entry) of {"0": entry} and of [{"index": 0, …}]."""
    if isinstance(entries, dict):
        pairs = list(entries.items())
    elif isinstance(entries, list):
        pairs = [
            (entry.get("index", at) if isinstance(entry, dict) else at, entry)
            for at, entry in enumerate(entries)
        ]
    else:
        return
    for index, entry in pairs:
        number = parse_whole(str(index), digits=5)
        if number is not None:
            yield number, entry


class JobState(StrEnum):
    """The relevant states of Slurm."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"  # its script ended with an error, or it ran out of time or memory
    CANCELLED = "cancelled"
    LOST = "lost"  # its node failed, or another job took its place: nothing of its own doing


_RUNNING = "RUNNING COMPLETING CONFIGURING SUSPENDED STAGE_OUT SIGNALING STOPPED RESIZING".split()
_STATES = {
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"), JobState.PENDING),
    **dict.fromkeys(_RUNNING, JobState.RUNNING),
    "COMPLETED": JobState.COMPLETED,
    "CANCELLED": JobState.CANCELLED,
    **dict.fromkeys(("NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "REVOKED"), JobState.LOST),
}


class QueuedJob(Struct, frozen=True):
    """A job, or one task of an array."""

    job: str
    task: int | None  # None for all tasks of an array that wait together
    state: JobState
    state_name: str  # the state in Slurm's own word
    name: str
    reason: str  # why it waits or how it ended, "" if none


def states_command(user: int, mark: str) -> tuple[str, ...]:
    """Return the command that prints a user's jobs. mark: random letters and digits."""
    columns = f"--format=%F|%K|%T{mark}%j{mark}%r{mark}"
    return ("squeue", "--noheader", "--array", "--states=all", f"--user={user}", columns)


def parse_states(text: str, mark: str) -> tuple[QueuedJob, ...]:
    """Return a record for each job or task. Other lines are skipped."""
    queued_jobs = []
    columns = text.split(mark, 3 * MAX_STATES)
    for head, name, reason in zip(columns[::3], columns[1::3], columns[2::3], strict=False):
        fields = head.strip().split("|")
        if len(fields) != 3 or parse_whole(fields[0]) is None:
            continue
        job, task, state_name = fields
        state = _STATES.get(state_name.partition(" ")[0], JobState.FAILED)
        reason_text = "" if reason in ("None", "") else reason
        queued_jobs.append(QueuedJob(job, parse_whole(task), state, state_name, name, reason_text))
    return tuple(queued_jobs)


_NEEDS_SOMEBODY = re.compile(
    r"ReqNodeNotAvail|DOWN|DRAIN|reserved for jobs in higher|JobHeld|PartitionDown|"
    r"PartitionInactive|PartitionNodeLimit|PartitionTimeLimit|BadConstraints|AccountNotAllowed|"
    r"QOSNotAllowed|InvalidAccount|InvalidQOS|ReservationDeleted|DependencyNeverSatisfied|"
    r"NodeDown|QOSMin|Per(Job|Node)|NotSatisfied|Minutes|UsageThreshold|PartitionConfig|"
    r"(Association|QOS)TimeLimit|MaxWallDuration|MaxMemPerLimit|use this partition"
)


def needs_somebody(reason: str) -> bool:
    """Return whether a job will not start by itself: a drained node, a hold, a limit per job. A
    limit per user passes when some jobs end.

    >>> needs_somebody("ReqNodeNotAvail, UnavailableNodes:gpu02"), needs_somebody("Resources")
    (True, False)
    >>> needs_somebody("QOSMaxGRESPerJob"), needs_somebody("QOSMaxGRESPerUser")
    (True, False)
    >>> needs_somebody("Job's account not known, so it can't use this partition (a allows b)")
    True
    """
    return _NEEDS_SOMEBODY.search(reason) is not None
