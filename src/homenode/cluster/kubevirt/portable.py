"""Portable: what the hook file needs of newer Pythons, for the Python 3.9 of KubeVirt's sidecar.

The generator of the hook file puts these in place of dataclasses, msgspec's records, enum.StrEnum
and zip(strict=).
Importing dataclasses costs more CPU than all of the hook's own work.
"""

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any


class StrEnum(str, Enum):  # noqa: UP042 - this is the replacement
    """enum.StrEnum as far as the package uses it: members are their values, also when printed."""

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:
        return format(str(self.value), spec)


class Made:
    """The default of a field that is made again for each instance."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


_NO_DEFAULT = object()
UNSET: Any = object()
"""msgspec.UNSET: an argument that is not given, where None says something."""


def field(
    *, default: Any = _NO_DEFAULT, default_factory: Callable[[], Any] | None = None, name: str = ""
) -> Any:
    """msgspec.field. name: in documents, which the hook has none of."""
    return default if default_factory is None else Made(default_factory)


def dataclass(cls: Any = None, *, order: bool = False, kw_only: bool = False, **_: bool) -> Any:
    """dataclasses.dataclass of a class that lists its own fields in `__fields__`.

    Equal by type and values, hashable by values, ordered with `order`. Nothing stops an assignment:
    mypy has seen to that.
    """
    if cls is None:
        return lambda named: dataclass(named, order=order, kw_only=kw_only)
    above = next((base for base in cls.__mro__[1:] if "__fields__" in vars(base)), None)
    inherited, by_name = (above.__fields__, above.__by_name__) if above else ((), frozenset())
    by_name |= frozenset(cls.__fields__ if kw_only else ())
    names = (*inherited, *(name for name in cls.__fields__ if name not in inherited))
    in_order = tuple(name for name in names if name not in by_name)
    given_defaults = ((name, getattr(cls, name, _NO_DEFAULT)) for name in names)
    defaults = {name: one for name, one in given_defaults if one is not _NO_DEFAULT}
    cls.__fields__, cls.__by_name__ = names, by_name
    after = getattr(cls, "__post_init__", None)

    def start(self: Any, *given: Any, **named: Any) -> None:
        values = vars(self)
        values.update(zip(in_order, given))  # noqa: B905 - Python 3.9 has no strict
        values.update(named)
        if len(given) + len(named) != len(values) or len(values) < len(names):
            for name in names:
                if name not in values:
                    if name not in defaults:
                        raise TypeError(f"{cls.__name__}: expected {name}, found none")
                    default = defaults[name]
                    values[name] = default.make() if isinstance(default, Made) else default
        if len(values) != len(names) or len(given) > len(in_order):
            raise TypeError(f"{cls.__name__}: expected {', '.join(names)}")
        if after is not None:
            after(self)

    def values_of(self: Any) -> tuple[Any, ...]:
        return tuple([getattr(self, name) for name in names])

    def equal(self: Any, other: Any) -> Any:
        return values_of(self) == values_of(other) if type(self) is type(other) else NotImplemented

    def text(self: Any) -> str:
        inside = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{cls.__name__}({inside})"

    cls.__init__, cls.__eq__ = start, equal
    cls.__hash__ = lambda self: hash(values_of(self))
    if "__repr__" not in vars(cls):
        cls.__repr__ = text
    if order:
        cls.__lt__ = lambda self, other: values_of(self) < values_of(other)
        cls.__le__ = lambda self, other: values_of(self) <= values_of(other)
        cls.__gt__ = lambda self, other: values_of(self) > values_of(other)
        cls.__ge__ = lambda self, other: values_of(self) >= values_of(other)
    return cls


def replace(value: Any, **changes: Any) -> Any:
    """dataclasses.replace."""
    return type(value)(**{**{name: getattr(value, name) for name in value.__fields__}, **changes})


class Struct:
    """msgspec.Struct as far as the package's records use it."""

    def __init_subclass__(cls, kw_only: bool = False, order: bool = False, **_: bool) -> None:
        dataclass(cls, order=order, kw_only=kw_only)


class structs:  # noqa: N801 - in place of a module
    """msgspec.structs."""

    replace = staticmethod(replace)


def zip_strict(*columns: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """zip(strict=True), for columns that end."""
    lists = [list(column) for column in columns]
    if len({len(column) for column in lists}) > 1:
        raise ValueError(f"expected columns of one length, found {[len(c) for c in lists]}")
    return zip(*lists)  # noqa: B905 - checked above
