"""homenode bench: run the suite here: in a guest, on a host, in a job. [I/O]"""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homenode.cli.bench_orders import BenchArguments, orders_of
from homenode.cli.interruption import interruptible
from homenode.cli.options import JsonOption
from homenode.cli.terminal import console, error_console, note, print_json
from homenode.errors import HostError, ToolError, UsageError
from homenode.results.vantage import Vantage

if TYPE_CHECKING:
    from homenode.measure.orders import BenchOptions, BenchOutcome, Progress

_OWN = "Your own program"
_WHERE = "Where"
_TOOLS = "GPU tools"


def bench(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Of the run: its folder's name.")
    ] = None,
    results: Annotated[
        Path, typer.Option(metavar="DIR", help="Results folder; the run is DIR/<gpu>/NAME.")
    ] = Path("results"),
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="P.json", help="The plan of this guest: it is verified first, and kept."
        ),
    ] = None,
    domain_xml: Annotated[
        Path | None,
        typer.Option(metavar="VM.xml", help="The guest's document, to keep beside the plan."),
    ] = None,
    tests: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Groups of tests. Default: all that can be."),
    ] = None,
    repeat: Annotated[
        int, typer.Option(metavar="N", min=1, max=1000, help="Rounds: each test once in each.")
    ] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Half a second a figure.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Eight seconds a figure.")] = False,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the order in each round.")] = 1,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run that was cut short.")
    ] = False,
    app: Annotated[
        str | None,
        typer.Option(
            metavar="CMD",
            help="A command to measure, started without a shell.",
            rich_help_panel=_OWN,
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX",
            help="Finds its figure: one group, searched line by line; last match.",
            rich_help_panel=_OWN,
        ),
    ] = None,
    lower: Annotated[
        bool,
        typer.Option(
            "--lower/--higher-is-better",
            help="The figure is a time in seconds, or a rate.",
            rich_help_panel=_OWN,
        ),
    ] = False,
    app_timeout: Annotated[
        int,
        typer.Option(
            metavar="S",
            min=1,
            max=1_000_000,
            help="Seconds after which it is stopped, and has no figure.",
            rich_help_panel=_OWN,
        ),
    ] = 3600,
    nccl_max_msg: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest message of collectives.")
    ] = "1GiB",
    layout: Annotated[
        str | None,
        typer.Option(metavar="PRESET", help="The layout of this guest. Default: the plan's."),
    ] = None,
    arrangement: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="What else was chosen: a queue, a policy."),
    ] = None,
    boot: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Identity of this boot. Default: the kernel's own."),
    ] = None,
    vantage: Annotated[
        Vantage | None,
        typer.Option(help="Where this is. Default: as it looks.", rich_help_panel=_WHERE),
    ] = None,
    pus: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Measure on these PUs alone.", rich_help_panel=_WHERE),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Measure on these nodes alone.", rich_help_panel=_WHERE),
    ] = None,
    host_kind: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="What hosts of this kind have in common.", rich_help_panel=_WHERE
        ),
    ] = None,
    python: Annotated[
        str, typer.Option(metavar="FILE", help="The Python whose PyTorch stands in for GPU tools.")
    ] = "python3",
    setup: Annotated[
        bool,
        typer.Option(
            "--setup", help="Print how to build them for this GPU.", rich_help_panel=_TOOLS
        ),
    ] = False,
    apply: Annotated[
        bool, typer.Option("--apply", help="With --setup: build them.", rich_help_panel=_TOOLS)
    ] = False,
    remove: Annotated[
        bool,
        typer.Option(
            "--remove", help="With --setup: take back what was built.", rich_help_panel=_TOOLS
        ),
    ] = False,
    prefix: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="With --setup: where to. Default: ~/.local.", rich_help_panel=_TOOLS
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Measure a guest that is not as planned; marks the run.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the steps and how long they take; run none.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Measure processors, memory and GPUs here, again and again in mixed order.

    With a plan, the guest is verified first. Every step is kept as it ends: --resume goes on after
    Ctrl-C or a crash.
    """
    from homenode.findings import are_bad

    if setup or apply or remove or prefix is not None:
        _set_up(name, prefix, setup=setup, apply=apply, remove=remove)
        return
    if name is None:
        raise UsageError("bench: expected the run's NAME, found none",
                         hint="or --setup, to build GPU tools")  # fmt: skip
    typed = BenchArguments(
        name, plan, domain_xml, tests, repeat, quick, full, seed, app, metric, lower, nccl_max_msg,
        layout, boot, vantage, pus, nodes, host_kind, arrangement, python, force, app_timeout,
    )  # fmt: skip
    orders = orders_of(typed)
    if dry_run and json:
        raise UsageError(
            "--dry-run, --json: expected one of them, found both",
            hint="the steps are for people; --json prints the findings of a run",
        )
    if dry_run:
        _print_steps(orders)
        return
    outcome = _run(orders, results, resume=resume, quiet=json)
    _print(outcome, as_json=json)
    if outcome.run is not None and not outcome.run.samples:
        raise HostError(
            f"{outcome.folder}: expected figures, found none: every test failed",
            hint="the raw outputs beside it say why",
        )
    if are_bad(outcome.findings):
        raise SystemExit(1)


def _set_up(
    name: str | None, prefix: Path | None, *, setup: bool, apply: bool, remove: bool
) -> None:
    if not setup or name is not None:
        raise UsageError(
            "bench: expected --setup with --apply, --remove and --prefix, and no NAME with it"
        )
    from homenode.cli.bench_setup import set_up

    set_up(prefix, apply=apply, remove=remove)


def _run(orders: "BenchOptions", results: Path, *, resume: bool, quiet: bool) -> "BenchOutcome":
    from homenode.measure.access.local import LocalMachine
    from homenode.measure.runner import run_bench

    begun = resume
    with step_progress(quiet=quiet) as show:

        def on_progress(progress: "Progress") -> None:
            nonlocal begun
            begun = True
            show(progress)

        try:
            with interruptible():
                return run_bench(
                    LocalMachine(), orders, results, on_progress, resume=resume, tell=note
                )
        except KeyboardInterrupt:
            if begun:
                note(f"interrupted; what was measured is kept. Go on with: {_resuming()}")
            raise
        except ToolError as error:
            if error.hint is None and begun:
                error.hint = f"what was measured is kept. Go on with: {_resuming()}"
            raise


def _resuming() -> str:
    """The command line that goes on with this run."""
    words = [word for word in sys.argv[1:] if word != "--resume"]
    return shlex.join(["homenode", *words, "--resume"])


@contextmanager
def step_progress(*, quiet: bool) -> "Iterator[Callable[[Progress], None]]":
    """A bar with the time left, on a terminal; elsewhere a line for each tenth of the steps."""
    if quiet or not sys.stderr.isatty():
        yield (lambda progress: None) if quiet else _tenths()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    from homenode.report.bench_text import left_text

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=error_console(), transient=True) as bar:
        task = bar.add_task("looking at the machine", total=None)

        def show(progress: "Progress") -> None:
            bar.update(
                task, total=progress.total, completed=progress.done,
                description=left_text(progress),
            )  # fmt: skip

        yield show


def _tenths() -> "Callable[[Progress], None]":
    """A batch job's log: that it goes on, and how long yet."""
    from homenode.report.bench_text import left_text

    said = 0

    def show(progress: "Progress") -> None:
        nonlocal said
        tenth = 10 * progress.done // max(1, progress.total)
        if tenth > said and progress.test:
            said = tenth
            note(f"{progress.done} of {progress.total} steps done: {left_text(progress)}")

    return show


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
    if as_json:
        from homenode.formats import encode

        print_json(encode("findings", findings))
    else:
        from homenode.report.bench_text import bench_text
        from homenode.report.findings_text import findings_text

        console().print(bench_text(outcome))
        console().print(findings_text(findings))
    if outcome.folder is None:
        note("nothing was measured: this guest is not the plan's (--force measures it anyway)")
    else:
        note(f"wrote {outcome.folder}")
