"""homenode pool show, vms, capture, export, simulate: hosts, and what fits on them. [I/O]"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from homenode.cli.arguments.pool import (
    PoolCaptureArguments,
    PoolExportArguments,
    PoolShowArguments,
    PoolSimulateArguments,
    PoolVmsArguments,
)
from homenode.cli.terminal import (
    check_can_write,
    console,
    error_console,
    note,
    print_file,
    print_json,
    write_text,
)
from homenode.cluster.pool.answers_file import read_answers, write_answers
from homenode.cluster.pool.capture import capture_pool, store_pool
from homenode.cluster.pool.export import NEXT_STEP, unnamed
from homenode.cluster.pool.export import export as export_text
from homenode.cluster.pool.flavour import Flavour, default_flavours, parse_flavours
from homenode.cluster.pool.ledger import Ledger, has_ledger
from homenode.cluster.pool.model import Pool, pool_vms
from homenode.cluster.pool.outlook import outlook
from homenode.cluster.pool.planner import Planner
from homenode.cluster.pool.replay import trace as traces
from homenode.cluster.pool.replay.simulation import (
    Simulation,
    simulate_cells,
    simulate_hosts,
    simulate_tasks,
)
from homenode.cluster.pool.rules import Scheduler
from homenode.cluster.pool.sources import Progress, load_pool
from homenode.cluster.pool.stored import POOL_FILE
from homenode.cluster.scheduler.claims import claim_templates, read_slices
from homenode.errors import FINDINGS, UsageError
from homenode.formats import encode
from homenode.input_files import read_input
from homenode.show import pool_text
from homenode.show.html import html_page
from homenode.show.pool_page import pool_page, simulation_page, simulation_text
from homenode.show.pool_text import vms_text
from homenode.wording import command_line, did_you_mean, plural

MOST_NAMES = 8
"""VMs that a message names."""


@contextmanager
def progress(what: str) -> Iterator[Progress]:
    """A bar on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Bar(*columns, console=error_console(), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def pool_named(pool: Sequence[str], sources: Sequence[str]) -> tuple[str, ...]:
    """The sources of --pool, or those that stand as arguments. Raises UsageError for none."""
    if not (pool or sources):
        raise UsageError("expected --pool POOL, found none", hint="--pool captures/")
    return (*pool, *sources)


def read_the_pool(sources: Sequence[str], ledger: Ledger | None = None) -> Pool:
    """The pool, with what is reserved in it. ledger: of its folder, while its lock is held; what
    the hosts show of the VMs is written down."""
    with progress("reading hosts") as show_progress:
        pool = load_pool(sources, show_progress, reserved=ledger is None)
    return pool if ledger is None else ledger.update(pool)


@contextmanager
def planner_of(pool: Pool, sources: Sequence[str]) -> Iterator[Planner]:
    """The planner of a pool. What earlier commands have worked out of a pool's folder is read from
    there, and what this one adds is written there at the end."""
    folder = Path(sources[0])
    if len(sources) > 1 or not (folder / POOL_FILE).is_file():
        yield Planner(pool)
        return
    answers = read_answers(folder)
    yield Planner(pool, answers)
    write_answers(folder, answers)


def note_failures(pool: Pool) -> None:
    for failure in pool.failures:
        note(f"left out {failure.source}: {failure.reason}")
    note_lost(pool)


def note_lost(pool: Pool) -> None:
    """Name the VMs that count nowhere."""
    by_host: dict[str, list[str]] = {}
    for one in pool.lost:
        by_host.setdefault(one.host, []).append(one.vm)
    for host, vms in by_host.items():
        more = f" and {len(vms) - MOST_NAMES} more" if len(vms) > MOST_NAMES else ""
        note(
            f"{host} is not in the pool, and counts nothing: it had "
            f"{', '.join(vms[:MOST_NAMES])}{more}; capture it, or remove them: homenode pool remove"
        )


def exit_with_failures(pool: Pool) -> None:
    """Exit with 1 where hosts were left out."""
    if pool.failures:
        raise SystemExit(FINDINGS)


def read_flavours(path: Path | None) -> tuple[Flavour, ...]:
    if path is None:
        return default_flavours()
    content = read_input(path, "a flavours.toml")
    return parse_flavours(content.decode("utf-8", "replace"), str(path))


def check_hosts(names: Sequence[str], pool: Pool, option: str = "--on") -> None:
    """Raises UsageError for a host of an option that the pool does not have."""
    known = {host.name for host in pool.hosts}
    for name in names:
        if name not in known:
            raise UsageError(
                f"{option}: expected a host of the pool, found {name!r}",
                hint=f"{did_you_mean(name, known)}homenode pool show --pool POOL --all lists them",
            )


def show(asked: PoolShowArguments) -> None:
    """Print what is free, and what still fits."""
    if sum((asked.csv, asked.prometheus, asked.json)) > 1:
        raise UsageError("--csv, --prometheus, --json: expected one of them, found several")
    page, sources = asked.page, pool_named(asked.pool, asked.sources)
    check_can_write(page)
    sizes = read_flavours(asked.flavours)
    pool = read_the_pool(sources)
    with planner_of(pool, sources) as planner, progress("planning") as show_progress:
        found = outlook(pool, sizes, planner, show_progress)
    if asked.json:
        print_json(encode("pool", found))
    elif asked.csv:
        print_file(pool_text.pool_csv(found))
    elif asked.prometheus:
        print_file(pool_text.pool_prometheus(found))
    else:
        console().print(pool_text.pool_text(found, everything=asked.everything))
    if page is not None:
        write_text(page, html_page(pool_page(pool, found)))
        note(f"wrote {page}")
    if asked.json or asked.csv or asked.prometheus:
        note_failures(pool)
    else:
        note_lost(pool)
    exit_with_failures(pool)


def list_vms(asked: PoolVmsArguments) -> None:
    """Print where each VM is."""
    pool = read_the_pool(pool_named(asked.pool, asked.sources))
    note_failures(pool)
    check_hosts(asked.among, pool)
    found = pool_vms(pool, asked.among)
    if asked.json:
        print_json(encode("pool-vms", found))
    else:
        console().print(vms_text(found))
    exit_with_failures(pool)


def capture(asked: PoolCaptureArguments) -> None:
    """Read the hosts into a folder."""
    sources, hosts, output = asked.sources, asked.hosts, asked.output

    if bool(sources) == (hosts is not None):
        found = "both" if sources else "neither"
        raise UsageError(f"pool capture: expected --hosts FILE or sources of hosts, found {found}")
    if hosts is None:
        if output.resolve() in [Path(source).resolve() for source in sources]:
            raise UsageError(f"--output {output}: expected another folder, found a source")
        with progress("reading hosts") as show_progress:
            pool = load_pool(sources, show_progress, jobs=asked.jobs, reserved=False)
        number = len(pool.hosts)
        store_pool(pool, output)
    else:
        content = read_input(hosts, "a list of hosts")
        with progress("reading hosts") as show_progress:
            done = capture_pool(
                content.decode("utf-8", "replace"),
                str(hosts),
                output,
                show_progress,
                jobs=asked.jobs,
                timeout_s=asked.timeout,
                again=asked.again,
            )
        pool, number = done.pool, done.read
    if has_ledger(output):
        with Ledger(output) as ledger, ledger.writing():
            ledger.forget_gone()
            ledger.update(pool)
    if pool.hosts:
        # Later commands find what they need of hosts that have not changed.
        written = [str(output)]
        stored = load_pool(written)
        with planner_of(stored, written) as planner, progress("planning") as show_progress:
            outlook(stored, default_flavours(), planner, show_progress)
    note_failures(pool)
    note(
        f"wrote {output}: {plural(len(pool.hosts), 'host')}, {number} read now, "
        f"{len(pool.failures)} failed"
    )
    if pool.hosts:
        note(f"next: {command_line('homenode', 'pool', 'show', output)}")
    exit_with_failures(pool)


def export(asked: PoolExportArguments) -> None:
    """Print what still fits in a scheduler's words."""
    scheduler = asked.scheduler
    if (scheduler is Scheduler.DRA) != (asked.slices is not None):
        raise UsageError("expected --for dra and --slices FILE together, found one of them")
    if asked.slices is not None:
        _export_claims(asked.slices, read_flavours(asked.flavours))
        return
    sources = pool_named(asked.pool, asked.sources)
    sizes = read_flavours(asked.flavours)
    pool = read_the_pool(sources)
    note_failures(pool)
    with planner_of(pool, sources) as planner, progress("planning") as show_progress:
        found = outlook(pool, sizes, planner, show_progress)
    print_file(export_text(found, scheduler))
    note(f"next: {NEXT_STEP[scheduler]}")
    left_out = unnamed(found, scheduler)
    for name in left_out:
        note(f"left out {name}: expected a name that {scheduler} can have")
    if left_out:
        raise SystemExit(FINDINGS)
    exit_with_failures(pool)


def _export_claims(path: Path, sizes: Sequence[Flavour]) -> None:
    devices = read_slices(read_input(path, "kubectl get resourceslices -o json"), str(path))
    templates, loose = claim_templates(devices, sizes)
    print_file(templates)
    for name in loose:
        note(f"{name}: its devices share no attribute in such a number: any of a node will do")
    note(f"next: {NEXT_STEP[Scheduler.DRA]}")


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
        policies=asked.policy,
        orders=asked.orders,
        progress=show_progress,
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
