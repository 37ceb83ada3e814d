"""Capture over a real ssh: a daemon of our own on the loopback, with keys made for the test."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from homenode.snapshot.capture import capture_host
from homenode.sources import load_host
from homenode.topology import summarise

pytestmark = pytest.mark.root


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a running sshd that takes the key of the `ssh` now first on PATH."""
    daemon, client = shutil.which("sshd", path="/usr/sbin:/usr/bin"), shutil.which("ssh")
    if daemon is None or client is None:
        pytest.skip("needs openssh-server and openssh-client")
    if os.geteuid() != 0:
        pytest.skip("needs root, to run sshd")
    for name in ("host_key", "user_key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = int(probe.getsockname()[1])
    (tmp_path / "config").write_text(
        f"Port {number}\nListenAddress 127.0.0.1\nHostKey {tmp_path}/host_key\nUsePAM no\n"
        f"AuthorizedKeysFile {tmp_path}/user_key.pub\nStrictModes no\nPidFile none\n"
    )
    stand_in = tmp_path / "bin" / "ssh"
    stand_in.parent.mkdir()
    stand_in.write_text(
        f"#!/bin/sh\nexec {client} -F none -i {tmp_path}/user_key -o BatchMode=yes "
        f'-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null "$@"\n'
    )
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    running = subprocess.Popen([daemon, "-D", "-f", tmp_path / "config"], stderr=subprocess.PIPE)
    for _ in range(100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", number)) == 0:
                break
        time.sleep(0.05)
    yield number
    running.terminate()
    running.wait()


def test_a_host_is_captured_over_ssh_with_nothing_installed_there(
    port: int, tmp_path: Path
) -> None:
    archive = tmp_path / "host.tar.gz"
    captured = capture_host(archive, f"ssh://root@127.0.0.1:{port}")
    assert captured.manifest.redacted
    assert summarise(load_host(str(archive))) == summarise(load_host(None))
