"""Guest IOMMU: <iommu>, the split <ioapic> that interrupt remapping needs, and iommufd on the host.

Above 255 vCPUs an x86 guest needs interrupt remapping with 32-bit APIC ids (eim). aarch64 does not;
there a Grace GPU's driver needs an SMMUv3 that the host's own accelerates. QEMU takes nothing but
vfio-pci devices of iommufd behind one, all of one SMMU of the host.

Source: <iommu> in formatdomain of libvirt 12.8; -device arm-smmuv3 in qemu(1) 11.1.

SEV-SNP and TDX guests with GPUs need iommufd (KubeVirt enhancement VEP-266); other guests keep what
they have, for nothing is known to be gained. From libvirt 12.2 one element says it for the whole
VM, interfaces of type hostdev included; 12.1 takes it for each <hostdev>. Descriptors that someone
else opened (fdgroup=) are left to that program.

Source: libvirt 12.1 and 12.2, DomainIOMMUFD of libvirtxml 1.12002; QEMU 8.2 (-object iommufd).
"""

from homenode.errors import InputError
from homenode.machine.tools.versions import Version
from homenode.machine.topology import Host
from homenode.vm.domain.controllers import pci_controllers
from homenode.vm.domain.cpu import with_feature
from homenode.vm.domain.document import DOMAIN_ORDER, Document
from homenode.vm.domain.edits import (
    Edit,
    New,
    append,
    apply,
    insert_in_order,
    remove,
    set_attribute,
    set_attributes,
)
from homenode.vm.domain.hostdevs import hostdev_elements
from homenode.vm.model import PortModel, Vm
from homenode.vm.plan_model import Plan, PlanFinding, plan_finding

LIBVIRT_WITH_ACCEL: Version = (12, 7, 0)
QEMU_WITH_ACCEL: Version = (11, 1, 0)
"""First versions with <driver accel=>, and in which QEMU asks the host for ats, oas, ssidsize."""

MOST_VCPUS_WITHOUT = 255
"""libvirt: "more than 255 vCPUs require extended interrupt mode enabled on the iommu device"."""


def smmu_buses(guest: Vm, plan: Plan, host: Host) -> tuple[int, ...]:
    """The expander buses that an accelerated SMMUv3 can stand for: those of Grace GPUs, with
    nothing but passed-through devices of one root complex of the host, so of one SMMU."""
    bus_of = {c.index: c.address.bus for c in plan.vm.controllers if c.address is not None}
    expanders = {c.index for c in plan.vm.controllers if c.model == PortModel.EXPANDER_BUS}

    def top(bus: int) -> int | None:
        while bus not in expanders and bus in bus_of:
            bus = bus_of[bus]
        return bus if bus in expanders else None

    complexes: dict[int, set[str | None]] = {}
    grace: set[int] = set()
    for device in plan.devices:
        bus = None if device.address is None else top(device.address.bus)
        if bus is not None:
            known = host.device(device.bdf)
            complexes.setdefault(bus, set()).add(None if known is None else known.root_complex)
            if device.initiator_cells:
                grace.add(bus)
    own = {c.address for c in guest.controllers} | {d.address for d in guest.hostdevs}
    shared = {top(address.bus) for address in guest.addresses if address not in own}
    return tuple(
        sorted(
            bus for bus in grace - shared if len(complexes[bus]) == 1 and None not in complexes[bus]
        )
    )


def can_accelerate(libvirt: Version | None, qemu: Version | None) -> bool:
    """libvirt is known to be new enough, and QEMU not known to be too old."""
    return (libvirt is not None and libvirt >= LIBVIRT_WITH_ACCEL) and (
        qemu is None or qemu >= QEMU_WITH_ACCEL
    )


def edit_smmus(document: Document, buses: tuple[int, ...]) -> Document:
    """An accelerated SMMUv3 for each of these buses that has none; ats, ril, oas, ssidsize and
    cmdqv stay QEMU's, which asks the host. One for the whole machine stays alone."""
    devices = document.root.child("devices")
    there = () if devices is None else devices.all("iommu")
    drivers = [element.child("driver") for element in there]
    if devices is None or any(d is None or d.get("pciBus") is None for d in drivers):
        return document
    have = {None if driver is None else driver.get("pciBus") for driver in drivers}
    new = [
        New(
            "iommu",
            (("model", "smmuv3"),),
            (New("driver", (("pciBus", str(bus)), ("accel", "on"))),),
        )
        for bus in buses
        if str(bus) not in have
    ]
    return apply(document, append(document, devices, new))


