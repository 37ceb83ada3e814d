"""Orders: what a trial is asked for, stored so that it can be gone on with."""

from dataclasses import dataclass, field

from homenode.bench.model import SuiteWishes
from homenode.bench.orders import AppOrder, BenchOrders
from homenode.cpuset import CpuSet
from homenode.plan.layout import PRESETS
from homenode.plan.model import Plan
from homenode.results.model import UNKNOWN_SWITCHES, Condition, Switches
from homenode.results.vantage import Vantage
from homenode.trial.reaching import ANSWER_S, STOP_S
from homenode.trial.schedule import BARE, TrialStep


@dataclass(frozen=True, slots=True)
class Measuring:
    """What is measured in each boot. seed: of the order of tests. answer_s: how long a guest may
    take until it answers; stop_s: until it is off."""

    wishes: SuiteWishes = field(default_factory=SuiteWishes)
    repeats: int = 3
    seed: int = 1
    app: AppOrder | None = None
    answer_s: float = ANSWER_S
    stop_s: float = STOP_S


def run_name(trial: str, step: TrialStep) -> str:
    """The results folder's name of a boot.

    >>> run_name("vm7", TrialStep(4, 1, "pin"))
    'vm7-pin-2'
    """
    return f"{trial}-{step.layout}-{step.round + 1}"


def guest_orders(
    measuring: Measuring, step: TrialStep, name: str, plan: Plan, document: bytes, *,
    trial: str, boot: str, host_kind: str | None, versions: tuple[Condition, ...], emulated: bool,
) -> BenchOrders:  # fmt: skip
    """The orders of one boot of a layout; the suite verifies the guest against the plan first."""
    return BenchOrders(
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
) -> BenchOrders:
    """The same suite on the host, on the PUs and nodes of a plan that pins."""
    pus = CpuSet(pu for pins in plan.vcpu_pins for pu in pins)
    return BenchOrders(
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
