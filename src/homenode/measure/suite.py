"""Suite: the tests of a machine, with their commands.

The probe measures processors and memory everywhere. Each host transfer of a GPU runs once from
every node and once as the tool itself binds: the matrix of nodes and GPUs is the result, not its
best cell. Installed tools come first, with PyTorch as the fallback. /sys shows all GPUs; a job, a
container or CUDA_VISIBLE_DEVICES may show fewer, in another order: the GPUs that the driver shows
are measured.
"""

from collections.abc import Collection, Iterator

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.errors import ParseError, UsageError
from homenode.findings import Gap
from homenode.machine.pci import AMD, NVIDIA, DeviceKind, PciDevice
from homenode.machine.tools import lines, nvbandwidth
from homenode.machine.topology import Host, NumaNode
from homenode.measure.gpu_tests import PEERS_HANG, GpuMachine, list_collective_tests
from homenode.measure.model import (
    PROBE,
    PYTHON,
    SECONDS,
    BenchTest,
    Reader,
    Suite,
    SuiteDepth,
    SuiteGroup,
    SuiteOptions,
)

FORMAT = "homenode.gpus/1"
MAX_GPUS = 1024

_SOURCE = "GPUs shown"
_GROUPS = (
    SuiteGroup.GPU_COPY,
    SuiteGroup.MATMUL,
    SuiteGroup.GPU_BANDWIDTH,
    SuiteGroup.GPU_SMALL,
    SuiteGroup.GPU_PEER,
    SuiteGroup.NCCL,
)


class ShownGpus(Struct, frozen=True):
    """The GPUs that the driver shows to a program."""

    addresses: tuple[Bdf, ...]  # by the driver's number
    reason: str | None = None  # why GPUs are missing, as the driver reports


def parse_shown(text: str) -> ShownGpus | None:
    """Parse the output of measure/programs/gpus_shown; None if no driver could be queried. Slices
    of one GPU (MIG) have one address, and it counts once. Raises ParseError."""
    line = next((row for row in text.split("\n") if row.startswith('{"format"')), None)
    if line is None:
        raise ParseError(_SOURCE, f'a line with "format": "{FORMAT}"', text.strip()[:60] or None)
    document = lines.json_object(line, _SOURCE)
    addresses, reason = document.get("addresses"), document.get("reason")
    if document.get("format") != FORMAT or not isinstance(reason, str | None):
        raise ParseError(_SOURCE, FORMAT, line[:60])
    if addresses is None:
        return None
    if not isinstance(addresses, list) or len(addresses) > MAX_GPUS:
        raise ParseError(_SOURCE, f"a list of at most {MAX_GPUS} addresses", line[:60])
    gpus = [Bdf.parse(str(row), _SOURCE) for row in addresses]
    return ShownGpus(tuple(dict.fromkeys(gpus)), reason)


def select_shown_gpus(
    gpus: tuple[PciDevice, ...], view: ShownGpus, omissions: list[Gap]
) -> tuple[PciDevice, ...]:
    """Return the shown GPUs in the driver's order; the others go to omissions. If no address of the
    driver matches, return all GPUs."""
    by_address = {gpu.bdf: gpu for gpu in gpus}
    visible = tuple(by_address[address] for address in view.addresses if address in by_address)
    if view.addresses and not visible:
        reason = f"the driver shows {view.addresses[0]}, which this machine does not have"
        omissions.append(Gap(SuiteGroup.GPU_BANDWIDTH, reason))
        return gpus
    hidden = [gpu for gpu in gpus if gpu not in visible]
    if not visible:
        reason = f"the driver shows no GPU to this process: {view.reason or 'none is visible'}"
        omissions += [Gap(group, reason) for group in _GROUPS]
    elif hidden:
        more_gpus = f" and {len(hidden) - 1} more" if len(hidden) > 1 else ""
        reason = "not shown to this process (a job's or a container's devices, *_VISIBLE_DEVICES)"
        omissions.append(Gap(SuiteGroup.GPU_BANDWIDTH, f"{hidden[0].bdf}{more_gpus}: {reason}"))
    return visible


