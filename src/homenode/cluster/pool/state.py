"""HostState: what is allocated of a machine, so that equal machines are planned once.

Cores of one node, LLC and kind are interchangeable, and so are pages of a node. The planner's
answers for two machines of one shape and one HostState differ only in which of these cores a VM
gets. Free memory is rounded down to 64 MiB, since the sizes of equal machines differ by less.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cluster.pool.flavour import DEFAULT_LAYOUT, Flavour
from homenode.cluster.pool.model import (
    NodeMemoryState,
    Pool,
    PoolHost,
    VmIdentity,
    passable_gpus,
)
from homenode.cluster.pool.symmetry import Symmetry, symmetry
from homenode.cpuset import CpuSet
from homenode.indices import NodeIndex
from homenode.machine.topology import Host, NumaNode, PagePool, RunningDomain, with_certain_nodes
from homenode.plan.allocations import allocations, other_domains
from homenode.plan.memory import free_memory
from homenode.plan.request import GuestRequest
from homenode.plan.search.place import Inventory
from homenode.units import MIB
from homenode.vm.gpu_parts import functions_of_parts
from homenode.vm.plan_options import PlanOptions

MEMORY_STEP_BYTES = 64 * MIB
_MOST_HOSTS = 64
"""Kept at once: each has tables of its own."""

OTHERS = "\0"
"""Name of the domain that stands for all others: none that libvirt takes."""


@dataclass(frozen=True, slots=True, eq=False)
class HostState:
    """What is allocated. cores: for each class of cores, how many have vCPUs, and how many have
    other threads only. owned: functions that VMs have, and UUIDs of mediated devices. memory:
    (bytes, free bytes, page pools) of each node. Each is made once (`HostStates.known`), so that it
    equals itself alone: states are looked up far more often than made."""

    shape: int
    cores: tuple[tuple[int, int], ...]
    owned: tuple[Bdf | str, ...]
    memory: tuple[tuple[int | None, int | None, tuple[PagePool, ...]], ...]


class HostStates:
    """The states of a pool's hosts, and a host that represents each; each is made once."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._classes: dict[int, tuple[tuple[CpuSet, ...], ...]] = {}
        self._cores_of_vm: dict[tuple[object, ...], tuple[int, int] | None] = {}
        self._counted: dict[tuple[int, int, int], tuple[tuple[int, int], ...]] = {}
        self._gpus: dict[int, frozenset[Bdf]] = {}
        self._uuids: dict[int, dict[Bdf, frozenset[str]]] = {}
        self._hosts: dict[HostState, Host] = {}
        self._states: dict[tuple[object, ...], HostState] = {}
        self._empty: dict[HostState, HostState] = {}
        self._probe: dict[int, GuestRequest] = {}
        self._inventories: dict[int, Inventory] = {}
        self._symmetries: dict[int, Symmetry | None] = {}
        self._canonical: dict[HostState, tuple[HostState, tuple[int, ...]]] = {}
        self._whole: dict[HostState, HostState] = {}

    def state(self, one: PoolHost, without: VmIdentity | None = None) -> HostState:
        """The state of a machine. without: a VM there that frees its share."""
        host = self.pool.host(one)
        return self.state_of(one.shape, host, without)

    def host_without(self, one: PoolHost, gone: Collection[str]) -> PoolHost:
        """The machine once these VMs have gone. The memory of those that ran is free again."""
        return host_without(self.pool.shapes[one.shape].nodes, one, gone)

    def state_of(self, shape: int, host: Host, without: VmIdentity | None = None) -> HostState:
        request = self.probe(shape)
        if without is not None:
            left = tuple(vm for vm in host.domains if not without.is_of(vm))
            host = structs.replace(host, domains=left)
        with_vcpus, service, devices = self._masks(shape, host, request)
        memory = tuple(_memory_of(host, request, node) for node in host.nodes)
        cores = self._core_counts(shape, with_vcpus, service)
        return self.known(HostState(shape, cores, tuple(sorted(devices, key=str)), memory))

    def known(self, state: HostState) -> HostState:
        """The one state with these values."""
        values = state.shape, state.cores, state.owned, state.memory
        return self._states.setdefault(values, state)

    def _masks(
        self, shape: int, host: Host, request: GuestRequest
    ) -> tuple[int, int, frozenset[Bdf | str]]:
        """PUs of cores with vCPUs, PUs of cores with other threads only, and devices in use.

        What a VM has does not depend on other VMs, unless its vCPUs float over several cores; then
        all VMs are examined together.
        """
        with_vcpus, threads = 0, 0
        devices: set[Bdf | str] = set()
        for vm in other_domains(host, request):
            known = self._own_masks(shape, vm, request)
            if known is None:
                others = allocations(host, request)
                devices = {bdf for bdf, _ in others.devices}
                devices |= {uuid for uuid, _ in others.mediated}
                return others.vcpu_cores.bits, others.service_cores.bits, frozenset(devices)
            with_vcpus |= known[0]
            threads |= known[1]
            devices.update(vm.devices, vm.mediated)
        return with_vcpus, threads & ~with_vcpus, frozenset(devices)

    def _own_masks(
        self, shape: int, vm: RunningDomain, request: GuestRequest
    ) -> tuple[int, int] | None:
        """What one VM has; None where its vCPUs float over several cores."""
        key = (shape, vm.vcpu_pins, vm.emulator_pus, vm.iothread_pus)
        if key not in self._cores_of_vm:
            own = allocations(structs.replace(self.pool.shapes[shape], domains=(vm,)), request)
            floats = any(pin is not None and len(pin) > 1 for pin in vm.vcpu_pins)
            self._cores_of_vm[key] = (
                None if floats else (own.vcpu_cores.bits, own.service_cores.bits)
            )
        return self._cores_of_vm[key]

    def state_with(self, state: HostState, vm: RunningDomain) -> HostState:
        """The state once the VM has arrived on a machine in this state."""
        host, request = self.host(state), self.probe(state.shape)
        host = structs.replace(host, domains=(*host.domains, vm))
        known = self._own_masks(state.shape, vm, request)
        if known is None:
            return self.state_of(state.shape, host)
        pins, service = self._in_use(state)
        with_vcpus = known[0]
        for core in pins:
            with_vcpus |= core.bits
        cores = self._core_counts(state.shape, with_vcpus, (service | known[1]) & ~with_vcpus)
        owned = tuple(sorted({*state.owned, *vm.devices, *vm.mediated}, key=str))
        memory = tuple(_memory_of(host, request, node) for node in host.nodes)
        return self.known(HostState(state.shape, cores, owned, memory))

    def _core_counts(
        self, shape: int, with_vcpus: int, service: int
    ) -> tuple[tuple[int, int], ...]:
        """Of each class of cores, how many have vCPUs and how many have other threads only."""
        key = (shape, with_vcpus, service)
        if key not in self._counted:
            self._counted[key] = tuple(
                (
                    sum(bool(core.bits & with_vcpus) for core in members),
                    sum(bool(core.bits & service) for core in members),
                )
                for members in self.core_classes(shape)
            )
        return self._counted[key]

    def empty(self, state: HostState) -> HostState:
        """The state of the same machine with no VM on it."""
        found = self._empty.get(state)
        if found is None:
            cores = tuple((0, 0) for _ in state.cores)
            memory = tuple(
                (
                    size,
                    None if size is None else size - _pooled(pools),
                    tuple(structs.replace(pool, free_pages=pool.total_pages) for pool in pools),
                )
                for size, _, pools in state.memory
            )
            found = self._empty[state] = self.known(HostState(state.shape, cores, (), memory))
        return found

    def with_all_memory(self, state: HostState) -> HostState:
        """The state with the same VMs on the same cores, all memory free and no huge pages."""
        found = self._whole.get(state)
        if found is None:
            memory = tuple((size, size, ()) for size, _, _ in state.memory)
            found = self._whole[state] = self.known(
                HostState(state.shape, state.cores, state.owned, memory)
            )
        return found

    def with_one_node(self, state: HostState, node: NodeIndex, gpu: Bdf) -> HostState:
        """The state in which only this node's cores and memory are allocated as here, and all GPUs
        except one are in use."""
        host = self.pool.shapes[state.shape]
        here = next(one.pus.bits for one in host.nodes if one.index == node)
        cores = tuple(
            allocated if members[0].bits & here else (0, 0)
            for members, allocated in zip(self.core_classes(state.shape), state.cores, strict=True)
        )
        memory = tuple(
            own if one.index == node else whole
            for one, own, whole in zip(
                host.nodes, state.memory, self.empty(state).memory, strict=True
            )
        )
        owned = tuple(sorted(self.gpus(state.shape) - {gpu}, key=str))
        return self.known(HostState(state.shape, cores, owned, memory))

    def canonical(self, state: HostState) -> HostState:
        """The form that this state shares with all states that differ only in interchangeable
        parts."""
        return self.canonical_order(state)[0]

    def canonical_order(self, state: HostState) -> tuple[HostState, tuple[int, ...]]:
        """The canonical form, and for each of its nodes the node in this state."""
        found = self._canonical.get(state)
        if found is None:
            form, nodes = self._form(state)
            found = self._canonical[state] = self.known(form), nodes
        return found

    def _form(self, state: HostState) -> tuple[HostState, tuple[int, ...]]:
        shape = state.shape
        if shape not in self._symmetries:
            self._symmetries[shape] = symmetry(
                self.inventory(shape).devices,
                passable_gpus(self.pool.shapes[shape]),
                self.core_classes(shape),
            )
        rule = self._symmetries[shape]
        counts = None if rule is None else rule.counts(state.owned)
        if rule is None or counts is None:
            return state, tuple(range(len(state.memory)))

        def order(form: tuple[object, object, tuple[int, ...]]) -> tuple[object, ...]:
            memory = [state.memory[node] for node in form[2]]
            sizes = [(size or -1, -1 if free is None else free) for size, free, _ in memory]
            return form[0], form[1], sizes, [repr(pools) for _, _, pools in memory]

        cores, gpus, nodes = min(rule.forms(state.cores, counts), key=order)
        memory = tuple([state.memory[node] for node in nodes])
        return HostState(shape, cores, rule.owned(gpus), memory), nodes

    def inventory(self, shape: int) -> Inventory:
        """What no VM changes on machines of a shape."""
        if shape not in self._inventories:
            self._inventories[shape] = Inventory(with_certain_nodes(self.pool.shapes[shape]))
        return self._inventories[shape]

    def core_classes(self, shape: int) -> tuple[tuple[CpuSet, ...], ...]:
        """Interchangeable cores, class by class: the PUs of each, ascending."""
        if shape not in self._classes:
            host = self.pool.shapes[shape]
            by_index = {pu.index: pu for pu in host.pus}
            classes: dict[tuple[object, ...], list[CpuSet]] = {}
            for core in host.cores:
                pus = [by_index[pu] for pu in core.pus]
                key = (
                    core.kind,
                    core.id.package,
                    tuple(
                        (pu.node, pu.llc, pu.online, pu.allowed, pu.isolated, pu.nohz_full)
                        for pu in pus
                    ),
                )
                classes.setdefault(key, []).append(core.pus)
            self._classes[shape] = tuple(tuple(members) for members in classes.values())
        return self._classes[shape]

    def gpus(self, shape: int) -> frozenset[Bdf]:
        """GPUs of a shape that VMs can get."""
        if shape not in self._gpus:
            every = passable_gpus(self.pool.shapes[shape])
            self._gpus[shape] = frozenset(gpu.bdf for gpu in every)
        return self._gpus[shape]

    def free_gpus(self, state: HostState) -> frozenset[Bdf]:
        owned = set(state.owned)
        free = self.gpus(state.shape) - owned
        used_up = {gpu for gpu, uuids in self._mediated(state.shape).items() if uuids <= owned}
        return free - used_up

    def _mediated(self, shape: int) -> dict[Bdf, frozenset[str]]:
        """UUIDs of the mediated devices of each function that has some."""
        if shape not in self._uuids:
            found: dict[Bdf, set[str]] = {}
            for uuid, gpu in functions_of_parts(self.pool.shapes[shape]).items():
                found.setdefault(gpu, set()).add(uuid)
            self._uuids[shape] = {gpu: frozenset(uuids) for gpu, uuids in found.items()}
        return self._uuids[shape]

    def host(self, state: HostState) -> Host:
        """A machine in this state: the first cores of each class are in use."""
        found = self._hosts.get(state)
        if found is None:
            shape = self.pool.shapes[state.shape]
            nodes = tuple(
                structs.replace(node, memory_bytes=size, memory_free_bytes=free, page_pools=pools)
                for node, (size, free, pools) in zip(shape.nodes, state.memory, strict=True)
            )
            found = structs.replace(shape, name="pool", nodes=nodes, domains=self.others(state))
            if len(self._hosts) >= _MOST_HOSTS:
                self._hosts.clear()
            self._hosts[state] = found
        return found

    def others(self, state: HostState) -> tuple[RunningDomain, ...]:
        """A domain that has everything that is allocated, if anything is."""
        pins, threads = self._in_use(state)
        if not (pins or threads or state.owned):
            return ()
        return (holder(state.owned, pins, threads),)

    def _in_use(self, state: HostState) -> tuple[list[CpuSet], int]:
        """Cores with vCPUs, and PUs of cores with other threads only: the first of each class."""
        pins: list[CpuSet] = []
        threads = 0
        for members, (busy, service) in zip(
            self.core_classes(state.shape), state.cores, strict=True
        ):
            pins += members[:busy]
            for core in members[busy : busy + service]:
                threads |= core.bits
        return pins, threads

    def probe(self, shape: int) -> GuestRequest:
        if shape not in self._probe:
            options = PlanOptions(DEFAULT_LAYOUT, vcpus=1, memory_bytes=MEMORY_STEP_BYTES)
            probe = Flavour(name="\0\0\0", options=options)
            self._probe[shape] = probe.request(self.pool.shapes[shape])
        return self._probe[shape]


