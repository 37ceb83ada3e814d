"""Study: the jobs that measure how bandwidth depends on binding and on a shared queue.

On each cluster node, once a round: one job for each NUMA node with CPUs, bound to it, with all
GPUs; jobs of the shared queue, one of them alone and several at once. A round on a node is a block:
its jobs run one after another, in random order. Over all nodes there is one job of collectives.
Each becomes an sbatch script that people can read, change and submit manually (study.sbatch.j2).
Untrusted values in it are quoted, or checked to be names.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cache

from jinja2 import Environment, StrictUndefined, Template, select_autoescape
from msgspec import Struct
from msgspec.structs import replace

from homenode.cluster.arguments import StudyOptions
from homenode.cluster.slurm.job_allocation import find_gpu_memory_nodes, list_bindable_nodes
from homenode.cluster.slurm.slurm_nodes import ClusterNode
from homenode.cpuset import CpuSet, NodeIndex
from homenode.errors import UsageError, out_of_range, requires, unknown
from homenode.machine.topology import Host, NumaNode
from homenode.measure.experiment import order_by_seed
from homenode.measure.model import SuiteGroup
from homenode.measure.runner import check_metric
from homenode.package_data import read_package_text
from homenode.text import plural

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:+-]{0,99}", re.ASCII)
"""Names that need no quotes in a script and are valid file names."""

MAX_JOBS = 64
"""Limit of jobs of one shape at once on one node; MIG gives a node of 8 GPUs 56 slices."""
_SEED = 1

_TESTS = frozenset(SuiteGroup) - {SuiteGroup.APP}


class NodeSharing(StrEnum):
    """Sharing of a node by a job."""

    LOOK = "look"  # writes down what the node is; measures nothing
    EXCLUSIVE = "exclusive"
    ALONE = "alone"  # the shared queue, and no other job of this study next to it
    TOGETHER = "together"  # the shared queue, several jobs of one shape at once
    COLLECTIVE = "collective"  # all nodes of the study, whole


class Experiment(Struct, frozen=True):
    id: str
    mode: NodeSharing
    nodes: tuple[str, ...]
    partition: str | None
    gpus: int
    jobs: int = 1
    gres: str = "gpu"
    numa: int | None = None  # the NUMA node that it binds itself to
    # the round on its node, counted over all rounds and nodes; None outside partitions
    block: int | None = None
    # cpus, memory_mib: of a job of the shared queue; None in a job that gets all of its nodes
    cpus: int | None = None
    memory_mib: int | None = None
    after: tuple[str, ...] = ()  # experiments that must have ended, well or not
    gpu_type: str | None = None

    @property
    def arrangement(self) -> str:
        """Binding and node sharing of its jobs, as the arrangement of their runs."""
        if self.mode is NodeSharing.EXCLUSIVE:
            return format_binding(self.numa)
        return f"{format_job_size(self.gpus, self.gres)}, {self.mode}"


def format_binding(node: int | None) -> str:
    """Return the binding of an exclusive job as text: "bound to node 1"."""
    return "bound to an unknown node" if node is None else f"bound to node {node}"


def format_job_size(gpus: int, gres: str) -> str:
    """Return a job's GPUs as text: "2 GPUs", "slice gpu:1g.10gb"."""
    return plural(gpus, "GPU") if gres == "gpu" else f"slice {gres}"


