"""GPUs that NVSwitches join: a VM gets a partition of Fabric Manager, or is given why not."""

import pytest
from msgspec import structs
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.findings import Finding
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host
from homenode.plan.allocations import find_allocations
from homenode.plan.devices.fabric import find_fabric
from homenode.plan.request import GuestRequest
from homenode.plan.search.place import place
from homenode.vm.plan import Unplannable
from tests.figures import numbers
from tests.plan.test_many_gpus import HGX, buses, hgx, some
from tests.small_hosts import asking, pinned_domain, small_request

H100 = "NVIDIA H100 80GB HBM3"
MODULES = (7, 5, 6, 8, 1, 3, 4, 2)
"""Module numbers of the published HGX H100, in the order of its bus addresses."""


def board(modules: tuple[int | None, ...] = MODULES, name: str = H100, **changes: object) -> Host:
    """HGX as nvidia-smi shows it: pairs of an H100 board are modules 1+3, 2+4, 5+7 and 6+8."""
    host = hgx(**changes)
    module_of = {Bdf.parse(spec.bdf): module for spec, module in zip(HGX, modules, strict=True)}
    return structs.replace(
        host,
        pci_devices=tuple(
            structs.replace(d, name=name, module_id=module_of[d.bdf])
            if d.kind is DeviceKind.GPU
            else d
            for d in host.pci_devices
        ),
    )


def named(*numbers: int) -> GuestRequest:
    devices = tuple(Bdf.parse(HGX[number].bdf) for number in numbers)
    return replace(small_request(8), devices=devices)


def test_two_gpus_are_a_partition_before_neighbours_on_a_switch() -> None:
    # 4c and 5d share a switch as 19 and 3b do; 4c is module 6, 5d module 8.
    crossed = board((5, 6, 7, 8, 1, 2, 3, 4))
    assert buses(crossed, some(2)) == ["19", "4c"]
    assert buses(board(), some(2)) == ["19", "3b"]


def test_a_partition_of_which_a_part_is_in_use_is_not_chosen() -> None:
    busy = pinned_domain("0", name="train", devices=("19:00.0",))
    assert buses(board(domains=(busy,)), some(2)) == ["4c", "5d"]
    assert buses(board(domains=(busy,)), some(4)) == ["9b", "ab", "bb", "db"]


def finding(host: Host, request: GuestRequest) -> Finding | None:
    found = (f for f in place(host, request).findings if f.id == "no-nvlink-partition")
    return next(found, None)


def test_where_no_partition_is_free_any_gpus_serve_and_a_finding_names_who_has_them() -> None:
    busy = [pinned_domain("0", name=f"train-{i}", devices=(HGX[i].bdf[5:],)) for i in (0, 2, 4, 6)]
    found = finding(board(domains=tuple(busy)), some(2))
    assert found is not None
    assert 2 in numbers(found.comparison)
    assert "0000:19:00.0, 0000:3b:00.0" in found.comparison
    assert "'train-0'" in found.comparison
    anyway = asking(some(2), without_nvlink=True)
    assert finding(board(domains=tuple(busy)), anyway) is None


@pytest.mark.parametrize("modules", [MODULES, (None,) * 8])
@pytest.mark.parametrize("count", [3, 5, 6, 7])
def test_a_number_of_gpus_that_no_partition_has_is_a_finding(
    count: int, modules: tuple[int | None, ...]
) -> None:
    for request in (some(count), named(*range(count))):
        found = finding(board(modules), request)
        assert found is not None
        assert found.severity == "warning"
        gaps = place(board(modules), request).gaps
        assert not any("Fabric Manager" in gap.subject for gap in gaps)
        assert {1, 2, 4, 8} <= set(numbers(found.comparison))


def test_parts_of_gpus_may_be_of_one_gpu_so_their_number_is_no_finding() -> None:
    host = board()
    (gpu, *_), fabric = host.whole_gpus, find_fabric(host)
    parts = [
        replace(gpu, bdf=Bdf.parse(f"19:00.{i}"), physical_function=gpu.bdf) for i in (1, 2, 3)
    ]
    held = find_allocations(host, small_request())
    assert fabric is not None and fabric.partitions([], parts, 3, held) == (None, None)


