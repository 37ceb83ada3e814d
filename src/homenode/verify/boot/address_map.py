"""AddressMap: where a test guest's firmware must find space for BARs like those of the real
devices.

"GPUs vanish with much memory" is a matter of addresses: memory, the 64-bit PCI window behind it and
the CPU's address bits. None of it needs real memory: QEMU's pci-testdev has a BAR of any size
without backing, and maxmem= moves the window behind memory that is not there. Where all of it is
more than the 40 bits of TCG's CPUs, every size is divided by the same power of two.
"""

from dataclasses import dataclass

from homenode.bdf import Bdf
from homenode.domain.aperture import read_hole, read_window_mib
from homenode.domain.document import Document
from homenode.plan.shape.aperture import DEFAULT_WINDOW_BYTES, prefetchable_window_bytes
from homenode.topology import Host
from homenode.units import GIB, MIB
from homenode.vm.model import Vm

TCG_ADDRESS_BITS = 40
_LEAST_BAR_BYTES = 64 * MIB
"""Smaller ones find room everywhere."""

_LOW_BYTES = 4 * GIB


@dataclass(frozen=True, slots=True)
class AddressMap:
    """bars: (function of the host, bytes) of each large BAR. memory_bytes: where memory ends.

    hole_bytes, window_mib: of the root bus and of OVMF; None = its own default. shift: by how many
    bits all of it is smaller than in the document.
    """

    bars: tuple[tuple[Bdf, int], ...]
    memory_bytes: int
    hole_bytes: int | None
    window_mib: int | None
    shift: int


def address_map(document: Document, guest: Vm, host: Host) -> AddressMap | None:
    """The map of a guest's devices; None where none of them has a large BAR that is known."""
    passed = [
        device for hostdev in guest.hostdevs if (device := host.device(hostdev.bdf)) is not None
    ]
    sizes = {
        device.bdf: max(
            (
                bar.size_bytes
                for bar in device.bars
                if bar.is_memory and bar.is_64bit and bar.is_prefetchable
            ),
            default=0,
        )
        for device in passed
    }
    bars = {bdf: size for bdf, size in sizes.items() if size >= _LEAST_BAR_BYTES}
    if not bars:
        return None
    memory = max(guest.memory_bytes + guest.memory_device_bytes, guest.max_memory_bytes or 0)
    hole, window = read_hole(document), read_window_mib(document)
    space = max(prefetchable_window_bytes(passed), hole or 0, (window or 0) * MIB)
    # The firmware puts the window at a multiple of its size.
    needed = (-(-(memory + _LOW_BYTES) // space) + 1) * space
    shift = max(0, (needed - 1).bit_length() - TCG_ADDRESS_BITS)
    if shift:
        hole = hole or DEFAULT_WINDOW_BYTES
        window = window or DEFAULT_WINDOW_BYTES // MIB
    return AddressMap(
        tuple(sorted((bdf, _power_of_two(size >> shift)) for bdf, size in bars.items())),
        memory >> shift,
        None if hole is None else hole >> shift,
        None if window is None else max(1, window >> shift),
        shift,
    )


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
