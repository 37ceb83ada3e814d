"""Incus: the plan as an instance's configuration: limits, devices and raw.qemu.conf.

Incus derives the guest's shape from `limits.cpu`: it sorts the PUs by package, core and thread,
makes vCPU i of the i-th, and gives the guest a cell for each host node of them with an equal share
of the memory. Which cell has which number is another at each start: the nodes are a map of Go.
Source: cpuTopology, getCPUOpts and qemuCPU of Incus 6.0.3 to 7.3. raw.qemu.conf overrides entries
of sections and adds sections.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import structs

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, PuIndex
from homenode.errors import InputError, ParseError
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host
from homenode.units import GIB, KIB, MIB, TIB
from homenode.vm.layout import GuestCells, Pinning, Siblings
from homenode.vm.model import GuestTopology, Vm, VmCell
from homenode.vm.plan_model import Plan, PlanFinding, plan_finding
from homenode.vm.targets.codec import Codec, Row, Writing, number_of
from homenode.vm.targets.qemu_command import size_of
from homenode.vm.targets.target import (
    Feature,
    indirect,
    lost_by,
    native,
    passed_through,
    refuse_arm,
    shape_of_siblings,
    shows_siblings,
)
from homenode.vm.targets.text_edit import Entry, YamlText, parse_yaml, quoted

_SIZE = re.compile(r"([0-9]{1,15})(B|kB|MB|GB|TB|KiB|MiB|GiB|TiB)?\Z", re.ASCII)
_DECIMAL = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_FACTOR = {**_DECIMAL, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
_MEMORY = re.compile(r'\[object "mem([0-9]{1,3})"\]\Z', re.ASCII)
_OF_DISTANCE = ("src", "dst", "val")
_MOST_CELLS = 1000
_SECTION = re.compile(r"\[([^\]\n]{1,80})\](?:\[([0-9]{1,6})\])?\Z", re.ASCII)
_HOTPLUG = "limits.memory.hotplug"
"""Refused as unknown by Incus 6.0.0 to 6.0.4 and 6.1 to 6.14, and no file says its version."""

_RECORD = "user.homenode.siblings"
"""A key of the user's own: vCPUs that are pairs of siblings double only once."""


def is_config(content: bytes) -> bool:
    """Whether this is an instance's configuration as YAML."""
    text = content[:500_000].decode("utf-8", "replace")
    return re.search(r"^config:", text, re.MULTILINE) is not None and (
        "limits." in text or "type: virtual-machine" in text or "devices:" in text
    )


class Instance(NamedTuple):
    """An instance's configuration. devices: by their names."""

    text: YamlText
    devices: Mapping[str, Mapping[str, str]]
    source: str

    def value(self, key: str) -> str | None:
        """Of `config`."""
        found = (block for block in self.text.inside("config") if block.key == key)
        return next(map(self.text.scalar, found), None)

    @property
    def functions(self) -> dict[str, Bdf]:
        """Of the host, by the names of the devices that pass them through."""
        keys = {"pci": "address", "gpu": "pci"}
        named = {
            name: one.get(keys.get(one.get("type", ""), "")) for name, one in self.devices.items()
        }
        where = f"{self.source}: device"
        return {name: Bdf.parse(one, where) for name, one in named.items() if one}


def parse(content: bytes, source: str) -> Instance:
    """Raises ParseError for what is no such YAML."""
    text = parse_yaml(content, source)
    devices = {
        device.key: {one.key: text.scalar(one) for one in text.entries(device)}
        for device in text.inside("devices")
    }
    return Instance(text, devices, source)


def _new(guest: Vm, plan: Plan) -> str:
    return (
        f"# homenode: layout {plan.layout.name}; incus config edit NAME < FILE\n"
        f"name: {quoted(guest.name)}\ntype: virtual-machine\nconfig:\ndevices: {{}}\n"
    )


def _edited(writing: Writing[Instance], wanted: Mapping[str, Any]) -> str:
    config = {key: wanted[key] for key in sorted(wanted) if key != "devices"}
    return writing.file.text.edited({"config": config, "devices": wanted["devices"]})


