"""Every finding about one domain on its host, the lines it is about, and its drift from its plan.

Findings name what they are about in the user's words ("vCPUs 3-4", "<emulatorpin>", "cell 1", an
address); the element with that name is looked up here, in one place for all of them.
"""

import re
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.catalogue import finding
from homenode.check.domain.cores import (
    interrupt_findings,
    isolation_findings,
    thread_findings,
    topology_findings,
)
from homenode.check.domain.devices import (
    describe_limits,
    devices_alone,
    devices_on_host,
    limit_findings,
    limits,
    passed_devices,
    passthrough_findings,
)
from homenode.check.domain.memory import memory_alone, memory_findings, memory_on_host
from homenode.check.domain.pins import (
    is_flat_by_evidence,
    nodes_of,
    pin_findings,
    pins_alone,
    pins_on_host,
)
from homenode.check.domain.verification import broken_references
from homenode.cpuset import CpuSet
from homenode.errors import HomenodeError
from homenode.findings import Finding, Severity, sourced
from homenode.machine.topology import Host
from homenode.vm.domain.document import Document, Element
from homenode.vm.domain.fields import host_address
from homenode.vm.facts import diff
from homenode.vm.hypervisor.domain_state import LivePin, domain_argument
from homenode.vm.model import Vm
from homenode.wording import command_line


def domain_findings(facts: Vm, document: Document, host: Host) -> list[Finding]:
    """What is wrong with one domain on its host."""
    found = [*broken_references(document), *pins_alone(facts), *memory_alone(facts)]
    found += [*devices_alone(facts), *limit_findings(facts, document, host)]
    if host.pus:
        found += [*pins_on_host(facts, host), *pin_findings(facts, host)]
        found += topology_findings(facts, document, host)
        found += [*thread_findings(facts, host), *isolation_findings(facts, host)]
        found += interrupt_findings(facts, host)
    if host.nodes:
        found += [*memory_on_host(facts, host), *memory_findings(facts, document, host)]
    found += devices_on_host(facts, host)
    found += passthrough_findings(facts, document, host)
    return [
        _weighed(one, facts, host)
        for one in sourced(found, facts.source)
        if one.id != "emulator-on-vcpu" or not _fills(facts, host)
    ]


def _fills(facts: Vm, host: Host) -> bool:
    """Whether the vCPUs have a PU of every core: the emulator can be nowhere else."""
    pus = facts.pinned_pus
    return all(not core.pus.isdisjoint(pus) for core in host.cores)


def _weighed(finding: Finding, facts: Vm, host: Host) -> Finding:
    """Floating vCPUs are worth a warning where devices or several nodes give them a home."""
    if finding.id != "unpinned" or finding.severity is not Severity.INFO:
        return finding
    nodes = [node for node in host.nodes if node.pus]
    most = max((len(node.pus) for node in nodes), default=0)
    space = max((node.memory_bytes or 0 for node in nodes), default=0)
    too_large = facts.vcpus > most or facts.memory_bytes > space > 0
    if len(nodes) < 2 or not (facts.hostdevs or too_large):
        return finding
    why = "the VM has devices" if facts.hostdevs else "the VM is larger than a node"
    return replace(
        finding,
        severity=Severity.WARNING,
        expected=f"pins: {why}, and the host has {len(nodes)} nodes",
    )


def domain_checked(facts: Vm, host: Host) -> list[str]:
    """What domain_findings looked at, for people."""
    lines = [
        f"{facts.source}: references, pins, guest topology, memory, devices and limits of "
        f"{facts.name} on {host.name}"
        if host.pus
        else f"{facts.source}: references, devices and limits of {facts.name}; "
        f"{host.name} gives no PUs to hold its pins against"
    ]
    devices = passed_devices(facts, host)
    if devices:
        lines.append(describe_limits(limits(facts, devices), len(devices)))
    if is_flat_by_evidence(facts, host):
        nodes = nodes_of(facts.pinned_pus, host)
        objective = "" if facts.record is None else facts.record.objective
        lines.append(
            f"flat over nodes {nodes}, as the evidence chose for {objective}: homenode recommend"
        )
    return lines


_TAG = re.compile(r"<(\w[\w:-]*)>")
_VCPUS = re.compile(r"\bvCPUs? (\d[\d,-]*)")
_CELLS = re.compile(r"\bcells? (\d[\d,-]*)")
_IOTHREAD = re.compile(r"\bIOThread (\d+)")
_ADDRESS = re.compile(r"\b[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b")


