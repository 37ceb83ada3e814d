#!/usr/bin/python3 -IS
"""onDefineDomain: puts a KubeVirt VM's passed-through devices on the cells of their nodes. [I/O]

An expander bus per cell, a root port per device, addresses, the cells' distances. Python 3.9 alone.
Grace GPUs, PCI granularity and DRA metadata need homenode's image. Licence: Apache-2.0.
"""

import json
import re
import sys
from itertools import groupby, product
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

EXPANDER, ROOT_PORT = "pcie-expander-bus", "pcie-root-port"
ROOT_SLOTS = (*range(0x10, 0x19), *range(0x0F, 0x02, -1), 0x19, 0x1C, 0x1E)  # free on q35
# By class: GPUs, NVSwitches, NICs, NVMe; 4 are the others.
KINDS = {0x0302: 0, 0x0300: 0, 0x0380: 0, 0x1200: 0, 0x0680: 1, 0x0200: 2, 0x0207: 2, 0x0108: 3}
GRACE_GPUS = (("0x10de", "0x2342"), ("0x10de", "0x2348"), ("0x10de", "0x2941"))
PARTS = ("domain", "bus", "slot", "function")


def numbers(text):  # of a list such as 0-3,8
    ends = [part.partition("-") for part in (text or "").strip().split(",") if part]
    return {n for first, _, last in ends for n in range(int(first), int(last or first) + 1)}


def address_of(element, path="address"):
    at = element.find(path)
    is_pci = at is not None and at.get("type", "pci") == "pci" and at.get("bus")
    return tuple(int(at.get(part, "0"), 0) for part in PARTS) if is_pci else None


def plug_in(element, *at):
    for old in element.findall("address"):
        element.remove(old)
    words = "0x{:04x} 0x{:02x} 0x{:02x} 0x{:x}".format(*at).split()
    ElementTree.SubElement(element, "address", {"type": "pci", **dict(zip(PARTS, words))})


def function_of(at, element, base):  # what /sys has of it: its node and kind
    path = Path(base, "sys/bus/pci/devices", "{:04x}:{:02x}:{:02x}.{:x}".format(*at))
    code, vendor, device, node = (
        (path / name).read_text().strip() for name in ("class", "vendor", "device", "numa_node")
    )
    if (vendor, device) in GRACE_GPUS:
        raise ValueError(f"{path.name}: a Grace GPU needs the hook of homenode's image")
    kind, is_virtual = KINDS.get(int(code, 16) >> 8, 4), (path / "physfn").is_symlink()
    values = {"node": int(node), "place": address_of(element), "element": element}
    return SimpleNamespace(at=at, name=path.name, kind=kind, is_virtual=is_virtual, **values)


def ports_of(functions, cell_of):
    """Return the functions of each port, by cell and kind; a GPU's slot has one port."""
    groups = []
    for _, slot in groupby(functions, key=lambda f: f.at if f.is_virtual else f.at[:3]):
        members = sorted(slot, key=lambda f: f.kind != 0)
        groups += [members] if members[0].kind == 0 else [[member] for member in members]
    heads = [(cell_of[g[0].node], g[0].is_virtual, g[0].kind, g[0].at) for g in groups]
    return [groups[i] for i in sorted(range(len(groups)), key=heads.__getitem__)]


