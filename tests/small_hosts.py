"""Hosts, guests and requests as values, in a line or two each, for tests of the planner.

`even_host` makes regular machines, `host_of` odd ones. CPUs are numbered as Linux numbers x86: the
first thread of every core, core by core, then the second threads, and so on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CoreIndex, CpuSet, LlcIndex, NodeIndex, PackageIndex, PuIndex
from homenode.machine.pci import DeviceKind, PciBridge, PciDevice, PortType, RootComplex
from homenode.machine.topology import (
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
    Pu,
    RunningDomain,
)
from homenode.plan.request import GuestRequest
from homenode.units import GIB
from homenode.vm.layout import PRESETS, Layout
from homenode.vm.model import GuestHostdev, Vm
from homenode.vm.plan_options import PlanOptions


@dataclass(frozen=True)
class NodeSpec:
    """A NUMA node to build."""

    # threads of each core of each LLC: ((2, 2), (2, 1)) is two LLCs of two cores, of which the last
    # has one thread; () has no CPUs
    llcs: tuple[tuple[int, ...], ...] = ((2, 2, 2, 2),)
    package: int = 0
    index: int | None = None
    memory_bytes: int | None = 64 * GIB
    free_bytes: int | None = None
    pools: tuple[PagePool, ...] = ()
    # so many of the last cores are E cores and the others P cores; None = all alike
    efficiency_cores: int | None = None
    memory_kind: MemoryKind | None = MemoryKind.DRAM
    gpu: str | None = None


@dataclass(frozen=True)
class DeviceSpec:
    """A function to build."""

    bdf: str
    node: int | None = 0  # None = firmware does not say
    kind: DeviceKind = DeviceKind.GPU
    root: int = 0  # number of its root complex
    # number of the switch below that root, None = directly under a root port of its own
    switch: int | None = None


CLASS_CODES = {
    DeviceKind.GPU: 0x030200,
    DeviceKind.NIC: 0x020700,
    DeviceKind.NVSWITCH: 0x068000,
    DeviceKind.NVME: 0x010802,
    DeviceKind.AUDIO: 0x040300,
    DeviceKind.BRIDGE: 0x060400,
    DeviceKind.OTHER: 0xFF0000,
}


def hierarchical_distances(package_of_node: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """10 on the diagonal, 12 within a package, 32 across; shape (nodes, nodes)."""
    return tuple(
        tuple(10 if i == j else 12 if a == b else 32 for j, b in enumerate(package_of_node))
        for i, a in enumerate(package_of_node)
    )


def _pci(specs: Sequence[DeviceSpec]) -> tuple[tuple[RootComplex, ...], tuple[PciDevice, ...]]:
    roots: dict[int, RootComplex] = {}
    devices: dict[Bdf, PciDevice] = {}

    def bridge(bdf: Bdf, type: PortType, root: str, parent: Bdf | None, node: int | None) -> Bdf:
        if bdf not in devices:
            devices[bdf] = PciDevice(
                bdf=bdf,
                kind=DeviceKind.BRIDGE,
                class_code=CLASS_CODES[DeviceKind.BRIDGE],
                vendor_id=None,
                device_id=None,
                root_complex=root,
                parent=parent,
                node=None if node is None else NodeIndex(node),
                bridge=PciBridge(type, 0, 255),
            )
        return bdf

    for number, spec in enumerate(specs):
        # Bridges live in domain 0xffff so that no test's own address can clash with theirs.
        root = roots.setdefault(
            spec.root,
            RootComplex(
                name=f"pci0000:{spec.root:02x}",
                domain=0,
                bus=spec.root,
                node=None if spec.node is None else NodeIndex(spec.node),
            ),
        )
        if spec.switch is None:
            port = Bdf(0xFFFF, spec.root, number % 32, number // 32 % 8)
            parent = bridge(port, PortType.ROOT_PORT, root.name, None, spec.node)
        else:
            port = Bdf(0xFFFE, spec.root, spec.switch, 0)
            upstream = Bdf(0xFFFE, spec.root, spec.switch, 1)
            down = Bdf(0xFFFD, spec.root, number % 32, number // 32 % 8)
            bridge(port, PortType.ROOT_PORT, root.name, None, spec.node)
            bridge(upstream, PortType.SWITCH_UPSTREAM, root.name, port, spec.node)
            parent = bridge(down, PortType.SWITCH_DOWNSTREAM, root.name, upstream, spec.node)
        bdf = Bdf.parse(spec.bdf)
        devices[bdf] = PciDevice(
            bdf=bdf,
            kind=spec.kind,
            class_code=CLASS_CODES[spec.kind],
            vendor_id=0x10DE,
            device_id=None,
            root_complex=root.name,
            parent=parent,
            node=None if spec.node is None else NodeIndex(spec.node),
        )
    ordered = tuple(devices[bdf] for bdf in sorted(devices))
    return tuple(roots[number] for number in sorted(roots)), ordered


def host_of(
    nodes: Sequence[NodeSpec],
    *,
    distances: tuple[tuple[int, ...], ...] | None = None,
    tells_distances: bool = True,
    devices: Sequence[DeviceSpec] = (),
    domains: Sequence[RunningDomain] = (),
    offline: str = "",
    disallowed: str = "",
    isolated: str = "",
    nohz_full: str = "",
    tells_llcs: bool = True,
    vendor: str = "AuthenticAMD",
    name: str = "small",
) -> Host:
    """The host of these nodes. distances: None = by package, unless tells_distances is False.

    offline CPUs belong to no core, LLC or node, as in sysfs.
    """
    layout: list[tuple[int, int, int, int]] = []  # node, LLC, package, threads of each core
    kinds: list[CoreKind | None] = []
    llc_count = 0
    for position, spec in enumerate(nodes):
        first = len(layout)
        for llc in spec.llcs:
            layout += [(position, llc_count, spec.package, threads) for threads in llc]
            llc_count += 1
        if spec.efficiency_cores is None:
            kinds += [None] * (len(layout) - first)
        else:
            strong = len(layout) - first - spec.efficiency_cores
            kinds += [CoreKind.PERFORMANCE] * strong
            kinds += [CoreKind.EFFICIENCY] * spec.efficiency_cores
    pus_of_core: list[list[int]] = [[] for _ in layout]
    number = 0
    for thread in range(max((core[3] for core in layout), default=0)):
        for position, core in enumerate(layout):
            if thread < core[3]:
                pus_of_core[position].append(number)
                number += 1
    gone, barred = CpuSet.parse(offline), CpuSet.parse(disallowed)
    kept, tickless = CpuSet.parse(isolated), CpuSet.parse(nohz_full)

    index_of = [i if spec.index is None else spec.index for i, spec in enumerate(nodes)]
    raw_cores: list[tuple[int, CpuSet]] = []
    for position, numbers in enumerate(pus_of_core):
        online = CpuSet(numbers) - gone
        if online:
            raw_cores.append((position, online))
    raw_cores.sort(key=lambda item: item[1].first() or 0)
    core_of_pu: dict[int, int] = {}
    cores: list[Core] = []
    for order, (position, online) in enumerate(raw_cores):
        package = PackageIndex(layout[position][2])
        cores.append(Core(CoreIndex(order), CoreId(package, position), online, kinds[position]))
        core_of_pu.update(dict.fromkeys(online, order))

    def gather(column: int) -> dict[int, CpuSet]:
        sets: dict[int, CpuSet] = {}
        for position, online in raw_cores:
            key = layout[position][column]
            sets[key] = sets.get(key, CpuSet()) | online
        return sets

    node_sets, llc_sets, package_sets = gather(0), gather(1), gather(2)
    llc_list = sorted(llc_sets.values(), key=lambda pus: pus.first() or 0) if tells_llcs else []
    llcs = tuple(Llc(LlcIndex(i), pus, 3, 32 << 20) for i, pus in enumerate(llc_list))
    llc_of_pu = {pu: llc.index for llc in llcs for pu in llc.pus}
    pus: list[Pu] = []
    for position, numbers in enumerate(pus_of_core):
        node, _, package_number, _ = layout[position]
        for pu in numbers:
            online_pu = pu not in gone
            core_number = core_of_pu.get(pu)
            pus.append(
                Pu(
                    PuIndex(pu),
                    None if core_number is None else CoreIndex(core_number),
                    llc_of_pu.get(PuIndex(pu)),
                    NodeIndex(index_of[node]) if online_pu else None,
                    PackageIndex(package_number) if online_pu else None,
                    None,
                    online=online_pu,
                    allowed=pu not in barred,
                    isolated=pu in kept,
                    nohz_full=pu in tickless,
                )
            )
    if distances is None and tells_distances:
        distances = hierarchical_distances([spec.package for spec in nodes])
    roots, functions = _pci(devices)
    return Host(
        name=name,
        architecture="x86_64",
        cpu=CpuModel(vendor, "small test CPU"),
        packages=tuple(Package(PackageIndex(p), package_sets[p]) for p in sorted(package_sets)),
        nodes=tuple(
            NumaNode(
                index=NodeIndex(index_of[i]),
                pus=node_sets.get(i, CpuSet()),
                memory_bytes=spec.memory_bytes,
                memory_free_bytes=spec.free_bytes,
                page_pools=spec.pools,
                memory_kind=spec.memory_kind,
                gpu=None if spec.gpu is None else Bdf.parse(spec.gpu),
                package=PackageIndex(spec.package) if i in node_sets else None,
            )
            for i, spec in enumerate(nodes)
        ),
        distances=distances,
        llcs=llcs,
        cores=tuple(cores),
        pus=tuple(sorted(pus, key=lambda pu: pu.index)),
        root_complexes=roots,
        pci_devices=functions,
        domains=tuple(domains),
    )


def even_host(
    packages: int = 2,
    nodes_per_package: int = 1,
    llcs_per_node: int = 1,
    cores_per_llc: int = 4,
    threads: int = 2,
    *,
    memory_bytes: int | None = 64 * GIB,
    free_bytes: int | None = None,
    pools: tuple[PagePool, ...] = (),
    name: str = "even",
    **fields: Any,
) -> Host:
    """A regular host; memory_bytes, free_bytes and pools are per node. fields: as of host_of."""
    spec = tuple((threads,) * cores_per_llc for _ in range(llcs_per_node))
    nodes = [
        NodeSpec(spec, package, memory_bytes=memory_bytes, free_bytes=free_bytes, pools=pools)
        for package in range(packages)
        for _ in range(nodes_per_package)
    ]
    return host_of(nodes, name=name, **fields)


def pinned_domain(
    pus: str,
    *,
    name: str = "other",
    running: bool = True,
    memory_bytes: int = 0,
    memory_by_node: tuple[tuple[int, int], ...] = (),
    emulator: str | None = None,
    devices: tuple[str, ...] = (),
    page_bytes: int | None = None,
) -> RunningDomain:
    """A domain with one vCPU on each of these CPUs."""
    return RunningDomain(
        name=name,
        running=running,
        vcpu_pins=tuple(CpuSet([pu]) for pu in CpuSet.parse(pus)),
        emulator_pus=None if emulator is None else CpuSet.parse(emulator),
        iothread_pus=(),
        memory_bytes=memory_bytes,
        memory_bound=bool(memory_by_node),
        memory_by_node=tuple((NodeIndex(node), size) for node, size in memory_by_node),
        page_bytes=page_bytes,
        devices=tuple(Bdf.parse(device) for device in devices),
    )


def floating_domain(vcpus: int, *, name: str = "floating", memory_bytes: int = 0) -> RunningDomain:
    """A domain that nothing pins or binds."""
    return RunningDomain(name, True, (None,) * vcpus, None, (), memory_bytes, False, (), None, ())


def small_guest(
    vcpus: int = 4,
    memory_bytes: int = 4 * GIB,
    *,
    name: str = "vm",
    hostdevs: Sequence[str] = (),
    iothreads: int = 0,
) -> Vm:
    """A flat KVM guest as a new document describes one."""
    return Vm(
        name=name,
        uuid=None,
        domain_type="kvm",
        architecture="x86_64",
        machine="q35",
        vcpus=vcpus,
        memory_bytes=memory_bytes,
        page_bytes=None,
        iothread_ids=tuple(range(1, iothreads + 1)),
        cpu_mode="host-passthrough",
        cpu_topology=None,
        hostdevs=tuple(GuestHostdev(Bdf.parse(bdf), None) for bdf in hostdevs),
        controllers=(),
        addresses=(),
    )


def small_request(
    vcpus: int = 4,
    memory_bytes: int = 4 * GIB,
    *,
    layout: str | Layout = "pin-numa",
    devices: Sequence[str] = (),
    iothreads: int = 0,
) -> GuestRequest:
    """A request for such a guest; change more of it with `asking`."""
    chosen = PRESETS[layout] if isinstance(layout, str) else layout
    return GuestRequest(
        guest=small_guest(vcpus, memory_bytes, hostdevs=devices, iothreads=iothreads),
        layout=chosen,
        options=PlanOptions(chosen.name),
        devices=tuple(Bdf.parse(bdf) for bdf in devices),
    )


def asking(request: GuestRequest, **changes: Any) -> GuestRequest:
    """The request with other fields, its own or of its options."""
    own = {name for name in GuestRequest.__struct_fields__ if name in changes}
    options = {name: changes[name] for name in changes.keys() - own}
    return replace(
        request,
        options=structs.replace(request.options, **options),
        **{name: changes[name] for name in own},
    )


def as_described(found: Host, described: Host) -> Host:
    """A discovered host with what is unknown or assumed in the words of its description."""
    return structs.replace(found, gaps=described.gaps, assumed=described.assumed)
