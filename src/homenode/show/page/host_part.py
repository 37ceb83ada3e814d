"""HostPart: what a report says of a machine's topology: its picture, links, findings, gaps."""

import re
from collections.abc import Iterable, Iterator

from msgspec import Struct

from homenode.check.doctor.diagnosis import diagnose
from homenode.doc import Gallery, Items, Part, Picture, Section, Span, Table, Text, Words
from homenode.findings import Finding, Severity
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host
from homenode.show.device_groups import device_model, link_lines, link_text
from homenode.show.host_groups import host_counts
from homenode.show.page.machine import Machine
from homenode.show.topology_map import topology_map
from homenode.vm.plan_model import Plan

_STYLE = re.compile(r"<style>.*?</style>", re.DOTALL)
_HATCHES = re.compile(r"<defs>.*?</defs>", re.DOTALL)
_HATCHED = re.compile(r'style="fill:url\(#(\w+)\)"')
_ADDRESS = re.compile(r"\b(?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b")
_IDS = re.compile(r' id="(?:title|desc)"| aria-labelledby="title desc"')
MOST_MAPS = 3
"""Pictures of one machine: they are large."""


class HostPart(Struct, frozen=True, kw_only=True):
    """maps: topology pictures, that stand for themselves on paper, and in a page that has their
    style sheet and `hatches` else. links: of GPUs and NICs. findings: of the host and of its plans,
    None where there is none."""

    maps: tuple[Picture, ...]
    hatches: str
    links: tuple[Part, ...]
    findings: Section | None


def host_part(machine: Machine, *, paper: bool) -> HostPart:
    """What is known of the machine's topology."""
    host = machine.host
    svgs: list[tuple[str, str]] = []
    plans = list(machine.plans.items())
    if host is not None and plans and _fits(host, plans[0][1]):
        choices = [one.choice for one in machine.verdicts]
        label, plan = max(plans, key=lambda pair: choices.count(pair[0]))
        svgs.append((f"host, with the VM of {label}", topology_map(host, plan)))
    elif host is not None:
        svgs.append(("host", topology_map(host)))
    for label, guest in list(machine.guests.items())[: MOST_MAPS - len(svgs)]:
        svgs.append((f"what the suite saw under {label}", topology_map(guest)))
    hatches = next((found[0] for _, svg in svgs if (found := _HATCHES.search(svg))), "")
    return HostPart(
        maps=tuple(Picture(title, _drawn(svg, paper=paper), look="map") for title, svg in svgs),
        hatches="" if paper else hatches,
        links=tuple(_links(host)) if host is not None else (),
        findings=_findings(machine),
    )


def host_lines(machine: Machine) -> Iterator[Text]:
    """Where the picture of a host is from, and what of it is assumed."""
    if machine.host is not None:
        source = "as its capture says"
        if machine.published is not None:
            source = (
                "as it is described, partly from the source and partly assumed; it was not captured"
            )
        assumed = "; ".join(machine.host.assumed)
        said = f" Assumed: {assumed}." if assumed else ""
        yield Text(f"The host is drawn {source}.{said}", "dim small")


def map_sections(machine: Machine, part: HostPart) -> Iterator[Part]:
    """The topologies, folded; or that there is none."""
    if not part.maps:
        why = "no capture of the host and no plan is stored next to these results"
        yield Text(f"No topology picture: {why}.", "dim small")
    counts = "" if machine.host is None else f" ({host_counts(machine.host)})"
    for number, one in enumerate(part.maps):
        title = f"Topology: {one.title}{'' if number else counts}"
        yield Section(title, (Gallery((Picture("", one.svg, look="map"),), "maps"),), is_open=False)
    if part.links:
        yield Section("Links of GPUs and NICs", part.links, is_open=False)


def _findings(machine: Machine) -> Section | None:
    found = () if machine.host is None else diagnose(machine.host).findings
    items: list[Words] = []
    for one, subjects in _by_subjects(found):
        said = f": {', '.join(subjects)}: expected {one.expected}, found {one.observed} "
        fix = f". Fix: {one.fix}" if one.fix else ""
        items.append((Span(one.severity, "bold"), said, Span(f"({one.id}){fix}", "dim")))
    for label, plan in machine.plans.items():
        for own in plan.findings:
            said = f", plan of {label}: {own.subject}: {own.detail} "
            items.append((Span(own.severity, "bold"), said, Span(f"({own.id})", "dim")))
    if not items:
        return None
    is_open = any(one.severity is Severity.CRITICAL for one in found)
    return Section(f"Findings ({len(items)})", (Items(tuple(items)),), is_open=is_open)


def _by_subjects(findings: Iterable[Finding]) -> tuple[tuple[Finding, tuple[str, ...]], ...]:
    """Findings that differ in their subject's name alone, once, with all subjects."""
    alike: dict[tuple[object, ...], tuple[Finding, list[str]]] = {}
    for one in findings:
        texts = (_ADDRESS.sub("", text) for text in (one.expected, one.observed, one.fix or ""))
        key = (one.id, one.severity, *texts)
        alike.setdefault(key, (one, []))[1].append(one.subject)
    return tuple((one, tuple(subjects)) for one, subjects in alike.values())


def _fits(host: Host, plan: Plan) -> bool:
    """The plan's nodes and PUs are this host's: a picture of both cannot be wrong."""
    pus = {pu.index for pu in host.pus}
    return all(set(pins) <= pus for pins in plan.vcpu_pins)


def _drawn(svg: str, *, paper: bool) -> str:
    svg = _IDS.sub("", svg).strip()
    if not paper:
        svg = _HATCHES.sub("", _STYLE.sub("", svg, count=1), count=1)
        # The page's policy forbids styles of single elements; its style sheet knows these.
        svg = _HATCHED.sub(r'data-hatch="\1"', svg)
    return svg.replace("<svg ", '<svg class="map" ', 1)


def _links(host: Host) -> Iterator[Part]:
    """Links that are not PCIe; then GPUs or NICs of one model on one node with equal links."""
    if lines := link_lines(host):
        yield Items(lines)
    found: dict[tuple[str, str, str], list[str]] = {}
    for kind in (DeviceKind.GPU, DeviceKind.NIC):
        for device in host.devices_of_kind(kind):
            if device.physical_function is None:
                node = "unknown" if device.node is None else str(device.node)
                link = link_text(device.link) or "unknown"
                alike = (device_model(device) or str(kind), node, link)
                found.setdefault(alike, []).append(str(device.bdf))
    rows = tuple((*alike, ", ".join(addresses)) for alike, addresses in found.items())
    if rows:
        yield Table(heads=("device", "node", "PCIe link", "addresses"), rows=rows)
