"""Suite: which tests a machine gets, with the commands that run them.

The probe measures processors and memory everywhere. GPUs are measured with what is installed; each
host transfer once from every node and once as the tool itself binds: the matrix of nodes and GPUs
is the result, not its best cell.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum

from homenode.cpuset import CpuSet
from homenode.errors import UsageError
from homenode.gap import Gap
from homenode.pci import DeviceKind, PciDevice
from homenode.plan.published import Objective
from homenode.tools import nccl_tests, nvbandwidth
from homenode.topology import Host, NumaNode
from homenode.units import GIB

PROBE = "homenode-probe"

_NVIDIA, _AMD = 0x10DE, 0x1002
_HOST_COPIES = (
    "host_to_device_memcpy_ce", "device_to_host_memcpy_ce", "host_to_device_memcpy_sm",
    "device_to_host_memcpy_sm", "host_device_latency_sm",
)  # fmt: skip
_PEER_COPIES = ("device_to_device_memcpy_read_ce", "device_to_device_memcpy_write_ce")


class Depth(StrEnum):
    """How long is measured."""

    QUICK = "quick"
    NORMAL = "normal"
    FULL = "full"


_SECONDS = {Depth.QUICK: 0.5, Depth.NORMAL: 2.0, Depth.FULL: 8.0}


class Group(StrEnum):
    """What can be asked for by name; the study's names where it has the test."""

    CPU_SINGLE = "cpu-single"
    CPU_ALL = "cpu-all"
    MEMORY_BANDWIDTH = "stream"
    MEMORY_LATENCY = "mem-latency"
    CORE_TO_CORE = "core-to-core"
    SMT = "smt"
    PLACEMENT = "placement"
    GPU_COPY = "gpu-copy"
    GPU_BANDWIDTH = "gpu-bandwidth"
    GPU_PEER = "gpu-peer"
    NCCL = "nccl"


CONTROLS = frozenset({Group.CPU_SINGLE, Group.GPU_COPY})
"""What no layout should move; when it moves, something else did."""


@dataclass(frozen=True, slots=True)
class BenchTest:
    """One command. id: unique in the suite. seconds: about how long it takes.

    environment: variables beside the usual. timeout_s: then it is stopped, and that is its result:
    peer access of some virtual functions hangs.
    """

    id: str
    group: Group
    argv: tuple[str, ...]
    seconds: float
    timeout_s: float
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def is_control(self) -> bool:
        return self.group in CONTROLS


@dataclass(frozen=True, slots=True)
class Suite:
    """Tests in a fixed order (the schedule mixes them), and what this machine does not get."""

    tests: tuple[BenchTest, ...]
    left_out: tuple[Gap, ...]


@dataclass(frozen=True, slots=True)
class SuiteWishes:
    """groups: () = all that can be. largest_message_bytes: of collectives."""

    groups: tuple[Group, ...] = ()
    depth: Depth = Depth.NORMAL
    largest_message_bytes: int = GIB


def groups_for(objective: Objective) -> tuple[Group, ...]:
    """What decides for an objective, and the controls."""
    decides = {
        Objective.COLLECTIVE: (Group.NCCL, Group.GPU_PEER),
        Objective.HOST_BANDWIDTH: (Group.MEMORY_BANDWIDTH,),
        Objective.LATENCY: (Group.MEMORY_LATENCY, Group.CORE_TO_CORE),
        Objective.DEVICE_TRANSFER: (Group.GPU_BANDWIDTH,),
        Objective.THROUGHPUT: (Group.CPU_ALL, Group.SMT),
        Objective.DENSITY: (Group.CPU_ALL, Group.SMT),
    }[objective]
    return (*sorted(CONTROLS), *decides, Group.PLACEMENT)


