"""TrialConfig: what a trial measures and in which order, stored with its journal for resuming.

Every layout is booted once a round, in a seeded order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from homenode import formats
from homenode.cpuset import CpuSet
from homenode.domain.overlay_disks import WritableDisk
from homenode.errors import InputError, UsageError
from homenode.measure.layouts.guest_access import ANSWER_S, STOP_S, GuestAccess
from homenode.measure.model import SuiteOptions
from homenode.measure.orders import AppOrder, BenchOptions
from homenode.measure.schedule import seeded_order
from homenode.plan.model import Plan
from homenode.results.model import UNKNOWN_SWITCHES, Condition, Switches
from homenode.results.vantage import Vantage
from homenode.vm.layout import PRESETS

BARE = "bare"
"""In the place of a layout: the host itself, on the plan's PUs and nodes, no guest."""

MAX_BOOTS = 100


@dataclass(frozen=True, slots=True)
class TrialStep:
    """One boot. number: its place, from 0. round: from 0; each layout is in each round once."""

    number: int
    round: int
    layout: str

    @property
    def is_bare(self) -> bool:
        return self.layout == BARE


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds that a boot and a measurement are expected to take."""

    boot_s: float
    measure_s: float


def trial_schedule(layouts: Sequence[str], boots: int, seed: int) -> tuple[TrialStep, ...]:
    """Every layout (and BARE, where it is among them) once a round, each round in its own order.

    What drifts over hours then meets every layout alike. The same arguments give the same steps.

    >>> [s.layout for s in trial_schedule(["pin", "default"], 2, seed=1)].count("pin")
    2

    Raises UsageError for a layout twice, none, or boots out of range.
    """
    if not layouts or len(set(layouts)) != len(layouts):
        found = ", ".join(layouts) or "none"
        raise UsageError(f"--layouts: expected one or more, each once, found {found}")
    if not 1 <= boots <= MAX_BOOTS:
        raise UsageError(f"--boots {boots}: expected 1 to {MAX_BOOTS}")
    order = [
        (number, layout)
        for number in range(boots)
        for layout in seeded_order(layouts, seed, number)
    ]
    return tuple(TrialStep(at, number, layout) for at, (number, layout) in enumerate(order))


def expected_seconds(steps: Sequence[TrialStep], durations: Durations) -> float:
    """How long steps take; the host itself is not booted.

    >>> expected_seconds(trial_schedule(["pin", BARE], 1, 1), Durations(60, 10))
    80.0
    """
    boots = sum(not step.is_bare for step in steps)
    return float(boots * durations.boot_s + len(steps) * durations.measure_s)


@dataclass(frozen=True, slots=True)
class Measuring:
    """What is measured in each boot. seed: of the order of tests. answer_s: how long a guest may
    take until it answers; stop_s: until it is off."""

    suite: SuiteOptions
    repeats: int = 3
    seed: int = 1
    app: AppOrder | None = None
    answer_s: float = ANSWER_S
    stop_s: float = STOP_S


@dataclass(frozen=True, slots=True)
class TrialConfig:
    """Everything but the documents and the plans. disks, nvram: of the copy, see copying.Prepared.

    apply_words: options of `homenode apply` that the layouts were planned with. plan_words: of
    `homenode plan`, where the user gave the PUs. report: the file that the user asked for.
    """

    measuring: Measuring
    reaching: GuestAccess
    host_kind: str | None
    versions: tuple[Condition, ...]
    emulated: bool
    apply_words: tuple[str, ...] = ()
    disks: tuple[WritableDisk, ...] = ()
    nvram: tuple[str, str] | None = None
    plan_words: tuple[str, ...] = ()
    report: str | None = None


def encode_config(begun: TrialConfig) -> bytes:
    """As JSON."""
    return formats.encode("trial-config", begun).encode()


def decode_config(content: bytes, source: str) -> TrialConfig:
    """Raises InputError, also for the configuration of a trial that an earlier version began."""
    try:
        version = formats.version_of(content, "trial-config", source)
        if version < formats.VERSIONS["trial-config"]:
            raise InputError(
                f"{source}: expected a trial of homenode.trial-config/2, found version {version}"
            )
        return formats.decode(content, "trial-config", TrialConfig, source)
    except InputError as error:
        raise InputError(
            error.message, hint="homenode trial undo undoes it; then start a new one"
        ) from None


def run_name(trial: str, step: TrialStep) -> str:
    """The results folder's name of a boot.

    >>> run_name("vm7", TrialStep(4, 1, "pin"))
    'vm7-pin-2'
    """
    return f"{trial}-{step.layout}-{step.round + 1}"


def guest_orders(
    config: TrialConfig,
    step: TrialStep,
    name: str,
    plan: Plan,
    document: bytes,
    *,
    trial: str,
    boot: str,
) -> BenchOptions:
    """The orders of one boot of a layout; the suite verifies the guest against the plan first."""
    preset = PRESETS.get(step.layout)
    return replace(
        _orders(config, step, name, plan, trial, boot),
        switches=UNKNOWN_SWITCHES if preset is None else Switches.of(preset),
        plan=plan,
        domain_xml=document,
        versions=config.versions,
        emulated=config.emulated,
    )


def bare_orders(
    config: TrialConfig, step: TrialStep, name: str, plan: Plan, trial: str
) -> BenchOptions:
    """The same suite on the host, on the PUs and nodes of a plan that pins."""
    return replace(
        _orders(config, step, name, plan, trial, f"{BARE} {step.round}"),
        vantage=Vantage.HOST,
        pus=CpuSet.union(plan.vcpu_pins),
        nodes=tuple(int(node) for node in plan.nodes) or None,
    )


def _orders(
    config: TrialConfig, step: TrialStep, name: str, plan: Plan, trial: str, boot: str
) -> BenchOptions:
    """What boots of layouts and of the host have in common."""
    measuring = config.measuring
    return BenchOptions(
        name=name,
        suite=measuring.suite,
        repeats=measuring.repeats,
        seed=measuring.seed + step.number,
        boot=boot,
        app=measuring.app,
        host=plan.host_fingerprint,
        host_kind=config.host_kind,
        experiment=trial,
        block=step.round,
    )
