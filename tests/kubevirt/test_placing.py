"""Where the hook puts devices, case by case next to KubeVirt's own placement.

Hosts and wishes are those of KubeVirt's tests of PCINUMAAwareTopology (pci-placement_test.go
at d923fdb8), retold; where the answer differs, the test says why.
"""

from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

import pytest

from homenode.cluster.kubevirt.placing import PlacedDefinition, place_devices
from homenode.errors import HomenodeError, HostError, InputError
from homenode.machine.snapshot.protocol import MemorySnapshot
from homenode.vm.domain.read import build_vm, open_domain
from homenode.vm.model import Vm
from homenode.vm.plan_options import PciGranularity
from tests.discover.test_device_nodes import gpus_on_the_cpus_nodes, gpus_on_their_own_nodes
from tests.kubevirt_documents import (
    IBM,
    IBM_GPUS,
    document,
    hostdev,
    ibm_document,
    shipped,
    small_host,
)

HOST = small_host({"01:00.0": 0, "03:00.0": 0, "05:00.0": 0, "02:00.0": 1, "04:00.0": 1})
EXPANDER = "pcie-expander-bus"
NATIVE = (
    '<controller type="pci" index="1" model="pcie-expander-bus"><model name="pxb-pcie"/>'
    '<target busNr="253"><node>0</node></target>'
    '<address type="pci" domain="0x0000" bus="0x00" slot="0x08" function="0x0"/></controller>'
    '<controller type="pci" index="2" model="pcie-root-port">'
    '<address type="pci" domain="0x0000" bus="0x01" slot="0x00" function="0x0"/></controller>'
    '<controller type="pci" index="3" model="pcie-root-port">'
    '<address type="pci" domain="0x0000" bus="0x01" slot="0x01" function="0x0"/></controller>'
)


def place(xml: str, host: MemorySnapshot = HOST, **given: object) -> PlacedDefinition:
    return place_devices(xml.encode(), host, **given)  # type: ignore[arg-type]


def guest(placed: PlacedDefinition) -> Vm:
    return build_vm(open_domain(placed.document, "placed"))


def test_a_document_without_acpi_gets_it_with_its_expander_buses() -> None:
    """spec.domain.features.acpi.enabled: false; its guest would see no node of any device."""
    xml = document(["01:00.0", "02:00.0"])
    assert "<acpi></acpi>" in xml
    placed = place(xml.replace("<acpi></acpi>", ""))
    assert cell_of_device(placed) == {"01:00.0": 0, "02:00.0": 1}
    assert b"<acpi/>" in placed.document
    assert b"<acpi/>" not in place(xml).document


def cell_of_device(placed: PlacedDefinition) -> dict[str, int | None]:
    """Function -> the cell of the expander bus that it hangs on, None on pcie.0."""
    seen = guest(placed)
    by_index = {controller.index: controller for controller in seen.controllers}
    found: dict[str, int | None] = {}
    for one in seen.hostdevs:
        port = None if one.address is None else by_index.get(one.address.bus)
        above = None if port is None or port.address is None else by_index.get(port.address.bus)
        found[str(one.bdf)[5:]] = None if above is None else above.cell
    return found


def expanders(placed: PlacedDefinition) -> list[tuple[int | None, int | None]]:
    """(cell, bus number) of each expander bus."""
    return [(c.cell, c.bus_nr) for c in guest(placed).controllers if c.model == EXPANDER]


def warnings(placed: PlacedDefinition) -> list[str]:
    return [note for note in placed.notes if note.startswith("warning")]


def test_each_cell_has_one_expander_bus_also_where_it_has_no_device() -> None:
    """KubeVirt makes a bus for cells with devices alone. Ours are there from the start, so that a
    VM's addresses do not move when its next start gets a device on the other node."""
    placed = place(document(["01:00.0"]))
    assert [cell for cell, _ in expanders(placed)] == [0, 1]
    assert cell_of_device(placed) == {"01:00.0": 0}


def test_devices_go_to_the_cells_of_their_nodes_in_any_order() -> None:
    every = ["04:00.0", "03:00.0", "01:00.0", "02:00.0"]
    placed = place(document(every))
    assert cell_of_device(placed) == {"01:00.0": 0, "03:00.0": 0, "02:00.0": 1, "04:00.0": 1}
    again = place(document(sorted(every)))
    address_of = {h.bdf: h.address for h in guest(placed).hostdevs}
    assert address_of == {h.bdf: h.address for h in guest(again).hostdevs}


def test_bus_windows_do_not_overlap_and_have_room() -> None:
    """KubeVirt counts down from 255 with exact windows ({253, 250} here), which leaves nothing for
    a device that is plugged in later. Ours have room for some more."""
    placed = place(document(["04:00.0", "03:00.0", "01:00.0", "02:00.0"]))
    first, second = sorted(nr for _, nr in expanders(placed) if nr is not None)
    assert second - first >= 8
    assert 256 - second >= 8


