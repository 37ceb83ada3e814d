"""Definition: a tuned document put in the place of a domain's definition, and undone. [I/O]

What is about to happen is on disk before libvirt hears of it. libvirt replaces a definition whole
or not at all, so a kill at any moment leaves the old one or the new one, the record says which two
those are, and `restore_definition` finds the way back from either.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from homenode.apply.domain_diff import (
    difference_count,
    is_edited,
    is_printed,
    not_kept,
    passwords_lost,
)
from homenode.apply.obstacles import Obstacle, obstacles
from homenode.apply.store import DomainStore, Record, Step, other_daemons, saved_originals, sha256
from homenode.domain.merge import take_out
from homenode.domain.read import open_domain, read_vm
from homenode.domain.xml_equivalence import same_definition
from homenode.errors import HostError, InputError, UsageError
from homenode.hypervisor.connection import with_connection
from homenode.hypervisor.domain_state import DomainState
from homenode.hypervisor.virsh import RefusedError, Virsh, is_lost
from homenode.wording import command_line


@dataclass(frozen=True, slots=True)
class Applied:
    """What was done, or would be. defined: as libvirt prints it now; None where nothing was done.

    original, tuned: where the saved documents lie (would lie). obstacles: why it would be refused.
    changed: False where the domain had this definition already.
    edited: it has more changes than libvirt makes of the tuned document: somebody edited it at the
    same moment, and restore will not drop that.
    """

    state: DomainState
    original: Path
    tuned: Path
    defined: bytes | None
    obstacles: tuple[Obstacle, ...]
    changed: bool
    edited: bool = False


def preview_definition(
    virsh: Virsh, name: str, tuned: bytes, original: bytes, root: Path
) -> Applied:
    """What apply_definition would do; changes nothing, writes nothing. Raises as it does."""
    state = virsh.domain(name)
    _check_identity(state, tuned, original)
    store = DomainStore(root, virsh.connect, state.uuid)
    _check_current(virsh, state, original)
    base = _base(store, state, original)
    against = _obstacles(virsh, state, tuned)
    return Applied(
        state,
        store.document_path(base),
        store.document_path(sha256(tuned)),
        None,
        against,
        tuned != original,
    )


def apply_definition(
    virsh: Virsh,
    name: str,
    tuned: bytes,
    original: bytes,
    root: Path,
    *,
    host_lock: Sequence[int] = (),
) -> Applied:
    """Define a tuned document over a domain's definition, which is saved first.

    original: what `virsh.definition` gave, from which `tuned` was made. host_lock: the caller's, on
    the host, which a virsh that defines keeps to its end.
    A second apply keeps the first original. Raises InputError where the definition changed since it
    was read or since the last apply, UsageError with every obstacle, HostError where libvirt
    refuses: the definition is then as it was.
    """
    state = virsh.domain(name)
    _check_identity(state, tuned, original)
    store = DomainStore(root, virsh.connect, state.uuid)
    with store.locked() as lock, _way_back_named(virsh, state):
        _check_current(virsh, state, original)
        base = _base(store, state, original)
        _refuse(_obstacles(virsh, state, tuned))
        record = Record(
            virsh.connect,
            state.name,
            state.uuid,
            Step.APPLYING,
            base,
            store.save(tuned),
            store.save(original),
        )
        _begin(virsh, store, record, original)
        answered = edited = False
        try:
            virsh.define(str(store.document_path(record.tuned)), (lock, *host_lock))
            answered = True
        except RefusedError:
            answered = True
            raise
        finally:
            # Also after a failure: it may have happened all the same.
            now = virsh.definition(state.uuid)
            untouched = same_definition(now, original)
            if untouched and base == sha256(original) and answered:
                store.write_record(replace(record, step=Step.RESTORED))
            elif not untouched and is_edited(tuned, original, now):
                edited = True  # since it was defined: the record stays that of a step not done
            elif answered or not untouched:
                store.write_record(replace(record, step=Step.APPLIED, applied=store.save(now)))
            # Else virsh was stopped, by Ctrl-C or for its time, and libvirt may still do it.
        lost = () if edited else not_kept(tuned, now)
        if lost:
            before, dropped = store.save(original), store.save(now)
            virsh.define(str(store.document_path(before)), (lock, *host_lock))
            step = Step.RESTORED if base == before else Step.APPLIED
            store.write_record(replace(record, step=step, applied=before))
            raise HostError(
                f"{state.name}: expected libvirt to keep what it was given, found changed: "
                f"{'; '.join(lost)}",
                hint="the original definition is back; is this libvirt new enough for the layout? "
                f"what it contained: {store.document_path(dropped)}",
            )
    return Applied(
        state,
        store.document_path(base),
        store.document_path(record.tuned),
        now,
        (),
        not untouched,
        edited,
    )


@dataclass(frozen=True, slots=True)
class Restored:
    """What restore did. definition: as libvirt prints it now.

    exact: it is the original, byte for byte but for the order that libvirt prints devices in; False
    where another libvirt than the one that printed the original prints it otherwise.
    changed: False where it was there already.
    before: the definition that it had; replaced: where that lies. given: what libvirt was given.
    moved: see Restorable.
    """

    state: DomainState
    definition: bytes
    exact: bool
    changed: bool
    before: bytes
    replaced: Path
    given: bytes
    moved: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Restorable:
    """What restore would restore: the document as libvirt holds it, and the original.

    moved: devices that get another address, since theirs was on a bus of the layout.
    """

    state: DomainState
    definition: bytes
    original: bytes
    record: Record
    moved: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        return not same_definition(self.definition, self.original)


def preview_restore(virsh: Virsh, name: str, root: Path, *, keep_edits: bool = False) -> Restorable:
    """What restore_definition would do; changes nothing. Raises as it does."""
    state = virsh.domain(name)
    store = DomainStore(root, virsh.connect, state.uuid)
    record = store.record()
    if record is None:
        raise InputError(
            f"{state.name}: expected a saved original in {store.folder}, found none",
            hint=_where_else(virsh, state, root),
        )
    found = Restorable(state, virsh.definition(state.uuid), store.document(record.original), record)
    if not found.changed:
        return found
    if not _is_ours(store, record, found.definition):
        if keep_edits:
            found = _merged(store, found)
        else:
            raise _edited(virsh, store, found)
    if found.changed:
        _refuse(_obstacles(virsh, state, found.original, restoring=True))
    return found


def _where_else(virsh: Virsh, state: DomainState, root: Path) -> str:
    """Where an original may be that is not found under the domain's UUID."""
    elsewhere = other_daemons(root, virsh.connect, state.uuid)
    if elsewhere:
        return f"it was applied with --connect {elsewhere[0]}"
    saved = saved_originals(root, virsh.connect, state.name)
    if saved:
        return (
            f"homenode applied to a domain of this name with another UUID, whose original is "
            f"{saved[0]}: compare it with virsh dumpxml --inactive {state.uuid}"
        )
    return "only what this user's `homenode apply` defined on this machine can be restored"


