"""An ssh daemon of our own on the loopback, reached with the machine's own ssh and a key given."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from homenode.machine.ssh import SshTarget


@contextmanager
def ssh_target(folder: Path) -> Iterator[SshTarget]:
    """The target of a running sshd. `other_key` in the folder is one that it does not take."""
    daemon = shutil.which("sshd", path="/usr/sbin:/usr/bin")
    if daemon is None or shutil.which("ssh") is None:
        pytest.skip("needs openssh-server and openssh-client")
    if os.geteuid() != 0:
        pytest.skip("needs root, to run sshd")
    for name in ("host_key", "user_key", "other_key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\nUsePAM no\n"
        f"AuthorizedKeysFile {folder}/user_key.pub\nStrictModes no\nPidFile none\n"
    )
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    running = subprocess.Popen([daemon, "-D", "-f", folder / "config"], stderr=subprocess.PIPE)
    for _ in range(100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    try:
        yield SshTarget("127.0.0.1", "root", folder / "known 100%h", port, folder / "user_key")
    finally:
        running.terminate()
        running.wait()
