"""Arguments of the commands of pool, kubevirt and slurm. [I/O]"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from msgspec import Struct

from homenode.cli.arguments import (
    AfterOption,
    ExplainOption,
    HostOption,
    JsonOption,
    PoolOption,
    ResultsOption,
)
from homenode.cli.command import IncludeFields
from homenode.errors import UsageError
from homenode.option import Arg, Flag, Opt, size_bytes
from homenode.units import GIB, parse_whole
from homenode.vm.plan_options import PciGranularity, PlanOptions

_OF_PLAN = (
    "layout objective vcpus memory_bytes page_bytes gpu_count with_nics policy balance max_nodes "
    "device_locality"
).split()


class PoolShowArguments(Struct, frozen=True, kw_only=True):
    """Show the free resources of each host, and the VMs that still fit.

    Options:
      sizes: Count how many VMs of this size fit; may be repeated. Without GPUs it needs vcpus and
        memory. Default: 1, 2, 4, 8 GPUs if a host has GPUs.

    Examples:
      homenode pool show --pool 'hgx-h100*40'
      homenode pool show --pool pool/ --size gpus=2,vcpus=24,memory=256GiB --json
    """

    pool: PoolOption
    sizes: Annotated[tuple[str, ...], Opt("--size", "gpus=N,vcpus=N,memory=SIZE")] = ()
    after: AfterOption = ()
    explain: ExplainOption = False
    json: JsonOption = False


class PoolPlaceArguments(Struct, frozen=True, kw_only=True):
    """Rank the hosts for a VM by its placement on each; plan for the best.

    Options:
      document: Definition of the VM (domain XML), or a file of qm or xl; - for standard input.
      among: Choose this host of the pool only; may be repeated, to choose among several. Default:
        all.
      output: Write the tuned definition to this file.
      save_plan: Write the plan to this file.

    Examples:
      homenode pool place gpu-vm.xml --pool pool/ --gpus 2 -o tuned.xml
      homenode pool place gpu-vm.xml --pool 'hgx-h100*40' --gpus 4 --after other-vm.json
    """

    document: Annotated[str, Arg("VM.xml")]
    pool: PoolOption
    options: Annotated[PlanOptions, IncludeFields(*_OF_PLAN)] = PlanOptions()
    results: ResultsOption = ()
    among: Annotated[tuple[str, ...], Opt("--on", "HOST")] = ()
    after: AfterOption = ()
    output: Annotated[Path | None, Opt("--output -o", "FILE")] = None
    save_plan: Annotated[Path | None, Opt("--save-plan", "PLAN.json")] = None
    explain: ExplainOption = False
    json: JsonOption = False


class PoolCaptureArguments(Struct, frozen=True, kw_only=True):
    """Read many hosts over ssh at once into a directory.

    Nothing is installed on the hosts. A host that fails is named; the same command later reads the
    missing hosts.

    Options:
      servers: Hosts to capture: [USER@]HOST[:PORT].
      hosts: A list: on each line [USER@]HOST[:PORT], then optionally name=NAME; # begins a comment.
        Other lines, and a second host with the same name, are reported and skipped.
      output: The directory to write captures to.
      jobs: Number of hosts read at the same time.
      timeout: Time limit for one host.
      again: Also read hosts that the directory already has.

    Examples:
      homenode pool capture gpu-1 root@gpu-2:2222 -o pool/
      homenode pool capture --hosts hosts.txt -o pool/ --again
    """

    servers: Annotated[tuple[str, ...], Arg("HOST...")] = ()
    hosts: Annotated[Path | None, Opt("--hosts", "FILE")] = None
    output: Annotated[Path, Opt("--output -o", "POOL/")]
    jobs: Annotated[int, Opt("--jobs", "N", ge=1, le=256)] = 16
    timeout: Annotated[float, Opt("--timeout", "SECONDS", ge=1)] = 120.0
    again: Annotated[bool, Flag("--again")] = False


class OnError(StrEnum):
    """Handling of a VM whose devices could not be placed: values of options and annotations."""

    FAIL = "fail"  # it does not start, and KubeVirt tries again
    PASSTHROUGH = "passthrough"  # it starts as KubeVirt made it


NATIVE_GATE = "PCINUMAAwareTopology"
"""KubeVirt's own placement of devices, Alpha in 1.8 and 1.9."""
NATIVE_SINCE = (1, 8)
TESTED_VERSIONS = ((1, 6), (1, 9))
"""The oldest and the newest KubeVirt that homenode was tested with."""
SIDECAR_IMAGE = "registry.example/homenode-sidecar:1"
"""An example of the name of the hook's image."""