def _edited(virsh: Virsh, store: DomainStore, found: "Restorable") -> InputError:
    state, record = found.state, found.record
    if state.name != record.name:
        return _renamed(store, record, state, found.definition)
    restore = with_connection(virsh.connect, "homenode", "restore", state.argument)
    dumped = ("virsh", "-c", virsh.connect, "dumpxml", "--inactive", "--security-info", state.uuid)
    original = store.document_path(record.original)
    return InputError(
        f"{state.name}: expected the definition that homenode applied, found another: it was "
        "edited since",
        hint="to take out only what the layout set: "
        + command_line(*restore, "--keep-edits", "--dry-run")
        + "; to drop those edits: "
        + command_line("virsh", "-c", virsh.connect, "define", original)
        + "; to keep them and forget the original: "
        + command_line(*restore, "--forget")
        + "; to see them: "
        + command_line(*dumped)
        + " | "
        + command_line("diff", store.document_path(record.applied or record.original), "-"),
    )


def _renamed(
    store: DomainStore, record: Record, state: DomainState, definition: bytes
) -> InputError:
    """Of a domain whose name is not that of its record, as after `virsh domrename`."""
    last = store.document(record.applied or record.tuned)
    is_name_alone = difference_count(last, definition) == 2  # the element in either document
    restore = with_connection(record.connect, "homenode", "restore", state.argument, "--keep-edits")
    back = ("virsh", "-c", record.connect, "domrename", "--domain", state.uuid)
    return InputError(
        f"{state.name}: expected the name {record.name}, which it had when homenode applied a "
        f"layout, found it renamed{'' if is_name_alone else ', and edited since'}",
        hint="to keep the name and take out the layout: "
        + command_line(*restore)
        + ", after which homenode apply gives it one again; to keep the layout, give the old name "
        "back, run this again, and rename it after: "
        + command_line(*back, "--new-name", record.name),
    )


