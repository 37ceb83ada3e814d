"""Registry: the targets of homenode by their names."""

from importlib import import_module

from homenode.vm.targets.hypervisors import NAMES
from homenode.vm.targets.target import Target

TARGETS = NAMES
"""Each is TARGET of the module of that name in `hypervisors`."""


def target_named(name: str) -> Target:
    """The target. Raises KeyError for an unknown name."""
    if name not in TARGETS:
        raise KeyError(name)
    target = import_module(f"homenode.vm.targets.hypervisors.{name}").TARGET
    assert isinstance(target, Target)
    return target


def recognised(content: bytes) -> str | None:
    """The target that a file is of, by its content."""
    return next((name for name in TARGETS if target_named(name).recognises(content)), None)
