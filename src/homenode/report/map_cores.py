"""MapCores: LLCs as groups, cores as cells and PUs as labelled boxes, with what runs on them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from homenode.report.cpu_groups import KIND_WORDS, CoreGroup
from homenode.report.palette import CELL_COLOURS
from homenode.report.pu_use import FREE, PuUse
from homenode.report.svg_canvas import LEAST_TEXT_SIZE, SvgCanvas
from homenode.report.text_extent import text_width, wrap
from homenode.topology import Core, Host
from homenode.units import format_bytes
from homenode.wording import number_list, plural

LABELLED_PUS = 1024
"""Hosts with more PUs are drawn with ranges of PUs per LLC; labels would make the page too tall."""

_CAPTION_SIZE = 10.0
_PAD, _GAP, _CORE_GAP = 5.0, 8.0, 3.0


@dataclass(frozen=True, slots=True)
class CellSize:
    """Size of one PU's box and of the text in it. labelled: False draws squares without text."""

    width: float
    height: float
    large: float
    small: float
    labelled: bool = True


def cell_size(host: Host, uses: Mapping[int, PuUse], planned: bool, zoom: float) -> CellSize:
    """The size at which every PU's number, and with a plan every vCPU's, fits its box."""
    if len(host.pus) > LABELLED_PUS:
        return CellSize(11, 11, 0, 0, labelled=False)
    # Boxes may grow more than their text: large numbers are no easier to read.
    grown = min(zoom, 1.25)
    large, small = 11.0 * grown, (LEAST_TEXT_SIZE if planned else 9.5) * grown
    widest_pu = max((text_width(str(pu.index), small) for pu in host.pus), default=0)
    if not planned:
        return CellSize(max(22 * zoom, widest_pu + 5), 17 * zoom, large, small)
    labels = {use_label(use) for use in uses.values()}
    widest = max((text_width(label, large, bold=True) for label in labels), default=0)
    return CellSize(max(26 * zoom, widest_pu + 5, widest + 5), 27 * zoom, large, small)


