"""Sizes nearby that give the guest what the one asked for cannot have; L3s of every size."""

import pytest
from lxml import etree
from msgspec import structs
from msgspec.structs import replace

from homenode.errors import HomenodeError
from homenode.machine.topology import Host
from homenode.plan import nearby
from homenode.plan.nearby import Gain, NearbySize, nearby_sizes
from homenode.plan.planner import plan
from homenode.plan.request import GuestRequest
from homenode.plan.tuning import tune
from homenode.units import GIB
from homenode.vm.domain.copy import new_domain
from homenode.vm.plan_options import PlanOptions
from homenode.vm.sources import load_host
from tests.plan.test_fabric import board
from tests.plan.test_gpus import hgx
from tests.small_hosts import asking, even_host, small_request

EPYC = (
    "epyc-nps4-gpu-nic",
    "epyc9654-2p-1node",
    "mi350x-epyc9575f",
    "rtx4090-epyc7702",
    "rtx5090-epyc7702",
)


def near(host: Host, request: GuestRequest) -> dict[int, tuple[Gain, ...]]:
    found = nearby_sizes(host, request, plan(host, request))
    return {one.count if one.of == "vCPU" else -one.count: one.wins for one in found}


def amd(nodes: int = 2, **changes: object) -> Host:
    """Nodes of one package, each with three LLCs of four cores."""
    return structs.replace(even_host(1, nodes, 3, 4, 2), **changes)


def test_the_nearest_size_on_either_side_is_named_with_what_it_wins() -> None:
    # 11 and 10 are 4, 4 and 3 or 2 on three LLCs; 9 is three on each.
    assert near(amd(), small_request(11, layout="pin-numa")) == {
        9: (Gain.CACHES,),
        12: (Gain.CACHES,),
    }
    # 13 on two nodes are 6 and 7; 12 would need one, 14 are 7 and 7: cells are equal, LLCs are not.
    found = near(amd(), small_request(13, layout="pin-numa"))
    assert found[12] == found[16] == (Gain.CELLS, Gain.CACHES)


def test_sizes_are_looked_for_only_as_long_as_the_search_for_the_vm_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nearby, "MOST_STEPS", 2)
    assert near(amd(), small_request(11, layout="pin-numa")) == {}


def test_nothing_is_named_where_nothing_is_missing_or_nothing_may_change() -> None:
    assert near(amd(), small_request(12, layout="pin-numa")) == {}
    assert near(amd(), small_request(11, layout="default")) == {}


def test_a_size_that_takes_more_of_the_host_is_not_named() -> None:
    # The twelfth vCPU would take the host's last core.
    assert near(amd(1), small_request(11, layout="pin-numa")) == {9: (Gain.CACHES,)}


def test_vcpus_that_share_cores_hear_how_many_would_not() -> None:
    host = even_host(1, 1, 1, 8, 2)
    assert near(host, small_request(9))[8] == (Gain.CORES,)


def test_siblings_go_together() -> None:
    request = replace(small_request(10, layout="pin-numa-smt"), keep_vcpus=True)
    host = even_host(1, 1, 3, 4, 2)  # five cores are four and one
    assert all(size % 2 == 0 for size in near(host, request))


def test_gpus_that_are_no_set_hear_which_numbers_are() -> None:
    def wanting(count: int) -> GuestRequest:
        return asking(small_request(8), gpu_count=count)

    assert near(board(), wanting(3)) == {-2: (Gain.GPU_SETS,), -4: (Gain.GPU_SETS,)}
    assert near(board(), wanting(2)) == near(board(), wanting(1)) == {}
    assert near(hgx(), wanting(3)) == {-2: (Gain.GPU_SETS,), -4: (Gain.GPU_SETS,)}
    assert near(hgx(), wanting(6)) == {}  # four and two


def test_the_same_plan_names_the_same_sizes() -> None:
    host, request = amd(), small_request(11, layout="pin-numa")
    made = plan(host, request)
    first = nearby_sizes(host, request, made)
    assert first == nearby_sizes(host, request, made)
    assert first[0] == NearbySize(9, "vCPU", (Gain.CACHES,))


def shown_llcs(document: bytes, host: Host) -> tuple[set[frozenset[int]], set[frozenset[int]]]:
    """Sets of vCPUs that share an L3: as an AMD guest is shown them by QEMU, and as they run.

    Written from QEMU's cpu_x86_cpuid and Linux' cacheinfo.c, apart from what plans are made of.
    """
    root = etree.fromstring(document)
    pins = [int(one.get("cpuset", "")) for one in root.findall("cputune/vcpupin")]  # in vCPU order
    llc_of = {int(pu): number for number, llc in enumerate(host.llcs) for pu in llc.pus}
    # Without a topology libvirt makes each vCPU a socket.
    sizes = {"sockets": len(pins), "dies": 1, "cores": 1, "threads": 1}
    for topology in root.findall("cpu/topology"):
        sizes |= {name: int(topology.get(name, "1")) for name in sizes}
    policy = {one.get("name"): one.get("policy") for one in root.findall("cpu/feature")}
    cache = root.find("cpu/cache")
    mode = None if cache is None else cache.get("mode")
    die = sizes["cores"] * sizes["threads"]
    has_topoext = policy.get("topoext") in ("require", "force")
    if mode == "disable":
        assert not has_topoext, "with topoext Linux takes the socket for one L3"
        return set(), set()
    if mode == "passthrough":
        (threads,) = {len(host.llcs[llc_of[pu]].pus) for pu in pins}
        core_bits = (sizes["cores"] - 1).bit_length() + (sizes["threads"] - 1).bit_length()
        shown_by = {
            vcpu: ((vcpu // die) << core_bits | vcpu % die) // (1 << (threads - 1).bit_length())
            for vcpu in range(len(pins))
        }
    else:
        share = die if has_topoext else die * sizes["dies"]
        shown_by = {vcpu: vcpu // share for vcpu in range(len(pins))}
    real = {vcpu: llc_of[pu] for vcpu, pu in enumerate(pins)}

    def sets(key: dict[int, int]) -> set[frozenset[int]]:
        return {frozenset(v for v in key if key[v] == one) for one in key.values()}

    return sets(shown_by), sets(real)


@pytest.mark.parametrize("name", EPYC)
@pytest.mark.parametrize("layout", ["pin-bound", "pin-numa"])
def test_no_size_on_an_epyc_host_leaves_a_false_l3(name: str, layout: str) -> None:
    host = load_host(name)
    for vcpus in range(2, 49):
        document = new_domain(vcpus, 16 * GIB, architecture="x86_64", name="vm")
        try:
            tuned = tune(document, "vm", PlanOptions(layout=layout), host)
        except HomenodeError:
            continue
        shown, real = shown_llcs(tuned.document, host)
        assert shown == real, vcpus
