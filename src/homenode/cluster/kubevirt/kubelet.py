"""NodeShares: which CPUs, GPUs and memory an idle kubelet gives a VMI of each node of its host.

Source: Kubernetes, cpumanager/cpu_assignment.go, takeByTopologyNUMAPacked.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from homenode.cluster.kubevirt.vmi import Vmi, build_guest
from homenode.cpuset import NodeIndex
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host
from homenode.plan.placement import Placement
from homenode.plan.request import GuestRequest
from homenode.plan.search.place import place
from homenode.text import plural
from homenode.units import format_bytes
from homenode.vm.layout import PRESETS, Pinning
from homenode.vm.model import Vm
from homenode.vm.plan import Unplannable
from homenode.vm.plan_options import EmulatorPolicy, PlanOptions, Policy

_LAYOUT = replace(PRESETS["pin-numa-pci"], pinning=Pinning.NODE)
"""The guest's nodes and PCIe tree as the host's; a kubelet gives CPUs, and counts no cores."""

EVEN_PART = 2
"""A node with less than this part of an even share of the CPUs has too few for its memory."""


class NodeShares(Struct, frozen=True):
    """Shares of each node that an idle kubelet allocates to the VM."""

    cpus: Mapping[NodeIndex, int]
    gpus: Mapping[NodeIndex, int]
    memory_node_count: int
    is_mapped: bool  # the guest is shown the nodes of its CPUs

    @property
    def is_near(self) -> bool:
        """Whether every GPU, and the memory, has CPUs on its node, and enough of them."""
        return bool(self.gpus) and not self.is_uneven and self._is_within

    @property
    def _is_within(self) -> bool:
        return self.gpus.keys() <= self.cpus.keys() and self.memory_node_count <= len(self.cpus)

    @property
    def is_apart(self) -> bool:
        """Whether GPUs or memory are on other nodes than the CPUs, or cannot be shown on theirs."""
        is_shown = self.is_mapped or len(self.cpus) == 1
        return not (is_shown and self._is_within)

    @property
    def node_count(self) -> int:
        """Number of nodes that the VM's GPUs, CPUs and memory are on."""
        return max(len({*self.gpus, *self.cpus}), self.memory_node_count)

    @property
    def is_uneven(self) -> bool:
        """Whether a node has too few of the CPUs: KubeVirt gives each cell the same memory."""
        enough = sum(self.cpus.values()) / (EVEN_PART * len(self.cpus))
        return any(0 < count < enough for count in self.cpus.values())


