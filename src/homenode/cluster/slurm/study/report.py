"""Report: the result of a study as one value; a queue for each kind of work, with the evidence.

The kinds of work are those of the GH200 study: bound by copies between host and GPU, bound by
computing, several communicating GPUs, and development. Missing measurements are reported. Results
are compared like those of layouts: jobs are boots, bindings and queues the alternatives.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from statistics import fmean, median, stdev

from msgspec import Struct

from homenode.cluster.slurm.study.evidence import (
    CollectivePeaks,
    JobEvidence,
    StudySources,
    name_device,
)
from homenode.cluster.slurm.study.experiments import NodeSharing, format_binding
from homenode.cluster.slurm.study.locality import JobLocality
from homenode.cluster.slurm.study.maps import (
    COPIES,
    Outlier,
    StudyMatrix,
    build_study_matrices,
    find_homes,
    find_slow_copies,
    label_runs,
)
from homenode.decide.alternative import group_runs
from homenode.decide.compare import compare
from homenode.decide.comparison import Comparison, Outcome
from homenode.decide.recommendation import Recommendation, recommend
from homenode.decide.sentences import format_basis, format_sentence
from homenode.decide.summary import power_by_test
from homenode.findings import Gap
from homenode.measure.results.model import CPU_ONLY, GPU_UNKNOWN, Run, Sample
from homenode.metrics import format_multiple, format_value
from homenode.objective import Objective
from homenode.text import plural

_SHOWN = 3
"""Cluster nodes whose results a recommendation names."""


class RecommendedQueue(StrEnum):
    """The recommended queue."""

    EXCLUSIVE = "exclusive"
    SHARED = "shared"
    EITHER = "either"
    UNKNOWN = "cannot tell"


class QueueRecommendation(Struct, frozen=True, kw_only=True):
    """The queue to use for one kind of work."""

    work: str
    queue: RecommendedQueue
    rationale: str
    evidence: tuple[str, ...]
    measured: bool  # False if no result of this study supports it


def recommend_queues(
    jobs: tuple[JobEvidence, ...], maps: Sequence[StudyMatrix]
) -> tuple[QueueRecommendation, ...]:
    """Return a recommendation for each kind of work, in the study's order."""
    answers = {
        "memory-bound GPU codes": _answer_copies(jobs, maps),
        "compute-bound GPU codes": _compute_answer(jobs),
        "multi-GPU (NVLink)": _answer_between_gpus(jobs),
        "development, testing": _answer_development(jobs),
    }
    return tuple(
        QueueRecommendation(
            work=work, queue=queue, rationale=reason, evidence=tuple(evidence), measured=measured
        )
        for work, (queue, reason, evidence, measured) in answers.items()
    )


NEAR, FAR = "memory on the GPU's own node", "memory on another node"
WHOLE, PARTS = "whole nodes", "parts of nodes"


def convert_copies(jobs: Iterable[JobEvidence], metrics: Sequence[str] = COPIES) -> tuple[Run, ...]:
    """Copies between host and GPUs by memory node and by shape of shared jobs; local first."""
    all_jobs = tuple(jobs)
    homes = _group_homes(all_jobs)

    def label_of(job: JobEvidence, sample: Sample) -> str | None:
        if sample.metric not in metrics or sample.variant is not None:
            return None
        return _copy_label(job, sample, homes[job.node])

    runs = label_runs(all_jobs, label_of)
    return tuple(sorted(runs, key=lambda run: _place_key(run.head.arrangement or "")))


def _place_key(label: str) -> int:
    """Sort local copies first, then remote ones, then those of shared jobs."""
    return {NEAR: 0, FAR: 1}.get(label, 2)


METHODS = {None: "CE", "sm": "SM", "read sm": "SM"}
"""Name of the copy method by variant: a copy engine (CE), or the GPU's own processors (SM)."""

_BY_SM = frozenset({"h2d-latency"})
"""Metrics that the GPU's own processors measured, without a variant for that."""


