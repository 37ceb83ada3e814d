"""Xen: the plan as an xl domain configuration, with its virtual NUMA nodes.

Grammar and meaning as xl.cfg(5) of Xen 4.20 has them: KEY=VALUE pairs, separated by a newline or a
semicolon; a value is a string, a number or a list of these.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError, ParseError
from homenode.plan.model import Plan, PlanFinding, plan_finding
from homenode.targets.target import (
    Feature,
    Rendering,
    Target,
    default_machine,
    indirect,
    lost,
    native,
    one_node_each,
    passed_through,
    refuse_arm,
    refuse_many_vcpus,
    refuse_unsafe_name,
    shows_siblings,
    siblings_shown,
    whole_units,
)
from homenode.topology import Host
from homenode.units import MIB
from homenode.vm.layout import GuestCells, Pinning
from homenode.vm.model import Vm, VmCell

SUPPORT = {
    Feature.VCPU_PINS: native(
        '`cpus=["0", "1", ...]`; with `--pinning node` also `cpus_soft=`, where the file has it'
    ),
    Feature.EMULATOR_PINS: lost(
        "the device model runs in dom0", "it runs wherever dom0's vCPUs do: pin those"
    ),
    Feature.IOTHREAD_PINS: lost("disks are served by dom0", "pin dom0's vCPUs"),
    Feature.TOPOLOGY: lost(
        "xl has no key for sockets and cores", "the guest sees what libxl derives"
    ),
    Feature.THREADS: lost(
        "xl has no key for threads", "the guest's scheduler takes siblings for cores"
    ),
    Feature.DIES: lost("xl has no key for dies", "the guest sees no dies"),
    Feature.CACHE: lost("xl has no key for caches", "the guest sees the host's leaves as they are"),
    Feature.CELLS: native("`vnuma=[...]`, for hvm and pvh guests"),
    Feature.UNEQUAL_CELLS: native("`vnuma` size="),
    Feature.DISTANCES: native("`vnuma` vdistances="),
    Feature.MEMORY_NODES: indirect(
        "`vnuma` pnode= for each cell; without cells memory follows the vCPUs' affinity",
        "memory that does not fit goes to other nodes without a word",
    ),
    Feature.MEMORY_MODE: lost("xl has no memory modes", "memory is allocated on the pnode first"),
    Feature.HUGE_PAGES: lost(
        "Xen takes superpages by itself where memory is whole", "none can be reserved"
    ),
    Feature.DEVICES: native('`pci=["BDF"]`'),
    Feature.DEVICE_CELLS: lost(
        "xl has no key for a device's virtual node", "every device has numa_node -1 in the guest"
    ),
    Feature.DEVICE_TREE: lost("xl has no key for PCIe switches", "devices hang on one root bus"),
    Feature.INITIATORS: lost("xl has no generic initiators", "the GPU's memory stays offline"),
    Feature.WINDOW: lost(
        "hvmloader sizes the PCI window itself", "BARs that do not fit are left out by it"
    ),
    Feature.IOMMU: lost(
        "xl has no IOMMU that remaps interrupts", "more than 128 vCPUs are refused"
    ),
    Feature.VGPUS: lost("xl gives whole functions to pciback alone", "vGPUs are refused"),
}

_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r]++)|(?P<comment>\#[^\n]*+)|(?P<end>[\n;])|(?P<equals>\+?=)|(?P<open>\[)|"""
    r"""(?P<close>\])|(?P<comma>,)|(?P<string>"[^"\n]*+"|'[^'\n]*+')|(?P<word>[A-Za-z0-9_.-]++)|"""
    r"""(?P<continued>\\\n)""",
    re.ASCII,
)
_MOST_DEPTH = 8
_EXPOSED = "# homenode: vCPUs are pairs of siblings"

Value = str | int | list["Value"]


@dataclass(frozen=True, slots=True)
class Pair:
    """KEY=VALUE. start, end: of the whole in the text; value_start: of its value."""

    key: str
    value: Value
    start: int
    value_start: int
    end: int


