"""Guest IOMMU: <iommu> and the split <ioapic> that interrupt remapping needs.

Above 255 vCPUs an x86 guest needs interrupt remapping with 32-bit APIC ids (eim). aarch64 does not.
"""

from homenode.domain.document import DOMAIN_ORDER, Document
from homenode.domain.edits import (
    New,
    append,
    apply,
    insert_in_order,
    set_attributes,
)
from homenode.domain.features import with_feature
from homenode.errors import InputError
from homenode.plan.guest import Guest
from homenode.plan.model import Plan, PlanFinding

MOST_VCPUS_WITHOUT = 255
"""libvirt: "more than 255 vCPUs require extended interrupt mode enabled on the iommu device"."""


def smmu_left_out(guest: Guest, plan: Plan) -> PlanFinding | None:
    """What a guest with Grace GPUs lacks without an SMMUv3 of its own. Nothing is written: no
    release of libvirt with `accel` could be named, and an <iommu> that is there stays.

    Source: KubeVirt enhancement VEP-199; DomainIOMMUDriver of libvirtxml, main of 2026-08.
    """
    if guest.iommu_model is not None or not any(d.initiator_cells for d in plan.devices):
        return None
    return PlanFinding(
        id="smmuv3-left-out",
        severity="info",
        subject="<iommu model='smmuv3'>",
        detail="an accelerated SMMUv3 for each bus with a Grace GPU was left out: it needs QEMU "
        "11.0 and a libvirt whose schema has <driver pciBus= accel= ats= ril= ssidSize= oas=>; "
        "without it the GPU's driver in the guest has no address translation of its own",
        fix="add it by hand where virt-xml-validate takes accel='on'",
    )


def edit_iommu(document: Document, plan: Plan) -> Document:
    """An Intel IOMMU that remaps interrupts, where the plan needs it and none is there.

    One that is there gets the switches that it lacks, AMD's too (libvirt 12.2; requirements.py
    refuses an older one). Raises InputError for another model.
    """
    machine = document.root.at("os", "type")
    arch = None if machine is None else machine.get("arch")
    # iommu_needed is also said of a guest that has one already: that one stays as it is.
    if not plan.iommu_needed or plan.vcpus <= MOST_VCPUS_WITHOUT or arch not in (None, "x86_64"):
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
