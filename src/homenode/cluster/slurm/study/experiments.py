"""Study: which jobs answer how bandwidth depends on binding, and what a shared queue keeps of it.

On each cluster node, once a round: one job for each NUMA node with CPUs, bound to it, with all
GPUs; jobs of the shared queue, one of them alone and several at once. A round on a node is a block:
its jobs run one after another, in an order of their own. Over all nodes: one job of collectives.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from homenode.cluster.slurm.numbering import bindable_node, bindable_nodes
from homenode.cluster.slurm.options import StudyOptions
from homenode.cluster.slurm.tools.slurm_nodes import ClusterNode
from homenode.errors import UsageError
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host, NumaNode
from homenode.measure.app_metric import check_metric
from homenode.measure.model import Group
from homenode.measure.schedule import seeded_order
from homenode.text import plural

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:+-]{0,99}", re.ASCII)
"""What may stand in a script without quotes, and be a file's name."""

MAX_JOBS = 64
"""Of one shape at once on one node; MIG gives a node of 8 GPUs 56 slices."""
_SEED = 1
_FIRST = "-r1"
"""How the experiments of the first round end."""

_TESTS = frozenset(Group) - {Group.APP}


class Mode(StrEnum):
    """How a job shares its node."""

    LOOK = "look"  # writes down what the node is; measures nothing
    EXCLUSIVE = "exclusive"
    ALONE = "alone"  # the shared queue, and no other job of this study next to it
    TOGETHER = "together"  # the shared queue, several jobs of one shape at once
    COLLECTIVE = "collective"  # all nodes of the study, whole


class Experiment(Struct, frozen=True):
    """One job or job array."""

    id: str
    mode: Mode
    nodes: tuple[str, ...]
    partition: str | None
    gpus: int
    jobs: int = 1
    gres: str = "gpu"
    numa: int | None = None  # the NUMA node that it binds itself to
    # the round on its node, counted over all rounds and nodes; None where it is in none
    block: int | None = None
    # cpus, memory_mib: of a job of the shared queue; None in a job that gets all of its nodes
    cpus: int | None = None
    memory_mib: int | None = None
    after: tuple[str, ...] = ()  # experiments that must have ended, well or not
    gpu_type: str | None = None

    @property
    def arrangement(self) -> str:
        """How its jobs are bound and share their node, for the runs that they measure."""
        if self.mode is Mode.EXCLUSIVE:
            return f"exclusive, bound to node {self.numa}"
        what = plural(self.gpus, "GPU") if self.gres == "gpu" else f"{self.gres} slice"
        company = "alone" if self.jobs == 1 else f"{self.jobs} at once"
        return f"shared, {what} a job, {company}"


class Study(Struct, frozen=True):
    """Everything that a study's journal holds."""

    id: str
    options: StudyOptions
    whole: tuple[ClusterNode, ...]  # the nodes of both queues
    shared: tuple[ClusterNode, ...]  # the nodes of both queues
    # the description of a node that the user named; None where look jobs capture each
    host: str | None
    looks: tuple[Experiment, ...] = ()
    # in the order of submission; () until the nodes are known
    experiments: tuple[Experiment, ...] = ()
    jobs: tuple[tuple[str, str], ...] = ()  # (experiment, job id) in the order of submission
    refused: tuple[tuple[str, str], ...] = ()  # (experiment, why)
    # experiments whose earlier jobs do not count any more, once for each time
    repeated: tuple[str, ...] = ()

    def first_round(self) -> tuple[Experiment, ...]:
        return tuple(one for one in self.experiments if one.id.endswith(_FIRST))

    def rounds(self) -> int:
        """That are planned."""
        blocks = (one.block for one in self.experiments if one.block is not None)
        return (max(blocks, default=-1) + 1) // max(1, len({o.nodes for o in self.first_round()}))

    def everything(self) -> tuple[Experiment, ...]:
        return (*self.looks, *self.experiments)

    def latest_jobs(self) -> dict[str, str]:
        """The latest job of each experiment that has one."""
        return dict(self.jobs)

    def attempts_of(self, experiment: str) -> int:
        """How often it was submitted."""
        return self.repeated.count(experiment) + sum(name == experiment for name, _ in self.jobs)


def check_options(options: StudyOptions) -> None:
    """Raises UsageError for what cannot be, or must not stand in a script."""
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
    for shape in options.shapes:
        if not (0 < shape.gpus <= MAX_JOBS and 0 < shape.jobs <= MAX_JOBS):
            raise UsageError(
                f"--shared {shape.gpus}x{shape.jobs}: expected GPUs x jobs of 1 to {MAX_JOBS}"
            )
    for name in options.tests:
        if name not in _TESTS:
            raise UsageError(
                f"--tests {name}: expected a test of homenode bench, found none of this name",
                hint=f"one of {', '.join(sorted(_TESTS))}; none",
            )
    if options.metric is not None:
        check_metric(options.metric)
    if bool(options.app) != (options.metric is not None):
        raise UsageError("--app and --metric: expected both or neither, found one")


