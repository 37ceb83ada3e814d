"""Torch place: nodes of a thread, its memory and the GPUs; binding; steady times of work. [I/O]

Runs in the user's Python, from 3.8 on: it imports only modules that the text carries.

Work is timed by events in its stream, by the GPU's clock: only the work is between them. The stream
is held by a short spin while the CPU queues a batch, so that slow launches are not measured.
A wall clock around it rejects events that report more time than has passed.

Source: set_mempolicy(2), move_pages(2), sched_getcpu(3), numa(7); /sys/devices/system/node.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_SYSCALLS = {"x86_64": (238, 279), "aarch64": (237, 239)}  # set_mempolicy, move_pages
_BIND = 2  # MPOL_BIND
_MAX_NODES = 1024
_NODES = "/sys/devices/system/node"


def load_torch() -> Any:
    """Import PyTorch and require a GPU. Raises SystemExit with the missing package or the fault."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise SystemExit(
            f"torch: not installed in {sys.executable} ({error}); install the package torch there"
        ) from None
    if not torch.cuda.is_available():
        raise SystemExit(
            f"torch {torch.__version__}: no usable GPU: a CPU-only package, no driver, or no "
            "access to /dev/nvidia* or /dev/kfd"
        )
    return torch


def numbers_of(text: str) -> set[int]:
    """Return the members of a kernel list.

    >>> sorted(numbers_of("0-2,8")), numbers_of("")
    ([0, 1, 2, 8], set())
    """
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def _read_text(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:
        return None


def nodes_to_bind() -> list[int]:
    """Return the nodes with usable CPUs and with memory, ascending; [] if the kernel is silent."""
    allowed_cpus = os.sched_getaffinity(0)
    with_memory = _read_text(_NODES + "/has_memory") or _read_text(_NODES + "/online") or ""
    return [
        node
        for node in sorted(numbers_of(with_memory))
        if numbers_of(_read_text(f"{_NODES}/node{node}/cpulist") or "") & allowed_cpus
    ]


def bind(node: int) -> None:
    """Bind this process, and threads that it starts, to the CPUs and memory of one node.

    Raises OSError if the node has no usable CPU or the kernel rejects the binding.
    """
    cpus = numbers_of(_read_text(f"{_NODES}/node{node}/cpulist") or "") & os.sched_getaffinity(0)
    if not cpus:
        raise OSError(f"node {node}: no CPU that this process may use")
    os.sched_setaffinity(0, cpus)
    words = (ctypes.c_ulong * (_MAX_NODES // 64))()
    words[node // 64] = 1 << (node % 64)
    call = _SYSCALLS.get(platform.machine())
    if call is None:
        raise OSError(f"expected x86_64 or aarch64, found {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(call[0], _BIND, words, ctypes.c_ulong(_MAX_NODES + 1)) != 0:
        raise OSError(f"node {node}: memory cannot be bound: {os.strerror(ctypes.get_errno())}")


def free_bytes(node: int | None) -> int | None:
    """Return the available memory of a node, or of the machine; None if the kernel does not show
    it. For a node it is free memory plus the page cache.
    """
    path = "/proc/meminfo" if node is None else f"{_NODES}/node{node}/meminfo"
    names = "MemAvailable" if node is None else r"MemFree|Active\(file\)|Inactive\(file\)"
    sizes = re.findall(rf"(?<!\w)(?:{names}):\s+(\d+) kB", _read_text(path) or "")
    return 1024 * sum(map(int, sizes)) if sizes else None


def thread_place() -> dict[str, int | None]:
    """Return the CPU that this thread runs on and its node, now; None if unknown."""
    cpu = ctypes.CDLL(None).sched_getcpu()
    if cpu < 0:
        return {"cpu": None, "node": None}
    try:
        names = [path.name for path in Path(f"/sys/devices/system/cpu/cpu{cpu}").iterdir()]
    except OSError:
        names = []
    nodes = [int(name[4:]) for name in names if re.fullmatch(r"node\d+", name)]
    return {"cpu": cpu, "node": nodes[0] if len(nodes) == 1 else None}


def node_of_memory(pointer: int, size_bytes: int) -> int | None:
    """Return the node of a buffer; None if its pages are on several, or a driver hides where.

    Container engines forbid move_pages to those too that may bind memory: numa_maps shows it.
    """
    call = _SYSCALLS.get(platform.machine())
    if call is None:
        return None
    page = os.sysconf("SC_PAGE_SIZE")
    step = max(page, size_bytes // 64 // page * page)
    starts = list(range(pointer // page * page, pointer + size_bytes, step))[:64]
    pages = (ctypes.c_void_p * len(starts))(*starts)
    status = (ctypes.c_int * len(starts))()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(call[1], 0, ctypes.c_ulong(len(starts)), pages, None, status, 0) != 0:
        return node_of_mapping(pointer, _read_text("/proc/self/numa_maps") or "")
    nodes = set(status)
    return nodes.pop() if len(nodes) == 1 and min(nodes) >= 0 else None


def node_of_mapping(pointer: int, numa_maps: str) -> int | None:
    """Return the node of the mapping that holds an address; None if it is on several, or none.

    >>> node_of_mapping(0x7f10, "7f00 bind:1 anon=512 dirty=512 N1=512 kernelpagesize_kB=4")
    1
    """
    mapping: tuple[int, str] = (0, "")
    for line in numa_maps.splitlines():
        start = int(line.partition(" ")[0], 16)
        if mapping[0] <= start <= pointer:
            mapping = (start, line)
    nodes = re.findall(r" N(\d+)=[1-9]", mapping[1])
    return int(nodes[0]) if len(nodes) == 1 else None


def devices(torch: Any) -> list[dict[str, Any]]:
    """Return the GPUs that PyTorch sees, in its order: index, address, name, node.

    address: None if neither PyTorch nor its runtime gives it. node: None for -1.
    """
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        address = _address(properties) or _address_by_runtime(index)
        gpus.append(
            {
                "index": index,
                "address": address,
                "name": str(properties.name),
                "node": None if address is None else node_of_gpu(address),
            }
        )
    return gpus


def node_of_gpu(address: str) -> int | None:
    """Return the kernel's node of a GPU; None for -1, or without one."""
    text = (_read_text(f"/sys/bus/pci/devices/{address}/numa_node") or "").strip()
    return int(text) if text.isdecimal() else None


def _address(properties: Any) -> str | None:
    """Newer PyTorch gives domain, bus and device; the function is 0."""
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    numbers = [part for part in parts if isinstance(part, int)]
    return "{:04x}:{:02x}:{:02x}.0".format(*numbers) if len(numbers) == 3 else None


def _address_by_runtime(index: int) -> str | None:
    """cudaDeviceGetPCIBusId or hipDeviceGetPCIBusId of the runtime that PyTorch has loaded."""
    maps = _read_text("/proc/self/maps") or ""
    for name, call in (("cudart", "cudaDeviceGetPCIBusId"), ("amdhip64", "hipDeviceGetPCIBusId")):
        path = re.search(rf"(?<!\S)\S*/lib{name}[^/\s]*\.so[^/\s]*", maps)
        if path is None:
            continue
        text = ctypes.create_string_buffer(32)
        library = ctypes.CDLL(path[0])
        if getattr(library, call)(text, 32, index) == 0:
            return text.value.decode("ascii").lower()
    return None


FORMAT = "homenode.torch/1"
STEADY_WITHIN = 0.02
"""Three batches in a row that differ by no more: warm."""

MIN_SAMPLES = 5
BATCH_S = 0.02
_MAX_REPEATS = 200
_MAX_SAMPLES = 200
_SPIN_CYCLES = 40_000  # of one launch, at 1 to 2 GHz: 20 to 40 us


class Report:
    """The document that is printed once: at the end, or if a result is missing."""

    def __init__(self, head: dict[str, Any], limit_s: float) -> None:
        self._limit_s = limit_s
        self.document: dict[str, Any] = dict(
            {"format": FORMAT}, **head, results=[], gaps=[], stalled=None
        )
        self._lock = threading.Lock()
        self._is_printed = False

    def figure(self, **fields: Any) -> None:
        self.document["results"].append(fields)

    def gap(self, subject: str, reason: str) -> None:
        self.document["gaps"].append({"subject": subject, "reason": reason})

    def print(self) -> None:
        with self._lock:
            if not self._is_printed:
                self._is_printed = True
                sys.stdout.write(json.dumps(self.document) + "\n")
                sys.stdout.flush()

    def drop(self, device: int) -> None:
        """Forget the results of a GPU."""
        figures = [figure for figure in self.document["results"] if figure["device"] != device]
        self.document["results"] = figures

    @contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """Inside the block, a result that takes far too long ends the program with the results so
        far. A call that hangs in the driver cannot be interrupted, so another thread ends the
        program.
        """
        timer = threading.Timer(self._limit_s, self._leave, [name])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _leave(self, name: str) -> None:
        self.document["stalled"] = name
        self.print()
        os._exit(0)


def steady(batch: Callable[[int], float], seconds: float) -> dict[str, Any]:
    """Return the samples of a piece of work, in seconds each: {"samples", "steady", "warmups"}.

    batch: runs it that many times and returns the total seconds. Warms up until three batches agree
    within STEADY_WITHIN, for twice `seconds` at most; then samples for `seconds`.
    """
    batch(1)
    call_s = max(batch(1), 1e-9)
    repeats = max(1, min(_MAX_REPEATS, int(BATCH_S / call_s)))
    last: list[float] = []
    until = time.perf_counter() + 2 * seconds
    warmups = 2
    while time.perf_counter() < until or len(last) < 3:
        last.append(batch(repeats) / repeats)
        warmups += 1
        if len(last) >= 3 and max(last[-3:]) <= min(last[-3:]) * (1 + STEADY_WITHIN):
            break
    is_steady = max(last[-3:]) <= min(last[-3:]) * (1 + STEADY_WITHIN)
    samples: list[float] = []
    until = time.perf_counter() + seconds
    while len(samples) < MIN_SAMPLES or time.perf_counter() < until:
        samples.append(batch(repeats) / repeats)
        if len(samples) >= _MAX_SAMPLES:
            break
    return {"samples": samples, "steady": is_steady, "warmups": warmups * repeats}


class TimedStream:
    """A stream of one GPU, with work that is timed by its own events."""

    def __init__(self, torch: Any, device: int, work: Callable[[], Any]) -> None:
        self._torch, self._work, self.device = torch, work, device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)
            self._begin = torch.cuda.Event(enable_timing=True)
            self._end = torch.cuda.Event(enable_timing=True)

    def hold(self, launches: int) -> None:
        """Spin while this number of launches is queued behind."""
        with self._torch.cuda.device(self.device), self._torch.cuda.stream(self._stream):
            self._torch.cuda._sleep(min(launches, 2 * _MAX_REPEATS) * _SPIN_CYCLES)

    def queue(self, repeats: int) -> None:
        with self._torch.cuda.device(self.device), self._torch.cuda.stream(self._stream):
            self._begin.record(self._stream)
            for _ in range(repeats):
                self._work()
            self._end.record(self._stream)

    def seconds(self) -> float:
        """Wait for the last queued work, and return its seconds."""
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1e3

    def finish(self) -> None:
        self._stream.synchronize()


def time_copies(lane: TimedStream, neighbours: list[TimedStream], repeats: int) -> float:
    """Return the seconds of `repeats` on a lane while the others, if any, are busy all the time.

    Raises RuntimeError if the GPU's clock gives no time, or more than has passed.
    """
    before = time.perf_counter()
    for other_lane in (*neighbours, lane):
        other_lane.hold(repeats * (1 + 3 * len(neighbours)))
    for other_lane in neighbours:
        other_lane.queue(3 * repeats)  # outlasts what is timed, also if it is the faster one
    lane.queue(repeats)
    seconds = lane.seconds()
    for other_lane in neighbours:
        other_lane.finish()
    elapsed_s = time.perf_counter() - before
    if seconds <= 0:
        raise RuntimeError("events show that no time has passed")
    if seconds > elapsed_s * 1.05 + 1e-4:
        raise RuntimeError(f"events show {seconds:g} s, {elapsed_s:g} s have passed")
    return seconds
