"""Wrong calls and missing programs: each says the fact, by the contract's exit code."""

import os
import pty
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from homenode.check.verify.boot.guest_files import find_qemu
from homenode.cli.main import main
from tests.command_line import homenode
from tests.tools.test_xl_info import INFO
from tests.verify_documents import SMALL, tuned

PLAN = "plan vm.xml --host hgx-h100"
CALLS = (
    ("--hlep", 2, "unknown option --hlep (did you mean --help?)"),
    ("shwo", 2, "unknown command 'shwo' (did you mean show?)"),
    ("--show-completion ksh", 2, "unknown shell 'ksh'"),
    ("show --hosst a", 2, "unknown option --hosst (did you mean --host?)"),
    ("show hgx-h100", 2, "hint: homenode show --host hgx-h100"),
    ("show --host ssh:root@gpu7", 2, "hint: homenode capture --ssh root@gpu7 -o host.tar.gz"),
    ("nccl-topo vm.xml", 2, "hint: homenode nccl-topo --domain vm.xml"),
    ("show --host hgx-h10", 2, "unknown host 'hgx-h10' (did you mean hgx-h100?)"),
    ("show --host hgx-a100", 2, "unknown host 'hgx-a100' (did you mean hgx-a100-ibm?)"),
    ("show --json --host hgx-h10", 2, "unknown host 'hgx-h10' (did you mean hgx-h100?)"),
    ("show --svg", 2, "--svg: missing FILE"),
    ("show --plan p.json", 2, "--plan requires --svg"),
    ("show --host hgx-h100 --plan absent.json --svg x.svg", 2, "absent.json: no such file"),
    ("show --host hgx-h100 --svg directory", 2, "a directory, not"),
    ("show --json --svg -", 2, "--json and --svg - cannot be used together"),
    ("plan", 2, "missing argument VM, or --vcpus and --memory"),
    ("plan absent.xml", 2, "absent.xml: no such file"),
    ("plan directory", 2, "directory: cannot read a domain XML: a directory, not"),
    (f"{PLAN} -o directory", 2, "directory: a directory, not a regular file"),
    (f"{PLAN} -o absent/vm.xml", 2, "absent: no such directory"),
    (f"{PLAN} -o other.txt", 2, "other.txt: file exists"),
    ("plan empty.xml", 2, "empty.xml: the file is empty"),
    ("plan vmi.yaml", 2, "hint: homenode kubevirt check vmi.yaml"),
    ("show --host cut.txt", 2, "cut.txt: xl info -n: missing"),
    ("doctor --host directory", 2, "a directory of captures is a pool"),
    ("doctor --h2d 99999999", 2, "--h2d: expected a number of GB/s above 0 and below"),
    (f"{PLAN} --layout numa", 2, "unknown layout 'numa' (did you mean pin-numa?)"),
    (f"{PLAN} --objective nccl", 2, "unknown value 'nccl' (did you mean multi-gpu?)"),
    (f"{PLAN} --target esx", 2, "unknown target 'esx'"),
    (f"{PLAN} --target XEN", 2, "(did you mean xen?)"),
    ("plan 102.conf --host hgx-h100", 2, "hint: cp /etc/pve/qemu-server/VMID.conf ."),
    ("restore 102.conf", 2, "102.conf: no such file"),
    ("apply ./102.conf", 2, "-o tuned.conf"),
    (f"{PLAN} --target xapi", 2, "hint: --target xen, and the xe commands of docs/howto/xcp-ng.md"),
    (f"{PLAN} --vcpus many", 2, "--vcpus: 'many' is not a whole number"),
    (f"{PLAN} --vcpus 0", 2, "--vcpus: 0 is out of range (1 or more)"),
    (f"{PLAN} --spare-ports 99", 2, "--spare-ports: 99 is out of range (0 to 16)"),
    (f"{PLAN} --memory 64", 2, "--memory: unit missing in '64'"),
    (f"{PLAN} --memory 64QB", 2, "--memory: unknown unit 'QB'"),
    (f"{PLAN} --memory 8388608TiB", 2, "--memory: expected at most 9223372036854775807 bytes"),
    (f"{PLAN} --layout A --layout B", 2, "--layout is repeated"),
    (f"{PLAN} --diff=yes", 2, "--diff takes no value"),
    (f"{PLAN} --gpu-profile A40-12Q", 2, "--gpu-profile requires --gpus N"),
    (f"{PLAN} --with-nics", 2, "--with-nics requires GPUs"),
    (f"{PLAN} --results absent", 2, "absent: no such directory"),
    (f"{PLAN} --after absent.json", 2, "absent.json: no such file"),
    (f"{PLAN} --layout pin --device 1:2", 2, "1:2"),
    (f"{PLAN} --layout pin --device aa:00.0", 2, "0000:aa:00.0"),
    (f"{PLAN} --layout pin --device 16:00.0", 2, "found a bridge"),
    (f"{PLAN} --layout pin --sibling-cpus 1", 2, "--node-cpus"),
    ("plan vm.xml --layout pin --node-cpus 0-3 --svg x.svg", 2, "--svg"),
    ("plan vm.xml --layout pin --node-cpus 0-3 --vcpus 4", 2, "--vcpus"),
    ("plan vm.xml --layout pin --node-cpus 0-3 --ignore-domain x", 2, "--ignore-domain"),
    (f"{PLAN} --layout pin --memory 0GiB", 2, "is out of range"),
    (f"{PLAN} --layout pin --page-size 3MiB", 2, "2MiB or 1GiB"),
    (f"{PLAN} --layout pin --emulator-cpus=", 2, "missing CPUS"),
    (f"{PLAN} --layout pin --emulator-cpus 900", 2, "found 900"),
    (f"{PLAN} --layout default --emulator-cpus 0", 2, "pins nothing"),
    (f"{PLAN} --layout pin --reserved-cpus 0-999", 2, "found 224-999"),
    (f"{PLAN} --layout pin --keep-vcpus", 2, "an -smt layout"),
    (f"{PLAN} --layout pin --save-plan directory", 2, "a directory, not"),
    ("plan vm.xml --host xeon-2p-cpus --gpus 1", 4, "1 GPU needed, 0 of 0 free"),
    (f"{PLAN} --gpus 9", 4, "vm does not fit hgx-h100: 9 GPUs needed, 8 of 8 free"),
    ("apply", 2, "missing argument NAME"),
    ("apply vm.xml", 2, "vm.xml: a file, not a domain of libvirt"),
    ("restore", 2, "missing argument NAME"),
    ("restore --list vm", 2, "--list and another argument cannot be used together"),
    ("restore vm --forget --keep-edits", 2, "--forget and --keep-edits cannot be used together"),
    ("restore vm --forget --dry-run", 2, "--forget and --dry-run cannot be used together"),
    ("capture", 2, "hint: homenode capture -o host.tar.gz"),
    ("verify", 2, "missing argument VM"),
    ("verify --live", 2, "--live: missing NAME"),
    ("verify vm.xml --boot --timeout 0", 2, "--timeout: 0 is out of range (1 or more)"),
    ("verify vm.xml --start --boot", 2, "--start and --boot cannot be used together"),
    ("plan vm.xml --host hgx-h100 --json --diff", 2, "--json and --diff cannot be used together"),
    ("restore vm.xml --keep-edits", 2, "plan vm.xml --layout default -o NEW.xml"),
    ("apply vm.xml --host hgx-h100", 2, "plan vm.xml --host hgx-h100 -o tuned.xml"),
    ("doctor retrian", 2, "did you mean retrain?"),
    ("doctor absent.xml", 2, "absent.xml: no such file"),
    ("doctor --load-command cp", 2, "--load-command requires --under-load"),
    ("doctor --json --prometheus", 2, "--json and --prometheus cannot be used together"),
    ("doctor retrain 41:00.0 --target 9", 2, "--target: 9 is out of range (1 to 6)"),
    ("trial vm --layouts pin,numa", 2, "unknown layout 'numa' (did you mean pin-numa?)"),
    ("trial vm --boot-timeout inf", 2, "--boot-timeout: 'inf' is not a number"),
    ("bench --layout pin-nume", 2, "did you mean pin-numa?"),
    ("bench --tests strem", 2, "did you mean stream?"),
    ("bench --probe p", 2, "--on ssh://HOST"),
    ("bench --quick --full --dry-run", 2, "--quick and --full cannot be used together"),
    ("bench --rounds 2", 2, "unknown option --rounds"),
    ("bench setup --apply --remove", 2, "--apply and --remove cannot be used together"),
    ("import absent", 2, "absent: no such file or directory"),
    ("compare absent", 2, "absent: no such directory"),
    ("report --csv --json", 2, "missing argument DIR"),
    ("slurm check gres.conf slurm.conf cgroup.conf", 2, "hint: --cgroup cgroup.conf"),
    ("kubevirt check broken.yaml", 2, "(line 2)"),
    ("kubevirt check vm.xml", 2, "hint: homenode doctor vm.xml"),
    ("kubevirt check gpu-vm", 2, "hint: kubectl get vm gpu-vm -o yaml"),
    ("kubevirt check unit.yaml", 2, "unit.yaml: memory: expected a quantity"),
    ("pool show absent", 2, "unexpected argument 'absent'"),
    ("pool place vm.xml", 2, "missing option --pool"),
    ("kubevirt chek", 2, "unknown command 'chek' (did you mean check?)"),
    ("slurm", 2, "homenode slurm audit"),
    ("slurm check", 2, "hint: homenode slurm check gres.conf slurm.conf"),
    ("slurm check gres.conf", 2, "missing argument slurm.conf"),
    ("slurm report absent", 2, "absent: no such directory"),
    ("slurm study st", 2, "hint: homenode slurm study --output st"),
    ("slurm study -o s --minutes x", 2, "hint: homenode slurm study --minutes 30"),
    ("nccl-topo", 2, "missing option --domain or --check"),
    ("list findings pcie-link", 2, "unknown finding 'pcie-link' (did you mean pcie-link-slow?)"),
)
VM = """<domain type='kvm'><name>vm</name><memory unit='GiB'>8</memory><vcpu>4</vcpu>
<os><type arch='x86_64' machine='q35'>hvm</type></os></domain>"""


