"""A drift of a VM that a real libvirtd runs is one alert, which goes away when it is undone."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from homenode.plan.options import PlanOptions
from homenode.process import run
from homenode.snapshot.live import LiveSnapshot
from homenode.sources import load_host
from homenode.tuning import tune
from homenode.verify.boot.libvirt import SYSTEM, answering
from homenode.watch.observation import look
from homenode.watch.state import WatchState, changes

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


def start(folder: Path, name: str, document: bytes) -> None:
    path = folder / f"{name}.xml"
    path.write_bytes(document)
    started = run(("virsh", "-q", "-c", SYSTEM, "create", "--paused", str(path)), 120)
    if started.returncode:
        pytest.skip(f"this libvirtd starts no guests: {started.failure()}")


def destroy(name: str) -> None:
    run(("virsh", "-q", "-c", SYSTEM, "destroy", name), 120)


@pytest.fixture
def vm(tmp_path: Path) -> Iterator[str]:
    """A paused VM that is tuned for this machine."""
    if len(os.sched_getaffinity(0)) < 2 or os.geteuid() != 0:
        pytest.skip("needs root and 2 PUs")
    if answering(None) is None:
        pytest.skip(f"no libvirtd answers at {SYSTEM}")
    name = f"homenode-test-{uuid.uuid4().hex[:8]}"
    plain = DOCUMENT.format(name=name).encode()
    start(tmp_path, name, tune(plain, "vm.xml", PlanOptions("pin"), load_host(None)).document)
    yield name
    destroy(name)


def seen(name: str, other: str) -> WatchState:
    """A look at this machine, without what else runs on it while the tests do."""
    found = look(LiveSnapshot(), None, SYSTEM).state
    assert name in found.domains
    alerts = tuple(
        alert
        for alert in found.alerts
        if name in alert.domains and any(other in one.subject for one in alert.findings)
    )
    return WatchState(found.host, found.time_s, alerts, (name,))


def test_a_vm_on_the_same_core_is_one_alert_until_it_is_gone(vm: str, tmp_path: Path) -> None:
    other = f"{vm}-other"
    healthy = seen(vm, other)
    assert healthy.alerts == ()
    pid = Path(f"/run/libvirt/qemu/{vm}.pid").read_text().strip()
    tasks = Path(f"/proc/{pid}/task").iterdir()
    (thread,) = [int(one.name) for one in tasks if (one / "comm").read_text().startswith("CPU 0/")]
    (pu,) = os.sched_getaffinity(thread)
    pinned = f"<cputune><vcpupin vcpu='0' cpuset='{pu}'/></cputune><os>"
    try:
        start(tmp_path, other, DOCUMENT.format(name=other).replace("<os>", pinned).encode())
        drifted = seen(vm, other)
    finally:
        destroy(other)
    assert len(changes(healthy, drifted).raised) == 1
    assert changes(drifted, seen(vm, other)).cleared == drifted.alerts
