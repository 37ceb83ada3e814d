"""Start: the real VM, started paused with its real devices and without its guest, and ended. [I/O]

QEMU then reports memory backends and vCPUs by QMP, and devices and their BARs in `info qtree`,
because query-pci shows nothing below a bridge before firmware has set it up. Its lines, of QEMU
7.2:

    dev: vfio-pci, id "hostdev0"
      host = "0000:19:00.0"
      class 3D controller, addr 00:00.0, pci id 10de:2330 (sub 10de:16c1)
      bar 0: mem at 0xffffffffffffffff [0xfffffe]

No firmware has placed the BAR: its end is its size less two.

The journal is written before libvirt is called: after a kill, `homenode restore --list` shows the
VM and `homenode restore` ends it, unless its guest was resumed.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from msgspec import Struct, field, structs

from homenode.bdf import Bdf
from homenode.change.journal import (
    ChangeEntry,
    ChangeHead,
    ChangeState,
    Journal,
    Note,
    default_root,
    state_hint,
)
from homenode.check.verify.live.capture import observe_running_domain
from homenode.check.verify.live.checks import verify_live
from homenode.cpuset import CpuSet
from homenode.errors import ParseError, UsageError
from homenode.findings import Finding, Findings, Severity, add_source, finding, sort_findings
from homenode.formats import NotJsonError, decode_json
from homenode.machine.topology import Host
from homenode.safe.durable import remove_file
from homenode.safe.record_directory import RecordDirectory
from homenode.text import command_line, plural
from homenode.units import format_bytes
from homenode.vm.domain.controllers import qemu_arguments
from homenode.vm.domain.document import Document
from homenode.vm.domain.read import open_domain
from homenode.vm.hypervisor.connection import (
    DomainState,
    add_connection,
    domain_argument,
    is_local,
)
from homenode.vm.hypervisor.virsh import RejectedError, Virsh
from homenode.vm.model import Vm
from homenode.vm.plan import Plan
from homenode.vm.targets.qemu_command import split_fields

T = TypeVar("T")

START = "start-paused"
_DIRECTORY = "paused"
_PAUSED = "paused"


class PausedStart(Struct, frozen=True, kw_only=True):
    """See ChangeStep. Facts of its entry: the domain's `name`, libvirt's `run_id`, and for each new
    file in `made` its modification time."""

    virsh: Virsh
    uuid: str
    name: str
    makes: Sequence[str] = ()  # files that a start makes: NVRAM from its template, logs
    locks: Sequence[int] = ()  # that the daemon's program keeps

    def do(self, note: Note) -> ChangeEntry:
        entry = ChangeEntry(
            what=ChangeState.BEGIN,
            kind=START,
            subject=self.uuid,
            made=tuple(path for path in self.makes if not Path(path).exists()),
            by_hand=command_line("virsh", "-c", self.virsh.connect, "destroy", self.uuid),
            facts={"name": self.name},
        )
        note(entry)
        try:
            self.virsh.start_paused(self.uuid, self.locks)
        except RejectedError:
            note(_add_change_times(entry))
            raise
        run_id = self.virsh.find_domain(self.uuid).run_id
        done_entry = _add_change_times(entry.with_state(ChangeState.DONE), run_id=str(run_id))
        note(done_entry)
        return done_entry

    def undo(self, entry: ChangeEntry, note: Note) -> ChangeEntry:
        state = self.virsh.find_domain(entry.subject)
        run_id = entry.facts.get("run_id")
        is_same = run_id is None or run_id == str(state.run_id)
        if state.is_active and not (is_same and state.state == _PAUSED):
            kept_entry = entry.with_state(ChangeState.KEPT)
            note(kept_entry)
            return kept_entry
        note(entry.with_state(ChangeState.UNDOING))
        if state.is_active:
            self.virsh.destroy(entry.subject)
        for path in entry.made:
            # A guest that ran since wrote the file. After a kill, one that is off now may have run.
            changed = _read_change_time(path)
            if entry.facts.get(path, changed if state.is_active else None) == changed:
                remove_file(Path(path))
        undone = entry.with_state(ChangeState.UNDONE)
        note(undone)
        return undone

    def is_done(self, entry: ChangeEntry) -> bool:
        """Return whether the instance exists and is paused."""
        state = self.virsh.find_domain(entry.subject)
        run_id = entry.facts.get("run_id")
        is_same = run_id is None or run_id == str(state.run_id)
        return state.is_active and is_same and state.state == _PAUSED


def _add_change_times(entry: ChangeEntry, **facts: str) -> ChangeEntry:
    times = {path: _read_change_time(path) for path in entry.made}
    return structs.replace(entry, facts=entry.facts | facts | times)


def _read_change_time(path: str) -> str:
    """Return a file's time of change in ns; "" if the file is missing."""
    return str(Path(path).stat().st_mtime_ns) if Path(path).exists() else ""


