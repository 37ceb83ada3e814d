"""Pool: hosts as values. Equal machines share one Host and differ in a few numbers."""

from collections.abc import Collection, Iterable

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.check.doctor.links import link_health
from homenode.cluster.pool.rules import Availability, Rules
from homenode.gap import Gap
from homenode.indices import NodeIndex
from homenode.machine.pci import DeviceKind, PciDevice
from homenode.machine.topology import (
    DOMAIN_GAP,
    DOMAINS_GAP,
    Host,
    NumaNode,
    PagePool,
    RunningDomain,
)
from homenode.vm.fingerprint import host_fingerprint
from homenode.vm.gpu_parts import is_divided, parts_at


class VmIdentity(Struct, frozen=True):
    """Which VM it is: by its UUID, or by its name where one of two has no UUID."""

    name: str
    uuid: str | None = None

    @classmethod
    def of(cls, vm: RunningDomain) -> "VmIdentity":
        return cls(vm.name, vm.uuid)

    def is_of(self, vm: RunningDomain) -> bool:
        if self.uuid is not None and vm.uuid is not None:
            return self.uuid == vm.uuid
        return self.name == vm.name and not vm.has_pseudonym


class NodeMemoryState(Struct, frozen=True, kw_only=True):
    """The memory of a node on one machine; fields as in NumaNode."""

    memory_bytes: int | None
    memory_free_bytes: int | None
    page_pools: tuple[PagePool, ...]


