"""The criteria by which placements on several hosts are compared."""

from typing import Any

import pytest
from msgspec import structs

from homenode.plan.pipeline import make_vm
from homenode.plan.placement import Placement
from homenode.plan.search.devices import build_distance_matrix
from homenode.units import GIB
from homenode.vm.plan import CostTerm, Relaxation
from homenode.vm.plan_options import PlanOptions
from tests.small_hosts import even_host

FIRST: tuple[dict[str, Any], ...] = (
    {"relaxations": (Relaxation.UNEVEN_MEMORY,)},
    {"relaxations": (Relaxation.EMULATOR_CORE,)},
    {"relaxations": (Relaxation.HOST_CORE,)},
    {"relaxations": (Relaxation.MEMORY_ELSEWHERE,)},
    {"takes_siblings": True},
    {"lacks_siblings": True},
    {"relaxations": (Relaxation.FEWER_SIBLINGS,)},
    {"relaxations": (Relaxation.SIBLINGS_NOT_EXPOSED,)},
    {"relaxations": (Relaxation.MIXED_KINDS,)},
    {"relaxations": (Relaxation.SHARED_CORES,)},
    {"relaxations": (Relaxation.HOST_MEMORY,)},
)
"""From the mildest to the severest."""
GIVEN_UP = ("given_up", "given_up_for_nearness")
TERMS = ("device_class", "nodes_spanned", "unevenness", "nodes", "split")


def placement(**fields: Any) -> Placement:
    return Placement(
        nodes=(),
        vcpu_pins=(),
        vcpu_nodes=(),
        memory_nodes=(),
        threads_per_core=1,
        emulator_pus=None,
        iothread_pus=(),
        devices=(),
        fallback="",
        cost=tuple(CostTerm(name, number) for number, name in enumerate(TERMS)),
        **fields,
    )


def test_each_relaxation_is_worse_than_all_milder_ones() -> None:
    milder: dict[str, Any] = {"relaxations": ()}
    for fields in FIRST:
        worse, better = dict(placement(**fields).concerns), dict(placement(**milder).concerns)
        assert [worse[name] for name in GIVEN_UP] > [better[name] for name in GIVEN_UP]
        relaxations = (*milder["relaxations"], *fields.get("relaxations", ()))
        milder = {**milder, **fields, "relaxations": relaxations}


def test_the_last_core_and_even_memory_count_after_nearness_but_with_shared_cores_all_do() -> None:
    found = placement(relaxations=(Relaxation.HOST_CORE, Relaxation.UNEQUAL_CELLS)).concerns
    assert found == [
        ("given_up", 0),
        ("device_class", 0),
        ("given_up_for_nearness", 4),
        ("nodes_spanned", 1),
        ("unequal_cells", 1),
        ("unevenness", 2),
    ]
    uneven = placement(relaxations=(Relaxation.UNEVEN_MEMORY,))
    assert dict(uneven.concerns)["given_up_for_nearness"] == 1
    shared = (Relaxation.SHARED_CORES, Relaxation.MIXED_KINDS)
    concerns = dict(placement(relaxations=shared).concerns)
    assert (concerns["given_up"], concerns["given_up_for_nearness"]) == (512, 256)


def test_a_node_of_no_single_package_is_a_package_of_its_own() -> None:
    host = even_host(1, 2)
    first = structs.replace(host.nodes[0], package=None)
    matrix = build_distance_matrix(structs.replace(host, nodes=(first, *host.nodes[1:])))
    assert len(set(matrix.packages)) == 2


@pytest.mark.parametrize(
    ("architecture", "machine"), [(None, "q35"), ("x86_64", "q35"), ("aarch64", "virt")]
)
def test_a_vm_of_options_has_the_machine_of_its_architecture(
    architecture: str | None, machine: str
) -> None:
    vm = make_vm(PlanOptions(vcpus=2, memory_bytes=GIB), architecture).guest
    assert (vm.architecture, vm.machine) == (architecture or "x86_64", machine)
