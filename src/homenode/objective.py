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
