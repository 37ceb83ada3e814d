"""Of libvirt's command QEMU gets what is the VM's, and nothing that opens what is the host's."""

import struct
from pathlib import Path

import pytest

from homenode.check.start.images import read_head
from homenode.check.start.libvirt_answers import ASKED_OF_LIBVIRT
from homenode.check.start.machine import StartMachine
from homenode.check.start.needs import Need, NeedState
from homenode.check.start.qemu_user import QemuUser
from homenode.check.start.rehearsal import Rehearsed
from homenode.vm.domain.read import open_domain

DOCUMENT = (
    b"<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>%s</domain>"
)
OVERRIDE = (
    b"<devices><interface><alias name='ua-n'/></interface></devices><qemu:override>"
    b"<qemu:device alias='ua-n'><qemu:frontend><qemu:property name='x' type='unsigned' value='7'/>"
    b"<qemu:property name='mac' type='remove'/></qemu:frontend></qemu:device></qemu:override>"
)


def kept(*words: str, inside: bytes = b"") -> list[str]:
    document = open_domain(DOCUMENT % inside, "vm.xml")
    return Rehearsed(document, QemuUser(64000, "qemu", frozenset()), list(words)).kept


@pytest.mark.parametrize(
    "words",
    [
        ("-device", '{"driver":"vfio-pci","host":"0000:18:00.0","id":"hostdev0"}'),
        ("-device", "loader,file=/etc/shadow"),
        ("-device", "e1000,romfile=/etc/shadow"),
        ("-object", '{"qom-type":"secret","id":"s","file":"/etc/shadow"}'),
        ("-object", "filter-dump,id=f,file=/etc/passwd"),
        ("-monitor", "tcp:127.0.0.1:1,server=on"),
        ("-incoming", "exec:reboot"),
        ("-daemonize",),
        ("-D", "/etc/passwd"),
        ("-kernel", "/no/kernel"),
        ("-fw_cfg", "name=opt/x,file=/no/file"),
        ("-acpitable", "data=/dev/zero"),
        ("-smbios", "type=11,path=/no/file"),
        ("-device", "usb-tablet,pcap=/etc/passwd"),
        ("-device", "loader,file=/etc/shadow,addr=1,,x"),
        ("-global", "driver=usb-tablet,property=pcap,value=/etc/passwd"),
        ("-set", "chardev.c.backend=file"),
        ("-name", "-cpu"),
        ("-boot", "splash=/etc/shadow"),
    ],
)
def test_what_is_the_hosts_is_left_out(words: tuple[str, ...]) -> None:
    assert kept(*words) == []


@pytest.mark.parametrize(
    ("words", "made"),
    [
        (("-netdev", '{"type":"tap","fd":"27","id":"n"}'), "hubport,hubid=1,id=n"),
        (("-netdev", "tap,id=n,script=/bin/sh"), "hubport,hubid=1,id=n"),
        (("-chardev", "file,id=c,path=/etc/passwd"), "null,id=c"),
        (("-vnc", "0.0.0.0:0"), "none"),
        (("-fsdev", "local,id=f,path=/"), "synth,id=f"),
        (("-icount", "rr=record,rrfile=/etc/passwd,shift=1"), "shift=1"),
        (("-machine", "q35,dumpdtb=/etc/passwd,usb=off"), "q35,usb=off"),
        (
            ("-blockdev", "driver=raw,node-name=b,file.driver=file,file.filename=/no"),
            '{"node-name":"b","driver":"null-co","size":524288,"read-zeroes":true}',
        ),
        (("-audiodev", '{"id":"a","driver":"alsa"}'), "none,id=a"),
        (("-object", "rng-random,id=r,filename=/dev/random"), "rng-builtin,id=r"),
        (
            ("-object", '{"qom-type":"memory-backend-file","id":"m","mem-path":"/x","size":4}'),
            "memory-backend-file,id=m,size=4,mem-path=/dev/zero",
        ),
        (("-chardev", '{"id":"c,backend=file","backend":"null"}'), "null,id=c,,backend=file"),
        (
            ("-object", '{"qom-type":"rng-builtin","id":"r,qom-type=secret"}'),
            "rng-builtin,id=r,,qom-type=secret",
        ),
        (("-icount", "{,rr=record,rrfile=/etc/passwd"), "{"),
        (("-drive", "file=/etc/passwd,if=none,id=d"), "driver=null-co,size=524288,if=none,id=d"),
        (
            ("-blockdev", '{"driver":"file","filename":"/no","node-name":"b"}'),
            '{"node-name":"b","driver":"null-co","size":524288,"read-zeroes":true}',
        ),
    ],
)
def test_what_opens_something_is_replaced_under_its_name(words: tuple[str, str], made: str) -> None:
    assert kept(*words) == [words[0], made]


@pytest.mark.parametrize(("arch", "size"), [(b"aarch64", 64 << 20), (b"x86_64", 512 << 10)])
def test_variables_that_are_not_there_yet_have_the_size_that_the_machine_takes(
    arch: bytes, size: int
) -> None:
    block = '{"driver":"file","filename":"/no","node-name":"libvirt-pflash1-storage"}'
    (_, made) = kept("-blockdev", block, inside=b"<os><type arch='%s'>hvm</type></os>" % arch)
    assert f'"size":{size}' in made


OWN = "<qemu:commandline>%s</qemu:commandline>"


