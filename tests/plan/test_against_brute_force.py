"""The planner's answer is the best there is: compared with trying everything, on random hosts.

Hosts and requests are drawn from a random.Random, so that a sweep over seeds is cheap and
Hypothesis can shrink what fails.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs
from msgspec.structs import replace

from homenode.cpuset import CpuSet
from homenode.machine.pci import DeviceKind, DeviceLink, LinkKind
from homenode.machine.topology import Host, HostReserve, PagePool, RunningDomain
from homenode.plan.placement import Placement
from homenode.plan.request import GuestRequest
from homenode.plan.search import node_sets
from homenode.plan.search.place import place
from homenode.units import GIB, MIB
from homenode.vm.model import GuestTopology
from homenode.vm.plan import Relaxation, Unplannable
from homenode.vm.plan_options import Balance, DefinitionSiblings, DeviceLocality, Policy
from tests.brute_force import Cores, Fallback, Memory, best_by_force
from tests.seeds import seeds
from tests.small_hosts import (
    DeviceSpec,
    NodeSpec,
    asking,
    floating_domain,
    host_of,
    pinned_domain,
    small_request,
)

SHRINKING = settings(
    max_examples=settings.default.max_examples if settings.default else 100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
KINDS = (*(DeviceKind.GPU,) * 5, DeviceKind.NIC, DeviceKind.NVME, DeviceKind.NVSWITCH)
BOARDS = (None, None, None, "NVIDIA H100 80GB HBM3", "NVIDIA B200")
LAYOUTS = (
    "pin",
    "pin-bound",
    "pin-numa",
    "pin-numa",
    "pin-numa-smt",
    "pin-numa-pci",
    "pin-numa-pci",
    "pin-numa-pci-smt",
)
LOCALITIES = (*(DeviceLocality.PREFER,) * 4, DeviceLocality.REQUIRE, DeviceLocality.IGNORE)
RESERVES = (
    HostReserve(),
    HostReserve(),
    HostReserve(0, 0),
    HostReserve(1, 512 * MIB),
    HostReserve(2, 512 * MIB),
)
CONCEDED: dict[Relaxation, Callable[[Fallback], bool]] = {
    Relaxation.HOST_MEMORY: lambda fallback: not fallback.keeps_memory,
    Relaxation.SHARED_CORES: lambda fallback: fallback.cores is Cores.SHARED,
    Relaxation.MIXED_KINDS: lambda fallback: fallback.mixed,
    Relaxation.HOST_CORE: lambda fallback: not fallback.keeps_core,
    Relaxation.UNEVEN_MEMORY: lambda fallback: fallback.memory is Memory.UNEVEN,
    Relaxation.MEMORY_ELSEWHERE: lambda fallback: fallback.memory is Memory.ELSEWHERE,
}
POOLS = ((), (), (PagePool(2 * MIB, 512, 300),), (PagePool(2 * MIB, 1024, 1024),))


def some_pus(draw: random.Random, total: int, most: int) -> CpuSet:
    return CpuSet(draw.sample(range(total), min(total, draw.randint(0, most))))


def node_specs(draw: random.Random) -> list[NodeSpec]:
    packages = draw.randint(1, 3)
    specs = []
    threads = draw.choice(((1, 2, 2), (1, 2, 2), (2,), (2,), (2, 4)))
    hybrid = draw.random() < 0.15
    for number in range(draw.randint(2, 5)):
        count = draw.choice((0, 1, 1, 1, 2)) if number else draw.randint(1, 2)
        llcs = [
            tuple(draw.choice(threads) for _ in range(draw.randint(1, 3))) for _ in range(count)
        ]
        specs.append(
            NodeSpec(
                tuple(llcs),
                package=draw.randrange(packages),
                index=number * 2 + 1 if number else 0,
                memory_bytes=draw.choice((0, 4, 6, 8, 8, 8, 200)) * GIB,
                free_bytes=draw.choice((None, None, None, 3 * GIB, 5 * GIB)),
                pools=draw.choice(POOLS),
                efficiency_cores=draw.randint(0, 2) if hybrid else None,
            )
        )
    return specs


def distances(draw: random.Random, count: int) -> tuple[tuple[int, ...], ...]:
    entries = (11, 12, 12, 12, 16, 21, 32, 255)
    return tuple(
        tuple(10 if i == j else draw.choice(entries) for j in range(count)) for i in range(count)
    )


def device_specs(draw: random.Random, nodes: Sequence[int], most: int) -> list[DeviceSpec]:
    return [
        DeviceSpec(
            f"0000:{16 + number:02x}:00.0",
            node=draw.choice((None, *nodes, *nodes)),
            kind=draw.choice(KINDS),
            root=draw.randint(0, 2),
            switch=draw.choice((None, None, 0, 1)),
        )
        for number in range(draw.randint(0, most))
    ]


def with_fabric(draw: random.Random, host: Host) -> Host:
    """Some hosts have NVSwitches and give the GPUs' modules, others bridges between GPUs."""
    gpus = [d.bdf for d in host.devices_of_kind(DeviceKind.GPU)]
    board = draw.choice(BOARDS) if len(gpus) > 1 else None
    if board is None:
        pairs = draw.sample(gpus, len(gpus)) if draw.random() < 0.5 else []
        kind = draw.choice((LinkKind.NVLINK, LinkKind.XGMI))
        links = [DeviceLink(kind, a, b) for a, b in zip(pairs[::2], pairs[1::2], strict=False)]
        return structs.replace(host, links=tuple(links))
    assignments = dict(zip(gpus, draw.sample(range(1, 9), len(gpus)), strict=True))
    known = {bdf: assignment for bdf, assignment in assignments.items() if draw.random() < 0.85}
    return structs.replace(
        host,
        pci_devices=tuple(
            structs.replace(d, name=board, module_id=known.get(d.bdf))
            if d.bdf in assignments
            else d
            for d in host.pci_devices
        ),
    )


