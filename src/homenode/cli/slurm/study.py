"""homenode slurm study: run the study of bindings and queues on a cluster. [I/O]"""

import secrets
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homenode.cli.progress import shown_progress
from homenode.cli.terminal import note, say
from homenode.errors import HostError, UsageError

if TYPE_CHECKING:
    from homenode.measure.bindings.experiments import Shape, Study, StudyOptions
    from homenode.measure.bindings.folder import StudyFolder
    from homenode.measure.progress import Progress

_MOST_SHOWN = 20
_OPTIONS = {"node_list": "nodelist", "shapes": "shared", "app_folder": "app in another folder"}
MAX_TIME = 1e6
GRACE_POLLS = 18
"""So many looks long a job's files may take: 90 s; NFS shows a folder's new files within 60."""


def study(
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="The study's folder, on a file system "
            "that all nodes share. An existing study is continued.",
        ),
    ],
    partition_exclusive: Annotated[
        str | None, typer.Option(metavar="P", help="Whole nodes. Default: the cluster's default.")
    ] = None,
    partition_shared: Annotated[
        str | None, typer.Option(metavar="Q", help="Parts of nodes. Default: as for whole ones.")
    ] = None,
    nodes: Annotated[int, typer.Option(metavar="N", help="Cluster nodes to study.")] = 1,
    rounds: Annotated[
        int,
        typer.Option(metavar="N", help="Jobs of each kind on each node, in mixed order."),
    ] = 3,
    nodelist: Annotated[
        str | None, typer.Option(metavar="A,B", help="These cluster nodes, instead of N.")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="What every node is: a snapshot, a host.toml, a shipped host's name. "
            "Default: jobs capture each.",
        ),
    ] = None,
    numa: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="NUMA nodes to bind to. Default: all with CPUs."),
    ] = None,
    shared: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GPUSxJOBS",
            help="Shape of shared jobs, and how many at once. Repeatable. Default: 1x4 and 2x2.",
        ),
    ] = None,
    mig: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GRES",
            help="Also one MIG slice of this gres (gpu:1g.10gb) in each of four jobs. Repeatable.",
        ),
    ] = None,
    cpus_per_gpu: Annotated[
        int | None, typer.Option(metavar="N", help="CPUs of shared jobs. Default: an even share.")
    ] = None,
    tests: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEST",
            help="Tests of homenode bench; none = no CPU test. "
            "Repeatable. Default: stream and mem-latency.",
        ),
    ] = None,
    app: Annotated[
        str | None, typer.Option(metavar="CMD", help="Your own program, under each binding.")
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(metavar="REGEX", help="Finds its figure: the group of the last match."),
    ] = None,
    lower_is_better: Annotated[
        bool, typer.Option("--lower-is-better", help="The figure is a time.")
    ] = False,
    between_nodes: Annotated[
        bool, typer.Option("--between-nodes", help="Also all-reduce on and between the nodes.")
    ] = False,
    mpi: Annotated[
        str | None, typer.Option(metavar="TYPE", help="For srun between nodes (pmix, pmi2).")
    ] = None,
    minutes: Annotated[int, typer.Option(metavar="M", help="Time limit of a job.")] = 30,
    account: Annotated[str | None, typer.Option(metavar="A", help="For sbatch.")] = None,
    qos: Annotated[str | None, typer.Option(metavar="Q", help="For sbatch.")] = None,
    reservation: Annotated[str | None, typer.Option(metavar="R", help="For sbatch.")] = None,
    setup: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A shell file that jobs read first (module load …)."),
    ] = None,
    wait: Annotated[
        float | None,
        typer.Option(metavar="MINUTES", help="Wait no longer than this; the jobs go on."),
    ] = None,
    patience: Annotated[
        float,
        typer.Option(
            metavar="MINUTES",
            help="Wait this long where every job waits for a drained "
            "node or a hold, or the controller is silent.",
        ),
    ] = 10.0,
    poll: Annotated[float, typer.Option(metavar="SECONDS", help="Between looks at the queue.")] = 5,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the scripts, and submit nothing.")
    ] = False,
) -> None:
    """Measure how bandwidth depends on binding, and what shared jobs get, on real nodes.

    Writes sbatch scripts into DIR/jobs, submits them and waits; runs are in DIR/results.
    Run it again with the same DIR to go on after any interruption: what is done stays done,
    what failed is submitted again.

    Examples:
      homenode slurm study -o /shared/study --dry-run
      homenode slurm study -o /shared/study --partition-exclusive gpu --partition-shared gpu-shared
    """
    from homenode.measure.bindings.experiments import StudyOptions, check_options

    options = StudyOptions(
        partition_exclusive=partition_exclusive,
        partition_shared=partition_shared,
        nodes=nodes,
        rounds=rounds,
        node_list=_node_list(nodelist),
        numa=_numbers(numa),
        shapes=_shapes(shared, mig or []),
        cpus_per_gpu=cpus_per_gpu,
        minutes=minutes,
        account=account,
        qos=qos,
        reservation=reservation,
        tests=StudyOptions().tests if tests is None else tuple(t for t in tests if t != "none"),
        app=_words(app),
        app_folder=str(Path.cwd()) if app else ".",
        metric=metric,
        lower_is_better=lower_is_better,
        between_nodes=between_nodes,
        mpi=mpi,
        homenode=_program(),
        setup=None if setup is None else str(Path(setup).resolve()),
    )
    check_options(options)
    for option, value in (("--patience", patience), ("--poll", poll), ("--wait", wait or 0.0)):
        if not 0 <= value <= MAX_TIME or (option == "--poll" and value == 0):
            raise UsageError(f"{option} {value:g}: expected a time above 0, {MAX_TIME:g} at most")
    if not 1 <= minutes <= MAX_TIME:
        raise UsageError(f"--minutes {minutes}: expected 1 to {MAX_TIME:g}")
    if setup is not None and not Path(setup).is_file():
        raise UsageError(f"--setup {setup}: expected a file that jobs can read, found none")
    from homenode.measure.bindings.folder import StudyFolder

    folder = StudyFolder(output)
    try:
        if dry_run and host is not None and not folder.has_journal and not _has_slurm():
            _write_described(folder, options, host)
            return
        made, is_new = _made(folder, options, host)
        if dry_run:
            _note_scripts(folder, made)
            return
        _go(folder, made, is_new, (poll, patience * 60, None if wait is None else wait * 60))
    finally:
        folder.close()


