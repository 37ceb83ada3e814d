"""What NCCL makes of a guest: rows that its own code gave, and any tree against a second way."""

import functools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.indices import NodeIndex
from homenode.machine.pci import DeviceKind, PciLink
from homenode.nccl.explanation import Explanation, Memory, Processes, explain
from homenode.nccl.graph import (
    NCCL_2_20,
    NCCL_2_21,
    NCCL_2_26,
    NCCL_2_30,
    NCCL_LIBRARIES,
    RCCL,
    Graph,
    Library,
    graph_of,
)
from homenode.nccl.guest_side import guest_side, left_to_libvirt
from homenode.nccl.guest_tree import (
    GuestTree,
    TreeGpu,
    TreeLink,
    TreeSwitch,
    peer_link_gb_per_s,
    tree_of_document,
    tree_of_host,
    tree_of_plan,
)
from homenode.nccl.strict_reader import ReadTopology, read_topology
from homenode.nccl.system import PathType
from homenode.plan.tuning import tune
from homenode.vm.domain.read import open_domain, vm_of
from homenode.vm.plan_options import PciGranularity, PlanOptions, Policy
from homenode.vm.sources import load_host
from tests.nccl_documents import assembled, text_of, tuned_for

H200, RTX, H100, A100 = "h200-xeon8558", "rtxpro6000-xeon8468v", "hgx-h100", "hgx-a100-ibm"
COUNT = {H200: 7, RTX: 8, H100: 8, A100: 8}


@functools.cache
def mirrored(host: str) -> GuestTree:
    """The guest of pin-numa-pci with 88 vCPUs on all nodes."""
    document = open_domain(xml_of(host), "vm.xml")
    facts = vm_of(document)
    addresses = dict(guest_side(facts, left_to_libvirt(document)).bus_ids)
    return tree_of_document(facts, load_host(host), addresses)


def xml_of(host: str) -> bytes:
    gpus = load_host(host).devices_of_kind(DeviceKind.GPU)
    return tuned_for(host, tuple(str(gpu.bdf) for gpu in gpus[: COUNT[host]]), vcpus=88)


@functools.cache
def tree_of(host: str, layout: str) -> GuestTree:
    """The same GPUs in another layout: flat or with cells, and without nodes of their own."""
    tree = mirrored(host)
    if layout == "pin-numa-pci":
        return tree
    gpus = tuple(replace(gpu, node=None) for gpu in tree.gpus)
    if layout == "pin-numa":
        return replace(tree, gpus=gpus)
    return replace(tree, gpus=gpus, vcpus_of_node=((0, CpuSet(range(88))),))


@functools.cache
def file_of(host: str, layout: str) -> ReadTopology:
    text = text_of(assembled(load_host(host), xml_of(host)))
    if layout == "default":  # vCPUs float: each CPU of the file has them all
        everyone = "00ffffff,ffffffff,ffffffff"
        lines = text.splitlines()
        lines = [
            f"{one[: one.index('affinity=') + 10]}{everyone}{one[one.index(chr(34), one.index('affinity=') + 10) :]}"  # noqa: E501
            if "affinity=" in one
            else one
            for one in lines
        ]
        text = "\n".join(lines) + "\n"
    return read_topology(text.encode(), "topo.xml")


def through_host(graph: Graph) -> dict[str, float]:
    return {one.through_host.type.name: one.through_host.gb_per_s for one in graph.pairs}


