"""Nova's fit of guest cells to host cells, restated from its rules for comparison with ours.

Rules, not code, of openstack/nova, numa_fit_instance_to_host in nova/virt/hardware.py: host cells
sorted (stably) by available memory, then free CPUs, then free devices; the first permutation in
which every guest cell fits, each on a host cell of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations


@dataclass(frozen=True)
class NovaCell:
    """What is free on a host cell."""

    cores: int  # whole ones, for the policies dedicated and isolate
    memory_bytes: int
    gpus: int = 0


def nova_cells(
    host: Sequence[NovaCell],
    guest_cells: int,
    *,
    cores: int,
    memory_bytes: int,
    gpus: int = 0,
    packs: bool = False,
    requires_gpus: bool = False,
) -> tuple[int, ...] | None:
    """The host cell of each guest cell; None where none fits.

    cores, memory_bytes: of each guest cell. gpus: of the VM. requires_gpus: they must be on the
    chosen cells (PCI affinity policy "required"). packs: the fullest host cells first.
    """
    order = list(range(len(host)))
    if len(host) > guest_cells:
        order.sort(key=lambda cell: host[cell].memory_bytes, reverse=not packs)
        order.sort(key=lambda cell: host[cell].cores, reverse=not packs)
        order.sort(key=lambda cell: host[cell].gpus, reverse=gpus > 0)
    for chosen in permutations(order, guest_cells):
        fits = all(host[c].cores >= cores and host[c].memory_bytes >= memory_bytes for c in chosen)
        near = sum(host[cell].gpus for cell in chosen)
        if fits and (not requires_gpus or near >= gpus):
            return chosen
    return None
