"""Fabric: which of a host's GPUs may go to one VM together, where NVSwitches join them.

Fabric Manager joins the GPUs of a VM by one of its partitions or not at all. Where the host's
source does not tell the GPUs' modules, only the number of GPUs can be judged.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from homenode.bdf import Bdf
from homenode.discover.device_kinds import NVIDIA
from homenode.gap import Gap
from homenode.pci import DeviceKind, PciDevice
from homenode.plan.model import Rejection, Unplannable
from homenode.plan.request import GuestRequest
from homenode.plan.search.partitions import (
    Board,
    board_of,
    partition_of,
    partition_sizes,
    partitions_of_size,
)
from homenode.plan.search.taken import Taken
from homenode.topology import Host

CONSTRAINT = "fabric-partition"
_MOST_SHOWN = 4
_MOST_WITHOUT_SWITCHES = 4
_BOARD_OF_ID = {
    **dict.fromkeys((0x20B0, 0x20B2, 0x20F3), Board.HGX_A100),
    **dict.fromkeys((0x2324, 0x2330, 0x2335, 0x2336), Board.HGX_H100),
    **dict.fromkeys((0x2901, 0x3182), Board.HGX_B200),
}
"""SXM modules that the driver does not name, as those of vfio-pci.

Source: pci.ids; NVIDIA, Optimizing VM Configuration for AI Inference (H200).
"""

_ANY_SET = "let the GPUs do without NVLink: --without-nvlink"


@dataclass(frozen=True, slots=True)
class Fabric:
    """NVSwitches that join a host's GPUs. gpus: how many there are. module_of_gpu: the modules that
    are known, by function."""

    host_name: str
    board: Board
    gpus: int
    module_of_gpu: Mapping[Bdf, int]

    def refuse_odd(self, gpus: Sequence[PciDevice]) -> tuple[Gap, ...]:
        """Raises Unplannable where these GPUs are no partition; a gap where it cannot be told."""
        wanted = tuple(sorted({gpu.physical_function or gpu.bdf for gpu in gpus}))
        if len(wanted) < 2:
            return ()
        if any(bdf not in self.module_of_gpu for bdf in wanted):
            return self.gap(wanted)
        if len(wanted) not in self.sizes():
            raise self._refusal(f"{len(wanted)} GPUs ({_named(wanted)})", ())
        modules = [self.module_of_gpu[bdf] for bdf in wanted]
        if partition_of(self.board, modules) is None:
            allowed = partitions_of_size(self.board, len(wanted), self.module_of_gpu)
            told = ",".join(map(str, modules))
            raise self._refusal(f"{_named(wanted)} (modules {told})", allowed)
        return ()

    def sets(
        self, named: Sequence[PciDevice], free: Sequence[PciDevice], count: int, taken: Taken
    ) -> dict[tuple[Bdf, ...], int] | None:
        """Sets of `count` free GPUs that are a partition with the named ones, and how many larger
        partitions that are free now each of them breaks.

        None where any GPUs will do as far as is known: for a single one, and where too few modules
        are known. Raises Unplannable where no partition is free.
        """
        held = {gpu.physical_function or gpu.bdf for gpu in named}
        total = count + len(held)
        if total not in self.sizes():
            raise self._refusal(f"a wish for {total} GPUs", ())
        candidates = {gpu.bdf for gpu in free} | held
        if total == 1:
            return None
        modules = {b: self.module_of_gpu[b] for b in candidates if b in self.module_of_gpu}
        found = {
            tuple(bdf for bdf in one if bdf not in held): self._broken(one, modules)
            for one in partitions_of_size(self.board, total, modules)
            if held <= set(one)
        }
        if not found and len(modules) < len(candidates):
            return None
        if not found:
            busy = [
                f"{bdf} by {domain!r}"
                for bdf in sorted(self.module_of_gpu)
                if (domain := taken.holder(bdf)) is not None
            ]
            detail = f"none free of the partitions of {total} GPUs" + (
                f"; held: {', '.join(busy)}" if busy else ""
            )
            allowed = partitions_of_size(self.board, total, self.module_of_gpu)
            raise self._refusal(detail, allowed)
        return found

    def _broken(self, gpus: Sequence[Bdf], modules: Mapping[Bdf, int]) -> int:
        larger = (
            whole
            for size in self.sizes()
            if size > len(gpus)
            for whole in partitions_of_size(self.board, size, modules)
        )
        return sum(not set(gpus).isdisjoint(whole) for whole in larger)

    def gap(self, gpus: Sequence[Bdf]) -> tuple[Gap, ...]:
        """A gap where it cannot be told whether these GPUs are a partition; one GPU is, and so are
        all of a board."""
        unknown = [bdf for bdf in gpus if bdf not in self.module_of_gpu]
        if not unknown or len(gpus) == 1 or len(gpus) == self.gpus in self.sizes():
            return ()
        return (self._gap(unknown),)

    def sizes(self) -> tuple[int, ...]:
        return partition_sizes(self.board)

    def _gap(self, unknown: Sequence[Bdf]) -> Gap:
        return Gap(
            f"NVLink partition of {_named(unknown)}",
            "nvidia-smi -q -x of the host tells no module id, as for GPUs that are bound to "
            "vfio-pci; whether Fabric Manager can join the GPUs was not checked",
        )

    def _refusal(self, found: str, allowed: Sequence[tuple[Bdf, ...]]) -> Unplannable:
        sizes = ", ".join(map(str, self.sizes()))
        expected = "; ".join(_named(one) for one in allowed[:_MOST_SHOWN])
        if len(allowed) > _MOST_SHOWN:
            expected += f"; and {len(allowed) - _MOST_SHOWN} more"
        detail = (
            f"expected a partition of {self.board}: {expected or f'{sizes} GPUs'}; found {found}"
        )
        hint = (
            f"choose one of these sets, or {_ANY_SET}"
            if allowed
            else f"take one of {sizes} GPUs, or {_ANY_SET}"
        )
        return Unplannable(
            f"no placement on host {self.host_name!r}: {detail}",
            (Rejection(CONSTRAINT, (), detail, hint),),
            hint=hint,
        )


def fabric_of(host: Host, request: GuestRequest) -> Fabric | None:
    """The host's; None for boards without NVSwitches, and where the VM's GPUs need no NVLink."""
    board = board_of_host(host)
    if board is None or request.without_nvlink:
        return None
    return Fabric(host.name, board, len(_whole_gpus(host)), modules_of_host(host))


def modules_of_host(host: Host) -> dict[Bdf, int]:
    """The modules of the host's GPUs, as far as its source tells them."""
    gpus = _whole_gpus(host)
    modules = {gpu.bdf: gpu.module_id for gpu in gpus if gpu.module_id is not None}
    # Two boards that number alike: a module says nothing.
    return modules if len(set(modules.values())) == len(modules) else {}


def board_of_host(host: Host) -> Board | None:
    """The board with NVSwitches that the host's GPUs are on; None where they are on none."""
    gpus = _whole_gpus(host)
    if not may_have_nvswitches(host):
        return None
    boards = {_BOARD_OF_ID.get(gpu.device_id or 0) for gpu in gpus if gpu.vendor_id == NVIDIA}
    return board_of(gpu.name for gpu in gpus) or (boards.pop() if len(boards) == 1 else None)


def may_have_nvswitches(host: Host) -> bool:
    """Boards of four GPUs join them without NVSwitches; those of B200 show none on the bus."""
    many = len(_whole_gpus(host)) > _MOST_WITHOUT_SWITCHES
    return many or bool(host.devices_of_kind(DeviceKind.NVSWITCH))


def _whole_gpus(host: Host) -> list[PciDevice]:
    return [g for g in host.devices_of_kind(DeviceKind.GPU) if g.physical_function is None]


def _named(gpus: Collection[Bdf]) -> str:
    return ", ".join(map(str, sorted(gpus)))
