"""PCI controllers: expander buses, root ports and switches, and space for the devices' BARs.

<pcihole64> is what QEMU gives the firmware on q35. OVMF of 2022 and earlier sizes its own window
instead, by a fw_cfg file. libvirt refuses that name in <sysinfo type='fwcfg'> ("That firmware name
is reserved"), so that it has to go through <qemu:commandline>, which marks the domain as tainted.
"""

import re

from homenode.errors import InputError
from homenode.vm.domain.cells import cell_elements
from homenode.vm.domain.document import DEVICES_ORDER, DOMAIN_ORDER, Document, Element
from homenode.vm.domain.edits import (
    Edit,
    New,
    append,
    apply,
    insert_after,
    insert_before,
    insert_in_order,
    remove,
    set_attribute,
    set_text,
)
from homenode.vm.domain.fields import any_base, decimal, format_size, guest_address, size_bytes
from homenode.vm.domain.hostdevs import new_address, place
from homenode.vm.model import GuestAddress, GuestPciController, PortModel
from homenode.vm.plan_model import Plan

_QEMU_DEVICE: dict[str, str] = {
    PortModel.EXPANDER_BUS: "pxb-pcie",
    PortModel.ROOT_PORT: "pcie-root-port",
    PortModel.SWITCH_UPSTREAM: "x3130-upstream",
    PortModel.SWITCH_DOWNSTREAM: "xio3130-downstream",
}
"""<model name=...>: QEMU's device. Source: virDomainControllerPCIModelName, libvirt 9.0."""


def pci_controllers(document: Document) -> tuple[tuple[int, Element], ...]:
    """(index, element) of every PCI controller, in document order.

    One without an index gets the lowest free one, as libvirt does after parsing.
    """
    devices = document.root.child("devices")
    elements = [
        e for e in (() if devices is None else devices.all("controller")) if e.get("type") == "pci"
    ]
    given = {
        e.start: decimal(document, e, e.get("index") or "", "a controller's index")
        for e in elements
        if e.get("index") is not None
    }
    in_use = set(given.values())
    found: list[tuple[int, Element]] = []
    for element in elements:
        index = given.get(element.start)
        if index is None:
            index = next(i for i in range(len(elements) + 1) if i not in in_use)
            in_use.add(index)
        found.append((index, element))
    return tuple(found)


def read_controllers(document: Document) -> tuple[GuestPciController, ...]:
    """The PCI controllers, by index."""
    controllers = []
    for index, element in pci_controllers(document):
        bus_nr = element.child("target")
        bus_text = None if bus_nr is None else bus_nr.get("busNr")
        node = element.at("target", "node")
        controllers.append(
            GuestPciController(
                index=index,
                model=element.get("model") or ("pcie-root" if index == 0 else "pci-bridge"),
                address=guest_address(document, element),
                bus_nr=None if bus_text is None else any_base(document, element, bus_text, "busNr"),
                cell=None if node is None else decimal(document, node, node.text, "a guest cell"),
            )
        )
    return tuple(sorted(controllers, key=lambda controller: controller.index))


def edit_controllers(document: Document, plan: Plan) -> Document:
    """The controllers that the plan adds, behind those that there are.

    One that is there without an address, or with a bus number that leaves too little space, gets
    the plan's. Raises InputError where an index is used by another controller, or where one that
    the plan calls existing is not there: then the plan is for another document.
    """
    document = _without_dangling_nodes(document)
    have = {controller.index: controller for controller in read_controllers(document)}
    missing: list[GuestPciController] = []
    adjusted: list[GuestPciController] = []
    for controller in plan.vm.controllers:
        there = have.get(controller.index)
        if there is None and not controller.existing:
            missing.append(controller)
        elif there is not None and not controller.existing and _can_become(there, controller):
            adjusted.append(controller)
        elif there is None or not _same(there, controller):
            raise InputError(
                f"{document.source}: expected PCI controller {controller.index} to be "
                f"{'' if controller.existing else 'free for '}{_words(controller)}, "
                f"found {'none' if there is None else there.model + ' at ' + str(there.address)}",
                hint="plan again for this document",
            )
    document = _adjust(document, adjusted)
    if not missing:
        return document
    chassis = _free_chassis(document, [c.index for c in missing if _has_chassis(c)])
    new = [_new(controller, chassis.get(controller.index)) for controller in missing]
    devices = document.root.child("devices")
    if devices is None:
        whole = New("devices", children=tuple(new))
        return apply(document, insert_in_order(document, document.root, whole, DOMAIN_ORDER))
    pci = pci_controllers(document)
    others = devices.all("controller")
    if pci or others:
        last = max((element for _, element in pci), key=lambda e: e.start) if pci else others[-1]
        return apply(document, insert_after(document, last, new))
    if not devices.children:
        return apply(document, append(document, devices, new))
    document = apply(document, insert_in_order(document, devices, new[0], DEVICES_ORDER))
    first = pci_controllers(document)[0][1]
    return apply(document, insert_after(document, first, new[1:]))


