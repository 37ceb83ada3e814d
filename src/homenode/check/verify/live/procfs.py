"""A running VM as its host's kernel shows it: threads, memory, neighbours; parsers of /proc.

Source: Documentation/filesystems/proc.rst, numa_maps(5) and mm/mempolicy.c (mpol_to_str) of Linux
4.18 to 6.12; thread names of QEMU with debug-threads=on, which libvirt always sets.
"""

import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, NodeIndex
from homenode.errors import HomenodeError, ParseError
from homenode.findings import Gap
from homenode.process import find_arguments
from homenode.units import KIB, parse_bytes
from homenode.vm.targets.qemu_command import split_fields


class ThreadKind(StrEnum):
    VCPU = "vcpu"
    ALL_VCPUS = "all-vcpus"  # TCG with one thread for every vCPU
    IOTHREAD = "iothread"
    EMULATOR = "emulator"  # the main loop, and all that it starts


class VmThread(Struct, frozen=True):
    id: int
    name: str  # its comm
    kind: ThreadKind
    number: int | None  # number of the vCPU or IOThread; None for other threads
    allowed: CpuSet  # CPUs that the scheduler may use, by pins and cgroups


class ThreadLimit(Struct, frozen=True, kw_only=True):
    """A limit of a vCPU, an IOThread or QEMU's main thread besides its pins."""

    kind: ThreadKind
    number: int | None
    policy: int  # scheduler policy, as sched.h numbers it
    nice: int  # beyond that of the main thread
    # of its cgroup and those above it, each with a quota: the cgroup and its share of CPUs
    quotas: tuple[tuple[str, float], ...]


_WAYS = ("read", "write")


class GroupLimit(NamedTuple):
    """A limit or share of memory, CPU or I/O in a cgroup of the VM or above it."""

    directory: str
    file: str  # "io.max"
    text: str


GROUP_FILES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("memory", ("memory.max", "memory.high", "memory.limit_in_bytes")),
    ("cpu", ("cpu.weight", "cpu.shares")),
    ("io", ("io.max", "io.weight", "io.bfq.weight")),
    (
        "blkio",
        (
            "blkio.bfq.weight",
            *(f"blkio.throttle.{way}_{unit}_device" for way in _WAYS for unit in ("bps", "iops")),
        ),
    ),
)
"""Files by their controller, of either version of cgroups. A group with cpu.idle has a
cpu.weight of 0, which none else can have."""


class BackendObject(Struct, frozen=True):
    """A memory backend in QEMU's command line."""

    name: str  # "ram-node0", "pc.ram"
    size_bytes: int
    host_nodes: CpuSet  # empty if not bound
    policy: str | None  # QEMU's word ("bind", "preferred", ...)


class MappedMemory(NamedTuple):
    """A mapping in /proc/PID/numa_maps."""

    start: int
    mode: str  # mode of mbind
    nodes: CpuSet  # nodes of mbind
    file: str | None  # what backs it (hugetlbfs, memfd), None = anonymous
    page_bytes: int  # size of the pages that the kernel uses
    # (node, pages of that size) that are present; untouched pages have no node
    pages_by_node: tuple[tuple[NodeIndex, int], ...]


class RamArea(NamedTuple):
    """A mapping of QEMU that is large enough to be guest memory."""

    size_bytes: int
    policy: MappedMemory


class DeviceInterrupt(Struct, frozen=True):
    """A host interrupt of a passed-through device."""

    device: Bdf
    irq: int
    name: str  # "vfio-msix[0]"
    allowed: CpuSet | None  # CPUs that may serve it
    effective: CpuSet | None  # those that do, None if the kernel does not report it


class Neighbour(Struct, frozen=True):
    """Threads of another process that may run on the VM's cores."""

    process: int
    name: str
    domain: str | None  # name of the VM if the process is QEMU
    threads: int  # how many of its threads these are
    allowed: CpuSet  # CPUs of them all
    is_vcpu: bool  # they run another VM's vCPUs
    floats: bool  # each may run anywhere
    busy_ratio: float  # CPU time on the VM's CPUs over the time that was watched, 1.0 = one CPU


