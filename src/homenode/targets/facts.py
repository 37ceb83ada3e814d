"""VmFacts: what a target's file says of a VM, for comparison with a plan."""

from dataclasses import dataclass

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet


@dataclass(frozen=True, slots=True)
class CellFact:
    """A guest cell. memory_bytes: None = an equal share. host_nodes: None = not stated. mode:
    libvirt's name. distances: () = not stated. page_bytes: of its huge pages, None = ordinary."""

    vcpus: CpuSet
    memory_bytes: int | None
    host_nodes: CpuSet | None
    mode: str | None = None
    distances: tuple[int, ...] = ()
    page_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class VmFacts:
    """What a file says. None and () = not stated.

    vcpu_pins: by vCPU. topology: sockets, dies, cores, threads. cells: a VM without cells whose
    memory is bound has one without vCPUs. devices: host functions in the file's order, each with
    its guest cell, None where it has none. initiators: the cells of a GPU's own memory.
    """

    vcpus: int | None
    memory_bytes: int | None
    page_bytes: int | None = None
    topology: tuple[int, int, int, int] | None = None
    cells: tuple[CellFact, ...] = ()
    vcpu_pins: tuple[CpuSet | None, ...] = ()
    emulator_pus: CpuSet | None = None
    iothread_pus: tuple[CpuSet, ...] = ()
    devices: tuple[tuple[Bdf, int | None], ...] = ()
    initiators: tuple[tuple[Bdf, CpuSet], ...] = ()
    has_iommu: bool = False
    hole_bytes: int | None = None
