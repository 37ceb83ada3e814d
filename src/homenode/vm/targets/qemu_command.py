"""QemuCommand: writes and reads the options of QEMU that place a VM's parts.

Syntax as in QEMU's manual (qemu-system(1)): values of an option are separated by commas, a comma in
a value is doubled, a key may be given several times.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from uuid import UUID, uuid5

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.formats import NotJsonError, decode_json
from homenode.machine.pci import normalize_uuid
from homenode.units import GIB, KIB, MIB, parse_whole, to_bytes
from homenode.vm.model import (
    MAX_VCPUS,
    PORTS,
    QEMU_DEVICE,
    GuestAddress,
    GuestCache,
    GuestHostdev,
    GuestPciController,
    GuestTopology,
    Vm,
    VmCell,
    complete_distances,
)
from homenode.vm.plan import Plan
from homenode.vm.plan_options import MemoryMode
from homenode.vm.targets.target import is_vgpu, split_devices, split_words

_MODEL_OF_DEVICE = {device: model for model, device in QEMU_DEVICE.items()}
POLICY_OF_MODE = {
    MemoryMode.STRICT: "bind",
    MemoryMode.INTERLEAVE: "interleave",
    MemoryMode.PREFERRED: "preferred",
}
_MODE_OF_POLICY = {policy: mode.value for mode, policy in POLICY_OF_MODE.items()}
_MEDIATED = "/sys/bus/mdev/devices/"
_NAMESPACE = UUID("6c5bd0d3-43f1-4c65-9c2e-8f6d3a4c5b10")
"""Namespace of UUIDs that are made of a VM's name."""

CACHE_WORDS: Mapping[str | None, tuple[str, ...]] = {
    GuestCache.PASSTHROUGH: ("host-cache-info=on", "l3-cache=off"),
    GuestCache.EMULATED: ("l3-cache=on",),
    GuestCache.DISABLED: ("l3-cache=off",),
}
"""Properties of a CPU model, by the caches that the guest is shown."""

_UNITS = (("G", GIB), ("M", MIB), ("K", KIB))
_SIZE = re.compile(r"([0-9]{1,20})([BKMGT]?)(?:i?B)?\Z", re.ASCII | re.IGNORECASE)


def escape_commas(value: str) -> str:
    """Return a value of an option.

    >>> escape_commas("a,b")
    'a,,b'
    """
    return value.replace(",", ",,")


def format_size(size_bytes: int) -> str:
    """Return a size with the largest unit that divides it.

    >>> format_size(3 << 30), format_size((3 << 30) + 1)
    ('3G', '3221225473B')
    """
    for letter, unit in _UNITS:
        if size_bytes and not size_bytes % unit:
            return f"{size_bytes // unit}{letter}"
    return f"{size_bytes}B"


def parse_size(text: str, source: str, *, default_unit: int = 1) -> int:
    """Return the bytes of a size. default_unit: the unit of a bare number. Raises ParseError, and
    like bytes_of."""
    match = _SIZE.match(text.strip())
    if match is None:
        raise ParseError(source, "a size such as 512M", text)
    unit = match[2].upper()
    return to_bytes(int(match[1]) * (1 if unit else default_unit), unit)


def format_ranges(key: str, numbers: CpuSet) -> str:
    """Format a set for QEMU, which repeats the key for each range.

    >>> format_ranges("cpus", CpuSet.parse("0-3,8"))
    ',cpus=0-3,cpus=8'
    """
    return "".join(
        f",{key}={first}" if first == last else f",{key}={first}-{last}"
        for first, last in numbers.ranges()
    )


def list_numa_words(plan: Plan) -> Iterator[tuple[str, str]]:
    """-object and -numa of the plan's cells. A flat guest whose memory is bound has one cell."""
    if plan.is_mirrored:
        for cell in plan.cells:
            vcpus = format_ranges("cpus", cell.vcpus)
            memory = ""
            if cell.memory_bytes:
                yield "-object", format_backend(plan, cell, f"ram-node{cell.id}")
                memory = f",memdev=ram-node{cell.id}"
            yield "-numa", f"node,nodeid={cell.id}{vcpus}{memory}"
        yield from list_distance_words(plan.cells)
    elif has_backend(plan):
        yield "-object", format_backend(plan, plan.cells[0], "ram-node0")


def has_backend(plan: Plan) -> bool:
    """The guest's memory is named on the command line: it is bound, or of huge pages."""
    return plan.memory_mode is not None or plan.vm.page_bytes is not None


