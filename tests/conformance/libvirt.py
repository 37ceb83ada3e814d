"""libvirt defines the document, prints what it holds, and writes a command of QEMU, which starts.

What it printed is planned again with another layout, as who changes a VM does.
"""

import os
import random
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from homenode.cpuset import CpuSet
from homenode.errors import InputError, UsageError
from homenode.machine.topology import Host
from homenode.plan.pipeline import PlannedFile, compute_options_size, plan_file
from homenode.units import KIB
from homenode.vm.domain.copy import make_domain
from homenode.vm.layout import PRESETS, GuestCells, GuestPcie
from homenode.vm.model import VmCell
from homenode.vm.plan import Plan, Unplannable
from homenode.vm.plan_options import PlanOptions
from tests.conformance.builds import absent, directory
from tests.conformance.judge import Answer, Facts, Judge
from tests.conformance.qemu import planned_facts, read_facts
from tests.conformance.qemu_machine import QemuError, for_this_machine, machine_of
from tests.conformance.vms import cells_of, random_host, random_options

URI = "qemu:///system"
NAME = f"homenode-conformance-{os.getpid()}"
_BUSES = ("pcie-root", "pci-root")


def _virsh(*words: str) -> subprocess.CompletedProcess[str]:
    argv = ["virsh", "-q", "-c", URI, *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300)


def missing() -> str | None:
    lacking = absent("virsh", "cc", "qemu-system-x86_64")
    return lacking or (f"no libvirtd answers at {URI}" if _virsh("uri").returncode else None)


def version() -> str:
    return _virsh("version", "--daemon").stdout.partition("against daemon: ")[2].split()[0]


def _document(draw: random.Random, wanted: PlanOptions) -> bytes:
    """A new VM, as libvirt's documents are found: IOThreads, other CPUs, without firmware."""
    text = make_domain(*compute_options_size(wanted), architecture="x86_64", name=NAME).decode()
    if draw.random() < 0.5:
        text = text.replace(" firmware='efi'", "")
    if draw.random() < 0.4:
        text = text.replace("</vcpu>", f"</vcpu>\n  <iothreads>{draw.choice((1, 2))}</iothreads>")
    if draw.random() < 0.3:
        text = re.sub(r"<cpu .*?/>", "<cpu mode='host-model'/>", text)
    return text.encode()


def _tuned(document: bytes, wanted: PlanOptions, host: Host) -> PlannedFile | None:
    try:
        return plan_file(document, "vm.xml", wanted, host)
    except (Unplannable, InputError, UsageError):
        return None


def _shown_cells(plan: Plan, given: bytes) -> tuple[VmCell, ...]:
    """A single cell of a document stays in it: its guest is flat already."""
    if plan.layout.cells is GuestCells.SINGLE and given.count(b"<cell id=") == 1:
        return plan.cells
    return cells_of(plan)


def _device_cells(plan: Plan, given: bytes) -> dict[str, int | None]:
    """Where the layout leaves the PCIe tree as it was, expander buses of cells stay with them."""
    found: dict[str, int | None] = {str(device.bdf): device.cell for device in plan.vm.hostdevs}
    if plan.layout.pcie is not GuestPcie.HOST:
        before: dict[str, int | None] = dict(read_document(given.decode())["devices"])  # type: ignore[call-overload]
        cells = len(_shown_cells(plan, given))
        found |= {bdf: cell for bdf, cell in before.items() if cell is None or cell < cells}
    return found


def planned_of_document(plan: Plan, given: bytes) -> Facts:
    cells = _shown_cells(plan, given)
    per_cell = [CpuSet(cell.host_nodes) for cell in cells]
    places = [str(d.address) for d in plan.vm.hostdevs if d.address is not None]
    facts: dict[str, object] = {
        "vCPUs": plan.vm.vcpus,
        "memory": plan.vm.memory_bytes,
        "pins": list(plan.vcpu_pins),
        "emulator": plan.vm.emulator_pus,
        "IOThreads": list(plan.iothread_pus),
        "cells": [(cell.vcpus, cell.memory_bytes, cell.distances) for cell in cells],
        "memory of cells": per_cell if cells_of(plan) and plan.memory_mode is not None else [],
        "huge pages": plan.vm.page_bytes,
        "devices": list(_device_cells(plan, given).items()),
    }
    if len(places) == len(plan.vm.hostdevs):  # else libvirt chooses them
        facts["addresses"] = places
    if plan.memory_mode is not None:
        facts["binding"] = (str(plan.memory_mode), CpuSet(plan.memory_nodes))
    if plan.vm.cpu_topology is not None:
        facts["topology"] = tuple(plan.vm.cpu_topology)
    return facts


