"""hwloc's XML: read into a host, versions 2 and 3, hostile and incomplete documents."""

import random

import pytest

from homenode.cpuset import CpuSet
from homenode.errors import HomenodeError, InputError, ParseError
from homenode.machine.discover.hwloc import host_from_hwloc
from homenode.machine.pci import DeviceKind, LinkKind
from homenode.machine.topology import CoreKind, Host, MemoryKind, summarise
from tests.shared_data import SHARED

MACHINES = SHARED / "machines" / "hwloc"
needs_machines = pytest.mark.skipif(not MACHINES.is_dir(), reason="no shared hwloc XMLs")


def _document(body: str, *, version: str = "2.0", tail: str = "") -> str:
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        '<!DOCTYPE topology SYSTEM "hwloc2.dtd">\n'
        f'<topology version="{version}">\n'
        '<object type="Machine" cpuset="0xf" complete_cpuset="0x3f" allowed_cpuset="0x7">'
        f"{body}</object>{tail}</topology>"
    )


def _pu(number: int) -> str:
    return f'<object type="PU" os_index="{number}" cpuset="{1 << number:#x}"/>'


TWO_NODES = "".join(
    f'<object type="Package" os_index="{i}" cpuset="{3 << 2 * i:#x}">'
    f'<object type="NUMANode" os_index="{i}" cpuset="{3 << 2 * i:#x}" local_memory="4096">'
    '<page_type size="4096" count="1"/><page_type size="2097152" count="0"/></object>'
    f'<object type="L3Cache" cpuset="{3 << 2 * i:#x}" depth="3" cache_size="1024">'
    f'<object type="L2Cache" cpuset="{3 << 2 * i:#x}" depth="2" cache_size="512">'
    f'<object type="Core" os_index="0" cpuset="{3 << 2 * i:#x}">{_pu(2 * i)}{_pu(2 * i + 1)}'
    "</object></object></object></object>"
    for i in (0, 1)
)
DISTANCES = (
    '<distances2 type="NUMANode" nbobjs="2" kind="5" name="NUMALatency" indexing="os">'
    '<indexes length="4">0 1 </indexes><u64values length="12">10 21 22 10 </u64values>'
    "</distances2>"
)


def _host(name: str) -> Host:
    return host_from_hwloc((MACHINES / name).read_bytes(), name)


@pytest.mark.parametrize("version", ["2.0", "3.0"])
def test_a_small_document_is_read_whole(version: str) -> None:
    host = host_from_hwloc(_document(TWO_NODES, version=version, tail=DISTANCES), "two nodes")
    assert [(p.index, str(p.pus)) for p in host.packages] == [(0, "0-1"), (1, "2-3")]
    assert [(c.id, str(c.pus)) for c in host.cores] == [((0, 0), "0-1"), ((1, 0), "2-3")]
    assert [(llc.level, str(llc.pus), llc.size_bytes) for llc in host.llcs] == [
        (3, "0-1", 1024),
        (3, "2-3", 1024),
    ]
    assert host.distances == ((10, 21), (22, 10))
    assert [node.memory_bytes for node in host.nodes] == [4096, 4096]
    assert [(pu.index, pu.node, pu.online, pu.allowed) for pu in host.pus] == [
        (0, 0, True, True),
        (1, 0, True, True),
        (2, 1, True, True),
        (3, 1, True, False),
        (4, None, False, True),
        (5, None, False, True),
    ]
    assert any(gap.subject == "state of CPUs 4-5" for gap in host.gaps)


OLD = (
    '<topology><object type="System" cpuset="0xf">'
    '<distances nbobjs="2" relative_depth="1" latency_base="10.000000"><latency value="1.000000"/>'
    '<latency value="2.100000"/><latency value="2.200000"/><latency value="1.000000"/></distances>'
    '<distances nbobjs="4" relative_depth="5" latency_base="1.0"><latency value="3.0"/></distances>'
    + "".join(
        f'<object type="NUMANode" os_index="{i}" cpuset="{3 << 2 * i:#x}" local_memory="4096">'
        '<page_type size="2097152" count="0"/>'
        f'<object type="Socket" os_index="{i}" cpuset="{3 << 2 * i:#x}">'
        '<info name="CPUVendor" value="GenuineIntel"/>'
        f'<object type="Cache" cpuset="{3 << 2 * i:#x}" depth="3" cache_size="1024">'
        f'<object type="Cache" cpuset="{3 << 2 * i:#x}" depth="2" cache_size="9" cache_type="2">'
        f'<object type="Core" os_index="0" cpuset="{3 << 2 * i:#x}">{_pu(2 * i)}{_pu(2 * i + 1)}'
        "</object></object></object></object></object>"
        for i in (0, 1)
    )
    + "</object></topology>"
)


