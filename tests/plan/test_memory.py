"""Memory of the nodes: free, bound, huge, elsewhere, without CPUs; what it makes of placements."""

import pytest
from msgspec import structs
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, NodeIndex
from homenode.findings import Rejection
from homenode.machine.topology import Host, HostReserve, MemoryKind, PagePool
from homenode.plan.memory import compute_overhead, count_node_memory, free_memory, reserve_bytes
from homenode.plan.planner import plan
from homenode.plan.request import GuestRequest, choose_huge_page_bytes
from homenode.plan.search.place import place
from homenode.plan.shape.guest_numa import list_memory_homes
from homenode.units import GIB, MIB
from homenode.vm.layout import PRESETS, MemoryBinding
from homenode.vm.plan import Relaxation, Unplannable
from homenode.vm.plan_options import Balance, make_cell
from tests.figures import numbers
from tests.small_hosts import (
    DeviceSpec,
    NodeSpec,
    asking,
    even_host,
    host_of,
    pinned_domain,
    small_request,
)


def _rejections(host: Host, request: GuestRequest) -> tuple[Rejection, ...]:
    with pytest.raises(Unplannable) as refusal:
        place(host, request)
    return refusal.value.rejections


def test_memory_that_no_node_holds_widens_the_vm_or_refuses_it() -> None:
    host = even_host(2, 1, 1, 8, 2, memory_bytes=64 * GIB)
    assert place(host, small_request(4, 100 * GIB)).nodes == (0, 1)
    rejections = _rejections(host, small_request(4, 200 * GIB))
    assert any(r.constraint == "memory" for r in rejections)


def test_free_memory_counts_where_it_is_known_and_bound_memory_where_not() -> None:
    busy = pinned_domain("8", memory_bytes=60 * GIB, memory_by_node=((0, 60 * GIB),))
    host = even_host(2, 1, 1, 16, 1, domains=[busy])
    assert place(host, small_request(4, 20 * GIB)).nodes == (1,)
    read = even_host(2, 1, 1, 16, 1, domains=[busy], free_bytes=30 * GIB)
    assert place(read, asking(small_request(4, 20 * GIB), balance=Balance.PACK)).nodes == (1,)
    # What is bound is allocated, touched or not: node 0 has 64 GiB, and 60 are bound.
    assert place(read, asking(small_request(4, GIB), balance=Balance.PACK)).nodes == (0,)
    assert place(read, asking(small_request(4, 3 * GIB), balance=Balance.PACK)).nodes == (1,)


@pytest.mark.parametrize(
    ("page_bytes", "devices", "mib"), [(None, (), 328), (None, ("01:00.0",), 368), (GIB, (), 288)]
)
def test_qemu_takes_256_mib_8_a_vcpu_and_page_tables_for_ordinary_pages_and_their_dma(
    page_bytes: int | None, devices: tuple[str, ...], mib: int
) -> None:
    request = small_request(4, 20 * GIB, devices=devices)
    assert compute_overhead(replace(request, page_bytes=page_bytes)) == mib * MIB


@pytest.mark.parametrize(
    ("node_gib", "stated_gib", "kept_gib"),
    [(64, None, 2), (200, None, 4), (0, None, 0), (200, 1, 1), (0, 1, 0)],
)
def test_the_host_keeps_a_fiftieth_of_a_node_2_gib_at_least_or_what_is_stated(
    node_gib: int, stated_gib: int | None, kept_gib: int
) -> None:
    reserve = HostReserve(1, None if stated_gib is None else stated_gib * GIB)
    (node,) = even_host(1, memory_bytes=node_gib * GIB).nodes
    assert reserve_bytes(replace(small_request(), host_reserve=reserve), node) == kept_gib * GIB


@pytest.mark.parametrize("page_bytes", [None, GIB])
def test_a_node_has_room_for_the_vm_what_qemu_needs_and_the_hosts_2_gib(
    page_bytes: int | None,
) -> None:
    request = replace(small_request(4, 20 * GIB), page_bytes=page_bytes)
    needed = 22 * GIB + compute_overhead(request)
    for missing, relaxations in ((0, ()), (MIB, (Relaxation.HOST_MEMORY,))):
        host = even_host(1, 1, 1, 8, 1, memory_bytes=needed - missing)
        assert place(host, request).relaxations == relaxations


