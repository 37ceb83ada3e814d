"""Each fact of a VM that changes is a difference of its row, and nothing else is."""

import pytest
from msgspec.structs import replace
from msgspec.structs import replace as changed

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.findings import finding
from homenode.units import GIB, MIB
from homenode.vm.facts import FACTS, diff
from homenode.vm.model import (
    GuestAddress,
    GuestHostdev,
    GuestPciController,
    GuestTopology,
    MemoryDevice,
    Vm,
    VmCell,
)

DEVICE = GuestHostdev(
    Bdf.parse("0000:19:00.0"), GuestAddress(0, 2, 0, 0), cell=0, initiator_cells=CpuSet([2])
)
EXPANDER = GuestPciController(1, "pcie-expander-bus", GuestAddress(0, 0, 5, 0), 128, 0)
DIMM = MemoryDevice(model="dimm", cell=0, size_bytes=GIB, plugged_bytes=GIB, nodes=CpuSet([0]))
CELL = VmCell(
    id=0,
    vcpus=CpuSet([0, 1]),
    memory_bytes=GIB,
    nodes=CpuSet([0]),
    mode="strict",
    page_bytes=2 * MIB,
    distances=(10, 21),
)
OTHER = replace(CELL, id=1, vcpus=CpuSet([2, 3]), nodes=CpuSet([1]), distances=(21, 10))
VM = Vm(
    name="vm",
    machine="pc-q35-7.2",
    firmware="efi",
    loader="/usr/share/OVMF.fd",
    cpu_mode="custom",
    cpu_model="EPYC",
    vcpus=4,
    cpu_topology=GuestTopology(1, 1, 4, 1),
    vcpu_pins=(CpuSet([0]), CpuSet([1]), CpuSet([2]), CpuSet([3])),
    emulator_pus=CpuSet([4]),
    iothread_pins=((1, CpuSet([5])),),
    memory_bytes=2 * GIB,
    page_bytes=2 * MIB,
    binding=("strict", CpuSet([0, 1])),
    memory_devices=(DIMM,),
    cells=(CELL, OTHER),
    controllers=(EXPANDER,),
    hostdevs=(DEVICE,),
    has_iommu=True,
)


def with_cell(**values: object) -> Vm:
    return replace(VM, cells=(replace(CELL, **values), OTHER))


CHANGES: dict[str, Vm] = {
    "vcpus": replace(VM, vcpus=5, vcpu_pins=(*VM.vcpu_pins, CpuSet([6]))),
    "memory": replace(VM, memory_bytes=GIB),
    "memory-devices": replace(VM, memory_devices=()),
    "memory-device": replace(VM, memory_devices=(replace(DIMM, nodes=CpuSet([1])),)),
    "pages": replace(VM, page_bytes=None),
    "topology": replace(VM, cpu_topology=None),
    "domain-type": replace(VM, domain_type="qemu"),
    "machine": replace(VM, machine="pc-i440fx-7.2"),
    "firmware": replace(VM, firmware=None),
    "program": replace(VM, loader="/usr/share/other.fd"),
    "cpu": replace(VM, cpu_model="Nehalem"),
    "vcpus-online": replace(VM, offline_vcpus=CpuSet([3])),
    "current-memory": replace(VM, ballooned_bytes=GIB),
    "pins": replace(VM, vcpu_pins=(*VM.vcpu_pins[:3], CpuSet([2]))),
    "emulator": replace(VM, emulator_pus=None),
    "iothreads": replace(VM, iothread_pins=((2, CpuSet([5])),)),
    "cells": replace(VM, cells=()),
    "cell-vcpus": with_cell(vcpus=CpuSet([0])),
    "cell-memory": with_cell(memory_bytes=MIB),
    "distances": with_cell(distances=()),
    "cell-pages": with_cell(page_bytes=None),
    "binding": replace(VM, binding=None),
    "cell-binding": with_cell(nodes=CpuSet([1])),
    "controller": replace(VM, controllers=()),
    "expander-cell": replace(VM, controllers=(changed(EXPANDER, cell=None),)),
    "bus-nr": replace(VM, controllers=(changed(EXPANDER, bus_nr=None),)),
    "device": replace(VM, hostdevs=(DEVICE, changed(DEVICE, bdf=Bdf.parse("0000:20:00.0")))),
    "device-address": replace(VM, hostdevs=(changed(DEVICE, address=None),)),
    "device-cell": replace(VM, hostdevs=(changed(DEVICE, cell=None),)),
    "initiators": replace(VM, hostdevs=(changed(DEVICE, initiator_cells=CpuSet()),)),
    "iommu": replace(VM, has_iommu=False),
}
"""By fact, the VM with another value of it, and of what cannot stay without it."""


def test_every_fact_has_a_change_here_and_a_page() -> None:
    assert CHANGES.keys() == {fact.id for fact in FACTS}
    assert all(finding(f"plan-{fact.id}", "it", "this", "that", "here") for fact in FACTS)


@pytest.mark.parametrize("fact", CHANGES)
def test_a_change_of_one_fact_is_a_difference_of_that_fact_alone(fact: str) -> None:
    found = list(diff(VM, CHANGES[fact]))
    assert [one.fact.id for one in found] == [fact]
    assert found[0].subject and found[0].title and found[0].expected != found[0].observed
    assert fact not in {one.fact.id for one in diff(VM, CHANGES[fact], [fact])}


@pytest.mark.parametrize("pins", [VM.vcpu_pins[:3], ()])
def test_a_source_that_pins_fewer_vcpus_leaves_the_others_unpinned(
    pins: tuple[CpuSet | None, ...],
) -> None:
    (one,) = diff(VM, replace(VM, vcpu_pins=pins))
    assert one.fact.id == "pins" and "not pinned" in one.observed
