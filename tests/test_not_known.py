"""What was not read is named in every answer; where nothing is checked, the exit code is 5."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from homenode.machine.description.parse import load_shipped
from homenode.machine.snapshot.live import LiveSnapshot
from homenode.machine.snapshot.memory import MemorySnapshot
from tests.command_line import has_cluster, homenode
from tests.measure.test_import import COPIES
from tests.published_runs import FOLDER
from tests.rendered.machine import render
from tests.slurm.gpu_nodes import Listed, scontrol_text
from tests.tree_writer import write_tree
from tests.virsh_stand_in import StandIn

Be = Callable[[str, str | None], None]
NODES = "/sys/devices/system/node"
BROKEN = "<domains><domain type='kvm' id='1'><name>db</name></domain></domains>"
GAPS: dict[str, tuple[str, str | None]] = {
    # word of the answer: the files that are missing, or a tool with its output
    "VMs, pins and allocations": ("virsh-domains", None),
    "running VM": ("virsh-domains", BROKEN),
    "libvirt's view of the host|virsh-capabilities": ("virsh-capabilities", "<capabilities>"),
    "NVLinks": ("nvidia-smi-topo", None),
    "GPUs as nvidia-smi names them|nvidia-smi-query": ("nvidia-smi-query", "<nvidia_smi_log>"),
    "distances": (f"{NODES}/node./distance", None),
    "memory": (f"{NODES}/node./meminfo", None),
    "NUMA nodes": (f"{NODES}/.*", None),
    "last-level cache": ("/sys/.*/cache/.*", None),
    "cores and packages|share a core": ("/sys/.*/topology/.*", None),
    "node of": ("/sys/.*/(numa_node|local_cpu.*)", None),
    "link": ("/sys/.*/(current|max)_link_.*", None),
}
VMI = {
    "apiVersion": "kubevirt.io/v1",
    "kind": "VirtualMachineInstance",
    "metadata": {"name": "vm"},
    "spec": {"domain": {"cpu": {"cores": 2}, "memory": {"guest": "1Gi"}, "devices": {}}},
}
VM = (
    "<domain type='kvm'><name>vm</name><memory unit='GiB'>1</memory><vcpu>2</vcpu>"
    "<os><type arch='x86_64' machine='q35'>hvm</type></os><devices>"
    "<controller type='pci' index='0' model='pcie-root'/>"
    "<controller type='pci' index='1' model='pcie-root-port'>"
    "<address type='pci' domain='0' bus='0' slot='1' function='0'/></controller>"
    "<hostdev mode='subsystem' type='pci'><source><address bus='0x11' slot='0'/></source>"
    "<address type='pci' domain='0' bus='1' slot='0' function='0'/></hostdev>"
    "<controller type='usb' model='none'/><memballoon model='none'/></devices></domain>"
)
FILES = {
    "vm.xml": VM,
    "vmi.json": json.dumps(VMI),
    "gres.conf": "NodeName=n Name=gpu File=/dev/nvidia[0-1]\n",
    "slurm.conf": "GresTypes=gpu\nNodeName=n CPUs=8 Gres=gpu:2\n",
    "copies.txt": COPIES,
    "jobs.txt": scontrol_text([Listed(1, ["n"], range(4), (0,))]),
}
COMMANDS = (
    "show --host TREE",
    "plan vm.xml --layout pin-bound --host TREE",
    "plan vm.xml --layout default --host TREE --json",
    "apply vm.xml --layout default --host TREE --dry-run",
    "capture -o captured.tar.gz",
    "doctor --host TREE",
    "doctor",
    "doctor vm.xml --json",
    "verify vm.xml --host TREE",
    "trial vm --layouts default,pin --dry-run --host TREE",
    "bench --dry-run --tests stream",
    "import copies.txt --machine TREE -o imported",
    "compare RESULTS --host TREE",
    "report RESULTS --host TREE -o report.html",
    "pool show --pool TREE",
    "pool place vm.xml --layout default --pool TREE",
    "kubevirt check vmi.json --host TREE",
    "slurm check gres.conf slurm.conf --host TREE",
    "slurm audit --jobs jobs.txt --host TREE",
    "nccl-topo --domain vm.xml --host TREE -o topo.xml",
)


@pytest.fixture(scope="module")
def machine() -> MemorySnapshot:
    """A machine of which everything is known: 8 cores, 2 nodes, 2 GPUs."""
    return render(load_shipped("small-2n8c-2gpu"))


def without(machine: MemorySnapshot, missing: str, output: str | None) -> MemorySnapshot:
    """The machine without the files, or with another output of the tool, or none."""
    commands = {**machine.commands, "virsh-domains": "<domains/>"}
    commands.pop(missing, None)
    if output is not None:
        commands[missing] = output
    files = {path: text for path, text in machine.files.items() if not re.fullmatch(missing, path)}
    return MemorySnapshot("tree", files, machine.links, commands)


@pytest.fixture
def here(machine: MemorySnapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Be:
    """Let a machine be the one that homenode runs on, as the directory TREE."""

    def be(missing: str, output: str | None) -> None:
        shown = without(machine, missing, output)
        write_tree(shown, tmp_path / "TREE")
        before = LiveSnapshot.__init__
        monkeypatch.setattr(
            LiveSnapshot, "__init__", lambda self: before(self, str(tmp_path / "TREE"))
        )
        monkeypatch.setattr(LiveSnapshot, "_run", lambda self, tool: shown.commands.get(tool.name))

    daemon = StandIn(tmp_path / "daemon", "vm", VM.encode())
    monkeypatch.setenv("PATH", f"{daemon.bin}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    return be


@pytest.mark.parametrize("gap", GAPS)
def test_an_answer_names_what_was_not_read_of_its_host(gap: str, here: Be) -> None:
    here(*GAPS[gap])
    silent = []
    for command in COMMANDS:
        if command.startswith(("pool", "kubevirt", "slurm")) and not has_cluster():
            continue
        answer = homenode(*command.replace("RESULTS", str(FOLDER / "gh200-x4")).split())
        if not re.search(gap, answer.output + str(answer.exception)):
            silent.append((command, answer))
    assert not silent