ROWS = [
    *((H200, layout, False, [-1], {"PHB": 48}, "empty") for layout in ("default", "pin")),
    (H200, "pin-numa", False, [-1], {"PHB": 48}, "empty"),
    (H200, "pin-numa-pci", False, [0, 1, 2, 3], {"PHB": 48, "SYS": 40}, "own"),
    (H200, "pin", True, [0, 1, 2, 3], {"PHB": 48, "SYS": 40}, "own"),
    (H200, "pin-numa", True, [0, 1, 2, 3], {"PHB": 48, "SYS": 40}, "own"),
    (H200, "pin-numa-pci", True, [0, 1, 2, 3], {"PHB": 48, "SYS": 40}, "own"),
    (H200, "default", True, [0, 1, 2, 3], {"PHB": 48, "SYS": 40}, "all"),
    (RTX, "pin", False, [-1], {"PHB": 48}, "empty"),
    (RTX, "pin-numa", False, [-1], {"PHB": 48}, "empty"),
    (RTX, "pin-numa-pci", False, [0, 1], {"PHB": 48, "SYS": 22}, "own"),
    (RTX, "pin", True, [0, 1], {"PHB": 48, "SYS": 22}, "own"),
    (RTX, "pin-numa", True, [0, 1], {"PHB": 48, "SYS": 22}, "own"),
    (H100, "pin-numa", False, [-1], {"PHB": 48}, "empty"),
    (H100, "pin-numa-pci", False, [0, 1], {"PHB": 48, "SYS": 22}, "own"),
    (H100, "pin-numa", True, [0, 1], {"PHB": 48, "SYS": 22}, "own"),
    (A100, "default", False, [-1], {"PHB": 24}, "empty"),
    (A100, "pin-numa", False, [-1], {"PHB": 24}, "empty"),
    (A100, "pin-numa-pci", False, [0, 1], {"PHB": 24, "SYS": 16}, "own"),
    (A100, "pin-numa", True, [0, 1], {"PHB": 24, "SYS": 16}, "own"),
]


@pytest.mark.parametrize(("host", "layout", "has_file", "nodes", "paths", "affinity"), ROWS)
def test_a_guest_is_seen_as_the_code_of_2_30_sees_it(
    host: str, layout: str, has_file: bool, nodes: list[int], paths: dict[str, float], affinity: str
) -> None:
    tree = tree_of(host, layout)
    graph = graph_of(tree, NCCL_2_30, file_of(host, layout) if has_file else None)
    assert sorted(cpu.numa_id for cpu in graph.cpus) == nodes
    assert through_host(graph) == paths
    everyone = CpuSet(range(88))
    masks = {gpu.cpu.affinity for gpu in graph.gpus}
    if affinity == "own":
        own = dict(mirrored(host).vcpus_of_node)
        assert all(gpu.cpu.affinity == own[gpu.cpu.numa_id] for gpu in graph.gpus)
        assert len(masks) == len(nodes)
    else:
        assert masks == {CpuSet() if affinity == "empty" else everyone}


def test_ports_of_the_4th_generation_make_all_paths_alike_before_the_driver_was_asked() -> None:
    graph = graph_of(tree_of(H200, "pin-numa-pci"), NCCL_2_26)
    assert through_host(graph) == {"PHB": 24, "SYS": 24}
    without = tuple(replace(gpu, nvlinks=()) for gpu in mirrored(H200).gpus)
    made = explain(replace(mirrored(H200), gpus=without))
    crossing = [one for one in made.findings if one.id == "nccl-ring-crosses-nodes"]
    assert [one.subject for one in crossing] == ["ring of NCCL 2.26"]


def test_with_nvlink_all_layouts_are_alike() -> None:
    for host, rate in ((H200, 370.8), (H100, 370.8), (A100, 240.0)):
        for layout in ("pin", "pin-numa", "pin-numa-pci"):
            graph = graph_of(tree_of(host, layout), NCCL_2_30)
            assert {(one.path.type, one.is_peer) for one in graph.pairs} == {(PathType.NVL, True)}
            assert {round(one.path.gb_per_s, 3) for one in graph.pairs} == {rate}


def test_p2p_over_pcie_needs_the_file_and_is_for_one_neighbour_of_each_gpu() -> None:
    for host in (RTX, A100):
        bare = tuple(replace(gpu, nvlinks=()) for gpu in tree_of(host, "pin-numa").gpus)
        tree = replace(tree_of(host, "pin-numa"), gpus=bare)
        assert not any(one.is_peer for one in graph_of(tree, NCCL_2_30).pairs)
        graph = graph_of(tree, NCCL_2_30, file_of(host, "pin-numa"))
        peers = [one for one in graph.pairs if one.is_peer]
        assert {one.path.type for one in peers} == {PathType.PIX}
        counts = Counter(gpu for one in peers for gpu in (one.a, one.b))
        assert set(counts.values()) == {1} and len(counts) == 8


