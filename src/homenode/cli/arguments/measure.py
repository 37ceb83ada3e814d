"""Arguments of trial, bench, import, compare, report and list. [I/O]"""

from pathlib import Path
from typing import Annotated

from msgspec import Struct

from homenode.cli.arguments import AfterOption, ConnectOption, ForceOption, HostOption, JsonOption
from homenode.cli.command import IncludeFields, OptionGroup
from homenode.measure.results.vantage import Vantage
from homenode.objective import Objective
from homenode.option import Arg, Flag, Opt
from homenode.units import parse_duration
from homenode.vm.hypervisor.connection import ANSWER_S, DEFAULT, STOP_S, GuestAccess, Transport
from homenode.vm.plan_options import PLACEMENT, PlanOptions

SUITE = "What is measured"
OWN = "Your own program"
WHERE = "Where it is measured"
ACCESS = "Connection to the guest"

WithinOption = Annotated[
    float | None,
    Opt("--within", "TIME", parse=parse_duration, show=lambda seconds: f"{seconds:g}s"),
]


class SuiteArguments(Struct, frozen=True, kw_only=True):
    """The tests, their duration and their repetitions.

    Options:
      tests: Groups of tests; cpu-single, cpu-all, stream, mem-latency, core-to-core, smt,
        placement, gpu-copy, gpu-compute, gpu-bandwidth, gpu-small-copies, gpu-peer, nccl. Default:
        all that this machine can run.
      repeat: Number of rounds; each test runs once a round.
      quick: Measure each value for half a second. Default: two seconds.
      full: Measure each value for eight seconds. Default: two seconds.
      seed: Seed for the order of boots and of tests.
      nccl_max_msg: Largest message of collectives.
      nccl_topo: Topology file for NCCL: all-reduces are measured with and without it; a trial
        writes a file for each guest. Default: all-reduces without a file.
      python: A Python with PyTorch, used if GPU tools are missing.
    """

    tests: Annotated[str | None, Opt("--tests", "A,B", complete="test_lists")] = None
    repeat: Annotated[int, Opt("--repeat", "N", ge=1, le=1000)] = 3
    quick: Annotated[bool, Flag("--quick")] = False
    full: Annotated[bool, Flag("--full", rare=True)] = False
    seed: Annotated[int, Opt("--seed", "N", rare=True)] = 1
    nccl_max_msg: Annotated[str, Opt("--nccl-max-msg", "SIZE", rare=True)] = "1GiB"
    nccl_topo: Annotated[Path | None, Opt("--nccl-topo", "FILE", rare=True)] = None
    python: Annotated[str, Opt("--python", "FILE", rare=True)] = "python3"


class AppArguments(Struct, frozen=True, kw_only=True):
    """The user's own program, measured as an additional test.

    Options:
      app: A command, split as a shell would split it, started without a shell. By default only this
        command and the controls run; --tests adds others.
      metric: Regular expression that finds the command's result: one group, searched in each line
        of standard output; the last match counts.
      lower_is_better: The result is a time in seconds. Default: a rate.
      app_timeout: Seconds after which the command is stopped; the round then has no result.
    """

    app: Annotated[str | None, Opt("--app", "CMD")] = None
    metric: Annotated[str | None, Opt("--metric", "REGEX")] = None
    lower_is_better: Annotated[bool, Flag("--lower-is-better", off="--higher-is-better")] = False
    app_timeout: Annotated[int, Opt("--app-timeout", "S", ge=1, le=1000000)] = 3600


