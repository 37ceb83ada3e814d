"""The CPU part of a host.toml: packages, cores, last-level caches, and the numbers of the PUs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest

from homenode.description.table import Table
from homenode.topology import CoreKind

MAX_PUS = 8192
"""Most PUs of a described host. Source: NR_CPUS_RANGE_END of arch/x86/Kconfig."""
MAX_NODES = 1024
"""Source: NODES_SHIFT up to 10 in arch/x86/Kconfig."""

CPU_KEYS = tuple(
    """
    packages package_numbers nodes_per_package packages_per_node node_numbers
    dies_per_package llcs_per_package llc_size llc_level cores_per_package threads_per_core
    core_groups numbering package
""".split()
)
NUMBERINGS = ("siblings-far", "siblings-adjacent", "siblings-far-in-package", "nodes-interleaved")
"""How the firmware numbers PUs; docs/formats/host-toml.md shows each."""

_PACKAGE_KEYS = ("index", "cores", "threads_per_core", "core_groups", "llcs", "dies")
_GROUP_KEYS = ("kind", "cores", "threads_per_core")
_NODE_SHARE = "cores"


@dataclass(frozen=True, slots=True)
class CoreSlot:
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


def parse_cores(file: Table, node_tables: Sequence[Table]) -> tuple[CoreSlot, ...]:
    """The cores in package order, numbered. node_tables: [[node]], for their `cores`.

    Raises InputError where counts do not divide, or cores of nodes do not sum to the package's.
    """
    package_count = file.integer("packages", 1, least=1, most=256)
    package_numbers = _numbers(file, "package_numbers", package_count)
    overrides = _overrides(file, package_count)
    nodes_per_package = file.integer("nodes_per_package", 1, least=1, most=64)
    packages_per_node = file.integer("packages_per_node", 1, least=1, most=package_count)
    if packages_per_node > 1 and (nodes_per_package > 1 or package_count % packages_per_node):
        raise file.refusal(
            "packages_per_node",
            f"a divisor of {package_count} packages, and one node per package",
            f"{packages_per_node} with nodes_per_package = {nodes_per_package}",
        )
    node_count = package_count * nodes_per_package // packages_per_node
    node_numbers = _numbers(file, "node_numbers", node_count)
    shares = {
        index: table.integer(_NODE_SHARE, 0, most=MAX_PUS)
        for table in node_tables
        if _NODE_SHARE in table
        for index in table.integers("index") or ()
    }

    slots: list[CoreSlot] = []
    llcs = 0
    for position in range(package_count):
        table = overrides.get(position, file)
        cores = _package_cores(file, table, package_numbers[position])
        first = position * nodes_per_package // packages_per_node
        nodes = node_numbers[first : first + nodes_per_package]
        counts = _node_counts(file, nodes, shares, len(cores), alone=packages_per_node == 1)
        node_of_core = [
            node for node, count in zip(nodes, counts, strict=True) for _ in range(count)
        ]
        llc_key, die_key = (
            ("llcs_per_package", "dies_per_package") if table is file else ("llcs", "dies")
        )
        own_llcs = table.integer(llc_key, file.integer("llcs_per_package", 1), most=len(cores))
        dies = table.integer(die_key, file.integer("dies_per_package", 1), least=1, most=len(cores))
        for key, parts in ((llc_key, own_llcs or 1), (die_key, dies)):
            if len(cores) % parts:
                raise table.refusal(key, f"a divisor of {len(cores)} cores", parts)
        for i, core in enumerate(cores):
            llc = llcs + i * own_llcs // len(cores) if own_llcs else None
            slots.append(replace(core, node=node_of_core[i], llc=llc, die=i * dies // len(cores)))
        llcs += own_llcs
    if sum(slot.threads for slot in slots) > MAX_PUS:
        found = sum(slot.threads for slot in slots)
        raise file.refusal("packages", f"at most {MAX_PUS} PUs in all", f"{found} PUs")
    return _numbered(slots, file.choice("numbering", NUMBERINGS, "siblings-far"))


def _numbers(file: Table, key: str, count: int) -> tuple[int, ...]:
    """The numbers that sysfs gives to `count` packages or nodes: 0, 1, 2 ... unless listed."""
    numbers = file.integers(key, most=MAX_NODES - 1)
    if numbers is None:
        return tuple(range(count))
    if len(numbers) != count or sorted(set(numbers)) != list(numbers):
        raise file.refusal(key, f"{count} ascending numbers", list(numbers))
    return numbers


def _overrides(file: Table, package_count: int) -> dict[int, Table]:
    tables: dict[int, Table] = {}
    for table in file.tables("package", _PACKAGE_KEYS):
        index = table.optional_integer("index", most=package_count - 1)
        if index is None or index in tables:
            raise table.refusal("index", "the position of a package, once", index)
        tables[index] = table
    return tables


def _package_cores(file: Table, table: Table, package: int) -> list[CoreSlot]:
    """The cores of one package, by [[package]] where it says and by the file's keys elsewhere."""
    threads = file.integer("threads_per_core", 1, least=1, most=8)
    groups_of = table if "core_groups" in table else file
    cores_key = "cores" if "cores" in table and table is not file else "cores_per_package"
    cores_of = table if cores_key == "cores" else file
    if "core_groups" in groups_of and cores_key != "cores":
        if "cores_per_package" in file:
            raise file.refusal("core_groups", "no cores_per_package next to it", "both")
        parts: list[tuple[CoreKind | None, int]] = []
        for group in groups_of.tables("core_groups", _GROUP_KEYS):
            count = group.integer("cores", 0, least=1, most=MAX_PUS)
            kind = CoreKind(group.choice("kind", tuple(CoreKind), CoreKind.PERFORMANCE))
            own = group.integer("threads_per_core", threads, least=1, most=8)
            parts += [(kind, own)] * count
    else:
        count = cores_of.integer(cores_key, 0, least=1, most=MAX_PUS)
        own = table.integer("threads_per_core", threads, least=1, most=8)
        parts = [(None, own)] * count
    if len({kind for kind, _ in parts}) == 1 and parts[0][0] is not None:
        raise groups_of.refusal("core_groups", "groups of both kinds", "one kind only")
    if not parts:
        raise cores_of.refusal(cores_key, "how many cores each package has", "nothing")
    return [CoreSlot(package, 0, i, 0, None, kind, own) for i, (kind, own) in enumerate(parts)]


def _node_counts(
    file: Table, nodes: Sequence[int], shares: dict[int, int], cores: int, *, alone: bool
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