class PciControllers:
    """The PCI controllers of a document, by index, and the cell of each expander bus."""

    def __init__(self, devices, cells):
        self.devices, elements = devices, devices.findall("controller[@type='pci']")
        self.by_index = {int(element.get("index", "0")): element for element in elements}
        expanders = [i for i, e in self.by_index.items() if e.get("model") == EXPANDER]
        cell_of = {i: self.value(i, "node") for i in expanders}
        self.lost = [i for i in expanders if self.value(i, "busNr") is None and cell_of[i] is None]
        self.cell_of = {i: cell if cell in range(cells) else None for i, cell in cell_of.items()}

    def value(self, index, name):
        target = self.by_index[index].find("target")
        text = None if target is None else target.findtext(name) or target.get(name)
        return None if text is None else int(text, 0)

    def bus_above(self, place):  # the expander bus above an address; None on pcie.0
        bus = place[1] if place else None
        if bus in self.cell_of or bus not in self.by_index:
            return bus if bus in self.cell_of else None
        return self.bus_above(address_of(self.by_index[bus]))

    def places(self):
        return {at[1:3] for at in map(address_of, self.devices) if at}

    def add(self, model, bus, slot, cell):
        index = max([0, *self.by_index, *(bus for bus, _ in self.places())]) + 1
        if index > 255 or slot is None:
            raise ValueError("pcie.0: no slot or index is free for another controller")
        controllers = list(self.by_index.values()) or self.devices.findall("controller")
        after = max(list(self.devices).index(controller) for controller in controllers)
        new = ElementTree.Element("controller", type="pci", index=str(index), model=model)
        self.devices.insert(after + 1, new)
        ElementTree.SubElement(new, "model", name="pxb-pcie" if model == EXPANDER else model)
        if model == EXPANDER:
            ElementTree.SubElement(new, "target")
            self.cell_of[index] = cell
        plug_in(new, 0, bus, slot, 0)
        self.by_index[index] = new
        return index

    def expander(self, cell):  # with a free slot, of the document or new
        places, buses = self.places(), sorted(i for i, home in self.cell_of.items() if home == cell)
        buses = [bus for bus in buses if sum(bus == used for used, _ in places) < 32]
        free = [slot for slot in ROOT_SLOTS if (0, slot) not in places] or [None]
        return buses[0] if buses else self.add(EXPANDER, 0, free[0], cell)

    def port(self, cell):  # an empty one on the cell's expander buses, or a new one
        for index, controller in sorted(self.by_index.items()):
            on_cell = self.cell_of.get((address_of(controller) or (0, 0))[1]) == cell
            if controller.get("model") == ROOT_PORT and on_cell and (index, 0) not in self.places():
                return index
        bus = self.expander(cell)
        free = {*range(32)} - {slot for parent, slot in self.places() if parent == bus}
        return self.add(ROOT_PORT, bus, min(free), cell)

    def number_buses(self):  # the highest that are free; those of the document if they do
        cell_buses = sorted((cell, i) for i, cell in self.cell_of.items() if cell is not None)
        roots = [self.bus_above(address_of(controller)) for controller in self.by_index.values()]
        root = max(self.by_index) + 1 - len(self.cell_of) - sum(bus is not None for bus in roots)
        need = {i: 1 + roots.count(i) for i in self.cell_of}
        bus_numbers = {i: nr for i in self.cell_of if (nr := self.value(i, "busNr")) is not None}
        foreign = {i: nr for i, nr in bus_numbers.items() if self.cell_of[i] is None}
        for fixed_numbers, room in product((bus_numbers, foreign), (8, 2)):
            windows = {i: (nr, nr + need[i]) for i, nr in fixed_numbers.items()}
            for _, index in reversed(cell_buses):
                top, size = 256, need[index] + room - need[index] % room
                for first, past in sorted(windows.values(), reverse=True):
                    top = top if top - size >= past else min(top, first)
                windows.setdefault(index, (top - size, top))
            spans = [*sorted(windows.values()), (256, 256)]
            if spans[0][0] >= root and all(map(lambda a, b: a[1] <= b[0], spans, spans[1:])):
                break
        else:
            raise ValueError("PCI bus numbers: expected 256 to suffice, found a need for more")
        for cell, index in cell_buses:
            pci = self.by_index[index]
            target = (pci.findall("target") or [ElementTree.SubElement(pci, "target")])[0]
            target.set("busNr", str(windows[index][0]))
            if target.find("node") is None:
                ElementTree.SubElement(target, "node").text = str(cell)


def cells_of_nodes(root, cells, nodes):
    """Return the cell of each host node: by <memnode>, else with most vCPUs pinned to it."""
    memory, vcpu_pins = root.findall("numatune/memnode"), root.findall("cputune/vcpupin")
    bound = {int(element.get("cellid")): numbers(element.get("nodeset")) for element in memory}
    pins = {int(element.get("vcpu")): numbers(element.get("cpuset")) for element in vcpu_pins}
    cell_of = {}
    for node, cpus in nodes.items():
        named = [cell for cell in sorted(bound) if node in bound[cell] and cell < len(cells)]
        able = named or [cell for cell in range(len(cells)) if cell not in bound]
        vcpus = {cell: numbers(cells[cell].get("cpus")) for cell in able}
        count = {c: sum(bool(pins.get(v)) and pins[v] <= cpus for v in vcpus[c]) for c in able}
        if named or any(count.values()):
            cell_of[node] = max(able, key=lambda cell: (count[cell], -cell))
    return {} if len(cells) == 1 and len(cell_of) > 1 and not bound else cell_of


