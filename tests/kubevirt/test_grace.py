"""Grace GPUs get memory-less cells for their generic initiators, counted from the host."""

import re
from xml.etree import ElementTree

import pytest

from homenode.cluster.kubevirt.placing import PlacedDefinition, place_devices
from homenode.machine.snapshot.protocol import MemorySnapshot
from homenode.vm.domain.read import build_vm, open_domain
from homenode.vm.domain.schema import validate
from tests.kubevirt_documents import document, shipped

GPUS = ("0009:01:00.0", "0029:01:00.0")
NODE = "/sys/devices/system/node"


def grace_vm(**changes: object) -> str:
    """A VM with GPUs 0 and 2 of four, and CPUs of their nodes."""
    given: dict[str, object] = {"pins": ((0, 1), (144, 145)), "nodes": ("0", "2")}
    xml = document(GPUS, machine="virt", **{**given, **changes})  # type: ignore[arg-type]
    return xml.replace('arch="x86_64"', 'arch="aarch64"')


def host_without(*paths: str) -> MemorySnapshot:
    whole = shipped("gh200x4")
    files = {path: text for path, text in whole.files.items() if path not in paths}
    return MemorySnapshot("gh200x4", files, whole.links)


def place(xml: str, host: MemorySnapshot | None = None) -> PlacedDefinition:
    return place_devices(xml.encode(), host or shipped("gh200x4"))


def cells(placed: PlacedDefinition) -> list[tuple[str | None, str | None, list[int]]]:
    """(cpus, memory, distances) of each cell."""
    return [
        (cell.get("cpus"), cell.get("memory"), [int(s.get("value") or 0) for s in cell[0]])
        for cell in ElementTree.fromstring(placed.document).iter("cell")
    ]


def nodesets(placed: PlacedDefinition) -> list[str | None]:
    return [
        None if (acpi := hostdev.find("acpi")) is None else acpi.get("nodeset")
        for hostdev in ElementTree.fromstring(placed.document).iter("hostdev")
    ]


def test_each_gpu_gets_as_many_cells_as_the_host_has_initiators_for_it() -> None:
    placed = place(grace_vm())
    assert nodesets(placed) == ["2-9", "10-17"]
    found = cells(placed)
    assert len(found) == 2 + 8 + 8
    assert all((cpus, memory) == (None, "0") for cpus, memory, _ in found[2:])


def test_distances_are_those_of_the_hosts_nodes() -> None:
    """CPUs 40 apart, 80 to the own GPU's nodes, 120 to the other's, 255 between those."""
    found = cells(place(grace_vm()))
    assert found[0][2] == [10, 40] + [80] * 8 + [120] * 8
    assert found[1][2] == [40, 10] + [120] * 8 + [80] * 8
    assert found[2][2][:4] == [80, 120, 10, 255]


def test_distances_that_the_document_tells_stay_and_grow() -> None:
    found = cells(place(grace_vm(distances=True)))
    assert found[0][2] == [10, 21] + [80] * 8 + [120] * 8


def test_the_cpus_cells_have_the_expander_buses_and_no_others() -> None:
    placed = place(grace_vm())
    stated = re.findall(rb'busNr="\d+"><node>(\d+)</node>', placed.document)
    assert stated == [b"0", b"1"]


def test_a_second_run_changes_nothing() -> None:
    once = place(grace_vm())
    assert place(once.document.decode()).document == once.document


def test_a_gpu_that_has_its_place_gets_its_cells_and_stays_there() -> None:
    """As PCINUMAAwareTopology places it, with no bus number to spare."""
    native = ""
    at = '<address type="pci" domain="0x0000" bus="{}" slot="{}" function="0x0"/></controller>'
    for index, number, cell in ((1, 254, 0), (3, 252, 1)):
        native += f'<controller type="pci" index="{index}" model="pcie-expander-bus">'
        native += f'<target busNr="{number}"><node>{cell}</node></target>{at.format(0, index)}'
        native += f'<controller type="pci" index="{index + 1}" model="pcie-root-port">'
        native += at.format(index, 0)
    given = {
        gpu: f'domain="0x0000" bus="0x0{port}" slot="0x00" function="0x0"'
        for gpu, port in zip(GPUS, (2, 4), strict=True)
    }
    xml = grace_vm(controllers=native, addresses=given)
    placed = place(xml)
    texts = (xml.encode(), placed.document)
    before, after = (build_vm(open_domain(text, "vm.xml")) for text in texts)
    assert after.controllers == before.controllers
    assert after.hostdevs == before.hostdevs
    assert nodesets(placed) == ["2-9", "10-17"]


def test_two_gpus_of_one_cpu_share_its_initiators() -> None:
    whole = shipped("gh200x4")
    number = next(p for p in whole.files if p.endswith("0019:01:00.0/numa_node"))
    files = {**whole.files, number: "0\n"}
    near = dict.fromkeys(
        (f"{NODE}/node{n}/distance" for n in range(12, 20)), whole.files[f"{NODE}/node4/distance"]
    )
    rows = whole.files[f"{NODE}/node0/distance"].split()
    rows[12:20] = ["80"] * 8
    files |= {**near, f"{NODE}/node0/distance": " ".join(rows) + "\n"}
    other = whole.files[f"{NODE}/node1/distance"].split()
    other[12:20] = ["120"] * 8
    files[f"{NODE}/node1/distance"] = " ".join(other) + "\n"
    host = MemorySnapshot("two for one", files, whole.links)
    assert nodesets(place(grace_vm(), host)) == ["2-9", "10-17"]


def test_a_host_that_tells_no_initiators_is_named_and_the_gpus_are_placed() -> None:
    placed = place(grace_vm(), host_without(f"{NODE}/has_generic_initiator"))
    assert nodesets(placed) == [None, None]
    assert len(cells(placed)) == 2
    assert placed.document.count(b"pxb-pcie") == 2
    assert sum("generic initiators" in note for note in placed.notes) == 2


@pytest.mark.parametrize("name", ["hgx-h100", "hgx-a100-ibm"])
def test_other_gpus_get_no_cells(name: str) -> None:
    host = shipped(name)
    classes = {path: text for path, text in host.files.items() if path.endswith("/class")}
    gpu = next(path.split("/")[-2] for path in classes if classes[path].startswith("0x0302"))
    xml = document([gpu], pins=((0,), (64,)))
    assert nodesets(place(xml, host)) == [None]


def test_the_installed_schema_takes_all_but_the_one_newer_element() -> None:
    """<hostdev><acpi nodeset=> came after libvirt 9.0."""
    written = place(grace_vm()).document
    plain = written.replace(b'<source><address type="pci" ', b"<source><address ")
    errors, gap = validate(re.sub(rb"<acpi nodeset=[^>]*/>", b"", plain))
    if gap is not None:
        pytest.skip(str(gap))
    assert not errors
