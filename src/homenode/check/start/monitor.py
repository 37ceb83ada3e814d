"""Monitor: what QEMU itself says of a VM before its guest has run an instruction.

Memory backends and vCPUs by QMP; devices and their BARs from `info qtree`, since query-pci shows
nothing below a bridge that no firmware has set up yet. Its lines, of QEMU 7.2:

    dev: vfio-pci, id "hostdev0"
      host = "0000:19:00.0"
      class 3D controller, addr 00:00.0, pci id 10de:2330 (sub 10de:16c1)
      bar 0: mem at 0xffffffffffffffff [0xfffffe]

No firmware has placed the BAR: its end is its size less two.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from msgspec import Struct, field

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.findings import Finding, finding
from homenode.json_text import NotJsonError, decode_json
from homenode.machine.topology import Host
from homenode.units import format_bytes
from homenode.vm.model import Vm
from homenode.wording import plural

T = TypeVar("T")

COMMANDS = ("query-status", "query-memdev", "query-cpus-fast")
_NOWHERE = (1 << 64) - 1
_MAX_DEVICES = 4096
_DEVICE = re.compile(r' *dev: ([^\s,]{1,64}), id "([^"]{0,128})"\Z', re.ASCII)
_HOST = re.compile(r' *host = "([0-9a-fA-F:.]{1,16})"\Z', re.ASCII)
_PCI_ID = re.compile(r" *class .{1,80}, pci id ([0-9a-f]{4}):([0-9a-f]{4})\b")
_BAR = re.compile(
    r" *bar ([0-6]): (mem|i/o) at 0x([0-9a-f]{1,16}) \[0x([0-9a-f]{1,16})\]", re.ASCII
)
_FLAT = ("pc.ram", "mach-virt.ram")


class MonitorBackend(Struct, frozen=True, kw_only=True, rename="kebab"):
    """An object that gives memory. Source: Memdev of QMP."""

    id: str = ""
    size: int
    policy: str
    host_nodes: tuple[int, ...] = ()


class MonitorCpu(Struct, frozen=True, kw_only=True, rename="kebab"):
    """A vCPU. props: "node-id" where the guest has cells."""

    cpu_index: int
    props: Mapping[str, int | str] = {}


class MonitorDevice(Struct, kw_only=True):
    """A device of QEMU. host: of a passed-through function. bars: sizes in bytes."""

    driver: str
    id: str
    host: Bdf | None = None
    pci_id: tuple[int, int] | None = None
    bars: dict[int, int] = field(default_factory=dict)


class MonitorView(Struct, frozen=True, kw_only=True):
    """All that was asked. status: "prelaunch" or "paused" where no vCPU runs."""

    status: str
    backends: tuple[MonitorBackend, ...]
    cpus: tuple[MonitorCpu, ...]
    devices: tuple[MonitorDevice, ...]


class _Status(Struct):
    status: str
    running: bool


class _Said(Struct, Generic[T], rename={"value": "return"}):
    value: T


def read_view(answers: Mapping[str, str], tree: str) -> MonitorView:
    """The view of QMP's answers by their command, and of `info qtree`. Raises ParseError."""
    try:
        status = decode_json(answers["query-status"], _Said[_Status]).value
        backends = decode_json(answers["query-memdev"], _Said[tuple[MonitorBackend, ...]]).value
        cpus = decode_json(answers["query-cpus-fast"], _Said[tuple[MonitorCpu, ...]]).value
    except NotJsonError as error:
        raise ParseError("QEMU's monitor", "an answer of QMP", str(error)) from None
    return MonitorView(
        status="running" if status.running else status.status,
        backends=backends,
        cpus=cpus,
        devices=tuple(read_devices(tree)),
    )


def read_devices(tree: str) -> Iterator[MonitorDevice]:
    """The devices of `info qtree`, in its order."""
    found: list[MonitorDevice] = []
    for line in tree.splitlines():
        if (match := _DEVICE.match(line)) is not None and len(found) < _MAX_DEVICES:
            found.append(MonitorDevice(driver=match[1], id=match[2]))
        elif not found:
            continue
        elif (match := _HOST.match(line)) is not None:
            found[-1].host = Bdf.parse(match[1])
        elif (match := _PCI_ID.match(line)) is not None:
            found[-1].pci_id = int(match[1], 16), int(match[2], 16)
        elif (match := _BAR.match(line)) is not None:
            size = (int(match[4], 16) - int(match[3], 16) + 1) & _NOWHERE
            found[-1].bars[int(match[1])] = size
    yield from found


