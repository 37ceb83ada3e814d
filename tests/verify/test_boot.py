"""A booted stand-in says what its document really gives a guest.

Every guest that a test needs is booted once, two at a time, and the tests look at what they said.
"""

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

import pytest

from homenode.check.verify.boot.boot_directory import find_uri
from homenode.check.verify.boot.guest_files import can_use_kvm, pack_initramfs
from homenode.check.verify.boot.stand_in import TWO_GUESTS_TEXT
from homenode.check.verify.boot.stand_in_boot import BootOptions, BootOutcome, boot_stand_in
from homenode.check.verify.expectation import build_expectation
from homenode.check.verify.guest_checks import GuestView, compare_test_guest
from homenode.cpuset import CpuSet
from homenode.plan.pipeline import PlannedFile, plan_file
from homenode.process import run
from homenode.vm.domain.read import build_vm, open_domain
from homenode.vm.plan import Plan, vm_as_it_runs
from homenode.vm.plan_options import PlanOptions
from homenode.vm.sources import load_host
from tests.nccl_documents import check_bus_numbers
from tests.processes import write_program
from tests.verify_documents import DEVICES, PLAIN, changed, swapped, tuned
from tests.verify_guests import guest_files

pytestmark = pytest.mark.qemu

GOOD = ("pin-numa", "pin-numa-pci")
FIRST = "pin-numa-pci"
"""What `make test` boots; tests marked nightly look at the other documents."""

SKYLAKE = "<cpu mode='custom' match='exact'><model fallback='allow'>Skylake-Server</model></cpu>"
SIBLINGS = changed(
    PLAIN[: PLAIN.index(b"    <hostdev")] + b"  </devices>\n</domain>\n",
    ("<cpu mode='host-passthrough'/>", SKYLAKE),
)


def with_siblings() -> PlannedFile:
    """4 vCPUs as 2 cores with siblings on one node, with a model that gives them under TCG too."""
    options = PlanOptions(layout="pin-numa-smt", keep_vcpus=True)
    return plan_file(SIBLINGS, "vm.xml", options, load_host("x86-2p2n16c32t-isolated-pus"))


OFFLINE = "".join(
    f"<vcpu id='{vcpu}' enabled='{'no' if vcpu == 1 else 'yes'}' "
    f"hotpluggable='{'yes' if vcpu else 'no'}'/>"
    for vcpu in range(6)
)


def with_missing_apic_ids() -> PlannedFile:
    """6 vCPUs, 3 cores a socket, of which one is offline: no vCPU has the APIC ids 1 and 3."""
    xml = changed(PLAIN, (">4</vcpu>", f">6</vcpu><vcpus>{OFFLINE}</vcpus>"))
    return tuned("pin-numa-pci", xml)


def documents() -> dict[str, tuple[bytes, Plan]]:
    """What is booted, by name, each with the plan that it should match."""
    right = tuned("pin-numa-pci")
    siblings, missing = with_siblings(), with_missing_apic_ids()
    moved = swapped(right.document, "bus='0x03' slot", "bus='0x04' slot")
    wrong = ("<sibling id='1' value='20'/>", "<sibling id='1' value='42'/>")
    flat = changed(siblings.document, ("cores='2' threads='2'", "cores='4' threads='1'"))
    return {
        **{layout: (tuned(layout).document, tuned(layout).plan) for layout in GOOD},
        "devices moved and a distance wrong": (changed(moved, wrong), right.plan),
        "cells swapped": (swapped(right.document, "cpus='0,1'", "cpus='2,3'"), right.plan),
        "APIC ids missing": (missing.document, missing.plan),
        "siblings": (siblings.document, siblings.plan),
        "siblings missing": (flat, siblings.plan),
    }


def boot(xml: bytes, connect: str) -> BootOutcome:
    document = open_domain(xml, "vm.xml")
    return boot_stand_in(document, build_vm(document), BootOptions(connect=connect, timeout_s=600))


@pytest.fixture(scope="module")
def booted(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[BootOutcome]]]:
    guest_files()
    tests = (item for item in request.session.items if item.path == request.path)
    wanted = {"nightly" in item.keywords for item in tests}
    with ThreadPoolExecutor(2) as pool:
        yield {
            name: pool.submit(boot, xml, "none")
            for name, (xml, _) in documents().items()
            if (name != FIRST) in wanted
        }


