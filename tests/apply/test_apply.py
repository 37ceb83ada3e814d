"""Applying a tuned document to a domain, and the way back, on a stand-in for virsh."""

import os
import re
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from msgspec import structs

from homenode.change.apply.define_step import (
    DefineStep,
    DomainChange,
    find_lost_passwords,
    is_edited,
    is_printed,
    with_facts,
)
from homenode.change.apply.definition import (
    apply_definition,
    find_obstacles,
    forget_original,
    preview_definition,
    read_saved_original,
    restore_definition,
)
from homenode.change.apply.live_pins import (
    apply_live_pins,
    preview_live_pins,
    restore_live_pins,
    run_mark,
)
from homenode.change.journal import (
    ChangeEntry,
    ChangeState,
    DomainStore,
    compute_sha256,
    default_root,
    list_saved_originals,
)
from homenode.check.verify.start import PausedStart, end_paused, open_paused_journal
from homenode.cpuset import CpuSet
from homenode.errors import HostError, InputError, ToolError, UsageError
from homenode.safe.durable import make_part_name
from homenode.vm.hypervisor.connection import DomainState, check_uri, parse_dominfo, parse_pins
from homenode.vm.hypervisor.virsh import RejectedError, Virsh
from tests.apply_documents import NAME, ORIGINAL, tuned
from tests.seeds import part
from tests.virsh_stand_in import SESSION as URI
from tests.virsh_stand_in import UUID, StandIn


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "var/lib/homenode"


def apply(root: Path, layout: str = "pin-numa") -> bytes:
    virsh = Virsh(URI)
    original = virsh.read_definition(UUID)
    done = apply_definition(virsh, NAME, tuned(layout, original), original, root)
    assert done.defined is not None
    return done.defined


def test_apply_defines_the_tuned_document_and_restore_gives_the_original_back_byte_for_byte(
    daemon: StandIn, root: Path
) -> None:
    defined = apply(root)
    assert b"<vcpupin" in daemon.definition() and daemon.definition() in defined
    daemon.put("snapshots/s", (SNAPSHOT % daemon.definition()).decode())  # with its cells
    with pytest.raises(UsageError, match="snapshot"):
        restore_definition(Virsh(URI), NAME, root)
    (daemon.state / "snapshots/s").unlink()
    done = restore_definition(Virsh(URI), NAME, root)
    assert done.changed and done.exact
    assert daemon.definition() == ORIGINAL
    store = DomainStore(root, URI, UUID)
    assert store.read_document(compute_sha256(defined)) == defined
    os.utime(store.directory / "journal.jsonl", (9, 9))
    assert store.written_at().timestamp() == 9


