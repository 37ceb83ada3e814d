"""Results for the report's tests: machines with everything, and names that mean harm."""

import random
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from homenode.bdf import Bdf
from homenode.cli.main import main
from homenode.measure.results.model import Condition, Origin, Run, RunHead, Sample, Switches
from homenode.measure.results.store import run_text, write_run
from homenode.measure.results.vantage import Vantage
from homenode.vm.layout import PRESETS

NASTY = "<script>window.owned=1</script>&\"'=cmd|x"
"""A GPU's name, as somebody who means harm would have it."""

RATE = "bytes_per_s"
GPUS = (Bdf(0, 0x19, 0, 0), Bdf(0, 0x3B, 0, 0))


def full_run(
    layout: str, seed: int, *, system: str = "H200", name: str | None = None, gain: float = 1.0
) -> Run:
    """Three boots with a figure of every kind that the report draws. gain: of its bandwidth."""
    rng = random.Random(seed)
    samples: list[Sample] = []

    def add(metric: str, unit: str, value: float, noise: float = 0.005, **more: Any) -> None:
        near = value * (1 + rng.gauss(0, noise)) if noise else value
        samples.append(Sample(metric, unit, near, **more))

    for boot, number in product(range(3), range(5)):
        at: dict[str, Any] = {"boot": boot, "number": number}
        add("memory-bandwidth", RATE, 1e11 * gain, variant="triad", **at)
        add("memory-latency", "ns", 100 / gain, variant="dram", **at)
        add("allreduce-busbw-peak", RATE, 2e10, **at)
        add("cache-capacity", "bytes", 2.0**15, noise=0, variant="l1", **at)
        add("cache-capacity", "bytes", 2.0**25, noise=0, variant="l3", **at)
        for power in range(12, 29):
            add("memory-latency", "ns", power, size_bytes=1 << power, **at)
        at_place = at | {"variant": "in-place"}
        for power in range(3, 28):
            add("allreduce-busbw", RATE, power * 1e9, size_bytes=1 << power, **at_place)
        for node, gpu in product(range(2), range(2)):
            rate = 5e10 if node == gpu else 2e10
            add("h2d-bandwidth", RATE, rate, device=GPUS[gpu], node=node, **at)
        for a, b in product(range(2), range(2)):
            rate = 5e10 / (1 + abs(a - b))
            add("memory-bandwidth", RATE, rate, node=a, peer_node=b, variant="read", **at)
        for gpu in range(2):
            add("p2p-bandwidth", RATE, 4e10, device=GPUS[gpu], peer=GPUS[1 - gpu], **at)
        for one, other in combinations(range(4), 2):
            ns = 30 + 40 * (one // 2 != other // 2)
            add("core-to-core-latency", "ns", ns, variant=f"{one} to {other}", **at)
    head = RunHead(
        name or layout,
        system,
        Origin.MEASURED,
        Vantage.GUEST,
        Switches.from_layout(PRESETS[layout]),
        host_kind="2x Xeon",
        host="5f" * 32,
        vcpus=8,
        host_addresses=True,
        conditions=(Condition("governor", "performance"),),
    )
    return Run(head, tuple(samples))


def full_results(root: Path) -> Path:
    """Three layouts of one machine, and another machine's single one."""
    for seed, (layout, gain) in enumerate((("default", 1.0), ("pin", 1.01), ("pin-numa-pci", 4.0))):
        write_run(root, full_run(layout, seed, gain=gain))
    write_run(root, full_run("pin", 9, system="MI350X"))
    return root


def nasty_results(root: Path) -> Path:
    """Results in which every text means harm."""
    for seed, layout in enumerate(("default", "pin")):
        head = RunHead(
            NASTY + layout,
            NASTY,
            Origin.MEASURED,
            Vantage.GUEST,
            Switches.from_layout(PRESETS[layout]),
            host_kind=NASTY,
            host="ab" * 32,
            arrangement=NASTY + layout,
            memory_mode=NASTY,
            conditions=(Condition(NASTY, NASTY + layout),),
            unusable=(NASTY,),
            source=NASTY,
        )
        extra = Sample(f"app-rate:{NASTY}", NASTY, 1.0 + seed, variant=NASTY, state=NASTY)
        directory = root / "gpu" / layout
        directory.mkdir(parents=True)
        text = run_text(Run(head, (*full_run(layout, seed).samples, extra)))
        (directory / "results.jsonl").write_text(text, encoding="utf-8")
    return root


def report(*arguments: object) -> int:
    """homenode report with these arguments; its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["homenode", "report", *map(str, arguments)])
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
    return 0
