"""Plans made by hand for tests of domain XML: a host of 2 nodes with 32 cores of 2 threads each.

Node n has the first threads 32n..32n+31 and their siblings 64 above. Host bus numbers below 0x80
lie on node 0. The planner makes better plans; these are small and need no host.
"""

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, NodeIndex
from homenode.plan.shape.guest_numa import bind_cell
from homenode.vm.layout import (
    PRESETS,
    GuestCells,
    GuestPcie,
    Layout,
    MemoryBinding,
    Pinning,
    Siblings,
)
from homenode.vm.model import (
    GuestAddress,
    GuestHostdev,
    GuestPciController,
    GuestTopology,
    LayoutRecord,
    PortModel,
    Vm,
    VmCell,
)
from homenode.vm.plan import Aperture, Plan
from homenode.vm.plan_options import MemoryMode

NODES = (NodeIndex(0), NodeIndex(1))


def hand_plan(
    guest: Vm,
    layout: str | Layout,
    *,
    first_core: int = 0,
    page_bytes: int | None = None,
    vcpus: int | None = None,
    memory_bytes: int | None = None,
    aperture: Aperture | None = None,
    emulator_pus: CpuSet | None = None,
    extra_devices: tuple[Bdf, ...] = (),
    distances: bool = True,
    topoext: bool | None = None,
    iommu_needed: bool = False,
) -> Plan:
    """A plan on both nodes, cells of equal size. `first_core` moves it along each node."""
    shape = PRESETS[layout] if isinstance(layout, str) else layout
    doubled = shape.pinning is Pinning.ALL_PUS and vcpus is None
    count = vcpus or guest.vcpus * (2 if doubled else 1)
    memory = memory_bytes or guest.memory_bytes
    mirrored = shape.cells is GuestCells.HOST
    pins = _pins(count, shape.pinning, first_core)
    threads = 2 if shape.siblings is Siblings.EXPOSED else 1
    is_bound = shape.memory is not MemoryBinding.KEEP
    binding = (str(MemoryMode.STRICT), CpuSet(NODES)) if is_bound else None
    emulator = emulator_pus
    if emulator is None and pins:
        emulator = CpuSet([first_core + 28, first_core + 29])
    vm = Vm(
        name=guest.name,
        domain_type=guest.domain_type,
        architecture=guest.architecture,
        machine=guest.machine,
        firmware=guest.firmware,
        vcpus=count,
        cpu_topology=GuestTopology(2, 1, count // 2 // threads, threads) if mirrored else None,
        topoext=topoext,
        vcpu_pins=pins or (None,) * count,
        emulator_pus=emulator,
        iothread_ids=guest.iothread_ids,
        iothread_pins=tuple((i, CpuSet([first_core + 30])) for i in guest.iothread_ids if pins),
        memory_bytes=memory,
        page_bytes=page_bytes,
        binding=binding,
        cells=tuple(
            bind_cell(cell, shape, binding, page_bytes)
            for cell in (_cells(count, memory, distances) if mirrored else ())
        ),
        hostdevs=_devices(guest, shape.pcie is GuestPcie.HOST, extra_devices),
        controllers=_controllers(guest, extra_devices) if shape.pcie is GuestPcie.HOST else (),
        has_iommu=iommu_needed,
        record=LayoutRecord(layout=shape, host="0123456789abcdef"),
    )
    return Plan(
        vm=vm,
        host_name="x86-2p2n64c128t",
        host_fingerprint="0123456789abcdef" * 4,
        policy="cores-first",
        nodes=NODES,
        llcs=(),
        aperture=aperture,
        page_reservations=(),
        fallback="whole-cores",
        cost=(),
        optimal=True,
        runners_up=(),
        rejections=(),
        findings=(),
        consequences=(),
        gaps=(),
    )


def _pins(count: int, pinning: Pinning, first_core: int) -> tuple[CpuSet, ...]:
    if pinning is Pinning.NONE:
        return ()
    half = count // 2
    threads = 2 if pinning is Pinning.ALL_PUS else 1
    return tuple(
        CpuSet([node * 32 + first_core + i // threads + 64 * (i % threads)])
        for node in (0, 1)
        for i in range(half)
    )


def _cells(count: int, memory: int, distances: bool) -> tuple[VmCell, ...]:
    half = count // 2
    slit = ((10, 21), (21, 10)) if distances else ((), ())
    return tuple(
        VmCell(
            id=i,
            vcpus=CpuSet(range(i * half, (i + 1) * half)),
            memory_bytes=memory // 2,
            host_nodes=(NODES[i],),
            distances=slit[i],
        )
        for i in (0, 1)
    )


def node_of(bdf: Bdf) -> int:
    return int(bdf.bus >= 0x80)


def _groups(guest: Vm, extra: tuple[Bdf, ...]) -> dict[Bdf, list[Bdf]]:
    """First function of a host slot -> all functions of it that the guest gets."""
    groups: dict[Bdf, list[Bdf]] = {}
    for bdf in sorted([*(hostdev.bdf for hostdev in guest.hostdevs), *extra]):
        head = next(
            (g for g in groups if (g.domain, g.bus, g.device) == (bdf.domain, bdf.bus, bdf.device)),
            bdf,
        )
        groups.setdefault(head, []).append(bdf)
    return groups


def _layout_of_ports(guest: Vm, extra: tuple[Bdf, ...]) -> tuple[dict[int, int], dict[Bdf, int]]:
    """(cell -> index of its expander bus, head of a group -> index of its port)."""
    free = max((c.index for c in guest.controllers), default=0) + 1
    expanders: dict[int, int] = {}
    ports: dict[Bdf, int] = {}
    for cell in (0, 1):
        heads = [head for head in _groups(guest, extra) if node_of(head) == cell]
        if heads:
            expanders[cell] = free
            free += 1
    for head in _groups(guest, extra):
        ports[head] = free
        free += 1
    return expanders, ports


def _devices(guest: Vm, mirrored: bool, extra: tuple[Bdf, ...]) -> tuple[GuestHostdev, ...]:
    _, ports = _layout_of_ports(guest, extra)
    old = {hostdev.bdf: hostdev.address for hostdev in guest.hostdevs}
    return tuple(
        GuestHostdev(
            bdf=bdf,
            host_node=NodeIndex(node_of(bdf)),
            cell=node_of(bdf) if mirrored else None,
            address=GuestAddress(0, ports[head], 0, function) if mirrored else old.get(bdf),
            group=head,
        )
        for head, members in _groups(guest, extra).items()
        for function, bdf in enumerate(members)
    )


def _controllers(guest: Vm, extra: tuple[Bdf, ...]) -> tuple[GuestPciController, ...]:
    expanders, ports = _layout_of_ports(guest, extra)
    in_use = {(a.bus, a.device) for a in guest.addresses}
    slots = [slot for slot in range(0x10, 0x1F) if (0, slot) not in in_use]
    made = [
        GuestPciController(
            index,
            PortModel.EXPANDER_BUS,
            GuestAddress(0, 0, slots[i], 0),
            existing=False,
            bus_nr=64 + 64 * cell,
            bus_count=32,
            cell=cell,
        )
        for i, (cell, index) in enumerate(expanders.items())
    ]
    used = dict.fromkeys(expanders, 0)
    for head, index in ports.items():
        cell = node_of(head)
        number = used[cell]
        used[cell] += 1
        made.append(
            GuestPciController(
                index,
                PortModel.ROOT_PORT,
                GuestAddress(0, expanders[cell], number // 8, number % 8),
                existing=False,
            )
        )
    return tuple(made)
