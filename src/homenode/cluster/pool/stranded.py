"""Stranded GPUs: those that no combination of VMs with full locality can use on a host."""

from collections.abc import Callable, Sequence

from msgspec import Struct, structs
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cluster.pool.bounds import Bounds
from homenode.cluster.pool.flavour import Flavour
from homenode.cluster.pool.planner import Planner
from homenode.cluster.pool.state import HostState
from homenode.errors import InputError
from homenode.indices import NodeIndex
from homenode.plan.search.ladder import Concession
from homenode.plan.search.place import place
from homenode.vm.plan_model import Unplannable
from homenode.vm.plan_options import DeviceLocality

MOST_TRIED = 100
"""VMs that are placed in search of a better combination, once the simple orders were tried."""

_OF_MEMORY = {
    Concession.HOST_MEMORY,
    Concession.UNEVEN_MEMORY,
    Concession.MEMORY_ELSEWHERE,
}


class StrandedGpus(Struct, frozen=True):
    """Free GPUs that no combination of flavours can use with full locality. missing: the resource
    that they lack: cores, memory, pages, gpus (too few together), or another constraint of the
    planner."""

    missing: str
    gpus: tuple[Bdf, ...]


class StrandedSearch:
    """Finds them on the hosts of a pool, by state."""

    def __init__(self, planner: Planner, flavours: Sequence[Flavour]) -> None:
        self._planner = planner
        self._flavours = tuple(flavours)
        self._with_gpus = tuple(
            sorted((one for one in flavours if one.gpus), key=lambda one: (-one.gpus, one.name))
        )
        self.bounds = Bounds(planner, self._with_gpus)

    def of(self, state: HostState) -> tuple[StrandedGpus, ...]:
        """The stranded GPUs. The host is filled with the largest flavours first, then with each
        flavour first; where GPUs are left that may be usable, other orders are tried too."""
        answers = self._planner.answers
        if answers is None:
            return self._find(state)
        known = answers.stored.stranded
        digest = self._planner.digest(state, self._flavours)
        free = {str(gpu): gpu for gpu in self._planner.free_gpus(state)}
        answer = known.get(digest)
        if answer is None or any(gpu not in free for _, gpus in answer for gpu in gpus):
            found = self._find(state)
            known[digest] = tuple((one.missing, tuple(map(str, one.gpus))) for one in found)
            return found
        return tuple(
            StrandedGpus(missing, tuple(free[gpu] for gpu in gpus)) for missing, gpus in answer
        )

    def _find(self, state: HostState) -> tuple[StrandedGpus, ...]:
        planner, sizes = self._planner, self._with_gpus
        left = planner.free_gpus(state)
        if not left or not sizes:
            return ()
        known = self.certain(state, left)
        if known is not None:
            return known
        orders = [sizes, *((first, *sizes) for first in reversed(sizes))]
        full = state
        for order in orders:
            at = state
            for flavour in order:
                while (after := self._after(at, flavour)) is not None:
                    at = after
            if len(planner.free_gpus(at)) < len(planner.free_gpus(full)):
                full = at
            if not planner.free_gpus(full):
                return ()
        full = _Filling(self._after, planner, self.bounds, sizes, full).of(state)
        left = planner.free_gpus(full)
        by_missing: dict[str, list[Bdf]] = {}
        for gpu in sorted(left):
            missing = _missing(planner, full, sizes[-1], gpu, len(left))
            by_missing.setdefault(missing, []).append(gpu)
        return tuple(StrandedGpus(name, tuple(gpus)) for name, gpus in sorted(by_missing.items()))

    def certain(self, state: HostState, free: frozenset[Bdf]) -> tuple[StrandedGpus, ...] | None:
        """The stranded GPUs where VMs of one flavour are known to use as many GPUs as any
        combination could: the last of each node, with what a VM of the smallest flavour lacks
        there. None where the planner is to be asked."""
        uses = [((self.bounds.certain(state, one) or 0) * one.gpus, one) for one in self._with_gpus]
        used, best = max(uses, key=lambda one: one[0])
        if used == len(free):
            return ()
        smallest = self._with_gpus[-1]
        own, needs = self.bounds.by_node(state, best), self.bounds.needs(state, smallest)
        if own is None or needs is None or used < self.bounds.most_gpus(state):
            return None
        homes, by_missing = self.bounds.homes(state.shape), dict[str, list[Bdf]]()
        for node, (number, left) in enumerate(own):
            there = sorted(gpu for gpu in free if homes[gpu] == node)[number * best.gpus :]
            if not there:
                continue
            if needs.gpus > len(free) - used:
                missing = "gpus"
            elif needs.gpus > 1 or self._planner.unfit(state.shape, smallest):
                return None
            elif left.cores < needs.cores:
                missing = "cores"
            elif left.memory_bytes < needs.memory_bytes:
                missing = "memory"
            else:
                return None
            by_missing.setdefault(missing, []).extend(there)
        return tuple(StrandedGpus(name, tuple(gpus)) for name, gpus in sorted(by_missing.items()))

    def _after(self, state: HostState, flavour: Flavour) -> HostState | None:
        """The state with one more VM; None where that does not have full locality."""
        step = self._planner.exact_step(state, flavour)
        is_clean = step is not None and self._planner.is_clean(state, flavour, step)
        return step.after if step is not None and is_clean else None


