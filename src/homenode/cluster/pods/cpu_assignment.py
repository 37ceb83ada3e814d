"""CpuAssignment: which CPUs the kubelet's static CPU manager takes for a container.

It takes whole NUMA nodes and sockets first, then whole cores, then single CPUs; among equals those
with the fewest free CPUs, then the lowest numbers. Where it decides by averages over the machine
(CPUs of a socket, of a core, of an uncore cache), so does this.

Source: pkg/kubelet/cm/cpumanager (cpu_assignment.go, policy_static.go) of Kubernetes 1.36; the
tests compare with that code.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

from msgspec import Struct


class CpuPlace(Struct, frozen=True, kw_only=True):
    """Where one CPU is. core: the lowest CPU of its core. uncore: its last-level cache."""

    core: int
    socket: int
    node: int
    uncore: int


class CpuTopology(Struct, frozen=True, dict=True):
    """The CPUs of a machine as the kubelet numbers them. sockets: their number."""

    places: dict[int, CpuPlace]
    sockets: int

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        return tuple(sorted({place.node for place in self.places.values()}))

    @cached_property
    def cores(self) -> frozenset[int]:
        return frozenset(place.core for place in self.places.values())

    @property
    def cpus_per_core(self) -> int:
        return len(self.places) // len(self.cores) if self.cores else 0

    @property
    def cpus_per_socket(self) -> int:
        return len(self.places) // self.sockets if self.sockets else 0

    @cached_property
    def cpus_per_uncore(self) -> int:
        caches = {place.uncore for place in self.places.values()}
        return len(self.places) // len(caches) if caches else 0

    def cpus(self, level: str, number: int) -> frozenset[int]:
        """The CPUs of a core, socket, node or uncore cache."""
        return self._groups[level].get(number, frozenset())

    @cached_property
    def _groups(self) -> dict[str, dict[int, frozenset[int]]]:
        return {level: _grouped(self, level, self.places) for level in LEVELS}


LEVELS = ("core", "socket", "node", "uncore")


def _grouped(topology: CpuTopology, level: str, cpus: Iterable[int]) -> dict[int, frozenset[int]]:
    found: dict[int, set[int]] = {}
    for cpu in cpus:
        found.setdefault(getattr(topology.places[cpu], level), set()).add(cpu)
    return {number: frozenset(members) for number, members in found.items()}


class AssignmentOptions(Struct, frozen=True, kw_only=True):
    """Options of the static policy that change which CPUs are taken. Names are the kubelet's."""

    full_pcpus_only: bool = False
    distribute_cpus_across_numa: bool = False
    distribute_cpus_across_cores: bool = False
    prefer_align_cpus_by_uncorecache: bool = False


def assign(
    topology: CpuTopology, available: frozenset[int], count: int, options: AssignmentOptions
) -> frozenset[int] | None:
    """So many of the available CPUs, or None where there are too few."""
    if options.distribute_cpus_across_numa:
        group = topology.cpus_per_core if options.full_pcpus_only else 1
        return _distributed(topology, available, count, group)
    return _packed(
        topology,
        available,
        count,
        spread=options.distribute_cpus_across_cores,
        by_uncore=options.prefer_align_cpus_by_uncorecache,
    )


