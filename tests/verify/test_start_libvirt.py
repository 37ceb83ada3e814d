"""VMs that cannot start are named, and VMs that can are not: a real libvirt is the judge of both.

Each row is defined and started paused, under TCG. What libvirt says decides what homenode must say.
"""

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from homenode.check.start.start_check import check_start
from homenode.check.verify.boot.libvirt import SYSTEM, answering
from homenode.process import Completed, run
from homenode.vm.domain.read import open_domain

pytestmark = [pytest.mark.libvirt, pytest.mark.root]

DOCUMENT = """<domain type='{type}' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>{name}</name>{memory}<vcpu>1</vcpu>
  <os><type arch='x86_64' machine='{machine}'>hvm</type>{os}</os><features><acpi/></features>{cpu}
  <devices><emulator>{emulator}</emulator><memballoon model='none'/>
  <controller type='usb' model='none'/>{devices}</devices>{tail}
</domain>
"""
USUAL = {
    "memory": "<memory unit='MiB'>32</memory>",
    "type": "qemu",
    "machine": "q35",
    "os": "",
    "cpu": "",
    "devices": "",
    "tail": "",
    "emulator": "/usr/bin/qemu-system-x86_64",
}


def disk(file: str, format: str = "raw", target: str = "vda", more: str = "") -> str:
    return (
        f"<disk type='file'><driver name='qemu' type='{format}'/><source file='{file}'{more}/>"
        f"<target dev='{target}' bus='virtio'/></disk>"
    )


def arguments(*words: str) -> str:
    inside = "".join(f"<qemu:arg value='{word}'/>" for word in words)
    return f"<qemu:commandline>{inside}</qemu:commandline>"


def override(alias: str, name: str, kind: str, value: str) -> str:
    return (
        f"<qemu:override><qemu:device alias='{alias}'><qemu:frontend><qemu:property name='{name}' "
        f"type='{kind}' value='{value}'/></qemu:frontend></qemu:device></qemu:override>"
    )


NAMED = "<interface type='user'><model type='virtio'/><alias name='ua-n'/></interface>"
PFLASH = "<loader readonly='yes' type='pflash'>/usr/share/OVMF/OVMF_CODE_4M.fd</loader>"

SLOTS = {
    "memory": "<maxMemory slots='1' unit='MiB'>512</maxMemory><memory unit='MiB'>32</memory>",
    "cpu": "<cpu><numa><cell id='0' cpus='0' memory='32' unit='MiB'/></numa></cpu>",
}
NVDIMM = (
    "<memory model='nvdimm'><source><path>{{at}}/{path}</path>{more}</source>"
    "<target><size unit='MiB'>8</size><node>0</node></target></memory>"
)

