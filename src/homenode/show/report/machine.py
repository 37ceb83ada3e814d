"""ReportedMachine: all facts of one machine in a report, by system and host; and each of its
results as a flat row, for CSV and JSON."""

import gc
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct, structs
from msgspec.structs import replace

from homenode.check.doctor.diagnosis import diagnose
from homenode.decide.alternative import Alternative, group_runs
from homenode.decide.caveats import find_own_caveats
from homenode.decide.compare import compare_series, make_series_key
from homenode.decide.comparison import Comparison, Effect, join_subjects
from homenode.decide.machine_facts import (
    assign_runs,
    collect_host_facts,
    collect_run_facts,
    group_runs_by_machine,
)
from homenode.decide.recommendation import Recommendation, decide_all, rests_on_rule_alone
from homenode.decide.summary import Series, SeriesKey
from homenode.decide.switch_effects import SwitchEffect, switch_effects
from homenode.doc import Gallery, Items, Part, Picture, Section, Span, Table, Text, Words
from homenode.findings import Caveat, Finding, Gap, Severity
from homenode.formats import encode_json
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host
from homenode.measure.results.model import UNKNOWN_SWITCHES, Origin, Run, SeriesId
from homenode.measure.results.vantage import Vantage
from homenode.show.device_groups import find_device_model, format_link, format_links
from homenode.show.host_groups import format_host_counts
from homenode.show.svg_canvas import number_series
from homenode.show.topology_map import draw_topology
from homenode.text import write_csv
from homenode.vm.layout import PRESETS
from homenode.vm.plan import Plan

ANY_LAYOUT = "any layout"
"""Label of results that a source prints for all layouts together."""

BARE = "bare metal"
"""Label of runs on the host itself in addition to those of its guests."""

UNNAMED = ""
"""Key of `hosts` for runs without a host name: the host that the user named."""


class StoredRun(Struct, frozen=True):
    """The files next to a run: its plan, and the host as captured in the guest."""

    plan: Plan | None = None
    guest: Host | None = None


class ReportedMachine(Struct, frozen=True, kw_only=True):
    """A machine's part of a report."""

    name: str  # unique among the machines
    runs: tuple[Run, ...]
    chosen: tuple[Alternative, ...]  # its alternatives, the baseline first
    others_of_machine: tuple[Alternative, ...]  # results without a layout
    series: Mapping[str, Mapping[SeriesKey, Series]]  # series of each alternative, by label
    recommendations: tuple[Recommendation, ...]
    comparison: Comparison | None  # None with fewer than two
    bare: Comparison | None  # with a run on the host itself, if both exist
    effects: tuple[SwitchEffect, ...]
    caveats: tuple[Caveat, ...]
    host: Host | None  # its topology, if known
    plans: Mapping[str, Plan]  # by alternative
    guests: Mapping[str, Host]  # by alternative

    @property
    def is_published(self) -> bool:
        """Whether the results are published, without samples."""
        return all(run.head.origin is Origin.PUBLISHED for run in self.runs)

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """All alternatives, those that can be chosen first."""
        return (*self.chosen, *self.others_of_machine)

    def list_layouts(self) -> Iterator[tuple[str, int, Mapping[SeriesKey, Series]]]:
        """Yield the label, colour number and series of every alternative."""
        for position, label in enumerate(alternative.label for alternative in self.alternatives):
            yield label, number_series(label, position), self.series[label]


def build_machines(
    runs: Sequence[Run],
    stored_runs: Sequence[StoredRun],
    hosts: Mapping[str, Host],
) -> tuple[ReportedMachine, ...]:
    """Return the machines of these runs, in input order. stored_runs: next to each run, in the same
    order. hosts: topologies, by a host's fingerprint."""
    neighbours = {id(run): neighbour for run, neighbour in zip(runs, stored_runs, strict=True)}
    groups = group_runs_by_machine(runs)
    unnamed_groups = [name for name, own_runs in groups.items() if not _list_hosts(own_runs)]
    if len(unnamed_groups) > 1:  # it is unknown which of them is the user's host
        hosts = {name: host for name, host in hosts.items() if name != UNNAMED}
    collects = gc.isenabled()
    # All objects made here live as long as the report: garbage collections over a million samples
    # free nothing, and take a quarter of the time.
    gc.disable()
    try:
        return tuple(
            _build_machine(name, tuple(own_runs), neighbours, hosts)
            for name, own_runs in groups.items()
        )
    finally:
        if collects:
            gc.enable()


