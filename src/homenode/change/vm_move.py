"""VmMove: a VM that is shut off on one host and started on another, as steps. [I/O]

libvirt there defines the VM, and its UEFI variables get their file there, before the guest is asked
to shut down: what it refuses costs nothing. Once it is off, the variables are copied.
Both hosts are locked for that, and again from the copy to the end: not while a guest shuts down.
The guest never runs on both hosts, and one of them has its definition at every moment. A move that
failed or was cut short is undone: `homenode restore`. One that came to its end is not; the old
host's definition stays saved next to the journal.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from msgspec import Struct, structs

from homenode.change.apply.define_step import not_kept
from homenode.change.apply.store import DomainStore, journals_of_domains, sha256
from homenode.change.host_lock import host_locked
from homenode.change.journal import Journal
from homenode.change.step import ChangeEntry, ChangeState, ChangeStep, Note
from homenode.errors import HomenodeError, HostError, InputError
from homenode.vm.domain.merge import same_definition
from homenode.vm.domain.read import nvram_file, open_domain, read_running_domain
from homenode.vm.hypervisor.connection import machine_of, with_connection
from homenode.vm.hypervisor.virsh import DaemonFolder, RefusedError, Virsh
from homenode.wording import command_line

DEFINE, SHUT_DOWN, START, UNDEFINE = "define-there", "shut-down", "start-there", "undefine-here"
CREATE_NVRAM, COPY_NVRAM = "create-nvram", "copy-nvram"
KINDS = (CREATE_NVRAM, DEFINE, SHUT_DOWN, COPY_NVRAM, START, UNDEFINE)
_FOLDER = "moves"
_ASK_AGAIN_S, _MAY_YET_S = 5.0, 20.0
_COMMAND = "homenode pool drain or defragment --apply"
_ALONE = "no other homenode that moves this VM"


class PowerOff(Struct, frozen=True, kw_only=True):
    """How a guest is shut down: asked, and where it does not within the time, ended or not."""

    timeout_s: float = 300.0
    ends: bool = False

    def of(self, virsh: Virsh, uuid: str, name: str) -> None:
        """Raises HostError for a guest that still runs."""
        left_s = self.timeout_s
        while left_s > 0:  # a guest that is just starting does not hear the first time
            try:
                virsh.shut_down(uuid)
            except RefusedError:
                if virsh.domain(uuid).is_active:
                    raise
            if virsh.is_off_within(uuid, min(_ASK_AGAIN_S, left_s)):
                return
            left_s -= _ASK_AGAIN_S
        if not self.ends:
            raise HostError(
                f"{name}: expected its guest to shut down within {self.timeout_s:g} s, found it "
                "running; it was asked, and may do so yet",
                hint="shut it down from inside, or --destroy ends it",
            )
        virsh.destroy(uuid)


class VmMove(Struct, frozen=True, kw_only=True):
    """From `here` to `there`. root: of the records. original, tuned: sha256 of the documents in
    `store`. neighbours: UUIDs of the VMs there that its plan knows. locks: see locked."""

    root: Path
    here: Virsh
    there: Virsh
    uuid: str
    name: str
    original: str
    tuned: str
    power_off: PowerOff = PowerOff()
    neighbours: frozenset[str] = frozenset()
    locks: tuple[int, ...] = ()

    @property
    def store(self) -> DomainStore:
        return _store(self.root, self.here.connect, self.uuid)

    @property
    def journal(self) -> Journal:
        return self.store.journal

    @property
    def nvram(self) -> str | None:
        """The file of its UEFI variables."""
        return nvram_file(open_domain(self.store.document(self.original), self.name))

    def step(self, kind: str) -> ChangeStep:
        is_of_nvram = kind in (CREATE_NVRAM, COPY_NVRAM)
        return (NvramStep if is_of_nvram else MoveStep)(move=self, kind=kind)

    def entry(self, kind: str, by_hand: tuple[str, ...], **facts: str) -> ChangeEntry:
        """Of a step that begins."""
        known = {"name": self.name, "from": self.here.connect, "to": self.there.connect}
        return ChangeEntry(
            what=ChangeState.BEGIN,
            kind=kind,
            subject=self.uuid,
            before=self.original,
            after=self.tuned,
            by_hand=command_line(*by_hand),
            facts=known | facts,
        )

    @contextmanager
    def locked(self) -> Iterator["VmMove"]:
        """The move with the locks of both hosts, which all moves take in one order."""
        with ExitStack() as held:
            locks: list[int] = []
            for connect in sorted((self.here.connect, self.there.connect), key=machine_of):
                locks += held.enter_context(host_locked(self.root, connect, _COMMAND))
            yield structs.replace(self, locks=tuple(locks))

    def check_neighbours(self) -> None:
        """That no VM which the plan does not know has its PUs or devices there by now."""
        own = _taken(self.store.document(self.tuned))
        for uuid in self.there.domains(running=True).keys() - {self.uuid, *self.neighbours}:
            shared: set[object] = set()
            with suppress(InputError):  # it has ended by now
                shared = own & _taken(self.there.live_document(uuid))
            if shared:
                raise HostError(
                    f"{self.name}: expected what it gets at {self.there.connect} to be free, found "
                    f"{', '.join(map(str, sorted(shared, key=str)))} taken by {uuid}",
                    hint="capture the pool again: homenode pool capture ... --again",
                )

    def check_off(self, virsh: Virsh) -> None:
        """So that the guest never runs twice on its disks."""
        state = virsh.find(self.uuid)
        if state is not None and state.is_active:
            raise HostError(
                f"{self.name}: expected it shut off at {virsh.connect}, found it {state.state}"
            )


class MoveStep(Struct, frozen=True, kw_only=True):
    """One of KINDS. See ChangeStep. before, after of its entries: the definition here, and the one
    for there; facts: the VM's `name`, `from` and `to` as URIs, and `found`: what libvirt there made
    of the definition."""

    move: VmMove
    kind: str

    def do(self, note: Note) -> ChangeEntry:
        move, own = self.move, self.move.uuid
        if self.kind == DEFINE and move.there.find(own) is not None:
            raise InputError(f"{move.name}: expected none at {move.there.connect}, found it there")
        back = ("define", str(move.store.document_path(move.original)))
        by_hand = {
            DEFINE: ("virsh", "-c", move.there.connect, "undefine", own),
            SHUT_DOWN: ("virsh", "-c", move.here.connect, "start", own),
            START: ("virsh", "-c", move.there.connect, "shutdown", own),
            UNDEFINE: ("virsh", "-c", move.here.connect, *back),
        }
        entry = move.entry(self.kind, by_hand[self.kind])
        if self.kind == UNDEFINE and move.here.domain(own).autostart:
            entry = structs.replace(entry, facts=entry.facts | {"autostart": "yes"})
        note(entry)
        if self.kind == DEFINE:
            entry = structs.replace(entry, facts=entry.facts | {"found": self._define()})
        elif self.kind == SHUT_DOWN:
            move.power_off.of(move.here, own, move.name)
        elif self.kind == START:
            move.check_off(move.here)
            if move.here.disk_sizes(own) != move.there.disk_sizes(own):
                raise HostError(
                    f"{move.name}: expected its disks at {move.there.connect}, found other files "
                    "under their paths: they have other sizes"
                )
            move.there.start(own, move.locks)
        else:
            self._undefine(starts_with_host="autostart" in entry.facts)
        note(entry.now(ChangeState.DONE))
        return entry.now(ChangeState.DONE)

    def undo(self, entry: ChangeEntry, note: Note) -> ChangeEntry:
        """Raises InputError for a definition there that was edited since."""
        move, own = self.move, entry.subject
        here, there = move.here.find(own), move.there.find(own)
        found = entry.facts.get("found")
        is_ours = (
            self.kind != DEFINE
            or there is None
            or found is None
            or same_definition(move.there.definition(own), move.store.document(found))
        )
        if not is_ours:
            raise InputError(
                f"{move.name}: expected the definition that its move gave it on the new host, "
                "found another: it was edited since",
                hint=f"to drop the edits: {entry.by_hand}",
            )
        note(entry.now(ChangeState.UNDOING))
        if self.kind == UNDEFINE:
            if here is None:
                move.here.define(str(move.store.document_path(entry.before)), move.locks)
            if entry.facts.get("autostart"):
                move.here.set_autostart(own)
        elif self.kind == START and there is not None and there.is_active:
            move.power_off.of(move.there, own, move.name)
        elif self.kind == SHUT_DOWN:
            # Where a kill came after the question, the guest may shut down yet.
            was_asked = entry.what is ChangeState.BEGIN
            most_s = min(_MAY_YET_S, move.power_off.timeout_s) if was_asked else 0
            if here is not None and move.here.is_off_within(own, most_s):
                move.check_off(move.there)
                move.here.start(own, move.locks)
        elif self.kind == DEFINE and there is not None:
            move.check_off(move.there)
            move.there.undefine(own)
        note(entry.now(ChangeState.UNDONE))
        return entry.now(ChangeState.UNDONE)

    def is_done(self, entry: ChangeEntry) -> bool:
        here, there = self.move.here.find(entry.subject), self.move.there.find(entry.subject)
        if self.kind == DEFINE:
            return there is not None
        if self.kind == SHUT_DOWN:
            return here is None or not here.is_active
        if self.kind == START:
            return there is not None and there.is_active
        return here is None

    def _define(self) -> str:
        """sha256 of the definition that libvirt made of it."""
        move = self.move
        move.there.define(str(move.store.document_path(move.tuned)), move.locks)
        move.there.disk_sizes(move.uuid)
        found = move.there.definition(move.uuid)
        if lost := not_kept(move.store.document(move.tuned), found):
            raise HostError(
                f"{move.name}: expected libvirt at {move.there.connect} to keep what it was given, "
                f"found changed: {'; '.join(lost)}"
            )
        return move.store.save(found)

    def _undefine(self, *, starts_with_host: bool) -> None:
        move = self.move
        move.check_off(move.here)
        if not same_definition(move.here.definition(move.uuid), move.store.document(move.original)):
            raise InputError(
                f"{move.name}: expected the definition that was moved, found another: it was "
                "edited meanwhile"
            )
        if starts_with_host:
            move.there.set_autostart(move.uuid)
        move.here.undefine(move.uuid)


class NvramStep(Struct, frozen=True, kw_only=True):
    """CREATE_NVRAM, while the guest runs here, or COPY_NVRAM, once it is off: its UEFI variables
    as a file of the new host. See ChangeStep.

    Facts: those of MoveStep; `path`; `pool`: the temporary storage pools' name, which no other step
    has; `creates`: there was no such file; `copied`: sha256 of the variables, which from then on
    are those of the new host.
    """

    move: VmMove
    kind: str

    def do(self, note: Note) -> ChangeEntry:
        move = self.move
        path = Path(move.nvram or "")
        by_hand = ("virsh", "-c", move.there.connect, "vol-delete", "--vol", str(path))
        entry = move.entry(self.kind, by_hand, path=str(path), pool=f"homenode-{uuid4()}")
        note(entry)
        with self._folder(move.here, entry) as here, self._folder(move.there, entry) as there:
            if self.kind == COPY_NVRAM:
                move.check_off(move.here)
                content = here.read(path.name)
                there.write(path.name, content)
                fact = {"copied": sha256(content)}
            elif there.has(path.name):
                raise InputError(
                    f"{move.name}: expected no UEFI variables of its name at "
                    f"{move.there.connect}, found {path}",
                    hint="of an earlier VM: remove the file; of both hosts: move the VM by hand",
                )
            else:
                fact = {"creates": "yes"}
                note(structs.replace(entry, facts=entry.facts | fact))
                there.create(path.name, here.read(path.name))
        done = structs.replace(entry, what=ChangeState.DONE, facts=entry.facts | fact)
        note(done)
        return done

    def undo(self, entry: ChangeEntry, note: Note) -> ChangeEntry:
        """The guest may have run there: what it wrote is taken back."""
        move, path = self.move, Path(entry.facts["path"])
        note(entry.now(ChangeState.UNDOING))
        with self._folder(move.here, entry) as here, self._folder(move.there, entry) as there:
            if not there.has(path.name):
                pass
            elif "creates" in entry.facts:
                there.remove(path.name)
            elif "copied" in entry.facts:
                move.check_off(move.there)
                move.check_off(move.here)
                content = there.read(path.name)
                if not here.has(path.name):
                    here.create(path.name, content)
                elif here.read(path.name) != content:
                    here.write(path.name, content)
        note(entry.now(ChangeState.UNDONE))
        return entry.now(ChangeState.UNDONE)

    def is_done(self, entry: ChangeEntry) -> bool:
        path = Path(entry.facts["path"])
        with self._folder(self.move.there, entry) as there:
            known = entry.facts.get("copied")
            return there.has(path.name) and known in (None, sha256(there.read(path.name)))

    def _folder(self, virsh: Virsh, entry: ChangeEntry) -> AbstractContextManager[DaemonFolder]:
        pool = entry.facts.get("pool", f"homenode-{entry.subject}")
        return virsh.folder(Path(entry.facts["path"]).parent, pool, self.move.locks)


def _taken(document: bytes) -> set[object]:
    """PUs and devices that a VM of that definition has for itself."""
    vm = read_running_domain(document, running=True)
    pus = (pu for pins in vm.vcpu_pins if pins is not None for pu in pins)
    return {*pus, *vm.devices, *vm.mediated}


def _store(root: Path, connect: str, uuid: str) -> DomainStore:
    return DomainStore(root, connect, uuid, folder=_FOLDER, command=_COMMAND)


def planned_move(
    root: Path,
    here: Virsh,
    there: Virsh,
    uuid: str,
    documents: tuple[bytes, bytes],
    power_off: PowerOff,
    neighbours: frozenset[str] = frozenset(),
) -> VmMove:
    """A move, with its documents saved: the definition here, and the tuned one. root, neighbours:
    see VmMove. Raises InputError for a VM whose last move was cut short."""
    name = here.domain(uuid).name
    store = _store(root, here.connect, uuid)
    for journal in move_journals(root, f"{uuid}@*"):
        if journal.to_undo():
            words = with_connection(journal.stored_head().connect, "homenode", "restore", uuid)
            raise InputError(
                f"{name}: expected no move that was cut short, found one",
                hint=f"{command_line(*words)} undoes it",
            )
    return VmMove(
        root=root,
        here=here,
        there=there,
        uuid=uuid,
        name=name,
        original=store.save(documents[0]),
        tuned=store.save(documents[1]),
        power_off=power_off,
        neighbours=neighbours,
    )


StepOf = Callable[[ChangeEntry], ChangeStep]
"""Of steps that belong to a move and are not of KINDS."""


def carry_out(move: VmMove, others: StepOf) -> None:
    """Move it. Raises what went wrong, once all is undone; where that fails too, the hint names the
    command that undoes it later."""
    with move.journal.files.locked(_ALONE):
        _carry_out(move, others)


def _carry_out(move: VmMove, others: StepOf) -> None:
    try:
        _do(move, CREATE_NVRAM, DEFINE)
        move.step(SHUT_DOWN).do(move.journal.write)
        _do(move, COPY_NVRAM, START, UNDEFINE)
    except BaseException as error:
        try:
            _undo(move, others)
        except HomenodeError as second:
            words = with_connection(move.here.connect, "homenode", "restore", move.uuid)
            first = error.message if isinstance(error, HomenodeError) else "interrupted"
            raise HostError(
                f"{first}; and it could not be undone: {second.message}",
                hint=f"{command_line(*words)} undoes it",
            ) from None
        raise
    _finish(move.journal)


def _do(move: VmMove, *kinds: str) -> None:
    with move.locked() as own:
        own.check_neighbours()
        for kind in kinds:
            if own.nvram or kind not in (CREATE_NVRAM, COPY_NVRAM):
                own.step(kind).do(own.journal.write)


def _finish(journal: Journal) -> None:
    journal.write(*(entry.now(ChangeState.KEPT) for entry in journal.to_undo()))


def _undo(move: VmMove, others: StepOf) -> None:
    with move.locked() as own:
        own.journal.undo(lambda one: own.step(one.kind) if one.kind in KINDS else others(one))


def move_journals(root: Path, pattern: str = "*@*") -> Iterator[Journal]:
    """Those of all VMs that were moved from this user's hosts."""
    for journal in journals_of_domains(root, pattern, folder=_FOLDER):
        head = structs.replace(journal.head, command=_COMMAND)
        yield Journal(journal.files, head)


