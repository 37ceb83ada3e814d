"""Each script of bench/ runs to its end: with its smallest arguments, once."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ARGUMENTS = {
    "command_speed": "1",
    "host_speed": "1",
    "plan_corpus": "--seeds 0 1",
    "plan_speed": "--repeats 1",
    "probe_peers": "1",
    "report_speed": "10",
    "slurm_audit_speed": "2",
}


def test_each_script_has_its_smallest_arguments_and_make_bench_runs_no_other() -> None:
    scripts = {path.stem for path in ROOT.glob("bench/*.py")}
    recipe = (ROOT / "Makefile").read_text().partition("\nbench:")[2].partition("\n\n")[0]
    run = {word.removeprefix("bench.") for word in recipe.split() if word.startswith("bench.")}
    assert scripts == set(ARGUMENTS)
    assert run <= scripts


@pytest.mark.nightly
@pytest.mark.parametrize("script", ARGUMENTS)
def test_a_script_prints_its_measurements(script: str) -> None:
    argv = [sys.executable, "-m", f"bench.{script}", *ARGUMENTS[script].split()]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 1, done.stdout
