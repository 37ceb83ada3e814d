"""Fabric: whether a guest's GPUs are a set that Fabric Manager can join by NVLink."""

from collections.abc import Iterable, Iterator, Mapping

from homenode.bdf import Bdf
from homenode.catalogue import finding
from homenode.findings import Finding
from homenode.machine.tools.nvidia_smi import NvidiaQuery
from homenode.machine.topology import Host
from homenode.plan.devices.fabric import board_of_host, modules_of_host
from homenode.plan.devices.partitions import (
    Board,
    board_of,
    partition_of,
    partitions_of_size,
)

_MOST_SHOWN = 4


def check_fabric(gpus: Iterable[Bdf], query: NvidiaQuery, source: str) -> Iterator[Finding]:
    """A finding where the GPUs are no partition; one where it is unknown.

    gpus: the guest's. query: nvidia-smi -q -x of the host, which knows their modules. Boards
    without NVSwitches have no partitions, and no finding.
    """
    wanted = tuple(sorted(gpus))
    board = board_of(gpu.name for gpu in query.gpus)
    if board is None or not wanted:
        return
    modules = {gpu.bdf: gpu.module_id for gpu in query.gpus}
    known = {bdf: module for bdf, module in modules.items() if module is not None}
    missing = [bdf for bdf in wanted if bdf not in known]
    if missing:
        yield finding(
            "nccl-partition-unknown",
            _named(missing),
            expected="a module id in nvidia-smi -q -x",
            observed="none",
            source=source,
        )
        return
    yield from _odd(wanted, board, known, source)


def check_fabric_of_host(gpus: Iterable[Bdf], host: Host) -> Iterator[Finding]:
    """The same from a host whose source gives the modules; nothing where it did not."""
    wanted = tuple(sorted(gpus))
    board, known = board_of_host(host), modules_of_host(host)
    if board is not None and wanted and all(bdf in known for bdf in wanted):
        yield from _odd(wanted, board, known, host.name)


def _odd(
    wanted: tuple[Bdf, ...], board: Board, known: Mapping[Bdf, int], source: str
) -> Iterator[Finding]:
    if partition_of(board, (known[bdf] for bdf in wanted)) is not None:
        return
    allowed = partitions_of_size(board, len(wanted), known)
    shown = "; ".join(_named(one) for one in allowed[:_MOST_SHOWN])
    stated = ",".join(str(known[bdf]) for bdf in wanted)
    yield finding(
        "nccl-no-partition",
        _named(wanted),
        expected=f"a set of {len(wanted)} GPUs that is a partition of {board}"
        + (f": {shown}" if shown else ", which has none of that size"),
        observed=f"modules {stated}, which are none",
        source=source,
    )


def _named(gpus: Iterable[Bdf]) -> str:
    return ", ".join(map(str, gpus))
