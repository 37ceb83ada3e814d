"""Supply: the sibling groups of each node that a VM can use, by LLC.

A sibling group is the CPUs of one guest core: one CPU of a host core, or several. The tiers of a
node are used up in order: performance cores before efficiency cores, and isolated cores (isolcpus,
nohz_full) first in each. In the last tier the fewest further LLCs are used; if possible with equal
groups on each LLC, else LLCs already in use are filled first. The largest further LLCs are taken,
of these the tightest fit.

If CPUs and not cores are counted, each core gives a group before any core gives a second: whole
cores first, then partly used cores. Second groups are spread over the LLCs.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from homenode.cpuset import CpuSet, NodeIndex, PackageIndex, list_members
from homenode.machine.topology import CoreKind, Host, NumaNode
from homenode.plan.allocations import Allocations
from homenode.plan.request import GuestRequest

UNKNOWN_LLC = 1 << 20
"""Cores whose LLC is unknown are one pool, after all others; never one LLC per core."""


class CoreShape(NamedTuple):
    """Key of cores that the planner treats as equal."""

    pus: int  # free CPUs of each core
    is_whole: bool  # no other VM may use its CPUs
    isolated: bool
    llc: int
    package: PackageIndex
    kind: CoreKind | None
    llc_bytes: int = 0  # size of their LLC, 0 = unknown


FreeCore = tuple[int, CoreShape]
"""A core that the VM may use: its free CPUs, as bits."""


class NodeCores(Struct, frozen=True):
    position: int
    index: NodeIndex
    pus: CpuSet
    cores: tuple[FreeCore, ...]  # cores with free CPUs, ascending
    shapes: tuple[tuple[CoreShape, int], ...]  # number of cores of each shape


class FreeCpus(Struct, frozen=True):
    """The CPUs that the VM may use."""

    pus: CpuSet
    isolated: CpuSet  # CPUs in isolcpus or nohz_full, usable or not
    nodes: tuple[NodeCores, ...]
    cores_without_vcpus: int  # cores of the host on which no VM's vCPU is pinned


def free_cpus(
    host: Host, request: GuestRequest, allocations: Allocations, *, service_cores: bool = False
) -> FreeCpus:
    """Return the free part of the host: allowed CPUs that are neither reserved, nor requested for
    the emulator, nor used by others. Nodes ascending; nodes without CPUs are omitted.

    service_cores: with the cores on which others have emulators or IOThreads only.
    """
    isolated_bits, vcpu_cores = host.isolated_pus.bits, allocations.vcpu_cores.bits
    barred_bits = request.options.reserved_pus.bits | request.housekeeping_pus.bits | vcpu_cores
    if not service_cores:
        barred_bits |= allocations.service_cores.bits
    if request.options.emulator_pus is not None:
        barred_bits |= request.options.emulator_pus.bits
    open_pus = host.usable_pus.bits & ~barred_bits
    cores_of_node: dict[NodeIndex | None, list[FreeCore]] = {node.index: [] for node in host.nodes}
    cores_without_vcpus = 0
    for core, (pus, node_index, llc, llc_bytes) in zip(host.cores, host.core_places, strict=True):
        cores_without_vcpus += not pus & vcpu_cores
        free = pus & open_pus
        if free and node_index in cores_of_node:
            shape = CoreShape(
                pus=free.bit_count(),
                is_whole=free == pus,
                isolated=not free & ~isolated_bits,
                llc=UNKNOWN_LLC if llc is None else llc,
                package=core.id.package,
                kind=core.kind,
                llc_bytes=llc_bytes,
            )
            cores_of_node[node_index].append((free, shape))
    nodes = tuple(
        _build_node_cores(position, node, cores_of_node[node.index])
        for position, node in enumerate(host.nodes)
        if node.pus
    )
    return FreeCpus(CpuSet.from_bits(open_pus), host.isolated_pus, nodes, cores_without_vcpus)


def _build_node_cores(position: int, node: NumaNode, cores: list[FreeCore]) -> NodeCores:
    shapes = Counter([shape for _, shape in cores])
    return NodeCores(position, node.index, node.pus, tuple(cores), tuple(shapes.items()))


Rank = tuple[int, bool, bool]
"""Order of use of a tier: turn of its cores, efficiency cores, cores that are not isolated."""


class SiblingGroup(NamedTuple):
    """The CPUs of one guest core, as bits; a vCPU is pinned to each, ascending."""

    pus: int
    core: int  # the lowest free CPU of its core, as a bit
    llc: int
    package: PackageIndex
    kind: CoreKind | None
    rank: Rank


class Grouping(NamedTuple):
    """The choice of siblings: the lowest `threads` free CPUs of a core of these kinds."""

    threads: int
    kinds: frozenset[CoreKind | None]
    # free CPUs of any core, and several groups per core, in turns; else one group of each free
    # whole core with enough CPUs
    counts_pus: bool

    def of_core(self, core: CoreShape) -> int:
        """Return the groups that such a core gives."""
        if core.kind not in self.kinds or not (self.counts_pus or core.is_whole):
            return 0
        count = core.pus // self.threads
        return count if self.counts_pus else min(count, 1)

    def groups(self, cores: Iterable[FreeCore]) -> Iterator[SiblingGroup]:
        """Yield the groups of these cores, in their order."""
        for free, shape in cores:
            first = free & -free
            for number in range(self.of_core(shape)):
                pus = sum([1 << pu for pu in list_members(free)[: self.threads]])
                free &= ~pus
                rank = _rank(shape, number)
                yield SiblingGroup(pus, first, shape.llc, shape.package, shape.kind, rank)


class Tier(NamedTuple):
    """Groups of one kind on a node."""

    rank: Rank  # order of use
    total: int
    llcs: tuple[tuple[int, int, int], ...]  # (LLC, groups, bytes of the LLC), ascending


class AllocationCost(NamedTuple):
    """The unisolated groups, and the LLCs and packages in use, for a number of groups."""

    unisolated: int
    llcs: int
    packages: int
    per_llc: int  # equal groups on each of these LLCs; 0 if not equal


class Part(NamedTuple):
    """The tiers of a node, or of one package's part of a node that spans packages."""

    package: PackageIndex | None
    total: int
    tiers: tuple[Tier, ...]

    def draw(self, count: int) -> dict[tuple[Rank, int], int]:
        """Return the groups of each tier's LLCs for `count` groups, by this module's rule."""
        drawn_counts: dict[tuple[Rank, int], int] = {}
        used: dict[int, int] = {}
        missing = count
        for tier in self.tiers:
            if missing >= tier.total:
                for llc, groups, _ in tier.llcs:
                    used[llc] = used.get(llc, 0) + groups
                    drawn_counts[tier.rank, llc] = groups
                missing -= tier.total
                continue
            new_llcs = [row for row in tier.llcs if row[0] not in used]
            own_llcs = [row for row in tier.llcs if row[0] in used]
            tightest = _find_largest(new_llcs, missing - sum(groups for _, groups, _ in own_llcs))
            per_llc = _count_per_llc(count, len(used) + len(tightest), used, tier)
            if per_llc:
                wide = sorted((-size, groups, llc) for llc, groups, size in new_llcs)
                wide = [row for row in wide if row[1] >= per_llc]
                for llc, _, _ in own_llcs:
                    drawn_counts[tier.rank, llc] = per_llc - used[llc]
                for _, _, llc in wide[: len(tightest)]:
                    drawn_counts[tier.rank, llc] = per_llc
                break
            if tier.rank[0] >= _SECOND:
                parts = split_evenly([GroupRange(0, groups) for _, groups, _ in tier.llcs], missing)
                for (llc, _, _), groups in zip(tier.llcs, parts, strict=True):
                    drawn_counts[tier.rank, llc] = groups
                break
            for llc, groups, _ in (*own_llcs, *(new_llcs[i] for i in tightest)):
                drawn_counts[tier.rank, llc] = min(missing, groups)
                missing -= min(missing, groups)
            break
        return drawn_counts

    def cost(self, count: int, hosts_isolation: bool) -> AllocationCost:
        """Return the cost of draw()."""
        of_llc, unisolated = Counter[int](), 0
        for (rank, llc), groups in self.draw(count).items():
            of_llc[llc] += groups
            unisolated += groups if rank[2] and hosts_isolation else 0
        sizes = [groups for groups in of_llc.values() if groups]
        per_llc = sizes[0] if len(set(sizes)) == 1 else 0
        return AllocationCost(unisolated, len(sizes), 1, per_llc)


