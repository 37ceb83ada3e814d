"""Runner: runs the suite on a machine, step by step, and stores every step as it ends. [I/O]

The executor of `bench`: a task is one command, on this machine or on any other Machine.

Killed at any moment, it loses only the running step; `resume` continues the run. A resumed run must
have the same machine, boot, tests, rounds and seed: a rebooted machine places guests and memory
anew, and is another boot in comparisons.
"""

import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from msgspec.structs import replace

from homenode.errors import ParseError, ToolError, UsageError
from homenode.findings import Finding, format_gaps
from homenode.machine.discover.host import discover
from homenode.machine.pci import DeviceKind
from homenode.machine.snapshot.capture import capture
from homenode.machine.snapshot.protocol import Snapshot
from homenode.machine.topology import Host
from homenode.measure.access.machine import LocalMachine, Machine
from homenode.measure.access.remote import RemoteHost, RemoteMachine
from homenode.measure.derived_run import DerivedRun, derive_run, read_bench_step, schedule_of
from homenode.measure.environment import Environment, IdleReadings, preflight, read_environment
from homenode.measure.experiment import (
    Pace,
    Progress,
    ScheduledTask,
    TaskState,
    TaskStatus,
    list_remaining,
    run_tasks,
)
from homenode.measure.gpu_load_sampling import GpuPower, sample_power
from homenode.measure.model import (
    AppCommand,
    BenchOptions,
    BenchOutcome,
    BenchTest,
    Reader,
    check_name,
)
from homenode.measure.preparation import PreparedRun, prepare_run, read_affinity, read_allowed_nodes
from homenode.measure.probe_samples import StepReading
from homenode.measure.results.vantage import Vantage
from homenode.measure.run_directory import (
    DOMAIN,
    HOST,
    MAX_KEPT,
    PLAN,
    BenchEntry,
    EnvironmentRecord,
    RunDirectory,
    RunRecord,
    StepRecord,
    StepStatus,
    compute_digest,
    find_differences,
    open_run,
    redact_output,
)
from homenode.measure.tool_setup import (
    boot_identity,
    find_installed_programs,
    find_shown_gpus,
    read_pu_times,
    run_program,
)
from homenode.plan.stored import encode_plan
from homenode.process import ProgramResult, ToolMissingError, ToolTimeoutError, run
from homenode.safe.durable import PRIVATE
from homenode.vm.domain.read import read_running_domain
from homenode.vm.plan import Plan

SEARCH_S = 20.0
MAX_LINE = 4096
"""Characters of a line that are looked at."""

MAX_APP_OUTPUT = 16 << 20
"""Characters of an output that are kept and searched, its end: a long run prints the result
there."""

_SOURCE = "--metric"
_COMMA_OF_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_SEARCH = (
    "import re, sys\n"
    "pattern = re.compile(sys.argv[1])\n"
    "found = None\n"
    "for line in sys.stdin:\n"
    f"    match = pattern.search(line[:{MAX_LINE}].rstrip('\\n'))\n"
    "    if match and match[1] is not None:\n"
    "        found = match[1]\n"
    "print('' if found is None else found)\n"
)


def check_metric(pattern: str) -> None:
    """Raise UsageError unless the pattern is a regular expression with one group."""
    try:
        groups = re.compile(pattern).groups
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"--metric: expected a regular expression, found: {error}") from None
    if groups != 1:
        raise UsageError(
            f"--metric {pattern}: expected one group around the number, found {groups}",
            hint=r"such as --metric 'images/s: ([0-9.]+)'",
        )


