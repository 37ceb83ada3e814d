"""homenode nccl-topo, as a user runs it."""

import json
import re
import shlex
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.cli.main import run as program
from homenode.errors import InputError, UsageError
from homenode.formats import encode
from homenode.machine.pci import DeviceKind
from homenode.nccl.check import check_topology
from homenode.plan.stored import encode_plan
from homenode.vm.sources import load_host
from tests.nccl_documents import TWO_CPUS, tuned_for
from tests.verify_documents import tuned

HOST = "epyc-nps4-gpu-nic"
DEVICES = ("0000:03:00.0", "0000:04:00.0", "0000:83:00.0", "0000:84:00.0")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "vm.xml").write_bytes(tuned_for(HOST, DEVICES, vcpus=16))
    return tmp_path


def run(*arguments: str) -> int:
    """The command as the program runs it."""
    try:
        program(["nccl-topo", *arguments])
    except SystemExit as end:
        return int(str(end.code or 0))
    return 0


def test_a_file_and_its_snippet_are_written_and_stand_the_check(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, snippet = directory / "topo.xml", directory / "user-data"
    given = ("--host", HOST, "--domain", str(directory / "vm.xml"))
    assert run(*given, "-o", str(file), "--cloud-init", str(snippet)) == 0
    shown = capsys.readouterr()
    assert "0000:83:00.0" in shown.out and f"wrote {file}" in shown.err
    assert not check_topology(file.read_bytes(), "topo.xml")
    assert all(line in snippet.read_text() for line in file.read_text().splitlines())
    capsys.readouterr()
    assert run("--check", str(file), *given) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "topo.xml: correct: 8 CPUs, 2 switches, 2 GPUs, 2 NICs as in vm.xml"
    assert run("--check", str(file)) == 0
    assert "not checked  that it is of a VM" in capsys.readouterr().out


def test_a_device_under_another_bus_id_is_one_finding_with_the_command_that_mends_it(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory)
    given = ("--domain", "vm.xml", "--host", HOST)
    assert run(*given, "-o", "topo.xml") == 0
    text = Path("topo.xml").read_text()
    bus_id = min(re.findall(r'busid="(0000:[^"]+)"', text))
    Path("topo.xml").write_text(text.replace(bus_id, "0000:92:00.0"))
    capsys.readouterr()
    assert run("--check", "topo.xml", *given) == 1
    answer, _, head, expected, found, _, fix = capsys.readouterr().out.splitlines()
    missing = f"the file lacks {bus_id}: NCCL uses guest sysfs"
    assert answer == f"topo.xml: 1 critical: {missing}"
    assert head == f"critical  {bus_id}" + "nccl-device-missing".rjust(70 - len(bus_id))
    assert expected.startswith("  expected  on cpu ")
    assert found == "  found     not in the file; 0000:92:00.0 is not a device of the guest"
    assert fix.startswith("  fix       homenode nccl-topo --domain vm.xml ")
    assert run(*shlex.split(fix)[3:]) == 0
    assert Path("topo.xml").read_text() == text, "what is printed mends it"


def test_without_output_the_file_alone_is_on_standard_output(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--host", HOST, "--domain", str(directory / "vm.xml")) == 0
    assert not check_topology(capsys.readouterr().out.encode(), "stdout")


def test_a_plan_of_this_document_gives_the_same_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tuned("pin-numa-pci")
    (tmp_path / "vm.xml").write_bytes(made.document)
    (tmp_path / "p.json").write_text(encode_plan(made.plan))
    given = ("--host", "small-2n8c-2gpu", "--domain", str(tmp_path / "vm.xml"))
    assert run(*given) == 0
    plain = capsys.readouterr().out
    assert run(*given, "--plan", str(tmp_path / "p.json")) == 0
    assert capsys.readouterr().out == plain
    with pytest.raises(InputError, match="a plan for host"):
        run(
            "--host", HOST, "--domain", str(tmp_path / "vm.xml"), "--plan", str(tmp_path / "p.json")
        )


def test_findings_of_a_file_are_in_the_documented_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.xml").write_text(TWO_CPUS.replace("32.0 GT/s PCIe", "32.0 GT/s"))
    code = run("--check", str(tmp_path / "t.xml"), "--json")
    found = json.loads(capsys.readouterr().out)
    assert code == 1 and found["format"] == "homenode.findings/1"
    assert {f["id"] for f in found["findings"]} == {"nccl-link-speed"}


def test_json_tells_the_findings_of_a_file_that_was_written(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = directory / "topo.xml"
    given = ("--host", HOST, "--domain", str(directory / "vm.xml"), "-o", str(file), "--json")
    assert run(*given) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["checked"] == ["8 CPUs, 2 switches, 2 GPUs, 2 NICs"]
    assert file.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--check", "t.xml", "-o", "x"),
        ("--check", "t.xml", "--cloud-init", "x"),
        ("--check", "t.xml", "--plan", "p.json"),
        ("--domain", "vm.xml", "--json"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        run(*arguments)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        run("--check", str(tmp_path / "none.xml"))
    with pytest.raises(InputError, match="no such file"):
        run("--host", HOST, "--domain", str(tmp_path / "none.xml"))


def test_gpus_that_are_no_partition_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus = ("0000:19:00.0", "0000:3b:00.0")
    (tmp_path / "vm.xml").write_bytes(tuned_for("hgx-h100", gpus, vcpus=8))
    modules = {"19": 1, "3B": 2, "4C": 3}
    listed = "".join(
        f'<gpu id="00000000:{bus}:00.0"><product_name>NVIDIA H100 80GB HBM3</product_name>'
        f"<platformInfo><module_id>{module}</module_id></platformInfo></gpu>"
        for bus, module in modules.items()
    )
    (tmp_path / "qx.xml").write_text(f"<nvidia_smi_log>{listed}</nvidia_smi_log>")
    given = (
        "--host",
        "hgx-h100",
        "--domain",
        str(tmp_path / "vm.xml"),
        "--nvidia-smi",
        str(tmp_path / "qx.xml"),
        "-o",
        str(tmp_path / "t.xml"),
    )
    assert run(*given) == 1
    assert "0000:19:00.0, 0000:4c:00.0" in capsys.readouterr().err
    assert (tmp_path / "t.xml").exists()


@pytest.mark.parametrize(("kept", "code"), [(8, 1), (4, 0)])
def test_a_host_that_tells_its_modules_says_itself_which_gpus_are_a_partition(
    kept: int, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Boards of four GPUs have no NVSwitches, so that any go together."""
    gpus = ("0000:19:00.0", "0000:3b:00.0")
    (tmp_path / "vm.xml").write_bytes(tuned_for("hgx-h100", gpus, vcpus=8))
    host = load_host("hgx-h100")
    module_of = {d.bdf: i + 1 for i, d in enumerate(host.devices_of_kind(DeviceKind.GPU)[:kept])}
    devices = tuple(
        replace(d, module_id=module_of.get(d.bdf))
        for d in host.pci_devices
        if kept == 8 or d.kind is not DeviceKind.NVSWITCH
        if d.kind is not DeviceKind.GPU or d.bdf in module_of
    )
    (tmp_path / "host.json").write_text(encode("host", replace(host, pci_devices=devices)))
    given = (
        "--host",
        str(tmp_path / "host.json"),
        "--domain",
        str(tmp_path / "vm.xml"),
        "-o",
        str(tmp_path / "t.xml"),
    )
    run(*given)
    said = capsys.readouterr().err
    assert ("nccl-no-partition" in said) is bool(code)
    assert "tuned-for-other-host" in said if code == 0 else "0000:19:00.0, 0000:4c:00.0" in said


def test_a_document_that_was_tuned_for_another_host_is_a_warning(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = load_host(HOST)
    other = replace(host, cores=host.cores[:-1])
    (directory / "host.json").write_text(encode("host", other))
    given = ("--host", str(directory / "host.json"), "--domain", str(directory / "vm.xml"))
    assert run(*given) == 1
    assert "tuned-for-other-host" in capsys.readouterr().err


QM = """\
cores: 24
sockets: 2
memory: 65536
machine: q35
hostpci0: 0000:18:00,pcie=1
hostpci1: 0000:19:00,pcie=1
"""


def test_a_configuration_of_qm_gets_no_file_and_is_diagnosed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "100.conf"
    path.write_text(QM)
    given = ("--host", "h200-xeon8558", "--domain", str(path))
    with pytest.raises(SystemExit) as stopped:
        program(["doctor", str(path), "--host", "h200-xeon8558", "--json"])
    assert stopped.value.code == 1
    found = {one["id"] for one in json.loads(capsys.readouterr().out)["findings"]}
    assert "unpinned" in found
    # Proxmox adds bridges to the root bus: there the guest's addresses are only its own to say.
    with pytest.raises(InputError, match="a file that more options may follow"):
        run(*given, "-o", str(tmp_path / "topo.xml"))


@pytest.mark.parametrize("target", ["qemu", "proxmox"])
def test_files_of_other_hypervisors_get_the_topology_file_that_libvirts_document_gets(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {}
    for name in ("libvirt", target):
        vm, file = tmp_path / name, tmp_path / f"{name}.topo"
        options = ("--layout", "pin-numa-pci", "--pci-granularity", "switch")
        wanted = ("--gpus", "2", "--with-nics", "--vcpus", "16", "--memory", "64GiB", *options)
        program(["plan", "--host", "hgx-h100", *wanted, "--target", name, "-o", str(vm)])
        assert run("--host", "hgx-h100", "--domain", str(vm), "-o", str(file)) == 0
        files[name] = file.read_text()
    assert files[target] == files["libvirt"]
