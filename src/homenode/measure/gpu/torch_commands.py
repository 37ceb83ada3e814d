"""Torch commands: how our PyTorch programs are called. They get their own text on standard input.

    python3 - host-copies --seconds 2 --node 0     program torch_copies
    python3 - --gpus 8 --largest 1073741824        program torch_collectives

No file of ours need be where they run: a guest, a job, a container.
"""

from dataclasses import dataclass

from homenode.indices import NodeIndex
from homenode.measure.model import BenchTest, Group, Reader

COPIES = "torch_copies"
COLLECTIVES = "torch_collectives"

_START_S = 30.0
"""Importing PyTorch from a cold file system, and making contexts on all GPUs."""


@dataclass(frozen=True, slots=True)
class TorchPython:
    """The Python that has PyTorch."""

    program: str

    def copies(
        self,
        id: str,
        group: Group,
        command: str,
        seconds: float,
        gpus: int,
        *,
        node: NodeIndex | None = None,
        each_node: int = 0,
    ) -> BenchTest:
        """A test of torch_copies. seconds: of one figure. each_node: of so many nodes in turn."""
        where: tuple[str, ...] = () if node is None else ("--node", str(node))
        where += ("--each-node",) if each_node else ()
        argv = (self.program, "-", command, "--seconds", f"{seconds:g}", *where)
        cells = _FIGURES[command] * gpus * max(each_node, 1)
        cells *= max(gpus - 1, 1) if command == "peer-copies" else 1
        whole = _START_S / 3 + 1.5 * seconds * cells
        return BenchTest(
            id,
            group,
            argv,
            whole,
            2 * _START_S + 6 * whole,
            reads=Reader.TORCH,
            program=COPIES,
            node=node,
        )

    def all_reduce(
        self, id: str, gpus: int, largest_bytes: int, iterations: int, *, bind: str, peers: bool
    ) -> BenchTest:
        """A test of torch_collectives. bind: "none", "gpu" (each rank on its GPU's node), a node's
        number. peers: whether GPUs may reach each other's memory."""
        argv: tuple[str, ...] = (
            self.program,
            "-",
            "--gpus",
            str(gpus),
            "--largest",
            str(largest_bytes),
            "--iterations",
            str(iterations),
            "--bind",
            bind,
        )
        argv += () if peers else ("--no-peers",)
        seconds = _START_S / 2 + 40.0 * iterations / 100
        return BenchTest(
            id,
            Group.NCCL,
            argv,
            seconds,
            2 * _START_S + 6 * seconds,
            reads=Reader.TORCH,
            program=COLLECTIVES,
        )


_FIGURES = {
    "host-copies": 8,
    "small-copies": 6,
    "local-copy": 1,
    "matmul": 4,
    "peer-copies": 1,
}
"""Figures of one GPU (of a pair, of peer-copies), about."""
