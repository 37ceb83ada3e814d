"""Suite: which tests a machine gets, with the commands that run them.

The probe measures processors and memory everywhere; GPUs are in gpu_suite.
"""

from collections.abc import Collection, Iterator

from msgspec.structs import replace

from homenode.cpuset import CpuSet
from homenode.errors import UsageError
from homenode.gap import Gap
from homenode.machine.topology import Host, NumaNode
from homenode.measure.gpu.suite import ShownGpus, gpu_tests
from homenode.measure.model import (
    BY_NAME_ALONE,
    PROBE,
    SECONDS,
    BenchTest,
    Depth,
    Group,
    Suite,
    SuiteOptions,
)


def suite_for(
    host: Host,
    installed: Collection[str],
    options: SuiteOptions,
    shown: ShownGpus | None = None,
) -> Suite:
    """The tests of a machine. installed: names of programs that can be run.

    host: the machine that runs them, a guest for one. shown: GPUs that its driver gives to us, None
    where it could not be asked. Raises UsageError where nothing is left of what was asked for.
    """
    left_out: list[Gap] = []
    found = [
        *_of_probe(host, installed, options, left_out),
        *gpu_tests(host, installed, options, left_out, shown),
    ]
    wanted = set(options.groups) or set(Group) - BY_NAME_ALONE
    tests = tuple(test for test in found if test.group in wanted)
    left = tuple(gap for gap in left_out if gap.subject in wanted)
    if not any(not test.is_control for test in tests) and not (tests and options.groups):
        raise UsageError(
            f"--tests: expected one that this machine can run, found none of "
            f"{', '.join(sorted(wanted))}",
            hint="; ".join(map(str, left)) or None,
        )
    return Suite(tests, left)


def _of_probe(
    host: Host, installed: Collection[str], options: SuiteOptions, left_out: list[Gap]
) -> Iterator[BenchTest]:
    pus = CpuSet(pu.index for pu in host.pus if pu.online and pu.allowed)
    groups = [Group.CPU_SINGLE, Group.CPU_ALL, Group.MEMORY_BANDWIDTH, Group.MEMORY_LATENCY]
    groups += [Group.CORE_TO_CORE, Group.SMT, Group.PLACEMENT]
    if PROBE not in installed or not pus:
        reason = f"{PROBE} is not installed" if pus else "no PU may be used"
        left_out += [Gap(group, reason) for group in groups]
        return
    first = str(pus.first())
    seconds = SECONDS[options.depth]
    yield _probe(Group.CPU_SINGLE, "throughput", seconds, "--pus", first)
    yield _probe(Group.MEMORY_BANDWIDTH, "bandwidth", seconds, "--pus", str(pus))
    if len(pus) > 1:
        yield _probe(Group.CPU_ALL, "throughput", seconds, "--pus", str(pus))
        alone = _probe(Group.MEMORY_BANDWIDTH, "bandwidth", seconds, "--pus", first)
        yield replace(_named("stream one thread", alone), variant="one thread")
        yield _named(
            "loaded latency",
            _probe(Group.MEMORY_LATENCY, "loaded-latency", seconds, "--pus", str(pus)),
        )
    quick = ("--quick",) if options.depth is Depth.QUICK else ()
    yield _probe(Group.MEMORY_LATENCY, "latency", 4 * seconds, "--pus", first, *quick)
    if len(_with_pus_and_memory(host)) > 1:
        cells = len(_with_pus_and_memory(host)) ** 2
        for group, command in (
            (Group.MEMORY_BANDWIDTH, "bandwidth"),
            (Group.MEMORY_LATENCY, "latency"),
        ):
            cell = _probe(group, command, seconds, "--matrix", "--pus", str(pus))
            yield replace(
                _named(f"{group} by node", cell),
                seconds=seconds * cells,
                timeout_s=60 + 20 * seconds * cells,
            )
    if len(pus) > 1:
        yield _probe(Group.CORE_TO_CORE, "core-to-core", 2 * seconds, "--pus", str(pus))
        yield _probe(Group.PLACEMENT, "placement", seconds, "--pus", str(pus))
    else:
        several = (Group.CPU_ALL, Group.CORE_TO_CORE, Group.PLACEMENT)
        left_out += [Gap(group, "one PU alone") for group in several]
    if any(len(core.pus & pus) > 1 for core in host.cores):
        yield _probe(Group.SMT, "smt", seconds, "--pus", str(pus))
    else:
        left_out.append(Gap(Group.SMT, "no core shows siblings"))


def _probe(group: Group, command: str, seconds: float, *options: str) -> BenchTest:
    argv = (PROBE, command, "--seconds", f"{seconds:g}", *options)
    return BenchTest(str(group), group, argv, seconds, 60 + 20 * seconds)


def _named(id: str, test: BenchTest) -> BenchTest:
    return replace(test, id=id)


def _with_pus_and_memory(host: Host) -> tuple[NumaNode, ...]:
    """Nodes that a process can be bound to; GPU memory and CXL have no PUs."""
    return tuple(node for node in host.nodes if node.pus and node.memory_bytes != 0)
