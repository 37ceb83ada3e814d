"""Judge: a program of others that reads what homenode wrote and says what it understood."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count as from_count
from itertools import islice

Facts = Mapping[str, object]
"""What is planned, or what a program read, by the name of the fact."""

DRAWS_PER_CASE = 12
"""So many draws may be refused by homenode for each one that becomes a case."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """What the tests of all targets have to know of one."""

    # a file of it as a user has it, with one of the H100 host's GPUs where it can name it; empty
    # where homenode alone writes such files
    file: bytes = b""
    owned: str = ""  # what begins lines of it that a layout may change
    # what begins lines of a new file that no plan owns, or whose names are the operator's
    free: str
    refused_for: tuple[str, ...] = ()  # words of the refusals of plans for the shipped hosts


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A case as the program read it."""

    case: str
    about: str
    planned: Facts
    read: Facts = field(default_factory=dict)
    refusal: str | None = None  # the program's words where it did not take it

    def difference(self) -> str | None:
        """What the program read otherwise than planned; None where it read all as planned."""
        if self.refusal is not None:
            return f"refused: {' '.join(self.refusal.split())[-300:]}"
        found = [
            f"{name}: planned {self.planned[name]}, read {self.read.get(name, 'nothing')}"
            for name in self.planned
            if name not in self.read or self.planned[name] != self.read[name]
        ]
        return "; ".join(found)[:600] or None


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A row of the table."""

    name: str
    program: str  # as the page names them
    reads: str  # what is given to it, and which facts it answers
    setup: str  # how to get it
    version: Callable[[], str]  # as the page names them
    missing: Callable[[], str | None]  # why it cannot run here; None where it can
    # answers to cases by their names, in any order; a name that homenode refuses to plan has none
    ask: Callable[[Sequence[str]], Iterator[Answer]]
    marker: str | None = None  # of pytest
    short: int = 3  # cases in `make test`

    def answers(self, seed: int, count: int) -> Iterator[Answer]:
        """So many answers. Raises AssertionError where homenode plans too few of what is drawn."""
        numbers = from_count()
        left, draws = count, DRAWS_PER_CASE * count
        while left:
            # Some are refused, and a program that is asked for all at once takes long to start.
            batch = [f"{seed}-{next(numbers)}" for _ in range(min(2 * left, draws))]
            assert batch, f"{self.name}: {count - left} of {count} cases planned of seed {seed}"
            draws -= len(batch)
            for answer in islice(self.ask(batch), left):
                left -= 1
                yield answer