def open_paused_journal(root: Path, virsh: Virsh, uuid: str, name: str) -> Journal:
    """Return the journal of a domain's paused starts. root: homenode's own directory."""
    words = command_line("homenode", "verify", name, "--start")
    argument = domain_argument(name, uuid)
    undo = command_line(*add_connection(virsh.connect, "homenode", "restore", argument))
    head = ChangeHead(run=uuid, command=words, undo=undo, connect=virsh.connect)
    return Journal(RecordDirectory(root / _DIRECTORY / uuid, hint=state_hint), head)


def list_paused_journals(root: Path) -> Iterator[Journal]:
    directory = root / _DIRECTORY
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        head = ChangeHead(run=path.name, command="homenode verify --start", undo="")
        yield Journal(RecordDirectory(path, hint=state_hint), head)


def end_paused(virsh: Virsh, root: Path, uuid: str, name: str) -> tuple[ChangeEntry, ...]:
    """End the VMs of killed starts, and return the outcome of each."""
    step = PausedStart(virsh=virsh, uuid=uuid, name=name)
    return open_paused_journal(root, virsh, uuid, name).undo(lambda entry: step)


def run_while_paused(step: PausedStart, journal: Journal, look: Callable[[], T]) -> T:
    """Run `look` while the VM is paused, then end the VM in any case."""
    try:
        step.do(journal.write)
        return look()
    finally:
        journal.undo(lambda entry: step)


class PausedDomain(Struct, frozen=True, kw_only=True):
    """A paused start of a domain that is being checked."""

    virsh: Virsh
    state: DomainState
    document: Document  # the definition that the start will use


def find_startable(connect: str, name: str) -> PausedDomain:
    """Return the domain to start. Raises UsageError if it runs, has saved memory or is remote."""
    if not is_local(connect):
        raise UsageError(f"--start with --connect {connect}: expected a daemon on this machine")
    virsh = Virsh(connect)
    state = virsh.find_domain(name)
    journal = open_paused_journal(default_root(), virsh, state.uuid, state.name)
    if state.is_active:
        was_killed = bool(journal.to_undo())
        raise UsageError(
            f"{state.name}: --start: expected a domain that is shut off, found it {state.state}"
            + (", as a killed --start left it" if was_killed else ""),
            hint=journal.stored_head().undo
            if was_killed
            else command_line("homenode", "verify", "--live", state.argument),
        )
    if state.managed_save:
        raise UsageError(
            f"{state.name}: --start: expected no managed save image, which a start would use up",
            hint=command_line("virsh", "-c", connect, "managedsave-remove", state.uuid),
        )
    document = open_domain(virsh.read_definition(state.uuid), f"domain {state.name}")
    for file in list_created_files(document):
        path = Path(file.path)
        if file.is_emptied and path.is_file() and path.stat().st_size:
            raise UsageError(
                f"{state.name}: --start: expected no file that a start empties, found {path}",
                hint=f"move it away, or let {file.owner} append to it",
            )
    return PausedDomain(virsh=virsh, state=state, document=document)


