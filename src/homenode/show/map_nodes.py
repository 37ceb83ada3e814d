"""MapNodes: packages as frames with their nodes: memory, LLCs, cores, CPUs and devices."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from homenode.cpuset import NodeIndex
from homenode.machine.topology import Core, Host, NumaNode
from homenode.show.host_groups import (
    FREE,
    KIND_WORDS,
    CoreGroup,
    CpuUse,
    NodeBlock,
    PackageFrame,
    format_llc_parts,
    format_memory_parts,
)
from homenode.show.map_devices import DeviceFacts, draw_devices
from homenode.show.svg_canvas import CELL_COLOURS, MIN_TEXT_SIZE, SvgCanvas, text_width, wrap
from homenode.text import format_nodes, number_list, plural
from homenode.units import format_bytes
from homenode.vm.model import GuestCellId
from homenode.vm.plan import Plan

_CAPTION_SIZE = 10.0
_EDGE, _SPACE, _CORE_GAP = 5.0, 8.0, 3.0


class CellSize(Struct, frozen=True):
    """Size of one CPU's box and of the text in it."""

    width: float
    height: float
    large: float
    small: float


def compute_cell_size(
    host: Host, uses: Mapping[int, CpuUse], planned: bool, zoom: float
) -> CellSize:
    """Return the size at which every CPU's number, and with a plan every vCPU's, fits its box."""
    # Boxes may grow more than their text: large numbers are no easier to read.
    scale = min(zoom, 1.25)
    large, small = 11.0 * scale, (MIN_TEXT_SIZE if planned else 9.5) * scale
    widest_pu = max((text_width(str(pu.index), small) for pu in host.pus), default=0)
    if not planned:
        return CellSize(max(22 * zoom, widest_pu + 5), 17 * zoom, large, small)
    labels = {use_label(use) for use in uses.values()}
    widest = max((text_width(label, large, bold=True) for label in labels), default=0)
    return CellSize(max(26 * zoom, widest_pu + 5, widest + 5), 27 * zoom, large, small)


def use_label(use: CpuUse) -> str:
    """Return the label of a CPU: the number of its vCPU, or the QEMU thread on it."""
    if len(use.vcpus) > 1:
        return f"{len(use.vcpus)}v"
    if use.vcpus:
        return str(use.vcpus[0])
    if use.emulator:
        return "em+" if use.iothreads else "em"
    if use.iothreads:
        return f"io{number_list(use.iothreads)}"
    return ""


