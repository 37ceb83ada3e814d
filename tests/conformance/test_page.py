"""The page supported-versions.md has the form that `python -m tests.conformance` writes."""

import datetime
import re
import subprocess
from dataclasses import replace
from typing import Never

import pytest

from tests.command_line import NEEDS_CLUSTER
from tests.conformance.__main__ import row_and_differences
from tests.conformance.judge import Answer
from tests.conformance.page import NOT_RUN, PAGE, merged, not_run, page_of, read_rows, row_of
from tests.conformance.table import JUDGES

FIRST = JUDGES[0]


@NEEDS_CLUSTER
def test_the_page_is_what_the_run_writes_of_its_rows() -> None:
    text = PAGE.read_text()
    rows = read_rows(text)
    assert text == page_of(merged(rows, [], JUDGES)), "written by python -m tests.conformance alone"
    assert [judge.name for judge in JUDGES] == list(dict.fromkeys(row.name for row in rows))
    for row in rows:
        assert row.cases.isdigit() and all((row.program, row.what_it_read, row.how_to_run_it))
        if row.version == NOT_RUN:
            assert (row.cases, row.date) == ("0", NOT_RUN)
            assert row.differences.startswith("not run, because ")
        else:
            assert (
                re.match(r"\d", row.version)
                and int(row.differences.partition(":")[0]) <= int(row.cases) > 0
            )
            datetime.date.fromisoformat(row.date)


def test_a_run_replaces_rows_of_its_versions_and_keeps_the_others() -> None:
    wrong = Answer(case="1-2", about="a|b", planned={"vCPUs": 4}, read={"vCPUs": 5})
    old = row_of(FIRST, "7.2", 30, [wrong], "2026-01-02")
    other = row_of(FIRST, "10.1", 30, [], "2026-01-02")
    assert (old.differences, other.differences) == ("1: 1-2, a/b: vCPUs: planned 4, read 5", "0")
    new = replace(old, cases="60", differences="0", date="2026-02-03")
    rows = merged([old, other], [new], JUDGES[:2])
    assert rows[:2] == [new, other]
    assert [row.version for row in rows[2:]] == [NOT_RUN]
    assert read_rows(page_of(rows)) == rows
    assert merged([old], [not_run(FIRST, "no cc")], JUDGES[:1]) == [old]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (subprocess.TimeoutExpired(["/usr/bin/go", "build"], 1500), "go build did not end in 1500"),
        (AssertionError("x.go:1: undefined: y"), "undefined: y"),
        (FileNotFoundError(2, "no such file", "cc"), "no such file"),
    ],
)
def test_a_judge_that_cannot_be_built_or_asked_is_a_row_and_ends_no_run(
    error: Exception, words: str
) -> None:
    def fails(*_: object) -> Never:
        raise error

    for judge in (replace(FIRST, missing=fails), replace(FIRST, missing=lambda: None, ask=fails)):
        row, different, failed = row_and_differences(judge, 1, 1, "2026-01-02")
        assert (row.version, different, failed) == (NOT_RUN, [], True)
        assert words in row.differences
    lacking = replace(FIRST, missing=lambda: "not installed: cc")
    row, _, failed = row_and_differences(lacking, 1, 1, "2026-01-02")
    assert not failed
    assert "not installed: cc" in row.differences
