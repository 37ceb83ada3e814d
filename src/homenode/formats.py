"""Formats: the only codec for stored data, as JSON with a kind and a version, and the parser of
JSON of guests, tools and files, which no input can crash.

A document, or the first line of a file of lines, begins with "format": "homenode.<kind>/<version>".
Fields are the record's own, sets of CPUs are lists such as "0-3,8", PCI addresses are texts.
Records of lines omit fields at their defaults.
docs/reference/formats documents each kind.
"""

import json
from functools import lru_cache
from threading import RLock
from typing import Any, TypeVar, overload

import msgspec

from homenode.bdf import PciAddress
from homenode.cpuset import CpuSet
from homenode.errors import HomenodeError, InputError

T = TypeVar("T")

TYPES = RLock()
"""Lock for what makes msgspec look at a type: it stores what it knows of one before it is whole,
and a second thread that meets the type then ends the process with SIGSEGV. Seen with 0.22.0."""


class NotJsonError(ValueError):
    """Not JSON, not UTF-8, nested too deep, or not of the requested type."""


@overload
def decode_json(text: str | bytes) -> Any: ...
@overload
def decode_json(text: str | bytes, record_type: type[T]) -> T: ...
def decode_json(text: str | bytes, record_type: Any = Any) -> Any:
    """Return the value of a text. Raises NotJsonError, with the fault.

    >>> decode_json("[" * 100_000)
    Traceback (most recent call last):
    homenode.formats.NotJsonError: nested too deep
    """
    try:
        with TYPES:
            return msgspec.json.decode(text, type=record_type)
    except RecursionError:
        raise NotJsonError("nested too deep") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise NotJsonError(str(error) if text.strip() else "nothing") from None


H = TypeVar("H")

VERSIONS = dict.fromkeys(
    """
    host snapshot plan pool refusal findings results comparison bench trial
    trial-config change link-rate slurm-study slurm-report applied imported-runs trial-status
    """.split(),
    1,
)
"""The version of each kind that this program writes and reads."""

_WRITERS = {"plan": "homenode plan --save-plan FILE writes one"}
"""Hints: the command that writes a kind which users name as a file."""


def encode(
    kind: str,
    value: Any,
    head: dict[str, Any] | None = None,
    changes: dict[str, Any] | None = None,
) -> str:
    """Return the document of a value; `head` comes between "format" and the value's own fields.
    changes: replaced values of fields."""
    fields = {
        field.encode_name: getattr(value, field.name) for field in msgspec.structs.fields(value)
    }
    document = {"format": _format(kind), **(head or {}), **fields, **(changes or {})}
    builtins = msgspec.to_builtins(document, enc_hook=_encode_text)
    return msgspec.json.format(encode_json(builtins), indent=2).decode() + "\n"


def encode_json(value: Any) -> bytes:
    """JSON, with "?" for each byte that is not UTF-8: what files of a host hold may have any.

    >>> encode_json(["quiet", "m\\udcfcde"])
    b'["quiet","m?de"]'
    """
    try:
        return msgspec.json.encode(value, enc_hook=_encode_text)
    except UnicodeEncodeError:
        builtins = msgspec.to_builtins(value, enc_hook=_encode_text)
        return json.dumps(builtins, ensure_ascii=False, separators=(",", ":")).encode(
            "utf-8", "replace"
        )


def decode(text: str | bytes, kind: str, record_type: type[T], source: str) -> T:
    """Return the value of a document. Unknown fields are ignored (for example a `head`). Raises
    InputError for another kind or version, text that is not JSON, or a missing field."""
    document = check_format(text, kind, source)
    return _convert(document, record_type, f"{source}: not a valid homenode.{kind}")


def read_head_line(kind: str, value: Any) -> str:
    """Return the first line of a file of lines."""
    head = {"format": _format(kind), **msgspec.to_builtins(value, enc_hook=_encode_text)}
    return encode_json(head).decode() + "\n"


def find_kind(text: bytes) -> str | None:
    """Return the kind of a document, or of a first line, of whatever version; None without one."""
    try:
        document = decode_json(text)
    except NotJsonError:
        return None
    stored_format = document.get("format") if isinstance(document, dict) else None
    owner, _, kind = (
        stored_format.partition(".") if isinstance(stored_format, str) else ("", "", "")
    )
    return kind.partition("/")[0] if owner == "homenode" else None


