"""More vCPUs never get fewer cores, and their memory is not further away without a reason."""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec import structs

import homenode
from homenode.cpuset import CpuSet
from homenode.machine.topology import Host
from homenode.plan.placement import Placement
from homenode.plan.request import GuestRequest
from homenode.plan.search.place import place
from homenode.units import GIB
from homenode.vm.layout import PRESETS, Layout, Pinning
from homenode.vm.plan import Unplannable
from homenode.vm.plan_options import Policy
from homenode.vm.sources import load_host
from tests.seeds import part
from tests.small_hosts import asking, small_request

HOSTS = sorted((Path(homenode.__file__).parent / "machine/hosts").glob("*.toml"))
FLOATING = structs.replace(PRESETS["pin"], pinning=Pinning.NODE, name="custom")
LAYOUTS = (*(one for name, one in PRESETS.items() if name != "default"), FLOATING)
WAYS = (
    *(
        (layout, policy, False)
        for layout in LAYOUTS
        for policy in (Policy.CORES_FIRST, Policy.SPREAD)
    ),
    *((layout, Policy.CORES_FIRST, True) for layout in LAYOUTS if layout.name.endswith("-smt")),
    (FLOATING, Policy.MEMORY_FIRST, False),
    (PRESETS["pin-numa-smt"], Policy.MEMORY_FIRST, True),
)


def request(layout: Layout, policy: Policy, keeps: bool, vcpus: int) -> GuestRequest:
    wanted = small_request(vcpus, 2 * GIB)
    return asking(wanted, layout=layout, policy=policy, keep_vcpus=keeps)


def attempt(host: Host, wanted: GuestRequest) -> Placement | None:
    try:
        return place(host, wanted, brief=True)
    except Unplannable:
        return None


def cores_used(host: Host, placement: Placement) -> int:
    pus = CpuSet.union(placement.vcpu_pins)
    return sum(not core.pus.isdisjoint(pus) for core in host.cores)


def reach(host: Host, placement: Placement) -> tuple[int, int]:
    """(nodes, worst distance between two of them)."""
    nodes = sorted(set(placement.nodes))
    return len(nodes), max((host.find_distance(a, b) or 0 for a in nodes for b in nodes), default=0)


def climb(
    host: Host, way: tuple[Layout, Policy, bool], counts: Iterable[int]
) -> Iterator[tuple[GuestRequest, Placement]]:
    """The placements of ever more vCPUs, to the first number that the host refuses."""
    refused = 0
    for vcpus in counts:
        wanted = request(*way, vcpus)
        placement = attempt(host, wanted)
        assert placement is None or not refused, f"{refused} vCPUs are refused, {vcpus} are not"
        if placement is None:
            refused = vcpus
        else:
            yield wanted, placement


def has_reason(host: Host, wanted: GuestRequest, placement: Placement, before: Placement) -> bool:
    """Whether no nodes as few and as near as before hold the VM with nothing more given up."""
    near = attempt(host, asking(wanted, max_nodes=len(set(before.nodes))))
    if near is None or not set(near.relaxations) <= set(placement.relaxations):
        return True
    return reach(host, near) > reach(host, before)


def check_ladder(
    host: Host, layout: Layout, policy: Policy, keeps: bool, counts: Iterable[int]
) -> None:
    steps = list(climb(host, (layout, policy, keeps), counts))
    assert steps
    for (_, before), (wanted, after) in pairwise(steps):
        say = f"{layout.name} {policy} at {wanted.vcpus} vCPUs"
        assert cores_used(host, before) <= cores_used(host, after), say
        if reach(host, before) < reach(host, after) and policy is not Policy.SPREAD:
            assert has_reason(host, wanted, after, before), say


def edges(host: Host) -> list[int]:
    """Numbers of vCPUs about those of the cores of a node and of the host, and of the CPUs."""
    cores, pus = len(host.cores), len(host.pus)
    node = max(sum(core.pus <= one.pus for core in host.cores) for one in host.nodes)
    near = {edge + more for edge in (node, cores) for more in (-2, -1, 0, 1, 2)}
    return sorted(n for n in near | {1, cores + cores // 3, pus - 1, pus} if 0 < n <= pus)


@pytest.mark.parametrize("path", part(HOSTS, 0, every=9), ids=lambda path: path.stem)
def test_more_vcpus_never_get_fewer_cores_or_further_memory(path: Path) -> None:
    host = load_host(str(path))
    for number, way in enumerate(WAYS):
        counts = edges(host)
        # Large hosts: some of the numbers in each way, all of them together.
        check_ladder(host, *way, counts if len(host.pus) < 64 else counts[number % 3 :: 3])


@pytest.mark.lab
@pytest.mark.parametrize("path", HOSTS, ids=lambda path: path.stem)
def test_nor_at_any_number_of_vcpus(path: Path) -> None:
    host = load_host(str(path))
    for way in WAYS:
        check_ladder(host, *way, range(1, len(host.pus) + 1))
