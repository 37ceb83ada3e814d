"""Attempt: one fallback of a search, from its problem to the resulting placement.

The input for all fallbacks is a PlacementSearch (problem.py). This module holds a fallback's
solution, and the CPUs, memory and QEMU threads that follow from it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property

from msgspec import Struct
from msgspec.structs import replace

from homenode.cpuset import CpuSet, NodeIndex, list_members
from homenode.findings import Gap, Rejection
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import CoreKind
from homenode.plan.memory import get_page_size
from homenode.plan.placement import Placement, name_terms
from homenode.plan.placement_findings import check_placement
from homenode.plan.search.ladder import Fallback, MemoryRule, name_fallback
from homenode.plan.search.problem import PlacementSearch, SearchProblem, Split
from homenode.plan.search.solve import (
    Candidate,
    Solution,
    solve,
    solve_fixed,
    without_first_gpu,
)
from homenode.plan.search.split import split_pages, splits_of_cells
from homenode.plan.search.supply import SiblingGroup
from homenode.plan.search.threads import (
    ThreadCpus,
    ThreadRequest,
    place_on_vcpus,
    place_threads,
)
from homenode.plan.shape.guest_numa import split_memory
from homenode.vm.layout import (
    GuestCells,
    Layout,
    MemoryBinding,
    Pinning,
    Siblings,
    add_preset_name,
)
from homenode.vm.plan import Relaxation, RunnerUp
from homenode.vm.plan_options import EmulatorPolicy


class PinnedCell(Struct, frozen=True, kw_only=True):
    """A future guest cell: the node's position, its sibling groups, and the CPUs of each vCPU."""

    node: int
    groups: tuple[SiblingGroup, ...]
    pins: tuple[CpuSet, ...]


