"""The guest's PCIe tree stays: second runs, devices that come and go, hand-made trees."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from msgspec.structs import replace

from homenode.cpuset import NodeIndex
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host
from homenode.plan.placement import Placement
from homenode.plan.request import GuestRequest
from homenode.plan.shape.assemble import assemble
from homenode.vm.model import GuestAddress, GuestHostdev, GuestPciController, PortModel
from homenode.vm.plan import Unplannable
from homenode.vm.plan_options import PciGranularity
from tests.guest_shapes import (
    HGX_GPUS,
    HGX_NICS,
    addresses,
    after,
    ask,
    check_tree,
    hgx_host,
    of_model,
    on_devices,
    placed,
    with_virtual,
    without,
)
from tests.small_hosts import DeviceSpec, asking, even_host


def test_a_device_added_after_foreign_ports_takes_the_next_index() -> None:
    request, placement = ask(HGX_GPUS[:2]), placed((2, 2), devices=HGX_GPUS[:2])
    tuned = after(request, assemble(hgx_host(), request, placement))
    last = max(controller.index for controller in tuned.guest.controllers)
    foreign = GuestPciController(last + 1, "pcie-root-port", GuestAddress(0, 0, 5, 0))
    tuned = replace(
        tuned, guest=structs.replace(tuned.guest, controllers=(*tuned.guest.controllers, foreign))
    )
    placement = placed((2, 2), devices=HGX_GPUS)
    plan = assemble(hgx_host(), tuned, placement)
    before = {h.bdf: h.address for h in tuned.guest.hostdevs}
    assert all(addresses(plan)[bdf] == before[bdf] for bdf in HGX_GPUS[:2])
    assert last + 1 not in {controller.index for controller in plan.vm.controllers}
    check_tree(tuned, plan)


def test_a_hand_made_tree_is_kept_and_extended() -> None:
    # As KubeVirt makes it: one bus number for each port and none to spare.
    request = ask(HGX_GPUS[:3], defined=False)
    controllers = (
        GuestPciController(0, "pcie-root"),
        GuestPciController(1, "pcie-expander-bus", GuestAddress(0, 0, 5, 0), 254, 0),
        GuestPciController(2, "pcie-root-port", GuestAddress(0, 1, 0, 0)),
    )
    hostdevs = list(request.guest.hostdevs)
    hostdevs[0] = structs.replace(hostdevs[0], address=GuestAddress(0, 2, 0, 0))
    in_use = [c.address for c in controllers if c.address] + [GuestAddress(0, 2, 0, 0)]
    guest = structs.replace(
        request.guest,
        controllers=controllers,
        hostdevs=tuple(hostdevs),
        addresses=tuple(sorted(in_use)),
    )
    request = replace(request, guest=guest)
    plan = assemble(hgx_host(), request, placed((2, 2), devices=HGX_GPUS[:3]))
    assert addresses(plan)[HGX_GPUS[0]] == GuestAddress(0, 2, 0, 0)
    assert [c.cell for c in of_model(plan, PortModel.EXPANDER_BUS)] == [0, 1]
    check_tree(request, plan)
    # Its window was too small for the new ports: the number changes, the index does not.
    assert [(c.index, c.existing) for c in plan.vm.controllers[:2]] == [(1, False), (2, True)]


@pytest.mark.parametrize("granularity", [PciGranularity.CELL, PciGranularity.ROOT_COMPLEX])
def test_a_device_on_the_wrong_cell_moves_and_the_others_stay(granularity: PciGranularity) -> None:
    request, placement = ask(HGX_GPUS[:5]), placed((2, 2), devices=HGX_GPUS[:5])
    request = asking(request, pci_granularity=granularity)
    plan = assemble(hgx_host(), request, placement)
    tuned = after(request, plan)
    far = next(c for c in of_model(plan, PortModel.EXPANDER_BUS) if c.cell == 1)
    port = next(c for c in tuned.guest.controllers if c.index == plan.vm.hostdevs[0].address.bus)  # type: ignore[union-attr]
    wrong = structs.replace(port, address=GuestAddress(0, far.index, 30, 0))
    controllers = tuple(wrong if c.index == port.index else c for c in tuned.guest.controllers)
    tuned = replace(tuned, guest=structs.replace(tuned.guest, controllers=controllers))
    again = assemble(hgx_host(), tuned, placement)
    assert addresses(again)[HGX_GPUS[0]] != addresses(plan)[HGX_GPUS[0]]
    assert {b: a for b, a in addresses(again).items() if b != HGX_GPUS[0]} == {
        b: a for b, a in addresses(plan).items() if b != HGX_GPUS[0]
    }
    check_tree(tuned, again)


def test_root_complex_granularity_gives_each_host_tree_a_bus() -> None:
    devices = tuple(sorted(HGX_GPUS + HGX_NICS))
    request = asking(ask(devices), pci_granularity=PciGranularity.ROOT_COMPLEX)
    placement = placed((2, 2), devices=devices)
    plan = assemble(hgx_host(), request, placement)
    assert len(of_model(plan, PortModel.EXPANDER_BUS)) == 8
    port = {c.index: c.address.bus for c in of_model(plan, PortModel.ROOT_PORT) if c.address}
    at = addresses(plan)
    for gpu, nic in zip(HGX_GPUS, HGX_NICS, strict=True):
        gpu_at, nic_at = at[gpu], at[nic]
        assert gpu_at is not None and nic_at is not None
        assert port[gpu_at.bus] == port[nic_at.bus]
    check_tree(request, plan)


def test_switch_granularity_mirrors_switches_and_warns_of_their_links() -> None:
    devices = tuple(sorted(HGX_GPUS + HGX_NICS))
    request = asking(ask(devices), pci_granularity=PciGranularity.SWITCH)
    placement = placed((2, 2), devices=devices)
    plan = assemble(hgx_host(), request, placement)
    assert len(of_model(plan, PortModel.SWITCH_UPSTREAM)) == 8
    assert len(of_model(plan, PortModel.SWITCH_DOWNSTREAM)) == 16
    (finding,) = on_devices(plan)
    assert finding.id == "mirrored-switch-slow-link" and "0.2 GB/s" in finding.observed
    check_tree(request, plan)


def test_a_kind_that_leaves_a_tuned_document_and_returns_moves_nothing() -> None:
    devices = tuple(sorted(HGX_GPUS[:1] + HGX_NICS[:2]))
    request, placement = ask(devices), placed((2, 2), devices=devices)
    full = assemble(hgx_host(), request, placement)
    smaller, rest = without(after(request, full), placement, HGX_GPUS[0])
    kept = assemble(hgx_host(), smaller, rest)
    assert addresses(kept).items() <= addresses(full).items()
    back = replace(after(smaller, kept), devices=devices)
    assert addresses(assemble(hgx_host(), back, placement)) == addresses(full)


KINDS = (
    DeviceKind.GPU,
    DeviceKind.GPU,
    DeviceKind.NIC,
    DeviceKind.NIC,
    DeviceKind.NVME,
    DeviceKind.NVSWITCH,
    DeviceKind.OTHER,
)


@st.composite
def machines(draw: st.DrawFn) -> tuple[Host, GuestRequest, Placement]:
    """A random host, a random selection of its devices, and a document of either kind."""
    nodes = draw(st.integers(1, 4))
    count = draw(st.integers(1, 24))
    specs = [
        DeviceSpec(
            f"{1 + i:02x}:00.0",
            draw(st.one_of(st.none(), st.integers(0, nodes - 1), st.integers(0, nodes - 1))),
            draw(st.sampled_from(KINDS)),
            root=i // 3,
            switch=draw(st.sampled_from((None, 0, 1))),
        )
        for i in range(count)
    ]
    host = even_host(nodes, devices=specs)
    for spec in specs[: draw(st.integers(0, 2))]:
        host = with_virtual(host, spec.bdf, draw(st.integers(1, 9)))
    passable = [d.bdf for d in host.pci_devices if d.kind is not DeviceKind.BRIDGE]
    chosen = draw(st.sets(st.sampled_from(passable), min_size=1, max_size=12))
    cells = draw(st.lists(st.integers(0, nodes - 1), min_size=1, unique=True))
    devices = tuple(sorted(chosen))
    request = asking(
        ask(devices, vcpus=2 * len(cells), defined=draw(st.booleans())),
        pci_granularity=draw(st.sampled_from(PciGranularity)),
        spare_ports=draw(st.integers(0, 2)),
    )
    placement = placed([2] * len(cells), nodes=sorted(cells), devices=devices)
    return host, request, placement


@settings(max_examples=60, deadline=None)
@given(machines())
def test_any_machine_gets_a_sound_tree_that_stays_and_shrinks_in_place(
    machine: tuple[Host, GuestRequest, Placement],
) -> None:
    host, request, placement = machine
    plan = assemble(host, request, placement)
    check_tree(request, plan)
    nodes = {node: i for i, node in enumerate(placement.nodes)}
    for device in plan.vm.hostdevs:
        node = device.host_node
        if node is None or host.distances is None or node in nodes:
            assert device.cell == (None if node is None else nodes.get(NodeIndex(node)))
        else:
            far = {cell: host.find_distance(NodeIndex(node), n) for n, cell in nodes.items()}
            assert device.cell == min(far, key=lambda cell: (far[cell] or 0, cell))
    tuned = after(request, plan)
    again = assemble(host, tuned, placement)
    assert all(controller.existing for controller in again.vm.controllers)
    assert addresses(again) == addresses(plan)
    for bdf in placement.devices:
        rest = {other: at for other, at in addresses(plan).items() if other != bdf}
        assert addresses(assemble(host, *without(tuned, placement, bdf))) == rest


def test_empty_ports_of_a_document_that_was_never_defined_are_not_safe() -> None:
    devices, placement = HGX_GPUS[1:2], placed((2, 2), devices=HGX_GPUS[1:2])
    request = asking(ask(devices, defined=False), spare_ports=1)
    plan = assemble(hgx_host(), request, placement)
    (finding,) = on_devices(plan)
    assert finding.id == "empty-ports-unguarded" and "virsh dumpxml" in (finding.fix or "")
    assert not on_devices(assemble(hgx_host(), ask(devices), placement))


def test_new_controllers_follow_the_highest_index_of_the_document() -> None:
    request = ask(HGX_GPUS[:1], defined=False)
    port = GuestPciController(7, "pcie-root-port", GuestAddress(0, 0, 2, 0))
    guest = structs.replace(request.guest, controllers=(GuestPciController(0, "pcie-root"), port))
    plan = assemble(hgx_host(), replace(request, guest=guest), placed((2,), devices=HGX_GPUS[:1]))
    assert [controller.index for controller in plan.vm.controllers] == [8, 9]
    assert plan.vm.hostdevs[0].address == GuestAddress(0, 9, 0, 0)
    full = structs.replace(guest, controllers=(GuestPciController(255, "pcie-root-port"),))
    with pytest.raises(Unplannable, match=r"255.* 256"):
        assemble(hgx_host(), replace(request, guest=full), placed((2,), devices=HGX_GPUS[:1]))


@st.composite
def hand_made(draw: st.DrawFn) -> tuple[GuestRequest, Placement]:
    """A document with expander buses of any cell or none, ports on them, and devices anywhere."""
    controllers = [GuestPciController(0, "pcie-root")]
    for slot in range(draw(st.integers(0, 4))):
        node = draw(st.sampled_from((None, 0, 1, 1, 5)))
        bus_nr = draw(st.sampled_from((None, 40 + 20 * slot, 250 - 4 * slot)))
        address = draw(st.sampled_from((None, GuestAddress(0, 0, 3 + slot, 0))))
        controllers.append(
            GuestPciController(len(controllers), "pcie-expander-bus", address, bus_nr, node)
        )
    parents = len(controllers)
    slots: set[tuple[int, int]] = set()
    for _ in range(draw(st.integers(0, 12))):
        parent, slot = draw(st.integers(0, parents - 1)), draw(st.integers(0, 31))
        slot = slot % 8 + 16 if parent == 0 else slot
        if (parent, slot) not in slots:
            slots.add((parent, slot))
            at = GuestAddress(0, parent, slot, 0)
            controllers.append(GuestPciController(len(controllers), "pcie-root-port", at))
    devices = tuple(sorted(draw(st.sets(st.sampled_from(HGX_GPUS + HGX_NICS), max_size=8))))
    ports = [c.index for c in controllers if c.model == "pcie-root-port"]
    hostdevs = []
    for bdf in devices:
        port = draw(st.sampled_from([None, *ports]))
        if port is not None:
            ports.remove(port)
        at_port = None if port is None else GuestAddress(0, port, 0, 0)
        hostdevs.append(GuestHostdev(bdf, at_port))
    in_use = {c.address for c in controllers if c.address is not None}
    in_use |= {h.address for h in hostdevs if h.address is not None}
    request = ask(devices, defined=False)
    guest = structs.replace(
        request.guest,
        controllers=tuple(controllers),
        hostdevs=tuple(hostdevs),
        addresses=tuple(sorted(in_use)),
    )
    request = asking(
        request,
        guest=guest,
        pci_granularity=draw(st.sampled_from(PciGranularity)),
        spare_ports=draw(st.integers(0, 2)),
    )
    return request, placed((2, 2), devices=devices)


@settings(max_examples=60, deadline=None)
@given(hand_made())
def test_any_document_gets_a_sound_tree_and_keeps_what_is_right(
    asked: tuple[GuestRequest, Placement],
) -> None:
    request, placement = asked
    plan = assemble(hgx_host(), request, placement)
    check_tree(request, plan)
    had = {controller.index: controller for controller in request.guest.controllers}
    for controller in plan.vm.controllers:
        if controller.index in had:
            before = had[controller.index]
            assert before.model == controller.model
            assert before.address in (None, controller.address)
    tuned = after(request, plan)
    again = assemble(hgx_host(), tuned, placement)
    assert all(controller.existing for controller in again.vm.controllers)
    assert addresses(again) == addresses(plan)
