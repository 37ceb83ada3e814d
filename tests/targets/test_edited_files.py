"""A file of a target gets the plan and keeps what is not the plan's."""

import difflib
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import HomenodeError, InputError
from homenode.plan.pipeline import plan_for_target
from homenode.units import GIB, MIB
from homenode.vm.layout import Pinning
from homenode.vm.plan_options import PlanOptions
from homenode.vm.targets import qm_conf
from homenode.vm.targets.hypervisors import qemu, xen
from homenode.vm.targets.registry import (
    TARGETS,
    add_host_facts,
    find_target,
    read_vm,
    recognize_kind,
)
from tests.command_line import homenode
from tests.targets.examples import EXAMPLES, FILES
from tests.targets.written import again, edited, host_named, options, written

HOST = "hgx-h100"
QM, XL = FILES["proxmox"], FILES["xen"]


def plain(layout: str, **more: object) -> PlanOptions:
    return options(layout, vcpus=None, memory_bytes=None, **more)


@pytest.mark.parametrize("target", FILES)
@pytest.mark.parametrize("layout", ["default", "pin-numa", "pin-numa-smt", "pin-numa-pci"])
def test_the_same_plan_twice_changes_nothing_the_second_time(target: str, layout: str) -> None:
    once = edited(FILES[target], HOST, plain(layout)).rendering.document
    twice = edited(once, HOST, plain(layout)).rendering.document
    assert twice == once, "".join(
        difflib.unified_diff(once.decode().splitlines(True), twice.decode().splitlines(True))
    )


def test_auto_shows_a_pv_guest_of_xen_no_cells(tmp_path: Path) -> None:
    for kind, layout in (("pv", "pin-bound"), ("hvm", "pin-numa")):
        (tmp_path / "vm.cfg").write_text(
            f'name = "v"\ntype = "{kind}"\nvcpus = 80\nmemory = 65536\n'
        )
        words = ("--host", HOST, "--objective", "memory-bandwidth", "-o", tmp_path / f"{kind}.cfg")
        assert f"layout  {layout} (auto" in homenode("plan", tmp_path / "vm.cfg", *words).stdout
        assert ("vnuma" in (tmp_path / f"{kind}.cfg").read_text()) is (kind == "hvm")
        with (
            pytest.raises(InputError, match="expected type hvm") if kind == "pv" else nullcontext()
        ):
            edited((tmp_path / "vm.cfg").read_bytes(), HOST, plain("pin-numa"))


def test_xen_vcpus_that_float_may_prefer_their_nodes_and_stay_so() -> None:
    floating = plain("pin-numa", pinning=Pinning.NODE)

    def tuned(text: bytes, wanted: PlanOptions) -> tuple[dict[str, xen.Value], set[str]]:
        made = edited(text, HOST, wanted)
        config = xen.parse(made.rendering.document, "vm.cfg")
        return config.values, {one.id for one in made.findings}

    hard, offered = tuned(XL, floating)
    assert "cpus_soft" not in hard and "target-soft-affinity" in offered
    asked = edited(XL, HOST, floating).rendering.document.replace(b"cpus =", b"cpus_soft =")
    soft, said = tuned(asked, floating)
    assert soft["cpus_soft"] == hard["cpus"] and "cpus" not in soft
    assert "target-soft-affinity" not in said
    assert xen.CODEC.read_vm(asked, "vm.cfg").is_pinned
    # Pins of other layouts are pins.
    pinned, _ = tuned(asked, plain("pin-numa"))
    assert "cpus" in pinned and "cpus_soft" not in pinned


@pytest.mark.parametrize("target", FILES)
def test_lines_that_no_layout_owns_stay_byte_for_byte(target: str) -> None:
    before = FILES[target].decode().splitlines()
    after = edited(FILES[target], HOST, plain("pin-numa-pci")).rendering.document
    matcher = difflib.ndiff(before, after.decode().splitlines())
    changed = [line[2:] for line in matcher if line[:2] in ("- ", "+ ")]
    assert changed
    assert [line for line in changed if not re.match(EXAMPLES[target].owned, line)] == []


@pytest.mark.parametrize("target", FILES)
def test_line_ends_of_another_system_stay(target: str) -> None:
    crlf = FILES[target].replace(b"\\\n", b"\\\r").replace(b"\n", b"\r\n").replace(b"\\\r", b"\\\n")
    after = edited(crlf, HOST, plain("pin-numa")).rendering.document
    if target == "proxmox":
        assert b"\n" not in after.replace(b"\r\n", b"")
    assert again(after, HOST, plain("pin-numa")).rendering.document == after