def suite_for(host: Host, installed: Collection[str], wishes: SuiteWishes) -> Suite:
    """The tests of a machine. installed: names of programs that can be run.

    host: the machine that runs them, a guest for one. Raises UsageError where nothing is left of
    what was asked for.
    """
    left_out: list[Gap] = []
    found = [
        *_of_probe(host, installed, wishes, left_out),
        *_of_gpus(host, installed, wishes, left_out),
    ]
    wanted = set(wishes.groups) or set(Group)
    tests = tuple(test for test in found if test.group in wanted)
    left = tuple(gap for gap in left_out if gap.subject in wanted)
    if not any(not test.is_control for test in tests) and not (tests and wishes.groups):
        raise UsageError(
            f"--tests: expected one that this machine can run, found none of "
            f"{', '.join(sorted(wanted))}",
            hint="; ".join(map(str, left)) or None,
        )
    return Suite(tests, left)


def _of_probe(
    host: Host, installed: Collection[str], wishes: SuiteWishes, left_out: list[Gap]
) -> Iterator[BenchTest]:
    pus = CpuSet(pu.index for pu in host.pus if pu.online and pu.allowed)
    groups = [Group.CPU_SINGLE, Group.CPU_ALL, Group.MEMORY_BANDWIDTH, Group.MEMORY_LATENCY]
    groups += [Group.CORE_TO_CORE, Group.SMT, Group.PLACEMENT]
    if PROBE not in installed or not pus:
        reason = f"{PROBE} is not installed" if pus else "no PU may be used"
        left_out += [Gap(group, reason) for group in groups]
        return
    first = str(pus.first())
    seconds = _SECONDS[wishes.depth]
    yield _probe(Group.CPU_SINGLE, "throughput", seconds, "--pus", first)
    yield _probe(Group.CPU_ALL, "throughput", seconds, "--pus", str(pus))
    yield _probe(Group.MEMORY_BANDWIDTH, "bandwidth", seconds, "--pus", str(pus))
    quick = ("--quick",) if wishes.depth is Depth.QUICK else ()
    yield _probe(Group.MEMORY_LATENCY, "latency", 4 * seconds, "--pus", first, *quick)
    if len(_with_pus_and_memory(host)) > 1:
        cells = len(_with_pus_and_memory(host)) ** 2
        matrix = _probe(Group.MEMORY_BANDWIDTH, "bandwidth", seconds, "--matrix")
        yield BenchTest("stream by node", matrix.group, matrix.argv, seconds * cells,
                        60 + 20 * seconds * cells)  # fmt: skip
        latency = _probe(Group.MEMORY_LATENCY, "latency", seconds, "--matrix")
        yield BenchTest("mem-latency by node", latency.group, latency.argv, seconds * cells,
                        60 + 20 * seconds * cells)  # fmt: skip
    if len(pus) > 1:
        yield _probe(Group.CORE_TO_CORE, "core-to-core", 2 * seconds, "--pus", str(pus))
        yield _probe(Group.PLACEMENT, "placement", seconds, "--pus", str(pus))
    else:
        left_out += [Gap(g, "one PU alone") for g in (Group.CORE_TO_CORE, Group.PLACEMENT)]
    if any(len(core.pus & pus) > 1 for core in host.cores):
        yield _probe(Group.SMT, "smt", seconds, "--pus", str(pus))
    else:
        left_out.append(Gap(Group.SMT, "no core shows siblings"))


def _probe(group: Group, command: str, seconds: float, *options: str) -> BenchTest:
    argv = (PROBE, command, "--seconds", f"{seconds:g}", *options)
    return BenchTest(str(group), group, argv, seconds, 60 + 20 * seconds)


def _of_gpus(
    host: Host, installed: Collection[str], wishes: SuiteWishes, left_out: list[Gap]
) -> Iterator[BenchTest]:
    gpus = host.devices_of_kind(DeviceKind.GPU)
    groups = (Group.GPU_COPY, Group.GPU_BANDWIDTH, Group.GPU_PEER, Group.NCCL)
    if not gpus:
        left_out += [Gap(group, "no GPU") for group in groups]
        return
    yield from _copies(host, gpus, installed, wishes, left_out)
    if len(gpus) < 2:
        left_out += [Gap(group, "one GPU alone") for group in (Group.GPU_PEER, Group.NCCL)]
        return
    yield from _collectives(host, gpus, installed, wishes, left_out)


