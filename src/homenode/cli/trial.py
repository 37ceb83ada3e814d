"""homenode trial: begin, resume, undo and conclude a trial, and print its status. [I/O]"""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import asdict, replace

from homenode.change.journal import default_root
from homenode.check.doctor.diagnosis import diagnose
from homenode.cli.arguments.measure import (
    TrialArguments,
    TrialResumeArguments,
    TrialStatusArguments,
    TrialUndoArguments,
)
from homenode.cli.bench_options import build_trial_request, check_access, read_static_probe
from homenode.cli.bench_options import check as check_options
from homenode.cli.plan import apply_plans
from homenode.cli.terminal import (
    ask,
    check_can_ask,
    check_can_write,
    interruptible,
    make_console,
    note,
    note_error,
    note_gaps,
    print_json,
    say,
    update,
)
from homenode.doc import Doc, Text
from homenode.errors import (
    NOT_KNOWN,
    UNPLANNABLE,
    HomenodeError,
    HostError,
    InputError,
    UsageError,
)
from homenode.findings import Finding, Gap, sort_findings
from homenode.formats import encode
from homenode.machine.pci import DeviceKind
from homenode.measure.experiment import Pace, Progress
from homenode.measure.model import PROBE
from homenode.measure.results.model import Run
from homenode.measure.results.store import read_run
from homenode.measure.suite import build_suite
from homenode.measure.trial.boot_steps import TrialDomain
from homenode.measure.trial.guest import GuestReach, format_command
from homenode.measure.trial.journal import (
    BARE,
    EntryKind,
    StoredTrial,
    TrialEntry,
    TrialHead,
    TrialJournal,
    TrialState,
    domain_locked,
    list_trials,
)
from homenode.measure.trial.prepare import Preflight, find_latest_trial, preflight, prepare, reopen
from homenode.measure.trial.runner import (
    Trial,
    TrialSetup,
    get_outcome_code,
    is_emulated,
    run_trial,
    schedule_steps,
)
from homenode.objective import Objective
from homenode.plan.planner import suggest_objective
from homenode.show.explain import explain
from homenode.show.plan_text import format_reserved
from homenode.show.trial_text import boot_line, build_outcomes_table, format_status, schedule_text
from homenode.text import command_line, plural
from homenode.vm.domain.read import build_vm, open_domain
from homenode.vm.host_sources import load_daemon_host, reject_unread_vms
from homenode.vm.hypervisor.connection import GuestAccess, is_local
from homenode.vm.hypervisor.virsh import Virsh
from homenode.vm.model import Vm
from homenode.vm.sources import load_host

if TYPE_CHECKING:
    from homenode.machine.topology import Host


EMULATED = "HOMENODE_EMULATED_TRIALS"
"""Variable of the environment with which tests boot emulated guests."""

_BOOT_S = 60.0
"""Estimated time of a server's boot and shutdown."""

_PER_TEST_S = 1.0
_MAX_FINDINGS = 5


class TrialBoot(Struct, frozen=True, kw_only=True):
    """A boot of a trial; its results are None until it is done."""

    number: int
    layout: str
    came_to: str | None  # see the journal's `what`
    detail: str
    run: str | None
    samples: int | None
    findings: tuple[str, ...]


class TrialProgress(Struct, frozen=True, kw_only=True):
    directory: str
    reason: str | None = None  # why its directory cannot be read; then the other fields are unknown
    id: str | None = None
    domain: str | None = None
    connect: str | None = None
    running: bool = False
    ended: bool = False
    to_undo: tuple[str, ...] = ()
    boots: tuple[TrialBoot, ...] = ()
    objective: Objective | None = None


class TrialStatus(Struct, frozen=True, kw_only=True):
    trials: tuple[TrialProgress, ...]


