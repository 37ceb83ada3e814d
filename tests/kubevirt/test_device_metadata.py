"""The node of a device that sysfs does not give comes from the metadata of its DRA claim."""

import json
from typing import Any

import pytest

from homenode.bdf import Bdf
from homenode.cluster.kubevirt.needed_host import BASE, claimed_nodes
from homenode.cluster.kubevirt.placing import place_devices
from homenode.machine.snapshot.memory import MemorySnapshot
from tests.kubevirt_documents import document, small_host


def metadata(bdf: str, node: Any) -> str:
    attributes = {
        "resource.kubernetes.io/pciBusID": {"string": bdf},
        "resource.kubernetes.io/pcieRoot": {"string": "pci0000:40"},
        "resource.kubernetes.io/numaNode": {"int": node},
    }
    device = {"driver": "gpu.example", "pool": "p", "name": "d", "attributes": attributes}
    return json.dumps(
        {
            "apiVersion": "metadata.resource.k8s.io/v1alpha1",
            "kind": "DeviceMetadata",
            "requests": [{"name": "gpu", "devices": [device]}],
        }
    )


def with_claim(host: MemorySnapshot, text: str, kind: str = "resourceclaims") -> MemorySnapshot:
    path = f"{BASE}/{kind}/claim/gpu/gpu.example-metadata.json"
    return MemorySnapshot("host", {**host.files, path: text}, host.links)


@pytest.mark.parametrize("kind", ["resourceclaims", "resourceclaimtemplates"])
def test_a_device_without_a_node_in_sysfs_is_placed_by_its_claim(kind: str) -> None:
    silent = small_host({"01:00.0": -1, "02:00.0": 1})
    xml = document(["01:00.0", "02:00.0"]).encode()
    without = place_devices(xml, silent)
    assert "expected a host NUMA node" in without.notes[0]
    placed = place_devices(xml, with_claim(silent, metadata("0000:01:00.0", 0), kind))
    assert placed.notes == ("placed 2 PCI functions: 1 on cell 0, 1 on cell 1",)


def test_a_file_of_several_versions_is_read_up_to_the_first_that_is_known() -> None:
    newer = '{"apiVersion": "metadata.resource.k8s.io/v9", "kind": "DeviceMetadata", "spec": {}}'
    host = with_claim(small_host({}), f"{newer}\n{metadata('0000:01:00.0', 1)}\n{newer}\n")
    assert claimed_nodes(host) == {Bdf.parse("01:00.0"): 1}
    cut = with_claim(small_host({}), f'{newer} {{"requests": ')
    assert claimed_nodes(cut) == {}


def test_sysfs_goes_before_the_claim() -> None:
    host = small_host({"01:00.0": 1})
    xml = document(["01:00.0"]).encode()
    stated = with_claim(host, metadata("0000:01:00.0", 0))
    assert place_devices(xml, stated).document == place_devices(xml, host).document


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"requests": 1}',
        metadata("x", 0),
        metadata("0000:01:00.0", "0"),
        metadata("0000:01:00.0", -1),
        metadata("0000:01:00.0", True),
    ],
)
def test_metadata_that_says_nothing_is_passed_over(text: str) -> None:
    host = with_claim(small_host({"01:00.0": -1}), text)
    assert claimed_nodes(host) == {}
    assert (
        "expected a host NUMA node" in place_devices(document(["01:00.0"]).encode(), host).notes[0]
    )


def test_a_node_that_the_host_does_not_have_is_none() -> None:
    host = with_claim(small_host({"01:00.0": -1}), metadata("0000:01:00.0", 7))
    assert claimed_nodes(host) == {Bdf.parse("0000:01:00.0"): 7}
    assert (
        "expected a host NUMA node" in place_devices(document(["01:00.0"]).encode(), host).notes[0]
    )