def _copies(
    host: Host,
    gpus: tuple[PciDevice, ...],
    installed: Collection[str],
    wishes: SuiteWishes,
    left_out: list[Gap],
) -> Iterator[BenchTest]:
    groups = (Group.GPU_COPY, Group.GPU_BANDWIDTH, Group.GPU_PEER)
    if not all(gpu.vendor_id == _NVIDIA for gpu in gpus) or "nvbandwidth" not in installed:
        reason = "nvbandwidth is not installed, or not all GPUs are NVIDIA's"
        left_out += [Gap(group, reason) for group in groups]
        return
    samples = {Depth.QUICK: 1, Depth.NORMAL: 3, Depth.FULL: 9}[wishes.depth]
    seconds = 3.0 * samples * len(gpus)
    local = nvbandwidth.argv(["device_local_copy"], samples=samples)
    yield _gpu_test("gpu-copy", Group.GPU_COPY, local, seconds)
    own = nvbandwidth.argv(_HOST_COPIES, samples=samples)
    yield _gpu_test("gpu-bandwidth", Group.GPU_BANDWIDTH, own, seconds)
    if "numactl" in installed:
        for node in _with_pus_and_memory(host):
            # -d: else the tool moves itself to the GPU's node, and every row would be the same.
            argv = (*_on_node(node), own[0], "-d", *own[1:])
            name = f"gpu-bandwidth from node {node.index}"
            yield _gpu_test(name, Group.GPU_BANDWIDTH, argv, seconds)
    else:
        left_out.append(Gap(Group.GPU_BANDWIDTH, "by node: numactl is not installed"))
    if len(gpus) > 1:
        peer = nvbandwidth.argv(_PEER_COPIES, samples=samples)
        yield _gpu_test("gpu-peer", Group.GPU_PEER, peer, seconds * len(gpus))


def _collectives(
    host: Host,
    gpus: tuple[PciDevice, ...],
    installed: Collection[str],
    wishes: SuiteWishes,
    left_out: list[Gap],
) -> Iterator[BenchTest]:
    if "all_reduce_perf" not in installed:
        left_out.append(Gap(Group.NCCL, "all_reduce_perf is not installed"))
        return
    repeats = {Depth.QUICK: 20, Depth.NORMAL: 100, Depth.FULL: 300}[wishes.depth]
    argv = nccl_tests.argv(
        len(gpus), largest_bytes=wishes.largest_message_bytes, iterations=repeats
    )
    # ROCm's collectives fail on some GPUs when memory is reclaimed; harmless elsewhere.
    is_amd = any(gpu.vendor_id == _AMD for gpu in gpus)
    environment = (("HSA_NO_SCRATCH_RECLAIM", "1"),) if is_amd else ()
    seconds = 60.0 * repeats / 100
    without_peers = (*environment, ("NCCL_P2P_DISABLE", "1"))
    yield _gpu_test("nccl", Group.NCCL, argv, seconds, environment)
    yield _gpu_test("nccl without peer access", Group.NCCL, argv, seconds, without_peers)
    nodes = _with_pus_and_memory(host)
    if len(nodes) > 1 and "numactl" in installed:
        # What the study's script does when no GPU has a node; shows what that alone costs.
        bound = (*_on_node(nodes[0]), *argv)
        name = f"nccl on node {nodes[0].index}"
        yield _gpu_test(name, Group.NCCL, bound, seconds, environment)


def _gpu_test(
    id: str,
    group: Group,
    argv: tuple[str, ...],
    seconds: float,
    environment: tuple[tuple[str, str], ...] = (),
) -> BenchTest:
    return BenchTest(id, group, argv, seconds, 120 + 10 * seconds, environment)


def _on_node(node: NumaNode) -> tuple[str, ...]:
    return ("numactl", f"--cpunodebind={node.index}", f"--membind={node.index}")


def _with_pus_and_memory(host: Host) -> tuple[NumaNode, ...]:
    """Nodes that a process can be bound to; GPU memory and CXL have no PUs."""
    return tuple(node for node in host.nodes if node.pus and node.memory_bytes != 0)