def test_apply_and_restore_remove_what_a_killed_one_left_half_written(
    daemon: StandIn, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", os.getuid)  # the owner of the file below
    apply(root)
    for change in (apply, partial(restore_definition, Virsh(URI), NAME)):
        left = DomainStore(root, URI, UUID).directory / make_part_name()
        left.write_bytes(ORIGINAL[:9])
        change(root)
        assert not left.exists()


def test_a_step_that_was_only_begun_leaves_the_record_that_was_there(
    daemon: StandIn, root: Path
) -> None:
    """As where libvirt refuses another domain of the same command."""
    apply(root)
    virsh, store = Virsh(URI), DomainStore(root, URI, UUID)
    now, before = virsh.read_definition(UUID), store.journal.to_undo()
    change = DomainChange(name=NAME, tuned=tuned("pin", now), original=now)
    step = DefineStep(virsh, virsh.find_domain(NAME), store, (), change)
    step.begin(store.journal.write)
    step.take_back(store.journal.write)
    assert store.journal.to_undo() == before != ()
    applied = daemon.definition()
    daemon.put_definition(applied.replace(b"kept", b"changed"))
    with pytest.raises(InputError, match="edited in between"):
        step.begin(store.journal.write)
    assert store.journal.to_undo() == before
    daemon.put_definition(applied)
    daemon.happens(3, "edit")  # right after it was defined
    step.do(store.journal.write)
    daemon.nothing_happens()
    step.take_back(store.journal.write)
    assert b"<title>" in daemon.definition()
    daemon.put_definition(applied)
    step.do(store.journal.write)
    edited = daemon.definition().replace(b"kept", b"changed")
    daemon.put_definition(edited)
    step.take_back(store.journal.write)
    assert daemon.definition() == edited


def test_passwords_survive_and_no_one_else_can_read_what_is_saved(
    daemon: StandIn, root: Path
) -> None:
    defined = apply(root)
    assert b"passwd='kept'" in defined
    assert "dumpxml --inactive --security-info" in daemon.get("log")
    saved = [path for path in root.rglob("*") if path.is_file()]
    assert len(saved) >= 4
    assert not [path for path in saved if path.stat().st_mode & 0o077]


SNAPSHOT = b"<domainsnapshot><name>s</name>%b</domainsnapshot>"


@pytest.mark.parametrize(
    ("file", "value", "id"),
    [
        ("saved", "yes", "managed-save"),
        ("persistent", "no", "transient"),
        ("id", "7", "running"),
        ("snapshots/before -the update", (SNAPSHOT % ORIGINAL).decode(), "snapshot"),
        ("snapshots/s", "<domainsnapshot/>", "snapshot"),
        ("snapshots/s", "no XML at all", "snapshot"),
    ],
)
def test_apply_refuses_by_name_what_stands_against_it(
    daemon: StandIn, root: Path, file: str, value: str, id: str
) -> None:
    daemon.put(file, value)
    virsh = Virsh(URI)
    original = virsh.read_definition(UUID)
    assert [
        o.constraint for o in preview_definition(virsh, NAME, tuned(), original, root).obstacles
    ] == [id]
    with pytest.raises(UsageError, match=rf"\({id}\)\n  hint: .+"):
        apply(root)
    assert daemon.definition() == ORIGINAL
    assert "define" not in daemon.get("log")


STATE = DomainState(NAME, UUID, None, "shut off", persistent=True, managed_save=False)
WITH_GPU = tuned().replace(
    b"</devices>",
    b"""<hostdev type='pci'><source><address bus='0x19' slot='0x00' function='0x0'/></source>
    <address type='pci' bus='0x03' slot='0x00' function='0x0'/></hostdev></devices>""",
)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"'static'>4<", b"'static'>3<"),
        (b"sockets='2' cores='2'", b"sockets='1' cores='4'"),
        (b"cpus='0,1'", b"cpus='0'"),
        (b"memory='512'", b"memory='256'"),
        (b"<graphics", b"<controller type='pci' index='1' model='pcie-root-port'/><graphics"),
        (b"bus='0x03'", b"bus='0x04'"),
    ],
)
def test_a_snapshot_of_another_topology_alone_is_in_the_way(before: bytes, after: bytes) -> None:
    other = WITH_GPU.replace(before, after)
    assert other != WITH_GPU
    inactive = WITH_GPU.replace(b"domain", b"inactiveDomain")
    snapshots = {"same": SNAPSHOT % WITH_GPU, "running": SNAPSHOT % (other + inactive)}
    assert not list(find_obstacles(STATE, WITH_GPU, snapshots, URI))
    assert list(find_obstacles(STATE, WITH_GPU, {"s": SNAPSHOT % other}, URI))


def test_the_same_stands_against_a_restore() -> None:
    state = DomainState(NAME, UUID, 7, "running", persistent=False, managed_save=True)
    ids = ["transient", "running", "managed-save", "snapshot"]
    for restoring in (False, True):
        found = list(find_obstacles(state, WITH_GPU, {"-s": b""}, URI, restoring=restoring))
        assert [kind for kind, *_ in found] == ids
        hints = "".join(hint for *_, hint in found)
        assert hints.count(URI) == (4 if restoring else 5) and NAME not in hints
    assert found[-1][2].endswith(f" snapshot-delete {UUID} -- -s")


def test_kept_edits_are_the_original_as_libvirt_printed_them(daemon: StandIn, root: Path) -> None:
    apply(root)
    saved = read_saved_original(Virsh(URI), NAME, root)
    daemon.put("drops", "<iothreads>")
    assert not restore_definition(Virsh(URI), NAME, root).exact
    assert read_saved_original(Virsh(URI), NAME, root) == saved
    daemon.put("drops", "")
    daemon.put_definition(ORIGINAL)
    apply(root)
    daemon.put_definition(daemon.definition().replace(b"<os>", b"<title>a</title>\n  <os>"))
    daemon.put("drops", "<iothreads>")
    assert not restore_definition(Virsh(URI), NAME, root, keep_edits=True).exact
    assert b"<title>" in daemon.definition() and b"<iothreads>" not in daemon.definition()
    assert read_saved_original(Virsh(URI), NAME, root) == Virsh(URI).read_definition(UUID)


def test_edits_since_the_apply_are_never_dropped(daemon: StandIn, root: Path) -> None:
    defined = apply(root)
    edited = daemon.definition().replace(b"kept", b"changed")
    (daemon.state / "definition.xml").write_bytes(edited)
    restore = f"homenode restore {UUID}"
    with pytest.raises(InputError, match=rf"edited .*\n.*{restore} --connect {URI} --keep-edits"):
        restore_definition(Virsh(URI), NAME, root)
    with pytest.raises(InputError, match=rf"edited .*\n.*{restore} --forget --connect {URI}"):
        apply(root, "pin")
    assert daemon.definition() == edited
    old = forget_original(Virsh(URI), NAME, root)
    assert old.read_bytes().rstrip() == ORIGINAL.rstrip()
    apply(root, "pin")
    restore_definition(Virsh(URI), NAME, root)
    assert daemon.definition() == edited
    assert defined
    pinned = edited.replace(b"</vcpu>", b"</vcpu><cputune><vcpupin vcpu='0' cpuset='7'/></cputune>")
    daemon.put_definition(pinned)  # the layout is undone, so that the user's pin is no conflict
    daemon.put("id", "4")  # nothing is to be changed
    restore_definition(Virsh(URI), NAME, root, keep_edits=True)
    assert daemon.definition() == pinned