class Study(Struct, frozen=True, omit_defaults=True):
    """The state of a study's journal; the new study is the journal's first line."""

    id: str
    options: StudyOptions
    exclusive: tuple[ClusterNode, ...]  # nodes that jobs get whole
    shared: tuple[ClusterNode, ...]  # nodes whose parts jobs get
    # the description of a node that the user named; None if look jobs capture each
    host: str | None
    looks: tuple[Experiment, ...] = ()
    # in the order of submission; () until the nodes are known
    experiments: tuple[Experiment, ...] = ()
    jobs: tuple[tuple[str, str], ...] = ()  # (experiment, job id) in the order of submission
    rejected: tuple[tuple[str, str], ...] = ()  # (experiment, why)
    # experiments whose earlier jobs do not count any more, once for each time
    repeated: tuple[str, ...] = ()

    def all_experiments(self) -> tuple[Experiment, ...]:
        return (*self.looks, *self.experiments)

    def latest_jobs(self) -> dict[str, str]:
        """Return the latest job of each experiment that has one."""
        return dict(self.jobs)

    def count_attempts(self, experiment: str) -> int:
        return self.repeated.count(experiment) + sum(name == experiment for name, _ in self.jobs)


def check_options(options: StudyOptions) -> None:
    """Raise UsageError for impossible options, and for texts that must not be in a script."""
    names = {
        "--partition-exclusive": options.partition_exclusive,
        "--partition-shared": options.partition_shared,
        "--account": options.account,
        "--qos": options.qos,
        "--reservation": options.reservation,
        "--mpi": options.mpi,
        **{f"--nodelist {name!r}": name for name in options.node_list},
        **{f"--mig {shape.gres!r}": shape.gres for shape in options.shapes},
        **{f"--tests {name!r}": name for name in options.tests},
    }
    for option, name in names.items():
        if name is not None and not NAME.fullmatch(name):
            raise UsageError(
                f"{option}: expected a name of letters, digits and . _ - + :, found {name[:60]!r}"
            )
    if options.node_list and options.nodes not in (1, len(options.node_list)):
        names_text = plural(len(options.node_list), "node")
        raise UsageError(f"--nodes {options.nodes}: --nodelist names {names_text}")
    for shape in options.shapes:
        if not (0 < shape.gpus <= MAX_JOBS and 0 < shape.jobs <= MAX_JOBS):
            raise UsageError(
                f"--shared {shape.gpus}x{shape.jobs}: expected GPUs x jobs of 1 to {MAX_JOBS}"
            )
    for name in options.tests:
        if name not in _TESTS:
            hint = f"one of {', '.join(sorted(_TESTS))}; none"
            raise unknown("test", name, _TESTS, hint, "--tests: ")
    if options.metric is not None:
        check_metric(options.metric)
    is_alone = max(options.nodes, len(options.node_list)) < 2
    for option, is_without, other in (
        ("--between-nodes", options.between_nodes and is_alone, "--nodes 2 or more"),
        ("--mpi", options.mpi is not None and not options.between_nodes, "--between-nodes"),
        ("--lower-is-better", options.lower_is_better and not options.app, "--app"),
    ):
        if is_without:
            raise requires(option, other)
    if bool(options.app) != (options.metric is not None):
        hint = '--app "gmx mdrun -s bench.tpr" --metric "Performance: +([0-9.]+)"'
        raise UsageError("--app and --metric require each other", hint=hint)


def choose_nodes(
    nodes: tuple[ClusterNode, ...], options: StudyOptions
) -> tuple[tuple[ClusterNode, ...], tuple[ClusterNode, ...]]:
    """Return nodes for whole and for shared jobs: named nodes, else idle ones before busy ones.

    Nodes of both partitions come first, so that both queues are measured on the same machines.
    Raises UsageError if a partition or a named node does not exist or has no GPU.
    """
    exclusive = _partition_nodes(nodes, options.partition_exclusive, "--partition-exclusive")
    name = options.partition_shared or (exclusive[0].partition if exclusive else None)
    shared_nodes = _partition_nodes(nodes, name, "--partition-shared")
    in_both = {node.name for node in exclusive} & {node.name for node in shared_nodes}
    if options.node_list:
        return _select_nodes(exclusive, shared_nodes, options.node_list)
    if len(exclusive) < options.nodes:
        raise UsageError(
            f"--nodes {options.nodes}: expected as many nodes with GPUs in partition "
            f"{exclusive[0].partition}, found {len(exclusive)}"
        )
    return _first_nodes(exclusive, options.nodes, in_both), _first_nodes(
        shared_nodes, options.nodes, in_both
    )