def _has_slurm() -> bool:
    from homenode.measure.bindings import queue_client

    try:
        queue_client.nodes()
    except HostError:
        return False
    return True


def _write_described(folder: "StudyFolder", options: "StudyOptions", host: str) -> None:
    """The scripts alone, for reading: a study begins where Slurm can be asked."""
    from homenode.measure.bindings.experiments import NO_PARTITION
    from homenode.measure.bindings.run import made_study
    from homenode.measure.bindings.scripts import script_name
    from homenode.sources import load_host

    described = load_host(host)
    made = made_study(options, host, described, secrets.token_hex(3), is_described=True)
    folder.write_dry(made)
    for one in made.everything():
        say(str(folder.path / script_name(one)))
    names = ", ".join(dict.fromkeys(node.name for node in (*made.whole, *made.shared)))
    note(f"no answer from Slurm: nodes {names} are taken from --host and --nodelist")
    if options.partition_exclusive is None:
        note(f"{NO_PARTITION} stands for the partition (--partition-exclusive)")
    note("nothing was submitted; on the cluster the same command without --dry-run begins a study")


def _made(folder: "StudyFolder", options: "StudyOptions", host: str | None) -> "tuple[Study, bool]":
    """The study that is there, or a new one; whether it is new."""
    from homenode.measure.bindings.experiments import check_options
    from homenode.measure.bindings.run import made_study
    from homenode.sources import load_host

    if folder.has_journal:
        found = folder.load()
        if others := _others(found, options, host):
            raise UsageError(
                f"{folder.path}: expected the options of the study that is there, found others: "
                f"{', '.join(others)}",
                hint="leave them out to continue it, or choose another folder with -o",
            )
        return found, False
    from homenode.measure.bindings.queue_client import account

    # Written down: a script that is submitted by hand asks for the same.
    options = replace(options, account=options.account or account())
    check_options(options)
    described = None if host is None else load_host(host)
    made = made_study(options, host, described, secrets.token_hex(3))
    return folder.create(made, described), True


def _others(found: "Study", options: "StudyOptions", host: str | None) -> list[str]:
    """Options that the user gave and that are not those of the study that is there.

    Not which homenode continues it, nor what the environment said.
    """
    unsaid = type(options)()
    passed = {"homenode", *(["account"] if options.account is None else [])}
    names = [name for name in unsaid.__dataclass_fields__ if name not in passed]
    said = [name for name in names if getattr(options, name) != getattr(unsaid, name)]
    if not said and host is None:
        return []
    different = [name for name in names if getattr(options, name) != getattr(found.options, name)]
    return [f"--{_OPTIONS.get(name, name.replace('_', '-'))}" for name in different] + (
        ["--host"] if host != found.host else []
    )


