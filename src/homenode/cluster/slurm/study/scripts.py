"""Scripts: a study's jobs as sbatch scripts that a person can read, change and submit by hand.

study.sbatch.j2 is their text. Everything that came from outside is quoted there, or was checked to
be a name (experiments.py).
"""

import shlex

from jinja2 import Environment, StrictUndefined, select_autoescape

from homenode.cluster.slurm.options import StudyOptions
from homenode.cluster.slurm.study.experiments import Experiment, Mode
from homenode.package_data import package_text

COPIES = ("gpu-bandwidth", "gpu-peer")
"""Tests of homenode bench that every job runs."""

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


def script_of(experiment: Experiment, options: StudyOptions, study: str) -> str:
    """The text of a job's script. It runs in the study's folder.

    The neighbours of all-reduces are those of a ring: each node is in two pairs, so that the
    figures of a slow link and of a slow node differ.
    """
    names = experiment.nodes
    environment = Environment(
        autoescape=select_autoescape(default_for_string=False),  # a shell reads it
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = shlex.quote
    return environment.from_string(
        package_text("cluster", "slurm", "study", "study.sbatch.j2")
    ).render(
        one=experiment,
        about=_ABOUT[experiment.mode].format(
            nodes=", ".join(names), numa=experiment.numa, jobs=experiment.jobs
        ),
        file=script_name(experiment),
        job_name=job_name(study, experiment.id),
        options=options,
        study=study,
        tests=(*COPIES, *(test for test in options.tests if test not in COPIES)),
        app=shlex.join(options.app),
        ring=list(zip(names, (*names[1:], names[0]), strict=True)) if len(names) > 2 else [names],
    )
