"""A run of the suite in a process of its own: python -m tests.bench_child ROOT [--resume].

The machine is this one, but small: its snapshot is a described host's, its probe a shell script.
"""

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from homenode.machine.description.parse import load_shipped
from homenode.machine.snapshot.protocol import Snapshot
from homenode.measure import runner
from homenode.measure.access.machine import LocalMachine
from homenode.measure.model import PROBE, BenchOptions, SuiteDepth, SuiteGroup, SuiteOptions
from homenode.measure.results.vantage import Vantage
from homenode.process import ProgramResult
from tests.rendered.machine import render

GROUPS = (SuiteGroup.CPU_SINGLE, SuiteGroup.CPU_ALL, SuiteGroup.CORE_TO_CORE, SuiteGroup.PLACEMENT)


IDLE = "cpu0 0 0 0 100 0 0 0 0 0 0\n"


class SmallMachine(LocalMachine):
    """Programs start here for real; nothing is busy and nothing is asked of the true machine."""

    def run(self, argv: Sequence[str], *words: Any, **options: Any) -> ProgramResult:
        if argv[0] == "cat":
            return ProgramResult(tuple(argv), 0, IDLE, "")
        return super().run(argv, *words, **options)

    def find_installed(self, names: Collection[str]) -> frozenset[str]:
        return frozenset({PROBE})

    def snapshot(self) -> Snapshot:
        return render(load_shipped("x86-1p1n4c4t"))


def main(root: str, *words: str) -> None:
    runner.IDLE_S = 0.0
    orders = BenchOptions(
        "killed", SuiteOptions(GROUPS, SuiteDepth.QUICK), repeats=4, vantage=Vantage.HOST, boot="b"
    )
    runner.run_bench(
        SmallMachine(),
        orders,
        Path(root),
        lambda progress: print(progress.ended_count, flush=True),
        resume="--resume" in words,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