def test_a_card_without_a_function_is_all_its_functions() -> None:
    vm = read_vm(QM.replace(b"0000:19:00,", b"0000:65:00,"), "101.conf")
    assert vm.guest.hostdevs[0].bdf == Bdf.parse("0000:65:00.0")
    audio = "x86-1p1n8c16t-gpu-audio"
    conf = b"cores: 4\nmemory: 4096\nmachine: q35\nhostpci0: 01:00,pcie=1\nname: v\n"
    planned = edited(conf, audio, plain("pin"))
    assert [str(device.bdf) for device in planned.plan.vm.hostdevs] == [
        "0000:01:00.0",
        "0000:01:00.1",
    ]
    assert b"hostpci0: 01:00,pcie=1\n" in planned.rendering.document
    mirrored = edited(conf, audio, plain("pin-numa-pci")).rendering.document
    assert b"hostpci0" not in mirrored
    assert mirrored.count(b"vfio-pci,host=0000:01:00.") == 2


BUSY_QM = b"""#GPU box%3A see wiki
args: -cpu host,kvm=off -device 'ivshmem-plain,memdev=ivshmem,bus=pcie.0'
balloon: 8192
cores: 8
hostpci0: 0000:19:00,pcie=1,x-vga=1
machine: pc-q35-8.1
memory: 32768
name: gpu101
numa: 1
numa0: cpus=0-7,hostnodes=1,memory=32768,policy=bind
onboot: 1

[special:cloudinit]
#comment
cores: 4
"""


def test_a_layout_that_leaves_all_as_it_was_changes_no_byte() -> None:
    for content in (BUSY_QM, *FILES.values()):
        assert edited(content, HOST, plain("default")).rendering.document == content


def test_a_hook_script_of_ours_goes_with_its_layout_and_sections_stay() -> None:
    pinned = edited(BUSY_QM, HOST, plain("pin")).rendering.document
    assert b"hookscript: local:snippets/homenode-" in pinned
    assert pinned.endswith(BUSY_QM[BUSY_QM.index(b"\n[special") :])
    assert b"hookscript" not in edited(pinned, HOST, plain("default")).rendering.document


@pytest.mark.parametrize(
    ("section", "reason", "hint"),
    [
        (b"[PENDING]\ncores: 12\n", "has pending changes", "qm pending 101"),
        (b"[before-upgrade]\ncores: 4\n", "'before-upgrade'", "qm delsnapshot 101 before-upgrade"),
    ],
)
def test_pending_changes_and_snapshots_are_refused_by_name(
    section: bytes, reason: str, hint: str
) -> None:
    for content in (FILES["proxmox"] + b"\n" + section, BUSY_QM + section, b"agent: 1\n" + section):
        with pytest.raises(InputError, match=reason) as refused:
            read_vm(content, "101.conf", "proxmox")
        assert (refused.value.hint or "").startswith(hint)


def test_options_of_a_device_stay_with_it() -> None:
    after = edited(XL, HOST, plain("pin")).rendering.document
    assert b"'19:00.0,permissive=1'" in after or b'"19:00.0,permissive=1"' in after


def test_a_chosen_gpu_takes_the_place_of_the_one_that_was_there() -> None:
    for target in ("proxmox", "xen"):
        after = edited(FILES[target], HOST, plain("pin", gpu_count=1, reserve_defined=False))
        chosen = {str(device.bdf) for device in after.plan.vm.hostdevs}
        vm = find_target(target).read_vm(after.rendering.document, "vm")
        there = {str(one.bdf) for one in vm.hostdevs}
        assert there == chosen


