"""HostNeeds: huge pages and PUs that a set of plans needs of one host."""

from collections.abc import Sequence

from msgspec import Struct

from homenode.cpuset import CpuSet
from homenode.errors import UsageError
from homenode.machine.topology import Host
from homenode.vm.plan_model import Plan


class NodePages(Struct, frozen=True):
    """Huge pages of one size that all VMs together need on a node."""

    node: int
    page_bytes: int
    pages: int


class HostNeeds(Struct, frozen=True):
    """domains: names of the VMs. vm_pus: PUs that their vCPUs are pinned to. host_pus: online PUs
    that are left for everything else."""

    domains: tuple[str, ...]
    pages: tuple[NodePages, ...]
    vm_pus: CpuSet
    host_pus: CpuSet


def needs_of(plans: Sequence[tuple[str, Plan]], host: Host) -> HostNeeds:
    """What the plans need together. plans: each with what to call it in messages.

    Raises UsageError where two plans share a PU, or where no PU is left for the host.
    """
    owner: dict[int, str] = {}
    pages: dict[tuple[int, int], int] = {}
    for source, plan in plans:
        mine = CpuSet(pu for pins in plan.vcpu_pins for pu in pins)
        for pu in mine:
            if owner.setdefault(pu, source) != source:
                raise UsageError(
                    f"{source}: expected PUs of its own, found PU {pu} in {owner[pu]} as well",
                    hint="plan the second VM after the first: homenode plan --after FIRST.json",
                )
        for one in plan.page_reservations:
            key = int(one.node), one.page_bytes
            pages[key] = pages.get(key, 0) + one.pages
    vm_pus = CpuSet(owner)
    host_pus = CpuSet(int(pu.index) for pu in host.pus if pu.online) - vm_pus
    if not host_pus:
        raise UsageError(
            f"{host.name}: expected PUs that are left for the host, found all pinned to vCPUs",
            hint="plan with a share for the host: --host-reserve",
        )
    return HostNeeds(
        tuple(plan.vm.name for _, plan in plans),
        tuple(NodePages(node, size, count) for (node, size), count in sorted(pages.items())),
        vm_pus,
        host_pus,
    )
