"""Xen: the plan as an xl domain configuration, with its virtual NUMA nodes.

Grammar and meaning as xl.cfg(5) of Xen 4.20 has them: KEY=VALUE pairs, separated by a newline or a
semicolon; a value is a string, a number or a list of these.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError, ParseError
from homenode.findings import Finding, finding
from homenode.machine.topology import Host
from homenode.units import MIB, parse_whole
from homenode.vm.layout import Pinning
from homenode.vm.model import MAX_VCPUS, Vm, VmCell
from homenode.vm.plan import Plan
from homenode.vm.targets.codec import (
    Codec,
    ConfigEntry,
    FormatRow,
    TargetEdit,
    check_changed_keys,
    decode_text,
    replace_entries,
)
from homenode.vm.targets.target import (
    Feature,
    indirect_support,
    list_lost,
    lost_feature,
    make_native,
    one_node_each,
    reject_arm,
    shape_of_siblings,
    shows_siblings,
    split_devices,
)

_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r]++)|(?P<comment>\#[^\n]*+)|(?P<end>[\n;])|(?P<equals>\+?=)|(?P<open>\[)|"""
    r"""(?P<close>\])|(?P<comma>,)|(?P<string>"[^"\n]*+"|'[^'\n]*+')|(?P<word>[A-Za-z0-9_.-]++)|"""
    r"""(?P<continued>\\\n)""",
    re.ASCII,
)
_MAX_DEPTH = 8
_MAX_VCPUS = 128
"""Limit without an IOMMU that remaps interrupts, which xl does not have."""
_NODES = re.compile(r"nodes?:([0-9-]{1,20})", re.ASCII)
_EXPOSED = "# homenode: vCPUs are pairs of siblings"
_RECORD = "#siblings"

Value = str | int | list["Value"]


class XlConfig(NamedTuple):
    """A configuration: its text and its pairs, each key once."""

    text: str
    pairs: tuple[ConfigEntry, ...]
    source: str

    @property
    def values(self) -> dict[str, Value]:
        return {pair.key: pair.value for pair in self.pairs}

    def list(self, key: str) -> "list[Value]":
        value = self.values.get(key, [])
        if not isinstance(value, list):
            raise ParseError(f"{self.source}: {key}", "a list", str(value)[:60])
        return value


def parse(content: bytes, source: str) -> XlConfig:
    """Parse a configuration. Raises ParseError for text that xl rejects, and for a repeated key."""
    text = decode_text(content, source, "an xl configuration")
    tokens: list[tuple[str, str, int, int]] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or match.end() == at:
            raise _parse_error(text, at, "KEY=VALUE", source)
        kind = match.lastgroup or ""
        if kind not in ("blank", "comment", "continued"):
            tokens.append((kind, match[0], at, match.end()))
        at = match.end()
    pairs: dict[str, ConfigEntry] = {}
    index = 0
    while index < len(tokens):
        kind, word, start, _ = tokens[index]
        if kind == "end":
            index += 1
            continue
        if kind != "word" or index + 2 >= len(tokens) or tokens[index + 1][0] != "equals":
            raise _parse_error(text, start, "KEY=VALUE", source)
        if tokens[index + 1][1] == "+=" or word in pairs:
            raise _parse_error(text, start, f"{word} once", source)
        value_start = tokens[index + 2][2]
        value, index = _parse_value(tokens, index + 2, text, source, 0)
        pairs[word] = ConfigEntry(word, value, start, value_start, tokens[index - 1][3])
        if index < len(tokens) and tokens[index][0] != "end":
            raise _parse_error(text, tokens[index][2], "a new line or a semicolon", source)
    return XlConfig(text, tuple(pairs.values()), source)


def _parse_error(text: str, at: int, expected: str, source: str) -> ParseError:
    line = text.count("\n", 0, at) + 1
    return ParseError(source, expected, text[at : at + 40].partition("\n")[0], line=line)


def _parse_value(
    tokens: list[tuple[str, str, int, int]], index: int, text: str, source: str, depth: int
) -> tuple[Value, int]:
    while index < len(tokens) and depth and tokens[index][1] == "\n":
        index += 1
    if index >= len(tokens) or depth > _MAX_DEPTH:
        raise _parse_error(text, len(text) - 1, "a value", source)
    kind, word, start, _ = tokens[index]
    if kind == "string":
        return word[1:-1], index + 1
    if kind == "word":
        number = parse_whole(word, digits=18)
        return (word if number is None else number), index + 1
    if kind != "open":
        raise _parse_error(text, start, "a string, a number or a list", source)
    values: list[Value] = []
    index += 1
    while True:
        while index < len(tokens) and tokens[index][1] == "\n":
            index += 1
        if index < len(tokens) and tokens[index][0] == "close":
            return values, index + 1
        value, index = _parse_value(tokens, index, text, source, depth + 1)
        values.append(value)
        while index < len(tokens) and tokens[index][1] == "\n":
            index += 1
        if index < len(tokens) and tokens[index][0] == "comma":
            index += 1
        elif index >= len(tokens) or tokens[index][0] != "close":
            raise _parse_error(text, start, "a list that ends", source)