XML = b"""<domain type='kvm'><name>v</name><memory unit='GiB'>8</memory>
<currentMemory unit='GiB'>4</currentMemory><vcpu current='2'>4</vcpu>
<memoryBacking><locked/></memoryBacking><cputune><shares>2048</shares></cputune>
<os firmware='efi'><type machine='q35'>hvm</type><boot dev='hd'/></os>
<features><acpi/><hyperv/></features><cpu mode='custom'><model>EPYC</model></cpu>
<clock offset='localtime'/><devices><disk type='file'><target dev='vda'/></disk>
<disk type='file'><target dev='vdb'/></disk><interface type='user'/><controller type='usb'/>
<hostdev mode='subsystem' type='usb'><source><address bus='1' device='2'/></source></hostdev>
<hostdev mode='subsystem' type='pci' managed='yes'><source>
<address domain='0' bus='0x19' slot='0' function='0'/></source></hostdev></devices></domain>"""
NOT_CARRIED = [
    # (file, the settings that the file of another target does not get, by kind)
    (
        XML,
        {
            "disks": "2 <disk>",
            "network": "<interface>",
            "firmware": "efi",
            "other settings": "<locked>, <shares>, <boot>, <hyperv>, <clock>, <hostdev>, "
            "<currentMemory>, <vcpu current=>, CPU model EPYC",
        },
    ),
    (
        XL + b'firmware="ovmf"\nviridian=1\n',
        {"disks": "disk", "network": "vif", "firmware": "efi", "other settings": "viridian"},
    ),
    (
        QM.replace(b"balloon: 2048\n", b""),
        {"disks": "scsi0", "other settings": "agent, args, boot, ostype"},
    ),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("content", "kinds"), NOT_CARRIED, ids=["libvirt", "xen", "proxmox"])
def test_settings_that_another_target_does_not_get_are_named(
    content: bytes, kinds: dict[str, str], target: str
) -> None:
    vm = read_vm(content, "vm")
    planned = plan_for_target(vm, plain("pin"), host_named(HOST), target)
    title = find_target(target).title
    subjects = {f.subject: f.observed for f in planned.findings if f.id == "target-not-carried"}
    named = {f"{title}: {kind}": f"{text} not in the file" for kind, text in kinds.items()}
    assert subjects == ({} if vm.kind == target else named)


def test_auto_chooses_no_layout_that_the_target_cannot_have(tmp_path: Path) -> None:
    path = tmp_path / "vm.cfg"
    path.write_bytes(XL.replace(b"'0000:9b:00.0'", b""))
    output = homenode("plan", path, "--host", HOST).output
    assert "pin-bound (auto, gpu-copy)" in output and "pin-numa-pci" not in output


@pytest.mark.parametrize(("file", "script"), [("102.conf", "102"), ("new.conf", "b-1")])
def test_the_hook_script_of_a_new_file_has_the_number_or_name_of_the_vm(
    tmp_path: Path, file: str, script: str
) -> None:
    words = ("--host", HOST, "--target", "proxmox", "--vcpus", "4", "--memory", "4GiB")
    output = homenode("plan", *words, "--name", "b_1", "-o", tmp_path / file).output
    assert f"snippets/homenode-{script}.sh" in (tmp_path / file).read_text()
    assert "homenode-vm.sh" not in output


@pytest.mark.parametrize(
    ("target", "file", "step"),
    [
        ("proxmox", "102.conf", "cp {} /etc/pve/qemu-server/102.conf"),
        ("qemu", "vm.sh", "bash {} prepare, then bash {} start"),
        ("xen", "vm.cfg", "xl create {}"),
    ],
)
def test_the_next_step_uses_the_written_file(
    tmp_path: Path, target: str, file: str, step: str
) -> None:
    words = ("--host", HOST, "--target", target, "--vcpus", "4", "--memory", "4GiB")
    output = homenode("plan", *words, "-o", tmp_path / file).output
    assert step.replace("{}", str(tmp_path / file)) in " ".join(output.split())
    assert "next" not in homenode("plan", *words, "-o", "-").output


def test_the_reasons_of_a_plan_for_xen_name_nothing_that_xen_lacks(tmp_path: Path) -> None:
    (tmp_path / "vm.xml").write_bytes(XML)
    words = ("--host", HOST, "--target", "xen", "--layout", "pin-numa-pci", "--explain")
    text = homenode("plan", tmp_path / "vm.xml", *words).stdout
    assert (
        re.search("isolcpus|libvirt|[Ss]ocket|L3|guest address 0|<topology>|memlock", text) is None
    )


@pytest.mark.parametrize(
    ("content", "layout", "changed"),
    [
        (XL.replace(b"maxmem = 32768", b"maxmem = 65536"), "pin", "65536 becomes 32768"),
        (XL + b"maxvcpus=16\n", "pin", "16 becomes 8"),
        (XL, "pin", None),
        (XL.replace(b"maxmem = 32768", b"maxmem = 65536").partition(b"pci")[0], "pin", None),
        (BUSY_QM, "pin", "8192 becomes 0"),
        (BUSY_QM, "default", None),
        (BUSY_QM.replace(b"balloon: 8192", b"vcpus: 4"), "pin", "4 becomes 8"),
    ],
)
def test_a_limit_that_the_plan_changes_is_named(
    content: bytes, layout: str, changed: str | None
) -> None:
    planned = edited(content, HOST, plain(layout))
    texts = [f.observed.partition(":")[0] for f in planned.findings if f.id == "target-not-carried"]
    assert texts == ([changed] if changed else [])


