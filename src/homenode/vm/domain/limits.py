"""Limits: checks of a plan in a definition beyond the planner's: features and measurements of
encrypted guests (SEV, SEV-SNP, TDX), the maximum vCPUs of a machine type, and elements that libvirt
adds by itself.

Source: Linux Documentation/virt/kvm/api.rst, KVM_CREATE_GUEST_MEMFD; QEMU docs/system/i386
amd-memory-encryption.rst and tdx.rst; AMD 56860 (SEV-SNP firmware ABI), launch digest. max_cpus in
QEMU's hw/i386/pc_q35.c, hw/i386/pc.c and hw/arm/virt.c, by the version in the machine type's name.
A vendor's own machine types ("pc-q35-rhel9.4.0") have limits of their own."""

import re
from collections.abc import Iterator

from homenode.errors import InputError
from homenode.findings import Finding, Severity, finding
from homenode.vm.domain.cpu import needs_acpi
from homenode.vm.domain.document import Document
from homenode.vm.domain.read import build_vm, open_domain
from homenode.vm.layout import MemoryBinding
from homenode.vm.model import PortModel, Vm
from homenode.vm.plan import Plan

_MEASURED = frozenset({"sev", "sev-es", "sev-snp", "tdx"})


def reject_unsafe(guest: Vm, plan: Plan, source: str) -> None:
    """Raise InputError if the plan would break an encrypted guest, or not apply to it."""
    kind = guest.launch_security
    if kind is None:
        return
    if plan.vm.has_iommu and not guest.has_iommu:
        raise InputError(
            f"{source}: {plan.vm.vcpus} vCPUs need a guest IOMMU, which cannot read the encrypted "
            f"memory of launch security {kind!r}",
            hint="use at most 255 vCPUs",
        )
    if not guest.has_private_memory:
        return
    if plan.vm.page_bytes is not None and guest.page_bytes is None:
        raise InputError(
            f"{source}: the private memory of launch security {kind!r} comes from guest_memfd, "
            f"which has no huge pages of {plan.vm.page_bytes} bytes",
            hint="plan without --page-size",
        )
    cells = [cell for cell in plan.cells if cell.memory_bytes]
    if plan.layout.memory is MemoryBinding.BOUND_PER_CELL and len(cells) > 1:
        raise InputError(
            f"{source}: the private memory of launch security {kind!r} comes from guest_memfd, "
            f"which does not follow the bindings of {len(cells)} cells",
            hint="use --layout pin or pin-bound, or --max-nodes 1",
        )


def check_launch_security(guest: Vm, plan: Plan) -> Iterator[Finding]:
    """Yield findings on changes that affect the guest's attestation."""
    kind = guest.launch_security
    if kind is None:
        return
    changes = []
    if plan.vm.vcpus != guest.vcpus:
        changes.append(f"vCPUs {guest.vcpus} to {plan.vm.vcpus}")
    if plan.vm.cpu_topology is not None and tuple(plan.vm.cpu_topology) != guest.cpu_topology:
        changes.append("CPU topology")
    if any(not controller.existing for controller in plan.vm.controllers):
        changes.append("ACPI tables (PCI roots)")
    if plan.cells and len(plan.cells) != max(1, len(guest.cell_vcpus)):
        changes.append("ACPI tables (cells)")
    if changes:
        yield finding(
            "launch-measurement",
            f"launch security {kind}",
            observed="the plan changes the guest's launch measurement: " + ", ".join(changes),
            severity=Severity.WARNING if kind in _MEASURED else Severity.INFO,
        )


_SINCE: dict[str, tuple[tuple[tuple[int, int], int], ...]] = {
    "pc-q35": (((9, 0), 4096), ((8, 1), 1024), ((2, 8), 288), ((0, 0), 255)),
    "pc-i440fx": (((0, 0), 255),),
    "virt": (((3, 0), 512), ((0, 0), 255)),
}
"""Family -> (first version, most vCPUs), the newest first."""

