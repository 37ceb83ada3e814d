"""Our PyTorch programs, run as the suite runs them, with a stand-in for PyTorch."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from homenode.measure.access.machine import LocalMachine
from homenode.measure.tool_setup import read_program
from homenode.process import ProgramResult

STAND_IN = Path(__file__).parent / "torch_stand_in"
GPUS = ("0000:19:00.0", "0000:9b:00.0")


def find_python(version: str) -> str:
    """A Python of that version, of this machine or of pyenv; skips the test where there is none."""
    name = f"python{version}"
    for path in (*map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/{name}")), name):
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            subprocess.run((path, "-V"), capture_output=True, check=True)
            return path
    pytest.skip(f"no Python {version}")


def run_program(
    name: str, *words: str, python: str = sys.executable, **settings: Any
) -> ProgramResult:
    """One program. settings: of the stand-in (tests/torch_stand_in/torch)."""
    environment = {"PYTHONPATH": str(STAND_IN), "STAND_IN": json.dumps(settings)}
    argv = (python, "-", *words)
    return LocalMachine().run(argv, 300.0, read_program(name), environment=environment)


def copies(command: str, **settings: Any) -> str:
    """Output of torch_copies, fast."""
    return run_program("torch_copies", command, "--seconds", "0.01", **settings).stdout_or_raise()


def all_reduce(*words: str, gpus: int = 2, **settings: Any) -> ProgramResult:
    """torch_collectives up to 64 KiB."""
    return run_program(
        "torch_collectives",
        "--gpus",
        str(gpus),
        "--largest",
        "65536",
        "--iterations",
        "20",
        "--warmups",
        "3",
        *words,
        **settings,
    )
