"""Certain nodes: where a device must be although its firmware does not say."""

from msgspec.structs import replace

from homenode.topology import Host


def with_certain_nodes(host: Host) -> Host:
    """The host with every device of a one-node host on that node.

    Firmware of one-node hosts often gives none (numa_node says -1), but there is no other node. The
    Host keeps what was read; planning uses what follows from it.
    """
    if len(host.nodes) != 1 or all(device.node is not None for device in host.pci_devices):
        return host
    only = host.nodes[0].index
    return replace(
        host, pci_devices=tuple(replace(device, node=only) for device in host.pci_devices)
    )
