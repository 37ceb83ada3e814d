"""A paused start: its files, and what QEMU's monitor says against the plan."""

import json
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.check.verify.start import MonitorView, check_view, list_created_files, read_view
from homenode.errors import ParseError
from homenode.findings import Finding
from homenode.machine.pci import PciBar
from homenode.units import GIB, MIB
from homenode.vm.domain.document import parse_document
from homenode.vm.domain.read import read_vm
from homenode.vm.sources import load_host

TREE = """bus: main-system-bus
  dev: q35-pcihost, id ""
    bus: pcie.0
      dev: vfio-pci, id "hostdev0"
        host = "0000:18:00.0"
        class 3D controller, addr 00:00.0, pci id 10de:2330 (sub 10de:16c1)
        bar 0: mem at 0xffffffffffffffff [0xfffffe]
        bar 1: mem at 0x380000000000 [0x381fffffffff]
"""
DOCUMENT = b"""<domain type='kvm'><name>a</name><memory unit='GiB'>2</memory><vcpu>2</vcpu>
<os><type arch='x86_64' machine='q35'>hvm</type></os>
<numatune><memnode cellid='0' mode='strict' nodeset='0'/>
<memnode cellid='1' mode='strict' nodeset='1'/></numatune>
<cpu><numa><cell id='0' cpus='0' memory='1' unit='GiB'/>
<cell id='1' cpus='1' memory='1' unit='GiB'/></numa></cpu>
<devices><hostdev mode='subsystem' type='pci'><source>
<address domain='0' bus='0x18' slot='0' function='0'/></source></hostdev></devices></domain>"""


def view(
    *,
    nodes: Sequence[int] = (0, 1),
    cells: Sequence[int | None] = (0, 1),
    tree: str = TREE,
    size: int = GIB,
    running: bool = False,
) -> MonitorView:
    backends = [
        {"id": f"ram-node{cell}", "size": size, "policy": "bind", "host-nodes": [node]}
        for cell, node in enumerate(nodes)
    ]
    cpus = [
        {"cpu-index": cpu, "thread-id": 7 + cpu, "props": {} if cell is None else {"node-id": cell}}
        for cpu, cell in enumerate(cells)
    ]
    said = {
        "query-status": {"status": "prelaunch", "running": running},
        "query-memdev": backends,
        "query-cpus-fast": cpus,
    }
    return read_view({name: json.dumps({"return": one}) for name, one in said.items()}, tree)


def found(seen: MonitorView) -> list[tuple[str, str]]:
    host = load_host("hgx-h100")
    gpu = next(device for device in host.pci_devices if device.bars)
    bars = (PciBar(0, 16 * MIB, True, False), PciBar(1, 128 * GIB, True, True))
    own = replace(gpu, bdf=Bdf.parse("0000:18:00.0"), bars=bars)
    others = tuple(one for one in host.pci_devices if one.bdf not in (own.bdf, gpu.bdf))
    real = replace(host, pci_devices=tuple(sorted((*others, own), key=lambda one: one.bdf)))
    findings: list[Finding] = list(check_view(read_vm(DOCUMENT, "vm.xml"), seen, real))
    return [(one.id, one.subject) for one in findings]


def test_a_vm_as_it_was_planned_has_nothing_wrong() -> None:
    assert found(view()) == []


@pytest.mark.parametrize(
    ("seen", "named"),
    [
        (view(nodes=(0, 0)), ("start-backend", "memory of cell 1")),
        (view(size=GIB // 2), ("start-backend", "memory of cell 0")),
        (view(cells=(1, 1)), ("start-cpus", "vCPU 0")),
        (view(nodes=(0,)), ("start-backend", "memory of cell 1")),
        (view(cells=(0,)), ("start-cpus", "a")),
        (view(cells=(0, None)), ("start-cpus", "vCPU 1")),
        (view(tree=""), ("start-function", "0000:18:00.0")),
        (
            view(tree=TREE.replace("0x381fffffffff", "0x38000fffffff")),
            ("start-bar", "0000:18:00.0 BAR 1"),
        ),
        (view(tree=TREE.replace("        bar 0", "")), ("start-bar", "0000:18:00.0 BAR 0")),
        (view(running=True), ("start-ran", "a")),
    ],
)
def test_what_differs_is_named(seen: MonitorView, named: tuple[str, str]) -> None:
    assert named in found(seen)


@pytest.mark.parametrize("text", ["", "[]", '{"return": 3}', '{"error": {}}', '{"return": [{}]}'])
def test_an_answer_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ParseError):
        read_view(dict.fromkeys(("query-status", "query-memdev", "query-cpus-fast"), text), "")


DOMAIN = """<domain xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>{}<devices>{}</devices>
<qemu:commandline>{}</qemu:commandline></domain>"""


def arguments(*words: str) -> str:
    return "".join(f"<qemu:arg value='{word}'/>" for word in words)


@pytest.mark.parametrize(
    ("os", "devices", "more", "files"),
    [
        ("<os><nvram>/n</nvram></os>", "", "", [("/n", False)]),
        ("<os><nvram type='file'><source file='/n'/></nvram></os>", "", "", [("/n", False)]),
        ("<os><nvram type='network'/></os>", "", "", []),
        ("", "<serial type='file'><source path='/s'/></serial>", "", [("/s", True)]),
        ("", "<serial type='file'><source path='/s' append='on'/></serial>", "", [("/s", False)]),
        ("", "<serial type='dev'><source path='/dev/ttyS0'/></serial>", "", []),
        ("", "<serial type='pty'><log file='/l' append='on'/></serial>", "", [("/l", False)]),
        ("", "<graphics><listen type='socket' socket='/g'/></graphics>", "", [("/g", True)]),
        ("", "<audio type='file' path='/a'/>", "", [("/a", True)]),
        ("", "", arguments("-pidfile", "/p"), [("/p", True)]),
        ("", "", arguments("-chardev", "file,id=c,path=/c,append=on"), [("/c", False)]),
        ("", "", arguments("-serial", "file:/f"), [("/f", True)]),
        ("", "", arguments("-gdb", "tcp::1234"), []),
        ("", "", arguments("-chardev", "null,id=c,logfile=/c"), [("/c", True)]),
        ("", "", arguments("-object", "filter-dump,id=d,file=/d"), [("/d", True)]),
        ("", "", arguments("-object", "secret,id=s,file=/s"), []),
        ("", "", arguments("-object", "memory-backend-file,mem-path=/m"), [("/m", False)]),
    ],
)
def test_files_that_a_start_makes_are_those_that_the_document_names(
    os: str, devices: str, more: str, files: list[tuple[str, bool]]
) -> None:
    document = parse_document(DOMAIN.format(os, devices, more).encode(), "vm.xml")
    assert [(file.path, file.is_emptied) for file in list_created_files(document)] == files
