"""SearchDevices: the devices of one search, by their homes, and what a set of nodes is to them.

The GPUs to choose from count with the NICs of the VM that are paired with them. What is worked out
for some packages or nodes is remembered: the problems of all fallbacks have the same devices.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from operator import itemgetter, or_

from msgspec import Struct

from homenode.plan.bit_sets import members
from homenode.plan.devices.options import DeviceOptions
from homenode.plan.search.distances import DistanceMatrix


class Home(Struct, frozen=True, kw_only=True):
    """A node that devices lie on, seen from the nodes of the problem."""

    node: int  # its bit, 0 if it has no CPUs
    to_package: tuple[int, ...]  # package-level SLIT distance to each package
    to_node: tuple[int, ...]  # SLIT distance to each node
    # (class, the packages (bits) at that distance or nearer), ascending
    packages_by_class: tuple[tuple[int, int], ...]

    @classmethod
    def at_distances(cls, node: int, to_package: Sequence[int], to_node: Sequence[int]) -> "Home":
        """The home at these distances."""
        at: dict[int, int] = {}
        for package, distance in enumerate(to_package):
            at[distance] = at.get(distance, 0) | 1 << package
        classes = sorted(at)
        near_packages = zip(classes, accumulate(map(at.__getitem__, classes), or_), strict=True)
        return cls(
            node=node,
            to_package=tuple(to_package),
            to_node=tuple(to_node),
            packages_by_class=tuple(near_packages),
        )

    def class_to(self, packages: int) -> int:
        """Package-level distance to the nearest of these packages (bits)."""
        for distance, near_packages in self.packages_by_class:
            if near_packages & packages:
                return distance
        return 0


class NamedDevice(Struct, frozen=True, kw_only=True):
    """A device that the VM gets in any case."""

    home: Home
    pulls: bool  # whether its class counts
    is_gpu: bool


class HomeGpus(Struct, frozen=True, kw_only=True):
    """The GPUs (bits) of one home that may be chosen, by the functions that each brings to it."""

    home: Home | None
    # homes in other packages of the VM's NICs that are paired with each of these
    nics: tuple[Home, ...]
    by_weight: tuple[tuple[int, int], ...]
    count: int  # the GPUs
    weight: int  # their functions

    def device_class(self, packages: int) -> int:
        """The class of one of these GPUs with its NICs; 0 if no node is known."""
        gpu_class = 0 if self.home is None else self.home.class_to(packages)
        if not self.nics:
            return gpu_class
        return max(gpu_class, *(nic.class_to(packages) for nic in self.nics))


class GpuGroup(Struct, frozen=True, kw_only=True):
    """GPUs of which all that the VM gets may be chosen."""

    homes: tuple[HomeGpus, ...]  # its GPUs by home
    homeless: int  # how many are of no known node
    nodes: tuple[tuple[int, int], ...]  # (count, nodes with so many of them)

    @classmethod
    def from_homes(cls, homes: Iterable[HomeGpus]) -> "GpuGroup":
        """Return the devices of these homes."""
        home_gpus = tuple(homes)
        count_of_node: dict[int, int] = {}
        for home in home_gpus:
            if home.home is not None:
                count_of_node[home.home.node] = count_of_node.get(home.home.node, 0) + home.count
        homeless = sum(home.count for home in home_gpus if home.home is None)
        nodes_of_count: dict[int, int] = {}
        for node, count in count_of_node.items():
            nodes_of_count[count] = nodes_of_count.get(count, 0) | node
        return cls(homes=home_gpus, homeless=homeless, nodes=tuple(nodes_of_count.items()))

    def away(self, count: int, nodes: int) -> int:
        """How many are away from home, at least, if `count` are chosen for these nodes (bits)."""
        count_at_home = sum([number * (homes & nodes).bit_count() for number, homes in self.nodes])
        return max(0, count - self.homeless - count_at_home)

    def classes(self, packages: int) -> list[int]:
        """The device class of the GPUs of each home, for nodes of these packages (bits)."""
        return [home.device_class(packages) for home in self.homes]

    def least_class(self, count: int, classes: Sequence[int]) -> int | None:
        """The class of the worst of the `count` that are nearest; None if there are not so
        many. classes: of the GPUs of each home."""
        for limit, home in sorted(zip(classes, self.homes, strict=True), key=itemgetter(0)):
            count -= home.count
            if count <= 0:
                return limit
        return None

    def split_by_home(self, nodes: int) -> tuple[list[HomeGpus], list[HomeGpus]]:
        """(GPUs at home on these nodes or anywhere, the others)."""
        at_home: list[HomeGpus] = []
        far: list[HomeGpus] = []
        for home in self.homes:
            (at_home if home.home is None or home.home.node & nodes else far).append(home)
        return at_home, far


class SearchDevices(Struct, frozen=True, kw_only=True, dict=True):
    """The devices of a search, as its nodes see them."""

    options: DeviceOptions  # what there is to choose from
    named: tuple[NamedDevice, ...]  # what the VM gets in any case
    # of each of the GPUs to choose from, and nic_homes of the VM's NICs that are paired with it,
    # where they are of another package
    gpu_homes: tuple[Home | None, ...]
    nic_homes: tuple[tuple[Home, ...], ...]
    gpu_nodes: int  # nodes with free GPUs
    requires_home: bool  # no GPU may be away from its node
    compares_classes: bool  # the policy compares how near devices are
    distances: DistanceMatrix

    @cached_property
    def groups(self) -> tuple[GpuGroup, ...]:
        """Groups from one of which all GPUs are chosen; () if none is to be chosen."""
        if not self.options.count:
            return ()
        return tuple([self._group(gpus) for gpus in self.options.groups])

    def _group(self, gpus: int) -> GpuGroup:
        """These GPUs (bits)."""
        by_home: dict[tuple[int, ...], tuple[Home | None, tuple[Home, ...], dict[int, int]]] = {}
        for number in members(gpus):
            home, nics = self.gpu_homes[number], self.nic_homes[number]
            key = (id(home), *map(id, nics))
            weights = by_home.setdefault(key, (home, nics, {}))[2]
            # Functions that are near to nothing do not count.
            weight = 0 if home is None else self.options.gpus[number].weight
            weights[weight] = weights.get(weight, 0) | 1 << number
        return GpuGroup.from_homes(
            HomeGpus(
                home=home,
                nics=nics,
                by_weight=tuple(sorted(weights.items())),
                count=sum([gpus.bit_count() for gpus in weights.values()]),
                weight=sum([load * gpus.bit_count() for load, gpus in weights.items()]),
            )
            for home, nics, weights in by_home.values()
        )

    @cached_property
    def homes(self) -> tuple[Home, ...]:
        """The homes of all of them, each once."""
        homes_by_id = {id(device.home): device.home for device in self.named}
        homes_by_id |= {id(home): home for home in self.gpu_homes if home is not None}
        return tuple(homes_by_id.values())

    @cached_property
    def home_nodes(self) -> int:
        """The nodes (bits) that any of them lies on."""
        return sum({home.node for home in self.homes})

    @cached_property
    def named_rows(self) -> tuple[int, ...]:
        """The distances of what the VM gets in any case to each node, in sum."""
        nodes = range(len(self.distances.packages))
        return tuple([sum([device.home.to_node[node] for device in self.named]) for node in nodes])

    def rows(self, gpus: int) -> list[tuple[int, ...]]:
        """The distances to each node of what the VM gets in any case, and of these GPUs (bits)."""
        homes = (home for i, home in enumerate(self.gpu_homes) if gpus >> i & 1)
        named = [device.home.to_node for device in self.named]
        return named + [home.to_node for home in homes if home is not None]

    @cached_property
    def _named_gpus(self) -> dict[int, int]:
        """GPUs that the VM gets in any case, by their node (a bit, 0 = none with CPUs)."""
        count_of_node: dict[int, int] = {}
        for device in self.named:
            if device.is_gpu:
                count_of_node[device.home.node] = count_of_node.get(device.home.node, 0) + 1
        return count_of_node

    @cached_property
    def _pulling_homes(self) -> tuple[Home, ...]:
        return tuple({id(pull.home): pull.home for pull in self.named if pull.pulls}.values())

    @cached_property
    def _near_groups(self) -> dict[tuple[int, int], tuple[int, tuple[GpuGroup, ...]]]:
        return {}

    def least_class(self, packages: int) -> int:
        """The least class of the worst device that nodes of these packages (bits) can come to."""
        return self._class([(group, group.classes(packages)) for group in self.groups], packages)

    def _class(self, classes: Sequence[tuple[GpuGroup, list[int]]], packages: int) -> int:
        """The least that one of these groups, with its classes, can come to."""
        worst = max([home.class_to(packages) for home in self._pulling_homes], default=0)
        least_classes = [group.least_class(self.options.count, levels) for group, levels in classes]
        return max(worst, min([least for least in least_classes if least is not None], default=0))

    def device_class(self, nodes: int) -> int:
        """The class of the worst device, for a set of nodes (bits)."""
        return self._class_and_groups(nodes)[0]

    def near_groups(self, nodes: int) -> tuple[GpuGroup, ...]:
        """The groups of which enough GPUs are near enough to these nodes (bits), with those alone;
        none if GPUs must be at home and are not."""
        return self._class_and_groups(nodes)[1]

    def home_groups(self, nodes: int) -> Sequence[GpuGroup]:
        """Return the candidates with the fewest GPUs away from home, if these count."""
        groups, count = self.near_groups(nodes), self.options.count
        if not self.compares_classes or len(groups) < 2:
            return groups
        away = [group.away(count, nodes) for group in groups]
        least = min(away)
        return [group for group, number in zip(groups, away, strict=True) if number == least]

    def _class_and_groups(self, nodes: int) -> tuple[int, tuple[GpuGroup, ...]]:
        # GPUs that must be at home are chosen by the nodes, others by their packages alone.
        key = self.distances.packages_of(nodes), nodes if self.requires_home else 0
        if key not in self._near_groups:
            self._near_groups[key] = self._near_packages(*key)
        return self._near_groups[key]

    def _near_packages(self, packages: int, nodes: int) -> tuple[int, tuple[GpuGroup, ...]]:
        groups, near_groups = self.groups, []
        if self.requires_home:
            groups = tuple([GpuGroup.from_homes(group.split_by_home(nodes)[0]) for group in groups])
        classes = [(group, group.classes(packages)) for group in groups]
        # What named devices cost anyway costs nothing more.
        limit = self._class(classes, packages)
        for group, levels in classes:
            if self.compares_classes and max(levels, default=0) > limit:
                homes = zip(group.homes, levels, strict=True)
                group = GpuGroup.from_homes([gpus for gpus, worst in homes if worst <= limit])
            if sum([gpus.count for gpus in group.homes]) >= self.options.count:
                near_groups.append(group)
        return limit, tuple(near_groups)

    def away(self, nodes: int) -> int:
        """GPUs away from home, for a set of nodes (bits) that near_groups() has groups for."""
        away = sum([n for home, n in self._named_gpus.items() if not home & nodes])
        if not self.options.count:
            return away
        return away + min(
            [group.away(self.options.count, nodes) for group in self.near_groups(nodes)]
        )
