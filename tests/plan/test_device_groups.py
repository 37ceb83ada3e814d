"""IOMMU groups that a plan passes in part, and devices of a one-node host."""

import pytest
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.machine.topology import Host
from homenode.plan.planner import plan
from homenode.plan.search.place import place
from homenode.vm.sources import load_host
from tests.small_hosts import DeviceSpec, even_host, small_request

GPU, AUDIO = Bdf.parse("01:00.0"), Bdf.parse("01:00.1")


def incomplete(host: Host, *devices: str, layout: str = "pin") -> list[str]:
    placement = place(host, small_request(4, layout=layout, devices=devices))
    found = [f for f in placement.findings if f.id == "iommu-group-incomplete"]
    assert all(f.severity == "warning" for f in found)
    return [f"{f.subject}: {f.observed}" for f in found]


def workstation(audio: str | None = None, graphics: str | None = None) -> Host:
    """With drivers of the GPU's audio function and of the board's graphics."""
    host = load_host("x86-1p1n8c16t-gpu-audio")
    drivers = {AUDIO: audio, Bdf.parse("02:00.0"): graphics}
    return replace(
        host,
        pci_devices=tuple(
            replace(d, driver=drivers.get(d.bdf, d.driver)) for d in host.pci_devices
        ),
    )


@pytest.mark.parametrize("layout", ["default", "pin", "pin-numa-pci"])
def test_a_function_left_in_the_group_is_named_with_its_driver(layout: str) -> None:
    (found,) = incomplete(workstation("snd_hda_intel", "ast"), "01:00.0", layout=layout)
    assert found.startswith("0000:01:00.0: its IOMMU group 2 also holds 0000:01:00.1 (snd_hda_i")


def test_a_source_that_names_no_driver_makes_the_group_doubtful() -> None:
    (found,) = incomplete(workstation(), "01:00.0")
    assert "0000:01:00.1 (driver not known)" in found


@pytest.mark.parametrize("driver", ["vfio-pci", "pci-stub", None])
def test_functions_on_vfio_or_without_a_driver_do_not_matter(driver: str | None) -> None:
    assert not incomplete(workstation(driver, "ast"), "01:00.0")


def test_a_whole_group_has_no_finding_and_bridges_do_not_count() -> None:
    assert not incomplete(workstation("snd_hda_intel", "ast"), "01:00.0", "01:00.1")
    host = workstation("snd_hda_intel", "ast")
    shared = replace(
        host,
        pci_devices=tuple(replace(d, iommu_group=2) if d.bridge else d for d in host.pci_devices),
    )
    assert not incomplete(shared, "01:00.0", "01:00.1")


def test_two_functions_of_one_group_are_one_finding() -> None:
    host = workstation("snd_hda_intel", "ast")
    joined = replace(
        host,
        pci_devices=tuple(
            replace(d, iommu_group=2) if d.bdf.bus == 2 else d for d in host.pci_devices
        ),
    )
    (found,) = incomplete(joined, "01:00.0", "01:00.1")
    assert found.startswith("0000:01:00.0: its IOMMU group 2 also holds 0000:02:00.0 (ast)")


def test_a_device_without_a_node_is_placed_on_a_one_node_host() -> None:
    host = even_host(1, 1, 1, 8, 2, devices=[DeviceSpec("01:00.0", node=None)])
    made = plan(host, small_request(4, layout="pin-numa-pci", devices=["0000:01:00.0"]))
    assert [(device.host_node, device.cell) for device in made.vm.hostdevs] == [(0, 0)]
    assert not [gap for gap in made.gaps if "01:00.0" in gap.subject]
    assert made.host_fingerprint == host.fingerprint


def test_it_stays_unknown_where_there_are_two_nodes() -> None:
    host = even_host(2, 1, 1, 8, 2, devices=[DeviceSpec("01:00.0", node=None)])
    made = plan(host, small_request(4, layout="pin-numa-pci", devices=["0000:01:00.0"]))
    assert [(device.host_node, device.cell) for device in made.vm.hostdevs] == [(None, None)]
