"""Importing what other tools wrote: the study's directories, logs under pinning, outputs."""

import json

import pytest

from homenode.bdf import Bdf
from homenode.errors import InputError
from homenode.machine.tools import study_programs
from homenode.measure.gpu_tool_samples import split_sections
from homenode.measure.imported_runs import (
    ImportOptions,
    RunWithSources,
    SourceDirectory,
    build_runs,
    find_contradictions,
    parse_switches,
    read_study_results,
)
from homenode.measure.model import Reader
from homenode.measure.results.model import Origin, Sample, Switches
from homenode.measure.results.vantage import Vantage
from homenode.measure.step_reading import recognize_tool
from homenode.metrics import METRICS
from homenode.vm.layout import PRESETS
from tests.measure.importers import test_cuda_bandwidth_test as cuda
from tests.measure.importers import test_intel_mlc as mlc
from tests.measure.importers import test_stream as stream
from tests.measure.importers import test_sysbench as sysbench
from tests.tools import test_amd as rocm
from tests.tools import test_nccl_tests as nccl
from tests.tools import test_numactl as numactl
from tests.tools import test_nvbandwidth as nvbandwidth

CHASE = "# size_bytes\tlatency_ns\n4096\t1.1\t# 4KB\n536870912\t112.4\t# 512MB\n"
COPIES = """\
Detected 2 GPU(s)

GPU 0 [AMD Instinct MI350X]
  Host-to-Device: 55.12 GB/s
  Device-to-Host: 54.90 GB/s
  Device-to-Device: 2100.00 GB/s

GPU 1 [AMD Instinct MI350X]
  Host-to-Device: 31.00 GB/s
  Device-to-Host: 30.00 GB/s
"""
ONE_THREAD = sysbench.CPU.replace("threads: 56", "threads: 1").replace("thds: 56", "thds: 1")
TWO_NODES = """\
available: 2 nodes (0-1)
node 0 cpus: 0 1 2 3
node 0 size: 64000 MB
node 1 cpus: 4 5 6 7
node 1 size: 64000 MB
node distances:
node   0   1
  0:  10  21
  1:  21  10
"""
LSCPU = """\
Architecture:             x86_64
CPU(s):                   8
Vendor ID:                GenuineIntel
  Model name:             INTEL(R) XEON(R) PLATINUM 8558
    Thread(s) per core:   1
"""
STUDY = {
    "metadata.json": json.dumps({"vcpus": 8, "gpu_devices": ["NVIDIA H200"]}),
    "numa_topology.txt": TWO_NODES,
    "cpu_topology.txt": LSCPU,
    "hugepages.txt": "HugePages_Total:       0\nHugepagesize:       2048 kB\n",
    "cpu_single.txt": ONE_THREAD,
    "cpu_all.txt": sysbench.CPU,
    "stream.txt": stream.OUTPUT,
    "stream_numa_local.txt": stream.OUTPUT,
    "stream_numa_remote.txt": stream.OUTPUT.replace("263208.7", "101208.7"),
    "mem_latency.txt": CHASE,
    "gpu_compute.txt": "100 matmuls: 2.115s (21.1ms each)\n",
    "gpu_bandwidth.txt": f"# run 1\n{cuda.OUTPUT}# run 2\n{cuda.OUTPUT.replace('55.3', '54.3')}",
    "nccl_allreduce.txt": nccl.TEXT,
    "summary.csv": "nccl_peak_busbw\n214.75\n",
}


