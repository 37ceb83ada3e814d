"""The planner's rules, applied by trying every set of nodes, every split and every set of GPUs.

Written from decision 0010, and sharing nothing with the search, not even
the order of terms; only the VM's overhead is asked for where the planner says it. For small hosts.

Where the record leaves a choice, this is how it is read here:

* Each fallback is one value of each concession; the relaxations nest in the order of the record, so
  that the memory next to its vCPUs gives way first and the host's memory last.
* Memory next to its vCPUs gives way in two steps where it is not bound to cells: the chosen nodes
  hold it together; other nodes help. A node that is to hold some has at least a page.
* Where whole cores give way, the fallbacks of one answer about the host's memory are compared by
  the vCPUs beyond the whole cores of the chosen nodes first, then as above; memory of other nodes
  only where that leaves fewer such vCPUs. Each node gives its whole cores, as far as its memory
  allows, before any node gives more, and of more as much as the others.
* What QEMU needs is a part of what is reserved: a VM that fits without it is on the last fallback.
* Memory of other nodes is a node set, too, which `max_nodes` limits.
* The host's cores are any cores without a CPU that a vCPU is pinned to: reserved and disallowed
  ones count. Where vCPUs may lie on siblings, only the best candidate is asked whether it leaves
  one, and every core gives a group before any gives its second.
* A VM over mixed kinds has two cells on some nodes, and one whose vCPUs leave a sibling idle has
  one cell less there, so that equal parts are no aim.
* Free bytes for the balance are those that the node can give this VM on its fallback.
* A GPU of unknown node is near to nothing: it is chosen only where others do not suffice.
* A NIC is paired with the GPUs on its switch or root complex; those that the VM gets count.
* With `device_locality=ignore` no device is near or far; what GPU sets lose still counts.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass
from enum import Enum
from functools import cached_property, wraps
from itertools import combinations, groupby, product
from typing import ParamSpec, TypeVar, cast

from msgspec import structs

from homenode.bdf import Bdf
from homenode.machine.pci import DeviceKind, DeviceLink, LinkKind, PciDevice
from homenode.machine.topology import Core, CoreKind, Host, NumaNode, RunningDomain
from homenode.plan.memory import compute_overhead
from homenode.plan.request import GuestRequest
from homenode.units import GIB, MIB
from homenode.vm.layout import GuestCells, GuestPcie, MemoryBinding, Pinning, Siblings
from homenode.vm.plan_options import Balance, DefinitionSiblings, DeviceLocality, Policy

_LAST = (
    *"gpu_sets_lost unisolated_cores llcs_spanned pages_to_reserve".split(),
    *"balance_cores balance_memory unevenness nodes split gpus".split(),
)
_NEAR = ("device_class", "packages_spanned")
_HOME = "gpus_away_from_home"
_DISTANCES = ("node_distance", "distance_sum")


def _order(policy: Policy, mirrored: bool) -> tuple[str, ...]:
    """Names of the terms by policy, and by whether the layout shows the guest its PCIe tree.

    The record has those of cores-first; the others put first what their name says, and `any` leaves
    out what is near or far.
    """
    if policy is Policy.ANY:
        return ("nodes_spanned", *_LAST)
    count = "minus_nodes_spanned" if policy is Policy.SPREAD else "nodes_spanned"
    counts_first = policy is not Policy.CORES_FIRST
    first, then = ((count, *_NEAR), ()) if counts_first else (_NEAR, (count,))
    homes = ((_HOME,), ()) if mirrored else ((), (_HOME,))
    return (*first, *homes[0], *then, *_DISTANCES, *homes[1], "device_distance", *_LAST)


def _evenly(order: tuple[str, ...], sockets: bool) -> tuple[str, ...]:
    """The order where vCPUs are shared out evenly: that comes after what the set of nodes decides,
    and before what the devices are next to."""
    order = tuple(name for name in order if name != "unevenness")
    place = next(i for i, name in enumerate(order) if name in ("device_distance", *_LAST))
    few = ("guest_sockets",) if sockets else ()
    return (*order[:place], *few, "unevenness", *order[place:])


_PAIRS = {"H": ((1, 3), (2, 4), (5, 7), (6, 8)), "B": ((1, 2), (3, 4), (5, 6), (7, 8))}


class Cores(Enum):
    """What a sibling group is made of."""

    AS_ASKED = "as the layout asks"
    SHARED = "several vCPUs on some"


class Memory(Enum):
    FOLLOWS = "next to its vCPUs"
    UNEVEN = "on the nodes of the vCPUs"
    ELSEWHERE = "on any nodes"


@dataclass(frozen=True)
class Fallback:
    """What gave way, one field for each concession of the record, the last to give way first."""

    keeps_memory: bool
    cores: Cores
    mixed: bool
    threads: int
    keeps_core: bool
    memory: Memory


_LAST_RESORT = Fallback(False, Cores.SHARED, True, 1, False, Memory.ELSEWHERE)


@dataclass(frozen=True)
class Best:
    """A candidate."""

    fallback: Fallback
    nodes: tuple[int, ...]  # positions
    split: tuple[int, ...]
    devices: tuple[Bdf, ...]
    terms: dict[str, object]
    key: tuple[object, ...]  # values of the terms in the policy's order


@dataclass(frozen=True)
class _Group:
    """One sibling group: the CPUs of it do not matter here."""

    core: int
    llc: object
    isolated: bool
    order: tuple[int, bool, bool, bool]


def best_by_force(host: Host, request: GuestRequest) -> Best | None:
    """The best placement, or None. Of a document that shows siblings: whole cores if they leave the
    host more cores than it keeps, of one kind, else sibling groups as it shows them."""
    if request.document_siblings is not DefinitionSiblings.WHEN_SHORT:
        return _best(host, request)
    plain = structs.replace(request, document_siblings=DefinitionSiblings.IGNORED)
    whole = _best(host, plain)
    if whole is not None:
        spare = len(_Step(host, plain, whole.fallback).cores_without_vcpus) - request.vcpus
        is_one_kind = request.options.mixed_kinds or not whole.fallback.mixed
        is_spare = whole.fallback.keeps_core and spare > request.host_reserve.cores
        if whole.fallback.cores is Cores.AS_ASKED and is_one_kind and is_spare:
            return whole
    pairs = structs.replace(
        plain,
        layout=structs.replace(request.layout, pinning=Pinning.ALL_PUS, siblings=Siblings.EXPOSED),
        keep_vcpus=True,
        most_threads=request.guest.threads_per_core,
    )
    best = _best(host, pairs)
    if best is None or best.fallback.cores is Cores.SHARED or best.fallback.threads == 1:
        return whole
    return best if request.vcpus % best.fallback.threads == 0 else whole


def _best(host: Host, request: GuestRequest) -> Best | None:
    """The best placement of the first fallback that has one, or None.

    Rungs that differ in the host's last core and the memory only are one group: of these the first
    that costs no class of device distance, no package, no GPU its home and no further GPU set.
    Where whole cores give way the kinds of core are no difference, and the fewest vCPUs without one
    come first.
    """
    for _, fallbacks in groupby(_fallbacks(host, request), key=_group):
        bests = [best for fallback in fallbacks if (best := _Step(host, request, fallback).best())]
        if not bests:
            continue
        least = min(best.terms["vcpus_beyond_cores"] for best in bests)  # type: ignore[type-var]
        bests = [best for best in bests if best.terms["vcpus_beyond_cores"] == least]
        if bests[0].fallback.memory is Memory.ELSEWHERE:
            return bests[0]
        own = [best for best in bests if best.fallback.memory is not Memory.ELSEWHERE]
        return min(own, key=lambda best: _before_the_rung(request, best.key, best.terms))
    return None


def _group(fallback: Fallback) -> tuple[object, ...]:
    """What fallbacks have in common of which the best is taken, not the first."""
    shares = fallback.cores is Cores.SHARED
    return astuple(fallback)[: 2 if shares else 4]


def _before_the_rung(
    request: GuestRequest, key: tuple[object, ...], terms: dict[str, object]
) -> tuple[object, ...]:
    """By what the bests of rungs that differ in the host's last core and the memory next to its
    vCPUs are compared: devices, packages, homes; with GPUs the sets that are broken."""
    if not _nearness(request):
        return ()
    names = (*_NEAR, _HOME)[: _nearness(request)]
    return (*(terms[name] for name in names), terms["sets_broken"])


def _nearness(request: GuestRequest) -> int:
    """How many terms come before the host's last core and the memory next to its vCPUs."""
    if request.options.policy is not Policy.CORES_FIRST:
        return 0
    return 3 if request.layout.pcie is GuestPcie.HOST else 2


