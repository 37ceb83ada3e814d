"""OpenNebula: the plan as a VM template, whose TOPOLOGY and NUMA_NODEs its scheduler places.

Grammar as template_parser.l and template_syntax.y of OpenNebula 7.6 have it: names in any case, a
value or a list of NAME = VALUE in brackets, comments from #. What is taken: VirtualMachine::
parse_topology. Of a pinned VM every node is placed whole, on one host node, by the scheduler.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError, ParseError
from homenode.units import MIB
from homenode.vm.layout import Pinning
from homenode.vm.model import GuestHostdev, GuestTopology, Vm, VmCell
from homenode.vm.plan_model import Plan
from homenode.vm.targets.codec import (
    Codec,
    Entry,
    Row,
    Writing,
    number_of,
    text_of,
    with_entries,
)
from homenode.vm.targets.target import (
    Feature,
    default_machine,
    indirect,
    lost_by,
    native,
    one_node_each,
)

_SKIPPED = re.compile(r"(?:[ \t\n]|#[^\n]*\n)*+")
_NAME = re.compile(r"(?<![A-Za-z0-9_])([A-Za-z0-9_]++)[ \t]*+=[ \t]*+", re.ASCII)
_VALUE = re.compile(r'"((?:[^"\\]|\\"?)*+)"|([^=#\s,\[\]"]++)|(?=\n)')
_OPENED = re.compile(r"\[[ \t\n]*+(\]?)")
_COMMA_OR_END = re.compile(r"[,\]]")
_KEYS = re.compile(r"^[ \t]*([A-Z_]{1,30})[ \t]*=", re.MULTILINE | re.ASCII)
_OTHER_KEYS = {"VCPU", "CPU", "TOPOLOGY", "DISK", "NIC", "GRAPHICS", "CONTEXT"}
_PCI_KINDS = {"VENDOR", "DEVICE", "CLASS"}

Parts = Mapping[str, str]
"""A list of NAME = VALUE; of a value alone its only name is ""."""


class Template(NamedTuple):
    """A template: its text, and its attributes, whose values are Parts."""

    text: str
    attributes: tuple[Entry, ...]
    source: str

    def all(self, key: str) -> list[Parts]:
        return [one.value for one in self.attributes if one.key == key]

    def list(self, key: str) -> Parts:
        """The first of that name."""
        return next(iter(self.all(key)), {})

    def value(self, key: str) -> str:
        return self.list(key).get("", "")

    @property
    def devices(self) -> dict[Bdf, Parts]:
        where = f"{self.source}: PCI"
        shorts = (one for one in self.all("PCI") if "SHORT_ADDRESS" in one)
        return {Bdf.parse(one["SHORT_ADDRESS"], where): one for one in shorts}

    @property
    def has_kinds(self) -> bool:
        """Devices that the scheduler chooses by their kind."""
        return any(_PCI_KINDS & set(one) for one in self.all("PCI"))


def parse(content: bytes, source: str) -> Template:
    """Raises ParseError for what OpenNebula would not take."""
    text = text_of(content, source, "a template")
    found: list[Entry] = []
    at = 0

    def take(pattern: re.Pattern[str], expected: str) -> re.Match[str]:
        nonlocal at
        match = pattern.match(text, at)
        if match is None:
            line = text.count("\n", 0, at) + 1
            raise ParseError(source, expected, text[at : at + 40].partition("\n")[0], line=line)
        at = match.end()
        return match

    def value() -> str:
        match = take(_VALUE, "a value, quoted or of one word")
        return (match[1] or match[2] or "").replace('\\"', '"')

    take(_SKIPPED, "")
    while at < len(text):
        start, name = at, take(_NAME, "NAME = VALUE")[1].upper()
        value_start = at
        parts: dict[str, str] = {}
        opened = _OPENED.match(text, at)
        if opened is None:
            parts[""] = value()
        else:
            at, more = opened.end(), not opened[1]
            while more:
                take(_SKIPPED, "")
                part = take(_NAME, "NAME = VALUE in brackets")[1].upper()
                parts.setdefault(part, value())
                take(_SKIPPED, "")
                more = take(_COMMA_OR_END, "a comma or ]")[0] == ","
        found.append(Entry(name, parts, start, value_start, at))
        take(_SKIPPED, "")
    return Template(text, tuple(found), source)


def is_template(content: bytes) -> bool:
    """Whether this is a template: it has keys that no other format has, in upper case."""
    keys = set(_KEYS.findall(content[:200_000].decode("utf-8", "replace")))
    return "MEMORY" in keys and bool(keys & _OTHER_KEYS)


def may_be_template(content: bytes) -> bool:
    """Whether this can be a template: names in any case, and MEMORY, which each has."""
    try:
        return any(one.key == "MEMORY" for one in parse(content, "").attributes)
    except ParseError:
        return False


def _edited(writing: Writing[Template], wanted: Mapping[str, Sequence[Parts]]) -> str:
    template, lists = writing.file, dict(wanted)
    there = template.attributes
    devices = lists.get("PCI", ())
    if "PCI" in lists:  # in any order: those that stay are not touched
        lists["PCI"] = [parts for parts in devices if parts not in template.all("PCI")]
        there = tuple(one for one in there if one.key != "PCI" or one.value not in devices)
    values = {key: [(parts, _text(parts)) for parts in own] for key, own in lists.items()}
    return with_entries(template.text, there, values)


def _text(parts: Parts) -> str:
    quoted = {key: '"' + value.replace('"', '\\"') + '"' for key, value in parts.items()}
    pairs = ", ".join(f"{key} = {one}" for key, one in quoted.items())
    return quoted.get("", f"[ {pairs} ]")


def _new(guest: Vm, plan: Plan) -> str:
    name, arch = guest.name, guest.architecture
    if {'"', "\\"} & set(name) or "]]>" in name:
        raise InputError(f"opennebula: expected a name without quotes, \\ and ]]>, found {name!r}")
    return (
        f'# homenode: written for onetemplate create\nNAME = "{name}"\nCPU = "{plan.vm.vcpus}"\n'
        f'OS = [ ARCH = "{arch}", MACHINE = "{default_machine(arch)}" ]\n'
        'CPU_MODEL = [ MODEL = "host-passthrough" ]\n'
    )


def _read_size(template: Template) -> Mapping[str, Any]:
    where, system = template.source, template.list("OS")
    architecture = system.get("ARCH") or "x86_64"
    return {
        "name": template.value("NAME") or "vm",
        "architecture": architecture,
        "machine": system.get("MACHINE") or default_machine(architecture),
        "firmware": None if system.get("FIRMWARE", "").upper() in ("", "BIOS") else "efi",
        "vcpus": number_of(template.value("VCPU") or "1", f"{where}: VCPU"),
        "memory_bytes": number_of(template.value("MEMORY"), f"{where}: MEMORY") * MIB,
    }


def _write_size(writing: Writing[Template]) -> Mapping[str, Sequence[Parts]]:
    size = {"MEMORY": [{"": str(writing.memory_mib)}]}
    if writing.is_new or writing.plan.vm.vcpus > 1 or writing.file.list("VCPU"):
        size["VCPU"] = [{"": str(writing.plan.vm.vcpus)}]
    return size


def _numbers(template: Template, *keys: str) -> list[int]:
    """Of TOPOLOGY, 0 where it has none."""
    topology, where = template.list("TOPOLOGY"), f"{template.source}: TOPOLOGY"
    return [number_of(topology.get(key) or "0", where) for key in keys]


def _read_topology(template: Template) -> Mapping[str, Any]:
    sockets, cores, threads = _numbers(template, "SOCKETS", "CORES", "THREADS")
    is_whole = sockets and cores and threads
    return {"cpu_topology": GuestTopology(sockets, 1, cores, threads) if is_whole else None}


def _read_pages(template: Template) -> Mapping[str, Any]:
    (mib,) = _numbers(template, "HUGEPAGE_SIZE")
    return {"page_bytes": mib * MIB or None}


def _topology(plan: Plan) -> dict[str, str]:
    """What a plan says of TOPOLOGY."""
    shape = plan.vm.cpu_topology
    wanted: dict[str, str] = {}
    if plan.vcpu_pins:
        alone = plan.layout.pinning is Pinning.ONE_PER_CORE and (not shape or shape.threads == 1)
        floats = plan.layout.pinning is Pinning.NODE
        wanted["PIN_POLICY"] = "SHARED" if floats else "CORE" if alone else "THREAD"
    if shape is not None:
        numbers = (shape.sockets, shape.dies * shape.cores, shape.threads)
        wanted |= zip(("SOCKETS", "CORES", "THREADS"), map(str, numbers), strict=True)
    if plan.vm.page_bytes is not None:
        wanted["HUGEPAGE_SIZE"] = str((plan.vm.page_bytes or 2 * MIB) // MIB)
    return wanted


def _write_topology(writing: Writing[Template]) -> Mapping[str, Sequence[Parts]]:
    wanted = _topology(writing.plan)
    own = dict(writing.file.list("TOPOLOGY"))
    if writing.plan.vcpu_pins:
        own.pop("NODE_AFFINITY", None)
    return {"TOPOLOGY": [{**own, **wanted}]} if wanted else {}


def _read_cells(template: Template) -> Mapping[str, Any]:
    return {"cells": tuple(_cells(template))}


def _cells(template: Template) -> Iterator[VmCell]:
    """vCPUs are given to the nodes in their order."""
    taken, nodes = 0, template.all("NUMA_NODE")
    for number, node in enumerate(nodes):
        what = f"{template.source}: NUMA_NODE {number}"
        vcpus = number_of(node.get("TOTAL_CPUS") or "0", what)
        row = {**dict.fromkeys(range(len(nodes)), 20), number: 10}
        for one in filter(None, node.get("DISTANCE", "").split(",")):
            ids, _, distance = one.partition(":")
            for other in CpuSet.parse(ids, what):
                row[other] = number_of(distance, what)
        yield VmCell(
            id=number,
            vcpus=CpuSet(range(taken, taken + vcpus)),
            memory_bytes=number_of(node.get("MEMORY") or "0", what) * MIB,
            page_bytes=_read_pages(template)["page_bytes"],
            distances=tuple(row[i] for i in range(len(nodes))) if node.get("DISTANCE") else (),
        )
        taken += vcpus


def _write_cells(writing: Writing[Template]) -> Mapping[str, Sequence[Parts]]:
    plan = writing.plan
    if not plan.vcpu_pins:
        return {}
    whole = {"TOTAL_CPUS": str(plan.vm.vcpus), "MEMORY": str(writing.memory_mib)}
    return {"NUMA_NODE": list(_nodes(writing)) if writing.is_mirrored else [whole]}


def _nodes(writing: Writing[Template]) -> Iterator[Parts]:
    one_node_each(writing.plan, "opennebula")
    for cell in writing.plan.cells:
        row = ",".join(f"{other}:{value}" for other, value in enumerate(cell.distances))
        node = {"TOTAL_CPUS": str(len(cell.vcpus)), "MEMORY": str(writing.mib_of(cell))}
        yield {**node, "DISTANCE": row} if row else node


def _read_devices(template: Template) -> Mapping[str, Any]:
    def initiators(parts: Parts) -> CpuSet:
        return CpuSet.parse(parts.get("ACPI_NODES", ""), template.source)

    return {
        "hostdevs": tuple(
            GuestHostdev(bdf, None, initiator_cells=initiators(parts))
            for bdf, parts in template.devices.items()
        )
    }


def _write_devices(writing: Writing[Template]) -> Mapping[str, Sequence[Parts]]:
    """Devices as lspci prints them: with domains where the host has another than 0."""
    plan, host, own = writing.plan, writing.host, writing.file.devices
    if writing.file.has_kinds and not plan.vm.hostdevs:
        return {}
    bdfs = [d.bdf for d in plan.vm.hostdevs] + [d.bdf for d in (host.pci_devices if host else ())]
    domains = any(bdf.domain for bdf in bdfs)
    lists = []
    for device in plan.vm.hostdevs:
        short = str(device.bdf) if domains else str(device.bdf).partition(":")[2]
        parts = dict(own.get(device.bdf, {"SHORT_ADDRESS": short}))
        parts.pop("ACPI_NODES", None)
        if device.initiator_cells:
            parts["ACPI_NODES"] = str(CpuSet(device.initiator_cells))
        lists.append(parts)
    return {"PCI": lists}


ROWS = (
    Row(read=_read_size, write=_write_size),
    Row(
        says={
            Feature.TOPOLOGY: native("`TOPOLOGY` SOCKETS, CORES"),
            Feature.THREADS: native("`TOPOLOGY` THREADS"),
        },
        read=_read_topology,
        write=_write_topology,
    ),
    Row(says={Feature.HUGE_PAGES: native("`TOPOLOGY` HUGEPAGE_SIZE")}, read=_read_pages),
    Row(
        says={
            Feature.CELLS: native("a `NUMA_NODE` for each, of a pinned VM"),
            Feature.UNEQUAL_CELLS: native("`NUMA_NODE` TOTAL_CPUS, MEMORY"),
            Feature.DISTANCES: native("`NUMA_NODE` DISTANCE"),
        },
        read=_read_cells,
        write=_write_cells,
    ),
    Row(
        says={
            Feature.DEVICES: native("`PCI` SHORT_ADDRESS"),
            Feature.INITIATORS: native("`PCI` ACPI_NODES, and a `NUMA_NODE` of size 0 for each"),
        },
        read=_read_devices,
        write=_write_devices,
    ),
    Row(  # what its scheduler chooses
        says={
            Feature.VCPU_PINS: indirect(
                "`TOPOLOGY` PIN_POLICY CORE, THREAD or SHARED",
                "which PUs is the scheduler's choice",
            ),
            Feature.EMULATOR_PINS: indirect(
                "EMULATOR_CPUS of the host", "without it these threads share the vCPUs' PUs"
            ),
            Feature.MEMORY_NODES: indirect(
                "each `NUMA_NODE` is bound to one host node", "which node is the scheduler's choice"
            ),
            Feature.DEVICE_CELLS: indirect(
                "OpenNebula puts a device of machine q35 on the expander bus of a cell by itself",
                "the cell of the same number as the device's host node, whichever node that cell "
                "is on",
            ),
        }
    ),
    Row(says=lost_by("opennebula")),
)


def _refuse(writing: Writing[Template]) -> None:
    plan, there, mirrored = writing.plan, writing.file, writing.is_mirrored
    names = {one.key for one in there.attributes}
    order = [vcpu for cell in plan.cells for vcpu in cell.vcpus] if mirrored else []
    size = (str(plan.vm.vcpus), str(writing.memory_mib))
    same = (there.value("VCPU") or "1", there.value("MEMORY")) == size
    refused = (
        (
            _topology(plan) and "VCPU_MAX" in names,
            "no VCPU_MAX next to TOPOLOGY",
            "one",
        ),
        (mirrored and not plan.vcpu_pins, "pinned vCPUs for guest cells", "vCPUs that float"),
        (order != sorted(order), "cells with vCPUs in ascending order", "others"),
        (
            mirrored and any(bool(c.vcpus) != bool(c.memory_bytes) for c in plan.cells),
            "vCPUs and memory in each cell",
            "a cell with one of them alone",
        ),
        (
            plan.vcpu_pins and not mirrored and len(plan.nodes) > 1,
            "one host node for pinned vCPUs of a flat guest",
            f"{len(plan.nodes)}",
        ),
        (
            plan.vm.hostdevs and there.has_kinds,
            "PCI with SHORT_ADDRESS alone",
            "one by VENDOR, DEVICE or CLASS",
        ),
        (
            not plan.vcpu_pins and names & {"TOPOLOGY", "NUMA_NODE"} and not same,
            "the vCPUs and memory that TOPOLOGY and NUMA_NODE are for",
            "others",
        ),
    )
    for is_so, expected, found in refused:
        if is_so:
            raise InputError(
                f"{writing.source}: opennebula: expected {expected}, found {found}",
                hint="choose --layout pin-numa, or --max-nodes 1, or change the template",
            )


CODEC = Codec(name="opennebula", rows=ROWS, parse=parse, new=_new, edited=_edited, refuse=_refuse)
TARGET = CODEC.target(
    title="OpenNebula",
    source="Virtual Machine Template and NUMA pages of OpenNebula 6.10 and 7.0; sources of 7.6",
    recognises=is_template,
    users_own=r"(NAME|DESCRIPTION|DISK|NIC\w*|GRAPHICS|CONTEXT|INPUT|LOGO|LABELS|USER_INPUTS|INFO"
    r"|\w+_COST)=",
    may_be=may_be_template,
    architecture_of_host=True,
    needs_host=True,
)