class _Filling:
    """The search for VMs that leave fewer GPUs free than those of `best`, in any order of flavours,
    while that is still possible."""

    def __init__(
        self,
        after: Callable[[HostState, Flavour], HostState | None],
        planner: Planner,
        bounds: Bounds,
        flavours: Sequence[Flavour],
        best: HostState,
    ) -> None:
        self._after, self._planner, self.bounds = after, planner, bounds
        self._flavours, self._best = flavours, best
        self._left = len(planner.free_gpus(best))
        self._seen: set[HostState] = set()
        self._tried = 0

    def of(self, state: HostState) -> HostState:
        """The state that leaves the fewest GPUs free."""
        self._try(state)
        return self._best

    def _try(self, state: HostState) -> None:
        left = len(self._planner.free_gpus(state))
        if left < self._left:
            self._best, self._left = state, left
        form = self._planner.canonical(state)
        if form in self._seen or left - self.bounds.most_gpus(state) >= self._left:
            return
        self._seen.add(form)
        for flavour in self._flavours:
            if self._tried >= MOST_TRIED:
                return
            self._tried += 1
            after = self._after(state, flavour)
            if after is not None:
                self._try(after)


def _missing(planner: Planner, state: HostState, flavour: Flavour, gpu: Bdf, left: int) -> str:
    """The resource that a VM of the flavour with this GPU lacks on the GPU's node."""
    if flavour.gpus > left:
        return "gpus"
    if gpu in planner.unfit(state.shape, flavour):
        return "flavour"
    device = planner.host(state).device(gpu)
    home = None if device is None else device.node
    if home is None or planner.host(state).node(home) is None:
        return "gpu-node"
    if flavour.gpus == 1:
        # Other nodes do not matter then: hosts that are alike on this node share the answer.
        state = planner.with_one_node(state, home, gpu)
        with_memory = planner.with_all_memory(state)
        found = _missing_at(planner, with_memory, flavour, gpu, home)
        if found is not None:
            return found
        if not any(pools for _, _, pools in state.memory):
            return "memory"
    return _missing_at(planner, state, flavour, gpu, home) or "cores"


def _missing_at(
    planner: Planner, state: HostState, flavour: Flavour, gpu: Bdf, home: NodeIndex
) -> str | None:
    """The same for exactly this state; None where nothing is missing."""
    key = (state, flavour, gpu)
    if key not in planner.missing:
        planner.missing[key] = _first_missing(planner, state, flavour, gpu, home)
    return planner.missing[key]


def _first_missing(
    planner: Planner, state: HostState, flavour: Flavour, gpu: Bdf, home: NodeIndex
) -> str | None:
    request = planner.request(state, flavour)
    if request is None:
        return "flavour"
    options = structs.replace(
        request.options,
        gpu_count=(flavour.gpus - 1) or None,
        max_nodes=request.options.max_nodes or 1,
        device_locality=DeviceLocality.REQUIRE,
    )
    asked = replace(request, devices=(gpu,), options=options)
    try:
        found = place(planner.host(state), asked)
    except InputError:
        return "flavour"
    except Unplannable as refused:
        own = [one.constraint for one in refused.rejections if home in one.nodes]
        every = own or [one.constraint for one in refused.rejections]
        return every[0] if every else "cores"
    if not found.concessions:
        return None
    return "memory" if set(found.concessions) & _OF_MEMORY else "cores"
