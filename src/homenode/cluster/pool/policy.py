"""Policy: what a host loses by a VM. `place`, the scorers and the replays choose the least loss.

Filled with VMs of one kind, a host gives so many GPUs; the mean over the kinds of a workload, as
often as they come, is what it can still give. Free GPUs beyond what its free cores can serve, at
the workload's mean, count against it BALANCE times.
"""

from collections.abc import Iterable
from typing import Any

from msgspec import Struct

BALANCE = 2

_PARTS = 1000
"""Of a GPU, in which GPUs without cores are counted; and of a core, the workload's mean."""


class Workload(Struct, frozen=True, kw_only=True):
    """The VMs that come. number: of them. cores_per_gpu: their mean, in parts of a core."""

    number: int
    cores_per_gpu: int

    @classmethod
    def of(cls, number: int, sizes: Iterable[tuple[int, int]]) -> "Workload":
        """sizes: (GPUs, cores) of all VMs of each kind with GPUs."""
        every = list(sizes)
        gpus, cores = sum([own for own, _ in every]), sum([own for _, own in every])
        return cls(number=number, cores_per_gpu=max(1, cores * _PARTS // max(1, gpus)))

    def worth(self, filled: Any, gpus: Any, cores: Any) -> Any:
        """What hosts can still give. Whole numbers, or arrays of them.

        filled: sum of the VMs that still fit of each kind, times the GPUs of all its VMs. gpus,
        cores: what is free.
        """
        unserved = _PARTS * gpus - _PARTS * _PARTS * cores // self.cores_per_gpu
        return _PARTS * filled - BALANCE * self.number * ((unserved + abs(unserved)) // 2)
