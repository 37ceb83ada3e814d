"""Free: what no VM of a host has, by node."""

from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from homenode.indices import NodeIndex
from homenode.machine.pci import DeviceKind, PciDevice
from homenode.machine.topology import Host, MemoryKind, NumaNode
from homenode.plan.allocations import allocations
from homenode.plan.memory import free_memory, held_memory
from homenode.plan.request import GuestRequest, request_for
from homenode.units import GIB, MIB
from homenode.vm.fingerprint import host_fingerprint
from homenode.vm.gpu_parts import is_divided, parts_at
from homenode.vm.model import Vm
from homenode.vm.plan_options import PlanOptions


class FreeOfNode(Struct, frozen=True, kw_only=True):
    """What a node has, and what is free of it; of a whole host in sum."""

    node: NodeIndex | None  # None = of a host, or GPUs of an unknown node
    gpus: int
    free_gpus: int
    cores: int
    free_cores: int  # on which no VM has a vCPU
    memory_bytes: int | None
    free_memory_bytes: int | None  # ordinary memory and huge pages


def free_by_node(host: Host) -> tuple[FreeOfNode, ...]:
    """Each node of the host, and at last the GPUs whose node is unknown, where there are some."""
    request = blank_request(host)
    allocated, vm_memory = allocations(host, request), held_memory(host, request)
    devices = {bdf for bdf, _ in allocated.devices}
    uuids = {uuid for uuid, _ in allocated.mediated}

    def is_free(gpu: PciDevice) -> bool:
        parts = {part.uuid for part in parts_at(host.device_at, gpu.bdf)} - {None}
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

    gpus: dict[NodeIndex | None, list[PciDevice]] = {node.index: [] for node in host.nodes}
    for gpu in passable_gpus(host):
        gpus.setdefault(gpu.node if gpu.node in gpus else None, []).append(gpu)
    rows = []
    for index, gpus_of_node in gpus.items():
        node = None if index is None else host.node(index)
        cores = [core for core in host.cores if node is not None and core.pus <= node.pus]
        has_memory = node is not None and node.memory_kind is not MemoryKind.GPU
        rows.append(
            FreeOfNode(
                node=index,
                gpus=len(gpus_of_node),
                free_gpus=sum(map(is_free, gpus_of_node)),
                cores=len(cores),
                free_cores=sum(not core.pus & allocated.vcpu_cores for core in cores),
                memory_bytes=node.memory_bytes if node is not None and has_memory else 0,
                free_memory_bytes=free_bytes(node) if node is not None and has_memory else 0,
            )
        )
    return tuple(rows)


def sum_of(parts: Iterable[FreeOfNode]) -> FreeOfNode:
    """All of them together; memory is None where one is unknown."""
    rows = tuple(parts)

    def total(sizes: Sequence[int | None]) -> int | None:
        return None if None in sizes else sum(size or 0 for size in sizes)

    return FreeOfNode(
        node=None,
        gpus=sum(row.gpus for row in rows),
        free_gpus=sum(row.free_gpus for row in rows),
        cores=sum(row.cores for row in rows),
        free_cores=sum(row.free_cores for row in rows),
        memory_bytes=total([row.memory_bytes for row in rows]),
        free_memory_bytes=total([row.free_memory_bytes for row in rows]),
    )


def passable_gpus(host: Host) -> tuple[PciDevice, ...]:
    """GPU functions that a VM can get: whole GPUs, and of divided GPUs those that VFIO can give."""
    return tuple(
        gpu
        for gpu in host.devices_of_kind(DeviceKind.GPU)
        if (gpu.physical_function is None and not is_divided(gpu))
        or parts_at(host.device_at, gpu.bdf)
    )


def blank_vm(host: Host, name: str = "", vcpus: int = 1, memory_bytes: int = GIB) -> Vm:
    """A VM that no document describes, as the host's architecture needs it."""
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
    """The request of a VM whose name no domain has: all domains of the host count."""
    return request_for(blank_vm(host, "\0"), PlanOptions("pin"), host)


def alike_key(host: Host, vm: str = "") -> object:
    """Equal for hosts on which a VM is placed alike: the same machine with as much in use at the
    same places, and free memory that differs by less than 1 GiB. vm: its name, which counts for
    nothing where it runs already."""
    domains = sorted(
        repr(replace(domain, name=vm if domain.name == vm else "", uuid=None))
        for domain in host.domains
    )
    memory = tuple(
        (node.memory_free_bytes and node.memory_free_bytes // GIB, node.page_pools)
        for node in host.nodes
    )
    return host_fingerprint(host), host.reserve, host.housekeeping_pus, tuple(domains), memory
