"""Scheduler: those that take what a pool exports."""

from enum import StrEnum


class Scheduler(StrEnum):
    """Who takes it."""

    KUBERNETES = "kubernetes"
    DRA = "dra"
    NOVA = "nova"
    SLURM = "slurm"
