"""Audit: whether a job's CPUs, GPUs and memory are on the same NUMA nodes."""

from collections.abc import Iterable, Iterator, Sequence

from msgspec import UNSET

from homenode.cluster.slurm.job_allocation import AllocatedGpu, JobAllocation, NodeTree
from homenode.cluster.slurm.scontrol import Job
from homenode.cluster.slurm.slurm_nodes import compress_hostlist
from homenode.cpuset import NodeIndex
from homenode.findings import Finding, Findings, add_source, finding, sort_findings
from homenode.plan.allocations import MAX_NAMED
from homenode.text import number_list, plural, shorten_list

_SLURM = "what Slurm and the host report"
_RECORD = "the job's record"


def audit(allocations: Iterable[JobAllocation], unreadable: Sequence[Job] = ()) -> Findings:
    """Return the findings on the locality of GPU jobs, worst first."""
    findings = list(_check_unreadable_jobs(unreadable))
    judged_count = far_count = open_count = gpuless_count = by_gres = 0
    nodes: set[str] = set()
    unknown: dict[tuple[str, str | None], list[JobAllocation]] = {}
    for allocation in allocations:
        if allocation.unknown is not None:
            unknown.setdefault((allocation.unknown, allocation.fix), []).append(allocation)
            continue
        if not allocation.gpus:
            gpuless_count += 1
            continue
        source = _SLURM if allocation.memory_nodes is None else _RECORD
        job_findings = add_source(_check_job_gpus(allocation), source)
        findings += job_findings
        judged_count += 1
        by_gres += allocation.tree is not None and allocation.tree.is_of_gres
        nodes.add(allocation.node)
        ids = {finding.id for finding in job_findings}
        far_count += "job-gpu-far" in ids
        open_count += "job-gpu-far" not in ids and "job-unjudged" in ids
    checked, not_checked = [], []
    if judged_count:
        checked.append(
            f"{plural(judged_count, 'allocation')} of GPU jobs on {plural(len(nodes), 'node')}: "
            f"{judged_count - far_count - open_count} local to all of their GPUs, {far_count} not"
            + (f", {open_count} unknown" if open_count else "")
        )
    if unknown:
        count = sum(map(len, unknown.values()))
        not_checked.append(f"{plural(count, 'allocation')} of GPU jobs with unknown facts")
        findings += [_make_unjudged_finding(*cause, group) for cause, group in unknown.items()]
    if by_gres:
        count_text = plural(by_gres, "allocation")
        not_checked.append(f"Cores= of gres.conf, for {count_text}: homenode slurm check")
    if gpuless_count:
        not_checked.append(f"{plural(gpuless_count, 'allocation')} of jobs without GPUs")
    if unreadable:
        not_checked.append(f"{plural(len(unreadable), 'job')} whose records cannot be trusted")
    if not (judged_count or unknown or unreadable):
        not_checked.insert(0, "no running job has GPUs")
    return Findings(
        checked=tuple(checked), findings=sort_findings(findings), not_checked=tuple(not_checked)
    )


def _check_unreadable_jobs(jobs: Iterable[Job]) -> Iterator[Finding]:
    """Yield one finding for all jobs that cannot be read for the same reason."""
    ids: dict[str, dict[str, None]] = {}
    for job in jobs:
        ids.setdefault(str(job.unreadable), {})[job.id] = None
    for reason, job_ids in ids.items():
        yield finding(
            "job-unreadable",
            f"{'job' if len(job_ids) == 1 else 'jobs'} {', '.join(job_ids)}",
            expected="a record whose fields its user cannot have written",
            observed=reason,
            source=_SLURM,
        )


def _make_unjudged_finding(
    reason: str, fix: str | None, allocations: Sequence[JobAllocation]
) -> Finding:
    """Return one finding for all jobs that cannot be judged for the same reason."""
    jobs = shorten_list(dict.fromkeys(allocation.job for allocation in allocations), MAX_NAMED)
    nodes = compress_hostlist(sorted({allocation.node for allocation in allocations}))
    return finding(
        "job-unjudged",
        f"{'job' if len(allocations) == 1 else 'jobs'} {jobs} on {nodes}",
        expected="CPUs and GPUs that can be found on the node's machine",
        observed=reason,
        fix=fix or UNSET,
        source=_SLURM,
    )


def _check_job_gpus(allocation: JobAllocation) -> Iterator[Finding]:
    assert allocation.tree is not None
    if allocation.pus is None:
        observed, case = "Slurm lists none", "cpus-not-listed"
        yield finding("job-unjudged", allocation.subject, "the job's CPUs", observed, case=case)
    else:
        yield from _check_cpus(allocation, allocation.tree)
    yield from _check_spread(allocation, allocation.tree)
    if allocation.memory_nodes is not None:
        yield from _check_memory(allocation, allocation.tree, allocation.memory_nodes)


