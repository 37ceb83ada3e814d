"""Indices: each numbering of the host has a separate type."""

from typing import NewType

NodeIndex = NewType("NodeIndex", int)
"""The kernel's number of a host NUMA node: N of /sys/devices/system/node/nodeN. May be sparse."""

PackageIndex = NewType("PackageIndex", int)
"""physical_package_id. May be sparse."""

CoreIndex = NewType("CoreIndex", int)
"""Position in Host.cores: ascending lowest CPU. Unique on the host, unlike the core's OS index."""

LlcIndex = NewType("LlcIndex", int)
"""Position in Host.llcs: ascending lowest CPU."""
