"""SearchDevices: the devices of one search by home node, and their distances to sets of nodes.

Candidate GPUs count together with the VM's NICs that are paired with them. Results are cached by
packages or nodes, as all fallbacks have the same devices.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from operator import itemgetter, or_

from msgspec import Struct

from homenode.cpuset import list_members
from homenode.machine.topology import LOCAL_DISTANCE, Host
from homenode.plan.devices.options import DeviceOptions

UNREACHABLE = 255


class DistanceMatrix(Struct, frozen=True, dict=True):
    """Distances between sets of nodes: the worse of the two directions of a pair. 255 means
    unreachable (ACPI 6.5, 5.2.17): such nodes are never used for the same VM."""

    # shape (nodes, nodes), symmetric, in the order of host.nodes; SLIT
    between: tuple[tuple[int, ...], ...]
    # package of each node; a node in no single package is its own package. Sets of nodes are bits
    # here.
    packages: tuple[int, ...]

    @cached_property
    def _spreads(self) -> dict[int, tuple[int, int]]:
        """The cache of spread()."""
        return {}

    @cached_property
    def nodes_of_package(self) -> dict[int, int]:
        nodes: dict[int, int] = {}
        for position, package in enumerate(self.packages):
            nodes[package] = nodes.get(package, 0) | 1 << position
        return nodes

    @cached_property
    def _from_packages(self) -> dict[int, dict[int, int]]:
        """Return the least distance between nodes of two packages; 10 within a package."""
        result = {}
        for home, nodes in self.nodes_of_package.items():
            rows = [self.between[node] for node in list_members(nodes)]
            least: dict[int, int] = {}
            for row in rows:
                for package, distance in zip(self.packages, row, strict=True):
                    least[package] = min(distance, least.get(package, distance))
            least[home] = LOCAL_DISTANCE
            result[home] = least
        return result

    def to_packages(self, position: int) -> dict[int, int]:
        """Return the package-level distance from a node to each package: 10 to its own, else the
        least distance between nodes of the two packages."""
        return self._from_packages[self.packages[position]]

    def among(self, positions: Sequence[int]) -> "DistanceMatrix":
        """Return the matrix of these nodes alone, their packages numbered from 0."""
        number: dict[int, int] = {}
        for position in positions:
            number.setdefault(self.packages[position], len(number))
        between = self.between
        if len(positions) < len(between):
            between = tuple(tuple(between[a][b] for b in positions) for a in positions)
        return DistanceMatrix(between, tuple(number[self.packages[p]] for p in positions))

    @cached_property
    def unreachable(self) -> tuple[int, ...]:
        """Return the nodes that each node cannot reach."""
        return tuple(
            sum(1 << other for other, distance in enumerate(row) if distance == UNREACHABLE)
            if UNREACHABLE in row
            else 0
            for row in self.between
        )

    def packages_of(self, nodes: int) -> int:
        """Return the packages (bits) of a set of nodes; packages are numbered from 0."""
        if len(self.nodes_of_package) == len(self.packages):
            return nodes
        of_package = self.nodes_of_package.items()
        return sum([1 << package for package, mask in of_package if mask & nodes])

    def spread(self, nodes: int) -> tuple[int, int]:
        """(the worst distance between two nodes of a set, 10 for one; the sum over all pairs)."""
        if nodes not in self._spreads:
            row_of, positions = self.between, list_members(nodes)
            pairs = [
                list(map(row_of[node].__getitem__, positions[:i]))
                for i, node in enumerate(positions)
            ][1:]
            self._spreads[nodes] = (
                max(map(max, pairs), default=LOCAL_DISTANCE),
                sum(map(sum, pairs)),
            )
        return self._spreads[nodes]


def build_distance_matrix(host: Host) -> DistanceMatrix:
    """Return the distances of a host, symmetric and complete."""
    packages = tuple(
        -1 - position if node.package is None else int(node.package)
        for position, node in enumerate(host.nodes)
    )
    return DistanceMatrix(host.mutual_distances, packages)


class DeviceNode(Struct, frozen=True, kw_only=True):
    """A node with devices, and its distances to the nodes of the problem."""

    node: int  # its bit, 0 if it has no CPUs
    to_package: tuple[int, ...]  # package-level SLIT distance to each package
    to_node: tuple[int, ...]  # SLIT distance to each node
    # (class, the packages (bits) at that distance or nearer), ascending
    packages_by_class: tuple[tuple[int, int], ...]

    @classmethod
    def at_distances(
        cls, node: int, to_package: Sequence[int], to_node: Sequence[int]
    ) -> "DeviceNode":
        """Return the home at these distances."""
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
        """Return the package-level distance to the nearest of these packages (bits)."""
        for distance, near_packages in self.packages_by_class:
            if near_packages & packages:
                return distance
        return 0


class RequestedDevice(Struct, frozen=True, kw_only=True):
    """A device that the VM gets whatever GPUs are chosen."""

    home: DeviceNode
    pulls: bool  # whether its class counts
    is_gpu: bool


class HomeGpus(Struct, frozen=True, kw_only=True):
    """The candidate GPUs (bits) of one home, by the number of functions that come with each."""

    home: DeviceNode | None
    # homes of the VM's NICs that are paired with each GPU, if in other packages
    nics: tuple[DeviceNode, ...]
    by_weight: tuple[tuple[int, int], ...]
    count: int  # number of GPUs
    weight: int  # number of their functions

    def device_class(self, packages: int) -> int:
        """Return the class of one of these GPUs with its NICs; 0 if no node is known."""
        gpu_class = 0 if self.home is None else self.home.class_to(packages)
        if not self.nics:
            return gpu_class
        return max(gpu_class, *(nic.class_to(packages) for nic in self.nics))


class GpuGroup(Struct, frozen=True, kw_only=True):
    """A group of GPUs; the VM gets all its GPUs from one group."""

    homes: tuple[HomeGpus, ...]  # its GPUs by home
    homeless: int  # number of GPUs without a known node
    nodes: tuple[tuple[int, int], ...]  # (number of GPUs, nodes with that number)

    @classmethod
    def from_homes(cls, homes: Iterable[HomeGpus]) -> "GpuGroup":
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
        """Return the minimum number of `count` GPUs that are not at home on these nodes (bits)."""
        count_at_home = sum([number * (homes & nodes).bit_count() for number, homes in self.nodes])
        return max(0, count - self.homeless - count_at_home)

    def classes(self, packages: int) -> list[int]:
        """Return the device class of each home's GPUs, for nodes of these packages (bits)."""
        return [home.device_class(packages) for home in self.homes]

    def least_class(self, count: int, classes: Sequence[int]) -> int | None:
        """The worst class among the `count` nearest GPUs, None if fewer. classes: by home."""
        for limit, home in sorted(zip(classes, self.homes, strict=True), key=itemgetter(0)):
            count -= home.count
            if count <= 0:
                return limit
        return None

    def split_by_home(self, nodes: int) -> tuple[list[HomeGpus], list[HomeGpus]]:
        """Return (GPUs whose home is on these nodes or unknown, the other GPUs)."""
        at_home: list[HomeGpus] = []
        far: list[HomeGpus] = []
        for home in self.homes:
            (at_home if home.home is None or home.home.node & nodes else far).append(home)
        return at_home, far