def _fallbacks(host: Host, request: GuestRequest) -> Iterator[Fallback]:
    layout = request.layout
    pins_all = layout.pinning is Pinning.ALL_PUS
    hybrid = _Step(host, request, _LAST_RESORT).is_hybrid
    widest = max((len(core.pus) for core in host.cores), default=1)
    memory = [Memory.FOLLOWS, Memory.UNEVEN, Memory.ELSEWHERE]
    if layout.memory is MemoryBinding.BOUND_PER_CELL:
        memory.pop()
    counted = pins_all and request.options.policy in (Policy.MEMORY_FIRST, Policy.ANY)
    for keeps_memory, cores, mixed in product((True, False), Cores, (False, True)):
        if (mixed and not hybrid) or (counted and cores is Cores.SHARED):
            continue
        widest = min(widest, request.most_threads or widest)
        every = cores is Cores.AS_ASKED and pins_all and not mixed
        threads = tuple(range(widest, 0, -1)) if every else (1,)
        for number, keeps_core, rule in product(threads, (True, False), memory):
            yield Fallback(keeps_memory, cores, mixed, number, keeps_core, rule)


def _others(host: Host, request: GuestRequest) -> list[RunningDomain]:
    return [
        domain
        for domain in host.domains
        if domain.name not in (request.guest.name, *request.options.replaces)
        and (domain.running or domain.planned or request.options.reserve_defined)
    ]


