"""Groups of nodes that are near each other, against every subset of random distances."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from homenode.plan.search.fewest import fewest
from homenode.plan.search.near import Steps, cliques, near, neighbours
from tests.small_hosts import even_host, hierarchical_distances


@st.composite
def tables(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    count = draw(st.integers(1, 7))
    pairs = {pair: draw(st.sampled_from((11, 21, 31))) for pair in combinations(range(count), 2)}
    return tuple(
        tuple(10 if i == j else pairs[min(i, j), max(i, j)] for j in range(count))
        for i in range(count)
    )


@given(tables(), st.sampled_from((11, 21)), st.integers(1, 4))
def test_the_groups_are_all_largest_sets_of_linked_nodes(
    table: tuple[tuple[int, ...], ...], within: int, least: int
) -> None:
    nodes = range(len(table))
    linked_sets = [
        set(chosen)
        for size in range(1, len(table) + 1)
        for chosen in combinations(nodes, size)
        if all(table[a][b] <= within for a, b in combinations(chosen, 2))
    ]
    largest = {
        sum(1 << node for node in chosen)
        for chosen in linked_sets
        if len(chosen) >= least and not any(chosen < other for other in linked_sets)
    }
    found = list(cliques(neighbours(table, within), (1 << len(table)) - 1, least, Steps(1_000_000)))
    assert set(found) == largest
    assert len(found) == len(largest)


def test_hierarchical_distances_need_no_steps() -> None:
    table = hierarchical_distances([package for package in range(16) for _ in range(4)])
    steps = Steps(0)
    groups = list(cliques(neighbours(table, 12), (1 << 64) - 1, 2, steps))
    assert len(groups) == 16
    assert not steps.ran_out


def test_a_spent_budget_is_told() -> None:
    row = tuple(tuple(10 + 11 * abs(i - j) for j in range(16)) for i in range(16))
    steps = Steps(5)
    list(cliques(neighbours(row, 43), (1 << 16) - 1, 2, steps))
    assert steps.ran_out


def test_a_host_without_distances_is_taken_as_linux_takes_it() -> None:
    assert near(even_host(2, tells_distances=False)).between == ((10, 20), (20, 10))


def test_the_worse_direction_of_a_pair_counts() -> None:
    assert near(even_host(2, distances=((10, 14), (32, 10)))).between == ((10, 32), (32, 10))


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
