"""Definition: tuned documents put in the place of domains' definitions, and undone. [I/O]"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from msgspec import Struct, structs
from msgspec.structs import replace

from homenode.change.apply.define_step import (
    Applied,
    DefineStep,
    DomainChange,
    check_current,
    difference_count,
    first_original,
    is_ours,
    last_known,
    passwords_lost,
    records_placed,
    renamed,
    with_facts,
)
from homenode.change.apply.obstacles import obstacles
from homenode.change.apply.store import DomainStore, other_daemons, saved_originals
from homenode.change.host_lock import host_locked
from homenode.change.step import TO_UNDO, ChangeEntry, ChangeState
from homenode.errors import HomenodeError, HostError, InputError, UsageError
from homenode.findings import Rejection
from homenode.text import command_line
from homenode.vm.domain.merge import as_stored, same_definition, take_out
from homenode.vm.domain.read import open_domain, read_vm
from homenode.vm.hypervisor.connection import with_connection
from homenode.vm.hypervisor.domain_state import DomainState
from homenode.vm.hypervisor.virsh import Virsh, is_lost


def preview_definition(
    virsh: Virsh, name: str, tuned: bytes, original: bytes, root: Path
) -> Applied:
    """What apply_definition would do; changes nothing, writes nothing. Raises as it does."""
    state = virsh.domain(name)
    _check_identity(state, tuned, original)
    store = DomainStore(root, virsh.connect, state.uuid)
    check_current(virsh, state, original)
    base = first_original(store, state, original, virsh.connect)
    against = _obstacles(virsh, state, tuned)
    return Applied(
        state=state,
        original=store.document_path(base),
        defined=None,
        obstacles=against,
        changed=tuned != original,
        is_original_placed=records_placed(base, original),
    )


def apply_definition(virsh: Virsh, name: str, tuned: bytes, original: bytes, root: Path) -> Applied:
    """As apply_definitions does, for one domain."""
    change = DomainChange(name=name, tuned=tuned, original=original)
    return apply_definitions(virsh, (change,), root)[0]


def apply_definitions(
    virsh: Virsh, changes: Sequence[DomainChange], root: Path
) -> tuple[Applied, ...]:
    """Define tuned documents over the definitions of domains, which are saved first: all or none.

    A second apply keeps the first original. Raises InputError where a definition changed since it
    was read or since the last apply, UsageError with every obstacle, HostError where libvirt
    refuses: the definitions are then as they were.
    """
    states = [virsh.domain(change.name) for change in changes]
    for state, change in zip(states, changes, strict=True):
        _check_identity(state, change.tuned, change.original)
    words = command_line("homenode", "apply", *(state.argument for state in states))
    with ExitStack() as inside:
        lock = inside.enter_context(host_locked(root, virsh.connect, words))
        for state in states:
            inside.enter_context(_way_back_named(virsh, state))
            DomainStore(root, virsh.connect, state.uuid).sweep()
        steps = [
            DefineStep(virsh, state, DomainStore(root, virsh.connect, state.uuid), lock, change)
            for state, change in zip(states, changes, strict=True)
        ]
        _refuse(tuple(one for step in steps for one in _obstacles(virsh, step.state, step.tuned)))
        try:
            # The lines of all come first: whatever a kill leaves, all that belongs together is
            # known to be open.
            for step in steps:
                step.begin(step.store.journal.write)
            for step in steps:
                step.act(step.store.journal.write)
        except HomenodeError:
            for step in reversed(steps):
                with suppress(HomenodeError):  # what is left, the journal says
                    step.take_back(step.store.journal.write)
            raise
    return tuple(step.applied() for step in steps)


class Restored(Struct, frozen=True):
    """What restore did."""

    definition: bytes  # as libvirt prints it now
    # it is the original, byte for byte but for the order that libvirt prints devices in; False
    # where another libvirt than the one that printed the original prints it otherwise
    exact: bool
    changed: bool  # False where it was there already


class Restorable(Struct, frozen=True):
    """What restore would restore: the document as libvirt holds it, and the original."""

    state: DomainState
    definition: bytes
    original: bytes
    entry: ChangeEntry
    # devices that get another address, since theirs was on a bus of the layout
    moved: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        return not same_definition(self.definition, self.original)


def preview_restore(virsh: Virsh, name: str, root: Path, *, keep_edits: bool = False) -> Restorable:
    """What restore_definition would do; changes nothing. Raises as it does."""
    state = virsh.domain(name)
    store = DomainStore(root, virsh.connect, state.uuid)
    entry = store.definition()
    if entry is None:
        raise InputError(
            f"{state.name}: expected a saved original in {store.folder}, found none",
            hint=_where_else(virsh, state, root),
        )
    found = Restorable(state, virsh.definition(state.uuid), store.document(entry.before), entry)
    if not found.changed:
        return found
    if not is_ours(store, entry, found.definition):
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
    state, entry = found.state, found.entry
    if state.name != entry.facts["name"]:
        return renamed(store, entry, state, found.definition, virsh.connect)
    restore = with_connection(virsh.connect, "homenode", "restore", state.argument)
    dumped = ("virsh", "-c", virsh.connect, "dumpxml", "--inactive", "--security-info", state.uuid)
    original = store.document_path(entry.before)
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
        + command_line("diff", store.document_path(last_known(entry)), "-"),
    )


def _merged(store: DomainStore, found: "Restorable") -> "Restorable":
    """The definition of now without what the layout set, to be restored in the original's place.

    Raises InputError where an edit and the layout changed the same thing.
    """
    entry, name = found.entry, found.state.name
    if entry.what not in TO_UNDO:
        return replace(found, original=found.definition)  # nothing of a layout is in it
    now = found.definition
    edited = open_domain(now, f"{name} (now)")
    candidates = [store.document(last_known(entry))]
    if entry.what is ChangeState.BEGIN:
        # Cut short: libvirt may have replaced the definition, but what it stored then is not known.
        given = store.document(entry.after)
        candidates += [as_stored(open_domain(given, f"{name} (given)"), edited).to_bytes(), given]
    applied = min(candidates, key=lambda text: difference_count(text, now))
    merged = take_out(
        open_domain(found.original, f"{name} (original)"),
        open_domain(applied, f"{name} (applied)"),
        edited,
    )
    if merged.conflicts:
        raise InputError(
            f"{name}: expected edits of what the layout did not set, found both in: "
            + "; ".join(merged.conflicts),
            hint="give each its original or its applied value with virsh edit, then restore again",
        )
    return replace(found, original=merged.document.to_bytes(), moved=merged.moved)


def restore_definition(
    virsh: Virsh, name: str, root: Path, *, keep_edits: bool = False
) -> Restored:
    """Give a domain the definition back that it had before the first apply.

    The bytes that libvirt printed then are what it is given again. keep_edits: where it was edited
    since, only what the layout set is taken out, and what is left is the original from then on.
    Raises InputError where nothing is saved, or where the definition was changed since it was
    applied; UsageError with every obstacle.
    """
    state = virsh.domain(name)
    store = DomainStore(root, virsh.connect, state.uuid)
    words = command_line("homenode", "restore", state.argument)
    with host_locked(root, virsh.connect, words) as lock, _way_back_named(virsh, state):
        store.sweep()
        found = preview_restore(virsh, state.uuid, root, keep_edits=keep_edits)
        # Before libvirt hears of it: whatever a kill leaves is then one of the two.
        original = store.save(found.original)
        entry = structs.replace(found.entry, before=original)
        if not found.changed:
            entry = with_facts(entry, name=state.name, found=original)
            store.journal.write(entry.now(ChangeState.UNDONE))
            return Restored(definition=found.definition, exact=True, changed=False)
        step = DefineStep(virsh, state, store, lock)
        undone = step.undo(entry, store.journal.write, replaces=found.definition)
        now = virsh.definition(state.uuid)
        if found.original != store.document(found.entry.before):
            # With the addresses that libvirt gave out.
            store.journal.write(structs.replace(undone, before=store.save(now)))
    exact = same_definition(now, found.original)
    return Restored(definition=now, exact=exact, changed=True)


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
    return DomainStore(root, virsh.connect, virsh.domain(name).uuid).definition() is not None


def saved_original(virsh: Virsh, name: str, root: Path) -> bytes | None:
    """The definition that restore_definition would restore; None where nothing is saved."""
    store = DomainStore(root, virsh.connect, virsh.domain(name).uuid)
    entry = store.definition()
    return None if entry is None else store.document(entry.before)


def drop_records(connect: str, uuid: str, root: Path) -> None:
    """Forget all that was saved of a domain that is gone for good."""
    DomainStore(root, connect, uuid).drop()


def forget_original(virsh: Virsh, name: str, root: Path) -> Path:
    """Take the present definition for the original from now on; gives where the old one lies.

    Raises InputError where nothing is saved.
    """
    state = virsh.domain(name)
    store = DomainStore(root, virsh.connect, state.uuid)
    words = command_line("homenode", "restore", state.argument, "--forget")
    with host_locked(root, virsh.connect, words):
        entry = store.definition()
        if entry is None:
            raise InputError(f"{state.name}: expected a saved original, found none")
        kept = structs.replace(entry, before=store.save(virsh.definition(state.uuid)))
        kept = structs.replace(kept, facts={"name": state.name})
        store.journal.write(kept.now(ChangeState.KEPT))
    return store.document_path(entry.before)


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


def _obstacles(
    virsh: Virsh, state: DomainState, wanted: bytes, *, restoring: bool = False
) -> tuple[Rejection, ...]:
    snapshots = {
        name: virsh.snapshot_document(state.uuid, name) for name in virsh.snapshots(state.uuid)
    }
    return obstacles(state, wanted, snapshots, connect=virsh.connect, restoring=restoring)


def _refuse(found: tuple[Rejection, ...]) -> None:
    if found:
        raise UsageError(
            "; ".join(map(str, found)), hint="; ".join(obstacle.hint or "" for obstacle in found)
        )