@dataclass(frozen=True)
class _Homes:
    """Positions of the nodes of a VM's devices, as far as they are known, one for each device."""

    pulling: tuple[int, ...]
    gpus: tuple[int, ...]
    all: tuple[int, ...]
    sets_lost: int | None  # GPU sets that it takes a part of; None for a VM without GPUs


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _remembered(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Keeps what a method of _Step returned, for as long as the step lives."""

    @wraps(method)
    def kept(*args: _P.args, **named: _P.kwargs) -> _R:
        step = cast("_Step", args[0])
        key = (method.__name__, *args[1:])
        if key not in step.known:
            step.known[key] = method(*args, **named)
        return cast(_R, step.known[key])

    return kept


class _Step:
    """One fallback of one request."""

    def __init__(self, host: Host, request: GuestRequest, fallback: Fallback) -> None:
        self.host, self.request, self.fallback = host, request, fallback
        layout = request.layout
        pins_all = layout.pinning is Pinning.ALL_PUS
        per_group = fallback.threads if request.keep_vcpus else 1
        self.groups = -(-request.vcpus // per_group)
        self.shares = fallback.cores is Cores.SHARED
        self.counts_pus = self.shares or (
            pins_all
            and fallback.cores is Cores.AS_ASKED
            and request.options.policy in (Policy.MEMORY_FIRST, Policy.ANY)
        )
        self.mirrored = layout.cells is GuestCells.HOST
        first = ("vcpus_beyond_cores",) if self.shares else ()
        self.order = (*first, *_order(request.options.policy, layout.pcie is GuestPcie.HOST))
        if not request.options.unequal_cells and not self.shares:
            # A cell is whole sockets; Intel guests of KVM may have cells that share one.
            intel = host.cpu.vendor == "GenuineIntel" and request.guest.domain_type == "kvm"
            idle = request.keep_vcpus and request.vcpus % fallback.threads
            counts = self.mirrored and not (fallback.mixed or intel or self.counts_pus or idle)
            self.order = _evenly(self.order, counts)
        self.others = _others(host, request)
        self.known: dict[tuple[object, ...], object] = {}
        self.fixed = [device for device in host.pci_devices if device.bdf in set(request.devices)]
        self.device_of = {device.bdf: device for device in host.pci_devices}
        self.position = {node.index: i for i, node in enumerate(host.nodes)}

    # Candidates

    def best(self) -> Best | None:
        """The best candidate. If vCPUs use any CPUs, only it must leave the host a core."""
        best = self._preferred()
        if best is not None and self.counts_pus and not self._keeps_core(best.nodes, best.split):
            return None
        return best

    def _preferred(self) -> Best | None:
        idle = self.request.keep_vcpus and self.request.vcpus % self.fallback.threads
        if self.shares or self.fallback.mixed or idle:
            return self._least(lambda split: True)
        equal = self._least(lambda split: len(set(split)) == 1)
        if equal is not None and self.mirrored and not self.request.options.unequal_cells:
            free = self._least(lambda split: True)
            assert free is not None
            # Nodes count whether the policy wants few or many, nearness where it compares it.
            names = {"device_class", "packages_spanned", "gpus_away_from_home", "nodes_spanned"}
            names.add("minus_nodes_spanned")
            names &= set(self.order)
            if all(equal.terms[name] <= free.terms[name] for name in names):  # type: ignore[operator]
                return equal
            return free
        return self._least(lambda split: True)

    def _least(self, wanted: Callable[[tuple[int, ...]], bool]) -> Best | None:
        best: Best | None = None
        most = self.request.options.max_nodes or len(self.have)
        for count in range(1, min(most, len(self.have)) + 1):
            for nodes in combinations(sorted(self.have), count):
                gpu_sets = [gpus for gpus in self.gpu_sets if self.allows_gpus(nodes, gpus)]
                if not gpu_sets or any(self.far(a, b) == 255 for a, b in combinations(nodes, 2)):
                    continue
                first = [self.terms_of_sets(nodes, gpus) for gpus in gpu_sets]
                if best is not None and all(self._hopeless(terms, best) for terms in first):
                    continue
                for split in _splits(self.groups, [len(self.have[node]) for node in nodes]):
                    if not wanted(split) or not self.allows(nodes, split):
                        continue
                    shared = self.terms_of_split(nodes, split)
                    for gpus, terms in zip(gpu_sets, first, strict=True):
                        whole = terms | shared | self.terms_of_both(nodes, split, gpus)
                        key = self.key(whole)
                        if best is None or key < best.key:
                            devices = self.devices(gpus)
                            best = Best(self.fallback, nodes, split, devices, whole, key)
        return best

    def _hopeless(self, terms: dict[str, object], best: Best) -> bool:
        """Worse by the terms that no split changes, as far as these come first in the order."""
        for name in self.order:
            if name not in terms:
                return False
            if terms[name] != best.terms[name]:
                return terms[name] > best.terms[name]  # type: ignore[operator,no-any-return]
        return False

    def allows(self, nodes: tuple[int, ...], split: tuple[int, ...]) -> bool:
        """Whether cores, the host's share and memory suffice."""
        if any(n > len(self.have.get(node, ())) for node, n in zip(nodes, split, strict=True)):
            return False
        if not self.counts_pus and not self._keeps_core(nodes, split):
            return False
        if self.shares and not self._is_shared_evenly(nodes, split):
            return False
        pages, space = self.pages, [self.space[node] for node in nodes]
        others = [limit for node, limit in self.space.items() if node not in nodes]
        if self.fallback.memory is Memory.FOLLOWS:
            return all(
                limit is None or -(-pages * number // self.groups) <= limit
                for number, limit in zip(split, space, strict=True)
            )
        if self.fallback.memory is Memory.UNEVEN and 0 in space:
            return False
        if self.fallback.memory is Memory.ELSEWHERE:
            more = (self.request.options.max_nodes or len(self.space)) - len(nodes)
            space += sorted(others, key=lambda limit: -(pages if limit is None else limit))[:more]
        return None in space or sum(filter(None, space)) >= pages

    # CPUs and cores

    def _is_shared_evenly(self, nodes: tuple[int, ...], split: tuple[int, ...]) -> bool:
        """Whether all whole cores are used before any node gives more, and of more no node could
        give one to another that has two fewer."""
        cores = [max(1, self.whole_cores[node]) for node in nodes]
        if sum(cores) >= self.groups:
            return all(n <= own for n, own in zip(split, cores, strict=True))
        more = [n - own for n, own in zip(split, cores, strict=True)]
        open_nodes = [n < self.most[node] for node, n in zip(nodes, split, strict=True)]
        return min(more) >= 0 and not any(
            a - b >= 2 and is_open
            for a in more
            for b, is_open in zip(more, open_nodes, strict=True)
        )

    @cached_property
    def most(self) -> dict[int, int]:
        """Groups that each node can hold, as its memory allows where that follows the vCPUs."""
        follows = self.fallback.memory is Memory.FOLLOWS
        return {
            node: max(
                n
                for n in range(len(groups) + 1)
                if not follows
                or (limit := self.space[node]) is None
                or -(-self.pages * n // self.groups) <= limit
            )
            for node, groups in self.have.items()
        }

    @cached_property
    def whole_cores(self) -> dict[int, int]:
        return {node: min(cores, self.most[node]) for node, cores in self.whole.items()}

    def _keeps_core(self, nodes: tuple[int, ...], split: tuple[int, ...]) -> bool:
        """Whether the host keeps its cores, where it is to."""
        if not self.fallback.keeps_core or self.request.layout.pinning is Pinning.NONE:
            return True
        used = sum(self.draw(node, n)[3] for node, n in zip(nodes, split, strict=True))
        return len(self.cores_without_vcpus) - used >= self.request.host_reserve.cores

    @cached_property
    def pins_of_others(self) -> tuple[set[int], set[int]]:
        """CPUs that vCPUs of others are pinned to, and that only their other threads are."""
        online = {pu for core in self.host.cores for pu in core.pus}
        vcpus: set[int] = set()
        rest: set[int] = set()
        for domain in self.others:
            for pin in domain.vcpu_pins:
                if pin is not None and not online <= set(pin):
                    vcpus |= set(pin)
            for pin in (domain.emulator_pus, *domain.iothread_pus):
                if pin is not None and not online <= set(pin):
                    rest |= set(pin)
        return vcpus, rest

    @cached_property
    def cores_without_vcpus(self) -> list[Core]:
        return [c for c in self.host.cores if not set(c.pus) & self.pins_of_others[0]]

    @cached_property
    def is_hybrid(self) -> bool:
        """Whether cores of both kinds are free, were it for the host's core."""
        free = self._free(keeps_core=False)
        kinds = {core.kind for core in self.host.cores if set(core.pus) & free}
        return {CoreKind.PERFORMANCE, CoreKind.EFFICIENCY} <= kinds

    @cached_property
    def free(self) -> set[int]:
        return self._free(keeps_core=self.fallback.keeps_core)

    def _free(self, *, keeps_core: bool) -> set[int]:
        """Online, allowed, not reserved, and on no core that others hold."""
        pus = {int(pu.index) for pu in self.host.pus if pu.online and pu.allowed}
        pus -= set(self.request.options.reserved_pus) | set(self.request.housekeeping_pus)
        pus -= set(self.request.options.emulator_pus or ())
        vcpus, rest = self.pins_of_others
        owned = vcpus | rest if keeps_core else vcpus
        for core in self.host.cores:
            if set(core.pus) & owned:
                pus -= set(core.pus)
        return pus

    @cached_property
    def isolated(self) -> set[int]:
        return {int(pu.index) for pu in self.host.pus if pu.isolated or pu.nohz_full}

    @cached_property
    def have(self) -> dict[int, list[_Group]]:
        """Sibling groups of each node with CPUs, by position."""
        llc_of = {int(pu.index): pu.llc for pu in self.host.pus}
        have: dict[int, list[_Group]] = {}
        for position, node in enumerate(self.host.nodes):
            if not node.pus:
                continue
            have[position] = []
            for number, core in self._cores(node):
                usable = set(core.pus) & self.free
                if self.counts_pus:
                    count = len(usable) // self.fallback.threads
                else:
                    count = int(len(usable) == len(core.pus) >= self.fallback.threads)
                llc = llc_of[int(core.pus.first() or 0)]
                isolated = bool(usable) and usable <= self.isolated
                weak = core.kind is CoreKind.EFFICIENCY
                partly = len(usable) < len(core.pus)
                have[position] += [
                    _Group(number, llc, isolated, (turn, partly, weak, not isolated))
                    for turn in range(count)
                ]
        return have

    def _cores(self, node: NumaNode) -> Iterator[tuple[int, Core]]:
        for number, core in enumerate(self.host.cores):
            mixed = self.fallback.mixed or not self.is_hybrid
            kind_fits = mixed or core.kind is not CoreKind.EFFICIENCY
            if core.pus <= node.pus and kind_fits:
                yield number, core

    @cached_property
    def whole(self) -> dict[int, int]:
        """Free whole cores of each node."""
        return {
            position: sum(
                set(core.pus) <= self.free for _, core in self._cores(self.host.nodes[position])
            )
            for position in self.have
        }

    @_remembered
    def draw(self, node: int, number: int) -> tuple[int, int, bool, int]:
        """(groups that are not isolated, LLCs, whether these have unequal numbers, cores) of so
        many groups: one of each core first, whole cores before others; of those performance cores,
        of these isolated ones, then as few LLCs as can be, with as many groups on each where that
        can be, then as few cores."""
        groups = self.have[node]
        least = sorted(group.order for group in groups)[:number]
        sure = [group for group in groups if group.order < least[-1]]
        last = [group for group in groups if group.order == least[-1]]
        return min(
            (
                sum(not g.isolated for g in way) if self.isolated else 0,
                len({g.llc for g in way}),
                len(set(Counter(g.llc for g in way).values())) > 1,
                len({g.core for g in way}),
            )
            for some in combinations(last, number - len(sure))
            for way in [(*sure, *some)]
        )

    # Memory

    @cached_property
    def granule(self) -> int:
        return self.request.page_bytes or MIB

    @cached_property
    def overhead(self) -> int:
        return compute_overhead(self.request) if self.fallback.keeps_memory else 0

    @cached_property
    def pages(self) -> int:
        """Pages to be found next to the vCPUs. Ordinary memory brings its overhead along."""
        size = self.request.memory_bytes
        if self.request.page_bytes is None:
            size += self.overhead
        return -(-size // self.granule)

    @cached_property
    def pools(self) -> dict[int, int]:
        """Free huge pages of the wanted size on each node."""
        return {
            position: sum(self._pool(self.host.nodes[at]) for at in self._attached(position))
            for position in self.have
        }

    @cached_property
    def space(self) -> dict[int, int | None]:
        """Pages that each node with CPUs can give; None = unknown."""
        space: dict[int, int | None] = {}
        for position in self.have:
            sizes = [self._ordinary(self.host.nodes[at]) for at in self._attached(position)]
            if any(size is None for size in sizes):
                space[position] = None
                continue
            left = sum(filter(None, sizes))
            if self.request.page_bytes is not None:
                left = max(0, left - self.overhead)
            space[position] = left // self.granule + self.pools[position]
        return space

    def _attached(self, position: int) -> list[int]:
        """The node itself, and allowed nodes without CPUs that are nearer to it than to others."""
        homes = [p for p, node in enumerate(self.host.nodes) if node.pus]
        return [position] + [
            p
            for p, node in enumerate(self.host.nodes)
            if not node.pus
            and node.index in self.request.options.memory_nodes_allowed
            and min(homes, key=lambda home: (self.far(p, home), home)) == position
        ]

    def _ordinary(self, node: NumaNode) -> int | None:
        """Bytes without huge pages that the VM may have; what running domains are bound to have is
        theirs, touched or not, and the host keeps its share."""
        bound, unseen = self._bound(node, None)
        back = sum(
            size
            for domain in self.host.domains
            if domain.running and not domain.planned and domain not in self.others
            for index, size in domain.memory_by_node
            if index == node.index and domain.page_bytes is None
        )
        known = []
        if node.memory_free_bytes is not None:
            known.append(node.memory_free_bytes - unseen + back)
        if node.memory_bytes is not None:
            pools = sum(pool.page_bytes * pool.total_pages for pool in node.page_pools)
            known.append(node.memory_bytes - pools - bound)
        if not known:
            return None
        known = [size - self._to_be_reserved(node) - self._next_to_guests(node) for size in known]
        reserve = self.request.host_reserve.memory_bytes
        if reserve is None:
            reserve = max(2 * GIB, (node.memory_bytes or 0) // 50)
        return max(0, min(known) - (reserve if self.fallback.keeps_memory else 0))

    def _to_be_reserved(self, node: NumaNode) -> int:
        """Bytes of huge pages that planned VMs need there and no pool has for them."""
        missing = 0
        pools = {pool.page_bytes: pool for pool in node.page_pools}
        for size in {domain.page_bytes for domain in self.others} - {None}:
            bound, unseen = self._bound(node, size)
            pool = pools.get(size or 0)
            found = 0 if pool is None else min(pool.free_pages, pool.total_pages - bound + unseen)
            missing += (size or 0) * max(0, unseen - max(0, found))
        return missing

    def _next_to_guests(self, node: NumaNode) -> int:
        """Bytes of QEMU and page tables there, of VMs that do not run yet: 256 MiB, 8 MiB for each
        vCPU, and without huge pages 8 bytes for each 4 KiB, twice with devices; in steps of 64 MiB.
        """
        total = 0
        for domain in self.others:
            own = sum(size for index, size in domain.memory_by_node if index == node.index)
            if domain.running or not own:
                continue
            whole = 256 * MIB + 8 * MIB * len(domain.vcpu_pins)
            if domain.page_bytes is None:
                times = 2 if domain.devices or domain.mediated else 1
                whole += domain.memory_bytes // 512 * times
            share = whole * own // sum(size for _, size in domain.memory_by_node)
            total += -(-share // (64 * MIB)) * 64 * MIB
        return total

    def _pool(self, node: NumaNode) -> int:
        size = self.request.page_bytes
        pool = next((p for p in node.page_pools if p.page_bytes == size), None)
        if pool is None or size is None:
            return 0
        bound, unseen = self._bound(node, size)
        back = sum(
            share // size
            for domain in self.host.domains
            if domain.running and not domain.planned and domain not in self.others
            for index, share in domain.memory_by_node
            if index == node.index and domain.page_bytes == size
        )
        return max(0, min(pool.free_pages - unseen + back, pool.total_pages - bound))

    def _bound(self, node: NumaNode, page_bytes: int | None) -> tuple[int, int]:
        """(bytes or pages that others are bound to have there, those that no counter knows)."""
        bound = unseen = 0
        for domain in self.others:
            for index, size in domain.memory_by_node:
                if index == node.index and domain.page_bytes == page_bytes:
                    count = size if page_bytes is None else -(-size // page_bytes)
                    bound += count
                    unseen += count if domain.planned or not domain.running else 0
        return bound, unseen

    # GPUs

    @cached_property
    def gpus_of_host(self) -> list[PciDevice]:
        return [
            device
            for device in self.host.devices_of_kind(DeviceKind.GPU)
            if device.physical_function is None
        ]

    @cached_property
    def free_gpus(self) -> set[Bdf]:
        owned = {bdf for domain in self.others for bdf in domain.devices}
        return {gpu.bdf for gpu in self.gpus_of_host if gpu.bdf not in owned}

    @cached_property
    def gpu_sets(self) -> list[tuple[Bdf, ...]]:
        """The GPUs that the VM may get in addition to those it names."""
        count = self.request.options.gpu_count or 0
        open_gpus = sorted(self.free_gpus - set(self.request.devices))
        sets = list(combinations(open_gpus, count))
        named = {device.bdf for device in self.fixed if device.kind is DeviceKind.GPU}
        if count and len(named) + count > 1 and not self.request.options.without_nvlink:
            joined = [one for one in sets if frozenset(named | set(one)) in self.partitions]
            if joined:
                return joined
            if self.board is not None:
                near = self.gpus_of_one_package(named, sets)
                if near is not None:
                    return near
        placed = [gpu for gpu in open_gpus if self.device_of[gpu].node in self.position]
        return sets if len(placed) < count else list(combinations(placed, count))

    def gpus_of_one_package(
        self, named: set[Bdf], sets: list[tuple[Bdf, ...]]
    ) -> list[tuple[Bdf, ...]] | None:
        """Sets within one package; None where none could ever be, or that is not known."""
        package = {
            gpu.bdf: self.host.nodes[self.position[gpu.node]].package
            for gpu in self.gpus_of_host
            if gpu.node in self.position
        }
        known = {bdf: number for bdf, number in package.items() if number is not None}
        wanted = len(named) + (self.request.options.gpu_count or 0)
        most = max(Counter(known.values()).values(), default=0)
        if not self.free_gpus | named <= set(known) or wanted > most:
            return None
        if len({known[bdf] for bdf in named}) > 1:
            return None
        return [one for one in sets if len({known[bdf] for bdf in (*named, *one)}) == 1]

    @cached_property
    def board(self) -> str | None:
        """The kind of the NVSwitches' board, H100 or B200."""
        many = len(self.gpus_of_host) > 4 or self.host.devices_of_kind(DeviceKind.NVSWITCH)
        boards = {(gpu.name or "").removeprefix("NVIDIA ")[:1] for gpu in self.gpus_of_host}
        return boards.pop() if many and len(boards) == 1 and boards <= set(_PAIRS) else None

    @cached_property
    def partitions(self) -> set[frozenset[Bdf]]:
        """The default partitions of several GPUs, as far as their modules are known."""
        assignment = {
            gpu.module_id: gpu.bdf for gpu in self.gpus_of_host if gpu.module_id is not None
        }
        if self.board is None:
            return set()
        sets = ((1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4), (5, 6, 7, 8), *_PAIRS[self.board])
        return {
            frozenset(assignment[m] for m in one) for one in sets if set(one) <= set(assignment)
        }

    @cached_property
    def links(self) -> list[DeviceLink]:
        """NVLink or xGMI from GPU to GPU."""
        gpus = {gpu.bdf for gpu in self.gpus_of_host}
        return [
            link
            for link in self.host.links
            if link.kind is not LinkKind.C2C and {link.a, link.b} <= gpus
        ]

    @cached_property
    def joined(self) -> dict[Bdf, set[Bdf]]:
        """The GPUs that links lead to from each, itself included."""
        joined = {gpu.bdf: {gpu.bdf} for gpu in self.gpus_of_host}
        for link in self.links:
            assert link.b is not None
            both = joined[link.a] | joined[link.b]
            for bdf in both:
                joined[bdf] = both
        return joined

    @cached_property
    def sets_of_gpus(self) -> set[frozenset[Bdf]]:
        """Sets that a later VM may want whole, and that are wholly free."""
        sets = set(self.partitions)
        by_switch: dict[object, set[Bdf]] = {}
        by_node: dict[object, set[Bdf]] = {}
        for gpu in self.gpus_of_host:
            switch = self.host.switch_above(gpu.bdf)
            if switch is not None:
                by_switch.setdefault(switch, set()).add(gpu.bdf)
            if gpu.node in self.position:
                by_node.setdefault(gpu.node, set()).add(gpu.bdf)
        sets |= {frozenset(one) for one in (*by_switch.values(), *by_node.values())}
        sets |= {frozenset(one) for one in self.joined.values()}
        return {one for one in sets if one <= self.free_gpus}

    def devices(self, gpus: tuple[Bdf, ...]) -> tuple[Bdf, ...]:
        """All functions of the VM: a GPU's slot leaves the host as a whole."""
        slots = {(gpu.domain, gpu.bus, gpu.device) for gpu in gpus}
        company = {
            device.bdf
            for device in self.host.pci_devices
            if (device.bdf.domain, device.bdf.bus, device.bdf.device) in slots
            and device.kind not in (DeviceKind.BRIDGE, DeviceKind.GPU)
        }
        return tuple(sorted({*self.request.devices, *gpus, *company}))

    @_remembered
    def homes(self, gpus: tuple[Bdf, ...]) -> _Homes:
        devices = [self.device_of[bdf] for bdf in self.devices(gpus)]
        of_vm = [device for device in devices if device.kind is DeviceKind.GPU]

        def of(some: Iterable[PciDevice]) -> tuple[int, ...]:
            return tuple(self.position[d.node] for d in some if d.node in self.position)

        in_use = {gpu.bdf for gpu in of_vm}
        return _Homes(
            of(device for device in devices if self._pulls(device, of_vm)),
            of(of_vm),
            of(devices),
            sum(bool(one & in_use) and not one <= in_use for one in self.sets_of_gpus)
            if in_use
            else None,
        )

    def _by_nic(self, gpus: tuple[Bdf, ...]) -> tuple[tuple[bool, Bdf], ...]:
        """GPUs in order, those first that a NIC of the VM is paired with."""
        nics = [device for device in self.fixed if device.kind is DeviceKind.NIC]
        return tuple(
            sorted(
                (not any(self._pulls(nic, [self.device_of[bdf]]) for nic in nics), bdf)
                for bdf in gpus
            )
        )

    def allows_gpus(self, nodes: tuple[int, ...], gpus: tuple[Bdf, ...]) -> bool:
        requires = self.request.options.device_locality is DeviceLocality.REQUIRE
        return not requires or set(self.homes(gpus).gpus) <= set(nodes)

    # Terms

    def key(self, terms: dict[str, object]) -> tuple[object, ...]:
        return tuple(terms[name] for name in self.order)

    def terms(
        self, nodes: tuple[int, ...], split: tuple[int, ...], gpus: tuple[Bdf, ...]
    ) -> dict[str, object]:
        return (
            self.terms_of_sets(nodes, gpus)
            | self.terms_of_split(nodes, split)
            | self.terms_of_both(nodes, split, gpus)
        )

    def terms_of_sets(self, nodes: tuple[int, ...], gpus: tuple[Bdf, ...]) -> dict[str, object]:
        """Terms that no split changes."""
        homes = self.homes(gpus)
        near = self.request.options.device_locality is not DeviceLocality.IGNORE
        having = {self.position.get(self.device_of[bdf].node) for bdf in self.free_gpus}  # type: ignore[arg-type]
        used = len(having & set(nodes))
        lost = used if homes.sets_lost is None else homes.sets_lost
        return {
            "device_class": max(
                (min(self.package_distance(home, n) for n in nodes) for home in homes.pulling),
                default=0,
            )
            if near
            else 0,
            "packages_spanned": len({self._package(node) for node in nodes}),
            "vcpus_beyond_cores": max(0, self.groups - sum(self.whole_cores[n] for n in nodes))
            if self.shares
            else 0,
            "gpus_away_from_home": sum(home not in nodes for home in homes.gpus) if near else 0,
            "nodes_spanned": len(nodes),
            "minus_nodes_spanned": -len(nodes),
            "node_distance": max((self.far(a, b) for a, b in combinations(nodes, 2)), default=10),
            "distance_sum": sum(self.far(a, b) for a, b in combinations(nodes, 2)),
            "gpu_sets_lost": lost,
            "sets_broken": homes.sets_lost or 0,
        }

    @_remembered
    def terms_of_split(self, nodes: tuple[int, ...], split: tuple[int, ...]) -> dict[str, object]:
        """Terms that no set of GPUs changes."""
        drawn = [self.draw(node, n) for node, n in zip(nodes, split, strict=True)]
        wants_gpus = bool(self.request.options.gpu_count) or any(
            device.kind is DeviceKind.GPU for device in self.fixed
        )
        balance = self.request.options.balance or (Balance.PACK if wants_gpus else Balance.SPREAD)
        sign = 1 if balance is Balance.PACK else -1
        short = 0
        if self.request.page_bytes is not None and self.fallback.memory is Memory.FOLLOWS:
            short = sum(
                max(0, -(-self.pages * n // self.groups) - self.pools[node])
                for node, n in zip(nodes, split, strict=True)
            )
        largest = max(n for n in range(1, self.groups + 1) if all(part % n == 0 for part in split))
        return {
            "guest_sockets": sum(part // largest for part in split),
            "unisolated_cores": sum(one[0] for one in drawn),
            "llcs_spanned": sum(one[1] for one in drawn),
            "pages_to_reserve": short,
            "balance_cores": sign * sum(self.whole[node] for node in nodes),
            "balance_memory": sign * sum((self.space[node] or 0) * self.granule for node in nodes),
            "unevenness": sum(n * n for n in split),
            "nodes": tuple(self.host.nodes[node].index for node in nodes),
            "split": tuple(-n for n in split),
        }

    def terms_of_both(
        self, nodes: tuple[int, ...], split: tuple[int, ...], gpus: tuple[Bdf, ...]
    ) -> dict[str, object]:
        ignores = self.request.options.device_locality is DeviceLocality.IGNORE
        return {
            "device_distance": 0
            if ignores
            else sum(
                n * self.far(node, home)
                for home in self.homes(gpus).all
                for node, n in zip(nodes, split, strict=True)
            ),
            "gpus": self._by_nic(gpus),
        }

    def _pulls(self, device: PciDevice, gpus: list[PciDevice]) -> bool:
        """GPUs, and NICs on the switch or root complex of one of these."""
        if device.kind is not DeviceKind.NIC:
            return device.kind is DeviceKind.GPU
        switch = self.host.switch_above(device.bdf)
        return any(
            gpu.root_complex == device.root_complex
            or (switch is not None and switch == self.host.switch_above(gpu.bdf))
            for gpu in gpus
        )

    # Distances

    def far(self, a: int, b: int) -> int:
        if self.host.distances is None:
            return 10 if a == b else 20
        return max(self.host.distances[a][b], self.host.distances[b][a])

    def _package(self, node: int) -> object:
        package = self.host.nodes[node].package
        return ("node", node) if package is None else package

    @_remembered
    def package_distance(self, a: int, b: int) -> int:
        """10 within a package, else the least distance between nodes of the two packages."""
        if self._package(a) == self._package(b):
            return 10
        nodes = range(len(self.host.nodes))
        return min(
            self.far(one, other)
            for one in nodes
            for other in nodes
            if self._package(one) == self._package(a) and self._package(other) == self._package(b)
        )


def _splits(groups: int, most: list[int]) -> Iterator[tuple[int, ...]]:
    """Every way to put the groups on nodes that hold so many, at least one on each."""
    if not most:
        if groups == 0:
            yield ()
        return
    for number in range(1, min(most[0], groups) + 1):
        for rest in _splits(groups - number, most[1:]):
            yield (number, *rest)