def _words(controller: GuestPciController) -> str:
    return f"{controller.model} at {controller.address}"


def _same(there: GuestPciController, wanted: GuestPciController) -> bool:
    return (
        there.model == wanted.model
        and there.address == wanted.address
        and there.bus_nr == wanted.bus_nr
        and there.cell == wanted.cell
    )


def _can_become(there: GuestPciController, wanted: GuestPciController) -> bool:
    return (
        there.model == wanted.model
        and there.address in (None, wanted.address)
        and there.cell in (None, wanted.cell)
    )


def _adjust(document: Document, controllers: list[GuestPciController]) -> Document:
    """Address, bus number and cell of controllers that the document has in part."""
    for controller in controllers:
        element = dict(pci_controllers(document))[controller.index]
        edits = place(document, element, _address(controller))
        document = apply(document, edits)
        if controller.bus_nr is None:
            continue
        element = dict(pci_controllers(document))[controller.index]
        target = element.child("target")
        node = () if controller.cell is None else (New("node", text=str(controller.cell)),)
        if target is None:
            given = (("busNr", str(controller.bus_nr)),)
            document = apply(document, append(document, element, [New("target", given, node)]))
            continue
        text = target.get("busNr")
        if text is None or any_base(document, element, text, "busNr") != controller.bus_nr:
            edits = set_attribute(document, target, "busNr", str(controller.bus_nr))
            document = apply(document, edits)
        element = dict(pci_controllers(document))[controller.index]
        target = element.child("target")
        if target is not None and target.child("node") is None:
            document = apply(document, append(document, target, node))
    return document


def _address(controller: GuestPciController) -> GuestAddress:
    assert controller.address is not None, "a plan plugs in every controller that it adds"
    return controller.address


def _has_chassis(controller: GuestPciController) -> bool:
    return controller.model in (PortModel.ROOT_PORT, PortModel.SWITCH_DOWNSTREAM)


def _free_chassis(document: Document, indices: list[int]) -> dict[int, int]:
    """Chassis of new ports: the index, as libvirt does, or where that is in use the next free one.

    QEMU refuses two ports with one chassis number.
    """
    in_use = set()
    for index, element in pci_controllers(document):
        target = element.child("target")
        text = None if target is None else target.get("chassis")
        in_use.add(index if text is None else any_base(document, element, text, "chassis"))
    chosen: dict[int, int] = {}
    for index in indices:
        number = next(n for n in (index, *range(1, 256 + len(indices))) if n not in in_use)
        in_use.add(number)
        chosen[index] = number
    return chosen


def _new(controller: GuestPciController, chassis: int | None) -> New:
    children = [New("model", (("name", _QEMU_DEVICE[controller.model]),))]
    if controller.model == PortModel.EXPANDER_BUS:
        node = () if controller.cell is None else (New("node", text=str(controller.cell)),)
        given = () if controller.bus_nr is None else (("busNr", str(controller.bus_nr)),)
        children.append(New("target", given, node))
    elif chassis is not None:
        # libvirt's own numbering of ports: slot and function as one number.
        at = _address(controller)
        port = at.device << 3 | at.function
        children.append(New("target", (("chassis", str(chassis)), ("port", f"0x{port:x}"))))
    children.append(new_address(_address(controller)))
    return New(
        "controller",
        (("type", "pci"), ("index", str(controller.index)), ("model", str(controller.model))),
        tuple(children),
    )


def _without_dangling_nodes(document: Document) -> Document:
    """An expander bus of an earlier layout loses a <node> that names a cell that is no more."""
    cells = len(cell_elements(document))
    edits: list[Edit] = []
    for _, element in pci_controllers(document):
        node: Element | None = element.at("target", "node")
        if node is not None and decimal(document, node, node.text, "a guest cell") >= cells:
            edits += remove(document, node)
    return apply(document, edits)


