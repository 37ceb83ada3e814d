"""Rewriting devices: expander buses, addresses, windows and interrupts."""

import re

import pytest
from msgspec import structs

from homenode.bdf import Bdf
from homenode.errors import HostError, InputError
from homenode.units import GIB
from homenode.vm.domain.codec import reject_older
from homenode.vm.domain.controllers import edit_controllers, qemu_arguments, read_window_mib
from homenode.vm.domain.document import parse_document
from homenode.vm.domain.read import read_vm
from homenode.vm.domain.schema import validate
from homenode.vm.model import GuestAddress, GuestPciController, PortModel
from homenode.vm.plan import Aperture, with_vm
from homenode.vm.targets.libvirt import rewrite
from tests.domain.test_rewrite import planned, tuned
from tests.domain_corpus import sample
from tests.domain_plans import hand_plan


def test_controllers_are_written_as_libvirt_prints_them() -> None:
    after = tuned("study", "pin-numa-pci").text.decode()
    expected = """
    <controller type='pci' index='1' model='pcie-expander-bus'>
      <model name='pxb-pcie'/>
      <target busNr='64'>
        <node>0</node>
      </target>
      <address type='pci' domain='0x0000' bus='0x00' slot='0x10' function='0x0'/>
    </controller>"""
    assert expected in after
    expected = """
    <controller type='pci' index='3' model='pcie-root-port'>
      <model name='pcie-root-port'/>
      <target chassis='3' port='0x0'/>
      <address type='pci' domain='0x0000' bus='0x01' slot='0x00' function='0x0'/>
    </controller>"""
    assert expected in after


def test_chassis_numbers_that_are_in_use_are_passed_over() -> None:
    xml = sample("earlier-layout").replace(b"chassis='3'", b"chassis='5'")
    after = rewrite(xml, hand_plan(read_vm(xml, "x"), "pin-numa-pci"))
    found = re.findall(rb"chassis='(\d+)'", after)
    assert len(found) == len(set(found)) == 3


def test_new_ports_have_a_chassis_of_their_own_and_libvirts_port_number() -> None:
    """Their indices are chassis of other ports."""
    xml = sample("earlier-layout")
    for old, new in ((b"'1' port", b"'4' port"), (b"'3' port", b"'5' port")):
        xml = xml.replace(b"chassis=" + old, b"chassis=" + new)
    plan = hand_plan(read_vm(xml, "x"), "default")
    ports = [
        GuestPciController(
            index=index,
            model=PortModel.ROOT_PORT,
            address=GuestAddress(0, 0, 2 + index, 1),
            existing=False,
        )
        for index in (4, 5)
    ]
    plan = with_vm(plan, controllers=(*plan.vm.controllers, *ports))
    after = edit_controllers(parse_document(xml, "x"), plan).text.decode()
    chassis = re.findall(r"chassis='(\d+)' port='(0x\w+)'", after)
    assert chassis == [("4", "0x8"), ("5", "0x0"), ("1", "0x31"), ("3", "0x39")]


def test_a_gpu_and_its_audio_share_a_slot() -> None:
    after = tuned("gpu-with-audio-and-nics", "pin-numa-pci")
    guest = read_vm(after.to_bytes(), "after")
    by_source = {str(hostdev.bdf): hostdev.address for hostdev in guest.hostdevs}
    gpu, audio = by_source["0000:19:00.0"], by_source["0000:19:00.1"]
    assert gpu is not None
    assert audio == GuestAddress(0, gpu.bus, gpu.device, 1)
    assert after.text.count(b"multifunction='on'") == 2  # the GPU, and the first of two root ports
    assert b"<address type='unassigned'/>" in after.text


def test_a_network_interface_that_is_a_host_device_moves_too() -> None:
    guest = read_vm(tuned("gpu-with-audio-and-nics", "pin-numa-pci").to_bytes(), "after")
    nic = next(hostdev for hostdev in guest.hostdevs if str(hostdev.bdf) == "0000:1a:10.3")
    assert nic.address is not None
    assert nic.address.bus > 1


def test_a_device_that_the_plan_adds_is_written() -> None:
    after = tuned("study", "pin-numa-pci", extra_devices=(Bdf.parse("0000:3b:00.0"),))
    guest = read_vm(after.to_bytes(), "after")
    assert len(guest.hostdevs) == 3
    assert guest.hostdevs[-1].bdf == Bdf.parse("0000:3b:00.0")
    assert guest.hostdevs[-1].address is not None


