"""Device kinds: what a PCI function is, by its class code and ids; port types by structure.

Source: PCI Code and ID Assignment Specification 1.16; pci.ids for the exceptions.
"""

from collections.abc import Iterable, Mapping

from homenode.bdf import Bdf
from homenode.machine.pci import DeviceKind, PortType

NVIDIA = 0x10DE
AMD = 0x1002
INTEL = 0x8086

PCI_BRIDGE_CLASS = 0x0604

_GPU_VENDORS = {NVIDIA, AMD, INTEL}
_GPU_CLASSES = {
    0x0300,  # VGA: also what management controllers and emulated adapters say they are
    0x0302,  # 3D controller: most data-centre GPUs
    0x0380,  # other display: MI210 and MI250X
    0x1200,  # processing accelerator: MI300X, MI350X
}
# AMD's vendor id on graphics that servers carried for their console only.
_CONSOLE_GRAPHICS = {
    (AMD, 0x4752),  # Rage XL
    (AMD, 0x515E),  # ES1000
}
_NIC_CLASSES = {
    0x0200,  # Ethernet, and Slingshot
    0x0207,  # InfiniBand
    0x0208,  # host fabric: Omni-Path
    0x0C06,  # InfiniBand adapters before the class 0x0207
}


def device_kind(class_code: int, vendor_id: int | None, device_id: int | None) -> DeviceKind:
    """The kind of a function; class_code has 24 bits.

    >>> device_kind(0x030200, 0x10DE, 0x2330), device_kind(0x030000, 0x1A03, 0x2000)
    (<DeviceKind.GPU: 'gpu'>, <DeviceKind.OTHER: 'other'>)
    """
    kind = class_code >> 8
    if kind in _GPU_CLASSES and vendor_id in _GPU_VENDORS:
        is_console = (vendor_id, device_id) in _CONSOLE_GRAPHICS
        return DeviceKind.OTHER if is_console else DeviceKind.GPU
    if kind in _NIC_CLASSES:
        return DeviceKind.NIC
    if kind == 0x0680:  # "other bridge": NVSwitches say so, and DMA engines of switches too
        return DeviceKind.NVSWITCH if vendor_id == NVIDIA else DeviceKind.OTHER
    if kind == 0x0108:
        return DeviceKind.NVME
    if kind in (0x0401, 0x0403):
        return DeviceKind.AUDIO
    return DeviceKind.BRIDGE if kind >> 8 == 0x06 else DeviceKind.OTHER


def port_types_by_structure(
    bridges: Mapping[Bdf, int], parent_of: Mapping[Bdf, Bdf | None]
) -> dict[Bdf, PortType]:
    """Port types of PCI bridges from their place in the tree, where nothing better is known.

    bridges: class code of each bridge. parent_of: bridge above each function, all functions.
    PCIe alternates: root port, then a switch's upstream port, its downstream ports, perhaps the
    upstream port of another switch. An upstream port has bridges below it and nothing else; a
    bridge in its place that has not leads to a PCI bus, as that of an AST2600 does.
    """
    children: dict[Bdf, list[Bdf]] = {}
    for bdf, parent in parent_of.items():
        if parent is not None:
            children.setdefault(parent, []).append(bdf)
    types: dict[Bdf, PortType] = {}
    level: Iterable[Bdf] = [bdf for bdf in bridges if parent_of.get(bdf) is None]
    expected = PortType.ROOT_PORT
    while level:
        below: list[Bdf] = []
        for bdf in level:
            under = children.get(bdf, [])
            is_upstream = bool(under) and all(child in bridges for child in under)
            is_subtractive = bridges[bdf] & 0xFF == 0x01
            if is_subtractive or (expected is PortType.SWITCH_UPSTREAM and not is_upstream):
                types[bdf] = PortType.PCI_BRIDGE
            else:
                types[bdf] = expected
                below += [child for child in under if child in bridges and child not in types]
        level = below
        expected = (
            PortType.SWITCH_DOWNSTREAM
            if expected is PortType.SWITCH_UPSTREAM
            else PortType.SWITCH_UPSTREAM
        )
    return {bdf: types.get(bdf, PortType.PCI_BRIDGE) for bdf in bridges}
