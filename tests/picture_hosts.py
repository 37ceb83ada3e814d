"""Hosts of the shapes that pictures and texts must cope with, and plans made by hand for them.

The plans are what a planner could say, not what ours says: the report's tests must not depend on
its choices.
"""

from msgspec import structs
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.findings import Finding, Gap, Rejection, Severity
from homenode.indices import LlcIndex, NodeIndex
from homenode.machine.pci import DeviceKind, DeviceLink, LinkKind, PciLink
from homenode.machine.topology import Host, MemoryKind, PagePool
from homenode.plan.shape.guest_numa import bind_cell
from homenode.units import GIB
from homenode.vm.layout import PRESETS, GuestCells, GuestPcie, MemoryBinding, Pinning, Siblings
from homenode.vm.model import (
    GuestAddress,
    GuestHostdev,
    GuestTopology,
    LayoutRecord,
    Vm,
    VmCell,
)
from homenode.vm.plan import Aperture, CostTerm, PageReservation, Plan, RunnerUp
from homenode.vm.plan_options import MemoryMode
from tests.small_hosts import DeviceSpec, NodeSpec, even_host, host_of, pinned_domain

GPU_NAMES = {
    "h200": "NVIDIA Corporation GH100 [H200 SXM 141GB]",
    "h100": "NVIDIA Corporation GH100 [H100 SXM5 80GB]",
    "gh200": "NVIDIA Corporation GH100 [GH200 120GB / 480GB]",
    "rtx": "NVIDIA Corporation AD103 [GeForce RTX 4080]",
}


def _named(host: Host, gpu: str, link: PciLink | None = None) -> Host:
    """The host with names and links on its GPUs and NICs."""
    full = link or PciLink(32.0, 16, 32.0, 16)
    names = {
        DeviceKind.GPU: GPU_NAMES[gpu],
        DeviceKind.NIC: "Mellanox Technologies MT2910 Family [ConnectX-7]",
        DeviceKind.NVSWITCH: "NVIDIA Corporation GH100 [H100 NVSwitch]",
        DeviceKind.NVME: "Samsung Electronics Co Ltd NVMe SSD Controller PM9A1/PM9A3/980PRO",
    }
    devices = tuple(
        structs.replace(
            device, name=names[device.kind], link=full, driver="vfio-pci", iommu_group=40 + i
        )
        if device.kind in names
        else device
        for i, device in enumerate(host.pci_devices)
    )
    return structs.replace(host, pci_devices=devices)


