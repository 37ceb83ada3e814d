"""FirstTerms: the terms of a cost that a set of nodes alone decides, with the GPUs that suit it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from homenode.plan.bit_sets import members
from homenode.plan.search.problem import Home, SearchProblem


@dataclass(frozen=True, slots=True)
class HomeGpus:
    """The GPUs (bits) of one home that may be chosen, by the functions that each brings to it.
    nics: homes in other packages of the VM's NICs that are paired with each of these."""

    home: Home | None
    nics: tuple[Home, ...]
    by_weight: tuple[tuple[int, int], ...]
    count: int

    def device_class(self, packages: Sequence[int]) -> int:
        """The class of one of these GPUs with its NICs; 0 where no node is known."""
        homes = self.nics if self.home is None else (self.home, *self.nics)
        return max([_nearest(home, packages) for home in homes], default=0)


@dataclass(frozen=True, slots=True)
class GpuGroup:
    """GPUs of which all that the VM gets may be chosen. homes: its GPUs by home. homeless: how many
    are of no known node. nodes: (count, nodes with so many of them)."""

    homes: tuple[HomeGpus, ...]
    homeless: int
    nodes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, homes: Iterable[HomeGpus]) -> "GpuGroup":
        """Those of these homes."""
        its = tuple(homes)
        count_of_node: dict[int, int] = {}
        for one in its:
            if one.home is not None:
                count_of_node[one.home.node] = count_of_node.get(one.home.node, 0) + one.count
        homeless = sum(one.count for one in its if one.home is None)
        return cls(its, homeless, _by_count(count_of_node))

    def away(self, count: int, nodes: int) -> int:
        """How many are away from home, at least, if `count` are chosen for these nodes (bits)."""
        here = sum(each * (homes & nodes).bit_count() for each, homes in self.nodes)
        return max(0, count - self.homeless - here)

    def least_class(self, count: int, packages: Sequence[int]) -> int | None:
        """The class of the worst of the `count` that are nearest to these packages; None where
        there are not so many."""
        for limit, number in sorted((one.device_class(packages), one.count) for one in self.homes):
            count -= number
            if count <= 0:
                return limit
        return None

    def near(self, nodes: int) -> "tuple[_Homes, _Homes]":
        """(GPUs at home on these nodes or anywhere, the others)."""
        at_home: _Homes = []
        others: _Homes = []
        for one in self.homes:
            (at_home if one.home is None or one.home.node & nodes else others).append(one)
        return at_home, others


_Homes = list[HomeGpus]


MOST_WORK = 6_000
"""Families of sets of nodes that branching.py looks at for one problem; one whose devices are
compared counts for more."""


