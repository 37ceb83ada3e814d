"""A study of bindings and a trial of layouts over the same effects give the same intervals."""

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from homenode.cli import bench, main
from homenode.cluster.slurm.arguments import StudyOptions
from homenode.cluster.slurm.study.directory import StudyDirectory, read_sources
from homenode.cluster.slurm.study.experiments import (
    Experiment,
    Mode,
    Study,
    experiments_for,
    script_of,
)
from homenode.cluster.slurm.study.report import study_report
from homenode.cluster.slurm.tools.slurm_nodes import ClusterNode
from homenode.decide.alternative import alternatives
from homenode.decide.compare import compare
from homenode.decide.comparison import Effect, Outcome
from homenode.measure import runner
from homenode.measure.results.store import load_runs
from homenode.measure.trial import guest
from homenode.measure.trial.runner import run_trial
from homenode.process import ProgramResult
from homenode.vm.sources import load_host
from tests import probe_documents
from tests.bench_machines import FakeMachine
from tests.simulated_trial import (
    HOST,
    SimulatedGuest,
    SimulatedReach,
    begun,
    daemon_in,
    trial_of,
    wanted,
)

LEVELS = (1.0, 0.93)
"""Of the first and the second layout or binding."""

DRIFT = (1.0, 1.04, 0.97, 1.02)
"""Of the rounds: what both meet alike."""

NOISE = ((1.002, 0.998, 1.001, 0.999), (0.997, 1.001, 1.003, 0.998))


def stream(argv: Sequence[str], which: int, number: int) -> str:
    """What homenode-probe prints: bandwidth of an alternative in a round."""
    document = json.loads(probe_documents.answer(list(argv)))
    for run in document["runs"]:
        for kernel in run["kernels"]:
            for place, sample in enumerate(kernel["raw"]):
                rate = 36e9 * LEVELS[which] * DRIFT[number] * NOISE[which][number]
                sample["bytes_per_s"] = rate * (1 + (place % 3 - 1) / 1000)
    return json.dumps(document)


class Guest(SimulatedGuest):
    """A boot whose bandwidth is that of its layout in its round."""

    place = (0, 0)

    def _bandwidth(self, argv: Sequence[str]) -> str:
        return stream(argv, *self.place)


class Reach(SimulatedReach):
    """Counts the boots of each layout: they are its rounds."""

    def __init__(self, daemon: object) -> None:
        super().__init__(daemon, {"default": 1.0, "pin": 1.0, "pin-numa": 1.0})  # type: ignore[arg-type]
        self._boots: dict[str, list[str]] = {}

    def machine(self, uuid: str) -> SimulatedGuest:
        found = super().machine(uuid)
        definition = self._daemon.definition()
        layout = "pin-numa" if b"<cell" in definition else "pin"
        boots = self._boots.setdefault(layout, [])
        if found._run_id not in boots:
            boots.append(found._run_id)
        made = Guest(self._daemon, found._run_id, 1.0, b"<cell" in definition)
        made.place = (("pin", "pin-numa").index(layout), boots.index(found._run_id))
        return made


def effect_of_trial(tmp_path: Path) -> Effect:
    daemon = daemon_in(tmp_path / "daemon")
    asked = wanted(tmp_path / "trial", boots=len(DRIFT), layouts=("pin", "pin-numa"))
    head, journal = begun(tmp_path / "state", asked)
    with journal.hold() as lock:
        run_trial(trial_of(head, journal, tmp_path / "state", Reach(daemon)), lock)
    runs = load_runs(tmp_path / "trial").runs
    found = alternatives(sorted(runs, key=lambda run: run.head.switches.name))
    return only(compare(found).effects)


class Node(FakeMachine):
    """A cluster node on which a job is bound to a NUMA node."""

    place = (0, 0)

    def run(
        self,
        argv: Sequence[str],
        timeout_s: float,
        input: str | None = None,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> ProgramResult:
        if tuple(argv[1:2]) == ("bandwidth",):
            return ProgramResult(tuple(argv), 0, stream(argv, *self.place), "")
        return super().run(argv, timeout_s, input, environment=environment)


def bench_words(one: Experiment, options: StudyOptions, directory: Path) -> list[str]:
    """The words of the command in a job's script, as bash makes them."""
    text = script_of(one, options, "abc")
    source = text[text.index('"$homenode" bench') : text.index(' >"$here/bench.txt"')]
    given = f"homenode=homenode experiment={one.id} task=0 attempt=5.0"
    given += f" results={shlex.quote(str(directory / 'results'))}"
    shown = subprocess.run(
        ["bash", "-c", f"{given}\nprintf '%s\\0' {source}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return shown.stdout.split("\0")[:-1]


def effect_of_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Effect:
    directory = tmp_path / "study"
    node = (ClusterNode("n1", "p", True, "idle", 16, 65536, 8),)
    options = StudyOptions(rounds=len(DRIFT), tests=("stream",), shapes=())
    planned = experiments_for(node, node, {"n1": load_host(HOST)}, options)
    assert len(planned) == 2 * len(DRIFT)
    owned = StudyDirectory(directory)
    owned.create(Study("abc", options, node, node, HOST, (), planned))
    owned.close()
    for one in planned:
        assert one.mode is Mode.EXCLUSIVE
        assert one.block is not None and one.numa is not None
        machine = Node(HOST)
        machine.place = (one.numa, one.block)
        monkeypatch.setattr(bench, "LocalMachine", lambda machine=machine: machine)
        monkeypatch.setattr(sys, "argv", bench_words(one, options, directory))
        with pytest.raises(SystemExit) as end:
            main.main()
        assert end.value.code in (None, 0, 1)
        attempt = directory / f"raw/{one.id}/task-0/5.0"
        attempt.mkdir(parents=True)
        (attempt / "done").touch()
    found = read_sources([directory])
    report = study_report("x", found)
    return only(effect for one in report.comparisons for effect in one.effects)


def only(effects: object) -> Effect:
    """The one that speaks for memory bandwidth."""
    (found,) = [
        one
        for one in effects  # type: ignore[attr-defined]
        if one.metric == "memory-bandwidth" and one.primary
    ]
    assert isinstance(found, Effect)
    return found


def test_a_study_and_a_trial_of_the_same_effects_give_the_same_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest, "_BETWEEN_S", 0.01)
    monkeypatch.setattr(guest, "DAEMON_S", 0.2)
    monkeypatch.setattr(runner, "IDLE_S", 0.0)
    study = effect_of_study(tmp_path, monkeypatch)
    monkeypatch.setenv("PATH", f"{tmp_path / 'daemon/bin'}:/usr/bin:/bin")
    trial = effect_of_trial(tmp_path)
    assert trial.boots == study.boots == (4, 4)
    assert trial.outcome is study.outcome is Outcome.WORSE
    for name in ("ratio", "low", "high", "p"):
        assert getattr(study, name) == pytest.approx(getattr(trial, name), rel=1e-12), name
    # The rounds drift by 7 %, and are blocks in both: the interval does not feel it.
    assert study.low is not None and study.high is not None
    assert study.high / study.low < 1.02
