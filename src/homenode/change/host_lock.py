"""HostLock: one homenode at a time reads a host's free cores and changes the host. [I/O]

Two plans of the same state take the same cores, so a command that changes a host holds the lock
from reading its state to the end of the change; commands that only print do not.

There are two locks: a file next to the records, which names the holder, and on this machine
libvirt's own directory, which root and the users of the group libvirt can all lock.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from homenode.change.journal import state_hint
from homenode.errors import HostError, of_os
from homenode.safe.durable import open_to_lock
from homenode.safe.input_files import read_kernel_file
from homenode.safe.record_directory import BusyError, RecordDirectory, take_lock
from homenode.vm.hypervisor.connection import machine_of

WAIT_S = 300.0
"""A start that takes huge pages for a terabyte holds it for minutes."""

SHARED = Path("/run/libvirt")
"""libvirtd and virtqemud make it at every start; all users may read it, and so lock it."""

_LOCKS = "/proc/locks"
_SOMEBODY = "another homenode"

_descriptors_of: dict[tuple[int, str], tuple[int, ...]] = {}
"""By process and name: who holds it need not be given it again."""


@contextmanager
def host_locked(
    root: Path,
    connect: str,
    command: str,
    on_wait: Callable[[str], None] = lambda holder: None,
    *,
    wait_s: float | None = None,
) -> Iterator[tuple[int, ...]]:
    """Lock a connection's host. Yields descriptors with which a virsh keeps the lock to its end.

    Nested calls in one process share it. root: of the records. command: shown to those that wait.
    on_wait: called once, with the holder. wait_s: None = WAIT_S. Raises HostError on time-out.
    """
    machine = machine_of(connect)
    key = os.getpid(), _name(machine)
    if key in _descriptors_of:
        yield _descriptors_of[key]
        return
    longest_s = WAIT_S if wait_s is None else wait_s
    with ExitStack() as stack:
        descriptors = [
            stack.enter_context(_locked_record(root, key[1], command, on_wait, longest_s))
        ]
        if lock_of_one_user(connect) is None:
            descriptors.append(stack.enter_context(_locked_directory(on_wait, longest_s)))
        _descriptors_of[key] = tuple(descriptors)
        stack.callback(_descriptors_of.pop, key)
        yield _descriptors_of[key]


def lock_of_one_user(connect: str) -> str | None:
    """Return why other users' commands do not wait for this one; None if they do."""
    machine = machine_of(connect)
    if machine:
        return f"the lock of {machine} keeps apart only this user's homenodes on this machine"
    if not os.access(SHARED, os.R_OK | os.X_OK):
        return f"{SHARED} is not there or cannot be read: only this user's homenodes wait"
    return None


@contextmanager
def _locked_record(
    root: Path, name: str, command: str, on_wait: Callable[[str], None], longest_s: float
) -> Iterator[int]:
    files = RecordDirectory(root / "domains", hint=state_hint)

    def holder() -> str:
        return (files.read(name) or _SOMEBODY.encode()).decode("utf-8", "replace")[:400]

    with ExitStack() as stack:
        try:
            descriptor = stack.enter_context(
                files.hold_lock(
                    "in use by another homenode",
                    lock=name,
                    wait_s=longest_s,
                    on_wait=lambda: on_wait(holder()),
                    holder=f"process {os.getpid()} ({command})",
                )
            )
        except BusyError:
            raise _busy_error(root, holder(), longest_s) from None
        yield descriptor


@contextmanager
def _locked_directory(on_wait: Callable[[str], None], longest_s: float) -> Iterator[int]:
    try:
        descriptor = open_to_lock(SHARED)
    except OSError as error:
        raise of_os(error, str(SHARED), "the directory") from None
    try:
        if not take_lock(descriptor, longest_s, lambda: on_wait(_holder())):
            raise _busy_error(SHARED, _holder(), longest_s)
        yield descriptor
    finally:
        os.close(descriptor)


def _holder() -> str:
    """Return the process that has locked the shared directory, and its user."""
    inode = str(SHARED.stat().st_ino)
    for line in (read_kernel_file(_LOCKS) or b"").decode().splitlines():
        fields = line.split()  # 1: FLOCK ADVISORY WRITE PID MAJOR:MINOR:INODE START END
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == inode:
            with suppress(OSError):  # it has ended, or another namespace has its number
                return f"process {fields[4]} of user {Path('/proc', fields[4]).stat().st_uid}"
    return _SOMEBODY


def _busy_error(path: Path, holder: str, longest_s: float) -> HostError:
    return HostError(
        f"{path}: this host is being changed by {holder} or its virsh, for {longest_s:g} s",
        hint="wait for it to end, or answer what it asks; then run this again",
    )


def _name(machine: str) -> str:
    if not machine:
        return ".host.lock"
    return f".host-{hashlib.sha256(machine.encode()).hexdigest()[:8]}.lock"
