"""GuestAccess: how a trial talks to its guest, and how long it waits for it."""

from enum import StrEnum

from msgspec import Struct

ANSWER_S = 300.0
STOP_S = 60.0


class Transport(StrEnum):
    """How a guest is reached."""

    SSH = "ssh"
    AGENT = "agent"


class GuestAccess(Struct, frozen=True):
    """How to reach the guest. address: None = as libvirt's leases say. key: a file's path."""

    transport: Transport = Transport.SSH
    address: str | None = None
    user: str = "root"
    port: int = 22
    key: str | None = None