class CopySpread(Struct, frozen=True, kw_only=True):
    """Copies of one kind: mean and deviation over GPUs, nodes and jobs, each its median."""

    metric: str
    method: str  # "CE" (copy engine) or "SM"
    label: str  # where memory was, or the shape of shared jobs
    mean: float
    deviation: float | None  # None for a single result
    count: int


def measure_spreads(jobs: tuple[JobEvidence, ...]) -> tuple[CopySpread, ...]:
    """Every kind of copy, in this order: local, remote, in shared jobs, between GPUs by binding."""
    homes = _group_homes(jobs)
    values: dict[tuple[str, str, str], dict[tuple[object, ...], list[float]]] = {}
    for job in jobs:
        for sample in job.samples:
            method = METHODS.get(sample.variant)
            label = _copy_label(job, sample, homes[job.node])
            if method is None or label is None:
                continue
            method = "SM" if sample.metric in _BY_SM else method
            origin = job.find_node(sample) if job.mode is NodeSharing.EXCLUSIVE else job.name
            place = (job.node, origin, name_device(sample), sample.peer)
            by_place = values.setdefault((sample.metric, method, label), {})
            by_place.setdefault(place, []).append(sample.value)
    copies = [
        CopySpread(
            metric=metric,
            method=method,
            label=label,
            mean=fmean(medians),
            deviation=stdev(medians) if len(medians) > 1 else None,
            count=len(medians),
        )
        for (metric, method, label), by_place in values.items()
        if (medians := [median(group) for group in by_place.values()])
    ]
    metrics = [*COPIES, "p2p-bandwidth"]

    def place_of(spread: CopySpread) -> tuple[int, str, int, str]:
        return metrics.index(spread.metric), spread.method, _place_key(spread.label), spread.label

    return tuple(sorted(copies, key=place_of))


def _group_homes(jobs: Sequence[JobEvidence]) -> dict[str, dict[str, int]]:
    nodes = {job.node for job in jobs}
    return {node: find_homes(member for member in jobs if member.node == node) for node in nodes}


def _copy_label(job: JobEvidence, sample: Sample, homes: Mapping[str, int]) -> str | None:
    node = job.find_node(sample)
    if sample.metric == "p2p-bandwidth":
        return format_binding(node) if job.mode is NodeSharing.EXCLUSIVE else job.shape
    if sample.metric not in COPIES:
        return None
    if job.mode is not NodeSharing.EXCLUSIVE:
        return job.shape
    home = homes.get(name_device(sample))
    if home is None or node is None:
        return None
    return NEAR if home == node else FAR


def compare_jobs(jobs: tuple[JobEvidence, ...]) -> Iterator[Comparison]:
    """Compare copies between host and GPUs by memory node, and other results by binding."""
    ordered_jobs = sorted(jobs, key=_rank_binding)
    by_binding = label_runs(
        ordered_jobs, lambda job, s: None if s.metric in COPIES else _format_binding(job)
    )
    for runs in (convert_copies(jobs), by_binding):
        alternatives = group_runs(runs)
        if len(alternatives) > 1:
            yield compare(alternatives)


def _rank_binding(job: JobEvidence) -> tuple[bool, int, str]:
    """Return the sort key: whole nodes first, by NUMA node."""
    label = _format_binding(job)
    return job.mode is not NodeSharing.EXCLUSIVE, len(label), label


def _format_binding(job: JobEvidence) -> str:
    return format_binding(job.bound_to) if job.mode is NodeSharing.EXCLUSIVE else job.shape


QueueAnswer = tuple[RecommendedQueue, str, Sequence[str], bool]
"""(queue, reason, evidence, whether a result of this study supports it)."""