class CreatedFile(NamedTuple):
    """A file or socket that a start creates if it is missing."""

    owner: str  # the element or option that names it
    path: str
    is_emptied: bool  # if it has content already


_CHARACTER_DEVICES = ("serial", "parallel", "console", "channel", "smartcard", "redirdev")
_FILE_OPTIONS = ("-pidfile", "-D")
_PATH_OPTIONS = frozenset(
    "-object -chardev -serial -parallel -monitor -qmp -qmp-pretty -debugcon -gdb -vnc".split()
)


def list_created_files(document: Document) -> Iterator[CreatedFile]:
    """Yield the files and sockets that a start creates or truncates."""
    root = document.root
    nvram = root.find("os/nvram")
    if nvram is not None:
        path = nvram.value("source/@file") if nvram.get("type") == "file" else nvram.text.strip()
        yield from _find_created_file("<nvram>", path, "on")
    for name in _CHARACTER_DEVICES:
        for device in root.all(f"devices/{name}"):
            if device.get("type") == "file":
                yield from _find_created_file(
                    f"<{name}>", device.value("source/@path"), device.value("source/@append")
                )
            yield from _find_created_file(
                f"<{name}>", device.value("log/@file"), device.value("log/@append")
            )
    for graphics in root.all("devices/graphics"):
        for element in (graphics, *graphics.all("listen")):
            yield from _find_created_file("<graphics>", element.get("socket"), None)
    for audio in root.all("devices/audio"):
        yield from _find_created_file("<audio>", audio.get("path"), None)
    words = [
        argument.get("value") or ""
        for argument in qemu_arguments(document)
        if argument.name.endswith("arg")
    ]
    for option, value in pairwise(words):
        if option in _FILE_OPTIONS:
            yield from _find_created_file(option, value, None)
        elif option in _PATH_OPTIONS:
            first, pairs = split_fields(value)
            properties = dict(pairs)
            for path, append in (
                (first.partition(":")[2], None),  # as in -serial file:/var/log/vm.log
                (properties.get("path"), properties.get("append")),
                (properties.get("logfile"), properties.get("logappend")),
                (properties.get("mem-path"), "on"),  # a backend keeps the file's content
                (properties.get("file") if first == "filter-dump" else None, None),
            ):
                yield from _find_created_file(option, path, append)


def _find_created_file(owner: str, path: str | None, append: str | None) -> Iterator[CreatedFile]:
    if path is not None and path.startswith("/"):
        yield CreatedFile(owner, path, is_emptied=append not in ("on", "yes"))


def _list_created_paths(document: Document, name: str) -> list[str]:
    """Return these paths, and the default paths of unnamed files."""
    root = document.root
    paths = [file.path for file in list_created_files(document)]
    if root.value("os/@firmware") == "efi" and root.find("os/nvram") is None:
        paths.append(f"/var/lib/libvirt/qemu/nvram/{name}_VARS.fd")
    return paths + [
        f"/dev/shm/{memory.get('name')}"  # noqa: S108  # QEMU's own path, which is not opened
        for memory in root.all("devices/shmem")
        if memory.child("server") is None
    ]


def verify_paused(
    on: PausedDomain, plan: Plan | None, host: Host | None, locks: Sequence[int] = ()
) -> Findings:
    """Start the VM paused, compare the reports of host and QEMU with the plan, and end it.

    plan: for this host; None = the VM's own document. Nothing of it is left, also if the start
    fails. Raises HostError if the end fails, which the journal then records.
    """
    name, uuid = on.state.name, on.state.uuid
    makes = _list_created_paths(on.document, name)
    step = PausedStart(virsh=on.virsh, uuid=uuid, name=name, makes=makes, locks=locks)
    journal = open_paused_journal(default_root(), on.virsh, uuid, name)
    try:
        return run_while_paused(step, journal, lambda: _look(on, plan, host))
    except RejectedError as error:
        failure = finding("start-failed", name, "a start", error.message, on.virsh.connect)
        return Findings(checked=(f"{name}: started paused",), findings=(failure,))


