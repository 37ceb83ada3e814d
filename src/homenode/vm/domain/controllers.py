"""PCI controllers: expander buses, root ports and switches, and space for the devices' BARs.

<pcihole64> is what QEMU gives the firmware on q35. OVMF of 2022 and earlier sizes its own window
instead, by a fw_cfg file. libvirt rejects that name in <sysinfo type='fwcfg'> ("That firmware name
is reserved"), so that it has to go through <qemu:commandline>, which marks the domain as tainted.
"""

import re

from homenode.errors import InputError
from homenode.vm.domain.cells import cell_elements
from homenode.vm.domain.document import (
    Document,
    Element,
    format_size,
    guest_address,
    number,
    parse_any_base,
    parse_decimal,
    read_size,
)
from homenode.vm.domain.edits import (
    Edit,
    NewElement,
    append,
    apply,
    insert_after,
    insert_at,
    insert_before,
    remove_all,
    set_attribute,
    set_attributes,
    set_text,
)
from homenode.vm.domain.hostdevs import make_address, place
from homenode.vm.model import PORTS, QEMU_DEVICE, GuestAddress, GuestPciController, PortModel
from homenode.vm.plan import Plan


def pci_controllers(document: Document) -> tuple[tuple[int, Element], ...]:
    """Return (index, element) of every PCI controller, in document order. A controller without an
    index gets the lowest free index, as in libvirt."""
    elements = [e for e in document.root.all("devices/controller") if e.get("type") == "pci"]
    index_at = {
        e.start: number(e, "index", "a controller's index")
        for e in elements
        if e.get("index") is not None
    }
    in_use = set(index_at.values())
    free = (i for i in range(len(elements) + 1) if i not in in_use)
    return tuple((index_at[e.start] if e.start in index_at else next(free), e) for e in elements)


def read_controllers(document: Document) -> tuple[GuestPciController, ...]:
    """Return the PCI controllers, by index."""
    controllers = []
    for index, element in pci_controllers(document):
        bus_nr, node = element.value("target/@busNr"), element.find("target/node")
        controllers.append(
            GuestPciController(
                index=index,
                model=element.get("model") or ("pcie-root" if index == 0 else "pci-bridge"),
                address=guest_address(element),
                bus_nr=None if bus_nr is None else parse_any_base(element, bus_nr, "busNr"),
                cell=None if node is None else parse_decimal(node, node.text, "a guest cell"),
            )
        )
    return tuple(sorted(controllers, key=lambda controller: controller.index))


def edit_controllers(document: Document, plan: Plan) -> Document:
    """Add the plan's controllers behind the document's.

    A matching controller that lacks an address or bus number gets the plan's. Raises InputError if
    an index is taken by another controller, or if the plan was made for another document.
    """
    # An expander bus of an earlier layout loses a <node> that names a cell that no longer exists.
    cells = len(cell_elements(document))
    nodes = [node for _, e in pci_controllers(document) if (node := e.find("target/node"))]
    gone_nodes = [node for node in nodes if parse_decimal(node, node.text, "a guest cell") >= cells]
    document = remove_all(document, gone_nodes)
    have = {controller.index: controller for controller in read_controllers(document)}
    missing: list[GuestPciController] = []
    adjusted_controllers: list[GuestPciController] = []
    for controller in plan.vm.controllers:
        present = have.get(controller.index)
        if present is None and not controller.existing:
            missing.append(controller)
        elif present is not None and not controller.existing and _can_become(present, controller):
            adjusted_controllers.append(controller)
        elif present is None or not _is_same(present, controller):
            raise InputError(
                f"{document.source}: expected PCI controller {controller.index} to be "
                f"{'' if controller.existing else 'free for '}{controller.model} at "
                f"{controller.address}, "
                f"found {'none' if present is None else f'{present.model} at {present.address}'}",
                hint="plan again for this definition",
            )
    document = _adjust(document, adjusted_controllers)
    if not missing:
        return document
    chassis = _free_chassis(document, [c.index for c in missing if c.model in PORTS])
    new = [_make_controller(controller, chassis.get(controller.index)) for controller in missing]
    elements = document.root.all("devices/controller")
    if not elements:
        first, *new = new
        document = insert_at(document, "devices", first)
        elements = document.root.all("devices/controller")
    of_pci = [element for element in elements if element.get("type") == "pci"]
    return apply(document, insert_after(document, (of_pci or elements)[-1], new))


def _is_same(present: GuestPciController, planned_controller: GuestPciController) -> bool:
    return (
        present.model == planned_controller.model
        and present.address == planned_controller.address
        and present.bus_nr == planned_controller.bus_nr
        and present.cell == planned_controller.cell
    )


def _can_become(present: GuestPciController, planned_controller: GuestPciController) -> bool:
    return (
        present.model == planned_controller.model
        and present.address in (None, planned_controller.address)
        and present.cell in (None, planned_controller.cell)
    )


def _adjust(document: Document, controllers: list[GuestPciController]) -> Document:
    """Add missing address, bus number and cell to the definition's controllers."""
    for controller in controllers:
        element = dict(pci_controllers(document))[controller.index]
        document = apply(document, place(document, element, _find_address(controller)))
        if controller.bus_nr is None:
            continue
        element = dict(pci_controllers(document))[controller.index]
        target, text = element.child("target"), element.value("target/@busNr")
        new = _make_target(controller)
        edits = []
        if target is None:
            edits = append(document, element, [new])
        elif target.child("node") is None:
            edits = append(document, target, new.children)
        if target is not None and (
            text is None or parse_any_base(element, text, "busNr") != controller.bus_nr
        ):
            edits += set_attributes(document, target, new.attributes)
        document = apply(document, edits)
    return document


