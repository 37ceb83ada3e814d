"""Captures: of this machine, over ssh by a script that needs nothing, and what they say."""

import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from homenode.errors import HostError, InputError, ParseError, UsageError
from homenode.machine.snapshot import live as live_module
from homenode.machine.snapshot.capture import (
    CaptureArchive,
    capture,
    capture_host,
    collect_over_ssh,
)
from homenode.machine.snapshot.collector import build_collector_script, parse_collected
from homenode.machine.snapshot.contents import COMMAND_OF_NAME
from homenode.machine.snapshot.gather import check_manifest, gather
from homenode.machine.snapshot.live import LiveSnapshot
from homenode.machine.snapshot.protocol import MemorySnapshot, Snapshot
from homenode.machine.snapshot.store import DirectorySnapshot, open_snapshot
from homenode.process import run
from tests.command_line import homenode
from tests.mutations import MUTATIONS, survives
from tests.shared_data import needs_shared, shared
from tests.tree_writer import write_tree

SHELLS = [
    pytest.param(shell, marks=pytest.mark.skipif(not shutil.which(shell[0]), reason="absent"))
    for shell in (("dash",), ("busybox", "sh"), ("bash", "--posix"))
]
CHANGING = {"/proc/meminfo"}
"""Between one reading and the next: it may be back at what it was before the first one."""

HOST = MemorySnapshot(
    "gpu7",
    {
        "/sys/devices/system/cpu/online": "0-1\n",
        "/sys/devices/system/cpu/possible": "planted words\n",
        "/sys/devices/system/node/node0/distance": "10",
        "/sys/devices/pci0000:17/0000:17:01.0/class": "0x060400\n",
        "/sys/devices/pci0000:17/0000:17:01.0/config": bytes(range(64)).decode("latin-1"),
        "/sys/devices/pci0000:17/0000:18:00.0/class": "0x030200\n",
        "/sys/devices/pci0000:17/0000:18:00.0/config": "never read",
        "/sys/devices/pci0000:17/0000:18:00.0/serial": "never read",
        "/proc/sys/kernel/hostname": "gpu7\n",
        "/proc/self/status": "Name:\tcat\nCpus_allowed:\t3\nCpus_allowed_list:\t0-1\nPid:\t1\n",
        "/proc/cmdline": "root=UUID=1 isolcpus=1\n",
    },
    {
        "/sys/bus/pci/devices/0000:17:01.0": "../../../devices/pci0000:17/0000:17:01.0",
        "/sys/bus/pci/devices/0000:18:00.0": "../../../devices/pci0000:17/0000:18:00.0",
        "/sys/devices/pci0000:17/0000:18:00.0/driver": "../../../bus/pci/drivers/vfio-pci",
    },
    {"lspci": "0000:18:00.0 on gpu7\n", "user": "jdoe\n", "other": "not in the table"},
)


def _tools(directory: Path, scripts: dict[str, str]) -> Path:
    directory.mkdir(exist_ok=True)
    for name, body in scripts.items():
        tool = directory / name
        tool.write_text(f"#!/bin/sh\n{body}\n")
        tool.chmod(0o755)
    return directory


FAKE_TOOLS = {
    "ssh": 'while [ "$1" != -- ]; do shift; done; echo "$2" >>"$0.hosts"; shift 2; exec "$@"',
    "lspci": 'printf "0000:18:00.0 GPU of gpu7\\n\\tno line end"',
    "nvidia-smi": 'echo "no driver" >&2; exit 9',
    "rocm-smi": "echo ok; kill -9 $$",
    "virsh": 'for last; do :; done; case "$last" in --uuid) echo 11-22; echo 33-44;; '
    'capabilities) echo "<capabilities/>";; version) echo "Using library: libvirt 9.0.0";; '
    "*) echo \"<domain id='1'><name>$last</name></domain>\";; esac",
    "qemu-system-x86_64": "echo QEMU emulator version 7.2.22",
    "uname": 'echo "Linux 6.8.0 #1 SMP x86_64"',
    "id": "echo jdoe",
}


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tools that answer at once, before all others on PATH."""
    directory = _tools(tmp_path / "tools", FAKE_TOOLS)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    return directory


def opened(captured: CaptureArchive, directory: Path) -> Snapshot:
    """A capture's archive as the host that it holds."""
    archive = directory / "host.tar.gz"
    archive.write_bytes(captured.content)
    return open_snapshot(archive)


