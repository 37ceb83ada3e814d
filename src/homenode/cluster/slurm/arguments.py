"""Arguments of the commands of slurm. [I/O]"""

from pathlib import Path
from typing import Annotated

from msgspec import Struct

from homenode.cli.arguments import ExplainOption, HostOption, JsonOption
from homenode.cluster.slurm.options import MAX_TIME, SPOOL, StudyOptions
from homenode.option import Arg, Flag, Opt


class SlurmAuditArguments(Struct, frozen=True, kw_only=True):
    """Check whether the GPUs of running jobs are on the nodes of their CPUs and memory.

    Options:
      jobs: Jobs to check: 4711, 4711_3, 4711+1. Default: all running jobs.
      host: The machine of these nodes (gpu[01-36]=SOURCE), or of all others; a source as for show;
        may be repeated. Default: this machine.
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

    jobs: Annotated[tuple[str, ...], Arg("JOBID")] = ()
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
    """Check gres.conf and slurm.conf against a node's GPUs, and show what they should say.

    Options:
      gres: The cluster's gres.conf; the order of the two files is free.
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
    """Measure how bandwidth depends on binding, and what shared jobs get, on real nodes.

    Writes sbatch scripts into DIR/jobs, submits them and waits; runs are in DIR/results.
    Run it again with the same DIR to go on after any interruption: what is done stays done,
    what failed is submitted again.

    Options:
      output: The study's directory, on a file system that all nodes share.
      nodelist: Study these nodes, also as gpu[01-04], each in the partitions that have it.
      host: Host source of every node: a snapshot, a description, a shipped host; look jobs are then
        omitted. Default: each node is captured.
      numa: NUMA nodes to bind to. Default: all with CPUs and memory.
      shared: GPUs of a shared job, and how many at once; may be repeated. Default: 1x4 and 2x2.
      mig: Also submit jobs of one MIG slice each, such as gpu:1g.10gb; may be repeated.
      app: Also run this program under each binding, in the directory that the command is started
        in; split as a shell would split it, started without a shell.
      wait: Time limit for the jobs. Default: no limit.
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
    wait: Annotated[float | None, Opt("--wait", "MINUTES", ge=0, le=MAX_TIME, rare=True)] = None
    patience: Annotated[float, Opt("--patience", "MINUTES", ge=0, le=MAX_TIME, rare=True)] = 10.0
    poll: Annotated[float, Opt("--poll", "SECONDS", ge=0.001, le=MAX_TIME, rare=True)] = 5
    dry_run: Annotated[bool, Flag("--dry-run -n")] = False


class SlurmReportArguments(Struct, frozen=True, kw_only=True):
    """Report a study: maps of each node, shared and whole nodes, each job's locality, which queue.

    Reads folders of homenode slurm study, also while it runs; folders that homenode import
    wrote; and logs of nvbandwidth named exclusive_… and shared_….

    Options:
      folders: Directories of homenode slurm study, finished or not; directories that homenode
        import wrote; logs of nvbandwidth whose names say exclusive or shared.
      everything: Print every map, job and unknown. Default: the first map, and all that differ.
      output: Write the report as one page, FILE.html, without external resources.

    Examples:
      homenode slurm report study
      homenode slurm report study -o study.html
    """

    folders: Annotated[tuple[Path, ...], Arg("DIR...")]
    everything: Annotated[bool, Flag("--all")] = False
    output: Annotated[Path | None, Opt("--output -o", "FILE")] = None
    json: JsonOption = False