HOST_COPIES = (
    "host_to_device_memcpy_ce",
    "device_to_host_memcpy_ce",
    "host_to_device_memcpy_sm",
    "device_to_host_memcpy_sm",
    "host_to_device_bidirectional_memcpy_ce",
    "device_to_host_bidirectional_memcpy_ce",
    "host_device_latency_sm",
)
"""Tests of nvbandwidth, all since v0.5."""

ALL_AT_ONCE = ("host_to_all_memcpy_ce", "all_to_host_memcpy_ce")
PEER_COPIES = (
    "device_to_device_memcpy_read_ce",
    "device_to_device_memcpy_write_ce",
    "device_to_device_memcpy_read_sm",
    "device_to_device_memcpy_write_sm",
)
LOCAL_COPY = ("device_local_copy",)
"""Since v0.7; older versions reject the name, and PyTorch runs the test."""

BY_BUS = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
_SAMPLES = {SuiteDepth.QUICK: 1, SuiteDepth.NORMAL: 3, SuiteDepth.FULL: 9}


def list_gpu_tests(
    host: Host,
    programs: Collection[str],
    options: SuiteOptions,
    omissions: list[Gap],
    view: ShownGpus | None = None,
) -> Iterator[BenchTest]:
    """Yield the tests of a machine's GPUs; impossible tests go to omissions. view: GPUs that the
    driver shows; None if it could not be queried: then all."""
    gpus = select_gpus(host, omissions)
    if not gpus:
        omissions += [Gap(group, "no GPU") for group in _GROUPS]
        return
    present = len(gpus)
    if view is not None:
        gpus = select_shown_gpus(gpus, view, omissions)
        if not gpus:
            return
    nodes = _find_bindable_nodes(host)
    machine = GpuMachine(gpus, nodes, frozenset(programs), options, present - len(gpus))
    for test in _list_tests(machine, omissions):
        numbered = _number_by_bus(test) if machine.is_nvidia else test
        yield numbered if view is None else _set_gpus(numbered, tuple(gpu.bdf for gpu in gpus))


def _list_tests(machine: GpuMachine, omissions: list[Gap]) -> Iterator[BenchTest]:
    copies = _list_nvidia_copies if machine.is_nvidia else _list_amd_copies
    yield from copies(machine, omissions)
    yield from _list_torch_tests(machine, omissions)
    if len(machine.gpus) < 2:
        reason = "one GPU alone"
        if machine.hidden:
            reason += f"; {machine.hidden} more of this machine's are not shown to this process"
        omissions += [Gap(group, reason) for group in (SuiteGroup.GPU_PEER, SuiteGroup.NCCL)]
        return
    yield from list_collective_tests(machine, omissions)


def _number_by_bus(test: BenchTest) -> BenchTest:
    """Number GPUs by bus: CUDA numbers the fastest first, nvbandwidth v0.10 prints no more."""
    alternatives = tuple(_number_by_bus(alternative) for alternative in test.alternatives)
    environment = (*test.environment, BY_BUS)
    return replace(test, environment=environment, alternatives=alternatives)


def _set_gpus(test: BenchTest, gpus: tuple[Bdf, ...]) -> BenchTest:
    alternatives = tuple(_set_gpus(alternative, gpus) for alternative in test.alternatives)
    return replace(test, gpus=gpus, alternatives=alternatives)


def select_gpus(host: Host, omissions: list[Gap]) -> tuple[PciDevice, ...]:
    """Return NVIDIA's GPUs, else AMD's, without passed-through ones: no tool measures both."""
    free: list[PciDevice] = []
    owned_gpus: list[PciDevice] = []
    for gpu in host.devices_of_kind(DeviceKind.GPU):
        (owned_gpus if gpu.driver == "vfio-pci" else free).append(gpu)
    if owned_gpus:
        more_gpus = f" and {len(owned_gpus) - 1} more" if len(owned_gpus) > 1 else ""
        reason = f"{owned_gpus[0].bdf}{more_gpus}: passed through (vfio-pci)"
        omissions.append(Gap(SuiteGroup.GPU_BANDWIDTH, reason))
    for vendor in (NVIDIA, AMD):
        chosen_gpus = tuple(gpu for gpu in free if gpu.vendor_id == vendor)
        if chosen_gpus:
            reason = "is of another vendor than the others: not measured"
            omissions += [
                Gap(SuiteGroup.GPU_BANDWIDTH, f"{gpu.bdf} {reason}")
                for gpu in free
                if gpu not in chosen_gpus
            ]
            return chosen_gpus
    reason = "is neither NVIDIA's nor AMD's: homenode has no tool that measures it"
    omissions += [Gap(SuiteGroup.GPU_BANDWIDTH, f"{gpu.bdf} {reason}") for gpu in free]
    return ()


