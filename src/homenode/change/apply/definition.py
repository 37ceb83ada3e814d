"""Definition: replace domains' definitions by tuned ones, and undo it. [I/O]"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path

from msgspec import Struct, structs
from msgspec.structs import replace

from homenode.change.apply.define_step import (
    ApplyOutcome,
    DefineStep,
    DomainChange,
    check_current,
    count_differences,
    find_last_defined,
    find_lost_passwords,
    first_original,
    is_ours,
    is_recorded,
    last_known_sha256,
    make_edited_error,
    make_renamed_error,
    with_facts,
)
from homenode.change.journal import (
    TO_UNDO,
    ChangeEntry,
    ChangeState,
    DomainStore,
    list_connections,
    list_saved_originals,
    lock_host,
)
from homenode.errors import HomenodeError, HostError, InputError, UsageError
from homenode.findings import Rejection
from homenode.text import command_line, operands
from homenode.vm.domain.document import parse_document
from homenode.vm.domain.merge import add_libvirt_parts, is_same_definition, take_out
from homenode.vm.domain.read import build_vm, open_domain, read_vm
from homenode.vm.hypervisor.connection import DomainState, add_connection
from homenode.vm.hypervisor.virsh import Virsh, is_lost
from homenode.vm.model import Vm


def preview_definition(
    virsh: Virsh, name: str, tuned_xml: bytes, original: bytes, root: Path
) -> ApplyOutcome:
    """Return what apply_definition would do, and change nothing. Raises the same errors."""
    state = virsh.find_domain(name)
    _check_identity(state, tuned_xml, original)
    store = DomainStore(root, virsh.connect, state.uuid)
    check_current(virsh, state, original)
    base = first_original(store, state, original, virsh.connect)
    obstacles = _find_obstacles(virsh, state, tuned_xml)
    return ApplyOutcome(
        state=state,
        original=store.definition_path(base),
        defined=None,
        obstacles=obstacles,
        changed=tuned_xml != original,
        is_original_placed=is_recorded(base, original),
    )


def apply_definition(
    virsh: Virsh, name: str, tuned_xml: bytes, original: bytes, root: Path
) -> ApplyOutcome:
    """Define one domain; see apply_definitions."""
    change = DomainChange(name=name, tuned=tuned_xml, original=original)
    return apply_definitions(virsh, (change,), root)[0]


def apply_definitions(
    virsh: Virsh, changes: Sequence[DomainChange], root: Path
) -> tuple[ApplyOutcome, ...]:
    """Save the definitions of domains and define the tuned ones: all or none.

    A second apply keeps the first original. Raises InputError if a definition changed since it was
    read or since the last apply, UsageError with every obstacle, HostError if libvirt rejects the
    definition; the definitions are then unchanged.
    """
    states = [virsh.find_domain(change.name) for change in changes]
    for state, change in zip(states, changes, strict=True):
        _check_identity(state, change.tuned, change.original)
    words = command_line("homenode", "apply", *(state.argument for state in states))
    with ExitStack() as stack:
        lock = stack.enter_context(lock_host(root, virsh.connect, words))
        for state in states:
            stack.enter_context(_add_restore_hint(virsh, state))
            DomainStore(root, virsh.connect, state.uuid).sweep()
        steps = [
            DefineStep(virsh, state, DomainStore(root, virsh.connect, state.uuid), lock, change)
            for state, change in zip(states, changes, strict=True)
        ]
        reject_obstacles(
            tuple(
                obstacle
                for step in steps
                for obstacle in _find_obstacles(virsh, step.state, step.tuned)
            )
        )
        try:
            # All lines are written first, so that after a kill all related steps are known to be
            # open.
            for step in steps:
                step.begin(step.store.journal.write)
            for step in steps:
                step.act(step.store.journal.write)
        except HomenodeError:
            for step in reversed(steps):
                with suppress(HomenodeError):  # the journal lists the open steps
                    step.take_back(step.store.journal.write)
            raise
    return tuple(step.outcome() for step in steps)


class RestoreOutcome(Struct, frozen=True):
    definition: bytes  # as libvirt prints it now
    # it is the original, byte for byte but for the order that libvirt prints devices in; False if
    # another libvirt than the one that printed the original prints it differently
    exact: bool
    changed: bool  # False if it was there already


class RestorePreview(Struct, frozen=True):
    """The definition that libvirt has, and the original that would replace it."""

    state: DomainState
    definition: bytes
    original: bytes
    entry: ChangeEntry
    applied_at: datetime  # when the record was last written
    # devices that get another address, since theirs was on a bus of the layout
    moved: tuple[str, ...] = ()

    @property
    def is_changed(self) -> bool:
        return not is_same_definition(self.definition, self.original)


def preview_restore(
    virsh: Virsh, name: str, root: Path, *, keep_edits: bool = False
) -> RestorePreview:
    """Return what restore_definition would do, and change nothing. Raises the same errors."""
    state = virsh.find_domain(name)
    store = DomainStore(root, virsh.connect, state.uuid)
    entry = store.definition()
    if entry is None:
        raise InputError(
            f"{state.name}: no saved original in {store.directory}",
            hint=_find_other_connection(virsh, state, root),
        )
    now, original = virsh.read_definition(state.uuid), store.read_document(entry.before)
    restorable = RestorePreview(state, now, original, entry, store.written_at())
    if not restorable.is_changed:
        return restorable
    if not is_ours(store, entry, restorable.definition):
        if keep_edits:
            restorable = _keep_edits(store, restorable)
        else:
            raise _edited_error(virsh, store, restorable)
    if restorable.is_changed:
        reject_obstacles(_find_obstacles(virsh, state, restorable.original, restoring=True))
    return restorable


def _find_other_connection(virsh: Virsh, state: DomainState, root: Path) -> str:
    """Return the place of an original that is not found under the domain's UUID."""
    connections = list_connections(root, state.uuid)
    if connections:
        return f"it was applied with --connect {connections[0]}"
    originals = list_saved_originals(root, virsh.connect, state.name)
    if originals:
        return (
            f"homenode applied to a domain of this name with another UUID, whose original is "
            f"{originals[0]}: compare it with virsh dumpxml --inactive {state.uuid}"
        )
    return "only what this user's `homenode apply` defined on this machine can be restored"


