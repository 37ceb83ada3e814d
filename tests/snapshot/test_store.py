"""Stored snapshots, and a host as mappings: directories, links, loops."""

import bz2
import gzip
import io
import lzma
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from homenode.errors import InputError
from homenode.machine.snapshot import archive
from homenode.machine.snapshot.protocol import MemorySnapshot, Snapshot
from homenode.machine.snapshot.store import open_snapshot
from tests.seeds import part
from tests.shared_data import SHARED
from tests.tree_writer import write_tree

FILES = {
    "sys/devices/system/node/online": "0-1\n",
    "sys/devices/system/node/node0/distance": "10 21\n",
    "sys/devices/pci0000:00/0000:00:01.0/numa_node": "1\n",
    "proc/cmdline": "quiet\n",
}
LINKS = {"sys/bus/pci/devices/0000:00:01.0": "../../../devices/pci0000:00/0000:00:01.0"}


def _member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type = kind
    member.linkname = target
    return member


def _tar(
    files: dict[str, str],
    links: dict[str, str] | None = None,
    extra: tuple[tarfile.TarInfo, ...] = (),
) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, text in files.items():
            member = _member(name)
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
        for name, target in (links or {}).items():
            tar.addfile(_member(name, tarfile.SYMTYPE, target))
        for member in extra:
            tar.addfile(member)
    return buffer.getvalue()


def _write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _directory(top: Path, prefix: str = "") -> Path:
    files, links = (
        {f"/{prefix}/{name}".replace("//", "/"): text for name, text in some.items()}
        for some in (FILES, LINKS)
    )
    write_tree(MemorySnapshot("host", files, links), top)
    return top


def _check(source: Path) -> None:
    host = open_snapshot(source)
    assert host.read_text("/sys/devices/system/node/online") == "0-1\n"
    assert host.read_text("/sys/bus/pci/devices/0000:00:01.0/numa_node") == "1\n"
    assert host.real_path("/sys/bus/pci/devices/0000:00:01.0") == (
        "/sys/devices/pci0000:00/0000:00:01.0"
    )
    assert host.list("/sys/devices/system/node") == ("node0", "online")
    assert host.list("/sys/devices/system/node/online") is None
    assert host.read_text("/sys/devices") is None
    assert host.read_link("/sys/bus/pci/devices/0000:00:01.0") == next(iter(LINKS.values()))


@pytest.mark.parametrize("prefix", ["", "machine", "sysfs/machine", "./"])
@pytest.mark.parametrize(
    "pack", [bytes, gzip.compress, bz2.compress, lzma.compress], ids=["tar", "gz", "bz2", "xz"]
)
def test_an_archive_is_recognised_by_content_and_its_top_found(
    tmp_path: Path, prefix: str, pack: Callable[[bytes], bytes]
) -> None:
    files = {f"{prefix}/{name}".lstrip("/"): text for name, text in FILES.items()}
    links = {f"{prefix}/{name}".lstrip("/"): target for name, target in LINKS.items()}
    _check(_write(tmp_path / "any name", pack(_tar(files, links))))


@pytest.mark.parametrize("prefix", ["", "machine", "sysfs/machine"])
def test_a_directory_is_read_in_place(tmp_path: Path, prefix: str) -> None:
    _check(_directory(tmp_path, prefix))


def test_the_directory_may_be_sys_itself_or_its_content(tmp_path: Path) -> None:
    _check(_directory(tmp_path) / "sys")
    (tmp_path / "sys").rename(tmp_path / "tree")
    _check(tmp_path / "tree")
    inner = {name.removeprefix("sys/"): text for name, text in FILES.items() if "sys" in name}
    links = {name.removeprefix("sys/"): target for name, target in LINKS.items()}
    _check(_write(tmp_path / "content.tar", _tar(inner, links)))


def test_several_machines_are_listed_and_one_can_be_named(tmp_path: Path) -> None:
    files = {f"all/{m}/{name}": text for m in ("desktop", "server") for name, text in FILES.items()}
    links = {f"all/{m}/{n}": target for m in ("desktop", "server") for n, target in LINKS.items()}
    source = _write(tmp_path / "two.tar", _tar(files, links))
    with pytest.raises(InputError, match=r"found 2: all/desktop, all/server\n.*two.tar#desktop"):
        open_snapshot(source)
    _check(Path(f"{source}#server"))
    _check(Path(f"{source}#all/server"))
    with pytest.raises(InputError, match="named 'laptop'"):
        open_snapshot(Path(f"{source}#laptop"))
    directory = tmp_path / "directory"
    _directory(directory, "desktop")
    _directory(directory, "server")
    with pytest.raises(InputError, match="found 2: desktop, server"):
        open_snapshot(directory)
    _check(Path(f"{directory}#server"))