def _bdf(address: Element) -> str:
    domain, bus, slot, function = (
        int(address.get(key, "0"), 16) for key in ("domain", "bus", "slot", "function")
    )
    return f"{domain:04x}:{bus:02x}:{slot:02x}.{function:x}"


def _cell_of(bus: int, root: Element) -> int | None:
    """The cell of the expander bus above a bus."""
    while True:
        controller = root.find(f"devices/controller[@type='pci'][@index='{bus}']")
        assert controller is not None, f"no PCI controller {bus}"
        if controller.get("model") == "pcie-expander-bus":
            node = controller.findtext("target/node")
            return None if node is None else int(node)
        if controller.get("model") in _BUSES:
            return None
        address = controller.find("address")
        assert address is not None
        bus = int(address.get("bus", "0"), 16)


def read_document(text: str) -> Facts:
    """What libvirt holds, by the document that it prints."""
    root = ElementTree.fromstring(text)

    def sets(path: str) -> list[CpuSet]:
        found = sorted(root.iterfind(path), key=lambda e: int(e.get("vcpu") or e.get("iothread")))  # type: ignore[arg-type]
        return [CpuSet.parse(one.get("cpuset", ""), path) for one in found]

    emulator = root.find("cputune/emulatorpin")
    topology = root.find("cpu/topology")
    memory = root.find("numatune/memory")
    page = root.find("memoryBacking/hugepages/page")
    hostdevs = {
        _bdf(source): place
        for hostdev in root.iterfind("devices/hostdev[@type='pci']")
        if (source := hostdev.find("source/address")) is not None
        and (place := hostdev.find("address")) is not None
    }
    return {
        "vCPUs": int(root.findtext("vcpu", "0")),
        "memory": int(root.findtext("memory", "0")) * KIB,
        "pins": sets("cputune/vcpupin"),
        "emulator": None if emulator is None else CpuSet.parse(emulator.get("cpuset", ""), "x"),
        "IOThreads": sets("cputune/iothreadpin"),
        "cells": [
            (
                CpuSet.parse(cell.get("cpus", ""), "cpus"),
                int(cell.get("memory", "0")) * KIB,
                tuple(int(one.get("value", "0")) for one in cell.iterfind("distances/sibling")),
            )
            for cell in root.iterfind("cpu/numa/cell")
        ],
        "memory of cells": [
            CpuSet.parse(one.get("nodeset", ""), "x") for one in root.iterfind("numatune/memnode")
        ],
        "huge pages": None if page is None else int(page.get("size", "0")) * KIB,
        "devices": [
            (name, _cell_of(int(place.get("bus", "0"), 16), root))
            for name, place in hostdevs.items()
        ],
        "addresses": [_bdf(place) for place in hostdevs.values()],
        "binding": None
        if memory is None
        else (memory.get("mode"), CpuSet.parse(memory.get("nodeset", ""), "x")),
        "topology": None
        if topology is None
        else tuple(int(topology.get(key, "1")) for key in ("sockets", "dies", "cores", "threads")),
    }


def _stand_in(text: str) -> str:
    """The document with devices of QEMU in place of the host's, and without what binds to it."""
    root = ElementTree.fromstring(text)
    for path in ("numatune", "memoryBacking", "cputune"):
        for one in root.findall(path):
            root.remove(one)
    devices, system, cpu = root.find("devices"), root.find("os"), root.find("cpu")
    assert devices is not None and system is not None and cpu is not None
    for hostdev in devices.findall("hostdev"):
        place = hostdev.find("address")
        assert place is not None
        hostdev.clear()
        hostdev.tag = "rng"
        hostdev.set("model", "virtio")
        ElementTree.SubElement(hostdev, "backend", {"model": "random"}).text = "/dev/urandom"
        hostdev.append(place)
    for one in (*system.findall("firmware"), *system.findall("loader"), *system.findall("nvram")):
        system.remove(one)
    system.attrib.pop("firmware", None)
    cpu.set("mode", "maximum")
    for one in (*cpu.findall("model"), *cpu.findall("maxphysaddr"), *cpu.findall("feature")):
        cpu.remove(one)
    cpu.attrib.pop("match", None)
    for hole in devices.findall("controller/pcihole64"):
        hole.text = "1"
    return ElementTree.tostring(root, encoding="unicode")