def h200_host() -> Host:
    """2 packages x 2 nodes (an LLC spans the nodes of its package), 96 cores, 8 GPUs."""
    specs = [
        DeviceSpec(f"{bus:02x}:00.0", node, DeviceKind.GPU, root=number, switch=0)
        for number, (bus, node) in enumerate(
            ((0x19, 0), (0x3B, 0), (0x4C, 1), (0x5D, 1), (0x9B, 2), (0xBB, 2), (0xCB, 3), (0xDB, 3))
        )
    ]
    specs += [DeviceSpec(f"{b:02x}:00.0", n, DeviceKind.NIC, r, 0) for b, n, r in ((0x1A, 0, 0),)]
    specs.append(DeviceSpec("02:00.0", None, DeviceKind.NVME, root=20))
    pools = (PagePool(2 << 20, 0, 0), PagePool(1 << 30, 448, 420))
    host = even_host(
        2,
        2,
        1,
        24,
        2,
        memory_bytes=512 * GIB,
        free_bytes=490 * GIB,
        pools=pools,
        devices=specs,
        domains=(pinned_domain("90-95", name="build-farm", memory_bytes=32 * GIB),),
        vendor="GenuineIntel",
        name="h200-like",
    )
    # Sub-NUMA clusters: the kernel says that one L3 serves both nodes of the package.
    merged = (host.llcs[0].pus | host.llcs[1].pus, host.llcs[2].pus | host.llcs[3].pus)
    llcs = tuple(
        structs.replace(host.llcs[i], pus=pus, size_bytes=260 << 20) for i, pus in enumerate(merged)
    )
    pus = tuple(
        structs.replace(pu, llc=None if pu.llc is None else LlcIndex(pu.llc // 2))
        for pu in host.pus
    )
    return _named(structs.replace(host, llcs=llcs, pus=pus), "h200")


def hgx_host() -> Host:
    """2 packages of 56 cores, a switch per GPU-NIC pair, 4 NVSwitches, management functions."""
    specs: list[DeviceSpec] = []
    for number, bus in enumerate((0x19, 0x3B, 0x4C, 0x5D, 0x9B, 0xBB, 0xCB, 0xDB)):
        node = number // 4
        specs.append(DeviceSpec(f"{bus:02x}:00.0", node, DeviceKind.GPU, number, 0))
        specs.append(DeviceSpec(f"{bus + 1:02x}:00.0", node, DeviceKind.NIC, number, 0))
        specs += [
            DeviceSpec(f"{bus + 2:02x}:00.{function}", node, DeviceKind.OTHER, number, 0)
            for function in range(8)
        ]
    specs += [
        DeviceSpec(f"{bus:02x}:00.0", 0, DeviceKind.NVSWITCH, 30, 0)
        for bus in (0x07, 0x08, 0x09, 0x0A)
    ]
    specs += [DeviceSpec(f"00:1f.{f}", 0, DeviceKind.OTHER, 31) for f in range(6)]
    host = even_host(
        2, 1, 1, 56, 2, memory_bytes=1024 * GIB, devices=specs, vendor="GenuineIntel", name="hgx"
    )
    host = _named(host, "h100")
    gpus = [gpu.bdf for gpu in host.devices_of_kind(DeviceKind.GPU)]
    switches = [switch.bdf for switch in host.devices_of_kind(DeviceKind.NVSWITCH)]
    links = tuple(
        DeviceLink(LinkKind.NVLINK, gpu, switch, count=4) for gpu in gpus for switch in switches
    )
    return structs.replace(
        host, links=links, gaps=(Gap("NIC firmware", "mlxfwmanager was not there"),)
    )


def gh200_host() -> Host:
    """36 nodes: 4 of 72 cores, 4 of GPU memory, 28 empty ones kept for MIG."""
    nodes = [NodeSpec(((1,) * 72,), package, memory_bytes=120 * GIB) for package in range(4)]
    for index in range(4, 36):
        gpu = (index - 4) // 8
        first = (index - 4) % 8 == 0
        nodes.append(
            NodeSpec(
                (),
                gpu,
                index,
                96 * GIB if first else 0,
                memory_kind=MemoryKind.GPU,
                gpu=f"{9 + 16 * gpu:04x}:01:00.0",
            )
        )
    distances = tuple(
        tuple(10 if a == b else 40 if a < 4 and b < 4 else 80 for b in range(36)) for a in range(36)
    )
    specs = [
        DeviceSpec(f"{9 + 16 * gpu:04x}:01:00.0", gpu, DeviceKind.GPU, gpu) for gpu in range(4)
    ]
    host = _named(host_of(nodes, distances=distances, devices=specs, name="gh200"), "gh200")
    gpus = [gpu.bdf for gpu in host.devices_of_kind(DeviceKind.GPU)]
    c2c = [DeviceLink(LinkKind.C2C, bdf, None, NodeIndex(node)) for node, bdf in enumerate(gpus)]
    mesh = [DeviceLink(LinkKind.NVLINK, a, b, count=6) for a in gpus for b in gpus if a < b]
    return structs.replace(host, links=(*c2c, *mesh), architecture="aarch64")


def epyc_9654_host() -> Host:
    """2 packages of 96 cores in 12 LLCs each, one node for both, no devices."""
    host = even_host(2, 1, 12, 8, 2, name="2x EPYC 9654")
    node = structs.replace(
        host.nodes[0],
        pus=host.nodes[0].pus | host.nodes[1].pus,
        memory_bytes=None,
        package=None,
    )
    pus = tuple(structs.replace(pu, node=NodeIndex(0)) for pu in host.pus)
    gap = Gap("node 0 memory", "the XML holds none")
    return structs.replace(host, nodes=(node,), pus=pus, distances=((10,),), gaps=(gap,))


def eight_node_host(pus_per_node: int = 32) -> Host:
    """8 nodes in 2 packages, a GPU and a NIC on each behind a switch."""
    specs = []
    for node in range(8):
        for kind, function in ((DeviceKind.GPU, 0), (DeviceKind.NIC, 1)):
            bus = 0x10 * node + 0x0A + function
            specs.append(DeviceSpec(f"{bus:02x}:00.0", node, kind, node, 0))
    cores = pus_per_node // 2
    llcs = max(1, cores // 8)
    host = even_host(
        2,
        4,
        llcs,
        cores // llcs,
        2,
        memory_bytes=96 * GIB,
        free_bytes=90 * GIB,
        devices=specs,
        name=f"8 nodes of {pus_per_node} PUs",
    )
    return _named(host, "h100")


def hybrid_host() -> Host:
    """A desktop: 8 P cores of 2 threads, 16 E cores, one LLC, a GPU with audio."""
    threads = (2,) * 8 + (1,) * 16
    specs = [
        DeviceSpec("01:00.0", 0, DeviceKind.GPU, 0),
        DeviceSpec("01:00.1", 0, DeviceKind.AUDIO, 0),
        DeviceSpec("02:00.0", 0, DeviceKind.NVME, 0),
    ]
    nodes = [NodeSpec((threads,), memory_bytes=64 * GIB, efficiency_cores=16)]
    return _named(
        host_of(nodes, devices=specs, isolated="0-3", name="desktop"),
        "rtx",
        PciLink(2.5, 16, 16.0, 16),
    )


def tiny_host() -> Host:
    """One node of two cores, nothing else known."""
    host = even_host(1, 1, 1, 2, 1, memory_bytes=None, tells_llcs=False, name="tiny")
    return structs.replace(host, gaps=(Gap("LLCs", "no caches in sysfs"),))


def odd_host() -> Host:
    """Hostile names, SMT4, offline and disallowed PUs, a memory-less node, an unknown node."""
    nodes = [
        NodeSpec(((4, 4), (4,)), 0, memory_bytes=0),
        NodeSpec(((4, 4, 4),), 1, memory_bytes=8 * GIB),
        NodeSpec((), 1, 7, 16 * GIB, memory_kind=MemoryKind.OTHER),
    ]
    specs = [DeviceSpec("10000:01:00.0", None), DeviceSpec("10000:02:00.0", 7)]
    host = host_of(
        nodes,
        devices=specs,
        offline="23",
        disallowed="4-5",
        tells_distances=False,
        domains=(pinned_domain("0-3", name="<vm>&\"'\x1b[31m\x00", devices=("10000:02:00.0",)),),
        name="odd <host> & \x07" + "very long name " * 12,
    )
    named = tuple(
        structs.replace(device, name="[bold]<script>alert(1)</script>" * 4)
        for device in host.pci_devices
    )
    return structs.replace(host, pci_devices=named)


def hand_plan(
    host: Host,
    layout: str,
    vcpus: int,
    nodes: tuple[int, ...],
    *,
    gpus: int = 0,
    memory_bytes: int = 64 * GIB,
    with_nics: bool = False,
) -> Plan:
    """A plan of a preset: vCPUs split evenly over the nodes' first cores, the first GPUs."""
    preset = PRESETS[layout]
    per_node = vcpus // len(nodes)
    spare = vcpus - per_node * len(nodes)
    pins: list[CpuSet] = []
    owner: list[int] = []
    emulator = CpuSet()
    for position, node in enumerate(nodes):
        wanted = per_node + (position < spare)
        known = host.node(node)
        assert known is not None
        cores = [core for core in host.cores if not core.pus.isdisjoint(known.pus)]
        in_use = 0
        for core in cores:
            pus = list(core.pus) if preset.siblings is Siblings.EXPOSED else [next(iter(core.pus))]
            if in_use < wanted:
                pins += [CpuSet([pu]) for pu in pus]
                owner += [position] * len(pus)
                in_use += len(pus)
            elif not emulator:
                emulator = core.pus
    mirrored = preset.cells is GuestCells.HOST
    cell_count = len(nodes) if mirrored else 1
    host_nodes = tuple(NodeIndex(node) for node in nodes)
    cells = tuple(
        VmCell(
            id=cell,
            vcpus=CpuSet(i for i, position in enumerate(owner) if position == cell or not mirrored),
            memory_bytes=memory_bytes // cell_count,
            host_nodes=(host_nodes[cell],) if mirrored else host_nodes,
            distances=tuple(host.distance(host_nodes[cell], other) or 10 for other in host_nodes)
            if mirrored and host.distances
            else (),
        )
        for cell in range(cell_count)
    )
    wanted_kinds = (DeviceKind.GPU, DeviceKind.NIC) if with_nics else (DeviceKind.GPU,)
    chosen = [gpu.bdf for gpu in host.devices_of_kind(DeviceKind.GPU)][:gpus]
    if with_nics:
        chosen = [d.bdf for d in host.pci_devices if d.kind in wanted_kinds]
    devices = tuple(_device(host, bdf, cells, i, preset.pcie) for i, bdf in enumerate(chosen))
    pinned = preset.pinning is not Pinning.NONE
    is_bound = preset.memory is not MemoryBinding.KEEP
    cost = (
        CostTerm("device_class", 10),
        CostTerm("nodes_spanned", len(nodes)),
        CostTerm("node_distance", 12),
        CostTerm("packages_spanned", 1),
        CostTerm("device_distance", 12),
        CostTerm("llcs_spanned", 2),
        CostTerm("nodes", nodes),
    )
    worse = tuple(replace(c, value=20) if c.name == "node_distance" else c for c in cost)
    binding = (str(MemoryMode.STRICT), CpuSet(host_nodes)) if is_bound else None
    vm = Vm(
        name="gpu-vm",
        vcpus=len(pins),
        cpu_topology=GuestTopology(cell_count, 1, len(pins) // cell_count, 1),
        vcpu_pins=tuple(pins) if pinned else (None,) * len(pins),
        emulator_pus=emulator if pinned and emulator else None,
        iothread_ids=(1,),
        iothread_pins=((1, CpuSet([next(iter(emulator))])),) if pinned and emulator else (),
        memory_bytes=memory_bytes,
        page_bytes=1 << 30,
        binding=binding,
        cells=tuple(bind_cell(cell, preset, binding, 1 << 30) for cell in cells if mirrored),
        hostdevs=devices,
        record=LayoutRecord(layout=preset, host=None),
    )
    return Plan(
        vm=vm,
        host_name=host.name,
        host_fingerprint="0" * 64,
        policy="cores-first",
        nodes=host_nodes,
        llcs=(LlcIndex(0),),
        aperture=Aperture(1 << 40, 48, 1 << 20, memory_bytes + GIB, memory_bytes >> 30),
        page_reservations=tuple(
            PageReservation(node, 1 << 30, (memory_bytes >> 30) // len(nodes), 420)
            for node in host_nodes
        )
        if is_bound
        else (),
        fallback="one package" if len(nodes) > 1 else "one node",
        cost=cost,
        optimal=True,
        runners_up=(RunnerUp((NodeIndex(1), NodeIndex(2)), worse, "node_distance"),),
        rejections=(
            Rejection("cores", (NodeIndex(0),), "needs 92 free cores, 24 free", "allow more nodes"),
            Rejection("cores", (NodeIndex(1),), "needs 92 free cores, 24 free"),
            Rejection("memory", (NodeIndex(0),), "needs 1.5 TiB, 490 GiB free"),
        ),
        findings=(
            Finding(
                id="emulator-near",
                severity=Severity.INFO,
                subject="emulator",
                observed="runs next to the vCPUs",
                fix="none",
            ),
        ),
        consequences=("The guest sees NUMA nodes that it did not see before.",),
        gaps=(Gap("cache topology", "no booted guest has confirmed it"),),
    )


def _device(
    host: Host, bdf: Bdf, cells: tuple[VmCell, ...], number: int, pcie: GuestPcie
) -> GuestHostdev:
    device = host.device(bdf)
    assert device is not None
    mirrored = pcie is GuestPcie.HOST
    cell = next((c for c in cells if device.node in c.host_nodes), None) if mirrored else None
    home = next((c for c in cells if device.node in c.host_nodes), None)
    total = sum(c.memory_bytes for c in cells)
    share = 0.0 if home is None else home.memory_bytes / len(home.host_nodes) / total
    return GuestHostdev(
        bdf=bdf,
        host_node=device.node,
        cell=cell.id if cell else None,
        address=GuestAddress(0, 32 + number, 0, 0) if mirrored else None,
        group=bdf,
        local_memory_ratio=share,
    )


PICTURES: dict[str, tuple[Host, Plan | None]] = {}


def pictures() -> dict[str, tuple[Host, Plan | None]]:
    """Hosts with and without plans, by a name for test output; built once."""
    if PICTURES:
        return PICTURES
    h200, hgx, gh200, epyc = h200_host(), hgx_host(), gh200_host(), epyc_9654_host()
    eight, hybrid, tiny, odd = eight_node_host(), hybrid_host(), tiny_host(), odd_host()
    four = (0, 1, 2, 3)
    PICTURES.update(
        {
            "h200": (h200, None),
            "h200-pin-94": (h200, hand_plan(h200, "pin", 94, four, gpus=7)),
            "h200-pci-92": (
                h200,
                hand_plan(h200, "pin-numa-pci", 92, four, gpus=7, memory_bytes=1536 * GIB),
            ),
            "h200-smt-112": (h200, hand_plan(h200, "pin-numa-smt", 112, four, gpus=7)),
            "h200-default": (h200, hand_plan(h200, "default", 92, four, gpus=7)),
            "hgx": (hgx, None),
            "hgx-pci-96": (hgx, hand_plan(hgx, "pin-numa-pci", 96, (0, 1), with_nics=True)),
            "gh200": (gh200, None),
            "gh200-pin-72": (gh200, hand_plan(gh200, "pin-numa-pci", 70, (2,), gpus=3)),
            "epyc-9654": (epyc, None),
            "epyc-9654-pin-24": (epyc, hand_plan(epyc, "pin", 24, (0,))),
            "eight-nodes": (eight, None),
            "eight-nodes-smt": (
                eight,
                hand_plan(eight, "pin-numa-pci-smt", 240, tuple(range(8)), gpus=8),
            ),
            "eight-nodes-2048": (eight_node_host(256), None),
            "eight-nodes-2048-pin": (
                eight_node_host(256),
                hand_plan(eight_node_host(256), "pin-numa", 960, tuple(range(8)), gpus=8),
            ),
            "hybrid": (hybrid, hand_plan(hybrid, "pin", 8, (0,), gpus=1)),
            "tiny": (tiny, None),
            "tiny-pin": (tiny, hand_plan(tiny, "pin", 1, (0,))),
            "odd": (odd, None),
        }
    )
    return PICTURES
