"""Every host that comes with homenode is what its file says, by discovery and by hwloc."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from lxml import etree
from msgspec.structs import asdict

from homenode.errors import UsageError
from homenode.findings import NO_VMS
from homenode.machine.description.parse import is_made_up, list_shipped_hosts, load_shipped
from homenode.machine.description.tables import HostDescription
from homenode.machine.discover.host import discover
from homenode.machine.discover.lspci import host_from_lspci
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import HostSummary, summarise
from homenode.package_data import read_package_text
from homenode.units import parse_bytes
from tests.memory_directory import memory_directory
from tests.rendered.machine import render
from tests.seeds import part
from tests.shared_data import SHARED
from tests.small_hosts import as_described
from tests.tree_writer import write_tree

FORMAT = Path(__file__).parents[2] / "docs" / "reference" / "formats" / "host-toml.md"
COUNTS = Path(__file__).with_name("shipped_counts.txt")
HGX_CAPTURE = SHARED / "machines" / "lspci" / "gpud-hgx-h100x8-lspci-vvv.txt"
LSTOPO = shutil.which("lstopo-no-graphics") or shutil.which("lstopo")

EVERY = pytest.mark.parametrize("name", list_shipped_hosts())


WITH_UNKNOWNS = {
    "rtx4080-i9-14900k",
    "x86-1p2n8c16t-no-cache-no-distance",
    "x86-2p2n8c16t-gpu-node-unknown",
}
"""Hosts that leave something unknown; others have no gaps."""


@EVERY
def test_a_shipped_host_is_discovered_as_described_with_the_counts_that_it_states(
    name: str,
) -> None:
    description = load_shipped(name)
    found = discover(render(description))
    assert as_described(found, description.host) == description.host
    named = {gap.subject for gap in description.host.gaps} - {NO_VMS}
    assert named <= {gap.subject for gap in found.gaps}
    assert bool(named) is (name in WITH_UNKNOWNS)
    assert bool(found.gaps) is (name in WITH_UNKNOWNS), found.gaps
    assert summarise(found) == summarise(description.host)


@EVERY
def test_a_shipped_host_is_named_as_its_file_and_says_what_it_is(name: str) -> None:
    description = load_shipped(name)
    assert description.host.name == name
    assert description.about
    table = tomllib.loads(read_package_text("machine", "hosts", f"{name}.toml"))
    assert table["facts"], "which facts are published, and which are assumed?"


def test_shipped_hosts_have_the_counts_of_their_rows() -> None:
    """A slip in a description changes them."""
    names, *rows = (line.split() for line in COUNTS.read_text().splitlines())
    assert names[1:] == list(HostSummary.__struct_fields__)
    assert [row[0] for row in rows] == list(list_shipped_hosts())
    for name, *cells in rows:
        counts = asdict(summarise(load_shipped(name).host))
        expected = {
            k: parse_bytes(c) if "bytes" in k else int(c)
            for k, c in zip(counts, cells, strict=True)
        }
        assert counts == expected, name


def test_the_format_document_lists_every_host_of_the_wheel() -> None:
    listed = re.findall(r"^\| `([a-z0-9-]+)` \|", FORMAT.read_text(), re.MULTILINE)
    shipped = list_shipped_hosts()
    assert sorted(set(listed) & set(shipped)) == [name for name in shipped if not is_made_up(name)]


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"(?s)h200-xeon8585.*did you mean h200-xeon8558"):
        load_shipped("h200-xeon8585")


@pytest.mark.skipif(not HGX_CAPTURE.exists(), reason=f"{HGX_CAPTURE} is not there")
def test_the_hgx_h100_is_where_a_captured_one_has_its_functions() -> None:
    captured = host_from_lspci(HGX_CAPTURE.read_text(), "capture")
    for ours in load_shipped("hgx-h100").host.pci_devices:
        theirs = captured.find_device(ours.bdf)
        assert theirs is not None, ours.bdf
        assert (ours.kind, ours.class_code, ours.node, ours.parent, ours.link) == (
            theirs.kind,
            theirs.class_code,
            theirs.node,
            theirs.parent,
            theirs.link,
        ), ours.bdf
        if ours.bridge is not None and theirs.bridge is not None:
            assert ours.bridge.port_type == theirs.bridge.port_type
        if ours.kind is DeviceKind.GPU:
            assert ours.bars == theirs.bars


def _lstopo(description: HostDescription, directory: Path) -> etree._Element:
    """hwloc's view of the rendered tree."""
    assert LSTOPO is not None
    write_tree(render(description), directory)
    xml = directory.parent / f"{directory.name}.xml"
    subprocess.run(
        [LSTOPO, "--of", "xml", "--disallowed", "--whole-io", str(xml)],
        check=True,
        env={
            **os.environ,
            "HWLOC_FSROOT": str(directory),
            "HWLOC_COMPONENTS": "-gl,-x86,linux",
            # By default hwloc hides the nodes that NVIDIA's driver names.
            "HWLOC_KEEP_NVIDIA_GPU_NUMA_NODES": "1",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=300,
    )
    return etree.parse(str(xml)).getroot()


@pytest.mark.hwloc
@pytest.mark.skipif(LSTOPO is None, reason="lstopo is not installed")
@pytest.mark.parametrize("name", part(list_shipped_hosts(), 2, every=9))
def test_hwloc_sees_the_same_host(name: str) -> None:
    description = load_shipped(name)
    host = description.host
    with memory_directory() as directory:
        seen = _lstopo(description, directory / "tree")

    def indices(kind: str) -> list[int]:
        return sorted(
            int(o.get("os_index", "-1")) for o in seen.iter("object") if o.get("type") == kind
        )

    def sets(kind: str) -> list[int]:
        return sorted(
            _bits(o.get("cpuset", "")) for o in seen.iter("object") if o.get("type") == kind
        )

    assert indices("PU") == [pu.index for pu in host.pus if pu.online]
    assert sets("Core") == sorted(core.pus.bits for core in host.cores)
    for level in {llc.level for llc in host.llcs}:
        assert sets(f"L{level}Cache") == sorted(
            llc.pus.bits for llc in host.llcs if llc.level == level
        )
    # hwloc leaves out nodes without memory.
    with_memory = [node.index for node in host.nodes if node.memory_bytes]
    assert [i for i in indices("NUMANode") if i in with_memory] == with_memory
    buses = {
        (o.get("pci_busid"), o.get("pci_type", "")[:4])
        for o in seen.iter("object")
        if o.get("pci_busid")
    }
    # hwloc is usually built for domains of 16 bits.
    assert buses == {
        (str(d.bdf), f"{d.class_code >> 8:04x}") for d in host.pci_devices if d.bdf.domain <= 0xFFFF
    }


def _bits(cpuset: str) -> int:
    bits = 0
    for group in cpuset.split(","):
        bits = bits << 32 | int(group or "0", 16)
    return bits


def test_hosts_that_are_named_for_their_shape_are_made_up() -> None:
    real = [name for name in list_shipped_hosts() if not is_made_up(name)]
    assert {"hgx-h100", "rtx4080-i9-14900k"} <= set(real)
    assert not [name for name in real if name.startswith(("x86-", "small-", "xapi-"))]
