"""The page supported-versions.md: a row for each program and version that was asked."""

import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from tests.conformance.judge import Answer, Judge

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "supported-versions.md"
NOT_RUN = "–"
_MOST = 200

_HEAD = """\
# Supported versions

homenode's files are tested with the programs that read them: a new plan for each of many random
VMs on random hosts, or a VM's file with the plan in it. A case counts if the program read every
fact of the plan as planned. `make nightly` runs each program that the machine has, with a
fresh seed, and writes this page; rows of other programs and versions stay unchanged.
`tests/lab/debian-13 DIR` runs the programs of Debian 13 on any machine.

`python -m tests.conformance --judge NAME` runs one program. homenode's own requirements:
[requirements](requirements.md).

"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the page."""

    name: str
    program: str
    version: str
    asked_on: str  # the distribution
    what_it_read: str
    cases: str
    differences: str  # how many cases, with the first of them, or why there are none
    date: str
    how_to_run_it: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.name, self.version, self.asked_on


COLUMNS = tuple(field.name.replace("_", " ") for field in fields(Row))


def read_rows(text: str) -> list[Row]:
    """The rows of a page. Raises ValueError for a line that is none."""
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    names = [field.name for field in fields(Row)]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [Row(**dict(zip(names, line, strict=True))) for line in cells]


def row_of(judge: Judge, version: str, cases: int, different: Sequence[Answer], date: str) -> Row:
    first = "".join(f": {one.case}, {one.about}: {one.difference()}" for one in different[:1])
    system = platform.freedesktop_os_release()
    words = " ".join(first.replace("|", "/").split())
    return Row(
        name=judge.name,
        program=judge.program,
        version=version,
        asked_on=f"{system['ID'].capitalize()} {system.get('VERSION_ID', '')}".strip(),
        what_it_read=judge.reads,
        cases=str(cases),
        differences=f"{len(different)}{words if len(words) <= _MOST else f'{words[:_MOST]}…'}",
        date=date,
        how_to_run_it=judge.setup,
    )


def not_run(judge: Judge, reason: str = "no run asked it") -> Row:
    return Row(
        name=judge.name,
        program=judge.program,
        version=NOT_RUN,
        asked_on=NOT_RUN,
        what_it_read=judge.reads,
        cases="0",
        differences=f"not run, because {' '.join(reason.replace('|', '/').split())}"[:_MOST],
        date=NOT_RUN,
        how_to_run_it=judge.setup,
    )


def merged(before: Sequence[Row], found: Iterable[Row], judges: Sequence[Judge]) -> list[Row]:
    """Rows in the order of the table of judges: the new ones in place of those of their version,
    the others as they were. A program that answered in no run has one that says why."""
    rows = {row.key: row for row in (*before, *found)}
    result: list[Row] = []
    for judge in judges:
        own = [row for row in rows.values() if row.name == judge.name]
        answered = sorted((r for r in own if r.version != NOT_RUN), key=_number)
        result += answered or own or [not_run(judge)]
    return result


def _number(row: Row) -> tuple[list[int], str]:
    return [int(part) for part in re.findall(r"\d+", row.version)], row.asked_on


def page_of(rows: Iterable[Row]) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| {' | '.join(astuple(row))} |" for row in rows]
    return _HEAD + "\n".join(lines) + "\n"
