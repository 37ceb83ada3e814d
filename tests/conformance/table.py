"""The table of judges, in the order of the page."""

from tests.conformance.kubelet import KUBELET
from tests.conformance.kubevirt import KUBEVIRT
from tests.conformance.kubevirt_chain import CHAINS
from tests.conformance.libvirt import LIBVIRT
from tests.conformance.nova import NOVA
from tests.conformance.opennebula import OPENNEBULA
from tests.conformance.proxmox import PROXMOX
from tests.conformance.qemu import QEMU_JUDGE
from tests.conformance.slurmd import SLURMD
from tests.conformance.xen import XEN

JUDGES = (LIBVIRT, QEMU_JUDGE, PROXMOX, NOVA, XEN, OPENNEBULA, SLURMD, KUBELET, KUBEVIRT, *CHAINS)
