"""What was not read is named in every answer; where nothing is checked, the exit code is 5."""

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest

from homenode.machine.description.parse import load_shipped
from homenode.machine.snapshot.live import LiveSnapshot
from homenode.machine.snapshot.protocol import MemorySnapshot
from tests.command_line import NEEDS_CLUSTER, has_cluster, homenode
from tests.discover.test_listings import NUMACTL, TOPOLOGY
from tests.measure.importers.test_stream import OUTPUT as STREAM
from tests.published_runs import DIRECTORY
from tests.rendered.machine import render
from tests.seeds import part
from tests.slurm.gpu_nodes import Listed, scontrol_text
from tests.tree_writer import write_tree
from tests.virsh_stand_in import UUID, StandIn

Be = Callable[[str, str | None], Path]
Written = Callable[[str, str | None], tuple[Path, Mapping[str, str]]]
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
    "cores and packages|of each core": ("/sys/.*/topology/.*", None),
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
SOUND = "SelectType=select/cons_tres\nTaskPlugin=task/cgroup,task/affinity\nGresTypes=gpu\n"
FILES = {
    "vm.xml": VM,
    "vmi.json": json.dumps(VMI),
    "gres.conf": "NodeName=n Name=gpu File=/dev/nvidia[0-1]\n",
    "slurm.conf": "GresTypes=gpu\nNodeName=n CPUs=8 Gres=gpu:2\n",
    "stream.txt": STREAM,
    "empty.txt": "\n",
    "lscpu.txt": "CPU SOCKET CORE\n0 0 0\n1 0 1\n",
    "lspci.txt": "01:00.0 3D controller [0302]: NVIDIA [10de:2330]\n",
    "numactl.txt": NUMACTL,
    "topo.txt": TOPOLOGY,
    "no-affinity.txt": "\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tN/A\tN/A\n",
    "sound.conf": SOUND,
    "no-devices.xml": '<system version="1"></system>',
    "none.json": '{"jobs": []}',
    "none.txt": "No jobs in the system\n",
    "pending.txt": scontrol_text([Listed(2, ["n"], [], state="PENDING")]),
    "no-gpus.txt": scontrol_text([Listed(3, ["n"], range(4), ())]),
    "jobs.txt": scontrol_text([Listed(1, ["n"], range(4), (0,))]),
}
CLUSTER = ("pool", "kubevirt", "slurm")
COMMANDS = {  # with their exit codes
    "show --host TREE": 0,
    "plan vm.xml --layout pin-bound --host TREE": 0,
    "plan vm.xml --layout default --host TREE --json": 0,
    "apply vm --layout default --dry-run": 0,
    "capture -o captured.tar.gz": 0,
    "doctor --host TREE": 0,
    "doctor": 0,
    "doctor vm.xml --json": 1,
    "verify vm.xml --host TREE": 1,
    "trial vm --layouts default,pin --dry-run": 0,
    "bench --dry-run --tests stream": 0,
    "import stream.txt --machine TREE -o imported": 0,
    "compare RESULTS --host TREE": 5,
    "report RESULTS --host TREE -o report.html": 0,
    "pool show --pool TREE": 0,
    "pool place vm.xml --layout default --pool TREE": 0,
    "kubevirt check vmi.json --host TREE": 1,
    "slurm check gres.conf slurm.conf --host TREE": 1,
    "slurm audit --jobs jobs.txt --host TREE": 0,
    "nccl-topo --domain vm.xml --host TREE -o topo.xml": 1,
}
APPLY = "apply vm --layout default --dry-run"
TRIAL = "trial vm --layouts default,pin --dry-run"
DECIDED = {
    "VMs, pins and allocations": {"doctor": 5, APPLY: 5, TRIAL: 5},
    "running VM": {"doctor": 5, APPLY: 5, TRIAL: 5},
    "NUMA nodes": {
        "doctor vm.xml --json": 0,
        "nccl-topo --domain vm.xml --host TREE -o topo.xml": 0,
    },
    "cores and packages|of each core": {
        "plan vm.xml --layout pin-bound --host TREE": 5,
        TRIAL: 5,
        "pool show --pool TREE": 5,
        "pool place vm.xml --layout default --pool TREE": 5,
        "slurm audit --jobs jobs.txt --host TREE": 5,
    },
}
"""Exit codes where the missing fact decides the answer, or hides what would be found."""

