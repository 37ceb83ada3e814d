"""DefineStep: replace a domain's definition atomically. [I/O]

The journal names both definitions on disk before libvirt is called, so that after a kill at any
moment either one can be defined again.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct, structs

from homenode.change.journal import (
    DEFINE,
    TO_UNDO,
    ChangeEntry,
    ChangeState,
    DomainStore,
    Note,
    compute_sha256,
)
from homenode.errors import HostError, InputError
from homenode.findings import Rejection
from homenode.text import command_line, plural
from homenode.vm.domain.controllers import pci_controllers
from homenode.vm.domain.memory import read_mark
from homenode.vm.domain.merge import is_same_definition, list_added_ports
from homenode.vm.domain.read import build_vm, open_domain
from homenode.vm.facts import diff
from homenode.vm.hypervisor.connection import DomainState, add_connection
from homenode.vm.hypervisor.virsh import RejectedError, Virsh


class ApplyOutcome(Struct, frozen=True):
    state: DomainState
    original: Path  # its path, also if it does not exist
    defined: bytes | None  # as libvirt prints it now; None if nothing was done
    obstacles: tuple[Rejection, ...]  # reasons for which the change would be rejected
    changed: bool  # False if the domain had this definition already
    # it has more changes than libvirt makes to the tuned document: a concurrent edit, which restore
    # keeps
    edited: bool = False
    # the original carries homenode's mark, and no record has an earlier one
    is_original_placed: bool = False


class DomainChange(Struct, frozen=True, kw_only=True):
    name: str
    tuned: bytes
    original: bytes  # what `virsh.read_definition` returned, from which `tuned_xml` was made


class DefineStep:
    """A step that replaces a domain's definition; libvirt does it atomically."""

    def __init__(
        self,
        virsh: Virsh,
        state: DomainState,
        store: DomainStore,
        lock: Sequence[int],
        change: DomainChange | None = None,
    ) -> None:
        """change: None = only undo. Raises InputError if the definition changed since it was
        read."""
        self.virsh, self.state, self.store, self._lock = virsh, state, store, lock
        self._last = store.definition()
        if change is not None:
            self.tuned, self._original = change.tuned, change.original
            check_current(virsh, state, change.original)
            self._base = first_original(store, state, change.original, virsh.connect)
        self._entry: ChangeEntry | None = None
        self._now: bytes | None = None
        self._is_done = False

    def outcome(self) -> ApplyOutcome:
        return ApplyOutcome(
            state=self.state,
            original=self.store.definition_path(self._base),
            defined=self._now,
            obstacles=(),
            changed=not self._is_untouched,
            edited=self._is_edited,
            is_original_placed=is_recorded(self._base, self._original),
        )

    def do(self, note: Note) -> ChangeEntry:
        self.begin(note)
        return self.act(note)

    def begin(self, note: Note) -> ChangeEntry:
        """Record the change that is about to happen. Raises InputError if the definition was
        edited."""
        by_hand = (
            "virsh",
            "-c",
            self.virsh.connect,
            "define",
            self.store.definition_path(self._base),
        )
        self._entry = ChangeEntry(
            what=ChangeState.BEGIN,
            kind=DEFINE,
            subject=self.state.uuid,
            before=self._base,
            after=self.store.save(self.tuned),
            by_hand=command_line(*by_hand),
            facts={"name": self.state.name, "found": self.store.save(self._original)},
        )
        self._begin(self._entry, self._original, note)
        return self._entry

    def act(self, note: Note) -> ChangeEntry:
        """Define the domain in libvirt, and record the outcome."""
        assert self._entry is not None, "begin comes first"
        entry, self._entry = self._entry, None
        answered = False
        try:
            self._define(entry.after)
            answered = True
        except RejectedError:
            answered = True
            raise
        finally:
            # Also after a failure: the definition may have changed nevertheless. If virsh was
            # stopped, by Ctrl-C or a timeout, libvirt may still define it; if it was edited since,
            # the step stays marked as not done.
            self._now = self._read()
            if (answered or not self._is_untouched) and not self._is_edited:
                entry = self._record_outcome(entry, self._now, note)
        fields = () if self._is_edited else list_dropped_fields(self.tuned, self._now)
        if fields:
            dropped = self.store.save(self._now)
            self._define(self.store.save(self._original))
            self._record_outcome(entry, self._original, note)
            raise HostError(
                f"{self.state.name}: libvirt changed {'; '.join(fields)}; the original is back",
                hint="update libvirt, or choose another --layout; its definition was "
                f"{self.store.definition_path(dropped)}",
            )
        self._is_done = True
        return entry

    def take_back(self, note: Note) -> None:
        """Restore the definition from before `do`, if it was replaced and not edited."""
        if self._entry is not None:  # begun, and no more
            note(self._last or self._entry.with_state(ChangeState.REJECTED))
        elif self._is_done and not self._is_edited and self._is_still(self._now):
            self._define(self.store.save(self._original))
            last = self.store.definition()
            assert last is not None, "it was begun"
            self._record_outcome(last, self._original, note)

    def undo(self, entry: ChangeEntry, note: Note, replaces: bytes) -> ChangeEntry:
        """Define the original again. replaces: the definition that may be replaced. Raises
        InputError if it was edited meanwhile."""
        entry = with_facts(entry, name=self.state.name, found=self.store.save(replaces))
        self._begin(entry.with_state(ChangeState.UNDOING), replaces, note)
        try:
            self._define(entry.before)
        except RejectedError:
            if self._last is not None:
                note(self._last)
            raise
        entry = entry.with_state(ChangeState.UNDONE)
        note(entry)
        return entry

    @property
    def _is_untouched(self) -> bool:
        return self._now is not None and is_same_definition(self._now, self._original)

    @property
    def _is_edited(self) -> bool:
        """Since it was defined."""
        now = self._now
        changed = now is not None and not self._is_untouched
        return changed and is_edited(self.tuned, self._original, now or b"")

    def _read(self) -> bytes:
        return self.virsh.read_definition(self.state.uuid)

    def _is_still(self, expected_xml: bytes | None) -> bool:
        now = self._read()
        return expected_xml is not None and is_same_definition(now, expected_xml)

    def _define(self, document: str | None) -> None:
        self.store.read_document(document)  # raises if it differs from what was saved
        self.virsh.define(str(self.store.definition_path(document)), self._lock)

    def _record_outcome(self, entry: ChangeEntry, definition: bytes, note: Note) -> ChangeEntry:
        """Record the definition that libvirt has after its answer."""
        is_back = is_same_definition(definition, self._original)
        is_first = self._base == compute_sha256(self._original)
        state = ChangeState.REJECTED if is_back and is_first else ChangeState.DONE
        entry = with_facts(entry, found=self.store.save(definition)).with_state(state)
        note(entry)
        return entry

    def _begin(self, entry: ChangeEntry, expected_xml: bytes, note: Note) -> None:
        """Write the entry of a change, then check that the definition is still the expected one.

        libvirt has no compare-and-define: an edit within the next milliseconds is lost. Raises
        InputError.
        """
        note(entry)
        if self._is_still(expected_xml):
            return
        # Reset to before the change: the original of a line with "rejected" is never restored.
        note(self._last or entry.with_state(ChangeState.REJECTED))
        self._entry = None
        raise InputError(
            f"{self.state.name} was edited in between; nothing was changed", hint="run it again"
        )


