"""The visit to a machine with GPUs: every part ends in a line, and all is kept in one folder."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cli.bench import visit_gpus
from homenode.errors import HostError, UsageError
from homenode.measure import runner
from homenode.measure.gpu.agreement import agreed, agreement_findings
from homenode.measure.model import Group
from homenode.measure.results.model import Run, Sample
from homenode.measure.results.store import load_runs
from tests.bench_machines import FakeMachine
from tests.measure.test_gpu_run import GpuMachine
from tests.report_runs import full_run

GPU = Bdf.parse("0000:11:00.0")


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "IDLE_S", 0.0)


def _run(*rates: tuple[str, float]) -> Run:
    samples = tuple(Sample(metric, "bytes_per_s", rate, device=GPU) for metric, rate in rates)
    return replace(full_run("pin", 1), samples=samples)


def test_figures_of_two_tools_are_compared_by_metric_and_gpu() -> None:
    tool = _run(("h2d-bandwidth", 50e9), ("d2h-bandwidth", 50e9))
    torch = _run(("h2d-bandwidth", 51e9), ("d2h-bandwidth", 44e9), ("d2d-bandwidth", 1e12))
    assert len(agreed(tool, torch)) == 2
    (found,) = agreement_findings(tool, torch, ("nvbandwidth", "PyTorch"))
    assert found.id == "bench-tools-differ"
    assert found.subject.startswith("d2h-bandwidth of GPU 0000:11:00.0")


def test_figures_whose_samples_overlap_are_not_said_to_differ() -> None:
    tool = _run(*(("h2d-bandwidth", rate) for rate in (45e9, 51e9, 51e9)))
    torch = _run(*(("h2d-bandwidth", rate) for rate in (46e9, 46e9, 50e9)))
    assert "(0.902 x)" in agreed(tool, torch)[0]
    assert agreement_findings(tool, torch, ("nvbandwidth", "PyTorch")) == ()


def test_a_folder_that_is_there_is_not_written_to(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        visit_gpus(GpuMachine(), GpuMachine(), tmp_path, "python3", 600)


def test_a_machine_without_gpus_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "check"
    with pytest.raises(HostError):
        visit_gpus(FakeMachine(), FakeMachine(), folder, "python3", 600)
    assert not folder.exists()


def test_a_visit_leaves_runs_that_are_results_and_a_line_for_each_part(tmp_path: Path) -> None:
    folder = tmp_path / "check"
    alone = GpuMachine(programs=frozenset({"numactl", "all_reduce_perf"}))
    with pytest.raises(SystemExit) as ended:
        visit_gpus(GpuMachine(), alone, folder, "python3", 600, groups=(Group.GPU_COPY,))
    assert ended.value.code == 1
    kept = json.loads((folder / "gpu-check.json").read_text())
    assert kept["format"] == "homenode.findings/1"
    parts = [line for line in kept["checked"] if not line.startswith("not measured: ")]
    names = [line.partition(":")[0] for line in parts]
    assert names == [
        "host captured",
        "links while they copy",
        "figures",
        "PyTorch's figures",
        "nvbandwidth against PyTorch",
    ]
    # No GPU here for the load that links need, and the two stand-ins have no GPU in common.
    assert [": not possible: " in line for line in parts] == [
        False,
        True,
        False,
        False,
        True,
    ]
    assert (folder / "host.tar.gz").exists()
    runs = load_runs(folder / "results").runs
    assert {run.head.name for run in runs} == {"gpu-check", "gpu-check-torch"}


def test_no_part_begins_when_the_time_is_over(tmp_path: Path) -> None:
    folder = tmp_path / "check"
    with pytest.raises(SystemExit):
        visit_gpus(GpuMachine(), GpuMachine(), folder, "python3", -1)
    kept = json.loads((folder / "gpu-check.json").read_text())
    assert all("left out" in line for line in kept["checked"])


def test_figures_that_pytorch_made_for_a_broken_tool_are_not_compared_with_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = GpuMachine(fails=frozenset({"nvbandwidth"}))
    alone = GpuMachine(programs=frozenset({"numactl"}))
    folder = tmp_path / "check"
    with pytest.raises(SystemExit) as ended:
        visit_gpus(broken, alone, folder, "python3", 600, groups=(Group.GPU_COPY,))
    assert ended.value.code == 1
    line = json.loads((folder / "gpu-check.json").read_text())["checked"][-1]
    assert "nvbandwidth against PyTorch: not possible: expected copies by nvbandwidth" in line
    assert "nothing is wrong" not in capsys.readouterr().out
