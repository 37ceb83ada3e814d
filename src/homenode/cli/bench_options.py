"""Records of the options of `homenode bench`, which trial shares, and what they ask for. [I/O]"""

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from homenode.cli.arguments.measure import AppArguments, RunArguments, SuiteArguments
from homenode.errors import UsageError
from homenode.input_files import read_input
from homenode.measure.results.vantage import Vantage

if TYPE_CHECKING:
    from homenode.measure.model import SuiteOptions
    from homenode.measure.orders import AppOrder, BenchOptions
    from homenode.measure.results.model import Switches

_LARGEST_TOPOLOGY = 100_000
"""It is an argument of a program; Linux takes 128 KiB in one."""


def bench_options(
    name: str, suite: SuiteArguments, app: AppArguments, run: RunArguments
) -> "BenchOptions":
    """The run that is asked for. Raises UsageError, naming the option, and InputError for files."""
    from homenode.cpuset import CpuSet
    from homenode.measure.orders import BenchOptions, check_name
    from homenode.measure.results.model import UNKNOWN_SWITCHES
    from homenode.plan.stored import read_plan

    plan = None
    if run.plan is not None:
        plan = read_plan(read_input(run.plan, "a saved plan"), str(run.plan))
    if run.domain is not None and plan is None:
        raise UsageError("--domain: expected --plan as well, whose document it is")
    if (run.experiment is None) != (run.block is None):
        raise UsageError(
            "--experiment, --block: expected both, found one",
            hint="a block is a round of the study: one run of each of its alternatives",
        )
    if run.experiment is not None:
        check_name(run.experiment, "--experiment")
    document = None
    if run.domain is not None:
        document = read_input(run.domain, "a domain document")
    return BenchOptions(
        name=name,
        suite=_suite(suite),
        repeats=suite.repeat,
        seed=suite.seed,
        switches=UNKNOWN_SWITCHES if run.layout is None else _switches(run.layout),
        vantage=run.vantage or _vantage(has_plan=plan is not None),
        plan=plan,
        domain_xml=document,
        boot=run.boot,
        app=_app(app),
        pus=None if run.pus is None else CpuSet.parse(run.pus, "--pus"),
        nodes=None if run.nodes is None else tuple(CpuSet.parse(run.nodes, "--nodes")),
        host_kind=run.host_kind,
        arrangement=run.arrangement,
        force=run.force,
        marks=_marks(run),
        experiment=run.experiment,
        block=run.block,
    )


def _suite(typed: SuiteArguments) -> "SuiteOptions":
    from homenode.measure.model import Depth, Group, SuiteOptions
    from homenode.units import parse_bytes
    from homenode.wording import did_you_mean

    if typed.quick and typed.full:
        raise UsageError("give either --quick or --full, not both")
    names = [] if typed.tests is None else [one.strip() for one in typed.tests.split(",")]
    known = [str(group) for group in Group if group is not Group.APP]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(
            f"--tests: expected some of {', '.join(known)}, found {', '.join(unknown) or 'none'}",
            hint=did_you_mean(unknown[0], known).strip() or None,
        )
    largest = parse_bytes(typed.nccl_max_msg)
    if not 8 <= largest <= 1 << 40:
        raise UsageError(f"--nccl-max-msg {typed.nccl_max_msg}: expected 8 B to 1 TiB")
    depth = Depth.QUICK if typed.quick else Depth.FULL if typed.full else Depth.NORMAL
    groups = tuple(dict.fromkeys(Group(name) for name in names))
    topology = None
    if typed.nccl_topo is not None:
        topology = read_input(typed.nccl_topo, "a topology file").decode("utf-8", "replace")
        if len(topology) > _LARGEST_TOPOLOGY:
            raise UsageError(
                f"--nccl-topo {typed.nccl_topo}: expected at most {_LARGEST_TOPOLOGY} characters, "
                f"found {len(topology)}"
            )
    return SuiteOptions(groups, depth, largest, typed.python, topology)


def _app(typed: AppArguments) -> "AppOrder | None":
    from homenode.measure.orders import AppOrder

    if (typed.app is None) != (typed.metric is None):
        raise UsageError(
            "--app, --metric: expected both, found one",
            hint=r"for example --app 'python3 train.py' --metric 'images/s: ([0-9.]+)'",
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
        argv, typed.metric, typed.lower_is_better, Path(argv[0]).name, float(typed.app_timeout)
    )


def _switches(layout: str) -> "Switches":
    from homenode.measure.results.model import Switches
    from homenode.vm.layout import preset_named, unknown_layout

    preset = preset_named(layout)
    if preset is None:
        raise unknown_layout(layout)
    return Switches.of(preset)


def _marks(typed: RunArguments) -> tuple[str, ...]:
    """Raises UsageError for a virtual machine that is called a host, unless it is forced."""
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
    if has_plan:
        return Vantage.GUEST
    if os.environ.get("SLURM_JOB_ID"):
        return Vantage.JOB
    return Vantage.GUEST if _is_virtual() else Vantage.HOST


def _is_virtual() -> bool:
    from homenode.machine.snapshot.live import LiveSnapshot
    from homenode.measure.environment import is_virtual

    return is_virtual(LiveSnapshot())
