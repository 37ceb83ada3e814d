"""Explanation: how sections of an explanation are made, and what several of them say."""

from collections.abc import Sequence

from homenode.doc import Commands, Part, Section, Span, Table, Text

_MOST_SUBJECTS = 6  # of which one thing is said; the rest are counted
_LOOKS = {"warning:": "warn", "critical:": "bad", "hint:": "hint", "fix:": "hint"}


def section(
    heading: str,
    lines: Sequence[str] = (),
    table: Table | None = None,
    commands: Sequence[str] = (),
) -> Section:
    """Sentences, then a table, then commands to run as root. No parts where there is nothing."""
    parts: list[Part] = [line_text(line) for line in lines]
    if table is not None and table.rows:
        parts.append(table)
    if commands:
        parts.append(Commands(tuple(commands)))
    return Section(heading, tuple(parts))


def line_text(line: str) -> Text:
    """A line with its indent, and the word at its beginning that says what it is."""
    text = line.lstrip(" ")
    word, _, rest = text.partition(" ")
    words = (Span(word, _LOOKS[word]), f" {rest}") if word in _LOOKS else text
    return Text(words, indent=len(line) - len(text))


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
