"""Policies, balance and devices: which of several good nodes are taken."""

import runpy
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.machine.pci import DeviceKind
from homenode.plan.search.node_sets import NodeSets
from homenode.plan.search.place import place
from homenode.units import GIB
from homenode.vm.model import GuestHostdev
from homenode.vm.plan_options import PlanOptions, Policy, make_cell
from tests.figures import numbers
from tests.small_hosts import DeviceSpec, asking, even_host, pinned_domain, small_request
from tests.targets.written import written


def test_spread_takes_as_many_nodes_as_there_are_whether_or_not_these_share_equally() -> None:
    host = even_host(4, 1, 1, 4, 2)
    assert place(host, asking(small_request(8), policy=Policy.SPREAD)).nodes == (0, 1, 2, 3)
    assert place(host, asking(small_request(6), policy=Policy.SPREAD)).nodes == (0, 1, 2, 3)
    wide = even_host(8, 2, 1, 4, 2)
    flat = asking(small_request(9, layout="pin"), policy=Policy.SPREAD)
    assert len(place(wide, flat).nodes) == 9


def test_a_policy_that_compares_no_distances_takes_the_first_gpu_however_far() -> None:
    gpus = [DeviceSpec("0000:10:00.0", 1, root=1), DeviceSpec("0000:90:00.0", 0)]
    host = even_host(2, 1, 1, 8, 1, devices=gpus)
    placement = place(host, asking(small_request(4), policy=Policy.ANY, gpu_count=1))
    assert (placement.nodes, str(placement.devices[0])) == ((0,), gpus[0].bdf)


def test_of_many_packages_several_near_the_devices_are_better_than_one_that_is_not() -> None:
    gpus = [DeviceSpec(f"0000:{16 + node}:00.0", node=node, root=node) for node in (0, 1)]
    line = tuple(tuple(10 + 2 * abs(i - j) for j in range(9)) for i in range(9))
    host = even_host(9, devices=gpus, distances=line)
    request = asking(small_request(2, layout="pin"), gpu_count=2)
    assert place(host, request).nodes == (0, 1)


def test_of_many_nodes_the_least_is_found_that_no_distances_lead_to() -> None:
    # Nodes 1, 4 and 9 are near to each other, and each is nearer to nodes that are far apart.
    near = {frozenset(pair): 16 for pair in ((1, 4), (4, 9), (1, 9))}
    near |= {frozenset((node, other)): 12 for node in (1, 4, 9) for other in (node + 1, node - 1)}
    host = even_host(
        12,
        distances=tuple(
            tuple(10 if i == j else near.get(frozenset((i, j)), 32) for j in range(12))
            for i in range(12)
        ),
    )
    placement = place(host, small_request(12))
    assert placement.nodes == (1, 4, 9)
    assert placement.optimal is True


def test_a_node_of_each_package_is_taken_where_each_has_one_of_the_gpus() -> None:
    gpus = [DeviceSpec(f"0000:{16 + node}:00.0", node=node, root=node) for node in range(0, 20, 2)]
    host = even_host(10, 2, 1, 4, 2, devices=gpus)
    placement = place(host, asking(small_request(11, layout="pin"), gpu_count=10))
    assert placement.nodes == tuple(range(0, 20, 2))


def test_cores_are_shared_on_many_nodes_that_have_no_whole_one() -> None:
    host = even_host(12, 1, 1, 2, 2, disallowed="0-23")
    placement = place(host, small_request(4, layout="pin"))
    assert len(placement.nodes) == 2


def test_a_nic_alone_only_breaks_ties_and_one_next_to_a_gpu_decides() -> None:
    nic = DeviceSpec("0000:91:00.0", node=1, root=1, kind=DeviceKind.NIC)
    busy = [pinned_domain("8-9")]
    host = even_host(2, 1, 1, 8, 1, devices=[nic], domains=busy)
    alone = place(host, small_request(4, devices=["91:00.0"]))
    assert alone.nodes == (1,)  # ties: both hold it on one node
    assert place(host, small_request(8, devices=["91:00.0"])).nodes == (0,)
    cost = {term.name: term.value for term in alone.cost}
    assert cost["device_class"] == 0


