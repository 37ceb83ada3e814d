"""Document: a whole report, of machines and of what is known besides, as one document."""

from collections.abc import Iterator, Sequence
from itertools import islice

from msgspec import structs

from homenode.bdf import Bdf
from homenode.decide.grade import Grade
from homenode.decide.matrices import CopyLocality, localities, matrices_of
from homenode.decide.summary import power_by_test
from homenode.decide.words import figure_text
from homenode.doc import Cell, Doc, Gallery, Items, Part, Picture, Section, Span, Table, Text, plain
from homenode.findings import Doubt
from homenode.machine.pci import DeviceKind
from homenode.metrics import METRICS
from homenode.show.page.across import across_pictures, effects_table, link_speeds, summary_table
from homenode.show.page.answer import answer_section
from homenode.show.page.machine import (
    HostPart,
    ReportedMachine,
    host_lines,
    host_part,
    map_sections,
)
from homenode.show.page.pictures import (
    bar_pictures,
    better_text,
    curve_pictures,
    device_pictures,
    fairness_picture,
    forest_pictures,
    heat_pictures,
    kernel_pictures,
    locality_pictures,
    mean_pictures,
    path_pictures,
    product_picture,
    profile_picture,
)
from homenode.show.page.verdict_card import (
    GRADES,
    SIGNS,
    VerdictCard,
    decisions_table,
    verdict_card,
    verdicts_table,
)
from homenode.show.results_text import SAID_BY_LEVEL, power_table
from homenode.wording import plural

_SIGNS = {
    "measured": " measured: intervals over three boots or more. ",
    "provisional": " provisional: fewer boots, so that a difference is stated only where it is far "
    "larger than between boots. ",
    "no-difference": " no difference shown. ",
    "rule": " a rule: results cannot tell, or there are none. ",
}
_RUN_AS = "Run as pin-bound: with memory bound as well, which such a guest does not see."
_EFFECTS = (
    "What each switch of a layout changed, over the machines where two layouts show it: pinning "
    "over default; bound memory and guest cells over pin; guest PCIe and siblings over guest "
    "cells. Risk: the largest loss that matters. \u25b2 better, \u25bc worse, \u25b2\u25bc both, "
    "by machine. Pinning hides siblings; cells bind memory; siblings double the vCPUs."
)
_INTERVALS = (
    "Intervals: 95 %, over boots (t, on the logarithms of their medians); primary metrics are "
    "corrected for their number. Published figures are one run each and have no interval."
)


MOST_PICTURES = 4
"""Of one machine, in a report without its appendix: a row of a page."""


def document_of(
    machines: Sequence[ReportedMachine],
    skipped: Sequence[str],
    made: str,
    *,
    title: str = "homenode report",
    paper: bool = False,
    appendix: bool = True,
) -> Doc:
    """The report on these machines.

    made: when and by
    what. skipped: folders that were left out, with the reason. paper: for a renderer of pages:
    pictures have style sheets of their own, and topologies stand at the end. appendix: with every
    figure, doubt and remark of each machine; False: what a reader needs to judge the answer.
    """
    anchors = [f"machine-{number}" for number in range(1, len(machines) + 1)]
    cards = [verdict_card(*pair) for pair in zip(machines, anchors, strict=True)]
    hosts = [host_part(machine, paper=paper) for machine in machines] if appendix else []
    sections: list[Section] = [
        answer_section(machines, anchors),
        _verdicts(cards, skipped),
        _effects(machines),
        _across(machines),
    ]
    if appendix:
        summary = summary_table(machines, anchors, paper=paper)
        sections += (
            Section("Summary", (summary,), "summary", "Summary"),
            *(
                _machine(machine, card, host, paper=paper)
                for machine, card, host in zip(machines, cards, hosts, strict=True)
            ),
            _tests(machines),
            *((_topologies(cards, hosts),) if paper else ()),
        )
    else:
        sections += (_brief(*pair) for pair in zip(machines, cards, strict=True))
        sections += (_tests(machines), _references(machines))
    skipped_items = (Items(tuple(skipped)),) if skipped else ()
    sections.append(Section("Skipped", skipped_items, "skipped", "Skipped"))
    counts = (
        f"{plural(len(machines), 'machine')}, {plural(sum(len(m.runs) for m in machines), 'run')}"
    )
    return Doc(
        title,
        tuple(one for one in sections if one.parts),
        f"{counts}. {made}",
        "Made by homenode; needs no network. Figures as rows: homenode report --csv or --json"
        + ("." if appendix else "; all of each machine: --appendix."),
        next((one.hatches for one in hosts if one.hatches), ""),
    )


