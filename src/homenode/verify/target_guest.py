"""TargetGuest: what a plan promises the guest of another hypervisor than libvirt's."""

from collections.abc import Iterator
from dataclasses import replace

from msgspec import structs

from homenode.errors import InputError
from homenode.findings import Finding
from homenode.plan.model import Plan
from homenode.targets.registry import target_named
from homenode.targets.target import Feature, Level, Target, is_vgpu, lost_features
from homenode.topology import Host
from homenode.verify.guest.expectation import Expectation, expectation_of
from homenode.verify.target_file import as_said, cells_added, lost_findings
from homenode.vm.model import GuestHostdev

_SEEN = frozenset(
    (
        Feature.TOPOLOGY,
        Feature.THREADS,
        Feature.DIES,
        Feature.CACHE,
        Feature.CELLS,
        Feature.UNEQUAL_CELLS,
        Feature.DISTANCES,
        Feature.DEVICES,
        Feature.DEVICE_CELLS,
        Feature.DEVICE_TREE,
        Feature.INITIATORS,
    )
)
"""What of a plan a guest sees. Pins, host nodes and huge pages it does not."""


def expectation_for_target(plan: Plan, target: str, host: Host | None = None) -> Expectation:
    """What the plan promises a guest of that target, as far as the target can say it.

    host: for the devices' ids. Raises InputError for a plan that no file of the target can have.
    """
    module = target_named(target)
    lost = lost_features(module, plan)
    _refuse_plan_of_others(plan, module, target, lost)
    vm = as_said(plan, lost)
    if module.as_started is not None and not vm.cells and host is not None:
        vm = module.as_started(vm, host)
    if lost & {Feature.TOPOLOGY, Feature.THREADS}:
        vm = structs.replace(vm, cpu_topology=None)
    if Feature.CACHE in lost:
        vm = structs.replace(vm, cpu_cache=None)
    if Feature.DISTANCES in lost:
        cells = tuple(structs.replace(cell, distances=()) for cell in vm.cells)
        vm = structs.replace(vm, cells=cells)
    if Feature.CELLS in lost:
        vm = structs.replace(vm, cells=())
    if Feature.DEVICES in lost:
        vm = structs.replace(vm, hostdevs=())
    # Who can build no tree of switches plugs devices in wherever it likes.
    chooses = module.support[Feature.DEVICE_TREE].level is Level.LOST

    def placed(one: GuestHostdev) -> GuestHostdev:
        return structs.replace(one, address=None) if chooses else one

    vm = structs.replace(vm, hostdevs=tuple(map(placed, vm.hostdevs)))
    return replace(
        expectation_of(vm, host=host),
        addresses_by=module.title if chooses else None,
        has_device_cells=Feature.DEVICE_CELLS not in lost,
    )


def lost_in_guest(plan: Plan, target: str, expected: Expectation, source: str) -> Iterator[Finding]:
    """What of the plan a guest of the target is not compared with: the target cannot say it."""
    module = target_named(target)
    yield from cells_added(plan, expected.vm, module.title, source)
    yield from lost_findings(module, lost_features(module, plan) & _SEEN, source)


def _refuse_plan_of_others(plan: Plan, target: Target, name: str, lost: frozenset[Feature]) -> None:
    title = target.title
    if Feature.VGPUS in lost:
        names = ", ".join(
            device.uuid or str(device.bdf) for device in plan.devices if is_vgpu(device)
        )
        what = f"the vGPU {names}"
    elif plan.memory_device_bytes:
        what = "memory devices"
    else:
        return
    raise InputError(
        f"--target {name}: expected a plan for {title}, found one with {what}, which no plan for "
        f"{title} has",
        hint="leave --target out for a plan of a domain document",
    )
