"""SearchProblem: one search for nodes and GPUs, as numbers: what there is, and what the VM needs.

place.py states one problem per rung of the ladder; solve.py solves it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

from homenode.indices import NodeIndex
from homenode.plan.layout import GuestCells
from homenode.plan.request import Balance, DeviceLocality, GuestRequest
from homenode.plan.search.cost import Cost, request_order
from homenode.plan.search.devices import DeviceOptions, GpuChoice
from homenode.plan.search.distances import UNREACHABLE, DistanceMatrix
from homenode.plan.search.ladder import MemoryRule, Rung
from homenode.plan.search.memory import (
    cell_pages_wanted,
    device_pages,
    overhead_bytes,
    page_size_bytes,
)
from homenode.plan.search.supply import AllocationCost, Supply, Usable
from homenode.topology import LOCAL_DISTANCE, Host

Split = tuple[tuple[int, int], ...]
"""(node position, sibling groups there), ascending by node."""


@dataclass(frozen=True, slots=True)
class Home:
    """A node that devices lie on, seen from the nodes of the problem.

    node: its bit, 0 where it has no PUs. to_package: package-level SLIT distance to each package.
    to_node: SLIT distance to each node.
    """

    node: int
    to_package: tuple[int, ...]
    to_node: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NamedDevice:
    """A device that the VM gets in any case."""

    home: Home
    pulls: bool
    is_gpu: bool


@dataclass(frozen=True, slots=True)
class SearchProblem:
    """Nodes are positions in `supplies` here, which ascend by node index; sets of them are bits.

    first, rest: names of the terms in the order of comparison. groups: sibling groups that the VM
    needs. pages: pages that follow the groups, what QEMU needs included; 0 where memory is no
    limit. pages_together: pages that the nodes must hold together, pages_anywhere: that all nodes
    must, 0 = no limit. huge: pages are huge ones, so pools matter. page_bytes: bytes of a page.
    equal: equal cells are preferred. most_nodes: at most so
    many. between: shape (nodes, nodes), SLIT. packages: one number per node, from 0. device_pages:
    (guest cell, pages) of each memory device, beside `pages`; the n-th cell is on the n-th of the
    nodes chosen. requires_home: no GPU may be away from its node. gpu_nodes: nodes with free GPUs.
    """

    pack: bool
    first: tuple[str, ...]
    rest: tuple[str, ...]
    supplies: tuple[Supply, ...]
    groups: int
    pages: int
    pages_together: int
    pages_anywhere: int
    huge: bool
    page_bytes: int
    equal: bool
    most_nodes: int
    between: tuple[tuple[int, ...], ...]
    packages: tuple[int, ...]
    hosts_isolation: bool
    options: DeviceOptions
    named: tuple[NamedDevice, ...]
    gpu_homes: tuple[Home | None, ...]
    compares_devices: bool
    requires_home: bool
    gpu_nodes: int
    device_pages: tuple[tuple[int, int], ...] = ()
    _costs: dict[tuple[int, int], AllocationCost] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def everything(self) -> int:
        """All nodes, as bits."""
        return (1 << len(self.supplies)) - 1

    def key(self) -> tuple[object, ...]:
        """Equal for problems of one host of which all or none have a solution."""
        have = tuple((supply.groups, supply.memory.pages) for supply in self.supplies)
        return (
            have, self.groups, self.pages, self.pages_together, self.pages_anywhere,
            self.device_pages, self.most_nodes,
        )  # fmt: skip

    def capacity(self, node: int, devices: int = 0) -> int:
        """Groups that the node can hold, as its memory allows. devices: pages of memory devices
        that it has to hold as well."""
        supply = self.supplies[node]
        pages = supply.memory.pages
        if pages is None:
            return supply.groups
        if not self.pages:
            return supply.groups if pages - devices > 0 or not self.pages_together else 0
        return min(supply.groups, max(0, pages - devices) * self.groups // self.pages)

    def share(self, groups: int) -> int:
        """Pages of so many groups, rounded up."""
        return -(-self.pages * groups // self.groups)

    def holds_together(self, nodes: Sequence[int]) -> bool:
        """Whether the nodes have the memory that need not lie next to its vCPUs."""
        if not self.pages_together:
            return True
        pages = [self.supplies[node].memory.pages for node in nodes]
        known = [count for count in pages if count is not None]
        wanted = self.pages_together + sum(pages for _, pages in self.device_pages)
        return len(known) < len(pages) or sum(known) >= wanted

    def holds_with_others(self, nodes: int) -> bool:
        """Whether these nodes (bits) and as many more as are allowed have the memory that may lie
        on any of them."""
        if not self.pages_anywhere:
            return True
        own: list[int] = []
        others: list[int] = []
        for node, its in enumerate(self.supplies):
            pages = its.memory.pages
            count = self.pages_anywhere if pages is None else pages
            (own if nodes >> node & 1 else others).append(count)
        others.sort(reverse=True)
        more = max(0, self.most_nodes - len(own))
        return sum(own) + sum(others[:more]) >= self.pages_anywhere

    def devices_of_cells(self, cells: int) -> tuple[int, ...]:
        """Pages of each cell's memory devices; those of a cell that is no more are cell 0's."""
        held = [0] * cells
        for cell, pages in self.device_pages:
            held[cell if cell < cells else 0] += pages
        return tuple(held)

    def cost_of(self, node: int, groups: int) -> AllocationCost:
        """What so many groups on the node come to. Remembered: a search asks for it often."""
        known = self._costs.get((node, groups))
        if known is None:
            known = self.supplies[node].cost(groups, self.hosts_isolation)
            self._costs[node, groups] = known
        return known

    def short_pages(self, node: int, groups: int) -> int:
        """Huge pages that are still to be reserved there."""
        if not self.huge or not self.pages:
            return 0
        return max(0, self.share(groups) - self.supplies[node].memory.pool_pages)

    def cost(
        self, split: Split, gpus: GpuChoice, nearness: tuple[int, int], device_distance: int
    ) -> Cost:
        """The whole cost. nearness: (device class, GPUs away from home)."""
        nodes = [node for node, _ in split]
        unisolated, llcs, more_packages, short = 0, 0, 0, 0
        for node, groups in split:
            found = self.cost_of(node, groups)
            unisolated += found.unisolated
            llcs += found.llcs
            more_packages += found.packages - 1
            short += self.short_pages(node, groups)
        sign = 1 if self.pack else -1
        return Cost(
            device_class=nearness[0],
            packages_spanned=len({self.packages[node] for node in nodes}) + more_packages,
            gpus_away_from_home=nearness[1],
            nodes_spanned=len(nodes),
            node_distance=self.distance(nodes),
            device_distance=device_distance,
            gpu_link_groups=gpus.link_groups,
            gpu_sets_lost=gpus.sets_lost,
            unisolated_cores=unisolated,
            llcs_spanned=llcs,
            pages_to_reserve=short,
            balance_cores=sign * sum(self.supplies[node].whole_cores for node in nodes),
            balance_memory=sign
            * self.page_bytes
            * sum(self.supplies[node].memory.pages or 0 for node in nodes),
            unevenness=sum(groups * groups for _, groups in split),
            nodes=tuple(self.supplies[node].cores.index for node in nodes),
            split=tuple(-groups for _, groups in split),
            gpus=self.options.positions(gpus.gpus),
        )

    def distance(self, nodes: Sequence[int]) -> int:
        """The worst distance between two of these nodes."""
        return max(
            (self.between[a][b] for i, a in enumerate(nodes) for b in nodes[i + 1 :]),
            default=LOCAL_DISTANCE,
        )

    def unreachable(self) -> tuple[int, ...]:
        """For each node, the nodes (bits) that it cannot reach."""
        return tuple(
            sum(1 << other for other, distance in enumerate(row) if distance == UNREACHABLE)
            for row in self.between
        )


def search_problem(
    host: Host,
    request: GuestRequest,
    rung: Rung,
    free: Usable,
    supplies: tuple[Supply, ...],
    distances: DistanceMatrix,
    among: DistanceMatrix,
    options: DeviceOptions,
    homes: dict[NodeIndex, Home],
) -> SearchProblem:
    """The problem of one rung, with what each node supplies on it. distances: of the host's
    nodes; among: of those with PUs. homes: those known so far."""
    page = page_size_bytes(host, request)
    positions = [cores.position for cores in free.nodes]
    packages = dict.fromkeys(distances.packages[position] for position in positions)
    at = {node.index: position for position, node in enumerate(host.nodes)}
    bit = {cores.index: 1 << i for i, cores in enumerate(free.nodes)}

    def home(node: NodeIndex) -> Home:
        if node not in homes:
            by_package = distances.to_packages(at[node])
            homes[node] = Home(
                bit.get(node, 0),
                tuple(by_package[package] for package in packages),
                tuple(distances.between[at[node]][p] for p in positions),
            )
        return homes[node]

    ignores = request.device_locality is DeviceLocality.IGNORE
    free_gpu_nodes = (bit.get(gpu.home, 0) for gpu in options.gpus if gpu.home is not None)
    whole = cell_pages_wanted(host, request)
    by_cell = (
        rung.memory is not MemoryRule.ELSEWHERE
        and request.layout.cells is GuestCells.MIRRORED
        and not rung.mixed
    )
    devices = device_pages(host, request)
    if not by_cell:
        whole += sum(pages for _, pages in devices)
    if rung.keeps_memory and request.page_bytes is None:
        whole += -(-overhead_bytes(request) // page)
    first, rest = request_order(request)
    count = len(supplies)
    return SearchProblem(
        pack=request.balance is Balance.PACK or (request.balance is None and options.has_gpus),
        first=first,
        rest=rest,
        supplies=supplies,
        groups=rung.groups,
        pages=whole if rung.memory is MemoryRule.FOLLOWS else 0,
        pages_together=whole if rung.memory is MemoryRule.UNEVEN else 0,
        pages_anywhere=whole if rung.memory is MemoryRule.ELSEWHERE else 0,
        huge=request.page_bytes is not None,
        page_bytes=page,
        equal=rung.equal,
        most_nodes=count if request.max_nodes is None else min(count, request.max_nodes),
        between=among.between,
        packages=among.packages,
        hosts_isolation=bool(free.isolated),
        options=options,
        named=() if ignores else tuple(NamedDevice(home(n), p, g) for n, p, g in options.homes),
        gpu_homes=tuple(
            None if gpu.home is None or ignores else home(gpu.home) for gpu in options.gpus
        ),
        compares_devices="device_class" in first and not ignores,
        requires_home=request.device_locality is DeviceLocality.REQUIRE,
        gpu_nodes=0 if options.has_gpus else reduce(or_, free_gpu_nodes, 0),
        device_pages=devices if by_cell else (),
    )
