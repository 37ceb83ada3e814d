"""Registry: the targets of homenode and those of other distributions. [I/O]"""

from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING

from homenode.plugins import loaded, refused, registered
from homenode.vm.targets.hypervisors import NAMES
from homenode.vm.targets.target import Feature, Target

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

TARGETS = NAMES
"""Each is TARGET of the module of that name in `hypervisors`."""

GROUP = "homenode.targets"
"""The entry points with which an installed distribution registers a Target by its name."""

_TAKEN = ("libvirt", *TARGETS)


def target_named(name: str) -> Target:
    """The target. Raises KeyError for an unknown name, InputError as `others`."""
    if name not in TARGETS:
        return _loaded(registered(GROUP, _TAKEN)[name])
    target = import_module(f"homenode.vm.targets.hypervisors.{name.replace('-', '_')}").TARGET
    assert isinstance(target, Target)
    return target


def others() -> tuple[str, ...]:
    """Names of targets that are not homenode's, sorted; nothing of them is loaded.

    Raises InputError for a name that is no name, is homenode's, or is registered twice.
    """
    return tuple(registered(GROUP, _TAKEN))


def recognised(content: bytes) -> str | None:
    """The target that a file is of, by its content. Others than ours are loaded, and asked, where
    none of ours takes it."""

    def one_of(names: tuple[str, ...]) -> str | None:
        return next((name for name in names if target_named(name).recognises(content)), None)

    return one_of(TARGETS) or one_of(others())


@lru_cache(maxsize=32)
def _loaded(one: "EntryPoint") -> Target:
    target = loaded(one, "a target")
    if not isinstance(target, Target):
        raise refused(one, "a homenode.vm.targets.target.Target", type(target).__name__)
    unsaid = [str(feature) for feature in Feature if feature not in target.support]
    if unsaid:
        raise refused(one, "support for every feature", f"none for {', '.join(unsaid)}")
    return target
