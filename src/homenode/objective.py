"""Objective: what a VM is for."""

from enum import StrEnum


class Objective(StrEnum):
    """The purpose of a VM."""

    MULTI_GPU = "multi-gpu"
    MEMORY_BANDWIDTH = "memory-bandwidth"
    LATENCY = "latency"
    GPU_COPY = "gpu-copy"
    THROUGHPUT = "throughput"
    DENSITY = "density"

    @property
    def use(self) -> str:
        """The work in a few words."""
        return _USES[self]


_USES = {
    Objective.MULTI_GPU: "work on several GPUs that exchange data",
    Objective.MEMORY_BANDWIDTH: "work that streams through memory",
    Objective.LATENCY: "work that waits for memory",
    Objective.GPU_COPY: "copies between host and GPUs",
    Objective.THROUGHPUT: "work that keeps all CPUs busy",
    Objective.DENSITY: "many VMs on one host",
}
