"""Machines to measure that are none: programs that answer what a test wants them to."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from homenode.machine.description.parse import load_shipped
from homenode.machine.snapshot.protocol import MemorySnapshot, Snapshot
from homenode.measure.model import PROBE
from homenode.process import ProgramResult, ToolMissingError
from tests.probe_documents import answer
from tests.rendered.machine import render

Answer = Callable[[Sequence[str]], str]


@dataclass
class FakeMachine:
    """A described machine."""

    host: str = "x86-1p1n4c4t"
    answer: Answer = answer  # standard output of a program, or raises
    programs: frozenset[str] = frozenset({PROBE, "taskset", "numactl"})
    boot: str = "first boot"
    busy_ticks: int = 0  # of each CPU between two looks at it, of 100
    code: int = 0
    calls: list[tuple[str, ...]] = field(default_factory=list)  # what was run
    inputs: list[str | None] = field(default_factory=list)
    changed: dict[str, str] = field(default_factory=dict)
    _looks: int = 0

    @property
    def name(self) -> str:
        return "the fake machine"

    def run(
        self,
        argv: Sequence[str],
        timeout_s: float,
        input: str | None = None,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> ProgramResult:
        words = tuple(argv)
        if words[0] == "cat":
            return ProgramResult(words, 0, self._file(words[1]), "")
        if words == ("true",):
            return ProgramResult(words, 0, "", "")
        self.calls.append(words)
        self.inputs.append(input)
        if words[0] == PROBE and PROBE not in self.programs:
            raise ToolMissingError(PROBE)
        output = self.answer(words)
        return ProgramResult(words, self.code, output, "it went wrong" if self.code else "")

    def find_installed(self, names: Collection[str]) -> frozenset[str]:
        return frozenset(names) & self.programs

    def snapshot(self) -> Snapshot:
        made = render(load_shipped(self.host))
        files = {**made.files, **self.changed}
        return MemorySnapshot(made.name, files, made.links, made.commands, made.directories)

    def _file(self, path: str) -> str:
        if path.endswith("boot_id"):
            return f"{self.boot}\n"
        self._looks += 1
        busy, idle = self._looks * self.busy_ticks, self._looks * (100 - self.busy_ticks)
        return "".join(f"cpu{pu} {busy} 0 0 {idle} 0 0 0 0 0 0\n" for pu in range(64))
