"""Runs that were cut: what is on disk is kept, and going on loses and doubles nothing."""

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from msgspec.structs import replace

from homenode.errors import HomenodeError, UsageError
from homenode.measure.experiment import Progress
from homenode.measure.model import BenchOptions, SuiteGroup, SuiteOptions
from homenode.measure.results.model import Run
from homenode.measure.results.store import load_runs, read_run
from homenode.measure.run_directory import RunDirectory, StepRecord
from tests.bench_machines import FakeMachine
from tests.measure.test_runner import ORDERS, QUICK, run
from tests.memory_directory import memory_directory

pytestmark = pytest.mark.usefixtures("no_waiting")


def untimed(run: Run | None) -> Run:
    """A run without the times at which it happened to be taken."""
    assert run is not None
    return structs.replace(run, head=structs.replace(run.head, started_s=None, ended_s=None))


def test_progress_counts_to_the_end_and_the_time_left_shrinks(tmp_path: Path) -> None:
    seen: list[Progress] = []
    run(tmp_path, on_progress=seen.append)
    assert [progress.ended_count for progress in seen] == list(range(seen[0].total + 1))
    left = [one.seconds_left or 0.0 for one in seen]
    assert left[0] > left[-2] > left[-1] == 0


def test_a_run_of_that_name_is_never_overwritten(tmp_path: Path) -> None:
    first = run(tmp_path)
    with pytest.raises(UsageError, match="a run of this name exists"):
        run(tmp_path)
    with pytest.raises(UsageError, match="no run to continue"):
        run(tmp_path, orders=replace(ORDERS, name="z"), resume=True)
    assert read_run(tmp_path / "cpu-only" / "x") == first.run


@pytest.mark.parametrize(
    ("orders", "machine", "says"),
    [
        (replace(ORDERS, seed=5), FakeMachine(), "seed 1 before, 5 now"),
        (replace(ORDERS, repeats=3), FakeMachine(), "rounds 2 before, 3 now"),
        (ORDERS, FakeMachine(boot="after a restart"), "boot"),
        (ORDERS, FakeMachine(host="x86-2p2n16c16t-smt-off"), "machine"),
        (
            replace(ORDERS, suite=replace(QUICK, groups=(SuiteGroup.CPU_ALL,))),
            FakeMachine(),
            "tests",
        ),
        (replace(ORDERS, suite=SuiteOptions()), FakeMachine(), "tests with other commands"),
        (replace(ORDERS, arrangement="other"), FakeMachine(), "arrangement None before, other now"),
        (replace(ORDERS, host_kind="other"), FakeMachine(), "kind of host"),
    ],
)
def test_a_run_goes_on_under_the_same_orders_alone(
    orders: BenchOptions, machine: FakeMachine, says: str, tmp_path: Path
) -> None:
    run(tmp_path)
    with pytest.raises(UsageError, match="--resume") as caught:
        run(tmp_path, machine, orders, resume=True)
    assert says in caught.value.message
    assert machine.calls == []


def test_an_output_that_was_changed_is_refused(tmp_path: Path) -> None:
    run(tmp_path)
    output = next((tmp_path / "cpu-only" / "x" / "raw").glob("0003-*"))
    output.write_text(output.read_text().replace("3", "4", 1))
    with pytest.raises(HomenodeError, match="was changed after the run wrote it"):
        run(tmp_path, resume=True)


def test_a_finished_run_that_is_resumed_stays_the_same(tmp_path: Path) -> None:
    first = run(tmp_path)
    machine = FakeMachine()
    again = run(tmp_path, machine, resume=True)
    assert machine.calls == []
    assert again.run == first.run


class Killed(BaseException):
    """Stands for kill -9: nothing of ours runs after it."""


def test_killed_anywhere_no_sample_is_lost_or_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every place at which a file changes or a program starts, one after the other."""
    orders = replace(
        ORDERS,
        repeats=1,
        suite=replace(QUICK, groups=(SuiteGroup.CORE_TO_CORE, SuiteGroup.CPU_SINGLE)),
    )
    left = [-1]

    def may_die() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    def dying(of: Callable[..., Any]) -> Callable[..., Any]:
        def first_may_die(*words: Any, **named: Any) -> Any:
            may_die()
            return of(*words, **named)

        return first_may_die

    monkeypatch.setattr(os, "fsync", dying(os.fsync))
    monkeypatch.setattr(os, "replace", dying(os.replace))
    monkeypatch.setattr(FakeMachine, "run", dying(FakeMachine.run))
    with memory_directory() as directory:
        whole = untimed(run(directory / "whole", orders=orders).run)
        places = 0
        for place in itertools.count(1):
            root = directory / str(place)
            left[0] = place
            try:
                run(root, orders=orders)
            except Killed:
                places += 1
            else:
                break
            left[0] = -1
            begun = (root / "cpu-only" / "x" / "journal.jsonl").exists()
            resumed = untimed(run(root, orders=orders, resume=begun).run)
            assert resumed == whole, f"killed at {place}"
        assert places > 20


def test_killed_again_and_again_it_still_comes_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with memory_directory() as directory:
        whole = untimed(run(directory / "whole").run)
        steps = []
        write = RunDirectory.write_step

        def write_and_die(self: RunDirectory, record: StepRecord, output: str) -> None:
            write(self, record, output)
            steps.append((record.round, record.test))
            raise Killed

        monkeypatch.setattr(RunDirectory, "write_step", write_and_die)
        for resume in itertools.chain([False], itertools.repeat(True)):
            try:
                outcome = run(directory / "cut", resume=resume)
            except Killed:
                continue
            break
        assert untimed(outcome.run) == whole
        assert len(steps) == len(set(steps)), "no step was run twice"


def test_an_unfinished_run_is_not_mistaken_for_whole(tmp_path: Path) -> None:
    def stop(progress: Progress) -> None:
        if progress.ended_count == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, on_progress=stop)
    loaded = load_runs(tmp_path)
    assert loaded.runs == ()
    assert "expected a finished run" in loaded.skipped[0].reason
