"""A study's directory: its journal after a kill, and files that are not its own."""

import os
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import asdict, replace

from homenode.cluster.slurm.study.directory import StudyDirectory, StudyEntry, _Hosts, find_attempts
from homenode.errors import HostError, InputError
from homenode.safe import durable
from homenode.vm.sources import load_host
from tests.slurm.test_study import study

ROOT = Path(__file__).parents[2]


def test_a_journal_survives_a_line_that_was_cut_short(tmp_path: Path) -> None:
    directory = StudyDirectory(tmp_path / "study")
    made = directory.create(study())
    made = directory.note(made, StudyEntry(submitted="collective", job="4"))
    directory.close()
    journal = tmp_path / "study" / "study.jsonl"
    with journal.open("ab") as file:
        file.write(b'{"submitted": "exclusive-gh01-nu')
    again = StudyDirectory(tmp_path / "study")
    loaded = again.load()
    assert loaded == made
    for entry in (
        StudyEntry(submitted="collective", job="5"),
        StudyEntry(again="collective"),
        StudyEntry(rejected="collective", reason="no"),
    ):
        loaded = again.note(loaded, entry)
    again.close()
    assert StudyDirectory(tmp_path / "study").study() == loaded
    assert (loaded.jobs, loaded.count_attempts("collective")) == ((), 1)
    script = tmp_path / "study/jobs/exclusive-gh01-numa0-r1.sbatch"
    assert script.stat().st_mode & stat.S_IXUSR


def test_two_commands_on_one_study_are_refused(tmp_path: Path) -> None:
    first = StudyDirectory(tmp_path / "study")
    first.create(study())
    second = StudyDirectory(tmp_path / "study", held_s=0)
    with pytest.raises(HostError, match="in use by another homenode slurm study"):
        second.load()
    second.close()
    first.close()
    second.load()
    second.close()


def test_a_study_that_was_killed_at_its_first_breath_is_begun_anew(tmp_path: Path) -> None:
    directory = StudyDirectory(tmp_path / "study")
    (tmp_path / "study").mkdir()
    (tmp_path / "study/study.jsonl").touch()
    assert not directory.has_journal
    directory.create(study())
    directory.close()
    script = tmp_path / "study/jobs/collective.sbatch"
    (one, *_) = study().experiments
    (tmp_path / f"study/jobs/{one.id}.sbatch").unlink()
    directory.load()
    directory.close()
    assert (tmp_path / f"study/jobs/{one.id}.sbatch").exists()
    assert not script.exists()


def test_files_that_no_journal_lists_are_not_mistaken_for_results(tmp_path: Path) -> None:
    (tmp_path / "raw/exclusive-gh01-numa0/task-0/7.0").mkdir(parents=True)
    with pytest.raises(HostError, match="this directory is not empty"):
        StudyDirectory(tmp_path).create(study())


def test_a_full_disk_is_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HostError, match="cannot read and write: No space") as caught:
        StudyDirectory(tmp_path).create(study())
    assert "the jobs go on" in (caught.value.hint or "")


def test_a_study_of_another_version_is_refused_by_name(tmp_path: Path) -> None:
    study = {"id": "x", "wishes": {}, "experiments": []}
    head = {"format": "homenode.slurm-study/2", "study": study}
    (tmp_path / "study.jsonl").write_bytes(msgspec.json.encode(head) + b"\n")
    with pytest.raises(InputError, match=r"expected homenode\.slurm-study/1"):
        StudyDirectory(tmp_path).study()


@pytest.mark.parametrize(
    "change",
    [
        {"id": "../../../etc/cron.d/x"},
        {"nodes": ("a\nb",)},
        {"nodes": ()},
        {"jobs": 10**12},
        {"jobs": 0},
    ],
)
def test_a_journal_may_not_leave_its_directory(tmp_path: Path, change: dict[str, Any]) -> None:
    made = study()
    one = replace(made.experiments[0], **change)
    head = {"format": "homenode.slurm-study/1", **asdict(replace(made, experiments=(one,)))}
    (tmp_path / "study.jsonl").write_bytes(msgspec.json.encode(head) + b"\n")
    with pytest.raises(InputError, match="expected an experiment, found"):
        StudyDirectory(tmp_path).study()


def test_files_of_any_name_next_to_attempts_are_passed_over(tmp_path: Path) -> None:
    root = tmp_path / "raw/e/task-0"
    for name in ("10.0", "9.1", "12", "12.", "\u00b2.0", "\u0663.0", "x"):
        (root / name).mkdir(parents=True)
    (root / "13.0").write_text("a file")
    assert [path.name for path in find_attempts(tmp_path, "e", 0)] == ["9.1", "10.0"]


def test_a_directory_without_a_journal_or_with_a_strange_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"study\.jsonl: no homenode\.slurm-study head"):
        StudyDirectory(tmp_path).study()
    (tmp_path / "study.jsonl").write_text('{"format": "something/1"}\n')
    with pytest.raises(InputError, match=r"homenode\.slurm-study document, found 'something/1'"):
        StudyDirectory(tmp_path).study()
    (tmp_path / "study.jsonl").write_text("[" * 100_000)
    with pytest.raises(InputError, match="no homenode"):
        StudyDirectory(tmp_path).study()
    with pytest.raises(HostError, match="path without %"):
        StudyDirectory(tmp_path / "a%j").create(study())


def test_a_study_opens_no_path_that_its_journal_names_as_the_host(tmp_path: Path) -> None:
    described = load_host("gh200x4")
    directory = StudyDirectory(tmp_path / "study")
    made = directory.create(replace(study(), host="/some/where/gh200.toml"), described)
    directory.close()
    kept = _Hosts(tmp_path / "study", made)._read_described()
    assert kept is not None and kept.fingerprint == described.fingerprint
    (tmp_path / "study/host.json").unlink()
    other = tmp_path / "other.toml"
    other.write_text((ROOT / "src/homenode/machine/hosts/hgx-h100.toml").read_text())
    for name in (str(other), "../other.toml", "", "no-such-host"):
        assert _Hosts(tmp_path / "study", replace(made, host=name))._read_described() is None


def test_a_host_that_contradicts_itself_is_unknown(tmp_path: Path) -> None:
    described = load_host("gh200x4")
    directory = StudyDirectory(tmp_path / "study")
    odd = replace(described, cores=(), pus=described.pus[:1])
    made = directory.create(replace(study(), host="gh200x4"), odd)
    directory.close()
    assert _Hosts(tmp_path / "study", made)._read_described() is None


def test_a_study_lays_itself_out_through_no_link(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    study = tmp_path / "study"
    study.mkdir()
    (study / "jobs").symlink_to(elsewhere)
    with pytest.raises(OSError, match="jobs"):
        os.close(durable.open_directory(study, "jobs"))
    (study / "study.jsonl").symlink_to(tmp_path / "nologin")
    with pytest.raises(HostError):
        StudyDirectory(study).load()
    (study / ".lock").unlink()
    (study / ".lock").symlink_to(tmp_path / "nologin")
    with pytest.raises(HostError):
        StudyDirectory(study).load()
    assert not (tmp_path / "nologin").exists()
