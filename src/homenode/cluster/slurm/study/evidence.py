"""Study evidence: one job of a study, with its resources on its node and its run.

It is also read from logs of nvbandwidth below the binding of each job, as the GH200 study of
2025-12 named them (appendix B), and from the runs that homenode import makes of them:

    exclusive_4gpu_node{0,1,2,3}.txt
    shared_array_1gpu_node{0,1,2,3}.txt  shared_array_2gpu_node{0,1}.txt

All-reduce ran on each node, on each pair of neighbours in a ring, and on all of them.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from statistics import fmean

from msgspec import Struct, structs
from msgspec.structs import replace

from homenode.cluster.slurm.job_allocation import NodeMachine
from homenode.cluster.slurm.scontrol import Job, parse_scontrol_jobs
from homenode.cluster.slurm.study.experiments import Experiment, NodeSharing, format_job_size
from homenode.cluster.slurm.study.locality import JobLocality, Locality, place_by_homes, place_of
from homenode.errors import ParseError
from homenode.findings import Gap
from homenode.machine.tools import nccl_tests
from homenode.machine.topology import Host
from homenode.measure.gpu_tool_samples import Binding, split_sections
from homenode.measure.imported_runs import ImportOptions, SourceDirectory, build_runs
from homenode.measure.results.model import Condition, Origin, Run, Sample
from homenode.measure.results.vantage import Vantage
from homenode.measure.step_reading import REPLAYED, REPLAYED_LINE

CLEARLY = 1.2
"""A node is a GPU's home by measuring where its copies are this many times the next best."""

_NODE = "the node"
"""Node name for logs, which do not name a node; all logs are of one machine."""

_MET = re.compile(r"(\d{1,4}) of (\d{1,4})", re.ASCII)
_PROGRESS_LINE = re.compile(
    r"\d+ of \d+ steps done\b|wrote |[^(]{1,2000}\(bench-[a-z-]{1,40}\)\Z", re.ASCII
)
"""Lines on standard error of a successful homenode bench: progress, and findings of its run."""


class AttemptRecord(Struct, frozen=True):
    """The files of a job before its measurement; None if missing."""

    job: Job | None = None
    other_jobs: int | None = None  # jobs of others on the node
    queue_wait_s: float | None = None  # from when it could have started
    gpu_hours: float | None = None  # used
    met: str | None = None  # jobs that measured with it, and all jobs
    gaps: tuple[Gap, ...] = ()
    gpus_file: str = ""  # the text of its gpus.txt


class JobEvidence(Struct, frozen=True, kw_only=True):
    """A task of an experiment."""

    name: str  # unique in the study
    mode: NodeSharing
    node: str  # name of the cluster node
    gres: str = "gpu"
    gpus: int
    bound_to: int | None = None  # the NUMA node that it was bound to; None if it was not bound
    cpu_nodes: tuple[int, ...] = ()  # NUMA nodes that it might use, () = not known
    memory_nodes: tuple[int, ...] = ()  # NUMA nodes that it might use, () = not known
    run: Run
    homes: tuple[tuple[str, int], ...] = ()  # (GPU address, its NUMA node)
    homes_measured: bool = False  # derived from the results, because no source has it
    place: Locality | None = None  # by the node's machine; None if that is unknown
    record: AttemptRecord = AttemptRecord()
    gaps: tuple[Gap, ...] = ()

    @property
    def samples(self) -> tuple[Sample, ...]:
        return self.run.samples

    @property
    def locality(self) -> Locality:
        """Whether its CPUs and memory were on the nodes of its GPUs, with the evidence."""
        if self.mode is NodeSharing.EXCLUSIVE:
            return JobLocality.BOUND, ""
        if self.place is not None:
            return self.place
        return place_by_homes(dict(self.homes), self.run, self.cpu_nodes, self.memory_nodes)

    @property
    def replay_notice(self) -> str | None:
        """Return the notice of a simulated tool; None if real tools ran."""
        notice = next((c.value for c in self.run.head.conditions if c.name == REPLAYED), None)
        return notice or ("synthesised" if self.run.head.origin is Origin.SYNTHESISED else None)

    def find_node(self, sample: Sample) -> int | None:
        """Return the NUMA node of a result's memory."""
        return self.bound_to if sample.node is None else sample.node

    @property
    def shape(self) -> str:
        """The label of a shared job in comparisons. "1 GPU, alone", "2 GPUs, together", "slice
        gpu:1g.10gb, together"; "1 GPU, 2 of 4 together" if the others started too late."""
        size = format_job_size(self.gpus, self.gres)
        match = _MET.fullmatch(self.record.met or "")
        if self.mode is NodeSharing.TOGETHER and match is not None and match[1] != match[2]:
            return f"{size}, {self.record.met} together"
        return f"{size}, {self.mode}"


