"""Runner: a trial from its first boot to its last; each step is recorded before it is done. [I/O]

The executor of `trial`: a task is one boot of a VM, or a measurement of the bare host. After a
failed boot the trial continues. At the end the domain always has its original definition.
"""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from homenode.errors import HomenodeError, HostError, InputError, ToolError, UsageError
from homenode.machine.discover.host import discover
from homenode.machine.pci import AMD, DeviceKind
from homenode.machine.topology import Host
from homenode.measure.access.machine import LocalMachine, Machine
from homenode.measure.derived_run import TEST_FAILED
from homenode.measure.experiment import (
    Pace,
    Progress,
    ScheduledTask,
    TaskState,
    TaskStatus,
    run_tasks,
)
from homenode.measure.model import BenchOptions, SuiteGroup, SuiteOptions
from homenode.measure.results.store import read_finished, run_named
from homenode.measure.runner import run_bench
from homenode.measure.trial.boot_steps import (
    ORIGINAL,
    BootStep,
    CopyStep,
    LayoutStep,
    TrialDomain,
    add_boot_id,
    hold_interrupts,
)
from homenode.measure.trial.copying import PreparedCopy
from homenode.measure.trial.fitting import find_new_obstacles, remove_domain
from homenode.measure.trial.guest import GuestConnector, boot_of, format_command, wait_for_answer
from homenode.measure.trial.journal import (
    BARE,
    BOOT,
    COPY,
    STATES,
    EntryKind,
    MeasureOptions,
    TrialConfig,
    TrialEntry,
    TrialHead,
    TrialJournal,
    TrialState,
    boot_orders,
    run_name,
    schedule_trial,
)
from homenode.nccl.assemble import assemble_topology
from homenode.nccl.guest_side import build_guest_side, make_pending
from homenode.nccl.topology import NcclVariant, write_topology
from homenode.vm.domain.merge import is_same_definition
from homenode.vm.domain.read import build_vm, open_domain
from homenode.vm.hypervisor.virsh import Virsh
from homenode.vm.layout import Pinning
from homenode.vm.plan import Plan


class TunedCopy(Struct, frozen=True):
    """A layout of the trial: its plan and the document to define."""

    plan: Plan
    document: bytes


class TrialSetup(Struct, frozen=True):
    """The settings with which a trial began."""

    head: TrialHead
    config: TrialConfig
    layouts: Mapping[str, TunedCopy]
    copy: PreparedCopy | None  # the copy to create first, None in place


class Trial(TrialSetup, frozen=True, kw_only=True):
    """The trial's settings and records, for every boot."""

    virsh: Virsh
    journal: TrialJournal
    root: Path  # state directory
    reach: GuestConnector
    on_boot: Callable[[Progress], None]  # called before each boot, and at the end
    on_progress: Callable[[Progress], None]  # called before each test of a boot
    # called while a guest boots, with the seconds since its start and the limit
    on_wait: Callable[[float, float], None]
    notify: Callable[[str], None]  # gets a line for each event worth reporting
    host: Host | None = None  # the guests' host, for their NCCL files
    # returns the host's present state; None if it cannot be read, and layouts are not checked then
    read_host: Callable[[], Host] | None = None
    # duration of a boot of each variant, if known beforehand
    boot_s: Mapping[str, float] = field(default_factory=dict)
    # a round begins only if it will end by then; None = no limit
    within_s: float | None = None

    @property
    def domain(self) -> TrialDomain:
        stop_s = self.config.measuring.stop_s
        return TrialDomain(self.virsh, self.head, self.journal, self.root, stop_s, self.notify)


def schedule_steps(head: TrialHead, state: TrialState | None = None) -> tuple[ScheduledTask, ...]:
    """Return the schedule of a trial, with boots that were ordered after it began."""
    layouts = (*head.layouts, BARE) if head.bare else head.layouts
    boot_order = None if state is None else state.boots
    return schedule_trial(layouts, boot_order or head.boots, head.seed)


def run_trial(trial: Trial, lock: int) -> None:
    """Run the rest of a trial, then undo every change.

    lock: the caller's lock of the journal; child processes inherit it. If the trial was killed and
    the guest still runs in the same boot, its measurement continues. Raises KeyboardInterrupt after
    all is undone, HostError if libvirt stays away, and the errors of `undo`.
    """
    vm = _BootedVm(trial, lock)
    if vm.alive is None:
        trial.domain.undo()
        _reject_edited(trial)
    try:
        if trial.copy is not None and trial.journal.load().state.change(COPY) is None:
            CopyStep(trial.domain, trial.copy).do(trial.journal.changes.write)
        run_tasks(vm, trial.on_boot, retry=True)
    except KeyboardInterrupt:
        try:
            trial.journal.note(EntryKind.INTERRUPTED)
        except HostError as error:
            trial.notify(f"the journal could not record the interruption: {error.message}")
        raise
    finally:
        with hold_interrupts(trial.notify):
            trial.domain.undo()
    trial.journal.note(EntryKind.ENDED)


