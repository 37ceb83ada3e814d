"""What is run in which order, and the loop of every experiment."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homenode.errors import NoAnswerError, UsageError
from homenode.measure.experiment import (
    AT_ONCE,
    UNSETTLED,
    Pace,
    Progress,
    TaskState,
    TaskStatus,
    WaitPolicy,
    find_moved_rounds,
    list_remaining,
    order_by_seed,
    run_tasks,
    schedule,
)
from homenode.measure.model import PROBE, SuiteGroup, SuiteOptions
from homenode.measure.suite import build_suite
from tests.small_hosts import DeviceSpec, even_host

EVERYTHING = frozenset({PROBE, "numactl", "nvbandwidth", "all_reduce_perf"})
GPUS = (DeviceSpec("0000:19:00.0"), DeviceSpec("0000:9b:00.0", node=1, root=1))
NAMES = st.lists(st.text("abc", min_size=1, max_size=4), unique=True, max_size=8)


@given(NAMES, st.integers(1, 6), st.integers(0, 2**64))
def test_every_round_holds_each_test_once(names: list[str], rounds: int, seed: int) -> None:
    made = schedule(names, ["control!"], rounds, seed)
    for number in range(rounds):
        here = [step.variant for step in made.tasks if step.round == number]
        assert sorted(here[:-1]) == sorted(names)
        assert here[-1] == "control!"
    assert [step.number for step in made.tasks] == list(range(len(made.tasks)))
    assert schedule(names, ["control!"], rounds, seed) == made


def test_controls_stand_on_both_sides_of_every_round() -> None:
    steps = schedule(["a", "b"], ["c", "d"], 2, seed=7).tasks
    assert [step.variant for step in steps if step.is_control] == ["c", "d"] * 3
    assert [step.variant for step in steps[:2]] == ["c", "d"]


def test_orders_differ_between_rounds_and_between_seeds() -> None:
    names = [f"test {n}" for n in range(8)]
    orders = {order_by_seed(names, seed, number) for seed in range(5) for number in range(5)}
    assert len(orders) == 25


def test_no_test_is_always_first() -> None:
    firsts = [order_by_seed(["a", "b", "c"], 1, number)[0] for number in range(300)]
    assert all(70 < firsts.count(name) < 130 for name in "abc")


def test_what_is_left_of_a_run_that_was_cut_short() -> None:
    made = schedule(["a", "b"], ["c"], 2, seed=1)
    done = {(step.round, step.variant) for step in made.tasks[:3]}
    assert list_remaining(made, done) == made.tasks[3:]
    assert list_remaining(made, set()) == made.tasks
    with pytest.raises(UsageError, match="expected a run of this schedule, found x of round 0"):
        list_remaining(made, {(0, "x")})


def test_a_round_whose_control_moved_is_reported() -> None:
    made = schedule(["a"], ["c"], 3, seed=1)
    values = {(-1, "c"): 100.0, (0, "c"): 101.0, (1, "c"): 90.0, (2, "c"): 90.0}
    assert [(at, control) for at, control, _ in find_moved_rounds(made, values)] == [(1, "c")]
    assert find_moved_rounds(made, values)[0][2] == pytest.approx(90 / 101)
    assert find_moved_rounds(made, {(-1, "c"): 100.0}) == ()


@pytest.mark.parametrize(
    ("names", "rounds", "says"),
    [(["a", "a"], 1, "found a twice"), (["a"], 0, "out of range"), (["a"], 10**6, "out of range")],
)
def test_a_bad_schedule_is_refused(names: list[str], rounds: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        schedule(names, [], rounds, seed=1)


def test_a_machine_without_gpus_gets_processors_and_memory() -> None:
    suite = build_suite(even_host(), EVERYTHING, SuiteOptions())
    assert {test.group for test in suite.tests} == {
        *(SuiteGroup.CPU_SINGLE, SuiteGroup.CPU_ALL, SuiteGroup.MEMORY_BANDWIDTH, SuiteGroup.SMT),
        *(SuiteGroup.MEMORY_LATENCY, SuiteGroup.CORE_TO_CORE, SuiteGroup.PLACEMENT),
    }
    assert {gap.reason for gap in suite.omitted} == {"no GPU"}
    assert len({test.id for test in suite.tests}) == len(suite.tests)


def test_one_node_and_one_gpu_get_no_matrix_and_no_collectives() -> None:
    host = even_host(packages=1, devices=GPUS[:1])
    suite = build_suite(host, EVERYTHING, SuiteOptions())
    assert not [test for test in suite.tests if "node" in test.id and "from" not in test.id]
    assert ("nccl", "one GPU alone") in [(gap.subject, gap.reason) for gap in suite.omitted]


def test_cores_without_siblings_and_a_single_pu_are_said() -> None:
    one = build_suite(even_host(1, cores_per_llc=1, threads=1), EVERYTHING, SuiteOptions())
    reasons = {gap.subject: gap.reason for gap in one.omitted}
    assert reasons["smt"] == "no core shows siblings"
    assert reasons["core-to-core"] == "one CPU alone"


def test_pus_that_the_cgroup_keeps_from_us_are_not_used() -> None:
    options = SuiteOptions((SuiteGroup.CPU_ALL,))
    suite = build_suite(even_host(disallowed="0-3"), EVERYTHING, options)
    assert suite.tests[0].argv[-1] == "4-15"


def test_nothing_to_measure_is_refused_with_its_reasons() -> None:
    with pytest.raises(UsageError) as refused:
        build_suite(even_host(), EVERYTHING, SuiteOptions((SuiteGroup.NCCL,)))
    assert "no GPU" in str(refused.value)
    with pytest.raises(UsageError, match="can run no test of"):
        build_suite(even_host(), frozenset(), SuiteOptions())


SOON = WaitPolicy(poll_s=0.001, blocked_s=0.02)


@dataclass
class Place:
    """An executor whose tasks end as the test says."""

    # the states that a task comes to, one for each time that it is begun
    ends: dict[str, list[TaskState]]
    at_once: int = 1  # how many are begun together
    silent: int = 0  # looks that are not answered
    states: dict[str, TaskState] = field(default_factory=dict)
    begun: list[str] = field(default_factory=list)
    needs_somebody: bool = False

    def poll(self) -> Progress:
        if self.silent:
            self.silent -= 1
            raise NoAnswerError("squeue: Connection refused")
        states = {name: self.states.get(name, TaskState.WAITING) for name in self.ends}
        waits = {name for name in self.states if self.needs_somebody}
        tasks = (TaskStatus(n, 0, s, needs_somebody=n in waits) for n, s in states.items())
        return Progress(tuple(tasks))

    def retry(self, tasks: Sequence[TaskStatus]) -> None:
        for task in tasks:
            assert task.state not in UNSETTLED
            del self.states[task.id]

    def start(self, tasks: Sequence[TaskStatus]) -> None:
        for task in tasks[: self.at_once]:
            self.begun.append(task.id)
            self.states[task.id] = self.ends[task.id].pop(0)


DONE, FAILED, PENDING = TaskState.DONE, TaskState.FAILED, TaskState.PENDING


@pytest.mark.parametrize("at_once", [1, 5])
def test_every_task_is_begun_once_and_a_failed_one_costs_no_other(at_once: int) -> None:
    place = Place({"a": [DONE], "b": [FAILED], "c": [DONE]}, at_once)
    seen: list[Progress] = []
    ended = run_tasks(place, seen.append)
    assert place.begun == ["a", "b", "c"]
    assert [one.state for one in ended.tasks] == [DONE, FAILED, DONE]
    assert seen[-1] == ended
    assert [progress.ended_count for progress in seen] == ([0, 1, 2, 3] if at_once == 1 else [0, 3])


def test_what_failed_before_is_tried_again_once_where_that_is_asked_for() -> None:
    place = Place({"a": [FAILED, FAILED, DONE], "b": [DONE]})
    run_tasks(place, lambda progress: None)
    assert run_tasks(place, lambda progress: None).count(FAILED) == 1
    assert place.begun == ["a", "b"]
    assert run_tasks(place, lambda progress: None, retry=True).count(FAILED) == 1
    assert place.begun == ["a", "b", "a"]
    assert run_tasks(place, lambda progress: None, retry=True).count(DONE) == 2


def test_a_queue_that_is_silent_for_a_while_is_waited_for() -> None:
    place = Place({"a": [FAILED, DONE]}, states={"a": FAILED}, silent=3)
    place.ends["a"].pop(0)
    seen: list[Progress] = []
    ended = run_tasks(place, seen.append, WaitPolicy(poll_s=0.001, blocked_s=60.0), retry=True)
    assert ended.count(DONE) == 1, "what failed before is still taken again"
    assert [one.silent_s > 0 for one in seen] == [True] * 3 + [False] * 2


def test_a_queue_that_stays_silent_ends_it() -> None:
    place = Place({"a": [DONE]}, silent=10**9)
    with pytest.raises(NoAnswerError):
        run_tasks(place, lambda progress: None, SOON)


def test_what_waits_for_somebody_is_waited_for_no_longer_than_patience_lasts() -> None:
    place = Place({"a": [PENDING], "b": [DONE]}, needs_somebody=True)
    ended = run_tasks(place, lambda progress: None, SOON)
    assert [one.state for one in ended.tasks] == [PENDING, DONE]
    assert ended.is_blocked


def test_an_interrupt_is_nobodys_failure() -> None:
    def stop(progress: Progress) -> None:
        if progress.ended_count:
            raise KeyboardInterrupt

    place = Place({"a": [DONE], "b": [DONE]})
    with pytest.raises(KeyboardInterrupt):
        run_tasks(place, stop, AT_ONCE)
    assert place.begun == ["a"]


def test_the_time_left_is_learnt_from_what_was_taken() -> None:
    pace = Pace()
    assert pace.seconds_for(["pin"]) is None
    assert pace.seconds_for([]) == 0.0
    pace.took("pin", 60.0)
    pace.took("default", 30.0)
    assert pace.seconds_for(["pin", "default"]) == 90.0
    assert pace.seconds_for(["pin-numa"]) == 45.0, "as the others on average"
