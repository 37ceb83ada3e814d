"""Question: one search for nodes, as numbers: what each node has, and what the VM needs.

place.py asks one question per rung of the ladder; nodes.py answers it.
"""

from dataclasses import dataclass, field, replace

from homenode.plan.request import Balance, Policy
from homenode.plan.search.cost import Cost, packed
from homenode.plan.search.near import members, neighbours
from homenode.plan.search.supply import Draw, Supply
from homenode.topology import LOCAL_DISTANCE


@dataclass(frozen=True, slots=True)
class Pull:
    """How far one node that holds devices is from each node of the question, in its order.

    by_package: package-level SLIT distance. exact: SLIT.
    """

    by_package: tuple[int, ...]
    exact: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """Nodes are positions in `supplies` here, which ascend by node index.

    groups: sibling groups that the VM needs. pages: pages that follow the groups, 0 where memory is
    no limit. huge: pages are huge ones, so pools matter. equal: the same number on every node.
    most_nodes: at most so many. between: shape (nodes, nodes), SLIT. packages: one number per node.
    device_pages: (guest cell, pages) of each memory device, beside `pages`; the n-th cell is on the
    n-th of the nodes chosen.
    """

    policy: Policy
    balance: Balance | None
    supplies: tuple[Supply, ...]
    groups: int
    pages: int
    huge: bool
    equal: bool
    most_nodes: int
    between: tuple[tuple[int, ...], ...]
    packages: tuple[int, ...]
    pulls: tuple[Pull, ...]
    others: tuple[Pull, ...]
    hosts_isolation: bool
    device_pages: tuple[tuple[int, int], ...] = ()
    _draws: dict[tuple[int, int], Draw] = field(default_factory=dict, compare=False, repr=False)
    _weights: dict[tuple[int, int, bool], int] = field(
        default_factory=dict, compare=False, repr=False
    )
    _linked: dict[int, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)

    def key(self) -> tuple[object, ...]:
        """Equal for questions of one host of which all or none have an answer."""
        have = tuple(supply.groups for supply in self.supplies)
        return have, self.groups, self.pages, self.device_pages, self.equal, self.most_nodes

    def capacity(self, node: int, groups_each: int | None = None) -> int:
        """Groups that the node can hold, as its memory allows.

        groups_each: the equal share asked of every node; the answer is then that or 0.
        """
        supply = self.supplies[node]
        pages = supply.room.pages if self.pages else None
        if groups_each is None:
            if pages is None:
                return supply.groups
            held = min(supply.groups, pages * self.groups // self.pages)
            alone = held >= self.groups and pages < self.pages_of(self.groups)
            return self.groups - 1 if alone else held
        fits = supply.groups >= groups_each and (
            pages is None or pages >= self.pages_of(groups_each)
        )
        return groups_each if fits else 0

    def linked(self, within: int) -> tuple[int, ...]:
        """For each node, the others (bits) no farther than `within`. Remembered, as draws are."""
        if within not in self._linked:
            self._linked[within] = neighbours(self.between, within)
        return self._linked[within]

    def pages_of(self, groups: int) -> int:
        """Pages that a node with so many groups needs at least: what follows them, rounded up, and
        of the memory devices all where it is the only node, else the least of any cell."""
        more = 0
        if self.device_pages and groups == self.groups:
            more = sum(pages for _, pages in self.device_pages)
        elif self.device_pages and self.equal and self.groups % groups == 0:
            more = min(self.devices_of_cells(self.groups // groups))
        return self._share(groups) + more

    def _share(self, groups: int) -> int:
        return -(-self.pages * groups // self.groups)

    def devices_of_cells(self, cells: int) -> tuple[int, ...]:
        """Pages of each cell's memory devices; those of a cell that is no more are cell 0's."""
        held = [0] * cells
        for cell, pages in self.device_pages:
            held[cell if cell < cells else 0] += pages
        return tuple(held)

    def short_of_devices(self, split: tuple[tuple[int, int], ...]) -> dict[int, int]:
        """Nodes of a split that do not hold their cell's memory devices beside their share, with
        the pages of these that pages_of does not count yet."""
        if not self.device_pages:
            return {}
        short: dict[int, int] = {}
        for (node, groups), held in zip(split, self.devices_of_cells(len(split)), strict=True):
            pages = self.supplies[node].room.pages
            if pages is not None and pages < self._share(groups) + held:
                short[node] = held - (self.pages_of(groups) - self._share(groups))
        return short

    def with_less_room(self, kept_free: dict[int, int]) -> "Question":
        """The question where some nodes have so many pages less to give."""
        supplies = list(self.supplies)
        for node, pages in kept_free.items():
            room = supplies[node].room
            left = None if room.pages is None else max(0, room.pages - pages)
            supplies[node] = replace(supplies[node], room=replace(room, pages=left))
        return replace(self, supplies=tuple(supplies), _draws={}, _weights={}, _linked={})

    def draw(self, node: int, groups: int) -> Draw:
        """What so many groups on the node come to. Remembered: a search asks for it often."""
        known = self._draws.get((node, groups))
        if known is None:
            known = self.supplies[node].draw(groups, self.hosts_isolation)
            self._draws[node, groups] = known
        return known

    def summed(self, node: int, groups: int) -> dict[str, int]:
        """The summed terms of the cost for so many groups on the node, by name."""
        supply, draw = self.supplies[node], self.draw(node, groups)
        sign = 1 if self.balance is Balance.PACK else -1
        short = self.pages_of(groups) - supply.room.pool_pages if self.huge and self.pages else 0
        return {
            "unisolated_cores": draw.unisolated,
            "llcs_spanned": draw.llcs,
            "pages_to_reserve": max(0, short),
            "balance_cores": sign * supply.whole_cores,
            "balance_memory": sign * supply.memory_free_bytes,
        }

    def weight(self, node: int, groups: int, is_extra: bool) -> int:
        """The node's share of the last terms of the cost, as one integer.

        Sums of weights over sets of equal size compare as the terms do, down to the indices: the
        least tuple of nodes is the one with the greatest sum of bits counted from the top.
        Remembered, as draws are.
        """
        known = self._weights.get((node, groups, is_extra))
        if known is None:
            count = len(self.supplies)
            bit = 1 << (count - 1 - node)
            main = packed(self.summed(node, groups), self.policy)
            known = ((main << count + 1) - bit << count + 1) - (bit if is_extra else 0)
            self._weights[node, groups, is_extra] = known
        return known

    def cost(self, split: tuple[tuple[int, int], ...]) -> Cost:
        """The whole cost of (node, groups) pairs, ascending by node."""
        nodes = [node for node, _ in split]
        sums = dict.fromkeys(
            ("unisolated_cores", "llcs_spanned", "pages_to_reserve", "balance_cores",
             "balance_memory"), 0,
        )  # fmt: skip
        extra_packages = 0
        for node, groups in split:
            for name, value in self.summed(node, groups).items():
                sums[name] += value
            extra_packages += self.draw(node, groups).packages - 1
        return Cost(
            device_class=self.worst_pull(nodes, "by_package"),
            nodes_spanned=len(nodes),
            node_distance=max(
                (self.between[a][b] for a in nodes for b in nodes if a < b), default=LOCAL_DISTANCE
            ),
            packages_spanned=len({self.packages[node] for node in nodes}) + extra_packages,
            device_distance=self.worst_pull(nodes, "exact"),
            other_device_distance=max(
                (min(pull.exact[node] for node in nodes) for pull in self.others), default=0
            ),
            unevenness=sum(groups * groups for _, groups in split),
            nodes=tuple(self.supplies[node].cores.index for node in nodes),
            split=tuple(-groups for _, groups in split),
            **sums,
        )

    def worst_pull(self, nodes: list[int], level: str) -> int:
        """Distance of the worst pulled device to its nearest of these nodes; 0 without devices."""
        rows = [pull.exact if level == "exact" else pull.by_package for pull in self.pulls]
        return max((min(row[node] for node in nodes) for row in rows), default=0)


def within(rows: list[tuple[int, ...]], limit: int, among: int) -> tuple[int, ...]:
    """For each row of distances, the nodes of `among` (bits) no farther than `limit`; distinct."""
    nodes = tuple(members(among))
    masks = {sum(1 << node for node in nodes if row[node] <= limit) for row in rows}
    return tuple(sorted(masks))