def read_metric(order: AppCommand, output: str) -> float:
    """Return the last match in an output. Raises ParseError for no match, no number, no end.

    The search runs in a separate process: a pattern such as (a+)+$ may never end on one line."""
    text = output[-MAX_APP_OUTPUT:]
    try:
        # isolated: modules of the working directory are not imported
        argv = [sys.executable, "-I", "-c", _SEARCH, order.metric]
        ended = run(argv, SEARCH_S, text, environment={"PYTHONIOENCODING": "utf-8:surrogateescape"})
    except ToolTimeoutError:
        raise ParseError(
            _SOURCE,
            f"a match within {SEARCH_S:g} s",
            "none so far",
            hint="repeats within repeats, such as (a+)+, take exponential time",
        ) from None
    word = _COMMA_OF_THOUSANDS.sub("", ended.stdout_or_raise().strip())
    if not word:
        raise ParseError(_SOURCE, f"a line that matches {order.metric}", output[-200:].strip())
    try:
        value = float(word)
    except ValueError:
        raise ParseError(_SOURCE, "a number in its group", word) from None
    if not 0 < value < float("inf"):
        raise ParseError(_SOURCE, "a number above zero", word)
    return value


IDLE_S = 1.0
"""Idle time before the first step, in which the load of other programs is measured."""

_REACH_S = 30.0
_MAX_MESSAGE = 300
_MAX_ERRORS = 1 << 20
"""Characters of a failed program's standard error that are kept, its end."""


def run_bench(
    machine: Machine,
    options: BenchOptions,
    root: Path,
    on_progress: Callable[[Progress], None],
    *,
    resume: bool = False,
    notify: Callable[[str], None] = lambda line: None,
) -> BenchOutcome:
    """Run the suite on a machine, into root/<system>/<name>/.

    on_progress: called before each step, and at the end. resume: continue the existing run. notify:
    gets lines on findings before the first step.
    Raises UsageError for orders that do not fit the machine or the run to continue, HostError
    if the directory is not as expected, ToolError if the machine cannot be reached any more:
    finished steps are kept. A guest that differs from its plan is a result: see `directory`.
    """
    ready, snapshot = inspect(machine, options)
    unknown = format_gaps(ready.host.gaps)
    if ready.mismatch and not options.force:
        return BenchOutcome(None, None, ready.mismatch, ready.record.omitted, unknown)
    head = ready.record.head
    with open_run(root, head.system, head.name, resume=resume, notify=notify) as directory:
        record = _make_record(directory, ready.record)
        if isinstance(machine, LocalMachine | RemoteHost):
            # Its children hold the lock too: if homenode is killed, the next run waits for them.
            machine = machine.with_descriptor(directory.tool_lock)
        _keep_context(directory, options, record, snapshot)
        session = _Session(machine, directory, record, ready.host)
        if not session.poll().is_settled:
            plan = options.plan if options.vantage is Vantage.GUEST else None
            session.look_before(ready, plan, snapshot, notify)
            run_tasks(session, on_progress)
            session.look_after()
        result = session.derive_run()
        directory.write_run(result.run)
        findings = (*ready.mismatch, *result.findings)
        return BenchOutcome(str(directory.path), result.run, findings, result.gaps, unknown)


def inspect(machine: Machine, options: BenchOptions) -> tuple[PreparedRun, Snapshot]:
    """Return the run of the orders on this machine; nothing is written. Raises like run_bench."""
    check_name(options.name)
    if options.app is not None:
        check_metric(options.app.metric)
    snapshot = machine.snapshot()
    host = discover(snapshot, read_running_domain)
    boot = options.boot or boot_identity(machine)
    gpus = bool(host.devices_of_kind(DeviceKind.GPU))
    programs = find_installed_programs(machine, options.suite, gpus=gpus)
    shown_gpus = find_shown_gpus(machine, options.suite, host, programs)
    ready = prepare_run(
        options=options,
        host=host,
        programs=programs,
        boot=boot,
        memory_nodes=read_allowed_nodes(snapshot),
        shown_gpus=shown_gpus,
        own_pus=read_affinity(snapshot),
    )
    return ready, snapshot


