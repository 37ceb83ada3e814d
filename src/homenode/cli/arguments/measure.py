"""What is asked of trial, bench and import. [I/O]"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from msgspec import Struct

from homenode.cli.arguments import JsonOption
from homenode.cli.command import Under
from homenode.measure.layouts.guest_access import ANSWER_S, STOP_S, GuestAccess, Transport
from homenode.measure.results.vantage import Vantage
from homenode.objective import Objective
from homenode.opt import Arg, Flag, Opt
from homenode.units import parse_duration

SUITE = "What is measured"
OWN = "Your own program"
WHERE = "Where it is measured"
ACCESS = "How the guest is reached"

LIMIT_S = 600
"""Of a whole gpu-check. A part that would begin later is left out by name."""


SEQUENCE = "Until it is decided"


class Until(StrEnum):
    """When a sequence ends."""

    DECIDED = "decided"


WithinOption = Annotated[
    float | None,
    Opt(
        "--within",
        "TIME",
        "With --until: the time for all of it. Such as 30m or 2h.",
        panel=SEQUENCE,
        parse=parse_duration,
        show=lambda seconds: f"{seconds:g}s",
    ),
]


class SequenceArguments(Struct, frozen=True, kw_only=True):
    """Rounds that are ordered one by one."""

    until: Annotated[
        Until | None,
        Opt(
            "--until",
            "decided",
            "Measure what is in question until it is decided. One is shown to be best, "
            "or the others no better.",
        ),
    ] = None
    within: WithinOption = None
    error: Annotated[
        float,
        Opt(
            "--error",
            "PERCENT",
            "With --until: how likely its answer may be wrong by chance, over all rounds.",
            ge=0.1,
            le=5,
            rare=True,
        ),
    ] = 5.0
    objective: Annotated[
        Objective | None,
        Opt(
            "--objective",
            "NAME",
            "With --until: what is to be decided, and so what is measured. Default: as the GPUs "
            "suggest.",
            rare=True,
        ),
    ] = None


class SuiteArguments(Struct, frozen=True, kw_only=True):
    """Which tests, how long and how often."""

    tests: Annotated[
        str | None,
        Opt(
            "--tests",
            "A,B",
            "Groups of tests. cpu-single, cpu-all, stream, mem-latency, core-to-core, smt, "
            "placement, gpu-copy, gpu-compute, gpu-bandwidth, gpu-small-copies, gpu-peer, nccl, "
            "collectives. Default: all that can run, but collectives.",
            complete="test_lists",
        ),
    ] = None
    repeat: Annotated[
        int, Opt("--repeat", "N", "Rounds. Each test runs once in each.", ge=1, le=1000)
    ] = 3
    quick: Annotated[bool, Flag("--quick", "Half a second a figure.")] = False
    full: Annotated[bool, Flag("--full", "Eight seconds a figure.", rare=True)] = False
    seed: Annotated[int, Opt("--seed", "N", "Seed of the random order.", rare=True)] = 1
    nccl_max_msg: Annotated[
        str, Opt("--nccl-max-msg", "SIZE", "Largest message of collectives.", rare=True)
    ] = "1GiB"
    nccl_topo: Annotated[
        Path | None,
        Opt(
            "--nccl-topo",
            "FILE",
            "The topology file that the test collectives gives to NCCL. A trial makes it.",
            rare=True,
        ),
    ] = None
    across: Annotated[
        str | None,
        Opt(
            "--across",
            "HOST,HOST",
            "The hosts that the test collectives goes across, this one first.",
            rare=True,
        ),
    ] = None
    python: Annotated[
        str,
        Opt(
            "--python",
            "FILE",
            "A Python with PyTorch, used where GPU tools are missing; homenode need not be "
            "installed there.",
            rare=True,
        ),
    ] = "python3"


class AppArguments(Struct, frozen=True, kw_only=True):
    """A program of the user's, measured as one more test."""

    app: Annotated[
        str | None, Opt("--app", "CMD", "A command to measure, started without a shell.")
    ] = None
    metric: Annotated[
        str | None,
        Opt(
            "--metric",
            "REGEX",
            "Finds its figure: one group, searched line by line; the last match counts.",
        ),
    ] = None
    lower_is_better: Annotated[
        bool,
        Flag(
            "--lower-is-better",
            "The figure is a time in seconds, or a rate.",
            also="--lower",
            off="--higher-is-better",
        ),
    ] = False
    app_timeout: Annotated[
        int,
        Opt(
            "--app-timeout",
            "S",
            "Seconds after which it is stopped and has no figure.",
            ge=1,
            le=1000000,
        ),
    ] = 3600


