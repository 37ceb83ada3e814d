"""Kills: a command in a process of its own, ended by SIGKILL at one of its calls to the system."""

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from homenode import process
from homenode.errors import HomenodeError

CALLS = (
    *((os, name) for name in ("mkdir", "open", "fchmod", "fsync", "link", "replace", "unlink")),
    *((os, name) for name in ("rmdir", "write", "ftruncate")),
    (process, "_start"),
)
"""What changes a file system or starts a program."""

FAILED = 70
_TOLD_BYTES = 4096
_BETWEEN_LOOKS_S = 0.0002
"""Several looks between two calls, and the child has a core to itself."""

Target = tuple[object, str]


def in_child(
    work: Callable[[], object],
    at: int | None,
    *,
    after: bool = False,
    with_children: bool = False,
    more: Sequence[Target] = (),
    look: Callable[[], None] | None = None,
) -> int | None:
    """Does it in a process that is killed at its call of that number, before or after the call has
    happened; the number of its calls where it came to its end, else None.

    at: None = it is left alone. with_children: what it has started dies with it, else that goes on
    alone. more: further calls, as an object and the name of its method.
    look: called here all the while.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = FAILED
        try:
            counted = _dying(at, after=after, with_children=with_children, more=more)
            with contextlib.suppress(HomenodeError):  # refused: it has nothing to do, or must not
                work()
            said = f"{counted()}".encode()
            os.writev(writing, [said])  # which is not counted
            code = 0
        except BaseException:  # noqa: BLE001 - told to who started it
            os.writev(writing, [traceback.format_exc()[-_TOLD_BYTES:].encode()])
        finally:
            os._exit(code)
    os.close(writing)
    try:
        ended, how = os.waitpid(child, 0 if look is None else os.WNOHANG)
        while not ended:
            assert look is not None
            look()
            time.sleep(_BETWEEN_LOOKS_S)
            ended, how = os.waitpid(child, os.WNOHANG)
        said = os.read(reading, _TOLD_BYTES)
    finally:
        os.close(reading)
    assert os.WIFSIGNALED(how) or os.WEXITSTATUS(how) == 0, said.decode()
    return int(said) if os.WIFEXITED(how) else None


def _dying(
    at: int | None, *, after: bool, with_children: bool, more: Sequence[Target]
) -> Callable[[], int]:
    """Counts the calls of this process from now on, and kills it at one of them."""
    count = 0
    own = os.getpid()
    kill, read = os.kill, Path(f"/proc/{own}/task/{own}/children").read_text

    def die() -> None:
        for child in read().split() if with_children else ():
            with contextlib.suppress(ProcessLookupError):
                kill(int(child), signal.SIGKILL)
        kill(own, signal.SIGKILL)

    def dies(call: Callable[..., object]) -> Callable[..., object]:
        def instead(*words: Any, **options: Any) -> object:
            nonlocal count
            count += 0 if os.getpid() != own else 1  # a program that is being started is not ours
            if count == at and not after:
                die()
            here = count
            result = call(*words, **options)
            if here == at:
                die()
            return result

        return instead

    for owner, name in (*CALLS, *more):
        setattr(owner, name, dies(getattr(owner, name)))
    return lambda: count