@pytest.mark.parametrize(
    ("library", "emerald", "sapphire", "milan"),
    [
        (NCCL_2_20, 10, 10, 16),
        (NCCL_2_21, 10, 10, 16),
        (NCCL_2_26, 40, 22, 16),
        (NCCL_2_30, 40, 22, 16),
    ],
)
def test_versions_know_links_between_cpus_by_the_models_of_their_time(
    library: Library, emerald: float, sapphire: float, milan: float
) -> None:
    rates = [
        library.gb_per_s_between_cpus("x86_64", vendor, family, model)
        for vendor, family, model in (
            ("GenuineIntel", 6, 0xCF),
            ("GenuineIntel", 6, 0x8F),
            ("AuthenticAMD", 25, 1),
        )
    ]
    assert rates == [emerald, sapphire, milan]


def test_two_gpus_on_amd_use_p2p_through_the_cpus_and_three_do_not() -> None:
    tree = tree_of(A100, "pin-numa-pci")
    bare = tuple(replace(gpu, nvlinks=()) for gpu in tree.gpus)
    for count, peers in ((2, True), (3, False)):
        graph = graph_of(replace(tree, gpus=bare[-count:]), NCCL_2_30)
        assert all(one.is_peer is peers for one in graph.pairs)
    amd = tuple(replace(gpu, is_amd=True) for gpu in bare)
    made = explain(replace(tree, gpus=amd))
    assert [view.libraries for view in made.views] == [("RCCL",)]
    assert all(pair.peers for pair in made.views[0].pairs)


def buffers(made: Explanation, library: str, processes: Processes) -> set[tuple[int, ...]]:
    view = next(view for view in made.views if library in view.libraries)
    return {one.nodes for one in view.buffers if one.processes is processes}


def test_buffers_follow_threads_in_one_process_and_the_gpus_node_in_several() -> None:
    numa = explain(tree_of(H200, "pin-numa"))
    assert buffers(numa, "2.30", Processes.ONE) == {(0, 1, 2, 3)}
    assert buffers(numa, "2.30", Processes.SEVERAL) == {(0,)}
    assert buffers(numa, "2.20", Processes.SEVERAL) == {(0, 1, 2, 3)}
    assert buffers(numa, "2.30", Processes.ONE_ON_FIRST) == {(0,)}
    assert [one.id for one in numa.findings] == ["nccl-gpus-without-node"]
    repaired = explain(tree_of(H200, "pin-numa"), file_of(H200, "pin-numa"))
    assert buffers(repaired, "2.30", Processes.ONE) == {(0,), (1,), (2,), (3,)}
    # The file does not change what CUDA says.
    assert buffers(repaired, "2.30", Processes.SEVERAL) == {(0,)}
    assert not repaired.findings
    mirrored_pci = explain(tree_of(H200, "pin-numa-pci"))
    assert buffers(mirrored_pci, "2.30", Processes.SEVERAL) == {(0,), (1,), (2,), (3,)}
    flat = explain(tree_of(H200, "pin"))
    assert buffers(flat, "2.30", Processes.ONE) == {(0,)} and not flat.findings


def test_the_ceiling_is_that_of_the_node_with_all_buffers_or_of_the_fullest() -> None:
    memory = Memory((140e9,) * 4, "the study")
    made = explain(tree_of(H200, "pin-numa"), None, memory)
    ceilings = {one.processes: one for one in made.views[-1].ceilings}
    assert ceilings[Processes.ONE_ON_FIRST].least_bytes_per_s == pytest.approx(10e9)
    assert ceilings[Processes.ONE].most_bytes_per_s == pytest.approx(35e9)
    assert ceilings[Processes.ONE].least_bytes_per_s == pytest.approx(10e9)
    near = explain(tree_of(H200, "pin-numa-pci"), None, memory).views[-1].ceilings
    assert {one.least_bytes_per_s for one in near} == {35e9}


