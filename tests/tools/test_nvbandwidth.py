"""Output of nvbandwidth, text and JSON."""

import json
from typing import Any

import pytest

from homenode.bdf import Bdf
from homenode.errors import ParseError
from homenode.machine.tools.nvbandwidth import Status, Unit, build_argv, parse
from tests.mutations import MUTATIONS, survives
from tests.shared_data import needs_shared, shared

TEXT = """\
nvbandwidth Version: v0.8
Built from Git version: 66746a3

CUDA Runtime Version: 12080
CUDA Driver Version: 12080
Driver Version: 570.124.06

gpuhost-17
Device 0: NVIDIA H200 (00000009:01:00)
Device 1: NVIDIA H200 (00000000:3b:00)

Running host_to_device_memcpy_ce.
\tSample 0: host_to_device_memcpy_ce: 55.31 GB/s
memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)
           0         1
 0     55.31     53.29

SUM host_to_device_memcpy_ce 108.60
MIN host_to_device_memcpy_ce 53.29
COEFFICIENT_OF_VARIATION host_to_device_memcpy_ce 0.00

Running device_to_device_bidirectional_memcpy_read_ce.
memcpy CE GPU(row) <-> GPU(column) Read1 bandwidth (GB/s)
           0         1
 0       N/A    372.04
 1    371.90       N/A

SUM device_to_device_bidirectional_memcpy_read_ce_read1 743.94

memcpy CE GPU(row) <-> GPU(column) Read2 bandwidth (GB/s)
           0         1
 0       N/A    372.20
 1    371.70       N/A

SUM device_to_device_bidirectional_memcpy_read_ce_read2 743.90

memcpy CE GPU(row) <-> GPU(column) Total bandwidth (GB/s)
           0         1
 0       N/A    744.24
 1    743.60       N/A

SUM device_to_device_bidirectional_memcpy_read_ce_total 1487.84

Running host_device_latency_sm.
memory latency SM CPU(row) <-> GPU(column) (ns)
           0         1
 0    682.42    783.11

SUM host_device_latency_sm 1465.53

Waived:
NOTE: The reported results may not reflect the full capabilities of the platform.
Performance can vary with software drivers, hardware clocks, and system topology.
""".replace("Waived:\n", "Waived: \n")


def document(**changes: Any) -> str:
    cases = [
        {
            "bandwidth_description": "memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)",
            "bandwidth_matrix": [["55.31", "53.29"]],
            "name": "host_to_device_memcpy_ce",
            "status": "Passed",
            "sum": 108.6,
            "min": 53.29,
            "max": 55.31,
            "average": 54.3,
        },
        {
            "bandwidth_description": "memcpy CE GPU(row) <-> GPU(column) Total bandwidth (GB/s)",
            "bandwidth_matrix": [
                ["N/A", "372.04"],
                ["371.9", "N/A"],
                ["N/A", "372.2"],
                ["371.7", "N/A"],
                ["N/A", "744.24"],
                ["743.6", "N/A"],
            ],
            "name": "device_to_device_bidirectional_memcpy_read_ce",
            "status": "Passed",
            "sum": 1487.84,
            "min": 0.0,
        },
        {
            "bandwidth_description": "memory latency SM CPU(row) <-> GPU(column) (ns)",
            "bandwidth_matrix": [["682.42", "783.11"]],
            "name": "host_device_latency_sm",
            "status": "Passed",
            "sum": 1465.53,
        },
        {"name": "all_to_one_write_sm", "status": "Waived"},
    ]
    root: dict[str, Any] = {
        "CUDA Runtime Version": 12080,
        "Driver Version": "570.124.06",
        "GPU Device list": [
            "0: NVIDIA H200 (00000009:01:00): (gpuhost-17)",
            "1: NVIDIA H200 (00000000:3b:00): (gpuhost-17)",
        ],
        "git_version": "66746a3",
        "testcases": cases,
        "version": "v0.8",
        **changes,
    }
    return json.dumps({"nvbandwidth": root}, indent="\t") + "\n\n"


def test_text_and_json_tell_the_same() -> None:
    text, from_json = parse(TEXT), parse(document())
    assert text.devices == from_json.devices
    assert text.driver_version == from_json.driver_version == "570.124.06"
    for name in ("host_to_device_memcpy_ce", "host_device_latency_sm"):
        a, b = text.test(name), from_json.test(name)
        assert a is not None and b is not None
        assert a.matrices[0].cells == b.matrices[0].cells


