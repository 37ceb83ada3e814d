"""The doctor takes files of VMs and hosts together, and knows each by its content."""

import json
from pathlib import Path

import pytest

from tests.command_line import homenode
from tests.discover.test_listings import NUMACTL, TOPOLOGY
from tests.shared_data import SHARED, needs_shared
from tests.tools.test_lscpu import TABLE

VM = """<domain type='kvm'><name>a</name><memory unit='GiB'>1</memory><vcpu>2</vcpu>
<cputune><vcpupin vcpu='0' cpuset='0'/><vcpupin vcpu='1' cpuset='2'/></cputune>
<os><type arch='x86_64' machine='q35'>hvm</type></os>
<cpu mode='host-passthrough'><topology sockets='1' dies='1' cores='1' threads='2'/></cpu>
</domain>
"""
QM = "cores: 2\nsockets: 1\nmemory: 1024\nname: b\n"
XL = 'name = "c"\nvcpus = 2\nmemory = 1024\n'
QEMU = "/usr/bin/qemu-system-x86_64 \\\n -machine q35 -smp 2 -m 1024\n"
HOST = """name = "h"
packages = 2
cores_per_package = 2
memory_per_node = "8GiB"
[[vm]]
name = "x"
memory = { 0 = "1GiB" }
pins = "0"
"""


def doctor(directory: Path, *texts: str) -> tuple[int, str]:
    """Exit code and output for files of these texts, whose names say nothing."""
    for number, text in enumerate(texts):
        (directory / f"file{number}").write_text(text)
    done = homenode(
        "doctor", *(directory / f"file{number}" for number in range(len(texts))), whole=True
    )
    return done.exit_code, done.stdout + done.stderr


@pytest.mark.parametrize(
    "texts", [(VM, TABLE), (TABLE, VM), (NUMACTL, VM, TABLE), (TOPOLOGY, TABLE, VM)]
)
def test_a_vm_is_judged_on_what_the_listings_of_its_host_show(
    texts: tuple[str, ...], tmp_path: Path
) -> None:
    code, said = doctor(tmp_path, *texts)
    assert code == 1 and "threads-not-siblings" in said


@pytest.mark.parametrize("vm", [VM, QM, XL, QEMU])
def test_each_kind_of_vm_is_judged_on_a_described_host(vm: str, tmp_path: Path) -> None:
    _, said = doctor(tmp_path, HOST, vm)
    assert said.splitlines()[0].startswith("file1: ")


def test_fixes_keep_the_host_and_its_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lspci = "00:00.0 Host bridge [0600]: Intel [8086:1237]\n"
    for name, text in {"vm.conf": QM, "numactl": NUMACTL, "lspci": lspci}.items():
        Path(name).write_text(text)
    for vms, vm in ((("vm.conf",), "vm.conf"), (("vm.conf", "vm.conf"), "VM")):
        for host in (("numactl", "lspci"), ("--host", "numactl", "--lspci", "lspci")):
            output = homenode("doctor", *vms, *host, "--explain").stdout
            assert f"homenode plan {vm} --host numactl --lspci lspci" in output


def test_a_fix_for_a_command_line_of_qemu_is_a_call_that_plan_takes(tmp_path: Path) -> None:
    text = f"{QEMU.rstrip()} -device vfio-pci,host=0000:19:00.0"
    (tmp_path / "ps").write_text(text)
    done = homenode("doctor", tmp_path / "ps", "--host", "hgx-h100", "--json")
    (fix,) = (f["fix"] for f in json.loads(done.stdout)["findings"] if f["id"] == "unpinned")
    words = fix.partition("homenode ")[2].split()
    assert words[-2:] == ["--host", "hgx-h100"] and "0000:19:00.0" in words
    assert homenode(*words).exit_code == 0


def test_several_vms_are_judged_and_the_host_once(tmp_path: Path) -> None:
    code, said = doctor(tmp_path, VM, TABLE, VM)
    assert code == 1
    assert said.splitlines()[0].startswith("file0, file2: 6 warnings: ")
    assert said.count("threads-not-siblings") == 1  # one block of each kind


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (("install kvm now",), "file0: neither a VM"),
        (("<network/>", TABLE), "file0: neither a VM"),
        ((TABLE, TABLE), "both show cores"),
        ((TABLE, NUMACTL.replace("cpus: 2", "cpus: 4")), "CPUs of node 1"),
        (("kvm -smp 'x\n",), "words of a shell"),
    ],
)
def test_files_that_are_nothing_known_or_of_two_hosts_are_errors(
    texts: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    code, said = doctor(tmp_path, *texts)
    assert code == 2 and says in said


def test_a_host_is_given_once(tmp_path: Path) -> None:
    doctor(tmp_path, TABLE)
    assert homenode("doctor", tmp_path / "file0", "--host", "hgx-h100").exit_code == 2


@needs_shared
@pytest.mark.parametrize(
    ("case", "code", "named"),
    [
        ("cells-cut-sockets-no-host", 1, {"socket-cut-by-cell"}),
        ("lscpu-e-and-pins", 1, {"threads-not-siblings", "emulator-floats"}),
        ("numactl-as-host", 1, {"memory-elsewhere", "emulator-floats"}),
        ("numactl-host-and-pins", 0, {"emulator-floats"}),
        ("topo-sys-on-one-node", 0, set()),
        ("job-without-cpu-of-its-gpus", 1, {"job-gpu-far"}),
        ("gpu-link-idle-alone", 0, {"pcie-link-idle"}),
        ("qm-affinity-right-node", 0, set()),
        ("iothreads-on-the-other-node", 1, {"pin-off-node"}),
    ],
)
def test_what_people_post_is_answered(case: str, code: int, named: set[str]) -> None:
    files = sorted((SHARED / "cases/posted" / case).glob("[!R]*"))
    done = homenode("doctor", *files, "--json")
    found = {finding["id"] for finding in json.loads(done.stdout)["findings"]}
    assert done.exit_code == code
    assert named <= found
    assert named == found or case == "cells-cut-sockets-no-host"  # on this machine
