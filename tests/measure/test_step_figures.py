"""Figures of steps, and what a sweep over message sizes says."""

import json

import pytest
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import NodeIndex
from homenode.errors import ParseError
from homenode.machine.tools.nccl_tests import NcclTests, parse
from homenode.machine.topology import Host
from homenode.measure.gpu_tool_samples import check_flat_curve, find_half_peak
from homenode.measure.model import BenchTest, Reader, SuiteGroup
from homenode.measure.results.model import fit_sweep
from homenode.measure.step_reading import read_step_results, read_tool_results
from homenode.measure.suite import BY_BUS, HOST_COPIES
from tests.cpu_time import cpu_time_below
from tests.mutations import MUTATIONS, survives
from tests.shared_data import needs_shared, shared
from tests.small_hosts import DeviceSpec, even_host
from tests.tools import test_amd as rocm
from tests.tools import test_nccl_tests as nccl

GPUS = ("0000:19:00.0", "0000:9b:00.0")
HOST: Host = even_host(devices=[DeviceSpec(GPUS[0]), DeviceSpec(GPUS[1], node=1, root=1)])


def made(reads: Reader, group: SuiteGroup, node: int | None = None) -> BenchTest:
    at = None if node is None else NodeIndex(node)
    return BenchTest("a test", group, ("tool",), 1.0, 10.0, reads=reads, node=at)


def nvbandwidth_text(names: tuple[str, ...] = HOST_COPIES) -> str:
    """JSON of v0.8 with one row for each test, figures made up."""
    cases = [
        {
            "name": name,
            "status": "Passed",
            "bandwidth_description": f"memcpy {'(ns)' if 'latency' in name else '(GB/s)'}",
            "bandwidth_matrix": [[f"{50 + number}.5", f"{20 + number}.25"]],
            "sum": 1.0,
        }
        for number, name in enumerate(names)
    ]
    head = {
        "version": "v0.8",
        "git_version": "v0.8",
        "CUDA Runtime Version": 13000,
        "Driver Version": "580.1",
        "testcases": cases,
        "GPU Device list": [
            f"{n}: NVIDIA H200 ({gpu[:-2].rjust(14, '0')})" for n, gpu in enumerate(GPUS)
        ],
    }
    return json.dumps({"nvbandwidth": head}, indent="\t")


def test_a_bound_run_of_nvbandwidth_is_a_row_of_the_matrix() -> None:
    for node in (1, None):
        test = made(Reader.NVBANDWIDTH, SuiteGroup.GPU_BANDWIDTH, node)
        row = read_step_results(test, nvbandwidth_text(), HOST)
        assert {one.node for one in row.samples} == {node}
        assert {one.device for one in row.samples} == set(map(Bdf.parse, GPUS))


def test_gpus_without_addresses_are_in_the_order_that_the_test_asked_for() -> None:
    document = json.loads(nvbandwidth_text())
    del document["nvbandwidth"]["GPU Device list"]
    text = json.dumps(document, indent="\t")
    # small_hosts' GPUs are NVIDIA's.
    test = replace(made(Reader.NVBANDWIDTH, SuiteGroup.GPU_BANDWIDTH), environment=(BY_BUS,))
    figures = read_step_results(test, text, HOST)
    assert {str(one.device) for one in figures.samples} == set(GPUS)
    assert any("PCI_BUS_ID" in gap.reason for gap in figures.gaps)
    one_gpu = even_host(devices=[DeviceSpec(GPUS[0])])
    for unknown in (
        read_step_results(test, text, one_gpu),
        read_step_results(replace(test, environment=()), text, HOST),
    ):
        assert {one.device for one in unknown.samples} == {None}


def test_tests_of_nvbandwidth_have_metrics_that_are_compared() -> None:
    figures = read_step_results(
        made(Reader.NVBANDWIDTH, SuiteGroup.GPU_BANDWIDTH),
        nvbandwidth_text((*HOST_COPIES, "host_to_all_memcpy_ce", "all_to_host_memcpy_ce")),
        HOST,
    )
    series = {(one.metric, one.variant) for one in figures.samples}
    ways = {None, "sm", "both ways", "all at once"}
    assert series == {
        *((metric, way) for metric in ("h2d-bandwidth", "d2h-bandwidth") for way in ways),
        ("h2d-latency", None),
    }