def pinned(node: int, local: str = "411.60", remote: str = "88.60") -> str:
    """A log as a job under numactl writes it: four GPUs, one of them near."""
    figures = [local if gpu == node else remote for gpu in range(4)]
    devices = "".join(f"Device {n}: NVIDIA GH200 120GB (000000{n}9:01:00)\n" for n in range(4))
    return (
        f"=== PINNED to {node} ===\n"
        f"policy: bind\npreferred node: {node}\nphyscpubind: {node * 72} \ncpubind: {node} \n"
        f"nodebind: {node} \nmembind: {node} \npreferred: \n"
        "nvbandwidth Version: v0.6\nBuilt from Git version: v0.6\n\nDriver Version: 560.35.03\n\n"
        f"{devices}\nRunning host_to_device_memcpy_ce.\n"
        "memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)\n"
        "           0         1         2         3\n"
        f" 0    {'    '.join(figures)}\n\n"
        f"SUM host_to_device_memcpy_ce {sum(map(float, figures)):.2f}\n\n"
        "Running host_device_latency_sm.\nmemory latency SM CPU(row) <-> GPU(column) (ns)\n"
        "           0         1         2         3\n"
        " 0    737.00    1100.00    1101.00    1102.00\n\n"
        "SUM host_device_latency_sm 4040.00\n"
    )


def shared_job(node: int) -> str:
    text = pinned(node).replace(f"=== PINNED to {node} ===\n", "job array 17\n")
    return text.replace(f"membind: {node}", "membind: 0 1 2 3 4 12 20 28").replace(
        "policy: bind", "policy: default"
    )


def directory(
    texts: dict[str, str], name: str = "vcpu_pin_numa", above: str = "h200"
) -> SourceDirectory:
    return SourceDirectory(f"{above}/{name}", name, above, texts)


def only(runs: tuple[RunWithSources, ...]) -> RunWithSources:
    assert len(runs) == 1
    return runs[0]


def chosen(one: RunWithSources, metric: str, **fields: object) -> list[Sample]:
    return [
        sample
        for sample in one.run.samples
        if sample.metric == metric and all(getattr(sample, k) == v for k, v in fields.items())
    ]


def test_a_study_directory_is_one_run_under_the_layout_of_its_name() -> None:
    one = only(build_runs([directory(STUDY)], ImportOptions()))
    head = one.run.head
    assert (head.system, head.name, head.vcpus) == ("h200", "vcpu_pin_numa", 8)
    assert head.switches == Switches.from_layout(PRESETS["pin-numa"])
    assert (head.origin, head.vantage) == (Origin.IMPORTED, Vantage.GUEST)
    assert not head.unusable


def test_every_test_of_the_study_has_its_metric_and_unit() -> None:
    one = only(build_runs([directory(STUDY)], ImportOptions()))
    found = {sample.metric: sample.unit for sample in one.run.samples}
    assert found.keys() == {
        *"cpu-single cpu-throughput cpu-per-thread cpu-fairness matmul-time".split(),
        *"memory-bandwidth memory-latency h2d-bandwidth d2h-bandwidth d2d-bandwidth".split(),
        *"allreduce-busbw allreduce-busbw-peak allreduce-busbw-mean allreduce-latency".split(),
    }
    assert found.pop("cpu-fairness") == "ratio"
    assert all(METRICS[metric].unit == unit for metric, unit in found.items())
    assert chosen(one, "allreduce-busbw-peak")[0].value == 375.81e9, "of bus bandwidth"
    assert not [path for path in one.files if "summary" in path], "which is stale"
    # Local and remote are node 0 and node 1.
    triads = {s.node: s.value for s in chosen(one, "memory-bandwidth", variant="triad")}
    assert triads == {None: 263.2087e9, 0: 263.2087e9, 1: 101.2087e9}
    assert [(s.number, s.value) for s in chosen(one, "h2d-bandwidth")] == [(0, 55.3e9), (1, 54.3e9)]
    # A rate that was cut to zero is omitted, and the time of a small message kept.
    assert not chosen(one, "allreduce-busbw", size_bytes=8)
    assert chosen(one, "allreduce-latency")[0].value == 21530


def test_the_slow_gpu_is_not_hidden_behind_the_fast_one() -> None:
    texts = {**STUDY, "gpu_bandwidth.txt": f"# run 1\n{COPIES}"}
    one = only(build_runs([directory(texts)], ImportOptions()))
    assert [(s.index, s.value) for s in chosen(one, "h2d-bandwidth")] == [(0, 55.12e9), (1, 31e9)]


