"""TopologyMap: a picture of a host as SVG, optionally with a plan's VM on it.

The picture is 1600 units wide, needs no script or font, and follows the viewer's theme. The same
host and plan give the same bytes.
"""

from collections.abc import Sequence

from homenode.findings import NO_VMS, Gap
from homenode.machine.topology import Host
from homenode.show.device_groups import NodeDevices, format_links, group_by_node
from homenode.show.host_groups import (
    PackageFrame,
    build_package_frames,
    format_host_counts,
    list_cpuless_nodes,
    uses_of_pus,
)
from homenode.show.map_devices import DeviceFacts, collect_device_facts, draw_devices
from homenode.show.map_nodes import (
    CellSize,
    Scene,
    choose_columns,
    compute_cell_size,
    compute_core_space,
    count_core_rows,
    draw_packages,
    format_cell_name,
)
from homenode.show.svg_canvas import CELL_COLOURS, PICTURE, SvgCanvas, read_css, text_width, wrap
from homenode.text import format_cpus, format_nodes, plural
from homenode.units import format_bytes
from homenode.vm.plan import Plan

WIDTH = 1600.0
_MARGIN = 24.0
_ZOOMS = (1.6, 1.5, 1.4, 1.3, 1.2, 1.15, 1.1, 1.05, 1.0)


def draw_topology(host: Host, plan: Plan | None = None) -> str:
    """Return the SVG document of a host: packages, nodes, LLCs, cores, memory and devices; with a
    plan also vCPUs on their CPUs, guest memory, and devices by guest cell."""
    uses = uses_of_pus(host, plan)
    keep = {bdf for domain in host.domains if domain.has_claim for bdf in domain.devices}
    if plan is not None:
        keep |= {device.bdf for device in plan.vm.hostdevs}
    devices = group_by_node(host, keep)
    scene = Scene(host, plan, uses, collect_device_facts(host, plan))
    frames = build_package_frames(host, devices)
    counts = format_host_counts(host)
    title = f"Topology of {host.name}"
    description = counts
    if plan is not None:
        title += f" with VM {plan.vm.name}"
        description = f"{format_plan(plan)}. Host: {counts}"
    canvas = SvgCanvas.start_document(WIDTH, title, description, read_css(PICTURE))
    width = WIDTH - 2 * _MARGIN
    y = _MARGIN
    canvas.draw_text(_MARGIN, y + 20, host.name, 24, bold=True, width=width)
    y += 26
    cpu = host.cpu.name or host.cpu.vendor
    y += draw_lines(
        canvas, [f"{cpu}. {counts}" if cpu else counts], (_MARGIN, y, width), 12.5, "dim"
    )
    if host.assumed:
        assumption = f"Assumed, no source prints it: {'; '.join(host.assumed)}."
        y += draw_lines(canvas, [assumption], (_MARGIN, y, width), 12.5, "dim")
    y += 14
    if plan is not None:
        y += 4
        for_plan = draw_lines(canvas, [format_plan(plan)], (_MARGIN, y, width), 15)
        y += for_plan + 12
        y += draw_guest(canvas, scene, (_MARGIN, y, width)) + 14
    size = _choose_cell_size(scene, frames)
    y += draw_packages(canvas, frames, scene, size, (_MARGIN, y, width))
    y += 12 if frames else 0
    drawn_nodes = {block.node.index for frame in frames for block in frame.blocks if block.node}
    y += draw_other_nodes(canvas, host, (_MARGIN, y, width))
    loose = [group for group in devices if group.node not in drawn_nodes]
    y += draw_loose_devices(canvas, loose, scene.facts, (_MARGIN, y, width))
    y += draw_links(canvas, host, (_MARGIN, y, width))
    y += 4
    table = draw_distances(canvas, host, (_MARGIN, y, width / 2))
    shown_count = sum(bool(node.pus) for node in host.nodes)
    map_width = 46 + (36 if shown_count <= 8 else 28) * shown_count + 60 if table else 0
    map_width = max(map_width, 260) if table else 0
    legend = draw_legend(canvas, scene, (_MARGIN + map_width, y, width - map_width))
    return canvas.serialize(y + max(table, legend) + _MARGIN)


