"""HostText: the screen of a host, and the complete host as a tree."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.doc import Doc, Section, Span, Table, Text, Tree, Words
from homenode.findings import format_gaps
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import (
    DomainMark,
    Host,
    MemoryKind,
    NumaNode,
    RunningDomain,
    complete_nodes,
)
from homenode.show.device_groups import (
    DeviceCard,
    NodeDevices,
    RootComplexGroup,
    SwitchGroup,
    find_device_model,
    format_address,
    format_card_extras,
    format_card_title,
    format_divisions,
    format_link,
    format_links,
    group_by_node,
    has_short_addresses,
    number_gpus,
)
from homenode.show.host_groups import (
    KIND_WORDS,
    CoreGroup,
    NodeBlock,
    build_package_frames,
    format_host_counts,
    format_llc_parts,
    format_memory_parts,
    format_settings,
    list_core_groups,
    list_cpuless_nodes,
    memory_nodes,
)
from homenode.text import format_cpus, format_nodes, number_list, plural
from homenode.units import format_bytes

ASSUMED = "assumed (described, not captured; no source prints it)"
"""Heading of the assumptions of a described host."""

_MAX_ROWS = 16  # GPUs up to which each has a row; beyond, a row per node
_MAX_NODES = 4  # nodes with CPUs whose distances fit a row
_LOOKS = {"unknown": "warn"}
_MAX_LINES = 4  # lines of one label
_MAX_CPUS = 20  # characters of a CPU list in a cell


def format_host(host: Host) -> Doc:
    """Return the screen of a host: the counts, a table of nodes, one of GPUs, then labels."""
    host = complete_nodes(host)
    groups = group_by_node(host)
    assumptions = plural(len(host.assumed), "assumption")
    has_pages = any(node.page_pools for node in host.nodes)
    rows = {
        "CPU": [_format_cpu(host)],
        "GPUs": _format_gpus(host),
        "parts": _format_parts(host, groups),
        "NICs": _format_nics(groups),
        "NVSwitch": _format_switches(host),
        "memory": [_memory_line(host)],
        "host": [_format_software(host)],
        "nodes": _format_memory_nodes(host),
        "distances": [_format_distance(host)],
        "VMs": [_Branches(host).format_domain(domain) for domain in host.domains],
        "assumed": [f"described, not captured; {assumptions}: --explain"] if host.assumed else [],
        "unknown": [*format_gaps(host.gaps), "" if has_pages else "huge pages"],
    }
    lines = {label: [text for text in texts if text] for label, texts in rows.items()}
    width = max((len(label) for label, texts in lines.items() if texts), default=0) + 2
    labels = [
        Text(
            (Span((label if not number else "").ljust(width), _LOOKS.get(label, "")), text),
            hang=width,
        )
        for label, texts in lines.items()
        for number, text in enumerate(_shorten(texts))
    ]
    line = f"{host.name}: {format_host_counts(host)}"
    while len(line) > _MAX_HEAD and ", " in line:
        line = line.rpartition(", ")[0]  # without the NICs and GPUs, which have labels and rows
    head = Text(line, "bold")
    return Doc(
        "", (head, _build_node_table(host), _build_gpu_table(host, groups), Text(""), *labels)
    )


_MAX_HEAD = 80


def _shorten(texts: Sequence[str]) -> list[str]:
    if len(texts) <= _MAX_LINES:
        return list(texts)
    return [*texts[: _MAX_LINES - 1], f"{len(texts) - _MAX_LINES + 1} more: --explain"]


def _build_node_table(host: Host) -> Table:
    """Return a row for each node with CPUs; empty columns are omitted."""
    placed_nodes = [(at, node) for at, node in enumerate(host.nodes) if node.pus]
    names = number_gpus(host)
    matrix = host.distances if 1 < len(placed_nodes) <= _MAX_NODES else None
    rows = []
    for at, node in placed_nodes:
        devices = (d for d in host.pci_devices if d.node == node.index)
        functions = [device for device in devices if device.physical_function is None]
        gpus = [names[device.bdf] for device in functions if device.bdf in names]
        nics = sum(device.kind is DeviceKind.NIC for device in functions)
        distances = [str(matrix[at][to]) for to, _ in placed_nodes] if matrix else []
        groups = list_core_groups(host, node.pus)
        rows.append(
            (
                str(node.index),
                str(sum(len(group.cores) for group in groups) or "unknown"),
                _shorten_cpus(node.pus),
                _cache_cell(groups),
                _format_size(node.memory_bytes),
                _format_size(node.memory_free_bytes),
                f"gpu{number_list(gpus)}" if gpus else "-",
                str(nics or "-"),
                " ".join(distances) or "-",
            )
        )
    heads = ("node", "cores", "CPUs", "L3", "memory", "free", "GPUs", "NICs", "distances")
    return _build_filled_table(heads, rows, numeric=("cores", "memory", "free", "NICs"))


def _build_filled_table(
    heads: Sequence[str], rows: Sequence[tuple[str, ...]], numeric: tuple[str, ...] = ()
) -> Table:
    """Return a table without the columns in which each cell is "-"."""
    shown_columns = [at for at, _ in enumerate(heads) if any(row[at] != "-" for row in rows)]
    return Table(
        heads=tuple(heads[at] for at in shown_columns),
        rows=tuple(tuple(row[at] for at in shown_columns) for row in rows),
        numeric=numeric,
        least=tuple(head for head in heads[-3:] if head in ("distances", "NVMe", "NICs on it")),
    )


def _format_size(size_bytes: int | None) -> str:
    return "unknown" if size_bytes is None else format_bytes(size_bytes)


def _cache_cell(groups: Sequence[CoreGroup]) -> str:
    llcs = {group.llc.index: group.llc for group in groups if group.llc is not None}
    sizes = Counter(_format_size(llc.size_bytes) for llc in llcs.values())
    cells = (size if count == 1 else f"{count}x {size}" for size, count in sizes.items())
    return ", ".join(cells) or "unknown"


def _shorten_cpus(pus: CpuSet) -> str:
    """Shorten a long CPU list to its first three and last two parts.

    >>> _shorten_cpus(CpuSet.parse("0,2,4,6,8,10,12,14,16,18"))
    '0,2,4 ... 16,18'
    """
    parts = str(pus).split(",")
    if len(str(pus)) <= _MAX_CPUS or len(parts) <= 5:
        return str(pus)
    return f"{','.join(parts[:3])} ... {','.join(parts[-2:])}"


def _list_cards(groups: Iterable[NodeDevices]) -> Iterator[tuple[SwitchGroup, DeviceCard]]:
    for group in groups:
        for switch in (switch for root in group.complexes for switch in root.groups):
            yield from ((switch, card) for card in switch.cards)


def _build_gpu_table(host: Host, groups: Sequence[NodeDevices]) -> Table:
    """Return a row per GPU with its switch's devices; if many, a row for equal GPUs of a node."""
    numbers, short = number_gpus(host), has_short_addresses(host)
    gpus_of: dict[tuple[str, ...], list[Bdf]] = {}
    for switch, card in _list_cards(groups):
        device = card.device
        if device.bdf in numbers:
            node = "unknown" if device.node is None else str(device.node)
            cells: tuple[str, ...] = (format_link(device.link) or "unknown", node)
            if len(numbers) <= _MAX_ROWS:
                on_switch = () if switch.switch is None else switch.cards
                beside = [
                    ", ".join(
                        format_card_title(other, None, short).rpartition(" ")[2]
                        for other in on_switch
                        if other.device.kind is kind
                    )
                    for kind in (DeviceKind.NIC, DeviceKind.NVME)
                ]
                port = "" if switch.switch is None else str(switch.switch.bdf)
                cells = (*cells, *(cell or "-" for cell in (port, *beside)), str(device.bdf))
            gpus_of.setdefault(cells, []).append(device.bdf)
    rows = [
        (
            f"gpu{number_list(numbers[bdf] for bdf in bdfs)}",
            f"{bdfs[0]}{' ...' if len(bdfs) > 1 else ''}",
            *(*cells, "-", "-", "-")[:5],
        )
        for cells, bdfs in sorted(gpus_of.items(), key=lambda item: item[1])
    ]
    return _build_filled_table(
        ("GPU", "address", "link", "node", "switch", "NICs on it", "NVMe"), rows
    )