def choose_nodes(
    found: tuple[ClusterNode, ...], options: StudyOptions
) -> tuple[tuple[ClusterNode, ...], tuple[ClusterNode, ...]]:
    """Nodes for whole and for shared jobs: named ones, else idle ones before busy ones.

    Nodes of both partitions come first, so that both queues are measured on the same machines.
    Raises UsageError where a partition or a named node is not there or has no GPU.
    """
    whole = _of_partition(found, options.partition_exclusive, "--partition-exclusive")
    name = options.partition_shared or (whole[0].partition if whole else None)
    shared = _of_partition(found, name, "--partition-shared")
    in_both = {node.name for node in whole} & {node.name for node in shared}
    if options.node_list:
        return _named(whole, shared, options.node_list)
    if len(whole) < options.nodes:
        raise UsageError(
            f"--nodes {options.nodes}: expected as many nodes with GPUs in partition "
            f"{whole[0].partition}, found {len(whole)}"
        )
    return _chosen(whole, options.nodes, in_both), _chosen(shared, options.nodes, in_both)


def _named(
    whole: tuple[ClusterNode, ...], shared: tuple[ClusterNode, ...], names: tuple[str, ...]
) -> tuple[tuple[ClusterNode, ...], tuple[ClusterNode, ...]]:
    """Each in the partitions that have it: the two may have no node in common."""
    known = {node.name for node in (*whole, *shared)}
    partitions = dict.fromkeys((whole[0].partition, shared[0].partition))
    for name in names:
        if name not in known:
            raise UsageError(
                f"--nodelist {name}: expected a node of partition {' or '.join(partitions)} with "
                f"GPUs, found none",
                hint=f"their nodes: {', '.join(sorted(known)[:20])}",
            )
    of = [{node.name: node for node in nodes} for nodes in (whole, shared)]
    in_order = tuple(dict.fromkeys(names))
    first, second = (tuple(d[name] for name in in_order if name in d) for d in of)
    if not first:
        raise UsageError(
            f"--nodelist: expected a node of partition {whole[0].partition}, found none",
            hint=f"its nodes: {', '.join(sorted(of[0])[:20])}",
        )
    return first, second


NO_PARTITION = "PARTITION"
"""In scripts for a cluster that was not asked: to be replaced by whoever submits them."""


def described_nodes(host: Host, options: StudyOptions) -> tuple[ClusterNode, ...]:
    """Nodes as a description has them, where there is no Slurm to ask: named ones, else numbered.

    Every one is in both partitions; without a name a partition is NO_PARTITION.
    """
    names = options.node_list or tuple(f"node{n}" for n in range(1, options.nodes + 1))
    gpus = [g for g in host.devices_of_kind(DeviceKind.GPU) if g.physical_function is None]
    memory = sum(node.memory_bytes or 0 for node in host.nodes if node.pus)
    whole = options.partition_exclusive or NO_PARTITION
    return tuple(
        ClusterNode(
            name=name,
            partition=partition,
            is_default=partition == whole,
            state="idle",
            cpus=len(host.pus),
            memory_mib=memory >> 20,
            gpus=len(gpus),
        )
        for partition in dict.fromkeys((whole, options.partition_shared or whole))
        for name in names
    )


def _of_partition(
    found: tuple[ClusterNode, ...], partition: str | None, option: str
) -> tuple[ClusterNode, ...]:
    of = [n for n in found if (n.is_default if partition is None else n.partition == partition)]
    # Of shared nodes some may have nothing but MIG slices.
    takes_slices = option == "--partition-shared"
    with_gpus = tuple(n for n in of if n.gpus or (takes_slices and n.gpus is not None))
    if not with_gpus:
        known = ", ".join(sorted({n.partition for n in found if n.gpus})) or "none"
        what = f"no GPU in its {len(of)} nodes" if of else "no such partition"
        raise UsageError(
            f"{option} {partition or '(the default)'}: expected nodes with GPUs, found {what}",
            hint=f"partitions with GPUs: {known}",
        )
    if not NAME.fullmatch(with_gpus[0].partition):
        raise UsageError(
            f"{option}: expected a partition of letters, digits and . _ - + :, found "
            f"{with_gpus[0].partition!r}"
        )
    return with_gpus


