"""Live pins: move the threads of a running domain to the CPUs of a tuned document. [I/O]

Memory and the definition do not change.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from homenode.change.journal import PIN, TO_UNDO, ChangeEntry, ChangeState, DomainStore, lock_host
from homenode.cpuset import CpuSet
from homenode.errors import HomenodeError, InputError, UsageError
from homenode.process import find_arguments
from homenode.safe.input_files import read_kernel_file
from homenode.text import command_line, plural
from homenode.vm.domain.read import build_vm, open_domain
from homenode.vm.hypervisor.connection import (
    DomainState,
    LivePin,
    format_pins,
    is_local,
    parse_pin_lines,
)
from homenode.vm.hypervisor.virsh import RejectedError, Virsh
from homenode.vm.model import Vm


class RepinnedThreads(Struct, frozen=True):
    """Threads that were or would be moved: their pins before and after, in the same order."""

    state: DomainState
    before: tuple[LivePin, ...]
    after: tuple[LivePin, ...]
    strangers: CpuSet  # nodes that the running domain's memory may use and the definition's may not


def preview_live_pins(virsh: Virsh, name: str, tuned_xml: bytes) -> RepinnedThreads:
    """Return what apply_live_pins would do, and change nothing. Raises UsageError if the domain
    does not run, or runs with other vCPUs or IOThreads than the document has."""
    state = virsh.find_domain(name)
    if not state.is_active:
        raise UsageError(
            f"{state.name} is {state.state}: --live-pins moves the threads of a running VM",
            hint="omit --live-pins to change the definition",
        )
    facts = build_vm(open_domain(tuned_xml, "the tuned definition"))
    running = build_vm(open_domain(virsh.live_definition(state.uuid), state.name))
    planned_pins = _list_pins(facts)
    current = {(pin.kind, pin.number): pin for pin in virsh.live_pins(state.uuid)}
    if running.vcpus != facts.vcpus:
        raise UsageError(
            f"{state.name}: expected {plural(facts.vcpus, 'vCPU')} as planned, "
            f"found {running.vcpus} running",
            hint="--keep-vcpus, or shut it down and apply",
        )
    missing = [pin for pin in planned_pins if (pin.kind, pin.number) not in current]
    missing = [pin for pin in missing if pin.kind != "vcpu"]  # offline vCPUs have no thread
    if missing:
        raise UsageError(
            f"{state.name}: {missing[0].kind} {missing[0].number} is not running",
            hint="shut it down and apply the definition",
        )
    moves = [
        (current[pin.kind, pin.number], pin)
        for pin in planned_pins
        if (pin.kind, pin.number) in current and current[pin.kind, pin.number] != pin
    ]
    return RepinnedThreads(
        state,
        tuple(before for before, _ in moves),
        tuple(after for _, after in moves),
        running.memory_nodes - facts.memory_nodes if facts.memory_nodes else CpuSet(),
    )


def apply_live_pins(virsh: Virsh, name: str, tuned_xml: bytes, root: Path) -> RepinnedThreads:
    """Move the threads of a running domain; their pins are saved first. Raises like the preview. If
    a thread cannot be moved, the threads before it are restored."""
    state = virsh.find_domain(name)
    store = DomainStore(root, virsh.connect, state.uuid)
    words = command_line("homenode", "apply", state.argument, "--live-pins")
    with lock_host(root, virsh.connect, words):
        threads = preview_live_pins(virsh, state.uuid, tuned_xml)
        assert threads.state.run_id is not None, "it runs, or the preview had raised"
        before, after = threads.before, threads.after
        mark = _run_mark(virsh, state.uuid)
        moved_pins = find_moved_pins(store, threads.state.run_id, mark)
        if moved_pins is None and not after:
            return threads
        if moved_pins is not None:
            # The first pins are restored, also for threads that move again.
            first = {(pin.kind, pin.number): pin for pin in (*before, *moved_pins[0])}
            last = {(pin.kind, pin.number): pin for pin in (*moved_pins[1], *after)}
            before, after = tuple(first.values()), tuple(last[key] for key in first)
        facts = {"name": state.name, "run_id": str(threads.state.run_id), "run_mark": mark}
        entry = ChangeEntry(
            what=ChangeState.BEGIN,
            kind=PIN,
            subject=state.uuid,
            before=format_pins(before),
            after=format_pins(after),
            facts={key: value for key, value in facts.items() if value is not None},
            by_hand="; ".join(_format_commands(virsh, state.uuid, before)),
        )
        store.journal.write(entry)
        _move(virsh, state.uuid, threads)
        store.journal.write(entry.with_state(ChangeState.DONE))
    return threads


def find_moved_pins(
    store: DomainStore, run_id: int | None, mark: str | None
) -> tuple[tuple[LivePin, ...], tuple[LivePin, ...]] | None:
    """Return the pins of the threads that were moved in this run, before and after; None if none
    were moved. mark: see run_mark."""
    entry = store.pins()
    if entry is None or entry.what not in TO_UNDO or run_id is None:
        return None
    recorded_mark = entry.facts.get("run_mark")
    if entry.facts.get("run_id") != str(run_id) or (
        None not in (recorded_mark, mark) and recorded_mark != mark
    ):
        return None
    return parse_pin_lines(entry.before or ""), parse_pin_lines(entry.after or "")


def preview_restore_live_pins(virsh: Virsh, name: str, root: Path) -> tuple[LivePin, ...]:
    """The pins that restore_live_pins would restore; nothing is changed. Raises the same errors."""
    state = virsh.find_domain(name)
    store = DomainStore(root, virsh.connect, state.uuid)
    mark = _run_mark(virsh, state.uuid) if store.pins() is not None else None
    pins = find_moved_pins(store, state.run_id, mark)
    if pins is None:
        return ()
    before, after = pins
    known_pins = {
        pin
        for entry in store.journal.read_entries()  # also of an apply that failed since the first
        if entry.kind == PIN and entry.facts.get("run_id") == str(state.run_id)
        for pin in parse_pin_lines(f"{entry.before}; {entry.after}")
    }
    thread_keys = {(pin.kind, pin.number) for pin in after}
    for pin in virsh.live_pins(state.uuid):
        if (pin.kind, pin.number) in thread_keys and pin not in known_pins:
            raise InputError(
                f"{state.name}: another program moved {pin.kind} {pin.number} to CPUs {pin.pus}",
                hint=f"virsh {pin.kind}pin moves it back manually",
            )
    return before


def restore_live_pins(virsh: Virsh, name: str, root: Path) -> tuple[LivePin, ...]:
    """Move the threads of a running domain back and return their pins; () if none were moved.
    Raises InputError if another program has moved them since."""
    state = virsh.find_domain(name)
    store = DomainStore(root, virsh.connect, state.uuid)
    entry = store.pins()
    if entry is None or entry.what not in TO_UNDO:
        return ()  # also if nothing can be written
    words = command_line("homenode", "restore", state.argument)
    with lock_host(root, virsh.connect, words):
        back = preview_restore_live_pins(virsh, state.uuid, root)
        store.journal.write(entry.with_state(ChangeState.UNDOING))
        _move_back(virsh, state.uuid, back)
        store.journal.write(entry.with_state(ChangeState.UNDONE))
    return back


def _format_commands(virsh: Virsh, uuid: str, pins: tuple[LivePin, ...]) -> Iterator[str]:
    """Yield the virsh commands that move the threads."""
    start = ("virsh", "-c", virsh.connect)
    for pin in pins:
        number = () if pin.kind == "emulator" else (str(pin.number),)
        yield command_line(*start, f"{pin.kind}pin", uuid, *number, str(pin.pus), "--live")


def _move(virsh: Virsh, uuid: str, threads: RepinnedThreads) -> None:
    for i, pin in enumerate(threads.after):
        try:
            virsh.pin_live(uuid, pin)
        except HomenodeError:
            with suppress(HomenodeError):  # the journal has the pins
                _move_back(virsh, uuid, threads.before[:i])
            raise


def _move_back(virsh: Virsh, uuid: str, pins: tuple[LivePin, ...]) -> None:
    """Move each thread that libvirt lets move. Raises the first rejection."""
    errors = []
    for pin in pins:
        try:
            virsh.pin_live(uuid, pin)
        except RejectedError as rejected:
            errors.append(rejected)
    for error in errors[:1]:
        raise error


def _run_mark(virsh: Virsh, uuid: str) -> str | None:
    return run_mark(uuid) if is_local(virsh.connect) else None


def _list_pins(facts: Vm) -> tuple[LivePin, ...]:
    vcpus = [LivePin("vcpu", i, pus) for i, pus in enumerate(facts.vcpu_pins) if pus is not None]
    emulator = facts.emulator_pus
    return (
        *vcpus,
        *(() if emulator is None else (LivePin("emulator", 0, emulator),)),
        *(LivePin("iothread", number, pus) for number, pus in facts.iothread_pins),
    )


_START = 19
"""Index of a field behind the name in /proc/PID/stat: the start, in ticks. Source: proc(5)."""


def run_mark(uuid: str) -> str | None:
    """A word that identifies this run of the domain: boot id, start time and PID of its QEMU.

    libvirt's own number starts again after a boot or a restart of the daemon. Seen with 9.0.
    None if the process is not visible here.
    """
    proc = Path("/proc")
    boot = _read_text(proc / "sys/kernel/random/boot_id").strip()
    # A process can set any name; the first process with this name is QEMU.
    process = min(_find_processes(proc, uuid), default=None)
    return None if process is None or not boot else f"{boot}:{process[1]}:{process[0]}"


def _find_processes(proc: Path, uuid: str) -> Iterator[tuple[int, int]]:
    """(start in ticks, number) of each process with that UUID on its command line."""
    for directory in proc.iterdir() if proc.is_dir() else ():
        argv = _read_text(directory / "cmdline").split("\0") if directory.name.isdecimal() else []
        if uuid in find_arguments(argv, "-uuid"):
            fields = _read_text(directory / "stat").rpartition(")")[2].split()
            if len(fields) > _START and fields[_START].isdecimal():
                yield int(fields[_START]), int(directory.name)


def _read_text(path: Path) -> str:
    content = read_kernel_file(str(path))
    return (content or b"").decode("utf-8", "replace")  # ended, or not readable for this user