def _choose_cell_size(scene: Scene, frames: tuple[PackageFrame, ...]) -> CellSize:
    """Return the largest CPU boxes that need no more rows of cores than the smallest."""
    planned = scene.plan is not None and bool(scene.plan.vcpu_pins)
    sizes = [compute_cell_size(scene.host, scene.uses, planned, zoom) for zoom in _ZOOMS]
    if not frames:
        return sizes[-1]
    across, nodes_across = choose_columns(frames)
    blocks = [block for frame in frames for block in frame.blocks]
    largest = max(blocks, key=lambda block: len(block.pus))
    space = compute_core_space(WIDTH - 2 * _MARGIN, across, nodes_across)
    fewest = count_core_rows(largest.groups, sizes[-1], space)
    return next(size for size in sizes if count_core_rows(largest.groups, size, space) <= fewest)


_MAX_DISTANCES = 16


def format_plan(plan: Plan) -> str:
    parts = [
        f"VM {plan.vm.name}",
        f"layout {plan.layout.name}",
        plural(plan.vm.vcpus, "vCPU"),
        format_bytes(plan.vm.memory_bytes),
        format_nodes(plan.nodes) if plan.nodes else "no nodes chosen",
    ]
    if plan.fallback:
        parts.append(f"placement: {plan.fallback}")
    return " · ".join(parts)


def draw_lines(
    canvas: SvgCanvas,
    texts: Sequence[str],
    place: tuple[float, float, float],
    size: float = 11.5,
    classes: str = "ink",
) -> float:
    """Draw wrapped paragraphs; return their height."""
    x, y, width = place
    at_y = y
    for text in texts:
        for line in wrap(text, size, width):
            at_y += size * 1.4
            canvas.draw_text(x, at_y, line, size, classes)
    return at_y - y


def draw_guest(canvas: SvgCanvas, scene: Scene, place: tuple[float, float, float]) -> float:
    """Draw a card for each guest cell, and further notes."""
    plan = scene.plan
    if plan is None:
        return 0.0
    x, y, width = place
    across = min(4, max(2, len(plan.cells)))
    card_width = (width + 12) / across - 12
    at_y = y
    for start in range(0, len(plan.cells), across):
        row = plan.cells[start : start + across]
        texts = [
            tuple(
                line
                for text in _format_cells(scene, cell.id)
                for line in wrap(text, 11, card_width - 20)
            )
            for cell in row
        ]
        height = 26 + 15 * max(len(lines) for lines in texts) + 8
        for position, cell in enumerate(row):
            card_x = x + position * (card_width + 12)
            colour = cell.id % CELL_COLOURS
            canvas.draw_rect(card_x, at_y, card_width, height, "card", radius=6)
            canvas.draw_rect(card_x, at_y, card_width, height, f"tint{colour}", radius=6)
            canvas.draw_rect(card_x, at_y, card_width, 24, f"cell{colour}", radius=6)
            heading = f"{format_cell_name(plan, cell.id)} on {format_nodes(cell.host_nodes)}"
            if not cell.host_nodes:
                heading = f"{format_cell_name(plan, cell.id)}, on no node in particular"
            canvas.draw_text(
                card_x + 10,
                at_y + 17,
                heading,
                13,
                f"on-cell{colour}",
                bold=True,
                width=card_width - 20,
            )
            for number, line in enumerate(texts[position]):
                canvas.draw_text(card_x + 10, at_y + 40 + 15 * number, line, 11)
        at_y += height + 10
    at_y += draw_lines(canvas, _list_guest_notes(scene, plan), (x, at_y - 4, width))
    return at_y - y


def _format_cells(scene: Scene, cell_id: int) -> list[str]:
    plan = scene.plan
    assert plan is not None
    cell = next(cell for cell in plan.cells if cell.id == cell_id)
    bound = "" if plan.memory_nodes else ", not bound"
    if plan.memory_nodes and plan.memory_mode is not None:
        bound = f", {plan.memory_mode.value} on {format_nodes(cell.host_nodes)}"
    texts = [
        f"vCPUs {cell.vcpus} ({len(cell.vcpus)})",
        f"memory {format_bytes(cell.memory_bytes)}{bound}",
    ]
    devices = [device for device in plan.vm.hostdevs if device.cell == cell.id]
    if devices:
        texts.append(", ".join(scene.facts.name(device.bdf) for device in devices))
    bdfs = [d.bdf for d in plan.vm.hostdevs if d.cell is None]
    if len(plan.cells) == 1 and bdfs:
        names = ", ".join(scene.facts.name(bdf) for bdf in bdfs)
        texts.append(f"with no node in the guest: {names}")
    return texts