@pytest.mark.parametrize(("words", "code", "fact"), CALLS)
def test_a_wrong_call_says_the_fact(
    words: str, code: int, fact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "directory").mkdir()
    (tmp_path / "vm.xml").write_text(VM)
    (tmp_path / "other.txt").write_text("mine")
    (tmp_path / "empty.xml").touch()
    (tmp_path / "cut.txt").write_text(INFO.partition("cpu_topology")[0])
    (tmp_path / "broken.yaml").write_text("a: [\n b: c")
    (tmp_path / "unit.yaml").write_text("spec: {domain: {memory: {guest: 4GiB}}}\n")
    (tmp_path / "vmi.yaml").write_text("apiVersion: kubevirt.io/v1\n")
    result = homenode(*words.split(), whole=True)
    assert (result.exit_code, result.stdout) == (code, "")
    assert fact in result.stderr and "Traceback" not in result.stderr
    if "did you mean" not in fact:
        assert not re.search(r"hint: homenode [a-z -]*--help$", result.stderr)


Which = Callable[..., str | None]
HIDDEN = {
    "virsh": ("virsh",),
    "qemu-system-x86_64": ("qemu-system-x86_64", "/usr/libexec/qemu-kvm"),
    "ssh": ("ssh",),
}
BOOT = ("verify", "@document", "--host", SMALL, "--boot", "--connect")
CASES = [
    ("virsh", ("verify", "--live", "vm"), "libvirt-clients"),
    ("virsh", ("apply", "vm", "--layout", "pin", "--yes"), "libvirt-clients"),
    ("virsh", ("apply", "vm", "--layout", "pin", "--dry-run"), "libvirt-clients"),
    ("virsh", ("apply", "vm", "--domain", "@document", "--live-pins", "--yes"), "libvirt-clients"),
    ("virsh", ("restore", "vm", "--yes"), "libvirt-clients"),
    ("virsh", ("restore", "vm", "--dry-run"), "libvirt-clients"),
    ("virsh", (*BOOT, "qemu:///system"), "libvirt-clients"),
    ("qemu-system-x86_64", (*BOOT, "none"), "qemu-system-x86"),
    ("ssh", ("verify", "@document", "--host", SMALL, "--guest", "ssh:vm"), "openssh-client"),
]


