"""bandwidthTest of the CUDA samples: copies between host and GPU, and within a GPU.

    bandwidthTest --memory=pinned [--device=0|all] [--csv]

Seen with CUDA 9 to 12; gone from CUDA samples 12.9 and later, in favour of nvbandwidth. Source:
bandwidthTest.cu of the CUDA samples; a public output of a V100.

     Host to Device Bandwidth, 1 Device(s)
     PINNED Memory Transfers
       Transfer Size (Bytes)\tBandwidth(GB/s)
       32000000\t\t\t12.4

* Samples up to CUDA 10.1 print MB/s and mean 2^20 bytes (they divide by 1 << 20); later ones print
  GB/s and mean 10^9.
* With several devices the result is their sum; without --device it is of device 0 alone.
* A copy within a GPU counts what is read and what is written.
"""

import re
from enum import StrEnum

from msgspec import Struct

from homenode.findings import Gap
from homenode.machine.tools.lines import Line, Lines
from homenode.measure.model import (
    MeasuredSamples,
    SampleBuilder,
    ToolOutput,
    read_from_text,
)
from homenode.text import plural
from homenode.units import MIB

COMMAND = ("bandwidthTest", "--memory=pinned")

_SOURCE = "bandwidthTest"
_TITLE = re.compile(
    r"(Host to Device|Device to Host|Device to Device) Bandwidth, (\d+) Device\(s\)", re.ASCII
)
_MEMORY = re.compile(r"(PINNED|PAGEABLE)(?:, .*)? Memory Transfers(?:, .*)?", re.ASCII)
_HEADER = re.compile(r"Transfer Size \(Bytes\)\s+Bandwidth\s*\((MB|GB)/s\)", re.ASCII)
_ROW = re.compile(r"(\d+)\s+(\S+)", re.ASCII)
_CSV = re.compile(
    r"bandwidthTest-(H2D|D2H|D2D)(?:-(Pinned|Paged))?(?:-\S+)?, Bandwidth = (\S+) (MB|GB)/s, "
    r"Time = (\S+) s, Size = (\d+) bytes, NumDevsUsed = (\d+)",
    re.ASCII,
)
_DEVICE = re.compile(r"Device (\d+): (.+)", re.ASCII)
_RESULT = re.compile(r"(?:Result = |\[?bandwidthTest\]? .*results?\.* ?)(PASS|FAIL)\w*", re.ASCII)
_SAYS_NOTHING = re.compile(
    r"\[CUDA Bandwidth Test\] - Starting\.*|Running on\.*|(?:Quick|Range|Shmoo) Mode|NOTE: .*|"
    r"\.+|\[bandwidthTest\] .*|.*Starting\.\.\..*"
)
_BYTES_OF_UNIT = {"MB": float(MIB), "GB": 1e9}


class Direction(StrEnum):
    HOST_TO_DEVICE = "host-to-device"
    DEVICE_TO_HOST = "device-to-host"
    DEVICE_TO_DEVICE = "device-to-device"


_DIRECTIONS = {
    "Host to Device": Direction.HOST_TO_DEVICE,
    "Device to Host": Direction.DEVICE_TO_HOST,
    "Device to Device": Direction.DEVICE_TO_DEVICE,
    "H2D": Direction.HOST_TO_DEVICE,
    "D2H": Direction.DEVICE_TO_HOST,
    "D2D": Direction.DEVICE_TO_DEVICE,
}


class CudaTransfer(Struct, frozen=True, kw_only=True):
    direction: Direction
    is_pinned: bool | None  # None if not reported
    devices: int  # how many took part; bytes_per_s is their sum
    size_bytes: int
    bytes_per_s: float


class CudaBandwidthTest(Struct, frozen=True, kw_only=True):
    devices: tuple[tuple[int, str], ...]  # (CUDA's number, name)
    transfers: tuple[CudaTransfer, ...]
    has_passed: bool | None  # None if the end is missing
    gaps: tuple[Gap, ...]


