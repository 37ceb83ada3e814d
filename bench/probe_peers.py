"""The native probe against its peers, interleaved: bandwidth and latency. [I/O]

`make bench`, or `bench/probe_peers.py [ROUNDS [PAGES]]` (PAGES: as the probe's --pages). Peers: our
own plain STREAM (gcc -O2, and -O3 -march=native) and plain pointer chase; multichase where it is
installed. In each round the probe runs, then its peers, directly after one another, so that a busy
moment falls on all. A ratio is the median over rounds of the probe's median by the peer's in the
same round. Rounds on all PUs in which the core-to-core latency changed between two programs are
omitted: the hypervisor moved a vCPU. On a busy machine, run it under `nice -n -20`.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "probe"
ROUNDS = 5
SPAN = 1.6  # of latencies in one placement state, as in the probe
KIB, MIB = 1 << 10, 1 << 20
CHASES = ((16 * KIB, "huge"), (256 * KIB, "huge"), (256 * MIB, "huge"), (256 * MIB, "base"))
STREAM = ("copy", "scale", "add", "triad")
MULTICHASE = re.compile(r"[0-9]+(?:\.[0-9]+)?")


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    pages = sys.argv[2] if len(sys.argv) > 2 else "auto"
    subprocess.run(
        ["make", "-C", str(ROOT / "native"), "-j2", "--silent", "all", "baseline"], check=True
    )
    pus = sorted(os.sched_getaffinity(0))
    _bandwidth(pus[:1], rounds, pages)
    if len(pus) > 1:
        _bandwidth(pus, rounds, pages)
    _latency(str(pus[0]), rounds)


def _run(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def _probe(*arguments: str) -> Any:
    return json.loads(_run(str(OUT / "homenode-probe"), *arguments))


def _text(pus: list[int]) -> str:
    return ",".join(map(str, pus))


def _ours(pus: list[int], kernels: str, stores: str, pages: str) -> dict[str, float]:
    """Per kernel: median, GB/s of reported bytes, in the state with most of the samples."""
    document = _probe(
        "bandwidth",
        "--pus",
        _text(pus),
        "--kernels",
        kernels,
        "--stores",
        stores,
        "--pages",
        pages,
        "--seconds",
        "0.3",
    )
    found = {}
    for kernel in document["runs"][0]["kernels"]:
        if kernel["by_state"]:
            most = max(kernel["by_state"], key=lambda state: state["samples"])
            name = kernel["kernel"] + ("_nt" if kernel["stores"] == "non-temporal" else "")
            found[name] = most["median_bytes_per_s"] / 1e9
    return found


def _stream(program: str, pus: list[int]) -> dict[str, float]:
    rows = (line.split() for line in _run(str(OUT / program), str(len(pus))).splitlines())
    return {name: float(median) for name, _, median in rows}


def _cas_ns(pus: list[int]) -> float:
    if len(pus) < 2:
        return 1.0
    document = _probe("core-to-core", "--pus", _text(pus[:2]), "--seconds", "0.05")
    return float(document["pairs"][0]["median_ns"])


def _bandwidth(pus: list[int], rounds: int, pages: str) -> None:
    rows: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    dropped = 0
    for _ in range(rounds):
        places = [_cas_ns(pus)]
        pairs: list[tuple[str, str, float, float]] = []
        ours = _ours(pus, ",".join(STREAM), "regular", pages)
        for title, program in (("STREAM -O2", "stream_o2"), ("STREAM -O3", "stream_o3")):
            places.append(_cas_ns(pus))
            peer = _stream(program, pus)
            pairs += [(name, title, ours[name], peer[name]) for name in STREAM if name in ours]
        places.append(_cas_ns(pus))
        if max(places) > SPAN * min(places):
            dropped += 1
            continue
        for name, peer_name, mine, theirs in pairs:
            rows[name, peer_name].append((mine, theirs))
    print(f"\n{len(pus)} threads, pages {pages}: GB/s, medians over rounds; median of the ratios")
    for (name, peer_name), both in sorted(rows.items()):
        mine, best = (statistics.median(column) for column in zip(*both, strict=True))
        ratios = sorted(a / b for a, b in both)
        print(
            f"  {name:9} probe {mine:5.1f}  {peer_name:12} {best:5.1f}  "
            f"x{statistics.median(ratios):.2f} [{ratios[0]:.2f} .. {ratios[-1]:.2f}], "
            f"{len(both)} rounds",
            flush=True,
        )
    if dropped:
        print(f"  {dropped} rounds omitted: the placement changed during them")


def _curve(pu: str, pages: str) -> dict[int, float]:
    """Per size, ns of a load in random order."""
    document = _probe(
        "latency",
        "--pus",
        pu,
        "--pages",
        pages,
        "--orders",
        "random",
        "--quick",
        "--seconds",
        "3",
    )
    return {point["bytes"]: point["median_ns"] for point in document["curves"][0]["points"]}


def _chase(peer: str, pu: str, size: int, pages: str) -> float:
    """ns of a load in one random order over the whole buffer (multichase: -T as large as -m)."""
    if peer == "plain chase":
        return float(_run(str(OUT / "chase_plain"), pu, str(size), pages).split()[1])
    argv = ["multichase", "-m", str(size), "-T", str(size), "-s", "64"]
    text = _run("taskset", "-c", pu, *argv, *(["-H"] if pages == "huge" else []))
    return float(MULTICHASE.findall(text)[-1])


def _latency(pu: str, rounds: int) -> None:
    peers = ["plain chase", *(["multichase"] if shutil.which("multichase") else [])]
    rows: dict[tuple[int, str, str], list[tuple[float, float]]] = defaultdict(list)
    for _ in range(rounds):
        for pages in dict.fromkeys(pages for _, pages in CHASES):
            mine = _curve(pu, pages)
            for size in (size for size, kind in CHASES if kind == pages):
                for peer in peers:
                    theirs = _chase(peer, pu, size, pages)
                    rows[size, pages, peer].append((mine[size], theirs))
    print("\nlatency, ns, random order: medians over rounds; median of the ratios")
    for (size, pages, peer), both in rows.items():
        mine, theirs = (statistics.median(column) for column in zip(*both, strict=True))
        ratio = statistics.median(a / b for a, b in both)
        print(
            f"  {size // KIB:7} KiB {pages:4}  probe {mine:8.3f}  {peer} {theirs:8.3f}  "
            f"x{ratio:.3f}, {len(both)} rounds"
        )


if __name__ == "__main__":
    main()