def is_config(content: bytes) -> bool:
    """Return whether this is an xl configuration: it has keys that no other format has."""
    text = content[:200_000].decode("utf-8", "replace")
    keys = set(re.findall(r"^[ \t]*([a-z_]{1,30})[ \t]*=", text, re.MULTILINE | re.ASCII))
    return "name" in keys and bool(keys & {"memory", "vcpus", "type", "builder", "kernel", "disk"})


def _render_config(edit: TargetEdit[XlConfig], lines: Mapping[str, str | None]) -> str:
    config = edit.file
    values = {
        key: [] if text is None else [(parse(f"x={text}".encode(), key).values["x"], text)]
        for key, text in lines.items()
        if key != _RECORD
    }
    text = replace_entries(config.text, config.pairs, values)
    if lines[_RECORD] is not None:
        return text if _EXPOSED in text else f"{text}{_EXPOSED}\n"
    return text.replace(f"{_EXPOSED}\r\n", "").replace(f"{_EXPOSED}\n", "")


def _create_config(guest: Vm, plan: Plan) -> str:
    if '"' in guest.name or "\\" in guest.name:
        raise InputError(f"xen: expected a name without quotes, found {guest.name!r}")
    return f'# homenode: written for xl create\nname = "{guest.name}"\ntype = "hvm"\n'


def _read_name(config: XlConfig) -> Mapping[str, Any]:
    name = config.values.get("name")
    if not isinstance(name, str) or not name:
        raise ParseError(config.source, 'name="NAME"')
    is_efi = config.values.get("firmware") in ("uefi", "ovmf")
    machine = {"machine": "xenpv"} if _read_type(config.values) == "pv" else {}
    return {"name": name, "firmware": "efi" if is_efi else None, **machine}


def _read_type(values: Mapping[str, Value]) -> Value:
    return values.get("type", values.get("builder", "pv"))


def _count(config: XlConfig, key: str, default: int) -> int:
    value = config.values.get(key, default)
    count = None if isinstance(value, list) else parse_whole(str(value), digits=12)
    limit = MAX_VCPUS if key.endswith("vcpus") else 10**12
    if not count or count > limit:
        raise ParseError(f"{config.source}: {key}", f"1 to {limit}", str(value)[:60])
    return count


def _read_size(config: XlConfig) -> Mapping[str, Any]:
    return {
        "vcpus": _count(config, "vcpus", 1),
        "memory_bytes": _count(config, "memory", 128) * MIB,
    }


def _write_size(edit: TargetEdit[XlConfig]) -> Mapping[str, str]:
    memory, vcpus = str(edit.memory_mib), str(edit.plan.vm.vcpus)
    limits = {"maxvcpus": vcpus, "maxmem": memory}
    values, is_fixed = edit.file.values, edit.plan.is_mirrored or edit.plan.vm.hostdevs
    present = {
        # Xen requires a limit that equals its size with vnuma or pci.
        key: text if is_fixed else str(max(int(text), _count(edit.file, key, 1)))
        for key, text in limits.items()
        if key in values
    }
    return {"vcpus": vcpus, "memory": memory, **present}


def _read_pins(config: XlConfig) -> Mapping[str, Any]:
    return {"vcpu_pins": _read_vcpu_pins(config, None)}


def _add_named_pus(vm: Vm, content: bytes, source: str, host: Host) -> Vm:
    """Return the VM with the CPUs that `cpus` names by nodes of the host."""
    return replace(vm, vcpu_pins=_read_vcpu_pins(parse(content, source), host))


def _read_vcpu_pins(config: XlConfig, host: Host | None) -> tuple[CpuSet | None, ...]:
    """Return the CPUs of each vCPU; None if it floats, or if only a host shows them."""
    vcpus = _count(config, "vcpus", 1)
    cpus = config.values.get("cpus", config.values.get("cpus_soft", []))
    place = f"{config.source}: cpus"
    if isinstance(cpus, list):
        pins = [_parse_named_pus(str(pus), place, host) for pus in cpus[:vcpus]]
        return (*pins, *(None,) * (vcpus - len(pins)))
    return (_parse_named_pus(str(cpus), place, host),) * vcpus