def holder(owned: tuple[Bdf | str, ...], cores: Sequence[CpuSet], threads: int) -> RunningDomain:
    """A domain that has these devices, cores for vCPUs, and PUs for other threads."""
    return RunningDomain(
        name=OTHERS,
        running=True,
        # A PU of each core: a pin to several is a vCPU that floats over them.
        vcpu_pins=tuple(CpuSet.from_bits(core.bits & -core.bits) for core in cores),
        emulator_pus=CpuSet.from_bits(threads) if threads else None,
        iothread_pus=(),
        memory_bytes=0,
        memory_bound=True,
        memory_by_node=(),
        page_bytes=None,
        devices=tuple(one for one in owned if isinstance(one, Bdf)),
        mediated=tuple(one for one in owned if not isinstance(one, Bdf)),
    )


def _memory_of(
    host: Host, request: GuestRequest, node: NumaNode
) -> tuple[int | None, int | None, tuple[PagePool, ...]]:
    free, _ = free_memory(host, request, node, MEMORY_STEP_BYTES)
    pools = []
    for pool in node.page_pools:
        huge = replace(request, page_bytes=pool.page_bytes)
        pages = free_memory(host, huge, node, pool.page_bytes)[1]
        pools.append(PagePool(pool.page_bytes, pool.total_pages, pages))
    free = None if free is None else max(0, free)
    return _stepped(node.memory_bytes), _stepped(free), tuple(pools)