def _read_head(instance: Instance) -> Mapping[str, Any]:
    text = instance.text
    known = ("type", "name", "architecture")
    top = {block.key: text.scalar(block) for block in text.top if block.key in known}
    if top.get("type") == "container":
        raise InputError(f"{text.source}: expected a virtual machine, found a container")
    return {
        "name": top.get("name") or "instance",
        "architecture": top.get("architecture", "x86_64"),
        "firmware": "efi",
        "launch_security": "sev" if instance.value("security.sev") == "true" else None,
    }


def _read_cpu(instance: Instance) -> Mapping[str, Any]:
    """A number alone counts vCPUs that float."""
    limit = instance.value("limits.cpu") or "1"
    if limit.isascii() and limit.isdigit():
        return {"vcpus": number_of(limit, f"{instance.source}: limits.cpu")}
    pus = CpuSet.parse(limit, f"{instance.source}: limits.cpu")
    return {"vcpus": len(pus), "vcpu_pins": tuple(CpuSet([pu]) for pu in pus)}


def _write_cpu(writing: Writing[Instance]) -> Mapping[str, str | None]:
    plan = writing.plan
    if not plan.vcpu_pins:
        return {"limits.cpu": str(plan.vm.vcpus)}
    pus = str(plan.vm.pinned_pus)
    return {"limits.cpu": f"{pus}-{pus}" if pus.isdigit() else pus, "limits.cpu.nodes": None}


def _read_memory(instance: Instance) -> Mapping[str, Any]:
    memory = instance.value("limits.memory") or "1GiB"
    match = _SIZE.match(memory)
    if match is None:
        raise ParseError(f"{instance.source}: limits.memory", "a size such as 4GiB", memory)
    return {"memory_bytes": int(match[1]) * _FACTOR[match[2] or ""]}


def _write_memory(writing: Writing[Instance]) -> Mapping[str, str | None]:
    wanted: dict[str, str | None] = {}
    if writing.is_new or _read_memory(writing.file)["memory_bytes"] != writing.plan.vm.memory_bytes:
        wanted["limits.memory"] = f"{writing.memory_mib}MiB"
    if writing.plan.vcpu_pins and writing.file.value(_HOTPLUG) is not None:
        wanted[_HOTPLUG] = "false"
    return wanted


def _read_pages(instance: Instance) -> Mapping[str, Any]:
    huge = instance.value("limits.memory.hugepages") in ("true", "1", "yes", "on")
    return {"page_bytes": 0 if huge else None}


def _write_pages(writing: Writing[Instance]) -> Mapping[str, str]:
    return {} if writing.plan.vm.page_bytes is None else {"limits.memory.hugepages": "true"}


