"""make nightly: what takes too long for every change, with one seed that repeats all of it. [I/O]

make nightly                        all parts, a fresh seed
make nightly SEED=7 PART=kills      one part again, as a failure prints it
python -m tests.nightly --minutes 20  as many parts as fit: first those of rooms that changed in the
                                    last day, another one first each day
"""

import argparse
import datetime
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

_PYTEST = "python -m pytest --hypothesis-seed={seed}"
_PARALLEL = f"{_PYTEST} -n 3 --dist loadgroup"
PARTS = {
    "frozen": ("python -m tests.frozen.compare",),
    "fuzz": (
        "HOMENODE_FUZZ=2000 HOMENODE_FUZZ_MUTATIONS=2000 "
        f"{_PYTEST} --hypothesis-profile=thorough -k 'damaged or fuzz' tests",
        f"HOMENODE_FUZZ=1 {_PARALLEL} -m 'not lab' tests/plan tests/analyse tests/doctor "
        "tests/snapshot tests/report tests/apply/test_apply.py "
        "tests/apply/test_edits_in_between.py "
        "tests/kubevirt/test_check.py tests/kubevirt/test_hook_script.py "
        "tests/kubevirt/test_lost_targets.py tests/slurm/test_hostile_live.py "
        "tests/verify/test_single_edits.py tests/measure/test_study_directories.py "
        "tests/cli tests/description tests/domain tests/targets tests/test_not_known.py",
        f"HOMENODE_FUZZ_SECONDS=200 {_PYTEST} -s tests/verify/test_fuzz_whole_way.py",
    ),
    "kills": (
        f"HOMENODE_KILLS=500 {_PYTEST} -s -n0 -m 'libvirt or not lab' tests/change/test_killed.py",
        f"HOMENODE_KILLS=200 {_PYTEST} -s -n0 -m libvirt tests/apply/test_killed.py",
        f"HOMENODE_KILLS=100 {_PYTEST} -s -n0 -m libvirt tests/change/test_real_daemon.py",
        f"HOMENODE_KILLS=20 {_PYTEST} -s -n0 tests/measure/test_trial_killed.py",
    ),
    "conformance": ("python -m tests.conformance --seed {seed}",),
    "more-cases": (f"{_PARALLEL} -m 'nightly and not lab'",),
    "without-cluster": ("python -m tests.without_cluster",),
    "lab": (f"{_PYTEST} -m lab",),
}
"""The commands of each part; words with = before the program are its environment."""

_END_S = 60
"""How long tests may take to end what they started."""

ROOMS = {
    "frozen": ("plan", "vm", "decide"),
    "fuzz": ("plan", "check", "decide", "machine"),
    "kills": ("change", "safe"),
    "conformance": ("vm", "cluster"),
    "more-cases": ("machine", "vm", "check", "change", "measure"),
    "without-cluster": ("cluster", "cli"),
    "lab": ("measure", "machine", "cluster", "change"),
}
"""The rooms of src/homenode that each part is about."""


def choose_parts(paths: Iterable[str], day: int) -> list[str]:
    """All parts in the order in which a slice runs them: those of the rooms of changed files, then
    the others, each from another one on each day."""
    rooms = {path.split("/")[2] for path in paths if path.startswith("src/homenode/")}
    shift = day % len(PARTS)
    turned = [*PARTS][shift:] + [*PARTS][:shift]
    return sorted(turned, key=lambda part: rooms.isdisjoint(ROOMS[part]))


def list_changed_files() -> list[str]:
    """Files of the last day's commits. Empty where git cannot tell."""
    argv = ["git", "log", "--since=1.day", "--name-only", "--format="]
    done = subprocess.run(argv, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    return done.stdout.split()


def run(command: str, seed: int, limit_s: float | None = None) -> int:
    """The exit code of a command, whose output is shown; 0 where its time ran out."""
    words = shlex.split(command.format(seed=seed))
    start = next(number for number, word in enumerate(words) if "=" not in word)
    environment = dict(word.split("=", 1) for word in words[:start])
    program = [sys.executable, *words[start + 1 :]]
    print(f"$ {command.format(seed=seed)}", flush=True)
    if limit_s is not None:  # a failure is not lost where the time runs out after it
        environment["PYTEST_ADDOPTS"] = f"{os.environ.get('PYTEST_ADDOPTS', '')} --exitfirst"
    started = subprocess.Popen(
        program,
        env={**os.environ, **environment, "HOMENODE_SEED": str(seed)},
        cwd=Path(__file__).parents[1],
        process_group=0,  # Ctrl-C of a terminal, or the end of its time, reaches all of it
    )
    try:
        return started.wait(limit_s)
    except subprocess.TimeoutExpired:
        print("its time ran out", flush=True)
        os.killpg(started.pid, signal.SIGINT)  # tests end what they started
    except KeyboardInterrupt:
        os.killpg(started.pid, signal.SIGINT)
        raise
    try:
        started.wait(_END_S)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="make nightly")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--minutes", type=float)
    asked = parser.parse_args()
    print(f"seed {asked.seed}", flush=True)
    parts = asked.part or [*PARTS]
    end: float | None = None
    if asked.minutes is not None:
        today = datetime.datetime.now(datetime.UTC).toordinal()
        order = choose_parts(list_changed_files(), today)
        parts = [part for part in order if part in parts]
        end = time.monotonic() + asked.minutes * 60
    failed = []
    for part in parts:
        before = time.monotonic()
        if end is not None and before >= end:
            print(f"{part}: not run, its time ran out")
            continue
        codes = []
        for command in PARTS[part]:
            limit_s = None if end is None else max(1, end - time.monotonic())
            codes.append(run(command, asked.seed, limit_s))
        if any(codes):
            failed.append(part)
        print(f"{part}: {(time.monotonic() - before) / 60:.0f} minutes", flush=True)
    for part in failed:
        print(f"{part} failed; again: make nightly SEED={asked.seed} PART={part}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
