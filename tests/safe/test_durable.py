"""Files are written whole, under no name that could be guessed, and through no one's link."""

import contextlib
import fcntl
import os
import resource
import signal
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from homenode.cli.terminal import write_text
from homenode.errors import HostError, InputError
from homenode.measure.results.store import read_run, write_run
from homenode.measure.run_directory import RAW, open_run
from homenode.measure.trial.journal import TrialJournal
from homenode.safe import durable
from homenode.safe.record_directory import LOCK, RecordDirectory
from homenode.vm.domain.restore import restore, write_tuned
from tests.processes import code_of, start_child
from tests.report_runs import full_run

NOBODY = 65534
SECRET = "<domain><graphics type='vnc' passwd='hunter2'/></domain>"


def planted(directory: Path, *names: str) -> Path:
    """Links of these names, and of every name that homenode once wrote under, to one victim."""
    victim = directory.parent / "victim"
    victim.write_text("as it was")
    for name in names:
        for link in (directory / f".{name}.part", directory / name):
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(victim)
    return victim


def _text(directory: Path) -> None:
    write_text(directory / "out", "new")


def _bytes(directory: Path) -> None:
    durable.replace_file(directory / "out", b"new")


WRITERS: tuple[tuple[Callable[[Path], None], str], ...] = ((_text, "out"), (_bytes, "out"))


@pytest.mark.parametrize(("write", "name"), WRITERS, ids=lambda one: getattr(one, "__name__", one))
def test_a_link_under_the_names_that_are_written_is_replaced_and_not_followed(
    tmp_path: Path, write: Callable[[Path], None], name: str
) -> None:
    directory = tmp_path / "directory"
    victim = planted(directory, name)
    write(directory)
    assert victim.read_text() == "as it was"
    assert (directory / name).read_bytes() == b"new"
    assert not (directory / name).is_symlink()


def test_a_run_is_written_into_no_directory_that_a_link_leads_to(tmp_path: Path) -> None:
    run = full_run("pin", 1)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    root = tmp_path / "results"
    (root / run.head.system).mkdir(parents=True)
    (root / run.head.system / run.head.name).symlink_to(elsewhere)
    with pytest.raises(HostError):
        write_run(root, run)
    with (
        pytest.raises(HostError),
        open_run(root, run.head.system, run.head.name, resume=False, notify=print),
    ):
        pytest.fail("it was opened")
    assert not list(elsewhere.iterdir())


def test_the_results_directory_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "results").symlink_to(tmp_path / "shared")
    path = write_run(tmp_path / "results", full_run("pin", 1))
    assert path.is_file()


@pytest.mark.parametrize("lock", [".lock", ".tool-lock"])
def test_a_lock_is_made_through_no_link(tmp_path: Path, lock: str) -> None:
    directory = tmp_path / "results" / "host" / "run"
    directory.mkdir(parents=True)
    (directory / lock).symlink_to(tmp_path / "nologin")
    with (
        pytest.raises(HostError),
        open_run(tmp_path / "results", "host", "run", resume=False, notify=print),
    ):
        pytest.fail("it was opened")
    assert not (tmp_path / "nologin").exists()


def test_what_a_bench_writes_follows_no_link_in_its_directory(tmp_path: Path) -> None:
    with open_run(tmp_path / "results", "host", "run", resume=False, notify=print) as directory:
        victim = planted(directory.path, "order.json")
        directory.write("order.json", b"{}")
        assert victim.read_text() == "as it was"
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (directory.path / RAW).symlink_to(elsewhere)
        with pytest.raises(HostError):
            directory.write(f"{RAW}/0001.txt", b"{}")
        assert not list(elsewhere.iterdir())


def test_a_directory_that_is_swapped_for_a_link_meanwhile_is_not_written_through(
    tmp_path: Path,
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with open_run(tmp_path / "results", "host", "run", resume=False, notify=print) as directory:
        directory.path.rename(tmp_path / "moved")
        directory.path.symlink_to(elsewhere)
        directory.write("order.json", b"{}")
        directory.begin("{}\n")
        directory.append("{}\n")
    assert not list(elsewhere.iterdir())
    assert (tmp_path / "moved" / "order.json").read_text() == "{}"


def test_the_lock_of_a_trial_is_made_through_no_link(tmp_path: Path) -> None:
    journal = TrialJournal(tmp_path, "t")
    journal.path.mkdir(parents=True)
    (journal.path / ".lock").symlink_to(tmp_path / "nologin")
    with pytest.raises(HostError), journal.hold():
        pytest.fail("it was locked")
    assert not (tmp_path / "nologin").exists()


@pytest.mark.root
def test_root_follows_no_link_of_another_user(tmp_path: Path) -> None:
    victim = tmp_path / "passwd"
    victim.write_text("as it was")
    link = tmp_path / "out.xml"
    link.symlink_to(victim)
    os.lchown(link, NOBODY, NOBODY)
    with pytest.raises(HostError, match="link of user"):
        write_tuned(link, b"<domain/>", b"<domain></domain>")
    way = tmp_path / "way"
    way.symlink_to(tmp_path)
    os.lchown(way, NOBODY, NOBODY)
    with pytest.raises(HostError, match="link of user"):
        write_text(way / "new", "new")
    (tmp_path / "own").symlink_to(way)
    with pytest.raises(HostError, match="link of user"):  # a link of root's leads through it
        write_text(tmp_path / "own" / "new", "new")
    assert victim.read_text() == "as it was"
    assert not (tmp_path / "new").exists()


def test_a_link_of_ones_own_on_the_way_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "way").symlink_to("real")
    write_text(tmp_path / "way" / "new", "new")
    assert (tmp_path / "real" / "new").read_text() == "new"