class HookVersion(StrEnum):
    """Versions of the hook's protocol. v1alpha3 ends the sidecar with the VM."""

    V1ALPHA1 = "v1alpha1"
    V1ALPHA2 = "v1alpha2"
    V1ALPHA3 = "v1alpha3"


def parse_version(value: object) -> tuple[int, int] | None:
    """Return (major, minor) of a version such as v1.9.0, None for another text.

    >>> parse_version("v1.9.0"), parse_version("latest")
    ((1, 9), None)
    """
    parts = str(value or "").removeprefix("v").split(".")
    match [parse_whole(part, digits=5) for part in parts[:2]]:
        case [int(major), int(minor)]:
            return major, minor
    return None


def parse_whole_gib(text: str, option: str) -> int:
    """Return the GiB of a size. Raises UsageError for fractions."""
    suffix = "B" if text.endswith(("Ki", "Mi", "Gi", "Ti")) else ""  # as Kubernetes writes them
    gib, remainder = divmod(size_bytes(text + suffix, option), GIB)
    if remainder or not gib:
        raise UsageError(f"{option} {text}: expected whole GiB, such as 64GiB")
    return gib


class ManifestOptions(Struct, frozen=True, kw_only=True):
    """Options of a cluster's manifests.

    Options:
      image: The hook's image in your registry. Default: a ConfigMap.
      bench_image: The image of the measuring jobs in your registry.
      vm: Name of the example VM.
      namespace: Namespace of the VM, the ConfigMap and the jobs.
      gpu: The GPU's resource name in the cluster.
      gpu_id: The GPU's PCI ids (lspci -n), for permittedHostDevices. Default: the A100's, for the
        default --gpu.
      gpus: Number of GPUs of the VM.
      vcpus: Number of vCPUs of the VM.
      memory_gib: Memory of the VM in GiB.
      hook_version: Version of the hook's interface: v1alpha1, v1alpha2, v1alpha3. Default:
        v1alpha3, which ends the sidecar with the VM.
      kubevirt: KubeVirt's version in the cluster, v1.6 or newer. From v1.8 on, the steps also name
        the feature gate PCINUMAAwareTopology.
      guest: The guest to measure in, over ssh. Default: cloud@, and the name of --vm.
    """

    image: Annotated[str | None, Opt("--image", "IMAGE")] = None
    bench_image: Annotated[str, Opt("--bench-image", "IMAGE")] = (
        "registry.example/homenode-bench:latest"
    )
    vm: Annotated[str, Opt("--vm", "NAME")] = "gpu-vm"
    namespace: Annotated[str, Opt("--namespace", "NAME")] = "default"
    gpu: Annotated[str, Opt("--gpu", "RESOURCE")] = "nvidia.com/GA100_A100_SXM4_40GB"
    gpu_id: Annotated[str | None, Opt("--gpu-id", "VENDOR:DEVICE")] = None
    gpus: Annotated[int, Opt("--gpus", "N")] = 8
    vcpus: Annotated[int, Opt("--vcpus", "N")] = 192
    memory_gib: Annotated[
        int, Opt("--memory", "SIZE", parse=parse_whole_gib, show=lambda gib: f"{gib}GiB")
    ] = 512
    hook_version: Annotated[HookVersion, Opt("--hook-version", "NAME")] = HookVersion.V1ALPHA3
    kubevirt: Annotated[str, Opt("--kubevirt", "VERSION")] = "v1.6.0"
    guest: Annotated[str | None, Opt("--guest", "USER@HOST")] = None


