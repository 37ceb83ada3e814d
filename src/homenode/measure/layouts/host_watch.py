"""HostWatch: a guest, and what its host shows while the guest runs an all-reduce. [I/O]

Behind what collective_watch says of the guest comes one line of the host,

    # homenode host: {"before": {"0": bytes}, "during": {...}, "guest": {...}, "threads": {...}}

before, during: used bytes of each node of the host, and the most that were used; threads: PUs with
the number of looks at which a thread of QEMU ran there. reclaimed, numa_balancing: as
collective_watch and the kernel have them, of the host. guest: bytes of the guest's memory on each
node, by numa_maps of its QEMU; looked at behind the run, because a kernel that goes through page
tables disturbs what it looks at, and what a guest has touched stays where it is.
"""

import json
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from homenode.check.verify.live.capture import ProcFiles, Watch, capture_running_vm
from homenode.check.verify.live.procfs import RunningVm
from homenode.cpuset import CpuSet
from homenode.errors import HomenodeError
from homenode.machine.snapshot.protocol import Snapshot
from homenode.measure.access.machine import Machine
from homenode.measure.programs.collective_watch import (
    SAID,
    more_reclaimed,
    numa_balancing,
    reclaimed_pages,
    used_bytes,
)
from homenode.measure.programs.watched import busy_pus
from homenode.measure.results.model import Condition
from homenode.process import Completed

LOOK_S = 0.5


class HostWatch:
    """See Machine. uuid: of the domain that the machine is. root: where the host's /proc and /sys
    are."""

    def __init__(self, machine: Machine, uuid: str, memory_bytes: Sequence[int], root: str = "/"):
        self._machine = machine
        self._uuid = uuid
        self._watch = Watch(CpuSet(), (), tuple(memory_bytes), seconds=0.0)
        self._root = root

    @property
    def name(self) -> str:
        return self._machine.name

    def run(
        self,
        argv: Sequence[str],
        timeout_s: float,
        input: str | None = None,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> Completed:
        if "--gpus" not in argv:
            return self._machine.run(argv, timeout_s, input, environment=environment)
        before, reclaimed = used_bytes(self._root), reclaimed_pages(self._root)
        during = dict(before)
        looks: Counter[int] = Counter()
        first, ended = self._vm(), threading.Event()

        def look() -> None:
            while not ended.wait(LOOK_S):
                looks.update(busy_pus(first.process, self._root) if first is not None else ())
                for node, used in used_bytes(self._root).items():
                    during[node] = max(used, during.get(node, 0))

        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        try:
            made = self._machine.run(argv, timeout_s, input, environment=environment)
        finally:
            ended.set()
            looking.join()
        if SAID not in made.stdout:
            return made
        said: dict[str, Any] = {
            "before": before,
            "during": during,
            "guest": _by_node(self._vm()),
            "threads": {str(pu): count for pu, count in sorted(looks.items())},
            "reclaimed": more_reclaimed(reclaimed, self._root),
            "numa_balancing": numa_balancing(self._root),
        }
        return replace(made, stdout=f"{made.stdout}\n# homenode host: {json.dumps(said)}\n")

    def installed(self, names: Collection[str]) -> frozenset[str]:
        return self._machine.installed(names)

    def snapshot(self) -> Snapshot:
        return self._machine.snapshot()

    def _vm(self) -> RunningVm | None:
        """None where its QEMU cannot be read: it costs these figures, never the measurement."""
        try:
            return capture_running_vm(self._uuid, self._watch, ProcFiles(self._root))
        except HomenodeError:
            return None


def _by_node(vm: RunningVm | None) -> dict[str, int]:
    found: Counter[str] = Counter()
    for area in () if vm is None else vm.areas:
        for node, pages in area.policy.pages_by_node:
            found[str(node)] += pages * area.policy.page_bytes
    return dict(sorted(found.items()))


def allocated_between(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[Condition, ...]:
    """What a guest allocated on each node of its host by its start, in words, as a condition of a
    run; () where nothing is known."""
    grown = {node: after[node] - before[node] for node in sorted(after, key=int) if node in before}
    if not grown:
        return ()
    words = ", ".join(f"node {node} {size / 2**30:+.1f} GiB" for node, size in grown.items())
    return (Condition("memory on the host", words),)