CANNOT: dict[str, tuple[str, dict[str, str]]] = {
    "display": ("start-argument", {"tail": arguments("-display", "none-such")}),
    "gl": (
        "start-argument",
        {
            "devices": "<graphics type='vnc'/><video><model type='virtio'>"
            "<acceleration accel3d='yes'/></model></video>"
        },
    ),
    "property": (
        "start-argument",
        {
            "devices": NAMED,
            "tail": override("ua-n", "x-none", "bool", "true"),
        },
    ),
    "speed": (
        "start-argument",
        {
            "devices": "<controller type='pci' index='1' model='pcie-root-port'>"
            "<alias name='ua-p'/></controller>",
            "tail": override("ua-p", "x-speed", "string", "33"),
        },
    ),
    "initrd": ("start-argument", {"os": "<initrd>{at}/raw.img</initrd>"}),
    "helper": ("start-argument", {"tail": arguments("-netdev", "bridge,id=n9,br=none9")}),
    "no-bus": ("start-argument", {"tail": arguments("-device", "virtio-rng-pci,bus=pcie.9")}),
    "flag": ("start-argument", {"tail": arguments("-cpu", "Nehalem,+avx1024")}),
    "burst": (
        "start-argument",
        {
            "devices": disk("{at}/raw.img").replace(
                "</disk>",
                "<iotune><total_iops_sec>100</total_iops_sec>"
                "<total_iops_sec_max>10</total_iops_sec_max></iotune></disk>",
            )
        },
    ),
    "exact": (
        "start-emulator",
        {"cpu": "<cpu mode='custom' match='exact' check='full'><model>qemu64</model></cpu>"},
    ),
    "display-socket": (
        "start-permission",
        {"devices": "<graphics type='vnc'><listen type='socket' socket='{at}/v.sock'/></graphics>"},
    ),
    "disk": ("start-file", {"devices": disk("{at}/gone.img")}),
    "backing": ("start-image", {"devices": disk("{at}/broken.qcow2", "qcow2")}),
    "no-qcow2": ("start-image", {"devices": disk("{at}/raw.img", "qcow2")}),
    "closed": ("start-permission", {"devices": disk("{at}/closed/raw.img")}),
    "twice": (
        "start-in-use",
        {"devices": disk("{at}/raw.img") + disk("{at}/raw.img", target="vdb")},
    ),
    "pool": (
        "start-storage",
        {
            "devices": "<disk type='volume'><source pool='homenode-none' volume='v'/>"
            "<target dev='vda' bus='virtio'/></disk>"
        },
    ),
    "network": (
        "start-network",
        {"devices": "<interface type='network'><source network='homenode-none'/></interface>"},
    ),
    "bridge": (
        "start-network",
        {"devices": "<interface type='bridge'><source bridge='homenode9'/></interface>"},
    ),
    "loader": ("start-file", {"os": "<loader type='rom'>{at}/none</loader>"}),
    "template": ("start-file", {"os": PFLASH + "<nvram template='{at}/none'>{at}/vars</nvram>"}),
    "emulator": ("start-program", {"emulator": "{at}/none"}),
    "machine": ("start-emulator", {"machine": "pc-q35-99.9"}),
    "cpu": ("refused-by-libvirt", {"cpu": "<cpu><model fallback='forbid'>None-v1</model></cpu>"}),
    "kvm": ("start-kvm", {"type": "kvm"}),
    "serial": (
        "start-file",
        {"devices": "<serial type='unix'><source mode='connect' path='{at}/none'/></serial>"},
    ),
    "usb": (
        "start-device",
        {
            "devices": "<hostdev mode='subsystem' type='usb'><source><vendor id='0xdead'/>"
            "<product id='0xbeef'/></source></hostdev>"
        },
    ),
    "argument": ("start-argument", {"tail": arguments("-device", "edu,none=1,addr=1e")}),
    "feature": (
        "refused-by-libvirt",
        {"cpu": "<cpu match='exact'><model>qemu64</model><feature name='none-such'/></cpu>"},
    ),
    "block size": (
        "start-argument",
        {
            "devices": disk("{at}/raw.img").replace(
                "</disk>", "<blockio logical_block_size='513'/></disk>"
            )
        },
    ),
    "keymap": ("start-argument", {"devices": "<graphics type='vnc' keymap='zz'/>"}),
    "table": ("start-argument", {"os": "<acpi><table type='slic'>{at}/short</table></acpi>"}),
    "kernel": ("start-argument", {"os": "<kernel>{at}/short</kernel>"}),
    "file of an argument": ("start-file", {"tail": arguments("-fw_cfg", "name=opt/x,file=/none")}),
    "id of an argument": (
        "start-argument",
        {"tail": arguments("-device", "virtio-net-pci,netdev=none,bus=pcie.0,addr=1d")},
    ),
    "user": (
        "start-permission",
        {"tail": "<seclabel type='static' model='dac'><label>none-such:kvm</label></seclabel>"},
    ),
    "name": ("refused-by-libvirt", {"name": "homenode/test"}),
    "address": (
        "refused-by-libvirt",
        {
            "devices": "<video><model type='cirrus'/>"
            "<address type='pci' slot='0x1f' function='2'/></video>"
        },
    ),
}
# Values that only QEMU knows to be wrong.
CANNOT |= {
    "queue": (
        "start-argument",
        {"devices": disk("{at}/raw.img").replace("type='raw'", "type='raw' queue_size='100'")},
    ),
    "slice": (
        "start-argument",
        {
            "devices": disk("{at}/raw.img").replace(
                "/><target",
                "><slices><slice type='storage' offset='4194304' size='512'/></slices></source>"
                "<target",
            )
        },
    ),
    "chassis": (
        "start-argument",
        {
            "devices": "".join(
                f"<controller type='pci' index='{index}' model='pcie-root-port'>"
                "<target chassis='7' port='16'/></controller>"
                for index in (1, 2)
            )
        },
    ),
    "index": (
        "start-argument",
        {"devices": 2 * "<interface type='user'><acpi index='5'/></interface>"},
    ),
    "counters": ("start-image", {"devices": disk("{at}/counters.qcow2", "qcow2")}),
    "corrupt": ("start-image", {"devices": disk("{at}/corrupt.qcow2", "qcow2")}),
    "below": ("start-image", {"devices": disk("{at}/over.qcow2", "qcow2")}),
    "vpc": ("start-image", {"devices": disk("{at}/raw.img", "vpc")}),
    "driver": (
        "start-argument",
        {
            "devices": "<disk type='network'><source protocol='rbd' name='p/i'><host "
            "name='10.0.0.1'/></source><target dev='vda' bus='virtio'/></disk>"
        },
    ),
    "burst length": (
        "start-argument",
        {
            "devices": disk("{at}/raw.img").replace(
                "</disk>",
                "<iotune><read_iops_sec>9</read_iops_sec>"
                "<read_iops_sec_max_length>9</read_iops_sec_max_length></iotune></disk>",
            )
        },
    ),
    "room": ("start-file", {"devices": NVDIMM.format(path="raw.img", more=""), **SLOTS}),
    "alignment": (
        "start-argument",
        {
            "devices": NVDIMM.format(path="room.img", more="<alignsize unit='KiB'>12</alignsize>"),
            **SLOTS,
        },
    ),
    "macvtap": (
        "start-network",
        {"devices": "<interface type='direct'><source dev='lo' mode='bridge'/></interface>"},
    ),
    "long name": (
        "start-in-use",
        {"devices": "<interface type='ethernet'><target dev='homenode-test-09'/></interface>"},
    ),
    "queues": (
        "start-argument",
        {
            "devices": "<interface type='ethernet'><model type='virtio'/><driver queues='257'/>"
            "</interface>"
        },
    ),
    "monitor": ("start-argument", {"tail": arguments("-mon", "chardev=none")}),
    "action": ("start-argument", {"tail": arguments("-watchdog-action", "none-such")}),
    "pid file": ("start-file", {"tail": arguments("-pidfile", "{at}/none/p")}),
    "9p": (
        "start-permission",
        {
            "devices": "<filesystem type='mount' accessmode='passthrough'>"
            "<source dir='{at}/closed'/><target dir='x'/></filesystem>"
        },
    ),
    "bound": (
        "start-network",
        {
            "devices": "<serial type='tcp'><source mode='bind' host='192.0.2.99' service='4555'/>"
            "<protocol type='raw'/></serial>"
        },
    ),
    "store": ("start-file", {"os": "<loader readonly='yes' type='pflash'>{at}/raw.img</loader>"}),
    "mode": ("start-permission", {"devices": disk("{at}/kept.img")}),
    "tap": (
        "start-in-use",
        {"devices": "<interface type='ethernet'><target dev='lo'/></interface>"},
    ),
}
BRIDGE = "<interface type='network'><source network='{{net}}'/>{}</interface>"
TCP = (
    "<serial type='tcp'><source mode='bind' host='127.0.0.1' service='{}'/>"
    "<protocol type='raw'/></serial>"
)
# What libvirt and the kernel refuse after the command is made.
CANNOT |= {
    "vlan": ("start-network", {"devices": BRIDGE.format("<vlan><tag id='42'/></vlan>")}),
    "virtualport": (
        "start-network",
        {
            "devices": BRIDGE.format(
                "<virtualport type='802.1Qbh'><parameters profileid='p'/></virtualport>"
            )
        },
    ),
    "floor": (
        "start-network",
        {"devices": BRIDGE.format("<bandwidth><inbound average='9' floor='5'/></bandwidth>")},
    ),
    "learning": (
        "start-network",
        {
            "devices": BRIDGE.format(
                "<filterref filter='no-ip-spoofing'>"
                "<parameter name='CTRL_IP_LEARNING' value='bad'/></filterref>"
            )
        },
    ),
    "shared memory": (
        "start-file",
        {
            "devices": "<shmem name='{net}'><model type='ivshmem-plain'/>"
            "<size unit='M'>4</size></shmem>"
        },
    ),
    "no TPM": (
        "start-device",
        {
            "devices": "<tpm model='tpm-tis'><backend type='passthrough'>"
            "<device path='/dev/null'/></backend></tpm>"
        },
    ),
    "pin": ("start-device", {"tail": "<cputune><emulatorpin cpuset='4000'/></cputune>"}),
    "event": (
        "start-file",
        {"tail": "<perf><event name='cmt' enabled='yes'/></perf>"},
    ),
    "low port": ("start-permission", {"devices": TCP.format(81)}),
    "one port": ("start-in-use", {"devices": TCP.format(15602) + TCP.format(15602)}),
    "secure": (
        "start-argument",
        {"devices": "<graphics type='spice' autoport='yes' defaultMode='secure'/>"},
    ),
    "no secret": (
        "start-storage",
        {
            "devices": disk("{at}/base.qcow2", "qcow2").replace(
                "</disk>",
                "<encryption format='luks'><secret type='passphrase' "
                "uuid='11111111-2222-3333-4444-555555555555'/></encryption></disk>",
            )
        },
    ),
    "extent": ("start-image", {"devices": disk("{at}/split.vmdk", "vmdk")}),
    "template of no size": (
        "start-argument",
        {"os": PFLASH + "<nvram template='{at}/short'>{at}/v</nvram>"},
    ),
    "monitor's connection": ("start-network", {"tail": arguments("-monitor", "tcp:127.0.0.1:9")}),
    "no node": (
        "start-argument",
        {
            "tail": arguments(
                "-object", "memory-backend-ram,id=m9,size=2M,host-nodes=63,policy=bind"
            )
        },
    ),
}
CANNOT |= {
    "formats that are not named": ("start-image", {"devices": disk("{at}/two.qcow2", "qcow2")}),
    "no variables": ("start-argument", {"os": PFLASH + "<nvram>{at}/empty</nvram>"}),
}
_NAME_OF_FORMAT = b"\xe2\x79\x2a\xca"
"""What begins the name of the format below. Source: QEMU, docs/interop/qcow2.txt."""
CAN: dict[str, dict[str, str]] = {
    "a format that is not named": {"devices": disk("{at}/nameless.qcow2", "qcow2")},
    "an isolated port": {
        "devices": BRIDGE.format("<port isolated='yes'/><mtu size='9000'/>"),
        "tail": "<cputune><emulatorpin cpuset='0'/></cputune>"
        "<perf><event name='page_faults' enabled='yes'/></perf>",
    },
    "corrupt and only read": {
        "devices": disk("{at}/corrupt.qcow2", "qcow2").replace("</disk>", "<readonly/></disk>")
    },
    "room": {"devices": NVDIMM.format(path="room.img", more=""), **SLOTS},
    "tried again": {
        "devices": "<serial type='tcp'><source mode='connect' host='127.0.0.1' service='4'>"
        "<reconnect enabled='yes' timeout='5'/></source><protocol type='raw'/></serial>"
    },
    "overridden": {
        "devices": NAMED,
        "tail": override("ua-n", "ctrl_rx", "bool", "false"),
    },
    "functions": {
        "devices": "<controller type='pci' index='1' model='pcie-root-port'>"
        "<address type='pci' bus='0' slot='2' function='1'/></controller>"
        "<controller type='pci' index='2' model='pcie-root-port'>"
        "<address type='pci' bus='0' slot='2' function='0'/></controller>"
    },
    "what-is-there": {
        "devices": disk("{at}/raw.img")
        + disk("{at}/top.qcow2", "qcow2", "vdb")
        + disk("{at}/broken.qcow2", target="vdc")
        + disk("{at}/gone.img", target="vdd", more=" startupPolicy='optional'")
        + "<serial type='file'><source path='{at}/new.log'/></serial>"
        "<channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>",
        "tail": arguments("-global", "pcie-root-port.x-speed=2_5"),
    },
    "spice": {
        "devices": "<graphics type='spice'><listen type='none'/></graphics>"
        "<channel type='spicevmc'><target type='virtio' name='com.redhat.spice.0'/></channel>"
    },
    "what-libvirt-makes": {
        "os": PFLASH + "<nvram>/var/lib/libvirt/qemu/nvram/{name}.fd</nvram>",
        "cpu": "<cpu mode='maximum'/>",
    },
}


