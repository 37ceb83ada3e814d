"""homenode trial as a user meets it: what it shows first, asks, and ends with."""

import random
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.cli import trial as trial_work
from homenode.decide.recommendation import decide_for_machines
from homenode.decide.switch_effects import _format_undecided_pair
from homenode.errors import NOT_KNOWN
from homenode.machine.topology import DomainMark
from homenode.measure import runner as bench_runner
from homenode.measure.trial import guest, prepare
from homenode.measure.trial.journal import list_trials
from homenode.measure.trial.runner import Trial, run_trial
from homenode.objective import Objective
from homenode.vm.sources import load_host
from tests.apply_documents import NAME, ORIGINAL
from tests.command_line import Result, be_host, homenode
from tests.simulated_runs import simulated_run
from tests.simulated_trial import SimulatedReach, daemon_in
from tests.small_hosts import pinned_domain
from tests.virsh_stand_in import UUID, StandIn

EFFECTS = {"default": 1.0, "pin": 2.0, "pin-numa": 4.0}
TWO_NODES = """
format = 1
name = "two-nodes"
packages = 2
cores_per_package = 2
llc_size = "8MiB"
memory_per_node = "8GiB"
distances = { other_package = 21 }
"""
QUICK = ("--in-place", "--layouts", "default,pin-numa", "--tests", "stream", "--quick")


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = daemon_in(tmp_path / "daemon")
    monkeypatch.setenv("PATH", f"{found.bin}:/usr/bin:/bin")
    monkeypatch.setattr(trial_work, "default_root", lambda: tmp_path / "state")
    (tmp_path / "host.toml").write_text(TWO_NODES)
    be_host(monkeypatch, str(tmp_path / "host.toml"))
    monkeypatch.setattr(trial_work, "read_static_probe", lambda given: b"probe")
    monkeypatch.setattr(trial_work, "GuestReach", lambda *said: SimulatedReach(found, EFFECTS))
    monkeypatch.setattr(prepare, "is_emulated", lambda document: False)
    monkeypatch.setattr(guest, "_BETWEEN_S", 0.01)
    monkeypatch.setattr(guest, "DAEMON_S", 0.2)
    monkeypatch.setattr(bench_runner, "IDLE_S", 0.0)
    return found


def tried(tmp_path: Path, *words: str) -> Result:
    results = str(tmp_path / "results")
    return homenode("trial", *words, "--results", results, "--", NAME, env={"COLUMNS": "100"})


def test_a_dry_run_shows_plans_findings_order_and_time(daemon: StandIn, tmp_path: Path) -> None:
    done = tried(tmp_path, "--dry-run", "--in-place", "--boots", "4")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0].startswith(f"{NAME} fits in 3 of 3 layouts: 12 boots of the VM itself, about ")
    places = [
        done.output.index(part)
        for part in ("host CPUs", "pin-numa", "(unpinned)", "round 1", "dry run: nothing")
    ]
    assert places == sorted(places)
    rounds = [line for line in lines if line.startswith("round ")]
    assert len(rounds) == 4 and all(line.count("pin-numa") == 1 for line in rounds)
    assert list_trials(tmp_path / "state") == ()
    assert daemon.definition() == ORIGINAL
    assert not any(line.startswith(("define", "start")) for line in daemon.commands())


