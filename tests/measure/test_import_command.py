"""homenode import, and directories of others as they are found."""

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from homenode.errors import HomenodeError, InputError
from homenode.findings import Gap
from homenode.machine.tools import study_programs
from homenode.measure import imported_files as import_directory
from homenode.measure.imported_files import find_directories
from homenode.measure.imported_runs import ImportOptions, build_runs
from homenode.measure.importers import cuda_bandwidth_test, intel_mlc
from homenode.measure.importers.stream import parse as parse_stream
from homenode.measure.importers.sysbench import parse as parse_sysbench
from homenode.measure.results.store import load_runs
from homenode.process import run
from tests.command_line import homenode
from tests.measure.importers import test_cuda_bandwidth_test as cuda
from tests.measure.importers import test_intel_mlc as mlc
from tests.measure.importers import test_stream as stream
from tests.measure.importers import test_sysbench as sysbench
from tests.measure.test_import import CHASE, COPIES, STUDY, directory, pinned
from tests.mutations import MUTATIONS, mutations, survives
from tests.shared_data import needs_shared, shared
from tests.tools import test_amd as rocm
from tests.tools import test_nccl_tests as nccl
from tests.tools import test_nvbandwidth as nvbandwidth


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("default", "vcpu_pin_numa"):
        here = tmp_path / "in" / "h200" / name
        here.mkdir(parents=True)
        for file, text in STUDY.items():
            (here / file).write_text(text)
    return tmp_path / "in"


def _run(*arguments: object) -> tuple[int, str]:
    result = homenode("import", *map(str, arguments))
    if isinstance(result.exception, HomenodeError):
        return result.exception.exit_code, str(result.exception)
    return result.exit_code, result.output


def test_the_command_writes_runs_that_are_read_back(tree: Path, tmp_path: Path) -> None:
    code, said = _run(tree, "-o", tmp_path / "out", "--hardware-class", "2x Xeon 8558, 7x H200")
    assert code == 0 and said.startswith(f"wrote {tmp_path}/out: 2 runs, "), said
    runs = load_runs(tmp_path / "out").runs
    assert [(run.head.system, run.head.name) for run in runs] == [
        ("h200", "default"),
        ("h200", "vcpu_pin_numa"),
    ]
    assert runs[0].head.host_kind == "2x Xeon 8558, 7x H200"
    assert "2 nodes" in runs[0].head.unusable[0]


