"""Outputs of AMD's tools."""

import json
from typing import Any

import pytest

from homenode.bdf import Bdf
from homenode.errors import ParseError
from homenode.machine.discover.host import discover
from homenode.machine.pci import DeviceLink, LinkKind
from homenode.machine.tools import amd_smi
from homenode.machine.tools.amd_smi import AmdLink
from homenode.machine.tools.rocm_bandwidth_test import parse
from homenode.machine.topology import Host
from tests.mutations import MUTATIONS, survives
from tests.sysfs_trees import cpu_files, pci_function, snapshot

ADDRESSES = ("0000:05:00.0", "0000:15:00.0", "0000:65:00.0")
A, B, C = (Bdf.parse(text) for text in ADDRESSES)


def _link(gpu: int, kind: str, hops: int) -> dict[str, Any]:
    return {
        "gpu": gpu,
        "bdf": ADDRESSES[gpu],
        "weight": 15,
        "link_status": "ENABLED",
        "link_type": kind,
        "num_hops": hops,
        "bandwidth": "N/A",
    }


KINDS = (("SELF", "PCIE", "XGMI"), ("PCIE", "SELF", "XGMI"), ("XGMI", "XGMI", "SELF"))
AMD: list[dict[str, Any]] = [
    {
        "gpu": i,
        "bdf": ADDRESSES[i],
        "links": [_link(j, kind, 1 if kind == "XGMI" else 2) for j, kind in enumerate(row)],
    }
    for i, row in enumerate(KINDS)
]
_PAIRS = {(0, 1): ("PCIE", "2"), (0, 2): ("XGMI", "1"), (1, 2): ("XGMI", "1")}
ROCM: dict[str, dict[str, str]] = {
    **{
        f"card{i}": {"PCI Bus": ADDRESSES[i].upper(), "(Topology) Numa Node": f"{i // 2}"}
        for i in range(3)
    },
    "system": {
        **{
            f"(Topology) Hops between DRM devices {a} and {b}": h
            for (a, b), (_, h) in _PAIRS.items()
        },
        **{
            f"(Topology) Link type between DRM devices {a} and {b}": k
            for (a, b), (k, _) in _PAIRS.items()
        },
    },
}
LINKS = (AmdLink(0, 1, "PCIE", 2), AmdLink(0, 2, "XGMI", 1), AmdLink(1, 2, "XGMI", 1))


def test_amd_smi_tells_links_by_address() -> None:
    topology = amd_smi.parse_topology(json.dumps(AMD, indent=4))
    turned = (AmdLink(link.b, link.a, link.kind, link.hops) for link in LINKS)
    assert topology.links == tuple(sorted([*LINKS, *turned]))
    assert topology.bdf_of_gpu == {0: A, 1: B, 2: C}


@pytest.mark.parametrize(
    "text",
    [
        "WARNING: User is missing the following required groups: render\n" + json.dumps(AMD),
        json.dumps({"gpu_data": AMD}, indent=4) + "\n",
        "\ufeff" + json.dumps(AMD, indent=4).replace("\n", "\r\n"),
        json.dumps(list(reversed(AMD))),
    ],
)
def test_amd_smi_is_read_as_its_releases_print_it(text: str) -> None:
    assert amd_smi.parse_topology(text) == amd_smi.parse_topology(json.dumps(AMD))


@pytest.mark.parametrize("lower", [False, True])
def test_rocm_smi_tells_each_pair_once(lower: bool) -> None:
    text = json.dumps(ROCM)
    topology = amd_smi.parse_rocm_topology(text.lower() if lower else text)
    assert topology.links == LINKS
    assert topology.bdf_of_gpu == {0: A, 1: B, 2: C}
    assert topology.node_of_gpu == {0: 0, 1: 0, 2: 1}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ERROR: no driver",
        "[]",
        "{}",
        "[1]",
        '[{"gpu": -1}]',
        '[{"gpu": 0}, {"gpu": 0}]',
        '[{"gpu": 0, "bdf": "x"}]',
        '[{"gpu": 0, "link_type": {"gpu_1": "XGMI"}}]',
        "[{",
        '{"gpu_data": 3}',
    ],
)
def test_what_is_no_topology_is_refused(text: str) -> None:
    with pytest.raises(ParseError):
        amd_smi.parse_topology(text)
    if "gpu" not in text:
        with pytest.raises(ParseError):
            amd_smi.parse_rocm_topology(text)


def test_damaged_outputs_are_read_or_refused() -> None:
    survives(amd_smi.parse_topology, json.dumps(AMD, indent=1))
    survives(amd_smi.parse_rocm_topology, json.dumps(ROCM, indent=1))


