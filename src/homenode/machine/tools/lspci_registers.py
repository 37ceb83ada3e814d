"""lspci's registers of a function: what its configuration asks of it, by a table of their fields.

The lines of one register go on without a name: `DevCtl:` opens, and MaxPayload stands two lines
below. Source: ls-caps.c and ls-ecaps.c of pciutils 3.7 to 3.13.
"""

import re
from collections.abc import Iterable
from typing import Any

from homenode.machine.pci import LANE_ERRORS, PciRegisters

_REGISTER = re.compile(r"\t+([A-Z][A-Za-z0-9]{2,15}):", re.ASCII)
_CAPABILITY = re.compile(r"\tCapabilities: \[[0-9a-f]{2,3}(?: v\d{1,2})?\] (.{1,80})", re.ASCII)
_RESIZABLE = re.compile(
    r"\t\tBAR ([0-5]): current size: \d{1,4}[KMGTPE]?B, supported: ([0-9KMGTPEB ]{1,600})",
    re.ASCII,
)
_LANES = re.compile(r"\t\tLaneErrStat: (0|LaneErr at lane: [0-9 ]{1,80})", re.ASCII)
_SIZE = re.compile(r"(\d{1,4})([KMGTPE])B", re.ASCII)
_REGION = re.compile(
    r"\tRegion ([0-5]): (\[virtual\] )?Memory at (<unassigned>|<ignored>)?", re.ASCII
)
_WINDOW = re.compile(
    r"\t(Prefetchable m|M)emory behind bridge: [^[\n]{1,80}(\[disabled\])?", re.ASCII
)

_FIELDS = {
    "memory": ("Control Mem",),
    "bus_master": ("Control BusMaster",),
    "relaxed_ordering": ("DevCtl RlxdOrd",),
    "extended_tags": ("DevCtl ExtTag",),
    # pciutils before 3.10 prints the function's capability only.
    "ten_bit_tags": ("DevCtl2 10BitTagReq", "DevCap2 10BitTagReq"),
}
"""Fields of PciRegisters that are switches of a register, the newest form first."""

_VALUES = (
    ("max_payload_bytes", "DevCtl", re.compile(r"\bMaxPayload (\d{2,4}) bytes", re.ASCII)),
    ("max_read_request_bytes", "DevCtl", re.compile(r"\bMaxReadReq (\d{2,4}) bytes", re.ASCII)),
    ("aspm", "LnkCtl", re.compile(r"\bASPM ([A-Za-z0-9 ]{2,20});", re.ASCII)),
    ("Completion Timeout", "DevCtl2", re.compile(r"Completion Timeout: ([^,]{1,30}),")),
    ("RCB", "LnkCtl", re.compile(r"\bRCB (\d{1,3}) bytes", re.ASCII)),
    ("Transmit Margin", "LnkCtl2", re.compile(r"Transmit Margin: ([^,]{1,60}),", re.ASCII)),
    ("speeds", "LnkCap2", re.compile(r"Supported Link Speeds: ([^,]{1,40}),", re.ASCII)),
)
"""Values of a register: fields of PciRegisters, and settings by other names."""


def _keys(table: str) -> tuple[str, ...]:
    """Each switch, as "register switch", of rows of a register and its switches."""
    rows = (line.split() for line in table.splitlines())
    return tuple(f"{register} {one}" for register, *names in filter(None, rows) for one in names)


_SETTINGS = _keys("""
    Control Mem BusMaster ParErr SERR
    Status ParErr >SERR <PERR
    DevCtl CorrErr NonFatalErr FatalErr UnsupReq NoSnoop
    DevSta NonFatalErr FatalErr
    DevCtl2 TimeoutDis LTR ReqEn EgressBlck
    LnkCtl Disabled LnkDisable CommClk ExtSynch AutWidDis ClockPM
    LnkSta TrErr Train
    LnkCtl2 EnterCompliance SpeedDis
    LnkSta2 EqualizationComplete LinkEqualizationRequest
    SltSta PowerFlt MRL
    DpcSta Trigger
    BridgeCtl Parity SERR >Reset
    IOVCtl Enable MSE
    ARICtl ACS
""")
"""Switches that matter where like devices differ."""

