"""Bound rounds: one bench after another, each bound to one NUMA node, on any machine. [I/O]

The executor of `bench --until decided`: a task is one run, placed anew, on this machine, another
host or in a Kubernetes job. Its looks are kept in <results>/<NAME>.rounds; what is measured is
known by the runs themselves.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from homenode.errors import HomenodeError, UsageError
from homenode.measure.access.machine import Machine
from homenode.measure.experiment import ExperimentJournal
from homenode.measure.orders import BenchOptions
from homenode.measure.progress import Pace, Progress, TaskState, TaskStatus
from homenode.measure.results.model import Run, SequentialPlan
from homenode.measure.results.store import finished, run_named
from homenode.measure.runner import run_bench
from homenode.measure.schedule import ScheduledTask
from homenode.measure.sequence import RoundLook, sequential_tasks
from homenode.objective import Objective

_BOUND = "bound to node"


class RoundsHead(Struct, frozen=True, kw_only=True):
    """What was ordered. nodes: to bind to."""

    plan: SequentialPlan
    nodes: tuple[int, ...]
    seed: int
    objective: Objective


class BoundRounds:
    """See SequentialExecutor. on_step: called before each step of a run; notify: gets a line about
    each run that failed."""

    def __init__(
        self,
        machine: Machine,
        orders: BenchOptions,
        results: Path,
        on_step: Callable[[Progress], None],
        notify: Callable[[str], None],
    ) -> None:
        self._machine, self._orders, self._results = machine, orders, results
        self._on_step, self._notify = on_step, notify
        self._failed: dict[str, str] = {}
        self._pace = Pace()
        self.journal = ExperimentJournal(
            results / f"{orders.name}.rounds", "bench-rounds", RoundsHead, RoundLook
        )

    def ordered(self, now: RoundsHead) -> None:
        """Begin, or go on with, what is ordered. Raises UsageError where something else was."""
        if not self.journal.has_journal:
            self.journal.begin_with(now)
        elif (known := self.journal.contents()[0]) != now:
            raise UsageError(
                f"{self.journal.path}: expected the rounds that were begun, found others",
                hint=f"nodes {known.nodes}, {known.objective}: give the same, or another NAME",
            )

    def runs(self) -> list[Run]:
        """Those that are finished."""
        found = (run_named(self._results, name) for name in self._steps())
        made = (None if folder is None else finished(folder) for folder in found)
        return [run for run in made if run is not None]

    def _steps(self) -> dict[str, ScheduledTask]:
        head, looks = self.journal.contents()
        tasks = sequential_tasks(self.variants(), head.seed, looks)
        return {f"{self._orders.name}-{one.round + 1}-{_node(one)}": one for one in tasks}

    def look(self) -> Progress:
        steps = self._steps()
        done = {run.head.name for run in self.runs()}
        states = []
        for name in steps:
            state = TaskState.DONE if name in done else TaskState.WAITING
            state = TaskState.FAILED if name in self._failed else state
            states.append(TaskStatus(name, 0, state, reason=self._failed.get(name, "")))
        left = [one.id for one in states if one.state is TaskState.WAITING]
        seconds = self._pace.left(steps[name].variant for name in left)
        return Progress(tuple(states), now=next(iter(left), ""), seconds_left=seconds)

    def variants(self) -> tuple[str, ...]:
        return tuple(f"{_BOUND} {node}" for node in self.journal.contents()[0].nodes)

    def place_of(self, task: TaskStatus) -> tuple[int, str]:
        step = self._steps()[task.id]
        return step.round, step.variant

    def looks(self) -> Sequence[RoundLook]:
        return self.journal.contents()[1]

    def add_look(self, look: RoundLook) -> None:
        self.journal.add(look)

    def again(self, tasks: Sequence[TaskStatus]) -> None:
        for task in tasks:
            self._failed.pop(task.id, None)

    def begin(self, tasks: Sequence[TaskStatus]) -> None:
        name = tasks[0].id
        step = self._steps()[name]
        orders = replace(
            self._orders,
            name=name,
            nodes=(_node(step),),
            arrangement=step.variant,
            boot=name,
            experiment=self._orders.name,
            block=step.round,
            sequence=self.journal.contents()[0].plan,
        )
        there = run_named(self._results, name) is not None
        try:
            made = run_bench(self._machine, orders, self._results, self._on_step, resume=there).run
            if made is None or not made.samples:
                self._failed[name] = "no test gave a figure"
            else:
                self._pace.took(step.variant, (made.head.ended_s or 0) - (made.head.started_s or 0))
        except HomenodeError as error:
            self._failed[name] = error.message
        if name in self._failed:
            self._notify(f"{name}: {self._failed[name]}")


def _node(step: ScheduledTask) -> int:
    return int(step.variant.rpartition(" ")[2])
