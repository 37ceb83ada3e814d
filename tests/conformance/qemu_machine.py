"""A QEMU that runs no instruction, and what it says of its machine: ACPI over fw_cfg, and QMP.

Source: QEMU docs, specs/fw_cfg and devel/qtest; ACPI 6.4, 5.2.16 (SRAT), 5.2.17 (SLIT), 20 (AML).
"""

import json
import re
import shutil
import socket
import struct
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conformance.builds import PROGRAMS, directory, library

QEMU = "qemu-system-x86_64"
_DIRECTORY = 0x19
_VIDEO_HOLE = 384 << 10
"""From 640 KiB to 1 MiB: RAM of the first cell that QEMU leaves out of the SRAT."""
_INTEGERS = {0x0A: 1, 0x0B: 2, 0x0C: 4, 0x0E: 8}


class QemuError(Exception):
    """QEMU did not start; its words."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a QEMU said."""

    tables: dict[str, bytes]  # of ACPI, by signature
    cpus: list[dict[str, Any]]  # of QMP
    memdevs: list[dict[str, Any]]  # of QMP
    page_bytes: dict[str, int]
    # of each device asked for, the bus number of the root that it hangs on, 0 for the chipset's
    roots: dict[str, int]
    functions: Counter[int]  # device ids of PCI
    memory_bytes: int
    pins: dict[str, str]  # CPUs by the name of a thread, or "launch"

    @property
    def topology(self) -> tuple[int, int, int, int]:
        """Sockets, dies, cores, threads."""
        keys = ("socket-id", "die-id", "core-id", "thread-id")
        sockets, dies, cores, threads = (
            len({cpu["props"].get(key, 0) for cpu in self.cpus}) for key in keys
        )
        return sockets, dies, cores, threads

    def cells(self) -> dict[int, tuple[set[int], int]]:
        """vCPUs and bytes of each proximity domain of the SRAT."""
        vcpu_of = {cpu["apic-id"]: cpu["cpu-index"] for cpu in self.cpus}
        found: dict[int, tuple[set[int], int]] = {}
        for kind, entry in _entries(self.tables.get("SRAT", b""), 48):
            if kind == 0 and struct.unpack_from("<I", entry, 4)[0] & 1:
                domain, apic = entry[2] | int.from_bytes(entry[9:12], "little") << 8, entry[3]
            elif kind == 2 and struct.unpack_from("<I", entry, 12)[0] & 1:
                domain, apic = struct.unpack_from("<II", entry, 4)
            elif kind == 1 and struct.unpack_from("<I", entry, 28)[0] & 1:
                domain, apic = struct.unpack_from("<I", entry, 2)[0], None
                vcpus, size = found.get(domain, (set(), 0))
                base, length = struct.unpack_from("<QQ", entry, 8)
                found[domain] = (vcpus, size + length + (0 if base else _VIDEO_HOLE))
            else:
                continue
            if apic is not None:
                vcpus, size = found.get(domain, (set(), 0))
                found[domain] = (vcpus | {vcpu_of[apic]}, size)
        return found

    def distances(self) -> list[list[int]]:
        """Rows of the SLIT; [] without one."""
        table = self.tables.get("SLIT")
        if table is None:
            return []
        (count,) = struct.unpack_from("<Q", table, 36)
        return [list(table[44 + i * count :][:count]) for i in range(count)]

    def domain_of_root(self) -> dict[int, int]:
        """_PXM of each root bus that has one, by its number."""
        found = {}
        code = self.tables["DSDT"]
        for match in re.finditer(rb"\x5b\x82(.{1,4}?)PC([0-9A-F]{2})", code, re.DOTALL):
            start = match.start() + 2
            extra = code[start] >> 6
            if len(match[1]) != extra + 1:
                continue
            length = code[start] & (0x0F if extra else 0x3F)
            for i in range(extra):
                length |= code[start + 1 + i] << 4 + 8 * i
            body = code[start : start + length]
            at = body.find(b"\x08_PXM")
            if at >= 0:
                found[int(match[2], 16)] = _integer(body, at + 5)
        return found

    def cell_of(self, device: str) -> int | None:
        return self.domain_of_root().get(self.roots[device])


def _integer(code: bytes, at: int) -> int:
    width = _INTEGERS.get(code[at])
    return code[at] if width is None else int.from_bytes(code[at + 1 : at + 1 + width], "little")


def _entries(table: bytes, start: int) -> Iterator[tuple[int, bytes]]:
    while start + 2 <= len(table) and table[start + 1]:
        yield table[start], table[start : start + table[start + 1]]
        start += table[start + 1]


class _Lines:
    """A socket of QEMU: a line asked, a line answered."""

    def __init__(self, path: Path, process: "subprocess.Popen[str]") -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        deadline = time.monotonic() + 100
        while True:
            try:
                self.socket.connect(str(path))
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise QemuError("".join(process.communicate(timeout=10))) from None
                time.sleep(0.02)
        self.file = self.socket.makefile("rw")

    def ask(self, *lines: str) -> list[str]:
        self.file.write("".join(f"{line}\n" for line in lines))
        self.file.flush()
        return [self.file.readline() for _ in lines]


