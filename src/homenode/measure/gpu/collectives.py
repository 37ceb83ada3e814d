"""Collective tests: all-reduces under host bindings; the experiment on what a guest does to them.

Bindings, with and without peer access: unbound; each rank on its GPU's node; everything on one
node, as the study's script does where a GPU has no node. One process of nccl-tests drives all GPUs,
so only where all GPUs share a node can it be bound to "its GPU's node"; elsewhere PyTorch, with a
process for each GPU, runs all three.

The experiment changes one setting of the study's at a time, and two where one alone says little;
with Depth.FULL everything is crossed. Layouts are crossed by a trial, which boots them. Each run
keeps NCCL's log; one whose log contradicts its settings gives no figure (measure.step_reading).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from homenode.gap import Gap
from homenode.indices import NodeIndex
from homenode.measure.gpu.torch_commands import TorchPython
from homenode.measure.model import (
    PYTHON,
    TORCH,
    BenchTest,
    CollectiveSettings,
    Depth,
    Group,
    Reader,
    SuiteOptions,
)
from homenode.pci import PciDevice
from homenode.tools import nccl_tests
from homenode.topology import NumaNode

UNBOUND = "nothing bound"
ON_GPU_NODES = "each rank on its GPU's node"

_AMD = 0x1002
_WARMUPS = 10
_REPEATS = {Depth.QUICK: 20, Depth.NORMAL: 100, Depth.FULL: 300}
_PER_GPU = "a process for each GPU"


@dataclass(frozen=True, slots=True)
class HostBinding:
    """words: for people. node: the one node of a whole process, None where there is none."""

    words: str
    node: NodeIndex | None
    of_each_gpu: bool = False


def collective_tests(
    gpus: tuple[PciDevice, ...],
    nodes: tuple[NumaNode, ...],
    installed: frozenset[str],
    options: SuiteOptions,
    left_out: list[Gap],
    if_stopped: str | None,
) -> Iterator[BenchTest]:
    """The all-reduces of these GPUs (two or more). The first test speaks for its metrics."""
    torch = TorchPython(options.python) if TORCH in installed else None
    has_tool = "all_reduce_perf" in installed
    if not has_tool and torch is None:
        left_out.append(Gap(Group.NCCL, "neither all_reduce_perf nor PyTorch is installed"))
        return
    bindings = _bindings(gpus, nodes, left_out)
    speaks = True
    if has_tool:
        for binding in bindings:
            yield from _of_tool(binding, gpus, installed, options, torch, left_out, if_stopped)
        yield _choices(gpus, options)
        speaks = False
    spread = any(binding.of_each_gpu for binding in bindings)
    if torch is not None and (not has_tool or spread):
        for binding in bindings:
            for peers in (True, False):
                name = _variant(binding, peers=peers)
                words = name if speaks else ", ".join(filter(None, (_PER_GPU, name)))
                test = _of_torch(torch, binding, gpus, options, peers=peers, variant=words)
                yield replace(test, if_stopped=if_stopped if peers else None)
    elif spread:
        reason = f"{ON_GPU_NODES}: needs PyTorch, nccl-tests drives all GPUs from one process"
        left_out.append(Gap(Group.NCCL, reason))


def _bindings(
    gpus: tuple[PciDevice, ...], nodes: tuple[NumaNode, ...], left_out: list[Gap]
) -> tuple[HostBinding, ...]:
    """On one node all three are the same."""
    unbound = HostBinding(UNBOUND, None)
    if len(nodes) < 2:
        return (unbound,)
    first = nodes[0].index
    on_first = HostBinding(f"everything on node {first}", first)
    lost = [gpu for gpu in gpus if gpu.node not in {node.index for node in nodes}]
    if lost:
        reason = f"{ON_GPU_NODES}: {lost[0].bdf} has no node that a process can be bound to"
        left_out.append(Gap(Group.NCCL, reason))
        return (unbound, on_first)
    homes = {gpu.node for gpu in gpus}
    if len(homes) > 1:
        return (unbound, HostBinding(ON_GPU_NODES, None, of_each_gpu=True), on_first)
    if homes == {first}:
        return (unbound, replace(on_first, words=f"{on_first.words}, the GPUs' own"))
    return (unbound, HostBinding(ON_GPU_NODES, gpus[0].node), on_first)


def _of_tool(
    binding: HostBinding,
    gpus: tuple[PciDevice, ...],
    installed: frozenset[str],
    options: SuiteOptions,
    torch: TorchPython | None,
    left_out: list[Gap],
    if_stopped: str | None,
) -> Iterator[BenchTest]:
    if binding.of_each_gpu:
        return
    if binding.node is not None and "numactl" not in installed:
        left_out.append(Gap(Group.NCCL, f"{binding.words}: numactl is not installed"))
        return
    repeats = _REPEATS[options.depth]
    argv = nccl_tests.argv(
        len(gpus), largest_bytes=options.largest_message_bytes, warmups=_WARMUPS, iterations=repeats
    )
    if binding.node is not None:
        node = binding.node
        argv = ("numactl", f"--cpunodebind={node}", f"--membind={node}", *argv)
    seconds = 10.0 + 50.0 * repeats / 100
    for peers in (True, False):
        variant = _variant(binding, peers=peers)
        others = [
            _of_torch(one, binding, gpus, options, peers=peers, variant=variant)
            for one in (torch,)
            if one is not None
        ]
        yield BenchTest(
            _id(variant),
            Group.NCCL,
            argv,
            seconds,
            _patience(seconds, if_stopped, peers=peers),
            _environment(gpus, peers=peers),
            Reader.NCCL_TESTS,
            node=binding.node,
            binding=binding.words,
            variant=variant,
            if_stopped=if_stopped if peers else None,
        ).or_else(*others)


def _of_torch(
    torch: TorchPython,
    binding: HostBinding,
    gpus: tuple[PciDevice, ...],
    options: SuiteOptions,
    *,
    peers: bool,
    variant: str | None,
) -> BenchTest:
    bind = "none" if binding.node is None else str(binding.node)
    test = torch.all_reduce(
        _id(variant),
        len(gpus),
        options.largest_message_bytes,
        _REPEATS[options.depth],
        bind="gpu" if binding.of_each_gpu else bind,
        peers=peers,
    )
    environment = _environment(gpus, peers=peers)
    return replace(
        test, binding=binding.words, variant=variant, node=binding.node, environment=environment
    )


def _patience(seconds: float, if_stopped: str | None, *, peers: bool) -> float:
    """Less where access is known to hang: every round waits for it. Else enough for the slowest
    machine known: nccl-tests makes all its calls, however long one takes."""
    return 90 + 3 * seconds if peers and if_stopped is not None else 120 + 30 * seconds


def _choices(gpus: tuple[PciDevice, ...], options: SuiteOptions) -> BenchTest:
    """A sweep of one call a size that logs what the library chose: not timed, as it logs."""
    argv = nccl_tests.argv(
        len(gpus), largest_bytes=options.largest_message_bytes, warmups=0, iterations=1
    )
    log = (("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_SUBSYS", "TUNING"))
    environment = (*_environment(gpus, peers=True), *log)
    return BenchTest(
        "nccl choices",
        Group.NCCL,
        argv,
        15.0,
        180.0,
        environment,
        Reader.NCCL_CHOICES,
        binding=UNBOUND,
    )


def collective_environment(gpus: tuple[PciDevice, ...]) -> tuple[tuple[str, str], ...]:
    """ROCm's collectives fail on some GPUs when scratch memory is reclaimed: MI350X, MI300X."""
    return (("HSA_NO_SCRATCH_RECLAIM", "1"),) if any(gpu.vendor_id == _AMD for gpu in gpus) else ()


