"""`auto` on hosts with full nodes, memory-less nodes, page pools and GPUs: it refuses only what no
flat layout holds, and no placement is better or breaks a rule."""

import os
import random
from collections import Counter

import pytest
from msgspec import structs

from homenode.cpuset import CpuSet
from homenode.machine.topology import Host
from homenode.plan.planner import FLAT, plan, resolve_layout
from homenode.plan.request import GuestRequest, request_for
from homenode.plan.search.place import place
from homenode.vm.layout import GuestCells, MemoryBinding
from homenode.vm.model import Vm
from homenode.vm.plan import Plan, Unplannable
from homenode.vm.plan_options import AUTO, DeviceLocality, PlanOptions, Policy
from tests.brute_force import best_by_force
from tests.plan.test_against_brute_force import (
    celled_host,
    compare,
    crowded_host,
    paired_host,
    small_host,
    small_wish,
    wide_host,
)
from tests.plan.test_properties import check_pins
from tests.seeds import seeds

SEED = int(os.environ.get("HOMENODE_SEED", "20261128"))
HOSTS = (*(small_host,) * 4, wide_host, celled_host, paired_host, crowded_host)


def filled_host(draw: random.Random) -> Host:
    """A host on which the memory of one node in four is used up."""
    host = draw.choice(HOSTS)(draw)
    nodes = (
        structs.replace(node, memory_free_bytes=0)
        if node.memory_bytes and draw.random() < 0.25
        else node
        for node in host.nodes
    )
    return structs.replace(host, nodes=tuple(nodes))


def auto_wish(draw: random.Random, host: Host) -> tuple[Vm, PlanOptions]:
    wish = small_wish(draw, host)
    options, names = wish.options, {domain.name for domain in host.domains}
    memory_first = options.policy is Policy.MEMORY_FIRST
    return wish.guest, structs.replace(
        options,
        layout=AUTO,
        devices=wish.devices,
        page_bytes=wish.page_bytes,
        policy=Policy.CORES_FIRST if memory_first else options.policy,
        device_locality=draw.choice((options.device_locality, DeviceLocality.REQUIRE)),
        reserved_pus=options.reserved_pus & CpuSet(pu.index for pu in host.pus if pu.online),
        replaces=tuple(names.intersection(options.replaces)),
    )


def check_memory(host: Host, request: GuestRequest, made: Plan) -> None:
    """The cells have all memory, each from its node: free there, huge, or of an ignored VM."""
    assert sum(cell.memory_bytes for cell in made.cells) == request.memory_bytes
    if request.layout.memory is not MemoryBinding.BOUND_PER_CELL:
        return
    freed = Counter[int]()
    for domain in host.domains:
        if domain.name in request.options.replaces:
            freed.update(dict(domain.memory_by_node))
    for node in host.nodes:
        free = node.memory_bytes if node.memory_free_bytes is None else node.memory_free_bytes
        pools = sum(pool.page_bytes * pool.free_pages for pool in node.page_pools)
        used = sum(cell.memory_bytes for cell in made.cells if cell.host_nodes == (node.index,))
        assert used <= (free or 0) + pools + freed[node.index]


@pytest.mark.parametrize("number", seeds(1300, every=26))
def test_auto_refuses_only_what_no_flat_layout_holds(number: int) -> None:
    print(f"HOMENODE_SEED={SEED}, host {number}")
    draw = random.Random(SEED * 10_000 + number)
    host = filled_host(draw)
    guest, options = auto_wish(draw, host)
    resolved = resolve_layout(guest, options, host).options
    request = request_for(guest, resolved, host)
    compare(host, request)
    flat = request_for(guest, structs.replace(options, layout=FLAT), host)
    try:
        made = plan(host, request)
    except Unplannable:
        assert best_by_force(host, flat) is None
        return
    if resolved.layout == FLAT:
        assert made.layout.cells is GuestCells.SINGLE
    check_memory(host, request, made)
    check_pins(host, request, place(host, request))
