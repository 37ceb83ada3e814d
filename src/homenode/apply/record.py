"""Record: what homenode did to a domain's definition, written before it does it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import msgspec

from homenode.cpuset import CpuSet
from homenode.errors import InputError, ParseError
from homenode.hypervisor.domain_state import LivePin

T = TypeVar("T")

FORMAT = "homenode.apply/1"
"""Written beside the saved documents; read by the same program on the same machine only."""


class Step(StrEnum):
    """How far it is. Each "-ing" is written before libvirt is told, each "-ed" after."""

    APPLYING = "applying"
    APPLIED = "applied"
    RESTORING = "restoring"
    RESTORED = "restored"


@dataclass(frozen=True, slots=True)
class Record:
    """One domain of one libvirt daemon. original, tuned, applied: sha256 of saved documents.

    original: as libvirt printed it before the first change. tuned: what libvirt was given last.
    applied: what libvirt printed after it; None until it was read back.
    """

    connect: str
    name: str
    uuid: str
    step: Step
    original: str
    tuned: str
    applied: str | None


@dataclass(frozen=True, slots=True)
class LiveRecord:
    """Pins of a running domain. before, after: of the threads changed.

    run_id: libvirt's number of that run. run_mark: see run_mark.py; None for a domain elsewhere.
    """

    connect: str
    name: str
    uuid: str
    run_id: int
    before: tuple[LivePin, ...]
    after: tuple[LivePin, ...]
    run_mark: str | None = None

    def is_of(self, run_id: int | None, mark: str | None) -> bool:
        """Whether that run is the one whose pins these are."""
        return self.run_id == run_id and (None in (self.run_mark, mark) or self.run_mark == mark)


def encode_record(record: Record | LiveRecord) -> bytes:
    """The record as JSON, with the format's name first."""
    fields = {name: getattr(record, name) for name in record.__dataclass_fields__}
    document = msgspec.to_builtins({"format": FORMAT, **fields}, enc_hook=str)
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def decode_record(content: bytes, source: str) -> Record:
    """The record of a file. Raises InputError."""
    return _decode(content, source, Record)


def decode_live_record(content: bytes, source: str) -> LiveRecord:
    """The record of live pins of a file. Raises InputError."""
    return _decode(content, source, LiveRecord)


def _decode(content: bytes, source: str, of: type[T]) -> T:
    try:
        document = msgspec.json.decode(content)
        found = document.get("format") if isinstance(document, dict) else None
        if found != FORMAT:
            raise ParseError(source, FORMAT, str(found))
        return msgspec.convert(document, of, dec_hook=_from_text)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise InputError(
            f"{source}: expected a {FORMAT} record, found: {error}",
            hint="the documents beside it are whole: virsh define the right one, then move the "
            "folder away",
        ) from None


def _from_text(of: type, value: object) -> CpuSet:
    assert of is CpuSet, "the only type that is stored as a text of its own"
    return CpuSet.parse(str(value))
