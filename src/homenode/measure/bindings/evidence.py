"""Study evidence: one job of a study: what it got, and the figures that it measured."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from homenode.bdf import Bdf
from homenode.findings import Findings
from homenode.gap import Gap
from homenode.indices import NodeIndex
from homenode.measure.bindings.experiments import Experiment, Mode
from homenode.measure.bindings.power import Power, power_of
from homenode.measure.bindings.record import JobRecord, parse_record
from homenode.measure.bindings.scripts import arrangement_of
from homenode.measure.imported.runs import ImportWishes, SourceFolder, imported_runs
from homenode.results.model import (
    UNKNOWN_SWITCHES,
    Condition,
    GpuPlace,
    Origin,
    Run,
    RunHead,
    Sample,
)
from homenode.results.vantage import Vantage
from homenode.slurm.audit import audit
from homenode.slurm.job_allocation import (
    AllocatedGpu,
    JobAllocation,
    NodeMachine,
    NodeTree,
    allocation_on,
)

_COPIES = "nvbandwidth.txt"
_BOUND = "exclusive, bound to each node in turn"


@dataclass(frozen=True, slots=True)
class JobEvidence:
    """One task of an experiment.

    name: unique in the study. node: of the cluster. bound_to: the NUMA node where memory was bound;
    None where it may lie on several. cpu_nodes, memory_nodes: NUMA nodes that it might use, () =
    not known. homes: (GPU address, its NUMA node); homes_measured: nobody told, the figures did.
    placement: what the audit says; None where there is nothing to judge by. record: None for
    figures that others have kept without one. system: its GPUs; None = not known.
    """

    name: str
    mode: Mode
    node: str
    gres: str
    gpus: int
    bound_to: int | None
    cpu_nodes: tuple[int, ...]
    memory_nodes: tuple[int, ...]
    samples: tuple[Sample, ...]
    homes: tuple[tuple[str, int], ...] = ()
    homes_measured: bool = False
    power: tuple[Power, ...] = ()
    placement: Findings | None = None
    record: JobRecord | None = None
    replayed: str | None = None
    run: Run | None = None
    gaps: tuple[Gap, ...] = ()
    system: str | None = None


def evidence_of(
    experiment: Experiment,
    name: str,
    texts: Mapping[str, str],
    machine: NodeMachine | None,
    app: tuple[Sample, ...] = (),
) -> JobEvidence:
    """The evidence of an attempt's files. machine: what the node is, where it is described.

    app: figures of the user's own program.
    """
    record = parse_record(texts, experiment.nodes[0], experiment.gpus)
    copies = {_COPIES: texts.get(_COPIES, "")}
    folder = SourceFolder(f"raw/{name}", name, experiment.id, copies)
    found = imported_runs([folder], ImportWishes(vantage=Vantage.JOB)) if copies[_COPIES] else ()
    homes = tuple(_homes(record, machine))
    run = _run(experiment, name, record, homes, (found[0].run if found else None, app))
    show = record.show
    memory = () if show is None else tuple(int(node) for node in show.memory_nodes)
    gaps = list(record.gaps)
    gaps += [gap for one in found for gap in one.gaps if gap.subject not in ("layout", "vantage")]
    return JobEvidence(
        name,
        experiment.mode,
        record.node,
        experiment.gres,
        experiment.gpus,
        memory[0] if len(memory) == 1 else None,
        () if show is None else tuple(int(node) for node in show.cpu_nodes),
        memory,
        run.samples,
        homes,
        power=tuple(power_of(texts, run.samples)),
        placement=placement_of(record, machine),
        record=record,
        replayed=record.replayed,
        run=run,
        gaps=tuple(gaps),
        system=found[0].run.head.system if found and found[0].run.samples else None,
    )


def _run(
    experiment: Experiment,
    name: str,
    record: JobRecord,
    homes: tuple[tuple[str, int], ...],
    measured: tuple[Run | None, tuple[Sample, ...]],
) -> Run:
    """measured: what was read of its copies, and figures of the user's own program."""
    imported, app = measured
    head = RunHead(name, "cpu-only", Origin.IMPORTED, Vantage.JOB, UNKNOWN_SWITCHES)
    samples: tuple[Sample, ...] = ()
    if imported is not None:
        head, samples = imported.head, imported.samples
    conditions = [*head.conditions, Condition("queue", str(experiment.mode))]
    if record.met is not None:
        conditions.append(Condition("jobs measuring at once", record.met))
    if record.replayed is not None:
        conditions.append(Condition("replayed", record.replayed))
    head = replace(
        head,
        name=name,
        origin=head.origin if record.replayed is None else Origin.SYNTHESISED,
        # Figures say which node they are of: all of a node's make one matrix.
        arrangement=_BOUND if experiment.mode is Mode.EXCLUSIVE else arrangement_of(experiment),
        host=record.node,
        pus=record.pus,
        gpus=tuple(GpuPlace(Bdf.parse(gpu), node) for gpu, node in homes),
        host_addresses=True,
        conditions=tuple(conditions),
        source=f"raw/{name}",
        started_s=record.started_s,
        ended_s=record.ended_s,
    )
    return Run(head, (*samples, *app))


def _homes(record: JobRecord, machine: NodeMachine | None) -> Iterator[tuple[str, int]]:
    """By the job's own look at the kernel's tree, else by the machine's description."""
    if record.gpus:
        yield from ((str(gpu.bdf), int(gpu.node)) for gpu in record.gpus if gpu.node is not None)
    elif machine is not None:
        yield from (
            (str(gpu.bdf), int(gpu.node))
            for gpu in machine.gpus
            if gpu.bdf is not None and gpu.node is not None
        )


def placement_of(record: JobRecord, machine: NodeMachine | None) -> Findings | None:
    """Are its GPUs, CPUs and memory on the same nodes: by its own record, else by Slurm's word.

    None where neither tells of GPUs.
    """
    held = list(_held(record, machine))
    return audit(held) if held else None


def _held(record: JobRecord, machine: NodeMachine | None) -> Iterator[JobAllocation]:
    job = record.job
    if record.gpus and record.hardware is not None and record.pus is not None:
        yield _by_record(record)
    elif job is not None and machine is not None:
        for share in job.shares:
            yield allocation_on(job, share, machine, None)


def _by_record(record: JobRecord) -> JobAllocation:
    hardware, show = record.hardware, record.show
    assert hardware is not None
    pus_of_node = {node.index: node.pus for node in hardware.nodes}
    indices = [node.index for node in hardware.nodes]
    distances = hardware.distances or ()
    homes = tuple(_home(gpu.node, pus_of_node) for gpu in record.gpus)
    job = record.job
    bound = None
    if show is not None and show.policy == "bind":
        bound = frozenset(show.memory_nodes)
    return JobAllocation(
        "unknown" if job is None else job.id,
        record.node,
        "" if job is None else job.name,
        None,
        # What it measured ran where it bound itself, which is within what Slurm gave it.
        record.pus if show is None else show.pus or record.pus,
        tuple(
            AllocatedGpu(None, gpu.bdf, home) for gpu, home in zip(record.gpus, homes, strict=True)
        ),
        NodeTree(
            pus_of_node,
            None,
            frozenset(),
            {
                (a, b): row[column]
                for a, row in zip(indices, distances, strict=False)
                for column, b in enumerate(indices)
            },
        ),
        None if record.mems is None else frozenset(NodeIndex(node) for node in record.mems),
        bound,
    )


def _home(node: NodeIndex | None, pus_of_node: Mapping[NodeIndex, object]) -> NodeIndex | None:
    return node if node is not None and pus_of_node.get(node) else None