def begin_trial(arguments: TrialArguments) -> None:
    """Check, show findings, plans and time, prompt, and run the trial; exit with its code."""
    check_options(arguments)
    check_can_write(arguments.report)
    virsh = Virsh(arguments.connect)
    host = apply_plans((load_daemon_host(arguments.host, virsh),), arguments.after)[0]
    state = virsh.find_domain(arguments.name)
    check_can_ask(asks=not (arguments.yes or arguments.dry_run))
    original = virsh.read_definition(state.uuid)
    if is_emulated(original) and EMULATED not in os.environ:
        raise UsageError(
            f"{state.name} is emulated (type='qemu'): its results would be meaningless",
            hint=f"{command_line('virsh', 'edit', state.argument)}, type='kvm'",
        )
    probe = read_static_probe(arguments.access.probe)
    document = open_domain(original, state.name)
    vm = build_vm(document)
    objective = suggest_objective(vm, arguments.options, host)
    want = build_trial_request(state.name, arguments, list_usual_layouts(vm, host), objective)
    # A dry run writes nothing, a lock neither.
    alone = nullcontext() if arguments.dry_run else domain_locked(default_root(), state.uuid)
    with alone:
        check_result = preflight(virsh, arguments.name, want, host, default_root())
        reject_unread_vms(host)
        boot_s = _estimate_boots(host, check_result)
        for line in format_reserved(host.without_domains(arguments.options.replaces), state.name):
            note(f"kept: {line}")
        _show(check_result, Pace(boot_s), diagnose(host, document).findings, host.gaps)
        tunings = [layout.tuning for layout in check_result.fitted if layout.tuning is not None]
        for tuning in tunings if arguments.explain else ():
            make_console().print(explain(tuning.plan_to_show, host))
        if arguments.dry_run:
            say("dry run: nothing was started")
            return
        times = plural(len(schedule_steps(check_result.head)), "time")
        if not arguments.yes:
            ask(f"Boot {check_result.head.domain} {times}?")
        journal = TrialJournal(default_root(), check_result.head.id)
        with journal.hold() as lock:
            if arguments.report is not None:
                config = replace(check_result.begun, report=str(arguments.report.absolute()))
                check_result = replace(check_result, begun=config)
            prepare(check_result, journal)
            note(f"trial {check_result.head.id}; journal in {journal.path}")
            head, within_s = check_result.head, arguments.within
            _run(virsh, head, journal, lock, probe, host=host, boot_s=boot_s, within_s=within_s)
    _conclude(check_result.head, journal, arguments.report, arguments.host)


def list_usual_layouts(vm: Vm, host: "Host") -> tuple[str, ...]:
    """Return the default layouts: the study's, as far as they differ on this host."""
    layouts = ["default", "pin"]
    if sum(bool(node.pus) for node in host.nodes) > 1:
        layouts.append("pin-numa")
        gpus = {gpu.bdf for gpu in host.devices_of_kind(DeviceKind.GPU)}
        if gpus & {hostdev.bdf for hostdev in vm.hostdevs} and (vm.is_q35 or vm.is_virt):
            layouts.append("pin-numa-pci")
    return tuple(layouts)


def resume_trial(arguments: TrialResumeArguments) -> None:
    """Continue the last trial of a domain; failed boots are repeated."""
    reaching = None if arguments.access.is_default else arguments.access.guest
    if reaching is not None:
        check_access(reaching)
    check_can_write(arguments.report)
    trial = find_latest_trial(default_root(), arguments.name)
    assert trial.head is not None, "latest_trial omits what cannot be read"
    head, journal = trial.head, TrialJournal(default_root(), trial.head.id)
    alone = domain_locked(default_root(), head.source_uuid or head.uuid)
    with alone, journal.hold() as lock:
        probe = read_static_probe(arguments.access.probe)
        if arguments.boots is not None:
            _order_more(head, trial.state, journal, arguments.boots)
        virsh = Virsh(head.connect)
        _run(virsh, head, journal, lock, probe, reaching=reaching, within_s=arguments.within)
    report = reopen(head, journal).config.report
    _conclude(head, journal, arguments.report or (None if report is None else Path(report)), None)


