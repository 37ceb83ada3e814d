"""Confinement: a machine as a run may use it: some of its PUs, some of its nodes.

A job's cpuset, and PUs or nodes that were asked for, are the same thing to the suite: a smaller
machine. What lies outside of it is not measured, and no test is bound to it.
"""

from collections.abc import Mapping
from dataclasses import replace

from homenode.cpuset import CpuSet
from homenode.errors import UsageError
from homenode.measure.model import PROBE, BenchTest
from homenode.snapshot.protocol import Snapshot
from homenode.topology import Host

_STATUS = "/proc/self/status"


def usable_pus(host: Host) -> CpuSet:
    """PUs that a process of ours may run on."""
    return CpuSet(pu.index for pu in host.pus if pu.online and pu.allowed)


def allowed_nodes(snapshot: Snapshot) -> tuple[int, ...] | None:
    """Nodes that a cpuset lets our memory be on; None = unknown."""
    listed = _listed(snapshot, "Mems_allowed_list")
    return None if listed is None else tuple(listed)


def affinity(snapshot: Snapshot) -> CpuSet | None:
    """PUs that our threads may be on: by the cpuset, and by taskset or srun; None as above.

    A host is discovered by its cgroups alone: where a VM may run, taskset does not say.
    """
    return _listed(snapshot, "Cpus_allowed_list") or None


def _listed(snapshot: Snapshot, field: str) -> CpuSet | None:
    for line in (snapshot.read_text(_STATUS) or "").splitlines():
        key, _, value = line.partition(":")
        if key == field:
            return CpuSet.parse(value, _STATUS)
    return None


def kept_to(host: Host, pus: CpuSet | None) -> Host:
    """The machine of which only these PUs are allowed; None = as it is."""
    if pus is None:
        return host
    return replace(
        host, pus=tuple(replace(pu, allowed=pu.allowed and pu.index in pus) for pu in host.pus)
    )


def keeps_to_nodes(test: BenchTest) -> bool:
    """Whether a test can be kept to some nodes. The probe's matrices take all that there are."""
    return test.argv[0] != PROBE or "--matrix" not in test.argv


def confined(host: Host, pus: CpuSet | None, nodes: tuple[int, ...] | None) -> Host:
    """The machine with these PUs and nodes alone; None = all that may be used.

    Raises UsageError for what is not there, or is kept from us by a cpuset.
    """
    usable = usable_pus(host)
    if pus is not None and not pus <= usable:
        raise UsageError(
            f"--pus {pus}: expected PUs of {usable}, found {pus - usable} next to them",
            hint="others are offline, absent, or kept from us by a cpuset or an affinity",
        )
    wanted = usable if pus is None else pus
    if nodes is not None:
        known = {int(node.index): node for node in host.nodes}
        missing = [number for number in nodes if number not in known]
        if missing:
            raise UsageError(
                f"--nodes: expected nodes of {', '.join(map(str, known))}, found "
                f"{', '.join(map(str, missing))}"
            )
        wanted &= CpuSet.union(known[number].pus for number in nodes)
    if not wanted:
        raise UsageError("--pus, --nodes: expected PUs to measure on, found none in both")
    return replace(
        host,
        pus=tuple(replace(pu, allowed=pu.allowed and pu.index in wanted) for pu in host.pus),
        nodes=tuple(
            replace(node, pus=node.pus & wanted)
            for node in host.nodes
            if nodes is None or int(node.index) in nodes
        ),
    )


def as_bound(test: BenchTest) -> BenchTest:
    """A test that stays where its job is: nvbandwidth else moves itself to the GPU's PUs."""
    others = tuple(as_bound(one) for one in test.alternatives)
    return replace(test, argv=_staying(test.argv), alternatives=others)


def _staying(argv: tuple[str, ...]) -> tuple[str, ...]:
    if "nvbandwidth" not in argv or "-d" in argv:
        return argv
    at = argv.index("nvbandwidth") + 1
    return (*argv[:at], "-d", *argv[at:])


def bound(
    test: BenchTest,
    pus: CpuSet,
    nodes: tuple[int, ...] | None,
    pus_of_node: Mapping[int, CpuSet],
) -> BenchTest:
    """A test kept to these PUs and nodes. The probe pins its own threads; taskset keeps others,
    and numactl their memory.

    pus_of_node: those of them that each node has.
    """
    return replace(
        test,
        argv=_bound_argv(test, pus, nodes, pus_of_node),
        alternatives=tuple(bound(one, pus, nodes, pus_of_node) for one in test.alternatives),
    )


def _bound_argv(
    test: BenchTest,
    pus: CpuSet,
    nodes: tuple[int, ...] | None,
    pus_of_node: Mapping[int, CpuSet],
) -> tuple[str, ...]:
    if test.argv[0] == PROBE:
        takes_node = test.argv[1] in ("bandwidth", "latency", "loaded-latency")
        if nodes is not None and len(nodes) == 1 and takes_node and "--matrix" not in test.argv:
            return (*test.argv, "--node", str(nodes[0]))
        return test.argv
    argv = _staying(test.argv)
    if argv[0] == "numactl" and test.node is not None:
        # numactl takes all PUs of the node: what it starts is kept to ours.
        at = next(n for n, word in enumerate(argv) if n > 0 and not word.startswith("-"))
        ours = pus_of_node.get(int(test.node), pus)
        return (*argv[:at], "taskset", "-c", str(ours), *argv[at:])
    memory = () if nodes is None else ("numactl", f"--membind={','.join(map(str, nodes))}")
    return (*memory, "taskset", "-c", str(pus), *argv)