def test_a_device_without_a_node_pulls_nowhere_and_is_a_gap() -> None:
    host = even_host(2, devices=[DeviceSpec("0000:10:00.0", node=None)])
    placement = place(host, small_request(4, devices=["10:00.0"]))
    assert [gap.subject for gap in placement.gaps] == ["0000:10:00.0 node"]


def test_an_unknown_device_is_refused_with_the_nearest_ones() -> None:
    request = small_request(4, devices=["3c:00.0"])
    request = replace(request, guest=replace(request.guest, hostdevs=()))
    gpus = "GPUs of the host: 0000:3b:00.0, 0000:9b:00.0"
    for kind, hint in ((DeviceKind.GPU, gpus), (DeviceKind.NIC, None)):
        specs = [DeviceSpec(f"0000:{bus}:00.0", kind=kind) for bus in ("3b", "9b")]
        host = even_host(2, devices=specs)
        with pytest.raises(InputError, match=r"nearest: 0000:3b:00\.0") as error:
            place(host, request)
        assert (error.value.exit_code, error.value.hint) == (2, hint)
        start = f"host {host.name!r} has no PCI function 0000:3c:00.0;"
        assert error.value.message.startswith(start)


def test_all_absent_devices_are_named_and_those_of_another_kind() -> None:
    nic = DeviceSpec("0000:3b:00.0", kind=DeviceKind.NIC)
    host = even_host(2, devices=[nic, DeviceSpec("0000:9b:00.0", 1)])
    request = small_request(4, devices=["3b:00.0", "3c:00.0", "3d:00.0"])
    hostdevs = tuple(GuestHostdev(bdf, None) for bdf in request.devices)
    with pytest.raises(InputError, match=r"0000:3c:00\.0 and 0000:3d:00\.0;") as error:
        place(host, replace(request, guest=replace(request.guest, hostdevs=hostdevs)))
    hint = "remove their <hostdev>s and add --gpus 2; not GPUs on this host: 0000:3b:00.0"
    assert error.value.hint == hint


def test_manual_emulator_pus_are_kept_free_of_vcpus() -> None:
    host = even_host(1, 1, 1, 8, 1)
    request = asking(small_request(6), emulator_pus=CpuSet.parse("0-1"))
    placement = place(host, request)
    assert placement.emulator_pus == CpuSet.parse("0-1")
    assert CpuSet(p for pin in placement.vcpu_pins for p in pin) == CpuSet.parse("2-7")


def test_more_unpinned_vcpus_than_pus_are_reported() -> None:
    host = even_host(1, 1, 1, 4, 2)
    assert not place(host, small_request(8, layout="default")).findings
    (finding,) = place(host, small_request(9, layout="default")).findings
    assert (finding.id, finding.severity) == ("overcommitted", "warning")
    assert numbers(finding.observed)[:2] == [9, 8]


def test_equal_cells_to_which_both_searches_came_are_no_runner_up() -> None:
    """Unequal cells may cost less here, but the search for them ends at the equal ones."""
    corpus = runpy.run_path(str(Path(__file__).parents[2] / "bench" / "plan_corpus.py"))
    placement = place(*corpus["largest_of_seed"](7035))
    assert placement.optimal is None
    assert all(one.cost != placement.cost for one in placement.runners_up)


