"""Planner: the ordinary planner for the hosts of a pool, run once for all equal hosts."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from msgspec import Struct, structs

from homenode.bdf import Bdf
from homenode.cluster.pool.answers import Answers
from homenode.cluster.pool.flavour import Flavour
from homenode.cluster.pool.model import Pool, PoolHost, passable_gpus
from homenode.cluster.pool.state import OTHERS, HostState, HostStates, holder
from homenode.errors import InputError
from homenode.machine.topology import LOCAL_DISTANCE, Host, with_certain_nodes
from homenode.plan.memory import overhead_bytes, reserve_bytes
from homenode.plan.placement import Placement
from homenode.plan.planner import as_placed
from homenode.plan.request import GuestRequest
from homenode.plan.search.place import place
from homenode.plan.shape.assemble import assemble
from homenode.plan.stored import domain_of_placement
from homenode.vm.gpu_parts import parts_at, same_profile
from homenode.vm.layout import MemoryBinding, Pinning
from homenode.vm.plan_model import Unplannable

POOL_TERM = "gpu_sets_lost"


class FillStep(Struct, frozen=True, kw_only=True):
    """A VM on a host: where the planner puts it, and the state after.

    nearness: class of device distance, packages, GPUs away from home. given: what gave way.
    after: the state then. gpus: how many whole GPUs it has.
    """

    placement: Placement
    after: HostState
    nearness: tuple[int, int, int]
    given: tuple[str, ...]
    gpus: int

    @property
    def terms(self) -> tuple[list[object], list[tuple[str, object]]]:
        """The cost: the VM's own terms, and from the GPU sets lost on those of the host by name,
        between which the pool's own stand."""
        terms = self.placement.concerns
        at = next((i for i, (name, _) in enumerate(terms) if name == POOL_TERM), len(terms))
        return [value for _, value in terms[:at]], terms[at:]


