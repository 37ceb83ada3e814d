"""HostNeeds: huge pages and PUs that a set of plans needs of one host, and whether it has them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from homenode.cpuset import CpuSet
from homenode.errors import UsageError
from homenode.findings import Finding, Severity
from homenode.plan.model import Plan
from homenode.topology import Host
from homenode.units import format_bytes
from homenode.wording import printable

SOURCE = "homenode host-setup"


@dataclass(frozen=True, slots=True)
class NodePages:
    """Huge pages of one size that all VMs together need on a node."""

    node: int
    page_bytes: int
    pages: int


@dataclass(frozen=True, slots=True)
class HostNeeds:
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
        tuple(plan.domain_name for _, plan in plans),
        tuple(NodePages(node, size, count) for (node, size), count in sorted(pages.items())),
        vm_pus,
        host_pus,
    )


def unmet(needs: HostNeeds, host: Host, *, isolated: bool) -> Iterator[Finding]:
    """What the running host lacks. isolated: its PUs are to be kept from the scheduler at boot."""
    pools = {
        (int(node.index), pool.page_bytes): pool.total_pages
        for node in host.nodes
        for pool in node.page_pools
    }
    for one in needs.pages:
        found = pools.get((one.node, one.page_bytes), 0)
        if found < one.pages:
            yield Finding(
                id="setup-pages-short",
                severity=Severity.CRITICAL,
                subject=f"node {one.node}",
                expected=f"{one.pages} pages of {format_bytes(one.page_bytes)}",
                observed=str(found),
                cost=f"of {printable(', '.join(needs.domains))} not all can start",
                fix="homenode host-setup install, then reboot or start the units",
                source=SOURCE,
            )
    if isolated:
        there = CpuSet(int(pu.index) for pu in host.pus if pu.isolated)
        missing = needs.vm_pus - there
        if missing:
            yield Finding(
                id="setup-not-isolated",
                severity=Severity.WARNING,
                subject=f"PUs {missing}",
                expected="isolated at boot",
                observed="not isolated",
                cost="the scheduler may put the host's own work there",
                fix="homenode host-setup install --isolate boot, then reboot",
                source=SOURCE,
            )
