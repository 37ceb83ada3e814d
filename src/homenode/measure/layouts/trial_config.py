"""TrialConfig: what a trial measures, stored with its journal for `trial resume`."""

from dataclasses import dataclass, field

from homenode import formats
from homenode.cpuset import CpuSet
from homenode.domain.overlay_disks import WritableDisk
from homenode.errors import InputError
from homenode.measure.layouts.guest_access import ANSWER_S, STOP_S, GuestAccess
from homenode.measure.layouts.schedule import BARE, TrialStep
from homenode.measure.model import SuiteOptions
from homenode.measure.orders import AppOrder, BenchOptions
from homenode.plan.layout import PRESETS
from homenode.plan.model import Plan
from homenode.results.model import UNKNOWN_SWITCHES, Condition, Switches
from homenode.results.vantage import Vantage


@dataclass(frozen=True, slots=True)
class Measuring:
    """What is measured in each boot. seed: of the order of tests. answer_s: how long a guest may
    take until it answers; stop_s: until it is off."""

    wishes: SuiteOptions = field(default_factory=SuiteOptions)
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
    """Raises InputError."""
    try:
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
    measuring: Measuring, step: TrialStep, name: str, plan: Plan, document: bytes, *,
    trial: str, boot: str, host_kind: str | None, versions: tuple[Condition, ...], emulated: bool,
) -> BenchOptions:  # fmt: skip
    """The orders of one boot of a layout; the suite verifies the guest against the plan first."""
    return BenchOptions(
        name=name,
        wishes=measuring.wishes,
        repeats=measuring.repeats,
        seed=measuring.seed + step.number,
        switches=Switches.of(PRESETS[step.layout]) if step.layout in PRESETS else UNKNOWN_SWITCHES,
        vantage=Vantage.GUEST,
        plan=plan,
        domain_xml=document,
        versions=versions,
        boot=boot,
        app=measuring.app,
        host=plan.host_fingerprint,
        host_kind=host_kind,
        emulated=emulated,
        experiment=trial,
        block=step.round,
    )


def bare_orders(
    measuring: Measuring, step: TrialStep, name: str, plan: Plan, kind: str | None, trial: str
) -> BenchOptions:
    """The same suite on the host, on the PUs and nodes of a plan that pins."""
    pus = CpuSet(pu for pins in plan.vcpu_pins for pu in pins)
    return BenchOptions(
        name=name,
        wishes=measuring.wishes,
        repeats=measuring.repeats,
        seed=measuring.seed + step.number,
        vantage=Vantage.HOST,
        boot=f"{BARE} {step.round}",
        app=measuring.app,
        pus=pus,
        nodes=tuple(int(node) for node in plan.nodes) or None,
        host=plan.host_fingerprint,
        host_kind=kind,
        experiment=trial,
        block=step.round,
    )
