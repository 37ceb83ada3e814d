"""homenode try as a user meets it: what it shows, refuses, asks, and ends with."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.cli import trial as trial_work
from homenode.cli import try_vm
from homenode.measure import runner as bench_runner
from homenode.measure.layouts import guest, prepare
from homenode.measure.layouts.journal import known_trials
from homenode.measure.layouts.runner import run_trial
from tests.apply_documents import NAME, ORIGINAL
from tests.command_line import Result, homenode
from tests.simulated_trial import SimulatedReach, daemon_in
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


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = daemon_in(tmp_path / "daemon")
    monkeypatch.setenv("PATH", f"{found.bin}:/usr/bin:/bin")
    monkeypatch.setattr(trial_work, "default_root", lambda: tmp_path / "state")
    monkeypatch.setattr(trial_work, "static_probe", lambda given: b"probe")
    monkeypatch.setattr(trial_work, "GuestReach", lambda *said: SimulatedReach(found, EFFECTS))
    monkeypatch.setattr(prepare, "is_emulated", lambda document: False)
    monkeypatch.setattr(guest, "_BETWEEN_S", 0.01)
    monkeypatch.setattr(guest, "DAEMON_S", 0.2)
    monkeypatch.setattr(bench_runner, "IDLE_S", 0.0)
    return found


def tried(tmp_path: Path, *words: str) -> Result:
    (tmp_path / "host.toml").write_text(TWO_NODES)
    where = ("--host", str(tmp_path / "host.toml"), "--results", str(tmp_path / "results"))
    return homenode("try", *words, *where, "--", NAME, env={"COLUMNS": "100"})


def test_a_dry_run_shows_what_is_wrong_the_plan_the_change_and_the_trial(
    daemon: StandIn, tmp_path: Path
) -> None:
    done = tried(tmp_path, "--dry-run", "--in-place")
    assert done.exit_code == 0, done.output
    places = [
        done.output.index(part)
        for part in ("(unpinned)", "layout pin", "to the definition", "first round:")
    ]
    assert places == sorted(places)
    assert done.output.count("expected ") <= 2 * try_vm.MOST_FINDINGS
    answer = json.loads(tried(tmp_path, "--dry-run", "--in-place", "--json").stdout)
    assert answer["format"] == "homenode.try/1"
    assert (answer["running"], answer["objective"]) == (False, "host-bandwidth")
    assert answer["lines_added"] > answer["lines_removed"] >= 0
    assert {"default", "pin-bound", "pin-numa"} <= set(answer["layouts"])
    assert known_trials(tmp_path / "state") == ()
    assert not any(line.startswith(("define", "start")) for line in daemon.commands())


def test_a_vm_that_runs_is_looked_at_and_not_measured(daemon: StandIn, tmp_path: Path) -> None:
    daemon.put("id", "7")
    assert tried(tmp_path, "--yes").exit_code == 2
    done = tried(tmp_path, "--dry-run")
    assert done.exit_code == 0, done.output
    assert "shut it down" in done.output
    assert "first round" not in done.output


def test_nothing_is_booted_without_consent(daemon: StandIn, tmp_path: Path) -> None:
    done = tried(tmp_path)
    assert done.exit_code == 2
    assert "--yes" in str(done.exception)
    assert tried(tmp_path, "--yes", "--within", "1m").exit_code == 2
    assert tried(tmp_path, "--json").exit_code == 2
    assert not any(line.startswith(("define", "start")) for line in daemon.commands())


def test_where_its_time_was_up_resume_with_more_time_goes_on_to_the_answer(
    daemon: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as slow:
        slow.setattr(
            trial_work,
            "run_trial",
            lambda trial, lock: run_trial(replace(trial, within_s=1e-3), lock),
        )
        words = ("--in-place", "--yes", "--layouts", "default,pin-numa", "--tests", "stream")
        first = tried(tmp_path, *words)
    assert "resume" in first.stdout.splitlines()[-2] + first.stdout.splitlines()[-1]
    assert "goes on" in first.stdout
    state = json.loads(homenode("trial", "status", "--json", "--", NAME).stdout)["trials"][0]
    assert [(one["rounds"], one["ended"]) for one in state["looks"]] == [(1, "time-up")]
    assert len(state["boots"]) == 2
    done = homenode("trial", "resume", "--within", "1h", "--", NAME)
    assert done.exit_code == 0, done.output
    assert "Run pin-numa for host-bandwidth" in done.stdout
    again = homenode("trial", "status", "--", NAME)
    assert "decided after 2 rounds" in again.stdout
    assert daemon.definition() == ORIGINAL


def test_a_host_whose_link_is_sick_is_repaired_first(daemon: StandIn, tmp_path: Path) -> None:
    words = ("--layouts", "default,pin", "--in-place", "--until", "decided", "--dry-run")
    done = homenode("trial", *words, "--host", "rtx5090-epyc7702", "--", NAME)
    assert done.exit_code == 1, done.output
    assert "nothing was booted" in done.output


def test_with_consent_it_ends_in_one_sentence_and_the_vm_is_as_it_was(
    daemon: StandIn, tmp_path: Path
) -> None:
    words = ("--in-place", "--yes", "--layouts", "default,pin-numa", "--tests", "stream")
    done = tried(tmp_path, *words)
    assert done.exit_code == 0, done.output
    (last,) = (line for line in done.stdout.splitlines() if line.startswith("Run "))
    assert last.startswith("Run pin-numa for host-bandwidth: ")
    assert f"homenode apply {UUID}" in last
    assert f"homenode restore {UUID}" in last
    assert daemon.definition() == ORIGINAL
    (trial,) = known_trials(tmp_path / "state")
    assert trial.state.looks[-1].ended == "decided"
