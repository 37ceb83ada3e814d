"""Collective mechanisms: what may cost all-reduces bandwidth, and in which cells each would.

A mechanism predicts of a cell that it is slower, that it is not, or nothing: then any bandwidth
between the two agrees with it. What was recorded of a cell counts: automatic NUMA balancing that is
off slows nothing. Source of what NCCL does in each guest: its own code (homenode nccl-topo).
"""

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from functools import partial
from itertools import combinations

from msgspec import Struct

from homenode.decide.collective_cells import SettingCell


class Cause(StrEnum):
    """What the experiment shows."""

    NO_LOSS = "guest cells cost nothing here"
    PLACEMENT = "threads and buffers without a place: NCCL knows no node for the GPUs"
    UNKNOWN_NODES = "threads unbound and rings in any order, in flat guests too: NCCL sees no nodes"
    TOPOLOGY = "the PCIe tree as the guest shows it: only the topology file gives NCCL the true one"
    PORT_SPEED = "the speed that virtual switches and ports report"
    CHANNELS = "fewer channels: NCCL models the link between nodes"
    SCRIPT_BINDING = "the binding to the first node"
    PEERS = "copies through host memory: P2P is off"
    GUEST_CELLS = "the guest's cells, whatever NCCL knows of the GPUs' places"
    FLOATING = "vCPUs without pins"
    VIRTUAL_MACHINE = "the virtual machine itself"
    GUEST_BALANCING = "automatic NUMA balancing in the guest"
    HOST_BALANCING = "automatic NUMA balancing on the host"
    INTERRUPTS = "the GPUs' interrupts on one node of the guest"
    RECLAIM = "too little memory: the kernel reclaims while NCCL runs"
    CANNOT_TELL = "cannot tell"


class Prediction(StrEnum):
    """Of a cell."""

    SLOWER = "slower"
    NOT = "not slower"
    EITHER = "either"


_Predict = Callable[[SettingCell], Prediction | bool]


class Mechanism(Struct, frozen=True, kw_only=True):
    """predict: of a cell. slower: where, in words. agrees: whether NCCL's log, or what else was
    recorded of a cell, agrees; None where there is none: the mechanism is not named then. off: what
    rules it out, where no cell of the experiment does."""

    cause: Cause
    predict: _Predict
    slower: str
    agrees: Callable[[SettingCell], bool | None] = lambda cell: True
    off: str | None = None

    def predicts(self, cell: SettingCell) -> Prediction:
        found = self.predict(cell)
        if isinstance(found, bool):
            return Prediction.SLOWER if found else Prediction.NOT
        return found


def _knows(cell: SettingCell) -> bool:
    return cell.settings.file or cell.shows_places


def _placement(cell: SettingCell) -> Prediction | bool:
    """With one node for everything, P2P, or buffers at CUDA's HOST_NUMA_ID it may or may not."""
    settings = cell.settings
    if not cell.is_guest or not cell.has_cells:
        return False
    if settings.first_node or settings.peers or (settings.file and settings.several):
        return Prediction.EITHER
    return not _knows(cell)


def _placement_log(cell: SettingCell) -> bool | None:
    """NCCL binds no thread where it knows no node, and does where it knows one."""
    if not (cell.is_guest and cell.has_cells) or cell.settings.first_node:
        return True
    return None if cell.bound is None else cell.bound == _knows(cell)


def _unknown_nodes(cell: SettingCell) -> Prediction | bool:
    if cell.is_guest and cell.settings.first_node:
        return Prediction.EITHER
    return cell.is_guest and not _knows(cell)


def _unknown_nodes_log(cell: SettingCell) -> bool | None:
    if cell.is_guest and not _knows(cell) and not cell.settings.first_node:
        return None if cell.bound is None else not cell.bound
    return True


def _channels(cell: SettingCell) -> Prediction | bool:
    if cell.fewer_channels is False:
        return False
    return _knows(cell) if cell.is_guest else Prediction.EITHER


def _balancing(cell: SettingCell) -> Prediction | bool:
    """Bound threads and memory are not moved; whether binding cures all of it is not known."""
    if cell.balancing is False or not cell.has_cells or cell.settings.first_node:
        return False
    return Prediction.EITHER if _knows(cell) else True


def _host_balancing(cell: SettingCell) -> Prediction | bool:
    """The kernel leaves memory alone that is bound. Source: Linux, task_numa_work."""
    is_on = cell.host_balancing is not False
    return is_on and cell.is_guest and not cell.is_bound_per_cell


