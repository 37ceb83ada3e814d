"""The probe's commands on this machine: documents, accounting, pages, refusals. No speeds."""

from pathlib import Path
from typing import Any

import pytest

from tests.probe_build import FEW_BYTES, allowed_pus, one_pu, probe, two_pus

COMMANDS = (
    "bandwidth",
    "latency",
    "loaded-latency",
    "core-to-core",
    "throughput",
    "smt",
    "placement",
)
REPORTED = {"read": 8, "write": 8, "copy": 16, "scale": 16, "add": 24, "triad": 24}


def bandwidth(*arguments: str) -> dict[str, Any]:
    return probe("bandwidth", *FEW_BYTES, *arguments).document


def test_help_lists_each_command_and_each_command_has_help() -> None:
    text = probe("--help").text
    for command in COMMANDS:
        assert f"  {command} " in text
        answer = probe(command, "--help")
        assert answer.code == 0 and "--pus" in answer.text and "--replay" not in answer.text
    assert probe("--version").text.startswith("homenode-probe ")


def test_a_document_says_its_format_machine_contention_and_caveats() -> None:
    document = bandwidth("--pus", one_pu())
    assert document["format"] == "homenode.probe/1"
    assert document["command"] == "bandwidth"
    assert document["pus"] == one_pu()
    machine = document["machine"]
    assert machine["architecture"] in ("x86_64", "aarch64")
    assert machine["clock_hz_measured"] > 1e6
    assert set(document["contention"]) >= {"others_ratio", "steal_ratio", "busy_neighbour"}
    for caveat in document["caveats"]:
        assert caveat["id"] and caveat["detail"] and caveat["fix"]


def test_every_kernel_counts_reported_and_moved_bytes() -> None:
    run = bandwidth("--pus", one_pu())["runs"][0]
    kernels = run["kernels"]
    assert {(k["kernel"], k["stores"]) for k in kernels} == {
        *((name, "regular") for name in REPORTED),
        *((name, "non-temporal") for name in REPORTED if name != "read"),
    }
    for kernel in kernels:
        reported = REPORTED[kernel["kernel"]]
        allocates = kernel["kernel"] != "read" and kernel["stores"] == "regular"
        moved = reported + (8 if allocates else 0)
        assert kernel["reported_bytes_per_element"] == reported
        assert kernel["moved_bytes_per_element"] == moved
        assert kernel["moved_bytes_per_sample"] * reported == (
            kernel["reported_bytes_per_sample"] * moved
        )
        for raw in kernel["raw"]:
            assert raw["bytes_per_s"] == pytest.approx(
                kernel["reported_bytes_per_sample"] / raw["elapsed_ns"] * 1e9, rel=1e-6
            )
        for state in kernel["by_state"]:
            assert state["moved_median_bytes_per_s"] == pytest.approx(
                state["median_bytes_per_s"] * moved / reported, rel=1e-6
            )


def test_a_median_lies_in_its_interval_and_among_its_raw_samples() -> None:
    for kernel in bandwidth("--pus", one_pu())["runs"][0]["kernels"]:
        raw = [sample["bytes_per_s"] for sample in kernel["raw"]]
        for state in kernel["by_state"]:
            interval = state["interval"]
            low, high = interval["low_bytes_per_s"], interval["high_bytes_per_s"]
            assert low <= state["median_bytes_per_s"] <= high
            assert min(raw) <= low and high <= state["best_bytes_per_s"] <= max(raw)
            assert 0 < interval["confidence"] <= 1
        assert kernel["stop"] in ("interval tight enough", "time up", "all samples taken")


