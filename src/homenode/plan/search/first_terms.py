"""FirstTerms: the terms of a cost that a set of nodes alone decides, with the GPUs that suit it."""

from collections.abc import Sequence
from dataclasses import dataclass

from homenode.plan.search.distances import members
from homenode.plan.search.problem import Home, SearchProblem


@dataclass(frozen=True, slots=True)
class HomeGpus:
    """The GPUs (bits) of one home that may be chosen, by the functions that each brings to it."""

    home: Home | None
    by_weight: tuple[tuple[int, int], ...]
    count: int

    def first(self, number: int) -> tuple[int, int, tuple[int, int] | None]:
        """(sure GPUs, their weight with the tied ones, (tied GPUs, how many of them))."""
        sure, weight = 0, 0
        for each, gpus in self.by_weight:
            here = gpus.bit_count()
            if here > number:
                return sure, weight + each * number, (gpus, number) if number else None
            sure |= gpus
            weight += each * here
            number -= here
        return sure, weight, None


@dataclass(frozen=True, slots=True)
class GpuGroup:
    """GPUs of which all that the VM gets may be chosen. homes: its GPUs by home. homeless: how many
    are of no known node. nodes: (count, nodes with so many of them)."""

    homes: tuple[HomeGpus, ...]
    homeless: int
    nodes: tuple[tuple[int, int], ...]

    def away(self, count: int, nodes: int) -> int:
        """How many are away from home, at least, if `count` are chosen for these nodes (bits)."""
        here = sum(each * (homes & nodes).bit_count() for each, homes in self.nodes)
        return max(0, count - self.homeless - here)

    def least_class(self, count: int, packages: Sequence[int]) -> int:
        """The class of the worst of the `count` that are nearest to these packages."""
        for limit, number in sorted(
            (_nearest(one.home, packages), one.count) for one in self.homes
        ):
            count -= number
            if count <= 0:
                return limit
        return 0

    def near(self, nodes: int, packages: Sequence[int], limit: int) -> "tuple[_Homes, _Homes]":
        """(GPUs at home on these nodes or anywhere, others whose class is no worse than that)."""
        at_home, others = [], []
        for one in self.homes:
            if one.home is None or one.home.node & nodes:
                at_home.append(one)
            elif _nearest(one.home, packages) <= limit:
                others.append(one)
        return at_home, others


_Homes = list[HomeGpus]


