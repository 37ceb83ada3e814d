"""An ssh daemon of our own on the loopback, with keys made for the test."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def ssh_daemon(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a running sshd that takes the key of the `ssh` now first on PATH."""
    daemon, client = shutil.which("sshd", path="/usr/sbin:/usr/bin"), shutil.which("ssh")
    if daemon is None or client is None:
        pytest.skip("needs openssh-server and openssh-client")
    if os.geteuid() != 0:
        pytest.skip("needs root, to run sshd")
    for name in ("host_key", "user_key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = int(probe.getsockname()[1])
    (folder / "config").write_text(
        f"Port {number}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\nUsePAM no\n"
        f"AuthorizedKeysFile {folder}/user_key.pub\nStrictModes no\nPidFile none\n"
    )
    stand_in = folder / "bin" / "ssh"
    stand_in.parent.mkdir()
    stand_in.write_text(
        f"#!/bin/sh\nexec {client} -F none -i {folder}/user_key -o BatchMode=yes "
        f'-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null "$@"\n'
    )
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    running = subprocess.Popen([daemon, "-D", "-f", folder / "config"], stderr=subprocess.PIPE)
    for _ in range(100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", number)) == 0:
                break
        time.sleep(0.05)
    try:
        yield number
    finally:
        running.terminate()
        running.wait()
