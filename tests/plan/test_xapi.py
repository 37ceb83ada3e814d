"""XAPI's cases: cores before threads, balance over nodes, and its table of hosts.

Source: xapi-project/xen-api, test_topology.ml (facts only) and pull request 6763.
"""

import pytest
from msgspec import structs

from homenode.cpuset import CpuSet
from homenode.errors import UsageError
from homenode.machine.topology import Host, RunningDomain
from homenode.plan.placement import Placement
from homenode.plan.request import GuestRequest
from homenode.plan.search.place import place
from homenode.units import GIB
from homenode.vm.plan import Relaxation, Unplannable
from homenode.vm.plan_options import EmulatorPolicy, Policy
from tests.small_hosts import asking, even_host, small_request

XAPI_HOST = even_host(2, 1, 1, 16, 2, memory_bytes=512 * GIB)


def as_domain(name: str, placement: Placement, request: GuestRequest) -> RunningDomain:
    share = request.memory_bytes // len(placement.nodes)
    return RunningDomain(
        name,
        True,
        placement.vcpu_pins,
        placement.emulator_pus,
        (),
        request.memory_bytes,
        True,
        tuple((node, share) for node in placement.nodes),
        request.page_bytes,
        (),
    )


def fill(host: Host, requests: list[GuestRequest]) -> list[Placement]:
    """Place the VMs in turn, each next to those before; QEMU's threads on the vCPUs' CPUs."""
    placements = []
    for number, request in enumerate(
        asking(r, emulator_policy=EmulatorPolicy.SHARE) for r in requests
    ):
        placement = place(host, request)
        placements.append(placement)
        domain = as_domain(f"other{number}", placement, request)
        host = structs.replace(host, domains=(*host.domains, domain))
    return placements


def test_32_vcpus_take_32_cores_of_both_nodes_when_cores_count() -> None:
    placement = place(XAPI_HOST, small_request(32, 64 * GIB, layout="pin-numa"))
    assert placement.nodes == (0, 1)
    used = CpuSet(pu for pin in placement.vcpu_pins for pu in pin)
    assert used == CpuSet.parse("0-31")  # one CPU of each of the 32 cores
    assert placement.threads_per_core == 1


def test_32_vcpus_take_the_32_pus_of_one_node_when_memory_comes_first() -> None:
    request = asking(
        small_request(32, 64 * GIB, layout="pin-numa-smt"),
        policy=Policy.MEMORY_FIRST,
        keep_vcpus=True,
    )
    placement = place(XAPI_HOST, request)
    assert placement.nodes == (0,)
    assert len(placement.vcpu_pins) == 32
    assert [str(pin) for pin in placement.vcpu_pins[:4]] == ["0", "32", "1", "33"]
    assert placement.threads_per_core == 2


def test_memory_first_needs_a_layout_that_pins_all_pus() -> None:
    with pytest.raises(UsageError, match="memory-first"):
        place(XAPI_HOST, asking(small_request(4), policy=Policy.MEMORY_FIRST))


def test_5_vcpus_need_two_nodes_of_4_cores_but_one_of_8_threads() -> None:
    host = even_host(2, 1, 1, 4, 2)
    flat = small_request(5, layout="pin")
    assert len(place(host, flat).nodes) == 2
    by_memory = asking(
        small_request(5, layout="pin-numa-smt"), policy=Policy.MEMORY_FIRST, keep_vcpus=True
    )
    placement = place(host, by_memory)
    assert placement.nodes == (0,)
    assert len(placement.vcpu_pins) == 5
    assert Relaxation.SIBLINGS_NOT_EXPOSED in placement.relaxations


def test_four_vms_after_a_large_one_do_not_pile_on_one_node() -> None:
    host = even_host(2, 1, 1, 32, 2, memory_bytes=1024 * GIB)
    large = small_request(8, 256 * GIB)
    small = [small_request(4, 64 * GIB) for _ in range(4)]
    placements = fill(host, [large, *small])
    homes = [placement.nodes[0] for placement in placements]
    assert homes[0] == 0
    assert set(homes[1:]) == {0, 1}
    assert homes[1] == 1  # the free node first


@pytest.mark.parametrize("nodes", [2, 4, 8, 16])
def test_equal_vms_spread_over_all_nodes_before_any_gets_a_second(nodes: int) -> None:
    host = even_host(nodes, 1, 1, 4, 2, distances=line(nodes))
    placements = fill(host, [small_request(2, GIB) for _ in range(nodes + 1)])
    homes = [placement.nodes[0] for placement in placements]
    assert sorted(homes[:-1]) == list(range(nodes))
    assert all(len(placement.nodes) == 1 for placement in placements)


def line(count: int) -> tuple[tuple[int, ...], ...]:
    """XAPI's example matrix: nodes in a row, 11 further for each step."""
    return tuple(tuple(10 + 11 * abs(i - j) for j in range(count)) for i in range(count))


@pytest.mark.parametrize("nodes", [16, 32, 64])
def test_a_vm_larger_than_a_node_gets_neighbours_however_many_nodes_there_are(nodes: int) -> None:
    host = even_host(nodes, 1, 1, 8, 2, distances=line(nodes))
    for count in (2, 4, nodes // 2):
        placement = place(host, small_request(8 * count, GIB))
        assert placement.nodes == tuple(range(count))


OPTERON = (
    (10, 16, 16, 22, 16, 22, 16, 22),
    (16, 10, 22, 16, 16, 22, 22, 16),
    (16, 22, 10, 16, 16, 16, 16, 16),
    (22, 16, 16, 10, 16, 16, 22, 22),
    (16, 16, 16, 16, 10, 16, 16, 22),
    (22, 22, 16, 16, 16, 10, 22, 16),
    (16, 22, 16, 22, 16, 22, 10, 16),
    (22, 16, 16, 22, 22, 16, 16, 10),
)


def test_a_mesh_of_eight_nodes_gives_pairs_and_triples_one_hop_apart() -> None:
    host = even_host(8, 1, 1, 4, 1, distances=OPTERON)
    for count in (2, 3):
        placement = place(host, small_request(4 * count, GIB))
        distances = [OPTERON[a][b] for a in placement.nodes for b in placement.nodes if a != b]
        assert set(distances) == {16}
        assert placement.optimal is True


def test_a_vm_whose_memory_exceeds_a_node_takes_near_pairs_until_all_are_full() -> None:
    host = even_host(8, 1, 1, 4, 1, distances=OPTERON, memory_bytes=16 * GIB)
    requests = [small_request(4, 20 * GIB) for _ in range(4)]
    placements = fill(host, requests)
    for placement in placements:
        a, b = placement.nodes
        assert OPTERON[a][b] == 16
    assert sorted(node for placement in placements for node in placement.nodes) == list(range(8))


def test_unreachable_nodes_never_serve_one_vm() -> None:
    far = ((10, 255, 20), (255, 10, 255), (20, 255, 10))
    host = even_host(3, 1, 1, 4, 1, distances=far)
    assert place(host, small_request(8, GIB)).nodes == (0, 2)
    with pytest.raises(Unplannable) as refusal:
        place(host, small_request(12, GIB))
    assert any(r.constraint == "distance" for r in refusal.value.rejections)
