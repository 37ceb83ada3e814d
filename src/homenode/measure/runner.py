"""Runner: runs the suite on a machine, step by step, and keeps every step as it ends. [I/O]

Killed at any moment, it loses the step that ran then; called again with `resume`, it continues
that one. A resumed run must be of the same machine, boot, tests, rounds and seed: a machine that
was started again places its guests and its memory again, and is another boot for any comparison.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from homenode.discover import discover
from homenode.domain.read import read_running_domain
from homenode.durable import PRIVATE
from homenode.errors import ParseError, ToolError, UsageError
from homenode.findings import Finding
from homenode.measure.access.local import LocalMachine
from homenode.measure.access.machine import Machine
from homenode.measure.app_metric import MAX_KEPT as MAX_APP_OUTPUT
from homenode.measure.app_metric import check_metric, figure_of
from homenode.measure.derived_run import Derived, derived, reading_of, schedule_of
from homenode.measure.environment import Environment, Looks, preflight, read_environment
from homenode.measure.figures.probe import StepReading
from homenode.measure.model import BenchTest, Reader
from homenode.measure.orders import BenchOptions, BenchOutcome, Progress, check_name
from homenode.measure.preparation import Prepared, affinity, allowed_nodes, prepared
from homenode.measure.program_text import run_program
from homenode.measure.record import (
    MAX_KEPT,
    LookRecord,
    RunRecord,
    StepRecord,
    StepStatus,
    differences,
    digest,
    kept_output,
)
from homenode.measure.run_folder import DOMAIN, HOST, PLAN, RunFolder, open_run
from homenode.measure.schedule import Step, left_of
from homenode.measure.tools_installed import (
    boot_identity,
    gpus_shown_by,
    installed_on,
    pu_times,
)
from homenode.pci import DeviceKind
from homenode.plan.model import Plan
from homenode.plan.stored import encode_plan
from homenode.process import Completed, ToolMissingError, ToolTimeoutError
from homenode.results.vantage import Vantage
from homenode.snapshot.capture import capture
from homenode.snapshot.protocol import Snapshot
from homenode.topology import Host

IDLE_S = 1.0
"""How long nothing is done before the first step, to see who else does something."""

_REACH_S = 30.0
_MOST_SAID = 300
_MOST_ERRORS = 1 << 20
"""Characters of a failed program's standard error that are kept, its end."""


@dataclass(frozen=True, slots=True)
class _Session:
    """What all steps of one call share. readings: of the outputs of its steps, by number: each is
    read once."""

    machine: Machine
    folder: RunFolder
    record: RunRecord
    host: Host
    tests: dict[str, BenchTest]
    readings: dict[int, StepReading] = field(default_factory=dict)


def run_bench(
    machine: Machine,
    orders: BenchOptions,
    root: Path,
    on_progress: Callable[[Progress], None],
    *,
    resume: bool = False,
    notify: Callable[[str], None] = lambda line: None,
) -> BenchOutcome:
    """Runs the suite on a machine, into root/<system>/<name>/.

    on_progress: called before each step, and at the end. resume: continue the run that is there.
    notify: gets lines about what was found before the first step.
    Raises UsageError for orders that do not fit the machine or the run to continue, HostError
    where the folder is not as expected, ToolError where the machine cannot be reached any more:
    what was measured is kept. A guest that is not as planned is an answer: see `folder`.
    """
    ready, snapshot = look_over(machine, orders)
    if ready.mismatch and not orders.force:
        return BenchOutcome(None, None, ready.mismatch, ready.record.left_out)
    head = ready.record.head
    with open_run(root, head.system, head.name, resume=resume, notify=notify) as folder:
        record = _ordered(folder, ready.record)
        if isinstance(machine, LocalMachine):
            # What it starts holds the lock too: if we are killed, the next run waits for it.
            machine = machine.holding(folder.tool_lock)
        _keep_context(folder, orders, record, snapshot)
        session = _Session(
            machine, folder, record, ready.host, {test.id: test for test in record.tests}
        )
        steps = _left(session)
        if steps:
            plan = orders.plan if orders.vantage is Vantage.GUEST else None
            _look_before(session, ready, plan, snapshot, notify)
            _run_steps(session, steps, on_progress)
            _look_after(session)
        made = _derived(session)
        folder.write_run(made.run)
        found = (*ready.mismatch, *made.findings)
        return BenchOutcome(str(folder.path), made.run, found, made.gaps)


