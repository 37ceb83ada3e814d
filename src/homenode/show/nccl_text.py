"""NcclText: where each device is in a topology file."""

from homenode.doc import Doc, Table
from homenode.nccl.assemble import TopologyFile


def topology_text(assembled: TopologyFile, title: str) -> Doc:
    """The cpus with their vCPUs, and every device with its two addresses and its switch."""
    cpus = tuple(
        (
            str(cpu.numa_id),
            str(cpu.affinity),
            str(sum(not pci.children for child in cpu.children for pci in child.walk())),
        )
        for cpu in assembled.topology.cpus
    )
    devices = tuple(
        (*map(str, (device.bdf, device.kind, device.node)), device.bus_id, device.switch or "none")
        for device in assembled.devices
    )
    heads = ("host BDF", "kind", "host node", "guest bus id", "switch")
    return Doc(
        title,
        (
            Table(heads=("cpu", "vCPUs", "devices"), rows=cpus, folds=("vCPUs",)),
            Table(heads=heads, rows=devices),
        ),
    )
