"""Distances as the planner reads them, and the groups that cores and LLCs are drawn from."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from homenode.plan.search.distances import distance_matrix
from homenode.plan.search.supply import fewest
from tests.small_hosts import even_host


def test_a_host_without_distances_is_read_as_linux_reads_it() -> None:
    host = even_host(2, tells_distances=False)
    assert distance_matrix(host).between == ((10, 20), (20, 10))


def test_the_worse_direction_of_a_pair_counts() -> None:
    host = even_host(2, distances=((10, 14), (32, 10)))
    assert distance_matrix(host).between == ((10, 32), (32, 10))


def test_packages_are_as_far_as_their_nearest_nodes() -> None:
    table = ((10, 12, 21, 22), (12, 10, 23, 24), (21, 23, 10, 12), (22, 24, 12, 10))
    matrix = distance_matrix(even_host(2, 2, 1, 4, 1, distances=table))
    assert matrix.to_packages(1) == {0: 10, 1: 21}


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.integers(0, 20))
def test_the_fewest_groups_are_drawn_from_and_of_those_the_tightest(
    counts: list[int], wanted: int
) -> None:
    chosen = fewest(counts, wanted)
    enough = [
        (size, sum(counts[i] for i in some), some)
        for size in range(1, len(counts) + 1)
        for some in combinations(range(len(counts)), size)
        if sum(counts[i] for i in some) >= wanted
    ]
    if wanted <= 0 or not enough:
        assert chosen == ()
    else:
        assert chosen == min(enough)[2]