def _reject_edited(trial: Trial) -> None:
    """Reject layouts that were made from another definition than the VM has now."""
    if trial.head.copy is not None:
        return
    now = trial.domain.retry(lambda: trial.virsh.read_definition(trial.head.uuid))
    if not is_same_definition(now, trial.journal.read_kept(ORIGINAL)):
        raise InputError(
            f"{trial.head.source}: expected the definition that the trial was planned from, found "
            "another: it was edited since",
            hint=format_command(trial.head.argument, "undo") + " ends it; then begin a new one",
        )


class _BootedVm:
    """A VM that boots for each task. See Executor. alive: the boot and guest that a killed trial
    left running; its measurement continues."""

    def __init__(self, trial: Trial, lock: int) -> None:
        self._trial = trial
        self._lock = lock
        self._steps: dict[str, ScheduledTask] = {}
        self._pace = Pace(trial.boot_s)
        self._begun = time.monotonic()
        self.alive = self._running_guest()

    def poll(self) -> Progress:
        trial_state = self._trial.journal.load().state
        outcomes = trial_state.outcomes
        steps = self._drop_late_tasks(schedule_steps(self._trial.head, trial_state), outcomes)
        self._steps = {str(step.number): step for step in steps}
        tasks = []
        for name, step in self._steps.items():
            outcome = outcomes.get(step.number)
            state = TaskState.WAITING if outcome is None else STATES[EntryKind(outcome.what)]
            tasks.append(TaskStatus(name, 0, state))
        waiting = [self._steps[status.id] for status in tasks if status.state is TaskState.WAITING]
        next_step = self._order_next(waiting)
        return Progress(
            tuple(tasks),
            now="" if next_step is None else next_step.variant,
            seconds_left=self._pace.seconds_for(step.variant for step in waiting),
        )

    def _drop_late_tasks(
        self, steps: Sequence[ScheduledTask], outcomes: Mapping[int, TrialEntry]
    ) -> Sequence[ScheduledTask]:
        """Remove the tasks of rounds that would exceed the time; the first round always stays."""
        within_s = self._trial.within_s
        if within_s is None:
            return steps
        begun_rounds = {step.round for step in steps if step.number in outcomes}
        last = max(begun_rounds, default=0)
        if all(step.number in outcomes for step in steps if step.round <= last):
            layouts = [step.variant for step in steps if step.round == last + 1]
            took_s = time.monotonic() - self._begun
            if took_s + (self._pace.seconds_for(layouts) or 0.0) <= within_s:
                last += 1
        return [step for step in steps if step.round <= last]

    def retry(self, tasks: Sequence[TaskStatus]) -> None:
        """Move the results of an interrupted boot aside, as a boot is measured as a whole."""
        for task in tasks:
            step = self._steps[task.id]
            directory = self._run_there(step)
            if directory is not None:
                _set_aside(self._trial, step, directory)
            self._trial.journal.note(EntryKind.AGAIN, step.number)

    def start(self, tasks: Sequence[TaskStatus]) -> None:
        step = self._order_next([self._steps[task.id] for task in tasks])
        assert step is not None, "something is left"
        start_s = time.monotonic()
        number, machine = self.alive or (step.number, None)
        self.alive = None
        if number != step.number:  # no time is left for its round
            _stop(self._trial, machine)
            machine = None
        self._boot_and_measure(step, machine)
        self._pace.took(step.variant, time.monotonic() - start_s)

    def _order_next(self, steps: Sequence[ScheduledTask]) -> ScheduledTask | None:
        """Return the task to start: the boot whose guest is running, else the first."""
        alive = None if self.alive is None else self.alive[0]
        return min(steps, key=lambda step: (step.number != alive, step.number), default=None)

    def _running_guest(self) -> tuple[int, Machine] | None:
        """Return the boot and guest of a killed trial, if the guest still answers."""
        trial = self._trial
        state = trial.journal.load().state
        entry, number = state.change(BOOT), state.running
        if entry is None or number is None or "boot" not in entry.facts:
            return None
        if number in state.measured_boots:
            return None
        try:
            if not BootStep(trial.domain).is_done(entry):
                return None
            machine = trial.reach.machine(trial.head.uuid)
            if boot_of(machine) != entry.facts["boot"]:
                return None
            trial.reach.equip(machine)
        except HomenodeError:
            return None
        return number, machine

    def _run_there(self, step: ScheduledTask) -> Path | None:
        return run_named(Path(self._trial.head.results), run_name(self._trial.head.id, step))

    def _boot_and_measure(self, step: ScheduledTask, machine: Machine | None) -> None:
        """Boot and measure once. Failures are recorded; the daemon's end is raised. machine: the
        guest, if it runs already."""
        trial = self._trial
        name = run_name(trial.head.id, step)
        directory = self._run_there(step)
        is_alive = machine is not None
        if directory is not None and not is_alive:
            run = read_finished(directory)
            if run is not None:  # the trial was killed between the last sample and its record
                count = len(run.samples)
                trial.journal.note(EntryKind.MEASURED, step.number, run=name, samples=count)
                return
            _set_aside(trial, step, directory)
        try:
            if step.variant == BARE:
                _measure(trial, step, LocalMachine(), _make_bare_options(trial, step), resume=False)
                return
            if machine is None:
                machine = self._boot(step)
            if machine is None:
                return
            orders = _make_options(trial, step, machine)
            _measure(trial, step, machine, orders, resume=is_alive and directory is not None)
        except HomenodeError as error:
            trial.journal.note(EntryKind.FAILED, step.number, error.message_with_hint)
            trial.notify(f"{_name(step)}: {error.message_with_hint}")
            # Raises if libvirt stays away: the other boots would fail too.
            trial.domain.retry(lambda: trial.virsh.find_domain(trial.head.uuid))
        finally:
            if step.variant != BARE:
                _stop(trial, machine)

    def _boot(self, step: ScheduledTask) -> Machine | None:
        """Boot and equip the guest of a layout; None if libvirt or the host rejects it."""
        trial, domain = self._trial, self._trial.domain
        _reject_running_original(trial)
        note = trial.journal.changes.write
        copy = trial.layouts[step.variant]
        # The lock keeps other VMs from the layout's resources until the guest has started.
        with domain.host_locked() as host_lock:
            try:
                LayoutStep(domain, copy.document, lambda: _reject_taken(trial, copy)).do(note)
            except (HostError, InputError) as error:
                trial.journal.note(EntryKind.REJECTED, step.number, error.message_with_hint)
                trial.notify(f"{_name(step)}: rejected: {error.message_with_hint}")
                domain.retry(lambda: trial.virsh.find_domain(trial.head.uuid))
                return None
            entry = BootStep(domain, step.number, (self._lock, *host_lock)).do(note)
        answer_s = trial.config.measuring.answer_s
        machine = wait_for_answer(
            trial.virsh, trial.head.uuid, trial.reach, answer_s, trial.on_wait
        )
        note(add_boot_id(entry, boot_of(machine)))
        trial.reach.equip(machine)
        return machine


