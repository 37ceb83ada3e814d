"""What `homenode pool simulate` does with its arguments. [I/O]"""

from collections.abc import Sequence
from pathlib import Path

from homenode.cli.arguments.pool import PoolSimulateArguments
from homenode.cli.pool_reading import (
    exit_with_failures,
    note_failures,
    progress,
    read_flavours,
    read_the_pool,
)
from homenode.cli.terminal import (
    check_can_write,
    console,
    note,
    print_json,
    write_text,
)
from homenode.cluster.pool.flavour import Flavour
from homenode.cluster.pool.model import Pool
from homenode.cluster.pool.replay import trace as traces
from homenode.cluster.pool.replay.simulation import (
    Simulation,
    simulate_cells,
    simulate_hosts,
    simulate_tasks,
)
from homenode.cluster.pool.sources import Progress
from homenode.errors import UsageError
from homenode.formats import encode
from homenode.input_files import read_input
from homenode.show.html import html_page
from homenode.show.replay_text import simulation_page, simulation_text


def simulate(asked: PoolSimulateArguments) -> None:
    """Replay, and print what came of it."""
    page = asked.page

    check_can_write(page)
    pool = None
    if asked.trace == "random":
        sizes = read_flavours(asked.flavours)
        weights = _weights(asked.mix, sizes)
        pool = read_the_pool(asked.pool)
        note_failures(pool)
    with progress("replaying") as show_progress:
        found = (
            _simulate_random(pool, sizes, weights, asked, show_progress)
            if pool is not None
            else _simulate_trace(asked, show_progress)
        )
    if asked.json:
        print_json(encode("pool-simulation", found))
    else:
        console().print(simulation_text(found))
    if page is not None:
        write_text(page, html_page(simulation_page(found)))
        note(f"wrote {page}")
    if pool is not None:
        exit_with_failures(pool)


def _simulate_random(
    pool: Pool,
    sizes: Sequence[Flavour],
    weights: tuple[float, ...],
    asked: PoolSimulateArguments,
    show_progress: Progress,
) -> Simulation:

    what = f"{asked.vms} VMs at {asked.load:.0%} load on {len(pool.hosts)} hosts"
    return simulate_hosts(
        what,
        pool,
        sizes,
        weights,
        asked.policy,
        asked.orders,
        show_progress,
        load=asked.load,
        vms=asked.vms,
    )


def _simulate_trace(asked: PoolSimulateArguments, show_progress: Progress) -> Simulation:
    trace, nodes = asked.trace, asked.nodes
    if nodes is None:
        raise UsageError("pool simulate: expected --nodes FILE with a trace, found none")
    text = read_input(Path(trace), "a trace as CSV").decode("utf-8", "replace")
    machines = read_input(nodes, "machines as CSV").decode("utf-8", "replace")
    what = Path(trace).name
    if traces.trace_kind(text, trace) is traces.TraceKind.TASKS:
        return simulate_tasks(
            what,
            traces.parse_gpu_nodes(machines, str(nodes)),
            traces.parse_tasks(text, trace),
            asked.policy,
            asked.orders,
            show_progress,
        )
    return simulate_cells(
        what,
        traces.parse_two_node_servers(machines, str(nodes)),
        traces.parse_cell_vms(text, trace),
        asked.policy,
        asked.orders,
        show_progress,
    )


def _weights(mix: str | None, flavours: Sequence[Flavour]) -> tuple[float, ...]:
    """How often each flavour comes. Raises UsageError."""
    if mix is None:
        return tuple(1.0 for _ in flavours)
    given: dict[str, float] = {}
    names = [flavour.name for flavour in flavours]
    for part in mix.split(","):
        name, _, weight = part.strip().partition("=")
        try:
            given[name] = float(weight)
        except ValueError:
            given[name] = -1.0
        if name not in names or not 0 <= given[name] < 1e9:
            raise UsageError(
                f"--mix: expected FLAVOUR=WEIGHT of {', '.join(names)}, found {part.strip()!r}"
            )
    if not any(given.values()):
        raise UsageError("--mix: expected a weight above 0, found none")
    return tuple(given.get(name, 0.0) for name in names)