def view(booted: dict[str, Future[BootOutcome]], name: str) -> GuestView:
    outcome = booted[name].result()
    assert outcome.guest is not None, outcome.findings
    xml, plan = documents()[name]
    facts = build_vm(open_domain(xml, "vm.xml"))
    expected = build_expectation(vm_as_it_runs(plan, facts), document=facts)
    return compare_test_guest(expected, outcome.stand_in, outcome.guest)


def node_of_device(seen: GuestView) -> dict[str, str]:
    """Host device -> the node that the guest's kernel says."""
    return {
        line.subject.removeprefix("device "): line.observed.partition(",")[0]
        for line in seen.checks
        if line.subject.startswith("device ")
    }


def named(seen: GuestView) -> set[tuple[str, str]]:
    """(id, subject) of what is critical or a warning."""
    return {(f.id, f.subject) for f in seen.findings if f.severity in ("critical", "warning")}


@pytest.mark.nightly
def test_without_expanders_no_device_has_a_node(booted: dict[str, Future[BootOutcome]]) -> None:
    seen = view(booted, "pin-numa")
    assert node_of_device(seen) == dict.fromkeys(DEVICES, "numa_node -1")
    assert not named(seen)


def test_with_expanders_each_device_has_its_node(booted: dict[str, Future[BootOutcome]]) -> None:
    seen = view(booted, "pin-numa-pci")
    assert node_of_device(seen) == dict(zip(DEVICES, ("numa_node 0", "numa_node 1"), strict=True))
    assert not named(seen)
    assert len(seen.observation.nodes) == 2


def test_each_bus_has_the_number_that_nccl_is_told(booted: dict[str, Future[BootOutcome]]) -> None:
    xml, _ = documents()["pin-numa-pci"]
    check_bus_numbers(xml, booted["pin-numa-pci"].result(), device_count=2)


@pytest.mark.nightly
def test_a_guest_with_an_offline_vcpu_comes_up(booted: dict[str, Future[BootOutcome]]) -> None:
    """QEMU's own APICs find no vCPU behind a missing APIC id by its logical destination."""
    seen = view(booted, "APIC ids missing")
    assert not named(seen)
    assert len(seen.observation.vcpus) == 5
    assert [len(node.pus) for node in seen.observation.nodes] == [2, 3]


def test_siblings_of_another_model_are_inconclusive(booted: dict[str, Future[BootOutcome]]) -> None:
    seen = view(booted, "pin-numa-pci")
    doubts = {f.subject: f.observed for f in seen.findings}
    if booted["pin-numa-pci"].result().stand_in.cpu.substituted is None:
        assert not doubts  # KVM works here
    else:
        assert set(doubts) == {"siblings", "L3 caches"}
        assert all("its CPU model is" in observed for observed in doubts.values())


@pytest.mark.nightly
def test_moved_devices_and_distances_are_named(booted: dict[str, Future[BootOutcome]]) -> None:
    assert named(view(booted, "devices moved and a distance wrong")) == {
        ("guest-device-node", f"device {DEVICES[0]}"),
        ("guest-device-node", f"device {DEVICES[1]}"),
        ("guest-distances", "distances from cell 0"),
    }


@pytest.mark.nightly
def test_swapped_cells_swap_the_nodes_of_devices(booted: dict[str, Future[BootOutcome]]) -> None:
    assert named(view(booted, "cells swapped")) == {
        ("guest-device-node", f"device {bdf}") for bdf in DEVICES
    }


