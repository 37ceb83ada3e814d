"""What is asked of the commands of slurm. [I/O]"""

from pathlib import Path
from typing import Annotated

from msgspec import Struct

from homenode.cli.arguments import HostOption, JsonOption
from homenode.cli.arguments.measure import SEQUENCE, SequenceArguments
from homenode.cli.command import Under
from homenode.cluster.slurm.options import MAX_TIME, SPOOL, MemoryBind, StudyOptions
from homenode.opt import Arg, Flag, Opt

TopoOption = Annotated[
    Path | None,
    Opt(
        "--topo",
        "FILE",
        "Output of nvidia-smi topo -m there: the GPUs' nodes, where the host gives none.",
    ),
]


class SlurmAuditArguments(Struct, frozen=True, kw_only=True):
    """Check whether the GPUs of running jobs are on the nodes of their CPUs and memory.

    Examples:
      homenode slurm audit
      homenode slurm audit 4711 --host node.tar.gz
    """

    jobs: Annotated[tuple[str, ...], Arg("JOBID", "Jobs to look at. Default: all that run.")] = ()
    host: Annotated[
        tuple[str, ...],
        Opt(
            "--host",
            "[NODES=]SOURCE",
            "The machine of these nodes (gpu[01-36]=SOURCE), or of all others; repeatable. "
            "Default: this machine.",
        ),
    ] = ()
    jobs_file: Annotated[
        Path | None,
        Opt(
            "--jobs",
            "FILE",
            "Read `squeue --json` or `scontrol show job -d` from here; - for standard input.",
        ),
    ] = None
    nodes_file: Annotated[
        Path | None, Opt("--nodes", "FILE", "Read `scontrol show node` from here.")
    ] = None
    gres: Annotated[
        Path | None,
        Opt(
            "--gres",
            "FILE",
            "The cluster's gres.conf: which GPU each of Slurm's numbers is. Default: numbers are "
            "by PCI address, as AutoDetect gives them.",
        ),
    ] = None
    look: Annotated[
        bool, Flag("--look", "Also the memory policy of their processes, by a step in each job.")
    ] = False
    records: Annotated[
        Path | None, Opt("--records", "DIR", "Look at jobs that ended, by the hooks' records.")
    ] = None
    hooks: Annotated[
        Path | None, Opt("--hooks", "DIR", "Write the Prolog, TaskProlog and Epilog that record.")
    ] = None
    spool: Annotated[str, Opt("--spool", "DIR", "With --hooks: where nodes keep the records.")] = (
        SPOOL
    )
    show_all: Annotated[bool, Flag("--all", "Also findings of severity info.")] = False
    json: JsonOption = False


class SlurmCheckArguments(Struct, frozen=True, kw_only=True):
    """Check gres.conf and slurm.conf against a node's GPUs, and show what they should say.

    Examples:
      homenode slurm check gres.conf slurm.conf --host node.tar.gz
      homenode slurm check gres.conf slurm.conf -o corrected
    """

    gres: Annotated[Path, Arg("gres.conf", "As the nodes have it.")]
    slurm: Annotated[Path, Arg("slurm.conf", "As the cluster has it.")]
    host: HostOption = None
    nodes: Annotated[
        str | None,
        Opt(
            "--nodes",
            "NODES",
            "Only these nodes (gpu[01-36]). Default: all with GPUs. The host stands for each.",
        ),
    ] = None
    topo: TopoOption = None
    cgroup: Annotated[Path | None, Opt("--cgroup", "FILE", "Also the cluster's cgroup.conf.")] = (
        None
    )
    slurm_version: Annotated[
        str | None,
        Opt(
            "--slurm-version",
            "VERSION",
            "Slurm's version (22.05.8), so that only what it knows is set. Default: unknown.",
        ),
    ] = None
    diff: Annotated[bool, Flag("--diff", "What would change in both files.", off="--no-diff")] = (
        True
    )
    show: Annotated[
        bool, Flag("--print", "Print both files as they should be, and no findings.")
    ] = False
    output: Annotated[
        Path | None, Opt("--output -o", "DIR", "Write both files as they should be to here.")
    ] = None
    json: JsonOption = False


