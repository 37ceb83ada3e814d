"""The house without its removable room: python -m tests.without_cluster [WORDS OF PYTEST...]

Copies what git has, without src/homenode/cluster, and runs the tests there, which leave out those
of the room (tests/conftest.py): all but those of a daemon, a VM, a browser or many seconds, where
no words say which.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.processes import run_text

ROOT = Path(__file__).parents[1]
ROOM = "src/homenode/cluster/"
QUICK = (
    "not (slow or lab or nightly or root or libvirt or qemu or slurm or browser or pdf or ansible)"
)


def main() -> int:
    names = run_text(["git", "ls-files", "-z"], cwd=ROOT, check=True).stdout.split("\0")
    with tempfile.TemporaryDirectory() as directory:
        for name in filter(None, names):
            if not name.startswith(ROOM) and (ROOT / name).exists():
                copy = Path(directory) / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, copy)
        words = sys.argv[1:] or ["-m", QUICK, "-n", "auto"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *words],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": f"{directory}/src"},
            check=False,
        )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
