"""PoolPage: a pool as a page: the sums, what still fits, a map of each host, a row for each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from homenode.pci import PciDevice
from homenode.pool.model import Pool, PoolHost, passable_gpus
from homenode.pool.outlook import HostOutlook, PoolOutlook
from homenode.report.palette import CELL_COLOURS, style_sheet
from homenode.report.pool_text import missing_text
from homenode.report.svg_canvas import SvgCanvas
from homenode.topology import Core, Host, NumaNode, RunningDomain
from homenode.units import GIB, format_bytes
from homenode.wording import either, plural, printable

MOST_ALONE = 60
"""Hosts of which each has a map of its own; of more, those with the same map share one."""

MOST_DRAWN = 400
"""Maps; the table has all hosts."""

_WIDTH, _GPU, _GAP, _ROW = 290.0, 17.0, 4.0, 23.0
_BAR_AT, _BAR, _GPUS_AT = 50.0, 82.0, 142.0
_PER_ROW = int((_WIDTH - _GPUS_AT) // (_GPU + _GAP))

_STYLE = """\
:root { color-scheme: light dark; --line: #d3dae1; --dim: #4d5965; --panel: #f6f8fa;
  --free: #1a7f37; --bad: #b03a2e; }
@media (prefers-color-scheme: dark) { :root { --line: #35414d; --dim: #b3bec9; --panel: #171e26;
  --free: #4cc26b; --bad: #ff8a7a; } }
body { margin: 1.2em auto; max-width: 1680px; padding: 0 16px; color: #16202a; background: #fff;
  font: 16px/1.45 system-ui, "Noto Sans", "DejaVu Sans", Arial, sans-serif; }
@media (prefers-color-scheme: dark) { body { color: #ecf1f6; background: #10151b; } }
h1 { font-size: 1.4em; margin: .2em 0; } h2 { font-size: 1.1em; margin: 1.4em 0 .4em; }
.sums { display: flex; flex-wrap: wrap; gap: 8px; padding: 0; margin: 0; list-style: none; }
.sums li { border: 1px solid var(--line); border-radius: 6px; padding: .3em .8em; }
.sums b { font-size: 1.3em; display: block; } .note { color: var(--dim); font-size: .87em; }
.bad { color: var(--bad); }
.hosts { display: grid; gap: 10px; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 290px), 1fr)); }
figure { margin: 0; padding: 6px 8px; border: 1px solid var(--line); border-radius: 6px;
  background: var(--panel); break-inside: avoid; min-width: 0; }
figure.short { border-color: var(--bad); }
figcaption { overflow-wrap: anywhere; font-size: .87em; }
figure svg, .legend svg { max-width: 100%; height: auto; display: block; }
.vms { list-style: none; margin: 0; padding: 0; font-size: .8em; display: flex; flex-wrap: wrap;
  gap: 0 10px; }
.vms li { max-width: 100%; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.key { display: inline-block; min-width: 1.3em; text-align: center; border-radius: 3px;
  font-weight: 700; margin-right: .3em; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: .87em; margin: .3em 0 .8em; }
.legend span { display: inline-flex; gap: .4em; align-items: center; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .87em; }
td, th { padding: 3px 10px; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
td:first-child, th:first-child { text-align: left; }
.chart .free { fill: none; stroke: var(--free); stroke-width: 1.5; }
.chart .stranded { fill: none; stroke: var(--bad); stroke-width: 2; stroke-dasharray: 3 2; }
"""


@dataclass(frozen=True, slots=True)
class _Vm:
    """A VM on a map: its number there, and what its row says."""

    number: int
    vm: RunningDomain

    @property
    def colour(self) -> int:
        return self.number % len(CELL_COLOURS)


class _HostMap:
    """What the map of a host shows; hosts of equal keys have the same map."""

    def __init__(self, host: Host, found: HostOutlook) -> None:
        self.host, self.found = host, found
        counted = [vm for vm in host.domains if vm.running or vm.planned]
        self.vms = tuple(_Vm(number, vm) for number, vm in enumerate(counted))
        self.nodes = tuple(node for node in host.nodes if node.pus)
        self._holder = {bdf: one for one in self.vms for bdf in one.vm.devices}
        self._mediated = {uuid for one in self.vms for uuid in one.vm.mediated}
        self._stranded = {bdf for part in found.stranded for bdf in part.gpus}
        known = {node.index for node in self.nodes}
        gpus = passable_gpus(host)
        self.gpus = {
            node.index: [gpu for gpu in gpus if gpu.node == node.index] for node in self.nodes
        }
        self.without_node = [gpu for gpu in gpus if gpu.node not in known]

    def key(self) -> tuple[object, ...]:
        return (
            tuple(self.cores(node) for node in self.nodes),
            tuple(self.gpu_class(gpu) for own in self.gpus.values() for gpu in own),
            tuple(map(len, self.gpus.values())),
            len(self.without_node),
            self.found.free,
        )

    def cores(self, node: NumaNode) -> tuple[int, tuple[int, ...]]:
        """The node's cores, and those of each VM there."""
        own = [core for core in self.host.cores if core.pus <= node.pus]
        return len(own), tuple(self._cores_of(one.vm, own) for one in self.vms)

    @staticmethod
    def _cores_of(vm: RunningDomain, own: Sequence[Core]) -> int:
        bits = 0
        for pin in vm.vcpu_pins:
            if pin is None:
                return 0
            bits |= pin.bits
        return sum(bool(core.pus.bits & bits) for core in own)

    def gpu_class(self, gpu: PciDevice) -> tuple[str, int | None, int]:
        """How a GPU is drawn, the VM that has it, and how many of its parts are in use."""
        parts = sum(part.uuid in self._mediated for part in gpu.parts if part.uuid)
        vm = self._holder.get(gpu.bdf)
        if vm is not None:
            return "used", vm.number, parts
        return ("stranded" if gpu.bdf in self._stranded else "free"), None, parts

    def memory(self, node: NumaNode) -> tuple[int, int | None]:
        """Bytes that VMs are bound to have of the node, and all."""
        used = sum(
            size for one in self.vms for index, size in one.vm.memory_by_node if index == node.index
        )
        return used, node.memory_bytes

    def svg(self) -> str:
        """A row for each node: its cores and memory by VM, and its GPUs."""
        canvas = SvgCanvas.chart(f"nodes and GPUs of {self.found.name}", _WIDTH)
        y = 0.0
        for node in self.nodes:
            self._draw_node(canvas, node, y)
            y += self._draw_gpus(canvas, self.gpus[node.index], y)
        if self.without_node:
            canvas.text(0, y + 14, "node unknown", 11, "dim")
            y += self._draw_gpus(canvas, self.without_node, y)
        return canvas.svg(y)

    def _draw_node(self, canvas: SvgCanvas, node: NumaNode, y: float) -> None:
        canvas.text(0, y + 14, f"node {node.index}", 11, "dim")
        every, by_vm = self.cores(node)
        said = f"{sum(by_vm)} of {plural(every, 'core')} in use"
        canvas.rect(_BAR_AT, y + 3, _BAR, 9, "bar", title=said)
        x = _BAR_AT
        for one, count in zip(self.vms, by_vm, strict=True):
            if count and every:
                width = _BAR * count / every
                title = f"{one.vm.name}: {plural(count, 'core')}; {said}"
                canvas.rect(x, y + 3, width, 9, f"cell{one.colour}", title=title)
                x += width
        used, size = self.memory(node)
        if size:
            said = f"{format_bytes(used)} of {format_bytes(size)} bound to VMs"
            canvas.rect(_BAR_AT, y + 14, _BAR, 4, "bar", title=said)
            canvas.rect(_BAR_AT, y + 14, _BAR * min(1.0, used / size), 4, "bar-used", title=said)

    def _draw_gpus(self, canvas: SvgCanvas, gpus: Sequence[PciDevice], y: float) -> float:
        for number, gpu in enumerate(gpus):
            left = _GPUS_AT + number % _PER_ROW * (_GPU + _GAP)
            top = y + 2 + number // _PER_ROW * (_GPU + _GAP)
            self._draw_gpu(canvas, gpu, left, top)
        rows = max(1, -(-len(gpus) // _PER_ROW))
        return max(_ROW, rows * (_GPU + _GAP) + 3)

    def _draw_gpu(self, canvas: SvgCanvas, gpu: PciDevice, x: float, y: float) -> None:
        name, vm, parts = self.gpu_class(gpu)
        units = sum(part.uuid is not None and part.is_for_vms for part in gpu.parts)
        said = [str(gpu.bdf)]
        said.append(name if vm is None else self.vms[vm].vm.name)
        if units:
            said.append(f"{parts} of {units} parts in use")
        title = ", ".join(said)
        if vm is not None:
            colour = self.vms[vm].colour
            canvas.rect(x, y, _GPU, _GPU, f"cell{colour}", radius=2, title=title)
            canvas.text(x + _GPU / 2, y + 13, str(vm + 1), 11, f"on-cell{colour}", anchor="middle")
            return
        if parts and units:
            height = (_GPU - 2) * min(1.0, parts / units)
            canvas.rect(x + 1, y + _GPU - 1 - height, _GPU - 2, height, "bar-used", title=title)
        canvas.rect(x + 1, y + 1, _GPU - 2, _GPU - 2, name, radius=2, title=title)


def pool_maps(pool: Pool, outlook: PoolOutlook) -> str:
    """A map of each host; of many hosts one for those with the same map."""
    hosts = list(zip(pool.hosts, outlook.hosts, strict=True))
    groups: dict[object, list[tuple[PoolHost, HostOutlook]]] = {}
    for number, (one, found) in enumerate(hosts):
        key: object = number
        if len(hosts) > MOST_ALONE:
            key = (one.shape, _HostMap(pool.host(one), found).key())
        groups.setdefault(key, []).append((one, found))
    drawn = list(groups.values())[:MOST_DRAWN]
    maps = "".join(_figure(pool, group) for group in drawn)
    left = sum(len(group) for group in groups.values()) - sum(map(len, drawn))
    more = f"<p>{plural(left, 'host')} more in the table below.</p>" if left else ""
    return f'<div class="hosts">{maps}</div>{more}'


def _figure(pool: Pool, group: Sequence[tuple[PoolHost, HostOutlook]]) -> str:
    one, found = group[0]
    drawn = _HostMap(pool.host(one), found)
    alike = f" and {len(group) - 1} alike" if len(group) > 1 else ""
    free = found.free
    fits = [fit for fit in found.fits if fit.local + fit.degraded]
    fitting = either([f"{_fit(fit.local, fit.degraded)} {fit.flavour}" for fit in fits])
    short = ' class="short"' if found.stranded else ""
    gpus = f"{free.free_gpus} of {plural(free.gpus, 'GPU')} free" if free.gpus else "no GPUs"
    stranded = f'<br><span class="bad">stranded: {_stranded(found)}</span>' * bool(found.stranded)
    names = "" if len(group) > 1 else "".join(map(_vm_row, drawn.vms))
    return (
        f"<figure{short}><figcaption><b>{_text(one.name)}{alike}</b> "
        f'<span class="note">{plural(free.vms, "VM")}, {gpus}'
        f"{'; fits ' + _text(fitting) if fitting else ''}</span>{stranded}</figcaption>"
        f"{drawn.svg()}" + (f'<ul class="vms">{names}</ul>' if names else "") + "</figure>"
    )


def _vm_row(one: _Vm) -> str:
    colour = CELL_COLOURS[one.colour]
    floats = " (not pinned)" if not one.vm.vcpu_pins or None in one.vm.vcpu_pins else ""
    name = _text(one.vm.name)
    return (
        f'<li title="{name}"><span class="key" style="background:{colour.fill};color:{colour.ink}">'
        f"{one.number + 1}</span>{name}{floats}</li>"
    )


def pool_page(pool: Pool, outlook: PoolOutlook) -> str:
    """The page: no scripts, nothing from elsewhere."""
    names = [fit.flavour for fit in outlook.fits]
    head = ["host", "VMs", "free GPUs", "free cores", "free memory", *names, "stranded"]
    rows = "".join(map(_row, outlook.hosts))
    failures = "".join(
        f"<li><b>{_text(one.source)}</b>: {_text(one.reason)}</li>" for one in outlook.failures
    )
    left_out = f"<h2>Left out</h2><ul>{failures}</ul>" if failures else ""
    title = f"Pool: {plural(len(pool.hosts), 'host')}, {plural(outlook.free.vms, 'VM')}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="generator" content="homenode">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title>\n<style>\n{_STYLE}{style_sheet('.chart')}</style></head>\n<body>"
        f'<h1>{title}</h1>\n<ul class="sums">{"".join(_sums(outlook))}</ul>\n'
        f"<h2>Hosts</h2>{_legend()}{pool_maps(pool, outlook)}\n"
        '<h2>By host</h2><p class="note">Flavours: how many more VMs fit with full locality, +N: '
        'with less.</p><div class="scroll"><table><tr>'
        + "".join(f"<th>{_text(name)}</th>" for name in head)
        + f"</tr>{rows}</table></div>{left_out}</body></html>\n"
    )


def _sums(outlook: PoolOutlook) -> Iterator[str]:
    free = outlook.free
    yield _sum(f"{free.free_gpus} of {free.gpus}", "GPUs free")
    yield _sum(f"{free.free_cores} of {free.cores}", "cores free")
    if free.memory_bytes is not None and free.free_memory_bytes is not None:
        every = format_bytes(free.memory_bytes // GIB * GIB)
        yield _sum(f"{format_bytes(free.free_memory_bytes // GIB * GIB)} of {every}", "memory free")
    for fit in outlook.fits:
        less = ", +N: with less locality" if fit.degraded else ""
        yield _sum(_fit(fit.local, fit.degraded), f"more {fit.flavour} VMs fit{less}")
    missing = missing_text(outlook.stranded)
    said = f"stranded GPUs{': ' + missing if missing else ''}"
    yield _sum(str(outlook.stranded_gpus), said, "bad" if outlook.stranded else "")


def _sum(value: str, what: str, classes: str = "") -> str:
    return (
        f'<li><b class="{classes}">{_text(value)}</b><span class="note">{_text(what)}</span></li>'
    )


def _legend() -> str:
    entries = (
        ("cell0", "1", "GPU of VM 1; the VM's cores have the same colour"),
        ("free", "", "free GPU"),
        ("stranded", "", "stranded GPU: free, but no flavour can use it"),
    )
    parts = []
    for name, number, said in entries:
        canvas = SvgCanvas.chart(said, _GPU)
        canvas.rect(1, 1, _GPU - 2, _GPU - 2, name, radius=2)
        if number:
            canvas.text(_GPU / 2, 13, number, 11, "on-cell0", anchor="middle")
        parts.append(f"<span>{canvas.svg(_GPU)}{said}</span>")
    canvas = SvgCanvas.chart("cores and memory of a node", 46)
    canvas.rect(0, 2, 46, 9, "bar")
    canvas.rect(0, 2, 22, 9, "cell0")
    canvas.rect(0, 13, 46, 4, "bar")
    canvas.rect(0, 13, 30, 4, "bar-used")
    parts.append(f"<span>{canvas.svg(_GPU)}a node's cores by VM, below its memory</span>")
    return f'<div class="legend">{"".join(parts)}</div>'


def _row(host: HostOutlook) -> str:
    free = host.free
    memory = free.free_memory_bytes
    cells = [
        _text(host.name),
        str(free.vms),
        f"{free.free_gpus}/{free.gpus}",
        f"{free.free_cores}/{free.cores}",
        "unknown" if memory is None else format_bytes(memory // GIB * GIB),
        *(_fit(fit.local, fit.degraded) for fit in host.fits),
        _stranded(host),
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>\n"


def _stranded(host: HostOutlook) -> str:
    return ", ".join(f"{len(one.gpus)} ({_text(one.missing)})" for one in host.stranded) or "0"


def _fit(local: int, degraded: int) -> str:
    return f"{local}+{degraded}" if degraded else str(local)


def _text(text: str) -> str:
    return escape(printable(text))
