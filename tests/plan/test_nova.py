"""Nova's failures, and its table of pinning cases as far as they are ours.

Source: openstack/nova, nova/tests/unit/virt/test_hardware.py (facts only) and measurements of
numa_fit_instance_to_host, which crosses a socket in 234 of 400 such placements and answers 90 of
1,500 asymmetric requests wrongly.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product

import pytest
from msgspec import structs

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import UsageError
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host, HostReserve
from homenode.plan.request import GuestRequest
from homenode.plan.search.place import place
from homenode.units import GIB
from homenode.vm.layout import PRESETS, Pinning, Siblings
from homenode.vm.plan import Unplannable
from homenode.vm.plan_options import Balance, Policy
from tests.brute_force import best_by_force, standing
from tests.seeds import seeds
from tests.small_hosts import (
    DeviceSpec,
    NodeSpec,
    asking,
    even_host,
    host_of,
    pinned_domain,
    small_request,
)


def test_of_400_two_cell_vms_none_crosses_a_socket_where_a_pair_within_one_fits() -> None:
    seeded = random.Random(9654)
    tried = seeds(400, every=4)
    two_cells = fitting = 0
    for _ in tried:
        in_use = CpuSet(seeded.sample(range(64), seeded.randint(8, 36)))
        host = even_host(2, 4, 1, 8, 1, domains=[pinned_domain(str(in_use))])
        free = [len(node.pus - in_use) for node in host.nodes]
        need = max(free) // 2 + 1
        placement = place(host, small_request(2 * need, GIB))
        nodes = placement.nodes
        if len(nodes) != 2:
            continue
        two_cells += 1
        pairs = [p for p in combinations(range(8), 2) if min(free[p[0]], free[p[1]]) >= need]
        if any(a // 4 == b // 4 for a, b in pairs):
            fitting += 1
            assert nodes[0] // 4 == nodes[1] // 4
    assert two_cells >= len(tried) * 0.5
    assert fitting >= len(tried) * 0.375


def uneven_case(seeded: random.Random) -> tuple[Host, GuestRequest]:
    specs = [
        NodeSpec(
            (((1,) * seeded.randint(1, 4)),),
            package=number // 2,
            memory_bytes=seeded.choice((2, 4, 8)) * GIB,
        )
        for number in range(seeded.randint(2, 6))
    ]
    total = sum(len(spec.llcs[0]) for spec in specs)
    in_use = CpuSet(seeded.sample(range(total), seeded.randint(0, total // 3)))
    host = host_of(specs, domains=[pinned_domain(str(in_use))] if in_use else [])
    request = small_request(seeded.randint(2, 8), seeded.choice((1, 3, 6, 10)) * GIB)
    return host, asking(
        request,
        unequal_cells=True,
        balance=seeded.choice((Balance.SPREAD, Balance.PACK)),
        host_reserve=HostReserve(memory_bytes=0),
    )


def test_no_asymmetric_request_is_answered_wrongly() -> None:
    seeded = random.Random(1500)
    tried = seeds(1500)
    placed = uneven = 0
    for _ in tried:
        host, request = uneven_case(seeded)
        best = best_by_force(host, request)
        try:
            placement = place(host, request)
        except Unplannable:
            assert best is None
            continue
        assert best is not None
        assert tuple(term.value for term in placement.cost)[:-1] == best.key[:-1]
        placed += 1
        uneven += len({placement.vcpu_nodes.count(i) for i in range(len(placement.nodes))}) > 1
    assert placed >= len(tried) * 0.45
    assert uneven >= len(tried) * 0.06


def plain_case(seeded: random.Random) -> tuple[Host, GuestRequest]:
    """Two to five nodes of two sockets with GPUs, some of all this taken, and a VM with some."""
    count = seeded.randint(2, 5)
    specs = [
        NodeSpec(
            ((1,) * seeded.randint(2, 5),),
            package=number * 2 // count,
            memory_bytes=seeded.choice((16, 32)) * GIB,
        )
        for number in range(count)
    ]
    gpus = [
        DeviceSpec(f"0000:{16 + number:02x}:00.0", node=seeded.randrange(count), root=number)
        for number in range(seeded.randint(0, 4))
    ]
    total = sum(len(spec.llcs[0]) for spec in specs)
    in_use = CpuSet(seeded.sample(range(total), seeded.randint(0, total // 2)))
    owned = tuple(gpu.bdf for gpu in gpus if seeded.random() < 0.3)
    host = host_of(specs, devices=gpus, domains=[pinned_domain(str(in_use), devices=owned)])
    free = len(gpus) - len(owned)
    request = small_request(
        seeded.randint(1, 8),
        seeded.choice((4, 8, 24)) * GIB,
        layout=seeded.choice(("pin", "pin-numa", "pin-numa-pci")),
    )
    return host, asking(request, gpu_count=seeded.randint(1, free) if free else None)


@dataclass(frozen=True)
class NovaCell:
    """What is free on a host cell."""

    cores: int  # whole ones, for the policies dedicated and isolate
    memory_bytes: int
    gpus: int = 0


def nova_cells(
    host: Sequence[NovaCell],
    guest_cells: int,
    *,
    cores: int,
    memory_bytes: int,
    gpus: int = 0,
    packs: bool = False,
    requires_gpus: bool = False,
) -> tuple[int, ...] | None:
    """The host cell of each guest cell by Nova's rules; None where none fits.

    cores, memory_bytes: of each guest cell. gpus: of the VM. requires_gpus: they must be on the
    chosen cells (PCI affinity policy "required"). packs: the fullest host cells first.
    Rules, not code, of nova/virt/hardware.py: host cells sorted (stably) by available memory, then
    free CPUs, then free devices; the first permutation in which every guest cell fits.
    """
    order = list(range(len(host)))
    if len(host) > guest_cells:
        order.sort(key=lambda cell: host[cell].memory_bytes, reverse=not packs)
        order.sort(key=lambda cell: host[cell].cores, reverse=not packs)
        order.sort(key=lambda cell: host[cell].gpus, reverse=gpus > 0)
    for chosen in permutations(order, guest_cells):
        fits = all(host[c].cores >= cores and host[c].memory_bytes >= memory_bytes for c in chosen)
        near = sum(host[cell].gpus for cell in chosen)
        if fits and (not requires_gpus or near >= gpus):
            return chosen
    return None


def nova_answers(
    host: Host, request: GuestRequest
) -> Iterator[tuple[tuple[int, ...], tuple[Bdf, ...]]]:
    """(host node of each cell, GPUs) by Nova, for each number of cells that divides the vCPUs."""
    (other,) = host.domains
    in_use = {pu for pin in other.vcpu_pins if pin is not None for pu in pin}
    open_gpus = [d for d in host.devices_of_kind(DeviceKind.GPU) if d.bdf not in other.devices]
    cells = [
        NovaCell(
            len(node.pus - CpuSet(in_use)),
            node.memory_bytes or 0,
            sum(gpu.node == node.index for gpu in open_gpus),
        )
        for node in host.nodes
    ]
    gpus = request.options.gpu_count or 0
    for number in range(1, len(cells) + 1):
        if request.vcpus % number:
            continue
        for packs, requires in product((False, True), repeat=2):
            chosen = nova_cells(
                cells,
                number,
                cores=request.vcpus // number,
                gpus=gpus,
                packs=packs,
                memory_bytes=request.memory_bytes // number,
                requires_gpus=requires,
            )
            if chosen is not None:
                near = sorted(open_gpus, key=lambda gpu: (gpu.node not in chosen, gpu.bdf))
                yield chosen, tuple(gpu.bdf for gpu in near[:gpus])


def test_no_fit_of_nova_is_better_by_our_order() -> None:
    seeded = random.Random(2632)
    tried = seeds(500, every=4)
    compared = equal = 0
    for _ in tried:
        host, request = plain_case(seeded)
        answers = list(nova_answers(host, request))
        if not answers:
            continue
        placement = place(host, request)
        ours = standing(
            host,
            request,
            Counter(placement.nodes[cell] for cell in placement.vcpu_nodes),
            placement.devices,
        )
        assert ours is not None
        for nodes, gpus in answers:
            theirs = standing(
                host, request, dict.fromkeys(nodes, request.vcpus // len(nodes)), gpus
            )
            assert theirs is None or ours <= theirs
            compared += 1
            equal += ours == theirs
    assert compared >= len(tried) * 2
    assert equal < compared / 2


def pus_of(host: Host, request: GuestRequest) -> list[int] | None:
    try:
        return [pu for pin in place(host, request).vcpu_pins for pu in pin]
    except Unplannable:
        return None


ALL_PUS = structs.replace(
    PRESETS["pin-numa-smt"],
    name="require",
    cells=PRESETS["pin"].cells,
    memory=PRESETS["pin"].memory,
)


def dedicated(vcpus: int, *, isolate: bool = True) -> GuestRequest:
    """isolate: a core for each vCPU; else every CPU, as Nova's prefer packs them."""
    request = small_request(vcpus, GIB, layout="pin" if isolate else ALL_PUS)
    return asking(
        request, keep_vcpus=True, policy=Policy.CORES_FIRST if isolate else Policy.MEMORY_FIRST
    )


