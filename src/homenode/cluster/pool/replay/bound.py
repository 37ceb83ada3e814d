"""Bound: an upper bound on what any policy places, by linear programming (OR-tools' GLOP)."""

from collections.abc import Sequence
from typing import Any

from homenode.cluster.pool.solver import optional_module


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
    module = optional_module("ortools.linear_solver.pywraplp", "pool simulate")
    solver: Any = module.Solver.CreateSolver("GLOP")
    rows = [solver.RowConstraint(-solver.infinity(), limit, "") for limit in limits]
    objective = solver.Objective()
    for own in entries:
        variable = solver.NumVar(0.0, 1.0, "")
        objective.SetCoefficient(variable, 1.0)
        for row, coefficient in own:
            rows[row].SetCoefficient(variable, coefficient)
    objective.SetMaximization()
    solver.Solve()
    return float(objective.Value())
