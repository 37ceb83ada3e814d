"""The guest's PCIe tree: expander buses, ports, places, and what the document has already."""

from collections import Counter

import pytest
from msgspec import structs
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError, UsageError
from homenode.machine.pci import DeviceKind
from homenode.plan.planner import plan as plan_vm
from homenode.plan.request import GuestRequest
from homenode.plan.shape.assemble import assemble
from homenode.units import GIB
from homenode.vm.layout import PRESETS, GuestCells
from homenode.vm.model import GuestAddress, GuestPciController, PortModel
from homenode.vm.plan import Unplannable
from homenode.vm.plan_options import PciGranularity
from tests.cpu_time import cpu_time_below
from tests.figures import numbers
from tests.guest_shapes import (
    HGX_GPUS,
    HGX_NICS,
    addresses,
    after,
    ask,
    bdfs,
    check_tree,
    defined_guest,
    hgx_host,
    of_model,
    on_devices,
    placed,
    with_virtual,
)
from tests.small_hosts import (
    DeviceSpec,
    NodeSpec,
    asking,
    even_host,
    host_of,
    small_guest,
    small_request,
)


def test_slots_follow_the_hosts_order_gpus_first() -> None:
    devices = tuple(sorted(HGX_GPUS + HGX_NICS))
    plan = assemble(hgx_host(), ask(devices), placed((2, 2), devices=devices))
    slot_of = {c.index: c.address.device for c in plan.vm.controllers if c.address is not None}
    at = {d.bdf: slot_of[d.address.bus] for d in plan.vm.hostdevs if d.address is not None}
    assert [at[bdf] for bdf in HGX_GPUS] == [0, 1, 2, 3] * 2
    assert [at[bdf] for bdf in HGX_NICS] == [4, 5, 6, 7] * 2


def test_every_cell_has_its_expander_bus_even_without_a_device() -> None:
    request = ask(())
    plan = assemble(hgx_host(), request, placed((2, 2)))
    assert [c.cell for c in of_model(plan, PortModel.EXPANDER_BUS)] == [0, 1]
    assert [c.bus_nr for c in plan.vm.controllers] == [240, 248]
    check_tree(request, plan)


def test_a_device_without_a_node_stays_on_the_root_bus_with_a_finding() -> None:
    host = even_host(2, devices=[DeviceSpec("01:00.0", None), DeviceSpec("02:00.0", 1, root=1)])
    devices = bdfs("01:00.0", "02:00.0")
    request = ask(devices)
    plan = assemble(host, request, placed((2, 2), devices=devices))
    assert plan.vm.hostdevs[0].address == request.guest.hostdevs[0].address
    assert plan.vm.hostdevs[0].cell is None and plan.vm.hostdevs[1].cell == 1
    (finding,) = on_devices(plan)
    assert (finding.id, finding.severity) == ("device-node-unknown", "warning")
    assert "01:00.0" in finding.subject


def test_a_device_whose_node_has_no_cell_hangs_on_the_nearest_one_and_is_named() -> None:
    near = ((10, 12, 21, 21), (12, 10, 21, 21), (21, 21, 10, 12), (21, 21, 12, 10))
    specs = [DeviceSpec(f"{i + 1:02x}:00.0", node, root=i) for i, node in enumerate((0, 1, 2, 3))]
    host = structs.replace(even_host(4, devices=specs), distances=near)
    devices = tuple(Bdf.parse(spec.bdf) for spec in specs)
    request = ask(devices)
    placement = placed((2, 2), nodes=(0, 2), devices=devices)
    plan = assemble(host, request, placement)
    assert [device.cell for device in plan.vm.hostdevs] == [0, 0, 1, 1]
    check_tree(request, plan)
    (finding,) = on_devices(plan)
    assert (finding.id, finding.severity) == ("device-on-nearest-cell", "info")
    assert finding.subject == "2 devices" and "--policy spread" in (finding.fix or "")
    assert "0000:02:00.0" in finding.observed and "0000:04:00.0" in finding.observed
    assert numbers(finding.comparison).count(12) == 2


