"""What a sweep over message sizes says."""

import pytest

from homenode.machine.tools.nccl_tests import NcclTests, parse
from homenode.measure.figures.nvidia import flat_curve, half_peak_of
from homenode.measure.results.sweep import fit_sweep
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


def test_a_healthy_curve_has_its_half_on_the_way_and_is_fitted() -> None:
    assert half_peak_of(sweep(CLIMBING)) == 16 << 20
    assert flat_curve(sweep(CLIMBING), "H200") is None
    fit = fit_sweep([(size, rate * 1e9) for size, rate in CLIMBING.items()])
    assert fit is not None
    assert fit.rate_bytes_per_s == pytest.approx(400e9, rel=1e-6)
    assert fit.knee_bytes == pytest.approx(16 << 20, rel=1e-6)
    assert fit.spread < 1e-6
    assert fit.text == "41.9 us + 400 GB/s, knee at 16 MiB"


@pytest.mark.parametrize("gpus", [4, 8])
@pytest.mark.parametrize("start_us", [10, 20, 50, 100])
@pytest.mark.parametrize("rate", [2.0, 4.0, 8.6, 20.0])
def test_start_up_time_and_rate_are_found_in_printed_curves(
    gpus: int, start_us: int, rate: float
) -> None:
    """As nccl-tests prints them, with two decimals: none is flat, however early it saturates."""
    factor = 2 * (gpus - 1) / gpus
    curve = {
        1 << n: factor * (1 << n) / (start_us * 1e3 + factor * (1 << n) / rate)
        for n in range(3, 31)
    }
    run = sweep(curve)
    points = [(row.size_bytes, half.bus_bytes_per_s) for row in run.rows for half in row.halves()]
    fit = fit_sweep(points, factor)
    assert fit is not None
    assert fit.rate_bytes_per_s == pytest.approx(rate * 1e9, rel=0.03)
    assert fit.start_s == pytest.approx(start_us * 1e-6, rel=0.06)
    assert fit.spread < 0.05
    assert flat_curve(run, "x") is None


@pytest.mark.parametrize("start_us", [10, 50, 100])
def test_a_curve_that_one_lane_would_beat_is_a_ceiling_whatever_its_start(start_us: int) -> None:
    curve = {1 << n: (1 << n) / (start_us * 1e3 + (1 << n) / 0.53) for n in range(3, 31)}
    assert flat_curve(sweep(curve), "8x RTX 5090") is not None
    found = flat_curve(sweep(FLAT), "8x RTX 5090")
    assert found is not None
    assert "GB/s, knee at 36 KiB" in found.observed


@pytest.mark.parametrize(
    "rates",
    [
        {size: rate for size, rate in FLAT.items() if size <= 1 << 19},  # too short to tell
        {**FLAT, 1 << 30: 0.9},  # still climbs at its end
        {1 << n: (1 << n) / (4e6 + (1 << n) / 0.5) for n in range(3, 25)},  # start-up time alone
        {size: 4 * rate for size, rate in FLAT.items()},  # flat from 64 KiB on, and healthy
        {8: 0.0},
    ],
)
def test_other_curves_are_no_ceiling(rates: dict[int, float]) -> None:
    assert flat_curve(sweep(rates), "x") is None


def test_a_sweep_that_moved_nothing_has_no_curve() -> None:
    assert half_peak_of(sweep({8: 0.0})) is None


@needs_shared
def test_a_published_sweep_of_eight_a100_climbs() -> None:
    run = parse(shared("samples/superbench-nccl_allreduce.log").read_text())
    assert half_peak_of(run) == 16 << 20
    assert flat_curve(run, "8 A100") is None
