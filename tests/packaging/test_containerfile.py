"""The Containerfile, as far as it can be checked where no container engine runs.

tests/packaging/test_container_live.py builds and runs it.
"""

import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.packaging.wheels import copied, instructions

ROOT = Path(__file__).parents[2]
KNOWN = {"ARG", "FROM", "RUN", "COPY", "WORKDIR", "VOLUME", "USER", "CMD"}


def test_every_line_is_an_instruction_and_every_base_is_named() -> None:
    found = instructions()
    assert {word for word, _ in found} == KNOWN
    bases = [rest.split()[0] for word, rest in found if word == "FROM"]
    assert bases == ["${BASE}", "${BASE}"]
    default = next(rest for word, rest in found if word == "ARG")
    assert re.fullmatch(r"BASE=[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", default)


def test_it_runs_as_a_user_whose_number_is_not_roots_and_who_may_write_results() -> None:
    found = instructions()
    assert [rest for word, rest in found if word == "USER"] == ["1001"]
    assert found.index(("USER", "1001")) > max(
        i for i, (word, _) in enumerate(found) if word == "RUN"
    )
    (made,) = (rest for word, rest in found if word == "RUN" and "useradd --uid 1001 " in rest)
    assert "install -d -o homenode -g homenode /results" in made


@pytest.mark.parametrize("number", range(4))
def test_every_command_is_one_that_a_shell_reads(number: int) -> None:
    commands = [rest for word, rest in instructions() if word == "RUN"]
    assert len(commands) == 4
    checked = subprocess.run(["sh", "-n", "-c", commands[number]], capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_what_is_copied_is_there_and_all_else_is_ignored() -> None:
    ignored = (ROOT / ".containerignore").read_text().split()
    assert all((ROOT / source).exists() for source in copied())
    assert {line[1:] for line in ignored if line.startswith("!")} == set(copied())
    assert ignored[0] == "*"


def test_what_is_copied_is_enough_for_the_package(wheel: Path) -> None:
    assert "homenode/cli/main.py" in zipfile.ZipFile(wheel).namelist()


def test_what_is_copied_is_enough_for_the_probe(context: Path, tmp_path: Path) -> None:
    argv = ["make", "-n", "-C", str(context / "native"), f"OUT={tmp_path}", "all", "static"]
    planned = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert planned.returncode == 0, planned.stderr
    assert f"-static -s {tmp_path}/" in planned.stdout


def test_what_the_image_links_is_what_the_package_installs() -> None:
    (linked,) = (rest for word, rest in instructions() if word == "RUN" and "ln -s" in rest)
    assert "/opt/homenode/bin/homenode*" in linked
    for program in ("homenode", "homenode-probe", "homenode-probe-static"):
        assert f"{program} --version" in linked


def test_an_image_installs_what_the_locks_have_by_hash_and_nothing_else() -> None:
    (command,) = (rest for word, rest in instructions() if word == "RUN" and "pip" in rest)
    for one in command.split("&&"):
        if "pip" not in one or "-m venv" in one:
            continue
        is_locked = "--require-hashes -r" in one
        assert is_locked or "--no-deps" in one, one
        assert is_locked or "--no-index" in one or "--no-build-isolation" in one, one
