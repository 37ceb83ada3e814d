"""CloudHypervisor: the plan as arguments: vCPU affinity, memory zones, NUMA nodes, PCI segments."""

import re
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError, ParseError
from homenode.machine.pci import canonical_uuid
from homenode.units import MIB
from homenode.vm.model import GuestAddress, GuestTopology, Vm, VmCell
from homenode.vm.plan_model import Plan
from homenode.vm.targets.codec import Codec, Row, Writing, cpus_of, number_of
from homenode.vm.targets.hypervisor_command import (
    HypervisorCommand,
    Keys,
    is_command,
    list_of,
    parse,
)
from homenode.vm.targets.qemu_command import size_of, size_text
from homenode.vm.targets.script import (
    PREPARE,
    array,
    array_in,
    plan_values,
    quoted,
    without_continuation,
)
from homenode.vm.targets.target import (
    Feature,
    indirect,
    lost_by,
    native,
    one_node_each,
    passed_through,
)
from homenode.wording import printable

_OURS = ("--cpus", "--memory", "--memory-zone", "--platform", "--numa", "--device")
_MOST_SEGMENTS = 96
_OF_DEVICE = ("path", "pci_segment", "id")
_OUR_ID = re.compile(r"homenode[0-9]{1,4}\Z", re.ASCII)


def _merged(keys: Keys, wanted: Mapping[str, str | None]) -> str:
    """The keys of a value with ours in them; None takes one away."""
    merged = {**keys, **wanted}
    return ",".join(f"{key}={value}" for key, value in merged.items() if value is not None)


def _new(guest: Vm, plan: Plan) -> str:
    emulator = "" if plan.vm.emulator_pus is None else f"taskset -c {plan.vm.emulator_pus} "
    return (
        "#!/usr/bin/env bash\n"
        f"# homenode: VM {printable(guest.name)}, layout {plan.layout.name}.\n"
        "# More words go to Cloud Hypervisor: --kernel, --disk, --net.\nset -euo pipefail\n"
        f'exec {emulator}cloud-hypervisor \\\n  --cpus boot=1 \\\n  "$@"\n'
    )


def _edited(writing: Writing[HypervisorCommand], wanted: Mapping[str, list[str]]) -> str:
    """The text with our options taken out and written again where the first of them was."""
    command = writing.file
    text = command.text
    ours = [option for option in command.options if option.name in _OURS]
    words = [(name, value) for name in _OURS for value in wanted.get(name, ())]
    separator = " \\\n  " if "\\\n" in text else " "
    new = _joined(words, separator)
    for option in reversed(ours[1:]):
        text = without_continuation(text[: option.start]) + text[option.end :]
    if ours:
        text = text[: ours[0].start] + new + text[ours[0].end :]
    else:
        end = len(text.rstrip())
        text = text[:end] + separator + new + text[end:]
    before, after = (CODEC.read_vm(one.encode(), writing.source) for one in (command.text, text))
    return text if writing.plan.vcpu_pins or before != after else command.text


def _joined(words: list[tuple[str, str]], separator: str) -> str:
    """Options with their values; one that follows another of its name adds its value to it."""
    text, last = "", ""
    for name, value in words:
        text += (" " if name == last else f"{separator}{name} ") + quoted(value)
        last = name
    return text.removeprefix(separator)


def _read_head(command: HypervisorCommand) -> Mapping[str, Any]:
    platform = command.first("--platform", "")
    values = (value for option in command.options for value in option.values)
    security = "tdx" if platform.get("tdx") == "on" else None
    return {
        "name": "vm",
        "architecture": "aarch64" if any("aarch64" in value for value in values) else "x86_64",
        "launch_security": "sev-snp" if platform.get("sev_snp") == "on" else security,
    }


