"""Paths: host and guest side by side: cells on their nodes, GPUs near to or far from them."""

from collections import Counter
from collections.abc import Iterable

from msgspec import Struct

from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host
from homenode.show.svg_canvas import CHART_WIDTH as WIDTH
from homenode.show.svg_canvas import SvgCanvas
from homenode.text import nodes_text, plural
from homenode.units import format_bytes
from homenode.vm.plan import Plan

_BOX = 146.0
_RIGHT = WIDTH - _BOX - 1  # its border is inside
_ROW, _GAP = 54.0, 8.0
_MOST = 16
"""Nodes or cells that are drawn one by one."""


class HostNode(Struct, frozen=True):
    """A node of the host."""

    name: str
    index: int | None
    devices: int  # how many GPUs (or passed-through functions) are on it


class GuestCell(Struct, frozen=True):
    """A cell of the guest, or what has no place in it (index None)."""

    index: int | None
    detail: str  # vCPUs and memory in a few words
    nodes: tuple[int, ...]  # where its memory is bound; where it is not bound, any
    is_bound: bool
    # how many of its devices are on which host node
    devices_of_node: tuple[tuple[int | None, int], ...]


class Paths(Struct, frozen=True):
    """Both sides."""

    title: str
    nodes: tuple[HostNode, ...]
    cells: tuple[GuestCell, ...]
    noun: str  # "GPU" or "device"


def paths_picture(paths: Paths) -> str:
    """The SVG: solid lines stay on a node, dashed ones may cross nodes."""
    canvas = SvgCanvas.chart(f"{paths.title}: {paths_text(paths)}")
    nodes, cells = paths.nodes[:_MOST], paths.cells[:_MOST]
    height = 22 + max(len(nodes), len(cells)) * (_ROW + _GAP)
    canvas.text(0, 12, "host", 10, "dim")
    canvas.text(_RIGHT, 12, "guest", 10, "dim")
    node_y = {node.index: y for node, y in zip(nodes, _places(len(nodes), height), strict=True)}
    cell_y = _places(len(cells), height)
    for cell, y in zip(cells, cell_y, strict=True):
        _wires(canvas, cell, y, node_y)
    for node in nodes:
        devices = plural(node.devices, paths.noun) if node.devices else ""
        _box(canvas, (0, node_y[node.index]), (node.name, "", devices), "box2")
    for cell, y in zip(cells, cell_y, strict=True):
        count = sum(number for _, number in cell.devices_of_node)
        name = "at no node" if cell.index is None else f"cell {cell.index}"
        devices = plural(count, paths.noun) if count else ""
        _box(canvas, (_RIGHT, y), (name, cell.detail, devices), "box")
    y = height + 8
    left_out = len(paths.nodes) + len(paths.cells) - len(nodes) - len(cells)
    if left_out:
        canvas.text(0, y, f"{left_out} more not drawn", 10, "dim")
        y += 14
    canvas.line((0, y), (26, y), classes="lneutral thick")
    canvas.text(32, y + 3.5, "on its own node", 10, "dim")
    canvas.line((150, y), (176, y), classes="lworse thick far")
    canvas.text(182, y + 3.5, "may cross nodes", 10, "dim")
    return canvas.svg(y + 10)


def paths_text(paths: Paths) -> str:
    """The same in a sentence, for whoever cannot see the picture."""
    parts = []
    for cell in paths.cells:
        count = sum(number for _, number in cell.devices_of_node)
        devices = f"{plural(count, paths.noun)}" if count else ""
        if cell.index is None:
            parts.append(f"{devices} at no node of the guest")
            continue
        memory = f"memory on {nodes_text(cell.nodes)}" if cell.is_bound else "memory anywhere"
        details = ", ".join(filter(None, (cell.detail, memory, devices)))
        parts.append(f"cell {cell.index}: {details}")
    return "; ".join(parts) or "nothing known"