class _Qmp(_Lines):
    def __init__(self, path: Path, process: "subprocess.Popen[str]") -> None:
        super().__init__(path, process)
        self.file.readline()
        self("qmp_capabilities")

    def __call__(self, command: str, **arguments: object) -> Any:
        self.file.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
        self.file.flush()
        while True:
            answer = json.loads(self.file.readline())
            if "error" in answer:
                raise QemuError(f"{command}: {answer['error']['desc']}")
            if "return" in answer:
                return answer["return"]

    def root_of(self, device: str) -> int:
        """The number of the root bus that a device hangs on."""
        path = f"/machine/peripheral/{device}"
        while True:
            bus = self("qom-get", path=path, property="parent_bus").rpartition("/")[2]
            path = f"/machine/peripheral/{bus}"
            if bus in ("pcie.0", "pci.0"):
                return 0
            if self("qom-get", path=path, property="type") == "pxb-pcie":
                return int(self("qom-get", path=path, property="bus_nr"))


def _fw_cfg(qtest: _Lines, selector: int, size: int) -> bytes:
    """A file of fw_cfg, without the zeros at its end."""
    qtest.ask(f"outw 0x510 {selector:#x}")
    found = bytearray()
    while len(found) < size:
        asked = ["inb 0x511"] * min(4000, size - len(found))
        chunk = bytes(int(one.split()[1], 16) for one in qtest.ask(*asked))
        found += chunk
        if not any(chunk):
            break
    return bytes(found)


def _tables(qtest: _Lines) -> dict[str, bytes]:
    (count,) = struct.unpack(">I", _fw_cfg(qtest, _DIRECTORY, 4))
    listing = _fw_cfg(qtest, _DIRECTORY, 4 + 64 * count)
    tables: dict[str, bytes] = {}
    for at in range(4, len(listing), 64):
        size, selector, _, name = struct.unpack_from(">IHH56s", listing, at)
        if name.rstrip(b"\0") != b"etc/acpi/tables":
            continue
        blob, start = _fw_cfg(qtest, selector, size), 0
        while start + 8 <= len(blob):
            (length,) = struct.unpack_from("<I", blob, start + 4)
            signature = blob[start : start + 4].decode("latin1")
            if not signature.strip("\0"):
                start += 1
                continue
            tables[signature] = blob[start : start + length]
            start += max(length, 8)
    return tables


def for_this_machine(text: str) -> str:
    """A command line, or a script of one, without what only the planned host has: KVM, its CPU with
    its address bits, its devices and its memory. Each device is one of QEMU's own in its place."""
    text = re.sub(r"-accel kvm\b", "-accel tcg,thread=multi,tb-size=8", text)
    text = re.sub(r"-cpu '?host\b", lambda found: found[0].replace("host", "max"), text)
    text = re.sub(r",(host-)?phys-bits(-limit)?=\w+", "", text)
    text = re.sub(r"pci-hole64-size=\w+", "pci-hole64-size=256G", text)
    text = re.sub(r"vfio-pci,(host|sysfsdev)=[^,' \n]+", "virtio-rng-pci", text)
    return re.sub(r"(memory-backend-\w+,)", r"\1reserve=off,", text).replace(",prealloc=on", "")


@contextmanager
def _started(
    argv: Sequence[str | Path], work: Path, calls: Path
) -> Iterator["subprocess.Popen[str]"]:
    environment = {
        "PATH": f"{PROGRAMS}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "LD_PRELOAD": str(library("mbind_stand_in")),
        "TASKSET_CALLS": str(calls),
    }
    process = subprocess.Popen(
        argv, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def machine_of(argv: Sequence[str | Path], devices: Sequence[str]) -> Machine:
    """What a QEMU that is started so says of its machine. devices: ids of those to look for.

    Raises QemuError with its words where it does not start.
    """
    work = directory() / "machine"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    (work / "disk.qcow2").write_bytes(bytes(1 << 16))
    calls = work / "calls"
    calls.touch()
    sockets = ("-S", "-qmp", "unix:qmp,server=on,wait=off", "-qtest", "unix:qt,server=on,wait=off")
    with _started([*argv, *sockets, "-qtest-log", "/dev/null"], work, calls) as process:
        try:
            return _said(process, work, calls, devices)
        except (OSError, ValueError):
            process.terminate()
            said = "".join(process.communicate(timeout=30))
            raise QemuError(said or "QEMU ended without a word") from None


def _said(
    process: "subprocess.Popen[str]", work: Path, calls: Path, devices: Sequence[str]
) -> Machine:
    qmp, qtest = _Qmp(work / "qmp", process), _Lines(work / "qt", process)
    cpus = qmp("query-cpus-fast")
    for cpu in cpus:
        cpu["apic-id"] = qmp("qom-get", path=cpu["qom-path"], property="apic-id")
    memdevs = qmp("query-memdev")
    pages = {
        one["id"]: qmp("qom-get", path=f"/objects/{one['id']}", property="hugetlbsize")
        for one in memdevs
        if qmp("qom-get", path=f"/objects/{one['id']}", property="type").endswith("-memfd")
    }
    _wait_for_pins(process)
    return Machine(
        tables=_tables(qtest),
        cpus=cpus,
        memdevs=memdevs,
        page_bytes=pages,
        roots={device: qmp.root_of(device) for device in devices},
        functions=Counter(d["id"]["device"] for b in qmp("query-pci") for d in b["devices"]),
        memory_bytes=qmp("query-memory-size-summary")["base-memory"],
        pins=dict(line.split(" ", 1)[::-1] for line in calls.read_text().splitlines()),
    )


def _wait_for_pins(process: "subprocess.Popen[str]") -> None:
    """Until the script sleeps with one child: it waits for QEMU alone, and calls taskset no more.
    QEMU itself has none."""
    at = Path(f"/proc/{process.pid}")
    while process.poll() is None:
        state = (at / "stat").read_text().rpartition(")")[2].split()[0]
        children = (at / "task" / str(process.pid) / "children").read_text().split()
        if not children or (state == "S" and len(children) == 1):
            return
        time.sleep(0.05)
