"""HostState: what is allocated of a machine, so that machines that are alike are planned once.

Cores of one node, LLC and kind stand for each other, and so do pages of a node. Two machines of one
shape and one HostState get the same answers of the planner, up to which of these cores a VM has.
Free memory counts in steps of 64 MiB, downwards, since the sizes of equal machines differ by less.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.pci import DeviceKind
from homenode.plan.layout import MemoryBinding
from homenode.plan.model import Unplannable
from homenode.plan.placement import Placement
from homenode.plan.planner import as_placed
from homenode.plan.request import GuestRequest
from homenode.plan.search.allocations import allocations, other_domains
from homenode.plan.search.certain_nodes import with_certain_nodes
from homenode.plan.search.memory import free_memory, overhead_bytes, reserve_bytes
from homenode.plan.search.place import Inventory, place
from homenode.plan.shape.assemble import assemble
from homenode.plan.stored import domain_of_placement
from homenode.pool.flavour import Flavour
from homenode.pool.model import Pool, PoolHost, passable_gpus
from homenode.pool.symmetry import Symmetry, symmetry
from homenode.topology import LOCAL_DISTANCE, Host, NumaNode, PagePool, RunningDomain
from homenode.units import MIB

MEMORY_STEP_BYTES = 64 * MIB
OTHERS = "\0"
"""Name of the domain that stands for all others: none that libvirt takes."""


@dataclass(frozen=True, slots=True, eq=False)
class HostState:
    """What is allocated. cores: of each class of cores, how many have vCPUs, and how many have
    other threads only. owned: functions that VMs have. memory: of each node (bytes, free bytes,
    page pools). Its hash is kept: states are looked up far more often than made."""

    shape: int
    cores: tuple[tuple[int, int], ...]
    owned: tuple[Bdf, ...]
    memory: tuple[tuple[int | None, int | None, tuple[PagePool, ...]], ...]
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.shape, self.cores, self.owned, self.memory)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HostState):
            return NotImplemented
        return self is other or (
            self._hash == other._hash
            and self.cores == other.cores
            and self.memory == other.memory
            and self.owned == other.owned
            and self.shape == other.shape
        )


@dataclass(frozen=True, slots=True)
class Step:
    """A VM on a host: where the planner puts it, and the state after.

    nearness: class of device distance, packages, GPUs away from home. given: what gave way.
    after: the state then. gpus: how many whole GPUs it has.
    """

    placement: Placement
    after: HostState
    nearness: tuple[int, int, int]
    given: tuple[str, ...]
    gpus: int


@dataclass(frozen=True, slots=True)
class Run:
    """VMs placed one after the other. clean: those with full locality; number: all. free_gpus: how
    many are left. memory: of each node the bytes that must be free for it, the host's included."""

    clean: int
    number: int
    free_gpus: int
    memory: tuple[int, ...]


_RunKey = tuple[HostState, tuple[Flavour, ...], bool]


