"""Codec: the table of libvirt's domain XML. A row has a fact's reader, the steps of a plan that
write it, and the first libvirt and QEMU; UNSAID lists facts that domain XML cannot hold.

`read.py` makes a Vm from the rows, and rejects duplicates of single elements; `targets/libvirt.py`
runs the steps. Tests check that each row is read and written as declared, and that no step writes
elements outside the table. Versions are the first to support the element. Source: "Since" in
libvirt's formatdomain and its NEWS; QEMU's change logs.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from msgspec import Struct

from homenode.cpuset import CpuSet
from homenode.errors import HostError, ParseError
from homenode.machine.tools.versions import Version
from homenode.vm.domain import cells, controllers, cpu, hostdevs, iommu, memory
from homenode.vm.domain.document import Document, parse_decimal, read_size, require_attribute
from homenode.vm.domain.memory import edit_metadata, read_record
from homenode.vm.layout import MemoryBinding
from homenode.vm.model import PortModel, Vm, VmCell
from homenode.vm.plan import Plan

Step = Callable[[Document, Plan], Document]

STEPS: tuple[Step, ...] = (
    cpu.edit_vcpus,
    memory.edit_memory,
    cpu.edit_cpu,
    cells.edit_cells,
    memory.edit_memory_devices,
    cells.edit_memory_backing,
    cpu.edit_cputune,
    memory.edit_numatune,
    controllers.edit_controllers,
    hostdevs.edit_hostdevs,
    hostdevs.edit_initiators,
    hostdevs.edit_shared_slots,
    controllers.edit_aperture,
    cpu.edit_acpi,
    iommu.edit_iommu,
    edit_metadata,  # last: edit_numatune reads the record of the layout before
)
"""Cells come before whatever names a cell, controllers before what is plugged into them."""

PCIE_STEPS: tuple[Step, ...] = (
    cells.edit_cells,
    controllers.edit_controllers,
    hostdevs.edit_hostdevs,
    hostdevs.edit_shared_slots,
    cpu.edit_acpi,
)
"""For a plan that sets only the PCIe tree and distances, and keeps pins and memory."""


class ElementRow(Struct, frozen=True):
    path: str  # below <domain>
    field: str | None = None  # field of Vm or RunningDomain; None = only written
    # reader of the field; None if another row reads it
    read: Callable[[Document], Any] | None = None
    steps: tuple[Step, ...] = ()  # steps that write it; () = read only
    once: bool = False  # a second element is rejected


class PlanContext(NamedTuple):
    """A plan, and of its guest whether the machine type is virt, and the IOMMU model."""

    plan: Plan
    is_virt: bool
    iommu_model: str | None


class MinimumVersions(Struct, frozen=True):
    """An element and the oldest versions that support it; qemu None: any version in use."""

    element: str
    libvirt: Version
    qemu: Version | None = None
    is_planned: Callable[[PlanContext], bool] = lambda need: False  # whether a plan writes it
    is_in: Callable[[Document, Vm], bool] = lambda document, vm: False  # whether a document has it


_COMMANDLINE = f"{{{controllers.QEMU_NAMESPACE}}}commandline"

UNSAID = {
    "device-cell": "the controllers above the device determine its cell",
    "initiators": "what writes a <hostdev> compares its <acpi>",
}
"""Facts of a VM that a definition cannot contain, and why."""


def _has(path: str) -> Callable[[Document], bool]:
    return lambda document: document.root.find(path) is not None


def _make_value_reader(path: str) -> Callable[[Document], str | None]:
    return lambda document: document.root.value(path)


def _make_size_reader(path: str) -> Callable[[Document], int | None]:
    def read(document: Document) -> int | None:
        element = document.root.find(path)
        return None if element is None else read_size(element)

    return read


def read_name(document: Document) -> str:
    """Return the domain's name. Raises ParseError without one."""
    name = document.root.value("name")
    if name is None:
        raise ParseError(document.source, "a domain with a <name>")
    return name


def _read_cpu_mode(document: Document) -> str | None:
    """Return the CPU mode; a <model> without a mode means custom; None without both."""
    mode, model = document.root.value("cpu/@mode"), document.root.find("cpu/model")
    return mode or (None if model is None else "custom")


