"""A libvirtd of the tests' own that believes to have two NUMA nodes, on a machine that has one.

A session daemon of user no one, in a mount namespace in which /sys/devices/system/node shows two
nodes of a CPU each. What only a kernel with two nodes can do, bind memory to the second one, a
wrapper gives its QEMU to do on the first. All else is libvirt's own: definitions, pins, guests.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.processes import run_text

QEMU = "/usr/bin/qemu-system-x86_64"
USER = "nobody"

HOST = """
format = 1
name = "two-small-nodes"
about = "2 packages of 1 core"

packages = 2
cores_per_package = 1
llc_size = "16MiB"
memory_per_node = "4GiB"

[facts]
assumed = ["all of it: as the tests' libvirtd shows this machine"]

[expect]
packages = 2
cores = 2
pus = 2
numa_nodes = 2
"""

_START = """
mount --bind '{directory}/node' /sys/devices/system/node
[ -e /dev/kvm ] && mount --bind '{directory}/no-kvm' /dev/kvm
exec setpriv --reuid {user} --regid nogroup --clear-groups \\
  env XDG_RUNTIME_DIR='{directory}/run' HOME='{directory}/home' libvirtd --timeout 600
"""

_WRAPPER = """#!/bin/bash
bound='"host-nodes":\\[[0-9,]*\\]'
words=()
for word in "$@"; do
  [[ $word == *'"host-nodes":'* ]] && word=$(sed "s/$bound/\\"host-nodes\\":[0]/" <<<"$word")
  words+=("$word")
done
exec {qemu} "${{words[@]}}"
"""


class TwoNodes:
    """The running daemon. uri: of it. host: a description of what it shows. emulator: its QEMU."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.uri = f"qemu+unix:///session?socket={directory}/run/libvirt/libvirt-sock"
        self.host = directory / "host.toml"
        self.emulator = directory / "qemu"
        self.reaper: subprocess.Popen[bytes] | None = None
        self.pid = 0

    def start(self) -> None:
        """Also after it was killed: its domains and their guests are still there."""
        script = _START.format(directory=self.directory, user=USER)
        reaper = (sys.executable, Path(__file__).with_name("reaper.py"))
        self.reaper = subprocess.Popen(
            [*reaper, "unshare", "--mount", "--propagation", "private", "bash", "-c", script],
            stdout=subprocess.PIPE,
            stderr=(self.directory / "log").open("ab"),
        )
        assert self.reaper.stdout is not None
        self.pid = int(self.reaper.stdout.readline())
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            if self.virsh("uri").returncode == 0:
                return
            time.sleep(0.1)
        pytest.skip(f"no libvirtd of our own: {(self.directory / 'log').read_text()[-300:]}")

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        while Path(f"/proc/{self.pid}").exists():
            time.sleep(0.01)

    def virsh(self, *words: str) -> subprocess.CompletedProcess[str]:
        return run_text(["virsh", "-q", "-c", self.uri, *words], timeout=180)


@contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    """The daemon in a directory of its own, for as long as it is needed."""
    # Not below pytest's own directory, which others may not enter.
    with tempfile.TemporaryDirectory(prefix="homenode-two-nodes-") as text:
        Path(text).chmod(0o755)
        yield from _running(Path(text))


def _running(directory: Path) -> Iterator[TwoNodes]:
    for program in ("libvirtd", "virsh", "unshare", "setpriv", QEMU):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} here")
    if os.geteuid() != 0:
        pytest.skip("needs root, for a mount namespace")
    nodes = directory / "node"
    for node, distances in ((0, "10 21"), (1, "21 10")):
        there = nodes / f"node{node}"
        there.mkdir(parents=True)
        (there / "cpulist").write_text(f"{node}\n")
        (there / "cpumap").write_text(f"{1 << node:x}\n")
        (there / "distance").write_text(f"{distances}\n")
        (there / "meminfo").write_text(
            f"Node {node} MemTotal: 4194304 kB\nNode {node} MemFree: 4194304 kB\n"
        )
    for name in ("online", "possible", "has_cpu", "has_memory", "has_normal_memory"):
        (nodes / name).write_text("0-1\n")
    for name in ("run", "home"):
        (directory / name).mkdir()
        shutil.chown(directory / name, USER)
    subprocess.run(["mknod", "-m", "000", directory / "no-kvm", "c", "1", "3"], check=True)
    found = TwoNodes(directory)
    found.host.write_text(HOST)
    found.emulator.write_text(_WRAPPER.format(qemu=QEMU))
    found.emulator.chmod(0o755)
    found.start()
    try:
        yield found
    finally:
        for uuid in found.virsh("list", "--all", "--uuid").stdout.split():
            found.virsh("destroy", uuid)
        found.kill()