def _read_cpus(command: HypervisorCommand) -> Mapping[str, Any]:
    cpus = command.first("--cpus", "boot=1")
    vcpus = command.number(cpus, "boot")
    fields: dict[str, Any] = {"vcpus": vcpus}
    if "topology" in cpus:
        counts = cpus["topology"].split(":")
        where = f"{command.source}: topology"
        if len(counts) != 4:
            raise ParseError(where, "threads:cores:dies:packages", cpus["topology"])
        threads, cores, dies, packages = (number_of(one, where) for one in counts)
        fields["cpu_topology"] = GuestTopology(packages, dies, cores, threads)
    if "affinity" in cpus:
        pins: list[CpuSet | None] = [None] * vcpus
        where = f"{command.source}: affinity"
        for pair in list_of(cpus["affinity"]):
            vcpu, _, pus = pair.partition("@")
            number = number_of(vcpu, where)
            if number >= vcpus:
                raise ParseError(where, f"vCPUs below {vcpus}", vcpu)
            pins[number] = CpuSet.parse(",".join(list_of(pus)), where)
        fields["vcpu_pins"] = tuple(pins)
    return fields


def _write_cpus(writing: Writing[HypervisorCommand]) -> Mapping[str, list[str]]:
    plan, shape = writing.plan, writing.plan.vm.cpu_topology
    given = writing.file.first("--cpus", "")
    cpus: dict[str, str | None] = {"boot": str(plan.vm.vcpus)}
    if "max" in given:
        cpus["max"] = str(plan.vm.vcpus)
    arm = writing.guest.architecture == "aarch64"
    if shape is not None:
        cpus["topology"] = f"{shape.threads}:{shape.cores}:{shape.dies}:{shape.sockets}"
    if shape is not None and (shape.dies > 1 if arm else shape.threads > 2):
        # Source: validate() in vmm/src/config.rs; the dies from 52.0 on.
        most = "1 die a package" if arm else "2 threads a core"
        raise InputError(
            f"{writing.source}: expected at most {most} for Cloud Hypervisor, found "
            f"threads:cores:dies:packages {cpus['topology']}",
            hint="choose another layout: homenode list layouts says which show threads",
        )
    if shape is None and "topology" in given and given.get("boot") != str(plan.vm.vcpus):
        cpus["topology"] = None
    if plan.vcpu_pins:
        affinity = ",".join(f"{vcpu}@[{pus}]" for vcpu, pus in enumerate(plan.vcpu_pins))
        cpus["affinity"] = f"[{affinity}]"
    return {"--cpus": [_merged(given, cpus)]}


def _read_emulator(command: HypervisorCommand) -> Mapping[str, Any]:
    match = re.search(r"taskset -c ([0-9,-]{1,4000}) ", command.text)
    where = f"{command.source}: taskset"
    return {"emulator_pus": None if match is None else CpuSet.parse(match[1], where)}


def cell_pages(keys: Mapping[str, str], source: str) -> int | None:
    """Bytes of a zone's huge pages; 0 = the default size, None = ordinary pages."""
    if keys.get("hugepages") not in ("on", "true"):
        return None
    return size_of(keys["hugepage_size"], source) if "hugepage_size" in keys else 0


def _sizes(command: HypervisorCommand) -> dict[str, int]:
    where = f"{command.source}: --memory-zone"
    return {name: size_of(keys.get("size", ""), where) for name, keys in command.zones.items()}


def _read_memory(command: HypervisorCommand) -> Mapping[str, Any]:
    source, zones = command.source, command.zones.values()
    memory = command.first("--memory", "size=512M")
    total = size_of(memory.get("size", "0"), f"{source}: --memory")
    pages = [page for keys in (*zones, memory) if (page := cell_pages(keys, source)) is not None]
    homes = sorted({keys["host_numa_node"] for keys in zones if "host_numa_node" in keys})
    return {
        "memory_bytes": total + sum(_sizes(command).values()),
        "page_bytes": max(pages, default=None),
        "binding": ("strict", CpuSet.parse(",".join(homes), source)) if homes else None,
    }