def test_the_end_of_the_curve_is_memory_only_where_it_is_large() -> None:
    assert [s.value for s in read_study_results({"mem_latency.txt": CHASE}).samples][-1] == 112.4
    short = read_study_results({"mem_latency.txt": CHASE.replace("536870912", "33554432")})
    assert all(sample.variant is None for sample in short.samples)
    assert "which an LLC may hold" in short.gaps[0].reason


def test_all_nodes_count_and_not_only_the_first() -> None:
    texts = {**STUDY, "metadata.json": json.dumps({"vcpus": 4})}
    assert only(build_runs([directory(texts)], ImportOptions())).run.head.vcpus == 8


@pytest.mark.parametrize(
    ("name", "is_wrong"), [("vcpu_pin", True), ("vcpu_pin_numa", False), ("default", True)]
)
def test_a_guest_that_cannot_have_had_its_layout_is_unusable(name: str, is_wrong: bool) -> None:
    assert bool(list(find_contradictions(STUDY, parse_switches(name)))) is is_wrong
    one = only(build_runs([directory(STUDY, name)], ImportOptions()))
    assert bool(one.run.head.unusable) is is_wrong


def test_conditions_of_the_guest_and_of_its_tools_are_read() -> None:
    one = only(build_runs([directory(STUDY)], ImportOptions()))
    assert one.run.head.hardware == ("INTEL(R) XEON(R) PLATINUM 8558", "NVIDIA H200")
    conditions = {one.name: one.value for one in one.run.head.conditions}
    assert conditions["guest threads per core"] == "1"
    assert conditions["huge pages"] == "none"
    assert conditions["tool collective transport"] == "P2P off, ring, simple"
    assert conditions["tool sysbench"] == "1.0.20"
    lscpu = LSCPU.replace("per core:   1", "per core:   2")
    two = {"cpu_topology.txt": lscpu, "hugepages.txt": ""}
    metadata = {**two, "stream.txt": stream.OUTPUT}
    assert only(build_runs([directory(metadata)], ImportOptions())).run.head.vcpus == 8
    (reason,) = find_contradictions(two, parse_switches("vcpu_pin"))
    assert reason == "layout pin hides siblings, the guest showed 2 a core"
    assert not list(find_contradictions(two, parse_switches("vcpu_pin_numa_smt")))


def test_a_broken_file_is_a_gap_that_names_it_and_the_others_are_kept() -> None:
    texts = {**STUDY, "stream.txt": "./stream: not found\n", "cpu_all.txt": ""}
    one = only(build_runs([directory(texts)], ImportOptions()))
    subjects = {gap.subject for gap in one.gaps}
    assert {"stream.txt", "cpu_all.txt"} <= subjects
    assert chosen(one, "cpu-single")


def test_a_layout_that_the_name_does_not_tell_can_be_said() -> None:
    options = ImportOptions(layouts={"try7": Switches.from_layout(PRESETS["pin-numa-pci"])})
    one = only(build_runs([directory(STUDY, "try7")], options))
    assert one.run.head.switches.name == "pin-numa-pci"
    unknown = only(build_runs([directory(STUDY, "try7")], ImportOptions()))
    assert unknown.run.head.switches.name == "unknown"
    assert any(gap.subject == "layout" for gap in unknown.gaps)
    with pytest.raises(InputError, match="no run named"):
        build_runs([directory(STUDY)], options)


def test_a_layout_reaches_logs_of_tools_by_the_name_that_their_run_has() -> None:
    options = ImportOptions(layouts={"run1": Switches.from_layout(PRESETS["pin"])})
    one = only(build_runs([directory({"run1.log": nccl.TEXT})], options))
    assert (one.run.head.name, one.run.head.switches.name) == ("run1", "pin")
    assert not any(gap.subject == "layout" for gap in one.gaps)