def virsh(*words: str, input: str | None = None) -> Completed:
    return run(("virsh", "-q", "-c", SYSTEM, *words), 120, input)


@pytest.fixture(scope="module")
def at() -> Iterator[str]:
    """A folder of images that QEMU's user may enter."""
    for program in ("virsh", "qemu-img"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} here")
    if os.geteuid() != 0 or answering(None) is None:
        pytest.skip(f"needs root and a libvirtd at {SYSTEM}")
    if not Path("/usr/share/OVMF/OVMF_CODE_4M.fd").exists():
        pytest.skip("no OVMF here")
    folder = Path("/var/lib/libvirt/images") / f"homenode-test-{uuid.uuid4().hex[:8]}"
    folder.mkdir(mode=0o755, parents=True)
    shared = Path("/dev/shm", folder.name)

    def image(name: str, *words: str) -> None:
        subprocess.run(["qemu-img", "create", "-q", *words, str(folder / name), "1M"], check=True)

    try:
        image("raw.img", "-f", "raw")
        image("base.qcow2", "-f", "qcow2")
        for name, below in (("top.qcow2", "base.qcow2"), ("broken.qcow2", "gone.qcow2")):
            image(name, "-u", "-f", "qcow2", "-b", str(folder / below), "-F", "qcow2")
        shutil.copy(folder / "raw.img", folder / "kept.img")
        (folder / "kept.img").chmod(0o444)
        (folder / "short").write_bytes(b"short")
        (folder / "room.img").write_bytes(bytes(8 << 20))
        good = (folder / "base.qcow2").read_bytes()
        for name, place, value in (("counters", 48, 0x1234), ("corrupt", 72, 2)):
            bad = good[:place] + value.to_bytes(8, "big") + good[place + 8 :]
            (folder / f"{name}.qcow2").write_bytes(bad)
        image("over.qcow2", "-u", "-f", "qcow2", "-b", f"{folder}/counters.qcow2", "-F", "qcow2")
        for name, below in (("nameless.qcow2", "base.qcow2"), ("two.qcow2", "top.qcow2")):
            image(name, "-u", "-f", "qcow2", "-b", str(folder / below), "-F", "qcow2")
            made = (folder / name).read_bytes()
            (folder / name).write_bytes(made.replace(_NAME_OF_FORMAT, b"\x12\x34\x56\x78"))
        (folder / "empty").write_bytes(b"")
        image("split.vmdk", "-f", "vmdk", "-o", "subformat=twoGbMaxExtentSparse")
        (folder / "split-s001.vmdk").unlink()
        network = (
            f"<network><name>{folder.name}</name><bridge name='hn-{folder.name[-8:]}'/>"
            "<dns enable='no'/></network>"
        )
        virsh("net-create", "/dev/stdin", input=network)
        shared.write_bytes(bytes(1 << 20))
        (folder / "closed").mkdir(mode=0o700)
        shutil.copy(folder / "raw.img", folder / "closed")
        yield str(folder)
    finally:
        virsh("net-destroy", folder.name)
        shared.unlink(missing_ok=True)
        shutil.rmtree(folder)