def look_over(machine: Machine, orders: BenchOptions) -> tuple[Prepared, Snapshot]:
    """What the orders come to on this machine; nothing is written. Raises as run_bench does."""
    check_name(orders.name)
    if orders.app is not None:
        check_metric(orders.app.metric)
    snapshot = machine.snapshot()
    host = discover(snapshot, read_running_domain)
    boot = orders.boot or boot_identity(machine)
    gpus = bool(host.devices_of_kind(DeviceKind.GPU))
    installed = installed_on(machine, orders.suite, gpus=gpus)
    shown = gpus_shown_by(machine, orders.suite, host, installed)
    ready = prepared(
        orders, host, installed, boot, allowed_nodes(snapshot), shown, affinity(snapshot)
    )
    return ready, snapshot


def _ordered(folder: RunFolder, now: RunRecord) -> RunRecord:
    """The record of the run: the one that is there, or this one from now on."""
    stored = folder.order()
    if stored is None:
        folder.write_order(now)
        return now
    differing = differences(stored, now)
    if differing:
        raise UsageError(
            f"--resume: expected the machine and the orders that {folder.path} was begun with, "
            f"found {'; '.join(differing)}",
            hint="give the same orders; after a reboot, start a new run under another name",
        )
    return stored


def _keep_context(
    folder: RunFolder, orders: BenchOptions, record: RunRecord, snapshot: Snapshot
) -> None:
    """What the figures were taken under, next to them; what is there already stays."""
    if not (folder.path / HOST).exists():
        capture(snapshot, folder.path / HOST)
    if orders.plan is not None:
        folder.write(PLAN, encode_plan(orders.plan).encode())
    if orders.domain_xml is not None:
        folder.write(DOMAIN, orders.domain_xml, PRIVATE)  # it may hold a password
    folder.write_head(record.head)


def _left(session: _Session) -> tuple[Step, ...]:
    steps = session.folder.steps()
    return left_of(schedule_of(session.record), {(step.round, step.test) for step, _ in steps})


def _look_before(
    session: _Session,
    ready: Prepared,
    plan: Plan | None,
    snapshot: Snapshot,
    notify: Callable[[str], None],
) -> None:
    # The whole machine, as after the last step: what a run is confined to is a part of it.
    host = discover(snapshot, read_running_domain)
    environment = read_environment(snapshot, host)
    first = replace(environment, times=pu_times(session.machine))
    time.sleep(IDLE_S)
    second = replace(environment, times=pu_times(session.machine))
    findings = preflight(host, Looks(first, second, ready.pus), plan)
    for finding in findings:
        notify(str(finding))
    _write_look(session, second, findings, is_before=True)


def _look_after(session: _Session) -> None:
    snapshot = session.machine.snapshot()
    environment = read_environment(snapshot, discover(snapshot, read_running_domain))
    _write_look(session, environment, (), is_before=False)


def _write_look(
    session: _Session,
    environment: Environment,
    findings: tuple[Finding, ...],
    *,
    is_before: bool,
) -> None:
    number = max((look.number for look in session.folder.looks()), default=-1) + 1
    session.folder.write_look(LookRecord(number, is_before, environment, findings))


