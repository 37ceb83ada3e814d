"""A drift of a VM that a real libvirtd runs is one alert, which goes away when it is undone."""

import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import homenode.apply.store
from homenode.apply.live_pins import apply_live_pins, restore_live_pins
from homenode.cli.replan import replan
from homenode.hypervisor.virsh import Virsh
from homenode.plan.options import PlanOptions
from homenode.process import run
from homenode.snapshot.live import LiveSnapshot
from homenode.sources import load_host
from homenode.tuning import tune
from homenode.verify.boot.libvirt import SYSTEM, answering
from homenode.watch.alert import Alert
from homenode.watch.observation import look

pytestmark = [pytest.mark.libvirt, pytest.mark.root]

DOCUMENT = """<domain type='qemu'>
  <name>{name}</name>
  <memory unit='MiB'>64</memory>
  <vcpu>1</vcpu>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <features><acpi/></features>
  <cpu mode='custom' match='exact' check='none'><model>qemu64</model></cpu>
  <devices>
    <controller type='usb' model='none'/>
    <memballoon model='none'/>
  </devices>
</domain>
"""


def virsh(*words: str) -> None:
    done = run(("virsh", "-q", "-c", SYSTEM, *words), 120)
    assert done.returncode == 0, done.failure()


@pytest.fixture(scope="module")
def vm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A defined VM that is tuned for this machine, and paused."""
    if len(os.sched_getaffinity(0)) < 2 or os.geteuid() != 0:
        pytest.skip("needs root and 2 PUs")
    if answering(None) is None:
        pytest.skip(f"no libvirtd answers at {SYSTEM}")
    folder = tmp_path_factory.mktemp("vm")
    name = f"homenode-test-{uuid.uuid4().hex[:8]}"
    plain = DOCUMENT.format(name=name).encode()
    define(folder, tune(plain, "vm.xml", PlanOptions("pin"), load_host(None)).document)
    started = run(("virsh", "-q", "-c", SYSTEM, "start", "--paused", name), 120)
    try:
        if started.returncode:
            pytest.skip(f"this libvirtd starts no guests: {started.failure()}")
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("homenode.apply.store.default_root", lambda: folder / "state")
            yield name
    finally:
        run(("virsh", "-q", "-c", SYSTEM, "destroy", name), 120)
        run(("virsh", "-q", "-c", SYSTEM, "undefine", name), 120)


def define(folder: Path, document: bytes) -> None:
    (folder / "vm.xml").write_bytes(document)
    virsh("define", str(folder / "vm.xml"))


def restart(name: str) -> None:
    virsh("destroy", name)
    virsh("start", "--paused", name)


def seen(name: str, but: str = "") -> tuple[Alert, ...]:
    """The alerts on a VM, without those that other VMs of this machine make while tests run.

    but: a VM that does count.
    """
    found = look(LiveSnapshot(), None, SYSTEM).state
    assert name in found.domains
    theirs = ("live-shared-core", "live-floating-vm", "live-pinned-there")
    return tuple(
        alert
        for alert in found.alerts
        if name in alert.domains
        and any(one.id not in theirs or (but and but in one.subject) for one in alert.findings)
    )


def test_a_vm_on_the_same_core_is_one_alert_until_it_is_gone(vm: str, tmp_path: Path) -> None:
    other = f"{vm}-other"
    assert seen(vm, other) == ()
    pinned = f"<cputune><vcpupin vcpu='0' cpuset='{pin(vm)}'/></cputune><os>"
    path = tmp_path / "other.xml"
    path.write_text(DOCUMENT.format(name=other).replace("<os>", pinned))
    try:
        virsh("create", "--paused", str(path))
        assert len(seen(vm, other)) == 1
    finally:
        virsh("destroy", other)
    assert seen(vm, other) == ()


def pin(name: str) -> str:
    """The PU of its vCPU, as its definition has it."""
    shown = run(("virsh", "-q", "-c", SYSTEM, "vcpupin", name, "--config"), 120).stdout
    return shown.split()[1]


def test_pins_that_virsh_moved_or_removed_are_one_alert_until_they_are_back(vm: str) -> None:
    planned = pin(vm)
    for pus in (str(1 - int(planned)), "0-1"):
        virsh("vcpupin", vm, "0", pus, "--live")
        (alert,) = seen(vm)
        assert (alert.id, alert.findings[0].observed) == ("drift-domain", f"PUs {pus}")
        virsh("vcpupin", vm, "0", planned, "--live")
        assert seen(vm) == ()


def test_pins_that_homenode_moved_in_this_run_are_no_alert(vm: str, tmp_path: Path) -> None:
    planned = pin(vm)
    shown = run(("virsh", "-q", "-c", SYSTEM, "dumpxml", "--inactive", vm), 120).stdout
    other = shown.replace(f"cpuset='{planned}'", f"cpuset='{1 - int(planned)}'", 1)
    root = homenode.apply.store.default_root()
    apply_live_pins(Virsh(SYSTEM), vm, other.encode(), root)
    try:
        assert seen(vm) == ()
        virsh("vcpupin", vm, "0", "0-1", "--live")
        assert [alert.id for alert in seen(vm)] == ["drift-domain"]
    finally:
        virsh("vcpupin", vm, "0", str(1 - int(planned)), "--live")
        restore_live_pins(Virsh(SYSTEM), vm, root)
    assert seen(vm) == ()


def test_a_vm_of_another_host_is_one_alert_until_it_is_planned_again(
    vm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = run(("virsh", "-q", "-c", SYSTEM, "dumpxml", "--inactive", vm), 120).stdout
    arrived = re.sub(r'( host=)"\w+"', r'\1"0123456789abcdef"', shown)
    assert arrived != shown
    virsh("destroy", vm)
    define(tmp_path, arrived.encode())
    virsh("start", "--paused", vm)
    (alert,) = seen(vm)
    assert alert.id == "plan-of-other-host"
    virsh("destroy", vm)
    replan(vm, yes=True)
    virsh("start", "--paused", vm)
    assert seen(vm) == ()
    # An edit of what homenode defined counts from the start that uses it.
    document = run(("virsh", "-q", "-c", SYSTEM, "dumpxml", "--inactive", vm), 120).stdout
    define(tmp_path, document.replace(f"cpuset='{pin(vm)}'", "cpuset='0-1'", 1).encode())
    assert seen(vm) == ()
    restart(vm)
    assert [alert.id for alert in seen(vm)] == ["drift-domain"]
    define(tmp_path, document.encode())
    restart(vm)
    assert seen(vm) == ()
