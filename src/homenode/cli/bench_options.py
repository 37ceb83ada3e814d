"""Records of the options of `homenode bench`, which trial shares, and what they ask for. [I/O]"""

import os
import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homenode.cli.completion import layouts, test_lists
from homenode.errors import UsageError
from homenode.input_files import read_input
from homenode.results.vantage import Vantage

if TYPE_CHECKING:
    from homenode.measure.model import SuiteOptions
    from homenode.measure.orders import AppOrder, BenchOptions
    from homenode.results.model import Switches

_LARGEST_TOPOLOGY = 100_000
"""It is an argument of a program; Linux takes 128 KiB in one."""

_suite_option = partial(typer.Option, rich_help_panel="What is measured")
_app_option = partial(typer.Option, rich_help_panel="Your own program")
_run_option = partial(typer.Option, rich_help_panel="Where it is measured")


@dataclass(frozen=True, slots=True)
class SuiteArguments:
    """Which tests, how long and how often."""

    tests: Annotated[
        str | None,
        _suite_option(
            "--tests",
            metavar="A,B",
            help="Groups of tests: cpu-single, cpu-all, stream, mem-latency, core-to-core, smt, "
            "placement, gpu-copy, gpu-compute, gpu-bandwidth, gpu-small-copies, gpu-peer, nccl, "
            "collectives. Default: all that can run, but collectives.",
            autocompletion=test_lists,
        ),
    ] = None
    repeat: Annotated[
        int,
        _suite_option(
            "--repeat", metavar="N", min=1, max=1000, help="Rounds; each test runs once in each."
        ),
    ] = 3
    quick: Annotated[bool, _suite_option("--quick", help="Half a second a figure.")] = False
    full: Annotated[bool, _suite_option("--full", help="Eight seconds a figure.")] = False
    seed: Annotated[int, _suite_option("--seed", metavar="N", help="Seed of the random order.")] = 1
    nccl_max_msg: Annotated[
        str, _suite_option("--nccl-max-msg", metavar="SIZE", help="Largest message of collectives.")
    ] = "1GiB"
    nccl_topo: Annotated[
        Path | None,
        _suite_option(
            "--nccl-topo",
            metavar="FILE",
            help="The topology file that the test collectives gives to NCCL. A trial makes it.",
        ),
    ] = None
    python: Annotated[
        str,
        _suite_option(
            "--python",
            metavar="FILE",
            help="A Python with PyTorch, used where GPU tools are missing; homenode need not be "
            "installed there.",
        ),
    ] = "python3"


@dataclass(frozen=True, slots=True)
class AppArguments:
    """A program of the user's, measured as one more test."""

    app: Annotated[
        str | None,
        _app_option("--app", metavar="CMD", help="A command to measure, started without a shell."),
    ] = None
    metric: Annotated[
        str | None,
        _app_option(
            "--metric",
            metavar="REGEX",
            help="Finds its figure: one group, searched line by line; the last match counts.",
        ),
    ] = None
    lower: Annotated[
        bool,
        _app_option(
            "--lower/--higher-is-better", help="The figure is a time in seconds, or a rate."
        ),
    ] = False
    app_timeout: Annotated[
        int,
        _app_option(
            "--app-timeout",
            metavar="S",
            min=1,
            max=1_000_000,
            help="Seconds after which it is stopped and has no figure.",
        ),
    ] = 3600


@dataclass(frozen=True, slots=True)
class RunArguments:
    """What the run is of."""

    plan: Annotated[
        Path | None,
        _run_option(
            "--plan",
            metavar="PLAN.json",
            help="The plan of this guest, which is verified first. A copy is kept with the run.",
        ),
    ] = None
    domain: Annotated[
        Path | None,
        _run_option(
            "--domain",
            metavar="FILE",
            help="With --plan: the guest's domain document, of which a copy is kept with the run.",
        ),
    ] = None
    layout: Annotated[
        str | None,
        _run_option(
            "--layout",
            "-l",
            metavar="NAME",
            help="The layout of this guest (homenode layouts). Default: the plan's.",
            autocompletion=layouts,
        ),
    ] = None
    arrangement: Annotated[
        str | None,
        _run_option(
            "--arrangement", metavar="TEXT", help="What else was chosen: a queue, a policy."
        ),
    ] = None
    boot: Annotated[
        str | None,
        _run_option("--boot", metavar="ID", help="Identity of this boot. Default: the kernel's."),
    ] = None
    experiment: Annotated[
        str | None,
        _run_option("--experiment", metavar="ID", help="The study that this run is a part of."),
    ] = None
    block: Annotated[
        int | None,
        _run_option(
            "--block", metavar="N", min=0, help="Its round there, from 0; with --experiment."
        ),
    ] = None
    vantage: Annotated[
        Vantage | None, _run_option("--vantage", help="Where this is. Default: detected.")
    ] = None
    pus: Annotated[
        str | None, _run_option("--pus", metavar="LIST", help="Measure on these PUs alone.")
    ] = None
    nodes: Annotated[
        str | None, _run_option("--nodes", metavar="LIST", help="Measure on these nodes alone.")
    ] = None
    host_kind: Annotated[
        str | None,
        _run_option("--host-kind", metavar="TEXT", help="What hosts of this kind have in common."),
    ] = None
    force: Annotated[
        bool, _run_option("--force", help="Measure a guest that is not as planned; marks the run.")
    ] = False


def bench_options(
    name: str, suite: SuiteArguments, app: AppArguments, run: RunArguments
) -> "BenchOptions":
    """The run that is asked for. Raises UsageError, naming the option, and InputError for files."""
    from homenode.cpuset import CpuSet
    from homenode.measure.orders import BenchOptions, check_name
    from homenode.plan.stored import read_plan
    from homenode.results.model import UNKNOWN_SWITCHES

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
    return AppOrder(argv, typed.metric, typed.lower, Path(argv[0]).name, float(typed.app_timeout))


def _switches(layout: str) -> "Switches":
    from homenode.results.model import Switches
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
    from homenode.measure.environment import is_virtual
    from homenode.snapshot.live import LiveSnapshot

    return is_virtual(LiveSnapshot())
