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

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.findings import Gap
from homenode.machine.tools.lines import Line, Lines
from homenode.text import plural
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


class RocmDevice(Struct, frozen=True, kw_only=True):
    index: int  # the tool's number, of CPUs and GPUs
    name: str
    address: Bdf | None  # None for CPUs, and if not printed


class RocmMatrix(Struct, frozen=True, kw_only=True):
    is_bidirectional: bool
    devices: tuple[int, ...]
    # shape (devices, devices), [source][destination], bytes/s; None if N/A
    cells: tuple[tuple[float | None, ...], ...]


class RocmCopy(Struct, frozen=True, kw_only=True):
    is_bidirectional: bool
    source: int
    destination: int
    source_is_cpu: bool
    destination_is_cpu: bool
    size_bytes: int
    peak_bytes_per_s: float  # rate of the best repeat


class RocmBandwidthTest(Struct, frozen=True, kw_only=True):
    """A run: matrices, copies of pairs, or both."""

    version: str | None
    devices: tuple[RocmDevice, ...]
    matrices: tuple[RocmMatrix, ...]
    copies: tuple[RocmCopy, ...]
    gaps: tuple[Gap, ...]


def parse(text: str) -> RocmBandwidthTest:
    """Return the one run of an output. Raises ParseError."""
    return _Reader(text).run()


class _Reader:
    """The run so far. section: the title above the line."""

    def __init__(self, text: str) -> None:
        self.version: str | None = None
        self.devices: list[RocmDevice] = []
        self.matrices: list[RocmMatrix] = []
        self.copies: list[RocmCopy] = []
        self.section: str | None = None  # "one way", "both ways", "other", "pair"
        self.columns: tuple[int, ...] = ()
        self.rows: list[tuple[float | None, ...]] = []
        self.pair_is_bidirectional = False
        self.ends: dict[str, tuple[int, bool]] = {}
        self.lines = Lines(text, _SOURCE)
        self.lines.read(
            [
                (_SAYS_NOTHING, None),
                (_SIZES, None),
                (_MATRIX, self._start_matrix),
                (_OTHER_MATRIX, self._open_other),
                (_PAIR, self._pair),
                (_VERSION, self._parse_version),
                (_DEVICE, self._add_device),
                (_END, self._end),
                (_SIZE_ROW, self._copy),
                (_HEADER, self._parse_header),
                (_ROW, self._parse_row),
            ]
        )
        self._close_matrix()

    def _parse_version(self, line: Line, match: "re.Match[str]") -> None:
        if self.version is not None:
            raise line.make_error("one run")
        self.version = match[1]

    def _add_device(self, line: Line, match: "re.Match[str]") -> None:
        self.devices.append(_parse_device(line, match))

    def _end(self, line: Line, match: "re.Match[str]") -> None:
        self.ends[match[1]] = (line.read_count(match[2], "a device"), match[3] == "Cpu")

    def _open(self, section: str) -> None:
        self._close_matrix()
        self.section = section

    def _start_matrix(self, line: Line, match: "re.Match[str]") -> None:
        self._open("one way" if match[1] == "Unidirectional" else "both ways")

    def _open_other(self, line: Line, match: "re.Match[str]") -> None:
        self._open("other")

    def _pair(self, line: Line, match: "re.Match[str]") -> None:
        self._open("pair")
        self.pair_is_bidirectional = match[1] == "Bidirectional "
        self.ends = {}

    def _parse_header(self, line: Line, match: "re.Match[str]") -> None:
        columns = tuple(line.read_count(word, "a device") for word in match[1].split())
        unique = len(set(columns)) == len(columns) <= MAX_DEVICES
        if self.section is None or self.columns or not unique:
            raise line.make_error("a title and one row of devices")
        self.columns = columns

    def _parse_row(self, line: Line, match: "re.Match[str]") -> bool:
        if not self.columns:
            return False
        words = match[2].split()
        due = self.columns[len(self.rows)] if len(self.rows) < len(self.columns) else None
        if len(words) != len(self.columns) or line.read_count(match[1], "a device") != due:
            raise line.make_error(
                f"the row of device {due} with {plural(len(self.columns), 'value')}"
            )
        if self.section == "other":  # its cells are no bandwidths
            words = ["N/A"] * len(words)
        self.rows.append(
            tuple(line.value_or_none(word, "a bandwidth or N/A", 1e9) for word in words)
        )
        return True

    def _copy(self, line: Line, match: "re.Match[str]") -> None:
        if self.section != "pair" or set(self.ends) != {"Src", "Dst"}:
            raise line.make_error("a source and a destination")
        line.parse_positive(match[4], "a mean bandwidth")
        source, destination = self.ends["Src"], self.ends["Dst"]
        self.copies.append(
            RocmCopy(
                is_bidirectional=self.pair_is_bidirectional,
                source=source[0],
                destination=destination[0],
                source_is_cpu=source[1],
                destination_is_cpu=destination[1],
                size_bytes=line.read_count(match[1], "a size") * _BYTES_OF_UNIT[match[2]],
                peak_bytes_per_s=line.parse_positive(match[6], "a best bandwidth") * 1e9,
            )
        )

    def _close_matrix(self) -> None:
        if self.columns and len(self.rows) != len(self.columns):
            raise self.lines.make_error(
                f"{plural(len(self.columns), 'row')}", f"{plural(len(self.rows), 'row')}"
            )
        if self.columns and self.section in ("one way", "both ways"):
            self.matrices.append(
                RocmMatrix(
                    is_bidirectional=self.section == "both ways",
                    devices=self.columns,
                    cells=tuple(self.rows),
                )
            )
        self.columns, self.rows = (), []

    def run(self) -> RocmBandwidthTest:
        if not self.matrices and not self.copies:
            raise self.lines.make_error(
                "a matrix 'Unidirectional copy peak bandwidth GB/s' or a pair's sizes",
                hint="the program of ROCm 7 prints another format, which is not read",
            )
        return RocmBandwidthTest(
            version=self.version,
            devices=tuple(self.devices),
            matrices=tuple(self.matrices),
            copies=tuple(self.copies),
            gaps=tuple(self.lines.gaps),
        )


def _parse_device(line: Line, match: "re.Match[str]") -> RocmDevice:
    """name, then for GPUs an id (not kept) and an address without leading zeros: 0d:0.0"""
    parts = [part.strip() for part in match[2].split(",  ")]
    address = None
    if printed := _ADDRESS.fullmatch(parts[-1]):
        address = Bdf(0, int(printed[1], 16), int(printed[2], 16), int(printed[3]))
    return RocmDevice(index=line.read_count(match[1], "a device"), name=parts[0], address=address)
