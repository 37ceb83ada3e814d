"""numactl: a host of which only nodes, PUs, memory and distances are known."""

from homenode.cpuset import CpuSet
from homenode.gap import Gap
from homenode.machine.tools.numactl import NumactlHardware
from homenode.machine.topology import CpuModel, Host, NumaNode, assemble_pus


def host_from_numactl(read: NumactlHardware, name: str) -> Host:
    """The host that `numactl -H` shows: no cores, caches, packages or devices."""
    reason = "numactl shows nodes only"
    nodes = tuple(
        NumaNode(
            index=node.index,
            pus=node.pus,
            memory_bytes=node.size_bytes,
            memory_free_bytes=node.free_bytes,
        )
        for node in read.nodes
    )
    every = CpuSet.union(node.pus for node in nodes)
    pus = assemble_pus(
        every,
        every,
        cores=(),
        llcs=(),
        nodes=nodes,
        packages=(),
        die_of_pu={},
        disallowed=CpuSet(),
    )
    return Host(
        name=name,
        architecture=None,
        cpu=CpuModel(None, None),
        packages=(),
        nodes=nodes,
        distances=read.distances,
        llcs=(),
        cores=(),
        pus=pus,
        gaps=(Gap("cores, LLCs, packages and PCI functions", reason), *read.gaps),
    )
