"""Cells that the user gives one by one, and the bound by which sets of nodes are passed over."""

from itertools import combinations

from homenode.machine.topology import Host
from homenode.plan.planner import plan
from homenode.plan.request import GuestRequest
from homenode.plan.search.attempt import Attempt
from homenode.plan.search.cell_sizes import GroupRange
from homenode.plan.search.gpu_choice import NearestGpus
from homenode.plan.search.ladder import fallbacks
from homenode.plan.search.place import search_for
from homenode.plan.search.problem import SearchProblem
from homenode.plan.search.split import splits_of_cells
from homenode.units import GIB
from homenode.vm.plan_options import cell_asked
from tests.small_hosts import DeviceSpec, asking, even_host, small_request

GPU_ON_NODE_1 = [DeviceSpec("01:00.0", 1)]


def problem_of(host: Host, request: GuestRequest) -> SearchProblem:
    search = search_for(host, request)
    return Attempt(search, next(fallbacks(request, search.free[1]))).problem


def test_cells_that_name_no_node_get_those_of_gpus_first() -> None:
    cells = (cell_asked(2, GIB), cell_asked(2, 2 * GIB))
    request = asking(small_request(4, 3 * GIB), explicit_cells=cells, gpu_count=1)
    made = plan(even_host(2, devices=GPU_ON_NODE_1), request)
    assert [cell.host_nodes for cell in made.vm.cells] == [(1,), (0,)]


def test_a_cells_last_page_counts_whole() -> None:
    """Both nodes have the pages of a cell, and none has a page more."""
    problem = problem_of(even_host(2), small_request(4))
    pages = problem.memory[0].pages
    assert pages is not None
    size = pages * problem.page_bytes
    for odd_bytes, fits in ((0, True), (1, False)):
        cells = (cell_asked(2, size + odd_bytes), cell_asked(2, size))
        ways, _ = splits_of_cells(problem, cells, (2, 2), problem.page_bytes)
        assert bool(ways) is fits


def test_no_choice_of_gpus_is_nearer_than_the_least_distance() -> None:
    gpus = [DeviceSpec(f"{bus:02x}:00.0", node) for bus, node in enumerate((0, 0, 1, 2, 2, 2), 1)]
    far = ((10, 12, 32, 32), (12, 10, 32, 32), (32, 32, 10, 14), (32, 32, 14, 10))
    host = even_host(2, 2, devices=gpus, distances=far)
    for count in range(1, 6):
        problem = problem_of(host, asking(small_request(4), gpu_count=count, unequal_cells=True))
        nearest = NearestGpus(problem)
        for pair in combinations(range(4), 2):
            nodes = sum(1 << node for node in pair)
            for ranges in ((GroupRange(1, 1), GroupRange(3, 3)), (GroupRange(1, 3),) * 2):
                choices = nearest.choices(nodes, ranges)
                least = nearest.least_distance(nodes, ranges)
                assert least <= min(choice.device_distance for choice in choices)