def test_nothing_is_written_where_a_run_is_there_already(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert _run(tree, "-o", out)[0] == 0
    shutil.rmtree(out / "h200" / "default")
    code, said = _run(tree, "-o", out)
    assert (code, "a run of this name exists" in said) == (2, True)
    assert not (out / "h200" / "default").exists()


def test_a_dry_run_writes_nothing(tree: Path, tmp_path: Path) -> None:
    code, said = _run(tree, "-o", tmp_path / "out", "--dry-run")
    assert (code, "h200/default" in said) == (0, True)
    assert not (tmp_path / "out").exists()


def test_directories_of_others_are_not_trusted(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(stream.OUTPUT)
    (tree / "link.txt").symlink_to(tmp_path / "secret")
    (tree / "directory").symlink_to(tmp_path)
    (tree / "binary").write_bytes(b"\0\1")
    (tree / "h200" / "strange\nname.txt").write_text("nothing")
    found = find_directories(tree)
    paths = ["in/h200", "in/h200/default", "in/h200/vcpu_pin_numa"]
    assert [one.path for one in found.directories] == paths
    assert {gap.reason for gap in found.skipped} == {"a link, not a regular file", "binary"}
    code, said = _run(tree, "-o", tmp_path / "out")
    assert (code, "not the output of a tool" in said) == (0, True)


def test_a_file_with_lines_without_end_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text(stream.OUTPUT + "x" * 20_000)
    assert "a line of more than" in find_directories(tmp_path).skipped[0].reason


@pytest.mark.parametrize("unit", [" ", "1.1 ", "1.1s ", "1.1k ", "a: ", "=", "node 0 "])
def test_no_line_costs_more_than_its_length(unit: str) -> None:
    started = time.process_time()
    texts = (sysbench.CPU, stream.OUTPUT, nvbandwidth.TEXT, nccl.TEXT, mlc.OUTPUT)
    for text in (*texts, rocm.MATRICES, cuda.OUTPUT):
        hostile = f"{text}rsa {unit * (16_000 // len(unit))}!\n"
        build_runs([directory({"log.txt": hostile})], ImportOptions())
    # Linear ones take some milliseconds; squares of 16,000 took seconds each.
    assert time.process_time() - started < 3


def test_runs_of_homenodes_are_not_imported_again(tree: Path, tmp_path: Path) -> None:
    _run(tree, "-o", tmp_path / "out")
    code, said = _run(tmp_path / "out")
    assert code == 2, said
    assert "no outputs of measuring tools" in said


@pytest.mark.parametrize("layout", ["a=b", "pin"])
def test_a_layout_that_is_none_is_refused(layout: str, tmp_path: Path) -> None:
    code, said = _run(tmp_path, "--layout", layout)
    assert (code, "expected NAME=PRESET" in said) == (2, True)


@needs_shared
def test_the_published_outputs_are_imported(tmp_path: Path) -> None:
    code, said = _run(shared("samples"), "-o", tmp_path / "out")
    assert code == 0, said
    runs = load_runs(tmp_path / "out")
    assert len(runs.runs) == 14
    assert not runs.skipped
    assert not [s for run in runs.runs for s in run.samples if s.value <= 0]


def test_no_damaged_study_directory_or_log_stops_an_import() -> None:
    for name, text in STUDY.items():
        for damaged in mutations(text, MUTATIONS // 25):
            build_runs([directory({**STUDY, name: damaged})], ImportOptions())
    for damaged in mutations(pinned(1), MUTATIONS // 5):
        build_runs([directory({"log.txt": damaged})], ImportOptions())


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (study_programs.parse_chase, CHASE),
        (study_programs.parse_copies, COPIES),
        (study_programs.parse_matmul, "100 matmuls: 2.115s (21.1ms each)\n"),
        (cuda_bandwidth_test.parse, cuda.OUTPUT),
        (intel_mlc.parse, mlc.OUTPUT),
        (parse_stream, stream.OUTPUT),
        (parse_sysbench, sysbench.CPU),
        (parse_sysbench, sysbench.MEMORY),
    ],
)
def test_damaged_output_is_read_or_refused(parse: Callable[[str], object], text: str) -> None:
    assert survives(parse, text, MUTATIONS) > 0


TABLE = """
Running host_to_device_memcpy_ce.
Thread of device 0 running on CPU: 199, NUMA node: 1
Thread of device 1 running on CPU: 1, NUMA node: 0
memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)
           0         1
 0     {0}     15.46

"""


def logs(tmp_path: Path, *names: str) -> list[str]:
    paths = []
    for number, name in enumerate(names):
        path = tmp_path / "logs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TABLE.format(12.5 + number))
        paths.append(str(path))
    return paths


def layouts_of(results: Path) -> dict[str, str]:
    runs = load_runs(results).runs
    return {run.head.name: run.head.switches.name for run in runs}


def test_files_of_one_name_below_two_layouts_are_two_layouts(tmp_path: Path) -> None:
    paths = logs(tmp_path, "pin/x.log", "pin/y.log", "pin-numa/x.log", "pin-numa/y.log")
    assert _run(*paths, "-o", str(tmp_path / "results"))[0] == 0
    names = {"pin": ("pin-x", "pin-y"), "pin-numa": ("pin-numa-x", "pin-numa-y")}
    expected = {name: layout for layout, runs in names.items() for name in runs}
    assert layouts_of(tmp_path / "results") == expected


def test_files_of_one_name_below_two_directories_are_two_runs(tmp_path: Path) -> None:
    paths = logs(tmp_path, "before/run1", "after/run1")
    assert _run(*paths, "-o", str(tmp_path / "a"))[0] == 0
    assert set(layouts_of(tmp_path / "a")) == {"before-run1", "after-run1"}
    assert _run(str(tmp_path / "logs"), "-o", str(tmp_path / "b"))[0] == 0
    assert set(layouts_of(tmp_path / "b")) == {"before-run1", "after-run1"}


def test_a_pattern_names_the_layout_of_runs_that_no_name_has(tmp_path: Path) -> None:
    paths = logs(tmp_path, "before/run1", "before/run2", "after/run1", "after/run2")
    layouts = ("--layout", "before*=default", "--layout", "after*=pin")
    single = ("--layout", "after-run2=pin-numa")
    assert _run(*paths, *layouts, *single, "-o", str(tmp_path / "results"))[0] == 0
    assert layouts_of(tmp_path / "results") == {
        "before-run1": "default",
        "before-run2": "default",
        "after-run1": "pin",
        "after-run2": "pin-numa",
    }


def test_a_pattern_of_no_run_or_of_another_layout_is_refused(tmp_path: Path) -> None:
    paths = logs(tmp_path, "before/run1", "after/run1")
    for layouts in (("x*=pin",), ("before*=pin", "*run1=default")):
        words = [word for layout in layouts for word in ("--layout", layout)]
        code, said = _run(*paths, *words, "-o", str(tmp_path / "results"))
        assert code == 2
        assert "--layout" in said


def test_a_table_alone_is_read_with_the_nodes_that_its_threads_ran_on(tmp_path: Path) -> None:
    (path,) = logs(tmp_path, "kubevirt.log")
    assert _run(path, "-o", str(tmp_path / "results"))[0] == 0
    (found,) = load_runs(tmp_path / "results").runs
    assert [(one.value, one.index, one.node, one.peer_node) for one in found.samples] == [
        (12.5e9, 0, None, 1),
        (15.46e9, 1, None, 0),
    ]


def test_two_tables_of_one_text_are_repeats_of_each_other(tmp_path: Path) -> None:
    path = tmp_path / "twice.txt"
    path.write_text("The first:\n" + TABLE.format(12.61) + "and again:\n" + TABLE.format(15.6))
    assert _run(str(path), "-o", str(tmp_path / "results"))[0] == 0
    (found,) = load_runs(tmp_path / "results").runs
    values = sorted((one.peer_node, one.value) for one in found.samples if one.index == 0)
    assert values == [(1, 12.61e9), (1, 15.6e9)]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("vcpu_pin_60c", "pin"),
        ("vcpu_pin-1", "pin"),
        ("vcpu_pin_numa_smt_run2", "pin-numa-smt"),
        ("vcpu_pin_numa_56-3", "pin-numa"),
        ("vcpu_pin_old", "unknown"),
        ("60c", "unknown"),
    ],
)
def test_the_studys_names_are_known_with_cores_or_a_repeat(name: str, layout: str) -> None:
    (one,) = build_runs([directory(STUDY, name)], ImportOptions())
    assert one.run.head.switches.name == layout
    assert one.run.head.name == name


