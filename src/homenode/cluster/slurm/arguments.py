"""What is asked of the commands of slurm. [I/O]"""

from pathlib import Path
from typing import Annotated

from msgspec import Struct

from homenode.cli.arguments import HostOption, JsonOption
from homenode.cluster.slurm.options import MAX_TIME, SPOOL, StudyOptions
from homenode.opt import Arg, Flag, Opt


class SlurmAuditArguments(Struct, frozen=True, kw_only=True):
    """Check whether the GPUs of running jobs are on the nodes of their CPUs and memory.

    Examples:
      homenode slurm audit
      homenode slurm audit 4711 --host node.tar.gz
    """

    jobs: Annotated[tuple[str, ...], Arg("JOBID")] = ()
    host: Annotated[tuple[str, ...], Opt("--host", "[NODES=]SOURCE")] = ()
    jobs_file: Annotated[Path | None, Opt("--jobs", "FILE")] = None
    nodes_file: Annotated[Path | None, Opt("--nodes", "FILE")] = None
    gres: Annotated[Path | None, Opt("--gres", "FILE")] = None
    look: Annotated[bool, Flag("--look")] = False
    records: Annotated[Path | None, Opt("--records", "DIR")] = None
    hooks: Annotated[Path | None, Opt("--hooks", "DIR")] = None
    spool: Annotated[str, Opt("--spool", "DIR")] = SPOOL
    show_all: Annotated[bool, Flag("--all")] = False
    json: JsonOption = False


class SlurmCheckArguments(Struct, frozen=True, kw_only=True):
    """Check gres.conf and slurm.conf against a node's GPUs, and show what they should say.

    Examples:
      homenode slurm check gres.conf slurm.conf --host node.tar.gz
      homenode slurm check gres.conf slurm.conf -o corrected
    """

    gres: Annotated[Path, Arg("gres.conf")]
    slurm: Annotated[Path, Arg("slurm.conf")]
    host: HostOption = None
    nodes: Annotated[str | None, Opt("--nodes", "NODES")] = None
    cgroup: Annotated[Path | None, Opt("--cgroup", "FILE")] = None
    output: Annotated[Path | None, Opt("--output -o", "DIR")] = None
    json: JsonOption = False


class SlurmStudyArguments(Struct, frozen=True, kw_only=True):
    """Measure how bandwidth depends on binding, and what shared jobs get, on real nodes.

    Writes sbatch scripts into DIR/jobs, submits them and waits; runs are in DIR/results.
    Run it again with the same DIR to go on after any interruption: what is done stays done,
    what failed is submitted again.

    Examples:
      homenode slurm study -o /shared/study --dry-run
      homenode slurm study -o /shared/study --partition-exclusive gpu --partition-shared gpu-shared
    """

    output: Annotated[Path, Opt("--output -o", "DIR")]
    study: StudyOptions = StudyOptions()
    nodelist: Annotated[str | None, Opt("--nodelist", "A,B")] = None
    host: Annotated[str | None, Opt("--host", "SOURCE")] = None
    numa: Annotated[str | None, Opt("--numa", "LIST", rare=True)] = None
    shared: Annotated[tuple[str, ...], Opt("--shared", "GPUSxJOBS")] = ()
    mig: Annotated[tuple[str, ...], Opt("--mig", "GRES", rare=True)] = ()
    app: Annotated[str | None, Opt("--app", "CMD", rare=True)] = None
    wait: Annotated[float | None, Opt("--wait", "MINUTES", ge=0, le=MAX_TIME, rare=True)] = None
    patience: Annotated[float, Opt("--patience", "MINUTES", ge=0, le=MAX_TIME, rare=True)] = 10.0
    poll: Annotated[float, Opt("--poll", "SECONDS", ge=0.001, le=MAX_TIME, rare=True)] = 5
    dry_run: Annotated[bool, Flag("--dry-run -n")] = False


class SlurmReportArguments(Struct, frozen=True, kw_only=True):
    """Report a study: maps of each node, shared and whole nodes, each job's locality, which queue.

    Reads folders of homenode slurm study, also while it runs; folders that homenode import
    wrote; and logs of nvbandwidth named exclusive_… and shared_….

    Examples:
      homenode slurm report study
      homenode slurm report study -o study.html
    """

    folders: Annotated[tuple[Path, ...], Arg("DIR...")]
    everything: Annotated[bool, Flag("--all")] = False
    output: Annotated[Path | None, Opt("--output -o", "FILE")] = None
    json: JsonOption = False