def test_a_capture_opens_as_the_host_that_it_is_of(tmp_path: Path) -> None:
    host = opened(capture(HOST), tmp_path)
    assert host.read_text("/sys/devices/system/cpu/online") == "0-1\n"
    assert host.read_text("/sys/bus/pci/devices/0000:18:00.0/class") == "0x030200\n"
    assert host.real_path("/sys/bus/pci/devices/0000:18:00.0") == (
        "/sys/devices/pci0000:17/0000:18:00.0"
    )
    assert host.read_text("/proc/self/status") == "Cpus_allowed:\t3\nCpus_allowed_list:\t0-1\n"
    assert host.read_text("/proc/cmdline") == "redacted isolcpus=1\n"
    assert host.command_output("lspci") == "0000:18:00.0 on host-1\n"


def test_only_what_the_table_names_is_captured() -> None:
    captured = capture(HOST, redacted=False)
    with tarfile.open(fileobj=io.BytesIO(captured.content)) as tar:
        names = {member.name.removeprefix("snapshot") for member in tar if member.isfile()}
    assert names == {
        *"""
        /manifest.json /commands/lspci /proc/cmdline /proc/self/status
        /sys/devices/pci0000:17/0000:17:01.0/class /sys/devices/pci0000:17/0000:17:01.0/config
        /sys/devices/pci0000:17/0000:18:00.0/class /sys/devices/system/cpu/online
        /sys/devices/system/node/node0/distance
    """.split()
    }


def test_the_manifest_says_what_is_absent_and_what_was_left_out(tmp_path: Path) -> None:
    captured = capture(HOST)
    manifest = captured.manifest
    stored = json.loads(opened(captured, tmp_path).read_text("/manifest.json") or "")
    assert stored["format"] == "homenode.snapshot/1"
    assert stored["redacted"] is True
    assert stored["commands"] == ["lspci"] == list(manifest.commands)
    assert stored["omitted"] == [
        {"what": "/sys/devices/system/cpu/possible", "reason": "not of its form"}
    ]
    assert {"nvidia-smi-topo", "/sys/devices/system/cpu/isolated"} <= set(stored["absent"])
    assert "/sys/devices/system/cpu/online" not in stored["absent"]


def test_equal_hosts_give_equal_bytes() -> None:
    content = capture(HOST).content
    assert content == capture(HOST).content
    assert b"gpu7" not in gzip.decompress(content)


def test_a_capture_goes_to_standard_output_or_to_a_new_file_whole(
    tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "printed").open("wb") as printed:
        argv = [sys.executable, "-m", "homenode", "capture", "-o", "-"]
        subprocess.run(argv, stdout=printed, stderr=subprocess.DEVNULL, check=True, timeout=300)
    assert open_snapshot(tmp_path / "printed").command_output("lspci")
    assert not (tmp_path / "-").exists()
    out = tmp_path / "host.tar.gz"
    out.write_text("mine")
    assert isinstance(homenode("capture", "-o", out).exception, UsageError)
    assert out.read_text() == "mine"
    assert homenode("capture", "-o", out, "--force", "--no-redact").exit_code == 0
    assert out.stat().st_mode & 0o777 == 0o600
    assert homenode("capture", "-o", tmp_path / "open").exit_code == 0
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o644


def test_a_capture_that_is_not_redacted_is_for_its_owners_eyes(tmp_path: Path) -> None:
    captured = capture(HOST, redacted=False)
    assert (captured.mode, capture(HOST).mode) == (0o600, 0o644)
    assert opened(captured, tmp_path).command_output("lspci") == "0000:18:00.0 on gpu7\n"


def test_a_newer_capture_is_refused_by_its_manifest(tmp_path: Path) -> None:
    for text, says in (
        ('{"format": "homenode.snapshot/2"}', "found version 2\n.*another build"),
        ('{"format": "homenode.plan/1"}', "found 'homenode.plan/1'"),
        ("[" * 100_000, "expected a homenode.snapshot document"),
        ("[]", 'missing "format"'),
    ):
        with pytest.raises(InputError, match=says):
            check_manifest(text, "host.tar.gz")
    (tmp_path / "sys/devices").mkdir(parents=True)
    (tmp_path / "manifest.json").write_text('{"format": "homenode.snapshot/2"}')
    with pytest.raises(InputError, match="another build"):
        open_snapshot(tmp_path)


def test_a_live_capture_runs_the_tools_and_says_which_failed(tmp_path: Path, tools: Path) -> None:
    captured = capture_host()
    omitted = dict(captured.manifest.omitted)
    assert omitted["nvidia-smi-topo"] == "nvidia-smi: exit status 9: no driver"
    assert omitted["rocm-smi-json"] == "rocm-smi: killed by SIGKILL"
    host = opened(captured, tmp_path)
    domains = host.command_output("virsh-domains") or ""
    assert domains.count("<domain ") == 2 and "vm-2" in domains and "11-22" not in domains


