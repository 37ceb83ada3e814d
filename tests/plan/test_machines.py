"""Placements on machines that users name: EPYC, hybrid desktop, Grace, odd SMT, tight memory."""

import pytest
from msgspec import structs

from homenode.cpuset import CpuSet, NodeIndex
from homenode.errors import InputError, UsageError
from homenode.findings import Rejection
from homenode.machine.topology import Host, MemoryKind
from homenode.plan.placement import Placement
from homenode.plan.request import GuestRequest
from homenode.plan.search.place import place
from homenode.units import GIB
from homenode.vm.plan import Relaxation, Unplannable
from homenode.vm.plan_options import MemoryMode, make_cell
from tests.figures import numbers
from tests.small_hosts import (
    DeviceSpec,
    NodeSpec,
    asking,
    even_host,
    floating_domain,
    host_of,
    pinned_domain,
    small_request,
)

EPYC_9654 = even_host(2, 1, 12, 8, 2, memory_bytes=384 * GIB, name="2x9654")


def llcs_of(host: Host, placement: Placement) -> dict[int, int]:
    """Cores in use by LLC."""
    used: dict[int, set[int | None]] = {}
    pus = {pu.index: pu for pu in host.pus}
    for pin in placement.vcpu_pins:
        for index in pin:
            pu = pus[index]
            used.setdefault(pu.llc if pu.llc is not None else -1, set()).add(pu.core)
    return {llc: len(cores) for llc, cores in used.items()}


@pytest.mark.parametrize(("vcpus", "llcs"), [(8, 1), (16, 2), (24, 3)])
def test_vcpus_one_per_core_fill_whole_llcs(vcpus: int, llcs: int) -> None:
    used = llcs_of(EPYC_9654, place(EPYC_9654, small_request(vcpus)))
    assert list(used.values()) == [8] * llcs


def test_a_plan_names_the_least_that_holds_the_vm() -> None:
    host = even_host(2, 3, 2, 2, 1)  # 3 nodes of 2 LLCs of 2 cores in each of 2 packages
    spans = {2: "one LLC", 3: "one node", 11: "one package", 15: "across packages", 23: "all nodes"}
    for vcpus, span in spans.items():
        assert place(host, small_request(vcpus, layout="pin-bound")).fallback == span


def one_node_over_two_packages() -> Host:
    """The same CPUs with all memory interleaved: one node that spans both packages."""
    host = EPYC_9654
    everything = host.nodes[0].pus | host.nodes[1].pus
    node = structs.replace(host.nodes[0], pus=everything, memory_bytes=768 * GIB, package=None)
    pus = tuple(structs.replace(pu, node=NodeIndex(0)) for pu in host.pus)
    return structs.replace(host, nodes=(node,), distances=((10,),), pus=pus)


@pytest.mark.parametrize(("vcpus", "llcs"), [(8, 1), (16, 2), (24, 3), (96, 12), (104, 13)])
def test_a_node_over_two_packages_still_fills_whole_llcs_of_one(vcpus: int, llcs: int) -> None:
    host = one_node_over_two_packages()
    placement = place(host, small_request(vcpus))
    used = llcs_of(host, placement)
    assert list(used.values()) == [8] * llcs
    packages = {pu.package for pu in host.pus for pin in placement.vcpu_pins if pu.index in pin}
    assert len(packages) == (1 if vcpus <= 96 else 2)
    cost = {term.name: term.value for term in placement.cost}
    assert cost["packages_spanned"] == len(packages)


def test_of_two_packages_of_a_node_the_one_with_fewer_free_cores_is_used_up() -> None:
    host = structs.replace(one_node_over_two_packages(), domains=(pinned_domain("96-103"),))
    assert set(llcs_of(host, place(host, small_request(8)))) == {13}


