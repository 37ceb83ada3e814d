"""Experiment: what a guest does to NCCL, one setting at a time, within one boot.

From the study's settings one thing is changed at a time, and two where one alone says little; with
Depth.FULL everything is crossed. Layouts are crossed by a trial, which boots them. Each run keeps
NCCL's log; one whose log contradicts its settings gives no figure (measure.step_reading).
"""

from collections.abc import Iterator
from itertools import product

from homenode.gap import Gap
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

_PROGRAM = "collective_watch"
_REPEATS = {Depth.QUICK: 10, Depth.NORMAL: 20, Depth.FULL: 20}
_WARMUPS = 5

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
        reason = _against(settings, gpus, nodes, installed, options)
        if reason is not None:
            left_out.append(Gap(Group.COLLECTIVES, f"{settings.name}: {reason}"))
            continue
        yield _test(settings, len(gpus), nodes, options, environment)


def _against(
    settings: CollectiveSettings,
    gpus: tuple[PciDevice, ...],
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
    if settings.first_node:
        if len(nodes) < 2:
            return "the machine has one node"
        known = {node.index for node in nodes}
        if any(gpu.node in known for gpu in gpus):
            return "its GPUs have nodes, and the study's script binds only where they show -1"
    return None


def _test(
    settings: CollectiveSettings,
    gpus: int,
    nodes: tuple[NumaNode, ...],
    options: SuiteOptions,
    environment: tuple[tuple[str, str], ...],
) -> BenchTest:
    repeats = _REPEATS[options.depth]
    tool = nccl_tests.argv(
        gpus, largest_bytes=options.largest_message_bytes, warmups=_WARMUPS, iterations=repeats
    )
    if settings.several:
        torch = TorchPython(options.python).all_reduce(
            "", gpus, options.largest_message_bytes, repeats, bind="none", peers=settings.peers
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
