"""HostTree: a host as a tree: its packages and nodes, their devices, links, users, distances."""

from collections.abc import Iterator, Sequence

from homenode.cpuset import CpuSet
from homenode.doc import Doc, Section, Span, Table, Text, Tree, Words
from homenode.findings import Gap, gap_lines
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import DomainMark, Host, NumaNode, RunningDomain
from homenode.show.device_groups import (
    DeviceCard,
    NodeDevices,
    RootComplexGroup,
    address_text,
    card_extras,
    card_title,
    device_model,
    devices_by_node,
    gpu_numbers,
    link_lines,
    link_text,
    short_addresses,
)
from homenode.show.host_groups import (
    KIND_WORDS,
    CoreGroup,
    NodeBlock,
    host_counts,
    llc_parts,
    memory_nodes,
    memory_parts,
    nodes_without_pus,
    package_frames,
    settings_lines,
)
from homenode.text import nodes_text, number_list, plural, pus_text
from homenode.units import format_bytes

ASSUMED = "assumed (described, not captured; no source prints it)"
"""Above what a described host's picture may have wrong."""

_MOST_NODES = 16  # in the table of distances, unless everything is asked for


def host_tree(host: Host, everything: bool = False) -> Doc:
    """The host for people: counts first, then packages, devices, links, users, distances, gaps.

    everything: every PCI function, node and gap, instead of those that most people ask for.
    """
    head = (Span(host.name, "bold"), f": {host_counts(host)}")
    tree = Tree(head, tuple(_Branches(host, everything).branches()))
    return Doc("", (tree, *_distances(host, everything), *_gaps(host.gaps, everything)))


class _Branches:
    """Branches of one host's tree."""

    def __init__(self, host: Host, everything: bool) -> None:
        self.host = host
        keep = {bdf for domain in host.domains for bdf in domain.devices}
        self.devices = devices_by_node(host, keep, everything)
        self.gpus = gpu_numbers(host)
        self.short = short_addresses(host)
        self.memory_of = memory_nodes(host)
        self.user_of = {
            bdf: f"{'kept for' if domain.is_kept else 'in use by'} {domain.name}"
            for domain in host.domains
            if domain.has_claim
            for bdf in domain.devices
        }

    def branches(self) -> Iterator[Tree]:
        host = self.host
        if cpu := host.cpu.name or host.cpu.vendor:
            yield Tree(cpu)
        for name, pus in _marked_pus(host):
            yield Tree(f"{name}: {pus_text(pus)}")
        frames = package_frames(host, self.devices)
        for frame in frames:
            blocks = (self._node(block, len(frame.packages) > 1) for block in frame.blocks)
            yield Tree(Span(frame.name, "bold"), tuple(blocks))
        if nodes_by_text := nodes_without_pus(host):
            node_lines = (
                (Span(nodes_text(at), "bold"), f": {text}") for text, at in nodes_by_text.items()
            )
            yield Tree(Span("nodes without PUs", "bold"), tuple(map(Tree, node_lines)))
        placed = {block.node.index for frame in frames for block in frame.blocks if block.node}
        for group in self.devices:
            if group.node not in placed:
                location = (
                    "whose node is unknown" if group.node is None else f"of node {group.node}"
                )
                yield Tree(Span(f"devices {location}", "bold"), tuple(self._devices(group)))
        for title, lines in (
            ("links next to PCIe", link_lines(host)),
            ("settings", settings_lines(host.settings)),
            (ASSUMED, host.assumed),
        ):
            if lines:
                yield Tree(Span(title, "bold"), tuple(map(Tree, lines)))
        if host.domains:
            yield Tree(Span("domains", "bold"), tuple(map(self._domain, host.domains)))

    def _node(self, block: NodeBlock, name_packages: bool) -> Tree:
        cores = sum(len(group.cores) for group in block.groups)
        name = "node unknown" if block.node is None else f"node {block.node.index}"
        is_known = cores > 0 or not block.pus
        counts = f": {plural(cores, 'core') if is_known else 'cores unknown'}"
        counts += f", {pus_text(block.pus)}"
        memory = () if block.node is None else (Tree(_memory(block.node)),)
        groups = (Tree(_llc(group, name_packages)) for group in block.groups)
        devices = () if block.devices is None else self._devices(block.devices)
        return Tree((Span(name, "bold"), counts), (*memory, *groups, *devices))

    def _devices(self, devices: NodeDevices) -> Iterator[Tree]:
        yield from map(self._complex, devices.complexes)
        if devices.quiet_complexes:
            many = plural(devices.quiet_complexes, "root complex", "root complexes")
            functions = plural(devices.quiet_functions, "function")
            text = f"{many} with no GPU, NIC, NVSwitch or NVMe ({functions})"
            yield Tree(Span(text, "dim"))

    def _complex(self, group: RootComplexGroup) -> Tree:
        label = group.name
        if group.root_complex is not None and group.root_complex.node is None:
            label += ", node unknown"
        if group.other_functions:
            label += f", {plural(group.other_functions, 'other function')}"
        below: list[Tree] = []
        for switch in group.groups:
            branches = tuple(Tree(self._device(card)) for card in switch.cards)
            # From the lowest switch up to the root complex.
            for port in (switch.switch, *switch.above) if switch.switch is not None else ():
                link = link_text(port.link)
                text = f"switch {address_text(port.bdf, self.short)}"
                branches = (Tree(f"{text}, {link}" if link else text, branches),)
            below += branches
        return Tree(label, tuple(below))

    def _device(self, card: DeviceCard) -> Words:
        device = card.device
        title = card_title(card, self.gpus.get(device.bdf), self.short)
        parts = [device_model(device), link_text(device.link), *card_extras(card)]
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

    def _domain(self, domain: RunningDomain) -> Tree:
        state = "planned" if domain.planned else "running" if domain.running else "shut off"
        if domain.mark is not None:
            state += f", {_MARKS[domain.mark]}"
        pinned = [pins for pins in domain.vcpu_pins if pins is not None]
        floating = len(domain.vcpu_pins) - len(pinned)
        parts = [state, plural(len(domain.vcpu_pins), "vCPU")]
        if pinned:
            parts.append(f"pinned to {pus_text(CpuSet.union(pinned))}")
        if floating:
            parts.append("not pinned" if not pinned else f"{floating} of them not pinned")
        if domain.emulator_pus is not None:
            parts.append(f"emulator on {pus_text(domain.emulator_pus)}")
        parts.append(format_bytes(domain.memory_bytes))
        if domain.memory_by_node:
            nodes = ", ".join(
                f"{format_bytes(size)} on node {node}" for node, size in domain.memory_by_node
            )
            parts.append(f"bound: {nodes}")
        elif not domain.memory_bound:
            parts.append("memory not bound")
        if domain.devices:
            addresses = ", ".join(address_text(bdf, self.short) for bdf in domain.devices)
            parts.append(f"devices {addresses}")
        return Tree((Span(domain.name, "bold"), f": {', '.join(parts)}"))