@pytest.mark.parametrize(("kind", "gives"), [("read_ce", 1), ("write_ce", 0), ("read_sm", 1)])
def test_of_a_pair_the_first_gpu_is_the_one_that_gives(kind: str, gives: int) -> None:
    """nvbandwidth's arrows point the other way: rows of a read test fetch from the columns."""
    document = json.loads(nvbandwidth_text((f"device_to_device_memcpy_{kind}",)))
    (case,) = document["nvbandwidth"]["testcases"]
    case["bandwidth_matrix"] = [["N/A", "11"], ["0.00", "N/A"]]
    text = json.dumps(document, indent="\t")
    (one,) = read_step_results(made(Reader.NVBANDWIDTH, SuiteGroup.GPU_PEER), text, HOST).samples
    assert (str(one.device), str(one.peer)) == (GPUS[gives], GPUS[1 - gives])


def test_a_tool_that_measured_nothing_is_refused_with_what_it_said() -> None:
    text = nvbandwidth_text(("host_to_device_memcpy_ce",)).replace("Passed", "Error")
    with pytest.raises(ParseError, match="no result: failed"):
        read_step_results(made(Reader.NVBANDWIDTH, SuiteGroup.GPU_BANDWIDTH), text, HOST)


def test_collectives_carry_their_binding_and_what_their_curve_says() -> None:
    test = replace(
        made(Reader.NCCL_TESTS, SuiteGroup.NCCL),
        variant="everything on node 0",
        binding="everything on node 0",
    )
    figures = read_step_results(test, nccl.TEXT, HOST)
    assert all((s.variant or "").startswith("everything on node 0") for s in figures.samples)
    assert {"allreduce-busbw-peak", "allreduce-half-peak"} <= {s.metric for s in figures.samples}
    headline = replace(test, variant=None, binding="nothing bound")
    conditions = read_step_results(headline, nccl.TEXT, HOST).conditions
    assert ("collective binding", "nothing bound") in [(c.name, c.value) for c in conditions]


def test_a_flat_curve_is_a_finding() -> None:
    rows = ""
    for size in (1 << n for n in range(16, 31)):
        half = f"{size / 530.0:.1f} 0.53 0.53 0"
        rows += f"  {size} {size // 4} float sum -1 {half} {half}\n"
    text = nccl.HEAD + nccl.COLUMNS + rows + nccl.FOOT
    figures = read_step_results(made(Reader.NCCL_TESTS, SuiteGroup.NCCL), text, HOST)
    assert [finding.id for finding in figures.findings] == ["collective-flat-curve"]
    assert "0.53 GB/s, knee at" in figures.findings[0].observed


def test_amds_tools_keep_what_the_test_was_for() -> None:
    """PCIe 5.0 x16 carries 63 GB/s a way; rocm-bandwidth-test gives 93, a sum of both."""
    whole = read_step_results(made(Reader.ROCM, SuiteGroup.GPU_BANDWIDTH), rocm.MATRICES, HOST)
    assert {one.node for one in whole.samples} == {None}
    assert {one.metric for one in whole.samples} == {"h2d-bandwidth", "d2h-bandwidth"}
    variants = {one.variant for one in whole.samples if one.value > 63e9}
    assert variants == {"both ways together"}


def test_several_cpus_of_rocm_bandwidth_test_are_nodes_and_not_repeats() -> None:
    text = """\
          RocmBandwidthTest Version: 2.6.0
          Device: 0,  AMD EPYC 9575F 64-Core Processor
          Device: 1,  AMD EPYC 9575F 64-Core Processor
          Device: 2,  AMD Instinct MI350X,  GPU-9f50716172fd5d40,  19:0.0
          Unidirectional copy peak bandwidth GB/s
          D/D       0           1           2
          0         N/A         N/A         55.177
          1         N/A         N/A         41.500
          2         56.151      42.000      1594.097
"""
    figures = read_step_results(made(Reader.ROCM, SuiteGroup.GPU_BANDWIDTH), text, HOST)
    assert {(s.metric, s.node): s.value for s in figures.samples} == {
        ("h2d-bandwidth", 0): 55.177e9,
        ("h2d-bandwidth", 1): 41.5e9,
        ("d2h-bandwidth", 0): 56.151e9,
        ("d2h-bandwidth", 1): 42e9,
    }
    assert {s.number for s in figures.samples} == {0}
    assert any(gap.subject == "nodes" for gap in figures.gaps)


