"""Cells that the user gives one by one, and the bound by which sets of nodes are passed over."""

from itertools import combinations, permutations

from hypothesis import given
from hypothesis import strategies as st

from homenode.machine.topology import Host
from homenode.plan.planner import plan
from homenode.plan.request import GuestRequest
from homenode.plan.search.attempt import Attempt
from homenode.plan.search.gpu_choice import NearestGpus
from homenode.plan.search.ladder import list_fallbacks
from homenode.plan.search.place import search_for
from homenode.plan.search.problem import SearchProblem
from homenode.plan.search.split import split_pages, splits_of_cells
from homenode.plan.search.supply import GroupRange
from homenode.units import GIB
from homenode.vm.plan_options import make_cell
from tests.small_hosts import DeviceSpec, asking, even_host, small_request

GPU_ON_NODE_1 = [DeviceSpec("01:00.0", 1)]


def problem_of(host: Host, request: GuestRequest) -> SearchProblem:
    search = search_for(host, request)
    return Attempt(search, next(list_fallbacks(request, search.free[1]))).problem


def test_cells_that_name_no_node_get_those_of_gpus_first() -> None:
    cells = (make_cell(2, GIB), make_cell(2, 2 * GIB))
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
        cells = (make_cell(2, size + odd_bytes), make_cell(2, size))
        ways, _ = splits_of_cells(problem, cells, (2, 2), problem.page_bytes)
        assert bool(ways) is fits


def test_unlike_cells_are_tried_on_all_nodes_and_equal_ones_once() -> None:
    problem = problem_of(even_host(3), small_request(4))

    def ways(*vcpu_counts: int) -> set[tuple[int, ...]]:
        cells = [make_cell(count, GIB) for count in vcpu_counts]
        found, are_all = splits_of_cells(problem, cells, vcpu_counts, problem.page_bytes)
        assert are_all
        return set(found.values())

    assert ways(1, 2) == set(permutations(range(3), 2))
    assert ways(2, 2) == set(combinations(range(3), 2))


def test_more_ways_than_are_tried_are_said_not_to_be_all() -> None:
    problem = problem_of(even_host(8), small_request(8))
    cells = [make_cell(1, (1 + n) * GIB // 16) for n in range(8)]
    found, are_all = splits_of_cells(problem, cells, (1,) * 8, problem.page_bytes)
    assert found and not are_all


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 50)), min_size=1, max_size=5),
    st.integers(0, 200),
)
def test_pages_follow_the_vcpus_as_far_as_the_nodes_have_space(
    cells: list[tuple[int, int]], more: int
) -> None:
    weights, space = [weight for weight, _ in cells], [limit for _, limit in cells]
    total = min(len(cells) + more, sum(space))
    shares = split_pages(total, weights, space)
    assert sum(shares) == total
    for share, weight, limit in zip(shares, weights, space, strict=True):
        assert 1 <= share <= limit
        if max(weights) * total <= min(space) * sum(weights):
            assert abs(share - total * weight / sum(weights)) <= len(cells)


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
