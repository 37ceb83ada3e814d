"""Fingerprint: shows whether a plan was made for this host; equal topologies have equal ones."""

import hashlib

from homenode.machine.topology import Host, with_certain_nodes

RECORDED = 16
"""So much of a fingerprint is in the record of a domain."""


def host_fingerprint(host: Host) -> str:
    """sha256 (hex) over CPUs, nodes, LLCs, cores, distances and PCI functions with their nodes.

    Omitted is what changes from boot to boot or while the host runs: free memory, pages, domains,
    drivers, link states, names.
    """
    host = with_certain_nodes(host)
    lines = [f"architecture {host.architecture}"]
    lines += [f"package {package.index} {package.pus.bits:x}" for package in host.packages]
    lines += [
        f"node {node.index} {node.pus.bits:x} {node.memory_kind} {bool(node.memory_bytes)}"
        for node in host.nodes
    ]
    lines += [f"llc {llc.level} {llc.pus.bits:x}" for llc in host.llcs]
    lines += [f"core {core.pus.bits:x} {core.kind}" for core in host.cores]
    lines += [f"distances {row}" for row in host.distances or ()]
    # Virtual functions come and go with a setting of the driver.
    lines += [
        f"pci {device.bdf} {device.class_code:x} {device.node}"
        for device in host.pci_devices
        if device.physical_function is None
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def is_made_for(host: Host, fingerprint: str) -> bool | None:
    """Whether a fingerprint, or the start of one, is that of the host. None = unknown: it differs,
    and the host's source shows no NUMA nodes or PCI functions, as in a container.
    """
    if host_fingerprint(host).startswith(fingerprint):
        return True
    return None if host.nodes_assumed or not host.pci_devices else False
