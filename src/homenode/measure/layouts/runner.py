"""Runner: a trial from its first boot to its last, each step written down before it is done. [I/O]

A step that fails is given, and the rest goes on. Whatever happens, the domain has its original
definition at the end.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from homenode.apply.definition import apply_definition
from homenode.discover import discover
from homenode.domain.read import open_domain, vm_of
from homenode.domain.xml_equivalence import same_definition
from homenode.errors import HomenodeError, HostError, InputError, ToolError, UsageError
from homenode.hypervisor.connection import is_local
from homenode.hypervisor.virsh import Virsh
from homenode.measure.access.local import LocalMachine
from homenode.measure.access.machine import Machine
from homenode.measure.derived_run import TEST_FAILED
from homenode.measure.layouts.copying import Prepared, make_copy
from homenode.measure.layouts.guest import (
    Reach,
    answering,
    boot_of,
    host_boot,
    is_same_host_boot,
    retry_while_unavailable,
    stop,
)
from homenode.measure.layouts.host_watch import HostWatch, allocated_between
from homenode.measure.layouts.journal import Head, JournalFile, State, What, left_of
from homenode.measure.layouts.rollback import (
    ORIGINAL,
    held_interrupts,
    noted,
    rollback,
    trial_host_locked,
)
from homenode.measure.layouts.trial_config import (
    BARE,
    Measuring,
    TrialConfig,
    TrialStep,
    bare_orders,
    guest_orders,
    run_name,
    trial_schedule,
)
from homenode.measure.model import Group
from homenode.measure.orders import BenchOptions
from homenode.measure.programs.collective_watch import used_bytes
from homenode.measure.progress import Progress
from homenode.measure.runner import run_bench
from homenode.nccl.assemble import AMD_VENDOR, assemble_topology
from homenode.nccl.guest_side import guest_side
from homenode.nccl.topology import Flavour
from homenode.nccl.write import write_topology
from homenode.pci import DeviceKind
from homenode.plan.model import Plan
from homenode.results.store import read_run
from homenode.topology import Host
from homenode.vm.layout import Pinning
from homenode.wording import command_line

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tuned:
    """A layout of the trial: its plan and the document to define."""

    plan: Plan
    document: bytes


@dataclass(frozen=True, slots=True)
class Reopened:
    """A trial that was begun, as it was. copy: what is to be made first, None in place."""

    head: Head
    config: TrialConfig
    layouts: Mapping[str, Tuned]
    copy: Prepared | None


@dataclass(frozen=True, slots=True)
class Trial:
    """What every step needs.

    root: of the state folder. on_step: called with each step before it begins; on_wait: while a
    guest boots, with the seconds since its start and those that it may take; notify: gets a line
    about everything that is worth one. host: that the guests run on, for their NCCL files.
    """

    virsh: Virsh
    begun: Reopened
    journal: JournalFile
    root: Path
    reach: Reach
    on_step: Callable[[TrialStep, int], None]
    on_progress: Callable[[Progress], None]
    on_wait: Callable[[float, float], None]
    notify: Callable[[str], None]
    host: Host | None = None

    @property
    def head(self) -> Head:
        return self.begun.head

    @property
    def layouts(self) -> Mapping[str, Tuned]:
        return self.begun.layouts

    @property
    def measuring(self) -> Measuring:
        return self.begun.config.measuring

    @property
    def steps(self) -> tuple[TrialStep, ...]:
        return steps_of(self.head)


_ALREADY = ("already running", "already active")
"""In what libvirt and virsh say of starting a domain that runs."""


def steps_of(head: Head) -> tuple[TrialStep, ...]:
    """The schedule of a trial."""
    layouts = (*head.layouts, BARE) if head.bare else head.layouts
    return trial_schedule(layouts, head.boots, head.seed)


def run_trial(trial: Trial, lock: int) -> None:
    """Run what is left of a trial, and take everything back.

    lock: the journal's, of the caller; what is started keeps it. A guest that runs still, in
    the boot in which the trial was killed, is measured on. Raises KeyboardInterrupt after all is
    undone, HostError where libvirt has gone for good, and whatever stands against taking back.
    """
    alive = _alive(trial)
    if alive is None:
        _rollback(trial)
        _refuse_edited(trial)
    try:
        if trial.begun.copy is not None and not trial.journal.known().state.copied:
            _copy(trial, trial.begun.copy)
        numbers = left_of([step.number for step in trial.steps], trial.journal.known().state)
        for step in _first(trial.steps, alive):
            if step.number in numbers:
                trial.on_step(step, len(numbers))
                _step(trial, step, lock, alive if alive and alive[0] == step.number else None)
    except KeyboardInterrupt:
        noted(trial.journal, trial.notify, What.INTERRUPTED)
        raise
    finally:
        with held_interrupts(trial.notify):
            _rollback(trial)
    trial.journal.add(What.ENDED)


def _retry(trial: Trial, work: Callable[[], T]) -> T:
    return retry_while_unavailable(work, trial.head.id, trial.notify)


def _refuse_edited(trial: Trial) -> None:
    """Layouts that were made from another definition than the VM has are no layouts of it."""
    if trial.head.copy is not None:
        return
    now = _retry(trial, lambda: trial.virsh.definition(trial.head.uuid))
    if not same_definition(now, trial.journal.kept(ORIGINAL)):
        raise InputError(
            f"{trial.head.source}: expected the definition that the trial was planned from, found "
            "another: it was edited since",
            hint=command_line("homenode", "trial", "undo", trial.head.id)
            + " ends it; then begin a new one",
        )


def _first(steps: Sequence[TrialStep], alive: tuple[int, Machine] | None) -> list[TrialStep]:
    """The step whose guest is running comes first."""
    return sorted(steps, key=lambda step: (alive is None or step.number != alive[0], step.number))


def _alive(trial: Trial) -> tuple[int, Machine] | None:
    """The guest that a killed trial left behind, where it is in the same boot and answers."""
    state = trial.journal.known().state
    if state.running is None or state.boot is None or state.running in state.measured:
        return None
    try:
        now = trial.virsh.domain(trial.head.uuid)
        if not now.is_active or state.run_id not in (None, now.run_id):
            return None
        if not is_same_host_boot(trial.virsh, state.host_boot):
            return None
        machine = trial.reach.machine(trial.head.uuid)
        if boot_of(machine) != state.boot:
            return None
        trial.reach.equip(machine)
    except HomenodeError:
        return None
    return state.running, machine


def _rollback(trial: Trial) -> None:
    stop_s = trial.measuring.stop_s
    rollback(trial.virsh, trial.head, trial.journal, trial.root, stop_s, notify=trial.notify)


def _copy(trial: Trial, prepared: Prepared) -> None:
    files = ", ".join(prepared.copy.overlays) or "no disks"
    undo = [command_line("virsh", "undefine", prepared.copy.uuid)]
    undo += [command_line("rm", *prepared.copy.overlays)] if prepared.copy.overlays else []
    with trial_host_locked(trial.root, trial.head, trial.notify) as host_lock:
        trial.journal.add(What.COPYING, None, files, undo="; ".join(undo))
        make_copy(trial.virsh, prepared, host_lock)
        trial.journal.add(What.COPIED)


def _step(trial: Trial, step: TrialStep, lock: int, alive: tuple[int, Machine] | None) -> None:
    """One boot and its measurement. What fails is written down; the daemon's end is raised."""
    name = run_name(trial.head.id, step)
    there = _run_there(Path(trial.head.results), name)
    if there is not None and alive is None:
        outcome = trial.journal.known().state.outcomes.get(step.number)
        is_incomplete = outcome is not None and outcome.what is What.INCOMPLETE
        samples = None if is_incomplete else _samples(there)
        if samples is not None:  # it was killed after the last sample, before it said so
            trial.journal.add(What.MEASURED, step.number, run=name, samples=samples)
            return
        _set_aside(trial, step, there)
    machine = None if alive is None else alive[1]
    try:
        if step.is_bare:
            _measure(trial, step, LocalMachine(), _bare(trial, step, name), resume=False)
            return
        before = _host_memory(trial)
        boot = _boot(trial, step, lock) if alive is None else None
        if boot is None and alive is None:
            return
        machine = boot if machine is None else machine
        assert machine is not None, "one of the two is there"
        orders = _orders(trial, step, name, machine)
        if alive is None:
            more = allocated_between(before, _host_memory(trial))
            orders = replace(orders, versions=(*orders.versions, *more))
        watched = _watched(trial, step, machine)
        _measure(trial, step, watched, orders, resume=alive is not None and there is not None)
    except HomenodeError as error:
        trial.journal.add(What.FAILED, step.number, str(error))
        trial.notify(f"boot {step.number + 1}, {step.layout}: {error}")
        # Raises where libvirt has gone for good: the other boots cannot be made either.
        _retry(trial, lambda: trial.virsh.domain(trial.head.uuid))
    finally:
        if not step.is_bare:
            _stop(trial, machine)


