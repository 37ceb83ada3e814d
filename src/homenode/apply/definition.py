"""Definition: a tuned document put in the place of a domain's definition, and taken back. [I/O]

What is about to happen is on disk before libvirt hears of it. libvirt replaces a definition whole
or not at all, so a kill at any moment leaves the old one or the new one, the record says which two
those are, and `restore_definition` finds the way back from either.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from homenode.apply.kept import is_printed, not_kept, passwords_lost
from homenode.apply.obstacles import Obstacle, obstacles
from homenode.apply.record import Record, Step
from homenode.apply.sameness import same_definition
from homenode.apply.store import DomainStore, other_daemons, saved_originals, sha256
from homenode.domain.read import read_guest
from homenode.errors import HostError, InputError, UsageError
from homenode.hypervisor.domain_state import DomainState
from homenode.hypervisor.virsh import RefusedError, Virsh
from homenode.wording import command_line


@dataclass(frozen=True, slots=True)
class Applied:
    """What was done, or would be. defined: as libvirt prints it now; None where nothing was done.

    original, tuned: where the saved documents lie (would lie). obstacles: why it would be refused.
    changed: False where the domain had this definition already.
    """

    state: DomainState
    original: Path
    tuned: Path
    defined: bytes | None
    obstacles: tuple[Obstacle, ...]
    changed: bool


def preview_definition(
    virsh: Virsh, name: str, tuned: bytes, original: bytes, root: Path
) -> Applied:
    """What apply_definition would do; changes nothing, writes nothing. Raises as it does."""
    state = virsh.domain(name)
    _check_identity(state, tuned, original)
    store = DomainStore(root, virsh.connect, state.uuid)
    _check_current(virsh, state, original)
    base = _base(store, original)
    against = _obstacles(virsh, state, tuned)
    return Applied(
        state,
        store.document_path(base),
        store.document_path(sha256(tuned)),
        None,
        against,
        tuned != original,
    )


def apply_definition(virsh: Virsh, name: str, tuned: bytes, original: bytes, root: Path) -> Applied:
    """Define a tuned document over a domain's definition, which is saved first.

    original: what `virsh.definition` gave, from which `tuned` was made. A second apply keeps the
    first original. Raises InputError where the definition changed since it was read or since the
    last apply, UsageError with every obstacle, HostError where libvirt refuses: the definition is
    then as it was.
    """
    state = virsh.domain(name)
    _check_identity(state, tuned, original)
    store = DomainStore(root, virsh.connect, state.uuid)
    with store.locked() as lock:
        _check_current(virsh, state, original)
        base = _base(store, original)
        _refuse(_obstacles(virsh, state, tuned))
        record = Record(
            virsh.connect, state.name, state.uuid, Step.APPLYING, base, store.save(tuned),
            store.save(original),
        )  # fmt: skip
        store.write_record(record)
        answered = False
        try:
            virsh.define(str(store.document_path(record.tuned)), (lock,))
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
            elif answered or not untouched:
                store.write_record(replace(record, step=Step.APPLIED, applied=store.save(now)))
            # Else virsh was stopped, by Ctrl-C or for its time, and libvirt may still do it.
        lost = not_kept(tuned, now)
        if lost:
            before = store.save(original)
            virsh.define(str(store.document_path(before)), (lock,))
            step = Step.RESTORED if base == before else Step.APPLIED
            store.write_record(replace(record, step=step, applied=before))
            raise HostError(
                f"{state.name}: expected libvirt to keep what it was given, found changed: "
                f"{'; '.join(lost)}",
                hint="the original definition is back; is this libvirt new enough for the layout?",
            )
    return Applied(
        state,
        store.document_path(base),
        store.document_path(record.tuned),
        now,
        (),
        not untouched,
    )


@dataclass(frozen=True, slots=True)
class Restored:
    """What restore did. definition: as libvirt prints it now.

    exact: it is the original, byte for byte but for the order that libvirt prints devices in; False
    where another libvirt than the one that printed the original prints it otherwise.
    changed: False where it was there already.
    replaced: where the definition lies that was there before.
    """

    state: DomainState
    definition: bytes
    exact: bool
    changed: bool
    replaced: Path


@dataclass(frozen=True, slots=True)
class Restorable:
    """What restore would put back: the document as libvirt holds it, and the original."""

    state: DomainState
    definition: bytes
    original: bytes
    record: Record

    @property
    def changed(self) -> bool:
        return not same_definition(self.definition, self.original)


def preview_restore(virsh: Virsh, name: str, root: Path) -> Restorable:
    """What restore_definition would do; changes nothing. Raises as it does."""
    state = virsh.domain(name)
    store = DomainStore(root, virsh.connect, state.uuid)
    record = store.record()
    if record is None:
        elsewhere = other_daemons(root, virsh.connect, state.uuid)
        raise InputError(
            f"{state.name}: expected a saved original in {store.folder}, found none",
            hint=f"it was applied with --connect {elsewhere[0]}"
            if elsewhere
            else "only what this user's `homenode apply` defined on this machine can be restored",
        )
    found = Restorable(state, virsh.definition(state.uuid), store.document(record.original), record)
    if not found.changed:
        return found
    if not _is_ours(store, record, found.definition):
        raise InputError(
            f"{state.name}: expected the definition that homenode applied, found another: it was "
            "edited since",
            hint="to drop those edits: "
            + command_line(
                "virsh", "-c", virsh.connect, "define", store.document_path(record.original)
            )
            + "; to keep them and forget the original: "
            + command_line("homenode", "restore", state.argument, "--forget")
            + "; to see them: "
            + command_line(
                "virsh", "-c", virsh.connect, "dumpxml", "--inactive", "--security-info", state.uuid
            )
            + " | "
            + command_line("diff", store.document_path(record.applied or record.original), "-"),
        )
    _refuse(_obstacles(virsh, state, found.original, restoring=True))
    return found


def restore_definition(virsh: Virsh, name: str, root: Path) -> Restored:
    """Give a domain the definition back that it had before the first apply.

    The bytes that libvirt printed then are what it is given again. Raises InputError where nothing
    is saved, or where the definition was changed since it was applied; UsageError with every
    obstacle.
    """
    state = virsh.domain(name)
    store = DomainStore(root, virsh.connect, state.uuid)
    with store.locked() as lock:
        found = preview_restore(virsh, state.uuid, root)
        record, now = found.record, found.definition
        replaced = store.document_path(sha256(now))
        if not found.changed:
            store.write_record(replace(record, step=Step.RESTORED))
            return Restored(state, now, True, False, replaced)
        record = replace(record, step=Step.RESTORING, applied=store.save(now))
        store.write_record(record)
        virsh.define(str(store.document_path(record.original)), (lock,))
        now = virsh.definition(state.uuid)
        store.write_record(replace(record, step=Step.RESTORED))
    return Restored(state, now, same_definition(now, found.original), True, replaced)


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
    """The definition that restore_definition would put back; None where nothing is saved."""
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
        store.write_record(replace(record, step=Step.RESTORED, original=now, applied=None))
    return store.document_path(record.original)


def _base(store: DomainStore, original: bytes) -> str:
    """sha256 of the original to come back to: the first one, where ours lies over it."""
    record = store.record()
    if record is None or record.step is Step.RESTORED:
        return sha256(original)
    if _is(store, record.original, original):
        return record.original
    if _is_ours(store, record, original):
        return record.original  # applied again, or interrupted before it was read back
    raise InputError(
        f"{record.name}: expected the definition that homenode applied, found another: it was "
        "edited since",
        hint=f"homenode restore {record.uuid} --forget keeps the edits as the new original",
    )


def _is_ours(store: DomainStore, record: Record, definition: bytes) -> bool:
    """Whether a definition is one that homenode put there, or left there: not edited by others.

    A step that was cut short left what was there before, or what libvirt made of the tuned one.
    """
    if _is(store, record.applied, definition):
        return True
    if record.step in (Step.APPLIED, Step.RESTORED):
        return False
    before = store.document(record.applied or record.original)
    return is_printed(store.document(record.tuned), before, definition)


def _is(store: DomainStore, name: str | None, definition: bytes) -> bool:
    """Whether a definition is the one that was saved under that name."""
    return name is not None and same_definition(store.document(name), definition)


def _check_identity(state: DomainState, tuned: bytes, original: bytes) -> None:
    guest = read_guest(tuned, "the tuned document")
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
    snapshots = {name: virsh.snapshot_document(state.uuid, name)
                 for name in virsh.snapshots(state.uuid)}  # fmt: skip
    return obstacles(state, wanted, snapshots, connect=virsh.connect, restoring=restoring)


def _refuse(found: tuple[Obstacle, ...]) -> None:
    if found:
        raise UsageError(
            "; ".join(map(str, found)), hint="; ".join(obstacle.fix for obstacle in found)
        )
