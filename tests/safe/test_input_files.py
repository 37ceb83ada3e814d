"""What is not a regular file is refused at once, by every reader, and nothing is read forever."""

import errno
import io
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from homenode.errors import HomenodeError, InputError
from homenode.measure.imported_files import find_directories
from homenode.measure.results.store import load_runs
from homenode.safe import input_files
from homenode.safe.input_files import (
    open_below,
    read_below,
    read_file,
    read_input,
    read_kernel_file,
    read_plain,
    read_start,
)
from homenode.safe.record_directory import LOCK, RecordDirectory
from homenode.vm.host_sources import read_hosts
from tests.command_line import NEEDS_CLUSTER, homenode

ROOT = Path(__file__).parent.parent.parent
HOST = ROOT / "src/homenode/machine/hosts/small-2n8c-2gpu.toml"
VM = ROOT / "demo/gpu-vm.xml"


@pytest.fixture(autouse=True)
def at_once() -> Iterator[None]:
    """A reader that waits fails, long before the suite would."""

    def waited(number: int, frame: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, waited)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def unix_socket(path: Path) -> Path:
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket has 108 letters
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)
    return path


def device(path: Path) -> Path:
    path.symlink_to("/dev/zero")
    return path


def directory(path: Path) -> Path:
    path.mkdir()
    return path


KINDS = (pipe, unix_socket, device, directory)
each_kind = pytest.mark.parametrize("make", KINDS, ids=lambda one: one.__name__)
Make = Callable[[Path], Path]


def was_opened(path: Path) -> bool:
    """Whether somebody has a pipe open for reading."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        assert error.errno == errno.ENXIO
        return False
    return True


@each_kind
def test_only_plain_files_are_opened(tmp_path: Path, make: Make) -> None:
    path = make(tmp_path / "x")
    for read in (read_plain, read_start):
        with pytest.raises(OSError, match="not a regular file"):
            read(path, 10)
    with pytest.raises(OSError, match="not a regular file"):
        read_below(tmp_path, "x", 10)
    with pytest.raises(InputError, match=r"cannot read a thing: a .*, not a regular file"):
        read_file(path, "a thing")
    assert read_kernel_file(str(path)) is None


def test_a_device_is_refused_without_being_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To open a watchdog starts it, to open a tape winds it."""
    opened = []
    open_ = os.open

    def watched(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if not flags & os.O_PATH:
            opened.append(path)
        return open_(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", watched)
    for read in (read_plain, read_start):
        with pytest.raises(OSError, match="a device, not a regular file"):
            read(device(tmp_path / read.__name__), 10)
    assert not opened


def test_what_is_read_is_counted_and_never_taken_from_its_size(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"a" * 100)
    assert read_plain(path, 100) == b"a" * 100
    with pytest.raises(OSError, match="more than 99 bytes") as caught:
        read_plain(path, 99)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    with pytest.raises(InputError, match="more than 1 KiB"):
        path.write_bytes(b"a" * 1025)
        read_file(path, "a thing", max_bytes=1024)
    assert read_start(path, 3) == b"aaa"
    assert read_plain("/proc/self/status", 1 << 20).startswith(b"Name:")  # its size is 0
    with pytest.raises(OSError, match="more than 3 bytes"):
        read_plain("/proc/self/status", 3)


def test_a_file_that_grows_as_fast_as_it_is_read_holds_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"a")
    read = os.read

    def read_and_grow(descriptor: int, size: int) -> bytes:
        piece = read(descriptor, size)
        with path.open("ab") as file:
            file.write(b"b")
        return piece

    monkeypatch.setattr(os, "read", read_and_grow)
    with pytest.raises(OSError, match="grows while it is read"):
        read_plain(path, 64 << 20)


def test_a_few_lines_that_come_while_a_journal_is_read_are_no_growth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"a" * 200_000)
    read = os.read
    lines = iter([b"b"] * 3)

    def read_and_grow(descriptor: int, size: int) -> bytes:
        piece = read(descriptor, size)
        with path.open("ab") as file:
            file.write(next(lines, b""))
        return piece

    monkeypatch.setattr(os, "read", read_and_grow)
    assert read_plain(path, 1 << 20) == b"a" * 200_000 + b"bbb"


@pytest.mark.parametrize("name", ["", "..", "../x", "a/../../x", "/etc/passwd", "a/b/../../../x"])
def test_a_stored_name_that_leads_out_of_its_directory_is_refused(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "x").write_text("x")
    inner = directory(tmp_path / "inner")
    with pytest.raises(OSError, match="leads out") as caught:
        read_below(inner, name, 10)
    assert caught.value.errno == errno.EXDEV


