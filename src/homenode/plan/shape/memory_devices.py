"""Memory devices: how much of them each guest cell brings with it, beyond its own memory."""

from homenode.gap import Gap
from homenode.units import format_bytes
from homenode.vm.layout import Layout
from homenode.vm.model import MemoryDevice, Vm


def device_bytes_of_cells(guest: Vm, layout: Layout, cells: int) -> tuple[int, ...]:
    """Bytes of memory devices in each of so many cells, those that lie where their cell lies.

    A device on a cell that is no more moves to cell 0, as the rewritten document says.
    """
    owned = [0] * cells
    for device in guest.memory_devices:
        if device.lies_with_cell(layout):
            owned[device.cell if device.cell < cells else 0] += device.size_bytes
    return tuple(owned)


def device_gaps(guest: Vm, layout: Layout) -> tuple[Gap, ...]:
    """What of the memory devices lies on no node that a plan could name."""
    apart = sum(d.size_bytes for d in guest.memory_devices if not d.lies_with_cell(layout))
    if not apart:
        return ()
    return (
        Gap(
            "memory devices",
            f"{format_bytes(apart)} have a file, host nodes or pages of their own: counted on no "
            "node",
        ),
    )


def together(size_bytes: int) -> tuple[MemoryDevice, ...]:
    """One device in place of all: a plan counts them together, and leaves where each is."""
    if not size_bytes:
        return ()
    one = MemoryDevice(model="", cell=0, size_bytes=size_bytes, plugged_bytes=size_bytes)
    return (one,)
