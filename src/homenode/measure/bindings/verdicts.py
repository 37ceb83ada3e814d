"""Study verdicts: which queue for which kind of work, each with the evidence for it.

The kinds are those of the GH200 study: bound by copies between host and GPU, bound by computing,
several GPUs that talk to each other, and development. What was not measured is said to be so.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from homenode.findings import Severity
from homenode.measure.bindings.evidence import JobEvidence
from homenode.measure.bindings.experiments import Mode
from homenode.measure.bindings.figures import Comparison, mean_of, values_of

SAME = 0.05
"""Means that differ by less are taken for equal, as everywhere else (analyse/metrics.py)."""

_COMPUTING = ("d2d-bandwidth", "matmul-time")


class Queue(StrEnum):
    """What to submit to."""

    EXCLUSIVE = "exclusive"
    SHARED = "shared"
    EITHER = "either"
    UNKNOWN = "cannot tell"


class Locality(StrEnum):
    """Of a job's CPUs and memory to its GPUs."""

    KEPT = "kept"
    OPEN = "kept, memory not bound"  # its CPUs are right, its memory may lie on other nodes
    LOST = "lost"
    BOUND = "bound by the study"  # to each NUMA node in turn: near some GPUs, far from others
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class WorkVerdict:
    """For one kind of work. measured: False where it follows from no figure of this study."""

    work: str
    queue: Queue
    rationale: str
    evidence: tuple[str, ...]
    measured: bool


def locality_of(job: JobEvidence) -> tuple[Locality, str]:
    """Whether a job's CPUs and memory were where its GPUs are, and by what."""
    if job.mode is Mode.EXCLUSIVE:
        return Locality.BOUND, ""
    if job.placement is not None:
        found = job.placement.findings
        far = [f for f in found if f.id in ("job-gpu-far", "job-memory-far")]
        if far:
            return Locality.LOST, f"{far[0].observed}; expected {far[0].expected}"
        unjudged = [f for f in found if f.severity is Severity.INCONCLUSIVE]
        if unjudged:
            return Locality.UNKNOWN, unjudged[0].observed
        is_open = len(job.memory_nodes) > 1 or any(f.id == "job-memory-open" for f in found)
        return (Locality.OPEN, _memory(job)) if is_open else (Locality.KEPT, "")
    return _by_homes(job)


def _by_homes(job: JobEvidence) -> tuple[Locality, str]:
    """By the homes of the GPUs that it measured, where the audit had nothing to look at."""
    homes = dict(job.homes)
    wanted = {homes[str(s.device)] for s in job.samples if str(s.device) in homes}
    if not wanted:
        return Locality.UNKNOWN, "nobody tells on which nodes its GPUs are"
    if not job.cpu_nodes:
        return Locality.UNKNOWN, "nobody tells on which nodes its CPUs were"
    if not wanted <= set(job.cpu_nodes):
        return Locality.LOST, f"CPUs on node {_list(job.cpu_nodes)}, GPUs on {_list(wanted)}"
    if job.memory_nodes and set(job.memory_nodes) <= wanted:
        return Locality.KEPT, ""
    return Locality.OPEN, _memory(job)


def _memory(job: JobEvidence) -> str:
    if not job.memory_nodes:
        return "its memory was not bound to one node"
    return f"its memory may lie on nodes {_list(job.memory_nodes)}"


def _list(nodes: Iterable[int]) -> str:
    return " ".join(str(node) for node in sorted(nodes))


def verdicts(
    jobs: tuple[JobEvidence, ...], comparisons: tuple[Comparison, ...]
) -> tuple[WorkVerdict, ...]:
    """One for each kind of work, in the study's order."""
    by_metric = {one.metric: one for one in comparisons}
    return (
        _copies(jobs, by_metric),
        _computing(jobs),
        _between_gpus(jobs),
        _development(jobs),
    )


def _copies(jobs: tuple[JobEvidence, ...], by_metric: dict[str, Comparison]) -> WorkVerdict:
    work = "memory-bound GPU codes"
    found = by_metric.get("h2d-bandwidth")
    if found is None or found.local is None:
        return _unknown(work, "host to device was not measured from each NUMA node")
    evidence = [f"host to device {_rate(found.local.mean)} local (n = {found.local.count})"]
    if found.remote is not None and found.ratio is not None:
        evidence[0] += f", {_rate(found.remote.mean)} remote: {found.ratio:.2f}x"
    shared = [job for job in jobs if job.mode in (Mode.ALONE, Mode.TOGETHER) and job.gres == "gpu"]
    if not shared or not found.shared:
        reason = "bound to the GPUs' nodes it gets the local figure; shared jobs were not measured"
        return WorkVerdict(work, Queue.EXCLUSIVE, reason, tuple(evidence), True)
    places = [locality_of(job)[0] for job in shared]
    evidence.append(_places(places))
    share = min(mean.mean for _, mean in found.shared) / found.local.mean
    for name, mean in found.shared:
        of_local = f"{mean.mean / found.local.mean:.0%} of local"
        evidence.append(f"{name}: {_rate(mean.mean)} (n = {mean.count}), {of_local}")
    if Locality.LOST in places or share < 1 - SAME:
        reason = "shared jobs are placed away from their GPUs, or get less than local copies"
        return WorkVerdict(work, Queue.EXCLUSIVE, reason, tuple(evidence), True)
    if all(place is Locality.KEPT for place in places):
        reason = "shared jobs are placed and bound at their GPUs, and copy as fast as whole nodes"
        return WorkVerdict(work, Queue.EITHER, reason, tuple(evidence), True)
    reason = (
        "maximises copies: numactl --membind holds memory at the GPU; shared jobs copied as fast "
        "here, but nothing holds their memory there"
    )
    return WorkVerdict(work, Queue.EXCLUSIVE, reason, tuple(evidence), True)


