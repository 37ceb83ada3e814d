"""Fingerprint: tells whether a plan was made for this host; equal topologies have equal ones."""

import hashlib

from homenode.topology import Host


def host_fingerprint(host: Host) -> str:
    """sha256 (hex) over PUs, nodes, LLCs, cores, distances and PCI functions with their nodes.

    Left out is what changes from boot to boot or while the host runs: free memory, pages, domains,
    drivers, link states, names.
    """
    digest = hashlib.sha256()

    def say(*parts: object) -> None:
        digest.update(" ".join(map(str, parts)).encode() + b"\n")

    say("architecture", host.architecture)
    for package in host.packages:
        say("package", package.index, hex(package.pus.bits))
    for node in host.nodes:
        say("node", node.index, hex(node.pus.bits), node.memory_kind, bool(node.memory_bytes))
    for llc in host.llcs:
        say("llc", llc.level, hex(llc.pus.bits))
    for core in host.cores:
        say("core", hex(core.pus.bits), core.kind)
    for row in host.distances or ():
        say("distances", *row)
    for device in host.pci_devices:
        # Virtual functions come and go with a setting of the driver.
        if device.physical_function is None:
            say("pci", device.bdf, device.class_code, device.node)
    return digest.hexdigest()