def _verdicts(cards: Sequence[VerdictCard], skipped: Sequence[str]) -> Section:
    parts: list[Part] = [Text(one, "small dim") for one in _legends(cards)]
    parts.append(decisions_table(cards))
    if skipped:
        which = Span("which, and why", link="skipped")
        parts.append(Text((f"{plural(len(skipped), 'folder')} skipped: ", which, "."), "small dim"))
    title = "Which layout to run, for what, and how sure that is"
    return Section(title, tuple(parts), "verdicts", "Verdicts")


def _legends(cards: Sequence[VerdictCard]) -> Iterator[tuple[str | Span, ...]]:
    """What the words and signs of these cards mean, before they are read."""
    grades = {card.grade: card.tone for card in cards}
    yield tuple(
        one
        for grade, tone in grades.items()
        for one in (Span(grade, f"grade {tone}"), f" {GRADES[Grade(grade)]} ")
    )
    answers = [answer for card in cards for answer in card.answers if answer.has_choice]
    levels = {one.sure for one in answers}
    said: list[str | Span] = []
    for level, meaning in _SIGNS.items():
        if level in levels:
            said += (Span(SIGNS[level], f"sure {level}"), meaning)
    if any(one.layout for one in answers):
        said.append(_RUN_AS)
    if said:
        yield tuple(said)


def _effects(machines: Sequence[ReportedMachine]) -> Section:
    table = effects_table(machines)
    name = "Effects and risks"
    return Section(name, () if table is None else (table,), "effects", name, _EFFECTS)


def _across(machines: Sequence[ReportedMachine]) -> Section:
    speeds = link_speeds(machines)
    parts: list[Part] = list(_pictures("", "", across_pictures(machines)))
    if speeds.rows:
        parts.append(Section("PCIe links and copies", (speeds,)))
    return Section("Machines compared", tuple(parts), "across", "Machines compared")


def _pictures(
    title: str, about: str, pictures: Iterator[Picture], look: str = ""
) -> Iterator[Section]:
    if found := tuple(pictures):
        yield Section(title, (Gallery(found, look),), about=about)


def _machine(
    machine: ReportedMachine, card: VerdictCard, host: HostPart, *, paper: bool
) -> Section:
    parts: list[Part] = [Text(card.about, "dim"), Text(card.reason)]
    if card.answers and not card.is_stopped:
        parts.append(verdicts_table(card))
    evidence = tuple(_evidence(machine, card, host, paper=paper))
    parts.append(Section("", evidence, look="evidence"))
    title = (f"{card.name} ", Span(card.grade, f"grade {card.tone}"))
    return Section(title, tuple(parts), card.anchor, card.name, look="machine")


def _brief(machine: ReportedMachine, card: VerdictCard) -> Section:
    """A machine's answer and its pictures; its figures as rows are in the appendix."""
    pictures = tuple(
        structs.replace(one, note=())
        for one in (
            *islice(mean_pictures(machine), 1),
            *bar_pictures(machine),
            *_details(machine),
        )
    )
    parts: list[Part] = [Text(card.about, "dim"), Text(card.reason)]
    if pictures:
        parts.append(Gallery(pictures[:MOST_PICTURES]))
    title = (f"{card.name} ", Span(card.grade, f"grade {card.tone}"))
    return Section(title, tuple(parts), card.anchor, card.name, look="machine")


def _references(machines: Sequence[ReportedMachine]) -> Section:
    """The documents that figures are from."""
    heads = (run.head for machine in machines if machine.is_published for run in machine.runs)
    named = tuple(dict.fromkeys(head.source for head in heads if head.source))
    return Section("Sources", (Items(named),) if named else (), "sources", "Sources")


def _evidence(
    machine: ReportedMachine, card: VerdictCard, host: HostPart, *, paper: bool
) -> Iterator[Part]:
    matrices = {one.label: matrices_of(one) for one in machine.every}
    near_and_far = localities(machine.every, _nodes_of_gpus(machine))
    about = "What the guest sees, and where that lies on the host"
    about += ". Topology: at the end." if paper and host.maps else ""
    paths = path_pictures(machine)
    yield from _pictures("Host and guest side by side", about, paths, "small-multiples")
    yield from host_lines(machine)
    about = "Right of the middle is better, whatever the metric's direction; one axis for all."
    yield from _pictures("Effects", about, forest_pictures(machine))
    yield from _pictures("Figures by layout", "", bar_pictures(machine))
    yield from _pictures("In detail", "", _details(machine))
    drawn = {one.label: power_by_test(machine.series[one.label]) for one in machine.every}
    yield from power_table({label: watts for label, watts in drawn.items() if watts})
    if near_and_far:
        yield _locality_table(near_and_far, machine.name)
    yield from _pictures("Near and far", "", locality_pictures(near_and_far))
    yield from _pictures("Matrices", "Every cell a median.", heat_pictures(machine, matrices))
    yield from _pictures("Nodes and GPUs", "", mean_pictures(machine))
    yield from _pictures("Curves", "", curve_pictures(machine))
    if not paper:
        yield from map_sections(machine, host)
    if host.findings is not None:
        yield host.findings
    yield from _doubts(machine)
    yield from _environment(machine)
    yield from _notes(machine)