def test_of_equally_near_cells_the_lowest_takes_a_device() -> None:
    host = even_host(3, devices=[DeviceSpec("01:00.0", 1)])
    host = structs.replace(host, distances=((10, 20, 20), (20, 10, 20), (20, 20, 10)))
    placement = placed((2, 2), nodes=(0, 2), devices=["01:00.0"])
    plan = assemble(host, ask(bdfs("01:00.0")), placement)
    assert [device.cell for device in plan.vm.hostdevs] == [0]


def test_devices_of_other_nodes_move_none_of_the_cells_own() -> None:
    host = hgx_host()
    for granularity in PciGranularity:
        alone, more = (
            assemble(
                host,
                asking(ask(devices, defined=False), pci_granularity=granularity),
                placed((4,), devices=devices),
            )
            for devices in (HGX_GPUS[:4], HGX_GPUS)
        )
        assert addresses(more).items() >= addresses(alone).items()
        assert all(device.cell == 0 for device in more.vm.hostdevs)


def test_without_distances_a_device_whose_node_the_guest_has_not_stays_and_is_named() -> None:
    host = structs.replace(even_host(2, devices=[DeviceSpec("01:00.0", 1)]), distances=None)
    plan = assemble(host, ask(bdfs("01:00.0")), placed((4,), devices=["01:00.0"]))
    assert plan.vm.hostdevs[0].cell is None
    assert [f.id for f in plan.findings] == ["device-without-cell"]
    assert 1 in numbers(plan.findings[0].comparison)


def test_cells_follow_the_chosen_nodes_not_their_numbers() -> None:
    host = even_host(4, devices=[DeviceSpec("01:00.0", 3), DeviceSpec("02:00.0", 1, root=1)])
    plan = assemble(
        host,
        ask(bdfs("01:00.0", "02:00.0")),
        placed((2, 2), nodes=(1, 3), devices=["01:00.0", "02:00.0"]),
    )
    assert [device.cell for device in plan.vm.hostdevs] == [1, 0]


def test_gpu_and_its_audio_function_share_a_slot() -> None:
    specs = [
        DeviceSpec("41:00.0"),
        DeviceSpec("41:00.1", kind=DeviceKind.AUDIO),
        DeviceSpec("41:00.2", kind=DeviceKind.OTHER),
    ]
    devices = bdfs("41:00.0", "41:00.1", "41:00.2")
    request = ask(devices)
    plan = assemble(even_host(1, devices=specs), request, placed((4,), devices=devices))
    at = [device.address for device in plan.vm.hostdevs]
    assert all(a is not None for a in at)
    assert {(a.bus, a.device) for a in at if a} == {(at[0].bus, 0)} if at[0] else False
    assert [a.function for a in at if a] == [0, 1, 2]
    assert {device.group for device in plan.vm.hostdevs} == {devices[0]}
    assert len(of_model(plan, PortModel.ROOT_PORT)) == 1


def test_an_audio_function_alone_becomes_function_0() -> None:
    specs = [DeviceSpec("41:00.0"), DeviceSpec("41:00.1", kind=DeviceKind.AUDIO)]
    plan = assemble(
        even_host(1, devices=specs), ask(bdfs("41:00.1")), placed((4,), devices=["41:00.1"])
    )
    assert plan.vm.hostdevs[0].address is not None and plan.vm.hostdevs[0].address.function == 0


def test_the_functions_of_a_nic_have_a_port_each() -> None:
    specs = [DeviceSpec(f"01:00.{f}", kind=DeviceKind.NIC) for f in (0, 1)]
    devices = bdfs("01:00.0", "01:00.1")
    plan = assemble(even_host(1, devices=specs), ask(devices), placed((4,), devices=devices))
    assert len({device.address.bus for device in plan.vm.hostdevs if device.address}) == 2


