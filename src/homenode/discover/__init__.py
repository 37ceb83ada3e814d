"""Discovery: from a snapshot, a tree of hwloc or the output of lspci to one Host."""

from homenode.discover.host import discover

__all__ = ["discover"]
