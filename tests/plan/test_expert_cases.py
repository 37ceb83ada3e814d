"""Placements that an operator would sign: machines on which an easy rule goes wrong.

Small hosts of our own are asked of the brute force as well, so that each side is checked by hand
once. Published hosts of other shapes are read where they lie.
"""

import pytest
from msgspec import structs
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, PackageIndex
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import CoreId, CpuModel, Host, HostReserve, PagePool
from homenode.plan.placement import Placement
from homenode.plan.request import GuestRequest
from homenode.plan.search.place import place
from homenode.units import GIB
from homenode.vm.plan_options import DeviceLocality
from homenode.vm.sources import load_host
from tests.brute_force import best_by_force
from tests.guest_shapes import with_virtual
from tests.seeds import THOROUGH
from tests.shared_data import needs_shared, shared
from tests.small_hosts import (
    DeviceSpec,
    NodeSpec,
    asking,
    even_host,
    host_of,
    pinned_domain,
    small_request,
)


def gpu(bus: int, node: int, switch: int | None = None) -> DeviceSpec:
    return DeviceSpec(
        f"0000:{bus:02x}:00.0", node=node, root=bus if switch is None else node, switch=switch
    )


def agreed(host: Host, request: GuestRequest) -> Placement:
    """The planner's placement, which is the brute force's as well."""
    placement = place(host, request)
    best = best_by_force(host, request)
    assert best is not None
    assert placement.nodes == tuple(host.nodes[node].index for node in best.nodes)
    assert groups(placement) == best.split
    assert placement.devices == best.devices
    return placement


