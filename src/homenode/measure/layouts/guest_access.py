"""GuestAccess: how a trial talks to its guest, and how long it waits for it."""

from dataclasses import dataclass
from enum import StrEnum

from homenode.domain.read import open_domain

ANSWER_S = 300.0
STOP_S = 60.0

_PORTS = frozenset(("pty", "unix", "tcp"))
_AGENT = "org.qemu.guest_agent.0"


class Transport(StrEnum):
    """How a guest is reached."""

    SSH = "ssh"
    AGENT = "agent"
    CONSOLE = "console"


@dataclass(frozen=True, slots=True)
class GuestAccess:
    """How to reach the guest. address: None = as libvirt's leases say. key: a file's path."""

    transport: Transport = Transport.SSH
    address: str | None = None
    user: str = "root"
    port: int = 22
    key: str | None = None


def obstacle_to(document: bytes, name: str, transport: Transport) -> str | None:
    """What a domain lacks for being reached so, and what to do; None where nothing."""
    devices = open_domain(document, name).root.child("devices")
    children = () if devices is None else devices.children
    if transport is Transport.CONSOLE:
        if not any(one.name in ("serial", "console") and one.get("type") in _PORTS
                   for one in children):  # fmt: skip
            return (
                f"{name}: expected a serial port of type pty, unix or tcp, found none; add <serial "
                "type='pty'><target port='0'/></serial>, or give another --reach"
            )
    elif transport is Transport.AGENT and not any(
        one.name == "channel" and (target := one.child("target")) is not None
        and target.get("name") == _AGENT for one in children
    ):  # fmt: skip
        return (
            f"{name}: expected a channel {_AGENT}, found none; add <channel type='unix'><target "
            f"type='virtio' name='{_AGENT}'/></channel>, or give another --reach"
        )
    return None