def _read_address_bits(document: Document) -> int | None:
    element = document.root.find("cpu/maxphysaddr")
    bits = None if element is None else element.get("bits")
    if element is None or bits is None:
        return None
    return parse_decimal(element, bits, "address bits")


def _read_firmware(document: Document) -> str | None:
    named_firmware = document.root.value("os/@firmware")
    loader = document.root.find("os/loader")
    if named_firmware or loader is None:
        return named_firmware or None
    return "efi" if loader.get("type") == "pflash" else "bios"


def _read_launch_security(document: Document) -> str | None:
    security = document.root.child("launchSecurity")
    return None if security is None else security.get("type") or "unknown"


def _read_shared_access(document: Document) -> bool:
    of_cells = (e.get("memAccess") for e in cells.cell_elements(document))
    return "shared" in (document.root.value("memoryBacking/access/@mode"), *of_cells)


def _read_cells(document: Document) -> tuple[VmCell, ...]:
    memnodes = memory.read_memnodes(document)
    binding = memory.read_binding(document) or (None, CpuSet())
    vm_cells = []
    distances = cells.read_distances(document)
    for i, (element, vcpus) in enumerate(cells.read_cells(document)):
        mode, nodes = memnodes.get(i) or binding
        vm_cells.append(
            VmCell(
                id=i,
                vcpus=vcpus,
                memory_bytes=cells.read_cell_bytes(element),
                nodes=nodes,
                mode=mode,
                page_bytes=cells.page_bytes_of_cell(document, i),
                distances=distances[i],
            )
        )
    return tuple(vm_cells)


def _make_row(
    path: str, field: str | None, read: Callable[[Document], Any] | None, *steps: Step
) -> ElementRow:
    return ElementRow(path, field, read, steps)


def _make_single_row(
    path: str, field: str | None = None, read: Callable[[Document], Any] | None = None, *steps: Step
) -> ElementRow:
    return ElementRow(path, field, read, steps, once=True)


