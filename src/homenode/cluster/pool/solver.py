"""Solver: linear programs in whole numbers, by CP-SAT of OR-tools (docs/decisions/0011).

The libraries belong to the extra `pool` and are loaded when they are needed.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from msgspec import Struct, field

from homenode.errors import UsageError

_LIBRARIES = "ortools numpy"


def optional_module(name: str, what: str, libraries: str = _LIBRARIES) -> Any:
    """A library of the extra. Raises UsageError that says how to install it."""
    try:
        return import_module(name)
    except ImportError:
        raise UsageError(
            f"{what}: expected the Python package {name.partition('.')[0]}, found none",
            hint=install_hint(libraries),
        ) from None


def install_hint(libraries: str = _LIBRARIES) -> str:
    """The command that installs the extra's libraries for the Python that runs this, as
    docs/install.md has it. homenode.pyz has no pip; it reads further libraries from a folder."""
    if "homenode_one_file" in sys.modules:  # packaging/one_file_main.py has imported it
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        folder = f"~/.local/share/homenode/{python}"
        return f"{python} -m pip install --target {folder} {libraries}"
    if sys.prefix == sys.base_prefix:
        return f"sudo {sys.executable} -m pip install --break-system-packages {libraries}"
    return f"{sys.executable} -m pip install {libraries}"


class LinearConstraint(Struct, frozen=True, kw_only=True):
    """low <= sum of coefficient x variable <= high; None = no limit on that side."""

    terms: tuple[tuple[int, int], ...]
    low: int | None
    high: int | None


class IntegerProgram(Struct):
    """Variables are whole numbers from 0 to their limit."""

    limits: list[int] = field(default_factory=list)
    rows: list[LinearConstraint] = field(default_factory=list)

    def variable(self, limit: int) -> int:
        self.limits.append(limit)
        return len(self.limits) - 1

    def at_most(self, terms: Sequence[tuple[int, int]], high: int) -> None:
        if terms:
            self.rows.append(LinearConstraint(terms=tuple(terms), low=None, high=high))

    def at_least(self, terms: Sequence[tuple[int, int]], low: int) -> None:
        self.rows.append(LinearConstraint(terms=tuple(terms), low=low, high=None))


class IntegerSolution(Struct, frozen=True, kw_only=True):
    """values: of each variable. gain: their sum. bound: no solution has more. seconds: run time."""

    values: tuple[int, ...]
    gain: int
    bound: float
    seconds: float


def solve(
    program: IntegerProgram,
    gains: Sequence[tuple[int, int]],
    seconds: float,
    hint: Sequence[int] | None = None,
) -> IntegerSolution | None:
    """The values with the most gain found in the time; None if none were found. gains: (variable,
    gain of 1). hint: values to begin with."""
    cp_model = optional_module("ortools.sat.python.cp_model", "pool pack")
    model: Any = cp_model.CpModel()
    variables = [model.new_int_var(0, limit, "") for limit in program.limits]
    for row in program.rows:
        total = sum(coefficient * variables[i] for i, coefficient in row.terms)
        if row.high is not None:
            model.add(total <= row.high)
        if row.low is not None:
            model.add(total >= row.low)
    model.maximize(sum(gain * variables[i] for i, gain in gains))
    for variable, value in zip(variables, hint or (), strict=False):
        model.add_hint(variable, value)
    found: Any = cp_model.CpSolver()
    found.parameters.max_time_in_seconds = max(0.5, seconds)
    found.parameters.num_workers = 8
    found.parameters.random_seed = 0
    status = found.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    values = tuple(int(found.value(variable)) for variable in variables)
    return IntegerSolution(
        values=values,
        gain=round(found.objective_value),
        bound=float(found.best_objective_bound),
        seconds=found.wall_time,
    )
