"""hwloc: a Host from hwloc's XML. Facts that the XML lacks are None, with a gap."""

from collections.abc import Sequence

from msgspec import Struct, field

from homenode.bdf import Bdf
from homenode.cpuset import CoreIndex, CpuSet, LlcIndex, NodeIndex, PackageIndex, PuIndex
from homenode.errors import InputError
from homenode.findings import NO_VMS, Gap
from homenode.machine.discover.hwloc_pci import read_hwloc_pci
from homenode.machine.discover.nodes import Distances, find_package
from homenode.machine.discover.processors import classify_speeds
from homenode.machine.settings import HostSettings
from homenode.machine.tools.hwloc_xml import (
    HwlocDistances,
    HwlocObject,
    parse,
    parse_pus,
    read_os_index,
)
from homenode.machine.topology import (
    LOCAL_DISTANCE,
    Core,
    CoreId,
    CoreKind,
    CpuModel,
    Host,
    Llc,
    MemoryKind,
    NumaNode,
    Package,
    PagePool,
    assemble_pus,
)
from homenode.text import format_cpus
from homenode.units import parse_whole

_BASE_PAGE_BYTES = 65536  # the largest base page of any architecture; huge pages are larger


def read_hwloc_nodes(
    objects: Sequence[tuple[HwlocObject, CpuSet]],
    listed_cpus: CpuSet,
    packages: tuple[Package, ...],
    source: str,
) -> tuple[tuple[NumaNode, ...], tuple[Gap, ...]]:
    """Return the nodes. hwloc assigns a CPU-less node its nearest CPUs; here such a node has no
    CPUs. If nodes share CPUs, the node with the fewest CPUs gets them, then the lowest number;
    nodes of special memory are last."""
    # Long because each odd kind of node is handled where it is read.
    gaps: list[Gap] = []
    order = sorted(
        objects,
        key=lambda pair: (
            _special_kind(pair[0]) is not None,
            len(pair[1]),
            read_os_index(pair[0], source),
        ),
    )
    in_use = CpuSet()
    pus_of_node: dict[int, CpuSet] = {}
    shared_nodes: list[int] = []
    for obj, nearest_pus in order:
        index = read_os_index(obj, source)
        pus_of_node[index] = (
            CpuSet() if _special_kind(obj) else (nearest_pus & listed_cpus) - in_use
        )
        in_use = in_use | pus_of_node[index]
        if nearest_pus & listed_cpus and not pus_of_node[index]:
            shared_nodes.append(index)
    if shared_nodes:
        names = ", ".join(str(number) for number in sorted(shared_nodes))
        reason = "hwloc shows which CPUs are nearest to a node, not which are its own"
        gaps.append(Gap(f"CPUs of nodes {names}", f"{reason}; counted as CPU-less"))
    if listed_cpus - in_use:
        gaps.append(
            Gap(f"node of {format_cpus(listed_cpus - in_use)}", "not in any node of the XML")
        )
    nodes: list[NumaNode] = []
    for obj, _ in sorted(objects, key=lambda pair: read_os_index(pair[0], source)):
        index = read_os_index(obj, source)
        memory = parse_whole(obj.attributes.get("local_memory"))
        if memory is None and not any(key.startswith("pages of ") for key in obj.infos):
            gaps.append(Gap(f"node {index} memory", "not in the XML"))
        elif memory is None:
            memory = 0  # hwloc omits local_memory if it is 0
        pools, unknown_pools = _list_pools(obj)
        if unknown_pools:
            sizes = ", ".join(map(str, unknown_pools))
            reason = "the XML holds totals, not what is free"
            gaps.append(Gap(f"node {index} huge pages of {sizes} bytes", reason))
        special = _special_kind(obj)
        kind = special or (MemoryKind.DRAM if pus_of_node[index] else None)
        if kind is None and memory != 0:
            gaps.append(Gap(f"node {index} kind of memory", "no CPUs, and hwloc names no kind"))
        nodes.append(
            NumaNode(
                index=NodeIndex(index),
                pus=pus_of_node[index],
                memory_bytes=memory,
                page_pools=pools,
                memory_kind=kind,
                gpu=_find_gpu(obj),
                package=find_package(pus_of_node[index], packages),
            )
        )
    if not nodes:
        gaps.append(Gap("NUMA nodes", "not in the XML: the host counts as one node"))
        nodes.append(
            NumaNode(NodeIndex(0), listed_cpus, None, package=find_package(listed_cpus, packages))
        )
    return tuple(nodes), tuple(gaps)


