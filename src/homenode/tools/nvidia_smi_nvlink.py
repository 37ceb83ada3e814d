"""nvidia-smi nvlink -s: the NVLinks of each GPU and their speeds.

    GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5e8d2f10-...)
             Link 0: 26.562 GB/s
             Link 1: <inactive>

Seen of drivers 450 to 580. Source: man nvidia-smi, "nvlink".
"""

import re
from dataclasses import dataclass

from homenode.errors import ParseError

COMMAND = ("nvidia-smi", "nvlink", "-s")

_SOURCE = "nvidia-smi nvlink -s"
_GPU = re.compile(r"GPU (\d{1,4}): (.+?) \(UUID: (\S+)\)\s*", re.ASCII)
_LINK = re.compile(r"\s*Link (\d{1,4}): (?:(\d{1,6})(?:\.(\d{1,6}))? GB/s|<inactive>)\s*", re.ASCII)
_NONE_ACTIVE = "all links are inactive"


@dataclass(frozen=True, slots=True)
class NvLink:
    """One link: its number on the GPU and its speed in one direction; None where inactive."""

    number: int
    bytes_per_s: int | None


@dataclass(frozen=True, slots=True)
class NvlinkGpu:
    """One GPU, by the tool's index (not its BDF: match it by UUID). links is empty where it has
    none, or where the driver says that none is active."""

    index: int
    name: str
    uuid: str
    links: tuple[NvLink, ...]


def parse(text: str) -> tuple[NvlinkGpu, ...]:
    """GPUs in the tool's order; empty where the text is. Raises ParseError."""
    gpus: list[tuple[int, str, str]] = []
    links: list[list[NvLink]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        gpu = _GPU.fullmatch(line)
        link = _LINK.fullmatch(line)
        if gpu is not None:
            index = int(gpu[1])
            if any(index == known for known, _, _ in gpus):
                raise ParseError(_SOURCE, "each GPU once", line, line=number)
            gpus.append((index, gpu[2], gpu[3]))
            links.append([])
        elif link is not None and gpus:
            if any(int(link[1]) == known.number for known in links[-1]):
                raise ParseError(_SOURCE, "each link of a GPU once", line, line=number)
            links[-1].append(NvLink(int(link[1]), _bytes_per_s(link)))
        # "NVML: Unable to retrieve NVLink information as all links are inActive"
        elif _NONE_ACTIVE not in line.lower():
            raise ParseError(_SOURCE, "GPU 0: NAME (UUID: ...) or Link 0: ...", line, line=number)
    return tuple(
        NvlinkGpu(index, name, uuid, tuple(of_gpu))
        for (index, name, uuid), of_gpu in zip(gpus, links, strict=True)
    )


def _bytes_per_s(link: "re.Match[str]") -> int | None:
    if link[2] is None:
        return None
    return int(link[2] + (link[3] or "").ljust(6, "0")) * 1000