def name_device(sample: Sample) -> str:
    """Return the name of a GPU: its address, else the tool's number."""
    return f"GPU {sample.index}" if sample.device is None else str(sample.device)


def parse_record(texts: Mapping[str, str], gpus: int) -> AttemptRecord:
    """Return the record of an attempt's files. gpus: the requested number, if no file has it.
    texts: by name; NAME.err has the errors of NAME."""
    gaps = list(_find_errors(texts))
    job = _parse_job(texts.get("job.txt", ""), gaps)
    fields = set(texts["others.txt"].split()) if "others.txt" in texts else None
    count = gpus if job is None else sum(share.gpus.count or 0 for share in job.shares) or gpus
    return AttemptRecord(
        job=job,
        other_jobs=None if fields is None or job is None else len(fields - {job.number}),
        queue_wait_s=None if job is None else job.queue_wait_s,
        gpu_hours=gpu_hours(texts, count),
        met=texts.get("met", "").strip()[:40] or None,
        gaps=tuple(gaps),
        gpus_file=texts.get("gpus.txt", ""),
    )


def build_evidence(
    experiment: Experiment,
    run: Run,
    record: AttemptRecord,
    host: Host | None,
    machine: NodeMachine | None,
) -> JobEvidence:
    """Return the evidence of a job. host: its node during the measurement; machine: the same, or
    the user's description if the host shows no devices."""
    head = run.head
    cpus: tuple[int, ...] = ()
    if host is not None and head.pus is not None:
        cpus = tuple(int(n.index) for n in host.nodes if not n.pus.isdisjoint(head.pus))
    gpus = () if machine is None else machine.gpus
    place, gpu_count = None, experiment.gpus if experiment.gres == "gpu" else None
    if machine is not None:
        node = experiment.nodes[0]
        place = place_of(run, record.job, record.gpus_file, gpu_count, machine, node)
    return JobEvidence(
        name=head.name,
        mode=experiment.mode,
        node=experiment.nodes[0],
        gres=experiment.gres,
        gpus=experiment.gpus,
        bound_to=experiment.numa,
        cpu_nodes=cpus,
        memory_nodes=tuple(head.nodes or ()),
        run=run,
        homes=tuple((str(g.bdf), int(g.node)) for g in gpus if g.bdf and g.node is not None),
        place=place,
        record=record,
        gaps=record.gaps,
    )


def _find_errors(texts: Mapping[str, str]) -> Iterator[Gap]:
    """Yield the standard error of programs: the first lines and the last line."""
    for name, text in sorted(texts.items()):
        if name.endswith(".err"):
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            lines = [line for line in lines if not _PROGRESS_LINE.match(line)]
            if lines:
                shown_lines = lines if len(lines) <= 3 else [*lines[:2], lines[-1]]
                yield Gap(name.removesuffix(".err"), "; ".join(line[:200] for line in shown_lines))


def _parse_job(text: str, gaps: list[Gap]) -> Job | None:
    if not text.strip():
        return None
    try:
        jobs = parse_scontrol_jobs(text, "job.txt")
    except ParseError as error:
        gaps.append(Gap("job.txt", error.message))
        return None
    for job in jobs[:1]:
        if job.unreadable is None:
            return job
        gaps.append(Gap("job.txt", f"job {job.id}: {job.unreadable}"))
    return None


def gpu_hours(texts: Mapping[str, str], gpus: int) -> float | None:
    """Return the GPU-hours from a job's own `started` and `ended`."""
    try:
        seconds = int(texts["ended"]) - int(texts["started"])
    except (KeyError, ValueError):
        return None
    return gpus * seconds / 3600 if 0 <= seconds < 1 << 31 else None