class CutShort(Struct, frozen=True, kw_only=True):
    """A move that a kill cut short, or whose undo failed."""

    uuid: str
    name: str
    entries: tuple[ChangeEntry, ...]


def cut_short(root: Path, connect: str, domain: str) -> CutShort | None:
    """The open move of a domain by its name or UUID from this daemon."""
    for journal in move_journals(root):
        entries = journal.to_undo()
        own = [one for one in entries if domain in (one.subject, one.facts.get("name"))]
        if own and journal.stored_head().connect == connect:
            return CutShort(
                uuid=own[0].subject, name=own[0].facts.get("name", domain), entries=entries
            )
    return None


def undo_cut_short(root: Path, connect: str, one: CutShort, others: StepOf) -> bool:
    """Whether the VM is back; False where its move had come to its end but for the last line."""
    moved = [entry for entry in one.entries if entry.kind in KINDS]
    first = moved[0] if moved else one.entries[0]
    move = VmMove(
        root=root,
        here=Virsh(connect),
        there=Virsh(first.facts.get("to", connect)),
        uuid=one.uuid,
        name=one.name,
        original=first.before or "",
        tuned=first.after or "",
    )
    last = next((entry for entry in moved if entry.kind == UNDEFINE), None)
    is_undoing = any(entry.what is ChangeState.UNDOING for entry in one.entries)
    with move.journal.files.locked(_ALONE):
        if last is not None and not is_undoing and move.step(UNDEFINE).is_done(last):
            _finish(move.journal)
            return False
        _undo(move, others)
    return True
