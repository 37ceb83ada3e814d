"""Incus: the plan as an instance's configuration: limits, devices and raw.qemu.conf.

Incus derives the guest's shape from `limits.cpu`: it sorts the PUs by package, core and thread,
makes vCPU i of the i-th, and gives the guest a cell for each host node of them with an equal share
of the memory. Which cell has which number is another at each start: the nodes are a map of Go.
Source: cpuTopology, getCPUOpts and qemuCPU of Incus 6.0.3 to 7.3. raw.qemu.conf overrides entries
of sections and adds sections.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, PuIndex
from homenode.errors import InputError, ParseError
from homenode.pci import DeviceKind
from homenode.plan.model import Plan, PlanFinding, plan_finding
from homenode.targets.qemu_command import size_of
from homenode.targets.target import (
    Feature,
    Rendering,
    Target,
    default_machine,
    indirect,
    lost,
    native,
    passed_through,
    pus_of,
    refuse_arm,
    refuse_many_vcpus,
    refuse_unsafe_name,
    shape_of_siblings,
    shows_siblings,
    whole_units,
)
from homenode.targets.yaml_edit import (
    Block,
    blocks_of,
    entry_lines,
    lines_of,
    mapping_edits,
    mapping_lines,
    quoted,
    scalar_of,
)
from homenode.topology import Host
from homenode.units import GIB, KIB, MIB, TIB
from homenode.vm.layout import GuestCells, Pinning, Siblings
from homenode.vm.model import Vm, VmCell

SUPPORT = {
    Feature.VCPU_PINS: native("`limits.cpu` as a list: a vCPU for each PU"),
    Feature.EMULATOR_PINS: lost(
        "Incus pins vCPU threads alone", "QEMU's own threads float over the host"
    ),
    Feature.IOTHREAD_PINS: lost("Incus makes no IOThreads", "disks run on the emulator's threads"),
    Feature.TOPOLOGY: indirect(
        "derived from the PUs of `limits.cpu`", "irregular sets of PUs become one socket of cores"
    ),
    Feature.THREADS: indirect(
        "derived from the PUs of `limits.cpu`", "irregular sets of PUs become one socket of cores"
    ),
    Feature.DIES: lost("Incus has no dies", "the guest takes a package's cores for one LLC"),
    Feature.CACHE: lost("Incus has no key for caches", "the guest believes QEMU's caches"),
    Feature.CELLS: indirect(
        "a cell for each host node of `limits.cpu`", "cells and host nodes cannot differ"
    ),
    Feature.UNEQUAL_CELLS: indirect(
        "vCPUs by the PUs of `limits.cpu`, memory is split evenly",
        "cells of unequal memory are refused: their numbers are others at each start",
    ),
    Feature.DISTANCES: indirect(
        "by sections of `raw.qemu.conf`, where all cells are equally far from each other",
        "others are refused, as are cells of unequal memory; a release with other sections takes "
        "them for others",
    ),
    Feature.MEMORY_NODES: native("bound to the nodes of `limits.cpu`"),
    Feature.MEMORY_MODE: lost("Incus binds strictly", "memory may not come from other nodes"),
    Feature.HUGE_PAGES: indirect(
        "`limits.memory.hugepages`: of the host's mount, 2 MiB by default",
        "the size of the pages is the mount's",
    ),
    Feature.DEVICES: native("devices of type `gpu` and `pci`"),
    Feature.DEVICE_CELLS: lost(
        "Incus puts devices on root ports of its own", "every device has numa_node -1 in the guest"
    ),
    Feature.DEVICE_TREE: lost("Incus writes no switches", "devices hang on root ports"),
    Feature.INITIATORS: lost("Incus has no generic initiators", "the GPU's memory stays offline"),
    Feature.WINDOW: lost(
        "Incus has no key for the PCI window", "large BARs need an OVMF of 2023 or newer"
    ),
    Feature.IOMMU: lost("Incus writes no guest IOMMU", "more than 255 vCPUs are refused"),
    Feature.VGPUS: lost(
        "`gputype: mdev` makes a mediated device by type at each start, and takes none that exists",
        "vGPUs are refused",
    ),
}

_SIZE = re.compile(r"([0-9]{1,15})(B|kB|MB|GB|TB|KiB|MiB|GiB|TiB)?\Z", re.ASCII)
_DECIMAL = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_FACTOR = {**_DECIMAL, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
_MEMORY = re.compile(r'\[object "mem([0-9]{1,3})"\]\Z', re.ASCII)
_SECTION = re.compile(r"\[([^\]\n]{1,80})\](?:\[([0-9]{1,6})\])?\Z", re.ASCII)
_HOTPLUG = "limits.memory.hotplug"
"""Refused as unknown by Incus 6.0.0 to 6.0.4 and 6.1 to 6.14, and no file says its version."""

_RECORD = "user.homenode.siblings"
"""A key of the user's own: vCPUs that are pairs of siblings double only once."""


