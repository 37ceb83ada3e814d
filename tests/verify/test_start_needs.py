"""What a VM needs of its machine, read from its document, and the heads of disk images."""

import os
import struct
from pathlib import Path

import pytest

from homenode.check.start.images import ImageHead, chain_of, read_head
from homenode.check.start.machine import StartMachine
from homenode.check.start.needs import TABLE, Need, needs_of
from homenode.check.start.qemu_user import QemuUser
from homenode.check.start.rehearsal import lacks_driver
from homenode.check.start.start_check import check_start
from homenode.errors import ToolError
from homenode.host_files import HostFile
from homenode.vm.domain.read import open_domain
from tests.verify_documents import PLAIN

DOMAIN = "<domain type='qemu'><name>a</name><os>{os}</os><devices>{devices}</devices></domain>"


def needs(devices: str = "", os: str = "<type>hvm</type>") -> list[tuple[str, str, str]]:
    text = DOMAIN.format(os=os, devices=devices)
    found = needs_of(open_domain(text.encode(), "vm.xml"))
    always = ("EMULATOR", "NAME")
    return [(need.kind, need.value, need.detail) for need in found if need.kind not in always]


FILE = "<disk type='file'><source file='/a.img'{more}/>{below}<target dev='vda'/></disk>"


def test_a_disk_is_an_image_in_its_format_and_an_optional_one_is_no_need() -> None:
    assert needs(FILE.format(more="", below="")) == [("IMAGE", "/a.img", "raw")]
    assert needs(FILE.format(more=" startupPolicy='optional'", below="")) == []
    below = "<backingStore type='file'><format type='qcow2'/><source file='/b.img'/></backingStore>"
    assert needs(FILE.format(more="", below=below)) == [
        ("IMAGE", "/a.img", "raw"),
        ("IMAGE", "/b.img", "qcow2"),
    ]


def test_a_socket_that_libvirt_binds_needs_its_folder_and_one_that_it_joins_itself() -> None:
    serial = "<serial type='unix'><source mode='{mode}' path='/run/x/s'/></serial>"
    assert needs(serial.format(mode="bind")) == [("BOUND", "/run/x/s", "")]
    assert needs(serial.format(mode="connect")) == [("SOCKET", "/run/x/s", "")]


def test_variables_of_firmware_need_a_template_only_where_their_file_is_not_there() -> None:
    loader = "<type>hvm</type><loader type='pflash'>/code</loader><nvram{at}>{file}</nvram>"
    assert needs(os=loader.format(at=" template='/vars'", file="/own")) == [
        ("FILE", "/code", ""),
        ("PARENT", "/own", "on"),
        ("FILE", "/vars", "/own"),
    ]
    assert ("VARIABLES", "/code", "/own") in needs(os=loader.format(at="", file="/own"))


def test_a_server_on_another_machine_is_not_asked() -> None:
    disk = (
        "<disk type='network'><source protocol='nbd'><host name='{name}' port='10809'/></source>"
        "<target dev='vda'/></disk>"
    )
    driver = ("DRIVER", "nbd", "")
    elsewhere = ("LISTENER", "10809", "10.0.0.7")
    assert needs(disk.format(name="10.0.0.7")) == [driver, elsewhere]
    here = ("LISTENER", "10809", "localhost")
    assert needs(disk.format(name="localhost")) == [driver, here]


def test_without_libvirt_what_is_not_there_is_named_and_the_rest_is_not_known(
    tmp_path: Path,
) -> None:
    """Three answers: a disk that is missing, one that is there, and a network of no known state."""
    here = tmp_path / "there.img"
    here.write_bytes(bytes(512))
    devices = "".join(
        FILE.format(more="", below="").replace("/a.img", path).replace("vda", name)
        for path, name in ((str(here), "vda"), (str(tmp_path / "gone.img"), "vdb"))
    )
    devices += "<interface type='network'><source network='lan'/></interface>"
    text = DOMAIN.format(os="<type>hvm</type>", devices=devices)
    nowhere = f"qemu+unix:///system?socket={tmp_path}/none"
    found = check_start(open_domain(text.encode(), "vm.xml"), nowhere).findings
    missing = [(one.id, one.subject) for one in found if one.is_bad]
    assert missing == [("start-file", "disk vdb")]
    assert {one.id for one in found if not one.is_bad} == {"start-unknown"}
    assert any("lan" in one.observed for one in found)


