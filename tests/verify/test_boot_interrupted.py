"""A boot that is interrupted leaves no guest, no file and no domain behind."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from homenode.check.verify.boot.boot_directory import end_abandoned
from homenode.safe.record_directory import RecordDirectory
from tests.processes import wait_for, wait_for_end, write_program
from tests.verify_documents import tuned
from tests.verify_guests import guest_files

TELLING = """#!/bin/sh
echo "$*" >>'{log}'
case "$*" in
  *domcapabilities*) exit 1 ;;
  *define\\ --validate*) exec sleep 600 ;;
esac
"""


def below(process: int) -> list[int]:
    """The processes that one has started, and they."""
    stated = []
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            stated += children.read_text().split()
    return [one for child in map(int, stated) for one in (child, *below(child))]


def names(process: int) -> dict[int, str]:
    found = {}
    for child in below(process):
        try:
            found[child] = Path(f"/proc/{child}/comm").read_text().strip()
        except OSError:
            continue
    return found


@pytest.mark.qemu
@pytest.mark.parametrize("kill", [signal.SIGTERM, signal.SIGKILL])
def test_a_kill_ends_the_stand_in_too(tmp_path: Path, kill: signal.Signals) -> None:
    if kill == signal.SIGKILL and shutil.which("setpriv") is None:
        pytest.skip("no setpriv here")
    guest_files()
    document = tmp_path / "vm.xml"
    document.write_bytes(tuned("pin-numa-pci").document)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = "from homenode.cli.main import main; main()"
    words = ("verify", str(document), "--host", "small-2n8c-2gpu", "--boot", "--connect", "none")
    with subprocess.Popen(
        [sys.executable, "-c", command, *words],
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as homenode:

        def guests() -> list[int]:
            found = names(homenode.pid).items()
            booting = any(scratch.glob("homenode-boot-*/argv"))
            return [child for child, name in found if booting and name.startswith("qemu-system")]

        wait_for(lambda: bool(guests()))
        guest = guests()[0]
        homenode.send_signal(kill)
        _, said = homenode.communicate(timeout=120)
    wait_for_end(guest)
    left = list(scratch.glob("homenode-boot-*"))
    if kill == signal.SIGTERM:
        assert homenode.returncode == 130 and not left, said
    else:
        assert len(left) == 1
        os.utime(left[0], (0, 0))
        end_abandoned(scratch, None)
        assert not left[0].exists()


def test_the_next_boot_ends_the_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    virsh = tmp_path / "virsh"
    write_program(virsh, TELLING.format(log=log))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    scratch = tmp_path / "scratch"
    left, running, fresh = (scratch / f"homenode-boot-{name}" for name in ("left", "runs", "new"))
    for directory in (left, running, fresh):
        directory.mkdir(parents=True)
        (directory / "domain").touch()
    (scratch / "homenode-boot-link").symlink_to(tmp_path)
    with RecordDirectory(running).hold_lock("in use"):
        for directory in (left, running):
            os.utime(directory, (0, 0))
        end_abandoned(scratch, None)
        assert left.exists()  # its domain may run, and no libvirt was given
        end_abandoned(scratch, "qemu:///system")
    assert not left.exists() and running.exists() and fresh.exists() and virsh.exists()
    said = [line.rpartition("system ")[2] for line in log.read_text().splitlines()]
    assert said == ["destroy homenode-verify-left"]
