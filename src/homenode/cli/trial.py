"""homenode trial: what is asked, and how it begins, goes on, concludes, is undone. [I/O]"""

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from homenode.change.journal import default_root
from homenode.check.doctor.links import link_health
from homenode.cli.arguments.trial import (
    TrialArguments,
    TrialResumeArguments,
    TrialStatusArguments,
    TrialUndoArguments,
)
from homenode.cli.bench_options import check as check_options
from homenode.cli.bench_options import check_access, static_probe, trial_request
from homenode.cli.planning import hosts_after
from homenode.cli.terminal import (
    check_can_write,
    console,
    interruptible,
    note,
    note_error,
    print_json,
    update,
)
from homenode.doc import Doc, Text
from homenode.errors import FINDINGS, UNPLANNABLE, HomenodeError, HostError, InputError, UsageError
from homenode.findings import Severity
from homenode.formats import encode
from homenode.measure.layouts.boot_steps import rollback
from homenode.measure.layouts.guest import GuestReach, again
from homenode.measure.layouts.guest_access import GuestAccess
from homenode.measure.layouts.journal import (
    Head,
    JournalFile,
    Known,
    What,
    domain_locked,
    known_trials,
)
from homenode.measure.layouts.prepare import (
    Preflight,
    latest,
    preflight,
    prepare,
    reopen,
    with_access,
)
from homenode.measure.layouts.runner import Reopened, Trial, outcome_code, run_trial, steps_of
from homenode.measure.layouts.trial_config import BARE
from homenode.measure.model import PROBE
from homenode.measure.progress import Pace, Progress
from homenode.measure.results.model import Run, SequentialPlan
from homenode.measure.results.store import read_run
from homenode.measure.sequence import RoundLook, SequenceEnd
from homenode.measure.suite import suite_for
from homenode.objective import Objective
from homenode.plan.auto import suggested_objective
from homenode.show.trial_text import (
    advice_text,
    outcomes_text,
    progress_line,
    schedule_text,
    status_text,
)
from homenode.vm.domain.read import read_vm
from homenode.vm.hypervisor.connection import is_local
from homenode.vm.hypervisor.virsh import Virsh
from homenode.vm.sources import load_host

if TYPE_CHECKING:
    from homenode.machine.topology import Host


_BOOT_S = 60.0
"""From start to answer and from there to off, as a server of the day takes; for the estimate."""

_PER_TEST_S = 1.0


class TrialBoot(Struct, frozen=True, kw_only=True):
    """came_to: see the journal's `what`; None: to be done."""

    number: int
    layout: str
    came_to: str | None
    detail: str
    run: str | None
    samples: int | None
    findings: tuple[str, ...]


class TrialStanding(Struct, frozen=True, kw_only=True):
    """A trial. reason: why its folder cannot be read; then the rest is not known."""

    folder: str
    reason: str | None = None
    id: str | None = None
    domain: str | None = None
    connect: str | None = None
    running: bool = False
    ended: bool = False
    to_undo: tuple[str, ...] = ()
    boots: tuple[TrialBoot, ...] = ()
    objective: Objective | None = None
    sequence: SequentialPlan | None = None
    looks: tuple[RoundLook, ...] = ()


class TrialStatus(Struct, frozen=True, kw_only=True):
    """Of trial status."""

    trials: tuple[TrialStanding, ...]


