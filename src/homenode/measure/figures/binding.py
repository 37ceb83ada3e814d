"""Binding: how a process was bound when it measured, from the head of its log.

=== PINNED to 2 ===
policy: bind
cpubind: 2
membind: 2
nvbandwidth Version: v0.6
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.results.model import Condition
from homenode.tools.numactl import parse_show
from homenode.tools.nvbandwidth_text import VERSION_LINE

_PINNED = re.compile(r"\bPINNED to (\d{1,5})\b", re.ASCII)


@dataclass(frozen=True, slots=True)
class Binding:
    """Nodes of the PUs and of the memory that the process might use."""

    cpu_nodes: tuple[int, ...]
    memory_nodes: tuple[int, ...]

    @property
    def node(self) -> int | None:
        """Where memory was bound; where it was bound to several nodes, where the threads were.

        None where neither is one node: what is unknown is not guessed.
        """
        for nodes in (self.memory_nodes, self.cpu_nodes):
            if len(nodes) == 1:
                return nodes[0]
        return None

    def conditions(self) -> tuple[Condition, ...]:
        """How strict it was. The nodes themselves are the samples'."""
        is_strict = len(self.memory_nodes) == 1
        return (Condition("memory binding", "one node" if is_strict else "several nodes"),)


@dataclass(frozen=True, slots=True)
class Section:
    """One run of nvbandwidth in a log. line: of its version, from 1."""

    text: str
    line: int
    binding: Binding | None
    gaps: tuple[Gap, ...]


def sections(text: str) -> Iterator[Section]:
    """The runs of a text, each with the binding that stands before it.

    What stands behind the last one is part of it. Nothing where there is no run.
    """
    lines = text.split("\n")
    starts = [n for n, line in enumerate(lines) if VERSION_LINE.fullmatch(line.rstrip())]
    if not starts:
        return
    heads = [0, *(_head_of(lines, a, b) for a, b in pairwise(starts))]
    ends = [*heads[1:], len(lines)]
    for head, start, end in zip(heads, starts, ends, strict=True):
        binding, gaps = _binding("\n".join(lines[head:start]))
        yield Section("\n".join(lines[start:end]), start + 1, binding, gaps)


def _head_of(lines: list[str], previous: int, start: int) -> int:
    """Where the head of a run begins: the first line behind the last run that gives a binding."""
    for number in range(previous, start):
        if lines[number].startswith("policy:") or _PINNED.search(lines[number]):
            return number
    return start


def _binding(head: str) -> tuple[Binding | None, tuple[Gap, ...]]:
    """The last binding of a head; a script's own word counts where numactl says nothing."""
    said = [int(node) for node in _PINNED.findall(head)]
    at = head.rfind("policy:")
    if at < 0:
        if not said:
            return None, (Gap("binding", "the log has no numactl --show before its figures"),)
        return Binding((said[-1],), (said[-1],)), ()
    try:
        show = parse_show(head[at:])
    except ParseError as error:
        return None, (Gap("binding", error.message),)
    binding = Binding(tuple(show.cpu_nodes), tuple(show.memory_nodes))
    if said and said[-1] not in binding.cpu_nodes:
        # numactl asked before the pinning, or outside it: the script's own word is of the run.
        reason = f"the log says PINNED to {said[-1]}, its numactl --show {binding.cpu_nodes}"
        return Binding((said[-1],), (said[-1],)), (Gap("binding", reason),)
    return binding, ()