def test_an_edit_of_a_default_that_libvirt_added_is_never_dropped(
    daemon: StandIn, root: Path
) -> None:
    printed = apply(root).replace(b"passwd=", b"keymap='de' passwd=")
    store = DomainStore(root, URI, UUID)
    entry = store.definition()
    assert entry is not None
    store.journal.write(with_facts(entry, found=store.save(printed)))
    daemon.put_definition(printed.replace(b"'de'", b"'fr'"))
    with pytest.raises(InputError, match="edited after homenode apply"):
        restore_definition(Virsh(URI), NAME, root)
    daemon.put("name", "renamed")
    daemon.put_definition(printed.replace(NAME.encode() + b"</name>", b"renamed</name>"))
    with pytest.raises(InputError, match=r"was renamed\n"):
        restore_definition(Virsh(URI), "renamed", root)


EDITS = {
    "a title": ("</name>", "</name><title>mine</title>"),
    "another password": ("passwd='kept'", "passwd='changed'"),
    "a device less": ("<graphics type='vnc' port='-1' passwd='kept'/>", ""),
    "a device more": ("</devices>", "<controller type='scsi' index='0'/></devices>"),
    "other firmware": ("<os>", "<os firmware='efi'>"),
    "more memory": (">1048576</currentMemory>", ">524288</currentMemory>"),
    "another pin": ("vcpupin vcpu='0' cpuset='", "vcpupin vcpu='0' cpuset='7,"),
    "another node": (
        "cellid='0' mode='strict' nodeset='0'",
        "cellid='0' mode='strict' nodeset='1'",
    ),
}


CUTS = list(product(EDITS, (ChangeState.BEGIN, ChangeState.UNDOING), (False, True)))
"""What is edited, in which step that was cut short, and whether that had defined it."""


@pytest.mark.parametrize(("edit", "what", "is_defined"), part(CUTS, 2))
def test_edits_after_a_step_that_was_cut_short_are_never_dropped(
    daemon: StandIn, root: Path, edit: str, what: ChangeState, is_defined: bool
) -> None:
    printed = apply(root)
    store = DomainStore(root, URI, UUID)
    entry = store.definition()
    assert entry is not None and entry.before is not None
    found = store.save(printed) if what is ChangeState.UNDOING else entry.before
    store.journal.write(structs.replace(entry, what=what, facts={"name": NAME, "found": found}))
    there = daemon.definition() if is_defined else ORIGINAL
    old, new = (text.encode() for text in EDITS[edit])
    if old not in there:
        assert not is_defined, "the original has no pins"
        return
    edited = there.replace(old, new, 1)
    current = daemon.state / "definition.xml"
    current.write_bytes(edited)
    for work, option in (
        (lambda: restore_definition(Virsh(URI), NAME, root), "--keep-edits"),
        (lambda: apply(root, "pin"), "--forget"),
    ):
        with pytest.raises(InputError, match=rf"edited after .*\n  hint: .* {option}") as refused:
            work()
        assert edit != "a title" or "homenode apply: title" in refused.value.message
        assert daemon.definition() == edited
    current.write_bytes(there)
    restore_definition(Virsh(URI), NAME, root)
    assert daemon.definition() == ORIGINAL


def test_a_definition_that_changed_while_it_was_planned_is_refused(
    daemon: StandIn, root: Path
) -> None:
    virsh = Virsh(URI)
    before = virsh.read_definition(UUID).replace(b"kept", b"older")
    for work in (preview_definition, apply_definition):
        with pytest.raises(InputError, match="edited in between"):
            work(virsh, NAME, tuned(original=before), before, root)
    assert daemon.definition() == ORIGINAL


def test_what_libvirt_refuses_leaves_the_old_definition(daemon: StandIn, root: Path) -> None:
    daemon.put("refuses", "")
    with pytest.raises(HostError, match=f"virsh define at {URI}: Failed to define"):
        apply(root)
    assert daemon.definition() == ORIGINAL
    assert DomainStore(root, URI, UUID).journal.to_undo() == ()
    (daemon.state / "refuses").unlink()
    apply(root)
    daemon.put("refuses", "")
    owned = daemon.definition()
    with pytest.raises(HostError):
        apply(root, "pin-numa-pci")
    assert daemon.definition() == owned
    (daemon.state / "refuses").unlink()
    restore_definition(Virsh(URI), NAME, root)
    assert daemon.definition() == ORIGINAL


def test_what_libvirt_drops_silently_is_noticed_and_undone(daemon: StandIn, root: Path) -> None:
    daemon.put("drops", r"\(emulator\|iothread\)pin")
    dropped = r"<emulatorpin>: .* became not pinned; .*<iothreadpin>"
    with pytest.raises(HostError, match=dropped) as caught:
        apply(root)
    assert daemon.definition() == ORIGINAL
    stored = Path((caught.value.hint or "").rpartition(" ")[2]).read_bytes()
    assert b"<vcpupin" in stored and b"<emulatorpin" not in stored