COPY = """[CUDA Bandwidth Test] - Starting...
 Device 0: Tesla P100
 Host to Device Bandwidth, 1 Device(s)
 PINNED Memory Transfers
   Transfer Size (Bytes)\tBandwidth(GB/s)
   32000000\t\t\t{}
Result = PASS
"""
PASS = """STREAM version $Revision: 5.10 $
Array size = 80000000 (elements), Offset = 0 (elements)
Number of Threads counted = 8
Function    Best Rate MB/s  Avg time     Min time     Max time
Copy:           {0}000.0     0.1   0.1   0.1
Scale:          {0}000.0     0.1   0.1   0.1
Add:            {0}000.0     0.1   0.1   0.1
Triad:          {0}000.0     0.1   0.1   0.1
"""
ROW_AT_0 = """nvbandwidth Version: v0.4
Running host_to_device_memcpy_ce.
memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)
{1}0         1         2
{1}0     {0}.00     57.06     56.68
"""


@pytest.mark.parametrize("unit", ["", " " * 11])
@pytest.mark.parametrize(
    ("output", "metric"),
    [(COPY, "h2d-bandwidth"), (PASS, "memory-bandwidth"), (ROW_AT_0, "h2d-bandwidth")],
)
@pytest.mark.parametrize(
    "command",
    [
        "$ numactl -N{0} -m{0} ./x",
        "# numactl --cpunodebind={0} --membind={0} /opt/x",
        "numactl -m {0} x",
    ],
)
def test_each_run_of_a_paste_is_bound_as_the_numactl_line_above_it_says(
    command: str, output: str, metric: str, unit: str, tmp_path: Path
) -> None:
    rates = {(0, 12), (1, 3)}
    parts = [f"{command.format(at)}\n{output.format(rate, unit)}" for at, rate in sorted(rates)]
    (tmp_path / "paste.txt").write_text("\n".join(parts))
    (made,) = build_runs(find_directories(tmp_path).directories, ImportOptions())
    samples = [one for one in made.run.samples if one.metric == metric]
    assert {(one.node, round(one.value / 1e9)) for one in samples} - {(0, 57), (1, 57)} == rates
    shown = homenode("import", str(tmp_path / "paste.txt"), "--dry-run").output
    assert "12.0 GB/s from node 0, 3.0 GB/s from node 1" in shown or output is ROW_AT_0
    assert ("GPU 0, host to device: 3.0 GB/s; expected 56.9 GB/s" in shown) is (output is ROW_AT_0)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be"])