def _make_target(controller: GuestPciController) -> NewElement:
    """Return the <target> of an expander bus."""
    bus_nr = None if controller.bus_nr is None else str(controller.bus_nr)
    node = () if controller.cell is None else (NewElement("node", text=str(controller.cell)),)
    return NewElement("target", {"busNr": bus_nr}, node)


def _find_address(controller: GuestPciController) -> GuestAddress:
    assert controller.address is not None, "a plan plugs in every controller that it adds"
    return controller.address


def _free_chassis(document: Document, indices: list[int]) -> dict[int, int]:
    """Return chassis numbers of new ports: the index, as in libvirt, else the next free number.
    QEMU rejects two ports with the same chassis number."""
    in_use = {read_chassis(index, element) for index, element in pci_controllers(document)}
    chosen_chassis: dict[int, int] = {}
    for index in indices:
        free = next(n for n in (index, *range(1, 256 + len(indices))) if n not in in_use)
        in_use.add(free)
        chosen_chassis[index] = free
    return chosen_chassis


def read_chassis(index: int, controller: Element) -> int:
    """Return a port's chassis number, by default its index, as in libvirt."""
    text = controller.value("target/@chassis")
    return index if text is None else parse_any_base(controller, text, "chassis")


def _make_controller(controller: GuestPciController, chassis: int | None) -> NewElement:
    at = _find_address(controller)
    children = [NewElement("model", {"name": QEMU_DEVICE[controller.model]})]
    if controller.model == PortModel.EXPANDER_BUS:
        children.append(_make_target(controller))
    elif chassis is not None:
        # libvirt's own numbering of ports: slot and function as one number.
        port = f"0x{at.device << 3 | at.function:x}"
        children.append(NewElement("target", {"chassis": str(chassis), "port": port}))
    head = {"type": "pci", "index": str(controller.index), "model": str(controller.model)}
    return NewElement("controller", head, (*children, make_address(at)))


QEMU_NAMESPACE = "http://libvirt.org/schemas/domain/qemu/1.0"
_WINDOW = re.compile(r"((?:name=)?opt/ovmf/X-PciMmio64Mb,string=)(\d{1,12})\s*\Z", re.ASCII)


def edit_aperture(document: Document, plan: Plan) -> Document:
    """Raise the window sizes to those of the plan; larger ones stay."""
    if plan.aperture is None:
        return document
    if plan.aperture.pcihole64_bytes is not None:
        document = _edit_hole(document, plan.aperture.pcihole64_bytes)
    if plan.aperture.firmware_mmio64_mib is not None:
        document = _edit_window(document, plan.aperture.firmware_mmio64_mib)
    return document


def read_hole(document: Document) -> int | None:
    """Return <pcihole64> of the root bus in bytes, None if it is not set."""
    root = _find_root_bus(document)
    hole = None if root is None else root.child("pcihole64")
    return None if hole is None else read_size(hole)


def read_window_mib(document: Document) -> int | None:
    """Return OVMF's 64-bit window in MiB from <qemu:commandline>; None if not set."""
    matches = (_WINDOW.match(argument.get("value") or "") for argument in qemu_arguments(document))
    return next((int(match[2]) for match in matches if match is not None), None)


def qemu_arguments(document: Document) -> tuple[Element, ...]:
    commandline = document.root.child(f"{{{QEMU_NAMESPACE}}}commandline")
    return () if commandline is None else commandline.children


def _find_root_bus(document: Document) -> Element | None:
    return next((element for index, element in pci_controllers(document) if index == 0), None)


def _edit_hole(document: Document, size: int) -> Document:
    root = _find_root_bus(document)
    text, unit = format_size(size, ("GiB", "MiB"))
    new = NewElement("pcihole64", {"unit": unit}, text=text)
    if root is None:
        head = {"type": "pci", "index": "0", "model": "pcie-root"}
        controller = NewElement("controller", head, (new,))
        elements = [element for _, element in pci_controllers(document)]
        if elements:
            return apply(document, insert_before(document, elements[0], [controller]))
        return insert_at(document, "devices", controller)
    hole = root.child("pcihole64")
    if hole is None:
        return apply(document, append(document, root, [new]))
    if read_size(hole) >= size:
        return document
    edits = set_text(document, hole, text) + set_attribute(document, hole, "unit", unit)
    return apply(document, edits)


def _edit_window(document: Document, mib: int) -> Document:
    before: Element | None = None
    for argument in qemu_arguments(document):
        match = _WINDOW.match(argument.get("value") or "")
        if match is not None:
            edits: list[Edit] = []
            if before is None or before.get("value") != "-fw_cfg":
                option = NewElement(argument.tag, {"value": "-fw_cfg"})
                edits += insert_before(document, argument, [option])
            if int(match[2]) < mib:
                edits += set_attribute(document, argument, "value", f"{match[1]}{mib}")
            return apply(document, edits)
        before = argument
    values = ("-fw_cfg", f"name=opt/ovmf/X-PciMmio64Mb,string={mib}")
    commandline = document.root.child(f"{{{QEMU_NAMESPACE}}}commandline")
    if commandline is not None:
        prefix = commandline.tag.removesuffix("commandline")
        arguments = [NewElement(f"{prefix}arg", {"value": value}) for value in values]
        return apply(document, append(document, commandline, arguments))
    document, prefix = _declare_qemu_prefix(document)
    new = NewElement(
        f"{prefix}:commandline",
        children=tuple(NewElement(f"{prefix}:arg", {"value": value}) for value in values),
    )
    return apply(document, append(document, document.root, [new]))


def _declare_qemu_prefix(document: Document) -> tuple[Document, str]:
    """Return the document with QEMU's namespace declared on <domain>, and its prefix."""
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