def test_a_tool_runs_once_and_only_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = _tools(tmp_path / "tools", {"lspci": f"echo run >>{tmp_path}/count; echo out"})
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    host = LiveSnapshot(str(tmp_path))
    assert not (tmp_path / "count").exists()
    assert host.command_output("lspci") == host.command_output("lspci") == "out\n"
    assert (tmp_path / "count").read_text() == "run\n"
    with pytest.raises(KeyError):
        host.command_output("rm")


def test_a_tool_that_hangs_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = _tools(tmp_path / "tools", {"uname": "sleep 60"})
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    command = COMMAND_OF_NAME["uname"]
    impatient = type(command)(command.name, command.spellings, command.purpose, timeout_s=0)
    monkeypatch.setitem(live_module.OF_NAME, "uname", impatient)
    host = LiveSnapshot(str(tmp_path))
    assert host.command_output("uname") is None
    assert host.failures == {"uname": "uname: no end after 0 s"}


@pytest.mark.parametrize("shell", SHELLS)
def test_the_collector_reads_what_a_live_capture_reads(shell: tuple[str, ...], tools: Path) -> None:
    before = gather(LiveSnapshot()).snapshot
    printed = run(shell, 300, build_collector_script()).stdout_or_raise()
    here = gather(LiveSnapshot()).snapshot
    collected = parse_collected(printed, "here")
    there = gather(collected).snapshot
    # busybox has a uname and an id of its own, which it takes first.
    differ = {name for name in here.commands if here.commands[name] != there.commands.get(name)}
    assert differ <= ({"uname"} if "busybox" in shell else set())
    # What the kernel or who else is at work changed meanwhile may be read either way.
    links = before.links.items() & here.links.items()
    assert links
    assert links <= there.links.items()
    assert there.links.keys() <= before.links.keys() | here.links.keys()
    files = before.files.items() & here.files.items()
    assert len(files) > len(here.files) / 2
    assert not {path for path, _ in files - there.files.items()} - CHANGING
    assert there.files.keys() <= before.files.keys() | here.files.keys()
    assert there.files.keys() >= before.files.keys() & here.files.keys()
    assert collected.read_text("/proc/sys/kernel/hostname")
    if "busybox" not in shell:
        assert collected.command_output("user") == "jdoe\n"


@pytest.mark.parametrize("shell", SHELLS)
def test_the_collector_reads_a_tree_as_a_directory_is_read(
    shell: tuple[str, ...], tmp_path: Path, tools: Path
) -> None:
    top = tmp_path / "it's a $tree; `with` odd name"
    write_tree(HOST, top)
    printed = run(shell, 300, build_collector_script(str(top))).stdout_or_raise()
    there = gather(parse_collected(printed, "there")).snapshot
    here = gather(DirectorySnapshot("here", str(top))).snapshot
    assert dict(there.files) == dict(here.files)
    assert dict(there.links) == dict(here.links)
    assert there.directories == here.directories


