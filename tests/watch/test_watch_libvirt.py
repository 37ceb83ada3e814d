"""A drift of a VM that a real libvirtd runs is one alert, which goes away when it is undone."""

import os
import re
import stat
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

import pytest

import homenode.change.journal
from homenode.change.apply.live_pins import apply_live_pins, restore_live_pins
from homenode.check.verify.boot.libvirt import SYSTEM, answering
from homenode.check.watch import observation
from homenode.check.watch.alert import KIND, Alert, WatchState, changes
from homenode.check.watch.claim import ClaimState
from homenode.check.watch.observation import look
from homenode.formats import decode
from homenode.machine.snapshot.live import LiveSnapshot
from homenode.plan.tuning import tune
from homenode.process import run
from homenode.trusted_path import changeable
from homenode.vm.hypervisor.virsh import Virsh
from homenode.vm.plan_options import PlanOptions
from homenode.vm.sources import load_host
from tests.command_line import apply
from tests.systemd_namespace import OUTSIDE, systemd

ROOT = Path(__file__).parents[2]
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
            patched.setattr("homenode.change.journal.default_root", lambda: folder / "state")
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
        assert (alert.id, alert.findings[0].observed) == ("drift-domain", f"PU 0 -> {pus}")
        virsh("vcpupin", vm, "0", planned, "--live")
        assert seen(vm) == ()


