"""Output of xl info -n, alone and with lspci's."""

from pathlib import Path

import pytest

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import NotKnownError, ParseError
from homenode.findings import Gap
from homenode.machine.tools.xl_info import parse
from homenode.machine.topology import make_empty_host, reject_unshown
from homenode.vm.sources import load_host
from tests.mutations import MUTATIONS, survives

INFO = """\
host                   : xcp1
xen_caps               : xen-3.0-x86_64 hvm-3.0-x86_32p
cpu_topology           :
cpu:    core    socket     node
  0:       0        0        0
  1:       0        0        0
  2:       0        1        1
  3:       0        1        1
device topology        :
device           node
0000:3b:00.0      0
0000:af:00.0      1
numa_info              :
node:    memsize    memfree    distances
   0:     32768      30000      10,21
   1:     16384      15000      21,10
xen_major              : 4
"""
LSPCI = """\
0000:00:00.0 Host bridge [0600]: Intel Corporation Device [8086:2020]
0000:3b:00.0 3D controller [0302]: NVIDIA Corporation GV100GL [10de:1db4] (rev a1)
0000:af:00.0 3D controller [0302]: NVIDIA Corporation GV100GL [10de:1db4] (rev a1)
"""


def test_lspci_completes_the_host_with_gpus_on_their_nodes(tmp_path: Path) -> None:
    (tmp_path / "host.txt").write_text(INFO)
    (tmp_path / "lspci.txt").write_text(LSPCI)
    alone = load_host(str(tmp_path / "host.txt"))
    assert [gap.subject for gap in alone.gaps] == ["PCI functions", "VMs"]
    with pytest.raises(NotKnownError) as raised:
        reject_unshown(alone, "PCI")
    assert "--lspci" in str(raised.value.hint)
    with pytest.raises(NotKnownError):
        reject_unshown(make_empty_host("none", (Gap("memory", "not shown"),)), "memory")
    host = load_host(str(tmp_path / "host.txt"), lspci=tmp_path / "lspci.txt")
    assert [(node.pus, node.memory_bytes) for node in host.nodes] == [
        (CpuSet([0, 1]), 32 << 30),
        (CpuSet([2, 3]), 16 << 30),
    ]
    assert (len(host.cores), host.distances) == (2, ((10, 21), (21, 10)))
    assert [gpu.node for gpu in host.whole_gpus] == [0, 1]
    assert [gap.subject for gap in host.gaps] == ["VMs", "node of 0000:00:00.0"]


def test_one_node_and_no_devices_are_read() -> None:
    head, _, _ = INFO.partition("device topology")
    info = parse(
        head.replace("1        1\n", "1        0\n")
        + "device topology        :\ndevice           node\nNo device topology data available\n"
        "numa_info              :\nnode:    memsize    memfree    distances\n   0:  9  8  10,-1\n"
    )
    assert (info.nodes.distances, info.node_of_function) == (((10,),), {})
    assert parse(INFO).node_of_function[Bdf.parse("0000:af:00.0")] == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (INFO.partition("numa_info")[0], "memory of each"),
        (INFO.replace("  1:       0", "  0:       0"), "each CPU once"),
        (f"cpu:\n{''.join(f'{n}: 0 0 0' + chr(10) for n in range(8193))}", "8192 at most"),
        (INFO.replace("   1:     16384", "   0:     16384"), "each node once"),
        (INFO.replace("10,21", "10,,21"), "a distance"),
    ],
)
def test_a_table_of_another_form_is_rejected(text: str, says: str) -> None:
    with pytest.raises(ParseError, match=says):
        parse(text)


def test_damaged_output_is_read_or_rejected_and_nothing_else() -> None:
    assert survives(parse, INFO, MUTATIONS) > 0