def with_facts(entry: ChangeEntry, **facts: str) -> ChangeEntry:
    return structs.replace(entry, facts={**entry.facts, **facts})


def first_original(store: DomainStore, state: DomainState, original: bytes, connect: str) -> str:
    """Return the sha256 of the original to restore: the first original, if homenode's definition
    replaced it. A definition with homenode's mark is an original only if no record has an earlier
    one."""
    entry = store.definition()
    if entry is None or (base := entry.before) is None:
        return compute_sha256(original)
    if _is_saved(store, base, original):
        return base
    if entry.what not in TO_UNDO:
        if not is_placed(original) or is_placed(store.read_document(base)):
            return compute_sha256(original)
        entry = entry.with_state(ChangeState.BEGIN)  # the user has defined the tuned document again
    if is_ours(store, entry, original):
        return base  # applied again, or interrupted before it was read back
    name = entry.facts["name"]
    if state.name != name:
        raise make_renamed_error(store, entry, state, original, connect)
    forget = add_connection(connect, "homenode", "restore", state.argument, "--forget")
    hint = command_line(*forget) + " keeps the edits as the new original"
    raise make_edited_error(name, find_last_defined(store, entry, original), original, hint)


def is_recorded(base: str, definition: bytes) -> bool:
    """Return whether a definition is recorded as the original although homenode has placed it."""
    return base == compute_sha256(definition) and is_placed(definition)


