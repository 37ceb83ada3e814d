"""A run of the suite: what is kept, what is omitted, and on which CPUs it stays."""

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from homenode.cpuset import CpuSet
from homenode.errors import ToolError, UsageError
from homenode.measure import runner
from homenode.measure.access.machine import Machine
from homenode.measure.experiment import Progress
from homenode.measure.model import (
    PROBE,
    AppCommand,
    BenchOptions,
    BenchOutcome,
    SuiteDepth,
    SuiteGroup,
    SuiteOptions,
)
from homenode.measure.results.model import UNSETTLED, Run, Sample
from homenode.measure.results.store import load_runs, read_run
from homenode.measure.results.vantage import Vantage
from homenode.measure.run_directory import RunDirectory
from homenode.process import ProgramResult, ToolTimeoutError
from homenode.vm.sources import load_host
from tests import probe_documents
from tests.bench_machines import FakeMachine
from tests.probe_documents import FAR, NEAR, answer

pytestmark = pytest.mark.usefixtures("no_waiting")

QUICK = SuiteOptions(depth=SuiteDepth.QUICK)
ORDERS = BenchOptions("x", QUICK, repeats=2, vantage=Vantage.HOST)


def run(
    root: Path,
    machine: Machine | None = None,
    orders: BenchOptions = ORDERS,
    *,
    resume: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> BenchOutcome:
    return runner.run_bench(machine or FakeMachine(), orders, root, on_progress, resume=resume)


def measured(outcome: BenchOutcome) -> Run:
    assert outcome.run is not None
    return outcome.run


def of(outcome: BenchOutcome, metric: str, variant: str | None = None) -> list[Sample]:
    samples = measured(outcome).samples
    return [one for one in samples if (one.metric, one.variant) == (metric, variant)]


def ids(outcome: BenchOutcome) -> set[str]:
    return {finding.id for finding in outcome.findings}


def test_a_run_is_a_directory_that_others_can_read(tmp_path: Path) -> None:
    """Several threads have a state, and one alone has none."""
    outcome = run(tmp_path)
    directory = tmp_path / "cpu-only" / "x"
    assert outcome.directory == str(directory)
    assert {one.state for one in of(outcome, "memory-bandwidth", "triad")} == {"27 ns"}
    assert {one.state for one in of(outcome, "memory-bandwidth", "triad, one thread")} == {None}
    assert read_run(directory) == outcome.run
    loaded = load_runs(tmp_path)
    assert loaded.runs == (outcome.run,)
    assert loaded.skipped == ()
    kept = {path.name for path in directory.iterdir()}
    assert {"journal.jsonl", "host.tar.gz", "results.jsonl", "raw"} <= kept
    assert load_host(str(directory / "host.tar.gz")).pus


def test_every_test_runs_once_a_round_in_a_seeded_order(tmp_path: Path) -> None:
    machine = FakeMachine()
    outcome = run(tmp_path, machine)
    assert [words[1] for words in machine.calls].count("placement") == 2
    assert len(of(outcome, "cpu-single")) == 3 * 3, "a control before, between and after"
    other = FakeMachine()
    run(tmp_path, other, replace(ORDERS, name="y", seed=2))
    assert sorted(machine.calls) == sorted(other.calls)
    assert machine.calls != other.calls


def test_raw_outputs_stand_next_to_the_samples(tmp_path: Path) -> None:
    run(tmp_path)
    raw = tmp_path / "cpu-only" / "x" / "raw"
    records = [json.loads(path.read_text()) for path in sorted(raw.glob("[0-9]*.json"))]
    assert [one["number"] for one in records] == list(range(len(records)))
    outputs = [(raw / one["output"]).read_text() for one in records]
    assert outputs == [answer(argv_of(one)) for one in records]


def argv_of(record: dict[str, Any]) -> Sequence[str]:
    orders = {test.id: test.argv for test in runner.inspect(FakeMachine(), ORDERS)[0].record.tests}
    return orders[record["test"]]


def test_states_are_distinguished_over_the_whole_run(tmp_path: Path) -> None:
    """Each document alone is steady: only together do they show that the CPUs were moved."""
    places = itertools.cycle([NEAR, FAR])

    def moving(argv: Sequence[str]) -> str:
        if argv[1] == "bandwidth":
            return probe_documents.bandwidth("0-1", [next(places)] * 9)
        return answer(argv)

    orders = replace(
        ORDERS, pus=CpuSet.parse("0-1"), suite=replace(QUICK, groups=(SuiteGroup.MEMORY_BANDWIDTH,))
    )
    outcome = run(tmp_path, FakeMachine(answer=moving), orders)
    samples = of(outcome, "memory-bandwidth", "triad")
    assert {one.state for one in samples} == {"27 ns", "108 ns"}
    for state, least, most in (("27 ns", 30e9, 40e9), ("108 ns", 60e9, 80e9)):
        assert all(least < one.value < most for one in samples if one.state == state)
    assert "bench-placement-moves" in ids(outcome)


def test_a_sample_during_which_the_pus_moved_is_in_no_state(tmp_path: Path) -> None:
    def moving(argv: Sequence[str]) -> str:
        inside = (NEAR[0], FAR[1])
        return probe_documents.bandwidth(argv[-1], [NEAR, NEAR, inside, FAR, FAR])

    options = replace(QUICK, groups=(SuiteGroup.MEMORY_BANDWIDTH,))
    orders = replace(ORDERS, repeats=1, pus=CpuSet.parse("0-1"), suite=options)
    outcome = run(tmp_path, FakeMachine(answer=moving), orders)
    assert [one.state for one in of(outcome, "memory-bandwidth", "read")] == [UNSETTLED]


@pytest.mark.parametrize(
    "failure", [ToolTimeoutError("no end after 5 s"), ToolError("too much output"), "no JSON"]
)
def test_a_test_that_fails_costs_no_other(failure: ToolError | str, tmp_path: Path) -> None:
    def failing(argv: Sequence[str]) -> str:
        if argv[1] != "latency":
            return answer(argv)
        if isinstance(failure, str):
            return failure
        raise failure

    outcome = run(tmp_path, FakeMachine(answer=failing))
    assert not [one for one in measured(outcome).samples if one.metric == "memory-latency"]
    assert of(outcome, "core-to-core-latency", "0 to 1")
    gaps = [gap.subject for gap in outcome.gaps if gap.subject.startswith("mem-latency")]
    assert gaps == ["mem-latency, round 1", "mem-latency, round 2"]
    assert "bench-test-failed" in ids(outcome)


def test_a_machine_out_of_reach_stops_the_run_and_loses_nothing(tmp_path: Path) -> None:
    class Leaving(FakeMachine):
        gone = False

        def run(self, argv: Sequence[str], *rest: Any, **named: Any) -> ProgramResult:
            self.gone = self.gone or len(self.calls) == 4
            if self.gone:
                raise ToolError("the way to it is broken")
            return super().run(argv, *rest, **named)

    with pytest.raises(ToolError, match="broken"):
        run(tmp_path, Leaving())
    machine = FakeMachine()
    outcome = run(tmp_path, machine, resume=True)
    assert outcome.directory is not None
    steps = RunDirectory(Path(outcome.directory)).read_steps()
    assert len(machine.calls) == len(steps) - 4


def test_the_users_own_program_is_measured_with_the_controls(tmp_path: Path) -> None:
    def app(argv: Sequence[str]) -> str:
        return "epoch 1: 90 img/s\nepoch 2: 100.5 img/s\n" if argv[0] == "./train" else answer(argv)

    order = AppCommand(("./train", "-q; rm"), r"([0-9.]+) img/s", name="train")
    machine = FakeMachine(answer=app)
    outcome = run(tmp_path, machine, replace(ORDERS, app=order))
    assert [one.value for one in of(outcome, "app-rate:train")] == [100.5, 100.5]
    assert ("./train", "-q; rm") in machine.calls, "no shell takes the words apart"
    assert {one.metric for one in measured(outcome).samples} == {"app-rate:train", "cpu-single"}
    timed = replace(ORDERS, name="y", app=replace(order, lower_is_better=True))
    assert of(run(tmp_path, machine, timed), "app-time:train")[0].value == 100.5e9


@pytest.mark.parametrize("metric", ["(", "no group", "(two) (groups)"])
def test_a_metric_without_a_figure_is_refused_first(metric: str, tmp_path: Path) -> None:
    machine = FakeMachine()
    with pytest.raises(UsageError, match="--metric"):
        run(tmp_path, machine, replace(ORDERS, app=AppCommand(("true",), metric)))
    assert machine.calls == []


def test_pus_and_nodes_confine_the_run(tmp_path: Path) -> None:
    machine = FakeMachine(host="x86-2p2n8c16t-pus-interleaved")
    outcome = run(tmp_path, machine, replace(ORDERS, nodes=(1,)))
    node = next(one for one in load_host("x86-2p2n8c16t-pus-interleaved").nodes if one.index == 1)
    asked = {argv[argv.index("--pus") + 1] for argv in machine.calls}
    assert all(CpuSet.parse(text) <= node.pus for text in asked)
    assert measured(outcome).head.nodes == (1,)
    assert measured(outcome).head.pus == node.pus
    assert any("--node" in argv for argv in machine.calls)
    assert not any("--matrix" in argv for argv in machine.calls)
    assert "bench-changed" not in ids(outcome), "the rest of the machine is still there"


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"pus": CpuSet.parse("0-99")}, "--cpus"), ({"nodes": (7,)}, "--nodes")],
)
def test_absent_pus_and_nodes_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        run(tmp_path, orders=replace(ORDERS, **changes))
    assert not list(tmp_path.iterdir())


