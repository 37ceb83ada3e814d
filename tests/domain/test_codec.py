"""Each row of the table of mapped elements is read and written as it says, whatever the print."""

from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest
from lxml import etree
from msgspec import structs
from msgspec.structs import fields

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import HomenodeError
from homenode.vm.domain.codec import ROWS, STEPS, ElementRow
from homenode.vm.domain.document import Document, Element
from homenode.vm.domain.merge import is_same_definition
from homenode.vm.domain.read import build_vm, open_domain, read_running_domain, read_vm
from homenode.vm.model import GuestAddress, GuestCache, Vm
from homenode.vm.plan import Aperture, Plan, with_vm
from tests.domain_corpus import sample
from tests.domain_plans import hand_plan

pytestmark = pytest.mark.xdist_group("codec")
"""In one process: every step of all plans is taken once."""

WRITTEN = [row for row in ROWS if row.steps]
READ = [row for row in ROWS if row.path and row.field is not None]
Facts = Counter[tuple[str, str, str]]

FULL = b"""<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>full</name>
  <uuid>0dd3a7c4-3d2c-4d3f-9c0b-8d0f5a3f6b10</uuid>
  <maxMemory slots='4' unit='GiB'>12</maxMemory>
  <memory unit='GiB'>10</memory>
  <currentMemory unit='GiB'>9</currentMemory>
  <memoryBacking>
    <hugepages><page size='2' unit='MiB'/></hugepages>
    <access mode='shared'/>
  </memoryBacking>
  <memtune><hard_limit unit='GiB'>12</hard_limit></memtune>
  <vcpu>8</vcpu>
  <vcpus>
    <vcpu id='0' enabled='yes' hotpluggable='no'/>
    <vcpu id='7' enabled='no' hotpluggable='yes'/>
  </vcpus>
  <iothreads>3</iothreads>
  <iothreadids><iothread id='9'/></iothreadids>
  <cputune>
    <vcpupin vcpu='0' cpuset='4'/>
    <emulatorpin cpuset='5'/>
    <iothreadpin iothread='9' cpuset='6'/>
    <vcpusched vcpus='0-7' scheduler='batch'/>
    <cachetune vcpus='7'><cache id='0' level='3' type='both' size='3' unit='MiB'/></cachetune>
    <memorytune vcpus='6'><node id='0' bandwidth='60'/></memorytune>
  </cputune>
  <numatune>
    <memory mode='strict' nodeset='1'/>
    <memnode cellid='0' mode='strict' nodeset='0'/>
  </numatune>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <loader readonly='yes' type='pflash'>/usr/share/OVMF/OVMF_CODE.fd</loader>
  </os>
  <features><pae/></features>
  <cpu mode='custom'>
    <model>EPYC-Genoa</model>
    <topology sockets='1' dies='1' cores='8' threads='1'/>
    <cache mode='emulate' level='3'/>
    <maxphysaddr mode='emulate' bits='40'/>
    <feature policy='disable' name='topoext'/>
    <numa>
      <cell id='0' cpus='0-3' memory='4' unit='GiB'/>
      <cell id='1' cpus='4-7' memory='4' unit='GiB'/>
    </numa>
  </cpu>
  <devices>
    <controller type='pci' index='0' model='pcie-root'>
      <pcihole64 unit='GiB'>64</pcihole64>
    </controller>
    <hostdev mode='subsystem' type='pci' managed='yes'>
      <source><address domain='0' bus='0x19' slot='0' function='0'/></source>
      <address type='pci' domain='0' bus='0' slot='5' function='0'/>
    </hostdev>
    <hostdev mode='subsystem' type='pci' managed='yes'>
      <source><address domain='0' bus='0x19' slot='0' function='1'/></source>
      <address type='pci' domain='0' bus='0' slot='5' function='1'/>
    </hostdev>
    <interface type='hostdev' managed='yes'>
      <source><address type='pci' domain='0' bus='0x85' slot='0' function='0'/></source>
      <address type='pci' domain='0' bus='0' slot='6' function='0'/>
    </interface>
    <interface type='hostdev' managed='yes'>
      <source><address type='pci' domain='0' bus='0x85' slot='0' function='1'/></source>
      <address type='pci' domain='0' bus='0' slot='6' function='1'/>
    </interface>
    <memory model='dimm'><target><size unit='GiB'>2</size><node>1</node></target></memory>
    <iommu model='intel'/>
  </devices>
  <qemu:commandline><qemu:arg value='-no-hpet'/></qemu:commandline>
</domain>"""
"""A domain with what homenode reads, or with what makes each step write."""