def _count_per_llc(count: int, llcs: int, used: Mapping[int, int], tier: Tier) -> int:
    """Return the groups per LLC if they can be equal on this many LLCs, else 0. used: groups of
    earlier tiers on each LLC; tier: source of the other groups."""
    per_llc, remainder = divmod(count, llcs) if llcs else (0, 0)
    if remainder:
        return 0
    more = {llc: groups for llc, groups, _ in tier.llcs}
    if any(not groups <= per_llc <= groups + more.get(llc, 0) for llc, groups in used.items()):
        return 0
    wide = sum(groups >= per_llc for llc, groups in more.items() if llc not in used)
    return per_llc if len(used) + wide >= llcs else 0


class Supply(Struct, frozen=True):
    """The sibling groups of one node."""

    cores: NodeCores
    grouping: Grouping
    parts: tuple[Part, ...]  # one per package that the node spans
    node_part: Part
    groups: int  # total
    whole_cores: int  # free whole cores, for --balance

    def shape(self) -> tuple[object, ...]:
        """Return a key, equal for nodes whose groups cost the same."""
        if len(self.parts) > 1:
            return (self.cores.position,)
        tiers = self.node_part.tiers
        llcs = sorted({llc for tier in tiers for llc, *_ in tier.llcs})
        number = {llc: i for i, llc in enumerate(llcs)}
        return tuple(
            [(tier.rank, *[(number[llc], *row) for llc, *row in tier.llcs]) for tier in tiers]
        )

    def allocate(self, count: int) -> tuple[SiblingGroup, ...]:
        """`count` groups, by LLC and CPU; LLCs with more first, so a partly filled one is last."""
        part = self._find_part(count)
        to_draw = part.draw(count)
        of_llc = Counter[int]()
        for (_, llc), groups in to_draw.items():
            of_llc[llc] += groups
        chosen_cores = []
        for group in self.grouping.groups(self.cores.cores):
            key = (group.rank, group.llc)
            if part.package in (None, group.package) and to_draw.get(key):
                to_draw[key] -= 1
                chosen_cores.append(group)

        def place(group: SiblingGroup) -> tuple[bool, int, int, int, int]:
            weak = group.kind is CoreKind.EFFICIENCY
            return weak, -of_llc[group.llc], group.llc, group.core, group.pus & -group.pus

        return tuple(sorted(chosen_cores, key=place))

    def cost(self, count: int, hosts_isolation: bool) -> AllocationCost:
        part = self._find_part(count)
        cost = part.cost(count, hosts_isolation)
        if part is self.node_part and len(self.parts) > 1:
            packages = len({group.package for group in self.allocate(count)})
            return cost._replace(packages=packages)
        return cost

    def _find_part(self, count: int) -> Part:
        """Return the tightest package's part that holds all groups; else the whole node."""
        if len(self.parts) == 1:
            return self.parts[0]
        fitting = [part for part in self.parts if part.total >= count]
        if not fitting:
            return self.node_part

        def tightness(part: Part) -> tuple[int, int, bool, int]:
            cost = part.cost(count, True)
            return cost.unisolated, cost.llcs, not cost.per_llc, part.total

        return min(fitting, key=tightness)


