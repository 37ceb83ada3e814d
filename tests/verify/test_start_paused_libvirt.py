"""A real domain is started paused by a real libvirt, looked at, and nothing of it is left."""

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from homenode.change.journal import default_root
from homenode.check.verify.boot.boot_directory import SYSTEM, find_uri
from homenode.check.verify.start import find_startable, verify_paused
from homenode.cpuset import CpuSet
from homenode.errors import UsageError
from homenode.process import ProgramResult, run
from homenode.vm.domain.read import read_vm
from homenode.vm.plan import with_vm
from tests.domain_plans import hand_plan

pytestmark = [pytest.mark.libvirt, pytest.mark.root]

DOCUMENT = """<domain type='qemu'>
  <name>{name}</name><memory unit='MiB'>64</memory>
  <memoryBacking><allocation mode='immediate'/></memoryBacking>
  <vcpu>2</vcpu>
  <cputune><vcpupin vcpu='0' cpuset='0'/><vcpupin vcpu='1' cpuset='1'/></cputune>
  <numatune><memory mode='strict' nodeset='0'/></numatune>
  <os><type arch='x86_64' machine='q35'>hvm</type>
    <loader readonly='yes' type='pflash'>/usr/share/OVMF/OVMF_CODE_4M.fd</loader></os>
  <features><acpi/></features>
  <cpu><numa><cell id='0' cpus='0' memory='32' unit='MiB'/>
    <cell id='1' cpus='1' memory='32' unit='MiB'/></numa></cpu>
  <devices><controller type='usb' model='none'/><memballoon model='none'/></devices>
</domain>
"""


def virsh(*words: str, input: str | None = None) -> ProgramResult:
    return run(("virsh", "-q", "-c", SYSTEM, *words), 120, input)


@pytest.fixture
def name() -> Iterator[str]:
    """A domain that is shut off."""
    if os.geteuid() != 0 or find_uri(None) is None or (os.cpu_count() or 1) < 2:
        pytest.skip(f"needs root, 2 CPUs and a libvirtd at {SYSTEM}")
    if not Path("/usr/share/OVMF/OVMF_CODE_4M.fd").exists():
        pytest.skip("no OVMF here")
    own = f"homenode-test-{uuid.uuid4().hex[:8]}"
    assert virsh("define", "/dev/stdin", input=DOCUMENT.format(name=own)).returncode == 0
    number = virsh("domuuid", own).stdout.strip()
    try:
        yield own
    finally:
        virsh("destroy", own)
        virsh("undefine", "--nvram", own)
        shutil.rmtree(default_root() / "paused" / number, ignore_errors=True)


def state(name: str) -> str:
    return virsh("domstate", name).stdout.strip()


def homenode(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "homenode", *words], capture_output=True, text=True, check=False
    )


def test_a_paused_start_proves_the_placement_and_leaves_nothing(name: str) -> None:
    files = Path("/var/lib/libvirt/qemu/nvram")
    before = sorted(files.iterdir())
    guest = read_vm(DOCUMENT.format(name=name).encode(), "vm.xml")
    wrong = with_vm(hand_plan(guest, "pin"), vcpu_pins=(CpuSet([1]), CpuSet([0])))
    seen = verify_paused(find_startable(SYSTEM, name), None, None)
    swapped = verify_paused(find_startable(SYSTEM, name), wrong, None)
    assert (state(name), sorted(files.iterdir())) == ("shut off", before)
    of_neighbours = ("busy", "floating", "pinned-there", "shared-core")  # VMs of other tests
    assert not [
        one
        for one in seen.findings
        if one.is_bad and not any(word in one.id for word in of_neighbours)
    ]
    stated = " | ".join(seen.checked)
    assert "QEMU is prelaunch" in stated
    assert "ram-node1: 32 MiB, policy bind, node 0" in stated
    assert "memory of cell 1 (node 0): 32 MiB on node 0" in stated
    moved = [one.subject for one in swapped.findings if one.id == "live-vcpu"]
    assert moved == ["vCPU 0", "vCPU 1"]