def other_domains(
    draw: random.Random, pus: int, nodes: Sequence[int], gpus: Sequence[str]
) -> list[RunningDomain]:
    domains: list[RunningDomain] = []
    for number in range(draw.randint(0, 2)):
        size = draw.choice((0, 0, 512, 1536, 3072)) * MIB
        planned = draw.random() < 0.3
        domain = pinned_domain(
            str(some_pus(draw, pus, 3)),
            name=f"other{number}",
            running=not planned and draw.random() < 0.75,
            emulator=str(some_pus(draw, pus, 2)) if draw.random() < 0.6 else None,
            memory_by_node=((draw.choice(nodes), size),) if size else (),
            memory_bytes=size,
            page_bytes=draw.choice((None, None, 2 * MIB)),
            devices=tuple(bdf for bdf in gpus if draw.random() < 0.2),
        )
        iothreads = (some_pus(draw, pus, 1),) if draw.random() < 0.2 else ()
        domains.append(structs.replace(domain, iothread_pus=iothreads, planned=planned))
    return [*domains, floating_domain(2)] if draw.random() < 0.2 else domains


def small_host(draw: random.Random) -> Host:
    """Two to five nodes with whatever may differ between them."""
    specs = node_specs(draw)
    total = sum(sum(llc) for spec in specs for llc in spec.llcs)
    indices = [spec.index or 0 for spec in specs]
    devices = device_specs(draw, indices, 5)
    gpus = [device.bdf for device in devices if device.kind is DeviceKind.GPU]
    host = host_of(
        specs,
        distances=distances(draw, len(specs)) if draw.random() < 0.5 else None,
        tells_distances=draw.random() < 0.75,
        devices=devices,
        domains=other_domains(draw, total, indices, gpus),
        disallowed=str(some_pus(draw, total, 1)),
        isolated=str(some_pus(draw, total, 3)) if draw.random() < 0.5 else "",
        tells_llcs=draw.random() < 0.75,
    )
    return with_fabric(draw, host)


