"""Answers: results of planning on a pool's hosts, stored so that later commands do not plan again.

The key of each is a digest of all that it depends on: shape and state of the host, and flavours.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated

from msgspec import Meta, Struct, field

from homenode import formats
from homenode.cluster.pool.flavour import Flavour
from homenode.cluster.pool.state import HostState
from homenode.cluster.pool.stored import PoolLine
from homenode.machine.topology import Host

MOST_ANSWERS = 500_000
"""In a file. Of more, only those that this command needed are stored."""

Count = Annotated[int, Meta(ge=0)]
CountsAnswer = tuple[Count, Count]
StrandedAnswer = tuple[tuple[str, tuple[str, ...]], ...]


class StoredAnswers(Struct, omit_defaults=True, frozen=True, kw_only=True):
    """The file. program: the homenode that wrote it, since another may plan otherwise.

    By digest: counts: VMs that fit with full
    locality, and all that fit. stranded: GPUs by the resource that is missing.
    """

    program: str
    counts: dict[str, CountsAnswer] = field(default_factory=dict)
    stranded: dict[str, StrandedAnswer] = field(default_factory=dict)


class Answers:
    """The stored answers, with those that this command adds."""

    def __init__(self, stored: StoredAnswers) -> None:
        self.stored = stored
        self._size = _size(stored)
        self._used: set[str] = set()
        self._shapes: dict[int, bytes] = {}
        self._states: dict[HostState, bytes] = {}
        self._flavours: dict[tuple[Flavour, ...], bytes] = {}

    @property
    def is_new(self) -> bool:
        """Whether any was added."""
        return _size(self.stored) > self._size

    def digest(
        self, shape: Host, state: HostState, flavours: Sequence[Flavour], what: str = ""
    ) -> str:
        """The key of an answer. what: the kind of answer, where there are several of these."""
        own = self._states.get(state)
        if own is None:
            if state.shape not in self._shapes:
                self._shapes[state.shape] = _digest(formats.line(PoolLine(shape=shape)).encode())
            text = repr((state.cores, tuple(map(str, state.owned)), state.memory))
            own = self._states[state] = self._shapes[state.shape] + _digest(text.encode())
        asked = tuple(flavours)
        if asked not in self._flavours:
            self._flavours[asked] = _digest(repr(asked).encode())
        found = _digest(own + self._flavours[asked] + what.encode()).hex()
        self._used.add(found)
        return found

    def to_store(self) -> StoredAnswers:
        """The content for the file."""
        own = self.stored
        if _size(own) <= MOST_ANSWERS:
            return own
        return StoredAnswers(
            program=own.program,
            counts={key: own.counts[key] for key in own.counts.keys() & self._used},
            stranded={key: own.stranded[key] for key in own.stranded.keys() & self._used},
        )


def _size(stored: StoredAnswers) -> int:
    return len(stored.counts) + len(stored.stranded)


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=16).digest()
