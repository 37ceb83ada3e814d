"""Examples: of each target of homenode, by its name, from the module of its conformance test."""

from importlib import import_module

from homenode.vm.targets.registry import TARGETS
from tests.conformance.judge import Example


def _example(target: str) -> Example:
    found = import_module(f"tests.conformance.{target.replace('-', '_')}").EXAMPLE
    assert isinstance(found, Example)
    return found


EXAMPLES = {target: _example(target) for target in TARGETS}
FILES = {target: one.file for target, one in EXAMPLES.items() if one.file}
"""Files as users have them."""