def test_a_plan_for_another_document_is_refused_and_says_so() -> None:
    xml, plan = planned("study", "pin-numa-pci")
    there = tuple(structs.replace(controller, existing=True) for controller in plan.vm.controllers)
    with pytest.raises(InputError, match="expected PCI controller 1 to be pcie-expander-bus"):
        rewrite(xml, with_vm(plan, controllers=there))
    with pytest.raises(InputError, match="plan again"):
        rewrite(sample("earlier-layout"), plan)
    document = parse_document(sample("earlier-layout"), "x")
    present = read_vm(sample("earlier-layout"), "x").controllers
    assert edit_controllers(document, with_vm(plan, controllers=present)) is document
    for change in (
        {"bus_nr": 201},
        {"cell": 2},
        {"address": GuestAddress(0, 0, 6, 0)},
        {"model": PortModel.ROOT_PORT},
    ):
        moved = (*present[:2], structs.replace(present[2], **change), present[3])
        with pytest.raises(InputError, match="plan again"):
            edit_controllers(document, with_vm(plan, controllers=moved))


def test_expander_buses_are_refused_on_i440fx() -> None:
    xml, plan = planned("i440fx", "pin-numa-pci")
    with pytest.raises(InputError, match=r"expected machine type q35.*found pc-i440fx-7.2"):
        rewrite(xml, plan)


def test_apertures_are_at_least_as_large_as_asked_for() -> None:
    space = Aperture(2048 * GIB, 46, 262_144, 0, 0)
    document = tuned("qemu-commandline", "pin", aperture=space)
    assert read_window_mib(document) == 262_144
    after = document.text
    wider = Aperture(4096 * GIB, 46, 262_144, 0, 0)
    again = rewrite(after, hand_plan(read_vm(after, "x"), "pin", aperture=wider))
    assert again.count(b"<pcihole64") == 1
    assert b'<pcihole64 unit="GiB">2048</pcihole64>' in after
    less = after.replace(b'"GiB">2048<', b'"MiB">2048<').replace(b'bits="46"', b'bits="40"')
    less = rewrite(less, hand_plan(read_vm(less, "x"), "pin", aperture=wider))
    assert read_vm(less, "x").pcihole64_bytes == 4096 * GIB
    assert b'<maxphysaddr mode="emulate" bits="46"/>' in less
    named = after.replace(b"<q:arg", b'<q:env name="A"/><q:arg', 1)
    assert read_window_mib(parse_document(named, "x")) == 262_144
    assert b'<maxphysaddr mode="emulate" bits="46"/>' in after
    assert b'<q:arg value="opt/ovmf/X-PciMmio64Mb,string=262144"/>' in after
    assert after.count(b"-fw_cfg") == 1
    small = Aperture(1 * GIB, 40, 1024, 0, 0)
    xml, plan = planned("qemu-commandline", "pin", aperture=small)
    assert b"string=65536" in rewrite(xml, plan)
    whole = b"<cpu mode='host-passthrough'><maxphysaddr mode='passthrough'/></cpu>"
    xml = re.sub(rb"<cpu mode.*?/>", whole, sample("study"))
    assert whole in rewrite(xml, hand_plan(read_vm(xml, "x"), "pin", aperture=wider))
    bare = tuned("one-line", "pin", aperture=Aperture(64 * GIB, None, None, 0, 0))
    assert read_vm(bare.to_bytes(), "bare").pcihole64_bytes == 64 * GIB


