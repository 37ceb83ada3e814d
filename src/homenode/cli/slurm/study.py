"""homenode slurm study: run the study of bindings and queues on a cluster. [I/O]"""

import secrets
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from homenode.cli.arguments.slurm import SlurmStudyArguments
from homenode.cli.bench import shown_progress
from homenode.cli.terminal import note, say
from homenode.cluster.bindings import queue_client
from homenode.cluster.bindings.experiments import (
    NO_PARTITION,
    Shape,
    Study,
    StudyOptions,
    check_options,
)
from homenode.cluster.bindings.folder import StudyFolder, read_study
from homenode.cluster.bindings.queue_client import account
from homenode.cluster.bindings.run import SlurmQueue, made_study
from homenode.cluster.bindings.scripts import script_name
from homenode.cpuset import CpuSet
from homenode.errors import FINDINGS, HostError, UsageError
from homenode.machine.tools.slurm_nodes import expand_hostlist
from homenode.measure.experiment import Patience, run_tasks
from homenode.show.trial_text import missing_lines
from homenode.vm.sources import load_host

if TYPE_CHECKING:
    from homenode.measure.progress import Progress

_MOST_SHOWN = 20
_OPTIONS = {"node_list": "nodelist", "shapes": "shared", "app_folder": "app in another folder"}
MAX_TIME = 1e6
GRACE_POLLS = 18
"""So many looks long a job's files may take: 90 s; NFS shows a folder's new files within 60."""


def study(asked: SlurmStudyArguments) -> None:
    """Begin or continue the study."""

    options = StudyOptions(
        partition_exclusive=asked.partition_exclusive,
        partition_shared=asked.partition_shared,
        nodes=asked.nodes,
        rounds=asked.rounds,
        node_list=_node_list(asked.nodelist),
        numa=_numbers(asked.numa),
        shapes=_shapes(asked.shared, asked.mig),
        cpus_per_gpu=asked.cpus_per_gpu,
        minutes=asked.minutes,
        account=asked.account,
        qos=asked.qos,
        reservation=asked.reservation,
        tests=tuple(test for test in asked.tests if test != "none")
        if asked.tests
        else StudyOptions().tests,
        app=_words(asked.app),
        app_folder=str(Path.cwd()) if asked.app else ".",
        metric=asked.metric,
        lower_is_better=asked.lower_is_better,
        between_nodes=asked.between_nodes,
        mpi=asked.mpi,
        homenode=_program(),
        setup=None if asked.setup is None else str(Path(asked.setup).resolve()),
    )
    check_options(options)
    for option, value in (
        ("--patience", asked.patience),
        ("--poll", asked.poll),
        ("--wait", asked.wait or 0.0),
    ):
        if not 0 <= value <= MAX_TIME or (option == "--poll" and value == 0):
            raise UsageError(f"{option} {value:g}: expected a time above 0, {MAX_TIME:g} at most")
    if not 1 <= asked.minutes <= MAX_TIME:
        raise UsageError(f"--minutes {asked.minutes}: expected 1 to {MAX_TIME:g}")
    if asked.setup is not None and not Path(asked.setup).is_file():
        raise UsageError(f"--setup {asked.setup}: expected a file that jobs can read, found none")

    folder = StudyFolder(asked.output)
    try:
        if asked.dry_run and asked.host is not None and not folder.has_journal and not _has_slurm():
            _write_described(folder, options, asked.host)
            return
        made, is_new = _made(folder, options, asked.host)
        if asked.dry_run:
            _note_scripts(folder, made)
            return
        _go(
            folder,
            made,
            is_new,
            (asked.poll, asked.patience * 60, None if asked.wait is None else asked.wait * 60),
        )
    finally:
        folder.close()


def _has_slurm() -> bool:

    try:
        queue_client.nodes()
    except HostError:
        return False
    return True


def _write_described(folder: StudyFolder, options: StudyOptions, host: str) -> None:
    """The scripts alone, for reading: a study begins where Slurm can be asked."""

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


def _made(folder: StudyFolder, options: StudyOptions, host: str | None) -> tuple[Study, bool]:
    """The study that is there, or a new one; whether it is new."""

    if folder.has_journal:
        found = folder.load()
        if others := _others(found, options, host):
            raise UsageError(
                f"{folder.path}: expected the options of the study that is there, found others: "
                f"{', '.join(others)}",
                hint="leave them out to continue it, or choose another folder with -o",
            )
        return found, False

    # Written down: a script that is submitted by hand asks for the same.
    options = replace(options, account=options.account or account())
    check_options(options)
    described = None if host is None else load_host(host)
    made = made_study(options, host, described, secrets.token_hex(3))
    return folder.create(made, described), True


def _others(found: Study, options: StudyOptions, host: str | None) -> list[str]:
    """Options that the user gave and that are not those of the study that is there.

    Not which homenode continues it, nor what the environment said.
    """
    unsaid = type(options)()
    passed = {"homenode", *(["account"] if options.account is None else [])}
    names = [name for name in unsaid.__struct_fields__ if name not in passed]
    said = [name for name in names if getattr(options, name) != getattr(unsaid, name)]
    if not said and host is None:
        return []
    different = [name for name in names if getattr(options, name) != getattr(found.options, name)]
    return [f"--{_OPTIONS.get(name, name.replace('_', '-'))}" for name in different] + (
        ["--host"] if host != found.host else []
    )


def _go(
    folder: StudyFolder, made: Study, is_new: bool, times: tuple[float, float, float | None]
) -> None:

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
    folder: StudyFolder, progress: "Progress", unmeasured: tuple[tuple[str, str], ...]
) -> None:
    """Say what is missing and why; exit 1 where anything is."""

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
        raise SystemExit(FINDINGS)


def _note_scripts(folder: StudyFolder, made: Study) -> None:

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

    return () if text is None else expand_hostlist(text, "--nodelist")


def _numbers(text: str | None) -> tuple[int, ...] | None:

    return None if text is None else tuple(int(n) for n in CpuSet.parse(text, "--numa"))


def _shapes(shared: Sequence[str], mig: Sequence[str]) -> tuple[Shape, ...]:

    shapes = [] if shared else list(StudyOptions().shapes)
    for text in shared:
        gpus, is_pair, jobs = text.partition("x")
        if not (is_pair and gpus.isdecimal() and jobs.isdecimal() and len(text) < 12):
            raise UsageError(f"--shared {text[:20]}: expected GPUSxJOBS such as 1x4")
        shapes.append(Shape(int(gpus), int(jobs)))
    return (*shapes, *(Shape(1, 4, gres) for gres in mig))
