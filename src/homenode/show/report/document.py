"""Document: a complete report on machines and published results, as one document."""

from collections.abc import Iterator, Sequence
from itertools import islice

from msgspec import structs

from homenode.bdf import Bdf
from homenode.decide.matrices import CopyLocality, build_matrices, compare_localities
from homenode.decide.summary import power_by_test
from homenode.decide.switch_effects import file_effects
from homenode.doc import (
    Cell,
    Doc,
    Gallery,
    Items,
    Part,
    Picture,
    Section,
    Span,
    Table,
    Text,
    format_plain,
)
from homenode.findings import Caveat, Gap
from homenode.machine.pci import DeviceKind
from homenode.metrics import METRICS, format_value
from homenode.show.report.across import (
    build_across_pictures,
    build_effects_table,
    build_summary_table,
    link_speeds,
)
from homenode.show.report.answer import (
    answer_section,
    build_answers_table,
    build_machines_table,
    format_machine,
    format_machines,
    stop_of,
)
from homenode.show.report.machine import (
    HostSections,
    ReportedMachine,
    build_host_part,
    format_hosts,
    map_sections,
)
from homenode.show.report.pictures import (
    build_bar_pictures,
    build_curve_pictures,
    build_device_pictures,
    build_fairness_picture,
    build_forest_pictures,
    build_heat_pictures,
    build_kernel_pictures,
    build_locality_pictures,
    build_mean_pictures,
    build_product_picture,
    profile_picture,
)
from homenode.show.results_text import SAID_BY_LEVEL, build_power_table, file_text, format_place
from homenode.units import format_bytes

_EFFECTS = (
    "What each switch of a layout changed, over the machines where two layouts show it: pinning "
    "over default; bound memory and guest cells over pin; guest PCIe and siblings over guest "
    "cells. Risk: the largest loss that matters. \u25b2 better, \u25bc worse, \u25b2\u25bc both, "
    "by machine. Pinning hides siblings; cells bind memory; siblings double the vCPUs."
)
_INTERVALS = (
    "Intervals: 95 %, over boots (t, on the logarithms of their medians); primary metrics are "
    "corrected for their number. Published results are one run each and have no interval."
)


MAX_PICTURES = 4
"""Limit of pictures for one machine in a report without appendix: one row of a page."""

MAX_NAMED = 3
"""Machines in a title."""

MAX_CAVEATS = 12
"""Maximum before the details of each machine."""


def build_report(
    machines: Sequence[ReportedMachine],
    gaps: Sequence[Gap],
    creation_time: str,
    *,
    title: str | None = None,
    paper: bool = False,
    appendix: bool = True,
) -> Doc:
    """Return the report on these machines: answers first, then each machine's details.

    creation_time: when and by what. gaps: directories that were omitted, with the reason. title:
    None = from the machines' names. paper: pictures have their own style sheets, and topologies are
    at the end. appendix: every result, caveat and remark of each machine; False: what a reader
    needs to judge the answer.
    """
    anchors = [f"machine-{number}" for number in range(1, len(machines) + 1)]
    pairs = list(zip(machines, anchors, strict=True))
    hosts = [build_host_part(machine, paper=paper) for machine in machines] if appendix else []
    table = build_machines_table(machines, anchors)
    by_machine = Section("What to run on each machine", (table,), "machines", "Machines")
    sections = [answer_section(machines, anchors), by_machine]
    sections += [_build_evidence(machines), _build_caveats(machines)]
    if appendix:
        sections.append(_build_data(machines, anchors, gaps, paper=paper))
        details: list[Part] = [
            _build_machine(machine, anchor, host, paper=paper)
            for (machine, anchor), host in zip(pairs, hosts, strict=True)
        ]
        details += [_build_topologies(machines, hosts)] if paper else []
        sections.append(Section("Details of each machine", tuple(details), "appendix"))
    else:
        sections += [_build_brief(machine, anchor) for machine, anchor in pairs]
        sections.append(_build_tests(machines))
    return Doc(
        title or format_title(machines),
        tuple(section for section in sections if section.parts),
        creation_time,
        "Made by homenode; needs no network. Results as rows: homenode report --csv or --json"
        + ("." if appendix else "; all of each machine: --appendix."),
        next((host.hatches for host in hosts if host.hatches), ""),
    )


