"""AMD figures: samples of rocm-bandwidth-test and TransferBench.

Both measure from every node at once: what they call a CPU is a node. rocm-bandwidth-test numbers
CPUs first, in the kernel's order of nodes; where it shows several, the n-th is mistaken for node n.
"""

from collections.abc import Iterator
from typing import Any

from msgspec import structs

from homenode.bdf import Bdf
from homenode.gap import Gap
from homenode.measure.figures.sample import Figures, sample
from homenode.results.model import Condition, Sample
from homenode.tools.rocm_bandwidth_test import RocmBandwidthTest
from homenode.tools.transferbench import TransferBench, TransferCell

_BOTH = "both ways together"
"""Of rocm-bandwidth-test: it adds the ways up, where all others give the rate of one."""


def of_rocm(run: RocmBandwidthTest, gpus: tuple[Bdf, ...] = ()) -> Figures:
    """Cells between host and GPUs and between GPUs, one way; the last size of each pair.

    Which devices are GPUs is known by their addresses, or by what a pair says. The tool prints no
    PCI domain: it is that of the one of `gpus` with the same bus, if there is one.
    """
    gpu_of = {
        device.index: structs.replace(device, address=_in_domain(device.address, gpus))
        for device in run.devices
        if device.address is not None
    }
    several = sum(device.address is None for device in run.devices) > 1
    samples: list[Sample] = []
    gaps = list(run.gaps)
    for matrix in run.matrices:
        suffix = _BOTH if matrix.is_bidirectional else None
        for row, source in enumerate(matrix.devices):
            for column, destination in enumerate(matrix.devices):
                value = matrix.cells[row][column]
                if value is not None:
                    samples += _rocm_cell(source, destination, value, suffix, gpu_of, several)
    if several:
        gaps.append(Gap("nodes", "CPU n of rocm-bandwidth-test was mistaken for node n"))
    if run.matrices and not gpu_of:
        gaps.append(Gap("rocm-bandwidth-test devices", "no GPU addresses: nothing of it is kept"))
    last = {(c.is_bidirectional, c.source, c.destination): c for c in run.copies}
    for copy in last.values():
        metric = _metric(
            copy.source_is_cpu, copy.destination_is_cpu, copy.source == copy.destination
        )
        if metric is not None:
            variant = _BOTH if copy.is_bidirectional else None
            index = copy.destination if copy.source_is_cpu else copy.source
            samples.append(
                sample(metric, "bytes_per_s", copy.peak_bytes_per_s, index=index, variant=variant)
            )
    conditions = (Condition("tool rocm-bandwidth-test", run.version or "unknown"),)
    names = tuple(dict.fromkeys(device.name for device in gpu_of.values()))
    return Figures(tuple(samples), conditions, names, tuple(gaps))


def _in_domain(printed: Bdf, gpus: tuple[Bdf, ...]) -> Bdf:
    where = (printed.bus, printed.device, printed.function)
    same = [one for one in gpus if (one.bus, one.device, one.function) == where]
    return same[0] if len(same) == 1 else printed


def _rocm_cell(
    source: int,
    destination: int,
    value: float,
    variant: str | None,
    gpu_of: dict[int, Any],
    several: bool,
) -> Iterator[Sample]:
    metric = _metric(source not in gpu_of, destination not in gpu_of, source == destination)
    if metric is None or not gpu_of:
        return
    first = gpu_of.get(source) or gpu_of[destination]
    peer = gpu_of[destination].address if metric == "p2p-bandwidth" else None
    host = source if source not in gpu_of else destination
    node = host if several and metric in ("h2d-bandwidth", "d2h-bandwidth") else None
    yield sample(
        metric, "bytes_per_s", value, device=first.address, peer=peer, variant=variant, node=node
    )


def _metric(source_is_cpu: bool, destination_is_cpu: bool, is_same: bool) -> str | None:
    if source_is_cpu and destination_is_cpu:
        return None
    if source_is_cpu:
        return "h2d-bandwidth"
    if destination_is_cpu:
        return "d2h-bandwidth"
    return "d2d-bandwidth" if is_same else "p2p-bandwidth"


def of_transferbench(run: TransferBench, gpus: tuple[Bdf, ...] = ()) -> Figures:
    """Cells between nodes and GPUs. Who copied is in the variant: engines have none.

    GPUs have HIP's number; gpus: their addresses by it, () where none is given.
    """
    several = len({cell.source for cell in run.cells if not cell.source.is_gpu}) > 1
    highest = max(
        (p.index for c in run.cells for p in (c.source, c.destination) if p.is_gpu), default=-1
    )
    gpus = gpus if highest < len(gpus) else ()
    samples = [found for cell in run.cells for found in _transfer(cell, run, several, gpus)]
    gaps = run.gaps if gpus else (*run.gaps, Gap("GPU addresses", "TransferBench prints none"))
    conditions = [Condition("tool TransferBench", run.version or "unknown")]
    if any(one.metric == "d2d-bandwidth" for one in samples):
        text = "TransferBench, bytes within a GPU counted once"
        conditions.append(Condition("tool device copy", text))
    return Figures(tuple(samples), tuple(conditions), gaps=gaps)


def _transfer(
    cell: TransferCell, run: TransferBench, several: bool, gpus: tuple[Bdf, ...]
) -> Iterator[Sample]:
    source, destination = cell.source, cell.destination
    metric = _metric(not source.is_gpu, not destination.is_gpu, source == destination)
    if metric is None:
        return
    copier = destination if run.reads_remotely else source
    by = None if run.executor == "DMA" else "sm"
    words = [by if copier.is_gpu else "cpu threads", "both ways" if cell.is_bidirectional else None]
    host = source if not source.is_gpu else destination
    gpu = source if source.is_gpu else destination
    fields: dict[str, Any] = {"device": gpus[gpu.index]} if gpus else {"index": gpu.index}
    if metric == "p2p-bandwidth" and gpus:
        fields["peer"] = gpus[destination.index]
    elif metric == "p2p-bandwidth":  # a pair has no address, and one position for both
        fields = {"index": source.index, "variant": f"to GPU {destination.index}"}
        words.append(fields.pop("variant"))
    elif several and not host.is_gpu:
        fields["node"] = host.index
    yield sample(
        metric,
        "bytes_per_s",
        cell.bytes_per_s,
        variant=" ".join(filter(None, words)) or None,
        **fields,
    )
