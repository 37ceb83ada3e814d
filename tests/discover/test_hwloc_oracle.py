"""hwloc is the oracle: on the same tree of /sys it and discovery see the same machine."""

import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.cpuset import NodeIndex
from homenode.machine.discover.host import discover
from homenode.machine.discover.hwloc import host_from_hwloc
from homenode.machine.pci import DeviceKind
from homenode.machine.snapshot.store import open_snapshot
from homenode.machine.topology import Host, summarise
from tests.memory_directory import memory_directory
from tests.shared_data import SHARED

LSTOPO = shutil.which("lstopo-no-graphics")
TREES = {
    # name: archive and directory in it
    "hybrid-1p6c2t-8c": "20em64t-hybrid-1p6c2t+2ca4co1t",
    "x86-4p4n40c-pcilocality": "40intel64-2g2n4c+pcilocality",
    "x86-4p8n64-modules": "64amd64-4s2n4ca2co",
    "x86-2p11n-initiators": "fakememinitiators-1np2c+1npp+gi",
    "arm64-gb10": "nvidia-dgx-gb10",
    "ppc64-2p8n-gpu-memory": "nvidiagpunumanodes",
    "x86-cpu0-node0-offline": "offline-cpu0-node0",
    # 64,000 files, which take four seconds to look through
    "x86-4p4n144t": "nri-topology-aware-sysfs#sysfs/4-socket-server-nosnc",
    "x86-1p-desktop": "nri-topology-aware-sysfs#sysfs/desktop",
    "x86-2p6n-pmem": "nri-topology-aware-sysfs#sysfs/server",
}

pytestmark = [
    pytest.mark.hwloc,
    pytest.mark.skipif(LSTOPO is None, reason="lstopo-no-graphics is not installed"),
    pytest.mark.xdist_group("hwloc"),  # a tree is unpacked and read once
]


@pytest.fixture(scope="module")
def unpacked() -> Iterator[Path]:
    """A directory for trees, which are unpacked as they are asked for."""
    if not (SHARED / "machines" / "sysfs").is_dir():
        pytest.skip("no shared trees")
    with memory_directory() as top:
        yield top


_NOT_READ = re.compile(
    r"/memory/memory|/node\d+/memory\d+|/power/|/(?:cpuidle|thermal_throttle|hotplug|microcode)/"
    r"|/cache/index\d+/(?!level|type|size|shared_cpu)|/(?:firmware_node|subsystem|uevent)$"
    r"|/policy\d+/(?!base_frequency|cpuinfo_max_freq|scaling_governor)"
)


def _is_read(member: tarfile.TarInfo) -> bool:
    return not member.isdev() and _NOT_READ.search(member.name) is None


def _unpack(tar: tarfile.TarFile, top: Path) -> None:
    """Content only: owners, modes and times would take most of the time. Nothing of the 100,000
    files that neither hwloc nor discovery reads."""
    made: set[str] = set()
    for member in filter(_is_read, tar):
        assert ".." not in member.name.split("/"), member.name
        path = f"{top}/{member.name}"
        directory = path if member.isdir() else path.rpartition("/")[0]
        if directory not in made:
            Path(directory).mkdir(parents=True, exist_ok=True)
            made.add(directory)
        if member.issym():
            Path(path).symlink_to(member.linkname)
        elif member.isfile():
            content = tar.extractfile(member)
            assert content is not None
            Path(path).write_bytes(content.read())


@cache
def _both(unpacked: Path, name: str) -> tuple[Host, Host]:
    archive, _, directory = TREES[name].partition("#")
    if not (unpacked / archive).exists():
        with tarfile.open(SHARED / "machines" / "sysfs" / f"{archive}.tar.bz2") as tar:
            _unpack(tar, unpacked / archive)
    below = unpacked / archive / directory
    root = next(
        path.parent
        for path in (below, *below.iterdir())
        for path in [path / "sys"]
        if path.is_dir()
    )
    assert LSTOPO is not None
    document = subprocess.run(
        [LSTOPO, "--disallowed", "--filter", "io:all", "--of", "xml"],
        env={
            "PATH": os.environ["PATH"],
            "HWLOC_FSROOT": str(root),
            "HWLOC_THISSYSTEM": "0",
            "HWLOC_COMPONENTS": "linux,stop",  # no CPUID of the machine that runs the test
            # By default hwloc hides nodes of GPU memory. They are nodes, and we show them.
            "HWLOC_KEEP_NVIDIA_GPU_NUMA_NODES": "1",
        },
        capture_output=True,
        check=True,
        timeout=300,
    ).stdout
    return discover(open_snapshot(root)), host_from_hwloc(document, name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] if "#" in path or "x86-4p" in name else [])
        for name, path in TREES.items()
    ],
)
def test_discovery_sees_the_machine_that_hwloc_sees(unpacked: Path, name: str) -> None:
    ours, theirs = _both(unpacked, name)

    def online(host: Host) -> set[int]:
        return {pu.index for pu in host.pus if pu.online}

    assert online(ours) == online(theirs)
    assert {core.pus for core in ours.cores} == {core.pus for core in theirs.cores}
    assert {core.id for core in ours.cores} == {core.id for core in theirs.cores}
    assert {core.pus: core.kind for core in ours.cores} == {c.pus: c.kind for c in theirs.cores}
    assert {(llc.pus, llc.level, llc.size_bytes) for llc in ours.llcs} == {
        (llc.pus, llc.level, llc.size_bytes) for llc in theirs.llcs
    }
    assert ours.packages == theirs.packages
    assert [(n.index, n.pus, n.memory_bytes, n.package) for n in ours.nodes] == [
        (n.index, n.pus, n.memory_bytes, n.package) for n in theirs.nodes
    ]
    assert [n.index for n in ours.nodes if not n.pus] == [
        n.index for n in theirs.nodes if not n.pus
    ]
    assert ours.distances == theirs.distances
    assert [(pu.index, pu.allowed) for pu in ours.pus if pu.online] == [
        (pu.index, pu.allowed) for pu in theirs.pus if pu.online
    ]
    assert [(d.bdf, d.class_code >> 8, d.local_pus) for d in ours.pci_devices] == [
        (d.bdf, d.class_code >> 8, d.local_pus) for d in theirs.pci_devices
    ]
    assert [(d.bdf, d.parent, d.root_complex) for d in ours.pci_devices] == [
        (d.bdf, d.parent, d.root_complex) for d in theirs.pci_devices
    ]