def _computing(jobs: tuple[JobEvidence, ...]) -> WorkVerdict:
    work = "compute-bound GPU codes"
    own = sorted({s.metric for job in jobs for s in job.samples if s.metric.startswith("app-")})
    for metric in (*own, *_COMPUTING):
        whole = mean_of(values_of(jobs, metric, Mode.EXCLUSIVE))
        shared = mean_of(values_of(jobs, metric, Mode.ALONE, Mode.TOGETHER))
        if whole is None or shared is None:
            continue
        change = shared.mean / whole.mean - 1
        evidence = f"{metric}: shared jobs {change:+.1%} against whole nodes (n = {shared.count})"
        if abs(change) < SAME:
            reason = "sharing the node changes nothing that computes"
            return WorkVerdict(work, Queue.SHARED, reason, (evidence,), True)
        lower_is_better = metric.startswith("app-time") or metric == "matmul-time"
        queue = Queue.SHARED if (change < 0) is lower_is_better else Queue.EXCLUSIVE
        reason = "it runs at another speed beside other jobs"
        return WorkVerdict(work, queue, reason, (evidence,), True)
    return WorkVerdict(
        work,
        Queue.SHARED,
        "acceptable: what never leaves the GPU does not depend on the host's nodes",
        ("no figure of this study computes; --app measures your own program",),
        False,
    )


def _between_gpus(jobs: tuple[JobEvidence, ...]) -> WorkVerdict:
    work = "multi-GPU (NVLink)"
    by_binding: dict[object, list[float]] = {}
    for job in jobs:
        if job.mode is Mode.EXCLUSIVE:
            for one in job.samples:
                if one.metric == "p2p-bandwidth" and one.variant is None:
                    key = job.bound_to if one.node is None else one.node
                    by_binding.setdefault((job.node, key), []).append(one.value)
    shared = values_of(jobs, "p2p-bandwidth", Mode.ALONE, Mode.TOGETHER)
    means = [sum(values) / len(values) for values in by_binding.values()]
    if shared:
        means.append(sum(shared) / len(shared))
    if len(means) < 2:
        return _unknown(work, "copies between GPUs were measured under one binding, or none")
    low, high = min(means), max(means)
    how = f"{len(by_binding)} bindings" + (" and shared jobs" if shared else "")
    evidence = (f"GPU to GPU {_rate(low)} to {_rate(high)} under {how}",)
    if high <= low * (1 + SAME):
        reason = "copies between GPUs do not pass the CPUs: the binding does not matter"
        return WorkVerdict(work, Queue.EITHER, reason, evidence, True)
    reason = "copies between GPUs depend on the binding: they pass host memory"
    return WorkVerdict(work, Queue.EXCLUSIVE, reason, evidence, True)


def _development(jobs: tuple[JobEvidence, ...]) -> WorkVerdict:
    work = "development, testing"
    waits: dict[bool, list[float]] = {}
    for job in jobs:
        if job.record is not None and job.record.queue_wait_s is not None:
            waits.setdefault(job.mode is Mode.EXCLUSIVE, []).append(job.record.queue_wait_s)
    if len(waits) < 2:
        return WorkVerdict(
            work,
            Queue.SHARED,
            "a part of a node is usually free sooner than a whole one",
            ("queue waits were not recorded for both queues",),
            False,
        )
    whole, shared = median(waits[True]), median(waits[False])
    evidence = (
        f"median wait {whole:.0f} s for whole nodes (n = {len(waits[True])}), "
        f"{shared:.0f} s for parts (n = {len(waits[False])})",
    )
    if shared < whole:
        return WorkVerdict(work, Queue.SHARED, "parts of nodes started sooner", evidence, True)
    if shared == whole:
        reason = "waits were equal; a part of a node costs fewer GPU-hours"
        return WorkVerdict(work, Queue.SHARED, reason, evidence, True)
    reason = "whole nodes started sooner here; parts cost fewer GPU-hours"
    return WorkVerdict(work, Queue.EITHER, reason, evidence, True)


def _unknown(work: str, why: str) -> WorkVerdict:
    return WorkVerdict(work, Queue.UNKNOWN, why, (), False)


def _places(places: list[Locality]) -> str:
    counts = [f"{places.count(one)} {one}" for one in Locality if one in places]
    return f"locality of {len(places)} shared jobs: {', '.join(counts)}"


def _rate(value: float) -> str:
    return f"{value / 1e9:.1f} GB/s"