def small_wish(draw: random.Random, host: Host) -> GuestRequest:
    layout = draw.choice(LAYOUTS)
    policies = [*(Policy.CORES_FIRST,) * 5, Policy.SPREAD, Policy.ANY]
    if layout.endswith("-smt"):
        policies.append(Policy.MEMORY_FIRST)
    # Small numbers fit one node, so many are drawn from what it takes several for.
    few = draw.random() < 0.5
    most = draw.choice((len(host.cores), len(host.cores), len(host.pus)))
    vcpus = draw.randint(1, 4) if few else draw.randint(3, max(3, most))
    request = small_request(vcpus, draw.choice((1, 1, 2, 4, 9)) * GIB, layout=layout)
    bdfs = [d.bdf for d in host.pci_devices if d.kind is not DeviceKind.BRIDGE]
    gpus = [d.bdf for d in host.devices_of_kind(DeviceKind.GPU)]
    policy = draw.choice(policies)
    threads = draw.choice((2, 2, 4))
    if not layout.endswith("-smt") and vcpus % threads == 0 and draw.random() < 0.5:
        shown = structs.replace(
            request.guest, cpu_topology=GuestTopology(1, 1, vcpus // threads, threads)
        )
        request = replace(request, guest=shown, document_siblings=DefinitionSiblings.WHEN_SHORT)
    chooses = bool(gpus) and draw.random() < 0.6
    # What a running VM has may be named, with a warning, but is not compared here.
    barred = {bdf for domain in host.domains for bdf in domain.devices} | set(gpus * chooses)
    return asking(
        request,
        devices=tuple(bdf for bdf in bdfs if bdf not in barred and draw.random() < 0.5),
        gpu_count=draw.randint(1, min(3, len(gpus))) if chooses else None,
        without_nvlink=draw.random() < 0.2,
        device_locality=draw.choice(LOCALITIES),
        policy=policy,
        balance=draw.choice((None, None, *Balance)),
        host_reserve=draw.choice(RESERVES),
        keep_vcpus=draw.random() < 0.5,
        unequal_cells=draw.random() < 0.3,
        max_nodes=draw.choice((None, None, None, None, 2)),
        page_bytes=draw.choice((None, None, 2 * MIB)),
        reserved_pus=some_pus(draw, 8, 2),
        reserve_defined=draw.random() < 0.5,
        replaces=draw.choice(((), (), ("other1",))),
    )


def wide_host(draw: random.Random) -> Host:
    """Five to eight plain nodes over up to four packages, some cores taken, up to six GPUs."""
    count, packages = draw.randint(5, 8), draw.randint(1, 4)
    specs = [
        NodeSpec(
            ((1,) * draw.randint(1, 3),),
            package=draw.randrange(packages),
            memory_bytes=draw.choice((4, 8)) * GIB,
        )
        for _ in range(count)
    ]
    total = sum(len(spec.llcs[0]) for spec in specs)
    in_use = some_pus(draw, total, 4)
    devices = [
        DeviceSpec(
            f"0000:{16 + number:02x}:00.0",
            node=draw.randrange(count),
            switch=draw.choice((None, 0)),
        )
        for number in range(draw.randint(0, 6))
    ]
    host = host_of(
        specs,
        devices=devices,
        domains=[pinned_domain(str(in_use))] if in_use else [],
        distances=distances(draw, count) if draw.random() < 0.3 else None,
        # Where all nodes are equally far, packages decide.
        tells_distances=draw.random() < 0.5,
    )
    return with_fabric(draw, host)


def wide_wish(draw: random.Random, host: Host) -> GuestRequest:
    layout = draw.choice(("pin-numa-pci", "pin-numa", "pin"))
    vcpus = draw.randint(2, 5 if layout == "pin" else 8)
    gpus = tuple(d.bdf for d in host.devices_of_kind(DeviceKind.GPU))
    chooses = bool(gpus) and draw.random() < 0.6
    return asking(
        small_request(vcpus, 2 * GIB, layout=layout),
        devices=() if chooses else gpus,
        gpu_count=draw.randint(1, min(4, len(gpus))) if chooses else None,
        policy=draw.choice((Policy.CORES_FIRST, Policy.CORES_FIRST, Policy.SPREAD)),
    )


def crowded_host(draw: random.Random) -> Host:
    """Few cores and GPUs, of which other VMs and their emulators have some."""
    count, gpus_of_node = draw.randint(2, 3), draw.randint(1, 3)
    specs = [
        NodeSpec(
            ((2,) * draw.randint(2, 4),),
            package=node if draw.random() < 0.7 else 0,
            memory_bytes=draw.choice((8, 64)) * GIB,
        )
        for node in range(count)
    ]
    devices = [
        DeviceSpec(
            f"0000:{16 + number:02x}:00.0",
            node=number // gpus_of_node,
            root=number // gpus_of_node,
            switch=number // 2 % 2,
        )
        for number in range(count * gpus_of_node)
    ]
    total = sum(len(spec.llcs[0]) for spec in specs)
    domains = []
    for number in range(draw.randint(1, 2)):
        cores = draw.sample(range(total), min(total, draw.randint(2, 4)))
        domains.append(
            pinned_domain(
                str(CpuSet(core * 2 for core in cores[1:])),
                name=f"other{number}",
                emulator=str(cores[0] * 2),
                devices=tuple(device.bdf for device in devices if draw.random() < 0.3),
            )
        )
    return host_of(specs, devices=devices, domains=domains)


def crowded_wish(draw: random.Random, host: Host) -> GuestRequest:
    gpus = len(host.devices_of_kind(DeviceKind.GPU))
    layout = draw.choice(("pin", "pin-numa", "pin-numa-pci"))
    request = small_request(draw.randint(1, 5), draw.choice((1, 2, 4)) * GIB, layout=layout)
    return asking(request, gpu_count=draw.randint(1, min(2, gpus)))


def chiplet_host(draw: random.Random) -> Host:
    """One to three nodes of several LLCs, some cores taken, in isolcpus or of another kind."""
    specs = [
        NodeSpec(
            tuple((1,) * draw.randint(1, 4) for _ in range(draw.randint(1, 4))),
            package=draw.randrange(2),
            memory_bytes=64 * GIB,
        )
        for _ in range(draw.randint(1, 3))
    ]
    total = sum(len(llc) for spec in specs for llc in spec.llcs)
    in_use = some_pus(draw, total, 3)
    return host_of(
        specs,
        domains=[pinned_domain(str(in_use))] if in_use else [],
        isolated=str(some_pus(draw, total, 4)) if draw.random() < 0.3 else "",
    )


def chiplet_wish(draw: random.Random, host: Host) -> GuestRequest:
    layout = draw.choice(("pin", "pin-numa", "pin-numa", "pin-numa-smt"))
    request = small_request(draw.randint(2, max(2, len(host.cores) - 1)), GIB, layout=layout)
    return asking(request, unequal_cells=draw.random() < 0.5)


def pinned_to_llcs(host: Host, placement: Placement) -> list[int]:
    """vCPUs on each LLC of each node."""
    nodes, pins = placement.vcpu_nodes, placement.vcpu_pins
    return list(
        Counter(
            (node, host.pu_at[pu].llc) for node, pin in zip(nodes, pins, strict=True) for pu in pin
        ).values()
    )


def paired_host(draw: random.Random) -> Host:
    """Two packages or three with NICs next to GPUs, some on another node than these."""
    packages = draw.randint(2, 3)
    specs = [
        NodeSpec(((2,) * draw.randint(1, 4),), package=package, memory_bytes=8 * GIB)
        for package in range(packages)
        for _ in range(draw.randint(1, 2))
    ]
    count = len(specs)
    devices = []
    for number in range(draw.randint(2, 7)):
        root = draw.randint(0, count)
        devices.append(
            DeviceSpec(
                f"0000:{16 + number:02x}:00.0",
                node=draw.choice((None, root % count, root % count, draw.randrange(count))),
                kind=draw.choice((DeviceKind.GPU, DeviceKind.GPU, DeviceKind.NIC)),
                root=root,
                switch=draw.choice((None, 0)),
            )
        )
    total = sum(len(spec.llcs[0]) for spec in specs)
    gpus = [device.bdf for device in devices if device.kind is DeviceKind.GPU]
    in_use = tuple(bdf for bdf in gpus if draw.random() < 0.25)
    return host_of(
        specs,
        devices=devices,
        domains=[pinned_domain(str(some_pus(draw, total, 3)), devices=in_use)],
        distances=distances(draw, count) if draw.random() < 0.2 else None,
    )


def paired_wish(draw: random.Random, host: Host) -> GuestRequest:
    """Some NICs by name, and GPUs by number, by name, or both."""
    layout = draw.choice(("pin", "pin-numa", "pin-numa-pci", "pin-numa-pci"))
    owned = {bdf for domain in host.domains for bdf in domain.devices}
    gpus = [d.bdf for d in host.devices_of_kind(DeviceKind.GPU) if d.bdf not in owned]
    named = gpus[: draw.choice((0, 0, 0, 1))]
    nics = [d.bdf for d in host.devices_of_kind(DeviceKind.NIC) if draw.random() < 0.7]
    more = len(gpus) - len(named)
    return asking(
        small_request(draw.randint(1, 8), draw.choice((1, 2, 6)) * GIB, layout=layout),
        devices=(*named, *nics),
        gpu_count=draw.randint(1, min(3, more)) if more else None,
        device_locality=draw.choice(LOCALITIES),
        max_nodes=draw.choice((None, None, 1)),
    )


def celled_host(draw: random.Random) -> Host:
    """Two to four nodes of several cores, some taken, with GPUs on some; of any vendor."""
    count, packages = draw.randint(2, 4), draw.randint(1, 2)
    specs = [
        NodeSpec(
            tuple((1,) * draw.randint(1, 4) for _ in range(draw.randint(1, 2))),
            package=node * packages // count,
            memory_bytes=draw.choice((3, 8, 8)) * GIB,
        )
        for node in range(count)
    ]
    total = sum(len(llc) for spec in specs for llc in spec.llcs)
    in_use = some_pus(draw, total, 4)
    devices = [
        DeviceSpec(f"0000:{16 + number:02x}:00.0", node=draw.randrange(count), root=number)
        for number in range(draw.randint(0, 4))
    ]
    return host_of(
        specs,
        devices=devices,
        domains=[pinned_domain(str(in_use))] if in_use else [],
        vendor=draw.choice(("GenuineIntel", "AuthenticAMD", "IBM")),
    )


def celled_wish(draw: random.Random, host: Host) -> GuestRequest:
    layout = draw.choice(("pin-numa", "pin-numa", "pin-numa-pci", "pin-numa-pci", "pin"))
    request = small_request(
        draw.randint(2, len(host.cores)), draw.choice((1, 3, 6)) * GIB, layout=layout
    )
    gpus = len(host.devices_of_kind(DeviceKind.GPU))
    return asking(
        request,
        gpu_count=draw.randint(1, gpus) if gpus and draw.random() < 0.8 else None,
        unequal_cells=draw.random() < 0.2,
        policy=draw.choice((*(Policy.CORES_FIRST,) * 6, Policy.SPREAD)),
        page_bytes=draw.choice((None, None, 2 * MIB)),
    )


def attempt(host: Host, request: GuestRequest) -> Placement | None:
    try:
        return place(host, request)
    except Unplannable:
        return None


def compare(host: Host, request: GuestRequest) -> None:
    """Feasibility, fallback, each term by name, the order of the terms, and the devices."""
    best = best_by_force(host, request)
    placement = attempt(host, request)
    if best is None or placement is None:
        assert placement is None and best is None
        return
    core = {Relaxation.EMULATOR_CORE: Relaxation.HOST_CORE}  # one fallback offers both
    given = CONCEDED.keys() & {core.get(name, name) for name in placement.relaxations}
    expected = {name for name, is_given in CONCEDED.items() if is_given(best.fallback)}
    assert given == expected
    assert all(finding.subject for finding in placement.findings)
    assert placement.optimal is True
    found = {term.name: term.value for term in placement.cost if term.name != "gpus"}
    assert found == {name: best.terms[name] for name in found}
    assert tuple(found.values()) == best.key[:-1]
    assert placement.devices == best.devices


@pytest.mark.parametrize(
    ("host_of_draw", "wish_of_draw", "count"),
    [
        (small_host, small_wish, 3000),
        (wide_host, wide_wish, 200),
        (crowded_host, crowded_wish, 150),  # an emulator's core may break a GPU set
        (paired_host, paired_wish, 400),  # NICs that belong to some of the GPUs
        (celled_host, celled_wish, 200),  # cells that cannot be equal
    ],
)
def test_no_placement_is_better_than_the_planners(
    host_of_draw: Callable[[random.Random], Host],
    wish_of_draw: Callable[[random.Random, Host], GuestRequest],
    count: int,
) -> None:
    for seed in seeds(count, every=25):
        draw = random.Random(seed)
        host = host_of_draw(draw)
        compare(host, wish_of_draw(draw, host))


@pytest.mark.parametrize(
    "seed",
    [
        950077,  # siblings of mixed kinds lie on one core by chance
        8001192,  # nodes of more cores have less memory, which other nodes have
    ],
)
def test_nor_on_hosts_that_once_had_a_better_one(seed: int) -> None:
    draw = random.Random(seed)
    host = small_host(draw)
    compare(host, small_wish(draw, host))


def test_sets_that_are_grown_are_mostly_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nodes are too many to list: here all are."""
    monkeypatch.setattr(node_sets, "MAX_LISTED_NODES", 0)
    right = wrong = missed = 0
    for seed in seeds(300, every=8):
        draw = random.Random(seed)
        host = celled_host(draw) if seed % 3 else small_host(draw)
        request = celled_wish(draw, host) if seed % 3 else small_wish(draw, host)
        placement, best = attempt(host, request), best_by_force(host, request)
        if best is None or placement is None:
            assert placement is None
            missed += best is not None
            continue
        found = {term.name: term.value for term in placement.cost if term.name != "gpus"}
        is_best = found == {name: best.terms.get(name) for name in found}
        right, wrong = right + is_best, wrong + (not is_best)
        assert not placement.optimal or is_best
    assert right > 9 * wrong and not missed


def test_nor_where_nodes_have_many_llcs_and_the_pins_are_as_its_terms_say() -> None:
    for seed in seeds(600):
        draw = random.Random(seed)
        host = chiplet_host(draw)
        request = chiplet_wish(draw, host)
        compare(host, request)
        placement = attempt(host, request)
        if placement is not None:
            cost = {term.name: term.value for term in placement.cost}
            pinned = pinned_to_llcs(host, placement)
            assert len(pinned) == cost["llcs_spanned"]


@given(st.randoms(use_true_random=False))
@SHRINKING
def test_what_hypothesis_draws_is_no_better_either(draw: random.Random) -> None:
    host = small_host(draw)
    compare(host, small_wish(draw, host))
