"""Places for QEMU's own threads and IOThreads next to the vCPUs."""

import pytest
from msgspec import structs
from msgspec.structs import replace

from homenode.cpuset import CpuSet
from homenode.machine.topology import HostReserve
from homenode.plan.placement import Placement
from homenode.plan.search.place import place
from homenode.units import MIB
from homenode.vm.layout import PRESETS, Pinning
from homenode.vm.plan import Relaxation
from homenode.vm.plan_options import EmulatorPolicy, Policy
from tests.figures import numbers
from tests.small_hosts import DeviceSpec, asking, even_host, pinned_domain, small_request


def vcpus(placement: Placement) -> CpuSet:
    return CpuSet(pu for pin in placement.vcpu_pins for pu in pin)


def test_the_emulator_gets_a_whole_spare_core_of_the_vms_node() -> None:
    placement = place(even_host(2, 1, 1, 8, 2), small_request(4))
    assert placement.emulator_pus == CpuSet.parse("4,20")


def test_a_vm_on_two_nodes_gets_a_core_on_each_the_one_near_the_gpu_included() -> None:
    host = even_host(2, 1, 1, 8, 1, devices=[DeviceSpec("0000:90:00.0", 1)])
    placement = place(host, small_request(12, devices=["90:00.0"]))
    assert placement.emulator_pus == CpuSet.parse("6,14")


def test_a_vm_on_many_nodes_gets_two_emulator_cores_at_most() -> None:
    everywhere = asking(small_request(56), policy=Policy.SPREAD)
    placement = place(even_host(8, 1, 1, 8, 1), everywhere)
    assert len(placement.nodes) == 8
    assert placement.emulator_pus == CpuSet([7, 15])


def test_iothreads_get_cores_of_their_own_while_there_are_any() -> None:
    placement = place(even_host(1, 1, 1, 8, 2), small_request(5, iothreads=3))
    assert placement.emulator_pus == CpuSet.parse("5,13")
    assert [str(pus) for pus in placement.iothread_pus] == ["6", "7", "14"]
    tight = place(even_host(1, 1, 1, 6, 2), small_request(5, iothreads=3))
    assert tight.emulator_pus == CpuSet.parse("5,11")
    assert set(tight.iothread_pus) == {CpuSet.parse("5,11")}


def test_a_full_node_sends_the_emulator_to_the_nearest_node_with_room() -> None:
    host = even_host(2, 2, 1, 4, 1, devices=[DeviceSpec("0000:10:00.0", 1)])
    placement = place(host, small_request(4, devices=["10:00.0"]))
    assert placement.nodes == (1,)
    assert placement.emulator_pus == CpuSet.parse("0")
    assert place(even_host(3, 1, 1, 4, 1), small_request(4)).emulator_pus == CpuSet.parse("4")


@pytest.mark.parametrize(
    ("far_gpus", "served", "expected"),
    [(0, None, "8"), (2, None, "5"), (0, "12", "12"), (2, "12", "5"), (2, "7", "7")],
)
def test_the_emulator_leaves_the_node_only_for_cores_that_free_gpus_do_not_need(
    far_gpus: int, served: str | None, expected: str
) -> None:
    gpus = [DeviceSpec(f"0000:1{i}:00.0", 0) for i in range(2)]
    gpus += [DeviceSpec(f"0000:9{i}:00.0", 1) for i in range(far_gpus)]
    domains = [pinned_domain("13", emulator=served)] if served else []
    host = even_host(2, 1, 1, 8, 1, devices=gpus, domains=domains)
    placement = place(host, small_request(5, devices=["10:00.0"]))
    assert placement.emulator_pus == CpuSet.parse(expected)


def test_siblings_on_the_node_of_huge_pages_come_before_free_cores_of_other_nodes() -> None:
    bound = replace(small_request(8), page_bytes=2 * MIB)
    placement = place(even_host(2, 1, 1, 8, 2), bound)
    assert placement.nodes == (0,)
    (shared,) = (f for f in placement.findings if f.id == "emulator-on-siblings")
    assert "huge pages" in shared.observed


