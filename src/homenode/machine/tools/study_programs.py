"""The study's own programs: pointer chase, matrix product, copies.

    mem_latency               4096\t1.1\t# 4KB
    matmul_bench.py           100 matmuls: 2.115s (21.1ms each)
    gpu_bandwidth_bench.py    GPU 0 [AMD Instinct MI350X]
                                Host-to-Device: 55.12 GB/s

Seen with revision 8476fab. Source: their sources. What the outputs do not say:

* The chase has one pointer per 8 bytes, no pinning and ordinary pages; one sample per size. On most
hosts it prints zeroes, which are kept; comparisons must reject them.
* The matrix product is 8192 x 8192 in fp32 without tensor cores, on GPU 0 alone.
* The copies are of 256 MiB of pinned memory on whatever node the thread ran; GB/s are 10^9, and a
  copy within a GPU counts its bytes once.
"""

import re

from msgspec import Struct
from msgspec.structs import replace

from homenode.errors import ParseError
from homenode.machine.tools.lines import Line, Lines

MAX_POINTS = 1000

_CHASE = "mem_latency"
_POINT = re.compile(r"(\d+)\s+(\S+)(?:\s+#.*)?", re.ASCII)
_MATMUL = "matmul_bench"
_PRODUCT = re.compile(r"(\d+) matmuls: (\S+?)s \((\S+?)ms each\)", re.ASCII)
_COPIES = "gpu_bandwidth_bench"
_GPU = re.compile(r"GPU (\d+) \[(.*)\]", re.ASCII)
_COPY = re.compile(r"(Host-to-Device|Device-to-Host|Device-to-Device): (\S+) GB/s", re.ASCII)


class GpuCopies(Struct, frozen=True):
    """A GPU's bandwidths, bytes/s. None: not printed."""

    device: int  # the framework's number
    name: str
    host_to_device: float | None
    device_to_host: float | None
    device_to_device: float | None


def parse_chase(text: str) -> tuple[tuple[int, float], ...]:
    """Return (bytes of the buffer, ns of a dependent load) of a curve, ascending. Raises
    ParseError."""
    points: list[tuple[int, float]] = []
    for line in Lines(text, _CHASE):
        if line.text.startswith("#"):
            continue
        match = _POINT.fullmatch(line.text)
        if match is None:
            raise line.make_error("a size and a latency")
        size = line.read_count(match[1], "a size in bytes")
        if points and size <= points[-1][0]:
            raise line.make_error("ascending sizes")
        points.append((size, line.parse_number(match[2], "a latency in ns")))
    if not 0 < len(points) <= MAX_POINTS:
        raise ParseError(_CHASE, f"1 to {MAX_POINTS} sizes", str(len(points)))
    return tuple(points)


def parse_matmul(text: str) -> float:
    """Time of one product in ns, from the total: the printed one has three digits. Raises
    ParseError; the last line of what went wrong instead is its hint."""
    last_line = ""
    for line in Lines(text, _MATMUL):
        match = _PRODUCT.fullmatch(line.text)
        if match is not None:
            products = line.read_count(match[1], "a number of products")
            total = line.parse_positive(match[2], "a time in s")
            if products == 0:
                raise line.make_error("at least one product")
            return total / products * 1e9
        last_line = line.text
    expected = "'100 matmuls: 2.115s (21.1ms each)'"
    raise ParseError(_MATMUL, expected, hint=last_line[:200] or None)


def parse_copies(text: str) -> tuple[GpuCopies, ...]:
    """Return the GPUs of one run. Raises ParseError."""
    gpus: dict[int, GpuCopies] = {}

    def gpu(line: Line, match: "re.Match[str]") -> None:
        device = line.read_count(match[1], "a device")
        if device in gpus:
            raise line.make_error("each GPU once")
        gpus[device] = GpuCopies(device, match[2], None, None, None)

    def copy(line: Line, match: "re.Match[str]") -> None:
        name = match[1].lower().replace("-", "_")
        last = next(reversed(gpus.values()), None)
        if last is None or getattr(last, name) is not None:
            raise line.make_error("a GPU, then each direction once")
        gpus[last.device] = replace(last, **{name: line.parse_positive(match[2], "GB/s") * 1e9})

    Lines(text, _COPIES).read([(_GPU, gpu), (_COPY, copy)])
    if not any(
        copies.host_to_device or copies.device_to_host or copies.device_to_device
        for copies in gpus.values()
    ):
        raise ParseError(_COPIES, "GPU 0 [NAME] and its bandwidths")
    return tuple(gpus.values())
