"""Every command that changes a host, killed at any of its calls, with edits of others in between:
nothing is lost, nothing is left behind, and what it did is undone byte for byte.

HOMENODE_KILLS=500 kills each command so often.
"""

import mmap
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import pytest

from homenode.change.apply.define_step import DomainChange
from homenode.change.apply.definition import apply_definitions, restore_definition
from homenode.change.apply.live_pins import apply_live_pins, restore_live_pins
from homenode.change.journal import journals_of_domains, lock_host
from homenode.change.retrain.execution import RetrainStep, open_retrain, retrain_journal
from homenode.errors import InputError
from homenode.measure.access.machine import LocalMachine
from homenode.measure.tool_setup import carry_out, take_back
from homenode.vm.domain.restore import restore, write_tuned
from homenode.vm.hypervisor.virsh import Virsh
from tests.apply_documents import NAME, ORIGINAL, tuned
from tests.change.test_host_lock import SmallHost, uuid_of
from tests.doctor.test_retrain import planned, sick
from tests.kills import Target, in_child
from tests.measure.test_setup import plan_of, tools  # noqa: F401 - a fixture
from tests.memory_directory import memory_directory
from tests.simulated_config import LINK_CONTROL_2, SimulatedConfig, no_wait
from tests.virsh_stand_in import URI, UUID, StandIn

KILLS = int(os.environ.get("HOMENODE_KILLS", "0"))
SEED = int(os.environ.get("HOMENODE_SEED", "20261123"))
TITLE = b"<title>theirs</title>"
HOST = "small-2n8c-2gpu"


class World(Protocol):
    """What a command changes, and who else does."""

    works: dict[str, Callable[[], object]]
    kills: int
    """Without HOMENODE_KILLS."""

    @property
    def look(self) -> Callable[[], None] | None:
        """Holds at every moment; None = nothing does."""

    def check(self) -> None:
        """Holds after a kill."""

    def edit(self, number: int) -> None:
        """What somebody else does in between."""

    def undo(self) -> None:
        """Undoes all, and looks that nothing is lost and nothing left."""


def parts_in(*directories: Path) -> list[Path]:
    return [path for directory in directories for path in directory.rglob("*.part")]


class Domain:
    """A domain that is given layouts, restored, and edited by others."""

    kills = 16

    def __init__(self, directory: Path, patched: pytest.MonkeyPatch) -> None:
        self.directory, self.episode, self.is_edited = directory, 0, False
        patched.setenv("PATH", f"{directory / 'daemon/bin'}:/usr/bin:/bin")
        self.daemon = StandIn(directory / "daemon", NAME, ORIGINAL)
        self.works: dict[str, Callable[[], object]] = {
            "pin": lambda: self.apply("pin"),
            "pin-numa": lambda: self.apply("pin-numa"),
            "restore": lambda: restore_definition(Virsh(URI), NAME, self.root),
            "keep edits": lambda: restore_definition(Virsh(URI), NAME, self.root, keep_edits=True),
            "threads": lambda: self.threads("pin"),
        }
        self.begin()

    @property
    def root(self) -> Path:
        return self.directory / f"state{self.episode}"

    def begin(self) -> None:
        self.episode += 1
        self.is_edited = False
        self.daemon.put_definition(ORIGINAL)
        for vcpu in range(4):
            self.daemon.put(f"pins/vcpu.{vcpu}", "0-7")
        self.daemon.put("pins/emulator.0", "0-7")
        self.daemon.put("pins/iothread.1", "0-7")

    def apply(self, layout: str) -> None:
        virsh = Virsh(URI)
        original = virsh.read_definition(UUID)
        change = DomainChange(name=NAME, tuned=tuned(layout, original), original=original)
        apply_definitions(virsh, (change,), self.root)

    def threads(self, layout: str) -> None:
        self.daemon.put("id", "7")
        apply_live_pins(Virsh(URI), NAME, tuned(layout), self.root)

    def look(self) -> None:
        assert not parts_in(self.daemon.state)

    def check(self) -> None:
        self.settled()
        self.daemon.state.joinpath("id").unlink(missing_ok=True)
        assert (TITLE in self.daemon.definition()) == self.is_edited, "an edit is lost"

    def settled(self) -> None:
        """What the killed one has started has ended; a virsh that was killed leaves its own."""
        with lock_host(self.root, URI, "the test"):
            for left in self.daemon.state.glob("new.*"):
                left.unlink()

    def edit(self, number: int) -> None:
        now = self.daemon.definition()
        if TITLE not in now:
            self.daemon.put_definition(now.replace(b"</name>", b"</name>" + TITLE))
        self.is_edited = True

    def undo(self) -> None:
        wanted = ORIGINAL.replace(b"</name>", b"</name>" + TITLE) if self.is_edited else ORIGINAL
        self.daemon.put("id", "7")
        restore_live_pins(Virsh(URI), NAME, self.root)
        assert {one.read_text().strip() for one in self.daemon.state.glob("pins/*")} == {"0-7"}
        (self.daemon.state / "id").unlink()
        if self.is_edited:
            with suppress(InputError):  # where no layout is left in it, there is nothing to refuse
                restore_definition(Virsh(URI), NAME, self.root)
            assert TITLE in self.daemon.definition()
            with suppress(InputError):  # nothing was ever saved
                restore_definition(Virsh(URI), NAME, self.root, keep_edits=True)
        else:
            with suppress(InputError):
                restore_definition(Virsh(URI), NAME, self.root)
        assert self.daemon.definition() == wanted
        assert parts_in(self.directory) == []
        self.begin()