class Planner:
    """The ordinary planner for the hosts of a pool; each state and flavour is asked once.

    Flavours are distinguished by identity of value: equal flavours share answers.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._classes: dict[int, tuple[tuple[CpuSet, ...], ...]] = {}
        self._cores_of_vm: dict[tuple[object, ...], tuple[int, int] | None] = {}
        self._counted: dict[tuple[int, int, int], tuple[tuple[int, int], ...]] = {}
        self._buildable: dict[tuple[int, Flavour], bool] = {}
        self._gpus: dict[int, frozenset[Bdf]] = {}
        self._steps: dict[tuple[HostState, Flavour], Step | None] = {}
        self._hosts: dict[HostState, Host] = {}
        self._states: dict[HostState, HostState] = {}
        self._empty: dict[HostState, HostState] = {}
        self._requests: dict[tuple[int, tuple[int | None, ...], Flavour], GuestRequest | None] = {}
        self._counts: dict[tuple[HostState, Flavour], tuple[int, int]] = {}
        self._probe: dict[int, GuestRequest] = {}
        self._inventories: dict[int, Inventory] = {}
        self._symmetries: dict[int, Symmetry | None] = {}
        self._canonical: dict[HostState, tuple[HostState, tuple[int, ...]]] = {}
        self._whole: dict[HostState, HostState] = {}
        self._runs: dict[_RunKey, Run] = {}
        self.asked = 0

    # States

    def state(self, one: PoolHost, without: str | None = None) -> HostState:
        """The state of a machine. without: a VM there that frees its share."""
        host = self.pool.host(one)
        return self.state_of(one.shape, host, without)

    def state_without(self, one: PoolHost, left: tuple[RunningDomain, ...]) -> HostState:
        """The state of a machine with these VMs only. Ordinary memory that a running VM has
        touched counts as free again once it is gone."""
        host = self.pool.host(one)
        gone = [vm for vm in host.domains if vm not in left and vm.running]
        sizes: dict[int, int] = {}
        for vm in gone:
            for node, size in vm.memory_by_node if vm.page_bytes is None else ():
                sizes[node] = sizes.get(node, 0) + size
        nodes = tuple(
            node
            if node.memory_free_bytes is None
            else replace(node, memory_free_bytes=node.memory_free_bytes + sizes.get(node.index, 0))
            for node in host.nodes
        )
        return self.state_of(one.shape, replace(host, nodes=nodes, domains=left))

    def state_of(self, shape: int, host: Host, without: str | None = None) -> HostState:
        request = self.probe(shape)
        if without is not None:
            left = tuple(vm for vm in host.domains if vm.name != without)
            host = replace(host, domains=left)
        with_vcpus, service, devices = self._masks(shape, host, request)
        memory = tuple(_memory_of(host, request, node) for node in host.nodes)
        cores = self._core_counts(shape, with_vcpus, service)
        return self._known(HostState(shape, cores, tuple(sorted(devices)), memory))

    def _known(self, state: HostState) -> HostState:
        """The state that equals this one and was met first: one object is found soonest."""
        return self._states.setdefault(state, state)

    def _masks(
        self, shape: int, host: Host, request: GuestRequest
    ) -> tuple[int, int, frozenset[Bdf]]:
        """PUs of cores with vCPUs and of cores with other threads only, and devices in use.

        What each VM has of the host does not depend on the others, unless its vCPUs float over
        several cores: then all are looked at together.
        """
        with_vcpus, threads = 0, 0
        devices: set[Bdf] = set()
        for vm in other_domains(host, request):
            key = (shape, vm.vcpu_pins, vm.emulator_pus, vm.iothread_pus)
            if key not in self._cores_of_vm:
                alone = replace(self.pool.shapes[shape], domains=(vm,))
                own = allocations(alone, request)
                floats = any(pin is not None and len(pin) > 1 for pin in vm.vcpu_pins)
                self._cores_of_vm[key] = (
                    None if floats else (own.vcpu_cores.bits, own.service_cores.bits)
                )
            known = self._cores_of_vm[key]
            if known is None:
                others = allocations(host, request)
                owned = frozenset(bdf for bdf, _ in others.devices)
                return others.vcpu_cores.bits, others.service_cores.bits, owned
            with_vcpus |= known[0]
            threads |= known[1]
            devices.update(vm.devices)
        return with_vcpus, threads & ~with_vcpus, frozenset(devices)

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
            found = self._emptied(state, tuple((0, 0) for _ in state.cores), ())
            self._empty[state] = found
        return found

    def _emptied(
        self, state: HostState, cores: tuple[tuple[int, int], ...], owned: tuple[Bdf, ...]
    ) -> HostState:
        """With all memory free."""
        memory = tuple(
            (
                size,
                None if size is None else size - _pooled(pools),
                tuple(replace(pool, free_pages=pool.total_pages) for pool in pools),
            )
            for size, _, pools in state.memory
        )
        return self._known(HostState(state.shape, cores, owned, memory))

    def _with_all_memory(self, state: HostState) -> HostState:
        found = self._whole.get(state)
        if found is None:
            found = self._whole[state] = self._emptied(state, state.cores, state.owned)
        return found

    def canonical(self, state: HostState) -> HostState:
        """The form that all states have that are equal to this one but for parts of the machine
        that stand for each other."""
        return self._canonical_order(state)[0]

    def _canonical_order(self, state: HostState) -> tuple[HostState, tuple[int, ...]]:
        """The form, and for each of its nodes the node that it is in this state."""
        found = self._canonical.get(state)
        if found is None:
            form, nodes = self._form(state)
            found = self._canonical[state] = self._known(form), nodes
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
        """Cores that stand for each other, class by class; of each the PUs, ascending."""
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
        return self.gpus(state.shape) - set(state.owned)

    def host(self, state: HostState) -> Host:
        """A machine in that state: the first cores of each class are in use."""
        found = self._hosts.get(state)
        if found is None:
            shape = self.pool.shapes[state.shape]
            nodes = tuple(
                replace(node, memory_bytes=size, memory_free_bytes=free, page_pools=pools)
                for node, (size, free, pools) in zip(shape.nodes, state.memory, strict=True)
            )
            found = replace(shape, name="pool", nodes=nodes, domains=self._others(state))
            self._hosts[state] = found
        return found

    def real_host(self, one: PoolHost, flavour: Flavour) -> Host:
        """The machine itself, as a VM of the flavour finds it: GPUs of other models are in use."""
        host = self.pool.host(one)
        unfit = self.unfit(one.shape, flavour)
        if not unfit:
            return host
        return replace(host, domains=(*host.domains, _holder(tuple(sorted(unfit)), (), 0)))

    def _others(self, state: HostState) -> tuple[RunningDomain, ...]:
        pins: list[CpuSet] = []
        threads = 0
        for members, (busy, service) in zip(
            self.core_classes(state.shape), state.cores, strict=True
        ):
            pins += members[:busy]
            for core in members[busy : busy + service]:
                threads |= core.bits
        if not (pins or threads or state.owned):
            return ()
        return (_holder(state.owned, pins, threads),)

    # Answers

    def request(self, state: HostState, flavour: Flavour) -> GuestRequest | None:
        """The flavour on this kind of machine; None where it cannot be asked for there."""
        key = (state.shape, tuple(size for size, _, _ in state.memory), flavour)
        if key not in self._requests:
            try:
                self._requests[key] = flavour.request(self.host(self.empty(state)))
            except InputError:
                self._requests[key] = None
        return self._requests[key]

    def step(self, state: HostState, flavour: Flavour) -> Step | None:
        """One VM more, up to the parts of the machine that stand for each other; None where the
        planner refuses it."""
        request = self.request(state, flavour)
        if request is None or not names_parts(request):
            state = self.canonical(state)
        return self.exact_step(state, flavour)

    def exact_step(self, state: HostState, flavour: Flavour) -> Step | None:
        """One VM more, on the nodes and GPUs that the planner chooses in this very state.

        First the planner is asked as if all memory were free: where it refuses then, or where the
        VM leaves more free memory than the host keeps, memory decides nothing, and machines that
        differ in free memory share the answer.
        """
        key = (state, flavour)
        if key not in self._steps:
            relaxed = self._with_all_memory(state)
            if relaxed == state or any(pools for _, _, pools in state.memory):
                self._steps[key] = self._asked(state, flavour)
            else:
                self._steps[key] = self._relaxed(state, flavour, self.exact_step(relaxed, flavour))
        return self._steps[key]

    def _relaxed(self, state: HostState, flavour: Flavour, found: Step | None) -> Step | None:
        if found is None:
            return None
        memory = []
        for own, (used, kept) in zip(state.memory, self._used(found, flavour), strict=True):
            size, free, pools = own
            if used and free is not None:
                if free - used < kept:
                    return self._asked(state, flavour)
                free -= used
            memory.append((size, free, pools))
        return replace(found, after=self._known(replace(found.after, memory=tuple(memory))))

    def _asked(self, state: HostState, flavour: Flavour) -> Step | None:
        free = self.free_gpus(state)
        unfit = self.unfit(state.shape, flavour)
        if flavour.gpus > len(free - unfit):
            return None
        request = self.request(state, flavour)
        if request is None or _is_short_of_memory(state, request):
            return None
        host = self.host(state)
        hidden = tuple(sorted(free & unfit))
        if hidden:
            host = self.host(replace(state, owned=tuple(sorted({*state.owned, *hidden}))))
        self.asked += 1
        try:
            placement = place(
                with_certain_nodes(host), request, self.inventory(state.shape), brief=True
            )
            request = as_placed(request, placement)
            if not self._can_be_built(state.shape, flavour, host, request, placement):
                return None
            after = self._after(state, request, placement)
        except (Unplannable, InputError):
            return None
        return step_of(placement, after, self.gpus(state.shape))

    def _can_be_built(
        self, shape: int, flavour: Flavour, host: Host, request: GuestRequest, placement: Placement
    ) -> bool:
        """Whether a guest of this kind has a PCI tree and an address space; asked once a shape."""
        key = (shape, flavour)
        if key not in self._buildable:
            try:
                assemble(with_certain_nodes(host), request, placement)
            except (Unplannable, InputError):
                self._buildable[key] = False
            else:
                self._buildable[key] = True
        return self._buildable[key]

    def unfit(self, shape: int, flavour: Flavour) -> frozenset[Bdf]:
        """GPUs of another model than the flavour asks for."""
        if flavour.gpu_model is None:
            return frozenset()
        every = self.pool.shapes[shape].devices_of_kind(DeviceKind.GPU)
        return frozenset(gpu.bdf for gpu in every if not flavour.has_model(gpu))

    def _after(self, state: HostState, request: GuestRequest, placement: Placement) -> HostState:
        domain = domain_of_placement(self.host(state), request, placement)
        host = replace(
            self.host(state), domains=(*self._others(state), replace(domain, name=OTHERS * 2))
        )
        return self.state_of(state.shape, host)

    def is_clean(self, state: HostState, flavour: Flavour, step: Step) -> bool:
        """Whether the VM is as well placed as on the empty machine, with every GPU at home."""
        if step.nearness[2] or step.nearness[0] > LOCAL_DISTANCE:
            return False
        best = self.step(self.empty(state), flavour)
        if best is None:
            return True
        return step.nearness <= best.nearness and len(step.given) <= len(best.given)

    def counts(self, state: HostState, flavour: Flavour) -> tuple[int, int]:
        """(how many VMs of the flavour still fit with full locality, how many in all), placed one
        after the other."""
        run = self.run(state, (flavour,))
        if run is not None:
            return run.clean, run.number
        chain: list[tuple[tuple[HostState, Flavour], bool]] = []
        at = state
        while (key := (at, flavour)) not in self._counts:
            step = self.step(at, flavour)
            if step is None:
                self._counts[key] = (0, 0)
                break
            chain.append((key, self.is_clean(at, flavour, step)))
            at = step.after
        clean, number = self._counts[key]
        for key, is_clean in reversed(chain):
            clean, number = clean + is_clean, number + 1
            self._counts[key] = (clean, number)
        return clean, number

    def run(
        self, state: HostState, flavours: tuple[Flavour, ...], *, only_clean: bool = False
    ) -> "Run | None":
        """VMs of the first flavour until none fits, then of the next, as if the whole memory of
        each node were free; None where it matters that it is not.

        only_clean: a flavour ends with the first VM of less than full locality.
        """
        requests = [self.request(state, flavour) for flavour in flavours]
        if any(one is not None and names_parts(one) for one in requests):
            return None
        if any(pools for _, _, pools in state.memory):
            return None
        form, nodes = self._canonical_order(self._with_all_memory(state))
        run = self._run(form, flavours, only_clean=only_clean)
        for needed, node in zip(run.memory, nodes, strict=True):
            free = state.memory[node][1]
            if needed and free is not None and free < needed:
                return None
        return run

    def _run(self, form: HostState, flavours: tuple[Flavour, ...], *, only_clean: bool) -> "Run":
        chain: list[tuple[_RunKey, Step | None, bool, tuple[int, ...], Flavour]] = []
        at = form
        while (key := (at, flavours, only_clean)) not in self._runs:
            flavour = flavours[0]
            step = self.exact_step(at, flavour)
            clean = step is not None and self.is_clean(at, flavour, step)
            if step is None or (only_clean and not clean):
                if len(flavours) == 1:
                    free = len(self.free_gpus(at))
                    self._runs[key] = Run(0, 0, free, tuple(0 for _ in at.memory))
                    break
                chain.append((key, None, False, (), flavour))
                flavours = flavours[1:]
            else:
                at, nodes = self._canonical_order(self._with_all_memory(step.after))
                chain.append((key, step, clean, nodes, flavour))
        run = self._runs[key]
        for key, step, clean, nodes, flavour in reversed(chain):
            if step is not None:
                memory = list(run.memory)
                for needed, node in zip(run.memory, nodes, strict=True):
                    memory[node] = needed
                memory = [
                    max(used + needed, used + kept) if used else needed
                    for needed, (used, kept) in zip(memory, self._used(step, flavour), strict=True)
                ]
                run = Run(run.clean + clean, run.number + 1, run.free_gpus, tuple(memory))
            self._runs[key] = run
        return run

    def _used(self, step: Step, flavour: Flavour) -> Iterator[tuple[int, int]]:
        """Of each node what a VM has of its memory, where all of it was free before, and what the
        host keeps there next to it."""
        request = self.request(step.after, flavour)
        assert request is not None, "a VM was placed"
        overhead = overhead_bytes(request)
        nodes = self.pool.shapes[step.after.shape].nodes
        for node, (size, free, _) in zip(nodes, step.after.memory, strict=True):
            known = size is not None and free is not None
            used = (size or 0) - (free or 0) if known else 0
            kept = reserve_bytes(request, replace(node, memory_bytes=size)) if used else 0
            yield used, kept + overhead

    def probe(self, shape: int) -> GuestRequest:
        if shape not in self._probe:
            self._probe[shape] = Flavour("\0\0\0", 0, 1, MEMORY_STEP_BYTES).request(
                self.pool.shapes[shape]
            )
        return self._probe[shape]


def names_parts(request: GuestRequest) -> bool:
    """Whether the request names PUs, nodes or devices, which others cannot stand for."""
    return bool(
        request.devices
        or request.explicit_cells
        or request.memory_nodes_allowed
        or request.reserved_pus
        or request.housekeeping_pus
        or request.emulator_pus is not None
    )


def _is_short_of_memory(state: HostState, request: GuestRequest) -> bool:
    """Whether all nodes together have less free memory than the VM, which no fallback cures."""
    if request.layout.memory is MemoryBinding.AS_IT_WAS or request.page_bytes is not None:
        return False
    free = [free for _, free, _ in state.memory if free is not None]
    return len(free) == len(state.memory) and sum(free) < request.memory_bytes


def _holder(devices: tuple[Bdf, ...], cores: Sequence[CpuSet], threads: int) -> RunningDomain:
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
        devices=devices,
    )


def step_of(placement: Placement, after: HostState, gpus: Iterable[Bdf]) -> Step:
    """The step of a placement."""
    cost = {term.name: term.value for term in placement.cost}

    def value(name: str) -> int:
        found = cost.get(name, 0)
        return found if isinstance(found, int) else 0

    return Step(
        placement,
        after,
        (value("device_class"), value("packages_spanned"), value("gpus_away_from_home")),
        placement.concessions,
        len(set(placement.devices) & set(gpus)),
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
    return _stepped(node.memory_bytes), _stepped(free), tuple(pools)


def _pooled(pools: Sequence[PagePool]) -> int:
    return sum(pool.page_bytes * pool.total_pages for pool in pools)


def _stepped(size: int | None) -> int | None:
    return None if size is None else size // MEMORY_STEP_BYTES * MEMORY_STEP_BYTES
