"""Collectives: what NCCL will not know of a machine's GPUs, or of a domain's, before it runs there.

Information, and no fault: a layout may be chosen for what does not talk between GPUs.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from homenode.findings import Finding, Severity
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host
from homenode.nccl.explanation import explain
from homenode.nccl.guest_tree import GuestTree, tree_of_document, tree_of_host
from homenode.vm.model import Vm


def collective_findings(host: Host, facts: Vm | None) -> Iterator[Finding]:
    """Of several GPUs that a machine uses itself, or that a domain has."""
    tree = _tree(host, facts)
    if tree is None:
        return
    for finding in explain(tree).findings:
        # What is computed without a link or the CPU's model is a guess, and nothing to act on.
        if finding.id == "nccl-gpus-without-node" or not tree.gaps:
            yield replace(finding, severity=Severity.INFO)


def _tree(host: Host, facts: Vm | None) -> GuestTree | None:
    gpus = [gpu for gpu in host.devices_of_kind(DeviceKind.GPU) if gpu.physical_function is None]
    if facts is None:
        own = sum(gpu.driver != "vfio-pci" for gpu in gpus)
        return tree_of_host(host) if own > 1 else None
    passed = {hostdev.bdf for hostdev in facts.hostdevs}
    if sum(gpu.bdf in passed for gpu in gpus) < 2:
        return None
    return tree_of_document(facts, host, {})
