"""Cross-check: references inside a domain document that libvirt takes in silence or at start only.

The schema knows no references. libvirt 9.0 defines and starts a domain with a <vcpupin> for a vCPU
that is not there, or with an expander bus whose window has no bus for its root ports, and the
guest then finds its devices broken.
"""

from collections import Counter
from collections.abc import Iterator

from msgspec import Struct

from homenode.cpuset import CpuSet
from homenode.vm.domain.cells import cell_bytes, read_cells
from homenode.vm.domain.controllers import QEMU_NAMESPACE, pci_controllers, read_controllers
from homenode.vm.domain.cpu import read_topology, read_vcpus
from homenode.vm.domain.cputune import iothread_ids, pin_counts
from homenode.vm.domain.document import Document, Element
from homenode.vm.domain.fields import any_base, decimal, pu_set
from homenode.vm.domain.hostdevs import addressed_devices
from homenode.vm.domain.memory import memory_device_bytes, read_memnodes, read_memory
from homenode.vm.model import GuestPciController


class Broken(Struct, frozen=True, order=True):
    """One reference or sum of a document that does not hold.

    id: stable, for tests and documentation. subject: the element, in the user's words.
    """

    id: str
    subject: str
    expected: str
    observed: str

    def __str__(self) -> str:
        return f"{self.subject}: expected {self.expected}, found {self.observed} ({self.id})"


def crosscheck(document: Document) -> tuple[Broken, ...]:
    """Every reference and sum of a domain document that does not hold, in a fixed order.

    Raises ParseError or InputError where the document cannot be read at all.
    """
    return tuple(
        sorted(
            {
                *_threads(document),
                *_cells(document),
                *_memory(document),
                *_command_line(document),
                *check_pci(document),
            }
        )
    )


def _threads(document: Document) -> Iterator[Broken]:
    vcpus, _ = read_vcpus(document)
    threads = iothread_ids(document)
    for (name, number), count in pin_counts(document).items():
        what = f"<{name}>" if name == "emulatorpin" else f"<{name}> for {number}"
        if count > 1:
            yield Broken(id="pin-twice", subject=what, expected="one", observed=str(count))
        if name == "vcpupin" and number >= vcpus:
            yield Broken(
                id="pin-of-no-vcpu",
                subject=what,
                expected=f"a vCPU below {vcpus}",
                observed=str(number),
            )
        if name == "iothreadpin" and number not in threads:
            yield Broken(
                id="pin-of-no-iothread",
                subject=what,
                expected=f"one of {list(threads)}",
                observed=str(number),
            )
    devices = document.root.child("devices")
    for element in () if devices is None else devices.children:
        driver = element.child("driver")
        given = None if driver is None else driver.get("iothread")
        if driver is not None and given is not None:
            number = decimal(document, driver, given, "an IOThread")
            if number not in threads:
                yield Broken(
                    id="iothread-of-none",
                    subject=f"<{element.tag}><driver iothread>",
                    expected=f"one of {list(threads)}",
                    observed=given,
                )
    topology = document.root.at("cpu", "topology")
    if topology is not None:
        sockets, dies, cores, per_core = read_topology(document, topology)
        product = sockets * dies * cores * per_core
        if product != vcpus:
            shape = f"{sockets} x {dies} x {cores} x {per_core} = {product}"
            yield Broken(
                id="topology-product",
                subject="<topology>",
                expected=f"{vcpus} vCPUs",
                observed=shape,
            )


def _cells(document: Document) -> Iterator[Broken]:
    vcpus, _ = read_vcpus(document)
    cells = read_cells(document)
    everything = CpuSet(range(vcpus))
    seen = CpuSet()
    for i, (element, inside) in enumerate(cells):
        number = decimal(document, element, element.get("id") or str(i), "a cell id")
        if number != i:
            yield Broken(
                id="cell-ids",
                subject="<cell> ids",
                expected="0, 1, 2, ... without gaps",
                observed=str(number),
            )
        if not inside.isdisjoint(seen):
            yield Broken(
                id="cells-overlap",
                subject=f"cell {i}",
                expected="vCPUs of its own",
                observed=str(inside & seen),
            )
        if not inside <= everything:
            yield Broken(
                id="cell-of-no-vcpu",
                subject=f"cell {i}",
                expected=f"vCPUs below {vcpus}",
                observed=str(inside - everything),
            )
        seen |= inside
    if cells and seen & everything != everything:
        missing = str(everything - seen)
        yield Broken(
            id="vcpu-in-no-cell",
            subject="<numa>",
            expected="every vCPU in a cell",
            observed=f"{missing} in none",
        )
    for i, (element, _) in enumerate(cells):
        yield from _siblings(document, element, i, len(cells))
    yield from _names_of_cells(document, len(cells))


