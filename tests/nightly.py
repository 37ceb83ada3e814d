"""make nightly: what takes too long for every change, with one seed that repeats all of it. [I/O]

make nightly                        all parts, a fresh seed
make nightly SEED=7 PART=kills      one part again, as a failure prints it
"""

import argparse
import os
import random
import shlex
import subprocess
import sys
import time
from pathlib import Path

_PYTEST = "python -m pytest --hypothesis-seed={seed}"
PARTS = {
    "frozen": ("python -m tests.frozen.compare",),
    "fuzz": (
        "HOMENODE_FUZZ=10000 HOMENODE_FUZZ_MUTATIONS=10000 "
        f"{_PYTEST} --hypothesis-profile=thorough -k 'damaged or fuzz' tests",
        f"HOMENODE_FUZZ=1 {_PYTEST} tests/plan tests/analyse tests/doctor",
        f"HOMENODE_FUZZ_SECONDS=200 {_PYTEST} -s tests/verify/test_fuzz_whole_way.py",
    ),
    "kills": (
        f"HOMENODE_KILLS=500 {_PYTEST} -s -n0 -m 'libvirt or not lab' tests/change/test_killed.py",
        f"HOMENODE_KILLS=200 {_PYTEST} -s -n0 -m libvirt tests/apply/test_killed.py",
        f"HOMENODE_KILLS=100 {_PYTEST} -s -n0 -m libvirt tests/change/test_real_daemon.py",
    ),
    "conformance": ("python -m tests.conformance --seed {seed}",),
    "without-cluster": ("python -m tests.without_cluster",),
    "lab": (f"{_PYTEST} -m lab",),
}
"""The commands of each part; words with = before the program are its environment."""


def run(command: str, seed: int) -> int:
    """The exit code of a command, whose output is shown."""
    words = shlex.split(command.format(seed=seed))
    start = next(number for number, word in enumerate(words) if "=" not in word)
    environment = dict(word.split("=", 1) for word in words[:start])
    program = [sys.executable, *words[start + 1 :]]
    print(f"$ {command.format(seed=seed)}", flush=True)
    done = subprocess.run(
        program,
        env={**os.environ, **environment, "HOMENODE_SEED": str(seed)},
        cwd=Path(__file__).parents[1],
        check=False,
    )
    return done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(prog="make nightly")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--part", action="append", choices=PARTS)
    asked = parser.parse_args()
    print(f"seed {asked.seed}", flush=True)
    failed = []
    for part in asked.part or PARTS:
        before = time.monotonic()
        codes = [run(command, asked.seed) for command in PARTS[part]]
        if any(codes):
            failed.append(part)
        print(f"{part}: {(time.monotonic() - before) / 60:.0f} minutes", flush=True)
    for part in failed:
        print(f"{part} failed; again: make nightly SEED={asked.seed} PART={part}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