def test_new_controllers_come_after_those_of_the_document() -> None:
    port = '<controller type="pci" index="7" model="pcie-root-port"></controller>'
    placed = place(document(["01:00.0"], controllers=port))
    added = [c.index for c in guest(placed).controllers if c.index != 7]
    assert min(added) == 8
    assert cell_of_device(placed) == {"01:00.0": 0}


def test_controller_indices_that_run_out_are_an_error_and_nothing_is_written() -> None:
    port = '<controller type="pci" index="255" model="pcie-root-port"></controller>'
    with pytest.raises(HomenodeError, match="255"):
        place(document(["01:00.0"], controllers=port))


def test_a_device_that_the_user_put_on_the_root_complex_stays_there() -> None:
    given = {"01:00.0": 'domain="0x0000" bus="0x00" slot="0x07" function="0x0"'}
    placed = place(document(["01:00.0", "02:00.0"], addresses=given))
    assert str(guest(placed).hostdevs[0].address) == "0000:00:07.0"
    staying = place(document(["01:00.0"], addresses=given)).notes
    assert not any("placed already" in note for note in staying), "the warning denies it"
    assert cell_of_device(placed)["02:00.0"] == 1
    (said,) = warnings(placed)
    assert "01:00.0" in said and "stays" in said and "port above" in said


def test_an_address_that_the_vmi_names_stays_and_one_of_libvirts_own_moves() -> None:
    port = (
        '<controller type="pci" index="4" model="pcie-root-port">'
        '<address type="pci" bus="0x00" slot="0x02" function="0x0"/></controller>'
    )
    given = {"01:00.0": 'domain="0x0000" bus="0x04" slot="0x00" function="0x0"'}
    xml = document(["01:00.0"], addresses=given, controllers=port)
    assert place(xml, asked_for=frozenset({(0, 4, 0, 0)})).document == xml.encode()
    assert cell_of_device(place(xml)) == {"01:00.0": 0}


def test_a_device_without_a_node_stays_and_is_named() -> None:
    """KubeVirt's strict mode, which guestMappingPassthrough turns on, refuses the whole VM."""
    host = small_host({"01:00.0": -1, "02:00.0": 1})
    placed = place(document(["01:00.0", "02:00.0"]), host)
    assert cell_of_device(placed) == {"01:00.0": None, "02:00.0": 1}
    assert any("01:00.0" in note and "numa_node is -1" in note for note in warnings(placed))


def test_a_device_on_a_node_without_a_cell_stays_and_is_named() -> None:
    host = small_host({"01:00.0": 2, "02:00.0": 1}, ("0-3", "4-7", "8-9"), ["10 21 31"] * 3)
    placed = place(document(["01:00.0", "02:00.0"]), host)
    assert cell_of_device(placed) == {"01:00.0": None, "02:00.0": 1}
    assert any("node 2" in note and "(0, 1)" in note for note in warnings(placed))


@pytest.mark.parametrize(
    ("given", "cells"),
    [
        ({"nodes": ("1", "0")}, {"01:00.0": 1, "02:00.0": 0}),
        # KubeVirt's strict mode refuses: "mapped to multiple guest NUMA cells". Either is as near.
        ({"nodes": ("0", "0")}, {"01:00.0": 0, "02:00.0": None}),
        ({"pins": ((4, 5), (0, 1)), "nodes": None}, {"01:00.0": 1, "02:00.0": 0}),
        ({"pins": ((0, 1, 4, 5),), "nodes": ("0-1",)}, {"01:00.0": 0, "02:00.0": 0}),
    ],
)
def test_memnode_and_else_the_pins_say_which_cell_stands_for_a_node(
    given: dict[str, Any], cells: dict[str, int | None]
) -> None:
    assert cell_of_device(place(document(["01:00.0", "02:00.0"], **given))) == cells


@pytest.mark.parametrize(
    ("given", "warned"),
    [
        ({"pins": ((4,),), "nodes": None}, "host node 0"),  # its pins are all elsewhere
        ({"pins": ()}, "guestMappingPassthrough"),  # a flat guest
        # KubeVirt gives a guest that may grow one cell, whatever nodes its pins are on.
        ({"pins": ((0, 1, 4, 5),), "nodes": None}, "memory hotplug"),
    ],
)
def test_a_guest_without_a_cell_for_a_device_is_left_alone(
    given: dict[str, Any], warned: str
) -> None:
    xml = document(["01:00.0"], **given)
    placed = place(xml)
    assert placed.document == xml.encode()
    assert warned in warnings(placed)[0]


