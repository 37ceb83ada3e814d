"""GpuMachine: the measured GPUs, and the commands of our PyTorch programs.

These get their own text on standard input.

    python3 - host-copies --seconds 2 --node 0     program torch_copies
    python3 - --gpus 8 --largest 1073741824        program torch_collectives

They need no copied files in a guest, a job or a container.
"""

from msgspec import Struct

from homenode.machine.pci import NVIDIA, PciDevice
from homenode.machine.tools import nccl_tests
from homenode.machine.topology import NumaNode
from homenode.measure.model import SECONDS, TORCH, BenchTest, Group, Reader, SuiteOptions

COPIES = "torch_copies"
COLLECTIVES = "torch_collectives"

_START_S = 30.0
"""Importing PyTorch from a cold file system, and making contexts on all GPUs."""


_FIGURES = {"host-copies": 8, "small-copies": 6, "local-copy": 1, "matmul": 4, "peer-copies": 1}
"""Figures of one GPU (of a pair, of peer-copies), about."""


PEERS_HANG = (
    "direct access between these GPUs hangs, as on some virtual functions; collectives need "
    "NCCL_P2P_DISABLE=1"
)
_NO_TORCH = "requires {python} to be Python 3.8 or later with PyTorch (package torch)"


def is_nvidia(gpus: tuple[PciDevice, ...]) -> bool:
    """Return whether the GPUs are NVIDIA's; all have one vendor."""
    return gpus[0].vendor_id == NVIDIA


class GpuMachine(Struct, frozen=True):
    """The measured GPUs, all of one vendor, and the installed tools."""

    gpus: tuple[PciDevice, ...]
    nodes: tuple[NumaNode, ...]
    installed: frozenset[str]
    suite: SuiteOptions
    hidden: int = 0  # GPUs of this vendor that the driver does not give to us

    @property
    def is_nvidia(self) -> bool:
        return is_nvidia(self.gpus)

    @property
    def has_torch(self) -> bool:
        return TORCH in self.installed

    def without_torch(self) -> str:
        return _NO_TORCH.format(python=self.suite.python)

    def copies(
        self, id: str, group: Group, command: str, node: NumaNode | None = None, each_node: int = 0
    ) -> BenchTest | None:
        """A test of torch_copies, None without PyTorch. each_node: of so many nodes in turn."""
        if not self.has_torch:
            return None
        seconds = SECONDS[self.suite.depth] / (8 if command == "small-copies" else 4)
        index = None if node is None else node.index
        options: tuple[str, ...] = () if index is None else ("--node", str(index))
        options += ("--each-node",) if each_node else ()
        count = len(self.gpus)
        cells = _FIGURES[command] * count * max(each_node, 1)
        cells *= max(count - 1, 1) if command == "peer-copies" else 1
        total_s = _START_S / 3 + 1.5 * seconds * cells
        return BenchTest(
            id if index is None else f"{id} from node {index}",
            group,
            (self.suite.python, "-", command, "--seconds", f"{seconds:g}", *options),
            total_s,
            2 * _START_S + 6 * total_s,
            reads=Reader.TORCH,
            program=COPIES,
            node=index,
        )

    def nccl_tests(self, warmups: int, iterations: int) -> tuple[str, ...]:
        """The command of an all-reduce on all GPUs, by one process."""
        largest = self.suite.largest_message_bytes
        return nccl_tests.argv(
            len(self.gpus), largest_bytes=largest, warmups=warmups, iterations=iterations
        )

    def all_reduce(self, id: str, iterations: int, bind: str, *, peers: bool) -> BenchTest:
        """A test of torch_collectives on all GPUs. bind: "none", "gpu" (each rank on its GPU's
        node), a node's number. peers: whether GPUs may reach each other's memory."""
        options = f"--gpus {len(self.gpus)} --largest {self.suite.largest_message_bytes}"
        options += f" --iterations {iterations} --bind {bind}" + ("" if peers else " --no-peers")
        seconds = _START_S / 2 + 40.0 * iterations / 100
        return BenchTest(
            id,
            Group.NCCL,
            (self.suite.python, "-", *options.split()),
            seconds,
            2 * _START_S + 6 * seconds,
            reads=Reader.TORCH,
            program=COLLECTIVES,
        )

    def environment(self, *, peers: bool) -> tuple[tuple[str, str], ...]:
        """Variables for collectives. ROCm's fail on some GPUs when scratch memory is reclaimed:
        MI350X, MI300X."""
        variables = () if self.is_nvidia else (("HSA_NO_SCRATCH_RECLAIM", "1"),)
        return variables if peers else (*variables, ("NCCL_P2P_DISABLE", "1"))