def host_without(nodes: Sequence[NumaNode], one: PoolHost, gone: Collection[str]) -> PoolHost:
    """The same. nodes: of its shape."""
    freed: Counter[tuple[int, int | None]] = Counter()
    for vm in one.domains:
        for node, size in vm.memory_by_node if vm.running and vm.name in gone else ():
            freed[node, vm.page_bytes] += size
    return structs.replace(
        one,
        nodes=tuple(
            _with_freed(state, node.index, freed)
            for node, state in zip(nodes, one.nodes, strict=True)
        ),
        domains=tuple(vm for vm in one.domains if vm.name not in gone),
        rules=tuple(rules for rules in one.rules if rules[0] not in gone),
    )


def _with_freed(
    state: NodeMemoryState, node: NodeIndex, freed: Mapping[tuple[int, int | None], int]
) -> NodeMemoryState:
    """The memory of a node once so many bytes of each page size are free again."""
    pools = tuple(
        structs.replace(
            pool,
            free_pages=min(
                pool.total_pages,
                pool.free_pages + freed.get((node, pool.page_bytes), 0) // pool.page_bytes,
            ),
        )
        for pool in state.page_pools
    )
    free = state.memory_free_bytes
    if free is not None:
        free += freed.get((node, None), 0)
        if state.memory_bytes is not None:
            free = min(free, state.memory_bytes - _pooled(pools))
    return NodeMemoryState(
        memory_bytes=state.memory_bytes, memory_free_bytes=free, page_pools=pools
    )


def _pooled(pools: Sequence[PagePool]) -> int:
    return sum(pool.page_bytes * pool.total_pages for pool in pools)


def _stepped(size: int | None) -> int | None:
    return None if size is None else size // MEMORY_STEP_BYTES * MEMORY_STEP_BYTES
