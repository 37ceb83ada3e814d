"""Symmetry: interchangeable parts of a machine, so that equal states have one form.

GPUs of one node and model that belong to the same GPU sets are interchangeable. So are the LLCs of
a node and, if distances, packages and devices are equal, whole nodes. The planner's answers for a
state and for its canonical form differ only in the indices.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.indices import NodeIndex
from homenode.machine.pci import PciDevice
from homenode.machine.topology import Host
from homenode.plan.devices.options import DeviceInventory
from homenode.vm.gpu_parts import parts_at

MOST_NODE_ORDERS = 16
"""Orders of nodes that are compared for one state."""

_NODES_TO_ORDER = 8

CoreCounts = tuple[tuple[int, int], ...]


class GpuClass(Struct, frozen=True):
    """Interchangeable GPUs. units: the functions of each slot, the GPU first."""

    units: tuple[tuple[Bdf, ...], ...]


class NodeOrder(Struct, frozen=True, kw_only=True):
    """One way to rename the nodes. nodes: the node that comes to each position. cores, gpus: the
    class that comes to each class."""

    nodes: tuple[int, ...]
    cores: tuple[int, ...]
    gpus: tuple[int, ...]


class Symmetry(Struct, frozen=True, kw_only=True):
    """The interchangeable parts of machines of one shape. gpus: classes of GPUs. llcs: groups of
    classes of cores on one node that can be exchanged, class by class. orders: ways to rename the
    nodes; the first changes nothing."""

    gpus: tuple[GpuClass, ...]
    llcs: tuple[tuple[tuple[int, ...], ...], ...]
    orders: tuple[NodeOrder, ...]

    def counts(self, owned: Sequence[Bdf | str]) -> tuple[int, ...] | None:
        """How many GPUs of each class these functions are; None where they are not whole GPUs."""
        mine = set(owned)
        found = []
        for one in self.gpus:
            units = [unit for unit in one.units if unit[0] in mine]
            if any(not mine.issuperset(unit) for unit in units):
                return None
            found.append(len(units))
        named = sum(len(one.units[0]) * count for one, count in zip(self.gpus, found, strict=True))
        return tuple(found) if named == len(mine) else None

    def owned(self, counts: Sequence[int]) -> tuple[Bdf, ...]:
        """The functions of the first so many GPUs of each class, ascending."""
        functions = [
            bdf
            for one, count in zip(self.gpus, counts, strict=True)
            for unit in one.units[:count]
            for bdf in unit
        ]
        return tuple(sorted(functions, key=str))

    def forms(
        self, cores: CoreCounts, gpus: Sequence[int]
    ) -> Iterator[tuple[CoreCounts, tuple[int, ...], tuple[int, ...]]]:
        """(cores, GPUs, order of the nodes) of each form that these counts can have."""
        for order in self.orders:
            renamed = [cores[i] for i in order.cores]
            for alike in self.llcs:
                own = sorted(([renamed[i] for i in one] for one in alike), reverse=True)
                for one, values in zip(alike, own, strict=True):
                    for i, value in zip(one, values, strict=True):
                        renamed[i] = value
            yield tuple(renamed), tuple([gpus[i] for i in order.gpus]), order.nodes


def symmetry(
    devices: DeviceInventory, gpus: Sequence[PciDevice], classes: Sequence[Sequence[CpuSet]]
) -> Symmetry | None:
    """The symmetry of a shape; None if the node of a core is not known. gpus: those that VMs can
    get. classes: interchangeable cores, class by class."""
    host = devices.host
    position = {node.index: i for i, node in enumerate(host.nodes)}
    places = [_place_of(host, members, position) for members in classes]
    known = [place for place in places if place is not None]
    if len(known) < len(places) or host.housekeeping_pus:
        return None
    passable = {gpu.bdf for gpu in gpus}
    # A set with a GPU that no VM can have is never free: nothing is lost of it.
    sets = [one for one in devices.sets if one <= passable]
    gpu_classes, gpu_keys = _gpu_classes(devices, gpus, sets)
    by_llc: dict[tuple[int, object], list[int]] = {}
    for i, place in enumerate(known):
        by_llc.setdefault((place.node, place.llc), []).append(i)
    alike: dict[tuple[int, object], list[tuple[int, ...]]] = {}
    for (node, _), members in by_llc.items():
        likeness = tuple((known[i].kind, len(classes[i])) for i in members)
        alike.setdefault((node, likeness), []).append(tuple(members))
    nodes_of_llc = [{node for node, one in by_llc if one == llc} for _, llc in by_llc]
    orders = [
        NodeOrder(
            nodes=tuple(range(len(host.nodes))),
            cores=tuple(range(len(classes))),
            gpus=tuple(range(len(gpu_classes))),
        )
    ]
    if all(len(nodes) == 1 for nodes in nodes_of_llc) and len(host.nodes) <= _NODES_TO_ORDER:
        orders += _node_orders(host, sets, gpu_classes, gpu_keys, alike, position)
    groups = (tuple(group) for group in alike.values() if len(group) > 1)
    return Symmetry(gpus=tuple(gpu_classes), llcs=tuple(groups), orders=tuple(orders))


class _CorePlace(Struct, frozen=True, kw_only=True):
    """Where cores of a class are: position of their node, LLC; and what they are."""

    node: int
    llc: object
    kind: object


def _place_of(
    host: Host, members: Sequence[CpuSet], position: dict[NodeIndex, int]
) -> _CorePlace | None:
    pus = [host.pu_at[pu] for pu in members[0]]
    nodes = {pu.node for pu in pus}
    llcs = {pu.llc for pu in pus}
    node = next(iter(nodes))
    if len(nodes) > 1 or len(llcs) > 1 or node not in position:
        return None
    core = next(core for core in host.cores if core.pus == members[0])
    flags = tuple((pu.online, pu.allowed, pu.isolated, pu.nohz_full) for pu in pus)
    llc = next(iter(llcs))
    size = None if llc is None else host.llcs[llc].size_bytes
    return _CorePlace(node=position[node], llc=llc, kind=(core.kind, flags, size))


def _gpu_classes(
    devices: DeviceInventory, gpus: Sequence[PciDevice], sets: Sequence[frozenset[Bdf]]
) -> tuple[list[GpuClass], list[tuple[object, ...]]]:
    """The classes, and what the GPUs of each have in common apart from their node."""
    host = devices.host
    memory_of = {node.gpu for node in host.nodes}
    found: dict[tuple[object, ...], list[tuple[Bdf, ...]]] = {}
    for gpu in gpus:
        others = devices.companions[gpu.bdf]
        what = (
            _what_it_is(gpu),
            tuple((part.kind, part.profile) for part in parts_at(host.device_at, gpu.bdf)),
            tuple(_what_it_is(host.device_at[bdf]) for bdf in others),
            len(host.bridges_above(gpu.bdf)),
        )
        member_of = tuple(i for i, one in enumerate(sets) if gpu.bdf in one)
        alone = gpu.bdf if gpu.bdf in memory_of else None
        key = (what, gpu.node, gpu.physical_function, member_of, alone)
        found.setdefault(key, []).append((gpu.bdf, *others))
    return [GpuClass(tuple(units)) for units in found.values()], [
        (what, len(units), alone is not None) for (what, *_, alone), units in found.items()
    ]


def _what_it_is(device: PciDevice) -> tuple[object, ...]:
    return (
        device.kind,
        device.class_code,
        device.vendor_id,
        device.device_id,
        device.name,
        tuple(bar.size_bytes for bar in device.bars),
        device.node is None,
        device.physical_function is None,
    )


def _node_orders(
    host: Host,
    sets: Sequence[frozenset[Bdf]],
    gpu_classes: Sequence[GpuClass],
    gpu_keys: Sequence[tuple[object, ...]],
    alike: dict[tuple[int, object], list[tuple[int, ...]]],
    position: dict[NodeIndex, int],
) -> Iterator[NodeOrder]:
    """Ways to rename the nodes that change nothing, without the one that renames none."""
    number = len(host.nodes)
    own_cores = [
        [(likeness, members) for (at, likeness), members in alike.items() if at == node]
        for node in range(number)
    ]
    home = [host.device_at[one.units[0][0]].node for one in gpu_classes]
    own_gpus = [
        [i for i, node in enumerate(home) if node is not None and position.get(node) == at]
        for at in range(number)
    ]
    what = [
        (
            bool(node.pus),
            node.memory_kind,
            node.generic_initiator,
            node.gpu is None,
            [(repr(likeness), len(members)) for likeness, members in own_cores[i]],
            [gpu_keys[j] for j in own_gpus[i]],
        )
        for i, node in enumerate(host.nodes)
    ]

    def fits(order: Sequence[int], node: int) -> bool:
        at = len(order)
        here, there = host.nodes[at], host.nodes[node]
        if node in order or what[at] != what[node]:
            return False
        for i, other in enumerate(order):
            same = (host.nodes[i].package == here.package) == (
                host.nodes[other].package == there.package
            )
            if not same or _distances(host, i, at) != _distances(host, other, node):
                return False
        return True

    def extended(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(order) == number:
            yield order
            return
        for node in range(number):
            if fits(order, node):
                yield from extended((*order, node))

    family = set(sets)
    for order in islice(extended(()), 1, MOST_NODE_ORDERS):
        cores = {
            mine: theirs
            for at, node in enumerate(order)
            for (_, here), (_, there) in zip(own_cores[at], own_cores[node], strict=True)
            for one, other in zip(here, there, strict=True)
            for mine, theirs in zip(one, other, strict=True)
        }
        gpus = {i: i for i in range(len(gpu_classes))}
        for at, node in enumerate(order):
            gpus |= zip(own_gpus[at], own_gpus[node], strict=True)
        renamed = {
            mine[0]: theirs[0]
            for i, j in gpus.items()
            for mine, theirs in zip(gpu_classes[i].units, gpu_classes[j].units, strict=True)
        }
        memory = all(
            here.gpu is None or renamed.get(here.gpu) == host.nodes[node].gpu
            for here, node in zip(host.nodes, order, strict=True)
        )
        if memory and {frozenset(map(renamed.__getitem__, one)) for one in family} == family:
            yield NodeOrder(
                nodes=order,
                cores=tuple(cores[i] for i in range(len(cores))),
                gpus=tuple(gpus[i] for i in range(len(gpus))),
            )


def _distances(host: Host, a: int, b: int) -> tuple[int, int] | None:
    if host.distances is None:
        return None
    return host.distances[a][b], host.distances[b][a]
