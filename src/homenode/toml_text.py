"""TOML files as tables of declared keys. What is wrong is named: file: key: expected, found.

A TomlTable's fields are the keys that a file may have there, with their types. msgspec checks and
converts; a refusal is worded from the field's declaration, never from msgspec's own message.
"""

import re
import tomllib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, inspect

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError, ParseError
from homenode.json_text import TYPES
from homenode.text import did_you_mean
from homenode.units import parse_bytes

T = TypeVar("T")

Line = Annotated[str, Meta(pattern=r"\A[^\n\r\0]*\Z", extra={"expected": "a text of one line"})]
NO_LIMIT = 1 << 62
Count = Annotated[int, Meta(ge=0, le=NO_LIMIT)]

_MAX_CHARACTERS = 1 << 20
_MOST_VCPUS = 1 << 16
_MAX_DOTS = 20_000_000
"""Sum over lines of the squares of their dots: to read a key of n parts takes n^2 steps and as much
memory (Python's tomllib, 3.11 to 3.14). No line has so many that lists addresses or sizes."""

_MANY = 15
_PATH = re.compile(r" - at `\$([^`]*)`\Z")
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")


class Size(int):
    """Bytes of a text such as "512GiB"; only 0 may be a number: 512 could mean bytes or GiB."""

    EXPECTED: ClassVar = 'a size with its unit, such as "512GiB"'


class _Place(NamedTuple):
    source: str
    location: str


class TomlTable(msgspec.Struct, forbid_unknown_fields=True, dict=True):
    """A table of a file, which knows where it stands there."""

    page: ClassVar[str] = ""
    """The document that lists the keys, where they are too many for a message."""

    @property
    def _place(self) -> _Place:
        place: _Place = self.__dict__["place"]
        return place

    @property
    def source(self) -> str:
        """The name of the file, for messages."""
        return self._place.source

    @property
    def location(self) -> str:
        """The table's key in the file; "" for the file itself."""
        return self._place.location

    def locate(self, source: str, location: str) -> None:
        """Notes where the table stands, and those within it."""
        self.__dict__["place"] = _Place(source, location)
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            for i, element in enumerate(value if isinstance(value, tuple) else (value,)):
                if isinstance(element, TomlTable):
                    index = f"[{i}]" if isinstance(value, tuple) else ""
                    element.locate(source, f"{self.name_of(field.encode_name)}{index}")

    def name_of(self, key: str) -> str:
        """The whole name of a key, as messages give it."""
        return _join(self.location, key)

    def refusal(self, key: str, expected: str, value: object) -> InputError:
        """The error that a key has an unfit value; for raising."""
        return refusal(self.source, self.name_of(key), expected, value)

    def check_bounds(self, key: str, value: int, least: int, limit: int) -> int:
        """The value of a key whose limits depend on other keys. Raises InputError."""
        if not least <= value <= limit:
            raise self.refusal(key, f"a whole number, {least} to {limit}", value)
        return value


class VmSizeTable(TomlTable, kw_only=True):
    """What a table says of the size of a VM."""

    vcpus: Annotated[int, Meta(ge=1, le=_MOST_VCPUS)] | None = None
    page_size: Size | None = None


def decode_toml(
    text: str, table_type: type[T], source: str, parse_float: Callable[[str], object] = float
) -> T:
    """The table of a whole file. source: its name, for messages. Raises InputError."""
    try:
        values = read_toml(text, parse_float)
    except ValueError as error:
        raise InputError(f"{source}: expected TOML, found: {error}") from None
    return decode_value(values, table_type, source, "")


def read_toml(text: str, parse_float: Callable[[str], object] = float) -> dict[str, Any]:
    """What a file holds. Raises ValueError for what is no TOML, or costs too much to read."""
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"{len(text)} characters, more than {_MAX_CHARACTERS}")
    if sum(line.count(".") ** 2 for line in text.split("\n")) > _MAX_DOTS:
        raise ValueError("lines with too many dots: keys of thousands of parts")
    try:
        return tomllib.loads(text, parse_float=parse_float)
    except RecursionError:
        raise ValueError("values nested too deeply") from None


def decode_value(value: object, value_type: type[T], source: str, location: str) -> T:
    """A value that stands at a key, as a table or another type. Raises InputError."""
    try:
        with TYPES:
            decoded = msgspec.convert(value, value_type, dec_hook=_from_text)
    except msgspec.ValidationError as error:
        raise _explain(error, value, value_type, source, location) from None
    except RecursionError:
        raise refusal(source, location, "tables nested less deeply", "too many") from None
    if isinstance(decoded, TomlTable):
        decoded.locate(source, location)
    return decoded


def refusal(source: str, location: str, expected: str, value: object) -> InputError:
    """The error that the value at a key is unfit; for raising."""
    value = list(value) if isinstance(value, tuple) else value
    shown = "nothing" if value is None else repr(value)
    if len(shown) > 120:
        shown = f"{len(value)} of them" if isinstance(value, list) else shown[:117] + "..."
    place = f"{source}: {location}" if location else source
    return InputError(f"{place}: expected {expected}, found {shown}")


def _join(location: str, key: str) -> str:
    return f"{location}.{key}" if location and key else location or key