def _order_more(head: TrialHead, state: TrialState, journal: TrialJournal, boots: int) -> None:
    """Raise UsageError for no more than there are, or too many."""
    order = state.boots or head.boots
    if boots <= order:
        raise UsageError(f"--boots {boots}: expected more than the {order} of each layout so far")
    schedule_steps(head, replace(state, boots=boots))
    journal.note(EntryKind.MORE_BOOTS, boots=boots)


def rollback_trial(arguments: TrialUndoArguments) -> None:
    """Restore the VM to its state before its last trial."""
    trial = find_latest_trial(default_root(), arguments.name)
    assert trial.head is not None, "latest_trial omits what cannot be read"
    journal = TrialJournal(default_root(), trial.head.id)
    alone = domain_locked(default_root(), trial.head.source_uuid or trial.head.uuid)
    with alone, journal.hold():
        if not journal.load().state.to_undo:
            note(f"{trial.head.source}: no step to undo of trial {trial.head.id}")
        virsh = Virsh(trial.head.connect)
        stop_s = arguments.shutdown_timeout
        TrialDomain(virsh, trial.head, journal, default_root(), stop_s, note).undo()
        journal.note(EntryKind.ENDED)


def show_status(arguments: TrialStatusArguments) -> None:
    """Print the progress of all trials, or of the last trial of that name. Raises InputError if
    none has that name."""
    name = arguments.name
    trials = list_trials(default_root(), name)
    if not trials and name is None:
        note("no trials yet")
    elif not trials:
        raise InputError(f"no trial of {name}", hint="homenode trial status")
    shown = trials if name is None else trials[-1:]
    if arguments.json:
        print_json(
            encode("trial-status", TrialStatus(trials=tuple(map(_build_trial_progress, shown))))
        )
        return
    for trial in shown:
        if trial.head is None:
            note(f"{trial.directory}: {trial.reason}")
            continue
        steps = schedule_steps(trial.head, trial.state)
        is_running = TrialJournal(default_root(), trial.head.id).is_locked
        make_console().print(format_status(trial, steps, _name_of(trial), is_running=is_running))
    if name is not None and len(trials) > 1:
        names = ", ".join(trial.directory.name for trial in trials[:-1])
        note(f"earlier: {names} (homenode trial status ID shows one)")


def _name_of(trial: StoredTrial) -> str:
    """The argument that names a trial: the VM's name, or the id if it is not the VM's last."""
    assert trial.head is not None, "what cannot be read has no commands"
    last = list_trials(default_root(), trial.head.source_uuid or trial.head.source)[-1]
    return trial.head.argument if last.directory == trial.directory else trial.head.id


def _build_trial_progress(trial: StoredTrial) -> TrialProgress:
    head, state = trial.head, trial.state
    if head is None:
        return TrialProgress(directory=str(trial.directory), reason=trial.reason)
    boots = []
    for step in schedule_steps(head, state):
        entry = state.outcomes.get(step.number)
        boots.append(
            TrialBoot(
                number=step.number,
                layout=step.variant,
                came_to=None if entry is None else entry.what,
                detail="" if entry is None else entry.detail,
                run=None if entry is None else entry.run,
                samples=None if entry is None else entry.samples,
                findings=() if entry is None else entry.findings,
            )
        )
    return TrialProgress(
        directory=str(trial.directory),
        id=head.id,
        domain=head.source,
        connect=head.connect,
        running=TrialJournal(default_root(), head.id).is_locked,
        ended=state.ended,
        to_undo=tuple(change.kind for change in state.changes),
        boots=tuple(boots),
        objective=head.objective,
    )