class PoolHost(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One machine of a pool.

    shape: which of the pool's shapes it is. nodes: its memory, in the shape's order of nodes.
    domains: what runs there, and VMs that were placed there and have not started. source: where it
    was read. fault_domain: the rack, row or power feed that fails as one; None where none is named.
    lists_domains: False where libvirt did not say which VMs there are. availability, rules: as the
    pool's ledger has them; rules by the name of the VM, of those that have some.
    """

    name: str
    shape: int
    nodes: tuple[NodeMemoryState, ...]
    domains: tuple[RunningDomain, ...]
    source: str
    fault_domain: str | None = None
    lists_domains: bool = True
    availability: Availability = Availability.OPEN
    rules: tuple[tuple[str, Rules], ...] = ()

    @property
    def failure_domain(self) -> str:
        """Its fault domain; a host without one is its own."""
        return self.fault_domain or f"host {self.name}"

    @property
    def libvirt_uri(self) -> str:
        """The URI for virsh: the URI or ssh server that the host was read from; else its name."""
        if "://" in self.source:
            return self.source
        is_server = "/" not in self.source and ("@" in self.source or ":" in self.source)
        return f"qemu+ssh://{self.source if is_server else self.name}/system"


class PoolFailure(Struct, frozen=True):
    """A source of a pool that gave no host, and why."""

    source: str
    reason: str


class LostReservation(Struct, frozen=True):
    """A VM that counts nowhere, since the pool no longer has its host."""

    vm: str
    host: str


class Pool(Struct, frozen=True, kw_only=True):
    """Hosts, ascending by name. shapes: machines without name, memory and domains. lost: VMs that
    the pool's ledger has on other hosts."""

    shapes: tuple[Host, ...]
    hosts: tuple[PoolHost, ...]
    failures: tuple[PoolFailure, ...] = ()
    lost: tuple[LostReservation, ...] = ()

    def host(self, one: PoolHost) -> Host:
        """The whole host."""
        shape = self.shapes[one.shape]
        nodes = tuple(
            replace(
                node,
                memory_bytes=state.memory_bytes,
                memory_free_bytes=state.memory_free_bytes,
                page_pools=state.page_pools,
            )
            for node, state in zip(shape.nodes, one.nodes, strict=True)
        )
        return replace(shape, name=one.name, nodes=nodes, domains=one.domains)


class PoolVm(Struct, frozen=True, kw_only=True):
    """A VM of a host. state: "running", "placed" (it counts, and has not started), "shut off" (it
    does not count).

    nodes: those of its vCPUs' PUs and bound memory; None if a vCPU floats. gpus: its GPU functions.
    gpus_away: how many are on none of its nodes; None if a GPU's node is unknown.
    """

    name: str
    host: str
    state: str
    vcpus: int
    memory_bytes: int
    nodes: tuple[NodeIndex, ...] | None
    gpus: tuple[Bdf, ...]
    gpus_away: int | None
    mediated: tuple[str, ...]


class PoolVms(Struct, frozen=True):
    """The VMs of a pool, by host."""

    vms: tuple[PoolVm, ...]


def pool_vms(pool: Pool, hosts: Collection[str] = ()) -> PoolVms:
    """All VMs, or those of these hosts."""
    return PoolVms(
        tuple(
            _vm_of(pool.shapes[host.shape], host.name, vm)
            for host in pool.hosts
            if not hosts or host.name in hosts
            for vm in sorted(host.domains, key=lambda vm: natural_key(vm.name))
        )
    )


def _vm_of(shape: Host, host: str, vm: RunningDomain) -> PoolVm:
    nodes = None
    if vm.vcpu_pins and None not in vm.vcpu_pins:
        bits = 0
        for pin in vm.vcpu_pins:
            bits |= 0 if pin is None else pin.bits
        own = {node.index for node in shape.nodes if node.pus.bits & bits}
        nodes = tuple(sorted(own | {node for node, _ in vm.memory_by_node}))
    gpus = [gpu for gpu in shape.devices_of_kind(DeviceKind.GPU) if gpu.bdf in vm.devices]
    homes = [gpu.node for gpu in gpus]
    away = None
    if nodes is not None and None not in homes:
        away = sum(home not in nodes for home in homes)
    return PoolVm(
        name=vm.name,
        host=host,
        state="running" if vm.running else "placed" if vm.planned else "shut off",
        vcpus=len(vm.vcpu_pins),
        memory_bytes=vm.memory_bytes,
        nodes=nodes,
        gpus=tuple(gpu.bdf for gpu in gpus),
        gpus_away=away,
        mediated=vm.mediated,
    )


def passable_gpus(host: Host) -> tuple[PciDevice, ...]:
    """GPU functions that a VM can get: whole GPUs, and of divided GPUs the functions of parts that
    VFIO can give to a VM."""
    return tuple(
        gpu
        for gpu in host.devices_of_kind(DeviceKind.GPU)
        if (gpu.physical_function is None and not is_divided(gpu))
        or parts_at(host.device_at, gpu.bdf)
    )


def shape_of(host: Host) -> Host:
    """The host without what differs between equal machines: name, memory, domains, states of links
    and devices, and settings that do not change where a VM goes.

    Links are kept if one of them is broken: plans warn of it.
    """
    bare = _bare_device if not link_health(host) else lambda device: device
    return replace(
        host,
        name="",
        nodes=tuple(map(_bare_node, host.nodes)),
        domains=(),
        pci_devices=tuple(map(bare, host.pci_devices)),
        settings=replace(
            host.settings,
            governors=None,
            idle_exit_latency_us=None,
            pus_of_governor=None,
            pus_of_idle_latency_us=None,
            irqbalance=None,
        ),
        gaps=(),
    )


def _bare_node(node: NumaNode) -> NumaNode:
    return replace(node, memory_bytes=None, memory_free_bytes=None, page_pools=())


def _bare_device(device: PciDevice) -> PciDevice:
    return replace(
        device,
        link=None,
        driver=None,
        power_state=None,
        performance_state=None,
        errors=None,
        link_replays=None,
        interrupts=None,
        target_gt_per_s=None,
    )


class PoolBuilder:
    """Collects hosts into a pool; equal shapes are kept once."""

    def __init__(self) -> None:
        self._shapes: dict[str, list[int]] = {}  # by fingerprint
        self._kept: list[Host] = []
        self._hosts: list[PoolHost] = []
        self._failures: list[PoolFailure] = []
        self._sources: dict[str, str] = {}
        self.whole: dict[str, Host] = {}
        """Machines that were added as a whole, by name."""

    def add(
        self, host: Host, name: str, source: str, *, fault_domain: str | None = None
    ) -> PoolHost | None:
        """Add a machine. None if the pool has its name already, which becomes a failure."""
        added = self.add_known(
            PoolHost(
                name=name,
                shape=self.shape(shape_of(host)),
                nodes=tuple(
                    NodeMemoryState(
                        memory_bytes=node.memory_bytes,
                        memory_free_bytes=node.memory_free_bytes,
                        page_pools=node.page_pools,
                    )
                    for node in host.nodes
                ),
                domains=host.domains,
                source=source,
                fault_domain=fault_domain,
                lists_domains=not any(_hides_domains(gap) for gap in host.gaps),
            )
        )
        if added is not None:
            self.whole[name] = host
        return added

    def add_known(self, host: PoolHost) -> PoolHost | None:
        """The same for a machine whose shape has a number in this pool."""
        first = self._sources.get(host.name)
        if first is not None:
            self.fail(
                host.source,
                f"expected a name of its own for each host, found {host.name!r}, which is also the "
                f"name of {first}",
            )
            return None
        self._sources[host.name] = host.source
        self._hosts.append(host)
        return host

    def shape(self, shape: Host) -> int:
        """The number of a shape."""
        found = self._shapes.setdefault(host_fingerprint(shape), [])
        for number in found:
            if self._kept[number] == shape:
                return number
        self._kept.append(shape)
        found.append(len(self._kept) - 1)
        return found[-1]

    def shape_nodes(self, shape: int) -> tuple[NumaNode, ...]:
        """The nodes of a shape."""
        return self._kept[shape].nodes

    def fail(self, source: str, reason: str) -> None:
        """Add a source that gave no host. The reader's reason may begin with the source's name,
        which is removed."""
        for name in (source, f"ssh://{source}", source.rstrip("/").rpartition("/")[2]):
            reason = reason.removeprefix(f"{name}: ")
        self._failures.append(PoolFailure(source, reason))

    def pool(self) -> Pool:
        """What was collected."""
        return Pool(
            shapes=tuple(self._kept),
            hosts=tuple(sorted(self._hosts, key=lambda host: natural_key(host.name))),
            failures=tuple(self._failures),
        )


def _hides_domains(gap: Gap) -> bool:
    return gap.subject == DOMAINS_GAP or gap.subject.startswith(DOMAIN_GAP)


def natural_key(name: str) -> tuple[tuple[int, int | str], ...]:
    """Sorts gpu-2 before gpu-10.

    >>> sorted(["gpu-10", "gpu-2", "a"], key=natural_key)
    ['a', 'gpu-2', 'gpu-10']
    """
    parts: list[tuple[int, int | str]] = []
    for is_number, text in _runs(name):
        parts.append((0, int(text)) if is_number else (1, text))
    return tuple(parts)


def _runs(name: str) -> Iterable[tuple[bool, str]]:
    start = 0
    for at in range(1, len(name) + 1):
        digit = name[start] in "0123456789"
        if at == len(name) or (name[at] in "0123456789") != digit:
            yield digit, name[start:at]
            start = at
