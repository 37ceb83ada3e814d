"""Fits: the free resources of a host, and the number of further VMs of a size, planned one by
one."""

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import itemgetter

from msgspec import Struct
from msgspec.structs import replace

from homenode.cpuset import NodeIndex
from homenode.errors import InputError, NotKnownError, UsageError, out_of_range
from homenode.findings import NO_VMS, NO_VMS_DESCRIBED, Gap, list_unread_vms
from homenode.machine.pci import DeviceKind, PciDevice
from homenode.machine.topology import (
    Host,
    MemoryKind,
    NumaNode,
    PagePool,
    complete_nodes,
    reject_unshown,
)
from homenode.option import parse_key_values, parse_whole, size_bytes
from homenode.plan.allocations import find_allocations
from homenode.plan.memory import MIN_RESERVE_BYTES, free_memory, held_memory
from homenode.plan.planner import apply_placement
from homenode.plan.request import GuestRequest, request_for
from homenode.plan.search.place import place
from homenode.plan.shape.assemble import assemble
from homenode.plan.stored import domain_of_plan
from homenode.show.device_groups import find_device_model
from homenode.text import plural
from homenode.units import GIB, MIB, format_bytes
from homenode.vm.gpu_parts import is_divided, list_parts
from homenode.vm.host_sources import NamedHosts, Progress
from homenode.vm.model import MAX_VCPUS, Vm
from homenode.vm.plan import Plan, Relaxation, Unplannable
from homenode.vm.plan_options import PlanOptions

MAX_COUNTED = 100
"""Maximum number of VMs of one size that are counted on a host; more may fit."""

_LAYOUT = "pin-numa-pci"  # the guest sees where each GPU is
_LOCALITY = (
    *("given_up", "device_class", "packages_spanned", "gpus_away_from_home"),
    *("given_up_for_nearness", "nodes_spanned"),
)


class NodeResources(Struct, frozen=True, kw_only=True):
    """Resources of a node, or of a whole host, and their free part."""

    node: NodeIndex | None  # None = of a host, or GPUs of an unknown node
    gpus: int | None  # None = PCI was not read
    free_gpus: int | None
    cores: int
    free_cores: int  # on which no VM has a vCPU
    memory_bytes: int | None
    free_memory_bytes: int | None  # ordinary memory and huge pages


def free_by_node(host: Host) -> tuple[NodeResources, ...]:
    """Return each node of the host; last, the GPUs of unknown node, if any."""
    request = blank_request(host)
    allocations, vm_memory = find_allocations(host, request), held_memory(host, request)
    devices = {bdf for bdf, _ in allocations.devices}
    uuids = {uuid for uuid, _ in allocations.mediated}

    def is_free(gpu: PciDevice) -> bool:
        parts = {part.uuid for part in list_parts(host.device_at, gpu.bdf)} - {None}
        return gpu.bdf not in devices and not (parts and parts <= uuids)

    def free_bytes(node: NumaNode) -> int | None:
        ordinary = free_memory(host, request, node, MIB, vm_memory)[0]
        if ordinary is None:
            return None
        pages = 0
        for pool in node.page_pools:
            huge = replace(request, page_bytes=pool.page_bytes)
            pages += pool.page_bytes * free_memory(host, huge, node, pool.page_bytes, vm_memory)[1]
        return max(0, ordinary) + pages

    is_shown = has_pci(host)
    gpus: dict[NodeIndex | None, list[PciDevice]] = {node.index: [] for node in host.nodes}
    for gpu in list_passable_gpus(host):
        gpus.setdefault(gpu.node if gpu.node in gpus else None, []).append(gpu)
    rows = []
    for index, gpus_of_node in gpus.items():
        node = None if index is None else host.find_node(index)
        cores = [core for core in host.cores if node is not None and core.pus <= node.pus]
        has_memory = node is not None and node.memory_kind is not MemoryKind.GPU
        rows.append(
            NodeResources(
                node=index,
                gpus=len(gpus_of_node) if is_shown else None,
                free_gpus=sum(map(is_free, gpus_of_node)) if is_shown else None,
                cores=len(cores),
                free_cores=sum(not core.pus & allocations.vcpu_cores for core in cores),
                memory_bytes=node.memory_bytes if node is not None and has_memory else 0,
                free_memory_bytes=free_bytes(node) if node is not None and has_memory else 0,
            )
        )
    return tuple(rows)