def test_below_a_directory_no_link_is_followed_and_the_directory_may_be_one(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("secret")
    inner = directory(tmp_path / "inner")
    (inner / "out").symlink_to(tmp_path)
    (inner / "x").symlink_to("../x")
    (inner / "deep").mkdir()
    (inner / "deep/y").write_text("y")
    for name in ("out/x", "x"):
        with pytest.raises(OSError, match=r"inner/"):
            read_below(inner, name, 10)
    (tmp_path / "way").symlink_to("inner")
    assert read_below(tmp_path / "way", "deep/y", 10) == b"y"


def test_a_directory_that_is_held_is_not_looked_up_again(tmp_path: Path) -> None:
    inner = directory(tmp_path / "inner")
    (inner / "x").write_text("ours")
    held = os.open(inner, os.O_PATH)
    inner.rename(tmp_path / "moved")
    (directory(inner) / "x").write_text("theirs")
    assert read_below(inner, "x", 10, descriptor=held) == b"ours"
    os.close(held)
    with pytest.raises(FileNotFoundError):
        open_below(inner, "y")


def test_standard_input_is_read_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a" * 100)))
    assert read_file("/dev/stdin", "a thing", max_bytes=100) == b"a" * 100
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a" * 101)))
    with pytest.raises(InputError, match="more than 100 bytes"):
        read_file("/dev/stdin", "a thing", max_bytes=100)
    monkeypatch.setattr(sys, "stdin", None)
    for name in ("-", "/dev/stdin"):
        with pytest.raises(HomenodeError, match="it is closed"):
            read_input(name, "a thing")


def test_a_file_named_dash_that_something_lists_is_no_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", None)
    Path("-").write_text(HOST.read_text())
    assert len(read_hosts(["."]).hosts) == 1


COMMANDS = (
    "show --host X",
    "show --host small-2n8c-2gpu --lspci X",
    "show --host small-2n8c-2gpu --plan X",
    "doctor --host X",
    "doctor --host small-2n8c-2gpu X",
    "doctor --host small-2n8c-2gpu --expect X",
    "plan X --host small-2n8c-2gpu --layout pin",
    "plan VM --host X --layout pin",
    "plan VM --host hgx-h100 --layout pin --after X",
    "verify X",
    "verify VM --plan X",
    "restore X",
    "apply X --yes",
    "nccl-topo --domain X --host small-2n8c-2gpu",
    "nccl-topo --check X",
    "pool show --pool X",
    "pool show --pool small-2n8c-2gpu*2 --after X",
    "pool place X --pool small-2n8c-2gpu*2",
    "pool capture --hosts X -o OUT",
    "slurm check X X --host small-2n8c-2gpu",
    "slurm audit X",
    "kubevirt check X",
    "doctor --host small-2n8c-2gpu --expect X",
    "import X -o OUT",
    "compare X X",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_waits_for_what_is_no_plain_file(tmp_path: Path, command: str) -> None:
    for make in (pipe, unix_socket, device):
        path = make(tmp_path / make.__name__)
        named = {"X": path, "VM": VM, "OUT": tmp_path / "out", "POOL": tmp_path}
        done = homenode(*(named.get(word, word) for word in command.split()), whole=True)
        assert done.exit_code in (1, 2, 3, 5) and "Traceback" not in done.output, make
        if make is pipe:
            assert not was_opened(path)


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """A directory of others: three hosts, and whatever else can lie in a directory."""
    path = directory(tmp_path / "p")
    for number in range(3):
        text = HOST.read_text().replace("\nname = ", f'\nname = "{number}"\n#', 1)
        (path / f"host-{number}.toml").write_text(text)
    pipe(path / "a.toml")
    pipe(path / "c.tar.gz")
    device(path / "b.toml")
    unix_socket(path / "d.xml")
    return path


@pytest.mark.parametrize(
    "command", [pytest.param("pool show --pool P", marks=NEEDS_CLUSTER), "doctor --pool P"]
)
def test_a_pool_of_others_answers_at_once_and_names_what_it_left_out(
    pool: Path, command: str
) -> None:
    done = homenode(*(pool if word == "P" else word for word in command.split()), whole=True)
    said = "".join(done.output.split())
    for name, kind in (("a.toml", "pipe"), ("c.tar.gz", "pipe"), ("b.toml", "device")):
        assert f"{name}:cannotreadthehost:a{kind}" in said
    assert not was_opened(pool / "a.toml")


def test_directories_of_results_may_hold_anything(tmp_path: Path) -> None:
    for make in KINDS:
        inner = directory(tmp_path / f"run-{make.__name__}")
        make(inner / "results.jsonl")
        make(inner / "log.txt")
    assert len(load_runs(tmp_path).skipped) >= 3
    for make in KINDS[:3]:
        (tmp_path / f"run-{make.__name__}" / "results.jsonl").unlink()
        (gap,) = find_directories(tmp_path / f"run-{make.__name__}").skipped
        assert "not a regular file" in gap.reason
    assert not was_opened(tmp_path / "run-pipe/log.txt")


@each_kind
def test_a_record_directory_of_others_is_refused_and_never_waited_for(
    tmp_path: Path, make: Make
) -> None:
    for name in ("journal.jsonl", LOCK, "x"):
        make(tmp_path / name)
    record = RecordDirectory(tmp_path)
    assert not record.is_locked
    for read in (record.read_journal, lambda: record.read("x"), lambda: record.has_journal):
        with pytest.raises(HomenodeError, match="not a regular file"):
            read()


def test_a_record_is_read_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret\n")
    inner = directory(tmp_path / "inner")
    (inner / "journal.jsonl").symlink_to("../secret")
    with pytest.raises(HomenodeError, match="a link, not a regular file"):
        RecordDirectory(inner).read_journal()


def test_the_limit_has_a_unit_where_it_has_a_round_one() -> None:
    assert input_files._format_size(64 << 20) == "64 MiB"
    assert input_files._format_size(1000) == "1000 bytes"