def list_distance_words(cells: Sequence[VmCell]) -> Iterator[tuple[str, str]]:
    """-numa dist of every pair of cells."""
    if len(cells) > 1:
        for cell in cells:
            for other, distance in enumerate(cell.distances):
                yield "-numa", f"dist,src={cell.id},dst={other},val={distance}"


def format_backend(plan: Plan, cell: VmCell, id: str) -> str:
    """Return the memory of a cell: its size, its pages and the host nodes that it comes from."""
    kind = "memory-backend-ram"
    pages = ""
    if plan.vm.page_bytes is not None:
        kind = "memory-backend-memfd"
        size = f",hugetlbsize={format_size(plan.vm.page_bytes)}" if plan.vm.page_bytes else ""
        pages = f",hugetlb=on{size},prealloc=on"
    bound = ""
    if plan.memory_mode is not None:
        mirrored = plan.is_mirrored
        nodes = CpuSet(cell.host_nodes if mirrored else plan.memory_nodes)
        policy = POLICY_OF_MODE[plan.memory_mode]
        bound = f"{format_ranges('host-nodes', nodes)},policy={policy}"
    return f"{kind},id={id},size={format_size(cell.memory_bytes)}{pages}{bound}"


def format_smp(plan: Plan) -> str:
    """Return -smp of the plan; sockets only if the plan keeps the topology."""
    shape = plan.vm.cpu_topology
    if shape is None:
        return str(plan.vm.vcpus)
    dies = f"dies={shape.dies}," if shape.dies > 1 else ""
    return (
        f"{plan.vm.vcpus},sockets={shape.sockets},{dies}cores={shape.cores},threads={shape.threads}"
    )


def format_cpu(plan: Plan, model: str = "host") -> str:
    """Return -cpu with the plan's SMT on AMD, caches and address bits."""
    words = [model]
    if plan.vm.topoext is not None:
        words.append(f"topoext={'on' if plan.vm.topoext else 'off'}")
    words += CACHE_WORDS.get(plan.vm.cpu_cache, ())
    bits = None if plan.aperture is None else plan.aperture.physical_address_bits
    if bits is not None:
        words += ["host-phys-bits=off", f"phys-bits={bits}"]
    return ",".join(words)


def format_vfio(device: GuestHostdev) -> str:
    """-device of a passed-through function or mediated device, without its place. Source: NVIDIA
    vGPU user guide, "Adding a vGPU to a Linux with KVM VM by QEMU command line"."""
    if device.uuid is not None:
        return f"vfio-pci,sysfsdev={_MEDIATED}{device.uuid}"
    return f"vfio-pci,host={device.bdf}"


def list_uuid_words(plan: Plan, guest: Vm) -> Iterator[tuple[str, str]]:
    """Return -uuid, by which NVIDIA's vGPU manager identifies the VM; nothing without a vGPU."""
    if any(map(is_vgpu, plan.vm.hostdevs)):
        yield "-uuid", guest.uuid or str(uuid5(_NAMESPACE, guest.name))


class QemuPciTree(Struct, frozen=True):
    """Bridges and endpoints of a guest, as QEMU names them."""

    root: str = "pcie.0"  # the bus of controller 0
    prefix: str = "pci."  # prefix of other ids, before their index
    # (bus, device) of a function other than 0
    shared_slots: frozenset[tuple[int, int]] = frozenset()
    chassis_base: int = 0  # what the numbers of slots count from

    def format_controller(self, controller: GuestPciController) -> str:
        """-device of a bridge."""
        words = f"{QEMU_DEVICE[controller.model]},id={self.prefix}{controller.index}"
        if controller.bus_nr is not None:
            words += f",bus_nr={controller.bus_nr}"
            if controller.cell is not None:
                words += f",numa_node={controller.cell}"
        if controller.model in PORTS:
            words += f",chassis={self.chassis_base + controller.index}"
        elif controller.model == "pci-bridge":
            words += f",chassis_nr={controller.index}"
        return (
            words if controller.address is None else words + self.format_place(controller.address)
        )

    def format_place(self, address: GuestAddress) -> str:
        """Return the place of a device."""
        bus = f"{self.prefix}{address.bus}" if address.bus else self.root
        place = f",bus={bus},addr={address.device:#x}.{address.function:#x}"
        shared = (address.bus, address.device) in self.shared_slots and not address.function
        return place + (",multifunction=on" if shared else "")