def _sections(text: str) -> list[tuple[str, list[str]]]:
    """Sections of raw.qemu.conf, each with its lines, its header first."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if _SECTION.match(line.strip()):
            found.append((line.strip(), [line]))
        elif found:
            found[-1][1].append(line)
        elif line.strip():
            found.append(("", [line]))
    return found


def _entries(lines: list[str]) -> dict[str, str]:
    pairs = (line.partition("=") for line in lines[1:] if "=" in line)
    return {key.strip(): value.strip().strip('"') for key, _, value in pairs}


def _is_ours(header: str, lines: list[str]) -> bool:
    entries = _entries(lines)
    if header.startswith("[numa]"):
        return entries.get("type") == "dist"
    return _MEMORY.match(header) is not None and set(entries) == {"size"}


def _read_overrides(instance: Instance) -> Mapping[str, Any]:
    """Cells of which only sizes and rows of distances are known."""
    sizes: dict[int, int] = {}
    rows: dict[int, dict[int, int]] = {}
    where = f"{instance.source}: raw.qemu.conf"
    for header, lines in _sections(instance.value("raw.qemu.conf") or ""):
        entries = _entries(lines)
        memory = _MEMORY.match(header)
        if memory is not None and "size" in entries:
            sizes[int(memory[1])] = size_of(entries["size"], where)
        elif header.startswith("[numa]") and entries.get("type") == "dist":
            src, dst, value = (number_of(entries.get(key, ""), where) for key in _OF_DISTANCE)
            if max(src, dst) >= _MOST_CELLS:
                raise ParseError(where, f"cells below {_MOST_CELLS}", header)
            rows.setdefault(src, {})[dst] = value
    return {
        "cells": tuple(
            VmCell(
                id=i,
                vcpus=CpuSet(),
                memory_bytes=sizes.get(i, 0),
                distances=tuple(row[d] for d in sorted(row)) if (row := rows.get(i)) else (),
            )
            for i in range(max([*sizes, *rows, -1]) + 1)
        )
    }


def _write_overrides(writing: Writing[Instance]) -> Mapping[str, str | None]:
    """Our sections at the end in place of those of an earlier plan."""
    kept = [
        line
        for header, lines in _sections(writing.file.value("raw.qemu.conf") or "")
        if not _is_ours(header, lines)
        for line in lines
        # The size of a cell's memory is the plan's, whatever else its section sets.
        if not (_MEMORY.match(header) and line.partition("=")[0].strip() == "size")
    ]
    while kept and not kept[-1].strip():
        kept.pop()
    return {"raw.qemu.conf": "\n".join([*kept, *_override_lines(writing.plan)]) or None}


def _override_lines(plan: Plan) -> Iterator[str]:
    cells = [cell for cell in plan.cells if cell.vcpus]
    if plan.layout.cells is not GuestCells.MIRRORED or len(cells) < 2:
        return
    # Incus writes a [numa] section for each cell and one for each vCPU.
    index = len(cells) + plan.vm.vcpus
    for number, cell in enumerate(cells):
        for other, distance in enumerate(cell.distances[: len(cells)]):
            yield f"[numa][{index}]"
            yield 'type = "dist"'
            yield from (
                f'{key} = "{n}"' for key, n in (("src", number), ("dst", other), ("val", distance))
            )
            index += 1


def _read_devices(instance: Instance) -> Mapping[str, Any]:
    physical = {
        bdf: None
        for name, bdf in instance.functions.items()
        if instance.devices[name].get("gputype", "physical") == "physical"
    }
    return {"hostdevs": passed_through(physical.items())[0]}


def _write_devices(writing: Writing[Instance]) -> Mapping[str, Mapping[str, Entry | None]]:
    """New entries of `devices`, and None for those whose function the VM does not get."""
    planned = [device.bdf for device in writing.plan.vm.hostdevs]
    there = writing.file.functions
    wanted: dict[str, Entry | None] = {
        name: None for name, bdf in there.items() if bdf not in planned
    }
    names = set(writing.file.devices) - set(wanted)
    free = (name for i in range(10_000) if (name := f"homenode{i}") not in names)
    for bdf in planned:
        if bdf in there.values():
            continue
        known = None if writing.host is None else writing.host.device(bdf)
        is_gpu = known is not None and known.kind is DeviceKind.GPU
        wanted[next(free)] = (
            {"type": "gpu", "gputype": "physical", "pci": str(bdf)}
            if is_gpu
            else {"type": "pci", "address": str(bdf)}
        )
    return {"devices": wanted}


def _read_siblings(instance: Instance) -> Mapping[str, Any]:
    exposed = instance.value(_RECORD) == Siblings.EXPOSED
    return {"cpu_topology": shape_of_siblings(_read_cpu(instance)["vcpus"])} if exposed else {}


def _write_siblings(writing: Writing[Instance]) -> Mapping[str, str | None]:
    return {_RECORD: str(Siblings.EXPOSED) if shows_siblings(writing.plan) else None}


def with_host(vm: Vm, host: Host) -> Vm:
    """The VM with what Incus derives from the PUs on this host: order of vCPUs, cells, shape."""
    pus = vm.pinned_pus
    ordered = incus_order(pus, host)
    node_of = {pu.index: pu.node for pu in host.pus}
    nodes = sorted({node for pu in ordered if (node := node_of.get(pu)) is not None})
    if not ordered or not nodes:
        return vm
    given = dict(enumerate(vm.cells))
    share = vm.memory_bytes // len(nodes)
    cells = []
    for number, node in enumerate(nodes):
        stated = given.get(number)
        vcpus = CpuSet(i for i, pu in enumerate(ordered) if node_of[pu] == node)
        size = stated.memory_bytes if stated is not None and stated.memory_bytes else share
        row = stated.distances if stated is not None else ()
        cells.append(
            VmCell(id=number, vcpus=vcpus, memory_bytes=size, nodes=CpuSet([node]), distances=row)
        )
    return structs.replace(
        vm,
        cells=tuple(cells),
        vcpu_pins=tuple(CpuSet([pu]) for pu in ordered),
        cpu_topology=_derived_topology(ordered, host),
    )


def incus_order(pus: CpuSet, host: Host) -> tuple[PuIndex, ...]:
    """The PUs in the order in which Incus makes vCPUs of them."""
    place: dict[PuIndex, tuple[int, int, int]] = {}
    for core in host.cores:
        for thread, pu in enumerate(core.pus):
            place[pu] = (core.id.package, core.index, thread)
    return tuple(sorted((pu for pu in pus if pu in place), key=lambda pu: place[pu]))


def _derived_topology(ordered: tuple[PuIndex, ...], host: Host) -> GuestTopology:
    core_of = {pu: core for core in host.cores for pu in core.pus}
    packages: dict[int, set[int]] = {}
    threads: dict[int, int] = {}
    for pu in ordered:
        core = core_of[pu]
        packages.setdefault(core.id.package, set()).add(core.index)
        threads[core.index] = threads.get(core.index, 0) + 1
    if len({len(one) for one in packages.values()}) == 1 and len(set(threads.values())) == 1:
        cores, each = len(next(iter(packages.values()))), next(iter(threads.values()))
        return GuestTopology(len(packages), 1, cores, each)
    return GuestTopology(1, 1, len(ordered), 1)


_IRREGULAR = "irregular sets of PUs become one socket of cores"

ROWS = (
    Row(read=_read_head),
    Row(
        says={
            Feature.VCPU_PINS: native("`limits.cpu` as a list: a vCPU for each PU"),
            Feature.CELLS: indirect(
                "a cell for each host node of `limits.cpu`", "cells and host nodes cannot differ"
            ),
            Feature.MEMORY_NODES: native("bound to the nodes of `limits.cpu`"),
        },
        read=_read_cpu,
        write=_write_cpu,
    ),
    Row(read=_read_memory, write=_write_memory),
    Row(
        says={
            Feature.HUGE_PAGES: indirect(
                "`limits.memory.hugepages`: of the host's mount, 2 MiB by default",
                "the size of the pages is the mount's",
            )
        },
        read=_read_pages,
        write=_write_pages,
        is_compared=False,
    ),
    Row(
        says={
            Feature.UNEQUAL_CELLS: indirect(
                "vCPUs by the PUs of `limits.cpu`, memory is split evenly",
                "cells of unequal memory are refused: their numbers are others at each start",
            ),
            Feature.DISTANCES: indirect(
                "by sections of `raw.qemu.conf`, where all cells are equally far from each other",
                "others are refused, as are cells of unequal memory; a release with other "
                "sections takes them for others",
            ),
        },
        read=_read_overrides,
        write=_write_overrides,
    ),
    Row(
        says={Feature.DEVICES: native("devices of type `gpu` and `pci`")},
        read=_read_devices,
        write=_write_devices,
    ),
    Row(
        says={
            Feature.TOPOLOGY: indirect("derived from the PUs of `limits.cpu`", _IRREGULAR),
            Feature.THREADS: indirect("derived from the PUs of `limits.cpu`", _IRREGULAR),
        },
        read=_read_siblings,
        write=_write_siblings,
        is_compared=False,
    ),
    Row(says=lost_by("incus")),
)


def _refuse(writing: Writing[Instance]) -> None:
    plan, host = writing.plan, writing.host
    if plan.layout.pinning is Pinning.NODE or any(len(pin) != 1 for pin in plan.vcpu_pins):
        raise InputError(
            "incus: expected a PU for each vCPU, found vCPUs that float over several",
            hint="choose --layout pin or pin-numa",
        )
    pus = plan.vm.pinned_pus
    if len(pus) < len(plan.vcpu_pins):
        raise InputError("incus: expected a PU of its own for each vCPU, found one used twice")
    shares = len({pu.node for pu in host.pus if pu.index in pus}) if host is not None else 0
    if writing.memory_mib % max(1, shares):
        raise InputError(
            f"incus: expected memory in equal shares of whole MiB for {shares} host nodes, found "
            f"{writing.memory_mib} MiB",
            hint="choose a memory size that divides into them, or --max-nodes 1",
        )
    if not writing.is_mirrored:
        return
    refuse_arm(writing.guest, "incus", "guest cells")
    cells = [cell for cell in plan.cells if cell.vcpus or cell.memory_bytes]
    nodes = {c.host_nodes for c in cells if c.vcpus and len(c.host_nodes) == 1}
    if len(nodes) < len(cells):
        raise InputError(
            "incus: expected a guest cell for each host node of its vCPUs, as Incus makes them, "
            "found cells that differ from the nodes",
            hint="choose a flat layout, or the target qemu",
        )
    _refuse_by_number(cells)


def _refuse_by_number(cells: Sequence[VmCell]) -> None:
    """What a file would say of cells by their number, which is another at each start."""
    numbered = range(len(cells)) if all(cell.distances for cell in cells) else ()
    found: dict[str, set[object]] = {
        "of equal memory": {f"{cell.memory_bytes // MIB} MiB" for cell in cells},
        "of one distance to themselves": {cells[i].distances[i] for i in numbered},
        "equally far from each other": {
            cells[i].distances[j] for i in numbered for j in numbered if i != j
        },
    }
    for wanted, values in found.items():
        if len(values) > 1:
            raise InputError(
                f"incus: expected guest cells {wanted}, since Incus numbers them in random order "
                f"at each start, found {', '.join(sorted(map(str, values)))}",
                hint="choose other cells by --cell or --max-nodes, or the target qemu",
            )


def _findings(writing: Writing[Instance], _: object) -> Iterator[PlanFinding]:
    plan, host = writing.plan, writing.host
    if plan.vcpu_pins and host is not None:
        yield from _of_host(plan, host)
    if plan.vm.hostdevs and plan.vcpu_pins and writing.file.value(_HOTPLUG) is None:
        yield plan_finding(
            "target-not-carried",
            writing.guest.name,
            f"{_HOTPLUG} is not in the file, since Incus before 6.0.5 and 6.1 to 6.14 "
            "refuse it; without it newer ones keep address space for more memory in "
            "front of the devices' BARs",
            case="Incus",
        )


def _of_host(plan: Plan, host: Host) -> Iterator[PlanFinding]:
    """What Incus derives from the host otherwise than the plan."""
    pus = plan.vm.pinned_pus
    planned = tuple(pu for pin in plan.vcpu_pins for pu in pin)
    if incus_order(pus, host) != planned:
        yield plan_finding(
            "target-vcpu-order",
            "Incus: order of vCPUs",
            "Incus numbers vCPUs by package, core and thread of their PUs, the plan otherwise",
        )
    node_of = {pu.index: pu.node for pu in host.pus}
    nodes = {node_of.get(pu) for pu in pus}
    if plan.layout.cells is GuestCells.FLAT and len(nodes) > 1:
        yield plan_finding(
            "target-cells-added",
            "Incus: guest cells",
            f"the layout is flat, and Incus gives the guest {len(nodes)} cells with "
            "bound memory, "
            "one for each host node of its PUs",
        )


CODEC = Codec(
    name="incus",
    rows=ROWS,
    parse=parse,
    new=_new,
    edited=_edited,
    refuse=_refuse,
    findings=_findings,
)
TARGET = CODEC.target(
    title="Incus",
    source="doc/reference/instance_options.md and instance driver of Incus 6.0 to 7.3",
    recognises=is_config,
    users_own=r"(name|description|profiles|ephemeral|stateful|project|location|status\w*|\w+_at):|devices:"
    r" (?!homenode)|expanded_|config: (volatile|user|image|cloud-init|boot|snapshots|migration)\.",
    architecture_of_host=True,
    needs_host=True,
    runs_qemu=True,
    as_started=with_host,
)
