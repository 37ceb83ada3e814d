"""Bounds: the least that a VM can cost a host and its pool, found without the planner.

Every placement on a host in use is also possible on the same host when it is empty. So none costs
less than the best placement on the empty host. Where that has its GPUs, cores and memory on one
package, each VM with full locality has too, and what is free on each package limits their number.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import mul
from typing import Any

from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cluster.pool.amounts import (
    UNREACHED,
    Amount,
    MostFits,
    NodeAmounts,
    VmOnEmpty,
    VmOnOneNode,
    fewest,
    has_equal_parts,
    has_memory,
    most_gpus_used,
    node_amounts,
    sized,
    sums_of_parts,
    vm_on_empty,
    vm_on_one_node,
)
from homenode.cluster.pool.flavour import Flavour
from homenode.cluster.pool.planner import Planner
from homenode.cluster.pool.policy import Workload
from homenode.cluster.pool.state import MEMORY_STEP_BYTES, HostState
from homenode.plan.memory import overhead_bytes, reserve_bytes
from homenode.vm.layout import GuestCells, Pinning

_STEPS_BYTES = 4 * MEMORY_STEP_BYTES
"""What rounding may take of a node's memory for one VM."""


class Bounds:
    """Bounds for the hosts of a planner's pool. flavours: those of which fewer VMs may fit then."""

    def __init__(self, planner: Planner, flavours: Sequence[Flavour]) -> None:
        self._planner = planner
        self._flavours = tuple(flavours)
        self._nodes: dict[int, NodeAmounts | None] = {}
        self._free: dict[tuple[HostState, frozenset[Bdf]], tuple[Amount, ...]] = {}
        self._empty: dict[tuple[HostState, Flavour], VmOnEmpty | None] = {}
        self._on_one: dict[tuple[HostState, Flavour], VmOnOneNode | None] = {}
        self._fits: dict[tuple[HostState, Flavour], MostFits | None] = {}
        self._clean: dict[tuple[HostState, Flavour], int] = {}
        self._workloads: dict[HostState, Workload] = {}
        self._before: dict[HostState, list[tuple[int, int, MostFits, frozenset[Bdf]]]] = {}
        self._usable: dict[tuple[object, ...], tuple[Amount, ...]] = {}
        self._certain: dict[tuple[HostState, Flavour], tuple[int, int | None]] = {}

    def keys(self, state: HostState, flavour: Flavour) -> Iterator[tuple[object, ...]]:
        """Beginnings of a sort key that are no greater than the VM's on this host (place.py), each
        no less than the one before."""
        return accumulate(self._keys(state, flavour), max)

    def _keys(self, state: HostState, flavour: Flavour) -> Iterator[tuple[Any, ...]]:
        nodes = self._nodes_of(state.shape)
        vm = None if nodes is None else self._on_one_node(state, flavour, nodes)
        if nodes is not None and vm is not None:
            free = self._free_of(state, flavour, nodes)
            gpus, cores, size = vm.needs.gpus, vm.needs.cores, vm.needs.memory_bytes
            homes = [
                number
                for number, own in enumerate(free)
                if own.gpus >= gpus and own.cores >= cores and own.memory_bytes >= size
            ]
            if homes:
                losses = self._losses(state, flavour, homes, vm.needs)
                yield (*vm.own, min(losses))
                rest = [self._rest(state, flavour, nodes, home, vm) for home in homes]
                yield (*vm.own, *min((loss, *own) for loss, own in zip(losses, rest, strict=True)))
                return
            most = self._planner.free_amounts(state)
            if most[0] < gpus or most[1] < cores or sum([own.memory_bytes for own in free]) < size:
                yield (1,)
                return
            needs = replace(vm.needs, gpus=0)  # they may be away
            packages = fewest(sums_of_parts(free, nodes.packages), needs)
            yield (*vm.own[:2], packages, *vm.own[3 : vm.at], fewest(free, needs))
            every = self._free_of(self._planner.empty(state), flavour, nodes)
            if any(own.holds(vm.needs) for own in every):
                return
        empty = self._on_empty(state, flavour)
        if empty is None or empty.own is None:
            yield ()
        elif nodes is None or vm is None or empty.is_plain:
            yield empty.own
        elif (empty.each is not None and not all(own.holds(empty.each) for own in free)) or (
            empty.is_nearest and self._between(state, flavour)[1] == 0
        ):
            yield (*empty.own, UNREACHED)
        else:
            left = self._planner.free_amounts(state)[0] - flavour.gpus if flavour.gpus else 0
            losses = self._losses(state, flavour, [None], empty.needs, empty.each)
            yield (*empty.own, *losses, left)

    def _on_one_node(
        self, state: HostState, flavour: Flavour, nodes: NodeAmounts
    ) -> VmOnOneNode | None:
        key = self._planner.empty(state), flavour
        if key not in self._on_one:
            self._on_one[key] = vm_on_one_node(self._planner, nodes, *key)
        return self._on_one[key]

    def _losses(
        self,
        state: HostState,
        flavour: Flavour,
        homes: Sequence[int | None],
        needs: Amount,
        each: Amount | None = None,
    ) -> list[int]:
        """The policy's loss, at least, by node of the VM; None = it is on several."""
        unfit = self._planner.unfit(state.shape, flavour)
        without_gpus = Amount(gpus=0, cores=needs.cores, memory_bytes=needs.memory_bytes)
        filled = [0] * len(homes)
        every = self._before.get(state)
        every = self._all_before(state) if every is None else every
        for worth, before, fits, others_unfit in every:
            taken = needs if others_unfit == unfit else without_gpus
            for number, home in enumerate(homes):
                filled[number] += worth * max(0, before - fits.after(home, taken, each))
        gpus, cores = self._planner.free_amounts(state)
        left = gpus - flavour.gpus, cores - needs.cores
        return [self._loss(state, one, (gpus, cores), left) for one in filled]

    def loss(self, before: HostState, after: HostState, lost: Sequence[int]) -> int:
        """What the host loses by a change, as the policy has it. lost: VMs of each flavour that
        no longer fit."""
        filled = sum(map(mul, lost, [flavour.worth for flavour in self._flavours]))
        return self._loss(before, filled, *map(self._planner.free_amounts, (before, after)))

    def _loss(
        self, state: HostState, filled: int, before: tuple[int, int], after: tuple[int, int]
    ) -> int:
        workload = self.workload_of(state)
        return int(workload.worth(filled, *before) - workload.worth(0, *after))

    def workload_of(self, state: HostState) -> Workload:
        """The flavours, each as often, on this kind of machine."""
        empty = self._planner.empty(state)
        if empty not in self._workloads:
            found = [self._on_empty(state, flavour) for flavour in self._flavours]
            sizes = [(one.needs.gpus, one.needs.cores) for one in found if one and one.needs.gpus]
            self._workloads[empty] = Workload.of(len(self._flavours), sizes)
        return self._workloads[empty]

    def _all_before(self, state: HostState) -> list[tuple[int, int, MostFits, frozenset[Bdf]]]:
        """Of each flavour that still fits: its worth, VMs with full locality, their limits, GPUs
        that it does not take."""
        found, is_final = [], True
        for other in self._flavours:
            before = self._known(state, other)
            if before is None:
                before, is_final = self._between(state, other)[0], False
            if before and (fits := self._fits_of(state, other)) is not None:
                unfit = self._planner.unfit(state.shape, other)
                found.append((other.worth, before, fits, unfit))
        if is_final:
            self._before[state] = found
        return found

    def _known(self, state: HostState, flavour: Flavour) -> int | None:
        """How many VMs fit with full locality, where that was worked out or is certain."""
        found = self._clean.get((state, flavour), self.certain(state, flavour))
        if found is None and (known := self._planner.known_counts(state, flavour)) is not None:
            found = known[0]
        return found

    def _rest(
        self, state: HostState, flavour: Flavour, nodes: NodeAmounts, home: int, vm: VmOnOneNode
    ) -> tuple[int, ...]:
        """The key after the policy's loss, on this node: GPUs left free, then the cost's terms."""
        free = self._free_of(state, None, nodes)
        left = sum([one.gpus for one in free]) - flavour.gpus if flavour.gpus else 0
        own = self._free_of(state, flavour, nodes)[home]
        sets_lost = 0 if flavour.gpus else min(1, own.gpus)
        # Without pools on any node every page is to be reserved, wherever the VM is.
        pages = 0 if any(pools for _, _, pools in state.memory) else vm.pages
        cores, llcs = vm.needs.cores, 0
        service = 0
        sizes = []
        for (node, number), (busy, threads) in zip(nodes.classes, state.cores, strict=True):
            if node == home:
                service += threads
                sizes.append(number - busy)
        for size in sorted(sizes, reverse=True):
            if cores > 0:
                cores, llcs = cores - size, llcs + 1
        balance = free[home].cores - service if vm.packs else -free[home].cores
        return left, sets_lost, 0, llcs, 0, pages, balance

    def least_lost(self, before: HostState, after: HostState, flavour: Flavour) -> int:
        """How many VMs of a flavour no longer fit with full locality, at least."""
        known, most = self._known(before, flavour), self._between(after, flavour)[1]
        return 0 if known is None or most is None else max(0, known - most)

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
        nodes, empty = self._nodes_of(state.shape), self._on_empty(state, flavour)
        assert nodes is not None and empty is not None, "it has fits"
        if not most or empty.takes is None or any(pools for _, _, pools in state.memory):
            return 0, most
        usable = self._usable_of(state, flavour, nodes)
        if not empty.is_plain:  # of several, each may be where the next one was to be
            request = self._planner.request(state, flavour)
            if (
                request is not None
                and request.layout.cells is GuestCells.MIRRORED
                and not request.options.unequal_cells
                and not has_equal_parts(usable, empty.needs, _STEPS_BYTES)
            ):
                return 0, 0
            is_whole = all(usable[at].holds(own) for at, own in empty.takes.items())
            return min(most, int(is_whole and empty.threads <= 1)), most
        needs = next(iter(empty.takes.values()))
        free = self._free_of(state, flavour, nodes)
        kept = self._planner.probe(state.shape).host_reserve.cores
        most = min(most, max(0, (sum([one.cores for one in free]) - kept) // needs.cores))
        spares = not self._planner.unfit(state.shape, flavour)
        if empty.threads > 1 or not spares or needs.cores > flavour.gpus * nodes.share:
            needs = replace(needs, cores=needs.cores + empty.threads)
            return min(most, sum([own.holds(needs) for own in usable])), most
        # Emulators leave the free GPUs of a node their cores, and share one where there are few.
        each = [own.holds(needs) for own in usable]
        if not empty.threads:
            return min(most, sum(each)), most
        served = {at for (at, _), (_, own) in zip(nodes.classes, state.cores, strict=True) if own}
        is_short = any(
            replace(own, cores=own.cores - 1).holds(needs) < number
            for at, (own, number) in enumerate(zip(usable, each, strict=True))
            if at not in served
        )
        return min(most, sum(each) - is_short), most

    def counts(self, state: HostState, flavour: Flavour) -> tuple[int, int]:
        """As the planner's `counts`, which is asked only where it is not certain."""
        known = self._certain_counts(state, flavour)
        return known or self._planner.counts(state, flavour, self._certain_counts)

    def _certain_counts(self, state: HostState, flavour: Flavour) -> tuple[int, int] | None:
        clean = self.certain(state, flavour)
        more = None if clean is None else self._more(state, flavour, clean)
        return None if clean is None or more is None else (clean, clean + more)

    def _more(self, state: HostState, flavour: Flavour, clean: int) -> int | None:
        """How many VMs fit that give up locality, once those with full locality are there; None
        where that is not certain. They take whole cores of any nodes while there are enough, then
        one VM shares those that are left."""
        nodes, empty = self._nodes_of(state.shape), self._on_empty(state, flavour)
        if empty is None:
            return 0
        request = self._planner.request(state, flavour)
        assert nodes is not None and request is not None, "it is certain"
        free = self._free_of(state, flavour, nodes)
        needs, size = empty.needs, request.memory_bytes
        gpus = self._gpu_fits(state, flavour, nodes, free) - clean
        cores = sum([one.cores for one in free]) - clean * needs.cores
        memory = sum([one.memory_bytes for one in free]) - clean * needs.memory_bytes
        pinned = request.layout.pinning is not Pinning.NONE
        left = self._left(state, flavour)
        whole = size + overhead_bytes(request) + _STEPS_BYTES
        found = 0
        while not (
            (needs.gpus and gpus <= 0)
            or (pinned and cores * nodes.widest < request.vcpus)
            or (needs.memory_bytes and memory < size)
        ):
            if left is None or not flavour.gpus:
                return None
            if not has_memory(left, found, whole, needs.cores):
                is_refused = not found and sum(own for _, own in left) < size
                return found if is_refused else None
            found += 1
            gpus, memory = gpus - 1, memory - size
            cores = cores - needs.cores if cores >= needs.cores else 0
        return found

    def _gpu_fits(
        self, state: HostState, flavour: Flavour, nodes: NodeAmounts, free: Sequence[Amount]
    ) -> int:
        """How many VMs the free GPUs are enough for: on a board with NVSwitches a VM has those of
        one package, where a package has so many."""
        if not flavour.gpus:
            return 0
        of_package = Counter(nodes.packages[home] for home in nodes.gpus.values())
        is_joined = self._planner.inventory(state.shape).devices.fabric is not None
        if (
            is_joined
            and not flavour.options.without_nvlink
            and 1 < flavour.gpus <= max(of_package.values(), default=0)
        ):
            parts = sums_of_parts(free, nodes.packages)
            return sum([part.gpus // flavour.gpus for part in parts])
        return sum([one.gpus for one in free]) // flavour.gpus

    def by_node(self, state: HostState, flavour: Flavour) -> tuple[tuple[int, Amount], ...] | None:
        """Of each node, how many VMs with full locality it takes and what they leave for others of
        them; None where that is not certain."""
        empty, clean = self._on_empty(state, flavour), self.certain(state, flavour)
        if empty is None or empty.takes is None or clean is None:
            return None
        if clean and not empty.is_plain:
            return None
        nodes = self._nodes_of(state.shape)
        assert nodes is not None, "it is certain"
        needs = next(iter(empty.takes.values()))
        found = []
        for own in self._usable_of(state, flavour, nodes):
            number = own.holds(needs) if clean else 0
            found.append((number, own.without(needs, number)))
        return tuple(found) if sum(number for number, _ in found) == clean else None

    def _left(self, state: HostState, flavour: Flavour) -> list[tuple[int, int]] | None:
        """Cores and bytes that the VMs with full locality leave on each node that has cores then;
        None where it is not known how many VMs each node has."""
        request, own = self._planner.request(state, flavour), self.by_node(state, flavour)
        unfit = self._planner.unfit(state.shape, flavour)
        if own is None or unfit or request is None or request.options.max_nodes is not None:
            return None
        nodes = self._nodes_of(state.shape)
        assert nodes is not None, "it is known by node"
        free = self._free_of(state, flavour, nodes)
        usable = self._usable_of(state, flavour, nodes)
        found = []
        for (_, left), every, most in zip(own, free, usable, strict=True):
            cores = left.cores + every.cores - most.cores
            if cores > 0:
                found.append((cores, left.memory_bytes + every.memory_bytes - most.memory_bytes))
        return found

    def needs(self, state: HostState, flavour: Flavour) -> Amount | None:
        """What a VM with full locality takes of its node; None where it is not on one."""
        empty = self._on_empty(state, flavour)
        if empty is None or empty.takes is None or not empty.is_plain:
            return None
        return next(iter(empty.takes.values()))

    def homes(self, shape: int) -> dict[Bdf, int]:
        """The position of each GPU's node."""
        return {} if (nodes := self._nodes_of(shape)) is None else nodes.gpus

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
        of_some = [one for one in self._flavours if self._between(state, one)[1] != 0]
        every = [self._fits_of(state, one) for one in of_some]
        fits = [one for one in every if one is not None]
        if nodes is None or len(fits) < len(every):
            return len(self._planner.free_gpus(state))
        if not fits:
            return 0
        # A VM that may cross packages takes from all.
        widest = min(fits, key=lambda one: len(one.parts))
        usable = [self._usable_of(state, one, nodes) for one in of_some]
        free = [
            Amount(
                gpus=own.gpus,
                cores=max(one.cores for one in each),
                memory_bytes=max(one.memory_bytes for one in each),
            )
            for own, each in zip(
                self._free_of(state, None, nodes), zip(*usable, strict=True), strict=True
            )
        ]
        needs = [one.needs for one in fits]
        return sum(most_gpus_used(part, needs) for part in sums_of_parts(free, widest.part_of))

    def _fits_of(self, state: HostState, flavour: Flavour) -> MostFits | None:
        """None where a VM may have full locality without meeting these limits."""
        key = state, flavour
        if key not in self._fits:
            self._fits[key] = self._find_fits(state, flavour)
        return self._fits[key]

    def _find_fits(self, state: HostState, flavour: Flavour) -> MostFits | None:
        nodes, empty = self._nodes_of(state.shape), self._on_empty(state, flavour)
        if nodes is None or empty is None or empty.one_package is None:
            return None
        part_of = nodes.packages if empty.one_package else (0,) * len(nodes.packages)
        parts = sums_of_parts(self._usable_of(state, flavour, nodes), part_of)
        most = tuple(part.holds(empty.needs) for part in parts)
        return MostFits(needs=empty.needs, parts=parts, most=most, part_of=part_of)

    def _on_empty(self, state: HostState, flavour: Flavour) -> VmOnEmpty | None:
        """The VM on the empty host; None where it does not fit there."""
        key = self._planner.empty(state), flavour
        if key not in self._empty:
            step = self._planner.step(*key)
            self._empty[key] = (
                None
                if step is None
                else vm_on_empty(self._planner, self._nodes_of(state.shape), *key, step)
            )
        return self._empty[key]

    def _usable_of(
        self, state: HostState, flavour: Flavour, nodes: NodeAmounts
    ) -> tuple[Amount, ...]:
        """What a VM with full locality may have of each node: no cores that serve others, and not
        the memory that the host keeps."""
        request = self._planner.request(state, flavour)
        assert request is not None, "it fits on the empty host"
        key = state, self._planner.unfit(state.shape, flavour), request.host_reserve.memory_bytes
        found = self._usable.get(key)
        if found is None:
            service = [0] * len(nodes.packages)
            for (node, _), (_, threads) in zip(nodes.classes, state.cores, strict=True):
                service[node] += threads
            sizes = zip(self._planner.pool.shapes[state.shape].nodes, state.memory, strict=True)
            found = self._usable[key] = tuple(
                Amount(
                    gpus=free.gpus,
                    cores=free.cores - threads,
                    memory_bytes=max(
                        0, free.memory_bytes - reserve_bytes(request, sized(node, own[0]))
                    ),
                )
                for free, threads, (node, own) in zip(
                    self._free_of(state, flavour, nodes), service, sizes, strict=True
                )
            )
        return found

    def _free_of(
        self, state: HostState, flavour: Flavour | None, nodes: NodeAmounts
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

    def _nodes_of(self, shape: int) -> NodeAmounts | None:
        """None where the node of a core or GPU is not known, or a node is in several packages."""
        if shape not in self._nodes:
            host = self._planner.inventory(shape).host
            classes = [members[0] for members in self._planner.core_classes(shape)]
            numbers = map(len, self._planner.core_classes(shape))
            gpus = self._planner.gpus(shape)
            self._nodes[shape] = node_amounts(host, list(zip(classes, numbers, strict=True)), gpus)
        return self._nodes[shape]