def _check_cpus(allocation: JobAllocation, tree: NodeTree) -> Iterator[Finding]:
    """Find GPUs on nodes without CPUs of the job, and CPUs on nodes without its GPUs."""
    assert allocation.pus is not None
    cpu_nodes = tree.find_nodes(allocation.pus)
    blind = [gpu for gpu in allocation.gpus if gpu.node is None]
    if blind:
        expected = "GPUs whose node the host reports"
        observed = f"{_format_gpus(blind)} without a node"
        yield finding(
            "job-unjudged", allocation.subject, expected, observed, case="gpu-node-unknown"
        )
    gpus = [gpu for gpu in allocation.gpus if gpu.node is not None and gpu.node not in cpu_nodes]
    place = "" if tree.is_of_gres else f" on {tree.names(cpu_nodes)}"
    observed = f"{'cores' if tree.is_of_gres else 'CPUs'} {allocation.pus}{place}"
    if gpus:
        gpu_nodes, verb = _gpu_nodes(gpus), "is" if len(gpus) == 1 else "are"
        yield finding(
            "job-gpu-far",
            allocation.subject,
            expected=f"CPUs on {tree.names(gpu_nodes)}, where {_format_gpus(gpus)} {verb}",
            observed=observed,
            cost=_format_cost(tree, cpu_nodes, gpu_nodes),
        )
    idle = tuple(node for node in cpu_nodes if node not in _gpu_nodes(allocation.gpus))
    if idle and not gpus and not blind:
        yield finding(
            "job-cpus-far",
            allocation.subject,
            expected=f"CPUs on {tree.names(_gpu_nodes(allocation.gpus))} alone, where its GPUs are",
            observed=observed,
            values={"nodes": tree.names(idle)},
        )


def _check_spread(allocation: JobAllocation, tree: NodeTree) -> Iterator[Finding]:
    """Find GPUs on more nodes than necessary."""
    nodes = _gpu_nodes(allocation.gpus)
    if tree.gpus_of_node is None or len(nodes) < 2:
        return
    largest = sorted(tree.gpus_of_node.values(), reverse=True)
    placed_gpus = [gpu for gpu in allocation.gpus if gpu.node is not None]
    needed = next(n for n in range(1, len(largest) + 1) if sum(largest[:n]) >= len(placed_gpus))
    packages = {tree.package_of_node.get(node) for node in nodes}
    if len(nodes) > needed:
        yield finding(
            "job-gpus-spread",
            allocation.subject,
            expected=f"{plural(len(placed_gpus), 'GPU')} on {plural(needed, 'node')}",
            observed=f"{_format_gpus(placed_gpus)} on {tree.names(nodes)}",
            case="one package" if len(packages) == 1 and None not in packages else None,
        )


def _check_memory(
    allocation: JobAllocation, tree: NodeTree, nodes: frozenset[NodeIndex]
) -> Iterator[Finding]:
    """Find memory that cannot be, or need not be, on the GPUs' nodes."""
    gpu_nodes = _gpu_nodes(allocation.gpus)
    usable = nodes if allocation.bound_nodes is None else allocation.bound_nodes & nodes
    lacking = tuple(node for node in gpu_nodes if node not in usable)
    how = "mems_allowed" if allocation.bound_nodes is None else "a policy that binds"
    observed = f"{how} to {tree.names(tuple(sorted(usable)))}"
    if lacking:
        yield finding(
            "job-memory-far",
            allocation.subject,
            expected=f"memory allowed on {tree.names(gpu_nodes)}, where its GPUs are",
            observed=observed,
            cost=_format_cost(tree, tuple(sorted(usable)), lacking),
        )
    on_gpu = tuple(sorted(usable & tree.gpu_memory))
    if on_gpu:
        plain = tuple(n for n, pus in tree.pus_of_node.items() if pus and n in usable)
        yield finding(
            "job-memory-on-gpu",
            allocation.subject,
            expected=f"memory of the CPUs' nodes alone ({tree.names(plain)})",
            observed=f"{observed}, of which {tree.names(on_gpu)} are memory of GPUs",
            values={"nodes": number_list(gpu_nodes or plain)},
        )
    other_nodes = tuple(sorted(usable - set(gpu_nodes) - tree.gpu_memory))
    if allocation.bound_nodes is None and other_nodes and not lacking and gpu_nodes:
        yield finding(
            "job-memory-open",
            allocation.subject,
            expected=f"memory bound to {tree.names(gpu_nodes)}",
            observed=f"no memory policy: pages may also be on {tree.names(other_nodes)}",
        )


def _gpu_nodes(gpus: Iterable[AllocatedGpu]) -> tuple[NodeIndex, ...]:
    return tuple(sorted({gpu.node for gpu in gpus if gpu.node is not None}))


def _format_gpus(gpus: Sequence[AllocatedGpu]) -> str:
    return ", ".join(map(str, gpus))


def _format_cost(
    tree: NodeTree, job_nodes: Sequence[NodeIndex], gpu_nodes: Sequence[NodeIndex]
) -> str | None:
    """Return the distance of the GPUs' nodes from the nearest node of the job."""
    minima = [
        min((tree.distances[a, b] for a in job_nodes if (a, b) in tree.distances), default=None)
        for b in gpu_nodes
    ]
    distances = [distance for distance in minima if distance is not None]
    return f"distance {max(distances)} instead of 10" if distances else None