def test_what_pcinumaawaretopology_placed_stays_byte_for_byte() -> None:
    given = {
        "01:00.0": 'domain="0x0000" bus="0x02" slot="0x00" function="0x0"',
        "03:00.0": 'domain="0x0000" bus="0x03" slot="0x00" function="0x0"',
    }
    devices = ["01:00.0", "03:00.0"]
    xml = document(devices, addresses=given, controllers=NATIVE, distances=True)
    placed = place(xml)
    assert placed.document == xml.encode()
    assert not warnings(placed)
    # KubeVirt 1.8 gives the cells no distances.
    without = place(document(devices, addresses=given, controllers=NATIVE)).document.decode()
    assert ElementTree.canonicalize(without) == ElementTree.canonicalize(xml)


def test_what_pcinumaawaretopology_left_joins_its_expander_bus() -> None:
    given = {"01:00.0": 'domain="0x0000" bus="0x02" slot="0x00" function="0x0"'}
    xml = document(["01:00.0", "05:00.0", "02:00.0"], addresses=given, controllers=NATIVE)
    placed = place(xml)
    assert cell_of_device(placed) == {"01:00.0": 0, "05:00.0": 0, "02:00.0": 1}
    assert str(guest(placed).hostdevs[0].address) == "0000:02:00.0"


def test_what_graceiovirtualization_placed_stays_byte_for_byte() -> None:
    xml = document(["01:00.0"]).replace("</hostdev>", '<acpi nodeset="2-9"></acpi></hostdev>')
    cells = "".join(f'<cell id="{i}" memory="0" unit="b"></cell>' for i in range(2, 10))
    xml = xml.replace("</numa>", f"{cells}</numa>")
    assert place(xml).document == xml.encode()


def test_the_hosts_distances_are_named_where_the_cells_have_none() -> None:
    placed = place(document(["01:00.0"]))
    stated = ElementTree.fromstring(placed.document)
    values = [[s.get("value") for s in cell.iter("sibling")] for cell in stated.iter("cell")]
    assert values == [["10", "21"], ["21", "10"]]


def test_distances_of_the_document_stay() -> None:
    xml = document(["01:00.0"], distances=True).replace('value="21"', 'value="40"')
    assert place(xml).document.count(b'value="40"') == 2


def test_pins_memory_and_everything_else_stay_as_they_were() -> None:
    xml = document(["01:00.0", "02:00.0"])
    before, after = ElementTree.fromstring(xml), ElementTree.fromstring(place(xml).document)
    for element in (after.find("devices"), *after.iter("hostdev")):
        assert element is not None
        for child in list(element):
            added = child.tag == "controller" and child.get("type") == "pci"
            if added or (element.tag == "hostdev" and child.tag == "address"):
                element.remove(child)
    for cell in after.iter("cell"):
        for child in list(cell):
            cell.remove(child)
    assert ElementTree.tostring(before) == ElementTree.tostring(after)


@pytest.mark.parametrize("gib", [1, 8, 24])
def test_memory_devices_stay_and_their_cells_with_them(gib: int) -> None:
    plugged = (
        f'<memory model="virtio-mem"><target><size unit="GiB">{gib}</size><node>0</node>'
        '<block unit="KiB">2048</block><requested unit="KiB">0</requested></target></memory>'
    )
    text = ibm_document().replace("<devices>", f"<devices>{plugged}")
    text = text.replace(str(512 << 30), str(8 << 30), 1)  # <memory>; the cells tell 512 GiB
    placed = place_devices(text.encode(), shipped(IBM)).document.decode()
    assert plugged in placed
    assert placed.count(f'memory="{256 << 30}"') == 2
    assert placed.count("pxb-pcie") == 2


def test_other_gpus_of_the_same_nodes_get_the_same_addresses() -> None:
    def places(gpus: Sequence[str]) -> list[str]:
        xml = place_devices(document(gpus, pins=((0, 1), (64, 65))).encode(), shipped(IBM)).document
        guest = build_vm(open_domain(xml, "placed"))
        at = {str(h.bdf): str(h.address) for h in guest.hostdevs}
        return [at[f"0000:{gpu}"] for gpu in gpus]

    first, second = IBM_GPUS[:4], IBM_GPUS[4:]
    one = places((*first[:2], *second[:2]))
    assert one == places((*first[2:], *second[2:])) == places((first[0], first[3], *second[1:3]))


def test_an_i440fx_guest_with_devices_is_refused() -> None:
    with pytest.raises(InputError, match=r"q35.*found pc-i440fx-rhel7\.6\.0"):
        place(document(["01:00.0"], machine="pc-i440fx-rhel7.6.0"))


def test_a_device_or_a_sys_that_is_not_there_is_an_error() -> None:
    with pytest.raises(HostError, match="0000:99:00"):
        place(document(["99:00.0"]))
    with pytest.raises(HostError, match="NUMA node"):
        place(document(["01:00.0"]), MemorySnapshot("nothing", {}))