class HostCpus(Struct, frozen=True):
    """The host's CPUs that matter for a running VM, ascending."""

    online: CpuSet
    nodes: tuple[tuple[NodeIndex, CpuSet], ...]  # (node, its CPUs)
    siblings: tuple[CpuSet, ...]  # CPUs of each core

    def pus_of_node(self, node: NodeIndex) -> CpuSet:
        return next((pus for index, pus in self.nodes if index == node), CpuSet())

    def add_siblings(self, pus: CpuSet) -> CpuSet:
        """Return the CPUs and their siblings."""
        return CpuSet.from_bits(
            pus.bits | sum(core.bits for core in self.siblings if not core.isdisjoint(pus))
        )


class RunningVm(Struct, frozen=True):
    name: str
    uuid: str
    process: int  # PID of its QEMU
    threads: tuple[VmThread, ...]  # ascending by id; emulator included
    backends: tuple[BackendObject, ...]
    areas: tuple[RamArea, ...]
    swapped_bytes: int | None  # swapped memory of QEMU; None = unknown
    default_huge_bytes: int | None  # the host's default huge page size
    interrupts: tuple[DeviceInterrupt, ...]
    # host node of each passed-through function that has one
    node_of_device: tuple[tuple[Bdf, NodeIndex], ...]
    neighbours: tuple[Neighbour, ...]
    watched_s: float  # how long neighbours were watched
    host: HostCpus
    gaps: tuple[Gap, ...]
    limits: tuple[ThreadLimit, ...] = ()  # limits of vCPUs and IOThreads
    group_limits: tuple[GroupLimit, ...] = ()  # limits of its process's cgroups

    def list_threads(self, kind: ThreadKind) -> dict[int | None, VmThread]:
        return {thread.number: thread for thread in self.threads if thread.kind is kind}


_VCPU = re.compile(r"CPU (\d{1,5})/", re.ASCII)
_IOTHREAD = re.compile(r"IO iothread(\d{1,5})\Z", re.ASCII)
_CGROUP = re.compile(r"/(vcpu|iothread)(\d{1,5})$", re.ASCII | re.MULTILINE)
_POLICY = re.compile(
    r"(?P<start>[0-9a-f]{1,16}) (?P<mode>prefer \(many\)|weighted interleave|[a-z]+)"
    r"(?:=[a-z|]+)?(?::(?P<nodes>[\d,-]+))?(?: (?P<rest>.*))?\Z",
    re.ASCII,
)
_AREA = re.compile(r"([0-9a-f]{1,16})-([0-9a-f]{1,16}) (\S{4}) ", re.ASCII)
_VFIO = re.compile(
    r"\s(?P<name>vfio-[a-z]+(?:\[\d+\])?)\((?P<bdf>[0-9a-fA-F:.]+)\)(?=,|\s|\Z)", re.ASCII
)
_IRQ = re.compile(r"\s*(\d{1,9}):", re.ASCII)


class ProcessMapping(NamedTuple):
    """A mapping in /proc/PID/maps. Addresses in bytes."""

    start: int
    end: int
    permissions: str


class TaskTimes(NamedTuple):
    """Fields of /proc/PID/task/TID/stat."""

    flags: int
    ticks: int  # user and system time
    pu: int  # where it ran last
    policy: int  # scheduler policy, as sched.h numbers it
    nice: int


KERNEL_THREAD = 0x0020_0000
"""PF_KTHREAD in the flags of a task. Source: include/linux/sched.h."""


def classify_thread(name: str, cgroup: str) -> tuple[ThreadKind, int | None]:
    """Return the role of a thread of QEMU, by its name, else by its cgroup.

    >>> classify_thread("CPU 3/KVM", ""), classify_thread("IO iothread2", "")
    ((<ThreadKind.VCPU: 'vcpu'>, 3), (<ThreadKind.IOTHREAD: 'iothread'>, 2))
    >>> classify_thread("qemu-kvm", "0::/machine.slice/machine-qemu.scope/libvirt/vcpu1")[1]
    1
    """
    if name.startswith("ALL CPUs/"):
        return ThreadKind.ALL_VCPUS, None
    if match := _VCPU.match(name):
        return ThreadKind.VCPU, int(match[1])
    if match := _IOTHREAD.match(name):
        return ThreadKind.IOTHREAD, int(match[1])
    if match := _CGROUP.search(cgroup):
        return ThreadKind(match[1]), int(match[2])
    return ThreadKind.EMULATOR, None


def read_status_field(text: str, label: str) -> str | None:
    """Return the value of a line "Label:\\tvalue" in /proc/PID/status, or None."""
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon and name == label:
            return value.strip()
    return None


