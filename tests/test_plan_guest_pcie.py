"""The guest's PCIe tree: expander buses, ports, places, and what the document has already."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from time import perf_counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homenode.bdf import Bdf
from homenode.discover.lspci import overlay_lspci
from homenode.errors import InputError, UsageError
from homenode.indices import NodeIndex
from homenode.pci import DeviceKind, PciLink
from homenode.plan.assemble import assemble
from homenode.plan.guest import GuestAddress, GuestPciController
from homenode.plan.layout import PRESETS, GuestCells
from homenode.plan.model import Plan, PlannedController, PortModel, Unplannable
from homenode.plan.placement import Placement
from homenode.plan.request import GuestRequest, PciGranularity
from homenode.topology import Host
from tests.guest_shapes import (
    HGX_GPUS,
    HGX_NICS,
    after,
    bdfs,
    defined_guest,
    hgx_host,
    placed,
    without,
)
from tests.shared_data import SHARED
from tests.small_hosts import DeviceSpec, even_host, small_guest, small_request


def ask(devices: tuple[Bdf, ...], vcpus: int = 4, defined: bool = True) -> GuestRequest:
    request = small_request(vcpus, layout="pin-numa-pci", devices=[str(bdf) for bdf in devices])
    return replace(request, guest=defined_guest(request.guest)) if defined else request


def of_model(plan: Plan, model: PortModel) -> list[PlannedController]:
    return [controller for controller in plan.controllers if controller.model is model]


def addresses(plan: Plan) -> dict[Bdf, GuestAddress | None]:
    return {device.bdf: device.address for device in plan.devices}


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
    for planned in plan.controllers:
        parent = controllers.get(planned.address.bus)
        if planned.model is PortModel.EXPANDER_BUS:
            assert planned.address.bus == 0 and planned.bus_nr and planned.bus_count
            assert 1 <= planned.bus_nr <= 254
            windows.append((planned.bus_nr, planned.bus_count, planned.index))
        elif planned.model is PortModel.ROOT_PORT:
            assert parent is not None and parent.model == "pcie-expander-bus"
        elif planned.model is PortModel.SWITCH_UPSTREAM:
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
        assert min(windows)[0] >= below[0], "pcie.0 has no room for its own buses"


def test_hgx_gets_two_expander_buses_and_sixteen_root_ports() -> None:
    devices = tuple(sorted(HGX_GPUS + HGX_NICS))
    request = ask(devices)
    plan = assemble(hgx_host(), request, placed((2, 2), devices=devices))
    assert len(of_model(plan, PortModel.EXPANDER_BUS)) == 2
    assert len(of_model(plan, PortModel.ROOT_PORT)) == 16
    assert len(plan.controllers) == 18
    cells = {device.bdf: device.cell for device in plan.devices}
    assert [cells[bdf] for bdf in HGX_GPUS] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [cells[bdf] for bdf in HGX_NICS] == [0, 0, 0, 0, 1, 1, 1, 1]
    check_tree(request, plan)


CAPTURE = SHARED / "machines" / "lspci" / "gpud-hgx-h100x8-lspci-vvv.txt"


@pytest.mark.skipif(not CAPTURE.exists(), reason=f"{CAPTURE} is not here")
def test_a_captured_hgx_h100_gets_the_same_tree_and_keeps_it() -> None:
    host = overlay_lspci(even_host(2), CAPTURE.read_text())
    devices = tuple(sorted(HGX_GPUS + HGX_NICS))
    request, placement = ask(devices), placed((2, 2), devices=devices)
    plan = assemble(host, request, placement)
    assert len(of_model(plan, PortModel.EXPANDER_BUS)) == 2
    assert len(of_model(plan, PortModel.ROOT_PORT)) == 16
    cells = {device.bdf: device.cell for device in plan.devices}
    assert [cells[bdf] for bdf in HGX_GPUS] == [0, 0, 0, 0, 1, 1, 1, 1]
    check_tree(request, plan)
    tuned = after(request, plan)
    assert addresses(assemble(host, tuned, placement)) == addresses(plan)
    for bdf in devices:
        rest = {other: at for other, at in addresses(plan).items() if other != bdf}
        assert addresses(assemble(host, *without(request, placement, bdf))) == rest
        assert addresses(assemble(host, *without(tuned, placement, bdf))) == rest


def test_slots_follow_the_hosts_order_of_gpus_and_their_nics() -> None:
    devices = tuple(sorted(HGX_GPUS + HGX_NICS))
    plan = assemble(hgx_host(), ask(devices), placed((2, 2), devices=devices))
    port = {controller.index: controller.address for controller in plan.controllers}
    for cell in (0, 1):
        mine = [d for d in plan.devices if d.cell == cell and d.address is not None]
        slots = [port[d.address.bus].device for d in mine if d.address is not None]
        assert slots == list(range(8))


def test_gpus_alone_need_no_empty_port() -> None:
    plan = assemble(hgx_host(), ask(HGX_GPUS), placed((2, 2), devices=HGX_GPUS))
    assert len(of_model(plan, PortModel.ROOT_PORT)) == 8


def test_every_cell_has_its_expander_bus_even_without_a_device() -> None:
    request = ask(())
    plan = assemble(hgx_host(), request, placed((2, 2)))
    assert [c.cell for c in of_model(plan, PortModel.EXPANDER_BUS)] == [0, 1]
    assert [c.bus_nr for c in plan.controllers] == [128, 192]
    check_tree(request, plan)


def test_a_second_run_changes_nothing() -> None:
    devices = tuple(sorted(HGX_GPUS + HGX_NICS))
    for granularity in PciGranularity:
        request = replace(ask(devices), pci_granularity=granularity, spare_ports=2)
        placement = placed((2, 2), devices=devices)
        first = assemble(hgx_host(), request, placement)
        second = assemble(hgx_host(), after(request, first), placement)
        assert all(controller.existing for controller in second.controllers)
        assert addresses(second) == addresses(first)
        assert [replace(c, existing=True) for c in first.controllers] == list(second.controllers)


def test_dropping_one_device_moves_no_other() -> None:
    devices = tuple(sorted(HGX_GPUS + HGX_NICS))
    request, placement = ask(devices), placed((2, 2), devices=devices)
    full = assemble(hgx_host(), request, placement)
    tuned = after(request, full)
    for bdf in devices:
        fresh = assemble(hgx_host(), *without(request, placement, bdf))
        again = assemble(hgx_host(), *without(tuned, placement, bdf))
        rest = {other: at for other, at in addresses(full).items() if other != bdf}
        assert addresses(fresh) == rest
        assert addresses(again) == rest
        assert all(controller.existing for controller in again.controllers)
        numbers = {c.index: c.bus_nr for c in of_model(full, PortModel.EXPANDER_BUS)}
        assert {c.index: c.bus_nr for c in of_model(fresh, PortModel.EXPANDER_BUS)} == numbers


def test_a_device_that_comes_back_gets_its_old_address() -> None:
    request, placement = ask(HGX_GPUS), placed((2, 2), devices=HGX_GPUS)
    full = assemble(hgx_host(), request, placement)
    smaller, rest = without(after(request, full), placement, HGX_GPUS[2])
    tuned = after(smaller, assemble(hgx_host(), smaller, rest))
    again = assemble(hgx_host(), replace(tuned, devices=HGX_GPUS), placement)
    assert addresses(again) == addresses(full)


def test_a_device_added_after_foreign_ports_takes_the_next_index() -> None:
    request, placement = ask(HGX_GPUS[:2]), placed((2, 2), devices=HGX_GPUS[:2])
    tuned = after(request, assemble(hgx_host(), request, placement))
    last = max(controller.index for controller in tuned.guest.controllers)
    foreign = GuestPciController(last + 1, "pcie-root-port", GuestAddress(0, 0, 5, 0))
    tuned = replace(
        tuned, guest=replace(tuned.guest, controllers=(*tuned.guest.controllers, foreign))
    )
    placement = placed((2, 2), devices=HGX_GPUS)
    plan = assemble(hgx_host(), tuned, placement)
    before = {h.source: h.address for h in tuned.guest.hostdevs}
    assert all(addresses(plan)[bdf] == before[bdf] for bdf in HGX_GPUS[:2])
    assert last + 1 not in {controller.index for controller in plan.controllers}
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
    hostdevs[0] = replace(hostdevs[0], address=GuestAddress(0, 2, 0, 0))
    taken = [c.address for c in controllers if c.address] + [GuestAddress(0, 2, 0, 0)]
    guest = replace(
        request.guest, controllers=controllers, hostdevs=tuple(hostdevs),
        addresses=tuple(sorted(taken)),
    )  # fmt: skip
    request = replace(request, guest=guest)
    plan = assemble(hgx_host(), request, placed((2, 2), devices=HGX_GPUS[:3]))
    assert addresses(plan)[HGX_GPUS[0]] == GuestAddress(0, 2, 0, 0)
    assert [c.cell for c in of_model(plan, PortModel.EXPANDER_BUS)] == [0, 1]
    check_tree(request, plan)
    # Its window was too small for the new ports: the number changes, the index does not.
    assert [(c.index, c.existing) for c in plan.controllers[:2]] == [(1, False), (2, True)]


def test_a_device_on_the_wrong_cell_moves_and_the_others_stay() -> None:
    request, placement = ask(HGX_GPUS[:4]), placed((2, 2), devices=HGX_GPUS[:4])
    plan = assemble(hgx_host(), request, placement)
    tuned = after(request, plan)
    far = next(c for c in of_model(plan, PortModel.EXPANDER_BUS) if c.cell == 1)
    port = next(c for c in tuned.guest.controllers if c.index == plan.devices[0].address.bus)  # type: ignore[union-attr]
    wrong = replace(port, address=GuestAddress(0, far.index, 30, 0))
    controllers = tuple(wrong if c.index == port.index else c for c in tuned.guest.controllers)
    tuned = replace(tuned, guest=replace(tuned.guest, controllers=controllers))
    again = assemble(hgx_host(), tuned, placement)
    assert addresses(again)[HGX_GPUS[0]] != addresses(plan)[HGX_GPUS[0]]
    assert {b: a for b, a in addresses(again).items() if b != HGX_GPUS[0]} == {
        b: a for b, a in addresses(plan).items() if b != HGX_GPUS[0]
    }
    check_tree(tuned, again)


def test_a_device_without_a_node_stays_on_the_root_bus_with_a_finding() -> None:
    host = even_host(2, devices=[DeviceSpec("01:00.0", None), DeviceSpec("02:00.0", 1, root=1)])
    devices = bdfs("01:00.0", "02:00.0")
    request = ask(devices)
    plan = assemble(host, request, placed((2, 2), devices=devices))
    assert plan.devices[0].address == request.guest.hostdevs[0].address
    assert plan.devices[0].cell is None and plan.devices[1].cell == 1
    assert [f.id for f in plan.findings] == ["device-node-unknown"]
    assert "01:00.0" in plan.findings[0].subject and plan.findings[0].severity == "warning"


def test_a_device_whose_node_the_guest_has_not_is_named() -> None:
    host = even_host(2, devices=[DeviceSpec("01:00.0", 1)])
    plan = assemble(host, ask(bdfs("01:00.0")), placed((4,), devices=["01:00.0"]))
    assert plan.devices[0].cell is None
    assert [f.id for f in plan.findings] == ["device-without-cell"]
    assert "host node 1" in plan.findings[0].detail


def test_cells_follow_the_chosen_nodes_not_their_numbers() -> None:
    host = even_host(4, devices=[DeviceSpec("01:00.0", 3), DeviceSpec("02:00.0", 1, root=1)])
    plan = assemble(
        host,
        ask(bdfs("01:00.0", "02:00.0")),
        placed((2, 2), nodes=(1, 3), devices=["01:00.0", "02:00.0"]),
    )
    assert [device.cell for device in plan.devices] == [1, 0]


def test_gpu_and_its_audio_function_share_a_slot() -> None:
    specs = [
        DeviceSpec("41:00.0"),
        DeviceSpec("41:00.1", kind=DeviceKind.AUDIO),
        DeviceSpec("41:00.2", kind=DeviceKind.OTHER),
    ]
    devices = bdfs("41:00.0", "41:00.1", "41:00.2")
    request = ask(devices)
    plan = assemble(even_host(1, devices=specs), request, placed((4,), devices=devices))
    at = [device.address for device in plan.devices]
    assert all(a is not None for a in at)
    assert {(a.bus, a.device) for a in at if a} == {(at[0].bus, 0)} if at[0] else False
    assert [a.function for a in at if a] == [0, 1, 2]
    assert {device.group for device in plan.devices} == {devices[0]}
    assert len(of_model(plan, PortModel.ROOT_PORT)) == 1


def test_an_audio_function_alone_becomes_function_0() -> None:
    specs = [DeviceSpec("41:00.0"), DeviceSpec("41:00.1", kind=DeviceKind.AUDIO)]
    plan = assemble(
        even_host(1, devices=specs), ask(bdfs("41:00.1")), placed((4,), devices=["41:00.1"])
    )
    assert plan.devices[0].address is not None and plan.devices[0].address.function == 0


def test_the_functions_of_a_nic_have_a_port_each() -> None:
    specs = [DeviceSpec(f"01:00.{f}", kind=DeviceKind.NIC) for f in (0, 1)]
    devices = bdfs("01:00.0", "01:00.1")
    plan = assemble(even_host(1, devices=specs), ask(devices), placed((4,), devices=devices))
    assert len({device.address.bus for device in plan.devices if device.address}) == 2


def test_the_fastest_nic_below_a_switch_is_the_gpus_own() -> None:
    host = even_host(
        1,
        devices=[
            DeviceSpec("10:00.0", kind=DeviceKind.NIC, switch=0),
            DeviceSpec("11:00.0", kind=DeviceKind.GPU, switch=0),
            DeviceSpec("12:00.0", kind=DeviceKind.NIC, switch=0),
        ],
    )
    links = {"0000:10:00.0": 16.0, "0000:12:00.0": 32.0}
    host = replace(
        host,
        pci_devices=tuple(
            replace(d, link=PciLink(None, None, links[str(d.bdf)], 16))
            if str(d.bdf) in links
            else d
            for d in host.pci_devices
        ),
    )
    devices = bdfs("11:00.0", "12:00.0")
    plan = assemble(host, ask(devices), placed((4,), devices=devices))
    assert len(of_model(plan, PortModel.ROOT_PORT)) == 2


def with_virtual(host: Host, parent: str, count: int) -> Host:
    """The host with so many virtual functions of one of its devices."""
    base = next(d for d in host.pci_devices if d.bdf == Bdf.parse(parent))
    new = tuple(
        replace(
            base,
            bdf=Bdf(base.bdf.domain, base.bdf.bus, 1 + i // 8, i % 8),
            physical_function=base.bdf,
        )
        for i in range(count)
    )
    parent_device = replace(base, sriov_num_vfs=count)
    others = tuple(d for d in host.pci_devices if d is not base)
    return replace(
        host, pci_devices=tuple(sorted((*others, parent_device, *new), key=lambda d: d.bdf))
    )


def test_the_first_virtual_function_takes_its_parents_place() -> None:
    host = even_host(
        1,
        devices=[DeviceSpec("10:00.0", switch=0), DeviceSpec("11:00.0", kind=DeviceKind.NIC)],
    )
    before = assemble(
        host, ask(bdfs("10:00.0", "11:00.0")), placed((4,), devices=["10:00.0", "11:00.0"])
    )
    host = with_virtual(host, "11:00.0", 16)
    devices = bdfs("10:00.0", "11:01.0")
    plan = assemble(host, ask(devices), placed((4,), devices=devices))
    assert [d.address for d in plan.devices] == [d.address for d in before.devices]


def test_more_devices_than_slots_get_a_second_expander_bus() -> None:
    specs = [DeviceSpec(f"{bus:02x}:00.0", root=bus) for bus in range(1, 41)]
    devices = tuple(Bdf.parse(spec.bdf) for spec in specs)
    request = ask(devices)
    plan = assemble(even_host(1, devices=specs), request, placed((4,), devices=devices))
    assert [c.cell for c in of_model(plan, PortModel.EXPANDER_BUS)] == [0, 0]
    assert len(of_model(plan, PortModel.ROOT_PORT)) == 40
    check_tree(request, plan)


def test_spare_ports_are_empty_and_on_every_expander_bus() -> None:
    request = replace(ask(HGX_GPUS), spare_ports=3)
    plan = assemble(hgx_host(), request, placed((2, 2), devices=HGX_GPUS))
    ports = Counter(c.address.bus for c in of_model(plan, PortModel.ROOT_PORT))
    assert sorted(ports.values()) == [7, 7]
    check_tree(request, plan)


def test_too_many_spare_ports_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="--spare-ports: expected 0 to 16, found 40"):
        assemble(hgx_host(), replace(ask(HGX_GPUS), spare_ports=40), placed((2, 2)))


def test_root_complex_granularity_gives_each_host_tree_a_bus() -> None:
    devices = tuple(sorted(HGX_GPUS + HGX_NICS))
    request = replace(ask(devices), pci_granularity=PciGranularity.ROOT_COMPLEX)
    placement = placed((2, 2), devices=devices)
    plan = assemble(hgx_host(), request, placement)
    assert len(of_model(plan, PortModel.EXPANDER_BUS)) == 8
    port = {c.index: c.address.bus for c in of_model(plan, PortModel.ROOT_PORT)}
    at = addresses(plan)
    for gpu, nic in zip(HGX_GPUS, HGX_NICS, strict=True):
        gpu_at, nic_at = at[gpu], at[nic]
        assert gpu_at is not None and nic_at is not None
        assert port[gpu_at.bus] == port[nic_at.bus]
    check_tree(request, plan)
    for bdf in devices:
        fresh = assemble(hgx_host(), *without(request, placement, bdf))
        assert addresses(fresh) == {b: a for b, a in at.items() if b != bdf}


def test_switch_granularity_mirrors_switches_and_warns_of_their_links() -> None:
    devices = tuple(sorted(HGX_GPUS + HGX_NICS))
    request = replace(ask(devices), pci_granularity=PciGranularity.SWITCH)
    placement = placed((2, 2), devices=devices)
    plan = assemble(hgx_host(), request, placement)
    assert len(of_model(plan, PortModel.SWITCH_UPSTREAM)) == 8
    assert len(of_model(plan, PortModel.SWITCH_DOWNSTREAM)) == 16
    assert [f.id for f in plan.findings] == ["mirrored-switch-slow-link"]
    assert "0.2 GB/s" in plan.findings[0].detail
    check_tree(request, plan)
    for bdf in devices:
        fresh = assemble(hgx_host(), *without(request, placement, bdf))
        assert addresses(fresh) == {b: a for b, a in addresses(plan).items() if b != bdf}


def test_i440fx_is_refused_by_name() -> None:
    for machine in ("pc", "pc-i440fx-7.2", None):
        request = small_request(4, layout="pin-numa-pci")
        request = replace(request, guest=replace(request.guest, machine=machine))
        with pytest.raises(InputError, match="i440fx") as error:
            assemble(hgx_host(), request, placed((2, 2)))
        assert error.value.exit_code == 2 and "q35" in str(error.value)


def test_arm_needs_the_virt_machine() -> None:
    request = ask(HGX_GPUS)
    guest = replace(request.guest, architecture="aarch64", machine="virt-8.0")
    plan = assemble(hgx_host(), replace(request, guest=guest), placed((2, 2), devices=HGX_GPUS))
    assert len(of_model(plan, PortModel.EXPANDER_BUS)) == 2
    guest = replace(guest, machine="sbsa-ref")
    with pytest.raises(InputError, match="found sbsa-ref on aarch64"):
        assemble(hgx_host(), replace(request, guest=guest), placed((2, 2)))


def test_a_flat_guest_or_no_host_cannot_have_a_mirrored_tree() -> None:
    request = small_request(4, layout="pin-numa-pci")
    with pytest.raises(UsageError, match="found none"):
        assemble(None, request, placed((2, 2)))
    flat = replace(request, layout=replace(request.layout, cells=GuestCells.FLAT))
    with pytest.raises(UsageError, match="flat"):
        assemble(hgx_host(), flat, placed((2, 2)))


def test_an_unknown_device_and_a_bridge_are_refused() -> None:
    with pytest.raises(InputError, match=r"0000:77:00\.0"):
        assemble(hgx_host(), ask(()), placed((2, 2), devices=["77:00.0"]))
    bridge = next(d.bdf for d in hgx_host().pci_devices if d.kind is DeviceKind.BRIDGE)
    with pytest.raises(InputError, match="found a bridge"):
        assemble(hgx_host(), ask(()), placed((2, 2), devices=[bridge]))


def test_a_document_full_of_controllers_is_unplannable_with_numbers() -> None:
    request = ask(HGX_GPUS, defined=False)
    bridges = [GuestPciController(1, "dmi-to-pci-bridge", GuestAddress(0, 0, 0x1E, 0))]
    for i in range(2, 248):
        at = GuestAddress(0, 1 + (i - 2) // 31, 1 + (i - 2) % 31, 0)
        bridges.append(GuestPciController(i, "pci-bridge", at))
    root = GuestPciController(0, "pcie-root")
    placement = placed((2, 2), devices=HGX_GPUS)

    def crowded(count: int) -> GuestRequest:
        guest = replace(request.guest, controllers=(root, *bridges[:count]))
        return replace(request, guest=guest)

    # 235 controllers leave 20 bus numbers, and indices up to 245 for 10 new controllers.
    check_tree(crowded(235), assemble(hgx_host(), crowded(235), placement))
    with pytest.raises(Unplannable, match="indices up to 255") as error:
        assemble(hgx_host(), crowded(246), placement)
    assert error.value.exit_code == 4 and error.value.hint


def test_an_expander_bus_of_no_cell_is_left_its_numbers() -> None:
    request = ask(HGX_GPUS)
    foreign = GuestPciController(15, "pcie-expander-bus", GuestAddress(0, 0, 9, 0), 40)
    guest = replace(request.guest, controllers=(*request.guest.controllers, foreign))
    plan = assemble(hgx_host(), replace(request, guest=guest), placed((2, 2), devices=HGX_GPUS))
    assert 15 not in {controller.index for controller in plan.controllers}
    ends = [c.bus_nr + c.bus_count for c in plan.controllers if c.bus_nr and c.bus_count]
    assert max(ends) == 40
    low = replace(foreign, bus_nr=22)
    guest = replace(request.guest, controllers=(*request.guest.controllers, low))
    with pytest.raises(Unplannable, match=r"expected at most 7 .* found 10") as error:
        assemble(hgx_host(), replace(request, guest=guest), placed((2, 2), devices=HGX_GPUS))
    assert error.value.exit_code == 4 and error.value.hint


def test_layouts_that_leave_pcie_as_it_was_keep_every_address() -> None:
    request = ask(HGX_GPUS)
    request = replace(request, layout=PRESETS["pin-numa"])
    plan = assemble(hgx_host(), request, placed((2, 2), devices=HGX_GPUS))
    assert plan.controllers == ()
    assert addresses(plan) == {h.source: h.address for h in request.guest.hostdevs}


def test_taken_slots_of_the_root_bus_are_left_alone() -> None:
    request = ask(HGX_GPUS)
    taken = tuple(GuestAddress(0, 0, slot, 0) for slot in (0x10, 0x12))
    guest = replace(request.guest, addresses=tuple(sorted((*request.guest.addresses, *taken))))
    plan = assemble(hgx_host(), replace(request, guest=guest), placed((2, 2), devices=HGX_GPUS))
    slots = [c.address.device for c in of_model(plan, PortModel.EXPANDER_BUS)]
    assert slots == [0x11, 0x13]


KINDS = (
    DeviceKind.GPU, DeviceKind.GPU, DeviceKind.NIC, DeviceKind.NIC, DeviceKind.NVME,
    DeviceKind.NVSWITCH, DeviceKind.OTHER,
)  # fmt: skip


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
    request = replace(
        ask(devices, vcpus=2 * len(cells), defined=draw(st.booleans())),
        pci_granularity=draw(st.sampled_from(PciGranularity)),
        spare_ports=draw(st.integers(0, 2)),
    )
    placement = placed([2] * len(cells), nodes=sorted(cells), devices=devices)
    return host, request, placement


@settings(max_examples=150, deadline=None)
@given(machines())
def test_any_machine_gets_a_sound_tree_that_stays_and_shrinks_in_place(
    machine: tuple[Host, GuestRequest, Placement],
) -> None:
    host, request, placement = machine
    plan = assemble(host, request, placement)
    check_tree(request, plan)
    nodes = {node: i for i, node in enumerate(placement.nodes)}
    for device in plan.devices:
        node = device.host_node
        assert device.cell == (None if node is None else nodes.get(NodeIndex(node)))
    tuned = after(request, plan)
    again = assemble(host, tuned, placement)
    assert all(controller.existing for controller in again.controllers)
    assert addresses(again) == addresses(plan)
    for bdf in placement.devices:
        rest = {other: at for other, at in addresses(plan).items() if other != bdf}
        assert addresses(assemble(host, *without(request, placement, bdf))) == rest
        assert addresses(assemble(host, *without(tuned, placement, bdf))) == rest


def test_a_large_machine_is_assembled_in_milliseconds() -> None:
    specs = [
        DeviceSpec(
            f"{1 + i:02x}:00.0", i % 8, DeviceKind.NIC if i % 3 else DeviceKind.GPU, i // 4, i % 2
        )
        for i in range(64)
    ]
    host = even_host(2, 4, 4, 8, 1, devices=specs)
    devices = tuple(Bdf.parse(spec.bdf) for spec in specs)
    request = replace(
        small_request(256, layout="pin-numa-pci"),
        guest=defined_guest(small_guest(256, hostdevs=[str(b) for b in devices])),
        devices=devices,
    )
    placement = placed([32] * 8, devices=devices)
    best = 1.0
    for _ in range(5):
        start = perf_counter()
        plan = assemble(host, request, placement)
        best = min(best, perf_counter() - start)
    check_tree(request, plan)
    assert best < 0.03, f"{best * 1000:.1f} ms; about 3 ms on an idle machine"