class Several:
    """Domains that are changed together."""

    kills = 6

    def __init__(self, directory: Path, patched: pytest.MonkeyPatch) -> None:
        self.host, self.root, self.edited = SmallHost(directory), directory / "records", set[str]()
        patched.setenv("PATH", f"{self.host.bin}:/usr/bin:/bin")
        self.names = ("vm0", "vm1", "vm2")
        self.before = self.host.definitions()
        self.works: dict[str, Callable[[], object]] = {
            "pin": lambda: self.apply("pin"),
            "pin-numa": lambda: self.apply("pin-numa"),
            "restore": self.restore,
        }

    def apply(self, layout: str) -> None:
        virsh = Virsh(URI)
        now = {name: virsh.read_definition(virsh.find_domain(name).uuid) for name in self.names}
        changes = [
            DomainChange(name=name, tuned=tuned(layout, original), original=original)
            for name, original in now.items()
        ]
        apply_definitions(virsh, changes, self.root)

    def restore(self) -> None:
        for name in reversed(self.names):
            with suppress(InputError):  # never begun
                restore_definition(Virsh(URI), name, self.root, keep_edits=True)

    def look(self) -> None:
        assert not parts_in(self.host.state)

    def check(self) -> None:
        with lock_host(self.root, URI, "the test"):
            now = self.host.definitions()
        assert {name for name, text in now.items() if TITLE in text} == self.edited
        known = {name for journal in journals_of_domains(self.root) for name in [journal.head.run]}
        changed = {name for name, text in now.items() if b"<vcpupin" in text}
        assert {name.removesuffix(".xml") for name in changed} <= known

    def edit(self, number: int) -> None:
        path = self.host.state / f"{uuid_of(number % 3)}.xml"
        now = path.read_bytes()
        if TITLE not in now:
            path.write_bytes(now.replace(b"</name>", b"</name>" + TITLE))
        self.edited.add(path.name)

    def undo(self) -> None:
        self.restore()
        for name, text in self.before.items():
            wanted = text.replace(b"</name>", b"</name>" + TITLE) if name in self.edited else text
            assert self.host.definitions()[name] == wanted
            (self.host.state / name).write_bytes(text)
        assert parts_in(self.root) == []
        self.edited.clear()
        shutil.rmtree(self.root / "domains")


class Link:
    """A port whose target speed is set."""

    kills = 16

    def __init__(self, directory: Path) -> None:
        self.space = SimulatedConfig(sick())
        for bdf, content in self.space.spaces.items():
            shared = mmap.mmap(-1, len(content))  # which outlives the process that writes it
            shared[:] = bytes(content)
            self.space.spaces[bdf] = shared  # type: ignore[assignment]
        self.at_first = {bdf: bytes(content) for bdf, content in self.space.spaces.items()}
        self.port = planned(self.space.host, self.space).port
        self.directory, self.episode = directory, 0
        self.works: dict[str, Callable[[], object]] = {"retrain": self.retrain}

    @property
    def more(self) -> tuple[Target, ...]:
        return ((self.space, "write"),)

    def retrain(self) -> None:
        journal = retrain_journal(self.port, str(self.directory / f"run{self.episode}"))
        with journal.files.hold_lock("in use"):
            plan = planned(self.space.host, self.space)
            RetrainStep(plan, self.space, open_retrain(journal), no_wait).do(journal.write)

    look = None

    def check(self) -> None:
        journal = retrain_journal(self.port, str(self.directory / f"run{self.episode}"))
        entry = open_retrain(journal)
        is_written = self.space.read(self.port, LINK_CONTROL_2, 2) != 0x1042
        assert not is_written or entry is not None or journal.to_undo(), "no record of it"
        assert entry is None or entry.before == "0x1042"

    def edit(self, number: int) -> None:
        self.space.reaches[self.port] = 2  # from now on it cannot come up

    def undo(self) -> None:
        can = self.port not in self.space.reaches
        self.retrain()
        target = self.space.read(self.port, LINK_CONTROL_2, 2)
        assert target == (0x1044 if can else 0x1042) or not can
        journal = retrain_journal(self.port, str(self.directory / f"run{self.episode}"))
        assert open_retrain(journal) is None
        assert parts_in(self.directory) == []
        for bdf, content in self.at_first.items():
            self.space.spaces[bdf][:] = content
        self.space.reaches.clear()
        self.episode += 1


