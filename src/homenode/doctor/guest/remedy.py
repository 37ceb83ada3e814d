"""Remedy: the layout that asks for the same VM as a document, without its faults."""

from homenode.doctor.guest.pins import nodes_of
from homenode.plan.layout import PRESETS
from homenode.plan.options import PlanOptions
from homenode.topology import Host
from homenode.verify.domain_facts import DomainFacts


def remedy(facts: DomainFacts, host: Host) -> PlanOptions:
    """The same vCPUs, memory and devices, in the smallest layout that heals what was found.

    A guest that fits on one node stays flat and is bound there; one that has cells, spans nodes or
    does not fit gets cells, and with devices on a machine that can, expander buses.
    """
    guest = facts.guest
    nodes = [node for node in host.nodes if node.pus]
    most = max(
        (sum(not core.pus.isdisjoint(node.pus) for core in host.cores) for node in nodes),
        default=0,
    )
    space = max((node.memory_bytes or 0 for node in nodes), default=0)
    threads = 1 if guest.cpu_topology is None else guest.cpu_topology[3]
    fits = guest.vcpus <= most * threads and guest.memory_bytes <= space
    spread = len(facts.cells) > 1 or len(nodes_of(facts.pinned_pus, host)) > 1
    device_nodes = {
        device.node
        for device in host.pci_devices
        if device.bdf in {hostdev.source for hostdev in guest.hostdevs}
    } - {None}
    if fits and len(facts.cells) < 2 and len(device_nodes) < 2:
        return PlanOptions(layout="pin-bound", max_nodes=1 if spread else None)
    mirrors = bool(guest.hostdevs) and (guest.is_q35 or guest.is_virt)
    layout = "pin-numa-pci" if mirrors else "pin-numa"
    if threads > 1 and f"{layout}-smt" in PRESETS:
        return PlanOptions(layout=f"{layout}-smt", keep_vcpus=True)
    return PlanOptions(layout=layout)
