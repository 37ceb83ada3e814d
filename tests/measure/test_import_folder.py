"""Folders of others, as they are found: their texts, their links, their sizes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from homenode.errors import InputError
from homenode.findings import Gap
from homenode.measure.imported import files as import_folder
from homenode.measure.imported.files import find_folders
from homenode.measure.imported.runs import ImportOptions, imported_runs
from tests.measure.importers import test_intel_mlc as mlc
from tests.tools import test_nccl_tests as nccl
from tests.tools import test_nvbandwidth as nvbandwidth


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be"])
def test_texts_that_a_windows_shell_redirected_are_read(encoding: str, tmp_path: Path) -> None:
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    text = (mark + mlc.OUTPUT).replace("\n", "\r\n")
    (tmp_path / "mlc.txt").write_bytes(text.encode(encoding))
    (run,) = imported_runs(find_folders(tmp_path).folders, ImportOptions())
    assert run.run.samples


@pytest.mark.parametrize("text", [nvbandwidth.TEXT, nccl.TEXT, mlc.OUTPUT])
def test_labels_of_srun_and_colours_are_removed(text: str, tmp_path: Path) -> None:
    """Also where an editor took the blank behind the label of an empty line."""
    labelled = "\n".join(f"0: {line}".rstrip() for line in text.rstrip("\n").split("\n")) + "\n"
    for number, said in enumerate((text, labelled, f"\x1b[32m{text}\x1b[0m")):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}/x.log").write_text(said)
    runs = imported_runs(find_folders(tmp_path).folders, ImportOptions())
    assert len(runs) == 3
    assert runs[0].run.samples == runs[1].run.samples == runs[2].run.samples


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (" 0: # a\n11: # b\n 0:\n 0: # c\n", "# a\n\n# c\n# b\n"),
        ("0: # a\nb\n", "0: # a\nb\n"),
        ("12:30:01 a\n12:30:02 b\n", "12:30:01 a\n12:30:02 b\n"),
    ],
)
def test_lines_of_each_task_are_together(said: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text(said)
    (folder,) = find_folders(tmp_path).folders
    assert folder.texts["x.log"] == text


def test_a_file_with_zero_bytes_is_binary_under_a_mark_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("nvbandwidth\0".encode("utf-16"))
    found = find_folders(tmp_path)
    assert not found.folders
    assert [gap.reason for gap in found.skipped] == ["binary"]


def test_texts_that_are_too_large_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_folder, "MAX_BYTES", 5000)
    for number in range(6):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}/log.txt").write_text("x\n" * 500)
    with pytest.raises(InputError, match="MiB of text, found more") as refused:
        find_folders(tmp_path)
    assert "name the folders" in str(refused.value)


def test_a_folder_that_may_not_be_read_is_reported(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    looking = (
        "import sys, pathlib; from homenode.measure.imported.files import find_folders; "
        "print([gap.reason for gap in find_folders(pathlib.Path(sys.argv[1])).skipped])"
    )
    # Root may read every folder, but for what it gave up.
    given_up = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
    before = given_up if os.geteuid() == 0 else ()
    done = subprocess.run(
        [*before, sys.executable, "-c", looking, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Permission denied" in done.stdout


def test_a_folder_that_goes_away_meanwhile_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    (tmp_path / "log.txt").write_text(mlc.OUTPUT)
    read = import_folder._texts

    def slow(
        paths: list[Path], skipped: list[Gap], here: str, left: int
    ) -> tuple[dict[str, str], dict[str, float]]:
        if here == str(tmp_path):
            (tmp_path / "gone").rmdir()
        return read(paths, skipped, here, left)

    monkeypatch.setattr(import_folder, "_texts", slow)
    found = find_folders(tmp_path)
    assert len(found.folders) == 1
    assert [gap.subject for gap in found.skipped] == [str(tmp_path / "gone")]


def test_a_link_that_is_named_is_followed_and_no_other_one(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/mlc.txt").write_text(mlc.OUTPUT)
    (tmp_path / "latest").symlink_to("run/mlc.txt")
    (named,) = find_folders(tmp_path / "latest").folders
    assert list(named.texts) == ["mlc.txt"]
    assert any("not a regular file" in gap.reason for gap in find_folders(tmp_path).skipped)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert not find_folders(tmp_path).folders
    assert not find_folders(tmp_path / "pipe").folders