def parse(text: str) -> CudaBandwidthTest:
    """Return the one run of an output. Raises ParseError, also if no transfer was measured."""
    lines = Lines(text, _SOURCE)
    devices: list[tuple[int, str]] = []
    transfers: list[CudaTransfer] = []
    results: list[bool] = []
    title: tuple[Direction, int] | None = None
    is_pinned: bool | None = None
    unit: float | None = None
    for line in lines:
        if match := _TITLE.fullmatch(line.text):
            title = (_DIRECTIONS[match[1]], _parse_devices(line, match[2]))
            is_pinned, unit = None, None
        elif match := _MEMORY.fullmatch(line.text):
            is_pinned = match[1] == "PINNED"
        elif match := _HEADER.fullmatch(line.text):
            unit = _BYTES_OF_UNIT[match[1]]
        elif match := _CSV.fullmatch(line.text):
            transfers.append(_parse_csv(line, match))
        elif match := _DEVICE.fullmatch(line.text):
            devices.append((line.read_count(match[1], "a device"), match[2].strip()))
        elif match := _RESULT.fullmatch(line.text):
            results.append(match[1] == "PASS")
        elif title is not None and unit is not None and (match := _ROW.fullmatch(line.text)):
            transfers.append(
                CudaTransfer(
                    direction=title[0],
                    is_pinned=is_pinned,
                    devices=title[1],
                    size_bytes=line.read_count(match[1], "a size in bytes"),
                    bytes_per_s=line.parse_positive(match[2], "a bandwidth") * unit,
                )
            )
        elif not _SAYS_NOTHING.fullmatch(line.text):
            lines.add_unknown(line)
    if not transfers:
        hint = lines.gaps[0].reason if lines.gaps else None
        raise lines.make_error("a table 'Transfer Size (Bytes)  Bandwidth(GB/s)'", hint=hint)
    if len(results) > 1:
        raise lines.make_error("one run", plural(len(results), "result"))
    return CudaBandwidthTest(
        devices=tuple(devices),
        transfers=tuple(transfers),
        has_passed=results[0] if results else None,
        gaps=tuple(lines.gaps),
    )


def _parse_csv(line: Line, row: "re.Match[str]") -> CudaTransfer:
    return CudaTransfer(
        direction=_DIRECTIONS[row[1]],
        is_pinned=None if row[2] is None else row[2] == "Pinned",
        devices=_parse_devices(line, row[7]),
        size_bytes=line.read_count(row[6], "a size in bytes"),
        bytes_per_s=line.parse_positive(row[3], "a bandwidth") * _BYTES_OF_UNIT[row[4]],
    )


def _parse_devices(line: Line, word: str) -> int:
    devices = line.read_count(word, "a number of devices")
    if not 0 < devices <= 1024:
        raise line.make_error("1 to 1024 devices", word)
    return devices


_METRIC_OF_DIRECTION = {
    Direction.HOST_TO_DEVICE: "h2d-bandwidth",
    Direction.DEVICE_TO_HOST: "d2h-bandwidth",
    Direction.DEVICE_TO_DEVICE: "d2d-bandwidth",
}


def read_cuda_results(run: CudaBandwidthTest) -> MeasuredSamples:
    """Return the transfers on one device as samples, of the largest size of each direction: small
    copies, of a range of sizes, measure what a copy costs."""
    if run.has_passed is False:
        failure = Gap("bandwidthTest", "has FAIL: its results are omitted")
        return MeasuredSamples(gaps=(*run.gaps, failure))
    how = "bandwidthTest, bytes within a GPU counted once, twice in what it prints"
    results = SampleBuilder("device copy", how, run.gaps)
    largest: dict[tuple[Direction, bool | None], int] = {}
    for transfer in run.transfers:
        if transfer.devices > 1:
            results.add_gap("bandwidthTest", f"a sum of {transfer.devices} devices: not kept")
            continue
        kind = (transfer.direction, transfer.is_pinned)
        largest[kind] = max(largest.get(kind, 0), transfer.size_bytes)
    for transfer in run.transfers:
        kind = (transfer.direction, transfer.is_pinned)
        if transfer.devices > 1 or transfer.size_bytes < largest[kind]:
            continue
        is_within = transfer.direction is Direction.DEVICE_TO_DEVICE
        results.add(
            _METRIC_OF_DIRECTION[transfer.direction],
            "bytes_per_s",
            transfer.bytes_per_s / (2 if is_within else 1),
            index=run.devices[0][0] if len(run.devices) == 1 else 0,
            variant="pageable" if transfer.is_pinned is False else None,
        )
    for size in sorted(set(largest.values())):
        results.add_condition("tool copy size", f"{size} bytes")
    return results.build_samples(name for _, name in run.devices)


OUTPUT = ToolOutput(
    "bandwidthTest",
    re.compile(r"^\[CUDA Bandwidth Test\]|^[ \t]*Transfer Size \(Bytes\)|^bandwidthTest-", re.M),
    read_from_text(parse, read_cuda_results),
)
