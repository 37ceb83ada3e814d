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