class SearchDevices(Struct, frozen=True, kw_only=True, dict=True):
    """The devices of a search, as its nodes see them."""

    options: DeviceOptions  # candidates
    named: tuple[RequestedDevice, ...]  # devices that the VM gets in any case
    gpu_homes: tuple[DeviceNode | None, ...]  # node of each candidate GPU
    # of the VM's NICs that are paired with each GPU, if in another package
    nic_homes: tuple[tuple[DeviceNode, ...], ...]
    gpu_nodes: int  # nodes with free GPUs
    requires_home: bool  # no GPU may be away from its node
    compares_classes: bool  # the policy compares how near devices are
    distances: DistanceMatrix

    @cached_property
    def groups(self) -> tuple[GpuGroup, ...]:
        """Return the groups of GPUs, one of which is used; () if no GPU is to be chosen."""
        if not self.options.count:
            return ()
        return tuple([self._group(gpus) for gpus in self.options.groups])

    def _group(self, gpus: int) -> GpuGroup:
        """Return the group of these GPUs (bits)."""
        by_home: dict[
            tuple[int, ...], tuple[DeviceNode | None, tuple[DeviceNode, ...], dict[int, int]]
        ] = {}
        for number in list_members(gpus):
            home, nics = self.gpu_homes[number], self.nic_homes[number]
            key = (id(home), *map(id, nics))
            weights = by_home.setdefault(key, (home, nics, {}))[2]
            # Functions without a home do not count.
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
    def homes(self) -> tuple[DeviceNode, ...]:
        """Return the homes of all devices, each once."""
        homes_by_id = {id(device.home): device.home for device in self.named}
        homes_by_id |= {id(home): home for home in self.gpu_homes if home is not None}
        return tuple(homes_by_id.values())

    @cached_property
    def home_nodes(self) -> int:
        """Return the nodes (bits) that have a device."""
        return sum({home.node for home in self.homes})

    @cached_property
    def named_rows(self) -> tuple[int, ...]:
        """Return the sum of the distances from the named devices to each node."""
        nodes = range(len(self.distances.packages))
        return tuple([sum([device.home.to_node[node] for device in self.named]) for node in nodes])

    def rows(self, gpus: int) -> list[tuple[int, ...]]:
        """Return the distances to each node of the named devices, and of these GPUs (bits)."""
        homes = (home for i, home in enumerate(self.gpu_homes) if gpus >> i & 1)
        named_rows = [device.home.to_node for device in self.named]
        return named_rows + [home.to_node for home in homes if home is not None]

    @cached_property
    def _named_gpus(self) -> dict[int, int]:
        """Return the named GPUs by node (a bit, 0 = not on a node with CPUs)."""
        count_of_node: dict[int, int] = {}
        for device in self.named:
            if device.is_gpu:
                count_of_node[device.home.node] = count_of_node.get(device.home.node, 0) + 1
        return count_of_node

    @cached_property
    def _pulling_homes(self) -> tuple[DeviceNode, ...]:
        return tuple({id(pull.home): pull.home for pull in self.named if pull.pulls}.values())

    @cached_property
    def _near_groups(self) -> dict[tuple[int, int], tuple[int, tuple[GpuGroup, ...]]]:
        return {}

    def least_class(self, packages: int) -> int:
        """Return the least class of the worst device for nodes of these packages (bits)."""
        return self._find_class(
            [(group, group.classes(packages)) for group in self.groups], packages
        )

    def _find_class(self, classes: Sequence[tuple[GpuGroup, list[int]]], packages: int) -> int:
        """Return the least class of these groups."""
        floor = max([home.class_to(packages) for home in self._pulling_homes], default=0)
        least_classes = [group.least_class(self.options.count, levels) for group, levels in classes]
        return max(floor, min([least for least in least_classes if least is not None], default=0))

    def device_class(self, nodes: int) -> int:
        """Return the class of the worst device for a set of nodes (bits)."""
        return self._class_and_groups(nodes)[0]

    def near_groups(self, nodes: int) -> tuple[GpuGroup, ...]:
        """Return the groups with enough GPUs near these nodes (bits), reduced to those GPUs; () if
        GPUs must be at home and are not."""
        return self._class_and_groups(nodes)[1]

    def home_groups(self, nodes: int) -> Sequence[GpuGroup]:
        """Return the candidates with the fewest GPUs away from home, if these count."""
        groups, count = self.near_groups(nodes), self.options.count
        if not self.compares_classes or len(groups) < 2:
            return groups
        counts = [group.away(count, nodes) for group in groups]
        least = min(counts)
        return [group for group, number in zip(groups, counts, strict=True) if number == least]

    def _class_and_groups(self, nodes: int) -> tuple[int, tuple[GpuGroup, ...]]:
        # GPUs that must be at home are chosen by node, other GPUs by package.
        key = self.distances.packages_of(nodes), nodes if self.requires_home else 0
        if key not in self._near_groups:
            self._near_groups[key] = self._near_packages(*key)
        return self._near_groups[key]

    def _near_packages(self, packages: int, nodes: int) -> tuple[int, tuple[GpuGroup, ...]]:
        groups, near_groups = self.groups, []
        if self.requires_home:
            groups = tuple([GpuGroup.from_homes(group.split_by_home(nodes)[0]) for group in groups])
        classes = [(group, group.classes(packages)) for group in groups]
        # GPUs no farther than the worst named device add no cost.
        limit = self._find_class(classes, packages)
        for group, levels in classes:
            if self.compares_classes and max(levels, default=0) > limit:
                homes = zip(group.homes, levels, strict=True)
                group = GpuGroup.from_homes([gpus for gpus, level in homes if level <= limit])
            if sum([gpus.count for gpus in group.homes]) >= self.options.count:
                near_groups.append(group)
        return limit, tuple(near_groups)

    def away(self, nodes: int) -> int:
        """Return the GPUs away from home for nodes (bits) that near_groups() has groups for."""
        count = sum([n for home, n in self._named_gpus.items() if not home & nodes])
        if not self.options.count:
            return count
        return count + min(
            [group.away(self.options.count, nodes) for group in self.near_groups(nodes)]
        )
