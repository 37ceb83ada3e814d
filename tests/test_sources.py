"""Whatever a user names becomes a host by what it holds, and what gives none is named."""

import io
import sys
import tarfile
from pathlib import Path

import pytest

from homenode.errors import HomenodeError, InputError, NotKnownError, UsageError
from homenode.formats import encode
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import summarise
from homenode.safe.input_files import read_subject
from homenode.vm.host_sources import NamedHost, read_hosts
from homenode.vm.sources import load_host
from tests.processes import run_text
from tests.sysfs_trees import cpu_files, snapshot
from tests.tools.test_hwloc_xml import TWO_NODES, _document
from tests.tools.test_lspci import HGX, SMALL, needs_hgx
from tests.tree_writer import write_tree


def _write_tar(path: Path, mode: str) -> None:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, text in cpu_files().items():
            member = tarfile.TarInfo(name.lstrip("/"))
            data = text.encode()
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def test_this_machine_is_the_default() -> None:
    assert summarise(load_host(None)).pus >= 1


def test_a_directory_and_a_tar_of_the_same_tree_are_the_same_host(tmp_path: Path) -> None:
    write_tree(snapshot(cpu_files()), tmp_path / "tree")
    _write_tar(tmp_path / "tree.txt", "w:xz")
    _write_tar(tmp_path / "plain", "w")
    hosts = [load_host(str(tmp_path / name)) for name in ("tree", "tree.txt", "plain")]
    assert [summarise(host).cores for host in hosts] == [4, 4, 4]
    assert hosts[0].pus == hosts[1].pus == hosts[2].pus


@pytest.mark.parametrize("name", ["host.toml", "host.xml", "host"])
def test_content_decides_what_a_file_is(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(_document(TWO_NODES))
    assert summarise(load_host(str(path))).packages == 2
    path.write_text(SMALL)
    assert summarise(load_host(str(path))).gpus == 1
    path.write_text(encode("host", load_host(str(path))))
    assert summarise(load_host(str(path))).gpus == 1


def test_a_description_is_rendered_and_discovered(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text(HOST.read_text())
    assert summarise(load_host(str(tmp_path / "mine"))).cores == 8


def test_a_listing_lies_over_any_host(tmp_path: Path) -> None:
    listing = tmp_path / "lspci.txt"
    listing.write_text(SMALL)
    counts = summarise(load_host("xapi-2n16c2t", lspci=listing))
    assert (counts.cores, counts.gpus) == (32, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"just some words\n", "another text"),
        (b"\x7fELF\x00\x00", "binary data of no known kind"),
        (b"<domain/>", "expected a host, found the domain"),
        (b"<nvidia_smi_log/>", "expected a host, found XML but not hwloc's"),
        (b'{"format": "homenode.plan/1"}', "expected a homenode.host document"),
        (b"\x1f\x8bgarbage", "garbage"),
        (b"host   : a\nnr_nodes  : 2\nxen_version  : 4.17\n", "xl info without -n"),
        (b"cores: 2\nmemory: 1024\nname: b\n", "found a VM of proxmox"),
        (b"Architecture:      x86_64\nCPU(s):    8\n", "lscpu without -e"),
    ],
)
def test_what_is_no_host_says_what_is_expected(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "garbage"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message) as error:
        load_host(str(path))
    assert error.value.exit_code == 2


@pytest.mark.parametrize("content", [b"", b" \n\n", b"\xef\xbb\xbf"])
def test_of_an_empty_file_nothing_is_known(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "empty").write_bytes(content)
    with pytest.raises(NotKnownError, match="found an empty file"):
        load_host(str(tmp_path / "empty"))


