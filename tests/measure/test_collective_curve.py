"""What a sweep over message sizes says."""

import pytest

from homenode.machine.tools.nccl_tests import NcclTests, parse
from homenode.measure.figures.nvidia import curve_of, flat_curve
from tests.shared_data import needs_shared, shared

HEADER = (
    "# nThread 1 nGpus 8 minBytes 8 maxBytes 1073741824 step: 2(factor)\n"
    "# size count type redop root time algbw busbw #wrong time algbw busbw #wrong\n"
)


def sweep(rates: dict[int, float]) -> NcclTests:
    """A run with these bus bandwidths (GB/s) by size."""
    rows = "".join(
        f"{size} {size // 4} float sum -1 {f'20.0 {rate:.2f} {rate:.2f} 0 ' * 2}\n"
        for size, rate in rates.items()
    )
    return parse(HEADER + rows)


CLIMBING = {1 << n: 400 * (1 << n) / ((1 << n) + (16 << 20)) for n in range(3, 34)}
FLAT = {1 << n: 0.53 if n >= 16 else 0.53 * (1 << n) / (1 << 16) for n in range(3, 31)}


def test_a_healthy_curve_has_its_peak_at_the_end_and_its_half_on_the_way() -> None:
    curve = curve_of(sweep(CLIMBING))
    assert curve is not None
    assert curve.peak_bytes_per_s == pytest.approx(CLIMBING[1 << 33] * 1e9, rel=1e-3)
    assert curve.half_peak_bytes == 16 << 20
    assert curve.flat_from_bytes is None
    assert flat_curve(sweep(CLIMBING), "H200") is None


def test_a_curve_that_is_flat_from_kilobytes_on_meets_a_hard_ceiling() -> None:
    found = flat_curve(sweep(FLAT), "8x RTX 5090")
    assert found is not None
    assert found.observed == "0.53 GB/s from 64 KiB on"


@pytest.mark.parametrize(
    "rates",
    [
        {size: rate for size, rate in FLAT.items() if size <= 1 << 19},  # too short to tell
        {**FLAT, 1 << 30: 0.9},  # still climbs at its end
        {size << 6: rate for size, rate in FLAT.items()},  # flat from 4 MiB on: ordinary
        {8: 0.0},
    ],
)
def test_other_curves_are_no_ceiling(rates: dict[int, float]) -> None:
    assert flat_curve(sweep(rates), "x") is None


def test_a_sweep_that_moved_nothing_has_no_curve() -> None:
    assert curve_of(sweep({8: 0.0})) is None


@needs_shared
def test_a_published_sweep_of_eight_a100_climbs() -> None:
    run = parse(shared("samples/superbench-nccl_allreduce.log").read_text())
    curve = curve_of(run)
    assert curve is not None
    assert (curve.half_peak_bytes, curve.flat_from_bytes) == (16 << 20, None)
