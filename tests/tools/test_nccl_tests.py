"""Output of nccl-tests and rccl-tests, text and JSON."""

import json
from typing import Any

import pytest

from homenode.errors import ParseError
from homenode.machine.tools.nccl_tests import CollectiveLibrary as Family
from homenode.machine.tools.nccl_tests import build_argv, parse
from tests.mutations import MUTATIONS, survives
from tests.shared_data import needs_shared, shared

HEAD = """\
# nccl-tests version 2.19.6 nccl-headers=22809 nccl-library=22809
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 2 minBytes 8 maxBytes 8589934592 step: 2(factor) warmup iters: 10 iters: 100 \
agg iters: 1 validation: 1 graph: 0 unalign: 0
#
# Using devices
#  Rank  0 Group  0 Pid  41234 on  gpuhost-1 device  0 [0000:19:00] NVIDIA H200
#  Rank  1 Group  0 Pid  41234 on  gpuhost-2 device  0 [0000:3b:00] NVIDIA H200
#
"""
COLUMNS = """\
#                                                              out-of-place           in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   \
algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  \
(GB/s)  (GB/s)
"""
ROWS = """\
           8             2     float     sum      -1    21.53    0.00    0.00       0    21.40    \
0.00    0.00       0
  8589934592    2147483648     float     sum      -1  31460.0  214.75  375.81       0  1.2e+06  \
213.00  372.75       0
"""
FOOT = """\
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 187.14
#
# Collective test concluded: all_reduce_perf

#
"""
TEXT = HEAD + COLUMNS + ROWS + FOOT

RCCL = """\
# nThread 1 nGpus 8 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20 \
agg iters: 1 validation: 1 graph: 0
#
rccl-tests: Version develop:ae3e635
# Using devices
#   Rank  0 Pid   4242 on     node01 device  0 [0000:11:00.0] AMD Instinct MI300X
#
#                                                                 in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)
   134217728      33554432     float     sum      -1    812.3  165.23  289.16      0
# Errors with asterisks indicate errors that have exceeded the maximum threshold.
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 289.16
#
node01: Test failure: no error
"""


def document(**changes: Any) -> str:
    def half(time: float, algbw: float, busbw: float) -> dict[str, Any]:
        return {"time": time, "alg_bw": algbw, "bus_bw": busbw, "nwrong": 0.0}

    value: dict[str, Any] = {
        "version": 3,
        "args": ["./all_reduce_perf", "--token=hunter2"],
        "env": ["AWS_SECRET_ACCESS_KEY=hunter2", "PATH=/usr/bin"],
        "nccl_version": 22809,
        "config": {
            "nthreads": 1,
            "ngpus": 2,
            "warmup_iters": 10,
            "iterations": 100,
            "blocking_collectives": "false",
            "devices": [
                {
                    "rank": 0,
                    "hostname": "gpuhost-1",
                    "device": 0,
                    "device_hex": "0000:19:00",
                    "device_info": "NVIDIA H200",
                }
            ],
        },
        "results": [
            {
                "size": 8589934592,
                "count": 2147483648,
                "type": "float",
                "redop": "sum",
                "root": "    -1",
                "out_of_place": half(31460.0, 214.75, 375.81),
                "in_place": half(1.2e6, 213.0, 372.75),
                "experiment_name": "AllReduce",
            }
        ],
        "out_of_bounds": {"count": 0, "okay": "true"},
        "average_bus_bandwidth": {"bandwidth": 187.14, "okay": "unchecked"},
        "errors": [],
        **changes,
    }
    return json.dumps(value)


def test_bus_bandwidth_is_not_the_column_before_it() -> None:
    # Reading the sixth column gives 214.75, the algorithm's: less than the mean can be.
    run = parse(TEXT)
    assert run.peak_bus_bytes_per_s() == pytest.approx(375.81e9)
    assert run.average_bus_bytes_per_s == pytest.approx(187.14e9)
    last = run.rows[-1]
    assert last.out_of_place is not None and last.in_place is not None
    assert last.in_place.time_ns == pytest.approx(1.2e9)