def _boot(trial: Trial, step: TrialStep, lock: int) -> Machine | None:
    """The guest of a layout, up and equipped; None where libvirt refuses the layout."""
    _refuse_running_original(trial)
    with trial_host_locked(trial.root, trial.head, trial.notify) as host_lock:
        if not _started(trial, step, (lock, *host_lock)):
            return None
    virsh, uuid = trial.virsh, trial.head.uuid
    machine = answering(virsh, uuid, trial.reach, trial.measuring.answer_s, trial.on_wait)
    trial.journal.add(What.ANSWERED, step.number, boot=boot_of(machine))
    trial.reach.equip(machine)
    return machine


def _started(trial: Trial, step: TrialStep, locks: tuple[int, ...]) -> bool:
    """Define the layout and start it; False where libvirt refuses the layout. locks: the journal's
    and the host's."""
    virsh, uuid = trial.virsh, trial.head.uuid
    wanted = trial.layouts[step.layout]
    trial.journal.add(
        What.APPLYING,
        step.number,
        step.layout,
        undo=command_line("homenode", "restore", trial.head.uuid),
    )
    try:
        original = virsh.definition(uuid)
        apply_definition(virsh, uuid, wanted.document, original, trial.root)
    except (HostError, InputError) as error:
        trial.journal.add(What.REFUSED, step.number, str(error))
        trial.notify(f"boot {step.number + 1}, {step.layout}: refused: {error}")
        _retry(trial, lambda: virsh.domain(uuid))
        return False
    trial.journal.add(What.APPLIED, step.number, step.layout)
    trial.journal.add(
        What.STARTING, step.number, undo=f"virsh destroy {uuid}", host_boot=host_boot(virsh)
    )
    try:
        virsh.start(uuid, locks)
    except HostError as error:
        if any(
            one in error.message for one in _ALREADY
        ):  # by somebody else, just now: it is not ours to stop
            trial.journal.add(What.STOPPED, step.number, "somebody else had started it")
        raise
    trial.journal.add(What.STARTED, step.number, run_id=virsh.domain(uuid).run_id)
    return True