def _make_record(directory: RunDirectory, now: RunRecord) -> RunRecord:
    """Return the existing record of the run, or store this record."""
    stored_record = directory.order()
    if stored_record is None:
        directory.begin_with(now)
        return now
    differing = find_differences(stored_record, now)
    if differing:
        raise UsageError(
            f"--resume: expected the machine and the orders that {directory.path} was begun with, "
            f"found {'; '.join(differing)}",
            hint="use the same orders; after a reboot, start a new run under another name",
        )
    return stored_record


def _keep_context(
    directory: RunDirectory, options: BenchOptions, record: RunRecord, snapshot: Snapshot
) -> None:
    """Store the context of the results next to them; existing files stay."""
    if not (directory.path / HOST).exists():
        directory.write(HOST, capture(snapshot).content, 0o644)
    if options.plan is not None:
        directory.write(PLAN, encode_plan(options.plan).encode())
    if options.domain_xml is not None:
        directory.write(DOMAIN, options.domain_xml, PRIVATE)  # it may hold a password
    directory.write_head(record.head)


class _Session:
    """The steps of one run, one command after the other. See Executor. readings: of the outputs of
    this call's steps, by number: each is read once."""

    def __init__(
        self, machine: Machine, directory: RunDirectory, record: RunRecord, host: Host
    ) -> None:
        """Raise UsageError if the directory holds steps of another schedule."""
        self.machine, self.directory, self.record = machine, directory, record
        self._host = host
        self._tests = {test.id: test for test in record.tests}
        self._schedule = schedule_of(record)
        done_steps = {(step.round, step.test) for step, _ in directory.read_steps()}
        self._left = {str(task.number): task for task in list_remaining(self._schedule, done_steps)}
        self._pace = Pace({test.id: test.seconds for test in record.tests})
        self._readings: dict[int, StepReading] = {}

    def poll(self) -> Progress:
        tasks = [
            TaskStatus(number, 0, TaskState.WAITING if number in self._left else TaskState.DONE)
            for number in (str(task.number) for task in self._schedule.tasks)
        ]
        variants = [task.variant for task in self._left.values()]
        now = variants[0] if variants else ""
        return Progress(tuple(tasks), now=now, seconds_left=self._pace.seconds_for(variants))

    def retry(self, tasks: Sequence[TaskStatus]) -> None:
        """Do nothing: a failed command has its line, and is not repeated."""

    def start(self, tasks: Sequence[TaskStatus]) -> None:
        task = self._left[tasks[0].id]
        record, output = self._run_step(task)
        self.directory.write_step(record, output)
        self._pace.took(task.variant, record.seconds)
        del self._left[tasks[0].id]

    def look_before(
        self,
        ready: PreparedRun,
        plan: Plan | None,
        snapshot: Snapshot,
        notify: Callable[[str], None],
    ) -> None:
        # The whole machine, as after the last step: what a run is confined to is a part of it.
        host = discover(snapshot, read_running_domain)
        environment = read_environment(snapshot, host)
        first = replace(environment, times=read_pu_times(self.machine))
        time.sleep(IDLE_S)
        second = replace(environment, times=read_pu_times(self.machine))
        findings = preflight(host, IdleReadings(first, second, ready.pus), plan)
        for finding in findings:
            notify(str(finding))
        self._write_look(second, findings, is_before=True)

    def look_after(self) -> None:
        snapshot = self.machine.snapshot()
        environment = read_environment(snapshot, discover(snapshot, read_running_domain))
        self._write_look(environment, (), is_before=False)

    def _write_look(
        self, environment: Environment, findings: tuple[Finding, ...], *, is_before: bool
    ) -> None:
        number = max((look.number for look in self.directory.looks()), default=-1) + 1
        look = EnvironmentRecord(number, is_before, environment, findings)
        self.directory.add(BenchEntry(look=look))

    def derive_run(self) -> DerivedRun:
        steps, looks = self.directory.read_steps(), self.directory.looks()
        return derive_run(self.record, steps, looks, self._host, self._readings)

    def _run_step(self, task: ScheduledTask) -> tuple[StepRecord, str]:
        """Run one step: the test, or its alternatives, until one has results."""
        started, started_s = time.monotonic(), time.time()
        messages: list[str] = []
        record = None
        for attempt in self._tests[task.variant].attempts:
            with self._sample_power(attempt) as power_samples:
                record, output = self._run_test(task, attempt)
            if record.result is StepStatus.DONE:
                break
            messages += record.messages
        assert record is not None, "a test is its own first attempt"
        in_use = time.monotonic() - started
        record = replace(
            record,
            messages=tuple(messages),
            seconds=in_use,
            started_s=started_s,
            power=tuple(power_samples),
        )
        return record, output

    def _sample_power(self, test: BenchTest) -> AbstractContextManager[list[GpuPower]]:
        """Return the power sampler, except for processor tests, which it would disturb, and for
        machines that run one command at a time."""
        has_gpus = bool(self._host.devices_of_kind(DeviceKind.GPU))
        if test.reads is Reader.PROBE or not has_gpus or isinstance(self.machine, RemoteMachine):
            return nullcontext([])
        return sample_power(self.machine)

    def _run_test(self, task: ScheduledTask, test: BenchTest) -> tuple[StepRecord, str]:
        text, result, returncode, message = "", StepStatus.DONE, None, ""
        try:
            ended = self._run(test)
        except ToolMissingError as error:
            result, message = StepStatus.MISSING, error.message
        except ToolTimeoutError as error:
            message = "; ".join(filter(None, (error.message, test.if_stopped)))
            result = StepStatus.TIMED_OUT
        except ToolError as error:
            _check_reachable(self.machine)
            result, message = StepStatus.FAILED, error.message
        else:
            limit = MAX_APP_OUTPUT if test.reads is Reader.APP else MAX_KEPT
            text, returncode = redact_output(ended.stdout)[-limit:], ended.returncode
            failure = ended.failure()
            if failure is not None:
                result, message = StepStatus.FAILED, failure
                text += f"\n--- standard error\n{ended.stderr[-_MAX_ERRORS:]}"
        record = StepRecord(
            number=task.number,
            round=task.round,
            test=task.variant,
            attempt=test.id,
            result=result,
            seconds=0.0,
            output=_format_output_name(task),
            sha256=compute_digest(text),
            returncode=returncode,
            messages=(message[:_MAX_MESSAGE],) if message else (),
        )
        return (self._read(record, test, text) if result is StepStatus.DONE else record), text

    def _read(self, record: StepRecord, test: BenchTest, text: str) -> StepRecord:
        """Return the record with the results of its output; failed without results."""
        app = self.record.app if test.reads is Reader.APP else None
        try:
            if app is not None:
                record = replace(record, value=read_metric(app, text))
            read = read_bench_step(self.record, test, record, text, self._host)
            self._readings[record.number] = read
        except (ParseError, ToolError) as error:
            message = f"{test.argv[0]}: {error.message}"
            return replace(record, result=StepStatus.FAILED, messages=(message[:_MAX_MESSAGE],))
        return record

    def _run(self, test: BenchTest) -> ProgramResult:
        environment = dict(test.environment)
        if test.reads is Reader.APP and isinstance(self.machine, LocalMachine):
            # The user's own program runs as the user set it up: modules, OMP_NUM_THREADS.
            environment = {**os.environ, **environment}
        if test.program is None:
            return self.machine.run(test.argv, test.timeout_s, environment=environment)
        return run_program(self.machine, test.argv, test.timeout_s, test.program, environment)


def _check_reachable(machine: Machine) -> None:
    """Raise ToolError if the machine failed, not its program."""
    with suppress(ToolMissingError):  # it answered, even if with an error
        machine.run(["true"], _REACH_S).stdout_or_raise()


def _format_output_name(task: ScheduledTask) -> str:
    word = "".join(c if c.isascii() and c.isalnum() else "-" for c in task.variant)[:60]
    return f"{task.number:04}-{word}.txt"