class RunArguments(Struct, frozen=True, kw_only=True):
    """The subject of the run.

    Options:
      plan: Saved plan of this guest. The guest is verified first, as by verify --guest; a different
        guest is not measured. With --context host: measure on the CPUs that the plan pins.
      domain: Domain XML of this guest: stored, and used to find its GPUs.
      layout: Layout of this guest. Default: the plan's, else unknown.
      arrangement: Name of a choice besides the layout, such as a queue or a policy.
      boot: Identity of this boot. Default: the kernel's boot id.
      experiment: The study that this run is a part of. In a Slurm job, tests then run only with the
        job's own binding.
      block: With --experiment: its round in the study, from 0; a round has one run of each
        alternative.
      vantage: Where this machine runs: guest, host or job. On a virtual machine host needs --force.
        Default: guest with a plan or on a virtual machine, job under Slurm, else host.
      pus: Measure on these CPUs only. Default: all that the cpuset and the affinity allow.
      nodes: Measure on these nodes' CPUs, and on the memory of a single node. Default: all.
      host_kind: A name for hosts of this kind; runs of different kinds are not compared. Default:
        on a host: its processors and GPUs.
      force: Measure a guest that is not as planned; the run is marked.
    """

    plan: Annotated[Path | None, Opt("--plan", "PLAN.json")] = None
    domain: Annotated[Path | None, Opt("--domain", "FILE", rare=True)] = None
    layout: Annotated[str | None, Opt("--layout -l", "NAME", complete="layouts")] = None
    arrangement: Annotated[str | None, Opt("--arrangement", "TEXT", rare=True)] = None
    boot: Annotated[str | None, Opt("--boot", "ID", rare=True)] = None
    experiment: Annotated[str | None, Opt("--experiment", "ID", rare=True)] = None
    block: Annotated[int | None, Opt("--block", "N", ge=0, rare=True)] = None
    vantage: Annotated[Vantage | None, Opt("--context", "NAME")] = None
    pus: Annotated[str | None, Opt("--cpus", "LIST", rare=True)] = None
    nodes: Annotated[str | None, Opt("--nodes", "LIST", rare=True)] = None
    host_kind: Annotated[str | None, Opt("--hardware-class", "TEXT", rare=True)] = None
    force: Annotated[bool, Flag("--force -f")] = False


ShutdownTimeoutOption = Annotated[float, Opt("--shutdown-timeout", "SECONDS", ge=0)]


class AccessOptions(Struct, frozen=True, kw_only=True):
    """Access to a guest, and its time limits.

    Options:
      shutdown_timeout: Time limit for the shutdown; then the VM is destroyed.
      reach: How to reach the guest; ssh or agent (QEMU's guest agent with guest-exec allowed).
        Default: ssh.
      address: Address of the guest. Default: from libvirt's leases, else from the guest agent or
        this host's ARP table.
      ssh_user: User name for logging in to the guest.
      ssh_port: Port of the guest's ssh server.
      ssh_key: Private key to log in to the guest with. Default: ssh's own choice.
      probe: Static homenode-probe to copy into the guest. Processor and memory tests need only a
        POSIX shell there; GPU tests need the tools or PyTorch. Default: homenode-probe-static of
        this installation.
      boot_timeout: Time limit for a guest to answer after its start.
    """

    reach: Annotated[Transport | None, Opt("--guest-access", "NAME")] = None
    address: Annotated[str | None, Opt("--address", "ADDRESS")] = None
    ssh_user: Annotated[str, Opt("--ssh-user", "USER")] = "root"
    ssh_port: Annotated[int, Opt("--ssh-port", "N")] = 22
    ssh_key: Annotated[Path | None, Opt("--ssh-key", "FILE")] = None
    probe: Annotated[Path | None, Opt("--probe", "FILE")] = None
    boot_timeout: Annotated[float, Opt("--boot-timeout", "SECONDS", ge=1)] = ANSWER_S
    shutdown_timeout: ShutdownTimeoutOption = STOP_S

    @property
    def is_default(self) -> bool:
        """Whether no option sets the access to the guest."""
        return self.guest == AccessOptions().guest

    @property
    def guest(self) -> GuestAccess:
        key = None if self.ssh_key is None else str(self.ssh_key.absolute())
        transport = self.reach or Transport.SSH
        return GuestAccess(transport, self.address, self.ssh_user, self.ssh_port, key)


