"""rocm-bandwidth-test: copies between host and AMD GPUs.

    rocm-bandwidth-test -a          matrices, both ways too (-A)
    rocm-bandwidth-test -s 0 -d 1   one pair over sizes

Seen of 2.0.1, 2.5.1 and 2.6.0. ROCm 7 replaced it by a program of plugins with other output, which
is not read. Source: public outputs of these; no grammar is published.

              Device: 0,  AMD Ryzen 9 3950X 16-Core Processor
              Device: 1,  Vega 20,  GPU-9f50716172fd5d40,  0d:0.0

              Unidirectional copy peak bandwidth GB/s
              D/D       0           1
              0         N/A         7.177
              1         7.151       594.097

* Rows are sources, columns destinations; a copy within a GPU counts its bytes once.
* 2.0.1 spells "Bdirectional". A GPU's own id is an identity of the card: not kept.
* GB/s are 10^9 bytes per second.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from homenode.bdf import Bdf
from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.tools.figures import count, figure_or_none, positive
from homenode.units import GIB, KIB, MIB

COMMAND = ("rocm-bandwidth-test",)
MAX_DEVICES = 1024

_SOURCE = "rocm-bandwidth-test"
_VERSION = re.compile(r"RocmBandwidthTest Version: (\S+)", re.ASCII)
_DEVICE = re.compile(r"Device: (\d+),\s+(.+)", re.ASCII)
_ADDRESS = re.compile(r"([0-9a-fA-F]{1,2}):([0-9a-fA-F]{1,2})\.([0-7])", re.ASCII)
_MATRIX = re.compile(r"(Unidirectional|Bi?directional) copy (?:peak|average) bandwidth GB/s")
_OTHER_MATRIX = re.compile(r"(?:Inter-)?Device (?:Access|Numa Distance)|Data Path Validation.*")
_HEADER = re.compile(r"D/D((?:\s+\d+)+)", re.ASCII)
_ROW = re.compile(r"(\d+)((?:\s+\S+)+)", re.ASCII)
_PAIR = re.compile(r"=+\s+(Unidirectional |Bidirectional )?Benchmark Result\s+=+", re.ASCII)
_END = re.compile(r"=+ (Src|Dst) Device Id: (\d+) (?:Src|Dst) Device Type: (Cpu|Gpu) =+", re.ASCII)
_SIZES = re.compile(
    r"Data Size\s+Avg Time\(us\)\s+Avg BW\(GB/s\)\s+Min Time\(us\)\s+Peak BW\(GB/s\)"
)
_SIZE_ROW = re.compile(r"(\d+) (KB|MB|GB)\s+(\S+)\s+(\S+)\s+(\S+)\s+(\S+)", re.ASCII)
_SAYS_NOTHING = re.compile(r"\.+|Launch Command is: .*")
_BYTES_OF_UNIT = {"KB": KIB, "MB": MIB, "GB": GIB}


@dataclass(frozen=True, slots=True)
class RocmDevice:
    """index: the tool's number, of CPUs and GPUs. address: None for CPUs and where not printed."""

    index: int
    name: str
    address: Bdf | None


@dataclass(frozen=True, slots=True)
class RocmMatrix:
    """cells: shape (devices, devices), [source][destination], bytes/s; None where N/A."""

    is_bidirectional: bool
    devices: tuple[int, ...]
    cells: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, slots=True)
class RocmCopy:
    """One size of one pair. peak_bytes_per_s is the best, average the mean of its repeats."""

    is_bidirectional: bool
    source: int
    destination: int
    source_is_cpu: bool
    destination_is_cpu: bool
    size_bytes: int
    average_bytes_per_s: float
    peak_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class RocmBandwidthTest:
    """One run: matrices, copies of pairs, or both."""

    version: str | None
    devices: tuple[RocmDevice, ...]
    matrices: tuple[RocmMatrix, ...]
    copies: tuple[RocmCopy, ...]
    gaps: tuple[Gap, ...]


def parse(text: str) -> RocmBandwidthTest:
    """The one run of an output. Raises ParseError."""
    reader = _Reader()
    for number, line in enumerate(text.split("\n"), start=1):
        reader.read(line.strip(), number)
    return reader.run()