def place_devices(root, by_name, base):
    """Place the devices of a domain, and return notes for the log."""
    devices, cells = root.find("devices"), root.findall("cpu/numa/cell")
    passed = {address_of(e, "source/address"): e for e in devices.iterfind("hostdev[@type='pci']")}
    node_lists = [numbers(acpi.get("nodeset")) for acpi in devices.iterfind("*/acpi")]
    if not passed or any(max(cell_ids) < len(cells) for cell_ids in node_lists if cell_ids):
        return "no PCI function, or GraceIOVirtualization has placed them: nothing to do"
    directory = Path(base, "sys/devices/system/node")
    online = sorted(numbers((directory / "online").read_text()))
    nodes = {node: numbers((directory / f"node{node}/cpulist").read_text()) for node in online}
    functions = [function_of(at, element, base) for at, element in sorted(passed.items())]
    cell_of = cells_of_nodes(root, cells, nodes)
    if not cell_of:
        return "warning: the guest is flat: set numa.guestMappingPassthrough, and no maxGuest"
    tree = PciControllers(devices, len(cells))
    for index in tree.lost:  # KubeVirt before 1.8 loses <target> between two definitions
        device_cells = {cell_of.get(f.node) for f in functions if tree.bus_above(f.place) == index}
        tree.cell_of[index] = device_cells.pop() if len(device_cells) == 1 else None
    free = [cell for cell in range(len(cells)) if cell not in tree.cell_of.values()]
    tree.cell_of.update(zip([i for i in tree.lost if tree.cell_of[i] is None], free))
    moving, notes = [], []
    for f in functions:
        is_chosen = f.place and (f.place in by_name or f.place[1] == 0)
        if f.node not in cell_of:
            notes.append(f"warning: {f.name}: its host node {f.node} has no cell: it stays")
        elif not is_chosen and tree.bus_above(f.place) in (None, *tree.lost):
            moving.append(f)
    homes = [[node for node in nodes if cell_of.get(node) == i] for i in range(len(cells))]
    if len(cells) > 1 and cells[0].find("distances") is None and all(len(h) == 1 for h in homes):
        for i, cell in enumerate(cells):
            distances = (directory / f"node{homes[i][0]}/distance").read_text().split()
            row, siblings = dict(zip(nodes, distances)), ElementTree.SubElement(cell, "distances")
            for j, (home,) in enumerate(homes):
                value = 10 if i == j else min(max(int(row[home]), 11), 255)
                ElementTree.SubElement(siblings, "sibling", id=str(j), value=str(value))
    if not moving:
        return "; ".join([*notes, "no device to move: nothing to do"])
    machine = root.find("os/type").get("machine", "none")
    if "q35" not in machine and "virt" not in machine:
        raise ValueError(f"expected machine q35 or virt, found {machine}")
    wrong = [f for f in moving if tree.cell_of.get(tree.bus_above(f.place), -1) != cell_of[f.node]]
    for element in [f.element for f in wrong if f.place]:
        element.remove(element.find("address"))
    for cell in range(len(cells)):
        tree.expander(cell)
    for port in ports_of(wrong, cell_of):
        lowest = min(port, key=lambda f: f.at)
        bus = tree.port(cell_of[port[0].node])
        for f in port:
            plug_in(f.element, 0, bus, 0, 0 if f is lowest else f.at[3])
        if len(port) > 1:
            lowest.element.find("address").set("multifunction", "on")
    tree.number_buses()
    return "; ".join([*notes, f"placed {len(moving)} PCI functions"])


def main():
    if "--help" in sys.argv:
        return print(__doc__)
    options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    text, is_strict = options.get("--domain", ""), True
    try:
        vmi = json.loads(options["--vmi"])
        annotations = vmi.get("metadata", {}).get("annotations") or {}
        is_strict = annotations.get("homenode/on-error") != "passthrough"
        words = set(map(annotations.get, ("homenode/pci-granularity", "homenode/on-error")))
        if not words <= {None, "cell", "fail", "passthrough"}:
            raise ValueError("annotations: expected pci-granularity cell; the image has others")
        devices = vmi.get("spec", {}).get("domain", {}).get("devices", {})
        owners = [owner for kind in ("interfaces", "disks") for owner in devices.get(kind) or ()]
        owners += [owner[kind] for owner in owners for kind in ("disk", "lun") if owner.get(kind)]
        addresses = [owner["pciAddress"] for owner in owners if owner.get("pciAddress")]
        by_name = {tuple(int(n, 16) for n in re.split("[:.]", name)) for name in addresses}
        ElementTree.register_namespace("qemu", "http://libvirt.org/schemas/domain/qemu/1.0")
        root = ElementTree.fromstring(text)
        note = place_devices(root, by_name, options.get("--root", "/"))
        if ElementTree.tostring(root) != ElementTree.tostring(ElementTree.fromstring(text)):
            text = ElementTree.tostring(root, encoding="unicode")
    except (SyntaxError, ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        note = f"error: {type(error).__name__}: {error}"
        if is_strict:
            sys.exit(f"onDefineDomain: {note}")
    print(f"onDefineDomain: {note}", file=sys.stderr)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