@pytest.mark.parametrize("address", [None, "0xff"])
def test_libvirt_is_not_asked_to_take_a_vm_whose_pci_function_is_not_there(
    address: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing function with a VLAN ends libvirtd 9.0. Without that function libvirt is asked."""
    virsh, log = tmp_path / "virsh", tmp_path / "log"
    virsh.write_text(f'#!/bin/sh\necho "$*" >>{log}\necho failed to connect >&2; exit 1\n')
    virsh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    nic = (
        f"<interface type='hostdev'><source><address type='pci' domain='0xffff' bus='{address}' "
        "slot='0x1f' function='7'/></source><vlan><tag id='42'/></vlan></interface>"
    )
    text = DOMAIN.format(os="<type>hvm</type>", devices="" if address is None else nic)
    found = check_start(open_domain(text.encode(), "vm.xml"), "qemu:///system").findings
    assert ("start-device" in {one.id for one in found}) is (address is not None)
    assert ("domxml-to-native" in log.read_text()) is (address is None)


def qcow2(
    backing: bytes = b"", *, version: int = 3, features: int = 0, named: bytes = b""
) -> bytes:
    head = struct.pack(
        ">4sIQIIQIIQQIIQ",
        b"QFI\xfb",
        version,
        512 if backing else 0,
        len(backing),
        16,
        1 << 20,
        0,
        1,
        0,
        0,
        1,
        0,
        0,
    )
    head = head[:72] + struct.pack(">QQQII", features, 0, 0, 4, 104)
    if named:
        head += struct.pack(">II", 0xE2792ACA, len(named)) + named.ljust(8, b"\0")
    return head.ljust(512, b"\0") + backing.ljust(512, b"\0")


def test_the_head_of_a_qcow2_names_what_lies_below() -> None:
    head = read_head(qcow2(b"/below.img", named=b"qcow2"), "qcow2")
    assert (head.fault, head.backing, head.backing_format) == (None, "/below.img", "qcow2")
    assert read_head(qcow2(), "qcow2").backing is None


@pytest.mark.parametrize(
    "content",
    [b"", b"QFI\xfb", bytes(512)],
)
def test_what_is_no_image_of_its_format_has_a_fault(content: bytes) -> None:
    assert read_head(content, "qcow2").fault


@pytest.mark.parametrize("cut", range(0, 120, 3))
def test_a_head_that_is_cut_anywhere_is_read_without_an_error(cut: int) -> None:
    read_head(qcow2(b"/below.img", named=b"qcow2")[:cut], "qcow2")


def test_a_chain_ends_with_what_is_missing_or_below_itself(tmp_path: Path) -> None:
    names = [str(tmp_path / f"{number}.qcow2") for number in range(3)]
    for name, below in zip(names, [*names[1:], str(tmp_path / "none")], strict=True):
        Path(name).write_bytes(qcow2(below.encode(), named=b"qcow2"))
    assert "none is not there" in (chain_of(names[0], "qcow2", is_followed=True).fault or "")
    assert chain_of(names[0], "qcow2", is_followed=False).fault is None
    written = b'json:{"driver":"raw","file":{"driver":"file","filename":"%s"}}' % names[2].encode()
    Path(names[1]).write_bytes(qcow2(written, named=b"qcow2"))
    assert "none is not there" in (chain_of(names[1], "qcow2", is_followed=True).fault or "")
    Path(names[2]).write_bytes(qcow2(names[0].encode(), named=b"qcow2"))
    assert "over itself" in (chain_of(names[0], "qcow2", is_followed=True).fault or "")
    Path(names[2]).write_bytes(qcow2())
    assert chain_of(names[0], "qcow2", is_followed=True).files == tuple(names[1:])
    Path(names[0]).write_bytes(qcow2(names[1].encode()))
    assert "format" in (chain_of(names[0], "qcow2", is_followed=True).fault or "")


def test_a_chain_is_followed_where_qemu_does_not_answer_and_what_it_would_say_is_not_known(
    tmp_path: Path,
) -> None:
    top, below = tmp_path / "top.qcow2", tmp_path / "below.qcow2"
    top.write_bytes(qcow2(str(below).encode(), named=b"qcow2"))
    below.write_bytes(qcow2())

    def no_answer(file: HostFile, format: str, head: ImageHead) -> str | None:
        raise ToolError("no time is left")

    found = chain_of(str(top), "qcow2", no_answer, is_followed=True)
    assert (found.fault, found.unknown, found.files) == (None, "no time is left", (str(below),))
    below.unlink()
    assert "is not there" in (chain_of(str(top), "qcow2", no_answer, is_followed=True).fault or "")


def test_all_that_qemu_is_asked_without_a_machine_shares_one_limit() -> None:
    document = open_domain(b"<domain type='qemu'><name>v</name></domain>", "vm.xml")
    machine = StartMachine("qemu:///system", document)
    machine.__dict__.update(idle_until_s=0.0, user=None, emulator="/bin/true")
    with pytest.raises(ToolError):
        lacks_driver(machine, "nbd")


@pytest.mark.parametrize(
    "given", ["<b>/tmp/emulator</b>", "/usr/bin/<b>x</b>", "/tmp/emulator", "/tmp/none/emulator"]
)
def test_libvirt_is_not_asked_about_an_emulator_that_others_can_change(given: str) -> None:
    """libvirt's path is the text of all elements inside, and it runs what is there by then."""
    text = DOMAIN.format(os="<type>hvm</type>", devices=f"<emulator>{given}</emulator>")
    machine = StartMachine("qemu:///system", open_domain(text.encode(), "vm.xml"))
    assert machine.barred is not None
    assert machine.domain_capabilities is None


def test_a_port_of_many_digits_is_no_number_that_is_computed_with() -> None:
    serial = "<serial type='tcp'><source mode='bind' service='{port}'/></serial>"
    devices = serial.format(port="9" * 5000) * 2
    text = DOMAIN.format(os="<type>hvm</type>", devices=devices)
    found = check_start(open_domain(text.encode(), "vm.xml"), "test:///default").findings
    assert "start-in-use" in {one.id for one in found}


def test_a_size_that_is_no_number_is_left_to_libvirt_to_refuse() -> None:
    shared = "<shmem name='m'><model type='ivshmem-plain'/><size unit='M'>{}</size></shmem>"
    assert needs(shared.format(4)) == [("SHARED", "m", str(4 << 20))]
    assert needs(shared.format("x")) == []


def test_every_kind_of_need_has_an_answer_and_a_known_finding() -> None:
    from homenode.catalogue import catalogue
    from homenode.check.start.start_check import ANSWERS

    assert set(ANSWERS) == set(TABLE.kinds)
    assert {one.finding for one in TABLE.kinds.values()} <= set(catalogue())
    rows = (*TABLE.rows, *TABLE.options)
    assert {row.kind for row in rows} <= set(TABLE.kinds)
    assert isinstance(needs_of(open_domain(PLAIN, "vm.xml"))[0], Need)


ACL = "system.posix_acl_access"


def acl(*entries: tuple[int, int, int]) -> bytes:
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


@pytest.mark.parametrize(
    ("user", "mask", "enters"),
    [
        ((0x02, 1, 64000), 7, True),
        ((0x02, 0, 64000), 7, False),
        ((0x02, 7, 64000), 4, False),
        ((0x02, 7, 64001), 7, False),
    ],
)
def test_an_access_control_list_says_whether_qemus_user_enters(
    user: tuple[int, int, int],
    mask: int,
    enters: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o700)
    no_one = 0xFFFFFFFF
    entries = ((0x01, 7, no_one), user, (0x04, 0, no_one), (0x10, mask, no_one), (0x20, 0, no_one))
    try:
        os.setxattr(folder, ACL, acl(*entries))
    except OSError:
        pytest.skip("this file system has no access control lists")
    above = QemuUser(64000, "qemu", frozenset())
    monkeypatch.setattr("homenode.check.start.qemu_user.on_the_way", lambda path: [folder])
    assert (above.barred(str(folder / "disk.img")) is None) == enters


@pytest.mark.parametrize("content", [b"KDMV", b"COWD", b"# Disk DescriptorFile\nversion=1"])
def test_each_form_of_a_vmdk_is_one(content: bytes) -> None:
    assert read_head(content, "vmdk").fault is None
