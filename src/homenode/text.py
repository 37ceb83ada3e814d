"""Wording: how counts, sets and texts from outside are printed, the same everywhere."""

import shlex
from collections.abc import Iterable, Sequence

from homenode.cpuset import CpuSet


def printable(text: str) -> str:
    """Return a text from outside with nothing in it that steers a terminal or breaks XML.

    >>> printable("vm\\x1b[31m1\\n")
    'vm?[31m1?'
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def escape_lines(text: str) -> str:
    """Apply `printable` to a text of several lines.

    >>> escape_lines("a\\tb\\nc\\x9b2J\\u202e")
    'a\\tb\\nc?2J?'
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in "\n\t" else "?" for character in text
    )


_STEERS = ("=", "+", "-", "@", "\t", "\r")
"""A cell that begins so is a formula to a spreadsheet."""


def write_csv(rows: Iterable[Sequence[object]]) -> str:
    """Return the rows as CSV (RFC 4180). Formulas are escaped with a quote, and control characters
    are replaced by question marks.

    >>> write_csv([["a,b", 3], ["=1+1", None], [True, 0.5]])
    '"a,b",3\\r\\n\\'=1+1,\\r\\ntrue,0.5\\r\\n'
    """
    import csv

    lines = _Lines()
    csv.writer(lines).writerows(map(_format_csv_cell, row) for row in rows)
    return "".join(lines)


class _Lines(list[str]):
    """Lines that csv.writer writes."""

    def write(self, text: str) -> None:
        self.append(text)


def _format_csv_cell(value: object) -> object:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.12g}"
    if isinstance(value, str):
        return printable(f"'{value}" if value.startswith(_STEERS) else value)
    return value


def command_line(*words: object) -> str:
    """Return a command to copy: each word is one word of a shell, whatever its characters are.

    >>> command_line("virsh", "define", "/tmp/a b; rm -rf ~")
    "virsh define '/tmp/a b; rm -rf ~'"
    >>> command_line("cat", "a\\x1b'")
    "cat $'a\\\\x1b\\\\''"
    """
    return " ".join(_word(str(word)) for word in words)


def operands(*words: object) -> tuple[object, ...]:
    """Return the operands of a command, after "--" if an operand could be taken for an option.

    >>> command_line("virsh", "start", *operands("-vm")), command_line("ls", *operands("a"))
    ('virsh start -- -vm', 'ls a')
    """
    return ("--", *words) if any(str(word).startswith("-") for word in words) else words


def _word(text: str) -> str:
    if text.isprintable():
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return (
        "$'"
        + "".join(
            character if character.isprintable() else _escape(character) for character in escaped
        )
        + "'"
    )


def _escape(letter: str) -> str:
    """Return a letter's bytes as bash and ksh write them between $' and '."""
    return "".join(f"\\x{byte:02x}" for byte in letter.encode("utf-8", "surrogateescape"))


def shorten_list(texts: Iterable[str], limit: int, between: str = ", ") -> str:
    """Return the first of some texts, and how many more there are.

    >>> shorten_list(["a", "b", "c"], 2), shorten_list(["a"], 2), shorten_list([], 2)
    ('a, b and 1 more', 'a', '')
    """
    items = list(texts)
    hidden_count = len(items) - limit
    return between.join(items[:limit]) + (f" and {hidden_count} more" if hidden_count > 0 else "")


_MAX_SUBJECTS = 6  # that are named; further ones are counted


def format_subjects(subjects: Sequence[str]) -> str:
    """Join subjects with the same statement: a few completely, else the first and a count.

    >>> format_subjects(["node of 0000:17:00.0", "node of 0000:65:00.0"])
    'node of 0000:17:00.0 and 0000:65:00.0'
    >>> format_subjects([str(number) for number in range(16)])
    '0, 1, 2, 3, 4, 5 and 10 more'
    """
    heads = {subject.rpartition(" ")[0] for subject in subjects}
    words = [subject.rpartition(" ")[2] for subject in subjects] if len(heads) == 1 else subjects
    head = f"{heads.pop()} " if len(heads) == 1 and "" not in heads else ""
    shown_words = words if len(words) <= _MAX_SUBJECTS + 1 else words[:_MAX_SUBJECTS]
    hidden_count = len(words) - len(shown_words)
    last = f"{hidden_count} more" if hidden_count else shown_words[-1]
    before = ", ".join(shown_words if hidden_count else shown_words[:-1])
    return head + (f"{before} and {last}" if before else last)


def plural(count: int, noun: str, nouns: str | None = None) -> str:
    """Return a count with its noun.

    >>> plural(1, "core"), plural(2, "core"), plural(2, "switch", "switches")
    ('1 core', '2 cores', '2 switches')
    """
    return f"{count} {noun if count == 1 else nouns or noun + 's'}"


def format_duration(seconds: float) -> str:
    """Format a duration, rounded.

    >>> format_duration(45), format_duration(600), format_duration(7800)
    ('45 s', '10 min', '2 h 10 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return the beginning of a hint if a known word is similar to the given word, else "".

    >>> did_you_mean("pin-nume", ["pin", "pin-numa", "pin-numa-pci"])
    'did you mean pin-numa? '
    >>> did_you_mean("mi300x", ["mi300x-epyc9654"])
    'did you mean mi300x-epyc9654? '
    >>> did_you_mean("nccl", ["multi-gpu", "latency"])
    'did you mean multi-gpu? '
    >>> did_you_mean("xyz", ["pin"])
    ''
    """
    from homenode.errors import find_near

    match = find_near(word, choices)
    return f"did you mean {match}? " if match else ""


def number_list(numbers: Iterable[int]) -> str:
    """Return the numbers as ranges; they may be of any size, as those of packages are.

    >>> number_list([3, 0, 1, 2, 8]), number_list([0, 196611, 256]), number_list([])
    ('0-3,8', '0,256,196611', '')
    """
    ranges: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def format_nodes(nodes: Iterable[int]) -> str:
    """Return the nodes with the word.

    >>> format_nodes([2]), format_nodes([0, 1, 3])
    ('node 2', 'nodes 0-1,3')
    """
    indices = set(nodes)
    return ("node " if len(indices) == 1 else "nodes ") + (number_list(indices) or "none")


def format_cpus(pus: CpuSet) -> str:
    """Return a list of CPUs, with the word in the right number.

    >>> format_cpus(CpuSet([4])), format_cpus(CpuSet.parse("0-3,8"))
    ('CPU 4', 'CPUs 0-3,8')
    """
    return f"CPU {pus}" if len(pus) == 1 else f"CPUs {pus}"
