"""Place: find a placement for a request on a host, or report every reason against it.

The fallbacks of the ladder (ladder.py) are attempted one after the other (attempt.py): the supply
of each node (supply.py, memory.py), the search (solve.py), then the CPUs and QEMU's own threads.
Same input, same placement.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from homenode.findings import Rejection
from homenode.machine.topology import LOCAL_DISTANCE, Host
from homenode.plan.allocations import Allocations, find_allocations
from homenode.plan.devices.brought import check_devices
from homenode.plan.devices.options import DeviceOptions, build_device_options
from homenode.plan.placement import Cost, Placement
from homenode.plan.placement_findings import (
    bound_elsewhere,
    check_document_siblings,
    check_memory_short,
    list_whole_core_costs,
)
from homenode.plan.request import GuestRequest
from homenode.plan.search.attempt import Attempt
from homenode.plan.search.devices import build_distance_matrix
from homenode.plan.search.ladder import MemoryRule, check_layout, list_fallbacks
from homenode.plan.search.problem import PlacementSearch
from homenode.plan.search.rejections import (
    judge_host_core,
    judge_single_nodes,
    judge_whole_host,
    list_unusable_nodes,
    make_error,
)
from homenode.plan.search.solve import may_be_nearer
from homenode.plan.search.supply import free_cpus
from homenode.vm.layout import GuestCells, MemoryBinding, Pinning, expose_siblings
from homenode.vm.plan import Relaxation, Unplannable
from homenode.vm.plan_options import DefinitionSiblings, Policy

MAX_REFUSED_NODES = 16


def search_for(host: Host, request: GuestRequest) -> PlacementSearch:
    allocations = find_allocations(host, request)
    free = with_service = free_cpus(host, request, allocations)
    if allocations.service_cores:
        with_service = free_cpus(host, request, allocations, service_cores=True)
    return PlacementSearch(
        host=host,
        request=request,
        allocations=allocations,
        options=build_device_options(host, request, allocations),
        distances=build_distance_matrix(host),
        free=(free, with_service),
    )


def place(host: Host, request: GuestRequest, *, brief: bool = False) -> Placement:
    """Return the placement of least cost on the first fallback that fits. brief: without
    explanations: runners-up, rejections, findings, gaps.

    Raises Unplannable with every rejection; UsageError for layout and policy that clash;
    InputError for devices or nodes that the host lacks.
    """
    if request.document_siblings is DefinitionSiblings.WHEN_SHORT:
        return _cores_or_siblings(host, request, brief=brief)
    layout = request.layout
    check_layout(layout, request.options.policy)
    floats = layout.pinning is Pinning.NONE
    if floats and layout.cells is GuestCells.SINGLE and layout.memory is MemoryBinding.KEEP:
        allocations = find_allocations(host, request)
        options = build_device_options(host, request, allocations)
        return _place_devices_only(host, request, allocations, options)
    return _LadderSearch(search_for(host, request), brief=brief).placement()


def _cores_or_siblings(host: Host, request: GuestRequest, *, brief: bool) -> Placement:
    """Return a placement with a whole core for each vCPU, unless that takes the host's last core or
    its whole reserve, or mixes kinds of core: then siblings as in the definition, if they fit."""
    for_cores = replace(request, document_siblings=DefinitionSiblings.IGNORED)
    layout = expose_siblings(request.layout)
    threads = request.guest.threads_per_core
    for_siblings = replace(for_cores, layout=layout, keep_vcpus=True, most_threads=threads)
    refusal, on_cores, on_siblings, costs = None, None, None, ["need more cores than are free"]
    try:
        on_cores = place(host, for_cores, brief=brief)
        costs = list(list_whole_core_costs(host, request, on_cores))
    except Unplannable as error:
        refusal = error
    if costs or not brief:
        try:
            on_siblings = place(host, for_siblings, brief=brief or not costs)
        except Unplannable:
            on_siblings = None
    if on_siblings is not None and (
        on_siblings.threads_per_core == 1
        # Only siblings as in the definition count, not vCPUs that share a core by chance.
        or {Relaxation.SHARED_CORES, Relaxation.SIBLINGS_NOT_EXPOSED} & {*on_siblings.relaxations}
    ):
        on_siblings = None
    if costs and on_siblings is not None:
        placement, other = replace(on_siblings, layout=layout, takes_siblings=True), on_cores
    elif on_cores is not None:
        lacks = bool(costs) and Relaxation.HOST_CORE in on_cores.relaxations
        placement, other = replace(on_cores, lacks_siblings=lacks), on_siblings
    else:
        assert refusal is not None, "the VM fits neither on whole cores nor on siblings"
        raise refusal
    if brief:
        return placement
    weighed = check_document_siblings(host, request, placement, other, costs)
    return replace(placement, findings=(*placement.findings, *weighed))


def _place_devices_only(
    host: Host, request: GuestRequest, allocations: Allocations, options: DeviceOptions
) -> Placement:
    """Place a VM that is neither pinned nor bound: only its GPUs are chosen."""
    devices = options.list_functions(options.choose_least_loss())
    return Placement(
        nodes=(),
        vcpu_pins=(),
        vcpu_nodes=(),
        memory_nodes=(),
        threads_per_core=1,
        emulator_pus=None,
        iothread_pus=(),
        devices=devices,
        fallback="not placed",
        findings=(
            *options.findings,
            *check_memory_short(host, request),
            *bound_elsewhere(request, [node.index for node in host.nodes if node.pus]),
            *check_devices(host, request, devices, allocations),
        ),
        gaps=(*allocations.gaps, *options.gaps, *options.node_gaps(devices)),
    )


class _LadderSearch:
    """One walk down the ladder. misses: fallbacks that do not fit, each with its reason.
    rejections: of the misses, and of single nodes on fallbacks that fit; none if brief. is_sure:
    all skipped fallbacks are known to be impossible or no better."""

    def __init__(self, search: PlacementSearch, *, brief: bool) -> None:
        self.search, self.brief = search, brief
        self.host, self.request = search.host, search.request
        self.rejections = list(list_unusable_nodes(self.host, self.request))
        self.misses: list[tuple[Attempt, Rejection]] = []
        self.is_sure = True

    def placement(self) -> Placement:
        """Return the placement on the first fallback that fits, or on a better one. Raises
        Unplannable."""
        refused_keys: set[tuple[object, ...]] = set()
        too_few: set[tuple[int, ...]] = set()
        ladder = list_fallbacks(self.request, self.search.free[1])
        attempts = (Attempt(self.search, fallback) for fallback in ladder)
        for attempt in attempts:
            supply = attempt.supply
            # Skipped if only memory was relaxed, or nothing that counts here.
            if supply in too_few or (refused_keys and attempt.problem.key() in refused_keys):
                continue
            if attempt.takes_host_core:
                self.rejections.append(judge_host_core(attempt))
                continue
            self.is_sure &= attempt.knows_refusal
            if attempt.solution is None:
                refused_keys.add(attempt.problem.key())
                if sum(supply[1:]) < supply[0]:
                    too_few.add(supply)
                self._record_miss(attempt)
            elif attempt.is_possible:
                self._reject_single_nodes(attempt)
                best = self._better_fallback(attempt, attempts) or attempt
                placement = best.placement if self.brief else best.explain(self.rejections)
                return placement if self.is_sure else replace(placement, optimal=None)
        if self.brief:
            raise Unplannable(f"{self.request.guest.name} does not fit {self.host.name}")
        raise make_error(self.search, self.rejections, self.misses)

    def _reject_single_nodes(self, attempt: Attempt) -> None:
        """Record the rejections of single nodes, if the VM spans several of few nodes."""
        is_one, nodes = len(attempt.best.split) == 1, attempt.problem.supplies
        if not (self.brief or is_one) and len(nodes) <= MAX_REFUSED_NODES:
            self.rejections += judge_single_nodes(attempt)

    def _record_miss(self, attempt: Attempt) -> None:
        if self.brief:
            return
        if all(attempt.cores != missed.cores for missed, _ in self.misses):
            self.rejections += judge_single_nodes(attempt)
        host_rejection = judge_whole_host(attempt)
        self.misses.append((attempt, host_rejection))
        is_said = any(
            (rejection.constraint, rejection.nodes)
            == (host_rejection.constraint, host_rejection.nodes)
            for rejection in self.rejections
        )
        if len(host_rejection.nodes) != 1 or not is_said:
            self.rejections.append(host_rejection)

    def _better_fallback(self, first: Attempt, attempts: Iterable[Attempt]) -> Attempt | None:
        """Return a better later fallback that relaxes only the host's last core or local memory;
        else None.

        Better: if vCPUs share cores, by the cores that the VM gets; then by the first terms of
        cores-first: class of device distance, packages and, if the guest sees its PCIe tree, GPUs
        away from home; then by the GPU sets broken, if it is known that this fallback cannot break
        fewer.
        """
        # Long because three conditions, each with its reason, stop the comparison early.
        cores_first = self.request.options.policy is Policy.CORES_FIRST
        shares = first.fallback.shares
        is_remote = first.fallback.memory is MemoryRule.ELSEWHERE
        if self.request.options.explicit_cells or (not shares and (is_remote or not cores_first)):
            return None
        problem = first.problem
        names = problem.first[: problem.first.index("nodes_spanned") if cores_first else 1]
        best, choice = first.best.cost, None
        assert first.solution is not None
        counts_sets = cores_first and self.search.options.has_gpus and first.solution.optimal

        def concerns(cost: Cost) -> list[int]:
            lost_gpu_sets = cost.gpu_sets_lost if counts_sets else 0
            return [*(getattr(cost, name) for name in names), lost_gpu_sets]

        least = {"vcpus_beyond_cores": 0, "device_class": LOCAL_DISTANCE, "packages_spanned": 1}
        limits = (*(least.get(name, 0) for name in names), 0)
        if all(value <= limit for value, limit in zip(concerns(best), limits, strict=True)):
            return None
        # If nodes hold as much as before, alone and together, the same sets hold the VM.
        roomier = [
            other
            for other in attempts
            if other.fallback.is_like(first.fallback)
            and (shares or other.fallback.memory is not MemoryRule.ELSEWHERE)
            and (
                other.problem.capacities != problem.capacities
                or (shares and other.problem.whole_cores != problem.whole_cores)
                or (shares and other.problem.pages_together != problem.pages_together)
            )
        ]

        def may_be_better(other: Attempt) -> bool:
            return concerns(best)[-1] > 0 or may_be_nearer(other.problem, best)

        if not roomier or not may_be_better(roomier[-1]):
            return None
        for other in roomier:
            if other.takes_host_core:
                continue
            solution = other.solution
            is_known = other.knows_refusal if solution is None else bool(solution.optimal)
            self.is_sure &= is_known or not may_be_better(other)
            if solution is None:
                continue
            count = 1 if is_remote or other.fallback.memory is MemoryRule.ELSEWHERE else None
            is_better = concerns(other.best.cost)[:count] < concerns(best)[:count]
            if is_better and other.is_possible:
                self._reject_single_nodes(other)
                best, choice = other.best.cost, other
                is_remote = other.fallback.memory is MemoryRule.ELSEWHERE
        return choice
