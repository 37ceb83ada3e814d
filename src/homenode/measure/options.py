"""Orders: the options of one run of the suite, and its outcome."""

from msgspec import Struct, field

from homenode.cpuset import CpuSet
from homenode.errors import UsageError
from homenode.findings import Finding, Gap
from homenode.measure.model import SuiteOptions
from homenode.measure.results.model import UNKNOWN_SWITCHES, Condition, Run, Switches
from homenode.measure.results.vantage import Vantage
from homenode.vm.plan import Plan

APP_TIMEOUT_S = 3600.0
MAX_NAME = 120
"""Letters of a run's name."""


class AppCommand(Struct, frozen=True):
    """The user's own program as a test."""

    argv: tuple[str, ...]  # no shell sees it
    # a regular expression with one group, searched in each line of the output; the last match is
    # the result
    metric: str
    lower_is_better: bool = False  # it is a time, not a rate
    name: str = "app"  # name of the metric
    timeout_s: float = APP_TIMEOUT_S


class BenchOptions(Struct, frozen=True):
    """A run: results/<system>/<name>/."""

    name: str
    suite: SuiteOptions = field(default_factory=SuiteOptions)
    repeats: int = 3
    seed: int = 1
    # of the layout; from the plan, if one is given and these are unknown
    switches: Switches = UNKNOWN_SWITCHES
    vantage: Vantage = Vantage.GUEST
    plan: Plan | None = None  # plan of the measured guest, which is verified first
    domain_xml: bytes | None = None  # stored next to it
    # of libvirt, QEMU and the machine type, from the host that started the guest
    versions: tuple[Condition, ...] = ()
    boot: str | None = None  # identity of this boot; None = read from the machine
    app: AppCommand | None = None
    pus: CpuSet | None = None  # measure on these alone
    nodes: tuple[int, ...] | None = None  # measure on these alone
    system: str | None = None  # directory above the run; None = the GPU's name, or cpu-only
    host: str | None = None  # name of the machine below a guest, see RunHead
    host_kind: str | None = None  # hardware of the machine below a guest, see RunHead
    arrangement: str | None = None
    emulated: bool = False  # results are meaningless; the probe detects TCG itself
    force: bool = False  # measure a guest that is not as planned, and mark the run
    marks: tuple[str, ...] = ()  # why nothing must be concluded, known beforehand
    experiment: str | None = None  # see RunHead
    block: int | None = None  # see RunHead


class BenchOutcome(Struct, frozen=True):
    """The outcome of a run. directory (a path), run: None if the guest differs from its plan, so
    nothing was measured."""

    directory: str | None
    run: Run | None
    findings: tuple[Finding, ...]  # findings of verification, preflight and run
    gaps: tuple[Gap, ...]  # tests that this machine does not get, failed, or ran out of time
    unknown: tuple[str, ...] = ()  # unknown facts of the host, a line each


def check_name(name: str, option: str = "--name") -> None:
    """Raise UsageError for a name that cannot be a results directory."""
    sound = 0 < len(name) <= MAX_NAME and name.isprintable() and "/" not in name
    if not sound or name.startswith("."):
        raise UsageError(
            f"{option}: {name[:40]!r} cannot name a directory (1 to {MAX_NAME} characters, no /, "
            "no leading dot)"
        )


def choose_cpus(options: BenchOptions) -> CpuSet | None:
    """Return the CPUs of a run: the requested ones, else, on a host, the plan's."""
    if options.pus is not None or options.vantage is Vantage.GUEST or options.plan is None:
        return options.pus
    pinned_cpus = CpuSet.union(options.plan.vcpu_pins)
    if not pinned_cpus:
        raise UsageError(
            "--plan: this plan pins no vCPUs, so it names no CPUs to measure on",
            hint="--cpus LIST",
        )
    return pinned_cpus