class RunArguments(Struct, frozen=True, kw_only=True):
    """What the run is of."""

    plan: Annotated[
        Path | None,
        Opt(
            "--plan",
            "PLAN.json",
            "The plan of this guest. It is verified first, and a copy kept with the run.",
        ),
    ] = None
    domain: Annotated[
        Path | None,
        Opt(
            "--domain",
            "FILE",
            "With --plan: the guest's domain document, of which a copy is kept with the run.",
            rare=True,
        ),
    ] = None
    layout: Annotated[
        str | None,
        Opt(
            "--layout -l",
            "NAME",
            "The layout of this guest. Default: the plan's.",
            complete="layouts",
        ),
    ] = None
    arrangement: Annotated[
        str | None,
        Opt("--arrangement", "TEXT", "What else was chosen: a queue, a policy.", rare=True),
    ] = None
    boot: Annotated[
        str | None, Opt("--boot", "ID", "Identity of this boot. Default: the kernel's.", rare=True)
    ] = None
    experiment: Annotated[
        str | None, Opt("--experiment", "ID", "The study that this run is a part of.", rare=True)
    ] = None
    block: Annotated[
        int | None,
        Opt("--block", "N", "Its round there, from 0; with --experiment.", ge=0, rare=True),
    ] = None
    sequence: Annotated[
        str | None,
        Opt(
            "--sequence",
            "E,V,R,M",
            "The round is of a sequence: its error, variants, most rounds, machines.",
            rare=True,
        ),
    ] = None
    vantage: Annotated[
        Vantage | None, Opt("--vantage", "NAME", "Where this is. Default: detected.")
    ] = None
    pus: Annotated[str | None, Opt("--pus", "LIST", "Measure on these PUs alone.", rare=True)] = (
        None
    )
    nodes: Annotated[
        str | None, Opt("--nodes", "LIST", "Measure on these nodes alone.", rare=True)
    ] = None
    host_kind: Annotated[
        str | None, Opt("--host-kind", "TEXT", "What hosts of this kind have in common.", rare=True)
    ] = None
    force: Annotated[
        bool, Flag("--force -f", "Measure a guest that is not as planned. It marks the run.")
    ] = False


StopWithinOption = Annotated[
    float,
    Opt(
        "--stop-within",
        "SECONDS",
        "How long a guest may take to shut down before it is stopped.",
        ge=0,
    ),
]


class AccessOptions(Struct, frozen=True, kw_only=True):
    """How a guest is reached, and how long it may take."""

    reach: Annotated[Transport | None, Opt("--reach", "NAME", "Default: ssh.")] = None
    address: Annotated[str | None, Opt("--address", "ADDRESS", "Default: libvirt's lease.")] = None
    ssh_user: Annotated[str, Opt("--ssh-user", "USER", "Also of the console.")] = "root"
    ssh_port: Annotated[int, Opt("--ssh-port", "N", "")] = 22
    ssh_key: Annotated[Path | None, Opt("--ssh-key", "FILE", "A private key.")] = None
    probe: Annotated[
        Path | None, Opt("--probe", "FILE", "The static probe to copy to the guest.")
    ] = None
    answer_within: Annotated[
        float,
        Opt(
            "--answer-within",
            "SECONDS",
            "How long a guest may take to answer after its start.",
            ge=1,
        ),
    ] = ANSWER_S
    stop_within: StopWithinOption = STOP_S

    @property
    def is_default(self) -> bool:
        """Whether no option says how the guest is reached."""
        return self.guest == AccessOptions().guest

    @property
    def guest(self) -> GuestAccess:
        """The access itself."""
        key = None if self.ssh_key is None else str(self.ssh_key.absolute())
        transport = self.reach or Transport.SSH
        return GuestAccess(transport, self.address, self.ssh_user, self.ssh_port, key)