class FirstTerms:
    """What a set of nodes comes to with the GPUs that suit it best: the terms that the set alone
    decides. groups: of one of them all GPUs are chosen; none where none is to be chosen.
    work_left: of MOST_WORK."""

    def __init__(self, problem: SearchProblem) -> None:
        self.problem = problem
        self.work_left = MOST_WORK
        options = problem.options
        self.groups: tuple[GpuGroup, ...] = ()
        if options.count:
            self.groups = tuple(_group(problem, gpus) for gpus in options.groups)
        self._least: dict[int, int] = {}
        self._near: dict[int, tuple[int, tuple[GpuGroup, ...]]] = {}
        named: dict[int, int] = {}
        for one in problem.named:
            if one.is_gpu:
                named[one.home.node] = named.get(one.home.node, 0) + 1
        self._named_nowhere = named.pop(0, 0)
        self._named_homes = _by_count(named)
        pulling = {id(one.home): one.home for one in problem.named if one.affinities}
        self._pulling = tuple(pulling.values())
        self._compares_devices = bool(problem.named or options.count)
        self._compares_classes = "device_class" in problem.first
        self.named_rows = tuple(
            sum(device.home.to_node[node] for device in problem.named)
            for node in range(len(problem.supplies))
        )

    def least_class(self, packages: int) -> int:
        """The least class of the worst device that nodes of these packages (bits) can come to."""
        if not self._compares_devices:
            return 0
        known = self._least.get(packages)
        if known is None:
            known = self._least[packages] = self._class(self.groups, tuple(members(packages)))
        return known

    def _class(self, groups: Sequence[GpuGroup], packages: Sequence[int]) -> int:
        count = self.problem.options.count
        worst = max((_nearest(home, packages) for home in self._pulling), default=0)
        found = [group.least_class(count, packages) for group in groups]
        return max(worst, min((one for one in found if one is not None), default=0))

    def device_class(self, nodes: int) -> int:
        """The class of the worst device, for a set of nodes (bits)."""
        return self._class_and_groups(nodes)[0] if self._compares_devices else 0

    def near_groups(self, nodes: int) -> tuple[GpuGroup, ...]:
        """The groups of which enough GPUs are near enough to these nodes (bits), with those alone;
        none where GPUs must be at home and are not."""
        return self._class_and_groups(nodes)[1]

    def home_groups(self, nodes: int) -> list[GpuGroup]:
        """Those of them that leave the fewest GPUs away from home, where that counts."""
        groups, count = self.near_groups(nodes), self.problem.options.count
        if not self._compares_classes or len(groups) < 2:
            return list(groups)
        away = [group.away(count, nodes) for group in groups]
        least = min(away)
        return [group for group, each in zip(groups, away, strict=True) if each == least]

    def _class_and_groups(self, nodes: int) -> tuple[int, tuple[GpuGroup, ...]]:
        problem = self.problem
        packages = problem.distances.packages_of(nodes)
        # GPUs that must be at home are chosen by the nodes, others by their packages alone.
        key = nodes if problem.requires_home else packages
        known = self._near.get(key)
        if known is None:
            groups, chosen = self.groups, tuple(members(packages))
            if problem.requires_home:
                groups = tuple(GpuGroup.of(group.near(nodes)[0]) for group in groups)
            # What named devices cost anyway costs nothing more.
            limit = self._class(groups, chosen)
            found = []
            for group in groups:
                near = group.homes
                if self._compares_classes:
                    near = tuple(one for one in near if one.device_class(chosen) <= limit)
                if sum(one.count for one in near) >= problem.options.count:
                    found.append(group if len(near) == len(group.homes) else GpuGroup.of(near))
            known = self._near[key] = limit, tuple(found)
        return known

    def away(self, nodes: int) -> int:
        """GPUs away from home, for a set of nodes (bits) that near_groups() has groups for."""
        away = self._named_nowhere
        for each, homes in self._named_homes:
            away += each * (homes & ~nodes).bit_count()
        count = self.problem.options.count
        if not count:
            return away
        return away + min(group.away(count, nodes) for group in self.near_groups(nodes))

    def of(self, nodes: int, most: tuple[int, ...] = ()) -> tuple[int, ...] | None:
        """The first terms of a set of nodes; None where a GPU must not be away and is, and where
        they are more than `most`."""
        problem = self.problem
        packages = problem.distances.packages_of(nodes)
        if problem.options.count and not self.near_groups(nodes):
            return None
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
                value = self.device_class(nodes)
            elif name == "packages_spanned":
                value = packages.bit_count()
            elif name == "gpus_away_from_home":
                value = away
            elif name == "vcpus_beyond_cores":
                value = problem.beyond_cores(members(nodes))
            else:
                value = -nodes.bit_count()
            if is_tied and value != most[i]:
                if value > most[i]:
                    return None
                is_tied = False
            result.append(value)
        return tuple(result)


def _nearest(home: Home, packages: Sequence[int]) -> int:
    """Package-level distance to the nearest of these packages."""
    return min([home.to_package[package] for package in packages])


def _group(problem: SearchProblem, gpus: int) -> GpuGroup:
    """These GPUs (bits)."""
    by_home: dict[tuple[int, ...], tuple[Home | None, tuple[Home, ...], dict[int, int]]] = {}
    for number in members(gpus):
        home, nics = problem.gpu_homes[number], problem.nic_homes[number]
        key = (id(home), *map(id, nics))
        weights = by_home.setdefault(key, (home, nics, {}))[2]
        # Functions that are near to nothing do not count.
        weight = 0 if home is None else problem.options.gpus[number].weight
        weights[weight] = weights.get(weight, 0) | 1 << number
    return GpuGroup.of(
        HomeGpus(
            home, nics, tuple(sorted(weights.items())), sum(g.bit_count() for g in weights.values())
        )
        for home, nics, weights in by_home.values()
    )


def _by_count(count_of_node: dict[int, int]) -> tuple[tuple[int, int], ...]:
    """(count, nodes with so many) from the count of each node (a bit)."""
    nodes: dict[int, int] = {}
    for node, count in count_of_node.items():
        nodes[count] = nodes.get(count, 0) | node
    return tuple(nodes.items())
