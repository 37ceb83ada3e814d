"""Results for the report's tests: machines with everything, and names that mean harm."""

import random
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

GPUS = (Bdf(0, 0x19, 0, 0), Bdf(0, 0x3B, 0, 0))


def full_run(
    layout: str, seed: int, *, system: str = "H200", name: str | None = None, gain: float = 1.0
) -> Run:
    """Three boots with a figure of every kind that the report draws. gain: of its bandwidth."""
    rng = random.Random(seed)
    samples: list[Sample] = []
    for boot in range(3):
        for number in range(5):
            at: dict[str, Any] = {"boot": boot, "number": number}

            def near(value: float) -> float:
                return value * (1 + rng.gauss(0, 0.005))

            samples += [
                Sample("memory-bandwidth", "bytes_per_s", near(1e11 * gain), variant="triad", **at),
                Sample("memory-latency", "ns", near(100 / gain), variant="dram", **at),
                Sample("allreduce-busbw-peak", "bytes_per_s", near(2e10), **at),
                Sample("cache-capacity", "bytes", 2.0**15, variant="l1", **at),
                Sample("cache-capacity", "bytes", 2.0**25, variant="l3", **at),
                *(
                    Sample("memory-latency", "ns", near(power), size_bytes=1 << power, **at)
                    for power in range(12, 29)
                ),
                *(
                    Sample(
                        "allreduce-busbw",
                        "bytes_per_s",
                        near(power * 1e9),
                        size_bytes=1 << power,
                        variant="in-place",
                        **at,
                    )
                    for power in range(3, 28)
                ),
                *(
                    Sample(
                        "h2d-bandwidth",
                        "bytes_per_s",
                        near(5e10 if node == gpu else 2e10),
                        device=GPUS[gpu],
                        node=node,
                        **at,
                    )
                    for node in range(2)
                    for gpu in range(2)
                ),
                *(
                    Sample(
                        "memory-bandwidth",
                        "bytes_per_s",
                        near(5e10 / (1 + abs(a - b))),
                        node=a,
                        peer_node=b,
                        variant="read",
                        **at,
                    )
                    for a in range(2)
                    for b in range(2)
                ),
                Sample(
                    "p2p-bandwidth", "bytes_per_s", near(4e10), device=GPUS[0], peer=GPUS[1], **at
                ),
                Sample(
                    "p2p-bandwidth", "bytes_per_s", near(4e10), device=GPUS[1], peer=GPUS[0], **at
                ),
                *(
                    Sample(
                        "core-to-core-latency",
                        "ns",
                        near(30 + 40 * (one // 2 != other // 2)),
                        variant=f"{one} to {other}",
                        **at,
                    )
                    for one in range(4)
                    for other in range(one + 1, 4)
                ),
            ]
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
    other = full_run("pin", 9, system="MI350X")
    write_run(root, other)
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
