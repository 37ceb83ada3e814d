"""NcclText: where each device is in a topology file."""

from homenode.doc import Doc, Table
from homenode.nccl.assemble import Assembled


def topology_text(made: Assembled) -> Doc:
    """The cpus with their vCPUs, and every device with its two addresses and its switch."""
    cpus = tuple(
        (
            str(cpu.numa_id),
            str(cpu.affinity),
            str(sum(not pci.children for child in cpu.children for pci in child.walk())),
        )
        for cpu in made.topology.cpus
    )
    devices = tuple(
        (str(one.bdf), str(one.kind), str(one.node), one.bus_id, one.switch or "none")
        for one in made.devices
    )
    heads = ("host BDF", "kind", "host node", "guest bus id", "switch")
    return Doc(
        "",
        (
            Table(heads=("cpu", "vCPUs", "devices"), rows=cpus, folds=("vCPUs",)),
            Table(heads=heads, rows=devices),
        ),
    )
