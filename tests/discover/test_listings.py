"""Hosts of which a listing shows a part, and listings that complement each other."""

import pytest

from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.machine.discover.host import combine
from homenode.machine.topology import Host, summarise
from homenode.vm.sources import parse_host
from tests.tools.test_lscpu import TABLE

NUMACTL = """\
available: 2 nodes (0-1)
node 0 cpus: 0 1
node 0 size: 64000 MB
node 0 free: 60000 MB
node 1 cpus: 2
node 1 size: 32000 MB
node 1 free: 30000 MB
node distances:
node   0   1
  0:  10  21
  1:  21  10
"""
TOPOLOGY = """\
\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tSYS\t0-1\t0\t\tN/A
GPU1\tSYS\t X \t\t1\t\tN/A
"""


def host(text: str) -> Host:
    return parse_host(text, "listing")


def subjects(found: Host) -> set[str]:
    return {gap.subject for gap in found.gaps}


def test_lscpu_gives_cores_that_repeat_their_number_and_offline_cpus() -> None:
    found = host(TABLE)
    cores = [(core.id.package, core.id.core, str(core.pus)) for core in found.cores]
    assert cores == [(0, 0, "0-1"), (1, 0, "2")]
    assert [llc.pus for llc in found.llcs] == [CpuSet([0, 1]), CpuSet([2])]
    assert [node.package for node in found.nodes] == [0, 1]
    assert summarise(found).pus_offline == 1
    assert subjects(found) == {"memory of nodes", "distances of nodes", "PCI functions", "VMs"}


def test_without_a_column_of_nodes_the_host_counts_as_one_node() -> None:
    found = host("CPU SOCKET CORE\n0 0 0\n1 0 1\n")
    assert found.nodes_assumed
    assert [node.pus for node in found.nodes] == [CpuSet([0, 1])]


def test_what_a_listing_does_not_show_is_unknown() -> None:
    found = host(NUMACTL)
    assert (found.cores, found.llcs, found.packages) == ((), (), ())
    assert subjects(found) == {"cores, LLCs and packages", "PCI functions", "VMs"}


def test_the_matrix_of_gpus_shows_their_nodes_and_no_whole_node() -> None:
    found = host(TOPOLOGY)
    assert (found.nodes, found.pus) == ((), ())
    reasons = {gap.subject: gap.reason for gap in found.gaps}
    assert "node 0, CPUs 0-1" in reasons["PCI addresses of GPU0"]
    assert "node 1, no CPU" in reasons["PCI addresses of GPU1"]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_listings_of_one_machine_complement_each_other(order: tuple[int, ...]) -> None:
    texts = (NUMACTL, TABLE, TOPOLOGY)
    first, second, third = (host(texts[position]) for position in order)
    found = combine(combine(first, second), third)
    assert len(found.cores) == 2
    assert [node.memory_bytes for node in found.nodes] == [64000 << 20, 32000 << 20]
    assert found.distances == ((10, 21), (21, 10))
    assert {"PCI functions", "PCI addresses of GPU0"} <= subjects(found)
    assert not subjects(found) & {"memory of nodes", "cores, LLCs and packages"}


@pytest.mark.parametrize(
    "other",
    [
        NUMACTL.replace("cpus: 2", "cpus: 4"),
        NUMACTL.replace("2 nodes", "3 nodes")
        .replace("0-1", "0-2")
        .replace("node 1 cpus", "node 2 cpus: 9\nnode 1 cpus")
        .split("node dist")[0],
    ],
)
def test_listings_of_two_machines_are_refused(other: str) -> None:
    with pytest.raises(InputError, match=r"CPUs of node [12]"):
        combine(host(TABLE), host(other))
