"""PCI configuration space: the few fields that discovery takes from a function's config file."""

from dataclasses import dataclass

from homenode.pci import PortType

_PCIE_CAPABILITY = 0x10
_PORT_TYPES = {
    0x4: PortType.ROOT_PORT,
    0x5: PortType.SWITCH_UPSTREAM,
    0x6: PortType.SWITCH_DOWNSTREAM,
    0x7: PortType.PCI_BRIDGE,
    0x8: PortType.PCI_BRIDGE,  # PCI to PCIe
}


@dataclass(frozen=True, slots=True)
class ConfigHeader:
    """What a config file tells. bus numbers, port_type: of bridges only. port_type: None where
    the file has only the 64 bytes that everybody may read."""

    secondary_bus: int | None
    subordinate_bus: int | None
    port_type: PortType | None


def parse_config(config: bytes) -> ConfigHeader | None:
    """The fields of a configuration space of 64, 256 or 4096 bytes; None if it is too short.

    Source: PCI Local Bus 3.0, 6.1 and 6.7 (capabilities list); PCI-to-PCI Bridge 1.2, 3.2; PCIe
    6.0, 7.5.3.2 (Device/Port Type).
    """
    if len(config) < 64:
        return None
    is_bridge = config[0x0E] & 0x7F == 1
    return ConfigHeader(
        config[0x19] if is_bridge else None,
        config[0x1A] if is_bridge else None,
        _port_type(config) if is_bridge else None,
    )


def _port_type(config: bytes) -> PortType | None:
    has_capabilities = config[0x06] & 0x10
    offset = config[0x34] & 0xFC if has_capabilities else 0
    seen: set[int] = set()
    while offset >= 0x40 and offset + 4 <= len(config) and offset not in seen:
        seen.add(offset)
        if config[offset] == _PCIE_CAPABILITY:
            return _PORT_TYPES.get(config[offset + 2] >> 4)
        offset = config[offset + 1] & 0xFC
    # With the whole first 256 bytes read, no capability means conventional PCI.
    return PortType.PCI_BRIDGE if len(config) >= 256 else None
