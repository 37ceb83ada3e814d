"""Supply: the sibling groups that each node can give to a VM, by LLC.

A sibling group is what one guest core gets: one PU of a core, or several. The tiers of a node are
used in order, each to its end before the next: performance cores before efficiency cores,
and of either the isolated ones (isolcpus, nohz_full) first. Within a tier: the LLCs that are in use
already, then the fewest further LLCs, of those the tightest (fewest.py).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from homenode.cpuset import CpuSet
from homenode.indices import NodeIndex, PackageIndex
from homenode.plan.layout import Pinning
from homenode.plan.request import GuestRequest, Policy
from homenode.plan.search.allocations import Allocations
from homenode.plan.search.fewest import fewest
from homenode.plan.search.memory import NodeMemory
from homenode.topology import CoreKind, Host

UNKNOWN_LLC = 1 << 20
"""Cores whose LLC is unknown are one pool, after all others; never one LLC per core."""


class FreeCore(NamedTuple):
    """A core with PUs that the VM may use. free: bits. whole: nobody else may use any of it."""

    free: int
    whole: bool
    isolated: bool
    llc: int
    package: PackageIndex
    kind: CoreKind | None


@dataclass(frozen=True, slots=True)
class NodeCores:
    """A node of PUs and its cores with free ones, ascending."""

    position: int
    index: NodeIndex
    package: PackageIndex | None
    pus: CpuSet
    cores: tuple[FreeCore, ...]

    @property
    def whole_cores(self) -> int:
        return sum(core.whole for core in self.cores)


@dataclass(frozen=True, slots=True)
class Usable:
    """The PUs that the VM may use. isolated: PUs in isolcpus or nohz_full, usable or not.

    cores_without_vcpus: cores of the host, whosever, on which no vCPU is pinned.
    """

    pus: CpuSet
    isolated: CpuSet
    nodes: tuple[NodeCores, ...]
    cores_without_vcpus: int


def usable(
    host: Host, request: GuestRequest, others: Allocations, *, service_cores: bool = False
) -> Usable:
    """What is left of the host: allowed PUs that are neither reserved, asked for by name for the
    emulator, nor taken by others. Nodes ascending; nodes without PUs are left out.

    service_cores: with the cores on which others have emulators or IOThreads only.
    """
    allowed, isolated = 0, 0
    node_of: dict[int, NodeIndex | None] = {}
    llc_of: dict[int, int] = {}
    for pu in host.pus:
        if pu.online and pu.allowed:
            allowed |= 1 << pu.index
        if pu.isolated or pu.nohz_full:
            isolated |= 1 << pu.index
        node_of[pu.index] = pu.node
        llc_of[pu.index] = UNKNOWN_LLC if pu.llc is None else pu.llc
    barred = request.reserved_pus.bits | request.housekeeping_pus.bits | others.vcpu_cores.bits
    if not service_cores:
        barred |= others.service_cores.bits
    if request.emulator_pus is not None:
        barred |= request.emulator_pus.bits
    open_pus = allowed & ~barred
    by_node: dict[NodeIndex, list[FreeCore]] = {node.index: [] for node in host.nodes}
    for core in host.cores:
        bits = core.pus.bits
        free = bits & open_pus
        if not free:
            continue
        first = (bits & -bits).bit_length() - 1
        node = node_of[first]
        if node is not None and node in by_node:
            by_node[node].append(
                FreeCore(
                    free, free == bits, free & ~isolated == 0, llc_of[first],
                    core.id.package, core.kind,
                )
            )  # fmt: skip
    nodes = tuple(
        NodeCores(position, node.index, node.package, node.pus, tuple(by_node[node.index]))
        for position, node in enumerate(host.nodes)
        if node.pus
    )
    free_of_vcpus = sum(not core.pus.bits & others.vcpu_cores.bits for core in host.cores)
    return Usable(CpuSet.from_bits(open_pus), CpuSet.from_bits(isolated), nodes, free_of_vcpus)


class SiblingGroup(NamedTuple):
    """PUs for one guest core, as bits; one vCPU is pinned to each, ascending."""

    pus: int
    llc: int
    package: PackageIndex
    kind: CoreKind | None
    isolated: bool


@dataclass(frozen=True, slots=True)
class Tier:
    """Groups of one kind in a node, by LLC ascending."""

    total: int
    isolated: bool
    llcs: tuple[tuple[int, tuple[SiblingGroup, ...]], ...]


class AllocationCost(NamedTuple):
    """How many groups are not isolated, and the LLCs and packages in use, for so many groups."""

    unisolated: int
    llcs: int
    packages: int


@dataclass(frozen=True, slots=True)
class Part:
    """The tiers of a node, or of one package's share of a node that spans packages."""

    total: int
    tiers: tuple[Tier, ...]

    def allocate(self, wanted: int) -> tuple[SiblingGroup, ...]:
        """That many groups by the rule of this module, by LLC and PU. `wanted` is at most total."""
        chosen: list[SiblingGroup] = []
        used: set[int] = set()
        left = wanted
        for tier in self.tiers:
            if left >= tier.total:
                for llc, groups in tier.llcs:
                    used.add(llc)
                    chosen += groups
                left -= tier.total
            else:
                inside = [groups for llc, groups in tier.llcs if llc in used]
                outside = [groups for llc, groups in tier.llcs if llc not in used]
                for groups in inside:
                    chosen += groups[:left]
                    left -= min(left, len(groups))
                for i in fewest([len(groups) for groups in outside], left):
                    chosen += outside[i][:left]
                    left -= min(left, len(outside[i]))
            if not left:
                break
        return tuple(sorted(chosen, key=lambda g: (_tier_rank(g.kind), g.llc, g.pus & -g.pus)))

    def cost(self, wanted: int, hosts_isolation: bool) -> AllocationCost:
        """What allocate() would come to, without taking."""
        used: set[int] = set()
        unisolated, left, extra = 0, wanted, 0
        for tier in self.tiers:
            if hosts_isolation and not tier.isolated:
                unisolated += min(left, tier.total)
            if left >= tier.total:
                used.update(llc for llc, _ in tier.llcs)
                left -= tier.total
            else:
                left -= sum(len(groups) for llc, groups in tier.llcs if llc in used)
                rest = (len(groups) for llc, groups in tier.llcs if llc not in used)
                for count in sorted(rest, reverse=True):
                    if left <= 0:
                        break
                    left -= count
                    extra += 1
                left = 0
            if not left:
                break
        return AllocationCost(unisolated, len(used) + extra, 1)