def test_each_virtual_function_has_a_port_after_those_of_whole_devices() -> None:
    host = even_host(
        1, devices=[DeviceSpec("10:00.0", switch=0), DeviceSpec("11:00.0", kind=DeviceKind.NIC)]
    )
    devices = bdfs("10:00.0", "11:01.0", "11:01.2")
    host = with_virtual(host, "11:00.0", 16)
    plan = assemble(host, ask(devices), placed((4,), devices=devices))
    last = max(c.index for c in plan.vm.controllers)
    at = [device.address for device in plan.vm.hostdevs]
    assert at == [GuestAddress(0, bus, 0, 0) for bus in range(last - 2, last + 1)]


def test_more_devices_than_slots_get_a_second_expander_bus() -> None:
    specs = [DeviceSpec(f"{bus:02x}:00.0", root=bus) for bus in range(1, 41)]
    devices = tuple(Bdf.parse(spec.bdf) for spec in specs)
    request = ask(devices)
    plan = assemble(even_host(1, devices=specs), request, placed((4,), devices=devices))
    assert [c.cell for c in of_model(plan, PortModel.EXPANDER_BUS)] == [0, 0]
    assert len(of_model(plan, PortModel.ROOT_PORT)) == 40
    check_tree(request, plan)


def test_more_devices_than_ports_of_a_switch_get_a_second_switch() -> None:
    specs = [DeviceSpec(f"{bus:02x}:00.0", switch=0) for bus in range(1, 36)]
    devices = tuple(Bdf.parse(spec.bdf) for spec in specs)
    request = asking(ask(devices), pci_granularity=PciGranularity.SWITCH)
    plan = assemble(even_host(1, devices=specs), request, placed((4,), devices=devices))
    below = Counter(c.address.bus for c in of_model(plan, PortModel.SWITCH_DOWNSTREAM) if c.address)
    assert sorted(below.values()) == [3, 32]
    check_tree(request, plan)


def test_spare_ports_are_empty_and_on_every_expander_bus() -> None:
    request = asking(ask(HGX_GPUS), spare_ports=3)
    plan = assemble(hgx_host(), request, placed((2, 2), devices=HGX_GPUS))
    ports = Counter(c.address.bus for c in of_model(plan, PortModel.ROOT_PORT) if c.address)
    assert sorted(ports.values()) == [7, 7]
    check_tree(request, plan)
    specs = [DeviceSpec(f"{bus:02x}:00.0") for bus in range(1, 31)]
    many = tuple(Bdf.parse(spec.bdf) for spec in specs)
    request = asking(ask(many), spare_ports=3)
    plan = assemble(even_host(1, devices=specs), request, placed((4,), devices=many))
    ports = Counter(c.address.bus for c in of_model(plan, PortModel.ROOT_PORT) if c.address)
    assert sorted(ports.values()) == [1 + 3, 29 + 3]


def test_i440fx_is_refused_by_name() -> None:
    for machine in ("pc", "pc-i440fx-7.2", None):
        request = small_request(4, layout="pin-numa-pci")
        request = replace(request, guest=structs.replace(request.guest, machine=machine))
        with pytest.raises(InputError, match="i440fx") as error:
            assemble(hgx_host(), request, placed((2, 2)))
        assert error.value.exit_code == 2 and "q35" in str(error.value)


def test_an_architecture_without_expander_buses_is_not_sent_to_q35() -> None:
    request = small_request(4, layout="pin-numa-pci")
    guest = structs.replace(request.guest, architecture="ppc64le", machine="pseries")
    with pytest.raises(InputError, match="ppc64le") as error:
        assemble(hgx_host(), replace(request, guest=guest), placed((2, 2)))
    assert "pin-numa" in (error.value.hint or "")


def test_arm_needs_the_virt_machine() -> None:
    request = ask(HGX_GPUS)
    guest = structs.replace(request.guest, architecture="aarch64", machine="virt-8.0")
    plan = assemble(hgx_host(), replace(request, guest=guest), placed((2, 2), devices=HGX_GPUS))
    assert len(of_model(plan, PortModel.EXPANDER_BUS)) == 2
    guest = structs.replace(guest, machine="sbsa-ref")
    with pytest.raises(InputError, match="sbsa-ref"):
        assemble(hgx_host(), replace(request, guest=guest), placed((2, 2)))