def list_shared_slots(addresses: Iterable[GuestAddress]) -> frozenset[tuple[int, int]]:
    """Return (bus, device) of slots with functions other than 0."""
    return frozenset((a.bus, a.device) for a in addresses if a.function)


Options = tuple[tuple[str, str | None], ...]
"""Options of a command line with their values, else None."""

_LIKE_OPTION = re.compile(r"--?[a-zA-Z]", re.ASCII)
_ALONE = frozenset(
    """
    enable-kvm daemonize nodefaults no-user-config no-shutdown no-reboot S nographic
""".split()
)


def parse_options(words: Sequence[str], source: str) -> Options:
    """The options of a command line without its program. Raises ParseError for other words."""
    options: list[tuple[str, str | None]] = []
    remaining = list(reversed(words))
    while remaining:
        word = remaining.pop()
        if not word.startswith("-") or len(word) < 2:
            raise ParseError(source, "an option of QEMU", word)
        name = word.lstrip("-")
        # A value that begins like an option is an option: only QEMU has a list of both.
        alone = name in _ALONE or not remaining or _LIKE_OPTION.match(remaining[-1]) is not None
        value = None if alone else remaining.pop()
        options.append((name, value))
    return tuple(options)


def split_fields(value: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the first word of an option's value ("" if none) and its keys, in order.

    Also of a value in JSON, as libvirt 7 and newer write it; a list is a text with commas.

    >>> split_fields("node,nodeid=0,cpus=0-3,cpus=8")
    ('node', (('nodeid', '0'), ('cpus', '0-3'), ('cpus', '8')))
    """
    if value.startswith("{"):
        return _parse_json_fields(value)
    words = [word.replace("\0", ",") for word in value.replace(",,", "\0").split(",")]
    first = "" if "=" in words[0] else words.pop(0)
    pairs = []
    for word in words:
        key, _, text = word.partition("=")
        pairs.append((key, text))
    return first, tuple(pairs)


def _parse_json_fields(value: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    try:
        fields = decode_json(value, dict[str, object])
    except NotJsonError:
        return "", ()
    kind = str(fields.pop("qom-type", ""))
    return kind, tuple((key, _format_json_word(value)) for key, value in fields.items())


def _format_json_word(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def join_option(first: str, pairs: Iterable[tuple[str, str]]) -> str:
    """Return an option's value of its first word and its keys.

    >>> join_option("pxb-pcie", [("id", "a,b"), ("bus_nr", "8")])
    'pxb-pcie,id=a,,b,bus_nr=8'
    """
    return ",".join([first, *(f"{key}={escape_commas(text)}" for key, text in pairs)])


def _set_of(pairs: Iterable[tuple[str, str]], key: str, source: str) -> CpuSet:
    ranges = [value for name, value in pairs if name == key]
    return CpuSet.parse(",".join(ranges), source) if ranges else CpuSet()


def read_command_line(text: str, source: str) -> Vm | None:
    """Return the VM of a command line as a shell, `ps` or libvirt's log has it, with the words
    before the program; None for another text. Raises ParseError."""
    command_text = text[:_MAX_CHARACTERS].replace("\\\n", " ")
    program = _PROGRAM.search(command_text)
    if program is None:
        return None
    words = split_words(command_text[program.end() - 1 :], source)
    return build_command_vm(parse_options(words, source), source)


_MAX_CHARACTERS = 1 << 18
_PROGRAM = re.compile(r"\b(?:qemu-system-\w{1,20}|qemu-kvm|kvm)\s{1,40}-")


def build_command_vm(options: Options, source: str) -> Vm:
    """Return the VM of a command line. Raises like read_command."""
    fields = read_command(options, source)
    pins = (None,) * fields["vcpus"]
    return Vm(name="vm", source=source, cpu_mode="host-passthrough", vcpu_pins=pins, **fields)


def read_command(options: Options, source: str) -> dict[str, Any]:
    """Return the fields of a Vm in a command line: topology, cells, memory, devices and their
    cells. A later -smp overrides an earlier one by key, as in QEMU. Raises ParseError."""
    # Long because it has a branch for each option that is read.
    smp: dict[str, str] = {}
    memory = None
    objects: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {}
    nodes: dict[int, tuple[tuple[str, str], ...]] = {}
    distances: dict[tuple[int, int], int] = {}
    backing: str | None = None
    has_iommu = any(o == "device" and (v or "").startswith("intel-iommu") for o, v in options)
    hole = None
    for option, text in options:
        value = text or ""
        first, pairs = split_fields(value)
        keys = dict(pairs)
        if option == "smp":
            smp |= ({"cpus": first} if first else {}) | keys
        elif option == "m":
            memory = parse_size(first or keys.get("size", ""), f"{source}: -m", default_unit=MIB)
        elif option == "machine":
            backing = keys.get("memory-backend", backing)
            has_iommu |= "iommu" in keys
        elif option == "object":
            objects[keys.get("id", "")] = (first, pairs)
        elif option == "numa" and first == "node":
            nodes[_number(keys, "nodeid", source)] = pairs
        elif option == "numa" and first == "dist":
            pair = (_number(keys, "src", source), _number(keys, "dst", source))
            distances[pair] = _number(keys, "val", source)
        elif option == "global" and "pci-hole64-size" in value:
            hole = parse_size(value.rpartition("=")[2], f"{source}: -global")
    cells = []
    rows = complete_distances(distances, len(nodes))
    for row, cell in zip(rows, sorted(nodes), strict=True):
        _, of_memory = objects.get(dict(nodes[cell]).get("memdev", ""), ("", ()))
        cells.append(
            _build_cell(cell, _set_of(nodes[cell], "cpus", source), of_memory, row, source)
        )
    flat = _build_cell(0, CpuSet(), objects[backing][1], (), source) if backing in objects else None
    pages = {cell.page_bytes for cell in (*cells, *([flat] if flat else []))} - {None}
    bound = None
    if flat is not None and flat.nodes and not cells:
        bound = (flat.mode or "default", flat.nodes)
    _, devices = build_device_tree(options, source)
    if memory is None:
        raise ParseError(source, "-smp and -m")
    vcpus = _number(smp, "cpus", source) if "cpus" in smp else 1
    if not 1 <= vcpus <= MAX_VCPUS:
        raise ParseError(f"{source}: -smp", f"1 to {MAX_VCPUS} vCPUs", str(vcpus))
    hostdevs, mediated_devices = split_devices(
        ((device.host, device.cell) for device in devices),
        dict(_list_initiators(objects, devices, source)),
    )
    return {
        "vcpus": vcpus,
        "memory_bytes": memory,
        "page_bytes": max((page for page in pages if page is not None), default=None),
        "cpu_topology": _parse_topology(smp, source),
        "binding": bound,
        "cells": tuple(cells),
        "hostdevs": hostdevs,
        "mediated": mediated_devices,
        "has_iommu": has_iommu,
        "pcihole64_bytes": hole,
    }


def _number(keys: Mapping[str, str], key: str, source: str) -> int:
    text = keys.get(key, "")
    number = parse_whole(text, digits=9)
    if number is None:
        raise ParseError(f"{source}: {key}", "a number", text)
    return number


def _parse_topology(smp: Mapping[str, str], source: str) -> GuestTopology | None:
    if "sockets" not in smp or "cores" not in smp:
        return None
    count = {
        key: _number(smp, key, source)
        for key in ("sockets", "dies", "cores", "threads")
        if key in smp
    }
    return GuestTopology(
        count["sockets"], count.get("dies", 1), count["cores"], count.get("threads", 1)
    )


def _build_cell(
    number: int,
    vcpus: CpuSet,
    memory: tuple[tuple[str, str], ...],
    row: tuple[int, ...],
    source: str,
) -> VmCell:
    keys = dict(memory)
    huge = keys.get("hugetlb") == "on" or "hugepages" in keys.get("mem-path", "")
    page = None
    if huge:
        path = re.search(r"([0-9]{1,12})kB", keys.get("mem-path", ""))
        page = parse_size(keys["hugetlbsize"], source) if "hugetlbsize" in keys else 0
        page = int(path[1]) * KIB if path else page
    return VmCell(
        id=number,
        vcpus=vcpus,
        memory_bytes=parse_size(keys["size"], f"{source}: memory of a cell")
        if "size" in keys
        else 0,
        nodes=_set_of(memory, "host-nodes", source),
        mode=_MODE_OF_POLICY.get(keys.get("policy", "")),
        distances=row,
        page_bytes=page,
    )


def list_device_words(
    plan: Plan,
    tree: QemuPciTree,
    places: Mapping[Bdf, GuestAddress | None],
    *,
    device_id: str,
    initiator_id: str,
) -> Iterator[tuple[str, str]]:
    """-device of each passed-through device at its place, with the cells of its own memory."""
    for number, device in enumerate(plan.vm.hostdevs):
        address = places[device.bdf]
        # Without a bus, QEMU takes the expander bus, which only bridges fit.
        at = f",bus={tree.root}" if address is None else tree.format_place(address)
        yield "-device", f"{format_vfio(device)},id={device_id}{number}{at}"
        for cell in device.initiator_cells:
            properties = f"pci-dev={device_id}{number},node={cell}"
            yield "-object", f"acpi-generic-initiator,id={initiator_id}{cell},{properties}"


class TreeDevice(Struct, frozen=True):
    """An endpoint."""

    id: str  # "" if it is missing
    host: Bdf | str  # its function or mediated device there
    address: GuestAddress | None
    cell: int | None


def build_device_tree(
    options: Options, source: str
) -> tuple[tuple[GuestPciController, ...], tuple[TreeDevice, ...]]:
    """Return (bridges by number, passed-through functions), in the order of the command. Raises
    ParseError for an invalid address."""
    number_of = {"pcie.0": 0, "pci.0": 0}
    cell_of: dict[int, int | None] = {0: None}
    controllers: list[GuestPciController] = []
    devices: list[TreeDevice] = []
    for option, value in options:
        if option != "device" or not value or value.startswith("{"):
            continue
        driver, pairs = split_fields(value)
        keys = dict(pairs)
        address = _parse_address(keys, number_of, source)
        if driver in _MODEL_OF_DEVICE and "id" in keys:
            number = len(number_of)
            number_of[keys["id"]] = number
            node = _number(keys, "numa_node", source) if "numa_node" in keys else None
            cell_of[number] = cell_of.get(address.bus) if address is not None else None
            cell_of[number] = node if node is not None else cell_of[number]
            bus_nr = _number(keys, "bus_nr", source) if "bus_nr" in keys else None
            controllers.append(
                GuestPciController(number, _MODEL_OF_DEVICE[driver], address, bus_nr, node)
            )
        elif driver == "vfio-pci":
            cell = None if address is None else cell_of.get(address.bus)
            host = _parse_host(keys, f"{source}: vfio-pci")
            devices.append(TreeDevice(keys.get("id", ""), host, address, cell))
    return tuple(controllers), tuple(devices)


def add_tree(vm: Vm, words: Sequence[str], source: str) -> Vm:
    """Return the VM with the bridges and guest addresses of its command line. Raises ParseError."""
    controllers, devices = build_device_tree(parse_options(words[1:], source), source)
    at = {device.host: device.address for device in devices}
    hostdevs = tuple(replace(hostdev, address=at.get(hostdev.bdf)) for hostdev in vm.hostdevs)
    return replace(vm, controllers=controllers, hostdevs=hostdevs)


def _parse_host(keys: Mapping[str, str], source: str) -> Bdf | str:
    """Return the function, or the UUID of the mediated device, that a vfio-pci device is."""
    path = keys.get("sysfsdev", "").rstrip("/")
    uuid = normalize_uuid(path.rpartition("/")[2]) if "/mdev/" in path else None
    return uuid or Bdf.parse(path.rpartition("/")[2] or keys.get("host", ""), source)


def _parse_address(
    keys: Mapping[str, str], number_of: Mapping[str, int], source: str
) -> GuestAddress | None:
    bus = keys.get("bus", "pcie.0")
    if bus not in number_of or not (number_of[bus] or "addr" in keys):
        return None  # QEMU chooses the slot on the root bus
    slot, _, function = keys.get("addr", "0").partition(".")
    try:
        return GuestAddress(0, number_of[bus], int(slot, 16), int(function or "0", 16))
    except ValueError:
        raise ParseError(f"{source}: addr", "slot.function", keys.get("addr", "")) from None


def _list_initiators(
    objects: Mapping[str, tuple[str, tuple[tuple[str, str], ...]]],
    devices: Iterable[TreeDevice],
    source: str,
) -> tuple[tuple[Bdf, CpuSet], ...]:
    of_id = {d.id: d.host for d in devices if isinstance(d.host, Bdf)}
    cells_of_device: dict[Bdf, list[int]] = {}
    for kind, pairs in objects.values():
        keys = dict(pairs)
        bdf = of_id.get(keys.get("pci-dev", ""))
        if kind == "acpi-generic-initiator" and bdf is not None:
            cells_of_device.setdefault(bdf, []).append(_number(keys, "node", source))
    return tuple((bdf, CpuSet(cells)) for bdf, cells in cells_of_device.items())
