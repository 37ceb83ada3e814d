"""Rendered hosts: discovery, and parsers of tools, give back what was described."""

import tarfile
from collections.abc import Mapping
from fnmatch import fnmatchcase
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homenode.errors import InputError
from homenode.machine.description.parse import load_shipped, parse_description, shipped_hosts
from homenode.machine.discover.host import discover
from homenode.machine.snapshot.contents import PATHS, Kind
from homenode.machine.snapshot.memory import MemorySnapshot
from homenode.machine.snapshot.store import FolderSnapshot
from homenode.machine.tools import amd_smi, nvidia_smi
from homenode.machine.tools.lspci import parse as parse_lspci
from homenode.machine.tools.versions import parse_qemu_version, parse_virsh_version
from tests.memory_folder import memory_folder
from tests.rendered.machine import render
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


@pytest.mark.parametrize("name", shipped_hosts())
def test_every_rendered_file_has_the_form_that_a_capture_expects(name: str) -> None:
    snapshot = render(load_shipped(name))
    files = _by_real_path_pattern(snapshot)
    for rule in PATHS:
        if rule.kind is not Kind.FILE:
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
        folder, _, name = path.rpartition("/")
        if folder.startswith("/sys/devices/pci"):
            path = f"/sys/bus/pci/devices/{folder.rpartition('/')[2]}/{name}"
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
    with memory_folder() as folder:
        write_tree(render(description), folder / "tree")
        found = discover(FolderSnapshot(name, str(folder / "tree")))
    assert as_described(found, description.host) == description.host


def test_a_tree_is_written_to_a_new_folder_only_and_never_out_of_it(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(InputError, match="expected a new or empty folder"):
        write_tree(MemorySnapshot("host", {"/a": ""}), tmp_path / "full")
    with pytest.raises(InputError, match=r"expected absolute paths, found '/\.\./a'"):
        write_tree(MemorySnapshot("host", {"/../a": ""}), tmp_path / "new")
    assert not (tmp_path / "new").exists()


HEAD = 'name = "a"\npackages = 2\ncores_per_package = 4\nmemory_per_node = "8GiB"\n'


def _output(text: str, command: str) -> str:
    output = render(parse_description(HEAD + text, "host.toml")).command_output(command)
    assert output is not None
    return output


def test_nvidia_smi_tells_nvlinks_and_the_nodes_of_gpu_memory() -> None:
    output = render(load_shipped("gh200x4")).command_output("nvidia-smi-topo")
    matrix = nvidia_smi.parse_topology(output or "")
    assert [device.memory_node for device in matrix.devices] == [4, 12, 20, 28]
    assert [str(device.cpus) for device in matrix.devices] == [
        "0-71",
        "72-143",
        "144-215",
        "216-287",
    ]
    assert {matrix.nvlinks(a, b) for a in range(4) for b in range(4) if a != b} == {6}


def test_nvidia_smi_tells_how_gpus_without_nvlink_reach_each_other() -> None:
    matrix = nvidia_smi.parse_topology(
        _output(
            """
            [[root]]
            node = 0
            ports = [{ switch = ["gpu", "gpu"] }, "gpu"]
            [[root]]
            node = [0, 1]
            ports = ["gpu"]
            [[link]]
            kind = "nvlink"
            between = ["gpu.2", "gpu.3"]
            count = 4
            """,
            "nvidia-smi-topo",
        )
    )
    assert matrix.links[0] == ("X", "PIX", "PHB", "NODE", "SYS")
    assert matrix.nvlinks(2, 3) == 4


def test_gpus_of_another_driver_are_not_seen_and_have_no_links() -> None:
    text = """
        [[root]]
        ports = ["gpu", { model = "gpu", driver = "vfio-pci" }]
        """
    assert len(nvidia_smi.parse_topology(_output(text, "nvidia-smi-topo")).devices) == 1
    with pytest.raises(InputError, match="GPUs that the driver nvidia has"):
        _output(text + '[[link]]\nbetween = "gpu"\ncount = 2', "nvidia-smi-topo")


def test_rocm_smi_tells_xgmi_between_physical_functions_only() -> None:
    output = render(load_shipped("mi350x-epyc9575f")).command_output("rocm-smi-json")
    topology = amd_smi.parse_rocm_topology(output or "")
    assert len(topology.bdf_of_gpu) == 8
    assert [(link.a, link.b, link.kind) for link in topology.links] == [
        (a, b, "XGMI") for a, b in combinations(range(8), 2)
    ]
    assert list(topology.node_of_gpu.values()) == [0, 0, 0, 0, 1, 1, 1, 1]


def test_versions_are_those_that_the_file_names() -> None:
    text = '[settings]\nlibvirt = "10.4.0"\nqemu = "9.0.2"\n'
    assert parse_virsh_version(_output(text, "virsh-version"))[0] == (10, 4, 0)
    assert parse_qemu_version(_output(text, "qemu-version")) == (9, 0, 2)
    assert render(parse_description(HEAD, "host.toml")).command_output("virsh-version") is None


def test_lspci_names_every_function() -> None:
    description = load_shipped("hgx-h100")
    functions = parse_lspci(render(description).command_output("lspci") or "", "lspci")
    listed = [(f.bdf, f.class_code, f.vendor_id, f.device_id, f.name) for f in functions]
    assert listed == [
        (d.bdf, d.class_code, d.vendor_id, d.device_id, d.name)
        for d in description.host.pci_devices
    ]
