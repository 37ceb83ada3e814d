"""Iommufd: <iommufd enabled='yes'/>, or <hostdev><driver iommufd='yes'/>, for encrypted guests.

SEV-SNP and TDX guests with GPUs need iommufd (KubeVirt enhancement VEP-266); other guests keep what
they have, for nothing is known to be gained. From libvirt 12.2 one element says it for the whole
VM, interfaces of type hostdev included; 12.1 takes it for each <hostdev>. Descriptors that someone
else opened (fdgroup=) are left to that program.

Source: libvirt 12.1 and 12.2, DomainIOMMUFD of libvirtxml 1.12002; QEMU 8.2 (-object iommufd).
"""

from homenode.domain.document import DOMAIN_ORDER, Document
from homenode.domain.edits import Edit, New, append, apply, insert_in_order, set_attribute
from homenode.domain.hostdevs import hostdev_elements
from homenode.plan.model import Plan, PlanFinding, plan_finding
from homenode.tools.versions import Version
from homenode.vm.model import Vm

LIBVIRT_WITH_IOMMUFD: Version = (12, 1, 0)
LIBVIRT_WITH_IOMMUFD_OF_VM: Version = (12, 2, 0)
QEMU_WITH_IOMMUFD: Version = (8, 2, 0)
_NEED_IT = frozenset({"sev-snp", "tdx"})


def needs_iommufd(guest: Vm, plan: Plan) -> bool:
    return guest.launch_security in _NEED_IT and bool(plan.devices)


def can_have_iommufd(libvirt: Version | None, qemu: Version | None) -> bool:
    """libvirt is known to be new enough, and QEMU not known to be too old."""
    return (libvirt is not None and libvirt >= LIBVIRT_WITH_IOMMUFD) and (
        qemu is None or qemu >= QEMU_WITH_IOMMUFD
    )


def edit_iommufd(document: Document, libvirt: Version) -> Document:
    """Every passed-through function through iommufd. What says so already stays."""
    edits: list[Edit] = []
    of_vm = document.root.child("iommufd")
    whole = libvirt >= LIBVIRT_WITH_IOMMUFD_OF_VM
    if of_vm is not None and of_vm.get("enabled") != "yes":
        edits += set_attribute(document, of_vm, "enabled", "yes")
    elif of_vm is None and whole:
        new = New("iommufd", (("enabled", "yes"),))
        edits += insert_in_order(document, document.root, new, DOMAIN_ORDER)
    for element, is_interface in hostdev_elements(document):
        driver = element.child("driver")
        if driver is not None and driver.get("iommufd") == "no":
            edits += set_attribute(document, driver, "iommufd", "yes")
        elif whole or is_interface or of_vm is not None:
            continue
        elif driver is None:
            edits += append(document, element, [New("driver", (("iommufd", "yes"),))])
        elif driver.get("iommufd") != "yes":
            edits += set_attribute(document, driver, "iommufd", "yes")
    return apply(document, edits)


def has_iommufd(document: Document) -> bool:
    """Whether all PCI devices of the host are opened through iommufd, which counts no mappings."""
    of_vm = document.root.child("iommufd")
    default = "no" if of_vm is None else of_vm.get("enabled") or "no"
    drivers = [element.child("driver") for element, _ in hostdev_elements(document)]
    said = [default if driver is None else driver.get("iommufd") or default for driver in drivers]
    return bool(said) and all(word == "yes" for word in said)


def iommufd_missing(guest: Vm, libvirt: Version | None, qemu: Version | None) -> PlanFinding:
    """What was left out, and from which versions it works."""
    found = " and ".join(
        f"{name} {'unknown' if version is None else '.'.join(map(str, version))}"
        for name, version in (("libvirt", libvirt), ("QEMU", qemu))
    )
    return plan_finding(
        "iommufd-missing",
        f"launch security {guest.launch_security}",
        "devices of such a guest need iommufd, which was left out: expected libvirt "
        "12.1 and QEMU "
        f"8.2 or newer, found {found}",
    )