ROWS: tuple[ElementRow, ...] = (
    _make_single_row("vcpu", "vcpus", lambda document: cpu.read_vcpus(document)[0], cpu.edit_vcpus),
    _make_row("", "domain_type", lambda document: require_attribute(document.root, "type")),
    _make_single_row("name", "name", read_name),
    _make_single_row("uuid", "uuid", _make_value_reader("uuid")),
    _make_single_row("metadata"),
    _make_row("metadata/layout", "record", read_record, edit_metadata),
    _make_single_row("vcpus", "offline_vcpus", cpu.read_offline_vcpus, cpu.edit_vcpus),
    _make_single_row("iothreads", "iothread_ids", cpu.list_iothread_ids),
    _make_single_row("iothreadids", "iothread_pus"),
    _make_single_row("cputune"),
    _make_row("cputune/vcpupin", "vcpu_pins", cpu.read_vcpu_pins, cpu.edit_cputune),
    _make_row("cputune/emulatorpin", "emulator_pus", cpu.read_emulator, cpu.edit_cputune),
    _make_row("cputune/iothreadpin", "iothread_pins", cpu.read_iothread_pins, cpu.edit_cputune),
    _make_row("cputune/vcpusched", None, None, cpu.edit_cputune),
    _make_row("cputune/cachetune", None, None, cpu.edit_cputune),
    _make_row("cputune/memorytune", None, None, cpu.edit_cputune),
    _make_single_row("memory", "memory_bytes", memory.read_own_memory, memory.edit_memory),
    _make_single_row("currentMemory", "ballooned_bytes", memory.read_ballooned, memory.edit_memory),
    _make_single_row(
        "maxMemory", "max_memory_bytes", _make_size_reader("maxMemory"), memory.edit_memory
    ),
    _make_single_row("memoryBacking"),
    _make_single_row(
        "memoryBacking/hugepages", "page_bytes", cells.read_page_bytes, cells.edit_memory_backing
    ),
    _make_single_row("memoryBacking/access", "memory_access_shared", _read_shared_access),
    _make_row("memtune/hard_limit", "hard_limit_bytes", _make_size_reader("memtune/hard_limit")),
    _make_single_row("numatune"),
    _make_single_row("numatune/memory", "binding", memory.read_binding, memory.edit_numatune),
    _make_row("numatune/memnode", "bound_nodes", memory.read_bound_nodes, memory.edit_numatune),
    _make_single_row("os"),
    _make_single_row("os/type", "machine", _make_value_reader("os/type/@machine")),
    _make_single_row("os/nvram"),
    _make_row("os/loader", "firmware", _read_firmware),
    _make_row("os/loader", "loader", _make_value_reader("os/loader")),
    _make_single_row("features"),
    _make_row("features/acpi", "has_acpi", _has("features/acpi"), cpu.edit_acpi),
    _make_row("features/ioapic", None, None, iommu.edit_iommu),
    _make_single_row("cpu", "cpu_mode", _read_cpu_mode),
    _make_row("cpu/model", "cpu_model", _make_value_reader("cpu/model")),
    _make_row("cpu/feature", "topoext", cpu.read_topoext, cpu.edit_cpu),
    _make_single_row("cpu/topology", "cpu_topology", cpu.read_topology, cpu.edit_cpu),
    _make_single_row("cpu/cache", "cpu_cache", _make_value_reader("cpu/cache/@mode"), cpu.edit_cpu),
    _make_single_row("cpu/maxphysaddr", "physical_address_bits", _read_address_bits, cpu.edit_cpu),
    _make_single_row("cpu/numa"),
    _make_row("cpu/numa/cell", "cells", _read_cells, cells.edit_cells),
    _make_row("cpu/numa/interconnects", None, None, cells.edit_cells),
    _make_single_row("devices"),
    _make_row("devices/emulator", "architecture", cpu.read_architecture),
    _make_row("devices/emulator", "emulator", _make_value_reader("devices/emulator")),
    ElementRow(
        "devices/controller",
        "controllers",
        controllers.read_controllers,
        (controllers.edit_controllers, controllers.edit_aperture, hostdevs.edit_shared_slots),
    ),
    _make_row(
        "devices/controller/pcihole64",
        "pcihole64_bytes",
        controllers.read_hole,
        controllers.edit_aperture,
    ),
    ElementRow(
        "devices/hostdev",
        "hostdevs",
        hostdevs.read_hostdevs,
        (hostdevs.edit_hostdevs, hostdevs.edit_initiators, hostdevs.edit_shared_slots),
    ),
    _make_row("devices/hostdev", "mediated", hostdevs.read_mediated, hostdevs.edit_hostdevs),
    _make_row(
        "devices/interface", "hostdevs", None, hostdevs.edit_hostdevs, hostdevs.edit_shared_slots
    ),
    _make_row(
        "devices/memory", "memory_devices", memory.read_memory_devices, memory.edit_memory_devices
    ),
    _make_row(
        "devices/memory", "has_dimms", lambda document: bool(memory.list_memory_devices(document))
    ),
    _make_row(
        "devices/iommu", "iommu_model", _make_value_reader("devices/iommu/@model"), iommu.edit_iommu
    ),
    _make_row("devices/iommu", "has_iommu", _has("devices/iommu")),
    _make_row("devices", "addresses", hostdevs.read_addresses),
    _make_single_row("launchSecurity", "launch_security", _read_launch_security),
    _make_row(
        "commandline",
        "has_qemu_commandline",
        lambda document: bool(document.root.child(_COMMANDLINE)),
        controllers.edit_aperture,
    ),
)
"""Rows in the order of reading: a definition without vCPUs is rejected first."""


def _needs_iommu(need: PlanContext) -> bool:
    return need.plan.vm.vcpus > iommu.MAX_VCPUS_WITHOUT and not need.is_virt


def _needs_amd_iommu(need: PlanContext, *, has_devices: bool) -> bool:
    is_amd = need.iommu_model == "amd" and _needs_iommu(need)
    return is_amd and bool(need.plan.vm.hostdevs) == has_devices


def _is_pinned(need: PlanContext) -> bool:
    return need.plan.vm.is_pinned


