"""What marks a run: others on its CPUs, a control that moves, a machine that changes."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.measure.experiment import Progress
from homenode.measure.results.model import Origin
from tests import probe_documents
from tests.bench_machines import FakeMachine
from tests.measure.test_runner import ORDERS, ids, measured, of, run
from tests.probe_documents import answer

pytestmark = pytest.mark.usefixtures("no_waiting")


def test_a_busy_neighbour_marks_the_run(tmp_path: Path) -> None:
    def busy(argv: Sequence[str]) -> str:
        document = json.loads(answer(argv))
        document["contention"]["busy_neighbour"] = True
        return json.dumps(document)

    outcome = run(tmp_path, FakeMachine(answer=busy))
    assert all(one.disturbed for one in measured(outcome).samples)
    assert "bench-disturbed" in ids(outcome)
    assert any("other processes ran during" in reason for reason in measured(outcome).head.unusable)


def test_a_neighbour_who_came_and_went_marks_his_steps_alone(tmp_path: Path) -> None:
    seen = itertools.count()

    def busy(argv: Sequence[str]) -> str:
        here = argv[1] == "latency" and next(seen) == 0
        return probe_documents.latency("0", busy=here) if argv[1] == "latency" else answer(argv)

    outcome = run(tmp_path, FakeMachine(answer=busy))
    disturbed = [one.disturbed for one in of(outcome, "memory-latency", "dram")]
    assert disturbed == [True] * 5 + [False] * 5
    assert not any(one.disturbed for one in of(outcome, "cpu-single"))
    assert measured(outcome).head.unusable == ()
    assert "bench-disturbed" in ids(outcome)


def test_a_machine_that_is_busy_before_it_begins_is_marked(tmp_path: Path) -> None:
    outcome = run(tmp_path, FakeMachine(busy_ticks=40))
    assert "bench-busy" in ids(outcome)
    assert any("40% busy" in reason for reason in measured(outcome).head.unusable)


def test_a_control_that_moves_marks_the_run(tmp_path: Path) -> None:
    calls = itertools.count()

    def slowing(argv: Sequence[str]) -> str:
        if argv[1] == "throughput" and argv[-1] == "0":
            return probe_documents.throughput("0", 4600.0 if next(calls) < 2 else 4100.0)
        return answer(argv)

    outcome = run(tmp_path, FakeMachine(answer=slowing))
    assert "bench-control-moved" in ids(outcome)
    assert measured(outcome).head.unusable == ("one thread: -10.9% over round 2",)


def test_a_control_that_varies_as_much_by_itself_marks_nothing(tmp_path: Path) -> None:
    """On a machine that moves by itself, more rounds would mark every run."""
    rates = itertools.cycle([4600.0, 4400.0, 4750.0])

    def noisy(argv: Sequence[str]) -> str:
        if argv[1] == "throughput" and argv[-1] == "0":
            return probe_documents.throughput("0", next(rates), spread=0.15)
        return answer(argv)

    outcome = run(tmp_path, FakeMachine(answer=noisy), replace(ORDERS, repeats=6))
    assert "bench-control-moved" not in ids(outcome)
    assert measured(outcome).head.unusable == ()


def test_a_machine_that_changes_meanwhile_is_marked(tmp_path: Path) -> None:
    setting = "/sys/kernel/mm/transparent_hugepage/enabled"
    machine = FakeMachine(changed={setting: "[always] madvise never"})

    def change(progress: Progress) -> None:
        if progress.ended_count == 3:
            machine.changed[setting] = "always madvise [never]"

    outcome = run(tmp_path, machine, on_progress=change)
    assert "bench-changed" in ids(outcome)
    assert any("transparent huge pages changed" in one for one in measured(outcome).head.unusable)


def test_an_emulated_machine_is_never_measured(tmp_path: Path) -> None:
    def emulated(argv: Sequence[str]) -> str:
        document = json.loads(answer(argv))
        document["machine"]["emulated"] = True
        return json.dumps(document)

    assert measured(run(tmp_path, FakeMachine(answer=emulated))).head.origin is Origin.EMULATED
    stated = replace(ORDERS, name="told", emulated=True)
    assert measured(run(tmp_path, orders=stated)).head.origin is Origin.EMULATED
    assert measured(run(tmp_path, orders=replace(ORDERS, name="y"))).head.origin is Origin.MEASURED


def test_where_nothing_tells_whether_a_machine_is_emulated_that_is_said(tmp_path: Path) -> None:
    def silent(argv: Sequence[str]) -> str:
        document = json.loads(answer(argv))
        document["machine"]["emulated"] = None
        return json.dumps(document)

    unknown = "whether QEMU emulates this machine's processor (TCG)"
    virtual = {"/proc/cpuinfo": "processor\t: 0\nvendor_id\t: A\nflags\t\t: hypervisor\n"}
    outcome = run(tmp_path, FakeMachine(answer=silent, changed=virtual))
    assert unknown in {gap.subject for gap in outcome.gaps}
    assert measured(outcome).head.origin is Origin.MEASURED
    stated = run(tmp_path, FakeMachine(changed=virtual), orders=replace(ORDERS, name="told"))
    assert unknown not in {gap.subject for gap in stated.gaps}