def _from_text(value_type: type, value: Any) -> Any:
    """Sizes, sets of PUs, addresses and whatever else has `from_toml`. Raises ValueError."""
    read: Callable[[Any], Any] | None = getattr(value_type, "from_toml", None)
    if read is not None:
        return read(value)
    if value_type is Size and value == 0 and type(value) is int:
        return Size(0)
    if isinstance(value, str):
        try:
            if value_type is Size and not value.strip().isdigit():
                return Size(parse_bytes(value))
            if value_type is CpuSet or value_type is Bdf:
                parsed: Any = value_type
                return parsed.parse(value)
        except ParseError as error:
            raise ValueError(error.expected) from None
        except InputError:
            pass
    raise ValueError(_EXPECTED.get(value_type, value_type.__name__))


_EXPECTED: Mapping[type, str] = {
    Size: Size.EXPECTED,
    CpuSet: 'PUs such as "0-3,8"',
    Bdf: 'an address such as "3b:00.0"',
}


def _explain(
    error: msgspec.ValidationError, value: Any, value_type: type, source: str, location: str
) -> InputError:
    """What is wrong at the place that msgspec gives, by the declaration of that place."""
    kind: inspect.Type = inspect.type_info(value_type)
    # First, since msgspec prints an unknown key behind no place here: it can look like one.
    unknown = _unknown_key(kind, value, source, location)
    if unknown is not None:
        return unknown
    path = _PATH.search(str(error))
    steps = path[1].partition("[...]")[0] if path else ""  # [...]: some value of a mapping
    for name, index in _STEP.findall(steps):
        kind = _inner(kind, name)
        value = value[name or int(index)]
        location = _join(location, name) if name else f"{location}[{index}]"
    unknown = _unknown_key(kind, value, source, location)
    if unknown is not None:
        return unknown
    for key, field in _fields(kind).items() if isinstance(value, Mapping) else ():
        if field.required and key not in value:
            return refusal(source, _join(location, key), _words(field.type), None)
    cause = error.__cause__
    expected = str(cause) if isinstance(cause, ValueError) else _words(kind)
    return refusal(source, location, expected, value)


def _unknown_key(kind: inspect.Type, value: Any, source: str, location: str) -> InputError | None:
    """The refusal of a table's first key that is not declared; None where there is none."""
    table, keys = _table(kind), tuple(_fields(kind))
    if table is None or not isinstance(value, Mapping):
        return None
    key = next((str(name) for name in value if name not in keys), None)
    if key is None:
        return None
    page = getattr(table.cls, "page", "")
    names = f"one of {', '.join(sorted(keys))}"
    if len(keys) > _MANY and page:
        names = f"a key that {page} lists here"
    error = refusal(source, _join(location, key), names, key)
    error.hint = did_you_mean(key, keys).strip() or None
    return error


def _table(kind: inspect.Type) -> inspect.StructType | None:
    return next(
        (
            alternative
            for alternative in _alternatives(kind)
            if isinstance(alternative, inspect.StructType)
        ),
        None,
    )


def _fields(kind: inspect.Type) -> dict[str, inspect.Field]:
    table = _table(kind)
    return {} if table is None else {field.encode_name: field for field in table.fields}


def _inner(kind: inspect.Type, name: str) -> inspect.Type:
    """What is declared for a field of a table, or (name "") for the entries of a list."""
    for alternative in _alternatives(kind):
        if name and isinstance(alternative, inspect.StructType):
            return next(field.type for field in alternative.fields if field.encode_name == name)
        if not name and isinstance(alternative, inspect.VarTupleType):
            return alternative.item_type
    return inspect.AnyType()


def _alternatives(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    if isinstance(kind, inspect.Metadata):
        return _alternatives(kind.type)
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _words(kind: inspect.Type) -> str:
    """What a declaration accepts, for people."""
    if isinstance(kind, inspect.Metadata):
        return str((kind.extra or {}).get("expected") or _words(kind.type))
    if isinstance(kind, inspect.UnionType):
        return " or ".join(
            _words(choice) for choice in kind.types if not isinstance(choice, inspect.NoneType)
        )
    if isinstance(kind, inspect.IntType):
        return _range("a whole number", kind)
    if isinstance(kind, inspect.FloatType):
        return _range("a number", kind)
    if isinstance(kind, inspect.EnumType):
        return f"one of {', '.join(str(choice.value) for choice in kind.cls)}"
    if isinstance(kind, inspect.LiteralType):
        return f"one of {', '.join(map(str, kind.values))}"
    if isinstance(kind, inspect.VarTupleType):
        return f"a list, each {_words(kind.item_type)}"
    if isinstance(kind, inspect.CustomType):
        return _EXPECTED.get(kind.cls, kind.cls.__name__)
    return _PLAIN_WORDS.get(type(kind), "another type")


_PLAIN_WORDS: Mapping[type, str] = {
    inspect.StrType: "a text",
    inspect.BoolType: "true or false",
    inspect.DictType: "a table",
    inspect.StructType: "a table",
}


def _range(noun: str, kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.ge is None:
        return noun
    upper = f" to {kind.le}" if kind.le is not None and kind.le < NO_LIMIT else " or more"
    return f"{noun}, {kind.ge}{upper}"