def document(row: dict[str, str], at: str) -> tuple[str, str]:
    name = row.get("name") or f"homenode-test-{uuid.uuid4().hex[:8]}"
    net = Path(at).name
    values = {
        k: v.replace("{net}", net).replace("{at}", at).replace("{name}", name)
        for k, v in {**USUAL, **row}.items()
    }
    values.pop("name", None)
    return name, DOCUMENT.format(name=name, **values)


def starts(name: str, text: str) -> bool:
    """What libvirt does with it; nothing of it is left."""
    try:
        if virsh("define", "/dev/stdin", input=text).returncode:
            return False
        return virsh("start", "--paused", name).returncode == 0
    finally:
        virsh("destroy", name)
        virsh("undefine", "--nvram", name)


@pytest.mark.parametrize("case", CANNOT)
def test_a_vm_that_libvirt_cannot_start_is_named_with_the_reason(case: str, at: str) -> None:
    expected, row = CANNOT[case]
    name, text = document(row, at)
    found = check_start(open_domain(text.encode(), "vm.xml"), SYSTEM).findings
    assert expected in {one.id for one in found if one.is_bad}, found
    assert not starts(name, text)


@pytest.mark.parametrize("case", CAN)
def test_a_vm_that_libvirt_starts_has_nothing_missing(case: str, at: str) -> None:
    name, text = document(CAN[case], at)
    found = check_start(open_domain(text.encode(), "vm.xml"), SYSTEM).findings
    assert not [one for one in found if one.is_bad]
    assert starts(name, text)


