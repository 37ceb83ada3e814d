"""PoolPage: a pool as a page: the sums, a small map of each host, and a row for each."""

from collections.abc import Sequence
from html import escape

from homenode.bdf import Bdf
from homenode.pool.model import Pool, PoolHost, passable_gpus
from homenode.pool.outlook import HostOutlook, PoolOutlook
from homenode.report.palette import CELL_COLOURS
from homenode.report.svg_canvas import SvgCanvas
from homenode.topology import Host
from homenode.units import GIB, format_bytes
from homenode.wording import plural, printable

MOST_DRAWN = 400
"""Hosts that are drawn; the table has all."""

_ACROSS = 4
_WIDTH, _GPU, _GAP, _NODE = 1200.0, 16.0, 4.0, 30.0

_CSS = (
    ".page{fill:#fff}.ink{fill:#1b1f24}.dim{fill:#57606a}.host{fill:#f6f8fa;stroke:#d0d7de}"
    ".bar{fill:#d0d7de}.used{fill:#57606a}.free{fill:#fff;stroke:#1a7f37;stroke-width:1.5}"
    ".stranded{fill:#fff;stroke:#cf222e;stroke-width:2;stroke-dasharray:3 2}"
    "text{font-family:system-ui,sans-serif}"
    + "".join(f".vm{i}{{fill:{colour.fill}}}" for i, colour in enumerate(CELL_COLOURS))
)


def pool_map(pool: Pool, outlook: PoolOutlook) -> str:
    """An SVG: of each host its nodes with cores in use, and its GPUs by the VM that has them."""
    drawn = list(zip(pool.hosts, outlook.hosts, strict=True))[:MOST_DRAWN]
    canvas = SvgCanvas.document(
        _WIDTH,
        "Pool",
        "Each host with its nodes. A square is a GPU: coloured by the VM that has it, open where "
        "it is free, dashed where it is stranded. A bar is a node's cores, dark where in use.",
        _CSS,
    )
    width = _WIDTH / _ACROSS
    y = 8.0
    for start in range(0, len(drawn), _ACROSS):
        heights = [
            _draw(canvas, pool, one, found, column * width, y, width - 10)
            for column, (one, found) in enumerate(drawn[start : start + _ACROSS])
        ]
        y += max(heights) + 10
    return canvas.svg(y)