def _list_guest_notes(scene: Scene, plan: Plan) -> list[str]:
    notes: list[str] = []
    if not plan.vcpu_pins:
        notes.append("The vCPUs are not pinned: they run on any CPU of the host.")
    if plan.vm.emulator_pus is not None:
        notes.append(f"Emulator on {format_cpus(plan.vm.emulator_pus)}.")
    else:
        notes.append("The emulator's threads are not pinned.")
    if plan.iothread_pus:
        pins = ", ".join(f"{i} on {format_cpus(pus)}" for i, pus in plan.vm.iothread_pins)
        notes.append(f"IOThread {pins}.")
    names = [scene.facts.name(d.bdf) for d in plan.vm.hostdevs if d.cell is None]
    if names and len(plan.cells) > 1:
        notes.append(f"With no node in the guest: {', '.join(names)}.")
    return [" ".join(notes)]


def draw_other_nodes(canvas: SvgCanvas, host: Host, place: tuple[float, float, float]) -> float:
    """Draw nodes without CPUs, equal nodes together."""
    x, y, width = place
    nodes_by_text = list_cpuless_nodes(host)
    if not nodes_by_text:
        return 0.0
    rect = canvas.draw_rect(x, y, width, 0, "package", radius=8)
    canvas.draw_text(x + 12, y + 20, "nodes without CPUs", 13, bold=True)
    at_y = y + 22
    lines = [f"{format_nodes(nodes)}: {text}" for text, nodes in nodes_by_text.items()]
    columns = 3 if all(text_width(line, 11) < width / 3 - 24 for line in lines) else 1
    for start in range(0, len(lines), columns):
        if columns == 1:
            at_y += draw_lines(canvas, lines[start : start + 1], (x + 12, at_y, width - 24), 11)
            continue
        at_y += 16
        for position, line in enumerate(lines[start : start + columns]):
            canvas.draw_text(x + 12 + position * (width / columns), at_y, line, 11)
    canvas.resize(rect, at_y - y + 12)
    return at_y - y + 24


def draw_loose_devices(
    canvas: SvgCanvas,
    devices: Sequence[NodeDevices],
    facts: DeviceFacts,
    place: tuple[float, float, float],
) -> float:
    """Draw devices whose node is unknown, without CPUs or not described, in separate bands."""
    x, y, width = place
    at_y = y
    for group in devices:
        name = "devices whose node is unknown"
        if group.node is not None:
            name = f"devices of node {group.node}, which has no CPUs here"
        rect = canvas.draw_rect(x, at_y, width, 0, "package", radius=8)
        canvas.draw_text(x + 12, at_y + 20, name, 13, bold=True)
        height = draw_devices(canvas, group, facts, (x + 12, at_y + 22, width - 24), hangs=False)
        canvas.resize(rect, height + 34)
        at_y += height + 46
    return at_y - y


def draw_links(canvas: SvgCanvas, host: Host, place: tuple[float, float, float]) -> float:
    """Draw links other than PCIe, as text."""
    lines = format_links(host)
    if not lines:
        return 0.0
    x, y, width = place
    rect = canvas.draw_rect(x, y, width, 0, "package", radius=8)
    canvas.draw_text(x + 12, y + 20, "links next to PCIe", 13, bold=True)
    height = 22 + draw_lines(canvas, lines, (x + 12, y + 22, width - 24))
    canvas.resize(rect, height + 12)
    return height + 24


