"""A journal of steps, and `homenode restore --list`, which knows what is open from it alone."""

import errno
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from homenode.bdf import Bdf
from homenode.change.apply.definition import apply_definition, restore_definition
from homenode.change.journal import (
    ChangeEntry,
    ChangeHead,
    ChangeState,
    Journal,
    Note,
    OpenChange,
    open_changes,
    state_hint,
)
from homenode.change.retrain import execution as retrain_journals
from homenode.change.retrain.execution import KIND, retrain_journal
from homenode.errors import HostError, InputError
from homenode.measure.tool_setup import setup_journal
from homenode.measure.trial.journal import BOOT, TrialHead, TrialJournal
from homenode.safe.record_directory import RecordDirectory
from homenode.vm.hypervisor.virsh import Virsh
from tests.apply_documents import NAME, ORIGINAL, tuned
from tests.command_line import homenode
from tests.virsh_stand_in import SESSION as URI
from tests.virsh_stand_in import UUID, StandIn

HEAD = ChangeHead(run="a", command="homenode a", undo="homenode undo a", connect="qemu:///system")


class Word:
    """A file with a word in it, as a step."""

    def __init__(self, path: Path, word: str) -> None:
        self.path, self.word = path, word

    def do(self, note: Note) -> ChangeEntry:
        before = self.path.read_text() if self.path.exists() else None
        entry = ChangeEntry(
            what=ChangeState.BEGIN,
            kind="word",
            subject=str(self.path),
            before=before,
            after=self.word,
            by_hand=f"rm {self.path}",
        )
        note(entry)
        if self.word == "fails":
            raise HostError("it fails")
        self.path.write_text(self.word)
        note(entry.with_state(ChangeState.DONE))
        return entry

    def undo(self, entry: ChangeEntry, note: Note) -> ChangeEntry:
        note(entry.with_state(ChangeState.UNDOING))
        if entry.before is None:
            self.path.unlink(missing_ok=True)
        else:
            self.path.write_text(entry.before)
        note(entry.with_state(ChangeState.UNDONE))
        return entry

    def is_done(self, entry: ChangeEntry) -> bool:
        return self.path.exists() and self.path.read_text() == entry.after


def step_of(entry: ChangeEntry) -> Word:
    return Word(Path(entry.subject), entry.after or "")


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(RecordDirectory(tmp_path / "record"), HEAD)


def test_a_full_disk_and_a_full_quota_have_the_same_hint() -> None:
    hint = state_hint(errno.EDQUOT)
    assert hint is not None and hint.startswith("free some space")
    for number in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR):
        assert state_hint(errno.ENOSPC) == hint != state_hint(number) is not None
    assert state_hint(errno.EIO) is None