def test_a_layout_is_of_one_of_two_runs_that_had_to_be_renamed() -> None:
    logs = {"run1.log": nccl.TEXT}
    directories = [directory(logs, "first", "a"), directory(logs, "second", "a")]
    names = [one.run.head.name for one in build_runs(directories, ImportOptions())]
    assert len(set(names)) == 2
    layouts = {names[1]: Switches.from_layout(PRESETS["pin-numa"])}
    runs = build_runs(directories, ImportOptions(layouts=layouts))
    assert [one.run.head.switches.name for one in runs] == ["unknown", "pin-numa"]
    of_none = ImportOptions(layouts={"run1": Switches.from_layout(PRESETS["pin"])})
    with pytest.raises(InputError, match="no run named") as refused:
        build_runs(directories, of_none)
    assert refused.value.hint == f"runs: {', '.join(sorted(names))}"


def test_logs_under_numa_pinning_give_the_matrix_of_nodes_and_gpus() -> None:
    texts = {f"exclusive_4gpu_node{n}.txt": pinned(n) for n in range(4)}
    one = only(build_runs([directory(texts, "transfer", "data")], ImportOptions()))
    assert (one.run.head.system, one.run.head.name) == ("nvidia-gh200-120gb", "exclusive_4gpu")
    assert one.run.head.vantage is Vantage.JOB
    cells = {(s.node, s.device): s.value for s in chosen(one, "h2d-bandwidth")}
    assert len(cells) == 16
    gpus = [Bdf.parse(f"{n}9:01:00.0".rjust(12, "0")) for n in range(4)]
    assert {cells[n, gpus[n]] for n in range(4)} == {411.6e9}
    assert {cells[n, gpu] for n in range(4) for gpu in gpus if gpu != gpus[n]} == {88.6e9}
    assert len(chosen(one, "h2d-latency", node=2)) == 4


def test_shared_jobs_are_placed_by_their_pus_where_memory_may_be_anywhere() -> None:
    texts = {f"shared_array_1gpu_node{n}.txt": shared_job(n) for n in range(4)}
    one = only(build_runs([directory(texts)], ImportOptions()))
    assert {sample.node for sample in one.run.samples} - {None} == {0, 1, 2, 3}
    conditions = {condition.name: condition.value for condition in one.run.head.conditions}
    assert conditions["memory binding"] == "several nodes"


def test_exclusive_and_shared_files_of_one_directory_are_two_runs() -> None:
    texts = {"exclusive_4gpu_node0.txt": pinned(0), "shared_array_1gpu_node0.txt": shared_job(0)}
    runs = build_runs([directory(texts)], ImportOptions())
    assert [one.run.head.name for one in runs] == ["exclusive_4gpu", "shared_array_1gpu"]


def test_several_jobs_in_one_log_each_have_their_own_binding() -> None:
    found = list(split_sections(shared_job(0) + shared_job(3)))
    assert [section.binding.node for section in found if section.binding] == [0, 3]
    assert [section.text.count("nvbandwidth Version") for section in found] == [1, 1]


def test_a_scripts_own_word_stands_against_a_numactl_that_was_asked_outside() -> None:
    text = pinned(2).replace("cpubind: 2 ", "cpubind: 0 1 2 3 ").replace("to 2 =", "to 7 =")
    section = next(split_sections(text))
    assert section.binding is not None and section.binding.node == 7
    assert section.gaps[0].subject == "binding"


def test_files_of_several_nodes_without_a_binding_are_not_repeats_of_each_other() -> None:
    bare = {f"gpu_node{n}.txt": nvbandwidth.TEXT for n in range(2)}
    runs = build_runs([directory(bare)], ImportOptions())
    assert [one.run.head.name for one in runs] == ["gpu_node0", "gpu_node1"]
    repeats = {f"gpu_run{n}.txt": nvbandwidth.TEXT for n in range(2)}
    one = only(build_runs([directory(repeats)], ImportOptions()))
    device = chosen(one, "h2d-bandwidth")[0].device
    assert [s.number for s in chosen(one, "h2d-bandwidth", device=device)] == [0, 1]


