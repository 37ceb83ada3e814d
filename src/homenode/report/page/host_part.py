"""HostPart: what a report says of a machine's topology: its picture, links, findings, gaps."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from homenode.doctor.diagnosis import diagnose
from homenode.findings import Finding
from homenode.pci import DeviceKind
from homenode.plan.model import Plan, PlanFinding
from homenode.report.device_groups import device_model, link_lines, link_text
from homenode.report.host_groups import host_counts
from homenode.report.page.machine import Machine
from homenode.report.topology_map import topology_map
from homenode.topology import Host

_STYLE = re.compile(r"<style>.*?</style>", re.DOTALL)
_HATCHES = re.compile(r"<defs>.*?</defs>", re.DOTALL)
_HATCHED = re.compile(r'style="fill:url\(#(\w+)\)"')
_ADDRESS = re.compile(r"\b(?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b")
_IDS = re.compile(r' id="(?:title|desc)"| aria-labelledby="title desc"')
MOST_MAPS = 3
"""Pictures of one machine: they are large."""


@dataclass(frozen=True, slots=True)
class Map:
    """A topology picture. svg: with its own style sheet and hatches, or to stand in a page that has
    both. hatches: what that page then needs, the same for every picture."""

    title: str
    svg: str
    hatches: str


@dataclass(frozen=True, slots=True)
class LinkRow:
    """GPUs or NICs of one model on one node with equal links. node, link: in words."""

    name: str
    node: str
    link: str
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HostPart:
    """Empty where no topology is known. counts: the host in a line. source: where it is from.

    assumed: what the description states without a source. findings: each with the subjects of which
    it says the same.
    """

    counts: str
    source: str
    assumed: tuple[str, ...]
    maps: tuple[Map, ...]
    links: tuple[LinkRow, ...]
    link_lines: tuple[str, ...]
    findings: tuple[tuple[Finding, tuple[str, ...]], ...]
    plan_findings: tuple[tuple[str, PlanFinding], ...]
    missing: str


def host_part(machine: Machine, *, with_style: bool) -> HostPart:
    """What is known of the machine's topology. with_style: pictures that stand for themselves."""
    host = machine.host
    maps: list[Map] = []
    plans = list(machine.plans.items())
    if host is not None and plans and _fits(host, plans[0][1]):
        choices = [one.choice for one in machine.verdicts]
        label, plan = max(plans, key=lambda pair: choices.count(pair[0]))
        maps.append(_map(f"host, with the VM of {label}", host, plan, with_style))
    elif host is not None:
        maps.append(_map("host", host, None, with_style))
    for label, guest in list(machine.guests.items())[: MOST_MAPS - len(maps)]:
        maps.append(_map(f"what the suite saw under {label}", guest, None, with_style))
    findings = () if host is None else diagnose(host).findings
    missing = ""
    if not maps:
        missing = "no capture of the host and no plan is stored next to these results"
    return HostPart(
        "" if host is None else host_counts(host),
        _source(machine),
        () if host is None else host.assumed,
        tuple(maps),
        () if host is None else _links(host),
        () if host is None else link_lines(host),
        _by_subjects(findings),
        tuple((label, finding) for label, plan in plans for finding in plan.findings),
        missing,
    )


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


def _source(machine: Machine) -> str:
    if machine.host is None:
        return ""
    if machine.published is not None:
        return "as it is described, partly from the source and partly assumed; it was not captured"
    return "as its capture says"


def _map(title: str, host: Host, plan: Plan | None, with_style: bool) -> Map:
    svg = _IDS.sub("", topology_map(host, plan)).strip()
    hatches = ""
    if not with_style:
        found = _HATCHES.search(svg)
        hatches = "" if found is None else found[0]
        svg = _HATCHES.sub("", _STYLE.sub("", svg, count=1), count=1)
        # The page's policy forbids styles of single elements; its style sheet knows these.
        svg = _HATCHED.sub(r'data-hatch="\1"', svg)
    return Map(title, svg.replace("<svg ", '<svg class="map" ', 1), hatches)


def _links(host: Host) -> tuple[LinkRow, ...]:
    found: dict[tuple[str, str, str], list[str]] = {}
    for kind in (DeviceKind.GPU, DeviceKind.NIC):
        for device in host.devices_of_kind(kind):
            if device.physical_function is None:
                node = "unknown" if device.node is None else str(device.node)
                link = link_text(device.link) or "unknown"
                alike = (device_model(device) or str(kind), node, link)
                found.setdefault(alike, []).append(str(device.bdf))
    return tuple(LinkRow(*alike, tuple(addresses)) for alike, addresses in found.items())
