"""A sequential trial on a simulated hypervisor: where boots go, what it says, and a kill."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from homenode.decide.alternative import alternatives_of
from homenode.decide.compare import compare
from homenode.decide.comparison import Outcome
from homenode.decide.decide import decide_for_machines
from homenode.decide.evidence.documents import publications
from homenode.decide.evidence.model import Evidence
from homenode.decide.machine_facts import facts_of_runs
from homenode.decide.sequential import SequentialAnswer, look_at, sequential_answer
from homenode.decide.trial_conclusion import conclude
from homenode.measure import runner as bench_runner
from homenode.measure.layouts import guest
from homenode.measure.layouts.journal import Head, JournalFile
from homenode.measure.layouts.runner import run_trial, steps_of
from homenode.measure.results.model import Run, SequentialPlan
from homenode.measure.results.store import read_run
from homenode.measure.sequence import SequenceEnd
from homenode.objective import Objective
from tests.apply_documents import ORIGINAL
from tests.simulated_trial import LAYOUTS, SimulatedReach, begun, daemon_in, trial_of, wanted
from tests.virsh_stand_in import URI, StandIn

PLAN = SequentialPlan(0.05, 3, 6)
FAR = {"default": 1.0, "pin": 1.3, "pin-numa": 2.5}
NEAR = {"default": 1.0, "pin": 2.5, "pin-numa": 2.501}


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = daemon_in(tmp_path / "daemon")
    monkeypatch.setenv("PATH", f"{found.bin}:/usr/bin:/bin")
    monkeypatch.setattr(guest, "_BETWEEN_S", 0.01)
    monkeypatch.setattr(guest, "DAEMON_S", 0.2)
    monkeypatch.setattr(bench_runner, "IDLE_S", 0.0)
    return found


def runs_of(head: Head, journal: JournalFile) -> list[Run]:
    state = journal.known().state
    steps = sorted(steps_of(head, state.looks), key=lambda one: LAYOUTS.index(one.variant))
    return [
        read_run(next(Path(head.results).glob(f"*/{state.outcomes[one.number].run}")))
        for one in steps
        if one.number in state.measured
    ]


class Sequence:
    """A sequential trial of the stand-in's domain."""

    def __init__(self, tmp_path: Path, daemon: StandIn, effects: Mapping[str, float]) -> None:
        self.root = tmp_path / "state"
        self.reach = SimulatedReach(daemon, effects)
        asked = wanted(tmp_path / "results", boots=PLAN.rounds, sequence=PLAN)
        self.head, self.journal = begun(self.root, asked)

    def run(self, killed: int | None = None) -> None:
        """Until it ends, or is interrupted before its so-manieth look."""

        def decide(kept: tuple[str, ...]) -> tuple[tuple[str, ...], SequenceEnd | None]:
            if killed is not None and len(self.journal.known().state.looks) == killed:
                raise KeyboardInterrupt
            runs = runs_of(self.head, self.journal)
            return look_at(runs, kept, Objective.HOST_BANDWIDTH)

        with self.journal.held() as lock:
            trial = trial_of(self.head, self.journal, self.root, self.reach, decide=decide)
            run_trial(trial, lock)

    def booted(self) -> list[tuple[int, str]]:
        state = self.journal.known().state
        steps = steps_of(self.head, state.looks)
        return [(one.round, one.variant) for one in steps if one.number in state.measured]

    def answer(self) -> SequentialAnswer:
        runs = runs_of(self.head, self.journal)
        machine = facts_of_runs("the host", runs, publications())
        found = conclude(runs, self.head.argument, URI, (), publications(), machine)
        answer = sequential_answer(found, self.head, self.journal.known().state)
        assert answer is not None
        return answer


def test_boots_go_where_they_decide_and_the_sentence_says_what_to_run_how_sure_and_undo(
    daemon: StandIn, tmp_path: Path
) -> None:
    sequence = Sequence(tmp_path, daemon, NEAR)
    sequence.run()
    booted, answer = sequence.booted(), sequence.answer()
    assert answer.look.ended is SequenceEnd.DECIDED
    assert answer.look.kept == ("pin", "pin-numa")
    of = {name: sum(layout == name for _, layout in booted) for name in LAYOUTS}
    assert of["default"] < of["pin"] == of["pin-numa"] == answer.look.rounds
    assert daemon.definition() == ORIGINAL
    for part in ("Run pin", "5 % of trials", "homenode apply", "homenode restore"):
        assert part in answer.sentence
    assert "\n" not in answer.sentence


def test_compare_and_recommend_say_of_its_runs_what_it_said(
    daemon: StandIn, tmp_path: Path
) -> None:
    sequence = Sequence(tmp_path, daemon, FAR)
    sequence.run()
    answer = sequence.answer()
    runs = runs_of(sequence.head, sequence.journal)
    assert {run.head.sequence for run in runs} == {PLAN}
    (found,) = decide_for_machines(
        Evidence(publications(), tuple(runs)), {}, (Objective.HOST_BANDWIDTH,)
    )
    theirs, own = (
        (one.choice, one.layout, one.also, one.avoid, one.level) for one in (found, answer.verdict)
    )
    assert theirs == own
    chosen = alternatives_of([("a", runs)])
    outcomes = {
        one.alternative: one.outcome
        for one in compare(chosen, Objective.HOST_BANDWIDTH).effects
        if one.primary
    }
    assert outcomes["pin-numa, strict"] is Outcome.BETTER
    assert set(found.avoid) == {one.label for one in chosen if one.switches.name != "pin-numa"}


def test_after_a_kill_it_goes_on_with_the_same_decisions(daemon: StandIn, tmp_path: Path) -> None:
    whole = Sequence(tmp_path / "whole", daemon, NEAR)
    whole.run()
    for killed in (1, 2):
        other = Sequence(tmp_path / f"killed-{killed}", daemon, NEAR)
        with pytest.raises(KeyboardInterrupt):
            other.run(killed)
        assert daemon.definition() == ORIGINAL
        before = other.journal.known().state.looks
        assert len(before) == killed
        booted = other.booted()
        other.run()
        assert other.booted()[: len(booted)] == booted
        assert other.journal.known().state.looks[:killed] == before
        assert other.answer().look.ended is SequenceEnd.DECIDED
