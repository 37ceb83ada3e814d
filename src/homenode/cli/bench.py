"""homenode bench: run the suite here: in a guest, on a host, in a job. [I/O]"""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homenode.cli.bench_options import (
    AppArguments,
    RunArguments,
    SuiteArguments,
    bench_options,
)
from homenode.cli.help import CommandWithActions, HelpCommand
from homenode.cli.options import JsonOption, with_records
from homenode.cli.progress import shown_progress
from homenode.cli.terminal import (
    console,
    exit_if_bad,
    interruptible,
    note,
    print_findings,
)
from homenode.errors import HostError, ToolError, UsageError

if TYPE_CHECKING:
    from homenode.measure.orders import BenchOptions, BenchOutcome
    from homenode.measure.progress import Progress

app = typer.Typer(cls=CommandWithActions, no_args_is_help=False)


@app.command("bench", cls=HelpCommand)
@with_records
def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the run and its folder.")],
    suite: SuiteArguments,
    own: AppArguments,
    run: RunArguments,
    results: Annotated[
        Path, typer.Option(metavar="DIR", help="Results folder; the run is DIR/<gpu>/NAME.")
    ] = Path("results"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a run that was interrupted.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", "-n", help="Print the steps and how long they take; run none."),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Measure processors, memory and GPUs of this machine, repeatedly and in random order.

    With a plan, the guest is verified first. Every step is saved as it ends: --resume continues
    after Ctrl-C or a crash.

    Examples:
      homenode bench pin-1 --layout pin --quick
      homenode bench numa-1 --plan plan.json --tests stream,nccl
    """
    options = bench_options(name, suite, own, run)
    if dry_run and json:
        raise UsageError(
            "give either --dry-run or --json, not both",
            hint="the steps are for people; --json prints the findings of a run",
        )
    if dry_run:
        _print_steps(options)
        return
    outcome = _run(options, results, resume=resume, quiet=json)
    _print(outcome, as_json=json)
    if outcome.run is not None and not outcome.run.samples:
        raise HostError(
            f"{outcome.folder}: expected figures, found none: every test failed",
            hint="the raw outputs in that folder say why",
        )
    exit_if_bad(outcome.findings)


@app.command("setup", cls=HelpCommand)
def setup(
    apply: Annotated[
        bool, typer.Option("--apply", help="Build them. Default: print the commands.")
    ] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Remove what was built.")] = False,
    prefix: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to install. Default: ~/.local.")
    ] = None,
) -> None:
    """Build the pinned GPU tools (nvbandwidth, nccl-tests, ...) for the GPU of this machine.

    Examples:
      homenode bench setup
      homenode bench setup --apply --prefix /opt/gpu-tools
    """
    from homenode.cli.bench_setup import set_up

    set_up(prefix, apply=apply, remove=remove)


def _run(orders: "BenchOptions", results: Path, *, resume: bool, quiet: bool) -> "BenchOutcome":
    from homenode.measure.access.local import LocalMachine
    from homenode.measure.runner import run_bench

    begun = resume
    with shown_progress("steps", quiet=quiet) as show:

        def on_progress(progress: "Progress") -> None:
            nonlocal begun
            begun = True
            show(progress)

        try:
            with interruptible():
                return run_bench(
                    LocalMachine(), orders, results, on_progress, resume=resume, notify=note
                )
        except KeyboardInterrupt:
            if begun:
                note(f"interrupted; what was measured is kept. Continue: {_resuming()}")
            raise
        except ToolError as error:
            if error.hint is None and begun:
                error.hint = f"what was measured is kept. Continue: {_resuming()}"
            raise


def _resuming() -> str:
    """The command line that continues this run."""
    words = [word for word in sys.argv[1:] if word != "--resume"]
    return shlex.join(["homenode", *words, "--resume"])


def _print_steps(orders: "BenchOptions") -> None:
    from homenode.measure.access.local import LocalMachine
    from homenode.measure.runner import look_over
    from homenode.report.bench_text import steps_text

    ready, _ = look_over(LocalMachine(), orders)
    console().print(steps_text(ready.record))
    for finding in ready.mismatch:
        note(str(finding))
    if ready.mismatch:
        raise SystemExit(1)


def _print(outcome: "BenchOutcome", *, as_json: bool) -> None:
    from homenode.findings import Findings

    steps = () if outcome.run is None else (f"{len(outcome.run.samples)} samples",)
    findings = Findings(steps, outcome.findings)

    def run() -> None:
        from homenode.report.bench_text import bench_text

        console().print(bench_text(outcome))

    print_findings(findings, as_json=as_json, before=run)
    if outcome.folder is None:
        note("nothing was measured: this guest is not the plan's (--force measures it anyway)")
    else:
        note(f"wrote {outcome.folder}")