def _edited_error(virsh: Virsh, store: DomainStore, restorable: "RestorePreview") -> InputError:
    state, entry = restorable.state, restorable.entry
    if state.name != entry.facts["name"]:
        return make_renamed_error(store, entry, state, restorable.definition, virsh.connect)
    restore = add_connection(virsh.connect, "homenode", "restore", state.argument)
    now = restorable.definition
    hint = command_line(*restore, "--keep-edits")
    return make_edited_error(state.name, find_last_defined(store, entry, now), now, hint)


def _keep_edits(store: DomainStore, restorable: "RestorePreview") -> "RestorePreview":
    """Return the preview whose original is the current definition without the layout. Raises
    InputError if an edit and the layout changed the same thing."""
    entry, name = restorable.entry, restorable.state.name
    if entry.what not in TO_UNDO:
        return replace(restorable, original=restorable.definition)  # nothing of a layout is in it
    now = restorable.definition
    edited_domain = open_domain(now, f"{name} (now)")
    candidates = [store.read_document(last_known_sha256(entry))]
    if entry.what is ChangeState.BEGIN:
        # Interrupted: libvirt may have replaced the definition, but the stored result is unknown.
        tuned_xml = store.read_document(entry.after)
        candidates += [
            add_libvirt_parts(open_domain(tuned_xml, f"{name} (given)"), edited_domain).to_bytes(),
            tuned_xml,
        ]
    applied_text = min(candidates, key=lambda text: count_differences(text, now))
    domain = take_out(
        open_domain(restorable.original, f"{name} (original)"),
        open_domain(applied_text, f"{name} (applied)"),
        edited_domain,
    )
    if domain.conflicts:
        raise InputError(
            f"{name}: the layout and an edit changed: {'; '.join(domain.conflicts)}",
            hint="virsh edit: set each to its original or its applied value, then restore again",
        )
    return replace(restorable, original=domain.document.to_bytes(), moved=domain.moved)


