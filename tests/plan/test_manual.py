"""Manual PU lists: the study's listings, and what its generator got wrong."""

import pytest

from homenode.cpuset import CpuSet
from homenode.errors import UsageError
from homenode.plan.manual import manual_placement
from homenode.vm.plan_options import ManualRanges
from tests.small_hosts import asking, small_request

STUDY = ManualRanges(
    (CpuSet.parse("0-27"), CpuSet.parse("32-59")),
    (CpuSet.parse("64-91"), CpuSet.parse("96-123")),
)
EMULATOR = CpuSet.parse("28,29")


def lists(*texts: str) -> tuple[CpuSet, ...]:
    return tuple(CpuSet.parse(text) for text in texts)


def test_pin_gives_vcpu_i_the_ith_pu_and_binds_no_memory() -> None:
    request = asking(small_request(56, layout="pin"), emulator_pus=EMULATOR)
    placement = manual_placement(request, STUDY)
    assert [pin.first() for pin in placement.vcpu_pins] == [*range(28), *range(32, 60)]
    assert placement.emulator_pus == CpuSet.parse("28-29")
    assert placement.memory_nodes == ()


def test_pin_numa_puts_each_list_in_a_cell_of_its_own() -> None:
    placement = manual_placement(small_request(56, layout="pin-numa"), STUDY)
    assert placement.nodes == placement.memory_nodes == (0, 1)
    assert placement.vcpu_nodes == (0,) * 28 + (1,) * 28
    assert placement.threads_per_core == 1


def test_pin_numa_smt_interleaves_siblings() -> None:
    placement = manual_placement(small_request(56, layout="pin-numa-smt"), STUDY)
    assert [pin.first() for pin in placement.vcpu_pins[:4]] == [0, 64, 1, 65]
    assert [pin.first() for pin in placement.vcpu_pins[-2:]] == [59, 123]
    assert len(placement.vcpu_pins) == 112
    assert placement.threads_per_core == 2


def test_unequal_lists_work_flat_and_with_unequal_cells() -> None:
    ranges = ManualRanges(lists("0-23", "32-51"))
    flat = manual_placement(small_request(44, layout="pin"), ranges)
    assert len(flat.vcpu_pins) == 44
    with pytest.raises(UsageError, match=r"24 .* 20") as error:
        manual_placement(small_request(44, layout="pin-numa"), ranges)
    assert error.value.hint is not None
    assert "--allow-unequal-nodes" in error.value.hint
    cells = asking(small_request(44, layout="pin-numa"), unequal_cells=True)
    assert manual_placement(cells, ranges).vcpu_nodes == (0,) * 24 + (1,) * 20


@pytest.mark.parametrize(
    ("layout", "ranges", "message"),
    [
        ("pin", ManualRanges(()), "missing CPUs of a node"),
        ("pin", ManualRanges(lists("0-3", "")), "missing CPUs of a node"),
        ("pin", ManualRanges(lists("0-3", "2-5")), "found 2-3 in two lists"),
        ("pin-numa-smt", ManualRanges(lists("0-3")), "one for each of 1 nodes, found 0"),
        ("pin-numa-smt", ManualRanges(lists("0-3"), lists("8-10")), "expected 4 siblings"),
        ("pin-numa-smt", ManualRanges(lists("0-3"), lists("3-6")), "found 3 in two lists"),
        ("default", ManualRanges(lists("0-3")), "pins nothing"),
    ],
)
def test_lists_that_cannot_be_meant_are_refused(
    layout: str, ranges: ManualRanges, message: str
) -> None:
    with pytest.raises(UsageError, match=message) as error:
        manual_placement(small_request(4, layout=layout), ranges)
    assert error.value.hint


def test_an_emulator_on_the_vcpus_pus_is_a_finding() -> None:
    request = asking(small_request(4, layout="pin"), emulator_pus=CpuSet.parse("3-4"))
    placement = manual_placement(request, ManualRanges(lists("0-3")))
    assert [f.id for f in placement.findings] == ["emulator-shares-vcpus"]


def test_sibling_lists_are_left_alone_by_layouts_that_hide_siblings() -> None:
    assert len(manual_placement(small_request(56, layout="pin"), STUDY).vcpu_pins) == 56
