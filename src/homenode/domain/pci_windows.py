"""PCI windows: whether every bus of the guest has space below its root, every device a place."""

from collections import Counter
from collections.abc import Iterator

from homenode.domain.addresses import addressed_devices
from homenode.domain.controllers import pci_controllers, read_controllers
from homenode.domain.document import Document
from homenode.domain.fields import any_base
from homenode.domain.reference import Broken
from homenode.plan.guest import GuestPciController

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