def test_a_file_of_commands_alone_costs_no_more_than_it_is_long() -> None:
    with cpu_time_below(5), pytest.raises(ParseError):
        read_tool_results("rocm-bandwidth-test", "numactl --membind=0 ./x\n" * 40_000, "log")


def test_damaged_outputs_give_figures_or_a_parse_error() -> None:
    count = max(100, MUTATIONS // 5)  # each tool's own tests do the rest
    for reads, group, text in (
        (Reader.NVBANDWIDTH, SuiteGroup.GPU_BANDWIDTH, nvbandwidth_text()),
        (Reader.NCCL_TESTS, SuiteGroup.NCCL, nccl.TEXT),
        (Reader.ROCM, SuiteGroup.GPU_PEER, rocm.MATRICES),
    ):
        test = made(reads, group, node=0)
        survives(lambda damaged, t=test: read_step_results(t, damaged, HOST), text, count)  # type: ignore[misc]


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
    assert find_half_peak(sweep(CLIMBING)) == 16 << 20
    assert check_flat_curve(sweep(CLIMBING), "H200") is None
    fit = fit_sweep([(size, rate * 1e9) for size, rate in CLIMBING.items()])
    assert fit is not None
    assert fit.rate_bytes_per_s == pytest.approx(400e9, rel=1e-6)
    assert fit.knee_bytes == pytest.approx(16 << 20, rel=1e-6)
    assert fit.spread < 1e-6
    assert fit.text == "41.9 us + 400 GB/s, knee at 16 MiB"


@pytest.mark.parametrize("gpus", [4, 8])
@pytest.mark.parametrize("start_us", [10, 20, 50, 100])
@pytest.mark.parametrize("rate", [2.0, 4.0, 8.6, 20.0])
def test_start_up_time_and_rate_are_found(gpus: int, start_us: int, rate: float) -> None:
    """As nccl-tests prints them, with two decimals: none is flat, however early it saturates."""
    factor = 2 * (gpus - 1) / gpus
    moved = {1 << n: factor * (1 << n) for n in range(3, 31)}
    run = sweep({size: most / (start_us * 1e3 + most / rate) for size, most in moved.items()})
    points = [
        (row.size_bytes, half.bus_bytes_per_s) for row in run.rows for half in row.list_halves()
    ]
    fit = fit_sweep(points, factor)
    assert fit is not None
    assert fit.rate_bytes_per_s == pytest.approx(rate * 1e9, rel=0.03)
    assert fit.start_s == pytest.approx(start_us * 1e-6, rel=0.06)
    assert fit.spread < 0.05
    assert check_flat_curve(run, "x") is None


@pytest.mark.parametrize("start_us", [10, 50, 100])
def test_a_curve_that_one_lane_would_beat_is_a_ceiling_whatever_its_start(start_us: int) -> None:
    curve = {1 << n: (1 << n) / (start_us * 1e3 + (1 << n) / 0.53) for n in range(3, 31)}
    assert check_flat_curve(sweep(curve), "8x RTX 5090") is not None
    found = check_flat_curve(sweep(FLAT), "8x RTX 5090")
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
    assert check_flat_curve(sweep(rates), "x") is None
    assert (find_half_peak(sweep(rates)) is None) == (rates == {8: 0.0}), "it moved nothing"


@needs_shared
def test_a_published_sweep_of_eight_a100_climbs() -> None:
    run = parse(shared("samples/superbench-nccl_allreduce.log").read_text())
    assert find_half_peak(run) == 16 << 20
    assert check_flat_curve(run, "8 A100") is None
