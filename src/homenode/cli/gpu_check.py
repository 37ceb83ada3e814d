"""homenode bench gpu-check: one short visit to a machine with GPUs, kept in one folder. [I/O]"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, field

from homenode.check.doctor.diagnosis import Circumstances, diagnose
from homenode.check.doctor.links import Load
from homenode.cli.arguments.measure import GpuCheckArguments
from homenode.cli.bench import shown_progress
from homenode.cli.terminal import exit_if_bad, note, print_findings, working, write_text
from homenode.errors import HomenodeError, HostError, UsageError
from homenode.findings import Finding, Findings, in_order
from homenode.formats import encode
from homenode.gap import Gap
from homenode.machine.discover.host import discover
from homenode.machine.snapshot.capture import capture_host
from homenode.measure.access.local import LocalMachine
from homenode.measure.gpu.agreement import TOLERANCE_RATIO, agreed, agreement_findings
from homenode.measure.gpu.suite import measured_gpus
from homenode.measure.gpu_load_program import load_program
from homenode.measure.gpu_load_sampling import sample_under_load
from homenode.measure.model import Depth, Group, SuiteOptions
from homenode.measure.orders import BenchOptions
from homenode.measure.results.vantage import Vantage
from homenode.measure.runner import run_bench
from homenode.wording import command_line, plural

if TYPE_CHECKING:
    from homenode.measure.access.machine import Machine
    from homenode.measure.results.model import Run

TOOL = "nvbandwidth"
RUN, TORCH_RUN = "gpu-check", "gpu-check-torch"


class Visit(Struct):
    """What has been done so far. checked: a line for each part that ended, passed or not.

    groups: of tests, None = all of GPUs.
    """

    folder: Path
    python: str
    groups: tuple[Group, ...] | None
    limit_s: float
    started_s: float
    is_quiet: bool
    checked: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def part(self, name: str, work: Callable[[], str]) -> bool:
        """Whether the part was done; its outcome is a line in any case."""
        begun = time.monotonic()
        if begun - self.started_s > self.limit_s:
            self.checked.append(f"{name}: left out, {self.limit_s:g} s were over")
            return False
        try:
            outcome, done = work(), True
        except HomenodeError as error:
            outcome, done = f"not possible: {error.message}", False
        self.checked.append(f"{name}: {outcome} ({time.monotonic() - begun:.0f} s)")
        note(self.checked[-1])
        return done


def gpu_check(asked: GpuCheckArguments) -> None:
    """All parts on this machine."""

    alone = LocalMachine(without={TOOL})
    visit_gpus(
        LocalMachine(), alone, asked.output, asked.python, float(asked.limit), as_json=asked.json
    )


def visit_gpus(
    machine: "Machine",
    alone: "Machine",
    folder: Path,
    python: str,
    limit_s: float,
    *,
    groups: tuple[Group, ...] | None = None,
    as_json: bool = False,
) -> None:
    """All parts on a machine. alone: the same where nvbandwidth counts as not installed.

    Raises UsageError where the folder exists, HostError where there is no GPU to measure. Exits
    with 1 where a part was not possible or a figure is not as it should be.
    """

    if folder.exists():
        raise UsageError(f"{folder}: expected a new folder, found one", hint="-o names another")
    host = discover(machine.snapshot())
    left_out: list[Gap] = []
    gpus = measured_gpus(host, left_out)
    if not gpus:
        reasons = "; ".join(str(gap) for gap in left_out) or "lspci shows none"
        raise HostError(
            f"gpu-check: expected a GPU that this machine may use, found none: {reasons}"
        )
    folder.mkdir(parents=True)
    visit = Visit(folder, python, groups, limit_s, time.monotonic(), as_json)
    passed = _all_parts(visit, machine, alone)
    found = Findings(checked=tuple(visit.checked), findings=in_order(visit.findings))
    write_text(folder / "gpu-check.json", encode("findings", found) + "\n")
    print_findings(found, as_json=as_json)
    if not as_json:
        note(f"wrote {folder}; next: {command_line('homenode', 'report', folder / 'results')}")
    exit_if_bad(found.findings, otherwise=not passed)


def _all_parts(visit: Visit, machine: "Machine", alone: "Machine") -> bool:
    runs: dict[str, Run] = {}
    parts = [
        visit.part("host captured", lambda: _capture(visit)),
        visit.part("links while they copy", lambda: _links(visit, machine)),
        visit.part("figures", lambda: _figures(visit, machine, RUN, runs)),
    ]
    if TOOL in machine.installed({TOOL}):
        parts += [
            visit.part("PyTorch's figures", lambda: _figures(visit, alone, TORCH_RUN, runs)),
            visit.part("nvbandwidth against PyTorch", lambda: _agreement(visit, runs)),
        ]
    else:
        visit.checked.append(f"{TOOL} against PyTorch: not compared: {TOOL} is not installed")
    return all(parts)


def _capture(visit: Visit) -> str:

    with working("reading this machine"):
        captured = capture_host(visit.folder / "host.tar.gz", None, redacted=True, overwrite=False)
    return f"{captured.manifest.files} files, redacted, in host.tar.gz"


def _links(visit: Visit, machine: "Machine") -> str:

    snapshot = machine.snapshot()
    program = load_program(None)
    with working(f"reading links while {program.argv[0]} copies"):
        busy, reached = sample_under_load(discover(snapshot), snapshot, program)
    known = Circumstances(load=Load.BUSY, reached=reached.gpus, h2d=reached.h2d)
    found = diagnose(busy, None, known)
    visit.findings += found.findings
    return f"{len(found.checked)} things looked at, {len(found.findings)} findings"


def _figures(visit: Visit, machine: "Machine", name: str, runs: "dict[str, Run]") -> str:

    all_of_gpus = (
        Group.GPU_COPY,
        Group.GPU_BANDWIDTH,
        Group.GPU_SMALL,
        Group.MATMUL,
        Group.GPU_PEER,
        Group.NCCL,
    )
    groups = visit.groups or all_of_gpus
    if name == TORCH_RUN:
        groups = tuple(group for group in groups if group in (Group.GPU_COPY, Group.GPU_BANDWIDTH))
    options = SuiteOptions(groups, Depth.QUICK, 64 << 20, visit.python)
    orders = BenchOptions(name, options, repeats=2, vantage=Vantage.HOST, force=True)
    with shown_progress("steps", quiet=visit.is_quiet) as show:
        outcome = run_bench(machine, orders, visit.folder / "results", show, notify=note)
    visit.findings += outcome.findings
    if outcome.run is None or not outcome.run.samples:
        raise HostError("expected figures, found none: every test failed; see raw/ in results")
    runs[name] = outcome.run
    for gap in outcome.gaps:
        visit.checked.append(f"not measured: {gap}")
    missed = f", {plural(len(outcome.gaps), 'gap')}" if outcome.gaps else ""
    return f"{plural(len(outcome.run.samples), 'sample')} in {outcome.folder}{missed}"


def _agreement(visit: Visit, runs: "dict[str, Run]") -> str:

    if len(runs) != 2:
        raise HostError("expected figures of both, found one alone")
    first, second = runs[RUN], runs[TORCH_RUN]
    lines = agreed(first, second)
    if not lines:
        raise HostError("expected a figure that both have, found none")
    found = agreement_findings(first, second, (TOOL, "PyTorch"))
    visit.findings += found
    write_text(visit.folder / "agreement.txt", "\n".join(lines) + "\n")
    return f"{len(lines) - len(found)} of {len(lines)} figures within {TOLERANCE_RATIO:.0%}"
