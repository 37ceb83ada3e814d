"""What every placement has, whatever the host: on the random hosts of the brute-force test."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from homenode.cpuset import CpuSet
from homenode.machine.topology import Host
from homenode.plan.placement import Placement
from homenode.plan.request import GuestRequest
from homenode.plan.search.place import place
from homenode.vm.layout import PRESETS
from homenode.vm.plan import Unplannable
from homenode.vm.plan_options import EmulatorPolicy
from tests.plan.test_against_brute_force import small_host, small_wish
from tests.small_hosts import asking

MANY = settings(max_examples=80, deadline=None, derandomize=True)


def attempt(host: Host, request: GuestRequest) -> Placement | None:
    try:
        return place(host, request)
    except Unplannable as refusal:
        assert refusal.rejections
        assert all(rejection.detail for rejection in refusal.rejections)
        return None


def check_pins(host: Host, request: GuestRequest, placement: Placement) -> None:
    used = [pu for pin in placement.vcpu_pins for pu in pin]
    assert all(len(pin) == 1 for pin in placement.vcpu_pins)
    assert len(used) == len(set(used)) == len(placement.vcpu_nodes)
    assert list(placement.vcpu_nodes) == sorted(placement.vcpu_nodes)
    nodes = {node.index: node.pus for node in host.nodes}
    for pu, cell in zip(used, placement.vcpu_nodes, strict=True):
        assert pu in nodes[placement.nodes[cell]]
    core_of = {pu: core.index for core in host.cores for pu in core.pus}
    if placement.threads_per_core > 1:
        step = placement.threads_per_core
        for first in range(0, len(used), step):
            assert len({core_of[pu] for pu in used[first : first + step]}) == 1
    if request.layout is PRESETS["pin-numa"] and placement.layout is None:
        assert len({core_of[pu] for pu in used}) == len(used)
    mine = CpuSet(used) | (placement.emulator_pus or CpuSet())
    for pins in placement.iothread_pus:
        mine |= pins
    assert mine.isdisjoint(request.options.reserved_pus)
    barred = CpuSet(pu.index for pu in host.pus if not pu.allowed)
    assert mine.isdisjoint(barred)
    cores = {core_of[pu] for pu in mine}
    for domain in host.domains:
        if domain.name in request.options.replaces:
            continue
        if domain.running or domain.planned or request.options.reserve_defined:
            for pin in domain.vcpu_pins:
                online = pin is not None and len(host.cores) > 0
                covers = pin is not None and all(c.pus <= pin for c in host.cores)
                if online and pin is not None and not covers:
                    assert not {core_of[pu] for pu in pin if pu in core_of} & cores
    kept = CpuSet(pu.index for pu in host.pus if pu.isolated or pu.nohz_full)
    finding = {f.id for f in placement.findings}
    if placement.emulator_pus is not None and "emulator-shares-vcpus" not in finding:
        assert placement.emulator_pus.isdisjoint(kept)
        assert placement.emulator_pus.isdisjoint(CpuSet(used))


@given(st.randoms(use_true_random=False))
@MANY
def test_each_vcpu_is_pinned_once_and_no_pu_is_used_twice(draw: random.Random) -> None:
    host = small_host(draw)
    request = asking(
        small_wish(draw, host),
        emulator_policy=draw.choice((EmulatorPolicy.AUTO, EmulatorPolicy.NONE)),
    )
    placement = attempt(host, request)
    if placement is not None:
        check_pins(host, request, placement)


@given(st.randoms(use_true_random=False))
@MANY
def test_freeing_a_pu_never_makes_a_request_unplannable(draw: random.Random) -> None:
    host = small_host(draw)
    request = small_wish(draw, host)
    if attempt(host, request) is None:
        return
    pu = draw.choice([pu.index for pu in host.pus])
    freer = structs.replace(
        host,
        pus=tuple(structs.replace(p, allowed=p.allowed or p.index == pu) for p in host.pus),
        domains=tuple(
            structs.replace(
                domain,
                vcpu_pins=tuple(
                    pin for pin in domain.vcpu_pins if pin is not None and pu not in pin
                ),
            )
            for domain in host.domains
        ),
    )
    asked = asking(request, reserved_pus=request.options.reserved_pus - CpuSet([pu]))
    assert attempt(freer, asked) is not None


@given(st.randoms(use_true_random=False))
@MANY
def test_same_host_and_request_give_the_same_placement(draw: random.Random) -> None:
    host = small_host(draw)
    request = small_wish(draw, host)
    first, second = attempt(host, request), attempt(host, request)
    assert first == second
    assert repr(first) == repr(second)


@pytest.mark.parametrize("seed", [53, 665, 1286, 2596])
def test_equal_cells_that_are_also_best_on_their_nodes_are_one_runner_up(seed: int) -> None:
    draw = random.Random(seed)
    host = small_host(draw)
    placement = attempt(host, small_wish(draw, host))
    assert placement is not None
    found = [(other.nodes, other.devices) for other in placement.runners_up]
    assert len(found) == len(set(found)) > 0


@given(st.randoms(use_true_random=False))
@MANY
def test_runners_up_cost_more_and_name_the_term_that_decided(draw: random.Random) -> None:
    host = small_host(draw)
    placement = attempt(host, small_wish(draw, host))
    if placement is None:
        return
    own = [term.value for term in placement.cost]
    seen = {(tuple(dict.fromkeys(placement.nodes)), placement.devices)}
    for other in placement.runners_up:
        theirs = [term.value for term in other.cost]
        assert own < theirs
        differs = next(i for i, (a, b) in enumerate(zip(own, theirs, strict=True)) if a != b)
        assert other.decided_by == placement.cost[differs].name
        assert (other.nodes, other.devices) not in seen
        seen.add((other.nodes, other.devices))