class OnDefineDomainArguments(Struct, frozen=True, kw_only=True):
    """Place a VM's devices on its cells, and print the new definition.

    The script in the ConfigMap that manifest writes makes the same tree without homenode.

    Options:
      vmi: The VirtualMachineInstance, as the shim passes it.
      domain: The domain XML, as the shim passes it.
      on_error: After an error; fail: the VM does not start, and KubeVirt tries again; passthrough:
        it starts with KubeVirt's definition, and the log reports the error. Default: the VM's
        annotation, else fail.
      pci_granularity: Create an expander bus for each cell, root-complex or switch. Default: the
        VM's annotation, else cell.
      root: Path of the host's /sys in the container.

    Examples:
      homenode kubevirt on-define-domain --vmi "$VMI" --domain "$DOMAIN"
      homenode kubevirt on-define-domain --vmi "$VMI" --domain "$DOMAIN" --root node
    """

    vmi: Annotated[str, Opt("--vmi", "JSON")]
    domain: Annotated[str, Opt("--domain", "XML")]
    on_error: Annotated[OnError | None, Opt("--on-error", "NAME")] = None
    pci_granularity: Annotated[PciGranularity | None, Opt("--pci-granularity", "NAME")] = None
    root: Annotated[str, Opt("--root", "DIR")] = "/"


class KubevirtReceiveArguments(Struct, frozen=True, kw_only=True):
    """Store a run that a guest sends as a tar on standard input.

    Other content in the tar, links, and existing runs are rejected.

    Options:
      name: Name of the run, RUN of results/SYSTEM/RUN in the guest; the tar has SYSTEM/RUN.
      results: Results directory to write the run to.

    Examples:
      homenode kubevirt receive run-1 --results results < run.tar
      ssh vm 'tar -C results -c vm/run-1' | homenode kubevirt receive run-1 --results results
    """

    name: Annotated[str, Arg("NAME")]
    results: Annotated[Path, Opt("--results", "DIR")]


class KubevirtCheckArguments(Struct, frozen=True, kw_only=True):
    """Check whether a VM's CPUs, huge pages, guest nodes and GPUs fit together on a node.

    Options:
      vmi: Output of kubectl get vmi NAME -o json, or of a VirtualMachine; also YAML.
      host: The host of the node, as for show, for example a capture made there; without it the node
        is not checked.
      kubevirt: Output of kubectl get kubevirt -A -o yaml (or json), as a file: KubeVirt's
        version, feature gates and permitted devices.

    Examples:
      homenode kubevirt check vmi.json --host node.tar.gz
      homenode kubevirt check vmi.json --kubevirt kubevirt.json
    """

    vmi: Annotated[Path, Arg("VMI.json")]
    host: Annotated[str | None, Opt("--host", "SOURCE", complete="host_sources")] = None
    kubevirt: Annotated[Path | None, Opt("--kubevirt", "FILE")] = None
    explain: ExplainOption = False
    json: JsonOption = False


class KubevirtManifestArguments(Struct, frozen=True, kw_only=True):
    """Write the hook (image or ConfigMap), the gates, a VM with the hook, and measuring jobs.

    Options:
      output: Directory to write to; existing files are not overwritten.

    Examples:
      homenode kubevirt manifest -o manifests --image registry.example/sidecar:1
      homenode kubevirt manifest -o manifests --gpus 2 --memory 128GiB
    """

    output: Annotated[Path, Opt("--output -o", "DIR")]
    manifest: ManifestOptions = ManifestOptions()


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