def test_a_gpu_and_its_audio_function_share_a_slot() -> None:
    """KubeVirt gives each function a port, which no driver of a GPU with audio expects."""
    host = small_host({"01:00.0": 0, "01:00.1": 0})
    placed = place(document(["01:00.0", "01:00.1"]), host)
    first, second = (h.address for h in guest(placed).hostdevs)
    assert first is not None and second is not None
    assert (first.bus, first.function, second.function) == (second.bus, 0, 1)
    assert placed.document.count(b"multifunction") == 1


def test_virtual_functions_have_a_port_each_on_their_nodes_cell() -> None:
    """As of MI350X: a function of each GPU, whose physical function stays on the host."""
    functions = {"01:02.0": 0, "01:02.1": 0, "41:02.0": 1}
    whole = small_host(functions)
    links = dict(whole.links)
    for bdf in functions:
        directory = whole.real_path(f"/sys/bus/pci/devices/0000:{bdf}")
        links[f"{directory}/physfn"] = f"../0000:{bdf[:2]}:00.0"
    host = MemorySnapshot("virtual functions", whole.files, links)
    placed = place(document(sorted(functions)), host)
    assert cell_of_device(placed) == functions
    addresses = [h.address for h in guest(placed).hostdevs]
    assert len({address.bus for address in addresses if address is not None}) == 3
    assert all(address is not None and address.function == 0 for address in addresses)


def test_more_devices_than_a_bus_has_slots_get_a_second_bus() -> None:
    """KubeVirt counts slots on without a bound."""
    many = [f"{bus:02x}:00.0" for bus in range(1, 41)]
    placed = place(document(many), small_host(dict.fromkeys(many, 0)))
    assert set(cell_of_device(placed).values()) == {0}
    assert len(expanders(placed)) == 3


def test_mediated_devices_are_left_alone() -> None:
    mdev = (
        '<hostdev type="mdev" mode="subsystem" model="vfio-pci"><source>'
        '<address uuid="6f2d1c4e-9d3b-5b53-8f11-6a2f0a6d4c12"></address></source></hostdev>'
    )
    xml = document(["01:00.0"]).replace("<serial", mdev + "<serial", 1)
    assert mdev.encode() in place(xml).document


def test_switches_are_mirrored_where_asked() -> None:
    pair = ["07:00.0", "08:00.0"]
    xml = document(pair, pins=((4, 5), (64, 65)))
    placed = place(xml, shipped(IBM), granularity=PciGranularity.SWITCH)
    models = [controller.model for controller in guest(placed).controllers]
    assert models.count("pcie-switch-upstream-port") == 1
    assert models.count("pcie-switch-downstream-port") == 2


def test_ibms_eight_gpus_hang_four_on_each_of_two_expander_buses() -> None:
    placed = place(ibm_document(), shipped(IBM))
    assert len(expanders(placed)) == 2
    assert cell_of_device(placed) == {bdf: int(i >= 4) for i, bdf in enumerate(IBM_GPUS)}
    ports = [c for c in guest(placed).controllers if c.model == "pcie-root-port"]
    assert len(ports) == 8
    assert not warnings(placed)


def test_another_uuid_and_order_give_the_same_tree() -> None:
    """The article's script pastes a stored document and patches its UUID."""
    other = "00000000-1111-2222-3333-444444444444"
    shown = ibm_document(uuid=other)
    for bdf in IBM_GPUS:
        shown = shown.replace(hostdev(bdf), "", 1)
    shown = shown.replace("<serial", "".join(map(hostdev, reversed(IBM_GPUS))) + "<serial", 1)
    placed, usual = place(shown, shipped(IBM)), place(ibm_document(), shipped(IBM))
    assert guest(placed).controllers == guest(usual).controllers
    assert other.encode() in placed.document
    assert cell_of_device(placed) == cell_of_device(usual)


def test_one_cell_on_one_node_has_the_nodes_device() -> None:
    one_cell = place(document(["01:00.0"], pins=((0, 1),), nodes=None))
    assert cell_of_device(one_cell) == {"01:00.0": 0}


def test_both_names_of_a_gpus_node_give_the_same_answer_of_the_hook() -> None:
    given = {"pins": ((0, 1), (144, 145)), "nodes": ("0", "2")}
    xml = document(("0009:01:00.0", "0029:01:00.0"), machine="virt", **given)  # type: ignore[arg-type]
    xml = xml.replace('arch="x86_64"', 'arch="aarch64"')
    own, usual = (
        place_devices(xml.encode(), snapshot)
        for snapshot in (gpus_on_their_own_nodes(), gpus_on_the_cpus_nodes())
    )
    assert own == usual
    assert own.document.count(b"<acpi nodeset=") == 2
    assert own.notes[-1].startswith("placed 2 PCI functions")
