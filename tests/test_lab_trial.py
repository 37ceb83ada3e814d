"""A virtual host with an IOMMU: a trial of a VM with a disk of each of its nodes passed through."""

import re
from typing import Any

import pytest

from homenode.cpuset import CpuSet
from tests.lab.boot import HERE, boot_with_iommu, need_lab
from tests.lab.kernel_image import unpacked
from tests.probe_build import make
from tests.trial_guest import trial_initrd

pytestmark = pytest.mark.lab

NODES = [0, 1]
"""Nodes of the host: a disk is on each, and so is a cell of the VM."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    probe = make("homenode-probe-static").read_bytes()
    files = {
        "kernel": unpacked((need_lab() / "vmlinuz").read_bytes()),
        "initrd": trial_initrd({"homenode-probe": probe}),
        "probe": probe,
    }
    work = tmp_path_factory.mktemp("virtual-host")
    host = str(HERE / "small-2n8c-2nvme.toml")
    return boot_with_iommu("program_trial", work, host, files=files, timeout_s=5400).report("vm")


def test_the_trial_measures_its_boot_and_says_so(report: Any) -> None:
    assert report["code"] == 0, report["said"]
    done = [entry["what"] for entry in report["journal"] if "what" in entry]
    assert done == ["measuring", "measured", "ended"]
    steps = [(entry["kind"], entry["what"]) for entry in report["changes"] if "kind" in entry]
    assert steps == [
        ("layout", "begin"),
        ("layout", "done"),
        ("boot", "begin"),
        ("boot", "done"),  # started
        ("boot", "done"),  # and answered
        ("boot", "undoing"),
        ("boot", "undone"),
        ("layout", "undoing"),
        ("layout", "undone"),
    ]


def test_figures_of_an_emulated_guest_are_marked_and_give_no_verdict(report: Any) -> None:
    head, *samples, end = report["results"]
    assert head["origin"] == "emulated"
    assert samples
    assert end == {"end": len(samples)}
    assert "its results are meaningless" in report["said"]


def test_vcpus_and_memory_are_on_the_nodes_of_the_disks(report: Any) -> None:
    plan, seen = report["plan"], report["watched"]
    assert sorted(report["nodes"].values()) == NODES
    assert sorted(node for cell in plan["vm"]["cells"] for node in cell["host_nodes"]) == NODES
    for i, pin in enumerate(plan["vm"]["vcpu_pins"]):
        assert CpuSet.parse(seen["threads"][f"CPU {i}/TCG"]) == CpuSet.parse(pin)
    large = {
        (policy, int(node))
        for policy, _, by_node in seen["memory"]
        for node, pages in by_node.items()
        if pages > 256
    }
    assert large == {(f"bind:{node}", node) for node in NODES}


def test_the_guest_sees_each_disk_on_the_cell_of_its_node(report: Any) -> None:
    node_of_cell = {cell["id"]: cell["host_nodes"][0] for cell in report["plan"]["vm"]["cells"]}
    seen = [
        node_of_cell[device["node"]]
        for device in report["guest"]["pci_devices"]
        if device["kind"] == "nvme"
    ]
    assert sorted(seen) == NODES
    code, text = report["verified"]
    assert code == 0, text
    for disk in report["nodes"]:
        assert re.search(rf"^device {re.escape(disk)} .* equal\b", text, re.MULTILINE), text


def test_the_disks_have_their_driver_back(report: Any) -> None:
    before, after = report["drivers"]
    assert set(report["watched"]["drivers"].values()) == {"vfio-pci"}
    assert set(before.values()) == {"nvme"}
    assert after == before


def test_the_definition_is_the_original_byte_for_byte(report: Any) -> None:
    before, after = report["definitions"]
    assert after == before
    assert report["running"] == []