class BenchArguments(Struct, frozen=True, kw_only=True):
    """Measure CPUs, memory and GPUs of this machine, in random order.

    With a plan, the guest is verified first. Every step is saved as it ends: --resume continues
    after Ctrl-C or a crash.

    Options:
      name: Name of the run and of its directory; needed with --resume. Default: the layout, date
        and time.
      on: Measure on this remote machine: ssh://[USER@]HOST[:PORT]. Default: this machine.
      probe: With --on: the static probe that is copied there. Default: homenode-probe-static of
        this installation.
      results: Results directory; the run is DIR/<gpu>/NAME, <gpu> being the GPU's name or cpu-only.
      resume: Continue the run of this name.
      dry_run: Print the steps, and run none.

    Examples:
      homenode bench --layout pin --quick
      homenode bench --name gpu7 --on ssh://root@gpu7
    """

    name: Annotated[str | None, Opt("--name", "NAME")] = None
    suite: Annotated[SuiteArguments, OptionGroup(SUITE)] = SuiteArguments()
    own: Annotated[AppArguments, OptionGroup(OWN, rare=True)] = AppArguments()
    run: Annotated[RunArguments, OptionGroup(WHERE)] = RunArguments()
    on: Annotated[str | None, Opt("--on", "WHERE", panel=WHERE)] = None
    probe: Annotated[Path | None, Opt("--probe", "FILE", panel=WHERE, rare=True)] = None
    results: Annotated[Path, Opt("--results", "DIR")] = Path("results")
    resume: Annotated[bool, Flag("--resume")] = False
    dry_run: Annotated[bool, Flag("--dry-run -n")] = False
    json: JsonOption = False


class BenchSetupArguments(Struct, frozen=True, kw_only=True):
    """Build the pinned GPU tools (nvbandwidth, nccl-tests, PyTorch, ...) for this machine.

    Options:
      apply: Download, build and install the tools. Default: only print the steps.
      remove: Remove what the steps installed.
      prefix: Programs go to DIR/bin, sources and the record to DIR/share/homenode; PyTorch's Python
        is DIR/bin/homenode-torch-python, for --python. Default: ~/.local.
      architecture: Build for these GPUs, without a GPU in this machine: 90, 90,120, gfx950.
        Default: this machine's, as its driver names it.

    Examples:
      homenode bench setup
      homenode bench setup --architecture gfx950
    """

    apply: Annotated[bool, Flag("--apply")] = False
    remove: Annotated[bool, Flag("--remove")] = False
    prefix: Annotated[Path | None, Opt("--prefix", "DIR")] = None
    architecture: Annotated[str | None, Opt("--architecture", "NAME")] = None


class ImportArguments(Struct, frozen=True, kw_only=True):
    """Read outputs of other tools and of the study's scripts as runs.

    Files are recognised by their content, such as that of nvbandwidth, nccl-tests or STREAM.

    Options:
      directories: Directories, searched six levels deep, or single files.
      output: Results directory to write to; an existing run is not replaced.
      layout: Set the layout of the run NAME; NAME may contain * and ?, and an exact name takes
        precedence over a pattern; may be repeated. Default: by the directory's name.
      system: The directory above the runs. Default: the directory above the study's, else the
        GPU's name, else cpu-only.
      host_kind: Name of this kind of machine; runs of different kinds are not compared. Default:
        unknown.
      machine: Host that the tools ran on: a capture, a host.toml, a shipped host. Default:
        unknown.
      order: All runs, or prefixes of their names, in the order in which they were measured.
        Default: by file modification time.
      vantage: Where the tools ran: guest, host or job. Default: guest for the study's directories,
        job for bound logs, else host.
      dry_run: Print the names of the files; write none.
      everything: List everything that was omitted or is unknown. Default: the first 20 of each.

    Examples:
      homenode import logs/pin logs/pin-numa --layout 'pin*=pin' -o results
      homenode import logs --dry-run
    """

    directories: Annotated[tuple[Path, ...], Arg("DIR...")]
    output: Annotated[Path, Opt("--output -o", "DIR")] = Path("results")
    layout: Annotated[tuple[str, ...], Opt("--layout", "NAME=PRESET")] = ()
    system: Annotated[str | None, Opt("--system", "NAME")] = None
    host_kind: Annotated[str | None, Opt("--hardware-class", "TEXT")] = None
    machine: Annotated[str | None, Opt("--machine", "SOURCE")] = None
    order: Annotated[str | None, Opt("--order", "RUN,…")] = None
    vantage: Annotated[Vantage | None, Opt("--context", "NAME")] = None
    dry_run: Annotated[bool, Flag("--dry-run -n")] = False
    everything: Annotated[bool, Flag("--all")] = False
    json: JsonOption = False


DomainArgument = Annotated[
    str, Arg("NAME", "Domain of libvirt, by name or UUID.", complete="domain_names")
]

ReportOption = Annotated[Path | None, Opt("--report", "FILE")]