def test_pairs_of_gpus_keep_both_addresses() -> None:
    text = nvbandwidth.TEXT.replace(
        "device_to_device_bidirectional_memcpy_read_ce", "device_to_device_memcpy_read_ce"
    )
    one = only(build_runs([directory({"a.txt": text})], ImportOptions()))
    pair = chosen(one, "p2p-bandwidth", variant="total")[0]
    assert (pair.peer, pair.device) == (Bdf.parse("9:01:00.0".rjust(12, "0")), Bdf.parse("3b:00.0"))


GATHER = nccl.TEXT.replace("all_reduce_perf", "all_gather_perf")
WRONG = nccl.TEXT.replace("372.75       0", "372.75       3")


def test_matrices_of_mlc_are_threads_by_memory() -> None:
    one = only(build_runs([directory({"mlc_v3.9.txt": mlc.OUTPUT})], ImportOptions()))
    assert one.run.head.name == "mlc_v3.9"
    assert one.run.head.system == "cpu-only"
    far = chosen(one, "memory-latency", node=0, peer_node=2)
    assert [sample.value for sample in far] == [564.5]
    assert chosen(one, "memory-bandwidth", node=0, peer_node=1)[0].value == 50.9234e9
    assert chosen(one, "memory-bandwidth", node=None, variant="triad")[0].value == 390.3414e9


@pytest.mark.parametrize(
    ("name", "text", "figures", "gap"),
    [
        ("nccl.log", nccl.TEXT + GATHER, {"allreduce-busbw-peak": 375.81e9}, ""),
        ("nccl.log", nccl.TEXT + GATHER, {"all-gather-busbw-peak": 375.81e9}, ""),
        # Old versions do not name the collective: the file does.
        ("rccl_all_reduce.log", nccl.RCCL, {"allreduce-busbw-peak": 289.16e9}, ""),
        ("rccl.log", nccl.RCCL, {"allreduce-busbw-peak": None}, "collective"),
        ("nccl.log", WRONG, {"allreduce-busbw-peak": None}, "wrong values"),
        ("rbt.txt", rocm.MATRICES, {"h2d-bandwidth": 55.177e9, "d2h-bandwidth": 56.151e9}, ""),
    ],
    ids=range(6),
)
def test_a_log_has_its_figures_or_a_gap(
    name: str, text: str, figures: dict[str, float | None], gap: str
) -> None:
    one = only(build_runs([directory({name: text})], ImportOptions()))
    for metric, value in figures.items():
        found = chosen(one, metric, variant=None)
        assert (found[0].value if found else None) == value
    assert not gap or any(gap in str(stated) for stated in one.gaps)
    copies = chosen(one, "d2d-bandwidth")
    assert [copy.device for copy in copies] == [Bdf.parse("0d:00.0")] * (name == "rbt.txt")


@pytest.mark.parametrize(
    ("text", "tool"),
    [
        (nvbandwidth.TEXT, Reader.NVBANDWIDTH),
        (nvbandwidth.document(), Reader.NVBANDWIDTH),
        (nccl.TEXT, Reader.NCCL_TESTS),
        (nccl.document(), Reader.NCCL_TESTS),
        (nccl.RCCL, Reader.NCCL_TESTS),
        (mlc.OUTPUT, "Intel MLC"),
        (stream.OUTPUT, "STREAM"),
        (sysbench.CPU, "sysbench"),
        (sysbench.MEMORY, "sysbench"),
        (cuda.OUTPUT, "bandwidthTest"),
        (rocm.MATRICES, Reader.ROCM),
        (rocm.PAIR, Reader.ROCM),
        (numactl.HARDWARE, None),
        ("", None),
        ('{"format": "homenode.plan/1"}', None),
    ],
)
def test_files_are_known_by_what_they_hold(text: str, tool: str | None) -> None:
    assert recognize_tool(text) == tool


def test_matmul_takes_the_total_and_not_its_three_digits() -> None:
    took_ns = study_programs.parse_matmul("100 matmuls: 2.115s (21.1ms each)\n")
    assert took_ns == pytest.approx(21.15e6)
    with pytest.raises(InputError) as refused:
        study_programs.parse_matmul("Traceback\nModuleNotFoundError: No module named 'torch'\n")
    assert "No module named 'torch'" in str(refused.value)
