"""Trees of real machines that show an oddity each, read in place where they are."""

import pytest

from homenode.bdf import Bdf
from homenode.machine.pci import PortType
from homenode.machine.topology import Host, summarise
from homenode.vm.sources import load_host
from tests.shared_data import needs_shared, shared

pytestmark = needs_shared


def _host(name: str) -> Host:
    path = shared(f"cases/hosts/{name}")
    if not path.is_file():
        pytest.skip(f"published tree is not here: {path}")
    return load_host(str(path))


def test_masks_that_end_with_a_nul_are_read() -> None:
    host = _host("128arm-2pa2n8cluster4co.tar.bz2")
    assert [(node.index, len(node.pus)) for node in host.nodes] == [(n, 32) for n in range(4)]
    assert [node.package for node in host.nodes] == [36, 36, 8442, 8442]


def test_package_numbers_may_be_above_65535() -> None:
    host = _host("8ia64-2n2s2c.tar.bz2")
    assert [package.index for package in host.packages] == [0, 256, 196_611, 196_867]
    assert [len(node.pus) for node in host.nodes] == [4, 4]


def test_a_bridge_missing_from_the_bus_is_known_by_what_is_below_it() -> None:
    host = _host("32intel64-2p8co2t+8ve.tar.bz2")
    assert summarise(host).pci_functions == 29
    bridge = host.device_at[Bdf.parse("5f:03.0")].bridge
    assert bridge is not None and bridge.port_type is PortType.SWITCH_DOWNSTREAM
    assert host.switch_above(Bdf.parse("60:00.1")) == Bdf.parse("5e:00.0")


def test_a_machine_in_snc4_has_its_gpus_on_four_of_eight_nodes() -> None:
    host = _host("ipa20-2xXeon8480-SNC4-4gpu.xml")
    gpus = [device for device in host.pci_devices if device.kind.value == "gpu"]
    assert [gpu.node for gpu in gpus] == [3, 1, 7, 5]