def test_gpu_memory_is_distinguished_from_other_memory(unpacked: Path) -> None:
    host, _ = _both(unpacked, "ppc64-2p8n-gpu-memory")
    gpus = {node.index: str(node.gpu) for node in host.nodes if node.memory_kind == "gpu"}
    assert sorted(gpus) == [250, 251, 252, 253, 254, 255]
    assert gpus[NodeIndex(250)] == "0035:05:00.0"
    assert summarise(host).gpus == 6
    assert {d.node for d in host.devices_of_kind(DeviceKind.GPU)} == {0, 8}


def test_a_node_without_cpus_or_memory_that_initiates_is_kept(unpacked: Path) -> None:
    host, _ = _both(unpacked, "x86-2p11n-initiators")
    node = host.find_node(4)
    assert node is not None and node.generic_initiator
    assert not node.pus and node.memory_bytes == 0
    assert {n.index for n in host.nodes if n.memory_kind == "other"} == {7, 10}


def test_pus_of_an_offline_node_have_no_node_and_a_gap(unpacked: Path) -> None:
    host, _ = _both(unpacked, "x86-cpu0-node0-offline")
    assert [pu.index for pu in host.pus if not pu.online] == [0, 1, 2, 3, 21, 22, 23]
    assert all(pu.node is None for pu in host.pus if pu.online and pu.index % 2 == 0)
    assert any(gap.subject.startswith("node of CPUs 4,6,8") for gap in host.gaps)


def test_cores_of_two_speeds_are_two_kinds(unpacked: Path) -> None:
    host, _ = _both(unpacked, "hybrid-1p6c2t-8c")
    assert [len(core.pus) for core in host.cores if core.kind == "performance"] == [2] * 6
    assert [len(core.pus) for core in host.cores if core.kind == "efficiency"] == [1] * 8
    gb10, _ = _both(unpacked, "arm64-gb10")
    assert [c.index for c in gb10.cores if c.kind == "performance"] == [
        *range(5, 10),
        *range(15, 20),
    ]


MACHINES = [
    path
    for path in sorted((SHARED / "machines" / "hwloc").glob("*.xml"))
    if b'<topology version="2' in path.read_bytes()  # an lstopo of hwloc 2 cannot read version 3
]
SYNTHETIC = (
    "pack:2 [numa] l3:2 l2:4 l1d:1 core:1 pu:2",
    "pack:2 die:2 [numa] l3:1 core:4 pu:1",
    "group:2 [numa] pack:1 [numa] core:2 pu:2",
    "pack:1 core:4 pu:1",
)


def _lstopo(*arguments: str) -> bytes:
    assert LSTOPO is not None
    command = [LSTOPO, *arguments, "--disallowed", "--filter", "io:all", "--of", "xml"]
    return subprocess.run(command, capture_output=True, check=True, timeout=300).stdout


@pytest.mark.parametrize("source", [*SYNTHETIC, *MACHINES], ids=str)
def test_version_1_is_read_as_hwloc_itself_imports_it(source: str | Path, tmp_path: Path) -> None:
    old = tmp_path / "old.xml"
    old.write_bytes(_lstopo("-i", str(source), "--export-xml-flags", "1"))
    assert b"<topology>" in old.read_bytes()
    ours = host_from_hwloc(old.read_bytes(), "a host")
    theirs = host_from_hwloc(_lstopo("-i", str(old)), "a host")
    assert replace(ours, gaps=(), nodes=()) == replace(theirs, gaps=(), nodes=())
    assert [(n.index, n.pus, n.memory_bytes) for n in ours.nodes] == [
        (n.index, n.pus, n.memory_bytes) for n in theirs.nodes
    ]