def view_findings(expected: Vm, view: MonitorView, host: Host | None) -> Iterator[Finding]:
    """What QEMU was given otherwise than planned. host: whose functions the BARs are compared with;
    None = not compared."""
    if view.status == "running":
        yield finding("start-ran", expected.name, "a guest that is paused", "it runs")
    yield from _memory(expected, view)
    yield from _cpus(expected, view)
    yield from _devices(expected, view, host)


def _memory(expected: Vm, view: MonitorView) -> Iterator[Finding]:
    backends = {one.id: one for one in view.backends}
    for cell in expected.cells_or_whole:
        names = (f"ram-node{cell.id}",) if expected.cells else _FLAT
        backend = next((backends[name] for name in names if name in backends), None)
        if backend is None or not cell.memory_bytes:
            continue
        subject = f"memory of cell {cell.id}" if expected.cells else "memory"
        if backend.size != cell.memory_bytes:
            yield finding(
                "start-backend",
                subject,
                expected=format_bytes(cell.memory_bytes),
                observed=f"{format_bytes(backend.size)} in {backend.id}",
            )
        nodes = CpuSet(backend.host_nodes)
        if cell.nodes and cell.mode == "strict" and set(backend.host_nodes) != set(cell.nodes):
            # A flat VM on cgroups alone has no nodes in QEMU; the pages then say where it is.
            if not backend.host_nodes and not expected.cells:
                continue
            yield finding(
                "start-backend",
                subject,
                expected=f"bound to node {cell.nodes}",
                observed=f"{backend.id}: policy {backend.policy}, node {nodes or 'none'}",
            )


def _cpus(expected: Vm, view: MonitorView) -> Iterator[Finding]:
    online = expected.vcpus_online
    if len(view.cpus) != online:
        yield finding("start-cpus", expected.name, f"{online} vCPUs", str(len(view.cpus)))
    cell_of = {int(vcpu): cell.id for cell in expected.cells for vcpu in cell.vcpus}
    for cpu in view.cpus:
        node = cpu.props.get("node-id")
        wanted = cell_of.get(cpu.cpu_index)
        if wanted is not None and node is not None and node != wanted:
            subject = f"vCPU {cpu.cpu_index}"
            yield finding("start-cpus", subject, f"cell {wanted}", f"cell {node}")


def _devices(expected: Vm, view: MonitorView, host: Host | None) -> Iterator[Finding]:
    given = {one.host: one for one in view.devices if one.host is not None}
    for hostdev in expected.hostdevs:
        if hostdev.uuid is not None:
            continue
        device = given.get(hostdev.bdf)
        if device is None:
            yield finding(
                "start-function", str(hostdev.bdf), "a device of QEMU for it", "no such device"
            )
            continue
        real = None if host is None else host.device(hostdev.bdf)
        for bar in () if real is None else real.bars:
            seen = device.bars.get(bar.index)
            if bar.index < 6 and bar.is_memory and seen != bar.size_bytes:
                yield finding(
                    "start-bar",
                    f"{hostdev.bdf} BAR {bar.index}",
                    expected=format_bytes(bar.size_bytes),
                    observed="none" if seen is None else format_bytes(seen),
                )


def view_lines(view: MonitorView) -> Iterator[str]:
    """What was looked at, for people."""
    yield f"QEMU is {view.status}: no guest instruction has run"
    for one in view.backends:
        nodes = f"node {CpuSet(one.host_nodes)}" if one.host_nodes else "any node"
        yield f"{one.id}: {format_bytes(one.size)}, policy {one.policy}, {nodes}"
    functions = [one for one in view.devices if one.pci_id is not None]
    passed = ", ".join(str(one.host) for one in functions if one.host is not None)
    bars = plural(sum(len(one.bars) for one in functions), "BAR")
    yield (
        f"{plural(len(view.cpus), 'vCPU thread')}; {plural(len(functions), 'PCI function')} with "
        f"{bars}; from the host: {passed or 'none'}"
    )
