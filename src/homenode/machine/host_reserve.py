"""HostReserve: what a host keeps for itself."""

from msgspec import Struct


class HostReserve(Struct, frozen=True):
    """What a placement leaves to the host until nothing else fits.

    cores: whole cores of the host without vCPUs, whosever. memory_bytes: of each node; None = the
    larger of 2 GiB and 2 % of the node. What QEMU needs for the VM comes on top.
    """

    cores: int = 1
    memory_bytes: int | None = None


DEFAULT_HOST_RESERVE = HostReserve()
