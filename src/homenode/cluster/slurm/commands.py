"""homenode slurm audit and check: jobs and configuration against a machine. [I/O]

audit: whether jobs' CPUs, GPUs and memory are on the same nodes. check: compares gres.conf and
slurm.conf with a node's machine.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import unified_diff
from pathlib import Path

from msgspec.structs import replace

from homenode.cli.terminal import (
    exit_by,
    note,
    print_diff,
    print_findings,
    say,
    working,
    write_new_files,
)
from homenode.cluster.arguments import SPOOL, SlurmAuditArguments, SlurmCheckArguments
from homenode.cluster.slurm.audit import audit as judge_jobs
from homenode.cluster.slurm.check import check as judge_files
from homenode.cluster.slurm.client import (
    ask_jobs,
    ask_shapes,
    ask_tasks,
    is_json,
    read_config,
    read_jobs,
    read_records,
)
from homenode.cluster.slurm.config import is_slurm_conf
from homenode.cluster.slurm.correction import correct, find_shared_lines
from homenode.cluster.slurm.gres import DeviceOrder, read_device_order
from homenode.cluster.slurm.job_allocation import (
    JobAllocation,
    NodeMachine,
    build_allocation,
    build_gres_allocation,
    node_machine,
    unknown_allocation,
)
from homenode.cluster.slurm.record import TaskRecord, add_tasks, render_hooks
from homenode.cluster.slurm.scontrol import Job, is_asked_for
from homenode.cluster.slurm.slurm_nodes import (
    NodeShape,
    compress_hostlist,
    expand_hostlist,
    read_shapes,
)
from homenode.errors import NotKnownError, ParseError, ToolError, UsageError, exclusive, requires
from homenode.findings import add_gaps
from homenode.safe.input_files import read_input
from homenode.text import plural, shorten_list
from homenode.vm.sources import load_host

_MAX_LINES = 8
"""Number of changed lines on the screen of check."""


def audit(arguments: SlurmAuditArguments) -> None:
    """Print findings on jobs that are away from their GPUs."""
    if arguments.hooks is not None:
        if arguments.records is not None or arguments.jobs_file is not None or arguments.jobs:
            raise exclusive("--hooks", "--jobs, --records or a job")
        _write_hooks(arguments.hooks, arguments.spool)
        return
    if arguments.spool != SPOOL:
        raise requires("--spool", "--hooks")
    order = None if arguments.gres is None else read_device_order(read_config(arguments.gres))
    if arguments.look and (arguments.records is not None or arguments.jobs_file is not None):
        raise exclusive("--look", "--jobs or --records", "--look reads running jobs")
    if arguments.records is not None and (
        arguments.jobs_file is not None or arguments.nodes_file is not None or arguments.host
    ):
        raise exclusive("--records", "--jobs, --nodes or --host")
    jobs: dict[str, str] = {}  # the job of each allocation
    with working("reading the jobs"):
        if arguments.records is not None:
            records = read_records(arguments.records, arguments.jobs, order)
            findings = judge_jobs(_add_judged(records, jobs))
        else:
            choice, not_checked = _choose_jobs(arguments.jobs, arguments.jobs_file)
            shapes = _read_shapes(arguments.jobs_file, arguments.nodes_file)
            machines = _read_machines(arguments.host)
            running = _build_running_allocations(
                choice, shapes, machines, order, look=arguments.look
            )
            findings = judge_jobs(
                _add_judged(running, jobs), [job for job in choice if job.unreadable is not None]
            )
            if jobs and arguments.jobs_file is not None and arguments.nodes_file is None:
                names = shorten_list({machine.host.name: None for machine in machines.values()}, 3)
                file = "--nodes FILE with `scontrol show node`"
                not_checked += (f"whether the nodes are as {names}: {file}",)
            findings = replace(findings, not_checked=(*findings.not_checked, *not_checked))
            if arguments.host or order is None:  # else gres.conf is the machine
                hosts = dict.fromkeys(machine.host for machine in machines.values())
                findings = add_gaps(findings, [gap for host in hosts for gap in host.gaps])
    if arguments.explain:
        not_local = {
            finding.subject
            for finding in findings.findings
            if finding.id in ("job-gpu-far", "job-unjudged")
        }
        local = ", ".join(subject for subject in jobs if subject not in not_local)
        if local:
            findings = replace(findings, checked=(*findings.checked, f"local: {local}"))
    subject = plural(len(set(jobs.values())), "GPU job")
    print_findings(findings, subject, as_json=arguments.json, explain=arguments.explain)
    exit_by(findings)


def _add_judged(
    allocations: Iterable[JobAllocation], judged_jobs: dict[str, str]
) -> Iterator[JobAllocation]:
    """Pass allocations on, and add the subjects and jobs that can be judged."""
    for allocation in allocations:
        if allocation.gpus and allocation.unknown is None:
            judged_jobs[allocation.subject] = allocation.job
        yield allocation


def _choose_jobs(
    names: tuple[str, ...], jobs_file: Path | None
) -> tuple[tuple[Job, ...], tuple[str, ...]]:
    """Return the jobs, and unknown facts of their listing. Raises UsageError if a requested job
    does not run."""
    open_questions: tuple[str, ...] = ()
    if jobs_file is None:
        jobs = ask_jobs(names)
    else:
        text = _read_text(jobs_file, "jobs as Slurm lists them")
        jobs = read_jobs(text, str(jobs_file), names)
        if not is_json(text):
            open_questions = ("jobs that a comment in this text could hide: use squeue --json",)
    for name in names:
        matches = [job for job in jobs if is_asked_for(job, (name,))]
        # An array may run in part.
        if matches and not any(job.runs or job.unreadable is not None for job in matches):
            states = ", ".join(sorted({job.state for job in matches}))
            hint = "only records of ended jobs remain: read them with --records DIR"
            waits = any(job.state == "PENDING" for job in matches)
            raise UsageError(f"job {name}: not running ({states})", hint=None if waits else hint)
    return jobs, open_questions


def _read_shapes(jobs_file: Path | None, nodes_file: Path | None) -> Mapping[str, NodeShape | None]:
    if nodes_file is not None:
        return read_shapes(_read_text(nodes_file, "nodes as Slurm lists them"), str(nodes_file))
    return ask_shapes() if jobs_file is None else {}


def _build_running_allocations(
    jobs: Sequence[Job],
    shapes: Mapping[str, NodeShape | None],
    machines: Mapping[str, NodeMachine],
    order: DeviceOrder | None,
    *,
    look: bool,
) -> Iterator[JobAllocation]:
    """Yield the allocation of each running job on each of its nodes."""
    shares = [share for job in jobs if job.runs for share in job.shares]
    sliced_nodes = {share.node for share in shares if share.gpus.sliced}
    for job in jobs:
        for share in job.shares if job.runs else ():
            shape = shapes.get(share.node)
            if shape is None and share.node in shapes:
                reason = "the listing of nodes has it twice, or without sockets, cores and threads"
                yield unknown_allocation(
                    job, share.node, reason, "--nodes FILE with each node once"
                )
                continue
            machine = machines.get(share.node, machines.get(""))
            sliced = share.gpus.sliced
            numbers = None if order is None else order.list_numbers(share.node, sliced=sliced)
            is_sliced = share.node in sliced_nodes or (shape is not None and shape.has_slices)
            if numbers is None and is_sliced and not sliced:
                numbers = ()  # whole GPUs beside slices are not numbered by address
            allocation = build_allocation(job, share, machine, shape, numbers)
            if allocation.unknown is not None and order is not None and shape is not None:
                allocation = build_gres_allocation(job, share, shape, order) or allocation
            if look and allocation.gpus:
                allocation = add_tasks(allocation, _read_tasks(job, share.node))
            yield allocation


def _read_tasks(job: Job, node: str) -> tuple[TaskRecord, ...]:
    """Return the job's processes on a node; none, with a note, if no step can be started."""
    try:
        return ask_tasks(job, node)
    except (ParseError, ToolError) as error:
        note(f"not looked at: job {job.id} on {node}: {error.message}")
        return ()


