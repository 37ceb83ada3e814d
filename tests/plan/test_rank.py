"""Hosts in order, and distances as the planner reads them."""

from collections.abc import Sequence
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from msgspec.structs import replace

from homenode.machine.topology import Host
from homenode.plan.planner import RankedHost, rank
from homenode.plan.request import GuestRequest
from homenode.plan.search.distances import distance_matrix
from homenode.plan.search.supply import fewest
from homenode.units import GIB
from homenode.vm.model import GuestTopology
from homenode.vm.plan import Unplannable
from homenode.vm.plan_options import Balance, DocumentSiblings
from tests.small_hosts import DeviceSpec, asking, even_host, pinned_domain, small_request


def ranked(hosts: Sequence[Host], request: GuestRequest) -> tuple[RankedHost, ...]:
    return rank([(host, request) for host in hosts])


def names(*hosts: Host, request: GuestRequest | None = None) -> list[str]:
    return [item.host.name for item in ranked(hosts, request or small_request(4))]


def test_the_emptiest_of_equal_hosts_comes_first_or_last_to_pack() -> None:
    busy = even_host(1, 1, 1, 8, 1, name="busy", domains=[pinned_domain("0-2")])
    idle = even_host(1, 1, 1, 8, 1, name="idle")
    assert names(busy, idle) == ["idle", "busy"]
    assert names(busy, idle, request=asking(small_request(4), balance=Balance.PACK)) == [
        "busy",
        "idle",
    ]


def test_free_memory_decides_between_hosts_with_as_many_free_cores() -> None:
    small = even_host(1, name="small", memory_bytes=32 * GIB)
    large = even_host(1, name="large", memory_bytes=64 * GIB)
    assert names(small, large) == ["large", "small"]


def test_a_host_that_needs_one_node_comes_before_one_that_needs_two() -> None:
    narrow = even_host(2, 1, 1, 2, 1, name="narrow")
    wide = even_host(1, 1, 1, 4, 1, name="wide")
    assert names(narrow, wide) == ["wide", "narrow"]


def test_whole_cores_of_two_nodes_come_before_the_siblings_of_one() -> None:
    request = small_request(8)
    shown = structs.replace(request.guest, cpu_topology=GuestTopology(1, 1, 4, 2))
    request = replace(request, guest=shown, document_siblings=DocumentSiblings.WHEN_SHORT)
    idle = even_host(2, 1, 1, 6, 2, name="idle")
    busy = even_host(2, 1, 1, 6, 2, name="busy", domains=[pinned_domain("0-4")])
    assert names(busy, idle, request=request) == ["idle", "busy"]
    (siblings,) = ranked([busy], request)
    assert siblings.placement is not None
    assert (len(siblings.placement.nodes), siblings.placement.threads_per_core) == (1, 2)


def test_a_host_that_cannot_hold_the_vm_comes_last_with_its_reasons() -> None:
    tiny = even_host(1, 1, 1, 2, 1, name="tiny")
    fine = even_host(1, name="fine")
    last = ranked((tiny, fine), small_request(4))[-1]
    assert last.host.name == "tiny"
    assert last.placement is None
    assert isinstance(last.refusal, Unplannable)
    assert last.refusal.rejections


def test_a_host_without_the_documents_device_comes_last_and_says_so() -> None:
    bare = even_host(1, name="bare")
    fine = even_host(1, name="fine", devices=[DeviceSpec("0000:10:00.0")])
    last = ranked((bare, fine), small_request(4, devices=["10:00.0"]))[-1]
    assert last.host.name == "bare"
    assert "0000:10:00.0" in str(last.refusal)


def test_equal_hosts_keep_the_order_given() -> None:
    hosts = [even_host(1, name=name) for name in ("b", "a", "c")]
    assert names(*hosts) == ["b", "a", "c"]


def test_a_gpu_near_free_cores_ranks_its_host_first() -> None:
    gpu = [DeviceSpec("0000:10:00.0", 0), DeviceSpec("0000:90:00.0", 1, root=1)]
    in_use = [pinned_domain("0-3,4-7", name="a", devices=("90:00.0",))]
    far = even_host(2, 1, 1, 8, 1, devices=gpu, domains=in_use, name="far")
    near = even_host(2, 1, 1, 8, 1, devices=gpu, name="near")
    assert names(far, near, request=asking(small_request(4), gpu_count=1)) == ["near", "far"]


def test_a_host_on_which_nothing_gave_way_comes_first() -> None:
    hides = even_host(1, 1, 1, 4, 1, name="no-smt")
    shows = even_host(2, 1, 1, 2, 2, name="smt")
    request = small_request(4, layout="pin-numa-smt")
    assert ranked((hides, shows), request)[0].host.name == "no-smt"


def test_a_host_without_distances_is_read_as_linux_reads_it() -> None:
    host = even_host(2, tells_distances=False)
    assert distance_matrix(host).between == ((10, 20), (20, 10))


def test_the_worse_direction_of_a_pair_counts() -> None:
    host = even_host(2, distances=((10, 14), (32, 10)))
    assert distance_matrix(host).between == ((10, 32), (32, 10))


def test_packages_are_as_far_as_their_nearest_nodes() -> None:
    table = ((10, 12, 21, 22), (12, 10, 23, 24), (21, 23, 10, 12), (22, 24, 12, 10))
    matrix = distance_matrix(even_host(2, 2, 1, 4, 1, distances=table))
    assert matrix.to_packages(1) == {0: 10, 1: 21}


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.integers(0, 20))
def test_the_fewest_groups_are_drawn_from_and_of_those_the_tightest(
    counts: list[int], wanted: int
) -> None:
    chosen = fewest(counts, wanted)
    enough = [
        (size, sum(counts[i] for i in some), some)
        for size in range(1, len(counts) + 1)
        for some in combinations(range(len(counts)), size)
        if sum(counts[i] for i in some) >= wanted
    ]
    if wanted <= 0 or not enough:
        assert chosen == ()
    else:
        assert chosen == min(enough)[2]
