"""What this user may not read or write is a message and exit code 3, in every command."""

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from homenode.machine.snapshot.protocol import MemorySnapshot
from tests.processes import run_text
from tests.sysfs_trees import CPU, NODE, cpu_files, pci_function
from tests.tree_writer import write_tree

ROOT_IGNORES_MODES = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--")
"""Starts a program without the two capabilities by which root reads and writes everything."""

VM = (
    "<domain type='kvm'><name>vm</name><memory unit='GiB'>8</memory><vcpu>4</vcpu>"
    "<os><type arch='x86_64' machine='q35'>hvm</type></os></domain>"
)


@pytest.fixture
def dark(tmp_path: Path) -> Iterator[Path]:
    """A directory that no one may read, write or enter, with a file in it."""
    directory = tmp_path / "dark"
    directory.mkdir()
    (directory / "vm.xml").write_text(VM)
    directory.chmod(0)
    yield directory
    directory.chmod(0o700)


CALLS = """
import json, sys
from tests.command_line import homenode
ended = [homenode(*words, whole=True) for words in json.load(sys.stdin)]
print(json.dumps([(one.exit_code, one.stderr) for one in ended]))
"""
"""Runs calls one after the other in one process, which begins in 0.4 s."""


def _assert_refused(calls: Sequence[str], paths: Sequence[str]) -> None:
    """Each call ends with exit code 3 and names its path, without what lets root read all."""
    before: tuple[str, ...] = ()
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root ignores modes, and setpriv (util-linux) is not installed")
        before = ROOT_IGNORES_MODES
    done = run_text(
        [*before, sys.executable, "-c", CALLS],
        input=json.dumps([call.split() for call in calls]),
        cwd=Path(__file__).parents[1],
        timeout=300,
        check=True,
    )
    for call, path, (code, text) in zip(calls, paths, json.loads(done.stdout), strict=True):
        assert (code, "Traceback" in text) == (3, False), (call, text)
        assert text.startswith("homenode: ") and path in text, (call, text)


COMMANDS = (
    "capture -o DARK/host.tar.gz",
    "show --host DARK",
    "show --host DARK/host.toml",
    "show --host hgx-h100 --svg DARK/host.svg",
    "show --host hgx-h100 --lspci DARK/lspci.txt",
    "doctor --host DARK",
    "doctor --host hgx-h100 DARK/vm.xml",
    "plan -l pin --host DARK VM",
    "plan -l pin --host hgx-h100 DARK/vm.xml",
    "plan -l pin --host hgx-h100 VM -o DARK/plan.json",
    "plan -l pin --host hgx-h100 VM --svg DARK/plan.svg",
    "compare DARK DARK",
    "compare DARK/a DARK/b",
    "import DARK",
    "doctor --host x86-1p1n4c4t --expect DARK/host.toml",
    "verify DARK/vm.xml",
    "restore DARK/vm.xml",
)


def test_an_unreadable_directory_is_a_message_and_exit_code_3(dark: Path, tmp_path: Path) -> None:
    vm = tmp_path / "vm.xml"
    vm.write_text(VM)
    calls = [line.replace("DARK", str(dark)).replace("VM", str(vm)) for line in COMMANDS]
    _assert_refused(calls, [str(dark)] * len(calls))


def test_a_tree_with_an_unreadable_directory_of_cpus_or_nodes_is_refused(tmp_path: Path) -> None:
    files = cpu_files() | pci_function("0000:00:01.0", "030200", "10de:2330")
    names = ("/sys", "/sys/devices", CPU, NODE, f"{NODE}/node1", f"{CPU}/cpu3/topology")
    trees = [tmp_path / str(number) for number in range(len(names))]
    hidden = [tree / name.lstrip("/") for tree, name in zip(trees, names, strict=True)]
    for tree in trees:
        write_tree(MemorySnapshot("tree", files), tree)
    try:
        for directory in hidden:
            directory.chmod(0)
        _assert_refused([f"show --host {tree} --json" for tree in trees], names)
    finally:
        for directory in hidden:
            directory.chmod(0o700)
