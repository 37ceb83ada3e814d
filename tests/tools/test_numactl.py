"""Output of numactl."""

import re

import pytest

from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.machine.tools.numactl import parse_hardware, parse_show
from tests.mutations import MUTATIONS, survives
from tests.shared_data import needs_shared, shared

HARDWARE = """\
available: 3 nodes (0-1,4)
node 0 cpus: 0 1 2 3
node 0 size: 64000 MB
node 0 free: 60000 MB
node 1 cpus: 4 5 6 7
node 1 size: 0 MB
node 1 free: 0 MB
node 4 cpus:
node 4 size: 97280 MB
node 4 free: 97000 MB
node distances:
node   0   1   4
  0:  10  40  80
  1:  40  10  80
  4:  80  80  10
"""

SHOW = """\
policy: bind
preferred node: 2
physcpubind: 144 145 146
cpubind: 2
nodebind: 2
membind: 2
preferred:
"""


# The tool ends these lines with a blank, which editors remove.
HARDWARE = re.sub(r"(?m)^(node   0.*|  \d:.*)$", r"\1 ", HARDWARE)
SHOW = re.sub(r"(?m)^(\w+:.*)$", r"\1 ", SHOW).replace("bind \n", "bind\n", 1)


def test_every_node_is_read_and_not_only_the_first() -> None:
    hardware = parse_hardware(HARDWARE)
    nodes = hardware.nodes
    assert [node.index for node in nodes] == [0, 1, 4]
    assert [node.pus for node in nodes] == [CpuSet.parse("0-3"), CpuSet.parse("4-7"), CpuSet()]
    assert [node.size_bytes for node in nodes] == [64000 << 20, 0, 97280 << 20]
    assert hardware.distances == ((10, 40, 80), (40, 10, 80), (80, 80, 10))


def test_guests_may_have_no_distances() -> None:
    text = HARDWARE[: HARDWARE.index("node distances")] + "No distance information available.\n"
    hardware = parse_hardware(text)
    assert hardware.distances is None
    assert hardware.gaps[0].subject == "distances"


def test_how_a_process_was_bound() -> None:
    assert parse_show("job 17 on gh200\n" + SHOW) == ((2,), (2,))


def test_a_permissive_binding_names_the_gpu_memory_nodes_too() -> None:
    show = parse_show(SHOW.replace("membind: 2", "membind: 0 1 2 3 4 12 20 28"))
    assert show == ((2,), (0, 1, 2, 3, 4, 12, 20, 28))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a line 'available"),
        ("No NUMA support available on this system.\n", "a kernel with NUMA"),
        (HARDWARE.replace("3 nodes", "2 nodes"), "one list of"),
        (HARDWARE.replace("node 4 cpus:\n", ""), "nodes 0-1,4"),
        (HARDWARE.replace("  4:  80  80  10 \n", ""), "distances between the nodes"),
        (HARDWARE + HARDWARE, "one list"),
        (HARDWARE.replace("node 1 size", "node 9 size"), "nodes 0-1,4"),
        (HARDWARE.replace("cpus: 0 1", "cpus: 0 99999999"), "CPU"),
    ],
)
def test_hardware_that_is_none_is_refused(text: str, says: str) -> None:
    with pytest.raises(ParseError, match=says):
        parse_hardware(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a line 'policy'"),
        (SHOW + SHOW, "one value of 'policy'"),
        (SHOW.replace("cpubind: 2", "cpubind: two"), "numbers such as"),
    ],
)
def test_bindings_that_are_none_are_refused(text: str, says: str) -> None:
    with pytest.raises(ParseError, match=says):
        parse_show(text)


@needs_shared
def test_both_outputs_in_one_file_are_read() -> None:
    text = shared("samples/numactl_H.txt").read_text()
    assert parse_hardware(text).nodes[0].size_bytes == 13530 << 20
    assert not parse_hardware(text).gaps
    assert parse_show(text)[1]


def test_damaged_output_is_read_or_refused_and_nothing_else() -> None:
    assert survives(parse_hardware, HARDWARE, MUTATIONS) > 0
    assert survives(parse_show, SHOW, MUTATIONS) > 0
