"""Recommend: one verdict per objective and machine, from the best evidence there is.

The ladder: measured here; measured on this kind of host; published of this kind of host; reasoned
from topology. A verdict says on which rung it stands, and a rung that cannot tell passes on.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from homenode.analyse.verdict import Rung, Verdict, verdict
from homenode.analyse.words import percent_text
from homenode.evidence.model import Evidence, System
from homenode.metrics import METRICS, Metric, primaries
from homenode.objective import Objective
from homenode.pci import DeviceKind
from homenode.plan.fingerprint import host_fingerprint
from homenode.plan.layout import PRESETS, GuestPcie, MemoryBinding
from homenode.plan.published import choose
from homenode.results.model import Origin, Run
from homenode.topology import Host

_UNTOLD = "not said"


def from_published(
    evidence: Sequence[Evidence],
    objectives: Sequence[Objective],
    systems: Collection[str] | None = None,
) -> tuple[Verdict, ...]:
    """What published figures support, system by system, where they tell of the objective.

    systems: of these alone.
    """
    found = []
    for document in evidence:
        for system in document.systems:
            if system.host is None:
                continue  # rules of thumb of no machine
            if systems is not None and system.name not in systems:
                continue
            for objective in objectives:
                made = _published(document, system, objective, evidence)
                if _says_something(made):
                    found.append(made)
    return tuple(found)


def from_results(
    runs: Sequence[Run], objectives: Sequence[Objective], evidence: Sequence[Evidence]
) -> tuple[Verdict, ...]:
    """Verdicts of results, machine by machine; objectives without a figure left out.

    Published runs among them stand for their whole system.
    """
    printed = {run.head.system for run in runs if run.head.origin is Origin.PUBLISHED}
    machines: dict[tuple[str, str | None], list[Run]] = {}
    for run in runs:
        if run.head.origin is Origin.PUBLISHED:
            continue
        machines.setdefault((run.head.system, run.head.host or run.head.host_kind), []).append(run)
    several = {system for system, _ in machines}
    verdicts = []
    for (system, host), those in machines.items():
        name = system if len(several) == len(machines) else f"{system} on {host or 'some host'}"
        for objective in objectives:
            if _has_figures(those, objective):
                made = verdict(name, those, objective, Rung.MEASURED_HERE)
                verdicts.append(_with_pages(made, evidence))
    return (*verdicts, *from_published(evidence, objectives, printed))


def for_host(
    host: Host, runs: Sequence[Run], objectives: Sequence[Objective], evidence: Sequence[Evidence]
) -> tuple[Verdict, ...]:
    """One verdict per objective for a host, each from the highest rung that can tell."""
    return tuple(_highest(host, runs, one, evidence) for one in objectives)


def _highest(
    host: Host, runs: Sequence[Run], objective: Objective, evidence: Sequence[Evidence]
) -> Verdict:
    silent: list[str] = []
    for made in _ladder(host, runs, objective, evidence):
        if made.choice is not None:
            return replace(made, notes=(*made.notes, *silent))
        silent.append(f"{made.rung}, {made.system}: {made.statement}")
    reasoned = _reasoned(host, objective, evidence)
    return replace(reasoned, notes=(*reasoned.notes, *silent))


def host_kind(host: Host) -> str:
    """A text that is equal for machines of one kind: packages, processor, GPUs."""
    gpus = [gpu.name or str(gpu.device_id) for gpu in host.devices_of_kind(DeviceKind.GPU)
            if gpu.physical_function is None]  # fmt: skip
    counted = [f"{gpus.count(name)}x {name}" for name in dict.fromkeys(gpus)]
    cpu = f"{len(host.packages)}x {host.cpu.name or 'unknown processor'}"
    return ", ".join([cpu, *counted])


def _ladder(
    host: Host, runs: Sequence[Run], objective: Objective, evidence: Sequence[Evidence]
) -> Iterator[Verdict]:
    fingerprint, kind = host_fingerprint(host), host_kind(host)
    here = [run for run in runs if run.head.host == fingerprint]
    like = [run for run in runs if run.head.host_kind == kind and run not in here]
    for rung, those in ((Rung.MEASURED_HERE, here), (Rung.MEASURED_ON_KIND, like)):
        if those and _has_figures(those, objective):
            yield _with_pages(verdict(host.name, those, objective, rung), evidence)
    for document in evidence:
        for system in document.systems:
            if _is_kind(host, system):
                yield _published(document, system, objective, evidence)


def _is_kind(host: Host, system: System) -> bool:
    """A published system is this host's kind where processor and GPU bear the published names."""
    if system.host is None:
        return False
    if system.host == host.name:
        return True
    names = [gpu.name or "" for gpu in host.devices_of_kind(DeviceKind.GPU)]
    if system.cpu is None or system.gpu is None or host.cpu.name is None:
        return False
    model = system.cpu.split()[-1]
    processor = re.search(rf"\b{re.escape(model)}\b", host.cpu.name, re.IGNORECASE)
    card = re.compile(rf"\b{re.escape(system.name)}\b", re.IGNORECASE)
    return processor is not None and any(card.search(name) for name in names)


