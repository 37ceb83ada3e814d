"""Plugins: what other distributions register with homenode by Python's entry points. [I/O]"""

import re
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from homenode.errors import InputError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}\Z", re.ASCII)


def registered(group: str, taken: Collection[str] = ()) -> "Mapping[str, EntryPoint]":
    """The entry points of a group by their names, sorted; nothing of them is loaded.

    taken: homenode's own names. Raises InputError for a name that is no name, is taken, or is
    registered twice.
    """
    return _registered(group, tuple(taken), tuple(sys.path))


@lru_cache(maxsize=8)
def _registered(
    group: str, taken: tuple[str, ...], path: tuple[str, ...]
) -> "Mapping[str, EntryPoint]":
    """Of the distributions on Python's path: to read them all takes 50 ms."""
    found: dict[str, EntryPoint] = {}
    for one in sorted(_installed(group), key=lambda one: (one.name, _from(one))):
        if not _NAME.match(one.name):
            raise refused(one, "a name of lower-case letters, digits and -", repr(one.name))
        if one.name in taken:
            raise refused(one, "a name that homenode does not have", one.name)
        if one.name in found:
            raise refused(one, f"{one.name} once", f"it of {_from(found[one.name])}, too")
        found[one.name] = one
    return MappingProxyType(found)


def _installed(group: str) -> "Iterator[EntryPoint]":
    """A distribution that is on the path twice, or by two ways, is one."""
    from importlib.metadata import entry_points  # loads a parser of mails

    seen = set()
    for one in entry_points(group=group):
        key = (one.name, one.value, _from(one))
        if key not in seen:
            seen.add(key)
            yield one


def loaded(one: "EntryPoint", expected: str) -> object:
    """What the entry point names. expected: what it should be, for the error.

    Raises InputError where it cannot be loaded.
    """
    try:
        return one.load()
    except Exception as error:
        # What another distribution's module raises is not known, and its name is what helps.
        raise refused(one, f"{expected} that loads", f"{type(error).__name__}: {error}") from error


def refused(one: "EntryPoint", expected: str, found: str) -> InputError:
    """The error of an entry point that is not as it should be."""
    return InputError(
        f"entry point {one.name} = {one.value} of {_from(one)}: expected {expected}, found {found}",
        hint="remove or repair that distribution; homenode does without it",
    )


def _from(one: "EntryPoint") -> str:
    return "an unnamed distribution" if one.dist is None else one.dist.name