def _answer_copies(jobs: tuple[JobEvidence, ...], maps: Sequence[StudyMatrix]) -> QueueAnswer:
    local = [
        matrix for matrix in maps if matrix.metric == "h2d-bandwidth" and matrix.local is not None
    ]
    if not local:
        return _make_unknown_answer("host to device was not measured from each NUMA node")
    evidence = [describe_copies(matrix) for matrix in local[:_SHOWN]]
    # A slice of a GPU is not a part of this question.
    gpu_jobs = tuple(job for job in jobs if job.gres == "gpu")
    recommendation = recommend(
        "", group_runs(convert_copies(gpu_jobs, COPIES[:2])), Objective.GPU_COPY
    )
    evidence.append(_format_evidence(recommendation))
    shared_jobs = [
        job
        for job in gpu_jobs
        if job.mode in (NodeSharing.ALONE, NodeSharing.TOGETHER)
        and any(sample.metric == "h2d-bandwidth" for sample in job.samples)
    ]
    if not shared_jobs:
        reason = "bound to the GPUs' nodes it gets the local result; shared jobs were not measured"
        return RecommendedQueue.EXCLUSIVE, reason, evidence, True
    places = [job.locality[0] for job in shared_jobs]
    evidence.append(_format_places(places))
    shapes = {job.shape for job in shared_jobs}
    if JobLocality.LOST in places or shapes & {*recommendation.avoid}:
        reason = "shared jobs are placed away from their GPUs, or get less than local copies"
        return RecommendedQueue.EXCLUSIVE, reason, evidence, True
    if not shapes <= {recommendation.choice, *recommendation.also}:
        return _make_unknown_answer(format_sentence(recommendation), *evidence)
    if all(place is JobLocality.KEPT for place in places):
        reason = "shared jobs are placed and bound at their GPUs, and copy as fast as whole nodes"
        return RecommendedQueue.EITHER, reason, evidence, True
    reason = (
        "numactl --membind keeps memory at the GPU; shared jobs copied as fast in this study, "
        "but nothing shows that all were bound to the GPU's node"
    )
    return RecommendedQueue.EXCLUSIVE, reason, evidence, True


def _format_evidence(recommendation: Recommendation) -> str:
    sentence = format_sentence(recommendation)
    return sentence if recommendation.is_blocked else f"{format_basis(recommendation)}: {sentence}"


def describe_copies(matrix: StudyMatrix) -> str:
    """Return the mean local and remote bandwidth of a node's map."""
    means = (("local", matrix.local), ("remote", matrix.remote))
    texts = (f"{format_value(m, 'bytes_per_s')} {side}" for side, m in means if m is not None)
    text = f"{matrix.node}: host to device {', '.join(texts)}"
    return text if matrix.ratio is None else f"{text}: {matrix.ratio:.2f}x"


def _choose_side(metric: str, job: JobEvidence, sample: Sample) -> str | None:
    """Return whether the side is whole nodes or parts of them; None for another metric."""
    if sample.metric != metric:
        return None
    return WHOLE if job.mode is NodeSharing.EXCLUSIVE else PARTS


def _compute_answer(jobs: tuple[JobEvidence, ...]) -> QueueAnswer:
    """Answer by the user's own program only: copies inside a GPU do not depend on the host."""
    app_metrics = sorted(
        {s.metric for job in jobs for s in job.samples if s.metric.startswith("app-")}
    )
    for metric in app_metrics:
        runs = label_runs(jobs, partial(_choose_side, metric))
        sides = group_runs(sorted(runs, key=lambda run: run.head.arrangement != WHOLE))
        if [side.label for side in sides] != [WHOLE, PARTS]:
            continue
        effects = compare(sides).effects
        effect = next((effect for effect in effects if effect.metric == metric), None)
        if effect is None:  # zeroes have no ratio
            continue
        multiple = format_multiple(effect.ratio)
        evidence = f"{metric}: {PARTS} {multiple} {WHOLE}, {effect.level}, n = {effect.boots}"
        if effect.outcome is Outcome.CANNOT_TELL:
            caveats = ", ".join(effect.caveats) or "its interval is wide"
            return _make_unknown_answer(f"measure more jobs of each: {caveats}", evidence)
        if effect.outcome is Outcome.NO_DIFFERENCE:
            reason = "your program runs as fast in a part of a node"
            return RecommendedQueue.SHARED, reason, (evidence,), True
        if effect.outcome is Outcome.BETTER:
            return (
                RecommendedQueue.SHARED,
                "your program runs faster in a part of a node",
                (evidence,),
                True,
            )
        reason = "your program runs slower in a part of a node, next to other jobs"
        return RecommendedQueue.EXCLUSIVE, reason, (evidence,), True
    reason = "computing inside the GPU does not depend on the host's nodes"
    nothing = "this study did not measure computing; --app measures your own program"
    return RecommendedQueue.SHARED, reason, (nothing,), False