@pytest.mark.parametrize(("missing", "words", "package"), CASES)
def test_a_command_names_the_missing_program_and_its_package(
    missing: str,
    words: tuple[str, ...],
    package: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    here: Which = shutil.which

    def without(name: str, **more: str) -> str | None:
        return None if name in HIDDEN[missing] else here(name, **more)

    monkeypatch.setattr("shutil.which", without)
    document = tmp_path / "vm.xml"
    document.write_bytes(tuned("pin").document)
    argv = [str(document) if word == "@document" else word for word in words]
    monkeypatch.setattr("sys.argv", ["homenode", *argv])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr().err
    assert end.value.code == 3
    assert f"{missing}: command not found\n" in said and f"hint: apt install {package}" in said


def test_qemu_is_found_where_rhel_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"/usr/libexec/qemu-kvm": "/usr/libexec/qemu-kvm"}
    monkeypatch.setattr("shutil.which", lambda name, **_: there.get(name))
    assert find_qemu() == "/usr/libexec/qemu-kvm"
    there.clear()
    assert find_qemu() is None


@pytest.mark.parametrize(("key", "code"), [(b"\x03", 130), (b"\x04", 1)])
def test_ctrl_c_and_ctrl_d_at_a_question_change_nothing(
    key: bytes, code: int, tmp_path: Path
) -> None:
    (tmp_path / "vm.xml").write_text(VM)
    out = tmp_path / "out.xml"
    words = ("plan", tmp_path / "vm.xml", "--host", "hgx-h100", "-o", out)
    assert homenode(*words).exit_code == 0
    before = out.read_bytes()
    child, terminal = pty.fork()
    if not child:
        os.execv(sys.executable, (sys.executable, "-m", "homenode", "restore", str(out)))
    printed = b""
    with suppress(OSError):  # a terminal without a program ends with EIO
        while piece := os.read(terminal, 4096):
            printed += piece
            if piece.endswith(b"[y/N] "):
                os.write(terminal, key)
    os.close(terminal)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == code and printed.endswith(b"nothing was changed\r\n")
    assert out.read_bytes() == before
