"""The figures of a report as CSV and JSON, and what a report of a thousand runs costs."""

import csv
import io
import json
import re
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.cli import terminal
from homenode.measure.results.model import Run
from homenode.process import run
from homenode.show.report.machine import COLUMNS, StoredRun, build_machines, format_csv, list_rows
from tests.report_runs import full_results, full_run, report


def test_csv_and_json_carry_the_same_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = full_results(tmp_path)
    terminal.make_console.cache_clear()
    assert report(results, "--csv") == 0
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert report(results, "--json") == 0
    stored = json.loads(capsys.readouterr().out)
    assert stored["format"] == "homenode.rows/1"
    assert len(table) == len(stored["rows"]) > 100
    for row, other in zip(table, stored["rows"], strict=True):
        assert tuple(other) == COLUMNS == tuple(row)
        for name, value in other.items():
            text = row[name]
            if value is None:
                assert text == ""
            elif isinstance(value, bool):
                assert text == str(value).lower()
            elif isinstance(value, float | int):
                assert float(text) == pytest.approx(value, rel=1e-10)
            else:
                assert text == value
    assert {row["outcome"] for row in stored["rows"]} >= {"better", None}


def test_a_cell_that_a_spreadsheet_would_run_is_quoted_off() -> None:
    for start in ("=1+1", "+1", "-1", "@SUM(A1)", "\t=1"):
        run = full_run("pin", 1)
        named = Run(replace(run.head, system=start), run.samples[:1])
        (one,) = build_machines([named], [StoredRun()], {})
        (row,) = list_rows(one)
        cells = next(csv.reader(io.StringIO(format_csv([row]).split("\r\n", 1)[1])))
        assert cells[COLUMNS.index("system")] == "'" + start.replace("\t", "?")


def test_a_cell_cannot_steer_the_terminal_it_is_printed_on() -> None:
    run = full_run("pin", 1)
    named = Run(replace(run.head, arrangement="\x1b]0;x\x07a\u202eb\n,c"), run.samples[:1])
    (one,) = build_machines([named], [StoredRun()], {})
    text = format_csv(list_rows(one))
    assert text.replace("\r\n", "").isprintable()
    assert '"?]0;x?a?b?,c"' in text


def test_rows_are_documented_field_by_field() -> None:
    from tests.doc_pages import first_column, read_page

    section = read_page("docs/reference/formats/rows.md").sections()["Fields"]
    assert first_column(section) == COLUMNS


PROGRAM = Path(__file__).parents[2] / "bench/report_speed.py"
MAX_GROWTH, MAX_MIB = 6.0, 450
"""Ten times the runs: 3.7 times the time of a processor and 403 MiB here; a page is drawn once."""


@pytest.mark.lab
def test_a_report_takes_time_as_its_runs_do_and_450_mebibytes_for_a_thousand() -> None:
    seconds_of_hundred, _ = measure_report(100)
    seconds, mebibytes = measure_report(1000)
    assert seconds <= MAX_GROWTH * seconds_of_hundred
    assert mebibytes <= MAX_MIB


def measure_report(runs: int) -> tuple[float, int]:
    """Seconds of a processor and MiB that a report of so many runs takes."""
    printed = run((sys.executable, str(PROGRAM), str(runs)), timeout_s=600).stdout
    match = re.search(r"\(([\d.]+) s of a processor\), at most (\d+) MiB", printed)
    assert match is not None, printed
    return float(match[1]), int(match[2])
