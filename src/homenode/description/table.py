"""Table: one TOML table with the file and key that it stands under, read value by value.

Every reader refuses a value of another type or range in the words "file: key: expected, found".
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.units import parse_bytes

_MANY = 15


@dataclass(frozen=True, slots=True)
class Table:
    """The values of a table. where: its key in the file, "" for the file itself."""

    source: str
    where: str
    values: Mapping[str, object]

    @classmethod
    def of(cls, source: str, where: str, value: object, known: Collection[str]) -> "Table":
        """A table with none but known keys. Raises InputError that names the nearest known key."""
        if not isinstance(value, Mapping):
            raise refusal(source, where, "a table", value)
        for key in value:
            if key not in known:
                near = get_close_matches(str(key), known, n=1)
                names = f"one of {', '.join(sorted(known))}"
                if len(known) > _MANY:
                    names = "a key that docs/formats/host-toml.md lists here"
                raise InputError(
                    f"{source}: {_join(where, str(key))}: expected {names}, found {key!r}",
                    hint=f"did you mean {near[0]!r}?" if near else None,
                )
        return cls(source, where, value)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def refusal(self, key: str, expected: str, found: object) -> InputError:
        """The error that a key has an unfit value; for raising."""
        return refusal(self.source, _join(self.where, key), expected, found)

    def integer(self, key: str, default: int, least: int = 0, most: int = 1 << 62) -> int:
        value = self.optional_integer(key, least, most)
        return default if value is None else value

    def optional_integer(self, key: str, least: int = 0, most: int = 1 << 62) -> int | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            upper = f" to {most}" if most < 1 << 62 else " or more"
            raise self.refusal(key, f"a whole number, {least}{upper}", value)
        return value

    def integers(self, key: str, least: int = 0, most: int = 1 << 62) -> tuple[int, ...] | None:
        """Whole numbers of a number or a list of them; None where the key is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        listed = value if isinstance(value, list) else [value]
        return tuple(
            Table(self.source, self.where, {key: each}).integer(key, 0, least, most)
            for each in listed
        )

    def text(self, key: str, default: str = "") -> str:
        value = self.optional_text(key)
        return default if value is None else value

    def optional_text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, str) or any(c in value for c in "\n\r\0"):
            raise self.refusal(key, "a text of one line", value)
        return value

    def truth(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false", value)
        return value

    def choice(self, key: str, choices: Collection[str], default: str) -> str:
        value = self.text(key, default)
        if value not in choices:
            raise self.refusal(key, f"one of {', '.join(choices)}", value)
        return value

    def size(self, key: str) -> int | None:
        """Bytes of a text such as "512GiB"; 0 may be a number. None where the key is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if value == 0 and not isinstance(value, bool):
            return 0
        # A bare number has no unit: 512 could mean bytes or GiB.
        if not isinstance(value, str) or value.strip().isdigit():
            raise self.refusal(key, 'a size with its unit, such as "512GiB"', value)
        try:
            return parse_bytes(value)
        except InputError as error:
            raise InputError(f"{self.source}: {_join(self.where, key)}: {error.message}") from None

    def pus(self, key: str) -> CpuSet:
        """A PU list such as "0-3,8"; empty where the key is absent."""
        text = self.optional_text(key)
        return CpuSet() if text is None else CpuSet.parse(text, f"{self.source}: {self.key(key)}")

    def bdf(self, key: str) -> Bdf | None:
        """A PCI address such as "3b:00.0"; None where the key is absent."""
        text = self.optional_text(key)
        return None if text is None else Bdf.parse(text, f"{self.source}: {self.key(key)}")

    def key(self, key: str) -> str:
        """The whole name of a key, as messages give it."""
        return _join(self.where, key)

    def table(self, key: str, known: Collection[str]) -> "Table":
        """The table under a key, empty where it is absent."""
        return Table.of(self.source, _join(self.where, key), self.values.get(key, {}), known)

    def tables(self, key: str, known: Collection[str]) -> "tuple[Table, ...]":
        """The tables of a list of them ([[key]]), empty where it is absent."""
        return tuple(
            Table.of(self.source, f"{_join(self.where, key)}[{i}]", each, known)
            for i, each in enumerate(self.list(key))
        )

    def list(self, key: str) -> tuple[object, ...]:
        value = self.values.get(key, [])
        if not isinstance(value, list):
            raise self.refusal(key, "a list", value)
        return tuple(value)


def refusal(source: str, where: str, expected: str, found: object) -> InputError:
    shown = repr(found)
    shown = shown if len(shown) <= 120 else shown[:117] + "..."
    return InputError(f"{source}: {where}: expected {expected}, found {shown}")


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
