"""Scripts: a study's jobs as sbatch scripts that a person can read, change and submit by hand.

Everything that came from outside is quoted (shlex), or was checked to be a name (experiments.py).
"""

import shlex
from collections.abc import Iterator

from msgspec.structs import astuple

from homenode.cluster.bindings.experiments import Experiment, Mode
from homenode.cluster.slurm.options import StudyOptions
from homenode.measure.results.model import SequentialPlan

COPIES = ("gpu-bandwidth", "gpu-peer")
"""Tests of homenode bench that every job runs."""

_HERE = (
    "task=${SLURM_ARRAY_TASK_ID:-0}",
    "# An array's last task has the array's own number, which stands for all of them.",
    "job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$task}",
    "job=${job:-$SLURM_JOB_ID}",
    "attempt=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}",
    "here=$PWD/raw/$experiment/task-$task/$attempt",
    'mkdir -p "$here" || exit 3',
    """trap 'echo "$?" >"$here/exit"' EXIT""",
    'date +%s >"$here/started"',
)
_ABOUT = {
    Mode.LOOK: "what {nodes} is: nothing is measured.",
    Mode.EXCLUSIVE: "the whole of {nodes}, bound to NUMA node {numa}: every GPU from there.",
    Mode.ALONE: "one job of the shared queue on {nodes}, as Slurm places and binds it.",
    Mode.TOGETHER: "{jobs} jobs of the shared queue on {nodes} that measure at the same time.",
    Mode.COLLECTIVE: "all-reduce on each node, on each pair of neighbours and on all of them.",
}


def job_name(study: str, experiment: str) -> str:
    """How the queue shows whose job it is."""
    return f"hn-{study}-{experiment}"


def script_name(experiment: Experiment) -> str:
    """The script's file, relative to the study's folder."""
    return f"jobs/{experiment.id}.sbatch"


def script_of(
    experiment: Experiment,
    options: StudyOptions,
    study: str,
    sequence: SequentialPlan | None = None,
) -> str:
    """The text of a job's script. It runs in the study's folder."""
    about = _ABOUT[experiment.mode].format(
        nodes=", ".join(experiment.nodes), numa=experiment.numa, jobs=experiment.jobs
    )
    lines = [
        "#!/bin/bash",
        f"# {experiment.id}: {about}",
        "# Written by homenode slurm study. By hand, in the study's folder:",
        f"#   sbatch {script_name(experiment)}",
        *(f"#SBATCH {option}" for option in _options(experiment, options, study)),
        "",
        *_body(experiment, options, study, sequence),
    ]
    return "\n".join(lines) + "\n"


def _options(experiment: Experiment, options: StudyOptions, study: str) -> Iterator[str]:
    yield f"--job-name={job_name(study, experiment.id)}"
    if experiment.partition is not None:
        yield f"--partition={experiment.partition}"
    for name in ("account", "qos", "reservation"):
        value = getattr(options, name)
        if value is not None:
            yield f"--{name}={value}"
    yield f"--nodes={len(experiment.nodes)}"
    yield f"--ntasks={len(experiment.nodes)}"
    yield f"--nodelist={','.join(experiment.nodes)}"
    if experiment.gpus:
        kind = "" if experiment.gpu_type is None else f":{experiment.gpu_type}"
        yield f"--gres={experiment.gres}{kind}:{experiment.gpus}"
    if experiment.cpus is None:
        yield "--exclusive"
        yield "--mem=0"
    else:
        yield f"--cpus-per-task={experiment.cpus}"
        yield f"--mem={experiment.memory_mib}M"
    if experiment.jobs > 1:
        yield f"--array=0-{experiment.jobs - 1}"
    yield f"--time={options.minutes}"
    # A node that fails takes the job with it; Slurm starts it again, in a folder of its own.
    yield "--requeue"
    yield "--open-mode=append"
    yield "--output=log/%x-%j.txt"


def _body(
    experiment: Experiment, options: StudyOptions, study: str, sequence: SequentialPlan | None
) -> Iterator[str]:
    if options.setup is not None:
        yield f". {shlex.quote(options.setup)}"
        yield ""
    # Not before: files of modules use what is not set.
    yield "set -u"
    yield "export LC_ALL=C TZ=UTC"
    yield "unset SLURM_TIME_FORMAT"
    yield f"experiment={experiment.id}"
    if experiment.mode is not Mode.COLLECTIVE:
        yield f"homenode={shlex.quote(options.homenode)}"
    yield from _HERE
    if experiment.mode is Mode.COLLECTIVE:
        yield from _collective(experiment, options)
    elif experiment.mode is Mode.LOOK:
        yield '"$homenode" capture -o "$here/host.tar.gz" || exit 3'
    else:
        yield from _measuring(experiment, options, study, sequence)
    yield 'date +%s >"$here/ended"'
    yield "# Last of all, so that whoever finds it finds everything."
    yield ': >"$here/done"'