def use_label(use: PuUse) -> str:
    """What stands on a PU: the vCPU's number, or the thread of QEMU's that runs there."""
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
    uses: Mapping[int, PuUse],
    size: CellSize,
    place: tuple[float, float, float],
    name_packages: bool,
) -> float:
    """Draw the groups from (x, y) within a width; returns the height that they take."""
    x, y, width = place
    if not groups:
        return 0.0
    columns = _columns(groups, size, width)
    at_x, at_y, row_height = x, y, 0.0
    for group in groups:
        cell = _core_size(group, size)
        threads = max(len(core.pus) for core in group.cores)
        across = min(columns, len(group.cores))
        cores_width = across * (cell[0] + _CORE_GAP) - _CORE_GAP
        caption = _caption(group, name_packages)
        least = max(cores_width, 150.0 if not size.labelled else 0.0)
        caption_width = max(text_width(line, _CAPTION_SIZE) for line in caption)
        frame_width = min(max(least, caption_width) + 2 * _PAD, width)
        notes = () if size.labelled else _range_lines(group, uses, frame_width - 2 * _PAD)
        caption = tuple(
            part for line in caption for part in wrap(line, _CAPTION_SIZE, frame_width - 2 * _PAD)
        )
        rows = -(-len(group.cores) // across)
        head = 4 + 12 * len(caption) + 3
        frame_height = head + rows * (cell[1] + _CORE_GAP) - _CORE_GAP + _PAD + 11.5 * len(notes)
        if at_x > x and at_x + frame_width > x + width + 0.01:
            at_x, at_y, row_height = x, at_y + row_height + _GAP, 0.0
        canvas.rect(at_x, at_y, frame_width, frame_height, "llc", radius=4)
        for line_number, line in enumerate(caption):
            canvas.text(at_x + _PAD, at_y + 13 + 12 * line_number, line, _CAPTION_SIZE, "dim")
        for position, core in enumerate(group.cores):
            row, column = divmod(position, across)
            core_x = at_x + _PAD + column * (cell[0] + _CORE_GAP)
            core_y = at_y + head + row * (cell[1] + _CORE_GAP)
            _draw_core(canvas, core, uses, size, (core_x, core_y, threads))
        notes_top = at_y + head + rows * (cell[1] + _CORE_GAP) + 8
        for line_number, line in enumerate(notes):
            canvas.text(at_x + _PAD, notes_top + 11.5 * line_number, line, 9, "ink")
        at_x += frame_width + _GAP
        row_height = max(row_height, frame_height)
    return at_y + row_height - y


def _draw_core(
    canvas: SvgCanvas,
    core: Core,
    uses: Mapping[int, PuUse],
    size: CellSize,
    place: tuple[float, float, int],
) -> None:
    x, y, threads = place
    across, _ = _threads_grid(threads)
    for position, pu in enumerate(core.pus):
        column, row = position % across, position // across
        box = (x + column * size.width, y + row * size.height)
        _draw_pu(canvas, pu, uses.get(pu, FREE), size, box)
    width, height = min(len(core.pus), across) * size.width, size.height
    height *= -(-len(core.pus) // across)
    kind = "" if core.kind is None else f", {core.kind.value} core"
    title = f"core {core.index} (package {core.id.package}, OS core {core.id.core}{kind})"
    frame = canvas.rect(x, y, width, height, "core", radius=2.5, title=f"{title}: PUs {core.pus}")
    frame.set("pointer-events", "all")


def _draw_pu(
    canvas: SvgCanvas, pu: int, use: PuUse, size: CellSize, corner: tuple[float, float]
) -> None:
    x, y = corner
    ink, fill, classes = "ink", None, "pu"
    if use.vcpus and use.cell is not None:
        colour = use.cell % len(CELL_COLOURS)
        classes, ink = f"pu cell{colour}", f"on-cell{colour}"
    elif use.emulator or use.iothreads:
        classes, ink = "pu host-thread", "on-host-thread"
    elif use.other_cell is not None:
        classes = f"pu tint{use.other_cell % len(CELL_COLOURS)}"
    elif use.barred or use.used_by:
        fill = "barred" if use.barred else "taken"
    inset = 1.0
    if use.isolated:
        classes += " isolated"
    canvas.rect(
        x + inset,
        y + inset,
        size.width - 2 * inset,
        size.height - 2 * inset,
        classes,
        radius=1.5,
        fill=fill,
        title=f"PU {pu}: used by {', '.join(use.used_by)}" if use.used_by else None,
    )
    if use.vcpus and (use.emulator or use.iothreads):
        canvas.rect(x + 2.5, y + 2.5, size.width - 5, size.height - 5, "outline wire", radius=1)
    if not size.labelled:
        return
    label, middle = use_label(use), x + size.width / 2
    if label:
        canvas.text(
            middle, y + size.height * 0.5, label, size.large, ink, bold=True, anchor="middle"
        )
        baseline = y + size.height - 0.13 * size.height
    else:
        baseline = y + size.height / 2 + size.small * 0.36
    if fill is not None and not label:
        ground = text_width(str(pu), size.small) + 2
        canvas.rect(
            middle - ground / 2,
            y + size.height / 2 - size.small * 0.6,
            ground,
            size.small * 1.2,
            "pu-ground",
        )
    canvas.text(middle, baseline, str(pu), size.small, ink if label else "dim", anchor="middle")


def rows_of_cores(groups: Sequence[CoreGroup], size: CellSize, width: float) -> int:
    """How many rows of cores the groups take together."""
    if not groups:
        return 0
    columns = _columns(groups, size, width)
    frame = max(columns * (_core_size(groups[0], size)[0] + _CORE_GAP), 110.0) + 2 * _PAD
    neighbours = max(1, int((width + _GAP) // (frame + _GAP)))
    most = max(len(group.cores) for group in groups)
    return -(-len(groups) // neighbours) * -(-most // columns)


def _columns(groups: Sequence[CoreGroup], size: CellSize, width: float) -> int:
    """Cores in a row of a group, such that all groups together take the least height."""
    largest = max(groups, key=lambda group: len(group.cores))
    cell_width = max(_core_size(group, size)[0] for group in groups) + _CORE_GAP
    cell_height = max(_core_size(group, size)[1] for group in groups) + _CORE_GAP
    most = max(1, int((width - 2 * _PAD + _CORE_GAP) // cell_width))
    best: tuple[float, int, int] | None = None
    for rows in range(1, len(largest.cores) + 1):
        columns = -(-len(largest.cores) // rows)
        if columns > most:
            continue
        frame = max(columns * cell_width - _CORE_GAP, 110.0) + 2 * _PAD
        neighbours = max(1, int((width + _GAP) // (frame + _GAP)))
        lines = -(-len(groups) // neighbours)
        option = (lines * (rows * cell_height + 30), rows, columns)
        best = option if best is None else min(best, option)
    return best[2] if best else 1


def _core_size(group: CoreGroup, size: CellSize) -> tuple[float, float]:
    return _core_box(max(len(core.pus) for core in group.cores), size)


def _core_box(threads: int, size: CellSize) -> tuple[float, float]:
    across, down = _threads_grid(threads)
    return across * size.width, down * size.height


def _threads_grid(threads: int) -> tuple[int, int]:
    """Columns and rows of a core's PUs: siblings below each other, two columns from SMT4 on."""
    across = 1 if threads <= 3 else 2
    return across, -(-threads // across)


def _caption(group: CoreGroup, name_package: bool) -> tuple[str, ...]:
    if group.llc is None:
        parts = ["LLC unknown"]
    else:
        parts = [f"LLC {group.llc.index}", f"L{group.llc.level}"]
        if group.llc.size_bytes is not None:
            parts.append(format_bytes(group.llc.size_bytes))
    if name_package and group.package is not None:
        parts.insert(0, f"package {group.package}")
    first = " · ".join(parts)
    second = []
    if group.kind is not None:
        second.append(KIND_WORDS[group.kind])
    if group.llc is not None and len(group.cores) < group.cores_of_llc:
        second.append(f"{len(group.cores)} of its {plural(group.cores_of_llc, 'core')}")
    return (first, " · ".join(second)) if second else (first,)


def _range_lines(group: CoreGroup, uses: Mapping[int, PuUse], width: float) -> tuple[str, ...]:
    """PUs of a group as ranges, and what runs on them, where the PUs have no labels."""
    texts = [f"PUs {group.pus}"]
    by_cell: dict[int, list[int]] = {}
    host_threads: list[int] = []
    pinned: dict[int, list[int]] = {}
    for pu in group.pus:
        use = uses.get(pu, FREE)
        if use.vcpus and use.cell is not None:
            by_cell.setdefault(use.cell, []).extend(use.vcpus)
            pinned.setdefault(use.cell, []).append(pu)
        if use.emulator or use.iothreads:
            host_threads.append(pu)
    for cell, vcpus in sorted(by_cell.items()):
        texts.append(f"cell {cell}: vCPUs {number_list(vcpus)} on PUs {number_list(pinned[cell])}")
    if host_threads:
        texts.append(f"emulator, IOThreads: PUs {number_list(host_threads)}")
    return tuple(line for text in texts for line in wrap(text, 9, width))