class _Reader:
    """The run so far."""

    def __init__(self) -> None:
        self.version: str | None = None
        self.devices: list[RocmDevice] = []
        self.matrices: list[RocmMatrix] = []
        self.copies: list[RocmCopy] = []
        self.gaps: list[Gap] = []
        self.section: str | None = None  # "one way", "both ways", "other", "pair"
        self.columns: tuple[int, ...] = ()
        self.rows: list[tuple[float | None, ...]] = []
        self.pair_is_bidirectional = False
        self.ends: dict[str, tuple[int, bool]] = {}

    def read(self, line: str, number: int) -> None:
        if not line or _SAYS_NOTHING.fullmatch(line) or _SIZES.fullmatch(line):
            return
        if found := _VERSION.fullmatch(line):
            if self.version is not None:
                raise ParseError(_SOURCE, "one run", line, line=number)
            self.version = found[1]
        elif found := _DEVICE.fullmatch(line):
            self.devices.append(_device(found, number))
        elif self._title(line):
            return
        elif found := _END.fullmatch(line):
            self.ends[found[1]] = (count(found[2], _SOURCE, "a device", number), found[3] == "Cpu")
        elif found := _SIZE_ROW.fullmatch(line):
            self._copy(found, number)
        elif found := _HEADER.fullmatch(line):
            self._header(found[1].split(), line, number)
        elif self.columns and (found := _ROW.fullmatch(line)):
            self._row(found, number)
        else:
            self.gaps.append(Gap(f"{_SOURCE} line {number}", f"not known: {line[:80]!r}"))

    def _title(self, line: str) -> bool:
        if found := _MATRIX.fullmatch(line):
            self._close()
            self.section = "one way" if found[1] == "Unidirectional" else "both ways"
        elif _OTHER_MATRIX.fullmatch(line):
            self._close()
            self.section = "other"
        elif found := _PAIR.fullmatch(line):
            self._close()
            self.section = "pair"
            self.pair_is_bidirectional = found[1] == "Bidirectional "
            self.ends = {}
        else:
            return False
        return True

    def _header(self, words: Sequence[str], line: str, number: int) -> None:
        columns = tuple(count(word, _SOURCE, "a device", number) for word in words)
        unique = len(set(columns)) == len(columns) <= MAX_DEVICES
        if self.section is None or self.columns or not unique:
            raise ParseError(_SOURCE, "a title and one row of devices", line, line=number)
        self.columns = columns

    def _row(self, found: "re.Match[str]", number: int) -> None:
        words = found[2].split()
        due = self.columns[len(self.rows)] if len(self.rows) < len(self.columns) else None
        if len(words) != len(self.columns) or count(found[1], _SOURCE, "a device", number) != due:
            expected = f"the row of device {due} with {len(self.columns)} values"
            raise ParseError(_SOURCE, expected, found[0], line=number)
        if self.section == "other":
            self.rows.append(tuple(None for _ in words))
            return
        values = (figure_or_none(word, _SOURCE, "a bandwidth or N/A", number) for word in words)
        self.rows.append(tuple(None if v is None else v * 1e9 for v in values))

    def _copy(self, found: "re.Match[str]", number: int) -> None:
        if self.section != "pair" or set(self.ends) != {"Src", "Dst"}:
            raise ParseError(_SOURCE, "a source and a destination", found[0], line=number)
        source, destination = self.ends["Src"], self.ends["Dst"]
        self.copies.append(
            RocmCopy(
                self.pair_is_bidirectional,
                source[0],
                destination[0],
                source[1],
                destination[1],
                count(found[1], _SOURCE, "a size", number) * _BYTES_OF_UNIT[found[2]],
                positive(found[4], _SOURCE, "a mean bandwidth", number) * 1e9,
                positive(found[6], _SOURCE, "a best bandwidth", number) * 1e9,
            )
        )

    def _close(self) -> None:
        if self.columns and len(self.rows) != len(self.columns):
            raise ParseError(_SOURCE, f"{len(self.columns)} rows", f"{len(self.rows)} rows")
        if self.columns and self.section in ("one way", "both ways"):
            self.matrices.append(
                RocmMatrix(self.section == "both ways", self.columns, tuple(self.rows))
            )
        self.columns, self.rows = (), []

    def run(self) -> RocmBandwidthTest:
        self._close()
        if not self.matrices and not self.copies:
            raise ParseError(
                _SOURCE,
                "a matrix 'Unidirectional copy peak bandwidth GB/s' or a pair's sizes",
                "none",
                hint="the program of ROCm 7 prints another format, which is not read",
            )
        return RocmBandwidthTest(
            self.version,
            tuple(self.devices),
            tuple(self.matrices),
            tuple(self.copies),
            tuple(self.gaps),
        )


def _device(found: "re.Match[str]", number: int) -> RocmDevice:
    """name, then for GPUs an id (not kept) and an address without leading zeros: 0d:0.0"""
    parts = [part.strip() for part in found[2].split(",  ")]
    address = _ADDRESS.fullmatch(parts[-1])
    return RocmDevice(
        count(found[1], _SOURCE, "a device", number),
        parts[0],
        None
        if address is None
        else Bdf(0, int(address[1], 16), int(address[2], 16), int(address[3])),
    )