def _look(on: PausedDomain, plan: Plan | None, host: Host | None) -> Findings:
    uuid = on.state.uuid
    expected_vm, running = observe_running_domain(uuid, on.virsh.connect, plan)
    answers = {
        command: on.virsh.query_monitor(uuid, f'{{"execute": "{command}"}}') for command in COMMANDS
    }
    view = read_view(answers, on.virsh.query_monitor(uuid, "info qtree", is_text=True))
    live = verify_live(expected_vm, running)
    findings = [*live.findings, *check_view(expected_vm, view, host)]
    named = add_source(findings, f"QEMU of {on.state.name}, paused")
    return Findings(checked=(*live.checked, *view_lines(view)), findings=sort_findings(named))


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
    """A QEMU object that provides guest memory. Source: Memdev of QMP."""

    id: str = ""
    size: int
    policy: str
    host_nodes: tuple[int, ...] = ()


class MonitorCpu(Struct, frozen=True, kw_only=True, rename="kebab"):
    cpu_index: int
    props: Mapping[str, int | str] = {}  # "node-id" if the guest has cells


class MonitorDevice(Struct, kw_only=True):
    driver: str
    id: str
    host: Bdf | None = None  # host address of a passed-through function
    pci_id: tuple[int, int] | None = None
    bars: dict[int, int] = field(default_factory=dict)  # sizes in bytes


class MonitorView(Struct, frozen=True, kw_only=True):
    """QEMU's answers to COMMANDS and `info qtree`."""

    status: str  # "prelaunch" or "paused" if no vCPU runs
    backends: tuple[MonitorBackend, ...]
    cpus: tuple[MonitorCpu, ...]
    devices: tuple[MonitorDevice, ...]


class _Status(Struct):
    status: str
    running: bool


class _QmpAnswer(Struct, Generic[T], rename={"value": "return"}):
    value: T


def read_view(answers: Mapping[str, str], tree: str) -> MonitorView:
    """Return the view of QMP's answers by their command, and of `info qtree`. Raises ParseError."""
    try:
        status = decode_json(answers["query-status"], _QmpAnswer[_Status]).value
        backends = decode_json(
            answers["query-memdev"], _QmpAnswer[tuple[MonitorBackend, ...]]
        ).value
        cpus = decode_json(answers["query-cpus-fast"], _QmpAnswer[tuple[MonitorCpu, ...]]).value
    except NotJsonError as error:
        raise ParseError("QEMU's monitor", "an answer of QMP", str(error)) from None
    return MonitorView(
        status="running" if status.running else status.status,
        backends=backends,
        cpus=cpus,
        devices=tuple(read_devices(tree)),
    )


def read_devices(tree: str) -> Iterator[MonitorDevice]:
    """Yield the devices of `info qtree`, in its order."""
    devices: list[MonitorDevice] = []
    for line in tree.splitlines():
        if (match := _DEVICE.match(line)) is not None and len(devices) < _MAX_DEVICES:
            devices.append(MonitorDevice(driver=match[1], id=match[2]))
        elif not devices:
            continue
        elif (match := _HOST.match(line)) is not None:
            devices[-1].host = Bdf.parse(match[1])
        elif (match := _PCI_ID.match(line)) is not None:
            devices[-1].pci_id = int(match[1], 16), int(match[2], 16)
        elif (match := _BAR.match(line)) is not None:
            size = (int(match[4], 16) - int(match[3], 16) + 1) & _NOWHERE
            devices[-1].bars[int(match[1])] = size
    yield from devices


def check_view(expected_vm: Vm, view: MonitorView, host: Host | None) -> Iterator[Finding]:
    """Compare QEMU's answers with the plan. host: None = BARs are not compared."""
    if view.status == "running":
        yield finding("start-ran", expected_vm.name, "a guest that is paused", "it runs")
    yield from _check_memory(expected_vm, view)
    yield from _check_cpus(expected_vm, view)
    yield from _check_devices(expected_vm, view, host)


