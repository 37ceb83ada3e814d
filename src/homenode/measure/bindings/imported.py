"""Study import: figures of a study that was run without homenode, as evidence.

    exclusive_4gpu_node{0,1,2,3}.txt
    shared_array_1gpu_node{0,1,2,3}.txt  shared_array_2gpu_node{0,1}.txt

Logs of nvbandwidth below the binding of each job, as `homenode import` reads them: which queue a
log is of is seen by its name. There is no record of places, waits or neighbours. Source: the GH200
study of 2025-12, appendix B.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from homenode.measure.bindings.evidence import JobEvidence
from homenode.measure.bindings.experiments import Mode
from homenode.measure.bindings.figures import measured_homes
from homenode.measure.bindings.record import REPLAYED
from homenode.measure.figures.binding import Binding, sections
from homenode.measure.imported.runs import ImportWishes, SourceFolder, imported_runs
from homenode.results.model import Origin, Run, Sample
from homenode.results.vantage import Vantage

_NODE = "the node"
"""The logs name none: all of them are of one machine."""


def mode_of(name: str) -> Mode | None:
    """The queue of a log or a series of logs; None for one of neither.

    >>> mode_of("exclusive_4gpu"), mode_of("shared_array_2gpu"), mode_of("hgx")
    (<Mode.EXCLUSIVE: 'exclusive'>, <Mode.TOGETHER: 'together'>, None)
    """
    words = name.lower().replace("-", "_").split("_")
    if "exclusive" in words:
        return Mode.EXCLUSIVE
    return Mode.TOGETHER if "shared" in words else None


def is_of_a_queue(run: Run) -> bool:
    """True for runs of a study, and for those of logs that are named as its jobs are."""
    return mode_of(run.head.name) is not None or any(c.name == "queue" for c in run.head.conditions)


def evidence_of_logs(folders: Iterable[SourceFolder]) -> tuple[JobEvidence, ...]:
    """A job for each log of the two queues; other files are left out."""
    found = []
    for folder in folders:
        for name, text in sorted(folder.texts.items()):
            mode = mode_of(name.rpartition(".")[0])
            alone = replace(folder, texts={name: text})
            if mode is not None:
                runs = imported_runs([alone], ImportWishes(vantage=Vantage.JOB))
                samples = tuple(sample for one in runs for sample in one.run.samples)
                if samples:
                    one = _of_log(name, mode, text, samples)
                    found.append(replace(one, system=runs[0].run.head.system))
    return with_homes(found)


def _of_log(name: str, mode: Mode, text: str, samples: tuple[Sample, ...]) -> JobEvidence:
    bindings = [section.binding for section in sections(text) if section.binding is not None]
    binding = bindings[0] if bindings else None
    said = REPLAYED.search(text)
    return _evidence(name, mode, samples, binding, said[1].strip() if said else None)


def evidence_of_runs(runs: Iterable[Run]) -> tuple[JobEvidence, ...]:
    """A job for each NUMA node of each series of the two queues; other runs are left out.

    A run no longer tells which log a figure is from. Of jobs on several nodes a new one begins
    where tests begin again on other GPUs; jobs that had the same GPUs one after the other are one.
    """
    return with_homes(
        [replace(one, system=run.head.system) for run in runs for one in _of_run(run)]
    )


def _of_run(run: Run) -> Iterator[JobEvidence]:
    mode = mode_of(run.head.name)
    if mode is None:
        return
    conditions = {c.name: c.value for c in run.head.conditions}
    is_strict = conditions.get("memory binding") == "one node"
    by_node: dict[int | None, list[Sample]] = {}
    current: int | None = None
    for sample in run.samples:
        # Copies between GPUs have no node of their own: they stand behind their job's host copies.
        current = sample.node if sample.node is not None else current
        by_node.setdefault(current, []).append(sample)
    said = conditions.get("replayed")
    if run.head.origin is Origin.SYNTHESISED and said is None:
        said = "synthesised"
    for node, samples in by_node.items():
        if node is None:
            parts = _by_log(samples)
            for number, part in enumerate(parts):
                name = run.head.name if len(parts) == 1 else f"{run.head.name}, job {number}"
                yield _evidence(name, mode, tuple(part), Binding((), ()), said)
        else:
            binding = Binding((node,), (node,) if is_strict else ())
            yield _evidence(f"{run.head.name}, node {node}", mode, tuple(samples), binding, said)


def _by_log(samples: list[Sample]) -> list[list[Sample]]:
    """The samples of each job, where they can be told apart."""
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


def _evidence(
    name: str, mode: Mode, samples: tuple[Sample, ...], binding: Binding | None, said: str | None
) -> JobEvidence:
    """gpus: as many as were copied to. A job that names none copied to none."""
    devices = {s.device or s.index for s in samples if s.metric == "h2d-bandwidth"}
    cpus, memory = ((), ()) if binding is None else (binding.cpu_nodes, binding.memory_nodes)
    return JobEvidence(
        name,
        mode,
        _NODE,
        "gpu",
        len(devices),
        memory[0] if len(memory) == 1 else None,
        cpus,
        memory,
        samples,
        replayed=said,
    )


def with_homes(jobs: list[JobEvidence]) -> tuple[JobEvidence, ...]:
    """With each GPU's home, by measuring from whole nodes."""
    homes = measured_homes([job for job in jobs if job.mode is Mode.EXCLUSIVE])
    told = tuple(sorted(homes.items()))
    return tuple(replace(one, homes=told, homes_measured=True) for one in jobs)