def is_config(content: bytes) -> bool:
    """Whether this is an instance's configuration as YAML."""
    text = content[:500_000].decode("utf-8", "replace")
    return re.search(r"^config:", text, re.MULTILINE) is not None and (
        "limits." in text or "type: virtual-machine" in text or "devices:" in text
    )


@dataclass(frozen=True, slots=True)
class Instance:
    """A configuration. config, devices: their entries; a device is a mapping."""

    lines: list[str]
    top: list[Block]
    config: list[Block]
    devices: list[tuple[Block, Mapping[str, str]]]

    def value(self, key: str, source: str) -> str | None:
        block = next((block for block in self.config if block.key == key), None)
        return None if block is None else scalar_of(self.lines, block, source)


def parse(content: bytes, source: str) -> Instance:
    """Raises ParseError for what is no such YAML."""
    lines = lines_of(content, source)
    top = blocks_of(lines, 0, len(lines), source)
    inside: dict[str, list[Block]] = {}
    for name in ("config", "devices"):
        block = next((block for block in top if block.key == name), None)
        filled = block is not None and not block.value.startswith("{}")
        inside[name] = (
            blocks_of(lines, block.first + 1, block.end, source)
            if block is not None and filled
            else []
        )
    devices: list[tuple[Block, Mapping[str, str]]] = []
    for block in inside["devices"]:
        entries = blocks_of(lines, block.first + 1, block.end, source)
        devices.append((block, {one.key: scalar_of(lines, one, source) for one in entries}))
    return Instance(lines, top, inside["config"], devices)


def read_vm(content: bytes, source: str) -> Vm:
    """The VM of an instance; which cells come of it depends on the host: `with_host`."""
    instance = parse(content, source)
    known = ("type", "name", "architecture")
    top = {b.key: scalar_of(instance.lines, b, source) for b in instance.top if b.key in known}
    if top.get("type") == "container":
        raise InputError(f"{source}: expected a virtual machine, found a container")
    limit = instance.value("limits.cpu", source) or "1"
    pins: tuple[CpuSet, ...] = ()
    if limit.isascii() and limit.isdigit():
        vcpus = int(limit)
    else:
        pus = CpuSet.parse(limit, f"{source}: limits.cpu")
        pins = tuple(CpuSet([pu]) for pu in pus)
        vcpus = len(pins)
    memory = instance.value("limits.memory", source) or "1GiB"
    match = _SIZE.match(memory)
    if match is None:
        raise ParseError(f"{source}: limits.memory", "a size such as 4GiB", memory)
    huge = instance.value("limits.memory.hugepages", source) in ("true", "1", "yes", "on")
    sizes, rows = _overrides(instance.value("raw.qemu.conf", source) or "", source)
    architecture = top.get("architecture", "x86_64")
    hostdevs, _ = passed_through(_passed(instance, source))
    vm = Vm(
        name=top.get("name") or "instance",
        source=source,
        architecture=architecture,
        machine=default_machine(architecture),
        firmware="efi",
        launch_security="sev" if instance.value("security.sev", source) == "true" else None,
        cpu_mode="host-passthrough",
        vcpus=vcpus,
        memory_bytes=int(match[1]) * _FACTOR[match[2] or ""],
        page_bytes=0 if huge else None,
        cells=tuple(
            VmCell(id=i, vcpus=CpuSet(), memory_bytes=sizes.get(i, 0), distances=rows.get(i, ()))
            for i in range(max([*sizes, *rows, -1]) + 1)
        ),
        vcpu_pins=pins or (None,) * vcpus,
        hostdevs=hostdevs,
    )
    exposed = instance.value(_RECORD, source) == Siblings.EXPOSED
    return structs.replace(vm, cpu_topology=shape_of_siblings(vcpus)) if exposed else vm


