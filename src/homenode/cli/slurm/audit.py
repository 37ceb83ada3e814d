"""homenode slurm audit: are jobs' CPUs, GPUs and memory on the same nodes. [I/O]"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homenode.cli.options import JsonOption
from homenode.cli.terminal import (
    check_can_write,
    exit_if_bad,
    note,
    print_findings,
    read_file,
    working,
    write_text,
)
from homenode.errors import HostError, UsageError
from homenode.slurm.spool import SPOOL

if TYPE_CHECKING:
    from homenode.findings import Findings
    from homenode.slurm.gres import DeviceOrder
    from homenode.slurm.job_allocation import JobAllocation, NodeMachine
    from homenode.slurm.record import TaskRecord
    from homenode.tools.slurm_job import Job


def audit(
    jobs: Annotated[
        list[str] | None,
        typer.Argument(metavar="JOBID", help="Jobs to look at. Default: all that run."),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NODES=]SOURCE",
            help="The machine of these nodes (gpu[01-36]=SOURCE), or of all others; repeatable. "
            "Default: this machine.",
        ),
    ] = None,
    jobs_file: Annotated[
        Path | None,
        typer.Option(
            "--jobs",
            metavar="FILE",
            help="Read `scontrol show job -d` or `squeue --json` from here; - for standard input.",
        ),
    ] = None,
    nodes_file: Annotated[
        Path | None,
        typer.Option("--nodes", metavar="FILE", help="Read `scontrol show node` from here."),
    ] = None,
    gres: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The cluster's gres.conf: which GPU each of Slurm's numbers is. "
            "Default: numbers are by PCI address, as AutoDetect gives them.",
        ),
    ] = None,
    look: Annotated[
        bool,
        typer.Option(
            "--look", help="Also the memory policy of their processes, by a step in each job."
        ),
    ] = False,
    records: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Look at jobs that ended, by the hooks' records."),
    ] = None,
    hooks: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the Prolog, TaskProlog and Epilog that record."),
    ] = None,
    spool: Annotated[
        str, typer.Option(metavar="DIR", help="With --hooks: where nodes keep the records.")
    ] = SPOOL,
    show_all: Annotated[
        bool, typer.Option("--all", help="Also findings of severity info.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Check whether the GPUs of running jobs are on the nodes of their CPUs and memory.

    Examples:
      homenode slurm audit
      homenode slurm audit 4711 --host node.tar.gz
    """
    from homenode.slurm.audit import audit as judge

    if hooks is not None:
        _write_hooks(hooks, spool)
        return
    order = None if gres is None else _order(gres)
    if look and (records is not None or jobs_file is not None):
        raise UsageError("--look: expected without --jobs and --records: it asks jobs that run")
    if records is not None and (jobs_file is not None or nodes_file is not None):
        raise UsageError("--records: expected without --jobs and --nodes, which are of live jobs")
    asked = tuple(jobs or ())
    with working("reading the jobs"):
        owned = (
            _running(asked, tuple(host or ()), jobs_file, nodes_file, order, look=look)
            if records is None
            else _recorded(records, asked, order)
        )
        found = judge(owned)
    if json:
        print_findings(found, as_json=True)
    else:
        _show(found, show_all)
    exit_if_bad(found.findings)


def _show(found: "Findings", show_all: bool) -> None:
    from homenode.findings import Findings, Severity

    shown = tuple(f for f in found.findings if show_all or f.severity is not Severity.INFO)
    left_out = len(found.findings) - len(shown)
    print_findings(Findings(found.checked, shown), as_json=False)
    if left_out:
        note(f"{left_out} more of severity info: --all")


