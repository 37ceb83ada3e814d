"""What each call of a command starts and writes, by Python's audit events, and what its row of
docs/reference/privileges.md lets it start and write."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs/reference/privileges.md"
ANY_PROGRAM = {"bench", "bench setup", "doctor"}
"""Commands that start programs which the user or a list of tools names."""

OF_TESTS = {"sshd"}
"""What tests start beside a call, for it to reach."""

_CHANGES = {"os.rename", "os.link", "os.symlink", "os.mkdir", "os.remove", "os.rmdir"}
_CODE = re.compile(r"`([^`]+)`")


@dataclass
class Effects:
    """What one call did."""

    programs: set[str] = field(default_factory=set)
    paths: set[str] = field(default_factory=set)  # opened to be written, made, moved or removed


@dataclass(frozen=True)
class Row:
    """One row of the page."""

    programs: frozenset[str]
    writes: bool


_calls: list[Effects] = []
"""The call that runs now."""


def _record(event: str, arguments: tuple[Any, ...]) -> None:
    if not _calls:
        return
    if event == "subprocess.Popen":
        argv = [os.fsdecode(word) for word in arguments[1]]
        if Path(argv[0]).name == "setpriv" and "--pdeathsig" in argv:
            argv = argv[3:]
        _calls[-1].programs.add(Path(argv[0]).name)
    elif event == "open" and isinstance(arguments[0], str | bytes):
        if (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            _calls[-1].paths.add(os.fsdecode(arguments[0]))
    elif event in _CHANGES:
        _calls[-1].paths.add(str(arguments[0]))


sys.addaudithook(_record)


@cache
def read_rows() -> dict[str, Row]:
    """The page's table by command."""
    text = PAGE.read_text()
    of_hosts = frozenset(_CODE.findall(text.partition("describe a machine: ")[2].partition(".")[0]))
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 5 and cells[0].startswith("`"):
            programs = frozenset(_CODE.findall(cells[3]))
            if "this host" in cells[3]:
                programs |= of_hosts
            rows[cells[0].strip("`")] = Row(programs, cells[4] != "nothing")
    return rows


def find_row(words: Sequence[str]) -> str | None:
    """The command that these words call; None where they call none."""
    for count in (2, 1):
        name = " ".join(words[:count])
        if name in read_rows():
            return name
    return None


def list_excess(command: str, effects: Effects) -> list[str]:
    """What a call did that the row of its command does not allow, in words."""
    row = read_rows()[command]
    excess = []
    if command not in ANY_PROGRAM:
        excess = [
            f"{command} started {name}"
            for name in sorted(effects.programs - row.programs - OF_TESTS)
        ]
    paths = sorted(p for p in effects.paths if p != "/dev/null" and "__pycache__" not in p)
    if not row.writes:
        excess += [f"{command} wrote {path}" for path in paths]
    return excess


@contextmanager
def hold_to_its_row(words: Sequence[str]) -> Iterator[None]:
    """Fails where the call in the block does more than the page says."""
    command = find_row(words)
    effects = Effects()
    _calls.append(effects)
    try:
        yield
    finally:
        _calls.remove(effects)
        excess = [] if command is None else list_excess(command, effects)
        assert not excess, f"docs/reference/privileges.md: {', '.join(excess)}"
