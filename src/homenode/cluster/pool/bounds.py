"""Bounds: the least that a VM can cost a host and its pool, found without the planner.

Every placement on a host in use is also possible on the same host when it is empty. So none costs
less than the best placement on the empty host. Where that has its GPUs, cores and memory on one
package, each VM with full locality has too, and what is free on each package limits their number.
"""

from collections.abc import Collection, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cluster.pool.flavour import Flavour
from homenode.cluster.pool.planner import FillStep, Planner, names_parts
from homenode.cluster.pool.state import HostState
from homenode.cpuset import CpuSet
from homenode.indices import NodeIndex
from homenode.machine.topology import LOCAL_DISTANCE, Host
from homenode.plan.search.memory import overhead_bytes, reserve_bytes
from homenode.vm.layout import MemoryBinding, Pinning, Siblings
from homenode.vm.plan_options import DeviceLocality, MemoryMode

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

    def without(self, other: "Amount") -> "Amount":
        return Amount(
            gpus=self.gpus - other.gpus,
            cores=self.cores - other.cores,
            memory_bytes=self.memory_bytes - other.memory_bytes,
        )


class _Nodes(Struct, frozen=True, kw_only=True):
    """The nodes of a shape. position: of each node in the list of nodes. packages: the package of
    each node, by position. classes: (position of the node, number of cores) of each class of cores.
    gpus: position of each GPU's node. widest: most PUs of a core. are_alike: a VM may have any of
    the cores, and all have as many PUs."""

    position: dict[NodeIndex, int]
    packages: tuple[int, ...]
    classes: tuple[tuple[int, int], ...]
    gpus: dict[Bdf, int]
    widest: int
    are_alike: bool


class _Empty(Struct, frozen=True, kw_only=True):
    """A VM on the empty host. own: its cost, if that is certainly the least. rest: cost terms of
    the host. needs: the least that it allocates there without a fallback. home: position of its
    node; None if it has several, or a GPU is on another. one_package: whether it is on one package
    with every GPU on a chosen node; None if full locality does not require that. takes: what a VM
    on one node takes of it at most, with its emulator and what QEMU needs; None if unknown."""

    own: tuple[object, ...] | None
    rest: tuple[tuple[str, object], ...]
    needs: Amount
    home: int | None
    one_package: bool | None
    takes: Amount | None


class _Fits(Struct, frozen=True, kw_only=True):
    """How many VMs with full locality a host takes at most. parts: what is free on each package, or
    on the whole host. most: VMs that each part takes. part_of: the part of each node."""

    needs: Amount
    parts: tuple[Amount, ...]
    most: tuple[int, ...]
    part_of: tuple[int, ...]

    def after(self, node: int, taken: Amount) -> int:
        """The number of VMs that still fit once so much of a node is allocated."""
        part = self.part_of[node]
        left = self.parts[part].without(taken).holds(self.needs)
        return sum(self.most) - self.most[part] + left


