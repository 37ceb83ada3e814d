"""Requirements: the libvirt and QEMU that each element we write needs, and which of them are older.

Versions are those that first took the element. Source: "Since" in libvirt's formatdomain and its
NEWS; QEMU's change logs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from homenode.domain.iommu import LIBVIRT_WITH_ACCEL, MOST_VCPUS_WITHOUT, QEMU_WITH_ACCEL
from homenode.errors import HostError
from homenode.plan.model import Plan
from homenode.tools.versions import Version
from homenode.vm.layout import GuestCells, MemoryBinding
from homenode.vm.model import PortModel


@dataclass(frozen=True, slots=True)
class Requirement:
    """One element and the oldest versions that take it. None: any that is still in use."""

    element: str
    libvirt: Version
    qemu: Version | None


PINS = Requirement("<vcpupin>", (0, 9, 0), None)
EMULATOR_PIN = Requirement("<emulatorpin>", (0, 10, 0), None)
IOTHREAD_PINS = Requirement("<iothreadpin>", (1, 2, 9), (2, 0, 0))
CELLS = Requirement("<numa><cell>", (0, 9, 8), None)
DISTANCES = Requirement("<cell><distances>", (3, 10, 0), (2, 10, 0))
DIES = Requirement("<topology dies=>", (6, 1, 0), (4, 1, 0))
TOPOEXT = Requirement("<feature name='topoext'>", (4, 5, 0), (3, 0, 0))
CACHE = Requirement("<cpu><cache>", (3, 3, 0), (2, 9, 0))
MEMORY = Requirement("<numatune><memory>", (0, 9, 3), None)
MEMNODE = Requirement("<memnode>", (1, 2, 7), (2, 1, 0))
HUGE_PAGES = Requirement("<hugepages><page>", (1, 2, 5), (2, 1, 0))
EXPANDER = Requirement("<controller model='pcie-expander-bus'>", (1, 3, 4), (2, 6, 0))
EXPANDER_VIRT = Requirement(
    "<controller model='pcie-expander-bus'> on aarch64 virt", (6, 1, 0), (6, 0, 0)
)
ROOT_PORT = Requirement("<controller model='pcie-root-port'>", (1, 2, 19), None)
GENERIC_PORT = Requirement("<model name='pcie-root-port'>", (3, 3, 0), (2, 9, 0))
SWITCH = Requirement("<controller model='pcie-switch-upstream-port'>", (1, 2, 19), None)
HOLE = Requirement("<pcihole64>", (1, 1, 2), None)
ADDRESS_BITS = Requirement("<maxphysaddr>", (8, 7, 0), (2, 7, 0))
WINDOW = Requirement("<qemu:commandline> -fw_cfg", (0, 8, 3), (2, 6, 0))
INITIATORS = Requirement("<hostdev><acpi nodeset=>", (11, 8, 0), (9, 0, 0))
IOMMU = Requirement("<iommu><driver eim=>", (3, 4, 0), (2, 8, 0))
AMD_IOMMU = Requirement("<iommu model='amd'><driver xtsup=>", (12, 2, 0), (9, 0, 0))
AMD_IOMMU_VFIO = Requirement(
    "<iommu model='amd'><driver xtsup=> with passed-through devices", (12, 2, 0), (9, 2, 0)
)
SMMU = Requirement("<iommu model='smmuv3'><driver accel=>", LIBVIRT_WITH_ACCEL, QEMU_WITH_ACCEL)
RECORD = Requirement("<metadata>", (0, 9, 10), None)


def required_versions(
    plan: Plan, *, is_virt: bool = False, iommu_model: str | None = None
) -> tuple[Requirement, ...]:
    """What a plan's elements need, the newest libvirt first. is_virt: an aarch64 guest.
    iommu_model: of the IOMMU that the document has."""
    return tuple(
        sorted(
            _needed(plan, is_virt, iommu_model),
            key=lambda need: (need.libvirt, need.qemu or (0, 0, 0), need.element),
            reverse=True,
        )
    )


def refuse_older(
    plan: Plan,
    libvirt: Version | None,
    qemu: Version | None,
    *,
    is_virt: bool = False,
    iommu_model: str | None = None,
) -> None:
    """Raises HostError where a daemon is older than an element needs; it names the element.

    A version that is not known (None) is not judged.
    """
    for need in required_versions(plan, is_virt=is_virt, iommu_model=iommu_model):
        for program, have, want in (
            ("libvirt", libvirt, need.libvirt),
            ("QEMU", qemu, need.qemu),
        ):
            if have is not None and want is not None and have < want:
                raise HostError(
                    f"{need.element} (layout {plan.layout.name}): expected {program} "
                    f"{_text(want)} or newer, found {_text(have)}",
                    hint=f"update {program}, or choose a layout that needs no {need.element}",
                )


def _needed(plan: Plan, is_virt: bool, iommu_model: str | None) -> Iterator[Requirement]:
    if plan.vcpu_pins:
        yield PINS
    if plan.emulator_pus is not None:
        yield EMULATOR_PIN
    if any(plan.iothread_pus):
        yield IOTHREAD_PINS
    if plan.layout.cells is GuestCells.MIRRORED:
        yield CELLS
        if any(cell.distances for cell in plan.cells):
            yield DISTANCES
    if plan.topology is not None and plan.topology.dies > 1:
        yield DIES
    if plan.topoext:
        yield TOPOEXT
    if plan.cache is not None:
        yield CACHE
    if plan.memory_mode is not None:
        yield MEMORY
        if plan.layout.memory is MemoryBinding.BOUND_PER_CELL:
            yield MEMNODE
    if plan.page_bytes is not None:
        yield HUGE_PAGES
    models = {controller.model for controller in plan.controllers if not controller.existing}
    if PortModel.EXPANDER_BUS in models:
        yield EXPANDER_VIRT if is_virt else EXPANDER
    if PortModel.ROOT_PORT in models:
        yield ROOT_PORT
        yield GENERIC_PORT
    if any(device.initiator_cells for device in plan.devices):
        yield INITIATORS
    if PortModel.SWITCH_UPSTREAM in models:
        yield SWITCH
    if plan.aperture is not None:
        if plan.aperture.pcihole64_bytes is not None:
            yield HOLE
        if plan.aperture.physical_address_bits is not None:
            yield ADDRESS_BITS
        if plan.aperture.firmware_mmio64_mib is not None:
            yield WINDOW
    if plan.iommu_needed and plan.vcpus > MOST_VCPUS_WITHOUT and not is_virt:
        amd = AMD_IOMMU_VFIO if plan.devices else AMD_IOMMU
        yield amd if iommu_model == "amd" else IOMMU
    if plan.vcpu_pins:
        yield RECORD


def _text(version: Version) -> str:
    return ".".join(map(str, version))
