"""Programs of C that judges need, built once in a process."""

import atexit
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"


@cache
def directory() -> Path:
    """A directory for what one run makes; it is gone after it."""
    made = Path(tempfile.mkdtemp(prefix="homenode-conformance-"))
    atexit.register(shutil.rmtree, made, True)
    return made


@cache
def library(name: str) -> Path:
    """programs/NAME.c as a library to load before others."""
    made = directory() / f"{name}.so"
    argv = ["cc", "-shared", "-fPIC", "-O1", "-o", str(made), str(PROGRAMS / f"{name}.c")]
    subprocess.run(argv, check=True, capture_output=True)
    return made


def absent(*programs: str) -> str | None:
    """Which programs are not there, in words; None where all are."""
    lacking = [name for name in programs if shutil.which(name) is None]
    return f"not installed: {', '.join(lacking)}" if lacking else None


def first_line(*argv: str | Path) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    return (done.stdout or done.stderr).strip().partition("\n")[0]
