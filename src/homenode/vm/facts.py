"""Facts: the comparable facts of a VM, a row each, and their differences between two sources.

One table compares a definition, a target's file or libvirt's definition with the plan.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import eq
from typing import Any

from msgspec import Struct

from homenode.cpuset import CpuSet
from homenode.text import format_cpus, format_nodes, plural, shorten_list
from homenode.units import format_bytes
from homenode.vm.model import GuestAddress, Vm, VmCell, format_vcpus

_SHOWN = 6
"""Maximum number of shown items of a list."""

FactValues = Mapping[str, Any]
"""Values of a fact by the thing that has them; None = the VM does not state it."""


class VmFact(Struct, frozen=True, kw_only=True, gc=False):
    """One row."""

    id: str  # also the finding's id, after "plan-"
    subject: str = ""  # element of a fact of the whole VM
    title: str = ""  # readable name
    values: Callable[[Vm], FactValues]  # values of a VM by their key
    fields: tuple[str, ...] = ()  # fields of Vm that it uses, for the tables of formats
    agrees: Callable[[Any, Any], bool] = eq  # whether two values are equivalent
    show: Callable[[Any], str] = str  # a value as text
    nothing: str = "none"  # the text for a missing value
    # (subject, expected, observed) of two values; subject "" = the thing
    show_both: Callable[[Any, Any], tuple[str, str, str]] | None = None
    alone: bool = False  # a value only in the second source is a difference too
    may_lack: bool = False  # a missing value means "no such thing"
    # facts whose difference on the same subject, or the whole VM, implies this one
    after: tuple[str, ...] = ()


class VmComparison(Struct, frozen=True, kw_only=True, gc=False):
    """A fact of two VMs."""

    fact: VmFact  # the row
    subject: str  # the thing
    title: str  # readable name
    expected: str  # as text
    observed: str  # as text
    planned_value: Any  # None = not given by the first VM
    found_value: Any  # None = not given by the second VM
    agree: bool  # whether the values are equivalent


def diff(
    planned: Vm, observed: Vm, lost_ids: Collection[str] = (), facts: Iterable[VmFact] | None = None
) -> Iterator[VmComparison]:
    """Yield differences of the second VM from the first, in the order of the facts; None = FACTS.
    lost_ids: ids of facts that one source cannot hold."""
    rows = (fact for fact in (FACTS if facts is None else facts) if fact.id not in lost_ids)
    return (comparison for comparison in compare(planned, observed, rows) if not comparison.agree)


def compare(planned_vm: Vm, second: Vm, facts: Iterable[VmFact]) -> Iterator[VmComparison]:
    """Yield each fact of the first VM next to that of the second."""
    differing: set[tuple[str, str]] = set()
    for fact in facts:
        planned_values, found_values = fact.values(planned_vm), fact.values(second)
        things = [thing for thing, value in planned_values.items() if value is not None]
        unplanned_values = (
            [thing for thing in found_values if thing not in planned_values] if fact.alone else []
        )
        for thing in (*things, *unplanned_values):
            want, have = planned_values.get(thing), found_values.get(thing)
            if have is None and fact.may_lack:
                continue
            agree = thing in planned_values and have is not None and fact.agrees(want, have)
            if not agree:
                if any({(other, thing), (other, "")} & differing for other in fact.after):
                    continue
                differing.add((fact.id, thing))
            named = ""
            expected, observed = (
                fact.nothing if value_of_side is None else fact.show(value_of_side)
                for value_of_side in (want, have)
            )
            if fact.show_both is not None:
                named, expected, observed = fact.show_both(want, have)
            yield VmComparison(
                fact=fact,
                subject=named or thing or fact.subject,
                title=named or thing or fact.title,
                expected=expected,
                observed=observed,
                planned_value=want,
                found_value=have,
                agree=agree,
            )


def get_value(value: Any) -> FactValues:
    return {"": value}


def list_cell_values(vm: Vm, get: Callable[[VmCell], Any], prefix: str = "") -> FactValues:
    return {f"{prefix}cell {cell.id}": get(cell) for cell in vm.cells}


def _list_devices(vm: Vm, get: Callable[[Any], Any]) -> FactValues:
    values = {device.uuid or str(device.bdf): get(device) for device in vm.hostdevs}
    return {device.uuid: get(device) for device in vm.mediated} | values


def _join(texts: Iterable[str]) -> str:
    return shorten_list(texts, _SHOWN) or "none"


def _list_pins(vm: Vm) -> tuple[CpuSet | None, ...]:
    """Return a pin or None for each vCPU, and pins of further threads."""
    return vm.vcpu_pins + (None,) * (vm.vcpus - len(vm.vcpu_pins))


def _format_pus(pus: CpuSet | None) -> str:
    return "not pinned" if not pus else f"on {format_cpus(pus)}"


def _show_both_pins(
    planned: Sequence[CpuSet | None], observed: Sequence[CpuSet | None]
) -> tuple[str, str, str]:
    pairs = enumerate(zip(planned, observed, strict=False))
    apart = [(i, want, have) for i, (want, have) in pairs if want != have]
    return (
        f"pins of {format_vcpus(CpuSet(i for i, _, _ in apart))}",
        "vCPU " + _join(f"{i} {_format_pus(want)}" for i, want, _ in apart),
        "vCPU " + _join(f"{i} {_format_pus(have)}" for i, _, have in apart),
    )


def _are_same_pins(planned: Sequence[CpuSet | None], observed: Sequence[CpuSet | None]) -> bool:
    """Return whether the common vCPUs have the same pins; the number is another fact."""
    return all(want == have for want, have in zip(planned, observed, strict=False))


def _is_same_machine(planned: str, observed: str) -> bool:
    """Whether machine types match: libvirt expands an alias; losing a version is a difference."""
    machines = (planned, observed)
    kinds = [next((k for k in ("q35", "virt") if k in m), "pc") for m in machines]
    is_versioned = any(c.isdigit() for c in planned.replace("q35", ""))
    return planned == observed or (kinds[0] == kinds[1] and not is_versioned)


def _is_same_cpu(
    planned: tuple[str | None, str | None], observed: tuple[str | None, str | None]
) -> bool:
    """Return whether CPUs match: libvirt adds the default model if none is given."""
    return planned[0] is None or planned == observed


def _format_page(pages: tuple[int | None]) -> str:
    (size,) = pages
    if size is None:
        return "ordinary pages"
    return "the default huge page" if size == 0 else format_bytes(size)


def _format_shape(topology: tuple[int, int, int, int] | tuple[()]) -> str:
    if not topology:
        return "none"
    sockets, dies, cores, threads = topology
    parts = {"socket": sockets, "die": dies, "core": cores, "thread": threads}
    return " x ".join(plural(count, noun) for noun, count in parts.items())


def _format_nodes(nodes: CpuSet | None) -> str:
    return format_nodes(nodes) if nodes else "any node"


def _format_binding(binding: tuple[str | None, CpuSet]) -> str:
    if not binding[1]:
        return "not bound"
    return f"{binding[0] or 'memory'} on {format_nodes(binding[1])}"


def _is_same_binding(
    planned: tuple[str | None, CpuSet], observed: tuple[str | None, CpuSet]
) -> bool:
    """Return whether bindings match; a source may give only nodes."""
    return planned[1] == observed[1] and observed[0] in (None, planned[0])


def _is_same_port(
    planned: tuple[str, GuestAddress | None], observed: tuple[str, GuestAddress | None]
) -> bool:
    """Return whether ports match; without an address the hypervisor chooses one."""
    return planned[0] == observed[0] and planned[1] in (None, observed[1])


FACTS: tuple[VmFact, ...] = (
    VmFact(
        id="vcpus",
        subject="<vcpu>",
        title="number of vCPUs",
        values=lambda vm: get_value(vm.vcpus),
        fields=("vcpus",),
    ),
    VmFact(
        id="memory",
        subject="<memory>",
        title="memory",
        values=lambda vm: get_value(vm.memory_bytes),
        fields=("memory_bytes", "ballooned_bytes", "max_memory_bytes"),
        show=format_bytes,
    ),
    VmFact(
        id="memory-devices",
        subject="memory devices",
        title="memory devices",
        values=lambda vm: get_value(vm.memory_device_bytes),
        fields=("memory_devices",),
        show=format_bytes,
    ),
    VmFact(
        id="memory-device",
        values=lambda vm: {
            f"memory device {number}": (device.size_bytes, device.cell, device.nodes)
            for number, device in enumerate(d for d in vm.memory_devices if d.is_host_memory)
        },
        fields=("memory_devices",),
        show=lambda one: f"{format_bytes(one[0])} in cell {one[1]} on {_format_nodes(one[2])}",
        after=("memory-devices",),
    ),
    VmFact(
        id="pages",
        subject="<hugepages>",
        title="huge pages",
        values=lambda vm: get_value((vm.page_bytes,)),
        fields=("page_bytes",),
        show=_format_page,
    ),
    VmFact(
        id="topology",
        subject="<topology>",
        title="sockets, dies, cores, threads",
        values=lambda vm: get_value(vm.cpu_topology or ()),
        fields=("cpu_topology",),
        show=_format_shape,
    ),
    VmFact(
        id="domain-type",
        subject="<domain>",
        title="accelerator",
        values=lambda vm: get_value(vm.domain_type),
        fields=("domain_type",),
        show="type {}".format,
    ),
    VmFact(
        id="machine",
        subject="<os><type>",
        title="machine type",
        values=lambda vm: get_value(vm.machine or "the default machine"),
        fields=("machine",),
        agrees=_is_same_machine,
    ),
    VmFact(
        id="firmware",
        subject="<os>",
        title="firmware",
        values=lambda vm: get_value("bios" if vm.firmware in (None, "bios") else "efi"),
        fields=("firmware",),
    ),
    VmFact(
        id="program",
        values=lambda vm: {"<loader>": vm.loader, "<emulator>": vm.emulator},
        fields=("loader", "emulator"),
    ),
    VmFact(
        id="cpu",
        subject="<cpu>",
        title="CPU model",
        values=lambda vm: get_value((vm.cpu_mode, vm.cpu_model)),
        fields=("cpu_mode", "cpu_model"),
        agrees=_is_same_cpu,
        show=lambda cpu: " ".join(filter(None, cpu)) or "the default model",
    ),
    VmFact(
        id="vcpus-online",
        subject="<vcpu>",
        title="vCPUs at the start",
        values=lambda vm: get_value(vm.offline_vcpus),
        fields=("offline_vcpus",),
        show=lambda off: f"{format_vcpus(off)} offline" if off else "every vCPU there at the start",
    ),
    VmFact(
        id="current-memory",
        subject="<currentMemory>",
        title="memory at the start",
        values=lambda vm: get_value(vm.ballooned_bytes),
        fields=("ballooned_bytes",),
        show=lambda size: f"{format_bytes(size)} in the balloon",
    ),
    VmFact(
        id="pins",
        values=lambda vm: get_value(_list_pins(vm)),
        fields=("vcpu_pins",),
        agrees=_are_same_pins,
        show_both=_show_both_pins,
    ),
    VmFact(
        id="emulator",
        subject="<emulatorpin>",
        title="emulator's CPUs",
        values=lambda vm: get_value(vm.emulator_pus or CpuSet()),
        fields=("emulator_pus",),
        show=_format_pus,
    ),
    VmFact(
        id="iothreads",
        subject="<iothreadpin>",
        title="IOThreads' CPUs",
        values=lambda vm: get_value(vm.iothread_pins),
        fields=("iothread_pins",),
        show=lambda pins: (
            "no pins" if not pins else _join(f"{n} {_format_pus(pus)}" for n, pus in pins)
        ),
    ),
    VmFact(
        id="cells",
        subject="<numa>",
        title="guest cells",
        values=lambda vm: get_value(tuple(cell.id for cell in vm.cells)),
        fields=("cells", "binding", "page_bytes"),
        agrees=lambda planned, found: planned == found or (not planned and len(found) == 1),
        show=lambda cells: plural(len(cells), "cell") if cells else "a flat guest",
    ),
    VmFact(
        id="cell-vcpus",
        values=lambda vm: list_cell_values(vm, lambda cell: cell.vcpus),
        fields=("cells",),
        show=lambda vcpus: format_vcpus(vcpus) if vcpus else "vCPUs none",
        after=("cells",),
    ),
    VmFact(
        id="cell-memory",
        values=lambda vm: list_cell_values(vm, lambda cell: cell.memory_bytes, "memory of "),
        fields=("cells",),
        show=format_bytes,
        after=("cells",),
    ),
    VmFact(
        id="distances",
        values=lambda vm: (
            list_cell_values(vm, lambda cell: cell.distances) if len(vm.cells) > 1 else {}
        ),
        fields=("cells",),
        show=lambda row: f"distances {' '.join(map(str, row)) or 'none'}",
        after=("cells",),
    ),
    VmFact(
        id="cell-pages",
        values=lambda vm: list_cell_values(vm, lambda cell: (cell.page_bytes,)),
        fields=("page_bytes",),
        show=_format_page,
        after=("cells", "pages"),
    ),
    VmFact(
        id="binding",
        subject="<numatune><memory>",
        title="binding of memory",
        values=lambda vm: get_value(vm.binding or (None, CpuSet())),
        fields=("binding",),
        agrees=_is_same_binding,
        show=_format_binding,
    ),
    VmFact(
        id="cell-binding",
        values=lambda vm: list_cell_values(
            vm, lambda cell: (cell.mode, cell.nodes) if cell.memory_bytes else None, "memory of "
        ),
        fields=("binding",),
        agrees=_is_same_binding,
        show=_format_binding,
        after=("cells",),
    ),
    VmFact(
        id="controller",
        values=lambda vm: {
            f"PCI controller {c.index}": (c.model, c.address) for c in vm.controllers
        },
        fields=("controllers",),
        agrees=_is_same_port,
        show=lambda port: f"{port[0]} at {port[1]}",
    ),
    VmFact(
        id="expander-cell",
        values=lambda vm: {f"PCI controller {c.index}": c.cell for c in vm.controllers},
        fields=("controllers",),
        show="on cell {}".format,
        nothing="on no cell",
        after=("controller",),
    ),
    VmFact(
        id="bus-nr",
        values=lambda vm: {f"PCI controller {c.index}": c.bus_nr for c in vm.controllers},
        fields=("controllers",),
        show="busNr {}".format,
        after=("controller",),
    ),
    VmFact(
        id="device",
        values=lambda vm: _list_devices(vm, lambda device: True),
        fields=("hostdevs",),
        show=lambda _: "passed through",
        nothing="not passed through",
        alone=True,
    ),
    VmFact(
        id="device-address",
        values=lambda vm: _list_devices(vm, lambda device: device.address),
        fields=("hostdevs",),
        show="guest address {}".format,
        nothing="guest address not set",
        after=("device",),
    ),
    VmFact(
        id="device-cell",
        values=lambda vm: _list_devices(vm, lambda device: device.cell),
        fields=("hostdevs",),
        show="on cell {}".format,
        nothing="on no cell",
        after=("device", "device-address"),
    ),
    VmFact(
        id="initiators",
        values=lambda vm: {
            f"own memory of {device.bdf}": device.initiator_cells or None for device in vm.hostdevs
        },
        fields=("hostdevs",),
        show="cells {}".format,
        nothing="no cells",
    ),
    VmFact(
        id="iommu",
        subject="<iommu>",
        title="guest IOMMU",
        values=lambda vm: get_value(vm.has_iommu or None),
        fields=("iommu_model",),
        show=lambda _: "one",
    ),
)
"""Facts in the order in which differences are shown."""