def _answer_between_gpus(jobs: tuple[JobEvidence, ...]) -> QueueAnswer:
    def label_of(job: JobEvidence, sample: Sample) -> str | None:
        if sample.metric != "p2p-bandwidth" or sample.variant is not None:
            return None
        if job.mode is not NodeSharing.EXCLUSIVE:
            return PARTS
        node = job.find_node(sample)
        return None if node is None else format_binding(node)

    runs = label_runs(jobs, label_of)
    if len({run.head.arrangement for run in runs}) < 2:
        return _make_unknown_answer(
            "copies between GPUs were measured with one binding or without results"
        )
    recommendation = recommend("", group_runs(runs), Objective.MULTI_GPU)
    evidence = _format_evidence(recommendation)
    if recommendation.choice is None:
        return _make_unknown_answer(format_sentence(recommendation), evidence)
    if not recommendation.avoid:
        reason = "copies between GPUs do not pass the CPUs: no binding is shown to matter"
        return RecommendedQueue.EITHER, reason, (evidence,), True
    reason = "copies between GPUs depend on the binding: they pass host memory"
    return RecommendedQueue.EXCLUSIVE, reason, (evidence,), True


def _answer_development(jobs: tuple[JobEvidence, ...]) -> QueueAnswer:
    waits: dict[bool, list[float]] = {}
    for job in jobs:
        if job.record.queue_wait_s is not None:
            waits.setdefault(job.mode is NodeSharing.EXCLUSIVE, []).append(job.record.queue_wait_s)
    if len(waits) < 2:
        reason = "a part of a node is usually free sooner than a whole one"
        return (
            RecommendedQueue.SHARED,
            reason,
            ("queue waits were not recorded for both queues",),
            False,
        )
    whole_wait, shared_wait = median(waits[True]), median(waits[False])
    evidence = (
        f"median wait {whole_wait:.0f} s for whole nodes (n = {len(waits[True])}), "
        f"{shared_wait:.0f} s for parts (n = {len(waits[False])})",
    )
    if shared_wait < whole_wait:
        return RecommendedQueue.SHARED, "parts of nodes started sooner", evidence, True
    if shared_wait == whole_wait:
        reason = "waits were equal; a part of a node costs fewer GPU-hours"
        return RecommendedQueue.SHARED, reason, evidence, True
    reason = "whole nodes started sooner here; parts cost fewer GPU-hours"
    return RecommendedQueue.EITHER, reason, evidence, True


def _make_unknown_answer(reason: str, *evidence: str) -> QueueAnswer:
    return RecommendedQueue.UNKNOWN, reason, evidence, False


def _format_places(places: list[JobLocality]) -> str:
    counts = [
        f"{places.count(locality)} {locality}" for locality in JobLocality if locality in places
    ]
    return f"locality of {plural(len(places), 'shared job')}: {', '.join(counts)}"


class JobSummary(Struct, frozen=True, kw_only=True):
    """A job: its place and cost. None if not recorded."""

    name: str
    node: str
    mode: NodeSharing
    gpus: int
    locality: JobLocality
    reason: str
    queue_wait_s: float | None
    gpu_hours: float | None
    met: str | None  # jobs that measured at the same time, of how many
    other_jobs: int | None  # other people's on the node


class StudyReport(Struct, frozen=True, kw_only=True):
    """The results and recommendations of a study."""

    source: str
    replayed: tuple[str, ...]  # output of simulated measuring tools; such results are meaningless
    nodes: tuple[str, ...]
    # GPU models; results over all nodes are of little use if there are several
    systems: tuple[str, ...]
    matrices: tuple[StudyMatrix, ...]
    # of copies by where memory was, and of all else by how jobs were bound
    comparisons: tuple[Comparison, ...]
    jobs: tuple[JobSummary, ...]
    recommendations: tuple[QueueRecommendation, ...]
    outliers: tuple[Outlier, ...]
    collective: CollectivePeaks | None
    missing: tuple[str, ...]  # jobs without results, and why
    gaps: tuple[Gap, ...]
    spreads: tuple[CopySpread, ...] = ()  # spread of copies, by how they were made
    setup: tuple[tuple[str, str], ...] = ()  # hardware and tools, (what, which)
    power: Mapping[str, Mapping[str, float]] = {}  # watts and joules by binding and test


