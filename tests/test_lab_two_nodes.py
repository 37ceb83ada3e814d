"""A virtual host with 2 nodes: two VMs placed, started and checked in it, by homenode inside."""

import pytest

from homenode.cpuset import CpuSet
from tests.lab.boot import BootOutcome, two_nodes

pytestmark = [pytest.mark.qemu, pytest.mark.lab]


@pytest.fixture(scope="module")
def booted(tmp_path_factory: pytest.TempPathFactory) -> BootOutcome:
    return two_nodes(tmp_path_factory.getbasetemp())[1]


def pus(text: str) -> CpuSet:
    return CpuSet.parse(text)


@pytest.mark.parametrize("name", ["first", "second"])
def test_each_vcpu_runs_where_it_was_planned(booted: BootOutcome, name: str) -> None:
    report = booted.report(name)
    pins = report["plan"]["vm"]["vcpu_pins"]
    found = [report["threads"][f"CPU {i}/TCG"] for i in range(len(pins))]
    assert [pus(text) for text in found] == [pus(text) for text in pins]
    emulator = pus(report["plan"]["vm"]["emulator_pus"])
    assert pus(report["threads"]["qemu-system-x86"]) <= emulator


@pytest.mark.parametrize(("name", "page_kib"), [("first", 4), ("second", 2048)])
def test_every_page_of_every_cell_is_on_the_planned_node_on_both_nodes(
    booted: BootOutcome, name: str, page_kib: int
) -> None:
    report = booted.report(name)
    cells = report["plan"]["vm"]["cells"]
    assert sorted(cell["host_nodes"] for cell in cells) == [[0], [1]]
    wanted = {
        (f"bind:{cell['host_nodes'][0]}", page_kib, cell["host_nodes"][0], cell["memory_bytes"])
        for cell in cells
    }
    found = {
        (policy, size_kib, int(node), pages * size_kib * 1024)
        for policy, size_kib, by_node in report["memory"]
        for node, pages in by_node.items()
        if pages * size_kib > 1024
    }
    assert found == wanted


def test_verify_live_says_where_the_memory_is(booted: BootOutcome) -> None:
    for name in ("first", "second"):
        checked = booted.report(f"{name}.PLAN")["checked"]
        assert "memory of cell 1 (node 1): 32 MiB on node 1" in checked


def test_two_vms_share_no_core(booted: BootOutcome) -> None:
    first, second = (booted.report(name) for name in ("first", "second"))
    in_use = [pus(text) for r in (first, second) for text in r["plan"]["vm"]["vcpu_pins"]]
    assert sum(map(len, in_use)) == 6
    assert len({pu for pin in in_use for pu in pin}) == 6
    for mine, other in ((first, second), (second, first)):
        theirs = {pu for text in other["plan"]["vm"]["vcpu_pins"] for pu in pus(text)}
        assert not theirs & set(pus(mine["plan"]["vm"]["emulator_pus"]))


@pytest.mark.parametrize("name", ["first", "second"])
def test_verify_live_finds_nothing_wrong(booted: BootOutcome, name: str) -> None:
    answer = booted.report(f"{name}.PLAN")
    bad = [f for f in answer["findings"] if f["severity"] in ("critical", "warning")]
    assert not [f for f in bad if f["id"] != "live-busy-neighbour"]


def test_verify_live_finds_a_vcpu_of_another_vm_on_its_cores(booted: BootOutcome) -> None:
    found = [(f["id"], f["subject"]) for f in booted.report("moved")["findings"]]
    assert any(what == "live-floating-vm" and "'second'" in who for what, who in found)
