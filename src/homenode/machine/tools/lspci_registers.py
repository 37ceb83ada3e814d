"""lspci's registers of a function: what its configuration asks of it, by a table of their fields.

The lines of one register go on without a name: `DevCtl:` opens, and MaxPayload stands two lines
below. Source: ls-caps.c and ls-ecaps.c of pciutils 3.7 to 3.13.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from msgspec import Struct

from homenode.machine.pci import LANE_ERRORS, PciRegisters

_REGISTER = re.compile(r"\t+([A-Z][A-Za-z0-9]{2,15}):", re.ASCII)
_CAPABILITY = re.compile(r"\tCapabilities: \[[0-9a-f]{2,3}(?: v\d{1,2})?\] (.{1,80})", re.ASCII)
_RESIZABLE = re.compile(
    r"\t\tBAR ([0-5]): current size: \d{1,4}[KMGTPE]?B, supported: ([0-9KMGTPEB ]{1,600})",
    re.ASCII,
)
_LANES = re.compile(r"\t\tLaneErrStat: (0|LaneErr at lane: [0-9 ]{1,80})", re.ASCII)
_SIZE = re.compile(r"(\d{1,4})([KMGTPE])B", re.ASCII)
_REGION = re.compile(r"\tRegion ([0-5]): Memory at <(?:unassigned|ignored)>", re.ASCII)
_SET = re.compile(r"\b(\w{2,20})\+", re.ASCII)


def _flag(found: str) -> bool:
    return found == "+"


class RegisterField(Struct, frozen=True):
    """A field of PciRegisters: the registers that have it, the newest form first; the pattern of
    its value, and what that means."""

    name: str
    registers: tuple[str, ...]
    pattern: re.Pattern[str]
    read: Callable[[str], Any]


def _row(
    name: str, registers: str, pattern: re.Pattern[str], read: Callable[[str], Any] = _flag
) -> RegisterField:
    return RegisterField(name, tuple(registers.split()), pattern, read)


FIELDS = (
    _row("memory", "Control", re.compile(r"\bMem([+-])", re.ASCII)),
    _row("bus_master", "Control", re.compile(r"\bBusMaster([+-])", re.ASCII)),
    _row("max_payload_bytes", "DevCtl", re.compile(r"\bMaxPayload (\d{2,4}) bytes", re.ASCII), int),
    _row(
        "max_read_request_bytes",
        "DevCtl",
        re.compile(r"\bMaxReadReq (\d{2,4}) bytes", re.ASCII),
        int,
    ),
    _row("relaxed_ordering", "DevCtl", re.compile(r"\bRlxdOrd([+-])", re.ASCII)),
    _row("extended_tags", "DevCtl", re.compile(r"\bExtTag([+-])", re.ASCII)),
    # pciutils before 3.10 prints the function's capability only.
    _row("ten_bit_tags", "DevCtl2 DevCap2", re.compile(r"\b10BitTagReq([+-])", re.ASCII)),
    _row("aspm", "LnkCtl", re.compile(r"\bASPM ([A-Za-z0-9 ]{2,20});", re.ASCII), str),
)


_SETTINGS: tuple[tuple[str, str], ...] = (
    ("Control", "Mem BusMaster ParErr SERR"),
    ("Status", "ParErr >SERR <PERR"),
    ("DevCtl", "CorrErr NonFatalErr FatalErr UnsupReq NoSnoop"),
    ("DevSta", "NonFatalErr FatalErr"),
    ("DevCtl2", "TimeoutDis LTR ReqEn EgressBlck"),
    ("LnkCtl", "Disabled CommClk ExtSynch AutWidDis ClockPM"),
    ("LnkSta", "TrErr Train"),
    ("LnkCtl2", "EnterCompliance SpeedDis"),
    ("LnkSta2", "EqualizationComplete LinkEqualizationRequest"),
    ("SltSta", "PowerFlt MRL"),
    ("DpcSta", "Trigger"),
    ("BridgeCtl", "Parity SERR >Reset"),
    ("IOVCtl", "Enable MSE"),
    ("ARICtl", "ACS"),
)
"""Switches of a register that are compared with those of like devices."""

_WHOLE = ("UEMsk", "UESvrt", "CEMsk")
_WORDS = (
    ("DevCtl2", "Completion Timeout", re.compile(r"Completion Timeout: ([^,]{1,30}),")),
    ("LnkCtl", "RCB", re.compile(r"\bRCB (\d{1,3}) bytes", re.ASCII)),
    ("LnkCtl2", "Transmit Margin", re.compile(r"Transmit Margin: ([A-Za-z0-9 ]{1,40}),", re.ASCII)),
)
_POWER = re.compile(r"\t\tStatus: (D[0-3][a-z]{0,4}) ", re.ASCII)
_MSI = re.compile(r"(MSI(?:-X)?): Enable([+-])", re.ASCII)
_SWITCH = re.compile(r"([<>]?\w{2,30})([+-])", re.ASCII)


def _settings(texts: dict[str, str]) -> Iterator[tuple[str, str]]:
    for name, wanted in _SETTINGS:
        found = dict(_SWITCH.findall(texts.get(name, "")))
        yield from ((f"{name} {one}", found[one]) for one in wanted.split() if one in found)
    for name in _WHOLE:
        if name in texts:
            yield name, " ".join(_SET.findall(texts[name])) or "none"
    for name, label, pattern in _WORDS:
        if (match := pattern.search(texts.get(name, ""))) is not None:
            yield f"{name} {label}", match[1]


def parse_registers(lines: Iterable[str], revision: str = "00") -> PciRegisters | None:
    """Of the indented lines of a function; None where they show no register, as without root."""
    texts: dict[str, str] = {}
    register, capability = "", ""
    unplaced: list[int] = []
    resizable: list[tuple[int, int]] = []
    settings: list[tuple[str, str]] = [("revision", revision)]
    for line in lines:
        if (power := _POWER.match(line)) is not None:
            settings.append(("power state", power[1]))
        if (opened := _CAPABILITY.match(line)) is not None:
            register, capability = "", opened[1]
            if (interrupts := _MSI.match(capability)) is not None:
                settings.append((f"{interrupts[1]} Enable", interrupts[2]))
        elif (lanes := _LANES.match(line)) is not None:
            settings.append((LANE_ERRORS, lanes[1].strip()))
        elif (named := _REGISTER.match(line)) is not None:
            register = named[1]
            if register in texts:
                register = ""  # of a second capability: the first one counts
        elif (region := _REGION.match(line)) is not None:
            unplaced.append(int(region[1]))
        elif (bar := _RESIZABLE.match(line)) is not None and "Virtual" not in capability:
            resizable += [(int(bar[1]), most) for most in _largest(bar[2])]
        if register:
            texts[register] = texts.get(register, "") + " " + line.strip()
    fields: dict[str, Any] = {}
    for row in FIELDS:
        for name in row.registers:
            found = row.pattern.search(texts.get(name, ""))
            if found is not None:
                fields[row.name] = row.read(found[1])
                break
    if "UESta" in texts:
        fields["uncorrected"] = tuple(_SET.findall(texts["UESta"]))
    if not fields:
        return None
    return PciRegisters(
        **fields,
        settings=tuple(dict([*settings, *_settings(texts)]).items()),
        unplaced_bars=tuple(unplaced),
        largest_bars=tuple(sorted(resizable)),
    )


def _largest(sizes: str) -> list[int]:
    """The largest of "64MB 128MB 256MB", in bytes."""
    found = [
        int(number) << 10 * (1 + "KMGTPE".index(unit)) for number, unit in _SIZE.findall(sizes)
    ]
    return [max(found)] if found else []
