"""Scripts: a study's jobs as sbatch scripts that a person can read, change and submit by hand.

Everything that came from outside is quoted (shlex), or was checked to be a name (experiments.py).
"""

import shlex
from collections.abc import Iterator

from homenode.measure.bindings.experiments import Experiment, Mode, StudyWishes
from homenode.wording import plural

MEASURE = "jobs/measure.sh"
"""Beside the scripts; each of them reads it."""

_HERE = (
    "here=raw/$experiment/task-0/$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}",
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
    """By which the queue tells whose job it is."""
    return f"hn-{study}-{experiment}"


def script_name(experiment: Experiment) -> str:
    """The script's file, relative to the study's folder."""
    return f"jobs/{experiment.id}.sbatch"


def arrangement_of(experiment: Experiment) -> str:
    """How its jobs are bound and share their node, for the runs that they measure."""
    if experiment.mode is Mode.EXCLUSIVE:
        return f"exclusive, bound to node {experiment.numa}"
    what = (
        plural(experiment.gpus, "GPU") if experiment.gres == "gpu" else f"{experiment.gres} slice"
    )
    company = "alone" if experiment.jobs == 1 else f"{experiment.jobs} at once"
    return f"shared, {what} a job, {company}"


def script_of(experiment: Experiment, wishes: StudyWishes, study: str) -> str:
    """The text of a job's script. It runs in the study's folder."""
    about = _ABOUT[experiment.mode].format(
        nodes=", ".join(experiment.nodes), numa=experiment.numa, jobs=experiment.jobs
    )
    lines = [
        "#!/bin/bash",
        f"# {experiment.id}: {about}",
        "# Written by homenode slurm study. By hand, in the study's folder:",
        f"#   sbatch {script_name(experiment)}",
        *(f"#SBATCH {option}" for option in _options(experiment, wishes, study)),
        "",
        *_body(experiment, wishes),
    ]
    return "\n".join(lines) + "\n"


def _options(experiment: Experiment, wishes: StudyWishes, study: str) -> Iterator[str]:
    yield f"--job-name={job_name(study, experiment.id)}"
    if experiment.partition is not None:
        yield f"--partition={experiment.partition}"
    for name in ("account", "qos", "reservation"):
        value = getattr(wishes, name)
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
    yield f"--time={wishes.minutes}"
    # A node that fails takes the job with it; Slurm starts it again, in a folder of its own.
    yield "--requeue"
    yield "--open-mode=append"
    yield "--output=log/%x-%j.txt"


def _body(experiment: Experiment, wishes: StudyWishes) -> Iterator[str]:
    if wishes.setup is not None:
        yield f". {shlex.quote(wishes.setup)}"
        yield ""
    # Not before: files of modules use what is not set.
    yield "set -u"
    yield f"experiment={experiment.id}"
    if experiment.mode is Mode.LOOK:
        yield f"homenode={shlex.quote(wishes.homenode)}"
        yield from _HERE
        yield '"$homenode" capture -o "$here/host.tar.gz" || exit 3'
        yield ': >"$here/done"'
    elif experiment.mode is Mode.COLLECTIVE:
        yield from _collective(experiment, wishes)
    else:
        yield f"homenode={shlex.quote(wishes.homenode)}"
        numa = experiment.numa
        on = "" if numa is None else f"numactl --cpunodebind={numa} --membind={numa}"
        yield f"together={experiment.jobs}"
        yield f"bind=({on})"
        yield f"arrangement={shlex.quote(arrangement_of(experiment))}"
        yield f"tests=({shlex.join(wishes.tests)})"
        yield f"app=({shlex.join(wishes.app)})"
        if wishes.app:
            yield f"app_folder={shlex.quote(wishes.app_folder)}"
        yield ""
        yield f"# shellcheck source={MEASURE}"
        yield f". {MEASURE}"


def _collective(experiment: Experiment, wishes: StudyWishes) -> Iterator[str]:
    """The neighbours are those of a ring: each node is in two pairs, so that a slow link and a
    slow node can be told apart."""
    names = experiment.nodes
    ring = list(zip(names, (*names[1:], names[0]), strict=True)) if len(names) > 2 else [names]
    mpi = f" --mpi={wishes.mpi}" if wishes.mpi else ""
    yield from _HERE
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
    yield 'date +%s >"$here/ended"'
    yield ': >"$here/done"'