def restore_definition(
    virsh: Virsh, name: str, root: Path, *, keep_edits: bool = False
) -> RestoreOutcome:
    """Define the original of a domain again, byte for byte as libvirt printed it.

    keep_edits: if the definition was edited since, remove the layout alone; the result is the
    original from then on. Raises InputError if nothing is saved or the definition was edited,
    UsageError with every obstacle.
    """
    state = virsh.find_domain(name)
    store = DomainStore(root, virsh.connect, state.uuid)
    words = command_line("homenode", "restore", state.argument)
    with lock_host(root, virsh.connect, words) as lock, _add_restore_hint(virsh, state):
        store.sweep()
        restorable = preview_restore(virsh, state.uuid, root, keep_edits=keep_edits)
        # Written before libvirt is called: after a kill the definition is one of the two.
        original = store.save(restorable.original)
        entry = structs.replace(restorable.entry, before=original)
        if not restorable.is_changed:
            entry = with_facts(entry, name=state.name, found=original)
            store.journal.write(entry.with_state(ChangeState.UNDONE))
            return RestoreOutcome(definition=restorable.definition, exact=True, changed=False)
        step = DefineStep(virsh, state, store, lock)
        undone = step.undo(entry, store.journal.write, restorable.definition)
        now = virsh.read_definition(state.uuid)
        if restorable.original != store.read_document(restorable.entry.before):
            # With the addresses that libvirt gave out.
            store.journal.write(structs.replace(undone, before=store.save(now)))
    exact = is_same_definition(now, restorable.original)
    return RestoreOutcome(definition=now, exact=exact, changed=True)


@contextmanager
def _add_restore_hint(virsh: Virsh, state: DomainState) -> Iterator[None]:
    """If libvirt disappears inside, the error names the command that restores the domain."""
    try:
        yield
    except HostError as error:
        if not is_lost(error):
            raise
        words = add_connection(virsh.connect, "homenode", "restore", state.argument)
        raise HostError(
            f"{error.message}: {state.name} has either the previous or the new definition",
            hint="when libvirt answers again, repeat the command to continue; "
            f"{command_line(*words)} restores the original",
        ) from None


def find_domain_to_restore(virsh: Virsh, name: str, root: Path) -> DomainState:
    """Return the domain of that name or UUID. Raises InputError; for an undefined domain it names
    the file of the original."""
    try:
        return virsh.find_domain(name)
    except InputError as error:
        originals = list_saved_originals(root, virsh.connect, name.strip())
        if not originals:
            raise
        raise InputError(
            error.message,
            hint="the domain is no longer defined; this restores it: "
            + command_line("virsh", "-c", virsh.connect, "define", originals[0]),
        ) from None


def read_saved_original(virsh: Virsh, name: str, root: Path) -> bytes | None:
    """Return the definition that restore_definition would restore; None if nothing is saved."""
    store = DomainStore(root, virsh.connect, virsh.find_domain(name).uuid)
    entry = store.definition()
    return None if entry is None else store.read_document(entry.before)


def forget_original(virsh: Virsh, name: str, root: Path) -> Path:
    """Make the present definition the original; return the path of the old original. Raises
    InputError if nothing is saved."""
    state = virsh.find_domain(name)
    store = DomainStore(root, virsh.connect, state.uuid)
    words = command_line("homenode", "restore", state.argument, "--forget")
    with lock_host(root, virsh.connect, words):
        entry = store.definition()
        if entry is None:
            raise InputError(f"{state.name}: no saved original")
        last_entry = structs.replace(entry, before=store.save(virsh.read_definition(state.uuid)))
        last_entry = structs.replace(last_entry, facts={"name": state.name})
        store.journal.write(last_entry.with_state(ChangeState.KEPT))
    return store.definition_path(entry.before)


