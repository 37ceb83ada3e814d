"""Processes that a test starts, and whether they have ended."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from homenode.errors import HomenodeError

FAILED = 70


def start_child(work: Callable[[], object]) -> int:
    """A process that does it; it exits with the contract's code."""
    child = os.fork()
    if child == 0:
        code = FAILED
        try:
            work()
            code = 0
        except HomenodeError as error:
            print(error, file=sys.stderr)
            code = error.exit_code
        finally:
            os._exit(code)
    return child


def run_text(argv: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    """A program, run to its end, and what it printed."""
    done: subprocess.CompletedProcess[str]
    done = subprocess.run(argv, capture_output=True, text=True, **options)
    return done


def code_of(child: int) -> int:
    """The exit code of a process that ends; of a killed one the signal, negative."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def write_program(path: Path, text: str) -> None:
    """An executable file, in a directory that is made where it is missing."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def wait_for_end(number: int) -> None:
    deadline = time.monotonic() + 60
    while is_running(number) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(number)


def is_running(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(what: Callable[[], bool]) -> None:
    for _ in range(6000):
        if what():
            return
        time.sleep(0.02)
    pytest.fail("it never happened")
