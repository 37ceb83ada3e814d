"""Bound: an upper bound on what any policy places, by linear programming (OR-tools' GLOP)."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from homenode.cluster.pool.replay.trace import MILLI, Task, TraceNode
from homenode.cluster.pool.solver import optional_module

Column = tuple[float, list[tuple[int, float]], float]
"""Gain, (row, coefficient) and largest value of a variable from 0."""


def most_gain(columns: Sequence[Column], limits: Sequence[float]) -> float:
    """The most that variables can gain together while no row exceeds its limit."""
    if not columns:
        return 0.0
    module = optional_module("ortools.linear_solver.pywraplp", "pool simulate")
    solver: Any = module.Solver.CreateSolver("GLOP")
    rows = [solver.RowConstraint(-solver.infinity(), limit, "") for limit in limits]
    objective = solver.Objective()
    for gain, entries, most in columns:
        variable = solver.NumVar(0.0, most, "")
        objective.SetCoefficient(variable, gain)
        for row, coefficient in entries:
            rows[row].SetCoefficient(variable, coefficient)
    objective.SetMaximization()
    solver.Solve()
    return float(objective.Value())


def most_allocated(nodes: Sequence[TraceNode], arrived: Sequence[Task]) -> float:
    """The largest share of the GPUs that these tasks could have at once, however they are chosen
    and divided among machines of a kind."""
    kinds = list(Counter(nodes).items())
    limits: list[float] = []
    for node, count in kinds:
        limits += [
            node.cpu_milli / MILLI * count,
            node.memory_mib / MILLI * count,
            node.gpus * count,
        ]
    columns: list[Column] = []
    for task, count in Counter(arrived).items():
        row = len(limits)
        limits.append(count)
        for number, (node, _) in enumerate(kinds):
            holds = (
                task.cpu_milli <= node.cpu_milli
                and task.memory_mib <= node.memory_mib
                and task.gpus <= node.gpus
                and (not task.models or node.model in task.models)
            )
            if holds:
                gpus = task.total_gpu_milli / MILLI
                entries = [
                    (3 * number, task.cpu_milli / MILLI),
                    (3 * number + 1, task.memory_mib / MILLI),
                    (3 * number + 2, gpus),
                    (row, 1.0),
                ]
                columns.append((gpus, entries, float(count)))
    capacity = sum(node.gpus for node in nodes)
    return most_gain(columns, limits) / max(1, capacity)


def most_accepted(intervals: Sequence[tuple[float, float, int]], gpus: int) -> float:
    """The most VMs of these (arrival, departure, GPUs) that so many GPUs could serve, with all of
    the future known and every GPU as good as another."""
    limits: list[float] = []
    entries: list[list[tuple[int, float]]] = [[] for _ in intervals]
    order = sorted(range(len(intervals)), key=lambda i: intervals[i][0])
    running: list[int] = []
    for i in order:
        now = intervals[i][0]
        running = [j for j in running if intervals[j][1] > now]
        running.append(i)
        for j in running:
            entries[j].append((len(limits), float(intervals[j][2])))
        limits.append(float(gpus))
    return most_gain([(1.0, one, 1.0) for one in entries], limits)