def test_a_broken_llc_is_used_up_before_a_whole_one_is_broken() -> None:
    host = even_host(1, 1, 3, 8, 1, domains=[pinned_domain("8-11")])
    placement = place(host, small_request(4))
    assert list(llcs_of(host, placement)) == [1]
    # An LLC that is not filled is under the last vCPUs.
    assert list(llcs_of(host, place(host, small_request(11))).values()) == [8, 3]


def test_unknown_llcs_are_a_gap_and_not_one_per_core() -> None:
    host = even_host(1, 1, 2, 4, 2, tells_llcs=False)
    placement = place(host, small_request(6))
    cost = {term.name: term.value for term in placement.cost}
    assert cost["llcs_spanned"] == 1
    assert any(gap.subject == "LLCs" for gap in placement.gaps)


I7_1370P = host_of([NodeSpec(((2,) * 6 + (1,) * 8,), efficiency_cores=8)], name="i7-1370P")
P_PUS, E_PUS = CpuSet.parse("0-5,14-19"), CpuSet.parse("6-13")


@pytest.mark.parametrize("layout", ["pin", "pin-numa", "pin-numa-smt"])
def test_a_hybrid_host_gives_performance_cores_to_vcpus_and_efficiency_cores_to_qemu(
    layout: str,
) -> None:
    placement = place(I7_1370P, small_request(6, layout=layout))
    assert all(pin <= P_PUS for pin in placement.vcpu_pins)
    assert placement.emulator_pus is not None
    assert placement.emulator_pus <= E_PUS


@pytest.mark.parametrize("layout", ["pin", "pin-numa", "pin-numa-smt"])
@pytest.mark.parametrize("mixed", [False, True])
def test_24_vcpus_on_a_host_of_20_pus_are_refused_with_that_number(
    layout: str, mixed: bool
) -> None:
    request = asking(small_request(24, layout=layout), keep_vcpus=True, mixed_kinds=mixed)
    with pytest.raises(Unplannable, match="20"):
        place(I7_1370P, request)


def test_mixed_kinds_take_performance_cores_first_and_give_efficiency_cores_their_own_cell() -> (
    None
):
    unasked = place(I7_1370P, small_request(8))
    assert [f.severity for f in unasked.findings if f.id == "mixed-kinds"] == ["warning"]
    placement = place(I7_1370P, asking(small_request(8), mixed_kinds=True))
    assert placement.relaxations == (Relaxation.MIXED_KINDS,)
    assert placement.nodes == (0, 0)
    assert placement.vcpu_nodes == (0,) * 6 + (1,) * 2
    assert all(pin <= P_PUS for pin in placement.vcpu_pins[:6])
    assert all(pin <= E_PUS for pin in placement.vcpu_pins[6:])
    assert [f.severity for f in placement.findings if f.id == "mixed-kinds"] == ["info"]


def test_mixed_kinds_take_all_20_pus_where_the_vcpus_must_be_kept() -> None:
    request = asking(small_request(20, layout="pin-numa-smt"), keep_vcpus=True, mixed_kinds=True)
    placement = place(I7_1370P, request)
    assert len(placement.vcpu_pins) == 20
    assert placement.threads_per_core == 1
    assert placement.relaxations == (
        Relaxation.MIXED_KINDS,
        Relaxation.SHARED_CORES,
        Relaxation.HOST_CORE,
    )
    assert any("two of its vCPUs share one" in f.observed for f in placement.findings)


@pytest.mark.parametrize("keep", [False, True])
def test_mixed_kinds_shown_as_single_threads_have_a_whole_core_each_while_there_are_some(
    keep: bool,
) -> None:
    request = small_request(13, layout="pin-numa-smt")
    placement = place(I7_1370P, asking(request, keep_vcpus=keep, mixed_kinds=True))
    core_of = {pu: core.id for core in I7_1370P.cores for pu in core.pus}
    assert len({core_of[pu] for pin in placement.vcpu_pins for pu in pin}) == 13
    assert placement.vcpu_nodes == (0,) * 6 + (1,) * 7
    assert placement.threads_per_core == 1
    assert placement.relaxations == (Relaxation.MIXED_KINDS, Relaxation.SIBLINGS_NOT_EXPOSED)