def test_idle_siblings_come_last_and_with_a_finding() -> None:
    placement = place(even_host(1, 1, 1, 4, 2), small_request(4))
    assert placement.emulator_pus == CpuSet.parse("4")
    assert {f.id for f in placement.findings} == {"host-core-taken", "emulator-on-siblings"}


def test_where_no_pu_is_left_the_emulator_shares_with_the_vcpus_with_a_finding() -> None:
    placement = place(even_host(1, 1, 1, 4, 1), small_request(4))
    assert placement.emulator_pus == vcpus(placement)
    assert {f.id for f in placement.findings} == {"host-core-taken", "emulator-shares-vcpus"}


def test_the_emulator_never_goes_to_isolated_pus_nor_to_other_vms() -> None:
    host = even_host(1, 1, 1, 8, 1, isolated="2-7", domains=[pinned_domain("0")])
    placement = place(host, small_request(4))
    assert placement.emulator_pus == CpuSet.parse("1")
    siblings = place(even_host(1, 1, 1, 4, 2, isolated="4-7"), small_request(4))
    assert siblings.emulator_pus == vcpus(siblings)
    full = even_host(1, 1, 1, 8, 1, isolated="1-7", domains=[pinned_domain("0")])
    adrift = place(full, small_request(4, iothreads=1))
    assert adrift.emulator_pus is None
    assert adrift.iothread_pus == ()
    assert "emulator-not-pinned" in {f.id for f in adrift.findings}


def test_spare_cores_of_a_broken_llc_are_used_before_a_whole_llc_is_broken() -> None:
    placement = place(even_host(1, 1, 2, 4, 1), small_request(3))
    assert placement.emulator_pus == CpuSet.parse("3")


def test_share_and_none_do_as_they_say() -> None:
    host = even_host(1, 1, 1, 8, 2)
    shared = place(
        host, asking(small_request(4, iothreads=1), emulator_policy=EmulatorPolicy.SHARE)
    )
    assert shared.emulator_pus == vcpus(shared)
    assert shared.iothread_pus == (vcpus(shared),)
    none = place(host, asking(small_request(4, iothreads=1), emulator_policy=EmulatorPolicy.NONE))
    assert none.emulator_pus is None
    assert none.iothread_pus == ()


def test_a_core_that_serves_one_emulator_serves_the_next_where_free_gpus_need_the_others() -> None:
    host = even_host(1, 1, 1, 8, 1, devices=[DeviceSpec(f"0000:9{i}:00.0", 0) for i in range(2)])
    first = place(host, small_request(4, devices=["90:00.0"]))
    in_use = pinned_domain(
        str(vcpus(first)), emulator=str(first.emulator_pus), devices=("90:00.0",)
    )
    busy = structs.replace(host, domains=(in_use,))
    assert place(busy, small_request(3, devices=["91:00.0"])).emulator_pus == first.emulator_pus
    near_and_far = pinned_domain("8-11", emulator="0,12")
    wide = even_host(2, 1, 1, 8, 1, devices=[DeviceSpec("90:00.0", 1)], domains=[near_and_far])
    assert place(wide, small_request(3, devices=["90:00.0"])).emulator_pus == CpuSet([12])


@pytest.mark.parametrize(("cores", "is_shared"), [(12, True), (14, False)])
@pytest.mark.parametrize("page_bytes", [None, 2 * MIB])
def test_a_free_gpu_keeps_its_part_of_the_cores_from_emulators(
    cores: int, is_shared: bool, page_bytes: int | None
) -> None:
    """Three GPUs: each has 4 cores of 12 or 14, and next to the free one's none or two are left."""
    gpus = [f"0000:9{i}:00.0" for i in range(3)]
    host = even_host(1, 1, 1, cores, 1, devices=[DeviceSpec(gpu, 0) for gpu in gpus])
    in_use = pinned_domain("0-3", emulator="4", devices=(gpus[0],))
    busy = structs.replace(host, domains=(in_use,))
    request = replace(small_request(3, devices=[gpus[1]]), page_bytes=page_bytes)
    assert (place(busy, request).emulator_pus == CpuSet([4])) is is_shared