def _parse_named_pus(text: str, place: str, host: Host | None) -> CpuSet | None:
    """Return the CPUs of a list such as "0-3,node:1,^5"; None for all, or without a host."""
    included_pus, excluded = CpuSet(), CpuSet()
    for term in text.replace(" ", "").split(","):
        name = term.removeprefix("^")
        node_list = _NODES.fullmatch(name)
        if name != "all" and node_list is None:
            pus = CpuSet.parse(name, place)
        elif host is None:
            return None
        else:
            nodes = CpuSet.parse(node_list[1], place) if node_list else None
            pus = CpuSet.union(n.pus for n in host.nodes if nodes is None or n.index in nodes)
        included_pus, excluded = (
            (included_pus | pus, excluded) if name == term else (included_pus, excluded | pus)
        )
    everything = None if host is None else CpuSet(pu.index for pu in host.pus)
    return None if included_pus - excluded == everything else included_pus - excluded


def _is_soft(edit: TargetEdit[XlConfig]) -> bool:
    """Return whether the file gives vCPUs preferred CPUs, and the layout lets them float."""
    values = edit.file.values
    floats = edit.plan.layout.pinning is Pinning.NODE
    return floats and "cpus_soft" in values and "cpus" not in values


def _write_pins(edit: TargetEdit[XlConfig]) -> Mapping[str, str | None]:
    if not edit.plan.vcpu_pins:
        return {}
    pins = "[" + ", ".join(f'"{pus}"' for pus in edit.plan.vcpu_pins) + "]"
    return {"cpus_soft": pins} if _is_soft(edit) else {"cpus": pins, "cpus_soft": None}


def _read_cells(config: XlConfig) -> Mapping[str, Any]:
    place = f"{config.source}: vnuma"
    nodes = enumerate(config.list("vnuma"))
    return {"cells": tuple(_parse_cell(number, node, place) for number, node in nodes)}


def _parse_cell(number: int, node: Value, source: str) -> VmCell:
    if not isinstance(node, list):
        raise ParseError(source, "a list for each node", str(node)[:60])
    keys = dict(str(text).partition("=")[::2] for text in node)
    missing = {"pnode", "size", "vcpus", "vdistances"} - set(keys)
    if missing:
        raise ParseError(source, f"{', '.join(sorted(missing))} in each node")
    rows = keys["vdistances"].replace(" ", "").split(",")
    numbers = (keys["pnode"], keys["size"], *rows)
    if any(parse_whole(text.strip(), digits=11) is None for text in numbers):
        raise ParseError(source, "numbers", " ".join(numbers))
    return VmCell(
        id=number,
        vcpus=CpuSet.parse(keys["vcpus"], source),
        memory_bytes=int(keys["size"]) * MIB,
        nodes=CpuSet([int(keys["pnode"])]),
        distances=tuple(map(int, rows)),
    )


def _write_cells(edit: TargetEdit[XlConfig]) -> Mapping[str, str | None]:
    if not edit.plan.is_mirrored:
        return {"vnuma": None}
    nodes = one_node_each(edit.plan, "xen")
    cells = [cell for cell in edit.plan.cells if cell.vcpus]
    rows = []
    for cell in cells:
        distances = cell.distances[: len(cells)] or tuple(10 if o is cell else 20 for o in cells)
        rows.append(
            f'["pnode={nodes[cell.id]}", "size={edit.count_mib(cell)}", "vcpus={cell.vcpus}", '
            f'"vdistances={",".join(map(str, distances))}"]'
        )
    return {"vnuma": "[" + ", ".join(rows) + "]"}


def _list_devices(config: XlConfig) -> dict[Bdf, str]:
    """Return the PCI_SPEC_STRINGs by their functions: [DDDD:]BB:DD.F[@VSLOT][,KEY=VALUE...]."""
    spec_of = {}
    for spec in map(str, config.list("pci")):
        function = spec.partition(",")[0].partition("@")[0].removeprefix("bdf=")
        spec_of[Bdf.parse(function, f"{config.source}: pci")] = spec
    return spec_of


def _read_devices(config: XlConfig) -> Mapping[str, Any]:
    return {"hostdevs": split_devices((bdf, None) for bdf in _list_devices(config))[0]}


def _write_devices(edit: TargetEdit[XlConfig]) -> Mapping[str, str | None]:
    """Return each planned function; a present one keeps its options."""
    specs = _list_devices(edit.file)
    planned_devices = [f'"{specs.get(d.bdf, str(d.bdf))}"' for d in edit.plan.vm.hostdevs]
    return {"pci": "[" + ", ".join(planned_devices) + "]" if planned_devices else None}


def _read_siblings(config: XlConfig) -> Mapping[str, Any]:
    vcpus = _count(config, "vcpus", 1)
    return {"cpu_topology": shape_of_siblings(vcpus)} if _EXPOSED in config.text else {}