@pytest.mark.parametrize(
    ("words", "made", "unasked"),
    [
        (("-device", "e1000,romfile=/no"), [], ["-device e1000,romfile=/no"]),
        (("-device", "e1000,autonegotiation,,romfile=/no"), [], 1),
        (("-device", "loader,file=/no"), [], 1),
        (("-global", "e1000.romfile=/no"), [], ["-global e1000.romfile=/no"]),
        (("-global", "e1000.mitigation=off"), ["-global", "e1000.mitigation=off"], []),
        (("-object", "filter-dump,id=f,file=/no"), [], 1),
        (("-set", "device.d.mitigation=off"), ["-set", "device.d.mitigation=off"], []),
        (("-set", "device.d.driver=loader"), [], 1),
        (("-set", "device.d.romfile=/no"), [], 1),
        (("-set", "chardev.c.path=/no"), [], ["-set chardev.c.path=/no"]),
        (("-device", "vfio-pci,id=d", "-set", "device.d.x=1"), [], 2),
    ],
)
def test_an_argument_of_the_documents_own_is_tried_or_said_to_be_left_out(
    words: tuple[str, ...], made: list[str], unasked: list[str] | int
) -> None:
    own = "".join(f"<qemu:arg value='{word}'/>" for word in words)
    document = open_domain(DOCUMENT % (OWN % own).encode(), "vm.xml")
    found = Rehearsed(document, QemuUser(64000, "qemu", frozenset()), list(words))
    assert found.kept == made
    assert found.unasked == unasked or len(found.unasked) == unasked


def test_what_libvirt_gives_of_the_hosts_is_not_said_to_be_left_out() -> None:
    document = open_domain(DOCUMENT % b"", "vm.xml")
    words = ["-device", '{"driver":"vfio-pci","host":"0000:18:00.0","id":"hostdev0"}']
    assert Rehearsed(document, QemuUser(64000, "qemu", frozenset()), words).unasked == []


def test_the_address_space_has_room_for_the_guest_and_is_bounded() -> None:
    document = open_domain(DOCUMENT % b"", "vm.xml")
    user = QemuUser(64000, "qemu", frozenset())
    cell = f'{{"qom-type":"memory-backend-ram","id":"c","size":{1 << 40}}}'
    small = Rehearsed(document, user, ["-m", "256", "-smp", "2"]).address_bytes()
    large = Rehearsed(document, user, ["-m", "size=256k", "-object", cell]).address_bytes()
    assert 1 << 31 < small < 1 << 33
    assert 1 << 40 < large < (1 << 40) + (1 << 33)
    assert Rehearsed(document, user, ["-m", "x"]).address_bytes() < small
    video = '{"driver":"qxl-vga","id":"video0","vram64_size_mb":16384}'
    assert Rehearsed(document, user, ["-device", video]).address_bytes() > 1 << 34


def test_no_word_is_an_image_to_qemu() -> None:
    assert kept("-nodefaults", "nbd:127.0.0.1:1") == ["-nodefaults"]


def test_a_driver_is_a_name_where_qemu_is_asked_for_it() -> None:
    machine = StartMachine("qemu:///system", open_domain(DOCUMENT % b"", "vm.xml"))
    machine.__dict__["emulator"] = "/no/emulator"
    need = Need(subject="vda", kind="DRIVER", value="nbd,server.host=127.0.0.1")
    assert ASKED_OF_LIBVIRT[need.kind](machine, need).state is NeedState.UNKNOWN


def test_a_data_file_that_is_named_beyond_the_head_is_a_fault() -> None:
    backed = struct.pack(">4sIQI", b"QFI\xfb", 3, 112, 0)
    rest = struct.pack(">IQIIQQIIQQQQII", 16, 0, 0, 1, 0, 0, 1, 0, 0, 4, 0, 0, 4, 112)
    beyond = struct.pack(">II8s", 0x44415441, 8, b"/no/file") + bytes(8)
    assert read_head((backed + rest).ljust(112, b"\0") + beyond, "qcow2").fault is not None


def test_a_device_of_what_was_left_out_is_left_out_and_a_machine_of_it_is_not_asked() -> None:
    sgx = ("-object", '{"qom-type":"memory-backend-epc","id":"e","size":4}')
    assert kept(*sgx, "-device", '{"driver":"x","memdev":"e"}') == []
    document = open_domain(DOCUMENT % b"", "vm.xml")
    words = [*sgx, "-machine", "q35,sgx-epc.0.memdev=e"]
    assert Rehearsed(document, QemuUser(64000, "qemu", frozenset()), words).is_confidential


def test_an_override_is_in_the_device_as_libvirt_puts_it_there() -> None:
    device = '{"driver":"virtio-net-pci","id":"net0","mac":"52:54:00:00:00:01"}'
    found = kept("-device", device, inside=OVERRIDE)
    assert found == ["-device", '{"driver":"virtio-net-pci","id":"net0","x":7}']


def test_only_what_qemus_user_can_read_is_given_to_it(tmp_path: Path) -> None:
    own = tmp_path / "table"
    own.write_bytes(bytes(36))
    own.chmod(0o600)
    assert kept("-acpitable", f"file={own}") == []


def test_what_qemu_argv_leaves_out_of_a_network_card_is_tried() -> None:
    nic = (
        b"<devices><interface type='hostdev'/><interface type='bridge'><model type='virtio'/>"
        b"<driver rx_queue_size='512'/><acpi index='5'/><mtu size='9000'/></interface></devices>"
    )
    device = '{"driver":"virtio-net-pci","id":"net0"}'
    (_, made) = kept("-device", device, inside=nic)
    assert '"acpi-index":5,"rx_queue_size":512,"host_mtu":9000' in made
    plain = nic.replace(b"virtio", b"e1000")
    assert kept("-device", device, inside=plain)[1].endswith('"acpi-index":5}')