NOTHING = (
    "doctor",
    "doctor BROKEN",
    "doctor --json",
    "doctor --prometheus",
    "doctor -",
    "doctor empty.txt",
    "doctor lscpu.txt",
    "doctor no-affinity.txt",
    "doctor lspci.txt",
    "doctor --host lspci.txt --json",
    "doctor --pool lspci.txt",
    "doctor --pool small-2n8c-2gpu",
    "doctor --pool small-2n8c-2gpu --json",
    "doctor --pool small-2n8c-2gpu --pool hgx-h100",
    "doctor --host lspci.txt --expect numactl.txt",
    "doctor --host numactl.txt --expect lspci.txt",
    "plan vm.xml --layout pin --host numactl.txt",
    "plan vm.xml --layout pin --host topo.txt",
    "plan vm.xml --layout pin --host empty.txt",
    "plan --vcpus 1 --memory 1GiB --layout pin --host lspci.txt",
    "plan --vcpus 1 --memory 1GiB --layout pin --host numactl.txt",
    "plan --vcpus 1 --memory 1GiB --layout pin --host lscpu.txt --gpus 1",
    "apply vm --layout pin --dry-run",
    "apply vm --layout pin --yes BROKEN",
    "apply vm --domain vm.xml --yes BROKEN",
    "trial vm --layouts default,pin --dry-run",
    "pool show --pool lspci.txt",
    "pool show --pool topo.txt",
    "pool show --pool numactl.txt",
    "pool place vm.xml --pool numactl.txt",
    "kubevirt check empty.txt",
    "slurm check gres.conf slurm.conf --host numactl.txt",
    "slurm check gres.conf slurm.conf --host lscpu.txt",
    "slurm check gres.conf slurm.conf --host topo.txt",
    "slurm check empty.txt sound.conf --host hgx-h100",
    "slurm audit --jobs empty.txt --host hgx-h100",
    "slurm audit --jobs none.json --host hgx-h100",
    "slurm audit --jobs none.txt --host hgx-h100",
    "slurm audit --jobs pending.txt --host hgx-h100",
    "slurm audit --jobs no-gpus.txt --host hgx-h100",
    "slurm audit --jobs jobs.txt --host m=hgx-h100",
    "slurm audit --records records",
    "nccl-topo --check no-devices.xml",
    "nccl-topo --domain vm.xml --host numactl.txt -o topo.xml",
    "nccl-topo --domain vm.xml --host topo.txt -o topo.xml",
    "verify empty.txt",
    "verify vm.xml --guest topo.txt --host hgx-h100",
    "verify vm.xml --guest lspci.txt --host hgx-h100",
    "verify vm.xml --guest numactl.txt --host hgx-h100",
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


@pytest.fixture(scope="module")
def written(machine: MemorySnapshot, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Write a machine without some files, or with another output of a tool, once."""

    @cache
    def write(missing: str, output: str | None) -> tuple[Path, Mapping[str, str]]:
        shown = without(machine, missing, output)
        directory = tmp_path_factory.mktemp("machine")
        write_tree(shown, directory)
        return directory, shown.commands

    return write


@pytest.fixture
def here(written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Be:
    """Let a machine be the one that homenode runs on; gives its directory."""

    def be(missing: str, output: str | None) -> Path:
        directory, outputs = written(missing, output)
        before = LiveSnapshot.__init__
        monkeypatch.setattr(LiveSnapshot, "__init__", lambda self: before(self, str(directory)))
        monkeypatch.setattr(LiveSnapshot, "_run", lambda self, tool: outputs.get(tool.name))
        return directory

    defined = VM.replace("</name>", f"</name><uuid>{UUID}</uuid>")
    daemon = StandIn(tmp_path / "daemon", "vm", defined.encode())
    monkeypatch.setenv("PATH", f"{daemon.bin}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    return be


@pytest.mark.parametrize("gap", GAPS)
def test_an_answer_names_what_was_not_read_of_its_host(gap: str, here: Be) -> None:
    places = {"TREE": str(here(*GAPS[gap])), "RESULTS": str(DIRECTORY / "gh200-x4")}
    wrong = []
    exceptions = DECIDED.get(gap, {})
    for command in dict.fromkeys((*exceptions, *part(list(COMMANDS), list(GAPS).index(gap)))):
        if command.startswith(CLUSTER) and not has_cluster():
            continue
        answer = homenode(*(places.get(word, word) for word in command.split()))
        expected = exceptions.get(command, COMMANDS[command])
        named = re.search(gap, answer.output + str(answer.exception))
        if not named or answer.exit_code != expected:
            wrong.append((command, answer))
    assert not wrong


@NEEDS_CLUSTER
def test_a_pool_omits_by_name_a_host_whose_source_shows_no_cores(here: Be) -> None:
    answer = homenode("pool", "show", "--pool", "lspci.txt", "--pool", "hgx-h100")
    assert answer.exit_code == 1 and answer.stdout.startswith("1 host, all free: 8 GPUs")
    assert "not read  lspci.txt: " in answer.stdout


@pytest.mark.parametrize("command", NOTHING)
def test_where_nothing_can_be_checked_the_exit_code_is_5(command: str, here: Be) -> None:
    if command.startswith(CLUSTER) and not has_cluster():
        pytest.skip("homenode.cluster is not there")
    here("virsh-domains", BROKEN if "BROKEN" in command else None)
    Path("records").mkdir()
    answer = homenode(*command.removesuffix(" BROKEN").split(), whole=True)
    assert answer.exit_code == 5, answer.output
    if "--json" in command:
        assert not answer.stdout or json.loads(answer.stdout)
    said = "not.read|nothing|not checked|not known|cannot tell|unknown|show|empty"
    assert re.search(said, answer.output), answer.output
