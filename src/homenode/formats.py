"""Formats: every value that homenode stores, as JSON with a kind and a version.

A document opens with "format": "homenode.<kind>/<version>". Fields are the dataclass's own, sets of
PUs are lists such as "0-3,8", PCI addresses are texts. docs/formats documents each kind.
"""

from typing import Any, TypeVar

import msgspec

from homenode.bdf import PciAddress
from homenode.cpuset import CpuSet
from homenode.errors import HomenodeError, InputError

T = TypeVar("T")

VERSIONS = {
    "host": 2,
    "plan": 1,
    "refusal": 1,
    "findings": 1,
    "results": 2,
    "comparison": 1,
    "verdict": 1,
}
"""Newest version of each kind that this program writes and reads."""


def encode(kind: str, value: Any, head: dict[str, Any] | None = None) -> str:
    """The document of a value; `head` comes between "format" and the value's own fields."""
    document = {"format": f"homenode.{kind}/{VERSIONS[kind]}", **(head or {})}
    builtins = msgspec.to_builtins({**document, **_fields(value)}, enc_hook=_to_text)
    return msgspec.json.format(msgspec.json.encode(builtins), indent=2).decode() + "\n"


def decode(text: str | bytes, kind: str, of: type[T], source: str) -> T:
    """The value of a document. Fields that we do not know are ignored (a `head`, say).

    Raises InputError for another kind, a newer version, text that is no JSON or a missing field.
    """
    try:
        document = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{source}: expected JSON, found: {error}") from None
    found = document.get("format") if isinstance(document, dict) else None
    if not isinstance(found, str):
        raise InputError(
            f'{source}: expected "format": "homenode.{kind}/{VERSIONS[kind]}", found none'
        )
    name, _, version = found.partition("/")
    if name != f"homenode.{kind}" or not version.isdigit():
        raise InputError(f"{source}: expected a homenode.{kind} document, found {found!r}")
    if int(version) > VERSIONS[kind]:
        raise InputError(
            f"{source}: expected homenode.{kind} up to version {VERSIONS[kind]}, found {version}",
            hint="it was written by a newer homenode: update this one",
        )
    try:
        return msgspec.convert(document, of, dec_hook=_from_text)
    except (msgspec.ValidationError, HomenodeError) as error:
        raise InputError(f"{source}: not a valid homenode.{kind}: {error}") from None


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _to_text(value: Any) -> str:
    if isinstance(value, CpuSet | PciAddress):
        return str(value)
    raise NotImplementedError(f"no text for {type(value).__name__}")


def _from_text(of: type, value: Any) -> Any:
    if isinstance(value, str) and (of is CpuSet or issubclass(of, PciAddress)):
        return of.parse(value)
    raise NotImplementedError(f"no {of.__name__} of {type(value).__name__}")