def _list_nvidia_copies(machine: GpuMachine, omissions: list[Gap]) -> Iterator[BenchTest]:
    count = len(machine.gpus)
    has_tool, has_torch = "nvbandwidth" in machine.installed, machine.has_torch
    if not has_tool and not has_torch:
        reason = f"neither nvbandwidth nor PyTorch: {machine.missing_torch_reason()}"
        missed_groups = [SuiteGroup.GPU_COPY, SuiteGroup.GPU_BANDWIDTH] + [SuiteGroup.GPU_PEER] * (
            count > 1
        )
        omissions += [Gap(group, reason) for group in missed_groups]
        return
    yield _pick(
        _build_nvbandwidth_test(machine, "gpu-copy", SuiteGroup.GPU_COPY, LOCAL_COPY)
        if has_tool
        else None,
        machine.build_copy_test("gpu-copy", SuiteGroup.GPU_COPY, "local-copy"),
    )
    names = HOST_COPIES + (ALL_AT_ONCE if count > 1 else ())
    host_copies = ("gpu-bandwidth", SuiteGroup.GPU_BANDWIDTH, "host-copies")
    copy_test = _build_nvbandwidth_test(machine, "gpu-bandwidth", SuiteGroup.GPU_BANDWIDTH, names)
    yield _pick(
        _watch(copy_test, machine) if has_tool else None, machine.build_copy_test(*host_copies)
    )
    for node in machine.nodes:
        tool = _set_device(copy_test, node) if has_tool and "numactl" in machine.installed else None
        if tool is None and not has_torch:
            reason = f"from node {node.index}: numactl: command not found"
            omissions.append(Gap(SuiteGroup.GPU_BANDWIDTH, reason))
            continue
        yield _pick(tool, machine.build_copy_test(*host_copies, node))
    if count > 1:
        is_quick = machine.suite.depth is SuiteDepth.QUICK
        copies = PEER_COPIES[:2] if is_quick else PEER_COPIES
        peers = _build_nvbandwidth_test(machine, "gpu-peer", SuiteGroup.GPU_PEER, copies)
        peers = replace(peers, seconds=peers.seconds * max(1.0, count / 4))
        torch_peers = machine.build_copy_test("gpu-peer", SuiteGroup.GPU_PEER, "peer-copies")
        yield _stop_early(_pick(peers if has_tool else None, torch_peers), PEERS_HANG)


def _list_amd_copies(machine: GpuMachine, omitted: list[Gap]) -> Iterator[BenchTest]:
    """AMD's tools give all nodes in one matrix, and have no affinity of their own."""
    count = len(machine.gpus)
    if not machine.has_torch:
        reason = machine.missing_torch_reason()
        omitted += [Gap(group, reason) for group in (SuiteGroup.GPU_COPY, SuiteGroup.GPU_BANDWIDTH)]
    else:
        yield _pick(machine.build_copy_test("gpu-copy", SuiteGroup.GPU_COPY, "local-copy"))
        yield _pick(
            machine.build_copy_test("gpu-bandwidth", SuiteGroup.GPU_BANDWIDTH, "host-copies")
        )
    name, group = "gpu-bandwidth by node", SuiteGroup.GPU_BANDWIDTH
    torch = machine.build_copy_test(name, group, "host-copies", each_node=len(machine.nodes))
    by_node = [*_list_amd_tools(machine, name, group), *filter(None, [torch])]
    if by_node:
        yield _pick(*by_node)
        if by_node[0].reads is Reader.ROCM:
            argv = ("rocm-bandwidth-test", "-A")
            test = _make_gpu_test(
                "gpu-bandwidth both ways", SuiteGroup.GPU_BANDWIDTH, argv, by_node[0].seconds
            )
            # ROCm 7's program of that name has no -A: the replacements of -a measure it.
            yield _pick(replace(test, reads=Reader.ROCM), *by_node[1:])
    else:
        reason = "neither rocm-bandwidth-test nor PyTorch is installed"
        missed_groups = [SuiteGroup.GPU_BANDWIDTH] + [SuiteGroup.GPU_PEER] * (count > 1)
        omitted += [Gap(group, reason) for group in missed_groups]
        return
    if count > 1:
        peers = [
            *_list_amd_tools(machine, "gpu-peer", SuiteGroup.GPU_PEER),
            machine.build_copy_test("gpu-peer", SuiteGroup.GPU_PEER, "peer-copies"),
        ]
        yield _stop_early(_pick(*peers), PEERS_HANG)


