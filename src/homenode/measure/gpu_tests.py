"""GPU tests: all-reduces under host bindings, with and without a topology file, and copies.

Bindings, with and without peer access: unbound; each rank on its GPU's node; everything on one
node, as in the study's script if a GPU has no node. One process of nccl-tests drives all GPUs, so
only where all GPUs share a node can it be bound to "its GPU's node"; elsewhere PyTorch, with a
process for each GPU, runs all three. If a topology file exists, unbound tests also run with it: a
trial has a file for each guest.
"""

from collections.abc import Iterator
from itertools import product

from msgspec import Struct
from msgspec.structs import replace

from homenode.cpuset import NodeIndex
from homenode.findings import Gap
from homenode.machine.pci import NVIDIA, PciDevice
from homenode.machine.tools import nccl_tests
from homenode.machine.topology import NumaNode
from homenode.measure.model import (
    SECONDS,
    TORCH,
    BenchTest,
    Reader,
    SuiteDepth,
    SuiteGroup,
    SuiteOptions,
)

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
    """The measured GPUs, all of one vendor, and the installed tools. Our PyTorch programs get their
    own text on standard input, so they need no copied files in a guest, a job or a container."""

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

    def missing_torch_reason(self) -> str:
        return _NO_TORCH.format(python=self.suite.python)

    def build_copy_test(
        self,
        id: str,
        group: SuiteGroup,
        command: str,
        node: NumaNode | None = None,
        each_node: int = 0,
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
        """Return the command of an all-reduce on all GPUs, by one process."""
        largest = self.suite.largest_message_bytes
        return nccl_tests.build_argv(
            len(self.gpus), largest_bytes=largest, warmups=warmups, iterations=iterations
        )

    def all_reduce(self, id: str, iterations: int, bind: str, *, peers: bool) -> BenchTest:
        """Return a test of torch_collectives on all GPUs. bind: "none", "gpu" (each rank on its
        GPU's node), a node's number. peers: whether GPUs may reach each other's memory."""
        options = f"--gpus {len(self.gpus)} --largest {self.suite.largest_message_bytes}"
        options += f" --iterations {iterations} --bind {bind}" + ("" if peers else " --no-peers")
        seconds = _START_S / 2 + 40.0 * iterations / 100
        return BenchTest(
            id,
            SuiteGroup.NCCL,
            (self.suite.python, "-", *options.split()),
            seconds,
            2 * _START_S + 6 * seconds,
            reads=Reader.TORCH,
            program=COLLECTIVES,
        )

    def list_variables(self, *, peers: bool) -> tuple[tuple[str, str], ...]:
        """Variables for collectives: some fail on MI300X, MI350X if ROCm reclaims scratch."""
        variables = () if self.is_nvidia else (("HSA_NO_SCRATCH_RECLAIM", "1"),)
        return variables if peers else (*variables, ("NCCL_P2P_DISABLE", "1"))


UNBOUND = "nothing bound"
ON_GPU_NODES = "each rank on its GPU's node"
TOPOLOGY_FILE = "topology file"

_WARMUPS = 10
_REPEATS = {SuiteDepth.QUICK: 20, SuiteDepth.NORMAL: 100, SuiteDepth.FULL: 300}
_PER_GPU = "a process for each GPU"
_WITH_FILE = (
    'f=$(mktemp) && trap \'rm -f "$f"\' EXIT && printf %s "$1" >"$f" && shift && '
    'NCCL_TOPO_FILE=$f "$@"'
)


class HostBinding(Struct, frozen=True):
    """Host memory and CPUs that a test is bound to."""

    words: str  # for people
    node: NodeIndex | None  # the node of a whole process, None if not bound
    of_each_gpu: bool = False


def list_collective_tests(machine: GpuMachine, omissions: list[Gap]) -> Iterator[BenchTest]:
    """Yield the all-reduces of its GPUs (two or more). The first test speaks for its metrics."""
    topology, reason = machine.suite.topology, machine.suite.why_no_topology
    for test in _list_all_reduces(machine, omissions):
        yield test
        if topology is not None and test.binding == UNBOUND:
            yield _set_topology_file(test, topology)
    if reason is not None:
        omissions.append(Gap(SuiteGroup.NCCL, f"{TOPOLOGY_FILE}: {reason}"))


def _set_topology_file(test: BenchTest, topology: str) -> BenchTest:
    """Return the test with this text as NCCL's topology file."""
    return replace(
        test,
        id=f"{test.id}, {TOPOLOGY_FILE}",
        argv=("sh", "-c", _WITH_FILE, "sh", topology, *test.argv),
        variant=", ".join(filter(None, (test.variant, TOPOLOGY_FILE))),
        alternatives=tuple(_set_topology_file(attempt, topology) for attempt in test.alternatives),
    )


def _list_all_reduces(machine: GpuMachine, omissions: list[Gap]) -> Iterator[BenchTest]:
    has_tool = "all_reduce_perf" in machine.installed
    if not has_tool and not machine.has_torch:
        omissions.append(Gap(SuiteGroup.NCCL, "neither all_reduce_perf nor PyTorch is installed"))
        return
    bindings = _choose_bindings(machine, omissions)
    if has_tool:
        for binding in bindings:
            yield from _list_tool_tests(machine, binding, omissions)
    spread = any(binding.of_each_gpu for binding in bindings)
    if machine.has_torch and (not has_tool or spread):
        for binding, peers in product(bindings, (True, False)):
            name = _format_variant(binding, peers=peers)
            words = ", ".join(filter(None, (_PER_GPU, name))) if has_tool else name
            test = _make_torch_test(machine, binding, peers=peers, variant=words)
            yield replace(test, if_stopped=_format_stop_hint(machine, peers=peers))
    elif spread:
        reason = f"{ON_GPU_NODES}: needs PyTorch, nccl-tests drives all GPUs from one process"
        omissions.append(Gap(SuiteGroup.NCCL, reason))


def _choose_bindings(machine: GpuMachine, omissions: list[Gap]) -> tuple[HostBinding, ...]:
    """Return the bindings to measure: one on a machine with one node, else three."""
    gpus, nodes = machine.gpus, machine.nodes
    unbound = HostBinding(UNBOUND, None)
    if len(nodes) < 2:
        return (unbound,)
    first = nodes[0].index
    on_first = HostBinding(f"everything on node {first}", first)
    lost_gpus = [gpu for gpu in gpus if gpu.node not in {node.index for node in nodes}]
    if lost_gpus:
        reason = f"{ON_GPU_NODES}: {lost_gpus[0].bdf} has no node that a process can be bound to"
        omissions.append(Gap(SuiteGroup.NCCL, reason))
        return (unbound, on_first)
    homes = {gpu.node for gpu in gpus}
    if len(homes) > 1:
        return (unbound, HostBinding(ON_GPU_NODES, None, of_each_gpu=True), on_first)
    if homes == {first}:
        return (unbound, replace(on_first, words=f"{on_first.words}, the GPUs' own"))
    return (unbound, HostBinding(ON_GPU_NODES, gpus[0].node), on_first)


def _list_tool_tests(
    machine: GpuMachine, binding: HostBinding, omissions: list[Gap]
) -> Iterator[BenchTest]:
    node = binding.node
    if binding.of_each_gpu:
        return
    if node is not None and "numactl" not in machine.installed:
        omissions.append(Gap(SuiteGroup.NCCL, f"{binding.words}: numactl: command not found"))
        return
    repeats = _REPEATS[machine.suite.depth]
    argv = machine.nccl_tests(_WARMUPS, repeats)
    if node is not None:
        argv = ("numactl", f"--cpunodebind={node}", f"--membind={node}", *argv)
    seconds = 10.0 + 50.0 * repeats / 100
    for peers in (True, False):
        variant, if_stopped = (
            _format_variant(binding, peers=peers),
            _format_stop_hint(machine, peers=peers),
        )
        # Less if access is known to hang, because every round waits. Else enough for the slowest
        # machine known: nccl-tests makes all its calls, however long one takes.
        patience = 120 + 30 * seconds if if_stopped is None else 90 + 3 * seconds
        test = BenchTest(
            id=_format_id(variant),
            group=SuiteGroup.NCCL,
            argv=argv,
            seconds=seconds,
            timeout_s=patience,
            environment=machine.list_variables(peers=peers),
            reads=Reader.NCCL_TESTS,
            node=node,
            binding=binding.words,
            variant=variant,
            if_stopped=if_stopped,
        )
        if machine.has_torch:
            test = test.or_else(_make_torch_test(machine, binding, peers=peers, variant=variant))
        yield test


def _make_torch_test(
    machine: GpuMachine, binding: HostBinding, *, peers: bool, variant: str | None
) -> BenchTest:
    home = "none" if binding.node is None else str(binding.node)
    bind = "gpu" if binding.of_each_gpu else home
    repeats = _REPEATS[machine.suite.depth]
    return replace(
        machine.all_reduce(_format_id(variant), repeats, bind, peers=peers),
        binding=binding.words,
        variant=variant,
        node=binding.node,
        environment=machine.list_variables(peers=peers),
    )


def _format_stop_hint(machine: GpuMachine, *, peers: bool) -> str | None:
    return PEERS_HANG if peers and not machine.is_nvidia else None


def _format_variant(binding: HostBinding, *, peers: bool) -> str | None:
    parts = [] if peers else ["P2P off"]
    parts += [] if binding.words == UNBOUND else [binding.words]
    return ", ".join(parts) or None


def _format_id(variant: str | None) -> str:
    return "nccl" if variant is None else f"nccl: {variant}"
