"""Options of bench and trial, as the orders of a run and the request of a trial. [I/O]"""

import os
import re
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from homenode.cli.arguments.measure import (
    AppArguments,
    RunArguments,
    SuiteArguments,
    TrialArguments,
)
from homenode.cli.command import format_words
from homenode.cpuset import CpuSet
from homenode.errors import UsageError, exclusive, requires, unknown
from homenode.measure.access.ssh import SshChannel
from homenode.measure.environment import is_virtual
from homenode.measure.model import (
    AppCommand,
    BenchOptions,
    SuiteDepth,
    SuiteGroup,
    SuiteOptions,
    check_name,
)
from homenode.measure.results.model import UNKNOWN_SWITCHES, Switches
from homenode.measure.results.vantage import Vantage
from homenode.measure.trial.journal import MeasureOptions
from homenode.measure.trial.prepare import TrialRequest
from homenode.objective import Objective
from homenode.plan.stored import read_plan
from homenode.process import find_program
from homenode.safe.input_files import read_input
from homenode.units import parse_bytes
from homenode.vm.hypervisor.connection import (
    GuestAccess,
    Transport,
    check_host,
    check_uri,
    is_local,
)
from homenode.vm.layout import PRESETS, Pinning, find_preset, unknown_layout
from homenode.vm.plan_options import PlanOptions

if TYPE_CHECKING:
    from homenode.machine.snapshot.protocol import Snapshot

_STATIC_PROBE = "homenode-probe-static"
_MAX_TOPOLOGY = 100_000
"""Characters of a topology as an argument; Linux limits an argument to 128 KiB."""


def build_bench_options(
    name: str,
    suite: SuiteArguments,
    app: AppArguments,
    run: RunArguments,
    *,
    snapshot: "Snapshot | None" = None,
) -> BenchOptions:
    """Return the requested run. snapshot: the machine to measure; None = this machine. Raises
    UsageError, naming the option, and InputError for files."""
    plan = None
    if run.plan is not None:
        plan = read_plan(read_input(run.plan, "a saved plan"), str(run.plan))
    if run.domain is not None and plan is None:
        raise requires("--domain", "--plan")
    if (run.experiment is None) != (run.block is None):
        raise UsageError(
            "--experiment and --block require each other",
            hint="a block is a round of the study: one run of each of its alternatives",
        )
    if run.experiment is not None:
        check_name(run.experiment, "--experiment")
    document = None
    if run.domain is not None:
        document = read_input(run.domain, "a domain XML")
    return BenchOptions(
        name=name,
        suite=_build_suite(suite),
        repeats=suite.repeat,
        seed=suite.seed,
        switches=UNKNOWN_SWITCHES if run.layout is None else _parse_switches(run.layout),
        vantage=run.vantage or _find_vantage(snapshot, has_plan=plan is not None),
        plan=plan,
        domain_xml=document,
        boot=run.boot,
        app=_build_app(app),
        pus=None if run.pus is None else CpuSet.parse(run.pus, "--cpus"),
        nodes=None if run.nodes is None else tuple(CpuSet.parse(run.nodes, "--nodes")),
        host_kind=run.host_kind,
        arrangement=run.arrangement,
        force=run.force,
        marks=_list_marks(run, snapshot),
        experiment=run.experiment,
        block=run.block,
    )


def _build_suite(arguments: SuiteArguments) -> SuiteOptions:
    if arguments.quick and arguments.full:
        raise exclusive("--quick", "--full")
    names = [] if arguments.tests is None else [word.strip() for word in arguments.tests.split(",")]
    known_tests = [str(group) for group in SuiteGroup if group is not SuiteGroup.APP]
    for name in names:
        if name not in known_tests:
            raise unknown(
                "test", name, known_tests, f"--tests {','.join(known_tests)}", "--tests: "
            )
    largest = parse_bytes(arguments.nccl_max_msg)
    if not 8 <= largest <= 1 << 40:
        raise UsageError(f"--nccl-max-msg: {arguments.nccl_max_msg} is out of range (8 B to 1 TiB)")
    depth = (
        SuiteDepth.QUICK
        if arguments.quick
        else SuiteDepth.FULL
        if arguments.full
        else SuiteDepth.NORMAL
    )
    groups = tuple(dict.fromkeys(SuiteGroup(name) for name in names))
    topology = None
    if arguments.nccl_topo is not None:
        topology = read_input(arguments.nccl_topo, "a topology file").decode("utf-8", "replace")
        if len(topology) > _MAX_TOPOLOGY:
            raise UsageError(
                f"--nccl-topo {arguments.nccl_topo}: expected at most {_MAX_TOPOLOGY} characters, "
                f"found {len(topology)}"
            )
    return SuiteOptions(groups, depth, largest, arguments.python, topology)


def _build_app(arguments: AppArguments) -> AppCommand | None:
    if (arguments.app is None) != (arguments.metric is None):
        option, other = ("--app", "--metric") if arguments.metric is None else ("--metric", "--app")
        example = r"--app 'python3 train.py' --metric 'images/s: ([0-9.]+)'"
        raise requires(option, other, example)
    if arguments.app is None or arguments.metric is None:
        return None
    try:
        argv = tuple(shlex.split(arguments.app))
    except ValueError as error:
        raise UsageError(f"--app: not a command: {error}") from None
    if not argv:
        raise UsageError("--app: missing CMD", hint="--app 'python3 train.py'")
    return AppCommand(
        argv,
        arguments.metric,
        arguments.lower_is_better,
        Path(argv[0]).name,
        float(arguments.app_timeout),
    )


def _parse_switches(layout: str) -> Switches:
    preset = find_preset(layout)
    if preset is None:
        raise unknown_layout(layout)
    return Switches.from_layout(preset)