def _run_steps(
    session: _Session, steps: tuple[Step, ...], on_progress: Callable[[Progress], None]
) -> None:
    total = len(schedule_of(session.record).steps)
    before = total - len(steps)
    planned = {test.id: test.seconds for test in session.record.tests}
    in_use: dict[str, float] = {}
    for done, step in enumerate(steps):
        left = sum(in_use.get(later.test, planned[later.test]) for later in steps[done:])
        on_progress(Progress(before + done, total, step.test, left))
        record, output = _run_step(session, step)
        in_use[step.test] = record.seconds
        session.folder.write_step(record, output)
    on_progress(Progress(total, total, "", 0.0))


def _run_step(session: _Session, step: Step) -> tuple[StepRecord, str]:
    """One step: the test, or what stands in for it, until one gives figures."""
    started, started_s = time.monotonic(), time.time()
    said: list[str] = []
    record = None
    for attempt in session.tests[step.test].attempts:
        record, output = _attempt(session, step, attempt)
        if record.result is StepStatus.DONE:
            break
        said += record.said
    assert record is not None, "a test is its own first attempt"
    in_use = time.monotonic() - started
    record = replace(record, said=tuple(said), seconds=in_use, started_s=started_s)
    return record, output


def _attempt(session: _Session, step: Step, test: BenchTest) -> tuple[StepRecord, str]:
    text, result, returncode, said = "", StepStatus.DONE, None, ""
    figure = None
    try:
        ended = _run(session, test)
    except ToolMissingError as error:
        result, said = StepStatus.MISSING, error.message
    except ToolTimeoutError as error:
        said = "; ".join(filter(None, (error.message, test.if_stopped)))
        result = StepStatus.TIMED_OUT
    except ToolError as error:
        _check_reachable(session.machine)
        result, said = StepStatus.FAILED, error.message
    else:
        most = MAX_APP_OUTPUT if test.reads is Reader.APP else MAX_KEPT
        text, returncode = kept_output(ended.stdout)[-most:], ended.returncode
        failure = ended.failure()
        if failure is not None:
            result, said = StepStatus.FAILED, failure
            text += f"\n--- standard error\n{ended.stderr[-_MOST_ERRORS:]}"
    record = StepRecord(
        step.number,
        step.round,
        step.test,
        test.id,
        result,
        0.0,
        _output_name(step),
        digest(text),
        returncode,
        (said[:_MOST_SAID],) if said else (),
    )
    if result is not StepStatus.DONE:
        return record, text
    try:
        if test.reads is Reader.APP and session.record.app is not None:
            figure = figure_of(session.record.app, text)
        record = replace(record, figure=figure)
        session.readings[step.number] = reading_of(session.record, test, record, text, session.host)
    except (ParseError, ToolError) as error:
        said = f"{test.argv[0]}: {error.message}"
        return replace(record, result=StepStatus.FAILED, said=(said[:_MOST_SAID],)), text
    return record, text


def _run(session: _Session, test: BenchTest) -> Completed:
    environment = dict(test.environment)
    if test.reads is Reader.APP and isinstance(session.machine, LocalMachine):
        # The user's own program runs as the user set it up: modules, OMP_NUM_THREADS.
        environment = {**os.environ, **environment}
    if test.program is None:
        return session.machine.run(test.argv, test.timeout_s, environment=environment)
    return run_program(session.machine, test.argv, test.timeout_s, test.program, environment)


def _check_reachable(machine: Machine) -> None:
    """Raises ToolError where it is the machine that failed, and not what ran on it."""
    with suppress(ToolMissingError):  # it answered, if only to say that
        machine.run(["true"], _REACH_S).stdout_or_raise()


def _output_name(step: Step) -> str:
    word = "".join(c if c.isascii() and c.isalnum() else "-" for c in step.test)[:60]
    return f"{step.number:04}-{word}.txt"


def _derived(session: _Session) -> Derived:
    steps, looks = session.folder.steps(), session.folder.looks()
    return derived(session.record, steps, looks, session.host, session.readings)