def test_bandwidth_is_in_bytes_per_second_and_latency_in_ns() -> None:
    run = parse(TEXT)
    copy, latency = run.test("host_to_device_memcpy_ce"), run.test("host_device_latency_sm")
    assert copy is not None and latency is not None
    assert copy.matrices[0].unit is Unit.BYTES_PER_S
    assert list(copy.matrices[0].list_values()) == pytest.approx([55.31e9, 53.29e9])
    assert latency.matrices[0].unit is Unit.NS
    assert latency.matrices[0].list_values() == (682.42, 783.11)


@pytest.mark.parametrize("text", [TEXT, document()])
def test_two_ways_at_once_are_three_matrices_also_where_json_joins_them(text: str) -> None:
    test = parse(text).test("device_to_device_bidirectional_memcpy_read_ce")
    assert test is not None
    assert [matrix.part for matrix in test.matrices] == ["read1", "read2", "total"]
    assert all(len(matrix.cells) == 2 for matrix in test.matrices)
    assert test.matrices[2].list_values() == pytest.approx((744.24e9, 743.6e9))


def test_a_name_that_a_version_does_not_know_leaves_the_others() -> None:
    known = json.loads(document())["nvbandwidth"]["testcases"][0]
    run = parse(document(testcases=[known, {"name": "device_local_copy", "status": "Not Found"}]))
    assert [test.status for test in run.tests] == [Status.PASSED, Status.FAILED]


def test_two_ways_before_version_0_6_were_one_matrix() -> None:
    case = {
        "bandwidth_description": "memcpy CE GPU(row) <-> GPU(column) bandwidth (GB/s)",
        "bandwidth_matrix": [["N/A", "744.24"], ["743.6", "N/A"]],
        "name": "device_to_device_bidirectional_memcpy_read_ce",
        "status": "Passed",
        "sum": 1487.8,
    }
    test = parse(document(testcases=[case])).tests[0]
    assert [matrix.part for matrix in test.matrices] == [None]


def test_cells_that_are_not_there_are_absent_and_not_zero() -> None:
    test = parse(document()).test("device_to_device_bidirectional_memcpy_read_ce")
    assert test is not None
    assert test.matrices[0].cells[0][0] is None
    # The tool's own minimum is 0 because of them.
    assert min(test.matrices[0].list_values()) == pytest.approx(371.9e9)


def test_a_gpu_keeps_its_address_with_a_long_domain_and_the_host_no_name() -> None:
    for text in (TEXT, document()):
        run = parse(text)
        assert [device.address for device in run.devices] == [
            Bdf.parse("0009:01:00.0"),
            Bdf.parse("0000:3b:00.0"),
        ]
        assert "gpuhost" not in repr(run)


def test_version_0_5_prints_no_addresses_and_version_0_10_no_devices() -> None:
    old = TEXT.replace(" (00000009:01:00)", "").replace(" (00000000:3b:00)", "")
    assert [device.address for device in parse(old).devices] == [None, None]
    lines = [line for line in TEXT.split("\n") if not line.startswith(("Device", "gpuhost"))]
    assert parse("\n".join(lines)).devices == ()


def test_waived_tests_of_a_text_have_no_name() -> None:
    run = parse(TEXT)
    assert [test.status for test in run.tests].count(Status.WAIVED) == 1
    assert run.tests[-1].name is None
    assert run.gaps[0].subject == "waived tests"
    waived = parse(document()).test("all_to_one_write_sm")
    assert waived is not None and waived.status is Status.WAIVED


@pytest.mark.parametrize("word", ["Error", "Failed"])
def test_an_error_is_a_second_entry_of_the_test_that_was_running(word: str) -> None:
    name = "host_to_device_memcpy_ce"
    cases = [{"name": name, "status": "Running"}, {"name": name, "status": word}]
    run = parse(document(testcases=cases, error="CUDA_ERROR_OUT_OF_MEMORY in cuMemAlloc"))
    assert [(test.name, test.status) for test in run.tests] == [(name, Status.FAILED)]
    assert run.errors == ("CUDA_ERROR_OUT_OF_MEMORY in cuMemAlloc",)


