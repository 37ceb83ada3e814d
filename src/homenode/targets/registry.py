"""Registry: the targets of homenode, and those that other distributions register. [I/O]"""

import re
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from homenode.errors import InputError
from homenode.targets.hypervisors import NAMES
from homenode.targets.target import Feature, Target

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

TARGETS = NAMES
"""Each is TARGET of the module of that name in `hypervisors`."""

GROUP = "homenode.targets"
"""The entry points with which an installed distribution registers a Target by its name."""

_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}\Z", re.ASCII)
_TAKEN = ("libvirt", *TARGETS)


def target_named(name: str) -> Target:
    """The target. Raises KeyError for an unknown name, InputError as `others`."""
    if name not in TARGETS:
        return _loaded(_others(tuple(sys.path))[name])
    target = import_module(f"homenode.targets.hypervisors.{name.replace('-', '_')}").TARGET
    assert isinstance(target, Target)
    return target


def others() -> tuple[str, ...]:
    """Names of targets that are not homenode's, sorted; nothing of them is loaded.

    Raises InputError for a name that is no name, is homenode's, or is registered twice.
    """
    return tuple(_others(tuple(sys.path)))


def recognised(content: bytes) -> str | None:
    """The target that a file is of, by its content. Others than ours are loaded, and asked, where
    none of ours takes it."""

    def one_of(names: tuple[str, ...]) -> str | None:
        return next((name for name in names if target_named(name).recognises(content)), None)

    return one_of(TARGETS) or one_of(others())


@lru_cache(maxsize=4)
def _others(path: tuple[str, ...]) -> "Mapping[str, EntryPoint]":
    """Of the distributions on Python's path."""
    found: dict[str, EntryPoint] = {}
    for one in sorted(_installed(), key=lambda one: (one.name, _from(one))):
        if not _NAME.match(one.name):
            raise _refused(one, "a name of lower-case letters, digits and -", repr(one.name))
        if one.name in _TAKEN:
            raise _refused(one, "a name that homenode does not have", one.name)
        if one.name in found:
            raise _refused(one, f"{one.name} once", f"it of {_from(found[one.name])}, too")
        found[one.name] = one
    return MappingProxyType(found)


def _installed() -> "Iterator[EntryPoint]":
    """A distribution that is on the path twice, or by two ways, is one."""
    from importlib.metadata import entry_points  # loads a parser of mails

    seen = set()
    for one in entry_points(group=GROUP):
        key = (one.name, one.value, _from(one))
        if key not in seen:
            seen.add(key)
            yield one


@lru_cache(maxsize=32)
def _loaded(one: "EntryPoint") -> Target:
    try:
        target = one.load()
    except Exception as error:
        # What another distribution's module raises is not known, and its name is what helps.
        raise _refused(one, "a target that loads", f"{type(error).__name__}: {error}") from error
    if not isinstance(target, Target):
        raise _refused(one, "a homenode.targets.target.Target", type(target).__name__)
    unsaid = [str(feature) for feature in Feature if feature not in target.support]
    if unsaid:
        raise _refused(one, "support for every feature", f"none for {', '.join(unsaid)}")
    return target


def _from(one: "EntryPoint") -> str:
    return "an unnamed distribution" if one.dist is None else one.dist.name


def _refused(one: "EntryPoint", expected: str, found: str) -> InputError:
    return InputError(
        f"entry point {one.name} = {one.value} of {_from(one)}: expected {expected}, found {found}",
        hint="remove or repair that distribution; homenode's own targets do not need it",
    )
