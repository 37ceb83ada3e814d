"""Kinds of public reports, each as its poster gives it: the files alone, and what doctor says."""

import json
from pathlib import Path

import pytest

from homenode.plan.pipeline import plan_file
from homenode.vm.plan_options import PlanOptions
from homenode.vm.sources import load_host
from tests.command_line import homenode
from tests.plan.test_properties import document

TWO_NODES = """name = "two"
packages = 2
cores_per_package = 8
threads_per_core = 2
memory_per_node = "64GiB"
"""
QM = """affinity: {}
cores: 8
cpu: host
machine: q35
memory: 32768
name: gpu
numa: 1
numa0: cpus=0-7,hostnodes=0,memory=32768,policy=bind
ostype: l26
sockets: 1
"""
VM = """<domain type='kvm'><name>db</name><memory unit='GiB'>16</memory><vcpu>4</vcpu>
<iothreads>2</iothreads>
<cputune>{}
<emulatorpin cpuset='{}'/><iothreadpin iothread='1' cpuset='{}'/>
<iothreadpin iothread='2' cpuset='{}'/></cputune>
<numatune><memory mode='strict' nodeset='0'/></numatune>
<os><type arch='x86_64' machine='q35'>hvm</type></os>
<cpu mode='host-passthrough'><topology sockets='1' cores='4' threads='1'/></cpu></domain>
"""
PINS = "".join(f"<vcpupin vcpu='{one}' cpuset='{one}'/>" for one in range(4))


def doctor(directory: Path, *texts: str) -> tuple[list[tuple[str, str, str]], str]:
    """(id, severity, subject) of each finding, and what was checked."""
    files = [directory / f"{number}.txt" for number, _ in enumerate(texts)]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    answer = json.loads(homenode("doctor", *map(str, files), "--json").stdout)
    found = [(one["id"], one["severity"], one["subject"]) for one in answer["findings"]]
    return found, "\n".join(answer["checked"])


@pytest.mark.parametrize(
    ("affinity", "ids"),
    [
        ("0-7,16-23", []),
        ("8-15,24-31", ["pin-off-node", "pin-off-node"]),  # vCPUs, and the threads of QEMU
        ("0-3", ["vcpus-above-cpus"]),
        ("2", ["cpu-shared", "emulator-on-vcpu"]),
        ("0-31", ["pin-off-node", "flat-over-nodes"]),
    ],
)
def test_affinity_of_proxmox_pins_all_threads(
    affinity: str, ids: list[str], tmp_path: Path
) -> None:
    found, checked = doctor(tmp_path, QM.format(affinity), TWO_NODES)
    assert [one[0] for one in found] == ids
    assert (f"float over CPUs {affinity}, node" in checked) is (affinity != "2")


@pytest.mark.parametrize(
    ("emulator", "first", "second", "far"),
    [
        ("4-5", "6", "7", []),
        ("8-9", "6", "7", [("info", "<emulatorpin>")]),
        ("4-5", "10", "7", [("warning", "IOThread 1")]),
        ("8-9", "10-11", "12-13", [("warning", "IOThreads 1-2"), ("info", "<emulatorpin>")]),
        ("4,8", "6,10", "7", []),  # they may run next to the memory
    ],
)
def test_threads_of_qemu_on_another_node_than_the_memory_are_found(
    emulator: str, first: str, second: str, far: list[tuple[str, str]], tmp_path: Path
) -> None:
    found, _ = doctor(tmp_path, VM.format(PINS, emulator, first, second), TWO_NODES)
    assert [one[1:] for one in found if one[0] == "pin-off-node"] == far


def matrix(*rows: tuple[str, str], link: str = "SYS") -> str:
    """nvidia-smi topo -m of GPUs with these CPU and NUMA affinities."""
    names = [f"GPU{number}" for number, _ in enumerate(rows)]
    lines = ["\t" + "\t".join([*names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])]
    for name, (cpus, node) in zip(names, rows, strict=True):
        links = [" X " if other == name else link for other in names]
        lines.append("\t".join([name, *links, cpus, node, "", "N/A"]))
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("rows", "subjects", "says"),
    [
        ([("", "3"), ("", "3")], ["GPU0, GPU1"], "GPUs 0-1 on node 3"),
        ([("", "3")], ["GPU0"], "GPU 0 on node 3"),
        ([("", "0"), ("", "1")], ["GPU0, GPU1"], "GPU 0 on node 0, GPU 1 on node 1"),
        ([("0-7", "0"), ("", "1")], ["GPU1"], "GPU 0 on node 0, GPU 1 on node 1"),
        ([("0-7", "0"), ("0-7", "0"), ("8-15", "1")], [], "SYS does not distinguish nodes"),
        ([("0-7", "0"), ("8-15", "1")], [], "GPU 1 on node 1, by NUMA Affinity"),
    ],
)
def test_topo_m_alone_shows_nodes_of_gpus_and_jobs_without_their_cpus(
    rows: list[tuple[str, str]], subjects: list[str], says: str, tmp_path: Path
) -> None:
    found, checked = doctor(tmp_path, matrix(*rows))
    quoted = "".join(f"    {line}\n" for line in matrix(*rows).splitlines())
    assert doctor(tmp_path, quoted) == (found, checked)
    assert [one[2] for one in found if one[0] == "job-gpu-far"] == subjects
    assert says in checked
    has_pair = len({node for _, node in rows}) < len(rows)
    assert ("prints SYS between GPUs of one node" in checked) is has_pair


def test_a_matrix_next_to_a_vm_leaves_named_what_was_not_checked(tmp_path: Path) -> None:
    vm, topology = tmp_path / "100.conf", tmp_path / "topo.txt"
    vm.write_text(QM.format("0-7") + "hookscript: local:snippets/homenode-100.sh\n")
    topology.write_text(matrix(("0-7", "0")))
    answer = json.loads(homenode("doctor", str(vm), str(topology), "--json").stdout)
    assert len(answer["not_checked"]) == 1


@pytest.mark.parametrize(
    ("cpu", "is_required"),
    [
        ("<cpu mode='custom'><model>Skylake-Server</model></cpu>", False),
        ("<cpu mode='custom'><model>core2duo</model></cpu>", False),
        ("<cpu mode='custom'><model>EPYC-Milan</model></cpu>", True),
        ("<cpu mode='host-passthrough'/>", True),
    ],
)
def test_topoext_is_required_of_amd_guests_alone(cpu: str, is_required: bool) -> None:
    plain = "<cpu mode='host-passthrough' check='none' migratable='on'></cpu>"
    before = document(8, 16).decode().replace(plain, cpu).encode()
    tuning = plan_file(before, "vm", PlanOptions("pin-numa-smt"), load_host("rtx4090-epyc7702"))
    assert (b"topoext" in tuning.document) is is_required


def test_a_gpu_on_its_memorys_node_belongs_to_the_cpus_next_to_it(tmp_path: Path) -> None:
    path = tmp_path / "host.toml"
    path.write_text(
        TWO_NODES + '[[node]]\nindex = 2\npackage = 1\ngpu = "g"\nmemory = "96GiB"\n'
        "generic_initiator = true\n"
        "[distances]\nother_package = 40\nmemory_same_package = 80\nmemory_other_package = 120\n"
        '[[root]]\nnode = 2\nports = [{ model = "gpu", name = "g" }]\n'
    )
    (gpu,) = (device for device in load_host(str(path)).pci_devices if device.bdf.bus)
    assert (gpu.node, gpu.firmware_node) == (1, 2)