def test_an_image_that_another_vm_writes_is_in_use(at: str) -> None:
    holder, text = document({"devices": disk("{at}/base.qcow2", "qcow2")}, at)
    assert virsh("create", "--paused", "/dev/stdin", input=text).returncode == 0
    try:
        _, other = document({"devices": disk("{at}/base.qcow2", "qcow2")}, at)
        found = check_start(open_domain(other.encode(), "vm.xml"), SYSTEM).findings
        assert "start-in-use" in {one.id for one in found}
    finally:
        virsh("destroy", holder)


def test_no_program_of_a_document_is_run(at: str, tmp_path: Path) -> None:
    """libvirt runs the script of an interface also for a command that it only prints, and the
    emulator for what it can do."""
    for name in ("script", "emulator"):
        program = Path(at, name)
        program.write_text(f"#!/bin/sh\ntouch {at}/ran\n")
        program.chmod(0o777)
    devices = f"<interface type='ethernet'><script path='{at}/script'/></interface>"
    for row in ({"devices": devices}, {"emulator": f"{at}/emulator"}):
        _, text = document(row, at)
        check_start(open_domain(text.encode(), "vm.xml"), SYSTEM)
        assert not Path(at, "ran").exists()


def test_a_file_that_not_even_root_can_write_is_named(at: str) -> None:
    path = Path(at, "fixed.img")
    shutil.copy(Path(at, "raw.img"), path)
    if subprocess.run(["chattr", "+i", str(path)], check=False).returncode:
        pytest.skip("this file system has no immutable files")
    try:
        name, text = document({"devices": disk(str(path))}, at)
        found = check_start(open_domain(text.encode(), "vm.xml"), SYSTEM).findings
        assert "start-permission" in {one.id for one in found}
        assert not starts(name, text)
    finally:
        subprocess.run(["chattr", "-i", str(path)], check=True)


