"""homenode bench and bench setup: the suite on this or another machine, and its tools. [I/O]"""

import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from homenode.cli.arguments.measure import BenchArguments, BenchSetupArguments
from homenode.cli.bench_options import build_bench_options, read_static_probe
from homenode.cli.terminal import (
    exit_if_bad,
    get_error_console,
    interruptible,
    make_console,
    note,
    note_gaps,
    print_findings,
)
from homenode.errors import FINDINGS, HostError, ToolError, exclusive, requires
from homenode.findings import Findings
from homenode.measure.access.machine import LocalMachine
from homenode.measure.access.remote import RemoteHost, SshHost
from homenode.measure.model import BenchOptions, BenchOutcome, check_name
from homenode.measure.runner import inspect, run_bench
from homenode.text import command_line, plural

if TYPE_CHECKING:
    from homenode.measure.access.machine import Machine
    from homenode.measure.experiment import Progress
    from homenode.measure.tool_setup import SetupPlan, SetupStep, Vendor


def bench(arguments: BenchArguments) -> None:
    if arguments.dry_run and arguments.json:
        raise exclusive("--dry-run", "--json", "homenode bench --dry-run")
    if arguments.probe is not None and arguments.on is None:
        raise requires("--probe", "--on", "--on ssh://HOST")
    if arguments.resume and arguments.name is None:
        raise requires("--resume", "--name NAME", "ls " + command_line(arguments.results))
    layout = arguments.run.layout or "run"
    name = arguments.name or f"{layout}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    check_name(name)
    with _open_machine(arguments, name) as machine:
        snapshot = None if arguments.on is None else machine.snapshot()
        options = build_bench_options(
            name, arguments.suite, arguments.own, arguments.run, snapshot=snapshot
        )
        if arguments.dry_run:
            _print_steps(machine, options)
            return
        outcome = _run(
            machine, options, arguments.results, resume=arguments.resume, quiet=arguments.json
        )
    _print(outcome, as_json=arguments.json)
    if outcome.run is not None and not outcome.run.samples:
        raise HostError(
            f"{outcome.directory}: no test has a result: every test failed",
            hint=command_line("ls", f"{outcome.directory}/raw"),
        )
    exit_if_bad(outcome.findings)


@contextmanager
def _open_machine(arguments: BenchArguments, name: str) -> "Iterator[Machine]":
    """Yield the machine to measure. No files of homenode remain on it."""
    if arguments.on is None:
        yield LocalMachine()
        return
    run = f"{platform.node()}:{arguments.results.absolute() / name}"
    machine = RemoteHost(SshHost(arguments.on), run, read_static_probe(arguments.probe))
    try:
        yield machine
    finally:
        try:
            machine.clean_up()
        except ToolError as error:
            note(f"{error.message_with_hint}: files that were copied there remain for --resume")


def _run(
    machine: "Machine", options: BenchOptions, results: Path, *, resume: bool, quiet: bool
) -> BenchOutcome:
    begun = resume
    with show_progress("steps", quiet=quiet) as show:

        def on_progress(progress: "Progress") -> None:
            nonlocal begun
            begun = True
            show(progress)

        try:
            with interruptible():
                return run_bench(machine, options, results, on_progress, resume=resume, notify=note)
        except KeyboardInterrupt:
            if begun:
                text = f"measurements so far are kept. Continue: {_resume_command(options.name)}"
                raise KeyboardInterrupt(text) from None
            raise
        except ToolError as error:
            if error.hint is None and begun:
                error.hint = (
                    f"measurements so far are kept. Continue: {_resume_command(options.name)}"
                )
            raise


def _resume_command(name: str) -> str:
    """Return the command line that continues the run of this name."""
    words = [word for word in sys.argv[1:] if word != "--resume"]
    if "--name" not in words:
        words += ["--name", name]
    return shlex.join(["homenode", *words, "--resume"])


def _print_steps(machine: "Machine", options: BenchOptions) -> None:
    from homenode.show.results_text import format_steps

    ready, _ = inspect(machine, options)
    make_console().print(format_steps(ready.record))
    note_gaps(ready.host.gaps)
    for finding in ready.mismatch:
        note(str(finding))
    if ready.mismatch:
        raise SystemExit(FINDINGS)


def _print(outcome: BenchOutcome, *, as_json: bool) -> None:
    samples = plural(0 if outcome.run is None else len(outcome.run.samples), "sample")
    checks = () if outcome.run is None else (samples,)
    findings = Findings(checked=checks, findings=outcome.findings, unknown=outcome.unknown)
    if outcome.directory is None:
        note("nothing was measured: this guest is not the plan's (--force measures it anyway)")
    else:
        note(f"wrote {outcome.directory}: {samples}")
    if not as_json:
        from homenode.show.results_text import format_bench

        make_console().print(format_bench(outcome))
    print_findings(findings, "bench", as_json=as_json)


