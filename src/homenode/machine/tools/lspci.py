"""lspci: the PCI functions of a host, from pciutils' listing for people.

COMMAND is what a capture runs; `lspci -vvv` and -n, -nn, -D or -xxx in any combination are read as
well. Without root, capabilities are "<access denied>", and links and port types are unknown.

People send listings as they copied them: below the prompt and the command, between the fences of
Markdown, quoted, indented, with a byte order mark, without the last line end.

Seen: pciutils 3.7 and 3.9. Source: lspci(8) and ls-caps.c of pciutils; names: pci.ids.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from msgspec import Struct, toml

from homenode.bdf import Bdf
from homenode.errors import ParseError
from homenode.machine.pci import PciBar, PciLink, PciRegisters, PortType
from homenode.package_data import read_package_text
from homenode.units import KIB, parse_whole

COMMAND = ("lspci", "-D", "-nn", "-vvv")

MAX_CHARACTERS = 16 << 20
MAX_LINES = 400_000
MAX_FUNCTIONS = 10_000
"""Limit of functions in a listing. A function is 30 to 60 lines, and 256 more with -xxxx."""

_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"

_HEADER = re.compile(
    r"((?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) ([^:\n]{1,100}?)"
    r"(?: \[([0-9a-f]{4})\])?: (.*)",
    re.ASCII,
)
_CODE = re.compile(r"[0-9a-f]{4}", re.ASCII)
_REVISION = re.compile(
    r" \(rev ([0-9a-f]{2})\)| \(prog-if ([0-9a-f]{2})(?: \[[^\]]*\])?\)", re.ASCII
)
_IDS = re.compile(r"(?:^| \[)([0-9a-f]{4}):([0-9a-f]{4})(?:\]|$)", re.ASCII)
_UNNAMED_DEVICE = re.compile(r"\bDevice ([0-9a-f]{4})$", re.ASCII)
_EXPRESS = re.compile(
    r"\[[0-9a-f]{2}\] Express \(v\d\) ([A-Za-z/ -]+?)(?: \(Slot[+-]\))?,", re.ASCII
)
_SPEED = re.compile(r"Speed (\d{1,3}(?:\.\d)?)GT/s", re.ASCII)
_WIDTH = re.compile(r"Width x(\d{1,2})", re.ASCII)
_BUSES = re.compile(r"primary=([0-9a-f]{2}), secondary=([0-9a-f]{2}), subordinate=([0-9a-f]{2})")
_WINDOW = re.compile(r"([0-9a-f]{8,16})-([0-9a-f]{8,16})(?! *\[(?:disabled|empty))", re.ASCII)
_SIZE = re.compile(r"\[size=(\d{1,4})([KMGTP]?)\]", re.ASCII)
_VFS = re.compile(r"Total VFs: (\d{1,5}), Number of VFs: (\d{1,5})", re.ASCII)
_ENABLED = re.compile(r"\b(\w+)\+", re.ASCII)
_SIGNED = re.compile(r"-?\d{1,5}", re.ASCII)
_WINDOWS = ("Memory behind bridge", "Prefetchable memory behind bridge")
_ONES_ONLY = "!!! Unknown header type 7f"
"""Of a silent device, as is "(rev ff)". Source: show_verbose in lspci.c of
pciutils."""
_TOOL_NOISE = ("lspci:", "pcilib:")
_FENCES = ("```", "~~~")
_TERMINAL_CODE = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]")
_DUMPED_BYTES = re.compile(r"[0-9a-f]{2,3}:(?: [0-9a-f]{2}){1,16}", re.ASCII)  # of -x to -xxxx
_PROMPT = re.compile(r"[^\t#$%>\u276f]{0,200}[#$%>\u276f](?: .*)?")
_LIKE_AN_ADDRESS = re.compile(r"[0-9a-fA-F]{2,8}:[0-9a-fA-F]{2}")
_ADDRESS = re.compile(r"(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.")
_QUOTED = re.compile(r"(?:[>|] ?|[ \t]){1,16}")
_HEAD_CHARACTERS = 20_000
"""The first function must begin within these: a login banner and a prompt may precede it."""

_PORT_TYPES = {
    "Root Port": PortType.ROOT_PORT,
    "Upstream Port": PortType.SWITCH_UPSTREAM,
    "Downstream Port": PortType.SWITCH_DOWNSTREAM,
    "PCI-Express to PCI/PCI-X Bridge": PortType.PCI_BRIDGE,
    "PCI/PCI-X to PCI-Express Bridge": PortType.PCI_BRIDGE,
}
_BYTES_OF_UNIT = {"": 1, "K": KIB, "M": KIB**2, "G": KIB**3, "T": KIB**4, "P": KIB**5}
_ROM_INDEX = 6


class LspciFunction(Struct, frozen=True):
    """A function. None: not printed, or printed by a name that is in no table below."""

    bdf: Bdf
    class_name: str
    class_code: int | None  # 24 bits
    name: str  # vendor and device in words
    vendor_id: int | None
    device_id: int | None
    subsystem_vendor_id: int | None = None
    subsystem_device_id: int | None = None
    numa_node: int | None = None
    link: PciLink | None = None
    target_gt_per_s: float | None = None  # LnkCtl2, the speed that the port is set to train to
    port_type: PortType | None = None  # set for bridges with an Express capability
    buses: tuple[int, int, int] | None = None  # (primary, secondary, subordinate)
    has_window: bool = False  # the bridge passes memory of functions below it
    driver: str | None = None
    iommu_group: int | None = None
    sriov_total_vfs: int | None = None
    sriov_num_vfs: int | None = None
    acs: frozenset[str] | None = None  # flags of ACSCtl that are on
    ats_enabled: bool | None = None
    bars: tuple[PciBar, ...] = ()  # with sizes only; regions of SR-IOV have no size in the listing
    is_silent: bool = False  # its configuration space reads as ones only, as if nothing answers
    registers: PciRegisters | None = None  # values of Control, DevCtl and others


_UNINDENTED = re.compile(
    r"(?:(?:Lnk|Dev)(?:Cap|Sta|Ctl)2?|Subsystem|Control|Status|Region \d|Capabilities|NUMA node"
    r"|IOMMU group|Kernel driver in use|Kernel modules|Physical Slot|Interrupt|Latency):? ?",
    re.ASCII,
)
"""Beginning of a detail that a forum has moved to column 0."""


def looks_like_lspci(text: str) -> bool:
    """Return whether the header of a function is near the beginning."""
    lines = _clean_lines(text[:_HEAD_CHARACTERS])
    return any(_HEADER.fullmatch(line.rstrip()) for line in lines)


def ends_within_a_line(text: str) -> bool:
    """Return whether a listing was cut: lspci ends every line.

    A missing last line end alone, as after an edit or a copy, is not a cut: the line then closes
    its bracket, or equals other lines of the listing; and in a listing with details its entry ends
    like another.
    """
    if text.endswith("\n"):
        return False
    *whole_lines, last = _clean_lines(text) or [""]
    if _is_foreign(last):
        return False
    is_header = _HEADER.fullmatch(last.rstrip()) is not None
    has_details = any(line[:1] in (" ", "\t") for line in whole_lines)
    if is_header and has_details:
        return True
    if not is_header and _address_key(last) not in {
        "Kernel modules",
        *_find_last_keys(whole_lines),
    }:
        return True
    if _address_key(last) == "Kernel modules" or last.endswith((")", "]") if is_header else ">"):
        return False  # module names are not read
    last_content = _strip_address(last)
    contents = {_strip_address(line) for line in whole_lines}
    return last_content not in contents or any(
        content.startswith(last_content) and content != last_content for content in contents
    )


def _strip_address(line: str) -> str:
    return line.partition(" ")[2] if _HEADER.fullmatch(line.rstrip()) else line.strip()


def _address_key(line: str) -> str:
    return line.strip().partition(":")[0]


def _find_last_keys(lines: Sequence[str]) -> set[str]:
    """Return the keys of the lines with which the entries of a listing end."""
    details = [line for line in lines if line.strip() and not _is_foreign(line)]
    return {
        _address_key(line)
        for line, after in pairwise(details)
        if line[:1] in (" ", "\t") and after[:1] not in (" ", "\t")
    }


def _clean_lines(text: str) -> list[str]:
    """Return the lines without common quotation, indentation and terminal codes; indented by tabs,
    as in lspci, even if a copy has spaces."""
    lines = _TERMINAL_CODE.sub("", text.removeprefix("\ufeff")).splitlines()
    for line in lines:
        quote = _QUOTED.match(line)
        before = "" if quote is None else quote[0]
        if _HEADER.fullmatch(line[len(before) :].rstrip()):
            bare = before.rstrip()
            lines = [
                line.removeprefix(before) if line.startswith(before) else line.removeprefix(bare)
                for line in lines
            ]
            break
    lines = _cut_fences(lines)
    widths = [len(line) - len(line.lstrip(" ")) for line in lines if line[:1] == " "]
    if not widths or any(line[:1] == "\t" for line in lines):
        return lines
    width = min(widths)
    return [
        "\t" * ((len(line) - len(line.lstrip(" "))) // width) + line.lstrip(" ") for line in lines
    ]


def _cut_fences(lines: list[str]) -> list[str]:
    """Return the lines between the fences around the first function; all lines without."""
    fence_line: int | None = None
    begun = False
    for at, line in enumerate(lines):
        begun = begun or _HEADER.fullmatch(line.rstrip()) is not None
        if line.startswith(_FENCES) and begun:
            return lines if fence_line is None else lines[fence_line + 1 : at]
        if line.startswith(_FENCES):
            fence_line = at if fence_line is None else None
    return lines


def _is_foreign(line: str) -> bool:
    """Return whether a line at the margin is known not to be lspci's, or is bytes in hex."""
    is_known = line.startswith((*_TOOL_NOISE, *_FENCES))
    return is_known or _DUMPED_BYTES.fullmatch(line.strip()) is not None or _is_prompt(line)