def _read_machines(hosts: tuple[str, ...]) -> Mapping[str, NodeMachine]:
    """Return the machines by node name; "" is that of all other nodes. Each source is read once."""
    sources: dict[str, str | None] = {} if hosts else {"": None}
    for option in hosts:
        names, separator, source = option.partition("=")
        # A path may hold a "=", but a list of nodes holds no "/".
        if not separator or "/" in names:
            names, source = "", option
        if not source or (separator and not names):
            raise UsageError(f"--host {option}: expected NODES=SOURCE, found no '='")
        for name in expand_hostlist(names, f"--host {option}") if names else ("",):
            if sources.setdefault(name, source) != source:
                hosts_text = f"expected one host, found {sources[name]} and {source}"
                raise UsageError(f"--host of {name or 'all other nodes'}: {hosts_text}")
    read = {source: node_machine(load_host(source)) for source in dict.fromkeys(sources.values())}
    if not hosts and not read[None].gpus:
        return {}  # a login node does not stand for nodes with GPUs
    return {name: read[source] for name, source in sources.items()}


def _read_text(path: Path, subject: str) -> str:
    return read_input(path, subject).decode("utf-8", "replace")


def _write_hooks(directory: Path, spool: str) -> None:
    text_of_path = {directory / name: text for name, text in render_hooks(spool).items()}
    modes = {path: 0o644 if path.name == "README" else 0o755 for path in text_of_path}
    write_new_files(directory, text_of_path, modes)