def _interrupts(cell: SettingCell) -> Prediction | bool:
    """A file moves no interrupt, but threads; expander buses give interrupts a node."""
    if not cell.has_cells or cell.one_interrupt_node is False:
        return False
    if not cell.is_guest or _knows(cell) or cell.settings.first_node:
        return Prediction.EITHER
    return True


MECHANISMS = (
    Mechanism(
        cause=Cause.PLACEMENT,
        predict=_placement,
        slower="guests with cells, where neither file nor expander buses give the GPUs a node",
        agrees=_placement_log,
    ),
    Mechanism(
        cause=Cause.UNKNOWN_NODES,
        predict=_unknown_nodes,
        slower="all guests, where neither file nor expander buses give the GPUs a node",
        agrees=_unknown_nodes_log,
    ),
    Mechanism(
        cause=Cause.TOPOLOGY,
        predict=lambda cell: cell.is_guest and not cell.settings.file,
        slower="all guests without the file, with expander buses too",
    ),
    Mechanism(
        cause=Cause.PORT_SPEED,
        predict=lambda cell: cell.is_guest and cell.shows_places and not cell.settings.file,
        slower="guests with expander buses, without the file",
    ),
    Mechanism(
        cause=Cause.CHANNELS,
        predict=_channels,
        slower="guests whose nodes NCCL knows, by the file or by expander buses",
        agrees=lambda cell: None if cell.fewer_channels is None else True,
    ),
    Mechanism(
        cause=Cause.SCRIPT_BINDING,
        predict=lambda cell: cell.settings.first_node,
        slower="everything that is bound to the first node",
    ),
    Mechanism(
        cause=Cause.GUEST_CELLS,
        predict=lambda cell: cell.is_guest and cell.has_cells,
        slower="all guests with cells, in each setting",
    ),
    Mechanism(
        cause=Cause.FLOATING,
        predict=lambda cell: not cell.is_pinned,
        slower="guests without pins, in each setting",
    ),
    Mechanism(
        cause=Cause.VIRTUAL_MACHINE,
        predict=lambda cell: cell.is_guest,
        slower="all guests, against the host itself",
    ),
    Mechanism(
        cause=Cause.GUEST_BALANCING,
        predict=_balancing,
        slower="guests with cells where threads are not bound and kernel.numa_balancing is on",
        agrees=lambda cell: cell.balancing is not None or not cell.has_cells,
        off="sysctl -w kernel.numa_balancing=0 (in the guest)",
    ),
    Mechanism(
        cause=Cause.HOST_BALANCING,
        predict=_host_balancing,
        slower="guests whose memory is not bound, where the host's kernel.numa_balancing is on",
        agrees=lambda cell: cell.host_balancing is not None or not cell.is_guest,
        off="sysctl -w kernel.numa_balancing=0 (on the host)",
    ),
    Mechanism(
        cause=Cause.INTERRUPTS,
        predict=_interrupts,
        slower="guests with cells, where one node handles all interrupts of the GPUs",
        agrees=lambda cell: cell.one_interrupt_node is not None or not cell.has_cells,
        off="systemctl start irqbalance (in the guest)",
    ),
    Mechanism(
        cause=Cause.RECLAIM,
        predict=lambda cell: cell.is_bound_per_cell and cell.reclaimed is not False,
        slower="guests with memory bound per cell, where the kernel reclaimed memory",
        agrees=lambda cell: cell.reclaimed is not None,
        off="free memory on the VM's nodes (homenode doctor), or give the VM less",
    ),
)

_FACTORS: dict[str, Callable[[SettingCell], bool]] = {
    "guests": lambda cell: cell.is_guest,
    "guests with cells": lambda cell: cell.is_guest and cell.has_cells,
    "guests with places": lambda cell: cell.is_guest and cell.shows_places,
    "guests with pins": lambda cell: cell.is_guest and cell.is_pinned,
    "the file": lambda cell: cell.settings.file,
    "a process for each GPU": lambda cell: cell.settings.several,
    "P2P": lambda cell: cell.settings.peers,
    "ring": lambda cell: cell.settings.ring,
    "the first node": lambda cell: cell.settings.first_node,
}


def unknown_mechanisms(most: int) -> Iterator[Callable[[SettingCell], bool]]:
    """Where something that has no name here might make slower: levels of the factors, up to so many
    at once."""
    levels = [(has, wanted) for has in _FACTORS.values() for wanted in (True, False)]
    for count in range(1, most + 1):
        for chosen in combinations(levels, count):
            if len({has for has, _ in chosen}) == count:
                yield partial(_has_all, chosen)


def _has_all(
    levels: Sequence[tuple[Callable[[SettingCell], bool], bool]], cell: SettingCell
) -> bool:
    return all(has(cell) is wanted for has, wanted in levels)