def _run(
    virsh: Virsh,
    head: TrialHead,
    journal: TrialJournal,
    lock: int,
    probe: bytes,
    *,
    reaching: GuestAccess | None = None,
    host: "Host | None" = None,
    boot_s: Mapping[str, float] | None = None,
    within_s: float | None = None,
) -> None:
    """host: that the guests run on; None: this machine, if a host is needed."""
    setup = reopen(head, journal)
    reach = GuestReach(
        virsh, reaching or setup.config.reaching, journal.path / "known_hosts", probe
    )
    progress = _ProgressLine()
    trial = Trial(
        **asdict(setup),
        virsh=virsh,
        journal=journal,
        root=default_root(),
        reach=reach,
        on_boot=progress.on_boot,
        on_progress=progress.on_step,
        on_wait=progress.on_wait,
        notify=note,
        host=_find_guest_host(setup, host),
        read_host=(lambda: load_daemon_host(None, virsh)) if is_local(virsh.connect) else None,
        boot_s=boot_s or {},
        within_s=within_s,
    )
    with interruptible():
        try:
            run_trial(trial, lock)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"{format_command(head.argument, 'resume')} continues"
            ) from None
        except HomenodeError as error:
            resume, undo, status = (
                format_command(head.argument, action) for action in ("resume", "undo", "status")
            )
            commands_text = (
                f"{resume} continues the trial, {undo} undoes it, {status} lists the open steps"
            )
            error.hint = (
                commands_text if error.hint is None else f"{error.hint}; then {commands_text}"
            )
            raise


def _conclude(
    head: TrialHead, journal: TrialJournal, report: Path | None, host: str | None
) -> None:
    """Print what the boots show, write the report, and exit with the status of the trial. host:
    source of the layouts' host; None: this machine, if it is that host."""
    from homenode.decide.machine_facts import collect_measured_facts
    from homenode.decide.switch_effects import answer_of, conclude

    trial = journal.load()
    code = get_outcome_code(trial.state)
    steps = schedule_steps(head, trial.state)
    runs, directories = _read_runs(head, journal)
    if not runs:
        say(f"{head.source}: no conclusion: no boot was measured")
    else:
        config = reopen(head, journal).config

        machine = collect_measured_facts(runs, load_host(host))
        conclusion = conclude(
            runs,
            head.argument,
            head.connect,
            apply_words=config.apply_words,
            machine=machine,
        )
        answer = answer_of(conclusion, head, trial.state.boots or head.boots)
        make_console().print(Doc("", (Text(answer.sentence, hang=2),)))
        page = report or journal.path / "report.html"
        is_written = _report(directories, head, host, page)
        for label, text in (("next", answer.command), ("report", page if is_written else None)):
            if text is not None:
                say(f"{label:<{8 if is_written else 6}}{text}")
        code = code or (NOT_KNOWN if answer.is_open else code)
        if report is not None and not is_written:
            code = code or HostError.exit_code
    outcomes = trial.state.outcomes
    unmeasured_steps = [step for step in steps if not _is_measured(outcomes.get(step.number))]
    if unmeasured_steps:
        make_console().print(Doc("", (build_outcomes_table(trial.state, unmeasured_steps),)))
    raise SystemExit(code)


def _is_measured(outcome: TrialEntry | None) -> bool:
    return outcome is not None and outcome.what == EntryKind.MEASURED


def _report(directories: list[str], head: TrialHead, host: str | None, path: Path) -> bool:
    """Return whether the report could be written; a failure does not fail the trial."""
    from homenode.cli.report import write_page

    try:
        write_page(directories, host, f"Trial {head.id} of {head.source}", path)
    except (HostError, UsageError) as error:
        note_error(error, "no report")
        return False
    return True


