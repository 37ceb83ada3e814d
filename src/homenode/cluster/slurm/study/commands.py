"""homenode slurm study and report: the study of bindings and queues on a cluster. [I/O]"""

import secrets
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from msgspec.structs import replace

from homenode import __version__
from homenode.cli.bench import show_progress
from homenode.cli.terminal import check_can_write, make_console, note, print_json, say, write_text
from homenode.cluster.arguments import (
    SharedJobShape,
    SlurmReportArguments,
    SlurmStudyArguments,
    StudyOptions,
)
from homenode.cluster.slurm import client
from homenode.cluster.slurm.slurm_nodes import expand_hostlist
from homenode.cluster.slurm.study.directory import StudyDirectory, read_sources, read_study
from homenode.cluster.slurm.study.experiments import (
    NO_PARTITION,
    Study,
    check_options,
    count_longest_chain,
)
from homenode.cluster.slurm.study.report import build_study_report
from homenode.cluster.slurm.study.run import SlurmQueue, make_study
from homenode.cluster.slurm.study.text import (
    build_study_page,
    build_study_summary,
    format_slurm_study,
)
from homenode.cpuset import CpuSet
from homenode.errors import FINDINGS, HostError, InputError, UsageError, exclusive
from homenode.formats import encode
from homenode.measure.experiment import Progress, WaitPolicy, run_tasks
from homenode.show.html import render_page
from homenode.show.trial_text import format_missing
from homenode.text import command_line, format_duration, plural
from homenode.vm.sources import load_host

_MAX_SHOWN = 20
_OPTIONS = {
    "node_list": "nodelist",
    "shapes": "shared",
    "app_directory": "app in another directory",
}
GRACE_POLLS = 18
"""Polls until a job's files must exist: 90 s; NFS shows a directory's new files within 60 s."""


def study(arguments: SlurmStudyArguments) -> None:
    options = _parse_options(arguments)
    check_options(options)
    if options.setup is not None and not Path(options.setup).is_file():
        raise UsageError(f"--setup: {arguments.study.setup}: no such file")
    if arguments.output.is_file():
        raise UsageError(f"-o {arguments.output}: a file, not a directory")
    directory = StudyDirectory(arguments.output)
    try:
        if (
            arguments.dry_run
            and arguments.host is not None
            and not directory.has_journal
            and not _has_slurm()
        ):
            _write_described(directory, options, arguments.host)
            return
        study_directory, is_new = _open_study(directory, options, arguments.host)
        if arguments.dry_run:
            _say_scripts(directory, study_directory)
            if not study_directory.experiments:
                note("these capture the nodes; the other jobs follow from that, or from --host")
            note("the same command without --dry-run submits them")
            return
        patience = WaitPolicy(arguments.poll, arguments.patience * 60)
        _run_study(directory, study_directory, is_new, patience)
    finally:
        directory.close()


def _parse_options(arguments: SlurmStudyArguments) -> StudyOptions:
    """Return the study's options with parsed values. Raises UsageError."""
    setup, app = arguments.study.setup, _split_words(arguments.app)
    return replace(
        arguments.study,
        node_list=()
        if arguments.nodelist is None
        else expand_hostlist(arguments.nodelist, "--nodelist"),
        numa=None
        if arguments.numa is None
        else tuple(map(int, CpuSet.parse(arguments.numa, "--numa"))),
        shapes=_parse_shapes(arguments.shared, arguments.mig),
        tests=tuple(test for test in arguments.study.tests if test != "none"),
        app=app,
        app_directory=str(Path.cwd()) if arguments.app else ".",
        homenode=_find_program(),
        setup=None if setup is None else str(Path(setup).resolve()),
    )


def _has_slurm() -> bool:
    try:
        client.ask_nodes()
    except HostError:
        return False
    return True


def _write_described(directory: StudyDirectory, options: StudyOptions, host: str) -> None:
    """Write only the scripts, for reading: a study can begin only with Slurm."""
    described = load_host(host)
    described_study = make_study(options, host, described, secrets.token_hex(3), is_described=True)
    directory.write_dry_run(described_study)
    _say_scripts(directory, described_study)
    names = ", ".join(
        dict.fromkeys(node.name for node in (*described_study.exclusive, *described_study.shared))
    )
    note(f"no answer from Slurm: nodes from --host and --nodelist: {names}")
    if options.partition_exclusive is None:
        note(f"replace {NO_PARTITION} by the partition (--partition-exclusive)")
    note("on the cluster the same command without --dry-run begins a study")


def _open_study(
    directory: StudyDirectory, options: StudyOptions, host: str | None
) -> tuple[Study, bool]:
    """Return the existing study or a new one, and whether it is new."""
    if directory.has_journal:
        existing = directory.load()
        if differing := _list_differing_options(existing, options, host):
            raise UsageError(
                f"{directory.path}: expected the options of the study that is there, found others: "
                f"{', '.join(differing)}",
                hint="omit them to continue it, or choose another directory with -o",
            )
        return existing, False

    # Stored, so that a script that is submitted by hand requests the same.
    options = replace(options, account=options.account or client.account_name())
    check_options(options)
    described_host = None if host is None else load_host(host)
    new = make_study(options, host, described_host, secrets.token_hex(3))
    return directory.create(new, described_host), True


def _list_differing_options(existing: Study, options: StudyOptions, host: str | None) -> list[str]:
    """Return the user's options that differ from those of the study."""
    unsaid = type(options)()
    passed_options = {"homenode", *(["account"] if options.account is None else [])}
    names = [name for name in unsaid.__struct_fields__ if name not in passed_options]
    set_names = [name for name in names if getattr(options, name) != getattr(unsaid, name)]
    if not set_names and host is None:
        return []
    different = [
        name for name in names if getattr(options, name) != getattr(existing.options, name)
    ]
    return [f"--{_OPTIONS.get(name, name.replace('_', '-'))}" for name in different] + (
        ["--host"] if host != existing.host else []
    )


