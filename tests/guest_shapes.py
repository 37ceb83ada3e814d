"""Placements, hosts with PCI devices, and guests as a plan leaves them, for tests of assemble."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from msgspec import structs
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, NodeIndex
from homenode.findings import Finding
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host
from homenode.plan.placement import Placement
from homenode.plan.request import GuestRequest
from homenode.vm.model import GuestAddress, GuestHostdev, GuestPciController, PortModel, Vm
from homenode.vm.plan import Plan
from tests.small_hosts import DeviceSpec, even_host, small_request


def bdfs(*texts: str) -> tuple[Bdf, ...]:
    return tuple(Bdf.parse(text) for text in texts)


def placed(
    counts: Sequence[int],
    *,
    nodes: Sequence[int] | None = None,
    pins: Sequence[CpuSet] | None = None,
    devices: Sequence[Bdf | str] = (),
    threads: int = 1,
    bound: bool = True,
) -> Placement:
    """A placement with so many vCPUs on each node; pins: one CPU after the other unless given."""
    where = tuple(NodeIndex(node) for node in (range(len(counts)) if nodes is None else nodes))
    return Placement(
        nodes=where,
        vcpu_pins=tuple(CpuSet([i]) for i in range(sum(counts))) if pins is None else tuple(pins),
        vcpu_nodes=tuple(i for i, count in enumerate(counts) for _ in range(count)),
        memory_nodes=where if bound else (),
        threads_per_core=threads,
        emulator_pus=None,
        iothread_pus=(),
        devices=tuple(Bdf.parse(d) if isinstance(d, str) else d for d in devices),
        fallback="test",
    )


def hgx_devices() -> list[DeviceSpec]:
    """Eight GPUs, each with a NIC on its switch, four to a node; NVSwitches and NVMe drives, and
    below one switch of each node a second NIC with two functions, as HGX boards have them."""
    specs: list[DeviceSpec] = []
    for root, (bus, node) in enumerate(
        ((0x19, 0), (0x3B, 0), (0x4C, 0), (0x5D, 0), (0x9B, 1), (0xBB, 1), (0xCB, 1), (0xDB, 1))
    ):
        specs += [
            DeviceSpec(f"{bus - 1:02x}:00.0", node, DeviceKind.NVME, root, switch=0),
            DeviceSpec(f"{bus:02x}:00.0", node, DeviceKind.GPU, root, switch=0),
            DeviceSpec(f"{bus + 1:02x}:00.0", node, DeviceKind.NIC, root, switch=0),
        ]
        if bus in (0x19, 0x9B):
            specs += [
                DeviceSpec(f"{bus + 2:02x}:00.{f}", node, DeviceKind.NIC, root, switch=0)
                for f in (0, 1)
            ]
    specs += [DeviceSpec(f"{bus:02x}:00.0", 1, DeviceKind.NVSWITCH, 9) for bus in range(0x83, 0x87)]
    specs += [DeviceSpec(f"01:00.{f}", 0, DeviceKind.NIC, 10) for f in (0, 1)]
    return specs


HGX_GPUS = bdfs(*(f"{bus}:00.0" for bus in "19 3b 4c 5d 9b bb cb db".split()))
HGX_NICS = bdfs(*(f"{bus}:00.0" for bus in "1a 3c 4d 5e 9c bc cc dc".split()))


def hgx_host() -> Host:
    return even_host(2, 1, 1, 16, 2, devices=hgx_devices(), name="hgx")


def after(request: GuestRequest, plan: Plan) -> GuestRequest:
    """The same request on the document as the plan leaves it."""
    guest = request.guest
    planned = {controller.index: controller for controller in plan.vm.controllers}
    controllers = [c for c in guest.controllers if c.index not in planned]
    controllers += [
        GuestPciController(c.index, str(c.model), c.address, c.bus_nr, c.cell)
        for c in plan.vm.controllers
    ]
    hostdevs = tuple(GuestHostdev(device.bdf, device.address) for device in plan.vm.hostdevs)
    moved = {hostdev.address for hostdev in guest.hostdevs}
    addresses = {address for address in guest.addresses if address not in moved}
    addresses |= {c.address for c in plan.vm.controllers if c.address is not None}
    addresses |= {hostdev.address for hostdev in hostdevs if hostdev.address is not None}
    return replace(
        request,
        guest=structs.replace(
            guest,
            controllers=tuple(sorted(controllers, key=lambda c: c.index)),
            hostdevs=hostdevs,
            addresses=tuple(sorted(addresses)),
        ),
    )


def without(
    request: GuestRequest, placement: Placement, bdf: Bdf
) -> tuple[GuestRequest, Placement]:
    """The request and placement of the same document with one hostdev taken out."""
    guest = request.guest
    gone = {h.address for h in guest.hostdevs if h.bdf == bdf and h.address is not None}
    smaller = structs.replace(
        guest,
        hostdevs=tuple(h for h in guest.hostdevs if h.bdf != bdf),
        addresses=tuple(address for address in guest.addresses if address not in gone),
    )
    devices = tuple(device for device in placement.devices if device != bdf)
    return replace(request, guest=smaller, devices=devices), replace(placement, devices=devices)


def defined_guest(guest: Vm) -> Vm:
    """A guest as libvirt leaves it at define: root ports on pcie.0, hostdevs behind them."""
    ports = 6
    total = ports + len(guest.hostdevs)
    controllers = [GuestPciController(0, "pcie-root")]
    for i in range(total):
        at = GuestAddress(0, 0, 2 + i // 8, i % 8)
        controllers.append(GuestPciController(1 + i, "pcie-root-port", at))
    hostdevs = tuple(
        structs.replace(hostdev, address=GuestAddress(0, 1 + ports + i, 0, 0))
        for i, hostdev in enumerate(guest.hostdevs)
    )
    addresses = {c.address for c in controllers if c.address is not None}
    addresses |= {h.address for h in hostdevs if h.address is not None}
    addresses |= {GuestAddress(0, bus, 0, 0) for bus in range(1, 1 + ports)}
    addresses |= {GuestAddress(0, 0, 0x1F, 2), GuestAddress(0, 0, 1, 0)}
    return structs.replace(
        guest, controllers=tuple(controllers), hostdevs=hostdevs, addresses=tuple(sorted(addresses))
    )


def ask(devices: tuple[Bdf, ...], vcpus: int = 4, defined: bool = True) -> GuestRequest:
    request = small_request(vcpus, layout="pin-numa-pci", devices=[str(bdf) for bdf in devices])
    return replace(request, guest=defined_guest(request.guest)) if defined else request


def on_devices(plan: Plan) -> list[Finding]:
    """Findings on the PCIe tree: hosts here have no LLCs, which is a finding of its own."""
    return [finding for finding in plan.findings if finding.id != "guest-l3-not-mirrored"]


def of_model(plan: Plan, model: PortModel) -> list[GuestPciController]:
    return [controller for controller in plan.vm.controllers if controller.model is model]


def addresses(plan: Plan) -> dict[Bdf, GuestAddress | None]:
    return {device.bdf: device.address for device in plan.vm.hostdevs}


def check_tree(request: GuestRequest, plan: Plan) -> None:
    """What libvirt and QEMU ask of a PCI tree, over the document and the plan together."""
    final = after(request, plan).guest
    controllers = {controller.index: controller for controller in final.controllers}
    had = {controller.index for controller in request.guest.controllers}
    assert len(controllers) == len(final.controllers)
    added = set(controllers) - had
    if added:
        start = max(had, default=0)
        assert added == set(range(start + 1, max(added) + 1)), "libvirt would fill the gaps"
    plugs = [c.address for c in final.controllers if c.address is not None]
    plugs += [hostdev.address for hostdev in final.hostdevs if hostdev.address is not None]
    assert max(Counter(plugs).values(), default=1) == 1, "two devices at one address"
    windows: list[tuple[int, int, int]] = []
    for planned in plan.vm.controllers:
        assert planned.address is not None
        parent = controllers.get(planned.address.bus)
        if planned.model == PortModel.EXPANDER_BUS:
            assert planned.address.bus == 0 and planned.bus_nr and planned.bus_count
            assert 1 <= planned.bus_nr <= 254
            windows.append((planned.bus_nr, planned.bus_count, planned.index))
        elif planned.model == PortModel.ROOT_PORT:
            assert parent is not None and parent.model == "pcie-expander-bus"
        elif planned.model == PortModel.SWITCH_UPSTREAM:
            assert parent is not None and parent.model == "pcie-root-port"
        else:
            assert parent is not None and parent.model == "pcie-switch-upstream-port"

    def expander(index: int) -> int:
        while controllers[index].model != "pcie-expander-bus" and index:
            plug = controllers[index].address
            index = 0 if plug is None else plug.bus
        return index

    below = Counter(expander(index) for index in controllers)
    ends = [*sorted(windows), (256, 0, -1)]
    for (start, count, index), (following, _, _) in pairwise(ends):
        assert start + count <= following, "windows overlap"
        assert below[index] <= count, "a bus below has no number"
    if windows:
        assert min(windows)[0] >= below[0], "pcie.0 has no space for its own buses"


def with_virtual(host: Host, parent: str, count: int) -> Host:
    """The host with so many virtual functions of one of its devices."""
    base = next(d for d in host.pci_devices if d.bdf == Bdf.parse(parent))
    new = tuple(
        structs.replace(
            base,
            bdf=Bdf(base.bdf.domain, base.bdf.bus, 1 + i // 8, i % 8),
            physical_function=base.bdf,
        )
        for i in range(count)
    )
    parent_device = structs.replace(base, sriov_num_vfs=count)
    others = tuple(d for d in host.pci_devices if d is not base)
    return structs.replace(
        host, pci_devices=tuple(sorted((*others, parent_device, *new), key=lambda d: d.bdf))
    )
