"""Nova: a weigher and a filter for nova-scheduler, with the policy of `pool place`.

nova-scheduler loads them by name: homenode.cluster.scheduler.nova.HomenodeWeigher in
weight_classes, HomenodeFilter in available_filters. They know what its HostState says: NUMA cells
with dedicated CPUs and memory, and PCI pools. Where a VM goes on a host is Nova's own fit; what
that costs the hosts is the planner's to say.

Source: Nova 34, nova/weights.py, nova/scheduler/host_manager.py, nova/pci/stats.py.
"""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

from msgspec import Struct, structs

from homenode.bdf import Bdf
from homenode.cluster.pool.amounts import Amount, fewest
from homenode.cluster.pool.flavour import default_flavours
from homenode.cluster.pool.model import PoolBuilder, PoolHost
from homenode.cluster.pool.place import PoolPlaces
from homenode.cpuset import CpuSet
from homenode.indices import NodeIndex
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host, RunningDomain
from homenode.units import MIB
from homenode.vm.sources import host_of_text

NAMES = ("HomenodeWeigher", "HomenodeFilter")
LOCALITY = "homenode:locality"
"""The extra spec of a flavor that the filter looks at: "require"."""

DEFAULT_MULTIPLIER = 1000.0
"""A step of one host among 200 is 5: more than the other weighers of a usual nova.conf together."""

GPU_VENDORS = frozenset({"10de", "1002"})
_MOST_KEPT = 20_000
_FIRST_BUS, _BUSES = 0x08, 4

Amounts = Mapping[int, tuple[int, int, int]]
"""By the id of a cell: cores, MiB, GPUs."""


class NovaCellSize(Struct, frozen=True, kw_only=True):
    """What a NUMA cell has. gpus: the most that were ever free there."""

    id: int
    socket: int | None
    cores: int
    threads: int
    memory_mib: int
    gpus: int


class NovaCell(Struct, frozen=True, kw_only=True):
    """A NUMA cell now. size: without GPUs. used_cores, used_mib: what VMs have. rest: what else
    Nova's fit looks at."""

    size: NovaCellSize
    used_cores: int
    used_mib: int
    rest: tuple[object, ...]