def _environment(gpus: tuple[PciDevice, ...], *, peers: bool) -> tuple[tuple[str, str], ...]:
    found = collective_environment(gpus)
    return found if peers else (*found, ("NCCL_P2P_DISABLE", "1"))


def _variant(binding: HostBinding, *, peers: bool) -> str | None:
    parts = [] if peers else ["P2P off"]
    parts += [] if binding.words == UNBOUND else [binding.words]
    return ", ".join(parts) or None


def _id(variant: str | None) -> str:
    return "nccl" if variant is None else f"nccl: {variant}"


_PROGRAM = "collective_watch"
_EXPERIMENT_REPEATS = {Depth.QUICK: 10, Depth.NORMAL: 20, Depth.FULL: 20}
_EXPERIMENT_WARMUPS = 5

EXPERIMENT_TEST_S = 30.0
"""Of one setting, about: a start of CUDA on all GPUs, and a sweep."""

ONE_BY_ONE = (
    CollectiveSettings(),
    CollectiveSettings(first_node=True),
    CollectiveSettings(file=True),
    CollectiveSettings(several=True),
    CollectiveSettings(file=True, several=True),
    CollectiveSettings(peers=True),
    CollectiveSettings(ring=True),
)


def settings_of(depth: Depth) -> tuple[CollectiveSettings, ...]:
    """Seven that fit an hour with five layouts, or all twenty."""
    if depth is not Depth.FULL:
        return ONE_BY_ONE
    crossed = [CollectiveSettings(*flags) for flags in product((False, True), repeat=4)]
    bound = [
        CollectiveSettings(several=several, ring=ring, first_node=True)
        for several, ring in product((False, True), repeat=2)
    ]
    return (*crossed, *bound)


