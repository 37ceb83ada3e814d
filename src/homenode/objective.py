"""Objective: what a VM is for."""

from enum import StrEnum


class Objective(StrEnum):
    """What the VM is for."""

    COLLECTIVE = "collective"
    HOST_BANDWIDTH = "host-bandwidth"
    LATENCY = "latency"
    DEVICE_TRANSFER = "device-transfer"
    THROUGHPUT = "throughput"
    DENSITY = "density"

    @property
    def use(self) -> str:
        """The work in a few words."""
        return _USES[self]


_USES = {
    Objective.COLLECTIVE: "work on several GPUs that exchange data",
    Objective.HOST_BANDWIDTH: "work that streams through memory",
    Objective.LATENCY: "work that waits for memory",
    Objective.DEVICE_TRANSFER: "copies between host and GPUs",
    Objective.THROUGHPUT: "work that keeps all CPUs busy",
    Objective.DENSITY: "many VMs on one host",
}