def build_supply(cores: NodeCores, grouping: Grouping) -> Supply:
    counts = [
        (shape, count, groups_each)
        for shape, count in cores.shapes
        if (groups_each := grouping.of_core(shape))
    ]
    node_part = _make_part(None, counts)
    parts: tuple[Part, ...] = (node_part,)
    packages = {shape.package for shape, *_ in counts}
    if len(packages) > 1:
        parts = tuple(
            _make_part(package, [row for row in counts if row[0].package == package])
            for package in sorted(packages)
        )
    whole_cores = sum(
        [count for shape, count in cores.shapes if shape.is_whole and shape.kind in grouping.kinds]
    )
    return Supply(cores, grouping, parts, node_part, node_part.total, whole_cores)


_SECOND = 2
"""The turn for the second group of a whole core."""


def _rank(core: CoreShape, number: int) -> Rank:
    """Return the order of use of a core's n-th group, from 0."""
    is_weak = core.kind is CoreKind.EFFICIENCY
    return 2 * number + (not core.is_whole), is_weak, not core.isolated


def _make_part(package: PackageIndex | None, counts: Iterable[tuple[CoreShape, int, int]]) -> Part:
    """Make a part. counts: shape of cores, number of cores, groups of each."""
    tiers: dict[Rank, dict[int, int]] = {}
    sizes: dict[int, int] = {}
    for shape, count, groups_each in counts:
        sizes[shape.llc] = shape.llc_bytes
        for number in range(groups_each):
            tier = tiers.setdefault(_rank(shape, number), {})
            tier[shape.llc] = tier.get(shape.llc, 0) + count
    tier_list = [
        Tier(
            rank,
            sum(tiers[rank].values()),
            tuple([(llc, groups, sizes[llc]) for llc, groups in sorted(tiers[rank].items())]),
        )
        for rank in sorted(tiers)
    ]
    return Part(package, sum([tier.total for tier in tier_list]), tuple(tier_list))