@pytest.mark.parametrize(
    ("cpus", "first", "last"),
    [
        (b'cpus="all"', None, None),
        (b'cpus="0-7,^3"', "0-2,4-7", "0-2,4-7"),
        (b'cpus=["node:1", "0"]', "56-111,168-223", None),
        (b'cpus="all,^nodes:0"', "56-111,168-223", "56-111,168-223"),
        (b'cpus_soft=["0", "1", "2", "3", "4", "5", "6", "7", "8"]', "0", "7"),
    ],
)
def test_cpus_of_xl_are_read_as_xl_reads_them(
    cpus: bytes, first: str | None, last: str | None
) -> None:
    vm = read_vm(XL.replace(b"memory = 32768", b'memory = "32768"') + cpus + b"\n", "vm.cfg")
    pins = add_host_facts(vm, host_named(HOST)).guest.vcpu_pins
    expected = [None if pus is None else CpuSet.parse(pus) for pus in (first, last)]
    assert len(pins) == 8 and [pins[0], pins[-1]] == expected


BROKEN = [
    ("proxmox", QM.replace(b"cores: 16", b"cores: sixteen")),
    ("proxmox", QM.replace(b"cores: 16", b"cores: 16\ncores: 8")),
    ("proxmox", QM.replace(b"memory: 65536", b"memory: -4")),
    ("proxmox", QM.replace(b"args: -fw_cfg", b"args: 'open -fw_cfg")),
    ("proxmox", QM.replace(b"19:00,", b"1x:00,")),
    ("proxmox", QM.replace(b"numa: 0", b"hugepages: 7\nnuma: 1")),
    ("xen", XL.replace(b"vcpus=8", b"vcpus=[8")),
    ("xen", XL.replace(b"vcpus=8", b"vcpus=8 9")),
    ("xen", XL.replace(b"vcpus=8", b'vcpus=8\nvnuma=[["pnode=0"]]')),
    ("xen", XL + b"[" * 100_000),
    ("xen", XL.replace(b"vcpus=8", b"vcpus=99999999999")),
    ("qemu", b"#!/bin/sh\n\nqemu=(\n  qemu-system-x86_64\n  -smp 999999999 -m 1G\n)\n"),
]


@pytest.mark.parametrize("target", TARGETS)
def test_a_file_is_one_of_its_target_alone(target: str) -> None:
    """They may be asked in any order."""
    written_file = written(target, "small-2n8c-2gpu", options("pin-numa")).rendering.document
    for content in (written_file, FILES.get(target, written_file)):
        takers = [name for name in TARGETS if find_target(name).recognises(content)]
        assert takers == [target]


@pytest.mark.parametrize(("target", "content"), BROKEN, ids=range(len(BROKEN)))
def test_a_damaged_file_is_refused_by_name(target: str, content: bytes) -> None:
    with pytest.raises(HomenodeError) as caught:
        edited(content, HOST, plain("pin-numa"))
    assert isinstance(caught.value, InputError), caught.value


def test_a_device_below_a_loop_of_controllers_gets_a_port() -> None:
    port = "<controller type='pci' index='1' model='pcie-root-port'>{}</controller>"
    device = "<hostdev type='pci'><source><address bus='0x19'/></source>{}</hostdev>"
    parts = "".join((port, device)).replace("{}", "<address type='pci' bus='1'/>")
    domain = (
        "<domain type='kvm'><name>vm</name><vcpu>4</vcpu><memory unit='GiB'>4</memory><os>"
        f"<type machine='q35'>hvm</type></os><devices>{parts}</devices></domain>"
    )
    vm, wanted = read_vm(domain.encode(), "vm.xml"), plain("pin")
    planned = plan_for_target(vm, wanted, host_named("hgx-h100"), "qemu")
    assert b"vfio-pci,host=0000:19:00.0,id=hostdev0,bus=pci.1" in planned.rendering.document


def test_what_is_no_file_of_a_vm_is_refused_with_what_would_be_one() -> None:
    for content in (b"", b"hello\n", b"{}", b"a: b\n", b"\x7fELF" + bytes(100), b'{"a": 1}'):
        with pytest.raises(InputError):
            recognize_kind(content, "vm")


