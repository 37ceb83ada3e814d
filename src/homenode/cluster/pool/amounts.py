"""Amounts: what the nodes of a machine have of GPUs, cores and memory, and what VMs take there."""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import accumulate

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cluster.pool.flavour import Flavour
from homenode.cluster.pool.planner import POOL_TERM, FillStep, Planner, names_parts
from homenode.cluster.pool.state import MEMORY_STEP_BYTES, HostState
from homenode.cpuset import CpuSet
from homenode.indices import NodeIndex
from homenode.machine.topology import LOCAL_DISTANCE, Host, NumaNode
from homenode.plan.devices.brought import link_groups
from homenode.plan.memory import overhead_bytes
from homenode.plan.request import GuestRequest
from homenode.plan.search.cost import order
from homenode.plan.search.ladder import Concession
from homenode.plan.shape.guest_topology import may_share_sockets
from homenode.vm.layout import GuestCells, GuestPcie, MemoryBinding, Pinning, Siblings
from homenode.vm.plan_options import Balance, DeviceLocality, MemoryMode, Policy

_MOST_DIVIDED = 16
"""Up to so many free GPUs on a part of a host, every division among the flavours is tried."""

_MOST_REACHED = 2000
"""Amounts left that are looked at for a part."""

UNREACHED = 1 << 62
"""More than a pool can lose: the host has no placement that costs as little as the bound."""


