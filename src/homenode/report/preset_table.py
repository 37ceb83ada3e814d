"""PresetTable: what each preset makes of one VM on one host, a line for each."""

from collections.abc import Mapping

from rich.console import RenderableType

from homenode.pci import DeviceKind
from homenode.plan.layout import MemoryBinding
from homenode.plan.model import Plan, Unplannable
from homenode.report.terminal_text import AsciiWhereNeeded, TableOrList
from homenode.topology import Host
from homenode.wording import number_list

COLUMNS = (
    "layout",
    "vCPUs",
    "nodes",
    "cells",
    "GPUs placed",
    "LLCs",
    "memory",
    "remote DMA",
    "placement, or why not",
)

_BINDINGS = {
    MemoryBinding.AS_IT_WAS: "as it was",
    MemoryBinding.BOUND: "bound",
    MemoryBinding.BOUND_PER_CELL: "per cell",
}


def plan_table(plans: Mapping[str, Plan | Unplannable], host: Host | None) -> RenderableType:
    """The presets by name, with the plan of each or the reason that there is none.

    "GPUs placed": GPUs whose node the guest can know, of the VM's GPUs. "remote DMA": share of the
    guest's memory that is not on a GPU's own node, on average over the GPUs (other devices where
    the VM has no GPU); unknown where memory is not bound or a node is unknown.
    """
    rows = [preset_row(name, plan, host) for name, plan in plans.items()]
    return AsciiWhereNeeded(TableOrList(COLUMNS, rows, wraps_last=True))


def preset_row(name: str, plan: Plan | Unplannable, host: Host | None) -> tuple[str, ...]:
    """One line of the table, a text for each of COLUMNS."""
    if isinstance(plan, Unplannable):
        return (name, *("-",) * (len(COLUMNS) - 2), f"unplannable: {plan.message}")
    gpus = () if host is None else tuple(gpu.bdf for gpu in host.devices_of_kind(DeviceKind.GPU))
    devices = [d for d in plan.devices if d.bdf in gpus] or list(plan.devices)
    placed = sum(device.cell is not None for device in devices)
    ratios = [device.local_memory_ratio for device in devices]
    known = [ratio for ratio in ratios if ratio is not None]
    remote = "none" if not devices else "unknown"
    if devices and len(known) == len(devices):
        remote = f"{100 * (1 - sum(known) / len(known)):.0f} %"
    return (
        name,
        str(plan.vcpus),
        number_list(plan.nodes) or "any",
        "flat" if len(plan.cells) == 1 else str(len(plan.cells)),
        f"{placed} of {len(devices)}" if devices else "none",
        str(len(plan.llcs)) if plan.vcpu_pins else "any",
        _BINDINGS[plan.layout.memory],
        remote,
        plan.rung,
    )
