"""The oracle built and asked. `python -m tests.kubelet.oracle` writes answers.jsonl again."""

import json
import shutil
import subprocess
from pathlib import Path
from random import Random

import pytest

from tests.kubelet.cases import Case, oracle_answers, random_case

FOLDER = Path(__file__).parent
RECORDED = FOLDER / "answers.jsonl"
SEED, COUNT = 20261122, 150
"""Of the recorded answers."""


def random_cases(seed: int, count: int) -> list[Case]:
    random = Random(seed)
    return [random_case(random) for _ in range(count)]


def build(folder: Path, package: str = ".") -> Path:
    """The package as a program. Minutes where Go has none of its packages yet."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("no go here: the kubelet's managers cannot be built")
    program = folder / "oracle"
    built = subprocess.run(
        # As tests/scheduler/programs/build does: what both are made of is compiled once.
        [go, "build", "-trimpath", "-o", str(program), package],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        check=False,
        timeout=1500,
    )
    if built.returncode and "proxy" in built.stderr:
        pytest.skip(f"the module k8s.io/kubernetes cannot be had: {built.stderr[-300:]}")
    assert built.returncode == 0, built.stderr
    return program


def ask(program: Path, cases: list[Case]) -> list[list[list[object]]]:
    done = subprocess.run(
        [program],
        input="\n".join(map(json.dumps, cases)),
        capture_output=True,
        text=True,
        check=True,
        timeout=1200,
    )
    return [oracle_answers(line) for line in done.stdout.splitlines()]


if __name__ == "__main__":
    answers = ask(build(Path("/tmp")), random_cases(SEED, COUNT))
    lines = (json.dumps(one, separators=(",", ":")) for one in answers)
    RECORDED.write_text("\n".join(lines) + "\n")