def _siblings(document: Document, cell: Element, id: int, cells: int) -> Iterator[Broken]:
    """Distances to cells that are there, one to each."""
    distances = cell.child("distances")
    seen: set[int] = set()
    for sibling in () if distances is None else distances.all("sibling"):
        other = decimal(document, sibling, sibling.get("id") or "", "a cell id")
        if other >= cells:
            yield Broken(
                id="distance-of-no-cell",
                subject=f"distances of cell {id}",
                expected=f"a cell below {cells}",
                observed=str(other),
            )
        if other in seen:
            yield Broken(
                id="distance-twice",
                subject=f"distances of cell {id}",
                expected=f"one to cell {other}",
                observed="two",
            )
        seen.add(other)


def _names_of_cells(document: Document, cells: int) -> Iterator[Broken]:
    """Whatever names a guest cell from elsewhere in the document."""
    there = f"a cell below {cells}" if cells else "no cell: the guest is flat"
    for cell in read_memnodes(document):
        if cell >= cells:
            yield Broken(
                id="memnode-of-no-cell", subject="<memnode>", expected=there, observed=str(cell)
            )
    pages = document.root.at("memoryBacking", "hugepages")
    for page in () if pages is None else pages.all("page"):
        named = pu_set(document, page, "nodeset")
        if named is not None and not named <= CpuSet(range(cells)):
            yield Broken(
                id="page-of-no-cell", subject="<page>", expected=there, observed=str(named)
            )
    devices = document.root.child("devices")
    for element in () if devices is None else devices.children:
        node = element.at("target", "node")
        if node is not None and any_base(document, node, node.text, "a guest cell") >= cells:
            yield Broken(
                id="device-of-no-cell",
                subject=f"<{element.tag}>",
                expected=there,
                observed=node.text.strip(),
            )
        acpi = element.child("acpi")
        named = None if acpi is None else pu_set(document, acpi, "nodeset")
        if named is not None and not named <= CpuSet(range(cells)):
            yield Broken(
                id="device-of-no-cell",
                subject=f"<{element.tag}><acpi>",
                expected=there,
                observed=str(named),
            )


def _memory(document: Document) -> Iterator[Broken]:
    cells = read_cells(document)
    if cells:
        total = sum(cell_bytes(document, element) for element, _ in cells)
        expected = read_memory(document) - memory_device_bytes(document)
        if total != expected:
            yield Broken(
                id="memory-sum",
                subject="the memory of all cells",
                expected=f"{expected} bytes, as <memory>",
                observed=f"{total} bytes",
            )


def _command_line(document: Document) -> Iterator[Broken]:
    """-fw_cfg and its value, one behind the other: QEMU takes either alone for something else."""
    commandline = document.root.child(f"{{{QEMU_NAMESPACE}}}commandline")
    words = [e.get("value") or "" for e in (() if commandline is None else commandline.children)]
    for before, word in zip(("", *words), (*words, ""), strict=True):
        is_value = "opt/ovmf/X-PciMmio64Mb" in word
        if before == "-fw_cfg" and (not word or word.startswith("-")):
            yield Broken(
                id="fw-cfg-broken",
                subject="<qemu:arg> -fw_cfg",
                expected="its value behind it",
                observed=word or "none",
            )
        if is_value and before != "-fw_cfg":
            yield Broken(
                id="fw-cfg-broken",
                subject=f"<qemu:arg> {word}",
                expected="-fw_cfg before it",
                observed=before or "none",
            )


LAST_BUS = 255
_ONE_SLOT = ("pcie-root-port", "pcie-switch-downstream-port")
_EXPANDER = "pcie-expander-bus"
_ON_EXPANDER = (
    "pcie-root-port",
    "pcie-switch-upstream-port",
    "dmi-to-pci-bridge",
    "pcie-to-pci-bridge",
)

_NAMES = {
    "pcie-expander-bus": ("pxb-pcie",),
    "pcie-root-port": ("pcie-root-port", "ioh3420"),
    "pcie-switch-upstream-port": ("x3130-upstream",),
    "pcie-switch-downstream-port": ("xio3130-downstream",),
}
"""QEMU's devices for a model. Source: qemuDomainValidate of controllers, libvirt 9.0, which refuses
any other."""

_CHIPSET_SLOT = {"pcie-root": 0x1F, "pci-root": 1, "": 0x1F}
"""Where function 0 is the machine's own: q35's LPC next to SATA, i440fx's ISA next to IDE and USB.
"""


def check_pci(document: Document) -> Iterator[Broken]:
    """What is wrong with controllers and addresses."""
    controllers = read_controllers(document)
    yield from _indices(controllers)
    yield from _places(document, controllers)
    yield from _windows(document, controllers)
    yield from _chassis(document)
    yield from _model_names(document)


def _indices(controllers: tuple[GuestPciController, ...]) -> Iterator[Broken]:
    for index, count in Counter(c.index for c in controllers).items():
        if count > 1:
            yield Broken(
                id="controller-twice",
                subject=f"PCI controller {index}",
                expected="one",
                observed=str(count),
            )