def _is_set(field: str) -> Callable[[PlanContext], bool]:
    """Return whether the plan sets a field of its Vm."""
    return lambda need: bool(getattr(need.plan.vm, field))


def _is_window_set(size: str) -> Callable[[PlanContext], bool]:
    """Return whether the plan sets a size of its aperture."""
    return lambda need: getattr(need.plan.aperture, size, None) is not None


def _is_controller_added(
    model: PortModel, *, is_virt: bool | None = None
) -> Callable[[PlanContext], bool]:
    """Return whether the plan adds a controller of a model; is_virt None: to any machine type."""
    return lambda need: (
        is_virt in (None, need.is_virt)
        and any(c.model == model and not c.existing for c in need.plan.vm.controllers)
    )


def _holds(path: str) -> Callable[[Document, Vm], bool]:
    return lambda document, vm: document.root.find(path) is not None


def _has_model(vm: Vm, model: PortModel) -> bool:
    return any(controller.model == model for controller in vm.controllers)


def _list_drivers(document: Document) -> Iterator[bool]:
    """Yield for each IOMMU with a <driver> whether it is the host's."""
    for driver in (element.child("driver") for element in document.root.all("devices/iommu")):
        if driver is not None:
            yield driver.get("accel") == "on"


_EXPANDER, _SWITCH = PortModel.EXPANDER_BUS, PortModel.SWITCH_UPSTREAM
INITIATORS = MinimumVersions(
    "<hostdev><acpi nodeset=>",
    (11, 8, 0),
    (9, 0, 0),
    lambda need: any(device.initiator_cells for device in need.plan.vm.hostdevs),
)

SINCE = (
    MinimumVersions("<vcpupin>", (0, 9, 0), None, _is_pinned),
    MinimumVersions("<emulatorpin>", (0, 10, 0), None, _is_set("emulator_pus")),
    MinimumVersions(
        "<iothreadpin>",
        (1, 2, 9),
        (2, 0, 0),
        _is_set("iothread_pins"),
        _holds("cputune/iothreadpin"),
    ),
    MinimumVersions("<numa><cell>", (0, 9, 8), None, _is_set("cells"), _holds("cpu/numa")),
    MinimumVersions(
        "<cell><distances>",
        (3, 10, 0),
        (2, 10, 0),
        lambda need: any(cell.distances for cell in need.plan.vm.cells),
        _holds("cpu/numa/cell/distances"),
    ),
    MinimumVersions(
        "<topology dies=>",
        (6, 1, 0),
        (4, 1, 0),
        lambda need: need.plan.vm.cpu_topology is not None and need.plan.vm.cpu_topology.dies > 1,
        lambda document, vm: (document.root.value("cpu/topology/@dies") or "1") != "1",
    ),
    MinimumVersions(
        "<feature name='topoext'>",
        (4, 5, 0),
        (3, 0, 0),
        _is_set("topoext"),
        lambda document, vm: vm.topoext is not None,
    ),
    MinimumVersions(
        "<cpu><cache>", (3, 3, 0), (2, 9, 0), _is_set("cpu_cache"), _holds("cpu/cache")
    ),
    MinimumVersions("<numatune><memory>", (0, 9, 3), None, _is_set("binding")),
    MinimumVersions(
        "<memnode>",
        (1, 2, 7),
        (2, 1, 0),
        lambda need: (
            need.plan.vm.binding is not None
            and need.plan.layout.memory is MemoryBinding.BOUND_PER_CELL
        ),
        _holds("numatune/memnode"),
    ),
    MinimumVersions(
        "<hugepages><page>",
        (1, 2, 5),
        (2, 1, 0),
        _is_set("page_bytes"),
        _holds("memoryBacking/hugepages/page"),
    ),
    MinimumVersions(
        "<controller model='pcie-expander-bus'>",
        (1, 3, 4),
        (2, 6, 0),
        _is_controller_added(_EXPANDER, is_virt=False),
        lambda document, vm: not vm.is_virt and _has_model(vm, _EXPANDER),
    ),
    MinimumVersions(
        "<controller model='pcie-expander-bus'> on aarch64 virt",
        (6, 1, 0),
        (6, 0, 0),
        _is_controller_added(_EXPANDER, is_virt=True),
        lambda document, vm: vm.is_virt and _has_model(vm, _EXPANDER),
    ),
    MinimumVersions(
        "<controller model='pcie-root-port'>",
        (1, 2, 19),
        None,
        _is_controller_added(PortModel.ROOT_PORT),
    ),
    MinimumVersions(
        "<model name='pcie-root-port'>",
        (3, 3, 0),
        (2, 9, 0),
        _is_controller_added(PortModel.ROOT_PORT),
    ),
    MinimumVersions(
        "<controller model='pcie-switch-upstream-port'>",
        (1, 2, 19),
        None,
        _is_controller_added(_SWITCH),
        lambda document, vm: _has_model(vm, _SWITCH),
    ),
    MinimumVersions(
        "<pcihole64>",
        (1, 1, 2),
        None,
        _is_window_set("pcihole64_bytes"),
        lambda document, vm: vm.pcihole64_bytes is not None,
    ),
    MinimumVersions(
        "<maxphysaddr>",
        (8, 7, 0),
        (2, 7, 0),
        _is_window_set("physical_address_bits"),
        _holds("cpu/maxphysaddr"),
    ),
    MinimumVersions(
        "<qemu:commandline> -fw_cfg", (0, 8, 3), (2, 6, 0), _is_window_set("firmware_mmio64_mib")
    ),
    INITIATORS,
    MinimumVersions(
        "<iommu><driver eim=>",
        (3, 4, 0),
        (2, 8, 0),
        lambda need: _needs_iommu(need) and need.iommu_model != "amd",
        lambda document, vm: False in _list_drivers(document),
    ),
    MinimumVersions(
        "<iommu model='amd'><driver xtsup=>",
        (12, 2, 0),
        (9, 0, 0),
        lambda need: _needs_amd_iommu(need, has_devices=False),
    ),
    MinimumVersions(
        "<iommu model='amd'><driver xtsup=> with passed-through devices",
        (12, 2, 0),
        (9, 2, 0),
        lambda need: _needs_amd_iommu(need, has_devices=True),
    ),
    MinimumVersions(  # not requested by plans: written if the host supports it
        "<iommu model='smmuv3'><driver accel=>",
        iommu.LIBVIRT_WITH_ACCEL,
        iommu.QEMU_WITH_ACCEL,
        is_in=lambda document, vm: True in _list_drivers(document),
    ),
    MinimumVersions("<metadata>", (0, 9, 10), None, _is_pinned),
)