def format_title(machines: Sequence[ReportedMachine]) -> str:
    """Return the question and subject of the page: the machines by the user's names."""
    names = ", ".join(machine.name for machine in machines)
    about = names if len(machines) <= MAX_NAMED else format_machines(machines)
    is_published = bool(machines) and all(machine.is_published for machine in machines)
    return f"Which layout to run: {about}{', published results' if is_published else ''}"


def _build_evidence(machines: Sequence[ReportedMachine]) -> Section:
    """Return the effect of each switch of a layout, and all machines on one axis."""
    table = build_effects_table(machines)
    parts: list[Part] = (
        [] if table is None else [Section("Effects and risks", (table,), about=_EFFECTS)]
    )
    parts += _build_pictures("Machines compared", "", build_across_pictures(machines))
    speeds = link_speeds(machines)
    if speeds.rows:
        parts.append(Section("PCIe links and copies", (speeds,)))
    return Section("Evidence", tuple(parts), "evidence", "Evidence")


def _build_caveats(machines: Sequence[ReportedMachine]) -> Section:
    """Return each caveat once with its machines; then the method of the intervals."""
    names: dict[tuple[str, str, str], dict[str, None]] = {}
    for machine in machines:
        for caveat in _own_caveats(machine):
            names.setdefault((caveat.id, caveat.detail, caveat.fix), {})[machine.name] = None
    items = tuple(
        (Span(", ".join(subjects), "bold"), f": {detail}. Fix: {fix}. ", Span(name, "dim small"))
        for (name, detail, fix), subjects in islice(names.items(), MAX_CAVEATS)
    )
    parts: list[Part] = [Items(items)] if items else []
    if len(names) > MAX_CAVEATS:
        parts.append(Text(f"{len(names) - MAX_CAVEATS} more with the details of each machine."))
    parts.append(Text(_INTERVALS, "dim small"))
    if sources := _list_references(machines):
        parts.append(Section("Sources", (Items(sources),)))
    return Section("Caveats", tuple(parts), "caveats", "Caveats")


def _build_data(
    machines: Sequence[ReportedMachine],
    anchors: Sequence[str],
    gaps: Sequence[Gap],
    *,
    paper: bool,
) -> Section:
    parts: list[Part] = [
        build_summary_table(machines, anchors, paper=paper),
        _build_tests(machines),
    ]
    details = Span("Details of each machine", link="appendix")
    parts.append(Text((details, ": every result, picture and setting.")))
    if gaps:
        parts.append(Section("Skipped", (Items(tuple(map(str, gaps))),), "skipped"))
    return Section("Data", tuple(parts), "data", "Data")


def _build_pictures(title: str, about: str, pictures: Iterator[Picture]) -> Iterator[Section]:
    if shown_pictures := tuple(pictures):
        yield Section(title, (Gallery(shown_pictures),), about=about)


def _build_machine(
    machine: ReportedMachine, anchor: str, host: HostSections, *, paper: bool
) -> Section:
    parts: list[Part] = _build_heading(machine)
    if machine.recommendations and not stop_of(machine):
        parts.append(build_answers_table(machine))
    evidence = tuple(_machine_evidence(machine, host, paper=paper))
    parts.append(Section("", evidence, look="evidence"))
    return Section(machine.name, tuple(parts), anchor, look="machine")


def _build_heading(machine: ReportedMachine) -> list[Part]:
    stop = (Text(line) for line in stop_of(machine))
    return [Text(format_machine(machine), "dim"), *stop]


def _build_brief(machine: ReportedMachine, anchor: str) -> Section:
    """Return a machine's answers and pictures; rows of results are in the appendix."""
    means = islice(build_mean_pictures(machine), 1)
    pictures = (*means, *build_bar_pictures(machine), *_list_details(machine))
    pictures = tuple(structs.replace(picture, note=()) for picture in pictures)
    parts = _build_heading(machine)
    if pictures:
        parts.append(Gallery(pictures[:MAX_PICTURES]))
    return Section(machine.name, tuple(parts), anchor, look="machine")


def _list_references(machines: Sequence[ReportedMachine]) -> tuple[str, ...]:
    """Return the source documents of results."""
    heads = (run.head for machine in machines for run in machine.runs)
    return tuple(dict.fromkeys(head.source for head in heads if head.source))