def test_texts_that_a_windows_shell_redirected_are_read(encoding: str, tmp_path: Path) -> None:
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    text = (mark + mlc.OUTPUT).replace("\n", "\r\n")
    (tmp_path / "mlc.txt").write_bytes(text.encode(encoding))
    (run,) = build_runs(find_directories(tmp_path).directories, ImportOptions())
    assert run.run.samples


@pytest.mark.parametrize("text", [nvbandwidth.TEXT, nccl.TEXT, mlc.OUTPUT])
def test_labels_of_srun_and_colours_are_removed(text: str, tmp_path: Path) -> None:
    """Also where an editor took the blank behind the label of an empty line."""
    labelled = "\n".join(f"0: {line}".rstrip() for line in text.rstrip("\n").split("\n")) + "\n"
    for number, said in enumerate((text, labelled, f"\x1b[32m{text}\x1b[0m")):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}/x.log").write_text(said)
    runs = build_runs(find_directories(tmp_path).directories, ImportOptions())
    assert len(runs) == 3
    assert runs[0].run.samples == runs[1].run.samples == runs[2].run.samples


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (" 0: # a\n11: # b\n 0:\n 0: # c\n", "# a\n\n# c\n# b\n"),
        ("0: # a\nb\n", "0: # a\nb\n"),
        ("12:30:01 a\n12:30:02 b\n", "12:30:01 a\n12:30:02 b\n"),
    ],
)
def test_lines_of_each_task_are_together(said: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text(said)
    (directory,) = find_directories(tmp_path).directories
    assert directory.texts["x.log"] == text


def test_a_file_with_zero_bytes_is_binary_under_a_mark_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("nvbandwidth\0".encode("utf-16"))
    found = find_directories(tmp_path)
    assert not found.directories
    assert [gap.reason for gap in found.skipped] == ["binary"]


def test_too_large_texts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_directory, "MAX_BYTES", 5000)
    for number in range(6):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}/log.txt").write_text("x\n" * 500)
    with pytest.raises(InputError, match="MiB of text, found more") as refused:
        find_directories(tmp_path)
    assert "name the directories" in str(refused.value)


def test_a_directory_that_may_not_be_read_is_reported(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    looking = (
        "import sys, pathlib; from homenode.measure.imported_files import find_directories; "
        "print([gap.reason for gap in find_directories(pathlib.Path(sys.argv[1])).skipped])"
    )
    # Root may read every directory, but for what it gave up.
    given_up = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
    before = given_up if os.geteuid() == 0 else ()
    done = run([*before, sys.executable, "-c", looking, str(tmp_path)], 60)
    assert "Permission denied" in done.stdout_or_raise()


def test_a_directory_that_goes_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    (tmp_path / "log.txt").write_text(mlc.OUTPUT)
    read = import_directory._read_texts

    def slow(
        paths: list[Path], skipped: list[Gap], here: str, left: int
    ) -> tuple[dict[str, str], dict[str, float]]:
        if here == str(tmp_path):
            (tmp_path / "gone").rmdir()
        return read(paths, skipped, here, left)

    monkeypatch.setattr(import_directory, "_read_texts", slow)
    found = find_directories(tmp_path)
    assert len(found.directories) == 1
    assert [gap.subject for gap in found.skipped] == [str(tmp_path / "gone")]


def test_a_link_that_is_named_is_followed_and_no_other_one(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/mlc.txt").write_text(mlc.OUTPUT)
    (tmp_path / "latest").symlink_to("run/mlc.txt")
    (named,) = find_directories(tmp_path / "latest").directories
    assert list(named.texts) == ["mlc.txt"]
    assert any("not a regular file" in gap.reason for gap in find_directories(tmp_path).skipped)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert not find_directories(tmp_path).directories
    with pytest.raises(InputError, match="neither a file nor a directory"):
        find_directories(tmp_path / "pipe")
