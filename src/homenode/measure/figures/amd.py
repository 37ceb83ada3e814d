"""AMD figures: samples of rocm-bandwidth-test and TransferBench.

Both measure from every node at once: what they call a CPU is a node. rocm-bandwidth-test numbers
CPUs first, in the kernel's order of nodes; where it shows several, the n-th is mistaken for node n.
"""

from typing import Any

from msgspec import structs

from homenode.bdf import Bdf
from homenode.machine.tools.rocm_bandwidth_test import RocmBandwidthTest
from homenode.machine.tools.transferbench import TransferBench, TransferCell
from homenode.measure.figures.sample import FigureList, Figures

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
    figures = FigureList("rocm-bandwidth-test", run.version or "unknown", run.gaps)
    for matrix in run.matrices:
        suffix = _BOTH if matrix.is_bidirectional else None
        for row, source in enumerate(matrix.devices):
            for column, destination in enumerate(matrix.devices):
                value = matrix.cells[row][column]
                if value is not None:
                    _add_cell(
                        figures=figures,
                        source=source,
                        destination=destination,
                        value=value,
                        variant=suffix,
                        gpu_of=gpu_of,
                        several=several,
                    )
    if several:
        figures.gap("nodes", "CPU n of rocm-bandwidth-test was mistaken for node n")
    if run.matrices and not gpu_of:
        figures.gap("rocm-bandwidth-test devices", "no GPU addresses: nothing of it is kept")
    last = {(c.is_bidirectional, c.source, c.destination): c for c in run.copies}
    for copy in last.values():
        metric = _metric(
            copy.source_is_cpu, copy.destination_is_cpu, copy.source == copy.destination
        )
        if metric is not None:
            variant = _BOTH if copy.is_bidirectional else None
            index = copy.destination if copy.source_is_cpu else copy.source
            figures.add(metric, "bytes_per_s", copy.peak_bytes_per_s, index=index, variant=variant)
    return figures.figures(device.name for device in gpu_of.values())


def _in_domain(printed: Bdf, gpus: tuple[Bdf, ...]) -> Bdf:
    place = (printed.bus, printed.device, printed.function)
    matches = [gpu for gpu in gpus if (gpu.bus, gpu.device, gpu.function) == place]
    return matches[0] if len(matches) == 1 else printed


def _add_cell(
    figures: FigureList,
    source: int,
    destination: int,
    value: float,
    variant: str | None,
    gpu_of: dict[int, Any],
    several: bool,
) -> None:
    metric = _metric(source not in gpu_of, destination not in gpu_of, source == destination)
    if metric is None or not gpu_of:
        return
    first = gpu_of.get(source) or gpu_of[destination]
    peer = gpu_of[destination].address if metric == "p2p-bandwidth" else None
    host = source if source not in gpu_of else destination
    node = host if several and metric in ("h2d-bandwidth", "d2h-bandwidth") else None
    figures.add(
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
    figures = FigureList("TransferBench", run.version or "unknown", run.gaps)
    metrics = {_add_transfer(figures, cell, run, several, gpus) for cell in run.cells}
    if not gpus:
        figures.gap("GPU addresses", "TransferBench prints none")
    if "d2d-bandwidth" in metrics:
        figures.condition("tool device copy", "TransferBench, bytes within a GPU counted once")
    return figures.figures()


def _add_transfer(
    figures: FigureList,
    cell: TransferCell,
    run: TransferBench,
    several: bool,
    gpus: tuple[Bdf, ...],
) -> str | None:
    """The metric of the cell; None where it is between nodes."""
    source, destination = cell.source, cell.destination
    metric = _metric(not source.is_gpu, not destination.is_gpu, source == destination)
    if metric is None:
        return None
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
    variant = " ".join(filter(None, words)) or None
    figures.add(metric, "bytes_per_s", cell.bytes_per_s, variant=variant, **fields)
    return metric