def _select_nodes(
    exclusive: tuple[ClusterNode, ...], shared: tuple[ClusterNode, ...], names: tuple[str, ...]
) -> tuple[tuple[ClusterNode, ...], tuple[ClusterNode, ...]]:
    """Return the named nodes in their partitions: the two partitions may have no node in common."""
    node_names = {node.name for node in (*exclusive, *shared)}
    partitions = dict.fromkeys((exclusive[0].partition, shared[0].partition))
    for name in names:
        if name not in node_names:
            raise UsageError(
                f"--nodelist: no node {name} with GPUs in partition {' or '.join(partitions)}",
                hint=f"their nodes: {', '.join(sorted(node_names)[:20])}",
            )
    nodes_by_name = [{node.name: node for node in nodes} for nodes in (exclusive, shared)]
    in_order = tuple(dict.fromkeys(names))
    first, second = (tuple(d[name] for name in in_order if name in d) for d in nodes_by_name)
    if not first:
        raise UsageError(
            f"--nodelist: none of these nodes is in partition {exclusive[0].partition}",
            hint=f"its nodes: {', '.join(sorted(nodes_by_name[0])[:20])}",
        )
    return first, second


NO_PARTITION = "PARTITION"
"""Placeholder in scripts for a cluster that was not queried; users replace it."""


def describe_nodes(host: Host, options: StudyOptions) -> tuple[ClusterNode, ...]:
    """Return described nodes for use without Slurm: named nodes, else numbered ones. Each is in
    both partitions; without a name a partition is NO_PARTITION."""
    names = options.node_list or tuple(f"node{n}" for n in range(1, options.nodes + 1))
    memory = sum(node.memory_bytes or 0 for node in host.nodes if node.pus)
    exclusive = options.partition_exclusive or NO_PARTITION
    return tuple(
        ClusterNode(
            name=name,
            partition=partition,
            is_default=partition == exclusive,
            state="idle",
            cpus=len(host.pus),
            memory_mib=memory >> 20,
            gpus=len(host.whole_gpus),
        )
        for partition in dict.fromkeys((exclusive, options.partition_shared or exclusive))
        for name in names
    )


def _partition_nodes(
    nodes: tuple[ClusterNode, ...], partition: str | None, option: str
) -> tuple[ClusterNode, ...]:
    members = [
        n for n in nodes if (n.is_default if partition is None else n.partition == partition)
    ]
    # Of shared nodes some may have nothing but MIG slices.
    takes_slices = option == "--partition-shared"
    with_gpus = tuple(n for n in members if n.gpus or (takes_slices and n.gpus is not None))
    if not with_gpus:
        partitions = ", ".join(sorted({n.partition for n in nodes if n.gpus})) or "none"
        actual = f"no GPU in its {len(members)} nodes" if members else "no such partition"
        raise UsageError(
            f"{option} {partition or '(the default)'}: expected nodes with GPUs, found {actual}",
            hint=f"partitions with GPUs: {partitions}",
        )
    if not NAME.fullmatch(with_gpus[0].partition):
        raise UsageError(
            f"{option}: expected a partition of letters, digits and . _ - + :, found "
            f"{with_gpus[0].partition!r}"
        )
    return with_gpus


def _first_nodes(
    nodes: tuple[ClusterNode, ...], count: int, first: set[str]
) -> tuple[ClusterNode, ...]:
    ranks = {"idle": 0, "mixed": 1, "allocated": 2}
    order = sorted(nodes, key=lambda n: (n.name not in first, ranks.get(n.state, 3), n.name))
    return tuple(sorted(order[:count], key=lambda node: node.name))