def _places(document: Document, controllers: tuple[GuestPciController, ...]) -> Iterator[Broken]:
    model_of = {controller.index: controller.model for controller in controllers}
    devices = addressed_devices(document)
    for address, count in Counter(address for address, _ in devices).items():
        if count > 1:
            yield Broken(
                id="address-twice",
                subject=f"guest address {address}",
                expected="one device",
                observed=str(count),
            )
    in_use = dict(devices)
    for address, element in devices:
        what = f"<{element.tag}> at {address}"
        model = model_of.get(address.bus)
        if model in _ONE_SLOT and address.device:
            yield Broken(
                id="slot-of-port",
                subject=what,
                expected="slot 0, the only one of a port",
                observed=str(address.device),
            )
        if model == _EXPANDER and element.get("model") not in _ON_EXPANDER:
            yield Broken(
                id="endpoint-on-expander",
                subject=what,
                expected="a root port between",
                observed="an expander bus",
            )
        of_chipset = address.bus == 0 and address.device == _CHIPSET_SLOT.get(model or "")
        if address.function and not of_chipset:
            first = type(address)(address.domain, address.bus, address.device, 0)
            head = in_use.get(first)
            place = None if head is None else head.child("address")
            if place is None:
                yield Broken(
                    id="function-without-0",
                    subject=what,
                    expected=f"a device at {first}",
                    observed="none",
                )
            elif place.get("multifunction") != "on":
                yield Broken(
                    id="multifunction-off",
                    subject=f"<{head.tag if head else ''}> at {first}",
                    expected="multifunction='on' next to other functions",
                    observed="it is not",
                )


def _windows(document: Document, controllers: tuple[GuestPciController, ...]) -> Iterator[Broken]:
    """Each root needs a bus for itself and for every controller below it.

    libvirt adds a port on the root bus for each index that is left out below the highest one.
    """
    model_of = {controller.index: controller for controller in controllers}
    buses_below: Counter[int] = Counter()
    for controller in controllers:
        if controller.model == _EXPANDER or controller.index == 0:
            continue
        root, steps = controller, 0
        while root.model != _EXPANDER and root.index and steps <= len(controllers):
            parent = 0 if root.address is None else root.address.bus
            if parent not in model_of:
                break  # libvirt adds the controller, on the root bus
            root = model_of[parent]
            steps += 1
        if steps > len(controllers):
            yield Broken(
                id="controller-loop",
                subject=f"PCI controller {controller.index}",
                expected="a path to a root bus",
                observed="a loop",
            )
            return
        buses_below[root.index if root.model == _EXPANDER else 0] += 1
    named = {address.bus for address, _ in addressed_devices(document) if not address.domain}
    last = max({*named, *model_of}, default=0)
    buses_below[0] += last - sum(0 < index <= last for index in model_of)
    expanders = [c for c in controllers if c.model == _EXPANDER and c.bus_nr is not None]
    for number, count in Counter(c.bus_nr for c in expanders).items():
        if count > 1:
            yield Broken(
                id="busnr-twice",
                subject=f"busNr {number}",
                expected="one expander bus",
                observed=str(count),
            )
    starts = sorted({c.bus_nr for c in expanders if c.bus_nr is not None})
    for controller in expanders:
        start = controller.bus_nr
        assert start is not None, "only those with a busNr are here"
        end = next((other for other in starts if other > start), LAST_BUS + 1)
        need = 1 + buses_below[controller.index]
        if not 0 < start <= LAST_BUS or end - start < need:
            yield Broken(
                id="bus-window",
                subject=f"expander bus {controller.index} at busNr {start}",
                expected=f"{need} buses",
                observed=f"{max(0, end - start)}, up to {end - 1}",
            )
    if starts and starts[0] < 1 + buses_below[0]:
        yield Broken(
            id="bus-window",
            subject="the root bus",
            expected=f"{1 + buses_below[0]} buses",
            observed=str(starts[0]),
        )


def _chassis(document: Document) -> Iterator[Broken]:
    numbers: Counter[int] = Counter()
    for index, element in pci_controllers(document):
        if element.get("model") in _ONE_SLOT:
            target = element.child("target")
            text = None if target is None else target.get("chassis")
            numbers[index if text is None else any_base(document, element, text, "chassis")] += 1
    for number, count in numbers.items():
        if count > 1:
            yield Broken(
                id="chassis-twice",
                subject=f"chassis {number}",
                expected="one port",
                observed=str(count),
            )


def _model_names(document: Document) -> Iterator[Broken]:
    for index, element in pci_controllers(document):
        named = element.child("model")
        name = None if named is None else named.get("name")
        known = _NAMES.get(element.get("model") or "")
        if name is not None and known is not None and name not in known:
            yield Broken(
                id="controller-model-name",
                subject=f"PCI controller {index}",
                expected=f"<model name> {' or '.join(known)}",
                observed=name,
            )