@pytest.mark.parametrize(
    ("command_line", "sizes", "default"),
    [
        (None, (), 2 * MIB),
        (None, (GIB, 2 * MIB), 2 * MIB),
        (None, (16 * GIB, 512 * MIB), 512 * MIB),  # of arm64 with pages of 64 KiB
        ("hugepagesz=1G hugepages=4", (GIB, 2 * MIB), 2 * MIB),
        ("hugepagesz=2M default_hugepagesz=1G", (GIB, 2 * MIB), GIB),
        ("default_hugepagesz= ro", (GIB,), GIB),
    ],
)
def test_huge_pages_without_a_size_are_the_kernels_default(
    command_line: str | None, sizes: tuple[int, ...], default: int
) -> None:
    host = even_host(1, pools=tuple(PagePool(size, 0, 0) for size in sizes))
    settings = structs.replace(host.settings, kernel_command_line=command_line)
    assert choose_huge_page_bytes(structs.replace(host, settings=settings)) == default


def test_a_vm_that_nothing_binds_has_a_finding_as_soon_as_all_nodes_lack_a_mebibyte() -> None:
    request, needed = small_request(4, 20 * GIB, layout="default"), 22 * GIB + 328 * MIB
    for size, ids in (
        (needed, []),
        (needed - MIB, ["host-memory-taken"]),
        (20 * GIB, ["host-memory-taken"]),
        (20 * GIB - MIB, ["memory-short"]),
    ):
        placement = place(even_host(1, memory_bytes=size), request)
        assert [finding.id for finding in placement.findings] == ids
    for kind, is_short in ((MemoryKind.OTHER, False), (None, False), (MemoryKind.GPU, True)):
        more = NodeSpec((), memory_bytes=64 * GIB, memory_kind=kind)
        placement = place(host_of([NodeSpec(memory_bytes=GIB), more]), request)
        assert [finding.id for finding in placement.findings] == ["memory-short"] * is_short


@pytest.mark.parametrize(("free_pages", "ids"), [(2048, []), (2047, ["host-memory-taken"])])
def test_huge_pages_that_the_host_has_free_need_nothing_else(
    free_pages: int, ids: list[str]
) -> None:
    host = even_host(1, memory_bytes=5 * GIB, pools=(PagePool(2 * MIB, 2048, free_pages),))
    request = replace(small_request(4, 4 * GIB, layout="default"), page_bytes=2 * MIB)
    assert [finding.id for finding in place(host, request).findings] == ids


def test_a_vm_has_no_more_guest_cells_than_pages() -> None:
    host = even_host(1, 4, 1, 4, 1, memory_bytes=64 * GIB)
    request = replace(small_request(8, 2 * GIB), page_bytes=GIB)
    assert len(plan(host, request).cells) == 2
    with pytest.raises(Unplannable):
        plan(host, replace(small_request(9, 2 * GIB), page_bytes=GIB))


def test_unknown_memory_is_a_gap_and_no_limit() -> None:
    placement = place(even_host(1, memory_bytes=None), small_request(4, 900 * GIB))
    assert any("memory" in gap.subject for gap in placement.gaps)


def test_a_node_without_memory_takes_vcpus_only_where_memory_may_lie_elsewhere() -> None:
    host = host_of([NodeSpec(memory_bytes=0), NodeSpec(package=1, memory_bytes=64 * GIB)])
    assert place(host, small_request(4)).nodes == (1,)
    for layout in ("pin-bound", replace(PRESETS["pin-numa"], memory=MemoryBinding.BOUND)):
        wide = place(host, small_request(8, layout=layout))
        assert wide.nodes == (0, 1)
        assert wide.memory_nodes == (0, 1)
        assert Relaxation.MEMORY_ELSEWHERE in wide.relaxations