def _is_prompt(line: str) -> bool:
    is_address = _LIKE_AN_ADDRESS.match(line) is not None
    return not is_address and _PROMPT.fullmatch(line.rstrip()) is not None


def parse(text: str, source: str = "lspci") -> tuple[LspciFunction, ...]:
    """Return the functions of a listing, ascending.

    Unindented lines before the first function are other text above a copied listing.
    Raises ParseError for a later line there that is not a header, prompt or fence, for an address
    that occurs twice, and for a text that is not a number. Unknown indented lines, and an
    incomplete last line, are skipped.
    """
    if len(text) > MAX_CHARACTERS:
        raise ParseError(source, f"at most {MAX_CHARACTERS} characters", str(len(text)))
    count = sum(map(text.count, _LINE_ENDS))
    if count > MAX_LINES:
        raise ParseError(source, f"at most {MAX_LINES} lines", str(count))
    function_of: dict[Bdf, LspciFunction] = {}
    block: list[str] = []
    header: tuple[int, str] | None = None
    lines = _clean_lines(text)
    if len(lines) > 1 and ends_within_a_line(text) and not _HEADER.fullmatch(lines[-1].rstrip()):
        del lines[-1]  # "NUMA node: 1" may have been 12
    for number, line in enumerate([*lines, ""], start=1):
        if header is not None and _UNINDENTED.match(line):
            block.append(f"\t\t{line}")
            continue
        if line.startswith((" ", "\t")):
            if header is None and not function_of and line.startswith("\t"):
                raise ParseError(source, "an address such as 3b:00.0 first", line, line=number)
            block.append(line)
            continue
        is_end = number > len(lines)
        is_prompt = not is_end and _is_prompt(line)
        if not is_end and not is_prompt and (not line.strip() or _is_foreign(line)):
            continue
        if header is None and not is_end and not _ADDRESS.match(line):
            continue
        if header is not None:
            function = _parse_function(*header, block, source)
            if function.bdf in function_of:
                expected = "each address once"
                raise ParseError(source, expected, str(function.bdf), line=header[0])
            if len(function_of) == MAX_FUNCTIONS:
                raise ParseError(source, f"at most {MAX_FUNCTIONS} functions", line, line=number)
            function_of[function.bdf] = function
        # What follows a prompt is another program's output.
        header, block = None if is_prompt else (number, line), []
    if not function_of:
        raise ParseError(source, "the output of lspci -vvv", text[:60])
    return tuple(function_of[bdf] for bdf in sorted(function_of))