def set_up(arguments: BenchSetupArguments) -> None:
    """Print the commands, run them with --apply, or undo what they installed. Raises UsageError,
    HostError if no GPU or no tool can be built, ToolError for a step that failed."""
    prefix = Path.home() / ".local" if arguments.prefix is None else arguments.prefix.absolute()
    if arguments.apply and arguments.remove:
        raise exclusive("--apply", "--remove")
    if arguments.remove:
        _remove(prefix)
        return
    from homenode.change.journal import default_root
    from homenode.measure.tool_setup import TORCH_PYTHON, carry_out

    machine = LocalMachine()
    plan = _plan(machine, str(prefix), arguments.architecture)
    for name in plan.present:
        note(f"{name} is installed already")
    for lack in plan.lacks:
        note(lack)
    if not plan.steps:
        if plan.lacks:
            raise HostError(
                "bench setup: nothing can be built",
                hint="install the missing programs listed above",
            )
        return
    if not arguments.apply:
        make_console().print(_format_script(plan), markup=False, highlight=False, soft_wrap=True)
        note("nothing was run; --apply runs these commands")
        return
    for path in carry_out(plan, machine, default_root(), lambda step: note(_format_step(step))):
        note(f"installed {path}")
    if any(path.endswith(f"/{TORCH_PYTHON}") for path in plan.installs):
        python = prefix / "bin" / TORCH_PYTHON
        note(f"PyTorch: {command_line('homenode', 'bench', '--python', python)}")
    if str(prefix / "bin") not in os.environ.get("PATH", "").split(":"):
        note(f"add it to PATH: export PATH={shlex.quote(str(prefix / 'bin'))}:$PATH")


def _remove(prefix: Path) -> None:
    from homenode.measure.tool_setup import take_back

    for path in take_back(prefix):
        note(f"removed {path}")


def _plan(machine: "Machine", prefix: str, architecture: str | None) -> "SetupPlan":
    from homenode.machine.tools.gpu_architectures import parse_names
    from homenode.measure.tool_setup import (
        NEEDED,
        SOURCES,
        TORCH_PYTHON,
        Vendor,
        ask_for_torch,
        setup_plan,
    )

    if architecture is None:
        vendor, architectures = _find_gpus(machine)
    else:
        architectures = parse_names(architecture)
        vendor = Vendor.AMD if architectures[0].startswith("gfx") else Vendor.NVIDIA
    names = NEEDED | {source.program for source in SOURCES}
    programs = machine.find_installed(names)
    if "python3" in programs and architecture is None:
        answer = ask_for_torch(machine, "python3", 60).stdout.strip()
        programs |= {TORCH_PYTHON} if answer == "True" else set()
    return setup_plan(vendor, architectures, programs, prefix, cuda_home=_find_cuda_home())


def _find_cuda_home() -> str | None:
    """The directory of the nvcc on PATH; None without one. Makefiles assume /usr/local/cuda."""
    from homenode.process import find_program

    compiler = find_program("nvcc")
    if compiler is None:
        return None
    home = Path(compiler).resolve().parent.parent
    return str(home) if (home / "bin" / "nvcc").exists() else None


def _find_gpus(machine: "Machine") -> "tuple[Vendor, tuple[str, ...]]":
    """Return the GPU vendor and the architectures to build for. Raises HostError if unknown."""
    from homenode.machine.tools import gpu_architectures as tool
    from homenode.measure.tool_setup import Vendor

    reasons = []
    for vendor, command, parse in (
        (Vendor.NVIDIA, tool.NVIDIA_COMMAND, tool.parse_nvidia),
        (Vendor.AMD, tool.AMD_COMMAND, tool.parse_amd),
    ):
        try:
            return vendor, parse(machine.run(command, 60).stdout_or_raise())
        except ToolError as error:
            reasons.append(error.message)
    raise HostError(
        "bench setup: no GPU whose driver reports its architecture",
        hint="; ".join(reasons),
    )


def _format_script(plan: "SetupPlan") -> str:
    """Return the commands, to be run one by one."""
    lines = []
    tool = ""
    for step in plan.steps:
        if step.tool != tool:
            lines += [f"# {step.tool}"]
            tool = step.tool
        lines.append(_format_step(step))
    return "\n".join(lines)


def _format_step(step: "SetupStep") -> str:
    command = shlex.join(step.argv)
    return command if step.input is None else f"echo {shlex.quote(step.input.strip())} | {command}"


_MAX_LINES = 10


@contextmanager
def show_progress(tasks: str, *, quiet: bool = False) -> "Iterator[Callable[[Progress], None]]":
    """Show each progress: on a terminal the line is rewritten, otherwise a line is printed per
    change, or per tenth of many tasks. tasks: their name in the plural."""
    if quiet:
        yield lambda progress: None
        return
    from homenode.show.trial_text import build_progress_view, format_progress

    if not sys.stderr.isatty():
        last_line = ""

        def say_change(progress: "Progress") -> None:
            nonlocal last_line
            line = format_progress(progress, tasks)
            interval = max(1, progress.total // _MAX_LINES)
            if line != last_line and (not progress.now or progress.ended_count % interval == 0):
                last_line = line
                note(line)

        yield say_change
        return
    from rich.live import Live

    from homenode.show.terminal_text import build_renderable

    with Live(console=get_error_console(), refresh_per_second=4, transient=True) as live:
        yield lambda progress: live.update(build_renderable(build_progress_view(progress, tasks)))