def begin_trial(asked: TrialArguments, agreed: Callable[[], bool] | None = None) -> None:
    """Look, show the schedule, and run it; exits with the contract's code.

    agreed: asked after it is shown; None = it is not asked.
    """
    check_options(asked)
    check_can_write(asked.report)
    virsh = Virsh(asked.connect)
    host = hosts_after((load_host(asked.host),), asked.after)[0]
    state = virsh.domain(asked.name)
    vm = read_vm(virsh.definition(state.uuid), state.name)
    want = trial_request(state.name, asked, suggested_objective(vm, asked.options, host))
    # A dry run writes nothing, a lock neither.
    alone = nullcontext() if asked.dry_run else domain_locked(default_root(), state.uuid)
    if want.sequence is not None:
        _refuse_sick(host)
    with alone:
        checked = preflight(virsh, asked.name, want, host, default_root())
        boot_s = _seconds_of_boots(host, checked)
        _show(checked, Pace(boot_s).left(step.variant for step in steps_of(checked.head)))
        if asked.dry_run or (agreed is not None and not agreed()):
            return
        probe = static_probe(asked.access.probe)
        journal = JournalFile(default_root(), checked.head.id)
        with journal.held() as lock:
            if asked.report is not None:
                begun = replace(checked.begun, report=str(asked.report.absolute()))
                checked = replace(checked, begun=begun)
            prepare(checked, journal)
            note(f"trial {checked.head.id}; journal in {journal.path}")
            _run(
                virsh,
                checked.head,
                journal,
                lock,
                probe,
                host=host,
                boot_s=boot_s,
                within_s=checked.head.within_s,
            )
    _conclude(checked.head, journal, asked.report, asked.host)


def _refuse_sick(host: "Host") -> None:
    """Exits where nothing could be decided, however often it is booted."""
    critical = [one for one in link_health(host) if one.severity is Severity.CRITICAL]
    for one in critical:
        note(f"{one}; {one.fix}")
    if critical:
        note(f"nothing is decided on {host.name} before that is repaired, and nothing was booted")
        raise SystemExit(FINDINGS)


def resume_trial(asked: TrialResumeArguments) -> None:
    """Continue the last trial of a domain; what failed is tried again."""
    reaching = None if asked.access.is_default else asked.access.guest
    if reaching is not None:
        check_access(reaching)
    check_can_write(asked.report)
    known = latest(default_root(), asked.name)
    assert known.head is not None, "latest leaves out what cannot be read"
    head, journal = known.head, JournalFile(default_root(), known.head.id)
    alone = domain_locked(default_root(), head.source_uuid or head.uuid)
    with alone, journal.held() as lock:
        probe = static_probe(asked.access.probe)
        more_s = asked.within
        spent_s = known.state.looks[-1].seconds if known.state.looks else 0.0
        within_s = head.within_s if more_s is None else spent_s + more_s
        virsh = Virsh(head.connect)
        _run(virsh, head, journal, lock, probe, reaching=reaching, within_s=within_s)
    kept = reopen(head, journal).config.report
    _conclude(head, journal, asked.report or (None if kept is None else Path(kept)), None)


def rollback_trial(asked: TrialUndoArguments) -> None:
    """Have the VM as it was before the last trial of it."""
    known = latest(default_root(), asked.name)
    assert known.head is not None, "latest leaves out what cannot be read"
    journal = JournalFile(default_root(), known.head.id)
    alone = domain_locked(default_root(), known.head.source_uuid or known.head.uuid)
    with alone, journal.held():
        if not journal.known().state.to_undo:
            note(f"{known.head.source}: nothing left to undo of trial {known.head.id}")
        virsh = Virsh(known.head.connect)
        rollback(virsh, known.head, journal, default_root(), asked.stop_within, notify=note)
        journal.note(What.ENDED)


def show_status(asked: TrialStatusArguments) -> None:
    """Print how far trials are: all, or the last one of that name.

    Raises InputError where none has that name.
    """
    name = asked.name
    found = known_trials(default_root(), name)
    if not found and name is None:
        note("no trials yet")
    elif not found:
        raise InputError(
            f"{name}: expected a trial of it, found none", hint="homenode trial status lists all"
        )
    shown = found if name is None else found[-1:]
    if asked.json:
        print_json(encode("trial-status", TrialStatus(trials=tuple(map(_standing, shown)))))
        return
    for known in shown:
        if known.head is None:
            note(f"{known.folder}: {known.reason}")
            continue
        steps = steps_of(known.head, known.state.looks)
        is_running = JournalFile(default_root(), known.head.id).is_locked
        console().print(status_text(known, steps, is_running=is_running))
    if name is not None and len(found) > 1:
        earlier = ", ".join(one.folder.name for one in found[:-1])
        note(f"earlier: {earlier} (homenode trial status ID shows one)")