def test_version_1_is_read_as_the_same_host() -> None:
    host = host_from_hwloc(OLD, "hwloc 1")
    assert [(p.index, str(p.pus)) for p in host.packages] == [(0, "0-1"), (1, "2-3")]
    assert [(c.id, str(c.pus)) for c in host.cores] == [((0, 0), "0-1"), ((1, 0), "2-3")]
    assert [(llc.level, str(llc.pus), llc.size_bytes) for llc in host.llcs] == [
        (3, "0-1", 1024),
        (3, "2-3", 1024),
    ]
    assert [(n.index, str(n.pus), n.memory_bytes) for n in host.nodes] == [
        (0, "0-1", 4096),
        (1, "2-3", 4096),
    ]
    assert host.distances == ((10, 21), (22, 10))
    assert host.cpu.vendor == "GenuineIntel"


def test_a_machine_of_version_1_without_nodes_is_one_node_with_its_memory() -> None:
    machine = f'<object type="Machine" cpuset="0x1" local_memory="7">{_pu(0)}</object>'
    host = host_from_hwloc(f"<topology>{machine}</topology>", "hwloc 1")
    assert [(n.index, str(n.pus), n.memory_bytes) for n in host.nodes] == [(0, "0", 7)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("2.200000", "nan"), "a latency such as"),
        (('<latency value="2.1', '<x value="2.1'), "4 lat"),
    ],
)
def test_wrong_distances_of_version_1_are_refused(wrong: tuple[str, str], message: str) -> None:
    with pytest.raises(ParseError, match=message):
        host_from_hwloc(OLD.replace(*wrong), "hwloc 1")


def test_a_function_that_stands_in_two_places_is_on_no_node_and_named() -> None:
    function = (
        '<object type="Bridge" bridge_type="0-1" bridge_pci="0000:[00-05]">'
        '<object type="PCIDev" pci_busid="0000:04:00.0" '
        'pci_type="0302 [10de:2330] [0000:0000] a1"/></object>'
    )
    first, second = TWO_NODES.split('<object type="Package" os_index="1"')
    once = host_from_hwloc(
        _document(
            first.removesuffix("</object>") + function + "</object>"
            '<object type="Package" os_index="1"' + second
        ),
        "once",
    )
    assert [device.node for device in once.pci_devices] == [0]
    twice = host_from_hwloc(
        _document(
            first.removesuffix("</object>") + function + "</object>"
            '<object type="Package" os_index="1"'
            + second.removesuffix("</object>")
            + function
            + "</object>"
        ),
        "twice",
    )
    assert [(str(device.bdf), device.node) for device in twice.pci_devices] == [
        ("0000:04:00.0", None)
    ]
    assert any("0000:04:00.0" in gap.subject for gap in twice.gaps)


def test_a_node_that_only_borrows_its_neighbours_pus_is_cpuless() -> None:
    extra = '<object type="NUMANode" os_index="7" cpuset="0xf" subtype="NVM" local_memory="9"/>'
    body = TWO_NODES + extra
    host = host_from_hwloc(_document(body, tail=DISTANCES), "borrowed")
    assert [(node.index, str(node.pus)) for node in host.nodes] == [(0, "0-1"), (1, "2-3"), (7, "")]
    assert host.nodes[2].memory_kind is MemoryKind.OTHER
    assert host.distances is None
    assert {"CPUs of nodes 7", "distances"} <= {gap.subject for gap in host.gaps}


