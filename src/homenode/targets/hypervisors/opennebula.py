"""OpenNebula: the plan as a VM template, whose TOPOLOGY and NUMA_NODEs its scheduler places.

Grammar as template_parser.l and template_syntax.y of OpenNebula 7.6 have it: names in any case, a
value or a list of NAME = VALUE in brackets, comments from #. What is taken: VirtualMachine::
parse_topology. Of a pinned VM every node is placed whole, on one host node, by the scheduler.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError, ParseError
from homenode.plan.model import Plan
from homenode.targets.target import (
    Feature,
    Rendering,
    Target,
    default_machine,
    indirect,
    lost,
    native,
    one_node_each,
    refuse_many_vcpus,
    refuse_unsafe_name,
    whole_units,
)
from homenode.topology import Host
from homenode.units import MIB
from homenode.vm.layout import GuestCells, Pinning
from homenode.vm.model import GuestHostdev, Vm, VmCell

SUPPORT = {
    Feature.VCPU_PINS: indirect(
        "`TOPOLOGY` PIN_POLICY CORE, THREAD or SHARED", "which PUs is the scheduler's choice"
    ),
    Feature.EMULATOR_PINS: indirect(
        "EMULATOR_CPUS of the host", "without it these threads share the vCPUs' PUs"
    ),
    Feature.IOTHREAD_PINS: lost("`FEATURES` IOTHREADS has no PUs", "IOThreads float over the host"),
    Feature.TOPOLOGY: native("`TOPOLOGY` SOCKETS, CORES"),
    Feature.THREADS: native("`TOPOLOGY` THREADS"),
    Feature.DIES: lost("`TOPOLOGY` has no dies", "the guest sees their cores in one die"),
    Feature.CACHE: lost("no attribute for caches", "the guest sees the default of its CPU model"),
    Feature.CELLS: native("a `NUMA_NODE` for each, of a pinned VM"),
    Feature.UNEQUAL_CELLS: native("`NUMA_NODE` TOTAL_CPUS, MEMORY"),
    Feature.DISTANCES: native("`NUMA_NODE` DISTANCE"),
    Feature.MEMORY_NODES: indirect(
        "each `NUMA_NODE` is bound to one host node", "which node is the scheduler's choice"
    ),
    Feature.MEMORY_MODE: lost("memory is bound with mode strict", "other modes become strict"),
    Feature.HUGE_PAGES: native("`TOPOLOGY` HUGEPAGE_SIZE"),
    Feature.DEVICES: native("`PCI` SHORT_ADDRESS"),
    Feature.DEVICE_CELLS: indirect(
        "OpenNebula puts a device of machine q35 on the expander bus of a cell by itself",
        "the cell of the same number as the device's host node, whichever node that cell is on",
    ),
    Feature.DEVICE_TREE: lost("no attribute for PCIe switches", "devices hang on root ports"),
    Feature.INITIATORS: native("`PCI` ACPI_NODES, and a `NUMA_NODE` of size 0 for each"),
    Feature.WINDOW: lost("no attribute for the PCI window", "the firmware sizes it"),
    Feature.IOMMU: lost("`IOMMU` of 7.6 is not written", "more than 255 vCPUs are refused"),
    Feature.VGPUS: lost("`PCI` PROFILE makes a vGPU, and takes none that exists", "vGPUs are lost"),
}

_SKIPPED = re.compile(r"(?:[ \t\n]|#[^\n]*\n)*+")
_NAME = re.compile(r"(?<![A-Za-z0-9_])([A-Za-z0-9_]++)[ \t]*+=[ \t]*+", re.ASCII)
_VALUE = re.compile(r'"((?:[^"\\]|\\"?)*+)"|([^=#\s,\[\]"]++)|(?=\n)')
_OPENED = re.compile(r"\[[ \t\n]*+(\]?)")
_COMMA_OR_END = re.compile(r"[,\]]")
_KEYS = re.compile(r"^[ \t]*([A-Z_]{1,30})[ \t]*=", re.MULTILINE | re.ASCII)
_OTHER_KEYS = {"VCPU", "CPU", "TOPOLOGY", "DISK", "NIC", "GRAPHICS", "CONTEXT"}
_PCI_KINDS = {"VENDOR", "DEVICE", "CLASS"}
_MOST_VCPUS = 255


@dataclass(frozen=True, slots=True)
class Attribute:
    """NAME = VALUE, or a list of such: parts. start, value_start, end: in the text."""

    name: str
    value: str
    parts: Mapping[str, str]
    start: int
    value_start: int
    end: int


def parse(content: bytes, source: str) -> tuple[str, tuple[Attribute, ...]]:
    """The text and its attributes. Raises ParseError for what OpenNebula would not take."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise ParseError(source, "a template in UTF-8", "other bytes") from None
    found, at = [], 0

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
        value_start, whole = at, ""
        parts: dict[str, str] = {}
        opened = _OPENED.match(text, at)
        if opened is None:
            whole = value()
        else:
            at, more = opened.end(), not opened[1]
            while more:
                take(_SKIPPED, "")
                part = take(_NAME, "NAME = VALUE in brackets")[1].upper()
                parts.setdefault(part, value())
                take(_SKIPPED, "")
                more = take(_COMMA_OR_END, "a comma or ]")[0] == ","
        found.append(Attribute(name, whole, parts, start, value_start, at))
        take(_SKIPPED, "")
    return text, tuple(found)


