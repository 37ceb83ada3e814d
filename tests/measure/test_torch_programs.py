"""The programs that PyTorch measures with, run for real on a stand-in's GPUs."""

import ast
import ctypes
import mmap
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from homenode.bdf import Bdf
from homenode.errors import HostError, ParseError
from homenode.machine.tools import torch_report
from homenode.measure.access.machine import LocalMachine
from homenode.measure.model import BenchTest, MeasuredSamples, Reader, SuiteGroup
from homenode.measure.programs import torch_copies, torch_place
from homenode.measure.programs.torch_copies import copy_size
from homenode.measure.programs.torch_place import free_bytes, nodes_to_bind
from homenode.measure.step_reading import read_step_results
from homenode.measure.tool_setup import read_program
from tests.small_hosts import DeviceSpec, even_host
from tests.torch_programs import GPUS, copies, find_python, run_program

HOST = even_host(devices=[DeviceSpec(GPUS[0]), DeviceSpec(GPUS[1], node=1, root=1)])
COPIES = BenchTest("copies", SuiteGroup.GPU_BANDWIDTH, ("python3", "-"), 1, 1, reads=Reader.TORCH)


def read(output: str, test: BenchTest = COPIES) -> MeasuredSamples:
    return read_step_results(test, output, HOST)


def values(
    figures: MeasuredSamples, metric: str, variant: str | None = None
) -> dict[object, float]:
    """Median by GPU, or by pair."""
    found: dict[object, list[float]] = {}
    for one in figures.samples:
        if (one.metric, one.variant) == (metric, variant):
            key = one.device if one.peer is None else (one.device, one.peer)
            found.setdefault(key, []).append(one.value)
    return {key: sorted(of)[len(of) // 2] for key, of in found.items()}


@pytest.mark.parametrize("name", ["torch_copies", "torch_collectives", "watched", "gpus_shown"])
def test_a_program_is_one_text_that_old_pythons_read(name: str) -> None:
    text = read_program(name)
    is_torch = name.startswith("torch_")
    ast.parse(text, feature_version=(3, 8) if is_torch else (3, 6))
    assert ("from __future__" in text) == is_torch, "3.6 has no annotations there"
    assert ("homenode.measure.programs.torch_place" in text) == is_torch


@pytest.mark.parametrize(
    ("version", "words", "output"),
    [
        ("3.6", ["watched", "echo", "here"], "here\n\n# homenode watched: "),
        ("3.6", ["gpus_shown", "cuda"], '{"format": "homenode.gpus/1", '),
        ("3.8", ["torch_copies", "local-copy", "--seconds", "0.01"], '"local-copy"'),
        ("3.8", "torch_collectives --gpus 2 --largest 64 --iterations 2".split(), '"all-reduce"'),
    ],
)
def test_a_program_runs_in_its_oldest_python(version: str, words: list[str], output: str) -> None:
    ended = run_program(*words, python=find_python(version))
    assert output in ended.stdout_or_raise()


def test_a_program_that_is_not_there_is_reported() -> None:
    with pytest.raises(HostError, match="expected it in measure/programs"):
        read_program("torch_dances")


def test_host_copies_have_the_gpus_rates_by_address() -> None:
    figures = read(copies("host-copies"))
    gpus = {Bdf.parse(text) for text in GPUS}
    for metric, rate in (("h2d-bandwidth", 50e9), ("d2h-bandwidth", 40e9)):
        for variant in (None, "both ways", "all at once"):
            found = values(figures, metric, variant)
            assert found == {gpu: pytest.approx(rate, rel=0.01) for gpu in gpus}, variant
        assert values(figures, metric, "sm") == {gpu: pytest.approx(30e9, rel=0.01) for gpu in gpus}
    assert figures.gpu_names == ("NVIDIA Stand-in",)
    conditions = {condition.name: condition.value for condition in figures.conditions}
    assert conditions["tool PyTorch"] == "2.99.0+standin, cuda 13.2"


def test_a_bound_run_is_a_row_of_the_matrix() -> None:
    nodes = nodes_to_bind()
    if not nodes:
        pytest.skip("the kernel shows no NUMA nodes")
    output = run_program(
        *"torch_copies host-copies --seconds 0.01 --node".split(), str(nodes[0]), addresses=GPUS[:1]
    ).stdout_or_raise()
    figures = read(output)
    assert {one.node for one in figures.samples} == {nodes[0]}
    each = run_program("torch_copies", "small-copies", "--seconds", "0.01", "--each-node")
    runs = torch_report.parse(each.stdout_or_raise())
    assert [run.bound_node for run in runs] == nodes


@pytest.mark.parametrize(
    ("lies_on", "code", "is_own"), [(1, 0, False), (0, 0, True), (None, 0, True), (0, 712, False)]
)
def test_bound_memory_is_pinned_where_it_lies_if_the_driver_puts_it_elsewhere(
    lies_on: int | None, code: int, is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HIP's pinned memory is next to the GPU, whatever is bound."""
    monkeypatch.setattr(torch_copies, "node_of_memory", lambda pointer, size: lies_on)

    class Tensor:
        def __init__(self, count: int, dtype: object, pin_memory: bool = False) -> None:
            self.is_own, self.is_touched = not pin_memory, pin_memory

        def zero_(self) -> None:
            self.is_touched = True

        def data_ptr(self) -> int:
            return 4096

    class Torch:
        int32, empty = None, Tensor

        class cuda:  # noqa: N801
            @staticmethod
            def cudart() -> object:
                class Runtime:
                    @staticmethod
                    def cudaHostRegister(pointer: int, size: int, flags: int) -> int:  # noqa: N802
                        assert (pointer, size) == (4096, 400)
                        return code

                return Runtime

    made = torch_copies.pin_memory(Torch, 100, 1)
    assert (made.is_own, made.is_touched) == (is_own, True)
    assert not torch_copies.pin_memory(Torch, 100, None).is_own


def test_a_call_that_the_users_pytorch_lacks_is_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_copies, "devices", lambda torch: [])
    torch = SimpleNamespace(__version__="9", version=SimpleNamespace(cuda="9"))
    bench = torch_copies.Bench(torch, "matmul", 0.01, None, 60.0)
    bench.attempt("fp32", lambda: torch.set_float32_matmul_precision("highest"))
    assert [gap["subject"] for gap in bench.report.document["gaps"]] == ["fp32"]


def test_memorys_node_is_known_without_move_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the filters of container engines."""
    if len(nodes_to_bind()) != 1 or not Path("/proc/self/numa_maps").exists():
        pytest.skip("needs numa_maps, and one node: memory of one process may be on any of several")
    buffer = mmap.mmap(-1, 1 << 22)
    buffer.write(b"x" * (1 << 22))
    pointer = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    seen = torch_place.node_of_memory(pointer, 1 << 22)
    forbidden = {machine: (first, 9999) for machine, (first, _) in torch_place._SYSCALLS.items()}
    monkeypatch.setattr(torch_place, "_SYSCALLS", forbidden)
    assert torch_place.node_of_memory(pointer, 1 << 22) == seen == nodes_to_bind()[0]


def test_a_mapping_on_several_nodes_is_on_none() -> None:
    text = "7e00 default heap anon=3 N0=3\n7f00 default anon=2 N0=1 N1=1\n8000 default file=/x\n"
    found = [torch_place.node_of_mapping(at, text) for at in (0x7E08, 0x7F00, 0x8000, 1)]
    assert found == [0, None, None, None]


def test_memory_that_lies_on_another_node_gives_no_cell_of_the_row() -> None:
    node = nodes_to_bind()[0]
    output = run_program(
        "torch_copies", "host-copies", "--seconds", "0.01", "--node", str(node)
    ).stdout_or_raise()
    output = output.replace('"steady": false', '"steady": true')  # a busy machine's
    unseen = read(output)
    assert any("unconfirmed" in gap.reason for gap in unseen.gaps)
    elsewhere = output.replace('"memory_node": null', f'"memory_node": {node + 1}')
    with pytest.raises(ParseError, match=f"is on node {node + 1}: not kept"):
        read(elsewhere)
    seen = read(output.replace('"memory_node": null', f'"memory_node": {node}'))
    assert {one.node for one in seen.samples} == {node}
    assert not any("unconfirmed" in gap.reason for gap in seen.gaps)


def test_a_node_that_is_not_there_is_refused() -> None:
    ended = run_program("torch_copies", "host-copies", "--node", "1023")
    assert ended.returncode != 0
    assert "node 1023: no CPU that this process may use" in ended.stderr


def test_small_copies_are_times_by_size() -> None:
    """And the place of the thread that copies is recorded."""
    started_s = time.monotonic()
    output = copies("small-copies")
    took_ns = 1e9 * (time.monotonic() - started_s)
    (run,) = torch_report.parse(output)
    places = {figure.thread for figure in run.results}
    assert places and all(place.node is None or place.node >= 0 for place in places)
    figures = read(output)
    sizes = {one.size_bytes for one in figures.samples}
    assert sizes == {8, 4096, 65536}
    assert {one.metric for one in figures.samples} == {"h2d-copy-time", "d2h-copy-time"}
    assert all(5e3 <= one.value < took_ns for one in figures.samples)


def test_copies_within_a_gpu_count_each_byte_once() -> None:
    """And the samples of each GPU are numbered."""
    figures = read(copies("local-copy"))
    rates = list(values(figures, "d2d-bandwidth").values())
    assert rates == [pytest.approx(1e12, rel=0.01)] * 2
    first = [one.number for one in figures.samples if one.device == Bdf.parse(GPUS[0])]
    assert first == list(range(len(first))) and len(first) >= 5


def test_peer_copies_are_a_matrix_of_pairs() -> None:
    found = values(read(copies("peer-copies")), "p2p-bandwidth")
    first, second = map(Bdf.parse, GPUS)
    assert set(found) == {(first, second), (second, first)}
    assert list(found.values()) == [pytest.approx(20e9, rel=0.01)] * 2


def test_peers_that_cannot_reach_each_other_are_no_headline() -> None:
    figures = read(copies("peer-copies", no_peers=True))
    assert {one.variant for one in figures.samples} == {"through host memory"}


def test_products_have_a_rate_for_each_type() -> None:
    figures = read(copies("matmul"))
    rates = {"fp32": 50e12, "tf32": 400e12, "bf16": 800e12, "fp16": 780e12}
    for variant, rate in rates.items():
        found = list(values(figures, "matmul-rate", variant).values())
        assert found == [pytest.approx(rate, rel=0.01)] * 2
    assert {one.unit for one in figures.samples} == {"flop_per_s"}


def test_a_gpu_without_tf32_gets_no_figure_of_it() -> None:
    figures = read(copies("matmul", no_tf32=True))
    assert "tf32" not in {one.variant for one in figures.samples}
    assert any("computed as fp32" in gap.reason for gap in figures.gaps)


def test_what_pytorch_refuses_is_a_gap_and_the_rest_goes_on() -> None:
    figures = read(copies("host-copies", refuses=["d2h", "alias"]))
    assert {one.metric for one in figures.samples} == {"h2d-bandwidth"}
    reasons = " ".join(gap.reason for gap in figures.gaps)
    assert "d2h: refused by the stand-in" in reasons
    assert "copies pinned memory before" in reasons


def test_wrong_data_leave_no_figure() -> None:
    output = copies("host-copies", wrong=True, addresses=GPUS[:1])
    figures = read(output)
    assert {one.variant for one in figures.samples} == {"sm"}
    assert any("wrong data" in gap.reason for gap in figures.gaps)


def test_a_gpus_clock_that_tells_more_than_has_passed_is_refused() -> None:
    with pytest.raises(ParseError, match="have passed"):
        read(copies("local-copy", event_scale=5.0))


def test_access_that_hangs_ends_the_program_and_keeps_what_was_measured() -> None:
    words = "torch_copies peer-copies --seconds 0.01 --stall 0.5"
    ended = run_program(*words.split(), hangs="p2p")
    (run,) = torch_report.parse(ended.stdout_or_raise())
    assert run.stalled == f"p2p-bandwidth {GPUS[0]} to {GPUS[1]}"
    with pytest.raises(ParseError, match="stopped itself there"):
        read(ended.stdout)


def test_gpus_without_an_address_are_named_by_their_number() -> None:
    figures = read(copies("local-copy", hides_addresses=True))
    assert {(one.device, one.index) for one in figures.samples} == {(None, 0), (None, 1)}
    assert any("cannot be paired" in gap.reason for gap in figures.gaps)


def test_a_gpu_that_the_machine_does_not_show_is_reported() -> None:
    figures = read(copies("local-copy", addresses=["0000:77:00.0"]))
    assert any("0000:77:00.0" in gap.reason for gap in figures.gaps)


def test_without_pytorch_the_message_names_the_package() -> None:
    argv = (sys.executable, "-I", "-S", "-", "matmul")
    ended = LocalMachine().run(argv, 60.0, read_program("torch_copies"))
    failure = ended.failure()
    assert failure is not None
    assert "torch: not installed in" in failure
    assert "install the package torch" in failure


def test_pytorch_without_a_gpu_is_reported() -> None:
    ended = run_program("torch_copies", "matmul", addresses=[])
    assert "no usable GPU" in (ended.failure() or "")


def test_a_watched_tool_keeps_its_output_and_tells_where_its_threads_ran() -> None:
    busy = "import time; e = time.time() + 1\nwhile time.time() < e: pass\nprint('done')"
    ended = run_program("watched", sys.executable, "-c", busy)
    said = ended.stdout_or_raise()
    assert said.startswith("done\n")
    looks = re.search(r"^# homenode watched:((?: \d+:\d+)+)$", said, re.M)
    assert looks is not None
    pus = {int(one.partition(":")[0]) for one in looks[1].split()}
    assert pus <= os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ((sys.executable, "-c", "raise SystemExit(7)"), 7),
        ((sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"), 137),
        (("no-such-tool",), 127),
    ],
)
def test_a_watched_tool_ends_as_it_ended(words: tuple[str, ...], code: int) -> None:
    assert run_program("watched", *words).returncode == code


@pytest.mark.parametrize(
    ("gpus", "free", "size"),
    [
        (8, 64 << 30, 256 << 20),
        (8, 8 << 30, 128 << 20),
        (8, 1 << 20, 16 << 20),
        (1, None, 256 << 20),
    ],
)
def test_copies_shrink_where_memory_is_small(gpus: int, free: int | None, size: int) -> None:
    assert copy_size(gpus, free) == size


def test_memory_that_files_occupy_counts_as_free() -> None:
    whole = free_bytes(None)
    assert whole is not None and whole > 1 << 20
    assert all((free_bytes(node) or 0) > 1 << 20 for node in nodes_to_bind())
    assert free_bytes(1023) is None