class Amount(Struct, frozen=True, kw_only=True):
    """GPUs, whole cores and bytes: what is free, or what a VM needs."""

    gpus: int
    cores: int
    memory_bytes: int

    def holds(self, needs: "Amount") -> int:
        """How many VMs with these needs fit in it."""
        most = UNREACHED
        if needs.gpus:
            most = self.gpus // needs.gpus
        if needs.cores:
            most = min(most, self.cores // needs.cores)
        if needs.memory_bytes:
            most = min(most, self.memory_bytes // needs.memory_bytes)
        return max(0, most)

    def without(self, other: "Amount", count: int = 1) -> "Amount":
        return Amount(
            gpus=self.gpus - count * other.gpus,
            cores=self.cores - count * other.cores,
            memory_bytes=self.memory_bytes - count * other.memory_bytes,
        )


class NodeAmounts(Struct, frozen=True, kw_only=True):
    """The nodes of a shape. position: of each node in the list of nodes. packages: the package of
    each node, by position. classes: (position of the node, number of cores) of each class of cores.
    gpus: position of each GPU's node. widest: most PUs of a core. are_alike: a VM may have any of
    the cores, and all have as many PUs. share: cores of a node for each of its GPUs, where fewest.
    has_links: some GPUs are joined by NVLink or xGMI.
    """

    position: dict[NodeIndex, int]
    packages: tuple[int, ...]
    classes: tuple[tuple[int, int], ...]
    gpus: dict[Bdf, int]
    widest: int
    are_alike: bool
    share: int
    has_links: bool


class VmOnEmpty(Struct, frozen=True, kw_only=True):
    """A VM on the empty host. own: its cost, if that is certainly the least. needs: the least that
    it allocates there without a fallback. one_package: whether it is on one package
    with every GPU on a chosen node; None if full locality does not require that. takes: what a VM
    with full locality takes of each node, by position, with what QEMU needs; None if unknown.
    each: on all nodes, what it takes at least of each, or its own cost is greater; None if unknown.
    is_nearest: with less than full locality its own cost is greater. threads: cores for its
    emulator and IOThreads. is_plain: it is on one node."""

    own: tuple[object, ...] | None
    needs: Amount
    one_package: bool | None
    takes: dict[int, Amount] | None
    each: Amount | None
    is_nearest: bool
    threads: int
    is_plain: bool


class MostFits(Struct, frozen=True, kw_only=True):
    """How many VMs with full locality a host takes at most. parts: what is free on each package, or
    on the whole host. most: VMs that each part takes. part_of: the part of each node."""

    needs: Amount
    parts: tuple[Amount, ...]
    most: tuple[int, ...]
    part_of: tuple[int, ...]

    def after(self, node: int | None, taken: Amount, each: Amount | None = None) -> int:
        """The most VMs that still fit once so much is allocated: of a node, or of any. each: of all
        nodes at least."""
        if node is None:
            whole = sums_of_parts(self.parts, (0,) * len(self.parts))[0].without(taken)
            most = sum(self.most)
            if each is not None:
                own = zip(self.parts, map(self.part_of.count, range(len(self.parts))), strict=True)
                most = sum(part.without(each, nodes).holds(self.needs) for part, nodes in own)
            return min(most, whole.holds(self.needs))
        part = self.part_of[node]
        left = self.parts[part].without(taken).holds(self.needs)
        return sum(self.most) - self.most[part] + left


def sums_of_parts(free: Sequence[Amount], part_of: Sequence[int]) -> tuple[Amount, ...]:
    """The sums of what is free on the nodes of each part."""
    parts = []
    for number in range(max(part_of) + 1):
        own = [one for one, part in zip(free, part_of, strict=True) if part == number]
        gpus, cores = sum([one.gpus for one in own]), sum([one.cores for one in own])
        parts.append(
            Amount(gpus=gpus, cores=cores, memory_bytes=sum([one.memory_bytes for one in own]))
        )
    return tuple(parts)


def fewest(parts: Sequence[Amount], needs: Amount) -> int:
    """How many of the parts have as much of each, at least."""
    found = 1
    for name in ("gpus", "cores", "memory_bytes"):
        free = accumulate(sorted([getattr(one, name) for one in parts], reverse=True))
        found = max(found, 1 + sum(own < getattr(needs, name) for own in free))
    return min(found, len(parts))


def most_gpus_used(part: Amount, needs: Sequence[Amount]) -> int:
    """The most GPUs that VMs with these needs can have of a part."""
    if part.gpus > _MOST_DIVIDED:
        return part.gpus
    reached = {part}
    least = part.gpus
    for need in set(needs):
        for left in list(reached):
            for _ in range(left.holds(need)):
                left = left.without(need)
                reached.add(left)
                least = min(least, left.gpus)
        if not least or len(reached) > _MOST_REACHED:
            return part.gpus
    return part.gpus - least


def node_amounts(
    host: Host, classes: Sequence[tuple[CpuSet, int]], gpus: Collection[Bdf]
) -> NodeAmounts | None:
    """classes: of each class of cores the first core, and how many there are."""
    position = {node.index: i for i, node in enumerate(host.nodes)}
    package_of_core = {core.pus: core.id.package for core in host.cores}
    packages: dict[int, object] = {}
    found = []
    for core, number in classes:
        places = {
            None if (node := host.pu_at[pu].node) is None else position.get(node) for pu in core
        }
        place = places.pop()
        if places or place is None:
            return None
        package = packages.setdefault(place, package_of_core[core])
        if package != package_of_core[core] and len(position) > 1:
            return None
        found.append((place, number))
    homes = {}
    for gpu in gpus:
        device = host.device(gpu)
        home = None if device is None or device.node is None else position.get(device.node)
        if home is None or home not in packages:
            return None
        homes[gpu] = home
    numbers = {package: i for i, package in enumerate(dict.fromkeys(packages.values()))}
    # A node without cores is of no package: what it has counts apart.
    of_nodes = [
        numbers[packages[i]] if i in packages else len(numbers) + i for i in range(len(position))
    ]
    widest = max(len(core.pus) for core in host.cores)
    kinds = {
        (core.kind, tuple((pu.online, pu.allowed, pu.isolated, pu.nohz_full) for pu in own))
        for core in host.cores
        for own in [[host.pu_at[pu] for pu in core.pus]]
    }
    return NodeAmounts(
        position=position,
        packages=tuple(of_nodes),
        classes=tuple(found),
        gpus=homes,
        widest=widest,
        are_alike=len(kinds) == 1,
        share=min(
            (
                sum(number for at, number in found if at == home) // own
                for home, own in Counter(homes.values()).items()
            ),
            default=0,
        ),
        has_links=not link_groups(host).keys().isdisjoint(homes),
    )


def taken_of_nodes(
    nodes: NodeAmounts,
    own: Sequence[NodeIndex],
    busy: Sequence[int],
    devices: Sequence[Bdf],
    memory_bytes: int,
) -> dict[int, Amount] | None:
    """What a VM takes of each of its nodes, by position; None where some give more cores. busy: of
    each class of cores."""
    cores, gpus = cores_of_nodes(nodes, busy), [0] * len(nodes.packages)
    for gpu in devices:
        if gpu in nodes.gpus:
            gpus[nodes.gpus[gpu]] += 1
    memory = -(-memory_bytes // len(own)) + MEMORY_STEP_BYTES
    at = [nodes.position[node] for node in own]
    if len({cores[one] for one in at}) > 1:
        return None
    return {one: Amount(gpus=gpus[one], cores=cores[one], memory_bytes=memory) for one in at}


def cores_of_nodes(nodes: NodeAmounts, busy: Sequence[int]) -> list[int]:
    """Of each class of cores so many, by the position of their node."""
    cores = [0] * len(nodes.packages)
    for (node, _), number in zip(nodes.classes, busy, strict=True):
        cores[node] += number
    return cores


def least_of_each(
    nodes: NodeAmounts, number: int, busy: Sequence[int], memory_bytes: int
) -> Amount | None:
    """What a VM on so many nodes takes at least of each, however its uneven parts lie; None where
    it is not on all, or where other parts cost as much. busy: as for taken_of_nodes."""
    cores = cores_of_nodes(nodes, busy)
    if not 1 < number == len(cores) or (number > 2 and len(set(cores)) > 1):
        return None
    memory = memory_bytes * min(cores) // sum(cores) - MEMORY_STEP_BYTES
    return Amount(gpus=0, cores=min(cores), memory_bytes=max(0, memory))


def has_equal_parts(usable: Sequence[Amount], needs: Amount, rounding: int) -> bool:
    """Whether some nodes could hold a VM in parts of equal cores and memory. rounding: bytes that
    the parts may lack together."""
    memory = needs.memory_bytes - rounding
    for number in range(1, len(usable) + 1):
        able = [
            own.gpus
            for own in usable
            if own.cores * number >= needs.cores and own.memory_bytes * number >= memory
        ]
        if len(able) >= number and sum(sorted(able)[-number:]) >= needs.gpus:
            return True
    return False


def has_memory(left: Sequence[tuple[int, int]], found: int, whole: int, cores: int) -> bool:
    """Whether one more VM finds its memory wherever so many before it have theirs. left: cores and
    bytes of each node with cores. whole, cores: what a VM needs."""
    every = sum(own for _, own in left)
    if every < (found + 1) * whole:
        return False
    if found == 1 and len(left) == 2 and all(own >= whole for _, own in left):
        # The memory of the first one follows its cores; a node that it empties of cores is lost.
        return all(
            other - whole * (cores - free) // cores >= whole
            for (free, _), (_, other) in (left, left[::-1])
            if free <= cores
        )
    return not found or all(own >= (found + 1) * whole for _, own in left)


def sized(node: NumaNode, size: int | None) -> NumaNode:
    """The node as if it had so much memory."""
    return node if node.memory_bytes == size else replace(node, memory_bytes=size)


class VmOnOneNode(Struct, frozen=True, kw_only=True):
    """A VM on one node of a kind of machine, where nothing gives way, before any is planned. own:
    what its own cost is at least. at: the place of the nodes in it. needs: what it takes at least.
    pages: huge pages. packs: the node with the least free is the best."""

    own: tuple[int, ...]
    at: int
    needs: Amount
    pages: int
    packs: bool


def vm_on_one_node(
    planner: Planner, nodes: NodeAmounts, state: HostState, flavour: Flavour
) -> VmOnOneNode | None:
    """None where it is not known."""
    request = planner.request(state, flavour)
    if request is None or request.options.policy is not Policy.CORES_FIRST:
        return None
    options, layout = request.options, request.layout
    if (
        names_parts(request)
        or options.device_locality is DeviceLocality.IGNORE
        or layout.pinning is Pinning.NONE
        or options.gpu_profile is not None
    ):
        return None
    first, rest = order(
        options.policy,
        shows_pcie=layout.pcie is GuestPcie.MIRRORED,
        even_splits=not options.unequal_cells,
    )
    by_core = layout.pinning is Pinning.ONE_PER_CORE or not request.keep_vcpus
    by_core = by_core and layout.pinning is not Pinning.NODE
    groups = request.vcpus if by_core else -(-request.vcpus // nodes.widest)
    counts_sockets = layout.cells is GuestCells.MIRRORED and not may_share_sockets(
        planner.pool.shapes[state.shape], request
    )
    least = {
        "device_class": LOCAL_DISTANCE if flavour.gpus else 0,
        "packages_spanned": 1,
        "nodes_spanned": 1,
        "node_distance": LOCAL_DISTANCE,
        "guest_sockets": int(counts_sockets),
        "unevenness": groups * groups,
        "device_distance": LOCAL_DISTANCE * groups * flavour.gpus,
        "gpu_link_groups": int(nodes.has_links and flavour.gpus > 0),
    }
    terms = [least.get(name, 0) for name in (*first, *rest[: rest.index(POOL_TERM)])]
    at = first.index("nodes_spanned")
    return VmOnOneNode(
        own=(0, *terms[:at], 0, 1, 0, *terms[at + 1 :]),
        at=at + 2,
        needs=Amount(
            gpus=flavour.gpus,
            cores=groups,
            memory_bytes=request.memory_bytes if is_bound(request) else 0,
        ),
        pages=request.memory_bytes // request.page_bytes if request.page_bytes else 0,
        packs=options.balance is Balance.PACK or (options.balance is None and flavour.gpus > 0),
    )


def is_bound(request: GuestRequest) -> bool:
    """Whether its memory is ordinary memory of its nodes alone."""
    return (
        request.layout.memory is not MemoryBinding.AS_IT_WAS
        and request.page_bytes is None
        and request.options.memory_mode is MemoryMode.STRICT
        and not request.options.memory_nodes_allowed
    )


_NEAREST = ["device_class", "packages_spanned", "gpus_away_from_home"]
"""The first terms of a cost that is greater wherever the VM has less than full locality."""


def vm_on_empty(
    planner: Planner, nodes: NodeAmounts | None, state: HostState, flavour: Flavour, step: FillStep
) -> VmOnEmpty:
    """What is known of a flavour from the step on the empty host, whose state this is."""
    request = planner.request(state, flavour)
    assert request is not None, "a VM was placed"
    is_local = not step.given and step.nearness[0] <= LOCAL_DISTANCE and not step.nearness[2]
    is_near = is_local and step.nearness[1] == 1
    on_one = is_near and len(step.placement.nodes) == 1
    own, _ = step.terms
    names = [term.name for term in step.placement.cost]
    is_nearest = names[: len(_NEAREST)] == _NEAREST
    # On an empty board only partitions are chosen from; later, if none is free, any GPUs. A GPU
    # of no known node may be nearer than those that the empty host offers.
    # Unequal cells are taken only where no equal ones are on as few nodes and as near.
    known = {Concession.UNEQUAL_CELLS} if is_nearest else set()
    is_least = known.issuperset(step.given) and step.placement.optimal
    if is_least and 0 < flavour.gpus < len(planner.gpus(state.shape)) and not on_one:
        options = replace(flavour.options, without_nvlink=True)
        of_any = planner.step(state, replace(flavour, options=options))
        is_least = of_any is not None and of_any.terms[0] == own
    is_anywhere = request.options.device_locality is DeviceLocality.IGNORE
    has_bound = is_bound(request)
    busy = [own for own, _ in step.after.cores]
    cores = sum(busy)
    layout = request.layout
    has_whole_cores = layout.pinning is Pinning.ONE_PER_CORE and layout.siblings is Siblings.HIDDEN
    if nodes is not None and not has_whole_cores:
        cores = min(cores, -(-request.vcpus // nodes.widest))
    needs = Amount(
        gpus=flavour.gpus if flavour.options.gpu_profile is None else 0,
        cores=cores,
        memory_bytes=request.memory_bytes if has_bound else 0,
    )
    return VmOnEmpty(
        own=tuple(own) if is_least and nodes is not None else None,
        needs=needs,
        takes=taken_of_nodes(
            nodes,
            step.placement.nodes,
            busy,
            step.placement.devices,
            request.memory_bytes + overhead_bytes(request),
        )
        if is_local
        and has_bound
        and has_whole_cores
        and nodes is not None
        and nodes.are_alike
        and not is_anywhere
        and flavour.options.gpu_profile is None
        and not names_parts(request)
        else None,
        each=least_of_each(
            nodes,
            len(step.placement.nodes),
            busy,
            request.memory_bytes
            if has_bound and layout.memory is MemoryBinding.BOUND_PER_CELL
            else 0,
        )
        if is_least and has_whole_cores and nodes is not None
        else None,
        is_nearest=is_local and is_nearest,
        threads=sum(service for _, service in step.after.cores),
        is_plain=on_one,
        one_package=is_near
        if is_local and flavour.options.gpu_profile is None and not is_anywhere
        else None,
    )