def _draw(
    canvas: SvgCanvas,
    pool: Pool,
    one: PoolHost,
    found: HostOutlook,
    x: float,
    y: float,
    width: float,
) -> float:
    host = pool.host(one)
    nodes = [node for node in host.nodes if node.pus]
    holder = {bdf: vm.name for vm in host.domains for bdf in vm.devices if _counts(vm)}
    colours = {name: i % len(CELL_COLOURS) for i, name in enumerate(dict.fromkeys(holder.values()))}
    stranded = {bdf for part in found.stranded for bdf in part.gpus}
    per_row = max(1, int((width - 120) // (_GPU + _GAP)))
    gpus = {
        node.index: [g.bdf for g in passable_gpus(host) if g.node == node.index] for node in nodes
    }
    lost = [g.bdf for g in passable_gpus(host) if g.node not in gpus]
    height = 24.0 + sum(_height(len(gpus[node.index]), per_row) for node in nodes)
    height += _height(len(lost), per_row) if lost else 0
    canvas.rect(x, y, width, height, "host", radius=4)
    canvas.text(x + 8, y + 16, one.name, 12, bold=True, width=width - 90)
    canvas.text(x + width - 8, y + 16, plural(found.free.vms, "VM"), 10, "dim", anchor="end")
    at = y + 24
    busy = _busy_cores(host)
    for node in nodes:
        own = [core for core in host.cores if core.pus <= node.pus]
        used = sum(bool(core.pus.bits & busy) for core in own)
        canvas.text(x + 8, at + 12, f"node {node.index}", 10, "dim")
        share = used / len(own) if own else 0
        canvas.rect(x + 56, at + 3, 52, 10, "bar", title=f"{used} of {len(own)} cores in use")
        canvas.rect(x + 56, at + 3, 52 * share, 10, "used")
        _squares(canvas, gpus[node.index], holder, colours, stranded, x + 116, at, per_row)
        at += _height(len(gpus[node.index]), per_row)
    if lost:
        canvas.text(x + 8, at + 12, "node unknown", 10, "dim")
        _squares(canvas, lost, holder, colours, stranded, x + 116, at, per_row)
    return height


def _squares(
    canvas: SvgCanvas,
    gpus: Sequence[Bdf],
    holder: dict[Bdf, str],
    colours: dict[str, int],
    stranded: set[Bdf],
    x: float,
    y: float,
    per_row: int,
) -> None:
    for number, bdf in enumerate(gpus):
        left = x + number % per_row * (_GPU + _GAP)
        top = y + number // per_row * (_GPU + _GAP)
        vm = holder.get(bdf)
        if vm is not None:
            classes, said = f"vm{colours[vm]}", f"{bdf}: {vm}"
        elif bdf in stranded:
            classes, said = "stranded", f"{bdf}: free, stranded"
        else:
            classes, said = "free", f"{bdf}: free"
        canvas.rect(left, top, _GPU - 2, _GPU - 2, classes, radius=2, title=said)


def _height(gpus: int, per_row: int) -> float:
    rows = max(1, -(-gpus // per_row))
    return rows * (_GPU + _GAP) + 2


def _counts(vm: object) -> bool:
    return bool(getattr(vm, "running", False) or getattr(vm, "planned", False))


def _busy_cores(host: Host) -> int:
    online = 0
    for core in host.cores:
        online |= core.pus.bits
    busy = 0
    for vm in host.domains:
        for pin in vm.vcpu_pins if _counts(vm) else ():
            if pin is not None and online & ~pin.bits:
                busy |= pin.bits
    return busy


def pool_page(pool: Pool, outlook: PoolOutlook) -> str:
    """The page: no scripts, nothing from elsewhere."""
    free = outlook.free
    names = [fit.flavour for fit in outlook.fits]
    head = ["host", "VMs", "free GPUs", "free cores", "free memory", *names, "stranded"]
    rows = "".join(_row(host) for host in outlook.hosts)
    drawn = min(len(pool.hosts), MOST_DRAWN)
    more = "" if drawn == len(pool.hosts) else f"<p>The first {drawn} hosts are drawn.</p>"
    failures = "".join(
        f"<li><b>{_text(one.source)}</b>: {_text(one.reason)}</li>" for one in outlook.failures
    )
    left_out = f"<h2>Left out</h2><ul>{failures}</ul>" if failures else ""
    stranded = ", ".join(f"{one.gpus} for lack of {_text(one.missing)}" for one in outlook.stranded)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>homenode pool</title>'
        '<meta name="viewport" content="width=device-width">'
        "<style>body{font:15px/1.4 system-ui,sans-serif;max-width:1240px;margin:2em auto;"
        "padding:0 1em;color:#1b1f24}table{border-collapse:collapse;font-size:13px}td,th{padding:"
        "3px 10px;border-bottom:1px solid #d0d7de;text-align:right}td:first-child,th:first-child"
        "{text-align:left}svg{max-width:100%;height:auto}</style>"
        f"<h1>{plural(len(pool.hosts), 'host')}, {plural(free.vms, 'VM')}</h1>"
        f"<p>{free.free_gpus} of {plural(free.gpus, 'GPU')} and {free.free_cores} of "
        f"{plural(free.cores, 'core')} are free. Stranded GPUs: {stranded or 'none'}.</p>"
        f"{pool_map(pool, outlook)}{more}"
        "<p>A square is a GPU: coloured by its VM, open where free, dashed where stranded. A bar "
        "is a node's cores.</p><table><tr>"
        + "".join(f"<th>{_text(name)}</th>" for name in head)
        + f"</tr>{rows}</table>{left_out}</html>\n"
    )


def _row(host: HostOutlook) -> str:
    free = host.free
    memory = free.free_memory_bytes
    cells = [
        _text(host.name),
        str(free.vms),
        f"{free.free_gpus}/{free.gpus}",
        f"{free.free_cores}/{free.cores}",
        "unknown" if memory is None else format_bytes(memory // GIB * GIB),
        *(f"{fit.local}+{fit.degraded}" if fit.degraded else str(fit.local) for fit in host.fits),
        ", ".join(f"{len(one.gpus)} ({_text(one.missing)})" for one in host.stranded) or "0",
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _text(text: str) -> str:
    return escape(printable(text))