@dataclass(frozen=True, slots=True)
class Supply:
    """The sibling groups of one node. parts: one per package, so several where it spans packages.

    groups: all of them. whole_cores: free whole cores, for the balance.
    """

    cores: NodeCores
    parts: tuple[Part, ...]
    whole: Part
    groups: int
    whole_cores: int
    memory: NodeMemory

    def allocate(self, wanted: int) -> tuple[SiblingGroup, ...]:
        return self._part(wanted).allocate(wanted)

    def cost(self, wanted: int, hosts_isolation: bool) -> AllocationCost:
        part = self._part(wanted)
        found = part.cost(wanted, hosts_isolation)
        if part is self.whole and len(self.parts) > 1:
            packages = len({group.package for group in part.allocate(wanted)})
            return AllocationCost(found.unisolated, found.llcs, packages)
        return found

    def _part(self, wanted: int) -> Part:
        """The share of one package where one holds them all, the tightest; else the whole node."""
        if len(self.parts) == 1:
            return self.parts[0]
        fitting = [part for part in self.parts if part.total >= wanted]
        if not fitting:
            return self.whole

        def tightness(part: Part) -> tuple[int, int, int]:
            found = part.cost(wanted, True)
            return found.unisolated, found.llcs, part.total

        return min(fitting, key=tightness)


def supply(
    cores: NodeCores,
    memory: NodeMemory,
    *,
    threads: int,
    kinds: frozenset[CoreKind | None],
    counts_pus: bool,
) -> Supply:
    """What the node can give in groups of `threads` siblings, on cores of these kinds.

    counts_pus: take the free PUs of cores that are not free as a whole, too, and several groups of
    one core; else one group of each free whole core that has enough PUs.
    """
    groups: list[SiblingGroup] = []
    for core in cores.cores:
        if core.kind not in kinds:
            continue
        free = core.free
        if not counts_pus:
            if core.whole and free.bit_count() >= threads:
                groups.append(_group(lowest(free, threads), core))
            continue
        while free.bit_count() >= threads:
            pus = lowest(free, threads)
            groups.append(_group(pus, core))
            free &= ~pus
    packages = sorted({group.package for group in groups})
    whole = _part(groups)
    parts = (
        (whole,)
        if len(packages) < 2
        else tuple(_part([g for g in groups if g.package == package]) for package in packages)
    )
    free_cores = sum(core.whole and core.kind in kinds for core in cores.cores)
    return Supply(cores, parts, whole, len(groups), free_cores, memory)


def counts_pus(policy: Policy, pinning: Pinning) -> bool:
    """True where the policy leaves cores uncounted and the layout does not ask for one a vCPU."""
    return pinning is not Pinning.ONE_PER_CORE and policy in (Policy.MEMORY_FIRST, Policy.ANY)


def lowest(bits: int, count: int) -> int:
    """The lowest `count` bits of a set.

    >>> bin(lowest(0b101100, 2))
    '0b1100'
    """
    result = 0
    for _ in range(count):
        bit = bits & -bits
        result |= bit
        bits ^= bit
    return result


def _group(pus: int, core: FreeCore) -> SiblingGroup:
    return SiblingGroup(pus, core.llc, core.package, core.kind, core.isolated)


def _tier_rank(kind: CoreKind | None) -> int:
    return kind is CoreKind.EFFICIENCY


def _part(groups: Sequence[SiblingGroup]) -> Part:
    tiers: dict[tuple[int, bool], dict[int, list[SiblingGroup]]] = {}
    for group in groups:
        tier = tiers.setdefault((_tier_rank(group.kind), not group.isolated), {})
        tier.setdefault(group.llc, []).append(group)
    return Part(len(groups), tuple(_tier(rank[1], tiers[rank]) for rank in sorted(tiers)))


def _tier(unisolated: bool, by_llc: dict[int, list[SiblingGroup]]) -> Tier:
    llcs = tuple((llc, tuple(by_llc[llc])) for llc in sorted(by_llc))
    return Tier(sum(len(groups) for _, groups in llcs), not unisolated, llcs)


def core_kinds(nodes: Iterable[NodeCores]) -> frozenset[CoreKind | None]:
    """The kinds of all free cores of the nodes."""
    return frozenset(core.kind for node in nodes for core in node.cores)