def _write_memory(writing: Writing[HypervisorCommand]) -> Mapping[str, list[str]]:
    plan, given = writing.plan, writing.file.first("--memory", "")
    pages: dict[str, str | None] = {}
    if plan.vm.page_bytes is not None:
        pages = {"hugepages": "on"}
        if plan.vm.page_bytes:
            pages["hugepage_size"] = size_text(plan.vm.page_bytes)
    if not writing.is_mirrored and plan.memory_mode is None:
        return {"--memory": [_merged(given, {"size": size_text(plan.vm.memory_bytes), **pages})]}
    kept = {key: text for key, text in given.items() if key not in ("hugepages", "hugepage_size")}
    zones = []
    shared = {key: given[key] for key in ("shared", "mergeable") if key in given}
    for name, size, node in _zones_of_cells(plan) if writing.is_mirrored else _zones_of_nodes(plan):
        if size:
            bound = {"host_numa_node": str(node)} if plan.memory_mode is not None else {}
            zone = {"id": f"mem{name}", "size": size_text(size), **bound, **pages, **shared}
            zones.append(_merged({}, zone))
    return {"--memory": [_merged(kept, {"size": "0"})], "--memory-zone": zones}


def _zones_of_cells(plan: Plan) -> list[tuple[int, int, int]]:
    """Number, bytes and host node of each cell's zone."""
    nodes = one_node_each(plan, "cloud-hypervisor")
    pairs = zip(plan.cells, nodes, strict=True)
    return [(cell.id, cell.memory_bytes, node) for cell, node in pairs]


def _zones_of_nodes(plan: Plan) -> list[tuple[int, int, int]]:
    """The same of a flat guest, whose zones are no cells of it: one for each host node, as the huge
    pages are reserved, else in equal parts."""
    if plan.page_reservations:
        sizes = {one.node: one.page_bytes * one.pages for one in plan.page_reservations}
        return [(number, sizes[node], node) for number, node in enumerate(sorted(sizes))]
    unit = plan.vm.page_bytes or MIB
    share = plan.vm.memory_bytes // unit // len(plan.memory_nodes) * unit
    rest = plan.vm.memory_bytes - share * len(plan.memory_nodes)
    return [
        (number, share + (rest if number == 0 else 0), node)
        for number, node in enumerate(plan.memory_nodes)
    ]


def _read_cells(command: HypervisorCommand) -> Mapping[str, Any]:
    nodes = [(command.number(keys, "guest_numa_id"), keys) for keys in command.all("--numa")]
    nodes.sort(key=lambda node: node[0])
    return {"cells": tuple(_cell(command, number, keys, len(nodes)) for number, keys in nodes)}


def _cell(command: HypervisorCommand, number: int, keys: Keys, count: int) -> VmCell:
    source, zones, sizes = command.source, command.zones, _sizes(command)
    names = list_of(keys.get("memory_zones", ""))
    unknown = [name for name in names if name not in zones]
    if unknown:
        raise ParseError(f"{source}: memory_zones", "zones of --memory-zone", unknown[0])
    homes = [zones[name]["host_numa_node"] for name in names if "host_numa_node" in zones[name]]
    stated = {number: 10}
    for pair in list_of(keys.get("distances", "")):
        other, _, distance = pair.partition("@")
        stated[number_of(other, source)] = number_of(distance, source)
    pages = [page for name in names if (page := cell_pages(zones[name], source)) is not None]
    return VmCell(
        id=number,
        vcpus=cpus_of(",".join(list_of(keys.get("cpus", ""))), f"{source}: cpus"),
        memory_bytes=sum(sizes[name] for name in names),
        nodes=cpus_of(",".join(homes), source),
        mode="strict" if homes else None,
        distances=tuple(stated[i] for i in sorted(stated)) if len(stated) == count > 1 else (),
        page_bytes=max(pages, default=None),
    )


def _segments(plan: Plan) -> dict[int, int]:
    """The PCI segment of each cell with devices. Segment 0 holds the VM's own devices, on the first
    cell with devices or none."""
    cells = sorted({device.cell for device in plan.vm.hostdevs if device.cell is not None})
    if len(cells) >= _MOST_SEGMENTS:
        raise InputError(f"cloud-hypervisor: expected fewer than {_MOST_SEGMENTS} cells")
    return {cell: number for number, cell in enumerate(cells, start=1)}


