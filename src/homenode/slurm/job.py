"""Job: what a job holds on its nodes, as Slurm gives it."""

import re
from dataclasses import dataclass

from homenode.cpuset import CpuSet
from homenode.slurm.gres import OwnedGpus


@dataclass(frozen=True, slots=True)
class NodeShare:
    """What a job holds on one node, in Slurm's own numbers.

    cpu_ids: abstract CPU ids (scontrol). cores: (socket, core of the socket) (squeue --json). One
    of the two is given where Slurm shows CPUs at all.
    """

    node: str
    cpu_ids: CpuSet | None
    cores: tuple[tuple[int, int], ...] | None
    gpus: OwnedGpus


@dataclass(frozen=True, slots=True)
class Job:
    """id: as users write it ("11_0" of an array, "12+1" of a heterogeneous job).

    number: what Slurm counts by, so that an array's tasks are found by either. state: "RUNNING",
    ... user: None where not given.
    """

    id: str
    number: str
    name: str
    user: str | None
    state: str
    shares: tuple[NodeShare, ...]

    @property
    def runs(self) -> bool:
        return self.state == "RUNNING"


def is_asked_for(job: Job, asked: tuple[str, ...]) -> bool:
    """True where a job is one of those that the user named, or a task of one; () = all."""
    whole = re.split("[_+]", job.id, maxsplit=1)[0]
    return not asked or bool({job.id, job.number, whole} & set(asked))
