"""BusNumbers: the bus numbers that a guest's firmware gives out, from the tree of its document.

libvirt's `bus` is a controller's index. The number that the guest's kernel prints comes from
firmware, which walks the tree depth first, bridges in order of device and function, and gives each
bridge the next free number. The walk starts again at the busNr of each expander bus, so below those
the numbers follow from the expander's own bridges alone; on the root bus they follow from all
bridges there, those included that libvirt adds when it defines a document without addresses.

Source: pci_bios_init_bus_rec of SeaBIOS (src/fw/pciinit.c); PciScanBus of EDK II
(MdeModulePkg/Bus/Pci/PciBusDxe/PciLib.c).
"""

from collections import defaultdict
from collections.abc import Iterable

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.vm.domain.document import Document, Element
from homenode.vm.domain.fields import guest_address
from homenode.vm.model import GuestAddress, GuestPciController

ROOT_MODELS = ("pcie-root", "pci-root")
EXPANDER_MODELS = ("pcie-expander-bus", "pci-expander-bus")
_MOST_BUSES = 256
_ON_PCI = frozenset({"interface", "video", "sound", "memballoon", "rng", "watchdog", "hostdev"})
_PCI_DISK_BUSES = ("virtio", "nvme")
_OTHER_CONTROLLERS = ("fdc", "ide", "sata", "ccid", "xenbus", "isa")
_NOT_PCI_TYPES = frozenset({"isa", "usb", "ccw", "drive", "unassigned", "spapr-vio", "virtio-mmio"})


def bus_numbers(controllers: Iterable[GuestPciController]) -> dict[int, int]:
    """Controller's index -> the guest kernel's number of the bus that it opens.

    A controller without address or busNr, and whatever hangs below it, has none; so has one in a
    loop. The numbers on the root bus hold only for a document that leaves nothing to libvirt.

    >>> from homenode.vm.model import GuestAddress as At
    >>> pxb = GuestPciController(1, "pcie-expander-bus", At(0, 0, 2, 0), bus_nr=128)
    >>> ports = [GuestPciController(i, "pcie-root-port", At(0, 1, 9 - i, 0)) for i in (2, 3)]
    >>> bus_numbers([pxb, *ports])
    {0: 0, 1: 128, 3: 129, 2: 130}
    """
    below: dict[int, list[GuestPciController]] = defaultdict(list)
    roots = {0: 0}
    for controller in controllers:
        if controller.model in EXPANDER_MODELS:
            if controller.bus_nr is not None:
                roots[controller.index] = controller.bus_nr
        elif controller.model not in ROOT_MODELS and controller.address is not None:
            below[controller.address.bus].append(controller)
    found: dict[int, int] = {}

    def walk(index: int, number: int) -> int:
        """Numbers everything below; the last number that is in use."""
        found[index] = number
        last = number
        for bridge in sorted(below[index], key=_place):
            if bridge.index not in found and last + 1 < _MOST_BUSES:
                last = walk(bridge.index, last + 1)
        return last

    for index, number in sorted(roots.items(), key=lambda root: root[1]):
        walk(index, number)
    return found


def kernel_address(address: GuestAddress, buses: dict[int, int]) -> Bdf | None:
    """The address that the guest's kernel prints, or None where its bus has no number."""
    number = buses.get(address.bus)
    return None if number is None else Bdf(0, number, address.device, address.function)


class Loose(Struct, frozen=True):
    """Something that libvirt has yet to plug in. what: in words; line: in the document."""

    what: str
    line: int


def left_to_libvirt(document: Document) -> Loose | None:
    """The first device that libvirt has yet to plug in, or the first that it would add.

    None where the document says it all, as that of `virsh dumpxml` does. Source: libvirt adds a
    memory balloon to every domain without one, and on x86 a USB controller
    (qemuDomainDefAddDefaultDevices).
    """
    devices = document.root.child("devices")
    if devices is None:
        return Loose("no <devices>", document.root.line)
    for element in devices.children:
        if _is_on_pci(element) and guest_address(document, element) is None:
            return Loose(f"<{element.tag}> without one", element.line)
    if devices.child("memballoon") is None:
        return Loose("no <memballoon>", devices.line)
    machine = document.root.at("os", "type")
    is_x86 = machine is None or machine.get("arch") in (None, "x86_64", "i686")
    if is_x86 and not any(e.get("type") == "usb" for e in devices.all("controller")):
        return Loose("no USB controller", devices.line)
    return None


def _place(controller: GuestPciController) -> tuple[int, int, int]:
    address = controller.address
    assert address is not None, "only those with an address are below something"
    return address.device, address.function, controller.index


def _is_on_pci(element: Element) -> bool:
    """Whether libvirt would plug a device in on PCI, on the machines that have expander buses."""
    address = element.child("address")
    if address is not None and address.get("type") in _NOT_PCI_TYPES:
        return False
    if element.name == "controller":
        kind = element.get("type")
        if kind == "pci":
            return element.get("model") not in ROOT_MODELS and element.get("index") != "0"
        # A USB controller without a model may be built into the chipset, but then has an address.
        return kind not in _OTHER_CONTROLLERS and element.get("model") != "none"
    if element.name == "hostdev":
        return element.get("type") in ("pci", "mdev")
    if element.name == "disk":
        target = element.child("target")
        return target is not None and target.get("bus") in _PCI_DISK_BUSES
    if element.name in ("memballoon", "video", "watchdog"):
        return "none" not in (element.get("model"), (_model_type(element))) and not (
            element.name == "watchdog" and element.get("model") in ("itco", "ib700")
        )
    if element.name == "sound":
        return element.get("model") not in ("pcspk", "sb16", "usb")
    return element.name in _ON_PCI


def _model_type(element: Element) -> str | None:
    model = element.child("model")
    return None if model is None else model.get("type")