def test_a_flat_guest_or_no_host_cannot_have_a_mirrored_tree() -> None:
    request = small_request(4, layout="pin-numa-pci")
    with pytest.raises(UsageError, match="requires a host"):
        assemble(None, request, placed((2, 2)))
    flat = replace(request, layout=structs.replace(request.layout, cells=GuestCells.SINGLE))
    with pytest.raises(UsageError, match="has one node"):
        assemble(hgx_host(), flat, placed((2, 2)))


def test_an_unknown_device_and_a_bridge_are_refused() -> None:
    with pytest.raises(InputError, match=r"0000:77:00\.0"):
        assemble(hgx_host(), ask(()), placed((2, 2), devices=["77:00.0"]))
    bridge = next(d.bdf for d in hgx_host().pci_devices if d.kind is DeviceKind.BRIDGE)
    with pytest.raises(InputError, match="bridge"):
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
        guest = structs.replace(request.guest, controllers=(root, *bridges[:count]))
        return replace(request, guest=guest)

    # 235 controllers leave 20 bus numbers, and indices up to 245 for 10 new controllers.
    check_tree(crowded(235), assemble(hgx_host(), crowded(235), placement))
    with pytest.raises(
        Unplannable, match=r"a need for 256 \(247 in the definition, 10 to"
    ) as error:
        assemble(hgx_host(), crowded(246), placement)
    assert error.value.exit_code == 4 and error.value.hint


def test_an_expander_bus_of_no_cell_is_left_its_numbers() -> None:
    request = ask(HGX_GPUS)
    foreign = GuestPciController(15, "pcie-expander-bus", GuestAddress(0, 0, 9, 0), 40)
    guest = structs.replace(request.guest, controllers=(*request.guest.controllers, foreign))
    plan = assemble(hgx_host(), replace(request, guest=guest), placed((2, 2), devices=HGX_GPUS))
    assert 15 not in {controller.index for controller in plan.vm.controllers}
    windows = [
        range(c.bus_nr, c.bus_nr + (c.bus_count or 0)) for c in plan.vm.controllers if c.bus_nr
    ]
    assert len(windows) == 2 and not any(40 in window for window in windows)


