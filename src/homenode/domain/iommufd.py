"""Iommufd: <hostdev><driver iommufd='yes'/>, which devices of an encrypted guest need.

SEV-SNP and TDX guests with GPUs need iommufd (KubeVirt enhancement VEP-266); other guests keep what
they have, for nothing is known to be gained. Source: libvirt 12.1, QEMU 8.2 (-object iommufd).
"""

from homenode.domain.document import Document
from homenode.domain.edits import Edit, New, append, apply, set_attribute
from homenode.domain.hostdevs import hostdev_elements
from homenode.plan.guest import Guest
from homenode.plan.model import Plan, PlanFinding

Version = tuple[int, int, int]

LIBVIRT_WITH_IOMMUFD: Version = (12, 1, 0)
QEMU_WITH_IOMMUFD: Version = (8, 2, 0)
_NEED_IT = frozenset({"sev-snp", "tdx"})


def needs_iommufd(guest: Guest, plan: Plan) -> bool:
    return guest.launch_security in _NEED_IT and bool(plan.devices)


def can_have_iommufd(libvirt: Version | None, qemu: Version | None) -> bool:
    """libvirt is known to be new enough, and QEMU not known to be too old."""
    return (libvirt is not None and libvirt >= LIBVIRT_WITH_IOMMUFD) and (
        qemu is None or qemu >= QEMU_WITH_IOMMUFD
    )


def edit_iommufd(document: Document) -> Document:
    """Each passed-through function through iommufd. What says so already stays."""
    edits: list[Edit] = []
    for element, is_interface in hostdev_elements(document):
        if is_interface:
            continue
        driver = element.child("driver")
        if driver is None:
            edits += append(document, element, [New("driver", (("iommufd", "yes"),))])
        elif driver.get("iommufd") != "yes":
            edits += set_attribute(document, driver, "iommufd", "yes")
    return apply(document, edits)


def iommufd_missing(guest: Guest, libvirt: Version | None, qemu: Version | None) -> PlanFinding:
    """What was left out, and from which versions it works."""
    found = " and ".join(
        f"{name} {'unknown' if version is None else '.'.join(map(str, version))}"
        for name, version in (("libvirt", libvirt), ("QEMU", qemu))
    )
    return PlanFinding(
        id="iommufd-missing",
        severity="warning",
        subject=f"launch security {guest.launch_security}",
        detail="devices of such a guest need iommufd, which was left out: expected libvirt "
        "12.1 and QEMU "
        f"8.2 or newer, found {found}",
        fix="update them, or name the host's versions with --libvirt and --qemu",
    )