def _places(count: int, height: float) -> list[float]:
    """Tops of boxes, spread evenly over the picture's height."""
    space = (height - 22) / max(count, 1)
    return [22 + space * number + (space - _ROW) / 2 for number in range(count)]


def _wires(canvas: SvgCanvas, cell: GuestCell, y: float, node_y: dict[int | None, float]) -> None:
    if cell.index is not None:
        for node in cell.nodes:
            if node in node_y:
                is_far = not cell.is_bound or len(cell.nodes) > 1
                _wire(canvas, node_y[node] + 16, y + 16, is_far=is_far)
    for home, _ in cell.devices_of_node:
        if home in node_y:
            is_local = cell.index is not None and cell.is_bound and cell.nodes == (home,)
            _wire(canvas, node_y[home] + 43, y + 43, is_far=not is_local)


def _wire(canvas: SvgCanvas, start: float, end: float, *, is_far: bool) -> None:
    middle = WIDTH / 2
    path = f"M{_BOX:.0f} {start:.1f}C{middle:.0f} {start:.1f} {middle:.0f} {end:.1f} "
    path += f"{_RIGHT:.0f} {end:.1f}"
    canvas.path(path, "lworse thick far" if is_far else "lneutral thick")


def _box(
    canvas: SvgCanvas, corner: tuple[float, float], texts: tuple[str, str, str], classes: str
) -> None:
    (x, y), (name, detail, devices) = corner, texts
    canvas.rect(x, y, _BOX, _ROW, classes, radius=5)
    canvas.text(x + 8, y + 14, name, bold=True, width=_BOX - 14)
    if detail:
        canvas.text(x + 8, y + 28, detail, 10, "dim", width=_BOX - 14)
    if devices:
        canvas.rect(x + 6, y + 34, _BOX - 12, 16, "zone", radius=4)
        canvas.text(x + _BOX / 2, y + 46, devices, size=10, anchor="middle", width=_BOX - 16)


def planned_paths(label: str, plan: Plan, host: Host | None) -> Paths:
    """What a plan says. host: distinguishes GPUs from other devices, and nodes that the VM is not
    on.
    """
    counted = _count_gpus(plan, host)
    at = {device.bdf: device for device in plan.vm.hostdevs if device.bdf in counted}
    used = {int(node) for cell in plan.cells for node in cell.host_nodes}
    used |= {int(device.host_node) for device in at.values() if device.host_node is not None}
    if host is not None:
        used |= {int(node.index) for node in host.nodes if node.pus}
    on_node: Counter[int | None] = Counter(device.host_node for device in at.values())
    cells = [
        GuestCell(
            cell.id,
            f"{plural(len(cell.vcpus), 'vCPU')}, {format_bytes(cell.memory_bytes)}",
            tuple(map(int, cell.host_nodes)) or tuple(sorted(used)),
            bool(plan.memory_nodes),
            _by_node(d.host_node for d in at.values() if d.cell == cell.id),
        )
        for cell in plan.cells
    ]
    loose = _by_node(d.host_node for d in at.values() if d.cell is None)
    if loose:
        cells.append(GuestCell(None, "numa_node -1", (), False, loose))
    nodes = tuple(HostNode(f"node {node}", node, on_node[node]) for node in sorted(used))
    if on_node[None]:
        nodes += (HostNode("node unknown", None, on_node[None]),)
    return Paths(label, nodes, tuple(cells), "device" if host is None else "GPU")


def _count_gpus(plan: Plan, host: Host | None) -> set[object]:
    """Devices that are drawn: GPUs, where a host shows which they are; else one of each group."""
    if host is None:
        return {device.group for device in plan.vm.hostdevs}
    gpus = {gpu.bdf for gpu in host.devices_of_kind(DeviceKind.GPU)}
    return {device.bdf for device in plan.vm.hostdevs if device.bdf in gpus}


def _by_node(nodes: Iterable[int | None]) -> tuple[tuple[int | None, int], ...]:
    return tuple(Counter(nodes).items())
