"""PCI configuration space of a described function: the header and one PCI Express capability.

Source: PCI Local Bus 3.0, 6.1; PCI-to-PCI Bridge 1.2, 3.2; PCIe 6.0, 7.5.3.
"""

import struct

from homenode.pci import PciDevice, PciLink, PortType

_BYTES = 256
_CAPABILITY_AT = 0x40
_PCIE_CAPABILITY = 0x10
_HAS_CAPABILITIES = 0x10
_ENDPOINT, _INTEGRATED_ENDPOINT = 0x0, 0x9
_PORT_CODE = {
    PortType.ROOT_PORT: 0x4,
    PortType.SWITCH_UPSTREAM: 0x5,
    PortType.SWITCH_DOWNSTREAM: 0x6,
    PortType.PCI_BRIDGE: 0x7,
}
_SPEED_CODE = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}


def config_space(device: PciDevice) -> bytes:
    """The first 256 bytes, as root reads them from the function's `config` file."""
    space = bytearray(_BYTES)
    struct.pack_into("<HH", space, 0x00, device.vendor_id or 0, device.device_id or 0)
    struct.pack_into("<H", space, 0x06, _HAS_CAPABILITIES)
    space[0x09:0x0C] = device.class_code.to_bytes(3, "little")
    space[0x34] = _CAPABILITY_AT
    bridge = device.bridge
    if bridge is None:
        struct.pack_into(
            "<HH", space, 0x2C, device.subsystem_vendor_id or 0, device.subsystem_device_id or 0
        )
        kind = _INTEGRATED_ENDPOINT if device.parent is None else _ENDPOINT
    else:
        space[0x0E] = 1
        space[0x18:0x1B] = bytes((device.bdf.bus, bridge.secondary_bus, bridge.subordinate_bus))
        kind = _PORT_CODE[bridge.port_type]
    maximum, current = _link_words(device.link)
    struct.pack_into("<BBH", space, _CAPABILITY_AT, _PCIE_CAPABILITY, 0, kind << 4 | 2)
    struct.pack_into("<I", space, _CAPABILITY_AT + 0x0C, maximum)
    struct.pack_into("<H", space, _CAPABILITY_AT + 0x12, current)
    return bytes(space)


def _link_words(link: PciLink | None) -> tuple[int, int]:
    """Link Capabilities and Link Status."""
    if link is None:
        return 0, 0
    return (
        _word(link.max_gt_per_s, link.max_width),
        _word(link.current_gt_per_s, link.current_width),
    )


def _word(gt_per_s: float | None, width: int | None) -> int:
    """Speed in bits 0-3, width in bits 4-9; both registers agree on that."""
    return _SPEED_CODE.get(gt_per_s or 0.0, 0) | (width or 0) << 4