def list_required_versions(
    plan: Plan, *, is_virt: bool = False, iommu_model: str | None = None
) -> tuple[MinimumVersions, ...]:
    """Return the versions that a plan's elements need, the newest libvirt first. is_virt: an
    aarch64 guest. iommu_model: of the document's IOMMU."""
    need = PlanContext(plan, is_virt, iommu_model)
    return tuple(
        sorted(
            (row for row in SINCE if row.is_planned(need)),
            key=lambda row: (row.libvirt, row.qemu or (0, 0, 0), row.element),
            reverse=True,
        )
    )


def reject_older(
    plan: Plan,
    libvirt: Version | None,
    qemu: Version | None,
    *,
    is_virt: bool = False,
    iommu_model: str | None = None,
) -> None:
    """Raise HostError if a daemon is older than an element needs; it names the element. An unknown
    version (None) is not checked."""
    for row in list_required_versions(plan, is_virt=is_virt, iommu_model=iommu_model):
        for program, have, want in is_older(row, libvirt, qemu):
            raise HostError(
                f"{row.element} (layout {plan.layout.name}): expected {program} {want} or newer, "
                f"found {have}",
                hint=f"update {program}, or choose a layout that needs no {row.element}",
            )


def is_older(
    row: MinimumVersions, libvirt: Version | None, qemu: Version | None
) -> Iterator[tuple[str, str, str]]:
    """Yield (program, version, required version) of programs known to be older."""
    for program, have, want in (("libvirt", libvirt, row.libvirt), ("QEMU", qemu, row.qemu)):
        if have is not None and want is not None and have < want:
            yield program, ".".join(map(str, have)), ".".join(map(str, want))