def _refuse_running_original(trial: Trial) -> None:
    head = trial.head
    if head.copy is not None and head.source_uuid:
        state = _retry(trial, lambda: trial.virsh.domain(head.source_uuid))
        if state.is_active:
            raise UsageError(
                f"{head.source}: expected it shut off, found it {state.state}: the copy's disks "
                "lie over its own",
                hint=f"shut it down; then {command_line('homenode', 'trial', 'resume', head.id)}",
            )


def _measure(
    trial: Trial, step: TrialStep, machine: Machine, orders: BenchOptions, *, resume: bool
) -> None:
    trial.journal.add(What.MEASURING, step.number, run=orders.name)
    results = Path(trial.head.results)
    outcome = run_bench(machine, orders, results, trial.on_progress, resume=resume)
    if not step.is_bare:
        _refuse_rebooted(trial, step, machine, orders)
    if outcome.run is None:
        found = tuple(str(one) for one in outcome.findings)
        trial.journal.add(What.MISMATCHED, step.number, run=orders.name, findings=found)
        for line in found:
            trial.notify(f"boot {step.number + 1}, {step.layout}: not as planned: {line}")
        return
    gaps = "; ".join(map(str, outcome.gaps))
    count = len(outcome.run.samples)
    if not count:
        raise ToolError(f"expected figures, found none: every test failed: {gaps}")
    failed = tuple(
        f"{one.subject}: {one.observed}" for one in outcome.findings if one.id == TEST_FAILED
    )
    if failed:
        trial.journal.add(
            What.INCOMPLETE, step.number, gaps, run=orders.name, samples=count, findings=failed
        )
        for line in failed:
            trial.notify(f"boot {step.number + 1}, {step.layout}: not measured: {line}")
        return
    trial.journal.add(What.MEASURED, step.number, gaps, run=orders.name, samples=count)


def _refuse_rebooted(trial: Trial, step: TrialStep, machine: Machine, orders: BenchOptions) -> None:
    """A boot is the unit of every comparison: figures of two of them are no figures."""
    try:
        now = boot_of(machine)
    except ToolError as error:
        now = f"none: {error.message}"
    if now == orders.boot:
        return
    there = _run_there(Path(trial.head.results), orders.name)
    if there is not None:
        _set_aside(trial, step, there)
    raise ToolError(
        f"expected the guest to stay in its boot {orders.boot} while it was measured, found {now}",
        hint="it restarted itself: look at its console",
    )


def _orders(trial: Trial, step: TrialStep, name: str, machine: Machine) -> BenchOptions:
    tuned = trial.layouts[step.layout]
    return guest_orders(
        replace(trial.begun.config, measuring=_with_topology(trial, tuned.plan, machine)),
        step,
        name,
        tuned.plan,
        tuned.document,
        trial=trial.head.id,
        boot=boot_of(machine),
    )