def test_mixed_kinds_beyond_the_whole_cores_share_them() -> None:
    request = asking(small_request(15, layout="pin-numa-smt"), mixed_kinds=True)
    assert Relaxation.SHARED_CORES in place(I7_1370P, request).relaxations


def test_a_cell_that_the_user_gives_has_cores_of_one_kind() -> None:
    request = asking(small_request(8), explicit_cells=(make_cell(8, 4 * GIB),))
    assert place(I7_1370P, request).relaxations == (Relaxation.SHARED_CORES,)


def grace() -> Host:
    """Four Grace CPUs, each with a GPU whose memory is a node of its own and seven more nodes."""
    cpus = [NodeSpec(((1,) * 72,), package=i, index=i, memory_bytes=120 * GIB) for i in range(4)]
    hbm = [
        NodeSpec(
            (),
            package=i // 8,
            index=4 + i,
            memory_bytes=96 * GIB if i % 8 == 0 else 0,
            memory_kind=MemoryKind.GPU,
            gpu=f"000{i // 8 + 8}:01:00.0",
        )
        for i in range(32)
    ]
    gpus = [DeviceSpec(f"000{i + 8}:01:00.0", node=i, root=i) for i in range(4)]
    home = [*range(4), *(i // 8 for i in range(32))]
    table = tuple(
        tuple(
            10 if i == j else 80 if a == b else 40 if max(i, j) < 4 else 120
            for j, b in enumerate(home)
        )
        for i, a in enumerate(home)
    )
    return host_of([*cpus, *hbm], devices=gpus, distances=table, vendor="ARM", name="4xGH200")


@pytest.mark.parametrize("gpu", range(4))
def test_a_vm_with_a_grace_gpu_gets_the_cpu_node_of_that_gpu(gpu: int) -> None:
    placement = place(grace(), small_request(64, 64 * GIB, devices=[f"000{gpu + 8}:01:00.0"]))
    assert placement.nodes == (gpu,)
    assert placement.memory_nodes == (gpu,)


def test_gpu_memory_is_never_given_to_a_guest_even_if_asked() -> None:
    host = grace()
    refused = next(r for r in _rejections(host, small_request(300)) if r.constraint == "gpu-memory")
    assert len(refused.nodes) == 32
    asked = asking(small_request(8), memory_nodes_allowed=(NodeIndex(4),))
    with pytest.raises(UsageError, match="GPU"):
        place(host, asked)
    with pytest.raises(InputError, match="99"):
        place(host, asking(small_request(8), memory_nodes_allowed=(NodeIndex(99),)))


def _rejections(host: Host, request: GuestRequest) -> tuple[Rejection, ...]:
    with pytest.raises(Unplannable) as refusal:
        place(host, request)
    return refusal.value.rejections


def test_with_smt_off_vcpus_take_cores_and_siblings_are_said_to_be_missing() -> None:
    host = even_host(2, 1, 1, 8, 1)
    placement = place(host, small_request(8, layout="pin-numa-smt"))
    assert len(placement.vcpu_pins) == 8
    assert placement.threads_per_core == 1
    assert "siblings-not-exposed" in {f.id for f in placement.findings}


def test_with_smt_in_one_package_only_siblings_come_from_there_and_cores_from_both() -> None:
    host = host_of([NodeSpec(((1,) * 8,), 0), NodeSpec(((2,) * 8,), 1)])
    siblings = place(host, small_request(8, layout="pin-numa-smt"))
    assert siblings.nodes == (1,)
    assert len(siblings.vcpu_pins) == 16
    cores = place(host, small_request(16, layout="pin-numa"))
    assert cores.nodes == (0, 1)
    assert len(cores.vcpu_pins) == 16
    both = place(host, small_request(16, layout="pin-numa-smt"))
    assert both.threads_per_core == 1
    assert Relaxation.SIBLINGS_NOT_EXPOSED in both.relaxations


def test_smt4_counts_cores_and_exposes_all_four_siblings() -> None:
    host = even_host(2, 1, 1, 4, 4)
    assert place(host, small_request(8)).nodes == (0, 1)
    placement = place(host, small_request(4, layout="pin-numa-smt"))
    assert placement.threads_per_core == 4
    assert len(placement.vcpu_pins) == 16
    assert [str(pin) for pin in placement.vcpu_pins[:5]] == ["0", "8", "16", "24", "1"]


def test_isolated_cores_serve_vcpus_first_and_never_the_emulator() -> None:
    host = even_host(1, 1, 2, 4, 1, isolated="2-3,6-7", nohz_full="2-3,6-7")
    placement = place(host, small_request(4, layout="pin"))
    assert CpuSet(pu for pin in placement.vcpu_pins for pu in pin) == CpuSet.parse("2-3,6-7")
    assert placement.emulator_pus is not None
    assert placement.emulator_pus.isdisjoint(CpuSet.parse("2-3,6-7"))
    wider = place(host, small_request(6, layout="pin"))
    assert CpuSet.parse("2-3,6-7") <= CpuSet(pu for pin in wider.vcpu_pins for pu in pin)
    assert "vcpus-not-isolated" in {f.id for f in wider.findings}
    half = place(even_host(1, 1, 1, 4, 2, isolated="0,3,7"), small_request(1, layout="pin"))
    assert half.vcpu_pins == (CpuSet([3]),), "the host may use core 0"


def test_a_refusal_says_what_each_node_lacks_and_who_has_it() -> None:
    host = even_host(2, 1, 1, 64, 1, domains=[pinned_domain("64-71", name="db")])
    reserved = asking(small_request(60), reserved_pus=CpuSet.parse("0-7"), max_nodes=1)
    rejections = {r.nodes: r for r in _rejections(host, reserved) if len(r.nodes) == 1}
    first = rejections[(NodeIndex(0),)]
    assert first.constraint == "cores"
    assert {60, 56, 8} <= set(numbers(first.detail)) and "0-7" in first.detail
    assert any("--max-nodes 2" in (r.hint or "") for r in _rejections(host, reserved))
    second = rejections[(NodeIndex(1),)].detail
    assert 8 in numbers(second) and "64-71" in second and "db" in second


def test_94_vcpus_on_four_nodes_get_unequal_cells_without_a_flag() -> None:
    uneven = place(even_host(4, 1, 1, 28, 2, vendor="GenuineIntel"), small_request(94))
    assert sorted(uneven.vcpu_nodes.count(i) for i in range(4)) == [23, 23, 24, 24]
    assert uneven.relaxations == ("unequal cells",)
    assert "unequal-cells" in {f.id for f in uneven.findings}


def test_floating_domains_are_a_gap_and_shut_off_ones_count_only_if_asked() -> None:
    host = even_host(
        1, domains=[floating_domain(4), pinned_domain("0-1", name="off", running=False)]
    )
    placement = place(host, small_request(4))
    assert any("floating" in gap.subject for gap in placement.gaps)
    counted = place(host, asking(small_request(4), reserve_defined=True))
    assert "shared cores" in counted.relaxations


def test_the_default_layout_places_nothing() -> None:
    placement = place(EPYC_9654, small_request(4, layout="default"))
    assert placement.nodes == placement.vcpu_pins == placement.memory_nodes == ()
    assert placement.emulator_pus is None


def test_pin_bound_binds_the_memory_to_the_chosen_nodes() -> None:
    request = asking(small_request(120, layout="pin-bound"), memory_mode=MemoryMode.INTERLEAVE)
    assert place(EPYC_9654, request).memory_nodes == (0, 1)
    assert place(EPYC_9654, small_request(120, layout="pin")).memory_nodes == ()