class TrialArguments(Struct, frozen=True, kw_only=True):
    """Boot a copy of a VM in each layout, measure it, and recommend a layout. It prints findings,
    plans and the time, then prompts for confirmation. The copy has throw-away disks. A killed trial
    continues with the commands below.

    Options:
      report: Write the report here, .html or .pdf. Default: report.html in the trial's directory.
      within: Time limit, such as 30m or 2h; no round is started that would exceed it. Default: no
        limit.
      layouts: Layouts to boot, separated by commas; the first is the baseline. Default: default,
        pin; also pin-numa if the host has several nodes, and pin-numa-pci if the VM has GPUs too.
      boots: Boots of each layout. Default: 3 for two layouts, 4 for more.
      objective: Objective of the recommendation; multi-gpu, memory-bandwidth, latency, gpu-copy,
        throughput, density. Default: chosen by the VM's devices.
      in_place: Boot the VM itself: changes in the guest stay. Default: a copy is booted.
      bare: Also measure the host itself, on the CPUs and nodes of the first layout that pins;
        results are also a percentage of bare metal.
      results: Results directory; each boot's run is ID-LAYOUT-N in it.
      id: Name of the trial. Default: the domain and the time.
      yes: Boot the copies without a prompt; needed without a terminal.
      dry_run: Print the plans and the schedule; boot nothing.
      explain: Print also the plan of each layout with its costs, pins and addresses.
      host: The host to plan for; it must be the host of the libvirt daemon, or an equal machine.
        Default: this machine.

    Examples:
      homenode trial gpu-vm --dry-run
      homenode trial gpu-vm --layouts default,pin,pin-numa --within 1h
    """

    name: DomainArgument
    suite: Annotated[SuiteArguments, OptionGroup(SUITE)] = SuiteArguments()
    own: Annotated[AppArguments, OptionGroup(OWN, rare=True)] = AppArguments()
    access: Annotated[AccessOptions, OptionGroup(ACCESS, rare=True)] = AccessOptions()
    options: Annotated[PlanOptions, IncludeFields(PLACEMENT, "page_bytes", "pci_granularity")] = (
        PlanOptions()
    )
    after: AfterOption = ()
    layouts: Annotated[str | None, Opt("--layouts", "A,B,...", complete="layout_lists")] = None
    boots: Annotated[int | None, Opt("--boots", "N", ge=1)] = None
    within: WithinOption = None
    objective: Annotated[Objective | None, Opt("--objective", "NAME")] = None
    in_place: Annotated[bool, Flag("--in-place")] = False
    bare: Annotated[bool, Flag("--bare-metal", rare=True)] = False
    results: Annotated[Path, Opt("--results", "DIR", rare=True)] = Path("results")
    report: ReportOption = None
    id: Annotated[str | None, Opt("--name", "ID", rare=True)] = None
    yes: Annotated[bool, Flag("--yes -y")] = False
    dry_run: Annotated[bool, Flag("--dry-run -n")] = False
    explain: Annotated[bool, Flag("--explain", rare=True)] = False
    connect: ConnectOption = DEFAULT
    host: HostOption = None


class TrialStatusArguments(Struct, frozen=True, kw_only=True):
    """Show the progress of trials.

    Options:
      name: A domain, to show its last trial, or a trial's id. Default: all trials.

    Examples:
      homenode trial status
      homenode trial status gpu-vm
    """

    name: Annotated[str | None, Arg("[NAME]", complete="domain_names")] = None
    json: JsonOption = False


class TrialResumeArguments(Struct, frozen=True, kw_only=True):
    """Continue the last trial of a domain, and repeat boots that failed.

    Options:
      report: Write the report here, .html or .pdf. Default: report.html in the trial's directory.
      within: Time limit, such as 30m or 2h; no round is started that would exceed it. Default: no
        limit.
      boots: Total number of boots of each layout; must be larger than before. Default: unchanged.

    Examples:
      homenode trial resume gpu-vm --boots 6
      homenode trial resume gpu-vm --report trial.html
    """

    name: DomainArgument
    access: Annotated[AccessOptions, OptionGroup(ACCESS, rare=True)] = AccessOptions()
    boots: Annotated[int | None, Opt("--boots", "N", ge=1)] = None
    within: WithinOption = None
    report: ReportOption = None


