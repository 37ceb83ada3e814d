"""Document: a whole report as values: what the templates write down and nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from homenode.analyse.comparison import Doubt
from homenode.analyse.matrices import FigureMatrix, Locality, localities, matrices_of
from homenode.analyse.switch_effects import Switch
from homenode.analyse.verdict import titles_of
from homenode.analyse.words import figure_text
from homenode.bdf import Bdf
from homenode.evidence.model import FieldReport, Publication
from homenode.metrics import METRICS, Metric
from homenode.objective import Objective
from homenode.pci import DeviceKind
from homenode.report.page.across import LinkSpeedRow, across_pictures, link_speed_rows
from homenode.report.page.collectives import ChainLink, collective_chain
from homenode.report.page.detail_pictures import (
    device_pictures,
    fairness_picture,
    kernel_pictures,
    profile_picture,
)
from homenode.report.page.host_part import HostPart, host_part
from homenode.report.page.machine import Machine
from homenode.report.page.pictures import (
    Picture,
    bar_pictures,
    curve_pictures,
    forest_pictures,
    heat_pictures,
    locality_pictures,
    path_pictures,
)
from homenode.report.page.printed import (
    Printed,
    SourcePart,
    field_reports,
    printed_part,
    source_parts,
)
from homenode.report.page.tables import EffectRow, Table, effect_rows, summary_table
from homenode.report.page.verdict_card import VerdictCard, verdict_card
from homenode.report.verdict_text import SAID_BY_LEVEL


@dataclass(frozen=True, slots=True)
class LocalityRow:
    """Local against remote, in words. ratio: "" where there is no remote side."""

    what: str
    alternative: str
    local: str
    remote: str
    ratio: str
    basis: str


@dataclass(frozen=True, slots=True)
class EnvironmentRow:
    """One condition, with what each alternative had. differs: they had not the same."""

    name: str
    values: tuple[str, ...]
    differs: bool


@dataclass(frozen=True, slots=True)
class Environment:
    """What figures were taken under. labels: of the columns."""

    labels: tuple[str, ...]
    rows: tuple[EnvironmentRow, ...]


@dataclass(frozen=True, slots=True)
class MachinePart:
    """Everything of one machine below its card."""

    card: VerdictCard
    printed: Printed
    forests: tuple[Picture, ...]
    bars: tuple[Picture, ...]
    details: tuple[Picture, ...]
    curves: tuple[Picture, ...]
    heats: tuple[Picture, ...]
    paths: tuple[Picture, ...]
    localities: tuple[LocalityRow, ...]
    locality_bars: tuple[Picture, ...]
    host: HostPart
    environment: Environment
    doubts: tuple[Doubt, ...]
    notes: tuple[str, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """A report. made: when and by what. hatches: patterns that its topology pictures share.

    chain: from figures of collectives to a cause. objectives: (name, use, the metrics that decide),
    the columns of the decisions. sources, field: what publications say of no single machine, and
    figures that decide nothing. skipped: folders that were left out, with the reason.
    """

    title: str
    made: str
    runs: int
    objectives: tuple[tuple[str, str, str], ...]
    across: tuple[Picture, ...]
    chain: tuple[ChainLink, ...]
    link_speeds: tuple[LinkSpeedRow, ...]
    sources: tuple[SourcePart, ...]
    field: tuple[tuple[FieldReport, str], ...]
    parts: tuple[MachinePart, ...]
    summary: Table
    switches: tuple[str, ...]
    effects: tuple[EffectRow, ...]
    metrics: tuple[Metric, ...]
    hatches: str
    skipped: tuple[str, ...]


def document_of(
    machines: Sequence[Machine],
    skipped: Sequence[str],
    made: str,
    *,
    title: str = "homenode report",
    with_style: bool = False,
    publications: Sequence[Publication] = (),
) -> Document:
    """The report on these machines.

    publications: whose general part is shown where one of their machines is. with_style: pictures
    have style sheets of their own, for a renderer that does not look outside.
    """
    anchors = [f"machine-{number}" for number in range(1, len(machines) + 1)]
    parts = [
        _part(machine, anchor, with_style)
        for machine, anchor in zip(machines, anchors, strict=True)
    ]
    measured = {
        key.metric for machine in machines for one in machine.series.values() for key in one
    }
    published = [machine.runs[0].head.system for machine in machines if machine.is_published]
    return Document(
        title,
        made,
        sum(len(machine.runs) for machine in machines),
        tuple((str(one), one.use, titles_of(one)) for one in Objective),
        tuple(across_pictures(machines)),
        collective_chain(machines, publications),
        link_speed_rows(machines, anchors),
        tuple(source_parts(publications, published)) if published else (),
        field_reports(publications) if published else (),
        tuple(parts),
        summary_table(machines, anchors),
        tuple(switch.value for switch in Switch),
        effect_rows(machines),
        tuple(metric for metric in METRICS.values() if metric.id in measured),
        next((one.hatches for part in parts for one in part.host.maps), ""),
        tuple(skipped),
    )


def _part(machine: Machine, anchor: str, with_style: bool) -> MachinePart:
    verdicts = machine.verdicts
    sources = [
        *(s for one in verdicts for s in one.sources),
        *(run.head.source for run in machine.runs if run.head.source),
    ]
    matrices = {one.label: matrices_of(one) for one in machine.every}
    near_and_far = _localities(machine, matrices)
    printed = printed_part(machine)
    return MachinePart(
        verdict_card(machine, anchor),
        printed,
        tuple(forest_pictures(machine)),
        tuple(bar_pictures(machine)),
        (
            *kernel_pictures(machine),
            *profile_picture(machine),
            *fairness_picture(machine),
            *device_pictures(machine),
        ),
        tuple(curve_pictures(machine)),
        tuple(heat_pictures(machine, matrices)),
        tuple(path_pictures(machine)),
        tuple(map(_locality_row, near_and_far)),
        tuple(locality_pictures(near_and_far)),
        host_part(machine, with_style=with_style),
        _environment(machine),
        tuple(
            one for one in machine.doubts if not (machine.is_published and one.id in SAID_BY_LEVEL)
        ),
        () if machine.is_published else tuple(dict.fromkeys(n for v in verdicts for n in v.notes)),
        () if machine.is_published else tuple(dict.fromkeys(sources)),
    )


def _localities(machine: Machine, matrices: Mapping[str, Sequence[FigureMatrix]]) -> list[Locality]:
    node_of = _nodes_of_gpus(machine)
    return [
        found for one in machine.every for found in localities(one, node_of, matrices[one.label])
    ]


def _nodes_of_gpus(machine: Machine) -> dict[Bdf, int]:
    """From the host, where it is known; else from what runs on host addresses say."""
    found: dict[Bdf, int] = {}
    for run in machine.runs:
        found |= {gpu.device: gpu.node for gpu in run.head.gpus if gpu.node is not None}
    if machine.host is not None:
        for device in machine.host.devices_of_kind(DeviceKind.GPU):
            if device.node is not None:
                found[device.bdf] = int(device.node)
    return found


def _locality_row(one: Locality) -> LocalityRow:
    metric = METRICS.get(one.key.metric)
    what = [one.key.metric if metric is None else metric.title, one.key.variant]
    remote = "" if one.remote is None else figure_text(one.remote, one.key.unit)
    ratio = "" if one.ratio is None else f"{one.ratio:.2f}x"
    return LocalityRow(
        ", ".join(filter(None, what)),
        one.alternative,
        f"{figure_text(one.local, one.key.unit)} ({one.cells[0]})",
        f"{remote} ({one.cells[1]})" if remote else "",
        ratio,
        one.stated,
    )


def _environment(machine: Machine) -> Environment:
    """Nothing of a published machine: what is known of its runs is printed as it was."""
    every = () if machine.is_published else machine.every
    labels = tuple(one.label for one in every)
    columns: list[dict[str, dict[str, None]]] = []
    for one in every:
        found: dict[str, dict[str, None]] = {}
        for run in one.runs:
            head = run.head
            facts = [("ran in", str(head.vantage)), ("figures", str(head.origin))]
            facts += [("vCPUs", str(head.vcpus))] if head.vcpus is not None else []
            facts += [("pages", f"{head.page_bytes} bytes")] if head.page_bytes else []
            facts += [("memory mode", head.memory_mode)] if head.memory_mode else []
            facts += [("PUs", str(head.pus))] if head.pus is not None else []
            facts += [
                (f"GPU {gpu.device}", "numa_node -1" if gpu.node is None else f"node {gpu.node}")
                for gpu in head.gpus
            ]
            facts += [(c.name, c.value) for c in head.conditions]
            for name, value in facts:
                found.setdefault(name, {})[value] = None
        columns.append(found)
    names = dict.fromkeys(name for column in columns for name in column)
    rows = []
    for name in names:
        values = tuple(", ".join(column.get(name, {})) for column in columns)
        rows.append(EnvironmentRow(name, values, len(set(filter(None, values))) > 1))
    return Environment(labels, tuple(rows))
