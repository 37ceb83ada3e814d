"""HostTree: a host as a tree of text, for a terminal of any width, with or without Unicode.

Texts are plain ASCII but for names from outside; rich draws the branches, in ASCII where the
terminal has no more. Nothing of a host is markup.
"""

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from homenode.cpuset import CpuSet
from homenode.gap import Gap
from homenode.pci import DeviceKind
from homenode.report.device_groups import (
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
from homenode.report.host_groups import (
    KIND_WORDS,
    CoreGroup,
    NodeBlock,
    PackageFrame,
    host_counts,
    llc_parts,
    memory_nodes,
    memory_parts,
    nodes_without_pus,
    package_frames,
    settings_lines,
)
from homenode.report.terminal_text import AsciiWhereNeeded
from homenode.topology import Host, RunningDomain
from homenode.units import format_bytes
from homenode.wording import nodes_text, number_list, plural, printable, pus_text

ASSUMED = "assumed (described, not captured; no source prints it)"
"""Above what a described host's picture may have wrong."""

_MOST_GAPS = 12
_MOST_NODES = 16  # in the table of distances, unless everything is asked for


def host_tree(host: Host, everything: bool = False) -> RenderableType:
    """The host for people: counts first, then packages, devices, links, users, distances, gaps.

    everything: every PCI function, node and gap, instead of those that most people ask for.
    """
    keep = {bdf for domain in host.domains for bdf in domain.devices}
    devices = devices_by_node(host, keep, everything)
    frames = package_frames(host, devices)
    writer = _Writer(host)
    tree = Tree(_line((printable(host.name), "bold"), (f": {host_counts(host)}", "")))
    if host.cpu.name or host.cpu.vendor:
        tree.add(_line((printable(host.cpu.name or host.cpu.vendor or ""), "")))
    for name, pus in _marked_pus(host):
        tree.add(Text(f"{name}: {pus_text(pus)}"))
    for frame in frames:
        writer.add_package(tree, frame)
    writer.add_other_nodes(tree)
    placed = {block.node.index for frame in frames for block in frame.blocks if block.node}
    for group in devices:
        if group.node not in placed:
            where = "whose node is unknown" if group.node is None else f"of node {group.node}"
            writer.add_devices(tree.add(_line((f"devices {where}", "bold"))), group)
    for title, lines in (
        ("links next to PCIe", link_lines(host)),
        ("settings", settings_lines(host.settings)),
        (ASSUMED, host.assumed),
    ):
        if lines:
            branch = tree.add(_line((title, "bold")))
            for line in lines:
                branch.add(Text(printable(line)))
    if host.domains:
        branch = tree.add(_line(("domains", "bold")))
        for domain in host.domains:
            writer.add_domain(branch, domain)
    parts: list[RenderableType] = [tree, *_distances(host, everything)]
    if host.gaps:
        parts += [_gaps(host.gaps, everything)]
    return AsciiWhereNeeded(Group(*parts))


class _Writer:
    """Adds branches of one host to a tree."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.gpus = gpu_numbers(host)
        self.short = short_addresses(host)
        self.memory_of = memory_nodes(host)
        self.user_of = {
            bdf: domain.name for domain in host.domains if domain.running for bdf in domain.devices
        }

    def add_package(self, tree: Tree, frame: PackageFrame) -> None:
        branch = tree.add(_line((frame.name, "bold")))
        for block in frame.blocks:
            self._add_node(branch, block, len(frame.packages) > 1)

    def _add_node(self, tree: Tree, block: NodeBlock, name_packages: bool) -> None:
        cores = sum(len(group.cores) for group in block.groups)
        name = "node unknown" if block.node is None else f"node {block.node.index}"
        counts = f": {plural(cores, 'core')}, {pus_text(block.pus)}"
        branch = tree.add(_line((name, "bold"), (counts, "")))
        if block.node is not None:
            memory = ", ".join(memory_parts(block.node))
            branch.add(Text(f"memory {memory}" if block.node.memory_bytes else memory))
        for group in block.groups:
            branch.add(Text(_llc(group, name_packages)))
        if block.devices is not None:
            self.add_devices(branch, block.devices)

    def add_other_nodes(self, tree: Tree) -> None:
        """Nodes without PUs, equal ones in one line."""
        if alike := nodes_without_pus(self.host):
            branch = tree.add(_line(("nodes without PUs", "bold")))
            for text, nodes in alike.items():
                branch.add(_line((nodes_text(nodes), "bold"), (f": {text}", "")))

    def add_devices(self, tree: Tree, devices: NodeDevices) -> None:
        for group in devices.complexes:
            self._add_complex(tree, group)
        if devices.quiet_complexes:
            many = plural(devices.quiet_complexes, "root complex", "root complexes")
            functions = plural(devices.quiet_functions, "function")
            text = f"{many} with no GPU, NIC, NVSwitch or NVMe ({functions})"
            tree.add(Text(text, style="dim"))

    def _add_complex(self, tree: Tree, group: RootComplexGroup) -> None:
        label = printable(group.name)
        if group.root_complex is not None and group.root_complex.node is None:
            label += ", node unknown"
        if group.others:
            label += f", {plural(group.others, 'other function')}"
        branch = tree.add(Text(label))
        for switch in group.groups:
            below = branch
            if switch.switch is not None:
                for port in (*reversed(switch.above), switch.switch):
                    link = link_text(port.link)
                    text = f"switch {address_text(port.bdf, self.short)}"
                    below = below.add(Text(f"{text}, {link}" if link else text))
            for card in switch.cards:
                below.add(self._device(card))

    def _device(self, card: DeviceCard) -> Text:
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
        text = "".join(f", {printable(part)}" for part in parts if part)
        users = [self.user_of[f.bdf] for f in card.functions if f.bdf in self.user_of]
        style = "bold" if device.kind is DeviceKind.GPU else ""
        used = f", in use by {printable(users[0])}" if users else ""
        return _line((title, style), (text, ""), (used, "yellow"))

    def add_domain(self, tree: Tree, domain: RunningDomain) -> None:
        state = "planned" if domain.planned else "running" if domain.running else "shut off"
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
            said = ", ".join(address_text(bdf, self.short) for bdf in domain.devices)
            parts.append(f"devices {said}")
        tree.add(_line((printable(domain.name), "bold"), (": " + ", ".join(parts), "")))


def _marked_pus(host: Host) -> list[tuple[str, CpuSet]]:
    marks = (
        ("offline", CpuSet(pu.index for pu in host.pus if not pu.online)),
        ("not allowed here", CpuSet(pu.index for pu in host.pus if pu.online and not pu.allowed)),
        ("isolated (isolcpus)", CpuSet(pu.index for pu in host.pus if pu.isolated)),
        ("without tick (nohz_full)", CpuSet(pu.index for pu in host.pus if pu.nohz_full)),
    )
    return [(name, pus) for name, pus in marks if pus]


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


def _distances(host: Host, everything: bool) -> tuple[RenderableType, ...]:
    """Distances as a table: all nodes of a small host, those with PUs of a large one."""
    if host.distances is None or len(host.nodes) < 2:
        return ()
    shown = list(enumerate(host.nodes))
    which = ""
    if len(shown) > _MOST_NODES and not everything:
        shown = [(i, node) for i, node in shown if node.pus]
        which = " between nodes with PUs"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("node", justify="right", no_wrap=True)
    for _, node in shown:
        table.add_column(str(node.index), justify="right", no_wrap=True)
    for row, node in shown:
        values = [str(host.distances[row][column]) for column, _ in shown]
        table.add_row(str(node.index), *values)
    title = _line((f"distances{which}", "bold"), (" (SLIT, 10 = local; from row to column)", ""))
    return Text(""), title, table


def _gaps(gaps: Sequence[Gap], everything: bool) -> RenderableType:
    shown = gaps if everything else gaps[:_MOST_GAPS]
    lines = [_line((plural(len(gaps), "thing"), "bold"), (" not known:", "bold"))]
    lines += [
        _line((printable(gap.subject), "bold"), (f": {printable(gap.reason)}", "")) for gap in shown
    ]
    if len(shown) < len(gaps):
        lines.append(Text(f"and {len(gaps) - len(shown)} more: --all lists them", style="dim"))
    return Group(lines[0], *(Padding(line, (0, 0, 0, 2), expand=False) for line in lines[1:]))


def _line(*parts: tuple[str, str]) -> Text:
    return Text.assemble(*parts)
