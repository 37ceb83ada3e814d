"""The Containerfile, as far as it can be checked where no container engine runs."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KNOWN = {"ARG", "FROM", "RUN", "COPY", "WORKDIR", "VOLUME", "CMD"}


def instructions() -> list[tuple[str, str]]:
    """Each with its text, continued lines joined."""
    text = (ROOT / "containers" / "Containerfile").read_text()
    kept = "\n".join(line for line in text.split("\n") if not line.startswith("#"))
    joined = re.sub(r"\\\n", "", kept)
    pairs = (line.partition(" ") for line in joined.split("\n") if line.strip())
    return [(word, rest) for word, _, rest in pairs]


def test_every_line_is_an_instruction_and_every_base_is_named() -> None:
    found = instructions()
    assert {word for word, _ in found} == KNOWN
    bases = [rest.split()[0] for word, rest in found if word == "FROM"]
    assert bases == ["${BASE}", "${BASE}"]
    default = next(rest for word, rest in found if word == "ARG")
    assert re.fullmatch(r"BASE=\S+:\S+", default)
    assert not default.endswith(":latest")


@pytest.mark.parametrize("number", range(4))
def test_every_command_is_one_that_a_shell_reads(number: int) -> None:
    commands = [rest for word, rest in instructions() if word == "RUN"]
    assert len(commands) == 4
    checked = subprocess.run(["sh", "-n", "-c", commands[number]], capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_what_is_copied_is_there_and_not_ignored() -> None:
    ignored = (ROOT / ".containerignore").read_text().split()
    for word, rest in instructions():
        if word != "COPY" or rest.startswith("--from"):
            continue
        *sources, _ = rest.split()
        for source in sources:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in ignored


def test_the_lock_becomes_constraints() -> None:
    pattern = re.compile(r"^([A-Za-z0-9._-]*==[^ ;\\]*).*", re.M)
    constraints = pattern.findall((ROOT / "requirements.lock").read_text())
    names = {line.partition("==")[0] for line in constraints}
    assert {"lxml", "msgspec", "rich", "typer"} <= names
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in constraints)