_MARKS = {DomainMark.OWN: "placed by homenode", DomainMark.COPY: "copy of a placed VM"}


def _marked_pus(host: Host) -> list[tuple[str, CpuSet]]:
    marks = (
        ("offline", CpuSet(pu.index for pu in host.pus if not pu.online)),
        ("not allowed here", CpuSet(pu.index for pu in host.pus if pu.online and not pu.allowed)),
        ("isolated (isolcpus)", CpuSet(pu.index for pu in host.pus if pu.isolated)),
        ("without tick (nohz_full)", CpuSet(pu.index for pu in host.pus if pu.nohz_full)),
    )
    return [(name, pus) for name, pus in marks if pus]


def _memory(node: NumaNode) -> str:
    memory = ", ".join(memory_parts(node))
    return f"memory {memory}" if node.memory_bytes else memory


def _llc(group: CoreGroup, name_package: bool) -> str:
    name, *cache = llc_parts(group)
    text = ", ".join(filter(None, (name, " ".join(cache))))
    if name_package and group.package is not None:
        text += f", package {group.package}"
    count = plural(len(group.cores), "core")
    if group.kind is not None:
        count = f"{len(group.cores)} {KIND_WORDS[group.kind]}"
    if group.llc is not None and len(group.cores) < group.cores_of_llc:
        count += f" of its {group.cores_of_llc}"
    cores = number_list(core.index for core in group.cores)
    return f"{text}: {count} ({cores}), {pus_text(group.pus)}"


def _distances(host: Host, everything: bool) -> Iterator[Section]:
    """Distances as a table: all nodes of a small host, those with PUs of a large one."""
    if host.distances is None or len(host.nodes) < 2:
        return
    shown = list(enumerate(host.nodes))
    which = ""
    if len(shown) > _MOST_NODES and not everything:
        shown = [(i, node) for i, node in shown if node.pus]
        which = " between nodes with PUs"
    nodes = tuple(str(node.index) for _, node in shown)
    rows = tuple(
        (str(node.index), *(str(host.distances[row][column]) for column, _ in shown))
        for row, node in shown
    )
    table = Table(heads=("node", *nodes), rows=rows, numeric=("node", *nodes))
    yield Section(f"distances{which} (SLIT, 10 = local; from row to column)", (table,))


def _gaps(gaps: Sequence[Gap], everything: bool) -> Iterator[Text]:
    if gaps:
        yield Text(f"{plural(len(gaps), 'thing')} not known:", "bold")
    for line in map(str, gaps) if everything else gap_lines(gaps):
        yield Text(line, indent=2)
