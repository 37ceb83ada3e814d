"""Launch security: what encrypted guests (SEV, SEV-SNP, TDX) cannot have, and what they measure.

Source: Linux Documentation/virt/kvm/api.rst, KVM_CREATE_GUEST_MEMFD; QEMU docs/system/i386
amd-memory-encryption.rst and tdx.rst; AMD 56860 (SEV-SNP firmware ABI), launch digest.
"""

from homenode.errors import InputError
from homenode.plan.model import Plan, PlanFinding, plan_finding
from homenode.vm.layout import MemoryBinding
from homenode.vm.model import Vm

_MEASURED = frozenset({"sev-es", "sev-snp", "tdx"})


def refuse_unsafe(guest: Vm, plan: Plan, source: str) -> None:
    """Raises InputError where the plan asks of an encrypted guest what would break or be untrue."""
    kind = guest.launch_security
    if kind is None:
        return
    if plan.iommu_needed and not guest.has_iommu:
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
    if any(not controller.existing for controller in plan.controllers):
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