def _machine_evidence(
    machine: ReportedMachine, host: HostSections, *, paper: bool
) -> Iterator[Part]:
    matrices = {
        alternative.label: build_matrices(alternative) for alternative in machine.alternatives
    }
    near_and_far = compare_localities(machine.alternatives, _map_gpu_nodes(machine))
    yield from format_hosts(machine)
    about = "Right of the middle is better, whatever the metric's direction; one axis for all."
    yield from _build_pictures("Effects", about, build_forest_pictures(machine))
    yield from _build_pictures("Results by layout", "", build_bar_pictures(machine))
    yield from _build_pictures("In detail", "", _list_details(machine))
    power_by_label = {label: power_by_test(series) for label, _, series in machine.list_layouts()}
    yield from build_power_table({label: watts for label, watts in power_by_label.items() if watts})
    if texts := tuple(filter(None, map(file_text, file_effects(machine.chosen)))):
        yield Section("All-reduce with NCCL's topology file", (Items(texts),))
    if near_and_far:
        yield _build_locality_table(near_and_far, machine.name)
    yield from _build_pictures("Local and remote copies", "", build_locality_pictures(near_and_far))
    yield from _build_pictures(
        "Matrices", "Every cell a median.", build_heat_pictures(machine, matrices)
    )
    yield from _build_pictures("Nodes and GPUs", "", build_mean_pictures(machine))
    yield from _build_pictures("Curves", "", build_curve_pictures(machine))
    if not paper:
        yield from map_sections(machine, host)
    if host.findings is not None:
        yield host.findings
    yield from _list_results(machine)
    yield from _machine_caveats(machine)
    yield from _build_environment(machine)
    if sources := _list_references([machine]):
        yield Section("Sources", (Items(sources),), is_open=False)


def _list_details(machine: ReportedMachine) -> Iterator[Picture]:
    makers = (
        build_kernel_pictures,
        profile_picture,
        build_fairness_picture,
        build_product_picture,
        build_device_pictures,
    )
    for pictures in makers:
        yield from pictures(machine)


def _list_results(machine: ReportedMachine) -> Iterator[Section]:
    """Yield every number of a published machine, also those without a picture."""
    rows = []
    for label, _, by_key in machine.list_layouts() if machine.is_published else ():
        for key, series in by_key.items():
            metric = METRICS.get(key.metric)
            size = format_bytes(key.size_bytes) if key.size_bytes else ""
            place = ", ".join(filter(None, (format_place(key), size)))
            ends = (series.low, series.high) if series.is_range else (series.value,)
            value = " to ".join(format_value(end, key.unit, digits=4) for end in ends)
            title = key.metric if metric is None else metric.title
            rows.append((label, title, place, value))
    if rows:
        heads = ("layout", "result", "of", "value")
        table = Table(heads=heads, rows=tuple(rows), name=f"Printed results of {machine.name}")
        yield Section(f"Printed results ({len(rows)})", (table,), is_open=False)


def _own_caveats(machine: ReportedMachine) -> list[Caveat]:
    """Remove caveats of published results that their strength implies."""
    is_said = SAID_BY_LEVEL if machine.is_published else frozenset()
    return [caveat for caveat in machine.caveats if caveat.id not in is_said]


def _machine_caveats(machine: ReportedMachine) -> Iterator[Section]:
    if caveats := _own_caveats(machine):
        items = Items(tuple(map(_caveat_item, caveats)))
        yield Section(f"Caveats ({len(caveats)})", (items,), is_open=True)


def _caveat_item(caveat: Caveat) -> tuple[str | Span, ...]:
    text = f"{' (blocks)' if caveat.blocks else ''}, {caveat.subject}: {caveat.detail}. "
    fix = Span(f"Likely cause: {caveat.cause}. Fix: {caveat.fix}.", "dim")
    return Span(caveat.id, "bold"), text, fix