def test_a_file_of_other_gpus_is_named() -> None:
    other = file_of(RTX, "pin-numa")
    renamed = tuple(
        replace(gpu, address=Bdf(0, 0x40 + number, 0, 0))
        for number, gpu in enumerate(tree_of(RTX, "pin-numa").gpus)
    )
    made = explain(replace(tree_of(RTX, "pin-numa"), gpus=renamed), other)
    assert {one.id for one in made.findings} == {"nccl-file-not-used", "nccl-gpus-without-node"}


def test_every_statement_names_its_source_and_a_version() -> None:
    made = explain(tree_of(H200, "pin-numa"))
    for view in made.views:
        subjects = {statement.subject for statement in view.statements}
        assert {"nodes that NCCL sees", "links of GPUs", "P2P", "threads"} <= subjects
        for statement in view.statements:
            assert statement.source.startswith("src/") and ", 2." in statement.source


def test_a_plan_alone_gives_the_tree_of_its_document() -> None:
    host = load_host(H200)
    options = PlanOptions("pin-numa-pci", policy=Policy.SPREAD)
    tuning = tune(xml_of(H200), "vm.xml", options, host)
    assert tuning.plan is not None
    tree = tree_of_plan(tuning.plan, host)
    assert tree.gpus == mirrored(H200).gpus or [(gpu.address, gpu.node) for gpu in tree.gpus] == [
        (gpu.address, gpu.node) for gpu in mirrored(H200).gpus
    ]
    assert tree.vcpus_of_node == mirrored(H200).vcpus_of_node


def test_a_bare_machine_has_its_own_switches() -> None:
    graph = graph_of(tree_of_host(load_host(RTX)), NCCL_2_30)
    assert Counter(one.path.type for one in graph.pairs)[PathType.PIX] == 4


def test_c2c_takes_a_path_to_another_cpu_through_its_gpu() -> None:
    """As a kind of its own since 2.27; it was NVLink before."""
    tree = tree_of_host(load_host("gh200x4"))
    assert all(gpu.has_c2c for gpu in tree.gpus)
    for library, kind in ((NCCL_2_26, PathType.NVB), (NCCL_2_30, PathType.C2C)):
        pairs = graph_of(tree, library).pairs
        assert {(one.path.type, round(one.path.gb_per_s, 1)) for one in pairs} == {
            (PathType.NVL, 123.6)
        }
        assert {(one.through_host.type, round(one.through_host.gb_per_s, 1)) for one in pairs} == {
            (kind, 123.6)
        }
    alone = tuple(replace(gpu, nvlinks=()) for gpu in tree.gpus)
    through = {
        (one.path.type, one.path.gb_per_s)
        for one in graph_of(replace(tree, gpus=alone), NCCL_2_30).pairs
    }
    assert through == {(PathType.SYS, 6.0)}


def test_a_gpu_on_c2c_and_one_on_pcie_below_one_cpu_meet_there() -> None:
    first, second, *_ = tree_of_host(load_host("gh200x4")).gpus
    there = tuple(replace(gpu, node=0, nvlinks=()) for gpu in (first, second))
    tree = replace(
        tree_of_host(load_host("gh200x4")), gpus=(there[0], replace(there[1], has_c2c=False))
    )
    (pair,) = graph_of(tree, NCCL_2_30).pairs
    assert pair.through_host.type is PathType.P2C


def test_a_node_with_nics_alone_is_one_to_nccl_as_well() -> None:
    host = load_host("small-2n8c-2gpu")
    moved = tuple(
        structs.replace(one, node=NodeIndex(1)) if one.kind is DeviceKind.GPU else one
        for one in host.pci_devices
    )
    tree = tree_of_host(structs.replace(host, pci_devices=moved))
    assert tree.nic_nodes == (0,) and tree_of_host(host).nic_nodes == ()
    (nodes, *_) = explain(tree).views[-1].statements
    assert "node 0 with NICs alone" in nodes.text


def test_a_switch_as_qemu_makes_it_carries_no_more_than_a_lane_of_the_1st_generation() -> None:
    """PCI[0.2] in NCCL's log; the driver gives the GPU's own link, and not the switch's."""
    host = load_host(RTX)
    options = PlanOptions(
        "pin-numa-pci", policy=Policy.SPREAD, pci_granularity=PciGranularity.SWITCH
    )
    tuning = tune(xml_of(RTX), "vm.xml", options, host)
    assert tuning.plan is not None
    graph = graph_of(tree_of_plan(tuning.plan, host), NCCL_2_30)
    assert {round(one.through_host.gb_per_s, 2) for one in graph.pairs} == {0.19}


