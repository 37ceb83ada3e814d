"""Fabric: the GPUs of an NVSwitch board that may go to one VM together.

If VMs share the NVSwitches, or get vGPUs, Fabric Manager activates one partition for each VM. GPUs
that are not a partition have no NVLink to each other. In the full passthrough model other rules
hold: on H100 and later boards a VM gets all eight GPUs and the NVSwitches, or one GPU. If the
host's source lacks the GPUs' module ids, only the number of GPUs is checked.

Source: NVIDIA, Fabric Manager User Guide (2025), chapter GPU Partitions.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.findings import Finding, Gap, finding
from homenode.machine.pci import NVIDIA, DeviceKind, PciDevice
from homenode.machine.topology import Host
from homenode.plan.allocations import Allocations
from homenode.text import plural


class Board(StrEnum):
    """A GPU baseboard with NVSwitches, by its table of partitions."""

    HGX_A100 = "hgx-a100"  # DGX A100 too; one or two baseboards
    HGX_H100 = "hgx-h100"  # DGX H100; H200, H800 and H20 boards
    HGX_B200 = "hgx-b200"  # DGX B200; B300 boards


def _list_partitions(modules: int, joined_text: str) -> tuple[frozenset[int], ...]:
    """Return the sets of joined modules, then single modules."""
    sets = [*joined_text.split(), *map(str, range(1, modules + 1))]
    return tuple(frozenset(map(int, CpuSet.parse(text, "partition"))) for text in sets)


PARTITIONS = {
    Board.HGX_A100: _list_partitions(
        16,
        "1-16 1-8 9-16 1-4,9-12 5-8,13-16 1-4,13-16 5-12 1-4 5-8 9-12 13-16 "
        "1-2 3-4 5-6 7-8 9-10 11-12 13-14 15-16",
    ),
    Board.HGX_H100: _list_partitions(8, "1-8 1-4 5-8 1,3 2,4 5,7 6,8"),
    Board.HGX_B200: _list_partitions(8, "1-8 1-4 5-8 1-2 3-4 5-6 7-8"),
}
"""The default partitions of each board, by id: physical (module) ids of GPUs, 1-based."""

_BOARD_OF_NAME = (
    (re.compile(r"NVIDIA A[18]00-SXM"), Board.HGX_A100),
    (re.compile(r"NVIDIA (?:H[128]00|H20)\b(?!.*(?:PCIe|NVL))"), Board.HGX_H100),
    (re.compile(r"NVIDIA B[23]00\b"), Board.HGX_B200),
)


def find_board(names: Iterable[str | None]) -> Board | None:
    """Return the board of a host by its GPUs' names, as nvidia-smi prints them.

    None for GPUs without an NVSwitch board, such as PCIe cards, and for mixed models.

    >>> find_board(["NVIDIA H100 80GB HBM3"] * 8), find_board(["NVIDIA H100 PCIe"])
    (<Board.HGX_H100: 'hgx-h100'>, None)
    """
    boards = {
        next((board for pattern, board in _BOARD_OF_NAME if name and pattern.match(name)), None)
        for name in names
    }
    return boards.pop() if len(boards) == 1 else None


def partition_sizes(board: Board) -> tuple[int, ...]:
    """Return the sizes of the board's partitions in GPUs, ascending.

    >>> partition_sizes(Board.HGX_B200)
    (1, 2, 4, 8)
    """
    return tuple(sorted({len(partition) for partition in PARTITIONS[board]}))


def is_partition(board: Board, modules: Iterable[int]) -> bool:
    """Return whether exactly these GPUs are a partition."""
    return frozenset(modules) in PARTITIONS[board]


def partitions_of_size(
    board: Board, count: int, free: Mapping[Bdf, int]
) -> tuple[tuple[Bdf, ...], ...]:
    """Return the partitions of `count` of these GPUs, in the order of their ids. free: the module
    id of each GPU. Each set ascending."""
    gpu_of = {module: bdf for bdf, module in free.items()}
    return tuple(
        tuple(sorted(gpu_of[module] for module in partition))
        for partition in PARTITIONS[board]
        if len(partition) == count and partition <= gpu_of.keys()
    )


_MAX_SHOWN = 4
_MAX_WITHOUT_SWITCHES = 4
_BOARD_OF_ID = {
    **dict.fromkeys((0x20B0, 0x20B2, 0x20F3), Board.HGX_A100),
    **dict.fromkeys((0x2324, 0x2330, 0x2335, 0x2336), Board.HGX_H100),
    **dict.fromkeys((0x2901, 0x3182), Board.HGX_B200),
}
"""SXM modules that the driver does not name, as with vfio-pci.