SMALL = b"""<domain type='kvm'>
  <name>small</name>
  <metadata>
    <homenode:layout xmlns:homenode='urn:homenode:layout:1' name='pin-numa-smt'
      pinning='all-cpus' siblings='exposed' cells='host' pcie='keep' memory='bound-per-node'
      host='0123456789abcdef'/>
  </metadata>
  <memory unit='GiB'>4</memory>
  <vcpu>4</vcpu>
  <launchSecurity type='sev'/>
  <devices>
    <emulator>/usr/bin/qemu-system-aarch64</emulator>
    <hostdev mode='subsystem' type='mdev' model='vfio-pci'>
      <source><address uuid='4b20d080-1b54-4048-85b3-a6a62d165c01'/></source>
    </hostdev>
  </devices>
</domain>"""

OTHERS = (
    "dimms-and-shared-memory",
    "hmat-and-cpuless-cell",
    "gpu-with-audio-and-nics",
    "study",
    "earlier-layout",
    "aarch64-virt",
)
DOCUMENTS = {"full": FULL, "small": SMALL, **{name: sample(name) for name in OTHERS}}


def plans(guest: Vm) -> Iterator[Plan]:
    """Plans that between them ask for whatever a plan can ask of a document."""
    window = Aperture(1 << 40, 48, 65536, 0, 0)
    for layout in ("default", "pin", "pin-bound", "pin-numa", "pin-numa-smt", "pin-numa-pci"):
        yield hand_plan(guest, layout)
    yield hand_plan(guest, "pin", vcpus=4, memory_bytes=guest.memory_bytes * 2)
    yield hand_plan(guest, "pin-numa", page_bytes=1 << 30, topoext=True, aperture=window)
    mirrored = hand_plan(guest, "pin-numa-pci", vcpus=512, iommu_needed=True, aperture=window)
    yield with_vm(mirrored, cpu_cache=GuestCache.EMULATED)
    devices = [
        structs.replace(
            one,
            address=GuestAddress(0, 0, 20, one.bdf.function),
            initiator_cells=CpuSet([0] if one.bdf == Bdf(0, 0x19, 0, 0) else []),
        )
        for one in hand_plan(guest, "default").vm.hostdevs
    ]
    pinned = hand_plan(guest, "pin")
    yield with_vm(pinned, hostdevs=tuple(devices), cpu_cache=GuestCache.PASSTHROUGH)


def facts(document: Document) -> Facts:
    """Every element and attribute with its value, by path below <domain>."""
    found: Facts = Counter()

    def add(element: Element, path: str) -> None:
        found[path, "", element.text.strip()] += 1
        for name, value in element.attributes:
            found[path, name, value] += 1
        for child in element.children:
            add(child, f"{path}/{child.name.rpartition('}')[2]}".lstrip("/"))

    add(document.root, "")
    return found


@cache
def written() -> dict[str, set[str]]:
    """Names of the steps that changed something, by path; over these documents and plans."""
    found: dict[str, set[str]] = {}
    for name, xml in DOCUMENTS.items():
        start = open_domain(xml, name)
        for plan in plans(build_vm(start)):
            document = start
            for step in STEPS:
                try:
                    following = step(document, plan)
                except HomenodeError:
                    break
                if following.to_bytes() != document.to_bytes():
                    before, after = facts(document), facts(following)
                    for changed, _, _ in (before - after) + (after - before):
                        found.setdefault(changed, set()).add(step.__name__)
                document = following
    return found


def covers(row: ElementRow, path: str) -> bool:
    return path == row.path or path.startswith(f"{row.path}/")


