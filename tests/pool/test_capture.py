"""Capture of many hosts over a real ssh: a daemon of our own on the loopback."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from homenode.change.record_folder import RecordFolder
from homenode.cluster.pool.answers_file import ANSWERS_FILE
from homenode.cluster.pool.capture import capture_pool, read_list
from homenode.cluster.pool.sources import load_pool
from homenode.cluster.pool.stored import POOL_FILE
from homenode.errors import HostError, InputError
from tests.ssh_daemon import ssh_daemon


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    with ssh_daemon(tmp_path, monkeypatch) as number:
        yield number


def _capture(listed: str, folder: Path, *, again: bool = False) -> tuple[list[str], list[str], int]:
    done = capture_pool(
        listed, "hosts", folder, lambda done, total: None, jobs=4, timeout_s=60, again=again
    )
    hosts = [host.name for host in done.pool.hosts]
    return hosts, [failure.source for failure in done.pool.failures], done.read


@pytest.mark.root
def test_hosts_are_read_at_once_and_one_that_fails_is_named_and_read_later(
    port: int, tmp_path: Path
) -> None:
    pool = tmp_path / "pool"
    good = f"root@127.0.0.1:{port} name=a fault_domain=r1\nroot@127.0.0.1:{port} name=b\n"
    bad = "root@127.0.0.1:1 name=c\n"
    assert _capture(good + bad, pool) == (["a", "b"], ["root@127.0.0.1:1"], 2)
    assert pool.stat().st_mode & 0o77 == 0
    repaired = f"{good}root@127.0.0.1:{port} name=c\n"
    assert _capture(repaired, pool) == (["a", "b", "c"], [], 1)
    assert _capture(repaired, pool, again=True) == (["a", "b", "c"], [], 3)
    found = load_pool([str(pool)])
    assert [host.fault_domain for host in found.hosts] == ["r1", None, None]
    assert len(found.shapes) == 1
    assert sorted(path.name for path in pool.iterdir() if path.name[0] != ".") == [POOL_FILE]


@pytest.mark.root
def test_a_capture_that_was_cut_short_keeps_the_hosts_that_it_has_read(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = tmp_path / "pool"
    listed = f"root@127.0.0.1:{port} name=a\nroot@127.0.0.1:{port} name=b\n"
    written: list[str] = []

    class Cut(Exception):
        pass

    def progress(done: int, total: int) -> None:
        raise Cut

    with pytest.raises(Cut):
        capture_pool(listed, "hosts", pool, progress, jobs=1, timeout_s=60)
    written = [path.name for path in pool.glob("host-*.part")]
    assert len(written) == 1
    half = load_pool([str(pool)])
    assert (len(half.hosts), [one.source for one in half.failures]) == (1, [str(pool)])
    assert _capture(listed, pool) == (["a", "b"], [], 1)


def test_hosts_of_other_sources_are_stored_as_they_were_read(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("hgx-h100*2 fault_domain=r1\nsmall-2n8c-2gpu name=s\nnone-1\n")
    run = [sys.executable, "-m", "homenode", "pool", "capture", "list", "-o", "pool"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "3 hosts, 3 read now, 1 failed" in done.stderr
    found, expected = load_pool([str(tmp_path / "pool")]), load_pool([str(tmp_path / "list")])
    assert (found.hosts, found.shapes) == (expected.hosts, expected.shapes)
    assert (tmp_path / "pool" / ANSWERS_FILE).exists()
    again = subprocess.run([*run[:-3], "pool", "-o", "pool"], cwd=tmp_path, capture_output=True)
    assert again.returncode == 2


def test_two_captures_of_one_folder_at_once_are_refused(tmp_path: Path) -> None:
    record = RecordFolder(tmp_path / "pool")
    with record.locked("no one else"), pytest.raises(HostError):
        _capture("gpu-1\n", tmp_path / "pool")


@pytest.mark.parametrize(
    "listed",
    [
        "-oProxyCommand=x",
        "gpu-1 rack=2",
        "gpu-1\nroot@gpu-1",
        "gpu-1 name=../x",
        "gpu;rm",
        "gpu-1 name=a/b",
        "gpu-1 name=",
    ],
)
def test_a_line_with_anything_else_in_it_is_named_and_left_out(listed: str) -> None:
    hosts, failures = read_list(f"gpu-0\n{listed}", "hosts")
    if listed == "gpu-1 name=":
        assert ([one.name for one in hosts], failures) == (["gpu-0", "gpu-1"], [])
        return
    assert hosts[0].name == "gpu-0"
    assert [where for where, _ in failures] == [f"hosts:{1 + len(listed.splitlines())}"]


def test_a_list_without_a_host_is_refused() -> None:
    for listed in ("", "# none\n", "-oProxyCommand=x\n"):
        with pytest.raises(InputError, match="hosts"):
            read_list(listed, "hosts")


def test_a_list_names_hosts_without_user_and_port() -> None:
    listed = "# comment\n\nroot@gpu-1:2222 fault_domain=r # rack\ngpu-2.example.org\n"
    assert [(one.server, one.name, one.fault_domain) for one in read_list(listed, "l")[0]] == [
        ("root@gpu-1:2222", "gpu-1", "r"),
        ("gpu-2.example.org", "gpu-2.example.org", None),
    ]