def groups(placement: Placement) -> tuple[int, ...]:
    """vCPUs of each cell, over its threads."""
    counts = (placement.vcpu_nodes.count(cell) for cell in range(len(placement.nodes)))
    return tuple(count // placement.threads_per_core for count in counts)


def gpu_nodes(host: Host, placement: Placement) -> list[int | None]:
    return [
        device.node
        for device in host.devices_of_kind(DeviceKind.GPU)
        if device.bdf in placement.devices
    ]


LAYOUTS = ("pin", "pin-numa", "pin-numa-pci")


def test_of_a_node_that_spans_packages_the_isolated_cores_come_before_fewer_llcs() -> None:
    host = host_of([NodeSpec(((1,), (1,), (1, 1, 1, 1)))], isolated="0-1")
    ids = (CoreId(PackageIndex(number > 1), number) for number in range(len(host.cores)))
    cores = tuple(replace(core, id=own) for core, own in zip(host.cores, ids, strict=True))
    placement = place(replace(host, cores=cores), small_request(2, layout="pin"))
    assert placement.vcpu_pins == (CpuSet([0]), CpuSet([1]))


@pytest.mark.parametrize(
    ("isolated", "pages", "counts"),
    [("", (64, 64), (5, 5)), ("0-3,8-15", (64, 64), (4, 6)), ("", (2, 64), (2, 8))],
)
def test_cells_are_unequal_for_isolated_cores_and_free_huge_pages(
    isolated: str, pages: tuple[int, int], counts: tuple[int, int]
) -> None:
    nodes = [NodeSpec(((1,) * 8,), i, pools=(PagePool(GIB, n, n),)) for i, n in enumerate(pages)]
    asked = asking(small_request(10, 10 * GIB), unequal_cells=True)
    placement = place(host_of(nodes, isolated=isolated), replace(asked, page_bytes=GIB))
    assert groups(placement) == counts


# A tidy set of GPUs is worth less than the VM's own locality.


def two_sockets() -> Host:
    """A GPU on the first socket, two below one switch on the second."""
    devices = [gpu(0x10, 0), gpu(0x20, 1, 0), gpu(0x21, 1, 0)]
    return even_host(2, 1, 1, 8, 2, devices=devices)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pair_of_gpus_is_parted_rather_than_a_socket_crossed(layout: str) -> None:
    request = asking(
        small_request(8, 16 * GIB, layout=layout),
        gpu_count=1,
        reserved_pus=CpuSet.parse("0-3,16-19"),
    )
    placement = agreed(two_sockets(), request)
    assert placement.nodes == (1,)
    assert placement.devices == (Bdf.parse("20:00.0"),)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pair_of_gpus_is_left_whole_where_the_single_one_is_as_near(layout: str) -> None:
    request = asking(small_request(8, 16 * GIB, layout=layout), gpu_count=1)
    placement = agreed(two_sockets(), request)
    assert placement.nodes == (0,)
    assert placement.devices == (Bdf.parse("10:00.0"),)


# Of nodes that are as near, those that no other GPU is on.


def test_other_gpus_are_not_robbed_of_cores_on_hosts_of_many_nodes() -> None:
    devices = [gpu(0x10 * (1 + node // 3), node) for node in range(0, 12, 3)]
    host = even_host(1, 12, 1, 8, 2, devices=devices)
    for gpus, vcpus in ((1, 21), (3, 56)):
        request = asking(small_request(vcpus, 4 * GIB, layout="pin-numa-pci"), gpu_count=gpus)
        placement = place(host, request)
        assert len({*placement.nodes} & {0, 3, 6, 9}) == gpus


@needs_shared
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "vcpus", "reserved", "node"), [("two", 8, "0-3,16-19", 1), ("n16", 4, "0-31", 8)]
)
def test_the_only_node_with_cores_is_found_on_hosts_of_others(
    name: str, vcpus: int, reserved: str, node: int, layout: str
) -> None:
    host = load_host(str(shared(f"cases/placement/{name}.toml")))
    request = small_request(vcpus, 16 * GIB, layout=layout)
    placement = place(host, asking(request, gpu_count=1, reserved_pus=CpuSet.parse(reserved)))
    assert (placement.nodes, gpu_nodes(host, placement)) == ((node,), [node])


# Any GPU of many equal ones may be the one at home.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_last_of_eight_equal_gpus_is_found_where_only_its_node_has_cores(layout: str) -> None:
    devices = [gpu(16 + node, node) for node in range(8)]
    host = even_host(4, 2, 1, 3, 1, devices=devices, domains=[pinned_domain("0-20")])
    request = asking(small_request(2, layout=layout), gpu_count=1)
    placement = agreed(host, request)
    assert placement.nodes == (7,)
    assert gpu_nodes(host, placement) == [7]


# SNC4 and NPS4: each GPU counts, not the worst only.


def sub_nodes(homes: tuple[int, ...], cores: int = 6) -> Host:
    """Two sockets of four nodes each, a GPU on each of these nodes."""
    devices = [gpu(16 + number, node) for number, node in enumerate(homes)]
    return even_host(
        2, 4, 1, cores, 1, devices=devices, distances=nps4_distances(), memory_bytes=256 * GIB
    )


def nps4_distances() -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(10 if a == b else 12 if a // 4 == b // 4 else 21 for b in range(8)) for a in range(8)
    )


@pytest.mark.parametrize(
    ("homes", "count", "vcpus", "nodes", "split"),
    [
        # A GPU each on nodes 1, 3, 5 and 7, as in SNC4: a cell next to each.
        ((1, 3, 5, 7), 4, 16, (1, 3, 5, 7), (4, 4, 4, 4)),
        ((1, 3, 5, 7), 2, 8, (1, 3), (4, 4)),
        ((1, 3, 5, 7), 1, 4, (1,), (4,)),
        # More vCPUs than the GPUs' nodes have cores: a further node, no further socket.
        ((1, 3, 5, 7), 2, 18, (0, 1, 3), (6, 6, 6)),
        # One GPU on each node: four of one socket, each at home.
        ((0, 1, 2, 3, 4, 5, 6, 7), 4, 16, (0, 1, 2, 3), (4, 4, 4, 4)),
        ((0, 1, 2, 3, 4, 5, 6, 7), 8, 32, (0, 1, 2, 3, 4, 5, 6, 7), (4,) * 8),
        # Two GPUs on one node: two cells are enough for four GPUs.
        ((1, 1, 3, 3, 5, 5, 7, 7), 4, 12, (1, 3), (6, 6)),
        ((1, 1, 3, 3, 5, 5, 7, 7), 2, 4, (1,), (4,)),
        # Three GPUs of nodes with two and one: both at home on two nodes of one socket.
        ((0, 0, 1, 6), 3, 6, (0, 1), (3, 3)),
        # Fourteen vCPUs on nodes of six cores: three unequal cells rather than seven equal ones, in
        # seven sockets of two cores rather than fourteen of one.
        ((), 0, 14, (0, 1, 2), (6, 4, 4)),
    ],
)
def test_cells_lie_next_to_gpus(
    homes: tuple[int, ...], count: int, vcpus: int, nodes: tuple[int, ...], split: tuple[int, ...]
) -> None:
    request = asking(small_request(vcpus, 32 * GIB, layout="pin-numa-pci"), gpu_count=count or None)
    host = sub_nodes(homes)
    # By force, four GPUs take five seconds, and eight a minute; each is at home in one way alone.
    by_force = count < (8 if THOROUGH else 2)
    placement = agreed(host, request) if by_force else place(host, request)
    assert placement.nodes == nodes
    assert groups(placement) == split


@pytest.mark.parametrize(
    ("homes", "cores", "vendor", "count", "vcpus", "nodes", "split"),
    [
        # A pair of GPUs on each node: no third node for the sake of three equal cells, and a
        # socket of seven for each GPU rather than 21 sockets of one core.
        ((0, 0, 1, 1, 2, 2, 3, 3), 16, "AuthenticAMD", 3, 21, (0, 1), (14, 7)),
        ((0, 0, 1, 1, 2, 2, 3, 3), 16, "GenuineIntel", 3, 21, (0, 1), (11, 10)),
        # Nodes of 24 cores: seven sockets of eight cores rather than 56 of one.
        ((0, 1, 2), 24, "AuthenticAMD", 3, 56, (0, 1, 2), (24, 16, 16)),
        # Nothing divides 23 vCPUs.
        ((0, 0, 1, 1, 2, 2, 3, 3), 16, "AuthenticAMD", 3, 23, (0, 1), (12, 11)),
        # Where each GPU is on a node of its own, equal cells cost no node without one.
        ((0, 1, 2), 16, "AuthenticAMD", 3, 21, (0, 1, 2), (7, 7, 7)),
        # SNC4: six nodes of fourteen cores, of which none gets five.
        ((1, 3, 5, 7), 14, "GenuineIntel", 3, 75, (0, 1, 2, 3, 4, 5), (13, 13, 12, 13, 12, 12)),
        # Two sockets as in Lassen's nodes.
        ((0, 0, 4, 4), 6, "IBM", 3, 9, (0, 4), (6, 3)),
    ],
)
def test_cells_that_cannot_be_equal_are_as_even_as_few_sockets_and_nodes_allow(
    homes: tuple[int, ...],
    cores: int,
    vendor: str,
    count: int,
    vcpus: int,
    nodes: tuple[int, ...],
    split: tuple[int, ...],
) -> None:
    host = structs.replace(sub_nodes(homes, cores), cpu=CpuModel(vendor, "test CPU"))
    request = small_request(vcpus, 32 * GIB, layout="pin-numa-pci")
    placement = place(host, asking(request, gpu_count=count))
    assert (placement.nodes, groups(placement)) == (nodes, split)
    assert set(gpu_nodes(host, placement)) <= set(placement.nodes)


def test_equal_cells_that_would_take_a_further_node_are_a_runner_up() -> None:
    host = sub_nodes((0, 0, 1, 1), 16)
    request = asking(small_request(21, 32 * GIB, layout="pin-numa-pci"), gpu_count=3)
    runner, *_ = (
        one for one in place(host, request).runners_up if one.decided_by == "nodes_spanned"
    )
    assert len(runner.nodes) == 3


def test_vcpus_go_next_to_the_devices_where_that_is_asked_for() -> None:
    host = sub_nodes((0, 0, 1, 1), 16)
    request = asking(small_request(21, 32 * GIB, layout="pin-numa-pci"), gpu_count=3)
    assert groups(place(host, asking(request, unequal_cells=True))) == (16, 5)


@pytest.mark.parametrize("layout", ("pin", "pin-numa"))
def test_a_guest_that_sees_no_pcie_tree_gets_fewer_nodes_instead(layout: str) -> None:
    request = asking(small_request(8, 32 * GIB, layout=layout), gpu_count=4)
    placement = agreed(sub_nodes((1, 3, 5, 7)), request)
    # A node of each socket, and of each socket one that has a GPU.
    assert placement.nodes == (1, 5)


def test_required_locality_refuses_nodes_that_preferred_locality_takes() -> None:
    host = sub_nodes((1, 3, 5, 7))
    request = asking(
        small_request(8, 32 * GIB, layout="pin"),
        gpu_count=4,
        device_locality=DeviceLocality.REQUIRE,
    )
    assert agreed(host, request).nodes == (1, 3, 5, 7)


@needs_shared
def test_a_snc4_machine_gets_a_cell_next_to_each_of_its_four_gpus() -> None:
    host = load_host(str(shared("cases/hosts/ipa20-2xXeon8480-SNC4-4gpu.xml")))
    request = asking(small_request(16, 64 * GIB, layout="pin-numa-pci"), gpu_count=4)
    placement = place(host, request)
    assert placement.nodes == (1, 3, 5, 7)
    assert groups(placement) == (4, 4, 4, 4)
    assert sorted(n for n in gpu_nodes(host, placement) if n is not None) == [1, 3, 5, 7]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_14_vcpus_on_nodes_with_6_free_cores_take_3_nodes_of_one_socket(layout: str) -> None:
    host = load_host("epyc-nps4-gpu-nic")
    busy = CpuSet(
        pu
        for node in host.nodes
        for core in [c for c in host.cores if c.pus <= node.pus][6:]
        for pu in core.pus
    )
    host = structs.replace(host, domains=(pinned_domain(str(busy)),))
    placement = place(host, small_request(14, 64 * GIB, layout=layout))
    assert placement.nodes in ((0, 1, 2), (4, 5, 6))
    # Cells of an AMD guest are whole sockets: seven of two cores rather than fourteen of one.
    assert sorted(groups(placement)) == ([4, 5, 5] if layout == "pin" else [4, 4, 6])


# VMs without GPUs leave the GPUs' nodes to others.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_vm_without_gpus_avoids_the_node_that_has_them(layout: str) -> None:
    host = load_host("rtx5090-epyc7702")
    assert place(host, small_request(8, 32 * GIB, layout=layout)).nodes == (1,)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_vm_without_gpus_takes_a_node_whose_gpus_are_gone_already(layout: str) -> None:
    gone = pinned_domain("", name="train", devices=("10:00.0",))
    devices = [gpu(0x10, 0), gpu(0x20, 1)]
    host = even_host(2, 1, 1, 4, 1, devices=devices, domains=[gone])
    assert agreed(host, small_request(2, layout=layout)).nodes == (0,)


# NICs count with the GPUs that the VM gets.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_nic_next_to_gpus_that_the_vm_does_not_get_is_left_remote(layout: str) -> None:
    host = load_host("hgx-h100")
    devices = ("0000:9b:00.0", "0000:3c:00.0")
    taken = pinned_domain("56-63", devices=devices, memory_bytes=64 * GIB)
    host = with_virtual(structs.replace(host, domains=(taken,)), "0000:1a:00.0", 1)
    request = asking(
        small_request(40, 256 * GIB, layout=layout, devices=["0000:cc:00.0"]), gpu_count=4
    )
    placement = place(host, request)
    assert placement.nodes == (0,)
    assert set(gpu_nodes(host, placement)) == {0}
    [finding] = [one for one in placement.findings if one.id == "nic-without-gpu"]
    assert finding.subject == "0000:cc:00.0"
    assert "0000:1a:00.0" in (finding.fix or "")
    assert not any(nic in (finding.fix or "") for nic in ("0000:1a:01.0", "0000:3c:00.0"))
    nics = {nic.bdf for nic in host.devices_of_kind(DeviceKind.NIC)} - set(request.devices)
    taken = structs.replace(taken, devices=(*taken.devices, *nics))
    placement = place(structs.replace(host, domains=(taken,)), request)
    [finding] = [one for one in placement.findings if one.id == "nic-without-gpu"]
    assert finding.fix == "pass through the GPUs near the NICs: --device"


@pytest.mark.parametrize(
    ("nics", "gpus"),
    [
        (("0000:bc:00.0",), ("0000:bb:00.0",)),
        (("0000:3c:00.0", "0000:5e:00.0"), ("0000:3b:00.0", "0000:5d:00.0")),
    ],
)
def test_of_equal_gpus_those_next_to_the_nics_of_the_vm_are_chosen(
    nics: tuple[str, ...], gpus: tuple[str, ...]
) -> None:
    request = small_request(8, 16 * GIB, layout="pin-numa-pci", devices=nics)
    request = asking(request, gpu_count=len(gpus), without_nvlink=True)
    placement = place(load_host("hgx-h100"), request)
    assert placement.devices == tuple(sorted(map(Bdf.parse, (*nics, *gpus))))
    assert not {"nic-without-gpu", "nic-away-from-vm"} & {one.id for one in placement.findings}


@pytest.mark.parametrize("gpu_node", [0, 1])
def test_a_nic_paired_with_the_gpu_that_the_vm_gets_pulls_as_the_gpu_does(gpu_node: int) -> None:
    devices = [
        DeviceSpec("0000:10:00.0", node=gpu_node, root=0),
        DeviceSpec("0000:11:00.0", node=1, kind=DeviceKind.NIC, root=0),
    ]
    host = host_of([NodeSpec(((2,) * 8,), package=package) for package in (0, 1)], devices=devices)
    named = [device.bdf for device in devices]
    placement = agreed(host, small_request(6, layout="pin-numa-pci", devices=named))
    # No node alone is next to both where the firmware gives the pair two.
    assert placement.nodes == ((1,) if gpu_node else (0, 1))
    alone = asking(
        small_request(6, layout="pin-numa-pci", devices=named), max_nodes=1, gpu_count=None
    )
    found = {one.id for one in agreed(host, alone).findings}
    assert ("nic-away-from-vm" in found) is (gpu_node == 0)
    unknown = structs.replace(host.nodes[1], package=None)
    findings = place(structs.replace(host, nodes=(host.nodes[0], unknown)), alone).findings
    assert "nic-away-from-vm" not in {finding.id for finding in findings}


# One GPU is a choice of partition, too.


def board_of_eight(*owned: int) -> Host:
    """An H100 board whose modules 1 to 8 are buses 11 to 18; held: modules of running VMs."""
    devices = [gpu(16 + module, (module - 1) // 4) for module in range(1, 9)]
    busy = [pinned_domain("", name=f"train{m}", devices=(f"{16 + m:02x}:00.0",)) for m in owned]
    host = even_host(2, 1, 1, 8, 1, devices=devices, domains=busy)
    return structs.replace(
        host,
        pci_devices=tuple(
            structs.replace(d, name="NVIDIA H100 80GB HBM3", module_id=d.bdf.bus - 16)
            if d.kind is DeviceKind.GPU
            else d
            for d in host.pci_devices
        ),
    )


def modules(placement: Placement) -> list[int]:
    return [bdf.bus - 16 for bdf in placement.devices]


@pytest.mark.parametrize(
    ("owned", "count", "in_use"),
    [
        ((), 1, [1]),
        ((1,), 1, [3]),  # the pair of 1 is broken already
        ((5,), 1, [7]),
        ((1, 5), 1, [3]),
        ((1, 3), 1, [2]),  # the group of four 1 to 4 is broken already
        ((6,), 2, [5, 7]),
        ((), 2, [1, 3]),
        ((1,), 4, [5, 6, 7, 8]),
    ],
)
def test_a_gpu_breaks_what_is_broken_already(
    owned: tuple[int, ...], count: int, in_use: list[int]
) -> None:
    request = asking(small_request(2, layout="pin-numa-pci"), gpu_count=count)
    assert modules(agreed(board_of_eight(*owned), request)) == in_use


# What is allocated, and the host's share.


def test_memory_that_a_running_domain_has_not_touched_yet_is_not_free() -> None:
    busy = pinned_domain("", memory_by_node=((0, 40 * GIB),))
    host = even_host(2, 1, 1, 4, 1, free_bytes=60 * GIB, domains=[busy])
    assert agreed(host, small_request(2, 32 * GIB)).nodes == (1,)


def test_the_host_keeps_a_core_until_nothing_else_is_left() -> None:
    host = even_host(1, 1, 1, 4, 1)
    kept, in_use = agreed(host, small_request(3, GIB)), agreed(host, small_request(4, GIB))
    assert kept.fallback != in_use.fallback
    assert {f.severity for f in in_use.findings if f.severity != "info"} == {"warning"}


def test_a_second_node_serves_before_the_memory_of_the_host_does() -> None:
    host = even_host(2, 1, 1, 4, 1, memory_bytes=8 * GIB)
    assert agreed(host, small_request(2, 7 * GIB)).nodes == (0, 1)


# Uneven memory.


def test_pages_that_do_not_divide_lie_where_they_are() -> None:
    pools = [(PagePool(GIB, 4, 4),), (PagePool(GIB, 3, 3),)]
    specs = [
        NodeSpec(((1,) * 4,), package=node, memory_bytes=7 * GIB, pools=pools[node])
        for node in (0, 1)
    ]
    request = replace(
        small_request(4, 7 * GIB), page_bytes=GIB, host_reserve=HostReserve(1, 3 * GIB)
    )
    placement = agreed(host_of(specs), request)
    assert placement.nodes == (0, 1)


MEM4 = [NodeSpec(((1,) * 4,), memory_bytes=size * GIB) for size in (8, 4, 32)]
MEM4_DISTANCES = ((10, 12, 20), (12, 10, 20), (20, 20, 10))


@pytest.mark.parametrize("max_nodes", (None, 2))
@pytest.mark.parametrize("layout", ("pin", "pin-bound"))
def test_memory_of_the_fewest_other_nodes_is_used(layout: str, max_nodes: int | None) -> None:
    host = host_of(MEM4, distances=MEM4_DISTANCES)
    request = asking(
        small_request(4, 20 * GIB, layout=layout),
        reserved_pus=CpuSet.parse("4-11"),
        host_reserve=HostReserve(0),
        max_nodes=max_nodes,
    )
    placement = agreed(host, request)
    assert placement.nodes == (0,)
    if layout == "pin-bound":
        assert placement.memory_nodes == (0, 2)


def test_cells_share_memory_unevenly_where_equal_shares_do_not_fit() -> None:
    host = host_of(MEM4, distances=MEM4_DISTANCES)
    placement = agreed(host, small_request(8, 30 * GIB))
    assert placement.nodes == (0, 2)
