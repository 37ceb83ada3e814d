"""Locality: whether a job's CPUs and memory were on the NUMA nodes of its GPUs.

Sources of a job's GPUs are the measuring tool, the devices of its cgroup, CUDA_VISIBLE_DEVICES and
Slurm's numbers. All sources with the job's number of GPUs must lead to the same answer; otherwise
it is unknown, with the reason.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from enum import StrEnum

from homenode.bdf import Bdf
from homenode.cluster.slurm.audit import audit
from homenode.cluster.slurm.job_allocation import (
    AllocatedGpu,
    JobAllocation,
    NodeMachine,
    build_allocation,
)
from homenode.cluster.slurm.scontrol import Job
from homenode.cpuset import CpuSet, NodeIndex
from homenode.errors import ParseError
from homenode.measure.results.model import Run
from homenode.metrics import POWER
from homenode.text import plural

GpusBySource = Mapping[str, tuple[Bdf, ...]]

CGROUP, VISIBLE, SLURM, TOOL = (
    "the devices that its cgroup lets it open",
    "CUDA_VISIBLE_DEVICES",
    "Slurm",
    "the measuring tool",
)


class JobLocality(StrEnum):
    """Locality of a job's CPUs and memory to its GPUs."""

    KEPT = "kept"
    OPEN = "kept, not bound"  # near its GPUs; its memory or some CPUs may be elsewhere
    LOST = "lost"
    BOUND = "bound by the study"  # to each NUMA node in turn: near some GPUs, far from others
    UNKNOWN = "unknown"


Locality = tuple[JobLocality, str]
"""(locality, reason); the reason is "" if the locality needs no explanation."""


def parse_gpus(text: str) -> tuple[GpusBySource, CpuSet]:
    """Parse a job's gpus.txt: GPUs by source, and Slurm's numbers (SLURM_JOB_GPUS).

    Numbers in CUDA_VISIBLE_DEVICES count the GPUs that the job can open, by address.

    >>> parse_gpus("slurm 1\\nvisible 0\\ngpu 0009:01:00.0 closed\\ngpu 0019:01:00.0 open\\n")[1]
    CpuSet('1')
    """
    numbers, visible = CpuSet(), ""
    gpus: dict[Bdf, tuple[bool, str]] = {}
    for key, *values in filter(None, map(str.split, text.splitlines())):
        with suppress(ParseError):
            match key, values:
                case "slurm", [listed]:
                    numbers = CpuSet.parse(listed, "SLURM_JOB_GPUS")
                case "visible", [listed]:
                    visible = listed
                case "gpu", [address, access, *uuid]:
                    gpus[Bdf.parse(address)] = access == "open", "".join(uuid)
    usable = sorted(bdf for bdf, (is_open, _) in gpus.items() if is_open)
    shown_gpus = {CGROUP: tuple(usable)} if len(usable) < len(gpus) else {}
    by_name = {str(number): bdf for number, bdf in enumerate(usable)}
    by_name |= {uuid: bdf for bdf, (_, uuid) in gpus.items() if uuid}
    names = visible.split(",")
    if all(name in by_name for name in names):
        shown_gpus[VISIBLE] = tuple(by_name[name] for name in names)
    return shown_gpus, numbers