class Planner(HostStates):
    """Each state and flavour is asked once.

    Flavours are distinguished by identity of value: equal flavours share answers. answers: what an
    earlier command has worked out.
    """

    def __init__(self, pool: Pool, answers: Answers | None = None) -> None:
        super().__init__(pool)
        self.answers = answers
        self._buildable: dict[tuple[int, Flavour], bool] = {}
        self._steps: dict[tuple[HostState, Flavour], FillStep | None] = {}
        self._requests: dict[tuple[int, tuple[int | None, ...], Flavour], GuestRequest | None] = {}
        self._counts: dict[tuple[HostState, Flavour], tuple[int, int]] = {}
        self._amounts: dict[HostState, tuple[int, int]] = {}
        self._unfit: dict[tuple[int, Flavour], frozenset[Bdf]] = {}
        self.missing: dict[tuple[HostState, Flavour, Bdf], str | None] = {}
        """What a VM with a GPU lacks on the GPU's node, by state."""
        self.asked = 0

    @property
    def placements(self) -> int:
        """How many it keeps."""
        return len(self._steps)

    def request(self, state: HostState, flavour: Flavour) -> GuestRequest | None:
        """The request of the flavour on this kind of machine; None if the machine cannot have
        it."""
        key = (state.shape, tuple(size for size, _, _ in state.memory), flavour)
        if key not in self._requests:
            try:
                self._requests[key] = flavour.request(self.host(self.empty(state)))
            except InputError:
                self._requests[key] = None
        return self._requests[key]

    def step(self, state: HostState, flavour: Flavour) -> FillStep | None:
        """One more VM. The result is the same for all machines in an equal state, with
        interchangeable parts exchanged. None if the planner refuses it."""
        request = self.request(state, flavour)
        if request is None or not names_parts(request):
            state = self.canonical(state)
        return self.exact_step(state, flavour)

    def exact_step(self, state: HostState, flavour: Flavour) -> FillStep | None:
        """One VM more, on the nodes and GPUs that the planner chooses in this very state.

        First the planner is asked as if all memory were free: where it refuses then, or where the
        VM leaves more free memory than the host keeps, memory decides nothing, and machines that
        differ in free memory share the answer.
        """
        key = (state, flavour)
        if key not in self._steps:
            relaxed, request = self.with_all_memory(state), self.request(state, flavour)
            if relaxed == state or request is None or request.page_bytes is not None:
                self._steps[key] = self._asked(state, flavour)
            else:
                self._steps[key] = self._relaxed(state, flavour, self.exact_step(relaxed, flavour))
        return self._steps[key]

    def _relaxed(
        self, state: HostState, flavour: Flavour, found: FillStep | None
    ) -> FillStep | None:
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
        return structs.replace(found, after=self.known(replace(found.after, memory=tuple(memory))))

    def _asked(self, state: HostState, flavour: Flavour) -> FillStep | None:
        free = self.free_gpus(state)
        unfit = self.unfit(state.shape, flavour)
        if flavour.gpus > len(free - unfit):
            return None
        request = self.request(state, flavour)
        if request is None or _is_short_of_memory(state, request):
            return None
        if request.layout.pinning is not Pinning.NONE and request.vcpus > self._free_pus(state):
            return None
        host = self.host(state)
        hidden = tuple(sorted(free & unfit))
        if hidden:
            owned = tuple(sorted({*state.owned, *hidden}, key=str))
            host = self.host(self.known(replace(state, owned=owned)))
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

    def free_amounts(self, state: HostState) -> tuple[int, int]:
        """Free GPUs, and cores without vCPUs."""
        if state not in self._amounts:
            cores = sum(map(len, self.core_classes(state.shape)))
            cores -= sum([busy for busy, _ in state.cores])
            self._amounts[state] = len(self.free_gpus(state)), cores
        return self._amounts[state]

    def _free_pus(self, state: HostState) -> int:
        """PUs of cores without vCPUs: no fallback gives a VM more."""
        return sum(
            sum(map(len, members[busy:]))
            for members, (busy, _) in zip(self.core_classes(state.shape), state.cores, strict=True)
        )

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
        """GPUs of another model than the flavour asks for, and those of another profile."""
        key = (shape, flavour)
        if key not in self._unfit:
            host = self.pool.shapes[shape]
            self._unfit[key] = frozenset(
                gpu.bdf for gpu in passable_gpus(host) if not flavour.takes(gpu, host)
            )
        return self._unfit[key]

    def free_units(self, state: HostState, flavour: Flavour | None) -> dict[Bdf, int]:
        """Of each free GPU function that the flavour may take (None = any), what VMs can have of it
        at once: the parts of its profile that are mediated devices, else 1."""
        host, owned = self.pool.shapes[state.shape], set(state.owned)
        unfit = frozenset() if flavour is None else self.unfit(state.shape, flavour)
        profile = None if flavour is None else flavour.options.gpu_profile
        found = {}
        for gpu in sorted(self.free_gpus(state) - unfit):
            parts = [
                part
                for part in parts_at(host.device_at, gpu)
                if part.uuid not in owned and (profile is None or same_profile(part, profile))
            ]
            if parts or profile is None:
                found[gpu] = max(1, len(parts))
        return found

    def _after(self, state: HostState, request: GuestRequest, placement: Placement) -> HostState:
        domain = domain_of_placement(self.host(state), request, placement)
        return self.state_with(state, structs.replace(domain, name=OTHERS * 2))

    def is_clean(self, state: HostState, flavour: Flavour, step: FillStep) -> bool:
        """Whether the VM is as well placed as on the empty machine, with every GPU at home."""
        if step.nearness[2] or step.nearness[0] > LOCAL_DISTANCE:
            return False
        best = self.step(self.empty(state), flavour)
        if best is None:
            return True
        return step.nearness <= best.nearness and len(step.given) <= len(best.given)

    def counts(
        self,
        state: HostState,
        flavour: Flavour,
        certain: Callable[[HostState, Flavour], tuple[int, int] | None] | None = None,
    ) -> tuple[int, int]:
        """(VMs of the flavour that still fit with full locality, all that fit), placed one after
        the other. certain: the same of a state, where that needs no planner."""
        known = self.known_counts(state, flavour)
        if known is not None:
            return known
        found = self._counted_one_by_one(state, flavour, certain or (lambda *_: None))
        self._counts[state, flavour] = found
        if self.answers is not None:
            self.answers.stored.counts[self.digest(state, (flavour,))] = found
        return found

    def known_counts(self, state: HostState, flavour: Flavour) -> tuple[int, int] | None:
        """As `counts`, where it was worked out before."""
        known = self._counts.get((state, flavour))
        if known is None and self.answers is not None:
            known = self.answers.stored.counts.get(self.digest(state, (flavour,)))
            if known is not None:
                self._counts[state, flavour] = known
        return known

    def _counted_one_by_one(
        self,
        state: HostState,
        flavour: Flavour,
        certain: Callable[[HostState, Flavour], tuple[int, int] | None],
    ) -> tuple[int, int]:
        chain: list[tuple[tuple[HostState, Flavour], bool]] = []
        at = state
        while (key := (at, flavour)) not in self._counts:
            if (known := certain(at, flavour)) is not None:
                self._counts[key] = known
                break
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

    def digest(self, state: HostState, flavours: tuple[Flavour, ...]) -> str:
        """The key of an answer of an earlier command."""
        assert self.answers is not None
        shape = self.pool.shapes[state.shape]
        return self.answers.digest(shape, state, flavours)

    def _used(self, step: FillStep, flavour: Flavour) -> Iterator[tuple[int, int]]:
        """Of each node what a VM has of its memory, where all of it was free before, and what the
        host keeps there next to it."""
        request = self.request(step.after, flavour)
        assert request is not None, "a VM was placed"
        overhead = overhead_bytes(request)
        nodes = self.pool.shapes[step.after.shape].nodes
        for node, (size, free, _) in zip(nodes, step.after.memory, strict=True):
            known = size is not None and free is not None
            used = (size or 0) - (free or 0) if known else 0
            kept = reserve_bytes(request, structs.replace(node, memory_bytes=size)) if used else 0
            yield used, kept + overhead

    def real_host(self, one: PoolHost, flavour: Flavour) -> Host:
        """The machine as a VM of the flavour finds it: GPUs of other models count as in use."""
        host = self.pool.host(one)
        unfit = self.unfit(one.shape, flavour)
        if not unfit:
            return host
        others = structs.replace(holder(tuple(sorted(unfit)), (), 0), name="(of another kind)")
        return structs.replace(host, domains=(*host.domains, others))


