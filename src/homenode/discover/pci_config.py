"""PCI configuration space: the few fields that discovery takes from a function's config file."""

from dataclasses import dataclass

from homenode.pci import PortType

_PCIE_CAPABILITY = 0x10
_LINK_CONTROL_2 = 0x30
_SPEED_OF_CODE = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}
_PORT_TYPES = {
    0x4: PortType.ROOT_PORT,
    0x5: PortType.SWITCH_UPSTREAM,
    0x6: PortType.SWITCH_DOWNSTREAM,
    0x7: PortType.PCI_BRIDGE,
    0x8: PortType.PCI_BRIDGE,  # PCI to PCIe
}


@dataclass(frozen=True, slots=True)
class ConfigHeader:
    """What a config file gives. class_code: 24 bits, None where nothing answers. bus numbers,
    port_type: of bridges only. port_type: None where the file has only the 64 bytes that everybody
    may read. target_gt_per_s: of Link Control 2."""

    class_code: int | None
    secondary_bus: int | None = None
    subordinate_bus: int | None = None
    port_type: PortType | None = None
    target_gt_per_s: float | None = None


def parse_config(config: bytes) -> ConfigHeader | None:
    """The fields of a configuration space of 64, 256 or 4096 bytes; None if it is too short.

    Source: PCI Local Bus 3.0, 6.1 and 6.7 (capabilities list); PCI-to-PCI Bridge 1.2, 3.2; PCIe
    6.0, 7.5.3.2 (Device/Port Type), 7.5.3.19 (Link Control 2).
    """
    if len(config) < 64:
        return None
    code = int.from_bytes(config[0x09:0x0C], "little")
    class_code = None if code == 0xFFFFFF else code
    is_bridge = config[0x0E] & 0x7F == 1
    if not is_bridge:
        return ConfigHeader(class_code)
    express = _express(config)
    if express is None:
        # With the whole first 256 bytes read, no capability means conventional PCI.
        port_type = PortType.PCI_BRIDGE if len(config) >= 256 else None
        return ConfigHeader(class_code, config[0x19], config[0x1A], port_type)
    return ConfigHeader(
        class_code,
        config[0x19],
        config[0x1A],
        _PORT_TYPES.get(config[express + 2] >> 4),
        _target_speed(config, express),
    )


def _express(config: bytes) -> int | None:
    """Where the PCI Express capability lies; None without one, or where it cannot be seen."""
    has_capabilities = config[0x06] & 0x10
    offset = config[0x34] & 0xFC if has_capabilities else 0
    seen: set[int] = set()
    while offset >= 0x40 and offset + 4 <= len(config) and offset not in seen:
        seen.add(offset)
        if config[offset] == _PCIE_CAPABILITY:
            return offset
        offset = config[offset + 1] & 0xFC
    return None


def _target_speed(config: bytes, express: int) -> float | None:
    """GT/s; None of capabilities of version 1, which have no such register."""
    at = express + _LINK_CONTROL_2
    if config[express + 2] & 0xF < 2 or at >= len(config):
        return None
    return _SPEED_OF_CODE.get(config[at] & 0xF)
