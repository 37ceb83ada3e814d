"""A systemd of its own, as PID 1 of namespaces: it runs units as they are shipped.

What it is shown of this machine is this machine, but for /run, /tmp, the directories named, and its
processes; those of this machine are at OUTSIDE.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

OUTSIDE = "/mnt/proc"
UNITS = "/run/units"
SYSTEMD = Path("/lib/systemd/systemd")
_CGROUPS = Path("/sys/fs/cgroup")
_STARTED_S = 30.0
_PREPARE = r"""
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
  mount -t cgroup2 none /sys/fs/cgroup
else
  mount -t tmpfs none /sys/fs/cgroup
  mkdir /sys/fs/cgroup/systemd /sys/fs/cgroup/unified
  mount -t cgroup -o none,name=systemd none /sys/fs/cgroup/systemd
  mount -t cgroup2 none /sys/fs/cgroup/unified
fi
mount -t tmpfs none /mnt
mkdir /mnt/proc /mnt/libvirt
mount --bind /proc /mnt/proc
[ ! -d /run/libvirt ] || mount --bind /run/libvirt /mnt/libvirt
mount -t proc none /proc
mount -t tmpfs -o mode=755 none /run
mkdir /run/libvirt /run/units
mount --move /mnt/libvirt /run/libvirt
for directory; do
  mkdir -p "$directory"
  mount -t tmpfs -o mode=755 none "$directory"
done
mount -t tmpfs -o mode=1777 none /tmp
for target in basic empty multi-user shutdown sysinit; do
  printf '[Unit]\nDefaultDependencies=no\n' > /run/units/$target.target
done
export container=homenode-test SYSTEMD_UNIT_PATH=/run/units
exec /lib/systemd/systemd --system --unit=empty.target --log-target=null --show-status=no
"""


@dataclass(frozen=True, slots=True)
class Systemd:
    """A systemd in a namespace of its own."""

    process: int  # its number, seen from outside

    @property
    def root(self) -> Path:
        """Its files."""
        return Path(f"/proc/{self.process}/root")

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        inside = ("nsenter", f"--target={self.process}", "--mount", "--pid", "--cgroup", "--")
        return subprocess.run(
            [*inside, *argv], capture_output=True, text=True, check=False, timeout=120
        )

    def start(self, unit: str, text: str, settings: str = "") -> tuple[str, int, str]:
        """Run a oneshot unit to its end, with a drop-in: its result, its exit status and what it
        said."""
        directory = self.root / UNITS[1:]
        (directory / unit).write_text(text)
        (directory / f"{unit}.d").mkdir(exist_ok=True)
        output = "StandardOutput=truncate:/run/said"
        (directory / f"{unit}.d/test.conf").write_text(f"[Service]\n{output}\n{settings}")
        self.run("systemctl", "daemon-reload")
        self.run("systemctl", "start", unit)
        shown = self.run("systemctl", "show", "-P", "Result", "-P", "ExecMainStatus", unit)
        result, status = shown.stdout.split()
        return result, int(status), (self.root / "run/said").read_text()


@contextmanager
def systemd(*directories: str) -> Iterator[Systemd]:
    """directories: empty ones of its own. Skips where it cannot be started."""
    if os.geteuid() != 0 or not SYSTEMD.exists() or shutil.which("nsenter") is None:
        pytest.skip("needs root, systemd and util-linux")
    hierarchies = [
        one
        for one in (_CGROUPS, _CGROUPS / "systemd", _CGROUPS / "unified")
        if (one / "cgroup.procs").exists()
    ]
    own = [one / f"homenode-test-{os.getpid()}" for one in hierarchies]
    for group in own:
        group.mkdir(exist_ok=True)
    enter = "".join(f"echo $$ > {group}/cgroup.procs; " for group in own)
    unshare = "exec unshare --mount --pid --cgroup --ipc --uts --fork --kill-child"
    argv = ["sh", "-euc", f'{enter} {unshare} sh -euc "$0" sh "$@"', _PREPARE, *directories]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield _started(process)
        finally:
            process.kill()
            process.wait()
            _remove(own)


def _started(process: "subprocess.Popen[str]") -> Systemd:
    deadline = time.monotonic() + _STARTED_S
    while time.monotonic() < deadline and process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if children:
            found = Systemd(int(children[0]))
            if found.run("systemctl", "is-active", "empty.target").stdout == "active\n":
                return found
        time.sleep(0.1)
    process.kill()
    said = process.communicate()[1]
    pytest.skip(f"systemd does not start in namespaces here: {said[-300:]}")


def _remove(groups: Sequence[Path]) -> None:
    for group in groups:
        for _ in range(50):
            below = sorted(group.rglob("cgroup.procs"), reverse=True)
            try:
                for one in below:
                    one.parent.rmdir()
                break
            except OSError:  # its last processes are still ending
                time.sleep(0.1)