def test_an_empty_vm_file_is_named_as_empty(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(NotKnownError, match="nothing was checked: the file is empty"):
        read_subject(tmp_path / "empty", "a VM")


@pytest.mark.parametrize("source", ["", "x" * 5000, "a\0b", "a.toml"])
def test_names_that_no_file_can_have_are_refused(source: str) -> None:
    with pytest.raises(HomenodeError) as error:
        load_host(source)
    assert error.value.exit_code == 2


def test_a_listing_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere: no such file"):
        load_host("xapi-2n16c2t", lspci=tmp_path / "nowhere")


@needs_hgx
def test_the_hgx_listing_over_a_two_package_description_is_the_whole_machine() -> None:
    host = load_host("xeon-2p-cpus", lspci=HGX)
    counts = summarise(host)
    assert (counts.packages, counts.cores, counts.gpus, counts.pci_functions) == (2, 112, 8, 517)
    near = {device.local_pus for device in host.devices_of_kind(DeviceKind.GPU)}
    assert near == {node.pus for node in host.nodes}


@pytest.mark.parametrize("name", ["hgx-h100", "gh200x4", "x86-2p2n8c16t-offline-pus"])
def test_a_stored_host_is_the_host_that_was_stored(tmp_path: Path, name: str) -> None:
    host = load_host(name)
    path = tmp_path / "stored"
    path.write_text(encode("host", host))
    assert load_host(str(path)) == host


@pytest.mark.parametrize("start", ["<topology>", '{"format": "homenode.host/1", "x": ['])
def test_a_host_in_xml_or_json_that_would_take_a_gigabyte_is_refused(
    tmp_path: Path, start: str
) -> None:
    path = tmp_path / "host"
    path.write_text(start + " " * (8 << 20))
    with pytest.raises(InputError, match="at most 8388608 characters"):
        load_host(str(path))


def test_a_text_that_would_take_seconds_is_refused_by_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "host"
    for more, expected in (
        ("\n" * 500_000, "at most 400000 lines"),
        ("\v\u2028" * 250_000, "at most 400000 lines"),
        (
            "".join(f"{256 + (n >> 8):04x}:{n & 255:02x}:00.0 VGA: a\n" for n in range(10_002)),
            "10000 func",
        ),
        ("a" * (16 << 20), "more than 16 MiB"),
    ):
        path.write_text(SMALL + more)
        with pytest.raises(InputError, match=expected):
            load_host(str(path))


HOST = Path(__file__).parents[1] / "src/homenode/machine/hosts/small-2n8c-2gpu.toml"


def test_a_host_times_a_number_is_so_many_hosts() -> None:
    hosts = read_hosts(["hgx-h100*12"]).hosts
    names = [one.name for one in hosts]
    assert (len(hosts), names[1], names[-1]) == (12, "hgx-h100-2", "hgx-h100-12")
    assert all(one.host.name == one.name for one in hosts)


def test_a_directory_has_a_host_for_each_file_and_names_those_that_are_broken(
    tmp_path: Path,
) -> None:
    for name in ("gpu-10.toml", "gpu-2.toml"):
        (tmp_path / name).write_text(HOST.read_text())
    (tmp_path / "broken.tar.gz").write_bytes(b"\x1f\x8bnothing")
    (tmp_path / "empty.toml").write_bytes(b"")
    read = read_hosts([str(tmp_path)])
    assert [one.name for one in read.hosts] == ["gpu-2", "gpu-10"]
    assert {Path(one.subject).name for one in read.unread} == {"broken.tar.gz", "empty.toml"}
    assert all(Path(one.subject).name not in one.reason for one in read.unread)


THREADS = """
import sys
from threading import Barrier, Thread
from homenode.machine.description.tables import HostDocument, decode_value

VALUE = {"name": "one", "node": [{"index": 0}], "root": [{"ports": [{"switch": ["gpu"]}]}]}
sys.setswitchinterval(1e-6)
start = Barrier(8)

def read():
    start.wait()
    decode_value(VALUE, HostDocument, "host.toml", "")

threads = [Thread(target=read) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_the_first_hosts_may_be_read_by_several_threads_at_once() -> None:
    """msgspec 0.22 without a lock: SIGSEGV, in each of 8 runs."""
    done = run_text([sys.executable, "-c", THREADS])
    assert (done.returncode, done.stderr) == (0, "")


def test_of_two_hosts_of_one_name_the_second_is_named_and_not_read(tmp_path: Path) -> None:
    read = read_hosts([str(HOST), "small-2n8c-2gpu"])
    assert len(read.hosts) == len(read.unread) == 1
    assert repr(read.hosts[0].name) in read.unread[0].reason


def test_a_pool_without_any_host_is_refused(tmp_path: Path) -> None:
    for source in ("nothere", str(tmp_path)):
        with pytest.raises(InputError):
            read_hosts([source])
    with pytest.raises(InputError) as refused:
        read_hosts(["hgx-h10*4"])
    assert "hgx-h100" in str(refused.value.hint)
    with pytest.raises(UsageError):
        read_hosts([])


@pytest.mark.parametrize("source", ["qemu+tcp://h/system", "xen:///", "hgx-h100*0", "nothere*3"])
def test_a_source_of_no_known_kind_is_named(source: str) -> None:
    read = read_hosts([source, "small-2n8c-2gpu"])
    assert [one.subject for one in read.unread] == [source]
    assert len(read.hosts) == 1


@pytest.mark.parametrize(
    ("source", "uri"),
    [
        ("qemu+ssh://root@gpu-1/system", "qemu+ssh://root@gpu-1/system"),
        ("captures/gpu-1.tar.gz", "qemu+ssh://name/system"),
        ("hgx-h100*3", "qemu+ssh://name/system"),
    ],
)
def test_virsh_reaches_a_host_as_it_was_read(source: str, uri: str) -> None:
    host = NamedHost(name="name", source=source, host=load_host("small-2n8c-2gpu"))
    assert host.libvirt_uri == uri