def test_a_firmware_window_declares_qemus_namespace() -> None:
    after = tuned("study", "pin", aperture=Aperture(None, None, 65_536, 0, 0))
    assert after.text.startswith(
        b"<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>"
    )
    assert b"<qemu:arg value='name=opt/ovmf/X-PciMmio64Mb,string=65536'/>" in after.text
    assert validate(after.to_bytes())[0] == ()
    xml, plan = planned("study", "pin", aperture=Aperture(None, None, 65_536, 0, 0))
    other = rewrite(xml.replace(b"<domain ", b"<domain xmlns:qemu='urn:mine' ", 1), plan)
    assert b"xmlns:qemu='urn:mine'" in other and b"<qemu1:arg value='-fw_cfg'/>" in other
    window = "name=opt/ovmf/X-PciMmio64Mb,string=65536"
    for old, new, expected in (
        (b"<qemu:arg value='-fw_cfg'/>", b"", ["-fw_cfg", window]),
        (window.encode(), b"", ["-fw_cfg", "", "-fw_cfg", window]),
    ):
        own = after.text.replace(old, new)
        planned_again = hand_plan(read_vm(own, "x"), "pin", aperture=plan.aperture)
        arguments = qemu_arguments(parse_document(rewrite(own, planned_again), "x"))
        assert [argument.get("value") for argument in arguments] == expected
        assert len({argument.tag for argument in arguments}) == 1


def test_more_than_255_vcpus_get_interrupt_remapping() -> None:
    after = tuned("gpu-with-audio-and-nics", "default", iommu_needed=True, vcpus=256).text
    assert b"<iommu model='intel'>" in after
    assert b"<driver intremap='on' eim='on' caching_mode='on'/>" in after
    assert b"<ioapic driver='qemu'/>" in after
    assert validate(after)[0] == ()
    xml = sample("empty-cputune").replace(b"type='kvm'", b"type='qemu'")
    plan = hand_plan(read_vm(xml, "x"), "default", iommu_needed=True, vcpus=256)
    after = rewrite(xml, with_vm(plan, hostdevs=()))
    assert b"<driver intremap='on'/>" in after and b"ioapic" not in after
    assert b"intremap" in rewrite(xml.replace(b" arch='x86_64'", b""), plan)
    arm = sample("aarch64-virt").replace(b" arch='aarch64'", b"")
    plan = hand_plan(read_vm(arm, "x"), "default", iommu_needed=True, vcpus=256)
    assert b"<iommu" not in rewrite(arm, plan)


def test_an_iommu_that_is_there_stays_where_255_vcpus_suffice() -> None:
    xml = sample("gpu-with-audio-and-nics").replace(
        b"<memballoon", b"<iommu model='virtio'/>\n    <memballoon"
    )
    plan = hand_plan(read_vm(xml, "x"), "default", iommu_needed=True)
    assert rewrite(xml, plan) == xml
    many = hand_plan(read_vm(xml, "x"), "default", iommu_needed=True, vcpus=288)
    with pytest.raises(InputError, match="does not remap interrupts"):
        rewrite(xml, many)


def test_an_amd_iommu_that_is_there_gets_what_255_vcpus_need() -> None:
    xml = sample("gpu-with-audio-and-nics").replace(
        b"<memballoon", b"<iommu model='amd'><driver passthrough='on'/></iommu>\n    <memballoon"
    )
    guest = read_vm(xml, "x")
    many = hand_plan(guest, "default", iommu_needed=True, vcpus=288)
    after = rewrite(xml, many)
    assert b"<driver passthrough='on' intremap='on' xtsup='on'/>" in after
    assert b"<ioapic driver='qemu'/>" in after and rewrite(after, many) == after
    assert guest.iommu_model == "amd"
    with pytest.raises(HostError, match=r"xtsup=> .*expected libvirt 12\.2\.0"):
        reject_older(many, (12, 1, 0), (10, 0, 0), iommu_model="amd")
    reject_older(many, (12, 2, 0), (10, 0, 0), iommu_model="amd")
    reject_older(many, (12, 1, 0), (10, 0, 0))
    with pytest.raises(HostError, match=r"passed-through devices .*expected QEMU 9\.2\.0"):
        reject_older(many, (12, 2, 0), (9, 1, 0), iommu_model="amd")
    reject_older(with_vm(many, hostdevs=()), (12, 2, 0), (9, 1, 0), iommu_model="amd")


@pytest.mark.parametrize(("layout", "count"), [("pin-numa", 1), ("pin", 0)])
def test_initiators_stay_unless_they_name_a_cell_that_is_gone(layout: str, count: int) -> None:
    acpi = b"<acpi nodeset='1'/>"
    xml = sample("study").replace(b"</source>", b"</source>" + acpi, 1)
    assert rewrite(xml, hand_plan(read_vm(xml, "x"), layout)).count(acpi) == count