ONE_THREAD = {count: even_host(1, 1, 1, count, 1) for count in (3, 4)}


@pytest.mark.parametrize(
    ("cores", "in_use", "vcpus", "expected"),
    [
        (3, "", 4, None),
        (4, "0", 4, None),
        (3, "", 3, [0, 1, 2]),
        (4, "1", 3, [0, 2, 3]),
    ],
)
def test_without_smt_a_vcpu_takes_each_free_core(
    cores: int, in_use: str, vcpus: int, expected: list[int] | None
) -> None:
    domains = [pinned_domain(in_use)] if in_use else []
    host = structs.replace(ONE_THREAD[cores], domains=tuple(domains))
    assert pus_of(host, dedicated(vcpus)) == expected


def test_a_vm_of_four_on_cores_of_four_threads_takes_one_whole_core() -> None:
    host = even_host(1, 1, 1, 2, 4)
    pus = pus_of(host, dedicated(4, isolate=False))
    assert pus == [0, 2, 4, 6]  # the threads of core 0


def test_no_vcpu_shares_a_core_with_another_vm() -> None:
    # Nova's prefer takes orphaned siblings; here one VM shares no core with another.
    host = even_host(1, 1, 1, 4, 2, domains=[pinned_domain("0,2,5,7")])
    assert pus_of(host, dedicated(4, isolate=False)) is None


