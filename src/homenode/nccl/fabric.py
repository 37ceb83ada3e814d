"""Fabric: whether a guest's GPUs are a set that Fabric Manager can join by NVLink."""

from collections.abc import Iterable, Iterator

from homenode.bdf import Bdf
from homenode.findings import Finding, Severity
from homenode.plan.search.partitions import board_of, partition_of, partitions_of_size
from homenode.tools.nvidia_smi_query import NvidiaQuery

_MOST_SHOWN = 4


def check_fabric(gpus: Iterable[Bdf], query: NvidiaQuery, source: str) -> Iterator[Finding]:
    """A finding where the GPUs are no partition; one where it cannot be told.

    gpus: the guest's. query: nvidia-smi -q -x of the host, which knows their modules. Boards
    without NVSwitches have no partitions, and no finding: those of four GPUs, and cards.
    """
    wanted = tuple(sorted(gpus))
    board = board_of(gpu.name for gpu in query.gpus)
    if board is None or not wanted:
        return
    modules = {gpu.bdf: gpu.module_id for gpu in query.gpus}
    known = {bdf: module for bdf, module in modules.items() if module is not None}
    missing = [bdf for bdf in wanted if bdf not in known]
    if missing:
        yield Finding(
            "nccl-partition-unknown", Severity.INCONCLUSIVE, _named(missing),
            "a module id in nvidia-smi -q -x", "none", None,
            "take it on the host before its GPUs are bound to vfio-pci", source,
        )  # fmt: skip
        return
    if partition_of(board, (known[bdf] for bdf in wanted)) is not None:
        return
    allowed = partitions_of_size(board, len(wanted), known)
    shown = "; ".join(_named(one) for one in allowed[:_MOST_SHOWN])
    told = ",".join(str(known[bdf]) for bdf in wanted)
    yield Finding(
        "nccl-no-partition", Severity.WARNING, _named(wanted),
        f"a set of {len(wanted)} GPUs that is a partition of {board}"
        + (f": {shown}" if shown else ", which has none of that size"),
        f"modules {told}, which are none",
        "where VMs share NVSwitches there is no NVLink between them",
        "choose one of these sets, or give the VM all GPUs and NVSwitches", source,
    )  # fmt: skip


def _named(gpus: Iterable[Bdf]) -> str:
    return ", ".join(map(str, gpus))
