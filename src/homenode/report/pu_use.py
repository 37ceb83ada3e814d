"""PuUse: what runs on each PU: vCPUs, QEMU's own threads, other domains."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from homenode.cpuset import CpuSet
from homenode.plan.model import Plan
from homenode.topology import Host


@dataclass(frozen=True, slots=True)
class PuUse:
    """Who is on a PU. The empty use is a free PU.

    vcpus: of the plan, in vCPU order; cell: the guest cell of the first one. beside_cell: free, but
    a sibling of a PU with vCPUs of that cell. iothreads: their ids. taken_by: other domains that
    have the PU or a sibling. barred: whoever looked at the host may not use the PU.
    """

    vcpus: tuple[int, ...] = ()
    cell: int | None = None
    other_cell: int | None = None
    emulator: bool = False
    iothreads: tuple[int, ...] = ()
    used_by: tuple[str, ...] = ()
    barred: bool = False
    isolated: bool = False


FREE = PuUse()


def uses_of_pus(host: Host, plan: Plan | None) -> Mapping[int, PuUse]:
    """The use of every online PU that has one; PUs that are not in it are free."""
    uses: dict[int, PuUse] = {}

    def use(pu: int) -> PuUse:
        return uses.get(pu, FREE)

    for known in host.pus:
        if known.online and not known.allowed:
            uses[known.index] = PuUse(barred=True)
        if known.online and (known.isolated or known.nohz_full):
            uses[known.index] = replace(use(known.index), isolated=True)
    siblings: dict[int, CpuSet] = {pu: core.pus for core in host.cores for pu in core.pus}
    for domain in host.domains:
        if not (domain.running or domain.planned):
            continue
        if plan is not None and domain.name == plan.domain_name:
            continue
        in_use = CpuSet()
        for pins in domain.vcpu_pins:
            # A vCPU that floats over the whole host takes no core from anyone.
            if pins is not None and len(pins) < len(siblings):
                for pu in pins:
                    in_use |= siblings.get(pu, CpuSet())
        for threads in (domain.emulator_pus, *domain.iothread_pus):
            if threads is not None and len(threads) < len(siblings):
                in_use |= threads
        for pu in in_use:
            uses[pu] = replace(use(pu), used_by=(*use(pu).used_by, domain.name))
    if plan is None:
        return uses
    cell_of_vcpu: dict[int, int] = {vcpu: cell.id for cell in plan.cells for vcpu in cell.vcpus}
    vcpus_of_pu: dict[int, list[int]] = {}
    for vcpu, pins in enumerate(plan.vcpu_pins):
        for pu in pins:
            vcpus_of_pu.setdefault(pu, []).append(vcpu)
    for index, vcpus in vcpus_of_pu.items():
        home = cell_of_vcpu.get(vcpus[0], 0)
        uses[index] = replace(use(index), vcpus=tuple(vcpus), cell=home)
        for sibling in siblings.get(index, CpuSet()):
            if sibling not in vcpus_of_pu:
                uses[sibling] = replace(use(sibling), other_cell=home)
    for own in plan.emulator_pus or ():
        uses[own] = replace(use(own), emulator=True)
    for number, threads in plan.vm.iothread_pins:
        for own in threads:
            uses[own] = replace(use(own), iothreads=(*use(own).iothreads, number))
    return uses