def sum_of(parts: Iterable[NodeResources]) -> NodeResources:
    """Return the sum; GPUs or memory are None if those of any node are unknown."""
    rows = tuple(parts)

    def sum_sizes(sizes: Sequence[int | None]) -> int | None:
        return None if None in sizes else sum(size or 0 for size in sizes)

    return NodeResources(
        node=None,
        gpus=sum_sizes([row.gpus for row in rows]),
        free_gpus=sum_sizes([row.free_gpus for row in rows]),
        cores=sum(row.cores for row in rows),
        free_cores=sum(row.free_cores for row in rows),
        memory_bytes=sum_sizes([row.memory_bytes for row in rows]),
        free_memory_bytes=sum_sizes([row.free_memory_bytes for row in rows]),
    )


def has_pci(host: Host) -> bool:
    """Return whether the host's source shows its PCI functions."""
    try:
        reject_unshown(host, "PCI")
    except NotKnownError:
        return False
    return True


def format_model_names(host: Host) -> str:
    """Return the models of the host's GPUs for a cell: words up to the first with a digit.

    >>> _shorten_model("GeForce RTX 4090"), _shorten_model("H100 SXM5 80GB")
    ('RTX 4090', 'H100')
    """
    models = [find_device_model(gpu) for gpu in list_passable_gpus(host)]
    return ", ".join(dict.fromkeys(_shorten_model(model) for model in models if model is not None))


_MAKERS = frozenset(("AMD", "Instinct", "GeForce", "NVIDIA", "Tesla"))


def _shorten_model(model: str) -> str:
    words = [word for word in model.split() if word not in _MAKERS]
    count = next((n for n, word in enumerate(words, 1) if any(map(str.isdigit, word))), None)
    return " ".join(words[:count])


def list_passable_gpus(host: Host) -> tuple[PciDevice, ...]:
    """GPU functions for VMs: whole GPUs, and parts of divided GPUs that VFIO can assign."""
    return tuple(
        gpu
        for gpu in host.devices_of_kind(DeviceKind.GPU)
        if (gpu.physical_function is None and not is_divided(gpu))
        or list_parts(host.device_at, gpu.bdf)
    )


def blank_vm(host: Host, name: str = "", vcpus: int = 1, memory_bytes: int = GIB) -> Vm:
    """Return a VM without a definition, for the host's architecture."""
    architecture = host.architecture or "x86_64"
    return Vm(
        name=name,
        architecture=architecture,
        machine="virt" if architecture == "aarch64" else "q35",
        vcpus=vcpus,
        memory_bytes=memory_bytes,
        cpu_mode="host-passthrough",
    )


def blank_request(host: Host) -> GuestRequest:
    """Return the request of a VM with a new name, so all domains of the host count."""
    return request_for(blank_vm(host, "\0"), PlanOptions("pin"), host)