def names_parts(request: GuestRequest) -> bool:
    """Whether the request names PUs, nodes or devices, or its GPUs bring some, so that others are
    not interchangeable with them."""
    return bool(
        request.devices
        or request.options.with_nics
        or request.options.with_nvswitches
        or request.options.explicit_cells
        or request.options.memory_nodes_allowed
        or request.options.reserved_pus
        or request.housekeeping_pus
        or request.options.emulator_pus is not None
    )


def _is_short_of_memory(state: HostState, request: GuestRequest) -> bool:
    """Whether all nodes together have less free memory than the VM needs; no fallback helps
    then."""
    layout = request.layout
    floats = layout.pinning is Pinning.NONE and layout.memory is MemoryBinding.AS_IT_WAS
    if floats or any(free is None for _, free, _ in state.memory):
        return False
    pools = [one for _, _, pools in state.memory if request.page_bytes is not None for one in pools]
    huge = sum(pool.page_bytes * pool.free_pages for pool in pools)
    return sum(free or 0 for _, free, _ in state.memory) + huge < request.memory_bytes


def step_of(placement: Placement, after: HostState, gpus: Iterable[Bdf]) -> FillStep:
    """The step of a placement."""
    cost = {term.name: term.value for term in placement.cost}

    def value(name: str) -> int:
        found = cost.get(name, 0)
        return found if isinstance(found, int) else 0

    return FillStep(
        placement=placement,
        after=after,
        nearness=(value("device_class"), value("packages_spanned"), value("gpus_away_from_home")),
        given=placement.given_up,
        gpus=len(set(placement.devices) & set(gpus)),
    )
