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
from collections.abc import Iterator

from msgspec import Struct

from homenode.findings import Gap
from homenode.machine.tools.lines import Line, Lines
from homenode.measure.figures.sample import FigureList, Figures, ToolOutput, of_text

_SOURCE = "openssl speed"
_VERSION = re.compile(r"version: (\S+)|OpenSSL (\d\S*+).*", re.ASCII)
_BLOCKS = re.compile(r"type((?:\s+\d+ bytes)+)", re.ASCII)
_RATES = re.compile(r"(?:[a-z]+\s+)+[a-z.]+/s(?:\s+[a-z.]+/s)*", re.ASCII)
_RATE = re.compile(r"\d+\.\d+", re.ASCII)
_TIME = re.compile(r"\d+\.\d+s", re.ASCII)
_BULK = re.compile(r"\d+\.\d+k?", re.ASCII)
_FORKED = re.compile(r"Forked child \d+", re.ASCII)
_SAYS_NOTHING = re.compile(
    r"built on: .*|options: ?.*|compiler: .*|CPUINFO: .*|The 'numbers' are in .*|Doing .*|"
    r"\+D.*|\+R.*|\+H.*|Got: .*|You have chosen to measure .*"
)
_SHORT = {"encr.": "encrypt", "decr.": "decrypt", "sign": "sign", "verify": "verify"}


class OpensslRate(Struct, frozen=True, kw_only=True):
    """algorithm: as printed ("rsa 2048 bits"). operation: "sign", "verify", "encrypt" and so on."""

    algorithm: str
    operation: str
    operations_per_s: float


class OpensslBulk(Struct, frozen=True, kw_only=True):
    """bytes_per_s for blocks of block_bytes."""

    algorithm: str
    block_bytes: int
    bytes_per_s: float


class OpensslSpeed(Struct, frozen=True, kw_only=True):
    """One run. processes: of -multi, None where the lines that say so went elsewhere."""

    version: str | None
    processes: int | None
    rates: tuple[OpensslRate, ...]
    bulk: tuple[OpensslBulk, ...]
    gaps: tuple[Gap, ...]


def argv(algorithm: str, processes: int, seconds: int) -> tuple[str, ...]:
    """The command; elapsed time, because processes that wait for a PU use no time of their own."""
    options = f"-elapsed -seconds {seconds} -multi {processes}"
    return ("openssl", "speed", *options.split(), algorithm)


def parse(text: str) -> OpensslSpeed:
    """The one run of an output. Raises ParseError."""
    lines = Lines(text, _SOURCE)
    version: str | None = None
    forked = 0
    blocks: list[int] = []
    operations: list[str] = []
    rates: list[OpensslRate] = []
    bulk: list[OpensslBulk] = []
    for line in lines:
        if found := _VERSION.fullmatch(line.text):
            version = found[1] or found[2]
        elif _FORKED.fullmatch(line.text):
            forked += 1
        elif found := _BLOCKS.fullmatch(line.text):
            sizes = (word for word in found[1].split() if word != "bytes")
            blocks = [line.whole(word, "bytes") for word in sizes]
        elif _RATES.fullmatch(line.text):
            operations = _operations(line.text)
        elif row := list(_rates(line, operations)):
            rates += row
        elif ciphers := list(_bulk(line, blocks)):
            bulk += ciphers
        elif not _SAYS_NOTHING.fullmatch(line.text):
            lines.unknown(line)
    if not rates and not bulk:
        raise lines.error(
            "a row such as 'rsa 2048 bits 0.000394s 0.000026s 2535.2 38747.0'",
            hint="output of -mr is not read" if "+F" in text else None,
        )
    return OpensslSpeed(
        version=version,
        processes=forked or None,
        rates=tuple(rates),
        bulk=tuple(bulk),
        gaps=tuple(lines.gaps),
    )


def _operations(text: str) -> list[str]:
    """Names of the columns that are rates, in their order."""
    found = [word.removesuffix("/s") for word in text.split() if word.endswith("/s")]
    return [_SHORT.get(name, name) for name in found]


def _split(words: list[str], pattern: "re.Pattern[str]") -> tuple[list[str], list[str]]:
    """What stands before the last words that are of a pattern, and these."""
    at = len(words)
    while at > 0 and pattern.fullmatch(words[at - 1]):
        at -= 1
    return words[:at], words[at:]


def _rates(line: Line, operations: list[str]) -> Iterator[OpensslRate]:
    """A row of times and as many rates; nothing where it is none."""
    words, values = _split(line.text.split(), _RATE)
    name, times = _split(words, _TIME)
    if not (name and times and values):
        return
    if not operations or not len(operations) == len(values) == len(times):
        number = len(operations)
        raise line.error(f"{number} times and {number} rates, as the header says")
    for operation, value in zip(operations, values, strict=True):
        yield OpensslRate(
            algorithm=" ".join(name),
            operation=operation,
            operations_per_s=line.figure(value, "a rate"),
        )


def _bulk(line: Line, blocks: list[int]) -> Iterator[OpensslBulk]:
    """A row of one rate for each block size, in thousands of bytes; nothing where it is none."""
    name, values = _split(line.text.split(), _BULK)
    if not (blocks and name and values):
        return
    if len(values) != len(blocks):
        raise line.error(f"{len(blocks)} rates")
    for block, value in zip(blocks, values, strict=True):
        if value.endswith("k"):  # what is without it is of no version that we know
            yield OpensslBulk(
                algorithm=" ".join(name),
                block_bytes=block,
                bytes_per_s=line.figure(value[:-1], "a rate") * 1e3,
            )


def of_openssl(run: OpensslSpeed) -> Figures:
    """Operations per second, and bytes per second of bulk ciphers, as a program of one's own."""
    found = FigureList("openssl", run.version, run.gaps)
    for rate in run.rates:
        if rate.operations_per_s > 0:
            metric = f"app-rate:openssl {rate.algorithm} {rate.operation}"
            found.add(metric, "units_per_s", rate.operations_per_s)
    for bulk in run.bulk:
        if bulk.bytes_per_s > 0:
            metric, size = f"app-rate:openssl {bulk.algorithm}", bulk.block_bytes
            found.add(metric, "bytes_per_s", bulk.bytes_per_s, size_bytes=size)
    found.condition("tool openssl processes", run.processes)
    return found.figures()


OUTPUT = ToolOutput(
    "openssl speed",
    re.compile(r"^ +sign +verify .*sign/s|^type +\d+ bytes", re.M),
    of_text(parse, of_openssl),
)
