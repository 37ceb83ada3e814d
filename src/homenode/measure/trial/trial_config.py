"""TrialConfig: the tests of a trial and their order, stored with its journal for resuming.

Every layout is booted once a round, in a seeded order.
"""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from homenode.cpuset import CpuSet
from homenode.measure.experiment import ScheduledTask, schedule
from homenode.measure.model import AppCommand, BenchOptions, SuiteOptions
from homenode.measure.results.model import UNKNOWN_SWITCHES, Condition, Switches, Vantage
from homenode.vm.domain.copy import WritableDisk
from homenode.vm.hypervisor.connection import ANSWER_S, STOP_S, GuestAccess
from homenode.vm.layout import PRESETS
from homenode.vm.plan import Plan

BARE = "bare"
"""Instead of a layout: the host itself, on the plan's CPUs and nodes, without a guest."""

MAX_BOOTS = 100


def schedule_trial(layouts: Sequence[str], boots: int, seed: int) -> tuple[ScheduledTask, ...]:
    """Schedule every layout, and BARE if requested, once a round; each round has its own order.

    >>> [s.variant for s in schedule_trial(["pin", "default"], 2, seed=1)].count("pin")
    2

    Raises UsageError for a layout twice, none, or boots out of range.
    """
    plan = schedule(layouts, (), boots, seed, called="--layouts", option="--boots", limit=MAX_BOOTS)
    return plan.tasks


class MeasureOptions(Struct, frozen=True):
    """The tests of each boot and their limits."""

    suite: SuiteOptions
    repeats: int = 3
    seed: int = 1  # seed of the test order
    app: AppCommand | None = None
    answer_s: float = ANSWER_S  # time limit for a guest to answer
    stop_s: float = STOP_S  # time limit for a guest to shut down


class TrialConfig(Struct, frozen=True):
    """A trial's settings, without its definitions and plans."""

    measuring: MeasureOptions
    reaching: GuestAccess
    host_kind: str | None
    versions: tuple[Condition, ...]
    emulated: bool
    # options of `homenode apply` that the layouts were planned with
    apply_words: tuple[str, ...] = ()
    disks: tuple[WritableDisk, ...] = ()  # disks of the copy, see PreparedCopy
    nvram: tuple[str, str] | None = None  # NVRAM of the copy, see PreparedCopy
    report: str | None = None  # the report file that the user requested


def run_name(trial: str, step: ScheduledTask) -> str:
    """Return the name of a boot's results directory.

    >>> run_name("vm7", ScheduledTask(4, 1, "pin"))
    'vm7-pin-2'
    """
    return f"{trial}-{step.variant}-{step.round + 1}"


def boot_orders(
    config: TrialConfig,
    trial: str,
    step: ScheduledTask,
    plan: Plan,
    boot: str,
    document: bytes | None = None,
) -> BenchOptions:
    """Return the orders for one boot of a layout; its guest is verified against the plan first.
    document: None = no guest: the host itself on the CPUs and nodes of a plan that pins."""
    measuring = config.measuring
    orders = BenchOptions(
        name=run_name(trial, step),
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
    if document is None:
        pus = CpuSet.union(plan.vcpu_pins)
        nodes = tuple(int(node) for node in plan.nodes) or None
        return replace(orders, vantage=Vantage.HOST, pus=pus, nodes=nodes)
    preset = PRESETS.get(step.variant)
    return replace(
        orders,
        switches=UNKNOWN_SWITCHES if preset is None else Switches.from_layout(preset),
        plan=plan,
        domain_xml=document,
        versions=config.versions,
        emulated=config.emulated,
    )
