"""What is asked of trial, bench and import. [I/O]"""

from pathlib import Path
from typing import Annotated

from msgspec import Struct

from homenode.cli.arguments import JsonOption
from homenode.cli.command import Under
from homenode.measure.results.vantage import Vantage
from homenode.opt import Arg, Flag, Opt
from homenode.units import parse_duration
from homenode.vm.hypervisor.connection import ANSWER_S, STOP_S, GuestAccess, Transport

SUITE = "What is measured"
OWN = "Your own program"
WHERE = "Where it is measured"
ACCESS = "How the guest is reached"

WithinOption = Annotated[
    float | None,
    Opt(
        "--within",
        "TIME",
        parse=parse_duration,
        show=lambda seconds: f"{seconds:g}s",
    ),
]


class SuiteArguments(Struct, frozen=True, kw_only=True):
    """Which tests, how long and how often."""

    tests: Annotated[str | None, Opt("--tests", "A,B", complete="test_lists")] = None
    repeat: Annotated[int, Opt("--repeat", "N", ge=1, le=1000)] = 3
    quick: Annotated[bool, Flag("--quick")] = False
    full: Annotated[bool, Flag("--full", rare=True)] = False
    seed: Annotated[int, Opt("--seed", "N", rare=True)] = 1
    nccl_max_msg: Annotated[str, Opt("--nccl-max-msg", "SIZE", rare=True)] = "1GiB"
    nccl_topo: Annotated[Path | None, Opt("--nccl-topo", "FILE", rare=True)] = None
    python: Annotated[str, Opt("--python", "FILE", rare=True)] = "python3"


class AppArguments(Struct, frozen=True, kw_only=True):
    """A program of the user's, measured as one more test."""

    app: Annotated[str | None, Opt("--app", "CMD")] = None
    metric: Annotated[str | None, Opt("--metric", "REGEX")] = None
    lower_is_better: Annotated[bool, Flag("--lower-is-better", off="--higher-is-better")] = False
    app_timeout: Annotated[int, Opt("--app-timeout", "S", ge=1, le=1000000)] = 3600


class RunArguments(Struct, frozen=True, kw_only=True):
    """What the run is of."""

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


StopWithinOption = Annotated[float, Opt("--shutdown-timeout", "SECONDS", ge=0)]


class AccessOptions(Struct, frozen=True, kw_only=True):
    """How a guest is reached, and how long it may take."""

    reach: Annotated[Transport | None, Opt("--guest-access", "NAME")] = None
    address: Annotated[str | None, Opt("--address", "ADDRESS")] = None
    ssh_user: Annotated[str, Opt("--ssh-user", "USER")] = "root"
    ssh_port: Annotated[int, Opt("--ssh-port", "N")] = 22
    ssh_key: Annotated[Path | None, Opt("--ssh-key", "FILE")] = None
    probe: Annotated[Path | None, Opt("--probe", "FILE")] = None
    answer_within: Annotated[float, Opt("--boot-timeout", "SECONDS", ge=1)] = ANSWER_S
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
      homenode bench --layout pin --quick
      homenode bench --name gpu7 --on ssh://root@gpu7
    """

    name: Annotated[str | None, Opt("--name", "NAME")] = None
    suite: Annotated[SuiteArguments, Under(SUITE)] = SuiteArguments()
    own: Annotated[AppArguments, Under(OWN, rare=True)] = AppArguments()
    run: Annotated[RunArguments, Under(WHERE)] = RunArguments()
    on: Annotated[str | None, Opt("--on", "WHERE", panel=WHERE)] = None
    probe: Annotated[Path | None, Opt("--probe", "FILE", panel=WHERE, rare=True)] = None
    results: Annotated[Path, Opt("--results", "DIR")] = Path("results")
    resume: Annotated[bool, Flag("--resume")] = False
    dry_run: Annotated[bool, Flag("--dry-run -n")] = False
    json: JsonOption = False


class BenchSetupArguments(Struct, frozen=True, kw_only=True):
    """Build the pinned GPU tools (nvbandwidth, nccl-tests, PyTorch, ...) for this machine.

    Examples:
      homenode bench setup
      homenode bench setup --architecture gfx950
    """

    apply: Annotated[bool, Flag("--apply")] = False
    remove: Annotated[bool, Flag("--remove")] = False
    prefix: Annotated[Path | None, Opt("--prefix", "DIR")] = None
    architecture: Annotated[str | None, Opt("--architecture", "NAME")] = None


class ImportArguments(Struct, frozen=True, kw_only=True):
    """Read outputs of other tools and of the study's scripts, as runs.

    Files are recognised by their content: nvbandwidth, nccl-tests, Intel MLC, STREAM,
    sysbench, bandwidthTest, rocm-bandwidth-test, TransferBench.

    Examples:
      homenode import logs/pin logs/pin-numa --layout 'pin*=pin' -o results
      homenode import logs --dry-run
    """

    folders: Annotated[tuple[Path, ...], Arg("DIR...")]
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
