"""A run of the suite in a process of its own, to be killed: python -m tests.bench_child ROOT [...].

    --resume  --on ssh://...  --probe FILE

The machine is this one, but small: its snapshot is a described host's, its probe a shell script.
"""

import sys
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from homenode.machine.description.parse import load_shipped
from homenode.machine.snapshot.protocol import Snapshot
from homenode.measure import runner
from homenode.measure.access.machine import LocalMachine
from homenode.measure.access.remote_host import RemoteHost, SshHost
from homenode.measure.model import PROBE, Depth, Group, SuiteOptions
from homenode.measure.options import BenchOptions
from homenode.measure.results.vantage import Vantage
from homenode.process import ProgramResult
from tests.rendered.machine import render

GROUPS = (Group.CPU_SINGLE, Group.CPU_ALL, Group.CORE_TO_CORE, Group.PLACEMENT)


IDLE = "cpu0 0 0 0 100 0 0 0 0 0 0\n"


class _Small:
    """Programs start here for real; nothing is busy and nothing is asked of the true machine."""

    def run(self, argv: Sequence[str], *words: Any, **options: Any) -> ProgramResult:
        if argv[0] == "cat":
            return ProgramResult(tuple(argv), 0, IDLE, "")
        done: ProgramResult = super().run(argv, *words, **options)  # type: ignore[misc]
        return done

    def find_installed(self, names: Collection[str]) -> frozenset[str]:
        return frozenset({PROBE})

    def snapshot(self) -> Snapshot:
        return render(load_shipped("x86-1p1n4c4t"))


class SmallMachine(_Small, LocalMachine):
    """This machine."""


class SmallHost(_Small, RemoteHost):
    """Another host."""


def _machine(root: str, words: Sequence[str]) -> SmallMachine | SmallHost:
    given = dict(pairwise(words))
    on = given.get("--on")
    if on is None:
        return SmallMachine()
    return SmallHost(SshHost(on), root, Path(given["--probe"]).read_bytes())


def main(root: str, *words: str) -> None:
    runner.IDLE_S = 0.0
    orders = BenchOptions(
        "killed", SuiteOptions(GROUPS, Depth.QUICK), repeats=4, vantage=Vantage.HOST, boot="b"
    )
    machine = _machine(root, words)
    runner.run_bench(
        machine,
        orders,
        Path(root),
        lambda progress: print(progress.ended_count, flush=True),
        resume="--resume" in words,
    )
    if isinstance(machine, SmallHost):
        machine.clean_up()


if __name__ == "__main__":
    main(*sys.argv[1:])