def _find_largest(llcs: Sequence[tuple[int, int, int]], count: int) -> tuple[int, ...]:
    """The positions of the fewest LLCs of a tier that together hold `count`, the largest first."""
    positions = fewest_groups([groups for _, groups, _ in llcs], count)
    for size in sorted({llc_bytes for *_, llc_bytes in llcs}, reverse=True)[:-1]:
        large = [i for i, (*_, llc_bytes) in enumerate(llcs) if llc_bytes >= size]
        some = fewest_groups([llcs[i][1] for i in large], count)
        if some and len(some) == len(positions):
            return tuple(large[i] for i in some)
    return positions


def fewest_groups(counts: Sequence[int], total: int) -> tuple[int, ...]:
    """Return the positions of the fewest groups that together hold `total`, ascending.

    Ties go to the tightest fit, so that whole groups stay free, then to the lowest positions. () if
    all together hold too little, or total is 0. Polynomial: sums are bits of one integer per number
    of groups.

    >>> fewest_groups([8, 8, 8], 16), fewest_groups([8, 4, 8], 4), fewest_groups([8, 4, 8], 12)
    ((0, 1), (1,), (0, 1))
    """
    if total <= 0 or sum(counts) < total:
        return ()
    number, owned = 0, 0
    for count in sorted(counts, reverse=True):
        number, owned = number + 1, owned + count
        if owned >= total:
            break
    if len(set(counts)) == 1:
        return tuple(range(number))
    # sums[i][c]: bit s is set if c of the groups i.. can hold exactly s.
    sums = [[0] * (number + 1) for _ in range(len(counts) + 1)]
    sums[-1][0] = 1
    for i in range(len(counts) - 1, -1, -1):
        sums[i][0] = 1
        for c in range(1, number + 1):
            sums[i][c] = sums[i + 1][c] | sums[i + 1][c - 1] << counts[i]
    enough = sums[0][number] >> total
    target = total + (enough & -enough).bit_length() - 1
    chosen_groups: list[int] = []
    for i, count in enumerate(counts):
        missing = number - len(chosen_groups)
        if missing and target >= count and sums[i + 1][missing - 1] >> (target - count) & 1:
            chosen_groups.append(i)
            target -= count
    return tuple(chosen_groups)


class GroupRange(NamedTuple):
    """Minimum and maximum groups on a node, and the step."""

    lowest: int
    highest: int
    step: int = 1


def fill_level(least: Sequence[int], limits: Sequence[int], total: int, step: int = 1) -> int:
    """Return the highest level, in steps, to which all nodes can be filled within their ranges
    without exceeding the total.

    >>> fill_level((0, 0, 4), (8, 1, 8), 8)
    3
    """

    def total_at(level: int) -> int:
        return sum([min(max(low, level), high) for low, high in zip(least, limits, strict=True)])

    levels = range(0, max(limits, default=0) + 1, step)
    return levels[bisect_right(levels, total, key=total_at) - 1]


def split_evenly(ranges: Sequence[GroupRange], total: int) -> tuple[int, ...]:
    """Return the most even split: all filled to one level as far as they go, extras on the first.

    >>> split_evenly([GroupRange(0, 8), GroupRange(0, 1), GroupRange(0, 8)], 8)
    (4, 1, 3)
    """
    least, limits = [bounds.lowest for bounds in ranges], [bounds.highest for bounds in ranges]
    if sum(least) == total:
        return tuple(least)
    step = ranges[0].step
    level = fill_level(least, limits, total, step)
    split = [min(max(low, level), high) for low, high in zip(least, limits, strict=True)]
    surplus = total - sum(split)
    for i, high in enumerate(limits):
        if surplus and split[i] == level and level < high:
            split[i] += step
            surplus -= step
    return tuple(split)
