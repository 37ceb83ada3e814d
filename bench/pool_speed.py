"""Pools: how long 1,000 and 10,000 hosts take, and shares of published traces under each policy.

python bench/pool_speed.py               processor time of show, place and the hook
python bench/pool_speed.py TRACES [N]    replays openb/ and numa-vms/ below TRACES, N orders
"""

import gc
import random
import resource
import sys
import time
from copy import deepcopy
from itertools import islice
from pathlib import Path

from homenode.cluster.pool.answers import Answers, StoredAnswers
from homenode.cluster.pool.flavour import default_flavours
from homenode.cluster.pool.hook import Hook
from homenode.cluster.pool.model import Pool
from homenode.cluster.pool.outlook import outlook
from homenode.cluster.pool.place import PoolPlaces
from homenode.cluster.pool.planner import Planner
from homenode.cluster.pool.replay.cells import CellPolicy, replay_cells
from homenode.cluster.pool.replay.simulation import simulate_tasks
from homenode.cluster.pool.replay.tasks import TaskPolicy
from homenode.cluster.pool.replay.trace import (
    parse_cell_vms,
    parse_gpu_nodes,
    parse_tasks,
    parse_two_node_servers,
)
from homenode.cluster.pool.sources import load_pool


def speed(what: str, pool: Pool, loaded_s: float, stored: StoredAnswers | None = None) -> None:
    """stored: the answers of a captured pool's folder; None = of another pool, which has none."""
    begin = time.process_time()
    found = outlook(pool, default_flavours(), planner_of(pool, stored))
    shown = time.process_time()
    places = PoolPlaces(pool, default_flavours(), planner_of(pool, stored))
    list(islice(places.ranked(default_flavours()[1]), 3))
    placed = time.process_time()
    hook = Hook(places, default_flavours())
    hook.prepare()
    gc.freeze()  # as `pool place --hook` does
    gc.disable()
    prepared = time.process_time()
    took, between = [], []
    for number in range(60):
        at = time.process_time()
        hook.answer(f'{{"vm":"new{number}","gpus":{1 << number % 3}}}'.encode())
        took.append(time.process_time() - at)
        hook.tidy()
        between.append(time.process_time() - at - took[-1])
    others = []
    for number in range(40):
        size = f'"gpus":{number % 4},"vcpus":{7 + number},"memory":"{20 + 9 * number}GiB"'
        at = time.process_time()
        hook.answer(f'{{"vm":"other{number}",{size}}}'.encode())
        others.append(time.process_time() - at)
        hook.tidy()
    gc.enable()
    gc.unfreeze()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(
        f"{what}, {found.states} states: load {loaded_s:.2f} s, show {shown - begin:.2f} s, place "
        f"{placed - shown:.2f} s, hook prepared in {prepared - placed:.2f} s, a request "
        f"{percentiles(took)}, after it {percentiles(between)}, of a size of its own "
        f"{percentiles(others)}; {peak} MiB"
    )


def percentiles(took: list[float]) -> str:
    """The median and the 99th percentile in ms."""
    ordered = sorted(took)
    middle, high = (ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99))
    return f"{middle * 1000:.1f} ms (p99 {high * 1000:.0f})"


def planner_of(pool: Pool, stored: StoredAnswers | None) -> Planner:
    return Planner(pool, None if stored is None else Answers(deepcopy(stored)))


def worked_out(pool: Pool) -> StoredAnswers:
    """What capture keeps of the pool."""
    answers = Answers(StoredAnswers(program="bench"))
    outlook(pool, default_flavours(), Planner(pool, answers))
    return answers.stored


def loaded(source: str) -> tuple[Pool, float]:
    begin = time.process_time()
    return load_pool([source]), time.process_time() - begin


def diverse(pool: Pool, vms: int, seed: int, *, any_size: bool = False) -> Pool:
    """The pool after so many VMs have been placed on hosts that were drawn, and a third gone.

    any_size: VMs of sizes of their own, so that hardly two hosts are alike.
    """
    rng = random.Random(seed)
    flavours = () if any_size else default_flavours()
    hook = Hook(places := PoolPlaces(pool, flavours), flavours)
    for number in range(vms):
        gpus, host = rng.choice((1, 1, 2, 4)), rng.choice(pool.hosts).name
        size = f'"gpus":{gpus}'
        if any_size:
            memory = rng.randrange(8, 500)
            size = f'"gpus":{gpus - 1},"vcpus":{rng.randrange(2, 50)},"memory":"{memory}GiB"'
        hook.answer(f'{{"vm":"vm{number}",{size},"hosts":["{host}"]}}'.encode())
        hook.tidy()
        if rng.random() < 1 / 3:
            hook.answer(f'{{"vm":"vm{rng.randrange(number + 1)}","op":"remove"}}'.encode())
    return places.pool()


def replay(traces: Path, orders: int) -> None:
    folder = traces / "openb"
    nodes = parse_gpu_nodes((folder / "openb_node_list_gpu_node.csv").read_text(), "nodes")
    for path in sorted(folder.glob("openb_pod_list_*.csv")):
        name = path.stem.removeprefix("openb_pod_list_")
        tasks = parse_tasks(path.read_text(), name)
        found = simulate_tasks(
            name, nodes, tasks, tuple(TaskPolicy), orders, lambda done, total: None
        )
        shares = ", ".join(f"{one.policy} {one.figures[0].mean:.2f} %" for one in found.outcomes)
        print(f"{name}: {shares}", flush=True)
    folder = traces / "numa-vms"
    servers = parse_two_node_servers((folder / "PM_res.csv").read_text(), "servers")
    for number in range(1, 6):
        vms = parse_cell_vms((folder / f"VM_data_C{number}.csv").read_text(), f"C{number}")
        for policy in CellPolicy:
            run = replay_cells(servers, vms, policy)
            print(
                f"C{number} {policy}: {run.figures['before_first_refusal']} VMs before the first "
                "refusal, "
                f"{run.figures['placed']} at the end, "
                f"{run.figures['cores_percent']:.2f} % of the cores",
                flush=True,
            )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        replay(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 10)
    else:
        for count in (1000, 10000):
            pool, took = loaded(f"hgx-h100*{count}")
            speed(f"{count} hosts alike", pool, took)
            speed(f"{count} hosts in use", diverse(pool, 3 * count, 1), took)
        pool, took = loaded("hgx-h100*1000")
        unlike = diverse(pool, 3000, 1, any_size=True)
        speed("1000 hosts that are all unlike", unlike, took)
        speed("the same, captured", unlike, took, worked_out(unlike))
