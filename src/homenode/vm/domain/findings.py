"""Findings: what the user should know of a plan in this document, beyond what the planner knows."""

from homenode.vm.domain.controllers import read_controllers
from homenode.vm.domain.cpu import needs_acpi
from homenode.vm.domain.document import Document, Element
from homenode.vm.domain.hostdevs import addressed_devices
from homenode.vm.domain.limits import launch_findings
from homenode.vm.domain.read import open_domain, vm_of
from homenode.vm.model import PortModel
from homenode.vm.plan_model import Plan, PlanFinding, plan_finding

_PORTS = ("pcie-root-port", "pcie-switch-downstream-port")
_ON_PCI = frozenset({"interface", "sound", "video", "rng", "filesystem", "vsock", "crypto"})


def document_findings(
    before: bytes, tuned: bytes, plan: Plan, source: str = "domain"
) -> tuple[PlanFinding, ...]:
    """What a plan brings with it for a document, given before and after it was rewritten."""
    document = open_domain(before, source)
    after = open_domain(tuned, source)
    return (
        *launch_findings(vm_of(document), plan),
        *_ports_that_libvirt_fills(after, plan),
        *_taint(document, after),
        *_acpi(document, after, plan),
    )


def _ports_that_libvirt_fills(after: Document, plan: Plan) -> tuple[PlanFinding, ...]:
    """libvirt puts a device without an address on the first empty port, expander bus or not.

    Seen with libvirt 9.0: a virtio disk and NIC without addresses took two of --spare-ports.
    """
    if not any(c.model == PortModel.EXPANDER_BUS for c in plan.vm.controllers):
        return ()
    controllers = {controller.index: controller for controller in read_controllers(after)}
    in_use = {address.bus for address, _ in addressed_devices(after)}
    empty = 0
    for controller in controllers.values():
        above = None if controller.address is None else controllers.get(controller.address.bus)
        on_root = above is None or above.model == "pcie-root"
        if controller.model in _PORTS and not on_root and controller.index not in in_use:
            empty += 1
    floating = list(filter(_floats, after.root.all("devices/*")))
    if not empty or not floating:
        return ()
    names = ", ".join(f"<{element.tag}>" for element in floating[:4])
    more = f" and {len(floating) - 4} more" if len(floating) > 4 else ""
    return (
        plan_finding(
            "libvirt-fills-ports",
            f"{empty} empty ports on expander buses",
            f"libvirt will plug devices without an address into them: {names}{more}",
        ),
    )


def _floats(device: Element) -> bool:
    """A PCI device for which libvirt will choose the place."""
    if device.child("address") is not None:
        return False
    if device.name == "disk":
        return device.value("target/@bus") == "virtio"
    if device.name == "controller":
        virtual = device.get("type") in ("scsi", "virtio-serial", "usb")
        return virtual and device.get("model") != "none"
    if device.name == "memballoon":
        return device.get("model") != "none"
    if device.name == "hostdev":
        return device.get("type") == "pci"
    return device.name in _ON_PCI and device.get("model") != "none"


def _taint(before: Document, after: Document) -> tuple[PlanFinding, ...]:
    def commandlines(document: Document) -> int:
        return sum(e.name.endswith("}commandline") for e in document.root.children)

    if commandlines(after) == commandlines(before):
        return ()
    return (
        plan_finding(
            "qemu-commandline",
            "<qemu:commandline>",
            "OVMF's window for large BARs can be set in no other way; libvirt marks the "
            "domain as tainted (custom-argv)",
        ),
    )


def _acpi(before: Document, after: Document, plan: Plan) -> tuple[PlanFinding, ...]:
    had, has = (one.root.at("features/acpi") is not None for one in (before, after))
    if not had and has:
        return (
            plan_finding(
                "acpi-added",
                "<acpi/>",
                "expected in <features>, by which the guest learns its NUMA nodes and those "
                "of its devices, found none: it was added",
            ),
        )
    expanders = any(c.model == PortModel.EXPANDER_BUS for c in plan.vm.controllers)
    if has or not needs_acpi(plan) or not expanders:
        return ()
    return (
        plan_finding(
            "acpi-missing",
            "<acpi/>",
            "expected in <features>, by which the guest finds its expander buses, found "
            "none: the guest does not see the devices on them",
            case="of a plan",
        ),
    )