def test_a_host_device_that_the_plan_gives_up_goes() -> None:
    xml, plan = planned("study", "pin")
    after = rewrite(xml, with_vm(plan, hostdevs=plan.vm.hostdevs[:1]))
    assert [str(h.bdf) for h in read_vm(after, "after").hostdevs] == ["0000:19:00.0"]
    left = tuple(structs.replace(hostdev, managed=False) for hostdev in plan.vm.hostdevs)
    after = rewrite(xml, with_vm(plan, hostdevs=left))
    assert b"managed='yes'" in xml and b"managed='yes'" not in after
    bare = re.sub(rb"<hostdev.*?</hostdev>", b"", xml, flags=re.DOTALL)
    for hostdevs in (plan.vm.hostdevs, left):  # written anew
        after = rewrite(bare, with_vm(plan, hostdevs=hostdevs))
        assert [h.managed for h in read_vm(after, "x").hostdevs] == [h.managed for h in hostdevs]


def test_a_device_that_moves_into_a_slot_of_its_own_is_no_longer_of_several_functions() -> None:
    address = b"<address type='pci' bus='0' slot='5' multifunction='on'/>"
    xml = sample("study").replace(b"</source>", b"</source>" + address, 1)
    after = rewrite(xml, hand_plan(read_vm(xml, "x"), "pin-numa-pci"))
    assert b"multifunction" in xml and b"multifunction" not in after


@pytest.mark.parametrize("node", [b"", b"<node>0</node>"])
def test_a_controller_that_is_there_in_part_gets_the_rest(node: bytes) -> None:
    xml = sample("study").replace(
        b"<memballoon",
        b"<controller type='pci' index='1' model='pcie-expander-bus'>\n"
        b"      <target busNr='0xfe'>" + node + b"</target>\n    </controller>\n    "
        b"<controller type='pci' index='3' model='pcie-root-port'/>\n    <memballoon",
    )
    plan = hand_plan(read_vm(sample("study"), "x"), "pin-numa-pci")
    after = read_vm(rewrite(xml, plan), "after")
    assert (after.controllers[1].bus_nr, after.controllers[1].cell) == (64, 0)
    assert after.controllers[1].address == GuestAddress(0, 0, 0x10, 0)
    assert after.controllers[3].address == GuestAddress(0, 1, 0, 0)
    assert rewrite(rewrite(xml, plan), plan) == rewrite(xml, plan)
    for other in (b"<node>1</node></target>", b"</target><address type='pci' slot='0x11'/>"):
        with pytest.raises(InputError, match="expected PCI controller 1 to be free for"):
            rewrite(xml.replace(node + b"</target>", other), plan)


def test_an_expander_bus_loses_the_first_cell_that_is_no_more() -> None:
    xml = sample("earlier-layout").replace(b"<node>3</node>", b"<node>2</node>")
    after = rewrite(xml, hand_plan(read_vm(xml, "x"), "pin-numa"))
    assert b"<target busNr='200'>" in after and b"<node>" not in after


def test_a_slot_that_a_gpu_leaves_to_another_device_gives_a_way_out() -> None:
    xml = b"""<domain type='kvm'><name>vm</name><memory unit='GiB'>4</memory><vcpu>4</vcpu>
<os><type arch='x86_64' machine='q35'>hvm</type></os><devices>
<controller type='pci' index='0' model='pcie-root'/>
<controller type='pci' index='5' model='pcie-root-port'>
<address type='pci' domain='0' bus='0' slot='3' function='0'/></controller>
<hostdev mode='subsystem' type='pci' managed='yes'>
<source><address domain='0' bus='0x19' slot='0' function='0'/></source>
<address type='pci' domain='0' bus='5' slot='0' function='0' multifunction='on'/></hostdev>
<interface type='network'><source network='default'/>
<address type='pci' domain='0' bus='5' slot='0' function='1'/></interface>
</devices></domain>"""
    plan = hand_plan(read_vm(xml, "vm.xml"), "pin-numa-pci")
    with pytest.raises(InputError, match="function-without-0") as error:
        rewrite(xml, plan, "vm.xml")
    assert error.value.hint is not None and "delete the <address>" in error.value.hint
    freed = xml.replace(b"<address type='pci' domain='0' bus='5' slot='0' function='1'/>", b"")
    assert rewrite(freed, plan, "vm.xml")