def test_nodes_of_gpu_memory_name_their_gpu() -> None:
    extra = (
        '<object type="NUMANode" os_index="2" cpuset="0x3" subtype="GPUMemory" local_memory="9">'
        '<info name="PCIBusID" value="0000:01:00.0"/></object>'
    )
    node = host_from_hwloc(_document(TWO_NODES + extra), "gpu memory").nodes[2]
    assert (node.memory_kind, str(node.gpu), node.pus) == (MemoryKind.GPU, "0000:01:00.0", CpuSet())


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("<topology>", ParseError, "well-formed XML"),
        ("<domain/>", ParseError, "expected <topology>"),
        ('<topology><object type="Machine"/></topology>', InputError, "no CPU in the topology"),
        ("<topology/>", InputError, "expected one object of type Machine"),
        (
            '<topology version="4.0"/>',
            InputError,
            "expected hwloc XML version 1, 2 or 3, found 4.0",
        ),
        ('<topology version="2.0"/>', InputError, "one object of type Machine, found no object"),
        (
            '<topology version="2.0"><object type="System"/></topology>',
            InputError,
            "one object of type Machine, found System",
        ),
        (_document(""), InputError, "no CPU in the topology"),
        (_document(_pu(0).replace('os_index="0"', "")), ParseError, "PU with an os_index"),
        (_document(_pu(0).replace("0x1", "0xzz") + "<object/>"), ParseError, "with a type"),
        (
            _document(TWO_NODES, tail=DISTANCES.replace("10 21 22 10", "10 21")),
            ParseError,
            "their square of values",
        ),
        (
            _document(TWO_NODES, tail=DISTANCES.replace("21", "-1")),
            ParseError,
            "expected whole numbers",
        ),
        (
            _document('<object type="PCIDev" pci_busid="00:00.0" pci_type="x"/>' + TWO_NODES),
            ParseError,
            "a pci_type such as",
        ),
    ],
)
def test_a_document_that_is_not_right_is_refused(
    text: str, error: type[HomenodeError], message: str
) -> None:
    with pytest.raises(error, match=message):
        host_from_hwloc(text, "wrong")


def test_entities_are_refused_and_nothing_outside_is_read() -> None:
    bomb = (
        '<!DOCTYPE topology [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;">]>'
        '<topology version="2.0"><object type="Machine" name="&b;"/></topology>'
    )
    with pytest.raises(ParseError, match="without entity declarations"):
        host_from_hwloc(bomb, "bomb")
    with pytest.raises(HomenodeError):
        host_from_hwloc(bomb.encode("utf-16"), "bomb")
    deep = '<object type="Group">' * 5000
    with pytest.raises(ParseError):
        host_from_hwloc(_document(deep), "deep")


@needs_machines
def test_two_epyc_9654_are_192_cores_in_24_llcs_on_one_node() -> None:
    host = _host("AMD-19h-Zen4-2xEpyc-9654.xml")
    counts = summarise(host)
    assert (counts.packages, counts.cores, counts.pus) == (2, 192, 384)
    assert (counts.llcs, counts.numa_nodes) == (24, 1)
    assert {len(llc.pus) for llc in host.llcs} == {16}
    assert str(host.cores[0].pus) == "0,192"
    assert host.nodes[0].memory_bytes is None
    assert host.architecture == "x86_64"


@needs_machines
def test_an_i7_1370p_has_two_kinds_of_core() -> None:
    host = _host("Intel-RaptorLake-Corei7-1370P.xml")
    kinds = [core.kind for core in host.cores]
    assert kinds == [CoreKind.PERFORMANCE] * 6 + [CoreKind.EFFICIENCY] * 8
    assert summarise(host).llcs == 1


@needs_machines
def test_a_dgx2_has_its_gpus_and_nvswitches_in_place() -> None:
    host = _host("nvidiaDGX2.xml")
    assert [device.node for device in host.devices_of_kind(DeviceKind.GPU)] == [0] * 8 + [1] * 8
    assert len({host.switch_above(d.bdf) for d in host.devices_of_kind(DeviceKind.GPU)}) == 8
    assert summarise(host).nvswitches == 12  # of one only its subtype gives
    assert {link.kind for link in host.links} == {LinkKind.NVLINK}
    roots = " ".join(root.name for root in host.root_complexes)
    assert roots == "pci0000:2b pci0000:4e pci0000:ae pci0000:d7"


@needs_machines
def test_tioga_gpus_lie_on_nodes_out_of_order() -> None:
    host = _host("eas-tioga.xml")
    nodes = {f"{d.bdf.bus:x}": d.node for d in host.devices_of_kind(DeviceKind.GPU)}
    assert nodes == {"d1": 0, "d6": 0, "c9": 1, "ce": 1, "d9": 2, "de": 2, "c1": 3, "c6": 3}
    assert host.distances is not None and host.distances[0] == (10, 12, 12, 12)
    assert {link.kind for link in host.links} == {LinkKind.XGMI}
    assert summarise(host).llcs == 8


@needs_machines
def test_mutated_documents_are_read_or_refused_and_nothing_else() -> None:
    base = (MACHINES / "nvidiaDGX2.xml").read_text()
    rng = random.Random(11)
    for _ in range(400):
        characters = list(base)
        for _ in range(rng.randint(1, 6)):
            characters[rng.randrange(len(characters))] = rng.choice('0x"<>/& \nf9')
        try:
            host_from_hwloc("".join(characters), "mutated")
        except HomenodeError:
            continue
