"""Orders of homenode bench from what the user typed. [I/O]"""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from homenode.cli.terminal import read_file
from homenode.errors import UsageError

if TYPE_CHECKING:
    from homenode.measure.model import SuiteOptions
    from homenode.measure.orders import AppOrder, BenchOptions
    from homenode.results.model import Switches
    from homenode.results.vantage import Vantage


@dataclass(frozen=True, slots=True)
class BenchArguments:
    """The options as they were typed; see cli/bench.py."""

    name: str
    plan: Path | None
    domain_xml: Path | None
    tests: str | None
    repeat: int
    quick: bool
    full: bool
    seed: int
    app: str | None
    metric: str | None
    lower_is_better: bool
    nccl_max_msg: str
    layout: str | None
    boot: str | None
    vantage: "Vantage | None"
    pus: str | None
    nodes: str | None
    host_kind: str | None
    arrangement: str | None
    python: str
    force: bool
    app_timeout_s: int = 3600


def orders_of(typed: BenchArguments) -> "BenchOptions":
    """The orders. Raises UsageError, naming the option, and InputError for files."""
    from homenode.cpuset import CpuSet
    from homenode.measure.orders import BenchOptions
    from homenode.plan.stored import read_plan
    from homenode.results.model import UNKNOWN_SWITCHES

    plan = None
    if typed.plan is not None:
        plan = read_plan(read_file(typed.plan, "a saved plan"), str(typed.plan))
    if typed.domain_xml is not None and plan is None:
        raise UsageError("--domain-xml: expected --plan beside it, whose document it is")
    document = None
    if typed.domain_xml is not None:
        document = read_file(typed.domain_xml, "a domain document")
    return BenchOptions(
        name=typed.name,
        wishes=_wishes(typed),
        repeats=typed.repeat,
        seed=typed.seed,
        switches=UNKNOWN_SWITCHES if typed.layout is None else _switches(typed.layout),
        vantage=typed.vantage or _vantage(has_plan=plan is not None),
        plan=plan,
        domain_xml=document,
        boot=typed.boot,
        app=_app(typed),
        pus=None if typed.pus is None else CpuSet.parse(typed.pus, "--pus"),
        nodes=None if typed.nodes is None else tuple(CpuSet.parse(typed.nodes, "--nodes")),
        host_kind=typed.host_kind,
        arrangement=typed.arrangement,
        force=typed.force,
        marks=_marks(typed),
    )


def _wishes(typed: BenchArguments) -> "SuiteOptions":
    from homenode.measure.model import Depth, Group, SuiteOptions
    from homenode.units import parse_bytes

    if typed.quick and typed.full:
        raise UsageError("--quick, --full: expected one of them, found both")
    names = [] if typed.tests is None else [one.strip() for one in typed.tests.split(",")]
    known = [str(group) for group in Group if group is not Group.APP]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(
            f"--tests: expected some of {', '.join(known)}, found {', '.join(unknown) or 'none'}"
        )
    largest = parse_bytes(typed.nccl_max_msg)
    if not 8 <= largest <= 1 << 40:
        raise UsageError(f"--nccl-max-msg {typed.nccl_max_msg}: expected 8 B to 1 TiB")
    depth = Depth.QUICK if typed.quick else Depth.FULL if typed.full else Depth.NORMAL
    groups = tuple(dict.fromkeys(Group(name) for name in names))
    return SuiteOptions(groups, depth, largest, typed.python)


def _app(typed: BenchArguments) -> "AppOrder | None":
    from homenode.measure.orders import AppOrder

    if (typed.app is None) != (typed.metric is None):
        raise UsageError(
            "--app, --metric: expected both, found one",
            hint=r"such as --app 'python3 train.py' --metric 'images/s: ([0-9.]+)'",
        )
    if typed.app is None or typed.metric is None:
        return None
    try:
        argv = tuple(shlex.split(typed.app))
    except ValueError as error:
        raise UsageError(f"--app: expected a command, found: {error}") from None
    if not argv:
        raise UsageError("--app: expected a command, found nothing")
    return AppOrder(
        argv, typed.metric, typed.lower_is_better, Path(argv[0]).name, float(typed.app_timeout_s)
    )


def _switches(layout: str) -> "Switches":
    from homenode.plan.layout import PRESETS, preset_named
    from homenode.results.model import Switches

    preset = preset_named(layout)
    if preset is None:
        raise UsageError(f"--layout {layout}: expected one of {', '.join(PRESETS)}")
    return Switches.of(preset)


def _marks(typed: BenchArguments) -> tuple[str, ...]:
    """Raises UsageError for a virtual machine that is called a host, unless it is forced."""
    from homenode.results.vantage import Vantage

    if typed.vantage is not Vantage.HOST or not _is_virtual():
        return ()
    if not typed.force:
        raise UsageError(
            "--vantage host: expected a machine that is no virtual one, found a virtual machine",
            hint="leave it out: the run is of a guest; --force measures, and marks the run",
        )
    return ("measured in a virtual machine, and called a host (--vantage host --force)",)


def _vantage(*, has_plan: bool) -> "Vantage":
    """Where we run: a guest of a plan, a Slurm job, a virtual machine, or a host."""
    from homenode.results.vantage import Vantage

    if has_plan:
        return Vantage.GUEST
    if os.environ.get("SLURM_JOB_ID"):
        return Vantage.JOB
    return Vantage.GUEST if _is_virtual() else Vantage.HOST


def _is_virtual() -> bool:
    from homenode.measure.emulation import is_virtual
    from homenode.snapshot.live import LiveSnapshot

    return is_virtual(LiveSnapshot())
