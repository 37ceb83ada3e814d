"""openssl speed: operations per second of a cipher, as XAPI's authors check placements with.

    openssl speed -seconds 10 -multi 32 rsa4096

Seen of OpenSSL 1.0.2, 3.0 and 3.5. Source: outputs of Debian's 3.0.19; public ones of the others.

                      sign    verify    sign/s verify/s
    rsa 2048 bits 0.000394s 0.000026s   2535.2  38747.0

    The 'numbers' are in 1000s of bytes per second processed.
    type             16 bytes     64 bytes    256 bytes   1024 bytes   8192 bytes  16384 bytes
    sha256           91340.65k   334785.45k   893701.00k  1446966.14k  1654145.02k  1771441.39k

* Columns differ by version (3.4 adds encryption to RSA): the header names them.
* With -multi rates are sums over processes; times per operation are 1 over the sum.
* The machine format (-mr) gives times in some versions and rates in others: not read.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.tools.figures import count, figure

_SOURCE = "openssl speed"
_VERSION = re.compile(r"version: (\S+)|OpenSSL (\d\S*+).*", re.ASCII)
_BLOCKS = re.compile(r"type((?:\s+\d+ bytes)+)", re.ASCII)
_RATES = re.compile(r"\s*(?:[a-z]+\s+)+(?:[a-z.]+/s\s*)+", re.ASCII)
_RATE = re.compile(r"\d+\.\d+", re.ASCII)
_TIME = re.compile(r"\d+\.\d+s", re.ASCII)
_BULK = re.compile(r"\d+\.\d+k?", re.ASCII)
_FORKED = re.compile(r"Forked child \d+", re.ASCII)
_SAYS_NOTHING = re.compile(
    r"built on: .*|options: ?.*|compiler: .*|CPUINFO: .*|The 'numbers' are in .*|Doing .*|"
    r"\+D.*|\+R.*|\+H.*|Got: .*|You have chosen to measure .*"
)
_SHORT = {"encr.": "encrypt", "decr.": "decrypt", "sign": "sign", "verify": "verify"}


@dataclass(frozen=True, slots=True)
class OpensslRate:
    """algorithm: as printed ("rsa 2048 bits"). operation: "sign", "verify", "encrypt" and so on."""

    algorithm: str
    operation: str
    operations_per_s: float


@dataclass(frozen=True, slots=True)
class OpensslBulk:
    """bytes_per_s for blocks of block_bytes."""

    algorithm: str
    block_bytes: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class OpensslSpeed:
    """One run. processes: of -multi, None where the lines that say so went elsewhere."""

    version: str | None
    processes: int | None
    rates: tuple[OpensslRate, ...]
    bulk: tuple[OpensslBulk, ...]
    gaps: tuple[Gap, ...]


def argv(algorithm: str, processes: int, seconds: int) -> tuple[str, ...]:
    """The command; elapsed time, because processes that wait for a PU use no time of their own."""
    return (
        "openssl",
        "speed",
        "-elapsed",
        "-seconds",
        str(seconds),
        "-multi",
        str(processes),
        algorithm,
    )


def parse(text: str) -> OpensslSpeed:
    """The one run of an output. Raises ParseError."""
    version: str | None = None
    forked = 0
    blocks: list[int] = []
    operations: list[str] = []
    rates: list[OpensslRate] = []
    bulk: list[OpensslBulk] = []
    gaps: list[Gap] = []
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw.rstrip()
        if found := _VERSION.fullmatch(line):
            version = found[1] or found[2]
        elif _FORKED.fullmatch(line):
            forked += 1
        elif found := _BLOCKS.fullmatch(line):
            blocks = [
                count(word, _SOURCE, "bytes", number)
                for word in found[1].split()
                if word != "bytes"
            ]
        elif _RATES.fullmatch(line) and "/s" in line:
            operations = _operations(line)
        elif row := _rates(line, operations, number):
            rates += row
        elif sizes := _bulk(line, blocks, number):
            bulk += sizes
        elif line.strip() and not _SAYS_NOTHING.fullmatch(line):
            gaps.append(Gap(f"{_SOURCE} line {number}", f"not known: {line[:80]!r}"))
    if not rates and not bulk:
        raise ParseError(
            _SOURCE,
            "a row such as 'rsa 2048 bits 0.000394s 0.000026s 2535.2 38747.0'",
            "none",
            hint="output of -mr is not read" if "+F" in text else None,
        )
    return OpensslSpeed(version, forked or None, tuple(rates), tuple(bulk), tuple(gaps))


def _operations(line: str) -> list[str]:
    """Names of the columns that are rates, in their order."""
    found = [word.removesuffix("/s") for word in line.split() if word.endswith("/s")]
    return [_SHORT.get(name, name) for name in found]


def _split(words: list[str], pattern: "re.Pattern[str]") -> tuple[list[str], list[str]]:
    """What stands before the last words that are of a pattern, and these."""
    at = len(words)
    while at > 0 and pattern.fullmatch(words[at - 1]):
        at -= 1
    return words[:at], words[at:]


def _rates(line: str, operations: Sequence[str], number: int) -> list[OpensslRate]:
    """A row of times and as many rates; () where it is none."""
    words, values = _split(line.split(), _RATE)
    name, times = _split(words, _TIME)
    if not (name and times and values):
        return []
    if not operations or not len(operations) == len(values) == len(times):
        expected = f"{len(operations)} times and {len(operations)} rates, as the header says"
        raise ParseError(_SOURCE, expected, line, line=number)
    return [
        OpensslRate(" ".join(name), operation, figure(value, _SOURCE, "a rate", number))
        for operation, value in zip(operations, values, strict=True)
    ]


def _bulk(line: str, blocks: Sequence[int], number: int) -> list[OpensslBulk]:
    """A row of one rate for each block size, in thousands of bytes; () where it is none."""
    name, values = _split(line.split(), _BULK)
    if not (blocks and name and values):
        return []
    if len(values) != len(blocks):
        raise ParseError(_SOURCE, f"{len(blocks)} rates", line, line=number)
    return [
        OpensslBulk(" ".join(name), block, figure(value[:-1], _SOURCE, "a rate", number) * 1e3)
        for block, value in zip(blocks, values, strict=True)
        if value.endswith("k")  # what is without it is of no version that we know
    ]
