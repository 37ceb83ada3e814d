"""GPU suite: the tests of the GPUs of a machine, with what is installed.

Each host transfer runs once from every node and once as the tool itself binds: the matrix of nodes
and GPUs is the result, not its best cell.
"""

from collections.abc import Collection, Iterator

from homenode.bench.model import BenchTest, Depth, Group, SuiteWishes
from homenode.gap import Gap
from homenode.pci import DeviceKind, PciDevice
from homenode.tools import nccl_tests, nvbandwidth
from homenode.topology import Host, NumaNode

_NVIDIA, _AMD = 0x10DE, 0x1002
_HOST_COPIES = (
    "host_to_device_memcpy_ce", "device_to_host_memcpy_ce", "host_to_device_memcpy_sm",
    "device_to_host_memcpy_sm", "host_device_latency_sm",
)  # fmt: skip
_PEER_COPIES = ("device_to_device_memcpy_read_ce", "device_to_device_memcpy_write_ce")


def gpu_tests(
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