def _measuring(
    experiment: Experiment, options: StudyOptions, study: str, sequence: SequentialPlan | None
) -> Iterator[str]:
    yield ""
    yield "# What Slurm gave this job, and how many others run here."
    yield 'scontrol show job -d "$job" >"$here/job.txt" 2>"$here/job.txt.err"'
    yield 'squeue --noheader --nodelist="${SLURMD_NODENAME:-$(hostname -s)}" --states=RUNNING \\'
    yield '  --format=%A >"$here/others.txt" 2>"$here/others.txt.err"'
    if experiment.jobs > 1:
        yield from _meeting(experiment.jobs)
    yield ""
    yield "results=$PWD/results"
    bench = " \\\n  ".join(
        ('"$homenode" bench', *_bench_words(experiment, options, study, sequence))
    )
    yield f"(cd {shlex.quote(options.app_folder)} && exec {bench})" if options.app else bench
    yield "code=$?"
    yield "# 1: measured, with findings."
    yield "((code < 2)) || exit $code"


def _bench_words(
    experiment: Experiment, options: StudyOptions, study: str, sequence: SequentialPlan | None
) -> Iterator[str]:
    """Words of the command that measures. The job is the boot: each is placed anew."""
    yield '"$experiment-task$task-$attempt" --results "$results"'
    yield "--vantage job --quick"
    yield f'--experiment {study} --block {experiment.block or 0} --boot "$attempt"'
    if sequence is not None:
        yield f"--sequence {','.join(map(str, astuple(sequence)))}"
    yield f"--arrangement {shlex.quote(experiment.arrangement)}"
    yield f"--tests {','.join((*COPIES, *(t for t in options.tests if t not in COPIES)))}"
    if experiment.numa is not None:
        yield f"--nodes {experiment.numa}"
    if options.app:
        yield "--repeat 1"
        yield f"--app {shlex.quote(shlex.join(options.app))}"
        yield f"--metric {shlex.quote(options.metric or '')}"
        yield "--lower" if options.lower_is_better else "--higher-is-better"
        yield f"--app-timeout {60 * options.minutes}"
    yield '>"$here/bench.txt" 2>"$here/bench.txt.err"'


def _meeting(jobs: int) -> Iterator[str]:
    """Jobs that measure together start together: each says that it is there, and waits for the
    rest. One that goes on without them says so too, and one that Slurm started again does not count
    those of the first time."""
    yield ""
    yield "# Start with the others of this array, or go on without them after a while."
    yield (
        "meeting=raw/$experiment/meeting-"
        "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}.${SLURM_RESTART_COUNT:-0}"
    )
    yield 'mkdir -p "$meeting"'
    yield ': >"$meeting/$task"'
    yield "for ((waited = 0; waited < ${meet_seconds:-120}; waited++)); do"
    yield """  count=$(find "$meeting" -type f ! -name '*.gone' | wc -l)"""
    yield f"  ((count >= {jobs})) && break"
    yield "  sleep 1"
    yield "done"
    yield f'((count >= {jobs})) || mv "$meeting/$task" "$meeting/$task.gone"'
    yield f'echo "$count of {jobs}" >"$here/met"'


def _collective(experiment: Experiment, options: StudyOptions) -> Iterator[str]:
    """The neighbours are those of a ring: each node is in two pairs, so that a slow link and a
    slow node can be distinguished."""
    names = experiment.nodes
    ring = list(zip(names, (*names[1:], names[0]), strict=True)) if len(names) > 2 else [names]
    mpi = f" --mpi={options.mpi}" if options.mpi else ""
    yield 'scontrol show job -d "$SLURM_JOB_ID" >"$here/job.txt"'
    yield ""
    yield "# all_reduce FILE COUNT NODES: one task on each of the nodes, with all of its GPUs."
    yield "all_reduce() {"
    yield f'  srun{mpi} --nodes="$2" --ntasks="$2" --ntasks-per-node=1 --cpu-bind=none \\'
    yield '    --nodelist="$3" \\'
    yield f"    all_reduce_perf -b 8 -e 1G -f 2 -g {experiment.gpus} \\"
    yield '    >"$here/$1.txt" 2>"$here/$1.err" </dev/null ||'
    yield '    echo "exit status $?" >>"$here/$1.err"'
    yield '  [ -s "$here/$1.err" ] || rm -f "$here/$1.err"'
    yield "}"
    for name in names:
        yield f"all_reduce node-{name} 1 {name}"
    for a, b in ring:
        yield f"all_reduce pair-{a}+{b} 2 {a},{b}"
    if len(names) > 2:
        yield f"all_reduce all {len(names)} {','.join(names)}"
