"""Manual CPU lists, and pinning `node`."""

import pytest
from msgspec import structs
from msgspec.structs import replace

from homenode.check.domain.pins import pins_alone, pins_on_host
from homenode.check.domain.verification import compare_with_plan
from homenode.cpuset import CpuSet
from homenode.errors import UsageError
from homenode.plan.planner import build_manual_placement
from homenode.plan.planner import plan as plan_of
from homenode.plan.shape.assemble import assemble
from homenode.plan.stored import domain_of_plan
from homenode.show.explain import explain
from homenode.show.topology_map import draw_topology
from homenode.vm.domain.read import build_vm, open_domain
from homenode.vm.layout import PRESETS, Layout, Pinning, Siblings
from homenode.vm.model import GuestTopology
from homenode.vm.plan import Plan
from homenode.vm.plan_options import ManualRanges
from homenode.vm.targets.libvirt import rewrite
from tests.explained import explained
from tests.figures import numbers
from tests.guest_shapes import placed
from tests.small_hosts import asking, even_host, small_request


def lists(*texts: str) -> tuple[CpuSet, ...]:
    return tuple(CpuSet.parse(text) for text in texts)


def test_unequal_lists_work_flat_and_with_unequal_cells() -> None:
    ranges = ManualRanges(lists("0-23", "32-51"))
    flat = build_manual_placement(small_request(44, layout="pin"), ranges)
    assert len(flat.vcpu_pins) == 44
    with pytest.raises(UsageError, match=r"24 .* 20") as error:
        build_manual_placement(small_request(44, layout="pin-numa"), ranges)
    assert error.value.hint is not None
    assert "--allow-unequal-nodes" in error.value.hint
    cells = asking(small_request(44, layout="pin-numa"), unequal_cells=True)
    assert build_manual_placement(cells, ranges).vcpu_nodes == (0,) * 24 + (1,) * 20


def test_siblings_are_vcpus_of_their_node_core_by_core() -> None:
    ranges = ManualRanges(lists("0-1", "4-5"), lists("8-9", "12-13"))
    placement = build_manual_placement(small_request(8, layout="pin-numa-smt"), ranges)
    assert placement.vcpu_nodes == (0,) * 4 + (1,) * 4
    assert placement.threads_per_core == 2
    hidden = replace(PRESETS["pin-numa-smt"], siblings=Siblings.HIDDEN)
    assert build_manual_placement(small_request(8, layout=hidden), ranges).threads_per_core == 1
    assert [next(iter(pin)) for pin in placement.vcpu_pins] == [0, 8, 1, 9, 4, 12, 5, 13]


@pytest.mark.parametrize(
    ("layout", "ranges", "message"),
    [
        ("pin", ManualRanges(()), "missing CPUs of a node"),
        ("pin", ManualRanges(lists("0-3", "")), "missing CPUs of a node"),
        ("pin", ManualRanges(lists("0-3", "2-5")), "found 2-3 in two lists"),
        ("pin-numa-smt", ManualRanges(lists("0-3")), "expected 1, one for each node, found 0"),
        ("pin-numa-smt", ManualRanges(lists("0-3"), lists("8-10")), "expected 4 siblings"),
        ("pin-numa-smt", ManualRanges(lists("0-3"), lists("3-6")), "found 3 in two lists"),
        ("default", ManualRanges(lists("0-3")), "pins nothing"),
    ],
)
def test_lists_that_cannot_be_meant_are_refused(
    layout: str, ranges: ManualRanges, message: str
) -> None:
    with pytest.raises(UsageError, match=message) as error:
        build_manual_placement(small_request(4, layout=layout), ranges)
    assert error.value.hint


def test_an_emulator_on_the_vcpus_pus_is_a_finding() -> None:
    request = asking(small_request(4, layout="pin"), emulator_pus=CpuSet.parse("3-4"))
    placement = build_manual_placement(request, ManualRanges(lists("0-3")))
    assert [f.id for f in placement.findings] == ["emulator-shares-vcpus"]


HOST = even_host(2, vendor="GenuineIntel")
DOCUMENT = b"""<domain type='kvm'>
  <name>vm</name>
  <memory unit='GiB'>4</memory>
  <vcpu>4</vcpu>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <cpu mode='host-passthrough'/>
  <devices/>
</domain>
"""


def layout(name: str) -> Layout:
    return structs.replace(PRESETS[name], pinning=Pinning.NODE, name="custom")


def floating(name: str) -> Plan:
    """Two vCPUs on each node; in a flat guest all float over both."""
    pus = [node.pus for node in HOST.nodes]
    both = pus[0] | pus[1]
    pins = [both] * 4 if name == "pin" else [pus[0]] * 2 + [pus[1]] * 2
    placement = placed((2, 2), pins=pins, bound=name != "pin")
    return assemble(HOST, small_request(4, layout=layout(name)), placement)


@pytest.mark.parametrize("name", ["pin", "pin-numa"])
def test_each_vcpu_is_pinned_to_its_nodes_and_verify_agrees(name: str) -> None:
    plan = floating(name)
    tuned = rewrite(DOCUMENT, plan)
    assert rewrite(tuned, plan) == tuned
    document = open_domain(tuned, "vm.xml")
    facts = build_vm(document)
    assert facts.vcpu_pins == plan.vcpu_pins
    found = [
        *compare_with_plan(document, facts, plan),
        *pins_alone(facts),
        *pins_on_host(facts, HOST),
    ]
    assert found == []


def test_shared_cores_are_named_with_the_published_price() -> None:
    host = even_host(2, 1, 1, 4, 2)
    wanted = replace(small_request(10), layout=layout("pin-numa"))
    (said,) = (f for f in plan_of(host, wanted).findings if f.id == "vcpus-share-cores")
    assert said.subject == "CPUs 0-15" and {8, 40, 75} <= set(numbers(said.observed))
    few = plan_of(host, small_request(6))
    assert "vcpus-share-cores" not in [f.id for f in few.findings]


def test_the_plan_says_that_vcpus_move_and_the_map_draws_it() -> None:
    plan = floating("pin-numa")
    lines = [line for section in explained(explain(plan, HOST)) for line in section.lines]
    assert any("may run on any CPU of its nodes" in line for line in lines)
    assert not any("Hyper-threads kept idle" in line for line in lines)
    assert draw_topology(HOST, plan).startswith("<svg")


def test_the_guest_has_cells_but_its_caches_stay_as_they_were() -> None:
    plan = floating("pin-numa")
    assert plan.vm.cpu_topology == GuestTopology(2, 1, 2, 1)
    assert [cell.host_nodes for cell in plan.cells] == [(0,), (1,)]
    assert domain_of_plan(plan).vcpu_pins[0] == CpuSet.parse("0-3,8-11")