def draw_distances(canvas: SvgCanvas, host: Host, place: tuple[float, float, float]) -> float:
    """Draw distances between nodes with CPUs as a small table; return its height, 0 without one."""
    x, y, _ = place
    shown_nodes = [(i, node.index) for i, node in enumerate(host.nodes) if node.pus]
    if host.distances is None or len(host.nodes) < 2 or not 1 < len(shown_nodes) <= _MAX_DISTANCES:
        return 0.0
    side = 36.0 if len(shown_nodes) <= 8 else 28.0
    title = "distances" if len(shown_nodes) == len(host.nodes) else "distances of nodes with CPUs"
    canvas.draw_text(x, y + 14, title, 12, bold=True)
    canvas.draw_text(x, y + 28, "(SLIT; row: from, column: to)", 10, "dim")
    top, start = y + 50, x + 46
    limit = max(host.distances[a][b] for a, _ in shown_nodes for b, _ in shown_nodes)
    for position, (row, index) in enumerate(shown_nodes):
        middle = start + position * side + side / 2
        canvas.draw_text(middle, top - 5, str(index), 10, "dim", anchor="middle")
        baseline = top + position * 20 + 14
        canvas.draw_text(x, baseline, f"node {index}", 10, "dim")
        for column, (other, _) in enumerate(shown_nodes):
            distance = host.distances[row][other]
            shade = canvas.draw_rect(
                start + column * side, top + position * 20, side - 1, 19, "bar-used"
            )
            shade.set("fill-opacity", f"{0.08 + 0.62 * (distance - 10) / max(1, limit - 10):.2f}")
            canvas.draw_text(
                start + column * side + side / 2, baseline, str(distance), 10, anchor="middle"
            )
    return 50 + 20.0 * len(shown_nodes) + 4


def draw_legend(canvas: SvgCanvas, scene: Scene, place: tuple[float, float, float]) -> float:
    """Return a legend of the marks that occur."""
    x, y, width = place
    canvas.draw_text(x, y + 14, "legend", 12, bold=True)
    at_x, at_y = x, y + 26
    for classes, fill, text in _list_legend_entries(scene):
        entry = 30 + text_width(text, 11) + 22
        if at_x > x and at_x + entry > x + width:
            at_x, at_y = x, at_y + 22
        canvas.draw_rect(at_x, at_y, 22, 15, classes, radius=2, fill=fill)
        canvas.draw_text(at_x + 29, at_y + 11.5, text, 11, "ink")
        at_x += entry
    notes = []
    if scene.plan is not None and scene.plan.vcpu_pins:
        notes.append("On a CPU: the vCPU's number above, the CPU's own below.")
    else:
        notes.append("Numbers are CPUs; siblings of a core are framed together.")
    offline = scene.host.offline_pus
    if offline:
        notes.append(f"Offline: {format_cpus(offline)}.")
    if gaps := [gap for gap in scene.host.gaps if gap.subject != NO_VMS]:
        notes.append(format_gaps(gaps))
    return at_y + 20 + draw_lines(canvas, notes, (x, at_y + 20, width), 11, "dim") - y


def format_gaps(gaps: Sequence[Gap]) -> str:
    """Count the unknown facts, and name the first."""
    remainder = f", and {len(gaps) - 1} more (homenode show lists them)" if len(gaps) > 1 else ""
    return f"Unknown: {gaps[0]}{remainder}."


def _list_legend_entries(scene: Scene) -> list[tuple[str, str | None, str]]:
    uses = list(scene.uses.values())
    entries: list[tuple[str, str | None, str]] = []
    if scene.plan is not None:
        for cell in sorted({use.cell for use in uses if use.cell is not None}):
            name = format_cell_name(scene.plan, cell)
            entries.append((f"pu cell{cell % CELL_COLOURS}", None, f"vCPU of {name}"))
        neighbours = sorted({use.other_cell for use in uses if use.other_cell is not None})
        if neighbours:
            tint = f"pu tint{neighbours[0] % CELL_COLOURS}"
            entries.append((tint, None, "sibling left idle"))
        if any(len(use.vcpus) > 1 for use in uses):
            entries.append(("pu", None, "4v: number of vCPUs that share the CPU"))
    hosted = [use for use in uses if not use.vcpus and (use.emulator or use.iothreads)]
    if hosted:
        is_shown = {
            "em: emulator": any(not use.iothreads for use in hosted),
            "em+: emulator and IOThreads": any(use.emulator and use.iothreads for use in hosted),
            "io1: IOThread 1": any(not use.emulator for use in hosted),
        }
        meanings = ", ".join(meaning for meaning, flag in is_shown.items() if flag)
        entries.append(("pu host-thread", None, meanings))
    if any(use.vcpus and (use.emulator or use.iothreads) for use in uses):
        entries.append(("outline wire", None, "emulator or IOThread on a vCPU's CPU"))
    if any(use.used_by for use in uses):
        entries.append(("pu", "taken", "used by another VM"))
    if any(use.barred for use in uses):
        entries.append(("pu", "barred", "not allowed"))
    if any(use.isolated for use in uses):
        entries.append(("pu isolated", None, "isolated from the scheduler"))
    entries.append(("pu", None, "free CPU"))
    return entries
