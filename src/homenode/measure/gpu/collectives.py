"""Collective tests: all-reduces under host bindings; the experiment on what a guest does to them.

Bindings, with and without peer access: unbound; each rank on its GPU's node; everything on one
node, as the study's script does where a GPU has no node. One process of nccl-tests drives all GPUs,
so only where all GPUs share a node can it be bound to "its GPU's node"; elsewhere PyTorch, with a
process for each GPU, runs all three.

The experiment changes one setting of the study's at a time, and two where one alone says little;
with Depth.FULL everything is crossed. Layouts are crossed by a trial, which boots them. Each run
keeps NCCL's log; one whose log contradicts its settings gives no figure (measure.step_reading).
"""

import shlex
from collections.abc import Iterator
from itertools import combinations, product

from msgspec import Struct
from msgspec.structs import replace

from homenode.gap import Gap
from homenode.indices import NodeIndex
from homenode.measure.gpu.machine import PEERS_HANG, GpuMachine
from homenode.measure.model import (
    PYTHON,
    TORCH,
    BenchTest,
    CollectiveSettings,
    Depth,
    Group,
    Reader,
)

UNBOUND = "nothing bound"
ON_GPU_NODES = "each rank on its GPU's node"

_WARMUPS = 10
_REPEATS = {Depth.QUICK: 20, Depth.NORMAL: 100, Depth.FULL: 300}
_PER_GPU = "a process for each GPU"


class HostBinding(Struct, frozen=True):
    """words: for people. node: the one node of a whole process, None where there is none."""

    words: str
    node: NodeIndex | None
    of_each_gpu: bool = False


def collective_tests(machine: GpuMachine, left_out: list[Gap]) -> Iterator[BenchTest]:
    """The all-reduces of its GPUs (two or more). The first test speaks for its metrics."""
    has_tool = "all_reduce_perf" in machine.installed
    if not has_tool and machine.torch is None:
        left_out.append(Gap(Group.NCCL, "neither all_reduce_perf nor PyTorch is installed"))
        return
    bindings = _bindings(machine, left_out)
    if has_tool:
        for binding in bindings:
            yield from _of_tool(machine, binding, left_out)
        yield _choices(machine)
    spread = any(binding.of_each_gpu for binding in bindings)
    if machine.torch is not None and (not has_tool or spread):
        for binding, peers in product(bindings, (True, False)):
            name = _variant(binding, peers=peers)
            words = ", ".join(filter(None, (_PER_GPU, name))) if has_tool else name
            test = _of_torch(machine, binding, peers=peers, variant=words)
            yield replace(test, if_stopped=_if_stopped(machine, peers=peers))
    elif spread:
        reason = f"{ON_GPU_NODES}: needs PyTorch, nccl-tests drives all GPUs from one process"
        left_out.append(Gap(Group.NCCL, reason))


def _bindings(machine: GpuMachine, left_out: list[Gap]) -> tuple[HostBinding, ...]:
    """On one node all three are the same."""
    gpus, nodes = machine.gpus, machine.nodes
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


def _of_tool(machine: GpuMachine, binding: HostBinding, left_out: list[Gap]) -> Iterator[BenchTest]:
    node = binding.node
    if binding.of_each_gpu:
        return
    if node is not None and "numactl" not in machine.installed:
        left_out.append(Gap(Group.NCCL, f"{binding.words}: numactl is not installed"))
        return
    repeats = _REPEATS[machine.suite.depth]
    argv = machine.nccl_tests(_WARMUPS, repeats)
    if node is not None:
        argv = ("numactl", f"--cpunodebind={node}", f"--membind={node}", *argv)
    seconds = 10.0 + 50.0 * repeats / 100
    for peers in (True, False):
        variant, if_stopped = _variant(binding, peers=peers), _if_stopped(machine, peers=peers)
        # Less where access is known to hang: every round waits for it. Else enough for the slowest
        # machine known: nccl-tests makes all its calls, however long one takes.
        patience = 120 + 30 * seconds if if_stopped is None else 90 + 3 * seconds
        test = BenchTest(
            id=_id(variant),
            group=Group.NCCL,
            argv=argv,
            seconds=seconds,
            timeout_s=patience,
            environment=machine.environment(peers=peers),
            reads=Reader.NCCL_TESTS,
            node=node,
            binding=binding.words,
            variant=variant,
            if_stopped=if_stopped,
        )
        if machine.torch is not None:
            test = test.or_else(_of_torch(machine, binding, peers=peers, variant=variant))
        yield test