def test_secrets_in_an_output_are_not_stored(tmp_path: Path) -> None:
    text = '{"nccl_version": 22809, "env": ["TOKEN=hunter2"], "args": ["--key", "hunter2"]}'
    outcome = run(tmp_path, FakeMachine(answer=lambda argv: text))
    assert outcome.directory is not None
    for path in Path(outcome.directory).rglob("*"):
        assert path.is_dir() or b"hunter2" not in path.read_bytes()


def test_without_the_probe_the_message_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{PROBE}: command not found"):
        run(tmp_path, FakeMachine(programs=frozenset()))


def test_endless_output_fills_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the end is kept: bytes that are no text grow to three each, past what can be read."""
    monkeypatch.setattr(runner, "MAX_APP_OUTPUT", 100)

    def talking(argv: Sequence[str]) -> str:
        return "\ufffd" * 5000 + "\nrate 5\n" if argv[0] == "talk" else answer(argv)

    orders = replace(ORDERS, app=AppCommand(("talk",), "rate ([0-9]+)"))
    outcome = run(tmp_path, FakeMachine(answer=talking), orders)
    assert [one.value for one in of(outcome, "app-rate:app")] == [5, 5]
    (output, *_) = (tmp_path / "cpu-only" / "x" / "raw").glob("*-app.txt")
    assert len(output.read_text()) == 100


def test_looks_are_never_written_over_each_other(tmp_path: Path) -> None:
    run(tmp_path)
    journal = tmp_path / "cpu-only" / "x" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    step = next(line for line in lines if line.startswith(b'{"step"'))
    journal.write_bytes(b"".join(line for line in lines if line is not step))
    run(tmp_path, resume=True)
    looks = RunDirectory(journal.parent).looks()
    assert [look.number for look in looks] == [0, 1, 2, 3]
    assert [look.is_before for look in looks] == [True, False, True, False]