@pytest.mark.parametrize(
    ("cells", "ends"),
    [
        ((None, "0"), "cell 0"),
        (("0", None, "1"), "cell 1"),
        (("0", None), None),
        ((None, None), None),
    ],
)
def test_a_cell_without_vcpus_before_one_with_some_is_named_where_it_ends_the_daemon(
    cells: tuple[str | None, ...], ends: str | None
) -> None:
    """Never started on the daemon that all share."""
    rows = "".join(
        f"<cell id='{number}' {'' if cpus is None else f'cpus={cpus!r}'} memory='32' unit='MiB'/>"
        for number, cpus in enumerate(cells)
    )
    text = DOCUMENT.format(**(USUAL | {"name": "cells", "cpu": f"<cpu><numa>{rows}</numa></cpu>"}))
    vcpus = sum(one is not None for one in cells) or 1
    text = text.replace("<vcpu>1", f"<vcpu>{vcpus}").replace(">32<", f">{32 * len(cells)}<")
    document = open_domain(text.encode(), "a domain")
    version = run(("virsh", "-q", "-c", SYSTEM, "version", "--daemon"), 60).stdout
    expected = [ends] if ends and " 9.0." in version.splitlines()[-1] else []
    for uri, wanted in ((SYSTEM, expected), ("qemu:///session", [])):
        found = check_start(document, uri).findings
        assert [one.subject for one in found if one.id == "start-ends-libvirtd"] == wanted