def make_equivalence_key(host: Host, vm: str = "") -> object:
    """Return a key that is equal for hosts with the same placement of a VM: equal machines with the
    same resources in use, and free memory that differs by less than 1 GiB. vm: name of a VM whose
    running instance does not count."""
    domains = sorted(
        repr(replace(domain, name=vm if domain.name == vm else "", uuid=None))
        for domain in host.domains
    )
    memory = tuple(
        (node.memory_free_bytes and node.memory_free_bytes // GIB, node.page_pools)
        for node in host.nodes
    )
    return host.fingerprint, host.reserve, host.housekeeping_pus, tuple(domains), memory


class VmSize(Struct, frozen=True, kw_only=True):
    gpus: int = 0
    vcpus: int | None = None  # None = the share of the host that belongs to its GPUs
    memory_bytes: int | None = None  # None = the share of the host that belongs to its GPUs

    def __str__(self) -> str:
        words = [plural(self.gpus, "GPU")] if self.gpus else []
        words += [] if self.vcpus is None else [plural(self.vcpus, "vCPU")]
        words += [] if self.memory_bytes is None else [format_bytes(self.memory_bytes)]
        return ", ".join(words)

    def request(self, host: Host) -> GuestRequest:
        """Return the request for a VM of this size. Raises InputError for a share of no GPUs."""
        vcpus, memory_bytes = self.vcpus, self.memory_bytes
        if vcpus is None or memory_bytes is None:
            share = compute_share(host, self.gpus)
            vcpus, memory_bytes = vcpus or share[0], memory_bytes or share[1]
        options = PlanOptions(
            _LAYOUT,
            vcpus=vcpus,
            memory_bytes=memory_bytes,
            gpu_count=self.gpus or None,
            page_bytes=_find_common_page_bytes(host),
        )
        return request_for(blank_vm(host, "\0", vcpus, memory_bytes), options, host)


DEFAULT_SIZES = tuple(VmSize(gpus=count) for count in (1, 2, 4, 8))


def parse_size(text: str, option: str = "--size") -> VmSize:
    """Return a typed size. Raises UsageError."""
    parts = parse_key_values(option, text, (), ("gpus", "vcpus", "memory"))
    gpus, vcpus, memory = (parts.get(name) for name in ("gpus", "vcpus", "memory"))
    size = VmSize(
        gpus=0 if gpus is None else parse_whole(f"{option}: gpus", gpus),
        vcpus=None if vcpus is None else parse_whole(f"{option}: vcpus", vcpus),
        memory_bytes=None if memory is None else size_bytes(memory, f"{option}: memory"),
    )
    if not size.gpus and (size.vcpus is None or size.memory_bytes is None):
        raise UsageError(f"{option}: expected vcpus and memory for a VM without GPUs, found {text}")
    if (size.vcpus or 0) > MAX_VCPUS:
        raise out_of_range(f"{option} vcpus", str(size.vcpus), 1, MAX_VCPUS)
    return size


class SizeCapacity(Struct, frozen=True, kw_only=True):
    """The number of further VMs of a size that fit."""

    size: str
    count: int | None  # None = the host has no GPUs to take a share of
    share_vcpus: int | None = None  # vCPUs for each GPU; None = the size sets vCPUs
    share_bytes: int | None = None  # memory for each GPU; None = the size sets memory


class PoolHost(Struct, frozen=True, kw_only=True):
    name: str
    vms: int | None  # that run or are planned; None: they were not read
    nodes: tuple[NodeResources, ...]
    fits: tuple[SizeCapacity, ...]  # in the order of the sizes
    gaps: tuple[Gap, ...] = ()
    gpu_models: str = ""

    @property
    def free(self) -> NodeResources:
        """The free resources of the whole host."""
        return sum_of(self.nodes)


class Pool(Struct, frozen=True, kw_only=True):
    """Hosts by name, and sources without a host."""

    hosts: tuple[PoolHost, ...]
    unread: tuple[Gap, ...]


def examine_pool(
    named_hosts: NamedHosts,
    sizes: Sequence[VmSize],
    progress: Progress = lambda count, total: None,
) -> Pool:
    """Return the free resources and fitting VMs of each host; identical hosts are planned once."""
    fits_of: dict[object, tuple[SizeCapacity, ...]] = {}
    hosts = []
    for number, entry in enumerate(named_hosts.hosts, start=1):
        host = complete_nodes(entry.host)
        key = make_equivalence_key(host)
        if key not in fits_of:
            fits_of[key] = tuple(_fits(host, size) for size in sizes)
        progress(number, len(named_hosts.hosts))
        vms = sum(domain.has_claim for domain in host.domains)
        hosts.append(
            PoolHost(
                name=entry.name,
                vms=None if any(map(_is_about_vms, host.gaps)) else vms,
                nodes=free_by_node(host),
                fits=fits_of[key],
                gaps=host.gaps,
                gpu_models=format_model_names(host),
            )
        )
    return Pool(hosts=tuple(hosts), unread=named_hosts.unread)


def _fits(host: Host, size: VmSize) -> SizeCapacity:
    count = count_fits(host, size)
    if count is None or not size.gpus:
        return SizeCapacity(size=str(size), count=count)
    try:
        vcpus, share_bytes = compute_share(host, 1)
    except InputError:  # the size names vCPUs and memory
        return SizeCapacity(size=str(size), count=count)
    return SizeCapacity(
        size=str(size),
        count=count,
        share_vcpus=vcpus if size.vcpus is None else None,
        share_bytes=share_bytes if size.memory_bytes is None else None,
    )


def _is_about_vms(gap: Gap) -> bool:
    return gap != NO_VMS_DESCRIBED and (gap.subject == NO_VMS or bool(list_unread_vms([gap])))


def count_fits(host: Host, size: VmSize) -> int | None:
    """Count the VMs of a size that fit locally, one after the other, at most MAX_COUNTED. Locally
    means no GPU away from the VM's nodes, no more packages or nodes, and no other fallback than on
    the empty host, but for cores of other VMs' emulators. None: the host has no GPUs to share."""
    try:
        request = size.request(host)
    except InputError:
        return None
    count, best = 0, _try_plan(_remove_vms(host), request)
    while count < MAX_COUNTED and best is not None:
        vm = replace(request, guest=replace(request.guest, name=f"\0{count}"))
        plan = _try_plan(host, vm)
        if plan is None:
            break
        if any(value > limit for value, limit in zip(plan[0], best[0], strict=True)):
            break
        host = replace(host, domains=(*host.domains, domain_of_plan(plan[1])))
        count += 1
    return count


def _try_plan(host: Host, request: GuestRequest) -> tuple[tuple[int, ...], Plan] | None:
    """Return the locality of the VM (smaller is better) and its plan; None if it does not fit, or
    fits only in the host's memory."""
    try:
        placement = place(host, request, brief=True)
        plan = assemble(host, apply_placement(request, placement), placement)
    except (Unplannable, InputError):
        return None
    if Relaxation.HOST_MEMORY in placement.relaxations:
        return None
    # Every VM shares its emulator's core before one is refused; the host's own core stays free.
    relaxations = tuple(r for r in placement.relaxations if r is not Relaxation.EMULATOR_CORE)
    concerns = dict(replace(placement, relaxations=relaxations).concerns)
    return tuple(concerns.get(name, 0) for name in _LOCALITY), plan


def _remove_vms(host: Host) -> Host:
    return replace(
        host,
        domains=(),
        nodes=tuple(
            replace(
                node,
                memory_free_bytes=None,
                page_pools=tuple(
                    replace(pool, free_pages=pool.total_pages) for pool in node.page_pools
                ),
            )
            for node in host.nodes
        ),
    )


def compute_share(host: Host, gpus: int) -> tuple[int, int]:
    """Return the (vCPUs, bytes) for a number of GPUs of a host: each GPU's share on the node with
    the smallest share, without the host's reserve and a core for each VM's emulator. Whole GiB from
    1 GiB. Raises InputError for a host without GPUs or with too few resources."""
    gpus_of_node: dict[NumaNode | None, int] = {}
    node_of = host.node_at
    for gpu in list_passable_gpus(host):
        node = None if gpu.node is None else node_of.get(gpu.node)
        gpus_of_node[node] = gpus_of_node.get(node, 0) + 1
    total = sum(gpus_of_node.values())
    is_idle = not any(domain.has_claim for domain in host.domains)
    page_bytes = _find_common_page_bytes(host)
    if not total:
        raise InputError("the host has no GPUs, so a share per GPU does not exist")
    if None in gpus_of_node:
        memory = sum(_count_vm_bytes(node, is_idle, page_bytes) for node in host.nodes if node.pus)
        shares = [((len(host.cores) - 1) // total, memory // total)]
    else:
        shares = [
            (
                (sum(core.pus <= node.pus for core in host.cores) - 1) // count,
                _count_vm_bytes(node, is_idle, page_bytes) // count,
            )
            for node, count in gpus_of_node.items()
            if node is not None
        ]
    cores = min(cores for cores, _ in shares)
    cores -= cores > 2
    memory = min(size for _, size in shares) * 63 // 64 - (256 + 16 * max(1, cores)) * MIB
    step = 8 * GIB if memory > 64 * GIB else GIB if memory > 4 * GIB else 128 * MIB
    if cores < 1 or memory < step:
        raise InputError("the host has too few cores or too little memory for each of its GPUs")
    return cores * max(1, gpus), memory // step * step * max(1, gpus)


def _find_common_page_bytes(host: Host) -> int | None:
    """Return the page size of the huge pages that have more than half of the host's memory: little
    else is left for VMs. None if no size has."""
    sizes: Counter[int] = Counter()
    for node in host.nodes:
        sizes.update({pool.page_bytes: _count_pool_bytes(pool) for pool in node.page_pools})
    page_bytes, size = max(sizes.items(), key=itemgetter(1), default=(None, 0))
    return page_bytes if 2 * size > sum(node.memory_bytes or 0 for node in host.nodes) else None


def _count_pool_bytes(pool: PagePool) -> int:
    return pool.page_bytes * pool.total_pages


def _count_vm_bytes(node: NumaNode, is_idle: bool, page_bytes: int | None) -> int:
    """Return the bytes of a node in pages of this size. None: without the host's reserve, and
    without what an idle host uses."""
    if page_bytes is not None:
        pools = (pool for pool in node.page_pools if pool.page_bytes == page_bytes)
        return sum(map(_count_pool_bytes, pools))
    size = node.memory_bytes or 0
    reserve = max(MIN_RESERVE_BYTES, size // 50)
    if is_idle and node.memory_free_bytes is not None:
        pages = sum(map(_count_pool_bytes, node.page_pools))
        size = min(size, node.memory_free_bytes + pages)
    return max(0, size - reserve)