def choose_bound_nodes(host: Host, options: StudyOptions) -> tuple[NumaNode, ...]:
    """Return the NUMA nodes with CPUs and memory, or the requested ones. Raises UsageError."""
    nodes = list_bindable_nodes(host)
    bindable = CpuSet(node.index for node in nodes)
    for index in options.numa or ():
        if index not in bindable:
            owner = find_gpu_memory_nodes(host).get(NodeIndex(index))
            memory = "" if owner is None else f"; node {index} is memory of GPU {owner}"
            raise UsageError(
                f"--numa {index}: {host.name} has CPUs and memory on nodes {bindable}{memory}"
            )
    return tuple(n for n in nodes if options.numa is None or n.index in options.numa)


def capture_experiments(nodes: tuple[ClusterNode, ...]) -> tuple[Experiment, ...]:
    """Return a short job for each node that captures it."""
    return tuple(
        Experiment(
            f"look-{node.name}",
            NodeSharing.LOOK,
            (node.name,),
            node.partition,
            0,
            cpus=1,
            memory_mib=min(node.memory_mib, 512),
        )
        for node in nodes
    )


def plan_experiments(
    exclusive: tuple[ClusterNode, ...],
    shared_nodes: tuple[ClusterNode, ...],
    hosts: Mapping[str, Host],
    options: StudyOptions,
) -> tuple[Experiment, ...]:
    """Return all jobs, in each node's order. hosts: by cluster node. Raises UsageError as
    nodes_to_bind_to, and for shapes that fit no node."""
    experiments: list[Experiment] = []
    of_nodes: dict[str, list[Experiment]] = {}
    for node in shared_nodes:
        of_nodes.setdefault(node.name, []).extend(plan_shared_jobs(node, options))
    for node in exclusive:
        whole = _plan_exclusive(node, hosts[node.name], options)
        of_nodes.setdefault(node.name, []).extend(whole)
    for number in range(options.rounds):
        experiments += _plan_round(of_nodes, number, experiments)
    if options.between_nodes and len(exclusive) > 1:
        ends = tuple({experiment.nodes: experiment.id for experiment in experiments}.values())
        gpus = min(node.gpus or 0 for node in exclusive)
        types = {node.gpu_type for node in exclusive}
        experiments.append(
            Experiment(
                "collective",
                NodeSharing.COLLECTIVE,
                tuple(node.name for node in exclusive),
                exclusive[0].partition,
                gpus,
                after=ends,
                gpu_type=types.pop() if len(types) == 1 else None,
            )
        )
    return tuple(experiments)


def count_longest_chain(experiments: Iterable[Experiment]) -> int:
    """Return how many jobs run one after the other at most."""
    places: dict[str, int] = {}
    for experiment in experiments:
        before = (places.get(name, 0) for name in experiment.after)
        places[experiment.id] = 1 + max(before, default=0)
    return max(places.values(), default=0)


def _plan_round(
    of_nodes: Mapping[str, Sequence[Experiment]], number: int, before: Iterable[Experiment]
) -> Iterator[Experiment]:
    """Yield the jobs of a round, in random order per node. They run one after the other, so a
    job's wait is due to other users' jobs."""
    last = {experiment.nodes[0]: (experiment.id,) for experiment in before}
    for place, (name, experiments) in enumerate(of_nodes.items()):
        by_id = {experiment.id: experiment for experiment in experiments}
        for experiment_id in order_by_seed(by_id, _SEED, number):
            block = number * len(of_nodes) + place
            after = last.get(name, ())
            experiment = replace(
                by_id[experiment_id], id=f"{experiment_id}-r{number + 1}", block=block, after=after
            )
            last[name] = (experiment.id,)
            yield experiment


def _plan_exclusive(node: ClusterNode, host: Host, options: StudyOptions) -> Iterator[Experiment]:
    for numa in choose_bound_nodes(host, options):
        yield Experiment(
            f"exclusive-{node.name}-numa{numa.index}",
            NodeSharing.EXCLUSIVE,
            (node.name,),
            node.partition,
            node.gpus or 0,
            numa=int(numa.index),
            gpu_type=node.gpu_type,
        )