def _host(**outputs: str) -> Host:
    """Three GPUs; the tools number them in another order than that of their addresses."""
    files = cpu_files()
    for i, bdf in enumerate(ADDRESSES):
        files |= pci_function(f"0000:00:0{i + 1}.0", "060400", "1022:1483", i // 2)
        files |= pci_function(f"0000:00:0{i + 1}.0/{bdf}", "120000", "1002:74a1", i // 2)
    commands = {name.replace("_", "-"): text for name, text in outputs.items()}
    return discover(snapshot(files, commands=commands))


EXPECTED = (DeviceLink(LinkKind.XGMI, A, C), DeviceLink(LinkKind.XGMI, B, C))


def _renumbered() -> str:
    """The same links, where amd-smi counts from the highest address down."""
    number = {0: 2, 1: 1, 2: 0}
    return json.dumps(
        [
            {
                **one,
                "gpu": number[i],
                "links": [{**link, "gpu": number[link["gpu"]]} for link in AMD[i]["links"]],
            }
            for i, one in enumerate(AMD)
        ]
    )


@pytest.mark.parametrize(
    "outputs",
    [
        {"amd_smi_topology": json.dumps(AMD)},
        {"amd_smi_topology": _renumbered()},
        {"rocm_smi_json": json.dumps(ROCM)},
        {"amd_smi_topology": json.dumps(AMD), "rocm_smi_json": "{}"},
    ],
)
def test_links_come_from_the_tool_that_tells_them(outputs: dict[str, str]) -> None:
    host = _host(**outputs)
    assert host.links == EXPECTED
    assert not [gap for gap in host.gaps if "xGMI" in gap.subject]


def test_a_tool_that_fails_gives_way_to_the_next_and_is_a_gap() -> None:
    host = _host(amd_smi_topology="[{", rocm_smi_json=json.dumps(ROCM))
    assert host.links == EXPECTED
    assert [gap.subject for gap in host.gaps if "xGMI" in gap.subject] == ["xGMI links"]
    assert "xGMI links" in {gap.subject for gap in _host().gaps}


def test_a_node_that_differs_from_sysfs_is_a_gap_and_keeps_the_links() -> None:
    other = {**ROCM, "card2": {**ROCM["card2"], "(Topology) Numa Node": "0"}}
    host = _host(rocm_smi_json=json.dumps(other))
    assert host.links == EXPECTED
    assert f"node of {C}" in {gap.subject for gap in host.gaps}


def test_gpus_of_another_machine_give_no_links() -> None:
    other = json.dumps(AMD).replace("0000:", "0001:")
    host = _host(amd_smi_topology=other)
    assert host.links == ()
    assert "none of the GPUs" in {gap.subject: gap.reason for gap in host.gaps}["xGMI links"]


def test_xgmi_links_are_those_one_hop_long() -> None:
    far = json.dumps(AMD).replace('"num_hops": 1', '"num_hops": 3')
    assert _host(amd_smi_topology=far).links == ()


def test_partitions_of_one_gpu_have_no_link_to_each_other() -> None:
    twice = [*AMD, {**AMD[2], "gpu": 3}]
    assert _host(amd_smi_topology=json.dumps(twice)).links == EXPECTED


MATRICES = """\
.......................................
          RocmBandwidthTest Version: 2.6.0

          Launch Command is: rocm-bandwidth-test (rocm_bandwidth -a + rocm_bandwidth -A)


          Device: 0,  AMD EPYC 9575F 64-Core Processor
          Device: 1,  AMD Instinct MI350X,  GPU-9f50716172fd5d40,  0d:0.0

          Inter-Device Access

          D/D       0         1

          0         1         1

          1         1         1


          Inter-Device Numa Distance

          D/D       0         1

          0         0         N/A

          1         20        0


          Unidirectional copy peak bandwidth GB/s

          D/D       0           1

          0         N/A         55.177

          1         56.151      1594.097


          Bdirectional copy peak bandwidth GB/s

          D/D       0           1

          0         N/A         93.053

          1         93.053      N/A
"""

PAIR = """\
================    Bidirectional Benchmark Result    ================
================ Src Device Id: 0 Src Device Type: Cpu ================
================ Dst Device Id: 2 Dst Device Type: Gpu ================

Data Size      Avg Time(us)   Avg BW(GB/s)   Min Time(us)   Peak BW(GB/s)
1 KB           4.920          0.416          4.640          0.441
512 MB         10485.760      102.4          10240.000      104.858
2 GB           41943.040      102.4          40960.000      104.858
"""


def test_rows_are_sources_and_columns_destinations() -> None:
    one_way, both_ways = parse(MATRICES).matrices
    assert one_way.cells[0][0] is None
    assert one_way.cells[0][1] == pytest.approx(55.177e9)
    assert list(one_way.cells[1]) == pytest.approx([56.151e9, 1594.097e9])
    assert (one_way.is_bidirectional, both_ways.is_bidirectional) == (False, True)


def test_a_gpu_keeps_its_address_and_not_its_identity() -> None:
    run = parse(MATRICES)
    assert run.devices[1].address == Bdf(0, 0x0D, 0, 0)
    assert run.devices[0].address is None
    assert "9f50716172fd5d40" not in repr(run)
    assert not run.gaps


def test_a_pair_is_read_by_size() -> None:
    small, middle, large = parse(PAIR).copies
    assert [one.size_bytes for one in (small, middle, large)] == [1 << 10, 512 << 20, 2 << 30]
    assert (large.source, large.destination, large.source_is_cpu) == (0, 2, True)
    assert large.peak_bytes_per_s == pytest.approx(104.858e9)
    assert large.is_bidirectional


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a matrix"),
        (MATRICES.replace("56.151      1594.097", "56.151"), "the row of device 1 with 2 values"),
        (MATRICES[: MATRICES.index("1         56.151")], "2 rows"),
        (PAIR.replace("104.858", "0.000"), "above 0"),
        (PAIR[PAIR.index("Data") :], "a source and a destination"),
        (MATRICES + MATRICES, "one run"),
    ],
)
def test_output_that_is_none_is_refused(text: str, says: str) -> None:
    with pytest.raises(ParseError, match=says):
        parse(text)


@pytest.mark.parametrize("text", [MATRICES, PAIR])
def test_damaged_output_is_read_or_refused_and_nothing_else(text: str) -> None:
    assert survives(parse, text, MUTATIONS) > 0
