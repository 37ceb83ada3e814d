"""vCPUs that are online at the start are spread over the guest cells as all vCPUs are."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from msgspec.structs import replace

from homenode.cpuset import CpuSet
from homenode.machine.topology import Host
from homenode.plan.pipeline import plan_file
from homenode.plan.request import GuestRequest
from homenode.plan.shape.assemble import assemble
from homenode.units import GIB
from homenode.vm.model import GuestTopology
from homenode.vm.plan import Plan
from homenode.vm.plan_options import PlanOptions
from homenode.vm.sources import load_host
from tests.guest_shapes import placed
from tests.seeds import part
from tests.small_hosts import even_host, small_request

AMD, INTEL = "AuthenticAMD", "GenuineIntel"


def wish(vcpus: int, offline: CpuSet, layout: str = "pin-numa") -> GuestRequest:
    request = small_request(vcpus, vcpus * GIB, layout=layout)
    guest = structs.replace(request.guest, offline_vcpus=offline)
    return replace(request, guest=guest)


def shaped(counts: Sequence[int], offline: CpuSet, *, vendor: str = AMD, threads: int = 1) -> Plan:
    """The plan of cells of so many vCPUs, each on a node with an LLC for each core."""
    host = even_host(len(counts), 1, 1, max(counts), 1, vendor=vendor)
    pins = [
        CpuSet([pu])
        for node, count in zip(host.nodes, counts, strict=True)
        for pu in list(node.pus)[:count]
    ]
    return assemble(host, wish(sum(counts), offline), placed(counts, pins=pins, threads=threads))


def deviation(cells: Sequence[CpuSet], offline: CpuSet) -> Fraction:
    """How far a cell is from its share of the online vCPUs, at most."""
    total = sum(map(len, cells))
    share = Fraction(total - len(offline), total)
    return max(abs(len(cell - offline) - share * len(cell)) for cell in cells)


@cache
def all_ways(counts: tuple[int, ...], size: int) -> list[tuple[CpuSet, ...]]:
    """Every way to make cells of sockets of so many vCPUs."""
    return list(_ways(counts, size))


def _ways(counts: tuple[int, ...], size: int) -> Iterator[tuple[CpuSet, ...]]:
    sockets = [range(first, first + size) for first in range(0, sum(counts), size)]
    for chosen in product(range(len(counts)), repeat=len(sockets)):
        if all(chosen.count(cell) * size == count for cell, count in enumerate(counts)):
            pairs = list(zip(sockets, chosen, strict=True))
            yield tuple(
                CpuSet.union(CpuSet(socket) for socket, its in pairs if its == cell)
                for cell in range(len(counts))
            )


@pytest.mark.parametrize(
    ("counts", "online", "cells", "sockets"),
    [
        ((4, 4), 4, ("0-1,4-5", "2-3,6-7"), 4),
        ((8, 8), 4, ("0-1,4-5,8-9,12-13", "2-3,6-7,10-11,14-15"), 8),
        ((6, 6), 6, ("0-2,6-8", "3-5,9-11"), 4),
        ((2, 2, 2, 2), 4, ("0,4", "1,5", "2,6", "3,7"), 8),
        # 4 and 2 are as near to 3 and 3 as sockets of several cores allow.
        ((8, 8), 6, ("0-3,8-11", "4-7,12-15"), 4),
        ((4, 4), 6, ("0,2,4,6", "1,3,5,7"), 8),
        # Nothing to do: every cell has its part.
        ((4, 4), 7, ("0-3", "4-7"), 2),
    ],
)
def test_cells_take_turns_by_sockets_where_the_first_ones_would_have_every_online_vcpu(
    counts: tuple[int, ...], online: int, cells: tuple[str, ...], sockets: int
) -> None:
    plan = shaped(counts, CpuSet(range(online, sum(counts))))
    assert tuple(str(cell.vcpus) for cell in plan.cells) == cells
    assert plan.vm.cpu_topology is not None and plan.vm.cpu_topology.sockets == sockets


@pytest.mark.parametrize(("online", "sockets", "severity"), [(4, 8, "info"), (2, 16, "warning")])
def test_cells_that_take_turns_by_more_than_four_sockets_each_are_a_warning(
    online: int, sockets: int, severity: str
) -> None:
    plan = shaped((8, 8), CpuSet(range(online, 16)))
    assert plan.vm.cpu_topology is not None and plan.vm.cpu_topology.sockets == sockets
    (finding,) = (f for f in plan.findings if f.id == "sockets-exceed-cells")
    assert finding.severity == severity


def test_on_intel_several_cells_in_a_socket_are_better_than_many_sockets() -> None:
    plan = shaped((8, 8), CpuSet(range(6, 16)), vendor=INTEL)
    assert [len(cell.vcpus & CpuSet(range(6))) for cell in plan.cells] == [3, 3]
    assert plan.vm.cpu_topology == GuestTopology(1, 1, 16, 1)
    assert "cells-share-socket" in {finding.id for finding in plan.findings}


@pytest.mark.parametrize(
    ("counts", "vendor"),
    part(
        list(product(((2, 2), (3, 3), (4, 2), (4, 4), (2, 2, 2), (6, 3), (4, 4, 4)), (AMD, INTEL))),
        0,
    ),
)
def test_no_other_turns_of_the_same_sockets_are_nearer_and_larger_ones_are_not_near(
    vendor: str, counts: tuple[int, ...]
) -> None:
    for online in range(1, sum(counts)):
        offline = CpuSet(range(online, sum(counts)))
        plan = shaped(counts, offline, vendor=vendor)
        cells = tuple(cell.vcpus for cell in plan.cells)
        assert tuple(map(len, cells)) == counts
        idle = sum(cell <= offline for cell in cells)
        assert idle == max(0, len(counts) - online)
        assert {f.subject for f in plan.findings if f.id == "cell-without-online-vcpu"} == {
            f"guest cell {i}" for i, cell in enumerate(cells) if cell <= offline
        }
        far = deviation(cells, offline)
        assert far <= 1 or idle
        assert plan.vm.cpu_topology is not None
        per_socket = plan.vm.cpu_topology.vcpus // plan.vm.cpu_topology.sockets
        if vendor == INTEL and per_socket > min(counts):
            continue  # sockets hold several cells
        ways = all_ways(counts, per_socket)
        in_use = [way for way in ways if sum(cell <= offline for cell in way) == idle]
        assert cells in in_use
        assert far < 1 or far == min(deviation(way, offline) for way in in_use)


@st.composite
def guests(draw: st.DrawFn) -> tuple[tuple[int, ...], int, CpuSet]:
    """Cells, threads of a core, vCPUs that are offline; vCPU 0 never is."""
    threads = draw(st.sampled_from((1, 2)))
    counts = tuple(threads * n for n in draw(st.lists(st.integers(1, 8), min_size=1, max_size=4)))
    vcpus = st.integers(1, sum(counts) - 1) if sum(counts) > 1 else st.nothing()
    return counts, threads, CpuSet(draw(st.sets(vcpus)))


@given(guests(), st.sampled_from((AMD, INTEL)))
def test_whichever_are_offline_pins_and_sockets_stay_with_their_cells(
    guest: tuple[tuple[int, ...], int, CpuSet], vendor: str
) -> None:
    counts, threads, offline = guest
    host = even_host(len(counts), 1, 1, max(counts), threads, vendor=vendor)
    pins = [
        CpuSet([pu])
        for node, count in zip(host.nodes, counts, strict=True)
        for core in [core for core in host.cores if core.pus <= node.pus][: count // threads]
        for pu in core.pus
    ]
    layout = "pin-numa" if threads == 1 else "pin-numa-smt"
    placement = placed(counts, pins=pins, threads=threads)
    plan = assemble(host, wish(sum(counts), offline, layout), placement)
    cells = [cell.vcpus for cell in plan.cells]
    assert tuple(map(len, cells)) == counts
    assert CpuSet.union(cells) == CpuSet(range(sum(counts)))
    assert sorted(map(str, plan.vcpu_pins)) == sorted(map(str, pins))
    for cell, node in zip(cells, host.nodes, strict=True):
        assert all(plan.vcpu_pins[vcpu] <= node.pus for vcpu in cell)
    assert plan.vm.cpu_topology is not None and plan.vm.cpu_topology.vcpus == sum(counts)
    assert plan.vm.cpu_topology.threads == threads
    core_of = {pu: core.index for core in host.cores for pu in core.pus}
    for first in range(0, sum(counts), threads):
        siblings = CpuSet.union(plan.vcpu_pins[first : first + threads])
        assert len({core_of[pu] for pu in siblings}) == 1
    if vendor == AMD:
        size = sum(counts) // plan.vm.cpu_topology.sockets
        for first in range(0, sum(counts), size):
            socket = CpuSet(range(first, first + size))
            assert any(socket <= cell for cell in cells)
    online = sum(counts) - len(offline)
    assert sum(cell <= offline for cell in cells) <= max(0, len(counts) - online) or threads > 1


DOCUMENT = b"""<domain type='kvm'><name>vm</name><memory unit='GiB'>256</memory>
<vcpu current='40'>80</vcpu>%s<os><type arch='x86_64' machine='q35'>hvm</type></os>
<cpu mode='host-passthrough'/><devices/></domain>"""


def hgx(states: bytes = b"") -> tuple[Plan, bytes, Host]:
    host = load_host("hgx-h100")
    options = PlanOptions(layout="pin-numa-pci", gpu_count=8)
    made = plan_file(DOCUMENT % states, "vm.xml", options, host)
    return made.plan, made.document, host


def test_a_vm_of_all_gpus_with_half_of_its_vcpus_has_cpus_next_to_each() -> None:
    plan, written, host = hgx()
    assert [str(cell.vcpus) for cell in plan.cells] == ["0-19,40-59", "20-39,60-79"]
    assert (
        b"<vcpu current='40' placement='static'>80</vcpu>" in written or b"current='40'" in written
    )
    assert b"cpus='0-19,40-59'" in written
    assert plan.vm.cpu_topology is not None and plan.vm.cpu_topology.sockets == 4
    text = " ".join(plan.consequences)
    assert "vCPUs 20-39,60-79, of which 20-39 online" in text
    again = plan_file(written, "vm.xml", PlanOptions(layout="pin-numa-pci"), host)
    assert again.document == written


def test_vcpus_that_the_document_starts_one_by_one_stay_as_they_are() -> None:
    ids = [0, *range(50, 79)]
    states = b"".join(
        b"<vcpu id='%d' enabled='%s' hotpluggable='%s'/>"
        % (i, b"yes" if i in ids else b"no", b"no" if i == 0 else b"yes")
        for i in range(80)
    )
    plan, written, _ = hgx(b"<vcpus>" + states + b"</vcpus>")
    assert states in written
    assert [len(cell.vcpus & CpuSet(ids)) for cell in plan.cells] == [15, 15]


def test_a_vm_with_another_number_of_vcpus_starts_all_of_them_in_order() -> None:
    host = load_host("hgx-h100")
    options = PlanOptions(layout="pin-numa-pci", gpu_count=8, vcpus=60)
    made = plan_file(DOCUMENT % b"", "vm.xml", options, host)
    assert [str(cell.vcpus) for cell in made.plan.cells] == ["0-29", "30-59"]
    assert b"current" not in made.document


def test_cells_with_as_many_vcpus_offline_each_stay_as_they_are() -> None:
    plan, whole = shaped((4, 4), CpuSet([2, 3, 6, 7])), shaped((4, 4), CpuSet())
    assert plan.vm.cell_vcpus == whole.vm.cell_vcpus
    assert plan.vm.cpu_topology == whole.vm.cpu_topology
