"""Replay of arrivals: against published shares, closed cases, and a strict recount."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.cluster.pool.flavour import default_flavours
from homenode.cluster.pool.place import PoolPlaces
from homenode.cluster.pool.planner import Planner
from homenode.cluster.pool.replay.cells import CellPolicy, replay_cells
from homenode.cluster.pool.replay.hosts import HostPolicy, drawn_load, replay_hosts
from homenode.cluster.pool.replay.simulation import (
    chosen_policies,
    figure,
    most_accepted,
    simulate_hosts,
)
from homenode.cluster.pool.replay.tasks import (
    TaskPolicy,
    TraceCluster,
    _Homenode,
    arrivals,
    replay_tasks,
)
from homenode.cluster.pool.replay.trace import (
    CellVm,
    GroupPolicy,
    Task,
    TraceKind,
    TraceNode,
    TwoNodeServer,
    parse_cell_vms,
    parse_gpu_nodes,
    parse_tasks,
    trace_kind,
)
from homenode.cluster.pool.sources import load_pool
from homenode.errors import InputError, UsageError
from homenode.show.html import html_page
from homenode.show.pool_page import simulation_page
from homenode.units import GIB
from tests.pool.pools import pool_of, shipped, sized, with_vm

pytest.importorskip("numpy")

OPENB = Path(__file__).parents[3] / "shared/traces/openb"
CELLS = OPENB.parent / "numa-vms"
PUBLISHED = {
    "default": (95.39, 93.08),
    "multigpu20": (95.65, 93.93),
    "multigpu30": (96.46, 94.72),
    "multigpu40": (96.99, 95.23),
    "multigpu50": (97.18, 95.74),
}
"""Share of GPUs allocated by FGD and by best fit, mean of ten orders (USENIX ATC'23)."""


def _openb(name: str) -> tuple[tuple[TraceNode, ...], tuple[Task, ...]]:
    nodes = parse_gpu_nodes((OPENB / "openb_node_list_gpu_node.csv").read_text(), "nodes")
    path = OPENB / f"openb_pod_list_{name}.csv"
    return nodes, parse_tasks(path.read_text(), path.name)


@pytest.mark.skipif(not OPENB.is_dir(), reason="the published trace is not here")
def test_fgd_and_best_fit_come_to_the_published_shares_and_ours_to_more() -> None:
    nodes, tasks = _openb("multigpu50")
    share = {
        policy: replay_tasks(nodes, tasks, policy, 0).figures["allocated_percent"]
        for policy in (TaskPolicy.FGD, TaskPolicy.BEST_FIT, TaskPolicy.HOMENODE)
    }
    fgd, best_fit = PUBLISHED["multigpu50"]
    assert abs(share[TaskPolicy.FGD] - fgd) < 0.7  # one order varies more than ten
    assert abs(share[TaskPolicy.BEST_FIT] - best_fit) < 0.7
    assert share[TaskPolicy.HOMENODE] > max(share[TaskPolicy.FGD], fgd)


@pytest.mark.lab
@pytest.mark.parametrize("name", PUBLISHED)
def test_ten_orders_come_to_the_published_shares_within_half_a_point(name: str) -> None:
    nodes, tasks = _openb(name)

    def mean(policy: TaskPolicy) -> float:
        runs = [replay_tasks(nodes, tasks, policy, seed) for seed in range(10)]
        return sum(run.figures["allocated_percent"] for run in runs) / 10

    fgd, best_fit = PUBLISHED[name]
    own = mean(TaskPolicy.FGD)
    assert abs(own - fgd) < 0.5
    assert abs(mean(TaskPolicy.BEST_FIT) - best_fit) < 0.5
    assert mean(TaskPolicy.HOMENODE) > max(fgd, own)


def _small(seed: int) -> tuple[list[TraceNode], list[Task]]:
    rng = random.Random(seed)
    nodes = [
        TraceNode(
            cpu_milli=rng.choice((16000, 32000)),
            memory_mib=64000,
            gpus=rng.choice((1, 2, 4)),
            model=rng.choice("ab"),
        )
        for _ in range(6)
    ]
    tasks = [
        Task(
            cpu_milli=rng.choice((1000, 4000, 8000)),
            memory_mib=1000,
            gpus=1,
            gpu_milli=rng.choice((250, 400, 1000)),
        )
        if rng.random() < 0.8
        else Task(
            cpu_milli=8000,
            memory_mib=2000,
            gpus=2,
            gpu_milli=1000,
            models=("a",) if rng.random() < 0.5 else (),
        )
        for _ in range(40)
    ]
    return nodes, tasks


@pytest.mark.parametrize("policy", TaskPolicy)
@pytest.mark.parametrize("seed", range(4))
def test_no_machine_ever_gives_more_than_it_has(policy: TaskPolicy, seed: int) -> None:
    nodes, tasks = _small(seed)
    in_use: list[tuple[int, Task, int | None]] = []

    class Watched(TraceCluster):
        def __init__(self, drawn: Sequence[TraceNode], tasks: Sequence[Task]) -> None:
            nodes[:] = drawn
            super().__init__(drawn, tasks)

        def take(self, machine: int, task: Task, gpu: int | None) -> None:
            in_use.append((machine, task, gpu))
            super().take(machine, task, gpu)

    import homenode.cluster.pool.replay.tasks as module

    own = module.TraceCluster
    module.TraceCluster = Watched  # type: ignore[assignment, misc]
    try:
        found = replay_tasks(nodes, tasks, policy, seed)
    finally:
        module.TraceCluster = own  # type: ignore[misc]
    for number, node in enumerate(nodes):
        here = [(task, gpu) for machine, task, gpu in in_use if machine == number]
        assert sum(task.cpu_milli for task, _ in here) <= node.cpu_milli
        assert sum(task.memory_mib for task, _ in here) <= node.memory_mib
        shared: dict[int, int] = {}
        whole = sum(task.gpus for task, gpu in here if gpu is None)
        for task, gpu in here:
            assert not task.models or node.model in task.models
            if gpu is not None:
                shared[gpu] = shared.get(gpu, 0) + task.gpu_milli
        assert all(milli <= 1000 for milli in shared.values())
        assert whole + len(shared) <= node.gpus
    total = sum(node.gpus for node in nodes) * 1000
    allocated = sum(t.total_gpu_milli for _, t, _ in in_use) / total
    assert found.figures["allocated_percent"] == pytest.approx(allocated * 100)
    arrived = len(arrivals(tasks, total, seed))
    refused = (arrived - len(in_use)) / arrived
    assert found.figures["refused_percent"] == pytest.approx(refused * 100)


def test_place_and_the_replay_of_a_trace_weigh_gpus_without_cores_alike() -> None:
    """A VM of few cores goes where free GPUs lack cores, although less fits there then."""
    host, sizes = shipped("hgx-h100"), default_flavours()
    busy = [sized(name="busy", gpus=0, vcpus=n, memory_bytes=64 * GIB) for n in (2, 12, 36)]
    pool = pool_of([(f"h{i}", with_vm(host, one, "busy")) for i, one in enumerate(busy)])
    places = PoolPlaces(pool, sizes)
    asked = sized(name="asked", gpus=1, vcpus=3, memory_bytes=64 * GIB)
    best = next(places.ranked(asked))
    amounts = map(places.planner.free_amounts, map(places.planner.state, pool.hosts))
    nodes = [
        TraceNode(cpu_milli=cores * 1000, memory_mib=1, gpus=gpus, model="")
        for gpus, cores in amounts
    ]
    kinds = [_task(size.gpus, size.request(host).vcpus) for size in sizes]
    chooser = _Homenode(TraceCluster(nodes, kinds))
    losses, _ = chooser._losses(_task(1, 3))
    assert (best.host.name, losses.argmin()) == ("h2", 2)
    assert places.cost_of_change(best.state, best.step.after)[0] == losses[2] // 1000 < 0


def _task(gpus: int, cpus: int) -> Task:
    return Task(cpu_milli=cpus * 1000, memory_mib=0, gpus=gpus, gpu_milli=1000)


def test_the_bound_of_arrivals_is_exact_where_all_intervals_meet() -> None:
    pytest.importorskip("ortools")
    assert most_accepted([(0, 9, 4), (1, 9, 4), (2, 9, 4)], 8) == pytest.approx(2)
    assert most_accepted([(0, 1, 8), (1, 2, 8), (2, 3, 8)], 8) == pytest.approx(3)


@pytest.mark.skipif(not CELLS.is_dir(), reason="the published trace is not here")
@pytest.mark.parametrize("name", ["C2"])
def test_vms_of_cells_are_placed_more_often_and_refused_later_than_by_other_policies(
    name: str,
) -> None:
    from homenode.cluster.pool.replay.trace import parse_two_node_servers

    servers = parse_two_node_servers((CELLS / "PM_res.csv").read_text(), "servers")
    vms = parse_cell_vms((CELLS / f"VM_data_{name}.csv").read_text(), "vms")
    runs = {policy: replay_cells(servers, vms, policy) for policy in CellPolicy}
    ours = runs.pop(CellPolicy.HOMENODE)
    for run in runs.values():
        assert ours.figures["placed"] > run.figures["placed"]
        assert ours.figures["before_first_refusal"] >= run.figures["before_first_refusal"]


@pytest.mark.parametrize("policy", CellPolicy)
def test_groups_of_vms_keep_their_rule(policy: CellPolicy) -> None:
    servers = [TwoNodeServer((8, 8), (32, 32)) for _ in range(3)]
    apart = [
        CellVm(cores=2, memory_gib=2, cells=1, spread=GroupPolicy.ANTI_AFFINITY, group="a")
        for _ in range(4)
    ]
    assert replay_cells(servers, apart, policy).figures["placed"] == 3
    together = [
        CellVm(cores=8, memory_gib=8, cells=1, spread=GroupPolicy.AFFINITY, group="b")
        for _ in range(3)
    ]
    assert replay_cells(servers, together, policy).figures["placed"] == 2
    domains = [
        CellVm(
            cores=8,
            memory_gib=8,
            cells=1,
            spread=GroupPolicy.FAULT_DOMAINS,
            group="c",
            domain=str(i % 4),
        )
        for i in range(8)
    ]
    assert replay_cells(servers, domains, policy).figures["placed"] <= 6
    two = [CellVm(cores=16, memory_gib=16, cells=2)] * 4
    assert replay_cells(servers, two, policy).figures["placed"] == 3


def test_hosts_take_arrivals_until_they_are_full_and_again_after_departures() -> None:
    pool = load_pool(["hgx-h100*2"])
    flavours = default_flavours()
    load = drawn_load(flavours, (4, 2, 1, 1), 16, load=0.9, count=25, seed=3)
    planner = Planner(pool)
    runs = {
        policy: replay_hosts(pool, flavours, (4, 2, 1, 1), load, policy, planner)
        for policy in HostPolicy
    }
    ours = runs[HostPolicy.HOMENODE]
    assert ours.figures["stranded_percent"] == 0
    assert ours.figures["degraded"] == 0
    assert all(0 < run.figures["allocated_percent"] < 100 for run in runs.values())
    nova = runs[HostPolicy.NOVA]
    assert ours.figures["refused_percent"] <= nova.figures["refused_percent"]


def test_a_simulation_says_that_it_is_one_and_has_intervals() -> None:
    pytest.importorskip("ortools")
    pool = load_pool(["hgx-h100*1"])
    found = simulate_hosts(
        "two",
        pool,
        default_flavours(),
        (1, 1, 1, 1),
        ("first-fit", "homenode"),
        2,
        lambda done, total: None,
        load=0.5,
        vms=6,
    )
    assert found.simulated
    assert [one.policy for one in found.outcomes] == ["first-fit", "homenode"]
    assert found.bound is not None
    page = html_page(simulation_page(replace(found, what="<b>")))
    assert page.count('class="curve l') == 4  # each curve, and its line in the legend
    assert 'name="generator" content="homenode"' in page
    assert "<b>" not in page
    assert "imulated" in page


def test_an_interval_needs_two_orders() -> None:
    assert figure("x", [3.0]).low is None
    both = figure("x", [1.0, 3.0])
    assert both.low is not None
    assert both.low < 1.0 < both.mean == 2.0


def test_unknown_policies_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="nova"):
        chosen_policies(["nova"], tuple(TaskPolicy))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a,b\n1,2",
        "cpu_milli,memory_mib,num_gpu,gpu_milli\n1,2,3",
        "cpu_milli,memory_mib,num_gpu,gpu_milli\n1,2,x,1000",
        "cpu_milli,memory_mib,num_gpu,gpu_milli\n1,2,2,500",
        "cpu_milli,memory_mib,num_gpu,gpu_milli\n",
        "cpu_milli,memory_mib,num_gpu,gpu_milli\n-1,1,0,0",
    ],
)
def test_a_trace_of_another_form_is_refused_by_line(text: str) -> None:
    with pytest.raises(InputError):
        if trace_kind(text, "t.csv") is TraceKind.TASKS:
            parse_tasks(text, "t.csv")