def plan_shared_jobs(node: ClusterNode, options: StudyOptions) -> Iterator[Experiment]:
    """Yield the jobs of the shared queue on a node. Raises UsageError for jobs that do not fit."""
    gpus = node.gpus or 0
    fitting = [shape for shape in options.shapes if shape.gres != "gpu" or shape.gpus <= gpus]
    if options.shapes and not fitting:
        raise UsageError(
            f"--shared: every job needs more than the {plural(gpus, 'GPU')} of {node.name}",
            hint=f"--shared {max(1, gpus // 2)}x2",
        )
    for shape in fitting:
        is_slice = shape.gres != "gpu"
        jobs = shape.jobs if is_slice else min(shape.jobs, gpus // shape.gpus)
        parts = max(gpus, jobs) if is_slice else gpus
        most_cpus = node.cpus // (shape.gpus * jobs)
        if options.cpus_per_gpu and options.cpus_per_gpu > most_cpus:
            raise out_of_range("--cpus-per-gpu", str(options.cpus_per_gpu), 1, most_cpus)
        alone = Experiment(
            f"{shape.name}-{node.name}-alone",
            NodeSharing.ALONE,
            (node.name,),
            node.partition,
            shape.gpus,
            gres=shape.gres,
            cpus=(options.cpus_per_gpu or max(1, node.cpus // parts)) * shape.gpus,
            memory_mib=max(256, node.memory_mib * 9 // 10 // parts) * shape.gpus,
            gpu_type=None if is_slice else node.gpu_type,
        )
        yield alone
        if jobs > 1:
            several = f"{shape.name}-{node.name}-together"
            yield replace(alone, id=several, mode=NodeSharing.TOGETHER, jobs=jobs)


COPIES = ("gpu-bandwidth", "gpu-peer")
"""Tests of homenode bench that every job runs."""

_ABOUT = {
    NodeSharing.LOOK: "the hardware of {nodes}: nothing is measured.",
    NodeSharing.EXCLUSIVE: "the whole of {nodes}, bound to NUMA node {numa}: every GPU from there.",
    NodeSharing.ALONE: "one job of the shared queue on {nodes}, as Slurm places and binds it.",
    NodeSharing.TOGETHER: "{jobs} jobs of the shared queue on {nodes}, measuring at the same time.",
    NodeSharing.COLLECTIVE: "all-reduce on each node, each pair of neighbours and all nodes.",
}


def job_name(study: str, experiment: str) -> str:
    """Return the job's name in the queue."""
    return f"hn-{study}-{experiment}"


def format_script_name(experiment: Experiment) -> str:
    """Return the script's file, relative to the study's directory."""
    return f"jobs/{experiment.id}.sbatch"


@cache
def _read_script_template() -> Template:
    environment = Environment(
        autoescape=select_autoescape(default_for_string=False),  # a shell reads it
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = shlex.quote
    return environment.from_string(
        read_package_text("cluster", "slurm", "study", "study.sbatch.j2")
    )


def render_script(experiment: Experiment, options: StudyOptions, study: str) -> str:
    """Return the text of a job's script. It runs in the study's directory.

    The neighbours of all-reduces are those of a ring: each node is in two pairs, so that a slow
    link and a slow node can be distinguished.
    """
    names = experiment.nodes
    return _read_script_template().render(
        one=experiment,
        about=_ABOUT[experiment.mode].format(
            nodes=", ".join(names), numa=experiment.numa, jobs=experiment.jobs
        ),
        file=format_script_name(experiment),
        job_name=job_name(study, experiment.id),
        options=options,
        study=study,
        tests=(*COPIES, *(test for test in options.tests if test not in COPIES)),
        app=shlex.join(options.app),
        ring=list(zip(names, (*names[1:], names[0]), strict=True)) if len(names) > 2 else [names],
    )
