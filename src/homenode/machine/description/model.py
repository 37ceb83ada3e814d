"""HostDescription: a described machine, the caches that Host does not hold, and where it is from.

What is described *is* a Host: rendering it to files and discovering those gives it back.
"""

from msgspec import Struct

from homenode.machine.topology import Host


class CacheSizes(Struct, frozen=True):
    """Sizes of the caches below the last level, each private to a core; bytes, None = not drawn."""

    l1_data_bytes: int | None = None
    l1_instruction_bytes: int | None = None
    l2_bytes: int | None = None


class Fact(Struct, frozen=True):
    """One statement about the real machine. source is None where the statement is assumed."""

    statement: str
    source: str | None


class HostDescription(Struct, frozen=True):
    """A machine as its host.toml gives it.

    source: the file, for messages. about: one line for people.
    facts:  what is published, with its source, and what is assumed.
    expect: (field of HostSummary, count) that discovery must find; the file checks itself.
    """

    source: str
    about: str
    host: Host
    caches: CacheSizes = CacheSizes()
    facts: tuple[Fact, ...] = ()
    expect: tuple[tuple[str, int], ...] = ()