def _standing(known: Known) -> TrialStanding:
    head, state = known.head, known.state
    if head is None:
        return TrialStanding(folder=str(known.folder), reason=known.reason)
    boots = []
    for step in steps_of(head, state.looks):
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
    return TrialStanding(
        folder=str(known.folder),
        id=head.id,
        domain=head.source,
        connect=head.connect,
        running=JournalFile(default_root(), head.id).is_locked,
        ended=state.ended,
        to_undo=tuple(one.kind for one in state.changes),
        boots=tuple(boots),
        objective=head.objective,
        sequence=head.sequence,
        looks=state.looks,
    )


def _run(
    virsh: Virsh,
    head: Head,
    journal: JournalFile,
    lock: int,
    probe: bytes,
    *,
    reaching: GuestAccess | None = None,
    host: "Host | None" = None,
    boot_s: Mapping[str, float] | None = None,
    within_s: float | None = None,
) -> None:
    """host: that the guests run on; None: this machine, where it is needed. within_s: of a
    sequence, from its beginning."""

    def decide(kept: tuple[str, ...]) -> tuple[tuple[str, ...], SequenceEnd | None]:
        from homenode.decide.sequential import look_at

        assert head.objective is not None, "a sequence has one"
        return look_at(_runs(head, journal)[0], kept, head.objective)

    begun = with_access(reopen(head, journal), reaching)
    reach = GuestReach(virsh, begun.config.reaching, journal.path / "known_hosts", probe)
    trial = Trial(
        virsh=virsh,
        begun=begun,
        journal=journal,
        root=default_root(),
        reach=reach,
        on_boot=lambda progress: note(progress_line(progress, "boots")),
        on_progress=_say_step,
        on_wait=_Waiting(),
        notify=note,
        host=_host_of_guests(begun, host),
        read_host=(lambda: load_host(None)) if is_local(virsh.connect) else None,
        boot_s=boot_s or {},
        decide=decide,
        within_s=within_s,
    )
    with interruptible():
        try:
            run_trial(trial, lock)
        except KeyboardInterrupt:
            note(f"interrupted; {again(head.id, 'resume')} continues")
            raise
        except HomenodeError as error:
            ways = (
                f"{again(head.id, 'resume')} continues; {again(head.id, 'undo')} undoes it; "
                f"{again(head.id, 'status')} shows what is left"
            )
            error.hint = ways if error.hint is None else f"{error.hint}; then {ways}"
            raise


def _conclude(head: Head, journal: JournalFile, report: Path | None, host: str | None) -> None:
    """Print what the boots show, write the report, and exit as the trial came out.

    host: source of the one that the layouts were planned for; None: this machine, if it is theirs.
    """
    from homenode.decide.evidence.documents import publications
    from homenode.decide.machine_facts import facts_of_measured
    from homenode.decide.sequential import sequential_answer
    from homenode.decide.trial_conclusion import conclude
    from homenode.show.results_text import comparison_text, verdicts_text

    known = journal.known()
    code = outcome_code(known.state)
    console().print(outcomes_text(known.state, steps_of(head, known.state.looks)))
    runs, folders = _runs(head, journal)
    if runs:
        begun = reopen(head, journal).config

        machine = facts_of_measured(runs, load_host(host), publications())
        found = conclude(
            runs,
            head.argument,
            head.connect,
            apply_words=begun.apply_words,
            publications=publications(),
            machine=machine,
            plan_words=begun.plan_words,
        )
        for comparison in (found.comparison, found.of_bare):
            if comparison is not None and not found.emulated:
                console().print(comparison_text(comparison))
        own = found.of_this_trial()
        if found.verdicts.verdicts:
            console().print(verdicts_text(own))
        # Not broken into lines: it is there to be copied.
        answer = sequential_answer(found, head, known.state)
        said = advice_text(found) if answer is None else Doc("", (Text(answer.sentence),))
        console().print(said, soft_wrap=True)
        written = _report(folders, head, host, report or journal.path / "report.html")
        if report is not None and not written:
            code = code or HostError.exit_code
    raise SystemExit(code)


