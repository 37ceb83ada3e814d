"""PCI fields: links, regions, interrupts and config space of a function, as sysfs has them."""

import re

from msgspec import Struct

from homenode.errors import ParseError
from homenode.machine.discover.readings import numbered, read_lines, read_number, read_pus
from homenode.machine.pci import PciBar, PciErrors, PciInterrupt, PortType
from homenode.machine.snapshot.protocol import Snapshot

_SPEED = re.compile(r"(\d{1,3}(?:\.\d)?) GT/s(?: PCIe)?", re.ASCII)
_REGION = re.compile(r"(0x[0-9a-f]{1,16}) (0x[0-9a-f]{1,16}) (0x[0-9a-f]{1,16})", re.ASCII)

# Bits of a resource's flags. Source: include/linux/ioport.h.
_IO, _MEMORY, _PREFETCH, _MEMORY_64 = 0x100, 0x200, 0x2000, 0x100000

_LAST_BAR = 12  # 0-5 BARs, 6 ROM, 7-12 SR-IOV; what follows are a bridge's windows
_ROM = 6


def parse_link_speed(text: str | None) -> float | None:
    """GT/s of "32.0 GT/s PCIe" or "8 GT/s"; None of "Unknown" and "Unknown speed".

    >>> parse_link_speed("32.0 GT/s PCIe"), parse_link_speed("Unknown")
    (32.0, None)
    """
    match = None if text is None else _SPEED.fullmatch(text)
    return None if match is None else float(match[1])


def read_link_width(snapshot: Snapshot, path: str) -> int | None:
    """Lanes; None where the file says 0 (no link) or 255 (old kernels: not known)."""
    width = read_number(snapshot, path)
    return None if width in (None, 0, 255) else width


def read_resource(snapshot: Snapshot, path: str, *, is_bridge: bool) -> tuple[PciBar, ...]:
    """The regions of a `resource` file, unused ones left out.

    Lines "0x<first> 0x<last> 0x<flags>", by index. Raises ParseError.
    Source: Documentation/PCI/sysfs-pci.rst.
    """
    bars: list[PciBar] = []
    for index, line in enumerate(read_lines(snapshot, path)):
        if index > (_ROM if is_bridge else _LAST_BAR):
            break
        match = _REGION.fullmatch(line.strip())
        if match is None:
            raise ParseError(
                f"{snapshot.name}: {path}",
                "first, last and flags in hexadecimal",
                line,
                line=index + 1,
            )
        first, last, flags = (int(field, 16) for field in match.groups())
        if last <= first or not flags & (_IO | _MEMORY):
            continue
        bars.append(
            PciBar(
                index=index,
                size_bytes=last - first + 1,
                is_64bit=bool(flags & _MEMORY_64),
                is_prefetchable=bool(flags & _PREFETCH),
                is_memory=bool(flags & _MEMORY),
            )
        )
    return tuple(bars)


def read_errors(snapshot: Snapshot, folder: str) -> PciErrors | None:
    """What a function has counted; None where it has no AER. Totals of the kernel are left out.

    Raises ParseError. Source: Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats.
    """
    paths = [f"{folder}/aer_dev_{name}" for name in ("correctable", "nonfatal", "fatal")]
    texts = [snapshot.read_text(path) for path in paths]
    if all(text is None for text in texts):
        return None
    return PciErrors(*(_counts(snapshot, path) for path in paths))


def _counts(snapshot: Snapshot, path: str) -> tuple[tuple[str, int], ...]:
    """The lines "RxErr 3" of what has happened at all."""
    counts: list[tuple[str, int]] = []
    for number, line in enumerate(read_lines(snapshot, path), start=1):
        name, _, count = line.strip().rpartition(" ")
        if not name or not (count.isascii() and count.isdecimal() and len(count) <= 20):
            raise ParseError(f"{snapshot.name}: {path}", "a name and a count", line, line=number)
        if int(count) and not name.startswith("TOTAL_"):
            counts.append((name, int(count)))
    return tuple(counts)


def read_interrupts(snapshot: Snapshot, folder: str) -> tuple[PciInterrupt, ...] | None:
    """The function's message-signalled interrupts, ascending; None where the source gives none.

    The PUs are those that really get it, else those that may. Raises ParseError.
    """
    numbers = numbered(snapshot.list(f"{folder}/msi_irqs"), "")
    found: list[PciInterrupt] = []
    for number in numbers:
        for name in ("effective_affinity_list", "smp_affinity_list"):
            pus = read_pus(snapshot, f"/proc/irq/{number}/{name}")
            if pus:  # empty: the interrupt is not set up
                found.append(PciInterrupt(number, pus))
                break
    return tuple(found) or None


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


class ConfigHeader(Struct, frozen=True):
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