def _given_devices(command: HypervisorCommand) -> list[tuple[Bdf | str, Keys]]:
    return [(_device(keys), keys) for keys in command.all("--device")]


def _names(writing: Writing[HypervisorCommand]) -> dict[Bdf, str]:
    """Ids of the planned devices: those that the user gave them stay."""
    given = {bdf: keys.get("id", "") for bdf, keys in _given_devices(writing.file)}
    own = {bdf: name for bdf, name in given.items() if name and not _OUR_ID.match(name)}
    return {d.bdf: own.get(d.bdf, f"homenode{i}") for i, d in enumerate(writing.plan.vm.hostdevs)}


def _write_cells(writing: Writing[HypervisorCommand]) -> Mapping[str, list[str]]:
    plan, segments, names = writing.plan, _segments(writing.plan), _names(writing)
    owner: dict[int, str] = {
        cell: names[device.bdf] for device in plan.vm.hostdevs for cell in device.initiator_cells
    }
    nodes = []
    for cell in plan.cells if writing.is_mirrored else ():
        others = [f"{o}@{d}" for o, d in enumerate(cell.distances) if o != cell.id]
        keys = {
            "guest_numa_id": str(cell.id),
            "cpus": f"[{cell.vcpus}]" if cell.vcpus else None,
            "distances": f"[{','.join(others)}]" if others else None,
            "memory_zones": f"[mem{cell.id}]" if cell.memory_bytes else None,
            "pci_segments": f"[{segments[cell.id]}]" if cell.id in segments else None,
            "device_id": owner.get(cell.id),
        }
        nodes.append(_merged({}, keys))
    return {"--numa": nodes}


def _device(keys: Mapping[str, str]) -> Bdf | str:
    name = keys.get("path", "").rstrip("/").rpartition("/")[2]
    return canonical_uuid(name) or Bdf.parse(name, "--device path")


def _read_devices(command: HypervisorCommand) -> Mapping[str, Any]:
    cell_of: dict[int, int] = {}
    gpu_of: list[tuple[int, str]] = []
    for keys in command.all("--numa"):
        cell = command.number(keys, "guest_numa_id")
        for segment in list_of(keys.get("pci_segments", "")):
            cell_of[number_of(segment, f"{command.source}: pci_segments")] = cell
        gpu_of += [(cell, keys["device_id"])] if "device_id" in keys else []
    devices, by_id = [], {}
    for host, keys in _given_devices(command):
        own = number_of(keys.get("pci_segment", "0"), f"{command.source}: pci_segment")
        devices.append((host, cell_of.get(own)))
        by_id[keys.get("id", "")] = host
    initiators: dict[Bdf, CpuSet] = {}
    for number, name in gpu_of:
        owner = by_id.get(name)
        if isinstance(owner, Bdf):
            initiators[owner] = initiators.get(owner, CpuSet()) | CpuSet([number])
    hostdevs, mediated = passed_through(devices, initiators)
    return {"hostdevs": hostdevs, "mediated": mediated}


def _placed(vm: Vm, content: bytes, source: str) -> Vm:
    """With the addresses of devices on segments other than 0: their pci_device_id, else the lowest
    that is free, from 1 on. On segment 0 the VM's own devices come first: none is known.
    Source: pci/src/bus.rs, releases to 53.0; main of 2026-08-20 begins with 0 on those segments.
    """
    command, at = parse(content, source), dict[Bdf | str, GuestAddress]()
    for host, keys in sorted(_given_devices(command), key=lambda it: "pci_device_id" not in it[1]):
        own = number_of(keys.get("pci_segment", "0"), f"{source}: pci_segment")
        stated = (
            [command.number(keys, "pci_device_id")] if "pci_device_id" in keys else range(1, 32)
        )
        places = (GuestAddress(own, 0, number, 0) for number in stated)
        place = next((one for one in places if one not in at.values()), None)
        if own and place is not None:
            at[host] = place
    return replace(vm, hostdevs=tuple(replace(one, address=at.get(one.bdf)) for one in vm.hostdevs))