def test_vcpus_take_a_core_that_serves_other_emulators_only_as_the_hosts_last() -> None:
    host = even_host(1, 1, 1, 8, 1)
    served = structs.replace(host, domains=(pinned_domain("0-3", emulator="4"),))
    assert place(served, small_request(3)).relaxations == ()
    last = place(served, small_request(4))
    assert Relaxation.HOST_CORE in last.relaxations
    assert CpuSet([4]) <= vcpus(last)
    assert any("other" in f.observed for f in last.findings if f.id == "host-core-taken")
    wide = even_host(2, 1, 1, 8, 1, devices=[DeviceSpec("0000:10:00.0", 0)])
    busy = structs.replace(wide, domains=served.domains)
    near = place(busy, small_request(4, devices=["10:00.0"]))
    assert near.relaxations == (Relaxation.EMULATOR_CORE,)  # node 1 is left for the host
    (shared,) = near.findings
    assert (shared.id, shared.subject) == ("emulator-shares-vcpus", "CPU 4")
    assert "--vcpus 3" in str(shared.fix)
    both = structs.replace(wide, domains=(pinned_domain("0-3", emulator="4-5"),))
    (shared,) = place(both, small_request(4, devices=["10:00.0"])).findings
    assert "--vcpus 2" in str(shared.fix)
    threads = even_host(1, 1, 1, 8, 2, domains=[pinned_domain("0-2", emulator="3-4")])
    siblings = asking(small_request(8, layout="pin-numa-smt"), keep_vcpus=True)
    (shared,) = place(threads, siblings).findings
    assert "--vcpus 4" in str(shared.fix)
    (taken,) = place(even_host(1, 1, 1, 1, 1), small_request(1)).findings[:1]
    assert "vcpus" not in str(taken.fix)  # a VM of one vCPU cannot have fewer
    (rejection,) = place(even_host(1, 1, 1, 4, 1), small_request(4)).rejections
    assert numbers(rejection.detail) == [4, 1]


@pytest.mark.parametrize(
    ("gpu_count", "policy", "expected"),
    [
        (1, Policy.CORES_FIRST, (0, (Relaxation.EMULATOR_CORE,))),  # node 1 keeps its two GPUs
        (1, Policy.SPREAD, (1, ())),
        (None, Policy.CORES_FIRST, (1, ())),  # takes no GPU, so it breaks no set
    ],
)
def test_an_emulators_core_is_taken_for_a_whole_gpu_set_of_cores_first_alone(
    gpu_count: int | None, policy: Policy, expected: tuple[int, tuple[Relaxation, ...]]
) -> None:
    gpus = [DeviceSpec("0000:10:00.0", 0), *(DeviceSpec(f"0000:9{i}:00.0", 1) for i in range(2))]
    domain = pinned_domain("0-1", emulator="2")
    host = even_host(2, 1, 1, 6, 1, devices=gpus if gpu_count else gpus[1:], domains=[domain])
    wanted = asking(small_request(4), gpu_count=gpu_count, policy=policy, max_nodes=1)
    placement = place(host, wanted)
    assert (*placement.nodes, placement.relaxations) == expected


def test_an_emulators_core_is_taken_to_have_a_gpu_at_home() -> None:
    gpus = [DeviceSpec("0000:10:00.0", 0)]
    host = even_host(1, 2, 1, 6, 1, devices=gpus, domains=[pinned_domain("0-1", emulator="2")])
    wanted = asking(small_request(4, layout="pin-numa-pci"), gpu_count=1, max_nodes=1)
    placement = place(host, wanted)
    assert (placement.nodes, placement.relaxations) == ((0,), (Relaxation.EMULATOR_CORE,))