class TrialUndoArguments(Struct, frozen=True, kw_only=True):
    """Stop the last trial of a domain, and restore the VM.

    Options:
      shutdown_timeout: Time limit for the shutdown; then the VM is destroyed.

    Examples:
      homenode trial undo gpu-vm
      homenode trial undo gpu-vm-20260101-120000
    """

    name: DomainArgument
    shutdown_timeout: ShutdownTimeoutOption = STOP_S


class CompareArguments(Struct, frozen=True, kw_only=True):
    """Recommend a layout for each objective, and compare layouts: effects with intervals. If the
    interval does not decide, the answer is "cannot tell". Runs of one layout are combined; the boot
    is the unit of replication. With --host, for that host.

    Options:
      runs: Directories of results, also directories of directories, or of other tools' outputs as
        import reads them.
      objective: Decide by the metrics of this objective; multi-gpu, memory-bandwidth, latency,
        gpu-copy, throughput, density. Default: every objective, one after another.
      host: Recommend for this host alone. Default: for the hosts of the results.
      bare: A run on the host itself: results are also a percentage of bare metal.
      everything: Print also effects with intervals, caveats with their fixes, sources, more than
        three machines, single GPUs, nodes, message sizes and pairs of CPUs.

    Examples:
      homenode compare results/h200/default results/h200/pin-numa
      homenode compare demo/published/h200 --objective multi-gpu
    """

    runs: Annotated[tuple[str, ...], Arg("RUN...")]
    objective: Annotated[Objective | None, Opt("--objective", "NAME")] = None
    host: HostOption = None
    bare: Annotated[str | None, Opt("--bare-metal", "HOSTRUN")] = None
    everything: Annotated[bool, Flag("--explain")] = False
    json: JsonOption = False


class ReportArguments(Struct, frozen=True, kw_only=True):
    """Write results as one page: recommendations, effects, charts, caveats.

    Without arguments it reads ./results and writes results/report.html. Directories of the study's
    scripts and logs of other tools are read directly. Only runs of the same hardware
    are compared. The page needs no network.

    Options:
      runs: Directories of results, also directories of directories; directories of the study's
        scripts (results/<gpu>/<config>/) and logs of other tools, read as homenode import reads
        them. Default: results.
      output: File of the report; .html or .pdf. An older report is replaced. Default: report.html
        in the first directory.
      host: A capture of a host of these results: its picture, links and findings, for runs that
        name it, or for the one machine that names none. May be repeated. Default: captures stored
        with host runs.
      title: The page's title. Default: Which layout to run: and the machines.
      appendix: Print in a PDF also every result, caveat and remark of each machine.
      csv: Print every result as a row of CSV.

    Examples:
      homenode report
      homenode report demo/published -o published.pdf
    """

    runs: Annotated[tuple[str, ...], Arg("[RUN]...")] = ()
    output: Annotated[Path | None, Opt("--output -o", "FILE")] = None
    host: Annotated[tuple[str, ...], Opt("--host", "SOURCE", complete="host_sources")] = ()
    title: Annotated[str | None, Opt("--title", "TEXT")] = None
    appendix: Annotated[bool, Flag("--appendix")] = False
    csv: Annotated[bool, Flag("--csv")] = False
    force: ForceOption = False
    json: JsonOption = False


class LayoutsArguments(Struct, frozen=True, kw_only=True):
    """List the layouts with their changes to a VM and their names in the published study.

    Examples:
      homenode list layouts
      homenode plan VM.xml --layout pin-numa
    """

    json: JsonOption = False


class HostsArguments(Struct, frozen=True, kw_only=True):
    """List the hosts that come with homenode, for --host.

    Options:
      explain: Describe each host.

    Examples:
      homenode list hosts --explain
      homenode show --host hgx-h100
    """

    explain: Annotated[bool, Flag("--explain")] = False
    json: JsonOption = False


class FindingsArguments(Struct, frozen=True, kw_only=True):
    """Explain a finding: its meaning, cause, cost, fix and source.

    Without an argument, list the groups of findings.

    Options:
      finding: Id of a finding, as at the end of its head line; or a group, to list its ids.

    Examples:
      homenode list findings links
      homenode list findings pcie-link-narrow
    """

    finding: Annotated[str | None, Arg("[GROUP-OR-ID]", complete="finding_ids")] = None
    json: JsonOption = False
