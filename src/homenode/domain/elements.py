"""ELEMENTS: what of a domain document is read, into which field, and what a layout writes there.

`open_domain` refuses a second one of what a domain has once. The tests show that each row is read
and written as it says, and that no step of `rewrite` writes what the table does not name.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MappedElement:
    """An element with what is below it.

    path: below <domain>. field: of Vm, else of RunningDomain; None = it is only written.
    steps: of rewrite.STEPS, what writes it; none = it is only read. once: a second one is refused.
    """

    path: str
    field: str | None = None
    steps: tuple[str, ...] = ()
    once: bool = False


def _once(path: str, field: str | None = None, *steps: str) -> MappedElement:
    return MappedElement(path, field, steps, once=True)


def _any(path: str, field: str | None = None, *steps: str) -> MappedElement:
    return MappedElement(path, field, steps)


ELEMENTS: tuple[MappedElement, ...] = (
    _once("name", "name"),
    _once("uuid", "uuid"),
    _once("metadata"),
    _any("metadata/layout", "record", "edit_metadata"),
    _once("memory", "memory_bytes", "edit_memory"),
    _once("currentMemory", "ballooned_bytes", "edit_memory"),
    _once("maxMemory", "max_memory_bytes", "edit_memory"),
    _once("memoryBacking"),
    _once("memoryBacking/hugepages", "page_bytes", "edit_memory_backing"),
    _once("memoryBacking/access", "memory_access_shared"),
    _once("vcpu", "vcpus", "edit_vcpus"),
    _once("vcpus", "offline_vcpus", "edit_vcpus"),
    _once("iothreads", "iothread_ids"),
    _once("iothreadids", "iothread_pus"),
    _once("cputune"),
    _any("cputune/vcpupin", "vcpu_pins", "edit_cputune"),
    _any("cputune/emulatorpin", "emulator_pus", "edit_cputune"),
    _any("cputune/iothreadpin", "iothread_pins", "edit_cputune"),
    _any("cputune/vcpusched", None, "edit_cputune"),
    _any("cputune/cachetune", None, "edit_cputune"),
    _any("cputune/memorytune", None, "edit_cputune"),
    _any("memtune/hard_limit", "hard_limit_bytes"),
    _once("numatune"),
    _once("numatune/memory", "binding", "edit_numatune"),
    _any("numatune/memnode", "bound_nodes", "edit_numatune"),
    _once("os"),
    _once("os/type", "machine"),
    _once("os/nvram"),
    _any("os/loader", "firmware"),
    _once("features"),
    _any("features/acpi", "has_acpi", "edit_acpi"),
    _any("features/ioapic", None, "edit_iommu"),
    _once("cpu", "cpu_mode"),
    _any("cpu/model", "cpu_model"),
    _any("cpu/feature", "topoext", "edit_cpu"),
    _once("cpu/topology", "cpu_topology", "edit_cpu"),
    _once("cpu/cache", "cpu_cache", "edit_cpu"),
    _once("cpu/maxphysaddr", "physical_address_bits", "edit_cpu"),
    _once("cpu/numa"),
    _any("cpu/numa/cell", "cells", "edit_cells"),
    _any("cpu/numa/interconnects", None, "edit_cells"),
    _once("devices"),
    _any("devices/emulator", "architecture"),
    _any(
        "devices/controller",
        "controllers",
        "edit_controllers",
        "edit_aperture",
        "edit_shared_slots",
    ),
    _any("devices/controller/pcihole64", "pcihole64_bytes", "edit_aperture"),
    _any("devices/hostdev", "hostdevs", "edit_hostdevs", "edit_initiators", "edit_shared_slots"),
    _any("devices/interface", "hostdevs", "edit_hostdevs", "edit_shared_slots"),
    _any("devices/memory", "memory_devices", "edit_memory_devices"),
    _any("devices/iommu", "iommu_model", "edit_iommu"),
    _once("launchSecurity", "launch_security"),
    _any("commandline", "has_qemu_commandline", "edit_aperture"),
)
