"""homenode pool show, vms, capture: hosts, and what fits on them. [I/O]"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from homenode.cli.arguments.pool import (
    PoolCaptureArguments,
    PoolShowArguments,
    PoolVmsArguments,
)
from homenode.cli.terminal import (
    console,
    error_console,
    note,
    print_file,
    print_json,
)
from homenode.cluster.pool.answers_file import read_answers, write_answers
from homenode.cluster.pool.capture import capture_pool, store_pool
from homenode.cluster.pool.flavour import Flavour, default_flavours, parse_flavours
from homenode.cluster.pool.ledger import Ledger, has_ledger
from homenode.cluster.pool.model import Pool, pool_vms
from homenode.cluster.pool.outlook import outlook
from homenode.cluster.pool.planner import Planner
from homenode.cluster.pool.sources import Progress, load_pool
from homenode.cluster.pool.stored import POOL_FILE
from homenode.errors import FINDINGS, UsageError
from homenode.formats import encode
from homenode.input_files import read_input
from homenode.show import pool_text
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
    sources = pool_named(asked.pool, asked.sources)
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