def _check_memory(expected_vm: Vm, view: MonitorView) -> Iterator[Finding]:
    backends = {backend.id: backend for backend in view.backends}
    for cell in expected_vm.cells_or_whole:
        if not cell.memory_bytes:
            continue
        names = (f"ram-node{cell.id}",) if expected_vm.cells else _FLAT
        backend = next((backends[name] for name in names if name in backends), None)
        subject = f"memory of cell {cell.id}" if expected_vm.cells else "memory"
        if backend is None:  # an old machine type has its memory without one
            yield finding(
                "start-backend",
                subject,
                expected=format_bytes(cell.memory_bytes),
                observed=f"unknown: QEMU lists no backend {' or '.join(names)}",
                severity=Severity.INCONCLUSIVE,
                cost=None,
                fix=None,
            )
            continue
        if backend.size != cell.memory_bytes:
            yield finding(
                "start-backend",
                subject,
                expected=format_bytes(cell.memory_bytes),
                observed=f"{format_bytes(backend.size)} in {backend.id}",
            )
        nodes = CpuSet(backend.host_nodes)
        if cell.nodes and cell.mode == "strict" and set(backend.host_nodes) != set(cell.nodes):
            # A flat VM bound only by cgroups has no nodes in QEMU; its pages show its nodes.
            if not backend.host_nodes and not expected_vm.cells:
                continue
            yield finding(
                "start-backend",
                subject,
                expected=f"bound to node {cell.nodes}",
                observed=f"{backend.id}: policy {backend.policy}, node {nodes or 'none'}",
            )


def _check_cpus(expected_vm: Vm, view: MonitorView) -> Iterator[Finding]:
    online = expected_vm.vcpus_online
    if len(view.cpus) != online:
        yield finding("start-cpus", expected_vm.name, plural(online, "vCPU"), str(len(view.cpus)))
    cell_of = {int(vcpu): cell.id for cell in expected_vm.cells for vcpu in cell.vcpus}
    for cpu in view.cpus:
        node = cpu.props.get("node-id")
        planned_cell = cell_of.get(cpu.cpu_index)
        if planned_cell is not None and node != planned_cell:
            subject = f"vCPU {cpu.cpu_index}"
            observed = "no cell" if node is None else f"cell {node}"
            yield finding("start-cpus", subject, f"cell {planned_cell}", observed)


def _check_devices(expected_vm: Vm, view: MonitorView, host: Host | None) -> Iterator[Finding]:
    device_of = {seen.host: seen for seen in view.devices if seen.host is not None}
    for hostdev in expected_vm.hostdevs:
        if hostdev.uuid is not None:
            continue
        device = device_of.get(hostdev.bdf)
        if device is None:
            yield finding(
                "start-function", str(hostdev.bdf), "a device of QEMU for it", "no such device"
            )
            continue
        real = None if host is None else host.find_device(hostdev.bdf)
        for bar in () if real is None else real.bars:
            size = device.bars.get(bar.index)
            if bar.index < 6 and bar.is_memory and size != bar.size_bytes:
                yield finding(
                    "start-bar",
                    f"{hostdev.bdf} BAR {bar.index}",
                    expected=format_bytes(bar.size_bytes),
                    observed="none" if size is None else format_bytes(size),
                )


def view_lines(view: MonitorView) -> Iterator[str]:
    yield f"QEMU is {view.status}: no guest instruction has run"
    for backend in view.backends:
        nodes = f"node {CpuSet(backend.host_nodes)}" if backend.host_nodes else "any node"
        yield f"{backend.id}: {format_bytes(backend.size)}, policy {backend.policy}, {nodes}"
    functions = [device for device in view.devices if device.pci_id is not None]
    addresses = ", ".join(str(device.host) for device in functions if device.host is not None)
    bars = plural(sum(len(device.bars) for device in functions), "BAR")
    yield (
        f"{plural(len(view.cpus), 'vCPU thread')}; {plural(len(functions), 'PCI function')} with "
        f"{bars}; from the host: {addresses or 'none'}"
    )
