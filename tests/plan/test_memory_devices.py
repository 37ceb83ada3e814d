"""Memory devices, and the guest cells in which Grace GPUs put their own memory online."""

import itertools
import random

import pytest
from lxml import etree
from msgspec import structs
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.check.domain.devices import find_limits
from homenode.check.domain.verification import compare_with_plan
from homenode.check.verify.expectation import build_expectation
from homenode.cpuset import CpuSet
from homenode.machine.description.parse import load_shipped
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host
from homenode.plan.memory import list_device_pages
from homenode.plan.pipeline import plan_file
from homenode.plan.planner import plan as plan_vm
from homenode.plan.request import GuestRequest
from homenode.plan.search.place import place
from homenode.plan.shape.assemble import assemble
from homenode.plan.shape.guest_numa import map_initiators
from homenode.plan.stored import domain_of_plan
from homenode.show.explain import explain
from homenode.show.plan_text import answer_line
from homenode.units import GIB
from homenode.vm.domain.codec import INITIATORS, list_required_versions
from homenode.vm.domain.document import parse_document
from homenode.vm.domain.memory import edit_memory_devices
from homenode.vm.domain.read import build_vm, open_domain, read_vm
from homenode.vm.layout import PRESETS, MemoryBinding
from homenode.vm.model import MemoryDevice
from homenode.vm.plan import Plan, Unplannable
from homenode.vm.plan_options import MemoryMode, PlanOptions
from homenode.vm.sources import load_host
from homenode.vm.targets.libvirt import rewrite
from tests.explained import explained
from tests.guest_shapes import placed
from tests.small_hosts import NodeSpec, even_host, host_of, small_request


@pytest.fixture(scope="module")
def hgx() -> Host:
    return load_shipped("hgx-h100").host


def memory_device(gib: int, cell: int, model: str = "dimm", source: str = "") -> str:
    return (
        f"<memory model='{model}'>{source}<target><size unit='GiB'>{gib}</size>"
        f"<node>{cell}</node></target></memory>"
    )


def document(cell_gib: int, total_gib: int, devices: str) -> bytes:
    """A VM of 2 cells of 16 vCPUs with a GPU of each package of the HGX H100."""
    hostdevs = "".join(
        "<hostdev mode='subsystem' type='pci' managed='yes'><source>"
        f"<address domain='0x0000' bus='{bus}' slot='0x00' function='0x0'/></source></hostdev>"
        for bus in ("0x19", "0x9b")
    )
    cells = "".join(
        f"<cell id='{i}' cpus='{16 * i}-{16 * i + 15}' memory='{cell_gib}' unit='GiB'/>"
        for i in range(2)
    )
    return f"""<domain type='kvm'>
  <name>vm</name>
  <maxMemory slots='16' unit='TiB'>8</maxMemory>
  <memory unit='GiB'>{total_gib}</memory>
  <memoryBacking><hugepages><page size='1' unit='GiB'/></hugepages></memoryBacking>
  <vcpu>32</vcpu>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <cpu mode='host-passthrough'><numa>{cells}</numa></cpu>
  <devices><emulator>/usr/bin/qemu-system-x86_64</emulator>{hostdevs}{devices}</devices>
</domain>
""".encode()


def with_devices(request: GuestRequest, *devices: tuple[int, int]) -> GuestRequest:
    """The request with DIMMs of (cell, GiB)."""
    dimms = tuple(
        MemoryDevice(cell=cell, size_bytes=gib * GIB, plugged_bytes=gib * GIB)
        for cell, gib in devices
    )
    return replace(request, guest=structs.replace(request.guest, memory_devices=dimms))


