"""GuestTopology: the NCCL file of a guest that a trial has booted, from what its kernel shows."""

from homenode.domain.read import open_domain
from homenode.nccl.assemble import AMD_VENDOR, assemble_topology
from homenode.nccl.guest_side import guest_side
from homenode.nccl.topology import Flavour
from homenode.nccl.write import write_topology
from homenode.pci import DeviceKind
from homenode.plan.model import Plan
from homenode.topology import Host
from homenode.verify.domain_facts import domain_facts


def topology_text(plan: Plan, document: bytes, guest: Host, host: Host) -> str:
    """The text of the file. document: as libvirt has defined it, with every address.

    Raises InputError where a device's place in the guest cannot be determined.
    """
    opened = open_domain(document, "the domain")
    side = guest_side(opened, domain_facts(opened), plan=plan, guest=guest)
    gpus = guest.devices_of_kind(DeviceKind.GPU)
    flavour = Flavour.RCCL if any(gpu.vendor_id == AMD_VENDOR for gpu in gpus) else Flavour.NCCL
    return write_topology(assemble_topology(host, side, flavour, "the domain").topology)