@pytest.mark.parametrize(("in_use", "expected"), [("0-2", None), ("0-1", [2, 6, 3, 7])])
def test_whole_sibling_groups_of_untouched_cores_are_found(
    in_use: str, expected: list[int] | None
) -> None:
    host = even_host(1, 1, 1, 4, 2, domains=[pinned_domain(in_use)])
    assert pus_of(host, dedicated(4, isolate=False)) == expected


@pytest.mark.parametrize(("in_use", "expected"), [("1", [0, 2]), ("", [0, 1])])
def test_isolate_takes_untouched_cores_and_siblings_only_where_these_are_too_few(
    in_use: str, expected: list[int]
) -> None:
    domains = [pinned_domain(in_use)] if in_use else []
    host = even_host(1, 1, 1, 2, 2, domains=domains)
    assert pus_of(host, dedicated(2)) == expected


@pytest.mark.parametrize(
    ("balance", "expected"), [(Balance.PACK, (0, 1, 3)), (Balance.SPREAD, (1, 2, 3))]
)
def test_three_cells_go_to_the_fullest_or_emptiest_nodes(
    balance: Balance, expected: tuple[int, ...]
) -> None:
    specs = [NodeSpec(((1,) * 4,), memory_bytes=GIB * (16 if i == 3 else 8)) for i in range(4)]
    # Free cores 1, 2, 4 and 2; node 3 has the most memory.
    host = host_of(specs, domains=[pinned_domain("0-2,4-5,12-13")])
    request = asking(small_request(3, 3 * GIB), balance=balance, policy=Policy.SPREAD, max_nodes=3)
    assert place(host, request).nodes == expected


def test_exposed_siblings_that_are_not_pinned_are_a_usage_error() -> None:
    clash = structs.replace(
        PRESETS["pin-numa"], name="custom", siblings=Siblings.EXPOSED, pinning=Pinning.ONE_PER_CORE
    )
    with pytest.raises(UsageError, match="siblings are exposed"):
        place(even_host(), small_request(2, layout=clash))