class Tools:
    """Programs that bench setup builds and removes."""

    kills = 4

    def __init__(self, directory: Path, programs: Path) -> None:
        self.prefix, self.state, self.theirs = (
            directory / "prefix",
            directory / "state",
            set[Path](),
        )
        plan = plan_of(programs, self.prefix)
        self.works: dict[str, Callable[[], object]] = {
            "setup": lambda: carry_out(plan, LocalMachine(), self.state, lambda step: None),
            "remove": lambda: take_back(self.prefix),
        }

    @property
    def programs(self) -> list[Path]:
        with suppress(FileNotFoundError):
            return sorted((self.prefix / "bin").iterdir())
        return []

    def look(self) -> None:
        for program in self.programs:
            with suppress(FileNotFoundError):  # removed meanwhile
                assert program.read_text() in ("#!/bin/true\n", "theirs"), program

    def check(self) -> None:
        self.look()
        assert {one.name for one in self.programs} <= {"nvbandwidth", "theirs"}

    def edit(self, number: int) -> None:
        (self.prefix / "bin").mkdir(parents=True, exist_ok=True)
        theirs = self.prefix / "bin/theirs"
        theirs.write_text("theirs")
        self.theirs.add(theirs)

    def undo(self) -> None:
        self.works["setup"]()
        program, *_sources = take_back(self.prefix)
        assert program == str(self.prefix / "bin/nvbandwidth")
        assert self.programs == sorted(self.theirs)
        assert parts_in(self.prefix, self.state) == []


class Outputs:
    """A document in a directory of the user's: written, written over, and restored."""

    kills = 16

    def __init__(self, directory: Path) -> None:
        self.directory, self.out = directory / "user", directory / "user/out.xml"
        self.directory.mkdir()
        self.new = ORIGINAL.replace(b"</name>", b"</name>" + TITLE)
        self.over = self.new.replace(b"theirs", b"again")
        self.whole = {ORIGINAL, self.new, self.over}
        self.works: dict[str, Callable[[], object]] = {
            "plan": lambda: write_tuned(self.out, ORIGINAL, self.new),
            "over": lambda: write_tuned(self.out, ORIGINAL, self.over),
        }

    look = None
    """A part is there for two calls, whole, and only while a file is replaced."""

    def check(self) -> None:
        assert len(parts_in(self.directory)) <= 1
        there = {one.name for one in self.directory.iterdir() if one.suffix != ".part"}
        assert there <= {"out.xml", "out.xml.orig", "out.xml.orig.sha256", "theirs"}
        assert not self.out.exists() or self.out.read_bytes() in self.whole

    def edit(self, number: int) -> None:
        (self.directory / "theirs").write_text("theirs")

    def undo(self) -> None:
        self.works["plan"]()
        restore(str(self.out))
        assert self.out.read_bytes() == ORIGINAL
        assert {one.name for one in self.directory.iterdir()} <= {"out.xml", "theirs"}
        self.out.unlink()


@pytest.fixture(
    params=[
        "apply",
        "apply several",
        "retrain",
        "setup",
        "plan -o",
    ]
)
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with memory_directory() as directory:
        if request.param == "apply":
            yield Domain(directory, monkeypatch)
        elif request.param == "apply several":
            yield Several(directory, monkeypatch)
        elif request.param == "retrain":
            yield Link(directory)
        elif request.param == "setup":
            yield Tools(directory, request.getfixturevalue("tools"))
        else:
            yield Outputs(directory)


def test_what_is_killed_at_any_call_is_undone_whole(world: World) -> None:
    choose = random.Random(SEED)
    more: tuple[Target, ...] = getattr(world, "more", ())
    calls: dict[str, int] = {}
    for name, work in world.works.items():
        counted = in_child(work, None, more=more)
        assert counted is not None
        calls[name] = counted
    world.check()
    world.undo()
    wanted = KILLS or world.kills
    killed = edits = number = 0
    while killed < wanted:
        number += 1
        assert number < 4 * wanted, f"only {killed} of {number} were killed"
        name = choose.choice(sorted(world.works))
        at = choose.randint(1, max(calls[name], 1))
        after, with_children = choose.random() < 0.5, choose.random() < 0.5
        ended = in_child(
            world.works[name],
            at,
            after=after,
            with_children=with_children,
            more=more,
            look=world.look,
        )
        print(f"{name} {at=} {after=} {with_children=} {ended=}")  # shown where it fails
        if ended is None:
            killed += 1
        else:
            calls[name] = max(ended, 2)
        world.check()
        if choose.random() < 0.25:
            world.edit(number)
            edits += 1
        if choose.random() < 0.25:
            world.undo()
    world.undo()
    print(f"{killed} kills of {number} commands, {edits} edits of others")