def is_placed(definition: bytes) -> bool:
    """Return whether a definition carries homenode's mark."""
    return read_mark(open_domain(definition, "definition")) is not None


def is_ours(store: DomainStore, entry: ChangeEntry, definition: bytes) -> bool:
    """Return whether homenode wrote this definition and it was not edited since."""
    if _is_saved(store, entry.facts.get("found"), definition):
        return True
    if entry.what is not ChangeState.BEGIN:
        return False  # a restore leaves the previous document, or the original
    before = store.read_document(last_known_sha256(entry))
    return is_printed(store.read_document(entry.after), before, definition)


def _is_saved(store: DomainStore, name: str | None, definition: bytes) -> bool:
    """Return whether a definition is the one that was saved under that name."""
    return name is not None and is_same_definition(store.read_document(name), definition)


def last_known_sha256(entry: ChangeEntry) -> str | None:
    """sha256 of the definition that libvirt had when the entry was written, or None."""
    return entry.facts.get("found") or entry.before


def make_renamed_error(
    store: DomainStore, entry: ChangeEntry, state: DomainState, definition: bytes, connect: str
) -> InputError:
    """The error for a domain that was renamed after its record was written (`virsh domrename`)."""
    name = entry.facts["name"]
    last = store.read_document(entry.facts.get("found") or entry.after)
    is_name_alone = count_differences(last, definition) == 2  # the element in either document
    restore = add_connection(connect, "homenode", "restore", state.argument, "--keep-edits")
    back = ("virsh", "-c", connect, "domrename", "--domain", state.uuid)
    return InputError(
        f"{state.name} was {name} when homenode applied a layout: it was renamed"
        + ("" if is_name_alone else " and edited"),
        hint=command_line(*restore)
        + " removes the layout and keeps the name; or rename it back first: "
        + command_line(*back, "--new-name", name),
    )


def check_current(virsh: Virsh, state: DomainState, original: bytes) -> None:
    if not is_same_definition(virsh.read_definition(state.uuid), original):
        raise InputError(
            f"{state.name} was edited in between, since the plan was made", hint="plan it again"
        )


def list_dropped_fields(tuned_xml: bytes, printed_xml: bytes) -> tuple[str, ...]:
    """Return the fields of `tuned_xml` that libvirt dropped or changed; added addresses and
    defaults do not count. Raises ParseError or InputError."""
    tuned_vm = build_vm(open_domain(tuned_xml, "the tuned definition"))
    stored_vm = build_vm(open_domain(printed_xml, "libvirt's definition"))
    return tuple(
        f"{comparison.subject}: {comparison.expected} became {comparison.observed}"
        for comparison in diff(tuned_vm, stored_vm)
    )


def is_printed(tuned_xml: bytes, before: bytes, printed: bytes) -> bool:
    """Return whether `printed` is what libvirt printed of `tuned_xml`, and was not edited since.

    before: the definition that `tuned_xml` was made from, as libvirt printed it. libvirt writes
    defaults and addresses into what is new in `tuned_xml`, and prints all else as before.
    Raises ParseError or InputError.
    """
    return not is_edited(tuned_xml, before, printed) and not list_dropped_fields(tuned_xml, printed)


