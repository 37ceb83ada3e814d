"""The planner's rules, applied by trying every set of nodes and every split. For tiny hosts only.

Written from the documented rules and sharing no code with the planner but the order of terms.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.pci import DeviceKind
from homenode.plan.layout import GuestCells, MemoryBinding, Pinning
from homenode.plan.request import Balance, GuestRequest, Policy
from homenode.plan.search.cost import ORDER
from homenode.topology import Host
from homenode.units import MIB


@dataclass(frozen=True)
class Best:
    """key: values of the terms in the policy's order; terms by name."""

    key: tuple[object, ...]
    terms: dict[str, object]
    threads: int
    memory_follows: bool


@dataclass(frozen=True)
class _Core:
    """A sibling group: the PUs of it do not matter here."""

    llc: object
    isolated: bool


def best_by_force(host: Host, request: GuestRequest) -> Best | None:
    """The best placement of the first step of the ladder that has one, or None."""
    all_pus = request.layout.pinning is Pinning.ALL_PUS
    widest = max((len(core.pus & _free(host, request)) for core in host.cores), default=1)
    for threads in range(max(1, widest) if all_pus else 1, 0, -1):
        if all_pus and request.keep_vcpus and request.vcpus % threads:
            continue
        groups = request.vcpus // threads if all_pus and request.keep_vcpus else request.vcpus
        bound = request.layout.memory is MemoryBinding.BOUND_PER_CELL
        for follows in (True,) if bound else (True, False):
            found = _best(host, request, threads, groups, follows)
            if found is not None:
                return found
    return None


def _free(host: Host, request: GuestRequest) -> CpuSet:
    """PUs that are online, allowed, not reserved, and on no core that another VM touches."""
    pus = {pu.index for pu in host.pus if pu.online and pu.allowed}
    pus -= set(request.reserved_pus)
    online = {pu for core in host.cores for pu in core.pus}
    for domain in host.domains:
        if not (domain.running or request.reserve_defined):
            continue
        for pin in (*domain.vcpu_pins, domain.emulator_pus, *domain.iothread_pus):
            if pin is None or online <= set(pin):
                continue
            for core in host.cores:
                if set(core.pus) & set(pin):
                    pus -= set(core.pus)
    return CpuSet(pus)


