"""Torch collectives: all-reduces over message sizes, a process for each GPU, as JSON. [I/O]

    python3 - --gpus 8 --largest 1073741824 --bind none|gpu|N [--no-peers]  < this, carried

Runs in the user's Python, from 3.8 on. Ranks are forked before PyTorch starts, and bound before it
too. Each size is timed by events; the slowest rank counts; data are checked in every size.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from homenode.measure.programs.torch_place import FORMAT, bind, devices, load_torch, thread_place

MIN_BYTES = 8
MAX_S = 2.0
"""Time for one message size: slow sizes are repeated less often."""

KILLED_S = 10.0
"""Time limit for killed ranks to end."""


class Rank:
    """A process: its number, its directory, and the options of all ranks."""

    def __init__(self, number: int, directory: Path, options: argparse.Namespace) -> None:
        self.number, self.directory, self.options = number, directory, options

    def write(self, name: str, value: Any) -> None:
        with (self.directory / name).open("a") as file:
            file.write(json.dumps(value) + "\n")

    def run(self, home: int | None) -> None:
        """All sizes. home: the node to bind to."""
        options = self.options
        if home is not None:
            bind(home)
        if not options.peers:
            os.environ["NCCL_P2P_DISABLE"] = "1"
        torch = load_torch()
        dist = torch.distributed
        torch.cuda.set_device(self.number)
        dist.init_process_group(
            "nccl",
            init_method=f"file://{self.directory}/store",
            rank=self.number,
            world_size=options.gpus,
            timeout=datetime.timedelta(seconds=120),
        )
        size = MIN_BYTES
        while size <= options.largest:
            row = _all_reduce(torch, dist, self, size)
            if self.number == 0:
                self.write("rows", row)
            size *= 2
        place = dict(thread_place(), rank=self.number, device=self.number, bound_node=home)
        self.write("ranks", place)
        dist.destroy_process_group()


def _all_reduce(torch: Any, dist: Any, rank: Rank, size: int) -> dict[str, Any]:
    """Return a size on one rank; the results are the same on all ranks."""
    options, ranks, gpu = rank.options, rank.options.gpus, f"cuda:{rank.number}"
    data = torch.full((size // 4,), float(rank.number + 1), dtype=torch.float32, device=gpu)
    dist.all_reduce(data)
    is_right = bool((data == ranks * (ranks + 1) / 2).all())
    data.zero_()  # sums of zeros stay zeros, however often
    begin = time.perf_counter()
    for _ in range(options.warmups):
        dist.all_reduce(data)
    torch.cuda.synchronize()
    mean = (time.perf_counter() - begin) / options.warmups
    iterations = max(5, min(options.iterations, int(MAX_S / max(mean, 1e-9))))
    agreement = torch.full((1,), float(iterations), dtype=torch.float32, device=gpu)
    dist.broadcast(agreement, 0)
    repeats = int(agreement.item())
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    torch.cuda.synchronize()
    first.record()
    for _ in range(repeats):
        dist.all_reduce(data)
    last.record()
    last.synchronize()
    elapsed_ms = float(first.elapsed_time(last))
    slowest_ms = torch.full((1,), elapsed_ms, dtype=torch.float32, device=gpu)
    dist.all_reduce(slowest_ms, op=dist.ReduceOp.MAX)
    wrong = torch.full((1,), 0.0 if is_right else 1.0, dtype=torch.float32, device=gpu)
    dist.all_reduce(wrong)
    return {
        "size_bytes": size,
        "time_ns": float(slowest_ms.item()) * 1e6 / repeats,
        "iterations": repeats,
        "wrong_ranks": int(wrong.item()),
    }


class ProcessGroup:
    """Forked processes that end together: a failed or stopped process ends all."""

    def __init__(self, directory: Path, stall_s: float) -> None:
        self._directory, self._stall_s = directory, stall_s
        self._children: dict[int, int] = {}

    def start(self, number: int, work: Callable[[], None]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child:
            self._children[child] = number
            return
        code = 1
        try:
            work()
            code = 0
        except SystemExit as error:
            sys.stderr.write(f"{error}\n")
        except (RuntimeError, OSError, ValueError) as error:
            sys.stderr.write(f"rank {number}: {error}\n")
        finally:
            sys.stderr.flush()
            os._exit(code)

    def wait(self) -> str | None:
        """Wait until all have ended; return the reason of a failure, or None."""
        progress, since = self._progress(), time.monotonic()
        reason = None
        while self._children and reason is None:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child in self._children:
                number = self._children.pop(child)
                if status != 0:
                    reason = f"rank {number} failed (status {status})"
                continue
            if self._progress() != progress:
                progress, since = self._progress(), time.monotonic()
            elif time.monotonic() - since > self._stall_s:
                reason = f"no progress for {self._stall_s:g} s"
            time.sleep(0.02)
        for child in self._children:
            os.kill(child, signal.SIGKILL)
        until = time.monotonic() + KILLED_S
        while self._children and time.monotonic() < until:
            ended = [process for process in self._children if os.waitpid(process, os.WNOHANG)[0]]
            for child in ended:
                del self._children[child]
            time.sleep(0.02)
        self._children.clear()  # a rank within a driver may never end: do not wait
        return reason

    def _progress(self) -> int:
        """Return a number that changes while ranks write rows."""
        size = 0
        for path in self._directory.iterdir():
            with contextlib.suppress(OSError):  # removed since it was listed
                size += path.stat().st_size
        return size


def _lines(directory: Path, name: str) -> list[Any]:
    path = directory / name
    if not path.exists():
        return []
    with path.open() as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def _inspect(rank: Rank) -> None:
    torch = load_torch()
    version = torch.version
    runtime = f"hip {version.hip}" if getattr(version, "hip", None) else f"cuda {version.cuda}"
    machine = {"torch": str(torch.__version__), "runtime": runtime, "devices": devices(torch)}
    rank.write("machine", machine)


def _homes(machine: dict[str, Any], options: argparse.Namespace) -> list[int | None]:
    """The node of each rank. Raises SystemExit if --bind gpu needs a node that is not known."""
    if options.bind == "none":
        return [None] * options.gpus
    if options.bind != "gpu":
        return [int(options.bind)] * options.gpus
    nodes = [device["node"] for device in machine["devices"][: options.gpus]]
    if None in nodes:
        lost_address = machine["devices"][nodes.index(None)]["address"]
        raise SystemExit(f"--bind gpu: GPU {lost_address} has no node here (numa_node -1)")
    return nodes


def run(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Return the document. Raises SystemExit if nothing was measured."""
    crew = ProcessGroup(directory, options.stall)
    crew.start(0, lambda: _inspect(Rank(0, directory, options)))
    if crew.wait() is not None:
        raise SystemExit("torch_collectives: PyTorch did not list its GPUs")
    machine = _lines(directory, "machine")[0]
    if len(machine["devices"]) < options.gpus:
        raise SystemExit(f"--gpus {options.gpus}: PyTorch sees {len(machine['devices'])}")
    homes = _homes(machine, options)
    for number, home in enumerate(homes):

        def work(n: int = number, h: int | None = home) -> None:
            Rank(n, directory, options).run(h)

        crew.start(number, work)
    reason = crew.wait()
    rows = _lines(directory, "rows")
    if not rows:
        raise SystemExit(f"torch_collectives: {reason or 'no results'}")
    return dict(
        {"format": FORMAT, "command": "all-reduce"},
        **machine,
        bind=options.bind,
        peers=options.peers,
        warmups=options.warmups,
        gpus=options.gpus,
        rows=rows,
        ranks=sorted(_lines(directory, "ranks"), key=lambda one: int(one["rank"])),
        results=[],
        gaps=[],
        stalled=reason,
    )


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="torch_collectives")
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--largest", type=int, default=1 << 30)
    parser.add_argument("--warmups", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--bind", default="none")
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    parser.add_argument("--stall", type=float, default=120.0)
    with tempfile.TemporaryDirectory(prefix="homenode-") as directory:
        sys.stdout.write(json.dumps(run(parser.parse_args(words), Path(directory))) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