class NovaHosts:
    """The hosts of a scheduler as machines that the planner knows, by their cells."""

    def __init__(self) -> None:
        self._pci: set[tuple[str, str]] = set()
        self._gpus: dict[tuple[NovaCellSize, ...], Counter[int]] = {}
        self._places: dict[tuple[NovaCellSize, ...], tuple[PoolPlaces, PoolHost]] = {}
        self._cells: dict[tuple[object, ...], NovaCell] = {}
        self._orders: dict[tuple[object, ...], tuple[int, ...] | None] = {}

    def orders(self, hosts: Sequence[Any], spec: Any) -> list[tuple[int, ...] | None]:
        """Of each host its place in the policy's order, the least is the best: the VM's own
        locality, the VMs that no longer fit, the free GPUs. None where it does not fit, or
        where the host says nothing of its cells."""
        requests = _requests(spec)
        for request in requests:
            for one in request.spec:
                if "vendor_id" in one and "product_id" in one:
                    self._pci.add((one["vendor_id"], one["product_id"]))
        asked = repr((spec.numa_topology, [(r.count, r.spec, r.numa_policy) for r in requests]))
        cells = [self._cells_of(host) for host in hosts]
        for host, own in zip(hosts, cells, strict=True):
            known = self._gpus.setdefault(_sizes(own), Counter())
            known |= self._free_gpus(host.pci_stats)
        return [self._order(*one, spec, asked) for one in zip(hosts, cells, strict=True)]

    def is_local(self, host: Any, spec: Any) -> bool:
        """Whether the VM spans no more sockets than it must, with every GPU on its cells."""
        order = self.orders([host], spec)[0]
        if order is None:
            return True
        sockets, away = order[:2]
        return away == 0 and sockets <= self._fewest_sockets(host, spec)

    def _cells_of(self, host: Any) -> tuple[NovaCell, ...]:
        """The host's cells by id; () where it says nothing of them."""
        cells = () if host.numa_topology is None else host.numa_topology.cells
        return tuple(map(self._cell, sorted(cells, key=lambda cell: int(cell.id))))

    def _cell(self, cell: Any) -> NovaCell:
        rest = (
            cell.avail_memory,
            cell.cpu_usage,
            tuple((p.size_kb, p.total, p.used) for p in cell.mempages),
        )
        cpus = frozenset(cell.pcpuset), tuple(map(frozenset, cell.siblings))
        pinned = frozenset(cell.pinned_cpus)
        key = (cell.id, cell.socket, cell.memory, cell.memory_usage, *cpus, pinned, rest)
        if key not in self._cells:
            if len(self._cells) > _MOST_KEPT:
                self._cells.clear()
            cores, free = _cores(cell), cell.free_pcpus
            size = NovaCellSize(
                id=cell.id,
                socket=cell.socket,
                cores=len(cores),
                threads=max(map(len, cores), default=1),
                memory_mib=cell.memory,
                gpus=0,
            )
            self._cells[key] = NovaCell(
                size=size,
                used_cores=sum(not core <= free for core in cores),
                used_mib=cell.memory_usage,
                rest=(tuple(sorted(map(len, cell.free_siblings))), *rest),
            )
        return self._cells[key]

    def _free_gpus(self, stats: Any) -> Counter[int]:
        found: Counter[int] = Counter()
        for pool in () if stats is None else stats.pools:
            kind = pool.get("vendor_id"), pool.get("product_id")
            if (kind[0] in GPU_VENDORS or kind in self._pci) and pool.get("numa_node") is not None:
                found[int(pool["numa_node"])] += int(pool["count"])
        return found

    def _sizes(self, cells: Sequence[NovaCell]) -> tuple[NovaCellSize, ...]:
        sizes = _sizes(cells)
        gpus = self._gpus[sizes]
        return tuple(structs.replace(size, gpus=gpus[size.id]) for size in sizes)

    def _fewest_sockets(self, host: Any, spec: Any) -> int:
        """How many sockets of the empty host hold the VM."""
        sizes = self._sizes(self._cells_of(host))
        sockets: dict[int | None, list[NovaCellSize]] = {}
        for size in sizes:
            sockets.setdefault(size.socket, []).append(size)
        parts = [
            Amount(
                gpus=sum(one.gpus for one in own),
                cores=sum(one.cores * one.threads for one in own),
                memory_bytes=sum(one.memory_mib for one in own) * MIB,
            )
            for own in sockets.values()
        ]
        gpus = sum(request.count for request in _requests(spec))
        size = spec.memory_mb * MIB
        return fewest(parts, Amount(gpus=gpus, cores=spec.vcpus, memory_bytes=size))

    def _order(
        self, host: Any, cells: tuple[NovaCell, ...], spec: Any, asked: str
    ) -> tuple[int, ...] | None:
        """Hosts alike share it. asked: what the VM asks for."""
        if not any(cell.size.cores for cell in cells):
            return None
        pools = () if host.pci_stats is None else host.pci_stats.pools
        candidates = host.allocation_candidates or ({"mappings": spec.get_request_group_mapping()},)
        mapping = candidates[0]["mappings"]
        known = self._gpus[_sizes(cells)]
        key = (
            cells,
            tuple(sorted(known.items())),
            tuple(sorted((str(p.get("numa_node")), repr(_tags(p)), p["count"]) for p in pools)),
            repr(mapping),
            asked,
        )
        if key not in self._orders:
            if len(self._orders) > _MOST_KEPT:
                self._orders.clear()
            free = self._free_gpus(host.pci_stats)
            taken = self._fit(host, spec, _requests(spec), free, mapping)
            used = {
                cell.size.id: (
                    cell.used_cores,
                    cell.used_mib,
                    known[cell.size.id] - free[cell.size.id],
                )
                for cell in cells
            }
            self._orders[key] = (
                None if taken is None else self._cost(self._sizes(cells), used, taken)
            )
        return self._orders[key]

    def _fit(
        self,
        host: Any,
        spec: Any,
        requests: Sequence[Any],
        free: Counter[int],
        mapping: Mapping[str, Any] | None,
    ) -> Amounts | None:
        """What the VM would get of each cell, by Nova's own fit."""
        fitted = None
        if spec.numa_topology is not None:
            fitted = import_module("nova.virt.hardware").numa_fit_instance_to_host(
                host.numa_topology,
                copy.deepcopy(spec.numa_topology),
                limits=host.limits.get("numa_topology"),
                pci_requests=requests or None,
                pci_stats=host.pci_stats,
                provider_mapping=mapping,
            )
            if fitted is None:
                return None
        left = free
        if requests and host.pci_stats is not None:
            stats = copy.deepcopy(host.pci_stats)
            try:
                stats.apply_requests(requests, mapping, None if fitted is None else fitted.cells)
            except import_module("nova.exception").PciDeviceRequestFailed:
                return None
            left = self._free_gpus(stats)
        cells = host.numa_topology.cells
        threads = {cell.id: max(map(len, cell.siblings), default=1) for cell in cells}
        taken: dict[int, tuple[int, int, int]] = {
            node: (0, 0, count) for node, count in (free - left).items()
        }
        for cell in () if fitted is None else fitted.cells:
            cpus = len(cell.pcpuset)
            isolates = cell.cpu_thread_policy == "isolate"
            cores = cpus if isolates else -(-cpus // threads.get(cell.id, 1))
            known = taken.get(cell.id, (0, 0, 0))
            taken[cell.id] = known[0] + cores, known[1] + cell.memory, known[2]
        return taken

    def _cost(
        self, sizes: tuple[NovaCellSize, ...], used: Amounts, taken: Amounts
    ) -> tuple[int, ...]:
        """The order of `pool place` for the VM where Nova puts it."""
        if sizes not in self._places:
            self._places[sizes] = _as_pool(sizes)
        places, empty = self._places[sizes]
        position = {size.id: number for number, size in enumerate(sizes)}
        none = (0, 0, 0)
        both = {
            cell: (a + x, b + y, c + z)
            for cell in position
            for (a, b, c), (x, y, z) in ((used.get(cell, none), taken.get(cell, none)),)
        }
        states = [
            places.planner.state_of(0, _with_used(places, empty, position, amounts))
            for amounts in (used, both)
        ]
        at = {cell for cell, (cores, memory, _) in taken.items() if cores or memory}
        with_gpus = {cell for cell, (_, _, gpus) in taken.items() if gpus}
        away = sum(taken[cell][2] for cell in with_gpus - at) if at else 0
        spanned = {size.socket for size in sizes if size.id in at | with_gpus}
        return (len(spanned), away, len(at | with_gpus), *places.cost_of_change(*states))


def _requests(spec: Any) -> list[Any]:
    return [] if spec.pci_requests is None else list(spec.pci_requests.requests)


def _tags(pool: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted((key, one) for key, one in pool.items() if key not in ("count", "devices"))


def _cores(cell: Any) -> list[set[int]]:
    """Cores whose CPUs are for VMs alone."""
    own = [core & cell.pcpuset for core in cell.siblings] or [{cpu} for cpu in cell.pcpuset]
    return [core for core in own if core]


def _sizes(cells: Sequence[NovaCell]) -> tuple[NovaCellSize, ...]:
    return tuple(cell.size for cell in cells)


def _as_pool(sizes: tuple[NovaCellSize, ...]) -> tuple[PoolPlaces, PoolHost]:
    """A machine with these cells: each a node, in packages by socket; its GPUs are below root ports
    of their own."""
    sockets = list(dict.fromkeys(size.socket for size in sizes))
    even = len({sum(size.socket == one for size in sizes) for one in sockets}) == 1
    packages = len(sockets) if even and None not in sockets else len(sizes)
    cores = min(size.cores for size in sizes if size.cores) * len(sizes) // packages
    lines = [
        "format = 1",
        'name = "nova"',
        f"packages = {packages}",
        f"nodes_per_package = {len(sizes) // packages}",
        f"cores_per_package = {cores}",
        f"threads_per_core = {max(size.threads for size in sizes)}",
        f'memory_per_node = "{min(size.memory_mib for size in sizes)}MiB"',
        "[model.gpu]",
        'class = "gpu"',
        "vendor = 0x10de",
        "device = 0x2330",
    ]
    bus = _FIRST_BUS
    for node, size in enumerate(sizes):
        for _ in range(size.gpus):
            lines += ["[[root]]", f"node = {node}", f"bus = {bus}", 'ports = ["gpu"]']
            bus += _BUSES
    builder = PoolBuilder()
    builder.add(host_of_text("\n".join(lines), "nova"), "nova", "nova")
    pool = builder.pool()
    return PoolPlaces(pool, default_flavours()), pool.hosts[0]


def _with_used(
    places: PoolPlaces, empty: PoolHost, position: Mapping[int, int], used: Amounts
) -> Host:
    """The machine while so much of each cell is in use: which of its cores and GPUs is the same to
    the planner."""
    host = places.planner.pool.host(empty)
    pins: list[CpuSet] = []
    devices: list[Bdf] = []
    memory: list[tuple[NodeIndex, int]] = []
    for cell, (cores, mib, gpus) in sorted(used.items()):
        node = host.nodes[position[cell]]
        own = [core.pus for core in host.cores if core.pus <= node.pus]
        pins += own[:cores]
        memory.append((node.index, mib * MIB))
        there = [gpu for gpu in host.devices_of_kind(DeviceKind.GPU) if gpu.node == node.index]
        devices += [gpu.bdf for gpu in there[:gpus]]
    vm = RunningDomain(
        name="used",
        running=False,
        planned=True,
        vcpu_pins=tuple(CpuSet([pu]) for pin in pins for pu in pin),
        emulator_pus=None,
        iothread_pus=(),
        memory_bytes=sum(size for _, size in memory),
        memory_bound=True,
        memory_by_node=tuple(one for one in memory if one[1]),
        page_bytes=None,
        devices=tuple(devices),
    )
    return structs.replace(host, domains=(vm,))


# What nova-scheduler loads


def __getattr__(name: str) -> type:
    """The classes, once Nova asks for them: elsewhere there is no Nova."""
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _classes()[name]


@cache
def _classes() -> dict[str, type]:
    weights = import_module("nova.scheduler.weights")
    filters = import_module("nova.scheduler.filters")
    conf, cfg = import_module("nova.conf").CONF, import_module("oslo_config.cfg")
    conf.register_opt(
        cfg.FloatOpt(
            "weight_multiplier",
            default=DEFAULT_MULTIPLIER,
            help="How much HomenodeWeigher counts next to the other weighers.",
        ),
        group="homenode",
    )
    hosts = NovaHosts()

    class HomenodeWeigher(weights.BaseHostWeigher):  # type: ignore[name-defined,misc]
        """The best host by the order of `homenode pool place` has the highest weight."""

        def weight_multiplier(self, host_state: Any) -> float:
            return float(conf.homenode.weight_multiplier)

        def _weigh_object(self, obj: Any, weight_properties: Any) -> float:
            raise NotImplementedError("a host is weighed against the others: weigh_objects")

        def weigh_objects(
            self, weighed_obj_list: Sequence[Any], weight_properties: Any
        ) -> list[float]:
            orders = hosts.orders([one.obj for one in weighed_obj_list], weight_properties)
            known = sorted({order for order in orders if order is not None})
            rank = {order: float(-number) for number, order in enumerate(known)}
            worst = float(-len(known))
            return [worst if order is None else rank[order] for order in orders]

    class HomenodeFilter(filters.BaseHostFilter):  # type: ignore[name-defined,misc]
        """Of flavors with homenode:locality=require: hosts where the VM spans no more sockets than
        it must, with every GPU on its cells."""

        RUN_ON_REBUILD = False

        def host_passes(self, host_state: Any, filter_properties: Any) -> bool:
            wanted = filter_properties.flavor.extra_specs.get(LOCALITY)
            return wanted != "require" or hosts.is_local(host_state, filter_properties)

    return {"HomenodeWeigher": HomenodeWeigher, "HomenodeFilter": HomenodeFilter}
