"""Torch copies: copies and matrix products of the GPUs that PyTorch sees, as JSON. [I/O]

    python3 - host-copies [--seconds 0.5] [--node N | --each-node] < torch_copies.py, carried

Runs in the user's Python, from 3.8 on, with PyTorch for CUDA or ROCm. Host memory is pinned.
Processes are bound before PyTorch starts; each node has its own process, because freed pinned
memory is reused whatever its node is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from homenode.measure.programs.torch_place import (
    Report,
    TimedStream,
    bind,
    devices,
    free_bytes,
    load_torch,
    node_of_memory,
    nodes_to_bind,
    steady,
    thread_place,
    time_copies,
)

COPY_BYTES = 256 << 20
MIN_COPY_BYTES = 16 << 20
LOCAL_BYTES = 1 << 30
SMALL_BYTES = (8, 4096, 65536)
MATRIX = 8192
_PORTABLE = 1  # cudaHostRegisterPortable, hipHostRegisterPortable


class Bench:
    """PyTorch, its GPUs and the report that figures go to."""

    def __init__(
        self, torch: Any, command: str, seconds: float, node: int | None, stall_s: float
    ) -> None:
        self.torch, self.seconds, self.node = torch, seconds, node
        self.devices = devices(torch)
        version = torch.version
        runtime = f"hip {version.hip}" if getattr(version, "hip", None) else f"cuda {version.cuda}"
        head = {
            "command": command,
            "torch": str(torch.__version__),
            "runtime": runtime,
            "devices": self.devices,
            "bound_node": node,
            "copy_bytes": COPY_BYTES,
        }
        self.report = Report(head, stall_s + 10 * seconds)

    def figure(
        self,
        metric: str,
        unit: str,
        series: dict[str, Any],
        convert: Callable[[float], float],
        device: int,
        **fields: Any,
    ) -> None:
        """Report a series, with the place of the thread. convert: seconds into the unit."""
        self.report.figure(
            metric=metric,
            unit=unit,
            device=device,
            samples=[convert(s) for s in series["samples"]],
            steady=series["steady"],
            warmups=series["warmups"],
            thread=thread_place(),
            **fields,
        )

    def attempt(self, name: str, work: Callable[[], None]) -> None:
        """Do the work; if PyTorch rejects or lacks it, report the reason as a gap and continue."""
        with self.report.guard(name):
            try:
                work()
            except (AttributeError, RuntimeError, TypeError, ValueError) as error:
                self.report.gap(name, str(error).strip().split("\n")[0][:200] or "failed")

    def name(self, device: int) -> str:
        return str(self.devices[device]["address"] or device)


def pin_memory(torch: Any, count: int, node: int | None) -> Any:
    """Return pinned host memory for int32 numbers, on the bound node if there is one.

    HIP ignores the binding (except with hipHostMallocNumaUser) and allocates it next to the GPU; a
    driver may not report its node. Then memory that this bound thread touched is pinned in place.
    """
    memory = torch.empty(count, dtype=torch.int32, pin_memory=True)
    if node is None or node_of_memory(memory.data_ptr(), 4 * count) == node:
        return memory
    array = torch.empty(count, dtype=torch.int32)
    array.zero_()
    try:
        code = int(torch.cuda.cudart().cudaHostRegister(array.data_ptr(), 4 * count, _PORTABLE))
    except (AttributeError, RuntimeError, TypeError):
        return memory
    return array if code == 0 else memory


class HostBuffers:
    """A pinned buffer for each way and their twins on a GPU."""

    def __init__(self, bench: Bench, device: int, size: int) -> None:
        torch = bench.torch
        with torch.cuda.device(device):
            self.host_in, self.host_out = (
                pin_memory(torch, size // 4, bench.node) for _ in range(2)
            )
            self.on_in, self.on_out = (
                torch.empty(size // 4, dtype=torch.int32, device=f"cuda:{device}") for _ in range(2)
            )
        self.host_in.copy_(torch.arange(size // 4, dtype=torch.int32))
        self.host_out.zero_()
        self.on_out.fill_(7)
        self.size = size
        self._torch = torch
        torch.cuda.synchronize(device)  # other streams do not wait for work that was queued here

    def to_device(self) -> None:
        self.on_in.copy_(self.host_in, non_blocking=True)

    def to_host(self) -> None:
        self.host_out.copy_(self.on_out, non_blocking=True)

    def is_right(self) -> bool:
        """Return whether the copies contain the sent data, at every 4093rd place."""
        sent, got = self.host_in[::4093], self.on_in[::4093].cpu()
        return bool(self._torch.equal(sent, got)) and int(self.host_out[::4093].min()) == 7


def copy_size(gpus: int, free: int | None) -> int:
    """Return the bytes of a copy: fewer if the buffers exceed a quarter of the memory, because a
    bound process has no other."""
    size = COPY_BYTES
    while free is not None and 2 * size * gpus > free / 4 and size > MIN_COPY_BYTES:
        size //= 2
    return size


def host_copies(bench: Bench) -> None:
    """Copy engines one way, both ways and on all GPUs at once; then by the GPUs' own threads."""
    torch, size = bench.torch, copy_size(len(bench.devices), free_bytes(bench.node))
    bench.report.document["copy_bytes"] = size
    buffers = {d["index"]: HostBuffers(bench, d["index"], size) for d in bench.devices}
    lanes = {
        metric: {d: TimedStream(torch, d, getattr(b, way)) for d, b in buffers.items()}
        for metric, way in (("h2d-bandwidth", "to_device"), ("d2h-bandwidth", "to_host"))
    }
    for metric, other in (("h2d-bandwidth", "d2h-bandwidth"), ("d2h-bandwidth", "h2d-bandwidth")):
        for device, lane in lanes[metric].items():
            crowd = [other_lane for d, other_lane in lanes[metric].items() if d != device]
            variants = [(None, []), ("both ways", [lanes[other][device]])]
            variants += [("all at once", crowd)] if crowd else []
            for variant, neighbours in variants:
                _rate(bench, metric, variant, lane, neighbours, buffers[device])
    for device, host_buffers in buffers.items():

        def check(d: int = device, b: HostBuffers = host_buffers) -> None:
            if not b.is_right():
                bench.report.drop(d)
                raise RuntimeError("wrong data came: this GPU's results are omitted")

        bench.attempt(f"data of {bench.name(device)}", check)
    for device, host_buffers in buffers.items():
        for metric in ("h2d-bandwidth", "d2h-bandwidth"):

            def work(m: str = metric, d: int = device, b: HostBuffers = host_buffers) -> None:
                _by_threads(bench, m, d, b)

            bench.attempt(f"{metric} sm {bench.name(device)}", work)


