"""Output of rocm-smi --showtopo."""

import pytest

from homenode.errors import ParseError
from homenode.machine.tools.amd_smi import parse_rocm_topology as parse
from tests.mutations import survives

OUTPUT = """

============================ ROCm System Management Interface ============================
================================ Weight between two GPUs =================================
       GPU0         GPU1         GPU3
GPU0   0            15           N/A
GPU1   15           0            72
GPU3   N/A          72           0

================================= Hops between two GPUs ==================================
       GPU0         GPU1         GPU3
GPU0   0            1            3
GPU1   1            0            3
GPU3   3            3            0

=============================== Link Type between two GPUs ===============================
       GPU0         GPU1         GPU3
GPU0   0            XGMI         PCIE
GPU1   XGMI         0            PCIE
GPU3   PCIE         PCIE         0

=============================== A table of next year =====================================
whatever it holds

======================================= Numa Nodes =======================================
GPU[0]\t\t: (Topology) Numa Node: 1
GPU[0]\t\t: (Topology) Numa Affinity: 1
GPU[1]\t\t: (Topology) Numa Node: -1
GPU[1]\t\t: (Topology) Numa Affinity: -1
GPU 3          : (Topology) Numa Node: 0
================================== End of ROCm SMI Log ===================================
"""


def test_tables_are_read_by_their_titles() -> None:
    topology = parse(OUTPUT)
    assert topology.gpus == (0, 1, 3)
    assert topology.hops[2] == (3, 3, 0)
    assert topology.links == (
        (None, "XGMI", "PCIE"),
        ("XGMI", None, "PCIE"),
        ("PCIE", "PCIE", None),
    )


def test_a_node_of_minus_one_is_unknown() -> None:
    assert parse(OUTPUT).node_of_gpu == ((0, 1), (3, 0))


def test_nodes_alone_are_enough() -> None:
    topology = parse("===== Numa Nodes =====\nGPU[2]\t: (Topology) Numa Node: 5\n")
    assert (topology.gpus, topology.links, topology.node_of_gpu) == ((2,), (), ((2, 5),))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a table of GPUs"),
        ("no devices\n", "1: expected a title"),
        ("== Hops between two GPUs ==\n GPU0 GPU1\nGPU0 0 1\n", "2 rows"),
        ("== Hops between two GPUs ==\n GPU0 GPU1\nGPU0 0 1\nGPU2 1 0\n", "4: expected a row"),
        ("== Hops between two GPUs ==\n GPU0 GPU1\nGPU0 0 1 2\n", "a row of 2 values"),
        ("== Hops between two GPUs ==\n GPU1 GPU0\n", "columns GPU0 GPU1"),
        ("== Hops between two GPUs ==\n GPU0\nGPU0 ?\n", "numbers or kinds of link"),
        (
            "== Hops between two GPUs ==\n GPU0\nGPU0 0\n== Link Type between two GPUs ==\n GPU1\n",
            "as in the table above",
        ),
        ("== Numa Nodes ==\nGPU[0] : something\n", "2: expected GPU"),
    ],
)
def test_output_that_is_none_is_refused(text: str, says: str) -> None:
    with pytest.raises(ParseError, match=says):
        parse(text)


def test_damaged_output_is_read_or_refused_and_nothing_else() -> None:
    assert survives(parse, OUTPUT, 600) > 0
