"""Devices of a one-node host are on that node, whatever its firmware says."""

from homenode.plan.planner import plan
from homenode.vm.fingerprint import host_fingerprint
from tests.small_hosts import DeviceSpec, even_host, small_request


def test_a_device_without_a_node_is_placed_on_a_one_node_host() -> None:
    host = even_host(1, 1, 1, 8, 2, devices=[DeviceSpec("01:00.0", node=None)])
    made = plan(host, small_request(4, layout="pin-numa-pci", devices=["0000:01:00.0"]))
    assert [(device.host_node, device.cell) for device in made.vm.hostdevs] == [(0, 0)]
    assert not [gap for gap in made.gaps if "01:00.0" in gap.subject]
    assert made.host_fingerprint == host_fingerprint(host)


def test_it_stays_unknown_where_there_are_two_nodes() -> None:
    host = even_host(2, 1, 1, 8, 2, devices=[DeviceSpec("01:00.0", node=None)])
    made = plan(host, small_request(4, layout="pin-numa-pci", devices=["0000:01:00.0"]))
    assert [(device.host_node, device.cell) for device in made.vm.hostdevs] == [(None, None)]
