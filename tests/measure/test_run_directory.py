"""The directory of a run: whole files, in order, for one writer."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.errors import HostError, InputError
from homenode.formats import line
from homenode.measure import runner
from homenode.measure.model import BenchOptions
from homenode.measure.results.vantage import Vantage
from homenode.measure.run_directory import (
    RAW,
    BenchEntry,
    RunDirectory,
    StepRecord,
    StepStatus,
    compute_digest,
    open_run,
)
from tests.bench_machines import FakeMachine

ORDER = runner.inspect(FakeMachine(), BenchOptions("x", vantage=Vantage.HOST))[0].record


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    with open_run(tmp_path, "cpu-only", "x", resume=False, notify=print) as opened:
        opened.begin_with(ORDER)
        yield opened


def step(number: int, output: str = "text") -> StepRecord:
    name, file, digest = f"test {number}", f"{number:04}-x.txt", compute_digest(output)
    return StepRecord(number, 0, name, name, StepStatus.DONE, 1.0, file, digest, 0)


def test_steps_come_back_in_their_order_however_many(directory: RunDirectory) -> None:
    for number in (10000, 2, 9999, 1):
        directory.write_step(step(number), "text")
    assert [record.number for record, _ in directory.read_steps()] == [1, 2, 9999, 10000]


def test_the_order_and_an_output_come_back_as_they_were(directory: RunDirectory) -> None:
    odd = "é\r\n\x00\udcff\u2028no newline"
    directory.write_step(step(1, odd), odd)
    assert directory.read_steps() == ((step(1, odd), odd),)
    assert directory.order() == ORDER


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nothing", "journal.jsonl:1: expected a line of JSON"),
        ("[]", "journal.jsonl:1: expected a JSON object"),
        ("{}", 'missing "format": "homenode.bench/1"'),
        ('{"format": "homenode.bench/99"}', "homenode.bench/1, found version 99"),
        ('{"format": "homenode.trial/1"}', "expected a homenode.bench document"),
        ('{"format": "homenode.bench/1"}', "missing required field `head`"),
    ],
)
def test_a_bad_journal_is_refused_by_line(text: str, says: str, directory: RunDirectory) -> None:
    directory.journal_path.write_text(f"{text}\n")
    with pytest.raises(InputError) as caught:
        directory.read_steps()
    assert says in caught.value.message


def test_a_step_that_is_none_is_refused_by_its_line(directory: RunDirectory) -> None:
    directory.append('{"step": {"number": "x"}}\n')
    with pytest.raises(InputError, match=r"journal\.jsonl:2: expected a line of homenode\.bench"):
        directory.read_steps()


def test_a_step_whose_line_was_cut_short_has_not_ended(directory: RunDirectory) -> None:
    directory.write_step(step(1), "text")
    directory.write_step(step(2), "text")
    with directory.journal_path.open("r+b") as file:
        file.truncate(directory.journal_path.stat().st_size - 9)
    assert [record.number for record, _ in directory.read_steps()] == [1]
    directory.write_step(step(3), "text")
    assert [record.number for record, _ in directory.read_steps()] == [1, 3]


def test_a_record_that_points_elsewhere_is_refused(directory: RunDirectory) -> None:
    directory.append(line(BenchEntry(step=replace(step(1), output="../../../secret"))))
    with pytest.raises(InputError, match="another path"):
        directory.read_steps()


def test_an_output_that_is_gone_is_named(directory: RunDirectory) -> None:
    directory.write_step(step(1), "text")
    (directory.path / RAW / "0001-x.txt").unlink()
    with pytest.raises(InputError, match=r"0001-x\.txt: no such file"):
        directory.read_steps()


def test_no_half_file_is_seen(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.write("a", b"whole")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HostError, match="No space left") as caught:
        directory.write("a", b"new")
    assert caught.value.hint is not None and "--resume" in caught.value.hint
    assert (directory.path / "a").read_text() == "whole"
    assert not list(directory.path.glob(".*.part"))


def test_no_one_else_writes_there(directory: RunDirectory) -> None:
    with (
        pytest.raises(HostError, match="another homenode bench"),
        open_run(directory.path.parents[1], "cpu-only", "x", resume=True, notify=print),
    ):
        pass


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(HostError, match="cannot read and write"),
        open_run(tmp_path / "file", "cpu-only", "x", resume=False, notify=print),
    ):
        pass


def test_a_step_that_is_there_twice_is_refused(directory: RunDirectory) -> None:
    directory.write_step(step(1), "text")
    directory.append(line(BenchEntry(step=step(1))))
    with pytest.raises(InputError, match="expected step 1 once, found it twice"):
        directory.read_steps()


def test_a_disk_that_fills_up_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*words: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    with open_run(tmp_path, "cpu-only", "x", resume=False, notify=print) as opened:
        opened.begin_with(ORDER)
        monkeypatch.setattr(os, "mkdir", full)
        with pytest.raises(HostError, match="cannot read and write: No space"):
            opened.write_step(step(0), "text")
