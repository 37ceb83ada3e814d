"""The study of GH200 nodes under Slurm, end to end: its logs' format in, its summary table out."""

from pathlib import Path

import pytest
from demo import gh200_study

from homenode.decide.alternative import group_runs
from homenode.decide.matrices import Axis, build_matrices, compare_localities
from homenode.doc import format_plain
from homenode.measure.results.model import Origin
from homenode.show.report.answer import stop_of
from homenode.show.report.document import build_report
from homenode.show.report.inputs import gather
from homenode.show.report.machine import ReportedMachine, build_machines
from tests.command_line import homenode
from tests.explained import rows


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The logs, imported."""
    directory = tmp_path_factory.mktemp("gh200")
    gh200_study.write(directory / "logs")
    done = homenode("import", directory / "logs", "-o", directory / "results")
    assert done.exit_code == 0, done.output
    return directory / "results"


def machine_of(directory: Path, *hosts: str) -> ReportedMachine:
    found = gather([str(directory)], list(hosts))
    (one,) = build_machines(found.runs, found.stored, found.hosts)
    return one


@pytest.fixture(scope="module")
def machine(results: Path) -> ReportedMachine:
    return machine_of(results, "gh200x4")


def test_the_logs_means_are_the_published_figures_and_each_log_says_it_is_made_up() -> None:
    for what in ("h2d", "d2h", "latency"):
        cells = gh200_study.cells(what)
        local = [cells[n][n] for n in range(4)]
        remote = [cells[n][g] for n in range(4) for g in range(4) if g != n]
        assert sum(local) / 4 == pytest.approx(gh200_study.LOCAL[what], abs=1e-9)
        assert sum(remote) / 12 == pytest.approx(gh200_study.REMOTE[what], abs=1e-9)
    texts = gh200_study.files()
    assert len(texts) == 10
    assert all(text.startswith("# synthesised") for text in texts.values())


def test_logs_that_name_no_layout_say_what_to_do_and_are_found_next_to_runs(
    results: Path, tmp_path: Path
) -> None:
    real = tmp_path / "real"
    real.mkdir()
    for name, text in gh200_study.files().items():
        (real / name).write_text(text.partition("\n")[2])
    assert "homenode import --layout" in format_plain(stop_of(machine_of(real))[0])
    (one,) = [run for run in results.rglob("results.jsonl") if "exclusive" in str(run)]
    (real / "run").mkdir()
    (real / "run/results.jsonl").write_bytes(one.read_bytes())
    assert len(gather([str(real)], []).runs) == 1 + 3, "the logs, too"


def test_runs_of_made_up_logs_say_so_and_decide_nothing(machine: ReportedMachine) -> None:
    assert {run.head.origin for run in machine.runs} == {Origin.SYNTHESISED}
    action, reason = map(format_plain, stop_of(machine))
    assert action == "measure again first" and "its results are synthesised" in reason
    labels = " ".join(one.label for one in machine.chosen)
    assert labels == "exclusive_4gpu shared_array_1gpu shared_array_2gpu"


def test_both_directions_and_latency_are_maps_of_four_nodes_and_four_gpus(
    machine: ReportedMachine,
) -> None:
    exclusive = machine.chosen[0]
    matrices = {matrix.key.metric: matrix for matrix in build_matrices(exclusive)}
    assert set(matrices) == {"h2d-bandwidth", "d2h-bandwidth", "h2d-latency"}
    for matrix in matrices.values():
        assert (matrix.key.rows, matrix.key.columns) == (Axis.NODE, Axis.GPU)
        assert (len(matrix.rows), len(matrix.columns), len(matrix.cells)) == (4, 4, 16)
    h2d = matrices["h2d-bandwidth"]
    assert h2d.cells[h2d.rows[2], h2d.columns[2]] == gh200_study.cells("h2d")[2][2] * 1e9
    assert h2d.cells[h2d.rows[2], h2d.columns[0]] == gh200_study.cells("h2d")[2][0] * 1e9


def test_the_summary_table_is_the_studys(machine: ReportedMachine) -> None:
    table = {
        (row.pop("metric"), row.pop("run")): tuple(row.values())
        for row in rows(build_report([machine], (), "now"), "Local and remote")
    }
    near = "by the host's topology"
    assert table["host to device", "exclusive_4gpu"] == (
        *("411.6 GB/s (4)", "88.6 GB/s (12)", "4.65x"),
        near,
    )
    d2h = table["device to host", "exclusive_4gpu"]
    assert d2h[:2] == ("169.4 GB/s (4)", "88.3 GB/s (12)")
    latency = table["host to device latency", "exclusive_4gpu"]
    assert latency[:2] == ("739 ns (4)", "1,109 ns (12)")
    assert table["host to device", "shared_array_1gpu"] == (
        *("411.6 GB/s (4)", "none measured", ""),
        "as the job was bound",
    )


def test_without_a_topology_the_node_with_the_fastest_copies_is_near(
    machine: ReportedMachine,
) -> None:
    exclusive = group_runs(machine.chosen[0].runs)[0]
    found = {one.key.metric: one for one in compare_localities([exclusive], {})}
    assert found["h2d-bandwidth"].ratio == pytest.approx(4.6456, abs=1e-3)
    assert found["h2d-latency"].local == pytest.approx(739)
    assert "fastest" in found["h2d-bandwidth"].basis
