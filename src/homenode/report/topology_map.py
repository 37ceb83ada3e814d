"""TopologyMap: a picture of a host as SVG, and with a plan of where one VM lies on it.

The picture is 1600 units wide and as high as it must be, holds no scripts and needs no fonts, and
follows the viewer's light or dark theme. The same host and plan give the same bytes.
"""

from homenode.plan.model import Plan
from homenode.report.cpu_groups import PackageFrame, package_frames
from homenode.report.device_groups import devices_by_node
from homenode.report.host_counts import host_counts
from homenode.report.map_cores import CellSize, cell_size, rows_of_cores
from homenode.report.map_devices import device_facts
from homenode.report.map_nodes import (
    Scene,
    columns_of,
    core_space,
    draw_packages,
)
from homenode.report.map_page import (
    draw_distances,
    draw_guest,
    draw_legend,
    draw_lines,
    draw_links,
    draw_loose_devices,
    draw_other_nodes,
    plan_line,
)
from homenode.report.palette import style_sheet
from homenode.report.pu_use import uses_of_pus
from homenode.report.svg_canvas import SvgCanvas
from homenode.topology import Host

WIDTH = 1600.0
_MARGIN = 24.0
_ZOOMS = (1.6, 1.5, 1.4, 1.3, 1.2, 1.15, 1.1, 1.05, 1.0)


def topology_map(host: Host, plan: Plan | None = None) -> str:
    """The SVG document of a host: packages, nodes, LLCs, cores, memory, and the devices of each
    node; with a plan also its vCPUs on their PUs, its memory, and its devices by guest cell."""
    uses = uses_of_pus(host, plan)
    keep = {bdf for domain in host.domains if domain.running for bdf in domain.devices}
    if plan is not None:
        keep |= {device.bdf for device in plan.devices}
    devices = devices_by_node(host, keep)
    scene = Scene(host, plan, uses, device_facts(host, plan))
    frames = package_frames(host, devices)
    counts = host_counts(host)
    title = f"Topology of {host.name}"
    description = counts
    if plan is not None:
        title += f" with VM {plan.domain_name}"
        description = f"{plan_line(plan)}. Host: {counts}"
    canvas = SvgCanvas.document(WIDTH, title, description, style_sheet())
    width = WIDTH - 2 * _MARGIN
    y = _MARGIN
    canvas.text(_MARGIN, y + 20, host.name, 24, bold=True, width=width)
    y += 26
    cpu = host.cpu.name or host.cpu.vendor
    y += draw_lines(
        canvas, [f"{cpu}. {counts}" if cpu else counts], (_MARGIN, y, width), 12.5, "dim"
    )
    if host.assumed:
        said = f"Assumed, no source prints it: {'; '.join(host.assumed)}."
        y += draw_lines(canvas, [said], (_MARGIN, y, width), 12.5, "dim")
    y += 14
    if plan is not None:
        y += 4
        for_plan = draw_lines(canvas, [plan_line(plan)], (_MARGIN, y, width), 15)
        y += for_plan + 12
        y += draw_guest(canvas, scene, (_MARGIN, y, width)) + 14
    size = _cell_size(scene, frames)
    y += draw_packages(canvas, frames, scene, size, (_MARGIN, y, width))
    y += 12 if frames else 0
    drawn = {block.node.index for frame in frames for block in frame.blocks if block.node}
    y += draw_other_nodes(canvas, host, (_MARGIN, y, width))
    loose = [group for group in devices if group.node not in drawn]
    y += draw_loose_devices(canvas, loose, scene.facts, (_MARGIN, y, width))
    y += draw_links(canvas, host, (_MARGIN, y, width))
    y += 4
    table = draw_distances(canvas, host, (_MARGIN, y, width / 2))
    shown = sum(bool(node.pus) for node in host.nodes)
    left = 46 + (36 if shown <= 8 else 28) * shown + 60 if table else 0
    left = max(left, 260) if table else 0
    legend = draw_legend(canvas, scene, (_MARGIN + left, y, width - left))
    return canvas.svg(y + max(table, legend) + _MARGIN)


def _cell_size(scene: Scene, frames: tuple[PackageFrame, ...]) -> CellSize:
    """The largest PUs that need no more rows of cores than the smallest ones do."""
    planned = scene.plan is not None and bool(scene.plan.vcpu_pins)
    sizes = [cell_size(scene.host, scene.uses, planned, zoom) for zoom in _ZOOMS]
    if not frames:
        return sizes[-1]
    across, nodes_across = columns_of(frames)
    blocks = [block for frame in frames for block in frame.blocks]
    largest = max(blocks, key=lambda block: len(block.pus))
    space = core_space(WIDTH - 2 * _MARGIN, across, nodes_across)
    fewest = rows_of_cores(largest.groups, sizes[-1], space)
    return next(size for size in sizes if rows_of_cores(largest.groups, size, space) <= fewest)