def parse(content: bytes, source: str) -> tuple[str, tuple[Pair, ...]]:
    """The text and its pairs. Raises ParseError for what xl would not take, or a key twice."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise ParseError(source, "an xl configuration in UTF-8", "other bytes") from None
    tokens: list[tuple[str, str, int, int]] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or match.end() == at:
            raise _wrong(text, at, "KEY=VALUE", source)
        kind = match.lastgroup or ""
        if kind not in ("blank", "comment", "continued"):
            tokens.append((kind, match[0], at, match.end()))
        at = match.end()
    pairs: list[Pair] = []
    index = 0
    while index < len(tokens):
        kind, word, start, end = tokens[index]
        if kind == "end":
            index += 1
            continue
        if kind != "word" or index + 2 >= len(tokens) or tokens[index + 1][0] != "equals":
            raise _wrong(text, start, "KEY=VALUE", source)
        if tokens[index + 1][1] == "+=" or any(pair.key == word for pair in pairs):
            raise _wrong(text, start, f"{word} once", source)
        value_start = tokens[index + 2][2]
        value, index = _value(tokens, index + 2, text, source, 0)
        end = tokens[index - 1][3]
        pairs.append(Pair(word, value, start, value_start, end))
        if index < len(tokens) and tokens[index][0] != "end":
            raise _wrong(text, tokens[index][2], "a new line or a semicolon", source)
    return text, tuple(pairs)


def _wrong(text: str, at: int, expected: str, source: str) -> ParseError:
    line = text.count("\n", 0, at) + 1
    return ParseError(source, expected, text[at : at + 40].partition("\n")[0], line=line)


def _value(
    tokens: list[tuple[str, str, int, int]], index: int, text: str, source: str, depth: int
) -> tuple[Value, int]:
    while index < len(tokens) and depth and tokens[index][1] == "\n":
        index += 1
    if index >= len(tokens) or depth > _MOST_DEPTH:
        raise _wrong(text, len(text) - 1, "a value", source)
    kind, word, start, _ = tokens[index]
    if kind == "string":
        return word[1:-1], index + 1
    if kind == "word":
        return (int(word) if word.isdigit() and len(word) < 19 else word), index + 1
    if kind != "open":
        raise _wrong(text, start, "a string, a number or a list", source)
    values: list[Value] = []
    index += 1
    while True:
        while index < len(tokens) and tokens[index][1] == "\n":
            index += 1
        if index < len(tokens) and tokens[index][0] == "close":
            return values, index + 1
        value, index = _value(tokens, index, text, source, depth + 1)
        values.append(value)
        while index < len(tokens) and tokens[index][1] == "\n":
            index += 1
        if index < len(tokens) and tokens[index][0] == "comma":
            index += 1
        elif index >= len(tokens) or tokens[index][0] != "close":
            raise _wrong(text, start, "a list that ends", source)


def is_config(content: bytes) -> bool:
    """Whether this is an xl configuration: it has keys that no other format has."""
    text = content[:200_000].decode("utf-8", "replace")
    keys = set(re.findall(r"^[ \t]*([a-z_]{1,30})[ \t]*=", text, re.MULTILINE | re.ASCII))
    return "name" in keys and bool(keys & {"memory", "vcpus", "type", "builder", "kernel", "disk"})


def _values(pairs: tuple[Pair, ...]) -> dict[str, Value]:
    return {pair.key: pair.value for pair in pairs}


def _count(values: Mapping[str, Value], key: str, default: int, source: str) -> int:
    value = values.get(key, default)
    if not isinstance(value, int) or not 0 < value < 1 << 40:
        raise ParseError(f"{source}: {key}", "a number above 0", str(value)[:60])
    return value


def read_vm(content: bytes, source: str) -> Vm:
    """The VM of a configuration."""
    text, pairs = parse(content, source)
    values = _values(pairs)
    vcpus = _count(values, "vcpus", 1, source)
    nodes = values.get("vnuma", [])
    if not isinstance(nodes, list):
        raise ParseError(f"{source}: vnuma", "a list", str(nodes)[:60])
    cpus = values.get("cpus", values.get("cpus_soft", []))
    pins: tuple[CpuSet | None, ...] = ()
    if isinstance(cpus, list):
        pins = tuple(CpuSet.parse(str(one), f"{source}: cpus") for one in cpus)
    elif isinstance(cpus, str | int) and re.match(r"[0-9,-]+\Z", str(cpus)):
        pins = (CpuSet.parse(str(cpus), f"{source}: cpus"),) * vcpus
    devices = values.get("pci", [])
    if not isinstance(devices, list):
        raise ParseError(f"{source}: pci", "a list", str(devices)[:60])
    name = values.get("name")
    if not isinstance(name, str) or not name:
        raise ParseError(source, 'name="NAME"', "none")
    functions = (Bdf.parse(_function(str(one)), f"{source}: pci") for one in devices)
    hostdevs, _ = passed_through((bdf, None) for bdf in functions)
    vm = Vm(
        name=name,
        source=source,
        machine=default_machine("x86_64"),
        firmware="efi" if values.get("firmware") in ("uefi", "ovmf") else None,
        cpu_mode="host-passthrough",
        vcpus=vcpus,
        memory_bytes=_count(values, "memory", 128, source) * MIB,
        cells=tuple(_cell(number, node, f"{source}: vnuma") for number, node in enumerate(nodes)),
        vcpu_pins=pins or (None,) * vcpus,
        hostdevs=hostdevs,
    )
    return siblings_shown(vm) if _EXPOSED in text else vm


def _function(spec: str) -> str:
    """The function of a PCI_SPEC_STRING: [DDDD:]BB:DD.F[@VSLOT][,KEY=VALUE...]."""
    return spec.partition(",")[0].partition("@")[0].removeprefix("bdf=")


def _cell(number: int, node: Value, source: str) -> VmCell:
    if not isinstance(node, list):
        raise ParseError(source, "a list for each node", str(node)[:60])
    keys = dict(str(one).partition("=")[::2] for one in node)
    missing = {"pnode", "size", "vcpus", "vdistances"} - set(keys)
    if missing:
        raise ParseError(source, f"{', '.join(sorted(missing))} in each node", "none")
    rows = keys["vdistances"].replace(" ", "").split(",")
    numbers = (keys["pnode"], keys["size"], *rows)
    if not all(one.strip().isdigit() and len(one) < 12 for one in numbers):
        raise ParseError(source, "numbers", " ".join(numbers))
    return VmCell(
        id=number,
        vcpus=CpuSet.parse(keys["vcpus"], source),
        memory_bytes=int(keys["size"]) * MIB,
        nodes=CpuSet([int(keys["pnode"])]),
        distances=tuple(map(int, rows)),
    )


def render(plan: Plan, guest: Vm, host: Host | None, given: bytes | None, source: str) -> Rendering:
    """The configuration with the plan in it; what is not ours stays.

    Raises InputError where xl cannot take the plan.
    """
    name = refuse_unsafe_name(guest.name, source)
    text, pairs = parse(given or b"", source)
    values = _values(pairs)
    kind = values.get("type", "hvm" if given is None else values.get("builder", "pv"))
    mirrored = plan.layout.cells is GuestCells.MIRRORED
    if mirrored and kind not in ("hvm", "pvh"):
        raise InputError(
            f"{source}: expected type hvm or pvh for guest cells, found {kind!r}: xl gives a PV "
            "guest none",
            hint='set type="hvm", or choose a flat layout',
        )
    refuse_many_vcpus(plan, "xen", 128)
    if mirrored or plan.devices:
        refuse_arm(guest, "xen", "virtual NUMA nodes and passed-through devices")
    if plan.devices and kind == "pvh":
        raise InputError(
            f"{source}: expected type hvm or pv for passed-through devices, found pvh",
            hint='set type="hvm"',
        )
    if '"' in name or "\\" in name:
        raise InputError(f"{source}: expected a name without quotes, found {name!r}")
    memory = whole_units(plan.memory_bytes, MIB, "memory", "xen")
    wanted: dict[str, str | None] = {"vcpus": str(plan.vcpus), "memory": str(memory)}
    if given is None:
        wanted = {"name": f'"{name}"', "type": '"hvm"', **wanted}
    for key, value in (("maxvcpus", plan.vcpus), ("maxmem", memory)):
        if key in values:
            wanted[key] = str(value)
    if plan.vcpu_pins:
        soft = _is_soft(plan, values)
        wanted["cpus_soft" if soft else "cpus"] = (
            "[" + ", ".join(f'"{pus}"' for pus in plan.vcpu_pins) + "]"
        )
        if not soft:
            wanted["cpus_soft"] = None
    wanted["vnuma"] = _vnuma(plan) if mirrored else None
    wanted["pci"] = _pci(plan, values)
    head = "" if given is not None else "# homenode: written for xl create\n"
    edited = _with_record(_edited(text, pairs, wanted), plan)
    findings = (*_soft_affinity(plan, values), *_findings(plan, given))
    return Rendering((head + edited).encode(), (), findings)


def _is_soft(plan: Plan, values: Mapping[str, Value]) -> bool:
    """Whether the file asks that vCPUs prefer PUs, and the layout lets them float."""
    floats = plan.layout.pinning is Pinning.NODE
    return floats and "cpus_soft" in values and "cpus" not in values


def _soft_affinity(plan: Plan, values: Mapping[str, Value]) -> Iterator[PlanFinding]:
    """The choice that only Xen gives to vCPUs that float over nodes: XAPI places its VMs so."""
    if plan.vcpu_pins and plan.layout.pinning is Pinning.NODE and not _is_soft(plan, values):
        yield plan_finding(
            "target-soft-affinity",
            "Xen: cpus",
            "the vCPUs stay on the PUs of their nodes while all of these are busy, too",
        )


def _with_record(text: str, plan: Plan) -> str:
    """A comment that the siblings are exposed: no key of xl says it, and vCPUs double only once."""
    exposed = shows_siblings(plan)
    if exposed == (_EXPOSED in text):
        return text
    if exposed:
        return f"{text}{_EXPOSED}\n"
    return text.replace(f"{_EXPOSED}\r\n", "").replace(f"{_EXPOSED}\n", "")


def _findings(plan: Plan, given: bytes | None) -> tuple[PlanFinding, ...]:
    if given is not None or plan.emulator_pus is None:
        return ()
    return (
        plan_finding(
            "target-dom0",
            "Xen: dom0",
            f"the plan keeps {plan.emulator_pus} for the device model",
            fix=f"xl vcpu-pin Domain-0 all {plan.emulator_pus}",
        ),
    )


def _vnuma(plan: Plan) -> str:
    nodes = one_node_each(plan, "xen")
    rows = []
    for cell in plan.cells:
        if not cell.vcpus:
            continue
        size = whole_units(cell.memory_bytes, MIB, f"memory of cell {cell.id}", "xen")
        count = sum(bool(other.vcpus) for other in plan.cells)
        stated = cell.distances[:count] or tuple(
            10 if other.id == cell.id else 20 for other in plan.cells if other.vcpus
        )
        rows.append(
            f'["pnode={nodes[cell.id]}", "size={size}", "vcpus={cell.vcpus}", '
            f'"vdistances={",".join(map(str, stated))}"]'
        )
    return "[" + ", ".join(rows) + "]"


def _pci(plan: Plan, values: Mapping[str, Value]) -> str | None:
    """Each planned function; the options of one that is there stay with it."""
    there = values.get("pci", [])
    specs = {
        Bdf.parse(_function(str(one)), "pci"): str(one)
        for one in (there if isinstance(there, list) else [])
    }
    if not plan.devices:
        return None
    return "[" + ", ".join(f'"{specs.get(d.bdf, str(d.bdf))}"' for d in plan.devices) + "]"


def _edited(text: str, pairs: tuple[Pair, ...], wanted: Mapping[str, str | None]) -> str:
    """Values changed in place, pairs removed where None, new ones on lines at the end."""
    there = {pair.key for pair in pairs}
    for pair in reversed(pairs):
        if pair.key not in wanted:
            continue
        value = wanted[pair.key]
        if value is None:
            text = _without(text, pair)
        elif _values(parse(f"x={value}".encode(), "value")[1])["x"] != pair.value:
            text = text[: pair.value_start] + value + text[pair.end :]
    end = "\r\n" if "\r\n" in text else "\n"
    added = [
        f"{key} = {value}"
        for key, value in wanted.items()
        if value is not None and key not in there
    ]
    if added and text and not text.endswith("\n"):
        text += end
    return text + "".join(line + end for line in added)


def _without(text: str, pair: Pair) -> str:
    """Without a pair, and without its line where nothing else is on it."""
    line_start = text.rfind("\n", 0, pair.start) + 1
    line_end = text.find("\n", pair.end)
    line_end = len(text) if line_end < 0 else line_end + 1
    alone = not text[line_start : pair.start].strip() and not text[pair.end : line_end].strip()
    if alone:
        return text[:line_start] + text[line_end:]
    rest = text[pair.end :].lstrip(" \t")
    return text[: pair.start] + rest.removeprefix(";").lstrip(" \t")


TARGET = Target(
    title="Xen",
    source="xl.cfg(5) of Xen 4.20",
    support=SUPPORT,
    unread=frozenset(("iothreads",)),
    render=render,
    read_vm=read_vm,
    recognises=is_config,
    architecture_of_host=True,
)
