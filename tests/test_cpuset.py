"""CpuSet against Python's own sets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homenode.cpuset import CpuSet
from homenode.errors import ParseError

CPUS = st.sets(st.integers(0, 1100))


@given(CPUS)
def test_a_list_reads_back(pus: set[int]) -> None:
    assert set(CpuSet.parse(str(CpuSet(pus)))) == pus


@given(CPUS)
def test_a_mask_reads_back(pus: set[int]) -> None:
    bits = CpuSet(pus).bits
    groups: list[str] = []
    while bits or not groups:
        groups.append(f"{bits & 0xFFFFFFFF:08x}")
        bits >>= 32
    assert set(CpuSet.parse_mask(",".join(reversed(groups)))) == pus


@given(CPUS, CPUS)
def test_it_behaves_as_a_set(a: set[int], b: set[int]) -> None:
    x, y = CpuSet(a), CpuSet(b)
    assert set(x & y) == a & b
    assert set(x | y) == a | b
    assert set(x - y) == a - b
    assert (x <= y) == (a <= b)
    assert x.isdisjoint(y) == a.isdisjoint(b)
    assert len(x) == len(a)
    assert x.first() == min(a, default=None)
    assert (x == y) == (a == b)


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-1", "1,,2", "0-9999999999", "0:0", "1-2-3"])
def test_a_bad_list_is_refused_by_its_part(text: str) -> None:
    with pytest.raises(ParseError):
        CpuSet.parse(text)


@pytest.mark.parametrize("text", ["f_f", "+f", "0x0xff", "\uff11", "100000000", "g"])
def test_a_bad_mask_is_refused(text: str) -> None:
    with pytest.raises(ParseError):
        CpuSet.parse_mask(text)


def test_strides_and_exclusions_are_understood() -> None:
    assert list(CpuSet.parse("0-8:4, ^4")) == [0, 8]


def test_hwloc_masks_may_have_empty_groups() -> None:
    assert list(CpuSet.parse_mask("0x1,,0x2")) == [1, 64]


def test_it_does_not_change() -> None:
    with pytest.raises(AttributeError):
        setattr(CpuSet(), "_bits", 1)  # noqa: B010