def test_steps_are_undone_the_last_first(journal: Journal, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        Word(path, path.name).do(journal.write)
    Word(paths[0], "again").do(journal.write)
    assert [entry.subject for entry in journal.to_undo()] == [str(path) for path in paths]
    done = journal.undo(step_of)
    assert [entry.subject for entry in done] == [str(path) for path in reversed(paths)]
    assert journal.to_undo() == ()
    assert journal.undo(step_of) == ()
    for path in reversed(paths):
        Word(path, "later").do(journal.write)
    assert [entry.subject for entry in journal.to_undo()] == [str(path) for path in reversed(paths)]


def test_a_step_that_was_cut_short_is_settled_by_what_the_host_has(
    journal: Journal, tmp_path: Path
) -> None:
    happened, not_yet = Word(tmp_path / "a", "a"), Word(tmp_path / "b", "b")
    for step in (happened, not_yet):
        begin = ChangeEntry(
            what=ChangeState.BEGIN, kind="word", subject=str(step.path), after=step.word
        )
        journal.write(begin)
    happened.path.write_text("a")
    done = Word(tmp_path / "c", "c")
    done.do(journal.write)
    not_yet_undone = Word(tmp_path / "d", "d")
    journal.write(not_yet_undone.do(journal.write).with_state(ChangeState.UNDOING))
    left = journal.settle(step_of)
    assert [entry.subject for entry in left] == [str(not_yet.path), str(not_yet_undone.path)]
    states = {entry.subject: entry.what for entry in journal.to_undo()}
    assert states == {
        str(happened.path): ChangeState.DONE,
        str(not_yet.path): ChangeState.BEGIN,
        str(done.path): ChangeState.DONE,
        str(not_yet_undone.path): ChangeState.UNDOING,
    }


@pytest.mark.parametrize("state", ChangeState)
def test_a_change_is_open_until_it_is_undone_and_cut_short_unless_it_is_done(
    journal: Journal, state: ChangeState
) -> None:
    journal.write(ChangeEntry(what=state, kind="word", subject="a"))
    changes = [change for change in open_changes([journal]) if isinstance(change, OpenChange)]
    cut_short = {"begin": [True], "undoing": [True], "done": [False]}
    assert [change.is_cut_short for change in changes] == cut_short.get(state, [])


def test_a_step_that_fails_stays_open(journal: Journal, tmp_path: Path) -> None:
    with pytest.raises(HostError):
        Word(tmp_path / "a", "fails").do(journal.write)
    (entry,) = journal.to_undo()
    assert entry.what is ChangeState.BEGIN
    assert entry.by_hand == f"rm {tmp_path / 'a'}"


@pytest.mark.parametrize("kind", ["apply/2", "setup/1"])
def test_a_file_of_another_kind_is_refused_by_name(journal: Journal, kind: str) -> None:
    journal.files.make()
    journal.files.begin(f'{{"format": "homenode.{kind}"}}\n')
    for use in (journal.read_entries, journal.write):
        with pytest.raises(InputError, match=rf"expected a homenode\.change document.*{kind}"):
            use()


def test_a_newer_journal_is_refused_by_name(journal: Journal) -> None:
    journal.files.make()
    journal.files.begin('{"format": "homenode.change/9", "run": "a"}\n')
    with pytest.raises(InputError, match="change/1, found version 9"):
        journal.read_entries()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    daemon = StandIn(tmp_path / "daemon", NAME, ORIGINAL)
    monkeypatch.setenv("PATH", f"{daemon.bin}:/usr/bin:/bin")
    monkeypatch.setattr("homenode.change.journal.default_root", lambda: tmp_path / "state")
    for one in (retrain_journals.retrain_journal, retrain_journals.retrain_journals):
        monkeypatch.setattr(one, "__defaults__", (str(tmp_path / "retrain"),))
    yield tmp_path / "state"


def listed() -> list[str]:
    done = homenode("restore", "--list")
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


def test_what_every_command_can_undo_is_listed_with_its_way_back(
    root: Path, tmp_path: Path
) -> None:
    assert listed() == ["0 changes can be undone"]
    virsh = Virsh(URI)
    apply_definition(virsh, NAME, tuned("pin", ORIGINAL), virsh.read_definition(UUID), root)
    port = Bdf.parse("0000:00:01.0")
    begun = ChangeEntry(
        what=ChangeState.BEGIN, kind=KIND, subject=str(port), by_hand="setpci -s it"
    )
    retrain_journal(port).write(begun)
    program = tmp_path / "prefix/bin/tool"
    (root / "setups").mkdir()
    (root / "setups/a").write_text(str(tmp_path / "prefix"))
    setup_journal(tmp_path / "prefix").write(
        ChangeEntry(what=ChangeState.DONE, kind="install-program", subject=str(program))
    )
    trial = TrialJournal(root, "t1")
    trial.begin_with(
        TrialHead(
            id="t1",
            connect=URI,
            domain="d",
            uuid="u",
            source="d",
            layouts=(),
            boots=1,
            seed=1,
            results="/r",
        )
    )
    trial.changes.write(
        ChangeEntry(
            what=ChangeState.BEGIN,
            kind=BOOT,
            subject="u",
            by_hand="virsh destroy u",
            facts={"name": "d"},
        )
    )
    head, *lines = listed()
    assert head == "4 changes can be undone"
    rows = [line for line in lines if "  " in line.strip() and "undo" not in line.split()[-1:]]
    assert [row.split(": ")[0].strip() for row in rows] == [NAME, str(port), str(program), "d"]
    assert ["  homenode apply  " in row for row in rows] == [True, False, False, False]
    assert ["interrupted" in row for row in rows] == [False, True, False, True]
    for row, undo in (
        (rows[0], f"homenode restore {UUID} --connect {URI}"),
        (rows[2], f"homenode bench setup --prefix {tmp_path / 'prefix'} --remove"),
        (rows[3], "homenode trial undo t1"),
    ):
        assert row.endswith(undo), lines

    restore_definition(virsh, NAME, root)
    assert listed()[0] == "3 changes can be undone"


def test_a_journal_that_cannot_be_read_hides_no_other(root: Path) -> None:
    virsh = Virsh(URI)
    apply_definition(virsh, NAME, tuned("pin", ORIGINAL), virsh.read_definition(UUID), root)
    broken = root / "domains" / f"{UUID[:-1]}0@00000000"
    broken.mkdir()
    (broken / "journal.jsonl").write_text(json.dumps({"format": "homenode.change/9"}) + "\n")
    done = homenode("restore", "--list")
    assert NAME in done.stdout
    assert "journal.jsonl" in done.stderr