def _merged(store: DomainStore, found: "Restorable") -> "Restorable":
    """The definition of now without what the layout set, to be restored in the original's place.

    Raises InputError where an edit and the layout changed the same thing.
    """
    record, name = found.record, found.state.name
    if record.step is Step.RESTORED:
        return replace(found, original=found.definition)  # nothing of a layout is in it
    # A step that was cut short left one of two: the edits were made to what is nearer.
    names = {record.applied or record.original}
    names |= {record.tuned} if record.step is Step.APPLYING else set()
    now = found.definition
    applied = min(map(store.document, sorted(names)), key=lambda one: difference_count(one, now))
    merged = take_out(
        open_domain(found.original, f"{name} (original)"),
        open_domain(applied, f"{name} (applied)"),
        open_domain(now, f"{name} (now)"),
    )
    if merged.conflicts:
        raise InputError(
            f"{name}: expected edits of what the layout did not set, found both in: "
            + "; ".join(merged.conflicts),
            hint="give each its original or its applied value with virsh edit, then restore again",
        )
    return replace(found, original=merged.document.to_bytes(), moved=merged.moved)


def restore_definition(
    virsh: Virsh,
    name: str,
    root: Path,
    *,
    keep_edits: bool = False,
    host_lock: Sequence[int] = (),
) -> Restored:
    """Give a domain the definition back that it had before the first apply.

    The bytes that libvirt printed then are what it is given again. keep_edits: where it was edited
    since, only what the layout set is taken out, and what is left is the original from then on.
    host_lock: as for apply_definition.
    Raises InputError where nothing is saved, or where the definition was changed since it was
    applied; UsageError with every obstacle.
    """
    state = virsh.domain(name)
    store = DomainStore(root, virsh.connect, state.uuid)
    with store.locked() as lock, _way_back_named(virsh, state):
        found = preview_restore(virsh, state.uuid, root, keep_edits=keep_edits)
        record, before = found.record, found.definition
        replaced = store.document_path(sha256(before))
        # Before libvirt hears of it: whatever a kill leaves is then one of the two.
        wanted = store.save(found.original)
        if not found.changed:
            store.write_record(
                replace(record, name=state.name, step=Step.RESTORED, original=wanted)
            )
            return Restored(state, before, True, False, before, replaced, before, ())
        applied = store.save(before)
        record = replace(
            record, name=state.name, step=Step.RESTORING, original=wanted, applied=applied
        )
        _begin(virsh, store, record, before)
        try:
            virsh.define(str(store.document_path(wanted)), (lock, *host_lock))
        except RefusedError:
            store.write_record(found.record)
            raise
        now = virsh.definition(state.uuid)
        if found.original != store.document(found.record.original):
            wanted = store.save(now)  # with the addresses that libvirt gave out
        store.write_record(replace(record, step=Step.RESTORED, original=wanted))
    exact = same_definition(now, found.original)
    return Restored(state, now, exact, True, before, replaced, found.original, found.moved)


@contextmanager
def _way_back_named(virsh: Virsh, state: DomainState) -> Iterator[None]:
    """Where libvirt goes away inside, the error says what brings the domain back."""
    try:
        yield
    except HostError as error:
        if not is_lost(error):
            raise
        words = with_connection(virsh.connect, "homenode", "restore", state.argument)
        raise HostError(
            f"{error.message}: {state.name} has the definition from before, or the new one",
            hint="when libvirt answers again, the same command goes on, and "
            f"{command_line(*words)} gives the original back",
        ) from None


def _begin(virsh: Virsh, store: DomainStore, record: Record, expected: bytes) -> None:
    """Writes the record of a step, then looks once more that was not edited meanwhile.

    libvirt cannot be asked to replace a definition only where it is still the same one: an edit
    within the milliseconds from here to its answer is lost. Raises InputError.
    """
    before = store.record()
    store.write_record(record)
    if same_definition(virsh.definition(record.uuid), expected):
        return
    # As if nothing had begun: the original of a record that says "restored" is never restored.
    store.write_record(before or replace(record, step=Step.RESTORED))
    raise InputError(
        f"{record.name}: expected the definition that was read a moment ago, found another: it "
        "was edited in between",
        hint="run it again",
    )


def domain_to_restore(virsh: Virsh, name: str, root: Path) -> DomainState:
    """The domain of that name or UUID. Raises InputError; for one that somebody has undefined it
    says where the original lies."""
    try:
        return virsh.domain(name)
    except InputError as error:
        saved = saved_originals(root, virsh.connect, name.strip())
        if not saved:
            raise
        raise InputError(
            error.message,
            hint="it is not defined any more; this brings it back: "
            + command_line("virsh", "-c", virsh.connect, "define", saved[0]),
        ) from None