def _write_siblings(edit: TargetEdit[XlConfig]) -> Mapping[str, str | None]:
    """Return a comment of homenode's own, since vCPUs double only once."""
    return {_RECORD: _EXPOSED if shows_siblings(edit.plan) else None}


ROWS = (
    FormatRow(read=_read_name),
    FormatRow(read=_read_size, write=_write_size),
    FormatRow(
        says={
            Feature.VCPU_PINS: make_native(
                '`cpus=["0", "1", ...]`; with `--pinning node` also `cpus_soft=`, where the file '
                "has it"
            )
        },
        read=_read_pins,
        write=_write_pins,
    ),
    FormatRow(
        says={
            Feature.CELLS: make_native("`vnuma=[...]`, for hvm and pvh guests"),
            Feature.DISTANCES: make_native("`vnuma` vdistances="),
            Feature.MEMORY_NODES: indirect_support(
                "`vnuma` pnode= for each cell; without cells memory follows the vCPUs' affinity",
                "memory that does not fit is silently allocated on other nodes",
            ),
        },
        read=_read_cells,
        write=_write_cells,
    ),
    FormatRow(
        says={Feature.DEVICES: make_native('`pci=["BDF"]`')},
        read=_read_devices,
        write=_write_devices,
    ),
    FormatRow(
        says={
            Feature.TOPOLOGY: lost_feature(
                "xl has no key for sockets and cores", "the guest sees what libxl derives"
            ),
            Feature.THREADS: lost_feature(
                "xl has no key for threads", "the guest's scheduler treats siblings as cores"
            ),
        },
        read=_read_siblings,
        write=_write_siblings,
        is_compared=False,
    ),
    FormatRow(says=list_lost("xen")),
)


def _reject_unsupported(edit: TargetEdit[XlConfig]) -> None:
    values, plan, source = edit.file.values, edit.plan, edit.source
    kind = _read_type(values)
    if plan.vm.vcpus > _MAX_VCPUS:
        raise InputError(
            f"xen: expected at most {_MAX_VCPUS} vCPUs, found {plan.vm.vcpus}",
            hint=f"choose --vcpus {_MAX_VCPUS} or fewer, or the target qemu",
        )
    if edit.plan.is_mirrored and kind not in ("hvm", "pvh"):
        raise InputError(
            f"{source}: expected type hvm or pvh for guest cells, found {kind!r}",
            hint='set type="hvm", or --layout pin-bound',
        )
    if edit.plan.is_mirrored or plan.vm.hostdevs:
        reject_arm(edit.guest, "xen", "virtual NUMA nodes and passed-through devices")
    if plan.vm.hostdevs and kind == "pvh":
        raise InputError(
            f"{source}: expected type hvm or pv for passed-through devices, found pvh",
            hint='set type="hvm"',
        )


def _find_losses(edit: TargetEdit[XlConfig], lines: Mapping[str, str | None]) -> Iterator[Finding]:
    """Yield the choice that Xen alone gives to floating vCPUs, as XAPI does; and dom0's CPUs."""
    plan, guest = edit.plan, edit.guest
    reason = "Xen requires it with vnuma or pci"
    sizes = {"maxmem": guest.memory_bytes // MIB, "maxvcpus": guest.vcpus}
    yield from check_changed_keys(edit, lines, {key: (size, reason) for key, size in sizes.items()})
    if plan.vcpu_pins and plan.layout.pinning is Pinning.NODE and not _is_soft(edit):
        yield finding(
            "target-soft-affinity",
            "Xen: cpus",
            observed="the vCPUs stay on the CPUs of their nodes even if all these CPUs are busy",
        )
    if edit.is_new and plan.vm.emulator_pus is not None:
        yield finding(
            "target-dom0",
            "Xen: dom0",
            observed=f"the plan keeps {plan.vm.emulator_pus} for the device model",
            values={"pus": plan.vm.emulator_pus},
        )


CODEC = Codec(
    name="xen",
    rows=ROWS,
    parse=parse,
    new=_create_config,
    edited=_render_config,
    refuse=_reject_unsupported,
    findings=_find_losses,
    placed=re.compile(
        "name|type|builder|vcpus|maxvcpus|memory|maxmem|cpus|cpus_soft|vnuma|pci|firmware"
    ),
)
TARGET = CODEC.build_target(
    title="Xen",
    source="xl.cfg(5) of Xen 4.20",
    recognises=is_config,
    users_own=r"(name|uuid|disk|vif|boot|serial|vnc\w*|sdl|spice\w*|usb\w*|on_\w+|keymap|stdvga|vga"
    r"|videoram|localtime|rtc_timeoffset|vfb|channel|vtpm|p9)=",
    architecture_of_host=True,
    on_host=_add_named_pus,
)
