"""MemoryBind: what becomes of the memory of a rank."""

from enum import StrEnum


class MemoryBind(StrEnum):
    """How memory is bound to the node of a rank's GPU."""

    STRICT = "strict"
    PREFERRED = "preferred"
    NONE = "none"
