"""Affinities: the nodes of a host's GPUs as nvidia-smi topo -m gives them, laid over the host.

For sources that give no node of devices, and for machines whose firmware gives none.
"""

from dataclasses import replace

from homenode.errors import InputError
from homenode.pci import PciDevice
from homenode.slurm.home_nodes import gpus_in_order, home_node, home_of_nodes
from homenode.tools.nvidia_smi_topo import TopoDevice, TopoMatrix
from homenode.topology import Host


def with_affinities(host: Host, matrix: TopoMatrix, source: str) -> Host:
    """The host with a node for each GPU: of a list such as "0,5-11" the one that has CPUs.

    Rows GPU0, GPU1, ... are the host's GPUs by address. Raises InputError where they are not as
    many, and where the host says otherwise of one.
    """
    gpus = gpus_in_order(host)
    rows = tuple(row for row in matrix.devices if row.name.startswith("GPU"))
    if len(rows) != len(gpus):
        raise InputError(
            f"{source}: expected {len(gpus)} GPUs, as {host.name} has, found {len(rows)}"
        )
    stated = {
        gpu.bdf: _with_node(host, gpu, row, source) for gpu, row in zip(gpus, rows, strict=True)
    }
    return replace(
        host, pci_devices=tuple(stated.get(device.bdf, device) for device in host.pci_devices)
    )


def _with_node(host: Host, gpu: PciDevice, row: TopoDevice, source: str) -> PciDevice:
    node = home_of_nodes(host, row.nodes or ())
    known = home_node(host, gpu)
    if node is None or node == known:
        return gpu
    if known is not None:
        raise InputError(
            f"{source}: expected {row.name} ({gpu.bdf}) on node {known}, as {host.name} says, "
            f"found {node}",
            hint="the listing is of another machine, or of another BIOS setting",
        )
    return replace(gpu, node=node, local_pus=row.cpus or gpu.local_pus)