def _published(
    document: Evidence, system: System, objective: Objective, evidence: Sequence[Evidence]
) -> Verdict:
    runs = [run for run in document.runs if run.head.system == system.name]
    made = verdict(system.name, runs, objective, Rung.PUBLISHED)
    metrics = frozenset(metric.id for metric in _metrics(made, objective))
    notes = [
        f"{note.certainty}: {note.text}" + "".join(f" [{line}]" for line in note.arithmetic)
        for note in document.notes
        if note.metrics and note.is_about(system.name, metrics)
    ]
    advice = [
        f"{_labels(document, one.choices)}: {one.source}"
        for one in document.advice
        if one.objective is objective and one.system in (None, system.name)
    ]
    statement = made.statement
    if system.remedy is not None:
        statement += f"; {system.remedy}"
    return _with_pages(
        replace(made, statement=statement, notes=tuple(notes), advice=tuple(advice)), evidence
    )


def _metrics(made: Verdict, objective: Objective) -> Iterator[Metric]:
    yield from primaries(objective)
    yield from (METRICS[one.metric] for one in made.standings)


def _labels(document: Evidence, choices: Sequence[str]) -> str:
    found = [document.choice(name) for name in choices]
    labels = [one.arrangement or one.switches.name for one in found if one is not None]
    return "its authors advise " + (" or ".join(labels) or "none")


def _says_something(made: Verdict) -> bool:
    return bool(made.standings or made.advice) or made.statement.startswith(
        ("excluded", "nothing to go by: zero")
    )


def _has_figures(runs: Sequence[Run], objective: Objective) -> bool:
    metrics = {metric.id for metric in primaries(objective)}
    metrics |= {metric.id for metric in METRICS.values() if objective in metric.stands_in}
    return any(sample.metric in metrics for run in runs for sample in run.samples)


def _with_pages(made: Verdict, evidence: Sequence[Evidence]) -> Verdict:
    """Huge pages are advised from what is published of them, where nothing was measured."""
    if made.choice is None or made.huge_pages != _UNTOLD:
        return made
    return replace(made, huge_pages=huge_page_advice(evidence))


def huge_page_advice(evidence: Sequence[Evidence]) -> str:
    """What published figures say of huge pages, with their source; "not said" where none do."""
    for document in evidence:
        for run in document.runs:
            if run.head.arrangement == "huge pages":
                values = sorted(
                    sample.value for sample in run.samples if sample.metric == "memory-bandwidth"
                )
                low, high = (percent_text(value) for value in (values[0], values[-1]))
                return f"yes, {low} to {high} of memory bandwidth at times ({document.id})"
    return _UNTOLD


def _reasoned(host: Host, objective: Objective, evidence: Sequence[Evidence]) -> Verdict:
    """What topology alone says: with one node there is nothing to mirror."""
    nodes = [node for node in host.nodes if node.pus]
    gpus = [gpu for gpu in host.devices_of_kind(DeviceKind.GPU) if gpu.physical_function is None]
    chosen = choose(objective, has_gpus=bool(gpus), mirrors_pcie=True)
    layout, why = chosen.layout, list(chosen.evidence)
    if len(nodes) == 1:
        layout = PRESETS["pin"]
        why = ["the host has one node: cells and expander buses have nothing to show"]
    placed = {gpu.node for gpu in gpus if gpu.node is not None}
    measure = None
    talks = objective in (Objective.COLLECTIVE, Objective.DEVICE_TRANSFER)
    if talks and len(nodes) > 1 and gpus and layout.pcie is GuestPcie.AS_IT_WAS:
        measure = "pin-numa-pci"
        why.append(f"{len(gpus)} GPUs on {len(placed)} of {len(nodes)} nodes")
    per_cell = layout.memory is MemoryBinding.BOUND_PER_CELL
    return Verdict(
        objective, host.name, Rung.REASONED, layout.name, layout.name, (), (),
        "strict, per cell" if per_cell else "as the document has it",
        huge_page_advice(evidence),
        f"{layout.name}: " + "; ".join(why), (), (), measure,
        notes=() if len(nodes) == 1 else chosen.doubts,
    )  # fmt: skip
