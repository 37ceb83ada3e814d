"""Explanation: a plan in sentences and tables, before anything is printed."""

from collections.abc import Sequence
from dataclasses import dataclass

from homenode.cpuset import CpuSet

_MOST_SUBJECTS = 6  # of which one thing is said; the rest are counted


@dataclass(frozen=True, slots=True)
class Rows:
    """A table: column heads, and rows of as many texts."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the explanation: sentences, then a table, then commands to run as root."""

    heading: str
    lines: tuple[str, ...] = ()
    table: Rows | None = None
    commands: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a plan says to people. summary: one line."""

    title: str
    summary: str
    sections: tuple[Section, ...]


def numbers_text(numbers: Sequence[int]) -> str:
    """Numbers as ranges.

    >>> numbers_text([2, 0, 1])
    '0-2'
    """
    return str(CpuSet(numbers))


def nodes_text(nodes: Sequence[int]) -> str:
    """Host nodes with the word.

    >>> nodes_text([2]), nodes_text([0, 1])
    ('node 2', 'nodes 0-1')
    """
    return ("node " if len(set(nodes)) == 1 else "nodes ") + (numbers_text(nodes) or "none")


def pus_text(pus: CpuSet) -> str:
    """PUs with the word."""
    return f"PU {pus}" if len(pus) == 1 else f"PUs {pus}"


def count_text(count: int, noun: str) -> str:
    """A count with its noun.

    >>> count_text(1, "core"), count_text(2, "core")
    ('1 core', '2 cores')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def subjects_text(subjects: Sequence[str]) -> str:
    """Subjects of which the same is said, in one: all of a few, else the first and a count.

    >>> subjects_text(["node of 0000:17:00.0", "node of 0000:65:00.0"])
    'node of 0000:17:00.0 and 0000:65:00.0'
    >>> subjects_text([str(number) for number in range(16)])
    '0, 1, 2, 3, 4, 5 and 10 more'
    """
    heads = {subject.rpartition(" ")[0] for subject in subjects}
    words = [subject.rpartition(" ")[2] for subject in subjects] if len(heads) == 1 else subjects
    head = f"{heads.pop()} " if len(heads) == 1 and "" not in heads else ""
    shown = words if len(words) <= _MOST_SUBJECTS + 1 else words[:_MOST_SUBJECTS]
    left = len(words) - len(shown)
    last = f"{left} more" if left else shown[-1]
    before = ", ".join(shown if left else shown[:-1])
    return head + (f"{before} and {last}" if before else last)


def union(sets: Sequence[CpuSet]) -> CpuSet:
    """Every PU of these sets."""
    bits = 0
    for one in sets:
        bits |= one.bits
    return CpuSet.from_bits(bits)