def line(value: Any) -> str:
    return encode_json(value).decode() + "\n"


def decode_head(text: bytes, kind: str, record_type: type[T], source: str) -> T:
    """Return the value of a first line. Raises InputError."""
    record = decode_record(text, f"{source}:1")
    _check_format(record, kind, f"{source}:1")
    return convert(record, kind, record_type, f"{source}:1")


def decode_record(text: bytes, position: str) -> dict[str, Any]:
    """Return a line as a JSON object. Raises InputError."""
    try:
        record = decode_json(text)
    except NotJsonError as error:
        raise InputError(f"{position}: expected a line of JSON, found: {error}") from None
    if not isinstance(record, dict):
        raise InputError(f"{position}: expected a JSON object, found {type(record).__name__}")
    return record


def convert(record: object, kind: str, record_type: type[T], position: str) -> T:
    """Return the value of a line's object. Raises InputError."""
    return _convert(record, record_type, f"{position}: expected a line of homenode.{kind}, found")


def decode_journal(
    content: bytes,
    kind: str,
    head: type[H],
    entry: type[T],
    source: str,
) -> tuple[H, tuple[T, ...]]:
    """Head and entries of a journal's whole lines. Raises InputError that names the line."""
    lines = content.split(b"\n")[:-1]
    if not lines:
        raise InputError(f"{source}: no homenode.{kind} head in it")
    first = decode_head(lines[0], kind, head, source)
    entries = []
    for number, text in enumerate(lines[1:], start=2):
        position = f"{source}:{number}"
        entries.append(convert(decode_record(text, position), kind, entry, position))
    return first, tuple(entries)


def decode_plain_lines(text: bytes, record_type: type[T]) -> list[T] | None:
    """Return the values of whole lines of one type, in one step; None if any line is not one."""
    try:
        with TYPES:
            records = msgspec.json.Decoder(record_type, dec_hook=_decode_text).decode_lines(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError, HomenodeError):
        return None
    return records if len(records) == text.count(b"\n") else None


def _format(kind: str) -> str:
    return f"homenode.{kind}/{VERSIONS[kind]}"


def check_format(text: str | bytes, kind: str, source: str) -> object:
    """Return a document, or a first line. Raises InputError for another kind or version."""
    try:
        document = decode_json(text)
    except NotJsonError as error:
        raise InputError(
            f"{source}: expected a homenode.{kind} document, found: {error}",
            hint=_WRITERS.get(kind),
        ) from None
    _check_format(document, kind, source)
    return document


def _check_format(document: object, kind: str, source: str) -> None:
    stored_format = document.get("format") if isinstance(document, dict) else None
    if not isinstance(stored_format, str):
        raise InputError(
            f'{source}: not a homenode.{kind} document: missing "format": "{_format(kind)}"',
            hint=_WRITERS.get(kind),
        )
    name, _, version = stored_format.partition("/")
    is_number = version.isascii() and version.isdigit() and len(version) < 7
    if name != f"homenode.{kind}" or not is_number:
        raise InputError(
            f"{source}: expected a homenode.{kind} document, found {stored_format[:60]!r}",
            hint=_WRITERS.get(kind),
        )
    if int(version) != VERSIONS[kind]:
        raise InputError(
            f"{source}: expected {_format(kind)}, found version {version}",
            hint="another build of homenode wrote it: read it with that build, or create it again",
        )


def _convert(record: object, record_type: type[T], expected: str) -> T:
    try:
        with TYPES:
            return msgspec.convert(record, record_type, dec_hook=_decode_text)
    except (msgspec.ValidationError, HomenodeError) as error:
        raise InputError(f"{expected}: {error}") from None


def _encode_text(value: Any) -> str:
    if isinstance(value, CpuSet | PciAddress):
        return str(value)
    raise NotImplementedError(f"no text for {type(value).__name__}")


def _decode_text(value_type: type, value: Any) -> Any:
    if isinstance(value, str) and (value_type is CpuSet or issubclass(value_type, PciAddress)):
        parser: Any = _parse_value  # mypy takes a class for no Hashable
        return parser(value_type, value)
    raise TypeError(f"expected text, found {type(value).__name__}")


@lru_cache(4096)
def _parse_value(value_type: Any, text: str) -> Any:
    """Parse a set of CPUs or an address; cached, because a file repeats few values."""
    return value_type.parse(text)