class Attempt:
    """One fallback. Its results are computed at first use."""

    def __init__(self, search: PlacementSearch, fallback: Fallback) -> None:
        self.search, self.fallback = search, fallback
        self.host, self.request = search.host, search.request
        self.free = search.free_on(fallback)

    @cached_property
    def problem(self) -> SearchProblem:
        return self.search.problem(self.fallback)

    @property
    def supply(self) -> tuple[int, ...]:
        """Return the required sibling groups, and the groups of each node regardless of memory."""
        supplies = self.search.supplies(self.fallback)
        return (self.fallback.groups, *(node.groups for node in supplies))

    @property
    def cores(self) -> tuple[object, ...]:
        """Return the key of rejections of single nodes: equal if the same cores are counted."""
        grouping = self.fallback.grouping
        return grouping.threads, grouping.counts_pus, self.supply[1:]

    # The solution.

    @cached_property
    def _solution(self) -> tuple[Solution | None, bool]:
        """Return (the solution or None, whether it is certain that none fits)."""
        if not self.request.options.explicit_cells:
            return solve(self.problem)
        node_assignments, are_all = self._nodes_of_cells
        solution = solve_fixed(self.problem, node_assignments)
        return solution if solution is None or are_all else replace(solution, optimal=None), are_all

    @property
    def solution(self) -> Solution | None:
        """The solution of least cost; None if none was found."""
        return self._solution[0]

    @property
    def knows_refusal(self) -> bool:
        """Whether it is certain that nothing fits, if no solution was found."""
        return self._solution[1]

    @property
    def best(self) -> Candidate:
        assert self.solution is not None, "called for a fallback that has a solution"
        return self.solution.best

    @cached_property
    def _nodes_of_cells(self) -> tuple[dict[Split, tuple[int, ...]], bool]:
        """The splits for the requested cells, with each cell's node; whether all are listed."""
        page = get_page_size(self.request)
        cells = self.request.options.explicit_cells
        return splits_of_cells(self.problem, cells, self._groups_of_cells, page)

    @property
    def _groups_of_cells(self) -> list[int]:
        """Sibling groups of each requested guest node."""
        group_size = self.vcpus_of_group
        return [len(cell.vcpus) // group_size for cell in self.request.options.explicit_cells]

    @property
    def vcpus_of_group(self) -> int:
        """Return the vCPUs of each group, if vCPUs and not cores were requested."""
        return self.fallback.grouping.threads if self.request.keep_vcpus else 1

    # Why it is not taken.

    @property
    def takes_host_core(self) -> bool:
        """Whether whole cores for all groups would leave the host too few cores."""
        if (
            not self.fallback.keeps_core
            or self.fallback.grouping.counts_pus
            or self.request.layout.pinning is Pinning.NONE
        ):
            return False
        if sum(supply.groups for supply in self.problem.supplies) < self.problem.groups:
            return False  # too few for the vCPUs themselves
        cores_left = self.search.free[0].cores_without_vcpus - self.problem.groups
        return cores_left < self.request.host_reserve.cores

    @property
    def is_possible(self) -> bool:
        """Whether the solution leaves the host its core, if the fallback counts CPUs."""
        if not self.fallback.grouping.counts_pus or not self.fallback.keeps_core:
            return True
        if self.request.layout.pinning is Pinning.NONE:
            return True
        return self._leaves_host_core

    @property
    def _leaves_host_core(self) -> bool:
        """Whether the cores without vCPUs are the host's share or more."""
        used = self._vcpu_pus.bits | self.search.allocations.vcpu_cores.bits
        cores_left = sum(not core.pus.bits & used for core in self.host.cores)
        return cores_left >= self.request.host_reserve.cores

    # The placement.

    @cached_property
    def placement(self) -> Placement:
        """The placement of the solution, without explanations."""
        request, problem, best = self.request, self.problem, self.best
        floats = request.layout.pinning is Pinning.NONE
        assert self.solution is not None
        return Placement(
            nodes=tuple(problem.supplies[cell.node].cores.index for cell in self._cells),
            vcpu_pins=() if floats else self._pins,
            vcpu_nodes=tuple(i for i, cell in enumerate(self._cells) for _ in cell.pins),
            memory_nodes=() if request.layout.memory is MemoryBinding.KEEP else self._memory_nodes,
            threads_per_core=self._threads,
            emulator_pus=self._places.emulator_pus,
            iothread_pus=self._places.iothread_pus,
            devices=problem.devices.options.list_functions(best.gpus),
            fallback=name_fallback(self._span, self._relaxations),
            relaxations=self._relaxations,
            layout=self._layout,
            cell_memory_bytes=self._cell_memory,
            cost=name_terms(best.cost, (*problem.first, *problem.later)),
            optimal=self.solution.optimal,
        )

    def explain(self, rejections: Sequence[Rejection]) -> Placement:
        """Return the placement with its runners-up, findings and gaps, and these rejections."""
        search, placement = self.search, self.placement
        findings = check_placement(
            self.host,
            self.request,
            placement.devices,
            search.allocations,
            relaxations=self._relaxations,
            fallback=self.fallback,
            nodes=self._own_nodes,
            memory=self._memory_nodes,
            vcpu_pus=self._vcpu_pus,
            threads=self._threads,
            isolated_cpus=self.free.isolated,
        )
        return replace(
            placement,
            runners_up=self._runners_up(),
            rejections=tuple(replace(reason, hint=None) for reason in dict.fromkeys(rejections)),
            findings=(*search.options.findings, *findings, *self._places.findings),
            gaps=(
                *self._host_gaps(),
                *search.allocations.gaps,
                *search.options.gaps,
                *search.options.node_gaps(placement.devices),
            ),
        )

    @cached_property
    def _relaxations(self) -> tuple[Relaxation, ...]:
        sizes = {len(cell.pins) for cell in self._cells}
        unequal = self.fallback.equal and len(sizes) > 1
        relaxations = self.fallback.relaxations
        if not self.fallback.keeps_core and self._leaves_host_core:
            # The fallback offers both; the VM needed only cores of other VMs' emulators.
            milder = {Relaxation.HOST_CORE: Relaxation.EMULATOR_CORE}
            relaxations = tuple(milder.get(relaxation, relaxation) for relaxation in relaxations)
        return (*relaxations, *((Relaxation.UNEQUAL_CELLS,) if unequal else ()))

    @property
    def _own_nodes(self) -> tuple[NodeIndex, ...]:
        """Return the host node of each cell, in cell order."""
        nodes = (cell.node for cell in self._cells)
        return tuple(self.problem.supplies[node].cores.index for node in dict.fromkeys(nodes))

    @property
    def _layout(self) -> Layout | None:
        """Return the layout that the VM gets instead of the requested one, as vCPUs share cores."""
        layout = self.request.layout
        if not self.fallback.shares or layout.pinning is Pinning.NODE:
            return None
        siblings = Siblings.EXPOSED if self._threads > 1 else Siblings.HIDDEN
        if layout.siblings is Siblings.KEEP and layout.pinning is Pinning.ALL_PUS:
            siblings = Siblings.KEEP
        return add_preset_name(replace(layout, pinning=Pinning.ALL_PUS, siblings=siblings))

    @property
    def _span(self) -> str:
        cost = self.best.cost
        if cost.nodes_spanned == 1:
            return "one LLC" if cost.llcs_spanned == 1 else "one node"
        if cost.nodes_spanned == len(self.problem.supplies):
            return "all nodes"
        return "one package" if cost.packages_spanned == 1 else "across packages"

    def _runners_up(self) -> tuple[RunnerUp, ...]:
        """Return other sets of nodes, and the best placement with other GPUs on the same nodes."""
        problem, names = self.problem, (*self.problem.first, *self.problem.later)
        assert self.solution is not None
        cost_terms = self.placement.cost
        rivals = list(self.solution.runners_up())
        is_given = bool(self.request.options.explicit_cells)
        other = without_first_gpu(problem, self.best, keeps_split=is_given)
        if other is not None and all(other.cost != rival.cost for rival in rivals):
            rivals.append(other)
        result = []
        options = problem.devices.options
        for placing in rivals:
            rival_terms = name_terms(placing.cost, names)
            differing = next(a.name for a, b in zip(cost_terms, rival_terms, strict=True) if a != b)
            nodes = tuple(NodeIndex(node) for node in placing.cost.nodes)
            gpus = options.list_functions(placing.gpus) if options.count else ()
            result.append(RunnerUp(nodes, rival_terms, differing, gpus))
        return tuple(sorted(result, key=lambda rival: [term.value for term in rival.cost]))

    def _host_gaps(self) -> Iterator[Gap]:
        host = self.host
        if host.distances is None and len(host.nodes) > 1:
            yield Gap("distances between nodes", "the host reports none: 10 and 20 were assumed")
        if self.free.nodes and not host.llcs:
            yield Gap("LLCs", "the host reports none, so cores were not kept within one")
        for node, memory in self.search.memory_on(self.fallback).items():
            if memory.pages is None:
                yield Gap(f"node {node} memory", "unknown, so it was assumed to suffice")

    # Cells and pins.

    @cached_property
    def _cells(self) -> tuple[PinnedCell, ...]:
        return tuple(self._assign() if self.request.options.explicit_cells else self._pin())

    @property
    def _pins(self) -> tuple[CpuSet, ...]:
        return tuple(pin for cell in self._cells for pin in cell.pins)

    @cached_property
    def _vcpu_pus(self) -> CpuSet:
        return CpuSet.from_bits(sum(g.pus for cell in self._cells for g in cell.groups))

    def _pin(self) -> Iterator[PinnedCell]:
        """Pin node by node; with mixed kinds a node has two cells, performance cores first."""
        idle = self.fallback.idle_siblings(self.request)
        for node, number in self.best.split:
            groups = self.problem.supplies[node].allocate(number)
            strong = tuple(group for group in groups if group.kind is not CoreKind.EFFICIENCY)
            weak = tuple(group for group in groups if group.kind is CoreKind.EFFICIENCY)
            for part in (strong, weak) if self.fallback.mixed else (groups,):
                if part:
                    last = node == self.best.split[-1][0]
                    yield self._build_cell(node, part, idle if last else 0)

    def _assign(self) -> Iterator[PinnedCell]:
        """Assign groups to the user's cells in order; cells of a node divide its groups."""
        best, nodes = self.best, self._nodes_of_cells[0][self.best.split]
        groups = {node: self.problem.supplies[node].allocate(number) for node, number in best.split}
        for node, number in zip(nodes, self._groups_of_cells, strict=True):
            part, groups[node] = groups[node][:number], groups[node][number:]
            yield self._build_cell(node, part)

    def _build_cell(self, node: int, part: tuple[SiblingGroup, ...], idle: int = 0) -> PinnedCell:
        """Build a cell. idle: number of last CPUs without a vCPU."""
        if self.request.layout.pinning is Pinning.NODE:
            return PinnedCell(node=node, groups=part, pins=(self._node_pus(node),) * len(part))
        pins = tuple([CpuSet([pu]) for group in part for pu in list_members(group.pus)])
        return PinnedCell(node=node, groups=part, pins=pins[: len(pins) - idle])

    @cached_property
    def _threads(self) -> int:
        """Return the siblings per core that the guest sees: equal on all cores, or 1."""
        request, grouping = self.request, self.fallback.grouping
        layout = request.layout
        # A layout of one vCPU a core hides what is not there; all CPUs of a core, or the user, hide
        # siblings on purpose.
        hides = layout.pinning is Pinning.ALL_PUS or request.options.siblings is Siblings.HIDDEN
        if layout.siblings is not Siblings.EXPOSED and (hides or not self.fallback.shares):
            return 1
        if grouping.threads > 1:
            return 1 if self.fallback.idle_siblings(request) else grouping.threads
        if request.layout.pinning is Pinning.NODE or not grouping.counts_pus:
            return 1
        counts = {
            count
            for cell in self._cells
            for count in Counter((cell.node, group.core) for group in cell.groups).values()
        }
        return counts.pop() if len(counts) == 1 else 1

    def _node_pus(self, node: int) -> CpuSet:
        """Return the CPUs of a node that vCPUs may float over: all free CPUs, less the host's share
        of cores if the VM would get all of its cores: the last ones that the vCPUs do not need."""
        free, fallback, split = self.free, self.fallback, self.best.split
        kinds = fallback.grouping.kinds
        total = sum(shape.is_whole for other, _ in split for _, shape in free.nodes[other].cores)
        is_all = fallback.keeps_core and free.cores_without_vcpus <= total
        missing = self.request.host_reserve.cores if is_all else 0
        cores: list[int] = []
        for other, groups in reversed(split):
            cores = [pus for pus, shape in free.nodes[other].cores if shape.kind in kinds]
            kept_count = min(missing, max(0, len(cores) - groups))
            cores, missing = cores[: len(cores) - kept_count], missing - kept_count
            if other == node:
                break
        return CpuSet.from_bits(sum(cores))

    # Memory.

    @cached_property
    def _memory_nodes(self) -> tuple[NodeIndex, ...]:
        """Return the nodes for the memory: the VM's own and as few others as needed, the nearest
        first. The search has checked that they suffice (holds_memory)."""
        search, own_nodes = self.search, self._own_nodes
        memory = search.memory_on(self.fallback)
        chosen_nodes = list(own_nodes)
        if self.fallback.memory is MemoryRule.ELSEWHERE:
            needed = self.problem.pages_anywhere
            pages = {
                n: needed if space.pages is None else space.pages for n, space in memory.items()
            }
            at = {node.index: position for position, node in enumerate(self.host.nodes)}
            between = search.distances.between
            farther = sorted(
                (node for node in memory if node not in own_nodes),
                key=lambda n: (min(between[at[n]][at[o]] for o in own_nodes), n),
            )
            limit = (self.request.options.max_nodes or len(memory)) - len(own_nodes)
            needed -= sum(pages[node] for node in own_nodes)

            def largest(nodes: Sequence[NodeIndex], count: int) -> int:
                return sum(sorted((pages[node] for node in nodes), reverse=True)[:count])

            number = next(n for n in range(limit + 1) if largest(farther, n) >= needed)
            for position, node in enumerate(farther):
                if number and pages[node] + largest(farther[position + 1 :], number - 1) >= needed:
                    chosen_nodes.append(node)
                    needed, number = needed - pages[node], number - 1
        return tuple(sorted(index for node in chosen_nodes for index in memory[node].nodes))

    @property
    def _cell_memory(self) -> tuple[int, ...]:
        """Return the bytes of each cell if they cannot follow the vCPUs: as even as the nodes
        allow, or as the user gives them; () if they follow."""
        request, fallback, cells = self.request, self.fallback, self._cells
        if request.options.explicit_cells:
            return tuple(cell.memory_bytes for cell in request.options.explicit_cells)
        if request.layout.cells is GuestCells.SINGLE:
            return ()
        page = get_page_size(request)
        if fallback.memory is MemoryRule.FOLLOWS and fallback.idle_siblings(request):
            groups = tuple(len(cell.groups) for cell in cells)
            return split_memory(request.memory_bytes, page, groups)
        if fallback.memory is not MemoryRule.UNEVEN:
            return ()
        total = -(-request.memory_bytes // page)
        owned = self.problem.devices_of_cells(len(cells))
        space = []
        for i, cell in enumerate(cells):
            pages = self.problem.memory[cell.node].pages
            cells_there = sum(other.node == cell.node for other in cells)
            space.append(total if pages is None else max(1, (pages - owned[i]) // cells_there))
        shares = split_pages(total, [len(cell.pins) for cell in cells], space)
        return tuple(share * page for share in shares)

    # QEMU's own threads.

    @cached_property
    def _places(self) -> ThreadCpus:
        request, search, problem = self.request, self.search, self.problem
        iothreads = len(request.guest.iothread_ids)
        emulator_pus, policy = request.options.emulator_pus, request.options.emulator_policy
        if request.layout.pinning is Pinning.NONE:
            return ThreadCpus(None, ())
        if emulator_pus is None and request.layout.pinning is Pinning.NODE:
            return place_on_vcpus(CpuSet.union(self._pins), iothreads)
        if emulator_pus is None and policy is EmulatorPolicy.SHARE:
            return place_on_vcpus(self._vcpu_pus, iothreads)
        if emulator_pus is None and policy is EmulatorPolicy.NONE:
            return ThreadCpus(None, ())
        housekeeping = policy is EmulatorPolicy.HOUSEKEEPING
        if housekeeping and emulator_pus is None and request.housekeeping_pus:
            emulator_pus = request.housekeeping_pus
        own_nodes = [node for node, _ in self.best.split]
        rows = problem.devices.rows(self.best.gpus)

        def to_devices(node: int) -> tuple[int, int]:
            return sum(row[node] for row in rows), node

        def to_own(node: int) -> tuple[int, int]:
            return min(problem.distances.between[node][o] for o in own_nodes), node

        other_nodes = [node for node in range(len(problem.supplies)) if node not in own_nodes]
        order = [*sorted(own_nodes, key=to_devices), *sorted(other_nodes, key=to_own)]
        open_pus = search.free[1].pus - search.free[1].isolated - self._vcpu_pus
        service = search.allocations.service_cores & open_pus
        serving = [core.pus for core in self.host.cores if core.pus <= service] if service else []
        shared_sets = [
            pus for node in order for pus in serving if pus <= problem.supplies[node].cores.pus
        ]
        thread_request = ThreadRequest(
            vcpu_pus=self._vcpu_pus,
            iothreads=iothreads,
            emulator_pus=emulator_pus,
            own_cores=self._own_cores,
            service_cores=tuple(shared_sets),
            housekeeping_pus=request.housekeeping_pus - search.free[1].isolated,
            housekeeping=housekeeping,
            on_every_node=request.page_bytes is not None
            and request.layout.memory is not MemoryBinding.KEEP,
        )
        return place_threads(self.free, order, len(own_nodes), thread_request)

    def _own_cores(self, node: int) -> int:
        """Return the number of a node's cores that an emulator may have alone: the node's free GPUs
        keep their share of its cores."""
        search, cores = self.search, self.problem.supplies[node].cores
        gpus = self.best.gpus | search.options.named_gpus
        taken_bits = self._vcpu_pus.bits
        free = self.free.nodes[node].cores
        spare = sum(shape.is_whole and not pus & taken_bits for pus, shape in free)
        home_gpus = [gpu for gpu in search.options.gpus if gpu.home == cores.index]
        free_gpus = sum(not gpus >> gpu.number & 1 for gpu in home_gpus)
        if not free_gpus:
            return spare
        of_node = sum(not core.pus.bits & ~cores.pus.bits for core in self.host.cores)
        owned_bdfs = {bdf for bdf, _ in search.allocations.devices}
        total = len(home_gpus) + sum(
            device.node == cores.index
            for bdf in owned_bdfs
            if (device := self.host.find_device(bdf)) and device.kind is DeviceKind.GPU
        )
        return max(0, spare - free_gpus * (of_node // total))