def _chosen(nodes: tuple[ClusterNode, ...], count: int, first: set[str]) -> tuple[ClusterNode, ...]:
    ranks = {"idle": 0, "mixed": 1, "allocated": 2}
    order = sorted(nodes, key=lambda n: (n.name not in first, ranks.get(n.state, 3), n.name))
    return tuple(sorted(order[:count], key=lambda node: node.name))


def nodes_to_bind_to(host: Host, options: StudyOptions) -> tuple[NumaNode, ...]:
    """NUMA nodes with CPUs and memory, or those asked for. Raises UsageError for one without."""
    if options.numa is None:
        return bindable_nodes(host)
    asked = {bindable_node(host, index, "--numa").index for index in options.numa}
    return tuple(node for node in host.nodes if node.index in asked)


def look_experiments(nodes: tuple[ClusterNode, ...]) -> tuple[Experiment, ...]:
    """A short job on each node that captures what it is."""
    return tuple(
        Experiment(
            f"look-{node.name}",
            Mode.LOOK,
            (node.name,),
            node.partition,
            0,
            cpus=1,
            memory_mib=min(node.memory_mib, 512),
        )
        for node in nodes
    )


def experiments_for(
    whole: tuple[ClusterNode, ...],
    shared: tuple[ClusterNode, ...],
    hosts: Mapping[str, Host],
    options: StudyOptions,
) -> tuple[Experiment, ...]:
    """All jobs, in the order in which each node runs them.

    hosts: by cluster node. Raises UsageError as nodes_to_bind_to, and for shapes that fit no node.
    """
    found: list[Experiment] = []
    names = tuple(dict.fromkeys(node.name for node in (*shared, *whole)))
    of_nodes = {name: tuple(_of_node(name, whole, shared, hosts, options)) for name in names}
    for number in range(options.rounds):
        found += _round(of_nodes, number, found)
    if options.between_nodes and len(whole) > 1:
        ends = tuple({one.nodes: one.id for one in found}.values())
        gpus = min(node.gpus or 0 for node in whole)
        types = {node.gpu_type for node in whole}
        names = tuple(node.name for node in whole)
        found.append(
            Experiment(
                "collective",
                Mode.COLLECTIVE,
                names,
                whole[0].partition,
                gpus,
                after=ends,
                gpu_type=types.pop() if len(types) == 1 else None,
            )
        )
    return tuple(found)


def _round(
    of_nodes: Mapping[str, Sequence[Experiment]], number: int, before: Iterable[Experiment]
) -> Iterator[Experiment]:
    """Each node's in an order of its own. One after the other: its wait is then for others' jobs,
    not for this study's own."""
    last = {one.nodes[0]: (one.id,) for one in before}
    for place, (name, experiments) in enumerate(of_nodes.items()):
        known = {one.id: one for one in experiments}
        for own in seeded_order(known, _SEED, number):
            block = number * len(of_nodes) + place
            after = last.get(name, ())
            one = replace(known[own], id=f"{own}-r{number + 1}", block=block, after=after)
            last[name] = (one.id,)
            yield one


def _of_node(
    name: str,
    whole: tuple[ClusterNode, ...],
    shared: tuple[ClusterNode, ...],
    hosts: Mapping[str, Host],
    options: StudyOptions,
) -> Iterator[Experiment]:
    """The jobs of one round on one node."""
    for node in shared:
        if node.name == name:
            yield from _shared(node, options)
    for node in whole:
        if node.name == name:
            yield from _exclusive(node, hosts[name], options)


def _exclusive(node: ClusterNode, host: Host, options: StudyOptions) -> Iterator[Experiment]:
    for numa in nodes_to_bind_to(host, options):
        yield Experiment(
            f"exclusive-{node.name}-numa{numa.index}",
            Mode.EXCLUSIVE,
            (node.name,),
            node.partition,
            node.gpus or 0,
            numa=int(numa.index),
            gpu_type=node.gpu_type,
        )


def _shared(node: ClusterNode, options: StudyOptions) -> Iterator[Experiment]:
    gpus = node.gpus or 0
    fitting = [shape for shape in options.shapes if shape.gres != "gpu" or shape.gpus <= gpus]
    if options.shapes and not fitting:
        raise UsageError(
            f"{node.name}: expected jobs of at most its {gpus} GPUs, found none of this size",
            hint="say --shared GPUSxJOBS",
        )
    for shape in fitting:
        is_slice = shape.gres != "gpu"
        jobs = shape.jobs if is_slice else min(shape.jobs, gpus // shape.gpus)
        parts = max(gpus, jobs) if is_slice else gpus
        alone = Experiment(
            f"{shape.name}-{node.name}-alone",
            Mode.ALONE,
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
            yield replace(alone, id=several, mode=Mode.TOGETHER, jobs=jobs)
