"""Capture of many hosts over a real ssh: a daemon of our own on the loopback."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from homenode.cluster.pool.commands import CapturedHosts, capture_hosts, read_list
from homenode.errors import InputError
from homenode.formats import encode
from homenode.vm.host_sources import read_hosts
from tests.pool.pools import filled, shipped
from tests.ssh_daemon import ssh_daemon


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    with ssh_daemon(tmp_path, monkeypatch) as number:
        yield number


def _capture(lines: list[str], directory: Path, *, again: bool = False) -> CapturedHosts:
    listed, _ = read_list(lines, "hosts")
    return capture_hosts(
        listed, directory, lambda done, total: None, jobs=4, timeout_s=60, overwrite=again
    )


@pytest.mark.root
def test_hosts_are_read_at_once_and_one_that_fails_is_named_and_read_later(
    port: int, tmp_path: Path
) -> None:
    pool = tmp_path / "pool"
    good = [f"root@127.0.0.1:{port} name=a", f"root@127.0.0.1:{port} name=b"]
    first = _capture([*good, "root@127.0.0.1:1 name=c"], pool)
    assert (first.hosts, first.read) == (2, 2)
    assert [one.subject for one in first.failures] == ["root@127.0.0.1:1"]
    assert pool.stat().st_mode & 0o77 == 0
    assert all(path.stat().st_mode & 0o77 == 0 for path in pool.iterdir())
    repaired = [*good, f"root@127.0.0.1:{port} name=c"]
    assert _capture(repaired, pool).read == 1
    assert _capture(repaired, pool, again=True).read == 3
    assert [one.name for one in read_hosts([str(pool)]).hosts] == ["a", "b", "c"]


@pytest.mark.root
def test_a_capture_that_was_cut_short_keeps_the_hosts_that_it_has_read(
    port: int, tmp_path: Path
) -> None:
    pool = tmp_path / "pool"
    lines = [f"root@127.0.0.1:{port} name=a", f"root@127.0.0.1:{port} name=b"]

    class Cut(Exception):
        pass

    def progress(done: int, total: int) -> None:
        raise Cut

    with pytest.raises(Cut):
        capture_hosts(read_list(lines, "l")[0], pool, progress, jobs=1, timeout_s=60)
    assert _capture(lines, pool).hosts == 2


@pytest.mark.parametrize(
    "line",
    [
        "-oProxyCommand=x",
        "gpu-1 rack=2",
        "root@gpu-0",
        "gpu-1 name=../x",
        "gpu;rm",
        "gpu-1 name=a/b",
        "gpu-1 name=",
        "gpu-1 name=a b",
    ],
)
def test_a_line_with_anything_else_in_it_is_named_and_skipped(line: str) -> None:
    hosts, refused = read_list(["gpu-0", line], "hosts")
    assert list(hosts) == ["gpu-0"]
    assert [one.subject for one in refused] == ["hosts:2"]


def test_a_list_without_a_host_is_refused() -> None:
    for lines in ([], ["# none"], ["-oProxyCommand=x"]):
        with pytest.raises(InputError, match="hosts"):
            read_list(lines, "hosts")


def test_a_list_names_hosts_without_user_and_port() -> None:
    lines = ["\ufeff# comment", "", "root@gpu-1:2222 # rack", "gpu-2.example.org"]
    assert read_list(lines, "l")[0] == {
        "gpu-1": "root@gpu-1:2222",
        "gpu-2.example.org": "gpu-2.example.org",
    }


def test_a_host_with_its_vms_is_the_one_that_was_stored(tmp_path: Path) -> None:
    host = filled(shipped("hgx-h100"), 4)
    (tmp_path / "a.json").write_text(encode("host", host))
    (read,) = read_hosts([str(tmp_path)]).hosts
    assert read.host.domains == host.domains
    assert read.host.nodes == host.nodes