def _write_devices(writing: Writing[HypervisorCommand]) -> Mapping[str, list[str]]:
    """Mediated devices are of no plan: they stay, as do the other keys of a device."""
    segments, names = _segments(writing.plan), _names(writing)
    given = _given_devices(writing.file)
    kept = {bdf: keys for bdf, keys in given if isinstance(bdf, Bdf)}
    words = []
    for device in writing.plan.vm.hostdevs:
        keys = {"path": f"/sys/bus/pci/devices/{device.bdf}/", "id": names[device.bdf]}
        if device.cell is not None:
            keys["pci_segment"] = str(segments[device.cell])
        more = {k: v for k, v in kept.get(device.bdf, {}).items() if k not in _OF_DEVICE}
        words.append(_merged(keys, dict(more)))
    words += [_merged({}, dict(keys)) for name, keys in given if isinstance(name, str)]
    platform = dict(writing.file.first("--platform", ""))
    if segments:
        platform["num_pci_segments"] = str(len(segments) + 1)
    return {"--platform": [_merged({}, platform)] if platform else [], "--device": words}


def _prepare(writing: Writing[HypervisorCommand], wanted: Any) -> tuple[tuple[str, bytes], ...]:
    values = plan_values(writing.plan)
    text = (
        "#!/usr/bin/env bash\n# homenode: reserve huge pages, give the devices to vfio-pci. "
        "Run as root before the VM starts.\nset -euo pipefail\n\n"
        + "".join(array(name, array_in(values, name) or ()) for name in ("devices", "huge_pages"))
        + f"{PREPARE}\nprepare\n"
    )
    return ((".prepare.sh", text.encode()),)


ROWS = (
    Row(read=_read_head),
    Row(
        says={
            Feature.VCPU_PINS: native("`--cpus affinity=`", (20, 0, 0)),
            Feature.TOPOLOGY: native("`--cpus topology=`", (0, 9, 0)),
            Feature.THREADS: native("`--cpus topology=`", (0, 9, 0)),
            Feature.DIES: native("`--cpus topology=`", (0, 9, 0)),
        },
        read=_read_cpus,
        write=_write_cpus,
    ),
    Row(
        says={
            Feature.EMULATOR_PINS: indirect(
                "taskset around the program",
                "its vCPU threads are moved off again by affinity alone",
            )
        },
        read=_read_emulator,
    ),
    Row(
        says={
            Feature.MEMORY_NODES: native("`--memory-zone host_numa_node=`", (0, 10, 0)),
            Feature.HUGE_PAGES: native("`--memory-zone hugepages=on,hugepage_size=`", (0, 13, 0)),
        },
        read=_read_memory,
        write=_write_memory,
    ),
    Row(
        says={
            Feature.CELLS: native("`--numa`", (0, 10, 0)),
            Feature.UNEQUAL_CELLS: native("`--memory-zone size=`", (0, 10, 0)),
            Feature.DISTANCES: native("`--numa distances=`"),
        },
        read=_read_cells,
        write=_write_cells,
    ),
    Row(
        says={
            Feature.DEVICES: indirect(
                "`--device path=`", "nothing keeps another VM from taking the same device"
            ),
            Feature.DEVICE_CELLS: native("`pci_segment=` of `--numa` and `--device`", (36, 0, 0)),
            Feature.INITIATORS: native("`--numa device_id=`", (51, 0, 0)),
            Feature.WINDOW: native("every segment has its own window, sized by the program"),
        },
        read=_read_devices,
        write=_write_devices,
    ),
    Row(says=lost_by("cloud_hypervisor")),
)

CODEC = Codec(
    name="cloud-hypervisor",
    rows=ROWS,
    parse=parse,
    new=_new,
    edited=_edited,
    most_vcpus=254,
    companions=_prepare,
)
TARGET = CODEC.target(
    title="Cloud Hypervisor",
    source="docs/cpu.md, memory.md, vfio.md and release-notes.md of Cloud Hypervisor, 2026-08",
    recognises=is_command,
    users_own=r"--(disk|net|console|serial|api-socket|rng|vsock|tpm)",
    architecture_of_host=True,
    placed=_placed,
)