def _run_study(directory: StudyDirectory, study: Study, is_new: bool, patience: WaitPolicy) -> None:
    queue = SlurmQueue(directory, study, grace_s=GRACE_POLLS * patience.poll_s)
    note(f"study {study.id} in {directory.path}")
    with show_progress("jobs") as observe:
        try:
            progress = run_tasks(queue, observe, patience, retry=not is_new)
        except KeyboardInterrupt:
            text = "the jobs go on without homenode; the same command continues the study"
            raise KeyboardInterrupt(text) from None
    sources = read_study(directory.path, queue.study)
    for gap in sources.gaps[:_MAX_SHOWN]:
        note(f"open: {gap}")
    if len(sources.gaps) > _MAX_SHOWN:
        note(f"{len(sources.gaps) - _MAX_SHOWN} more open (homenode slurm report --explain)")
    note(f"{plural(len(sources.jobs), 'run')} below {directory.path / 'results'}")
    for remark in dict.fromkeys(job.replay_notice for job in sources.jobs if job.replay_notice):
        note(f"REPLAYED: {remark}")
    _end(directory, progress, sources.unmeasured)


def _end(
    directory: StudyDirectory, progress: Progress, unmeasured: tuple[tuple[str, str], ...]
) -> None:
    """Print the missing jobs with reasons; exit 1 if there are any."""
    missing = progress.list_missing()
    total = len(progress.tasks)
    note(f"{total - len(missing) - len(unmeasured)} of {plural(total, 'job')} have results")
    for line in format_missing(missing):
        note(f"missing: {line}")
    for name, lacking in unmeasured[:_MAX_SHOWN]:
        note(f"not measured: {name}: {lacking}")
    if len(unmeasured) > _MAX_SHOWN:
        note(f"not measured: {plural(len(unmeasured) - _MAX_SHOWN, 'more job')}")
    note(f"next: homenode slurm report {shlex.quote(str(directory.path))}")
    if missing:
        note("run the same command again to continue")
    if missing or unmeasured:
        raise SystemExit(FINDINGS)


def _say_scripts(directory: StudyDirectory, study: Study) -> None:
    jobs = plural(len(study.all_experiments()), "job")
    limit = f"up to {plural(study.options.minutes, 'minute')} each"
    say(f"wrote {directory.path / 'jobs'}: {jobs} of {limit}, none submitted")
    if study.experiments:
        seconds = 60 * study.options.minutes * count_longest_chain(study.all_experiments())
        note(
            f"takes at most {format_duration(seconds)}, if no job waits behind those of other users"
        )
    for shape in study.options.shapes:
        fitting = {(node.gpus or 0) // shape.gpus: node.name for node in study.shared}
        count = min(filter(None, fitting), default=shape.jobs)
        if shape.gres == "gpu" and count < shape.jobs:
            at_once = f"{fitting[count]} runs {plural(count, 'job')} of that size at once"
            note(f"warning: --shared {shape.gpus}x{shape.jobs}: {at_once}")


def _find_program() -> str:
    """Return homenode's path for the nodes: as it was called, or next to this Python."""
    for path in (Path(sys.argv[0]), Path(sys.executable).with_name("homenode")):
        if path.name == "homenode" and path.exists():
            return str(path.absolute())
    return "homenode"


def _split_words(app: str | None) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(app or ""))
    except ValueError as error:
        raise UsageError(f"--app: not a command: {error}") from None


def _parse_shapes(shared_names: Sequence[str], mig: Sequence[str]) -> tuple[SharedJobShape, ...]:
    shapes = [] if shared_names else list(StudyOptions().shapes)
    for text in shared_names:
        gpus, is_pair, jobs = text.partition("x")
        if not (is_pair and gpus.isdecimal() and jobs.isdecimal() and len(text) < 12):
            raise UsageError(f"--shared {text[:20]}: expected GPUSxJOBS such as 1x4")
        shapes.append(SharedJobShape(int(gpus), int(jobs)))
    return (*shapes, *(SharedJobShape(1, 4, gres) for gres in mig))


def report(arguments: SlurmReportArguments) -> None:
    """Print the study, or write its page."""
    output = arguments.output
    if output is not None and output.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"-o {output}: expected a name that ends in .html")
    if output is not None and arguments.json:
        raise exclusive("--output", "--json")
    check_can_write(output)
    source = ", ".join(map(str, arguments.directories))
    sources = read_sources(arguments.directories)
    if not sources.jobs and not sources.missing:
        scripts = [path for path in arguments.directories if any(path.glob("jobs/*.sbatch"))]
        command = command_line("homenode", "slurm", "study", "-o", *scripts[:1])
        reason = "; ".join(map(str, sources.gaps[:3])) or "no jobs of a study in it"
        raise InputError(
            f"{source}: {'scripts of a dry run' if scripts else reason}",
            hint=f"{command} submits them, with the options of the dry run"
            if scripts
            else "homenode slurm study makes them; logs are named exclusive_… and shared_…",
        )
    result = build_study_report(source, sources)
    if output is not None:
        when = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, homenode {__version__}"
        write_text(output, render_page(build_study_page(result, when)))
        note(f"wrote {output}")
    elif arguments.json:
        print_json(encode("slurm-report", result))
    elif not arguments.explain:
        words = ("homenode", "slurm", "report", *arguments.directories, "--explain")
        make_console().print(build_study_summary(result, command_line(*words)))
    else:
        make_console().print(format_slurm_study(result))
