"""What survives of an answer, as one line of text."""

import hashlib
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from lxml import etree

GIB = 1 << 30
UNITS = {"b": 1, "bytes": 1, "KB": 1000, "k": 1024, "KiB": 1024, "MB": 10**6, "M": 1 << 20}
UNITS |= {"MiB": 1 << 20, "GB": 10**9, "G": GIB, "GiB": GIB, "T": 1 << 40, "TiB": 1 << 40}


def digest(content: str | bytes) -> str:
    raw = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(raw).hexdigest()[:12]


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in their order, neighbours that ascend by one as a range."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs) or "-"


def pins_text(pins: Iterable[str | None]) -> str:
    """CPUs by vCPU: single ones as ranges, a set in brackets with the count of its vCPUs."""
    parts = []
    for is_single, group in groupby((pus or "any" for pus in pins), str.isdigit):
        if is_single:
            parts.append(ranges(map(int, group)))
        else:
            parts += [f"[{pus}]*{len(list(same))}" for pus, same in groupby(group)]
    return ",".join(parts) or "-"


def size_text(size_bytes: int) -> str:
    return f"{size_bytes / GIB:g}G" if size_bytes % (GIB // 64) == 0 else str(size_bytes)


def address_text(address: str) -> str:
    return address.removeprefix("0000:").removesuffix(".0")


def plan_text(plan: Mapping[str, Any]) -> str:
    """Lines of a plan: layout, nodes, fallback, pins, memory, guest nodes, devices."""
    vm = plan["vm"]
    layout = (vm.get("record") or {}).get("layout") or {}
    name = layout.get("name") or "custom"
    if name == "custom":
        name += " " + "/".join(word or "-" for key, word in layout.items() if key != "name")
    binding = vm.get("binding") or ("-", "")
    cells = (
        f"{cell['vcpus']}={size_text(cell['memory_bytes'])}@{ranges(cell['host_nodes'])}"
        f":{cell.get('mode') or '-'}"
        for cell in vm.get("cells") or ()
    )
    devices = (
        f"{address_text(device['bdf'] or device['uuid'])}@{_number(device.get('host_node'))}"
        f">{_number(device.get('cell'))}"
        for device in sorted(vm.get("hostdevs") or (), key=lambda each: str(each["bdf"]))
    )
    parts = {
        "layout": name,
        "nodes": ranges(plan["nodes"]),
        "fallback": plan.get("fallback"),
        "pins": pins_text(vm.get("vcpu_pins") or ()),
        "emulator": vm.get("emulator_pus") or "-",
        "memory": f"{size_text(vm['memory_bytes'])} {binding[0]} {binding[1]}".strip(),
        "cells": " ".join(cells),
        "devices": " ".join(devices),
        "switches": "mirrored" if _has_switches(vm) else "",
    }
    return "; ".join(f"{part} {text}" for part, text in parts.items() if text)


def _has_switches(vm: Mapping[str, Any]) -> bool:
    return any("switch" in controller["model"] for controller in vm.get("controllers") or ())


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def refusal_text(refusal: Mapping[str, Any]) -> str:
    """The constraints that rejected, each once."""
    return "rejected: " + ", ".join(sorted({each["constraint"] for each in refusal["rejections"]}))


def domain_text(document: bytes) -> str:
    """Lines of domain XML: layout, vCPUs, pins, memory, cells, devices with their guest node."""
    root = etree.fromstring(document)
    pins = {
        int(pin.get("vcpu", "-1")): pin.get("cpuset") for pin in root.iterfind("cputune/vcpupin")
    }
    emulator = root.find("cputune/emulatorpin")
    memory = root.find("memory")
    mode = root.find("numatune/memory")
    nodes = {e.get("cellid"): f"{e.get('nodeset')}:{e.get('mode')}" for e in root.iter("memnode")}
    buses = _cell_of_bus(root)
    layouts = [e.get("name") or e.get("layout") for e in root.iter("{*}layout")]
    topology = root.find("cpu/topology")
    parts = {
        "layout": " ".join(filter(None, layouts)),
        "vcpus": root.findtext("vcpu"),
        "topology": "" if topology is None else "/".join(map(str, topology.attrib.values())),
        "pins": pins_text(pins[vcpu] for vcpu in sorted(pins)),
        "emulator": "" if emulator is None else emulator.get("cpuset"),
        "memory": "" if memory is None else size_text(_bytes(memory)),
        "bound": "" if mode is None else f"{mode.get('mode')} {mode.get('nodeset')}",
        "cells": " ".join(
            f"{e.get('cpus')}={size_text(_bytes(e, e.get('memory')))}@{nodes.get(e.get('id'))}"
            for e in root.iterfind("cpu/numa/cell")
        ),
        "devices": " ".join(
            f"{_host_address(e)}>{_number(buses.get(_guest_bus(e)))}"
            for e in root.iterfind("devices/hostdev")
        ),
    }
    return "; ".join(f"{name} {text}" for name, text in parts.items() if text)


def _bytes(element: etree._Element, text: str | None = None) -> int:
    return int(text or element.text or 0) * UNITS[element.get("unit", "KiB")]


def _host_address(hostdev: etree._Element) -> str:
    address = hostdev.find("source/address")
    if address is None:
        return "-"
    if address.get("uuid"):
        return str(address.get("uuid"))
    words = (int(address.get(name, "0"), 0) for name in ("domain", "bus", "slot", "function"))
    return address_text("{:04x}:{:02x}:{:02x}.{:x}".format(*words))


def _guest_bus(element: etree._Element) -> int | None:
    address = element.find("address")
    return None if address is None else int(address.get("bus", "-1"), 0)


def _cell_of_bus(root: etree._Element) -> dict[int | None, int]:
    """The guest node of each PCI bus below an expander bus."""
    above: dict[int, int | None] = {}
    cells: dict[int | None, int] = {}
    for controller in root.iterfind("devices/controller[@type='pci']"):
        index = int(controller.get("index", "-1"))
        above[index] = _guest_bus(controller)
        if node := controller.findtext("target/node"):
            cells[index] = int(node)
    for index in above:
        bus: int | None = index
        for _ in above:
            if bus in cells:
                cells[index] = cells[bus]
                break
            bus = above.get(bus) if bus is not None else None
    return cells