class DocumentLines:
    """The lines of a document's pins, cells, devices and other elements."""

    __slots__ = ("_cells", "_devices", "_iothreads", "_pins", "_source", "_tags")

    def __init__(self, document: Document) -> None:
        self._source = document.source
        self._tags: dict[str, int] = {}
        self._pins: dict[int, int] = {}
        self._cells: dict[int, int] = {}
        self._iothreads: dict[int, int] = {}
        self._devices: dict[Bdf, int] = {}
        cells = 0
        for element in document.root.walk():
            self._tags.setdefault(element.name, element.line)
            if element.name == "vcpupin":
                _keep(self._pins, element, "vcpu")
            elif element.name == "iothreadpin":
                _keep(self._iothreads, element, "iothread")
            elif element.name == "cell":
                self._cells.setdefault(_number(element.get("id"), cells), element.line)
                cells += 1
        for bdf, line in _devices(document):
            self._devices.setdefault(bdf, line)

    def line_of(self, subject: str) -> int | None:
        """The line of the first thing that a subject names; None where it names nothing here."""
        if (device := _ADDRESS.search(subject)) is not None:
            return self._devices.get(Bdf.parse(device[0]))
        if (tag := _TAG.search(subject)) is not None:
            return self._tags.get(tag[1])
        for pattern, lines, otherwise in (
            (_VCPUS, self._pins, "vcpu"),
            (_CELLS, self._cells, "cell"),
            (_IOTHREAD, self._iothreads, "iothreads"),
        ):
            if (numbers := pattern.search(subject)) is not None:
                first = next(iter(CpuSet.parse(numbers[1].rstrip(",-"), "subject")), -1)
                return lines.get(first, self._tags.get(otherwise))
        return None

    def located(self, finding: Finding) -> Finding:
        """The finding with "file:line" as its source, where it is about this document."""
        if finding.source != self._source:
            return finding
        line = self.line_of(finding.subject)
        return finding if line is None else replace(finding, source=f"{self._source}:{line}")


def _keep(lines: dict[int, int], element: Element, attribute: str) -> None:
    number = _number(element.get(attribute), -1)
    if number >= 0:
        lines.setdefault(number, element.line)


def _number(text: str | None, otherwise: int) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() else otherwise


def _devices(document: Document) -> Iterator[tuple[Bdf, int]]:
    devices = document.root.child("devices")
    for element in () if devices is None else devices.children:
        source = element.at("source/address") if element.name == "hostdev" else None
        if source is None or element.get("type") != "pci":
            continue
        try:
            yield host_address(source), element.line
        except HomenodeError:  # what cannot be read has been said by whoever reads the document
            continue


_NOT_PLACED = (
    "topology",
    "domain-type",
    "machine",
    "firmware",
    "cpu",
    "vcpus-online",
    "current-memory",
    "distances",
    "controller",
    "device-address",
)
"""Facts that libvirt fills in at the start, that guests change, or that no running VM changes."""


def domain_drift(planned: Vm, running: Vm, moved: Sequence[LivePin] = ()) -> Iterator[Finding]:
    """Differences of pins, memory and devices, as by `virsh vcpupin --live` or `virsh edit`.

    planned: of the document that homenode defined, or of the persistent definition. moved: threads
    of this run that homenode itself moved since.
    """
    name, uuid = running.name, running.uuid
    for one in diff(_with_moved(planned, moved), running, _NOT_PLACED):
        yield finding(
            "drift-domain",
            f"{name}: {one.subject}",
            expected=one.expected,
            observed=one.observed,
            values={"domain": command_line(domain_argument(name, uuid or name))},
            source=planned.source,
        )


def _with_moved(planned: Vm, moved: Sequence[LivePin]) -> Vm:
    pus = {(pin.kind, pin.number): pin.pus for pin in moved}
    iothreads = {n: found for (kind, n), found in pus.items() if kind == "iothread"}
    return replace(
        planned,
        vcpu_pins=tuple(pus.get(("vcpu", i), pin) for i, pin in enumerate(planned.vcpu_pins)),
        emulator_pus=pus.get(("emulator", 0), planned.emulator_pus),
        iothread_pins=tuple(sorted((dict(planned.iothread_pins) | iothreads).items())),
    )