_READ_ABOVE = {*_SETTINGS, *(key for keys in _FIELDS.values() for key in keys)}
_PASSING = {*"CESta UESta RootSta Changed HeaderLog ACSCtl ATSCtl".split()} | {
    *_keys("""
        Control DisINTx
        Status INTx <MAbort
        DevSta CorrErr UnsupReq AuxPwr TransPend
        LnkSta BWMgmt ABWMgmt
        LnkSta2 Retimer 2Retimers
        SltSta CmdCplt
        DpcSta RPBusy
    """)
}
"""Registers and switches that differ of sound devices as they are used, by the way to the slot, or
that others read."""

_POWER = re.compile(r"\t\tStatus: (D[0-3][a-z]{0,4}) ", re.ASCII)
_MSI = re.compile(r"(MSI(?:-X)?): Enable([+-])", re.ASCII)
_SWITCH = re.compile(r"([<>]?\w{2,30})([+-])", re.ASCII)


def parse_registers(lines: Iterable[str], revision: str = "00") -> PciRegisters | None:
    """Of the indented lines of a function; None where they show no register, as without root."""
    texts: dict[str, str] = {}
    register, capability = "", ""
    unplaced: list[int] = []
    resizable: list[tuple[int, int]] = []
    settings: list[tuple[str, str]] = [("revision", revision)]
    others: list[tuple[str, str]] = []
    for line in lines:
        if (power := _POWER.match(line)) is not None:
            settings.append(("power state", power[1]))
        if (opened := _CAPABILITY.match(line)) is not None:
            register, capability = "", opened[1]
            name = "Device Serial Number" if "Serial" in capability else capability
            name = re.split(r"[:,(]", name)[0].strip()
            others.append((f"{name} capability", capability if "MSI" in name else "there"))
            if (interrupts := _MSI.match(capability)) is not None:
                settings.append((f"{interrupts[1]} Enable", interrupts[2]))
        elif (lanes := _LANES.match(line)) is not None:
            settings.append((LANE_ERRORS, lanes[1].strip()))
        elif (named := _REGISTER.match(line)) is not None:
            register = named[1]
            if register in texts:
                register = ""  # of a second capability: the first one counts
        elif (region := _REGION.match(line)) is not None:
            unplaced += [int(region[1])] if region[3] else []
            settings.append((f"BAR {region[1]} register", "empty" if region[2] else "written"))
        elif (window := _WINDOW.match(line)) is not None:
            others.append((f"{window[1]}emory window", "closed" if window[2] else "open"))
        elif (bar := _RESIZABLE.match(line)) is not None and "Virtual" not in capability:
            resizable += [(int(bar[1]), most) for most in _largest(bar[2])]
        elif not line.startswith("\t\t"):
            register = ""
        if register:
            texts[register] = texts.get(register, "") + " " + line.strip()
    switches = {name: dict(_SWITCH.findall(text)) for name, text in texts.items()}
    stated = {
        f"{at} {one}": value for at, found in switches.items() for one, value in found.items()
    }
    fields: dict[str, Any] = {}
    for name, keys in _FIELDS.items():
        if known := [stated[key] == "+" for key in keys if key in stated]:
            fields[name] = known[0]
    for name, at, pattern in _VALUES:
        if (match := pattern.search(texts.get(at, ""))) is None:
            continue
        if name in PciRegisters.__struct_fields__:
            fields[name] = int(match[1]) if name.endswith("_bytes") else match[1]
        else:
            settings.append((f"{at} {name}", match[1]))
    if "UESta" in texts:
        fields["uncorrected"] = tuple(n for n, value in switches["UESta"].items() if value == "+")
    if not fields:
        return None
    settings += [(key, stated[key]) for key in _SETTINGS if key in stated]
    for at in switches.keys() - _PASSING:
        on = {f"{at} {one}": one for one, value in switches[at].items() if value == "+"}
        left = [one for key, one in on.items() if key not in _PASSING | _READ_ABOVE]
        others.append((at, " ".join(left) or "none"))
    return PciRegisters(
        **fields,
        settings=tuple(dict(settings).items()),
        others=tuple(sorted(others)),
        unplaced_bars=tuple(unplaced),
        largest_bars=tuple(sorted(resizable)),
    )


def _largest(sizes: str) -> list[int]:
    """The largest of "64MB 128MB 256MB", in bytes."""
    found = [
        int(number) << 10 * (1 + "KMGTPE".index(unit)) for number, unit in _SIZE.findall(sizes)
    ]
    return [max(found)] if found else []