def _list_amd_tools(machine: GpuMachine, id: str, group: SuiteGroup) -> Iterator[BenchTest]:
    seconds = 0.5 * (len(machine.gpus) + len(machine.nodes)) ** 2
    if "rocm-bandwidth-test" in machine.installed:
        argv: tuple[str, ...] = ("rocm-bandwidth-test", "-a")
        yield replace(_make_gpu_test(id, group, argv, seconds), reads=Reader.ROCM)


def _list_torch_tests(machine: GpuMachine, omissions: list[Gap]) -> Iterator[BenchTest]:
    """Yield tests that no installed tool has: matrix products and small copies."""
    if not machine.has_torch:
        reason = machine.missing_torch_reason()
        omissions += [Gap(group, reason) for group in (SuiteGroup.MATMUL, SuiteGroup.GPU_SMALL)]
        return
    yield _pick(machine.build_copy_test("gpu-compute", SuiteGroup.MATMUL, "matmul"))
    for node in (None, *machine.nodes):
        yield _pick(
            machine.build_copy_test("gpu-small-copies", SuiteGroup.GPU_SMALL, "small-copies", node)
        )


def _build_nvbandwidth_test(
    machine: GpuMachine, id: str, group: SuiteGroup, names: tuple[str, ...]
) -> BenchTest:
    samples = _SAMPLES[machine.suite.depth]
    argv = nvbandwidth.build_argv(names, samples=samples)
    seconds = 0.4 * samples * len(machine.gpus) * len(names) + 2
    return replace(_make_gpu_test(id, group, argv, seconds), reads=Reader.NVBANDWIDTH)


def _watch(test: BenchTest, machine: GpuMachine) -> BenchTest:
    """Watch nvbandwidth's threads: it binds itself and does not report where."""
    if PYTHON not in machine.installed:
        return test
    return replace(test, argv=(machine.suite.python, "-", *test.argv), program="watched")


def _set_device(test: BenchTest, node: NumaNode) -> BenchTest:
    """Add -d: otherwise the tool moves itself to the GPU's node, and every row would be equal."""
    binding = ("numactl", f"--cpunodebind={node.index}", f"--membind={node.index}")
    argv = (*binding, test.argv[0], "-d", *test.argv[1:])
    return replace(test, id=f"{test.id} from node {node.index}", argv=argv, node=node.index)


def _pick(*attempts: BenchTest | None) -> BenchTest:
    """Return the first existing test with the others as alternatives."""
    first, *alternatives = (attempt for attempt in attempts if attempt is not None)
    return first.or_else(*alternatives)


def _stop_early(test: BenchTest, shows: str) -> BenchTest:
    """Set a shorter time limit: if peer access hangs, every round waits for it."""
    alternatives = tuple(_stop_early(alternative, shows) for alternative in test.alternatives)
    patience = 90 + 3 * test.seconds
    return replace(test, timeout_s=patience, if_stopped=shows, alternatives=alternatives)


def _make_gpu_test(id: str, group: SuiteGroup, argv: tuple[str, ...], seconds: float) -> BenchTest:
    return BenchTest(id, group, argv, seconds, 120 + 10 * seconds)