class SlurmBindArguments(Struct, frozen=True, kw_only=True):
    """Print the srun flags that put each rank and its memory on its GPU's node.

    Examples:
      homenode slurm bind --tasks 8 --host hgx-h100 --explain
      homenode slurm bind --tasks 8 --flags
    """

    tasks: Annotated[int | None, Opt("--tasks", "N", "Tasks (ranks) on each node.")] = None
    host: HostOption = None
    gpus: Annotated[
        str | None,
        Opt("--gpus", "LIST", "GPUs of the job by number (0-3) or address. Default: all."),
    ] = None
    cores: Annotated[
        int | None, Opt("--cores", "N", "Cores of each task. Default: as many as all can have.")
    ] = None
    siblings: Annotated[bool, Flag("--siblings", "Also the other threads of these cores.")] = False
    memory: Annotated[
        MemoryBind, Opt("--memory", "NAME", "How memory is bound to the GPU's node.")
    ] = MemoryBind.STRICT
    node: Annotated[
        int | None, Opt("--node", "N", "Bind all tasks to this node, rather than to their GPUs'.")
    ] = None
    topo: TopoOption = None
    gres: Annotated[
        Path | None,
        Opt(
            "--gres",
            "FILE",
            "The cluster's gres.conf: Slurm's number of each GPU, where its lines name them in "
            "another order. Default: by PCI address, as AutoDetect gives them.",
        ),
    ] = None
    explain: Annotated[bool, Flag("--explain", "A table of the ranks, and why.")] = False
    flags: Annotated[bool, Flag("--flags", "Print srun's flags alone, on one line.")] = False
    wrapper: Annotated[
        Path | None,
        Opt("--wrapper", "FILE", "Write a script that binds each rank where it runs, and stop."),
    ] = None
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

    output: Annotated[
        Path,
        Opt(
            "--output -o",
            "DIR",
            "The study's folder, on a file system that all nodes share. An existing study is "
            "continued.",
        ),
    ]
    study: StudyOptions = StudyOptions()
    nodelist: Annotated[
        str | None, Opt("--nodelist", "A,B", "These cluster nodes, instead of N.")
    ] = None
    host: Annotated[
        str | None,
        Opt(
            "--host",
            "SOURCE",
            "What every node is: a snapshot, a host.toml, a shipped host's name. Default: jobs "
            "capture each.",
        ),
    ] = None
    numa: Annotated[
        str | None,
        Opt("--numa", "LIST", "NUMA nodes to bind to. Default: all with CPUs.", rare=True),
    ] = None
    shared: Annotated[
        tuple[str, ...],
        Opt(
            "--shared",
            "GPUSxJOBS",
            "Shape of shared jobs, and how many at once. Repeatable. Default: 1x4 and 2x2.",
        ),
    ] = ()
    mig: Annotated[
        tuple[str, ...],
        Opt(
            "--mig",
            "GRES",
            "Also one MIG slice of this gres (gpu:1g.10gb) in each of four jobs. Repeatable.",
            rare=True,
        ),
    ] = ()
    sequence: Annotated[SequenceArguments, Under(SEQUENCE, rare=True)] = SequenceArguments()
    app: Annotated[
        str | None, Opt("--app", "CMD", "Your own program, under each binding.", rare=True)
    ] = None
    wait: Annotated[
        float | None,
        Opt(
            "--wait",
            "MINUTES",
            "Wait no longer than this; the jobs go on.",
            ge=0,
            le=MAX_TIME,
            rare=True,
        ),
    ] = None
    patience: Annotated[
        float,
        Opt(
            "--patience",
            "MINUTES",
            "Wait this long where every job waits for a drained node or a hold, or the controller "
            "is silent.",
            ge=0,
            le=MAX_TIME,
            rare=True,
        ),
    ] = 10.0
    poll: Annotated[
        float,
        Opt("--poll", "SECONDS", "Between looks at the queue.", ge=0.001, le=MAX_TIME, rare=True),
    ] = 5
    dry_run: Annotated[bool, Flag("--dry-run -n", "Write the scripts, and submit nothing.")] = False


class SlurmReportArguments(Struct, frozen=True, kw_only=True):
    """Report a study: maps of each node, shared and whole nodes, each job's locality, which queue.

    Reads folders of homenode slurm study, also while it runs; folders that homenode import
    wrote; and logs of nvbandwidth named exclusive_… and shared_….

    Examples:
      homenode slurm report study
      homenode slurm report study -o study.html
    """

    folders: Annotated[
        tuple[Path, ...], Arg("DIR...", "Studies, results of homenode import, or logs.")
    ]
    everything: Annotated[bool, Flag("--all", "Every map, job and gap.")] = False
    output: Annotated[
        Path | None, Opt("--output -o", "FILE", "Write all of it as one page, FILE.html.")
    ] = None
    json: JsonOption = False
