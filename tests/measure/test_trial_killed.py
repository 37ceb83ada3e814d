"""Trials cut at random moments: the tool, the guest, libvirt, the connection. Nothing is lost."""

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from homenode.errors import HomenodeError, HostError
from homenode.measure.results.model import Run
from homenode.measure.results.store import read_run
from homenode.measure.trial import guest
from homenode.measure.trial.journal import EntryKind, TrialJournal, list_trials
from homenode.measure.trial.prepare import preflight
from homenode.measure.trial.runner import run_trial, schedule_steps
from homenode.vm.hypervisor.virsh import Virsh
from tests.apply_documents import NAME, ORIGINAL
from tests.simulated_trial import SimulatedReach, begun, host, trial_of, wanted
from tests.virsh_stand_in import URI, StandIn

CUTS = int(os.environ.get("HOMENODE_KILLS", "4"))
SEED = 7
LAYOUTS = ("default", "pin-numa")
KINDS = ("tool", "tool", "tool and virsh", "guest", "libvirt", "connection")
AWAY_S = 0.15
EFFECTS = {"default": 1.0, "pin": 1.0, "pin-numa": 1.5}


@pytest.fixture(autouse=True)
def patient(daemon: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest, "_BETWEEN_S", 0.02)
    monkeypatch.setattr(guest, "DAEMON_S", 60.0)


Keys = Counter[tuple[object, ...]]


def keys_of(run: Run) -> Keys:
    """What gives the samples of a run apart, and how often."""
    parts = ("metric", "variant", "number", "size_bytes", "node", "state")
    return Counter(tuple(getattr(one, part) for part in parts) for one in run.samples)


class Trials:
    """One trial after the other, each cut and continued until it is done."""

    def __init__(self, daemon: StandIn, directory: Path) -> None:
        self.daemon = daemon
        self.root = directory / "state"
        self.results = directory / "results"
        self.reach = SimulatedReach(daemon, EFFECTS)
        self.number = 0

    @property
    def id(self) -> str:
        return f"trial-{self.number}"

    @property
    def journal(self) -> TrialJournal:
        return TrialJournal(self.root, self.id)

    def work(self) -> None:
        """Begin the present trial, or continue it."""
        journal = self.journal
        with journal.hold() as lock:
            if journal.load().head is None:
                asked = wanted(self.results, layouts=LAYOUTS, boots=1, id=self.id)
                head, journal = begun(self.root, asked)
            else:
                found = journal.load().head
                assert found is not None
                head = found
            run_trial(trial_of(head, journal, self.root, self.reach), lock)

    def is_done(self) -> bool:
        head, state = self.journal.load().head, self.journal.load().state
        return head is not None and len(state.measured_boots) == len(schedule_steps(head))

    def in_child(self) -> int:
        child = os.fork()
        if child == 0:
            status = 3
            try:
                self.work()
                status = 0
            except HomenodeError:
                status = 4  # libvirt was away too long, or another is at work
            finally:
                os._exit(status)
        return child


def cut(trials: Trials, kind: str, child: int) -> None:
    state = trials.daemon.state
    if kind.startswith("tool"):
        listed = Path(f"/proc/{child}/task/{child}/children")
        others = listed.read_text().split() if kind != "tool" and listed.exists() else []
        for victim in (*map(int, others), child):
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:
                continue
    elif kind == "guest":
        (state / "id").unlink(missing_ok=True)
    else:
        switch = state / ("down" if kind == "libvirt" else "unreachable")
        switch.touch()
        time.sleep(AWAY_S)
        switch.unlink()


def finish(trials: Trials) -> None:
    """To the end, past a virsh that was left behind."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            trials.work()
        except HostError as error:
            assert "another homenode is running" in error.message
            time.sleep(0.02)
        else:  # all may be measured, and what the other left not yet undone
            if trials.is_done():
                return
    pytest.fail("it never came to its end")


def check_done(trials: Trials, samples: dict[str, Keys]) -> None:
    """The original is back, and each boot is there once and whole."""
    known = trials.journal.load()
    assert known.head is not None
    assert known.state.ended
    assert not known.state.to_undo
    assert trials.daemon.definition() == ORIGINAL
    assert not (trials.daemon.state / "id").exists()
    for step in schedule_steps(known.head):
        of_step = [entry for entry in known.entries if entry.number == step.number]
        (said,) = (entry for entry in of_step if entry.what == EntryKind.MEASURED)
        (directory,) = trials.results.glob(f"*/{said.run}")
        run = read_run(directory)
        assert len(run.samples) == said.samples
        assert keys_of(run) == samples[step.variant]
        assert {sample.boot for sample in run.samples} == {0}
        assert len(run.head.boots) == 1, "no boot's samples are mixed with another's"


def test_cuts_at_random_lose_and_double_nothing(daemon: StandIn, tmp_path: Path) -> None:
    choose = random.Random(SEED)
    trials = Trials(daemon, tmp_path)
    asked = wanted(trials.results, layouts=LAYOUTS)
    documents = preflight(Virsh(URI), NAME, asked, host(), trials.root)
    tunings = (one.tuning for one in documents.fitted if one.tuning is not None)
    known = {ORIGINAL} | {tuning.document.rstrip(b"\n") + b"\n" for tuning in tunings}
    started = time.monotonic()
    trials.work()  # the measure of all others
    longest_s = time.monotonic() - started
    samples = {
        layout: keys_of(read_run(next(trials.results.glob(f"*/{trials.id}-{layout}-1"))))
        for layout in LAYOUTS
    }
    assert all(samples.values())
    check_done(trials, samples)
    trials.number += 1
    cuts: Counter[str] = Counter()
    late = 0
    while cuts.total() < CUTS:
        kind = choose.choice(KINDS)
        child = trials.in_child()
        time.sleep(choose.uniform(0, longest_s))
        ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        late += ended
        assert late < 4 * CUTS, f"only {cuts.total()} trials were cut before their end"
        # The machine is shared: what a trial takes is learnt as we go, so that one in five is late.
        longest_s *= 0.9 if ended else 1.03
        cut(trials, kind, child)
        _, how = os.waitpid(child, 0)
        assert not (os.WIFEXITED(how) and os.WEXITSTATUS(how) == 3), "it failed by itself"
        cuts[kind] += not ended
        assert daemon.definition() in known, f"half-written after {kind}"
        left = trials.journal.load()
        if daemon.definition() != ORIGINAL and left.head is not None:
            assert left.state.to_undo, "the journal says that there is something to undo"
        if trials.is_done() or choose.random() < 0.15:
            finish(trials)
            check_done(trials, samples)
            trials.number += 1
    finish(trials)
    check_done(trials, samples)
    aside = sum(1 for _ in trials.root.glob("trials/*/set-aside/*"))
    print(f"{dict(cuts)}, {late} too late; {trials.number} trials; {aside} boots set aside")
    assert len(list_trials(trials.root)) >= 2
