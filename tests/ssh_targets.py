"""An ssh daemon of our own on the loopback, reached with the machine's own ssh and a key given."""

import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from homenode.measure.access.ssh import SshChannel


def new_key(path: Path, kind: str = "ed25519") -> None:
    """A key pair, in the place of the one before. Another host key counts from the next call on."""
    path.unlink(missing_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", path], check=True)


@contextmanager
def ssh_target(
    directory: Path, inside: tuple[str, ...] = (), config: str = ""
) -> Iterator[SshChannel]:
    """The target of a running sshd. `other_key` in the directory is one that it does not take.

    inside: words of a command before sshd's, which starts it in namespaces of its own, say. config:
    more lines of sshd_config.
    """
    daemon = shutil.which("sshd", path="/usr/sbin:/usr/bin")
    if daemon is None or shutil.which("ssh") is None:
        pytest.skip("needs openssh-server and openssh-client")
    if os.geteuid() != 0:
        pytest.skip("needs root, to run sshd")
    for name in ("host_key", "user_key", "other_key"):
        new_key(directory / name)
    (directory / "config").write_text(
        f"HostKey {directory}/host_key\nUsePAM no\n"
        f"AuthorizedKeysFile {directory}/user_key.pub\nStrictModes no\nPidFile none\n" + config
    )
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    with _served((*inside, daemon, "-i", "-f", str(directory / "config"))) as port:
        yield SshChannel(
            "127.0.0.1", "root", directory / "known 100%h", port, directory / "user_key"
        )


@contextmanager
def _served(argv: Sequence[str]) -> Iterator[int]:
    """The port at which each caller gets a program of its own, as inetd does it.

    The port is ours from the first moment on: a daemon that was given a free one could find it
    taken when it comes to listen.
    """
    programs: list[subprocess.Popen[bytes]] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    caller, _ = listener.accept()
                except OSError:  # shut down
                    return
                with caller:
                    programs.append(
                        subprocess.Popen(
                            argv,
                            stdin=caller.fileno(),
                            stdout=caller.fileno(),
                            stderr=subprocess.DEVNULL,
                        )
                    )

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for program in programs:
                program.terminate()
                program.wait()