def is_edited(tuned: bytes, before: bytes, printed: bytes) -> bool:
    """Return whether a definition differs from a given one in what neither libvirt nor the step
    from `before` changes. Raises ParseError or InputError."""
    ports = list_added_ports(open_domain(tuned, "definition"), open_domain(printed, "definition"))
    old, new, stored_parts = _parse_parts(before), _parse_parts(tuned), _parse_parts(printed, ports)
    if (old & new) - stored_parts or _count_devices(new) != _count_devices(stored_parts):
        return True
    # Anything else that `tuned` does not have is libvirt's, in an element that changed, or
    # the address of a device that did: of a GPU that the VM did not have.
    paths = {path for path, _ in (new - old) + (old - new)}
    paths |= {f"{path}/address" for path in paths if path.startswith("/domain/devices/")}
    return any(path not in paths for path, _ in stored_parts - new)


def find_last_defined(store: DomainStore, entry: ChangeEntry, now: bytes) -> bytes:
    """The definition that was edited; of an interrupted step, the more similar of its two."""
    other = {ChangeState.BEGIN: entry.after, ChangeState.UNDOING: entry.before}.get(entry.what)
    names = [last_known_sha256(entry), *([other] if other else [])]
    return min(map(store.read_document, names), key=lambda text: count_differences(text, now))


def make_edited_error(name: str, last: bytes, now: bytes, hint: str) -> InputError:
    """Return the error for edits since `last`; it names the first edit: "vcpu 88, now 64"."""
    old, new = (build_vm(open_domain(xml, "definition")) for xml in (last, now))
    edits = diff(old, new)
    texts = [
        f"{c.subject.strip('<>')}{'' if c.fact.show_both else f' {c.expected}'}, now {c.observed}"
        for c in edits
    ]
    if not texts:
        before, after = _parse_parts(last), _parse_parts(now)
        paths = dict.fromkeys(path for path, _ in (*(after - before), *(before - after)))
        texts = [path.removeprefix("/domain/") for path in paths]
    text, *others = texts or ["the order of its elements"]
    text += f"; {plural(len(others), 'more edit')}" if others else ""
    return InputError(f"{name} was edited after homenode apply: " + text, hint=hint)


def count_differences(definition: bytes, other: bytes) -> int:
    """Count the elements that only one of two definitions has."""
    first, second = _parse_parts(definition), _parse_parts(other)
    return ((first - second) + (second - first)).total()


def _count_devices(parts: Counter[tuple[str, str]]) -> Counter[str]:
    """Count the devices of each kind."""
    kinds: Counter[str] = Counter()
    for (path, _), count in parts.items():
        parent, _, kind = path.rpartition("/")
        if parent == "/domain/devices":
            kinds[kind] += count
    return kinds


def _parse_parts(document: bytes, ports: frozenset[int] = frozenset()) -> Counter[tuple[str, str]]:
    """Return (path of names, attributes and text) of each element by itself. ports: indices of PCI
    controllers that are skipped."""
    definition = open_domain(document, "definition")
    starts = {element.start for index, element in pci_controllers(definition) if index in ports}
    parts: Counter[tuple[str, str]] = Counter()
    stack = [("", definition.root)]
    while stack:
        parent, element = stack.pop()
        path = f"{parent}/{element.name}"
        parts[path, f"{sorted(element.attributes)} {element.text.strip()}"] += 1
        stack += [(path, child) for child in element.children if child.start not in starts]
    return parts


def find_lost_passwords(original: bytes, tuned_xml: bytes) -> tuple[str, ...]:
    """Return the types of displays that have a password only in the original. `virsh dumpxml` omits
    passwords without --security-info."""
    before = _parse_displays(original, "the definition")
    after = dict(_parse_displays(tuned_xml, "the tuned definition"))
    return tuple(kind for kind, has in before if has and not after.get(kind, True))


def _parse_displays(document: bytes, source: str) -> tuple[tuple[str, bool], ...]:
    devices = open_domain(document, source).root.child("devices")
    return tuple(
        (element.get("type") or "graphics", element.get("passwd") is not None)
        for element in (() if devices is None else devices.all("graphics"))
    )