def command_of(text: str) -> list[str]:
    """libvirt's own QEMU command, without its monitor, its key and its cage."""
    path = directory() / "stand-in.xml"
    path.write_text(_stand_in(text))
    done = _virsh("domxml-to-native", "qemu-argv", "--xml", str(path))
    if done.returncode:
        raise QemuError(done.stderr)
    words = shlex.split(for_this_machine(done.stdout))
    argv = [next(word for word in words if word.startswith("/"))]
    rest = iter(words[words.index(argv[0]) + 1 :])
    for word in rest:
        if word in ("-S", "-no-shutdown", "-nodefaults", "-no-user-config", "-no-hpet"):
            argv.append(word)
            continue
        value = next(rest)
        dropped = ("master-key" in value, "charmonitor" in value, "charserial" in value)
        if not any(dropped) and word not in ("-sandbox", "-msg"):
            argv += [word, value]
    return [word for word in argv if word != "-S"]


def _with_default(rows: list[list[int]], cells: int) -> list[list[int]]:
    """Distances of a machine that has no SLIT: libvirt writes none that are the default."""
    if rows or cells < 2:
        return rows
    return [[10 if i == j else 20 for j in range(cells)] for i in range(cells)]


def _started(printed: str, devices: int) -> Facts:
    """What a QEMU that is started by libvirt's command says. Raises QemuError."""
    machine = machine_of(command_of(printed), [f"rng{i}" for i in range(devices)])
    read = dict(read_facts(machine))
    read["distances"] = _with_default(machine.distances(), len(machine.cells()))
    return {f"started: {k}": v for k, v in read.items() if k not in ("bound memory", "huge pages")}


def _answer(name: str, tuning: PlannedFile, given: bytes, about: str) -> tuple[Answer, str]:
    plan = tuning.plan
    path = directory() / "vm.xml"
    path.write_bytes(re.sub(rb"type=(['\"])kvm\1", rb"type='qemu'", tuning.document, count=1))
    answer = Answer(case=name, about=about, planned=planned_of_document(plan, given))
    try:
        defined = _virsh("define", "--validate", str(path))
        if defined.returncode:
            return replace(answer, refusal=defined.stderr), ""
        printed = _virsh("dumpxml", "--inactive", NAME).stdout
    finally:
        _virsh("undefine", "--nvram", NAME)
    read = read_document(printed)
    cells = _shown_cells(plan, given)
    rows = [list(cell.distances[: len(cells)]) for cell in cells if cell.distances]
    wanted = {
        **planned_facts(plan),
        "cells": {i: (set(cell.vcpus), cell.memory_bytes) for i, cell in enumerate(cells)},
        "distances": _with_default(rows, len(cells)),
        "cell of each device": list(_device_cells(plan, given).values()),
    }
    try:
        started = _started(printed, len(plan.vm.hostdevs))
    except QemuError as error:
        return replace(answer, refusal=f"at the start: {error}"), printed
    more = {f"started: {k}": v for k, v in wanted.items() if f"started: {k}" in started}
    planned = {**answer.planned, **more}
    return replace(answer, planned=planned, read={**read, **started}), printed


def ask(names: Sequence[str]) -> Iterator[Answer]:
    for name in names:
        draw = random.Random(f"libvirt {name}")
        host = random_host(draw)
        wanted = random_options(draw, host)
        given = _document(draw, wanted)
        tuning = _tuned(given, wanted, host)
        if tuning is None:
            continue
        answer, printed = _answer(name, tuning, given, f"{host.name}, {wanted.layout}")
        if answer.difference() is None and draw.random() < 0.4:
            other = draw.choice(list(PRESETS))
            given = printed.replace("<domain type='qemu'", "<domain type='kvm'", 1).encode()
            again = _tuned(given, PlanOptions(layout=other), host)
            if again is not None:
                answer, _ = _answer(name, again, given, f"{answer.about}, then {other}")
        yield answer


LIBVIRT = Judge(
    name="libvirt",
    program="libvirt",
    reads="the document, defined with --validate and printed again: pins, cells, binding, "
    "addresses and the cells of their expander buses; in part planned again with another layout; "
    "its own QEMU command, started under TCG with other devices in place of the host's",
    setup="libvirtd, virsh, qemu-system-x86, cc",
    version=version,
    missing=missing,
    ask=ask,
    marker="libvirt",
)
