"""Guest IOMMU: <iommu>, the split <ioapic> that interrupt remapping needs, and iommufd on the host.

Above 255 vCPUs an x86 guest needs interrupt remapping with 32-bit APIC ids (eim). aarch64 does not;
there a Grace GPU's driver needs an SMMUv3 that the host's own accelerates. Behind it QEMU accepts
only vfio-pci devices with iommufd, all of one host SMMU.

Source: <iommu> in formatdomain of libvirt 12.8; -device arm-smmuv3 in qemu(1) 11.1.

SEV-SNP and TDX guests with GPUs need iommufd (KubeVirt enhancement VEP-266); other guests are
unchanged, as no benefit is known. From libvirt 12.2 one element covers the whole VM, interfaces of
type hostdev included; 12.1 has it for each <hostdev>. Descriptors opened by another program
(fdgroup=) are not changed.

Source: libvirt 12.1 and 12.2, DomainIOMMUFD of libvirtxml 1.12002; QEMU 8.2 (-object iommufd).
"""

from homenode.errors import InputError
from homenode.findings import Finding, finding
from homenode.machine.tools.versions import Version
from homenode.machine.topology import Host
from homenode.text import plural
from homenode.vm.domain.controllers import pci_controllers
from homenode.vm.domain.cpu import read_architecture
from homenode.vm.domain.document import Document
from homenode.vm.domain.edits import (
    Edit,
    NewElement,
    append,
    apply,
    edit_attributes,
    insert_at,
    remove_all,
    set_attribute,
)
from homenode.vm.domain.hostdevs import list_hostdev_elements
from homenode.vm.model import Vm
from homenode.vm.plan import Plan

LIBVIRT_WITH_ACCEL: Version = (12, 7, 0)
QEMU_WITH_ACCEL: Version = (11, 1, 0)
"""First versions with <driver accel=>; QEMU then reads ats, oas and ssidsize from the host."""

MAX_VCPUS_WITHOUT = 255
"""libvirt: "more than 255 vCPUs require extended interrupt mode enabled on the iommu device"."""


def list_smmu_buses(guest: Vm, plan: Plan, host: Host) -> tuple[int, ...]:
    """Return the expander buses of Grace GPUs whose passed-through devices are all of one root
    complex, so that one accelerated SMMUv3 of the host can serve them."""

    def find_last_bus(bus: int) -> int | None:
        expander = plan.vm.expander_above(bus)
        return None if expander is None else expander.index

    complexes: dict[int, set[str | None]] = {}
    grace: set[int] = set()
    for device in plan.vm.hostdevs:
        bus = None if device.address is None else find_last_bus(device.address.bus)
        if bus is not None:
            function = host.find_device(device.bdf)
            complexes.setdefault(bus, set()).add(
                None if function is None else function.root_complex
            )
            if device.initiator_cells:
                grace.add(bus)
    own_addresses = {c.address for c in guest.controllers} | {d.address for d in guest.hostdevs}
    buses = {
        find_last_bus(address.bus) for address in guest.addresses if address not in own_addresses
    }
    return tuple(
        sorted(
            bus for bus in grace - buses if len(complexes[bus]) == 1 and None not in complexes[bus]
        )
    )


def can_accelerate(libvirt: Version | None, qemu: Version | None) -> bool:
    """libvirt is known to be new enough, and QEMU not known to be too old."""
    return (libvirt is not None and libvirt >= LIBVIRT_WITH_ACCEL) and (
        qemu is None or qemu >= QEMU_WITH_ACCEL
    )


def edit_smmus(document: Document, buses: tuple[int, ...]) -> Document:
    """Add an accelerated SMMUv3 to each of these buses without one, unless one serves the whole
    machine. ats, ril, oas, ssidsize and cmdqv keep QEMU's defaults: the host's values."""
    devices = document.root.child("devices")
    have = [element.value("driver/@pciBus") for element in document.root.all("devices/iommu")]
    if devices is None or None in have:
        return document
    new = [
        NewElement(
            "iommu",
            {"model": "smmuv3"},
            (NewElement("driver", {"pciBus": str(bus), "accel": "on"}),),
        )
        for bus in buses
        if str(bus) not in have
    ]
    return apply(document, append(document, devices, new))


def _remove_buses(document: Document) -> Document:
    """Remove the accelerated SMMUv3 of buses that no longer exist."""
    indices = {None, *(str(index) for index, _ in pci_controllers(document))}
    return remove_all(
        document,
        [
            element
            for element in document.root.all("devices/iommu")
            if element.value("driver/@accel") == "on"
            and element.value("driver/@pciBus") not in indices
        ],
    )


def _format_versions(libvirt: Version | None, qemu: Version | None) -> str:
    return " and ".join(
        f"{name} {'unknown' if version is None else '.'.join(map(str, version))}"
        for name, version in (("libvirt", libvirt), ("QEMU", qemu))
    )


