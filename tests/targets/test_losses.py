"""What docs/reference/targets.md says is lost is not in the files, and what it says is there is."""

import pytest
from msgspec import structs
from msgspec.structs import replace

from homenode.cpuset import CpuSet, NodeIndex
from homenode.plan.pipeline import make_vm
from homenode.units import GIB, MIB
from homenode.vm.layout import GuestCells
from homenode.vm.model import (
    GuestAddress,
    GuestCache,
    GuestHostdev,
    GuestPciController,
    GuestTopology,
    PortModel,
    Vm,
)
from homenode.vm.plan import Aperture, Plan, with_vm
from homenode.vm.targets.registry import TARGETS, find_target
from homenode.vm.targets.target import Feature, Target, list_features, lost_features
from tests.targets.page import PAGE, targets_page
from tests.targets.written import host_named, options, written

HOST = "small-2n8c-2gpu"


def asking_for_much() -> Plan:
    """A plan with every feature that one VM may ask for, made from one for a host of two nodes."""
    made = written("qemu", HOST, options("pin-numa-pci", gpu_count=2, page_bytes=2 * MIB)).plan
    first, second = made.cells
    third = structs.replace(
        second,
        id=2,
        vcpus=CpuSet(),
        memory_bytes=0,
        host_nodes=(NodeIndex(0),),
        nodes=CpuSet(made.memory_nodes),
        distances=(30, 30, 10),
    )
    cells = (
        structs.replace(first, distances=(10, 20, 30), memory_bytes=first.memory_bytes + 512 * MIB),
        structs.replace(
            second, distances=(20, 10, 30), memory_bytes=second.memory_bytes - 512 * MIB
        ),
        third,
    )
    one, other = made.vm.hostdevs
    return with_vm(
        replace(made, aperture=Aperture(64 * GIB, 44, 65536, 5 * GIB, 4096)),
        cells=cells,
        cpu_topology=GuestTopology(1, 2, 1, 2),
        cpu_cache=GuestCache.EMULATED,
        iothread_ids=(1,),
        iothread_pins=((1, CpuSet([2])),),
        hostdevs=(structs.replace(one, initiator_cells=CpuSet([2])), other),
        has_iommu=True,
    )


def shown(vm: Vm, feature: Feature) -> bool | None:
    """Whether a file says a feature of that plan; None where reading it back cannot show it."""
    cells = [cell for cell in vm.cells if cell.vcpus]
    stated = {
        Feature.VCPU_PINS: vm.is_pinned,
        Feature.EMULATOR_PINS: vm.emulator_pus is not None,
        Feature.TOPOLOGY: vm.cpu_topology is not None,
        Feature.THREADS: vm.cpu_topology is not None and vm.cpu_topology[3] > 1,
        Feature.DIES: vm.cpu_topology is not None and vm.cpu_topology[1] > 1,
        Feature.CELLS: len(cells) > 1,
        Feature.DISTANCES: any(cell.distances for cell in cells),
        Feature.MEMORY_NODES: any(cell.nodes for cell in cells),
        Feature.HUGE_PAGES: vm.page_bytes is not None,
        Feature.DEVICES: bool(vm.hostdevs),
        Feature.DEVICE_CELLS: any(one.cell is not None for one in vm.hostdevs),
        Feature.INITIATORS: any(one.initiator_cells for one in vm.hostdevs),
        Feature.IOMMU: vm.has_iommu,
    }
    return stated.get(feature)


def elsewhere(module: Target, feature: Feature) -> bool:
    """Whether the file does not say it, but another one, the hypervisor by itself, or a record of
    homenode's own."""
    of = Feature.TOPOLOGY if feature is Feature.THREADS else feature
    return bool(of.facts) and module.unread.issuperset(of.facts)


@pytest.mark.parametrize("target", TARGETS)
def test_a_feature_is_in_the_file_if_and_only_if_it_is_not_lost(target: str) -> None:
    plan = asking_for_much()
    wanted = options("pin-numa-pci", gpu_count=2)
    guest = make_vm(wanted, "x86_64").guest
    host = host_named(HOST)
    module = find_target(target)
    content = module.render(plan, guest, host, None, "vm").document
    vm = module.read_vm(content, "vm")
    lost = lost_features(module, plan)
    for feature in sorted(list_features(plan)):
        seen = shown(vm, feature)
        if seen is None or elsewhere(module, feature):
            continue
        assert seen == (feature not in lost), feature


def test_the_plan_of_these_tests_asks_for_all_that_a_plan_can_ask_for() -> None:
    asked = list_features(asking_for_much())
    assert set(Feature) - asked <= {Feature.MEMORY_MODE, Feature.DEVICE_TREE, Feature.VGPUS}


def test_the_page_of_targets_is_written_from_their_tables() -> None:
    assert PAGE.read_text() == targets_page(), "write it again: python -m tests.targets.page"


def test_a_flat_plan_asks_for_no_cells() -> None:
    made = written("qemu", HOST, options("pin")).plan
    assert made.layout.cells is GuestCells.SINGLE
    assert Feature.CELLS not in list_features(made)


def test_switches_of_the_host_are_a_feature_of_their_own() -> None:
    made = asking_for_much()
    switch = GuestPciController(
        9, PortModel.SWITCH_UPSTREAM, GuestAddress(0, 3, 0, 0), existing=False
    )
    with_switch = with_vm(made, controllers=(*made.vm.controllers, switch))
    assert Feature.DEVICE_TREE in list_features(with_switch)


def test_devices_without_a_cell_are_no_loss() -> None:
    made = asking_for_much()
    bare = tuple(GuestHostdev(d.bdf, None) for d in made.vm.hostdevs)
    assert Feature.DEVICE_CELLS not in list_features(with_vm(made, hostdevs=bare))
