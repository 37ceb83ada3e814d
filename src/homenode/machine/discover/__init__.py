"""Discovery: from a snapshot, a tree of hwloc or the output of lspci to one Host."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from homenode.machine.discover.host import discover

__all__ = ["discover"]


def __getattr__(name: str) -> Any:
    """`discover`, imported when it is asked for: whoever needs one reading need not load all."""
    if name != "discover":
        raise AttributeError(name)
    from homenode.machine.discover.host import discover

    return discover