def test_vcpus_that_float_over_the_whole_host_leave_it_a_core() -> None:
    floating = structs.replace(PRESETS["pin"], pinning=Pinning.NODE, name="custom")
    wanted = asking(small_request(4), layout=floating)
    for packages, cores in ((1, 7), (2, 8)):
        assert len(vcpus(place(even_host(packages, 1, 1, 8, 1), wanted))) == cores
    # A reserve as large as a node takes from each node what the vCPUs there do not need.
    wanted = asking(wanted, policy=Policy.SPREAD, host_reserve=HostReserve(10, 0))
    pins = place(even_host(2, 1, 1, 8, 1), wanted).vcpu_pins
    assert list(map(str, pins)) == ["0-3", "0-3", "8-9", "8-9"]


@pytest.mark.parametrize(("policy", "node"), [(Policy.CORES_FIRST, 1), (Policy.SPREAD, 0)])
def test_where_vcpus_share_cores_a_gpu_set_counts_with_cores_first_alone(
    policy: Policy, node: int
) -> None:
    """Node 0 has four free cores; node 1 has four with the emulator's, and a GPU without peers."""
    gpus = [*(DeviceSpec(f"0000:1{i}:00.0", 0) for i in range(2)), DeviceSpec("0000:90:00.0", 1)]
    domain = pinned_domain("5", emulator="6")
    host = even_host(2, 1, 1, 5, 2, devices=gpus, domains=[domain])
    wanted = asking(
        small_request(6), gpu_count=1, policy=policy, max_nodes=1, reserved_pus=CpuSet.parse("0,10")
    )
    placement = place(host, wanted)
    assert placement.nodes == (node,)
    assert (Relaxation.EMULATOR_CORE in placement.relaxations) is bool(node)


def test_where_no_core_is_left_housekeeping_pus_come_before_those_of_vcpus() -> None:
    request = replace(small_request(3, iothreads=1), housekeeping_pus=CpuSet([3]))
    placement = place(even_host(1, 1, 1, 4, 1), request)
    assert (placement.emulator_pus, *placement.iothread_pus) == (CpuSet([3]), CpuSet([3]))


def test_named_housekeeping_pus_serve_the_emulator_and_take_no_vcpu() -> None:
    host = even_host(2, 1, 1, 4, 1)
    kept = asking(
        small_request(6), housekeeping_pus=CpuSet([0]), emulator_policy=EmulatorPolicy.HOUSEKEEPING
    )
    placement = place(host, kept)
    assert placement.emulator_pus == CpuSet([0])
    assert vcpus(placement).isdisjoint(CpuSet([0]))


def test_emulators_on_housekeeping_cores_share_one_however_far() -> None:
    gpus = [DeviceSpec(f"0000:1{i}:00.0", 0) for i in range(2)]
    gpus += [DeviceSpec("0000:90:00.0", 1)]
    domain = pinned_domain("15", emulator="14")
    host = even_host(2, 1, 1, 8, 1, devices=gpus, domains=[domain])
    wanted = asking(
        small_request(5, devices=["10:00.0"]), emulator_policy=EmulatorPolicy.HOUSEKEEPING
    )
    assert place(host, wanted).emulator_pus == CpuSet([14])


def test_with_bound_huge_pages_the_emulator_has_a_pu_on_every_node() -> None:
    # QEMU allocates the pages of a node on that node's CPUs, of those that its threads may run on.
    gpus = [DeviceSpec(f"0000:9{i}:00.0", i % 2) for i in range(8)]
    host = even_host(2, 1, 1, 8, 2, devices=gpus)
    request = replace(small_request(12), page_bytes=2 * MIB)
    placement = place(host, request)
    assert placement.emulator_pus is not None
    for node in host.nodes:
        assert not placement.emulator_pus.isdisjoint(node.pus)
    full = place(host, asking(request, vcpus=16))
    assert full.emulator_pus is not None
    assert all(not full.emulator_pus.isdisjoint(node.pus) for node in host.nodes)
    named = place(host, asking(request, emulator_pus=CpuSet([7])))
    assert "emulator-off-memory-node" in {f.id for f in named.findings}
    assert "emulator-off-memory-node" not in {f.id for f in placement.findings}