def is_template(content: bytes) -> bool:
    """Whether this is a template: it has keys that no other format has, in upper case."""
    keys = set(_KEYS.findall(content[:200_000].decode("utf-8", "replace")))
    return "MEMORY" in keys and bool(keys & _OTHER_KEYS)


def may_be_template(content: bytes) -> bool:
    """Whether this can be a template: names in any case, and MEMORY, which each has."""
    try:
        return any(one.name == "MEMORY" for one in parse(content, "")[1])
    except ParseError:
        return False


def _number(text: str, what: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise ParseError(what, "a number", text[:60])
    return int(text)


def read_vm(content: bytes, source: str) -> Vm:
    """The VM of a template; on which nodes and PUs it runs, a template does not say."""
    _, attributes = parse(content, source)
    first = {one.name: one for one in reversed(attributes)}
    values = {name: one.value for name, one in first.items()}
    lists = {name: one.parts for name, one in first.items()}
    topology, system = lists.get("TOPOLOGY", {}), lists.get("OS", {})
    shape = [topology.get(key) for key in ("SOCKETS", "CORES", "THREADS")]
    sockets, cores, threads = (_number(n or "0", f"{source}: TOPOLOGY") for n in shape)
    vcpus = _number(values.get("VCPU") or "1", f"{source}: VCPU")
    memory = _number(values.get("MEMORY", ""), f"{source}: MEMORY")
    page = _number(topology.get("HUGEPAGE_SIZE") or "0", f"{source}: HUGEPAGE_SIZE") * MIB or None
    architecture = system.get("ARCH") or "x86_64"
    pci = [one for one in attributes if one.name == "PCI" and "SHORT_ADDRESS" in one.parts]
    return Vm(
        name=values.get("NAME") or "vm",
        source=source,
        architecture=architecture,
        machine=system.get("MACHINE") or default_machine(architecture),
        firmware="efi" if system.get("FIRMWARE", "BIOS").upper() not in ("", "BIOS") else None,
        cpu_mode="host-passthrough",
        vcpus=vcpus,
        memory_bytes=memory * MIB,
        page_bytes=page,
        cpu_topology=(sockets, 1, cores, threads) if sockets and cores and threads else None,
        vcpu_pins=(None,) * vcpus,
        cells=tuple(_cells([a.parts for a in attributes if a.name == "NUMA_NODE"], page, source)),
        hostdevs=tuple(
            GuestHostdev(
                Bdf.parse(one.parts["SHORT_ADDRESS"], f"{source}: PCI"),
                None,
                initiator_cells=CpuSet.parse(one.parts.get("ACPI_NODES", ""), source),
            )
            for one in pci
        ),
    )


def _cells(nodes: list[Mapping[str, str]], page: int | None, source: str) -> Iterator[VmCell]:
    """vCPUs are given to the nodes in their order."""
    taken = 0
    for number, node in enumerate(nodes):
        what = f"{source}: NUMA_NODE {number}"
        vcpus = _number(node.get("TOTAL_CPUS") or "0", what)
        row = {**dict.fromkeys(range(len(nodes)), 20), number: 10}
        for one in filter(None, node.get("DISTANCE", "").split(",")):
            ids, _, distance = one.partition(":")
            for other in CpuSet.parse(ids, what):
                row[other] = _number(distance, what)
        yield VmCell(
            id=number,
            vcpus=CpuSet(range(taken, taken + vcpus)),
            memory_bytes=_number(node.get("MEMORY") or "0", what) * MIB,
            page_bytes=page,
            distances=tuple(row[i] for i in range(len(nodes))) if node.get("DISTANCE") else (),
        )
        taken += vcpus


def render(plan: Plan, guest: Vm, host: Host | None, given: bytes | None, source: str) -> Rendering:
    """The template with the plan in it. Raises InputError where OpenNebula cannot take it."""
    name = refuse_unsafe_name(guest.name, source)
    arch = guest.architecture
    memory = whole_units(plan.memory_bytes, MIB, "memory", "opennebula")
    if given is None and ({'"', "\\"} & set(name) or "]]>" in name):
        raise InputError(f"{source}: expected a name without quotes, \\ and ]]>, found {name!r}")
    new = (
        f'# homenode: written for onetemplate create\nNAME = "{name}"\nCPU = "{plan.vcpus}"\n'
        f'OS = [ ARCH = "{arch}", MACHINE = "{default_machine(arch)}" ]\n'
        'CPU_MODEL = [ MODEL = "host-passthrough" ]\n'
    )
    text, there = parse(new.encode() if given is None else given, source)
    shape = plan.topology
    wanted: dict[str, str] = {}
    if plan.vcpu_pins:
        alone = plan.layout.pinning is Pinning.ONE_PER_CORE and (not shape or shape.threads == 1)
        floats = plan.layout.pinning is Pinning.NODE
        wanted["PIN_POLICY"] = "SHARED" if floats else "CORE" if alone else "THREAD"
    if shape is not None:
        numbers = (shape.sockets, shape.dies * shape.cores, shape.threads)
        wanted |= zip(("SOCKETS", "CORES", "THREADS"), map(str, numbers), strict=True)
    if plan.page_bytes is not None:
        wanted["HUGEPAGE_SIZE"] = str((plan.page_bytes or 2 * MIB) // MIB)
    _refuse(plan, there, memory, wanted, source)
    lists: dict[str, Sequence[Mapping[str, str]]] = {"MEMORY": [{"": str(memory)}]}
    if given is None or plan.vcpus > 1 or any(one.name == "VCPU" for one in there):
        lists["VCPU"] = [{"": str(plan.vcpus)}]
    if wanted:
        before = next((one.parts for one in there if one.name == "TOPOLOGY"), {})
        own = {k: v for k, v in before.items() if not (k == "NODE_AFFINITY" and plan.vcpu_pins)}
        lists["TOPOLOGY"] = [{**own, **wanted}]
    if plan.vcpu_pins:
        lists["NUMA_NODE"] = list(_nodes(plan, memory))
    if plan.devices or not any(_PCI_KINDS & set(one.parts) for one in there if one.name == "PCI"):
        lists["PCI"] = list(_pci(plan, host, there))
    return Rendering(_edited(text, there, lists).encode())


def _refuse(
    plan: Plan, there: tuple[Attribute, ...], memory: int, wanted: Mapping[str, str], source: str
) -> None:
    refuse_many_vcpus(plan, "opennebula", _MOST_VCPUS)
    mirrored, names = plan.layout.cells is GuestCells.MIRRORED, {one.name for one in there}
    order = [vcpu for cell in plan.cells for vcpu in cell.vcpus] if mirrored else []
    kinds = [one for one in there if one.name == "PCI" and _PCI_KINDS & set(one.parts)]
    before = {one.name: one.value for one in reversed(there)}
    same = (before.get("VCPU", "1"), before.get("MEMORY")) == (str(plan.vcpus), str(memory))
    refused = (
        (wanted and "VCPU_MAX" in names, "no VCPU_MAX next to TOPOLOGY", "one"),
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
        (plan.devices and kinds, "PCI with SHORT_ADDRESS alone", "one by VENDOR, DEVICE or CLASS"),
        (
            not plan.vcpu_pins and names & {"TOPOLOGY", "NUMA_NODE"} and not same,
            "the vCPUs and memory that TOPOLOGY and NUMA_NODE are for",
            "others",
        ),
    )
    for is_so, expected, found in refused:
        if is_so:
            raise InputError(
                f"{source}: opennebula: expected {expected}, found {found}",
                hint="choose --layout pin-numa, or --max-nodes 1, or change the template",
            )


def _nodes(plan: Plan, memory: int) -> Iterator[Mapping[str, str]]:
    if plan.layout.cells is GuestCells.FLAT:
        yield {"TOTAL_CPUS": str(plan.vcpus), "MEMORY": str(memory)}
        return
    one_node_each(plan, "opennebula")
    for cell in plan.cells:
        size = whole_units(cell.memory_bytes, MIB, f"memory of cell {cell.id}", "opennebula")
        row = ",".join(f"{other}:{value}" for other, value in enumerate(cell.distances))
        node = {"TOTAL_CPUS": str(len(cell.vcpus)), "MEMORY": str(size)}
        yield {**node, "DISTANCE": row} if row else node


def _pci(
    plan: Plan, host: Host | None, there: tuple[Attribute, ...]
) -> Iterator[Mapping[str, str]]:
    """Devices as lspci prints them: with domains where the host has another than 0."""
    own = {
        Bdf.parse(one.parts["SHORT_ADDRESS"], "PCI"): one.parts
        for one in there
        if one.name == "PCI" and "SHORT_ADDRESS" in one.parts
    }
    bdfs = [d.bdf for d in plan.devices] + [d.bdf for d in (host.pci_devices if host else ())]
    domains = any(bdf.domain for bdf in bdfs)
    for device in plan.devices:
        short = str(device.bdf) if domains else str(device.bdf).partition(":")[2]
        parts = dict(own.get(device.bdf, {"SHORT_ADDRESS": short}))
        parts.pop("ACPI_NODES", None)
        cells = str(CpuSet(device.initiator_cells))
        yield {**parts, "ACPI_NODES": cells} if device.initiator_cells else parts


def _edited(
    text: str, there: tuple[Attribute, ...], wanted: Mapping[str, Sequence[Mapping[str, str]]]
) -> str:
    """Attributes changed in place or removed, new ones on lines at the end."""
    edits, added = [], ""
    for name, lists in wanted.items():
        own = [one for one in there if one.name == name]
        if name == "PCI":  # in any order: those that stay are not touched
            lists, own = (
                [parts for parts in lists if parts not in [one.parts for one in own]],
                [one for one in own if one.parts not in lists],
            )
        for one, parts in zip_longest(own, lists):
            if one is None:
                added += f"{name} = {_text(parts)}\n"
            elif parts is None:
                edits.append((*_line(text, one), ""))
            elif parts != (one.parts or {"": one.value}):
                edits.append((one.value_start, one.end, _text(parts)))
    for first, last, new in sorted(edits, reverse=True):
        text = text[:first] + new + text[last:]
    return text + ("\n" if added and text and not text.endswith("\n") else "") + added


def _text(parts: Mapping[str, str]) -> str:
    quoted = {key: '"' + value.replace('"', '\\"') + '"' for key, value in parts.items()}
    whole = quoted.get("")
    return (
        whole
        if whole is not None
        else "[ " + ", ".join(f"{key} = {one}" for key, one in quoted.items()) + " ]"
    )


def _line(text: str, one: Attribute) -> tuple[int, int]:
    """Where an attribute is, with its line where nothing else is on it."""
    first, last = text.rfind("\n", 0, one.start) + 1, text.find("\n", one.end) + 1 or len(text)
    alone = not text[first : one.start].strip() and not text[one.end : last].strip()
    return (first, last) if alone else (one.start, one.end)


TARGET = Target(
    title="OpenNebula",
    source="Virtual Machine Template and NUMA pages of OpenNebula 6.10 and 7.0; sources of 7.6",
    support=SUPPORT,
    unread=frozenset(("pins", "emulator", "iothreads", "binding", "cell-binding", "device-cell")),
    render=render,
    read_vm=read_vm,
    recognises=is_template,
    may_be=may_be_template,
    architecture_of_host=True,
    needs_host=True,
)