def test_every_sample_of_several_threads_stands_between_two_handoffs() -> None:
    run = bandwidth("--pus", two_pus(), "--kernels", "read,copy")["runs"][0]
    assert run["threads"] == 2
    states = {state["state"]: state["samples"] for state in run["states"]}
    labelled: dict[int, int] = dict.fromkeys(states, 0)
    for kernel in run["kernels"]:
        pooled = {state["state"]: state["samples"] for state in kernel["by_state"]}
        for sample in kernel["raw"]:
            assert len(sample["cas_before_ns"]) == len(sample["cas_after_ns"]) == 1
            if sample["state"] is None:
                assert sample["no_state"]
            else:
                labelled[sample["state"]] += 1
        for state, count in pooled.items():
            assert count <= sum(sample["state"] == state for sample in kernel["raw"])
    assert labelled == states


def runs_here(instructions: str) -> bool:
    """As the kernel says. avx512: the foundation is what the kernels need."""
    flags = {"avx512": "avx512f", "neon": "asimd"}.get(instructions, instructions)
    return flags in Path("/proc/cpuinfo").read_text().split()


@pytest.mark.parametrize("instructions", ["avx512", "avx2", "sse2", "neon"])
def test_each_instruction_set_passes_its_own_checks(instructions: str) -> None:
    answer = probe("bandwidth", "--pus", one_pu(), *FEW_BYTES, "--isa", instructions)
    if not runs_here(instructions):
        assert answer.code == 2
        assert "expected one that this processor runs" in answer.errors
        return
    assert answer.document["instruction_set"] == instructions
    kernels = answer.document["runs"][0]["kernels"]
    assert {kernel["instruction_set"] for kernel in kernels} == {instructions}


def test_the_best_kernels_name_their_instructions_and_the_document_names_all_of_them() -> None:
    document = bandwidth("--pus", one_pu())
    sets = document["machine"]["instruction_sets"]
    used = {
        (kernel["kernel"], kernel["stores"]): kernel["instruction_set"]
        for kernel in document["runs"][0]["kernels"]
    }
    assert set(used.values()) <= set(sets)  # within caches those that were fastest
    assert document["instruction_set"] == "+".join(name for name in sets if name in used.values())


def test_pages_are_verified_on_the_node_that_was_asked_for() -> None:
    nodes = bandwidth("--pus", one_pu())["machine"]["nodes"]
    if not nodes:
        pytest.skip("this kernel has no NUMA nodes")
    node = nodes[0]["node"]
    pages = bandwidth("--pus", one_pu(), "--node", str(node))["runs"][0]["pages"]
    assert pages["verified_by"] in ("move_pages", "numa_maps")
    assert set(pages["pages_of_node"]) == {str(node)}
    assert pages["pages_unknown"] == 0


def test_small_pages_are_small_when_asked_for() -> None:
    pages = bandwidth("--pus", one_pu(), "--pages", "base")["runs"][0]["pages"]
    assert pages["huge_bytes"] == 0


def test_a_matrix_has_a_cell_for_each_pair_of_nodes() -> None:
    document = bandwidth("--pus", one_pu(), "--matrix", "--kernels", "read")
    nodes = document["machine"]["nodes"]
    memory = [node["node"] for node in nodes if node["memory_bytes"] > 0]
    assert [run["node"] for run in document["runs"]] == memory
    for run in document["runs"]:
        assert set(run["pages"]["pages_of_node"]) == {str(run["node"])}


def test_a_latency_curve_has_its_samples_and_does_not_fall_with_size() -> None:
    document = probe(
        "latency", "--pus", one_pu(), "--max-bytes", "1M", "--quick", "--seconds", "0.5"
    ).document
    assert {(curve["pages_wanted"], curve["order"]) for curve in document["curves"]} == {
        (pages, order) for pages in ("auto", "base") for order in ("local", "random")
    }
    for curve in document["curves"]:
        points = curve["points"]
        assert [point["bytes"] for point in points] == [4096 << step for step in range(9)]
        for point in points:
            assert len(point["samples_ns"]) >= 5
            assert 0 < point["best_ns"] <= point["median_ns"]
        # Only the floor, from one end to the other: anything else is a matter of neighbours.
        assert points[-1]["best_ns"] > points[0]["best_ns"]


