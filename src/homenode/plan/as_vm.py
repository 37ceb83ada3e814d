"""AsVm: the VM that a plan describes, in the record that documents and files are read into."""

from msgspec.structs import replace

from homenode.cpuset import CpuSet
from homenode.plan.model import GuestCache, Plan
from homenode.vm.layout import GuestCells, MemoryBinding
from homenode.vm.model import (
    GuestHostdev,
    GuestMediated,
    GuestPciController,
    LayoutRecord,
    MemoryDevice,
    Vm,
    VmCell,
)

_CACHE_MODES = {
    GuestCache.AS_IT_WAS: None,
    GuestCache.PASSTHROUGH: "passthrough",
    GuestCache.EMULATED: "emulate",
    GuestCache.DISABLED: "disable",
}


KEPT = frozenset(("domain-type", "machine", "firmware", "cpu", "vcpus-online", "current-memory"))
"""Facts that no layout sets."""


def unsaid(plan: Plan) -> frozenset[str]:
    """Ids of the facts that a plan does not say: what it leaves as it was."""
    left = {
        "pages": plan.page_bytes is None,
        "cell-pages": plan.page_bytes is None,
        "topology": plan.topology is None,
        "binding": plan.memory_mode is None,
        "cell-binding": plan.memory_mode is None,
    }
    return frozenset(fact for fact, is_left in left.items() if is_left) | (
        frozenset() if plan.kept is not None else KEPT
    )


def vm_of_plan(plan: Plan, document: Vm | None = None) -> Vm:
    """The VM of a plan. document: the one that it is for. It says what the plan leaves as it was:
    mediated devices that the host did not show, ids of IOThreads in plans of earlier versions."""
    binding = None
    if plan.memory_mode is not None:
        binding = (str(plan.memory_mode), CpuSet(plan.memory_nodes))
    kept, window = plan.kept, plan.aperture
    iothreads = plan.pus_of_iothreads
    left: tuple[GuestMediated, ...] = ()
    if document is not None:
        if not plan.iothread_ids:
            iothreads = dict(zip(document.iothread_ids, plan.iothread_pus, strict=False))
        changed = {*plan.mediated_removed, *(device.uuid for device in plan.devices)}
        left = tuple(one for one in document.mediated if one.uuid not in changed)
    flat = plan.layout.cells is GuestCells.FLAT
    vm = Vm(
        name=plan.domain_name,
        source=f"plan of layout {plan.layout.name}",
        vcpus=plan.vcpus,
        cpu_topology=plan.topology,
        cpu_cache=_CACHE_MODES[plan.cache],
        topoext=False if plan.forbids_topoext else plan.topoext or None,
        physical_address_bits=None if window is None else window.physical_address_bits,
        vcpu_pins=plan.vcpu_pins or (None,) * plan.vcpus,
        emulator_pus=plan.emulator_pus,
        iothread_ids=tuple(iothreads),
        iothread_pins=tuple((n, pus) for n, pus in iothreads.items() if pus),
        memory_bytes=plan.memory_bytes,
        page_bytes=plan.page_bytes,
        binding=binding,
        memory_devices=_memory_devices(plan.memory_device_bytes),
        cells=() if flat else _cells(plan, binding),
        hostdevs=tuple(
            GuestHostdev(
                d.bdf,
                d.address,
                uuid=d.uuid,
                is_managed=d.managed,
                cell=d.cell,
                host_node=d.host_node,
                initiator_cells=CpuSet(d.initiator_cells),
            )
            for d in plan.devices
        ),
        mediated=left,
        controllers=tuple(
            GuestPciController(c.index, str(c.model), c.address, c.bus_nr, c.cell)
            for c in plan.controllers
        ),
        pcihole64_bytes=None if window is None else window.pcihole64_bytes,
        has_iommu=plan.iommu_needed,
        record=LayoutRecord(
            layout=plan.layout, host=plan.host_fingerprint, objective=plan.objective
        ),
    )
    if kept is None:
        return vm
    return replace(
        vm,
        domain_type=kept.domain_type,
        machine=kept.machine,
        firmware=kept.firmware,
        cpu_mode=kept.cpu_mode,
        cpu_model=kept.cpu_model,
        offline_vcpus=kept.offline_vcpus,
        ballooned_bytes=kept.ballooned_bytes,
    )


def vm_as_it_runs(plan: Plan, document: Vm | None) -> Vm:
    """The VM of a plan, with what no plan sets as the document has it by now: memory devices, vCPUs
    that are offline, the balloon, a topology that is left as it was."""
    planned = vm_of_plan(plan, document)
    if document is None:
        return planned
    return replace(
        planned,
        cpu_topology=planned.cpu_topology or document.cpu_topology,
        memory_devices=document.memory_devices,
        offline_vcpus=document.offline_vcpus,
        ballooned_bytes=document.ballooned_bytes,
    )


def _memory_devices(size: int) -> tuple[MemoryDevice, ...]:
    """One in place of all: a plan counts them together."""
    if not size:
        return ()
    return (MemoryDevice(model="", cell=0, size_bytes=size, plugged_bytes=size),)


def _cells(plan: Plan, binding: tuple[str, CpuSet] | None) -> tuple[VmCell, ...]:
    """A cell without memory of its own is bound where the rest is."""
    per_cell = plan.layout.memory is MemoryBinding.BOUND_PER_CELL
    mode, everywhere = binding or (None, CpuSet())
    return tuple(
        VmCell(
            id=cell.id,
            vcpus=cell.vcpus,
            memory_bytes=cell.memory_bytes,
            nodes=CpuSet(cell.host_nodes)
            if per_cell and cell.host_nodes and cell.memory_bytes
            else everywhere,
            mode=mode,
            page_bytes=plan.page_bytes,
            distances=cell.distances,
        )
        for cell in plan.cells
    )