@pytest.mark.parametrize("layout", ["pin-numa", "pin-bound"])
def test_a_device_of_half_a_page_more_takes_a_whole_one(layout: str) -> None:
    dimm = MemoryDevice(cell=0, size_bytes=5 * GIB // 2, plugged_bytes=5 * GIB // 2)
    request = replace(small_request(4, 4 * GIB, layout=layout), page_bytes=GIB)
    request = replace(request, guest=structs.replace(request.guest, memory_devices=(dimm,)))
    assert list_device_pages(request) == ((0, 3),)
    assert [pages.pages for pages in plan_vm(even_host(1), request).page_reservations] == [4 + 3]


def test_a_dimm_counts_in_pages_locked_memory_dma_and_the_summary(hgx: Host) -> None:
    xml = document(128, 512, memory_device(256, 1))
    plan = plan_file(xml, "vm.xml", PlanOptions("pin-numa-pci"), hgx).plan
    assert [(r.node, r.pages) for r in plan.page_reservations] == [(0, 128), (1, 384)]
    assert plan.aperture is not None
    assert plan.aperture.memlock_bytes == 513 * GIB
    bare = plan_file(
        document(256, 512, ""), "vm.xml", PlanOptions("pin-numa-pci"), hgx
    ).plan.aperture
    assert bare is not None
    assert plan.aperture.dma_map_entries == bare.dma_map_entries
    assert [d.local_memory_ratio for d in plan.vm.hostdevs] == [0.25, 0.75]
    remote = [
        sentence for sentence in plan.consequences if "; the other 75 % is remote" in sentence
    ]
    assert [sentence[:4] for sentence in remote] == ["25 %"]
    assert answer_line(plan, hgx).count("256 GiB") == 2
    assert domain_of_plan(plan).memory_bytes == 512 * GIB


def test_memory_devices_that_fit_on_no_node_with_its_cell_are_refused(hgx: Host) -> None:
    xml = document(500, 1900, memory_device(1024, 1))
    with pytest.raises(Unplannable, match="1 TiB") as error:
        plan_file(xml, "vm.xml", PlanOptions("pin-numa-pci"), hgx)
    assert any("memory devices" in r.detail for r in error.value.rejections)
    fits = document(500, 1400, memory_device(400, 1))
    assert plan_file(fits, "vm.xml", PlanOptions("pin-numa-pci"), hgx).plan.nodes == (0, 1)


@pytest.mark.parametrize("layout", PRESETS)
def test_a_second_run_with_memory_devices_changes_nothing(hgx: Host, layout: str) -> None:
    xml = document(128, 512, memory_device(256, 1))
    once = plan_file(xml, "vm.xml", PlanOptions(layout), hgx).document
    assert plan_file(once, "vm.xml", PlanOptions(layout), hgx).document == once


def test_a_flat_guest_spreads_its_memory_devices_with_its_memory() -> None:
    host = even_host(2, 1, 1, 8, 1, memory_bytes=64 * GIB)
    assert place(host, small_request(4, 40 * GIB, layout="pin-bound")).nodes in ((0,), (1,))
    wide = place(host, with_devices(small_request(4, 40 * GIB, layout="pin-bound"), (0, 40)))
    assert wide.memory_nodes == (0, 1)
    with pytest.raises(Unplannable):
        place(host, with_devices(small_request(4, 40 * GIB, layout="pin-bound"), (0, 100)))


def test_one_cell_has_all_memory_devices_and_several_each_their_own() -> None:
    host = even_host(2, 1, 1, 8, 1, memory_bytes=64 * GIB)
    small = small_request(4, 32 * GIB)
    assert len(place(host, with_devices(small, (0, 14), (1, 14))).nodes) == 1
    assert place(host, with_devices(small, (0, 40), (1, 40))).nodes == (0, 1)
    uneven = place(host, with_devices(small, (0, 10), (1, 56)))
    assert uneven.cell_memory_bytes[1] <= 8 * GIB
    for devices, detail in (
        (((0, 10), (1, 64)), "no node has space for both"),
        (((0, 60), (1, 60)), "needed, 124 GiB free"),
    ):
        with pytest.raises(Unplannable) as refusal:
            place(host, with_devices(small, *devices))
        assert detail in refusal.value.rejections[0].detail


def test_a_node_too_small_for_its_cells_devices_gives_way_to_another() -> None:
    sizes = (64, 64, 20, 64)
    host = host_of(
        [NodeSpec(((1,) * 4,), i, memory_bytes=size * GIB) for i, size in enumerate(sizes)]
    )
    placement = place(host, with_devices(small_request(8, 32 * GIB), (0, 1), (1, 40)))
    assert len(placement.nodes) == 2
    assert 2 not in placement.nodes[1:]


@pytest.mark.parametrize("seed", range(60))
def test_cells_with_memory_devices_lie_on_nodes_that_hold_both(
    seed: int,
) -> None:
    chance = random.Random(seed)
    sizes = [chance.randint(4, 60) for _ in range(chance.choice((2, 3, 4)))]
    host = host_of(
        [NodeSpec(((1,) * 4,), i, memory_bytes=size * GIB) for i, size in enumerate(sizes)]
    )
    memory = 12 * chance.randint(1, 6)
    devices = [(chance.randint(0, 3), chance.randint(1, 40)) for _ in range(3)]

    def holds(nodes: tuple[int, ...], cells: list[int]) -> bool:
        """Whether the nodes hold cells of so many bytes next to their devices."""
        owned = [0] * len(nodes)
        for cell, size in devices:
            owned[cell if cell < len(nodes) else 0] += size
        needs = zip(nodes, owned, cells, strict=True)
        return all(sizes[node] * GIB >= cell + more * GIB for node, more, cell in needs)

    counts = [number for number in (1, 2, 4) if number <= len(sizes)]  # 4 vCPUs, equal cells
    choices = [nodes for k in counts for nodes in itertools.combinations(range(len(sizes)), k)]
    request = with_devices(small_request(4, memory * GIB), *devices)
    equal = any(holds(nodes, [memory * GIB // len(nodes)] * len(nodes)) for nodes in choices)
    try:
        placed = place(host, request)
    except Unplannable:
        assert not equal
        return
    parts = [placed.vcpu_nodes.count(i) for i in range(len(placed.nodes))]
    cells = list(placed.cell_memory_bytes) or [memory * GIB * part // 4 for part in parts]
    assert sum(cells) == memory * GIB
    assert holds(placed.nodes, cells)


MASKED = memory_device(128, 0, "dimm", "<source><nodemask>1</nodemask></source>")


def test_a_device_with_a_file_is_counted_on_no_node(hgx: Host) -> None:
    file = memory_device(128, 1, "nvdimm", "<source><path>/dev/dax0.0</path></source>")
    xml = document(128, 512, file + MASKED)
    assert [d.follows_cell for d in read_vm(xml, "vm.xml").memory_devices] == [False, False]
    plan = plan_file(xml, "vm.xml", PlanOptions("pin-numa"), hgx).plan
    assert sum(r.pages for r in plan.page_reservations) == 256 + 128
    assert plan.aperture is not None
    assert plan.aperture.memlock_bytes == 513 * GIB
    assert any(gap.subject == "memory devices" for gap in plan.gaps)


def test_a_node_mask_follows_its_cell_where_the_layout_binds_memory(hgx: Host) -> None:
    xml = document(128, 512, MASKED)
    made = plan_file(xml, "vm.xml", PlanOptions("pin-numa"), hgx)
    (home,) = made.plan.cells[0].host_nodes
    assert f"<nodemask>{home}</nodemask>".encode() in made.document
    assert "memory devices" not in [gap.subject for gap in made.plan.gaps]
    again = plan_file(made.document, "vm.xml", PlanOptions("pin-numa"), hgx)
    assert again.document == made.document
    flat = plan_file(xml, "vm.xml", PlanOptions("pin-bound"), hgx)
    nodes = CpuSet(flat.plan.memory_nodes)
    assert f"<nodemask>{nodes}</nodemask>".encode() in flat.document
    unbound = PlanOptions("pin-numa", memory_binding=MemoryBinding.KEEP)
    for options in (PlanOptions("pin"), unbound):
        assert b"<nodemask>1</nodemask>" in plan_file(xml, "vm.xml", options, hgx).document
    enclave = parse_document(xml.replace(b"model='dimm'", b"model='sgx-epc'"), "x")
    assert edit_memory_devices(enclave, made.plan).text == enclave.text
    moved = edit_memory_devices(
        parse_document(xml.replace(b"<node>0<", b"<node>2<"), "x"), made.plan
    )
    assert moved.text == xml.replace(b"<nodemask>1<", f"<nodemask>{home}<".encode())


@pytest.mark.parametrize(
    ("libvirt", "mode", "is_found"),
    [
        ((12, 0, 0), "interleave", False),
        ((11, 9, 0), "interleave", True),
        (None, "preferred", True),
        (None, "strict", False),
    ],
)
def test_a_mask_that_an_older_libvirt_takes_less_strictly_is_a_finding(
    hgx: Host, libvirt: tuple[int, int, int] | None, mode: str, is_found: bool
) -> None:
    host = structs.replace(hgx, settings=structs.replace(hgx.settings, libvirt_version=libvirt))
    options = PlanOptions("pin-bound", memory_mode=MemoryMode(mode), max_nodes=1)
    notes = plan_file(document(64, 512, MASKED), "vm.xml", options, host).notes
    assert any("(nodemask-not-strict)" in note for note in notes) == is_found


def test_the_doctor_counts_memory_devices_in_what_a_vm_locks_and_maps() -> None:
    bare, with_dimm = (
        find_limits(build_vm(parse_document(xml, "vm.xml")), [])
        for xml in (document(256, 512, ""), document(128, 512, memory_device(256, 1)))
    )
    assert with_dimm == bare
    assert bare.memlock_bytes == 513 * GIB


def test_memory_of_enclaves_is_no_memory_device() -> None:
    xml = document(128, 256, memory_device(64, 0, "sgx-epc"))
    guest = read_vm(xml, "vm.xml")
    assert guest.memory_devices == ()
    assert guest.memory_bytes == 256 * GIB


GH200 = load_host("gh200x4")
GPU = str(GH200.devices_of_kind(DeviceKind.GPU)[0].bdf)
DOCUMENT = b"""<domain type='kvm'>
  <name>vm</name>
  <memory unit='GiB'>4</memory>
  <vcpu>4</vcpu>
  <os><type arch='aarch64' machine='virt'>hvm</type></os>
  <cpu mode='host-passthrough'/>
  <devices/>
</domain>
"""


def host(libvirt: tuple[int, int, int] | None, qemu: tuple[int, int, int] | None = None) -> Host:
    settings = structs.replace(GH200.settings, libvirt_version=libvirt, qemu_version=qemu)
    return structs.replace(GH200, settings=settings)


NEW = host((11, 8, 0), (9, 2, 0))


def request(layout: str = "pin-numa-pci") -> GuestRequest:
    asked = small_request(4, 4 * GIB, layout=layout, devices=[GPU])
    return replace(
        asked, guest=structs.replace(asked.guest, architecture="aarch64", machine="virt")
    )


def plan_on(machine: Host, layout: str = "pin-numa-pci") -> Plan:
    return assemble(machine, request(layout), placed((4,), devices=[GPU]))


def nodesets(document: bytes) -> list[str | None]:
    found = etree.fromstring(document).iterfind(".//hostdev/acpi")
    return [acpi.get("nodeset") for acpi in found]


def test_eight_cells_without_vcpus_and_memory_follow_the_cells_of_the_vm() -> None:
    plan = plan_on(NEW)
    assert [len(cell.vcpus) for cell in plan.cells] == [4] + [0] * 8
    assert [cell.memory_bytes for cell in plan.cells] == [4 * GIB] + [0] * 8
    assert [cell.host_nodes for cell in plan.cells[1:]] == [(node,) for node in range(4, 12)]
    assert plan.cells[0].distances == (10, *[80] * 8)
    assert plan.vm.hostdevs[0].initiator_cells == CpuSet(range(1, 9))
    assert "initiators-missing" not in [finding.id for finding in plan.findings]
    assert INITIATORS in list_required_versions(plan, is_virt=True)
    assert domain_of_plan(plan).memory_by_node == ((0, 4 * GIB),)
    lines = [line for section in explained(explain(plan, NEW)) for line in section.lines]
    assert any(line.startswith("Guest nodes 1-8 are for the memory of GPU") for line in lines)


@pytest.mark.parametrize(
    ("machine", "count", "shares"),
    [(NEW, 2, [4]), (NEW, 3, []), (structs.replace(NEW, distances=None), 1, [32])],
)
def test_gpus_of_one_cpu_share_its_nodes_evenly_or_have_none(
    machine: Host, count: int, shares: list[int]
) -> None:
    gpu = NEW.device_at[Bdf.parse(GPU)]
    grace = [(Bdf(9, n, 0, 0), gpu.node) for n in range(1, count)]
    nodes_of_gpu = map_initiators(machine, [(gpu.bdf, gpu.node), *grace], [gpu])
    assert [len(nodes) for nodes in nodes_of_gpu.values()] == shares


def test_the_document_names_them_and_a_flat_layout_takes_them_back() -> None:
    plan = plan_on(NEW)
    tuned = rewrite(DOCUMENT, plan)
    assert nodesets(tuned) == ["1-8"] and tuned.count(b"<cell ") == 9
    assert rewrite(tuned, plan) == tuned
    document = open_domain(tuned, "vm.xml")
    facts = build_vm(document)
    assert not list(compare_with_plan(document, facts, plan))
    for expected in (build_expectation(plan.vm), build_expectation(facts)):
        assert [cell.id for cell in expected.cells] == [0]
        assert expected.distances in (None, ((10,),))
    assert nodesets(rewrite(tuned, plan_on(NEW, "pin"))) == []


@pytest.mark.parametrize(
    ("machine", "layout", "said"),
    [
        (host(None), "pin-numa-pci", "found libvirt unknown and QEMU unknown"),
        (
            host((10, 0, 0), (9, 0, 0)),
            "pin-numa-pci",
            "expected libvirt 11.8 or newer, found libvirt 10.0.0",
        ),
        (
            host((12, 0, 0), (8, 2, 0)),
            "pin-numa-pci",
            "expected QEMU 9.0 or newer, found QEMU 8.2.0",
        ),
        (NEW, "pin-numa", "this layout gives none"),
        (NEW, "default", "this layout gives none"),
        (
            structs.replace(
                NEW, nodes=tuple(structs.replace(n, generic_initiator=False) for n in NEW.nodes)
            ),
            "pin-numa-pci",
            "shared evenly",
        ),
    ],
)
def test_where_they_cannot_be_given_a_finding_says_why(
    machine: Host, layout: str, said: str
) -> None:
    plan = plan_on(machine, layout)
    assert len(plan.cells) == 1 and not plan.vm.hostdevs[0].initiator_cells
    (finding,) = [finding for finding in plan.findings if finding.id == "initiators-missing"]
    assert finding.subject == GPU and said in finding.observed
    # Programs that are not known cannot be updated.
    asks_for_host = finding.fix is not None and finding.fix.startswith("plan on the host itself")
    assert asks_for_host is ("libvirt unknown" in said)