QEMU_NAMESPACE = "http://libvirt.org/schemas/domain/qemu/1.0"
_WINDOW = re.compile(r"((?:name=)?opt/ovmf/X-PciMmio64Mb,string=)(\d{1,12})\s*\Z", re.ASCII)


def edit_aperture(document: Document, plan: Plan) -> Document:
    """At least the sizes that the plan asks for; larger ones of the document stay."""
    if plan.aperture is None:
        return document
    if plan.aperture.pcihole64_bytes is not None:
        document = _with_hole(document, plan.aperture.pcihole64_bytes)
    if plan.aperture.firmware_mmio64_mib is not None:
        document = _with_window(document, plan.aperture.firmware_mmio64_mib)
    return document


def read_hole(document: Document) -> int | None:
    """<pcihole64> of the root bus in bytes, None where it is not set."""
    root = _root_bus(document)
    hole = None if root is None else root.child("pcihole64")
    return None if hole is None else size_bytes(document, hole, hole.text, hole.get("unit"))


def read_window_mib(document: Document) -> int | None:
    """OVMF's own 64-bit window in MiB, as <qemu:commandline> gives it; None where it does not."""
    commandline = document.root.child(f"{{{QEMU_NAMESPACE}}}commandline")
    found = (
        _WINDOW.match(argument.get("value") or "")
        for argument in (() if commandline is None else commandline.children)
    )
    return next((int(match[2]) for match in found if match is not None), None)


def _root_bus(document: Document) -> Element | None:
    return next((element for index, element in pci_controllers(document) if index == 0), None)


def _with_hole(document: Document, size: int) -> Document:
    root = _root_bus(document)
    number, unit = format_size(size, ("GiB", "MiB"))
    new = New("pcihole64", (("unit", unit),), text=number)
    if root is None:
        controller = New(
            "controller", (("type", "pci"), ("index", "0"), ("model", "pcie-root")), (new,)
        )
        devices = document.root.child("devices")
        if devices is None:
            whole = New("devices", children=(controller,))
            return apply(document, insert_in_order(document, document.root, whole, DOMAIN_ORDER))
        others = pci_controllers(document)
        if others:
            first = min((element for _, element in others), key=lambda e: e.start)
            return apply(document, insert_before(document, first, [controller]))
        return apply(document, insert_in_order(document, devices, controller, DEVICES_ORDER))
    hole = root.child("pcihole64")
    if hole is None:
        return apply(document, append(document, root, [new]))
    if size_bytes(document, hole, hole.text, hole.get("unit")) >= size:
        return document
    edits = set_text(document, hole, number) + set_attribute(document, hole, "unit", unit)
    return apply(document, edits)


def _with_window(document: Document, mib: int) -> Document:
    commandline = document.root.child(f"{{{QEMU_NAMESPACE}}}commandline")
    before: Element | None = None
    for argument in () if commandline is None else commandline.children:
        match = _WINDOW.match(argument.get("value") or "")
        if match is not None:
            edits: list[Edit] = []
            if before is None or before.get("value") != "-fw_cfg":
                option = New(argument.tag, (("value", "-fw_cfg"),))
                edits += insert_before(document, argument, [option])
            if int(match[2]) < mib:
                edits += set_attribute(document, argument, "value", f"{match[1]}{mib}")
            return apply(document, edits)
        before = argument
    values = ("-fw_cfg", f"name=opt/ovmf/X-PciMmio64Mb,string={mib}")
    if commandline is not None:
        prefix = commandline.tag.removesuffix("commandline")
        arguments = [New(f"{prefix}arg", (("value", value),)) for value in values]
        return apply(document, append(document, commandline, arguments))
    document, prefix = _with_qemu_prefix(document)
    new = New(
        f"{prefix}:commandline",
        children=tuple(New(f"{prefix}:arg", (("value", value),)) for value in values),
    )
    return apply(document, append(document, document.root, [new]))


def _with_qemu_prefix(document: Document) -> tuple[Document, str]:
    """The document with QEMU's namespace declared on <domain>, and its prefix there."""
    in_use = set()
    for name, span in document.attribute_spans(document.root).items():
        if name.startswith("xmlns:"):
            prefix = name.removeprefix("xmlns:")
            in_use.add(prefix)
            if document.text[span.value_start : span.value_end] == QEMU_NAMESPACE.encode():
                return document, prefix
    prefix = next(p for p in ("qemu", "qemu1", "qemu2", "qemu3") if p not in in_use)
    edits = set_attribute(document, document.root, f"xmlns:{prefix}", QEMU_NAMESPACE)
    return apply(document, edits), prefix
