"""MapNodes: packages as frames; in them nodes with their memory, cores and devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from homenode.indices import NodeIndex
from homenode.plan.model import Plan
from homenode.report.cpu_groups import NodeBlock, PackageFrame
from homenode.report.map_cores import CellSize, draw_core_groups
from homenode.report.map_devices import DeviceFacts, draw_devices
from homenode.report.palette import CELL_COLOURS
from homenode.report.pu_use import PuUse
from homenode.report.svg_canvas import SvgCanvas
from homenode.report.text_extent import text_width, wrap
from homenode.topology import Host, NumaNode
from homenode.units import format_bytes
from homenode.vm.model import GuestCellId
from homenode.wording import nodes_text, number_list, plural

_PAD, _GAP = 12.0, 12.0
_CHIP = 20.0


@dataclass(frozen=True, slots=True)
class Scene:
    """What every part of the picture looks up."""

    host: Host
    plan: Plan | None
    uses: Mapping[int, PuUse]
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
    across, nodes_across = columns_of(frames)
    frame_width, node_width = _widths(width, across, nodes_across)
    for start in range(0, len(frames), across):
        row_height = 0.0
        drawn = []
        for position, frame in enumerate(frames[start : start + across]):
            frame_x = x + position * (frame_width + _GAP)
            rect = canvas.rect(frame_x, y, frame_width, 0, "package", radius=8)
            drawn.append(rect)
            canvas.text(frame_x + _PAD, y + 20, _frame_title(frame), 13, "ink", bold=True)
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
        for rect in drawn:
            canvas.resize(rect, row_height)
        y += row_height + _GAP
    return y - _GAP - place[1]


def columns_of(frames: Sequence[PackageFrame]) -> tuple[int, int]:
    """Packages side by side, and nodes side by side in a package: at most four nodes in all."""
    nodes_across = min(4, max(len(frame.blocks) for frame in frames))
    return min(len(frames), max(1, 4 // nodes_across)), nodes_across


def core_space(width: float, across: int, nodes_across: int) -> float:
    """What cores may take of a picture's width in one node."""
    return _widths(width, across, nodes_across)[1] - 20


def _widths(width: float, across: int, nodes_across: int) -> tuple[float, float]:
    """Width of a package's frame and of a node's box in it."""
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
    drawn = []
    box_height = 0.0
    for position, block in enumerate(blocks):
        node_x = x + position * (width + _GAP)
        drawn.append(canvas.rect(node_x, y, width, 0, "node", radius=6))
        here = (node_x + 10, y, width - 20)
        box_height = max(
            box_height, _draw_node(canvas, block, scene, size, here, name_packages) + 10
        )
    # Boxes of one row end together, so that their devices begin together.
    for rect in drawn:
        canvas.resize(rect, box_height)
    row_height = box_height
    for position, block in enumerate(blocks):
        if block.devices is not None:
            here = (x + position * (width + _GAP), y + box_height, width)
            height = draw_devices(canvas, block.devices, scene.facts, here, hangs=True)
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
    canvas.text(x, y + 21, name, 15, "ink", bold=True)
    at_y = y + 24
    counts = f"{plural(cores, 'core')}, {plural(len(block.pus), 'PU')}: {block.pus}"
    for line in wrap(counts, 10.5, width):
        at_y += 13.5
        canvas.text(x, at_y, line, 10.5, "dim")
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
    """The guest cells with vCPUs or memory here, in their colours."""
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
        text = f"{cell_name(scene.plan, cell)}: vCPUs {number_list(vcpus)}"
        for line in wrap(text, 11, width - 14, bold=True):
            chip = text_width(line, 11, bold=True) + 14
            if at_x > x and at_x + chip > x + width:
                at_x, at_y = x, at_y + _CHIP + 4
            colour = cell % len(CELL_COLOURS)
            canvas.rect(at_x, at_y, chip, _CHIP, f"cell{colour}", radius=4)
            canvas.text(at_x + 7, at_y + 14, line, 11, f"on-cell{colour}", bold=True)
            at_x += chip + 6
    return at_y - y + _CHIP + 6 if vcpus_of_cell else 0.0


def cell_name(plan: Plan, cell: int) -> str:
    """What to call a guest cell: a flat guest has none to number."""
    return "guest" if len(plan.cells) == 1 else f"guest cell {cell}"


def draw_memory(
    canvas: SvgCanvas,
    node: NumaNode,
    plan: Plan | None,
    place: tuple[float, float, float],
) -> float:
    """The node's memory as a bar, what the plan takes in the cell's colour, and both in words."""
    x, y, width = place
    shares = guest_memory(plan, node.index)
    total = node.memory_bytes
    at_y = y
    if total:
        canvas.rect(x, at_y + 2, width, 12, "bar", radius=2)
        used = 0 if node.memory_free_bytes is None else total - node.memory_free_bytes
        scale = width / total
        at_x = x
        if used > 0:
            canvas.rect(at_x, at_y + 2, min(used * scale, width), 12, "bar-used")
            at_x += min(used * scale, width)
        for cell, share, exact in shares:
            part = min(share * scale, x + width - at_x)
            if part > 0.5:
                look = "cell" if exact else "tint"
                canvas.rect(at_x, at_y + 2, part, 12, f"{look}{cell % len(CELL_COLOURS)}")
                at_x += part
        at_y += 14
    lines = [_memory_text(node)]
    if plan is not None:
        for cell, share, exact in shares:
            whole = plan.cells[cell].memory_bytes
            lines.append(
                f"{format_bytes(share)} for {cell_name(plan, cell)}"
                if exact
                else f"part of {cell_name(plan, cell)}'s {format_bytes(whole)}"
            )
    for text in lines:
        for line in wrap(text, 10.5, width):
            at_y += 13.5
            canvas.text(x, at_y, line, 10.5, "ink")
    return at_y - y + 2


def guest_memory(plan: Plan | None, node: NodeIndex) -> tuple[tuple[int, int, bool], ...]:
    """(cell, bytes, exact) of guest memory bound to a node; equal shares where several hold it."""
    if plan is None or not plan.memory_nodes:
        return ()
    return tuple(
        (cell.id, cell.memory_bytes // len(cell.host_nodes), len(cell.host_nodes) == 1)
        for cell in plan.cells
        if node in cell.host_nodes
    )


def _memory_text(node: NumaNode) -> str:
    if node.memory_bytes is None:
        return "memory unknown"
    if node.memory_bytes == 0:
        return "no memory"
    parts = [format_bytes(node.memory_bytes)]
    if node.memory_free_bytes is not None:
        parts.append(f"{format_bytes(node.memory_free_bytes)} free")
    for pool in node.page_pools:
        if pool.total_pages:
            size = format_bytes(pool.page_bytes)
            parts.append(f"{size} pages: {pool.free_pages} of {pool.total_pages} free")
    return " · ".join(parts)


def _frame_title(frame: PackageFrame) -> str:
    if not frame.packages:
        return "package unknown"
    if len(frame.packages) == 1:
        return f"package {frame.packages[0]}"
    nodes = [block.node.index for block in frame.blocks if block.node is not None]
    verb = "spans" if len(nodes) == 1 else "span"
    return f"packages {number_list(frame.packages)}: {nodes_text(nodes)} {verb} them"
