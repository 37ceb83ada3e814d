"""Packing: against brute force on small pools, and checked by counting what each VM has."""

import random
from collections.abc import Sequence
from itertools import product

import pytest
from msgspec import structs
from msgspec.structs import replace

from homenode.cluster.pool.division import ALLOWED, PackRequest
from homenode.cluster.pool.flavour import Flavour, default_flavours
from homenode.cluster.pool.model import Pool, PoolHost
from homenode.cluster.pool.pack import PackedVm, Packing, pack, parse_requests
from homenode.cluster.pool.packing import tuned_documents
from homenode.cluster.pool.rules import Rules
from homenode.cluster.pool.sources import load_pool
from homenode.errors import InputError
from homenode.machine.topology import Host, PagePool, RunningDomain
from homenode.plan.search.place import place
from homenode.plan.stored import domain_of_placement
from homenode.plan.tuning import tune
from homenode.units import GIB
from homenode.vm.domain.read import read_vm
from homenode.vm.plan_model import Unplannable
from homenode.vm.plan_options import EmulatorPolicy, PlanOptions
from tests.figures import numbers
from tests.pool.pools import filled, pool_of, pus_used, shipped, sized, with_vm
from tests.small_hosts import asking

pytest.importorskip("ortools")

GPU1, GPU2, GPU4, GPU8 = default_flavours()


def check(pool: Pool, packing: Packing, requests: Sequence[PackRequest]) -> None:
    """Counts what each VM has of its host, and trusts nothing that the planner says of it."""
    by_name = {name: request for request in requests for name in request.names}
    placed = [vm.name for vm in packing.vms]
    assert sorted([*placed, *(name for name, _ in packing.unplaced)]) == sorted(by_name)
    for one in pool.hosts:
        _check_host(pool.host(one), [vm for vm in packing.vms if vm.host == one.name], by_name)
    assert packing.value == sum(by_name[name].flavour.worth for name in placed)
    if packing.bound is not None:
        assert packing.value <= packing.bound + 1e-6
    _check_rules({host.name: host for host in pool.hosts}, packing.vms, by_name)