def _build_tests(machines: Sequence[ReportedMachine]) -> Section:
    series = (by_key for machine in machines for by_key in machine.series.values())
    measured_metrics = {key.metric for by_key in series for key in by_key}
    last = ("better", "when it rises", "when it falls", "matters from")
    rows = tuple(
        (
            metric.title,
            metric.about + ("; a control" if metric.control else ""),
            metric.better.partition(" ")[0],
            metric.rise,
            metric.fall,
            f"{metric.matters * 100:g} %",
        )
        for metric in METRICS.values()
        if metric.id in measured_metrics
    )
    table = Table(
        heads=("metric", "measures", *last),
        rows=rows,
        numeric=last[-1:],
        name="What each metric measures",
    )
    return Section("What is measured", (table,), "tests")


def _build_topologies(
    machines: Sequence[ReportedMachine], hosts: Sequence[HostSections]
) -> Section:
    parts: list[Part] = []
    for machine, host in zip(machines, hosts, strict=True):
        for host_map in host.maps:
            gallery = Gallery((Picture("", host_map.svg, look="map"),), "maps")
            parts.append(Section(f"{machine.name}: {format_plain(host_map.title)}", (gallery,)))
        parts += host.links
    evidence = Section("", tuple(parts), look="evidence")
    return Section("Topologies and links", (evidence,) if parts else (), "topologies")


def _map_gpu_nodes(machine: ReportedMachine) -> dict[Bdf, int]:
    gpus = () if machine.host is None else machine.host.devices_of_kind(DeviceKind.GPU)
    return {gpu.bdf: int(gpu.node) for gpu in gpus if gpu.node is not None}


def _build_locality_table(localities: Sequence[CopyLocality], name: str) -> Section:
    rows = []
    for locality in localities:
        metric = METRICS.get(locality.key.metric)
        names = [locality.key.metric if metric is None else metric.title, locality.key.variant]
        means = [
            "none measured"
            if mean is None
            else f"{format_value(mean, locality.key.unit)} ({count})"
            for mean, count in zip((locality.local, locality.remote), locality.cells, strict=True)
        ]
        rows.append(
            (
                ", ".join(filter(None, names)),
                locality.alternative,
                *means,
                "" if locality.ratio is None else f"{locality.ratio:.2f}x",
                locality.basis,
            )
        )
    numeric = ("local", "remote", "ratio")
    table = Table(
        heads=("metric", "run", *numeric, "nodes known from"),
        rows=tuple(rows),
        numeric=numeric,
        name=f"Local and remote of {name}",
        caption="Means over copies of nodes and GPUs, with the number of results in brackets. The "
        "ratio is the gain of local over remote.",
    )
    return Section("Local and remote", (table,))


def _build_environment(machine: ReportedMachine) -> Iterator[Section]:
    """Yield the conditions of the results; none for a published machine, whose runs are printed as
    published."""
    alternatives = () if machine.is_published else machine.alternatives
    labels = tuple(alternative.label for alternative in alternatives)
    columns: list[dict[str, dict[str, None]]] = []
    for alternative in alternatives:
        conditions: dict[str, dict[str, None]] = {}
        for run in alternative.runs:
            head = run.head
            facts = [("ran in", str(head.vantage)), ("results", str(head.origin))]
            facts += [("vCPUs", str(head.vcpus))] if head.vcpus is not None else []
            facts += [("pages", format_bytes(head.page_bytes))] if head.page_bytes else []
            facts += [("memory mode", head.memory_mode)] if head.memory_mode else []
            facts += [("CPUs", str(head.pus))] if head.pus is not None else []
            facts += [
                (f"GPU {gpu.device}", "numa_node -1" if gpu.node is None else f"node {gpu.node}")
                for gpu in head.gpus
            ]
            facts += [(c.name, c.value) for c in head.conditions]
            for name, value in facts:
                conditions.setdefault(name, {})[value] = None
        columns.append(conditions)
    names = dict.fromkeys(name for column in columns for name in column)
    rows = []
    for name in names:
        values = tuple(", ".join(column.get(name, {})) for column in columns)
        look = "differs" if len(set(filter(None, values))) > 1 else ""
        rows.append(tuple(Cell((text,), look) for text in (name, *values)))
    if rows:
        table = Table(
            heads=("", *labels),
            rows=tuple(rows),
            name=f"Environment of {machine.name}",
            caption="Cells are coloured if the alternatives differ.",
        )
        yield Section("Environment", (table,), is_open=False)