def _special_kind(obj: HwlocObject) -> MemoryKind | None:
    """Return the kind of memory by subtype ("GPUMemory", "NVM", "HBM"); None for DRAM."""
    subtype = obj.attributes.get("subtype", "") or obj.infos.get("DAXType", "")
    if subtype.startswith("GPUMemory"):
        return MemoryKind.GPU
    return None if subtype in ("", "DRAM") else MemoryKind.OTHER


def _find_gpu(obj: HwlocObject) -> Bdf | None:
    text = obj.infos.get("PCIBusID")
    return Bdf.parse(text) if text and _special_kind(obj) is MemoryKind.GPU else None


def _list_pools(obj: HwlocObject) -> tuple[tuple[PagePool, ...], tuple[int, ...]]:
    """Return empty pools of huge pages, and sizes of others: hwloc does not show free pages."""
    empty: list[PagePool] = []
    unknown: list[int] = []
    for key, count in obj.infos.items():
        size, total = parse_whole(key.removeprefix("pages of ")), parse_whole(count)
        if not key.startswith("pages of ") or not size or size <= _BASE_PAGE_BYTES:
            continue
        if total == 0:
            empty.append(PagePool(size, 0, 0))
        else:
            unknown.append(size)
    return tuple(sorted(empty)), tuple(sorted(unknown))


def read_node_distances(
    matrices: tuple[HwlocDistances, ...], nodes: tuple[NumaNode, ...]
) -> tuple[Distances | None, tuple[Gap, ...]]:
    """Return SLIT distances, shape (nodes, nodes), [from][to]; None with a gap without any."""
    if len(nodes) == 1:
        return ((LOCAL_DISTANCE,),), ()
    names = [f"NUMANode:{node.index}" for node in nodes]
    for matrix in matrices:
        # "NUMALatency" is the SLIT; other matrices of nodes are measurements
        if matrix.name not in ("", "NUMALatency") or not matrix.by_os_index:
            continue
        place = {name: i for i, name in enumerate(matrix.objects)}
        if all(name in place for name in names):
            rows = [[matrix.values[place[a]][place[b]] for b in names] for a in names]
            return tuple(tuple(row) for row in rows), ()
    return None, (Gap("distances", "not in the XML for these nodes"),)


_DATA_CACHES = {"L2Cache", "L3Cache", "L4Cache", "L5Cache"}  # level 1 is never the last
_KIND_OF_CORE_TYPE = {"IntelCore": CoreKind.PERFORMANCE, "IntelAtom": CoreKind.EFFICIENCY}

_NOT_IN_XML = (
    (NO_VMS, "not in hwloc XML"),
    ("free memory of each node", "hwloc XML holds totals only"),
    ("isolated and nohz_full CPUs", "not in hwloc XML"),
    ("host settings", "hwloc XML holds no governor, SMT control or kernel settings"),
)


class _MachineObjects(Struct):
    """Objects of one walk over the document, with sets of CPUs in its order."""

    packages: list[tuple[int | None, CpuSet]] = field(default_factory=list)
    dies: list[tuple[int, CpuSet]] = field(default_factory=list)
    nodes: list[tuple[HwlocObject, CpuSet]] = field(default_factory=list)
    caches: list[tuple[int, int | None, CpuSet]] = field(default_factory=list)
    cores: list[tuple[int | None, CpuSet]] = field(default_factory=list)
    pus: list[int] = field(default_factory=list)


