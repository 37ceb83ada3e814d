"""The `ssh` on PATH, with the key that a daemon of our own takes."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ssh_targets import ssh_target


@contextmanager
def ssh_daemon(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a running sshd that takes the key of the `ssh` now first on PATH."""
    client = shutil.which("ssh")
    with ssh_target(directory) as target:
        stand_in = directory / "bin" / "ssh"
        stand_in.parent.mkdir()
        stand_in.write_text(
            f"#!/bin/sh\nexec {client} -F none -i {target.key} -o BatchMode=yes "
            f'-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null "$@"\n'
        )
        stand_in.chmod(0o755)
        monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")
        assert target.port is not None
        yield target.port