def place_on_idle_node(
    vmi: Vmi, host: Host, *, vcpus: int | None = None, parts: int = 1, counts_memory: bool = True
) -> Placement | Unplannable:
    """Return the fewest and nearest nodes that an idle node of the cluster can give the VM.

    Huge pages count where the node has any. vcpus: replaces the VM's vCPU count. parts: number of
    equal VMs into which the VM is divided; one of them is placed.
    """
    guest = build_guest(vmi)
    page = guest.page_bytes if count_pages(host, guest.page_bytes or 0) else None
    page = page if counts_memory else None
    unit = page or 1 << 20
    old_vcpus, memory_bytes = guest.vcpus, guest.memory_bytes * counts_memory
    guest = Vm(
        name=vmi.name,
        vcpus=vmi.dedicated_pus + (vcpus or old_vcpus // parts) - old_vcpus,
        memory_bytes=max(1, -(-memory_bytes // (parts * unit))) * unit,
        architecture=host.architecture or guest.architecture,
    )
    options = PlanOptions(
        _LAYOUT.name,
        policy=Policy.MEMORY_FIRST,
        gpu_count=vmi.gpu_count // parts or None,
        emulator_policy=EmulatorPolicy.NONE,
        unequal_cells=True,
    )
    request = GuestRequest(guest=guest, layout=_LAYOUT, options=options, page_bytes=page)
    try:
        return place(replace(host, domains=()), request)
    except Unplannable as refusal:
        return refusal


def compute_shares(
    vmi: Vmi, host: Host, *, vcpus: int | None = None, parts: int = 1
) -> NodeShares | None:
    """Return the resources that the VM gets; None if unknown. See `place_on_idle_node`. The
    kubelet's static CPU manager fills one node after the other, whatever the memory needs."""
    if not host.pci_devices or not vmi.gpu_count or not vmi.is_dedicated:
        return None
    fit = place_on_idle_node(vmi, host, vcpus=vcpus, parts=parts)
    placement = place_on_idle_node(vmi, host, vcpus=vcpus, parts=parts, counts_memory=False)
    if isinstance(fit, Unplannable) or isinstance(placement, Unplannable):
        return None
    gpus, old_vcpus = _count_by_node(host, placement), build_guest(vmi).vcpus
    remaining = vmi.dedicated_pus + (vcpus or old_vcpus // parts) - old_vcpus
    pus_of_node = {node.index: node.pus for node in host.nodes}
    cpus: dict[NodeIndex, int] = {}
    for node in sorted(placement.nodes, key=lambda node: (node not in gpus, node)):
        cpus[node] = min(remaining, len(pus_of_node[node]))
        remaining -= cpus[node]
    return NodeShares(cpus, gpus, len(fit.nodes), vmi.is_mapped)


def _count_full_pus(host: Host, shares: NodeShares) -> int:
    """Return the CPUs of all these nodes but one: the kubelet takes CPUs of a further node only
    when it has taken all of the others."""
    return max(len(node.pus) for node in host.nodes) * (shares.node_count - 1)


def _round_to_two_sockets(vcpus: int, host: Host) -> int:
    """Return at least so many vCPUs, which divide into two sockets of whole cores."""
    unit = 2 * threads_of(host)
    return -(-vcpus // unit) * unit


def suggest_vcpus(vmi: Vmi, host: Host, shares: NodeShares) -> int | None:
    """Return the vCPUs with which each of these nodes has enough CPUs; None if none suffice."""
    count = shares.node_count
    enough = -(-_count_full_pus(host, shares) * EVEN_PART * count // (EVEN_PART * count - 1))
    vcpus = _round_to_two_sockets(enough, host)
    larger = compute_shares(vmi, host, vcpus=vcpus) if vcpus else None
    return vcpus if larger is not None and larger.is_near else None


def list_ways_together(vmi: Vmi, host: Host, shares: NodeShares) -> Iterator[str]:
    """Yield changes of the VM with which the node gives it CPUs of all nodes of its GPUs."""
    guest, threads, full_pus = build_guest(vmi), threads_of(host), _count_full_pus(host, shares)
    pages = "" if guest.page_bytes else " and huge pages"
    hint = "" if vmi.is_mapped else f"set numa.guestMappingPassthrough{pages}"
    if shares.is_near:
        yield hint
    elif larger := suggest_vcpus(vmi, host, shares):
        even = _round_to_two_sockets(full_pus + 1, host)
        request = f"{hint and f'{hint}, and '}request at least {plural(larger, 'CPU')}"
        yield f"{request} ({even} with kubelet's distribute-cpus-across-numa)"
    fewer = full_pus - (vmi.dedicated_pus - guest.vcpus)
    fewer -= fewer % threads
    less = compute_shares(vmi, host, vcpus=fewer) if 0 < fewer < guest.vcpus else None
    if less is not None and less.is_near:
        yield f"request at most {plural(fewer, 'CPU')}"
        return
    parts = min(len({*shares.gpus, *shares.cpus}), guest.vcpus)
    parts = max(parts, min(shares.memory_node_count, guest.vcpus))
    smaller = compute_shares(vmi, host, parts=parts)
    if smaller is not None and smaller.is_near and len(smaller.cpus) == 1:
        size = format_bytes(guest.memory_bytes // parts)
        gpus = plural(vmi.gpu_count // parts, "GPU")
        yield f"request {gpus}, {plural(guest.vcpus // parts, 'CPU')} and {size}"


def threads_of(host: Host) -> int:
    """Return the most CPUs of a core."""
    return max((len(core.pus) for core in host.cores), default=1)


def _count_by_node(host: Host, placement: Placement) -> Mapping[NodeIndex, int]:
    """Count the placed GPUs on each node."""
    devices = [host.device_at[bdf] for bdf in placement.devices]
    return Counter(
        device.node
        for device in devices
        if device.kind is DeviceKind.GPU and device.node is not None
    )


def count_pages(host: Host, page_bytes: int) -> int:
    """Return the pages of that size on all nodes."""
    pools = [pool for node in host.nodes for pool in node.page_pools]
    return sum(pool.total_pages for pool in pools if pool.page_bytes == page_bytes)
