"""The guest kernel's bus numbers, derived from a document and confirmed by a booted guest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.check.verify.boot.stand_in_boot import BootOptions, boot_stand_in
from homenode.errors import InputError
from homenode.nccl.guest_side import find_kernel_address, list_bus_numbers, make_pending
from homenode.plan.stored import encode_plan, read_plan
from homenode.vm.domain.read import build_vm, open_domain, read_vm
from homenode.vm.guest_observation import find_guest_path, map_guest_paths
from homenode.vm.model import GuestAddress, GuestPciController
from tests.nccl_documents import check_bus_numbers, side, vm
from tests.verify_documents import DEVICES, changed, tuned
from tests.verify_guests import guest_files, guest_host

GPU, NIC = "0000:11:00.0", "0000:81:00.0"


def port(index: int, at: str, model: str = "pcie-root-port", more: str = "") -> str:
    address = Bdf.parse(at)
    return (
        f"<controller type='pci' index='{index}' model='{model}'>{more}"
        f"<address type='pci' domain='0' bus='{address.bus:#x}' slot='{address.device:#x}' "
        f"function='{address.function:#x}'"
        + (" multifunction='on'" if address.function == 0 else "")
        + "/></controller>\n"
    )


def at(xml: bytes, *addresses: str) -> bytes:
    """The document with its hostdevs plugged in there, in order."""
    for each in addresses:
        a = Bdf.parse(each)
        xml = xml.replace(
            b"</source></hostdev>",
            f"</source><address type='pci' domain='0' bus='{a.bus:#x}' slot='{a.device:#x}' "
            f"function='{a.function:#x}'/></hostdev >".encode(),
            1,
        )
    return xml


ODD = at(
    vm(
        (GPU, NIC, "0000:12:00.0", "0000:82:00.0", "0000:83:00.0"),
        vcpus=2,
        inside=port(1, "00:03.0")  # two ports that share a slot, the later index first
        + port(2, "00:02.1")
        + port(3, "00:02.0")
        + port(4, "03:00.0", "pcie-switch-upstream-port")
        + port(5, "04:01.0", "pcie-switch-downstream-port")
        + port(6, "04:00.0", "pcie-switch-downstream-port")
        + port(7, "00:08.0", "pcie-expander-bus", "<target busNr='200'/>")
        + port(8, "07:01.0")
        + port(9, "07:00.0")
        + port(10, "00:09.0", "pcie-expander-bus", "<target busNr='100'/>")
        + port(11, "0a:00.0")
        + "<controller type='usb' model='none'/><memballoon model='none'/>",
    ),
    "05:00.0",
    "06:00.0",
    "02:00.0",
    "08:00.0",
    "0b:00.0",
)
"""A tree in which indices, slots and numbers run in different orders.