def host_from_hwloc(text: str | bytes, name: str) -> Host:
    """Return the host of a document of hwloc 1, 2 or 3; `name` is its name. Raises InputError and
    ParseError, see machine/tools/hwloc_xml.py."""
    topology = parse(text, name)
    machine = topology.machine
    objects = _MachineObjects()
    _walk(machine, objects, name)
    if not objects.pus:
        raise InputError(f"{name}: no CPU in the topology")
    gaps = [Gap(subject, reason) for subject, reason in _NOT_IN_XML]
    listed_cpus = CpuSet(objects.pus)
    complete = parse_pus(machine, "complete_cpuset", name) or listed_cpus
    allowed_cpus = parse_pus(machine, "allowed_cpuset", name) or listed_cpus
    left_out = complete - listed_cpus
    if left_out:
        reason = "omitted by hwloc: offline, or disallowed and exported without --disallowed"
        gaps.append(Gap(f"state of {format_cpus(left_out)}", reason))
    packages = _list_packages(objects, listed_cpus, gaps)
    nodes, node_gaps = read_hwloc_nodes(objects.nodes, listed_cpus, packages, name)
    gaps += node_gaps
    distances, distance_gaps = read_node_distances(topology.distances, nodes)
    gaps += distance_gaps
    llcs = _list_llcs(objects, listed_cpus, gaps)
    cores = _list_cores(objects, packages, topology.cpu_kinds, name, gaps)
    roots, devices, links, pci_gaps = read_hwloc_pci(
        machine, topology.distances, nodes, listed_cpus, name
    )
    return Host(
        name=name,
        architecture=topology.infos.get("Architecture") or _find_architecture(machine),
        cpu=_parse_cpu_model(machine, topology.infos),
        packages=packages,
        nodes=nodes,
        distances=distances,
        llcs=llcs,
        cores=cores,
        pus=assemble_pus(
            listed_cpus | left_out,
            listed_cpus,
            cores=cores,
            llcs=llcs,
            nodes=nodes,
            packages=packages,
            die_of_pu={pu: die for die, pus in objects.dies for pu in pus},
            disallowed_pus=listed_cpus - allowed_cpus,
        ),
        root_complexes=roots,
        pci_devices=devices,
        links=links,
        settings=HostSettings(kernel_release=topology.infos.get("OSRelease")),
        gaps=(*gaps, *pci_gaps),
        nodes_assumed=not objects.nodes,
    )


def _walk(obj: HwlocObject, objects: _MachineObjects, source: str) -> None:
    for child in obj.children:
        kind = child.type
        if kind in ("Bridge", "PCIDev", "OSDev", "Misc"):
            continue
        if kind == "PU":
            objects.pus.append(read_os_index(child, source))
            continue
        pus = parse_pus(child, "cpuset", source)
        if kind == "NUMANode":
            objects.nodes.append((child, pus))
        elif kind == "Package":
            objects.packages.append((parse_whole(child.attributes.get("os_index")), pus))
        elif kind == "Die":
            die = parse_whole(child.attributes.get("os_index"))
            if die is not None:
                objects.dies.append((die, pus))
        elif kind == "Core":
            objects.cores.append((parse_whole(child.attributes.get("os_index")), pus))
        elif kind in _DATA_CACHES:
            size = parse_whole(child.attributes.get("cache_size"))
            depth = parse_whole(child.attributes.get("depth")) or 0
            objects.caches.append((depth, size or None, pus))
        _walk(child, objects, source)


def _list_packages(
    objects: _MachineObjects, listed_cpus: CpuSet, gaps: list[Gap]
) -> tuple[Package, ...]:
    if not objects.packages:
        gaps.append(Gap("packages", "not in the XML: all CPUs count as package 0"))
        return (Package(PackageIndex(0), listed_cpus),)
    numbers = [number for number, _ in objects.packages]
    if None in numbers or len(set(numbers)) < len(numbers):
        gaps.append(Gap("package numbers", "not in the XML; numbered in its order"))
        numbers = list(range(len(numbers)))
    pairs = zip(numbers, objects.packages, strict=True)
    packages = [Package(PackageIndex(n or 0), pus & listed_cpus) for n, (_, pus) in pairs]
    return tuple(sorted(packages, key=lambda package: package.index))