def has_original(virsh: Virsh, name: str, root: Path) -> bool:
    """Whether an original of the domain is saved."""
    return DomainStore(root, virsh.connect, virsh.domain(name).uuid).record() is not None


def saved_original(virsh: Virsh, name: str, root: Path) -> bytes | None:
    """The definition that restore_definition would restore; None where nothing is saved."""
    store = DomainStore(root, virsh.connect, virsh.domain(name).uuid)
    record = store.record()
    return None if record is None else store.document(record.original)


def drop_records(connect: str, uuid: str, root: Path) -> None:
    """Forget all that was saved of a domain that is gone for good."""
    DomainStore(root, connect, uuid).drop()


def forget_original(virsh: Virsh, name: str, root: Path) -> Path:
    """Take the present definition for the original from now on; gives where the old one lies.

    Raises InputError where nothing is saved.
    """
    state = virsh.domain(name)
    store = DomainStore(root, virsh.connect, state.uuid)
    with store.locked():
        record = store.record()
        if record is None:
            raise InputError(f"{state.name}: expected a saved original, found none")
        now = store.save(virsh.definition(state.uuid))
        store.write_record(
            replace(record, name=state.name, step=Step.RESTORED, original=now, applied=None)
        )
    return store.document_path(record.original)


def _base(store: DomainStore, state: DomainState, original: bytes) -> str:
    """sha256 of the original to come back to: the first one, where ours lies over it."""
    record = store.record()
    if record is None or record.step is Step.RESTORED:
        return sha256(original)
    if _is(store, record.original, original):
        return record.original
    if _is_ours(store, record, original):
        return record.original  # applied again, or interrupted before it was read back
    if state.name != record.name:
        raise _renamed(store, record, state, original)
    raise InputError(
        f"{record.name}: expected the definition that homenode applied, found another: it was "
        "edited since",
        hint=command_line(
            *with_connection(record.connect, "homenode", "restore", record.uuid, "--forget")
        )
        + " keeps the edits as the new original; with --keep-edits in its place the layout is "
        "taken out first",
    )


def _is_ours(store: DomainStore, record: Record, definition: bytes) -> bool:
    """Whether a definition is one that homenode put there, or left there: not edited by others.

    A step that was cut short left what was there before, or what libvirt made of the tuned one.
    """
    if _is(store, record.applied, definition):
        return True
    if record.step is not Step.APPLYING:
        return False  # a restore leaves what was there before, or the original
    before = store.document(record.applied or record.original)
    return is_printed(store.document(record.tuned), before, definition)


def _is(store: DomainStore, name: str | None, definition: bytes) -> bool:
    """Whether a definition is the one that was saved under that name."""
    return name is not None and same_definition(store.document(name), definition)


def _check_identity(state: DomainState, tuned: bytes, original: bytes) -> None:
    guest = read_vm(tuned, "the tuned document")
    uuid = guest.uuid.lower() if guest.uuid else None
    if guest.name != state.name or uuid != state.uuid:
        raise UsageError(
            f"the tuned document: expected one for {state.name} ({state.uuid}), found "
            f"{guest.name} ({guest.uuid or 'no UUID'})",
            hint=f"virsh dumpxml --inactive {state.uuid} > VM.xml, then plan that",
        )
    lost = passwords_lost(original, tuned)
    if lost:
        raise UsageError(
            f"the tuned document: expected the passwords of {', '.join(lost)}, found none: libvirt "
            "would drop them",
            hint="it was made from a document without them: virsh dumpxml --inactive "
            f"--security-info {state.uuid} > VM.xml, then plan that",
        )


def _check_current(virsh: Virsh, state: DomainState, original: bytes) -> None:
    if not same_definition(virsh.definition(state.uuid), original):
        raise InputError(
            f"{state.name}: expected the definition that the plan was made from, found another: it "
            "was edited in between",
            hint="plan and apply again",
        )


def _obstacles(
    virsh: Virsh, state: DomainState, wanted: bytes, *, restoring: bool = False
) -> tuple[Obstacle, ...]:
    snapshots = {
        name: virsh.snapshot_document(state.uuid, name) for name in virsh.snapshots(state.uuid)
    }
    return obstacles(state, wanted, snapshots, connect=virsh.connect, restoring=restoring)


def _refuse(found: tuple[Obstacle, ...]) -> None:
    if found:
        raise UsageError(
            "; ".join(map(str, found)), hint="; ".join(obstacle.fix for obstacle in found)
        )
