"""Sockets, dies, cores, threads and caches, and L3s, as the guest is shown them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lxml import etree
from msgspec import structs
from msgspec.structs import replace

from homenode.cpuset import CpuSet
from homenode.errors import HomenodeError, InputError
from homenode.machine.topology import Host
from homenode.objective import Objective
from homenode.plan.pipeline import plan_file
from homenode.plan.placement import Placement
from homenode.plan.shape.assemble import assemble
from homenode.plan.shape.caches import guest_cpu
from homenode.plan.shape.guest_topology import may_share_sockets
from homenode.units import GIB, MIB
from homenode.vm.domain.copy import make_domain
from homenode.vm.layout import PRESETS, GuestCells, Pinning
from homenode.vm.model import GuestCache, GuestTopology
from homenode.vm.plan import Plan
from homenode.vm.plan_options import PlanOptions
from homenode.vm.sources import load_host
from tests.guest_shapes import placed
from tests.seeds import part
from tests.small_hosts import asking, even_host, small_request


def pins_of(host: Host, *parts: tuple[int, int], siblings: bool = False) -> list[CpuSet]:
    """CPUs of so many cores of each LLC: (LLC, cores), with all their threads or the first."""
    pins: list[CpuSet] = []
    for llc, count in parts:
        cores = [core for core in host.cores if core.pus <= host.llcs[llc].pus]
        for core in cores[:count]:
            pins += [CpuSet([pu]) for pu in core.pus][: None if siblings else 1]
    return pins


def shaped(
    counts: tuple[int, ...],
    threads: int = 1,
    *,
    host: Host | None = None,
    pins: list[CpuSet] | None = None,
    layout: str = "pin-numa",
) -> Plan:
    request = small_request(sum(counts), sum(counts) * GIB, layout=layout)
    placement = placed(counts, pins=pins, threads=threads)
    return assemble(host, request, placement)


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (None, None),
        (GuestTopology(2, 1, 2, 1), None),
        (GuestTopology(1, 1, 8, 1), GuestTopology(1, 1, 4, 1)),
        (GuestTopology(1, 1, 2, 2), GuestTopology(1, 1, 4, 1)),
    ],
)
def test_a_flat_guest_keeps_a_topology_that_is_still_true(
    stated: GuestTopology | None, expected: GuestTopology | None
) -> None:
    request = small_request(4, layout="pin")
    request = replace(request, guest=structs.replace(request.guest, cpu_topology=stated))
    assert assemble(even_host(2), request, placed((2, 2))).vm.cpu_topology == expected


@pytest.mark.parametrize(("vcpus", "expected"), [(1, None), (2, GuestTopology(1, 1, 2, 1))])
def test_a_flat_guest_of_a_chosen_layout_is_no_socket_per_vcpu(
    vcpus: int, expected: GuestTopology | None
) -> None:
    request = asking(small_request(vcpus, layout="pin"), objective=Objective.LATENCY)
    assert assemble(even_host(2), request, placed((vcpus,))).vm.cpu_topology == expected


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        (((0, 2), (1, 2)), GuestTopology(2, 1, 2, 2)),
        (((0, 4),), GuestTopology(1, 1, 4, 2)),
        (((0, 3), (1, 1)), GuestTopology(1, 1, 4, 2)),
    ],
)
def test_a_flat_guest_has_a_socket_for_each_package_that_gives_as_many_cores(
    cores: tuple[tuple[int, int], ...], expected: GuestTopology
) -> None:
    layout = structs.replace(PRESETS["pin-numa-smt"], cells=GuestCells.SINGLE, name="custom")
    host = even_host(2)
    placement = placed((8,), pins=pins_of(host, *cores, siblings=True), threads=2)
    assert assemble(host, small_request(8, layout=layout), placement).vm.cpu_topology == expected


def test_the_default_layout_touches_no_topology() -> None:
    request = small_request(4, layout="default")
    request = replace(
        request, guest=structs.replace(request.guest, cpu_topology=GuestTopology(1, 1, 2, 2))
    )
    placement = replace(placed(()), vcpu_nodes=())
    plan = assemble(even_host(2), request, placement)
    assert plan.vm.cpu_topology is None and plan.vm.vcpus == 4 and plan.vcpu_pins == ()


def test_cells_of_one_package_are_a_socket_each_and_it_is_said() -> None:
    host = even_host(1, 4)
    plan = shaped((4, 4, 4, 4), host=host)
    assert plan.vm.cpu_topology is not None and plan.vm.cpu_topology.sockets == 4
    assert any(
        "4 guest NUMA nodes is a socket" in text and "1 package" in text
        for text in plan.consequences
    )


def test_unequal_cells_are_several_sockets_and_none_is_cut() -> None:
    plan = shaped((24, 20))
    assert plan.vm.cpu_topology == GuestTopology(11, 1, 4, 1)
    assert [(f.id, f.severity) for f in plan.findings] == [("sockets-exceed-cells", "warning")]


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        # Two packages of two nodes each.
        (((0, 15), (1, 14), (2, 14), (3, 14)), GuestTopology(1, 1, 57, 1)),
        (((0, 13), (1, 11), (2, 12), (3, 12)), GuestTopology(2, 1, 24, 1)),
        (((0, 9), (1, 7)), GuestTopology(1, 1, 16, 1)),
    ],
)
def test_unequal_cells_of_an_intel_host_share_the_sockets_of_its_packages(
    cores: tuple[tuple[int, int], ...], expected: GuestTopology
) -> None:
    host = even_host(2, 2, 1, 24, 2, vendor="GenuineIntel")
    counts = tuple(count for _, count in cores)
    plan = shaped(counts, host=host, pins=pins_of(host, *cores))
    assert plan.vm.cpu_topology == expected
    found = {finding.id: finding.severity for finding in plan.findings}
    assert found["cells-share-socket"] == "info" and "sockets-exceed-cells" not in found


def test_cells_that_share_a_socket_and_its_cache_are_shown_one_l3() -> None:
    host = even_host(1, 2, 1, 8, 1, vendor="GenuineIntel")
    both = structs.replace(host.llcs[0], pus=host.llcs[0].pus | host.llcs[1].pus)
    host = structs.replace(
        host, llcs=(both,), pus=tuple(structs.replace(pu, llc=both.index) for pu in host.pus)
    )
    plan = shaped((5, 4), host=host, pins=[CpuSet([pu]) for pu in (0, 1, 2, 3, 4, 8, 9, 10, 11)])
    assert (
        plan.vm.cpu_topology == GuestTopology(1, 1, 9, 1)
        and plan.vm.cpu_cache is GuestCache.EMULATED
    )


@given(st.lists(st.integers(1, 24), min_size=1, max_size=6), st.sampled_from((1, 2, 4)))
def test_no_cell_cuts_a_socket_and_the_product_is_the_vcpus(cores: list[int], threads: int) -> None:
    counts = tuple(count * threads for count in cores)
    topology = shaped(counts, threads).vm.cpu_topology
    assert topology is not None and topology.vcpus == sum(counts)
    per_socket = topology.vcpus // topology.sockets
    starts = [sum(counts[:i]) for i in range(len(counts))]
    assert all(start % per_socket == 0 for start in starts)


def test_half_a_core_is_refused() -> None:
    with pytest.raises(InputError, match=r" 2 .* 3 "):
        shaped((4, 3), 2)


def test_topoext_is_asked_for_on_amd_when_a_topology_is_set() -> None:
    assert shaped((4, 4), host=even_host(2)).vm.topoext
    assert not shaped((4, 4), host=even_host(2, vendor="GenuineIntel")).vm.topoext
    assert not shaped((4, 4), host=even_host(2), layout="pin").vm.topoext


def test_topoext_waits_for_a_cpu_model_unless_siblings_need_it() -> None:
    host = even_host(2)
    request = small_request(8)
    request = replace(request, guest=structs.replace(request.guest, cpu_mode=None))
    assert not assemble(host, request, placed((4, 4))).vm.topoext
    assert assemble(host, request, placed((4, 4), threads=2)).vm.topoext


def whole_llcs(vendor: str, *, siblings: bool, take: int = 4) -> tuple[Host, Placement]:
    """Two nodes of two LLCs of four cores of two threads; so many cores of each are taken."""
    host = even_host(2, 1, 2, 4, 2, vendor=vendor)
    pins = pins_of(host, *((llc, take) for llc in range(4)), siblings=siblings)
    threads = 2 if siblings else 1
    return host, placed((2 * take * threads,) * 2, pins=pins, threads=threads)


def test_caches_pass_through_only_where_guest_and_host_agree() -> None:
    host, placement = whole_llcs("GenuineIntel", siblings=True)
    plan = assemble(host, small_request(32, layout="pin-numa-smt"), placement)
    assert plan.vm.cpu_topology == GuestTopology(2, 2, 4, 2)
    assert plan.vm.cpu_cache is GuestCache.PASSTHROUGH


def test_hidden_siblings_or_half_an_llc_get_an_emulated_l3_for_each_die() -> None:
    host, placement = whole_llcs("GenuineIntel", siblings=False)
    plan = assemble(host, small_request(16), placement)
    assert (
        plan.vm.cpu_topology == GuestTopology(2, 2, 4, 1)
        and plan.vm.cpu_cache is GuestCache.EMULATED
    )
    assert not plan.gaps
    host, placement = whole_llcs("GenuineIntel", siblings=True, take=3)
    plan = assemble(host, small_request(24, layout="pin-numa-smt"), placement)
    assert (
        plan.vm.cpu_topology == GuestTopology(2, 2, 3, 2)
        and plan.vm.cpu_cache is GuestCache.EMULATED
    )


def test_amd_is_shown_a_die_for_each_llc_with_topoext() -> None:
    host, placement = whole_llcs("AuthenticAMD", siblings=False)
    plan = assemble(host, small_request(16), placement)
    assert plan.vm.cpu_topology == GuestTopology(2, 2, 4, 1)
    assert plan.vm.cpu_cache is GuestCache.EMULATED and plan.vm.topoext
    assert not plan.gaps


def test_other_cpu_modes_never_pass_caches_through() -> None:
    host, placement = whole_llcs("GenuineIntel", siblings=True)
    request = small_request(32, layout="pin-numa-smt")
    for mode, cache in (
        ("custom", GuestCache.EMULATED),
        ("host-model", GuestCache.EMULATED),
        ("maximum", GuestCache.PASSTHROUGH),
        (None, GuestCache.EMULATED),
    ):
        guest = structs.replace(request.guest, cpu_mode=mode)
        assert assemble(host, replace(request, guest=guest), placement).vm.cpu_cache is cache


@pytest.mark.parametrize("vendor", ["AuthenticAMD", "GenuineIntel", "HygonGenuine"])
def test_llcs_that_are_not_filled_equally_are_not_shown_and_amd_loses_topoext(vendor: str) -> None:
    host = even_host(2, 1, 2, 4, 1, vendor=vendor)
    pins = pins_of(host, (0, 4), (1, 2), (2, 4), (3, 2))
    plan = assemble(host, small_request(12), placed((6, 6), pins=pins))
    assert plan.vm.cpu_topology == GuestTopology(2, 1, 6, 1)
    assert plan.vm.cpu_cache is GuestCache.DISABLED
    assert plan.vm.topoext is (None if vendor == "GenuineIntel" else False)
    assert [(f.id, f.severity) for f in plan.findings] == [("guest-l3-not-mirrored", "info")]


def test_siblings_of_amd_keep_an_l3_that_is_false_with_a_warning() -> None:
    host = even_host(2, 1, 2, 4, 2)
    pins = pins_of(host, (0, 3), (1, 2), (2, 3), (3, 2), siblings=True)
    placement = placed((10, 10), pins=pins, threads=2)
    plan = assemble(host, small_request(20, layout="pin-numa-smt"), placement)
    assert plan.vm.cpu_cache is GuestCache.DISABLED and plan.vm.topoext
    found = [f for f in plan.findings if f.id == "guest-l3-not-mirrored"]
    assert [f.severity for f in found] == ["warning"] and "each guest socket" in found[0].observed


@pytest.mark.parametrize(
    ("mode", "cores_per_llc", "cache"),
    [
        ("host-passthrough", 8, GuestCache.PASSTHROUGH),
        ("host-model", 8, GuestCache.DISABLED),
        # A complex of Zen 3 with fewer than its eight cores: its leaf may count all of them.
        ("host-passthrough", 6, GuestCache.DISABLED),
        ("host-passthrough", 4, GuestCache.DISABLED),
    ],
)
def test_amds_own_leaf_counts_off_llcs_of_which_the_last_is_not_filled(
    mode: str, cores_per_llc: int, cache: GuestCache
) -> None:
    host = even_host(2, 1, 2, cores_per_llc, 2)
    pins = pins_of(host, (0, cores_per_llc), (1, 3), (2, cores_per_llc), (3, 3), siblings=True)
    each = 2 * (cores_per_llc + 3)
    request = small_request(2 * each, layout="pin-numa-smt")
    request = replace(request, guest=structs.replace(request.guest, cpu_mode=mode))
    assert assemble(host, request, placed((each, each), pins=pins, threads=2)).vm.cpu_cache is cache


def test_cells_share_sockets_where_the_guest_has_a_cpu_of_intel() -> None:
    request = small_request()
    for vendor, domain_type, may_share in (
        ("GenuineIntel", "kvm", True),
        ("GenuineIntel", "qemu", False),  # a CPU of another vendor
        ("AuthenticAMD", "kvm", False),
    ):
        guest = structs.replace(request.guest, domain_type=domain_type)
        host = even_host(2, vendor=vendor)
        assert may_share_sockets(host, replace(request, guest=guest)) is may_share


def one_llc(host: Host) -> Host:
    """The host with all CPUs on one LLC, as sub-NUMA clusters have it."""
    whole = structs.replace(host.llcs[0], pus=CpuSet.union(llc.pus for llc in host.llcs))
    return structs.replace(
        host, llcs=(whole,), pus=tuple(structs.replace(pu, llc=whole.index) for pu in host.pus)
    )


def test_cells_of_one_llc_share_a_socket_on_intel_and_are_shown_no_l3_elsewhere() -> None:
    pins = [CpuSet([pu]) for pu in (0, 1, 2, 4, 5, 6)]
    for vendor, topology, cache in (
        ("GenuineIntel", GuestTopology(1, 1, 6, 1), GuestCache.EMULATED),
        ("AuthenticAMD", GuestTopology(2, 1, 3, 1), GuestCache.DISABLED),
    ):
        host = one_llc(even_host(1, 2, 1, 4, 1, vendor=vendor))
        plan = assemble(host, small_request(6), placed((3, 3), pins=pins))
        assert (plan.vm.cpu_topology, plan.vm.cpu_cache) == (topology, cache)
        says_so = any("is a socket" in text for text in plan.consequences)
        assert says_so is (topology.sockets == 2)


def test_llcs_that_are_not_known_are_not_shown() -> None:
    host = even_host(2, tells_llcs=False)
    plan = assemble(
        host, small_request(4), placed((2, 2), pins=[CpuSet([i]) for i in (0, 1, 4, 5)])
    )
    assert plan.vm.cpu_cache is GuestCache.DISABLED and plan.llcs == ()
    assert any("not known" in f.observed for f in plan.findings if f.id == "guest-l3-not-mirrored")


def test_vcpus_that_float_over_several_llcs_are_shown_none_and_over_one_its_own() -> None:
    layout = structs.replace(PRESETS["pin-numa"], pinning=Pinning.NODE, name="custom")
    for llcs, cache in ((2, GuestCache.DISABLED), (1, GuestCache.EMULATED)):
        host = even_host(2, 1, llcs, 4, 1)
        pins = [host.nodes[0].pus] * 2 + [host.nodes[1].pus] * 2
        plan = assemble(host, small_request(4, layout=layout), placed((2, 2), pins=pins))
        assert plan.vm.cpu_cache is cache


@pytest.mark.parametrize("stated", [None, "emulate", "passthrough", "disable"])
@pytest.mark.parametrize(
    ("topology", "parts", "is_true"),
    [
        (GuestTopology(1, 1, 4, 1), ((0, 4),), True),
        (GuestTopology(1, 1, 4, 1), ((0, 2), (1, 2)), False),
        (GuestTopology(2, 1, 2, 1), ((0, 2), (1, 2)), True),
        # Without a topology libvirt makes each vCPU a socket with an L3 of its own.
        (None, ((0, 4),), False),
    ],
)
def test_a_flat_guest_that_is_pinned_keeps_its_caches_only_where_they_are_true(
    stated: str | None,
    topology: GuestTopology | None,
    parts: tuple[tuple[int, int], ...],
    is_true: bool,
) -> None:
    host = even_host(2, 1, 1, 4, 1, vendor="GenuineIntel")
    request = small_request(4, layout="pin")
    guest = structs.replace(request.guest, cpu_topology=topology, cpu_cache=stated)
    plan = assemble(host, replace(request, guest=guest), placed((4,), pins=pins_of(host, *parts)))
    kept = is_true or stated == "disable"
    if stated == "passthrough" and not is_true:
        kept = False
    assert plan.vm.cpu_topology is None
    assert plan.vm.cpu_cache is (None if kept else GuestCache.DISABLED)


def test_the_default_layout_leaves_caches_that_are_false() -> None:
    request = small_request(4, layout="default")
    plan = assemble(even_host(2), request, replace(placed(()), vcpu_nodes=()))
    assert plan.vm.cpu_cache is None and plan.vm.topoext is None and not plan.findings


@pytest.mark.parametrize(("model", "brings"), [("EPYC-Milan", True), ("Opteron_G5", False)])
def test_topoext_comes_with_the_models_that_have_it(model: str, brings: bool) -> None:
    guest = structs.replace(small_request(4).guest, cpu_mode="custom", cpu_model=model)
    assert guest_cpu(even_host(1), guest).has_topoext is brings


def test_zen_1_takes_eight_apic_ids_for_an_llc_whatever_it_is_shown() -> None:
    cases = (
        *((model, 4, GuestCache.DISABLED) for model in (1, 0x1F)),
        *((model, 4, GuestCache.EMULATED) for model in (0x20, None)),
    )
    for model, cores, cache in cases:
        host = even_host(1, 1, 2, cores, 1)
        host = structs.replace(host, cpu=structs.replace(host.cpu, family=0x17, model=model))
        pins = pins_of(host, (0, cores), (1, cores))
        plan = assemble(host, small_request(8), placed((8,), pins=pins))
        assert plan.vm.cpu_topology == GuestTopology(1, 2, 4, 1) and plan.vm.cpu_cache is cache


def test_arm_guests_have_no_dies_and_keep_their_caches() -> None:
    host, placement = whole_llcs("ARM", siblings=False)
    request = small_request(16)
    guest = structs.replace(request.guest, architecture="aarch64", machine="virt")
    plan = assemble(host, replace(request, guest=guest), placement)
    assert plan.vm.cpu_topology == GuestTopology(2, 1, 8, 1)
    assert plan.vm.cpu_cache is None and not plan.vm.topoext


def test_the_plan_names_the_llcs_under_the_vcpus() -> None:
    host = even_host(2, 1, 4, 2, 1)
    pins = pins_of(host, (1, 2), (2, 2), (5, 2), (6, 2))
    plan = assemble(host, small_request(8, 8 * MIB), placed((4, 4), pins=pins))
    assert plan.llcs == (1, 2, 5, 6)


EPYC = (
    "epyc-nps4-gpu-nic",
    "epyc9654-2p-1node",
    "mi350x-epyc9575f",
    "rtx4090-epyc7702",
    "rtx5090-epyc7702",
)


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
    for vcpus in part(range(2, 49), 0, every=5):
        document = make_domain(vcpus, 16 * GIB, architecture="x86_64", name="vm")
        try:
            tuned = plan_file(document, "vm", PlanOptions(layout=layout), host)
        except HomenodeError:
            continue
        shown, real = shown_llcs(tuned.document, host)
        assert shown == real, vcpus
