"""SearchProblem: the numbers of one search for nodes and GPUs: supply and demand.

PlacementSearch states one problem per fallback of the ladder; solve.py solves it.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property
from math import gcd

from msgspec import Struct

from homenode.cpuset import NodeIndex, list_members
from homenode.machine.topology import Host
from homenode.plan.allocations import Allocations
from homenode.plan.devices.options import DeviceOptions, GpuChoice
from homenode.plan.memory import (
    NodeMemory,
    cell_pages_wanted,
    compute_overhead,
    count_node_memory,
    get_page_size,
    list_device_pages,
)
from homenode.plan.placement import Cost, order
from homenode.plan.request import GuestRequest
from homenode.plan.search.devices import DeviceNode, DistanceMatrix, RequestedDevice, SearchDevices
from homenode.plan.search.ladder import Fallback, MemoryRule
from homenode.plan.search.supply import (
    AllocationCost,
    FreeCpus,
    Grouping,
    Supply,
    build_supply,
)
from homenode.plan.shape.guest_topology import may_share_sockets
from homenode.vm.layout import GuestCells, GuestPcie
from homenode.vm.plan_options import Balance, DeviceLocality, Policy

Split = tuple[tuple[int, int], ...]
"""(node position, sibling groups there), ascending by node."""


class SearchProblem(Struct, frozen=True, kw_only=True, dict=True):
    """Nodes are positions in `supplies` here, ascending by node index; sets of nodes are bits."""

    pack: bool
    first: tuple[str, ...]  # names of the terms in the order of comparison
    later: tuple[str, ...]  # names of the terms in the order of comparison
    even_splits: bool  # even splits come before nearness to devices
    huge: bool  # huge pages, so pools matter
    page_bytes: int  # bytes of a page
    most_nodes: int  # maximum number of nodes
    distances: DistanceMatrix  # between the nodes; their packages are numbered from 0
    hosts_isolation: bool
    devices: SearchDevices
    supplies: tuple[Supply, ...]
    memory: tuple[NodeMemory, ...]
    groups: int  # sibling groups that the VM needs
    equal: bool  # equal cells are preferred
    # pages that follow the groups, QEMU's memory included; 0 if memory is not limited
    pages: int = 0
    # pages that the chosen nodes must hold together, pages_anywhere: all nodes; 0 = no limit
    pages_together: int = 0
    pages_anywhere: int = 0
    # (guest cell, pages) of each memory device, next to `pages`; the n-th cell is on the n-th of
    # the nodes
    device_pages: tuple[tuple[int, int], ...] = ()
    # more groups than whole cores, so each node gives all of its whole cores first
    shares: bool = False

    @property
    def compares_devices(self) -> bool:
        """Whether device distances count, and the VM has devices."""
        return "device_distance" in self.later and bool(
            self.devices.named or self.devices.gpu_homes
        )

    @cached_property
    def capacities(self) -> tuple[int, ...]:
        """The groups that each node can hold, limited by its memory."""
        return tuple(self.capacity(node) for node in range(len(self.supplies)))

    @cached_property
    def whole_cores(self) -> tuple[int, ...]:
        """The free whole cores of each node, limited by its memory."""
        return tuple(
            min(supply.whole_cores, groups)
            for supply, groups in zip(self.supplies, self.capacities, strict=True)
        )

    @cached_property
    def eligible(self) -> int:
        """The nodes that can hold a group."""
        return sum(1 << node for node, groups in enumerate(self.capacities) if groups)

    @cached_property
    def groups_of_package(self) -> dict[int, int]:
        """The groups that the nodes of each package can hold."""
        return {
            package: sum(self.capacities[node] for node in list_members(nodes))
            for package, nodes in self.distances.nodes_of_package.items()
        }

    @cached_property
    def earlier_equals(self) -> tuple[int, ...]:
        """For each node, the last earlier node (as a bit) that is equal in all that a search
        compares; 0 if none is. Nodes with devices equal no other node."""
        of_devices, homes = self.devices.home_nodes, self.devices.homes
        between = self.distances.between
        result: list[int] = []
        last: dict[tuple[object, ...], list[int]] = {}
        for node, node_supply in enumerate(self.supplies):
            twin = 0
            if not of_devices >> node & 1 and len(node_supply.parts) == 1 and not self.device_pages:
                key = (
                    self.distances.packages[node],
                    self.devices.gpu_nodes >> node & 1,
                    self.capacities[node],
                    node_supply.groups,
                    node_supply.whole_cores,
                    self.memory[node].pages,
                    self.memory[node].pool_pages,
                    sum(between[node]),
                    tuple([home.to_node[node] for home in homes]),
                    self._shapes[node],
                )
                like = last.setdefault(key, [])
                for position, other in enumerate(like):
                    if _are_swappable(between, other, node):
                        twin = 1 << other
                        like[position] = node
                        break
                else:
                    like.append(node)
            result.append(twin)
        return tuple(result)

    @cached_property
    def _shapes(self) -> list[tuple[object, ...]]:
        """Keys that are equal for nodes whose groups cost the same."""
        return [node_supply.shape() for node_supply in self.supplies]

    def key(self) -> tuple[object, ...]:
        """Return a key, equal for problems of a host that are all solvable, or all unsolvable."""
        return (
            tuple([supply.groups for supply in self.supplies]),
            tuple([memory.pages for memory in self.memory]),
            self.groups,
            self.pages,
            self.pages_together,
            self.pages_anywhere,
            self.device_pages,
            self.most_nodes,
        )

    def beyond_cores(self, nodes: Iterable[int]) -> int:
        """Return the number of groups without a whole core on these nodes."""
        return max(0, self.groups - sum(self.whole_cores[node] for node in nodes))

    def capacity(self, node: int, devices: int = 0) -> int:
        """Return the groups that the node can hold, limited by its memory. devices: pages of memory
        devices on the same node."""
        supply = self.supplies[node]
        pages = self.memory[node].pages
        if pages is None:
            return supply.groups
        if not self.pages:
            return supply.groups if pages - devices > 0 or not self.pages_together else 0
        return min(supply.groups, max(0, pages - devices) * self.groups // self.pages)

    def share(self, groups: int) -> int:
        """Return the pages of a number of groups, rounded up."""
        return -(-self.pages * groups // self.groups)

    def holds_memory(self, nodes: int) -> bool:
        """Return whether the nodes (bits) have the memory that need not be local to its vCPUs; if
        it may be on any node, further allowed nodes count too."""
        needed_pages, pages = self._pages_of_nodes
        if not needed_pages:
            return True
        missing = needed_pages - sum([pages[node] for node in list_members(nodes)])
        further = self.most_nodes - nodes.bit_count()
        if missing <= 0 or not self.pages_anywhere or further <= 0:
            return missing <= 0
        other_pages = [page_count for node, page_count in enumerate(pages) if not nodes >> node & 1]
        return sum(sorted(other_pages, reverse=True)[:further]) >= missing

    @cached_property
    def _pages_of_nodes(self) -> tuple[int, list[int]]:
        """Return (pages that need not be local to vCPUs, free pages of each node for them)."""
        needed_pages = self.pages_together or self.pages_anywhere
        if needed_pages:
            needed_pages += sum(pages for _, pages in self.device_pages)
        return needed_pages, [
            needed_pages if node_memory.pages is None else node_memory.pages
            for node_memory in self.memory
        ]

    def devices_of_cells(self, cells: int) -> tuple[int, ...]:
        """The pages of each cell's memory devices; devices of removed cells count for cell 0."""
        owned = [0] * cells
        for cell, pages in self.device_pages:
            owned[cell if cell < cells else 0] += pages
        return tuple(owned)

    def first_terms(self, nodes: int, limit: tuple[int, ...] = ()) -> tuple[int, ...] | None:
        """Return the terms that a set of nodes (bits) alone decides, with its best GPUs; None if a
        GPU is away from home and must not be, or if they exceed `limit`."""
        devices = self.devices
        if devices.options.count and not devices.near_groups(nodes):
            return None
        away_count = devices.away(nodes)
        if away_count and devices.requires_home:
            return None
        result: list[int] = []
        is_tied = bool(limit)
        for i, name in enumerate(self.first):
            if name == "nodes_spanned":
                value = nodes.bit_count()
            elif name == "node_distance":
                value = self.distances.spread(nodes)[0]
            elif name == "distance_sum":
                value = self.distances.spread(nodes)[1]
            elif name == "device_class":
                value = devices.device_class(nodes)
            elif name == "packages_spanned":
                value = self.distances.packages_of(nodes).bit_count()
            elif name == "gpus_away_from_home":
                value = away_count
            elif name == "vcpus_beyond_cores":
                value = self.beyond_cores(list_members(nodes))
            else:
                value = -nodes.bit_count()
            if is_tied and value != limit[i]:
                if value > limit[i]:
                    return None
                is_tied = False
            result.append(value)
        return tuple(result)

    @cached_property
    def cost_of(self) -> Callable[[int, int], AllocationCost]:
        """The result of a number of groups on a node. Cached, as nodes of one shape repeat."""
        supplies, isolation = self.supplies, self.hosts_isolation
        first_of_shape: dict[tuple[object, ...], int] = {}
        first_like_node = [
            first_of_shape.setdefault(shape, node) for node, shape in enumerate(self._shapes)
        ]
        of_first = cache(lambda node, groups: supplies[node].cost(groups, isolation))
        return lambda node, groups: of_first(first_like_node[node], groups)

    def short_pages(self, node: int, groups: int) -> int:
        """Return the huge pages that still have to be reserved on a node."""
        if not self.huge or not self.pages:
            return 0
        return max(0, self.share(groups) - self.memory[node].pool_pages)

    def cost(
        self, split: Split, gpus: GpuChoice, nearness: tuple[int, int], device_distance: int
    ) -> Cost:
        """Return the complete cost. nearness: (device class, GPUs away from home)."""
        unisolated, llcs, more_packages, short = 0, 0, 0, 0
        for node, groups in split:
            node_cost = self.cost_of(node, groups)
            unisolated += node_cost.unisolated
            llcs += node_cost.llcs
            more_packages += node_cost.packages - 1
            short += self.short_pages(node, groups)
        sign, nodes = 1 if self.pack else -1, [node for node, _ in split]
        node_bits = sum([1 << node for node in nodes])
        max_distance, total = self.distances.spread(node_bits)
        free_pages = sum([self.memory[node].pages or 0 for node in nodes])
        return Cost(
            vcpus_beyond_cores=self.beyond_cores(nodes) if self.shares else 0,
            device_class=nearness[0],
            packages_spanned=self.distances.packages_of(node_bits).bit_count() + more_packages,
            gpus_away_from_home=nearness[1],
            nodes_spanned=len(nodes),
            node_distance=max_distance,
            distance_sum=total,
            guest_sockets=self.groups // gcd(*[groups for _, groups in split]),
            unevenness=sum([groups * groups for _, groups in split]),
            device_distance=device_distance,
            gpu_sets_lost=gpus.sets_lost,
            unisolated_cores=unisolated,
            llcs_spanned=llcs,
            pages_to_reserve=short,
            balance_cores=sign * sum([self.supplies[node].whole_cores for node in nodes]),
            balance_memory=sign * self.page_bytes * free_pages,
            nodes=tuple([self.supplies[node].cores.index for node in nodes]),
            split=tuple([-groups for _, groups in split]),
            gpus=self.devices.options.positions(gpus.gpus),
        )


