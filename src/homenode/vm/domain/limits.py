"""Limits: what encrypted guests (SEV, SEV-SNP, TDX) cannot have and what they measure, and the most
vCPUs that a machine type takes.

Source: Linux Documentation/virt/kvm/api.rst, KVM_CREATE_GUEST_MEMFD; QEMU docs/system/i386
amd-memory-encryption.rst and tdx.rst; AMD 56860 (SEV-SNP firmware ABI), launch digest. max_cpus in
QEMU's hw/i386/pc_q35.c, hw/i386/pc.c and hw/arm/virt.c, by the version in the machine type's name.
A vendor's own machine types ("pc-q35-rhel9.4.0") have limits of their own.
"""

import re

from homenode.errors import InputError
from homenode.vm.layout import MemoryBinding
from homenode.vm.model import Vm
from homenode.vm.plan_model import Plan, PlanFinding, plan_finding

_MEASURED = frozenset({"sev-es", "sev-snp", "tdx"})


def refuse_unsafe(guest: Vm, plan: Plan, source: str) -> None:
    """Raises InputError where the plan asks of an encrypted guest what would break or be untrue."""
    kind = guest.launch_security
    if kind is None:
        return
    if plan.vm.has_iommu and not guest.has_iommu:
        raise InputError(
            f"{source}: expected no guest IOMMU with launch security {kind!r}, found a plan "
            f"for {plan.vcpus} vCPUs that needs one: an emulated IOMMU cannot read tables in "
            "encrypted memory",
            hint="use at most 255 vCPUs",
        )
    if not guest.has_private_memory:
        return
    if plan.page_bytes is not None and guest.page_bytes is None:
        raise InputError(
            f"{source}: expected ordinary pages with launch security {kind!r}, found a plan "
            f"with pages of {plan.page_bytes} bytes: private memory comes from guest_memfd, which "
            "has no hugetlb pages, so the reserved ones would only be lost",
            hint="plan without --page-size",
        )
    cells = [cell for cell in plan.cells if cell.memory_bytes]
    if plan.layout.memory is MemoryBinding.BOUND_PER_CELL and len(cells) > 1:
        raise InputError(
            f"{source}: expected memory bound as a whole with launch security {kind!r}, found "
            f"{len(cells)} cells bound each to its own node: pages of guest_memfd do not follow a "
            "cell's binding, so the guest would be shown a locality that it does not have",
            hint="use --layout pin or pin-bound, or --max-nodes 1",
        )


def launch_findings(guest: Vm, plan: Plan) -> tuple[PlanFinding, ...]:
    """What whoever attests the guest must know of a plan that works."""
    kind = guest.launch_security
    if kind is None:
        return ()
    changes = []
    if plan.vcpus != guest.vcpus:
        changes.append(f"vCPUs {guest.vcpus} to {plan.vcpus}")
    if plan.topology is not None and tuple(plan.topology) != guest.cpu_topology:
        changes.append("CPU topology")
    if any(not controller.existing for controller in plan.vm.controllers):
        changes.append("ACPI tables (PCI roots)")
    if plan.cells and len(plan.cells) != max(1, len(guest.cell_vcpus)):
        changes.append("ACPI tables (cells)")
    if not changes:
        return ()
    measured = kind in _MEASURED or kind == "sev"
    return (
        plan_finding(
            "launch-measurement",
            f"launch security {kind}",
            "the plan changes what the guest is launched with: " + ", ".join(changes),
            severity="warning" if measured else "info",
        ),
    )


_SINCE: dict[str, tuple[tuple[tuple[int, int], int], ...]] = {
    "pc-q35": (((9, 0), 4096), ((8, 1), 1024), ((2, 8), 288), ((0, 0), 255)),
    "pc-i440fx": (((0, 0), 255),),
    "virt": (((3, 0), 512), ((0, 0), 255)),
}
"""Family -> (first version, most vCPUs), the newest first."""

_ALIASES = {"q35": "pc-q35", "pc": "pc-i440fx", "virt": "virt"}
"""Names that stand for the newest of their family that a QEMU has."""

_NAMED = re.compile(r"(pc-q35|pc-i440fx|virt)-(\d{1,3})\.(\d{1,3})(?:\.\d+)?", re.ASCII)
_EVERY_TYPE_TAKES = 255


def most_vcpus(machine: str | None, qemu: tuple[int, int, int] | None) -> int | None:
    """The most vCPUs of a machine type; None where it is not known.

    qemu: version of the host's QEMU, which is what an alias such as q35 depends on.

    >>> most_vcpus("pc-q35-7.2", None), most_vcpus("q35", (8, 2, 0)), most_vcpus("q35", None)
    (288, 1024, None)
    """
    named = _NAMED.fullmatch(machine or "")
    if named is not None:
        family, version = named[1], (int(named[2]), int(named[3]))
    else:
        family = _ALIASES.get(machine or "", "")
        limits = _SINCE.get(family, ())
        if qemu is None:
            return limits[0][1] if len(limits) == 1 else None
        version = qemu[:2]
    return next((most for since, most in _SINCE.get(family, ()) if version >= since), None)


def check_vcpus(
    guest: Vm, vcpus: int, qemu: tuple[int, int, int] | None, source: str = "domain"
) -> tuple[PlanFinding, ...]:
    """A finding where so many vCPUs may be too many for the machine type and its limit is unknown.

    Raises InputError where they are too many.
    """
    if vcpus <= _EVERY_TYPE_TAKES:
        return ()
    most = most_vcpus(guest.machine, qemu)
    machine = guest.machine or "none, which is libvirt's choice"
    if most is None:
        return (
            plan_finding(
                "vcpu-limit-unknown",
                "<vcpu>",
                f"{vcpus} vCPUs, and how many machine type {machine} takes is not known",
            ),
        )
    if vcpus <= most:
        return ()
    named = _NAMED.fullmatch(machine)
    of = machine if named or qemu is None else f"{machine} of QEMU {'.'.join(map(str, qemu))}"
    larger = "pc-q35-9.0 or newer (QEMU 9.0), which takes 4096"
    is_x86 = guest.architecture == "x86_64"
    raise InputError(
        f"{source}: expected at most {most} vCPUs, which is what machine type {of} takes, found "
        f"{vcpus}",
        hint=(f"use machine type {larger}, or " if is_x86 else "") + "give the VM fewer vCPUs",
    )
