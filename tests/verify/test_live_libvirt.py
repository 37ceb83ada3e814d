"""A VM that a real libvirtd runs here, looked at from outside."""

import os
import uuid
from collections.abc import Iterator

import pytest

from homenode.check.verify.boot.boot_directory import SYSTEM, find_uri
from homenode.check.verify.live.capture import verify_running_domain
from homenode.cpuset import CpuSet
from homenode.findings import Finding, Findings
from homenode.process import run
from homenode.vm.domain.read import read_vm
from homenode.vm.plan import with_vm
from tests.domain_plans import hand_plan

pytestmark = [pytest.mark.libvirt, pytest.mark.root]

DOCUMENT = """<domain type='qemu'>
  <name>{name}</name>
  <maxMemory slots='2' unit='MiB'>512</maxMemory>
  <memory unit='MiB'>160</memory>
  <memoryBacking><allocation mode='immediate'/></memoryBacking>
  <vcpu current='2'>4</vcpu>
  <iothreads>1</iothreads>
  <cputune>
    <vcpupin vcpu='0' cpuset='{a}'/>
    <vcpupin vcpu='1' cpuset='{b}'/>
    <vcpupin vcpu='2' cpuset='{a}'/>
    <vcpupin vcpu='3' cpuset='{b}'/>
    <emulatorpin cpuset='{a}'/>
    <iothreadpin iothread='1' cpuset='{b}'/>
  </cputune>
  <numatune><memory mode='strict' nodeset='0'/></numatune>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <features><acpi/></features>
  <cpu mode='custom' match='exact' check='none'>
    <model>qemu64</model>
    <numa>
      <cell id='0' cpus='0-1' memory='64' unit='MiB'/>
      <cell id='1' cpus='2-3' memory='64' unit='MiB'/>
    </numa>
  </cpu>
  <devices>
    <controller type='usb' model='none'/>
    <memory model='dimm'><target><size unit='MiB'>32</size><node>1</node></target></memory>
    <memballoon model='none'/>
  </devices>
</domain>
"""


def virsh(*words: str) -> str:
    return run(("virsh", "-q", "-c", SYSTEM, *words), 120).stdout_or_raise()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[int]]]:
    """(name, two CPUs): a paused VM of 4 vCPUs, 2 of them offline, with a memory device."""
    pus = sorted(os.sched_getaffinity(0))
    if len(pus) < 2 or os.geteuid() != 0:
        pytest.skip("needs root and 2 CPUs")
    if find_uri(None) is None:
        pytest.skip(f"no libvirtd answers at {SYSTEM}")
    name = f"homenode-test-{uuid.uuid4().hex[:8]}"
    path = tmp_path_factory.mktemp("live") / "vm.xml"
    path.write_text(DOCUMENT.format(name=name, a=pus[0], b=pus[1]))
    started = run(("virsh", "-q", "-c", SYSTEM, "create", "--paused", str(path)), 120)
    if started.returncode:
        pytest.skip(f"this libvirtd starts no guests: {started.failure()}")
    yield name, pus
    virsh("destroy", name)


def of_the_vm(findings: Findings) -> list[Finding]:
    """Without what else runs on this machine while the tests do."""
    others = ("live-busy-neighbour", "live-pinned-process", "live-floating-vm", "live-shared-core")
    return [finding for finding in findings.findings if finding.id not in others]


def test_a_vm_as_its_document_has_it_has_nothing_wrong(running: tuple[str, list[int]]) -> None:
    found = verify_running_domain(running[0], SYSTEM)
    assert not of_the_vm(found), found.findings
    stated = " | ".join(found.checked)
    assert "2 vCPU threads, 4 to be pinned" in stated
    assert "memory of cell 1 (node 0): 64 MiB on node 0" in stated
    assert "memory device dimm0 (cell 1) (node 0): 32 MiB on node 0" in stated


def test_threads_off_their_plan_are_named(running: tuple[str, list[int]]) -> None:
    """vCPUs 0 and 1 are each on the CPU of the other one; 2 and 3 are offline."""
    name, (first, second, *_) = running
    guest = read_vm(DOCUMENT.format(name=name, a=first, b=second).encode(), "vm.xml")
    pins = tuple(CpuSet([pu]) for pu in (second, first, second, first))
    bare = hand_plan(guest, "pin")
    plan = with_vm(bare, vcpu_pins=pins, emulator_pus=CpuSet([second]), iothread_pins=())
    found = of_the_vm(verify_running_domain(name, SYSTEM, plan))
    vcpus = [(f.subject, f.expected, f.observed) for f in found if f.id == "live-vcpu"]
    assert vcpus == [
        ("vCPU 0", f"CPU {second}", f"CPU {first}"),
        ("vCPU 1", f"CPU {first}", f"CPU {second}"),
    ]
    assert any(f.id == "live-emulator" for f in found)
    assert not any(f.id.endswith("missing") for f in found)


def test_a_quota_that_is_set_while_it_runs_is_named(running: tuple[str, list[int]]) -> None:
    name = running[0]
    virsh("schedinfo", name, "--live", "--set", "vcpu_quota=2000")
    try:
        found = {(one.subject, one.observed[:2]) for one in named(name, "live-quota")}
        assert found == {("vCPU 0", "2%"), ("vCPU 1", "2%")}
    finally:
        virsh("schedinfo", name, "--live", "--set", "vcpu_quota=-1")
    assert not named(name, "live-quota")


def test_shares_that_are_set_while_it_runs_are_named(running: tuple[str, list[int]]) -> None:
    name = running[0]
    assert not named(name, "live-shares")
    virsh("schedinfo", name, "--live", "--set", "cpu_shares=2")
    assert named(name, "live-shares")


def named(name: str, id_: str) -> list[Finding]:
    return [one for one in verify_running_domain(name, SYSTEM).findings if one.id == id_]
