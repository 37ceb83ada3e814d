"""The native probe next to its peers, interleaved: bandwidth, latency, time taken. [I/O]

Run with `make bench`. Peers: our own plain STREAM (gcc -O2, and -O3 -march=native), a plain pointer
chase, and likwid-bench where it is installed. Each round runs each program once, in turn, so that a
busy moment falls on all. Runs on all PUs are sorted by core-to-core latency before and after:
only runs of one placement state are compared, and runs in which it changed are left out.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "probe"
ROUNDS = 5
SPAN = 1.6  # of latencies in one placement state, as in the probe
KIB, MIB = 1 << 10, 1 << 20
CHASES = ((16 * KIB, "huge"), (256 * KIB, "huge"), (256 * MIB, "huge"), (256 * MIB, "base"))


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    subprocess.run(
        ["make", "-C", str(ROOT / "native"), "-j2", "--silent", "all", "baseline"], check=True
    )
    pus = sorted(os.sched_getaffinity(0))
    first = [str(pus[0])]
    everyone = [str(pu) for pu in pus]
    _bandwidth("1 thread", first, rounds)
    if len(pus) > 1:
        _bandwidth(f"{len(pus)} threads", everyone, rounds)
    _latency(str(pus[0]), rounds)


def _run(argv: list[str]) -> tuple[str, float]:
    start = time.perf_counter()
    done = subprocess.run(argv, check=True, capture_output=True, text=True)
    return done.stdout, time.perf_counter() - start


def _probe(*arguments: str) -> tuple[Any, float]:
    text, seconds = _run([str(OUT / "homenode-probe"), *arguments])
    return json.loads(text), seconds


Figures = dict[str, tuple[float, float]]
"""Per kernel: best and median, GB/s of reported bytes."""


def _ours(pus: list[str]) -> tuple[Figures, float]:
    document, seconds = _probe("bandwidth", "--pus", ",".join(pus))
    figures: Figures = {}
    run = document["runs"][0]
    for kernel in run["kernels"]:
        states = kernel["by_state"]
        if not states:
            continue
        most = max(states, key=lambda state: state["samples"])
        best, median = most["best_bytes_per_s"] / 1e9, most["median_bytes_per_s"] / 1e9
        old = figures.get(kernel["kernel"], (0.0, 0.0))
        figures[kernel["kernel"]] = (max(old[0], best), max(old[1], median))
    return figures, seconds


def _stream(name: str, pus: list[str]) -> tuple[Figures, float]:
    text, seconds = _run([str(OUT / name), str(len(pus))])
    rows = (line.split() for line in text.splitlines())
    return {name: (float(best), float(median)) for name, best, median in rows}, seconds


def _likwid(pus: list[str]) -> tuple[Figures, float]:
    figures: Figures = {}
    start = time.perf_counter()
    kernels = {"read": "load_avx512", "copy": "copy_mem_avx512", "triad": "stream_mem_avx512"}
    for name, kernel in kernels.items():
        text, _ = _run(["likwid-bench", "-t", kernel, "-W", f"N:1GB:{len(pus)}"])
        for line in text.splitlines():
            if line.startswith("MByte/s:"):
                gb_per_s = float(line.split()[1]) / 1e3
                figures[name] = (gb_per_s, gb_per_s)
    return figures, time.perf_counter() - start


def _cas_ns(pus: list[str]) -> float:
    document, _ = _probe("core-to-core", "--pus", ",".join(pus[:2]), "--seconds", "0.05")
    return float(document["pairs"][0]["median_ns"])


def _bandwidth(title: str, pus: list[str], rounds: int) -> None:
    programs: dict[str, Callable[[], tuple[Figures, float]]] = {
        "probe": lambda: _ours(pus),
        "STREAM -O2": lambda: _stream("stream_o2", pus),
        "STREAM -O3": lambda: _stream("stream_o3", pus),
    }
    if shutil.which("likwid-bench"):
        programs["likwid"] = lambda: _likwid(pus)
    in_use: dict[str, list[float]] = defaultdict(list)
    runs: list[tuple[float, str, Figures]] = []
    dropped = 0
    for _ in range(rounds):
        for name, program in programs.items():
            before = _cas_ns(pus) if len(pus) > 1 else 1.0
            figures, seconds = program()
            after = _cas_ns(pus) if len(pus) > 1 else 1.0
            in_use[name].append(seconds)
            if max(before, after) > SPAN * min(before, after):
                dropped += 1
                continue
            runs.append((min(before, after), name, figures))
    least = min(cas for cas, _, _ in runs)
    for near in (True, False):
        state = [(name, figures) for cas, name, figures in runs if (cas <= SPAN * least) == near]
        if {"probe"} < {name for name, _ in state}:
            what = "" if len(pus) == 1 else f", {'near' if near else 'far'} state"
            _print_bandwidth(f"{title}{what}", state, in_use)
    if dropped:
        print(f"{dropped} runs left out: the placement changed during them")


def _print_bandwidth(
    title: str, runs: list[tuple[str, Figures]], in_use: dict[str, list[float]]
) -> None:
    print(f"\n{title}: GB/s, median over runs of the best and of the median; probe / peer")
    series: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for name, figures in runs:
        for kernel, pair in figures.items():
            series[name, kernel].append(pair)
    middle = {
        key: tuple(statistics.median(column) for column in zip(*pairs, strict=True))
        for key, pairs in series.items()
    }
    for name in dict.fromkeys(name for name, _ in runs):
        cells = []
        for kernel in ("read", "copy", "scale", "add", "triad"):
            if (name, kernel) not in middle or ("probe", kernel) not in middle:
                continue
            best, median = middle[name, kernel]
            cell = f"{kernel} {best:5.1f} {median:5.1f}"
            if name != "probe":
                ours = middle["probe", kernel]
                cell += f" (x{ours[0] / best:.2f} x{ours[1] / median:.2f})"
            cells.append(cell)
        print(f"  {name:11} {statistics.median(in_use[name]):4.1f} s  " + "  ".join(cells))


def _latency(pu: str, rounds: int) -> None:
    ours: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    plain: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    seconds: list[float] = []
    for _ in range(rounds):
        document, elapsed = _probe("latency", "--pus", pu)
        seconds.append(elapsed)
        for curve in document["curves"]:
            if curve["order"] != "random":
                continue
            pages = "base" if curve["pages_wanted"] == "base" else "huge"
            for point in curve["points"]:
                ours[point["bytes"], pages].append((point["best_ns"], point["median_ns"]))
        for size, pages in CHASES:
            text, _ = _run([str(OUT / "chase_plain"), pu, str(size), pages])
            best, median = map(float, text.split())
            plain[size, pages].append((best, median))
    took = statistics.median(seconds)
    print(
        f"\nlatency, ns, best of {rounds} runs and median of their medians; "
        f"the whole curve in {took:.1f} s"
    )
    for key in CHASES:
        cells = []
        for place, of in ((0, min), (1, statistics.median)):
            mine, peer = (of([pair[place] for pair in one[key]]) for one in (ours, plain))
            cells.append(f"probe {mine:8.3f}  plain {peer:8.3f}  x{mine / peer:.3f}")
        print(f"  {key[0] // KIB:7} KiB {key[1]:4}  {'   '.join(cells)}")


if __name__ == "__main__":
    main()