def test_the_collector_starts_no_grep_for_what_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each program that is started costs a second in an emulated guest."""
    asked, top = tmp_path / "asked", tmp_path / "top"
    grep = f'echo "$@" >>{asked}\nexec {shutil.which("grep")} "$@"'
    programs = _tools(tmp_path / "bin", {"grep": grep})
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    write_tree(HOST, top)
    run(["sh"], 300, build_collector_script(str(top))).stdout_or_raise()
    words = [word for line in asked.read_text().splitlines() for word in line.split()]
    assert "sys/devices/system/node/node0/distance" in words
    assert not [word for word in words if "*" in word]


@needs_shared
def test_the_collector_reads_a_published_tree_as_it_is(tmp_path: Path, tools: Path) -> None:
    name = "nvidiagpunumanodes"
    archive = shared(f"machines/sysfs/{name}.tar.bz2")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    printed = run(["sh"], 300, build_collector_script(str(tmp_path / name))).stdout_or_raise()
    there = gather(parse_collected(printed, "there")).snapshot
    here = gather(open_snapshot(archive)).snapshot
    assert len(here.files) > 500
    assert dict(there.files) == dict(here.files)
    assert dict(there.links) == dict(here.links)


def test_a_capture_over_ssh_is_redacted_here(tmp_path: Path, tools: Path) -> None:
    captured = capture_host("jdoe@gpu7")
    assert (tools / "ssh.hosts").read_text() == "jdoe@gpu7\n"
    host = opened(captured, tmp_path)
    assert host.command_output("lspci") == "0000:18:00.0 GPU of host-1\n\tno line end\n"
    content = gzip.decompress(captured.content)
    assert b"gpu7" not in content and b"jdoe" not in content and b"11-22" not in content
    assert (host.command_output("virsh-domains") or "").count("<domain ") == 2
    assert host.command_output("nvidia-smi-topo") is None
    assert host.command_output("rocm-smi-json") is None


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("listed", "known"),
    [("echo 11-22; echo 33-44", False), ("echo 11-22", True), ("exit 1", False)],
)
def test_a_vm_that_cannot_be_read_is_not_left_out_unless_it_ended(
    listed: str, known: bool, shell: tuple[str, ...], tools: Path
) -> None:
    again = f"[ -e {tools}/again ] && {{ {listed}; exit; }}; touch {tools}/again"
    virsh = FAKE_TOOLS["virsh"].replace("--uuid)", f"33-44) exit 1;; --uuid) {again};")
    _tools(tools, {"virsh": virsh})
    printed = run(shell, 300, build_collector_script(str(tools))).stdout_or_raise()
    domains = parse_collected(printed, "there").command_output("virsh-domains")
    assert (domains is not None and domains.count("<domain ") == 1) is known


def test_a_login_banner_does_not_harm(tmp_path: Path, tools: Path) -> None:
    body = f"echo 'Welcome to gpu7'; echo 'F sys/evil'; {FAKE_TOOLS['ssh']}"
    _tools(tools, {"ssh": body})
    assert collect_over_ssh("gpu7").read_text("/sys/devices/system/cpu/online")


@pytest.mark.parametrize(
    "host", ["-oProxyCommand=id", "", "a b", "a;id", "$(id)", "a\nb", "--", "`id`", "a'b"]
)
def test_a_host_that_is_none_is_refused_before_ssh_runs(host: str, tools: Path) -> None:
    with pytest.raises(UsageError, match="not a host name"):
        capture_host(host)
    assert not (tools / "ssh.hosts").exists()


def test_a_host_that_cannot_be_reached_is_said(tools: Path) -> None:
    _tools(tools, {"ssh": "echo 'ssh: connect to host gpu7: No route' >&2; exit 255"})
    with pytest.raises(HostError, match=r"gpu7: ssh: exit status 255: .*No route\n.*ssh gpu7 true"):
        capture_host("gpu7")


@pytest.mark.parametrize(
    ("printed", "says"),
    [
        ("fish: Unknown command", "homenode-collector 1"),
        ("homenode-collector 1\nF sys/devices/system/cpu/online\n 0-", "'Z' at the end"),
        ("homenode-collector 1\nX what\nZ\n", "one of F, G, H"),
        ("homenode-collector 1\nC lspci\n text\nZ\n", "an exit status"),
        ("homenode-collector 1\nH sys/a/config\n 0g\nZ\n", "hexadecimal"),
    ],
)
def test_what_no_collector_prints_is_refused(printed: str, says: str) -> None:
    with pytest.raises(ParseError, match=says):
        parse_collected(printed, "gpu7")


def test_a_hostile_collector_cannot_add_files() -> None:
    printed = (
        "homenode-collector 1\nF ../../etc/passwd\n x\nF etc/shadow\n x\n"
        "G sys/devices/system/cpu/cpu[0-9]*/online\nsys/devices/system/cpu/cpu0/../../x/online:1\n"
        "sys/devices/system/cpu/cpu0/online:1\nD sys/../../../tmp/x\n"
        "L\n lrwxrwxrwx 1 root root 0 Nov 20 09:10 sys/class/iommu/x -> /etc\nZ\n"
    )
    captured = capture(parse_collected(printed, "evil"))
    with tarfile.open(fileobj=io.BytesIO(captured.content)) as tar:
        assert tar.getnames() == [
            "snapshot/manifest.json",
            "snapshot/sys/class/iommu",  # the directory that the table names, and no link in it
            "snapshot/sys/devices/system/cpu/cpu0/online",
        ]


def test_damaged_collector_output_is_read_or_refused_and_nothing_else(
    tmp_path: Path, tools: Path
) -> None:
    write_tree(HOST, tmp_path)
    printed = run(["sh"], 300, build_collector_script(str(tmp_path))).stdout_or_raise()
    head = printed[: printed.index("\nC ")] + "\nC uname\n Linux\n \n S 0\nZ\n"
    assert survives(lambda text: gather(parse_collected(text, "gpu7")), head, MUTATIONS // 5) > 0
