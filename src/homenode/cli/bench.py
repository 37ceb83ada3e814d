"""homenode bench: run the suite here: in a guest, on a host, in a job. [I/O]"""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from homenode.cli.arguments.measure import (
    BenchArguments,
)
from homenode.cli.bench_options import (
    bench_options,
)
from homenode.cli.progress import shown_progress
from homenode.cli.terminal import (
    console,
    exit_if_bad,
    interruptible,
    note,
    print_findings,
)
from homenode.errors import FINDINGS, HostError, ToolError, UsageError

if TYPE_CHECKING:
    from homenode.measure.orders import BenchOptions, BenchOutcome
    from homenode.measure.progress import Progress


def bench(asked: BenchArguments) -> None:
    """Measure, or print the steps."""
    options = bench_options(asked.name, asked.suite, asked.own, asked.run)
    if asked.dry_run and asked.json:
        raise UsageError(
            "give either --dry-run or --json, not both",
            hint="the steps are for people; --json prints the findings of a run",
        )
    if asked.dry_run:
        _print_steps(options)
        return
    outcome = _run(options, asked.results, resume=asked.resume, quiet=asked.json)
    _print(outcome, as_json=asked.json)
    if outcome.run is not None and not outcome.run.samples:
        raise HostError(
            f"{outcome.folder}: expected figures, found none: every test failed",
            hint="the raw outputs in that folder say why",
        )
    exit_if_bad(outcome.findings)


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
    from homenode.show.results_text import steps_text

    ready, _ = look_over(LocalMachine(), orders)
    console().print(steps_text(ready.record))
    for finding in ready.mismatch:
        note(str(finding))
    if ready.mismatch:
        raise SystemExit(FINDINGS)


def _print(outcome: "BenchOutcome", *, as_json: bool) -> None:
    from homenode.findings import Findings

    steps = () if outcome.run is None else (f"{len(outcome.run.samples)} samples",)
    findings = Findings(checked=steps, findings=outcome.findings)

    def run() -> None:
        from homenode.show.results_text import bench_text

        console().print(bench_text(outcome))

    print_findings(findings, as_json=as_json, before=run)
    if outcome.folder is None:
        note("nothing was measured: this guest is not the plan's (--force measures it anyway)")
    else:
        note(f"wrote {outcome.folder}")