def test_what_libvirt_did_and_dropped_before_it_was_lost_is_undone(
    daemon: StandIn, root: Path
) -> None:
    daemon.put("drops", "emulatorpin")
    daemon.put("lost", "")
    for work in (apply, partial(restore_definition, Virsh(URI), NAME)):
        with pytest.raises(HostError, match="End of file") as lost:
            work(root)
        assert f"; homenode restore {UUID} --connect {URI} restores" in (lost.value.hint or "")
    (daemon.state / "lost").unlink()
    (entry,) = DomainStore(root, URI, UUID).journal.to_undo()
    assert entry.what is ChangeState.UNDOING
    assert daemon.definition() == ORIGINAL


def test_the_first_original_is_kept_where_a_second_layout_was_undone(
    daemon: StandIn, root: Path
) -> None:
    owned = apply(root, "pin")
    daemon.put("drops", "memnode")
    with pytest.raises(HostError, match="libvirt changed memory of cell 0"):
        apply(root, "pin-numa")
    assert daemon.definition() in owned
    daemon.put("drops", "")
    apply(root, "pin-numa")
    store = DomainStore(root, URI, UUID)
    entry = store.definition()
    assert entry is not None and entry.by_hand == (
        f"virsh -c {URI} define {store.definition_path(entry.before)}"
    )
    restore_definition(Virsh(URI), NAME, root)
    assert daemon.definition() == ORIGINAL


def test_a_document_of_another_domain_is_refused(daemon: StandIn, root: Path) -> None:
    virsh = Virsh(URI)
    original = virsh.read_definition(UUID)
    for other in (
        tuned().replace(UUID.encode(), b"00000000-4a35-4c9c-8f2e-5a0d1c2b3a49"),
        tuned().replace(NAME.encode(), b"another"),
        re.sub(rb"<uuid>.*</uuid>", b"", tuned()),
    ):
        for work in (preview_definition, apply_definition):
            with pytest.raises(UsageError, match="not for -vm 7"):
                work(virsh, NAME, other, original, root)
    capitals = tuned().replace(UUID.encode(), UUID.upper().encode())
    assert preview_definition(virsh, NAME, capitals, original, root).changed


def test_a_document_that_was_dumped_without_passwords_is_refused(
    daemon: StandIn, root: Path
) -> None:
    virsh = Virsh(URI)
    without = tuned().replace(b" passwd='kept'", b"")
    spice = b"<graphics type='spice' passwd='a'/></devices>"
    without = without.replace(b"</devices>", spice.replace(b" passwd='a'", b""))
    with pytest.raises(UsageError, match="lacks the passwords of vnc, spice"):
        apply_definition(virsh, NAME, without, ORIGINAL.replace(b"</devices>", spice), root)


def test_a_restore_with_nothing_saved_says_where_something_is(daemon: StandIn, root: Path) -> None:
    with pytest.raises(InputError, match="only what this user's `homenode apply`"):
        restore_definition(Virsh(URI), NAME, root)
    with pytest.raises(InputError, match="no saved original"):
        forget_original(Virsh(URI), NAME, root)
    apply(root)
    with pytest.raises(InputError, match=f"applied with --connect {URI}"):
        restore_definition(Virsh("qemu:///system"), NAME, root)
    (saved,) = list_saved_originals(root, URI, NAME)
    damaged = DomainStore(root, URI, UUID.replace("6", "0"))  # of another domain
    damaged.save(ORIGINAL)
    (damaged.directory / "journal.jsonl").write_text("{}\n")
    damaged.directory.with_name(f"a{damaged.directory.name}").touch()
    assert list_saved_originals(root, URI, NAME) == (saved,)
    assert list_saved_originals(root, "qemu:///system", NAME) == ()
    for _ in range(2):
        damaged.drop()
        assert not damaged.directory.exists()


def test_a_saved_original_that_was_damaged_is_not_defined(daemon: StandIn, root: Path) -> None:
    apply(root)
    owned = daemon.definition()
    store = DomainStore(root, URI, UUID)
    entry = store.definition()
    assert entry is not None and entry.what is ChangeState.DONE
    path = store.definition_path(entry.before)
    original = path.read_bytes()
    path.write_bytes(b"<domain/>")
    with pytest.raises(InputError, match=f"with that sha256, found {compute_sha256(b'<domain/>')}"):
        restore_definition(Virsh(URI), NAME, root)
    assert daemon.definition() == owned
    assert store.read_document(store.save(original)) == original  # saved again, it is whole


def test_a_display_that_is_gone_has_lost_no_password() -> None:
    display = re.compile(rb"<graphics .*?/>")
    assert find_lost_passwords(ORIGINAL, ORIGINAL.replace(b" passwd='kept'", b"")) == ("vnc",)
    assert find_lost_passwords(ORIGINAL, display.sub(b"", ORIGINAL)) == ()


