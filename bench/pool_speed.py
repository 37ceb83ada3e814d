"""Pools: how long 1,000 and 10,000 hosts take, and shares of published traces under each policy.

python bench/pool_speed.py               speed of show, place and the hook
python bench/pool_speed.py TRACES [N]    replays openb/ and numa-vms/ below TRACES, N orders
"""

import resource
import sys
import time
from itertools import islice
from pathlib import Path

from homenode.pool.flavour import default_flavours
from homenode.pool.hook import Hook
from homenode.pool.outlook import outlook
from homenode.pool.place import PoolPlaces
from homenode.pool.replay.cells import CellPolicy, replay_cells
from homenode.pool.replay.simulation import simulate_tasks
from homenode.pool.replay.tasks import TaskPolicy
from homenode.pool.replay.trace import (
    parse_cell_vms,
    parse_gpu_nodes,
    parse_tasks,
    parse_two_node_servers,
)
from homenode.pool.sources import load_pool

LISTS = ("default", "multigpu20", "multigpu30", "multigpu40", "multigpu50")


def speed(sources: list[str]) -> None:
    begin = time.perf_counter()
    pool = load_pool(sources)
    loaded = time.perf_counter()
    outlook(pool, default_flavours())
    shown = time.perf_counter()
    places = PoolPlaces(pool, default_flavours())
    entered = time.perf_counter()
    list(islice(places.ranked(default_flavours()[1]), 3))
    placed = time.perf_counter()
    hook = Hook(places, default_flavours())
    hook.answer(b'{"vm":"first","gpus":2}')
    answered = time.perf_counter()
    for number in range(20):
        hook.answer(f'{{"vm":"vm{number}","gpus":{1 << number % 3}}}'.encode())
    end = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(
        f"{len(pool.hosts)} hosts: load {loaded - begin:.2f} s, show {shown - loaded:.2f} s, "
        f"place {placed - entered:.3f} s, a request of the hook "
        f"{(end - answered) / 20 * 1000:.1f} ms; {peak} MiB"
    )


def replay(traces: Path, orders: int) -> None:
    folder = traces / "openb"
    nodes = parse_gpu_nodes((folder / "openb_node_list_gpu_node.csv").read_text(), "nodes")
    for name in LISTS:
        tasks = parse_tasks((folder / f"openb_pod_list_{name}.csv").read_text(), name)
        found = simulate_tasks(
            name, nodes, tasks, tuple(TaskPolicy), orders, lambda done, total: None
        )
        shares = ", ".join(f"{one.policy} {one.figures[0].mean:.2f} %" for one in found.outcomes)
        assert found.bound is not None
        print(f"{name}: {shares}; bound {found.bound.mean:.2f} %", flush=True)
    folder = traces / "numa-vms"
    servers = parse_two_node_servers((folder / "PM_res.csv").read_text(), "servers")
    for number in range(1, 6):
        vms = parse_cell_vms((folder / f"VM_data_C{number}.csv").read_text(), f"C{number}")
        for policy in CellPolicy:
            run = replay_cells(servers, vms, policy)
            print(
                f"C{number} {policy}: {run.before_refusal} VMs before the first refusal, "
                f"{run.placed} at the end, {run.cores:.2%} of the cores",
                flush=True,
            )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        replay(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 10)
    else:
        speed(["hgx-h100*1000"])
        speed(["hgx-h100*10000"])