def build_study_report(source: str, sources: StudySources) -> StudyReport:
    """Return the report of this evidence. source: the directory, in the user's words."""
    jobs, collective = sources.jobs, sources.collective
    maps = build_study_matrices(jobs)
    notices = [job.replay_notice for job in jobs] + [collective.replayed if collective else None]
    return StudyReport(
        source=source,
        replayed=tuple(dict.fromkeys(notice for notice in notices if notice is not None)),
        nodes=tuple(dict.fromkeys(job.node for job in jobs)),
        systems=_list_systems(jobs),
        matrices=maps,
        comparisons=tuple(compare_jobs(jobs)),
        jobs=tuple(_build_line(job) for job in jobs),
        recommendations=recommend_queues(jobs, maps),
        outliers=find_slow_copies(maps),
        collective=collective,
        missing=sources.missing,
        gaps=(*sources.gaps, *(collective.gaps if collective is not None else ())),
        spreads=measure_spreads(jobs),
        setup=tuple(_setup(jobs)),
        power=dict(_list_power(jobs)),
    )


def _list_power(jobs: Iterable[JobEvidence]) -> Iterator[tuple[str, Mapping[str, float]]]:
    """Yield the power that jobs of each binding and shape drew."""
    runs = label_runs(sorted(jobs, key=_rank_binding), lambda job, _: _format_binding(job))
    for alternative in group_runs(runs):
        if watts_by_test := power_by_test(alternative.series):
            yield alternative.label, watts_by_test


def _list_systems(jobs: tuple[JobEvidence, ...]) -> tuple[str, ...]:
    return tuple(sorted({job.run.head.system for job in jobs} - {CPU_ONLY, GPU_UNKNOWN}))


_TOLD_OF_SETUP = ("driver", "kernel", "microcode", "governor", "clock")


def _setup(jobs: tuple[JobEvidence, ...]) -> Iterator[tuple[str, str]]:
    """Yield hardware and tools of the runs; several values if jobs differ."""
    systems = _list_systems(jobs)
    if systems:
        yield "GPU", ", ".join(systems)
    kinds = sorted({job.run.head.host_kind for job in jobs if job.run.head.host_kind})
    if kinds:
        yield "machine", "; ".join(kinds)
    exclusive = [job for job in jobs if job.mode is NodeSharing.EXCLUSIVE]
    if exclusive:
        yield "GPUs per node", str(max(job.gpus for job in exclusive))
        nodes = sorted({job.bound_to for job in exclusive if job.bound_to is not None})
        yield "NUMA nodes bound to", ", ".join(map(str, nodes)) or "none"
    shapes = sorted({job.shape for job in jobs if job.mode is not NodeSharing.EXCLUSIVE})
    if shapes:
        yield "shared jobs", "; ".join(shapes)
    conditions: dict[str, dict[str, None]] = {}
    for job in jobs:
        for condition in job.run.head.conditions:
            if condition.name.startswith("tool ") or condition.name in _TOLD_OF_SETUP:
                conditions.setdefault(condition.name.removeprefix("tool "), {})[condition.value] = (
                    None
                )
    for name, values in conditions.items():
        yield name, ", ".join(values)


def _build_line(job: JobEvidence) -> JobSummary:
    locality, reason = job.locality
    record = job.record
    return JobSummary(
        name=job.name,
        node=job.node,
        mode=job.mode,
        gpus=job.gpus,
        locality=locality,
        reason=reason,
        queue_wait_s=record.queue_wait_s,
        gpu_hours=record.gpu_hours,
        met=record.met,
        other_jobs=record.other_jobs,
    )