@pytest.mark.parametrize(("packages", "per_package", "most"), [(1, 16, 2**17), (4, 16, 20_000)])
def test_so_many_sets_of_nodes_are_looked_at_and_no_more(
    packages: int, per_package: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sets of 16 nodes, with equal cells and with others; of 64 nodes those that are grown."""
    held, looked = NodeSets.holds, 0

    def holds(self: NodeSets, nodes: int) -> bool:
        nonlocal looked
        looked += 1
        return held(self, nodes)

    monkeypatch.setattr(NodeSets, "holds", holds)
    busy = pinned_domain(",".join(str(pu) for pu in range(packages * per_package * 4) if pu % 7))
    host = even_host(packages, per_package, 1, 6, 1, domains=[busy])
    place(host, small_request(40, 16 * GIB, layout="pin-numa"))
    assert 0 < looked <= most, looked


@pytest.mark.parametrize(
    ("layout", "max_nodes", "severities"),
    [
        ("pin-bound", 1, ["info", "warning", "warning"]),
        ("pin-numa-pci", 1, ["warning"] * 3),
        ("pin-bound", 3, ["info", "info"]),  # two nodes are near enough
    ],
)
def test_gpus_of_a_package_without_the_vm_are_named_in_each_layout(
    layout: str, max_nodes: int, severities: list[str]
) -> None:
    gpus = [DeviceSpec(f"{i:02x}:00.0", node=i, root=i) for i in range(4)]
    host = even_host(2, 2, 1, 8, 1, devices=gpus)
    named = [str(gpu.bdf) for gpu in host.pci_devices if gpu.kind is DeviceKind.GPU]
    request = asking(small_request(4, layout=layout, devices=named), max_nodes=max_nodes)
    away = [f for f in place(host, request).findings if f.id == "gpu-away-from-home"]
    assert [f.severity for f in away] == severities
    assert all((f.fix == "a larger --max-nodes") is (max_nodes == 1) for f in away)
    nodes = tuple(replace(node, package=None) for node in host.nodes)  # not known
    findings = place(replace(host, nodes=nodes), request).findings
    assert {f.severity for f in findings if f.id == "gpu-away-from-home"} == {"warning"}


def test_devices_of_many_packages_have_the_vm_on_each_of_them() -> None:
    """Ten packages of two nodes hold the VM on three of them, but each has a GPU of it."""
    gpus = [DeviceSpec(f"{i:02x}:00.0", node=2 * i, root=i) for i in range(10)]
    busy = pinned_domain(",".join(str(pu) for pu in range(0, 160, 5) if pu % 7))
    host = even_host(10, 2, 1, 8, 1, devices=gpus, domains=[busy])
    named = [str(gpu.bdf) for gpu in host.pci_devices if gpu.kind is DeviceKind.GPU]
    placement = place(host, small_request(40, 16 * GIB, layout="pin-numa", devices=named))
    cost = {term.name: term.value for term in placement.cost}
    assert placement.optimal is None, "20 nodes are too many to list"
    assert (cost["device_class"], cost["packages_spanned"]) == (10, 10)
    assert not cost["gpus_away_from_home"]


@pytest.mark.parametrize(
    ("seed", "term", "best"), [(900002, "distance_sum", 900), (900241, "device_distance", 225_900)]
)
def test_sets_that_are_grown_come_to_the_best_that_longer_searches_found(
    seed: int, term: str, best: int
) -> None:
    """Hosts of more nodes than are listed, in sets of all sizes."""
    corpus = runpy.run_path(str(Path(__file__).parents[2] / "bench" / "plan_corpus.py"))
    assert dict(corpus["result_of"](seed)["cost"])[term] <= best


def test_of_cells_given_one_by_one_no_runner_up_is_on_the_nodes_of_the_plan() -> None:
    """Other orders of the cells on these nodes cost more: they are no other nodes."""
    cells = (make_cell(4, 3 * GIB), make_cell(1, GIB))
    options = PlanOptions(layout="pin-numa-pci", gpu_count=1, explicit_cells=cells)
    made = written("qemu", "hgx-a100-80gb", options).plan
    own = frozenset(made.nodes)
    found = [frozenset(one.nodes) for one in made.runners_up]
    others = [nodes for nodes in found if nodes != own]
    assert len(set(others)) == len(others) == 3
    assert found.count(own) == 1, "the one of other GPUs"