def build_suite(
    host: Host, programs: Collection[str], options: SuiteOptions, gpus: ShownGpus | None = None
) -> Suite:
    """Return the tests of a machine. programs: names of programs that can be run.

    host: the machine that runs them, a guest for one. gpus: GPUs that the driver exposes to this
    process; None if the driver cannot be queried. Raises UsageError if no requested test is
    possible.
    """
    omissions: list[Gap] = []
    all_tests = [
        *_probe_tests(host, programs, options, omissions),
        *list_gpu_tests(host, programs, options, omissions, gpus),
    ]
    groups = set(options.groups) or set(SuiteGroup)
    tests = tuple(test for test in all_tests if test.group in groups)
    gaps = tuple(gap for gap in omissions if gap.subject in groups)
    if not any(not test.is_control for test in tests) and not (tests and options.groups):
        raise UsageError(
            f"--tests: this machine can run no test of {', '.join(sorted(groups))}",
            hint="; ".join(map(str, gaps)) or None,
        )
    return Suite(tests, gaps)


def _probe_tests(
    host: Host, programs: Collection[str], options: SuiteOptions, omissions: list[Gap]
) -> Iterator[BenchTest]:
    pus = host.usable_pus
    groups = [
        SuiteGroup.CPU_SINGLE,
        SuiteGroup.CPU_ALL,
        SuiteGroup.MEMORY_BANDWIDTH,
        SuiteGroup.MEMORY_LATENCY,
    ]
    groups += [SuiteGroup.CORE_TO_CORE, SuiteGroup.SMT, SuiteGroup.PLACEMENT]
    if PROBE not in programs or not pus:
        reason = f"{PROBE}: command not found" if pus else "no CPU may be used"
        omissions += [Gap(group, reason) for group in groups]
        return
    first = str(pus.first())
    seconds = SECONDS[options.depth]
    yield _probe(SuiteGroup.CPU_SINGLE, "throughput", seconds, "--pus", first)
    yield _probe(SuiteGroup.MEMORY_BANDWIDTH, "bandwidth", seconds, "--pus", str(pus))
    if len(pus) > 1:
        yield _probe(SuiteGroup.CPU_ALL, "throughput", seconds, "--pus", str(pus))
        alone = _probe(SuiteGroup.MEMORY_BANDWIDTH, "bandwidth", seconds, "--pus", first)
        yield replace(alone, id="stream one thread", variant="one thread")
        test = _probe(SuiteGroup.MEMORY_LATENCY, "loaded-latency", seconds, "--pus", str(pus))
        yield replace(test, id="loaded latency")
    quick = ("--quick",) if options.depth is SuiteDepth.QUICK else ()
    yield _probe(SuiteGroup.MEMORY_LATENCY, "latency", 4 * seconds, "--pus", first, *quick)
    node_count = len(_find_bindable_nodes(host))
    if node_count > 1:
        cells = node_count**2
        for group, command in (
            (SuiteGroup.MEMORY_BANDWIDTH, "bandwidth"),
            (SuiteGroup.MEMORY_LATENCY, "latency"),
        ):
            cell = _probe(group, command, seconds, "--matrix", "--pus", str(pus))
            yield replace(
                cell,
                id=f"{group} by node",
                seconds=seconds * cells,
                timeout_s=60 + 20 * seconds * cells,
            )
    if len(pus) > 1:
        yield _probe(SuiteGroup.CORE_TO_CORE, "core-to-core", 2 * seconds, "--pus", str(pus))
        yield _probe(SuiteGroup.PLACEMENT, "placement", seconds, "--pus", str(pus))
    else:
        several = (SuiteGroup.CPU_ALL, SuiteGroup.CORE_TO_CORE, SuiteGroup.PLACEMENT)
        omissions += [Gap(group, "one CPU alone") for group in several]
    if any(len(core.pus & pus) > 1 for core in host.cores):
        yield _probe(SuiteGroup.SMT, "smt", seconds, "--pus", str(pus))
    else:
        omissions.append(Gap(SuiteGroup.SMT, "no core shows siblings"))


def _probe(group: SuiteGroup, command: str, seconds: float, *options: str) -> BenchTest:
    argv = (PROBE, command, "--seconds", f"{seconds:g}", *options)
    return BenchTest(str(group), group, argv, seconds, 60 + 20 * seconds)


def _find_bindable_nodes(host: Host) -> tuple[NumaNode, ...]:
    """Return the nodes that a process can be bound to; GPU memory and CXL have no CPUs."""
    return tuple(node for node in host.nodes if node.pus and node.memory_bytes != 0)