def test_a_vm_that_keeps_its_place_is_named(
    daemon: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = replace(pinned_domain("1", name="kept", running=False), mark=DomainMark.OWN)
    host = replace(load_host(str(tmp_path / "host.toml")), domains=(kept,))
    monkeypatch.setattr("homenode.vm.host_sources._read_this_machine", lambda: host)
    done = tried(tmp_path, "--dry-run", "--in-place")
    assert "--ignore-domain kept" in done.output


def test_a_copy_is_booted_where_nothing_else_is_said(daemon: StandIn, tmp_path: Path) -> None:
    words = ("--dry-run", "--boots", "2", "--results", str(tmp_path), "--", NAME)
    done = homenode("trial", *words, env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == f"{NAME} fits in 3 of 3 layouts: 6 boots of a copy, about 21 min"
    assert [line for line in lines if line][-4:] == [
        "round 1  pin-numa, pin, default",
        "round 2  default, pin, pin-numa",
        f"copy     {NAME}-trial, with its own disks, NVRAM and UUID; {NAME} is not changed",
        "dry run: nothing was started",
    ]


def test_nothing_is_booted_without_consent(daemon: StandIn, tmp_path: Path) -> None:
    done = tried(tmp_path, *QUICK)
    assert done.exit_code == 2
    assert "--yes" in str(done.exception)
    assert not any(line.startswith(("define", "start")) for line in daemon.commands())


def test_with_consent_it_ends_in_one_sentence(daemon: StandIn, tmp_path: Path) -> None:
    done = tried(tmp_path, *QUICK, "--yes")
    assert done.exit_code == 0, done.output
    sentence, command, report = done.stdout.splitlines()[-3:]
    assert sentence.startswith(f"{NAME}: run pin-numa for memory-bandwidth: ")
    assert command.startswith(f"next    homenode apply {UUID}") and "pin-numa" in command
    assert report.startswith("report  ") and report.endswith("/report.html")
    assert daemon.definition() == ORIGINAL


def test_what_boots_undecided_pair_more_of_them_may(daemon: StandIn, tmp_path: Path) -> None:
    words = ("--in-place", "--layouts", "pin,default", "--tests", "cpu-single", "--quick")
    done = tried(tmp_path, *words, "--boots", "2", "--yes")
    assert done.exit_code == NOT_KNOWN
    sentence, command, _ = done.stdout.splitlines()[-3:]
    fact = "no result of it; the rule of auto chooses pin-numa"
    assert sentence == f"{NAME}: cannot tell for memory-bandwidth: {fact}"
    assert command == f"next    homenode trial resume {UUID} --boots 4"
    assert homenode("trial", "resume", "--boots", "2", "--", NAME).exit_code == 2
    done = homenode("trial", "resume", "--boots", "3", "--", NAME)
    assert done.exit_code == NOT_KNOWN, done.output
    (known,) = list_trials(tmp_path / "state")
    assert len(known.state.measured_boots) == 6 and known.state.ended
    assert done.stdout.splitlines()[-2].endswith("--boots 5")
    assert daemon.definition() == ORIGINAL


def test_layouts_that_boots_undecided_pair_apart_are_named_with_their_difference() -> None:
    rng, rate = random.Random(4), {"memory-bandwidth": ("bytes_per_s", 1e11)}
    runs = [simulated_run(one, rate, rng, between=0.2) for one in ("default", "pin")]
    (answer,) = decide_for_machines(runs, (Objective.MEMORY_BANDWIDTH,))
    named = (
        "(pin from default|default from pin) for memory-bandwidth: "
        "(pin|default) is [0-9.]+ ?(x|%).*, 3 boots each"
    )
    text = _format_undecided_pair(answer)
    assert re.fullmatch(named, text)
    compared = answer.split_results(answer.metrics[0])
    assert compared is not None
    chosen, (rival,) = compared
    assert f": {rival.alternative} is " in text
    assert ("slower" in text) == (rival.value < chosen.value)


def test_where_its_time_is_up_no_round_is_begun_and_resume_goes_on(
    daemon: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hurried(trial: Trial, lock: int) -> None:
        run_trial(replace(trial, within_s=1e-3), lock)

    with monkeypatch.context() as slow:
        slow.setattr(trial_work, "run_trial", hurried)
        done = tried(tmp_path, *QUICK, "--yes")
    (known,) = list_trials(tmp_path / "state")
    assert known.state.measured_boots == {0, 1}
    assert done.stdout.count("to be done") == 2, "a row for each layout"
    done = homenode("trial", "resume", "--within", "1h", "--", NAME)
    assert done.exit_code == 0, done.output
    assert f"{NAME}: run pin-numa for memory-bandwidth" in done.stdout
    (known,) = list_trials(tmp_path / "state")
    assert known.state.measured_boots == set(range(6))