def experiment_tests(
    gpus: tuple[PciDevice, ...],
    nodes: tuple[NumaNode, ...],
    installed: frozenset[str],
    options: SuiteOptions,
    left_out: list[Gap],
    environment: tuple[tuple[str, str], ...] = (),
) -> Iterator[BenchTest]:
    """The all-reduces of two GPUs or more. What cannot be run goes to left_out, by name."""
    for settings in settings_of(options.depth):
        reason = _against(settings, nodes, installed, options)
        if reason is not None:
            left_out.append(Gap(Group.COLLECTIVES, f"{settings.name}: {reason}"))
            continue
        yield _test(settings, len(gpus), nodes, options, environment)


def _against(
    settings: CollectiveSettings,
    nodes: tuple[NumaNode, ...],
    installed: frozenset[str],
    options: SuiteOptions,
) -> str | None:
    if PYTHON not in installed:
        return f"{options.python} does not run there, which keeps NCCL's log"
    if settings.several and TORCH not in installed:
        return "needs PyTorch, a process for each GPU"
    if not settings.several and "all_reduce_perf" not in installed:
        return "all_reduce_perf is not installed, which drives all GPUs from one process"
    if settings.file and options.topology is None:
        return options.why_no_topology
    if settings.first_node and len(nodes) < 2:
        return "the machine has one node"
    return None


def _test(
    settings: CollectiveSettings,
    gpus: int,
    nodes: tuple[NumaNode, ...],
    options: SuiteOptions,
    environment: tuple[tuple[str, str], ...],
) -> BenchTest:
    repeats, largest = _EXPERIMENT_REPEATS[options.depth], options.largest_message_bytes
    tool = nccl_tests.argv(
        gpus, largest_bytes=largest, warmups=_EXPERIMENT_WARMUPS, iterations=repeats
    )
    if settings.several:
        torch = TorchPython(options.python).all_reduce(
            "", gpus, largest, repeats, bind="none", peers=settings.peers
        )
        tool = ("torch", *torch.argv[2:])
    words: tuple[str, ...] = ("--gpus", str(gpus))
    node = nodes[0].index if settings.first_node else None
    if node is not None:
        words += ("--bind", str(node))
    if settings.file and options.topology is not None:
        words += ("--topology", options.topology)
    variables = environment
    variables += () if settings.peers else (("NCCL_P2P_DISABLE", "1"),)
    variables += (("NCCL_ALGO", "Ring"),) if settings.ring else ()
    return BenchTest(
        f"collectives: {settings.name}",
        Group.COLLECTIVES,
        (options.python, "-", *words, "--", *tool),
        EXPERIMENT_TEST_S,
        120 + 20 * EXPERIMENT_TEST_S,
        variables,
        Reader.COLLECTIVE,
        program=_PROGRAM,
        node=node,
        variant=settings.name,
        settings=settings,
    )
