"""The CPU part of a host.toml: packages, cores, last-level caches, and the numbers of the PUs."""

from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest

from msgspec import Struct
from msgspec.structs import replace

from homenode.machine.description.document import MAX_PUS, HostDocument, NodeTable, PackageTable
from homenode.machine.topology import CoreKind


class CoreSlot(Struct, frozen=True):
    """One core. package, node: numbers as in sysfs. id: core_id, unique within the package.

    llc: position of its last-level cache on the host; None where it has none. pus: ascending by
    thread; a slot without PUs has not been numbered yet.
    """

    package: int
    node: int
    id: int
    die: int
    llc: int | None
    kind: CoreKind | None
    threads: int
    pus: tuple[int, ...] = ()


def parse_cores(file: HostDocument, nodes: Mapping[int, NodeTable]) -> tuple[CoreSlot, ...]:
    """The cores in package order, numbered. nodes: [[node]] by number, for their `cores`.

    Raises InputError where counts do not divide, or cores of nodes do not sum to the package's.
    """
    package_numbers = _numbers(file, "package_numbers", file.package_numbers, file.packages)
    overrides = _overrides(file)
    per_package = file.nodes_per_package
    per_node = file.bounded("packages_per_node", file.packages_per_node, 1, file.packages)
    if per_node > 1 and (per_package > 1 or file.packages % per_node):
        raise file.refusal(
            "packages_per_node",
            f"a divisor of {file.packages} packages, and one node per package",
            f"{per_node} with nodes_per_package = {per_package}",
        )
    node_count = file.packages * per_package // per_node
    node_numbers = _numbers(file, "node_numbers", file.node_numbers, node_count)
    shares = {index: table.cores for index, table in nodes.items() if table.cores is not None}

    slots: list[CoreSlot] = []
    llcs = 0
    for position, package in enumerate(package_numbers):
        own = overrides.get(position)
        cores = _package_cores(file, own, package)
        first = position * per_package // per_node
        own_nodes = node_numbers[first : first + per_package]
        counts = _node_counts(file, own_nodes, shares, len(cores), alone=per_node == 1)
        node_of_core = [
            node for node, count in zip(own_nodes, counts, strict=True) for _ in range(count)
        ]
        if own is not None and own.llcs is not None:
            own_llcs = own.bounded("llcs", own.llcs, 0, len(cores))
        else:
            own_llcs = file.bounded("llcs_per_package", file.llcs_per_package, 0, len(cores))
        if own is not None and own.dies is not None:
            dies = own.bounded("dies", own.dies, 1, len(cores))
        else:
            dies = file.bounded("dies_per_package", file.dies_per_package, 1, len(cores))
        for key, parts in (("llcs_per_package", own_llcs or 1), ("dies_per_package", dies)):
            if len(cores) % parts:
                raise file.refusal(key, f"a divisor of {len(cores)} cores", parts)
        for i, core in enumerate(cores):
            llc = llcs + i * own_llcs // len(cores) if own_llcs else None
            slots.append(replace(core, node=node_of_core[i], llc=llc, die=i * dies // len(cores)))
        llcs += own_llcs
    if sum(slot.threads for slot in slots) > MAX_PUS:
        found = sum(slot.threads for slot in slots)
        raise file.refusal("packages", f"at most {MAX_PUS} PUs in all", f"{found} PUs")
    return _numbered(slots, file.numbering)


def _numbers(
    file: HostDocument, key: str, given: int | tuple[int, ...] | None, count: int
) -> tuple[int, ...]:
    """The numbers that sysfs gives to `count` packages or nodes: 0, 1, 2 ... unless listed."""
    if given is None:
        return tuple(range(count))
    numbers = given if isinstance(given, tuple) else (given,)
    if len(numbers) != count or sorted(set(numbers)) != list(numbers):
        raise file.refusal(key, f"{count} ascending numbers", numbers)
    return numbers


def _overrides(file: HostDocument) -> dict[int, PackageTable]:
    tables: dict[int, PackageTable] = {}
    for table in file.package:
        index = table.bounded("index", table.index, 0, file.packages - 1)
        if index in tables:
            raise table.refusal("index", "the position of a package, once", index)
        tables[index] = table
    return tables


def _package_cores(file: HostDocument, own: PackageTable | None, package: int) -> list[CoreSlot]:
    """The cores of one package, by [[package]] where it says and by the file's keys elsewhere."""
    cores = own.cores if own is not None else None
    groups_of = own if own is not None and own.core_groups is not None else file
    if groups_of.core_groups is not None and cores is None:
        if file.cores_per_package is not None:
            raise file.refusal("core_groups", "no cores_per_package next to it", "both")
        parts: list[tuple[CoreKind | None, int]] = []
        for group in groups_of.core_groups:
            parts += [(group.kind, group.threads_per_core or file.threads_per_core)] * group.cores
    else:
        count = cores or file.cores_per_package
        if count is None:
            raise file.refusal("cores_per_package", "how many cores each package has", None)
        threads = own.threads_per_core if own is not None else None
        parts = [(None, threads or file.threads_per_core)] * count
    if len({kind for kind, _ in parts}) == 1 and parts[0][0] is not None:
        raise groups_of.refusal("core_groups", "groups of both kinds", "one kind only")
    if not parts:
        raise groups_of.refusal("core_groups", "groups of both kinds", "none")
    return [CoreSlot(package, 0, i, 0, None, *part) for i, part in enumerate(parts)]


def _node_counts(
    file: HostDocument,
    nodes: Sequence[int],
    shares: Mapping[int, int],
    cores: int,
    *,
    alone: bool,
) -> list[int]:
    """Cores of each of a package's nodes: what [[node]] says, the others share the rest equally."""
    if not alone:
        return [cores]
    stated = {node: shares[node] for node in nodes if node in shares}
    rest, others = cores - sum(stated.values()), len(nodes) - len(stated)
    if rest < 0 or (rest % others if others else rest):
        raise file.refusal(
            "nodes_per_package" if others else "node",
            f"{cores} cores of the package over nodes {', '.join(map(str, nodes))}",
            f"{stated or 'no shares'}, {rest} left for {others}",
        )
    return [stated.get(node, rest // others if others else 0) for node in nodes]


def _numbered(slots: Sequence[CoreSlot], numbering: str) -> tuple[CoreSlot, ...]:
    """The cores, in the order given, with their PUs.

    >>> pair = [CoreSlot(0, 0, i, 0, None, None, 2) for i in range(2)]
    >>> [core.pus for core in _numbered(pair, "siblings-far")]
    [(0, 2), (1, 3)]
    >>> [core.pus for core in _numbered(pair, "siblings-adjacent")]
    [(0, 1), (2, 3)]
    """
    order = range(len(slots))
    by_thread = [[i for i in order if slots[i].threads > t] for t in range(8)]
    if numbering == "siblings-adjacent":
        sequence = [i for i in order for _ in range(slots[i].threads)]
    elif numbering == "siblings-far-in-package":
        packages = dict.fromkeys(slot.package for slot in slots)
        sequence = [
            i
            for package in packages
            for row in by_thread
            for i in row
            if slots[i].package == package
        ]
    elif numbering == "nodes-interleaved":
        sequence = list(chain.from_iterable(_dealt(slots, row) for row in by_thread))
    else:
        sequence = list(chain.from_iterable(by_thread))
    pus: dict[int, list[int]] = {i: [] for i in order}
    for pu, core in enumerate(sequence):
        pus[core].append(pu)
    return tuple(replace(slot, pus=tuple(pus[i])) for i, slot in enumerate(slots))


def _dealt(slots: Sequence[CoreSlot], row: Sequence[int]) -> list[int]:
    """Cores one from each node in turn."""
    hands: dict[int, list[int]] = {}
    for i in row:
        hands.setdefault(slots[i].node, []).append(i)
    return [i for turn in zip_longest(*hands.values()) for i in turn if i is not None]