def list_cgroups(text: str, controller: str = "cpu") -> Iterator[str]:
    """Yield a task's cgroup of a controller and its parents, from the lowest up, without the root.

    >>> list(list_cgroups("3:cpu,cpuacct:/machine/vm/vcpu0"))
    ['/machine/vm/vcpu0', '/machine/vm', '/machine']
    """
    for line in text.splitlines():
        _, _, fields = line.partition(":")
        controllers, _, path = fields.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        parts = path.strip("/").split("/")
        if path.startswith("/") and ".." not in parts:
            yield from (
                "/" + "/".join(parts[:end]) for end in range(len(parts), 0, -1) if path != "/"
            )


def parse_stat(text: str, source: str) -> TaskTimes:
    """Return the times of a task. The name in parentheses may hold anything, also parentheses."""
    fields = text.rpartition(")")[2].split()
    try:
        ticks = int(fields[11]) + int(fields[12])
        return TaskTimes(int(fields[6]), ticks, int(fields[36]), int(fields[38]), int(fields[16]))
    except (IndexError, ValueError):
        raise ParseError(source, "a stat line of at least 39 fields", text) from None


def parse_maps(text: str) -> tuple[ProcessMapping, ...]:
    """Return the mappings in /proc/PID/maps, in its order; lines of another form are omitted."""
    matches = (_AREA.match(line) for line in text.splitlines())
    return tuple(
        ProcessMapping(int(m[1], 16), int(m[2], 16), m[3]) for m in matches if m is not None
    )


def parse_numa_maps(text: str) -> tuple[MappedMemory, ...]:
    """Return the mappings in /proc/PID/numa_maps, in its order. An unknown policy of a newer kernel
    keeps its name. Raises ParseError."""
    return tuple(_parse_policy(line) for line in text.splitlines() if line.strip())


def _parse_policy(line: str) -> MappedMemory:
    source, match = "numa_maps", _POLICY.match(line)
    if match is None:
        raise ParseError(source, "an address and a memory policy", line)
    file, page_kib, pages = None, 4, []
    try:
        for word in (match["rest"] or "").split(" "):
            key, _, value = word.partition("=")
            if key == "file":
                file = value.replace(r"\040", " ")
            elif key == "kernelpagesize_kB":
                page_kib = int(value)
            elif key[:1] == "N" and key[1:].isdecimal():
                pages.append((NodeIndex(int(key[1:])), int(value)))
    except ValueError:
        raise ParseError(source, "counts of pages", line) from None
    nodes = CpuSet.parse(match["nodes"] or "", source)
    return MappedMemory(
        int(match["start"], 16), match["mode"], nodes, file, page_kib * KIB, tuple(sorted(pages))
    )


def find_domain_name(argv: Sequence[str]) -> str | None:
    """Return the guest's name of a QEMU command line, or None if there is no -name.

    >>> find_domain_name(("qemu-system-x86_64", "-name", "guest=a,,b,debug-threads=on"))
    'a,b'
    """
    for value in find_arguments(argv, "-name"):
        first, pairs = split_fields(value)
        return dict(pairs).get("guest", first)
    return None


def parse_backends(argv: Sequence[str]) -> tuple[BackendObject, ...]:
    """Return the memory backends of a QEMU command line."""
    objects = []
    for value in find_arguments(argv, "-object"):
        kind, pairs = split_fields(value)
        if not kind.startswith("memory-backend-"):
            continue
        fields = dict(pairs)
        try:
            size = parse_bytes(fields.get("size", "0"))
            # One for each run of nodes.
            nodes = CpuSet.parse(
                ",".join(nodes_text for key, nodes_text in pairs if key == "host-nodes")
            )
        except HomenodeError:
            continue  # QEMU would have rejected it: this is not QEMU
        objects.append(BackendObject(fields.get("id", ""), size, nodes, fields.get("policy")))
    return tuple(objects)


def parse_vfio_interrupts(text: str) -> tuple[tuple[Bdf, int, str], ...]:
    """Return (device, interrupt, its name) of every passed-through device in /proc/interrupts.
    Devices that share a line have its names behind each other, with commas between."""
    interrupts = []
    for line in text.splitlines():
        irq = _IRQ.match(line) if "vfio-" in line else None
        if irq is not None:
            for match in _VFIO.finditer(line, irq.end()):
                bdf = Bdf.parse(match["bdf"], "/proc/interrupts")
                interrupts.append((bdf, int(irq[1]), match["name"]))
    return tuple(interrupts)