def test_documents_that_follow_each_other_are_one_run() -> None:
    first = document(testcases=[{"name": "all_to_one_write_sm", "status": "Waived"}])
    second = document(testcases=[], error="Invalid buffer size")
    run = parse(first + second)
    assert (len(run.tests), run.errors) == (1, ("Invalid buffer size",))


def test_warnings_with_braces_around_the_json_are_no_json() -> None:
    noisy = "{NVML warning: {persistence mode off}}\n" + document() + "{bye}\n}\n"
    assert parse(noisy) == parse(document())


def test_a_test_without_a_result_is_incomplete_and_with_an_error_failed() -> None:
    cut = TEXT[: TEXT.index("memory latency SM")]
    error = "CUDA_ERROR_LAUNCH_FAILED in expression x\n"
    for text, status in ((cut, Status.INCOMPLETE), (cut + error, Status.FAILED)):
        test = parse(text).test("host_device_latency_sm")
        assert test is not None and test.status is status


def test_rows_of_several_hosts_are_read() -> None:
    text = TEXT.replace(" 0     55.31     53.29", "gpuhost-17: 0     55.31     53.29")
    test = parse(text).test("host_to_device_memcpy_ce")
    assert test is not None and test.matrices[0].list_values() == (55.31e9, 53.29e9)


def test_machine_lines_stand_for_the_sum() -> None:
    text = TEXT.replace(
        "SUM host_device_latency_sm 1465.53", "&&&& PERF host_device_latency_sm 1465.53 -ns"
    )
    assert parse(text).test("host_device_latency_sm") == parse(TEXT).test("host_device_latency_sm")


def test_a_sum_that_its_cells_do_not_give_is_a_gap() -> None:
    run = parse(
        TEXT.replace("SUM host_to_device_memcpy_ce 108.60", "SUM host_to_device_memcpy_ce 99.60")
    )
    assert run.gaps[0].subject == "sum of host_to_device_memcpy_ce"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a line 'nvbandwidth Version"),
        ("nvbandwidth Version: v0.8\n", "missing tests"),
        (TEXT + TEXT, "one run"),
        (TEXT.replace(" 0     55.31     53.29", " 0     55.31"), "16: expected a row number and 2"),
        (TEXT.replace("53.29\n", "53,29\n", 1), "a number or N/A"),
        (TEXT.replace(" 0     55.31     53.29", " 0     55.31     inf"), "a number or N/A"),
        ("{\n", "a JSON document"),
        ("{\n}\n", "a JSON object with"),
        (document(testcases={}), "testcases"),
        (document(testcases=[{"name": "x", "status": "Skipped"}]), "status"),
        (document(version=8), "version"),
        (document(version=None), "a version"),
        (document().replace('"55.31"', "55.31"), "bandwidth_matrix"),
        (document().replace('"372.04"', '"372.04", "1"'), "rows of equal length"),
    ],
)
def test_output_that_is_none_is_refused(text: str, says: str) -> None:
    with pytest.raises(ParseError, match=says):
        parse(text)


def test_json_that_is_nested_without_end_is_refused() -> None:
    with pytest.raises(ParseError, match="a JSON document"):
        parse("{\n" + '"a":[' * 200_000)


@needs_shared
@pytest.mark.parametrize(
    ("name", "tests"),
    [
        ("nvbandwidth_v0.8_text.txt", 5),
        ("nvbandwidth_v0.8.json", 5),
        ("nvbandwidth_v0.8_verbose.json", 5),
        ("nvbandwidth_v0.10_text_excerpt.txt", 1),
        ("superbench-nvbandwidth_results.log", 32),
    ],
)
def test_published_outputs_are_read(name: str, tests: int) -> None:
    run = parse(shared(f"samples/{name}").read_text())
    assert len(run.tests) == tests
    assert not [gap for gap in run.gaps if gap.subject != "waived tests"]


def test_json_is_asked_for() -> None:
    argv = build_argv(["device_local_copy"], samples=5)
    assert " ".join(argv) == "nvbandwidth -j -i 5 -t device_local_copy"


@pytest.mark.parametrize("text", [TEXT, document()])
def test_damaged_output_is_read_or_refused_and_nothing_else(text: str) -> None:
    assert survives(parse, text, MUTATIONS) > 0