def _of_torch(
    machine: GpuMachine, binding: HostBinding, *, peers: bool, variant: str | None
) -> BenchTest:
    home = "none" if binding.node is None else str(binding.node)
    bind = "gpu" if binding.of_each_gpu else home
    repeats = _REPEATS[machine.suite.depth]
    return replace(
        machine.all_reduce(_id(variant), repeats, bind, peers=peers),
        binding=binding.words,
        variant=variant,
        node=binding.node,
        environment=machine.environment(peers=peers),
    )


def _if_stopped(machine: GpuMachine, *, peers: bool) -> str | None:
    return PEERS_HANG if peers and not machine.is_nvidia else None


def _choices(machine: GpuMachine) -> BenchTest:
    """A sweep of one call a size that logs what the library chose: not timed, as it logs."""
    log = (("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_SUBSYS", "TUNING"))
    return BenchTest(
        id="nccl choices",
        group=Group.NCCL,
        argv=machine.nccl_tests(0, 1),
        seconds=15.0,
        timeout_s=180.0,
        environment=(*machine.environment(peers=True), *log),
        reads=Reader.NCCL_CHOICES,
        binding=UNBOUND,
    )


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


def experiment_tests(machine: GpuMachine, left_out: list[Gap]) -> Iterator[BenchTest]:
    """The all-reduces of two GPUs or more. What cannot be run goes to left_out, by name."""
    for settings in settings_of(machine.suite.depth):
        reason = _against(settings, machine)
        if reason is not None:
            left_out.append(Gap(Group.COLLECTIVES, f"{settings.name}: {reason}"))
            continue
        yield _test(settings, machine)


ACROSS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("", ()),
    ("GPUDirect RDMA at any distance", (("NCCL_NET_GDR_LEVEL", "SYS"),)),
    ("GPUDirect RDMA off", (("NCCL_NET_GDR_LEVEL", "LOC"),)),
    ("relaxed ordering on", (("NCCL_IB_PCI_RELAXED_ORDERING", "1"),)),
    ("relaxed ordering off", (("NCCL_IB_PCI_RELAXED_ORDERING", "0"),)),
)
"""What is changed, one at a time. ATS is a setting of NICs, which no job changes."""
_WITH_FILE = (
    'f=$(mktemp) && trap \'rm -f "$f"\' EXIT && printf %s "$1" >"$f" && shift && '
    'NCCL_TOPO_FILE=$f "$@"'
)
_BY_SSH = """t=$(cat; echo .); n=0
for h in $1; do
  printf %s "${t%.}" | if [ $n = 0 ]; then sh -c "$2 0"; else
    ssh -o BatchMode=yes "$h" "$2 $n" >/dev/null
  fi & [ $n != 0 ] || first=$!; n=$((n + 1))
done
wait $first; failed=$?; wait; exit $failed"""
_PAIR = (
    'w="timeout 40 ib_write_bw -F --report_gbits -D 5" s="ssh -o BatchMode=yes"; '
    '$s "$1" "$w" >/dev/null & sleep 2; $s "$2" "$w $1"; failed=$?; wait; exit $failed'
)


def across_tests(machine: GpuMachine, left_out: list[Gap]) -> Iterator[BenchTest]:
    """What hosts reach together: all-reduces, and the first NIC of each pair by ib_write_bw."""
    yield from _all_reduces(machine, left_out)
    if not machine.installed >= {"ssh", "ib_write_bw"}:
        left_out.append(Gap(Group.COLLECTIVES, "pairs of hosts: needs ssh and ib_write_bw"))
        return
    for one, other in combinations(machine.suite.hosts, 2):
        variant = f"{other} to {one}"
        yield BenchTest(
            id=f"collectives: ib_write_bw, {variant}",
            group=Group.COLLECTIVES,
            argv=("sh", "-c", _PAIR, "sh", one, other),
            seconds=10.0,
            timeout_s=60.0,
            reads=Reader.PERFTEST,
            variant=variant,
        )