def _build_machine(
    name: str,
    runs: tuple[Run, ...],
    neighbours: Mapping[int, StoredRun],
    hosts: Mapping[str, Host],
) -> ReportedMachine:
    named_runs = _distinct_labels(runs)
    on_host = _bare_metal(named_runs)
    measured_runs = tuple(run for run in named_runs if on_host is None or run not in on_host.runs)
    all_alternatives = group_runs(measured_runs)
    alternatives = sorted(all_alternatives, key=_order)
    choices = tuple(choice for choice in alternatives if not _is_unknown(choice))
    of_any = (replace(choice, label=ANY_LAYOUT) for choice in alternatives if _is_unknown(choice))
    others_of_machine = (*of_any, *(() if on_host is None else (on_host,)))
    host = _find_host(runs, hosts)
    # From the runs as stored: their names are not choices.
    recommendations = _recommend(name, runs, all_alternatives, host)
    series = {choice.label: choice.series for choice in (*choices, *others_of_machine)}
    comparison = compare_series(choices, series) if len(choices) > 1 else None
    bare = None
    if on_host is not None and choices:
        bare = compare_series((on_host, *choices), series, bare=True)
    alone = others_of_machine if comparison is not None else (*choices, *others_of_machine)
    caveats = (
        *(comparison.caveats if comparison is not None else ()),
        *(bare.caveats if bare is not None else ()),
        *(caveat for alternative in alone for caveat in find_own_caveats(alternative)),
    )
    directories = _find_neighbours(choices, runs, named_runs, neighbours)
    return ReportedMachine(
        name=name,
        runs=named_runs,
        chosen=choices,
        others_of_machine=others_of_machine,
        series=series,
        recommendations=recommendations,
        comparison=comparison,
        bare=bare,
        effects=switch_effects(name, choices),
        caveats=join_subjects(dict.fromkeys(caveats)),
        host=host,
        plans={label: results.plan for label, results in directories if results.plan is not None},
        guests={
            label: results.guest for label, results in directories if results.guest is not None
        },
    )


def _recommend(
    name: str,
    runs: Sequence[Run],
    alternatives: Sequence[Alternative],
    host: Host | None,
) -> tuple[Recommendation, ...]:
    """Return the answers for a machine, known by its host or only by its runs."""
    if host is not None:
        machine, runs = collect_host_facts(host), assign_runs(runs, host)
    else:
        machine = collect_run_facts(runs[0].head.system, runs)
    answers = decide_all(runs, replace(machine, name=name), alternatives=alternatives)
    has_nodes = machine.nodes is not None
    return tuple(answer for answer in answers if has_nodes or not rests_on_rule_alone(answer))


def _bare_metal(runs: Sequence[Run]) -> Alternative | None:
    """Runs on the host itself, if other runs are of its guests: a reference, not a choice."""
    vantages = {run.head.vantage for run in runs}
    if not {Vantage.GUEST, Vantage.HOST} <= vantages:
        return None
    on_host = tuple(run for run in runs if run.head.vantage is Vantage.HOST)
    head = on_host[0].head
    return Alternative(
        label=BARE,
        switches=head.switches,
        arrangement=head.arrangement,
        memory_mode=head.memory_mode,
        page_bytes=head.page_bytes,
        runs=on_host,
    )


