"""Rendered hosts: discovery, and parsers of tools, give back what was described."""

import tarfile
from collections.abc import Mapping
from fnmatch import fnmatchcase

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homenode.machine.description.parse import list_shipped_hosts, load_shipped, parse_description
from homenode.machine.discover.host import discover
from homenode.machine.snapshot.contents import PATHS, PathKind
from homenode.machine.snapshot.protocol import MemorySnapshot
from homenode.machine.snapshot.store import DirectorySnapshot
from tests.memory_directory import memory_directory
from tests.rendered.machine import render
from tests.seeds import part
from tests.shared_data import SHARED
from tests.small_hosts import as_described
from tests.tree_writer import write_tree

SYSTEM = "/sys/devices/system"
REAL_TREE = SHARED / "machines" / "sysfs" / "20em64t-hybrid-1p6c2t+2ca4co1t.tar.bz2"


@st.composite
def descriptions(draw: st.DrawFn) -> str:
    """Small hosts of every shape that the format knows."""
    packages = draw(st.integers(1, 3))
    nodes = draw(st.integers(1, 3))
    share = draw(st.integers(1, 3))
    cores = nodes * share
    threads = draw(st.integers(1, 4))
    llcs = draw(st.sampled_from([n for n in range(cores + 1) if n == 0 or cores % n == 0]))
    count = packages * nodes
    lines = [
        'name = "drawn"',
        f"packages = {packages}",
        f"nodes_per_package = {nodes}",
        f"llcs_per_package = {llcs}",
        f"cores_per_package = {cores}",
        f"threads_per_core = {threads}",
        'llc_size = "8MiB"',
        f'memory_per_node = "{draw(st.integers(1, 64))}GiB"',
        f'hugepages_per_node = {{ "2MiB" = {draw(st.integers(0, 9))} }}',
    ]
    kinds = ("siblings-far", "siblings-adjacent", "siblings-far-in-package", "nodes-interleaved")
    lines.append(f'numbering = "{draw(st.sampled_from(kinds))}"')
    numbers = sorted(draw(st.sets(st.integers(0, 40), min_size=count, max_size=count)))
    lines.append(f"node_numbers = {numbers}")
    pus = packages * cores * threads
    offline = draw(st.sets(st.integers(1, pus - 1), max_size=3)) if pus > 1 else set()
    lines.append(f'offline_pus = "{",".join(map(str, sorted(offline)))}"')
    if packages > 1 and draw(st.booleans()):
        lines += ["[[package]]", "index = 1", f"threads_per_core = {draw(st.integers(1, threads))}"]
        lines[-1] = f"threads_per_core = {threads}" if offline else lines[-1]
    if draw(st.booleans()):
        lines += ["[[node]]", "index = 50", 'memory = "3GiB"', 'kind = "other"']
    if draw(st.booleans()):
        lines += ["[settings]", 'libvirt = "10.4.0"', 'qemu = "9.0.2"']
    lines += ["[model.nic]", 'class = "nic"', "total_vfs = 9", "vfs = 2", 'driver = "mlx5_core"']
    lines += ["[model.gpu]", 'class = "gpu"', 'bars = ["16MiB", "1GiB prefetchable", "64KiB io"]']
    lines += ['functions = ["audio"]']
    for _ in range(draw(st.integers(0, 3))):
        node = draw(st.sampled_from([*numbers, '"unknown"']))
        lines += ["[[root]]", f"node = {node}", f"ports = [{', '.join(draw(PORTS))}]"]
    return "\n".join(lines)


DEVICES = st.sampled_from(
    [
        '"gpu"',
        '"nic"',
        '"nvme"',
        '"empty"',
        '{ model = "gpu", trained = "5GT/s x8" }',
        '{ model = "nic", node = "unknown" }',
        '{ model = "bmc", link = "none" }',
    ]
)
SWITCHES = st.lists(DEVICES, min_size=1, max_size=3).map(
    lambda e: f"{{ switch = [{', '.join(e)}] }}"
)
PORTS = st.lists(DEVICES | SWITCHES, min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(descriptions())
def test_discovery_gives_back_what_was_described(text: str) -> None:
    described = parse_description(text, "drawn.toml").host
    found = discover(render(parse_description(text, "drawn.toml")))
    assert as_described(found, described) == described


@pytest.mark.parametrize("name", part(list_shipped_hosts(), 1))
def test_every_rendered_file_has_the_form_that_a_capture_expects(name: str) -> None:
    snapshot = render(load_shipped(name))
    files = _by_real_path_pattern(snapshot)
    for rule in PATHS:
        if rule.kind is not PathKind.FILE:
            continue
        for path, text in files.get(rule.glob.rpartition("/")[2], {}).items():
            if fnmatchcase(path, rule.glob) and path.count("/") == rule.glob.count("/"):
                kept = text
                if rule.keep:
                    kept = "\n".join(
                        line for line in text.split("\n") if line.startswith(rule.keep)
                    )
                assert rule.form.matches(kept), f"{path}: {text[:80]!r} is no {rule.form.name}"


def _by_real_path_pattern(snapshot: MemorySnapshot) -> Mapping[str, Mapping[str, str]]:
    """Files by their name, with PCI functions under the path by which they are read."""
    named: dict[str, dict[str, str]] = {}
    for path, text in snapshot.files.items():
        directory, _, name = path.rpartition("/")
        if directory.startswith("/sys/devices/pci"):
            path = f"/sys/bus/pci/devices/{directory.rpartition('/')[2]}/{name}"
        named.setdefault(name, {})[path] = text
    return named


@pytest.mark.skipif(not REAL_TREE.exists(), reason=f"{REAL_TREE} is not there")
def test_cpu_and_cache_files_are_named_as_on_a_real_machine() -> None:
    with tarfile.open(REAL_TREE) as archive:
        real = {name.partition("/")[2] for name in archive.getnames()}
    snapshot = render(load_shipped("rtx4080-i9-14900k"))
    ours = {
        path.removeprefix("/")
        for path in (*snapshot.files, *snapshot.links)
        if path.startswith((f"{SYSTEM}/cpu/cpu0/", f"{SYSTEM}/node/node0/"))
    }
    assert len(ours) > 20
    assert ours <= real


@pytest.mark.parametrize("name", ["hgx-h100", "x86-1p1n4c8t-vmd", "x86-2p2n8c16t-sriov-nic"])
def test_a_written_tree_is_read_as_the_rendered_one(name: str) -> None:
    description = load_shipped(name)
    with memory_directory() as directory:
        write_tree(render(description), directory / "tree")
        found = discover(DirectorySnapshot(name, str(directory / "tree")))
    assert as_described(found, description.host) == description.host