def _without_buses(document: Document) -> Document:
    """Without the accelerated SMMUv3 of buses that are no more."""
    indices = {str(index) for index, _ in pci_controllers(document)}
    devices = document.root.child("devices")
    edits: list[Edit] = []
    for element in () if devices is None else devices.all("iommu"):
        driver = element.child("driver")
        bus = None if driver is None or driver.get("accel") != "on" else driver.get("pciBus")
        if bus is not None and bus not in indices:
            edits += remove(document, element)
    return apply(document, edits)


def smmu_left_out(
    guest: Vm,
    plan: Plan,
    buses: tuple[int, ...],
    libvirt: Version | None,
    qemu: Version | None,
) -> PlanFinding | None:
    """What a guest with Grace GPUs lacks without an accelerated SMMUv3, and what would give it one.

    buses: what `smmu_buses` says. Source: KubeVirt enhancement VEP-199.
    """
    devices = [device for device in plan.devices if device.initiator_cells]
    if guest.iommu_model is not None or not devices:
        return None
    if not can_accelerate(libvirt, qemu):
        found = " and ".join(
            f"{name} {'unknown' if version is None else '.'.join(map(str, version))}"
            for name, version in (("libvirt", libvirt), ("QEMU", qemu))
        )
        why = f"it needs libvirt 12.7 and QEMU 11.1 or newer, found {found}"
        case = None
    elif not buses:
        why = "no bus of the guest has devices of one root complex of the host alone"
        case = "no bus"
    else:
        return None
    return plan_finding(
        "smmuv3-left-out",
        "<iommu model='smmuv3'>",
        f"an accelerated SMMUv3 for each bus with a Grace GPU was left out: {why}; without "
        "it the GPU's driver in the guest has no address translation of its own",
        case=case,
    )


def edit_iommu(document: Document, plan: Plan) -> Document:
    """An Intel IOMMU that remaps interrupts, where the plan needs it and none is there.

    One that is there gets the switches that it lacks, AMD's too (libvirt 12.2; requirements.py
    refuses an older one). Raises InputError for another model.
    """
    document = _without_buses(document)
    machine = document.root.at("os", "type")
    arch = None if machine is None else machine.get("arch")
    # iommu_needed is also said of a guest that has one already: that one stays as it is.
    if not plan.vm.has_iommu or plan.vcpus <= MOST_VCPUS_WITHOUT or arch not in (None, "x86_64"):
        return document
    # Under TCG there is no kernel irqchip, so that QEMU refuses eim.
    eim = "on" if document.root.get("type") == "kvm" else None
    driver: dict[str, str | None] = {"intremap": "on", "eim": eim}
    if plan.devices:
        driver["caching_mode"] = "on"  # QEMU: "Device assignment is not allowed without" it
    given = tuple((name, value) for name, value in driver.items() if value is not None)
    devices = document.root.child("devices")
    iommu = None if devices is None else devices.child("iommu")
    if iommu is None:
        new = New("iommu", (("model", "intel"),), (New("driver", given),))
        if devices is None:
            whole = New("devices", children=(new,))
            document = apply(
                document, insert_in_order(document, document.root, whole, DOMAIN_ORDER)
            )
        else:
            document = apply(document, append(document, devices, [new]))
    elif iommu.get("model") not in ("intel", "amd"):
        raise InputError(
            f"{document.source}:{iommu.line}: expected <iommu model='intel'> or 'amd' for "
            f"{plan.vcpus} vCPUs, found {iommu.get('model')!r}, which does not remap interrupts",
            hint="use model='intel', or at most 255 vCPUs",
        )
    else:
        if iommu.get("model") == "amd":
            driver = {"intremap": "on", "xtsup": "on"}
            given = tuple((name, value) for name, value in driver.items() if value is not None)
        there = iommu.child("driver")
        wanted = {name: value for name, value in driver.items() if value is not None}
        edits = (
            append(document, iommu, [New("driver", given)])
            if there is None
            else set_attributes(document, there, dict(wanted))
        )
        document = apply(document, edits)
    return with_feature(document, "ioapic", {"driver": "qemu"}) if eim else document


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