def test_what_was_run_is_kept() -> None:
    run = parse(TEXT)
    assert (run.family, run.version, run.library_version) == (Family.NCCL, "2.19.6", "22809")
    assert (run.collective, run.gpus) == ("all_reduce", 2)
    assert (run.warmups, run.iterations) == (10, 100)
    assert run.is_correct is True
    assert not run.gaps


def test_gpus_of_all_processes_count() -> None:
    assert parse(TEXT.replace("nGpus 2", "nGpus 1")).gpus == 2
    config = {"nthreads": 1, "ngpus": 2, "devices": [{"rank": 0}, {"rank": 2}]}
    assert parse(document(config=config)).gpus == 4


def test_gpus_are_named_and_hosts_are_not() -> None:
    run = parse(TEXT)
    assert run.gpu_names == ("NVIDIA H200", "NVIDIA H200")
    assert "gpuhost" not in repr(run)


def test_old_tables_have_no_root_and_ranks_no_address() -> None:
    old = TEXT.replace("   root  ", "  ").replace("      -1  ", "  ").replace("#wrong", " error")
    old = old.replace("[0000:19:00]", "[0x19]").replace("Group  0 ", "")
    run = parse(old)
    assert run.peak_bus_bytes_per_s() == pytest.approx(375.81e9)
    assert len(run.gpu_names) == 2


def test_data_that_were_not_checked_are_not_called_right() -> None:
    unchecked = ROWS.replace("      0 ", "    N/A ").replace("       0\n", "     N/A\n")
    assert parse(HEAD + COLUMNS + unchecked + FOOT).is_correct is None


def test_wrong_data_are_said() -> None:
    wrong = ROWS.replace("372.75       0", "372.75       3")
    assert parse(HEAD + COLUMNS + wrong + FOOT).is_correct is False
    assert parse(TEXT.replace("values : 0 OK", "values : 3 FAILED")).is_correct is False


def test_a_blank_half_is_the_one_out_of_place() -> None:
    row = "  8589934592    2147483648     float     sum      -1" + " " * 32
    run = parse(HEAD + COLUMNS + row + "  31460.0  214.75  375.81       0\n" + FOOT)
    assert run.rows[0].out_of_place is None
    assert run.rows[0].in_place is not None


def test_columns_of_single_iterations_and_time_stamps_do_not_shift_the_others() -> None:
    columns = COLUMNS.replace("#wrong", "#wrong   i_min   i_max   i_p99   i_cv%")
    row = (
        "  8589934592    2147483648     float     sum      -1  31460.0  214.75  375.81       0"
        "  31000.0 32000.0 31990.0    0.50  31410.0  215.00  376.25       0"
        "  31000.0 32000.0 31990.0    0.50  2026-11-20 07:00:00\n"
    )
    run = parse(HEAD + columns + row + FOOT)
    assert run.peak_bus_bytes_per_s() == pytest.approx(376.25e9)


def test_rccl_with_one_half_is_read() -> None:
    run = parse(RCCL)
    assert (run.family, run.version, run.gpus) == (Family.RCCL, "develop:ae3e635", 8)
    assert run.gpu_names == ("AMD Instinct MI300X",)
    assert run.rows[0].out_of_place is None
    assert run.peak_bus_bytes_per_s() == pytest.approx(289.16e9)


def test_what_the_library_logs_between_rows_is_skipped() -> None:
    log = "gpuhost-1:3442:3442 [0] NCCL INFO Launch mode Parallel\n"
    assert parse(HEAD + COLUMNS + log + ROWS + FOOT) == parse(TEXT)


def test_a_table_without_its_end_is_read_with_a_gap() -> None:
    run = parse(HEAD + COLUMNS + ROWS)
    assert run.average_bus_bytes_per_s is None
    assert "ended early" in run.gaps[0].reason


