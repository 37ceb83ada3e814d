"""GPUs to choose: groups stay together, the rest stays usable, and free cores near them count."""

from dataclasses import replace

import pytest
from msgspec import structs

from homenode.bdf import Bdf
from homenode.machine.pci import DeviceKind, DeviceLink, LinkKind
from homenode.machine.topology import Host
from homenode.plan.request import GuestRequest
from homenode.plan.search.place import place
from homenode.vm.plan import Unplannable
from tests.figures import numbers
from tests.small_hosts import DeviceSpec, asking, even_host, pinned_domain, small_request

HGX = [
    *(
        DeviceSpec(f"0000:{bus:02x}:00.0", node=0, root=i // 2, switch=i // 2)
        for i, bus in enumerate((0x19, 0x3B, 0x4C, 0x5D))
    ),
    *(
        DeviceSpec(f"0000:{bus:02x}:00.0", node=1, root=2 + i // 2, switch=i // 2)
        for i, bus in enumerate((0x9B, 0xAB, 0xBB, 0xDB))
    ),
]


def hgx(**changes: object) -> Host:
    return structs.replace(even_host(2, 1, 4, 8, 2, devices=HGX), **changes)


def some(count: int, vcpus: int = 8) -> GuestRequest:
    return asking(small_request(vcpus), gpu_count=count)


def buses(host: Host, request: GuestRequest) -> list[str]:
    return [str(bdf)[5:7] for bdf in place(host, request).devices]


def test_two_gpus_are_the_two_of_one_switch() -> None:
    assert buses(hgx(), some(2)) == ["19", "3b"]


def test_four_gpus_are_those_of_one_node() -> None:
    placement = place(hgx(), some(4))
    assert [str(bdf)[5:7] for bdf in placement.devices] == ["19", "3b", "4c", "5d"]
    assert placement.nodes == (0,)


def test_eight_gpus_take_both_nodes_so_that_each_gpu_is_at_home() -> None:
    assert place(hgx(), some(8, 16)).nodes == (0, 1)


def test_one_gpu_comes_from_a_broken_switch_so_that_whole_ones_stay_whole() -> None:
    busy = pinned_domain("0", name="other", devices=("9b:00.0",))
    assert buses(hgx(domains=(busy,)), some(1)) == ["ab"]


def test_three_gpus_are_a_whole_switch_and_one_more_of_the_node() -> None:
    busy = pinned_domain("0", name="other", devices=("4c:00.0",))
    assert buses(hgx(domains=(busy,)), some(3)) == ["19", "3b", "5d"]


def test_gpus_of_running_vms_are_not_used_and_too_few_are_refused_with_who_has_them() -> None:
    busy = pinned_domain("0", name="train", devices=("19:00.0", "3b:00.0"))
    host = hgx(domains=(busy,))
    assert "19" not in buses(host, some(6, 16))
    with pytest.raises(Unplannable) as refusal:
        place(host, some(7))
    assert numbers(refusal.value.message)[:3] == [7, 6, 8]
    assert "0000:19:00.0" in str(refusal.value) and "train" in str(refusal.value)
    assert numbers(refusal.value.hint) == [6]


def test_gpus_near_free_cores_win_over_gpus_near_none() -> None:
    host = hgx(domains=(pinned_domain("0-31"),))
    placement = place(host, some(2))
    assert placement.nodes == (1,)
    assert [str(bdf)[5:7] for bdf in placement.devices] == ["9b", "ab"]


def test_a_gpu_brings_its_audio_function_and_keeps_the_documents_devices() -> None:
    specs = [
        DeviceSpec("0000:19:00.0"),
        DeviceSpec("0000:19:00.1", kind=DeviceKind.AUDIO),
        DeviceSpec("0000:05:00.0", kind=DeviceKind.NVME),
    ]
    host = even_host(1, devices=specs)
    request = asking(small_request(2, devices=["05:00.0"]), gpu_count=1)
    assert [str(b) for b in place(host, request).devices] == [
        "0000:05:00.0",
        "0000:19:00.0",
        "0000:19:00.1",
    ]


def test_gpus_joined_by_nvlink_stay_together() -> None:
    """Each has a root port of its own, so no switch says which belong together."""
    specs = [replace(spec, switch=None) for spec in HGX]
    pairs = (("19", "4c"), ("3b", "5d"), ("9b", "bb"), ("ab", "db"))
    links = tuple(
        DeviceLink(LinkKind.NVLINK, Bdf.parse(f"{a}:00.0"), Bdf.parse(f"{b}:00.0"))
        for a, b in pairs
    )
    host = structs.replace(even_host(2, 1, 4, 8, 2, devices=specs), links=links)
    assert tuple(buses(host, some(2))) in pairs


def test_a_gpu_with_virtual_functions_in_use_stays_on_the_host() -> None:
    host = hgx()
    first = Bdf.parse("19:00.0")
    devices = tuple(
        structs.replace(d, sriov_total_vfs=8, sriov_num_vfs=8) if d.bdf == first else d
        for d in host.pci_devices
    )
    assert "19" not in buses(structs.replace(host, pci_devices=devices), some(7, 16))


def test_gpus_without_a_node_can_be_chosen() -> None:
    specs = [replace(spec, node=None) for spec in HGX]
    placement = place(even_host(2, 1, 4, 8, 2, devices=specs), some(2))
    assert len(placement.devices) == 2
    assert len([gap for gap in placement.gaps if gap.subject.endswith(" node")]) == 2


def test_a_device_that_another_vm_has_is_a_finding() -> None:
    busy = pinned_domain("0", name="train", devices=("19:00.0",))
    placement = place(hgx(domains=(busy,)), small_request(4, devices=["19:00.0"]))
    assert [f.id for f in placement.findings] == ["device-in-use"]


def test_dropping_one_device_moves_no_vcpu() -> None:
    everything = [spec.bdf for spec in HGX]
    full = place(hgx(), small_request(16, devices=everything))
    fewer = place(hgx(), small_request(16, devices=everything[:-1]))
    assert full.vcpu_pins == fewer.vcpu_pins
    assert fewer.devices == full.devices[:-1]