def _read_runs(head: TrialHead, journal: TrialJournal) -> tuple[list[Run], list[str]]:
    """Return the measured boots, by layout in the order of the head, and their directories."""
    state = journal.load().state
    order = {layout: at for at, layout in enumerate((*head.layouts, BARE))}
    runs, directories = [], []
    steps = schedule_steps(head, state)
    for step in sorted(steps, key=lambda step: (order[step.variant], step.round)):
        outcome = state.outcomes.get(step.number)
        if step.number in state.with_figures and outcome is not None and outcome.run:
            for directory in sorted(Path(head.results).glob(f"*/{outcome.run}")):
                runs.append(read_run(directory))
                directories.append(str(directory))
    return runs, directories


def _find_guest_host(setup: TrialSetup, host: "Host | None") -> "Host | None":
    """Return the host if guests may get its NCCL file."""
    if not any(len(tuned_copy.plan.vm.hostdevs) > 1 for tuned_copy in setup.layouts.values()):
        return None
    return load_host(None) if host is None else host


def _estimate_boots(host: "Host", preflight: Preflight) -> dict[str, float]:
    """Estimate the seconds of a boot by variant; GPU tests are known in the guest."""
    measuring = preflight.begun.measuring
    try:
        tests = build_suite(host, {PROBE}, measuring.suite).tests
    except UsageError:  # GPU tests alone: their time is known in the guest only
        tests = ()
    suite_s = sum(test.seconds + _PER_TEST_S for test in tests)
    measure_s = suite_s * measuring.repeats
    layouts = dict.fromkeys(preflight.head.layouts, _BOOT_S + measure_s)
    return {**layouts, BARE: measure_s}  # the host itself is not booted


def _show(
    preflight: Preflight, pace: Pace, findings: Sequence[Finding], gaps: Sequence[Gap]
) -> None:
    """Print the schedule. Exits if a layout does not fit, or there is an obstacle."""
    steps = schedule_steps(preflight.head)
    seconds = pace.seconds_for(step.variant for step in steps)
    bad = [finding for finding in sort_findings(findings) if finding.is_bad]
    make_console().print(schedule_text(preflight, steps, seconds, bad[:_MAX_FINDINGS]))
    if len(bad) > _MAX_FINDINGS:
        count_text = plural(len(bad) - _MAX_FINDINGS, "more finding")
        note(f"{count_text}: virsh dumpxml, then homenode doctor")
    note_gaps(gaps)
    for gap in preflight.unchecked:
        note(f"not checked: {gap}")
    for candidate in preflight.fitted:
        for line in () if candidate.tuning is None else candidate.tuning.notes:
            note(f"{candidate.layout}: {line}")
    for line in preflight.obstacles:
        note(f"in the way: {line}")
    if preflight.obstacles:
        raise SystemExit(UsageError.exit_code)
    short = [candidate for candidate in preflight.fitted if candidate.against]
    for candidate in short:
        note(f"{candidate.layout} does not fit: {'; '.join(candidate.against)}")
    if short:
        note("no VM was started; omit these layouts, or free the resources that they need")
        raise SystemExit(UNPLANNABLE)


class _ProgressLine:
    """The progress line of a trial: rewritten on a terminal, otherwise one line per boot."""

    _EVERY_S = 30.0

    def __init__(self) -> None:
        self._boots, self._said_s = Progress(()), 0.0

    def on_boot(self, boots: Progress) -> None:
        self._boots, self._said_s = boots, 0.0
        self._print(boot_line(boots))

    def on_step(self, steps: Progress) -> None:
        if sys.stderr.isatty():
            self._print(boot_line(self._boots, steps))

    def on_wait(self, waited_s: float, timeout_s: float) -> None:
        is_due = waited_s - self._said_s >= self._EVERY_S
        if sys.stderr.isatty() or is_due:
            self._said_s = waited_s if is_due else self._said_s
            waiting = f"waiting for the guest, {waited_s:.0f} of {timeout_s:.0f} s"
            self._print(boot_line(self._boots, waiting=waiting))

    def _print(self, line: str) -> None:
        if sys.stderr.isatty():
            update(line.ljust(79))
        else:
            note(line)