def test_json_tells_what_the_text_tells() -> None:
    run = parse(document())
    assert run.rows == parse(TEXT).rows[-1:]
    assert (run.collective, run.gpus, run.library_version) == ("all_reduce", 2, "22809")
    assert run.average_bus_bytes_per_s == pytest.approx(187.14e9)
    assert run.is_correct is True


def test_the_environment_and_the_arguments_are_never_kept() -> None:
    assert "hunter2" not in repr(parse(document()))
    with pytest.raises(ParseError) as refused:
        parse(document(results="none"))
    assert "hunter2" not in str(refused.value)


def test_the_misspelt_average_of_the_first_version_is_read() -> None:
    text = document(version=1).replace("bandwidth", "bandwidith")
    assert parse(text).average_bus_bytes_per_s == pytest.approx(187.14e9)


def test_a_half_that_is_null_and_a_number_that_is_a_text_nan_are_absent() -> None:
    changed = json.loads(document())
    result = changed["results"][0]
    result["out_of_place"] = None
    result["in_place"]["nwrong"] = "nan"
    run = parse(json.dumps(changed))
    assert run.rows[0].out_of_place is None
    assert run.rows[0].in_place is not None and run.rows[0].in_place.wrong is None


def test_time_on_the_cpu_stands_for_time() -> None:
    text = document().replace('"time"', '"cpu_time"')
    assert parse(text).rows == parse(document()).rows


def test_errors_of_a_run_are_gaps() -> None:
    assert parse(document(errors=["unhandled cuda error"])).gaps[0].reason == (
        "error: unhandled cuda error"
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a table of sizes"),
        (HEAD + COLUMNS + FOOT, "a table of sizes"),
        (HEAD + ROWS + FOOT, "a table of sizes"),
        (TEXT + TEXT.replace("iters: 100", "iters: 20"), "one value of 'iters'"),
        (TEXT + TEXT, "one table"),
        (TEXT.replace("  214.75  375.81  ", "  375.81  "), "5 and 2 x 4 columns"),
        (TEXT.replace("375.81", "inf"), "a bandwidth in GB/s"),
        (TEXT.replace("busbw", "allbw"), "columns time, algbw, busbw"),
        ("{", "JSON"),
        (document(results=[]), "1 to 4096 results"),
        (document(results=[{"size": 8}]), "out of place or in place"),
        (document().replace("31460.0", '"31460.0"'), "results.*time"),
        (document().replace("31460.0", "-1.0"), "results.*time"),
        (document().replace("8589934592", "8.5"), "results.*size"),
    ],
)
def test_output_that_is_none_is_refused(text: str, says: str) -> None:
    with pytest.raises(ParseError, match=says):
        parse(text)


@needs_shared
@pytest.mark.parametrize(
    ("name", "rows", "peak"),
    [
        ("nccl_tests_2.19.6_all_reduce_text.txt", 4, 478.59e9),
        ("nccl_tests_2.19.6_all_reduce.json", 4, 478.585977e9),
        ("rccl_tests_all_reduce_text.txt", 2, 289.16e9),
        ("superbench-nccl_allreduce.log", 34, 235.26e9),
    ],
)
def test_published_outputs_are_read(name: str, rows: int, peak: float) -> None:
    run = parse(shared(f"samples/{name}").read_text())
    assert len(run.rows) == rows
    assert run.peak_bus_bytes_per_s() == pytest.approx(peak)
    assert not run.gaps


def test_data_are_checked_and_sizes_double() -> None:
    command = build_argv(8, largest_bytes=1 << 30)
    assert command[command.index("-c") + 1] == "1"
    assert command[command.index("-e") + 1] == "1073741824"


@pytest.mark.parametrize("text", [TEXT, RCCL, document()])
def test_damaged_output_is_read_or_refused_and_nothing_else(text: str) -> None:
    assert survives(parse, text, MUTATIONS) > 0
