"""JSON of amd-smi topology and of rocm-smi: parsers, and what discovery makes of them."""

import json
from typing import Any

import pytest

from homenode.bdf import Bdf
from homenode.errors import ParseError
from homenode.machine.discover import discover
from homenode.machine.pci import DeviceLink, LinkKind
from homenode.machine.tools import amd_smi
from homenode.machine.topology import Host
from tests.mutations import survives
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
OLD_AMD = [
    {
        "gpu": i,
        "weight": {f"gpu_{j}": 15 for j in range(3)},
        "hops": {f"gpu_{j}": 1 if kind == "XGMI" else 2 for j, kind in enumerate(row)},
        "link_type": {f"gpu_{j}": kind for j, kind in enumerate(row)},
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
LINKS = ((None, "PCIE", "XGMI"), ("PCIE", None, "XGMI"), ("XGMI", "XGMI", None))


def test_amd_smi_tells_links_by_address() -> None:
    topology = amd_smi.parse_topology(json.dumps(AMD, indent=4))
    assert topology.links == LINKS
    assert topology.hops[0][1:] == (2, 1)
    assert topology.bdf_of_gpu == ((0, A), (1, B), (2, C))


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


def test_releases_of_amd_smi_without_addresses_are_read() -> None:
    topology = amd_smi.parse_topology(json.dumps(OLD_AMD, indent=4))
    assert (topology.links, topology.bdf_of_gpu) == (LINKS, ())


@pytest.mark.parametrize("lower", [False, True])
def test_rocm_smi_tells_each_pair_once(lower: bool) -> None:
    text = json.dumps(ROCM)
    topology = amd_smi.parse_rocm_json(text.lower().replace("xgmi", "XGMI") if lower else text)
    assert topology.links == LINKS
    assert topology.hops == ((0, 2, 1), (2, 0, 1), (1, 1, 0))
    assert topology.bdf_of_gpu == ((0, A), (1, B), (2, C))
    assert topology.node_of_gpu == ((0, 0), (1, 0), (2, 1))


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
        "[{",
        '{"gpu_data": 3}',
    ],
)
def test_what_is_no_topology_is_refused(text: str) -> None:
    with pytest.raises(ParseError):
        amd_smi.parse_topology(text)
    if "gpu" not in text:
        with pytest.raises(ParseError):
            amd_smi.parse_rocm_json(text)


def test_damaged_outputs_are_read_or_refused() -> None:
    survives(amd_smi.parse_topology, json.dumps(AMD, indent=1))
    survives(amd_smi.parse_topology, json.dumps(OLD_AMD, indent=1))
    survives(amd_smi.parse_rocm_json, json.dumps(ROCM, indent=1))


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
        {"amd_smi_topology": json.dumps(OLD_AMD)},
        {"amd_smi_topology": _renumbered()},
        {"rocm_smi_json": json.dumps(ROCM)},
        {"amd_smi_topology": json.dumps(AMD), "rocm_smi_json": "{}", "rocm_smi_topo": "broken"},
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


def test_partitions_of_one_gpu_have_no_link_to_each_other() -> None:
    twice = [*AMD, {**AMD[2], "gpu": 3}]
    assert _host(amd_smi_topology=json.dumps(twice)).links == EXPECTED