class BenchArguments(Struct, frozen=True, kw_only=True):
    """Measure CPUs, memory and GPUs of this machine, in random order.

    With a plan, the guest is verified first. Every step is saved as it ends: --resume continues
    after Ctrl-C or a crash.

    Examples:
      homenode bench pin-1 --layout pin --quick
      homenode bench near --until decided --within 30m --on ssh://gpu01
    """

    name: Annotated[str, Arg("NAME", "Name of the run and its folder.")]
    suite: Annotated[SuiteArguments, Under(SUITE)] = SuiteArguments()
    own: Annotated[AppArguments, Under(OWN, rare=True)] = AppArguments()
    run: Annotated[RunArguments, Under(WHERE)] = RunArguments()
    sequence: Annotated[SequenceArguments, Under(SEQUENCE, rare=True)] = SequenceArguments()
    on: Annotated[
        str | None,
        Opt(
            "--on",
            "WHERE",
            "Measure there, with nothing installed: ssh://[USER@]HOST[:PORT], or a job in "
            "kubernetes://[NAMESPACE/]NODE. Default: this machine.",
            panel=WHERE,
        ),
    ] = None
    probe: Annotated[
        Path | None,
        Opt("--probe", "FILE", "With --on: the static probe to copy.", panel=WHERE, rare=True),
    ] = None
    results: Annotated[
        Path, Opt("--results", "DIR", "Results folder; the run is DIR/<gpu>/NAME.")
    ] = Path("results")
    resume: Annotated[bool, Flag("--resume", "Continue a run that was interrupted.")] = False
    dry_run: Annotated[
        bool, Flag("--dry-run -n", "Print the steps and how long they take; run none.")
    ] = False
    json: JsonOption = False


class BenchSetupArguments(Struct, frozen=True, kw_only=True):
    """Build the pinned GPU tools (nvbandwidth, nccl-tests, PyTorch, ...) for this machine.

    Examples:
      homenode bench setup
      homenode bench setup --architecture gfx950
    """

    apply: Annotated[bool, Flag("--apply", "Build them. Default: print the commands.")] = False
    remove: Annotated[bool, Flag("--remove", "Remove what was built.")] = False
    prefix: Annotated[
        Path | None, Opt("--prefix", "DIR", "Where to install. Default: ~/.local.")
    ] = None
    architecture: Annotated[
        str | None,
        Opt(
            "--architecture",
            "NAME",
            "Build for these GPUs: 90, or gfx950. Default: this machine's, from its driver.",
        ),
    ] = None


class GpuCheckArguments(Struct, frozen=True, kw_only=True):
    """Check on this machine, in ten minutes, what homenode measures on GPUs.

    Captures the host, reads the GPUs' links while they copy, measures copies and matrix products,
    and compares homenode's own copies with nvbandwidth's where that is installed. All of it goes
    into one folder, for `homenode import`, `homenode report` and a bug report.

    Examples:
      homenode bench gpu-check
      homenode bench gpu-check -o h100-check --limit 300
    """

    output: Annotated[Path, Opt("--output -o", "DIR", "A new folder for all of it.")] = Path(
        "gpu-check"
    )
    python: Annotated[str, Opt("--python", "FILE", "The Python that has PyTorch.")] = "python3"
    limit: Annotated[
        int, Opt("--limit", "S", "Start no part after S seconds.", ge=60, le=36000)
    ] = LIMIT_S
    json: JsonOption = False


class ImportArguments(Struct, frozen=True, kw_only=True):
    """Read outputs of other tools and of the study's scripts, as runs.

    Files are recognised by their content: nvbandwidth, nccl-tests, Intel MLC, STREAM,
    sysbench, bandwidthTest, rocm-bandwidth-test, TransferBench, likwid-bench, openssl speed.

    Examples:
      homenode import logs/pin logs/pin-numa --layout 'pin*=pin' -o results
      homenode import logs --dry-run
    """

    folders: Annotated[tuple[Path, ...], Arg("DIR...", "Folders or files of other tools.")]
    output: Annotated[Path, Opt("--output -o", "DIR", "Results folder to write to.")] = Path(
        "results"
    )
    layout: Annotated[
        tuple[str, ...],
        Opt(
            "--layout",
            "NAME=PRESET",
            "The layout of these runs; NAME may contain * and ?. Repeatable.",
        ),
    ] = ()
    system: Annotated[
        str | None, Opt("--system", "NAME", "Folder above the runs. Default: the GPU's name.")
    ] = None
    host_kind: Annotated[
        str | None, Opt("--host-kind", "TEXT", "What machines of this kind have in common.")
    ] = None
    machine: Annotated[
        str | None,
        Opt("--machine", "SOURCE", "The host that the tools ran on, as --host of plan takes it."),
    ] = None
    order: Annotated[
        str | None,
        Opt("--order", "RUN,…", "All runs as they were measured. Default: by the files' times."),
    ] = None
    vantage: Annotated[
        Vantage | None, Opt("--vantage", "NAME", "Where the tools ran. Default: by the files.")
    ] = None
    dry_run: Annotated[
        bool, Flag("--dry-run -n", "Say what would be written, and write nothing.")
    ] = False
    everything: Annotated[
        bool, Flag("--all", "List everything that was left out or is not known.")
    ] = False
    json: JsonOption = False