class FirstTerms:
    """What a set of nodes comes to with the GPUs that suit it best: the terms that the set alone
    decides. groups: of one of them all GPUs are chosen; none where none is to be chosen."""

    def __init__(self, problem: SearchProblem) -> None:
        self.problem = problem
        options = problem.options
        self.groups: tuple[GpuGroup, ...] = ()
        if options.count:
            self.groups = tuple(_group(problem, gpus) for gpus in options.groups)
        self._classes: dict[int, tuple[int, int]] = {}
        self._near: dict[int, tuple[GpuGroup, ...]] = {}
        named: dict[int, int] = {}
        for one in problem.named:
            if one.is_gpu:
                named[one.home.node] = named.get(one.home.node, 0) + 1
        self._named_nowhere = named.pop(0, 0)
        self._named_homes = _by_count(named)
        self._compares_devices = bool(problem.named or options.count)
        self.named_rows = tuple(
            sum(device.home.to_node[node] for device in problem.named)
            for node in range(len(problem.supplies))
        )

    def device_class(self, packages: int) -> int:
        """The class of the worst device, for a set of packages (bits)."""
        return self._class_and_limit(packages)[0]

    def _class_and_limit(self, packages: int) -> tuple[int, int]:
        """(class of the worst device, greatest class of a chosen GPU)."""
        if not self._compares_devices:
            return 0, 0
        known = self._classes.get(packages)
        if known is None:
            known = self._classes[packages] = self._device_class(packages)
        return known

    def _device_class(self, packages: int) -> tuple[int, int]:
        problem = self.problem
        chosen = tuple(members(packages))
        pulling = {id(one.home): one.home for one in problem.named if one.affinities}
        worst = max((_nearest(home, chosen) for home in pulling.values()), default=0)
        count = problem.options.count
        # What named devices cost anyway costs nothing more.
        least = min((group.least_class(count, chosen) for group in self.groups), default=0)
        return max(worst, least), max(worst, least)

    def away(self, nodes: int) -> int:
        """GPUs away from home, for a set of nodes (bits)."""
        away = self._named_nowhere
        for each, homes in self._named_homes:
            away += each * (homes & ~nodes).bit_count()
        count = self.problem.options.count
        if not count:
            return away
        return away + min(group.away(count, nodes) for group in self.near_groups(nodes))

    def near_groups(self, nodes: int) -> tuple[GpuGroup, ...]:
        """The groups of which GPUs near enough to these nodes (bits) can be chosen."""
        packages = self.problem.distances.packages_of(nodes)
        known = self._near.get(packages)
        if known is None:
            limit, chosen = self._class_and_limit(packages)[1], tuple(members(packages))
            count = self.problem.options.count
            known = self._near[packages] = tuple(
                group for group in self.groups if group.least_class(count, chosen) <= limit
            )
        return known

    def near_homes(self, group: GpuGroup, nodes: int) -> tuple[_Homes, _Homes]:
        """(GPUs of the group at home on these nodes or anywhere, others that are near enough)."""
        packages = self.problem.distances.packages_of(nodes)
        return group.near(nodes, tuple(members(packages)), self._class_and_limit(packages)[1])

    def of(self, nodes: int, most: tuple[int, ...] = ()) -> tuple[int, ...] | None:
        """The first terms of a set of nodes; None where a GPU must not be away and is, and where
        they are more than `most`."""
        problem = self.problem
        packages = problem.distances.packages_of(nodes)
        away = self.away(nodes) if self._compares_devices else 0
        if away and problem.requires_home:
            return None
        result: list[int] = []
        is_tied = bool(most)
        for i, name in enumerate(problem.first):
            if name == "nodes_spanned":
                value = nodes.bit_count()
            elif name == "node_distance":
                value = problem.distances.worst(nodes)
            elif name == "device_class":
                value = self.device_class(packages)
            elif name == "packages_spanned":
                value = packages.bit_count()
            elif name == "gpus_away_from_home":
                value = away
            else:
                value = -nodes.bit_count()
            if is_tied and value != most[i]:
                if value > most[i]:
                    return None
                is_tied = False
            result.append(value)
        return tuple(result)


def _nearest(home: Home | None, packages: Sequence[int]) -> int:
    """Package-level distance to the nearest of these packages; 0 where no node is known."""
    return 0 if home is None else min([home.to_package[package] for package in packages])


def _group(problem: SearchProblem, gpus: int) -> GpuGroup:
    """These GPUs (bits)."""
    by_home: dict[int, tuple[Home | None, dict[int, int]]] = {}
    for number in members(gpus):
        home = problem.gpu_homes[number]
        weights = by_home.setdefault(id(home), (home, {}))[1]
        # Functions that are near to nothing do not count.
        weight = 0 if home is None else problem.options.gpus[number].weight
        weights[weight] = weights.get(weight, 0) | 1 << number
    homes = tuple(
        HomeGpus(home, tuple(sorted(weights.items())), sum(g.bit_count() for g in weights.values()))
        for home, weights in by_home.values()
    )
    return GpuGroup(
        homes,
        sum(one.count for one in homes if one.home is None),
        _by_count({one.home.node: one.count for one in homes if one.home is not None}),
    )


def _by_count(count_of_node: dict[int, int]) -> tuple[tuple[int, int], ...]:
    """(count, nodes with so many) from the count of each node (a bit)."""
    nodes: dict[int, int] = {}
    for node, count in count_of_node.items():
        nodes[count] = nodes.get(count, 0) | node
    return tuple(nodes.items())