class PlacementSearch(Struct, frozen=True, kw_only=True, dict=True):
    """The input of a search for one VM, and the problem of each fallback."""

    host: Host
    request: GuestRequest
    allocations: Allocations
    options: DeviceOptions
    distances: DistanceMatrix
    # without and with the cores that serve other emulators. Values shared by fallbacks are cached.
    free: tuple[FreeCpus, FreeCpus]

    @cached_property
    def _supplies(self) -> Callable[[bool, Grouping], tuple[Supply, ...]]:
        """The supply of each node with CPUs, by (whether the host keeps its core, grouping)."""
        free = self.free
        return cache(
            lambda keeps_core, grouping: tuple(
                [build_supply(cores, grouping) for cores in free[not keeps_core].nodes]
            )
        )

    @cached_property
    def _memory(self) -> Callable[[bool], dict[NodeIndex, NodeMemory]]:
        """The memory of each node, by whether the host keeps its reserve."""
        host, request = self.host, self.request
        return cache(lambda keeps: count_node_memory(host, request, keeps_reserve=keeps))

    def free_on(self, fallback: Fallback) -> FreeCpus:
        return self.free[not fallback.keeps_core]

    def memory_on(self, fallback: Fallback) -> dict[NodeIndex, NodeMemory]:
        return self._memory(fallback.keeps_memory)

    def supplies(self, fallback: Fallback) -> tuple[Supply, ...]:
        """Return the supply of each node with CPUs for a fallback."""
        has_service = self.free[0] is not self.free[1]
        return self._supplies(fallback.keeps_core or not has_service, fallback.grouping)

    def problem(self, fallback: Fallback) -> SearchProblem:
        host, request, options = self.host, self.request, self.options
        even_splits = not (fallback.shares or request.options.unequal_cells)
        first, rest_terms = order(
            request.options.policy,
            shows_pcie=request.layout.pcie is GuestPcie.HOST,
            even_splits=even_splits,
            # With mixed kinds each node has two cells. If CPUs are counted, fewer sockets could
            # give more vCPUs fewer cores: those of the node with the smaller share.
            counts_sockets=request.layout.cells is GuestCells.HOST
            and not (may_share_sockets(host, request) or fallback.mixed)
            and not (fallback.grouping.counts_pus or fallback.idle_siblings(request)),
            shares=fallback.shares,
        )
        page_bytes, memory = get_page_size(request), self.memory_on(fallback)
        pages, devices = cell_pages_wanted(request), list_device_pages(request)
        by_cell = (
            fallback.memory is not MemoryRule.ELSEWHERE
            and request.layout.cells is GuestCells.HOST
            and not fallback.mixed
        )
        if not by_cell:
            pages += sum(pages for _, pages in devices)
        if fallback.keeps_memory and request.page_bytes is None:
            pages += -(-compute_overhead(request) // page_bytes)
        return SearchProblem(
            pack=request.options.balance is Balance.PACK
            or (request.options.balance is None and options.has_gpus),
            first=first,
            later=rest_terms,
            even_splits=even_splits,
            huge=request.page_bytes is not None,
            page_bytes=page_bytes,
            most_nodes=self._most_nodes,
            distances=self._node_distances,
            hosts_isolation=bool(self.free[0].isolated),
            devices=self._devices,
            supplies=self.supplies(fallback),
            memory=tuple([memory[cores.index] for cores in self.free[0].nodes]),
            groups=fallback.groups,
            equal=fallback.equal and not fallback.shares and not fallback.idle_siblings(request),
            # Cells given by the user have their own memory sizes.
            pages=pages
            if fallback.memory is MemoryRule.FOLLOWS and not request.options.explicit_cells
            else 0,
            pages_together=pages if fallback.memory is MemoryRule.UNEVEN else 0,
            pages_anywhere=pages if fallback.memory is MemoryRule.ELSEWHERE else 0,
            device_pages=devices if by_cell else (),
            shares=fallback.shares,
        )

    @property
    def _most_nodes(self) -> int:
        """Return the user's limit of nodes; each guest cell needs at least one huge page."""
        request, node_count = self.request, len(self.free[0].nodes)
        most_nodes = min(node_count, request.options.max_nodes or node_count)
        has_cells = request.layout.cells is GuestCells.HOST and not request.options.explicit_cells
        if has_cells and request.page_bytes is not None:
            return min(most_nodes, max(1, request.memory_bytes // request.page_bytes))
        return most_nodes

    @cached_property
    def _node_distances(self) -> DistanceMatrix:
        """Return the distances between the nodes with CPUs."""
        return self.distances.among([cores.position for cores in self.free[0].nodes])

    @cached_property
    def _devices(self) -> SearchDevices:
        request, options = self.request, self.options
        ignores = request.options.device_locality is DeviceLocality.IGNORE
        bit = {cores.index: 1 << i for i, cores in enumerate(self.free[0].nodes)}
        of_gpus = {gpu.home for gpu in options.gpus if gpu.home is not None}
        homes = set() if ignores else {node for node, *_ in options.homes}
        if options.count and not ignores:
            homes |= of_gpus
        home = self._find_homes(homes, bit)
        gpus = options.gpus if options.count else ()
        gpu_homes = tuple(None if gpu.home is None else home.get(gpu.home) for gpu in gpus)
        return SearchDevices(
            options=options,
            named=()
            if ignores
            else tuple(
                RequestedDevice(home=home[node], pulls=pulls, is_gpu=is_gpu)
                for node, pulls, is_gpu in options.homes
            ),
            gpu_homes=gpu_homes,
            nic_homes=tuple(
                tuple(
                    nic
                    for node in sorted(gpu.nic_nodes)
                    if (nic := home.get(node)) is not None
                    and (gpu_home is None or gpu_home.to_package != nic.to_package)
                )
                for gpu, gpu_home in zip(gpus, gpu_homes, strict=True)
            ),
            gpu_nodes=sum(bit.get(node, 0) for node in of_gpus),
            requires_home=request.options.device_locality is DeviceLocality.REQUIRE,
            compares_classes=request.options.policy is not Policy.ANY,
            distances=self._node_distances,
        )

    def _find_homes(
        self, nodes: set[NodeIndex], bit: dict[NodeIndex, int]
    ) -> dict[NodeIndex, DeviceNode]:
        """Return the homes of these nodes, with distances to the nodes with CPUs."""
        distances, positions = self.distances, [cores.position for cores in self.free[0].nodes]
        packages = dict.fromkeys(distances.packages[position] for position in positions)
        homes = {}
        for position, node in enumerate(self.host.nodes):
            if node.index in nodes:
                by_package = distances.to_packages(position)
                homes[node.index] = DeviceNode.at_distances(
                    bit.get(node.index, 0),
                    [by_package[package] for package in packages],
                    [distances.between[position][other] for other in positions],
                )
        return homes


def _are_swappable(between: Sequence[Sequence[int]], a: int, b: int) -> bool:
    """Return whether two nodes have the same distance to every other node."""
    first, second = list(between[a]), list(between[b])
    first[a], first[b] = first[b], first[a]
    return first == second
