"""Partitions: the sets of GPUs that Fabric Manager can join by NVLink for one VM.

Where VMs share the NVSwitches, or get vGPUs, Fabric Manager activates one of its partitions for
each. GPUs that are no partition of it have no NVLink between them. In the full passthrough model
other rules hold: on H100 and later boards a VM gets all eight GPUs and the NVSwitches, or one GPU.

Source: NVIDIA, Fabric Manager User Guide (2025), chapter GPU Partitions.
"""

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet


class Board(StrEnum):
    """A GPU baseboard with NVSwitches, by the table of partitions that it has."""

    HGX_A100 = "hgx-a100"  # DGX A100 too; one or two baseboards
    HGX_H100 = "hgx-h100"  # DGX H100; H200, H800 and H20 boards
    HGX_B200 = "hgx-b200"  # DGX B200; B300 boards


class FabricPartition(Struct, frozen=True):
    """One default partition."""

    id: int
    modules: frozenset[int]  # physical (module) ids of its GPUs, 1-based
    nvlinks: int  # links of each GPU that are up; 0 for a single GPU


def _partitions(
    first_id: int, nvlinks: int, modules: int, joined: str
) -> tuple[FabricPartition, ...]:
    """Sets of modules that are joined, each a list, then single modules, which have no links."""
    sets = [*joined.split(), *map(str, range(1, modules + 1))]
    return tuple(
        FabricPartition(
            first_id + position,
            frozenset(map(int, CpuSet.parse(text, "partition"))),
            nvlinks if position < len(joined.split()) else 0,
        )
        for position, text in enumerate(sets)
    )


PARTITIONS = {
    Board.HGX_A100: _partitions(
        0,
        12,
        16,
        "1-16 1-8 9-16 1-4,9-12 5-8,13-16 1-4,13-16 5-12 1-4 5-8 9-12 13-16 "
        "1-2 3-4 5-6 7-8 9-10 11-12 13-14 15-16",
    ),
    Board.HGX_H100: _partitions(0, 18, 8, "1-8 1-4 5-8 1,3 2,4 5,7 6,8"),
    Board.HGX_B200: _partitions(1, 18, 8, "1-8 1-4 5-8 1-2 3-4 5-6 7-8"),
}
"""The default partitions of each board."""

_BOARD_OF_NAME = (
    (re.compile(r"NVIDIA A[18]00-SXM"), Board.HGX_A100),
    (re.compile(r"NVIDIA (?:H[128]00|H20)\b(?!.*(?:PCIe|NVL))"), Board.HGX_H100),
    (re.compile(r"NVIDIA B[23]00\b"), Board.HGX_B200),
)


def board_of(names: Iterable[str | None]) -> Board | None:
    """The board of a host by its GPUs' names, as nvidia-smi prints them.

    None for GPUs on no NVSwitch board, such as PCIe cards, and for those of several kinds.

    >>> board_of(["NVIDIA H100 80GB HBM3"] * 8), board_of(["NVIDIA H100 PCIe"])
    (<Board.HGX_H100: 'hgx-h100'>, None)
    """
    boards = {
        next((board for pattern, board in _BOARD_OF_NAME if name and pattern.match(name)), None)
        for name in names
    }
    return boards.pop() if len(boards) == 1 else None


def partition_sizes(board: Board) -> tuple[int, ...]:
    """How many GPUs a partition of the board may have, ascending.

    >>> partition_sizes(Board.HGX_B200)
    (1, 2, 4, 8)
    """
    return tuple(sorted({len(partition.modules) for partition in PARTITIONS[board]}))


def partition_of(board: Board, modules: Iterable[int]) -> FabricPartition | None:
    """The partition that is exactly these GPUs, or None."""
    module_set = frozenset(modules)
    return next((row for row in PARTITIONS[board] if row.modules == module_set), None)


def partitions_of_size(
    board: Board, count: int, free: Mapping[Bdf, int]
) -> tuple[tuple[Bdf, ...], ...]:
    """The sets of `count` of these GPUs that are partitions, in the order of their ids.

    free: GPU -> its module. Each set ascending.
    """
    gpu_of = {module: bdf for bdf, module in free.items()}
    return tuple(
        tuple(sorted(gpu_of[module] for module in partition.modules))
        for partition in PARTITIONS[board]
        if len(partition.modules) == count and partition.modules <= gpu_of.keys()
    )
