"""Described machines, booted: homenode inside captures, discovers and plans what was described."""

from pathlib import Path

import pytest

from homenode.cpuset import CpuSet
from homenode.machine.topology import Host
from homenode.vm.sources import load_host
from tests.lab.boot import BootOutcome, boot, run_to_its_end, two_nodes
from tests.lab.virtual_host import Unbuildable, virtual_host

LAB = Path(__file__).parent / "lab"
MACHINES = [
    pytest.param(None, marks=(pytest.mark.qemu, pytest.mark.lab), id="2-nodes"),
    pytest.param(("x86-4p4n16c32t-ring", 512), marks=pytest.mark.lab, id="4-nodes"),
    pytest.param((str(LAB / "nps4-8n16c-4gpu.toml"), 512), marks=pytest.mark.lab, id="8-nodes"),
]


@pytest.fixture(scope="module", params=MACHINES)
def machine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Host, BootOutcome]:
    if request.param is None:
        return two_nodes(tmp_path_factory.getbasetemp())
    name, node_mib = request.param
    host = load_host(name)
    work = tmp_path_factory.mktemp("virtual-host")
    machine = virtual_host(host, node_mib=node_mib)
    return host, boot(machine, "program_capture", work, timeout_s=1800)


def test_homenode_finds_inside_what_was_described(machine: tuple[Host, BootOutcome]) -> None:
    host, booted = machine
    found = booted.report("host")
    assert found["distances"] == [list(row) for row in host.distances or ()]
    assert len(found["packages"]) == len(host.packages)
    assert [_count(core["pus"]) for core in found["cores"]] == [len(c.pus) for c in host.cores]
    assert found["summary"]["pus"] == sum(pu.online for pu in host.pus)
    sizes = [len(node.pus) for node in host.nodes]
    assert [_count(node["pus"]) for node in found["nodes"]] == sizes
    described = sorted((str(d.kind), d.node) for d in host.pci_devices if d.kind in ("gpu", "nic"))
    devices = [d for d in found["pci_devices"] if d["kind"] in ("gpu", "nic")]
    assert sorted((d["kind"], d["node"]) for d in devices) == described


def test_numactl_inside_says_the_same(machine: tuple[Host, BootOutcome]) -> None:
    host, booted = machine
    text = booted.report("numactl")
    for node in host.nodes:
        listed = next(x for x in text.splitlines() if x.startswith(f"node {node.index} cpus:"))
        assert len(listed.partition(":")[2].split()) == len(node.pus)


def test_the_plan_made_inside_puts_each_gpu_on_the_cell_of_its_node(
    machine: tuple[Host, BootOutcome],
) -> None:
    host, booted = machine
    plan = booted.report("plan")
    assert len(plan["vm"]["cells"]) == len(host.nodes)
    node_of_cell = {cell["id"]: cell["host_nodes"] for cell in plan["vm"]["cells"]}
    gpus = [d for d in host.pci_devices if d.kind == "gpu"]
    hostdevs = plan["vm"].get("hostdevs", [])
    assert len(hostdevs) == len(gpus)
    for device in hostdevs:
        assert node_of_cell[device["cell"]] == [device["host_node"]]


def _count(pus: str) -> int:
    return len(CpuSet.parse(pus))


def test_a_machine_that_does_not_end_is_killed_in_its_time(tmp_path: Path) -> None:
    console = tmp_path / "console"
    assert run_to_its_end(("sh", "-c", "echo up; exec sleep 60"), console, 0.5) is None
    assert console.read_text() == "up\n"
    assert run_to_its_end(("sh", "-c", "echo down"), console, 60) is not None


def test_a_machine_that_qemu_cannot_be_is_refused_by_name() -> None:
    for name in ("x86-2p2n8c8t-nodes-0-and-8", "x86-1p1n6c8t-hybrid"):
        with pytest.raises(Unbuildable, match=name):
            virtual_host(load_host(name), node_mib=512)


def test_a_machine_becomes_nodes_distances_and_a_bus_for_each_root_complex() -> None:
    made = virtual_host(load_host("epyc-nps4-gpu-nic"), node_mib=512)
    text = " ".join(made.arguments)
    assert text.count("pxb-pcie,") == 8
    assert "dist,src=0,dst=7,val=32" in text
    assert text.count("x3130-upstream") == 8
    assert set(made.node_of_device.values()) == set(range(8))
