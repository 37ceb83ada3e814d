"""Speed of reading and drawing hosts: median wall time, also as multiples of a fixed loop. [I/O]

`make bench`, or `bench/host_speed.py [ROUNDS]`. Each round times every step once, in turn. The
hosts are shipped ones, and captured ones where they are at hand.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.rendered.machine import render

from homenode.machine.description.parse import load_shipped, parse_description
from homenode.machine.discover.host import discover
from homenode.machine.discover.hwloc import host_from_hwloc
from homenode.machine.discover.lspci import host_from_lspci
from homenode.show.host_text import build_host_tree
from homenode.show.topology_map import draw_topology

ROUNDS = 7
MACHINES = Path(__file__).resolve().parents[2] / "shared/machines"
LARGE = "x86-2p8n128c256t-64gpu"
HOSTS = Path(parse_description.__code__.co_filename).parents[1] / "hosts"


def steps() -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    text = (HOSTS / f"{LARGE}.toml").read_text()
    described = load_shipped(LARGE)
    snapshot = render(described)
    many_cores = discover(render(load_shipped("epyc9654-2p-1node")))
    found: dict[str, Callable[[], object]] = {
        "parse host.toml, 256 PUs, 64 GPUs": lambda: parse_description(text, LARGE),
        "render it to a tree of /sys": lambda: render(described),
        "discover the tree": lambda: discover(snapshot),
        "draw 2x EPYC 9654, 384 PUs": lambda: draw_topology(many_cores),
        "its tree for a terminal": lambda: build_host_tree(many_cores),
    }
    hwloc = MACHINES / "hwloc/AMD-19h-Zen4-2xEpyc-9654.xml"
    lspci = MACHINES / "lspci/gpud-hgx-h100x8-lspci-vvv.txt"
    if hwloc.exists():
        xml = hwloc.read_text()
        found["hwloc XML of 2x EPYC 9654"] = lambda: host_from_hwloc(xml, "9654")
    if lspci.exists():
        listing = lspci.read_text()
        found["lspci -vvv of 517 functions"] = lambda: host_from_lspci(listing, "hgx")
    return found


def loop() -> int:
    """The calibration: a fixed loop of integer arithmetic and dictionary look-ups."""
    table = {number: number * 3 for number in range(256)}
    total = 0
    for number in range(20_000):
        total = (total * 31 + table[number & 255]) & 0xFFFFFFFF
    return total


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    timed = {"calibration loop": loop, **steps()}
    in_use: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds):
        for name, call in timed.items():
            start = time.perf_counter()
            call()
            in_use[name].append(time.perf_counter() - start)
    base = statistics.median(in_use["calibration loop"])
    print(f"{'step':38} {'median ms':>9} {'loops':>8}")
    for name, seconds in in_use.items():
        median = statistics.median(seconds)
        print(f"{name:38} {median * 1e3:9.1f} {median / base:8.1f}")


if __name__ == "__main__":
    main()