def test_gpus_named_one_by_one_that_are_no_partition_are_a_finding() -> None:
    assert finding(board(), named(0, 1)) is None
    assert finding(board(), named(6)) is None
    found = finding(board(), named(1, 2))
    assert found is not None
    assert "0000:3b:00.0" in found.comparison and "0000:4c:00.0" in found.comparison
    assert {5, 6} <= set(numbers(found.comparison))
    assert finding(board(), asking(named(1, 2), without_nvlink=True)) is None


def test_gpus_that_are_added_make_a_partition_with_those_of_the_document() -> None:
    one_more = asking(named(5), gpu_count=1)
    assert buses(board(), one_more) == ["9b", "ab"]


def test_gpus_whose_module_is_unknown_are_chosen_with_a_gap() -> None:
    placement = place(board((None,) * 8), some(2))
    assert [str(bdf)[5:7] for bdf in placement.devices] == ["19", "3b"]
    assert any("Fabric Manager" in gap.subject for gap in placement.gaps)
    assert not any("Fabric Manager" in gap.subject for gap in place(board(), some(2)).gaps)
    assert any(
        "Fabric Manager" in gap.subject for gap in place(board((None,) * 8), named(0, 1)).gaps
    )


def test_as_many_gpus_as_a_package_has_are_of_one_package_or_refused() -> None:
    busy = [pinned_domain("0", name=f"train-{i}", devices=(HGX[i].bdf[5:],)) for i in (0, 4)]
    host = board((None,) * 8, domains=tuple(busy))
    assert buses(host, some(3)) == ["3b", "4c", "5d"]
    with pytest.raises(Unplannable) as refusal:
        place(host, some(4))
    assert [rejection.constraint for rejection in refusal.value.rejections] == ["gpu-packages"]
    assert len(buses(host, some(5))) == 5  # no package has so many
    lost = Bdf.parse(HGX[1].bdf)
    devices = (structs.replace(d, node=None) if d.bdf == lost else d for d in host.pci_devices)
    host = structs.replace(host, pci_devices=tuple(devices))
    one_more = asking(named(1), gpu_count=3)
    assert len(place(host, one_more).devices) == 4  # of an unknown package, so of any
    assert len(buses(host, some(4))) == 4
    busy = [pinned_domain("0", name=f"train-{i}", devices=(HGX[i].bdf[5:],)) for i in (1, 2, 5, 6)]
    host = board((None,) * 8, domains=tuple(busy))
    of_both = asking(named(0, 4), gpu_count=2)
    assert len(place(host, of_both).devices) == 4


def test_all_gpus_of_a_board_are_a_partition_whatever_their_modules() -> None:
    host = board((None,) * 8)
    for request in (some(8, 16), asking(named(*range(8)), vcpus=16)):
        assert not any("Fabric Manager" in gap.subject for gap in place(host, request).gaps)


def test_known_partitions_are_chosen_before_gpus_of_unknown_modules() -> None:
    half = (None, None, None, None, *MODULES[4:])
    assert buses(board(half), some(2)) == ["9b", "ab"]


def test_cards_without_nvswitches_go_together_in_any_number() -> None:
    assert len(buses(board((None,) * 8, "NVIDIA H100 PCIe"), some(3))) == 3


def test_four_gpus_joined_without_nvswitches_go_together_in_any_number() -> None:
    host = board()
    few = [d.bdf for d in host.devices_of_kind(DeviceKind.GPU)][:4]
    rest = tuple(d for d in host.pci_devices if d.kind is not DeviceKind.GPU or d.bdf in few)
    assert len(buses(structs.replace(host, pci_devices=rest), some(3))) == 3


def test_gpus_that_the_driver_does_not_name_are_named_by_their_device_id() -> None:
    host = hgx()
    known = structs.replace(
        host, pci_devices=tuple(structs.replace(d, device_id=0x2330) for d in host.pci_devices)
    )
    assert finding(known, some(3)) is not None
    assert any("Fabric Manager" in gap.subject for gap in place(known, named(0, 1)).gaps)


def test_two_boards_that_number_alike_tell_nothing() -> None:
    alike = board((1, 2, 3, 4, 1, 2, 3, 4))
    assert any("Fabric Manager" in gap.subject for gap in place(alike, some(2)).gaps)
