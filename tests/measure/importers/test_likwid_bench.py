"""Output of likwid-bench."""

import shutil
import subprocess

import pytest

from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.measure.importers.likwid_bench import argv, parse
from tests.mutations import MUTATIONS, survives

OUTPUT = """\
Running without Marker API. Activate Marker API with -m on commandline.
Allocate: Process running on hwthread 0 (Domain S0) - Vector length 1000000/8000000 Offset 0
--------------------------------------------------------------------------------
LIKWID MICRO BENCHMARK
Test: copy_mem_avx512
--------------------------------------------------------------------------------
Using 1 work groups
Using 2 threads
--------------------------------------------------------------------------------
Group: 0 Thread 0 Global Thread 0 running on hwthread 0 - Vector length 1000000 Offset 0
Group: 0 Thread 1 Global Thread 1 running on hwthread 32 - Vector length 1000000 Offset 1000000
--------------------------------------------------------------------------------
Cycles:\t\t\t25960747
CPU Clock:\t\t2596074779
Cycle Clock:\t\t2596074779
Time:\t\t\t1.000000e-02 sec
Iterations:\t\t24
Iterations per thread:\t12
Inner loop executions:\t62500
Size (Byte):\t\t32000000
Size per thread:\t16000000
Number of Flops:\t0
MFlops/s:\t\t0.00
Data volume (Byte):\t384000000
MByte/s:\t\t38400.00
Cycles per update:\t1.081698
Cycles per cacheline:\t8.653582
Loads per update:\t1
Stores per update:\t1
Load bytes per element:\t8
Store bytes per elem.:\t8
Load/store ratio:\t1.00
Instructions:\t\t3125016
UOPs:\t\t\t4000000
--------------------------------------------------------------------------------
"""


def test_a_run_is_read_in_bytes_per_second() -> None:
    run = parse(OUTPUT)
    assert (run.test, run.threads, run.pus) == ("copy_mem_avx512", 2, CpuSet([0, 32]))
    assert run.bytes_per_s == pytest.approx(38.4e9)
    assert run.size_bytes == 32_000_000
    assert not run.gaps


def test_a_bandwidth_that_its_volume_and_time_do_not_give_is_a_gap() -> None:
    run = parse(OUTPUT.replace("38400.00", "36400.00"))
    assert run.gaps[0].subject == "likwid-bench bandwidth"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a line 'Test'"),
        ("ERROR: Benchmark test 'x' not found\n", "a line 'Test'"),
        (OUTPUT[: OUTPUT.index("Size (Byte)")], "Size"),
        (OUTPUT + OUTPUT, "one value"),
        (OUTPUT.replace("38400.00", "0.00"), "above 0"),
        (OUTPUT.replace("38400.00", "inf"), "a bandwidth"),
    ],
)
def test_output_that_is_none_is_refused(text: str, says: str) -> None:
    with pytest.raises(ParseError, match=says):
        parse(text)


@pytest.mark.likwid
@pytest.mark.skipif(shutil.which("likwid-bench") is None, reason="likwid-bench is not installed")
def test_the_installed_tool_is_understood() -> None:
    done = subprocess.run(
        [*argv("copy", "S0", 4_000_000, 1), "-i", "2"],
        capture_output=True,
        text=True,
        env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"},
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"likwid-bench does not run here: {done.stderr[:80]}")
    run = parse(done.stdout)
    assert run.bytes_per_s > 0
    assert not run.gaps


def test_damaged_output_is_read_or_refused_and_nothing_else() -> None:
    assert survives(parse, OUTPUT, MUTATIONS) > 0
