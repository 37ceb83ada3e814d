"""Pages of pools: the sums, a map of each host, a row for each; and what a simulation came to."""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from homenode.cluster.pool.model import Pool, PoolHost, passable_gpus
from homenode.cluster.pool.outlook import HostOutlook, PoolOutlook
from homenode.cluster.pool.replay.simulation import Figure, Simulation
from homenode.doc import Doc, Gallery, Items, Part, Picture, Section, Span, Table, Text, Words
from homenode.machine.pci import PciDevice
from homenode.machine.topology import Core, Host, NumaNode, RunningDomain
from homenode.show.curves import Curve, curve_chart
from homenode.show.pool_text import fit_text, missing_text, pool_table, stranded_text
from homenode.show.svg_canvas import CELL_COLOURS, SERIES, SvgCanvas
from homenode.units import GIB, format_bytes
from homenode.wording import either, plural

MOST_ALONE = 60
"""Hosts of which each has a map of its own; of more, those with the same map share one."""

MOST_DRAWN = 400
"""Maps; the table has all hosts."""

_WIDTH, _GPU, _GAP, _ROW = 290.0, 17.0, 4.0, 23.0
_BAR_AT, _BAR, _GPUS_AT = 50.0, 82.0, 142.0
_PER_ROW = int((_WIDTH - _GPUS_AT) // (_GPU + _GAP))


class _Vm(Struct, frozen=True):
    """A VM on a map: its number there, and what its row says."""

    number: int
    vm: RunningDomain

    @property
    def colour(self) -> int:
        return self.number % CELL_COLOURS


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
        canvas = SvgCanvas.chart(f"nodes and GPUs of {self.found.name}", _WIDTH, "host")
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


def pool_page(pool: Pool, outlook: PoolOutlook) -> Doc:
    """The sums, what still fits, a map of each host, a row for each."""
    title = f"Pool: {plural(len(pool.hosts), 'host')}, {plural(outlook.free.vms, 'VM')}"
    maps = (Gallery(tuple(_legend()), "legend"), *_host_maps(pool, outlook))
    table = pool_table(outlook, [(host,) for host in outlook.hosts], is_wide=True)
    about = (
        "GPUs, cores: free/all. Flavours: how many more VMs fit with full locality, +N: with less."
    )
    failures = tuple((Span(one.source, "bold"), f": {one.reason}") for one in outlook.failures)
    parts = (
        Items(tuple(_sums(outlook)), "sums"),
        Section("Hosts", maps, "hosts", "Hosts"),
        Section("By host", (table,), "by-host", "By host", about),
    )
    left_out = Section("Left out", (Items(failures),), "left-out", "Left out")
    return Doc(title, (*parts, left_out) if failures else parts)


def _host_maps(pool: Pool, outlook: PoolOutlook) -> Iterator[Part]:
    """A map of each host; of many hosts one for those with the same map."""
    hosts = list(zip(pool.hosts, outlook.hosts, strict=True))
    groups: dict[object, list[tuple[PoolHost, HostOutlook]]] = {}
    for number, (one, found) in enumerate(hosts):
        key: object = number
        if len(hosts) > MOST_ALONE:
            key = (one.shape, _HostMap(pool.host(one), found).key())
        groups.setdefault(key, []).append((one, found))
    drawn = list(groups.values())[:MOST_DRAWN]
    yield Gallery(tuple(_host_map(pool, group) for group in drawn), "hosts")
    if left := len(hosts) - sum(map(len, drawn)):
        yield Text(f"{plural(left, 'host')} more in the table below.")


def _host_map(pool: Pool, group: Sequence[tuple[PoolHost, HostOutlook]]) -> Picture:
    one, found = group[0]
    drawn = _HostMap(pool.host(one), found)
    alike = f" and {len(group) - 1} alike" if len(group) > 1 else ""
    free = found.free
    fitting = either(
        f"{fit_text(fit)} {fit.flavour}" for fit in found.fits if fit.local + fit.degraded
    )
    gpus = f"{free.free_gpus} of {plural(free.gpus, 'GPU')} free" if free.gpus else "no GPUs"
    said = f"{plural(free.vms, 'VM')}, {gpus}" + (f"; fits {fitting}" if fitting else "")
    notes: list[Words] = [said]
    if found.stranded:
        notes.append(Span(f"stranded: {stranded_text(found)}", "bad"))
    if len(group) == 1:
        notes += map(_vm_words, drawn.vms)
    look = "short" if found.stranded else ""
    return Picture(f"{one.name}{alike}", drawn.svg(), tuple(notes), look)


def _vm_words(one: _Vm) -> Words:
    floats = " (not pinned)" if not one.vm.vcpu_pins or None in one.vm.vcpu_pins else ""
    return Span(str(one.number + 1), f"key key{one.colour}"), f" {one.vm.name}{floats}"


def _sums(outlook: PoolOutlook) -> Iterator[Words]:
    free = outlook.free
    yield _sum(f"{free.free_gpus} of {free.gpus}", "GPUs free")
    yield _sum(f"{free.free_cores} of {free.cores}", "cores free")
    if free.memory_bytes is not None and free.free_memory_bytes is not None:
        every = format_bytes(free.memory_bytes // GIB * GIB)
        yield _sum(f"{format_bytes(free.free_memory_bytes // GIB * GIB)} of {every}", "memory free")
    for fit in outlook.fits:
        less = ", +N: with less locality" if fit.degraded else ""
        yield _sum(fit_text(fit), f"more {fit.flavour} VMs fit{less}")
    missing = missing_text(outlook.stranded)
    said = f"stranded GPUs{': ' + missing if missing else ''}"
    yield _sum(str(outlook.stranded_gpus), said, " bad" if outlook.stranded else "")


def _sum(value: str, what: str, look: str = "") -> Words:
    return Span(value, f"sum{look}"), Span(f" {what}", "dim small")


def _legend() -> Iterator[Picture]:
    for look, number, said in (
        ("cell0", "1", "GPU of VM 1; the VM's cores have the same colour"),
        ("free", "", "free GPU"),
        ("stranded", "", "stranded GPU: free, but no flavour can use it"),
    ):
        canvas = SvgCanvas.chart(said, _GPU, "host")
        canvas.rect(1, 1, _GPU - 2, _GPU - 2, look, radius=2)
        if number:
            canvas.text(_GPU / 2, 13, number, 11, "on-cell0", anchor="middle")
        yield Picture("", canvas.svg(_GPU), (said,))
    canvas = SvgCanvas.chart("cores and memory of a node", 46, "host")
    for y, width, height, look in ((2, 46, 9, "bar"), (2, 22, 9, "cell0")):
        canvas.rect(0, y, width, height, look)
    for width, look in ((46, "bar"), (30, "bar-used")):
        canvas.rect(0, 13, width, 4, look)
    yield Picture("", canvas.svg(_GPU), ("a node's cores by VM, below its memory",))


def simulation_text(simulation: Simulation) -> Doc:
    """A row for each policy; then the bound."""
    head = f"simulated: {simulation.what}; {plural(simulation.orders, 'order')}"
    return Doc(head, (_table(simulation), Text(_notes(simulation))))


def _table(simulation: Simulation) -> Table:
    names = [one.name.replace("_percent", " %") for one in simulation.outcomes[0].figures]
    figures = tuple(name.replace("_", " ") for name in names)
    rows = tuple((one.policy, *map(_figure, one.figures)) for one in simulation.outcomes)
    return Table(heads=("policy", *figures), rows=rows, numeric=figures)


def _figure(one: Figure) -> str:
    mean = f"{one.mean:.2f}" if one.name.endswith("_percent") else _short(one.mean)
    if one.low is None or one.high is None or one.low == one.high:
        return mean
    return f"{mean} ±{one.high - one.mean:.2f}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.2f}"


def _notes(simulation: Simulation) -> str:
    """What ± means, and the bound."""
    bound = simulation.bound
    said = ["±: 95 % interval of the mean over the orders."] * (simulation.orders > 1)
    if bound is not None:
        known = "(a linear program that knows all arrivals)"
        said.append(f"No policy refuses less than {bound.mean:.2f} % {known}.")
    return " ".join(said)


def simulation_page(simulation: Simulation) -> Doc:
    """The same with the curves of the first order."""
    about = f"{plural(simulation.orders, 'order')}; no VM ran. {_notes(simulation)}"
    title = f"Simulated: {simulation.what}"
    return Doc(title, (_table(simulation), Gallery(tuple(_chart(simulation)))), about)


def _chart(simulation: Simulation) -> Iterator[Picture]:
    """The curves of the first order; each value holds until the next."""
    curves = tuple(
        Curve(one.policy, tuple(_stairs(_thinned(one.curve))), number % SERIES)
        for number, one in enumerate(simulation.outcomes)
        if len(one.curve) > 1
    )
    if curves:
        x_name, y_name = simulation.curve_of
        title = f"{y_name} over {x_name}"
        svg = curve_chart(title, f"{y_name}, first order", curves, across_name=x_name)
        yield Picture(title, svg)


def _thinned(
    curve: Sequence[tuple[float, float]], most: int = 400
) -> Sequence[tuple[float, float]]:
    return curve[:: max(1, len(curve) // most)]


def _stairs(curve: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """
    >>> list(_stairs([(0, 1), (2, 5)]))
    [(0, 1), (2, 1), (2, 5)]
    """
    last: float | None = None
    for x, y in curve:
        if last is not None:
            yield x, last
        yield x, y
        last = y
