"""CloudHypervisor: the plan as arguments: vCPU affinity, memory zones, NUMA nodes, PCI segments.

Grammar as docs/cpu.md, memory.md, vfio.md and the tests of Cloud Hypervisor have it: an option has
one or more values; a value is KEY=VALUE pairs by commas; lists stand in [ ].
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError, ParseError
from homenode.pci import canonical_uuid
from homenode.plan.model import Plan
from homenode.targets.qemu_command import size_of, size_text
from homenode.targets.script import PREPARE, plan_values, quoted, without_continuation
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
    refuse_many_vcpus,
    refuse_unsafe_name,
)
from homenode.topology import Host
from homenode.units import MIB
from homenode.vm.layout import GuestCells
from homenode.vm.model import Vm, VmCell
from homenode.wording import printable

SUPPORT = {
    Feature.VCPU_PINS: native("`--cpus affinity=`"),
    Feature.EMULATOR_PINS: indirect(
        "taskset around the program", "its vCPU threads are moved off again by affinity alone"
    ),
    Feature.IOTHREAD_PINS: lost(
        "the plan's IOThreads are QEMU's; queues are pinned with the disk", "disk queues float"
    ),
    Feature.TOPOLOGY: native("`--cpus topology=`"),
    Feature.THREADS: native("`--cpus topology=`"),
    Feature.DIES: native("`--cpus topology=`"),
    Feature.CACHE: lost(
        "caches are the host's, as CPUID says them", "an LLC may look shared by all"
    ),
    Feature.CELLS: native("`--numa`"),
    Feature.UNEQUAL_CELLS: native("`--memory-zone size=`"),
    Feature.DISTANCES: native("`--numa distances=`"),
    Feature.MEMORY_NODES: native("`--memory-zone host_numa_node=`"),
    Feature.MEMORY_MODE: lost(
        "zones are bound to one node", "memory may not come from other nodes"
    ),
    Feature.HUGE_PAGES: native("`--memory-zone hugepages=on,hugepage_size=`"),
    Feature.DEVICES: indirect(
        "`--device path=`", "nothing keeps another VM from taking the same device"
    ),
    Feature.DEVICE_CELLS: native("`--numa pci_segments=`, `--device pci_segment=`"),
    Feature.DEVICE_TREE: lost(
        "devices are endpoints of their segment's root", "the guest sees no switches"
    ),
    Feature.INITIATORS: native("`--numa device_id=`"),
    Feature.WINDOW: native("every segment has its own window, sized by the program"),
    Feature.IOMMU: lost("its IOMMU is virtio-iommu", "more than 254 vCPUs are refused"),
    Feature.VGPUS: lost(
        "NVIDIA's vGPU manager finds the VM of a vGPU by the -uuid of QEMU's command line",
        "vGPUs are refused",
    ),
}

_WORD = re.compile(r"""(?:[^\s"'\\]|\\[^\n]|"(?:[^"\\]|\\.)*+"|'[^']*+')++""")
_PROGRAM = re.compile(r"(?:[^\s\"']*/)?cloud-hypervisor(?:-static)?\Z", re.ASCII)
_COMMAND = re.compile(
    r"^[^#\n'\"(]*(?:^|[\s/])cloud-hypervisor(?:-static)?[ \t\r\n\\]", re.MULTILINE
)
_OURS = ("--cpus", "--memory", "--memory-zone", "--numa", "--platform", "--device")
_MOST_SEGMENTS = 96
_OUR_ID = re.compile(r"homenode[0-9]{1,4}\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Option:
    """An option with its values. start, end: in the text, from the option to its last value."""

    name: str
    values: tuple[str, ...]
    start: int
    end: int


def is_command(content: bytes) -> bool:
    """Whether this is a command of Cloud Hypervisor."""
    return _COMMAND.search(content[:1_000_000].decode("utf-8", "replace")) is not None


def _tokens(text: str, source: str) -> Iterator[tuple[str, int, int]]:
    """Words of a shell with their places; comments are left out. Raises ParseError."""
    at = 0
    while at < len(text):
        if text[at].isspace():
            at += 1
        elif text.startswith("\\\n", at) or text.startswith("\\\r\n", at):
            at = text.index("\n", at) + 1
        elif text[at] == "#":
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        else:
            match = _WORD.match(text, at)
            if match is None:
                raise ParseError(source, "words of a shell", text[at : at + 40])
            yield match[0], at, match.end()
            at = match.end()


def parse(content: bytes, source: str) -> tuple[str, tuple[Option, ...]]:
    """The text of a command and its options. Raises ParseError."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise ParseError(source, "a command in UTF-8", "other bytes") from None
    spans = list(_tokens(text, source))
    first = next((i for i, span in enumerate(spans) if _PROGRAM.match(span[0])), None)
    if first is None:
        raise ParseError(source, "a command of cloud-hypervisor", "none")
    options: list[Option] = []
    for word, start, end in spans[first + 1 :]:
        try:
            (bare,) = shlex.split(word)
        except ValueError:
            raise ParseError(source, "a word of a shell", word) from None
        if bare.startswith("--"):
            name, equals, value = bare.partition("=")
            options.append(Option(name, (value,) if equals else (), start, end))
        elif bare == "$@" or not options:
            continue
        else:
            last = options.pop()
            options.append(Option(last.name, (*last.values, bare), last.start, end))
    for name in ("--cpus", "--memory", "--platform"):
        if sum(option.name == name for option in options) > 1:
            raise ParseError(source, f"{name} once", "it again")
    return text, tuple(options)


def fields_of(value: str) -> dict[str, str]:
    """The keys of a value; commas in [ ] are of its list.

    >>> fields_of("guest_numa_id=0,cpus=[0-3,8],memory_zones=mem0")
    {'guest_numa_id': '0', 'cpus': '[0-3,8]', 'memory_zones': 'mem0'}
    """
    words, depth, word = [], 0, ""
    for letter in value:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            words.append(word)
            word = ""
        else:
            word += letter
    if depth:
        raise ParseError("Cloud Hypervisor", "a value whose brackets are closed", value[:60])
    return {key: text for key, _, text in (one.partition("=") for one in (*words, word) if one)}


def _list(value: str) -> list[str]:
    """The elements of [a,b] or a; those of older releases are separated by colons."""
    inside = value.removeprefix("[").removesuffix("]") if value.startswith("[") else value
    found, depth, word = [], 0, ""
    for letter in inside:
        depth += (letter == "[") - (letter == "]")
        if letter in ",:" and not depth:
            found.append(word.strip())
            word = ""
        else:
            word += letter
    return [*found, word.strip()] if word.strip() else found


def _number(keys: Mapping[str, str], key: str, source: str) -> int:
    text = keys.get(key, "")
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ParseError(f"{source}: {key}", "a number", text)
    return int(text)


def _of(options: Iterable[Option], name: str) -> list[dict[str, str]]:
    return [
        fields_of(value) for option in options if option.name == name for value in option.values
    ]


def read_vm(content: bytes, source: str) -> Vm:
    """The VM of a command."""
    _, options = parse(content, source)
    cpus = next(iter(_of(options, "--cpus")), {"boot": "1"})
    topology = None
    if "topology" in cpus:
        counts = cpus["topology"].split(":")
        if len(counts) != 4 or not all(c.isdigit() and len(c) < 6 for c in counts):
            raise ParseError(f"{source}: topology", "threads:cores:dies:packages", cpus["topology"])
        threads, cores, dies, packages = map(int, counts)
        topology = (packages, dies, cores, threads)
    vcpus = _number(cpus, "boot", f"{source}: --cpus")
    zones = {keys.get("id", ""): keys for keys in _of(options, "--memory-zone")}
    memory = next(iter(_of(options, "--memory")), {"size": "512M"})
    sizes = {
        name: size_of(keys.get("size", ""), f"{source}: --memory-zone")
        for name, keys in zones.items()
    }
    total = size_of(memory.get("size", "0"), f"{source}: --memory") + sum(sizes.values())
    nodes = sorted(_of(options, "--numa"), key=lambda keys: _number(keys, "guest_numa_id", source))
    cell_of_segment: dict[int, int] = {}
    cells, ids = [], {}
    for keys in nodes:
        number = _number(keys, "guest_numa_id", source)
        for segment in _list(keys.get("pci_segments", "")):
            cell_of_segment[_number({"pci_segments": segment}, "pci_segments", source)] = number
        if "device_id" in keys:
            ids[number] = keys["device_id"]
        cells.append(_cell(keys, number, zones, sizes, len(nodes), source))
    homes = {keys["host_numa_node"] for keys in zones.values() if "host_numa_node" in keys}
    bound = ("strict", CpuSet.parse(",".join(sorted(homes)), source)) if homes else None
    devices, name_of = [], {}
    for keys in _of(options, "--device"):
        host = _device(keys)
        cell = cell_of_segment.get(_number({"s": keys.get("pci_segment", "0")}, "s", source))
        devices.append((host, cell))
        if isinstance(host, Bdf):
            name_of[keys.get("id", "")] = host
    initiators: dict[Bdf, list[int]] = {}
    for number, name in ids.items():
        if name in name_of:
            initiators.setdefault(name_of[name], []).append(number)
    pages = {cell_pages(keys, source) for keys in (*zones.values(), memory)} - {None}
    owned = {bdf: CpuSet(numbers) for bdf, numbers in initiators.items()}
    hostdevs, mediated = passed_through(devices, owned)
    arm = any("aarch64" in value for option in options for value in option.values)
    architecture = "aarch64" if arm else "x86_64"
    platform = next(iter(_of(options, "--platform")), {})
    security = "tdx" if platform.get("tdx") == "on" else None
    return Vm(
        name="vm",
        source=source,
        architecture=architecture,
        machine=default_machine(architecture),
        launch_security="sev-snp" if platform.get("sev_snp") == "on" else security,
        cpu_mode="host-passthrough",
        vcpus=vcpus,
        cpu_topology=topology,
        memory_bytes=total,
        page_bytes=max((page for page in pages if page is not None), default=None),
        binding=bound,
        cells=tuple(cells),
        vcpu_pins=_affinity(cpus.get("affinity"), vcpus, source) or (None,) * vcpus,
        emulator_pus=_emulator(content, source),
        hostdevs=hostdevs,
        mediated=mediated,
    )


def _device(keys: Mapping[str, str]) -> Bdf | str:
    name = keys.get("path", "").rstrip("/").rpartition("/")[2]
    return canonical_uuid(name) or Bdf.parse(name, "--device path")


def _emulator(content: bytes, source: str) -> CpuSet | None:
    match = re.search(rb"taskset -c ([0-9,-]{1,4000}) ", content)
    return None if match is None else CpuSet.parse(match[1].decode(), f"{source}: taskset")


def cell_pages(keys: Mapping[str, str], source: str) -> int | None:
    """Bytes of a zone's huge pages; 0 = the default size, None = ordinary pages."""
    if keys.get("hugepages") not in ("on", "true"):
        return None
    return size_of(keys["hugepage_size"], source) if "hugepage_size" in keys else 0


def _cell(
    keys: Mapping[str, str],
    number: int,
    zones: Mapping[str, Mapping[str, str]],
    sizes: Mapping[str, int],
    count: int,
    source: str,
) -> VmCell:
    names = _list(keys.get("memory_zones", ""))
    unknown = [name for name in names if name not in zones]
    if unknown:
        raise ParseError(f"{source}: memory_zones", "zones of --memory-zone", unknown[0])
    homes = [zones[name]["host_numa_node"] for name in names if "host_numa_node" in zones[name]]
    stated = {number: 10}
    for pair in _list(keys.get("distances", "")):
        other, _, distance = pair.partition("@")
        stated[_number({"n": other}, "n", source)] = _number({"d": distance}, "d", source)
    pages = {cell_pages(zones[name], source) for name in names} - {None}
    return VmCell(
        id=number,
        vcpus=CpuSet.parse(",".join(_list(keys.get("cpus", ""))), f"{source}: cpus")
        if keys.get("cpus")
        else CpuSet(),
        memory_bytes=sum(sizes[name] for name in names),
        nodes=CpuSet.parse(",".join(homes), source) if homes else CpuSet(),
        mode="strict" if homes else None,
        distances=tuple(stated[i] for i in sorted(stated)) if len(stated) == count > 1 else (),
        page_bytes=max((page for page in pages if page is not None), default=None),
    )


def _affinity(text: str | None, vcpus: int, source: str) -> tuple[CpuSet | None, ...]:
    if text is None:
        return ()
    pins: list[CpuSet | None] = [None] * vcpus
    for pair in _list(text):
        vcpu, _, pus = pair.partition("@")
        number = _number({"vcpu": vcpu}, "vcpu", f"{source}: affinity")
        if number >= vcpus:
            raise ParseError(f"{source}: affinity", f"vCPUs below {vcpus}", vcpu)
        pins[number] = CpuSet.parse(",".join(_list(pus)), f"{source}: affinity")
    return tuple(pins)


def render(plan: Plan, guest: Vm, host: Host | None, given: bytes | None, source: str) -> Rendering:
    """The command with the plan in it, and a script that prepares the host.

    Raises InputError where Cloud Hypervisor cannot take the plan.
    """
    refuse_unsafe_name(guest.name, source)
    refuse_many_vcpus(plan, "cloud-hypervisor", 254)
    prepare = _prepare_script(plan)
    if given is None:
        emulator = "" if plan.emulator_pus is None else f"taskset -c {plan.emulator_pus} "
        words = _joined(_words(plan, {}), " \\\n  ")
        text = (
            "#!/usr/bin/env bash\n"
            f"# homenode: VM {printable(guest.name)}, layout {plan.layout.name}.\n"
            "# More words go to Cloud Hypervisor: --kernel, --disk, --net.\nset -euo pipefail\n"
            f'exec {emulator}cloud-hypervisor \\\n  {words} \\\n  "$@"\n'
        )
        return Rendering(text.encode(), ((".prepare.sh", prepare.encode()),))
    text, options = parse(given, source)
    after = _edited(text, options, plan)
    same = read_vm(after.encode(), source) == read_vm(given, source)
    text = text if same and not plan.vcpu_pins else after
    return Rendering(text.encode(), ((".prepare.sh", prepare.encode()),))


def _prepare_script(plan: Plan) -> str:
    values = plan_values(plan)
    return (
        "#!/usr/bin/env bash\n# homenode: reserve huge pages, give the devices to vfio-pci. "
        "Run as root before the VM starts.\nset -euo pipefail\n\n"
        f"{_array_of(values, 'devices')}{_array_of(values, 'huge_pages')}{PREPARE}\nprepare\n"
    )


def _array_of(text: str, name: str) -> str:
    start = text.index(f"{name}=(")
    end = text.index(")\n", start) + 2
    return text[start:end]


def _joined(words: list[tuple[str, str]], separator: str) -> str:
    """Options with their values; one that follows another of its name adds its value to it."""
    text, last = "", ""
    for name, value in words:
        text += (" " if name == last else f"{separator}{name} ") + quoted(value)
        last = name
    return text.removeprefix(separator)


def _merged(keys: Mapping[str, str], wanted: Mapping[str, str | None]) -> str:
    """The keys of a value with ours in them; None takes one away."""
    merged = {**keys, **wanted}
    return ",".join(f"{key}={value}" for key, value in merged.items() if value is not None)


def _words(
    plan: Plan, there: Mapping[str, Mapping[str, str]], ids: Mapping[Bdf, str] | None = None
) -> list[tuple[str, str]]:
    shape = plan.topology
    affinity = ",".join(f"{vcpu}@[{pus}]" for vcpu, pus in enumerate(plan.vcpu_pins))
    cpus: dict[str, str | None] = {"boot": str(plan.vcpus)}
    given = there.get("--cpus", {})
    if "max" in given:
        cpus["max"] = str(plan.vcpus)
    if shape is not None:
        cpus["topology"] = f"{shape.threads}:{shape.cores}:{shape.dies}:{shape.sockets}"
    elif "topology" in given and given.get("boot") != str(plan.vcpus):
        cpus["topology"] = None
    if plan.vcpu_pins:
        cpus["affinity"] = f"[{affinity}]"
    words = [("--cpus", _merged(given, cpus))]
    words += _memory_words(plan, there.get("--memory", {}))
    segments = sorted({d.cell for d in plan.devices if d.cell is not None})
    if len(segments) >= _MOST_SEGMENTS:
        raise InputError(f"cloud-hypervisor: expected fewer than {_MOST_SEGMENTS} cells")
    # Segment 0 holds the VM's own devices, on the first cell with devices or none.
    of_cell = {cell: number for number, cell in enumerate(segments, start=1)}
    platform = there.get("--platform", {})
    if of_cell:
        count = {"num_pci_segments": str(len(of_cell) + 1)}
        words.append(("--platform", _merged(platform, count)))
    elif platform:
        words.append(("--platform", _merged(platform, {})))
    given_ids = ids or {}
    names = {d.bdf: given_ids.get(d.bdf, "homenode" + str(i)) for i, d in enumerate(plan.devices)}
    owner: dict[int, str] = {
        cell: names[device.bdf] for device in plan.devices for cell in device.initiator_cells
    }
    if plan.layout.cells is GuestCells.MIRRORED:
        for cell in plan.cells:
            pairs = [f"guest_numa_id={cell.id}"]
            if cell.vcpus:
                pairs.append(f"cpus=[{cell.vcpus}]")
            others = [f"{o}@{d}" for o, d in enumerate(cell.distances) if o != cell.id]
            if others:
                pairs.append(f"distances=[{','.join(others)}]")
            if cell.memory_bytes:
                pairs.append(f"memory_zones=[mem{cell.id}]")
            if cell.id in of_cell:
                pairs.append(f"pci_segments=[{of_cell[cell.id]}]")
            if cell.id in owner:
                pairs.append(f"device_id={owner[cell.id]}")
            words.append(("--numa", ",".join(pairs)))
    for device in plan.devices:
        segment = "" if device.cell is None else f",pci_segment={of_cell[device.cell]}"
        path = f"/sys/bus/pci/devices/{device.bdf}/"
        words.append(("--device", f"path={path},id={names[device.bdf]}{segment}"))
    return words


def _memory_words(plan: Plan, given: Mapping[str, str]) -> list[tuple[str, str]]:
    pages: dict[str, str | None] = {}
    if plan.page_bytes is not None:
        pages = {"hugepages": "on"}
        if plan.page_bytes:
            pages["hugepage_size"] = size_text(plan.page_bytes)
    mirrored = plan.layout.cells is GuestCells.MIRRORED
    if not mirrored and plan.memory_mode is None:
        return [("--memory", _merged(given, {"size": size_text(plan.memory_bytes), **pages}))]
    kept = {key: text for key, text in given.items() if key not in ("hugepages", "hugepage_size")}
    words = [("--memory", _merged(kept, {"size": "0"}))]
    shared = {key: given[key] for key in ("shared", "mergeable") if key in given}
    for name, size, node in _zones_of_cells(plan) if mirrored else _zones_of_nodes(plan):
        if size:
            bound = {"host_numa_node": str(node)} if plan.memory_mode is not None else {}
            zone = {"id": f"mem{name}", "size": size_text(size), **bound, **pages, **shared}
            words.append(("--memory-zone", _merged({}, zone)))
    return words


def _zones_of_cells(plan: Plan) -> list[tuple[int, int, int]]:
    """Number, bytes and host node of each cell's zone."""
    nodes = one_node_each(plan, "cloud-hypervisor")
    pairs = zip(plan.cells, nodes, strict=True)
    return [(cell.id, cell.memory_bytes, node) for cell, node in pairs]


def _zones_of_nodes(plan: Plan) -> list[tuple[int, int, int]]:
    """The same of a flat guest, whose zones are no cells of it: one for each host node, as the huge
    pages are reserved, else in equal parts."""
    if plan.page_reservations:
        sizes = {one.node: one.page_bytes * one.pages for one in plan.page_reservations}
        return [(number, sizes[node], node) for number, node in enumerate(sorted(sizes))]
    unit = plan.page_bytes or MIB
    share = plan.memory_bytes // unit // len(plan.memory_nodes) * unit
    rest = plan.memory_bytes - share * len(plan.memory_nodes)
    return [
        (number, share + (rest if number == 0 else 0), node)
        for number, node in enumerate(plan.memory_nodes)
    ]


def _edited(text: str, options: tuple[Option, ...], plan: Plan) -> str:
    """The text with our options taken out and written again where the first of them was."""
    there = {
        option.name: fields_of(option.values[0])
        for option in options
        if option.name in ("--cpus", "--memory", "--platform") and option.values
    }
    planned = {device.bdf for device in plan.devices}
    ours = [option for option in options if option.name in _OURS]
    devices = [(_device(keys), keys) for keys in _of(ours, "--device")]
    ids = {bdf: keys["id"] for bdf, keys in devices if "id" in keys and isinstance(bdf, Bdf)}
    words = _words(plan, there, {b: i for b, i in ids.items() if not _OUR_ID.match(i)})
    for bdf, keys in devices:
        if isinstance(bdf, str):
            words.append(("--device", _merged({}, keys)))  # of no plan: it stays
        elif bdf in planned:
            words = [
                (name, _carried(value, keys) if f"/{bdf}/" in value else value)
                for name, value in words
            ]
    continued = "\\\n" in text
    separator = " \\\n  " if continued else " "
    start = ours[0].start if ours else len(text.rstrip())
    new = _joined(words, separator)
    for option in reversed(ours[1:]):
        before = text[: option.start]
        head = without_continuation(before)
        text = head + text[option.end :]
    if ours:
        return text[:start] + new + text[ours[0].end :]
    return text[:start] + separator + new + text[start:]


def _carried(ours: str, keys: Mapping[str, str]) -> str:
    """Our value of a device with the other keys that it had."""
    mine = fields_of(ours)
    more = {key: text for key, text in keys.items() if key not in ("path", "pci_segment", "id")}
    return _merged(mine, dict(more))


TARGET = Target(
    title="Cloud Hypervisor",
    source="docs/cpu.md, docs/memory.md and docs/vfio.md of Cloud Hypervisor, main of 2026-08",
    support=SUPPORT,
    unread=frozenset(("iothreads",)),
    render=render,
    read_vm=read_vm,
    recognises=is_command,
    architecture_of_host=True,
)
