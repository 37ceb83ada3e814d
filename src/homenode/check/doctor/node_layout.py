"""NodeLayout: firmware settings that hide where cores, memory and devices are."""

from collections.abc import Iterator

from homenode.catalogue import finding
from homenode.findings import Finding
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Core, Host, NumaNode, Package
from homenode.wording import number_list

_MANY_LLCS = 4
_FIRMWARE = "the host's ACPI tables (SRAT, SLIT)"


def layout_findings(host: Host, *, with_advice: bool = True) -> Iterator[Finding]:
    """Nodes that span packages or many LLCs, CPUs without memory, GPUs without a node.

    with_advice: also what is a choice of the operator and no fault, such as NPS1.
    """
    for node in () if host.nodes_assumed else host.nodes:
        packages = [package for package in host.packages if not package.pus.isdisjoint(node.pus)]
        llcs = [llc for llc in host.llcs if not llc.pus.isdisjoint(node.pus)]
        if len(packages) > 1 and not _are_cores(packages, host.cores):
            yield finding(
                "node-spans-packages",
                f"node {node.index}",
                expected="at least one node for each package",
                observed=f"packages {number_list(package.index for package in packages)}, "
                f"{len(llcs)} last-level caches",
                source=_FIRMWARE,
            )
        elif with_advice and len(llcs) >= _MANY_LLCS and _is_whole_package(node, packages):
            yield finding(
                "node-spans-llcs",
                f"node {node.index}",
                expected="nodes that show which memory is near which cores",
                observed=f"one node for {len(llcs)} last-level caches",
                source=_FIRMWARE,
            )
    yield from _without(host)


def _are_cores(packages: list[Package], cores: tuple[Core, ...]) -> bool:
    """True where each package is but one core: partitions of POWER and s390 number their packages
    so, and VMs whose vCPUs are sockets. Such a package has no memory of its own."""
    return all(
        sum(not core.pus.isdisjoint(package.pus) for core in cores) == 1 for package in packages
    )


def _is_whole_package(node: NumaNode, packages: list[Package]) -> bool:
    return bool(packages) and packages[0].pus == node.pus


def _without(host: Host) -> Iterator[Finding]:
    with_pus = [node for node in host.nodes if node.pus]
    bare = [node for node in with_pus if node.memory_bytes == 0]
    # Where no node has both, memory of another kind stands in for all: that is how it was built.
    if bare and len(bare) < len(with_pus):
        yield finding(
            "node-without-memory",
            f"node {number_list(node.index for node in bare)}",
            expected="memory next to the cores",
            observed="cores and no memory",
            source=_FIRMWARE,
        )
    if len([node for node in host.nodes if node.pus]) < 2:
        return
    gpus = [d for d in host.devices_of_kind(DeviceKind.GPU) if d.node is None]
    for named in sorted(
        {gpu.firmware_node for gpu in gpus}, key=lambda node: -1 if node is None else node
    ):
        lost = [gpu.bdf for gpu in gpus if gpu.firmware_node == named]
        yield finding(
            "gpu-node-unknown",
            f"GPU {', '.join(map(str, lost[:16]))}",
            expected="a NUMA node",
            observed="numa_node is -1"
            if named is None
            else f"numa_node is {named}, which has no CPUs and is as near to several nodes",
            source="/sys/bus/pci/devices/BDF/numa_node",
        )
