"""The page of privileges: a row for each command, and what a call does beyond it is noticed."""

import subprocess
from pathlib import Path

import pytest

from tests.command_line import every_command, has_cluster
from tests.privileges import hold_to_its_row, read_rows


def test_every_command_has_a_row() -> None:
    commands = {" ".join(words[1:]) for words, command in every_command() if command.record}
    rooms = ("pool", "kubevirt", "slurm")
    rows = {name for name in read_rows() if has_cluster() or not name.startswith(rooms)}
    assert rows == commands


@pytest.mark.parametrize(
    ("line", "does"),
    [
        ("compare a b", lambda directory: subprocess.run(["true"], check=True)),
        ("compare a b", lambda directory: (directory / "file").write_text("text")),
        ("list hosts", lambda directory: (directory / "directory").mkdir()),
        ("slurm audit", lambda directory: subprocess.run(["sh", "-c", ":"], check=True)),
    ],
)
def test_what_the_row_of_a_command_does_not_allow_fails(
    line: str, does: object, tmp_path: Path
) -> None:
    assert callable(does)
    with pytest.raises(AssertionError, match=r"privileges\.md"), hold_to_its_row(line.split()):
        does(tmp_path)


def test_what_the_row_of_a_command_allows_passes(tmp_path: Path) -> None:
    with hold_to_its_row(("plan", "vm.xml")):
        (tmp_path / "tuned.xml").write_text("text")
