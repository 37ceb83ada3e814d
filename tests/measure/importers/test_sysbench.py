"""Output of sysbench."""

import pytest

from homenode.errors import ParseError
from homenode.measure.importers.sysbench import parse
from tests.shared_data import needs_shared, shared

CPU = """\
sysbench 1.0.20 (using system LuaJIT 2.1.0-beta3)

Running the test with following options:
Number of threads: 56
Report intermediate results every 10 second(s)
Initializing random number generator from current time


Prime numbers limit: 10000

Initializing worker threads...

Threads started!

[ 10s ] thds: 56 eps: 81162.18 lat (ms,95%): 0.70
[ 20s ] thds: 56 eps: 81000.00 lat (ms,95%): 0.71
CPU speed:
    events per second: 81050.25

General statistics:
    total time:                          30.0010s
    total number of events:              2431589

Latency (ms):
         min:                                    0.66
         avg:                                    0.69
         max:                                   14.16
         95th percentile:                        0.70
         sum:                              1679510.39

Threads fairness:
    events (avg/stddev):           43421.2321/215.17
    execution time (avg/stddev):   29.9913/0.01

"""

MEMORY = """\
sysbench 1.0.20 (using bundled LuaJIT 2.1.0-beta2)

Running the test with following options:
Number of threads: 1
Initializing random number generator from current time


Running memory speed test with the following options:
  block size: 1KiB
  total size: 102400MiB
  operation: write
  scope: global

Initializing worker threads...

Threads started!

Total operations: 41943040 (7654321.00 per second)

40960.00 MiB transferred (7474.92 MiB/sec)


General statistics:
    total time:                          5.4797s
    total number of events:              41943040

Latency (ms):
         min:                                    0.00
         avg:                                    0.00
         max:                                    0.99
         95th percentile:                        0.00
         sum:                                 2400.00

Threads fairness:
    events (avg/stddev):           41943040.0000/0.00
    execution time (avg/stddev):   2.4000/0.00
"""


def test_the_cpu_test_is_read_in_events_per_second() -> None:
    run = parse(CPU)
    assert (run.version, run.threads, run.prime_limit) == ("1.0.20", 56, 10_000)
    assert run.events_per_s == 81_050.25
    assert run.events_per_thread == (43421.2321, 215.17), "a mean and a deviation, not counts"
    assert run.memory is None
    assert not run.gaps


def test_the_memory_test_says_what_it_measured() -> None:
    memory = parse(MEMORY).memory
    assert memory is not None
    assert memory.bytes_per_s == pytest.approx(7474.92 * 2**20)
    assert (memory.block_bytes, memory.operation) == (1024, "write")
    # The defaults: all threads write one buffer that the first-level cache holds.
    assert memory.shares_one_buffer


def test_what_a_shell_or_a_warning_puts_before_the_version_is_skipped() -> None:
    assert parse("$ sysbench cpu run\nWARNING: something: 1\n" + CPU) == parse(CPU)


def test_unknown_lines_are_gaps() -> None:
    run = parse(CPU.replace("    events per", "    events per hour: 3\n    events per"))
    assert [gap.reason for gap in run.gaps] == ["not known: 'CPU speed:events per hour: 3'"]


@pytest.mark.parametrize("absent", ["-nan", "nan"])
def test_a_fairness_that_is_no_number_is_absent_and_not_zero(absent: str) -> None:
    assert parse(CPU.replace("215.17", absent)).events_per_thread is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a line 'sysbench 1.0.20'"),
        (CPU.replace("sysbench 1.0.20", "sysbench 0.4.12"), "sysbench 1.x"),
        (CPU + CPU, "one run"),
        (CPU[: CPU.index("General")], "'total number of events'"),
        (CPU.replace("81050.25", "0.00"), "above 0"),
        (CPU.replace("81050.25", "inf"), "events per second"),
        (CPU.replace("30.0010s", "30.0010"), "a time in seconds such as"),
        (CPU.replace("43421.2321/215.17", "43421"), "a mean and a deviation"),
        (CPU.replace("threads: 56", "threads: 0"), "at least one thread"),
        (MEMORY.replace("1KiB", "1KB"), "block size in KiB"),
    ],
)
def test_output_that_is_none_is_refused(text: str, says: str) -> None:
    with pytest.raises(ParseError, match=says):
        parse(text)


@needs_shared
def test_published_outputs_are_read() -> None:
    assert parse(shared("samples/sysbench_cpu.txt").read_text()).events_per_s == 679.85
    memory = parse(shared("samples/sysbench_memory.txt").read_text()).memory
    assert memory is not None
    assert memory.bytes_per_s == pytest.approx(13496.07 * 2**20)