Bus 0 has the switch below the port at 02.0 (buses 1-4), then the port at 02.1 (5), then 03.0 (6).
"""

ODD_IDS = {
    GPU: "0000:04:00.0",
    NIC: "0000:03:00.0",
    "0000:12:00.0": "0000:05:00.0",
    "0000:82:00.0": "0000:ca:00.0",
    "0000:83:00.0": "0000:65:00.0",
}


def test_bus_numbers_follow_a_depth_first_walk_from_each_root() -> None:
    assert {str(a): str(b) for a, b in side(ODD).bus_ids} == ODD_IDS


def test_a_tuned_documents_devices_are_numbered_from_their_expander_bus() -> None:
    found = {str(a): str(b) for a, b in side(tuned("pin-numa-pci").document).bus_ids}
    assert found == {DEVICES[0]: "0000:f1:00.0", DEVICES[1]: "0000:f9:00.0"}


def test_what_libvirt_would_still_plug_in_makes_root_bus_numbers_unknown() -> None:
    loose = changed(ODD, ("<memballoon model='none'/>", "<memballoon model='virtio'/>"))
    with pytest.raises(InputError, match=r"bus number of 0000:11:00\.0.*<memballoon> without one"):
        side(loose)
    bare = changed(ODD, ("<controller type='usb' model='none'/>", ""))
    with pytest.raises(InputError, match="found no USB controller"):
        side(bare)
    none = changed(ODD, ("<memballoon model='none'/>", ""))
    with pytest.raises(InputError, match="found no <memballoon>") as caught:
        side(none)
    assert "virsh dumpxml" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("device", "is_loose"),
    [
        ("<disk type='file' device='disk'><target dev='vda' bus='virtio'/></disk>", True),
        ("<disk type='file' device='disk'><target dev='sda' bus='sata'/></disk>", False),
        ("<interface type='network'/>", True),
        ("<controller type='usb' model='qemu-xhci'/>", True),
        ("<controller type='usb' model='none'/>", False),
        ("<controller type='sata' index='0'/>", False),
        ("<controller type='pci' index='40' model='pcie-root-port'/>", True),
        ("<video><model type='none'/></video>", False),
        ("<video><model type='virtio'/></video>", True),
        ("<watchdog model='itco'/>", False),
        ("<input type='tablet' bus='usb'/>", False),
        ("<console type='pty'/>", False),
        ("<hostdev mode='subsystem' type='usb'/>", False),
    ],
)
def test_it_is_known_which_devices_libvirt_plugs_in_on_pci(device: str, is_loose: bool) -> None:
    document = open_domain(changed(ODD, ("<memballoon", f"{device}<memballoon")), "vm.xml")
    assert (make_pending(document) is not None) is is_loose


def test_a_device_on_the_root_bus_itself_has_the_number_0_whatever_else_there_is() -> None:
    xml = at(vm((GPU,)), "00:05.0")
    assert [str(bus_id) for _, bus_id in side(xml).bus_ids] == ["0000:00:05.0"]


def test_a_device_without_an_address_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"no guest address for device 0000:11:00\.0"):
        side(vm((GPU,)))


def test_windows_that_collide_are_refused() -> None:
    # busNr 201 is what the first port below busNr 200 gets: both GPUs would be 0000:ca:00.0.
    xml = changed(ODD, ("busNr='100'", "busNr='201'"))
    with pytest.raises(InputError, match=r"different bus id.*0000:ca:00\.0"):
        side(xml)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 31), st.integers(0, 7)), max_size=12))
def test_any_tree_is_numbered_without_a_loop_and_each_bus_once(
    places: list[tuple[int, int, int]],
) -> None:
    controllers = [
        GuestPciController(i, "pcie-root-port", GuestAddress(0, bus, device, function))
        for i, (bus, device, function) in enumerate(places, start=1)
    ]
    numbers = list_bus_numbers(controllers)
    assert len(set(numbers.values())) == len(numbers)
    for controller in controllers:
        assert controller.address is not None
        path = find_guest_path(controller.address, controllers)
        assert (controller.index in numbers) is (path is not None)


def test_256_buses_are_all_there_are() -> None:
    controllers = [
        GuestPciController(i, "pcie-root-port", GuestAddress(0, i - 1, 0, 0))
        for i in range(1, 300)
        if i <= 256
    ]
    numbers = list_bus_numbers(controllers[:255])
    assert max(numbers.values()) == 255
    assert find_kernel_address(GuestAddress(0, 255, 1, 0), numbers) == Bdf(0, 255, 1, 0)
    high = [
        GuestPciController(1, "pcie-expander-bus", GuestAddress(0, 0, 2, 0), bus_nr=255),
        GuestPciController(2, "pcie-root-port", GuestAddress(0, 1, 0, 0)),
    ]
    assert 2 not in list_bus_numbers(high)


# ---- the guest's own view


def test_a_capture_from_inside_the_guest_says_the_bus_ids_and_the_nodes() -> None:
    xml = tuned("pin-numa-pci").document
    guest = guest_host()
    derived, observed = side(xml), side(xml, guest=guest)
    assert {a for a, _ in observed.bus_ids} == {a for a, _ in derived.bus_ids}
    at_path = map_guest_paths(guest)
    controllers = read_vm(xml, "vm.xml").controllers
    for hostdev in read_vm(xml, "vm.xml").hostdevs:
        assert hostdev.address is not None
        path = find_guest_path(hostdev.address, controllers)
        assert path is not None and observed.bus_id(hostdev.bdf) == at_path[path]
    assert observed.node_of_cell == (0, 1)


def test_a_capture_of_another_guest_is_refused_by_the_device_it_lacks() -> None:
    guest = guest_host()
    other = replace(guest, pci_devices=())
    with pytest.raises(InputError, match=r"device 0000:11:00\.0 at pci0000:f0/.*no function there"):
        side(tuned("pin-numa-pci").document, guest=other)


# ---- the plan


def test_a_plan_and_its_document_give_what_the_document_alone_gives() -> None:
    made = tuned("pin-numa-pci")
    plan = read_plan(encode_plan(made.plan).encode(), "p.json")
    planned = side(made.document, plan=plan)
    cells = tuple(structs.replace(cell, host_nodes=()) for cell in planned.cells)
    assert structs.replace(planned, cells=cells) == side(made.document)


def test_a_plan_of_another_document_is_refused_by_the_device() -> None:
    plan = tuned("pin-numa-pci").plan
    with pytest.raises(InputError, match=r"0000:11:00\.0 at 0000:03:00\.0 as in the plan"):
        side(tuned("pin-numa").document, plan=plan)
    with pytest.raises(InputError, match="no device 0000:11:00"):
        side(vm(()), plan=plan)


# ---- a booted guest


@pytest.mark.nightly
@pytest.mark.qemu
def test_a_booted_odd_tree_has_the_bus_numbers_that_were_derived() -> None:
    """tests/verify/test_boot.py has the tree that homenode makes."""
    guest_files()
    document = open_domain(ODD, "vm.xml")
    options = BootOptions(connect="none", timeout_s=600)
    check_bus_numbers(ODD, boot_stand_in(document, build_vm(document), options), device_count=5)