def _check_host(host: Host, vms: Sequence[PackedVm], by_name: dict[str, PackRequest]) -> None:
    core_of = {pu: core.index for core in host.cores for pu in core.pus}
    cores: set[int] = set()
    devices: set[object] = set()
    memory: dict[int, int] = {}
    for vm in host.domains:
        pus = pus_used(vm)
        cores |= {core for pu, core in core_of.items() if pus >> pu & 1}
        devices |= set(vm.devices)
        for number, size in vm.memory_by_node:
            memory[number] = memory.get(number, 0) + size
    for packed in vms:
        plan, flavour = packed.plan, by_name[packed.name].flavour
        own: set[int] = set()
        for pin in plan.vcpu_pins:
            assert len(pin) == 1
            (pu,) = pin
            assert core_of[pu] not in cores | own, "a core of two vCPUs"
            own.add(core_of[pu])
        cores |= own
        gpus = {device.bdf for device in plan.vm.hostdevs}
        assert not gpus & devices, "a device of two VMs"
        devices |= gpus
        assert len(gpus) == flavour.gpus
        assert flavour.options.vcpus in (None, len(plan.vcpu_pins))
        for cell in plan.cells:
            for home in cell.host_nodes:
                memory[home] = memory.get(home, 0) + cell.memory_bytes // len(cell.host_nodes)
    for node in host.nodes:
        size = node.memory_bytes or 0
        assert memory.get(node.index, 0) <= size - max(2 * GIB, size // 50), "memory of the host"
    assert len(cores) < len(host.cores), "the host's core"


def _check_rules(
    hosts: dict[str, PoolHost], vms: Sequence[PackedVm], by_name: dict[str, PackRequest]
) -> None:
    for key in ("affinity", "anti_affinity", "fault_domains"):
        groups: dict[str, list[str]] = {}
        for vm in vms:
            group = getattr(by_name[vm.name].rules, key)
            if group is not None:
                groups.setdefault(group, []).append(vm.host)
        for own in groups.values():
            if key == "affinity":
                assert len(set(own)) == 1
            elif key == "anti_affinity":
                assert len(set(own)) == len(own)
            else:
                domains = [hosts[name].fault_domain or name for name in own]
                assert len(set(domains)) == len(domains)


def _best_by_force(pool: Pool, flavours: Sequence[Flavour]) -> int:
    """The most value over every choice of a host, or none, for each VM."""
    best = 0
    for choice in product((None, *range(len(pool.hosts))), repeat=len(flavours)):
        value = sum(f.worth for f, h in zip(flavours, choice, strict=True) if h is not None)
        if value > best and all(
            _holds(
                pool.host(host),
                [f for f, h in zip(flavours, choice, strict=True) if h == number],
            )
            for number, host in enumerate(pool.hosts)
        ):
            best = value
    return best


def _holds(host: Host, flavours: Sequence[Flavour]) -> bool:
    for number, flavour in enumerate(sorted(flavours, key=lambda one: -one.gpus)):
        request = flavour.request(host)
        request = asking(
            request,
            guest=structs.replace(request.guest, name=f"vm-{number}"),
            emulator_policy=EmulatorPolicy.SHARE,
        )
        try:
            found = place(host, request)
        except Unplannable:
            return False
        if not set(found.concessions) <= ALLOWED:
            return False
        vm = domain_of_placement(host, request, found)
        host = structs.replace(host, domains=(*host.domains, vm))
    return True


@pytest.mark.parametrize("seed", range(4))
def test_a_small_packing_has_as_much_value_as_any(seed: int) -> None:
    rng = random.Random(seed)
    pool = load_pool(["small-2n8c-2gpu*2"])
    flavours = [
        sized(
            name=f"vm{i}",
            gpus=rng.choice((0, 1, 1, 2)),
            vcpus=rng.choice((1, 2, 3)),
            memory_bytes=rng.choice((1, 2)) * GIB,
            value=rng.randint(1, 5),
        )
        for i in range(5)
    ]
    requests = [PackRequest(flavour=flavour, names=(flavour.name,)) for flavour in flavours]
    found = pack(pool, requests, seconds=10)
    check(pool, found, requests)
    assert found.value == _best_by_force(pool, flavours)


def test_mixed_vms_fill_hosts_without_a_stranded_gpu() -> None:
    pool = load_pool(["hgx-h100*2"])
    requests = [
        PackRequest(flavour=GPU4, names=("four",)),
        PackRequest(flavour=GPU2, names=("p1", "p2", "p3")),
        PackRequest(flavour=GPU1, names=tuple(f"one-{i}" for i in range(8))),
    ]
    found = pack(pool, requests, seconds=10)
    check(pool, found, requests)
    assert (found.value, found.bound, found.gap, found.packages_crossed) == (16, 16, 0, 0)
    assert [name for name, _ in found.unplaced]


def test_hosts_that_are_in_use_get_what_fits_in_addition_to_their_vms() -> None:
    host = shipped("hgx-h100")
    pool = pool_of([(f"h{i}", filled(host, i)) for i in range(3)])
    requests = [PackRequest(flavour=GPU2, names=tuple(f"p{i}" for i in range(12)))]
    found = pack(pool, requests, seconds=10)
    check(pool, found, requests)
    assert found.vms


def test_rules_between_vms_are_kept() -> None:
    host = shipped("small-2n8c-2gpu")
    pool = pool_of([(f"h{i}", host) for i in range(4)])
    pool = replace(
        pool, hosts=tuple(replace(h, fault_domain=f"r{i // 2}") for i, h in enumerate(pool.hosts))
    )
    tiny = sized(name="tiny", gpus=0, vcpus=1, memory_bytes=GIB // 2)
    requests = [
        PackRequest(
            flavour=replace(tiny, name="a"),
            names=("a1", "a2", "a3"),
            rules=Rules(anti_affinity="a"),
        ),
        PackRequest(flavour=replace(tiny, name="b"), names=("b1", "b2"), rules=Rules(affinity="b")),
        PackRequest(
            flavour=replace(tiny, name="c"),
            names=("c1", "c2", "c3"),
            rules=Rules(fault_domains="c"),
        ),
    ]
    found = pack(pool, requests, seconds=10)
    check(pool, found, requests)
    assert [name[0] for name, _ in found.unplaced] == ["c"]
    assert found.gap == 0


def test_fewest_hosts_are_used_and_the_empty_ones_are_not() -> None:
    pool = load_pool(["hgx-h100*4"])
    requests = [
        PackRequest(flavour=GPU4, names=("a", "b")),
        PackRequest(flavour=GPU1, names=("c",)),
    ]
    found = pack(pool, requests, seconds=10)
    check(pool, found, requests)
    assert found.hosts == 2


def test_a_vm_that_fits_nowhere_is_named_and_the_rest_goes_on() -> None:
    pool = load_pool(["hgx-h100*1"])
    requests = [
        PackRequest(flavour=sized(name="huge", gpus=16), names=("huge",)),
        PackRequest(
            flavour=sized(name="wide", gpus=1, vcpus=500, memory_bytes=GIB), names=("wide",)
        ),
        PackRequest(flavour=GPU1, names=("one",)),
    ]
    found = pack(pool, requests, seconds=5)
    check(pool, found, requests)
    assert {name for name, _ in found.unplaced} == {"huge", "wide"}


def test_huge_pages_that_are_to_be_reserved_are_given_to_one_vm_only() -> None:
    big = sized(name="big", gpus=0, vcpus=4, memory_bytes=700 * GIB, page_bytes=GIB)
    pool = pool_of([("a", shipped("hgx-h100"))])
    packing = pack(pool, [PackRequest(flavour=big, names=("x", "y", "z"))], seconds=5)
    check(pool, packing, [PackRequest(flavour=big, names=("x", "y", "z"))])
    assert (len(packing.vms), packing.bound) == (2, 2)


def test_memory_that_is_reserved_as_huge_pages_does_not_count_for_other_vms() -> None:
    host = shipped("hgx-h100")
    pools = (PagePool(GIB, 900, 900),)
    nodes = tuple(
        structs.replace(node, page_pools=pools, memory_free_bytes=None) for node in host.nodes
    )
    pool = pool_of([("a", structs.replace(host, nodes=nodes))])
    asked = [
        PackRequest(
            flavour=sized(name="ordinary", gpus=0, vcpus=4, memory_bytes=90 * GIB),
            names=("o1", "o2", "o3"),
        ),
        PackRequest(
            flavour=sized(name="huge", gpus=0, vcpus=4, memory_bytes=500 * GIB, page_bytes=GIB),
            names=("h1", "h2", "h3"),
        ),
    ]
    packing = pack(pool, asked, seconds=5)
    assert sorted(vm.name[0] for vm in packing.vms) == ["h", "h", "h", "o", "o"]
    assert packing.bound == 5


def test_what_vms_of_overlapping_models_share_is_in_the_bound() -> None:
    """A divided GPU counts for no VM of a whole one, nor for the bound."""
    host = shipped("x86-2p2n8c8t-divided-gpus")
    pool = pool_of([("a", host)])
    asked = [
        PackRequest(
            flavour=sized(name="any", gpus=1, vcpus=1, memory_bytes=GIB), names=("a1", "a2", "a3")
        ),
        PackRequest(
            flavour=sized(name="model", gpus=1, vcpus=1, memory_bytes=GIB, gpu_model="GH100"),
            names=("m1", "m2"),
        ),
    ]
    packing = pack(pool, asked, seconds=5)
    assert packing.gap == 0


def test_gpus_that_have_to_be_of_one_package_are_so_in_the_bound() -> None:
    host = shipped("hgx-h100")
    for number in range(8):
        small = sized(name="small", gpus=1, vcpus=2, memory_bytes=GIB)
        host = with_vm(host, small, f"vm{number}")
    package_of = {node.index: node.package for node in host.nodes}
    halves: dict[object, list[RunningDomain]] = {}
    for vm in host.domains:
        node = host.device_at[vm.devices[0]].node
        assert node is not None
        halves.setdefault(package_of[node], []).append(vm)
    left = tuple(own[0] for own in halves.values())  # three GPUs of each package are free
    pool = pool_of([("a", replace(host, domains=left))])
    two = sized(name="two", gpus=2, vcpus=4, memory_bytes=GIB)
    found = pack(pool, [PackRequest(flavour=two, names=("x", "y", "z"))], seconds=10)
    assert (found.value, found.bound, found.gap) == (4, 4, 0)


def test_each_vm_that_is_left_out_has_its_own_reason() -> None:
    apart = PackRequest(
        flavour=sized(name="far", gpus=1), names=("f1", "f2"), rules=Rules(anti_affinity="far")
    )
    large = PackRequest(flavour=sized(name="large", gpus=16), names=("large",))
    packing = pack(pool_of([("a", shipped("hgx-h100"))]), [apart, large], seconds=5)
    (far, far_reason), (large_name, large_reason) = packing.unplaced
    assert (far[0], large_name, far_reason == large_reason) == ("f", "large", False)
    assert 16 in numbers(large_reason)


def test_a_vm_that_no_empty_host_takes_has_another_reason_than_one_that_came_too_late() -> None:
    asked = [
        PackRequest(flavour=GPU8, names=("a", "b")),
        PackRequest(flavour=sized(name="huge", gpus=16), names=("huge",)),
    ]
    reasons = dict(pack(pool_of([("h", shipped("hgx-h100"))]), asked, seconds=5).unplaced)
    late, huge = reasons.get("b", reasons.get("a", "")), reasons["huge"]
    assert numbers(late) == []
    assert numbers(huge) == [16]


def test_a_solver_that_ends_without_an_answer_leaves_a_packing_without_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("homenode.cluster.pool.pack.solve", lambda *given, **named: None)
    pool = load_pool(["hgx-h100*1"])
    requests = [PackRequest(flavour=GPU8, names=("a",))]
    found = pack(pool, requests)
    check(pool, found, requests)
    assert (found.value, found.bound, found.gap) == (8, None, None)


def test_requests_are_read_with_their_rules_and_refused_by_key() -> None:
    text = 'format = 1\n[[vm]]\nname = "a"\ngpus = 1\ncount = 3\nanti_affinity = "g"\n'
    (request,) = parse_requests(text, "v.toml")
    assert request.names == ("a-1", "a-2", "a-3")
    assert request.rules == Rules(anti_affinity="g")
    for broken in (
        text.replace("= 3", "= 0"),
        text.replace("gpus", "gpu"),
        text.replace("1\n[[", "2\n[["),
        text + '[[vm]]\nname = "a-2"\ngpus = 1\n',
        "",
        "format = 1\n",
    ):
        with pytest.raises(InputError):
            parse_requests(broken, "v.toml")


def test_vms_of_documents_are_tuned_for_the_hosts_that_they_are_packed_on() -> None:
    document = (
        b"<domain type='kvm'><name>one</name><memory unit='GiB'>64</memory><vcpu>12</vcpu><os>"
        b"<type arch='x86_64' machine='q35'>hvm</type></os><features><acpi/></features>"
        b"<cpu mode='host-passthrough'/><devices/></domain>"
    )
    text = 'format = 1\n[[vm]]\nname = "%s"\ndocument = "a.xml"\ngpus = 1\n'
    pool = load_pool(["hgx-h100*1"])
    for name in ("one", "two"):
        requests = parse_requests(text % name, "v.toml", lambda _: document)
        found = pack(pool, requests, seconds=5)
        tuning = tuned_documents(found, pool)[name]
        guest = read_vm(tuning.document, name)
        (packed,) = found.vms
        assert (guest.name, guest.vcpus, guest.memory_bytes) == (name, 12, 64 * GIB)
        assert {one.bdf for one in guest.hostdevs} == {d.bdf for d in packed.plan.vm.hostdevs}
        options = PlanOptions(layout="pin-numa-pci", gpu_count=1)
        alone = tune(tuning.original, "a.xml", options, pool.host(pool.hosts[0]))
        assert alone.document == tuning.document
    with pytest.raises(InputError):
        parse_requests(text % "one", "v.toml", lambda _: b"<domain/>")


@pytest.mark.lab
def test_two_hundred_vms_on_twenty_hosts_are_within_one_per_cent_of_the_bound() -> None:
    rng = random.Random(4)
    pool = load_pool(["hgx-h100*20"])
    requests = []
    for number in range(200):
        gpus = rng.choice((1, 1, 1, 1, 2, 2, 0, 0)) if number < 190 else 4
        flavour = sized(
            name=f"vm{number}",
            gpus=gpus,
            vcpus=rng.randint(8, 13) * max(1, gpus),
            memory_bytes=rng.choice((64, 100, 150, 200)) * GIB * max(1, gpus),
        )
        requests.append(PackRequest(flavour=flavour, names=(flavour.name,)))
    found = pack(pool, requests, seconds=60)
    check(pool, found, requests)
    assert found.gap is not None
    assert found.gap <= 0.01