def _format_parts(host: Host, groups: Sequence[NodeDevices]) -> list[str]:
    """Return the parts of each divided GPU."""
    numbers = number_gpus(host)
    return [
        f"gpu{numbers[card.device.bdf]}: {', '.join(parts)}"
        for _, card in _list_cards(groups)
        if card.device.bdf in numbers and (parts := format_divisions(card))
    ]


def _format_cpu(host: Host) -> str:
    """Describe model, kinds of cores, SMT, governor, and isolated CPUs."""
    name = re.sub(r"\((?:R|TM)\)|\bCPU\b|@.*", "", host.cpu.name or host.cpu.vendor or "")
    kinds = Counter(core.kind for core in host.cores if core.kind is not None)
    smt = {"on": "SMT on", "off": "SMT off", "notsupported": "no SMT"}
    parts = [" and ".join(f"{count} {KIND_WORDS[kind]}" for kind, count in kinds.items())]
    parts.append(smt.get(host.settings.smt_control or "", ""))
    if host.settings.governors:
        parts.append(f"governor {', '.join(host.settings.governors)}")
    parts += [f"{title} {_shorten_cpus(pus)}" for title, pus in _list_marked_cpus(host)]
    return "; ".join(filter(None, (" ".join(name.split()), ", ".join(filter(None, parts)))))


