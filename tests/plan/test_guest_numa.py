"""Guest cells: memory, distances, and the pages to reserve."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from homenode.cpuset import CpuSet, NodeIndex
from homenode.errors import InputError
from homenode.machine.topology import MemoryKind, PagePool
from homenode.plan.request import GuestRequest
from homenode.plan.shape.assemble import assemble
from homenode.plan.shape.guest_numa import choose_granule, split_memory
from homenode.units import GIB, KIB, MIB
from homenode.vm.layout import PRESETS, Layout, MemoryBinding
from homenode.vm.plan import Plan
from homenode.vm.plan_options import MemoryMode
from tests.figures import numbers
from tests.guest_shapes import bdfs, placed
from tests.small_hosts import (
    DeviceSpec,
    NodeSpec,
    asking,
    even_host,
    hierarchical_distances,
    host_of,
    small_request,
)


def cells_of(request: GuestRequest, counts: tuple[int, ...], **host: object) -> Plan:
    return assemble(even_host(len(counts)), request, placed(counts))


def test_memory_follows_the_vcpus_of_each_cell() -> None:
    plan = cells_of(small_request(4, 4 * GIB), (3, 1))
    assert [cell.memory_bytes for cell in plan.cells] == [3 * GIB, GIB]
    assert [str(cell.vcpus) for cell in plan.cells] == ["0-2", "3"]
    assert [cell.host_nodes for cell in plan.cells] == [(0,), (1,)]


def test_a_placement_may_give_each_cell_its_own_memory() -> None:
    request = structs.replace(small_request(4, 7 * GIB), page_bytes=GIB)
    placement = structs.replace(placed((2, 2)), cell_memory_bytes=(4 * GIB, 3 * GIB))
    plan = assemble(even_host(2), request, placement)
    assert [cell.memory_bytes for cell in plan.cells] == [4 * GIB, 3 * GIB]
    assert [(r.node, r.pages) for r in plan.page_reservations] == [(0, 4), (1, 3)]


@pytest.mark.parametrize(
    ("sizes", "message", "nearest_gib"),
    [
        ((4 * GIB, 4 * GIB), "expected 2 sizes that come to 7 GiB", []),
        ((7 * GIB,), "expected 2 sizes that come to 7 GiB", []),
        (
            (4 * GIB + 512 * MIB, 2 * GIB + 512 * MIB),
            "guest cell 0: expected memory in whole",
            [4, 5],
        ),
        ((7 * GIB, 0), "guest cell 1: expected memory in whole", [1]),
    ],
)
def test_memory_of_cells_that_no_pages_can_make_is_refused(
    sizes: tuple[int, ...], message: str, nearest_gib: list[float]
) -> None:
    request = structs.replace(small_request(4, 7 * GIB), page_bytes=GIB)
    with pytest.raises(InputError, match=message) as error:
        assemble(even_host(2), request, structs.replace(placed((2, 2)), cell_memory_bytes=sizes))
    assert numbers(error.value.hint) == nearest_gib


@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=8),
    st.integers(1, 4096),
    st.sampled_from((KIB, MIB, 2 * MIB, GIB)),
)
def test_memory_sums_exactly_and_divides_into_pages(
    counts: list[int], pages: int, granule: int
) -> None:
    try:
        sizes = split_memory(pages * granule, granule, tuple(counts))
    except InputError:
        assert any(pages * count // sum(counts) == 0 for count in counts)
        return
    assert sum(sizes) == pages * granule
    assert all(size % granule == 0 and size > 0 for size in sizes)
    for count, size in zip(counts, sizes, strict=True):
        assert abs(size / granule - pages * count / sum(counts)) < 1


@pytest.mark.parametrize(
    ("counts", "pages", "least"),
    [((24, 24, 24, 24), 2, 4), ((3, 1), 1, 3), ((1, 63), 2, 32), ((1,) * 8, 7, 8)],
)
def test_too_few_pages_for_the_cells_are_refused_with_the_least_that_works(
    counts: tuple[int, ...], pages: int, least: int
) -> None:
    with pytest.raises(InputError) as error:
        split_memory(pages * GIB, GIB, counts)
    assert numbers(error.value.hint)[-1] == least
    assert numbers(error.value.message)[-2:] == [len(counts), pages]
    assert 0 not in split_memory(least * GIB, GIB, counts)
    with pytest.raises(InputError):
        split_memory((least - 1) * GIB, GIB, counts)


def test_memory_that_is_no_whole_page_is_refused_with_the_nearest_sizes() -> None:
    request = structs.replace(small_request(4, 4 * GIB + 512 * MIB), page_bytes=GIB)
    with pytest.raises(InputError) as error:
        cells_of(request, (2, 2))
    assert numbers(error.value.message)[1:4] == [1, 4, 500]
    assert numbers(error.value.hint) == [4194304, 4, 5242880, 5]


def test_ordinary_memory_keeps_libvirts_mebibyte_where_it_can() -> None:
    assert choose_granule(3 * MIB, None) == MIB
    assert choose_granule(3 * MIB + 8 * KIB, None) == 4 * KIB
    assert choose_granule(3 * MIB + KIB, None) == KIB
    with pytest.raises(InputError, match="whole pages of 1 KiB"):
        choose_granule(3 * MIB + 1, None)


def test_a_flat_guest_has_one_cell_with_everything() -> None:
    request = small_request(4, 4 * GIB + 3 * KIB, layout="pin")
    plan = assemble(even_host(2), request, placed((2, 2), bound=False))
    assert len(plan.cells) == 1
    assert (plan.cells[0].vcpus, plan.cells[0].memory_bytes) == (
        CpuSet.parse("0-3"),
        4 * GIB + 3 * KIB,
    )
    assert plan.cells[0].host_nodes == (0, 1) and plan.cells[0].distances == ()
    assert (plan.memory_mode, plan.memory_nodes) == (None, ())


def test_distances_are_the_hosts_between_the_chosen_nodes() -> None:
    host = even_host(3, distances=((10, 50, 60), (20, 10, 32), (40, 21, 10)))
    request = small_request(4)
    plan = assemble(host, request, placed((2, 2), nodes=(1, 2)))
    assert [cell.distances for cell in plan.cells] == [(10, 32), (21, 10)]


def test_no_cell_is_as_near_to_another_as_to_itself() -> None:
    host = even_host(2, distances=((10, 10), (5, 10)))
    plan = assemble(host, small_request(4), placed((2, 2)))
    assert [cell.distances for cell in plan.cells] == [(10, 11), (11, 10)]
    assert any({10, 5} <= set(numbers(gap.reason)) for gap in plan.gaps)


def test_a_host_without_a_slit_tells_the_guest_nothing() -> None:
    plan = assemble(even_host(2, tells_distances=False), small_request(4), placed((2, 2)))
    assert all(cell.distances == () for cell in plan.cells)
    assert any(gap.subject == "guest distances" for gap in plan.gaps)
    told = assemble(even_host(2), small_request(4), placed((2, 2)))
    assert len(plan.consequences) == len(told.consequences) + 1


def test_memory_that_stays_unbound_leaves_cells_without_nodes() -> None:
    layout = structs.replace(PRESETS["pin-numa"], memory=MemoryBinding.KEEP, name="custom")
    plan = assemble(even_host(2), small_request(4, layout=layout), placed((2, 2)))
    assert [(cell.mode, str(cell.nodes)) for cell in plan.cells] == [(None, "")] * 2


def test_huge_pages_are_counted_for_each_node_with_a_command_where_they_lack() -> None:
    host = even_host(2, pools=(PagePool(GIB, 8, 3), PagePool(2 * MIB, 100, 100)))
    request = structs.replace(small_request(4, 8 * GIB), page_bytes=GIB)
    plan = assemble(host, request, placed((3, 1)))
    assert [tuple(r) for r in plan.page_reservations] == [(0, GIB, 6, 3), (1, GIB, 2, 3)]
    (finding,) = (f for f in plan.findings if f.id == "huge-pages-short")
    assert finding.subject == "node 0" and numbers(finding.comparison)[:3] == [6, 1, 3]
    assert finding.fix == (
        "echo 11 > /sys/devices/system/node/node0/hugepages/hugepages-1048576kB/nr_hugepages"
    )


def test_flat_bound_memory_is_reserved_evenly() -> None:
    request = structs.replace(small_request(4, 5 * GIB, layout="pin-bound"), page_bytes=GIB)
    plan = assemble(even_host(2), request, placed((2, 2)))
    assert [(r.node, r.pages) for r in plan.page_reservations] == [(0, 3), (1, 2)]
    assert plan.memory_mode is MemoryMode.STRICT and plan.memory_nodes == (0, 1)


def test_a_cell_takes_memory_from_the_allowed_node_next_to_it() -> None:
    pools = (PagePool(GIB, 1, 1),)
    bare = NodeSpec(llcs=(), memory_kind=MemoryKind.OTHER, pools=pools)
    host = host_of(
        [NodeSpec(), NodeSpec(package=1, pools=pools), bare, replace(bare, memory_bytes=0)],
        distances=hierarchical_distances((0, 1, 1, 0)),
    )
    placement = structs.replace(placed((2, 2)), memory_nodes=tuple(NodeIndex(n) for n in (0, 1, 2)))
    request = structs.replace(small_request(4, 6 * GIB), page_bytes=GIB)
    plan = assemble(host, request, placement)
    assert [cell.host_nodes for cell in plan.cells] == [(0,), (1, 2)]
    # The free pages of the cell's own node first, the others on its last node.
    assert [(r.node, r.pages) for r in plan.page_reservations] == [(0, 3), (1, 1), (2, 2)]


def test_a_node_without_memory_is_bound_to_the_one_that_gives_it() -> None:
    host = host_of(
        [NodeSpec(), NodeSpec(package=1, memory_bytes=0), NodeSpec(llcs=(), package=1)],
        distances=hierarchical_distances((0, 1, 1)),
    )
    placement = structs.replace(placed((2, 2)), memory_nodes=tuple(NodeIndex(n) for n in (0, 2)))
    plan = assemble(host, small_request(4), placement)
    assert [cell.host_nodes for cell in plan.cells] == [(0,), (2,)]


def test_each_device_knows_how_much_memory_is_local_to_it() -> None:
    specs = [DeviceSpec("01:00.0", 0), DeviceSpec("02:00.0", 1, root=1), DeviceSpec("03:00.0", 2)]
    devices = bdfs("01:00.0", "02:00.0", "03:00.0")
    request = small_request(4, layout="pin-numa", devices=[str(b) for b in devices])
    placement = placed((3, 1), devices=devices)
    plan = assemble(even_host(3, devices=specs), request, placement)
    assert [device.local_memory_ratio for device in plan.vm.hostdevs] == [0.75, 0.25, 0.0]
    free = structs.replace(request, layout=PRESETS["pin"])
    plan = assemble(even_host(3, devices=specs), free, structs.replace(placement, memory_nodes=()))
    assert [device.local_memory_ratio for device in plan.vm.hostdevs] == [None] * 3
    spread = asking(request, layout=PRESETS["pin-bound"], memory_mode=MemoryMode.INTERLEAVE)
    plan = assemble(even_host(3, devices=specs), spread, placement)
    assert [device.local_memory_ratio for device in plan.vm.hostdevs] == [0.5, 0.5, 0.0]


def test_cells_without_pins_are_even() -> None:
    numa = PRESETS["pin-numa"]
    layout: Layout = structs.replace(numa, pinning=PRESETS["default"].pinning, name="custom")
    request = small_request(6, layout=layout)
    placement = structs.replace(placed((3, 3)), vcpu_pins=(), vcpu_nodes=())
    plan = assemble(even_host(2), request, placement)
    assert [str(cell.vcpus) for cell in plan.cells] == ["0-2", "3-5"]
    with pytest.raises(InputError, match=r"5 .* 2"):
        assemble(even_host(2), asking(request, vcpus=5), placement)


def test_vcpus_that_are_not_node_by_node_are_refused() -> None:
    placement = structs.replace(placed((2, 2)), vcpu_nodes=(0, 1, 0, 1))
    with pytest.raises(InputError, match="neighbours"):
        assemble(even_host(2), small_request(4), placement)
    with pytest.raises(InputError, match="node 1"):
        assemble(even_host(2), small_request(4), structs.replace(placement, vcpu_nodes=(0,) * 4))