def _distinct_labels(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """Name runs of an unknown choice by their run names."""
    return tuple(
        structs.replace(run, head=structs.replace(run.head, arrangement=run.head.name))
        if run.head.switches == UNKNOWN_SWITCHES
        and run.head.arrangement is None
        and run.head.origin is not Origin.PUBLISHED  # printed for all layouts
        else run
        for run in runs
    )


def _order(alternative: Alternative) -> int:
    """Order presets by the switches that they add; then the others, in input order."""
    names = list(PRESETS)
    name = alternative.switches.name
    if name in names and alternative.arrangement is None:
        return names.index(name)
    return len(names) + _is_unknown(alternative)


def _is_unknown(alternative: Alternative) -> bool:
    """Return whether results are of the machine, independent of the layout."""
    return alternative.switches == UNKNOWN_SWITCHES and alternative.arrangement is None


def _find_neighbours(
    alternatives: Iterable[Alternative],
    runs: Sequence[Run],
    named_runs: Sequence[Run],
    neighbours: Mapping[int, StoredRun],
) -> list[tuple[str, StoredRun]]:
    """Return the files stored with the first run of each alternative, if any."""
    # Compared by head: if states are joined, an alternative has copies of its runs.
    of_run = {id(new.head): neighbours[id(old)] for old, new in zip(runs, named_runs, strict=True)}
    neighbours_of_layout = []
    for alternative in alternatives:
        stored_runs = [of_run[id(run.head)] for run in alternative.runs if id(run.head) in of_run]
        plan = next((s.plan for s in stored_runs if s.plan is not None), None)
        guest = next((s.guest for s in stored_runs if s.guest is not None), None)
        neighbours_of_layout.append((alternative.label, StoredRun(plan, guest)))
    return neighbours_of_layout


def _list_hosts(runs: Sequence[Run]) -> dict[str, None]:
    """Return the fingerprints of the hosts of runs."""
    return dict.fromkeys(run.head.host for run in runs if run.head.host is not None)


def _find_host(runs: Sequence[Run], hosts: Mapping[str, Host]) -> Host | None:
    keys = _list_hosts(runs)
    if not keys:
        return hosts.get(UNNAMED)
    return next((hosts[key] for key in keys if key in hosts), None)


_STYLE = re.compile(r"<style>.*?</style>", re.DOTALL)
_HATCHES = re.compile(r"<defs>.*?</defs>", re.DOTALL)
_HATCHED = re.compile(r'style="fill:url\(#(\w+)\)"')
_ADDRESS = re.compile(r"\b(?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b")
_IDS = re.compile(r' id="(?:title|desc)"| aria-labelledby="title desc"')
MAX_MAPS = 3
"""Pictures of one machine: they are large."""


class HostSections(Struct, frozen=True, kw_only=True):
    """The sections of a report on a host."""

    # topology pictures: self-contained on paper; a page has their style sheet and `hatches`
    maps: tuple[Picture, ...]
    hatches: str
    links: tuple[Part, ...]  # links of GPUs and NICs
    findings: Section | None  # findings on the host and its plans; None without any


def build_host_part(machine: ReportedMachine, *, paper: bool) -> HostSections:
    """Return the sections on the machine's known topology."""
    host = machine.host
    svgs: list[tuple[str, str]] = []
    plans = list(machine.plans.items())
    if host is not None and plans and _fits(host, plans[0][1]):
        choices = [recommendation.choice for recommendation in machine.recommendations]
        label, plan = max(plans, key=lambda pair: choices.count(pair[0]))
        svgs.append((f"host, with the VM of {label}", draw_topology(host, plan)))
    elif host is not None:
        svgs.append(("host", draw_topology(host)))
    for label, guest in list(machine.guests.items())[: MAX_MAPS - len(svgs)]:
        svgs.append((f"what the suite detected under {label}", draw_topology(guest)))
    hatches = next((match[0] for _, svg in svgs if (match := _HATCHES.search(svg))), "")
    return HostSections(
        maps=tuple(
            Picture(title, _draw_hosts(svg, paper=paper), look="map") for title, svg in svgs
        ),
        hatches="" if paper else hatches,
        links=tuple(_build_links(host)) if host is not None else (),
        findings=_build_findings(machine),
    )


def format_hosts(machine: ReportedMachine) -> Iterator[Text]:
    """Describe the source of a host's picture, and its assumptions."""
    if machine.host is not None:
        source = "as it is described" if machine.host.assumed else "from its capture"
        assumptions = "; ".join(machine.host.assumed)
        assumption = f" Assumed: {assumptions}." if assumptions else ""
        yield Text(f"The host is drawn {source}.{assumption}", "dim small")


def map_sections(machine: ReportedMachine, part: HostSections) -> Iterator[Part]:
    """Yield the topologies, folded; or a line that none is known."""
    if not part.maps:
        reason = "no capture of the host and no plan is stored next to these results"
        yield Text(f"No topology picture: {reason}.", "dim small")
    counts = "" if machine.host is None else f" ({format_host_counts(machine.host)})"
    for number, host_map in enumerate(part.maps):
        title = f"Topology: {host_map.title}{'' if number else counts}"
        yield Section(
            title, (Gallery((Picture("", host_map.svg, look="map"),), "maps"),), is_open=False
        )
    if part.links:
        yield Section("Links of GPUs and NICs", part.links, is_open=False)


def _build_findings(machine: ReportedMachine) -> Section | None:
    host_findings = () if machine.host is None else diagnose(machine.host).findings
    items: list[Words] = []
    for finding, subjects in _merge_subjects(host_findings):
        text = f": {', '.join(subjects)}: {finding.comparison} "
        fix = f". Fix: {finding.fix}" if finding.fix else ""
        items.append((Span(finding.severity, "bold"), text, Span(f"({finding.id}){fix}", "dim")))
    for label, plan in machine.plans.items():
        for plan_finding in plan.findings:
            text = f", plan of {label}: {plan_finding.subject}: {plan_finding.comparison} "
            items.append(
                (Span(plan_finding.severity, "bold"), text, Span(f"({plan_finding.id})", "dim"))
            )
    if not items:
        return None
    is_open = any(finding.severity is Severity.CRITICAL for finding in host_findings)
    return Section(f"Findings ({len(items)})", (Items(tuple(items)),), is_open=is_open)


def _merge_subjects(findings: Iterable[Finding]) -> tuple[tuple[Finding, tuple[str, ...]], ...]:
    """Merge findings that differ only in their subject, with all subjects."""
    by_text: dict[tuple[object, ...], tuple[Finding, list[str]]] = {}
    for finding in findings:
        texts = (
            _ADDRESS.sub("", text)
            for text in (finding.expected, finding.observed, finding.fix or "")
        )
        key = (finding.id, finding.severity, *texts)
        by_text.setdefault(key, (finding, []))[1].append(finding.subject)
    return tuple((finding, tuple(subjects)) for finding, subjects in by_text.values())


def _fits(host: Host, plan: Plan) -> bool:
    """Return whether the plan's nodes and CPUs are this host's, so that one picture fits both."""
    pus = {pu.index for pu in host.pus}
    return all(set(pins) <= pus for pins in plan.vcpu_pins)


def _draw_hosts(svg: str, *, paper: bool) -> str:
    svg = _IDS.sub("", svg).strip()
    if not paper:
        svg = _HATCHES.sub("", _STYLE.sub("", svg, count=1), count=1)
        # The page's policy forbids inline styles, so classes of the style sheet are used.
        svg = _HATCHED.sub(r'data-hatch="\1"', svg)
    return svg.replace("<svg ", '<svg class="map" ', 1)


def _build_links(host: Host) -> Iterator[Part]:
    """Yield links other than PCIe; then GPUs or NICs of one model and node with equal links."""
    if lines := format_links(host):
        yield Items(lines)
    addresses_of_link: dict[tuple[str, str, str], list[str]] = {}
    for kind in (DeviceKind.GPU, DeviceKind.NIC):
        for device in host.devices_of_kind(kind):
            if device.physical_function is None:
                node = "unknown" if device.node is None else str(device.node)
                link = format_link(device.link) or "unknown"
                link_key = (find_device_model(device) or str(kind), node, link)
                addresses_of_link.setdefault(link_key, []).append(str(device.bdf))
    rows = tuple(
        (*link_key, ", ".join(addresses)) for link_key, addresses in addresses_of_link.items()
    )
    if rows:
        yield Table(heads=("device", "node", "PCIe link", "addresses"), rows=rows)


VERSION = 1
"""Version of the rows, in every output format."""

COLUMNS = tuple(
    """
    machine system layout pinning siblings cells pcie memory arrangement memory_mode
    page_bytes vcpus origin vantage metric unit variant size_bytes node peer_node device
    peer state slowest_device value low high boots samples baseline ratio ratio_low
    ratio_high p p_adjusted outcome level caveats
""".split()
)
"""Columns of a row. See docs/reference/formats/rows.md."""

ReportRow = dict[str, Any]
"""One series of one alternative, by column."""


def list_rows(machine: ReportedMachine) -> Iterator[ReportRow]:
    """Yield every series of a machine's alternatives, with its effect against the baseline."""
    compared = () if machine.comparison is None else machine.comparison.effects
    effects = {(effect.alternative, make_series_key(effect)): effect for effect in compared}
    for alternative in machine.alternatives:
        for key, series in machine.series[alternative.label].items():
            yield _build_row(
                machine, alternative, key, series, effects.get((alternative.label, key))
            )


def format_csv(rows: Iterable[ReportRow]) -> str:
    """Return the rows as CSV, with a header.

    >>> format_csv([]).startswith("machine,system,layout")
    True
    """
    return write_csv([[*COLUMNS], *([row[name] for name in COLUMNS] for row in rows)])


def format_json(rows: Iterable[ReportRow], gaps: Sequence[Gap]) -> str:
    """Return the rows as JSON, `homenode.rows/1`, with the omitted inputs."""
    document = {"format": f"homenode.rows/{VERSION}", "skipped": gaps, "rows": list(rows)}
    json_text = encode_json(msgspec.to_builtins(document))
    return msgspec.json.format(json_text, indent=2).decode() + "\n"


def _build_row(
    machine: ReportedMachine,
    alternative: Alternative,
    key: SeriesKey,
    series: Series,
    effect: Effect | None,
) -> ReportRow:
    head = alternative.runs[0].head
    switches = alternative.switches
    counts = {run.head.vcpus for run in alternative.runs}
    row = ReportRow(
        machine=machine.name,
        system=head.system,
        layout=alternative.label,
        pinning=switches.pinning,
        siblings=switches.siblings,
        cells=switches.cells,
        pcie=switches.pcie,
        memory=switches.memory,
        arrangement=alternative.arrangement,
        memory_mode=alternative.memory_mode,
        page_bytes=alternative.page_bytes,
        vcpus=counts.pop() if len(counts) == 1 else None,
        origin=head.origin,
        vantage=head.vantage,
        **_list_fields(key),
        slowest_device=key.worst,
        value=series.value,
        low=series.low,
        high=series.high,
        boots=len(series.medians),
        samples=series.samples,
        **_effect_columns(effect),
    )
    return {name: row.get(name) for name in COLUMNS}


def _list_fields(key: SeriesId) -> dict[str, Any]:
    """Return the subject of the result; devices by their addresses."""
    fields = {name: getattr(key, name) for name in SeriesId.__struct_fields__}
    devices = {name: str(fields[name]) for name in ("device", "peer") if fields[name] is not None}
    return fields | devices


def _effect_columns(effect: Effect | None) -> dict[str, Any]:
    if effect is None:
        return {}
    return {
        "baseline": effect.baseline,
        "ratio": effect.ratio,
        "ratio_low": effect.low,
        "ratio_high": effect.high,
        "p": effect.p,
        "p_adjusted": effect.p_adjusted,
        "outcome": str(effect.outcome),
        "level": str(effect.level),
        "caveats": ", ".join(effect.caveats) or None,
    }