def test_a_name_that_is_a_command_stays_a_word() -> None:
    name = "x'; rm -rf ~ #$(reboot)"
    conf = b"cores: 2\nmemory: 2048\nmachine: q35\nname: " + name.encode() + b"\n"
    vm = read_vm(conf, "vm")
    assert vm.guest.name == name
    script = written("qemu", HOST, options("pin")).rendering.document
    planned = plan_for_target(vm, plain("pin-numa"), host_named(HOST), "qemu")
    words = qemu.parse_script(planned.rendering.document, "vm.sh")
    assert f"guest={name},debug-threads=on" in words
    assert qemu.parse_script(script, "vm.sh")[0] == "qemu-system-x86_64"


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here")
def test_every_script_that_is_written_passes_shellcheck(tmp_path: Path) -> None:
    paths = []
    for target in ("qemu", "proxmox"):
        for layout in ("default", "pin-numa-pci"):
            rendering = written(
                target, HOST, options(layout, gpu_count=2, page_bytes=GIB)
            ).rendering
            scripts = [content for _, content in rendering.companions]
            scripts += [rendering.document] if rendering.document.startswith(b"#!") else []
            for number, content in enumerate(scripts):
                paths.append(tmp_path / f"{target}-{layout}-{number}.sh")
                paths[-1].write_bytes(content)
    done = subprocess.run(["shellcheck", *paths], capture_output=True, check=False, text=True)
    assert len(paths) == 3
    assert (done.returncode, done.stdout) == (0, "")


PUBLISHED = [
    # (lines, options that Proxmox writes); restated from the pair of this name in src/test/cfg2cmd
    (
        "memory-hugepages-1g",
        "cores: 2\nmemory: 8192\nnuma: 1\nsockets: 2\nhugepages: 1024\n",
        (
            "-smp 4,sockets=2,cores=2,maxcpus=4",
            "-m 8192",
            "-object memory-backend-file,id=ram-node0,size=4096M,"
            "mem-path=/run/hugepages/kvm/1048576kB,share=on,prealloc=yes",
            "-numa node,nodeid=0,cpus=0-1,memdev=ram-node0",
            "-numa node,nodeid=1,cpus=2-3,memdev=ram-node1",
        ),
    ),
    (
        "q35-linux-hostpci-multifunction",
        "cores: 1\nmemory: 512\nmachine: q35\nnuma: 1\nsockets: 2\n",
        (
            "-smp 2,sockets=2,cores=1,maxcpus=2",
            "-m 512",
            "-object memory-backend-ram,id=ram-node0,size=256M",
            "-numa node,nodeid=0,cpus=0,memdev=ram-node0",
            "-object memory-backend-ram,id=ram-node1,size=256M",
            "-numa node,nodeid=1,cpus=1,memdev=ram-node1",
        ),
    ),
]


@pytest.mark.parametrize(("name", "conf", "wanted"), PUBLISHED, ids=[p[0] for p in PUBLISHED])
def test_a_configuration_becomes_the_options_that_proxmox_publishes(
    name: str, conf: str, wanted: tuple[str, ...]
) -> None:
    words = qm_conf.build_command(conf.encode(), name)
    pairs = {f"{a} {b}" for a, b in pairwise(words)}
    assert set(wanted) <= pairs


def test_sizes_are_whole_units_of_the_target_or_refused() -> None:
    odd = options("pin", memory_bytes=4 * GIB + 4096)
    for target in ("proxmox", "xen"):
        with pytest.raises(InputError, match="whole MiB"):
            written(target, HOST, odd)
    assert written("qemu", HOST, odd).rendering.document
    assert MIB


def test_a_script_ends_the_vm_where_a_vcpu_cannot_be_pinned(tmp_path: Path) -> None:
    """A program whose thread has the name of QEMU's first vCPU, and a CPU that is not there."""
    text = written("qemu", "small-2n8c-2gpu", options("pin")).rendering.document.decode()
    vcpu = "import time; open('/proc/self/comm', 'w').write('CPU 0/KVM'); time.sleep(9)"
    for name, words in (("vcpu_pus", "4095"), ("qemu", f'{sys.executable} -c "{vcpu}"')):
        text = re.sub(rf"\n{name}=\([^)]*\n\)\n", f"\n{name}=({words})\n", text)
    text = re.sub(r"\nemulator_pus=.*", "\nemulator_pus=", text)
    script = tmp_path / "vm.sh"
    script.write_text(text)
    done = subprocess.run(
        ["bash", script, "start"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "taskset" in done.stderr
