"""`homenode restore --list`: what every command left open or can undo, from its journal alone."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from homenode.bdf import Bdf
from homenode.change.apply.definition import apply_definition, restore_definition
from homenode.change.retrain import execution as retrain_journals
from homenode.change.retrain.execution import KIND, retrain_journal
from homenode.change.step import ChangeEntry, ChangeState
from homenode.measure.tool_setup import setup_journal
from homenode.measure.trial.journal import BOOT, TrialHead, TrialJournal
from homenode.vm.hypervisor.virsh import Virsh
from tests.apply_documents import NAME, ORIGINAL, tuned
from tests.command_line import homenode
from tests.virsh_stand_in import URI, UUID, StandIn


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
    apply_definition(virsh, NAME, tuned("pin", ORIGINAL), virsh.definition(UUID), root)
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
    assert ["cut short" in row for row in rows] == [False, True, False, True]
    for row, undo in (
        (rows[0], f"homenode restore {UUID}"),
        (rows[2], f"homenode bench setup --prefix {tmp_path / 'prefix'} --remove"),
        (rows[3], "homenode trial undo t1"),
    ):
        assert row.endswith(undo), lines

    restore_definition(virsh, NAME, root)
    assert listed()[0] == "3 changes can be undone"


def test_a_journal_that_cannot_be_read_hides_no_other(root: Path) -> None:
    virsh = Virsh(URI)
    apply_definition(virsh, NAME, tuned("pin", ORIGINAL), virsh.definition(UUID), root)
    broken = root / "domains" / f"{UUID[:-1]}0@00000000"
    broken.mkdir()
    (broken / "journal.jsonl").write_text(json.dumps({"format": "homenode.change/9"}) + "\n")
    done = homenode("restore", "--list")
    assert NAME in done.stdout
    assert "journal.jsonl" in done.stderr
