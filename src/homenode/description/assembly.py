"""From parsed cores, nodes and devices to the Host that they are; offline PUs fall out here."""

from collections.abc import Iterable, Mapping, Sequence

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, PuIndex
from homenode.description.cpus import CoreSlot
from homenode.description.nodes import NodeSlot
from homenode.description.settings import PuSettings
from homenode.description.table import Table
from homenode.errors import InputError
from homenode.indices import CoreIndex, LlcIndex, NodeIndex, PackageIndex
from homenode.topology import Core, CoreId, Llc, MemoryKind, NumaNode, Package, Pu


def online_pus(file: Table, cores: Sequence[CoreSlot]) -> CpuSet:
    """All PUs but `offline_pus`. Raises InputError where none is left or one does not exist."""
    every = CpuSet(pu for core in cores for pu in core.pus)
    offline = file.pus("offline_pus")
    if not offline <= every or offline == every:
        raise file.refusal("offline_pus", f"some of the PUs {every}, not all", str(offline))
    return every - offline


def pus_of_node(cores: Sequence[CoreSlot], online: CpuSet) -> dict[int | None, CpuSet]:
    """Online PUs of each node that has cores; of None, which is no node, all of them."""
    pus: dict[int | None, list[int]] = {}
    for core in cores:
        pus.setdefault(core.node, []).extend(core.pus)
    return {None: online, **{node: CpuSet(found) & online for node, found in pus.items()}}


def numa_nodes(
    source: str,
    nodes: Sequence[NodeSlot],
    local: Mapping[int | None, CpuSet],
    bdf_of_name: Mapping[str, Bdf],
) -> tuple[NumaNode, ...]:
    found = []
    for node in nodes:
        gpu = None
        if node.gpu is not None:
            gpu = bdf_of_name.get(node.gpu)
            if gpu is None:
                known = ", ".join(sorted(bdf_of_name)[:20]) or "none"
                raise InputError(
                    f"{source}: node {node.index}.gpu: expected the name of a device, one of "
                    f"{known}, found {node.gpu!r}"
                )
        pus = local.get(node.index, CpuSet())
        found.append(
            NumaNode(
                index=NodeIndex(node.index),
                pus=pus,
                memory_bytes=node.memory_bytes,
                memory_free_bytes=node.free_bytes,
                page_pools=node.page_pools,
                memory_kind=_memory_kind(node, pus),
                gpu=gpu,
                generic_initiator=node.generic_initiator,
                package=PackageIndex(node.package) if pus and node.package is not None else None,
            )
        )
    return tuple(found)


def cores_of(slots: Sequence[CoreSlot], online: CpuSet) -> tuple[Core, ...]:
    """Cores that have an online PU, by their lowest one."""
    alive = [(CpuSet(slot.pus) & online, slot) for slot in slots if CpuSet(slot.pus) & online]
    alive.sort(key=lambda pair: _lowest(pair[0]))
    return tuple(
        Core(CoreIndex(i), CoreId(PackageIndex(slot.package), slot.id), pus, slot.kind)
        for i, (pus, slot) in enumerate(alive)
    )


def llcs_of(
    slots: Sequence[CoreSlot], online: CpuSet, level: int, size_bytes: int | None
) -> tuple[Llc, ...]:
    """Last-level caches that an online PU uses, by their lowest one."""
    sharers = _united((slot.llc, slot.pus) for slot in slots if slot.llc is not None)
    alive = sorted((pus & online for pus in sharers.values() if pus & online), key=_lowest)
    return tuple(Llc(LlcIndex(i), pus, level, size_bytes) for i, pus in enumerate(alive))


def packages_of(slots: Sequence[CoreSlot], online: CpuSet) -> tuple[Package, ...]:
    members = _united((slot.package, slot.pus) for slot in slots)
    return tuple(
        Package(PackageIndex(index), pus & online)
        for index, pus in sorted(members.items())
        if pus & online
    )


def pus_of(
    slots: Sequence[CoreSlot],
    cores: Sequence[Core],
    llcs: Sequence[Llc],
    online: CpuSet,
    settings: PuSettings,
) -> tuple[Pu, ...]:
    """Every PU ascending; an offline one says nothing of where it is, as in sysfs."""
    core_of = {pu: core.index for core in cores for pu in core.pus}
    llc_of = {pu: llc.index for llc in llcs for pu in llc.pus}
    found = []
    for slot in slots:
        for number in slot.pus:
            pu = PuIndex(number)
            here = pu in online
            found.append(
                Pu(
                    index=pu,
                    core=core_of[pu] if here else None,
                    llc=llc_of.get(pu),
                    node=NodeIndex(slot.node) if here else None,
                    package=PackageIndex(slot.package) if here else None,
                    die=slot.die if here else None,
                    online=here,
                    allowed=pu not in settings.disallowed,
                    isolated=pu in settings.isolated,
                    nohz_full=pu in settings.nohz_full,
                )
            )
    return tuple(sorted(found, key=lambda pu: pu.index))


def _memory_kind(node: NodeSlot, pus: CpuSet) -> MemoryKind | None:
    """What the kernel shows a node's memory: of a CPU-less node, nothing by itself."""
    if node.gpu is not None:
        return MemoryKind.GPU
    if node.is_device_memory:
        return MemoryKind.OTHER
    return MemoryKind.DRAM if pus else None


def _united(pairs: Iterable[tuple[int, tuple[int, ...]]]) -> dict[int, CpuSet]:
    members: dict[int, list[int]] = {}
    for key, pus in pairs:
        members.setdefault(key, []).extend(pus)
    return {key: CpuSet(pus) for key, pus in members.items()}


def _lowest(pus: CpuSet) -> int:
    first = pus.first()
    return -1 if first is None else first