def _best(
    host: Host, request: GuestRequest, threads: int, groups: int, follows: bool
) -> Best | None:
    free = _free(host, request)
    apart = {pu.index for pu in host.pus if pu.isolated or pu.nohz_full}
    llc_of = {int(pu.index): pu.llc for pu in host.pus}
    all_pus = request.layout.pinning is Pinning.ALL_PUS
    counts_pus = all_pus and request.policy in (Policy.MEMORY_FIRST, Policy.ANY)
    have: dict[int, list[_Core]] = {}
    whole: dict[int, int] = {}
    for position, node in enumerate(host.nodes):
        if not node.pus:
            continue
        have[position], whole[position] = [], 0
        for core in host.cores:
            if not core.pus <= node.pus:
                continue
            usable = core.pus & free
            whole[position] += usable == core.pus
            group = _Core(llc_of[core.pus.first() or 0], bool(usable) and set(usable) <= apart)
            if counts_pus:
                have[position] += [group] * (len(usable) // threads)
            elif usable == core.pus and len(usable) >= threads:
                have[position].append(group)
    granule = request.page_bytes or MIB
    pages = -(-request.memory_bytes // granule)
    pools: dict[int, int] = {}
    room: dict[int, int | None] = {}
    for position in have:
        node = host.nodes[position]
        size = node.memory_free_bytes
        if size is None and node.memory_bytes is not None:
            size = node.memory_bytes - sum(p.page_bytes * p.total_pages for p in node.page_pools)
        pools[position] = sum(
            p.free_pages for p in node.page_pools if p.page_bytes == request.page_bytes
        )
        room[position] = None if size is None else max(0, size) // granule + pools[position]
    pulls, others = _devices(host, request)
    mirrored = request.layout.cells is GuestCells.MIRRORED
    equal = mirrored and not request.unequal_cells
    best: Best | None = None
    limit = request.max_nodes or len(have)
    for count in range(1, min(limit, len(have)) + 1):
        for nodes in combinations(sorted(have), count):
            if any(_far(host, a, b) == 255 for a, b in combinations(nodes, 2)) and (
                request.policy is not Policy.ANY
            ):
                continue
            for split in _splits(groups, [len(have[node]) for node in nodes], equal):
                shares = {
                    node: -(-pages * n // groups) for node, n in zip(nodes, split, strict=True)
                }
                if follows and any(
                    (limit_ := room[node]) is not None and share > limit_
                    for node, share in shares.items()
                ):
                    continue
                sign = 1 if request.balance is Balance.PACK else -1
                drawn = [
                    _draw(have[node], n, bool(apart)) for node, n in zip(nodes, split, strict=True)
                ]
                short = [
                    max(0, share - pools[node])
                    for node, share in shares.items()
                    if request.page_bytes is not None and follows
                ]
                free_bytes = [(room[node] or 0) * granule for node in nodes]
                terms: dict[str, object] = {
                    "device_class": max(
                        (min(_class(host, d, n) for n in nodes) for d in pulls), default=0
                    ),
                    "nodes_spanned": count,
                    "minus_nodes_spanned": -count,
                    "node_distance": max(
                        (_far(host, a, b) for a, b in combinations(nodes, 2)), default=10
                    ),
                    "packages_spanned": len({_package(host, node) for node in nodes}),
                    "device_distance": max(
                        (min(_far(host, d, n) for n in nodes) for d in pulls), default=0
                    ),
                    "other_device_distance": max(
                        (min(_far(host, d, n) for n in nodes) for d in others), default=0
                    ),
                    "unevenness": sum(n * n for n in split),
                    "unisolated_cores": sum(d[0] for d in drawn),
                    "llcs_spanned": sum(d[1] for d in drawn),
                    "pages_to_reserve": sum(short),
                    "balance_cores": sign * sum(whole[node] for node in nodes),
                    "balance_memory": sign * sum(free_bytes),
                    "nodes": tuple(host.nodes[node].index for node in nodes),
                    "split": tuple(-n for n in split),
                }
                names = [
                    "minus_nodes_spanned"
                    if name == "nodes_spanned" and request.policy is Policy.SPREAD
                    else name
                    for name in ORDER[request.policy]
                ]
                key = tuple(terms[name] for name in names)
                if best is None or key < best.key:
                    best = Best(key, terms, threads, follows)
    return best


def _splits(groups: int, most: list[int], equal: bool) -> Iterator[tuple[int, ...]]:
    """Every way to put the groups on nodes that hold so many, at least one on each."""
    if not most:
        if groups == 0:
            yield ()
        return
    each, over = divmod(groups, len(most))
    if equal and over:
        return
    first = range(each, each + 1) if equal else range(1, most[0] + 1)
    for number in first:
        if 1 <= number <= min(most[0], groups):
            for rest in _splits(groups - number, most[1:], equal):
                yield (number, *rest)


def _draw(cores: list[_Core], number: int, hosts_isolation: bool) -> tuple[int, int]:
    """(groups that are not isolated, LLCs): isolated groups first, then as few LLCs as can be."""
    apart = min(number, sum(core.isolated for core in cores))
    return min(
        (
            (number - apart) if hosts_isolation else 0,
            len({core.llc for core in chosen}),
        )
        for chosen in combinations(cores, number)
        if sum(core.isolated for core in chosen) == apart
    )


def _far(host: Host, a: int, b: int) -> int:
    if host.distances is None:
        return 10 if a == b else 20
    return max(host.distances[a][b], host.distances[b][a])


def _package(host: Host, node: int) -> object:
    package = host.nodes[node].package
    return ("node", node) if package is None else package


def _class(host: Host, device: int, node: int) -> int:
    home, there = _package(host, device), _package(host, node)
    if home == there:
        return 10
    return min(
        _far(host, a, b)
        for a in range(len(host.nodes))
        for b in range(len(host.nodes))
        if _package(host, a) == home and _package(host, b) == there
    )


def _devices(host: Host, request: GuestRequest) -> tuple[set[int], set[int]]:
    """Positions of the nodes of devices that pull, and of those that only break ties."""
    position = {node.index: i for i, node in enumerate(host.nodes)}
    wanted = [d for d in host.pci_devices if d.bdf in set(request.devices)]
    gpus = [d for d in wanted if d.kind is DeviceKind.GPU]

    def pulls(bdf: Bdf) -> bool:
        device = next(d for d in wanted if d.bdf == bdf)
        if device.kind is DeviceKind.GPU:
            return True
        return device.kind is DeviceKind.NIC and any(
            gpu.root_complex == device.root_complex
            or (
                host.switch_above(gpu.bdf) is not None
                and host.switch_above(gpu.bdf) == host.switch_above(bdf)
            )
            for gpu in gpus
        )

    strong = {position[d.node] for d in wanted if d.node in position and pulls(d.bdf)}
    weak = {position[d.node] for d in wanted if d.node in position and not pulls(d.bdf)}
    return strong, weak
