"""CertificateStep: a certificate in the metadata of a domain, and what was there before. [I/O]

libvirt replaces the element whole, in the definition and, where the domain runs, in the running
instance too. What was there before is in the journal: `homenode restore` puts it back.
"""

from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from homenode.change.journal import Journal, domain_journal, domain_journals
from homenode.change.step import ChangeEntry, ChangeState, Note
from homenode.errors import InputError
from homenode.vm.domain.document import parse_document
from homenode.vm.domain.edits import escaped
from homenode.vm.domain.metadata import CERTIFICATE
from homenode.vm.hypervisor.virsh import Virsh
from homenode.wording import command_line

KEEP = "certificate"
_FOLDER = "certificates"
_MOST_BYTES = 120_000
"""An argument of a program has 128 KiB. Source: MAX_ARG_STRLEN of Linux."""


class CertificateStep(Struct, frozen=True, kw_only=True):
    """The step. See ChangeStep. before, after of its entry are the texts themselves; its facts: the
    domain's `name`. text: the certificate; "" = only to undo. known: all lines of its journal."""

    virsh: Virsh
    uuid: str
    name: str
    text: str = ""
    known: tuple[ChangeEntry, ...] = ()

    def do(self, note: Note) -> ChangeEntry:
        element = _element(self.text)
        if len(element.encode()) > _MOST_BYTES:
            raise InputError(
                f"{self.name}: expected a certificate of at most {_MOST_BYTES} bytes for its "
                f"metadata, found {len(element.encode())}",
                hint="keep it in a file: -o FILE",
            )
        where = ("virsh", "-c", self.virsh.connect, "metadata", self.uuid, CERTIFICATE)
        entry = ChangeEntry(
            what=ChangeState.BEGIN,
            kind=KEEP,
            subject=self.uuid,
            before=self._at(live=not self.virsh.domain(self.uuid).persistent),
            after=self.text,
            by_hand=command_line(*where, "--config", "--remove"),
            facts={"name": self.name},
        )
        note(entry)
        self._put(self.text)
        done = entry.now(ChangeState.DONE)
        note(done)
        return done

    def undo(self, entry: ChangeEntry, note: Note) -> ChangeEntry:
        """Put back what was there before the first of ours, however often it was renewed. A
        certificate that somebody else put there since is left."""
        original = entry.before
        for one in reversed(self.known):
            original = one.before if one.after == original else original
        ours = {None, original, entry.after, *(one.after for one in self.known)}
        if any(self._at(live) not in ours for live in self._places()):
            kept = entry.now(ChangeState.KEPT)
            note(kept)
            return kept
        note(entry.now(ChangeState.UNDOING))
        self._put(original)
        undone = entry.now(ChangeState.UNDONE)
        note(undone)
        return undone

    def is_done(self, entry: ChangeEntry) -> bool:
        return any(self._at(live) == entry.after for live in self._places())

    def kept(self) -> str | None:
        """The certificate that the domain has. Raises InputError where the running instance has
        another one than the definition."""
        found = {self._at(live) for live in self._places()} - {None}
        if len(found) > 1:
            raise InputError(
                f"{self.name}: expected one certificate in its definition and as it runs, found two"
            )
        return next(iter(found), None)

    def _at(self, live: bool) -> str | None:
        element = self.virsh.metadata(self.uuid, CERTIFICATE, live=live)
        return None if element is None else parse_document(element.encode(), "metadata").root.text

    def _places(self) -> tuple[bool, ...]:
        """Definition and running instance, as far as it has them."""
        state = self.virsh.domain(self.uuid)
        return (*((False,) if state.persistent else ()), *((True,) if state.is_active else ()))

    def _put(self, text: str | None) -> None:
        element = None if text is None else _element(text)
        for live in self._places():
            if element is not None or self.virsh.metadata(self.uuid, CERTIFICATE, live=live):
                self.virsh.set_metadata(self.uuid, CERTIFICATE, element, live=live)


def _element(text: str) -> str:
    return f"<certificate>{escaped(text).decode()}</certificate>"


def certificate_journal(root: Path, virsh: Virsh, uuid: str, name: str) -> Journal:
    """The journal of a domain's certificates. root: homenode's own folder."""
    words = command_line("homenode", "verify", "--live", name, "--certify")
    return domain_journal(root / _FOLDER, virsh.connect, uuid, name, words, "--certificate")


def certificate_journals(root: Path) -> Iterator[Journal]:
    """Those of all domains."""
    return domain_journals(root / _FOLDER, "homenode verify --certify")


def take_out_certificate(virsh: Virsh, root: Path, uuid: str, name: str) -> tuple[ChangeEntry, ...]:
    """Put back what was in the metadata before; how it came out."""
    journal = certificate_journal(root, virsh, uuid, name)
    step = CertificateStep(virsh=virsh, uuid=uuid, name=name, known=journal.entries())
    return journal.undo(lambda entry: step)
