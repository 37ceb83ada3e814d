"""Arguments of the commands of slurm. [I/O]"""

from pathlib import Path
from typing import Annotated

from msgspec import Struct

from homenode.cli.arguments import ExplainOption, HostOption, JsonOption
from homenode.option import Arg, Flag, Opt

SPOOL = "/var/spool/homenode-slurm"
"""Directory on a node in which the hooks store their records of jobs."""

MAX_NODES = 4096
MAX_ROUNDS = 100
MAX_CPUS = 65536
MAX_TIME = 1e6


class SharedJobShape(Struct, frozen=True):
    """A job of the shared queue."""

    gpus: int  # GPUs of one job
    jobs: int  # at once on a node
    gres: str = "gpu"

    @property
    def name(self) -> str:
        """Return the shape's name in file names.

        >>> SharedJobShape(2, 2).name, SharedJobShape(1, 4, "gpu:1g.10gb").name
        ('shared-2gpu', 'shared-1slice-1g.10gb')
        """
        if self.gres == "gpu":
            return f"shared-{self.gpus}gpu"
        return f"shared-{self.gpus}slice-{self.gres.rpartition(':')[2]}"


class StudyOptions(Struct, frozen=True):
    """Options of a study. None: the cluster's or the host's own.

    Options:
      partition_exclusive: Partition for whole-node jobs. Default: the cluster's default.
      partition_shared: Partition for shared jobs. Default: as for whole-node jobs.
      nodes: Number of cluster nodes to study: nodes of both partitions first, idle before busy;
        more nodes than the cluster has are rejected.
      rounds: Number of jobs of each kind on each node.
      cpus_per_gpu: CPUs per GPU of shared jobs. Default: an even share of the node's.
      minutes: Time limit of each job.
      account: Account that sbatch is given. Default: SBATCH_ACCOUNT; other variables of sbatch do
        not reach the jobs.
      qos: Quality of service that sbatch is given.
      reservation: Reservation that sbatch is given.
      tests: Tests of homenode bench besides the copies; none omits them; may be repeated. Default:
        stream, mem-latency.
      metric: Regular expression that finds the program's result: the group of the last match.
      lower_is_better: The result is a time in seconds. Default: a rate.
      between_nodes: Measure also all-reduce on and between the nodes (all_reduce_perf on the PATH,
        built with MPI).
      mpi: MPI plugin of srun for jobs between nodes: pmix, pmi2. Default: the cluster's.
      setup: A shell file that each job reads first, with lines such as module load cuda.
    """

    partition_exclusive: Annotated[str | None, Opt("--partition-exclusive", "P")] = None
    partition_shared: Annotated[str | None, Opt("--partition-shared", "Q")] = None
    nodes: Annotated[int, Opt("--nodes", "N", ge=1, le=MAX_NODES)] = 1
    # a recommendation is measured from three on
    rounds: Annotated[int, Opt("--rounds", "N", ge=1, le=MAX_ROUNDS)] = 3
    node_list: tuple[str, ...] = ()
    numa: tuple[int, ...] | None = None  # NUMA nodes to bind to
    shapes: tuple[SharedJobShape, ...] = (SharedJobShape(1, 4), SharedJobShape(2, 2))
    cpus_per_gpu: Annotated[
        int | None, Opt("--cpus-per-gpu", "N", ge=1, le=MAX_CPUS, rare=True)
    ] = None
    minutes: Annotated[int, Opt("--minutes", "M", ge=1, le=MAX_TIME, rare=True)] = 30
    account: Annotated[str | None, Opt("--account", "A", rare=True)] = None
    qos: Annotated[str | None, Opt("--qos", "Q", rare=True)] = None
    reservation: Annotated[str | None, Opt("--reservation", "R", rare=True)] = None
    tests: Annotated[tuple[str, ...], Opt("--tests", "TEST")] = ("stream", "mem-latency")
    app: tuple[str, ...] = ()  # words of a command, which runs in app_directory
    app_directory: str = "."
    metric: Annotated[str | None, Opt("--metric", "REGEX", rare=True)] = None
    lower_is_better: Annotated[bool, Flag("--lower-is-better", rare=True)] = False
    between_nodes: Annotated[bool, Flag("--between-nodes")] = False
    mpi: Annotated[str | None, Opt("--mpi", "TYPE", rare=True)] = None
    homenode: str = "homenode"  # as the nodes find it
    setup: Annotated[str | None, Opt("--setup", "FILE", rare=True)] = None