def test_each_step_stands_in_the_table_and_every_element_that_it_changes() -> None:
    assert {step for row in ROWS for step in row.steps} == set(STEPS)
    for path, steps in written().items():
        rows = [row for row in WRITTEN if covers(row, path)]
        known = {step.__name__ for row in rows for step in row.steps}
        is_container = any(row.path.startswith(f"{path}/") for row in WRITTEN) and not rows
        assert is_container or steps <= known, (path, steps - known)


@pytest.mark.parametrize("row", WRITTEN, ids=lambda row: row.path)
def test_a_row_is_written_by_its_steps(row: ElementRow) -> None:
    found = {step for path, steps in written().items() if covers(row, path) for step in steps}
    assert {step.__name__ for step in row.steps} <= found


def stripped(xml: bytes, path: str) -> bytes | None:
    """The document without the elements at a path; None where it has none."""
    root = etree.fromstring(xml)
    found = [root]
    for name in path.split("/"):
        found = [one for each in found for one in each if etree.QName(one).localname == name]
    for element in found:
        parent = element.getparent()
        assert parent is not None
        parent.remove(element)
    return etree.tostring(root) if found else None


def value(xml: bytes, field: str) -> object:
    if field in {each.name for each in fields(Vm)}:
        return getattr(read_vm(xml, "it"), field)
    return getattr(read_running_domain(xml, running=True), field)


@pytest.mark.parametrize("row", READ, ids=lambda row: row.path)
def test_a_row_is_read_into_its_field(row: ElementRow) -> None:
    """The field is another without the element, or the document is refused."""
    for xml in DOCUMENTS.values():
        without = stripped(xml, row.path)
        if without is None:
            continue
        try:
            if value(without, str(row.field)) != value(xml, str(row.field)):
                return
        except HomenodeError:
            return
    pytest.fail(f"{row.field} does not depend on {row.path}")


def test_every_field_of_a_vm_is_read_from_an_element() -> None:
    elsewhere = {"domain_type", "source", "emulator_threads"}
    assert {each.name for each in fields(Vm)} - elsewhere <= {row.field for row in READ}


@pytest.mark.parametrize("row", [row for row in ROWS if row.once], ids=lambda row: row.path)
def test_a_second_one_of_what_a_domain_has_once_is_refused(row: ElementRow) -> None:
    *around, name = row.path.split("/")
    twice = f"<{name}/><{name}/>"
    for parent in reversed(around):
        twice = f"<{parent}>{twice}</{parent}>"
    with pytest.raises(HomenodeError, match=f"expected one <{name}>"):
        open_domain(f"<domain type='kvm'>{twice}</domain>".encode(), "it")


DOMAIN = b"""<domain type='kvm'>
  <name>a</name>
  <devices>
    <controller type='usb' index='0'/>
    <disk device='disk'><target dev='vda'/></disk>
    <disk device='disk'><target dev='vdb'/></disk>
    <controller type='pci' index='0'/>
  </devices>
</domain>
"""


def test_the_order_in_which_libvirt_prints_controllers_says_nothing() -> None:
    usb = b"    <controller type='usb' index='0'/>\n"
    moved = DOMAIN.replace(usb, b"").replace(b"  </devices>", usb + b"  </devices>")
    assert moved != DOMAIN
    assert is_same_definition(DOMAIN, moved)
    assert is_same_definition(
        DOMAIN, DOMAIN.replace(b"type='usb' index='0'", b"index='0' type='usb'")
    )
    assert is_same_definition(DOMAIN, DOMAIN + b"\n")


def test_the_order_of_disks_and_every_value_do() -> None:
    swapped = DOMAIN.replace(b"vda", b"x").replace(b"vdb", b"vda").replace(b"'x'", b"'vdb'")
    assert not is_same_definition(DOMAIN, swapped)
    assert not is_same_definition(DOMAIN, DOMAIN.replace(b"<name>a<", b"<name>a <"))
    assert not is_same_definition(
        DOMAIN, DOMAIN.replace(b"index='0'/>\n  </d", b"index='1'/>\n  </d")
    )
    assert not is_same_definition(DOMAIN, DOMAIN.replace(b"  <name>a</name>\n", b""))