def _parse_function(number: int, header: str, block: list[str], source: str) -> LspciFunction:
    match = _HEADER.fullmatch(header.rstrip())
    if match is None:
        raise ParseError(
            source, 'a function such as "3b:00.0 3D controller: ..."', header, line=number
        )
    address, class_name, class_text, tail = match.groups()
    revisions = [match.groups() for match in _REVISION.finditer(tail)]
    interface = next((code for _, code in revisions if code), None)
    words = _REVISION.sub("", tail).strip()
    vendor, device, name = _parse_ids(words)
    if class_text is None and _CODE.fullmatch(class_name):
        class_text = class_name
    code = int(class_text, 16) if class_text is not None else find_class_code(class_name)
    fields = _parse_fields(block, source, number)
    fields["registers"] = parse_registers(block)
    return LspciFunction(
        bdf=Bdf.parse(address, source),
        class_name=class_name,
        class_code=None if code is None else code << 8 | int(interface or "0", 16),
        name=name,
        vendor_id=vendor,
        device_id=device,
        **fields,
    )


def _parse_ids(words: str) -> tuple[int | None, int | None, str]:
    """(vendor, device, name) of "NVIDIA Corporation Device 2330", "... [10de:2330]", "10de:2330".
    Names hold brackets of their own ("[AMD/ATI]", "[GeForce ...]"): the ids are the last."""
    matches = list(_IDS.finditer(words))
    if matches:
        last = matches[-1]
        return int(last[1], 16), int(last[2], 16), words[: last.start()].strip() or words
    match = _UNNAMED_DEVICE.search(words)
    return find_vendor_id(words), None if match is None else int(match[1], 16), words