def place_of(
    run: Run,
    job: Job | None,
    gpus_file: str,
    gpu_count: int | None,
    machine: NodeMachine,
    cluster_node: str,
) -> Locality:
    """Whether a job was on its GPUs' nodes. gpu_count: requested; None for MIG slices."""
    shown_gpus, numbers = parse_gpus(gpus_file)
    indices = set(map(str, numbers))
    reasons: list[str] = []
    pus = run.head.pus
    by_slurm = tuple(g.bdf for g in machine.gpus if str(g.index) in indices and g.bdf is not None)
    allocations = (
        () if job is None else (build_allocation(job, s, machine, None) for s in job.shares)
    )
    for allocation in allocations:
        if allocation.unknown is not None:
            reasons.append(allocation.unknown)
        pus = allocation.pus if pus is None else pus
        by_slurm = tuple(gpu.bdf for gpu in allocation.gpus if gpu.bdf is not None) or by_slurm
        gpu_count = gpu_count and (len(allocation.gpus) or gpu_count)
    devices = (s.device for s in run.samples if s.device is not None and s.metric != POWER)
    shown_gpus = {TOOL: tuple(dict.fromkeys(devices)), SLURM: by_slurm, **shown_gpus}
    gpu_at = {gpu.bdf: gpu for gpu in machine.gpus}
    is_confined = gpu_count is not None and len(shown_gpus.get(CGROUP, ())) == gpu_count
    answers: dict[str, Locality] = {}
    for source, addresses in shown_gpus.items():
        gpus = tuple(gpu_at[bdf] for bdf in addresses if bdf in gpu_at)
        if not addresses or (source == SLURM and is_confined):
            continue  # gres.conf may order its numbers otherwise; what the kernel allows is certain
        if len(gpus) != len(addresses):
            reasons.append(f"{source} shows a GPU that the node does not have")
        elif gpu_count is not None and len(gpus) != gpu_count:
            reasons.append(
                f"{source} shows {plural(len(gpus), 'GPU')}, and the job has {gpu_count}"
            )
        else:
            answers[source] = _judge(run, gpus, pus, machine, cluster_node)
    return _combine(answers, shown_gpus, reasons)


def _combine(
    answers: Mapping[str, Locality], shown_gpus: GpusBySource, reasons: Iterable[str]
) -> Locality:
    if len({locality for locality, _ in answers.values()}) == 1:
        return next(iter(answers.values()))
    if answers:
        texts = (f"{source} shows {', '.join(map(str, shown_gpus[source]))}" for source in answers)
        return JobLocality.UNKNOWN, "; ".join(texts)
    return JobLocality.UNKNOWN, "; ".join(reasons) or "its GPUs are unknown"


def _judge(
    run: Run,
    gpus: tuple[AllocatedGpu, ...],
    pus: CpuSet | None,
    machine: NodeMachine,
    cluster_node: str,
) -> Locality:
    if pus is None:
        return JobLocality.UNKNOWN, "the nodes of its CPUs are unknown"
    nodes = run.head.nodes
    allocation = JobAllocation(
        job="",
        node=cluster_node,
        pus=pus,
        gpus=gpus,
        tree=machine.tree,
        memory_nodes=None if nodes is None else frozenset(map(NodeIndex, nodes)),
    )
    findings = audit((allocation,)).findings
    for ids, locality in (
        (("job-gpu-far", "job-memory-far"), JobLocality.LOST),
        (("job-unjudged",), JobLocality.UNKNOWN),
        (("job-cpus-far",), JobLocality.OPEN),
    ):
        for finding in findings:
            if finding.id in ids:
                return locality, f"{finding.observed}; expected {finding.expected}"
    if len(nodes or ()) > 1:
        return JobLocality.OPEN, format_memory(nodes or ())
    return JobLocality.KEPT, ""


def place_by_homes(
    homes: Mapping[str, int], run: Run, cpus: Iterable[int], memory: tuple[int, ...]
) -> Locality:
    """Return the locality by the home node of each measured GPU, if the machine is unknown."""
    # Power is sampled of all GPUs that the tool shows, not of the job's alone.
    devices = {str(s.device) for s in run.samples if s.device is not None and s.metric != POWER}
    gpu_nodes = {homes[device] for device in devices if device in homes}
    cpu_nodes = set(cpus)
    is_known = bool(devices) and devices <= homes.keys()
    if not is_known or not cpu_nodes:
        subject = "its CPUs" if is_known else "its GPUs"
        return JobLocality.UNKNOWN, f"the nodes of {subject} are unknown"
    if not gpu_nodes <= cpu_nodes:
        return (
            JobLocality.LOST,
            f"CPUs on node {_format_nodes(cpu_nodes)}, GPUs on {_format_nodes(gpu_nodes)}",
        )
    if memory and set(memory) <= gpu_nodes:
        return JobLocality.KEPT, ""
    return JobLocality.OPEN, format_memory(memory)


def format_memory(nodes: Iterable[int]) -> str:
    """Return the possible nodes of unbound memory of a job as text."""
    node_list = _format_nodes(nodes)
    return f"its memory may be on nodes {node_list}" if node_list else "its memory was not bound"


def _format_nodes(nodes: Iterable[int]) -> str:
    return " ".join(map(str, sorted(nodes)))