def _format_gpus(host: Host) -> list[str]:
    """Count the GPUs of each model, with the links between them."""
    gpus = host.whole_gpus
    models = Counter(find_device_model(device) or "of unknown model" for device in gpus)
    first = ", ".join(f"{count} {model}" for model, count in models.items())
    between_all = f": GPUs 0-{len(gpus) - 1}, every pair"
    links = [line.replace(between_all, " between all pairs") for line in format_links(host)]
    if len(links) == 1 and first:
        return [f"{first}; {links[0]}"]
    return [first, *links]


def _format_nics(groups: Sequence[NodeDevices]) -> list[str]:
    """Count the NICs of each model and link; a card with several ports counts its functions."""
    counts: dict[tuple[str, str, bool], int] = {}
    for card in (card for _, card in _list_cards(groups) if card.device.kind is DeviceKind.NIC):
        ports = [f for f in card.functions if f.kind is DeviceKind.NIC]
        model = find_device_model(card.device) or "of unknown model"
        key = (model, format_link(card.device.link) or "link unknown", len(ports) > 1)
        counts[key] = counts.get(key, 0) + len(ports)
    texts = [
        f"{plural(count, 'function') + ' of' if is_split else count} {model} ({link})"
        for (model, link, is_split), count in counts.items()
    ]
    return [", ".join(texts)] if len(texts) < 4 else texts


def _format_switches(host: Host) -> list[str]:
    lines = []
    for node in dict.fromkeys(device.node for device in host.devices_of_kind(DeviceKind.NVSWITCH)):
        bdfs = [d.bdf for d in host.devices_of_kind(DeviceKind.NVSWITCH) if d.node == node]
        last = f" to {format_address(bdfs[-1], has_short_addresses(host))}" if len(bdfs) > 1 else ""
        place = "node unknown" if node is None else f"node {node}"
        lines.append(f"{len(bdfs)}: {bdfs[0]}{last}, {place}")
    return lines


def _memory_line(host: Host) -> str:
    """Describe huge pages of all nodes, transparent huge pages and NUMA balancing."""
    pages: dict[int, list[int]] = {}
    for pool in (pool for node in host.nodes for pool in node.page_pools if pool.total_pages):
        counts = pages.setdefault(pool.page_bytes, [0, 0])
        counts[0] += pool.free_pages
        counts[1] += pool.total_pages
    parts = [
        f"{free:,} of {total:,} pages of {format_bytes(size)} free"
        for size, (free, total) in pages.items()
    ]
    settings = host.settings
    if settings.transparent_hugepages:
        parts.append(f"transparent huge pages {settings.transparent_hugepages}")
    if settings.numa_balancing is not None:
        parts.append(f"NUMA balancing {'on' if settings.numa_balancing else 'off'}")
    return ", ".join(parts)


def _format_memory_nodes(host: Host) -> list[str]:
    """List the nodes without CPUs by kind of memory."""
    same_size: dict[str, list[int]] = {}
    for node in host.nodes:
        if not node.pus:
            kind = " of GPU memory each" if node.memory_kind is MemoryKind.GPU else ""
            text = format_memory_parts(node)[0] + (kind if node.memory_bytes else "")
            same_size.setdefault(text, []).append(node.index)
    return [f"{format_nodes(at)} without CPUs: {text}" for text, at in same_size.items()]


def _format_distance(host: Host) -> str:
    """Return the range of distances between nodes with CPUs, if too many for a row."""
    placed_nodes = [(at, node.package) for at, node in enumerate(host.nodes) if node.pus]
    if host.distances is None or len(placed_nodes) <= _MAX_NODES:
        return ""
    classes: dict[str, set[int]] = {}
    for (at, package), (to, other_package) in permutations(placed_nodes, 2):
        name = "within a package" if package == other_package else "between packages"
        classes.setdefault(name, set()).add(host.distances[at][to])
    return ", ".join(
        f"{min(values)}{f' to {max(values)}' if len(values) > 1 else ''} {name}"
        for name, values in sorted(classes.items(), reverse=True)
    )


