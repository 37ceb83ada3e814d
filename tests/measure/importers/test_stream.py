"""Output of STREAM."""

import pytest

from homenode.errors import ParseError
from homenode.measure.importers.stream import OUTPUT as OUTPUT_OF
from homenode.measure.importers.stream import parse
from tests.shared_data import needs_shared, shared

OUTPUT = """\
-------------------------------------------------------------
STREAM version $Revision: 5.10 $
-------------------------------------------------------------
This system uses 8 bytes per array element.
-------------------------------------------------------------
Array size = 80000000 (elements), Offset = 0 (elements)
Memory per array = 610.4 MiB (= 0.6 GiB).
Total memory required = 1831.1 MiB (= 1.8 GiB).
Each kernel will be executed 10 times.
 The *best* time for each kernel (excluding the first iteration)
 will be used to compute the reported bandwidth.
-------------------------------------------------------------
Number of Threads requested = 56
Number of Threads counted = 56
-------------------------------------------------------------
Your clock granularity/precision appears to be 1 microseconds.
Each test below will take on the order of 9105 microseconds.
   (= 9105 clock ticks)
Increase the size of the arrays if this shows that
you are not getting at least 20 clock ticks per test.
-------------------------------------------------------------
WARNING -- The above is only a rough guideline.
For best results, please be sure you know the
precision of your system timer.
-------------------------------------------------------------
Function    Best Rate MB/s  Avg time     Min time     Max time
Copy:          342008.5     0.003755     0.003743     0.003895
Scale:         242409.6     0.005737     0.005280     0.006802
Add:           243827.7     0.008050     0.007874     0.008269
Triad:         263208.7     0.007599     0.007295     0.007855
-------------------------------------------------------------
Solution Validates: avg error less than 1.000000e-13 on all three arrays
-------------------------------------------------------------
"""


def test_kernels_are_in_bytes_per_second() -> None:
    run = parse(OUTPUT)
    assert [kernel.name for kernel in run.kernels] == ["Copy", "Scale", "Add", "Triad"]
    assert run.kernels[3].best_bytes_per_s == pytest.approx(263.2087e9)
    assert (run.threads, run.arrays_bytes) == (56, 1_920_000_000)
    assert run.is_valid is True
    assert not run.gaps


def test_arrays_that_came_out_wrong_are_said() -> None:
    wrong = OUTPUT.replace(
        "Solution Validates: avg error less than 1.000000e-13 on all three arrays",
        "Failed Validation on array a[], AvgRelAbsErr > epsilon (1.000000e-13)\n"
        "     Expected Value: 1.15e+12, AvgAbsErr: 1.0e+12, AvgRelAbsErr: 8.6e-01\n"
        "     For array a[], 80000000 errors were found.",
    )
    run = parse(wrong)
    assert run.is_valid is False
    assert not run.gaps


def test_a_run_without_its_check_is_neither_valid_nor_wrong() -> None:
    assert parse(OUTPUT[: OUTPUT.index("Solution")]).is_valid is None


def test_older_headers_and_one_thread_are_read() -> None:
    old = OUTPUT.replace("Best Rate MB/s", "Rate (MB/s)  ").replace("(elements)", "")
    old = old.replace("Array size = 80000000 , Offset = 0 ", "Array size = 8, Offset = 0")
    old = "\n".join(line for line in old.split("\n") if "Number of Threads" not in line)
    run = parse(old.replace("bytes per array element", "bytes per DOUBLE PRECISION word"))
    assert (run.arrays_bytes, run.threads) == (192, None)


def test_the_table_alone_is_read_and_the_size_of_the_arrays_is_a_gap() -> None:
    run = parse(OUTPUT[OUTPUT.index("Function") : OUTPUT.index("Solution")])
    assert (len(run.kernels), run.arrays_bytes) == (4, None)
    assert [gap.subject for gap in run.gaps] == ["STREAM arrays"]


@pytest.mark.parametrize(
    ("head", "node"),
    [
        ("+ numactl --cpunodebind=0 --membind=1 ./stream", 1),
        ("$ /usr/bin/numactl -N 1 -m0-1 ./stream", 1),
        ("policy: bind\ncpubind: 0\nmembind: 0\n+ numactl -m 1 ./stream", 1),
        ("+ numactl --show\npolicy: bind\ncpubind: 0\nmembind: 0", 0),
        ("+ numactl -i all ./stream", None),
        ("+ numactl -N 0 --interleave=0,1 ./stream", None),
        ("+ numactl -N 0 -p 1 ./stream", 1),
        ("policy: default\ncpubind: 0\nmembind: 0 1", 0),
        ("policy: interleave\ncpubind: 0\nmembind: 0 1", None),
        ("policy: preferred\npreferred node: 1\ncpubind: 0\nmembind: 0 1", None),
        ("numactl: command not found", None),
    ],
)
def test_the_binding_is_what_the_log_shows_or_sets_last(head: str, node: int | None) -> None:
    figures = OUTPUT_OF.of_log(f"{head}\n{OUTPUT}", "stream.log")
    assert {one.node for one in figures.samples} == {node}
    assert ("binding" in [gap.subject for gap in figures.gaps]) == (
        head.startswith("+ numactl") and node is None
    )


def test_threads_that_were_not_given_are_a_gap() -> None:
    run = parse(OUTPUT.replace("counted = 56", "counted = 28"))
    assert run.threads == 28
    assert run.gaps[0].reason == "56 requested, 28 counted"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "rows of Copy, Scale, Add, Triad"),
        (OUTPUT[: OUTPUT.index("Add:")], "found '2 rows'"),
        (OUTPUT + OUTPUT, "one run"),
        # a size that was not allocated, and a time too short for the clock
        (OUTPUT.replace("342008.5", "0.0"), "27: expected a rate in MB/s above 0"),
        (OUTPUT.replace("342008.5", "inf"), "27: expected a rate in MB/s"),
        (OUTPUT.replace("342008.5", "-nan"), "27: expected a rate in MB/s"),
        (OUTPUT.replace("Scale:", "Copy:"), "one row of each"),
        (OUTPUT.replace("size = 80000000", "size = 0"), "arrays of some size"),
    ],
)
def test_output_that_is_none_is_refused(text: str, says: str) -> None:
    with pytest.raises(ParseError, match=says):
        parse(text)


@needs_shared
def test_a_published_output_is_read() -> None:
    run = parse(shared("samples/superbench-streamResultZen.log").read_text())
    assert run.kernels[3].best_bytes_per_s == pytest.approx(363.2087e9)
    assert (run.threads, run.gaps) == (32, ())
