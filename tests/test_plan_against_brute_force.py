"""The planner's answer is the best there is: compared with trying everything, on random hosts."""

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from homenode.cpuset import CpuSet
from homenode.pci import DeviceKind
from homenode.plan.model import Unplannable
from homenode.plan.placement import Placement
from homenode.plan.request import Balance, GuestRequest, Policy
from homenode.plan.search.place import place
from homenode.topology import Host, PagePool
from homenode.units import GIB, MIB
from tests.brute_force import Best, best_by_force
from tests.small_hosts import (
    DeviceSpec,
    NodeSpec,
    floating_domain,
    host_of,
    pinned_domain,
    small_request,
)

MANY = settings(
    max_examples=max(1200, settings.default.max_examples if settings.default else 0),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
KINDS = (DeviceKind.GPU, DeviceKind.GPU, DeviceKind.NIC, DeviceKind.NVME)


@st.composite
def node_specs(draw: st.DrawFn) -> list[NodeSpec]:
    packages = draw(st.integers(1, 3))
    specs = []
    for number in range(draw(st.integers(2, 5))):
        llcs = draw(
            st.lists(
                st.lists(st.sampled_from((1, 2, 2)), min_size=1, max_size=3).map(tuple),
                max_size=2,
                min_size=draw(st.sampled_from((0, 1, 1, 1))) if number else 1,
            )
        )
        pools = draw(
            st.sampled_from(((), (PagePool(2 * MIB, 512, 300),), (PagePool(2 * MIB, 1024, 1024),)))
        )
        specs.append(
            NodeSpec(
                tuple(llcs),
                package=draw(st.integers(0, packages - 1)),
                index=number * 2 + 1 if number else 0,
                memory_bytes=draw(st.sampled_from((0, 4, 8, 8, 8, 8))) * GIB,
                free_bytes=draw(st.sampled_from((None, None, None, 3 * GIB))),
                pools=pools,
            )
        )
    return specs


@st.composite
def distances(draw: st.DrawFn, count: int) -> tuple[tuple[int, ...], ...]:
    entries = st.sampled_from((11, 12, 12, 12, 16, 21, 32, 255))
    return tuple(tuple(10 if i == j else draw(entries) for j in range(count)) for i in range(count))


@st.composite
def hosts(draw: st.DrawFn) -> Host:
    specs = draw(node_specs())
    total = sum(sum(llc) for spec in specs for llc in spec.llcs)
    pus = st.sets(st.integers(0, total - 1), max_size=3)
    devices = [
        DeviceSpec(
            f"0000:{16 + number:02x}:00.0",
            node=draw(st.sampled_from([None, *[s.index for s in specs]])),
            kind=draw(st.sampled_from(KINDS)),
            root=draw(st.integers(0, 2)),
            switch=draw(st.sampled_from((None, None, 0, 1))),
        )
        for number in range(draw(st.integers(0, 3)))
    ]
    domains = []
    taken = draw(pus)
    if taken:
        domains.append(pinned_domain(str(CpuSet(taken)), running=draw(st.booleans())))
    if draw(st.booleans()):
        domains.append(floating_domain(2))
    table = draw(st.one_of(st.none(), distances(len(specs))))
    return host_of(
        specs,
        distances=table,
        tells_distances=draw(st.sampled_from((True, True, True, False))),
        devices=devices,
        domains=domains,
        disallowed=str(CpuSet(draw(st.sets(st.integers(0, total - 1), max_size=1)))),
        isolated=str(CpuSet(draw(st.one_of(st.just(set()), pus)))),
        tells_llcs=draw(st.sampled_from((True, True, True, False))),
    )


@st.composite
def requests(draw: st.DrawFn, host: Host) -> GuestRequest:
    layout = draw(st.sampled_from(("pin", "pin-bound", "pin-numa", "pin-numa", "pin-numa-smt")))
    policies = [Policy.CORES_FIRST, Policy.CORES_FIRST, Policy.SPREAD, Policy.ANY]
    if layout == "pin-numa-smt":
        policies.append(Policy.MEMORY_FIRST)
    # Small numbers fit one node, so most are drawn from what it takes several for.
    cores = len(host.cores)
    vcpus = draw(st.one_of(st.integers(1, 4), st.integers(3, max(3, cores))))
    request = small_request(vcpus, draw(st.sampled_from((1, 1, 2, 4, 9))) * GIB, layout=layout)
    bdfs = [d.bdf for d in host.pci_devices if d.kind is not DeviceKind.BRIDGE]
    return replace(
        request,
        devices=tuple(b for b in bdfs if draw(st.booleans())),
        policy=draw(st.sampled_from(policies)),
        balance=draw(st.sampled_from(tuple(Balance))),
        keep_vcpus=draw(st.booleans()),
        unequal_cells=draw(st.booleans()),
        max_nodes=draw(st.sampled_from((None, None, None, None, 2))),
        page_bytes=draw(st.sampled_from((None, None, 2 * MIB))),
        reserved_pus=CpuSet(draw(st.sets(st.integers(0, 7), max_size=2))),
        reserve_defined=draw(st.booleans()),
    )


@given(st.data())
@MANY
def test_no_placement_is_better_than_the_planners(data: st.DataObject) -> None:
    host = data.draw(hosts())
    request = data.draw(requests(host))
    best = best_by_force(host, request)
    compare(attempt(host, request), best)


@st.composite
def wide_hosts(draw: st.DrawFn) -> Host:
    """Up to eight plain nodes over up to four packages, some cores taken, up to six GPUs."""
    count = draw(st.integers(5, 8))
    packages = draw(st.integers(1, 4))
    specs = [
        NodeSpec(
            ((1,) * draw(st.integers(1, 3)),),
            package=draw(st.integers(0, packages - 1)),
            memory_bytes=draw(st.sampled_from((4, 8))) * GIB,
        )
        for _ in range(count)
    ]
    total = sum(len(spec.llcs[0]) for spec in specs)
    taken = draw(st.sets(st.integers(0, total - 1), max_size=4))
    devices = [
        DeviceSpec(f"0000:{16 + number:02x}:00.0", node=draw(st.integers(0, count - 1)))
        for number in range(draw(st.integers(0, 6)))
    ]
    return host_of(
        specs,
        devices=devices,
        domains=[pinned_domain(str(CpuSet(taken)))] if taken else [],
        distances=draw(st.one_of(st.none(), st.none(), distances(count))),
        # Where all nodes are equally far, packages decide.
        tells_distances=draw(st.booleans()),
    )


@given(st.data())
@settings(MANY, max_examples=MANY.max_examples // 3)
def test_nor_on_hosts_of_more_nodes_with_several_gpus(data: st.DataObject) -> None:
    host = data.draw(wide_hosts())
    layout = data.draw(st.sampled_from(("pin-numa", "pin-numa", "pin")))
    vcpus = data.draw(st.integers(2, 8 if layout == "pin-numa" else 5))
    request = replace(
        small_request(vcpus, 2 * GIB, layout=layout),
        devices=tuple(d.bdf for d in host.pci_devices if d.kind is DeviceKind.GPU),
        policy=data.draw(st.sampled_from((Policy.CORES_FIRST, Policy.SPREAD))),
    )
    compare(attempt(host, request), best_by_force(host, request))


def attempt(host: Host, request: GuestRequest) -> Placement | None:
    try:
        return place(host, request)
    except Unplannable:
        return None


def compare(placement: Placement | None, best: Best | None) -> None:
    if best is None or placement is None:
        # Memory from other nodes is checked against the chosen nodes only once they are chosen.
        assert placement is None and (best is None or not best.memory_follows)
        return
    assert placement.optimal is True
    found = {term.name: term.value for term in placement.cost}
    assert found == {name: best.terms[name] for name in found}
    assert tuple(term.value for term in placement.cost) == best.key
