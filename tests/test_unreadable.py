"""What this user may not read or write is a message and exit code 3, in every command."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sysfs_trees import CPU, NODE, cpu_files, pci_function

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


def _run(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    before: tuple[str, ...] = ()
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root ignores modes, and setpriv (util-linux) is not installed")
        before = ROOT_IGNORES_MODES
    argv = [*before, sys.executable, "-m", "homenode.cli.main", *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)


def _assert_refused(ended: "subprocess.CompletedProcess[str]", path: Path) -> None:
    assert ended.returncode == 3, ended
    assert "Traceback" not in ended.stderr
    assert ended.stderr.startswith("homenode: ") and str(path) in ended.stderr, ended.stderr


@pytest.mark.parametrize(
    "arguments",
    [
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
    ],
)
def test_an_unreadable_directory_is_a_message_and_exit_code_3(
    dark: Path, tmp_path: Path, arguments: str
) -> None:
    vm = tmp_path / "vm.xml"
    vm.write_text(VM)
    words = arguments.replace("DARK", str(dark)).replace("VM", str(vm)).split()
    _assert_refused(_run(*words), dark)


def _tree(tmp_path: Path) -> Path:
    files = cpu_files() | pci_function("0000:00:01.0", "030200", "10de:2330")
    for path, text in files.items():
        file = tmp_path / "tree" / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "tree"


@pytest.mark.parametrize(
    "directory", ["/sys", "/sys/devices", CPU, NODE, f"{NODE}/node1", f"{CPU}/cpu3/topology"]
)
def test_a_tree_with_an_unreadable_directory_of_cpus_or_nodes_is_refused(
    tmp_path: Path, directory: str
) -> None:
    tree = _tree(tmp_path)
    hidden = tree / directory.lstrip("/")
    hidden.chmod(0)
    try:
        ended = _run("show", "--host", tree, "--json")
    finally:
        hidden.chmod(0o700)
    _assert_refused(ended, Path(directory))