def test_a_wide_stride_still_chases_the_whole_buffer() -> None:
    document = probe(
        "latency",
        "--pus",
        one_pu(),
        *"--max-bytes 64K --orders random --stride 256 --pages base --seconds 0.2".split(),
    ).document
    assert document["curves"][0]["stride_bytes"] == 256


def test_the_core_to_core_matrix_is_symmetric_with_an_empty_diagonal() -> None:
    document = probe("core-to-core", "--pus", two_pus(), "--seconds", "0.1").document
    rows = document["matrix_ns"]["rows"]
    assert rows[0][0] is rows[1][1] is None
    assert rows[0][1] == rows[1][0] == pytest.approx(document["pairs"][0]["median_ns"])


def test_throughput_counts_each_threads_own_events() -> None:
    document = probe("throughput", "--pus", two_pus(), "--seconds", "0.2").document
    threads = document["all"]["threads"]
    assert [str(thread["pu"]) for thread in threads] == two_pus().split(",")
    assert all(thread["events"] >= len(thread["samples_events_per_s"]) for thread in threads)
    assert sum(thread["fairness_ratio"] for thread in threads) == pytest.approx(2.0)
    assert 0.5 <= document["all"]["fairness_index"] <= 1.0
    assert document["one"]["threads"][0]["fairness_ratio"] == 1


def test_smt_cost_is_of_one_against_all_of_a_core() -> None:
    document = probe("smt", "--core", two_pus(), "--seconds", "0.3").document
    assert document["siblings_known"] is False
    for core in document["cores"]:
        assert core["pus"].replace("-", ",") == two_pus() and core["gain_ratio"] > 0
        assert len(core["together"]["threads"]) == 2


def test_on_a_machine_without_siblings_the_message_says_how_to_measure_anyway() -> None:
    answer = probe("smt", "--pus", one_pu())
    assert answer.code == 3
    assert "no core with two CPUs" in answer.errors and "--core" in answer.errors


def test_loaded_latency_begins_without_load_and_ends_with_it() -> None:
    document = probe(
        "loaded-latency",
        "--pus",
        two_pus(),
        *"--chain-bytes 8M --array-bytes 4M --delays 1000,0 --seconds 0.3".split(),
    ).document
    points = document["points"]
    assert [point["delay_cycles"] for point in points] == [None, 1000, 0]
    injected = [point["median_injected_bytes_per_s"] for point in points]
    steady = [not point["from_disturbed_samples"] for point in points]
    assert injected[0] == 0
    assert all(
        bytes_per_s > 0 for bytes_per_s, calm in zip(injected[1:], steady[1:], strict=True) if calm
    )
    assert all(steady) or "load-not-steady" in {caveat["id"] for caveat in document["caveats"]}


SHORT = ("--seconds", "0.05")


def test_arrays_within_the_first_cache_are_as_small_as_asked_and_samples_last() -> None:
    """Three arrays of 4 KiB are in every L1. A pass takes less than a microsecond there."""
    document = probe(
        "bandwidth", "--pus", one_pu(), "--array-bytes", "4K", "--seconds", "0.02"
    ).document
    (run,) = document["runs"]
    assert run["array_bytes_per_thread"] == 4096
    samples = [sample for kernel in run["kernels"] for sample in kernel["raw"]]
    assert min(sample["elapsed_ns"] for sample in samples) >= 50_000
    sets = {kernel["instruction_set"] for kernel in run["kernels"]}
    assert set(document["instruction_set"].split("+")) == sets
    large = probe(
        "bandwidth", "--pus", one_pu(), "--kernels", "read", "--array-bytes", "64M", *SHORT
    ).document["runs"][0]["kernels"][0]
    assert large["reported_bytes_per_sample"] == 16 << 20, "a window, once: caches would hold it"