def draw_core_groups(
    canvas: SvgCanvas,
    groups: Sequence[CoreGroup],
    uses: Mapping[int, CpuUse],
    size: CellSize,
    place: tuple[float, float, float],
    name_packages: bool,
) -> float:
    """Draw the groups from (x, y) within a width; returns the height that they take."""
    x, y, width = place
    if not groups:
        return 0.0
    columns = _choose_columns(groups, size, width)
    at_x, at_y, row_height = x, y, 0.0
    for group in groups:
        cell = _compute_core_size(group, size)
        threads = max(len(core.pus) for core in group.cores)
        across = min(columns, len(group.cores))
        cores_width = across * (cell[0] + _CORE_GAP) - _CORE_GAP
        caption = _format_caption(group, name_packages)
        caption_width = max(text_width(line, _CAPTION_SIZE) for line in caption)
        frame_width = min(max(cores_width, caption_width) + 2 * _EDGE, width)
        caption = tuple(
            part for line in caption for part in wrap(line, _CAPTION_SIZE, frame_width - 2 * _EDGE)
        )
        rows = -(-len(group.cores) // across)
        head = 4 + 12 * len(caption) + 3
        frame_height = head + rows * (cell[1] + _CORE_GAP) - _CORE_GAP + _EDGE
        if at_x > x and at_x + frame_width > x + width + 0.01:
            at_x, at_y, row_height = x, at_y + row_height + _SPACE, 0.0
        canvas.draw_rect(at_x, at_y, frame_width, frame_height, "llc", radius=4)
        for line_number, line in enumerate(caption):
            canvas.draw_text(at_x + _EDGE, at_y + 13 + 12 * line_number, line, _CAPTION_SIZE, "dim")
        for position, core in enumerate(group.cores):
            row, column = divmod(position, across)
            core_x = at_x + _EDGE + column * (cell[0] + _CORE_GAP)
            core_y = at_y + head + row * (cell[1] + _CORE_GAP)
            _draw_core(canvas, core, uses, size, (core_x, core_y, threads))
        at_x += frame_width + _SPACE
        row_height = max(row_height, frame_height)
    return at_y + row_height - y


def _draw_core(
    canvas: SvgCanvas,
    core: Core,
    uses: Mapping[int, CpuUse],
    size: CellSize,
    place: tuple[float, float, int],
) -> None:
    x, y, threads = place
    across, _ = _choose_threads_grid(threads)
    for position, pu in enumerate(core.pus):
        column, row = position % across, position // across
        box = (x + column * size.width, y + row * size.height)
        _draw_pu(canvas, pu, uses.get(pu, FREE), size, box)
    width, height = min(len(core.pus), across) * size.width, size.height
    height *= -(-len(core.pus) // across)
    kind = "" if core.kind is None else f", {core.kind.value} core"
    title = f"core {core.index} (package {core.id.package}, OS core {core.id.core}{kind})"
    frame = canvas.draw_rect(
        x, y, width, height, "core", radius=2.5, title=f"{title}: CPUs {core.pus}"
    )
    frame.set("pointer-events", "all")


def _draw_pu(
    canvas: SvgCanvas, pu: int, use: CpuUse, size: CellSize, corner: tuple[float, float]
) -> None:
    x, y = corner
    ink, fill, classes = "ink", None, "pu"
    if use.vcpus and use.cell is not None:
        colour = use.cell % CELL_COLOURS
        classes, ink = f"pu cell{colour}", f"on-cell{colour}"
    elif use.emulator or use.iothreads:
        classes, ink = "pu host-thread", "on-host-thread"
    elif use.other_cell is not None:
        classes = f"pu tint{use.other_cell % CELL_COLOURS}"
    elif use.barred or use.used_by:
        fill = "barred" if use.barred else "taken"
    inset = 1.0
    if use.isolated:
        classes += " isolated"
    canvas.draw_rect(
        x + inset,
        y + inset,
        size.width - 2 * inset,
        size.height - 2 * inset,
        classes,
        radius=1.5,
        fill=fill,
        title=f"CPU {pu}: used by {', '.join(use.used_by)}" if use.used_by else None,
    )
    if use.vcpus and (use.emulator or use.iothreads):
        canvas.draw_rect(
            x + 2.5, y + 2.5, size.width - 5, size.height - 5, "outline wire", radius=1
        )
    label, middle = use_label(use), x + size.width / 2
    if label:
        canvas.draw_text(
            middle, y + size.height * 0.5, label, size.large, ink, bold=True, anchor="middle"
        )
        baseline = y + size.height - 0.13 * size.height
    else:
        baseline = y + size.height / 2 + size.small * 0.36
    if fill is not None and not label:
        ground = text_width(str(pu), size.small) + 2
        canvas.draw_rect(
            middle - ground / 2,
            y + size.height / 2 - size.small * 0.6,
            ground,
            size.small * 1.2,
            "pu-ground",
        )
    canvas.draw_text(
        middle, baseline, str(pu), size.small, ink if label else "dim", anchor="middle"
    )


def count_core_rows(groups: Sequence[CoreGroup], size: CellSize, width: float) -> int:
    if not groups:
        return 0
    columns = _choose_columns(groups, size, width)
    frame = max(columns * (_compute_core_size(groups[0], size)[0] + _CORE_GAP), 110.0) + 2 * _EDGE
    neighbours = max(1, int((width + _SPACE) // (frame + _SPACE)))
    largest = max(len(group.cores) for group in groups)
    return -(-len(groups) // neighbours) * -(-largest // columns)


def _choose_columns(groups: Sequence[CoreGroup], size: CellSize, width: float) -> int:
    """Return the cores per row of each group with the smallest total height."""
    largest = max(groups, key=lambda group: len(group.cores))
    cell_width = max(_compute_core_size(group, size)[0] for group in groups) + _CORE_GAP
    cell_height = max(_compute_core_size(group, size)[1] for group in groups) + _CORE_GAP
    maximum = max(1, int((width - 2 * _EDGE + _CORE_GAP) // cell_width))
    best: tuple[float, int, int] | None = None
    for rows in range(1, len(largest.cores) + 1):
        columns = -(-len(largest.cores) // rows)
        if columns > maximum:
            continue
        frame = max(columns * cell_width - _CORE_GAP, 110.0) + 2 * _EDGE
        neighbours = max(1, int((width + _SPACE) // (frame + _SPACE)))
        lines = -(-len(groups) // neighbours)
        option = (lines * (rows * cell_height + 30), rows, columns)
        best = option if best is None else min(best, option)
    return best[2] if best else 1


def _compute_core_size(group: CoreGroup, size: CellSize) -> tuple[float, float]:
    return _core_box(max(len(core.pus) for core in group.cores), size)


def _core_box(threads: int, size: CellSize) -> tuple[float, float]:
    across, down = _choose_threads_grid(threads)
    return across * size.width, down * size.height


def _choose_threads_grid(threads: int) -> tuple[int, int]:
    """Return columns and rows of a core's CPUs: siblings in one column, in two from SMT4 on."""
    across = 1 if threads <= 3 else 2
    return across, -(-threads // across)


def _format_caption(group: CoreGroup, name_package: bool) -> tuple[str, ...]:
    package = [f"package {group.package}"] if name_package and group.package is not None else []
    first = " · ".join((*package, *format_llc_parts(group)))
    second = []
    if group.kind is not None:
        second.append(KIND_WORDS[group.kind])
    if group.llc is not None and len(group.cores) < group.cores_of_llc:
        second.append(f"{len(group.cores)} of its {plural(group.cores_of_llc, 'core')}")
    return (first, " · ".join(second)) if second else (first,)


_PAD, _GAP = 12.0, 12.0
_CHIP = 20.0


class Scene(Struct, frozen=True):
    """The data for every part of the picture."""

    host: Host
    plan: Plan | None
    uses: Mapping[int, CpuUse]
    facts: DeviceFacts


def draw_packages(
    canvas: SvgCanvas,
    frames: Sequence[PackageFrame],
    scene: Scene,
    size: CellSize,
    place: tuple[float, float, float],
) -> float:
    """Draw all packages from (x, y) within a width; returns the height that they take."""
    x, y, width = place
    if not frames:
        return 0.0
    across, nodes_across = choose_columns(frames)
    frame_width, node_width = _compute_widths(width, across, nodes_across)
    for start in range(0, len(frames), across):
        row_height = 0.0
        drawn_packages = []
        for position, frame in enumerate(frames[start : start + across]):
            frame_x = x + position * (frame_width + _GAP)
            rect = canvas.draw_rect(frame_x, y, frame_width, 0, "package", radius=8)
            drawn_packages.append(rect)
            canvas.draw_text(frame_x + _PAD, y + 20, _frame_title(frame), 13, "ink", bold=True)
            height = 30.0
            for first in range(0, len(frame.blocks), nodes_across):
                height += _draw_row(
                    canvas,
                    frame.blocks[first : first + nodes_across],
                    scene,
                    size,
                    (frame_x + _PAD, y + height, node_width),
                    len(frame.packages) > 1,
                )
                height += _GAP
            row_height = max(row_height, height)
        for rect in drawn_packages:
            canvas.resize(rect, row_height)
        y += row_height + _GAP
    return y - _GAP - place[1]


def choose_columns(frames: Sequence[PackageFrame]) -> tuple[int, int]:
    """Return packages per row, and nodes per row in a package: at most four nodes in all."""
    nodes_across = min(4, max(len(frame.blocks) for frame in frames))
    return min(len(frames), max(1, 4 // nodes_across)), nodes_across


def compute_core_space(width: float, across: int, nodes_across: int) -> float:
    """Return the width for cores in one node of a picture."""
    return _compute_widths(width, across, nodes_across)[1] - 20


def _compute_widths(width: float, across: int, nodes_across: int) -> tuple[float, float]:
    """Return the width of a package's frame and of a node's box in it."""
    frame_width = (width + _GAP) / across - _GAP
    return frame_width, (frame_width - 2 * _PAD + _GAP) / nodes_across - _GAP


def _draw_row(
    canvas: SvgCanvas,
    blocks: Sequence[NodeBlock],
    scene: Scene,
    size: CellSize,
    place: tuple[float, float, float],
    name_packages: bool,
) -> float:
    x, y, width = place
    drawn_nodes = []
    box_height = 0.0
    for position, block in enumerate(blocks):
        node_x = x + position * (width + _GAP)
        drawn_nodes.append(canvas.draw_rect(node_x, y, width, 0, "node", radius=6))
        at = (node_x + 10, y, width - 20)
        box_height = max(box_height, _draw_node(canvas, block, scene, size, at, name_packages) + 10)
    # Boxes of one row end at the same height, so their devices begin at the same height.
    for rect in drawn_nodes:
        canvas.resize(rect, box_height)
    row_height = box_height
    for position, block in enumerate(blocks):
        if block.devices is not None:
            at = (x + position * (width + _GAP), y + box_height, width)
            height = draw_devices(canvas, block.devices, scene.facts, at, hangs=True)
            row_height = max(row_height, box_height + height)
    return row_height


def _draw_node(
    canvas: SvgCanvas,
    block: NodeBlock,
    scene: Scene,
    size: CellSize,
    place: tuple[float, float, float],
    name_packages: bool,
) -> float:
    x, y, width = place
    cores = sum(len(group.cores) for group in block.groups)
    name = "node unknown" if block.node is None else f"node {block.node.index}"
    canvas.draw_text(x, y + 21, name, 15, "ink", bold=True)
    at_y = y + 24
    counts = f"{plural(cores, 'core')}, {plural(len(block.pus), 'CPU')}: {block.pus}"
    for line in wrap(counts, 10.5, width):
        at_y += 13.5
        canvas.draw_text(x, at_y, line, 10.5, "dim")
    at_y += 6
    at_y += _draw_cell_chips(canvas, block, scene, (x, at_y, width))
    if block.node is not None:
        at_y += draw_memory(canvas, block.node, scene.plan, (x, at_y, width))
    at_y += 8
    return (
        at_y
        + draw_core_groups(canvas, block.groups, scene.uses, size, (x, at_y, width), name_packages)
        - y
    )


def _draw_cell_chips(
    canvas: SvgCanvas, block: NodeBlock, scene: Scene, place: tuple[float, float, float]
) -> float:
    """Draw the guest cells with vCPUs or memory here, in their colours."""
    if scene.plan is None:
        return 0.0
    vcpus_of_cell: dict[int, list[int]] = {}
    for vcpu, pins in enumerate(scene.plan.vcpu_pins):
        if not pins.isdisjoint(block.pus):
            home = next((c.id for c in scene.plan.cells if vcpu in c.vcpus), GuestCellId(0))
            vcpus_of_cell.setdefault(home, []).append(vcpu)
    x, y, width = place
    at_x, at_y = x, y
    for cell, vcpus in sorted(vcpus_of_cell.items()):
        text = f"{format_cell_name(scene.plan, cell)}: vCPUs {number_list(vcpus)}"
        for line in wrap(text, 11, width - 14, bold=True):
            chip = text_width(line, 11, bold=True) + 14
            if at_x > x and at_x + chip > x + width:
                at_x, at_y = x, at_y + _CHIP + 4
            colour = cell % CELL_COLOURS
            canvas.draw_rect(at_x, at_y, chip, _CHIP, f"cell{colour}", radius=4)
            canvas.draw_text(at_x + 7, at_y + 14, line, 11, f"on-cell{colour}", bold=True)
            at_x += chip + 6
    return at_y - y + _CHIP + 6 if vcpus_of_cell else 0.0


def format_cell_name(plan: Plan, cell: int) -> str:
    """Return the title of a guest cell; without a number for a flat guest."""
    return "guest" if len(plan.cells) == 1 else f"guest cell {cell}"


def draw_memory(
    canvas: SvgCanvas,
    node: NumaNode,
    plan: Plan | None,
    place: tuple[float, float, float],
) -> float:
    """Draw the node's memory as a bar, the plan's part in the cell's colour, both with text."""
    x, y, width = place
    shares = list_guest_memory(plan, node.index)
    total = node.memory_bytes
    at_y = y
    if total:
        canvas.draw_rect(x, at_y + 2, width, 12, "bar", radius=2)
        used = 0 if node.memory_free_bytes is None else total - node.memory_free_bytes
        scale = width / total
        at_x = x
        if used > 0:
            canvas.draw_rect(at_x, at_y + 2, min(used * scale, width), 12, "bar-used")
            at_x += min(used * scale, width)
        for cell, share, exact in shares:
            part = min(share * scale, x + width - at_x)
            if part > 0.5:
                look = "cell" if exact else "tint"
                canvas.draw_rect(at_x, at_y + 2, part, 12, f"{look}{cell % CELL_COLOURS}")
                at_x += part
        at_y += 14
    lines = [" · ".join(format_memory_parts(node))]
    if plan is not None:
        for cell, share, exact in shares:
            cell_bytes = plan.cells[cell].memory_bytes
            lines.append(
                f"{format_bytes(share)} for {format_cell_name(plan, cell)}"
                if exact
                else f"part of {format_cell_name(plan, cell)}'s {format_bytes(cell_bytes)}"
            )
    for text in lines:
        for line in wrap(text, 10.5, width):
            at_y += 13.5
            canvas.draw_text(x, at_y, line, 10.5, "ink")
    return at_y - y + 2


def list_guest_memory(plan: Plan | None, node: NodeIndex) -> tuple[tuple[int, int, bool], ...]:
    """Return (cell, bytes, exact) of guest memory on a node; equal shares of several nodes."""
    if plan is None or not plan.memory_nodes:
        return ()
    return tuple(
        (cell.id, cell.memory_bytes // len(cell.host_nodes), len(cell.host_nodes) == 1)
        for cell in plan.cells
        if node in cell.host_nodes
    )


def _frame_title(frame: PackageFrame) -> str:
    if len(frame.packages) < 2:
        return frame.name
    nodes = [block.node.index for block in frame.blocks if block.node is not None]
    verb = "spans" if len(nodes) == 1 else "span"
    return f"{frame.name}: {format_nodes(nodes)} {verb} them"