SERIAL = "<serial type='file'><source path='{}'/></serial></devices>"
ARGUMENT = (
    "</devices><commandline xmlns='http://libvirt.org/schemas/domain/qemu/1.0'>"
    "<arg value='-chardev'/><arg value='file,id=log,path={}'/></commandline>"
)
SHARED = "<shmem name='{}'><model type='ivshmem-plain'/><size unit='M'>1</size></shmem></devices>"


def log_of(name: str, added: str = SERIAL) -> Path:
    """A file that the domain's serial port then writes, or what else is added."""
    path = Path(f"/var/lib/libvirt/qemu/{name}.log")
    text = virsh("dumpxml", "--inactive", name).stdout
    text = text.replace("</devices>", added.format(path))
    assert virsh("define", "/dev/stdin", input=text).returncode == 0
    return path


@pytest.mark.nightly
def test_shared_memory_that_the_start_makes_is_removed(name: str) -> None:
    log_of(name, SHARED.replace("{}", name))
    verify_paused(find_startable(SYSTEM, name), None, None)
    assert not Path("/dev/shm", name).exists()


@pytest.mark.nightly
@pytest.mark.parametrize("added", [SERIAL, ARGUMENT])
def test_a_log_of_the_start_is_removed_and_a_full_one_refuses_it(name: str, added: str) -> None:
    log = log_of(name, added)
    verify_paused(find_startable(SYSTEM, name), None, None)
    assert not log.exists()
    try:
        log.write_text("what the guest said")
        with pytest.raises(UsageError, match="empties"):
            find_startable(SYSTEM, name)
    finally:
        log.unlink()


def test_a_vm_that_runs_is_refused(name: str) -> None:
    assert virsh("start", "--paused", name).returncode == 0
    with pytest.raises(UsageError, match="shut off"):
        find_startable(SYSTEM, name)
    assert state(name) == "paused"


def test_a_start_that_libvirt_refuses_is_named_and_leaves_no_open_step(name: str) -> None:
    look = find_startable(SYSTEM, name)
    text = virsh("dumpxml", "--inactive", name).stdout
    serial = "<serial type='dev'><source path='/dev/none'/></serial></devices>"
    gone = text.replace("</devices>", serial)
    assert virsh("define", "/dev/stdin", input=gone).returncode == 0
    assert [one.id for one in verify_paused(look, None, None).findings] == ["start-failed"]
    assert name not in homenode("restore", "--list").stdout


HELD = """
import sys
from homenode.check.verify import start as paused
paused._look = lambda *words: (print("paused", flush=True), sys.stdin.read())
paused.verify_paused(paused.find_startable("qemu:///system", sys.argv[1]), None, None)
"""
"""It says that the VM is paused, and waits there to be killed."""


@pytest.mark.parametrize("is_resumed", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_what_a_kill_leaves_is_listed_and_ended(is_resumed: bool, name: str) -> None:
    words = (sys.executable, "-c", HELD, name)
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"paused\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert state(name) == "paused"
    listed = homenode("restore", "--list").stdout
    assert f"{name}: start-paused" in listed and f"homenode restore {name}" in listed
    if is_resumed:
        assert virsh("resume", name).returncode == 0
    assert homenode("restore", name, "--yes").returncode == 0
    assert state(name) == ("running" if is_resumed else "shut off")
    assert name not in homenode("restore", "--list").stdout


@pytest.mark.nightly
def test_variables_that_a_guest_wrote_after_a_kill_are_left(name: str) -> None:
    words = (sys.executable, "-c", HELD, name)
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"paused\n"
    process.kill()
    process.communicate()
    virsh("destroy", name)
    variables = Path(f"/var/lib/libvirt/qemu/nvram/{name}_VARS.fd")
    with variables.open("r+b") as file:
        file.write(b"own")
    assert homenode("restore", name, "--yes").returncode == 0
    assert variables.exists()
