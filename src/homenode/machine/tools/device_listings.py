"""Device listings: what a tool says of each device, below a line that names it, or as JSON by its
name or address.

Commands: ethtool and its --show-* for "*" (5.9 to 6.15), nvme smart-log (1.16 to 2.11), devlink -j
dev info, dev param show, health show and bridge -j vlan show (iproute2 5.15 to 6.15).
Source: their sources; netlink/netlink.c of ethtool for "*".
"""

import re
from collections.abc import Mapping

from homenode.machine.tools.lines import first_json, leaves

_HEAD = re.compile(
    r"(Settings|Features|Private flags|[A-Z]\w{1,20} parameters|Smart Log) for "
    r"(?:NVME device:)?([A-Za-z0-9_.@-]{1,40})(?::| namespace-id:\S{1,20})",
    re.ASCII,
)
_NAME = re.compile(r"[A-Za-z0-9#].{0,80}", re.ASCII)
_TWO_ON_A_LINE = re.compile(r"(?<!\s)\s{2,}(?=[A-Z]\w{1,20}: )")
_MOST_VALUE = 400

Stated = dict[str, dict[str, str]]
"""By a device's name or address, texts by what they are of."""


def parse_listing(text: str, source: str) -> Stated:
    """Blocks of "name: value" below heads; lines without a name go on with the value above. A name
    without a value heads a part of its block. Other lines are skipped."""
    found: Stated = {}
    values: dict[str, str] = {}
    kind = part = last = ""
    for line in text.splitlines():
        head = _HEAD.fullmatch(line.strip())
        if head is not None:
            kind, part, last = head[1].removesuffix(" parameters").lower(), "", ""
            values = found.setdefault(head[2], {})
            continue
        for piece in _TWO_ON_A_LINE.split(line):
            name, colon, value = map(str.strip, piece.partition(":"))
            if not colon or len(value) > _MOST_VALUE or not _NAME.fullmatch(name):
                if last and piece.strip():
                    values[last] = f"{values[last]} {piece.strip()}"[:_MOST_VALUE]
            elif value:
                last = f"{source}/{kind}/{part}{name}"
                values[last] = value
            else:
                part, last = f"{name}/", ""
    return found


def parse_by_address(text: str, source: str) -> Stated:
    """devlink's JSON: {"info": {"pci/0000:3b:00.0": ...}}. Raises ParseError."""
    found: Stated = {}
    for kind, of_devices in _mapping(first_json(text, source)).items():
        for handle, value in _mapping(of_devices).items():
            bus, _, address = handle.partition("/")
            if bus == "pci":
                states = found.setdefault(address.partition("/")[0], {})
                states.update(leaves(f"{source}/{kind}", value))
    return found


def parse_vlans(text: str, source: str) -> Stated:
    """Of each port of a bridge its VLANs with their flags. Raises ParseError."""
    rows = first_json(text, source)
    ports = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return {str(row.get("ifname")): dict(leaves(source, row.get("vlans"))) for row in ports}


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}
