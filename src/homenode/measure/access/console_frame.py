"""ConsoleFrame: what goes over a serial line, so that a shell at its end can be given and believed.

The line is a terminal: it drops what is longer than a screenful, it may echo, and the kernel writes
between. So only printable lines of moderate length go out, and what comes back is encoded, between
marks, with a checksum of its own.
"""

import base64
import binascii
import gzip
import hashlib
import re
from collections.abc import Iterator, Sequence
from shlex import quote

from msgspec import Struct

from homenode.measure.access.remote import octal_script

LINE_LETTERS = 1024
"""In one line: far below the 4095 that a terminal takes in canonical mode.
Source: N_TTY_BUF_SIZE of Linux."""

BLOCK_BYTES = 8_000
"""Sent before the shell must have said that it took them."""

_PLAIN = re.compile(rb"([!-~]{1,1024}\n)+")
"""Text that goes over a terminal as it is: base64, for one."""

_WORTH_PACKING = 1_000
_POLYNOMIAL = 0x04C11DB7

SUMMERS = ("sha256sum", "md5sum", "cksum")
"""Programs that give a checksum of standard input as their first word; one of them must be there.
Debian's busybox has no cksum, and others nothing but it."""


class Damaged(Struct, frozen=True):
    """A frame that did not arrive as it was sent. why: for a message."""

    why: str


def mark_line(mark: str, word: str) -> str:
    """A command that says the mark and a word; an echo of it does not say them.

    >>> mark_line("M", "end")
    "printf '%s+%s\\\\n' 'M' 'end'"
    """
    return f"printf '%s+%s\\n' '{mark}' '{word}'"


def removing_line(folder: str) -> str:
    """A command that removes a folder, and nothing else where only its beginning arrives.

    What a serial line is sent last may be cut anywhere, and ended by the next one's newline:
    of `rm -rf /dev/shm/x` there is `rm -rf /` to fear.
    """
    return f'D={quote(folder)}; rm -rf "$D"'


def staging_blocks(
    content: bytes, path: str, *, base64_there: bool, gzip_there: bool = False
) -> Iterator[tuple[str, ...]]:
    """Commands that together write a file, in blocks of at most about BLOCK_BYTES.

    A block's first line is a command and the others are what it reads: `head` takes a whole line
    with each read of a terminal, where the shell's own `read` takes a letter.
    """
    yield (f": >{path}",)
    if _PLAIN.fullmatch(content):
        yield from _blocks(content.decode("ascii").splitlines(), path)
    elif base64_there:
        is_packed = gzip_there and len(content) > _WORTH_PACKING
        sent = gzip.compress(content, mtime=0) if is_packed else content
        text = base64.b64encode(sent).decode()
        unpack = "base64 -d <{0}.part | gzip -d" if is_packed else "base64 -d <{0}.part"
        yield (f": >{path}.part",)
        yield from _blocks(
            [text[at : at + LINE_LETTERS] for at in range(0, len(text), LINE_LETTERS)],
            f"{path}.part",
        )
        yield (f"{unpack.format(path)} >{path}; rm -f {path}.part",)
    else:
        for at in range(0, len(content), 256):
            yield (octal_script(content[at : at + 256]).rstrip("\n") + f" >>{path}",)


def _blocks(lines: Sequence[str], path: str) -> Iterator[tuple[str, ...]]:
    block: list[str] = []
    size = 0
    for line in lines:
        block.append(line)
        size += len(line) + 1
        if size > BLOCK_BYTES:
            yield f"head -n {len(block)} >>{path}", *block
            block, size = [], 0
    if block:
        yield f"head -n {len(block)} >>{path}", *block


def fetching_line(path: str, mark: str, summer: str, *, base64_there: bool) -> str:
    """A command that prints a file between two marks, encoded, and its checksum behind."""
    encode = f"base64 <{path}" if base64_there else f"od -An -v -tx1 <{path}"
    end = f"printf '\\n%s+end %s\\n' '{mark}' \"$({summer} <{path})\""
    return f"{mark_line(mark, 'begin')}; {encode}; {end}"


def fetched(frame: str, stated: str, summer: str, *, base64_there: bool) -> bytes | Damaged:
    """The file behind a frame, or why it cannot be trusted.

    frame: what stood between the marks. stated: what stood behind the second one.
    """
    try:
        text = "".join(frame.split())
        content = base64.b64decode(text, validate=True) if base64_there else bytes.fromhex(text)
    except (binascii.Error, ValueError) as error:
        return Damaged(f"letters between that are none of ours: {error}")
    if stated.split()[:1] != [checksum(content, summer)]:
        return Damaged(f"checksum {stated.strip()[:80]!r}")
    return content


def checksum(content: bytes, summer: str) -> str:
    """The first word that this program says of the content.

    >>> checksum(b"homenode\\n", "cksum")
    '2895866416'
    """
    if summer == "cksum":
        return str(_posix_sum(content))
    name = {"sha256sum": "sha256", "md5sum": "md5"}[summer]
    return hashlib.new(name, content, usedforsecurity=False).hexdigest()


def _posix_sum(content: bytes) -> int:
    """A CRC over the content and then its length, lowest byte first.

    Source: POSIX.1-2017, cksum.
    """
    crc = 0
    table = _TABLE
    for byte in content:
        crc = (crc << 8 & 0xFFFFFFFF) ^ table[(crc >> 24) ^ byte]
    length = len(content)
    while length:
        crc = (crc << 8 & 0xFFFFFFFF) ^ table[(crc >> 24) ^ (length & 0xFF)]
        length >>= 8
    return ~crc & 0xFFFFFFFF


def _table() -> tuple[int, ...]:
    found = []
    for byte in range(256):
        crc = byte << 24
        for _ in range(8):
            crc = (crc << 1 & 0xFFFFFFFF) ^ (_POLYNOMIAL if crc & 0x80000000 else 0)
        found.append(crc)
    return tuple(found)


_TABLE = _table()