def _rate(
    bench: Bench,
    metric: str,
    variant: str | None,
    lane: TimedStream,
    neighbours: list[TimedStream],
    buffers: HostBuffers,
) -> None:
    pointer = (buffers.host_in if metric == "h2d-bandwidth" else buffers.host_out).data_ptr()

    def work() -> None:
        series = steady(lambda repeats: time_copies(lane, neighbours, repeats), bench.seconds)
        bench.figure(
            metric,
            "bytes_per_s",
            series,
            lambda s: buffers.size / s,
            lane.device,
            variant=variant,
            memory_node=node_of_memory(pointer, buffers.size),
        )

    bench.attempt(f"{metric} {variant or ''} {bench.name(lane.device)}", work)


class _Array:
    """Pinned host memory, shown to PyTorch as a GPU's: unified addressing makes it one pointer."""

    def __init__(self, host: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape),
            "typestr": "<i4",
            "data": (host.data_ptr(), False),
            "version": 2,
        }


def _by_threads(bench: Bench, metric: str, device: int, buffers: HostBuffers) -> None:
    torch = bench.torch
    host, on = (
        (buffers.host_in, buffers.on_in)
        if metric == "h2d-bandwidth"
        else (buffers.host_out, buffers.on_out)
    )
    with torch.cuda.device(device):
        device_view = torch.as_tensor(_Array(host), device=f"cuda:{device}")
    if device_view.data_ptr() != host.data_ptr():
        raise RuntimeError("PyTorch copies pinned memory before the GPU's threads may read it")
    source, target = (device_view, on) if metric == "h2d-bandwidth" else (on, device_view)
    lane = TimedStream(torch, device, lambda: torch.add(source, 0, out=target))
    series = steady(lambda repeats: time_copies(lane, [], repeats), bench.seconds)
    bench.figure(
        metric,
        "bytes_per_s",
        series,
        lambda s: buffers.size / s,
        device,
        variant="sm",
        memory_node=node_of_memory(host.data_ptr(), buffers.size),
    )