def _report(folders: list[str], head: Head, host: str | None, path: Path) -> bool:
    """Whether it could be written; without the extra, say, the trial is none the worse."""
    from homenode.cli.conclude import write_page

    try:
        write_page(folders, host, f"Trial {head.id} of {head.source}", path)
    except (HostError, UsageError) as error:
        note_error(error, "no report")
        return False
    return True


def _runs(head: Head, journal: JournalFile) -> tuple[list[Run], list[str]]:
    """The measured boots, by layout in the order of the head, and where they lie."""
    state = journal.known().state
    order = {layout: at for at, layout in enumerate((*head.layouts, BARE))}
    runs, folders = [], []
    steps = steps_of(head, state.looks)
    for step in sorted(steps, key=lambda step: (order[step.variant], step.round)):
        outcome = state.outcomes.get(step.number)
        if step.number in state.with_figures and outcome is not None and outcome.run:
            for folder in sorted(Path(head.results).glob(f"*/{outcome.run}")):
                runs.append(read_run(folder))
                folders.append(str(folder))
    return runs, folders


def _host_of_guests(begun: Reopened, host: "Host | None") -> "Host | None":
    """The host, where guests may get an NCCL file of it."""
    if not any(len(tuned.plan.vm.hostdevs) > 1 for tuned in begun.layouts.values()):
        return None
    return load_host(None) if host is None else host


def _seconds_of_boots(host: "Host", checked: Preflight) -> dict[str, float]:
    """By variant, as a suite is planned on a machine like the host; GPU tests are known in the
    guest."""
    measuring = checked.begun.measuring
    try:
        tests = suite_for(host, {PROBE}, measuring.suite).tests
    except UsageError:  # GPU tests alone: their time is known in the guest only
        tests = ()
    once = sum(test.seconds + _PER_TEST_S for test in tests)
    measure_s = once * measuring.repeats
    layouts = dict.fromkeys(checked.head.layouts, _BOOT_S + measure_s)
    return {**layouts, BARE: measure_s}  # the host itself is not booted


def _show(checked: Preflight, seconds: float | None) -> None:
    """Print the schedule. Exits where a layout does not fit, or something stands against it."""
    steps = steps_of(checked.head)
    console().print(schedule_text(checked.head, checked.fitted, steps, seconds or 0.0))
    for gap in checked.unchecked:
        note(f"not checked: {gap}")
    for one in checked.fitted:
        for line in () if one.tuning is None else one.tuning.notes:
            note(f"{one.layout}: {line}")
    for line in checked.obstacles:
        note(f"in the way: {line}")
    if checked.obstacles:
        raise SystemExit(UsageError.exit_code)
    short = [one for one in checked.fitted if one.against]
    for one in short:
        note(f"{one.layout} does not fit: {'; '.join(one.against)}")
    if short:
        note("nothing was booted; leave these layouts out, or free what they need")
        raise SystemExit(UNPLANNABLE)
    within_s = checked.head.within_s
    if within_s is not None and seconds is not None and 2 * seconds > within_s:
        raise UsageError(
            f"--within {within_s:g}s: expected time for two rounds or more, and one round takes "
            f"about {seconds:.0f} s",
            hint="give more time or fewer --layouts; --quick and --repeat 1 measure less",
        )


def _say_step(progress: Progress) -> None:
    if sys.stderr.isatty():
        note(f"  {progress_line(progress, 'steps')}")


class _Waiting:
    """Says that a guest boots: on a terminal a line that counts, else one every half a minute."""

    _EVERY_S = 30.0

    def __init__(self) -> None:
        self._said_s = 0.0

    def __call__(self, waited_s: float, timeout_s: float) -> None:
        line = f"  waiting for the guest to answer: {waited_s:.0f} of {timeout_s:.0f} s"
        if sys.stderr.isatty():
            update(line)
            return
        if waited_s < self._said_s:
            self._said_s = 0.0
        if waited_s - self._said_s >= self._EVERY_S:
            self._said_s = waited_s
            note(line)
