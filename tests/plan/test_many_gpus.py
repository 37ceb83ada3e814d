"""GPUs to choose, on hosts of few and of many: no set is missed, and the rest stays usable."""

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise, permutations, product
from types import FrameType

import pytest
from msgspec import structs

from homenode.bdf import Bdf
from homenode.machine.pci import DeviceKind, DeviceLink, LinkKind
from homenode.machine.topology import Host
from homenode.plan.devices.options import GpuTies
from homenode.plan.request import GuestRequest
from homenode.plan.search.place import place
from homenode.units import GIB
from homenode.vm.plan import Relaxation, Unplannable
from homenode.vm.plan_options import Balance
from homenode.vm.sources import load_host
from tests.figures import numbers
from tests.plan.test_against_brute_force import compare
from tests.seeds import part, seeds
from tests.small_hosts import (
    DeviceSpec,
    NodeSpec,
    asking,
    even_host,
    host_of,
    pinned_domain,
    small_request,
)

MAX_CALLS = 100_000
LARGEST = "x86-2p8n128c256t-64gpu"


def calls_of(run: Callable[[], object]) -> int:
    """Calls of Python functions in the run, which do not depend on the machine."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def without_nodes(host: Host, every: int) -> Host:
    """The host whose firmware gives no node of every n-th GPU."""
    gpus = [gpu.bdf for gpu in host.devices_of_kind(DeviceKind.GPU)][::every]
    devices = (structs.replace(d, node=None) if d.bdf in gpus else d for d in host.pci_devices)
    return structs.replace(host, pci_devices=tuple(devices))


@pytest.mark.parametrize(
    ("layout", "every"),
    part(list(product(("pin", "pin-numa-pci", "default"), (0, 1, 3))), 1, every=4),
)
def test_no_number_of_gpus_makes_a_plan_work_through_their_sets(layout: str, every: int) -> None:
    host = load_host(LARGEST)
    host = without_nodes(host, every) if every else host
    for count in (1, 2, 8, 31, 33, 64):
        request = asking(small_request(8, 64 * GIB, layout=layout), gpu_count=count)
        assert calls_of(partial(place, host, request)) < MAX_CALLS, count


def tree(gpus: int, *sizes: int) -> tuple[int, ...]:
    """Sets of so many GPUs one after the other, as switches and nodes have them."""
    return tuple(((1 << size) - 1) << first for size in sizes for first in range(0, gpus, size))


def lowest_first(gpus: int) -> tuple[int, ...]:
    return tuple(-1 << gpus - number for number in range(gpus))


def test_choosing_among_four_times_the_gpus_takes_no_more_than_sixteen_times_the_work() -> None:
    def work(gpus: int) -> int:
        ties = GpuTies(tree(gpus, 2, 4, 8, 16), lowest_first(gpus))
        return calls_of(lambda: ties.fewest_broken(0, (((1 << gpus) - 1, gpus // 2 + 1),)))

    assert work(64) < 16 * work(16)
    assert work(256) < 16 * work(64)


def trying_all(ties: GpuTies, sure: int, tied: list[tuple[int, int]]) -> int:
    """The same choice, by trying every one."""

    def cost(mine: int) -> tuple[int, int]:
        broken = sum(bool(one & mine) and bool(one & ~mine) for one in ties.sets)
        ranks = sum(rank for number, rank in enumerate(ties.ranks) if mine >> number & 1)
        return broken, ranks

    ways = [
        [sum(some) for some in combinations([1 << n for n in range(12) if gpus >> n & 1], number)]
        for gpus, number in tied
    ]
    return min((sum(way) for way in product(*ways)), key=lambda gpus: cost(gpus | sure))


def test_of_many_nodes_one_in_each_package_of_gpus_is_found() -> None:
    devices = [
        DeviceSpec(f"{16 * package + n + 1:02x}:00.0", node=4 * package + n, root=8 * package + n)
        for package in range(4)
        for n in range(2)
    ]
    host = even_host(5, 4, 1, 2, devices=devices)
    named = tuple(Bdf.parse(device.bdf) for device in devices)
    request = asking(small_request(8, layout="pin"), devices=named)
    assert place(host, request).nodes == (0, 4, 8, 12)


def test_of_many_nodes_the_two_with_the_memory_are_found() -> None:
    gib_of_node = {3: 128, 11: 40}
    host = host_of(
        [NodeSpec(((2, 2),), n // 4, memory_bytes=gib_of_node.get(n, 16) * GIB) for n in range(20)]
    )
    request = small_request(4, 150 * GIB, layout="pin-bound")
    pack = asking(request, max_nodes=2, balance=Balance.PACK)
    placed = place(host, pack)
    assert (placed.nodes, placed.relaxations) == ((3, 11), (Relaxation.UNEVEN_MEMORY,))
    (finding,) = (f for f in placed.findings if f.id == "memory-uneven")
    assert (finding.severity, finding.fix) == ("info", None)


def test_no_choice_among_equally_near_gpus_breaks_fewer_sets() -> None:
    for seed in range(400):
        draw = random.Random(seed)
        sets = [sum(1 << n for n in draw.sample(range(12), draw.randint(2, 6))) for _ in range(4)]
        sets += draw.sample(tree(12, 2, 3, 6), draw.randint(0, 8))
        order = draw.sample(range(12), 12)
        ties = GpuTies(tuple(dict.fromkeys(sets)), lowest_first(12))
        bounds = sorted(draw.sample(range(12), 3))
        parts = [order[a:b] for a, b in pairwise(bounds)]
        tied = [(sum(1 << n for n in part), draw.randint(1, len(part))) for part in parts]
        sure = sum(1 << n for n in order[: bounds[0]] if draw.random() < 0.5)
        assert ties.fewest_broken(sure, tied) == (trying_all(ties, sure, tied), True), seed


def test_of_too_many_overlapping_sets_a_choice_is_made_that_is_not_called_the_best() -> None:
    rows = tree(64, 8)
    columns = tuple(sum(1 << 8 * row + column for row in range(8)) for column in range(8))
    ties = GpuTies((*rows, *columns), lowest_first(64))
    chosen, is_complete = ties.fewest_broken(0, (((1 << 64) - 1, 32),))
    assert chosen.bit_count() == 32 and not is_complete


def host_of_many(draw: random.Random) -> Host:
    """Six to eight GPUs on one to four nodes, some with a second function: of a board that does
    not give its modules, joined by bridges, or neither."""
    packages, per_package = draw.choice(((1, 2), (2, 1), (2, 2), (1, 4)))
    nodes, number = packages * per_package, draw.randint(6, 8)
    specs = []
    for i in range(number):
        node = draw.choice((None, *range(nodes))) if draw.random() < 0.3 else i * nodes // number
        bdf = f"0000:{16 + i:02x}:00"
        specs.append(DeviceSpec(f"{bdf}.0", node=node, root=node or 0, switch=i % 2))
        if draw.random() < 0.2:
            specs.append(DeviceSpec(f"{bdf}.1", node=node, kind=DeviceKind.NIC, root=node or 0))
    host = even_host(packages, per_package, 1, draw.randint(2, 3), 1, devices=specs)
    gpus = [gpu.bdf for gpu in host.devices_of_kind(DeviceKind.GPU)]
    match draw.randrange(3):
        case 0:
            devices = (
                structs.replace(d, name="NVIDIA H100 80GB HBM3") if d.bdf in gpus else d
                for d in host.pci_devices
            )
            return structs.replace(host, pci_devices=tuple(devices))
        case 1:
            pairs = zip(gpus[::2], gpus[1::2], strict=False)
            return structs.replace(
                host, links=tuple(DeviceLink(LinkKind.NVLINK, a, b) for a, b in pairs)
            )
        case _:
            return host


def test_nor_does_any_other_set_of_many_gpus_make_a_better_placement() -> None:
    for seed in seeds(40, every=4):
        draw = random.Random(seed)
        host = host_of_many(draw)
        layout = draw.choice(("pin", "pin-numa", "pin-numa-pci"))
        request = small_request(draw.randint(1, 7), 2 * GIB, layout=layout)
        locality = draw.choice(("prefer", "prefer", "ignore"))
        compare(
            host,
            asking(
                request,
                gpu_count=draw.randint(2, 5),
                unequal_cells=draw.random() < 0.4,
                device_locality=type(request.options.device_locality)(locality),
            ),
        )


HGX = [
    *(
        DeviceSpec(f"0000:{bus:02x}:00.0", node=0, root=i // 2, switch=i // 2)
        for i, bus in enumerate((0x19, 0x3B, 0x4C, 0x5D))
    ),
    *(
        DeviceSpec(f"0000:{bus:02x}:00.0", node=1, root=2 + i // 2, switch=i // 2)
        for i, bus in enumerate((0x9B, 0xAB, 0xBB, 0xDB))
    ),
]


def hgx(**changes: object) -> Host:
    return structs.replace(even_host(2, 1, 4, 8, 2, devices=HGX), **changes)


def some(count: int, vcpus: int = 8) -> GuestRequest:
    return asking(small_request(vcpus), gpu_count=count)


def buses(host: Host, request: GuestRequest) -> list[str]:
    return [str(bdf)[5:7] for bdf in place(host, request).devices]


def test_gpus_of_running_vms_are_not_used_and_too_few_are_refused_with_who_has_them() -> None:
    busy = pinned_domain("0", name="train", devices=("19:00.0", "3b:00.0"))
    host = hgx(domains=(busy,))
    assert "19" not in buses(host, some(6, 16))
    with pytest.raises(Unplannable) as refusal:
        place(host, some(7))
    assert numbers(refusal.value.message)[:3] == [7, 6, 8]
    assert "0000:19:00.0" in str(refusal.value) and "train" in str(refusal.value)
    assert numbers(refusal.value.hint) == [6]


def test_a_gpu_brings_its_audio_function_and_keeps_the_documents_devices() -> None:
    specs = [
        DeviceSpec("0000:19:00.0"),
        DeviceSpec("0000:19:00.1", kind=DeviceKind.AUDIO),
        DeviceSpec("0000:05:00.0", kind=DeviceKind.NVME),
    ]
    host = even_host(1, devices=specs)
    request = asking(small_request(2, devices=["05:00.0"]), gpu_count=1)
    assert [str(b) for b in place(host, request).devices] == [
        "0000:05:00.0",
        "0000:19:00.0",
        "0000:19:00.1",
    ]


def test_gpus_joined_by_nvlink_stay_together() -> None:
    """Each has a root port of its own, so no switch says which belong together."""
    specs = [replace(spec, switch=None) for spec in HGX]
    pairs = (("19", "4c"), ("3b", "5d"), ("9b", "bb"), ("ab", "db"))
    links = tuple(
        DeviceLink(LinkKind.NVLINK, Bdf.parse(f"{a}:00.0"), Bdf.parse(f"{b}:00.0"))
        for a, b in pairs
    )
    host = structs.replace(even_host(2, 1, 4, 8, 2, devices=specs), links=links)
    assert tuple(buses(host, some(2))) in pairs


def test_a_gpu_with_virtual_functions_in_use_stays_on_the_host() -> None:
    host = hgx()
    first = Bdf.parse("19:00.0")
    devices = tuple(
        structs.replace(d, sriov_total_vfs=8, sriov_num_vfs=8) if d.bdf == first else d
        for d in host.pci_devices
    )
    assert "19" not in buses(structs.replace(host, pci_devices=devices), some(7, 16))


def test_gpus_without_a_node_can_be_chosen() -> None:
    specs = [replace(spec, node=None) for spec in HGX]
    placement = place(even_host(2, 1, 4, 8, 2, devices=specs), some(2))
    assert len(placement.devices) == 2
    assert len([gap for gap in placement.gaps if gap.subject.endswith(" node")]) == 2


@pytest.mark.parametrize("nodes", list(permutations((None, 0, 1))))
def test_gpus_with_a_node_are_chosen_as_long_as_there_are_enough(
    nodes: tuple[int | None, ...],
) -> None:
    specs = [DeviceSpec(f"{bus:02x}:00.0", node=node) for bus, node in enumerate(nodes)]
    host = even_host(2, devices=specs)
    chosen = place(host, asking(small_request(4), gpu_count=2)).devices
    assert {nodes[bdf.bus] for bdf in chosen} == {0, 1}


def test_a_device_that_another_vm_has_is_a_finding() -> None:
    busy = pinned_domain("0", name="train", devices=("19:00.0",))
    placement = place(hgx(domains=(busy,)), small_request(4, devices=["19:00.0"]))
    assert [f.id for f in placement.findings] == ["device-in-use"]


def test_dropping_one_device_moves_no_vcpu() -> None:
    everything = [spec.bdf for spec in HGX]
    full = place(hgx(), small_request(16, devices=everything))
    fewer = place(hgx(), small_request(16, devices=everything[:-1]))
    assert full.vcpu_pins == fewer.vcpu_pins
    assert fewer.devices == full.devices[:-1]
