"""The programs that the study of GPU VMs wrote for itself: pointer chase, matrix product, copies.

    mem_latency               4096\t1.1\t# 4KB
    matmul_bench.py           100 matmuls: 2.115s (21.1ms each)
    gpu_bandwidth_bench.py    GPU 0 [AMD Instinct MI350X]
                                Host-to-Device: 55.12 GB/s

Seen of revision 8476fab. Source: their sources. What the outputs do not say:

* The chase has one pointer per 8 bytes, no pinning and ordinary pages; one sample per size. On most
  hosts it prints zeroes, which are kept: whoever concludes from them has to refuse them.
* The matrix product is 8192 x 8192 in fp32 without tensor cores, on GPU 0 alone.
* The copies are of 256 MiB of pinned memory on whatever node the thread ran; GB/s are 10^9, and a
  copy within a GPU counts its bytes once.
"""

import re

from msgspec import Struct

from homenode.errors import ParseError
from homenode.machine.tools.figures import count, figure, positive

MAX_POINTS = 1000

_CHASE = "mem_latency"
_POINT = re.compile(r"(\d+)\s+(\S+)(?:\s+#.*)?", re.ASCII)
_MATMUL = "matmul_bench"
_PRODUCT = re.compile(r"(\d+) matmuls: (\S+?)s \((\S+?)ms each\)", re.ASCII)
_COPIES = "gpu_bandwidth_bench"
_GPU = re.compile(r"GPU (\d+) \[(.*)\]", re.ASCII)
_COPY = re.compile(r"(Host-to-Device|Device-to-Host|Device-to-Device): (\S+) GB/s", re.ASCII)


class ChasePoint(Struct, frozen=True):
    """Time of one dependent load in a buffer of this size."""

    size_bytes: int
    latency_ns: float


class GpuCopies(Struct, frozen=True):
    """One GPU's bandwidths, bytes/s. device: the framework's number. None: not printed."""

    device: int
    name: str
    host_to_device: float | None
    device_to_host: float | None
    device_to_device: float | None


def parse_chase(text: str) -> tuple[ChasePoint, ...]:
    """The points of a curve, ascending. Raises ParseError."""
    points: list[ChasePoint] = []
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        found = _POINT.fullmatch(line)
        if found is None:
            raise ParseError(_CHASE, "a size and a latency", line, line=number)
        size = count(found[1], _CHASE, "a size in bytes", number)
        if points and size <= points[-1].size_bytes:
            raise ParseError(_CHASE, "ascending sizes", line, line=number)
        points.append(ChasePoint(size, figure(found[2], _CHASE, "a latency in ns", number)))
    if not 0 < len(points) <= MAX_POINTS:
        raise ParseError(_CHASE, f"1 to {MAX_POINTS} sizes", str(len(points)))
    return tuple(points)


def parse_matmul(text: str) -> float:
    """Time of one product in ns, from the total: the printed one has three digits.

    Raises ParseError; the last line of what went wrong instead is its hint.
    """
    said = ""
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw.strip()
        found = _PRODUCT.fullmatch(line)
        if found is not None:
            products = count(found[1], _MATMUL, "a number of products", number)
            total = positive(found[2], _MATMUL, "a time in s", number)
            if products == 0:
                raise ParseError(_MATMUL, "at least one product", line, line=number)
            return total / products * 1e9
        said = line or said
    raise ParseError(
        _MATMUL, "'100 matmuls: 2.115s (21.1ms each)'", "none", hint=said[:200] or None
    )


def parse_copies(text: str) -> tuple[GpuCopies, ...]:
    """The GPUs of one run. Raises ParseError."""
    gpus: list[tuple[int, str, dict[str, float]]] = []
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw.strip()
        gpu, copy = _GPU.fullmatch(line), _COPY.fullmatch(line)
        if gpu is not None:
            device = count(gpu[1], _COPIES, "a device", number)
            if any(device == known for known, _, _ in gpus):
                raise ParseError(_COPIES, "each GPU once", line, line=number)
            gpus.append((device, gpu[2], {}))
        elif copy is not None:
            if not gpus or copy[1] in gpus[-1][2]:
                raise ParseError(_COPIES, "a GPU, then each direction once", line, line=number)
            gpus[-1][2][copy[1]] = positive(copy[2], _COPIES, "GB/s", number) * 1e9
    if not any(rates for _, _, rates in gpus):
        raise ParseError(_COPIES, "GPU 0 [NAME] and its bandwidths", "none")
    return tuple(
        GpuCopies(
            device,
            name,
            rates.get("Host-to-Device"),
            rates.get("Device-to-Host"),
            rates.get("Device-to-Device"),
        )
        for device, name, rates in gpus
    )