@pytest.mark.parametrize(
    ("name", "rate"),
    [("AMD Instinct MI350X", 48.0), ("AMD Instinct MI250X", 36.0), ("AMD Instinct MI100", 24.0)],
)
def test_xgmi_has_the_rate_of_its_generation(name: str, rate: float) -> None:
    assert peer_link_gb_per_s(name) == rate


def test_what_rccl_does_has_rccls_source() -> None:
    made = explain(tree_of_host(load_host("mi350x-epyc9575f")))
    (view,) = made.views
    assert {pair.direct_gb_per_s for pair in view.pairs} == {48.0}
    assert all(one.source.endswith("of ROCm/rccl") for one in view.statements)


LINKS = st.builds(
    PciLink,
    st.none(),
    st.none(),
    st.sampled_from([None, 8.0, 16.0, 32.0]),
    st.sampled_from([None, 4, 8, 16]),
)


@st.composite
def trees(draw: st.DrawFn) -> GuestTree:
    """GPUs below up to two levels of switches, on up to four nodes or none."""
    shapes = draw(
        st.lists(
            st.tuples(
                st.sampled_from([None, 0, 1, 2, 3]),
                st.sampled_from([None, "a", "b"]),
                st.sampled_from([None, "x", "y"]),
                LINKS,
            ),
            min_size=2,
            max_size=7,
        )
    )
    links = {name: TreeLink(draw(LINKS), None) for name in ("a", "b", "ax", "ay", "bx", "by")}
    gpus = []
    for number, (node, outer, inner, link) in enumerate(shapes):
        names = [name for name in (outer, outer and inner and outer + inner) if name]
        switches = tuple(TreeSwitch(key=f"{node}{name}", link=links[name]) for name in names)
        gpus.append(
            TreeGpu(
                address=Bdf(0, 0x10 + number, 0, 0),
                node=node,
                link=TreeLink(link, None),
                switches=switches,
            )
        )
    vendor, family, model = draw(
        st.sampled_from(
            [("GenuineIntel", 6, 0x8F), ("GenuineIntel", 6, 0x3F), ("AuthenticAMD", 25, 1)]
        )
    )
    vcpus = tuple((node, CpuSet([node])) for node in range(4))
    return GuestTree(
        source="guest",
        architecture="x86_64",
        vendor=vendor,
        family=family,
        model=model,
        vcpus_of_node=vcpus,
        gpus=tuple(gpus),
    )


def rate(link: TreeLink) -> float:
    own = link.own
    assert own is not None
    gen = {None: 6, 8.0: 6, 16.0: 12, 32.0: 24}[own.max_gt_per_s]
    return gen * (own.max_width or 16) / 8


def expected_path(tree: GuestTree, a: TreeGpu, b: TreeGpu, library: Library) -> tuple[str, float]:
    """By the lowest common ancestor, without any search."""
    ups = [[f"cpu {one.node}", *(switch.key for switch in one.switches)] for one in (a, b)]
    rates = [[*(rate(switch.link) for switch in one.switches), rate(one.link)] for one in (a, b)]
    shared = 0
    while shared < min(map(len, ups)) and ups[0][shared] == ups[1][shared]:
        shared += 1
    passed = [one for up, own in zip(ups, rates, strict=True) for one in own[max(shared - 1, 0) :]]
    if shared == 0:
        between = library.gb_per_s_between_cpus("x86_64", tree.vendor, tree.family, tree.model)
        return "SYS", min(*passed, between)
    if shared == 1:
        return "PHB", min(passed)
    switches = 1 + sum(len(up) - shared for up in ups)
    return ("PIX" if switches == 1 else "PXB"), min(passed)


