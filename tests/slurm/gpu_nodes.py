"""Machines and job listings for the tests of jobs under Slurm."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from homenode.machine.description.parse import parse_description
from homenode.machine.discover.host import discover
from homenode.machine.topology import Host
from homenode.vm.domain.read import read_running_domain
from tests.rendered.machine import render

TESTBED = """\
name = "gpu8"
packages = 2
cores_per_package = 16
threads_per_core = 2
memory_per_node = "256GiB"
distances = { other_package = 21 }
[[root]]
node = [0, 1]
bus = [0x10, 0x80]
ports = ["gpu", "gpu", "gpu", "gpu"]
"""
"""What the testbed declares its nodes to be: 4 GPUs on each socket."""

MI250X = """\
name = "mi250x"
cpu = { vendor = "AuthenticAMD" }
packages = 1
cores_per_package = 32
threads_per_core = 2
nodes_per_package = 4
llcs_per_package = 8
memory_per_node = "128GiB"
[model.gcd]
class = "gpu"
vendor = 0x1002
device = 0x7408
[[root]]
node = [3, 1, 0, 2]
bus = [0xc0, 0xc8, 0xd0, 0xd8]
ports = ["gcd", "gcd"]
"""
"""GPUs whose order is not that of their nodes, as on MI250X: 3, 3, 1, 1, 0, 0, 2, 2."""


@cache
def machine(text: str) -> Host:
    """The host of a description."""
    return discover(render(parse_description(text, "test")), read_running_domain)


@dataclass(frozen=True, slots=True)
class Listed:
    """A job on one node or on several that are alike."""

    id: int
    nodes: Sequence[str]
    cores: Sequence[int]  # of the node, by Slurm's numbers
    gpus: Sequence[int] = ()
    task: int | None = None
    state: str = "RUNNING"
    cores_per_socket: int = 16
    threads: int = 2


def scontrol_text(jobs: Iterable[Listed]) -> str:
    """`scontrol show job -d` of 22.05."""
    return "\n\n".join(map(_scontrol_job, jobs))


def job_text(id: int, eligible: str, start: str, share: str) -> str:
    """A job of a study on node n1 as `scontrol show job -d` shows it; times of a day."""
    return (
        f"JobId={id} JobName=hn-x\n   UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A\n"
        "   JobState=RUNNING Reason=None Dependency=(null)\n"
        f"   SubmitTime=2026-01-01T10:00:00 EligibleTime=2026-01-01T{eligible}\n"
        f"   StartTime=2026-01-01T{start} EndTime=2026-01-01T12:00:00 Deadline=N/A\n"
        f"   NodeList=n1\n   BatchHost=n1\n     Nodes=n1 {share}\n"
        "   MinCPUsNode=1 MinMemoryNode=100M MinTmpDiskNode=0\n"
    )


def _scontrol_job(job: Listed) -> str:
    array = "" if job.task is None else f" ArrayJobId={job.id} ArrayTaskId={job.task}"
    firsts = [core * job.threads for core in job.cores]
    ids = ",".join(f"{first}-{first + job.threads - 1}" for first in firsts)
    return (
        f"JobId={job.id}{array} JobName=train it\n"
        "   UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A\n"
        f"   JobState={job.state} Reason=None Dependency=(null)\n"
        "   SubmitTime=2026-01-01T10:00:00 EligibleTime=2026-01-01T10:00:00\n"
        "   StartTime=2026-01-01T10:00:05 EndTime=2026-01-01T11:00:05 Deadline=N/A\n"
        f"   NodeList={','.join(job.nodes)}\n"
        "   JOB_GRES=(null)\n"
        f"     Nodes={','.join(job.nodes)} CPU_IDs={ids} Mem=1000 GRES={_gres(job)}\n"
        "   MinCPUsNode=8 MinMemoryNode=1000M MinTmpDiskNode=0\n"
        "   Command=(null)\n"
        "   WorkDir=/home/ada\n"
    )


def _gres(job: Listed) -> str:
    if not job.gpus:
        return ""
    return f"gpu:h100:{len(job.gpus)}(IDX:{','.join(map(str, job.gpus))})"


def squeue_2205(jobs: Iterable[Listed]) -> str:
    """`squeue --json` of 22.05: plain numbers, sockets by name."""
    return json.dumps({"meta": {}, "errors": [], "jobs": [_old_job(job) for job in jobs]})


def squeue_2302(jobs: Iterable[Listed]) -> str:
    """data_parser v0.0.39: numbers in three parts."""
    numbers = ("job_id", "array_job_id", "array_task_id")
    old = map(_old_job, jobs)
    found = [job | {name: _parts(job[name]) for name in numbers} for job in old]
    return json.dumps({"meta": {}, "jobs": found, "warnings": []})


def squeue_2405(jobs: Iterable[Listed]) -> str:
    """data_parser v0.0.41 and on: lists of states, sockets and cores with their indices.

    As Slurm's _dump_node_res has it: every core of every socket, also those that are others'.
    """
    found = []
    for job in jobs:
        cores = range(job.cores_per_socket)
        sockets = [
            {"index": at, "cores": [{"index": n, "status": _status(n, own)} for n in cores]}
            for at, own in _sockets(job)
        ]
        share = {
            "cpus": {"count": len(job.cores) * job.threads, "used": 0},
            "memory": {"used": 0, "allocated": 1000},
            "sockets": sockets,
        }
        allocation = [{"index": at, "name": n} | share for at, n in enumerate(job.nodes)]
        names = {"count": len(job.nodes), "list": ",".join(job.nodes), "allocation": allocation}
        own = {"select_type": ["CORE"], "nodes": names, "cpus": len(job.cores)}
        found.append(
            {
                **_base(job),
                "array_job_id": _parts(0 if job.task is None else job.id),
                "array_task_id": _parts(job.task),
                "job_state": [job.state],
                "job_resources": {**own, "threads_per_core": _parts(job.threads)},
            }
        )
    return json.dumps({"jobs": found, "last_update": _parts(1), "meta": {}})


def _sockets(job: Listed) -> list[tuple[int, list[int]]]:
    """(socket, the job's cores of it): two sockets at least."""
    own = _by_socket(job)
    return [(socket, own.get(socket, [])) for socket in range(max([1, *own]) + 1)]


def _status(core: int, own: list[int]) -> list[str]:
    if core not in own:
        return ["UNALLOCATED"]
    return ["ALLOCATED", "IN_USE"] if core % 2 else ["ALLOCATED"]


def _old_job(job: Listed) -> dict[str, Any]:
    sockets = {
        str(socket): {"cores": {str(core): "allocated" for core in cores}}
        for socket, cores in _by_socket(job).items()
    }
    shares = [{"nodename": node, "sockets": sockets, "cpus_used": 0} for node in job.nodes]
    own = {"allocated_cores": len(job.cores), "allocated_nodes": shares}
    return {
        **_base(job),
        "array_job_id": 0 if job.task is None else job.id,
        "array_task_id": job.task,
        "job_state": job.state,
        "job_resources": {"nodes": ",".join(job.nodes), **own},
    }


def _base(job: Listed) -> dict[str, Any]:
    return {
        "job_id": job.id,
        "name": "train it",
        "user_name": "ada",
        "nodes": ",".join(job.nodes),
        "gres_detail": [_gres(job)] * len(job.nodes) if job.gpus else [],
    }


def _by_socket(job: Listed) -> dict[int, list[int]]:
    sockets: dict[int, list[int]] = {}
    for core in job.cores:
        sockets.setdefault(core // job.cores_per_socket, []).append(core % job.cores_per_socket)
    return sockets


def _parts(number: int | None) -> dict[str, Any]:
    return {"set": number is not None, "infinite": False, "number": number or 0}
