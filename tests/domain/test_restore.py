"""Restoring: the original comes back byte for byte, or nothing is touched and it says why."""

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from homenode.errors import HomenodeError, HostError, InputError
from homenode.vm.domain.restore import is_tuned_output, restore, write_tuned
from tests.command_line import homenode
from tests.kills import in_child

ORIGINAL = b"<domain type='kvm'>\r\n<!-- mine --></domain>"
TUNED = b"<domain type='kvm'><vcpu>4</vcpu></domain>\n"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def checked_by_sha256sum(record: Path) -> int | None:
    """Its exit code; None if it is not installed. It takes every line for a sum or a comment."""
    if shutil.which("sha256sum") is None:
        return None
    words = ["sha256sum", "-c", record.name]
    done = subprocess.run(words, cwd=record.parent, check=False, capture_output=True, timeout=60)
    assert b"improperly" not in done.stderr
    return done.returncode


def test_the_original_comes_back_and_nothing_else_stays(tmp_path: Path) -> None:
    out = tmp_path / "out.xml"
    write_tuned(out, ORIGINAL, TUNED)
    assert names(tmp_path) == ["out.xml", "out.xml.orig", "out.xml.orig.sha256"]
    assert out.read_bytes() == TUNED
    assert restore(out) == out
    assert out.read_bytes() == ORIGINAL
    assert names(tmp_path) == ["out.xml"]


def test_nothing_is_read_through_a_link_next_to_the_document(tmp_path: Path) -> None:
    """Whoever owns the directory could have a file of root's printed by its sum, or published."""
    secret, out = tmp_path / "secret", tmp_path / "in" / "out.xml"
    secret.write_bytes(ORIGINAL)
    out.parent.mkdir()
    for linked in (".orig", ".orig.sha256"):
        write_tuned(out, ORIGINAL, TUNED)
        link = out.with_name(out.name + linked)
        link.unlink()
        link.symlink_to(secret)
        for do in (restore, lambda path: write_tuned(path, TUNED, TUNED)):
            with pytest.raises(HostError, match="a link, not a regular file") as refused:
                do(out)
            assert hashlib.sha256(ORIGINAL).hexdigest() not in str(refused.value)
        assert out.read_bytes() == TUNED
        for path in out.parent.iterdir():
            path.unlink()


def test_the_record_is_one_that_sha256sum_can_check(tmp_path: Path) -> None:
    saved = write_tuned(tmp_path / "out.xml", ORIGINAL, TUNED)
    text = saved.record.read_text()
    assert text == (
        f"{hashlib.sha256(ORIGINAL).hexdigest()}  out.xml.orig\n"
        f"{hashlib.sha256(TUNED).hexdigest()}  out.xml\n"
    )
    assert checked_by_sha256sum(saved.record) in (0, None)


@pytest.mark.parametrize("edited", [False, True])
def test_a_script_of_the_layout_goes_with_it_unless_it_was_edited(
    edited: bool, tmp_path: Path
) -> None:
    script = tmp_path / "101.conf.hook.sh"
    out = tmp_path / "101.conf"
    for over in (lambda: restore(out), lambda: write_tuned(out, ORIGINAL, b"flat")):
        script.write_bytes(b"pin\n")
        write_tuned(out, ORIGINAL, TUNED, scripts={script.name: b"pin\n"})
        if edited:
            script.write_bytes(b"my pins\n")
        shown = homenode("restore", out, "--dry-run").stdout
        assert f"{script}: would {'stay, as it was edited' if edited else 'be removed'}" in shown
        over()
        assert script.exists() is edited


def test_a_kill_of_a_restore_leaves_what_the_next_ends(tmp_path: Path) -> None:
    saved = write_tuned(tmp_path / "out.xml", ORIGINAL, TUNED)
    saved.output.write_bytes(ORIGINAL)  # it is in place before the record goes
    assert restore(saved.output).read_bytes() == ORIGINAL
    assert names(tmp_path) == ["out.xml"]


def test_a_document_comes_back_with_its_permissions_or_those_of_the_original(
    tmp_path: Path,
) -> None:
    for is_there, mode in ((True, 0o640), (False, 0o600)):
        saved = write_tuned(tmp_path / "out.xml", ORIGINAL, TUNED)
        saved.output.chmod(0o640)
        if not is_there:
            saved.output.unlink()
        assert restore(saved.output).stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("part", [".orig", ".orig.sha256", ""])
def test_a_missing_file_is_named(part: str, tmp_path: Path) -> None:
    out = write_tuned(tmp_path / "out.xml", ORIGINAL, TUNED).output
    out.with_name(f"out.xml{part or '.orig'}").unlink()
    if part:
        with pytest.raises(InputError, match="has no saved original"):
            restore(out)
    else:
        out.unlink()
        with pytest.raises(HomenodeError, match="no such file"):
            restore(out)
    assert not is_tuned_output(out)


def test_a_document_that_was_removed_is_written_again(tmp_path: Path) -> None:
    write_tuned(tmp_path / "out.xml", ORIGINAL, TUNED).output.unlink()
    assert write_tuned(tmp_path / "out.xml", ORIGINAL, TUNED).output.read_bytes() == TUNED


def test_planning_again_from_the_same_original_is_fine(tmp_path: Path) -> None:
    out = tmp_path / "out.xml"
    write_tuned(out, ORIGINAL, TUNED)
    write_tuned(out, ORIGINAL, TUNED + b" ")
    assert restore(out).read_bytes() == ORIGINAL