def _parse_fields(block: list[str], source: str, header_line: int) -> dict[str, Any]:
    """Return fields of the indented lines, by the word before the first colon."""
    fields: dict[str, Any] = {}
    links: dict[str, str] = {}
    bars: list[PciBar] = []
    for offset, line in enumerate(block, start=1):
        key, _, value = line.strip().partition(":")
        value = value.strip()
        if key.startswith("Region ") and line.startswith("\t") and not line.startswith("\t\t"):
            bars += _parse_bar(key.removeprefix("Region "), value)
        elif key.startswith("Expansion ROM at "):
            bars += _parse_rom(key)
        elif key in ("LnkCap", "LnkSta", "LnkCtl2"):
            links.setdefault(key, value)
        elif key == _ONES_ONLY:
            fields["is_silent"] = True
        elif key == "Subsystem":
            vendor, device, _ = _parse_ids(value)
            fields["subsystem_vendor_id"], fields["subsystem_device_id"] = vendor, device
        elif key in ("NUMA node", "IOMMU group"):
            if not _SIGNED.fullmatch(value):
                raise ParseError(source, f"{key}: a number", line, line=header_line + offset)
            number = int(value)
            field = "numa_node" if key == "NUMA node" else "iommu_group"
            fields[field] = None if number < 0 else number
        elif key == "Kernel driver in use":
            fields["driver"] = value
        elif key == "Bus" and (buses := _BUSES.match(value)):
            fields["buses"] = tuple(int(bus, 16) for bus in buses.groups())
        elif key in _WINDOWS and (window := _WINDOW.match(value)):
            # A window that is closed ends before it begins.
            if int(window[1], 16) <= int(window[2], 16):
                fields["has_window"] = True
        elif key == "Capabilities" and (express := _EXPRESS.match(value)):
            fields["port_type"] = _PORT_TYPES.get(express[1])
        elif key == "Initial VFs" and (vfs := _VFS.search(value)):
            fields["sriov_total_vfs"], fields["sriov_num_vfs"] = int(vfs[1]), int(vfs[2])
        elif key == "ACSCtl":
            fields["acs"] = frozenset(_ENABLED.findall(value))
        elif key == "ATSCtl":
            fields["ats_enabled"] = value.startswith("Enable+")
        # All else is detail of capabilities that nothing reads.
    link = PciLink(
        _parse_speed(links.get("LnkSta", "")),
        _parse_width(links.get("LnkSta", "")),
        _parse_speed(links.get("LnkCap", "")),
        _parse_width(links.get("LnkCap", "")),
    )
    if link != PciLink(None, None, None, None):
        fields["link"] = link
    fields["target_gt_per_s"] = _parse_speed(links.get("LnkCtl2", ""))
    fields["bars"] = tuple(sorted(bars, key=lambda bar: bar.index))
    return fields


def _parse_speed(text: str) -> float | None:
    """Return GT/s of "Speed 16GT/s (downgraded), Width x4 (ok)" or "Target Link Speed: 32GT/s"."""
    match = _SPEED.search(text.replace("Speed: ", "Speed "))
    return None if match is None else float(match[1])


def _parse_width(text: str) -> int | None:
    match = _WIDTH.search(text)
    return None if match is None else int(match[1]) or None  # x0: no link