def time_small_copies(bench: Bench) -> None:
    """Time small copies from the call to the data's arrival in the waiting thread."""
    for entry in bench.devices:
        device = entry["index"]
        buffers = HostBuffers(bench, device, max(SMALL_BYTES))
        for size in SMALL_BYTES:
            forth = (buffers.host_in[: size // 4], buffers.on_in[: size // 4])
            back = (buffers.on_out[: size // 4], buffers.host_out[: size // 4])
            _small(bench, "h2d-copy-time", device, size, *forth, forth[0])
            _small(bench, "d2h-copy-time", device, size, *back, back[1])


def _small(
    bench: Bench, metric: str, device: int, size: int, source: Any, target: Any, host: Any
) -> None:
    def work() -> None:
        series = steady(
            lambda repeats: _round_trips(bench.torch, device, source, target, repeats),
            bench.seconds,
        )
        bench.figure(
            metric,
            "ns",
            series,
            lambda s: s * 1e9,
            device,
            size_bytes=size,
            memory_node=node_of_memory(host.data_ptr(), size),
        )

    bench.attempt(f"{metric} {size} bytes {bench.name(device)}", work)


def _round_trips(torch: Any, device: int, source: Any, target: Any, repeats: int) -> float:
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device)
        stream.synchronize()
        begin = time.perf_counter()
        for _ in range(max(repeats, 1)):
            target.copy_(source, non_blocking=True)
            stream.synchronize()
        return time.perf_counter() - begin


def time_local_copy(bench: Bench) -> None:
    """Within a GPU; each byte counts once, as in nvbandwidth."""
    torch = bench.torch
    for entry in bench.devices:
        device = entry["index"]
        free = int(torch.cuda.mem_get_info(device)[0])
        size = LOCAL_BYTES if free > 4 * LOCAL_BYTES else COPY_BYTES

        def work(d: int = device, b: int = size) -> None:
            source, target = (
                torch.zeros(b // 4, dtype=torch.int32, device=f"cuda:{d}") for _ in range(2)
            )
            lane = TimedStream(torch, d, lambda: target.copy_(source, non_blocking=True))
            series = steady(lambda repeats: time_copies(lane, [], repeats), bench.seconds)
            bench.figure("d2d-bandwidth", "bytes_per_s", series, lambda s: b / s, d)

        bench.attempt(f"d2d-bandwidth {bench.name(device)}", work)


def time_peer_copies(bench: Bench) -> None:
    """Copy from each GPU to each other GPU: device sends, peer receives."""
    torch = bench.torch
    indices = [entry["index"] for entry in bench.devices]
    for device in indices:
        for peer in (index for index in indices if index != device):

            def work(d: int = device, p: int = peer) -> None:
                source = torch.zeros(COPY_BYTES // 4, dtype=torch.int32, device=f"cuda:{d}")
                target = torch.zeros(COPY_BYTES // 4, dtype=torch.int32, device=f"cuda:{p}")
                reaches = bool(torch.cuda.can_device_access_peer(d, p))
                lane = TimedStream(torch, d, lambda: target.copy_(source, non_blocking=True))
                series = steady(lambda repeats: time_copies(lane, [], repeats), bench.seconds)
                bench.figure(
                    "p2p-bandwidth",
                    "bytes_per_s",
                    series,
                    lambda s: COPY_BYTES / s,
                    d,
                    peer=p,
                    variant=None if reaches else "through host memory",
                )

            bench.attempt(f"p2p-bandwidth {bench.name(device)} to {bench.name(peer)}", work)


def time_matmul(bench: Bench) -> None:
    """Square products of normal random numbers: zeros need less power and come out faster."""
    torch = bench.torch
    for entry in bench.devices:
        device = entry["index"]
        exact: dict[str, Any] = {}
        for variant, dtype, precision in (
            ("fp32", torch.float32, "highest"),
            ("tf32", torch.float32, "high"),
            ("bf16", torch.bfloat16, "highest"),
            ("fp16", torch.float16, "highest"),
        ):

            def work(
                v: str = variant,
                t: Any = dtype,
                p: str = precision,
                d: int = device,
                first: dict[str, Any] = exact,
            ) -> None:
                torch.set_float32_matmul_precision(p)
                torch.manual_seed(1)
                a, b = (torch.randn(MATRIX, MATRIX, device=f"cuda:{d}").to(t) for _ in "ab")
                out = torch.empty_like(a)
                torch.mm(a, b, out=out)
                torch.cuda.synchronize(d)
                rows = out[:64].clone()
                if v == "tf32" and "fp32" in first and torch.equal(first["fp32"], rows):
                    raise RuntimeError("computed as fp32 on this GPU")
                first[v] = rows
                lane = TimedStream(torch, d, lambda: torch.mm(a, b, out=out))
                series = steady(lambda repeats: time_copies(lane, [], repeats), bench.seconds)
                bench.figure(
                    "matmul-rate", "flop_per_s", series, lambda s: 2 * MATRIX**3 / s, d, variant=v
                )

            bench.attempt(f"matmul {variant} {bench.name(device)}", work)


COMMANDS: dict[str, Callable[[Bench], None]] = {
    "host-copies": host_copies,
    "small-copies": time_small_copies,
    "local-copy": time_local_copy,
    "peer-copies": time_peer_copies,
    "matmul": time_matmul,
}


def measure(command: str, seconds: float, node: int | None, stall_s: float) -> None:
    """Bind, measure, print. Raises SystemExit with a message if that fails."""
    if node is not None:
        try:
            bind(node)
        except OSError as error:
            raise SystemExit(f"torch_copies: {error}") from None
    bench = Bench(load_torch(), command, seconds, node, stall_s)
    try:
        COMMANDS[command](bench)
    except RuntimeError as error:  # no memory left for the buffers, for one
        reason = str(error).strip().split("\n")[0][:200]
        raise SystemExit(f"torch_copies {command}: {reason}") from None
    bench.report.print()


def _each_node(command: str, seconds: float, stall_s: float) -> None:
    """A process for each node, forked before PyTorch starts; their documents, line by line."""
    sys.stdout.flush()
    for node in nodes_to_bind():
        child = os.fork()
        if child == 0:
            code = 1
            try:
                measure(command, seconds, node, stall_s)
                code = 0
            except SystemExit as error:
                sys.stderr.write(f"{error}\n")
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if status != 0:
            line = {"format": "homenode.torch/1", "failed": f"node {node}: status {status}"}
            sys.stdout.write(json.dumps(line) + "\n")


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="torch_copies")
    parser.add_argument("command", choices=sorted(COMMANDS))
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--node", type=int)
    parser.add_argument("--stall", type=float, default=60.0)
    parser.add_argument("--each-node", action="store_true")
    options = parser.parse_args(words)
    if options.each_node:
        _each_node(options.command, options.seconds, options.stall)
    else:
        measure(options.command, options.seconds, options.node, options.stall)


if __name__ == "__main__":
    main(sys.argv[1:])
