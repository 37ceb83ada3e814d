"""The CPU and memory part of a host.toml: cores, caches, packages, numbers of CPUs; nodes."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, zip_longest

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CoreIndex, CpuSet, LlcIndex, NodeIndex, PackageIndex
from homenode.errors import InputError
from homenode.machine.description.tables import (
    MAX_NODES,
    MAX_PUS,
    Count,
    DistancesTable,
    HostDocument,
    NodeTable,
    PackageTable,
    PagesTable,
    Size,
    decode_value,
    make_value_error,
)
from homenode.machine.topology import (
    LOCAL_DISTANCE,
    Core,
    CoreId,
    CoreKind,
    Llc,
    MemoryKind,
    NumaNode,
    Package,
    PagePool,
)
from homenode.text import plural


class CoreSlot(Struct, frozen=True):
    package: int  # numbers as in sysfs
    node: int  # numbers as in sysfs
    id: int  # core_id, unique within the package
    die: int
    llc: int | None  # position of its last-level cache on the host; None without one
    kind: CoreKind | None
    threads: int
    pus: tuple[int, ...] = ()  # ascending by thread; a slot without CPUs has not been numbered yet


def parse_cores(file: HostDocument, nodes: Mapping[int, NodeTable]) -> tuple[CoreSlot, ...]:
    """Return the cores in package order, numbered. nodes: [[node]] by number, for their `cores`.
    Raises InputError if counts do not divide, or cores of nodes do not sum to the package's."""
    package_numbers = _number_parts(file, "package_numbers", file.package_numbers, file.packages)
    overrides = _find_overrides(file)
    per_package = file.nodes_per_package
    per_node = file.check_bounds("packages_per_node", file.packages_per_node, 1, file.packages)
    if per_node > 1 and (per_package > 1 or file.packages % per_node):
        raise file.make_error(
            "packages_per_node",
            f"a divisor of {plural(file.packages, 'package')}, and one node per package",
            f"{per_node} with nodes_per_package = {per_package}",
        )
    node_count = file.packages * per_package // per_node
    node_numbers = _number_parts(file, "node_numbers", file.node_numbers, node_count)
    shares = {index: table.cores for index, table in nodes.items() if table.cores is not None}

    slots: list[CoreSlot] = []
    llcs = pu_count = 0
    for position, package in enumerate(package_numbers):
        override = overrides.get(position)
        cores = _list_package_cores(file, override, package)
        first = position * per_package // per_node
        own_nodes = node_numbers[first : first + per_package]
        counts = _count_node_cores(file, own_nodes, shares, len(cores), alone=per_node == 1)
        node_of_core = [
            node for node, count in zip(own_nodes, counts, strict=True) for _ in range(count)
        ]
        if override is not None and override.llcs is not None:
            own_llcs = override.check_bounds("llcs", override.llcs, 0, len(cores))
        else:
            own_llcs = file.check_bounds("llcs_per_package", file.llcs_per_package, 0, len(cores))
        if override is not None and override.dies is not None:
            dies = override.check_bounds("dies", override.dies, 1, len(cores))
        else:
            dies = file.check_bounds("dies_per_package", file.dies_per_package, 1, len(cores))
        for key, parts in (("llcs_per_package", own_llcs or 1), ("dies_per_package", dies)):
            if len(cores) % parts:
                raise file.make_error(key, f"a divisor of {plural(len(cores), 'core')}", parts)
        pu_count += sum(core.threads for core in cores)
        if pu_count > MAX_PUS:
            raise file.make_error("packages", f"at most {MAX_PUS} CPUs in all", "more")
        for i, core in enumerate(cores):
            llc = llcs + i * own_llcs // len(cores) if own_llcs else None
            slots.append(replace(core, node=node_of_core[i], llc=llc, die=i * dies // len(cores)))
        llcs += own_llcs
    return _number_pus(slots, file.numbering)


def _number_parts(
    file: HostDocument, key: str, value: int | tuple[int, ...] | None, count: int
) -> tuple[int, ...]:
    """Return the numbers in sysfs of `count` packages or nodes: 0, 1, 2 ... unless listed."""
    if value is None:
        return tuple(range(count))
    numbers = value if isinstance(value, tuple) else (value,)
    if len(numbers) != count or sorted(set(numbers)) != list(numbers):
        raise file.make_error(key, f"{plural(count, 'ascending number')}", numbers)
    return numbers


def _find_overrides(file: HostDocument) -> dict[int, PackageTable]:
    tables: dict[int, PackageTable] = {}
    for table in file.package:
        index = table.check_bounds("index", table.index, 0, file.packages - 1)
        if index in tables:
            raise table.make_error("index", "the position of a package, once", index)
        tables[index] = table
    return tables


def _list_package_cores(
    file: HostDocument, override: PackageTable | None, package: int
) -> list[CoreSlot]:
    """Return the cores of one package, from [[package]], else from the file's keys."""
    cores = override.cores if override is not None else None
    groups_of = override if override is not None and override.core_groups is not None else file
    threads = (override and override.threads_per_core) or file.threads_per_core
    if groups_of.core_groups is not None and (cores is None or groups_of is override):
        if cores is not None or file.cores_per_package is not None:
            raise groups_of.make_error("core_groups", "no number of cores next to it", "both")
        parts: list[tuple[CoreKind | None, int]] = []
        for group in groups_of.core_groups:
            if len(parts) > MAX_PUS:
                raise groups_of.make_error("core_groups", f"at most {MAX_PUS} cores", "more")
            parts += [(group.kind, group.threads_per_core or threads)] * group.cores
    else:
        count = cores or file.cores_per_package
        if count is None:
            raise file.make_error("cores_per_package", "how many cores each package has", None)
        parts = [(None, threads)] * count
    if len({kind for kind, _ in parts}) == 1 and parts[0][0] is not None:
        raise groups_of.make_error("core_groups", "groups of both kinds", "one kind only")
    if not parts:
        raise groups_of.make_error("core_groups", "groups of both kinds", "none")
    return [CoreSlot(package, 0, i, 0, None, *part) for i, part in enumerate(parts)]


def _count_node_cores(
    file: HostDocument,
    nodes: Sequence[int],
    shares: Mapping[int, int],
    cores: int,
    *,
    alone: bool,
) -> list[int]:
    """Return the cores of each of a package's nodes: as in [[node]]; other nodes share the rest."""
    if not alone:
        if nodes[0] in shares:
            raise file.make_error("node", "no cores of a node that spans packages", shares)
        return [cores]
    cores_of_node = {node: shares[node] for node in nodes if node in shares}
    free_cores, free_nodes = cores - sum(cores_of_node.values()), len(nodes) - len(cores_of_node)
    if free_cores < 0 or (free_cores % free_nodes if free_nodes else free_cores):
        raise file.make_error(
            "nodes_per_package" if free_nodes else "node",
            f"{plural(cores, 'core')} of the package over nodes {', '.join(map(str, nodes))}",
            f"{cores_of_node or 'no shares'}, {free_cores} left for {free_nodes}",
        )
    return [
        cores_of_node.get(node, free_cores // free_nodes if free_nodes else 0) for node in nodes
    ]


def _number_pus(slots: Sequence[CoreSlot], numbering: str) -> tuple[CoreSlot, ...]:
    """Return the cores, in the order given, with their CPUs.

    >>> pair = [CoreSlot(0, 0, i, 0, None, None, 2) for i in range(2)]
    >>> [core.pus for core in _number_pus(pair, "siblings-far")]
    [(0, 2), (1, 3)]
    >>> [core.pus for core in _number_pus(pair, "siblings-adjacent")]
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
        sequence = list(chain.from_iterable(_deal_cores(slots, row) for row in by_thread))
    else:
        sequence = list(chain.from_iterable(by_thread))
    pus: dict[int, list[int]] = {i: [] for i in order}
    for pu, core in enumerate(sequence):
        pus[core].append(pu)
    return tuple(replace(slot, pus=tuple(pus[i])) for i, slot in enumerate(slots))


def _deal_cores(slots: Sequence[CoreSlot], row: Sequence[int]) -> list[int]:
    """Return the cores, one from each node in turn."""
    hands: dict[int, list[int]] = {}
    for i in row:
        hands.setdefault(slots[i].node, []).append(i)
    return [i for turn in zip_longest(*hands.values()) for i in turn if i is not None]


def map_node_tables(file: HostDocument) -> dict[int, NodeTable]:
    tables: dict[int, NodeTable] = {}
    for table in file.node:
        index = table.index
        numbers: Sequence[int] = index if isinstance(index, tuple) else ()
        if isinstance(index, str):
            numbers = tuple(CpuSet.parse(index, f"{table.source}: {table.name_of('index')}"))
        elif isinstance(index, int):
            numbers = (index,)
        if not numbers or min(numbers) < 0 or max(numbers) >= MAX_NODES:
            raise table.make_error("index", f'node numbers below {MAX_NODES}, 4 or "5-11"', index)
        if tables.keys() & set(numbers):
            raise table.make_error("index", "each node once", index)
        tables |= dict.fromkeys(numbers, table)
    return tables


def map_node_packages(
    tables: Mapping[int, NodeTable], cores: Sequence[CoreSlot]
) -> dict[int, PackageIndex | None]:
    """Return the package of each node with cores or a [[node]], None = unknown; ascending."""
    of_cores: dict[int, set[int]] = {index: set() for index in tables}
    for core in cores:
        of_cores.setdefault(core.node, set()).add(core.package)
    everywhere = {core.package for core in cores}
    packages: dict[int, PackageIndex | None] = {}
    for index, own in sorted(of_cores.items()):
        named_package = None if index not in tables else tables[index].package
        if named_package is not None and named_package not in (own or everywhere):
            expected = f"one of the packages {sorted(own or everywhere)}"
            raise tables[index].make_error("package", expected, named_package)
        package = next(iter(own)) if named_package is None and len(own) == 1 else named_package
        packages[index] = None if package is None else PackageIndex(package)
    return packages


def parse_node(
    file: HostDocument,
    table: NodeTable,
    index: int,
    package: PackageIndex | None,
    pus: CpuSet | None,
    bdf_of_name: Mapping[str, Bdf],
) -> NumaNode:
    """Return a node. pus: the online ones of its cores, None = it has no cores."""
    memory: int | None = table.memory
    if memory is None:
        memory = 0 if pus is None else file.memory_per_node
    if memory is None:
        raise file.make_error("memory_per_node", f"the memory of each node, node {index} too", None)
    own_pools = table.hugepages is not None
    key = table.name_of("hugepages") if own_pools else "hugepages_per_node"
    pages_of_size = table.hugepages if table.hugepages is not None else file.hugepages_per_node
    pools = _page_pools(file.source, key, pages_of_size) if memory or own_pools else ()
    reserved_bytes = sum(pool.page_bytes * pool.total_pages for pool in pools)
    if reserved_bytes > memory:
        expected = f"huge pages within {memory} bytes of node {index}"
        raise make_value_error(file.source, key, expected, reserved_bytes)
    free = table.memory_free
    if free is not None and free > memory - reserved_bytes:
        raise table.make_error("memory_free", f"at most {memory - reserved_bytes} bytes", int(free))
    if table.gpu is not None and pus is not None:
        raise table.make_error("gpu", "a node without cores", f"node {index} with cores")
    # The kernel shows what memory is only of a DAX device's node ("other") and of a GPU's.
    if table.kind and table.gpu is not None:
        raise table.make_error("kind", "no kind next to gpu", table.kind)
    gpu = None if table.gpu is None else bdf_of_name.get(table.gpu)
    if table.gpu is not None and gpu is None:
        names = ", ".join(sorted(bdf_of_name)[:20]) or "none"
        raise InputError(
            f"{file.source}: node {index}.gpu: expected the name of a device, one of {names}, "
            f"found {table.gpu!r}"
        )
    kind = MemoryKind.DRAM if pus else None  # nothing by itself of a CPU-less node
    if gpu is not None:
        kind = MemoryKind.GPU
    elif table.kind:
        kind = MemoryKind.OTHER
    return NumaNode(
        index=NodeIndex(index),
        pus=pus or CpuSet(),
        memory_bytes=int(memory),
        memory_free_bytes=memory - reserved_bytes if free is None else int(free),
        page_pools=pools,
        memory_kind=kind,
        gpu=gpu,
        generic_initiator=table.generic_initiator,
        package=package if pus else None,
    )


def _page_pools(
    source: str, prefix: str, pages_of_size: Mapping[str, object]
) -> tuple[PagePool, ...]:
    """Return the pools of a table such as { "2MiB" = 512, "1GiB" = { total = 64, free = 8 } }."""
    pools: list[PagePool] = []
    for size, pages in pages_of_size.items():
        key = f"{prefix}.{size}"
        page_bytes = int(decode_value(size, Size, source, key))
        if page_bytes < 4096 or page_bytes & (page_bytes - 1):
            raise make_value_error(source, key, "a page size, a power of two", size)
        if any(pool.page_bytes == page_bytes for pool in pools):
            raise make_value_error(source, key, "each page size once", size)
        if not isinstance(pages, Mapping):
            total = free = decode_value(pages, Count, source, key)
        else:
            counts = decode_value(pages, PagesTable, source, key)
            total = counts.total
            free = (
                total if counts.free is None else counts.check_bounds("free", counts.free, 0, total)
            )
        pools.append(PagePool(page_bytes, total, free))
    return tuple(sorted(pools))


def parse_distances(
    file: HostDocument, nodes: Mapping[int, PackageIndex | None], cores: Sequence[CoreSlot]
) -> tuple[tuple[int, ...], ...] | None:
    """Return SLIT, shape (nodes, nodes), [from][to]; None if a host of several nodes sets none.
    nodes: the package of each."""
    matrix = file.distances
    if isinstance(matrix, DistancesTable):
        with_cores = {core.node for core in cores}
        return tuple(
            tuple(_choose_distance(a, b, nodes, with_cores, matrix) for b in nodes) for a in nodes
        )
    if isinstance(matrix, str):
        return ((LOCAL_DISTANCE,),) if len(nodes) == 1 else None
    for i, row in enumerate(matrix):
        if len(row) != len(nodes):
            expected = f"{plural(len(nodes), 'distance')}, one per node"
            raise file.make_error(f"distances[{i}]", expected, row)
        if row[i : i + 1] != (LOCAL_DISTANCE,):
            expected = f"{LOCAL_DISTANCE} from node to itself"
            raise file.make_error(f"distances[{i}]", expected, row[i] if i < len(row) else row)
    if len(matrix) != len(nodes):
        raise file.make_error(
            "distances", f"{plural(len(nodes), 'row')}, one per node", len(matrix)
        )
    return matrix


def _choose_distance(
    a: int,
    b: int,
    packages: Mapping[int, PackageIndex | None],
    with_cores: Collection[int],
    classes: DistancesTable,
) -> int:
    if a == b:
        return LOCAL_DISTANCE
    if a not in with_cores and b not in with_cores:
        return classes.between_memory
    is_same_package = packages[a] is not None and packages[a] == packages[b]
    if a in with_cores and b in with_cores:
        return classes.same_package if is_same_package else classes.other_package
    return classes.memory_same_package if is_same_package else classes.memory_other_package


def list_online_pus(file: HostDocument, cores: Sequence[CoreSlot]) -> CpuSet:
    """Return all CPUs but `offline_pus`. Raises InputError if none is left or one is missing."""
    pus = CpuSet(pu for core in cores for pu in core.pus)
    offline = file.offline_pus
    if not offline <= pus or offline == pus:
        raise file.make_error("offline_pus", f"some of the CPUs {pus}, not all", str(offline))
    return pus - offline


def pus_of_node(cores: Sequence[CoreSlot], online: CpuSet) -> dict[int | None, CpuSet]:
    """Return online CPUs of each node with cores; the key None has all of them."""
    pus: dict[int | None, list[int]] = {}
    for core in cores:
        pus.setdefault(core.node, []).extend(core.pus)
    return {None: online, **{node: CpuSet(members) & online for node, members in pus.items()}}


def build_cores(slots: Sequence[CoreSlot], online: CpuSet) -> tuple[Core, ...]:
    """Return cores with an online CPU, by their lowest CPU."""
    alive = [(CpuSet(slot.pus) & online, slot) for slot in slots if CpuSet(slot.pus) & online]
    alive.sort(key=lambda pair: _find_lowest_pu(pair[0]))
    return tuple(
        Core(CoreIndex(i), CoreId(PackageIndex(slot.package), slot.id), pus, slot.kind)
        for i, (pus, slot) in enumerate(alive)
    )


def build_llcs(
    slots: Sequence[CoreSlot], online: CpuSet, level: int, sizes: Sequence[int | None]
) -> tuple[Llc, ...]:
    """Return the last-level caches of online CPUs, by their lowest CPU. sizes: used in turn."""
    sharers = _merge_by_key((slot.llc, slot.pus) for slot in slots if slot.llc is not None)
    alive = [(pus & online, sizes[llc % len(sizes)]) for llc, pus in sorted(sharers.items())]
    caches = sorted(
        (cache for cache in alive if cache[0]), key=lambda cache: _find_lowest_pu(cache[0])
    )
    return tuple(Llc(LlcIndex(i), pus, level, size) for i, (pus, size) in enumerate(caches))


def build_packages(slots: Sequence[CoreSlot], online: CpuSet) -> tuple[Package, ...]:
    members = _merge_by_key((slot.package, slot.pus) for slot in slots)
    return tuple(
        Package(PackageIndex(index), pus & online)
        for index, pus in sorted(members.items())
        if pus & online
    )


def _merge_by_key(pairs: Iterable[tuple[int, tuple[int, ...]]]) -> dict[int, CpuSet]:
    members: dict[int, list[int]] = {}
    for key, pus in pairs:
        members.setdefault(key, []).extend(pus)
    return {key: CpuSet(pus) for key, pus in members.items()}


def _find_lowest_pu(pus: CpuSet) -> int:
    first = pus.first()
    return -1 if first is None else first