def _check_identity(state: DomainState, tuned_xml: bytes, original: bytes) -> None:
    guest = read_vm(tuned_xml, "the tuned definition")
    uuid = guest.uuid.lower() if guest.uuid else None
    if guest.name != state.name or uuid != state.uuid:
        raise UsageError(
            f"the tuned definition is for {guest.name} ({guest.uuid or 'no UUID'}), not for "
            f"{state.name} ({state.uuid})",
            hint=f"virsh dumpxml --inactive {state.uuid} > VM.xml, then plan that",
        )
    lost_passwords = find_lost_passwords(original, tuned_xml)
    if lost_passwords:
        raise UsageError(
            f"the tuned definition lacks the passwords of {', '.join(lost_passwords)}",
            hint=f"virsh dumpxml --inactive --security-info {state.uuid} > VM.xml, then plan that",
        )


def _find_obstacles(
    virsh: Virsh, state: DomainState, definition: bytes, *, restoring: bool = False
) -> tuple[Rejection, ...]:
    snapshots = {
        name: virsh.snapshot_definition(state.uuid, name)
        for name in virsh.list_snapshots(state.uuid)
    }
    obstacles = find_obstacles(state, definition, snapshots, virsh.connect, restoring=restoring)
    return tuple(Rejection(kind, (), f"{state.name}: {t}", hint) for kind, t, hint in obstacles)


def find_obstacles(
    state: DomainState,
    definition: bytes,
    snapshots: Mapping[str, bytes],
    connect: str,
    *,
    restoring: bool = False,
) -> Iterator[tuple[str, str, str]]:
    """Yield (id, reason, hint) of every obstacle to replacing a definition now.

    snapshots: name -> document, as `virsh snapshot-dumpxml` prints it. restoring: omit the hints
    that are for an apply. Raises ParseError or InputError if `definition` cannot be read.
    """
    virsh = command_line("virsh", "-c", connect)
    apply = add_connection(connect, "homenode", "apply", state.argument, "--live-pins")
    if not state.persistent:
        hint = f"{virsh} dumpxml {state.argument} > VM.xml, then define it from there"
        yield "transient", "it is transient and has no definition", hint
    if state.is_active:
        live_pins = "" if restoring else f"; to move its threads alone: {command_line(*apply)}"
        yield "running", "it is not shut off", f"{virsh} shutdown {state.argument}{live_pins}"
    if state.managed_save:
        yield (
            "managed-save",
            "the next start would resume a managed save with the topology of then",
            f"start it and shut it down, or: {virsh} managedsave-remove {state.argument}",
        )
    topology = (
        _list_topology_fields(build_vm(open_domain(definition, "the new definition")))
        if snapshots
        else ()
    )
    for snapshot, document in snapshots.items():
        if _read_snapshot_topology(document, snapshot) != topology:
            words = ("snapshot-delete", state.argument, *operands(snapshot))
            copy = "" if restoring else ", or tune a copy: homenode plan --name COPY"
            yield (
                "snapshot",
                f"snapshot {snapshot!r} has another topology, which reverting would bring back",
                f"{virsh} {command_line(*words)}{copy}",
            )


def _list_topology_fields(guest: Vm) -> tuple[object, ...]:
    return (
        guest.vcpus,
        guest.cpu_topology,
        guest.cell_vcpus,
        guest.memory_bytes,
        guest.controllers,
        tuple((device.bdf, device.address) for device in guest.hostdevs),
    )


def _read_snapshot_topology(document: bytes, source: str) -> tuple[object, ...] | None:
    """Return the topology of the domain in a snapshot; None if it cannot be read."""
    try:
        snapshot = parse_document(document, source)
        domain = snapshot.root.child("inactiveDomain") or snapshot.root.child("domain")
        if domain is None:
            return None
        # <inactiveDomain> is a <domain> under another name.
        text = snapshot.text[domain.start : domain.end].replace(b"inactiveDomain", b"domain")
        return _list_topology_fields(build_vm(open_domain(text, source)))
    except HomenodeError:
        return None  # then it is in the way


def reject_obstacles(obstacles: Sequence[Rejection]) -> None:
    """Raise UsageError with every obstacle, if there are any."""
    if obstacles:
        raise UsageError(
            "; ".join(map(str, obstacles)),
            hint="; ".join(obstacle.hint or "" for obstacle in obstacles),
        )
