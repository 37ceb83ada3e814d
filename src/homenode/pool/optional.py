"""Optional: libraries of the extra `pool`, loaded when they are needed."""

from importlib import import_module
from typing import Any

from homenode.errors import UsageError


def optional_module(name: str, what: str) -> Any:
    """A library of the extra. Raises UsageError that says how to install it."""
    try:
        return import_module(name)
    except ImportError:
        raise UsageError(
            f"{what}: expected the library {name}, found none",
            hint="pip install 'homenode[pool]'",
        ) from None
