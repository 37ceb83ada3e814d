"""Documents as homenode-probe writes them, made up around known figures."""

import json
from collections.abc import Sequence
from typing import Any

from homenode.cpuset import CpuSet

End = float | None
Ends = tuple[tuple[End, ...], tuple[End, ...]]
"""Hand-over latencies of each pair of CPUs before and after one sample."""
NEAR: Ends = ((27.0,), (27.4,))
FAR: Ends = ((108.0,), (109.0,))
KERNELS = (("triad", "regular", 24, 32), ("copy", "regular", 16, 24), ("read", "regular", 8, 8))
SPEED = {"triad": 36e9, "copy": 33e9, "read": 34e9}


def document(
    command: str,
    pus: str = "0-3",
    *,
    busy: bool = False,
    emulated: bool = False,
    caveats: Sequence[dict[str, str]] = (),
    **fields: Any,
) -> str:
    """The text of one document. fields: what the command adds to the head."""
    found = list(caveats)
    if busy:
        found.append(
            {
                "id": "busy-neighbour",
                "detail": "others used 48 % of these CPUs",
                "fix": "stop what runs there",
            }
        )
    machine = {
        "architecture": "x86_64",
        "nodes": [{"node": 0, "pus": pus, "memory_bytes": 1 << 33, "available_bytes": 1 << 32}],
        "hypervisor": "TCGTCGTCGTCG" if emulated else None,
        "emulated": emulated,
    }
    return json.dumps(
        {
            "format": "homenode.probe/1",
            "probe_version": "0.1.0",
            "command": command,
            "machine": machine,
            "pus": pus,
            "seed": 1,
            **fields,
            "contention": {
                "wall_s": 1.0,
                "others_ratio": 0.48 if busy else 0.0,
                "steal_ratio": 0.0,
                "busy_neighbour": busy,
            },
            "caveats": found,
        }
    )


def throughput(pus: str, rate: float = 4600.0, spread: float = 0.001, **head: Any) -> str:
    each = [rate, rate * (1 + spread), rate * (1 - spread)]
    threads = [
        {"pu": int(pu), "events": 10, "samples_events_per_s": each, "fairness_ratio": 1.0}
        for pu in CpuSet.parse(pus)
    ]
    return document(
        "throughput",
        pus,
        one={"threads": threads[:1], "fairness_index": 1.0},
        all={"threads": threads, "fairness_index": 1.0},
        **head,
    )


def bandwidth(pus: str, brackets: Sequence[Ends], **head: Any) -> str:
    """Samples one after the other, a kernel each in turn; twice as fast where far apart."""
    threads = len(CpuSet.parse(pus))
    raw: dict[str, list[dict[str, Any]]] = {name: [] for name, *_ in KERNELS}
    for number, (before, after) in enumerate(brackets):
        kernel = KERNELS[number % len(KERNELS)][0]
        first = before[0] if before else None
        speed = SPEED[kernel] * (2 if first is not None and first > 60 else 1) + number
        sample: dict[str, Any] = {"at_ns": 1000 * number, "bytes_per_s": speed, "disturbed": False}
        if threads > 1:
            sample |= {"cas_before_ns": before, "cas_after_ns": after}
        raw[kernel].append(sample)
    kernels = [
        {
            "kernel": name,
            "stores": stores,
            "reported_bytes_per_element": reported,
            "moved_bytes_per_element": moved,
            "raw": raw[name],
        }
        for name, stores, reported, moved in KERNELS
    ]
    run = {"pus": pus, "threads": threads, "node": None, "kernels": kernels, "pages": PAGES}
    return document("bandwidth", pus, runs=[run], instruction_set="avx2", **head)


PAGES = {
    "bytes": 1 << 29,
    "huge_bytes": 1 << 29,
    "pages_of_node": {"0": 256},
    "pages_unknown": 0,
    "verified_by": "move_pages",
}


def latency(pus: str, **head: Any) -> str:
    points = [
        {"bytes": 1 << 12, "samples_ns": [1.08, 1.09, 1.08, 1.1, 1.08]},
        {"bytes": 1 << 28, "samples_ns": [93.0, 94.0, 93.5, 92.0, 95.0]},
    ]
    curves = [
        {
            "pu": 0,
            "node": None,
            "pages_wanted": "auto",
            "order": order,
            "pages": PAGES,
            "points": points,
        }
        for order in ("local", "random")
    ]
    levels = [
        {"level": "L1", "latency_ns": 1.08, "capacity_bytes": 32768},
        {"level": "DRAM", "latency_ns": 93.5, "capacity_bytes": None},
    ]
    return document("latency", pus, curves=curves, levels=levels, **head)


def core_to_core(pus: str, latency_ns: float = 27.0, **head: Any) -> str:
    one, other = list(CpuSet.parse(pus))[:2]
    samples = [latency_ns, latency_ns * 1.01, latency_ns * 0.99]
    return document(
        "core-to-core", pus, pairs=[{"pus": [one, other], "samples_ns": samples}], **head
    )


def placement(pus: str, brackets: Sequence[Ends], **head: Any) -> str:
    series = [
        {
            "at_ns": 1000 * number,
            "pair": 0,
            "cas_before_ns": before,
            "cas_after_ns": after,
            "fill_ratio": 2.0 if (before[0] or 0) > 60 else 1.02,
            "disturbed": False,
        }
        for number, (before, after) in enumerate(brackets)
    ]
    one, other = list(CpuSet.parse(pus))[:2]
    pairs = [{"pair": 0, "pus": [one, other], "llc_shared_reported": True}]
    return document("placement", pus, pairs=pairs, series=series, verdict="steady", **head)


def smt(pus: str, **head: Any) -> str:
    one, other = list(CpuSet.parse(pus))[:2]
    threads = [{"pu": pu, "samples_events_per_s": [2300.0]} for pu in (one, other)]
    core = {
        "pus": f"{one},{other}",
        "work": "primes",
        "alone": {"samples_events_per_s": [4600.0]},
        "together": {"threads": threads},
        "gain_ratio": 1.25,
    }
    return document("smt", pus, siblings_known=True, cores=[core], **head)


def loaded_latency(pus: str, **head: Any) -> str:
    points = [
        {"delay_cycles": delay, "samples_ns": [latency_ns], "samples_injected_bytes_per_s": [rate]}
        for delay, latency_ns, rate in ((None, 95.0, 0), (500, 120.0, 9e9), (0, 240.0, 30e9))
    ]
    return document("loaded-latency", pus, points=points, **head)


def ends(pus: str, latency_ns: float = 27.0) -> Ends:
    """A bracket in which all neighbours are equally far apart."""
    pairs = len(CpuSet.parse(pus)) - 1
    return (latency_ns,) * pairs, (latency_ns * 1.01,) * pairs


def answer(argv: Sequence[str]) -> str:
    """What a quiet machine's probe prints for a command of the suite."""
    pus = argv[argv.index("--pus") + 1] if "--pus" in argv else "0-3"
    made = {
        "throughput": lambda: throughput(pus),
        "bandwidth": lambda: bandwidth(pus, [ends(pus)] * 9),
        "latency": lambda: latency(pus),
        "core-to-core": lambda: core_to_core(pus),
        "placement": lambda: placement(pus, [ends(pus)] * 6),
        "smt": lambda: smt(pus),
        "loaded-latency": lambda: loaded_latency(pus),
    }
    return made[argv[1]]()
