"""Queue: what Slurm says of its nodes and of a study's jobs, as records.

    sinfo --noheader --Node --Format=… (as --format "%N|%P|%T|%c|%m|%G")
    squeue --noheader --array --states=all --user=UID --format="%F|%K|%T|%j|%N|%r"

Seen of 22.05. Source: sinfo(1), squeue(1). Plain columns, not --json: their layout is the same in
all versions.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from homenode.measure.bindings.experiments import ClusterNode

NODES_COMMAND = ("sinfo", "--noheader", "--Node", "--format=%N|%P|%T|%c|%m|%G")
JOBS_FORMAT = "--format=%F|%K|%T|%j|%N|%r"
MAX_LINES = 1_000_000

_NODE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", re.ASCII)
_GRES = re.compile(r"([A-Za-z0-9_.-]+)(?::([A-Za-z0-9_.+-]+))?:(\d{1,6})(?:\(.*\))?", re.ASCII)
# As drivers name profiles: 1g.10gb, 1g.10gb+me, 3g.40gb; Slurm's AutoDetect: a100_1g.10gb.
_SLICE = re.compile(r"(?:\w+_)?\d+g\.\d+gb", re.ASCII)
# As sinfo(1) marks states: "idle*" does not respond, "idle~" is powered down, and so on.
_MARKS = "*~#!%$@^-+"


class JobState(StrEnum):
    """Slurm's states, as few as matter here."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"  # its script ended with an error, or it ran out of time or memory
    CANCELLED = "cancelled"
    LOST = "lost"  # its node failed, or another job took its place: nothing of its own doing


_STATES = {
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"), JobState.PENDING),
    **dict.fromkeys(
        ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STAGE_OUT", "SIGNALING",
         "STOPPED", "RESIZING"), JobState.RUNNING,
    ),
    "COMPLETED": JobState.COMPLETED,
    "CANCELLED": JobState.CANCELLED,
    **dict.fromkeys(("NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "REVOKED"), JobState.LOST),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """One job, or one task of an array. task: None for all tasks of an array that wait together.

    said: the state in Slurm's own word. reason: why it waits or how it ended, "" where none.
    """

    job: str
    task: int | None
    state: JobState
    said: str
    name: str
    reason: str


def parse_nodes(text: str) -> tuple[ClusterNode, ...]:
    """A record for each node and partition. Lines that are none are left out."""
    found = []
    for line in text.splitlines()[:MAX_LINES]:
        fields = line.strip().split("|")
        if len(fields) != 6 or not _NODE_NAME.fullmatch(fields[0]):
            continue
        name, partition, state, cpus, memory, offered = fields
        if not (cpus.isdigit() and memory.rstrip("+").isdigit()):
            continue
        found.append(
            ClusterNode(
                name,
                partition.rstrip("*"),
                partition.endswith("*"),
                state.rstrip(_MARKS).lower(),
                int(cpus),
                int(memory.rstrip("+")),
                *_gpus(offered),
            )
        )
    return tuple(found)


def _gpus(offered: str) -> tuple[int | None, str | None]:
    """Whole GPUs of a text, and their type where MIG slices stand next to them.

    >>> _gpus("gpu:h100:8(S:0-1)"), _gpus("gpu:1g.10gb:7(S:0,1),gpu:a100:6,nic:2")
    ((8, None), (6, 'a100'))
    >>> _gpus("(null)"), _gpus("gpu:4")
    ((None, None), (4, None))
    """
    # A comma inside parentheses lists sockets: gpu:8(S:0,1)
    parts = re.sub(r"\([^()]*\)", "", offered).split(",")
    gpus = [found for part in parts if (found := _GRES.fullmatch(part)) and found[1] == "gpu"]
    slices = [one for one in gpus if one[2] and _SLICE.match(one[2])]
    whole = [one for one in gpus if one not in slices]
    types = {one[2] for one in whole}
    only = types.pop() if slices and len(types) == 1 else None
    return (sum(int(one[3]) for one in whole) if gpus else None), only


def parse_jobs(text: str) -> tuple[QueuedJob, ...]:
    """A record for each job or task. Lines that are none are left out."""
    return tuple(_jobs(text))


def _jobs(text: str) -> Iterator[QueuedJob]:
    for line in text.splitlines()[:MAX_LINES]:
        # The reason comes last: it is free text.
        fields = line.strip().split("|", 5)
        if len(fields) != 6 or not fields[0].isdigit():
            continue
        job, task, said, name, _, reason = fields
        state = _STATES.get(said.partition(" ")[0], JobState.FAILED)
        shown = "" if reason in ("None", "") else reason
        yield QueuedJob(job, int(task) if task.isdigit() else None, state, said, name, shown)


_NEEDS_SOMEBODY = re.compile(
    r"ReqNodeNotAvail|DOWN|DRAIN|reserved for jobs in higher|JobHeld|PartitionDown|"
    r"PartitionInactive|PartitionNodeLimit|PartitionTimeLimit|BadConstraints|AccountNotAllowed|"
    r"QOSNotAllowed|InvalidAccount|InvalidQOS|ReservationDeleted|DependencyNeverSatisfied|"
    r"NodeDown|QOSMin|Per(Job|Node)|NotSatisfied|Minutes|UsageThreshold|PartitionConfig|"
    r"(Association|QOS)TimeLimit|MaxWallDuration|MaxMemPerLimit"
)


def needs_somebody(reason: str) -> bool:
    """True where a job will not start by itself: a drained node, a hold, a limit of one job.

    A limit of all of a user's jobs passes when some of them end.

    >>> needs_somebody("ReqNodeNotAvail, UnavailableNodes:gpu02"), needs_somebody("Resources")
    (True, False)
    >>> needs_somebody("QOSMaxGRESPerJob"), needs_somebody("QOSMaxGRESPerUser")
    (True, False)
    """
    return _NEEDS_SOMEBODY.search(reason) is not None


_PASSING = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection refused|timed out|"
    r"temporarily unable|Zero Bytes were transmitted|Connection reset|backup controller|"
    r"Slurm backup|Unexpected message received|Transport endpoint|send/recv",
    re.IGNORECASE,
)


def will_pass(error: str) -> bool:
    """True where Slurm did not answer, and may later; False where it said no."""
    return _PASSING.search(error) is not None


def is_full(error: str) -> bool:
    """True where sbatch takes no more jobs of this user for now.

    >>> is_full("AssocMaxSubmitJobLimit; Batch job submission failed: Job violates accounting/QOS")
    True
    """
    return "SubmitJob" in error or "MaxJobCount" in error or "Slurm temporarily" in error
