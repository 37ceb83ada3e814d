"""homenode nccl-topo, as a user runs it."""

import json
import re
import shlex
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.errors import UsageError
from homenode.formats import encode
from homenode.machine.pci import DeviceKind
from homenode.nccl.check import check_topology
from homenode.plan.stored import encode_plan
from homenode.vm.sources import load_host
from tests.command_line import Result, homenode
from tests.nccl_documents import TWO_CPUS, tuned_for
from tests.verify_documents import tuned

HOST = "epyc-nps4-gpu-nic"
DEVICES = ("0000:03:00.0", "0000:04:00.0", "0000:83:00.0", "0000:84:00.0")
GIVEN = ("--host", HOST, "--domain", "vm.xml")
PAIR = ("0000:19:00.0", "0000:3b:00.0")
"""GPUs of an HGX board that are no partition."""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a VM."""
    (tmp_path / "vm.xml").write_bytes(tuned_for(HOST, DEVICES, vcpus=16))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str | Path, code: int = 0) -> Result:
    done = homenode("nccl-topo", *words)
    assert done.exit_code == code, (done.output, done.exception)
    return done


def test_a_file_and_its_snippet_are_written_and_stand_the_check(directory: Path) -> None:
    file, snippet = directory / "topo.xml", directory / "user-data"
    done = run(*GIVEN, "-o", file, "--cloud-init", snippet)
    assert "0000:83:00.0" in done.stdout and f"wrote {file}" in done.stderr
    assert not check_topology(file.read_bytes(), "topo.xml")
    assert all(line in snippet.read_text() for line in file.read_text().splitlines())
    first, *_ = run("--check", file, *GIVEN).stdout.splitlines()
    assert first == "topo.xml: correct: 8 CPUs, 2 switches, 2 GPUs, 2 NICs as in vm.xml"
    assert "not checked  that it is of a VM" in run("--check", file).stdout
    assert run(*GIVEN).stdout == file.read_text(), "the file alone is on standard output"


@pytest.mark.usefixtures("directory")
def test_a_device_under_another_bus_id_is_one_finding_with_the_command_that_mends_it() -> None:
    run(*GIVEN, "-o", "topo.xml")
    text = Path("topo.xml").read_text()
    bus_id = min(re.findall(r'busid="(0000:[^"]+)"', text))
    Path("topo.xml").write_text(text.replace(bus_id, "0000:92:00.0"))
    lines = run("--check", "topo.xml", *GIVEN, code=1).stdout.splitlines()
    answer, _, head, expected, found, _, fix = lines
    missing = f"the file lacks {bus_id}: NCCL uses guest sysfs"
    assert answer == f"topo.xml: 1 critical: {missing}"
    assert head == f"critical  {bus_id}" + "nccl-device-missing".rjust(70 - len(bus_id))
    assert expected.startswith("  expected  on cpu ")
    assert found == "  found     not in the file; 0000:92:00.0 is not a device of the guest"
    assert fix.startswith("  fix       homenode nccl-topo --domain vm.xml ")
    run(*shlex.split(fix)[3:])
    assert Path("topo.xml").read_text() == text, "what is printed mends it"


def test_a_plan_of_this_document_gives_the_same_file(tmp_path: Path) -> None:
    made = tuned("pin-numa-pci")
    vm, plan = tmp_path / "vm.xml", tmp_path / "p.json"
    vm.write_bytes(made.document)
    plan.write_text(encode_plan(made.plan))
    words = ("--host", "small-2n8c-2gpu", "--domain", vm)
    assert run(*words, "--plan", plan).stdout == run(*words).stdout
    other = run("--host", HOST, "--domain", vm, "--plan", plan, code=2)
    assert "a plan for host" in str(other.exception)


def test_findings_of_a_file_are_in_the_documented_format(tmp_path: Path) -> None:
    (tmp_path / "t.xml").write_text(TWO_CPUS.replace("32.0 GT/s PCIe", "32.0 GT/s"))
    found = json.loads(run("--check", tmp_path / "t.xml", "--json", code=1).stdout)
    assert found["format"] == "homenode.findings/1"
    assert {f["id"] for f in found["findings"]} == {"nccl-link-speed"}


def test_json_tells_the_findings_of_a_file_that_was_written(directory: Path) -> None:
    found = json.loads(run(*GIVEN, "-o", "topo.xml", "--json").stdout)
    assert found["checked"] == ["8 CPUs, 2 switches, 2 GPUs, 2 NICs"]
    assert (directory / "topo.xml").exists()


@pytest.mark.parametrize(
    "words",
    [
        *("", "--domain vm.xml --json"),
        *(f"--check t.xml {more}" for more in ("-o x", "--cloud-init x", "--plan p.json")),
    ],
)
def test_arguments_that_make_no_sense_are_refused(words: str) -> None:
    assert isinstance(run(*words.split(), code=2).exception, UsageError)


@pytest.mark.parametrize("words", ["--check none.xml", f"--host {HOST} --domain none.xml"])
def test_a_file_that_is_not_there_is_named(words: str) -> None:
    assert "none.xml: no such file" in str(run(*words.split(), code=2).exception)


def test_gpus_that_are_no_partition_are_named(directory: Path) -> None:
    Path("vm.xml").write_bytes(tuned_for("hgx-h100", PAIR, vcpus=8))
    listed = "".join(
        f'<gpu id="00000000:{bus}:00.0"><product_name>NVIDIA H100 80GB HBM3</product_name>'
        f"<platformInfo><module_id>{module}</module_id></platformInfo></gpu>"
        for module, bus in enumerate(("19", "3B", "4C"), start=1)
    )
    Path("qx.xml").write_text(f"<nvidia_smi_log>{listed}</nvidia_smi_log>")
    words = "--host hgx-h100 --domain vm.xml --nvidia-smi qx.xml -o t.xml".split()
    assert "0000:19:00.0, 0000:4c:00.0" in run(*words, code=1).stderr
    assert (directory / "t.xml").exists()


@pytest.mark.parametrize("kept", [8, 4])
def test_a_host_that_tells_its_modules_says_itself_which_gpus_are_a_partition(
    kept: int, directory: Path
) -> None:
    """Boards of four GPUs have no NVSwitches, so that any go together."""
    (directory / "vm.xml").write_bytes(tuned_for("hgx-h100", PAIR, vcpus=8))
    host = load_host("hgx-h100")
    module_of = {d.bdf: i + 1 for i, d in enumerate(host.devices_of_kind(DeviceKind.GPU)[:kept])}
    devices = tuple(
        replace(d, module_id=module_of.get(d.bdf))
        for d in host.pci_devices
        if kept == 8 or d.kind is not DeviceKind.NVSWITCH
        if d.kind is not DeviceKind.GPU or d.bdf in module_of
    )
    (directory / "host.json").write_text(encode("host", replace(host, pci_devices=devices)))
    said = run("--host", "host.json", "--domain", "vm.xml", "-o", "t.xml", code=1).stderr
    assert ("nccl-no-partition" in said) is (kept == 8)
    assert ("0000:19:00.0, 0000:4c:00.0" if kept == 8 else "tuned-for-other-host") in said


def test_a_document_that_was_tuned_for_another_host_is_a_warning(directory: Path) -> None:
    host = load_host(HOST)
    (directory / "host.json").write_text(encode("host", replace(host, cores=host.cores[:-1])))
    done = run("--host", "host.json", "--domain", "vm.xml", code=1)
    assert "tuned-for-other-host" in done.stderr


QM = """\
cores: 24
sockets: 2
memory: 65536
machine: q35
hostpci0: 0000:18:00,pcie=1
hostpci1: 0000:19:00,pcie=1
"""


def test_a_configuration_of_qm_gets_no_file(tmp_path: Path) -> None:
    """Proxmox adds bridges to the root bus: there the guest's addresses are only its own to say."""
    (tmp_path / "100.conf").write_text(QM)
    words = ("--host", "h200-xeon8558", "--domain", tmp_path / "100.conf", "-o", tmp_path / "t")
    assert "a file that more options may follow" in str(run(*words, code=2).exception)


@pytest.mark.parametrize("target", ["qemu", "proxmox"])
def test_files_of_other_hypervisors_get_the_topology_file_that_libvirts_document_gets(
    target: str, tmp_path: Path
) -> None:
    words = "--layout pin-numa-pci --pci-granularity switch --gpus 2 --with-nics --vcpus 16".split()
    files = {}
    for name in ("libvirt", target):
        to = ("--memory", "64GiB", "--target", name, "-o", tmp_path / name)
        homenode("plan", "--host", "hgx-h100", *words, *to)
        file = tmp_path / f"{name}.topo"
        run("--host", "hgx-h100", "--domain", tmp_path / name, "-o", file)
        files[name] = file.read_text()
    assert files[target] == files["libvirt"]
