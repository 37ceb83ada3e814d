"""Topology files with damage, and what the parsers of NCCL and RCCL make of them."""

import os
import subprocess
from pathlib import Path
from random import Random

from tests.nccl_documents import TWO_CPUS

VERSIONS = ("nccl-2.20.5", "nccl-2.21.5", "nccl-2.26.6", "nccl-2.30.7", "rccl")
RECORDED = Path(__file__).parent / "accepted.txt"
SEED, COUNT = 22, 600
"""Seed and number of the recorded answers."""
_LETTERS = "<>/=\"' \n\r\t!-?&;x0\0"
_PIECES = (
    "<!-- a -->|<!--a-->|<!---->|<!-- a|-->|<cpu>|</cpu>|</pci>|</system>|<a>|</a>|<a/>|"
    '<a><b/></a>|<nic/>|<gpu dev="0"/>|<net keep="1"/>|<?xml?>|<gpu><nvlink/></gpu>|'
    """ x='1'| x="1"| x=""| x=1| x|  | />|<![CDATA[]]>|<nic><net/><gin/><rma/></nic>|"""
    '<pcilink/>|<xgmi/>|<system/>|<system version="1"/>'
).split("|")
_INSERTED: tuple[str, ...] = (*_LETTERS, *_PIECES)


def mutants(seed: int, count: int) -> list[bytes]:
    """Files for NCCL and, a quarter of them, for RCCL; most with one or two changes."""
    random = Random(seed)
    return [_mutant(random) for _ in range(count)]


def _mutant(random: Random) -> bytes:
    text = TWO_CPUS
    if random.random() < 0.25:
        text = text.replace('version="1"', 'version="2"', 1)
    for _ in range(random.choice((0, 1, 1, 1, 2, 3))):
        text = random.choice(_CHANGES)(random, text)
    return text.encode("latin-1")


def _at(random: Random, text: str) -> int:
    """Anywhere, but often where a tag begins or ends."""
    if random.random() < 0.6:
        places = [i for i, letter in enumerate(text) if letter in '<>/="\n ']
        if places:
            return random.choice(places) + random.choice((0, 1))
    return random.randint(0, len(text))


def _inserted(random: Random, text: str) -> str:
    at = _at(random, text)
    return text[:at] + random.choice(_INSERTED) + text[at:]


def _replaced(random: Random, text: str) -> str:
    at = _at(random, text)
    return text[:at] + random.choice(_LETTERS) + text[at + 1 :]


def _deleted(random: Random, text: str) -> str:
    at = _at(random, text)
    return text[:at] + text[at + random.choice((1, 1, 2, 9)) :]


def _line(random: Random, text: str) -> str:
    lines = text.splitlines(keepends=True)
    at, to = random.randrange(len(lines) or 1), random.randrange(len(lines) or 1)
    line = lines.pop(at) if lines else ""
    if random.random() < 0.6:
        lines[to:to] = [line] * random.choice((1, 2))
    return "".join(lines)


def _quotes(random: Random, text: str) -> str:
    parts = text.split('"')
    at = random.randrange(0, max(1, len(parts) // 2)) * 2
    both = random.random() < 0.7
    ends = ("'", "'") if both else ("'", '"')
    if at + 2 >= len(parts):
        return text
    middle = ends[0] + parts[at + 1] + ends[1]
    return '"'.join(parts[: at + 1]) + middle + '"'.join(parts[at + 2 :])


def _long(random: Random, text: str) -> str:
    at = _at(random, text)
    return text[:at] + "y" * random.choice((200, 250, 252, 253, 254, 255, 256, 400)) + text[at:]


def _many(random: Random, text: str) -> str:
    """More elements, attributes or depth than some version takes."""
    kind = random.randrange(4)
    if kind == 0:
        attributes = "".join(f' x{i}="1"' for i in range(random.choice((8, 9, 10, 12, 20))))
        return text.replace("<cpu", "<cpu" + attributes, 1)
    if kind == 1:
        more = "<pci/>" * random.choice((39, 126, 127, 200, 248, 249, 260))
        return text.replace("</cpu>", more + "</cpu>", 1)
    if kind == 2:
        more = "<cpu/>" * random.choice((100, 126, 127, 248, 249, 250))
        return text.replace("</system>", more + "</system>", 1)
    depth = random.choice((3, 40, 90, 99))
    return text.replace("</system>", "<a>" * depth + "</a>" * depth + "</system>", 1)


_CHANGES = (
    _inserted,
    _inserted,
    _inserted,
    _replaced,
    _replaced,
    _deleted,
    _deleted,
    _line,
    _line,
    _quotes,
    _long,
    _many,
)


def parsed(directory: Path, files: list[bytes]) -> list[list[str | None]]:
    """For each version, of each file the tree that is kept, as text; None where it is refused.

    directory: a program for each of VERSIONS, NCCL's own parser compiled with a main function that
    reads files from standard input, each after its length in decimal and a newline, and writes a
    line for each: the result, a space, the tree.
    """
    asked = b"".join(b"%d\n%s" % (len(data), data) for data in files)
    found: list[list[str | None]] = []
    for version in VERSIONS:
        done = subprocess.run([directory / version], input=asked, capture_output=True, check=True)
        answers = done.stdout.decode("latin-1")
        lines = answers.removesuffix("\n").split("\n\x1e")
        results = [line.removeprefix("\x1e").partition(" ") for line in lines]
        found.append([tree if code == "0" else None for code, _, tree in results])
    return found


def marks(found: list[list[str | None]]) -> str:
    """One character for each file: a digit of base 32 with a bit for each version that accepts."""
    digits = "0123456789abcdefghijklmnopqrstuv"
    return "".join(
        digits[sum((tree is not None) << bit for bit, tree in enumerate(of_file))]
        for of_file in zip(*found, strict=True)
    )


if __name__ == "__main__":
    programs = Path(os.environ["HOMENODE_NCCL_PARSERS"])
    RECORDED.write_text(marks(parsed(programs, mutants(SEED, COUNT))) + "\n")
