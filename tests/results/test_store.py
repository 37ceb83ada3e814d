"""Runs as lines and in directories: what is written is read back, what is broken is omitted."""

import os
import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode import formats
from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError, UsageError
from homenode.measure.results.model import (
    UNKNOWN_SWITCHES,
    Condition,
    GpuPlace,
    Origin,
    Run,
    RunHead,
    Sample,
    Statistic,
    Switches,
)
from homenode.measure.results.store import (
    FILE,
    end_line,
    load_runs,
    parse_run,
    read_head_line,
    read_run,
    run_text,
    write_run,
)
from homenode.measure.results.vantage import Vantage
from homenode.vm.layout import PRESETS, MemoryBinding
from tests.mutations import survives
from tests.simulated_runs import simulated_run

GPU = Bdf.parse("0000:19:00.0")
HEAD = RunHead(
    "pin-numa",
    "NVIDIA H200",
    Origin.MEASURED,
    Vantage.GUEST,
    Switches.from_layout(PRESETS["pin-numa"]),
    host_kind="2x Xeon 8558, H200",
    pus=CpuSet.parse("0-22,48-70"),
    nodes=(0, 1),
    boots=("a", "b"),
    gpus=(GpuPlace(GPU, None),),
    conditions=(Condition("governor", "performance"),),
)
RUN = Run(
    HEAD,
    (
        Sample("memory-bandwidth", "bytes_per_s", 561.17e9, variant="triad"),
        Sample("h2d-bandwidth", "bytes_per_s", 55.3e9, boot=1, number=3, device=GPU, node=0),
        Sample("memory-latency", "ns", 101.0, statistic=Statistic.UNKNOWN, count=None),
    ),
)


def test_a_run_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = write_run(tmp_path, RUN)
    assert path == tmp_path / "NVIDIA H200" / "pin-numa" / FILE
    assert read_run(path) == read_run(path.parent) == RUN
    assert load_runs(tmp_path).runs == (RUN,)


def test_a_run_can_be_appended_to_line_by_line() -> None:
    lines = read_head_line(HEAD) + "".join(map(formats.line, RUN.samples)) + end_line(3)
    assert parse_run(lines.encode(), "run") == RUN


@pytest.mark.parametrize("at", [1, 40, 400, -1, -8, -30])
def test_a_run_that_was_cut_short_is_never_mistaken_for_whole(at: int) -> None:
    with pytest.raises(InputError, match="run"):
        parse_run(run_text(RUN).encode()[:at], "run")


def test_an_end_that_counts_other_samples_is_refused() -> None:
    with pytest.raises(InputError, match="expected 4 samples, as in its last line, found 3"):
        text = read_head_line(HEAD) + "".join(map(formats.line, RUN.samples)) + end_line(4)
        parse_run(text.encode(), "run")


def test_another_version_is_refused_with_the_next_step() -> None:
    text = run_text(RUN).replace("homenode.results/1", "homenode.results/2")
    with pytest.raises(InputError, match="another build"):
        parse_run(text.encode(), "run")


def test_times_and_the_block_of_an_experiment_are_kept() -> None:
    head = replace(HEAD, started_s=1795315191.25, ended_s=1795315200.0, experiment="t", block=2)
    run = replace(RUN, head=head)
    assert parse_run(run_text(run).encode(), "run") == run


def test_broken_half_written_and_foreign_directories_are_skipped_with_their_reason(
    tmp_path: Path,
) -> None:
    write_run(tmp_path, RUN)
    for name, content in (
        ("broken", b"\xff\x00{"),
        ("empty", b""),
        ("half", run_text(RUN).encode()[:-20]),
        ("other", b'{"format": "homenode.plan/1"}\n'),
    ):
        (tmp_path / "gpu" / name).mkdir(parents=True)
        (tmp_path / "gpu" / name / FILE).write_bytes(content)
    (tmp_path / "gpu" / "foreign").mkdir()
    (tmp_path / "gpu" / "foreign" / "stream.txt").write_text("Copy: 1")
    loaded = load_runs(tmp_path)
    assert loaded.runs == (RUN,)
    reasons = {Path(one.subject).name: one.reason for one in loaded.skipped}
    assert set(reasons) == {"broken", "empty", "half", "other", "foreign"}
    assert "finished" in reasons["half"]
    assert "not a run of homenode" in reasons["foreign"]
    assert "empty file" in reasons["empty"]


def test_a_link_in_a_circle_is_not_followed(tmp_path: Path) -> None:
    write_run(tmp_path, RUN)
    (tmp_path / "NVIDIA H200" / "again").symlink_to(tmp_path)
    assert load_runs(tmp_path).runs == (RUN,)


def test_a_run_is_not_written_over_another(tmp_path: Path) -> None:
    write_run(tmp_path, RUN)
    with pytest.raises(UsageError, match="choose another name"):
        write_run(tmp_path, RUN)


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc", "a\x00b"])
def test_a_name_that_leaves_the_results_directory_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="one directory's name"):
        write_run(tmp_path, replace(RUN, head=replace(HEAD, name=name)))


def test_nothing_at_a_path_says_what_makes_results(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="hint: homenode bench --results"):
        load_runs(tmp_path / "nowhere")


def test_mutated_runs_give_a_run_or_an_error_that_names_the_place() -> None:
    survives(
        lambda text: parse_run(text.encode("utf-8", "surrogatepass"), "run"), run_text(RUN), 300
    )


def test_switches_that_are_no_preset_are_named_by_what_is_known() -> None:
    numa = Switches.from_layout(PRESETS["pin-numa"])
    assert replace(numa, pinning=None).name.startswith("siblings hidden, cells host")
    assert replace(UNKNOWN_SWITCHES, memory=MemoryBinding.BOUND).name == "memory bound"


def test_a_pipe_or_a_device_in_place_of_a_run_is_skipped_and_never_waited_for(
    tmp_path: Path,
) -> None:
    write_run(tmp_path, simulated_run("pin", {"memory-latency": ("ns", 100.0)}, random.Random(1)))
    for name in ("pipe", "device"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "pipe" / FILE)
    (tmp_path / "device" / FILE).symlink_to("/dev/zero")
    loaded = load_runs(tmp_path)
    assert len(loaded.runs) == 1
    assert [one.reason.rpartition(": ")[2] for one in loaded.skipped] == [
        "a device, not a regular file",
        "a pipe, not a regular file",
    ]