def _details(machine: ReportedMachine) -> Iterator[Picture]:
    makers = (kernel_pictures, profile_picture, fairness_picture, product_picture, device_pictures)
    for pictures in makers:
        yield from pictures(machine)


def _doubts(machine: ReportedMachine) -> Iterator[Section]:
    doubts = [
        one for one in machine.doubts if not (machine.is_published and one.id in SAID_BY_LEVEL)
    ]
    if doubts:
        items = Items(tuple(map(_doubt, doubts)))
        yield Section(f"Doubts ({len(doubts)})", (items,), is_open=True)


def _doubt(one: Doubt) -> tuple[str | Span, ...]:
    said = f"{' (blocks)' if one.blocks else ''}, {one.subject}: {one.detail}. "
    remedy = Span(f"Likely cause: {one.cause}. Remedy: {one.remedy}.", "dim")
    return Span(one.id, "bold"), said, remedy


def _notes(machine: ReportedMachine) -> Iterator[Section]:
    """The sources that verdicts and runs name."""
    sources = [source for verdict in machine.recommendations for source in verdict.sources]
    sources += [run.head.source for run in machine.runs if run.head.source]
    if sources:
        items = Items(tuple(dict.fromkeys(sources)))
        yield Section("Sources", (items,), is_open=False)


def _tests(machines: Sequence[ReportedMachine]) -> Section:
    measured = {
        key.metric for machine in machines for one in machine.series.values() for key in one
    }
    last = ("better", "when it rises", "when it falls", "matters from")
    rows = tuple(
        (
            metric.title,
            metric.about + ("; a control" if metric.control else ""),
            better_text(metric).partition(" ")[0],
            metric.rise,
            metric.fall,
            f"{metric.matters * 100:g} %",
        )
        for metric in METRICS.values()
        if metric.id in measured
    )
    table = Table(
        heads=("metric", "measures", *last),
        rows=rows,
        numeric=last[-1:],
        name="What each metric measures",
    )
    name = "What is measured"
    return Section(name, (table, Text(_INTERVALS, "dim small")), "tests", name)


def _topologies(cards: Sequence[VerdictCard], hosts: Sequence[HostPart]) -> Section:
    parts: list[Part] = []
    for card, host in zip(cards, hosts, strict=True):
        for one in host.maps:
            drawn = Gallery((Picture("", one.svg, look="map"),), "maps")
            parts.append(Section(f"{card.name}: {plain(one.title)}", (drawn,)))
        parts += host.links
    evidence = Section("", tuple(parts), look="evidence")
    return Section("Topologies and links", (evidence,) if parts else (), "topologies")


def _nodes_of_gpus(machine: ReportedMachine) -> dict[Bdf, int]:
    gpus = () if machine.host is None else machine.host.devices_of_kind(DeviceKind.GPU)
    return {gpu.bdf: int(gpu.node) for gpu in gpus if gpu.node is not None}


def _locality_table(found: Sequence[CopyLocality], name: str) -> Section:
    rows = []
    for one in found:
        metric = METRICS.get(one.key.metric)
        what = [one.key.metric if metric is None else metric.title, one.key.variant]
        means = [
            "none measured" if mean is None else f"{figure_text(mean, one.key.unit)} ({count})"
            for mean, count in zip((one.local, one.remote), one.cells, strict=True)
        ]
        rows.append(
            (
                ", ".join(filter(None, what)),
                one.alternative,
                *means,
                "" if one.ratio is None else f"{one.ratio:.2f}x",
                one.stated,
            )
        )
    figures = ("local", "remote", "ratio")
    table = Table(
        heads=("metric", "run", *figures, "near is known"),
        rows=tuple(rows),
        numeric=figures,
        name=f"Local and remote of {name}",
        caption="Means over copies of nodes and GPUs; in brackets how many figures. The ratio is "
        "what being near is worth.",
    )
    return Section("Local and remote", (table,))


def _environment(machine: ReportedMachine) -> Iterator[Section]:
    """What figures were taken under. Nothing of a published machine: what is known of its runs is
    printed as it was."""
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
        look = "differs" if len(set(filter(None, values))) > 1 else ""
        rows.append(tuple(Cell((text,), look) for text in (name, *values)))
    if rows:
        table = Table(
            heads=("", *labels),
            rows=tuple(rows),
            name=f"Environment of {machine.name}",
            caption="Coloured where the alternatives differ.",
        )
        yield Section("Environment", (table,), is_open=False)
