"""Ways in: whether a domain has what a guest is reached through."""

from homenode.domain.read import open_domain
from homenode.trial.reaching import Way

_PORTS = frozenset(("pty", "unix", "tcp"))
_AGENT = "org.qemu.guest_agent.0"


def obstacle_to(document: bytes, name: str, way: Way) -> str | None:
    """What a domain lacks for being reached this way, and what to do; None where nothing."""
    devices = open_domain(document, name).root.child("devices")
    children = () if devices is None else devices.children
    if way is Way.CONSOLE:
        if not any(one.name in ("serial", "console") and one.get("type") in _PORTS
                   for one in children):  # fmt: skip
            return (
                f"{name}: expected a serial port of type pty, unix or tcp, found none; add <serial "
                "type='pty'><target port='0'/></serial>, or give another --reach"
            )
    elif way is Way.AGENT and not any(
        one.name == "channel" and (target := one.child("target")) is not None
        and target.get("name") == _AGENT for one in children
    ):  # fmt: skip
        return (
            f"{name}: expected a channel {_AGENT}, found none; add <channel type='unix'><target "
            f"type='virtio' name='{_AGENT}'/></channel>, or give another --reach"
        )
    return None