def _go(
    folder: "StudyFolder", made: "Study", is_new: bool, times: tuple[float, float, float | None]
) -> None:
    from homenode.measure.bindings.folder import read_study
    from homenode.measure.bindings.run import SlurmQueue
    from homenode.measure.experiment import Patience, run_tasks

    poll_s, blocked_s, wait_s = times
    queue = SlurmQueue(folder, made, grace_s=GRACE_POLLS * poll_s)
    patience = Patience(poll_s, blocked_s, wait_s)
    note(f"study {made.id} in {folder.path}")
    with shown_progress("jobs") as observe:
        try:
            progress = run_tasks(queue, observe, patience, retry=not is_new)
        except KeyboardInterrupt:
            note("the jobs go on without homenode; the same command continues the study")
            raise
    found = read_study(folder.path, queue.study)
    for gap in found.gaps[:_MOST_SHOWN]:
        note(f"open: {gap}")
    if len(found.gaps) > _MOST_SHOWN:
        note(f"{len(found.gaps) - _MOST_SHOWN} more open (homenode slurm report --all)")
    note(f"{len(found.jobs)} runs below {folder.path / 'results'}")
    for said in dict.fromkeys(job.replayed for job in found.jobs if job.replayed):
        note(f"REPLAYED: {said}")
    _end(folder, progress, found.unmeasured)


def _end(
    folder: "StudyFolder", progress: "Progress", unmeasured: tuple[tuple[str, str], ...]
) -> None:
    """Say what is missing and why; exit 1 where anything is."""
    from homenode.report.progress_text import missing_lines

    missing = progress.missing()
    total = len(progress.tasks)
    note(f"{total - len(missing) - len(unmeasured)} of {total} jobs have results")
    for line in missing_lines(missing):
        note(f"missing: {line}")
    for name, lacking in unmeasured[:_MOST_SHOWN]:
        note(f"not measured: {name}: {lacking}")
    if len(unmeasured) > _MOST_SHOWN:
        note(f"not measured: {len(unmeasured) - _MOST_SHOWN} more jobs")
    note(f"next: homenode slurm report {shlex.quote(str(folder.path))}")
    note(f"as a page: homenode slurm report {shlex.quote(str(folder.path))} -o study.html")
    if missing:
        note("the same command continues what is missing")
    if unmeasured:
        note("to measure them again: a new folder, when the reason above is gone")
    if missing or unmeasured:
        raise SystemExit(1)


def _note_scripts(folder: "StudyFolder", made: "Study") -> None:
    from homenode.measure.bindings.scripts import script_name

    for one in made.everything():
        say(str(folder.path / script_name(one)))
    if not made.experiments:
        note("these look at the nodes; the others follow from what they find (or say --host)")
    note("nothing was submitted; the same command without --dry-run goes on from here")


def _program() -> str:
    """homenode as the nodes find it: as it was called, or next to this Python, on the shared file
    system."""
    for path in (Path(sys.argv[0]), Path(sys.executable).with_name("homenode")):
        if path.name in ("homenode", "homenode.pyz") and path.exists():
            return str(path.absolute())
    return "homenode"


def _words(app: str | None) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(app or ""))
    except ValueError as error:
        raise UsageError(f"--app: expected a command, found: {error}") from None


def _node_list(text: str | None) -> tuple[str, ...]:
    from homenode.tools.slurm_hostlist import expand_hostlist

    return () if text is None else expand_hostlist(text, "--nodelist")


def _numbers(text: str | None) -> tuple[int, ...] | None:
    from homenode.cpuset import CpuSet

    return None if text is None else tuple(int(n) for n in CpuSet.parse(text, "--numa"))


def _shapes(shared: list[str] | None, mig: list[str]) -> "tuple[Shape, ...]":
    from homenode.measure.bindings.experiments import Shape, StudyOptions

    shapes = [] if shared is not None else list(StudyOptions().shapes)
    for text in shared or []:
        gpus, is_pair, jobs = text.partition("x")
        if not (is_pair and gpus.isdecimal() and jobs.isdecimal() and len(text) < 12):
            raise UsageError(f"--shared {text[:20]}: expected GPUSxJOBS such as 1x4")
        shapes.append(Shape(int(gpus), int(jobs)))
    return (*shapes, *(Shape(1, 4, gres) for gres in mig))