def _name(step: ScheduledTask) -> str:
    return f"boot {step.number + 1}: {step.variant}, round {step.round + 1}"


def _reject_taken(trial: Trial, tuned_copy: TunedCopy) -> None:
    """Reject a layout whose resources another VM has taken. Raises InputError."""
    if trial.read_host is None:
        return
    host = remove_domain(trial.read_host(), trial.head.source)
    obstacles = find_new_obstacles(tuned_copy.document, trial.head.domain, tuned_copy.plan, host)
    if obstacles:
        raise InputError(
            f"the host no longer has the resources of the trial's plan: {'; '.join(obstacles)}",
            hint=format_command(trial.head.argument, "resume") + " continues once they are free",
        )


def _reject_running_original(trial: Trial) -> None:
    head = trial.head
    if head.copy is not None and head.source_uuid:
        state = trial.domain.retry(lambda: trial.virsh.find_domain(head.source_uuid))
        if state.is_active:
            raise UsageError(
                f"{head.source}: it is {state.state}: its disks back the copy's disks",
                hint=f"shut it down; then {format_command(head.argument, 'resume')}",
            )


def _measure(
    trial: Trial, step: ScheduledTask, machine: Machine, options: BenchOptions, *, resume: bool
) -> None:
    trial.journal.note(EntryKind.MEASURING, step.number, run=options.name)
    results = Path(trial.head.results)
    outcome = run_bench(machine, options, results, trial.on_progress, resume=resume)
    if step.variant != BARE:
        _reject_rebooted(trial, step, machine, options)
    if outcome.run is None:
        differences = tuple(str(finding) for finding in outcome.findings)
        trial.journal.note(
            EntryKind.MISMATCHED, step.number, run=options.name, findings=differences
        )
        for line in differences:
            trial.notify(f"{_name(step)}: not as planned: {line}")
        return
    gaps = "; ".join(map(str, outcome.gaps))
    count = len(outcome.run.samples)
    if not count:
        raise ToolError(f"no results: every test failed: {gaps}")
    failures = tuple(
        f"{finding.subject}: {finding.observed}"
        for finding in outcome.findings
        if finding.id == TEST_FAILED
    )
    if failures:
        trial.journal.note(
            EntryKind.INCOMPLETE,
            step.number,
            gaps,
            run=options.name,
            samples=count,
            findings=failures,
        )
        for line in failures:
            trial.notify(f"{_name(step)}: not measured: {line}")
        return
    trial.journal.note(EntryKind.MEASURED, step.number, gaps, run=options.name, samples=count)