def test_memory_beyond_the_vms_nodes_is_bound_to_the_nearest_others_with_a_finding() -> None:
    host = host_of(
        [
            NodeSpec(((1,) * 9,), 0, memory_bytes=8 * GIB),
            NodeSpec(((1,),), 0, memory_bytes=24 * GIB),
            NodeSpec(((1, 1),), 1, memory_bytes=64 * GIB),
        ],
        domains=[pinned_domain("9-11", memory_bytes=0)],
    )
    placement = place(host, small_request(8, 20 * GIB, layout="pin-bound"))
    assert placement.nodes == (0,)
    assert placement.memory_nodes == (0, 1)
    assert placement.relaxations == (Relaxation.MEMORY_ELSEWHERE,)
    assert "memory-from-other-nodes" in {f.id for f in placement.findings}
    untold = structs.replace(host, distances=None)  # the first of equally near nodes
    request = small_request(8, 20 * GIB, layout="pin-bound")
    assert place(untold, request).memory_nodes == (0, 1)


def test_the_nearest_node_is_near_to_one_of_the_vms_nodes_and_nodes_are_in_order() -> None:
    host = host_of(
        [
            NodeSpec(((1,),), 2, memory_bytes=24 * GIB),
            *(NodeSpec(((1,) * 8,), package, memory_bytes=8 * GIB) for package in (0, 1)),
            NodeSpec(((1,),), 3, memory_bytes=24 * GIB),
        ],
        distances=((10, 30, 11, 20), (30, 10, 15, 20), (11, 15, 10, 20), (20, 20, 20, 10)),
        domains=[pinned_domain("0,17")],
    )
    placement = place(host, small_request(15, 20 * GIB, layout="pin-bound"))
    assert (placement.nodes, placement.memory_nodes) == ((1, 2), (0, 1, 2))


def test_memory_of_an_allowed_node_without_pus_goes_with_the_nearest_node() -> None:
    host = host_of(
        [
            NodeSpec(((1,) * 8,), 0, memory_bytes=16 * GIB),
            NodeSpec(((1,) * 8,), 1, memory_bytes=16 * GIB),
            NodeSpec((), 1, memory_bytes=64 * GIB, memory_kind=MemoryKind.OTHER),
        ],
        distances=((10, 21, 24), (21, 10, 14), (24, 14, 10)),
    )
    request = small_request(4, 48 * GIB)
    assert any(r.constraint == "memory" for r in _rejections(host, request))
    empty = structs.replace(host.nodes[2], memory_bytes=0)
    for node in (host.nodes[2], empty):
        nodes = (*host.nodes[:2], node)
        hints = str([r.hint for r in _rejections(structs.replace(host, nodes=nodes), request)])
        assert ("--allow-memory-node 2" in hints) is (node is not empty)
    once, twice, of_cpus = (
        count_node_memory(host, asking(request, memory_nodes_allowed=nodes), keeps_reserve=True)
        for nodes in ((NodeIndex(2),), (NodeIndex(2), NodeIndex(2)), (NodeIndex(2), NodeIndex(0)))
    )
    assert once == twice == of_cpus
    placement = place(host, asking(request, memory_nodes_allowed=(NodeIndex(2),)))
    assert placement.nodes == (1,)
    assert placement.memory_nodes == (1, 2)
    between = structs.replace(host, distances=((10, 21, 14), (21, 10, 14), (14, 14, 10)))
    tied = place(between, asking(request, memory_nodes_allowed=(NodeIndex(2),)))
    assert tied.memory_nodes == (0, 2)
    wide = place(between, asking(small_request(12), memory_nodes_allowed=(NodeIndex(2),)))
    assert list_memory_homes(between, wide) == ((0, 2), (1,))


def test_huge_pages_may_be_reserved_but_nodes_that_have_them_come_first() -> None:
    empty, full = PagePool(GIB, 0, 0), PagePool(GIB, 32, 32)
    host = host_of([NodeSpec(package=0, pools=(empty,)), NodeSpec(package=1, pools=(full,))])
    request = replace(small_request(4, 16 * GIB), page_bytes=GIB)
    assert place(host, request).nodes == (1,)
    bare = even_host(1, pools=(empty,))
    assert place(bare, request).nodes == (0,)
    halves = replace(small_request(6, 5 * GIB), page_bytes=GIB)  # 2.5 pages of each node
    cost = {term.name: term.value for term in place(even_host(2, threads=1), halves).cost}
    assert cost["pages_to_reserve"] == 3 + 3
    rejections = _rejections(bare, replace(small_request(4, 96 * GIB), page_bytes=GIB))
    assert any(r.constraint == "pages" for r in rejections)