def test_a_file_with_a_hash_in_its_name_opens(tmp_path: Path) -> None:
    _check(_write(tmp_path / "host#1.tar", _tar(FILES, LINKS)))


def test_commands_of_a_capture_are_read(tmp_path: Path) -> None:
    files = {f"snapshot/{name}": text for name, text in FILES.items()}
    files["snapshot/commands/lspci"] = "00:00.0 Host bridge\n"
    host = open_snapshot(_write(tmp_path / "capture.tar", _tar(files)))
    assert host.command_output("lspci") == "00:00.0 Host bridge\n"
    assert host.command_output("nvidia-smi-topo") is None


def test_a_link_never_leads_out_of_a_directory(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    top = _directory(tmp_path / "host")
    (top / "sys/absolute").symlink_to(secret)
    (top / "sys/upwards").symlink_to("../../secret")
    (top / "sys/directory").symlink_to(tmp_path)
    (top / "sys/loop").symlink_to("loop")
    host = open_snapshot(top)
    for path in "/sys/absolute /sys/upwards /sys/directory/secret /sys/loop /../secret".split():
        assert host.read_text(path) is None
    assert host.list("/sys/directory") is None


def test_a_fifo_in_a_directory_is_not_waited_for(tmp_path: Path) -> None:
    top = _directory(tmp_path)
    os.mkfifo(top / "sys/fifo")
    assert open_snapshot(top).read_text("/sys/fifo") is None


def test_devices_in_an_archive_are_skipped(tmp_path: Path) -> None:
    extra = tuple(
        _member(f"sys/special{i}", kind)
        for i, kind in enumerate((tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE))
    )
    host = open_snapshot(_write(tmp_path / "host.tar", _tar(FILES, LINKS, extra)))
    assert host.list("/sys") == ("bus", "devices")


def test_hard_links_share_the_text_of_an_earlier_member(tmp_path: Path) -> None:
    linked = _member("sys/again", tarfile.LNKTYPE, "sys/devices/system/node/online")
    host = open_snapshot(_write(tmp_path / "host.tar", _tar(FILES, {}, (linked,))))
    assert host.read_text("/sys/again") == "0-1\n"
    dangling = _member("sys/again", tarfile.LNKTYPE, "sys/nothing")
    with pytest.raises(InputError, match="hard link 'sys/again'"):
        open_snapshot(_write(tmp_path / "host.tar", _tar(FILES, {}, (dangling,))))


def test_names_that_lead_out_of_an_archive_are_refused(tmp_path: Path) -> None:
    source = _write(tmp_path / "host.tar", _tar({**FILES, "sys/../../etc/passwd": "x"}))
    with pytest.raises(InputError, match="names inside the archive"):
        open_snapshot(source)


def test_absolute_names_count_from_the_archives_top(tmp_path: Path) -> None:
    files = {f"/{name}": text for name, text in FILES.items()}
    _check(_write(tmp_path / "host.tar", _tar(files, LINKS)))


@pytest.mark.parametrize(
    ("limit", "value", "says"),
    [
        ("MAX_MEMBERS", 3, "at most 3 members"),
        ("MAX_FILE_BYTES", 4, "files of at most 4 bytes"),
        ("MAX_TOTAL_BYTES", 1024, "at most 1024 bytes of names and texts"),
        ("MAX_UNPACKED_BYTES", 4096, "at most 4096 bytes unpacked"),
        ("MAX_DEPTH", 3, "paths of at most 3 parts"),
        ("MAX_PATH_CHARS", 20, "names of at most 20 characters"),
    ],
)
def test_an_archive_beyond_a_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, says: str
) -> None:
    monkeypatch.setattr(archive, limit, value)
    source = _write(tmp_path / "host.tar.gz", gzip.compress(_tar(FILES, LINKS)))
    with pytest.raises(InputError, match=says):
        open_snapshot(source)


