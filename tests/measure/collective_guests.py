"""Guests with two GPUs whose all-reduces follow a mechanism, and NCCL logs that fit it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from homenode.machine.description.render import render
from homenode.machine.description.shipped import load_shipped
from homenode.process import Completed
from tests.bench_machines import FakeMachine
from tests.nccl.logs import log_of
from tests.tools import test_nccl_tests as nccl

GPUS = ("0000:11:00.0", "0000:81:00.0")
PEAK = 20e9


@dataclass(frozen=True)
class Settings:
    """What a command asked for, as its machine sees it."""

    layout: str
    file: bool
    bound: bool
    ring: bool
    peers: bool

    @property
    def knows_places(self) -> bool:
        return self.file or self.layout == "pin-numa-pci"

    @property
    def has_cells(self) -> bool:
        return self.layout in ("pin-numa", "pin-numa-pci")


def by_mechanism(one: Settings) -> float:
    """Threads and buffers in one cell cost half; NCCL needs to know the places, no more."""
    if one.bound:
        return 0.4
    return 0.45 if one.has_cells and not one.knows_places else 1.0


def by_cells(one: Settings) -> float:
    """Cells cost half, whatever NCCL knows."""
    return 0.45 if one.has_cells else 1.0


def by_binding(one: Settings) -> float:
    """Nothing but the script's binding costs."""
    return 0.4 if one.bound else 1.0


def by_channels(one: Settings) -> float:
    """Cells cost nothing; where NCCL knows the places it opens half the channels."""
    return 0.5 if one.knows_places else 1.0


def by_virtual_machine(one: Settings) -> float:
    """Guests are all alike, and half as fast as the machine itself."""
    return 1.0 if one.layout == "bare" else 0.5


@dataclass
class CollectiveGuest(FakeMachine):
    """A guest of a layout. effect: bandwidth of settings, as a share. lies: what its log says
    otherwise than it was asked ("file", "nodes", "peers", "graph", "bound"). odd_rounds: in which
    NCCL opens other channels with the file."""

    host: str = "small-2n8c-2gpu"
    programs: frozenset[str] = frozenset({"all_reduce_perf", "numactl", "taskset"})
    layout: str = "pin"
    effect: Callable[[Settings], float] = by_mechanism
    fewer_channels: bool = False
    lies: frozenset[str] = frozenset()
    odd_rounds: frozenset[int] = frozenset()
    shown: tuple[str, ...] = GPUS
    files: list[str] = field(default_factory=list)
    _rounds: int = 0

    def __post_init__(self) -> None:
        if self.layout in ("default", "pin", "pin-numa"):
            files = render(load_shipped(self.host)).files
            nowhere = {"numa_node": "-1\n", "local_cpulist": "0-7\n", "local_cpus": "ff\n"}
            for path in files:
                name = path.rpartition("/")[2]
                if path.startswith("/sys/devices/pci") and name in nowhere:
                    self.changed[path] = nowhere[name]

    def run(
        self,
        argv: Sequence[str],
        timeout_s: float,
        input: str | None = None,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> Completed:
        words = tuple(argv)
        if "find_spec" in " ".join(words):
            return Completed(words, 0, "False\n", "")
        if words[1:] == ("-", "cuda"):
            shown = {"format": "homenode.gpus/1", "addresses": self.shown, "reason": None}
            return Completed(words, 0, json.dumps(shown) + "\n", "")
        if "all_reduce_perf" not in words or "-" not in words:
            return super().run(argv, timeout_s, input, environment=environment)
        variables = dict(environment or {})
        one = Settings(
            self.layout,
            file="--topology" in words,
            bound="--bind" in words,
            ring=variables.get("NCCL_ALGO") == "Ring",
            peers="NCCL_P2P_DISABLE" not in variables,
        )
        if one.file:
            self.files.append(words[words.index("--topology") + 1])
        rate = PEAK * self.effect(one)
        return Completed(
            words, 0, f"{_sweep(rate)}\n# homenode collective: {self._said(one)}\n", ""
        )

    def _said(self, one: Settings) -> str:
        used_file = one.file and "file" not in self.lies
        shows_nodes = one.knows_places and not (one.file and "nodes" in self.lies)
        knows = one.knows_places or "bound" in self.lies
        log = log_of(
            "2.26.2",
            affinities=("0f", "f0") if knows else ("", ""),
            nodes=("0", "1") if shows_nodes else ("ffffffffffffff",) * 2,
            transport="P2P/CUMEM" if one.peers or "peers" in self.lies else "SHM/direct/direct",
        )
        just_file = one == replace(Settings(self.layout, *(False,) * 4), file=True)
        self._rounds += just_file
        is_odd = just_file and self._rounds - 1 in self.odd_rounds
        if is_odd or (self.fewer_channels and one.knows_places):
            log = log.replace("2 coll channels", "1 coll channels")
        if used_file:
            log += "h:1:1 [0] NCCL INFO Loading topology file /tmp/t.xml\n"
        if one.ring:
            log += "h:1:1 [0] NCCL INFO NCCL_ALGO set by environment to Ring\n"
        said: dict[str, Any] = {
            "log": "" if "graph" in self.lies else log,
            "before": {"0": 1 << 30, "1": 1 << 30},
            "during": {"0": 2 << 30, "1": (2 if knows else 1) << 30},
            "threads": {"0": 5, "4": 5},
            "host_numa_ids": [0, 1] if one.knows_places else [-1, -1],
            "interrupts": {"0": 500, "4" if self.shown == GPUS else "3": 500},
            "reclaimed": 0,
        }
        return json.dumps(said)


def _sweep(rate: float) -> str:
    rows = []
    for size in (8, 1024, 65536):
        bus = rate * min(1.0, size / 32768) / 1e9
        half = f"{size / max(bus, 1e-6) / 1e3:.2f} {bus:.2f} {bus:.2f} 0"
        rows.append(f" {size} {size // 4} float sum -1 {half} {half}\n")
    return nccl.HEAD + nccl.COLUMNS + "".join(rows) + nccl.FOOT
