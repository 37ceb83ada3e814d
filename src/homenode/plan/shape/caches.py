"""Guest caches: what the guest is shown must be true, so dies follow LLCs where that can be said.

Source: libvirt domain XML, <cpu><cache>: passthrough shows the host's CPUID leaves as they are
(host-passthrough and maximum only), emulate shows one L3 a die. QEMU target/i386/cpu.c: the L3 of
leaf 4 and leaf 0x8000001D is shared by the threads of a die. Booted under QEMU 7.2 without KVM,
Linux 6.1 on an Intel model had one L3 a die; on EPYC-Milan, with 2 sockets of 2 dies, one a socket.
"""

from dataclasses import dataclass

from homenode.cpuset import CpuSet, PuIndex
from homenode.gap import Gap
from homenode.indices import LlcIndex
from homenode.plan.layout import GuestCells
from homenode.plan.model import GuestCache, GuestTopology, PlanFinding, PlannedCell
from homenode.plan.placement import Placement
from homenode.plan.request import GuestRequest
from homenode.plan.shape.guest_topology import AMD_VENDORS
from homenode.topology import Host

PASSTHROUGH_MODES = frozenset({"host-passthrough", "maximum"})
"""CPU modes with which libvirt takes <cache mode='passthrough'/>."""


@dataclass(frozen=True, slots=True)
class LlcRuns:
    """LLCs under the vCPUs. runs[cell]: (LLC, vCPUs) in vCPU order, one entry a run."""

    runs: tuple[tuple[tuple[LlcIndex, int], ...], ...]

    @property
    def dies_per_cell(self) -> int:
        """LLCs of each cell where all have equally many of equal size, else 1."""
        shapes = {(len(cell), *{count for _, count in cell}) for cell in self.runs}
        if len(shapes) != 1:
            return 1
        shape = shapes.pop()
        return shape[0] if len(shape) == 2 and not self.split_llcs else 1

    def follow_dies(self, die_vcpus: int) -> bool:
        """Each die of so many vCPUs lies on one LLC, and no cell has two dies on the same one."""
        llcs = [llc for cell in self.runs for llc, count in cell for _ in range(count)]
        dies = [llcs[start : start + die_vcpus] for start in range(0, len(llcs), die_vcpus)]
        if any(len(set(die)) > 1 for die in dies):
            return False
        end = 0
        for cell in self.runs:
            start, end = end, end + sum(count for _, count in cell)
            inside = [dies[i][0] for i in range(-(-start // die_vcpus), end // die_vcpus)]
            if len(set(inside)) < len(inside):
                return False
        return True

    @property
    def split_llcs(self) -> tuple[LlcIndex, ...]:
        """LLCs that come twice in the vCPU order, in one cell or in two."""
        seen: set[LlcIndex] = set()
        twice: set[LlcIndex] = set()
        for cell in self.runs:
            for llc, _ in cell:
                (twice if llc in seen else seen).add(llc)
        return tuple(sorted(twice))


@dataclass(frozen=True, slots=True)
class CacheChoice:
    """What the guest is shown of its L3, and what remains unsaid."""

    cache: GuestCache
    findings: tuple[PlanFinding, ...] = ()
    gaps: tuple[Gap, ...] = ()


def llc_runs(
    host: Host | None, placement: Placement, cells: tuple[PlannedCell, ...]
) -> LlcRuns | None:
    """LLCs in vCPU order for each cell; None if an LLC is unknown or a vCPU spans several."""
    if host is None or not placement.vcpu_pins:
        return None
    llcs: list[LlcIndex] = []
    for pins in placement.vcpu_pins:
        first = None if (index := pins.first()) is None else host.pu_at.get(index)
        llc = None if first is None else first.llc
        if llc is None or (len(pins) > 1 and any(_llc_of(host, pu) != llc for pu in pins)):
            return None
        llcs.append(llc)
    runs: list[tuple[tuple[LlcIndex, int], ...]] = []
    for cell in cells:
        counted: list[tuple[LlcIndex, int]] = []
        for vcpu in cell.vcpus:
            if counted and counted[-1][0] == llcs[vcpu]:
                counted[-1] = (llcs[vcpu], counted[-1][1] + 1)
            else:
                counted.append((llcs[vcpu], 1))
        runs.append(tuple(counted))
    return LlcRuns(tuple(runs))


def _llc_of(host: Host, index: PuIndex) -> LlcIndex | None:
    pu = host.pu_at.get(index)
    return None if pu is None else pu.llc


def guest_cache(
    host: Host | None,
    request: GuestRequest,
    placement: Placement,
    topology: GuestTopology | None,
    runs: LlcRuns | None,
) -> CacheChoice:
    """What to show the guest. A flat guest and other architectures stay as they were."""
    guest = request.guest
    if (
        host is None
        or topology is None
        or guest.architecture != "x86_64"
        or request.layout.cells is GuestCells.FLAT
        or guest.cpu_mode is None
    ):
        return CacheChoice(GuestCache.AS_IT_WAS)
    if runs is None:
        gap = Gap("guest L3", "the LLCs under the vCPUs are not known: left as it was")
        return CacheChoice(GuestCache.AS_IT_WAS, gaps=(gap,))
    if not runs.follow_dies(topology.cores * topology.threads):
        return CacheChoice(GuestCache.AS_IT_WAS, findings=(_not_mirrored(runs),))
    if guest.cpu_mode in PASSTHROUGH_MODES and _equals_host(host, placement, runs):
        return CacheChoice(GuestCache.PASSTHROUGH)
    gaps: list[Gap] = []
    if runs.split_llcs:
        names = ", ".join(map(str, runs.split_llcs))
        gaps.append(
            Gap("guest L3", f"LLC {names} serves several cells; the guest is shown one L3 for each")
        )
    if topology.dies > 1 and (host.cpu.vendor is None or host.cpu.vendor in AMD_VENDORS):
        gaps.append(
            Gap(
                "guest L3",
                f"the guest is shown {topology.dies} dies a socket, one for each LLC, but Linux "
                "6.1 on an AMD model under QEMU 7.2 takes each socket for one L3 all the same",
            )
        )
    return CacheChoice(GuestCache.EMULATED, gaps=tuple(gaps))


def _equals_host(host: Host, placement: Placement, runs: LlcRuns) -> bool:
    """Every LLC under the guest is wholly its own, and its siblings are all shown."""
    if runs.split_llcs:
        return False
    bits = 0
    for pins in placement.vcpu_pins:
        if len(pins) != 1 or pins.bits & bits:
            return False
        bits |= pins.bits
    used = CpuSet.from_bits(bits)
    whole = all(llc.pus <= used or llc.pus.isdisjoint(used) for llc in host.llcs)
    threads = {len(core.pus) for core in host.cores if not core.pus.isdisjoint(used)}
    return whole and threads == {placement.threads_per_core}


def _not_mirrored(runs: LlcRuns) -> PlanFinding:
    shown = "; ".join(
        f"cell {i}: " + ", ".join(f"{count} on LLC {llc}" for llc, count in cell)
        for i, cell in enumerate(runs.runs)
    )
    return PlanFinding(
        id="guest-l3-not-mirrored",
        severity="info",
        subject="guest L3",
        detail=f"vCPUs do not fill equal LLCs ({shown}): the guest keeps the hypervisor's "
        "default, one L3 "
        f"a die, which is not what the host has",
        fix="choose a number of vCPUs that fills whole LLCs",
    )