class Bounds:
    """Bounds for the hosts of a planner's pool. flavours: those of which fewer VMs may fit then."""

    def __init__(self, planner: Planner, flavours: Sequence[Flavour]) -> None:
        self._planner = planner
        self._flavours = tuple(flavours)
        self._nodes: dict[int, _Nodes | None] = {}
        self._free: dict[tuple[HostState, frozenset[Bdf]], tuple[Amount, ...]] = {}
        self._empty: dict[tuple[HostState, Flavour], _Empty | None] = {}
        self._fits: dict[tuple[HostState, Flavour], _Fits | None] = {}
        self._clean: dict[tuple[HostState, Flavour], int] = {}
        self._certain: dict[tuple[HostState, Flavour], tuple[int, int | None]] = {}

    def key(self, state: HostState, flavour: Flavour) -> tuple[object, ...]:
        """The beginning of a sort key that is no greater than the VM's on this host (place.py)."""
        nodes, empty = self._nodes_of(state.shape), self._on_empty(state, flavour)
        if empty is None or empty.own is None:
            return ()
        if nodes is None or empty.home is None:
            return empty.own
        free = self._free_of(state, flavour, nodes)
        homes = [number for number, own in enumerate(free) if own.holds(empty.needs)]
        if not homes:
            return (*empty.own, UNREACHED)
        lost = self._lost(state, flavour, homes, empty.needs)
        rest = self._rest(state, flavour, nodes, homes, empty)
        return (*empty.own, *min(zip(*lost, *rest, strict=True)))

    def _lost(
        self, state: HostState, flavour: Flavour, homes: Sequence[int], needs: Amount
    ) -> list[list[int]]:
        """How many VMs with full locality no longer fit, at least: by flavour, then by node of the
        VM."""
        unfit = self._planner.unfit(state.shape, flavour)
        without_gpus = Amount(gpus=0, cores=needs.cores, memory_bytes=needs.memory_bytes)
        found = []
        for other in self._flavours:
            before = self._known(state, other)
            if before is None:
                before = self._between(state, other)[0]
            fits = self._fits_of(state, other) if before else None
            if fits is None:
                found.append([0] * len(homes))
                continue
            taken = needs if self._planner.unfit(state.shape, other) == unfit else without_gpus
            found.append([max(0, before - fits.after(home, taken)) for home in homes])
        return found

    def _known(self, state: HostState, flavour: Flavour) -> int | None:
        """How many VMs fit with full locality, where that was worked out or is certain."""
        found = self._clean.get((state, flavour), self.certain(state, flavour))
        if found is None and (known := self._planner.known_counts(state, flavour)) is not None:
            found = known[0]
        return found

    def _rest(
        self,
        state: HostState,
        flavour: Flavour,
        nodes: _Nodes,
        homes: Sequence[int],
        empty: _Empty,
    ) -> Iterator[list[int]]:
        """The key after the VMs lost, by node: GPUs left free, then the host's cost terms."""
        free = self._free_of(state, None, nodes)
        left = sum([one.gpus for one in free]) - flavour.gpus if flavour.gpus else 0
        yield [left] * len(homes)
        for name, value in empty.rest:
            if not isinstance(value, int):
                return
            if name == "gpu_sets_lost":
                yield [0 if flavour.gpus else min(1, free[home].gpus) for home in homes]
            elif name in ("unisolated_cores", "unequal_llcs"):
                yield [0] * len(homes)
            elif name == "llcs_spanned":
                yield [min(1, value)] * len(homes)
            elif name == "pages_to_reserve":
                # Without pools on any node every page is to be reserved, wherever the VM is.
                has_pools = any(pools for _, _, pools in state.memory)
                yield [0 if has_pools else value] * len(homes)
            elif name == "balance_cores":
                yield from self._balance(state, nodes, homes, empty, value)
                return
            else:
                return

    def _balance(
        self,
        state: HostState,
        nodes: _Nodes,
        homes: Sequence[int],
        empty: _Empty,
        value: int,
    ) -> Iterator[list[int]]:
        free = self._free_of(state, None, nodes)
        before = self._free_of(self._planner.empty(state), None, nodes)
        assert empty.home is not None, "it has a home"
        if value == -before[empty.home].cores:
            yield [-free[home].cores for home in homes]
        elif value == before[empty.home].cores:
            service = [0] * len(free)
            for (node, _), (_, threads) in zip(nodes.classes, state.cores, strict=True):
                service[node] += threads
            yield [free[home].cores - service[home] for home in homes]

    def certain(self, state: HostState, flavour: Flavour) -> int | None:
        """How many VMs still fit with full locality, where that needs no planner: as many as each
        package could hold fit on single nodes, with room for their emulators and the host. The
        planner puts a VM on one node where it can. None where the two numbers differ."""
        least, most = self._between(state, flavour)
        return most if least == most else None

    def _between(self, state: HostState, flavour: Flavour) -> tuple[int, int | None]:
        """The fewest and the most that may fit; most None = not known."""
        key = state, flavour
        if key not in self._certain:
            self._certain[key] = self._find_between(state, flavour)
        return self._certain[key]

    def _find_between(self, state: HostState, flavour: Flavour) -> tuple[int, int | None]:
        fits = self._fits_of(state, flavour)
        if fits is None:
            return 0, None
        most = sum(fits.most)
        if not most:
            return 0, 0
        nodes, empty = self._nodes_of(state.shape), self._on_empty(state, flavour)
        request = self._planner.request(state, flavour)
        assert nodes is not None and empty is not None and request is not None, "it has fits"
        if empty.takes is None or any(pools for _, _, pools in state.memory):
            return 0, most
        service = [0] * len(nodes.packages)
        for (node, _), (_, threads) in zip(nodes.classes, state.cores, strict=True):
            service[node] += threads
        sizes = zip(self._planner.pool.shapes[state.shape].nodes, state.memory, strict=True)
        kept = [reserve_bytes(request, replace(node, memory_bytes=own[0])) for node, own in sizes]
        overhead, host_cores = overhead_bytes(request), max(1, request.host_reserve.cores)
        every = 0
        for at, free in enumerate(self._free_of(state, flavour, nodes)):
            usable = Amount(
                gpus=free.gpus,
                cores=free.cores - service[at] - host_cores,
                memory_bytes=free.memory_bytes - kept[at] - overhead,
            )
            every += usable.holds(empty.takes)
        return min(every, most), most

    def counts(self, state: HostState, flavour: Flavour) -> tuple[int, int]:
        """As the planner's `counts`, which is asked only where it is not certain."""
        clean = self.certain(state, flavour)
        if clean is not None and self._takes_no_more(state, flavour, clean):
            return clean, clean
        return self._planner.counts(state, flavour)

    def _takes_no_more(self, state: HostState, flavour: Flavour, clean: int) -> bool:
        """Whether so many VMs leave too few GPUs, PUs or bytes for one that gives up locality."""
        nodes, empty = self._nodes_of(state.shape), self._on_empty(state, flavour)
        if empty is None:
            return True
        request = self._planner.request(state, flavour)
        assert nodes is not None and request is not None, "it is certain"
        free = self._free_of(state, flavour, nodes)
        gpus, cores = sum([one.gpus for one in free]), sum([one.cores for one in free])
        pinned = request.layout.pinning is not Pinning.NONE
        return (empty.needs.gpus and gpus < (clean + 1) * flavour.gpus) or bool(
            pinned and (cores - clean * empty.needs.cores) * nodes.widest < request.vcpus
        )

    def clean(self, state: HostState, flavour: Flavour) -> int:
        """How many VMs still fit with full locality: the first value of the planner's `counts`,
        found without counting those that fit with less."""
        known = self._known(state, flavour)
        if known is not None:
            return known
        chain: list[tuple[tuple[HostState, Flavour], bool]] = []
        number = 0
        while True:
            key = state, flavour
            found = self._clean.get(key, self.certain(state, flavour) if chain else None)
            if found is not None:
                number = found
                break
            fits = self._fits_of(state, flavour)
            none_fits = fits is not None and not any(fits.most)
            step = None if none_fits else self._planner.step(state, flavour)
            if step is None:
                self._clean[key] = 0
                break
            chain.append((key, self._planner.is_clean(state, flavour, step)))
            state = step.after
        for key, is_clean in reversed(chain):
            number += is_clean
            self._clean[key] = number
        return number

    def most_gpus(self, state: HostState) -> int:
        """The most GPUs that VMs of the flavours can have with full locality."""
        nodes = self._nodes_of(state.shape)
        every = [self._fits_of(state, one) for one in self._flavours]
        fits = [one for one in every if one is not None]
        if nodes is None or len(fits) < len(every):
            return len(self._planner.free_gpus(state))
        fits = [one for one in fits if any(one.most)]
        if not fits:
            return 0
        # A VM that may cross packages takes from all.
        widest = min(fits, key=lambda one: len(one.parts))
        free = self._free_of(state, None, nodes)
        needs = [one.needs for one in fits]
        return sum(_gpus_used(part, needs) for part in _parts(free, widest.part_of))

    def _fits_of(self, state: HostState, flavour: Flavour) -> _Fits | None:
        """None where a VM may have full locality without meeting these limits."""
        key = state, flavour
        if key not in self._fits:
            self._fits[key] = self._find_fits(state, flavour)
        return self._fits[key]

    def _find_fits(self, state: HostState, flavour: Flavour) -> _Fits | None:
        nodes, empty = self._nodes_of(state.shape), self._on_empty(state, flavour)
        if nodes is None or empty is None or empty.one_package is None:
            return None
        part_of = nodes.packages if empty.one_package else (0,) * len(nodes.packages)
        parts = _parts(self._free_of(state, flavour, nodes), part_of)
        most = tuple(part.holds(empty.needs) for part in parts)
        return _Fits(needs=empty.needs, parts=parts, most=most, part_of=part_of)

    def _on_empty(self, state: HostState, flavour: Flavour) -> _Empty | None:
        """The VM on the empty host; None where it does not fit there."""
        key = self._planner.empty(state), flavour
        if key not in self._empty:
            step = self._planner.step(*key)
            self._empty[key] = None if step is None else self._as_bound(key[0], flavour, step)
        return self._empty[key]

    def _as_bound(self, state: HostState, flavour: Flavour, step: FillStep) -> _Empty:
        request, nodes = self._planner.request(state, flavour), self._nodes_of(state.shape)
        assert request is not None, "a VM was placed"
        is_local = not step.given and step.nearness[0] <= LOCAL_DISTANCE and not step.nearness[2]
        is_near = is_local and step.nearness[1] == 1
        on_one = is_near and len(step.placement.nodes) == 1
        own, rest = step.terms
        # On an empty board only partitions are chosen from; later, if none is free, any GPUs. A GPU
        # of no known node may be nearer than those that the empty host offers.
        is_least = not step.given and step.placement.optimal and (on_one or not flavour.gpus)
        is_anywhere = request.options.device_locality is DeviceLocality.IGNORE
        is_bound = (
            request.layout.memory is not MemoryBinding.AS_IT_WAS
            and request.page_bytes is None
            and request.options.memory_mode is MemoryMode.STRICT
            and not request.options.memory_nodes_allowed
        )
        cores = sum(busy for busy, _ in step.after.cores)
        layout = request.layout
        has_whole_cores = (
            layout.pinning is Pinning.ONE_PER_CORE and layout.siblings is Siblings.HIDDEN
        )
        if nodes is not None and not has_whole_cores:
            cores = min(cores, -(-request.vcpus // nodes.widest))
        needs = Amount(
            gpus=flavour.gpus if flavour.options.gpu_profile is None else 0,
            cores=cores,
            memory_bytes=request.memory_bytes if is_bound else 0,
        )
        return _Empty(
            own=(0, *own) if is_least and nodes is not None else None,
            rest=tuple(rest),
            needs=needs,
            home=nodes.position[step.placement.nodes[0]]
            if on_one and nodes is not None and not is_anywhere and not names_parts(request)
            else None,
            takes=Amount(
                gpus=flavour.gpus,
                cores=cores + sum(service for _, service in step.after.cores),
                memory_bytes=request.memory_bytes + overhead_bytes(request),
            )
            if on_one
            and is_bound
            and has_whole_cores
            and nodes is not None
            and nodes.are_alike
            and not is_anywhere
            and flavour.options.gpu_profile is None
            and not names_parts(request)
            else None,
            one_package=is_near
            if is_local and flavour.options.gpu_profile is None and not is_anywhere
            else None,
        )

    def _free_of(
        self, state: HostState, flavour: Flavour | None, nodes: _Nodes
    ) -> tuple[Amount, ...]:
        """What is free on each node: GPUs that the flavour takes (None = all), cores without vCPUs,
        and memory."""
        unfit = frozenset() if flavour is None else self._planner.unfit(state.shape, flavour)
        found = self._free.get((state, unfit))
        if found is None:
            gpus, cores = [0] * len(nodes.packages), [0] * len(nodes.packages)
            for gpu in self._planner.free_gpus(state) - unfit:
                gpus[nodes.gpus[gpu]] += 1
            for (node, number), (busy, _) in zip(nodes.classes, state.cores, strict=True):
                cores[node] += number - busy
            memory = (UNREACHED if free is None else max(0, free) for _, free, _ in state.memory)
            found = self._free[state, unfit] = tuple(
                Amount(gpus=gpu, cores=core, memory_bytes=free)
                for gpu, core, free in zip(gpus, cores, memory, strict=True)
            )
        return found

    def _nodes_of(self, shape: int) -> _Nodes | None:
        """None where the node of a core or GPU is not known, or a node is in several packages."""
        if shape not in self._nodes:
            host = self._planner.inventory(shape).host
            classes = [members[0] for members in self._planner.core_classes(shape)]
            numbers = map(len, self._planner.core_classes(shape))
            gpus = self._planner.gpus(shape)
            self._nodes[shape] = _nodes(host, list(zip(classes, numbers, strict=True)), gpus)
        return self._nodes[shape]


def _parts(free: Sequence[Amount], part_of: Sequence[int]) -> tuple[Amount, ...]:
    """The sums of what is free on the nodes of each part."""
    parts = []
    for number in range(max(part_of) + 1):
        own = [one for one, part in zip(free, part_of, strict=True) if part == number]
        gpus, cores = sum([one.gpus for one in own]), sum([one.cores for one in own])
        parts.append(
            Amount(gpus=gpus, cores=cores, memory_bytes=sum([one.memory_bytes for one in own]))
        )
    return tuple(parts)


def _gpus_used(part: Amount, needs: Sequence[Amount]) -> int:
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


def _nodes(
    host: Host, classes: Sequence[tuple[CpuSet, int]], gpus: Collection[Bdf]
) -> _Nodes | None:
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
        if packages.setdefault(place, package_of_core[core]) != package_of_core[core]:
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
    return _Nodes(
        position=position,
        packages=tuple(of_nodes),
        classes=tuple(found),
        gpus=homes,
        widest=widest,
        are_alike=len(kinds) == 1,
    )