Source: pci.ids; NVIDIA, Optimizing VM Configuration for AI Inference (H200).
"""


class Fabric(Struct, frozen=True):
    """The NVSwitch fabric of a host's GPUs."""

    board: Board
    gpus: int  # number of GPUs
    module_of_gpu: Mapping[Bdf, int]  # known module ids, by function

    def no_partition(self, gpus: Sequence[PciDevice]) -> Finding | None:
        """Return a warning if these GPUs are known not to be a partition."""
        bdfs = _list_physical_functions(gpus)
        if len(bdfs) < 2 or (
            any(bdf not in self.module_of_gpu for bdf in bdfs) and len(bdfs) in self.list_sizes()
        ):
            return None
        if len(bdfs) not in self.list_sizes():
            return self._make_finding(f"{plural(len(bdfs), 'GPU')} ({_format_bdfs(bdfs)})", ())
        modules = [self.module_of_gpu[bdf] for bdf in bdfs]
        if is_partition(self.board, modules):
            return None
        module_list = ",".join(map(str, modules))
        return self._make_finding(
            f"{_format_bdfs(bdfs)} (modules {module_list})", self._list_by_size(len(bdfs))
        )

    def partitions(
        self,
        named_devices: Sequence[PciDevice],
        free: Sequence[PciDevice],
        count: int,
        allocations: Allocations,
    ) -> tuple[tuple[tuple[Bdf, ...], ...] | None, Finding | None]:
        """Return the sets of `count` free GPUs that form a partition with the named GPUs.

        None if any GPUs are allowed: for a single GPU, for parts, of which several may be of one
        GPU, if too few module ids are known, and, with a warning, if no such partition is free.
        """
        if any(gpu.physical_function is not None for gpu in free):
            return None, None
        owned_bdfs = set(_list_physical_functions(named_devices))
        total = count + len(owned_bdfs)
        if total not in self.list_sizes():
            return None, self._make_finding(plural(total, "GPU"), ())
        candidates = {gpu.bdf for gpu in free} | owned_bdfs
        if total == 1:
            return None, None
        modules = {b: self.module_of_gpu[b] for b in candidates if b in self.module_of_gpu}
        sets = tuple(
            tuple(bdf for bdf in partition if bdf not in owned_bdfs)
            for partition in partitions_of_size(self.board, total, modules)
            if owned_bdfs <= set(partition)
        )
        if sets:
            return sets, None
        if len(modules) < len(candidates):
            return None, None
        busy = [
            f"{bdf} by {allocations.label(domain)}"
            for bdf in sorted(self.module_of_gpu)
            if (domain := allocations.find_holder(bdf)) is not None
        ]
        detail = f"no free partition of {plural(total, 'GPU')}" + (
            f"; in use: {', '.join(busy)}" if busy else ""
        )
        return None, self._make_finding(detail, self._list_by_size(total))

    def all_partitions(self) -> list[tuple[Bdf, ...]]:
        """Return the GPUs of each default partition of two or more whose module ids are known."""
        sizes = [size for size in self.list_sizes() if size > 1]
        return [partition for size in sizes for partition in self._list_by_size(size)]

    def _list_by_size(self, size: int) -> tuple[tuple[Bdf, ...], ...]:
        return partitions_of_size(self.board, size, self.module_of_gpu)

    def unknown_partition(self, gpus: Sequence[PciDevice]) -> tuple[Gap, ...]:
        """Return a gap if these GPUs may be a partition or not; one GPU and a board are."""
        bdfs = _list_physical_functions(gpus)
        if len(bdfs) in (1, self.gpus) or len(bdfs) not in self.list_sizes():
            return ()
        if all(bdf in self.module_of_gpu for bdf in bdfs):
            return ()
        return (
            Gap(
                f"whether a Fabric Manager can join the {len(bdfs)} GPUs",
                "nvidia-smi -q -x shows no module ids",
            ),
        )

    def list_sizes(self) -> tuple[int, ...]:
        return partition_sizes(self.board)

    def _make_finding(self, observed: str, partitions: Sequence[tuple[Bdf, ...]]) -> Finding:
        sizes = ", ".join(map(str, self.list_sizes()))
        expected = "; ".join(_format_bdfs(bdfs) for bdfs in partitions[:_MAX_SHOWN])
        if len(partitions) > _MAX_SHOWN:
            expected += f"; and {len(partitions) - _MAX_SHOWN} more"
        return finding(
            "no-nvlink-partition",
            str(self.board),
            f"a partition of the NVSwitch fabric ({expected or f'{sizes} GPUs'})",
            f"{observed}: the GPUs have no NVLink to each other if Fabric Manager "
            "partitions the board",
            case="other sets" if partitions else None,
            values={"sizes": sizes},
        )


def find_fabric(host: Host) -> Fabric | None:
    """Return the host's fabric; None for boards without NVSwitches."""
    board = read_board(host)
    if board is None:
        return None
    return Fabric(board, len(host.whole_gpus), map_modules(host))


def map_modules(host: Host) -> dict[Bdf, int]:
    """Return the known module ids of the host's GPUs."""
    gpus = host.whole_gpus
    modules = {gpu.bdf: gpu.module_id for gpu in gpus if gpu.module_id is not None}
    # Two boards use the same numbers, so module ids are ambiguous.
    return modules if len(set(modules.values())) == len(modules) else {}


def read_board(host: Host) -> Board | None:
    """Return the NVSwitch board that the host's GPUs are on, or None."""
    gpus = host.whole_gpus
    if not may_have_nvswitches(host):
        return None
    boards = {_BOARD_OF_ID.get(gpu.device_id or 0) for gpu in gpus if gpu.vendor_id == NVIDIA}
    return find_board(gpu.name for gpu in gpus) or (boards.pop() if len(boards) == 1 else None)


def may_have_nvswitches(host: Host) -> bool:
    """Return whether NVSwitches may be on the PCI bus: not for four GPUs or B200."""
    many = len(host.whole_gpus) > _MAX_WITHOUT_SWITCHES
    return many or bool(host.devices_of_kind(DeviceKind.NVSWITCH))


def _list_physical_functions(gpus: Sequence[PciDevice]) -> tuple[Bdf, ...]:
    return tuple(sorted({gpu.physical_function or gpu.bdf for gpu in gpus}))


def _format_bdfs(gpus: Collection[Bdf]) -> str:
    return ", ".join(map(str, sorted(gpus)))