def _passed(instance: Instance, source: str) -> Iterator[tuple[Bdf, None]]:
    for _, device in instance.devices:
        kind = device.get("type")
        is_gpu = kind == "gpu" and device.get("gputype", "physical") == "physical"
        address = device.get("address" if kind == "pci" else "pci")
        if (kind == "pci" or is_gpu) and address:
            yield Bdf.parse(address, f"{source}: device"), None


def with_host(vm: Vm, host: Host) -> Vm:
    """The VM with what Incus derives from the PUs on this host: order of vCPUs, cells, shape."""
    pus = pus_of(tuple(pin for pin in vm.vcpu_pins if pin is not None))
    ordered = incus_order(pus, host)
    node_of = {pu.index: pu.node for pu in host.pus}
    nodes = sorted({node for pu in ordered if (node := node_of.get(pu)) is not None})
    if not ordered or not nodes:
        return vm
    given = dict(enumerate(vm.cells))
    share = vm.memory_bytes // len(nodes)
    cells = []
    for number, node in enumerate(nodes):
        stated = given.get(number)
        vcpus = CpuSet(i for i, pu in enumerate(ordered) if node_of[pu] == node)
        size = stated.memory_bytes if stated is not None and stated.memory_bytes else share
        row = stated.distances if stated is not None else ()
        cells.append(
            VmCell(id=number, vcpus=vcpus, memory_bytes=size, nodes=CpuSet([node]), distances=row)
        )
    return structs.replace(
        vm,
        cells=tuple(cells),
        vcpu_pins=tuple(CpuSet([pu]) for pu in ordered),
        cpu_topology=_derived_topology(ordered, host),
    )


def incus_order(pus: CpuSet, host: Host) -> tuple[PuIndex, ...]:
    """The PUs in the order in which Incus makes vCPUs of them."""
    place: dict[PuIndex, tuple[int, int, int]] = {}
    for core in host.cores:
        for thread, pu in enumerate(core.pus):
            place[pu] = (core.id.package, core.index, thread)
    return tuple(sorted((pu for pu in pus if pu in place), key=lambda pu: place[pu]))


def _derived_topology(ordered: tuple[PuIndex, ...], host: Host) -> tuple[int, int, int, int]:
    core_of = {pu: core for core in host.cores for pu in core.pus}
    packages: dict[int, set[int]] = {}
    threads: dict[int, int] = {}
    for pu in ordered:
        core = core_of[pu]
        packages.setdefault(core.id.package, set()).add(core.index)
        threads[core.index] = threads.get(core.index, 0) + 1
    if len({len(one) for one in packages.values()}) == 1 and len(set(threads.values())) == 1:
        return len(packages), 1, len(next(iter(packages.values()))), next(iter(threads.values()))
    return 1, 1, len(ordered), 1