def _list_marks(arguments: RunArguments, snapshot: "Snapshot | None") -> tuple[str, ...]:
    """Raises UsageError for a virtual machine that is called a host, unless it is forced."""
    if arguments.vantage is not Vantage.HOST or not _is_virtual(snapshot):
        return ()
    if not arguments.force:
        raise UsageError(
            "--context host: expected bare metal, found a virtual machine",
            hint="omit it to measure as a guest, or add --force: the run is then marked",
        )
    return ("measured in a virtual machine that is recorded as a host (--context host --force)",)


def _find_vantage(snapshot: "Snapshot | None", *, has_plan: bool) -> Vantage:
    """Return the vantage: a guest of a plan, a Slurm job, a virtual machine, or a host."""
    if has_plan:
        return Vantage.GUEST
    if snapshot is None and os.environ.get("SLURM_JOB_ID"):
        return Vantage.JOB
    return Vantage.GUEST if _is_virtual(snapshot) else Vantage.HOST


def _is_virtual(snapshot: "Snapshot | None") -> bool:
    from homenode.machine.snapshot.live import LiveSnapshot

    return is_virtual(snapshot or LiveSnapshot())


def list_layouts(arguments: TrialArguments) -> tuple[str, ...]:
    """The layouts to compare, the study's names as presets; unknown names are rejected later."""
    names = (name.strip() for name in (arguments.layouts or "").split(",") if name.strip())
    return tuple(name if (preset := find_preset(name)) is None else preset.name for name in names)


def check(arguments: TrialArguments) -> None:
    """Raise UsageError for options that do not go together."""
    layouts = list_layouts(arguments)
    if arguments.layouts is not None and not layouts:
        raise UsageError(
            "--layouts: missing A,B,...",
            hint="--layouts default,pin,pin-numa,pin-numa-pci",
        )
    check_access(arguments.access.guest)
    for layout in layouts:
        if layout not in PRESETS:
            raise unknown_layout(layout, "--layouts")
    if (
        arguments.bare
        and layouts
        and all(PRESETS[layout].pinning is Pinning.NONE for layout in layouts)
    ):
        raise UsageError(
            "--bare-metal requires a layout that pins: it names the CPUs to measure on",
            hint="--layouts default,pin",
        )
    check_host(arguments.host, arguments.connect)
    if arguments.bare and not is_local(check_uri(arguments.connect)):
        raise UsageError("--bare-metal: expected a libvirt of this machine: the suite runs here")


def check_access(reaching: GuestAccess) -> None:
    """Raise UsageError for an address, user, port or key that cannot reach a guest."""
    if reaching.transport is not Transport.SSH:
        return
    SshChannel(reaching.address or "localhost", reaching.user, Path("known_hosts"), reaching.port)
    if reaching.key is not None and not os.access(reaching.key, os.R_OK):
        raise UsageError(f"--ssh-key {reaching.key}: cannot read a private key")


def build_trial_request(
    domain: str, arguments: TrialArguments, layouts: tuple[str, ...], objective: Objective
) -> TrialRequest:
    """Return the requested trial. Its name contains the time unless the user gave one. layouts,
    objective: defaults if the user named none."""
    layouts = list_layouts(arguments) or layouts
    trial_id = (
        arguments.id or f"{_clean_name(domain)}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    )
    run = build_bench_options(
        trial_id, arguments.suite, arguments.own, RunArguments(vantage=Vantage.GUEST)
    )
    measuring = MeasureOptions(
        run.suite,
        run.repeats,
        run.seed,
        run.app,
        arguments.access.boot_timeout,
        arguments.access.shutdown_timeout,
    )
    placing, words = _build_placement_options(arguments, layouts[0])
    few = 3 if len(layouts) <= 2 else 4  # docs/developer/statistics.md
    return TrialRequest(
        id=trial_id,
        layouts=layouts,
        boots=arguments.boots or few,
        seed=run.seed,
        bare=arguments.bare,
        as_copy=not arguments.in_place,
        results=arguments.results,
        placing=placing,
        apply_words=words,
        measuring=measuring,
        reaching=arguments.access.guest,
        objective=arguments.objective or objective,
    )


def _build_placement_options(
    arguments: TrialArguments, first: str
) -> tuple[PlanOptions, tuple[str, ...]]:
    """Return the placement, also as options of `homenode apply`."""
    # The GPUs are those that the VM has, whatever NVLink is between them.
    options = structs.replace(arguments.options, layout=first, without_nvlink=True)
    words = [*format_words(arguments.options)]
    for path in arguments.after:
        words += ["--after", str(path.absolute())]
    if arguments.host is not None:
        words += ["--host", _make_source_absolute(arguments.host)]
    return options, tuple(words)


def _make_source_absolute(source: str) -> str:
    """Return a host's file as an absolute path, for commands in any directory."""
    return str(Path(source).absolute()) if Path(source).exists() else source


def _clean_name(domain: str) -> str:
    """Return the domain's name as part of a directory name."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", domain).strip("-.")[:60] or "vm"


def read_static_probe(path: Path | None) -> bytes:
    """Return the named static probe, else that of this installation."""
    neighbours = Path(sys.executable).with_name(_STATIC_PROBE)
    probe = path or (neighbours if neighbours.exists() else None) or find_program(_STATIC_PROBE)
    if probe is None:
        raise UsageError(
            f"{_STATIC_PROBE} not found next to {sys.executable} or on PATH", hint="make setup"
        )
    from homenode.check.verify.boot.guest_files import is_static

    content = read_input(Path(probe), "the static probe")
    if content[:4] == b"\x7fELF" and content[18:20] == b"\x3e\x00" and not is_static(content):
        raise UsageError(
            f"--probe {probe}: expected a static program, found a dynamically linked program",
            hint="make -C native static",
        )
    return content