class _Accumulator:
    """CPUs taken so far, and those that are still free."""

    def __init__(self, topology: CpuTopology, available: frozenset[int], count: int) -> None:
        self.topology = topology
        self.free = set(available)
        self.needed = count
        self.in_use: set[int] = set()
        self.nodes_first = topology.sockets >= len(topology.nodes)

    def take(self, cpus: Iterable[int]) -> None:
        wanted = frozenset(cpus)
        self.in_use |= wanted
        self.free -= wanted
        self.needed -= len(wanted)

    def free_in(self, level: str, number: int) -> frozenset[int]:
        return self.topology.cpus(level, number) & self.free

    def numbers(self, level: str, cpus: Iterable[int]) -> list[int]:
        """The cores, sockets, nodes or caches of some CPUs, those with fewest free CPUs first."""
        found = {getattr(self.topology.places[cpu], level) for cpu in cpus}
        return sorted(found, key=lambda number: (len(self.free_in(level, number)), number))

    def nodes(self) -> list[int]:
        if self.nodes_first:
            return self.numbers("node", self.free)
        return [
            node
            for socket in self.sockets()
            for node in self.numbers("node", self.free_in("socket", socket))
        ]

    def sockets(self) -> list[int]:
        if not self.nodes_first:
            return self.numbers("socket", self.free)
        return [
            socket
            for node in self.nodes()
            for socket in self.numbers("socket", self.free_in("node", node))
        ]

    def cores(self) -> list[int]:
        level, outer = ("socket", self.sockets()) if self.nodes_first else ("node", self.nodes())
        return [
            core for number in outer for core in self.numbers("core", self.free_in(level, number))
        ]

    def uncores(self) -> list[int]:
        return [
            cache
            for node in self.nodes()
            for cache in self.numbers("uncore", self.free_in("node", node))
        ]

    def take_whole(self, level: str, numbers: list[int], size_of: Callable[[int], int]) -> None:
        """Each of these that is wholly free, while so many CPUs are needed. size_of: when a number
        counts as wholly free."""
        whole = [n for n in numbers if len(self.free_in(level, n)) == size_of(n)]
        for number in whole:
            cpus = self.topology.cpus(level, number)
            if self.needed >= len(cpus):
                self.take(cpus)

    def take_nodes(self) -> None:
        self.take_whole("node", self.nodes(), lambda n: len(self.topology.cpus("node", n)))

    def take_sockets(self) -> None:
        self.take_whole("socket", self.sockets(), lambda _: self.topology.cpus_per_socket)

    def take_uncores(self) -> None:
        for cache in self.uncores():
            if self.needed >= self.topology.cpus_per_uncore:
                self.take_whole(
                    "uncore", self.uncores(), lambda n: len(self.topology.cpus("uncore", n))
                )
            if self.needed < 1:
                return
            self._take_part_of(cache)
            if self.needed < 1:
                return

    def _take_part_of(self, cache: int) -> None:
        """All that is needed from one cache, in the order of its cores, or nothing."""
        per_core = self.topology.cpus_per_core
        wanted = -(-self.needed // per_core)
        places = self.topology.places
        cores = sorted({places[cpu].core for cpu in self.free_in("uncore", cache)})[:wanted]
        cpus = sorted(cpu for core in cores for cpu in self.free_in("core", core))
        if self.needed % 2 and per_core > 1 and len(cpus) > self.needed:
            cpus = cpus[:-1]
        if len(cpus) == self.needed:
            self.take(cpus)

    def take_cores(self) -> None:
        self.take_whole("core", self.cores(), lambda _: self.topology.cpus_per_core)

    def take_rest(self, spread: bool) -> None:
        if spread:
            order = [cpu for s in self.sockets() for cpu in sorted(self.free_in("socket", s))]
        else:
            order = [cpu for c in self.cores() for cpu in sorted(self.free_in("core", c))]
        for cpu in order:
            self.take((cpu,))
            if self.needed < 1:
                return


def _packed(
    topology: CpuTopology,
    available: frozenset[int],
    count: int,
    *,
    spread: bool = False,
    by_uncore: bool = False,
) -> frozenset[int] | None:
    found = _Accumulator(topology, available, count)
    if count > len(available):
        return None
    steps: list[Callable[[], None]] = [found.take_nodes, found.take_sockets]
    if not found.nodes_first:
        steps.reverse()
    steps += [found.take_uncores] if by_uncore else []
    steps += [] if spread else [found.take_cores]
    steps.append(lambda: found.take_rest(spread))
    for step in steps:
        if found.needed < 1:
            break
        step()
    return frozenset(found.in_use) if found.needed < 1 else None


def _distributed(
    topology: CpuTopology, available: frozenset[int], count: int, group: int
) -> frozenset[int] | None:
    """Evenly over as few nodes as can be, whole groups of CPUs; packed where that cannot be."""
    if count % group:
        return _packed(topology, available, count)
    if count < 1:
        return frozenset()
    if count > len(available):
        return None
    found = _Accumulator(topology, available, count)
    nodes = found.nodes()
    free = {node: len(found.free_in("node", node)) for node in nodes}
    groups = (len(topology.places) - 1) // group + 1
    per_node = (groups - 1) // len(topology.nodes) + 1
    needed = (count - 1) // group + 1
    for size in range((needed - 1) // per_node + 1, min(needed, len(free)) + 1):
        chosen = _most_even(nodes, free, size, count, group)
        if chosen is None:
            continue
        members, rest_from = chosen
        each = count // len(members) // group * group
        for node in members:
            found.take(_packed(topology, found.free_in("node", node), each) or ())
        left = count - each * len(members)
        while left > 0:
            for node in rest_from:
                if left > 0 and len(found.free_in("node", node)) >= group:
                    found.take(_packed(topology, found.free_in("node", node), group) or ())
                    left -= group
        return frozenset(found.in_use) if found.needed == 0 else None
    return _packed(topology, available, count)


def _most_even(
    nodes: list[int], free: dict[int, int], size: int, count: int, group: int
) -> tuple[list[int], list[int]] | None:
    """The nodes that leave the machine most even, and those among them that give the remainder."""
    best: tuple[_Slice, _Slice | None] | None = None
    best_balance = math.inf
    for members in _combinations(nodes, size):
        if best_balance == 0:
            break
        chosen = members.values()
        each = count // size // group * group
        if sum(free[node] // group for node in chosen) * group < count:
            continue
        if any(free[node] < each for node in chosen):
            continue
        after = {**free, **{node: free[node] - each for node in chosen}}
        left = count - each * size
        balance, rest = (
            (_deviation(after.values()), None)
            if left == 0
            else (_best_rest([n for n in chosen if after[n] >= group], after, left, group))
        )
        if balance < best_balance:
            best, best_balance = (members, rest), balance
    if best is None:
        return None
    return best[0].values(), [] if best[1] is None else best[1].values()


def _best_rest(
    nodes: list[int], after: dict[int, int], left: int, group: int
) -> tuple[float, "_Slice | None"]:
    best: tuple[float, _Slice | None] = (math.inf, None)
    for size in range(len(nodes), 0, -1):
        for subset in _combinations(nodes, size):
            given = subset.values()
            if sum(after[node] for node in given) < left:
                continue
            remaining, more = dict(after), left
            while more > 0:
                before = more
                for node in given:
                    if more > 0 and remaining[node] >= group:
                        remaining[node] -= group
                        more -= group
                if more == before:
                    break
            balance = _deviation(remaining.values())
            if balance < best[0]:
                best = (balance, subset)
    return best


def _deviation(values: Iterable[int]) -> float:
    """Standard deviation, rounded to thousandths as the kubelet does."""
    listed = list(values)
    mean = _rounded(sum(listed) / len(listed))
    return _rounded(math.sqrt(sum((value - mean) ** 2 for value in listed) / len(listed)))


def _rounded(value: float) -> float:
    return math.floor(value * 1000 + 0.5) / 1000


class _Slice:
    """A combination in memory that later combinations may share, as Go's append leaves it.

    The kubelet keeps the best combination by reference. From the fourth element on append writes
    into the same memory for all combinations with the same first three, so that what it kept
    becomes a later combination.
    """

    def __init__(self, memory: list[int], length: int) -> None:
        self.memory, self.length = memory, length

    def values(self) -> list[int]:
        return self.memory[: self.length]

    def appended(self, value: int) -> "_Slice":
        memory = self.memory
        if self.length == len(memory):
            memory = memory + [0] * max(1, len(memory))
        memory[self.length] = value
        return _Slice(memory, self.length + 1)


def _combinations(nodes: list[int], size: int) -> Iterator[_Slice]:
    def below(start: int, more: int, so_far: _Slice) -> Iterator[_Slice]:
        if more == 0:
            yield so_far
            return
        for i in range(start, len(nodes) - more + 1):
            yield from below(i + 1, more - 1, so_far.appended(nodes[i]))

    if size >= 1:
        yield from below(0, size, _Slice([], 0))