_ALIASES = {"q35": "pc-q35", "pc": "pc-i440fx", "virt": "virt"}
"""Names of the newest machine type of their family."""

_NAMED = re.compile(r"(pc-q35|pc-i440fx|virt)-(\d{1,3})\.(\d{1,3})(?:\.\d+)?", re.ASCII)
_EVERY_TYPE_TAKES = 255


def find_max_vcpus(machine: str | None, qemu: tuple[int, int, int] | None) -> int | None:
    """Return the maximum vCPUs of a machine type; None if unknown.

    qemu: version of the host's QEMU, which decides an alias such as q35.

    >>> find_max_vcpus("pc-q35-7.2", None), find_max_vcpus("q35", (8, 2, 0))
    (288, 1024)
    """
    match = _NAMED.fullmatch(machine or "")
    if match is not None:
        family, version = match[1], (int(match[2]), int(match[3]))
    else:
        family = _ALIASES.get(machine or "", "")
        limits = _SINCE.get(family, ())
        if qemu is None:
            return limits[0][1] if len(limits) == 1 else None
        version = qemu[:2]
    return next((limit for since, limit in _SINCE.get(family, ()) if version >= since), None)


def check_vcpus(
    guest: Vm, vcpus: int, qemu: tuple[int, int, int] | None, source: str = "domain"
) -> tuple[Finding, ...]:
    """Return a finding if the machine type's limit is unknown and may be exceeded. Raises
    InputError if they are too many."""
    if vcpus <= _EVERY_TYPE_TAKES:
        return ()
    limit = find_max_vcpus(guest.machine, qemu)
    machine = guest.machine or "none, which libvirt chooses"
    if limit is None:
        return (
            finding(
                "vcpu-limit-unknown",
                "<vcpu>",
                observed=f"{vcpus} vCPUs, and the maximum of machine type {machine} is unknown",
            ),
        )
    if vcpus <= limit:
        return ()
    match = _NAMED.fullmatch(machine)
    machine_text = (
        machine if match or qemu is None else f"{machine} of QEMU {'.'.join(map(str, qemu))}"
    )
    larger = "pc-q35-9.0 or newer (QEMU 9.0), which takes 4096"
    is_x86 = guest.architecture == "x86_64"
    raise InputError(
        f"{source}: expected at most {limit} vCPUs, which is what machine type "
        f"{machine_text} takes, found {vcpus}",
        hint=(f"use machine type {larger}, or " if is_x86 else "") + "give the VM fewer vCPUs",
    )


def check_document(
    before: bytes, tuned_xml: bytes, plan: Plan, source: str = "domain"
) -> tuple[Finding, ...]:
    """Return the findings of a definition before and after it was rewritten."""
    document = open_domain(before, source)
    after = open_domain(tuned_xml, source)
    guest = build_vm(document)
    return (
        *check_launch_security(guest, plan),
        *_check_taint(guest, build_vm(after)),
        *_check_acpi(document, after, plan),
    )


def _check_taint(before: Vm, after: Vm) -> Iterator[Finding]:
    if after.has_qemu_commandline and not before.has_qemu_commandline:
        yield finding(
            "qemu-commandline",
            "<qemu:commandline>",
            observed="OVMF's window for large BARs can be set in no other way; libvirt marks the "
            "domain as tainted (custom-argv)",
        )


def _check_acpi(before: Document, after: Document, plan: Plan) -> Iterator[Finding]:
    had, has_acpi = (
        document.root.find("features/acpi") is not None for document in (before, after)
    )
    expanders = any(c.model == PortModel.EXPANDER_BUS for c in plan.vm.controllers)
    if not had and has_acpi:
        yield finding(
            "acpi-added",
            "<acpi/>",
            "in <features>, from which the guest reads its NUMA nodes and the nodes of its devices",
            "none: it was added",
        )
    elif not has_acpi and needs_acpi(plan) and expanders:
        yield finding(
            "acpi-missing",
            "<acpi/>",
            "in <features>, by which the guest finds its expander buses",
            "none: the guest does not see the devices on them",
            case="of a plan",
        )
