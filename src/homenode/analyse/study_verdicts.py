"""Study verdicts: which queue for which kind of work, each with the evidence for it.

The kinds are those of the GH200 study: bound by copies between host and GPU, bound by computing,
several GPUs that talk to each other, and development. What was not measured is said to be so.
Figures are compared as those of layouts are: jobs are boots, bindings and queues the alternatives.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median

from homenode.analyse.alternative import alternatives
from homenode.analyse.compare import compare
from homenode.analyse.comparison import Outcome
from homenode.analyse.statement import ground_of, sentence_of
from homenode.analyse.verdict import verdict
from homenode.analyse.words import multiple_text
from homenode.findings import Severity
from homenode.measure.bindings.evidence import JobEvidence
from homenode.measure.bindings.experiments import Mode
from homenode.measure.bindings.figures import Comparison, device_of, measured_homes, shape_of
from homenode.objective import Objective
from homenode.results.model import UNKNOWN_SWITCHES, Origin, Run, RunHead, Sample
from homenode.results.vantage import Vantage

_COPIES = ("h2d-bandwidth", "d2h-bandwidth")


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


NEAR, FAR = "memory on the GPU's own node", "memory on another node"
WHOLE, PARTS = "whole nodes", "parts of nodes"


def copies_as_runs(jobs: Iterable[JobEvidence]) -> Iterator[Run]:
    """Copies between host and GPUs, by where memory was bound and by shape of shared jobs, as runs
    that compare like those of layouts: each job is a boot."""
    every = [job for job in jobs if job.gres == "gpu"]
    for job in every:
        own = [one for one in every if one.node == job.node and one.mode is Mode.EXCLUSIVE]
        homes = dict(job.homes) or measured_homes(own)
        by_label: dict[str, list[Sample]] = {}
        for one in job.samples:
            if one.metric not in _COPIES or one.variant is not None:
                continue
            if job.mode is not Mode.EXCLUSIVE:
                by_label.setdefault(shape_of(job), []).append(one)
            elif device_of(one) in homes and one.node is not None:
                is_near = homes[device_of(one)] == one.node
                by_label.setdefault(NEAR if is_near else FAR, []).append(one)
        for label, samples in by_label.items():
            yield _run(job, label, samples)


def _run(job: JobEvidence, label: str, samples: Sequence[Sample]) -> Run:
    """The slowest GPU of a job counts, whichever GPUs Slurm gave it."""
    gpus = list(dict.fromkeys(device_of(one) for one in samples))
    started = None if job.run is None else job.run.head.started_s
    head = RunHead(
        job.name, job.system or "cluster", Origin.IMPORTED, Vantage.JOB, UNKNOWN_SWITCHES,
        arrangement=label, started_s=started,
    )  # fmt: skip
    return Run(
        head,
        tuple(
            replace(one, device=None, node=None, index=gpus.index(device_of(one)))
            for one in samples
        ),
    )


def _copies(jobs: tuple[JobEvidence, ...], by_metric: dict[str, Comparison]) -> WorkVerdict:
    work = "memory-bound GPU codes"
    found = by_metric.get("h2d-bandwidth")
    if found is None or found.local is None:
        return _unknown(work, "host to device was not measured from each NUMA node")
    evidence = [f"host to device {_rate(found.local.mean)} local (n = {found.local.count})"]
    if found.remote is not None and found.ratio is not None:
        evidence[0] += f", {_rate(found.remote.mean)} remote: {found.ratio:.2f}x"
    made = verdict("", tuple(copies_as_runs(jobs)), Objective.DEVICE_TRANSFER)
    evidence.append(f"{ground_of(made)}: {sentence_of(made)}")
    shared = [job for job in jobs if job.mode in (Mode.ALONE, Mode.TOGETHER) and job.gres == "gpu"]
    if not shared or not found.shared:
        reason = "bound to the GPUs' nodes it gets the local figure; shared jobs were not measured"
        return WorkVerdict(work, Queue.EXCLUSIVE, reason, tuple(evidence), True)
    places = [locality_of(job)[0] for job in shared]
    evidence.append(_places(places))
    shapes = {name for name, _ in found.shared}
    if Locality.LOST in places or shapes & {*made.avoid}:
        reason = "shared jobs are placed away from their GPUs, or get less than local copies"
        return WorkVerdict(work, Queue.EXCLUSIVE, reason, tuple(evidence), True)
    if not shapes <= {made.choice, *made.also}:
        return replace(_unknown(work, sentence_of(made)), evidence=tuple(evidence))
    if all(place is Locality.KEPT for place in places):
        reason = "shared jobs are placed and bound at their GPUs, and copy as fast as whole nodes"
        return WorkVerdict(work, Queue.EITHER, reason, tuple(evidence), True)
    reason = (
        "maximises copies: numactl --membind holds memory at the GPU; shared jobs copied as fast "
        "here, but nothing holds their memory there"
    )
    return WorkVerdict(work, Queue.EXCLUSIVE, reason, tuple(evidence), True)


def _computing(jobs: tuple[JobEvidence, ...]) -> WorkVerdict:
    """By the user's own program alone: copies and products inside a GPU do not feel its host."""
    work = "compute-bound GPU codes"
    own = sorted({s.metric for job in jobs for s in job.samples if s.metric.startswith("app-")})
    for metric in own:
        runs = [
            _run(job, WHOLE if job.mode is Mode.EXCLUSIVE else PARTS, samples)
            for job in jobs
            if (samples := [replace(s, peer=None) for s in job.samples if s.metric == metric])
        ]
        found = alternatives(sorted(runs, key=lambda run: run.head.arrangement != WHOLE))
        if [one.label for one in found] != [WHOLE, PARTS]:
            continue
        effect = next(one for one in compare(found).effects if one.metric == metric)
        multiple = multiple_text(effect.ratio)
        evidence = f"{metric}: {PARTS} {multiple} {WHOLE}, {effect.level}, n = {effect.boots}"
        if effect.outcome is Outcome.CANNOT_TELL:
            doubts = ", ".join(effect.doubts) or "its interval is wide"
            return replace(
                _unknown(work, f"measure more jobs of each: {doubts}"), evidence=(evidence,)
            )
        if effect.outcome is Outcome.NO_DIFFERENCE:
            reason = "your program runs as fast in a part of a node"
            return WorkVerdict(work, Queue.SHARED, reason, (evidence,), True)
        queue = Queue.SHARED if effect.outcome is Outcome.BETTER else Queue.EXCLUSIVE
        reason = "your program runs at another speed beside other jobs"
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
    runs: list[Run] = []
    for job in jobs:
        by_label: dict[str, list[Sample]] = {}
        for one in job.samples:
            if one.metric == "p2p-bandwidth" and one.variant is None:
                node = job.bound_to if one.node is None else one.node
                label = f"bound to node {node}" if job.mode is Mode.EXCLUSIVE else PARTS
                by_label.setdefault(label, []).append(replace(one, peer=None))
        runs += [_run(job, label, samples) for label, samples in by_label.items()]
    bindings = {run.head.arrangement for run in runs}
    if len(bindings) < 2:
        return _unknown(work, "copies between GPUs were measured under one binding, or none")
    made = verdict("", runs, Objective.COLLECTIVE)
    evidence = (f"{ground_of(made)}: {sentence_of(made)}",)
    if made.choice is None:
        return replace(_unknown(work, sentence_of(made)), evidence=evidence)
    if not made.avoid:
        reason = "copies between GPUs do not pass the CPUs: no binding is shown to matter"
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