def _all_reduces(machine: GpuMachine, left_out: list[Gap]) -> Iterator[BenchTest]:
    """Each host has as many GPUs as this machine. nccl-tests built with MPI, a process with all
    GPUs on each host; else our PyTorch program, started by ssh."""
    hosts, tools = machine.suite.hosts, machine.installed
    launcher = next((one for one in ("mpirun", "srun") if one in tools), "ssh")
    launcher = launcher if "all_reduce_perf" in tools else "ssh"
    if not tools >= ({"ssh", TORCH} if launcher == "ssh" else {launcher}):
        reason = "neither all_reduce_perf with mpirun or srun nor PyTorch with ssh is installed"
        left_out.append(Gap(Group.COLLECTIVES, f"across hosts: {reason}"))
        return
    repeats, test = _EXPERIMENT_REPEATS[machine.suite.depth], None
    tool = machine.nccl_tests(_EXPERIMENT_WARMUPS, repeats)
    if launcher == "ssh":
        test = machine.all_reduce("", repeats, "none", peers=True)
        tool = (*test.argv, "--meet", hosts[0], "--hosts", str(len(hosts)))
    chosen = [(name, variables, tool) for name, variables in ACROSS]
    if machine.suite.topology is None:
        reason = f"across hosts, NCCL file: {machine.suite.why_no_topology}"
        left_out.append(Gap(Group.COLLECTIVES, reason))
    else:
        with_file = ("sh", "-c", _WITH_FILE, "sh", machine.suite.topology, *tool)
        chosen.append(("NCCL file", (), with_file))
    for name, variables, command in chosen:
        variant = ", ".join(filter(None, (f"across {len(hosts)} hosts", name)))
        yield BenchTest(
            id=f"collectives: {variant}",
            group=Group.COLLECTIVES,
            argv=_launched(launcher, hosts, variables, command),
            seconds=EXPERIMENT_TEST_S,
            timeout_s=120 + 20 * EXPERIMENT_TEST_S,
            reads=Reader.NCCL_TESTS if test is None else test.reads,
            program=None if test is None else test.program,
            binding=UNBOUND,
            variant=variant,
        )


def _launched(
    launcher: str,
    hosts: tuple[str, ...],
    variables: tuple[tuple[str, str], ...],
    command: tuple[str, ...],
) -> tuple[str, ...]:
    """What starts the command on each host: Open MPI's, Slurm's in a job, or ssh."""
    given = [f"{name}={value}" for name, value in variables]
    count = str(len(hosts))
    if launcher == "srun":
        exported = ",".join(("ALL", *given))
        where = ("--nodes", count, "--ntasks-per-node", "1", "--nodelist", ",".join(hosts))
        return ("srun", *where, f"--export={exported}", *command)
    if launcher == "ssh":
        there = shlex.join(("env", "PYTHONSAFEPATH=1", *given, *command, "--host"))
        return ("sh", "-c", _BY_SSH, "sh", " ".join(hosts), there)
    more = (word for one in given for word in ("-x", one))
    where = ("-np", count, "-H", ",".join(f"{host}:1" for host in hosts), "--bind-to", "none")
    return ("mpirun", *where, *more, *command)


def _against(settings: CollectiveSettings, machine: GpuMachine) -> str | None:
    if PYTHON not in machine.installed:
        return f"{machine.suite.python} does not run there, which keeps NCCL's log"
    if settings.several and machine.torch is None:
        return "needs PyTorch, a process for each GPU"
    if not settings.several and "all_reduce_perf" not in machine.installed:
        return "all_reduce_perf is not installed, which drives all GPUs from one process"
    if settings.file and machine.suite.topology is None:
        return machine.suite.why_no_topology
    if settings.first_node and len(machine.nodes) < 2:
        return "the machine has one node"
    return None


def _test(settings: CollectiveSettings, machine: GpuMachine) -> BenchTest:
    repeats, options = _EXPERIMENT_REPEATS[machine.suite.depth], machine.suite
    tool = machine.nccl_tests(_EXPERIMENT_WARMUPS, repeats)
    if settings.several:
        torch = machine.all_reduce("", repeats, "none", peers=settings.peers)
        tool = ("torch", *torch.argv[2:])
    words: tuple[str, ...] = ("--gpus", str(len(machine.gpus)))
    node = machine.nodes[0].index if settings.first_node else None
    if node is not None:
        words += ("--bind", str(node))
    if settings.file and options.topology is not None:
        words += ("--topology", options.topology)
    variables = machine.environment(peers=settings.peers)
    variables += (("NCCL_ALGO", "Ring"),) if settings.ring else ()
    return BenchTest(
        id=f"collectives: {settings.name}",
        group=Group.COLLECTIVES,
        argv=(options.python, "-", *words, "--", *tool),
        seconds=EXPERIMENT_TEST_S,
        timeout_s=120 + 20 * EXPERIMENT_TEST_S,
        environment=variables,
        reads=Reader.COLLECTIVE,
        program=_PROGRAM,
        node=node,
        variant=settings.name,
        settings=settings,
    )
