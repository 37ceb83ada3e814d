"""AMD figures: samples of rocm-bandwidth-test.

It measures from every node at once: its CPUs are nodes. It numbers CPUs first, in the kernel's
order of nodes; if there are several, the n-th is assumed to be node n.
"""

from homenode.bdf import Bdf
from homenode.machine.tools.rocm_bandwidth_test import RocmBandwidthTest
from homenode.measure.figures.sample import FigureList, Figures

_BOTH = "both ways together"
"""Variant of rocm-bandwidth-test: it adds both directions; other tools report one."""


def rocm_figures(run: RocmBandwidthTest, gpus: tuple[Bdf, ...] = ()) -> Figures:
    """Cells between host and GPUs and between GPUs, one way; the last size of each pair.

    Which devices are GPUs is known by their addresses, or by what a pair says. The tool prints no
    PCI domain: it is that of the one of `gpus` with the same bus, if there is one.
    """
    address_of = {
        device.index: _in_domain(device.address, gpus)
        for device in run.devices
        if device.address is not None
    }
    several = len(run.devices) - len(address_of) > 1
    figures = FigureList("rocm-bandwidth-test", run.version, run.gaps)
    for matrix in run.matrices if address_of else ():
        for source, row in zip(matrix.devices, matrix.cells, strict=True):
            for destination, value in zip(matrix.devices, row, strict=True):
                ends = (source not in address_of, destination not in address_of)
                metric = _metric(*ends, source == destination)
                if metric is None or value is None:
                    continue
                node = source if ends[0] else destination
                figures.add(
                    metric,
                    "bytes_per_s",
                    value,
                    device=address_of.get(source) or address_of[destination],
                    peer=address_of[destination] if metric == "p2p-bandwidth" else None,
                    variant=_BOTH if matrix.is_bidirectional else None,
                    node=node if several and any(ends) else None,
                )
    if several:
        figures.gap("nodes", "CPU n of rocm-bandwidth-test counts as node n")
    if run.matrices and not address_of:
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
    return figures.figures(device.name for device in run.devices if device.address is not None)


def _in_domain(printed: Bdf, gpus: tuple[Bdf, ...]) -> Bdf:
    place = (printed.bus, printed.device, printed.function)
    matches = [gpu for gpu in gpus if (gpu.bus, gpu.device, gpu.function) == place]
    return matches[0] if len(matches) == 1 else printed


def _metric(source_is_cpu: bool, destination_is_cpu: bool, is_same: bool) -> str | None:
    if source_is_cpu and destination_is_cpu:
        return None
    if source_is_cpu:
        return "h2d-bandwidth"
    if destination_is_cpu:
        return "d2h-bandwidth"
    return "d2d-bandwidth" if is_same else "p2p-bandwidth"