def test_a_relative_path_is_written_where_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "below").mkdir()
    write_text(Path("new"), "new")
    write_text(Path("below/../below/new"), "new")
    assert (tmp_path / "below" / "new").read_text() == "new"


def test_a_device_or_a_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(HostError, match="pipe"):
        write_text(tmp_path / "pipe", "new")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_what_was_readable_by_its_owner_alone_stays_so(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    path.chmod(0o600)
    write_text(path, "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_nothing_is_left_of_a_file_that_could_not_be_written(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
    try:
        for write in (durable.replace_file, durable.create_file):
            with pytest.raises(OSError, match="File too large"):
                write(tmp_path / "out", b"new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_a_file_that_must_be_new_is_made_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "overlay").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        durable.create_file(tmp_path / "overlay", b"qcow2")
    assert not (tmp_path / "victim").exists()


@pytest.mark.root
def test_root_writes_through_no_link_that_is_swapped_in_for_a_directory() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as text:
        victim, theirs = Path(text, "victim"), Path(text, "theirs")
        Path(text).chmod(0o755)
        victim.mkdir()
        theirs.mkdir()
        os.chown(theirs, NOBODY, NOBODY)

        def swap() -> None:
            os.setuid(NOBODY)
            directory, moved = theirs / "a", theirs / "b"
            directory.mkdir()
            while True:
                directory.rename(moved)
                directory.symlink_to(victim)
                directory.unlink()
                moved.rename(directory)

        child = start_child(swap)
        written = 0
        for _ in range(4000):
            with contextlib.suppress(OSError):
                durable.replace_file(theirs / "a" / "out", b"x", synced=False)
                written += 1
        os.kill(child, signal.SIGKILL)
        code_of(child)
        assert written
        assert not list(victim.iterdir())


def test_a_tuned_document_and_its_original_are_as_private_as_what_was_read(tmp_path: Path) -> None:
    saved = write_tuned(tmp_path / "out.xml", SECRET.encode(), b"<domain/>", 0o640)
    for path in (saved.output, saved.original, saved.record):
        assert stat.S_IMODE(path.stat().st_mode) == 0o640, path
    restore(saved.output)
    assert stat.S_IMODE(saved.output.stat().st_mode) == 0o640


def test_a_pipe_in_a_directory_of_somebody_elses_holds_no_reader(tmp_path: Path) -> None:
    for name in ("out.xml.orig", "out.xml.orig.sha256", "results.jsonl", "journal.jsonl"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "out.xml").write_text("<domain/>")
    with pytest.raises(HostError, match="not a regular file"):
        restore(tmp_path / "out.xml")
    with pytest.raises(HostError, match="not a regular file"):
        write_tuned(tmp_path / "out.xml", b"<domain/>", b"<domain></domain>")
    with pytest.raises(InputError, match="a pipe, not a regular file"):
        read_run(tmp_path)
    directory = RecordDirectory(tmp_path)
    with pytest.raises(HostError, match="not a regular file"):
        directory.read_journal()
    with pytest.raises(HostError, match="not a regular file"):
        assert directory.has_journal


def test_what_a_kill_left_goes_and_what_is_being_written_or_is_anothers_stays(
    tmp_path: Path,
) -> None:
    left, held, theirs = (tmp_path / f".homenode-{letter * 16}.part" for letter in "abc")
    for path in (left, held, theirs):
        path.write_text("half")
    if os.geteuid() == 0:
        os.chown(theirs, NOBODY, NOBODY)
    out = tmp_path / "out"
    with held.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for content in (b"first", b"second"):
            durable.replace_file(out, content)
            assert out.read_bytes() == content
    assert not left.exists()
    assert held.exists()
    assert theirs.exists() == (os.geteuid() == 0)


def test_whoever_looks_at_a_lock_keeps_it_from_no_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RecordDirectory(tmp_path).hold_lock("busy"):
        assert RecordDirectory(tmp_path).is_locked
    with (tmp_path / LOCK).open() as look:
        fcntl.flock(look, fcntl.LOCK_SH)
        assert not RecordDirectory(tmp_path).is_locked
        monkeypatch.setattr(time, "sleep", lambda seconds: look.close())
        with RecordDirectory(tmp_path).hold_lock("busy"):
            assert RecordDirectory(tmp_path).is_locked and look.closed


def test_what_is_written_goes_to_the_directory_that_was_locked(tmp_path: Path) -> None:
    files = RecordDirectory(tmp_path / "run", below=tmp_path)
    with files.hold_lock("busy"):
        files.path.rename(tmp_path / "moved")
        files.write("out", b"content")
    assert (tmp_path / "moved/out").read_bytes() == b"content"