def _parse_bar(index: str, text: str) -> list[PciBar]:
    """Return the region of "Memory at 214042000000 (64-bit, prefetchable) [size=16M]"; [] without a
    size, as for "[ignored]" regions and regions of virtual functions."""
    size = _SIZE.search(text)
    number = parse_whole(index, digits=1)
    if size is None or number is None or number >= _ROM_INDEX:
        return []
    is_memory = "Memory at " in text
    return [
        PciBar(
            index=number,
            size_bytes=int(size[1]) * _BYTES_OF_UNIT[size[2]],
            is_64bit="64-bit" in text,
            is_prefetchable="non-prefetchable" not in text and "prefetchable" in text,
            is_memory=is_memory,
        )
    ]


def _parse_rom(text: str) -> list[PciBar]:
    size = _SIZE.search(text)
    if size is None:
        return []
    return [PciBar(_ROM_INDEX, int(size[1]) * _BYTES_OF_UNIT[size[2]], False, False)]


@cache
def _read_codes() -> dict[str, dict[str, int]]:
    """Return the numbers by the names that lspci prints, of "classes" and "vendors"."""
    text = read_package_text("machine", "tools", "pci_names.toml")
    return toml.decode(text, type=dict[str, dict[str, int]])


def find_class_code(name: str) -> int | None:
    """16 bits of a class by its name; None for one that is not listed.

    >>> hex(find_class_code("3D controller") or 0), find_class_code("Flux capacitor")
    ('0x302', None)
    """
    return _read_codes()["classes"].get(name)


def find_vendor_id(words: str) -> int | None:
    """Return the vendor with whose name a function's description begins; None if not listed.

    >>> hex(find_vendor_id("NVIDIA Corporation Device 2330") or 0)
    '0x10de'
    """
    fitting = [name for name in _read_codes()["vendors"] if words.startswith(name)]
    return _read_codes()["vendors"][max(fitting, key=len)] if fitting else None


# The lines of one register go on without a name: `DevCtl:` opens, and MaxPayload follows two lines
# below. Source: ls-caps.c and ls-ecaps.c of pciutils 3.7 to 3.13.
_REGISTER = re.compile(r"\t+([A-Z][A-Za-z0-9]{2,15}):", re.ASCII)
_CAPABILITY = re.compile(r"\tCapabilities: \[[0-9a-f]{2,3}(?: v\d{1,2})?\] (.{1,80})", re.ASCII)
_RESIZABLE = re.compile(
    r"\t\tBAR ([0-5]): current size: \d{1,4}[KMGTPE]?B, supported: ([0-9KMGTPEB ]{1,600})",
    re.ASCII,
)
_RESIZED = re.compile(r"(\d{1,4})([KMGTPE])B", re.ASCII)
_UNPLACED = re.compile(
    r"\tRegion ([0-5]): (?:\[virtual\] )?Memory at (?:<unassigned>|<ignored>)", re.ASCII
)
_PAYLOAD = re.compile(r"\bMaxPayload (\d{2,4}) bytes", re.ASCII)
_RELAXED = re.compile(r"\bRlxdOrd([+-])", re.ASCII)


def parse_registers(lines: Iterable[str]) -> PciRegisters | None:
    """Return registers in a function's indented lines; None if there are none, as without root."""
    register, capability, control = "", "", ""
    has_registers = False
    unplaced_bars: list[int] = []
    resizable: list[tuple[int, int]] = []
    for line in lines:
        if (opened := _CAPABILITY.match(line)) is not None:
            register, capability = "", opened[1]
        elif (named := _REGISTER.match(line)) is not None:
            register = named[1]
            has_registers = True
        elif (region := _UNPLACED.match(line)) is not None:
            unplaced_bars.append(int(region[1]))
        elif (bar := _RESIZABLE.match(line)) is not None and "Virtual" not in capability:
            resizable += [(int(bar[1]), size) for size in _find_largest(bar[2])]
        elif not line.startswith("\t\t"):
            register = ""
        control += line if register == "DevCtl" else ""
    if not has_registers:
        return None
    payload, relaxed_match = _PAYLOAD.search(control), _RELAXED.search(control)
    return PciRegisters(
        max_payload_bytes=None if payload is None else int(payload[1]),
        relaxed_ordering=None if relaxed_match is None else relaxed_match[1] == "+",
        unplaced_bars=tuple(unplaced_bars),
        largest_bars=tuple(sorted(resizable)),
    )


def _find_largest(sizes: str) -> list[int]:
    """Return the largest of "64MB 128MB 256MB", in bytes."""
    sizes_bytes = [
        int(number) << 10 * (1 + "KMGTPE".index(unit)) for number, unit in _RESIZED.findall(sizes)
    ]
    return [max(sizes_bytes)] if sizes_bytes else []