def test_a_device_more_than_was_tuned_is_an_edit() -> None:
    hostdev = (
        b"""<hostdev mode='subsystem' type='pci'><source><address bus='%d'/></source></hostdev>"""
    )
    tuned_one = ORIGINAL.replace(b"</devices>", hostdev % 1 + b"</devices>")
    printed = tuned_one.replace(
        b"</source></hostdev>", b"</source><address type='pci' bus='4'/></hostdev>"
    )
    assert not is_edited(tuned_one, ORIGINAL, printed)
    pinned = tuned("pin")  # an edit of what the layout changed counts as well
    assert is_printed(pinned, ORIGINAL, pinned)
    assert not is_printed(pinned, ORIGINAL, re.sub(rb"(vcpu='0' cpuset)='\d+", rb"\1='7", pinned))
    assert is_edited(
        tuned_one, ORIGINAL, printed.replace(b"</devices>", hostdev % 2 + b"</devices>")
    )


def test_a_restore_that_libvirt_refuses_leaves_the_step_as_it_was(
    daemon: StandIn, root: Path
) -> None:
    apply(root)
    daemon.put("refuses", "yes")
    with pytest.raises((HostError, ToolError)):
        restore_definition(Virsh(URI), NAME, root)
    entry = DomainStore(root, URI, UUID).definition()
    assert entry is not None and entry.what is ChangeState.DONE


@pytest.mark.parametrize("name", ["", "..", "../" + UUID, UUID + "/.."])
def test_a_record_is_of_a_uuid_alone(root: Path, name: str) -> None:
    with pytest.raises(InputError, match="expected a UUID"):
        DomainStore(root, URI, name)


def test_a_damaged_journal_says_what_to_do(daemon: StandIn, root: Path) -> None:
    apply(root)
    journal = DomainStore(root, URI, UUID).directory / "journal.jsonl"
    whole = journal.read_bytes()
    for damage in (b"{}\n", b"[1]\n", b'{"format": "homenode.apply/9"}\n', whole + b"nothing\n"):
        journal.write_bytes(damage)
        with pytest.raises(InputError, match=r"journal\.jsonl") as caught:
            restore_definition(Virsh(URI), NAME, root)
        assert "virsh define the correct file" in (caught.value.hint or "")