@pytest.mark.parametrize("again", [False, True])
def test_a_kill_before_another_layout_is_in_place_loses_nothing(
    tmp_path: Path, again: bool
) -> None:
    vm = tmp_path / "vm.xml"
    vm.write_bytes(ORIGINAL)
    write_tuned(vm, ORIGINAL, TUNED)
    other = TUNED + b"<!-- another layout -->"
    saved = write_tuned(vm, TUNED, other)
    vm.write_bytes(TUNED)  # the record is written first: what was there before is still there
    if again:
        write_tuned(vm, TUNED, other)
        assert vm.read_bytes() == other
    if (code := checked_by_sha256sum(saved.record)) is not None:
        assert (code == 0) == again
    assert restore(vm).read_bytes() == ORIGINAL
    assert names(tmp_path) == ["vm.xml"]


def test_a_kill_at_any_call_of_another_layout_leaves_what_restore_takes(tmp_path: Path) -> None:
    vm = tmp_path / "vm.xml"
    for at in range(1, 100, 3):
        vm.write_bytes(ORIGINAL)
        write_tuned(vm, ORIGINAL, TUNED)
        calls = in_child(lambda: write_tuned(vm, TUNED, TUNED + b"<!-- another -->"), at)
        assert restore(vm).read_bytes() == ORIGINAL, at
        if calls is not None:
            break
    assert at > 10


def test_another_original_is_never_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out.xml"
    write_tuned(out, ORIGINAL, TUNED)
    with pytest.raises(InputError, match="homenode restore"):
        write_tuned(out, ORIGINAL + b"<!-- edited -->", TUNED)
    assert (tmp_path / "out.xml.orig").read_bytes() == ORIGINAL
    assert out.read_bytes() == TUNED
    out.unlink()
    with pytest.raises(InputError, match="homenode restore"):
        write_tuned(out, ORIGINAL + b"<!-- edited -->", TUNED)


@pytest.mark.parametrize(
    ("file", "said"),
    [("out.xml", "edited since homenode wrote it"), ("out.xml.orig", "edited since it was saved")],
)
def test_a_file_that_changed_is_not_overwritten(tmp_path: Path, file: str, said: str) -> None:
    out = tmp_path / "out.xml"
    write_tuned(out, ORIGINAL, TUNED)
    (tmp_path / file).write_bytes(b"edited by hand")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InputError, match=said):
        restore(out)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_edited_document_has_one_way_back_that_works(tmp_path: Path) -> None:
    out = tmp_path / "out.xml"
    write_tuned(out, ORIGINAL, TUNED)
    out.write_bytes(edited := TUNED + b"<!-- edited -->")
    hints = set()
    for attempt in (lambda: restore(out), lambda: write_tuned(out, edited, TUNED)):
        with pytest.raises(InputError) as refused:
            attempt()
        hints |= {word for word in (refused.value.hint or "").split() if word in ("cp", "restore")}
    assert hints == {"cp"}
    out.write_bytes(ORIGINAL)
    assert is_tuned_output(out)
    write_tuned(out, ORIGINAL, TUNED)


def test_a_document_that_was_removed_comes_back(tmp_path: Path) -> None:
    out = tmp_path / "out.xml"
    write_tuned(out, ORIGINAL, TUNED)
    out.unlink()
    assert restore(out).read_bytes() == ORIGINAL


def test_what_was_never_tuned_cannot_be_restored(tmp_path: Path) -> None:
    vm = tmp_path / "vm.xml"
    vm.write_bytes(ORIGINAL)
    with pytest.raises(InputError, match=r"has no saved original: vm.xml.orig"):
        restore(vm)
    with pytest.raises(InputError, match=r"absent.xml: no such file"):
        restore(tmp_path / "absent.xml")


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    saved = write_tuned(tmp_path / "out.xml", ORIGINAL, TUNED)
    saved.record.write_text("nonsense\n")
    with pytest.raises(InputError, match=r"sha256 of out.xml.orig .*, found none"):
        restore(saved.output)
    write_tuned(tmp_path / "out.xml", ORIGINAL, TUNED)
    with saved.record.open("a") as record:
        record.write("".join(f"{'0' * 64}  {name}\n" for name in (".", "..", "a/b")))
    restore(saved.output)
    assert saved.output.read_bytes() == ORIGINAL


def test_permissions_of_the_document_stay(tmp_path: Path) -> None:
    vm = tmp_path / "vm.xml"
    vm.write_bytes(ORIGINAL)
    vm.chmod(0o600)
    saved = write_tuned(vm, ORIGINAL, TUNED)
    assert vm.stat().st_mode & 0o777 == 0o600
    assert saved.original.stat().st_mode & 0o777 == 0o600
    vm.chmod(0o644)
    assert write_tuned(vm, TUNED, ORIGINAL).output.stat().st_mode & 0o777 == 0o600
    vm.chmod(0o640)  # since
    restore(vm)
    assert vm.stat().st_mode & 0o777 == 0o640


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real = tmp_path / "real.xml"
    real.write_bytes(ORIGINAL)
    link = tmp_path / "link.xml"
    link.symlink_to(real)
    write_tuned(link, ORIGINAL, TUNED)
    assert link.is_symlink()
    assert real.read_bytes() == TUNED
    real.unlink()  # the tuned document is gone, and the link leads nowhere
    assert restore(link) == real
    assert link.is_symlink()
    assert real.read_bytes() == ORIGINAL


def test_a_directory_that_is_not_there_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="cannot write"):
        write_tuned(tmp_path / "none" / "out.xml", ORIGINAL, TUNED)
    assert names(tmp_path) == []
