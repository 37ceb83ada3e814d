"""The native probe, built with the compiler at hand (again only where it changed), and run."""

import fcntl
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.processes import run_text

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "probe"
"""Where `make probe` builds it: what is there is not compiled again."""

COMPILER = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
MAKE = shutil.which("make")
FEW_BYTES = ("--array-bytes", "4M", "--seconds", "0.05")


@dataclass(frozen=True, slots=True)
class Answer:
    """What one run of the probe left behind."""

    code: int
    text: str
    errors: str

    @property
    def document(self) -> dict[str, Any]:
        assert self.code == 0, self.errors
        value = json.loads(self.text)
        assert isinstance(value, dict)
        return value


def make(target: str, *variables: str) -> Path:
    """Builds one file of native/Makefile, warnings as errors; skips where nothing can build it.

    One at a time: the processes that run tests side by side would write the same objects, and run
    a program that another one is just linking.
    """
    if MAKE is None or COMPILER is None:
        pytest.skip("needs make and a C++ compiler")
    command = [MAKE, "-C", str(ROOT / "native"), f"-j{os.cpu_count() or 1}", f"OUT={OUT}"]
    command += ["WERROR=1", f"CXX={COMPILER}", *variables, str(OUT / target)]
    OUT.mkdir(parents=True, exist_ok=True)
    with (OUT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = run_text(command, timeout=600)
    assert done.returncode == 0, done.stderr
    return OUT / target


@cache
def probe_file() -> Path:
    return make("homenode-probe")


def probe(*arguments: str, timeout_s: float = 300) -> Answer:
    """One run of the probe with these arguments."""
    return run(probe_file(), *arguments, timeout_s=timeout_s)


def run(program: Path, *arguments: str, timeout_s: float = 300) -> Answer:
    done = run_text([str(program), *arguments], timeout=timeout_s, stdin=subprocess.DEVNULL)
    return Answer(done.returncode, done.stdout, done.stderr)


def allowed_pus() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def two_pus() -> str:
    """The first two CPUs that this process may use, as an argument; skips where there is one."""
    if len(allowed_pus()) < 2:
        pytest.skip("needs two CPUs")
    return ",".join(str(pu) for pu in allowed_pus()[:2])


def one_pu() -> str:
    return str(allowed_pus()[0])
