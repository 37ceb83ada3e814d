"""Slow nodes: which ones a study may name."""

from msgspec.structs import replace

from homenode.cluster.slurm.study.evidence import collective_of
from homenode.cluster.slurm.study.maps import StudyMatrix, slow_copies


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


def test_slow_nodes_are_named_with_their_slowest_place() -> None:
    of_nodes = {
        "n1": [50.0, 50.0, 50.0, 50.0],
        "n2": [50.0, 30.0, 49.0, 50.0],
        "n3": [40.0, 38.0, 40.0, 46.0],
        "n4": [51.0, 50.0, 50.0, 50.0],
    }
    found = {one.node: one.part for one in slow_copies(on_nodes(of_nodes))}
    assert found == {"n2": "b from NUMA node 0", "n3": "a from NUMA node 0 and 2 more"}
    assert slow_copies(on_nodes({"n1": [50] * 4, "n2": [10] * 4})) == ()


def test_of_two_nodes_that_have_a_gpu_nothing_says_which_is_slow() -> None:
    three = on_nodes({"n1": [50.0] * 4, "n2": [50.0] * 4, "n3": [50.0] * 4})
    fewer = replace(three[0], node="n3", columns=("a",), cells=((50.0,),), homes=(0,))
    slow = replace(three[1], cells=((50.0, 30.0, 50.0, 50.0),))
    assert slow_copies((three[0], slow, fewer)) == ()


def test_an_all_reduce_that_failed_is_a_gap() -> None:
    found = collective_of({"node-a.txt": "srun: error\n", "node-a.err": "exit status 1\n"})
    assert found.nodes == ()
    assert len(found.gaps) == 2