def _running(
    asked: tuple[str, ...],
    hosts: tuple[str, ...],
    jobs_file: Path | None,
    nodes_file: Path | None,
    order: "DeviceOrder | None",
    *,
    look: bool,
) -> Iterator["JobAllocation"]:
    """What each job that runs has on each of its nodes."""
    from homenode.slurm.client import ask_jobs, ask_shapes, read_jobs
    from homenode.slurm.job_allocation import allocation_on
    from homenode.slurm.record import with_tasks
    from homenode.tools.scontrol import shown_shapes
    from homenode.tools.slurm_job import is_asked_for

    if jobs_file is None:
        jobs = ask_jobs(asked)
        shapes = ask_shapes()
    else:
        jobs = read_jobs(_text(jobs_file, "jobs as Slurm lists them"), str(jobs_file), asked)
        shapes = {}
    if nodes_file is not None:
        shapes = shown_shapes(_text(nodes_file, "nodes as Slurm lists them"), str(nodes_file))
    for name in asked:
        states = {job.state for job in jobs if is_asked_for(job, (name,))}
        # An array may run in part.
        if states and "RUNNING" not in states:
            raise UsageError(
                f"job {name}: expected a job that runs, found {', '.join(sorted(states))}",
                hint="of jobs that ended only records remain: --records DIR",
            )
    machines = _machines(hosts)
    for job in jobs:
        if job.runs:
            for share in job.shares:
                machine = machines.get(share.node, machines.get(""))
                numbers = None if order is None else order.numbers(share.node)
                owned = allocation_on(job, share, machine, shapes.get(share.node), numbers)
                if look and owned.gpus:
                    owned = with_tasks(owned, _looked_at(job, share.node))
                yield owned


def _looked_at(job: "Job", node: str) -> "tuple[TaskRecord, ...]":
    """The job's processes there; none, with a note, where no step may be started."""
    from homenode.errors import ToolError
    from homenode.slurm.client import ask_tasks

    try:
        return ask_tasks(job, node)
    except ToolError as error:
        note(f"not looked at: job {job.id} on {node}: {error.message}")
        return ()


def _recorded(
    folder: Path, asked: tuple[str, ...], order: "DeviceOrder | None"
) -> Iterator["JobAllocation"]:
    from homenode.slurm.client import read_records

    return read_records(folder, asked, order)


def _order(path: Path) -> "DeviceOrder":
    from homenode.slurm.config import parse_config
    from homenode.slurm.config_files import read_config
    from homenode.slurm.gres import device_order

    if str(path) == "-":
        return device_order(parse_config(_text(path, "a configuration file of Slurm"), "-"))
    return device_order(read_config(path))


def _machines(hosts: tuple[str, ...]) -> Mapping[str, "NodeMachine"]:
    """Machines by node name; "" is that of all other nodes. Each source is read once."""
    from homenode.slurm.job_allocation import node_machine
    from homenode.sources import load_host
    from homenode.tools.slurm_hostlist import expand_hostlist

    sources: dict[str, str | None] = {} if hosts else {"": None}
    for given in hosts:
        names, named, source = given.partition("=")
        # A path may hold a "=", but a list of nodes holds no "/".
        if not named or "/" in names:
            names, source = "", given
        if not source:
            raise UsageError(f"--host {given}: expected NODES=SOURCE, found no source")
        for name in expand_hostlist(names, f"--host {given}") if names else ("",):
            sources[name] = source
    read = {source: node_machine(load_host(source)) for source in dict.fromkeys(sources.values())}
    return {name: read[source] for name, source in sources.items()}


def _text(path: Path, what: str) -> str:
    if str(path) == "-":
        import sys

        return sys.stdin.read()
    return read_file(path, what).decode("utf-8", "replace")


def _write_hooks(folder: Path, spool: str) -> None:
    from homenode.slurm.hooks import hooks

    written = hooks(spool)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: expected a folder, found a file")
    there = [folder / name for name in written if (folder / name).exists()]
    if there:
        raise UsageError(
            f"{there[0]}: expected nothing there yet, found a file",
            hint="name another folder; what you have edited is not overwritten",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_can_write(*(folder / name for name in written))
        for name, text in written.items():
            write_text(folder / name, text, 0o644 if name == "README" else 0o755)
            note(f"wrote {folder / name}")
    except OSError as error:
        raise HostError(f"{folder}: expected to write there, found: {error.strerror}") from None