def _sections(text: str) -> list[tuple[str, list[str]]]:
    """Sections of raw.qemu.conf, each with its lines, its header first."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if _SECTION.match(line.strip()):
            found.append((line.strip(), [line]))
        elif found:
            found[-1][1].append(line)
        elif line.strip():
            found.append(("", [line]))
    return found


def _entries(lines: list[str]) -> dict[str, str]:
    pairs = (line.partition("=") for line in lines[1:] if "=" in line)
    return {key.strip(): value.strip().strip('"') for key, _, value in pairs}


def _is_ours(header: str, lines: list[str]) -> bool:
    entries = _entries(lines)
    if header.startswith("[numa]"):
        return entries.get("type") == "dist"
    return _MEMORY.match(header) is not None and set(entries) == {"size"}


def _overrides(text: str, source: str) -> tuple[dict[int, int], dict[int, tuple[int, ...]]]:
    """Sizes of cells, and rows of distances."""
    sizes: dict[int, int] = {}
    rows: dict[int, dict[int, int]] = {}
    for header, lines in _sections(text):
        entries = _entries(lines)
        memory = _MEMORY.match(header)
        if memory is not None and "size" in entries:
            sizes[int(memory[1])] = size_of(entries["size"], f"{source}: raw.qemu.conf")
        elif header.startswith("[numa]") and entries.get("type") == "dist":
            numbers = [entries.get(key, "") for key in ("src", "dst", "val")]
            if not all(n.isascii() and n.isdigit() and len(n) < 6 for n in numbers):
                raise ParseError(f"{source}: raw.qemu.conf", "src, dst and val", header)
            src, dst, val = map(int, numbers)
            rows.setdefault(src, {})[dst] = val
    return sizes, {src: tuple(row[d] for d in sorted(row)) for src, row in rows.items()}


def render(plan: Plan, guest: Vm, host: Host | None, given: bytes | None, source: str) -> Rendering:
    """The configuration with the plan in it; what is not ours stays.

    Raises InputError where Incus cannot take the plan.
    """
    name = refuse_unsafe_name(guest.name, source)
    instance = parse(given, source) if given is not None else None
    _refuse(plan, host)
    refuse_many_vcpus(plan, "incus", 255)
    if plan.layout.cells is GuestCells.MIRRORED:
        refuse_arm(guest, "incus", "guest cells")
    memory = whole_units(plan.memory_bytes, MIB, "memory", "incus")
    wanted: dict[str, str | None] = {
        "limits.cpu": _limit(plan),
        "limits.memory": f"{memory}MiB",
        _RECORD: str(Siblings.EXPOSED) if shows_siblings(plan) else None,
    }
    if instance is not None and read_vm(given or b"", source).memory_bytes == plan.memory_bytes:
        wanted["limits.memory"] = instance.value("limits.memory", source)
    if plan.vcpu_pins:
        wanted["limits.cpu.nodes"] = None
    has_hotplug = instance is not None and instance.value(_HOTPLUG, source) is not None
    if has_hotplug and plan.vcpu_pins:
        wanted[_HOTPLUG] = "false"
    if plan.page_bytes is not None:
        wanted["limits.memory.hugepages"] = "true"
    before = None if instance is None else instance.value("raw.qemu.conf", source)
    wanted["raw.qemu.conf"] = _with_overrides(before, plan)
    devices = _devices(plan, instance, host)
    findings = (*_findings(plan, host), *(() if has_hotplug else _hotplug_left(plan, name)))
    if instance is None:
        text = _new(name, wanted, devices, plan)
    else:
        text = _edited(instance, wanted, devices)
    return Rendering(text.encode(), (), findings)


def _refuse(plan: Plan, host: Host | None) -> None:
    if plan.layout.pinning is Pinning.NODE or any(len(pin) != 1 for pin in plan.vcpu_pins):
        raise InputError(
            "incus: expected a PU for each vCPU, found vCPUs that float over several",
            hint="choose --layout pin or pin-numa",
        )
    pus = pus_of(plan.vcpu_pins)
    if len(pus) < len(plan.vcpu_pins):
        raise InputError("incus: expected a PU of its own for each vCPU, found one used twice")
    shares = len({pu.node for pu in host.pus if pu.index in pus}) if host is not None else 0
    if shares and plan.memory_bytes // MIB % shares:
        raise InputError(
            f"incus: expected memory in equal shares of whole MiB for {shares} host nodes, found "
            f"{plan.memory_bytes // MIB} MiB",
            hint="choose a memory size that divides into them, or --max-nodes 1",
        )
    if plan.layout.cells is not GuestCells.MIRRORED:
        return
    cells = [cell for cell in plan.cells if cell.vcpus or cell.memory_bytes]
    nodes = {c.host_nodes for c in cells if c.vcpus and len(c.host_nodes) == 1}
    if len(nodes) < len(cells):
        raise InputError(
            "incus: expected a guest cell for each host node of its vCPUs, as Incus makes them, "
            "found cells that differ from the nodes",
            hint="choose a flat layout, or the target qemu",
        )
    _refuse_by_number(cells)


def _refuse_by_number(cells: Sequence[VmCell]) -> None:
    """What a file would say of cells by their number, which is another at each start."""
    numbered = range(len(cells)) if all(cell.distances for cell in cells) else ()
    found: dict[str, set[object]] = {
        "of equal memory": {f"{cell.memory_bytes // MIB} MiB" for cell in cells},
        "of one distance to themselves": {cells[i].distances[i] for i in numbered},
        "equally far from each other": {
            cells[i].distances[j] for i in numbered for j in numbered if i != j
        },
    }
    for wanted, values in found.items():
        if len(values) > 1:
            raise InputError(
                f"incus: expected guest cells {wanted}, since Incus numbers them in random order "
                f"at each start, found {', '.join(sorted(map(str, values)))}",
                hint="choose other cells by --cell or --max-nodes, or the target qemu",
            )


def _limit(plan: Plan) -> str:
    if not plan.vcpu_pins:
        return str(plan.vcpus)
    pus = str(pus_of(plan.vcpu_pins))
    return f"{pus}-{pus}" if pus.isdigit() else pus  # a number alone counts vCPUs


def _findings(plan: Plan, host: Host | None) -> Iterator[PlanFinding]:
    if not plan.vcpu_pins or host is None:
        return
    pus = pus_of(plan.vcpu_pins)
    planned = tuple(pu for pin in plan.vcpu_pins for pu in pin)
    if incus_order(pus, host) != planned:
        yield plan_finding(
            "target-vcpu-order",
            "Incus: order of vCPUs",
            "Incus numbers vCPUs by package, core and thread of their PUs, the plan otherwise",
        )
    node_of = {pu.index: pu.node for pu in host.pus}
    nodes = {node_of.get(pu) for pu in pus}
    if plan.layout.cells is GuestCells.FLAT and len(nodes) > 1:
        yield plan_finding(
            "target-cells-added",
            "Incus: guest cells",
            f"the layout is flat, and Incus gives the guest {len(nodes)} cells with "
            "bound memory, "
            "one for each host node of its PUs",
        )


def _hotplug_left(plan: Plan, name: str) -> Iterator[PlanFinding]:
    if plan.devices and plan.vcpu_pins:
        yield plan_finding(
            "target-not-carried",
            name,
            f"{_HOTPLUG} is not in the file, since Incus before 6.0.5 and 6.1 to 6.14 "
            "refuse it; without it newer ones keep address space for more memory in "
            "front of the devices' BARs",
            case="Incus",
        )


def _with_overrides(text: str | None, plan: Plan) -> str | None:
    """raw.qemu.conf with our sections at its end in place of those of an earlier plan."""
    kept = [
        line
        for header, lines in _sections(text or "")
        if not _is_ours(header, lines)
        for line in lines
        # The size of a cell's memory is the plan's, whatever else its section sets.
        if not (_MEMORY.match(header) and line.partition("=")[0].strip() == "size")
    ]
    while kept and not kept[-1].strip():
        kept.pop()
    return "\n".join([*kept, *_override_lines(plan)]) or None


def _override_lines(plan: Plan) -> Iterator[str]:
    cells = [cell for cell in plan.cells if cell.vcpus]
    if plan.layout.cells is not GuestCells.MIRRORED or len(cells) < 2:
        return
    # Incus writes a [numa] section for each cell and one for each vCPU.
    index = len(cells) + plan.vcpus
    for number, cell in enumerate(cells):
        for other, distance in enumerate(cell.distances[: len(cells)]):
            yield f"[numa][{index}]"
            yield 'type = "dist"'
            yield from (
                f'{key} = "{n}"' for key, n in (("src", number), ("dst", other), ("val", distance))
            )
            index += 1


def _devices(
    plan: Plan, instance: Instance | None, host: Host | None
) -> dict[str, dict[str, str] | None]:
    """New entries of `devices`, and None for those whose function the VM does not get."""
    planned = {device.bdf for device in plan.devices}
    there: set[Bdf] = set()
    changed: dict[str, dict[str, str] | None] = {}
    for block, device in () if instance is None else instance.devices:
        address = device.get("address") if device.get("type") == "pci" else device.get("pci")
        if device.get("type") not in ("gpu", "pci") or not address:
            continue
        bdf = Bdf.parse(address, "device")
        if bdf in planned:
            there.add(bdf)
        else:
            changed[block.key] = None
    names = set() if instance is None else {block.key for block, _ in instance.devices}
    ours = ("homenode" + str(number) for number in range(10_000))
    free = iter(name for name in ours if name not in names - set(changed))
    for device_planned in plan.devices:
        bdf = device_planned.bdf
        if bdf in there:
            continue
        known = None if host is None else host.device(bdf)
        is_gpu = known is not None and known.kind is DeviceKind.GPU
        changed[next(free)] = (
            {"type": "gpu", "gputype": "physical", "pci": str(bdf)}
            if is_gpu
            else {"type": "pci", "address": str(bdf)}
        )
    return changed


def _new(
    name: str,
    wanted: Mapping[str, str | None],
    devices: Mapping[str, Mapping[str, str] | None],
    plan: Plan,
) -> str:
    lines = [f"# homenode: layout {plan.layout.name}; incus config edit NAME < FILE\n"]
    lines += [f"name: {quoted(name)}\n", "type: virtual-machine\n", "config:\n"]
    for key, value in sorted(wanted.items()):
        lines += [] if value is None else entry_lines("  ", key, value, "\n")
    shown = {key: one for key, one in devices.items() if one is not None}
    lines += ["devices:\n"] if shown else ["devices: {}\n"]
    for key, entries in shown.items():
        lines += mapping_lines(key, entries, "  ", "\n")
    return "".join(lines)


def _edited(
    instance: Instance,
    wanted: Mapping[str, str | None],
    devices: Mapping[str, Mapping[str, str] | None],
) -> str:
    lines = list(instance.lines)
    end = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += end
    blocks = [block for block, _ in instance.devices]
    edits = [
        *mapping_edits(instance.lines, instance.top, "config", instance.config, wanted, end),
        *mapping_edits(instance.lines, instance.top, "devices", blocks, devices, end),
    ]
    for first, last, new in sorted(edits, key=lambda edit: edit[0], reverse=True):
        lines[first:last] = new
    return "".join(lines)


TARGET = Target(
    title="Incus",
    source="doc/reference/instance_options.md and instance driver of Incus 6.0 to 7.3",
    support=SUPPORT,
    unread=frozenset(("iothreads", "topology", "pages", "cell-pages")),
    render=render,
    read_vm=read_vm,
    recognises=is_config,
    architecture_of_host=True,
    needs_host=True,
    runs_qemu=True,
    as_started=with_host,
)