def find_measured_homes(jobs: Iterable[JobEvidence]) -> dict[str, int]:
    """Return the NUMA node from which each GPU is clearly fastest, by copies of whole nodes."""
    rates: dict[str, dict[int, list[float]]] = {}
    for job in jobs:
        for sample in job.samples:
            row = job.find_node(sample)
            is_copy = sample.metric == "h2d-bandwidth" and sample.variant is None
            if job.mode is NodeSharing.EXCLUSIVE and is_copy and row is not None:
                of_gpu = rates.setdefault(name_device(sample), {})
                of_gpu.setdefault(row, []).append(sample.value)
    homes = {}
    for device, of_row in rates.items():
        means = sorted(((fmean(values), row) for row, values in of_row.items()), reverse=True)
        if len(means) > 1 and means[0][0] > CLEARLY * means[1][0]:
            homes[device] = means[0][1]
    return homes


def find_sharing(name: str) -> NodeSharing | None:
    """Return the queue of a job, a log or a series of logs; None if neither queue matches.

    >>> find_sharing("exclusive_4gpu"), find_sharing("shared_array_2gpu"), find_sharing("hgx")
    (<NodeSharing.EXCLUSIVE: 'exclusive'>, <NodeSharing.TOGETHER: 'together'>, None)
    """
    words = name.lower().replace("-", "_").split("_")
    if "exclusive" in words:
        return NodeSharing.EXCLUSIVE
    if "shared" not in words:
        return None
    return NodeSharing.ALONE if "alone" in words else NodeSharing.TOGETHER


def list_log_evidence(directories: Iterable[SourceDirectory]) -> tuple[JobEvidence, ...]:
    """Return a job for each log of the two queues; other files are skipped."""
    jobs = []
    for directory in directories:
        for name, text in sorted(directory.texts.items()):
            mode = find_sharing(name.rpartition(".")[0])
            alone = replace(directory, texts={name: text})
            if mode is not None:
                runs = build_runs([alone], ImportOptions(vantage=Vantage.JOB))
                jobs += [
                    _make_log_evidence(name, mode, text, run.run) for run in runs if run.run.samples
                ]
    return _add_homes(jobs)


def _make_log_evidence(name: str, mode: NodeSharing, text: str, run: Run) -> JobEvidence:
    """Return the allowed nodes from the log's last section."""
    binding = next(
        (section.binding for section in split_sections(text) if section.binding is not None), None
    )
    notice = REPLAYED_LINE.search(text)
    conditions = run.head.conditions
    if notice is not None:
        conditions = (*conditions, Condition(REPLAYED, notice[1].strip()))
    head = structs.replace(run.head, name=name, conditions=conditions)
    return _build_imported_evidence(mode, structs.replace(run, head=head), binding)


def list_run_evidence(runs: Iterable[Run]) -> tuple[JobEvidence, ...]:
    """Return the jobs of runs that are named like those of a study."""
    return _add_homes([job for run in runs for job in _run_evidence(run)])


def _run_evidence(run: Run) -> Iterator[JobEvidence]:
    mode = find_sharing(run.head.name)
    if mode is None:
        return
    if run.head.experiment is not None:  # a job of its own
        nodes = tuple(run.head.nodes or ())
        is_bound = mode is NodeSharing.EXCLUSIVE and len(nodes) == 1
        yield _build_imported_evidence(mode, run, Binding(nodes if is_bound else (), nodes))
        return
    conditions = {c.name: c.value for c in run.head.conditions}
    is_strict = conditions.get("memory binding") == "one node"
    by_node: dict[int | None, list[Sample]] = {}
    current: int | None = None
    for sample in run.samples:
        # Copies between GPUs have no node: they follow their job's host copies.
        current = sample.node if sample.node is not None else current
        by_node.setdefault(current, []).append(sample)
    for node, samples in by_node.items():
        if node is None:
            parts = _group_by_log(samples)
            for number, part in enumerate(parts):
                name = run.head.name if len(parts) == 1 else f"{run.head.name}, job {number}"
                yield _build_imported_evidence(mode, _build_part(run, name, part), Binding((), ()))
        else:
            binding = Binding((node,), (node,) if is_strict else ())
            yield _build_imported_evidence(
                mode, _build_part(run, f"{run.head.name}, node {node}", samples), binding
            )


