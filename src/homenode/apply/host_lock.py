"""HostLock: one homenode at a time reads a host's free cores and changes its VMs. [I/O]

A plan takes cores that are free. Two that were made of one and the same state take the same ones,
though each is right by itself: whoever defines or starts a VM holds this lock from the look at the
host to the end of the change. What is only shown needs none.

The lock lies where the records lie: it keeps the homenodes of one user on one machine apart. All
daemons of this machine have one, a daemon on another machine has its own.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from homenode.apply.store import state_hint
from homenode.errors import HostError
from homenode.hypervisor.connection import machine_of
from homenode.record_folder import BusyError, RecordFolder

WAIT_S = 300.0
"""A start that takes huge pages for a terabyte holds it for minutes."""


@contextmanager
def host_locked(
    root: Path,
    connect: str,
    command: str,
    on_wait: Callable[[str], None] = lambda holder: None,
    *,
    wait_s: float | None = None,
) -> Iterator[int]:
    """Hold the lock of a connection's host: a descriptor for a virsh that must keep it to its end.

    root: of the records. command: what homenode does, for those that wait. on_wait: called once,
    with who holds it. wait_s: None = WAIT_S. Raises HostError where another holds it for longer.
    """
    files = RecordFolder(root / "domains", hint=state_hint)
    name = _name(connect)
    longest_s = WAIT_S if wait_s is None else wait_s
    with ExitStack() as held:
        try:
            descriptor = held.enter_context(
                files.locked(
                    "no other homenode at work on this host",
                    lock=name,
                    wait_s=longest_s,
                    on_wait=lambda: on_wait(_holder(files, name)),
                    holder=f"process {os.getpid()} ({command})",
                )
            )
        except BusyError as error:
            raise HostError(
                f"{error.message}, found {_holder(files, name)}, or a virsh that it started, still "
                f"there after {longest_s:g} s",
                hint="wait for it to end, or answer what it asks; then run this again",
            ) from None
        yield descriptor


def _holder(files: RecordFolder, name: str) -> str:
    content = files.read(name) or b"another homenode"
    return content.decode("utf-8", "replace")[:400]


def _name(connect: str) -> str:
    machine = machine_of(connect)
    if not machine:
        return ".host.lock"
    return f".host-{hashlib.sha256(machine.encode()).hexdigest()[:8]}.lock"
