"""The folder of a run: whole files, in order, for one writer."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from homenode.bench import runner
from homenode.bench.orders import BenchOrders
from homenode.bench.record import Result, StepRecord, digest
from homenode.bench.run_folder import RAW, RunFolder, open_run
from homenode.errors import HostError, InputError
from homenode.results.vantage import Vantage
from tests.bench_machines import FakeMachine


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with open_run(tmp_path, "cpu-only", "x", resume=False, tell=print) as opened:
        (opened.path / RAW).mkdir()
        yield opened


def step(number: int, output: str = "text") -> StepRecord:
    return StepRecord(
        number, 0, f"test {number}", f"test {number}", Result.DONE, 1.0, f"{number:04}-x.txt",
        digest(output), 0,
    )  # fmt: skip


def test_steps_come_back_in_their_order_however_many(folder: RunFolder) -> None:
    for number in (10000, 2, 9999, 1):
        folder.write_step(step(number), "text")
    assert [record.number for record, _ in folder.steps()] == [1, 2, 9999, 10000]


def test_an_output_comes_back_as_it_was(folder: RunFolder) -> None:
    odd = "é\r\n\x00�no newline"
    folder.write_step(step(1, odd), odd)
    assert folder.steps() == ((step(1, odd), odd),)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected JSON"),
        ("[]", "expected homenode.bench/2"),
        ('{"format": "homenode.bench/3", "part": "step"}', "up to version 2"),
        ('{"format": "homenode.bench/1", "part": "look"}', "expected part step"),
        ('{"format": "homenode.bench/1", "part": "step"}', "not a valid step"),
    ],
)
def test_a_record_that_is_none_is_refused_by_its_name(
    text: str, says: str, folder: RunFolder
) -> None:
    (folder.path / RAW / "0001.json").write_text(text)
    with pytest.raises(InputError) as caught:
        folder.steps()
    assert says in caught.value.message
    assert "0001.json" in caught.value.message


def test_a_record_that_points_elsewhere_is_refused(folder: RunFolder) -> None:
    folder.write_step(step(1), "text")
    record = folder.path / RAW / "0001.json"
    record.write_text(record.read_text().replace("0001-x.txt", "../../../secret"))
    with pytest.raises(InputError, match="expected a file's name as output"):
        folder.steps()


def test_an_output_that_is_gone_is_named(folder: RunFolder) -> None:
    folder.write_step(step(1), "text")
    (folder.path / RAW / "0001-x.txt").unlink()
    with pytest.raises(InputError, match=r"0001-x\.txt: expected a file of the run"):
        folder.steps()


def test_half_a_file_is_never_seen(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write("order.json", "whole")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HostError, match="No space left") as caught:
        folder.write("order.json", "new")
    assert caught.value.hint is not None and "--resume" in caught.value.hint
    assert (folder.path / "order.json").read_text() == "whole"
    assert not list(folder.path.glob(".*.part"))


def test_nobody_else_writes_there(folder: RunFolder) -> None:
    (folder.path / "order.json").write_text("{}")
    with (
        pytest.raises(HostError, match="another homenode bench"),
        open_run(folder.path.parents[1], "cpu-only", "x", resume=True, tell=print),
    ):
        pass


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(HostError, match="expected to write there"),
        open_run(tmp_path / "file", "cpu-only", "x", resume=False, tell=print),
    ):
        pass


def test_a_copied_record_is_no_second_step(folder: RunFolder) -> None:
    folder.write_step(step(1), "text")
    raw = folder.path / RAW
    (raw / "0007.json").write_bytes((raw / "0001.json").read_bytes())
    with pytest.raises(InputError, match=r"0007\.json: expected the record of step 7"):
        folder.steps()


def test_raw_outputs_that_cannot_be_listed_are_not_taken_for_none(folder: RunFolder) -> None:
    (folder.path / RAW).rmdir()
    assert folder.steps() == ()
    (folder.path / RAW).write_text("")
    with pytest.raises(InputError, match="raw: expected a folder"):
        folder.steps()


def test_a_disk_that_fills_up_with_the_first_folder_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = runner.look_over(FakeMachine(), BenchOrders("x", vantage=Vantage.HOST))[0].record

    def full(*words: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    with open_run(tmp_path, "cpu-only", "x", resume=False, tell=print) as opened:
        opened.write_order(order)
        monkeypatch.setattr(os, "mkdir", full)
        with pytest.raises(HostError, match="expected to write there, found: No space"):
            opened.write(f"{RAW}/look-000.json", "{}")