def _sees_host(trial: Trial) -> bool:
    """Whether the host's side counts, and is to be seen from here."""
    return Group.COLLECTIVES in trial.measuring.suite.groups and is_local(trial.virsh.connect)


def _host_memory(trial: Trial) -> dict[str, int]:
    return used_bytes() if _sees_host(trial) else {}


def _watched(trial: Trial, step: TrialStep, machine: Machine) -> Machine:
    if not _sees_host(trial):
        return machine
    cells = trial.layouts[step.layout].plan.cells
    return HostWatch(machine, trial.head.uuid, [cell.memory_bytes for cell in cells])


def _with_topology(trial: Trial, plan: Plan, machine: Machine) -> Measuring:
    """With the guest's NCCL file, where the experiment on collectives gives it one."""
    suite = trial.measuring.suite
    if Group.COLLECTIVES not in suite.groups or suite.topology is not None:
        return trial.measuring
    try:
        if trial.host is None:
            raise InputError("expected the host that the guest runs on, found none")
        guest = discover(machine.snapshot())
        document = trial.virsh.definition(trial.head.uuid)
        suite = replace(suite, topology=topology_text(plan, document, guest, trial.host))
    except InputError as error:
        suite = replace(suite, why_no_topology=f"its file cannot be made: {error.message}")
    return replace(trial.measuring, suite=suite)


def _bare(trial: Trial, step: TrialStep, name: str) -> BenchOptions:
    pinning = [
        one.plan for one in trial.layouts.values() if one.plan.layout.pinning is not Pinning.NONE
    ]
    return bare_orders(trial.begun.config, step, name, pinning[0], trial.head.id)


def _stop(trial: Trial, machine: Machine | None) -> None:
    state = trial.journal.known().state
    if state.running is None:
        return
    if machine is not None:
        try:
            trial.reach.leave(machine)
        except HomenodeError as error:
            trial.notify(f"what was put into the guest stays there: {error.message}")
    noted(trial.journal, trial.notify, What.STOPPING, state.running)
    how = _retry(
        trial,
        lambda: stop(
            trial.virsh,
            trial.head.uuid,
            machine,
            trial.measuring.stop_s,
            state.run_id,
        ),
    )
    noted(trial.journal, trial.notify, What.STOPPED, state.running, how)


def _run_there(results: Path, name: str) -> Path | None:
    """The folder of a run, whatever system it is of."""
    try:
        return next((path for path in sorted(results.glob(f"*/{name}")) if path.is_dir()), None)
    except OSError as error:
        raise HostError(f"{results}: expected results there, found: {error.strerror}") from None


def _samples(folder: Path) -> int | None:
    """How many samples a finished run has; None where it is not finished, or has none."""
    try:
        return len(read_run(folder).samples) or None
    except InputError:
        return None


def _set_aside(trial: Trial, step: TrialStep, folder: Path) -> None:
    """A boot that is gone is measured again as a whole; what there was of it is kept apart."""
    number = 0
    while (aside := trial.journal.folder / "set-aside" / f"{folder.name}-{number}").exists():
        number += 1
    trial.journal.add(What.SET_ASIDE, step.number, str(aside), run=folder.name)
    try:
        aside.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.move(folder, aside)
    except OSError as error:
        raise HostError(f"{aside}: expected to move a run there, found: {error}") from None


def is_emulated(document: bytes) -> bool:
    """Whether a domain runs without the processor's help: no figure of it means anything."""
    return open_domain(document, "the domain").root.get("type") == "qemu"


def outcome_code(state: State) -> int:
    """The exit code that a trial comes to: 3 where a boot failed, 1 where a guest was not as
    planned or a test failed in it, else 0."""
    kinds = {one.what for one in state.outcomes.values()}
    if kinds & {What.FAILED, What.REFUSED}:
        return 3
    return 1 if kinds & {What.MISMATCHED, What.INCOMPLETE} else 0


def topology_text(plan: Plan, document: bytes, guest: Host, host: Host) -> str:
    """The text of the file. document: as libvirt has defined it, with every address.

    Raises InputError where a device's place in the guest cannot be determined.
    """
    opened = open_domain(document, "the domain")
    side = guest_side(opened, vm_of(opened), plan=plan, guest=guest)
    gpus = guest.devices_of_kind(DeviceKind.GPU)
    flavour = Flavour.RCCL if any(gpu.vendor_id == AMD_VENDOR for gpu in gpus) else Flavour.NCCL
    return write_topology(assemble_topology(host, side, flavour, "the domain").topology)