def _build_part(run: Run, name: str, samples: Iterable[Sample]) -> Run:
    return Run(structs.replace(run.head, name=name), tuple(samples))


def _group_by_log(samples: list[Sample]) -> list[list[Sample]]:
    """Return the samples of each job, if they can be distinguished."""
    logs: list[list[Sample]] = [[]]
    for sample in samples:
        log = logs[-1]
        begins_again = log and log[-1].metric != sample.metric
        begins_again = begins_again and any(s.metric == sample.metric for s in log)
        is_other = sample.device is not None and all(s.device != sample.device for s in log)
        if begins_again and is_other:
            logs.append([])
        logs[-1].append(sample)
    return logs


def _build_imported_evidence(mode: NodeSharing, run: Run, binding: Binding | None) -> JobEvidence:
    """Return imported evidence. gpus: number of GPUs copied to; 0 if the job names none."""
    devices = {s.device or s.index for s in run.samples if s.metric == "h2d-bandwidth"}
    cpus, memory = ((), ()) if binding is None else (binding.cpu_nodes, binding.memory_nodes)
    return JobEvidence(
        name=run.head.name,
        mode=mode,
        node=_NODE,
        gpus=len(devices),
        bound_to=memory[0] if len(memory) == 1 else None,
        cpu_nodes=cpus,
        memory_nodes=memory,
        run=run,
    )


def _add_homes(jobs: list[JobEvidence]) -> tuple[JobEvidence, ...]:
    """Add each GPU's home node: from a run of homenode, else from measurements of whole nodes."""
    homes = find_measured_homes(jobs)
    measured = tuple(sorted(homes.items()))
    completed = []
    for job in jobs:
        recorded = tuple(
            (str(gpu.device), gpu.node) for gpu in job.run.head.gpus if gpu.node is not None
        )
        completed.append(replace(job, homes=recorded or measured, homes_measured=not recorded))
    return tuple(completed)


class CollectivePeaks(Struct, frozen=True):
    """Peaks of bus bandwidth, in bytes/s."""

    nodes: tuple[tuple[str, float], ...]  # alone
    pairs: tuple[tuple[str, str, float], ...]  # (a, b)
    all: float | None  # None if not run
    replayed: str | None
    gaps: tuple[Gap, ...]
    gpu_hours: float | None = None  # GPU-hours of the measuring job; None if it reports none


class StudySources(Struct, frozen=True, kw_only=True):
    """Results of studies."""

    jobs: tuple[JobEvidence, ...] = ()
    collective: CollectivePeaks | None = None
    missing: tuple[str, ...] = ()  # jobs without results
    gaps: tuple[Gap, ...] = ()  # unknown facts, with the job's name
    # (job, requested tests without a result)
    unmeasured: tuple[tuple[str, str], ...] = ()


def parse_collective(texts: Mapping[str, str], gpus: int = 0) -> CollectivePeaks:
    """The peaks of a job's files: node-A.txt, pair-A+B.txt, all.txt. gpus: number of its GPUs."""
    nodes: list[tuple[str, float]] = []
    pairs: list[tuple[str, str, float]] = []
    all_peak: float | None = None
    gaps: list[Gap] = []
    replay_line: str | None = None
    for name, text in sorted(texts.items()):
        kind, _, label = name.removesuffix(".txt").partition("-")
        if not name.endswith(".txt") or kind not in ("node", "pair", "all"):
            if name.endswith(".err"):
                gaps.append(Gap(f"all-reduce {name.removesuffix('.err')}", text.strip()[:200]))
            continue
        notice = REPLAYED_LINE.search(text)
        replay_line = notice[1].strip() if notice else replay_line
        try:
            peak = nccl_tests.parse(text).peak_bus_bytes_per_s()
        except (ParseError, ValueError) as error:
            gaps.append(Gap(f"all-reduce {label or 'all'}", str(error)[:200]))
            continue
        a, is_pair, b = label.partition("+")
        if kind == "node":
            nodes.append((label, peak))
        elif kind == "pair" and is_pair:
            pairs.append((a, b, peak))
        else:
            all_peak = peak
    return CollectivePeaks(
        tuple(nodes), tuple(pairs), all_peak, replay_line, tuple(gaps), gpu_hours(texts, gpus)
    )
