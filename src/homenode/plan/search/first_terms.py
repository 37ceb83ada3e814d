"""FirstTerms: the terms of a cost that a set of nodes alone decides, with the GPUs that suit it."""

from collections.abc import Iterator
from dataclasses import dataclass

from homenode.plan.search.distances import members
from homenode.plan.search.problem import Home, SearchProblem


@dataclass(frozen=True, slots=True)
class HomeGpus:
    """The GPUs (bits) of one home that may be chosen, by the functions that each brings."""

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


class FirstTerms:
    """What a set of nodes comes to with the GPUs that suit it best: the terms that the set alone
    decides. homes: GPUs to choose from by home. partitions: (GPUs, (home, functions there) …) of
    each set that may be chosen."""

    def __init__(self, problem: SearchProblem) -> None:
        self.problem = problem
        options = problem.options
        self.homes: tuple[HomeGpus, ...] = ()
        self.partitions: tuple[tuple[int, tuple[tuple[Home | None, int], ...]], ...] = ()
        if options.count:
            self.homes = _homes(problem)
            self.partitions = tuple(
                (gpus, _functions_at(problem, gpus)) for gpus in options.partitions or ()
            )
        self._classes: dict[int, tuple[int, int]] = {}
        named: dict[int, int] = {}
        for one in problem.named:
            if one.is_gpu:
                named[one.home.node] = named.get(one.home.node, 0) + 1
        self._named_nowhere = named.pop(0, 0)
        self._named_homes = _by_count(named)
        self._open_homes = _by_count(
            {one.home.node: one.count for one in self.homes if one.home is not None}
        )
        self._homeless = sum(one.count for one in self.homes if one.home is None)
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

        def nearest(home: Home | None) -> int:
            return 0 if home is None else min(home.to_package[package] for package in chosen)

        pulling = {id(one.home): one.home for one in problem.named if one.affinities}
        worst = max(map(nearest, pulling.values()), default=0)
        count = problem.options.count
        if not count:
            return worst, worst
        # What named devices cost anyway costs nothing more.
        if self.partitions:
            least = min(max(nearest(home) for home, _ in homes) for _, homes in self.partitions)
            return max(worst, least), max(worst, least)
        for limit, number in sorted((nearest(one.home), one.count) for one in self.homes):
            count -= number
            if count <= 0:
                return max(worst, limit), max(worst, limit)
        return worst, worst

    def away(self, nodes: int) -> int:
        """GPUs away from home, for a set of nodes (bits)."""
        away = self._named_nowhere
        for each, homes in self._named_homes:
            away += each * (homes & ~nodes).bit_count()
        count = self.problem.options.count
        if not count:
            return away
        if self.partitions:
            return away + min(self.set_away(gpus, nodes) for gpus in self.near_partitions(nodes))
        here = sum(each * (homes & nodes).bit_count() for each, homes in self._open_homes)
        return away + max(0, count - self._homeless - here)

    def near_homes(self, nodes: int) -> tuple[list[HomeGpus], list[HomeGpus]]:
        """(GPUs to choose from at home on these nodes or anywhere, others that are near enough)."""
        packages = self.problem.distances.packages_of(nodes)
        limit = self._class_and_limit(packages)[1]
        chosen = tuple(members(packages))
        at_home, others = [], []
        for one in self.homes:
            if one.home is None or one.home.node & nodes:
                at_home.append(one)
            elif min(one.home.to_package[package] for package in chosen) <= limit:
                others.append(one)
        return at_home, others

    def near_partitions(self, nodes: int) -> Iterator[int]:
        """Sets that may be chosen and are near enough."""
        packages = self.problem.distances.packages_of(nodes)
        limit = self._class_and_limit(packages)[1]
        chosen = tuple(members(packages))
        for gpus, homes in self.partitions:
            if all(
                home is None or min(home.to_package[package] for package in chosen) <= limit
                for home, _ in homes
            ):
                yield gpus

    def set_away(self, gpus: int, nodes: int) -> int:
        homes = (self.problem.gpu_homes[number] for number in members(gpus))
        return sum(home is not None and not home.node & nodes for home in homes)

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


def _homes(problem: SearchProblem) -> tuple[HomeGpus, ...]:
    """The GPUs to choose from, by home."""
    by_home: dict[int, tuple[Home | None, dict[int, int]]] = {}
    for gpu in problem.options.gpus:
        if problem.options.open >> gpu.number & 1:
            home = problem.gpu_homes[gpu.number]
            weights = by_home.setdefault(id(home), (home, {}))[1]
            weights[gpu.weight] = weights.get(gpu.weight, 0) | 1 << gpu.number
    return tuple(
        HomeGpus(home, tuple(sorted(weights.items())), sum(g.bit_count() for g in weights.values()))
        for home, weights in by_home.values()
    )


def _functions_at(problem: SearchProblem, gpus: int) -> tuple[tuple[Home | None, int], ...]:
    """Functions that these GPUs bring, by home."""
    there: dict[int, tuple[Home | None, int]] = {}
    for number in members(gpus):
        home = problem.gpu_homes[number]
        weight = problem.options.gpus[number].weight
        there[id(home)] = (home, there.get(id(home), (home, 0))[1] + weight)
    return tuple(there.values())


def _by_count(count_of_node: dict[int, int]) -> tuple[tuple[int, int], ...]:
    """(count, nodes with so many) from the count of each node (a bit)."""
    nodes: dict[int, int] = {}
    for node, count in count_of_node.items():
        nodes[count] = nodes.get(count, 0) | node
    return tuple(nodes.items())