def _reject_rebooted(
    trial: Trial, step: ScheduledTask, machine: Machine, options: BenchOptions
) -> None:
    """Reject a guest that rebooted: each result belongs to one boot."""
    try:
        now = boot_of(machine)
    except ToolError as error:
        now = f"none: {error.message}"
    if now == options.boot:
        return
    directory = run_named(Path(trial.head.results), options.name)
    if directory is not None:
        _set_aside(trial, step, directory)
    raise ToolError(
        f"expected the guest to stay in its boot {options.boot} while it was measured, found {now}",
        hint="the guest restarted: check its console",
    )


def _make_options(trial: Trial, step: ScheduledTask, machine: Machine) -> BenchOptions:
    plan, document = trial.layouts[step.variant].plan, trial.layouts[step.variant].document
    config = replace(trial.config, measuring=_add_topology(trial, plan, machine))
    return boot_orders(config, trial.head.id, step, plan, boot_of(machine), document)


def _add_topology(trial: Trial, plan: Plan, machine: Machine) -> MeasureOptions:
    """Add the guest's NCCL topology file, if all-reduce is measured."""
    suite, host = trial.config.measuring.suite, trial.host
    if suite.topology is not None or host is None or not measures_all_reduce(suite, plan, host):
        return trial.config.measuring
    try:
        guest = discover(machine.snapshot())
        document = trial.virsh.read_definition(trial.head.uuid)
        suite = replace(suite, topology=find_topology_text(plan, document, guest, host))
    except InputError as error:
        suite = replace(suite, why_no_topology=f"it cannot be made: {error.message}")
    return replace(trial.config.measuring, suite=suite)


def measures_all_reduce(suite: SuiteOptions, plan: Plan, host: Host) -> bool:
    """Return whether all-reduce is measured in a guest: it needs two GPUs or more."""
    devices = (host.find_device(hostdev.bdf) for hostdev in plan.vm.hostdevs)
    gpus = sum(device is not None and device.kind is DeviceKind.GPU for device in devices)
    return gpus > 1 and (not suite.groups or SuiteGroup.NCCL in suite.groups)


def _make_bare_options(trial: Trial, step: ScheduledTask) -> BenchOptions:
    plans = (layout.plan for layout in trial.layouts.values())
    pinning = next(plan for plan in plans if plan.layout.pinning is not Pinning.NONE)
    return boot_orders(trial.config, trial.head.id, step, pinning, f"{BARE} {step.round}")


def _stop(trial: Trial, machine: Machine | None) -> None:
    if trial.journal.load().state.change(BOOT) is None:
        return
    if machine is not None:
        try:
            trial.reach.leave(machine)
        except HomenodeError as error:
            trial.notify(f"files that were copied to the guest remain: {error.message}")
    trial.domain.undo(BOOT, machine=machine)


def _set_aside(trial: Trial, step: ScheduledTask, directory: Path) -> None:
    """Move the results of a boot that is gone aside; it is measured again as a whole."""
    number = 0
    while (aside := trial.journal.path / "set-aside" / f"{directory.name}-{number}").exists():
        number += 1
    trial.journal.note(EntryKind.SET_ASIDE, step.number, str(aside), run=directory.name)
    try:
        aside.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.move(directory, aside)
    except OSError as error:
        raise HostError(f"{aside}: cannot move the run here: {error}") from None


def is_emulated(document: bytes) -> bool:
    """Return whether a domain runs without KVM: its results are meaningless."""
    return open_domain(document, "the domain").root.get("type") == "qemu"


def get_outcome_code(state: TrialState) -> int:
    """3 if a boot failed, 1 if a guest was not as planned or a test failed, else 0."""
    kinds = {entry.what for entry in state.outcomes.values()}
    if kinds & {EntryKind.FAILED, EntryKind.REJECTED}:
        return 3
    return 1 if kinds & {EntryKind.MISMATCHED, EntryKind.INCOMPLETE} else 0


def find_topology_text(plan: Plan, document: bytes, guest: Host, host: Host) -> str:
    """Return the text of the file. document: the definition from libvirt, with every address.
    Raises InputError if a device's place in the guest cannot be determined."""
    domain = open_domain(document, "the domain")
    side = build_guest_side(build_vm(domain), make_pending(domain), plan=plan, guest=guest)
    gpus = guest.devices_of_kind(DeviceKind.GPU)
    flavour = NcclVariant.RCCL if any(gpu.vendor_id == AMD for gpu in gpus) else NcclVariant.NCCL
    return write_topology(assemble_topology(host, side, flavour, "the domain").topology)