def test_bus_numbers_that_do_not_suffice_are_counted() -> None:
    specs = [DeviceSpec(f"{1 + i:02x}:00.0", 0, DeviceKind.NIC, root=i) for i in range(110)]
    devices = bdfs(*(spec.bdf for spec in specs))
    request = ask(devices)
    crowd = tuple(
        GuestPciController(i, "pcie-root-port", GuestAddress(0, 0, 2 + i // 8, i % 8))
        for i in range(1, 130)
    )
    placement, host = placed((4,), devices=devices), even_host(1, devices=specs)

    def crowded(count: int) -> GuestRequest:
        controllers = (GuestPciController(0, "pcie-root"), *crowd[:count])
        return replace(request, guest=structs.replace(request.guest, controllers=controllers))

    # 110 ports need four expander buses: 114 numbers, beside one for each port of pcie.0.
    check_tree(crowded(110), assemble(host, crowded(110), placement))
    bus = GuestPciController(126, "pcie-expander-bus", None, 190)
    taken = structs.replace(request.guest, controllers=(*crowded(125).guest.controllers, bus))
    with pytest.raises(Unplannable, match="256") as error:
        assemble(host, replace(request, guest=taken), placement)
    assert error.value.hint


def test_ports_that_libvirt_adds_for_left_out_indices_have_their_numbers_too() -> None:
    request = ask(HGX_GPUS)
    far = GuestPciController(200, "pcie-root-port", None)
    guest = structs.replace(request.guest, controllers=(*request.guest.controllers, far))
    plan = assemble(hgx_host(), replace(request, guest=guest), placed((2, 2), devices=HGX_GPUS))
    assert min(c.bus_nr for c in plan.vm.controllers if c.bus_nr) >= 201


def test_layouts_that_leave_pcie_as_it_was_keep_every_address() -> None:
    request = ask(HGX_GPUS)
    request = replace(request, layout=PRESETS["pin-numa"])
    plan = assemble(hgx_host(), request, placed((2, 2), devices=HGX_GPUS))
    assert plan.vm.controllers == ()
    assert addresses(plan) == {h.bdf: h.address for h in request.guest.hostdevs}


def test_used_slots_of_the_root_bus_are_left_alone() -> None:
    request = ask(HGX_GPUS)
    in_use = tuple(GuestAddress(0, 0, slot, 0) for slot in (0x10, 0x12))
    guest = structs.replace(
        request.guest, addresses=tuple(sorted((*request.guest.addresses, *in_use)))
    )
    plan = assemble(hgx_host(), replace(request, guest=guest), placed((2, 2), devices=HGX_GPUS))
    slots = [c.address.device for c in of_model(plan, PortModel.EXPANDER_BUS) if c.address]
    assert slots == [0x11, 0x13]


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
    with cpu_time_below(0.03):  # about 3 ms
        plan = assemble(host, request, placement)
    check_tree(request, plan)


def test_cells_without_devices_have_no_bus_where_pcie_0_has_no_slots() -> None:
    devices = [DeviceSpec(f"{16 + i:02x}:00.0", i, DeviceKind.GPU, i) for i in (0, 9, 31)]
    host = even_host(4, 8, 1, 2, 1, devices=devices, name="wide")
    names = bdfs(*(device.bdf for device in devices))
    request, placement = ask(names, vcpus=64), placed((2,) * 32, devices=names)
    plan = assemble(host, request, placement)
    buses = of_model(plan, PortModel.EXPANDER_BUS)
    assert [bus.cell for bus in buses] == [0, 9, 31]
    assert [device.cell for device in plan.vm.hostdevs] == [0, 9, 31]
    assert "cells-without-bus" in [finding.id for finding in plan.findings]
    check_tree(request, plan)
    again = assemble(host, after(request, plan), placement)
    assert again.vm.controllers == tuple(
        structs.replace(c, existing=True) for c in plan.vm.controllers
    )


def test_devices_of_a_hybrid_host_hang_on_the_cell_of_performance_cores() -> None:
    host = host_of(
        [NodeSpec(((2,) * 4 + (1,) * 4,), efficiency_cores=4)],
        devices=[DeviceSpec("01:00.0", 0, DeviceKind.GPU, 0)],
    )
    performance, efficient = [CpuSet([pu]) for pu in (0, 1)], [CpuSet([pu]) for pu in (4, 5)]
    devices = bdfs("01:00.0")
    for pins, cell in ((performance + efficient, 0), (efficient + performance, 1)):
        placement = placed((2, 2), nodes=(0, 0), pins=pins, devices=devices)
        plan = assemble(host, ask(devices), placement)
        assert [device.cell for device in plan.vm.hostdevs] == [cell]


def test_devices_of_more_cells_than_pcie_0_has_slots_for_are_refused() -> None:
    """A GPU on each of 32 nodes, and pcie.0 has slots for 25 buses."""
    gpus = [DeviceSpec(f"{16 + i:02x}:00.0", i, DeviceKind.GPU, i) for i in range(32)]
    host = even_host(32, 1, 1, 2, 1, devices=gpus, name="wide")
    names = bdfs(*(device.bdf for device in gpus))
    guest = small_guest(32, hostdevs=[str(bdf) for bdf in names])
    request = replace(small_request(32, GIB, layout="pin-numa-pci"), guest=guest, devices=names)
    with pytest.raises(Unplannable, match="no free slot") as refused:
        plan_vm(host, request)
    assert "--max-nodes" in str(refused.value.hint)
    assert len(plan_vm(host, replace(request, layout=PRESETS["pin-numa"])).nodes) == 32
    assert len(plan_vm(host, asking(request, max_nodes=16)).nodes) == 16