class SlurmAuditArguments(Struct, frozen=True, kw_only=True):
    """Check whether the GPUs of running jobs are on the nodes of their CPUs and memory.

    Options:
      jobs: Jobs to check: 4711, 4711_3, 4711+1. Default: all running jobs.
      host: The machine of these nodes (gpu[01-36]=SOURCE), or of all others; a source as for show;
        may be repeated. Default: this machine, if it has GPUs.
      jobs_file: Read jobs from this file: squeue --all --json of 22.05 and newer, or scontrol show
        job -d; - for standard input. Default: read from Slurm.
      nodes_file: Read nodes from this file: scontrol show node, as text or with --json. Default:
        read from Slurm; with --jobs, from the machines.
      gres: The cluster's gres.conf, for GPU numbers if its lines name the files in another order,
        or with MIG slices (MultipleFiles=); also with --records. Default: by PCI address, as
        AutoDetect numbers them.
      look: Check also the memory policy of the jobs' processes: a step of one task in each GPU job
        reads /proc; for your own jobs, or as root. Default: CPUs and GPUs alone.
      records: Check ended jobs by their records; needs no host.
      hooks: Write the scripts that keep records, and stop.
      spool: With --hooks: directory on each node for the records.
      explain: Print each finding separately with its source, and the jobs that are local.

    Examples:
      homenode slurm audit
      homenode slurm audit 4711 --host node.tar.gz
    """

    jobs: Annotated[tuple[str, ...], Arg("[JOBID...]")] = ()
    host: Annotated[tuple[str, ...], Opt("--host", "[NODES=]SOURCE")] = ()
    jobs_file: Annotated[Path | None, Opt("--jobs", "FILE")] = None
    nodes_file: Annotated[Path | None, Opt("--nodes", "FILE")] = None
    gres: Annotated[Path | None, Opt("--gres", "FILE")] = None
    look: Annotated[bool, Flag("--look")] = False
    records: Annotated[Path | None, Opt("--records", "DIR")] = None
    hooks: Annotated[Path | None, Opt("--hooks", "DIR")] = None
    spool: Annotated[str, Opt("--spool", "DIR")] = SPOOL
    explain: Annotated[bool, Flag("--explain")] = False
    json: JsonOption = False


class SlurmCheckArguments(Struct, frozen=True, kw_only=True):
    """Check gres.conf and slurm.conf against a node's GPUs, and show the corrections.

    Options:
      gres: The cluster's gres.conf, - for standard input; the two files may be passed in any order.
      slurm: The cluster's slurm.conf.
      nodes: Check only these nodes (gpu[01-36]); each is like --host. Default: all with GPUs.
      cgroup: Also check this cgroup.conf. Default: not checked.
      output: Write both corrected files, and the files that they include, to this directory.

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
    explain: ExplainOption = False
    json: JsonOption = False


class SlurmStudyArguments(Struct, frozen=True, kw_only=True):
    """Measure how bandwidth depends on binding, and the locality of shared jobs, on real nodes. It
    writes sbatch scripts into DIR/jobs, submits them and waits; runs are in DIR/results. After an
    interruption, run it again with the same DIR: finished jobs stay finished, failed jobs are
    submitted again.

    Options:
      output: The study's directory, on a file system that all nodes share.
      nodelist: Study these nodes, also as gpu[01-04], each in the partitions that have it.
      host: Host source of every node: a snapshot, a description, a shipped host; capture jobs are
        then omitted. Default: each node is captured.
      numa: NUMA nodes to bind to. Default: all with CPUs and memory.
      shared: GPUs of a shared job x number of jobs at once; may be repeated. Default: 1x4 and 2x2.
      mig: Also submit jobs of one MIG slice each, such as gpu:1g.10gb; may be repeated.
      app: Also run this program under each binding, in the current directory; split as by a shell,
        started without a shell.
      patience: Time limit while every remaining job is blocked (a drained node, a hold), or the
        controller does not answer.
      poll: Time between two polls of the queue.
      dry_run: Write the scripts and submit nothing. With --host also without a running Slurm: nodes
        are then as described, named by --nodelist.

    Examples:
      homenode slurm study -o /shared/study --dry-run
      homenode slurm study -o /shared/study --partition-exclusive gpu --partition-shared gpu-shared
    """

    output: Annotated[Path, Opt("--output -o", "DIR")]
    study: StudyOptions = StudyOptions()
    nodelist: Annotated[str | None, Opt("--nodelist", "A,B")] = None
    host: Annotated[str | None, Opt("--host", "SOURCE", complete="host_sources")] = None
    numa: Annotated[str | None, Opt("--numa", "LIST", rare=True)] = None
    shared: Annotated[tuple[str, ...], Opt("--shared", "GPUSxJOBS")] = ()
    mig: Annotated[tuple[str, ...], Opt("--mig", "GRES", rare=True)] = ()
    app: Annotated[str | None, Opt("--app", "CMD", rare=True)] = None
    patience: Annotated[float, Opt("--patience", "MINUTES", ge=0, le=MAX_TIME, rare=True)] = 10.0
    poll: Annotated[float, Opt("--poll", "SECONDS", ge=0.001, le=MAX_TIME, rare=True)] = 5
    dry_run: Annotated[bool, Flag("--dry-run -n")] = False


class SlurmReportArguments(Struct, frozen=True, kw_only=True):
    """Report a study: the recommended queue for each kind of work. It reads directories of homenode
    slurm study, also while it runs; directories that homenode import wrote; and logs of nvbandwidth
    named exclusive_… and shared_….

    Options:
      directories: Directories of homenode slurm study, finished or not; directories that homenode
        import wrote; logs of nvbandwidth whose names contain exclusive or shared.
      explain: Print also the evidence, a map of each node, the results of bindings and shared jobs
        with intervals, each job's locality, and everything that is unknown.
      output: Write the report as one page, FILE.html, without external resources.

    Examples:
      homenode slurm report study
      homenode slurm report study -o study.html
    """

    directories: Annotated[tuple[Path, ...], Arg("DIR...")]
    explain: Annotated[bool, Flag("--explain")] = False
    output: Annotated[Path | None, Opt("--output -o", "FILE")] = None
    json: JsonOption = False
