"""torch report: output of the PyTorch programs, homenode.torch/1.
docs/reference/formats/torch.md

    python3 - host-copies < torch_copies          one document, a line
    python3 - host-copies --each-node < ...       one of each node, a line each

Seen of PyTorch 2.15 (its API) and of a test guest. Other lines are libraries' and are skipped: NCCL
prints its version on standard output.
"""

import math
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from homenode.bdf import Bdf
from homenode.errors import ParseError
from homenode.findings import Gap
from homenode.machine.tools import lines
from homenode.machine.tools.lines import MAX_VALUE

SOURCE = "torch report"
FORMAT = "homenode.torch/1"
MAX_LINE = 64 << 20
MAX_ENTRIES = 200_000

_UNITS = frozenset({"bytes_per_s", "ns", "flop_per_s"})


class TorchDevice(Struct, frozen=True):
    """A GPU as PyTorch sees it."""

    index: int  # PyTorch's
    address: str | None  # None if it does not report it
    name: str
    node: int | None  # None for -1


class TorchThread(Struct, frozen=True):
    """Place of the thread that started the copies, read at their end."""

    node: int | None


class TorchResult(Struct, frozen=True):
    metric: str
    unit: str
    device: int  # indices
    samples: tuple[float, ...]
    steady: bool  # whether it had become so before the first sample
    warmups: int  # repeats before it
    thread: TorchThread
    variant: str | None = None
    peer: int | None = None  # indices
    size_bytes: int | None = None
    memory_node: int | None = None  # node of the host buffer, if it can be determined


class TorchRow(Struct, frozen=True):
    """A message size of an all-reduce in place."""

    size_bytes: int
    time_ns: float  # time of one run, on the slowest rank
    iterations: int
    wrong_ranks: int


class TorchRun(Struct, frozen=True):
    torch: str = ""
    runtime: str = ""
    devices: tuple[TorchDevice, ...] = ()
    bound_node: int | None = None
    copy_bytes: int | None = None
    results: tuple[TorchResult, ...] = ()
    gaps: tuple[Gap, ...] = ()
    stalled: str | None = None  # the missing result, after which the program ended itself
    failed: str | None = None  # why this node's process measured nothing
    gpus: int = 0
    warmups: int = 0
    rows: tuple[TorchRow, ...] = ()


def parse(text: str) -> tuple[TorchRun, ...]:
    """Return the documents of an output, in order. Raises ParseError, also if it is missing."""
    runs = tuple(_split_documents(text))
    if not runs:
        raise ParseError(SOURCE, f'a line with "format": "{FORMAT}"', text.strip()[:60] or None)
    return runs


def _split_documents(text: str) -> Iterator[TorchRun]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.startswith('{"format"'):
            continue
        try:
            document = lines.json_object(line[:MAX_LINE], SOURCE)
        except ParseError as error:
            raise ParseError(SOURCE, error.expected, error.found, line=number) from None
        if document.get("format") != FORMAT:
            raise ParseError(SOURCE, FORMAT, str(document.get("format")), line=number)
        yield _run(document, number)


def _run(document: dict[str, Any], line: int) -> TorchRun:
    try:
        run = msgspec.convert(document, TorchRun, strict=True)
    except (msgspec.ValidationError, OverflowError, UnicodeError) as error:
        raise ParseError(SOURCE, "its fields", repr(str(error)), line=line) from None
    if len(run.results) + len(run.rows) > MAX_ENTRIES:
        raise ParseError(SOURCE, f"at most {MAX_ENTRIES} results", "more", line=line)
    for device in run.devices:
        if device.address is not None:
            Bdf.parse(device.address, f"{SOURCE}:{line}")
    if [device.index for device in run.devices] != list(range(len(run.devices))):
        raise ParseError(SOURCE, "devices numbered from 0", "others", line=line)
    for result in run.results:
        _check_result(result, len(run.devices), line)
    for row in run.rows:
        _check_row(row, line)
    if run.rows and not 2 <= run.gpus <= len(run.devices):
        raise ParseError(
            SOURCE, "2 or more of its devices in a collective", str(run.gpus), line=line
        )
    return run


def _check_result(figure: TorchResult, devices: int, line: int) -> None:
    numbers = range(devices)
    if figure.device not in numbers or (figure.peer is not None and figure.peer not in numbers):
        raise ParseError(SOURCE, f"a device below {devices}", str(figure.device), line=line)
    if figure.unit not in _UNITS:
        raise ParseError(SOURCE, f"one of {', '.join(sorted(_UNITS))}", figure.unit, line=line)
    for value in figure.samples:
        _reject_nonpositive(value, figure.metric, line)


def _check_row(row: TorchRow, line: int) -> None:
    _reject_nonpositive(row.time_ns, "time_ns", line)
    if row.size_bytes <= 0 or row.iterations <= 0 or row.wrong_ranks < 0:
        raise ParseError(SOURCE, "sizes and repeats above 0", str(row.size_bytes), line=line)


def _reject_nonpositive(value: float, name: str, line: int) -> None:
    if not (math.isfinite(value) and 0 < value < MAX_VALUE):
        raise ParseError(SOURCE, f"{name} above 0 and finite", f"{value:g}", line=line)
