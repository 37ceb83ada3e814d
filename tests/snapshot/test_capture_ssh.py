"""Capture over a real ssh: a daemon of our own on the loopback, with keys made for the test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from homenode.machine.snapshot.capture import capture_host
from homenode.vm.sources import load_host
from tests.same_machine import check_same_machine
from tests.ssh_daemon import ssh_daemon

pytestmark = pytest.mark.root


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    with ssh_daemon(tmp_path, monkeypatch) as number:
        yield number


def test_a_host_is_captured_over_ssh_with_nothing_installed_there(
    port: int, tmp_path: Path
) -> None:
    archive = tmp_path / "host.tar.gz"
    captured = capture_host(f"ssh://root@127.0.0.1:{port}")
    archive.write_bytes(captured.content)
    assert captured.manifest.redacted
    check_same_machine(load_host(str(archive)), load_host(None))
