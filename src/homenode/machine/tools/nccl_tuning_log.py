"""NCCL tuning log: which algorithm and protocol the library takes at which size.

    NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING all_reduce_perf -b 8 -e 1G -f 2 -g 8 -w 0 -n 1

Seen of NCCL 2.19 to 2.26. Source: enqueue.cc of these, public logs.

    node:1:2 [0] NCCL INFO 8 Bytes -> Algo 1 proto 0 time 11.200000
    node:1:2 [0] NCCL INFO AllReduce: 8 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}

Only rank 0 logs. Older versions print numbers. Everything else in the output is skipped: the log
shares it with the table of nccl-tests.
"""

import re
from collections.abc import Iterable
from itertools import groupby

from msgspec import Struct

from homenode.errors import ParseError
from homenode.machine.tools.figures import count
from homenode.units import format_bytes

SOURCE = "NCCL tuning log"
ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
PROTOCOLS = ("LL", "LL128", "SIMPLE")
MAX_LINES = 1 << 20

_LINE = re.compile(
    r"NCCL INFO (?:(\w+): )?(\d+) Bytes -> Algo (\w{1,20}) proto (\w{1,20})\b", re.ASCII
)


class Choice(Struct, frozen=True, order=True):
    """What is mistaken for messages of a size."""

    size_bytes: int
    algorithm: str
    protocol: str


def parse(text: str) -> tuple[Choice, ...]:
    """The choice of each size, ascending; the last one where a size is logged twice.

    Raises ParseError where no line gives one.
    """
    found: dict[int, Choice] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if number > MAX_LINES:
            raise ParseError(SOURCE, f"at most {MAX_LINES} lines", "more")
        match = _LINE.search(line)
        if match is None or (match[1] or "AllReduce") != "AllReduce":
            continue
        size = count(match[2], SOURCE, "a size in bytes", number)
        found[size] = choice(size, match[3], match[4])
    if not found:
        raise ParseError(
            SOURCE,
            "lines such as '8 Bytes -> Algo RING proto LL'",
            "none",
            hint="NCCL before 2.19 and some builds do not log it",
        )
    return tuple(found[size] for size in sorted(found))


def choice(size_bytes: int, algorithm: str, protocol: str) -> Choice:
    """With names for numbers.

    >>> choice(8, "1", "0")
    Choice(size_bytes=8, algorithm='RING', protocol='LL')
    """
    return Choice(size_bytes, _named(algorithm, ALGORITHMS), _named(protocol, PROTOCOLS))


def _named(text: str, names: tuple[str, ...]) -> str:
    if text.isdecimal() and text.isascii() and int(text) < len(names):
        return names[int(text)]
    return "".join(c for c in text[:20].upper() if c.isprintable())


def in_words(choices: Iterable[Choice]) -> str:
    """Sizes of one choice as one range.

    >>> in_words([choice(8, "RING", "LL"), choice(16, "RING", "LL"), choice(32, "TREE", "Simple")])
    'RING LL 8 B to 16 B; TREE SIMPLE 32 B'
    """
    parts = []
    for (algorithm, protocol), group in groupby(
        sorted(choices), key=lambda one: (one.algorithm, one.protocol)
    ):
        sizes = [one.size_bytes for one in group]
        ends = " to ".join(format_bytes(size) for size in dict.fromkeys((sizes[0], sizes[-1])))
        parts.append(f"{algorithm} {protocol} {ends}")
    return "; ".join(parts)