def test_a_user_and_root_get_the_hint_that_each_can_follow_about_a_directory_that_is_none(
    daemon: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for user, hint in (
        (1000, "with XDG_STATE_HOME naming"),
        (0, "make /var/lib/homenode a directory"),
    ):
        monkeypatch.setattr("os.geteuid", lambda user=user: user)
        with pytest.raises(HostError, match=hint):
            apply(tmp_path / "file")
        assert daemon.definition() == ORIGINAL


def test_records_lie_where_the_system_keeps_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert str(default_root()) == "/var/lib/homenode"
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_STATE_HOME", "/home/a/state")
    assert str(default_root()) == "/home/a/state/homenode"
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    assert default_root() == Path.home() / ".local/state/homenode"


def run_with_pins(daemon: StandIn, everywhere: str = "0-7") -> None:
    daemon.put("id", "4")
    for thread in ("vcpu.0", "vcpu.1", "vcpu.2", "vcpu.3", "emulator.0", "iothread.1"):
        daemon.put(f"pins/{thread}", everywhere)


def pins(daemon: StandIn) -> dict[str, str]:
    return {p.name: p.read_text().strip() for p in sorted((daemon.state / "pins").iterdir())}


def test_live_pins_move_the_threads_alone_and_restore_puts_them_back(
    daemon: StandIn, root: Path
) -> None:
    run_with_pins(daemon)
    before = pins(daemon)
    moved = apply_live_pins(Virsh(URI), NAME, tuned("pin"), root)
    assert len(moved.after) == len(moved.before) >= 5
    assert {pins(daemon)[f"vcpu.{i}"] for i in range(4)} >= {
        str(pin.pus) for pin in moved.after if pin.kind == "vcpu"
    }
    assert daemon.definition() == ORIGINAL
    entry = DomainStore(root, URI, UUID).pins()
    assert entry is not None and entry.facts["name"] == NAME
    commands = [words.split()[3:-1] for words in entry.by_hand.split("; ")]
    assert commands[0] == ["vcpupin", UUID, "0", "0-7"]
    assert commands[-2:] == [["emulatorpin", UUID, "0-7"], ["iothreadpin", UUID, "1", "0-7"]]
    again = apply_live_pins(Virsh(URI), NAME, tuned("pin"), root)
    assert again.after == ()
    journal = DomainStore(root, URI, UUID).journal
    journal.write(entry.with_state(ChangeState.BEGIN))  # a kill came before the outcome
    apply_live_pins(Virsh(URI), NAME, tuned("pin"), root)
    assert [entry.what for entry in journal.to_undo()] == [ChangeState.DONE]
    restore_live_pins(Virsh(URI), NAME, root)
    assert pins(daemon) == before
    lines = journal.read_entries()
    assert restore_live_pins(Virsh(URI), NAME, root) == ()
    assert journal.read_entries() == lines
    apply_live_pins(Virsh(URI), NAME, ORIGINAL, root)  # which pins no thread
    assert journal.to_undo() == ()
    daemon.put("pins/vcpu.0", "6")  # by somebody else, after the restore
    before = pins(daemon)
    apply_live_pins(Virsh(URI), NAME, tuned("pin"), root)
    restore_live_pins(Virsh(URI), NAME, root)
    assert pins(daemon) == before


def test_threads_that_were_moved_twice_go_back_to_where_they_were_first(
    daemon: StandIn, root: Path
) -> None:
    run_with_pins(daemon)
    before = pins(daemon)
    document = re.sub(rb"<emulatorpin.*?/>", b"", tuned("pin"))
    apply_live_pins(Virsh(URI), NAME, document, root)
    once = pins(daemon)
    daemon.put("pins/emulator.0", "3")  # by another program, as homenode did not move it
    swapped = re.sub(rb"vcpu='0' cpuset='\d+'", b"vcpu='0' cpuset='7'", document)
    apply_live_pins(Virsh(URI), NAME, swapped, root)
    assert pins(daemon)["vcpu.0"] == "7" != once["vcpu.0"]
    entry = DomainStore(root, URI, UUID).pins()
    assert entry is not None and entry.by_hand.count(" 0-7 --live") == 5
    restore_live_pins(Virsh(URI), NAME, root)
    assert pins(daemon) == before | {"emulator.0": "3"}


def test_live_pins_leave_offline_vcpus_and_say_where_memory_stays(daemon: StandIn) -> None:
    wide = b"<numatune><memory mode='strict' nodeset='0-3'/></numatune>\n  <iothreads>"
    (daemon.state / "definition.xml").write_bytes(ORIGINAL.replace(b"<iothreads>", wide))
    run_with_pins(daemon)
    (daemon.state / "pins/vcpu.3").unlink()
    narrow = ORIGINAL.replace(b"<iothreads>", wide.replace(b"0-3", b"1"))
    moved = preview_live_pins(Virsh(URI), NAME, tuned("pin", narrow))
    assert moved.strangers == CpuSet([0, 2, 3])
    assert {pin.number for pin in moved.after if pin.kind == "vcpu"} == {0, 1, 2}
    assert not preview_live_pins(Virsh(URI), NAME, tuned("pin")).strangers  # it is not bound


def test_a_pin_that_libvirt_refuses_takes_the_others_back(daemon: StandIn, root: Path) -> None:
    run_with_pins(daemon)
    before = pins(daemon)
    daemon.put("refuses-pin", "pins/vcpu.2 pins/vcpu.0=0-7")
    with pytest.raises(HostError, match=r"cannot set pins/vcpu\.2"):
        apply_live_pins(Virsh(URI), NAME, tuned("pin"), root)
    assert pins(daemon) == before | {"vcpu.0": pins(daemon)["vcpu.0"]} != before
    daemon.put("refuses-pin", "")
    apply_live_pins(Virsh(URI), NAME, tuned("pin"), root)
    daemon.put("refuses-pin", "pins/vcpu.2")
    swapped = re.sub(rb"vcpu='([02])' cpuset='\d+'", rb"vcpu='\1' cpuset='7'", tuned("pin"))
    with pytest.raises(HostError):
        apply_live_pins(Virsh(URI), NAME, swapped, root)
    daemon.put("refuses-pin", "pins/vcpu.0=0-7")
    with pytest.raises(HostError):
        restore_live_pins(Virsh(URI), NAME, root)
    (entry,) = DomainStore(root, URI, UUID).journal.to_undo()
    assert entry.what is ChangeState.UNDOING
    assert pins(daemon) == before | {"vcpu.0": pins(daemon)["vcpu.0"]} != before
    daemon.put("refuses-pin", "")
    restore_live_pins(Virsh(URI), NAME, root)
    assert pins(daemon) == before


def test_live_pins_refuse_what_pinning_cannot_do(daemon: StandIn, root: Path) -> None:
    with pytest.raises(UsageError, match="is shut off: --live-pins"):
        preview_live_pins(Virsh(URI), NAME, tuned("pin"))
    run_with_pins(daemon)
    with pytest.raises(UsageError, match=r"expected 8 vCPUs .* found 4 running"):
        apply_live_pins(Virsh(URI), NAME, tuned("pin-numa-smt"), root)
    with pytest.raises(UsageError, match=r"expected 2 vCPUs .* found 4 running"):
        apply_live_pins(Virsh(URI), NAME, ORIGINAL.replace(b">4</vcpu>", b">2</vcpu>"), root)
    (daemon.state / "pins/iothread.1").unlink()
    with pytest.raises(UsageError, match="iothread 1 is not running"):
        apply_live_pins(Virsh(URI), NAME, tuned("pin-numa"), root)


def test_pins_of_an_earlier_run_are_forgotten(daemon: StandIn, root: Path) -> None:
    run_with_pins(daemon)
    apply_live_pins(Virsh(URI), NAME, tuned("pin"), root)
    now = pins(daemon)
    daemon.put("id", "5")
    assert restore_live_pins(Virsh(URI), NAME, root) == ()
    assert pins(daemon) == now


@contextmanager
def process_of(domain: str, program: str = "/bin/sh") -> Iterator[int]:
    """The number of a process that a domain's QEMU is known by."""
    words = ["sh", "-c", "read line", "sh", "-uuid", domain]
    with subprocess.Popen(words, executable=program, stdin=subprocess.PIPE) as process:
        while not Path(f"/proc/{process.pid}/cmdline").read_bytes():  # until it is sh
            time.sleep(0.01)
        yield process.pid


def test_a_run_is_marked_by_the_start_of_the_first_process_with_its_uuid(tmp_path: Path) -> None:
    own = str(uuid.uuid4())
    assert run_mark(own) is None
    program = tmp_path / "s) h"
    program.symlink_to("/bin/sh")
    with process_of(own, str(program)) as first:
        mark = run_mark(own) or ""
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
        _, number, ticks = mark.split(":")
        started_s = int(ticks) / os.sysconf("SC_CLK_TCK")
        assert int(number) == first and uptime_s - 60 < started_s <= uptime_s
        with process_of(own):
            assert run_mark(own) == mark


def test_a_number_that_another_run_had_as_well_is_not_mistaken_for_that_run(
    daemon: StandIn, root: Path
) -> None:
    own = str(uuid.uuid4())  # other tests' processes have the usual one
    script = daemon.bin / "virsh"
    script.write_text(script.read_text().replace(UUID, own))
    original = ORIGINAL.replace(UUID.encode(), own.encode())
    (daemon.state / "definition.xml").write_bytes(original)
    run_with_pins(daemon)
    with process_of(own):
        apply_live_pins(Virsh(URI), NAME, tuned("pin", original), root)
    before = pins(daemon)
    # Who does not see the process has libvirt's number alone.
    assert restore_live_pins(Virsh(URI), NAME, root) and pins(daemon) != before
    with process_of(own):
        apply_live_pins(Virsh(URI), NAME, tuned("pin", original), root)
    # The host booted, and libvirt counts from the start again.
    run_with_pins(daemon, "4-7")
    with process_of(own):
        before = pins(daemon)
        assert restore_live_pins(Virsh(URI), NAME, root) == ()
        assert pins(daemon) == before
        apply_live_pins(Virsh(URI), NAME, tuned("pin", original), root)
        assert pins(daemon) != before
        assert restore_live_pins(Virsh(URI), NAME, root)
        assert pins(daemon) == before


def fill_disk(entry: ChangeEntry) -> None:
    raise HostError("no space")


@pytest.mark.parametrize(
    ("run_id", "run_state", "outcome"),
    [
        ("1", "paused", ChangeState.UNDONE),
        ("1", "running", ChangeState.KEPT),
        ("2", "paused", ChangeState.KEPT),
    ],
)
def test_a_paused_vm_is_ended_unless_its_guest_runs_or_another_started_it(
    daemon: StandIn, root: Path, run_id: str, run_state: str, outcome: ChangeState
) -> None:
    virsh = Virsh(URI)
    step = PausedStart(virsh=virsh, uuid=UUID, name=NAME)
    entry = step.do(open_paused_journal(root, virsh, UUID, NAME).write)
    daemon.put("id", run_id)
    daemon.put("run-state", run_state)
    with pytest.raises(HostError, match="no space"):  # recorded before it is ended, or not ended
        step.undo(entry, fill_disk)
    assert virsh.find_domain(UUID).is_active
    assert [entry.what for entry in end_paused(virsh, root, UUID, NAME)] == [outcome]
    assert virsh.find_domain(UUID).is_active is (outcome is ChangeState.KEPT)


def test_files_that_a_paused_start_made_go_unless_they_were_written_since(
    daemon: StandIn, root: Path, tmp_path: Path
) -> None:
    names = ("was-there", "made", "written", "cut-short")
    was_there, made, written, cut_short = paths = [tmp_path / name for name in names]
    was_there.touch()
    makes = tuple(map(str, paths))
    step = PausedStart(virsh=Virsh(URI), uuid=UUID, name=NAME, makes=makes)
    journal = open_paused_journal(root, Virsh(URI), UUID, NAME)
    daemon.put("down", "")
    with pytest.raises(HostError):
        step.do(journal.write)
    assert [entry.what for entry in journal.to_undo()] == [ChangeState.BEGIN]
    (daemon.state / "down").unlink()
    daemon.put("start-fails", "no memory")
    with pytest.raises(RejectedError):  # files that it made nevertheless are known by their times
        step.do(journal.write)
    assert journal.to_undo()[0].facts.keys() >= set(makes[1:])
    daemon.put("start-fails", "")
    entry = step.do(journal.write)
    assert entry.made == makes[1:] and "destroy" in entry.by_hand and UUID in entry.by_hand
    daemon.put("id", "1")
    daemon.put("run-state", "paused")
    for path in paths:
        path.touch()
    facts = entry.facts | {str(made): str(made.stat().st_mtime_ns), str(written): "1"}
    del facts[str(cut_short)]  # a kill came before its time was recorded
    step.undo(structs.replace(entry, facts=facts), journal.write)
    assert [path.exists() for path in paths] == [True, False, True, False]
    cut_short.touch()
    step.undo(structs.replace(entry, facts=facts), journal.write)  # off: a guest may have run
    assert cut_short.exists()


def test_threads_that_somebody_else_moved_stay(daemon: StandIn, root: Path) -> None:
    run_with_pins(daemon)
    apply_live_pins(Virsh(URI), NAME, tuned("pin"), root)
    daemon.put("pins/vcpu.1", "5")
    with pytest.raises(InputError, match="another program moved vcpu 1 to CPUs 5"):
        restore_live_pins(Virsh(URI), NAME, root)
    run_with_pins(daemon, "4-7")
    daemon.put("id", "5")
    apply_live_pins(Virsh(URI), NAME, tuned("pin"), root)
    daemon.put("pins/vcpu.1", "0-7")  # where it was in the run before
    with pytest.raises(InputError, match="another program moved vcpu 1 to CPUs 0-7"):
        restore_live_pins(Virsh(URI), NAME, root)


def test_a_missing_virsh_and_a_daemon_that_is_down_say_what_to_do(
    daemon: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.put("down", "")
    with pytest.raises(HostError, match=r"failed to connect.*\n  hint: systemctl start libvirtd"):
        Virsh(URI).find_domain(NAME)
    monkeypatch.setattr("shutil.which", lambda *words, **more: None)
    with pytest.raises(ToolError, match="hint: apt install libvirt-clients") as missing:
        Virsh(URI).find_domain(NAME)
    assert missing.value.exit_code == 3


def test_a_uuid_in_capitals_is_the_same_domain(daemon: StandIn) -> None:
    assert Virsh(URI).find_domain(UUID.upper()).name == NAME


def test_what_names_a_domain_on_a_command_line_is_no_option_id_or_file(daemon: StandIn) -> None:
    state = Virsh(URI).find_domain(NAME)
    assert state.argument == UUID
    for name, argument in (("vm-1.a", "vm-1.a"), ("12", UUID), ("a.xml", UUID), ("a b", UUID)):
        assert structs.replace(state, name=name).argument == argument


def test_a_number_that_virsh_takes_for_an_id_is_no_name(daemon: StandIn) -> None:
    daemon.put("id", "4")
    with pytest.raises(InputError, match="'4' is not the name of a domain, but the id of '-vm 7'"):
        Virsh(URI).find_domain("4")


def test_an_unknown_domain_is_bad_input(daemon: StandIn) -> None:
    with pytest.raises(InputError, match=rf"no VM named other; at {URI}: -vm 7 \(shut off\)"):
        Virsh(URI).find_domain("other")
    with pytest.raises(InputError) as refused:
        Virsh(URI).find_domain("other.xml")
    assert refused.value.hint == "virsh define other.xml"
    daemon.put("id", "4")
    with pytest.raises(InputError, match=r": -vm 7 \(running\)"):
        Virsh(URI).find_domain("other")
    for name in ("", " ", "a\nb"):
        with pytest.raises(UsageError):
            Virsh(URI).find_domain(name)


@pytest.mark.parametrize("uri", ["", "-h", "qemu", "qemu:///system evil", "file:///etc", "xen:///"])
def test_a_connection_must_be_a_uri_of_the_qemu_driver(uri: str) -> None:
    with pytest.raises(UsageError, match="expected a libvirt URI"):
        check_uri(uri)


def test_dominfo_and_pin_tables_of_old_and_new_versions_are_read() -> None:
    with pytest.raises(InputError, match="UUID"):
        parse_dominfo("Id: -\nName: a\n")
    old = "VCPU: CPU Affinity\n----------------------------------\n   0: 0-3\n  1: 4,6\n"
    new = " VCPU   CPU Affinity\n-----------------\n 0      0-3\n 1      4,6\n\n"
    assert parse_pins(old, "vcpu") == parse_pins(new, "vcpu")
    emulator = "emulator: CPU Affinity\n------\n       *: 0-1\n"
    assert [(p.number, str(p.pus)) for p in parse_pins(emulator, "emulator")] == [(0, "0-1")]
    assert parse_pins("0-1\n", "emulator") == parse_pins(emulator, "emulator")
    assert parse_pins("No IOThreads found for the domain\n", "iothread") == ()
    with pytest.raises(InputError):
        parse_pins("surprise\n", "vcpu")
    with pytest.raises(InputError):
        parse_pins("0-1\n", "vcpu")
