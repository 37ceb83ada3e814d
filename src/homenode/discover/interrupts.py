"""Interrupts: on which PUs the kernel handles each interrupt of a PCI function.

Source: Documentation/ABI/testing/sysfs-bus-pci (msi_irqs), Documentation/core-api/irq/irq-affinity.
"""

from homenode.discover.readings import numbered, read_pus
from homenode.pci import PciInterrupt
from homenode.snapshot.protocol import Snapshot


def read_interrupts(snapshot: Snapshot, folder: str) -> tuple[PciInterrupt, ...] | None:
    """The function's message-signalled interrupts, ascending; None where the source gives none.

    The PUs are those that really get it, else those that may. Raises ParseError.
    """
    numbers = numbered(snapshot.list(f"{folder}/msi_irqs"), "")
    found: list[PciInterrupt] = []
    for number in numbers:
        for name in ("effective_affinity_list", "smp_affinity_list"):
            pus = read_pus(snapshot, f"/proc/irq/{number}/{name}")
            if pus:  # empty: the interrupt is not set up
                found.append(PciInterrupt(number, pus))
                break
    return tuple(found) or None