def test_placement_reports_what_it_sees_here() -> None:
    document = probe("placement", "--pus", two_pus(), "--seconds", "0.2").document
    assert document["verdict"] in ("steady", "moves", "unknown")
    assert document["pairs"][0]["llc_shared_reported"] in (True, False, None)
    for look in document["series"]:
        assert look["fill_one_bytes_per_s"] > 0 and look["fill_both_bytes_per_s"] > 0


MISSING_PU = str(max(allowed_pus(), default=0) + 7000)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ((), 2, "missing command"),
        (("bandwith",), 2, 'found "bandwith"'),
        (("bandwidth", "--puss", "0"), 2, 'found "--puss"'),
        (("bandwidth", "0-3"), 2, 'found "0-3"'),
        (("bandwidth", "--pus"), 2, "expected a value after --pus"),
        (("bandwidth", "--pus", "3-1"), 2, "expected CPUs such as"),
        (("bandwidth", "--pus", ""), 2, "expected CPUs such as"),
        (("bandwidth", "--seed", "1", "--seed", "2"), 2, "found it twice"),
        (("bandwidth", "--seconds", "nan"), 2, "expected a number"),
        (("bandwidth", "--seconds", "-1"), 2, "expected a number"),
        (("bandwidth", "--array-bytes", "0"), 2, "expected a size above zero"),
        (("bandwidth", "--array-bytes", "1K"), 2, "or more, 2K a thread"),
        (("loaded-latency", "--array-bytes", "16K"), 2, "256K or more"),
        (("bandwidth", "--array-bytes", "99999999999999G"), 2, "expected a size"),
        (("bandwidth", "--array-bytes", "18446744073709551615"), 2, "expected a size"),
        (("bandwidth", "--kernels", "read,trad"), 2, "expected all, or some of"),
        (("bandwidth", "--isa", "avx1024"), 2, "expected one that this processor runs"),
        (("bandwidth", "--pages", "giant"), 2, "expected auto"),
        (("bandwidth", "--matrix", "--node", "0"), 2, "not both"),
        (("latency", "--stride", "96"), 2, "expected 64"),
        (("latency", "--orders", "sorted"), 2, "expected local"),
        (("latency", "--max-bytes", "1K"), 2, "expected 16K"),
        (("placement", "--replay", "/nonexistent"), 2, "no such file"),
        (("bandwidth", "--pus", MISSING_PU), 3, "not online"),
        (("bandwidth", "--pus", one_pu(), "--array-bytes", "900000G"), 3, "MiB of memory"),
        (("bandwidth", "--pus", one_pu(), *FEW_BYTES, "--node", "1023"), 3, "node"),
        (("core-to-core", "--pus", one_pu()), 3, "two CPUs or more"),
        (("placement", "--pus", one_pu()), 3, "two CPUs or more"),
        (("loaded-latency", "--pus", one_pu()), 3, "two CPUs or more"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_was_expected_and_found(
    arguments: tuple[str, ...], code: int, says: str
) -> None:
    answer = probe(*arguments)
    assert answer.code == code
    assert says in answer.errors
    assert answer.text == ""
    assert answer.errors.startswith("homenode-probe: ")


def test_huge_pages_that_are_not_reserved_are_refused_by_name() -> None:
    if not Path("/sys/kernel/mm/hugepages/hugepages-2048kB").exists():
        pytest.skip("this kernel has no 2 MiB hugetlb pages")
    answer = probe("bandwidth", "--pus", one_pu(), "--pages", "hugetlb", "--array-bytes", "1024M")
    if answer.code == 0:
        pytest.skip("this machine has them reserved")
    assert answer.code == 3
    assert "huge pages" in answer.errors and "vm.nr_hugepages" in answer.errors


def test_an_argument_of_any_bytes_is_answered_not_crashed_on() -> None:
    for text in ("\x01", "%s%n", "é", "-" * 5000, "--=", "--", "=", "--pus=\n"):
        answer = probe("bandwidth", text)
        assert answer.code == 2, text