def _format_software(host: Host) -> str:
    settings = host.settings
    versions = (("libvirt", settings.libvirt_version), ("QEMU", settings.qemu_version))
    parts = [f"Linux {settings.kernel_release}"] if settings.kernel_release else []
    parts += [f"{tool} {'.'.join(map(str, version))}" for tool, version in versions if version]
    return ", ".join(parts)


def build_host_tree(host: Host) -> Doc:
    """Return the complete host: counts, packages, devices, links, users, distances, gaps."""
    head = (Span(host.name, "bold"), f": {format_host_counts(host)}")
    tree = Tree(head, tuple(_Branches(host).build_branches()))
    gaps = [Text(str(gap), indent=2) for gap in host.gaps]
    count = [Text(f"{plural(len(gaps), 'unknown fact')}:", "bold")] if gaps else []
    return Doc("", (tree, *_format_distances(host), *count, *gaps))


class _Branches:
    """The branches of a host's tree."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.devices = group_by_node(host, everything=True)
        self.gpus = number_gpus(host)
        self.short = has_short_addresses(host)
        self.memory_of = memory_nodes(host)
        self.user_of = {
            bdf: f"{'kept for' if domain.is_kept else 'in use by'} {domain.name}"
            for domain in host.domains
            if domain.has_claim
            for bdf in domain.devices
        }

    def build_branches(self) -> Iterator[Tree]:
        host = self.host
        if cpu := host.cpu.name or host.cpu.vendor:
            yield Tree(cpu)
        for name, pus in _list_marked_cpus(host):
            yield Tree(f"{name}: CPUs {pus}")
        frames = build_package_frames(host, self.devices)
        for frame in frames:
            blocks = (self._build_node(block, len(frame.packages) > 1) for block in frame.blocks)
            yield Tree(Span(frame.name, "bold"), tuple(blocks))
        if nodes_by_text := list_cpuless_nodes(host):
            node_lines = (
                (Span(format_nodes(at), "bold"), f": {text}") for text, at in nodes_by_text.items()
            )
            yield Tree(Span("nodes without CPUs", "bold"), tuple(map(Tree, node_lines)))
        nodes = {block.node.index for frame in frames for block in frame.blocks if block.node}
        for group in self.devices:
            if group.node not in nodes:
                place = "whose node is unknown" if group.node is None else f"of node {group.node}"
                yield Tree(Span(f"devices {place}", "bold"), tuple(self._build_devices(group)))
        for title, lines in (
            ("links next to PCIe", format_links(host)),
            ("settings", format_settings(host.settings)),
            (ASSUMED, host.assumed),
        ):
            if lines:
                yield Tree(Span(title, "bold"), tuple(map(Tree, lines)))
        if host.domains:
            yield Tree(Span("VMs", "bold"), tuple(map(Tree, map(self.format_domain, host.domains))))

    def _build_node(self, block: NodeBlock, name_packages: bool) -> Tree:
        cores = sum(len(group.cores) for group in block.groups)
        name = "node unknown" if block.node is None else f"node {block.node.index}"
        is_known = cores > 0 or not block.pus
        counts = f": {plural(cores, 'core') if is_known else 'cores unknown'}"
        counts += f", {format_cpus(block.pus)}"
        memory = () if block.node is None else (Tree(_format_memory(block.node)),)
        groups = (Tree(_format_llc(group, name_packages)) for group in block.groups)
        devices = () if block.devices is None else self._build_devices(block.devices)
        return Tree((Span(name, "bold"), counts), (*memory, *groups, *devices))

    def _build_devices(self, devices: NodeDevices) -> Iterator[Tree]:
        yield from map(self._build_complex, devices.complexes)

    def _build_complex(self, group: RootComplexGroup) -> Tree:
        label = group.name
        if group.root_complex is not None and group.root_complex.node is None:
            label += ", node unknown"
        trees: list[Tree] = []
        for switch in group.groups:
            branches = tuple(Tree(self._format_device(card)) for card in switch.cards)
            # From the lowest switch up to the root complex.
            for port in (switch.switch, *switch.above) if switch.switch is not None else ():
                link = format_link(port.link)
                text = f"switch {format_address(port.bdf, self.short)}"
                branches = (Tree(f"{text}, {link}" if link else text, branches),)
            trees += branches
        return Tree(label, tuple(trees))

    def _format_device(self, card: DeviceCard) -> Words:
        device = card.device
        title = format_card_title(card, self.gpus.get(device.bdf), self.short)
        parts = [find_device_model(device), format_link(device.link), *format_card_extras(card)]
        if device.kind is DeviceKind.BRIDGE and device.bridge is not None:
            parts.insert(0, device.bridge.port_type.value)
        parts += [f"its memory is node {node}" for node in self.memory_of.get(device.bdf, ())]
        if device.driver:
            parts.append(device.driver)
        if device.iommu_group is not None:
            parts.append(f"IOMMU group {device.iommu_group}")
        if device.firmware_node is not None:
            parts.append(f"numa_node {device.firmware_node}, which has no CPUs")
        text = "".join(f", {part}" for part in parts if part)
        users = [self.user_of[f.bdf] for f in card.functions if f.bdf in self.user_of]
        look = "bold" if device.kind is DeviceKind.GPU else ""
        used = f", {users[0]}" if users else ""
        return Span(title, look), text, Span(used, "warn")

    def format_domain(self, domain: RunningDomain) -> str:
        """Return the resources of a VM: state, vCPUs, CPUs, memory and devices."""
        state = "planned" if domain.planned else "running" if domain.running else "shut off"
        if domain.mark is not None:
            state += f", {_MARKS[domain.mark]}"
        pinned = [pins for pins in domain.vcpu_pins if pins is not None]
        floating = len(domain.vcpu_pins) - len(pinned)
        parts = [state, plural(len(domain.vcpu_pins), "vCPU")]
        if pinned:
            parts.append(f"pinned to {format_cpus(CpuSet.union(pinned))}")
        if floating:
            parts.append("not pinned" if not pinned else f"{floating} of them not pinned")
        if domain.emulator_pus is not None:
            parts.append(f"emulator on {format_cpus(domain.emulator_pus)}")
        parts.append(format_bytes(domain.memory_bytes))
        if domain.memory_by_node:
            nodes = ", ".join(
                f"{format_bytes(size)} on node {node}" for node, size in domain.memory_by_node
            )
            parts.append(f"bound: {nodes}")
        elif not domain.memory_bound:
            parts.append("memory not bound")
        if domain.devices:
            addresses = ", ".join(format_address(bdf, self.short) for bdf in domain.devices)
            parts.append(f"devices {addresses}")
        return f"{domain.name}: {', '.join(parts)}"


_MARKS = {DomainMark.OWN: "placed by homenode", DomainMark.COPY: "copy of a placed VM"}


def _list_marked_cpus(host: Host) -> list[tuple[str, CpuSet]]:
    marks = (
        ("offline", host.offline_pus),
        ("not allowed here", CpuSet(pu.index for pu in host.pus if pu.online and not pu.allowed)),
        ("isolated (isolcpus)", CpuSet(pu.index for pu in host.pus if pu.isolated)),
        ("without tick (nohz_full)", CpuSet(pu.index for pu in host.pus if pu.nohz_full)),
    )
    return [(name, pus) for name, pus in marks if pus]


def _format_memory(node: NumaNode) -> str:
    memory = ", ".join(format_memory_parts(node))
    return f"memory {memory}" if node.memory_bytes else memory


def _format_llc(group: CoreGroup, name_package: bool) -> str:
    name, *cache = format_llc_parts(group)
    text = ", ".join(filter(None, (name, " ".join(cache))))
    if name_package and group.package is not None:
        text += f", package {group.package}"
    count = plural(len(group.cores), "core")
    if group.kind is not None:
        count = f"{len(group.cores)} {KIND_WORDS[group.kind]}"
    if group.llc is not None and len(group.cores) < group.cores_of_llc:
        count += f" of its {group.cores_of_llc}"
    cores = number_list(core.index for core in group.cores)
    return f"{text}: {count} ({cores}), CPUs {group.pus}"


def _format_distances(host: Host) -> Iterator[Section]:
    if host.distances is None or len(host.nodes) < 2:
        return
    nodes = tuple(str(node.index) for node in host.nodes)
    rows = tuple((node, *map(str, row)) for node, row in zip(nodes, host.distances, strict=True))
    table = Table(heads=("node", *nodes), rows=rows, numeric=("node", *nodes))
    yield Section("distances (SLIT, 10 = local; from row to column)", (table,))