def _list_llcs(objects: _MachineObjects, listed_cpus: CpuSet, gaps: list[Gap]) -> tuple[Llc, ...]:
    in_use = CpuSet()
    chosen_caches: list[tuple[CpuSet, int, int | None]] = []
    for level, size, pus in sorted(objects.caches, key=lambda cache: -cache[0]):
        cache_pus = pus & listed_cpus
        if cache_pus and cache_pus.isdisjoint(in_use):
            in_use = in_use | cache_pus
            chosen_caches.append((cache_pus, level, size))
    if listed_cpus - in_use:
        gaps.append(Gap(f"last-level cache of CPUs {listed_cpus - in_use}", "not in the XML"))
    chosen_caches.sort(key=lambda cache: cache[0].first() or 0)
    return tuple(Llc(LlcIndex(i), *cache) for i, cache in enumerate(chosen_caches))


def _list_cores(
    objects: _MachineObjects,
    packages: tuple[Package, ...],
    kinds: tuple[tuple[str, dict[str, str]], ...],
    source: str,
    gaps: list[Gap],
) -> tuple[Core, ...]:
    if not objects.cores:
        gaps.append(Gap("cores", "not in the XML"))
    kind_of_pu = _classify_pus(kinds, source)
    package_of_pu = {pu: package.index for package in packages for pu in package.pus}
    cores: list[Core] = []
    for label, pus in sorted(objects.cores, key=lambda core: core[1].first() or 0):
        first = pus.first()
        if first is None:
            continue
        package = package_of_pu.get(first, PackageIndex(0))
        core_id = CoreId(package, first if label is None else label)
        cores.append(Core(CoreIndex(len(cores)), core_id, pus, kind_of_pu.get(first)))
    return tuple(cores)


def _classify_pus(
    kinds: tuple[tuple[str, dict[str, str]], ...], source: str
) -> dict[PuIndex, CoreKind]:
    """Return P and E by the type of core that CPUID gives, else by speed as on Linux."""
    sets = [CpuSet.parse_mask(cpuset, f"{source}: cpukind") for cpuset, _ in kinds]
    types = [infos.get("CoreType") for _, infos in kinds]
    chosen_kinds: tuple[CoreKind | None, ...] = (None,) * len(kinds)
    if set(types) == set(_KIND_OF_CORE_TYPE):
        chosen_kinds = tuple(_KIND_OF_CORE_TYPE[str(core_type)] for core_type in types)
    else:
        for info in ("LinuxCapacity", "FrequencyMaxMHz", "FrequencyBaseMHz"):
            speeds = [speed for _, infos in kinds if (speed := parse_whole(infos.get(info)))]
            if speeds and len(speeds) == len(kinds):
                chosen_kinds = classify_speeds(speeds)
                break
    pairs = zip(sets, chosen_kinds, strict=True)
    return {pu: kind for pus, kind in pairs if kind is not None for pu in pus}


def _parse_cpu_model(machine: HwlocObject, infos: dict[str, str]) -> CpuModel:
    values = {**infos, **_find_first_package(machine).infos}
    return CpuModel(
        vendor=values.get("CPUVendor"),
        name=(values.get("CPUModel") or "").strip() or None,
        family=parse_whole(values.get("CPUFamilyNumber")),
        model=parse_whole(values.get("CPUModelNumber")),
    )


def _find_architecture(machine: HwlocObject) -> str | None:
    """Return x86_64 if the packages have CPUID numbers, which only hwloc's x86 code writes."""
    return "x86_64" if "CPUFamilyNumber" in _find_first_package(machine).infos else None


def _find_first_package(machine: HwlocObject) -> HwlocObject:
    """Return the first package, also in a group or (version 1) a node; else the machine."""
    level = machine.children
    while level:
        for child in level:
            if child.type == "Package":
                return child
        level = tuple(grandchild for child in level for grandchild in child.children)
    return machine
