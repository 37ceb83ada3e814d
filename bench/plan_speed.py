"""Speed of planning: median wall time of whole plans, also as multiples of a fixed loop. [I/O]

Run with `make bench`, or `python bench/plan_speed.py [--repeats N] [--json]`. The calibration loop
runs in the same process, between the cases, so that the multiples compare between machines. Timed:
from Host and GuestRequest in memory to Plan (or Unplannable), nothing else.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.small_hosts import (
    DeviceSpec,
    NodeSpec,
    asking,
    even_host,
    host_of,
    pinned_domain,
    small_request,
)

from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host
from homenode.plan.planner import plan
from homenode.plan.request import GuestRequest
from homenode.units import GIB
from homenode.vm.plan import Unplannable


@dataclass(frozen=True)
class Case:
    """One thing to time. goal_ms: what we aim at on an ordinary server core."""

    name: str
    host: Host
    request: GuestRequest
    goal_ms: float
    feasible: bool = True


def line(count: int) -> tuple[tuple[int, ...], ...]:
    """Nodes in a row, XAPI's example: no hierarchy to group them by."""
    return tuple(tuple(10 + 11 * abs(i - j) for j in range(count)) for i in range(count))


def apart_in_threes(count: int) -> tuple[tuple[int, ...], ...]:
    """Nodes of which each three cannot reach one another: no hierarchy to group them by."""
    return tuple(
        tuple(10 if i == j else 255 if i // 3 == j // 3 else 21 for j in range(count))
        for i in range(count)
    )


def gpus(count: int, nodes: int, switches_per_node: int = 2) -> list[DeviceSpec]:
    """GPUs and NICs in pairs below switches, spread over the nodes."""
    return [
        DeviceSpec(
            f"{number // 32:04x}:{16 + number % 32 * 4:02x}:00.0",
            node=number * nodes // count,
            kind=DeviceKind.NIC if number % 2 else DeviceKind.GPU,
            root=number * nodes // count,
            switch=number // 2 % switches_per_node,
        )
        for number in range(count)
    ]


def at_random(count: int) -> tuple[tuple[int, ...], ...]:
    """Distances from 11 to 40 that follow no rule."""
    draw = random.Random(count)
    table = [[10] * count for _ in range(count)]
    for i in range(count):
        for j in range(i):
            table[i][j] = table[j][i] = draw.randint(11, 40)
    return tuple(map(tuple, table))


def unlike(distances: tuple[tuple[int, ...], ...] | None) -> Host:
    """64 nodes of unlike memory in eight packages, with a GPU each."""
    draw = random.Random(64)
    nodes = [
        NodeSpec(llcs=((1,) * 16,), package=i // 8, memory_bytes=draw.randint(32, 96) * GIB)
        for i in range(64)
    ]
    devices = [DeviceSpec(f"{i:02x}:00.0", node=i, root=i) for i in range(64)]
    return host_of(nodes, distances=distances, devices=devices)


def vm_on_each_node(host: Host) -> Host:
    """The host with a VM of three vCPUs and 8 GiB on each node."""
    domains = []
    for node in host.nodes:
        its = [core.pus.first() for core in host.cores if core.pus <= node.pus]
        pus = ",".join(str(pu) for pu in its[:3])
        memory = ((int(node.index), 8 * GIB),)
        domains.append(
            pinned_domain(pus, name=f"vm{node.index}", memory_bytes=8 * GIB, memory_by_node=memory)
        )
    return replace(host, domains=tuple(domains))


def scattered(pus: int, every: int) -> str:
    """A PU list with gaps, so that no two nodes are alike."""
    return ",".join(str(pu) for pu in range(0, pus, every) if pu % 7)


def cases() -> list[Case]:
    eight = even_host(2, 4, 4, 4, 2, memory_bytes=256 * GIB, devices=gpus(16, 8))
    eight_gpus = [str(d.bdf) for d in eight.pci_devices if d.kind is DeviceKind.GPU]
    wide = even_host(
        16,
        4,
        2,
        4,
        2,
        memory_bytes=256 * GIB,
        devices=gpus(64, 64),
        domains=[pinned_domain(scattered(512, 5))],
    )
    wide_gpus = [str(d.bdf) for d in wide.pci_devices if d.kind in (DeviceKind.GPU, DeviceKind.NIC)]
    found = [
        Case(
            f"{nodes} nodes with a VM on each, 4 vCPUs",
            vm_on_each_node(even_host(2, nodes // 2, 1, 8, 2)),
            small_request(4, 8 * GIB),
            goal,
        )
        for nodes, goal in ((8, 1.5), (64, 5))
    ]
    found += [
        Case("8 nodes, 256 PUs, 16 vCPUs", eight, small_request(16, 64 * GIB), 3),
        Case(
            "8 nodes, 256 PUs, 64 vCPUs, 8 GPUs, pin-numa-pci",
            eight,
            small_request(64, 256 * GIB, layout="pin-numa-pci", devices=eight_gpus),
            3,
        ),
        Case("8 nodes, 256 PUs, all of it", eight, small_request(128, 64 * GIB), 3),
        Case("8 nodes, 256 PUs, no fit", eight, small_request(264), 3, False),
    ]
    for nodes in (16, 32):
        for shape, host in (
            ("row", even_host(nodes, 1, 1, 8, 2, distances=line(nodes))),
            ("two packages", even_host(2, nodes // 2, 1, 8, 2)),
        ):
            busy = replace(host, domains=(pinned_domain(scattered(nodes * 8, 3)),))
            label = f"{nodes} nodes in a {shape}" if shape == "row" else f"{nodes} nodes, {shape}"
            found += [
                Case(f"{label}, 4 of them", host, small_request(32), 10),
                Case(f"{label}, half", host, small_request(4 * nodes), 10),
                Case(f"{label}, busy, flat", busy, small_request(3 * nodes, layout="pin"), 10),
                Case(f"{label}, no fit", host, small_request(16 * nodes + 8), 10, False),
                Case(f"{label}, no equal fit", busy, small_request(5 * nodes + 1), 10),
            ]
    board = even_host(2, 4, 2, 8, 2, memory_bytes=256 * GIB, devices=gpus(128, 8))
    board = replace(
        board,
        pci_devices=tuple(
            replace(d, name="NVIDIA H100 80GB HBM3") if d.kind is DeviceKind.GPU else d
            for d in board.pci_devices
        ),
    )
    found += [
        Case(
            f"8 nodes, 64 GPUs with NVSwitches, {count} to choose",
            board,
            asking(small_request(8, 64 * GIB, layout="pin-numa-pci"), gpu_count=count),
            100,
        )
        for count in (4, 8, 16, 33)
    ]
    found += [
        Case(
            "64 nodes, 1024 PUs, 64 devices",
            wide,
            small_request(128, 512 * GIB, layout="pin-numa", devices=wide_gpus),
            100,
        ),
        Case("64 nodes, 1024 PUs, flat", wide, small_request(150, 512 * GIB, layout="pin"), 100),
        Case(
            "64 nodes, 1024 PUs, 8 GPUs of 32 to choose",
            wide,
            asking(small_request(32, 64 * GIB), gpu_count=8),
            100,
        ),
        Case(
            "64 nodes apart in threes, 20 of them",
            even_host(64, 1, 1, 8, 2, distances=apart_in_threes(64)),
            small_request(160),
            100,
        ),
        Case(
            "64 nodes apart in threes, no fit",
            even_host(64, 1, 1, 8, 1, distances=apart_in_threes(64)),
            small_request(200),
            100,
            False,
        ),
        Case("64 nodes, 1024 PUs, no fit", wide, small_request(1100), 100, False),
    ]
    found += [
        Case(
            f"64 unlike nodes, {shape}, {gpus} GPUs of 64, {layout}{' unequal' if unequal else ''}",
            unlike(distances),
            asking(
                small_request(700, 2000 * GIB, layout=layout),
                gpu_count=gpus,
                unequal_cells=unequal,
            ),
            500,
        )
        for shape, distances in (("random", at_random(64)), ("packages", None))
        for layout, gpus, unequal in (
            ("pin", 31, False),
            ("pin-numa-pci", 24, False),
            ("pin-numa-pci", 24, True),
        )
    ]
    return found


def calibration_s() -> float:
    """Seconds for a fixed loop of integer arithmetic and dictionary look-ups."""
    table = {number: number * 3 for number in range(256)}
    start = time.perf_counter()
    total = 0
    for number in range(20_000):
        total = (total * 31 + table[number & 255]) & 0xFFFFFFFF
    assert total >= 0
    return time.perf_counter() - start


def attempt(case: Case) -> bool:
    try:
        plan(case.host, case.request)
    except Unplannable:
        return False
    return True


def timed_s(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for case in cases():
        if attempt(case) is not case.feasible:
            print(f"{case.name}: expected feasible={case.feasible}", file=sys.stderr)
            return 3
        times, loops = [], []
        for _ in range(options.repeats):
            loops.append(calibration_s())
            times.append(timed_s(lambda case=case: attempt(case)))  # type: ignore[misc]
        median, loop = statistics.median(times), statistics.median(loops)
        rows.append(
            {
                "case": case.name,
                "feasible": case.feasible,
                "median_ms": round(median * 1e3, 3),
                "worst_ms": round(max(times) * 1e3, 3),
                "goal_ms": case.goal_ms,
                "calibration_loops": round(median / loop, 2),
            }
        )
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    print(f"{'case':<62} {'median ms':>9} {'worst':>8} {'goal':>6} {'loops':>7}")
    for row in rows:
        print(
            f"{row['case']:<62} {row['median_ms']:>9} {row['worst_ms']:>8} "
            f"{row['goal_ms']:>6} {row['calibration_loops']:>7}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
