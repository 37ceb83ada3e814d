"""Output of bandwidthTest of the CUDA samples."""

import pytest

from homenode.errors import ParseError
from homenode.measure.importers.cuda_bandwidth_test import Direction, parse, read_cuda_results
from tests.shared_data import needs_shared, shared

OUTPUT = """\
[CUDA Bandwidth Test] - Starting...
Running on...

 Device 0: NVIDIA H200
 Quick Mode

 Host to Device Bandwidth, 1 Device(s)
 PINNED Memory Transfers
   Transfer Size (Bytes)\tBandwidth(GB/s)
   32000000\t\t\t55.3

 Device to Host Bandwidth, 1 Device(s)
 PINNED Memory Transfers
   Transfer Size (Bytes)\tBandwidth(GB/s)
   32000000\t\t\t55.1

 Device to Device Bandwidth, 1 Device(s)
 PINNED Memory Transfers
   Transfer Size (Bytes)\tBandwidth(GB/s)
   32000000\t\t\t2901.4

Result = PASS

NOTE: The CUDA Samples are not meant for performance measurements. Results may vary.
"""


def test_each_direction_has_its_bandwidth() -> None:
    run = parse(OUTPUT)
    assert run.devices == ((0, "NVIDIA H200"),)
    ways = [Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST, Direction.DEVICE_TO_DEVICE]
    assert [transfer.direction for transfer in run.transfers] == ways
    assert [t.bytes_per_s for t in run.transfers] == pytest.approx([55.3e9, 55.1e9, 2901.4e9])
    assert all(t.is_pinned and t.size_bytes == 32_000_000 for t in run.transfers)
    assert run.has_passed is True
    assert not run.gaps


def test_old_versions_print_mb_and_mean_mib() -> None:
    old = OUTPUT.replace("(GB/s)", "(MB/s)").replace("32000000", "33554432")
    run = parse(old.replace("55.3", "12082.5"))
    assert run.transfers[0].bytes_per_s == pytest.approx(12082.5 * 2**20)


def test_of_a_range_of_sizes_the_largest_is_kept() -> None:
    run = parse(OUTPUT.replace("   32000000\t\t\t55.3", "   1024\t\t\t0.2\n   32000000\t\t\t55.3"))
    assert len(run.transfers) == 4
    results = read_cuda_results(run)
    assert [s.value for s in results.samples if s.metric == "h2d-bandwidth"] == [55.3e9]
    sizes = [c.value for c in results.conditions if c.name == "tool copy size"]
    assert sizes == ["32000000 bytes"]


def test_several_devices_are_one_sum() -> None:
    run = parse(OUTPUT.replace("1 Device(s)", "8 Device(s)"))
    assert run.transfers[0].devices == 8


def test_lines_of_csv_are_read() -> None:
    run = parse(
        "bandwidthTest-H2D-Pinned, Bandwidth = 24.9 GB/s, Time = 0.00128 s, Size = 32000000 bytes, "
        "NumDevsUsed = 1\n"
    )
    assert run.transfers[0].direction is Direction.HOST_TO_DEVICE
    assert run.transfers[0].bytes_per_s == pytest.approx(24.9e9)


def test_a_failed_check_is_said() -> None:
    assert parse(OUTPUT.replace("PASS", "FAIL")).has_passed is False
    assert parse(OUTPUT[: OUTPUT.index("Result")]).has_passed is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a table"),
        ("cudaGetDeviceCount returned 100\n", "a table"),
        (OUTPUT.replace("55.3", "0.0"), "10: expected a bandwidth above 0"),
        (OUTPUT.replace("(GB/s)", "(PB/s)"), "a table"),
        (OUTPUT.replace("1 Device(s)", "0 Device(s)"), "1 to 1024 devices"),
        (OUTPUT + OUTPUT, "one run"),
    ],
)
def test_output_that_is_none_is_refused(text: str, says: str) -> None:
    with pytest.raises(ParseError, match=says):
        parse(text)


def test_what_went_wrong_is_the_hint() -> None:
    with pytest.raises(ParseError) as refused:
        parse("cudaGetDeviceCount returned 100\n-> no CUDA-capable device is detected\n")
    assert "cudaGetDeviceCount returned 100" in str(refused.value.hint)


@needs_shared
def test_a_published_output_is_read() -> None:
    run = parse(shared("samples/cuda_bandwidthTest.txt").read_text())
    assert [t.bytes_per_s for t in run.transfers] == pytest.approx([12.4e9, 12.7e9, 712.9e9])