@pytest.mark.nightly
def test_a_busless_window_loses_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As one guest would have it that has more vCPUs than QEMU emulates fast with a PCIe tree."""
    if shutil.which("qemu-system-x86_64") is None:
        pytest.skip("no qemu-system-x86_64 here")
    monkeypatch.setattr("homenode.check.verify.boot.stand_in.MAX_TOGETHER", 2)
    right = tuned("pin-numa-pci")
    document = open_domain(changed(right.document, ("busNr='248'", "busNr='241'")), "vm.xml")
    facts = build_vm(document)
    options = BootOptions("none", timeout_s=600, keep=tmp_path)
    outcome = boot_stand_in(document, facts, options)
    assert outcome.guest is not None, outcome.findings
    expected = build_expectation(vm_as_it_runs(right.plan, facts), document=facts)
    seen = compare_test_guest(expected, outcome.stand_in, outcome.guest)
    assert named(seen) == {("guest-device-missing", f"device {DEVICES[0]}")}
    assert seen.observation.vcpus == CpuSet(range(4))
    if TWO_GUESTS_TEXT in outcome.stand_in.left_out:
        assert {path.name for path in tmp_path.iterdir()} == {"vcpus", "pcie"}


@pytest.mark.nightly
def test_siblings_are_exact_with_an_intel_model(booted: dict[str, Future[BootOutcome]]) -> None:
    right = view(booted, "siblings")
    assert not right.findings, right.findings
    assert len(right.observation.guest.cores) == 2


@pytest.mark.nightly
def test_missing_siblings_are_named(booted: dict[str, Future[BootOutcome]]) -> None:
    assert ("guest-siblings", "siblings") in named(view(booted, "siblings missing"))


def test_what_qemu_refuses_is_named_with_its_words() -> None:
    if shutil.which("qemu-system-x86_64") is None:
        pytest.skip("no qemu-system-x86_64 here")
    xml = changed(tuned("pin-numa-pci").document, ("busNr='248'", "busNr='240'"))
    outcome = boot(xml, "none")
    assert outcome.guest is None
    assert [f.id for f in outcome.findings] == ["guest-cannot-start"]
    assert "Bus 240 is already in use" in outcome.findings[0].observed


ENDLESS = """#!/bin/sh
case "$*" in
  *'-machine help'*) printf 'Supported machines are:\\nq35 PC\\n'; exit 0 ;;
  *pxb-pcie*) echo 'Bus 240 is already in use' >&2; exit 1 ;;
esac
exec sleep 60
"""


def test_a_refusal_is_named_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = guest_files(fake_qemu=True)
    can_use_kvm(files.kernel, pack_initramfs(files.busybox))  # kept: the program below is not asked
    write_program(tmp_path / "qemu-system-x86_64", ENDLESS)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("homenode.check.verify.boot.stand_in.MAX_TOGETHER", 2)
    document = open_domain(tuned("pin-numa-pci").document, "vm.xml")
    outcome = boot_stand_in(document, build_vm(document), BootOptions("none", timeout_s=1))
    assert outcome.guest is None
    assert [finding.id for finding in outcome.findings] == ["guest-cannot-start"]
    assert "Bus 240 is already in use" in outcome.findings[0].observed


@pytest.mark.nightly
def test_endless_libvirt_leaves_it_to_qemu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its virsh takes everything, offers no KVM, and its guests run for ever."""
    if shutil.which("qemu-system-x86_64") is None:
        pytest.skip("no qemu-system-x86_64 here")
    text = '#!/bin/sh\ncase "$*" in *domcapabilities*) exit 1 ;; esac\n'
    write_program(tmp_path / "virsh", text)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    document = open_domain(tuned("default").document, "vm.xml")
    options = BootOptions(connect="qemu:///system", timeout_s=300, libvirt_timeout_s=1)
    outcome = boot_stand_in(document, build_vm(document), options)
    assert outcome.guest is not None and outcome.how.startswith("QEMU without libvirt")
    (finding,) = outcome.findings
    assert finding.id == "libvirt-could-not-start" and "power off within 1 s" in finding.observed
    facts = build_vm(document)
    expected = build_expectation(vm_as_it_runs(tuned("default").plan, facts), document=facts)
    seen = compare_test_guest(expected, outcome.stand_in, outcome.guest)
    assert node_of_device(seen) == dict.fromkeys(DEVICES, "numa_node -1") and not named(seen)


@pytest.mark.libvirt
def test_libvirt_boots_the_stand_in_and_leaves_nothing_behind(tmp_path: Path) -> None:
    uri = find_uri(os.environ.get("HOMENODE_LIBVIRT_URI"))
    if uri is None:
        pytest.skip("no libvirtd answers at qemu:///system")
    tuning = tuned("pin-numa-pci")
    document = open_domain(tuning.document, "vm.xml")
    facts = build_vm(document)
    options = BootOptions(connect=uri, keep=tmp_path / "kept", timeout_s=600)
    outcome = boot_stand_in(document, facts, options)
    said = {f.id: f.observed for f in outcome.findings}
    if "libvirt-could-not-start" in said:
        pytest.skip(f"this libvirtd starts no guests: {said['libvirt-could-not-start']}")
    assert outcome.how.startswith("libvirt at") and outcome.guest is not None
    expected = build_expectation(vm_as_it_runs(tuning.plan, facts), document=facts)
    assert not named(compare_test_guest(expected, outcome.stand_in, outcome.guest))
    name = ElementTree.parse(tmp_path / "kept" / "domain.xml").findtext("name")
    listed = run(("virsh", "-q", "-c", uri, "list", "--all", "--name"), 30).stdout
    assert name is not None and name not in listed.split()
