"""`homenode restore --list`: what every command left open or can undo, from its journal alone."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from homenode.bdf import Bdf
from homenode.change.apply.definition import apply_definition, restore_definition
from homenode.change.apply.store import DomainStore
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


def test_what_every_command_can_undo_is_listed_with_both_ways_back(
    root: Path, tmp_path: Path
) -> None:
    assert listed() == []
    virsh = Virsh(URI)
    apply_definition(virsh, NAME, tuned("pin", ORIGINAL), virsh.definition(UUID), root)
    original = DomainStore(root, URI, UUID).definition()
    assert original is not None
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
    lines = listed()
    heads = [line for line in lines if not line.startswith("  ")]
    assert [line.split(":")[0] for line in heads] == [
        NAME,
        "0000",
        str(program),
        "d",
    ]
    assert ["cut short" in line for line in heads] == [False, True, False, True]
    for way in (
        f"  undo: homenode restore {UUID}",
        f"  undo: homenode bench setup --prefix {tmp_path / 'prefix'} --remove",
        "  undo: homenode trial undo t1",
        "  by hand: setpci -s it",
        "  by hand: virsh destroy u",
    ):
        assert way in lines
    by_hand = next(line for line in lines if f"virsh -c {URI} define" in line)
    assert by_hand.endswith(f"{original.before}.xml")

    restore_definition(virsh, NAME, root)
    assert [line.split(":")[0] for line in listed() if not line.startswith("  ")] == [
        "0000",
        str(program),
        "d",
    ]


def test_a_journal_that_cannot_be_read_hides_no_other(root: Path) -> None:
    virsh = Virsh(URI)
    apply_definition(virsh, NAME, tuned("pin", ORIGINAL), virsh.definition(UUID), root)
    broken = root / "domains" / f"{UUID[:-1]}0@00000000"
    broken.mkdir()
    (broken / "journal.jsonl").write_text(json.dumps({"format": "homenode.change/9"}) + "\n")
    done = homenode("restore", "--list")
    assert NAME in done.stdout
    assert "journal.jsonl" in done.stderr
