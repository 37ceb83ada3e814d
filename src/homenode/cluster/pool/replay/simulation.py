"""Simulation: several policies over several drawn orders, with intervals, marked as simulated."""

from collections.abc import Callable, Sequence
from itertools import product
from statistics import mean, stdev
from typing import Any

from msgspec import Struct

from homenode.cluster.pool.flavour import Flavour
from homenode.cluster.pool.model import Pool
from homenode.cluster.pool.planner import Planner
from homenode.cluster.pool.replay.cells import CellPolicy, replay_cells
from homenode.cluster.pool.replay.hosts import HostPolicy, drawn_load, replay_hosts
from homenode.cluster.pool.replay.tasks import TaskPolicy, replay_tasks
from homenode.cluster.pool.replay.trace import CellVm, Replay, Task, TraceNode, TwoNodeServer
from homenode.cluster.pool.solver import optional_module
from homenode.decide.distributions import t_quantile
from homenode.errors import UsageError

Progress = Callable[[int, int], None]


class Figure(Struct, frozen=True, kw_only=True):
    """A figure over the orders: mean, and the interval of 95 % of the mean; None of one order."""

    name: str
    mean: float
    low: float | None
    high: float | None


class PolicyOutcome(Struct, frozen=True, kw_only=True):
    """What a policy came to. curve: of the first order."""

    policy: str
    figures: tuple[Figure, ...]
    curve: tuple[tuple[float, float], ...]


class Simulation(Struct, frozen=True, kw_only=True):
    """A simulation. what: the load. simulated: always true: arrivals were drawn or replayed, no VM
    ran. bound: a bound on every policy's figure of that name; None where it is not known."""

    what: str
    simulated: bool
    orders: int
    outcomes: tuple[PolicyOutcome, ...]
    bound: Figure | None
    curve_of: tuple[str, str]


def figure(name: str, values: Sequence[float]) -> Figure:
    """The mean with its interval over orders."""
    middle = mean(values)
    if len(values) < 2:
        return Figure(name=name, mean=middle, low=None, high=None)
    half = t_quantile(0.95, len(values) - 1) * stdev(values) / len(values) ** 0.5
    return Figure(name=name, mean=middle, low=middle - half, high=middle + half)


def chosen_policies(asked: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """The policies asked for, all where none is. Raises UsageError."""
    strange = [name for name in asked if name not in known]
    if strange:
        raise UsageError(f"--policy: expected some of {', '.join(known)}, found {strange[0]!r}")
    return tuple(dict.fromkeys(asked)) or tuple(known)


def _simulated(
    what: str,
    policies: Sequence[str],
    orders: int,
    one: Callable[[str, int], Replay],
    progress: Progress,
    curve_of: tuple[str, str],
    bound: Figure | None = None,
) -> Simulation:
    """one: the replay of an order under a policy."""
    runs: dict[str, list[Replay]] = {name: [] for name in policies}
    total = orders * len(policies)
    for number, (order, policy) in enumerate(product(range(orders), policies), start=1):
        runs[policy].append(one(policy, order))
        progress(number, total)
    outcomes = tuple(
        PolicyOutcome(
            policy=policy,
            figures=tuple(
                figure(name, [run.figures[name] for run in found]) for name in found[0].figures
            ),
            curve=found[0].curve,
        )
        for policy, found in runs.items()
    )
    return Simulation(
        what=what,
        simulated=True,
        orders=orders,
        outcomes=outcomes,
        bound=bound,
        curve_of=curve_of,
    )


def simulate_tasks(
    what: str,
    nodes: Sequence[TraceNode],
    tasks: Sequence[Task],
    policies: Sequence[str],
    orders: int,
    progress: Progress,
) -> Simulation:
    """Tasks with parts of GPUs: what share of the GPUs is allocated once 130 % has arrived."""

    def one(policy: str, seed: int) -> Replay:
        return replay_tasks(nodes, tasks, TaskPolicy(policy), seed)

    names = chosen_policies(policies, tuple(TaskPolicy))
    curve_of = ("share of the GPUs that has arrived", "share allocated")
    return _simulated(what, names, orders, one, progress, curve_of)


def simulate_cells(
    what: str,
    servers: Sequence[TwoNodeServer],
    vms: Sequence[CellVm],
    policies: Sequence[str],
    orders: int,
    progress: Progress,
) -> Simulation:
    """VMs of one or two cells: the first order is the one given, the others are drawn."""
    numpy = optional_module("numpy", "pool simulate")

    def one(policy: str, seed: int) -> Replay:
        order = list(vms)
        if seed:
            order = [vms[i] for i in numpy.random.default_rng(seed).permutation(len(vms))]
        return replay_cells(servers, order, CellPolicy(policy))

    names = chosen_policies(policies, tuple(CellPolicy))
    return _simulated(what, names, orders, one, progress, ("VMs arrived", "VMs placed"))


def simulate_hosts(
    what: str,
    pool: Pool,
    flavours: Sequence[Flavour],
    weights: Sequence[float],
    policies: Sequence[str],
    orders: int,
    progress: Progress,
    *,
    load: float,
    vms: int,
) -> Simulation:
    """VMs that arrive and depart on described or captured hosts."""
    planner = Planner(pool)
    gpus = sum(len(planner.gpus(host.shape)) for host in pool.hosts)
    drawn = [
        drawn_load(flavours, weights, gpus, load=load, count=vms, seed=seed)
        for seed in range(orders)
    ]

    def one(policy: str, seed: int) -> Replay:
        return replay_hosts(pool, flavours, weights, drawn[seed], HostPolicy(policy), planner)

    names = chosen_policies(policies, tuple(HostPolicy))
    bounds = []
    for order in drawn:
        intervals = [(vm.at, vm.until, flavours[vm.flavour].gpus) for vm in order]
        bounds.append((1 - most_accepted(intervals, gpus) / max(1, vms)) * 100)
    bound = figure("refused_percent", bounds)
    return _simulated(what, names, orders, one, progress, ("time", "share allocated"), bound)


def most_accepted(intervals: Sequence[tuple[float, float, int]], gpus: int) -> float:
    """The most VMs of these (arrival, departure, GPUs) that so many GPUs could serve, by linear
    programming (GLOP), with all of the future known and every GPU as good as another."""
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