@settings(max_examples=40, deadline=None)
@given(trees(), st.sampled_from([*NCCL_LIBRARIES, RCCL]))
def test_paths_are_those_of_the_lowest_common_ancestor(tree: GuestTree, library: Library) -> None:
    graph = graph_of(tree, library)
    gpu_at = {gpu.address: gpu for gpu in tree.gpus}
    assert len(graph.pairs) == len(tree.gpus) * (len(tree.gpus) - 1) // 2
    for pair in graph.pairs:
        name, gb_per_s = expected_path(tree, gpu_at[pair.a], gpu_at[pair.b], library)
        assert pair.path.type.name == name
        assert pair.path.gb_per_s == pytest.approx(gb_per_s)
        far = pair.through_host.type.name
        assert far == ("SYS" if name == "SYS" else "PHB")


def file_of_tree(tree: GuestTree) -> bytes:
    """A topology file that says of the GPUs what the tree does."""
    lines = ['<system version="1">']
    for node in sorted({-1 if gpu.node is None else gpu.node for gpu in tree.gpus}):
        lines.append(
            f'<cpu numaid="{node}" arch="x86_64" vendor="{tree.vendor}" familyid="{tree.family}" '
            f'modelid="{tree.model}">'
        )
        for gpu in tree.gpus:
            if gpu.node != (None if node == -1 else node):
                continue
            for number, switch in enumerate(gpu.switches):
                # Each GPU is written below switches of its own; NCCL joins those of one bus id.
                lines.append(_pci(_bus_of(tree, switch.key, number), "0x060400", switch.link))
            lines.append(_pci(str(gpu.address), "0x030200", gpu.link).replace(">", "/>"))
            lines += ["</pci>"] * len(gpu.switches)
        lines.append("</cpu>")
    return "\n".join([*lines, "</system>", ""]).encode()


def _bus_of(tree: GuestTree, key: str, level: int) -> str:
    keys = sorted({switch.key for gpu in tree.gpus for switch in gpu.switches})
    return f"ffff:{0x40 + keys.index(key):02x}:{level:02x}.0"


def _pci(bus: str, kind: str, link: TreeLink) -> str:
    assert link.own is not None
    speed, width = link.own.max_gt_per_s, link.own.max_width
    words = "" if speed is None else f' link_speed="{speed} GT/s PCIe"'
    words += "" if width is None else f' link_width="{width}"'
    return f'<pci busid="{bus}" class="{kind}"{words}>'


def compare_with_file(tree: GuestTree, library: Library) -> None:
    """A flat guest that is given the file has the paths of the tree."""
    nowhere = TreeLink(None, None)
    flat = tuple(replace(gpu, node=None, switches=(), link=nowhere) for gpu in tree.gpus)
    file = read_topology(file_of_tree(tree), "topo.xml")
    gpu_at = {gpu.address: gpu for gpu in tree.gpus}
    graph = graph_of(replace(tree, gpus=flat), library, file)
    assert all(gpu.from_file for gpu in graph.gpus)
    for pair in graph.pairs:
        name, gb_per_s = expected_path(tree, gpu_at[pair.a], gpu_at[pair.b], library)
        assert pair.path.type.name == name
        assert pair.path.gb_per_s == pytest.approx(gb_per_s)
        peers = {"PIX", "PXB"} | ({"PHB", "SYS"} if _reaches_far(tree, library) else set())
        assert pair.is_peer is (name in peers)


def _reaches_far(tree: GuestTree, library: Library) -> bool:
    if library is RCCL:
        return not (tree.vendor == "GenuineIntel" and (tree.model or 0) < 0x55)
    return tree.vendor == "AuthenticAMD" and len(tree.gpus) <= 2


@settings(max_examples=20, deadline=None)
@given(trees(), st.sampled_from([*NCCL_LIBRARIES, RCCL]))
def test_a_file_gives_a_flat_guest_the_paths_of_the_tree_that_it_describes(
    tree: GuestTree, library: Library
) -> None:
    compare_with_file(tree, library)


@pytest.mark.lab
@settings(max_examples=400, deadline=None)
@given(trees(), st.sampled_from([*NCCL_LIBRARIES, RCCL]))
def test_a_thousand_files_give_flat_guests_the_paths_of_their_trees(
    tree: GuestTree, library: Library
) -> None:
    compare_with_file(tree, library)
