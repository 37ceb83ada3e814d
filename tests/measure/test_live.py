"""The suite on this machine, with the real probe: what it comes to, and a neighbour who is busy."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from homenode.cpuset import CpuSet
from homenode.decide.alternative import group_runs
from homenode.decide.caveats import find_own_caveats
from homenode.measure.access.machine import LocalMachine
from homenode.measure.model import BenchOptions, BenchOutcome, SuiteDepth, SuiteGroup, SuiteOptions
from homenode.measure.results.model import UNSETTLED
from homenode.measure.results.vantage import Vantage
from homenode.measure.runner import run_bench
from tests.probe_build import allowed_pus, probe_file

GROUPS = (
    SuiteGroup.CPU_SINGLE,
    SuiteGroup.CPU_ALL,
    SuiteGroup.MEMORY_BANDWIDTH,
    SuiteGroup.CORE_TO_CORE,
    SuiteGroup.PLACEMENT,
)


@pytest.fixture(autouse=True)
def _own_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{probe_file().parent}:{os.environ['PATH']}")


def run(root: Path, pus: list[int], groups: tuple[SuiteGroup, ...] = GROUPS) -> BenchOutcome:
    options, pus_ = SuiteOptions(groups, SuiteDepth.QUICK), CpuSet(pus)
    orders = BenchOptions("live", options, repeats=1, vantage=Vantage.HOST, pus=pus_)
    return run_bench(LocalMachine(), orders, root, lambda progress: None)


@contextmanager
def busy(pu: int) -> Iterator[None]:
    """Somebody who takes all that a CPU has."""
    code = f"import os\nos.sched_setaffinity(0, {{{pu}}})\nprint(flush=True)\nwhile True: pass"
    neighbour = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert neighbour.stdout is not None
        neighbour.stdout.readline()
        time.sleep(0.1)
        yield
    finally:
        neighbour.kill()
        neighbour.communicate()


@pytest.mark.nightly
def test_two_pus_of_this_machine_are_measured(tmp_path: Path) -> None:
    pus = allowed_pus()[:2]
    if len(pus) < 2:
        pytest.skip("needs two CPUs")
    outcome = run(tmp_path, pus)
    assert outcome.run is not None
    metrics = {one.metric for one in outcome.run.samples}
    assert {"cpu-single", "cpu-throughput", "memory-bandwidth", "core-to-core-latency"} <= metrics
    bracketed = [one for one in outcome.run.samples if one.metric == "core-to-core-latency"]
    assert all(one.state == UNSETTLED or str(one.state).endswith(" ns") for one in bracketed)
    one_thread = [one for one in outcome.run.samples if one.variant == "triad, one thread"]
    assert one_thread
    assert all(one.state is None for one in one_thread)


def test_a_busy_neighbour_on_the_same_pu_marks_the_run(tmp_path: Path) -> None:
    pu = allowed_pus()[0]
    with busy(pu):
        outcome = run(tmp_path, [pu], (SuiteGroup.CPU_SINGLE,))
    assert outcome.run is not None
    assert {"bench-busy", "bench-disturbed"} <= {finding.id for finding in outcome.findings}
    assert all(one.disturbed for one in outcome.run.samples)
    caveats = [caveat for one in group_runs((outcome.run,)) for caveat in find_own_caveats(one)]
    assert any(one.id == "unusable" and one.blocks for one in caveats), "nothing is concluded"
