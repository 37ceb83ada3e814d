"""Collective watch: runs an all-reduce with NCCL's log on, and gives what happened meanwhile. [I/O]

    python3 - --gpus 8 [--bind N] [--topology TEXT] -- all_reduce_perf ...   < this, carried
    python3 - --gpus 8 [--bind N] [--topology TEXT] -- torch --gpus 8 ...    a process for each GPU

Runs in any Python from 3.8 on. Behind the tool's own output comes one line,

    # homenode collective: {"log": ..., "before": {"0": bytes}, "during": {...}, ...}

NCCL's log (graph, channels, affinity, transports, buffers) is written before anything is timed; the
topology file lies in a folder that is removed. before, during: used bytes of each node, and the
most that were used. threads: PUs with the number of looks at which a busy thread ran there.
host_numa_ids: what CUDA gives as HOST_NUMA_ID of each GPU; null where it cannot be asked.
interrupts: of the GPUs' drivers meanwhile, by PU. reclaimed: pages that allocations had to wait for
meanwhile; null where the kernel counts none.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from homenode.measure.programs.torch_place import bind
from homenode.measure.programs.watched import busy_pus, exit_status

LOOK_S = 0.05
MOST_LOG = 4 << 20
_HOST_NUMA_ID = 134
"""CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, CUDA 12.2. Source: cydriver.pxd of cuda-bindings 12.9.0."""

SAID = "# homenode collective: "
_SUBSYSTEMS = "INIT,ENV,GRAPH,SHM,P2P,ALLOC"


def used_bytes(root: str = "/") -> dict[str, int]:
    """Of each node: all memory less what is free; huge pages that are reserved are not free."""
    found = {}
    for path in Path(root, "sys/devices/system/node").glob("node[0-9]*/meminfo"):
        text = path.read_text()
        used = re.search(r"MemUsed:\s+(\d+) kB", text)
        if used is not None:
            found[path.parent.name[4:]] = 1024 * int(used[1])
    return found


_DRIVERS = re.compile(r"\b(nvidia\S*|amdgpu\S*)$")
"""The last word of an interrupt's line in /proc/interrupts: the driver that handles it."""


def interrupt_counts(root: str = "/") -> dict[int, int]:
    """Of the GPUs' drivers since the start, by PU; {} where there are none."""
    try:
        head, *lines = Path(root, "proc/interrupts").read_text().splitlines()
    except (OSError, ValueError):
        return {}
    pus = [int(word[3:]) for word in head.split() if word[3:].isdigit()]
    found: dict[int, int] = {}
    for line in lines:
        if _DRIVERS.search(line):
            for pu, word in zip(pus, line.split()[1:]):  # noqa: B905 - Python 3.8
                found[pu] = found.get(pu, 0) + (int(word) if word.isdigit() else 0)
    return found


def reclaimed_pages(root: str = "/") -> int | None:
    """Pages that were reclaimed since the start while an allocation waited; proc_vmstat(5)."""
    try:
        lines = Path(root, "proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[-1] for line in lines if line.startswith("pgsteal_direct")]
    return sum(map(int, found)) if found else None


def more_reclaimed(before: int | None, root: str = "/") -> int | None:
    """Than before; None where one of the two is unknown."""
    after = reclaimed_pages(root)
    return None if before is None or after is None else after - before


def numa_balancing(root: str = "/") -> int | None:
    """kernel.numa_balancing; None where the kernel has none."""
    try:
        return int(Path(root, "proc/sys/kernel/numa_balancing").read_text())
    except (OSError, ValueError):
        return None


def _children(process: int) -> list[int]:
    """The process and those that it started, their own included."""
    found = [process]
    for one in found:
        try:
            for task in Path(f"/proc/{one}/task").iterdir():
                found += [int(word) for word in (task / "children").read_text().split()]
        except OSError:
            continue
    return found


def host_numa_ids(gpus: int) -> list[int] | None:
    """As the driver gives them, negative where it has none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    found = []
    if driver.cuInit(0) != 0:
        return None
    for number in range(gpus):
        device, value = ctypes.c_int(), ctypes.c_int()
        if driver.cuDeviceGet(ctypes.byref(device), number) != 0:
            return None
        if driver.cuDeviceGetAttribute(ctypes.byref(value), _HOST_NUMA_ID, device) != 0:
            return None
        found.append(value.value)
    return found


def _start(words: list[str], home: int | None, folder: str) -> int:
    """A child that runs the tool, its NCCL logs into the folder."""
    child = os.fork()
    if child:
        return child
    os.environ.update(
        NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS=_SUBSYSTEMS, NCCL_DEBUG_FILE=f"{folder}/log.%p"
    )
    code = 127
    try:
        if home is not None:
            bind(home)
        if words[0] == "torch":
            from homenode.measure.programs import torch_collectives

            torch_collectives.main(words[1:])
            sys.stdout.flush()
            code = 0
        else:
            os.execvp(words[0], words)  # noqa: S606 - an argv list, and no shell is wanted
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{words[0]}: cannot be run: {error}\n")
    except SystemExit as error:
        sys.stderr.write(f"{error}\n")
        code = 1
    sys.stderr.flush()
    os._exit(code)


def _log(folder: str) -> str:
    texts = [path.read_text(errors="replace") for path in sorted(Path(folder).glob("log.*"))]
    text = "".join(texts)
    return text[:MOST_LOG]


def _asked(gpus: int) -> list[int] | None:
    """In a process of its own: CUDA must not be in one that forks."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.write(write, json.dumps(host_numa_ids(gpus)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    found: list[int] | None = json.loads(text or "null")
    return found


def main(words: list[str]) -> int:
    """Runs the tool and returns its exit status, 128 + N for a signal."""
    parser = argparse.ArgumentParser(prog="collective_watch")
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--bind", type=int)
    parser.add_argument("--topology")
    parser.add_argument("tool", nargs=argparse.REMAINDER)
    options = parser.parse_args(words)
    tool = options.tool[1:] if options.tool[:1] == ["--"] else options.tool
    numa_ids = _asked(options.gpus)
    before = used_bytes()
    during = dict(before)
    interrupts, reclaimed = interrupt_counts(), reclaimed_pages()
    looks: dict[int, int] = {}
    with tempfile.TemporaryDirectory(prefix="homenode-") as folder:
        if options.topology is not None:
            file = Path(folder) / "topology.xml"
            file.write_text(options.topology)
            os.environ["NCCL_TOPO_FILE"] = str(file)
        child = _start(tool, options.bind, folder)
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            for pu in (pu for one in _children(child) for pu in busy_pus(one)):
                looks[pu] = looks.get(pu, 0) + 1
            for node, used in used_bytes().items():
                during[node] = max(used, during.get(node, 0))
            time.sleep(LOOK_S)
        said: dict[str, Any] = {
            "log": _log(folder),
            "before": before,
            "during": during,
            "threads": {str(pu): count for pu, count in sorted(looks.items())},
            "host_numa_ids": numa_ids,
            "interrupts": {
                str(pu): count - interrupts.get(pu, 0) for pu, count in interrupt_counts().items()
            },
            "reclaimed": more_reclaimed(reclaimed),
        }
    sys.stdout.write(f"\n{SAID}{json.dumps(said)}\n")
    sys.stdout.flush()
    return exit_status(status)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