SETTINGS = {
    "shares": (("schedinfo", "--live", "cpu_shares=2"), ("schedinfo", "--live", "cpu_shares=1024")),
    "quota": (("schedinfo", "--live", "vcpu_quota=5000"), ("schedinfo", "--live", "vcpu_quota=-1")),
    "emulator": (
        ("schedinfo", "--live", "emulator_quota=2000"),
        ("schedinfo", "--live", "emulator_quota=-1"),
    ),
    "memory": (
        ("memtune", "--live", "--soft-limit", "8000"),
        ("memtune", "--live", "--soft-limit", "-1"),
    ),
    "IOThread": (("iothreadadd", "--live", "--id", "7"), ("iothreaddel", "--live", "--id", "7")),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_limit_or_a_thread_that_was_added_is_one_alert_until_it_is_gone(
    name: str, vm: str
) -> None:
    (command, *words), (back, *backwards) = SETTINGS[name]
    virsh(command, vm, *words)
    before = look(LiveSnapshot(), None, SYSTEM).state
    (alert,) = seen(vm)
    assert alert.findings[0].id in ("drift-settings", "cpu-quota")
    blind = look(Blind(), None, SYSTEM, before).state
    assert not [one for one in changes(before, blind).cleared if one.vm == vm]
    virsh(back, vm, *backwards)
    assert seen(vm) == ()
    assert [
        one
        for one in changes(blind, look(LiveSnapshot(), None, SYSTEM, blind).state).cleared
        if one.vm == vm
    ]


class Blind(LiveSnapshot):
    """No libvirt answers."""

    def command_output(self, name: str) -> str | None:
        return None if name.startswith("virsh") else super().command_output(name)


def test_a_record_that_was_taken_out_is_stale_where_libvirt_does_not_answer(
    vm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As after homenode apply there: of another connection nothing was applied.
    monkeypatch.setattr(observation, "_is_applied", lambda _, connect: connect == SYSTEM)
    key = (vm, "urn:homenode:layout:1", "--live")
    record = run(("virsh", "-c", SYSTEM, "metadata", *key[:2], "--config"), 120).stdout
    virsh("metadata", *key, "--remove")
    try:
        drifted = look(LiveSnapshot(), None, SYSTEM).state
        assert "drift-settings" in {one.id for one in drifted.alerts if vm in one.domains}
        nowhere = f"qemu+unix:///system?socket={tmp_path}/none"
        unknown = look(LiveSnapshot(), None, nowhere, drifted).state
        assert [
            claim.state for alert in unknown.alerts for claim in alert.claims if claim.vm == vm
        ] == [ClaimState.STALE]
    finally:
        virsh("metadata", *key, "--key", "homenode", "--set", record.replace("\n", ""))
    back = look(LiveSnapshot(), None, SYSTEM, unknown).state
    assert "drift-settings" in {one.id for one in changes(unknown, back).cleared}


def test_a_running_vm_that_was_undefined_is_one_alert_until_it_is_defined(
    vm: str, tmp_path: Path
) -> None:
    definition = run(("virsh", "-c", SYSTEM, "dumpxml", "--inactive", vm), 120).stdout.encode()
    before = look(LiveSnapshot(), None, SYSTEM).state
    assert vm in before.defined
    virsh("undefine", vm)
    try:
        gone = look(LiveSnapshot(), None, SYSTEM, before).state
        assert [one.id for one in changes(before, gone).raised if vm in one.domains] == [
            "drift-definition"
        ]
        still = look(LiveSnapshot(), None, SYSTEM, gone).state
        assert not changes(gone, still)
    finally:
        define(tmp_path, definition)
    back = look(LiveSnapshot(), None, SYSTEM, still).state
    assert vm in back.defined
    assert [one.id for one in changes(still, back).cleared] == ["drift-definition"]


def test_pins_that_homenode_moved_in_this_run_are_no_alert(vm: str, tmp_path: Path) -> None:
    planned = pin(vm)
    shown = run(("virsh", "-q", "-c", SYSTEM, "dumpxml", "--inactive", vm), 120).stdout
    other = shown.replace(f"cpuset='{planned}'", f"cpuset='{1 - int(planned)}'", 1)
    root = homenode.change.journal.default_root()
    apply_live_pins(Virsh(SYSTEM), vm, other.encode(), root)
    try:
        assert seen(vm) == ()
        virsh("vcpupin", vm, "0", "0-1", "--live")
        assert [alert.id for alert in seen(vm)] == ["drift-domain"]
    finally:
        virsh("vcpupin", vm, "0", str(1 - int(planned)), "--live")
        restore_live_pins(Virsh(SYSTEM), vm, root)
    assert seen(vm) == ()


def test_the_unit_with_its_few_rights_sees_of_a_vm_what_root_sees(vm: str) -> None:
    """Run by a systemd of its own, as PID 1. Its processes are others than this machine's, which
    the unit is shown; and homenode is this checkout's, which may lie in a home."""
    if (why := changeable((ROOT,))) is not None:
        pytest.skip(f"a unit of root's runs nothing from there: {why}")
    here = look(LiveSnapshot(), None, SYSTEM).state
    text = (ROOT / "packaging/systemd/homenode-watch.service").read_text()
    program = f"{sys.prefix}/bin/homenode"
    textfile = "/var/lib/prometheus/node-exporter/homenode.prom"
    shown = f"{OUTSIDE}:/proc {sys.prefix} {sys.base_prefix} {ROOT}"
    settings = (
        f"ExecStart=\nExecStart={program} watch --textfile {textfile}\n"
        f"ProtectHome=tmpfs\nBindReadOnlyPaths={shown}\n"
    )
    with systemd("/var/lib/homenode", "/var/lib/prometheus/node-exporter") as system:
        metrics = system.root / textfile[1:]
        os.chown(metrics.parent, 65534, 65534)
        result, status, said = system.start("homenode-watch.service", text, settings)
        assert result == "success", said
        assert status == bool(here.alerts)
        content = (system.root / "var/lib/homenode/watch/watch.json").read_bytes()
        seen_there = decode(content, KIND, WatchState, "watch.json")
        assert "homenode_" in metrics.read_text()
        assert stat.S_IMODE(metrics.stat().st_mode) == 0o644
    assert vm in seen_there.domains
    assert seen_there.not_read == here.not_read
    assert [one.id for one in seen_there.alerts] == [one.id for one in here.alerts]


FORBIDDEN = (
    "touch /etc/homenode-test",
    "touch /usr/homenode-test",
    "touch /var/homenode-test",
    "echo 1 > /sys/devices/system/node/node0/compact",
    "echo 0 > /proc/sys/kernel/printk",
    "mkdir $(dirname $(find /sys/fs/cgroup -name cgroup.procs | head -n 1))/homenode-test",
    "ls -A /root /home | grep ^[^/]",
    "mount -t tmpfs none /mnt",
    "mount -o remount,rw /usr",
    "unshare --user true",
    "unshare --net true",
    "setpriv --reuid=1 true",
    "chroot / true",
    "dmesg",
    "date -s 2020-01-01",
    "hostname x",
    "taskset 1 true",
    "head -c1 /dev/mem",
    "head -c1 /dev/vda",
    "mknod /var/lib/homenode/disk b 254 0",
    "chown 1 /var/lib/homenode/mine",
    "chmod u+s /var/lib/homenode/mine",
    ": > /dev/udp/127.0.0.1/9",
    "personality=$(setarch i686 true)",
)


def test_the_unit_can_do_nothing_else() -> None:
    text = (ROOT / "packaging/systemd/homenode-watch.service").read_text()
    with systemd("/var/lib/homenode", "/run/script") as system:
        lines = [f"( {one} ) >/dev/null 2>&1 && echo {quote(one)}" for one in FORBIDDEN]
        script = "\n".join(("touch /var/lib/homenode/mine", *lines, "exit 0"))
        (system.root / "run/script/try").write_text(script)
        run = "ExecStart=\nExecStart=/bin/bash /run/script/try\n"
        assert system.start("homenode-watch.service", text, run) == ("success", 0, "")
        assert (system.root / "var/lib/homenode/mine").exists()
        sizes = "ExecStart=\nExecStart=/bin/sh -c 'cat /sys/bus/pci/devices/*/config | wc -c'\n"
        functions = len(list(Path("/sys/bus/pci/devices").iterdir()))
        assert int(system.start("homenode-watch.service", text, sizes)[2]) >= functions * 256


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
    apply([vm], yes=True)
    virsh("start", "--paused", vm)
    assert seen(vm) == ()
    # An edit of what homenode defined is a warning now, and drift from the start that uses it.
    document = run(("virsh", "-q", "-c", SYSTEM, "dumpxml", "--inactive", vm), 120).stdout
    define(tmp_path, document.replace(f"cpuset='{pin(vm)}'", "cpuset='0-1'", 1).encode())
    assert [alert.id for alert in seen(vm)] == ["drift-definition"]
    restart(vm)
    assert [alert.id for alert in seen(vm)] == ["drift-domain"]
    define(tmp_path, document.encode())
    restart(vm)
    assert seen(vm) == ()
