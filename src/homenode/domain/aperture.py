"""Aperture: space for the devices' BARs in the guest's address space.

<pcihole64> is what QEMU gives the firmware on q35. OVMF of 2022 and earlier sizes its own window
instead, by a fw_cfg file. libvirt refuses that name in <sysinfo type='fwcfg'> ("That firmware name
is reserved"), so that it has to go through <qemu:commandline>, which marks the domain as tainted.
"""

import re

from homenode.domain.controllers import pci_controllers
from homenode.domain.document import DEVICES_ORDER, DOMAIN_ORDER, Document, Element
from homenode.domain.edits import (
    Edit,
    New,
    append,
    apply,
    insert_before,
    insert_in_order,
    set_attribute,
    set_text,
)
from homenode.domain.fields import format_size, size_bytes
from homenode.plan.model import Plan

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
