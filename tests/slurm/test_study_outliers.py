"""Slow nodes, ports and links: which one a study may name, and which it is unknown."""

import pytest
from msgspec.structs import replace

from homenode.cluster.slurm.study.evidence import Collective, collective_of
from homenode.cluster.slurm.study.maps import StudyMatrix, slow_in_collective, slow_nodes_and_links


def on_nodes(figures: dict[str, list[float]]) -> list[StudyMatrix]:
    return [
        StudyMatrix(
            node=node,
            metric="h2d-bandwidth",
            rows=(0,),
            columns=("a", "b", "c", "d"),
            cells=(tuple(of),),
            homes=(0,) * 4,
            homes_measured=False,
        )
        for node, of in figures.items()
    ]


def test_the_slow_node_and_the_slow_link_are_named() -> None:
    of_nodes = {
        "n1": [50.0, 50.0, 50.0, 50.0],
        "n2": [50.0, 30.0, 49.0, 50.0],
        "n3": [40.0, 38.0, 40.0, 46.0],
        "n4": [51.0, 50.0, 50.0, 50.0],
    }
    found = [(one.node, one.part) for one in slow_nodes_and_links(on_nodes(of_nodes))]
    assert found == [("n2", "the link of b"), ("n3", "the node: 3 of 4 GPUs")]
    assert slow_nodes_and_links(on_nodes({"n1": [50] * 4, "n2": [10] * 4})) == ()


def test_of_two_nodes_that_have_a_gpu_nothing_says_which_is_slow() -> None:
    three = on_nodes({"n1": [50.0] * 4, "n2": [50.0] * 4, "n3": [50.0] * 4})
    fewer = replace(three[0], node="n3", columns=("a",), cells=((50.0,),), homes=(0,))
    slow = replace(three[1], cells=((50.0, 30.0, 50.0, 50.0),))
    assert slow_nodes_and_links((three[0], slow, fewer)) == ()


def test_a_numa_node_from_which_all_is_slow_is_named() -> None:
    whole = StudyMatrix(
        node="n1",
        metric="h2d-bandwidth",
        rows=(0, 1),
        columns=("a", "b"),
        cells=((50, 30), (30, 50)),
        homes=(0, 1),
        homes_measured=False,
    )
    slow = replace(whole, node="n3", cells=((50, 30), (20, 33)))
    (found,) = slow_nodes_and_links((whole, replace(whole, node="n2"), slow))
    assert (found.node, found.part) == ("n3", "NUMA node 1: from there")


def test_of_three_nodes_the_one_with_a_slow_port_is_named() -> None:
    alone = tuple((node, 380.0) for node in "abc")
    pairs = (("a", "b", 190.0), ("b", "c", 95.0), ("c", "a", 95.0))
    found = slow_in_collective(Collective(alone, pairs, None, None, ()))
    assert [(one.node, one.part) for one in found] == [("c", "its link to the other nodes")]


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ((190, 95, 190, 190), [("b", "the link between b and c")]),
        ((190, 90, 95, 190), [("c", "its link to the other nodes")]),
        ((190, 190, 190, 189), []),
    ],
)
def test_a_ring_tells_a_slow_link_from_a_slow_port(
    pairs: tuple[float, ...], expected: list[tuple[str, str]]
) -> None:
    ring = ("ab", "bc", "cd", "da")
    named = tuple((pair[0], pair[1], value) for pair, value in zip(ring, pairs, strict=True))
    alone = tuple((node, 380.0) for node in "abcd")
    found = slow_in_collective(Collective(alone, named, None, None, ()))
    assert [(one.node, one.part) for one in found] == expected
    slow = (("a", 380.0), ("b", 380.0), ("c", 100.0), ("d", 380.0))
    first = slow_in_collective(Collective(slow, named, None, None, ()))[0]
    assert (first.node, first.part) == ("c", "the node: all-reduce on it alone")


def test_an_all_reduce_that_failed_is_a_gap() -> None:
    found = collective_of({"node-a.txt": "srun: error\n", "node-a.err": "exit status 1\n"})
    assert found.nodes == ()
    assert len(found.gaps) == 2
