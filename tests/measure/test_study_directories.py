"""A user who did what the study did, one run per configuration, gets the study's answers."""

import json
import random
from pathlib import Path

import pytest

from homenode.decide.comparison import EvidenceLevel
from homenode.decide.health import check_results
from homenode.decide.recommendation import (
    ReasonId,
    Recommendation,
    RecommendedComparison,
    decide_for_machines,
)
from homenode.decide.sentences import format_answer, format_basis, format_effect
from homenode.formats import decode
from homenode.measure.imported_files import find_sources
from homenode.measure.imported_runs import ImportOptions, build_runs
from homenode.measure.results.store import load_runs
from homenode.objective import Objective
from homenode.show.report.inputs import gather
from homenode.show.report.machine import build_machines
from tests.command_line import homenode
from tests.seeds import draws
from tests.study_directories import write_study_directories

RECOMMENDED = {
    ("H200", Objective.MULTI_GPU): "pin-bound",
    ("H200", Objective.MEMORY_BANDWIDTH): "pin-numa",
    ("MI350X", Objective.MULTI_GPU): "pin-bound",
    ("RTX PRO 6000", Objective.MULTI_GPU): "pin-bound",
    ("RTX 4090", Objective.MEMORY_BANDWIDTH): "pin-numa",
    ("RTX 4080", Objective.THROUGHPUT): "default",
}


OBJECTIVES = tuple(Objective)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("study")


@pytest.fixture(scope="module")
def verdicts(root: Path) -> dict[tuple[str, Objective], Recommendation]:
    systems = write_study_directories(root / "results")
    done = homenode("import", str(root / "results"), "-o", str(root / "imported"))
    assert done.exit_code == 0, done.output
    runs = load_runs(root / "imported").runs
    assert {run.head.system for run in runs} == set(systems)
    found = decide_for_machines(runs, OBJECTIVES)
    return {(one.system, one.objective): one for one in found}


@pytest.mark.parametrize(("system", "objective"), RECOMMENDED)
def test_one_run_per_configuration_gives_the_articles_answer_as_provisional(
    verdicts: dict[tuple[str, Objective], Recommendation], system: str, objective: Objective
) -> None:
    made = verdicts[system, objective]
    assert made.layout == RECOMMENDED[system, objective]
    if system == "MI350X":  # whose layouts do not differ: the article's rule is ours
        assert (made.level, format_basis(made)) == (EvidenceLevel.RULE, "cannot tell")
        return
    assert (made.level, made.boots) == (EvidenceLevel.PROVISIONAL, (1, 1))
    assert format_basis(made) == "provisional, 1 boot each, on an unnamed host"


def test_raw_directories_are_decided_compared_and_reported_as_imported_ones(
    verdicts: dict[tuple[str, Objective], Recommendation], root: Path
) -> None:
    expected = {key: (one.choice, one.layout, one.level) for key, one in verdicts.items()}
    done = homenode("compare", root / "results", "--json")
    found = decode(done.output, "comparison", RecommendedComparison, "output").recommendations
    assert {(v.system, v.objective): (v.choice, v.layout, v.level) for v in found} == expected
    read = gather([str(root / "results")], ())
    machines = build_machines(read.runs, read.stored, read.hosts)
    reported = [one for machine in machines for one in machine.recommendations]
    assert {(v.system, v.objective): (v.choice, v.layout, v.level) for v in reported} == expected
    directories = (root / "results/H200", root / "imported/H200")
    raw, imported = (json.loads(homenode("compare", one, "--json").output) for one in directories)
    for document in (raw, imported):
        assert all(one.pop("sources") for one in document["recommendations"])
    assert raw == imported


def test_the_rtx_5090_gets_no_layout(verdicts: dict[tuple[str, Objective], Recommendation]) -> None:
    own = [one for one in verdicts.values() if one.system == "RTX 5090"]
    blocked = {one.objective for one in own if one.find_reason(ReasonId.HEALTH)}
    assert blocked == {Objective.MULTI_GPU, Objective.GPU_COPY}
    (found,) = [{finding.id for finding in one.findings} for one in own[:1]]
    assert found == {"h2d-low", "collective-flat-curve"}
    assert not [one for one in own if one.tells]
    assert format_answer("RTX 5090", own).startswith("RTX 5090: repair first: ")


def test_sweeps_of_any_start_up_time_and_rate_change_no_recommendation(tmp_path: Path) -> None:
    """Forty study directories: each healthy machine has the article's answer, the sick one is
    named."""
    rng = random.Random(40)
    for number in range(draws(40)):
        root = tmp_path / str(number)
        start_s, rate = rng.uniform(10e-6, 100e-6), rng.uniform(2e9, 20e9)
        write_study_directories(root, start_s, rate)
        directories = find_sources([root]).directories
        runs = [one.run for one in build_runs(directories, ImportOptions())]
        found = {(one.system, one.objective): one for one in decide_for_machines(runs, OBJECTIVES)}
        for key, layout in RECOMMENDED.items():
            assert found[key].layout == layout, (start_s, rate, key)
        for (system, _), answer in found.items():
            assert bool(answer.findings) <= (system == "RTX 5090"), (start_s, rate, system)
        own = [one for (system, _), one in found.items() if system == "RTX 5090"]
        assert format_answer("RTX 5090", own).startswith("RTX 5090: repair first: ")
        sick = [run for run in runs if run.head.system == "RTX 5090"]
        assert "collective-flat-curve" in {one.id for one in check_results(sick)}


def test_compare_and_report_name_files_of_a_run_that_could_not_be_read(root: Path) -> None:
    study = root / "unread"
    write_study_directories(study)
    (study / "H200/default/stream.txt").write_text("killed\n")
    for command in (("compare",), ("report", "-o", root / "unread.html")):
        done = homenode(command[0], study / "H200", *command[1:])
        assert "default/stream.txt: " in done.output, command


def test_the_ground_names_the_worse(verdicts: dict[tuple[str, Objective], Recommendation]) -> None:
    text = format_effect(verdicts["H200", Objective.MULTI_GPU])
    assert text == "2.1x pin-numa, cannot tell it from default"


def test_a_machine_with_zeroes_alone_is_not_ready(tmp_path: Path) -> None:
    for name in ("default", "vcpu_pin"):
        directory = tmp_path / "results/gpu" / name
        directory.mkdir(parents=True)
        (directory / "metadata.json").write_text('{"vcpus": 8}')
        (directory / "mem_latency.txt").write_text(f"4096 0\n{512 << 20} 0\n")
    done = homenode("import", tmp_path / "results", "-o", tmp_path / "imported")
    assert done.exit_code == 0, done.output
    runs = load_runs(tmp_path / "imported").runs
    found = decide_for_machines(runs, OBJECTIVES)
    assert ReasonId.IMPOSSIBLE in {reason.id for answer in found for reason in answer.reasons}
    assert not [answer for answer in found if answer.choice]