@pytest.mark.parametrize("page_bytes", [GIB, None])
@pytest.mark.parametrize("pools", [(), (PagePool(GIB, 10, 10),), (PagePool(2 * MIB, 512, 512),)])
def test_huge_pages_that_a_planned_vm_still_needs_are_taken_off_the_ordinary_memory(
    pools: tuple[PagePool, ...], page_bytes: int | None
) -> None:
    """40 of 64 GiB are planned in pages of 1 GiB, of which the host has reserved 10 or none."""
    planned = structs.replace(
        pinned_domain("0-3", running=False, memory_by_node=((0, 40 * GIB),), page_bytes=GIB),
        planned=True,
    )
    bare = even_host(1, 1, 1, 16, 1, memory_bytes=64 * GIB, pools=pools)
    host = structs.replace(bare, domains=(planned,))
    assert place(host, replace(small_request(4, 20 * GIB), page_bytes=page_bytes)).nodes == (0,)
    rejections = _rejections(host, replace(small_request(4, 40 * GIB), page_bytes=page_bytes))
    assert {one.constraint for one in rejections} == {"pages" if page_bytes else "memory"}


def test_pages_of_a_running_vm_whose_document_names_no_size_are_those_of_the_default() -> None:
    running = pinned_domain("0-3", memory_by_node=((0, 15 * GIB // 2),), page_bytes=0)
    host = even_host(1, domains=[running], pools=(PagePool(GIB, 10, 10),))
    request = replace(small_request(4, 4 * GIB), page_bytes=GIB)
    assert free_memory(host, request, host.nodes[0], GIB)[1] == 2


def test_pages_that_a_running_vm_has_not_touched_are_not_left_for_a_planned_one() -> None:
    domains = [
        pinned_domain("0", memory_by_node=((0, 8 * GIB),), page_bytes=GIB),
        structs.replace(
            pinned_domain("1", running=False, memory_by_node=((0, 4 * GIB),), page_bytes=GIB),
            planned=True,
        ),
    ]
    ordinary = [
        free_memory(host, small_request(), host.nodes[0], GIB)[0]
        for free_pages in (10, 2)
        for host in [even_host(1, domains=domains, pools=(PagePool(GIB, 10, free_pages),))]
    ]
    assert ordinary[0] == ordinary[1]


def test_a_vm_planned_again_gets_back_pages_of_the_size_that_it_had() -> None:
    for page_bytes, pages in ((GIB, 8), (2 * MIB, 0), (0, 8)):  # 0: the host's default
        own = pinned_domain("0", name="vm", memory_by_node=((0, 8 * GIB),), page_bytes=page_bytes)
        host = even_host(1, domains=[own], pools=(PagePool(GIB, 10, 0),))
        request = replace(small_request(), page_bytes=GIB)
        assert free_memory(host, request, host.nodes[0], GIB)[1] == pages


def test_pages_of_the_vm_that_its_pool_still_counts_as_free_are_there_once() -> None:
    own = pinned_domain("0", name="vm", memory_by_node=((0, 5 * GIB),), page_bytes=GIB)
    other = replace(own, name="other", running=False, planned=True)
    other = replace(other, memory_by_node=((0, 4 * GIB),))
    host = even_host(1, domains=[own, other], pools=(PagePool(GIB, 10, 10),))
    request = replace(small_request(), page_bytes=GIB)
    assert free_memory(host, request, host.nodes[0], GIB)[1] == 6


def test_a_mediated_device_of_a_planned_vm_has_page_tables_like_a_function() -> None:
    size = 32 * GIB
    bare = pinned_domain("0", running=False, memory_bytes=size, memory_by_node=((0, size),))
    bare = replace(bare, planned=True)
    with_function = replace(bare, devices=(Bdf.parse("19:00.0"),))
    empty, *free = [
        free_memory(even_host(1, domains=domains), small_request(), node, GIB)[0] or 0
        for domains in ([], [bare], [with_function], [replace(bare, mediated=("uuid",))])
        for node in even_host(1).nodes[:1]
    ]
    assert [empty - size - left for left in free] == [384 * MIB, 448 * MIB, 448 * MIB]


def test_cores_whose_share_of_memory_is_on_their_node_are_counted() -> None:
    host = host_of([NodeSpec(((1,) * 8,), memory_bytes=size * GIB) for size in (64, 8)])
    placement = place(host, small_request(12, 48 * GIB, layout="pin-numa"))
    assert [9, 12] in [numbers(rejection.detail)[-2:] for rejection in placement.rejections]


def test_a_running_vm_planned_again_gets_back_what_it_has() -> None:
    own = pinned_domain("0-7", name="vm", memory_bytes=60 * GIB, memory_by_node=((0, 60 * GIB),))
    host = even_host(1, 1, 1, 8, 1, domains=[own], free_bytes=2 * GIB)
    assert place(host, small_request(8, 60 * GIB)).nodes == (0,)


@pytest.mark.parametrize("layout", ["pin", "default"])
def test_a_kept_binding_that_leaves_out_the_vcpus_nodes_is_reported(layout: str) -> None:
    host = even_host(2, 1, 1, 8, 2, devices=[DeviceSpec("01:00.0", node=0)])
    request = small_request(4, layout=layout, devices=["0000:01:00.0"])
    elsewhere = replace(request, guest=structs.replace(request.guest, bound_nodes=CpuSet([1])))
    (finding,) = place(host, elsewhere).findings
    assert finding.id == "memory-bound-elsewhere"
    assert 1 in numbers(finding.observed)
    near = replace(request, guest=structs.replace(request.guest, bound_nodes=CpuSet([0, 1])))
    assert not place(host, near).findings


def test_pages_that_do_not_divide_lie_where_there_are_any() -> None:
    pools = [(PagePool(GIB, 4, 4),), (PagePool(GIB, 3, 3),)]
    host = host_of(
        [NodeSpec(((1,) * 4,), i, memory_bytes=16 * GIB, pools=one) for i, one in enumerate(pools)]
    )
    filled = structs.replace(
        host, nodes=tuple(structs.replace(n, memory_free_bytes=GIB) for n in host.nodes)
    )
    placement = place(filled, replace(small_request(6, 7 * GIB), page_bytes=GIB))
    assert placement.cell_memory_bytes == (4 * GIB, 3 * GIB)


def test_the_host_keeps_memory_until_nothing_else_fits() -> None:
    host = even_host(1, 1, 1, 8, 1, memory_bytes=64 * GIB)
    assert place(host, small_request(4, 60 * GIB)).relaxations == ()
    last = place(host, small_request(4, 63 * GIB))
    assert Relaxation.HOST_MEMORY in last.relaxations
    assert [f.severity for f in last.findings if f.id == "host-memory-taken"] == ["critical"]
    with pytest.raises(Unplannable):
        place(host, small_request(4, 65 * GIB))


def test_explicit_cells_lie_on_their_nodes_in_their_order() -> None:
    host = even_host(2, 1, 1, 8, 1)
    cells = (make_cell(2, 4 * GIB, NodeIndex(1)), make_cell(6, 12 * GIB, NodeIndex(0)))
    placement = place(host, asking(small_request(8, 16 * GIB), explicit_cells=cells))
    assert placement.nodes == (1, 0)
    assert placement.vcpu_nodes == (0,) * 2 + (1,) * 6
    assert placement.cell_memory_bytes == (4 * GIB, 12 * GIB)
    assert placement.relaxations == ()  # unequal cells were asked for
    large = (make_cell(9, 16 * GIB, NodeIndex(1)),)
    with pytest.raises(Unplannable):
        place(even_host(2, 1, 1, 8, 1), asking(small_request(9, 16 * GIB), explicit_cells=large))