def check(arguments: SlurmCheckArguments) -> None:
    """Print the faults of the files, and the corrections."""
    if arguments.gres == arguments.slurm:
        raise UsageError(
            f"{arguments.gres}: expected two files, gres.conf and slurm.conf, found one"
        )
    gres, slurm = read_config(arguments.gres), read_config(arguments.slurm)
    if is_slurm_conf(gres):
        gres, slurm = slurm, gres
    if is_slurm_conf(gres):
        raise UsageError(f"{gres.source}: expected gres.conf, found lines of slurm.conf")
    if arguments.gres.resolve() == arguments.slurm.resolve():
        raise UsageError(f"{gres.source}: expected two files, gres.conf and slurm.conf, found one")
    if not slurm.text.strip():
        raise NotKnownError(f"nothing was checked: {slurm.source} is empty")
    cgroup = None if arguments.cgroup is None else read_config(arguments.cgroup)
    if cgroup is not None and any(line.get("name", "nodename") for line in cgroup.lines):
        raise UsageError(f"--cgroup {cgroup.source}: expected cgroup.conf, found lines of nodes")
    nodes = () if arguments.nodes is None else expand_hostlist(arguments.nodes, "--nodes")
    host = load_host(arguments.host)
    findings = judge_files(
        gres, slurm, host, cgroup=cgroup, nodes=nodes, host_source=arguments.host
    )
    findings = add_gaps(findings, host.gaps)
    correction = correct(gres, slurm, host, nodes)
    shared = find_shared_lines(gres, slurm, host, nodes)
    for line, names in shared.items():
        place = f"{Path(line.line.source).name}:{line.line.first}"
        note(f"{place}: not corrected, since it is also about {compress_hostlist(names)}")
    before = {file.source: file.text for file in (*gres.files, *slurm.files)}
    if arguments.output is not None:
        # Standard input has no name.
        texts = {
            {"-": f"{kind}.conf"}.get(source, source): text
            for kind, config in (("gres", gres), ("slurm", slurm))
            for source, text in correction.items()
            if source in {file.source for file in config.files}
        }
        _write(arguments.output, texts, (arguments.gres, arguments.slurm))
        fix = f"install the files in {arguments.output}, then restart slurmctld and the slurmds"
        findings = replace(
            findings,
            findings=tuple(
                replace(found, fix=fix, command="")
                if found.command.endswith(" -o DIR") and not shared
                else found
                for found in findings.findings
            ),
        )
    sources = [finding.source for finding in findings.findings if finding.is_bad]
    files = {Path(re.split("[,:]", source)[0]).name for source in sources}
    name = "Slurm's files" if len(files) > 1 else next(iter(files), Path(gres.source).name)
    print_findings(findings, name, as_json=arguments.json, explain=arguments.explain)
    if not arguments.json:
        _print_lines(before, correction, explain=arguments.explain)
    exit_by(findings)


def _print_lines(before: Mapping[str, str], after: Mapping[str, str], *, explain: bool) -> None:
    """Print the lines that change, at most _MAX_LINES; explain: the whole diff of each file."""
    changed_sources = [source for source in after if after[source] != before[source]]
    lines: list[str] = []
    for source in changed_sources:
        old, new = before[source], after[source]
        if explain:
            say("")
            print_diff(old.encode(), new.encode(), source, f"{source} (corrected)")
        diff = unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm="")
        lines += [line for line in diff if not line.startswith(("---", "+++", "@@"))]
    if lines and not explain:
        count = min(len(lines), _MAX_LINES)
        while count < len(lines) and lines[count - 1].startswith("-") and count > 1:
            count -= 1  # a removed line stays with the line that replaces it
        say("\n".join(("", *lines[:count])))
        if len(lines) > count:
            say(f"{plural(len(lines) - count, 'more line')} (--explain)")


def _write(directory: Path, texts: Mapping[str, str], named_paths: tuple[Path, ...]) -> None:
    """Write all files without overwriting any; named_paths: the two files that the user named."""
    text_of_path: dict[Path, str] = {}
    for source, text in texts.items():
        path = directory / _shorten_path(Path(source), named_paths)
        if path in text_of_path:
            raise UsageError(f"{path}: expected files of different names, found one")
        text_of_path[path] = text
    write_new_files(directory, text_of_path)


def _shorten_path(path: Path, named_paths: tuple[Path, ...]) -> Path:
    """Return the path relative to the directory of the including file; never one outside."""
    for file in named_paths:
        if path not in named_paths and path.resolve().is_relative_to(file.parent.resolve()):
            return path.resolve().relative_to(file.parent.resolve())
    return Path(path.name)