@pytest.mark.parametrize(
    "pack", [bytes, gzip.compress, bz2.compress, lzma.compress], ids=["tar", "gz", "bz2", "xz"]
)
def test_every_truncation_is_noticed(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    whole = pack(_tar(FILES, LINKS))
    end = len(whole) if pack is not bytes else len(whole.rstrip(b"\0")) + 512
    for length in sorted({*range(0, end - 1, max(1, end // 60)), 512, 1024, 1536}):
        if length < end:
            source = _write(tmp_path / "cut", whole[:length])
            with pytest.raises(InputError, match="expected"):
                open_snapshot(source)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "expected a tar"),
        (b"hello\n" * 500, "another kind of file"),
        (b"PK\x03\x04" + bytes(100), "found zip"),
        (b"\x28\xb5\x2f\xfd" + bytes(100), "found zstd"),
        (b"\x1f\x8b" + bytes(100), "expected a"),
        (_tar({"readme": "no host"}), "no sys/devices"),
    ],
)
def test_foreign_files_are_refused_with_what_was_found(
    tmp_path: Path, content: bytes, says: str
) -> None:
    with pytest.raises(InputError, match=says):
        open_snapshot(_write(tmp_path / "foreign", content))


def test_nothing_there_and_an_empty_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        open_snapshot(tmp_path / "missing.tar")
    with pytest.raises(InputError, match="no sys/devices"):
        open_snapshot(tmp_path)


def test_published_trees_open() -> None:
    directory = SHARED / "machines" / "sysfs"
    if not directory.is_dir():
        pytest.skip(f"{directory} is not there")
    with pytest.raises(InputError, match=r"found 3: .*4-socket.*desktop.*server"):
        open_snapshot(directory / "nri-topology-aware-sysfs.tar.bz2")
    for path in part(sorted(directory.iterdir()), 0, every=6):
        if "nri" not in path.name:
            host = open_snapshot(path)
            assert isinstance(host, MemorySnapshot)
            assert host.read_text("/sys/devices/system/cpu/online")


def _host(files: dict[str, str], links: dict[str, str]) -> Snapshot:
    return MemorySnapshot("test", files, links)


def test_directories_are_implied_and_listed_sorted() -> None:
    host = _host({"/sys/b/x": "1", "/sys/a/y": "2"}, {"/sys/c": "a"})
    assert host.list("/sys") == ("a", "b", "c")
    assert host.list("/") == ("sys",)
    assert host.list("/sys/c") == ("y",)
    assert host.list("/sys/b/x") is None


def test_empty_directories_are_there() -> None:
    host = MemorySnapshot(
        "test", {}, directories=("/sys/devices/empty", "/sys/devices/empty/deeper")
    )
    assert host.list("/sys/devices") == ("empty",)
    assert host.list("/sys/devices/empty/deeper") == ()


def test_links_in_the_middle_of_a_path_are_followed() -> None:
    host = _host(
        {"/sys/devices/pci0000:00/0000:00:01.0/class": "0x060400"},
        {
            "/sys/bus/pci/devices/0000:00:01.0": "../../../devices/pci0000:00/0000:00:01.0",
            "/sys/class/all": "/sys/bus/pci",
        },
    )
    path = "/sys/class/all/devices/0000:00:01.0"
    assert host.read_text(f"{path}/class") == "0x060400"
    assert host.real_path(path) == "/sys/devices/pci0000:00/0000:00:01.0"
    assert host.read_link("/sys/class/all/devices/0000:00:01.0") is not None
    assert host.read_link(f"{path}/class") is None


def test_a_link_to_nothing_can_be_read_as_a_link_only() -> None:
    host = _host({}, {"/sys/devices/x/driver": "../../bus/pci/drivers/vfio-pci"})
    assert host.read_link("/sys/devices/x/driver") == "../../bus/pci/drivers/vfio-pci"
    assert host.real_path("/sys/devices/x/driver") is None
    assert host.read_text("/sys/devices/x/driver") is None


def test_a_link_cannot_leave_the_top() -> None:
    host = _host({"/etc/shadow": "inside"}, {"/sys/out": "../../../../etc/shadow"})
    assert host.read_text("/sys/out") == "inside"
    assert host.real_path("/sys/out") == "/etc/shadow"


def test_link_loops_end() -> None:
    host = _host({}, {"/a": "/b", "/b": "/a", "/c": "c/c", "/d": "d"})
    for path in ("/a", "/b", "/c/x", "/d", "/d/d/d"):
        assert host.real_path(path) is None
        assert host.read_text(path) is None


def test_links_that_double_at_each_step_cost_nothing() -> None:
    links = {f"/l{i}": f"/l{i + 1}/../l{i + 1}" for i in range(39)}
    # 2^39 steps if each link were followed again: this test would then not end.
    assert _host({"/l39/x": ""}, links).real_path("/l0/x") is None


def test_a_hundred_thousand_paths_are_listed() -> None:
    files = {f"/sys/devices/system/node/node{i % 8}/memory{i}/state": "" for i in range(100_000)}
    names = _host(files, {}).list("/sys/devices/system/node/node3")
    assert names is not None and len(names) == 12_500


def test_bytes_that_are_no_text_survive() -> None:
    config = bytes(range(256))
    host = _host({"/config": config.decode("utf-8", "surrogateescape")}, {})
    text = host.read_text("/config")
    assert text is not None and text.encode("utf-8", "surrogateescape") == config