def report_omitted_smmu(
    guest: Vm, plan: Plan, buses: tuple[int, ...], libvirt: Version | None, qemu: Version | None
) -> Finding | None:
    """Return the finding for a guest with Grace GPUs that gets no accelerated SMMUv3. buses: of
    `list_smmu_buses`. Source: KubeVirt enhancement VEP-199."""
    devices = [device for device in plan.vm.hostdevs if device.initiator_cells]
    if guest.iommu_model is not None or not devices:
        return None
    if not can_accelerate(libvirt, qemu):
        reason = (
            f"it needs libvirt 12.7 and QEMU 11.1 or newer, found {_format_versions(libvirt, qemu)}"
        )
        case = None
    elif not buses:
        reason = "no bus of the guest has devices of one root complex of the host alone"
        case = "no bus"
    else:
        return None
    return finding(
        "smmuv3-omitted",
        "<iommu model='smmuv3'>",
        observed=f"an accelerated SMMUv3 for each bus with a Grace GPU was omitted: {reason}; "
        "without it the GPU's driver in the guest has no address translation",
        case=case,
    )


def edit_iommu(document: Document, plan: Plan) -> Document:
    """Add an Intel IOMMU that remaps interrupts if the plan needs one, or complete the present one.
    Raises InputError for another model than intel and amd (libvirt 12.2)."""
    document = _remove_buses(document)
    root = document.root
    # has_iommu is also true for a guest that has an IOMMU already, which is kept.
    is_x86 = read_architecture(document) == "x86_64"
    if not plan.vm.has_iommu or plan.vm.vcpus <= MAX_VCPUS_WITHOUT or not is_x86:
        return document
    # TCG has no kernel irqchip, so QEMU rejects eim.
    eim = "on" if root.get("type") == "kvm" else None
    # QEMU: "Device assignment is not allowed without" caching_mode.
    driver = {"intremap": "on", "eim": eim, "caching_mode": "on" if plan.vm.hostdevs else None}
    iommu = root.find("devices/iommu")
    model = "intel" if iommu is None else iommu.get("model")
    if iommu is not None and model not in ("intel", "amd"):
        raise InputError(
            f"{document.source}:{iommu.line}: expected <iommu model='intel'> or 'amd' for "
            f"{plural(plan.vm.vcpus, 'vCPU')}, found {model!r}, which does not remap interrupts",
            hint="use model='intel', or at most 255 vCPUs",
        )
    if model == "amd":
        driver = {"intremap": "on", "xtsup": "on"}
    attributes = {name: value for name, value in driver.items() if value is not None}
    if iommu is None:
        new = NewElement("iommu", {"model": "intel"}, (NewElement("driver", attributes),))
        document = insert_at(document, "devices", new)
    else:
        document = edit_attributes(document, "devices/iommu/driver", attributes)
    return edit_attributes(document, "features/ioapic", {"driver": "qemu"}) if eim else document


LIBVIRT_WITH_IOMMUFD: Version = (12, 1, 0)
LIBVIRT_WITH_IOMMUFD_OF_VM: Version = (12, 2, 0)
QEMU_WITH_IOMMUFD: Version = (8, 2, 0)
_NEED_IT = frozenset({"sev-snp", "tdx"})


def needs_iommufd(guest: Vm, plan: Plan) -> bool:
    return guest.launch_security in _NEED_IT and bool(plan.vm.hostdevs)


def can_have_iommufd(libvirt: Version | None, qemu: Version | None) -> bool:
    """libvirt is known to be new enough, and QEMU not known to be too old."""
    return (libvirt is not None and libvirt >= LIBVIRT_WITH_IOMMUFD) and (
        qemu is None or qemu >= QEMU_WITH_IOMMUFD
    )


def edit_iommufd(document: Document, libvirt: Version) -> Document:
    """Open every passed-through function through iommufd; elements that do so already stay."""
    iommufd_element = document.root.child("iommufd")
    has_vm_switch = libvirt >= LIBVIRT_WITH_IOMMUFD_OF_VM
    edits: list[Edit] = []
    for _, element in list_hostdev_elements(document):
        driver = element.child("driver")
        setting = None if driver is None else driver.get("iommufd")
        if driver is not None and setting == "no":
            edits += set_attribute(document, driver, "iommufd", "yes")
        elif (
            setting is not None
            or has_vm_switch
            or element.name == "interface"
            or iommufd_element is not None
        ):
            continue
        elif driver is None:
            edits += append(document, element, [NewElement("driver", {"iommufd": "yes"})])
        else:
            edits += set_attribute(document, driver, "iommufd", "yes")
    document = apply(document, edits)
    if iommufd_element is None and not has_vm_switch:
        return document
    return edit_attributes(document, "iommufd", {"enabled": "yes"})


def has_iommufd(document: Document) -> bool:
    """Whether all PCI devices of the host are opened through iommufd, which counts no mappings."""
    default = document.root.value("iommufd/@enabled") or "no"
    settings = [e.value("driver/@iommufd") or default for _, e in list_hostdev_elements(document)]
    return bool(settings) and all(word == "yes" for word in settings)


def report_missing_iommufd(guest: Vm, libvirt: Version | None, qemu: Version | None) -> Finding:
    """Return the finding that iommufd was omitted, with the versions that support it."""
    return finding(
        "iommufd-missing",
        f"launch security {guest.launch_security}",
        observed="devices of such a guest need iommufd, which was omitted: expected libvirt "
        "12.1 and QEMU "
        f"8.2 or newer, found {_format_versions(libvirt, qemu)}",
    )
